"""The command. Each subcommand reads its arguments, calls the library once, and prints; results go to stdout, all else to stderr.

Nothing heavy is imported before it is needed: --help, and every error in the command line, answer without torch.
"""

import sys
from typing import Any, NoReturn

import click

from harvest.errors import CancelledError, HarvestError


class _Group(click.Group):
    """The one place that shows an error of harvest: its text, without a traceback, and its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HarvestError as error:
            click.echo(f"harvest: error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            # Before a run has begun there is nothing to finish.
            click.echo("harvest: stopped; nothing was begun", err=True)
            ctx.exit(CancelledError.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="harvest")
def cli() -> None:
    """Read the residual stream of a language model for every token of a set of prompts, and write it to disk."""


@cli.command(
    short_help="Harvest the prompts of a file.", epilog="Example: harvest run --model tiny --prompts prompts.jsonl --layers all --out run1"
)
@click.option("--model", metavar="ID", help="A registry id, Hugging Face id, folder or GGUF file. [default: tiny, random weights]")
@click.option("--prompts", metavar="FILE", required=True, help=".jsonl, .json or .txt, each also .gz; - reads jsonl from stdin.")
@click.option("--field", metavar="NAME", help="The key of the text where a prompt is an object. [default: prompt or text]")
@click.option("--layers", metavar="LAYERS", help='"all", or block numbers from 0 such as 8,16,24 or 0-3. [default: the quartiles]')
@click.option("--shard-size", type=int, metavar="N", help="Prompts in each shard file, 1 to 4096. [default: 32]")
@click.option("--batch-size", type=int, metavar="N", help="Kept in the manifest, as the API does; the engine sizes its own batches.")
@click.option("--add-special-tokens/--no-add-special-tokens", default=None, help="Put the start token before each prompt. [default: add]")
@click.option("--out", type=click.Path(), metavar="DIR", help="The run folder. [default: runs/MODEL-DIGEST]")
@click.option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps. [default: auto]")
@click.option("--compute-dtype", metavar="DTYPE", help="auto, bfloat16, float16 or float32. [default: auto]")
@click.option("--store-dtype", metavar="DTYPE", help="auto, bfloat16, float16 or float32. [default: auto, bfloat16]")
@click.option("--codec", metavar="CODEC", help="auto, lz4, zstd or none. [default: auto, lz4 for bfloat16]")
@click.option("--context-length", type=int, metavar="N", help="Tokens of context; a prompt keeps its first N - 1. [default: the model's]")
@click.option("--batch-tokens", type=int, metavar="N", help="Padded tokens of one forward pass. [default: by device]")
@click.option("--window-bytes", type=int, metavar="N", help="Host memory for captured rows, in bytes. [default: 2 GiB]")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
def run(prompts: str, field: str | None, layers: str | None, out: str | None, quiet: bool, **options: Any) -> None:
    """Harvest the prompts of a file, and print the job as JSON.

    The same command on an unfinished run finishes it; on a finished one it answers at once.
    """
    from harvest.checks import check
    from harvest.contract import HarvestRequest, parse_layers
    from harvest.input.prompts import read_prompts
    from harvest.model.sources import find_model
    from harvest.progress import Silent, StderrReporter
    from harvest.settings import Engine

    reporter = Silent() if quiet else StderrReporter()
    given = {name: value for name, value in options.items() if value is not None}
    engine = check(Engine, {name: given.pop(name) for name in list(given) if name in Engine.model_fields})
    if layers is not None:
        given["layers"] = parse_layers(layers)
    if "model" not in given:
        reporter.note("no --model was given: the embedded tiny is used")
    read = read_prompts(prompts, field)
    if read.n_blank:
        reporter.note(f"{read.n_blank} blank lines were left out")
    request = check(HarvestRequest, {"model": "tiny", "prompts": read.texts, **given})

    # A mistyped model is an error before torch is imported, which takes seconds.
    find_model(request.model)
    _quiet_libraries()
    from harvest.pipeline import run as run_request

    click.echo(run_request(request, out, engine, reporter).to_json())


def _quiet_libraries() -> None:
    """Keep what is not harvest's own off stderr: transformers' progress bars and advice, and warnings meant for developers."""
    import os
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def main() -> NoReturn:
    """Run the command; its exit code is 0 when done, 1 when a run failed, 2 when a request cannot be run."""
    cli(prog_name="harvest")
    raise AssertionError("click ends the process")
