"""Run a rescue: stage what a container's replicas hold together, then serve it.

One rescue at a time runs for one cluster and user: its folder is locked. The folder
keeps the UUID with which rescues join this cluster, so that SCM's list of datanodes
grows by one entry at most, and the staged files, which `clean` removes after a kill.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

from live.ports import ClusterDirectory, ClusterMember
from live.rescue import (
    Beat,
    ChunkRead,
    Event,
    Failed,
    ListReplicas,
    OrderReconcile,
    ReadChunk,
    ReadTree,
    Register,
    ReplicasListed,
    ReportNothing,
    Request,
    Rescue,
    RescueOutcome,
    RescuePhase,
    Succeeded,
    TreeRead,
    Wait,
)
from live.staging import StagingReplica, StagingSource, settled_record, settled_tree
from merkle.errors import ReconcileError
from merkle.outcome import Evidence, RepairOutcome
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.survey import ChunkPlace
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import bad_windows
from ozone.datanode import XceiverService
from ozone.ports import ByteRange
from ozone.scm_membership import ReportedReplica
from repair.ports import LACKING_RESULTS, Peer
from repair.runner import RepairJob, Runner
from runtime.call_limits import CallLimits
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import ConfigError, PeerRefusedError
from runtime.folder_lock import FolderLock
from runtime.rpc import RpcServer, start_server

# Peers are asked for chunks with so many requests at a time.
_THREADS = 8
# Datanodes read chunk after chunk, each by a stream of its own.
_SERVER_THREADS = 8
_SERVER_LIMITS = CallLimits(idle_s=15, stream_s=300)
_NODE_FILE = "node.json"
# UUIDs among which one is looked for that fits.
_NODES_DRAWN = 100
_PROGRAM = "treefold rescue"


@dataclass(frozen=True, slots=True)
class StagedRange:
    """Proven bytes of a chunk, in bytes from the start of the block, and the replica
    that they are from.
    """

    block_id: int
    offset: int
    length_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Staged:
    """What was staged: the ranges in the order they were proven, the bytes that were
    read for them, and the repair's own outcome, whose evidence names the rest.
    """

    replica: StagingReplica
    outcome: RepairOutcome
    ranges: tuple[StagedRange, ...]

    @property
    def bytes_read(self) -> int:
        """Bytes of blocks that were read from the cluster."""
        return self.outcome.progress.bytes_fetched

    @property
    def rest(self) -> tuple[Evidence, ...]:
        """What was found and is left alone: not proven, or not agreed on."""
        staged = self.replica.staged
        return tuple(
            one for one in self.outcome.evidence if (one.block_id, one.offset) not in staged
        )

    def of_chunk(self, place: tuple[int, int]) -> tuple[list[StagedRange], ChunkRecord]:
        """The ranges of a staged chunk, by offset, and the record that proves them."""
        record = self.replica.staged_record((BlockId(place[0]), place[1]))
        ranges = [
            one
            for one in self.ranges
            if one.block_id == place[0] and record.offset <= one.offset < record.end
        ]
        return sorted(ranges, key=lambda one: one.offset), record


class RescueFolder:
    """The folder of rescues of one cluster, locked until `release`."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        """Create and lock the folder.

        Raises:
            BusyError: another rescue of this cluster runs.
            DiskError: the folder cannot be written.
        """
        disk.make_folder(folder)
        self._folder, self._disk = folder, disk
        self._lock = FolderLock(folder, _PROGRAM)

    def __enter__(self) -> "RescueFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def node(self, fits: Callable[[PeerId], bool] = lambda _: True) -> PeerId:
        """The UUID with which rescues join this cluster, made on first use: one that
        `fits`, if some do.

        Raises:
            ConfigError: the file has no UUID.
        """
        path = self._folder / _NODE_FILE
        if self._disk.length(path) is None:
            drawn = [PeerId(str(uuid.uuid4())) for _ in range(_NODES_DRAWN)]
            document = {"schema_version": 1, "uuid": next(filter(fits, drawn), drawn[0])}
            self._disk.replace(path, json.dumps(document).encode() + b"\n")
        try:
            found = parse_json(self._disk.read(path))
            text = found["uuid"] if isinstance(found, dict) else None
            return PeerId(str(uuid.UUID(str(text))))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"{path} has no UUID", hint="Remove the file: the next rescue joins with a new one."
            ) from error

    def leftovers(self) -> list[Path]:
        """The folders that earlier rescues left."""
        return [
            self._folder / name
            for name in self._disk.names(self._folder)
            if name.startswith("container-")
        ]

    def clean(self) -> None:
        """Remove what earlier rescues staged."""
        for folder in self.leftovers():
            self._disk.remove_folder(folder)

    @contextmanager
    def staging(self, container_id: ContainerId) -> Iterator[Path]:
        """An empty folder for one container, removed at the end."""
        folder = self._folder / f"container-{container_id}"
        self._disk.remove_folder(folder)
        self._disk.make_folder(folder)
        try:
            yield folder
        finally:
            self._disk.remove_folder(folder)


def stage(
    container_id: ContainerId,
    own: PeerId,
    peers: Mapping[PeerId, Peer],
    folder: Path,
    disk: Disk,
    *,
    bcs_id: int,
    reserve: Callable[[int], None] = lambda _: None,
) -> Staged:
    """Put together in `folder` what the replicas hold together, as a repair of a
    staged replica. `bcs_id` is the container's commit; `reserve` limits the rate.

    Raises:
        ReconcileError: a replica's tree or records cannot be read. All are needed: a
            silent replica may hold another record, or know of a deletion.
    """
    trees = {peer: one.tree(container_id) for peer, one in sorted(peers.items())}
    settled = settled_tree(trees, container_id)
    replica = StagingReplica(
        folder,
        disk,
        container_id,
        settled=settled,
        records=_settled_records(container_id, peers, trees, settled),
        bcs_id=bcs_id,
    )
    ranges: list[StagedRange] = []

    def note(
        *, container: int, block: int, offset: int, length: int, source: str, job: str, unread: int
    ) -> None:
        ranges.append(StagedRange(block, offset, length, source))

    runner = Runner(own, threads_max=_THREADS, audit=note, reserve=reserve)
    try:
        outcome = runner.run(RepairJob("rescue", container_id), lambda _: replica, peers)
    finally:
        runner.close()
    return Staged(replica, outcome, tuple(ranges))


def _settled_records(
    container_id: ContainerId,
    peers: Mapping[PeerId, Peer],
    trees: Mapping[PeerId, ContainerTree],
    settled: ContainerTree,
) -> dict[BlockId, BlockRecord]:
    """The settled part of the records of blocks that are not settled as a whole."""
    wanted = sorted(
        {
            block.block_id
            for tree in trees.values()
            for block in tree.blocks
            if not block.deleted and block != settled.block(block.block_id)
        }
    )
    if not wanted:
        return {}
    found = {peer: one.records(container_id, wanted) for peer, one in peers.items()}
    records: dict[BlockId, BlockRecord] = {}
    for block_id in wanted:
        copies = {peer: rows[block_id] for peer, rows in found.items() if block_id in rows}
        if record := settled_record(block_id, settled, copies):
            records[block_id] = record
    return records


def serve_staged(listen: str, replica: StagingReplica, container_id: ContainerId) -> RpcServer:
    """Serve one staged replica to datanodes, and to whoever finds the port: no caller
    gets more than half of the threads, and none can hold one for ever.

    Raises:
        ConfigError: the address to listen on is unusable.
    """
    source = StagingSource(replica, container_id)
    return start_server(
        listen,
        [XceiverService(source).register],
        insecure=True,
        threads=_SERVER_THREADS,
        limits=_SERVER_LIMITS,
        share_threads=True,
    )


@dataclass(slots=True)
class RescueRunner:
    """Serves one staged replica and drives the rescue's machine.

    `listen` is the host:port for datanodes, `join` makes the membership for the port
    that is served. `cancelled` ends the rescue early; it leaves the cluster all the
    same. `reserve` limits the rate of what is read back.
    """

    directory: ClusterDirectory
    peers: Mapping[PeerId, Peer]
    own: PeerId
    listen: str
    join: Callable[[int], ClusterMember]
    cancelled: threading.Event = field(default_factory=threading.Event)
    reserve: Callable[[int], None] = lambda _: None

    def run(
        self,
        container_id: ContainerId,
        replica: StagingReplica,
        on_phase: Callable[[RescuePhase], None] = lambda _: None,
    ) -> RescueOutcome:
        """Rescue the container from the staged replica.

        Raises:
            ConfigError: the address to listen on is unusable.
        """
        server = serve_staged(self.listen, replica, container_id)
        try:
            member = self.join(server.port)
            try:
                return self._drive(container_id, replica, member, on_phase)
            finally:
                member.close()
        finally:
            server.stop()

    def _drive(
        self,
        container_id: ContainerId,
        replica: StagingReplica,
        member: ClusterMember,
        on_phase: Callable[[RescuePhase], None],
    ) -> RescueOutcome:
        machine = Rescue(self.own, replica.tree, replica.staged, tuple(self.peers))
        root = replica.tree.data_checksum
        assert root is not None
        report = [
            ReportedReplica(
                container_id,
                root,
                replica.own().bcs_id,
                sum(c.length_bytes for b in replica.tree.blocks for c in b.chunks),
                len(replica.tree.blocks),
            )
        ]
        request: Request | None = machine.start(time.monotonic())
        phase: RescuePhase | None = None
        while request is not None:
            if machine.phase is not phase:
                phase = machine.phase
                on_phase(phase)
            event = self._execute(request, replica, member, report)
            now_s = time.monotonic()
            if self.cancelled.is_set() and machine.phase is not RescuePhase.LEAVING:
                request = machine.leave("it was interrupted", now_s)
            else:
                request = machine.step(event, now_s)
        assert machine.outcome is not None
        return replace(machine.outcome, untold=member.silent)

    def _execute(
        self,
        request: Request,
        replica: StagingReplica,
        member: ClusterMember,
        report: Sequence[ReportedReplica],
    ) -> Event:
        container_id = replica.tree.container_id
        try:
            match request:
                case Register():
                    member.register(report)
                case Beat():
                    if member.heartbeat():
                        member.register(report)
                case ReportNothing():
                    if member.heartbeat(()):
                        member.register(())
                case OrderReconcile():
                    refusal = self.directory.reconcile([container_id])[container_id]
                    if refusal is not None:
                        raise refusal
                case ListReplicas():
                    found = self.directory.replicas([container_id])
                    return ReplicasListed(found.get(container_id, ()))
                case ReadTree(peer):
                    return TreeRead(self.peers[peer].tree(container_id))
                case ReadChunk(peer, place):
                    return self._read_back(self.peers[peer], replica, place)
                case Wait(seconds):
                    if self.cancelled.is_set():
                        # It leaves the cluster step by step: these waits are not cut.
                        time.sleep(seconds)
                    else:
                        self.cancelled.wait(seconds)
                case _:
                    assert_never(request)
        except ReconcileError as error:
            return Failed(f"{error.code}: {error.message}", not error.retryable)
        return Succeeded()

    def _read_back(self, peer: Peer, replica: StagingReplica, place: ChunkPlace) -> ChunkRead:
        chunk = replica.staged_record(place)
        self.reserve(chunk.length_bytes)
        data = bytearray(chunk.length_bytes)
        wanted = [ByteRange(chunk.offset, chunk.length_bytes)]
        length_bytes = 0
        try:
            for piece in peer.read(replica.tree.container_id, place[0], chunk, wanted):
                at = piece.offset - chunk.offset
                data[at : at + len(piece.data)] = piece.data
                length_bytes += len(piece.data)
        except PeerRefusedError as error:
            if error.facts["result"] not in LACKING_RESULTS:
                raise
            return ChunkRead(False, length_bytes)
        return ChunkRead(not bad_windows(chunk, data), length_bytes)


def withdraw(member: ClusterMember, settle_s: float = 2.0) -> None:
    """Report that the rescues' datanode holds no replica, as after a kill: it registers
    with an empty report, repeats it once, and is silent from then on.

    Raises:
        As ClusterMember.register.
    """
    member.register(())
    # SCM answers before it has taken a report in; the second one finds that done.
    time.sleep(settle_s)
    if member.heartbeat(()):
        member.register(())
