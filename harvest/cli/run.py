"""harvest run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harvest.cli.group import cli, given, loading_options
from harvest.errors import RequestError

if TYPE_CHECKING:
    from harvest.progress import Reporter
    from harvest.request import HarvestRequest
    from harvest.settings import Engine

DEFAULT_ROOT = "runs"


@cli.command(
    short_help="Harvest the prompts of a file.", epilog="Example: harvest run --model tiny --prompts prompts.jsonl --layers all --out run1"
)
@click.option("--model", metavar="ID", help="A registry id, Hugging Face id, folder or GGUF file. [default: tiny, random weights]")
@click.option("--config", metavar="FILE", help="A body of the API as .json, or its fields in .toml with an [engine]; options override it.")
@click.option("--prompts", metavar="FILE", help=".jsonl, .json or .txt, each also .gz; - reads jsonl from stdin.")
@click.option("--field", metavar="NAME", help="The key of the text where a prompt is an object. [default: prompt or text]")
@click.option("--layers", metavar="LAYERS", help='"all", or block numbers from 0 such as 8,16,24 or 0-3. [default: the quartiles]')
@click.option("--shard-size", type=int, metavar="N", help="Prompts in each shard file, 1 to 4096. [default: 32]")
@click.option(
    "--batch-size",
    type=int,
    metavar="N",
    help="1 to 64; kept in the manifest as the API does, and of no effect: the engine sizes its own batches.",
)
@click.option("--add-special-tokens/--no-add-special-tokens", default=None, help="Put the start token before each prompt. [default: add]")
@click.option("--project-onto", metavar="FILE", help="Keep only the components along these directions: .npy, .safetensors, .pt or .json.")
@click.option("--no-limits", is_flag=True, help="Lift the API's limits: 4,096 prompts, 2,000,000 tokens, 64 directions.")
@click.option("--out", type=click.Path(), metavar="DIR", help="The run folder. [default: runs/MODEL-DIGEST]")
@click.option(
    "--out-root",
    type=click.Path(),
    metavar="ROOT",
    help="Instead of --out: the folder below which a run gets one of its own. [default: runs]",
)
@click.option("--idempotency-key", metavar="KEY", help="The same key and request below ROOT answer the first run for 24 hours.")
@click.option("--revision", metavar="REF", help="A branch, tag or commit of a model on the Hub. [default: main]")
@click.option(
    "--adapter", metavar="ADAPTER", help="A PEFT adapter to put on the model: a folder, or a Hugging Face id, also with @REVISION."
)
@click.option("--start-token", metavar="TOKEN", help="Put this before each prompt: a token's text or id, or none. [default: the model's]")
@click.option("--attention", metavar="KIND", help="auto, sdpa, eager, flash_attention_2 or another of transformers'. [default: auto]")
@loading_options
@click.option("--compute-dtype", metavar="DTYPE", help="auto, bfloat16, float16 or float32. [default: auto]")
@click.option("--store-dtype", metavar="DTYPE", help="auto, bfloat16, float16 or float32. [default: auto, bfloat16]")
@click.option("--codec", metavar="CODEC", help="auto, lz4, zstd or none. [default: auto, lz4 for bfloat16]")
@click.option("--context-length", type=int, metavar="N", help="Tokens of context; a prompt keeps its first N - 1. [default: the model's]")
@click.option("--batch-tokens", type=int, metavar="N", help="Padded tokens of one forward pass. [default: by device]")
@click.option("--window-bytes", type=int, metavar="N", help="Host memory for captured rows, in bytes. [default: 2 GiB]")
@click.option("--check", is_flag=True, default=None, help="First read two prompts in a batch and alone, and compare every layer.")
@click.option("--allow-nonfinite", is_flag=True, default=None, help="Store NaN and inf where the model computes them, and count them.")
@click.option("--overwrite", is_flag=True, help="Remove what a run left in the folder, and start anew.")
@click.option("--no-space-check", is_flag=True, help="Start even where the disk seems too small for the run.")
@click.option("--part", metavar="I/N", help="Take share I, from 0, of N; N such commands on one folder make the run. [default: 0/1]")
@click.option(
    "--on-term",
    type=click.Choice(["cancel", "requeue"]),
    default="cancel",
    show_default=True,
    help="After SIGTERM: the job is cancelled, exit code 143; or pending, to be started again, exit code 75.",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
def run(
    out: str | None,
    out_root: str | None,
    idempotency_key: str | None,
    quiet: bool,
    no_limits: bool,
    overwrite: bool,
    no_space_check: bool,
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
    from harvest.parts import WHOLE, find_rank, parse_part
    from harvest.progress import Silent, StderrReporter
    from harvest.stop import StopFlag, stopping_on_signals

    if out == "" or out_root == "":
        raise RequestError("out: an empty name was given; name the folder, such as run1 or . for the current one")
    if out is not None and (out_root is not None or idempotency_key is not None):
        raise RequestError("out: it names the folder itself, so --out-root and --idempotency-key mean nothing beside it; leave one out")
    reporter = Silent() if quiet else StderrReporter()
    stop = StopFlag()
    own_part = WHOLE if part is None else parse_part(part)
    with stopping_on_signals(stop, requeues=on_term == "requeue"):
        request, engine = _read_request(reporter, no_limits, **options)
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
        if not overwrite and (answer := find_answer(request, engine, out, root)):
            reporter.note("this run is finished already; nothing was done")
            click.echo(answer.to_json())
            return
        if out is not None:
            check_free(RunFolder(Path(out)), find_rank().share(own_part))
        from harvest.pipeline import run as run_request

        job = run_request(request, out, engine, reporter, stop, root, own_part, overwrite, not no_space_check)
        click.echo(job.to_json())


def _read_request(
    reporter: "Reporter",
    no_limits: bool,
    config: str | None,
    prompts: str | None,
    field: str | None,
    layers: str | None,
    project_onto: str | None,
    **options: Any,
) -> "tuple[HarvestRequest, Engine]":
    """The request and the engine of a command: its config's fields, and over them its options."""
    from harvest.checks import check
    from harvest.input.config import read_config
    from harvest.input.prompts import read_prompts
    from harvest.request import HarvestRequest, parse_layers
    from harvest.settings import Engine

    body, engine = read_config(config) if config else ({}, {})
    fields = given(options)
    engine |= {name: fields.pop(name) for name in list(fields) if name in Engine.model_fields}
    checked_engine = check(Engine, engine)
    body |= fields
    if layers is not None:
        body["layers"] = parse_layers(layers)
    if project_onto is not None:
        from harvest.input.directions import read_directions

        body["project_onto"] = read_directions(project_onto)
    if prompts is not None:
        read = read_prompts(prompts, field)
        body["prompts"] = read.texts
        if read.n_blank:
            reporter.note(f"blank lines left out: {read.n_blank}")
    elif "prompts" not in body:
        raise RequestError("prompts: none were given; name a file with --prompts, or a --config that holds them")
    if "model" not in body:
        body["model"] = "tiny"
        reporter.note("no --model was given: the embedded tiny is used")
    return HarvestRequest.check(body, limits=not no_limits), checked_engine
