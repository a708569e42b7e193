"""A shard file as other programs read it, in one piece or in several."""

import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr
from conftest import TEXTS, tiny_request
from zarr.storage import ZipStore

import harvest
from harvest.output import layout as layout_module
from harvest.output.layout import ShardLayout
from harvest.output.shard import ShardFile, read_sums
from harvest.output.stats import widen

DTYPES = ["bfloat16", "float16", "float32"]


def write_shard(path: Path, rows_LTW: Any, lengths: list[int], pieces: list[int], store_dtype: str = "bfloat16", codec: str = "lz4") -> Any:
    """Write rows as a shard in pieces of so many tokens; answers the layout."""
    layout = ShardLayout("activations", tuple(range(len(rows_LTW))), rows_LTW.shape[2], store_dtype, codec, {"model": "test"})  # type: ignore[arg-type]
    ids = np.arange(sum(lengths), dtype=np.int32)
    with ThreadPoolExecutor(2) as encoders:
        shard = ShardFile(path, layout, ids, np.array(lengths), 64, encoders)
        start = 0
        for piece in pieces:
            shard.append(rows_LTW[:, start : start + piece])
            start += piece
        shard.publish()
    return layout


def random_rows(n_tokens: int, store_dtype: str = "bfloat16", width: int = 24) -> Any:
    rows = torch.randn(3, n_tokens, width, generator=torch.Generator().manual_seed(0)).to(getattr(torch, store_dtype))
    return (rows.view(torch.uint16) if store_dtype == "bfloat16" else rows).numpy()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of at most 1 KiB, so that a small shard has many."""
    monkeypatch.setattr(layout_module, "MAX_CHUNK_BYTES", 1024)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
@pytest.mark.parametrize("store_dtype", DTYPES)
def test_zarr_xarray_and_tensorstore_read_the_same_numbers(store_dtype: str, codec: str, tmp_path: Path) -> None:
    rows = random_rows(101, store_dtype)
    path = tmp_path / "shard_00000.zarr.zip"
    layout = write_shard(path, rows, [40, 60, 1], [101], store_dtype, codec)
    assert layout.chunk_tokens(101) < 101

    group = zarr.open_group(ZipStore(path, mode="r"), mode="r", use_consolidated=True)
    assert np.array_equal(group["activations"][:], rows)
    assert group["activations"].attrs["logical_dtype"] == store_dtype
    assert group["prompt_offsets"][:].tolist() == [0, 40, 100, 101]
    assert group["prompt_indices"][:].tolist() == [64, 65, 66]
    assert group["token_ids"][:].tolist() == list(range(101))

    dataset = xarray.open_zarr(ZipStore(path, mode="r"), consolidated=True, chunks=None)
    assert dataset["activations"].dims == ("layer", "token", "hidden")
    assert np.array_equal(dataset["activations"].values, rows)

    spec = {"driver": "zarr3", "kvstore": {"driver": "zip", "base": f"file://{path}", "path": "activations/"}}
    assert np.array_equal(tensorstore.open(spec, read=True).result().read().result(), rows)

    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))
        assert archive.testzip() is None
        archive.extractall(tmp_path / "unzipped")
    assert np.array_equal(zarr.open_array(tmp_path / "unzipped" / "activations", mode="r")[:], rows)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("pieces", [[101], [1, 100], [21, 21, 21, 21, 17], [50, 50, 1], [1] * 101, [19, 3, 2, 77]])
def test_pieces_make_the_same_numbers_and_sums_as_one(pieces: list[int], tmp_path: Path) -> None:
    rows = random_rows(101)
    layout = write_shard(tmp_path / "whole.zip", rows, [40, 60, 1], [101])
    write_shard(tmp_path / "pieces.zip", rows, [40, 60, 1], pieces)
    assert np.array_equal(zarr.open_group(ZipStore(tmp_path / "pieces.zip", mode="r"), mode="r")["activations"][:], rows)
    for ours, whole in zip(read_sums(tmp_path / "pieces.zip", layout), read_sums(tmp_path / "whole.zip", layout), strict=True):
        assert np.array_equal(ours, whole), "sums are taken chunk by chunk, so pieces do not change even their last bit"


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("store_dtype", DTYPES)
def test_sums_are_those_of_the_stored_values_without_each_first_token(store_dtype: str, tmp_path: Path) -> None:
    rows = random_rows(101, store_dtype)
    layout = write_shard(tmp_path / "a.zip", rows, [40, 60, 1], [30, 71], store_dtype)
    values = np.delete(widen(rows, store_dtype), [0, 40, 100], axis=1)
    token_sum, token_sum_sq, token_norm_sum, token_count = read_sums(tmp_path / "a.zip", layout)
    np.testing.assert_allclose(token_sum, values.sum(axis=1), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(token_sum_sq, (values**2).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(token_norm_sum, np.linalg.norm(values, axis=2).sum(axis=1), rtol=1e-12)
    assert token_count.tolist() == [values.shape[1]] * len(values)


def test_widening_bfloat16_is_exact_for_every_bit_pattern() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(bits).view(torch.bfloat16).double().numpy()
    assert np.array_equal(widen(bits, "bfloat16"), expected, equal_nan=True)


@pytest.mark.parametrize("n_tokens", [1, 7, 1000, 1821, 4097, 100_000])
@pytest.mark.parametrize("width", [1, 64, 576, 4096, 16384, 3_000_000])
def test_chunks_are_at_most_four_mib_and_waste_next_to_nothing(n_tokens: int, width: int) -> None:
    layout = ShardLayout("activations", (0,), width, "bfloat16", "none", {})
    chunk = layout.chunk_tokens(n_tokens)
    n_chunks = -(-n_tokens // chunk)
    assert 1 <= chunk <= n_tokens
    assert chunk == 1 or chunk * width * 2 <= 4 << 20
    assert n_chunks * chunk - n_tokens < n_chunks
    assert n_chunks == 1 or chunk == 1 or chunk * width * 2 > 1 << 20


def test_a_shard_explains_itself(tiny_run: Path) -> None:
    with zipfile.ZipFile(tiny_run / "shards" / "shard_00001.zarr.zip") as archive:
        root = json.loads(archive.read("zarr.json"))
        for name, document in root["consolidated_metadata"]["metadata"].items():
            assert json.loads(archive.read(f"{name}/zarr.json")) == document
            assert document["dimension_names"], name
            assert document["attributes"]["description"], name
    assert root["attributes"]["model"] == "tiny"
    assert root["attributes"]["layers"] == [0, 1, 2, 3]
    assert "before the final norm" in root["attributes"]["residual_stream_convention"]


def test_two_runs_of_a_request_write_the_same_bytes(tiny_run: Path, tmp_path: Path) -> None:
    harvest.run(tiny_request(shard_size=4), tmp_path / "again")
    files = sorted(path.relative_to(tiny_run) for path in tiny_run.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*") if path.is_file())
    for file in files:
        first, second = (tiny_run / file).read_bytes(), (tmp_path / "again" / file).read_bytes()
        if file.suffix == ".zip" or file.name in ("stats.safetensors", "request.json"):
            assert first == second, file
        if file.parts[0] == "records":
            times = {"published_at": "", "modified_ns": 0}
            assert json.loads(first) | times == json.loads(second) | times


def test_a_shard_larger_than_the_window_budget_is_written_in_pieces(tiny_run: Path, tmp_path: Path) -> None:
    # 512 bytes a token: a window of half the budget holds 20 tokens, and the longest prompt has 70.
    engine = harvest.Engine(window_bytes=2 * 20 * 512, batch_tokens=64)
    harvest.run(tiny_request(shard_size=4096), tmp_path / "run", engine)
    run, reference = harvest.open(tmp_path / "run"), harvest.open(tiny_run)
    assert run.n_shards == 1
    for number in range(len(TEXTS)):
        assert torch.allclose(run.prompt(number).float(), reference.prompt(number).float(), rtol=1e-2, atol=1e-2)
