"""The command itself: where its errors are shown, and what its subcommands share.

Nothing heavy is imported before it is needed: --help, and every error in the command line, answer without torch.
"""

import sys
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


class SectionedOption(click.Option):
    """An option that stands in a section of its command's help."""

    def __init__(self, *args: Any, section: str, **attributes: Any) -> None:
        self.section = section
        super().__init__(*args, **attributes)


class SectionedCommand(click.Command):
    """A command whose help has its options in sections, in the order in which they first come."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "section", "Other"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="harvest")
def cli() -> None:
    """Read the residual stream of a language model for every token of a set of prompts, and write it to disk."""
    # Before anything is imported that reads these once.
    _quiet_libraries()


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
