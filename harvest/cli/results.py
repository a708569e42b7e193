"""harvest show, report, verify, compare, export and fetch: what is done with a run once it is there."""

import os
import sys
from typing import Any

import click

from harvest.cli.group import cli
from harvest.cli.options import given, loading_options


@cli.command(short_help="Write a run as the API's safetensors files.", epilog="Example: harvest export run1 --format safetensors exported1")
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option("--format", "file_format", type=click.Choice(["safetensors"]), default="safetensors", help="The files to write.")
@click.argument("out", metavar="OUT", type=click.Path())
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
def export(folder: str, file_format: str, out: str, quiet: bool) -> None:
    """Write a run's files anew as the API's first version has them, into the folder OUT, and print what was written.

    Code that was written for downloaded shards runs on them unchanged. The same command on an unfinished export finishes it.
    """
    from harvest.progress import Silent, StderrReporter
    from harvest.reading.export import export_safetensors
    from harvest.reading.run import open_run
    from harvest.stop import StopFlag, stopping_on_signals

    writers = {"safetensors": export_safetensors}
    stop = StopFlag()
    with stopping_on_signals(stop):
        click.echo(writers[file_format](open_run(folder), out, Silent() if quiet else StderrReporter(), stop).to_json())


@cli.command(short_help="Download the files of a job.", epilog="Example: harvest fetch job.json fetched1")
@click.argument("job", metavar="JOB.json", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path())
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
def fetch(job: str, out: str, quiet: bool) -> None:
    """Download the files of a done job by its links (http, https or file) into the folder OUT, and print the job with links to them.

    JOB.json is an answer of the API, or a run's job.json; - reads it from stdin; s3://BUCKET/PREFIX (gs://, az://) is a run in a store.
    The same command goes on where an earlier one stopped.
    """
    from harvest.control import status
    from harvest.output.staged import open_folder
    from harvest.output.store import is_url
    from harvest.progress import DownloadReporter, Silent
    from harvest.reading.fetch import fetch as fetch_job
    from harvest.reading.fetch import read_answer
    from harvest.stop import StopFlag, stopping_on_signals

    answer = status(open_folder(job)) if is_url(job) else read_answer(job)
    stop = StopFlag()
    with stopping_on_signals(stop):
        click.echo(fetch_job(answer, out, Silent() if quiet else DownloadReporter(), stop).to_json())


@cli.command(short_help="Compare two runs of the same prompts.", epilog="Example: harvest compare run1 fetched1")
@click.argument("runs", metavar="A B", nargs=2, type=click.Path(exists=True, file_okay=False))
@click.option("--min-cosine", type=click.FloatRange(-1, 1), default=0.9997, show_default=True, metavar="C", help="Of each layer's mean.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
def compare(runs: tuple[str, str], min_cosine: float, as_json: bool, quiet: bool) -> None:
    """Compare run B with run A, folders of either kind: their token ids, then each layer that both hold, over all tokens.

    Exits with 1 where token ids differ or a layer's mean cosine is below --min-cosine, and with 2 where the two cannot be compared.
    """
    from harvest.progress import ReadingReporter, Silent
    from harvest.reading.compare import compare as compare_runs

    comparison = compare_runs(*runs, min_cosine, Silent() if quiet else ReadingReporter())
    click.echo(comparison.to_json() if as_json else comparison.to_text())
    sys.exit(0 if comparison.agrees else 1)


@cli.command(short_help="Check the files of a run.", epilog="Example: harvest verify run1 --deep 3")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--deep", type=click.IntRange(min=0), default=0, metavar="N", help="Read N prompts anew with the model, and compare.")
@loading_options
@click.option("--adapter", metavar="ADAPTER", help="Where the run's adapter lies now. [default: where it was]")
@click.option("--json", "as_json", is_flag=True, help="A JSON object instead of text.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
def verify(folder: str, deep: int, as_json: bool, quiet: bool, **options: Any) -> None:
    """Check a run folder of either kind: checksums, documents, shapes, that every value is finite, and the stats against all values.

    Exits with 1 where something is wrong; each finding is a line that begins with its file.
    """
    from harvest.checks import check
    from harvest.settings import Engine

    engine = check(Engine, given(options))
    from harvest.progress import ReadingReporter, Silent
    from harvest.reading.verify import verify as verify_run

    verification = verify_run(folder, deep, engine, Silent() if quiet else ReadingReporter())
    click.echo(verification.to_json() if as_json else verification.to_text())
    sys.exit(0 if verification.is_sound else 1)


@cli.command(short_help="Sum a run up on one screen.", epilog="Example: harvest show run1")
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="A JSON object instead of text.")
def show(folder: str, as_json: bool) -> None:
    """Print what a run folder of either kind holds: model, layers, prompts, tokens, sizes, timings, mean norms. It may be unfinished.

    Its documents are read, and no values.
    """
    from harvest.reading.summary import summarize

    summary = summarize(folder)
    click.echo(summary.to_json() if as_json else summary.to_text())


@cli.command(short_help="Make a page of a run to look at.", epilog="Example: harvest report run1 -o report.html")
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--out", "-o", metavar="FILE", default="report.html", show_default=True, help="The page to write; one that is there is replaced."
)
@click.option("--layers", metavar="LAYERS", help="Block numbers that the run holds, such as 8,16,24 or 0-3. [default: all of them]")
@click.option("--all", "read_all", is_flag=True, help="Read every token of a run of over 4,000,000,000 values too, instead of a sample.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
def report(folder: str, out: str, layers: str | None, read_all: bool, quiet: bool) -> None:
    """Write one page, complete in itself, on a whole run of either kind: norms, outlier dimensions, prompts, files and timings.

    For projections: how each direction is spread, and its strongest tokens in their text. Needs matplotlib: pip install 'harvest[report]'.
    """
    # A report takes what is on this machine. Even for a tokenizer that it has, the hub's library would ask the hub for things of its own.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from harvest.progress import ReadingReporter, Silent
    from harvest.report.write import MAX_VALUES, write_report
    from harvest.request import parse_layers

    asked = None if layers is None else parse_layers(layers)
    chosen = None if asked == "all" else asked
    click.echo(write_report(folder, out, chosen, None if read_all else MAX_VALUES, Silent() if quiet else ReadingReporter()))


@cli.command(short_help="Push a run to the Hugging Face Hub.", epilog="Example: harvest push run1 hf://datasets/me/run1")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.argument("target", metavar="hf://datasets/USER/NAME")
@click.option("--public", is_flag=True, help="Let anybody read a dataset that is made: the prompts are in it. [default: private]")
@click.option("--quiet", "-q", is_flag=True, help="No notes on stderr.")
def push(folder: str, target: str, public: bool, quiet: bool) -> None:
    """Push a whole run as a dataset with a card to the Hub, in one commit, and print where it lies."""
    import json

    from harvest.progress import Silent, StderrReporter
    from harvest.reading.push import push as push_run

    click.echo(json.dumps(push_run(folder, target, public, Silent() if quiet else StderrReporter()).to_dict(), indent=2))
