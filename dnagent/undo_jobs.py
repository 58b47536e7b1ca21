"""The undo of a job on this datanode: plan it, and put the overwritten bytes back.

The order makes a crash harmless at any point. First the replica becomes UNHEALTHY and
its tree calls the chunks corrupt; then bytes are written, each with an undo copy of its
own; at the end a scan stores the tree of what is there. An undo that was cut short is
repeated: windows that have their old bytes are left out.

Two datanodes that undo the same job at once could each count on the other. So an undo
first stops serving the container's bytes, and only then asks whether another replica
holds the good ones. Of two that begin together, one finds the other silent.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dnagent.heartbeat import PeerAddress
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId, TreeBuilder
from ozone.repair_writer import Patch, RepairWriter
from ozone.treefile import TreeStatus
from repair.audit import AuditLog
from repair.ports import Peer, ReplicaReader
from repair.replica_plan import PlanChangedError
from repair.requests import FetchWindows, WindowsArrived
from repair.runner import RepairJob, Runner, execute_remote
from repair.undo_plan import (
    OldBytes,
    UndoDecision,
    UndoIncompleteError,
    UndoPlan,
    UndoTooLargeError,
    UndoWindow,
    WindowPlace,
    damaged_entries,
    windows_of,
    with_holders,
)
from runtime.errors import OperationInterruptedError, UsageError

_UNDO = re.compile(r"(.+)\.undo([1-9][0-9]*)")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Bounds the memory: the old and the present bytes of all windows are held.
_BYTES_MAX = 256 << 20
_NUMBERS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class UndoResult:
    """The plan of an undo; if it was carried out and wrote anything, also the ID under
    which it can be undone, and the replica's state and root after it.
    """

    plan: UndoPlan
    undo_id: str = ""
    state: str = ""
    root: int | None = None


class UndoJobs:
    """Undoes jobs on the replicas of this datanode. Thread-safe."""

    def __init__(
        self,
        own: PeerId,
        store: ReplicaStore,
        runner: Runner,
        *,
        connect: Callable[[PeerAddress], Peer],
        audit: AuditLog,
        reserve: Callable[[int], None],
    ) -> None:
        """`connect` opens a connection to a peer. `reserve` limits the rate of fetches
        (repair.runner.execute_remote).
        """
        self._own = own
        self._store = store
        self._runner = runner
        self._connect = connect
        self._audit = audit
        self._reserve = reserve

    def undo(
        self,
        container_id: ContainerId,
        job: str,
        peers: Sequence[PeerAddress],
        *,
        digest: str,
        who: str,
        why: str,
    ) -> UndoResult:
        """Plan the undo of a job, and with the plan's digest carry it out.

        Raises:
            UsageError: the job's name is invalid, or there is no reason.
            ReadOnlyError: our replica may not be changed.
            ContainerNotFoundError: the container is not on this datanode.
            BusyError: the container is being reconciled, or another job undone.
            PlanChangedError: the plan is no longer that of this digest; nothing was
                written.
            UndoIncompleteError: it failed after it had begun.
            UndoTooLargeError: there are too many bytes to put back.
            ReconcileError: the replica cannot be read or written.
        """
        if not _JOB.fullmatch(job):
            raise UsageError(f"{job[:100]!r} is no job")
        if digest and not why.strip():
            raise UsageError("an undo needs a reason", hint="Say why with --reason.")
        with ExitStack() as stack:
            held = RepairJob(f"{job}.undo", container_id)
            cancelled = stack.enter_context(self._runner.held(held))
            if digest:
                stack.enter_context(self._store.withheld(container_id))
            connected: dict[PeerId, Peer] = {}
            for address in peers:
                connected[address.peer] = peer = self._connect(address)
                stack.callback(peer.close)
            # Refuses a replica that may not be written.
            replica = self._store.open_replica(
                container_id, job, cancelled=cancelled, on_bytes=lambda _: None
            )
            volume = self._store.volume_of(container_id)
            assert volume.writer is not None
            plan = plan_undo(volume, self._own, container_id, job, connected, reserve=self._reserve)
            if not digest:
                return UndoResult(plan)
            if plan.digest != digest:
                raise PlanChangedError(
                    f"the undo of job {job} of container {container_id} is no longer that of the"
                    " plan: bytes here or at another replica have changed since",
                    hint="See the new plan, and confirm that.",
                    container_id=container_id,
                )
            if not plan.to_write:
                return UndoResult(plan)
            return self._carry_out(volume, replica, plan, cancelled, who=who, why=why)

    def _carry_out(
        self,
        volume: ManagedVolume,
        replica: ReplicaReader,
        plan: UndoPlan,
        cancelled: threading.Event,
        *,
        who: str,
        why: str,
    ) -> UndoResult:
        container_id = plan.container_id
        undo_id = next_undo_id(volume, container_id, plan.job)
        self._begin(plan, undo_id, who, why)
        state = "failed"
        try:
            put_back(volume, plan, undo_id, audit=self._audit, cancelled=cancelled)
            replica.scan()
            state = "done"
        except ReconcileError as error:
            raise UndoIncompleteError(
                f"the undo failed after it had begun: {error.message}",
                hint="See the new plan, and undo the job again or reconcile the container.",
                container_id=container_id,
            ) from error
        finally:
            after = volume.replica(container_id)
            self._audit.end(
                container=container_id,
                job=undo_id,
                state=state,
                root=after.data_checksum,
                facts={"replica_state": after.state.value},
            )
        return UndoResult(plan, undo_id, after.state.value, after.data_checksum)

    def _begin(self, plan: UndoPlan, undo_id: str, who: str, why: str) -> None:
        self._audit.begin(
            "undo",
            container=plan.container_id,
            job=undo_id,
            who=who,
            why=why,
            root=plan.root,
            undone=plan.job,
            plan=plan.digest,
        )


def plan_undo(
    volume: ManagedVolume,
    own: PeerId,
    container_id: ContainerId,
    job: str,
    peers: Mapping[PeerId, Peer],
    *,
    reserve: Callable[[int], None] = lambda _: None,
) -> UndoPlan:
    """What an undo of a job would put back in our replica, with all its rounds.

    Raises:
        ReconcileError: the replica or its undo copies cannot be read.
    """
    container = volume.containers.get(container_id)
    copies = dict[BlockId, list[OldBytes]]()
    rows, size = 0, 0
    # The newest first: the oldest copy of a place has the original bytes.
    for name in sorted(_runs_of(volume, container_id, job), key=_age_of, reverse=True):
        found, replaced = volume.undo.copies(container_id, name)
        rows += replaced
        size += sum(copy.length for copy in found)
        if size > _BYTES_MAX:
            raise UndoTooLargeError(
                f"job {job} overwrote more than the {_BYTES_MAX >> 20} MiB that can be undone",
                hint="The copies are in the agent's undo folder.",
            )
        for copy in found:
            old = OldBytes(copy.block_id, copy.offset, volume.undo.read(copy))
            copies.setdefault(copy.block_id, []).append(old)
    windows: list[UndoWindow] = []
    for block_id in sorted(copies):
        record = container.record(block_id)
        length = container.block_length(block_id) or 0
        file = container.read(block_id, 0, length) if length else b""
        windows += windows_of(record, block_id, file, copies[block_id])
    held = _held_elsewhere(container_id, windows, peers, reserve)
    replica = volume.replica(container_id)
    decided = with_holders(windows, held)
    return UndoPlan(container_id, own, job, replica.data_checksum, replica.state, decided, rows)


def put_back(
    volume: ManagedVolume,
    plan: UndoPlan,
    undo_id: str,
    *,
    audit: AuditLog,
    cancelled: threading.Event,
) -> None:
    """Write the old bytes of the plan, under the container's lock, with undo copies.

    Raises:
        PlanChangedError: bytes have changed since the plan; those before are written.
        OperationInterruptedError: `cancelled` was set; those before are written.
        ReconcileError: the replica cannot be written.
    """
    writer = volume.writer
    assert writer is not None
    container_id = plan.container_id
    by_block = dict[BlockId, list[UndoWindow]]()
    for window in plan.to_write:
        by_block.setdefault(window.block_id, []).append(window)
    with writer.locked(container_id):
        # Before the bytes: whatever a crash leaves, nobody takes it for healthy.
        writer.mark_unhealthy(container_id)
        volume.reload(container_id)
        _store_damaged_tree(volume, container_id, by_block)
    for block_id, windows in by_block.items():
        if cancelled.is_set():
            raise OperationInterruptedError("the undo was interrupted")
        _put_back_block(volume, writer, block_id, windows, plan, undo_id, audit)


def next_undo_id(volume: ManagedVolume, container_id: ContainerId, job: str) -> str:
    """The ID for the next undo of a job; that of an undo has the same beginning."""
    match = _UNDO.fullmatch(job)
    base = match[1] if match else job
    numbers = [
        int(found[2])
        for name in volume.undo.jobs(container_id)
        if (found := _UNDO.fullmatch(name)) and found[1] == base
    ]
    return f"{base}.undo{max(numbers, default=0) + 1}"


def _put_back_block(
    volume: ManagedVolume,
    writer: RepairWriter,
    block_id: BlockId,
    windows: Sequence[UndoWindow],
    plan: UndoPlan,
    undo_id: str,
    audit: AuditLog,
) -> None:
    container_id = plan.container_id
    with writer.locked(container_id):
        container = volume.containers.get(container_id)
        for one in windows:
            if container.read(block_id, one.offset, len(one.present)) != one.present:
                raise PlanChangedError(
                    f"block {block_id} of container {container_id} changed at {one.offset} since"
                    " the plan of the undo",
                    container_id=container_id,
                )
        patches = [Patch(one.offset, one.after) for one in windows]
        writer.write_windows(container_id, block_id, patches, job=undo_id)
    for patch in patches:
        audit.write(
            container=container_id,
            block=block_id,
            offset=patch.offset,
            length=len(patch.data),
            source=f"undo of {plan.job}",
            job=undo_id,
        )


def _store_damaged_tree(
    volume: ManagedVolume, container_id: ContainerId, by_block: Mapping[BlockId, list[UndoWindow]]
) -> None:
    stored = volume.trees.read(container_id)
    if stored.status is not TreeStatus.PRESENT or stored.tree.data_checksum is None:
        # The scan at the end builds one; until then there is none to claim health.
        return
    container = volume.containers.get(container_id)
    builder = TreeBuilder(container_id, stored.known)
    for block_id, windows in by_block.items():
        record = container.record(block_id)
        assert record is not None, "a window to write has a record"
        length = container.block_length(block_id) or 0
        for entry in damaged_entries(windows, record, container.read(block_id, 0, length)):
            builder.add_chunk(block_id, entry)
    volume.store_tree(builder.build(), stored.generation, blocks_may_change=True)


def _held_elsewhere(
    container_id: ContainerId,
    windows: Sequence[UndoWindow],
    peers: Mapping[PeerId, Peer],
    reserve: Callable[[int], None],
) -> dict[WindowPlace, bytes]:
    """The good bytes of the windows that another replica holds whole, proven now by our
    records.
    """
    held = dict[WindowPlace, bytes]()
    wanted = dict[tuple[BlockId, int], list[UndoWindow]]()
    for one in windows:
        if one.decision in (UndoDecision.RESTORE, UndoDecision.CHANGED) and one.chunk is not None:
            wanted.setdefault((one.block_id, one.chunk.offset), []).append(one)
    for (block_id, offset), found in wanted.items():
        chunk = found[0].chunk
        assert chunk is not None
        missing = {one.index for one in found}
        for peer_id, peer in peers.items():
            if not missing:
                break
            request = FetchWindows(peer_id, block_id, chunk, tuple(sorted(missing)))
            event = execute_remote(request, container_id, peer, reserve=reserve)
            for run in event.runs if isinstance(event, WindowsArrived) else ():
                start, _ = chunk.window(run.first)
                for index in run.windows:
                    low, length = chunk.window(index)
                    held[block_id, offset, index] = run.data[low - start : low - start + length]
                missing.difference_update(run.windows)
    return held


def _runs_of(volume: ManagedVolume, container_id: ContainerId, job: str) -> list[str]:
    """The names under which a job, its later rounds and further runs kept copies."""
    names = volume.undo.jobs(container_id)
    if _UNDO.fullmatch(job):
        return [name for name in names if name == job]
    return [
        name
        for name in names
        if name == job or (name.startswith(f"{job}.") and not _UNDO.fullmatch(name))
    ]


def _age_of(name: str) -> tuple[int, ...]:
    """A key that sorts the runs of one job, the first one first: a round without a
    number is the first.
    """
    _, _, suffix = name.partition(".")
    numbers = tuple(map(int, _NUMBERS.findall(suffix)))
    return numbers or (1,)
