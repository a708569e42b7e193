"""The writers alone: synthetic streams at the shapes of llama-8b through harvest's own writers, against the plain write of the same bytes.

    python scripts/bench storage --out /path/on/the/disk --json storage.json

GB/s count the values before the codec. CPU seconds are those of the whole process, user and system. Every file is flushed to the disk
before the clock stops, and removed afterwards. The plain write of the same bytes goes before each measurement, off the clock.
"""

import argparse
import hashlib
import os
import resource
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import begin, load, median, rotated, say, write_json
from report import render
from synthetic import Case, cases, prompt_lengths, streams

from harvest.input.plan import Plan, make_plan
from harvest.input.tokens import Tokens
from harvest.output.codecs import CODECS
from harvest.output.folder import RunFolder
from harvest.output.layout import ShardLayout
from harvest.output.stats import sum_rows
from harvest.output.writers import WindowBuffer, Writers

_PLAIN = "plain write"
_SHARD_SIZE = 32
_WINDOW_BYTES = 512 << 20
_BATCH_TOKENS = 16384
_CHUNK_BYTES = 4 << 20


def main(arguments: list[str]) -> int:
    """Write every case with every codec, in turn."""
    parser = argparse.ArgumentParser(prog="bench storage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="values a case and a codec, in 10^9 bytes [default: 1]")
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    parser.add_argument("--codecs", default=",".join(CODECS), help="[default: %(default)s]")
    parser.add_argument("--hidden", type=int, default=4096, help="values a token and layer [default: 4096, llama-8b's]")
    parser.add_argument("--n-layers", type=int, default=32, help="decoder blocks [default: 32, llama-8b's]")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement of one core in memory [default: 0.5]")
    parser.add_argument("--out", type=Path, help="the folder whose disk is written to [default: a temporary one]")
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    options = parser.parse_args(arguments)
    measured = begin("storage", arguments) | {"gb": options.gb, "rounds": options.rounds, "hidden": options.hidden}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    writes, steps = [], []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.out) as work:
        for case in cases(options.hidden, options.n_layers):
            writes += _measure_case(case, options, Path(work))
            steps += _measure_steps(case, options.seconds)
    measured |= {"measurements": writes, "one_core": steps, "summary": _summarise(writes)}
    write_json(options.json, measured)
    print(render(measured))
    return 0


def _measure_case(case: Case, options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    token_bytes = case.layout("none").token_bytes
    lengths = prompt_lengths(max(1, round(options.gb * 1e9 / token_bytes)))
    plan = make_plan(lengths, _SHARD_SIZE, token_bytes, _WINDOW_BYTES, _BATCH_TOKENS)
    rows_LTW = streams(case, max(window.n_tokens for window in plan.windows))
    measured = []
    for turn in range(options.rounds):
        for way in rotated([_PLAIN, *options.codecs.split(",")], turn):
            folder = work / "run"
            # Written once before, off the clock: memory for so many bytes comes slowly the first time, in a virtual machine above all.
            folder.mkdir()
            _write_plainly(folder, plan, rows_LTW)
            shutil.rmtree(folder)
            folder.mkdir()
            load_before, before = load(), _cpu_s()
            started = time.perf_counter()
            if way == _PLAIN:
                _write_plainly(folder, plan, rows_LTW)
            else:
                _write_shards(folder, case.layout(way), plan, rows_LTW)
            seconds, cpu_s = time.perf_counter() - started, _cpu_s() - before
            stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
            entry: dict[str, Any] = {
                "case": case.name,
                "way": way,
                "round": turn,
                "load_before": load_before,
                "seconds": seconds,
                "cpu_s": cpu_s,
            }
            measured.append(entry | {"bytes": int(lengths.sum()) * token_bytes, "stored_bytes": stored, "shards": len(plan.shards)})
            say(f"round {turn + 1}: {case.name}, {way}: {measured[-1]['bytes'] / seconds / 1e9:.2f} GB/s")
    return measured


def _write_shards(folder: Path, layout: ShardLayout, plan: Plan, rows_LTW: npt.NDArray[Any]) -> None:
    """All shards through harvest's writers, as a run hands them over. Every window has the same rows, which nobody overwrites."""
    offsets = np.concatenate([[0], np.cumsum(plan.lengths)]).astype(np.int64)
    tokens = Tokens(np.arange(offsets[-1], dtype=np.int32), offsets, None, [], [])
    run = RunFolder(folder)
    run.make()
    with Writers(run, layout, tokens, {"bench": "storage"}, lambda _n_bytes: None) as writers:
        for window in plan.windows:
            writers.submit(window, WindowBuffer(rows_LTW[:, : window.n_tokens], lambda: None), lambda _shard: False)


def _write_plainly(folder: Path, plan: Plan, rows_LTW: npt.NDArray[Any]) -> None:
    """The same bytes to as many files, one after the other, each flushed to the disk once."""
    for window in plan.windows:
        for piece in window.pieces:
            is_first = piece.first == piece.shard.first
            with open(folder / f"shard_{piece.shard.index:05d}.bin", "wb" if is_first else "ab", buffering=0) as file:
                for rows_TW in rows_LTW[:, piece.row : piece.row + piece.n_tokens]:
                    rest = np.ascontiguousarray(rows_TW).data.cast("B")
                    while rest:
                        rest = rest[file.write(rest) :]
                if piece.is_last:
                    os.fsync(file.fileno())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _measure_steps(case: Case, seconds: float) -> list[dict[str, Any]]:
    """GB/s of one core, in memory, for each thing that happens to a chunk on its way."""
    itemsize = case.layout("none").numpy_dtype.itemsize
    rows_TW = streams(Case(case.name, (0,), case.width, case.contents, case.store_dtype), max(1, _CHUNK_BYTES // case.width // itemsize))[0]
    starts = np.arange(0, len(rows_TW), 60)
    target = np.empty_like(rows_TW)
    steps: dict[str, Callable[[], Any]] = {
        "copy": lambda: np.copyto(target, rows_TW),
        **{name: partial(codec.encode, rows_TW) for name, codec in CODECS.items() if name != "none"},
        "sums": lambda: sum_rows(rows_TW, starts, case.layout("none").store_dtype),
        "crc32": lambda: zlib.crc32(rows_TW),
        "sha256": lambda: hashlib.sha256(rows_TW).digest(),
    }
    measured = []
    # In a thread of its own, as in a run: blosc takes several threads where it is called from the main one.
    with ThreadPoolExecutor(1) as pool:
        for name, step in steps.items():
            best_s = pool.submit(_best_s, step, seconds).result()
            measured.append({"case": case.name, "step": name, "bytes_per_s": rows_TW.nbytes / best_s})
    return measured


def _best_s(step: Callable[[], Any], seconds: float) -> float:
    best_s, deadline = float("inf"), time.perf_counter() + seconds
    while best_s == float("inf") or time.perf_counter() < deadline:
        started = time.perf_counter()
        step()
        best_s = min(best_s, time.perf_counter() - started)
    return best_s


def _summarise(writes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each way of each case, and of its ratio to the plain write of the same round."""
    summary = []
    for case in dict.fromkeys(entry["case"] for entry in writes):
        plain = {entry["round"]: entry["seconds"] for entry in writes if (entry["case"], entry["way"]) == (case, _PLAIN)}
        for way in dict.fromkeys(entry["way"] for entry in writes):
            own = [entry for entry in writes if (entry["case"], entry["way"]) == (case, way)]
            rates = [entry["bytes"] / entry["seconds"] for entry in own]
            summary.append(
                {
                    "case": case,
                    "way": way,
                    "bytes": own[0]["bytes"],
                    "bytes_per_s": median(rates),
                    "lowest": min(rates),
                    "highest": max(rates),
                    "cpu_s_per_gb": median([entry["cpu_s"] / entry["bytes"] * 1e9 for entry in own]),
                    "stored_share": own[0]["stored_bytes"] / own[0]["bytes"],
                    "of_plain": median([plain[entry["round"]] / entry["seconds"] for entry in own]),
                }
            )
    return summary
