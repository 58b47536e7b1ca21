"""Damage on the disks of a real Ozone cluster's datanodes, while they run."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster, eventually


def block_files(cluster: OzoneCluster, datanode: int, container_id: int) -> list[Path]:
    """The files of a container's blocks on one datanode, by their names."""
    folder = f"hdds/*/current/containerDir*/{container_id}/chunks/*.block"
    return sorted(cluster.volume(datanode).glob(folder), key=lambda path: path.name)


def tree_file(cluster: OzoneCluster, datanode: int, container_id: int) -> Path:
    """The tree file of a container on one datanode."""
    folder = f"hdds/*/current/containerDir*/{container_id}/metadata/{container_id}.tree"
    [found] = cluster.volume(datanode).glob(folder)
    return found


def flip(path: Path, offset: int, length: int = 1) -> None:
    """Flip a bit of each of these bytes."""
    with path.open("r+b") as file:
        file.seek(offset)
        found = file.read(length)
        assert len(found) == length
        file.seek(offset)
        file.write(bytes(byte ^ 1 for byte in found))


def damage_and_reconcile_twice(
    cluster: OzoneCluster, container_id: ContainerId, offsets: Sequence[int]
) -> None:
    """Damage all blocks of each replica at an offset of its own. Each reconcile ends
    with a scan, so that trees and SCM know.
    """
    for datanode, offset in enumerate(offsets, 1):
        for path in block_files(cluster, datanode, container_id):
            flip(path, offset, 4)
    client = ScmClient([cluster.scm_address])
    with closing(client):
        for _ in range(2):
            assert client.reconcile([container_id]) == {container_id: None}
            # The order, the scans and their reports; nothing tells that a reconcile
            # ended.
            time.sleep(6)

        def are_diverged() -> bool:
            found = client.replicas([container_id])[container_id]
            return len({one.data_checksum for one in found}) == len(offsets)

        eventually("each replica has a root of its own", are_diverged)
