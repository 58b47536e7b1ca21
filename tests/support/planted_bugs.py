"""Planted bugs: parts of the product with one rule broken, each of which the simulated
cluster must catch.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from dnagent.heartbeat import (
    Command,
    CommandEnvelope,
    HeartbeatResponse,
    HeartbeatState,
    JobReport,
    OutgoingHeartbeat,
)
from dnagent.local_replica import LocalReplica
from dnagent.messages import request_of
from merkle.checksum import fingerprint
from merkle.outcome import Verdict
from merkle.plan import ChunkRepair
from merkle.record import ChunkRecord
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ChunkTree, ContainerId, ContainerTree
from merkle.windows import ProvenWindows
from protos import controller_pb2 as pb
from repair.block_repair import BlockRepairer, ChunkRepairer
from repair.reconciliation import Reconciliation
from repair.requests import (
    Cancelled,
    Event,
    LocalChecked,
    PutBlock,
    Request,
    Scanned,
    TreeStored,
)
from repair.round import RepairRules
from scm.automatic import AutomaticMode
from scm.controller import Controller
from scm.controller_parts import ControllerParts
from scm.datanodes import Datanode
from scm.dispatcher import Dispatcher
from scm.job_index import JobIndex
from scm.jobs import Event as JobEvent
from scm.jobs import JobId, ProgressReceived
from scm.registry import HeartbeatEffect, Registry, ReplicaReport
from tests.support.cluster_control import Parts
from tests.support.memory import RepairableReplica


def _believe(chunk: ChunkRecord, first: int, data: bytearray) -> tuple[ProvenWindows, ...]:
    """Takes whatever a peer sends."""
    count, length = 0, 0
    for index in range(first, len(chunk.checksums)):
        size = chunk.window(index)[1]
        if length + size > len(data):
            break
        count, length = count + 1, length + size
    return (ProvenWindows(first, count, bytes(data[:length])),) if count else ()


class _TrustsAnyRecord(BlockRepairer):
    def _is_proven_record(self, record: ChunkRecord, entry: ChunkTree) -> bool:
        return True


class _IgnoresGaps(BlockRepairer):
    def _fits(self, position: int, file_bytes: int) -> bool:
        return True


class _RecordsHoles(BlockRepairer):
    def _follows(self, chunk: ChunkRepairer) -> bool:
        return True


class _WritesGoodWindowsToo(BlockRepairer):
    def local_checked(self, event: LocalChecked) -> int:
        everything = tuple(range(len(self._by_offset[event.offset].record.checksums)))
        return super().local_checked(replace(event, bad=everything))


class _SkipsPartialSources(BlockRepairer):
    def _add_chunk(self, chunk: ChunkRepair, record: ChunkRecord) -> None:
        if chunk.sources:
            super()._add_chunk(chunk, record)


class _TakesTheCommitOfWhatItLacks(BlockRepairer):
    def put(self, container_id: ContainerId) -> tuple[PutBlock | None, int]:
        put, _ = super().put(container_id)
        highest = max((record.bcs_id for record in self._records.values()), default=0)
        return (PutBlock(replace(put.record, bcs_id=highest)) if put else None), highest


class _TakesTheCommitOfAFailedBlock(BlockRepairer):
    def put(self, container_id: ContainerId) -> tuple[PutBlock | None, int]:
        failed, self.is_clean = not self.is_clean, True
        put, adopted = super().put(container_id)
        self.is_clean = self.is_clean and not failed
        return put, adopted if self.is_clean else 0


class _WritesNewChunksInPart(BlockRepairer):
    def _may_write(self, chunk: ChunkRepairer) -> bool:
        return not chunk.is_new or self._follows(chunk)


class _TakesRecordsThatProveLittle(BlockRepairer):
    def _is_proven_record(self, record: ChunkRecord, entry: ChunkTree) -> bool:
        return record.data_checksum == entry.data_checksum


class _CommitsThoughABlockFailed(Reconciliation):
    def _commit(self) -> None:
        self._round.is_clean = True
        super()._commit()


class _CommitsWhatAFailedBlockHas(BlockRepairer):
    def put(self, container_id: ContainerId) -> tuple[PutBlock | None, int]:
        put, _ = super().put(container_id)
        commit = put.record.bcs_id if put else self.own.bcs_id if self.own else 0
        self.is_clean = True
        return put, commit


class _ReturnsBehindACommit(Reconciliation):
    def _after_scan(self) -> None:
        self._job.bcs_seen = 0
        super()._after_scan()


class _ReturnsUnscanned(Reconciliation):
    def _after_scan(self) -> None:
        self._job.scanned_clean = True
        super()._after_scan()


class _LaysChunksOverOurs(BlockRepairer):
    def _add_chunk(self, chunk: ChunkRepair, record: ChunkRecord) -> None:
        own = self.own
        if own is not None and chunk.offset not in own.by_offset:
            self.own = None
        super()._add_chunk(chunk, record)
        self.own = own


class _RevivesARepairedBlock(Reconciliation):
    def _store_tree(self) -> None:
        tree = self._ours.tree
        if tree is not None and tree.data_checksum is not None:
            kept = [b for b in tree.blocks if b.block_id not in self._round.repaired]
            self._ours.tree = ContainerTree.of(tree.container_id, kept)
        super()._store_tree()


class _DeletesWhatAPeerDeleted(RepairableReplica):
    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        stored = super().store_tree(tree, generation)
        for block in stored.tree.blocks:
            if block.deleted:
                self.stored.files.pop(block.block_id, None)
        return stored


class _LaysTreesOverTombstones(RepairableReplica):
    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        self._check_generation(generation, blocks_may_change=True)
        return self._store(tree)


class _ReturnsWithoutTheLock(RepairableReplica):
    def _check_return(self, generation: bytes) -> None:
        """As if another scan ended between the check and the change."""


class _KnowsATreeByItsHash(RepairableReplica):
    def _generation(self) -> bytes:
        return fingerprint(self.stored.tree) if isinstance(self.stored.tree, bytes) else b""

    def _check_generation(self, generation: bytes, *, blocks_may_change: bool = False) -> None:
        super()._check_generation(generation)


class _BelievesScansWithoutHandles(RepairableReplica):
    def scan(self) -> Scanned:
        if not self.failing_disk:
            return super().scan()
        self._mark_unhealthy()
        tree, generation = self.known_tree()
        assert tree is not None
        return Scanned(tree, generation, ((None, None),), self.stored.state)


class DeletesWhatAPeerDeletedOnDisk(LocalReplica):
    """The same of the product's own, for replicas on volumes."""

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        stored = super().store_tree(tree, generation)
        for block in stored.tree.blocks:
            if block.deleted:
                self._container.block_path(block.block_id).unlink(missing_ok=True)
        return stored


class _CannotBeStopped(Reconciliation):
    def step(self, event: Event) -> list[Request]:
        return [] if isinstance(event, Cancelled) else super().step(event)


class _NeverStoresTheTree(Reconciliation):
    def _store_tree(self) -> None:
        self._round.repaired.clear()
        super()._store_tree()

    def _scan_if_needed(self) -> None:
        self._round.must_scan = False
        super()._scan_if_needed()


def _with(rules: RepairRules) -> Parts:
    return Parts(machine=partial(Reconciliation, rules=rules))


def _stored_by(replica: type[RepairableReplica]) -> Parts:
    return Parts(replica=replica)


def _repaired_by(block_repairer: type[BlockRepairer]) -> Parts:
    return _with(RepairRules(block_repairer=block_repairer))


class _TellsOfAChangeOnce(HeartbeatState):
    def next_heartbeat(
        self, replicas: Iterable[ContainerReplica], running: Iterable[JobReport]
    ) -> OutgoingHeartbeat:
        heartbeat = super().next_heartbeat(replicas, running)
        self._confirmed.update((replica.container_id, replica) for replica in heartbeat.replicas)
        self._unconfirmed.clear()
        return heartbeat


class _TellsOfAnEndOnce(HeartbeatState):
    def next_heartbeat(
        self, replicas: Iterable[ContainerReplica], running: Iterable[JobReport]
    ) -> OutgoingHeartbeat:
        heartbeat = super().next_heartbeat(replicas, running)
        self._results.clear()
        return heartbeat


class _NeverTellsWhatIsGone(HeartbeatState):
    def next_heartbeat(
        self, replicas: Iterable[ContainerReplica], running: Iterable[JobReport]
    ) -> OutgoingHeartbeat:
        return replace(super().next_heartbeat(replicas, running), removed=())


class _ObeysTwice(HeartbeatState):
    def _accept(self, envelope: CommandEnvelope) -> bool:
        self._seen_commands.clear()
        return super()._accept(envelope)


class _ForgetsToConfirm(HeartbeatState):
    def handle_response(self, sent: OutgoingHeartbeat, answer: HeartbeatResponse) -> list[Command]:
        commands = super().handle_response(sent, answer)
        self._acknowledged.clear()
        self._seen_commands.clear()
        return commands


class _NeverSendsAgain(Dispatcher):
    def resend(self, now_s: float) -> None:
        self._resend.clear()


class _SendsBeforeItStores(Controller):
    def _save_and_dispatch(self, peers: Iterable[PeerId], now_s: float) -> None:
        self._unsaved.is_urgent = False
        super()._save_and_dispatch(peers, now_s)


class _OverlooksRestartsAndDeaths(JobIndex):
    def in_flight_at(self, peer: PeerId) -> list[JobId]:
        return []


class _NeverTriesAgain(AutomaticMode):
    def may_visit(self, container_id: ContainerId, now_s: float) -> bool:
        return container_id not in self._visits and super().may_visit(container_id, now_s)


class _TriesTheHopelessAgain(AutomaticMode):
    def may_visit(self, container_id: ContainerId, now_s: float) -> bool:
        visit = self._visits.get(container_id)
        return (visit is None or now_s >= visit.not_before_s) and self._is_eligible(container_id)


class _StopsAfterOneRound(Controller):
    def _step(self, job_id: JobId, event: JobEvent, now_s: float) -> None:
        super()._step(
            job_id,
            replace(event, root=None) if isinstance(event, ProgressReceived) else event,
            now_s,
        )


class _TakesAnOldEndForTheNext(Controller):
    def _step(self, job_id: JobId, event: JobEvent, now_s: float) -> None:
        job = self._jobs.get(job_id)
        if job and isinstance(event, ProgressReceived) and (order := job.order(event.peer)):
            event = replace(event, round=order.round)
        super()._step(job_id, event, now_s)


class _SeesNoDamage(Controller):
    def _step(self, job_id: JobId, event: JobEvent, now_s: float) -> None:
        if isinstance(event, ProgressReceived) and event.progress.verdict is Verdict.UNRECOVERABLE:
            event = replace(event, progress=replace(event.progress, verdict=Verdict.MATCH))
        super()._step(job_id, event, now_s)


class _TakesLateReports(Registry):
    def handle_heartbeat(
        self,
        datanode: Datanode,
        *,
        incarnation: int,
        sequence: int,
        report: ReplicaReport | None,
        now_s: float,
    ) -> HeartbeatEffect:
        if known := self._datanodes.get(datanode.peer):
            known.sequence = 0
        return super().handle_heartbeat(
            datanode, incarnation=incarnation, sequence=sequence, report=report, now_s=now_s
        )


class _TakesEveryStartForTheLast(Registry):
    def handle_heartbeat(
        self,
        datanode: Datanode,
        *,
        incarnation: int,
        sequence: int,
        report: ReplicaReport | None,
        now_s: float,
    ) -> HeartbeatEffect:
        known = self._datanodes.get(datanode.peer)
        if known and incarnation < known.incarnation:
            known.incarnation, known.sequence = incarnation - 1, 0
        return super().handle_heartbeat(
            datanode, incarnation=incarnation, sequence=sequence, report=report, now_s=now_s
        )


def _counts_on_the_wall_clock(
    wall_s: Callable[[], float], _: Callable[[], float]
) -> Callable[[], float]:
    return wall_s


def _controlled_by(parts: ControllerParts) -> Parts:
    return Parts(controller=partial(Controller, parts=parts))


def _calls_an_unknown_root_zero(
    heartbeat: OutgoingHeartbeat, *, datanode_id: str, address: str, incarnation: int
) -> pb.HeartbeatRequest:
    request = request_of(
        heartbeat, datanode_id=datanode_id, address=address, incarnation=incarnation
    )
    for reported in request.report.replicas:
        reported.data_checksum = reported.data_checksum if reported.HasField("data_checksum") else 0
    return request


# The product with one bug each, by the bug's name.
BUGS: dict[str, Parts] = {
    "_ForgetsTombstones": _with(RepairRules(tombstones_to_adopt=lambda _: ())),
    "_AlwaysSaysMatch": _with(RepairRules(verdict=lambda *_, **__: Verdict.MATCH)),
    **{bug.__name__: Parts(machine=bug) for bug in (
        _CannotBeStopped, _NeverStoresTheTree, _CommitsThoughABlockFailed, _ReturnsBehindACommit,
        _ReturnsUnscanned, _RevivesARepairedBlock
    )},
    **{bug.__name__: _stored_by(bug) for bug in (
        _DeletesWhatAPeerDeleted, _LaysTreesOverTombstones, _ReturnsWithoutTheLock,
        _KnowsATreeByItsHash, _BelievesScansWithoutHandles
    )},
    **{bug.__name__: _repaired_by(bug) for bug in (
        _TrustsAnyRecord, _RecordsHoles, _WritesGoodWindowsToo, _SkipsPartialSources,
        _TakesTheCommitOfWhatItLacks, _TakesTheCommitOfAFailedBlock, _CommitsWhatAFailedBlockHas,
        _WritesNewChunksInPart, _TakesRecordsThatProveLittle, _LaysChunksOverOurs
    )},
    "_IgnoresGaps": replace(_repaired_by(_IgnoresGaps), refuse_gaps=False),
    "_believe": Parts(prove=_believe),
    **{bug.__name__: Parts(heartbeats=bug) for bug in (
        _TellsOfAChangeOnce, _TellsOfAnEndOnce, _NeverTellsWhatIsGone, _ObeysTwice,
        _ForgetsToConfirm
    )},
    "_calls_an_unknown_root_zero": Parts(request_of=_calls_an_unknown_root_zero),
    **{bug.__name__: Parts(controller=bug) for bug in (
        _SendsBeforeItStores, _SeesNoDamage, _StopsAfterOneRound, _TakesAnOldEndForTheNext
    )},
    "_counts_on_the_wall_clock": Parts(clock=_counts_on_the_wall_clock),
    "_NeverSendsAgain": _controlled_by(ControllerParts(dispatcher=_NeverSendsAgain)),
    "_OverlooksRestartsAndDeaths": _controlled_by(
        ControllerParts(job_index=_OverlooksRestartsAndDeaths)
    ),
    **{bug.__name__: _controlled_by(ControllerParts(automatic=bug)) for bug in (
        _NeverTriesAgain, _TriesTheHopelessAgain
    )},
    **{bug.__name__: _controlled_by(ControllerParts(registry=bug)) for bug in (
        _TakesLateReports, _TakesEveryStartForTheLast
    )},
}  # fmt: skip
