"""The command. Each subcommand reads its arguments, calls the library once, and prints; results go to stdout, all else to stderr."""

from typing import NoReturn

from harvest.cli import completion, job, lists, plan, results, run, sbatch
from harvest.cli.group import cli

__all__ = ["cli", "completion", "job", "lists", "main", "plan", "results", "run", "sbatch"]


def main() -> NoReturn:
    """Run the command; its exit code is 0 when done, 1 when a run failed, 2 when a request cannot be run."""
    cli(prog_name="harvest")
    raise AssertionError("click ends the process")
