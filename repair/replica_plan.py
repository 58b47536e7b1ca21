"""A plan of one replica's repair, and the repair that carries it out and writes nothing
else (repair.planning makes plans).

An agent carries out only plans that it made itself. It keeps them in memory by their
digest, and an order names only the digest. So nobody can hand an agent a plan, and a
changed file is an unknown digest. A digest that the agent computes anew before its
first write would be simpler. But the replicas of one job change each other: a peer that
was repaired a moment ago becomes another source, and the job would refuse itself.

What holds at the agent, whoever sent the order: `PlannedReplica` refuses everything if
the generation, the root or a record of ours is not that of the plan, and each write
that the plan does not have. `_PlannedBlockRepairer` takes each window only from its
source. The roots of the peers are checked by the controller when the job begins. Later
they may change by the same job, and the bytes are proven against our record anyway.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from hashlib import sha256

from merkle.checksum import fingerprint
from merkle.errors import ReconcileError
from merkle.outcome import Evidence, Verdict
from merkle.plan import BlockRepair, RepairPlan
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, root_hex
from merkle.windows import ProvenWindows
from protos.convert import record_to_bytes
from repair.block_repair import BlockRepairer, ChunkRepairer
from repair.ports import ReplicaAccess
from repair.requests import FetchWindows, OwnLoaded, PutBlock, ReconcileOptions, Scanned, TreeStored
from repair.round import RepairRules
from repair.sources import Sources
from runtime.json_numbers import exact

FORMAT = "treefold-plan-1"
# Digests of plans that made way for others, so that a refusal says so.
_DROPPED_MAX = 10_000
_REFUSED_HINT = "Make a new plan with `treefold reconcile ID --plan FILE`."


class PlanChangedError(ReconcileError):
    """A replica is not what its plan was made from, or a repair would write what the
    plan does not have.
    """

    code = "plan_changed"
    exit_status = 6


class PlanUnknownError(ReconcileError):
    """The agent has no plan of this digest: it was restarted, or made many others."""

    code = "plan_unknown"
    exit_status = 6


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """Adjacent windows of a chunk to write from one source: `count` of them from
    `first` on, which are `length` bytes at `offset` of the block's file. `checksum` is
    that of the chunk's record.
    """

    block_id: BlockId
    chunk_offset: int
    first: int
    count: int
    offset: int
    length: int
    source: PeerId
    checksum: int

    @property
    def windows(self) -> range:
        """The indices of the windows."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class ReplicaPlan:
    """All that a repair of one replica would change, and what it was made from.

    `own_records` are the fingerprints of our records of the planned blocks; None if we
    have none. `unread` are the peers whose trees are not known, by the code of the
    error: the plan knows nothing of their replicas. `left` is what would not be healed.
    """

    container_id: ContainerId
    datanode: PeerId
    made_at: str
    generation: bytes
    root: int
    state: ReplicaState
    peers: Mapping[PeerId, int]
    unread: Mapping[PeerId, str]
    verdict: Verdict | None
    own_records: Mapping[BlockId, str | None] = field(default_factory=dict)
    writes: tuple[PlannedWrite, ...] = ()
    records: Mapping[BlockId, BlockRecord] = field(default_factory=dict)
    tombstones: tuple[BlockId, ...] = ()
    bcs_id: int | None = None
    returns_to_service: bool = False
    left: tuple[Evidence, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        has_writes = bool(self.writes or self.records or self.tombstones)
        return not (has_writes or self.bcs_id is not None or self.returns_to_service)

    @cached_property
    def document(self) -> bytes:
        """The plan in its one JSON form."""
        return canonical_json(
            {
                "format": FORMAT,
                "container": self.container_id,
                "datanode": self.datanode,
                "madeAt": self.made_at,
                "generation": self.generation.hex(),
                "root": root_hex(self.root),
                "state": self.state.value,
                "peers": {peer: root_hex(root) for peer, root in self.peers.items()},
                "unread": dict(self.unread),
                "verdict": self.verdict.value if self.verdict else None,
                "bytes": sum(write.length for write in self.writes),
                "writes": [_write_json(write) for write in self.writes],
                "records": [
                    {
                        "block": exact(block_id),
                        "before": self.own_records.get(block_id),
                        "after": record_fingerprint(record),
                        "bcsID": record.bcs_id,
                    }
                    for block_id, record in sorted(self.records.items())
                ],
                "recordsRead": {
                    str(block_id): print_ for block_id, print_ in sorted(self.own_records.items())
                },
                "tombstones": [exact(block_id) for block_id in self.tombstones],
                "bcsID": self.bcs_id,
                "returnsToService": self.returns_to_service,
                "left": [
                    {
                        "kind": str(fact.kind),
                        "block": exact(fact.block_id),
                        "offset": fact.offset,
                        "detail": fact.detail,
                    }
                    for fact in self.left
                ],
            }
        )

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the document: the plan's name."""
        return plan_digest(self.document)

    @cached_property
    def by_chunk(self) -> Mapping[tuple[BlockId, int], tuple[PlannedWrite, ...]]:
        """The writes of each chunk, by block and offset."""
        found: dict[tuple[BlockId, int], tuple[PlannedWrite, ...]] = {}
        for write in self.writes:
            place = write.block_id, write.chunk_offset
            found[place] = (*found.get(place, ()), write)
        return found

    def options(self, fetches_max: int, return_to: ReplicaState | None) -> ReconcileOptions:
        """The options of the repair that carries the plan out: one round of it. If the
        plan has a return to service, the controller says to which state.
        """
        state = return_to if self.returns_to_service else None
        return ReconcileOptions(fetches_max=fetches_max, rounds_max=1, return_to=state)

    @property
    def rules(self) -> RepairRules:
        """The rules of that repair."""
        return RepairRules(
            block_repairer=partial(_PlannedBlockRepairer, self), tombstones_to_adopt=self._adopted
        )

    def _adopted(self, found: RepairPlan) -> tuple[BlockTree, ...]:
        return tuple(one for one in found.tombstones if one.block_id in self.tombstones)


def canonical_json(document: object) -> bytes:
    """The one form of a JSON document: keys sorted, no blanks, ASCII."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def plan_digest(document: bytes) -> str:
    """The name of the plan with this document."""
    return sha256(document).hexdigest()


def record_fingerprint(record: BlockRecord | None) -> str | None:
    """What tells two records of a block apart; None without a record."""
    return None if record is None else fingerprint(record_to_bytes(record)).hex()


class PlanShelf:
    """The plans that an agent has made, by digest. Not thread-safe."""

    def __init__(self, started_s: float, *, plans_max: int = 64, bytes_max: int = 64 << 20) -> None:
        """The oldest plans go when there are more than `plans_max`, or when their
        documents have more than `bytes_max` bytes. `started_s` is when the agent
        started, in seconds since the epoch.
        """
        started = datetime.fromtimestamp(started_s, UTC)
        self._started = f"{started:%Y-%m-%d %H:%M} UTC"
        self._dropped: dict[str, None] = {}
        self._plans: dict[str, ReplicaPlan] = {}
        self._plans_max = plans_max
        self._bytes_max = bytes_max

    def add(self, plan: ReplicaPlan) -> None:
        """Keep a plan; it takes the place of the oldest ones."""
        self._plans[plan.digest] = plan
        while len(self._plans) > 1 and (
            len(self._plans) > self._plans_max
            or sum(len(one.document) for one in self._plans.values()) > self._bytes_max
        ):
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            self._dropped[oldest] = None
            if len(self._dropped) > _DROPPED_MAX:
                del self._dropped[next(iter(self._dropped))]

    def get(self, digest: str) -> ReplicaPlan:
        """The plan of this digest.

        Raises:
            PlanUnknownError: it is not there.
        """
        found = self._plans.get(digest)
        if found is None:
            text = f"this agent no longer has plan {digest[:12]}: it made too many others since"
            if digest not in self._dropped:
                text = (
                    f"this agent knows no plan {digest[:12]}: it keeps only those since its start"
                    f" on {self._started}, and a restart loses the earlier ones. Nothing was"
                    " written"
                )
            raise PlanUnknownError(text, hint=_REFUSED_HINT)
        return found


class _PlannedBlockRepairer(BlockRepairer):
    """Repairs a block by a plan: each window from its source, and no other window."""

    def __init__(
        self,
        plan: ReplicaPlan,
        repair: BlockRepair,
        own: BlockRecord | None,
        records: Mapping[PeerId, BlockRecord],
        entries: Mapping[PeerId, Mapping[int, ChunkTree]],
        sources: Sources,
        *,
        committed: int,
        chunks_max: int,
    ) -> None:
        """All but `plan` are those of BlockRepairer."""
        super().__init__(
            repair, own, records, entries, sources, committed=committed, chunks_max=chunks_max
        )
        self._plan = plan

    def put(self, container_id: ContainerId) -> tuple[PutBlock | None, int]:
        """As in BlockRepairer. A record that has the planned chunks is the planned one:
        another replica of the job may have got other metadata since.
        """
        request, adopted = super().put(container_id)
        planned = self._plan.records.get(self.block_id)
        if request is not None and planned and planned.chunks == request.record.chunks:
            request = PutBlock(planned)
        return request, min(adopted, self._plan.bcs_id or 0)

    def _fetch_next(self, chunk: ChunkRepairer) -> None:
        assert chunk.wanted is not None
        for write in self._plan.by_chunk.get((self.block_id, chunk.offset), ()):
            peer = write.source
            windows = chunk.wanted.intersection(self._windows_from(chunk, peer))
            if windows and peer in chunk.sources and self._sources.is_usable(peer):
                chunk.sources.remove(peer)
                chunk.unread -= {peer}
                chunk.fetching = True
                wanted = tuple(sorted(windows))
                self.out.append(FetchWindows(peer, self.block_id, chunk.record, wanted))
                return
        chunk.sources = []

    def _windows_from(self, chunk: ChunkRepairer, peer: PeerId) -> set[int]:
        writes = self._plan.by_chunk.get((self.block_id, chunk.offset), ())
        return {index for write in writes if write.source == peer for index in write.windows}


class PlannedReplica:
    """Our replica under a repair by a plan (repair.ports.ReplicaAccess): it refuses all
    that the plan does not have.
    """

    def __init__(self, plan: ReplicaPlan, replica: ReplicaAccess) -> None:
        """Check that the replica is what the plan was made from.

        Raises:
            PlanChangedError: it is not.
        """
        self._plan = plan
        self._replica = replica
        self._is_checked = False
        self.own()
        self._is_checked = False

    def own(self) -> OwnLoaded:
        """See ReplicaReader.own; first compared with the plan."""
        found = self._replica.own()
        if not self._is_checked:
            root = found.tree.data_checksum if found.tree else None
            for name, now, then in (
                ("root", _root_text(root), _root_text(self._plan.root)),
                ("state", found.state.value, self._plan.state.value),
                ("generation", found.generation.hex(), self._plan.generation.hex()),
            ):
                if now != then:
                    self._refuse(f"its {name} was {then} and is {now}")
            self._is_checked = True
        return found

    def records(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        """See ReplicaReader.records; compared with the plan."""
        found = self._replica.records(block_ids)
        for block_id in block_ids:
            now = record_fingerprint(found.get(block_id))
            if block_id in self._plan.own_records and self._plan.own_records[block_id] != now:
                self._refuse(f"the record of block {block_id} has changed")
        return found

    def check(self, block_id: BlockId, chunk: ChunkRecord) -> tuple[tuple[int, ...], int]:
        """See ReplicaReader.check."""
        return self._replica.check(block_id, chunk)

    def scan(self) -> Scanned:
        """See ReplicaReader.scan; not of a replica that was refused."""
        if not self._is_checked:
            self._refuse("it changed when the repair began")
        return self._replica.scan()

    def write_windows(
        self, block_id: BlockId, chunk: ChunkRecord, runs: Sequence[ProvenWindows]
    ) -> tuple[int, ...]:
        """See ReplicaWriter.write_windows; only windows of the plan."""
        writes = self._plan.by_chunk.get((block_id, chunk.offset), ())
        planned = {
            index
            for write in writes
            if write.checksum == chunk.data_checksum
            for index in write.windows
        }
        for run in runs:
            if not planned.issuperset(run.windows):
                self._refuse(f"windows at {chunk.offset} of block {block_id} are not in the plan")
        return self._replica.write_windows(block_id, chunk, runs)

    def put_block(self, record: BlockRecord) -> None:
        """See ReplicaWriter.put_block; only records of the plan."""
        if self._plan.records.get(record.block_id) != record:
            self._refuse(f"the record of block {record.block_id} is not that of the plan")
        self._replica.put_block(record)

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        """See ReplicaWriter.store_tree."""
        return self._replica.store_tree(tree, generation)

    def advance_bcs_id(self, bcs_id: int) -> None:
        """See ReplicaWriter.advance_bcs_id; not above the commit of the plan."""
        if bcs_id > (self._plan.bcs_id or 0):
            self._refuse(f"the commit {bcs_id} is above that of the plan")
        self._replica.advance_bcs_id(bcs_id)

    def set_state(self, state: ReplicaState, generation: bytes) -> None:
        """See ReplicaWriter.set_state; only if the plan has a return to service."""
        if not self._plan.returns_to_service:
            self._refuse(f"a return to {state.value} is not in the plan")
        self._replica.set_state(state, generation)

    def _refuse(self, why: str) -> None:
        container_id = self._plan.container_id
        raise PlanChangedError(
            f"plan {self._plan.digest[:12]} of container {container_id}: {why}",
            hint=_REFUSED_HINT,
            container_id=container_id,
        )


def _write_json(write: PlannedWrite) -> dict[str, object]:
    return {
        "block": exact(write.block_id),
        "chunk": write.chunk_offset,
        "window": write.first,
        "windows": write.count,
        "offset": write.offset,
        "length": write.length,
        "source": write.source,
        "checksum": root_hex(write.checksum),
    }


def _root_text(root: int | None) -> str:
    return "unknown" if root is None else root_hex(root)
