"""The rescue of one container, once its staged replica is ready: a state machine
without I/O.

A rescue joins the cluster as a datanode that holds the staged replica, orders a
reconcile, waits until each real replica holds what is staged, and leaves. `start()` and
`step(event, now_s)` return one request; live.rescue_runner executes it and returns its
event. Rules:

- Whatever fails after the registration, the rescue still reports that it holds nothing,
  and waits until SCM no longer lists its replica.
- Reconcile is ordered only while SCM lists our replica, at most ATTEMPTS_MAX times. An
  order that failed, as while SCMs elect a leader, counts: it may have been accepted.
- A real replica is healed if its root is the staged one, or else if its tree holds each
  staged chunk healthy. So a rescue of a part is complete although roots still differ.
- A tree is read only if SCM reports another root than when it was read last, and once
  more of each healed replica: SCM's word of a root is not what is on disk.
- A tree's word of a chunk is not what is on disk either: all staged chunks of a healed
  replica are read back and proven, with heartbeats between.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, assert_never

from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.survey import ChunkPlace
from merkle.tree import ContainerTree

# How long the datanodes have after each order, until the next one. They get an order
# with their next heartbeat, of every second to half a minute, and Ozone needs a second
# round where a repair shows further damage. The first wait is shorter: for seconds
# after a rescue was killed, a datanode drops orders while it ends the last one, and
# connects to nobody at our port. One that still has the earlier order drops another.
_ATTEMPT_S = (10.0, 35.0, 60.0, 60.0)
ATTEMPTS_MAX = len(_ATTEMPT_S)
# SCM lists a reported replica, or forgets it, within 1.5 s.
_REPORT_S = 30.0
# Far below the 9 s after which SCM calls a datanode stale at the shortest.
_BEAT_S = 1.0
# Until SCM lists our replica: an order that is late misses the datanodes' heartbeats.
_LOOK_S = 0.2
# Failed requests one after the other before the rescue gives up and leaves.
_FAILURES_MAX = 10


@dataclass(frozen=True, slots=True)
class Register:
    """Register at SCM, and report the staged replica -> Succeeded."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a heartbeat; register again if SCM does not know us -> Succeeded."""


@dataclass(frozen=True, slots=True)
class OrderReconcile:
    """Order SCM to reconcile the container -> Succeeded."""


@dataclass(frozen=True, slots=True)
class ReportNothing:
    """Report that we hold no replica any more -> Succeeded."""


@dataclass(frozen=True, slots=True)
class ListReplicas:
    """Ask SCM for the container's replicas -> ReplicasListed."""


@dataclass(frozen=True, slots=True)
class ReadTree:
    """Read the tree of a real replica -> TreeRead."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """Read a staged chunk of a real replica -> ChunkRead."""

    peer: PeerId
    place: ChunkPlace


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait this long -> Succeeded."""

    seconds: float


Request: TypeAlias = (
    Register | Beat | OrderReconcile | ReportNothing | ListReplicas | ReadTree | ReadChunk | Wait
)


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The request was carried out."""


@dataclass(frozen=True, slots=True)
class ReplicasListed:
    """The container's replicas as SCM knows them, ours too."""

    replicas: Sequence[ContainerReplica]


@dataclass(frozen=True, slots=True)
class TreeRead:
    """The tree of a real replica, checked."""

    tree: ContainerTree


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk was read: whether its bytes match the record, and how many there were."""

    is_proven: bool
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; `message` says why. `is_final` is whether the same request
    would fail again.
    """

    message: str
    is_final: bool = False


Event: TypeAlias = Succeeded | ReplicasListed | TreeRead | ChunkRead | Failed


class RescuePhase(Enum):
    """Where a rescue is; the values are shown as progress."""

    JOINING = "joining the cluster"
    ANNOUNCING = "waiting until SCM lists the staged replica"
    ORDERING = "ordering a reconcile"
    WATCHING = "waiting for the datanodes"
    LEAVING = "leaving the cluster"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class RescueOutcome:
    """How a rescue ended. `unhealed` are real replicas that lack something staged,
    `unhealthy` those that Ozone leaves UNHEALTHY. `has_left` is whether SCM no longer
    lists our replica. `reason` says why not all are healed. `bytes_read_back` were read
    of the healed replicas. `untold` are SCMs that were not reached when we left: if one
    becomes the leader, it may list our replica.
    """

    healed: tuple[PeerId, ...]
    unhealed: tuple[PeerId, ...]
    unhealthy: tuple[PeerId, ...]
    has_left: bool
    attempts: int
    reason: str = ""
    bytes_read_back: int = 0
    untold: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every real replica holds what was staged, and we have left."""
        return bool(self.healed) and not self.unhealed and self.has_left


def _holds_staged(
    tree: ContainerTree, staged: ContainerTree, places: Collection[ChunkPlace]
) -> bool:
    """Whether a tree has all staged chunks, healthy and with the staged checksum."""
    for block_id, offset in places:
        ours, theirs = staged.block(block_id), tree.block(block_id)
        if ours is None or theirs is None:
            return False
        wanted = next((chunk for chunk in ours.chunks if chunk.offset == offset), None)
        if wanted is None or wanted not in theirs.chunks:
            return False
    return True


@dataclass(slots=True)
class _Watched:
    """What is known of one real replica."""

    root: int | None = None
    state: ReplicaState = ReplicaState.UNHEALTHY
    is_healed: bool = False
    # Its tree was read, and holds what is staged.
    is_read_back: bool = False
    # Staged chunks that are to be read and proven yet.
    unproven: list[ChunkPlace] = field(default_factory=list)
    # Bytes that were read back do not match: nothing but another reconcile helps.
    is_refuted: bool = False

    @property
    def is_proven(self) -> bool:
        """Whether tree and bytes were read back, and hold what is staged."""
        return self.is_read_back and not self.unproven


@dataclass(slots=True)
class Rescue:
    """The machine; the module's docstring has the contract."""

    own: PeerId
    staged: ContainerTree
    places: frozenset[ChunkPlace]
    peers: Collection[PeerId]
    phase: RescuePhase = RescuePhase.JOINING
    outcome: RescueOutcome | None = None
    _watched: dict[PeerId, _Watched] = field(default_factory=dict)
    _unread: list[PeerId] = field(default_factory=list)
    _request: Request | None = None
    _entered_s: float = 0.0
    _attempts: int = 0
    _failures: int = 0
    _reason: str = ""
    _bytes_read_back: int = 0
    _last_beat_s: float = 0.0

    def start(self, now_s: float) -> Request:
        """The first request; `now_s` is of a monotonic clock."""
        assert self.places
        assert self.own not in self.peers
        self._watched = {peer: _Watched() for peer in self.peers}
        self._entered_s = now_s
        return self._ask(Register())

    def step(self, event: Event, now_s: float) -> Request | None:
        """Handle the event of the last request; the next request, None after the
        end.
        """
        assert self._request is not None
        if isinstance(self._request, Beat):
            self._last_beat_s = now_s
        match event:
            case Failed(message, is_final):
                return self._failed(message, now_s, is_final=is_final)
            case ReplicasListed(replicas):
                self._failures = 0
                return self._listed(replicas, now_s)
            case TreeRead(tree):
                assert isinstance(self._request, ReadTree)
                watched = self._watched[self._request.peer]
                watched.is_healed = _holds_staged(tree, self.staged, self.places)
                watched.is_read_back = watched.is_healed
                watched.unproven = sorted(self.places)
                return self._watch(now_s)
            case ChunkRead():
                self._chunk_read(event)
                return self._watch(now_s)
            case Succeeded():
                return self._succeeded(now_s)
            case _:
                assert_never(event)

    def leave(self, reason: str, now_s: float) -> Request:
        """Give up, whatever is open, and leave the cluster."""
        self._reason = self._reason or reason
        self._enter(RescuePhase.LEAVING, now_s)
        return self._ask(ReportNothing())

    def _chunk_read(self, event: ChunkRead) -> None:
        assert isinstance(self._request, ReadChunk)
        watched = self._watched[self._request.peer]
        self._bytes_read_back += event.length_bytes
        if event.is_proven:
            watched.unproven.remove(self._request.place)
        else:
            watched.is_refuted, watched.is_healed, watched.is_read_back = True, False, False

    def _succeeded(self, now_s: float) -> Request:
        match self._request:
            case Register():
                self._enter(RescuePhase.ANNOUNCING, now_s)
                return self._ask(ListReplicas())
            case OrderReconcile():
                self._enter(RescuePhase.WATCHING, now_s)
                return self._ask(Wait(_BEAT_S))
            case ReportNothing():
                return self._ask(ListReplicas())
            case Wait():
                # Once we left, a heartbeat would keep a node alive that holds nothing.
                is_leaving = self.phase is RescuePhase.LEAVING
                return self._ask(ReportNothing() if is_leaving else Beat())
            case _:
                return self._ask(ListReplicas())

    def _listed(self, replicas: Sequence[ContainerReplica], now_s: float) -> Request | None:
        is_listed = any(one.peer == self.own for one in replicas)
        known = {one.peer: one for one in replicas if one.peer != self.own}
        for peer, watched in self._watched.items():
            if peer in known:
                watched.state = known[peer].state
            # What is healed by the time we leave was read back.
            if self.phase is not RescuePhase.LEAVING:
                self._note(peer, watched, known.get(peer))
        match self.phase:
            case RescuePhase.ANNOUNCING if is_listed:
                # Their roots before the order are no news.
                self._unread.clear()
                return self._order(now_s)
            case RescuePhase.ORDERING if is_listed:
                return self._order(now_s)
            case RescuePhase.ANNOUNCING | RescuePhase.ORDERING if self._is_late(_REPORT_S, now_s):
                return self.leave("SCM does not list the staged replica", now_s)
            case RescuePhase.LEAVING if not is_listed or self._is_late(_REPORT_S, now_s):
                self._finish(has_left=not is_listed)
                return None
            case RescuePhase.WATCHING:
                return self._watch(now_s)
            case RescuePhase.ANNOUNCING:
                return self._ask(Wait(_LOOK_S))
            case _:
                return self._ask(Wait(_BEAT_S))

    def _note(self, peer: PeerId, watched: _Watched, replica: ContainerReplica | None) -> None:
        root = replica.data_checksum if replica else None
        if root != watched.root:
            watched.is_read_back = False
        if replica is None or watched.is_refuted:
            watched.is_healed = False
        elif root == self.staged.data_checksum:
            watched.is_healed = True
        elif root != watched.root and peer not in self._unread:
            self._unread.append(peer)
        watched.root = root

    def _watch(self, now_s: float, *, has_failed: bool = False) -> Request:
        """Read the next changed tree; then go on, order again, or leave."""
        while self._unread:
            peer = self._unread.pop(0)
            if not self._watched[peer].is_healed:
                return self._ask(ReadTree(peer))
        for peer, watched in self._watched.items():
            if watched.is_healed and not watched.is_proven and not has_failed:
                if not watched.is_read_back:
                    return self._ask(ReadTree(peer))
                # Many chunks take longer than SCM waits for a heartbeat.
                if now_s - self._last_beat_s >= _BEAT_S:
                    return self._ask(Beat())
                return self._ask(ReadChunk(peer, watched.unproven[0]))
        if all(watched.is_proven for watched in self._watched.values()):
            return self.leave("", now_s)
        if self._is_late(_ATTEMPT_S[self._attempts - 1], now_s):
            if self._attempts >= ATTEMPTS_MAX:
                return self.leave(f"not healed after {self._attempts} reconciles", now_s)
            return self._order(now_s)
        return self._ask(Wait(_BEAT_S))

    def _order(self, now_s: float) -> Request:
        self._attempts += 1
        for watched in self._watched.values():
            watched.is_refuted = False
        self._enter(RescuePhase.ORDERING, now_s)
        return self._ask(OrderReconcile())

    def _failed(self, message: str, now_s: float, *, is_final: bool) -> Request | None:
        self._failures += 1
        if self.phase is RescuePhase.LEAVING:
            if self._failures > _FAILURES_MAX:
                self._reason = self._reason or message
                self._finish(has_left=False)
                return None
            return self._ask(Wait(_BEAT_S))
        if isinstance(self._request, ReadTree | ReadChunk):
            # Read again after the next heartbeat.
            return self._watch(now_s, has_failed=True)
        is_order = isinstance(self._request, OrderReconcile)
        if is_order and not is_final and self._attempts < ATTEMPTS_MAX:
            # The next leader may not list us yet.
            self._entered_s = now_s
            return self._ask(Wait(_BEAT_S))
        if isinstance(self._request, Register | OrderReconcile) or is_final:
            # A registration that was not answered may have been believed all the same.
            self._failures = 0
            return self.leave(message, now_s)
        if self._failures > _FAILURES_MAX:
            self._failures = 0
            return self.leave(message, now_s)
        return self._ask(Wait(_BEAT_S))

    def _finish(self, *, has_left: bool) -> None:
        self.phase = RescuePhase.DONE
        watched = sorted(self._watched.items())
        self.outcome = RescueOutcome(
            tuple(peer for peer, one in watched if one.is_proven),
            tuple(peer for peer, one in watched if not one.is_proven),
            tuple(peer for peer, one in watched if one.state is ReplicaState.UNHEALTHY),
            has_left,
            self._attempts,
            self._reason,
            self._bytes_read_back,
        )

    def _enter(self, phase: RescuePhase, now_s: float) -> None:
        if self.phase is not phase:
            self.phase, self._entered_s = phase, now_s

    def _is_late(self, limit_s: float, now_s: float) -> bool:
        return now_s - self._entered_s >= limit_s

    def _ask(self, request: Request) -> Request:
        self._request = request
        return request
