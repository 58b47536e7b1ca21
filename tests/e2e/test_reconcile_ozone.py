"""A real Ozone 2.2 cluster reconciles its containers by itself, driven and watched from
outside. Run by `make test-ozone`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster
from tests.support.ozone_containers import closed_with
from tests.support.ozone_damage import block_files, flip
from tests.support.s3_servers import S3Bucket, S3Endpoint

pytestmark = [
    pytest.mark.ozone(is_last=4),
    pytest.mark.datanodes,
    pytest.mark.timeout(900),
]

SIZES = (300_000, 400_000)
WINDOW = 16_384
# Twice the heartbeat of the test cluster, which is a second, and its tasks.
SETTLE = "8s"
CONTAINERS = 5


@pytest.fixture(scope="module")
def bucket(ozone_gateway: S3Endpoint) -> S3Bucket:
    return ozone_gateway.fresh_bucket()


@pytest.fixture(scope="module")
def containers(ozone_cluster: OzoneCluster, bucket: S3Bucket) -> list[ContainerId]:
    """Closed containers with a block of each size, whose roots SCM knows."""
    return closed_with(ozone_cluster, bucket, SIZES, count=CONTAINERS)


def reconcile(cluster: OzoneCluster, *words: str) -> tuple[int, dict[str, Any]]:
    command = [
        sys.executable, "-m", "admin.cli", "reconcile", "--cluster", cluster.scm_address,
        "--yes", "--json", "--settle", SETTLE, *words,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def files(cluster: OzoneCluster, datanode: int, container_id: int) -> dict[int, Path]:
    """The files of a container's blocks on one datanode, by their sizes."""
    return {path.stat().st_size: path for path in block_files(cluster, datanode, container_id)}


def test_damage_that_no_tree_shows_is_healed_in_rounds_and_hopeless_damage_is_named(
    ozone_cluster: OzoneCluster, containers: list[ContainerId]
) -> None:
    *healed, hopeless = containers
    intact = {
        (one, size): path.read_bytes()
        for one in healed
        for size, path in files(ozone_cluster, 1, one).items()
    }
    for at, container_id in enumerate(healed):
        flip(files(ozone_cluster, 1 + at % 3, container_id)[SIZES[0]], 100)
    for datanode in (1, 2, 3):
        # No replica has the whole chunk; Ozone takes nothing less.
        flip(files(ozone_cluster, datanode, hopeless)[SIZES[0]], datanode * WINDOW)
    status, document = reconcile(ozone_cluster, *map(str, containers))
    results = {one["containerID"]: one for one in document["data"]["results"]}
    assert results[hopeless]["outcome"] == "not_converging"
    assert status == 5
    for container_id in healed:
        assert results[container_id]["outcome"] == "equal"
        assert results[container_id]["rounds"] >= 2
        for datanode in (1, 2, 3):
            for size, path in files(ozone_cluster, datanode, container_id).items():
                assert path.read_bytes() == intact[container_id, size]


def test_an_open_container_and_an_unknown_one_are_refused_by_ozones_rules(
    ozone_cluster: OzoneCluster, containers: list[ContainerId], bucket: S3Bucket
) -> None:
    with bucket.endpoint.client() as s3:
        s3.put_object(Bucket=bucket.name, Key="open", Body=b"open")
    client = ScmClient([ozone_cluster.scm_address])
    [opened] = [one for one in client.containers() if one.state.value == "OPEN"]
    refusals = client.reconcile([opened.container_id, containers[0]])
    client.close()
    assert "in state OPEN" in str(refusals[opened.container_id])
    assert refusals[containers[0]] is None
    status, document = reconcile(ozone_cluster, str(opened.container_id))
    assert status == 6
    assert document["errors"][0]["code"] == "ineligible_container_state"
