"""harvest run."""

from pathlib import Path
from typing import Any

import click

from harvest.cli.group import SectionedCommand, cli
from harvest.cli.options import engine_options, output_option, read_request, request_options
from harvest.errors import RequestError

DEFAULT_ROOT = "runs"


@cli.command(
    cls=SectionedCommand,
    short_help="Harvest the prompts of a file.",
    epilog="Example: harvest run --model tiny --prompts prompts.jsonl --layers all --out run1",
)
@request_options
@engine_options
@output_option(
    "--out", type=click.Path(), metavar="DIR", help="The run folder, or s3://BUCKET/PREFIX (gs://, az://). [default: runs/MODEL-DIGEST]"
)
@output_option(
    "--out-root",
    type=click.Path(),
    metavar="ROOT",
    help="Instead of --out: the folder below which a run gets one of its own. [default: runs]",
)
@output_option("--idempotency-key", metavar="KEY", help="The same key and request below ROOT answer the first run for 24 hours.")
@output_option("--overwrite", is_flag=True, help="Remove what a run left in the folder, and start anew.")
@output_option("--no-space-check", is_flag=True, help="Start even where the disk seems too small for the run.")
@output_option("--keep-local", is_flag=True, help="With an object store: shards stay in --stage once they are there.")
@output_option(
    "--stage", type=click.Path(), metavar="DIR", help="Where shards wait on their way to a store. [default: below harvest's cache]"
)
@output_option("--retry-s", type=click.FloatRange(min=0), metavar="S", help="How long to try a store again that fails. [default: 180]")
@output_option("--part", metavar="I/N", help="Take share I, from 0, of N; N such commands on one folder make the run. [default: 0/1]")
@output_option(
    "--on-term",
    type=click.Choice(["cancel", "requeue"]),
    default="cancel",
    show_default=True,
    help="After SIGTERM: the job is cancelled, exit code 143; or pending, to be started again, exit code 75.",
)
@output_option(
    "--progress",
    type=click.Choice(["auto", "json"]),
    default="auto",
    show_default=True,
    help="On stderr: a bar or lines for people; or events as JSON, one a line.",
)
@output_option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
def run(
    out: str | None,
    out_root: str | None,
    idempotency_key: str | None,
    progress: str,
    quiet: bool,
    no_limits: bool,
    overwrite: bool,
    no_space_check: bool,
    keep_local: bool,
    stage: str | None,
    retry_s: float | None,
    part: str | None,
    on_term: str,
    **options: Any,
) -> None:
    """Harvest the prompts of a file, and print the job as JSON.

    The same command on an unfinished run finishes it; on a finished one it answers at once.
    """
    from harvest.asked import find_answer
    from harvest.control import working
    from harvest.model.sources import find_model
    from harvest.output.folder import RunFolder
    from harvest.output.idempotency import folder_for_key
    from harvest.output.presence import check_free
    from harvest.output.staged import RETRY_S, open_folder
    from harvest.output.store import is_url
    from harvest.parts import WHOLE, find_rank, parse_part
    from harvest.progress import JsonReporter, Silent, StderrReporter
    from harvest.stop import StopFlag, stopping_on_signals

    if out == "" or out_root == "":
        raise RequestError("out: an empty name was given; name the folder, such as run1 or . for the current one")
    if out is not None and (out_root is not None or idempotency_key is not None):
        raise RequestError("out: it names the folder itself, so --out-root and --idempotency-key mean nothing beside it; leave one out")
    if is_url(out_root):
        raise RequestError(f"out_root: {out_root} was given; a run in an object store is named itself, with --out {out_root}/RUN")
    if not is_url(out) and (keep_local or stage is not None or retry_s is not None):
        raise RequestError(
            "keep_local, stage and retry_s: they mean something with an object store alone, such as --out s3://BUCKET/PREFIX"
        )
    reporter = Silent() if quiet else JsonReporter() if progress == "json" else StderrReporter()
    stop = StopFlag()
    own_part = WHOLE if part is None else parse_part(part)
    with stopping_on_signals(stop, requeues=on_term == "requeue"):
        request, engine = read_request(reporter, no_limits, **options)
        # A mistyped model is an error before torch is imported, which takes seconds.
        find_model(request.model, engine)
        root = Path(out_root or DEFAULT_ROOT)
        if idempotency_key is not None:
            folder = RunFolder(folder_for_key(root, idempotency_key, request))
            if job := working(folder):
                reporter.note("the first run of this key is still at work; this is its job")
                click.echo(job.to_json())
                return
            out = str(folder.path)
        named = None if out is None else open_folder(out, stage, keep_local, RETRY_S if retry_s is None else retry_s, stop)
        if not overwrite and (answer := find_answer(request, engine, named, root, reporter.note)):
            reporter.note("this run is finished already; nothing was done")
            click.echo(answer.to_json())
            return
        if named is not None:
            check_free(named, find_rank().share(own_part))
        from harvest.pipeline import run as run_request

        job = run_request(request, named, engine, reporter, stop, root, own_part, overwrite, not no_space_check)
        click.echo(job.to_json())
