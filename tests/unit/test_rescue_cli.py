"""`treefold rescue` against a cluster in memory: what it plans, heals and leaves
alone.
"""

import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from admin.rescue import is_free
from live.rescue_runner import RescueFolder
from merkle.columns import encode_tree
from merkle.record import BlockRecord
from merkle.replica import ContainerState, PeerId
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.scm_client import NodeHealth
from protos import ozone_heartbeat_pb2 as beat
from runtime.disk import Disk
from tests.support.disk import no_file_grows
from tests.support.live_twin import CountingSource, agents_beside
from tests.support.peers import CHUNK_BYTES, WINDOW_BYTES, MemoryReplica
from tests.support.rescue_twin import RescueTwin, rescue_twin

BLOCK = BlockId(20)


@pytest.fixture
def cluster() -> Iterator[RescueTwin]:
    with rescue_twin() as found:
        yield found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "client.toml"
    file.touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(file))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "treefold" / "rescue"


def rescue(cluster: RescueTwin, *words: str) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(
        treefold, ["rescue", "--cluster", cluster.live.address, "--json", *words]
    )
    return result.exit_code, json.loads(result.stdout)


def complementary(cluster: RescueTwin) -> tuple[list[MemoryReplica], bytes]:
    """Container 1, of which each replica has another window of the same chunk damaged;
    and the bytes of its block.
    """
    replicas = cluster.live.add(1)
    content = bytes(replicas[0].files[BLOCK])
    for datanode in (1, 2, 3):
        cluster.damage(1, datanode, BLOCK, datanode * WINDOW_BYTES + 7)
    return replicas, content


def test_a_dry_run_names_windows_and_sources_and_changes_nothing(
    cluster: RescueTwin, home: Path, tmp_path: Path
) -> None:
    complementary(cluster)
    status, document = rescue(cluster, "1", "--dry-run", "--plan", str(tmp_path / "plan.json"))
    assert status == 3
    [container] = document["data"]["containers"]
    [chunk] = container["chunks"]
    assert (chunk["localID"], chunk["offset"], chunk["length"]) == (BLOCK, 0, CHUNK_BYTES)
    assert sum(one["length"] for one in chunk["ranges"]) == CHUNK_BYTES
    assert len({one["source"] for one in chunk["ranges"]}) == 2
    # The chunk, and the windows that its first source had bad.
    assert container["bytesRead"] == CHUNK_BYTES + WINDOW_BYTES
    assert container["leftAlone"] == []
    assert json.loads((tmp_path / "plan.json").read_text())["containers"] == [container]
    assert cluster.live.scm.registrations == []
    assert not list(home.glob("*/container-*"))


def test_what_ozone_leaves_diverged_twice_is_healed(cluster: RescueTwin) -> None:
    replicas, content = complementary(cluster)
    for _ in range(2):
        cluster.reconcile(ContainerId(1))
    assert not any(bytes(one.files[BLOCK]) == content for one in replicas)
    status, document = rescue(cluster, "1", "--yes")
    assert status == 0, document
    [container] = document["data"]["containers"]
    assert len(container["healed"]) == 3
    assert container["left"]
    assert all(bytes(one.files[BLOCK]) == content for one in replicas)
    assert cluster.refused == []
    assert cluster.extra_replicas(1) == []


def test_it_joins_as_a_node_that_ozone_never_counts(cluster: RescueTwin) -> None:
    complementary(cluster)
    rescue(cluster, "1", "--yes")
    first, *_ = cluster.live.scm.registrations
    details = first.extendedDatanodeDetails.datanodeDetails
    assert details.persistedOpState == beat.DECOMMISSIONED
    [storage] = first.nodeReport.storageReport
    assert storage.remaining == 0
    [replica] = first.containerReport.reports
    assert replica.state == beat.ContainerReplicaProto.UNHEALTHY
    complementary(cluster)
    rescue(cluster, "1", "--yes")
    uuids = {
        one.extendedDatanodeDetails.datanodeDetails.uuid for one in cluster.live.scm.registrations
    }
    assert uuids == {details.uuid}


def test_without_yes_nothing_joins(cluster: RescueTwin) -> None:
    complementary(cluster)
    status, document = rescue(cluster, "1")
    assert (status, document["errors"][0]["code"]) == (6, "refused")
    assert cluster.live.scm.registrations == []


def test_a_full_disk_is_named_and_nothing_joins(cluster: RescueTwin, home: Path) -> None:
    """Not even with the chunk that had room."""
    complementary(cluster)
    for datanode in (1, 2, 3):
        cluster.damage(1, datanode, BLOCK, CHUNK_BYTES + datanode * WINDOW_BYTES)
    rescue(cluster, "1", "--dry-run")
    with no_file_grows(beyond_bytes=CHUNK_BYTES):
        status, document = rescue(cluster, "1", "--yes")
    [error] = document["errors"]
    assert (status, error["code"]) == (1, "disk_failed")
    assert "container 1 was not staged" in error["message"]
    assert error["hint"]
    assert cluster.live.scm.registrations == []
    assert not list(home.glob("*/container-*"))


def test_an_interrupt_ends_the_rescue_and_no_other_one_is_begun(cluster: RescueTwin) -> None:
    complementary(cluster)
    cluster.live.add(2)
    for datanode in (1, 2, 3):
        cluster.damage(2, datanode, BLOCK, datanode * WINDOW_BYTES + 7)
    cluster.live.scm.on_reconcile = lambda _: os.kill(os.getpid(), signal.SIGINT)
    status, document = rescue(cluster, "1", "2", "--yes")
    assert status == 130
    [container] = document["data"]["containers"]
    assert (container["containerID"], container["reason"]) == (1, "it was interrupted")
    assert container["left"]
    assert "container 2 was not begun" in str(document["warnings"])
    assert cluster.extra_replicas(1) == cluster.extra_replicas(2) == []


def test_a_window_that_no_replica_has_is_named_and_left_alone(cluster: RescueTwin) -> None:
    replicas, _ = complementary(cluster)
    lost = CHUNK_BYTES + 5
    for datanode in (1, 2, 3):
        cluster.damage(1, datanode, BLOCK, lost)
    status, document = rescue(cluster, "1", "--yes")
    assert status == 5, document
    [container] = document["data"]["containers"]
    assert {one["offset"] for one in container["leftAlone"]} == {CHUNK_BYTES}
    assert [one["offset"] for one in container["chunks"]] == [0]
    assert len(container["healed"]) == 3
    assert len({bytes(one.files[BLOCK][:CHUNK_BYTES]) for one in replicas}) == 1
    assert cluster.extra_replicas(1) == []


def other_record(record: BlockRecord) -> BlockRecord:
    first, *rest = record.chunks
    checksums = (b"\0\0\0\1", *first.checksums[1:])
    return replace(record, chunks=(replace(first, checksums=checksums), *rest))


def test_records_that_differ_are_left_alone_whatever_the_majority(cluster: RescueTwin) -> None:
    replicas, _ = complementary(cluster)
    replicas[2].records[BLOCK] = other_record(replicas[2].records[BLOCK])
    status, document = rescue(cluster, "1", "--yes")
    assert status == 5, document
    [container] = document["data"]["containers"]
    assert container["chunks"] == []
    assert "records_differ" in {one["reason"] for one in container["leftAlone"]}
    assert cluster.live.scm.registrations == []


def test_a_deleted_block_is_never_brought_back(cluster: RescueTwin) -> None:
    replicas, _ = complementary(cluster)
    tree = replicas[0].scanned_tree()
    blocks = [
        BlockTree.tombstone(one.block_id, 1) if one.block_id == BLOCK else one
        for one in tree.blocks
    ]
    replicas[0].tree = encode_tree(ContainerTree.of(ContainerId(1), blocks))
    _, document = rescue(cluster, "1", "--dry-run")
    [container] = document["data"]["containers"]
    assert container["chunks"] == []


def test_erasure_coded_and_open_containers_are_refused_with_the_reason(
    cluster: RescueTwin,
) -> None:
    cluster.live.add(1)
    known = cluster.live.scm.containers[ContainerId(1)]
    cluster.live.scm.containers[ContainerId(1)] = replace(
        known, is_erasure_coded=True, replication="EC/rs-3-2-1024k"
    )
    status, document = rescue(cluster, "1", "--yes")
    assert status == 6
    assert "erasure-coded" in document["errors"][0]["message"]
    cluster.live.scm.containers[ContainerId(1)] = replace(known, state=ContainerState.OPEN)
    status, document = rescue(cluster, "1", "--yes")
    assert (status, document["errors"][0]["code"]) == (6, "container_state")


def test_a_silent_replica_stops_the_rescue(cluster: RescueTwin) -> None:
    complementary(cluster)
    cluster.live.set_health(3, NodeHealth.DEAD)
    status, document = rescue(cluster, "1", "--yes")
    assert (status, document["errors"][0]["code"]) == (7, "peer_unavailable")
    assert cluster.live.scm.registrations == []


def test_a_silent_replica_of_one_container_holds_up_no_other_one(cluster: RescueTwin) -> None:
    for number in (1, 2, 3):
        cluster.live.add(number)
        for datanode in (1, 2, 3):
            cluster.damage(number, datanode, BLOCK, datanode * WINDOW_BYTES + 7)
    silent = PeerId("9fffffff-0000-4000-8000-000000000000")
    scm, two = cluster.live.scm, ContainerId(2)
    scm.nodes.append(replace(scm.nodes[0], peer=silent, health=NodeHealth.DEAD))
    scm.replicas[two] = [*scm.replicas[two], replace(scm.replicas[two][0], peer=silent)]
    status, document = rescue(cluster, "1", "2", "3", "--yes")
    assert status == 7
    [error] = document["errors"]
    assert error["code"] == "peer_unavailable"
    assert error["message"].startswith(f"container 2: replica on {silent}")
    healed = [one for one in document["data"]["containers"] if one["left"]]
    assert [one["containerID"] for one in healed] == [1, 3]
    assert cluster.reconciles == 2


def test_sigterm_while_it_stages_leaves_no_folder(cluster: RescueTwin, home: Path) -> None:
    complementary(cluster)
    source = cluster.live.sources[0]
    read, handler = source.read, signal.getsignal(signal.SIGTERM)

    def killed(*request: int) -> bytes:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(*request)

    source.read = killed  # type: ignore[method-assign, assignment]
    status, document = rescue(cluster, "1", "--yes")
    assert (status, document["errors"][0]["code"]) == (130, "interrupted")
    assert not list(home.glob("*/container-*"))
    assert cluster.live.scm.registrations == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_another_release_is_refused_and_nothing_stays(cluster: RescueTwin) -> None:
    complementary(cluster)
    cluster.live.scm.software_layout = 11
    status, document = rescue(cluster, "1", "--yes")
    assert status == 5
    [container] = document["data"]["containers"]
    assert "Apache Ozone 2.2" in container["reason"]
    assert cluster.extra_replicas(1) == []


def test_a_healthy_container_needs_no_rescue(cluster: RescueTwin) -> None:
    cluster.live.add(1)
    status, document = rescue(cluster, "1", "--yes")
    assert (status, document["data"]["containers"][0]["chunks"]) == (0, [])
    assert cluster.live.scm.registrations == []


def test_a_second_rescue_of_the_cluster_is_refused(cluster: RescueTwin, home: Path) -> None:
    complementary(cluster)
    with RescueFolder(home / "CID-twin", Disk()):
        status, document = rescue(cluster, "1", "--yes")
    assert (status, document["errors"][0]["code"]) == (8, "busy")


def test_clean_of_a_cluster_that_was_never_joined_does_not_join_it(cluster: RescueTwin) -> None:
    status, document = rescue(cluster, "--clean")
    assert (status, document["data"]) == (0, {"removed": 0, "withdrawn": False})
    assert cluster.live.scm.registrations == []


def test_clean_withdraws_what_a_killed_rescue_left(cluster: RescueTwin, home: Path) -> None:
    replicas, _ = complementary(cluster)
    rescue(cluster, "1", "--yes")
    # As a kill in the middle leaves it: staged files, and a replica at SCM.
    (home / "CID-twin" / "container-1").mkdir()
    (home / "CID-twin" / "container-1" / "20.block").write_bytes(b"left")
    last = cluster.live.scm.registrations[0]
    cluster.live.scm._take_report(
        last.extendedDatanodeDetails.datanodeDetails.uuid, last.containerReport
    )
    assert len(cluster.extra_replicas(1)) == 1
    status, document = rescue(cluster, "--clean")
    assert (status, document["data"]) == (0, {"removed": 1, "withdrawn": True})
    assert cluster.extra_replicas(1) == []
    assert not list((home / "CID-twin").glob("container-*"))
    assert replicas[0].records


def test_the_port_of_a_rescue_is_one_that_nobody_has(tmp_path: Path) -> None:
    """Its UUID gives it, for ever: SCM keeps the ports of the first registration."""
    seen = list[PeerId]()

    def fits(node: PeerId) -> bool:
        seen.append(node)
        return len(seen) == 3

    with RescueFolder(tmp_path, Disk()) as rescues:
        node = rescues.node(fits)
        assert node == seen[2]
        # It is the cluster's by now.
        assert rescues.node(lambda _: False) == node
    with RescueFolder(tmp_path / "other", Disk()) as rescues:
        assert rescues.node(lambda _: False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_all_staged_chunks_are_read_back_from_every_replica(cluster: RescueTwin) -> None:
    complementary(cluster)
    _, document = rescue(cluster, "1", "--yes")
    [container] = document["data"]["containers"]
    assert container["bytesReadBack"] == 3 * CHUNK_BYTES


def test_bytes_come_from_agents_and_trees_from_datanodes(cluster: RescueTwin) -> None:
    """The tree is what a datanode decides by; to read it costs no disk."""
    replicas, content = complementary(cluster)
    sources = [CountingSource(*one.replicas.values()) for one in cluster.live.sources]
    with agents_beside(cluster.live, sources) as agents:
        addresses = ",".join(server.address for server in agents)
        assert rescue(cluster, "1", "--agents", addresses, "--dry-run")[0] == 3
        planned = sum(source.reads for source in sources)
        assert planned > 0
        assert [source.reads for source in cluster.live.sources] == [0, 0, 0]
        status, document = rescue(cluster, "1", "--agents", addresses, "--yes")
    assert status == 0, document
    assert all(bytes(one.files[BLOCK]) == content for one in replicas)
    # Planned again, and three replicas read back.
    assert sum(source.reads for source in sources) == 2 * planned + 3
    assert [source.trees for source in sources] == [0, 0, 0]
