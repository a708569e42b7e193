"""Blocks that are streamed against accelerate's offload to disk, and against the same model all in memory: one random Llama in many files.

    python scripts/bench stream --out /path/on/the/disk --json stream.json

Each run is a harvest command in a process of its own, on the CPU, and begins with the checkpoint's pages dropped from the system's cache.

    stream      --weights stream
    offload     --device-map auto with --max-memory: at most --share of the weights lie in memory, the block at work
                among them, and the rest is read from the disk for each batch
    resident    --weights resident: its computing is the bare forward
    feed        harvest's own feed of blocks alone: how fast the blocks come from the disk where nothing is computed

With a small checkpoint the system's cache holds what offload has read once, and serves all later batches: a model that is larger than
the machine's memory has no such luck. So stream and offload run twice: with the cache as the system keeps it, and short, where no more
than --cache-share of the checkpoint stays in it: what was read longest ago is dropped first.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from cold import Short, cached_share, drop
from measuring import Child, begin, cores, load, median, rotated, run_child, say, write_json
from report import render
from texts import corpus, write_prompts

_BENCH = Path(__file__).resolve().parent
_CACHES = ("kept", "short")
# More of the checkpoint in the cache than this, and dropping it has not worked.
_COLD = 0.01


def main(arguments: list[str]) -> int:
    """Run all ways in turn; 1 where one failed or their values differ."""
    parser = argparse.ArgumentParser(prog="bench stream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16, help="of the model [default: 16]")
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64 [default: 1024; 16 blocks of it take 773 MB]")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="where the model lies, or is made once [default: made and removed]")
    parser.add_argument("--batches", type=int, default=12, help="that the prompts fill [default: 12]")
    parser.add_argument("--batch-tokens", type=int, default=256, help="[default: 256]")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt, its start token too [default: 64]")
    parser.add_argument("--share", type=float, default=0.3, help="of the weights, that offload may have in memory [default: 0.3]")
    parser.add_argument("--caches", default=",".join(_CACHES), help="how stream and offload are run [default: %(default)s]")
    parser.add_argument("--cache-share", type=float, default=0.5, help="of the checkpoint, where the cache is short [default: 0.5]")
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    parser.add_argument("--threads", type=int, default=cores(), help="of torch [default: the machine's cores]")
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one run [default: 1800]")
    parser.add_argument("--out", type=Path, help="the folder whose disk is used; what is written is removed [default: a temporary one]")
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    options = parser.parse_args(arguments)
    options.caches = options.caches.split(",")
    if unknown := set(options.caches) - set(_CACHES):
        parser.error(f"--caches: {', '.join(sorted(unknown))} is unknown; there are {', '.join(_CACHES)}")
    if not 2 <= options.prompt_tokens <= options.batch_tokens:
        parser.error(f"--prompt-tokens {options.prompt_tokens}: give 2 to --batch-tokens, {options.batch_tokens}")
    if not hasattr(os, "posix_fadvise"):
        parser.error("this bench drops files from the system's cache, which this system has no call for; run it on Linux")
    measured = begin("stream", arguments)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.out) as work:
        measured |= _Bench(options, Path(work)).run()
    write_json(options.json, measured)
    print(render(measured))
    return 0 if measured["is_sound"] else 1


class _Bench:
    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.folder = (options.checkpoint or work / "checkpoint").resolve()
        self.prompts = work / "prompts.jsonl"
        self.measurements: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.checksums: set[str] = set()

    def run(self) -> dict[str, Any]:
        """Make the model and the prompts, and let the ways take turns."""
        options = self.options
        self._make()
        self.files = sorted(self.folder.glob("*.safetensors"))
        write_prompts(self.prompts, _texts(options))
        # The model's digest is remembered from here on, and Python's own files are in the cache.
        plan = self._plan("resident") | {"n_windows": self._plan("stream")["n_windows"]}
        self.limit = int(options.share * plan["weight_bytes"])
        ways = [(way, cache) for way in ("stream", "offload") for cache in options.caches] + [("resident", "kept"), ("feed", "kept")]
        names = {f"{way}, cache {cache}": (way, cache) for way, cache in ways}
        for turn in range(options.rounds):
            for name in rotated(list(names), turn):
                if name not in self.failed:
                    self._measure(name, *names[name], turn)
        measured = {
            "blocks": options.blocks,
            "hidden": options.hidden,
            "files": len(self.files),
            "weight_bytes": plan["weight_bytes"],
            "limit_bytes": self.limit,
            "cache_share": options.cache_share,
            **{name: plan[name] for name in ("tokens", "n_prompts", "n_batches", "batch_tokens", "n_windows")},
            "rounds": options.rounds,
            "threads": options.threads,
            "measurements": self.measurements,
            "failed": self.failed,
            "is_cold": all(entry["cached_before"] < _COLD for entry in self.measurements),
            "is_same": len(self.checksums) <= 1,
        }
        return measured | {"summary": summarise(measured), "is_sound": not self.failed and measured["is_same"]}

    def _make(self) -> None:
        sizes = {"num_hidden_layers": self.options.blocks, "hidden_size": self.options.hidden}
        if self.folder.exists():
            config = json.loads((self.folder / "config.json").read_text())
            if {name: config[name] for name in sizes} != sizes:
                raise SystemExit(f"bench: {self.folder} holds a model of other sizes; name another --checkpoint, or remove it")
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        sized = ["--blocks", str(self.options.blocks), "--hidden", str(self.options.hidden)]
        _result(self._child([str(_BENCH), "llama", "make", "--folder", str(self.folder), *sized]))
        say(f"made {self.folder}")

    def _plan(self, weights: str) -> dict[str, Any]:
        return _result(self._child(["-m", "harvest", "plan", "--json", *self._asked(self.work / "run"), "--weights", weights]))

    def _asked(self, out: Path) -> list[str]:
        """What all runs have in common: the stream after the deepest block, so that every block is computed."""
        options = self.options
        asked = ["--model", str(self.folder), "--prompts", str(self.prompts), "--no-limits", "--layers", str(options.blocks - 1)]
        return [*asked, "--device", "cpu", "--compute-dtype", "float32", "--batch-tokens", str(options.batch_tokens), "--out", str(out)]

    def _child(self, arguments: list[str]) -> Child:
        # What harvest keeps in its cache stays out of the user's.
        own = {"HARVEST_CACHE": str(self.work / "cache")}
        return run_child([sys.executable, *arguments], self.options.threads, self.options.timeout_s, own)

    def _measure(self, name: str, way: str, cache: str, turn: int) -> None:
        out, load_before = self.work / "run", load()
        command = {
            "stream": ["--weights", "stream"],
            "offload": ["--device-map", "auto", "--max-memory", f"cpu={self.limit}"],
            "resident": ["--weights", "resident"],
        }
        drop(self.files)
        entry: dict[str, Any] = {"way": way, "cache": cache, "round": turn, "load_before": load_before}
        entry["cached_before"] = cached_share(self.files)
        most_bytes = int(self.options.cache_share * sum(path.stat().st_size for path in self.files))
        with Short(self.files, most_bytes) if cache == "short" else contextlib.nullcontext():
            if way == "feed":
                child = self._child([str(_BENCH), "llama", "read", "--folder", str(self.folder)])
            else:
                child = self._child(["-m", "harvest", "run", *self._asked(out), *command[way]])
        if child.error is not None:
            self.failed[name] = child.error
        else:
            entry |= {key: getattr(child, key) for key in ("wall_s", "peak_bytes", "anon_bytes", "mapped_bytes", "read_bytes")}
            entry |= json.loads(child.stdout) if way == "feed" else self._of_run(child, out)
            self.measurements.append(entry)
            say(f"round {turn + 1}: {name}: {entry['seconds']:.2f} s, {entry['read_bytes'] / 1e9:.2f} GB from the disk")
        shutil.rmtree(out, ignore_errors=True)

    def _of_run(self, child: Child, out: Path) -> dict[str, Any]:
        timings = json.loads(child.stdout)["result"]["timings"]
        manifest = json.loads((out / "manifest.json").read_text())
        self.checksums.add(json.dumps(manifest["local"]["checksums"], sort_keys=True))
        notes = [line for line in child.stderr.splitlines() if "weights: " in line]
        return {"seconds": timings["forward_s"], "load_s": timings["load_s"], "weights": notes[0].split("weights: ")[1] if notes else None}


def _result(child: Child) -> dict[str, Any]:
    """What a step before the measurements prints. Raises SystemExit where it failed: nothing can be measured then."""
    if child.error is not None:
        raise SystemExit(f"bench: {child.error}")
    return dict(json.loads(child.stdout))


def _texts(options: argparse.Namespace) -> list[str]:
    """Prompts of one length that fill the batches to the token: each byte is a token of the model's, and the start token is one."""
    text = corpus().encode("ascii", "ignore").decode()
    length, count = options.prompt_tokens - 1, options.batches * (options.batch_tokens // options.prompt_tokens)
    text *= -(-length * count // len(text))
    return [text[number * length : (number + 1) * length] for number in range(count)]


def summarise(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of each way, its ratio to stream under the same cache, and stream's to what limits it: reading or computing, alone."""
    by_round = {(entry["way"], entry["cache"], entry["round"]): entry for entry in measured["measurements"]}
    summary = []
    for way, cache in dict.fromkeys((entry["way"], entry["cache"]) for entry in measured["measurements"]):
        own = [entry for entry in measured["measurements"] if (entry["way"], entry["cache"]) == (way, cache)]
        seconds = [entry["seconds"] for entry in own]
        line = {"way": way, "cache": cache, "seconds": median(seconds), "lowest": min(seconds), "highest": max(seconds)}
        line |= {name: median([entry[name] for entry in own]) for name in ("wall_s", "read_bytes")}
        line |= {name: max(entry[name] for entry in own) for name in ("anon_bytes", "mapped_bytes")}
        if way == "feed":
            line["bytes_per_s"] = median([entry["weight_bytes"] / entry["read_s"] for entry in own])
        else:
            line["load_s"] = median([entry["load_s"] for entry in own])
        if way == "offload":
            pairs = [(entry, stream) for entry in own if (stream := by_round.get(("stream", cache, entry["round"])))]
            line["of_stream"] = _middle_ratio([(entry["seconds"], stream["seconds"]) for entry, stream in pairs])
            line["wall_of_stream"] = _middle_ratio([(entry["wall_s"], stream["wall_s"]) for entry, stream in pairs])
        if way == "stream":
            bounds = {entry["round"]: _bound_s(by_round, entry["round"], measured["n_windows"]) for entry in own}
            line["bound_s"] = median(known) if (known := [bound for bound in bounds.values() if bound]) else None
            line["of_bound"] = _middle_ratio([(entry["seconds"], bound) for entry in own if (bound := bounds[entry["round"]])])
        summary.append(line)
    return summary


def _bound_s(by_round: dict[Any, Any], turn: int, n_windows: int) -> float | None:
    """No streaming can take less: the weights' bytes at the feed's rate of that round, or the bare forward, whichever takes longer."""
    feed, resident = by_round.get(("feed", "kept", turn)), by_round.get(("resident", "kept", turn))
    return max(n_windows * feed["read_s"], resident["seconds"]) if feed and resident else None


def _middle_ratio(pairs: list[tuple[float, float]]) -> float | None:
    return median([one / other for one, other in pairs]) if pairs else None
