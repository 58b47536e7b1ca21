"""Damage of every kind on the disks of a real Ozone 2.2 cluster's datanodes gets its
verdict, and agents beside the running datanodes find the same. Run by `make
test-ozone`.
"""

import json
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
from tests.support.ozone_containers import closed_with
from tests.support.ozone_damage import block_files, flip, tree_file
from tests.support.processes import TreefoldProcess
from tests.support.s3_servers import S3Endpoint

pytestmark = [
    pytest.mark.ozone(is_last=7),
    pytest.mark.datanodes,
    pytest.mark.timeout(900),
]

# One block of each size in each container.
LOST, ROW, CUT, LARGE = SIZES = (200_000, 300_000, 400_000, 5_242_883)
CHUNK_BYTES = 4 << 20
# What is damaged of a container's replica on the first datanode. It finds a missing row
# at its start, when it scans the containers in their order: that one is the last.
KINDS = ("tree file", "tree entries", "bytes", "replica", "row")


@pytest.fixture(scope="module")
def containers(ozone_cluster: OzoneCluster, ozone_gateway: S3Endpoint) -> dict[str, ContainerId]:
    """A closed container for each kind of damage."""
    bucket = ozone_gateway.fresh_bucket()
    return dict(
        zip(KINDS, closed_with(ozone_cluster, bucket, SIZES, count=len(KINDS)), strict=True)
    )


@pytest.fixture(scope="module")
def damaged(
    ozone_cluster: OzoneCluster,
    containers: dict[str, ContainerId],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, ContainerId]:
    """The containers once each has its damage. A row and a replica vanish while the
    datanode is stopped.
    """
    cluster, row, gone = ozone_cluster, containers["row"], containers["replica"]
    folder = tmp_path_factory.mktemp("state")
    cluster.stop(1)
    with open_volume(
        cluster.volume(1), hold=Hold.OWNER, state_folder=folder, disk=Disk()
    ) as volume:
        batch = Batch()
        block_id = BlockId(int(file_of(cluster, row, ROW).stem))
        batch.delete(OzoneTable.BLOCK_DATA, block_key(row, block_id))
        volume.database.write(batch)
    shutil.rmtree(block_files(cluster, 1, gone)[0].parents[1])
    cluster.start(1)
    client = ScmClient([cluster.scm_address])
    with closing(client):

        def is_reported() -> bool:
            found = client.replicas([*containers.values()])
            return {number: len(found[number]) for number in found} == {
                number: 2 if number == gone else 3 for number in containers.values()
            }

        eventually("SCM hears of the restarted datanode", is_reported, 120)
    eventually("it scanned the row's container", lambda: row in diagnose(cluster, str(row))[1], 120)
    number = containers["bytes"]
    flip(file_of(cluster, number, LARGE), CHUNK_BYTES + 100)
    with file_of(cluster, number, CUT).open("r+b") as file:
        file.truncate(20_000)
    file_of(cluster, number, LOST).unlink()
    tree_file(cluster, 1, containers["tree file"]).unlink()
    change_tree(cluster, containers["tree entries"])
    return containers


def file_of(cluster: OzoneCluster, container_id: ContainerId, size: int) -> Path:
    """The file of the block of this size on the first datanode."""
    return next(
        path for path in block_files(cluster, 1, container_id) if path.stat().st_size == size
    )


def change_tree(cluster: OzoneCluster, container_id: ContainerId) -> None:
    """Give the first datanode a tree that lacks a chunk, as an older one does, and has
    a block deleted, as a newer one does.
    """
    path = tree_file(cluster, 1, container_id)
    tree = tree_from_bytes(path.read_bytes(), container_id)
    large, lost = (int(file_of(cluster, container_id, size).stem) for size in (LARGE, LOST))
    blocks = list[BlockTree]()
    for block in tree.blocks:
        if block.block_id == large:
            blocks.append(BlockTree.live(block.block_id, block.chunks[:1]))
        elif block.block_id == lost:
            blocks.append(BlockTree.tombstone(block.block_id, block.data_checksum))
        else:
            blocks.append(block)
    path.write_bytes(encode_tree(ContainerTree.of(container_id, blocks)))


def diagnose(cluster: OzoneCluster, *words: str) -> tuple[int, dict[int, dict[str, Any]]]:
    command = ["diagnose", "--cluster", cluster.scm_address, "--json", *words]
    done = subprocess.run(
        [sys.executable, "-m", "admin.cli", *command], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    data = json.loads(done.stdout)["data"]
    return done.returncode, {one["containerID"]: one for one in data["findings"]}


def verdicts(
    cluster: OzoneCluster, found: dict[int, dict[str, Any]], containers: dict[str, ContainerId]
) -> dict[str, tuple[str, set[tuple[str, int]]]]:
    """The verdict by what is damaged, and each difference with its block's size."""
    result = {}
    for kind, number in containers.items():
        sizes = {path.stem: path.stat().st_size for path in block_files(cluster, 2, number)}
        one = found.get(number, {"verdict": "MATCH", "differences": []})
        kinds = {(each["kind"], sizes[each["blockID"]]) for each in one["differences"]}
        result[kind] = one["verdict"], kinds
    return result


# A datanode builds a tree that is gone from its records. What no scan has seen yet is
# in no tree.
TREES = {
    "tree file": ("MATCH", set()),
    "tree entries": ("REPAIRABLE", {("missing_chunk", LARGE), ("deleted_block", LOST)}),
    "bytes": ("MATCH", set()),
    "replica": ("UNKNOWN", set()),
    "row": ("REPAIRABLE", {("missing_block", ROW)}),
}
# A deletion stays; of all else the data decide.
DATA = TREES | {
    "tree entries": ("REPAIRABLE", {("deleted_block", LOST)}),
    "bytes": (
        "REPAIRABLE",
        {("corrupt_chunk", LARGE), ("corrupt_chunk", CUT), ("missing_chunk", LOST)},
    ),
}


def test_each_kind_of_damage_gets_its_verdict_by_trees(
    ozone_cluster: OzoneCluster, damaged: dict[str, ContainerId]
) -> None:
    status, found = diagnose(ozone_cluster, "--agents", "none", *map(str, damaged.values()))
    assert verdicts(ozone_cluster, found, damaged) == TREES
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
    assert verdicts(ozone_cluster, found, damaged) == DATA
    assert status == 3
    for one in found.values():
        assert {each["readBy"] for each in one["replicas"]} == {"agent"}, one
    status, bare = diagnose(ozone_cluster, "--deep", "--agents", "none", *ids)
    assert verdicts(ozone_cluster, bare, damaged) == DATA
    assert {one: each["differences"] for one, each in bare.items()} == {
        one: each["differences"] for one, each in found.items()
    }
