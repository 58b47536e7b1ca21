"""A real Ozone 2.2 cluster is diagnosed while it runs, without agents. Run by
`make test-ozone`.
"""

import json
import random
import secrets
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster, eventually
from tests.support.ozone_containers import closed_with
from tests.support.ozone_damage import block_files, flip
from tests.support.s3_servers import S3Endpoint

pytestmark = [
    pytest.mark.ozone(is_last=1),
    pytest.mark.datanodes,
    pytest.mark.timeout(900),
]

SIZES = (300_000, 5_242_883, 400_000)
WINDOW = 16_384


@pytest.fixture(scope="module")
def containers(ozone_cluster: OzoneCluster, ozone_gateway: S3Endpoint) -> list[ContainerId]:
    """Three closed containers, each with a block of each size."""
    return closed_with(ozone_cluster, ozone_gateway.fresh_bucket(), SIZES, count=3)


def treefold(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "admin.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done


def files(cluster: OzoneCluster, datanode: int, container_id: int) -> dict[int, Path]:
    """The files of a container's blocks on one datanode, by their sizes."""
    return {path.stat().st_size: path for path in block_files(cluster, datanode, container_id)}


def diagnose(cluster: OzoneCluster, *words: str) -> tuple[int, dict[int, dict[str, Any]]]:
    done = treefold("diagnose", "--cluster", cluster.scm_address, "--json", *words)
    data = json.loads(done.stdout)["data"]
    return done.returncode, {one["containerID"]: one for one in data["findings"]}


def test_a_healthy_cluster_is_equal_in_trees_and_in_data(
    ozone_cluster: OzoneCluster, containers: list[ContainerId]
) -> None:
    ids = [*map(str, containers)]
    assert diagnose(ozone_cluster, *ids) == (0, {})
    assert diagnose(ozone_cluster, "--deep", *ids) == (0, {})
    for command in ("doctor", "status"):
        assert treefold(command, "--cluster", ozone_cluster.scm_address).returncode == 0


def test_damage_of_each_kind_gets_its_verdict(
    ozone_cluster: OzoneCluster, containers: list[ContainerId]
) -> None:
    healthy, damaged, lost = containers
    for datanode in (1, 2, 3):
        # Another window on each: they complete each other.
        flip(files(ozone_cluster, datanode, damaged)[SIZES[1]], datanode * WINDOW)
        # The same one on all.
        flip(files(ozone_cluster, datanode, lost)[SIZES[0]], 100)
    flip(files(ozone_cluster, 1, damaged)[SIZES[0]], 100)
    files(ozone_cluster, 2, damaged)[SIZES[2]].unlink()
    status, found = diagnose(ozone_cluster, "--deep", *map(str, containers))
    assert status == 4
    assert healthy not in found
    assert found[lost]["verdict"] == "UNRECOVERABLE"
    assert found[damaged]["verdict"] == "REPAIRABLE"
    kinds = {(one["kind"], len(one["lacking"])) for one in found[damaged]["differences"]}
    assert kinds == {("corrupt_chunk", 3), ("corrupt_chunk", 1), ("missing_block", 1)} or kinds == {
        ("corrupt_chunk", 3), ("corrupt_chunk", 1), ("missing_chunk", 1),
    }  # fmt: skip
    assert diagnose(ozone_cluster, str(healthy)) == (0, {})


def test_the_stripes_of_an_erasure_coded_container_are_verified(
    ozone_cluster: OzoneCluster, tmp_path: Path
) -> None:
    """XOR-2-1 with cells of 1 MiB: two stripes, of which the second is short."""
    (tmp_path / "key").write_bytes(random.Random(5).randbytes(3_300_000))
    place = f"/coded-{secrets.token_hex(4)}/buck1"
    ozone_cluster.shell(f"volume create {place[:-6]}", f"bucket create {place}")
    others = ozone_cluster.begin_to_close()
    options = "--type EC --replication xor-2-1-1024k"
    ozone_cluster.shell(f"key put {options} {place}/key {tmp_path / 'key'}")
    [number] = ozone_cluster.await_closed(ozone_cluster.begin_to_close(but=others))
    # SCM says that it is closed before each of its datanodes has closed it.
    eventually("all is equal", lambda: diagnose(ozone_cluster, "--deep", str(number)) == (0, {}))
    client = ScmClient([ozone_cluster.scm_address])
    with closing(client):
        replicas = client.replicas([number])[number]
    indexes = {one.peer: one.replica_index for one in replicas}
    damaged = 1
    for path in files(ozone_cluster, damaged, number).values():
        flip(path, (1 << 20) + 100)
    status, found = diagnose(ozone_cluster, "--deep", str(number))
    assert (status, found[number]["verdict"]) == (3, "REPAIRABLE")
    [lacking] = [one["lacking"] for one in found[number]["differences"]]
    [stripe] = found[number]["stripes"]["damaged"]
    assert stripe["lackingIndexes"] == [indexes[PeerId(peer)] for peer in lacking]
    assert (stripe["stripe"], stripe["readable"]) == (1, True)
    for path in files(ozone_cluster, damaged + 1, number).values():
        flip(path, 100)
        flip(path, (1 << 20) + 300)
    status, found = diagnose(ozone_cluster, "--deep", str(number))
    assert (status, found[number]["verdict"]) == (4, "UNRECOVERABLE")
    damages = found[number]["stripes"]["damaged"]
    assert [(one["stripe"], one["readable"]) for one in damages] == [(0, True), (1, False)]


def test_a_stopped_datanode_makes_a_verdict_unknown(
    ozone_cluster: OzoneCluster, containers: list[ContainerId]
) -> None:
    ozone_cluster.stop(3)
    try:
        status, found = diagnose(ozone_cluster, str(containers[0]))
        assert status == 7
        assert found[containers[0]]["verdict"] == "UNKNOWN"
        assert found[containers[0]]["unreachable"]
    finally:
        ozone_cluster.start(3)
