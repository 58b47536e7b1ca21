"""What an operator does to a job that runs: it is paused and goes on, or is limited,
and nothing is lost by it.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merkle.outcome import RepairReport, Verdict
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.job_steps import STALLED_AFTER_S, new_job, step
from scm.jobs import (
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
)
from scm.policy import Target

DN1, DN2, DN3 = PEERS = (PeerId("dn-1"), PeerId("dn-2"), PeerId("dn-3"))
LIVE = frozenset(PEERS)
DEADLINE_S = 600.0
PAUSE = PauseRequested("root@vm", "peak hours")
PEAK = st.sampled_from(PEERS)


def after(job: Job, *events: Event, now_s: float = 0.0) -> Job:
    for event in events:
        job = step(job, event, now_s)
    return job


def issued() -> Job:
    targets = tuple(Target(peer, tuple(p for p in PEERS if p != peer)) for peer in PEERS)
    job = new_job(JobId("j"), ContainerId(1), targets, now_s=0.0)
    return after(job, *(OrderIssued(peer) for peer in PEERS))


def told(
    peer: PeerId, state: OrderState, *, resumes: int = 0, **figures: object
) -> ProgressReceived:
    return ProgressReceived(peer, state, RepairReport(**figures), resumes=resumes)


def stopped(peer: PeerId, *, resumes: int = 0, **figures: object) -> ProgressReceived:
    return told(peer, OrderState.INTERRUPTED, resumes=resumes, error_code="interrupted", **figures)


def paused(job: Job | None = None, now_s: float = 0.0) -> Job:
    return after(job or issued(), PAUSE, *(stopped(peer) for peer in PEERS), now_s=now_s)


def states(job: Job) -> list[str]:
    return [order.state.value for order in job.orders]


def test_a_job_is_paused_once_its_agents_have_stopped_and_says_who_and_why() -> None:
    """Operator rule R4."""
    job = after(issued(), PAUSE)
    assert (job.state, job.detail) == (JobState.RUNNING, "pausing by root@vm: peak hours")
    job = after(job, stopped(DN1), stopped(DN2))
    assert job.state is JobState.RUNNING
    job = after(job, stopped(DN3))
    assert (job.state, job.detail) == (JobState.PAUSED, "by root@vm: peak hours")
    assert after(job, PauseRequested("another", "for fun")) is job


def test_a_job_that_no_agent_has_is_paused_at_once() -> None:
    job = after(issued(), PauseRequested("me", "", LIVE))
    assert (job.state, states(job)) == (JobState.PAUSED, ["queued"] * 3)
    # And no order is sent while it is.
    assert after(job, OrderIssued(DN1)) is job
    assert not job.may_send


def test_a_pause_in_a_silence_says_that_it_waits() -> None:
    job = after(issued(), PAUSE, TimePassed(frozenset(), DEADLINE_S))
    assert (job.state, job.detail[:12]) == (JobState.WAITING, "no heartbeat")


def test_what_was_done_before_a_pause_counts_once_it_goes_on() -> None:
    """Operator rules R3, R13: figures of both runs add up, and the plan has what is
    left.
    """
    ran = {"bytes_fetched": 30, "bytes_planned": 100, "chunks_repaired": 3}
    job = after(issued(), PAUSE, stopped(DN1, verdict=Verdict.UNKNOWN, **ran))
    order = job.orders[0]
    assert (order.state, order.progress.verdict) == (OrderState.QUEUED, None)
    assert (order.progress.error_code, job.bytes_done, job.bytes_planned) == ("", 30, 100)
    job = after(job, stopped(DN2), stopped(DN3), ResumeRequested(), OrderIssued(DN1))
    job = after(job, OrderAccepted(DN1, resumes=1))
    rest = {"bytes_fetched": 70, "bytes_planned": 70, "chunks_repaired": 10}
    job = after(job, told(DN1, OrderState.DONE, resumes=1, verdict=Verdict.REPAIRABLE, **rest))
    assert (job.bytes_done, job.bytes_planned) == (100, 100)
    assert job.orders[0].progress.chunks_repaired == 10


def test_a_late_word_of_the_stopped_run_is_not_taken_for_the_next() -> None:
    job = after(paused(), ResumeRequested(), *(OrderIssued(peer) for peer in PEERS))
    assert states(job) == ["issued"] * 3
    assert after(job, stopped(DN1), OrderAccepted(DN1)) is job
    job = after(job, OrderAccepted(DN1, resumes=1))
    assert states(job) == ["running", "issued", "issued"]


def test_a_job_that_goes_on_before_its_agents_stopped_starts_the_stopped_again() -> None:
    job = after(issued(), PAUSE, ResumeRequested(), stopped(DN1))
    assert states(job) == ["queued", "issued", "issued"]
    # One that was faster than the order to stop.
    job = after(job, told(DN2, OrderState.DONE, verdict=Verdict.MATCH))
    assert states(job) == ["queued", "done", "issued"]


def test_an_interruption_that_nobody_asked_for_ends_the_order() -> None:
    job = after(paused(), ResumeRequested(), *(OrderIssued(peer) for peer in PEERS))
    assert states(after(job, stopped(DN1, resumes=1)))[0] == "interrupted"


def test_no_deadline_runs_out_in_a_pause() -> None:
    for job in (after(issued(), PAUSE), paused()):
        later = after(
            job, TimePassed(LIVE, DEADLINE_S), OrderAbandoned(DN1, "datanode is dead"), now_s=1e6
        )
        assert states(later) == states(job)
        on = after(later, ResumeRequested(), TimePassed(LIVE, DEADLINE_S), now_s=1e6)
        assert states(on) == states(job)
    # After it they count again.
    gone = after(on, OrderAbandoned(DN1, "datanode is dead"), now_s=1e6)
    assert states(gone)[0] == "expired"


def test_the_time_of_a_pause_counts_neither_for_the_rate_nor_for_the_eta() -> None:
    """Operator rule R2."""
    job = issued()
    for now_s in range(1, 41):
        progress = told(DN1, OrderState.RUNNING, bytes_fetched=now_s * 100, bytes_planned=8000)
        job = after(job, progress, now_s=now_s)
    before = job.eta_s
    job = paused(job, now_s=40.0)
    assert (job.rate_bytes_per_s, job.eta_s) == (0.0, None)
    job = after(job, ResumeRequested(), OrderIssued(DN1), now_s=90_000)
    assert job.state is JobState.RUNNING
    assert job.eta_s == before
    assert job.mean_rate_bytes_per_s == pytest.approx(100)


def test_pauses_are_no_restarts_of_agents() -> None:
    job = issued()
    for resumes in range(10):
        job = after(job, PAUSE, *(stopped(peer, resumes=resumes) for peer in PEERS))
        job = after(job, ResumeRequested(), *(OrderIssued(peer) for peer in PEERS))
    job = after(job, AgentRestarted(DN1))
    assert states(job) == ["queued", "issued", "issued"]


def test_an_agent_that_restarts_while_it_is_to_stop_gets_its_next_run_by_a_new_name() -> None:
    job = after(issued(), PAUSE, AgentRestarted(DN1))
    assert (job.orders[0].state, job.orders[0].resumes) == (OrderState.QUEUED, 1)


def test_a_paused_job_can_be_cancelled() -> None:
    assert after(paused(), CancelRequested()).state is JobState.CANCELLED
    stopping = after(issued(), PAUSE, CancelRequested())
    assert (stopping.state, stopping.detail) == (JobState.RUNNING, "stopping")
    ended = after(stopping, *(stopped(peer) for peer in PEERS))
    assert (ended.state, states(ended)) == (JobState.CANCELLED, ["interrupted"] * 3)


def test_a_job_whose_last_agents_are_done_before_they_stop_is_done() -> None:
    """Operator rule R6."""
    ends = [told(peer, OrderState.DONE, verdict=Verdict.MATCH) for peer in PEERS]
    assert after(issued(), PAUSE, *ends).state is JobState.DONE


def test_a_job_without_progress_is_stalled_until_there_is_some() -> None:
    """Operator rule R4: hung is told apart from paused, and from slow."""
    job = after(issued(), TimePassed(LIVE, 3600.0), now_s=STALLED_AFTER_S - 1)
    assert job.state is JobState.RUNNING
    job = after(job, TimePassed(LIVE, 3600.0), now_s=STALLED_AFTER_S)
    assert (job.state, job.eta_s) == (JobState.STALLED, None)
    assert "dn-1" in job.detail
    # Bytes that a scan reads are progress too.
    job = after(job, told(DN1, OrderState.RUNNING, bytes_scanned=1), now_s=STALLED_AFTER_S + 1)
    assert job.state is JobState.RUNNING
    job = after(job, TimePassed(LIVE, 3600.0), now_s=STALLED_AFTER_S + 2)
    assert job.state is JobState.RUNNING


def test_a_limit_keeps_its_value_and_who_set_it_until_another_is_set() -> None:
    """Operator rule R9."""
    job = after(issued(), ThrottleRequested("a", bytes_per_second=900), now_s=5)
    job = after(job, ThrottleRequested("b", containers_max=2), now_s=6)
    assert (job.bytes_per_second.value, job.bytes_per_second.set_by) == (900, "a")
    assert (job.containers_max.value, job.containers_max.set_by) == (2, "b")
    job = after(job, ThrottleRequested("c", bytes_per_second=0), now_s=7)
    assert (job.bytes_per_second.value, job.bytes_per_second.set_by) == (0, "c")
    assert job.bytes_per_second_of_each == 0


def test_a_lower_limit_on_orders_interrupts_none_and_sends_no_more() -> None:
    job = after(issued(), ThrottleRequested("a", containers_max=1))
    assert states(job) == ["issued"] * 3
    job = after(job, stopped(DN1), told(DN2, OrderState.DONE))
    assert not job.may_send
    assert after(job, ThrottleRequested("a", containers_max=2)).may_send


@given(
    st.integers(1, 10_000),
    st.lists(st.one_of(PEAK, st.integers(0, 3)), max_size=20),
)
def test_the_shares_of_a_job_never_add_up_to_more_than_its_limit(
    limit: int, history: list[PeerId | int]
) -> None:
    """Operator rule R9: as the controller does it. An order gets its share when it is
    sent, and those in flight get a new one with each change of the limits.
    """
    targets = tuple(Target(peer, tuple(p for p in PEERS if p != peer)) for peer in PEERS)
    job = new_job(JobId("j"), ContainerId(1), targets, now_s=0.0)
    job = after(job, ThrottleRequested("me", bytes_per_second=limit))
    shares: dict[PeerId, int] = {}
    for what in history:
        order = None if isinstance(what, int) else job.order(what)
        if isinstance(what, int):
            job = after(job, ThrottleRequested("me", containers_max=what))
            shares = dict.fromkeys(shares, job.bytes_per_second_of_each)
        elif order and order.state is OrderState.QUEUED and job.may_send:
            shares[what] = job.bytes_per_second_of_each
            job = after(job, OrderIssued(what))
        elif order and order.state.is_in_flight:
            job = after(job, told(what, OrderState.DONE))
            del shares[what]
        assert set(shares) == {o.peer for o in job.orders if o.state.is_in_flight}
        assert sum(shares.values()) <= max(limit, len(shares))


@given(
    st.lists(
        st.one_of(
            st.builds(OrderIssued, PEAK),
            st.builds(AgentRestarted, PEAK),
            st.builds(TimePassed, st.frozensets(PEAK), st.sampled_from([50.0, 600.0])),
            st.builds(OrderAbandoned, PEAK, st.just("gone")),
            st.builds(stopped, PEAK, bytes_fetched=st.integers(0, 9)),
        ),
        max_size=12,
    )
)
def test_whatever_comes_in_a_pause_no_order_starts_or_is_lost(events: list[Event]) -> None:
    """Operator rule R3: a pause ends nothing that was not asked to end, and starts
    nothing.
    """
    job = after(issued(), PAUSE)
    for number, event in enumerate(events):
        before, job = job, after(job, event, now_s=1000.0 * number)
        assert job.pause is not None
        assert job.bytes_done >= before.bytes_done
        for was, now in zip(before.orders, job.orders, strict=True):
            assert not (was.state is OrderState.QUEUED and now.state is not OrderState.QUEUED)
            if now.state.is_terminal and not was.state.is_terminal:
                assert now.restarts
    assert replace(job, pause=None).state is job.state
