"""Against a real Ozone 2.2 cluster: we see what it sees, it accepts what we wrote. Run
by `make test-ozone`.
"""

import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

import pyarrow.fs as pa_fs
import pytest

from chunktable.manifest import manifest_name
from chunktable.reader import check_content, latest_manifest
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.check import check_tree
from merkle.checksum import ChecksumType, window_checksums
from merkle.outcome import OutcomeState, RepairOutcome, Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, root_hex
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from ozone.rocks import Batch, OzoneTable, block_key
from ozone.scm_client import ScmClient
from ozone.volume import Hold, open_volume
from protos.agent_pb2 import ScanContainerRequest
from protos.agent_pb2_grpc import AgentStub
from protos.convert import tree_from_bytes
from repair.peers import DatanodePeer
from repair.requests import ReconcileOptions
from repair.runner import RepairJob, Runner
from runtime.disk import Disk
from runtime.errors import PeerRefusedError
from runtime.rpc import open_channel
from tests.support.ozone import OzoneCluster, eventually
from tests.support.ozone_damage import scanned_ms
from tests.support.processes import TreefoldProcess
from tests.support.tables import current_rows, trees_of

pytestmark = [
    pytest.mark.ozone(is_last=6),
    pytest.mark.datanodes,
    pytest.mark.timeout(900),
]

# The gateway of a cluster without security takes any.
S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "thing",
    "AWS_DEFAULT_REGION": "us-east-1",
}
# By the datanode's UUID and the container.
Roots = dict[str, dict[int, tuple[str, str]]]
CHECKSUM_TYPES = ("CRC32", "CRC32C", "SHA256", "MD5")
SIZES = (1, 16_384, 300_000, 5_242_883)


@pytest.fixture(scope="module")
def cluster(ozone_cluster: OzoneCluster) -> OzoneCluster:
    return ozone_cluster


@pytest.fixture(scope="module")
def containers(
    cluster: OzoneCluster, tmp_path_factory: pytest.TempPathFactory
) -> list[ContainerId]:
    """Closed containers, one for each checksum type, with keys of several sizes in
    them.
    """
    folder = tmp_path_factory.mktemp("keys")
    for size in SIZES:
        (folder / str(size)).write_bytes(random.Random(size).randbytes(size))
    place = f"/own-{secrets.token_hex(4)}/buck1"
    cluster.shell(f"volume create {place[:-6]}", f"bucket create {place}")
    others = cluster.begin_to_close()
    begun = set[ContainerId]()
    for kind in CHECKSUM_TYPES:
        puts = [f"key put {place}/{kind}-{size} {folder / str(size)}" for size in SIZES]
        cluster.shell(*puts, settings=[f"ozone.client.checksum.type={kind}"])
        begun.update(cluster.begin_to_close(but=others))
    closed = cluster.await_closed(sorted(begun))
    # Each type has a container of its own, so that each kind of damage below is really
    # done to one.
    assert len(closed) >= len(CHECKSUM_TYPES)
    return closed


@pytest.fixture(scope="module")
def roots(cluster: OzoneCluster, containers: list[ContainerId]) -> Roots:
    """State and root of each replica by Ozone's own command, when all is intact."""
    return cluster.roots(containers)


def treefold(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "admin.cli", *words],
        env={**os.environ, **S3_CREDENTIALS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def content(volume: Path, containers: list[ContainerId]) -> dict[str, str]:
    """A digest of every file of these containers, which a running datanode has no
    reason to change.
    """
    folders = [volume.glob(f"hdds/*/current/containerDir*/{one}") for one in containers]
    found = {
        str(path.relative_to(volume)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in chain.from_iterable(folders)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    assert len(found) > len(containers)
    return found


def datanode_ids(cluster: OzoneCluster) -> dict[str, int]:
    lines = {
        k: (cluster.volume(k) / "hdds" / "VERSION").read_text().splitlines() for k in (1, 2, 3)
    }
    return {
        line.partition("=")[2]: k
        for k, text in lines.items()
        for line in text
        if line.startswith("datanodeUuid=")
    }


def test_roots_built_beside_live_datanodes_are_those_that_scm_knows(
    cluster: OzoneCluster, containers: list[ContainerId], roots: Roots
) -> None:
    only = [f"--container={container_id}" for container_id in containers]
    for uuid, datanode in datanode_ids(cluster).items():
        before = content(cluster.volume(datanode), containers)
        for source in ("data", "metadata"):
            status, out = treefold(
                "tree", "build", str(cluster.volume(datanode)), "--json", "--source", source, *only
            )
            assert status == 0
            built = {
                row["containerID"]: row["dataChecksum"] for row in map(json.loads, out.splitlines())
            }
            assert built == {i: root for i, (_, root) in roots[uuid].items()}
        assert content(cluster.volume(datanode), containers) == before
    volumes = [str(cluster.volume(k)) for k in (1, 2, 3)]
    status, out = treefold("tree", "diff", *volumes, "--json", *only)
    assert status == 0
    assert len(out.splitlines()) == len(containers)


def test_trees_records_and_every_window_can_be_read_from_live_datanodes(
    cluster: OzoneCluster, containers: list[ContainerId], roots: Roots
) -> None:
    for uuid, datanode in datanode_ids(cluster).items():
        client = DatanodeClient(open_channel(cluster.address(datanode)), target=f"dn{datanode}")
        try:
            for container_id in containers:
                tree = tree_from_bytes(client.tree_bytes(container_id), container_id)
                check_tree(tree)
                assert root_hex(tree.data_checksum) == roots[uuid][container_id][1]
                records = list(client.list_records(container_id, page=2))
                assert [r.block_id for r in records] == [b.block_id for b in tree.blocks]
                for record in records:
                    for chunk in record.chunks:
                        wanted = [ByteRange(chunk.offset, chunk.length_bytes)]
                        parts = [
                            p
                            for _, part in client.read(container_id, record.block_id, chunk, wanted)
                            for p in part
                        ]
                        data = b"".join(parts)
                        seen = window_checksums(data, chunk.checksum_type, chunk.bytes_per_checksum)
                        assert seen == b"".join(chunk.checksums)
        finally:
            client.close()


def test_an_agent_beside_a_live_datanode_reports_its_roots_and_writes_nothing_there(
    cluster: OzoneCluster, containers: list[ContainerId], roots: Roots, tmp_path: Path
) -> None:
    uuid, datanode = next(iter(datanode_ids(cluster).items()))
    before = content(cluster.volume(datanode), containers)
    words = ["--volume", str(cluster.volume(datanode)), "--state-folder", str(tmp_path / "state")]
    with TreefoldProcess(
        tmp_path / "agent", "agent", "run", *words, "--listen", "127.0.0.1:0"
    ) as agent:
        with open_channel(agent.address()) as channel:
            for container_id in containers:
                answer = AgentStub(channel).ScanContainer(
                    ScanContainerRequest(container_id=container_id), timeout=120
                )
                assert not answer.findings
                assert (answer.state, root_hex(answer.data_checksum)) == roots[uuid][container_id]
        assert agent.stop(signal.SIGTERM) == 0
    assert content(cluster.volume(datanode), containers) == before


def test_chunk_tables_of_live_datanodes_are_exported_to_the_s3_gateway(
    cluster: OzoneCluster, containers: list[ContainerId], roots: Roots
) -> None:
    bucket = f"tables-{secrets.token_hex(4)}"
    cluster.shell(f"bucket create /s3v/{bucket}")
    to = f"s3://{bucket}/nightly?endpoint_override={cluster.s3_address}&scheme=http"
    filesystem = pa_fs.S3FileSystem(
        access_key=S3_CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_key=S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        endpoint_override=cluster.s3_address,
        scheme="http",
        region="us-east-1",
    )
    volumes = [word for k in (1, 2, 3) for word in ("--volume", str(cluster.volume(k)))]
    # Data that are written to the bucket are in containers of their own, which are
    # open.
    for sequence, more in enumerate(([], ["--full"], [], []), 1):
        status, out = treefold("agent", "export-checksums", *volumes, "--to", to, "--json", *more)
        assert status == 0, out
        tables = json.loads(out)["tables"]
        assert {table["datanode"] for table in tables} == roots.keys()
        for table in tables:
            manifest = latest_manifest(filesystem, table["location"])
            assert (manifest.name, manifest.sequence) == (table["manifest"], sequence)
            for file in manifest.files:
                check_content(filesystem, table["location"], file)
            trees = trees_of(current_rows(filesystem, table["location"], manifest))
            found = {i: tree and root_hex(tree.data_checksum) for (_, i), tree in trees.items()}
            assert {i: found[i] for i in containers} == {
                i: roots[table["datanode"]][i][1] for i in containers
            }
            names = [
                entry.base_name
                for entry in filesystem.get_file_info(pa_fs.FileSelector(table["location"]))
            ]
            manifests = sorted(name for name in names if name.startswith("manifest"))
            assert manifests == [
                manifest_name(i) for i in range(max(sequence - 1, 1), sequence + 1)
            ]
    status, _ = treefold(
        "agent", "export-checksums", *volumes, "--to", to.replace(bucket, "no-such-bucket")
    )
    assert status == 7


def reconcile_stopped(
    cluster: OzoneCluster, stopped: int, container_id: ContainerId, state: Path
) -> RepairOutcome:
    """Own the stopped datanode's volume and repair one container from the live
    datanodes, in their own protocol.
    """
    with ExitStack() as stack:
        disk = Disk()
        volume = open_volume(
            cluster.volume(stopped), hold=Hold.OWNER, state_folder=state, disk=disk
        )
        held = ManagedVolume(volume, disk, undo_bytes=1 << 30)
        store = ReplicaStore([held], repair_enabled=True)
        stack.callback(store.close)
        runner = Runner(PeerId(volume.datanode_id), threads_max=4, audit=lambda **_: None)
        stack.callback(runner.close)
        peers = {}
        for uuid, datanode in datanode_ids(cluster).items():
            if datanode != stopped:
                client = DatanodeClient(
                    open_channel(cluster.address(datanode)), target=f"dn{datanode}"
                )
                peers[PeerId(uuid)] = peer = DatanodePeer(PeerId(uuid), client)
                stack.callback(peer.close)
        # What is on disk is not in the tree yet.
        return runner.run(
            RepairJob(
                f"job-{container_id}", container_id, ReconcileOptions(return_to=ReplicaState.CLOSED)
            ),
            lambda cancelled: store.open_replica(
                container_id, f"job-{container_id}", cancelled=cancelled, on_bytes=lambda _: None
            ),
            peers,
        )


def test_a_stopped_datanode_is_repaired_from_live_ones_and_ozone_finds_nothing_wrong(
    cluster: OzoneCluster, containers: list[ContainerId], roots: Roots, tmp_path: Path
) -> None:
    stopped, disk = 3, Disk()
    uuid = next(u for u, k in datanode_ids(cluster).items() if k == stopped)
    cluster.stop(stopped)
    volume = open_volume(
        cluster.volume(stopped), hold=Hold.OWNER, state_folder=tmp_path / "damage", disk=disk
    )
    healthy, expected = {}, {}
    with volume:
        held = ManagedVolume(volume, disk, undo_bytes=1 << 30)
        for at, container_id in enumerate(containers):
            container = held.containers.open(container_id)
            blocks = sorted(container.records(), key=lambda record: record.length_bytes)
            for record in blocks:
                path = container.block_path(record.block_id)
                healthy[path] = path.read_bytes()
                expected[container_id, record.block_id] = volume.database.get(
                    OzoneTable.BLOCK_DATA, block_key(container_id, record.block_id)
                )
            largest, middle = (
                container.block_path(blocks[-1].block_id),
                blocks[-1].length_bytes // 2,
            )
            match at % 4:
                case 0:
                    flipped = bytes([disk.read_at(largest, middle, 1)[0] ^ 4])
                    disk.write_at(largest, middle, flipped)
                case 1:
                    with largest.open("r+b") as file:
                        file.truncate(middle)
                case 2:
                    disk.remove(largest)
                case 3:
                    batch = Batch()
                    batch.delete(
                        OzoneTable.BLOCK_DATA, block_key(container_id, blocks[-1].block_id)
                    )
                    volume.database.write(batch)
                    disk.remove(container.metadata_folder / f"{container_id}.tree")
    for container_id in containers:
        outcome = reconcile_stopped(cluster, stopped, container_id, tmp_path / "state")
        assert (outcome.state, outcome.verdict) == (OutcomeState.DONE, Verdict.REPAIRABLE), outcome
        assert outcome.replica_state is ReplicaState.CLOSED
        assert root_hex(outcome.data_checksum) == roots[uuid][container_id][1]
    assert {path: path.read_bytes() for path in healthy} == healthy
    with open_volume(
        cluster.volume(stopped), hold=Hold.READ_ONLY, state_folder=tmp_path / "proof", disk=disk
    ) as proven:
        for (container_id, block_id), raw in expected.items():
            assert (
                proven.database.get(OzoneTable.BLOCK_DATA, block_key(container_id, block_id)) == raw
            )
    started_ms = int(time.time() * 1000)
    cluster.start(stopped)
    client = DatanodeClient(open_channel(cluster.address(stopped)), target="dn3")

    def are_scanned() -> bool:
        left = [one for one in containers if scanned_ms(cluster, stopped, one) <= started_ms]
        for one in left:
            # A request that fails has the datanode scan the container by itself, unless
            # it has only just begun.
            with pytest.raises(PeerRefusedError):
                list(client.read(one, BlockId(1), _any_chunk(), [ByteRange(0, 1)]))
        return not left

    eventually("the datanode has scanned them", are_scanned)
    with closing(ScmClient([cluster.scm_address])) as scm:

        def seen_by_scm() -> dict[int, tuple[str, str]]:
            return {
                one.container_id: (one.state.value, root_hex(one.data_checksum))
                for replicas in scm.replicas(containers).values()
                for one in replicas
                if one.peer == uuid
            }

        eventually("SCM sees all replicas as they were", lambda: seen_by_scm() == roots[uuid])
    for container_id in containers:
        tree = tree_from_bytes(client.tree_bytes(container_id), container_id)
        assert root_hex(tree.data_checksum) == roots[uuid][container_id][1]
    client.close()


def test_ozone_opens_and_serves_a_container_that_we_wrote(
    cluster: OzoneCluster, containers: list[ContainerId], tmp_path: Path
) -> None:
    stopped, disk, container_id, block_id = (
        2,
        Disk(),
        ContainerId(1_000_001),
        BlockId(115_816_896_921_600_001),
    )
    data = random.Random(1).randbytes(100_000)
    sums = window_checksums(data, ChecksumType.CRC32C, 16_384)
    chunk = ChunkRecord(
        0,
        len(data),
        ChecksumType.CRC32C,
        16_384,
        tuple(sums[i : i + 4] for i in range(0, len(sums), 4)),
        "chunk_1",
    )
    record = BlockRecord(container_id, block_id, 7, (chunk,), (("TYPE", "KEY"),))
    cluster.stop(stopped)
    with open_volume(
        cluster.volume(stopped), hold=Hold.OWNER, state_folder=tmp_path, disk=disk
    ) as volume:
        writer = ManagedVolume(volume, disk, undo_bytes=0).writer
        assert writer is not None
        writer.create_container(container_id)
        writer.write_chunk(container_id, block_id, 0, data)
        writer.put_block(record)
        tree = writer.close(container_id)
    cluster.start(stopped)
    client = DatanodeClient(open_channel(cluster.address(stopped)), target="dn2")
    try:
        assert tree_from_bytes(client.tree_bytes(container_id), container_id) == tree
        assert list(client.list_records(container_id)) == [record]
        parts = [
            p
            for _, part in client.read(container_id, block_id, chunk, [ByteRange(0, len(data))])
            for p in part
        ]
        assert b"".join(parts) == data
    finally:
        client.close()


def _any_chunk() -> ChunkRecord:
    return ChunkRecord(0, 1, ChecksumType.NONE, 0, ())
