"""Batches for training: every token once, at random and the same by seed, under workers and ranks, in bounded memory."""

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from conftest import tiny_request
from test_either_kind import make_api_folder

import harvest
from harvest.errors import NotARunError
from harvest.input.directions import tensor_object
from harvest.reading.stored import StoredLayer

MIB = 1 << 20


def rows_of(run: harvest.Run, layer: int, drop_first: bool = True) -> torch.Tensor:
    """What a pass must hand out, in the order of the run, by the readers of layers and of prompts."""
    starts = np.cumsum([0] + [tensor.shape[1] for shard in run.manifest.shards for tensor in shard.tensors if len(tensor.shape) == 3])
    rows = run.layer(layer)[:]
    assert torch.equal(rows[starts[-2] :], run.prompt(run.n_prompts - 1)[run.layer_position(layer)])
    return rows[np.delete(np.arange(len(rows)), starts[:-1])] if drop_first else rows


def in_order(rows: torch.Tensor) -> np.ndarray:
    """Rows sorted by their bytes, to compare as a multiset."""
    return np.sort(np.ascontiguousarray(rows.float().numpy()).view(f"V{4 * rows.shape[1]}").ravel())


def check_all_once(batches: list[torch.Tensor], expected: torch.Tensor) -> None:
    rows = torch.cat(batches)
    assert rows.shape == expected.shape
    assert np.array_equal(in_order(rows), in_order(expected))


@pytest.mark.parametrize("drop_first", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_hands_out_every_token_once(shuffle: bool, drop_first: bool, tiny_run: Path, chunked_run: Path) -> None:
    for path, batch_tokens in ((tiny_run, 50), (chunked_run, 4096), (chunked_run, 10**6)):
        run = harvest.open(path)
        dataset = harvest.torch_dataset(run, 2, batch_tokens, shuffle=shuffle, drop_first=drop_first)
        batches, expected = list(dataset), rows_of(run, 2, drop_first)
        check_all_once(batches, expected)
        assert dataset.n_tokens == len(expected) == run.n_tokens - run.n_prompts * drop_first
        assert {len(batch) for batch in batches[:-1]} <= {batch_tokens}
        assert len(batches) == dataset.count_batches() == -(-len(expected) // batch_tokens)
        assert {batch.dtype for batch in batches} == {torch.float32}
        assert torch.equal(torch.cat(batches), expected.float()) == (not shuffle)


def test_batches_are_drawn_from_far_apart(chunked_run: Path) -> None:
    dataset = harvest.torch_dataset(chunked_run, 1, 1000, with_tokens=True)
    for batch in itertools.islice(dataset, 10):
        # Of 320 prompts, 1,000 tokens in a row have some 10.
        assert len(batch.prompts.unique()) > 200


def test_the_seed_and_the_epoch_decide_the_order(chunked_run: Path) -> None:
    def first(seed: int, epoch: int) -> torch.Tensor:
        dataset = harvest.torch_dataset(chunked_run, 3, 500, seed=seed)
        dataset.set_epoch(epoch)
        return torch.cat(list(dataset))

    seen = {(seed, epoch): first(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    for (key_a, a), (key_b, b) in itertools.product(seen.items(), repeat=2):
        assert torch.equal(a, b) == (key_a == key_b)
    assert torch.equal(first(1, 1), seen[1, 1])


def test_two_passes_at_once_do_not_disturb_each_other(chunked_run: Path) -> None:
    dataset = harvest.torch_dataset(chunked_run, 0, 3000, drop_first=False, buffer_tokens=20_000)
    alone = list(dataset)
    for a, b, expected in zip(dataset, dataset, alone, strict=True):
        assert torch.equal(a, expected)
        assert torch.equal(b, expected)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_share_a_pass_and_learn_of_the_next(start: str, chunked_run: Path) -> None:
    dataset = harvest.torch_dataset(chunked_run, 1, 1000)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context=start, persistent_workers=True, timeout=100
    )
    passes = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        batches = list(loader)
        check_all_once(batches, rows_of(harvest.open(chunked_run), 1))
        assert len(batches) == dataset.count_batches(num_workers=2)
        passes.append(torch.cat(batches))
    assert torch.equal(passes[0], passes[2])
    assert not torch.equal(passes[0], passes[1])


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The chunks that are decoded in this process, by file and number."""
    read: list[tuple[str, int]] = []
    whole = StoredLayer.read

    def noted(self: StoredLayer, number: int, rows_TW: torch.Tensor) -> None:
        read.append((self.path.name, number))
        whole(self, number, rows_TW)

    monkeypatch.setattr(StoredLayer, "read", noted)
    return read


def test_ranks_share_a_pass_and_decode_each_chunk_once(chunked_run: Path, decoded: list[tuple[str, int]]) -> None:
    datasets = [harvest.torch_dataset(chunked_run, 1, 700, rank=rank, world_size=2) for rank in range(2)]
    of_ranks = [list(dataset) for dataset in datasets]
    check_all_once([batch for batches in of_ranks for batch in batches], rows_of(harvest.open(chunked_run), 1))
    assert all(of_ranks)
    assert len(decoded) == len(set(decoded)) == harvest.open(chunked_run).axis.n_chunks == 3


def test_ranks_beyond_the_chunks_get_nothing(chunked_run: Path) -> None:
    of_ranks = [list(harvest.torch_dataset(chunked_run, 1, 700, rank=rank, world_size=5)) for rank in range(5)]
    assert [bool(batches) for batches in of_ranks] == [True, True, True, False, False]
    check_all_once([batch for batches in of_ranks for batch in batches], rows_of(harvest.open(chunked_run), 1))


def test_drop_last_gives_every_rank_as_many_whole_batches(chunked_run: Path) -> None:
    counts = []
    for rank in range(2):
        dataset = harvest.torch_dataset(chunked_run, 1, 700, drop_last=True, rank=rank, world_size=2)
        batches = list(dataset)
        assert {len(batch) for batch in batches} == {700}
        assert len(batches) == dataset.count_batches()
        counts.append(len(batches))
    assert counts[0] == counts[1] > 5


def test_drop_last_that_leaves_nothing_is_an_error(chunked_run: Path) -> None:
    dataset = harvest.torch_dataset(chunked_run, 1, 700, drop_last=True, rank=0, world_size=8)
    with pytest.raises(ValueError, match="in 3 chunks make no whole batch of 700 for each of 8 ranks with 1 workers; take smaller"):
        next(iter(dataset))


DISTRIBUTED = """
import sys, torch, torch.distributed as dist, harvest
def main():
    path, out, rank, store, workers = sys.argv[1:]
    dataset = harvest.torch_dataset(path, 1, 700, drop_last=True)
    dist.init_process_group("gloo", init_method="file://" + store, rank=int(rank), world_size=2)
    start = "spawn" if int(workers) else None
    torch.save(list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=int(workers), multiprocessing_context=start)), out)
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_ranks_of_torch_distributed_are_found_also_by_spawned_workers(workers: str, chunked_run: Path, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(DISTRIBUTED)
    command = [sys.executable, str(tmp_path / "rank.py"), str(chunked_run)]
    ranks = [subprocess.Popen([*command, str(tmp_path / f"{rank}.pt"), str(rank), str(tmp_path / "store"), workers]) for rank in range(2)]
    try:
        assert [process.wait(200) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    expected = [list(harvest.torch_dataset(chunked_run, 1, 700, drop_last=True, rank=rank, world_size=2)) for rank in range(2)]
    for rank in range(2):
        batches = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(torch.cat(batches), torch.cat(expected[rank]))


def test_with_tokens_says_where_each_row_comes_from(tiny_run: Path, tmp_path: Path) -> None:
    own = harvest.open(tiny_run)
    for run in (own, harvest.open(make_api_folder(own, tmp_path / "api"))):
        dataset = harvest.torch_dataset(run, 2, 64, with_tokens=True, dtype=None)
        seen = set()
        for batch in dataset:
            assert batch.rows.dtype == torch.bfloat16
            for row, token, prompt, position in zip(batch.rows, *(column.tolist() for column in batch[1:]), strict=True):
                assert torch.equal(row, run.prompt(prompt)[2, position])
                assert token == run.token_ids(prompt)[position]
                seen.add((prompt, position))
        assert len(seen) == dataset.n_tokens == run.n_tokens - run.n_prompts
        assert all(position > 0 for _, position in seen)


def test_mean_and_std_are_those_of_the_rows_and_normalize_uses_them(chunked_run: Path) -> None:
    dataset = harvest.torch_dataset(chunked_run, 3, 5000)
    rows = torch.cat(list(dataset)).double()
    torch.testing.assert_close(dataset.mean.double(), rows.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dataset.std.double(), rows.std(0, correction=0), atol=1e-5, rtol=1e-5)
    normal = torch.cat(list(harvest.torch_dataset(chunked_run, 3, 5000, normalize=True)))
    torch.testing.assert_close(normal.double(), (rows - rows.mean(0)) / rows.std(0, correction=0), atol=1e-3, rtol=1e-3)


def test_a_value_that_never_changes_is_normalized_to_zero(tmp_path: Path) -> None:
    harvest.run(tiny_request(["a"]), tmp_path / "run")
    (row,) = harvest.torch_dataset(tmp_path / "run", 0, 1, normalize=True)
    assert torch.equal(row, torch.zeros(1, 64))


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_codec_and_type_reads_alike(codec: Any, dtype: Any, tmp_path: Path, decoded: list[tuple[str, int]]) -> None:
    harvest.run(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(store_dtype=dtype, codec=codec))
    run = harvest.open(tmp_path / "run")
    batches = list(harvest.torch_dataset(run, 1, 100, dtype=None))
    assert {batch.dtype for batch in batches} == {run.dtype} == {getattr(torch, dtype)}
    check_all_once(batches, rows_of(run, 1))
    assert len(decoded) == 3


def test_projections_come_by_direction(tmp_path: Path) -> None:
    directions = tensor_object(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))
    harvest.run(tiny_request(project_onto=directions), tmp_path / "run")
    run = harvest.open(tmp_path / "run")
    batches = list(harvest.torch_dataset(run, 1, 100))
    assert batches[0].shape == (100, 3)
    check_all_once(batches, rows_of(run, 1))


def test_a_run_of_the_api_reads_alike_and_a_packed_one_says_what_to_do(tiny_run: Path, tmp_path: Path) -> None:
    own = harvest.open(tiny_run)
    check_all_once(list(harvest.torch_dataset(make_api_folder(own, tmp_path / "api"), 1, 100)), rows_of(own, 1))
    packed = make_api_folder(own, tmp_path / "packed", packed=True)
    with pytest.raises(ValueError, match=r"its shards are gzipped.*unpack them once with harvest export"):
        harvest.torch_dataset(packed, 1)


def test_a_shard_that_another_tool_packed_is_read_by_zarr(tiny_run: Path, tmp_path: Path, decoded: list[tuple[str, int]]) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    path = tmp_path / "run" / "shards" / "shard_00001.zarr.zip"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    check_all_once(list(harvest.torch_dataset(tmp_path / "run", 1, 100)), rows_of(harvest.open(tiny_run), 1))
    assert len(decoded) == 2


def test_pickled_and_opened_elsewhere_it_goes_on(tiny_run: Path) -> None:
    dataset = harvest.torch_dataset(tiny_run, 1, 100, seed=3)
    dataset.set_epoch(5)
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(torch.cat(list(copy)), torch.cat(list(dataset)))
    assert repr(dataset) == "<TokenBatches of 100: layer 1 of run, 239 tokens>"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer": 9}, KeyError, r"layer 9 is not in this run; it holds \[0, 1, 2, 3\]"),
        ({"batch_tokens": 0}, ValueError, "batch_tokens is 1 or more; 0 was given"),
        ({"seed": -1}, ValueError, "seed is 0 or more; -1 was given"),
        ({"rank": 2}, ValueError, "both are given or neither; 2 of None was given"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank is from 0 to world_size - 1"),
        ({"dtype": torch.int8}, ValueError, "dtype is a floating type"),
        (
            {"batch_tokens": 100, "buffer_tokens": 50},
            ValueError,
            "buffer_tokens is [0-9]+ or more here, for a batch and the largest chunk; 50",
        ),
    ],
)
def test_what_it_refuses(change: dict[str, Any], error: type[Exception], message: str, tiny_run: Path) -> None:
    with pytest.raises(error, match=message):
        harvest.torch_dataset(tiny_run, **{"layer": 1, **change})


def test_an_epoch_below_zero_and_a_folder_that_is_no_run(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an epoch is 0 or more; -1"):
        harvest.torch_dataset(tiny_run, 1).set_epoch(-1)
    with pytest.raises(NotARunError, match="holds no manifest"):
        harvest.torch_dataset(tmp_path, 1)


def flip(path: Path) -> None:
    """Change a byte of a chunk of layer 1."""
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("activations/c/1/0/0").header_offset + 500
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "is damaged: the checksum of chunk 0"),
        (lambda path: path.unlink(), "no such shard file"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "is no shard file that can be read"),
        (lambda path: shutil.copy(path.with_name("shard_00002.zarr.zip"), path), "does not hold what manifest.json says"),
    ],
)
def test_a_damaged_shard_is_named(damage: Callable[[Path], Any], message: str, tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    damage(tmp_path / "run" / "shards" / "shard_00001.zarr.zip")
    with pytest.raises(NotARunError, match=rf"shard_00001.zarr.zip: .*{message}"):
        list(harvest.torch_dataset(tmp_path / "run", 1, 100))


def test_a_shard_that_shrinks_between_passes_is_named(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    dataset = harvest.torch_dataset(tmp_path / "run", 1, 100)
    list(dataset)
    os.truncate(tmp_path / "run" / "shards" / "shard_00001.zarr.zip", 20_000)
    with pytest.raises(NotARunError, match=r"shard_00001.zarr.zip: is damaged: it ends too early"):
        list(dataset)


# Reads a layer with a small buffer in a process of its own, and prints the most memory that it held before and after.
MEASURE = """
import resource, sys, harvest
dataset = harvest.torch_dataset(sys.argv[1], 3, 1000, buffer_tokens=18_000)
batches = iter(dataset)
next(batches)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
first, n = peak(), 0
for batch in batches:
    n += batch.nbytes
print(first, peak(), n)
"""


def test_memory_does_not_grow_with_the_run(chunked_run: Path, tmp_path: Path) -> None:
    # The same shards many times over: a run is what its manifest says.
    shutil.copytree(chunked_run, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    manifest["shards"] *= 10
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path / "run")], capture_output=True, text=True, check=True)
    first, last, n_bytes = map(int, done.stdout.split())
    assert n_bytes > 70 * MIB, "the rows must be many times what is allowed below"
    assert last < first + 16 * MIB, f"{last / MIB:.0f} MiB, and {first / MIB:.0f} MiB after the first batch"
