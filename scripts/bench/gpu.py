"""The engine on one CUDA card, on random weights at the shapes of llama-8b that are made on the card: no download, at most eight minutes.

    python scripts/bench gpu --out /path/on/the/disk --json gpu.json

It needs a checkout, torch, transformers, accelerate, zarr and pydantic. It was not run on a card yet. With --device cpu --shape small the
same code runs anywhere, without what only a card has.

The goal on one H200, in tokens that are stored and verified: 40,000 a second of all blocks, and 55,000 of quartile layers.

What matters most is measured first: the cases round by round, the machine's own rates, attention alone, a profile, the check of the
copies. What does not fit into --budget-s is left out and listed. A step that fails is listed too, and the next one runs. The JSON file is
written after each step. The exit code is 1 if a step failed, if what was stored is wrong, or if copies arrived torn.
"""

import argparse
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention import measure_attention
from ceilings import copy_rate, disk_rate, matrix_rate, wait_for
from engine import SHAPES, make_config, make_decoder, plan_figures, prepare, read_all, read_and_write
from limit import Bare, sweep
from measuring import begin, say, write_json
from profiling import profile_reading
from race import check_copies
from report import render
from report_gpu import WAYS, summarise
from synthetic import Case, cases
from written import check_written

from harvest.model.blocks import LoadedDecoder
from harvest.model.device import card_bytes, free_memory
from harvest.output.folder import RunFolder
from harvest.prepare import Prepared
from harvest.stop import StopFlag

# The most passes of a bare measurement.
_BARE_PASSES = 4
# The share of the free disk that one run may take.
_DISK_SHARE = 0.6
# Seconds that are set aside for each step after the rounds, guessed: no card has run them yet.
_STEP_S = {"ceilings": 8.0, "attention": 15.0, "profile": 20.0, "race": 25.0}


def main(arguments: list[str]) -> int:
    """Measure the engine and the card, print the table, and return the exit code."""
    parser = _parser()
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
        bench = _Bench(options, device, Path(work), measured)
        bench.run()
    print(render(measured))
    return 0 if bench.is_sound else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="[default: cuda]")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b", help="[default: llama-8b]")
    parser.add_argument("--layers-of-model", type=int, metavar="N", help="only so many blocks, for a small card or a trial")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="[default: bfloat16]")
    parser.add_argument("--batch-tokens", type=int, help="padded tokens of one pass [default: what harvest chooses]")
    parser.add_argument("--window-bytes", type=int, help="host memory for captured rows [default: what harvest chooses]")
    parser.add_argument("--compile", action="store_true", help="compile the decoder blocks, as harvest run --compile does")
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    parser.add_argument("--budget-s", type=float, default=440, help="seconds for everything but the imports [default: 440]")
    parser.add_argument("--case-s", type=float, default=10, help="seconds of one run, about [default: 10]")
    parser.add_argument("--gb", type=float, default=32, help="values of one run at most, in 10^9 bytes [default: 32]")
    parser.add_argument("--ceiling-s", type=float, default=1, help="seconds of each of the machine's own rates [default: 1]")
    parser.add_argument("--copy-mib", type=int, default=256, help="size of the copy that measures the bus [default: 256]")
    parser.add_argument("--disk-mib", type=int, default=1024, help="size of the file that measures the disk [default: 1024]")
    parser.add_argument("--race-runs", type=int, default=8, help="of each kind of window [default: 8]")
    parser.add_argument("--race-tokens", type=int, default=4096, help="tokens of each of those runs [default: 4096]")
    parser.add_argument("--out", type=Path, help="the folder whose disk is written to [default: a temporary one]")
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    return parser


class _OutOfTimeError(Exception):
    """Ends a step when the budget is spent."""


class _Deadline(StopFlag):
    """Stops the engine between two batches when the budget is spent."""

    def __init__(self, ends_at: float) -> None:
        super().__init__()
        self.ends_at = ends_at

    @property
    def left_s(self) -> float:
        return self.ends_at - time.perf_counter()

    def check(self) -> None:
        if self.left_s < 0:
            raise _OutOfTimeError


class _Bench:
    """One run of the bench. What is found goes to `measured`."""

    def __init__(self, options: argparse.Namespace, device: torch.device, work: Path, measured: dict[str, Any]) -> None:
        self.options, self.device, self.work, self.measured = options, device, work, measured
        self.deadline = _Deadline(time.perf_counter() + options.budget_s)
        self.config = make_config(options.shape, options.layers_of_model)
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        card = {"name": torch.cuda.get_device_name(device), "memory_bytes": card_bytes(device)} if device.type == "cuda" else None
        measured |= {"device": str(device), "card": card, "shape": options.shape, "dtype": options.dtype}
        measured |= {"n_layers": self.config.num_hidden_layers, "plans": [], "measurements": [], "left_out": [], "failed": {}}

    @property
    def is_sound(self) -> bool:
        """Whether nothing failed, nothing that was stored is wrong, and no copy arrived torn."""
        checks = (entry["check"]["findings"] for entry in self.measured["measurements"] if entry["way"] == "written")
        races = self.measured.get("race") or []
        return not self.measured["failed"] and not any(checks) and all(race["is_sound"] for race in races)

    def run(self) -> None:
        """Make the model, and measure what there is time for."""
        started = time.perf_counter()
        decoder = make_decoder(self.config, self.device, self.dtype)
        wait_for(self.device)
        self.measured["make_s"] = time.perf_counter() - started
        say(f"{self.options.shape} of {self.config.num_hidden_layers} blocks made on {self.device} in {self.measured['make_s']:.1f} s")
        chosen = cases(self.config.hidden_size, self.config.num_hidden_layers)
        self._measure_cases(chosen, decoder)
        for name, call in (
            ("ceilings", partial(self._ceilings, chosen[0])),
            ("attention", lambda: measure_attention(self.config, self.device, self.dtype, self.options.ceiling_s / 3)),
            ("profile", partial(self._profile, chosen[0], decoder)),
            ("race", partial(self._race, chosen[1], decoder)),
        ):
            self.measured[name] = self._step(name, _STEP_S[name], call)
            self._save()

    def _step(self, name: str, expected_s: float, call: Callable[[], Any]) -> Any:
        """Return what a step finds, or None if it fails or does not fit into the time that is left. Both are kept in `measured`."""
        if expected_s > self.deadline.left_s:
            self.measured["left_out"].append(name)
            return None
        say(name)
        try:
            return call()
        except _OutOfTimeError:
            self.measured["left_out"].append(name)
            return None
        except Exception as error:
            traceback.print_exc()
            self.measured["failed"][name] = f"{type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]}"
            # A card that has failed cannot free anything.
            with suppress(RuntimeError):
                free_memory()
            return None

    def _save(self) -> None:
        self.measured["summary"] = summarise(self.measured["measurements"], self.measured.get("ceilings"))
        self.measured["took_s"] = self.options.budget_s - self.deadline.left_s
        write_json(self.options.json, self.measured)

    def _prepare(self, case: Case, n_tokens: int, batch_tokens: int | None = None, window_bytes: int | None = None) -> Prepared:
        options = self.options
        sizes = (batch_tokens or options.batch_tokens, window_bytes or options.window_bytes)
        return prepare(self.config, case, n_tokens, self.device, options.dtype, *sizes, options.compile)

    def _measure_cases(self, chosen: list[Case], decoder: LoadedDecoder) -> None:
        """Measure each way of each case, round by round. Rounds after the first leave time for the steps that follow them."""
        sized = [
            (case, prepared)
            for case in chosen
            if (prepared := self._step(f"warm-up: {case.name}", 2 * self.options.case_s, partial(self._size, case, decoder))) is not None
        ]
        self.measured["plans"] = [{"case": case.name, **plan_figures(prepared)} for case, prepared in sized]
        self._save()
        took_s: dict[tuple[str, str], float] = {}
        for turn in range(self.options.rounds):
            kept_s = sum(_STEP_S.values()) if turn else 0.0
            for way in WAYS:
                for case, prepared in sized:
                    name, started = f"round {turn + 1}: {case.name}, {way}", time.perf_counter()
                    expected_s = took_s.get((case.name, way), 2 * self.options.case_s) + kept_s
                    found = self._step(name, expected_s, partial(self._measure, way, prepared, decoder))
                    if found is not None:
                        took_s[case.name, way] = time.perf_counter() - started
                        say(f"{name}: {found['tokens'] / found['seconds']:,.0f} tokens/s")
                        self.measured["measurements"].append({"case": case.name, "way": way, "round": turn, **found})
                    self._save()

    def _size(self, case: Case, decoder: LoadedDecoder) -> Prepared:
        """Return a run of about --case-s, by the rate of the second of two short ones, which warm the device up."""
        batch_tokens, token_bytes = self._prepare(case, 1).plan.batch_tokens, case.layout("none").token_bytes
        most_tokens = min(self.options.gb * 1e9, _DISK_SHARE * shutil.disk_usage(self.work).free) / token_bytes
        rate = 0.0
        for share in (16, 6):
            short = self._prepare(case, max(int(min(2 * batch_tokens, most_tokens / share)), 1))
            found = self._measure("written", short, decoder, checks=False)
            rate = found["tokens"] / found["seconds"]
        _read_bare(short, decoder, 1)
        return self._prepare(case, max(int(min(self.options.case_s * rate, most_tokens)), 1))

    def _measure(self, way: str, prepared: Prepared, decoder: LoadedDecoder, checks: bool = True) -> dict[str, Any]:
        """Return the tokens and the seconds of one measurement. checks: whether what was stored is checked, outside the clock."""
        found: dict[str, Any] = {"tokens": len(prepared.tokens.ids), "token_bytes": prepared.layout.token_bytes}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        wait_for(self.device)
        if way == "bare":
            found |= _read_bare(prepared, decoder, _BARE_PASSES)
        elif way == "read":
            found |= read_all(prepared, decoder, self.deadline)
        else:
            run = RunFolder(self.work / "run")
            try:
                found |= read_and_write(prepared, decoder, run, self.deadline)
                found["stored_bytes"] = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
                if checks:
                    found["check"] = check_written(run, prepared, decoder)
            finally:
                shutil.rmtree(run.path, ignore_errors=True)
        if self.device.type == "cuda":
            found["card_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return found

    def _ceilings(self, case: Case) -> dict[str, Any]:
        options, n_tokens = self.options, self._prepare(case, 1).plan.batch_tokens
        hidden, intermediate = self.config.hidden_size, self.config.intermediate_size
        return {
            "products": {
                f"{n_in} x {n_out}": matrix_rate(n_tokens, n_in, n_out, self.dtype, self.device, options.ceiling_s)
                for n_in, n_out in ((hidden, intermediate), (intermediate, hidden), (hidden, hidden))
            },
            "product_tokens": n_tokens,
            "copy_bytes_per_s": copy_rate(self.device, options.copy_mib << 20, options.ceiling_s),
            "disk_bytes_per_s": disk_rate(self.work, options.disk_mib << 20),
        }

    def _profile(self, case: Case, decoder: LoadedDecoder) -> dict[str, Any]:
        # As many tokens as the largest batch may have. They make more than one batch, since prompts of like length share one.
        return profile_reading(self._prepare(case, self._prepare(case, 1).plan.batch_tokens), decoder)

    def _race(self, case: Case, decoder: LoadedDecoder) -> list[dict[str, Any]]:
        """Check the copies of small windows: of several small batches each, and of one prompt each."""
        n_tokens, token_bytes = self.options.race_tokens, case.layout("none").token_bytes
        batch_tokens = max(16, n_tokens // 16)
        # A window takes half of the window memory.
        found = []
        for window_bytes in (n_tokens // 2 * token_bytes, 1):
            prepared = self._prepare(case, n_tokens, batch_tokens, window_bytes)
            found.append(check_copies(prepared, decoder, self.options.race_runs, self.deadline))
        return found


def _read_bare(prepared: Prepared, decoder: LoadedDecoder, most_passes: int) -> dict[str, Any]:
    """Run bare passes over the first tokens in rows of the prompts' mean length. Return the tokens, their FLOP and the seconds."""
    ids, row_tokens = prepared.tokens.ids, max(1, round(float(prepared.tokens.lengths.mean())))
    rows_RS = torch.from_numpy(ids[: len(ids) // row_tokens * row_tokens].astype("int64").reshape(-1, row_tokens))
    pass_tokens = prepared.plan.batch_tokens
    bare = Bare(decoder.module, decoder.blocks, prepared.layers)
    started = time.perf_counter()
    try:
        n_tokens = sweep(bare, rows_RS[: most_passes * max(1, pass_tokens // row_tokens)], pass_tokens)
        wait_for(bare.device)
    finally:
        bare.close()
    return {"tokens": n_tokens, "flop": 2.0 * bare.n_parameters * n_tokens, "seconds": time.perf_counter() - started}
