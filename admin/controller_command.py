"""`treefold scm`: the controller's commands, with clusters named in client.toml."""

from functools import partial

import click

from admin.clusters import cluster_addresses
from scm.cli import controller_commands


def _addresses(_context: click.Context, _option: click.Parameter, text: str | None) -> object:
    return partial(cluster_addresses, text) if text else None


scm = controller_commands(
    click.option(
        "--cluster",
        metavar="NAME|HOST:PORT",
        callback=_addresses,
        help=(
            "Drive a running Ozone cluster without agents: a name of `clusters` in client.toml, or"
            " the client ports of its SCMs, with commas between."
        ),
    )
)
