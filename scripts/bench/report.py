"""Measurements to markdown, so that nothing stands in BENCHMARKS.md that was not measured.

python scripts/bench report models-512.json models-96.json storage.json scaling.json --out BENCHMARKS.md
"""

import argparse
import json
from pathlib import Path
from typing import Any

from measuring import median
from report_gpu import gpu_section
from tables import say_bytes, say_count, say_rate, say_ratio, table

_HEAD = """# Benchmarks

Made by `python scripts/bench report` from the JSON files of the benches; nothing here was typed, but the figures that are called
published. Each section says its machine, its versions and its command. Medians stand beside the lowest and the highest; ratios are medians
of the ratios of each round.
"""
_NAMES = {
    "harvest": "harvest, files and all",
    "limit": "the limit: bare blocks, packed, nothing stored",
    "usual": "the usual script: batches of 8 in file order, `output_hidden_states`, `torch.save`",
    "api": "the hosted API's first algorithm: shards of 32, longest first, batches of 8",
    "lens": "TransformerLens `run_with_cache`, stopped after the deepest layer, `torch.save`",
    "nnsight": "nnsight trace, `torch.save`",
}
_WAYS = {
    "stream": "`--weights stream`",
    "offload": "`--device-map auto`, memory and disk",
    "resident": "all in memory",
    "feed": "the feed alone",
}


def main(arguments: list[str]) -> int:
    """Render JSON files into one page."""
    parser = argparse.ArgumentParser(prog="bench report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON of a bench; sections stand in this order")
    parser.add_argument("--out", type=Path, help="the page [default: standard output]")
    options = parser.parse_args(arguments)
    page = "\n".join([_HEAD, *(render(json.loads(path.read_text())) for path in options.files)])
    if options.out is None:
        print(page, end="")
    else:
        options.out.write_text(page)
    return 0


def render(measured: dict[str, Any]) -> str:
    """One bench's section."""
    body = {"models": _models, "storage": _storage, "scaling": _scaling, "gpu": gpu_section, "stream": _stream}[measured["kind"]](measured)
    return "\n".join([*body, "", *_origin(measured), ""])


def _models(measured: dict[str, Any]) -> list[str]:
    layers = ", ".join(map(str, measured["layers"]))
    rounds, threads = measured["rounds"], measured["threads"]
    lines = [
        f"## {measured['model']}: {measured['prompts']:,} prompts, {measured['tokens']:,} tokens",
        "",
        f"Layers {layers}; float32 on the CPU, {threads} threads, {say_count(rounds, 'round')}. The clock starts when the model is loaded.",
    ]
    if measured["slow_prompts"]:
        lines += [f"Some contenders read the first {measured['slow_prompts']} prompts only, as the table says."]
    summary = measured["summary"]
    others = [entry["contender"] for entry in summary]
    header = ["", "prompts", "tokens/s", "lowest – highest", "peak memory", *(f"÷ {name}" for name in others)]
    rows = [
        [
            _NAMES[entry["contender"]],
            f"{entry['prompts']:,}",
            say_rate(entry["tokens_per_s"]),
            f"{say_rate(entry['lowest'])} – {say_rate(entry['highest'])}",
            say_bytes(entry["peak_bytes"]),
            *(say_ratio(entry["ratio_to"].get(name)) for name in others),
        ]
        for entry in summary
    ]
    lines += ["", *table(header, rows)]
    lines += _ceilings_of(measured)
    for name, reason in {**measured["skipped"], **measured["failed"]}.items():
        lines += ["", f"{_NAMES.get(name, name)}: not measured ({reason})."]
    check = measured["check"]
    if check is not None:
        shown = ", ".join(f"{name} {cosine:.6f}" for name, cosine in check["cosines"].items() if cosine is not None)
        ids = "the same" if check["same_ids"] else "NOT THE SAME"
        lines += ["", f"Values: harvest's token ids are {ids}; lowest cosine of any token of the first prompt with harvest's: {shown}."]
        if wrong := [name for name, cosine in check["cosines"].items() if cosine is not None and cosine < check["at_least"]]:
            lines += ["", f"**WRONG VALUES: {', '.join(wrong)}**"]
    return lines


def _ceilings_of(measured: dict[str, Any]) -> list[str]:
    """The machine's own rates, medians over the rounds, and what the limit makes of them."""
    found = [entry for entry in measured["measurements"] if entry["contender"] == "ceilings"]
    limits = [entry for entry in measured["measurements"] if entry["contender"] == "limit"]
    lines = []
    if limits:
        passes = f"the limit reads {measured['limit_batch_tokens']:,} tokens a pass, in rows of {limits[0]['row_tokens']}"
        tried = ", ".join(f"{size['batch_tokens']:,}: {say_rate(size['tokens_per_s'])}" for size in measured["limit_sizes"])
        lines += ["", f"Best size of a pass: {passes}" + (f" (tokens/s of each size that was tried: {tried})." if tried else ".")]
    if not found:
        return lines
    products = {shape: median(entry["products"][shape] for entry in found) for shape in found[0]["products"]}
    shown = ", ".join(f"{shape} {rate / 1e9:,.1f}" for shape, rate in products.items())
    disk = median(entry["disk_bytes_per_s"] for entry in found)
    lines += ["", f"The machine: matrix products of {measured['limit_batch_tokens']:,} tokens in GFLOP/s: {shown}; "]
    lines[-1] += f"a file with fsync: {disk / 1e6:,.0f} MB/s."
    if limits:
        rate = median(entry["flop"] / entry["seconds"] for entry in limits)
        share = rate / max(products.values())
        lines[-1] += (
            f" The limit computes {rate / 1e9:,.1f} GFLOP/s (2 × parameters of the needed blocks × tokens), {share:.0%} of the best."
        )
    return lines


def _storage(measured: dict[str, Any]) -> list[str]:
    lines = [
        f"## Storage: {measured['gb']:g} GB of values a case, {measured['hidden']:,} values a token and layer",
        "",
        f"harvest's own writers, without a model, {say_count(measured['rounds'], 'round')}; GB/s count the values before the codec, and "
        "every file is flushed to the disk.",
    ]
    header = ["case", "codec", "GB/s", "lowest – highest", "÷ plain write", "CPU s a GB", "stored"]
    rows = [
        [
            entry["case"],
            entry["way"],
            f"{entry['bytes_per_s'] / 1e9:.2f}",
            f"{entry['lowest'] / 1e9:.2f} – {entry['highest'] / 1e9:.2f}",
            say_ratio(entry["of_plain"]),
            f"{entry['cpu_s_per_gb']:.2f}",
            f"{entry['stored_share']:.0%}",
        ]
        for entry in measured["summary"]
    ]
    lines += ["", *table(header, rows), "", "One core, in memory, GB/s of each step of a chunk:"]
    steps = list(dict.fromkeys(entry["step"] for entry in measured["one_core"]))
    by_case: dict[str, dict[str, float]] = {}
    for entry in measured["one_core"]:
        by_case.setdefault(entry["case"], {})[entry["step"]] = entry["bytes_per_s"]
    return [*lines, "", *table(["case", *steps], [[case, *(f"{own[step] / 1e9:.2f}" for step in steps)] for case, own in by_case.items()])]


def _scaling(measured: dict[str, Any]) -> list[str]:
    lines = [
        "## Scaling: the command on tiny",
        "",
        f"Quartile layers, {measured['threads']} threads, {say_count(measured['rounds'], 'round')}. The whole command with its start in "
        "seconds; tokens/s from the loaded model to the manifest.",
    ]
    header = ["prompts", "tokens", "shards", "seconds", "tokens/s", "peak memory", "written"]
    rows = [
        [
            f"{entry['prompts']:,}",
            f"{entry['tokens']:,}",
            f"{entry['shards']:,}",
            f"{entry['wall_s']:.1f}",
            say_rate(entry["tokens_per_s"]),
            say_bytes(entry["peak_bytes"]),
            say_bytes(entry["bytes"]),
        ]
        for entry in measured["summary"]
    ]
    failed = [f"{int(count):,} prompts: not measured ({reason})." for count, reason in measured["failed"].items()]
    return [*lines, "", *table(header, rows), *([""] if failed else []), *failed]


def _stream(measured: dict[str, Any]) -> list[str]:
    weights, kept = say_bytes(measured["weight_bytes"]), say_bytes(measured["limit_bytes"])
    files, windows = say_count(measured["files"], "file"), say_count(measured["n_windows"], "window")
    lines = [
        f"## Streamed blocks: {measured['blocks']} of hidden size {measured['hidden']:,}, {weights} in {files}",
        "",
        f"{measured['tokens']:,} tokens in {measured['n_batches']} batches and {windows}; float32 on the "
        f"CPU, {measured['threads']} threads, {say_count(measured['rounds'], 'round')}. Offload keeps at most {kept} of weights in memory. "
        "Each run begins with the checkpoint dropped from the system's cache; where the cache is short, no more than "
        f"{measured['cache_share']:.0%} of it stays there later. No run has a memory limit. Computing begins when the model is loaded; the "
        "whole is the command.",
    ]
    header = ["", "cache", "computing s", "lowest – highest", "loading s", "whole s", "from the disk", "own memory", "mapped files"]
    rows = [
        [
            _WAYS[entry["way"]],
            entry["cache"],
            f"{entry['seconds']:.2f}",
            f"{entry['lowest']:.2f} – {entry['highest']:.2f}",
            f"{entry['load_s']:.2f}" if "load_s" in entry else "",
            f"{entry['wall_s']:.1f}",
            *(say_bytes(entry[name]) for name in ("read_bytes", "anon_bytes", "mapped_bytes")),
            say_ratio(entry.get("of_stream")),
            say_ratio(entry.get("wall_of_stream")),
            say_ratio(entry.get("of_bound")),
        ]
        for entry in measured["summary"]
    ]
    lines += ["", *table([*header, "÷ stream", "whole ÷ stream", "÷ bound"], rows)]
    feed = next((entry for entry in measured["summary"] if entry["way"] == "feed"), None)
    if feed is not None:
        lines += [
            "",
            f"The feed alone reads {feed['bytes_per_s'] / 1e9:.2f} GB/s. Bound: the bytes of all blocks, once a window, at that rate, ",
        ]
        lines[-1] += "or the computing of the model in memory, whichever takes longer."
    lines += (
        [] if measured["is_cold"] else ["", "**THE CACHE WAS NOT EMPTY: this system does not drop files from it; nothing here is cold**"]
    )
    lines += [] if measured["is_same"] else ["", "**WRONG VALUES: the runs do not agree to the bit**"]
    for name, reason in measured["failed"].items():
        lines += ["", f"{name}: not measured ({reason})."]
    return lines


def _origin(measured: dict[str, Any]) -> list[str]:
    machine, versions = measured["machine"], measured["versions"]
    commit = f", commit {measured['commit']}" if measured["commit"] else ""
    cores = say_count(machine["cores"], "core")
    return [
        f"{machine['cpu']}, {cores}, {say_bytes(machine['memory_bytes'])} of memory, {machine['system']}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}{commit}; {measured['date']}.",
        "",
        f"    {measured['command']}",
    ]
