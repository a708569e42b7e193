"""harvest status and harvest cancel: a run that another process works on."""

import click

from harvest.cli.group import cli


@cli.command(short_help="Print the job of a run.", epilog="Example: harvest status run1 --wait 60")
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, metavar="S", help="Wait up to S seconds for its status to change.")
def status(folder: str, wait: float) -> None:
    """Print the job of a run folder as JSON, with fresh links, also while another process or machine works on it.

    How far such a process is goes to stderr, a line each. DIR may be s3://BUCKET/PREFIX (gs://, az://) too: then the links are signed, for
    7 days or as long as temporary credentials last.
    """
    from harvest.control import status as read_status
    from harvest.control import under_way
    from harvest.output.staged import open_folder

    def say(text: str) -> None:
        click.echo(f"harvest: {text}", err=True)

    found = open_folder(folder)
    job = read_status(found, wait, say)
    for line in under_way(found):
        say(line)
    click.echo(job.to_json())


@cli.command(short_help="Cancel a run.", epilog="Example: harvest cancel run1")
@click.argument("folder", metavar="DIR", type=click.Path())
def cancel(folder: str) -> None:
    """Cancel a queued or running run, wait until its process has stopped, and print the job.

    Its finished shards stay, and the command that started it can finish it. A run that has ended stays as it is.
    """
    from harvest.control import cancel as cancel_run
    from harvest.output.staged import open_folder

    click.echo(cancel_run(open_folder(folder)).to_json())
