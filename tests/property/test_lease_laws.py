"""The laws of leases and assignments, whatever the clocks say."""

from hypothesis import given
from hypothesis import strategies as st

from replicator.master.assignment import AssignmentMode, AssignmentRules, Strategy, tick
from replicator.master.leases import RecordAges, has_ended, is_valid
from replicator.master.records import (
    AssignmentRound,
    Holder,
    PolicyRecord,
    Record,
    RecordKey,
    RecordKind,
    ReplicationState,
    StoredRecord,
    StoredState,
    SyncerCapacity,
    SyncerLease,
    SyncerRecord,
)
from replicator.master.syncer_rules import goes_back
from replicator.replication import Checkpoint, PolicyId, Stage, SyncerId
from replicator.stores.port import FeedPosition
from tests.support.master_records import LEASE_MS, policy, state_of

NOW_MS = 1_700_000_000_000
TIMES = st.integers(NOW_MS - 2 * LEASE_MS, NOW_MS + 2 * LEASE_MS)
AGES = st.integers(0, 3 * LEASE_MS)
CHECKPOINTS = st.builds(
    Checkpoint,
    st.sampled_from(Stage),
    position=st.none() | st.builds(FeedPosition, st.sampled_from("ab"), st.integers(0, 5)),
)


@given(TIMES, TIMES, AGES)
def test_a_lease_has_not_ended_before_it_was_seen_unchanged_for_as_long_as_it_lasts(
    renewed_ms: int, now_ms: int, age_ms: int
) -> None:
    """OZ-048: whatever the database's clock says."""
    lease = SyncerLease(renewed_ms, renewed_ms + LEASE_MS)
    if age_ms < LEASE_MS:
        assert not has_ended(lease, now_ms, age_ms)
    # Once it has ended by both, nothing but a renewal brings it back.
    if has_ended(lease, now_ms, age_ms) and is_valid(lease, now_ms):
        assert now_ms < renewed_ms


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.floats(0, 5)), max_size=20))
def test_ages_are_never_longer_than_a_version_was_there(
    reads: list[tuple[str, int, float]],
) -> None:
    ages, now_s = RecordAges(), 0.0
    since: dict[RecordKey, tuple[int, float]] = {}
    for name, version, pause_s in reads:
        key = RecordKey(RecordKind.SYNCER, name)
        began_s = now_s
        now_s += pause_s
        record = ReplicationState(PolicyId(name), 0)
        found = ages.note(StoredState(0, {key: StoredRecord(version, record)}), began_s, now_s)
        if since.get(key, (None,))[0] != version:
            since = {key: (version, now_s)}
        assert found[key] <= max((began_s - since[key][1]) * 1000, 0)


@given(CHECKPOINTS, CHECKPOINTS, CHECKPOINTS)
def test_going_back_is_an_order_within_one_log(
    first: Checkpoint, second: Checkpoint, third: Checkpoint
) -> None:
    """OZ-135. A round after a gap has no position, and never goes back."""
    if first.position is not None and second.position is None:
        assert goes_back(first, second) is (second.stage is Stage.LIVE)
    logs = {one.position.log if one.position else "" for one in (first, second, third)}
    if len(logs) < 2 and not goes_back(first, second) and not goes_back(second, third):
        assert not goes_back(first, third)


@st.composite
def states(draw: st.DrawFn) -> StoredState:
    """Some policies, syncers with and without valid leases, and who has what."""
    records: list[Record] = []
    names = draw(st.lists(st.sampled_from("abcd"), unique=True))
    for name in names:
        renewed_ms = draw(TIMES)
        room = SyncerCapacity(draw(st.integers(0, 3)), draw(st.none() | st.integers(0, 9)))
        lease = SyncerLease(renewed_ms, renewed_ms + LEASE_MS)
        records.append(SyncerRecord(SyncerId(name), "s", "", "h", 1, room, lease))
    for number in range(draw(st.integers(0, 5))):
        policy_id = PolicyId(f"p{number}")
        holder = draw(st.none() | st.sampled_from(names or ["gone"]))
        held = Holder(SyncerId(holder), draw(st.sampled_from(["s", "old"])), "h", 1)
        epoch = draw(st.integers(0, 3))
        records.append(PolicyRecord(policy(policy_id), NOW_MS, NOW_MS))
        records.append(ReplicationState(policy_id, 1, epoch, held if holder else None))
    return state_of(records, NOW_MS)


RULES = st.builds(
    AssignmentRules,
    st.sampled_from(AssignmentMode),
    st.sampled_from(Strategy),
    st.integers(0, 3),
)


@given(states(), RULES, st.data())
def test_a_tick_takes_from_the_dead_only_and_overdraws_nothing(
    state: StoredState, rules: AssignmentRules, data: st.DataObject
) -> None:
    # A round that is beyond every epoch, as it always is.
    ages = {one.key: data.draw(AGES) for one in (*state.syncers, *state.states)}
    numbered = _numbered(state)
    done = tick(numbered, ages, rules)
    after = {one.policy_id: one for one in numbered.states}
    after |= {one.policy_id: one for one in done.records if isinstance(one, ReplicationState)}
    syncers = {one.syncer_id: one for one in numbered.syncers}
    for policy_id, syncer_id in done.answer.taken_over:
        known = syncers.get(syncer_id)
        holder = next(one.holder for one in numbered.states if one.policy_id == policy_id)
        assert holder is not None
        if known is not None and known.session == holder.session:
            assert has_ended(known.lease, NOW_MS, ages[known.key])
    for policy_id, syncer_id, epoch in done.answer.assigned:
        before = next(one for one in numbered.states if one.policy_id == policy_id)
        assert epoch > before.epoch
        assert is_valid(syncers[syncer_id].lease, NOW_MS)
        has = sum(one.holder is not None and one.holder.syncer_id == syncer_id
                  for one in after.values())  # fmt: skip
        assert has <= syncers[syncer_id].capacity.replications_max
    taken = sum(not one.is_free for one in after.values())
    if rules.tokens and done.answer.assigned:
        assert taken <= rules.tokens
    # It stands only while what it changes has not changed.
    assert set(done.expected(numbered)) >= {one.key for one in done.records}


def _numbered(state: StoredState) -> StoredState:
    records = [stored.record for stored in state.records.values()]
    return state_of([*records, AssignmentRound(10)], state.now_ms)
