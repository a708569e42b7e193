"""harvest sbatch."""

from typing import Any

import click
from click.core import ParameterSource

from harvest.cli.group import cli
from harvest.cli.run import run
from harvest.errors import RequestError


@cli.command(
    short_help="Print or submit the SLURM batch script of a run.",
    epilog="Example: harvest sbatch --time 8:00:00 --parts 4 --submit -- --model llama-8b --prompts prompts.jsonl --layers all --out run1",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--job-name", metavar="NAME", help="The job's name, which its log has too. [default: harvest]")
@click.option("--partition", metavar="NAME", help="The partition. [default: the cluster's]")
@click.option("--account", metavar="NAME", help="The account. [default: yours]")
@click.option(
    "--time", metavar="LIMIT", help="The time limit, as sbatch takes it; the job comes back until all is done. [default: 04:00:00]"
)
@click.option("--nodes", type=int, metavar="N", help="Nodes of the job, or of each element of an array. [default: 1]")
@click.option("--gpus", type=int, metavar="N", help="GPUs of each node, with one process each; 0: one process without. [default: 1]")
@click.option("--cpus", type=int, metavar="N", help="CPUs of each process. [default: 8]")
@click.option("--mem", metavar="SIZE", help="Memory of each node, such as 64G. [default: the cluster's]")
@click.option("--parts", type=int, metavar="N", help="An array of N jobs, each with its part of the run. [default: one job]")
@click.option("--signal-s", type=int, metavar="S", help="Seconds before the time limit at which harvest is told to stop. [default: 120]")
@click.option("--submit", "submits", is_flag=True, help="Hand the script to sbatch, and print the job's id instead.")
@click.argument("options", metavar="RUN-OPTIONS", nargs=-1, type=click.UNPROCESSED)
def sbatch(options: tuple[str, ...], submits: bool, **asked: Any) -> None:
    """Print the batch script of a SLURM job that runs `harvest run` with RUN-OPTIONS.

    Where the time limit cuts it, the job queues itself again and goes on, until the run is whole.
    """
    from harvest.checks import check
    from harvest.sbatch import BatchJob, batch_script, submit

    _check_options(options)
    script = batch_script(check(BatchJob, {name: value for name, value in asked.items() if value is not None}), options)
    click.echo(submit(script) if submits else script, nl=submits)


def _check_options(options: tuple[str, ...]) -> None:
    """Raise RequestError for options with which no batch job can run; one that `harvest run` does not know is an error of click."""
    context = run.make_context("harvest run", list(options))
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if "out" not in given:
        raise RequestError("out: no run folder was given; name one that all nodes see, such as --out run1: all processes share it")
    if context.params.get("prompts") == "-":
        raise RequestError("prompts: - was given, and a batch job has no standard input; name a file")
    if "overwrite" in given:
        raise RequestError(
            "overwrite: a job that comes back would start anew each time; leave it out, and name a new folder or remove the old"
        )
    for name in ("part", "on_term"):
        if name in given:
            raise RequestError(f"{name}: the script gives --{name.replace('_', '-')} itself; leave it out (--parts N makes an array of N)")
