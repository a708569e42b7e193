"""A run as one lazy xarray dataset: what it answers, and what it reads for that."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_request
from test_either_kind import make_api_folder

import harvest
from harvest.input.directions import tensor_object
from harvest.reading import shard as shard_module


def whole(run: harvest.Run) -> np.ndarray:
    """All rows of a run, [layer, token, hidden], by the reader of prompts."""
    return torch.cat([run.prompt(i) for i in range(run.n_prompts)], dim=1).float().numpy()


def test_it_has_the_axes_and_names_of_the_run(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    data = run.xarray()
    assert dict(data.sizes) == {"layer": 4, "token": 248, "hidden": 64, "prompt_edge": 10}
    assert data.activations.dims == ("layer", "token", "hidden")
    assert data.activations.dtype == np.float32
    assert data.layer.values.tolist() == run.layers
    assert data.attrs["model"] == "tiny"
    tokens = [(prompt, position, token) for prompt in range(9) for position, token in enumerate(run.token_ids(prompt).tolist())]
    assert list(zip(data.prompt.values, data.position.values, data.token_id.values, strict=True)) == tokens


def test_any_selection_answers_what_numpy_answers(tiny_run: Path, chunked_run: Path) -> None:
    for run in (harvest.open(tiny_run), harvest.open(chunked_run)):
        data, rows = run.xarray().activations, whole(run)
        n = rows.shape[1]
        assert np.array_equal(data.values, rows)
        for key in [
            np.s_[1],
            np.s_[:, 5],
            np.s_[2, 3, 4],
            np.s_[1:3, 40:200:7, ::2],
            np.s_[3, ::-1, 5:1:-1],
            np.s_[0, n - 1 :],
            np.s_[0, 7:7],
            np.s_[:, :, 10],
        ]:
            assert np.array_equal(data[key].values, rows[key]), key
        picked = [n - 1, 3, 3, -2, 100]
        assert np.array_equal(data.isel(layer=[3, 0], token=picked, hidden=[9, 1]).values, rows[[3, 0]][:, picked][:, :, [9, 1]])
        # A selection of a selection, before anything is read.
        assert np.array_equal(data.sel(layer=2).isel(token=slice(10, 90)).isel(token=[5, 1]).values, rows[2, [15, 11]])


def test_a_prompt_is_cut_out_by_its_offsets(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    data = run.xarray()
    for i in range(run.n_prompts):
        prompt = data.isel(token=slice(*data.prompt_offsets.values[i : i + 2]))
        assert np.array_equal(prompt.activations.values, run.prompt(i).float().numpy())
        assert prompt.token_id.values.tolist() == run.token_ids(i).tolist()


def test_it_reads_nothing_before_it_is_asked_and_then_only_that(chunked_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int, int]] = []
    layer = shard_module.ZarrShard.layer

    def noted(self: shard_module.ZarrShard, position: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        read.append((self.prompts[0], position, start))
        return layer(self, position, start, stop)

    monkeypatch.setattr(shard_module.ZarrShard, "layer", noted)
    chunked = harvest.open(chunked_run)
    data = chunked.xarray()
    picked = data.sel(layer=2)
    repr(picked)
    assert read == []
    picked.activations.values  # noqa: B018
    assert chunked.axis.n_chunks > 2 == chunked.n_shards
    assert len(read) == len(set(read)) == chunked.axis.n_chunks
    assert {position for _, position, _ in read} == {2}
    read.clear()
    picked.activations[-1].values  # noqa: B018
    assert len(read) == 1


def test_a_shard_that_is_not_asked_for_need_not_be_there(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "run" / "shards" / "shard_00002.zarr.zip").unlink()
    data = harvest.open(tmp_path / "run").xarray().isel(token=slice(0, 60))
    assert data.activations.values.shape == (4, 60, 64)
    assert len(data.token_id.values) == 60


def test_projections_and_float16_have_their_own_axis_and_type(tmp_path: Path) -> None:
    directions = tensor_object(np.eye(64, dtype=np.float32)[[3, 7]])
    harvest.run(tiny_request(["one", "and two"], project_onto=directions), tmp_path / "projected")
    harvest.run(tiny_request(["one", "and two"]), tmp_path / "half", harvest.Engine(store_dtype="float16"))
    projected, half = (harvest.open(tmp_path / name).xarray() for name in ("projected", "half"))
    assert (projected.projections.dims, projected.projections.dtype) == (("layer", "token", "direction"), np.float32)
    assert half.activations.dtype == np.float16
    np.testing.assert_allclose(projected.projections, half.activations[:, :, [3, 7]], rtol=1e-3, atol=1e-4)


def test_a_run_of_the_api_reads_alike(tiny_run: Path, tmp_path: Path) -> None:
    own = harvest.open(tiny_run)
    api = harvest.open(make_api_folder(own, tmp_path / "api"))
    assert api.xarray().equals(own.xarray())


def test_it_can_be_pickled_and_opened_elsewhere(tiny_run: Path) -> None:
    data = harvest.open(tiny_run).xarray()
    assert pickle.loads(pickle.dumps(data)).equals(data)


def test_without_xarray_the_error_says_how_to_install_it(tiny_run: Path) -> None:
    code = f"import sys; sys.modules['xarray'] = None; import harvest; harvest.open({str(tiny_run)!r}).xarray()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "HarvestError: xarray: the package is not installed; pip install xarray" in done.stderr
