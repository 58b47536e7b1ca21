"""`treefold completion`: the script by which a shell completes our commands."""

import click
from click.shell_completion import get_completion_class

from runtime.output import print_line

_SHELLS = ("bash", "fish", "zsh")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete commands and options.

    For bash (4.4 or newer) write it to /etc/bash_completion.d/treefold; for fish to
    ~/.config/fish/completions/treefold.fish; for zsh to a file _treefold in a folder of
    $fpath. The shell asks treefold itself, so that it needs no other after an upgrade.
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows all of them"
    root = ctx.find_root()
    script = found(root.command, {}, "treefold", "_TREEFOLD_COMPLETE").source()
    for line in script.splitlines():
        print_line(line)
