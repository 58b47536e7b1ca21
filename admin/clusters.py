"""The option `--cluster`: a running Ozone cluster without agents, by its SCMs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from admin.client_config import client_config
from ozone.datanode_client import DatanodeClient
from ozone.scm_client import SCM_PORT, ClusterNode, ScmClient
from runtime.errors import UsageError
from runtime.rpc import Deadlines, open_channel
from runtime.setting_values import check_address

# A datanode that takes longer for the trees of a batch is reported as silent.
_DEADLINES = Deadlines(tree_s=30.0)
# SCMs elect a leader within some seconds of the end of the last one.
_ELECTION_S = 20.0

UNKNOWN_CONTAINER_HINT = (
    "`treefold container list --cluster ...` lists those that SCM knows; it forgets deleted ones."
)


def cluster_option(
    *, required: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the option. The command gets the text as `cluster`, for `open_cluster`."""
    return click.option(
        "--cluster",
        metavar="NAME|HOST:PORT",
        required=required,
        help=(
            "A running Ozone cluster, asked without agents: a name of `clusters` in client.toml,"
            f" or the client ports of its SCMs (usually {SCM_PORT}), with commas between."
        ),
    )


@contextmanager
def open_cluster(cluster: str) -> Iterator[ScmClient]:
    """A client of the SCMs of the cluster that `--cluster` names.

    Raises:
        ConfigError: client.toml is invalid.
        UsageError: the text is neither a name in it nor addresses.
    """
    client = ScmClient(cluster_addresses(cluster), election_s=_ELECTION_S)
    try:
        yield client
    finally:
        client.close()


def open_datanode(node: ClusterNode) -> DatanodeClient:
    """A client of a datanode of an unsecured cluster, where Ozone itself uses no
    TLS.
    """
    channel = open_channel(node.address, insecure=True)
    return DatanodeClient(
        channel, f"datanode {node.peer}", datanode_id=node.peer, deadlines=_DEADLINES
    )


def cluster_addresses(cluster: str) -> tuple[str, ...]:
    """The addresses of the SCMs of the cluster that `--cluster` names.

    Raises:
        ConfigError: client.toml is invalid.
        UsageError: the text is neither a name in it nor addresses.
    """
    known = client_config(os.environ).clusters
    if cluster in known:
        return known[cluster]
    addresses = tuple(part.strip() for part in cluster.split(","))
    try:
        for address in addresses:
            check_address(address)
    except ValueError as error:
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(
            f"--cluster {cluster}: {error}",
            hint=f"Clusters named in client.toml: {names}. Otherwise give HOST:PORT of SCM.",
        ) from error
    return addresses
