"""Runs and shards read back."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import TEXTS

import harvest
from harvest.errors import NotARunError


def test_a_run_and_its_shards_answer_the_same(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    assert (run.layers, run.n_prompts, run.n_shards, run.width) == ([0, 1, 2, 3], len(TEXTS), 3, 64)
    assert [run.text(i) for i in range(run.n_prompts)] == TEXTS
    for index in range(run.n_shards):
        with harvest.open_shard(tiny_run / "shards" / f"shard_{index:05d}.zarr.zip") as shard:
            assert set(shard) == {f"{kind}_{i}" for kind in ("prompt", "tokens") for i in range(4 * index, min(4 * index + 4, len(TEXTS)))}
            assert len(shard) == len(list(shard))
            for number in shard.prompts:
                assert torch.equal(shard[f"prompt_{number}"], run.prompt(number))
                assert torch.equal(shard[f"tokens_{number}"], run.token_ids(number))


def test_a_prompt_is_real_bfloat16_and_its_ids_int32(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    stream, ids = run.prompt(3), run.token_ids(3)
    assert (stream.dtype, stream.shape) == (torch.bfloat16, (4, 10, 64))
    assert (ids.dtype, ids.tolist()) == (torch.int32, [256, *TEXTS[3].encode()])


def test_a_layer_is_all_tokens_in_order_read_shard_by_shard(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    layer = run.layer(2)
    whole = torch.cat([run.prompt(i)[2] for i in range(run.n_prompts)])
    assert layer.shape == tuple(whole.shape)
    assert len(layer) == run.n_tokens == 248
    parts = list(layer)
    assert len(parts) == run.n_shards
    assert torch.equal(torch.cat(parts), whole)
    for start, stop in [(0, 1), (0, 248), (50, 200), (247, 248), (100, 100), (-5, None), (300, 400)]:
        assert torch.equal(layer[start:stop], whole[start:stop]), (start, stop)
    with pytest.raises(TypeError, match="slice of tokens"):
        layer[3]  # type: ignore[index]
    with pytest.raises(ValueError, match="step 1"):
        layer[::2]


def test_a_slice_opens_only_the_shards_that_hold_it(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "run" / "shards" / "shard_00002.zarr.zip").unlink()
    run = harvest.open(tmp_path / "run")
    assert run.layer(0)[:60].shape == (60, 64)
    with pytest.raises(NotARunError, match="no such shard file"):
        run.layer(0)[-1:]


def test_stats_and_job(tiny_run: Path) -> None:
    run = harvest.open(tiny_run)
    assert run.stats.mean.shape == run.stats.std.shape == (4, 64)
    assert set(run.stats.mean_token_norm) == {0, 1, 2, 3}
    assert run.job is not None
    assert run.job.status == "done"


@pytest.mark.parametrize("number", [-1, 9])
def test_a_prompt_that_is_not_there(number: int, tiny_run: Path) -> None:
    with pytest.raises(IndexError, match="holds prompts 0 to 8"):
        harvest.open(tiny_run).prompt(number)


def test_a_layer_that_is_not_there(tiny_run: Path) -> None:
    with pytest.raises(KeyError, match=r"it holds \[0, 1, 2, 3\]"):
        harvest.open(tiny_run).layer(7)


@pytest.mark.parametrize("name", ["prompt_99", "prompt_x", "prompt", "weights_0", "tokens_-1"])
def test_a_shard_has_no_other_names(name: str, tiny_run: Path) -> None:
    with harvest.open_shard(tiny_run / "shards" / "shard_00000.zarr.zip") as shard, pytest.raises(KeyError):
        shard[name]


def test_what_is_no_run(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="no such run folder"):
        harvest.open(tmp_path / "nowhere")
    with pytest.raises(NotARunError, match="holds no manifest"):
        harvest.open(tmp_path)
    shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(NotARunError, match="its job is done; run the same command again"):
        harvest.open(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").write_text("{}")
    with pytest.raises(NotARunError, match="is no manifest"):
        harvest.open(tmp_path / "run")


def test_what_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("no ZIP file")
    with pytest.raises(NotARunError, match="is no shard file"):
        harvest.open_shard(tmp_path / "text.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("notes.txt", "a ZIP file of something else")
    with pytest.raises(NotARunError, match="is no shard file"):
        harvest.open_shard(tmp_path / "other.zip")
    with pytest.raises(NotARunError, match="no such shard"):
        harvest.open_shard(tmp_path / "nowhere.zip")
