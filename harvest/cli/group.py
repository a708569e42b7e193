"""The command itself: where its errors are shown, and what its subcommands share.

Nothing heavy is imported before it is needed: --help, and every error in the command line, answer without torch.
"""

import sys
from collections.abc import Callable
from typing import Any

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
        except OSError as error:
            # Of a name that is too long, say: the system's own words name the file and what is wrong with it.
            click.echo(f"harvest: error: {error.filename or 'the system'}: {error.strerror or error}", err=True)
            ctx.exit(HarvestError.exit_code)
        except KeyboardInterrupt:
            # Before a run has begun there is nothing to finish.
            click.echo("harvest: stopped; nothing was begun", err=True)
            ctx.exit(CancelledError.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="harvest")
def cli() -> None:
    """Read the residual stream of a language model for every token of a set of prompts, and write it to disk."""
    # Before anything is imported that reads these once.
    _quiet_libraries()


def loading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that loads a model: fields of the engine, left out where they are not given."""
    options = [
        click.option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps. [default: auto]"),
        click.option("--device-map", metavar="MAP", help="auto spreads the weights over cards, host memory and disk. [default: none]"),
        click.option(
            "--max-memory", metavar="LIMITS", help="With --device-map auto: the most for weights, such as cuda:0=70GiB,cpu=100GiB."
        ),
        click.option("--trust-remote-code", is_flag=True, default=None, help="Run the code that a model's files bring along."),
        click.option("--allow-pickle", is_flag=True, default=None, help="Load weights from pickle files where there are no safetensors."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _quiet_libraries() -> None:
    """Keep what is not harvest's own off stderr: transformers' progress bars and advice, and warnings meant for developers."""
    import os
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
