"""Which syncer gets which replication, and when one is taken from a dead syncer.

`push`: the master gives each waiting replication to the syncer that suits best by a
strategy. `pull`: a syncer that has room gets what waits longest, with its heartbeat.
Either way a replication takes a token from the pool; without one left it waits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from replicator.master.leases import has_ended, is_valid
from replicator.master.records import (
    PolicyRecord,
    Record,
    RecordKey,
    RecordKind,
    ReplicationState,
    StoredState,
    SyncerRecord,
    can_go,
    wanted,
)
from replicator.master.transition import Transition, given_to, given_up
from replicator.replication import DesiredState, PolicyId, SyncerId

# A syncer that has been silent for so long is forgotten; until then `bucket list` and
# `status` can say that it is gone.
_FORGOTTEN_AFTER_MS = 86_400_000


class AssignmentMode(Enum):
    """Who begins an assignment (OZ-147)."""

    PUSH = "push"
    PULL = "pull"


class Strategy(Enum):
    """Which of several syncers gets a replication (OZ-046)."""

    FEWEST_ACTIVE = "fewest_active"
    FREE_BANDWIDTH = "free_bandwidth"
    FREE_DISK = "free_disk"


@dataclass(frozen=True, slots=True)
class AssignmentRules:
    """How replications are assigned. `tokens` is how many may be assigned at once over
    all syncers; 0 is no limit.
    """

    mode: AssignmentMode = AssignmentMode.PUSH
    strategy: Strategy = Strategy.FEWEST_ACTIVE
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class TickReport:
    """What a tick changed, for the log."""

    taken_over: tuple[tuple[PolicyId, SyncerId], ...] = ()
    assigned: tuple[tuple[PolicyId, SyncerId, int], ...] = ()
    removed: tuple[PolicyId, ...] = ()


def tick(
    state: StoredState, unchanged_ms: Mapping[RecordKey, int], rules: AssignmentRules
) -> Transition[TickReport]:
    """What is due now: take replications from syncers whose leases have surely ended,
    remove deleted policies that ended, forget syncers, assign what waits.

    `unchanged_ms` is by RecordAges.
    """
    changed: dict[PolicyId, ReplicationState] = {}
    depends_on = set[RecordKey]()
    taken_over = []
    for one in state.states:
        freed = _freed(state, one, unchanged_ms)
        if freed is None:
            continue
        changed[one.policy_id] = freed
        last = one.holder or (one.leaving.holder if one.leaving else None)
        assert last is not None
        taken_over.append((one.policy_id, last.syncer_id))
        depends_on.add(RecordKey(RecordKind.SYNCER, last.syncer_id))
    assigned, syncer_keys = (
        _pushed(state, changed, unchanged_ms, rules)
        if rules.mode is AssignmentMode.PUSH
        else ([], set())
    )
    gone = [
        record.policy.policy_id
        for record in state.policies
        if (found := changed.get(record.policy.policy_id, state.state(record.policy.policy_id)))
        and can_go(record, found)
    ]
    removed = [RecordKey(kind, name) for name in gone for kind in _POLICY_KINDS]
    removed += [one.key for one in _forgotten(state, changed, unchanged_ms)]
    records: list[Record] = [one for name, one in changed.items() if name not in gone]
    if assigned:
        records.append(state.next_round)
        depends_on |= syncer_keys | {state.settings.key}
        depends_on |= {RecordKey(RecordKind.POLICY, policy_id) for policy_id, _, _ in assigned}
    return Transition(
        TickReport(tuple(taken_over), tuple(assigned), tuple(gone)),
        tuple(records),
        tuple(removed),
        frozenset(depends_on) - set(removed),
    )


_POLICY_KINDS = (RecordKind.POLICY, RecordKind.STATE)


def pulled(
    state: StoredState, syncer: SyncerRecord, rules: AssignmentRules
) -> list[ReplicationState]:
    """The replications that a syncer gets with its heartbeat, those that waited longest
    first; each in its new state. Nothing unless syncers pull.
    """
    if rules.mode is not AssignmentMode.PULL:
        return []
    has = sum(_holder_of(one) == syncer.syncer_id for one in state.states)
    room = min(syncer.capacity.replications_max - has, _tokens_left(state, rules))
    waiting = list(_waiting(state, {}))[: max(room, 0)]
    epoch = state.next_round.number
    return [given_to(one, syncer, epoch, state.now_ms) for one in waiting]


def _freed(
    state: StoredState, one: ReplicationState, unchanged_ms: Mapping[RecordKey, int]
) -> ReplicationState | None:
    """The state of a replication that nobody can work on any more; None if it is free
    already, or somebody may.
    """
    if one.holder is not None:
        syncer = state.syncer(one.holder.syncer_id)
        # Another session registers only once this one has ended, or by its own word.
        if syncer is None or syncer.session != one.holder.session:
            return given_up(one, state.now_ms)
        age_ms = unchanged_ms.get(syncer.key, 0)
        return (
            given_up(one, state.now_ms) if has_ended(syncer.lease, state.now_ms, age_ms) else None
        )
    if one.leaving is None:
        return None
    lasts_ms = one.leaving.until_ms - one.leaving.taken_ms
    is_over = not one.leaving.taken_ms <= state.now_ms < one.leaving.until_ms
    return (
        given_up(one, state.now_ms)
        if is_over and unchanged_ms.get(one.key, 0) >= lasts_ms
        else None
    )


def _pushed(
    state: StoredState,
    changed: dict[PolicyId, ReplicationState],
    unchanged_ms: Mapping[RecordKey, int],
    rules: AssignmentRules,
) -> tuple[list[tuple[PolicyId, SyncerId, int]], set[RecordKey]]:
    """Give what waits to syncers; adds the new states to `changed`. Returns policy,
    syncer and epoch of each, and the syncers' keys.
    """
    holders = Counter(_holder_of(changed.get(one.policy_id, one)) for one in state.states)
    # Where the clock went back, a lease may look valid for long after its end.
    living = [
        one
        for one in state.syncers
        if is_valid(one.lease, state.now_ms)
        and not has_ended(one.lease, state.now_ms, unchanged_ms.get(one.key, 0))
    ]
    given: Counter[SyncerId] = Counter()
    tokens, epoch = _tokens_left(state, rules), state.next_round.number
    found, keys = list[tuple[PolicyId, SyncerId, int]](), set[RecordKey]()
    for one in _waiting(state, changed):
        room = [
            syncer
            for syncer in living
            if holders[syncer.syncer_id] + given[syncer.syncer_id]
            < syncer.capacity.replications_max
        ]
        if not room or len(found) >= tokens:
            break
        rank = _RANKS[rules.strategy]
        best = min(
            room,
            key=lambda syncer: (
                rank(syncer, given[syncer.syncer_id]),
                holders[syncer.syncer_id] + given[syncer.syncer_id],
                syncer.syncer_id,
            ),
        )
        given[best.syncer_id] += 1
        changed[one.policy_id] = given_to(one, best, epoch, state.now_ms)
        found.append((one.policy_id, best.syncer_id, epoch))
        keys.add(best.key)
    return found, keys


def _by_bandwidth(syncer: SyncerRecord, given: int) -> float:
    return -(syncer.capacity.free_bytes_per_second or 0) / (given + 1)


def _by_disk(syncer: SyncerRecord, given: int) -> float:
    return -(syncer.capacity.free_disk_bytes or 0) / (given + 1)


# Less is better; equal ones are told apart by what they have already. What was given
# since the syncer's last word shares what it had free.
_RANKS: Mapping[Strategy, Callable[[SyncerRecord, int], float]] = {
    Strategy.FEWEST_ACTIVE: lambda _syncer, _given: 0.0,
    Strategy.FREE_BANDWIDTH: _by_bandwidth,
    Strategy.FREE_DISK: _by_disk,
}


def _waiting(
    state: StoredState, changed: Mapping[PolicyId, ReplicationState]
) -> Iterator[ReplicationState]:
    """What has to be given to a syncer, longest waiting first. One that is cancelled is
    too, if there may be snapshots of it to remove; a paused one is not.
    """
    states = [changed.get(one.policy_id, one) for one in state.states]
    for one in sorted(states, key=lambda one: (one.waiting_since_ms, one.policy_id)):
        record = state.policy(one.policy_id)
        if record is not None and one.is_free and _is_wanted(state, record, one):
            yield one


def _is_wanted(state: StoredState, record: PolicyRecord, one: ReplicationState) -> bool:
    if record.failed_over_ms is not None or can_go(record, one):
        return False
    match wanted(record, state.settings):
        case DesiredState.ENABLED:
            return True
        case DesiredState.CANCELLED:
            return state.settings.is_enabled and not one.has_ended
        case DesiredState.PAUSED:
            return False


def _tokens_left(state: StoredState, rules: AssignmentRules) -> int:
    taken = sum(not one.is_free for one in state.states)
    return max(rules.tokens - taken, 0) if rules.tokens else len(state.states)


def _holder_of(state: ReplicationState) -> SyncerId | None:
    return state.holder.syncer_id if state.holder else None


def _forgotten(
    state: StoredState,
    changed: Mapping[PolicyId, ReplicationState],
    unchanged_ms: Mapping[RecordKey, int],
) -> list[SyncerRecord]:
    """Syncers that were silent for long, and have nothing."""
    states = [changed.get(one.policy_id, one) for one in state.states]
    holders = {_holder_of(one) for one in states}
    return [
        one
        for one in state.syncers
        if one.syncer_id not in holders
        and state.now_ms - one.lease.expires_ms > _FORGOTTEN_AFTER_MS
        and has_ended(one.lease, state.now_ms, unchanged_ms.get(one.key, 0))
    ]
