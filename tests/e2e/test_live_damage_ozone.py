"""Damage of every kind on the disks of a real Ozone 2.2 cluster's datanodes gets its
verdict, and agents beside the running datanodes find the same. Run by `make
test-ozone`.
"""

import json
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from merkle.columns import encode_tree
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.rocks import Batch, OzoneTable, block_key
from ozone.scm_client import ScmClient
from ozone.volume import Hold, open_volume
from protos.convert import tree_from_bytes
from runtime.disk import Disk
from tests.support.ozone import OzoneCluster, eventually
from tests.support.ozone_damage import block_files, flip, tree_file
from tests.support.processes import TreefoldProcess

pytestmark = [pytest.mark.ozone(is_last=7), pytest.mark.timeout(900)]

SIZES = (200_000, 5_242_883)
CHUNK_BYTES = 4 << 20
# One container for each kind of damage, on the first datanode.
KINDS = (
    "healthy", "bit flip", "truncated", "missing file", "missing row", "missing tree",
    "stale tree", "deleted on one", "missing replica",
)  # fmt: skip


@pytest.fixture(scope="module")
def containers(
    ozone_cluster: OzoneCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ContainerId]:
    """A closed container with a block of each size for each kind of damage."""
    folder = tmp_path_factory.mktemp("keys")
    for size in SIZES:
        (folder / str(size)).write_bytes(random.Random(size).randbytes(size))
    place = f"/damage-{secrets.token_hex(4)}/buck1"
    ozone_cluster.shell(f"volume create {place[:-6]}", f"bucket create {place}")
    ozone_cluster.close_open()
    found = list[ContainerId]()
    while len(found) < len(KINDS):
        ozone_cluster.shell(
            *(f"key put {place}/{len(found)}-{size} {folder / str(size)}" for size in SIZES)
        )
        closed = ozone_cluster.close_open()
        found += [one for one in closed if len(block_files(ozone_cluster, 1, one)) == len(SIZES)]
    return dict(zip(KINDS, found, strict=False))


@pytest.fixture(scope="module")
def damaged(
    ozone_cluster: OzoneCluster,
    containers: dict[str, ContainerId],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, ContainerId]:
    """The containers once each has its damage. Rows and replicas vanish while the first
    datanode is stopped.
    """
    cluster, disk = ozone_cluster, Disk()
    cluster.stop(1)
    state = tmp_path_factory.mktemp("state")
    with open_volume(cluster.volume(1), hold=Hold.OWNER, state_folder=state, disk=disk) as volume:
        batch = Batch()
        row = containers["missing row"]
        batch.delete(OzoneTable.BLOCK_DATA, block_key(row, first_block(cluster, row)))
        volume.database.write(batch)
    shutil.rmtree(block_files(cluster, 1, containers["missing replica"])[0].parents[1])
    cluster.start(1)
    flip(large(cluster, containers["bit flip"]), CHUNK_BYTES + 100)
    with large(cluster, containers["truncated"]).open("r+b") as file:
        file.truncate(CHUNK_BYTES + 20_000)
    large(cluster, containers["missing file"]).unlink()
    tree_file(cluster, 1, containers["missing tree"]).unlink()
    rewrite(cluster, containers["stale tree"], without_last_chunk)
    rewrite(cluster, containers["deleted on one"], with_tombstone)
    client = ScmClient([cluster.scm_address])
    with closing(client):
        gone = containers["missing replica"]
        eventually(
            "SCM hears of the restarted datanode",
            lambda: (
                len(client.replicas([gone])[gone]) == 2
                and all(
                    len(client.replicas([one])[one]) == 3
                    for one in containers.values()
                    if one != gone
                )
            ),
            120,
        )
    return containers


def large(cluster: OzoneCluster, container_id: ContainerId) -> Path:
    """The file of the large block on the first datanode."""
    return max(block_files(cluster, 1, container_id), key=lambda path: path.stat().st_size)


def first_block(cluster: OzoneCluster, container_id: ContainerId) -> BlockId:
    return BlockId(int(large(cluster, container_id).stem))


def rewrite(cluster: OzoneCluster, container_id: ContainerId, change: Any) -> None:
    """Change the tree file of the first datanode, as an older or newer one."""
    path = tree_file(cluster, 1, container_id)
    tree = tree_from_bytes(path.read_bytes(), container_id)
    path.write_bytes(encode_tree(ContainerTree.of(container_id, change(tree))))


def without_last_chunk(tree: ContainerTree) -> list[BlockTree]:
    blocks = [one for one in tree.blocks if len(one.chunks) == 1]
    [longest] = [one for one in tree.blocks if len(one.chunks) == 2]
    return [*blocks, BlockTree.live(longest.block_id, longest.chunks[:1])]


def with_tombstone(tree: ContainerTree) -> list[BlockTree]:
    first, *rest = tree.blocks
    return [BlockTree.tombstone(first.block_id, first.data_checksum), *rest]


def diagnose(cluster: OzoneCluster, *words: str) -> tuple[int, dict[int, dict[str, Any]]]:
    command = ["diagnose", "--cluster", cluster.scm_address, "--json", *words]
    done = subprocess.run(
        [sys.executable, "-m", "admin.cli", *command], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    data = json.loads(done.stdout)["data"]
    return done.returncode, {one["containerID"]: one for one in data["findings"]}


def differences(found: dict[int, dict[str, Any]], container_id: int) -> tuple[str, set[str]]:
    """The verdict of a container, and the kinds of its differences."""
    if container_id not in found:
        return "MATCH", set()
    one = found[container_id]
    return one["verdict"], {each["kind"] for each in one["differences"]}


TREES = {
    # What no scan has seen yet is in no tree.
    "healthy": ("MATCH", set()),
    "bit flip": ("MATCH", set()),
    "truncated": ("MATCH", set()),
    "missing file": ("MATCH", set()),
    "missing row": ("MATCH", set()),
    # Its datanode builds one from the records.
    "missing tree": ("MATCH", set()),
    "stale tree": ("REPAIRABLE", {"missing_chunk"}),
    "deleted on one": ("REPAIRABLE", {"deleted_block"}),
    "missing replica": ("UNKNOWN", set()),
}
DATA = TREES | {
    "bit flip": ("REPAIRABLE", {"corrupt_chunk"}),
    "truncated": ("REPAIRABLE", {"corrupt_chunk"}),
    "missing file": ("REPAIRABLE", {"missing_chunk"}),
    "missing row": ("REPAIRABLE", {"missing_block"}),
    "stale tree": ("MATCH", set()),
}


def test_each_kind_of_damage_gets_its_verdict_by_trees(
    ozone_cluster: OzoneCluster, damaged: dict[str, ContainerId]
) -> None:
    status, found = diagnose(ozone_cluster, "--agents", "none", *map(str, damaged.values()))
    assert {kind: differences(found, one) for kind, one in damaged.items()} == TREES
    assert status == 3


@pytest.fixture
def agents(
    ozone_cluster: OzoneCluster, damaged: dict[str, ContainerId], tmp_path: Path
) -> Iterator[str]:
    """An agent beside each of the running datanodes; their addresses."""
    addresses = list[str]()
    with ExitStack() as stack:
        for datanode in (1, 2, 3):
            words = ["--volume", str(ozone_cluster.volume(datanode))]
            words += ["--state-folder", str(tmp_path / f"state{datanode}")]
            process = TreefoldProcess(
                tmp_path / f"agent{datanode}", "agent", "run", *words, "--listen", "127.0.0.1:0"
            )
            addresses.append(stack.enter_context(process).address())
        yield ",".join(addresses)


def test_agents_beside_running_datanodes_find_what_reading_all_data_finds(
    ozone_cluster: OzoneCluster, damaged: dict[str, ContainerId], agents: str
) -> None:
    """First the agents, since a failed read over the wire makes a datanode scan."""
    ids = [*map(str, damaged.values())]
    status, found = diagnose(ozone_cluster, "--deep", "--agents", agents, *ids)
    assert {kind: differences(found, one) for kind, one in damaged.items()} == DATA
    assert status == 3
    for one in found.values():
        assert {each["readBy"] for each in one["replicas"]} == {"agent"}, one
    status, bare = diagnose(ozone_cluster, "--deep", "--agents", "none", *ids)
    assert {kind: differences(bare, one) for kind, one in damaged.items()} == DATA
    assert {one: each["differences"] for one, each in bare.items()} == {
        one: each["differences"] for one, each in found.items()
    }
