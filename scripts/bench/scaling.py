"""Time and memory over more and more prompts: the real command on tiny, each run in a process of its own.

    python scripts/bench scaling --json scaling.json

tiny is so small that the run is all overhead: what is seen here is what harvest itself costs a prompt, a shard and a token.
"""

import argparse
import json
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from measuring import begin, cores, load, median, run_child, say, write_json
from report import render
from texts import corpus, cut_texts, write_prompts


def main(arguments: list[str]) -> int:
    """Run the command over each number of prompts, in turn; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="bench scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="100,1000,10000,100000", help="numbers of prompts [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=1, help="[default: 1]")
    parser.add_argument("--threads", type=int, default=cores(), help="of torch [default: the machine's cores]")
    parser.add_argument("--harvest", default="", metavar="OPTIONS", help="more options of harvest run, in one string")
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one run [default: 1800]")
    parser.add_argument(
        "--out", type=Path, help="the folder whose disk is written to; what is written is removed [default: a temporary one]"
    )
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.counts.split(",")]
    measured = begin("scaling", arguments) | {"threads": options.threads, "rounds": options.rounds}
    measurements, failed = [], {}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    text = corpus()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.out) as work:
        prompts, out = Path(work) / "prompts.jsonl", Path(work) / "run"
        for turn in range(options.rounds):
            for count in counts:
                # tiny reads a token a byte, and nearly all characters are one.
                write_prompts(prompts, cut_texts(text, range(len(text)), count))
                load_before = load()
                command = [sys.executable, "-m", "harvest", "run", "--quiet", "--no-limits", "--device", "cpu", "--model", "tiny"]
                command += ["--prompts", str(prompts), "--out", str(out), *options.harvest.split()]
                child = run_child(command, options.threads, options.timeout_s)
                if child.error is not None:
                    failed[str(count)] = child.error
                else:
                    entry = {"round": turn, "load_before": load_before, "wall_s": child.wall_s, "peak_bytes": child.peak_bytes}
                    measurements.append(entry | _of_job(json.loads(child.stdout), out))
                    say(f"{count:,} prompts: {child.wall_s:.1f} s, {child.peak_bytes / 1e6:.0f} MB")
                shutil.rmtree(out, ignore_errors=True)
    measured |= {"measurements": measurements, "failed": failed, "summary": _summarise(measurements)}
    write_json(options.json, measured)
    print(render(measured))
    return 1 if failed else 0


def _of_job(job: dict[str, Any], out: Path) -> dict[str, Any]:
    result = job["result"]
    whole_s = (datetime.fromisoformat(job["completed_at"]) - datetime.fromisoformat(job["started_at"])).total_seconds()
    return {
        "prompts": job["n_prompts"],
        "tokens": result["tokens"],
        "shards": result["n_shards"],
        "run_s": max(whole_s - result["timings"]["load_s"], 0.001),
        "timings": result["timings"],
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
    }


def _summarise(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    summary = []
    for count in sorted({entry["prompts"] for entry in measurements}):
        own = [entry for entry in measurements if entry["prompts"] == count]
        summary.append(
            {
                **{name: own[0][name] for name in ("prompts", "tokens", "shards", "bytes")},
                "wall_s": median([entry["wall_s"] for entry in own]),
                "run_s": median([entry["run_s"] for entry in own]),
                "tokens_per_s": median([entry["tokens"] / entry["run_s"] for entry in own]),
                "peak_bytes": max(entry["peak_bytes"] for entry in own),
            }
        )
    return summary
