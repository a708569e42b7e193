"""The comparison: harvest, the limit, and other ways to read the same stream, in turn and repeated, each in a process of its own.

python scripts/bench models --prompts 512 --contenders harvest,limit,ceilings --json models-512.json
python scripts/bench models --prompts 96 --json models-96.json
"""

import argparse
import json
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from measuring import Child, begin, cores, load, median, rotated, run_child, say, write_json
from report import render

_BENCH = Path(__file__).resolve().parent
# harvest and the limit read all prompts; these may take only the first of them.
SLOW = ("usual", "api", "lens", "nnsight")
ALL = ("harvest", "limit", "ceilings", *SLOW)
_NEEDS = {"lens": "transformer-lens", "nnsight": "nnsight"}


def main(arguments: list[str]) -> int:
    """Run the comparison; 1 where a contender failed or its values are not harvest's."""
    parser = argparse.ArgumentParser(prog="bench models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or any model of harvest run [default: %(default)s]")
    parser.add_argument("--prompts", type=int, default=96, metavar="N", help="the 96 of the tests, or more cut from them [default: 96]")
    parser.add_argument("--slow-prompts", type=int, metavar="N", help=f"only the first N for {', '.join(SLOW)} [default: all]")
    parser.add_argument("--layers", help="as harvest run takes them [default: the quartiles]")
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    parser.add_argument("--contenders", default=",".join(ALL), help="[default: %(default)s]")
    parser.add_argument("--threads", type=int, default=cores(), help="of torch, in each process [default: the machine's cores]")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="of the limit [default: the best of several, tried first]")
    parser.add_argument("--harvest", default="", metavar="OPTIONS", help="more options of harvest run, in one string")
    parser.add_argument("--ceiling-s", type=float, default=1.0, help="seconds of each matrix product [default: 1]")
    parser.add_argument("--disk-mib", type=int, default=256, help="size of the file that measures the disk [default: 256]")
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one contender in one round [default: 1800]")
    parser.add_argument(
        "--out", type=Path, help="the folder whose disk is written to; what is written is removed [default: a temporary one]"
    )
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    options = parser.parse_args(arguments)
    names = options.contenders.split(",")
    if unknown := set(names) - set(ALL):
        parser.error(f"--contenders: {', '.join(sorted(unknown))} is unknown; there are {', '.join(ALL)}")
    measured = begin("models", arguments)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.out) as work:
        measured |= _Comparison(options, Path(work), names).run()
    write_json(options.json, measured)
    print(render(measured))
    return 0 if measured["is_sound"] else 1


class _Comparison:
    def __init__(self, options: argparse.Namespace, work: Path, names: list[str]) -> None:
        self.options, self.work = options, work
        self.skipped = {name: f"{package} is not installed" for name, package in _NEEDS.items() if name in names and not _is_here(name)}
        self.names = [name for name in names if name not in self.skipped]
        self.measurements: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.last_run: Path | None = None

    def run(self) -> dict[str, Any]:
        """Prepare, look for the best size of a pass, and let the contenders take turns."""
        options = self.options
        for name, reason in self.skipped.items():
            say(f"{name} is skipped: {reason}")
        prepared = ["--model", options.model, "--count", str(options.prompts)] + (["--layers", options.layers] if options.layers else [])
        shapes = self._own("prepare", *prepared)
        plan = json.loads((self.work / "plan.json").read_text())
        sizes = []
        batch_tokens = options.batch_tokens
        if batch_tokens is None and {"limit", "ceilings"} & set(self.names):
            say("looking for the best size of a pass")
            sizes = self._own("tune")["sizes"]
            batch_tokens = max(sizes, key=lambda size: size["tokens_per_s"])["batch_tokens"]
        self.batch_tokens = int(batch_tokens or 2048)
        for turn in range(options.rounds):
            for place, name in enumerate(rotated(self.names, turn)):
                if name not in self.failed:
                    self._measure(name, turn, place, plan)
        check = self._check()
        measured = {
            "model": options.model,
            "layers": plan["layers"],
            "prompts": plan["n_prompts"],
            "tokens": plan["n_tokens"],
            "slow_prompts": options.slow_prompts,
            "rounds": options.rounds,
            "threads": options.threads,
            "shapes": shapes,
            "limit_sizes": sizes,
            "limit_batch_tokens": self.batch_tokens,
            "measurements": self.measurements,
            "check": check,
            "skipped": self.skipped,
            "failed": self.failed,
        }
        return measured | {"summary": summarise(measured), "is_sound": not self.failed and _is_sound(check)}

    def _measure(self, name: str, turn: int, place: int, plan: dict[str, Any]) -> None:
        out = self.work / f"{name}-{turn}"
        load_before = load()
        if name == "harvest":
            result, child = self._harvest(out)
        else:
            out.mkdir()
            given = ["--batch-tokens", str(self.batch_tokens)]
            if name in SLOW and self.options.slow_prompts:
                given += ["--prompts", str(self.options.slow_prompts)]
            if name == "ceilings":
                given += ["--ceiling-s", str(self.options.ceiling_s), "--disk-mib", str(self.options.disk_mib)]
            child = self._child(name, "--out", str(out), *given)
            result = {} if child.error else json.loads((self.work / f"{name}.json").read_text())
            shutil.rmtree(out)
        if child.error is not None:
            self.failed[name] = child.error
            say(f"round {turn + 1}: {name} failed: {child.error}")
            return
        entry = {"contender": name, "round": turn, "place": place, "load_before": load_before, "wall_s": child.wall_s}
        entry |= {"peak_bytes": child.peak_bytes} | result
        if "seconds" in result:
            entry["tokens_per_s"] = result["tokens"] / result["seconds"]
            if name == "harvest" and result["tokens"] != plan["n_tokens"]:
                self.failed[name] = f"it read {result['tokens']} tokens, and the others {plan['n_tokens']}"
            say(f"round {turn + 1}: {name} {entry['tokens_per_s']:,.0f} tokens/s in {result['seconds']:.1f} s")
        self.measurements.append(entry)

    def _harvest(self, out: Path) -> tuple[dict[str, Any], Child]:
        """The real command, files and all; its time is the job's own, from start to completion without the loading of the model."""
        options = self.options
        command = [sys.executable, "-m", "harvest", "run", "--quiet", "--no-limits", "--device", "cpu", "--compute-dtype", "float32"]
        command += ["--model", options.model, "--prompts", str(self.work / "prompts.jsonl"), "--out", str(out)]
        command += (["--layers", options.layers] if options.layers else []) + options.harvest.split()
        child = run_child(command, options.threads, options.timeout_s)
        if child.error is not None:
            return {}, child
        if self.last_run is not None:
            shutil.rmtree(self.last_run)
        self.last_run = out
        job = json.loads(child.stdout)
        result, timings = job["result"], job["result"]["timings"]
        whole_s = (datetime.fromisoformat(job["completed_at"]) - datetime.fromisoformat(job["started_at"])).total_seconds()
        n_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        return {
            "seconds": max(whole_s - timings["load_s"], 0.001),
            "tokens": result["tokens"],
            "prompts": job["n_prompts"],
            "load_s": timings["load_s"],
            "bytes": n_bytes,
            "timings": timings,
        }, child

    def _check(self) -> dict[str, Any] | None:
        """Each contender's values against harvest's, where harvest took part."""
        if self.last_run is None or "harvest" in self.failed:
            return None
        return self._own("check", "--run", str(self.last_run))

    def _own(self, name: str, *given: str) -> dict[str, Any]:
        child = self._child(name, *given)
        if child.error is not None:
            raise SystemExit(f"bench: {name} failed: {child.error}")
        return dict(json.loads((self.work / f"{name}.json").read_text()))

    def _child(self, name: str, *given: str) -> Child:
        command = [sys.executable, str(_BENCH), "contend", name, "--work", str(self.work), *given]
        return run_child(command, self.options.threads, self.options.timeout_s)


def _is_here(name: str) -> bool:
    # Asked without importing contenders.py, which would bring torch into this process.
    from importlib.util import find_spec

    return find_spec({"lens": "transformer_lens"}.get(name, name)) is not None


def _is_sound(check: dict[str, Any] | None) -> bool:
    if check is None:
        return True
    return check["same_ids"] and all(cosine is None or cosine >= check["at_least"] for cosine in check["cosines"].values())


def summarise(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Each contender's median, lowest and highest rate, and the median over rounds of its ratio to each other contender."""
    rates: dict[str, dict[int, float]] = {}
    for entry in measured["measurements"]:
        if "tokens_per_s" in entry:
            rates.setdefault(entry["contender"], {})[entry["round"]] = entry["tokens_per_s"]
    summary = []
    for name, own in rates.items():
        ratios = {}
        for other, theirs in rates.items():
            # Of one round, so that a machine that slows down for a while slows both.
            shared = [own[turn] / theirs[turn] for turn in own if turn in theirs]
            if shared:
                ratios[other] = median(shared)
        entries = [entry for entry in measured["measurements"] if entry["contender"] == name]
        summary.append(
            {
                "contender": name,
                "prompts": entries[0]["prompts"],
                "tokens": entries[0]["tokens"],
                "tokens_per_s": median(list(own.values())),
                "lowest": min(own.values()),
                "highest": max(own.values()),
                "peak_bytes": max(entry["peak_bytes"] for entry in entries),
                "bytes": entries[0]["bytes"],
                "ratio_to": ratios,
            }
        )
    return sorted(summary, key=lambda entry: ALL.index(entry["contender"]))
