"""The page of a report: its parts in order, in one file that needs nothing else.

It takes no script and fetches nothing, and says so to the browser: whatever stands in a prompt stays text.
"""

import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from harvest.progress import size
from harvest.reading.run import Run
from harvest.reading.summary import Summary, ranges
from harvest.report import plots
from harvest.report.markup import Html, details, facts, figure, grid, join, paragraph, section, table, text, tiles
from harvest.report.measures import SEED, Measures
from harvest.report.stream import make_dimensions, make_norms

# Of lists that may be long.
_MAX_PROMPTS = 12
_MAX_SHARDS = 64
_BEGINNING = 90


@dataclass(frozen=True)
class Report:
    """What a page is made of. directions: the part on a run that projects, where it does."""

    run: Run
    summary: Summary
    measures: Measures
    directions: Html | None


def make_page(report: Report) -> str:
    """The whole page, as HTML."""
    parts = [("overview", "Overview", _overview(report))]
    if report.directions is None:
        parts += [("norms", "Norms", make_norms(report.measures)), ("dimensions", "Dimensions", make_dimensions(report.measures))]
    else:
        parts += [("directions", "Directions", iter([report.directions]))]
    parts += [("prompts", "Prompts", _prompts(report)), ("files", "Files and time", _files(report))]
    links = "\n".join(f'<a href="#{name}">{title}</a>' for name, title, _ in parts)
    title = f"{report.summary.model}: harvest report"
    style = importlib.resources.files("harvest.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{text(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="over">harvest report</p>
<h1>{text(report.summary.model)}</h1>
<p class="note">{text(report.run.path)}</p>
<nav aria-label="Parts of this page">
{links}
</nav>
</header>
<main>
{join(section(name, title, content) for name, title, content in parts)}
</main>
{_footer(report)}
</body>
</html>
"""


def _overview(report: Report) -> Iterator[Html]:
    summary = report.summary
    yield tiles(
        [
            ("prompts", f"{summary.n_prompts:,}"),
            ("tokens", f"{summary.n_tokens:,}"),
            ("layers", f"{len(summary.layers):,}" + (f" of {summary.n_blocks}" if summary.n_blocks else "")),
            ("in shards", size(summary.stored_bytes)),
        ]
    )
    versions = (report.run.manifest.local or {}).get("versions", {})
    values = "values" if summary.contents == "activations" else "directions"
    yield facts(
        [
            ("model", summary.model),
            ("from", summary.repository),
            ("revision", summary.revision),
            ("shape", f"{summary.n_blocks} blocks of {summary.hidden_size} values" if summary.n_blocks else None),
            ("contents", f"{summary.contents}, {summary.width} {values} a token and layer"),
            ("layers", ranges(summary.layers)),
            ("computed", f"in {summary.compute_dtype} on {summary.device}" if summary.device else None),
            ("stored as", f"{summary.store_dtype}, codec {summary.codec}" if summary.codec else summary.store_dtype),
            ("started", _time(summary.started_at)),
            ("ended", _time(summary.completed_at)),
            ("by", summary.capture),
            ("with", ", ".join(f"{name} {version}" for name, version in versions.items() if name != "harvest") or None),
            ("run", report.run.manifest.run_id),
        ]
    )


def _prompts(report: Report) -> Iterator[Html]:
    run, summary = report.run, report.summary
    lengths = [tensor.shape[0] for entry in run.manifest.shards for tensor in entry.tensors if len(tensor.shape) == 1]
    tenth, ninth = np.percentile(lengths, [10, 90])
    local = run.manifest.local
    nonfinite = {one.layer: one.n_nonfinite for one in report.measures.layers if one.n_nonfinite}
    known = facts(
        [
            ("shortest", f"{summary.shortest:,} tokens"),
            ("one in ten", f"under {tenth:,.0f}"),
            ("median", f"{summary.median:,g}"),
            ("one in ten", f"over {ninth:,.0f}"),
            ("longest", f"{summary.longest:,} tokens"),
            ("cut", _counted(summary.n_cut)),
            ("doubled", _counted(summary.n_doubled, "with two start tokens")),
            ("not finite", "; ".join(f"{count:,} tokens in layer {layer}" for layer, count in nonfinite.items()) or "no token"),
        ]
    )
    yield grid([figure("Tokens of a prompt", plots.token_lengths(lengths), "The start token is counted."), known])
    for key, title in (("truncated_prompts", "Cut to the context"), ("prompts_with_two_start_tokens", "Two start tokens")):
        numbers = (local or {}).get(key, [])
        if numbers:
            yield Html(f"<h3>{text(title)}</h3>")
            if len(numbers) > _MAX_PROMPTS:
                yield paragraph(text(f"The first {_MAX_PROMPTS} of {len(numbers):,} prompts."))
            rows = [(i, f"{lengths[i]:,}", _beginning(run.text(i))) for i in numbers[:_MAX_PROMPTS]]
            yield table(["prompt", "tokens read", "begins"], rows, n_left=3)


def _files(report: Report) -> Iterator[Html]:
    run, summary = report.run, report.summary
    sizes = [run.shard_file(index).stat().st_size for index in range(run.n_shards)]
    tokens = np.diff(run.shard_token_offsets).tolist()
    parts = [
        facts(
            [
                ("shards", f"{run.n_shards:,}"),
                ("in all", f"{size(summary.stored_bytes)} for {size(summary.value_bytes or 0)} of values"),
                ("ratio", f"{summary.ratio:.3f}" if summary.ratio else None),
                ("smallest", size(min(sizes))),
                ("median", size(float(np.median(sizes)))),
                ("largest", size(max(sizes))),
            ]
        )
    ]
    if summary.timings:
        names = {"load_s": "loading", "forward_s": "computing", "save_s": "saving", "upload_s": "uploading"}
        seconds = {names[name]: value for name, value in summary.timings.items()}
        note = "Of the process that made the run whole; saving goes on beside computing."
        parts.insert(0, figure("Timings", plots.timings(seconds), note))
    yield grid(parts)
    value_bytes = (summary.value_bytes or 0) / (summary.n_tokens or 1)
    rows = [
        (entry.key.rsplit("/", 1)[-1], f"{len(entry.prompt_indices):,}", f"{count:,}", size(stored), f"{value_bytes * count / stored:.3f}")
        for entry, count, stored in zip(run.manifest.shards[:_MAX_SHARDS], tokens, sizes, strict=False)
    ]
    some = f", the first {_MAX_SHARDS} of {run.n_shards:,}" if run.n_shards > _MAX_SHARDS else ""
    yield details(f"Each shard{some}", table(["file", "prompts", "tokens", "size", "ratio"], rows, n_left=1))


def _footer(report: Report) -> Html:
    measures = report.measures
    read = (
        f"Figures are of a sample: {measures.n_read:,} of {measures.n_tokens:,} tokens, in evenly spread blocks of shards that were drawn "
        f"at random (seed {SEED}); harvest report --all reads every token. Numbers of prompts, files and timings are of the whole run."
        if measures.is_sample
        else f"Figures are of all {measures.n_tokens:,} tokens, in {_layers(measures)}."
    )
    finite = "A token with a value that is not finite counts nowhere but where such tokens are counted."
    convention = report.run.manifest.residual_stream_convention
    return Html(f"<footer>\n{paragraph(text(read))}\n{paragraph(text(f'{convention} {finite}'))}\n</footer>")


def _layers(measures: Measures) -> str:
    layers = [one.layer for one in measures.layers]
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {ranges(layers)}"


def _counted(count: int | None, what: str = "to the context") -> str:
    return (
        "the manifest does not say"
        if count is None
        else f"{count:,} {'prompt' if count == 1 else 'prompts'} {what}"
        if count
        else "no prompt"
    )


def _beginning(prompt: str) -> str:
    return prompt if len(prompt) <= _BEGINNING else prompt[:_BEGINNING] + "…"


def _time(time: str | None) -> str | None:
    return None if time is None else f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M:%S} UTC"
