"""harvest plan."""

import sys
from typing import Any

import click

from harvest.cli.group import SectionedCommand, cli
from harvest.cli.options import engine_options, output_option, read_request, request_options
from harvest.cli.run import DEFAULT_ROOT


@cli.command(
    cls=SectionedCommand,
    short_help="What a run would take, before it is begun.",
    epilog="Example: harvest plan --model tiny --prompts prompts.jsonl --layers all --out run1",
)
@request_options
@engine_options
@output_option("--out", type=click.Path(), metavar="DIR", help="The run folder. [default: runs/MODEL-DIGEST]")
@output_option("--out-root", type=click.Path(), metavar="ROOT", help="The folder below which a run gets one of its own. [default: runs]")
@output_option("--json", "as_json", is_flag=True, help="A JSON object instead of text.")
@output_option("--quiet", "-q", is_flag=True, help="No notes on stderr.")
def plan(out: str | None, out_root: str | None, as_json: bool, quiet: bool, no_limits: bool, **options: Any) -> None:
    """Tokenise the prompts and print what `harvest run` with the same options would read, write and need; no weights are loaded.

    Exits with 2 where the run could not work, and says why.
    """
    from harvest.progress import Silent, StderrReporter
    from harvest.stop import StopFlag, stopping_on_signals

    reporter = Silent() if quiet else StderrReporter()
    stop = StopFlag()
    with stopping_on_signals(stop):
        request, engine = read_request(reporter, no_limits, **options)
        from harvest.forecast import forecast

        found = forecast(request, out, engine, reporter, stop, out_root or DEFAULT_ROOT)
    click.echo(found.to_json() if as_json else found.to_text())
    sys.exit(2 if found.problems else 0)
