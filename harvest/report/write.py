"""A report of a run, from its folder to the file."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from harvest.errors import RequestError
from harvest.output import durable
from harvest.progress import Reporter
from harvest.reading.run import open_run
from harvest.reading.summary import ranges, summarize
from harvest.report.measures import measure

# Values read of a run where nobody asks for all: some twenty seconds of one core.
MAX_VALUES = 4_000_000_000


def write_report(
    path: str | Path,
    out: str | Path,
    layers: Sequence[int] | None = None,
    max_values: int | None = MAX_VALUES,
    reporter: Reporter | None = None,
) -> Path:
    """Write the page of a whole run, a folder of either kind, to a file, in place of what is there, and answer its path.

    layers: decoder blocks that the run holds; None for all of them. max_values: more than that in these layers are sampled; None: never.
    Raises NotARunError where the folder is no whole run, RequestError for a layer that it does not hold, a place that no file can be
    written to, or where matplotlib is missing, before anything is read; StorageError where the file cannot be written.
    """
    out = Path(out)
    _check(out)
    run = open_run(path)
    unknown = sorted(set(layers or ()) - set(run.layers))
    if unknown:
        raise RequestError(f"layers: {ranges(unknown)} was given, but the run holds the layers {ranges(run.layers)}")
    from harvest.report.directions import N_STRONGEST, make_directions
    from harvest.report.page import Report, make_page

    chosen = run.layers if layers is None else sorted(set(layers))
    n_values = run.n_tokens * len(chosen) * run.width
    measures = measure(run, chosen, n_values if max_values is None else max_values, N_STRONGEST, reporter)
    directions = make_directions(run, measures) if run.manifest.contents == "projections" else None
    durable.write_whole(out, make_page(Report(run, summarize(path), measures, directions)).encode())
    return out


def _check(out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("report: its plots need matplotlib, which is not installed; run: pip install 'harvest[report]'")
    if out.is_dir():
        raise RequestError(f"out: {out} is a folder; name a file in it, such as {out / 'report.html'}")
    if not out.absolute().parent.is_dir():
        raise RequestError(f"out: there is no folder {out.absolute().parent}; make it, or name a file in another one")
