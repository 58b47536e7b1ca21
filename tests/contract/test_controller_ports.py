"""What every adapter of the controller's ports does alike: the one that lasts, and its
twin in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.outcome import Evidence, PeerOutcome, RepairReport, Verdict
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.job_steps import new_job, step
from scm.job_store import SqliteJobStore
from scm.jobs import Job, JobId, OrderIssued, OrderState, ProgressReceived
from scm.policy import Target, Visit
from scm.ports import CancelOrder, CommandSink, JobStore, Leadership, ScanOrder
from scm.server import Outbox
from scm.start_controller import SoleLeader
from tests.support.cluster_reports import DN1, DN2, FixedLeadership, MemoryJobStore, MemorySink


def job(number: int, *, progress: RepairReport | None = None) -> Job:
    made = new_job(
        JobId(f"j{number}"),
        ContainerId(number),
        (Target(DN1, (DN2,)),),
        now_s=float(number),
        reason="why",
    )
    if progress:
        made = step(
            step(made, OrderIssued(DN1), 50.0),
            ProgressReceived(DN1, OrderState.DONE, progress),
            51.5,
        )
    return made


FULL_PROGRESS = RepairReport(
    verdict=Verdict.CONFLICT,
    bytes_fetched=2**63,
    error_code="x",
    message="naïve \u2028 text",
    evidence=(Evidence("healthy_copies_differ", 20, 0, "two"), Evidence("no_root")),
    claimed_deleted=(1, 2**62),
    peers=(PeerOutcome(DN2, "ok", 7),),
)
ROOT = (DN1, -1, "00ff")
VISIT = Visit(ContainerId(1), "j1", 3, 99.5, Verdict.CONFLICT, (ROOT, (DN2, None, "")))


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], JobStore]]:
    """Opens the store; called again, what a restarted controller would open."""
    if request.param == "memory":
        memory = MemoryJobStore()
        yield lambda: memory
        return
    opened: list[SqliteJobStore] = []

    def open_sqlite() -> JobStore:
        for earlier in opened:
            earlier.close()
        opened.append(SqliteJobStore(tmp_path / "controller.db"))
        return opened[-1]

    yield open_sqlite
    opened[-1].close()


def test_a_new_store_is_empty(reopen: Callable[[], JobStore]) -> None:
    store = reopen()
    assert (list(store.jobs()), list(store.visits())) == ([], [])


def test_jobs_come_back_as_they_were_oldest_first(reopen: Callable[[], JobStore]) -> None:
    further = step(job(4), OrderIssued(DN1), 50.0)
    further = replace(
        further, orders=(replace(further.orders[0], round=2, rounds=FULL_PROGRESS, root=ROOT),)
    )
    kept = [job(1), job(2, progress=FULL_PROGRESS), job(3), further]
    reopen().save(jobs=reversed(kept))
    assert list(reopen().jobs()) == kept


def test_visits_come_back_as_they_were(reopen: Callable[[], JobStore]) -> None:
    reopen().save(visits=[VISIT])
    assert list(reopen().visits()) == [VISIT]


def test_what_is_saved_again_replaces_what_was(reopen: Callable[[], JobStore]) -> None:
    store = reopen()
    store.save([job(1), job(2)], [VISIT])
    changed = step(job(1), OrderIssued(DN1), 9.0)
    store.save([changed], [Visit(ContainerId(1), "j2", 0, 0.0)])
    store = reopen()
    assert list(store.jobs()) == [changed, job(2)]
    assert list(store.visits()) == [Visit(ContainerId(1), "j2", 0, 0.0)]


def test_holders_come_back_and_a_container_without_any_is_dropped(
    reopen: Callable[[], JobStore],
) -> None:
    store = reopen()
    assert dict(store.holders()) == {}
    one, two = ContainerId(1), ContainerId(2)
    store.save(holders={one: {DN1, DN2}, two: {DN1}})
    store.save(holders={two: set()})
    store.save(holders={one: {DN2}})
    assert dict(reopen().holders()) == {one: {DN2}}


def test_saving_nothing_is_allowed(reopen: Callable[[], JobStore]) -> None:
    store = reopen()
    store.save()
    assert list(store.jobs()) == []


def test_no_term_is_given_twice(reopen: Callable[[], JobStore]) -> None:
    terms = [reopen().next_term(), reopen().next_term(), reopen().next_term()]
    assert terms == sorted(set(terms))
    assert terms[0] > 0


@pytest.fixture(params=[Outbox, MemorySink], ids=["outbox", "memory"])
def sink(request: pytest.FixtureRequest) -> Outbox | MemorySink:
    made = request.param()
    assert isinstance(made, Outbox | MemorySink)
    return made


def cancel(number: int, peer: PeerId = DN1, term: int = 1) -> CancelOrder:
    return CancelOrder(f"j{number}/cancel", term, peer, JobId(f"j{number}"), ContainerId(number))


def test_orders_wait_for_their_datanode_in_order_until_withdrawn(sink: Outbox | MemorySink) -> None:
    port: CommandSink = sink
    for order in (cancel(1), cancel(2), cancel(1, DN2)):
        assert port.send(order)
    assert list(sink.deliver(DN1)) == [cancel(1), cancel(2)]
    assert list(sink.deliver(DN1)) == [cancel(1), cancel(2)]
    port.withdraw(DN1, "j1/cancel")
    assert list(sink.deliver(DN1)) == [cancel(2)]
    assert list(sink.deliver(DN2)) == [cancel(1, DN2)]


def test_an_order_sent_again_is_one_order(sink: Outbox | MemorySink) -> None:
    sink.send(cancel(1))
    sink.send(cancel(1, term=2))
    assert list(sink.deliver(DN1)) == [cancel(1, term=2)]


def test_an_order_is_undelivered_until_it_is_handed_out(sink: Outbox | MemorySink) -> None:
    port: CommandSink = sink
    assert not port.is_undelivered(DN1, "j1/cancel")
    for order in (cancel(1), cancel(1, DN2)):
        port.send(order)
    assert port.is_undelivered(DN1, "j1/cancel")
    sink.deliver(DN1)
    port.send(cancel(1, term=2))
    assert not port.is_undelivered(DN1, "j1/cancel")
    assert port.is_undelivered(DN2, "j1/cancel")
    port.withdraw(DN1, "j1/cancel")
    assert not port.is_undelivered(DN1, "j1/cancel")
    port.send(cancel(1))
    assert port.is_undelivered(DN1, "j1/cancel")


def test_orders_beyond_one_response_are_undelivered() -> None:
    outbox = Outbox()
    for number in range(1, 1_002):
        outbox.send(cancel(number))
    outbox.deliver(DN1)
    found = [outbox.is_undelivered(DN1, f"j{number}/cancel") for number in range(1, 1_002)]
    assert found == [False] * 1_000 + [True]


def test_withdrawing_what_is_unknown_is_allowed(sink: Outbox | MemorySink) -> None:
    sink.withdraw(DN1, "nothing")
    sink.withdraw(PeerId("nobody"), "nothing")


def test_the_outbox_is_bounded_for_scans_and_never_refuses_a_cancellation() -> None:
    outbox = Outbox()
    sent = [outbox.send(ScanOrder(f"s{n}", 1, DN1, ContainerId(n))) for n in range(1, 10_002)]
    assert sent == [True] * 10_000 + [False]
    assert outbox.send(cancel(1))
    assert len(outbox.deliver(DN1)) == 1_000


@pytest.mark.parametrize(
    "make", [lambda: SoleLeader(MemoryJobStore()), FixedLeadership], ids=["sole", "fixed"]
)
def test_whoever_leads_has_a_term_that_does_not_change(make: Callable[[], Leadership]) -> None:
    leadership = make()
    assert leadership.term() == leadership.term()
    assert leadership.term()


def test_a_restarted_leader_has_a_higher_term() -> None:
    store = MemoryJobStore()
    first, second = SoleLeader(store).term(), SoleLeader(store).term()
    assert first is not None
    assert second is not None
    assert second > first
