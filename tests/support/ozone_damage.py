"""Damage on the disks of a real Ozone cluster's datanodes, while they run."""

import re
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


def scanned_ms(cluster: OzoneCluster, datanode: int, container_id: int) -> int:
    """When a datanode has scanned a replica's data, by its descriptor; 0 for never, and
    while the descriptor is replaced.
    """
    folder = f"hdds/*/current/containerDir*/{container_id}/metadata/{container_id}.container"
    for path in cluster.volume(datanode).glob(folder):
        found = re.search(r"dataScanTimestamp: (\d+)", path.read_text())
        return int(found[1]) if found else 0
    return 0


def damage_and_reconcile_twice(
    cluster: OzoneCluster, container_id: ContainerId, offsets: Sequence[int]
) -> None:
    """Damage all blocks of each replica at an offset of its own. Each reconcile ends
    with a scan, so that trees and SCM know.
    """
    for datanode, offset in enumerate(offsets, start=1):
        for path in block_files(cluster, datanode, container_id):
            flip(path, offset, 4)
    for _ in range(2):
        await_scans(cluster, container_id)
    client = ScmClient([cluster.scm_address])
    with closing(client):

        def are_diverged() -> bool:
            found = client.replicas([container_id])[container_id]
            return len({one.data_checksum for one in found}) == len(offsets)

        eventually("each replica has a root of its own", are_diverged)


def await_scans(cluster: OzoneCluster, container_id: ContainerId) -> None:
    """Have Ozone reconcile a container, which ends with a scan of each replica."""
    datanodes = range(1, 4)

    def ended() -> list[int]:
        # Their logs alone tell that a reconcile has ended.
        line = f"DONE reconcileContainerCommand: containerId={container_id}, "
        return [cluster.log(datanode).count(f"Task - {line}") for datanode in datanodes]

    # A datanode drops a scan that comes too soon after the one before (OZONE_SCAN_GAP),
    # and tells nobody: there is nothing to wait for but the time.
    time.sleep(1.5)
    before, ordered_ms = ended(), int(time.time() * 1000)
    with closing(ScmClient([cluster.scm_address])) as client:
        assert client.reconcile([container_id]) == {container_id: None}

    def have_ended() -> bool:
        return all(now > then for now, then in zip(ended(), before, strict=True)) and all(
            scanned_ms(cluster, one, container_id) > ordered_ms for one in datanodes
        )

    eventually("each datanode has reconciled and scanned", have_ended)
