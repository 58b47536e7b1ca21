"""What a replication master decides (OZ-035 to OZ-050, OZ-124 to OZ-151)."""

from dataclasses import replace

import pytest

from replicator.master.assignment import AssignmentMode, AssignmentRules, Strategy
from replicator.master.errors import (
    PolicyNotFoundError,
    PolicyRefusedError,
    SyncerRefusedError,
)
from replicator.master.gauges import Gauges
from replicator.master.metrics import MASTER_METRICS
from replicator.master.orders import POLICIES_MAX
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import SYNCERS_MAX
from replicator.master.views import rpo_ms
from replicator.replication import (
    Condition,
    DesiredState,
    PolicyId,
    ReplicationFault,
    ReplicationOptions,
    Stage,
)
from replicator.syncer.lease import LeaseLostError
from runtime.errors import BusyError, UsageError
from runtime.metrics import Metrics
from tests.support.master_records import (
    ALICE,
    LEASE_MS,
    P1,
    P2,
    OneMaster,
    OneSyncer,
    policy,
    report,
)

LEASE_S = LEASE_MS // 1000


@pytest.fixture
def one() -> OneMaster:
    return OneMaster()


def working(one: OneMaster, name: str = "s1") -> OneSyncer:
    """A syncer that has P1."""
    syncer = OneSyncer(one, name).register()
    one.add()
    one.master.tick()
    syncer.beat()
    assert syncer.epoch() is not None
    return syncer


def test_without_registration_there_is_no_work(one: OneMaster) -> None:
    """OZ-036, OZ-042."""
    one.add()
    syncer = OneSyncer(one)
    with pytest.raises(LeaseLostError):
        syncer.beat()
    one.master.tick()
    assert one.master.replication(P1).condition is Condition.UNASSIGNED


def test_a_new_replication_goes_to_a_syncer_that_has_a_lease(one: OneMaster) -> None:
    """OZ-045: with none it waits, and is given once there is one."""
    one.add()
    one.passes(3)
    assert one.master.replication(P1).condition is Condition.UNASSIGNED
    syncer = OneSyncer(one).register()
    one.master.tick()
    syncer.beat()
    assert syncer.epoch() == one.master.replication(P1).state.epoch


def test_options_are_changed_by_what_the_operator_has_seen(one: OneMaster) -> None:
    """An order that is sent twice changes them once, and none undoes another's."""
    one.add()

    def order(options: ReplicationOptions, revision: int) -> int:
        one.master.set_options(P1, options, ALICE, revision=revision)
        return one.master.replication(P1).record.policy.revision

    slow, proven = (
        ReplicationOptions(bytes_per_second=1),
        ReplicationOptions(verifier="v1:9894"),
    )
    assert [order(slow, 1), order(slow, 1)] == [2, 2]
    with pytest.raises(BusyError, match="changed meanwhile by operator/alice"):
        order(proven, 1)
    assert one.master.replication(P1).record.policy.options == slow
    assert order(proven, 2) == 3
    one.master.set_desired(P1, DesiredState.CANCELLED, ALICE)
    with pytest.raises(PolicyRefusedError):
        order(slow, 4)


def test_heartbeats_keep_a_lease_and_silence_ends_it_at_its_time(one: OneMaster) -> None:
    """OZ-043, OZ-048: not a second earlier."""
    syncer = working(one)
    other = OneSyncer(one, "s2").register()
    one.passes(3 * LEASE_S, beating=(syncer, other))
    assert syncer.epoch() is not None
    one.passes(LEASE_S - 1, beating=(other,))
    assert other.epoch() is None
    one.passes(2, beating=(other,))
    assert other.epoch() is not None


def test_a_syncer_that_comes_back_too_late_is_refused_everything(one: OneMaster) -> None:
    """OZ-049: its late acknowledgements move nothing."""
    syncer = working(one)
    syncer.save(report(5))
    old = syncer.epoch()
    other = OneSyncer(one, "s2").register()
    one.passes(LEASE_S + 1, beating=(other,))
    assert other.epoch() is not None
    with pytest.raises(LeaseLostError):
        syncer.beat()
    with pytest.raises(LeaseLostError):
        syncer.save(report(9), epoch=old)
    syncer.register()
    syncer.beat()
    assert syncer.epoch() is None
    with pytest.raises(LeaseLostError):
        syncer.save(report(9), epoch=old)
    found = one.master.replication(P1).state.report
    assert found == report(5)


def test_a_clock_of_the_database_that_jumps_takes_nothing_over(one: OneMaster) -> None:
    """OZ-048: the holder may still work, whatever that clock says."""
    syncer = working(one)
    other = OneSyncer(one, "s2").register()
    one.jump_ms = 86_400_000
    other.register()
    one.passes(LEASE_S - 1, beating=(other,))
    assert other.epoch() is None
    one.passes(2, beating=(other,))
    assert other.epoch() is not None
    assert other.epoch() != syncer.epoch()


def test_a_clock_that_goes_back_keeps_no_dead_syncer(one: OneMaster) -> None:
    working(one)
    one.jump_ms = -86_400_000
    other = OneSyncer(one, "s2").register()
    one.passes(LEASE_S + 1, beating=(other,))
    assert other.epoch() is not None


def test_a_master_that_starts_waits_a_whole_lease(one: OneMaster) -> None:
    """It cannot know what was answered before it started."""
    working(one)
    other = OneSyncer(one, "s2").register()
    one.now_s += LEASE_S - 1
    other.beat()
    one.master = one.another()
    one.passes(LEASE_S, beating=(other,))
    assert other.epoch() is None
    one.passes(2, beating=(other,))
    assert other.epoch() is not None


def test_a_second_process_of_a_syncer_waits_for_the_first(one: OneMaster) -> None:
    """OZ-035, OZ-037."""
    first = working(one)
    second = OneSyncer(one, session="b")
    with pytest.raises(BusyError):
        second.register()
    one.passes(LEASE_S + 1)
    second.register()
    one.master.tick()
    second.beat()
    assert second.epoch() is not None
    with pytest.raises(LeaseLostError):
        first.beat()


def test_a_replication_in_rounds_has_one_syncer_too(one: OneMaster) -> None:
    """OZ-061: another one gets no work of it, and cannot report for it."""
    first, second = OneSyncer(one, "s1").register(), OneSyncer(one, "s2").register()
    one.add(policy(P1, ReplicationOptions(is_live=False)))
    one.master.tick()
    for syncer in (first, second):
        syncer.beat()
    holder, other = (first, second) if first.epoch() is not None else (second, first)
    epoch = holder.epoch()
    assert epoch is not None
    assert other.epoch() is None
    held = other.held(report(3), epoch=epoch)
    with pytest.raises(LeaseLostError):
        one.master.save_report(other.caller, held)
    holder.save(report(3))
    with pytest.raises(BusyError):
        OneSyncer(one, holder.caller.syncer_id, session="b").register()


def test_a_process_that_registers_again_begins_anew(one: OneMaster) -> None:
    syncer = working(one)
    before = syncer.epoch()
    assert before is not None
    syncer.register()
    syncer.beat()
    after = syncer.epoch()
    assert after is not None
    assert after > before


def test_a_certificate_speaks_for_the_syncer_that_it_registered(one: OneMaster) -> None:
    """OZ-168: another syncer cannot report for it."""
    OneSyncer(one, owner="syncer/one").register()
    thief = OneSyncer(one, owner="syncer/two")
    for call in (thief.register, thief.beat):
        with pytest.raises(SyncerRefusedError):
            call()


def test_what_is_stored_outlives_a_master(one: OneMaster) -> None:
    """OZ-038, OZ-047, OZ-129, OZ-132 to OZ-136."""
    syncer = working(one)
    syncer.beat(syncer.held(report(7, Condition.ERROR, fault=ReplicationFault.TARGET_FULL)))
    one.master = one.another()
    view = one.master.replication(P1)
    assert view.condition is Condition.ERROR
    assert view.state.holder is not None
    assert (view.state.holder.syncer_id, view.state.holder.host) == ("s1", "host-1")
    assert view.state.error is not None
    assert view.state.error.fault is ReplicationFault.TARGET_FULL
    assert view.seen_ms == view.now_ms
    syncer.save(report(8))
    recovered = one.master.replication(P1)
    assert recovered.condition is Condition.ACTIVE
    # What went wrong last stays on record.
    assert recovered.state.error == view.state.error


def test_a_position_never_goes_back(one: OneMaster) -> None:
    """OZ-135: not by its holder either, nor by a late or repeated report."""
    syncer = working(one)
    syncer.save(report(7))
    with pytest.raises(UsageError):
        syncer.save(report(6))
    with pytest.raises(UsageError):
        syncer.save(report(None))
    late = syncer.held(report(8))
    syncer.save(report(9))
    with pytest.raises(LeaseLostError):
        one.master.save_report(syncer.caller, late)
    again = syncer.held(report(10))
    one.master.save_report(syncer.caller, again)
    one.master.save_report(syncer.caller, again)
    found = one.master.replication(P1).state.report
    assert found == report(10)


@pytest.mark.parametrize(
    ("before", "after", "is_taken"),
    [
        (Stage.LIVE, Stage.INCREMENTAL, True),
        (Stage.INITIAL_BATCH, Stage.INITIAL_BATCH, True),
        (Stage.INCREMENTAL, Stage.INCREMENTAL, True),
        (Stage.LIVE, Stage.INITIAL_BATCH, False),
        (Stage.LIVE, Stage.LIVE, False),
    ],
)
def test_after_a_gap_of_the_log_a_position_is_given_up(
    one: OneMaster, before: Stage, after: Stage, *, is_taken: bool
) -> None:
    """OZ-098, OZ-103: only for a round that compares."""
    syncer = working(one)
    begun, gap = (
        replace(report(index), checkpoint=replace(report(index).checkpoint, stage=stage))
        for index, stage in ((7, before), (None, after))
    )
    syncer.save(begun)
    if not is_taken:
        with pytest.raises(UsageError):
            syncer.save(gap)
        return
    syncer.save(gap)
    syncer.save(report(3))
    assert one.master.replication(P1).state.report == report(3)


def test_a_position_of_another_log_is_taken(one: OneMaster) -> None:
    """A restored database is another log: indexes begin anew there."""
    syncer = working(one)
    syncer.save(report(7))
    syncer.save(report(1, log="restored"))
    assert one.master.replication(P1).state.report == report(1, log="restored")


def test_another_syncer_goes_on_from_the_last_checkpoint(one: OneMaster) -> None:
    """OZ-039, OZ-040, OZ-063."""
    syncer = working(one)
    syncer.save(report(7))
    other = OneSyncer(one, "s2").register()
    one.passes(LEASE_S + 1, beating=(other,))
    [assignment] = other.last.assignments
    assert assignment.checkpoint == report(7).checkpoint


def test_a_syncer_that_ends_gives_up_at_once(one: OneMaster) -> None:
    syncer = working(one)
    other = OneSyncer(one, "s2").register()
    one.master.release(syncer.caller, (), ends=True)
    one.master.tick()
    other.beat()
    assert other.epoch() is not None
    with pytest.raises(LeaseLostError):
        syncer.beat()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy.FEWEST_ACTIVE, "s2"),
        (Strategy.FREE_BANDWIDTH, "s3"),
        (Strategy.FREE_DISK, "s1"),
    ],
)
def test_a_strategy_chooses_the_syncer(strategy: Strategy, expected: str) -> None:
    """OZ-046."""
    one = OneMaster(AssignmentRules(strategy=strategy))
    for name, capacity in (
        ("s1", SyncerCapacity(4, 1, 300)),
        ("s3", SyncerCapacity(4, 3, 200)),
        ("s2", SyncerCapacity(4, 2, 100)),
    ):
        OneSyncer(one, name).with_capacity(capacity).register()
        if name != "s2":
            # One for each of the first two; the last one has none yet.
            one.add(policy(PolicyId(f"of-{name}")))
            one.master.tick()
    one.add()
    one.master.tick()
    holder = one.master.replication(P1).state.holder
    assert holder is not None
    assert holder.syncer_id == expected


def test_many_replications_are_spread_over_what_is_free() -> None:
    """Not all to the one that had most a moment ago."""
    one = OneMaster(AssignmentRules(strategy=Strategy.FREE_DISK))
    OneSyncer(one, "s1").with_capacity(SyncerCapacity(9, None, 200)).register()
    OneSyncer(one, "s2").with_capacity(SyncerCapacity(9, None, 100)).register()
    for number in range(6):
        one.add(policy(PolicyId(f"p{number}")))
    one.master.tick()
    held = [state.holder.syncer_id for state in one.store.read().states if state.holder]
    assert (held.count(one.store.read().syncers[0].syncer_id), len(held)) == (4, 6)


def test_with_pull_a_syncer_takes_what_it_has_room_for() -> None:
    """OZ-147."""
    one = OneMaster(AssignmentRules(mode=AssignmentMode.PULL))
    for number in range(3):
        one.add(policy(PolicyId(f"p{number}")))
        one.now_s += 1
    syncer = OneSyncer(one).with_capacity(SyncerCapacity(2)).register()
    one.master.tick()
    assert not [state for state in one.store.read().states if state.holder]
    # Those that have waited longest.
    assert [a.policy.policy_id for a in syncer.beat().assignments] == ["p0", "p1"]


@pytest.mark.parametrize("mode", AssignmentMode)
def test_the_pool_of_tokens_limits_all_syncers(mode: AssignmentMode) -> None:
    one = OneMaster(AssignmentRules(mode=mode, tokens=2))
    for number in range(4):
        one.add(policy(PolicyId(f"p{number}")))
    syncers = [OneSyncer(one, name).register() for name in ("s1", "s2")]
    one.passes(3, beating=syncers)
    assert sum(len(syncer.last.assignments) for syncer in syncers) == 2
    one.master.set_desired(PolicyId("p0"), DesiredState.CANCELLED, ALICE)
    one.passes(1, beating=syncers)
    for syncer in syncers:
        if syncer.epoch(PolicyId("p0")) is not None:
            ended = report(1, Condition.CANCELLED)
            syncer.beat(syncer.held(ended, policy_id=PolicyId("p0")))
    one.passes(2, beating=syncers)
    assert sum(len(syncer.last.assignments) for syncer in syncers) == 2
    assert one.master.replication(PolicyId("p0")).condition is Condition.CANCELLED


def test_pause_and_resume_reach_the_holder_and_nobody_else_gets_it(one: OneMaster) -> None:
    """OZ-130."""
    syncer = working(one)
    one.master.set_desired(P1, DesiredState.PAUSED, ALICE)
    [assignment] = syncer.beat().assignments
    assert assignment.policy.desired is DesiredState.PAUSED
    other = OneSyncer(one, "s2").register()
    one.passes(LEASE_S + 2, beating=(other,))
    # Its holder is gone, and nothing is to be done.
    assert not other.last.assignments
    assert one.master.replication(P1).condition is Condition.PAUSED
    one.master.set_desired(P1, DesiredState.ENABLED, ALICE)
    one.passes(1, beating=(other,))
    other.beat()
    assert other.epoch() is not None


def test_disabled_nothing_runs_and_what_is_wanted_stays(one: OneMaster) -> None:
    """OZ-124."""
    syncer = working(one)
    one.master.set_enabled(ALICE, is_enabled=False)
    one.add(policy(P2))
    one.passes(2, beating=(syncer,))
    [assignment] = syncer.beat().assignments
    assert assignment.policy.desired is DesiredState.PAUSED
    assert one.master.replication(P1).record.policy.desired is DesiredState.ENABLED
    one.master.set_enabled(ALICE, is_enabled=True)
    one.passes(1, beating=(syncer,))
    assert {a.policy.desired for a in syncer.beat().assignments} == {DesiredState.ENABLED}
    assert len(syncer.last.assignments) == 2


def test_the_limit_of_pending_entries_holds_for_every_policy(one: OneMaster) -> None:
    """OZ-144."""
    syncer = OneSyncer(one).register()
    one.add(policy(P1, ReplicationOptions(queue_entries_max=10**9)))
    one.add(policy(P2, ReplicationOptions(queue_entries_max=5)))
    one.master.tick()
    limits = [a.policy.options.queue_entries_max for a in syncer.beat().assignments]
    assert limits == [500_000, 5]


def test_a_pair_of_buckets_has_one_replication(one: OneMaster) -> None:
    """OZ-037, OZ-125."""
    one.add()
    for again in (policy(), policy(P2)):
        same = type(again)(again.policy_id, policy().source, policy().target)
        with pytest.raises(PolicyRefusedError):
            one.master.add_policy(same, ALICE)


def test_an_order_lets_other_keys_cross(one: OneMaster) -> None:
    """OZ-161: the holder hears of it, with a new revision."""
    syncer = working(one)
    one.master.set_prefixes(P1, ("a/", "b/"), ALICE)
    [assignment] = syncer.beat().assignments
    assert assignment.policy.prefixes == ("a/", "b/")
    assert assignment.policy.revision == 2
    assert one.master.replication(P1).record.changed_by == ALICE.who
    with pytest.raises(PolicyRefusedError) as refused:
        one.master.add_policy(replace(policy(), policy_id=P2), ALICE)
    # The way that it names is a command.
    assert "treefold bucket prefixes p1" in refused.value.hint


def test_the_keys_of_a_failover_and_of_its_way_back_stay_the_same(one: OneMaster) -> None:
    """OZ-151: the way forth would delete at the target what never came back."""
    syncer = working(one)
    one.master.fail_over(P1, ALICE)
    syncer.beat()
    with pytest.raises(PolicyRefusedError, match="writers of its own"):
        one.master.set_prefixes(P1, ("a/",), ALICE)
    forth = one.master.replication(P1).record.policy
    back = replace(forth, policy_id=P2, source=forth.target, target=forth.source)
    one.master.add_policy(back, ALICE, P1)
    with pytest.raises(PolicyRefusedError, match="brings back"):
        one.master.set_prefixes(P2, ("a/",), ALICE)
    one.master.set_desired(P2, DesiredState.CANCELLED, ALICE)
    with pytest.raises(PolicyRefusedError, match="cancelled"):
        one.master.set_prefixes(P2, ("a/",), ALICE)


def test_cancelled_is_not_paused(one: OneMaster) -> None:
    """OZ-128: it ends once its syncer says so, and does not go on from there."""
    syncer = working(one)
    one.master.set_desired(P1, DesiredState.CANCELLED, ALICE)
    syncer.beat()
    syncer.save(report(1, Condition.CANCELLED))
    assert one.master.replication(P1).condition is Condition.CANCELLED
    assert not syncer.beat().assignments
    with pytest.raises(PolicyRefusedError):
        one.master.set_desired(P1, DesiredState.ENABLED, ALICE)
    one.passes(2, beating=(syncer,))
    assert not syncer.last.assignments


def test_delete_waits_until_a_syncer_has_removed_its_snapshots(one: OneMaster) -> None:
    """OZ-126, OZ-173: nothing of it is left then."""
    syncer = working(one)
    assert not one.master.delete_policy(P1, ALICE, force=False)
    [assignment] = syncer.beat().assignments
    assert assignment.policy.desired is DesiredState.CANCELLED
    syncer.save(report(1, Condition.CANCELLED))
    one.master.tick()
    with pytest.raises(PolicyNotFoundError):
        one.master.replication(P1)
    assert {key.kind.value for key in one.store.records} == {"syncer", "round"}


def test_a_deleted_replication_of_a_dead_syncer_is_cleaned_up_by_another(one: OneMaster) -> None:
    working(one)
    one.master.delete_policy(P1, ALICE, force=False)
    other = OneSyncer(one, "s2").register()
    one.passes(LEASE_S + 1, beating=(other,))
    other.beat()
    other.save(report(1, Condition.CANCELLED))
    one.master.tick()
    assert not one.store.read().policies


def test_forced_it_goes_once_nobody_can_work_on_it(one: OneMaster) -> None:
    syncer = working(one)
    assert not one.master.delete_policy(P1, ALICE, force=True)
    one.passes(LEASE_S - 1, beating=(syncer,))
    assert not syncer.last.assignments
    assert one.store.read().policies
    one.passes(2, beating=(syncer,))
    assert not one.store.read().policies


def test_one_that_nobody_ever_had_goes_at_once(one: OneMaster) -> None:
    one.add()
    assert one.master.delete_policy(P1, ALICE, force=False)
    assert not one.store.read().policies


def test_an_epoch_never_comes_again_by_the_same_name(one: OneMaster) -> None:
    """A syncer of the replication before must not pass for one of the new one."""
    syncer = working(one)
    before = syncer.epoch()
    assert before is not None
    one.master.delete_policy(P1, ALICE, force=True)
    one.passes(LEASE_S + 1, beating=(syncer,))
    one.add()
    one.master.tick()
    syncer.beat()
    after = syncer.epoch()
    assert after is not None
    assert after > before
    with pytest.raises(LeaseLostError):
        syncer.save(report(99), epoch=before)


def test_a_failover_fences_and_waits_for_who_may_not_know(one: OneMaster) -> None:
    """OZ-148: free only once its syncer has stopped, or its lease has ended."""
    syncer = working(one)
    before = syncer.epoch()
    one.master.fail_over(P1, ALICE)
    view = one.master.replication(P1)
    assert view.state.epoch > (before or 0)
    assert not view.state.is_free
    assert view.condition is Condition.UNKNOWN
    with pytest.raises(LeaseLostError):
        syncer.save(report(3), epoch=before)
    assert not syncer.beat().assignments
    one.master.release(syncer.caller, [(P1, before or 0)], ends=False)
    assert one.master.replication(P1).state.is_free
    one.passes(3, beating=(syncer,))
    assert not syncer.last.assignments
    with pytest.raises(PolicyRefusedError):
        one.master.set_desired(P1, DesiredState.ENABLED, ALICE)


def test_a_failover_does_not_believe_a_clock_that_jumped(one: OneMaster) -> None:
    """The lease looks over by the database's clock; its holder still works."""
    syncer = working(one)
    one.jump_ms = 86_400_000
    one.master.fail_over(P1, ALICE)
    one.passes(LEASE_S - 1)
    assert not one.master.replication(P1).state.is_free
    one.passes(2)
    assert one.master.replication(P1).state.is_free
    del syncer


def test_failback_brings_changes_back_before_the_source_goes_on(one: OneMaster) -> None:
    """OZ-150, OZ-151."""
    syncer = working(one)
    syncer.save(report(5))
    one.master.fail_over(P1, ALICE)
    forth = policy()
    back = type(forth)(PolicyId("back"), forth.target, forth.source)
    one.master.add_policy(back, ALICE, P1)
    one.passes(LEASE_S + 1, beating=(syncer,))
    assert syncer.epoch(PolicyId("back")) is not None
    with pytest.raises(PolicyRefusedError):
        one.master.end_failover(P1, ALICE)
    one.master.fail_over(PolicyId("back"), ALICE)
    one.passes(LEASE_S + 1, beating=(syncer,))
    one.master.end_failover(P1, ALICE)
    one.master.set_desired(PolicyId("back"), DesiredState.CANCELLED, ALICE)
    one.passes(1, beating=(syncer,))
    assert syncer.beat()
    found = {a.policy.policy_id: a for a in syncer.last.assignments}
    assert found[P1].checkpoint == report(5).checkpoint
    # Its snapshots are to be removed.
    assert found[PolicyId("back")].policy.desired is DesiredState.CANCELLED


def test_only_what_failed_over_has_a_way_back(one: OneMaster) -> None:
    one.add()
    forth = policy()
    back = type(forth)(PolicyId("back"), forth.target, forth.source)
    with pytest.raises(PolicyRefusedError):
        one.master.add_policy(back, ALICE, P1)
    with pytest.raises(PolicyRefusedError):
        one.master.end_failover(P1, ALICE)
    one.master.fail_over(P1, ALICE)
    with pytest.raises(PolicyRefusedError):
        one.master.add_policy(policy(P2), ALICE, P1)


def test_silence_is_unknown_with_its_age_and_no_rpo(one: OneMaster) -> None:
    """What a silent syncer said last is not what is so now."""
    syncer = working(one)
    syncer.save(report(5))
    assert one.master.replication(P1).condition is Condition.ACTIVE
    one.now_s += LEASE_S + 60
    view = one.master.replication(P1)
    assert view.condition is Condition.UNKNOWN
    assert "s1 was last heard of 66 s ago" in view.reason
    assert rpo_ms(view) is None


def test_metrics_have_next_index_lag_and_what_waits_while_these_are_known(one: OneMaster) -> None:
    """OZ-170, OZ-004: what nobody knows any more has no value."""
    syncer = working(one)
    metrics = Metrics(MASTER_METRICS)
    gauges = Gauges(metrics)
    now_ms = one.store.read().now_ms
    known = replace(report(7), queued=3, lag_p99_ms=250, oldest_unproven_ms=now_ms - 2_000)
    syncer.save(known)
    gauges.show(one.store.read())
    of_one = {"replication": "p1"}
    assert metrics.value("replication_master_next_index", **of_one) == 8
    assert metrics.value("replication_master_lag_seconds", **of_one) == 0.25
    assert metrics.value("replication_master_pending_entries", **of_one) == 3
    assert metrics.value("replication_master_rpo_seconds", **of_one) == 2
    assert metrics.value("replication_master_replications", condition="ACTIVE") == 1
    one.passes(LEASE_S - 1)
    gauges.show(one.store.read())
    # It grows while nothing is heard.
    assert metrics.value("replication_master_rpo_seconds", **of_one) == 2 + LEASE_S - 1
    one.passes(2)
    gauges.show(one.store.read())
    # Nobody has a queue for it now; what was recorded still holds.
    assert metrics.value("replication_master_next_index", **of_one) == 8
    assert metrics.value("replication_master_rpo_seconds", **of_one) == 2 + LEASE_S + 1
    for name in ("lag_seconds", "pending_entries"):
        assert f"replication_master_{name}{{".encode() not in metrics.page()


def test_what_failed_over_pages_nobody_and_an_rpo_that_is_not_known_is_counted(
    one: OneMaster,
) -> None:
    syncer = working(one)
    metrics = Metrics(MASTER_METRICS)
    gauges = Gauges(metrics)

    def shown(name: str, **labels: str) -> float | None:
        gauges.show(one.store.read())
        return metrics.value(f"replication_master_{name}", **labels)

    syncer.save(report(7))
    assert shown("rpo_unknown") == 1
    syncer.save(replace(report(8), oldest_unproven_ms=one.store.read().now_ms))
    assert shown("rpo_unknown") == 0
    assert shown("rpo_seconds", replication="p1") == 0
    one.master.fail_over(P1, ALICE)
    one.passes(LEASE_S + 1)
    assert one.master.replication(P1).condition is Condition.UNASSIGNED
    assert shown("replications", condition="UNASSIGNED") == 0
    assert shown("rpo_unknown") == 0
    assert b"replication_master_rpo_seconds{" not in metrics.page()


def test_there_is_a_limit_of_policies_and_syncers(one: OneMaster) -> None:
    for number in range(POLICIES_MAX):
        one.add(policy(PolicyId(f"p{number}")))
    with pytest.raises(PolicyRefusedError):
        one.add(policy(PolicyId("more")))
    for number in range(SYNCERS_MAX):
        OneSyncer(one, f"s{number}").register()
    with pytest.raises(BusyError):
        OneSyncer(one, "more").register()


def test_a_syncer_that_was_long_silent_is_forgotten(one: OneMaster) -> None:
    OneSyncer(one).register()
    one.passes(LEASE_S + 1)
    assert one.store.read().syncers
    one.now_s += 2 * 86_400
    one.passes(LEASE_S + 1)
    assert not one.store.read().syncers
