"""The engine on one CUDA card, on random weights at the shapes of llama-8b that are made on the card: no download, at most eight minutes.

    python scripts/bench gpu --out /path/on/the/disk --json gpu.json

It needs a checkout, torch, transformers, zarr and pydantic. It was not run on a card yet; with --device cpu --shape small the same code
runs anywhere. What does not fit into --budget-s is left out, and said.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ceilings import copy_rate, disk_rate, matrix_rate, wait_for
from engine import SHAPES, make_config, make_decoder, prepare, read_all, read_and_write
from limit import Bare
from measuring import begin, median, rotated, say, write_json
from race import check_copies
from report import render
from synthetic import Case, cases

from harvest.model.blocks import LoadedDecoder
from harvest.model.budget import auto_batch_tokens
from harvest.model.device import Placement
from harvest.prepare import Prepared

_WAYS = ("bare", "read", "written")


def main(arguments: list[str]) -> int:
    """Measure the card, then the engine; 1 where copies raced."""
    parser = argparse.ArgumentParser(prog="bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="[default: cuda]")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b", help="[default: llama-8b]")
    parser.add_argument("--layers-of-model", type=int, metavar="N", help="only so many blocks, for a small card or a trial")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="[default: bfloat16]")
    parser.add_argument("--batch-tokens", type=int, help="padded tokens of one pass [default: what harvest chooses for the card]")
    parser.add_argument("--window-bytes", type=int, default=2 << 30, help="host memory for captured rows [default: 2 GiB]")
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    parser.add_argument("--budget-s", type=float, default=400, help="no further measurement begins after so long [default: 400]")
    parser.add_argument("--case-s", type=float, default=8, help="aimed at for the passes of one measurement [default: 8]")
    parser.add_argument("--gb", type=float, default=4, help="values of one measurement at most, in 10^9 bytes [default: 4]")
    parser.add_argument("--ceiling-s", type=float, default=1, help="seconds of each of the card's own rates [default: 1]")
    parser.add_argument("--copy-mib", type=int, default=256, help="size of the copy that measures the bus [default: 256]")
    parser.add_argument("--disk-mib", type=int, default=1024, help="size of the file that measures the disk [default: 1024]")
    parser.add_argument("--race-runs", type=int, default=20, help="[default: 20]")
    parser.add_argument("--race-tokens", type=int, default=4096, help="tokens of each of those runs [default: 4096]")
    parser.add_argument("--out", type=Path, help="the folder whose disk is written to [default: a temporary one]")
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error(f"--device {device}: torch {torch.__version__} sees no CUDA device; try --device cpu --shape small")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    measured = begin("gpu", arguments)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.out) as work:
        measured |= _Bench(options, device, Path(work)).run()
    write_json(options.json, measured)
    print(render(measured))
    return 0 if measured["race"]["is_sound"] else 1


class _Bench:
    def __init__(self, options: argparse.Namespace, device: torch.device, work: Path) -> None:
        self.options, self.device, self.work = options, device, work
        self.started = time.perf_counter()
        self.config = make_config(options.shape, options.layers_of_model)

    def run(self) -> dict[str, Any]:
        """The card's rates, the check of the copies, and the engine in turn with the bare passes."""
        options = self.options
        made = time.perf_counter()
        decoder = make_decoder(self.config, self.device, getattr(torch, options.dtype))
        wait_for(self.device)
        make_s = time.perf_counter() - made
        say(f"{options.shape} of {self.config.num_hidden_layers} blocks made on {self.device} in {make_s:.1f} s")
        chosen = cases(self.config.hidden_size, self.config.num_hidden_layers)
        ceilings = self._ceilings(self._batch_tokens(chosen[0]))
        # Small batches make many copies, of all layers: where they can race, they have the most occasion.
        race = check_copies(self._prepare(chosen[1], options.race_tokens, max(64, options.race_tokens // 8)), decoder, options.race_runs)
        say(f"copies: {sum(map(bool, race['differing_values']))} of {race['runs']} runs differ from the synchronous one")
        sized = []
        for case in chosen:
            n_tokens = self._n_tokens(case, decoder, ceilings["disk_bytes_per_s"])
            sized.append((case, self._prepare(case, n_tokens, self._batch_tokens(case))))
        measurements, left_out = self._measure(sized, decoder)
        return {
            "device": str(self.device),
            "card": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
            "card_memory_bytes": torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None,
            "shape": options.shape,
            "n_layers": self.config.num_hidden_layers,
            "dtype": options.dtype,
            "make_s": make_s,
            "ceilings": ceilings,
            "race": race,
            "measurements": measurements,
            "left_out": left_out,
            "summary": _summarise(measurements, ceilings),
            "took_s": time.perf_counter() - self.started,
        }

    def _prepare(self, case: Case, n_tokens: int, batch_tokens: int) -> Prepared:
        options = self.options
        return prepare(self.config, case, n_tokens, self.device, options.dtype, batch_tokens, options.window_bytes)

    def _batch_tokens(self, case: Case) -> int:
        """The budget of a batch that harvest itself would take."""
        if self.options.batch_tokens is not None:
            return int(self.options.batch_tokens)
        item_bytes = getattr(torch, self.options.dtype).itemsize
        return auto_batch_tokens(Placement(self.device), self.config, case.layers[-1] + 1, item_bytes, case.layout("none").token_bytes)

    def _ceilings(self, n_tokens: int) -> dict[str, Any]:
        options, dtype = self.options, getattr(torch, self.options.dtype)
        hidden, intermediate = self.config.hidden_size, self.config.intermediate_size
        return {
            "products": {
                f"{n_in} x {n_out}": matrix_rate(n_tokens, n_in, n_out, dtype, self.device, options.ceiling_s)
                for n_in, n_out in ((hidden, intermediate), (intermediate, hidden), (hidden, hidden))
            },
            "product_tokens": n_tokens,
            "copy_bytes_per_s": copy_rate(self.device, options.copy_mib << 20, options.ceiling_s),
            "disk_bytes_per_s": disk_rate(self.work, options.disk_mib << 20),
        }

    def _n_tokens(self, case: Case, decoder: LoadedDecoder, disk_bytes_per_s: float) -> int:
        """As many tokens as --case-s and --gb allow, by the rate of one bare pass; a slow disk gets what it takes in twice that time."""
        n_tokens = self._batch_tokens(case)
        prepared = self._prepare(case, n_tokens, n_tokens)
        self._time(lambda: _read_bare(prepared, decoder))
        rate = n_tokens / self._time(lambda: _read_bare(prepared, decoder))
        most_bytes = min(self.options.gb * 1e9, 2 * self.options.case_s * disk_bytes_per_s)
        return max(1, int(min(self.options.case_s * rate, most_bytes / prepared.layout.token_bytes)))

    def _measure(self, sized: list[tuple[Case, Prepared]], decoder: LoadedDecoder) -> tuple[list[dict[str, Any]], list[str]]:
        measurements, left_out = [], []
        for turn in range(self.options.rounds):
            for case, prepared in sized:
                for way in rotated(_WAYS, turn):
                    if time.perf_counter() - self.started > self.options.budget_s:
                        left_out.append(f"round {turn + 1}: {case.name}, {way}")
                        continue
                    entry: dict[str, Any] = {"case": case.name, "way": way, "round": turn}
                    entry |= self._measure_one(way, prepared, decoder)
                    measurements.append(entry)
                    say(f"round {turn + 1}: {case.name}, {way}: {entry['tokens'] / entry['seconds']:,.0f} tokens/s")
        return measurements, left_out

    def _measure_one(self, way: str, prepared: Prepared, decoder: LoadedDecoder) -> dict[str, Any]:
        result: dict[str, Any] = {"tokens": len(prepared.tokens.ids), "token_bytes": prepared.layout.token_bytes}
        result["batch_tokens"] = prepared.settings.batch_tokens
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        folder = self.work / "run"
        if way == "bare":
            result["seconds"] = self._time(lambda: result.update(_read_bare(prepared, decoder)))
        elif way == "read":
            result["seconds"] = self._time(lambda: read_all(prepared, decoder))
        else:
            result["seconds"] = self._time(lambda: result.update(writers_busy_s=read_and_write(prepared, decoder, folder)))
            result["stored_bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
        if self.device.type == "cuda":
            result["card_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return result

    def _time(self, call: Callable[[], Any]) -> float:
        wait_for(self.device)
        started = time.perf_counter()
        call()
        wait_for(self.device)
        return time.perf_counter() - started


def _read_bare(prepared: Prepared, decoder: LoadedDecoder) -> dict[str, Any]:
    """Bare passes over the same tokens in rows of the prompts' mean length, as large as the engine's; answers tokens and their FLOP."""
    ids, row_tokens = prepared.tokens.ids, max(1, round(float(prepared.tokens.lengths.mean())))
    n_rows = len(ids) // row_tokens
    rows_RS = torch.from_numpy(ids[: n_rows * row_tokens].astype("int64").reshape(n_rows, row_tokens))
    bare = Bare(decoder.module, decoder.blocks, prepared.layers)
    try:
        for ids_BS in rows_RS.split(max(1, prepared.settings.batch_tokens // row_tokens)):
            bare.run(ids_BS.to(bare.device))
    finally:
        bare.close()
    return {"tokens": rows_RS.numel(), "flop": 2.0 * bare.n_parameters * rows_RS.numel()}


def _summarise(measurements: list[dict[str, Any]], ceilings: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of each way of each case, against the bare passes of the same round and against what the machine does."""
    summary = []
    fastest = max(ceilings["products"].values())
    for case in dict.fromkeys(entry["case"] for entry in measurements):
        of_case = [entry for entry in measurements if entry["case"] == case]
        bare = {entry["round"]: entry["tokens"] / entry["seconds"] for entry in of_case if entry["way"] == "bare"}
        flop = next((entry["flop"] / entry["tokens"] for entry in of_case if entry["way"] == "bare"), None)
        for way in _WAYS:
            rates = {entry["round"]: entry["tokens"] / entry["seconds"] for entry in of_case if entry["way"] == way}
            if not rates:
                continue
            rate = median(list(rates.values()))
            of_bare = [rates[turn] / bare[turn] for turn in rates if turn in bare]
            bytes_per_s = None if way == "bare" else rate * of_case[0]["token_bytes"]
            summary.append(
                {
                    "case": case,
                    "way": way,
                    "batch_tokens": of_case[0]["batch_tokens"],
                    "tokens": next(entry["tokens"] for entry in of_case if entry["way"] == way),
                    "tokens_per_s": rate,
                    "lowest": min(rates.values()),
                    "highest": max(rates.values()),
                    "of_bare": median(of_bare) if of_bare else None,
                    "of_products": flop * rate / fastest if flop else None,
                    "bytes_per_s": bytes_per_s,
                    "of_copy": bytes_per_s / ceilings["copy_bytes_per_s"] if bytes_per_s else None,
                    "of_disk": bytes_per_s / ceilings["disk_bytes_per_s"] if bytes_per_s and way == "written" else None,
                }
            )
    return summary
