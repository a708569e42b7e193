"""Projections: against float64, in the files, and in what a run refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TEXTS, read_96, tiny_request

import harvest
from harvest.errors import RequestError
from harvest.input.directions import tensor_object
from harvest.model import capture
from harvest.request import HarvestRequest


def request(width: int, n_directions: int = 5, **fields: Any) -> tuple[HarvestRequest, Any]:
    """A request that projects, and its directions in float64, of length 1."""
    values = np.random.default_rng(1).normal(size=(n_directions, width)).astype(np.float32)
    body = {"model": "tiny", "prompts": TEXTS, "layers": "all", "project_onto": tensor_object(values), **fields}
    return HarvestRequest.check(body), values / np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)


def check_projections(run: harvest.Run, streams: harvest.Run, unit: Any, bound: float) -> None:
    """Every projection is the stream's, taken in float64, to within a share of the stream's norm."""
    for number in range(run.n_prompts):
        stream = streams.prompt(number).double().numpy()
        error = np.abs(run.prompt(number).double().numpy() - stream @ unit.T)
        assert (error / np.linalg.norm(stream, axis=2, keepdims=True)).max() < bound


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_projections_are_right_to_1e_5_also_where_the_model_computes_in_bfloat16(compute: Any, tmp_path: Path) -> None:
    asked, unit = request(64)
    harvest.run(asked, tmp_path / "projected", harvest.Engine(compute_dtype=compute))
    harvest.run(tiny_request(), tmp_path / "streams", harvest.Engine(compute_dtype=compute, store_dtype="float32"))
    run = harvest.open(tmp_path / "projected")
    assert run.dtype == torch.float32
    check_projections(run, harvest.open(tmp_path / "streams"), unit, 1e-5)


@pytest.mark.smollm2
def test_projections_of_smollm2(smollm2: Path, tmp_path: Path) -> None:
    prompts = read_96()[1:3]
    asked, unit = request(576, 64, model=str(smollm2), prompts=prompts, layers=[7, 22])
    harvest.run(asked, tmp_path / "projected")
    streams = HarvestRequest.check({"model": str(smollm2), "prompts": prompts, "layers": [7, 22]})
    harvest.run(streams, tmp_path / "streams", harvest.Engine(store_dtype="float32"))
    check_projections(harvest.open(tmp_path / "projected"), harvest.open(tmp_path / "streams"), unit, 1e-5)


def test_what_a_run_of_projections_writes(tmp_path: Path) -> None:
    import zarr
    from zarr.storage import ZipStore

    asked, _ = request(64, shard_size=4)
    job = harvest.run(asked, tmp_path / "run")
    run = harvest.open(tmp_path / "run")
    assert job.result is not None
    assert job.result.contents == run.manifest.contents == "projections"
    assert run.manifest.projection is not None
    assert run.manifest.projection.model_dump(exclude={"note"}) == {"n_directions": 5, "normalized": True}
    assert run.manifest.dtype == "float32"
    assert run.prompt(6).shape == (4, 70, 5)
    group = zarr.open_group(ZipStore(tmp_path / "run" / "shards" / "shard_00000.zarr.zip", mode="r"), mode="r")
    assert group["projections"].metadata.dimension_names == ("layer", "token", "direction")
    assert group["token_sum"].metadata.dimension_names == ("layer", "direction")
    assert "activations" not in group
    values = np.concatenate([run.prompt(i)[:, 1:].double().numpy() for i in range(run.n_prompts)], axis=1)
    np.testing.assert_allclose(run.stats.mean, values.mean(axis=1), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(run.stats.std, values.std(axis=1), rtol=1e-5)


def test_the_request_of_a_run_makes_the_same_run_again(tmp_path: Path) -> None:
    asked, _ = request(64)
    first = harvest.run(asked, tmp_path / "run")
    again = HarvestRequest.model_validate_json((tmp_path / "run" / "request.json").read_bytes())
    assert harvest.run(again, tmp_path / "run").job_id == first.job_id


def test_rows_are_widened_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_ROWS_WIDENED", 7)
    rows, directions = torch.randn(50, 16), torch.randn(3, 16)
    torch.testing.assert_close(capture.project(rows, directions), rows @ directions.T)


def test_what_a_run_of_projections_refuses(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="project_onto: directions of 63 values were given, but the hidden size of tiny is 64"):
        harvest.run(request(63)[0], tmp_path / "run")
    with pytest.raises(RequestError, match="store_dtype: bfloat16 was given, but projections are stored as float32"):
        harvest.run(request(64)[0], tmp_path / "run", harvest.Engine(store_dtype="bfloat16"))
    assert not (tmp_path / "run").exists()
