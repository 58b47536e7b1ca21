"""The option `--master` of commands that ask a replication master."""

import os
from collections.abc import Callable
from functools import wraps

import click

from admin.client_config import MASTER_DEFAULT, client_config
from admin.requester import requester
from admin.tls_options import check_option_address, security_of, tls_options
from replicator.master.client import MasterClient


def master_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--master` and how to reach it. The command gets a client as `master`, which
    is closed afterwards.
    """

    @click.option(
        "--master",
        "addresses",
        metavar="HOST:PORT",
        multiple=True,
        show_default=MASTER_DEFAULT,
        help=(
            "A replication master; several times for several, of which one has to answer. Also set"
            " by `replication_masters` in client.toml, which has the files of TLS too."
        ),
    )
    @tls_options("replication master")
    @wraps(command)
    def connected(
        *,
        addresses: tuple[str, ...],
        tls_cert: str | None,
        tls_key: str | None,
        tls_ca: str | None,
        insecure: bool,
        **options: object,
    ) -> None:
        config = client_config(os.environ)
        for address in addresses:
            check_option_address("--master", address)
        security = security_of(tls_cert, tls_key, tls_ca, config, insecure=insecure)
        client = MasterClient(
            addresses or config.replication_masters,
            requested_by=requester(),
            tls=security.tls,
            insecure=security.insecure,
        )
        try:
            command(master=client, **options)
        finally:
            client.close()

    return connected
