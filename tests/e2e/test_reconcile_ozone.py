"""A real Ozone 2.2 cluster reconciles its containers by itself, driven and watched from
outside. Run by `make test-ozone`.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster

pytestmark = [pytest.mark.ozone(is_last=4), pytest.mark.timeout(900)]

SIZES = (300_000, 400_000)
WINDOW = 16_384
# Twice the heartbeat of the test cluster, which is a second, and its tasks.
SETTLE = "8s"
CONTAINERS = 5


@pytest.fixture(scope="module")
def containers(ozone_cluster: OzoneCluster, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Closed containers with a block of each size, whose roots SCM knows."""
    folder = tmp_path_factory.mktemp("keys")
    for size in SIZES:
        (folder / str(size)).write_bytes(random.Random(size).randbytes(size))
    ozone_cluster.close_open()
    ozone_cluster.shell("volume create /driven", "bucket create /driven/kept")
    made = list[int]()
    for number in range(CONTAINERS):
        ozone_cluster.shell(
            *(f"key put /driven/kept/{number}-{size} {folder / str(size)}" for size in SIZES)
        )
        closed = ozone_cluster.close_open()
        made.append(next(one for one in closed if len(files(ozone_cluster, 1, one)) == len(SIZES)))
    return made


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
    folder = f"hdds/*/current/containerDir*/{container_id}/chunks/*.block"
    return {path.stat().st_size: path for path in cluster.volume(datanode).glob(folder)}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_damage_that_no_tree_shows_is_healed_in_rounds_and_hopeless_damage_is_named(
    ozone_cluster: OzoneCluster, containers: list[int]
) -> None:
    *healed, hopeless = containers
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
                assert path.read_bytes() == random.Random(size).randbytes(size)


def test_an_open_container_and_an_unknown_one_are_refused_by_ozones_rules(
    ozone_cluster: OzoneCluster, containers: list[int], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"open")
    ozone_cluster.shell(f"key put /driven/kept/open {key}")
    client = ScmClient([ozone_cluster.scm_address])
    [opened] = [one for one in client.containers() if one.state.value == "OPEN"]
    refusals = client.reconcile([opened.container_id, ContainerId(containers[0])])
    client.close()
    assert "in state OPEN" in str(refusals[opened.container_id])
    assert refusals[ContainerId(containers[0])] is None
    status, document = reconcile(ozone_cluster, str(opened.container_id))
    assert status == 6
    assert document["errors"][0]["code"] == "ineligible_container_state"
