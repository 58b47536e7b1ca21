"""Every parser of what comes from a disk, a peer or a person, with valid inputs to
mutate and what must be true of whatever is accepted. Those of buckets are in
bucket_fuzz_targets.

A target takes bytes. It returns if they are a valid value, and raises a ReconcileError
if not; anything else is a defect.
"""

import json
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from pydantic import TypeAdapter

from chunktable.files import Files
from chunktable.manifest import (
    AuditMark,
    FileKind,
    Manifest,
    SkippedVolume,
    TableFile,
    file_name,
    parse_manifest,
)
from dnagent.client import AgentClient
from dnagent.config import AgentConfig
from dnagent.messages import response_of
from dnagent.ports import AgentStatus
from merkle.check import check_tree
from merkle.checksum import fingerprint
from merkle.columns import encode_tree
from merkle.record import DeleteTransaction
from merkle.replica import PeerId, ReplicaState, TreeSource
from merkle.tree import BlockId, ContainerId
from ozone.datanode_client import DatanodeClient
from ozone.descriptor import Descriptor, dump_descriptor, parse_descriptor, with_checksum
from ozone.ports import ByteRange
from ozone.site import read_site, volumes_of
from ozone.volume import parse_version
from protos import agent_pb2 as ap
from protos import controller_pb2 as cp
from protos import ozone_datanode_pb2 as op
from protos.convert import (
    container_id_of_tree,
    delete_transaction_from_bytes,
    delete_transaction_to_bytes,
    record_from_bytes,
    record_to_bytes,
    tombstones_from_bytes,
    tree_from_bytes,
)
from repair.peers import AgentPeer, DatanodePeer
from repair.ports import Peer
from repair.wire import encode_piece
from replicator.verifier.config import VerifierConfig
from runtime.config import Settings, load
from runtime.disk import Disk
from runtime.errors import UsageError
from scm.config import ControllerConfig
from scm.job_steps import new_job, step
from scm.job_store import SqliteJobStore
from scm.jobs import ControllerResumed, Job, JobId, OrderIssued
from scm.messages import (
    container_from,
    controller_status_from,
    datanode_view_from,
    heartbeat_from,
    job_from,
    outcome_from,
)
from scm.policy import Target as RepairTarget
from scm.policy import Visit, resume_visit
from scm.views import ContainerStatus, ControllerStatus, DatanodeView, JobStatus
from sweep.exports import here
from sweep.history import History
from sweep.model import Part, PartKind
from sweep.output import SkippedInput
from sweep.work import Plan, WorkFolders
from tests.support.mutation import mutated_bytes, mutated_json, mutated_message, mutated_text
from tests.support.peers import replica_of
from tests.support.trees import block, chunk, container, corrupt, deleted, encode_by_protobuf

DN1, DN2 = PeerId("dn-1"), PeerId("dn-2")
TWELVE, TWENTY = ContainerId(12), BlockId(20)
HELD = replica_of(12, {20: 9000, 21: 300})
TREE = encode_by_protobuf(container(block(20, chunk(0), corrupt(chunk(4096))), deleted(30, 7)))
RECORDS = [record_to_bytes(record) for record in HELD.records.values()]
_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True)
class Target:
    """A parser: how to make an input, and what takes it in."""

    name: str
    make: Callable[[random.Random], bytes]
    accept: Callable[[bytes], object]
    # Whether it refuses anything: tombstones are taken from whatever is left of a tree.
    refuses: bool = True


def targets(scratch: Path) -> list[Target]:
    """All parsers; `scratch` is a folder for the configurations."""
    return [
        *_files(),
        *_configs(scratch),
        *_controller(),
        *_peers(),
        *_job_rows(scratch),
        *_sweeps(scratch),
        _site(scratch),
    ]


def of_bytes(*seeds: bytes, kind: type[Message] | None = None) -> Callable[..., bytes]:
    """Mutations of the bytes, and if they are a message, half of the time of it."""
    messages = [kind.FromString(seed) for seed in seeds] if kind else []

    def make(rng: random.Random) -> bytes:
        if messages and rng.random() < 0.5:
            return mutated_message(rng, rng.choice(messages))
        return mutated_bytes(rng, rng.choice(seeds), seeds)

    return make


def _of_text(*seeds: str) -> Callable[..., bytes]:
    return lambda rng: mutated_text(rng, rng.choice(seeds), seeds)


def _files() -> Iterator[Target]:
    def tree(raw: bytes) -> None:
        found = tree_from_bytes(raw, TWELVE)
        check_tree(found)
        assert tree_from_bytes(encode_tree(found), TWELVE) == found

    def record(raw: bytes) -> None:
        found = record_from_bytes(raw)
        # Metadata are written in Java's order, whatever order they came in.
        written = record_to_bytes(found)
        again = record_from_bytes(written)
        assert record_to_bytes(again) == written
        assert (again.block_id, again.bcs_id) == (found.block_id, found.bcs_id)
        assert [c.entries for c in again.chunks] == [c.entries for c in found.chunks]

    def transaction(raw: bytes) -> None:
        found = delete_transaction_from_bytes(raw)
        assert delete_transaction_from_bytes(delete_transaction_to_bytes(found)) == found

    def descriptor(raw: bytes) -> None:
        found = parse_descriptor(raw)
        assert parse_descriptor(dump_descriptor(with_checksum(found))) == with_checksum(found)

    trees = of_bytes(TREE, _stored_tree(), kind=op.ContainerChecksumInfo)
    yield Target("tree file", trees, tree)
    yield Target("tombstones", trees, lambda raw: tombstones_from_bytes(raw, TWELVE), refuses=False)
    yield Target("container of a tree", trees, container_id_of_tree)
    yield Target("block record", of_bytes(*RECORDS, kind=op.BlockData), record)
    sent = delete_transaction_to_bytes(DeleteTransaction(7, TWELVE, (TWENTY, BlockId(21)), 300))
    yield Target("delete transaction", of_bytes(sent), transaction)
    yield Target("descriptor", _of_text(*_descriptors()), descriptor)
    version = (
        "#Sun Nov 22\nclusterID=CID-1\nlayOutVersion=1\nstorageID=DS-1\ndatanodeUuid=dn\n"
        "ctime=1755856800000\n"
    )
    yield Target("VERSION", _of_text(version), parse_version)
    yield Target("manifest", _manifest, _accept_manifest)


def _stored_tree() -> bytes:
    assert isinstance(HELD.tree, bytes)
    return HELD.tree


def _descriptors() -> Iterator[str]:
    made = Descriptor(
        container_id=TWELVE,
        state=ReplicaState.CLOSED,
        chunks_path="/data/12/chunks",
        metadata_path="/data/12/metadata",
        max_size_bytes=5 << 30,
        origin_node_id="dn-1",
        origin_pipeline_id="p",
        replica_index=0,
        layout_version=2,
        schema_version="3",
    )
    for state in (ReplicaState.CLOSED, ReplicaState.UNHEALTHY):
        yield dump_descriptor(with_checksum(replace(made, state=state))).decode()


def _whole_manifest() -> Manifest:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    files = [
        TableFile(file_name(kind, 7, "abcdef12", number), kind, 10, 1000, "0" * 32, at)
        for kind, number in ((FileKind.CHUNKS, 0), (FileKind.CONTAINERS, None))
    ]
    return Manifest(
        datanode="dn-1",
        sequence=7,
        previous=6,
        begun_at=at,
        created_at=at,
        source=TreeSource.DATA,
        volumes=("DS-1",),
        skipped=(SkippedVolume("/v", "disk_failed", "gone"),),
        files=tuple(files),
        containers=1,
        rows=10,
        audit=AuditMark(10, 5, "00"),
        volumes_created_ms={"DS-1": 1},
    )


_MANIFEST = _whole_manifest()


def _manifest(rng: random.Random) -> bytes:
    """Damaged as bytes, or of wrong content with a right checksum."""
    raw = _MANIFEST.to_bytes()
    if rng.random() < 0.3:
        return mutated_bytes(rng, raw, [raw])
    if rng.random() < 0.1:
        # Near the depth that a parser of JSON still takes, and far beyond.
        depth = rng.choice((rng.randrange(900, 1000), 100_000))
        opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return raw.replace(b'"dn-1"', opened * depth + b"1" + closed * depth)
    document = json.loads(raw)
    document.pop("checksum")
    for _ in range(rng.choice((1, 1, 3))):
        document = mutated_json(rng, document)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    if isinstance(document, dict):
        document["checksum"] = fingerprint(canonical).hex()
    return json.dumps(document).encode()


def _accept_manifest(raw: bytes) -> None:
    found = parse_manifest(raw, _MANIFEST.name)
    assert parse_manifest(found.to_bytes(), found.name) == found


def _configs(scratch: Path) -> Iterator[Target]:
    agent = (
        'state_folder = "/s"\nlisten = "127.0.0.1:9895"\n[[volumes]]\npath = "/v"\n'
        'hold = "owner"\n[repair]\nenabled = true\nundo_bytes = "1GiB"\n[scan]\nenabled = true\n'
    )
    controller = 'state_folder = "/s"\nlisten = "127.0.0.1:9896"\n[automatic]\nenabled = false\n'
    verifier = 'bucket = "local:/b"\nlisten = "127.0.0.1:9897"\n[scrub]\nenabled = true\n'
    models: tuple[tuple[str, str, type[Settings]], ...] = (
        ("agent.toml", agent, AgentConfig),
        ("controller.toml", controller, ControllerConfig),
        ("verifier.toml", verifier, VerifierConfig),
    )
    for name, text, model in models:
        path = scratch / name

        def accept(raw: bytes, path: Path = path, model: type[Settings] = model) -> None:
            path.write_bytes(raw)
            load(path, model)

        yield Target(name, _of_text(text), accept)


def parsed_message(kind: type[_M], raw: bytes) -> _M:
    """As gRPC's server and clients parse: bytes that are no message are refused by
    runtime.rpc.
    """
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise UsageError("not a message of this method") from error


def _controller() -> Iterator[Target]:
    node = cp.Datanode(datanode_id="dn-1", hostname="h", address="127.0.0.1:1")
    replica = cp.ReplicaReport(container_id=12, state="CLOSED", data_checksum=7, fingerprint=b"f")
    progress = cp.ReconcileProgress(
        job_id="job.2", container_id=12, state="running", verdict="REPAIRABLE"
    )
    heartbeat = cp.HeartbeatRequest(
        datanode=node,
        incarnation="1",
        sequence=3,
        report=cp.ContainerReport(full=True, replicas=[replica], removed_container_ids=[4]),
        progress=[progress],
        acknowledged_command_ids=["c"],
    )
    commands = cp.HeartbeatResponse(term=3, commands=[cp.Command(command_id="c", term=3)] * 3)
    commands.commands[0].reconcile.job_id = "job"
    commands.commands[0].reconcile.container_id = 12
    commands.commands[0].reconcile.peers.append(node)
    commands.commands[1].cancel.job_id = "job"
    commands.commands[2].scan.container_id = 12
    job = cp.Job(job_id="j", container_id=12, state="DONE", verdict="MATCH", created_at_s=1)
    job.datanodes.append(cp.DatanodeProgress(datanode_id="dn-1", progress=progress))
    view = cp.ContainerView(
        container_id=12,
        state="CLOSED",
        comparison="match",
        eligibility="ok",
        replicas=[cp.ReplicaView(datanode=node, replica=replica, live=True)],
    )
    outcome = cp.ReconcileOutcome(container_id=12, eligibility="ok", job_id="j")
    yield _of_controller("heartbeat", heartbeat, heartbeat_from)
    yield _of_controller("commands", commands, response_of)
    yield _of_controller("job", job, lambda message: _show(job_from(message)))
    yield _of_controller("container", view, lambda message: _show(container_from(message)))
    yield _of_controller("reconcile", outcome, outcome_from)
    limit = {"name": "orders", "value": 2, "set_by": "f", "set_at_s": 7.0}
    status = cp.GetStatusResponse(
        started_age_s=5.0, oldest_root_age_s=6.0, limits=[cp.Limit(**limit)]
    )
    known = cp.DatanodeView(datanode=node, live=True, heartbeat_age_s=3.0)
    yield _of_controller("status", status, lambda message: _show(controller_status_from(message)))
    yield _of_controller("datanode", known, lambda message: _show(datanode_view_from(message)))
    volume = ap.VolumeStatus(path="/v", scan_bytes_per_second=5.0, full_scan_age_s=9.0)
    agent = ap.GetStatusResponse(
        datanode_id="dn-1",
        volumes=[volume],
        limits=[ap.Limit(**limit)],
        repair_bytes_per_second=1.0,
    )
    yield Target(
        "agent's status",
        of_bytes(agent.SerializeToString(), kind=ap.GetStatusResponse),
        lambda raw: _show(_status_of(parsed_message(ap.GetStatusResponse, raw))),
    )


def _status_of(message: ap.GetStatusResponse) -> AgentStatus:
    channel = cast(grpc.Channel, _FakeChannel([cast(bytes, message)]))
    return AgentClient(channel, "dn-1").status(timeout_s=1.0)


def _show(
    view: AgentStatus | ContainerStatus | ControllerStatus | DatanodeView | JobStatus,
) -> None:
    """As commands do: in JSON, with times as dates."""
    values = asdict(view)
    json.dumps(values, allow_nan=False, default=str, skipkeys=True)
    limits = [one["set_at_s"] for one in values.get("limits", ())]
    for at_s in (*limits, *(value for name, value in values.items() if name.endswith("_at_s"))):
        datetime.fromtimestamp(at_s, UTC)


def _of_controller(name: str, seed: _M, accept: Callable[[_M], object]) -> Target:
    kind = type(seed)
    return Target(
        f"controller's {name}",
        of_bytes(seed.SerializeToString(), kind=kind),
        lambda raw: accept(parsed_message(kind, raw)),
    )


class _Call(Iterator[bytes]):
    """An answer of several messages."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages = iter(messages)

    def __next__(self) -> bytes:
        return next(self._messages)

    def cancel(self) -> None:
        """Nothing runs."""


class _FakeChannel:
    """A connection on which each call gets the same messages."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages = messages

    def unary_unary(self, *_: object, **__: object) -> Callable[..., bytes]:
        return lambda *_, **__: self._messages[0]

    def unary_stream(self, *_: object, **__: object) -> Callable[..., _Call]:
        return lambda *_, **__: _Call(self._messages)

    stream_stream = unary_stream

    def close(self) -> None:
        """Nothing is open."""


def _agent(messages: Sequence[bytes]) -> AgentPeer:
    return AgentPeer(PeerId("dn-2"), cast(grpc.Channel, _FakeChannel(messages)), "dn-2")


def _datanode(messages: Sequence[bytes]) -> DatanodePeer:
    channel = cast(grpc.Channel, _FakeChannel(messages))
    return DatanodePeer(PeerId("dn-2"), DatanodeClient(channel, "dn-2"))


def _read(peer: Peer) -> None:
    """Read half of a chunk; whatever is yielded was asked for."""
    record = HELD.records[TWENTY].chunks[0]
    asked = ByteRange(record.offset, min(1000, record.length_bytes))
    for piece in peer.read(TWELVE, TWENTY, record, [asked]):
        assert asked.offset <= piece.offset < piece.end <= asked.end


def _peers() -> Iterator[Target]:
    """What a peer answers, to both kinds of client."""
    tree = _stored_tree()
    pages = ap.ContainerHashPage(container_id=12, fingerprint=b"f" * 16)
    pages.blocks = op.ContainerChecksumInfo.FromString(tree).containerMerkleTree.SerializeToString()
    hashes = ap.GetContainerHashesResponse(container_checksum_info=tree)
    records = ap.GetBlockRecordsResponse(block_data=RECORDS)
    piece = ap.WindowPiece(offset=0, data=bytes(HELD.files[TWENTY][:1000]))

    info = op.GetContainerChecksumInfoResponseProto(containerID=12, containerChecksumInfo=tree)
    of_tree = op.ContainerCommandResponseProto(
        cmdType=op.GetContainerChecksumInfo, result=op.SUCCESS, getContainerChecksumInfo=info
    )
    found = op.GetBlockResponseProto(blockData=op.BlockData.FromString(RECORDS[0]))
    of_record = op.ContainerCommandResponseProto(
        cmdType=op.GetBlock, result=op.SUCCESS, getBlock=found
    )
    where = op.DatanodeBlockID(containerID=12, localID=20)
    data = op.ReadChunkResponseProto(blockID=where, data=bytes(HELD.files[TWENTY][:1000]))
    data.chunkData.chunkName, data.chunkData.offset, data.chunkData.len = "c", 0, 1000
    data.chunkData.checksumData.type, data.chunkData.checksumData.bytesPerChecksum = op.CRC32C, 1024
    of_chunk = op.ContainerCommandResponseProto(
        cmdType=op.ReadChunk, result=op.SUCCESS, readChunk=data
    )
    wanted = [TWENTY, BlockId(21)]
    for name, seed, ask in (
        ("agent's tree", hashes, lambda raw: _agent([raw]).tree(TWELVE)),
        ("agent's page", pages, lambda raw: _agent([raw, raw])._paged_tree(TWELVE)),
        ("agent's records", records, lambda raw: _agent([raw]).records(TWELVE, wanted)),
        ("agent's piece", piece, lambda raw: _read(_agent([raw]))),
        ("datanode's tree", of_tree, lambda raw: _datanode([raw]).tree(TWELVE)),
        ("datanode's record", of_record, lambda raw: _datanode([raw]).records(TWELVE, [TWENTY])),
        ("datanode's chunk", of_chunk, lambda raw: _read(_datanode([raw]))),
    ):
        assert isinstance(seed, Message)
        yield Target(name, of_bytes(seed.SerializePartialToString(), kind=type(seed)), ask)
    raw_piece = encode_piece(0, bytes(HELD.files[TWENTY][:1000]))
    yield Target("agent's raw piece", of_bytes(raw_piece), lambda raw: _read(_agent([raw])))


def of_json(document: object) -> Callable[[random.Random], bytes]:
    """Damaged as bytes, or JSON of wrong content."""
    seed = json.dumps(document).encode()

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutated_bytes(rng, seed, [seed])
        changed = document
        for _ in range(rng.choice((1, 1, 3))):
            changed = mutated_json(rng, changed)
        return json.dumps(changed).encode()

    return make


def _job_rows(scratch: Path) -> Iterator[Target]:
    """Rows of the controller's job store, of which a disk has changed something."""
    order = RepairTarget(DN1, (DN2,))
    job = step(new_job(JobId("j"), TWELVE, (order,), now_s=5.0), OrderIssued(DN1), 6.0)
    visit = Visit(TWELVE, "j", 2, 100.0, hopeless_roots=((DN1, 7, "f"), (DN2, None, "")))
    jobs_kind, visits_kind = TypeAdapter(Job), TypeAdapter(Visit)
    for name, table, column, row in (
        ("job", "jobs", "job", jobs_kind.dump_python(job, mode="json")),
        ("visit", "visits", "visit", visits_kind.dump_python(visit, mode="json")),
        ("holders", "holders", "datanodes", [DN1, DN2]),
    ):

        def accept(raw: bytes, table: str = table, column: str = column) -> None:
            path = scratch / f"{table}.db"
            is_new = not path.exists()
            with closing(SqliteJobStore(path)) as store:
                if is_new:
                    store.save([job], [visit], {TWELVE: {DN1, DN2}})
                with closing(sqlite3.connect(path)) as damaged, damaged:
                    # No power is cut here.
                    damaged.execute("PRAGMA synchronous=OFF")
                    damaged.execute(f"UPDATE {table} SET {column} = CAST(? AS TEXT)", (raw,))
                for found in store.jobs():
                    assert jobs_kind.validate_json(jobs_kind.dump_json(found)) == found
                    step(found, ControllerResumed(), 7.0)
                for seen in store.visits():
                    assert visits_kind.validate_json(visits_kind.dump_json(seen)) == seen
                    resume_visit(seen, 7.0)
                store.holders()

        yield Target(f"{name} row", of_json(row), accept)


def _sweeps(scratch: Path) -> Iterator[Target]:
    """What a sweep left behind for the next one: its plan, and the parts it read."""
    part = Part("p1", PartKind.FILE, "/t/a.parquet", 0, 9, 10, volumes=("DS-1",), table="/t")
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    skipped = (SkippedInput("/v", "gone"),)
    plan = Plan("s1", at, "local", TreeSource.TREE, (part,), skipped, ("/m",), "k")

    def as_json(value: object) -> object:
        return json.loads(json.dumps(value, default=lambda one: one.value))

    def accept_plan(raw: bytes) -> None:
        work = WorkFolders(scratch, Files(Disk()))
        work.begin(plan)
        Path(str(work.path(plan, "plan.json"))).write_bytes(raw)
        plans, broken = work.plans()
        for reason in broken.values():
            raise UsageError(reason)
        for found in plans:
            again = WorkFolders(scratch / "again", Files(Disk()))
            again.begin(replace(found, sweep_id="s1"))
            assert again.plans() == ([replace(found, sweep_id="s1")], {})

    def accept_parts(raw: bytes) -> None:
        history = History(scratch, Files(Disk()))
        history.save("s1", [part], {}, here)
        Path(str(history.folder("s1") / "parts.json")).write_bytes(raw)
        parts, manifests = history.load("s1")
        assert all(isinstance(found, Part) for found in parts)
        assert isinstance(manifests, tuple)
        history.exports("s1", here)

    whole = asdict(plan) | {"version": 2, "started_at": at.isoformat()}
    yield Target("sweep's plan", of_json(as_json(whole)), accept_plan)
    exports = [["dn-1", ["DS-1"], at.isoformat()]]
    parts = {"parts": [asdict(part)], "manifests": ["/m"], "exports": exports}
    yield Target("sweep's parts", of_json(as_json(parts)), accept_parts)


def _site(scratch: Path) -> Target:
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<configuration>\n  <property>\n'
        "    <name>hdds.datanode.dir</name>\n"
        "    <value>[SSD]file:///data/1, /data/2</value>\n  </property>\n  <property>\n"
        "    <name>hdds.datanode.container.db.dir</name>\n    <value>/db</value>\n"
        "  </property>\n</configuration>\n"
    )
    path = scratch / "ozone-site.xml"

    def accept(raw: bytes) -> None:
        path.write_bytes(raw)
        data, databases = volumes_of(read_site(path))
        assert data
        assert all(isinstance(folder, Path) for folder in (*data, *databases))

    return Target("ozone-site.xml", _of_text(text), accept)
