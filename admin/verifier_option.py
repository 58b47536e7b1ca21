"""The option `--verifier` of commands that compare two buckets."""

import os
from collections.abc import Callable
from functools import wraps

import click

from admin.tls_options import check_option_address, security_of, tls_options
from runtime.errors import UsageError


def verifier_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--verifier` and how to reach it. The command gets a client as `verifier`,
    which is closed afterwards, or None.
    """

    @click.option(
        "--verifier",
        "address",
        metavar="HOST:PORT",
        help=(
            "The verifier beside TARGET (`treefold verifier run`): keys are compared by some bytes"
            " for each difference, and small writes cross in batches."
        ),
    )
    @tls_options("verifier")
    @wraps(command)
    def connected(
        *,
        address: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_ca: str | None,
        insecure: bool,
        **options: object,
    ) -> None:
        if address is None:
            if tls_cert or tls_key or tls_ca or insecure:
                raise UsageError("--tls-cert, --tls-key, --tls-ca and --insecure need --verifier")
            command(verifier=None, **options)
            return
        check_option_address("--verifier", address)
        # Imported here: they are slow to import, and most syncs have no verifier.
        from admin.client_config import client_config
        from replicator.verifier.client import VerifierClient

        security = security_of(
            tls_cert, tls_key, tls_ca, client_config(os.environ), insecure=insecure
        )
        client = VerifierClient(address, tls=security.tls, insecure=security.insecure)
        try:
            command(verifier=client, **options)
        finally:
            client.close()

    return connected
