"""A job's life: its state follows from its orders, what ended stays ended, and no
figure flatters.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merkle.outcome import Evidence, PeerOutcome, RepairReport, Verdict
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.job_steps import CANCEL_GRACE_S, RESTARTS_MAX, new_job, roots_covered_by_verdict, step
from scm.jobs import (
    ROUNDS_MAX,
    AgentRestarted,
    CancelRequested,
    Event,
    Job,
    JobId,
    JobState,
    OrderAbandoned,
    OrderAccepted,
    OrderIssued,
    OrderState,
    PauseRequested,
    ProgressReceived,
    ResumeRequested,
    ThrottleRequested,
    TimePassed,
    task_id,
    task_of,
)
from scm.policy import Target

PEERS = (PeerId("dn-1"), PeerId("dn-2"), PeerId("dn-3"))
LIVE = frozenset(PEERS)
DEADLINE_S = 600.0


def fresh(now_s: float = 0.0) -> Job:
    chosen = tuple(Target(peer, tuple(p for p in PEERS if p != peer)) for peer in PEERS)
    return new_job(JobId("j"), ContainerId(1), chosen, now_s=now_s)


def after(job: Job, *events: Event, now_s: float = 0.0) -> Job:
    for event in events:
        job = step(job, event, now_s)
    return job


def told(
    peer: PeerId, state: OrderState = OrderState.RUNNING, **figures: object
) -> ProgressReceived:
    return ProgressReceived(peer, state, RepairReport(**figures))


def done(peer: PeerId, verdict: Verdict = Verdict.MATCH) -> ProgressReceived:
    return told(peer, OrderState.DONE, verdict=verdict)


def issued() -> Job:
    return after(fresh(), *(OrderIssued(peer) for peer in PEERS))


def test_a_new_job_is_queued_and_says_what_it_waits_for() -> None:
    assert fresh().state is JobState.QUEUED
    assert "dn-1" in fresh().detail


def test_a_job_runs_from_its_first_order_on() -> None:
    job = after(fresh(), OrderIssued(PEERS[0]), now_s=5)
    assert (job.state, job.started_at_s) == (JobState.RUNNING, 5)


def test_a_job_with_some_orders_ended_and_others_queued_is_waiting() -> None:
    job = after(fresh(), OrderIssued(PEERS[0]), done(PEERS[0]))
    assert job.state is JobState.WAITING
    assert "dn-2" in job.detail


def test_a_job_whose_datanodes_are_silent_is_waiting_and_names_them() -> None:
    job = after(issued(), done(PEERS[0]), TimePassed(frozenset(PEERS[:1]), DEADLINE_S))
    assert job.state is JobState.WAITING
    assert job.detail == "no heartbeat from datanode dn-2, dn-3"
    assert after(job, told(PEERS[1], bytes_fetched=1)).state is JobState.RUNNING


def test_a_job_is_done_when_all_are() -> None:
    job = after(issued(), *(done(peer) for peer in PEERS), now_s=9)
    assert (job.state, job.verdict, job.finished_at_s, job.detail) == (
        JobState.DONE,
        Verdict.MATCH,
        9,
        "",
    )


@pytest.mark.parametrize("verdict", [Verdict.UNRECOVERABLE, Verdict.CONFLICT])
def test_damage_that_remains_makes_a_job_partial_and_the_worst_verdict_counts(
    verdict: Verdict,
) -> None:
    job = after(
        issued(), done(PEERS[0]), done(PEERS[1], verdict), done(PEERS[2], Verdict.REPAIRABLE)
    )
    assert (job.state, job.verdict) == (JobState.PARTIAL, verdict)
    assert job.detail == f"{verdict.value} damage remains"


def test_one_datanode_that_fails_leaves_the_job_partial_and_is_named() -> None:
    failed = told(PEERS[1], OrderState.FAILED, error_code="disk_failed", message="no space left")
    job = after(issued(), done(PEERS[0]), failed, done(PEERS[2]))
    assert job.state is JobState.PARTIAL
    assert job.detail == "dn-2: disk_failed: no space left"


@pytest.mark.parametrize("state", [OrderState.FAILED, OrderState.REFUSED, OrderState.INTERRUPTED])
def test_a_job_that_nobody_carried_out_failed(state: OrderState) -> None:
    assert after(issued(), *(told(peer, state) for peer in PEERS)).state is JobState.FAILED


def test_an_order_that_makes_no_progress_expires_and_the_rest_goes_on() -> None:
    """Operator rule R7."""
    job = after(issued(), told(PEERS[0], bytes_fetched=1), now_s=500)
    job = after(job, TimePassed(LIVE, DEADLINE_S), now_s=600)
    assert [order.state for order in job.orders] == [
        OrderState.RUNNING,
        OrderState.EXPIRED,
        OrderState.EXPIRED,
    ]
    job = after(job, done(PEERS[0]), now_s=700)
    assert job.state is JobState.PARTIAL
    assert "no progress for 600 s" in job.detail


def test_progress_moves_the_deadline_and_repetition_does_not() -> None:
    job = issued()
    for now_s in (300, 599, 800):
        job = after(job, told(PEERS[0], bytes_fetched=7), now_s=now_s)
    order = job.order(PEERS[0])
    assert order is not None
    assert order.advanced_at_s == 300
    assert job.last_progress_at_s == 300


def test_an_agent_that_restarts_gets_its_order_again_but_not_for_ever() -> None:
    job = fresh()
    for attempt in range(1, RESTARTS_MAX + 1):
        job = after(job, OrderIssued(PEERS[0]), OrderAccepted(PEERS[0]))
        order = job.order(PEERS[0])
        assert order is not None
        assert (order.state, order.attempts) == (OrderState.RUNNING, attempt)
        job = after(job, AgentRestarted(PEERS[0]))
    order = job.order(PEERS[0])
    assert order is not None
    assert order.state is OrderState.FAILED
    assert "restarted" in order.detail


def test_a_restart_of_an_agent_that_had_no_order_changes_nothing() -> None:
    job = fresh()
    assert step(job, AgentRestarted(PEERS[0]), 1.0) is job


def test_figures_of_a_restarted_agent_do_not_fall() -> None:
    """Operator rule R13."""
    job = after(issued(), told(PEERS[0], bytes_fetched=70, bytes_planned=100))
    job = after(
        job,
        AgentRestarted(PEERS[0]),
        OrderIssued(PEERS[0]),
        told(PEERS[0], bytes_fetched=10, bytes_planned=30),
    )
    assert (job.bytes_done, job.bytes_planned) == (70, 100)


def test_progress_of_an_order_that_never_went_out_is_not_believed() -> None:
    job = fresh()
    assert step(job, done(PEERS[0]), 1.0) is job


def test_a_queued_job_is_cancelled_at_once() -> None:
    assert after(fresh(), CancelRequested()).state is JobState.CANCELLED


def test_a_running_job_is_cancelled_when_its_agents_have_stopped() -> None:
    job = after(issued(), CancelRequested())
    assert (job.state, job.detail) == (JobState.RUNNING, "stopping")
    job = after(job, *(told(peer, OrderState.INTERRUPTED) for peer in PEERS))
    assert job.state is JobState.CANCELLED


def test_a_cancelled_job_does_not_wait_for_ever() -> None:
    job = after(issued(), CancelRequested(), TimePassed(LIVE, DEADLINE_S), now_s=1)
    assert not job.state.is_terminal
    assert (
        after(job, TimePassed(LIVE, DEADLINE_S), now_s=1 + CANCEL_GRACE_S).state
        is JobState.CANCELLED
    )


def test_a_cancelled_order_is_not_sent_again_after_a_restart() -> None:
    job = after(issued(), CancelRequested(), AgentRestarted(PEERS[0]))
    order = job.order(PEERS[0])
    assert order is not None
    assert order.state is OrderState.CANCELLED


def test_a_job_that_was_done_before_the_cancellation_arrived_is_done() -> None:
    assert (
        after(issued(), CancelRequested(), *(done(peer) for peer in PEERS)).state is JobState.DONE
    )


def test_orders_of_dead_datanodes_are_given_up() -> None:
    job = after(
        issued(), OrderAbandoned(PEERS[2], "datanode is dead"), done(PEERS[0]), done(PEERS[1])
    )
    assert (job.state, job.detail) == (JobState.PARTIAL, "dn-3: datanode is dead")


def round_of(job: Job, *roots: int, verdict: Verdict = Verdict.REPAIRABLE) -> Job:
    """All orders that are queued go out and are done; the replicas end with these
    roots, which are their peers'.
    """
    queued = [order for order in job.orders if order.state is OrderState.QUEUED]
    job = after(job, *(OrderIssued(order.peer) for order in queued))
    ends = dict(zip(PEERS, roots, strict=True))
    return after(
        job, *(left(order.peer, ends[order.peer], order.round, verdict=verdict) for order in queued)
    )


def left(peer: PeerId, root: int, round_: int = 1, **figures: object) -> ProgressReceived:
    return replace(told(peer, OrderState.DONE, **figures), round=round_, root=(peer, root, ""))


def scattered() -> Job:
    """The third alone has a record, and nobody a whole copy: the first two went
    empty-handed.
    """
    roots = tuple((peer, root, "") for peer, root in zip(PEERS, (1, 1, 2), strict=True))
    return round_of(replace(fresh(), roots=roots), 1, 1, 7, verdict=Verdict.UNRECOVERABLE)


def test_those_that_were_done_before_a_peer_was_put_together_are_ordered_again() -> None:
    job = scattered()
    assert [(order.state.value, order.round) for order in job.orders] == [
        ("queued", 2),
        ("queued", 2),
        ("done", 1),
    ]
    assert (job.state, job.detail) == (JobState.WAITING, "queued for datanode dn-1, dn-2")
    job = round_of(
        replace(job, orders=(*job.orders[:2], replace(job.orders[2], progress=RepairReport()))),
        7,
        7,
        7,
    )
    assert (job.state, job.verdict, job.detail) == (JobState.DONE, Verdict.REPAIRABLE, "")
    assert [order.round for order in job.orders] == [2, 2, 1]


@pytest.mark.parametrize("roots", [(1, 1, 2), (7, 7, 7)], ids=["nothing changed", "all are equal"])
def test_one_round_is_all_where_another_could_bring_nothing(roots: tuple[int, int, int]) -> None:
    before = tuple((peer, root, "") for peer, root in zip(PEERS, (1, 1, 2), strict=True))
    job = round_of(replace(fresh(), roots=before), *roots)
    assert (job.state, [order.round for order in job.orders]) == (JobState.DONE, [1, 1, 1])


def test_replicas_that_never_become_equal_do_not_get_rounds_for_ever() -> None:
    job, rounds = scattered(), 1
    while not job.state.is_terminal:
        job, rounds = round_of(job, *(100 * rounds + number for number in range(3))), rounds + 1
    assert rounds == max(order.round for order in job.orders) == ROUNDS_MAX


def test_a_plan_is_carried_out_in_one_round_whatever_that_could_bring() -> None:
    unplanned = scattered()
    assert any(order.round > 1 for order in unplanned.orders)
    roots = tuple((peer, root, "") for peer, root in zip(PEERS, (1, 1, 2), strict=True))
    job = replace(fresh(), roots=roots)
    planned = replace(job, orders=tuple(replace(order, plan="d") for order in job.orders))
    ended = round_of(planned, 1, 1, 7, verdict=Verdict.UNRECOVERABLE)
    assert ended.state.is_terminal
    assert {order.round for order in ended.orders} == {1}


@pytest.mark.parametrize("round_", range(1, ROUNDS_MAX + 1))
@pytest.mark.parametrize("resumes", [0, 1, 10, 999_999_999])
@pytest.mark.parametrize("job_id", ["12ab", "a.b", "a.1", "a.", ".2", "a.r1"])
def test_a_run_is_known_by_a_name_of_its_own(job_id: str, round_: int, resumes: int) -> None:
    assert task_of(task_id(JobId(job_id), round_, resumes)) == (job_id, round_, resumes)
    is_first = round_ == 1 and resumes == 0
    assert (task_id(JobId(job_id), round_, resumes) == job_id) == is_first


def test_who_failed_is_not_ordered_again() -> None:
    job = after(issued(), left(PEERS[0], 1), told(PEERS[1], OrderState.FAILED), left(PEERS[2], 7))
    assert [order.state.value for order in job.orders] == ["queued", "failed", "queued"]
    assert round_of(job, 7, 0, 7).state is JobState.PARTIAL


def test_an_end_that_is_told_once_more_is_not_that_of_the_next_round() -> None:
    job = scattered()
    again = left(PEERS[0], 1, verdict=Verdict.UNRECOVERABLE)
    assert step(job, again, 1.0) is job
    job = after(job, OrderIssued(PEERS[0]))
    assert step(job, OrderAccepted(PEERS[0]), 1.0) is job
    job = after(job, OrderAccepted(PEERS[0], round=2))
    assert job.orders[0].state is OrderState.RUNNING
    assert step(job, again, 1.0) is job


def test_what_was_said_of_an_earlier_round_is_no_verdict_and_its_figures_stay() -> None:
    first = {
        "bytes_fetched": 70,
        "bytes_planned": 90,
        "chunks_repaired": 3,
        "peers": (PeerOutcome(PEERS[1], "ok", 70),),
    }
    job = after(
        issued(),
        left(
            PEERS[0],
            1,
            verdict=Verdict.UNRECOVERABLE,
            claimed_deleted=(5,),
            evidence=(Evidence("hole"),),
            **first,
        ),
        left(PEERS[1], 1),
        left(PEERS[2], 7, verdict=Verdict.REPAIRABLE),
    )
    assert (job.verdict, job.bytes_done, job.bytes_planned) == (None, 70, 90)
    job = after(
        job,
        OrderIssued(PEERS[0]),
        replace(told(PEERS[0], bytes_fetched=2, bytes_planned=4), round=2),
    )
    assert (job.bytes_done, job.bytes_planned) == (72, 94)
    second = {
        "bytes_fetched": 4,
        "chunks_repaired": 1,
        "peers": (PeerOutcome(PEERS[1], "peer_unavailable", 4),),
    }
    job = after(
        job, left(PEERS[0], 7, 2, verdict=Verdict.REPAIRABLE, claimed_deleted=(3,), **second)
    )
    order = job.order(PEERS[0])
    assert order is not None
    assert (order.progress.bytes_fetched, order.progress.chunks_repaired) == (74, 4)
    assert (order.progress.claimed_deleted, order.progress.evidence) == ((3, 5), ())
    assert order.progress.peers == (PeerOutcome(PEERS[1], "peer_unavailable", 74),)


def test_a_cancelled_job_has_no_further_round() -> None:
    ends = (left(PEERS[0], 1), left(PEERS[1], 1), left(PEERS[2], 7))
    assert after(issued(), CancelRequested(), *ends).state is JobState.DONE
    assert after(issued(), *ends).state is JobState.WAITING
    assert after(issued(), *ends, CancelRequested()).state is JobState.CANCELLED


def test_further_rounds_are_no_restarts() -> None:
    job = scattered()
    for _ in range(RESTARTS_MAX - 1):
        job = after(job, OrderIssued(PEERS[0]), AgentRestarted(PEERS[0]))
    assert job.orders[0].state is OrderState.QUEUED


def test_a_hopeless_verdict_holds_for_the_replicas_as_they_were_before_the_latest_round() -> None:
    first = scattered()
    heard = tuple(PeerOutcome(peer, "ok") for peer in PEERS[1:])
    job = after(first, *(OrderIssued(peer) for peer in PEERS[:2]), left(PEERS[1], 1, 2))
    job = after(job, left(PEERS[0], 1, 2, verdict=Verdict.UNRECOVERABLE, peers=heard))
    assert job.state is JobState.PARTIAL
    assert [root for _, root, _ in roots_covered_by_verdict(job)] == [1, 1, 7]


def running(
    seconds: int, *, bytes_per_s: int = 10, planned: int = 10_000, start: Job | None = None
) -> Job:
    job, begin = start or issued(), int(start.counted_at_s) if start else 0
    base = job.bytes_done
    for second in range(1, seconds + 1):
        job = after(
            job,
            told(PEERS[0], bytes_fetched=base + second * bytes_per_s, bytes_planned=planned),
            now_s=begin + second,
        )
    return job


def test_the_rate_is_that_of_the_last_minute() -> None:
    slow = running(120, bytes_per_s=10)
    assert slow.rate_bytes_per_s == pytest.approx(10)
    fast = running(90, bytes_per_s=50, start=slow)
    assert fast.rate_bytes_per_s == pytest.approx(50)


def test_the_rate_keeps_few_samples() -> None:
    job = issued()
    for tenth in range(1, 3000):
        job = after(job, told(PEERS[0], bytes_fetched=tenth, bytes_planned=9999), now_s=tenth / 10)
    assert len(job.samples) <= 130
    assert job.rate_bytes_per_s == pytest.approx(10, rel=0.05)


def test_waiting_time_counts_neither_for_the_rate_nor_for_the_eta() -> None:
    job = running(60)
    before = job.rate_bytes_per_s
    job = after(job, TimePassed(frozenset(), DEADLINE_S), now_s=60)
    assert job.state is JobState.WAITING
    job = after(job, TimePassed(LIVE, 10**9), now_s=50_000)
    job = after(job, told(PEERS[0], bytes_fetched=611, bytes_planned=10_000), now_s=50_001)
    assert job.active_s == pytest.approx(61, abs=1)
    assert job.rate_bytes_per_s == pytest.approx(before, rel=0.1)


def test_there_is_no_eta_while_it_is_too_early_to_tell() -> None:
    assert running(5, bytes_per_s=1).eta_s is None
    assert running(31, bytes_per_s=1).eta_s == pytest.approx((10_000 - 31) / 1, rel=0.05)
    assert running(5, bytes_per_s=100).eta_s == pytest.approx((10_000 - 500) / 100, rel=0.05)


def test_nothing_is_ever_more_than_finished() -> None:
    job = running(40, bytes_per_s=100, planned=1000)
    assert job.bytes_planned >= job.bytes_done
    assert job.eta_s == 0.0


events: st.SearchStrategy[Event] = st.one_of(
    st.builds(OrderIssued, st.sampled_from(PEERS)),
    st.builds(OrderAccepted, st.sampled_from(PEERS)),
    st.builds(AgentRestarted, st.sampled_from(PEERS)),
    st.builds(OrderAbandoned, st.sampled_from(PEERS), st.just("gone")),
    st.builds(CancelRequested, st.frozensets(st.sampled_from(PEERS))),
    st.builds(PauseRequested, st.just("me"), st.just(""), st.frozensets(st.sampled_from(PEERS))),
    st.just(ResumeRequested()),
    st.builds(
        ThrottleRequested,
        st.just("me"),
        st.one_of(st.none(), st.integers(0, 100)),
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    st.builds(TimePassed, st.frozensets(st.sampled_from(PEERS)), st.sampled_from([50.0, 600.0])),
    st.builds(
        ProgressReceived,
        st.sampled_from([*PEERS, PeerId("stranger")]),
        st.sampled_from(
            [
                OrderState.RUNNING,
                OrderState.DONE,
                OrderState.FAILED,
                OrderState.INTERRUPTED,
                OrderState.REFUSED,
            ]
        ),
        st.builds(
            RepairReport,
            verdict=st.one_of(st.none(), st.sampled_from(Verdict)),
            bytes_fetched=st.integers(0, 100),
            bytes_planned=st.integers(0, 100),
        ),
        st.integers(1, 2),
        st.one_of(st.none(), st.tuples(st.sampled_from(PEERS), st.integers(0, 2), st.just(""))),
        st.integers(0, 2),
    ),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(events, st.floats(0, 100)), max_size=30))
def test_the_laws_of_a_job_hold_whatever_happens(history: list[tuple[Event, float]]) -> None:
    """Operator rules R6, R13: terminal states are final, figures never fall, and the
    state is what the orders say.
    """
    job, now_s = fresh(), 0.0
    for event, wait_s in history:
        now_s += wait_s
        earlier, job = job, step(job, event, now_s)
        if earlier.state.is_terminal:
            assert job is earlier
        assert job.state.is_terminal == all(order.state.is_terminal for order in job.orders)
        assert job.bytes_done >= earlier.bytes_done
        assert job.bytes_planned >= max(job.bytes_done, earlier.bytes_planned)
        assert job.last_progress_at_s >= earlier.last_progress_at_s
        assert all(order.restarts <= RESTARTS_MAX for order in job.orders)
        assert all(order.round <= ROUNDS_MAX for order in job.orders)
        for was, now in zip(earlier.orders, job.orders, strict=True):
            goes_again = (was.state, now.state, now.round) == (
                OrderState.DONE,
                OrderState.QUEUED,
                was.round + 1,
            )
            assert not was.state.is_terminal or now == was or goes_again
        assert bool(job.finished_at_s) <= job.state.is_terminal
        assert job.eta_s is None or job.eta_s >= 0
        assert job.rate_bytes_per_s >= 0


@given(st.lists(st.tuples(events, st.floats(0, 100)), max_size=20))
def test_doubled_events_change_nothing_more(history: list[tuple[Event, float]]) -> None:
    """At-least-once delivery: the same news twice is the same news."""
    job, now_s = fresh(), 0.0
    for event, wait_s in history:
        now_s += wait_s
        job = step(job, event, now_s)
        again = step(job, event, now_s)
        assert replace(again, samples=()) == replace(job, samples=())
