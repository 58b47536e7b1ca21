"""A rescue heals a container of a real Ozone 2.2 cluster that Ozone's own reconcile
leaves diverged. Run by `make test-ozone`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest

from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.scm_client import NodeHealth, ScmClient
from tests.support.ozone import OzoneCluster, eventually
from tests.support.ozone_containers import closed_with
from tests.support.ozone_damage import (
    await_scans,
    block_files,
    damage_and_reconcile_twice,
)
from tests.support.s3_servers import S3Bucket, S3Endpoint

pytestmark = [
    pytest.mark.ozone(is_last=5),
    pytest.mark.datanodes,
    pytest.mark.timeout(900),
]

SIZES = (300_000, 5_242_883)
# Another window of the first chunk on each datanode.
OFFSETS = (100, 20_100, 40_100)
CHUNK_BYTES = 4 << 20
PHASES = (
    "joining",
    "waiting until SCM lists",
    "ordering a reconcile",
    "waiting for the datanodes",
    "leaving",
)


@pytest.fixture(scope="module")
def bucket(ozone_gateway: S3Endpoint) -> S3Bucket:
    return ozone_gateway.fresh_bucket()


@pytest.fixture(scope="module")
def container(ozone_cluster: OzoneCluster, bucket: S3Bucket) -> ContainerId:
    """A closed container with a block of each size."""
    [found] = closed_with(ozone_cluster, bucket, SIZES, count=1)
    return found


@pytest.fixture(scope="session")
def joined() -> set[PeerId]:
    """The datanodes of rescues that have ended."""
    return set()


def contents(cluster: OzoneCluster, container_id: int) -> list[list[bytes]]:
    return [
        [path.read_bytes() for path in block_files(cluster, i, container_id)] for i in (1, 2, 3)
    ]


def command(cluster: OzoneCluster, *words: str) -> list[str]:
    return [sys.executable, "-m", "admin.cli", "rescue", "--cluster", cluster.scm_address, *words]


def rescue(cluster: OzoneCluster, *words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        command(cluster, "--json", *words), capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def replica_peers(cluster: OzoneCluster, container_id: ContainerId) -> list[str]:
    client = ScmClient([cluster.scm_address])
    try:
        return [one.peer for one in client.replicas([container_id])[container_id]]
    finally:
        client.close()


@contextmanager
def replication_manager_at_work(cluster: OzoneCluster) -> Iterator[None]:
    """Have Replication Manager look at all containers every few seconds: at each start.
    By itself it looks once an hour in tests.
    """
    ended = threading.Event()

    def start_again() -> None:
        while not ended.wait(1):
            for word in ("stop", "start"):
                cluster.admin("replicationmanager", word)

    def look() -> None:
        before = looks(cluster)
        eventually("Replication Manager looks", lambda: looks(cluster) > before)

    with ThreadPoolExecutor(1) as pool:
        restarts = pool.submit(start_again)
        try:
            look()
            yield
            look()
        finally:
            ended.set()
            restarts.result()


def looks(cluster: OzoneCluster) -> int:
    """How often Replication Manager has looked at all containers."""
    log = (cluster.folder / "scm" / "log").read_text(errors="replace")
    return log.count("Replication Monitor Thread took")


def test_what_ozone_leaves_diverged_twice_is_healed(
    ozone_cluster: OzoneCluster, container: ContainerId, bucket: S3Bucket, joined: set[PeerId]
) -> None:
    originals = contents(ozone_cluster, container)
    before = replica_peers(ozone_cluster, container)
    client = ScmClient([ozone_cluster.scm_address])
    nodes = {one.peer for one in client.nodes()}
    client.close()
    damage_and_reconcile_twice(ozone_cluster, container, OFFSETS)
    assert contents(ozone_cluster, container) != originals
    with replication_manager_at_work(ozone_cluster):
        status, document = rescue(ozone_cluster, str(container), "--yes")
    assert status == 0, document
    [found] = document["data"]["containers"]
    assert contents(ozone_cluster, container) == originals
    assert sorted(found["healed"]) == before
    assert found["reconciles"] == 1
    damaged = CHUNK_BYTES + SIZES[0]
    assert found["bytesRead"] <= 1.1 * damaged + (256 << 10)
    assert replica_peers(ozone_cluster, container) == before
    client = ScmClient([ozone_cluster.scm_address])
    joined.update({one.peer for one in client.nodes()} - nodes)
    client.close()
    assert len(joined) == 1
    # A reconcile of equal trees ends with a scan of Ozone's own, which finds nothing.
    roots = ozone_cluster.roots([container])
    await_scans(ozone_cluster, container)
    assert ozone_cluster.roots([container]) == roots
    assert len({root for known in roots.values() for _, root in known.values()}) == 1
    with bucket.endpoint.client() as s3:
        for one in s3.list_objects_v2(Bucket=bucket.name)["Contents"]:
            number = int(one["Key"].removeprefix("key-"))
            body = s3.get_object(Bucket=bucket.name, Key=one["Key"])["Body"].read()
            assert body == random.Random(number).randbytes(one["Size"])


def test_a_rescue_killed_in_any_phase_leaves_the_cluster_no_worse(
    ozone_cluster: OzoneCluster, container: ContainerId
) -> None:
    originals = contents(ozone_cluster, container)
    before = replica_peers(ozone_cluster, container)
    for phase in PHASES:
        damage_and_reconcile_twice(ozone_cluster, container, OFFSETS)
        with replication_manager_at_work(ozone_cluster):
            kill_in(ozone_cluster, container, phase)
            status, document = rescue(ozone_cluster, "--clean")
            assert (status, document["data"]["withdrawn"]) == (0, True)
            eventually(
                f"SCM has no replica of ours after a kill while {phase}",
                lambda: replica_peers(ozone_cluster, container) == before,
            )
            status, document = rescue(ozone_cluster, str(container), "--yes")
        assert status == 0, (phase, document)
        assert replica_peers(ozone_cluster, container) == before
        assert contents(ozone_cluster, container) == originals, phase


def kill_in(cluster: OzoneCluster, container: ContainerId, phase: str) -> None:
    """Begin a rescue, and kill it in a phase."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command(cluster, str(container), "--yes"),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert any(phase in line for line in process.stdout), phase
        process.send_signal(signal.SIGKILL)


@pytest.mark.ozone(is_last=8)
def test_scm_calls_the_datanode_of_a_rescue_dead_that_has_ended(
    ozone_cluster: OzoneCluster, joined: set[PeerId]
) -> None:
    """After all other tests, since SCM waits for half a minute."""
    assert joined
    with closing(ScmClient([ozone_cluster.scm_address])) as client:

        def are_dead() -> bool:
            found = {one.peer: one.health for one in client.nodes()}
            return all(found[one] is NodeHealth.DEAD for one in joined)

        eventually("SCM calls the rescue's datanode dead", are_dead, timeout_s=120)
