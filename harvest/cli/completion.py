"""harvest completion: what a shell needs to complete the command's words."""

import click

from harvest.cli.group import cli


@cli.command(short_help="Print a shell's completion script.", epilog="Example: harvest completion bash > ~/.harvest-completion.bash")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete commands, options and model ids; source it in the shell's own start file."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "harvest", "_HARVEST_COMPLETE").source())
