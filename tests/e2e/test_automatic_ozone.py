"""A controller heals the diverged containers of a real Ozone 2.2 cluster by itself. Run
by `make test-ozone`.
"""

import json
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster, eventually
from tests.support.ozone_containers import closed_with, damage, diverged
from tests.support.ozone_damage import block_files
from tests.support.processes import TreefoldProcess
from tests.support.s3_servers import S3Endpoint

pytestmark = [
    pytest.mark.ozone(is_last=4),
    pytest.mark.datanodes,
    pytest.mark.timeout(900),
]

CONTAINERS = 100
# Twice the heartbeat of the test cluster, which is a second, and its tasks.
SETTINGS = """\
listen = "127.0.0.1:0"
orders_per_datanode = 8
[automatic]
enabled = true
jobs_max = 16
[cluster]
scms = ["{scm}"]
settle_s = "8s"
poll_s = "1s"
read_every_s = "5s"
"""


def treefold(*words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "admin.cli", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def jobs(controller: str) -> list[dict[str, Any]]:
    _, document = treefold("job", "list", "--controller", controller, "--limit", "1000")
    found = document["data"]
    return found["jobs"] if isinstance(found, dict) else found


@pytest.fixture(scope="module")
def intact(ozone_cluster: OzoneCluster, ozone_gateway: S3Endpoint) -> dict[ContainerId, bytes]:
    """What the block of each diverged container was before its damage."""
    bucket = ozone_gateway.fresh_bucket()
    containers = closed_with(ozone_cluster, bucket, [200_000], count=CONTAINERS)
    found = {one: block_files(ozone_cluster, 1, one)[0].read_bytes() for one in containers}
    damage(ozone_cluster, containers)
    return found


def test_a_sweep_of_the_cluster_gives_the_verdicts_of_a_diagnosis(
    ozone_cluster: OzoneCluster, intact: dict[ContainerId, bytes], tmp_path: Path
) -> None:
    place = ("--cluster", ozone_cluster.scm_address)
    status, document = treefold("sweep", "run", *place, "--out", str(tmp_path))
    assert status == 3
    assert document["cluster"]["datanodes"] == 3
    _, diagnosed = treefold("diagnose", *place, *map(str, intact))
    [verdicts] = (tmp_path / "verdicts").iterdir()
    rows = pq.read_table(verdicts, partitioning=None).to_pylist()
    swept = {row["container_id"]: row["verdict"] for row in rows}
    findings = {one["containerID"]: one["verdict"] for one in diagnosed["data"]["findings"]}
    assert findings == {number: swept[number] for number in intact}
    assert set(findings.values()) == {"REPAIRABLE"}


def test_a_hundred_diverged_containers_are_healed_unattended(
    ozone_cluster: OzoneCluster, intact: dict[ContainerId, bytes], tmp_path: Path
) -> None:
    containers = [*intact]
    settings = tmp_path / "controller.toml"
    settings.write_text(SETTINGS.format(scm=ozone_cluster.scm_address))
    state = ("--state-folder", str(tmp_path / "state"))
    run = ("scm", "run", "--config", str(settings), *state)
    with closing(ScmClient([ozone_cluster.scm_address])) as client:

        def left() -> list[ContainerId]:
            return diverged(client, containers)

        with TreefoldProcess(tmp_path / "first", *run) as first:
            first.address()
            eventually("some are healed", lambda: len(left()) < CONTAINERS, 120)
            # Killed while jobs run; the next process goes on with them.
            first.process.kill()
            first.process.wait()
        with TreefoldProcess(tmp_path / "second", *run) as second:
            controller = second.address()
            eventually("all are equal", lambda: not left(), 600)

            def are_ended() -> bool:
                found = [one for one in jobs(controller) if one["containerID"] in containers]
                return len(found) >= CONTAINERS and all(one["state"] == "DONE" for one in found)

            eventually("all jobs have ended", are_ended, 120)
            ended = Counter(one["containerID"] for one in jobs(controller))
            assert all(ended[number] == 1 for number in containers)
            _, shown = treefold("container", "list", "--controller", controller, "--limit", "10000")
    for container_id, data in intact.items():
        for datanode in (1, 2, 3):
            [path] = block_files(ozone_cluster, datanode, container_id)
            assert path.read_bytes() == data
    by_id = {one["containerID"]: one for one in shown["data"]["containers"]}
    assert all(by_id[number]["comparison"] == "match" for number in containers)
