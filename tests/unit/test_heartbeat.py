"""Heartbeats: the controller ends up knowing what we hold, and each of its commands is
done once.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnagent.heartbeat import (
    COMMANDS_REMEMBERED,
    PROGRESS_MAX,
    REPLICA_BYTES_MAX,
    CancelCommand,
    Command,
    CommandEnvelope,
    HeartbeatResponse,
    HeartbeatSender,
    HeartbeatState,
    JobReport,
    OutgoingHeartbeat,
    PeerAddress,
    ReconcileCommand,
    ScanCommand,
)
from dnagent.messages import request_of, response_of
from dnagent.metrics import AGENT_METRICS
from merkle.columns import state_fingerprint
from merkle.limits import MESSAGE_BYTES_MAX
from merkle.outcome import (
    Evidence,
    EvidenceKind,
    OutcomeState,
    PeerOutcome,
    RepairReport,
    Verdict,
)
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId
from protos import controller_pb2
from protos.errors import ControllerUnavailableError
from runtime.metrics import Metrics
from scm.datanodes import Datanode
from scm.policy import RootComparison
from scm.registry import Registry, ReplicaReport
from tests.support.trees import counted_tree

OURS = PeerId("dn-1")
KNOWN = HeartbeatResponse((), full_report_wanted=False, term=1)


def replica(container_id: int, root: int | None = 7) -> ContainerReplica:
    return ContainerReplica(OURS, ContainerId(container_id), ReplicaState.CLOSED, root, 1)


def ended(job_id: str) -> JobReport:
    return JobReport(job_id, ContainerId(1), OutcomeState.DONE, RepairReport())


def scan(command_id: str, *, term: int = 1, container_id: int = 1) -> CommandEnvelope:
    return CommandEnvelope(command_id, term, ScanCommand(ContainerId(container_id)))


def test_the_first_report_is_full_and_the_next_ones_tell_what_changed() -> None:
    """CR-038"""
    state = HeartbeatState()
    first = state.next_heartbeat([replica(1), replica(2)], [])
    assert (first.full, len(first.replicas), first.sequence) == (True, 2, 1)
    state.handle_response(first, KNOWN)
    second = state.next_heartbeat([replica(1), replica(2, root=8), replica(3)], [])
    assert (second.full, second.replicas, second.sequence) == (
        False,
        (replica(2, root=8), replica(3)),
        2,
    )
    state.handle_response(second, KNOWN)
    third = state.next_heartbeat([replica(2, root=8)], [])
    assert (third.replicas, third.removed) == ((), (1, 3))
    state.handle_response(third, KNOWN)
    assert state.next_heartbeat([replica(2, root=8)], []).removed == ()


def test_what_was_not_answered_is_told_again() -> None:
    state = HeartbeatState()
    state.handle_response(state.next_heartbeat([replica(1)], []), KNOWN)
    state.add_result(ended("j1"))
    lost = state.next_heartbeat([replica(1, root=9)], [])
    again = state.next_heartbeat([replica(1, root=9)], [])
    assert again.replicas == lost.replicas == (replica(1, root=9),)
    assert [p.job_id for p in again.progress] == ["j1"]
    assert again.sequence == lost.sequence + 1
    state.handle_response(again, KNOWN)
    assert state.next_heartbeat([replica(1, root=9)], []).progress == ()


def test_a_controller_that_asks_gets_a_full_report_and_keeps_nothing_of_the_one_before() -> None:
    state = HeartbeatState()
    state.handle_response(state.next_heartbeat([replica(1)], []), KNOWN)
    state.add_result(ended("j1"))
    state.handle_response(
        state.next_heartbeat([replica(1)], []), replace(KNOWN, full_report_wanted=True)
    )
    assert state.has_pending
    full = state.next_heartbeat([replica(1)], [])
    assert (full.full, full.replicas) == (True, (replica(1),))
    assert [p.job_id for p in full.progress] == ["j1"]


def test_a_controller_of_a_new_term_gets_a_full_report_without_asking() -> None:
    state = HeartbeatState()
    for term, is_full in (
        (0, True),
        (1, False),
        (1, False),
        (2, False),
        (2, True),
        (1, False),
        (0, False),
    ):
        heartbeat = state.next_heartbeat([replica(1)], [])
        assert heartbeat.full is is_full
        state.handle_response(heartbeat, replace(KNOWN, term=term))


def test_a_long_full_report_is_told_in_parts_that_name_what_they_list() -> None:
    state, told = HeartbeatState(replicas_per_report=2), []
    held = [replica(i) for i in range(1, 6)]
    for _ in range(4):
        heartbeat = state.next_heartbeat(held, [])
        numbers = [r.container_id for r in heartbeat.replicas]
        told.append((heartbeat.full, heartbeat.after, heartbeat.through, numbers))
        state.handle_response(heartbeat, replace(KNOWN, full_report_wanted=len(told) < 3))
    assert told == [
        (True, 0, 2, [1, 2]),
        (True, 2, 4, [3, 4]),
        (True, 4, None, [5]),
        (False, 0, None, []),
    ]
    request = request_of(heartbeat, datanode_id=OURS, address="dn-1:1", incarnation=1)
    assert not request.report.HasField("through_container_id")


def test_a_part_is_told_again_until_it_is_answered_and_changes_go_with_the_next() -> None:
    state = HeartbeatState(replicas_per_report=2)
    held = [replica(i) for i in range(1, 6)]
    wanted = replace(KNOWN, full_report_wanted=True)
    state.handle_response(state.next_heartbeat(held, []), wanted)
    lost = state.next_heartbeat(held, [])
    again = state.next_heartbeat([replica(1, root=9), *held[2:]], [])
    assert (lost.after, lost.through) == (2, 4)
    # Replica 1 has changed and 2 is gone: no part to come would tell.
    assert (again.after, again.through, again.removed) == (2, 3, (2,))
    assert again.replicas == (replica(1, root=9), replica(3))
    state.handle_response(again, wanted)
    last = state.next_heartbeat([replica(1, root=9), *held[2:]], [])
    assert (last.after, last.through, last.replicas) == (3, None, (replica(4), replica(5)))


def test_a_full_report_starts_over_for_a_restarted_controller_or_one_that_missed_a_part() -> None:
    state, held = HeartbeatState(replicas_per_report=2), [replica(i) for i in range(1, 6)]
    wanted = replace(KNOWN, full_report_wanted=True)
    state.handle_response(state.next_heartbeat(held, []), wanted)
    state.handle_response(state.next_heartbeat(held, []), replace(wanted, term=2))
    for after in (0, 2, 4, 0):
        heartbeat = state.next_heartbeat(held, [])
        assert (heartbeat.full, heartbeat.after) == (True, after)
        state.handle_response(heartbeat, replace(wanted, term=2))


def test_a_full_report_goes_on_whether_or_not_it_is_wanted_and_does_not_skip_for_changes() -> None:
    """A restarted controller may have accepted a late copy of an old full report."""
    state = HeartbeatState(replicas_per_report=1)
    for root, after, through in ((7, 0, 1), (7, 1, 2), (9, 2, 2), (9, 2, None)):
        heartbeat = state.next_heartbeat([replica(1, root), replica(2), replica(3)], [])
        assert (heartbeat.full, heartbeat.after, heartbeat.through) == (True, after, through)
        state.handle_response(heartbeat, KNOWN)
    assert not state.next_heartbeat([replica(1, 9), replica(2), replica(3)], []).full


def test_an_end_is_told_with_what_became_of_the_replica_or_after_it() -> None:
    state = HeartbeatState(replicas_per_report=1)
    held, told = [replica(1), replica(2)], []
    for container_id in (2, 1):
        state.add_result(
            JobReport(
                f"j{container_id}", ContainerId(container_id), OutcomeState.DONE, RepairReport()
            )
        )
    for _ in range(2):
        heartbeat = state.next_heartbeat(held, [])
        told.append(
            ([r.container_id for r in heartbeat.replicas], [p.job_id for p in heartbeat.progress])
        )
        state.handle_response(heartbeat, KNOWN)
    assert told == [([1], ["j1"]), ([2], ["j2"])]


def test_a_command_sent_twice_is_done_once_and_acknowledged_each_time() -> None:
    state = HeartbeatState()
    assert (
        state.handle_response(
            state.next_heartbeat([], []), replace(KNOWN, envelopes=(scan("c1"), scan("c2")))
        )
        != []
    )
    heartbeat = state.next_heartbeat([], [])
    assert heartbeat.acknowledged == ("c1", "c2")
    assert state.handle_response(heartbeat, replace(KNOWN, envelopes=(scan("c1"),))) == []
    assert state.next_heartbeat([], []).acknowledged == ("c1",)


def test_an_acknowledgement_is_repeated_until_it_is_answered() -> None:
    state = HeartbeatState()
    state.handle_response(state.next_heartbeat([], []), replace(KNOWN, envelopes=(scan("c1"),)))
    assert state.next_heartbeat([], []).acknowledged == ("c1",)
    heartbeat = state.next_heartbeat([], [])
    assert heartbeat.acknowledged == ("c1",)
    state.handle_response(heartbeat, KNOWN)
    assert state.next_heartbeat([], []).acknowledged == ()


def test_commands_of_a_leader_that_was_replaced_are_dropped() -> None:
    state = HeartbeatState()
    new = state.handle_response(
        state.next_heartbeat([], []), replace(KNOWN, envelopes=(scan("c1", term=5),))
    )
    assert new == [ScanCommand(ContainerId(1))]
    assert (
        state.handle_response(
            state.next_heartbeat([], []), replace(KNOWN, envelopes=(scan("c2", term=4),))
        )
        == []
    )
    # The term of the answer itself counts too.
    answer = HeartbeatResponse((scan("c3", term=5),), full_report_wanted=False, term=6)
    assert state.handle_response(state.next_heartbeat([], []), answer) == []
    assert state.next_heartbeat([], []).acknowledged == ()


def test_what_is_remembered_is_bounded() -> None:
    state = HeartbeatState()
    many = tuple(scan(str(i)) for i in range(COMMANDS_REMEMBERED + 1))
    assert (
        len(state.handle_response(state.next_heartbeat([], []), replace(KNOWN, envelopes=many)))
        == COMMANDS_REMEMBERED + 1
    )
    # The last of them is still known, the first no longer.
    again = replace(KNOWN, envelopes=(many[-1], many[0]))
    assert len(state.handle_response(state.next_heartbeat([], []), again)) == 1
    for i in range(PROGRESS_MAX + 1):
        state.add_result(ended(f"j{i}"))
    assert len(state.next_heartbeat([], []).progress) == PROGRESS_MAX


@given(
    st.lists(
        st.tuples(st.dictionaries(st.integers(1, 5), st.integers(0, 3)), st.integers(0, 2)),
        max_size=12,
    )
)
def test_whatever_is_lost_the_controller_ends_up_knowing_what_we_hold(
    rounds: list[tuple[dict[int, int], int]],
) -> None:
    """Each round: what is held, and whether the heartbeat is lost, its answer is lost,
    or nothing is.
    """
    state, known, last = (
        HeartbeatState(),
        dict[ContainerId, ContainerReplica](),
        list[ContainerReplica](),
    )

    def receive(heartbeat: OutgoingHeartbeat) -> None:
        if heartbeat.full:
            known.clear()
        known.update((r.container_id, r) for r in heartbeat.replicas)
        for container_id in heartbeat.removed:
            known.pop(container_id, None)

    for roots, fate in [*rounds, ({1: 1}, 0)]:
        last = [replica(container_id, root) for container_id, root in roots.items()]
        heartbeat = state.next_heartbeat(last, [])
        if fate != 1:
            receive(heartbeat)
        if fate == 0:
            state.handle_response(heartbeat, KNOWN)
    assert sorted(known.values(), key=lambda r: r.container_id) == sorted(
        last, key=lambda r: r.container_id
    )


def test_an_unknown_root_is_left_out_of_the_message_and_zero_is_not() -> None:
    held = [replica(1, root=None), replica(2, root=0)]
    request = request_of(
        HeartbeatState().next_heartbeat(held, []),
        datanode_id=OURS,
        address="dn-1:1",
        incarnation=1,
    )
    unknown, zero = request.report.replicas
    assert not unknown.HasField("data_checksum")
    assert zero.HasField("data_checksum")
    assert not unknown.HasField("data_scan_timestamp")


def test_a_report_costs_the_same_however_many_blocks_there_are() -> None:
    """CR-013: of a tree only its root and a fingerprint of fixed length are told."""

    def length(blocks: int) -> int:
        tree = counted_tree(blocks)
        held = replace(
            replica(1, root=1 << 31), fingerprint=state_fingerprint(tree), block_count=blocks
        )
        request = request_of(
            HeartbeatState().next_heartbeat([held], []),
            datanode_id=OURS,
            address="dn-1:1",
            incarnation=1,
        )
        return request.ByteSize()

    assert length(100) == length(1)


def test_commands_are_read_from_the_answer_and_unknown_ones_left_out() -> None:
    peer = controller_pb2.Datanode(datanode_id="dn-2", address="127.0.0.1:2")
    reconcile = controller_pb2.ReconcileCommand(
        container_id=4, job_id="j", peers=[peer], container_state="QUASI_CLOSED"
    )
    response = controller_pb2.HeartbeatResponse(
        commands=[
            controller_pb2.Command(command_id="a", term=3, reconcile=reconcile),
            controller_pb2.Command(
                command_id="b", term=3, cancel=controller_pb2.CancelCommand(job_id="j")
            ),
            controller_pb2.Command(
                command_id="c", term=3, scan=controller_pb2.ScanCommand(container_id=5)
            ),
            controller_pb2.Command(
                command_id="d",
                reconcile=controller_pb2.ReconcileCommand(container_id=4, job_id="../../etc"),
            ),
            controller_pb2.Command(command_id="from a newer controller", term=3),
            controller_pb2.Command(term=3, scan=controller_pb2.ScanCommand(container_id=6)),
        ],
        term=3,
    )
    answer = response_of(response)
    assert [envelope.command for envelope in answer.envelopes] == [
        ReconcileCommand(
            ContainerId(4),
            "j",
            (PeerAddress(PeerId("dn-2"), "127.0.0.1:2"),),
            ReplicaState.QUASI_CLOSED,
        ),
        CancelCommand("j", ContainerId(0)),
        ScanCommand(ContainerId(5)),
    ]


class FakeController:
    """Answers with what it is given; an absent answer is an absent controller."""

    def __init__(self, answers: Iterator[HeartbeatResponse | None]) -> None:
        self.requests: list[OutgoingHeartbeat] = []
        self.enough = threading.Event()
        self._answers = answers

    def heartbeat(self, heartbeat: OutgoingHeartbeat) -> HeartbeatResponse:
        self.requests.append(heartbeat)
        answer = next(self._answers, KNOWN)
        if len(self.requests) >= 3:
            self.enough.set()
        if answer is None:
            raise ControllerUnavailableError("nobody listens there")
        return answer

    def close(self) -> None:
        pass


def heartbeats(
    controller: FakeController, commands: list[Command], metrics: Metrics
) -> HeartbeatSender:
    return HeartbeatSender(
        controller,
        interval_s=0.05,
        replicas=lambda: [replica(1)],
        running=list,
        on_command=commands.append,
        metrics=metrics,
    )


def test_an_absent_controller_is_waited_out_and_its_commands_are_handed_on() -> None:
    """CR-018"""
    answers = [None, replace(KNOWN, envelopes=(scan("c1"),))]
    controller, commands, metrics = (
        FakeController(iter(answers)),
        list[Command](),
        Metrics(AGENT_METRICS),
    )
    shell = heartbeats(controller, commands, metrics)
    shell.start()
    assert controller.enough.wait(20)
    shell.stop()
    assert commands == [ScanCommand(ContainerId(1))]
    assert [heartbeat.full for heartbeat in controller.requests[:3]] == [True, True, False]
    assert controller.requests[2].acknowledged == ("c1",)
    assert metrics.value("dnagent_heartbeats_total", outcome="controller_unavailable") == 1
    assert metrics.value("dnagent_commands_total", outcome="accepted") == 1


def test_an_error_that_nobody_foresaw_ends_one_command_and_no_thread() -> None:
    envelopes = tuple(scan(f"c{i}", container_id=i) for i in (1, 2, 3))
    controller = FakeController(iter([replace(KNOWN, envelopes=envelopes)]))
    done, asked, metrics = list[Command](), list[int](), Metrics(AGENT_METRICS)

    def execute(command: Command) -> None:
        if command == ScanCommand(ContainerId(2)):
            raise FileNotFoundError("a PEM file")
        done.append(command)

    def replicas() -> list[ContainerReplica]:
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("not foreseen")
        return [replica(1)]

    sender = HeartbeatSender(
        controller,
        interval_s=0.01,
        replicas=replicas,
        running=list,
        on_command=execute,
        metrics=metrics,
    )
    sender.start()
    try:
        assert controller.enough.wait(20)
    finally:
        sender.stop()
    assert done == [ScanCommand(ContainerId(1)), ScanCommand(ContainerId(3))]
    assert metrics.value("dnagent_thread_failures_total", thread="heartbeat") == 2
    assert metrics.value("dnagent_commands_total", outcome="failed") == 1


def test_a_cancel_that_is_sent_again_is_executed_again() -> None:
    """The controller repeats it, with its first ID, while the job still runs."""
    state = HeartbeatState()
    cancel = CommandEnvelope("j1/cancel", 1, CancelCommand("j1", ContainerId(1)))
    for _ in range(2):
        sent = state.next_heartbeat([], [])
        answer = replace(KNOWN, envelopes=(cancel,))
        assert state.handle_response(sent, answer) == [CancelCommand("j1", ContainerId(1))]
    assert state.next_heartbeat([], []).acknowledged == ("j1/cancel",)


def unrecoverable(container_id: int, text: str) -> JobReport:
    """The end of a job that found as much as it may report."""
    report = all_that_may_be_reported(text)
    return JobReport(f"job-{container_id}", ContainerId(container_id), OutcomeState.DONE, report)


@cache
def all_that_may_be_reported(text: str) -> RepairReport:
    facts = tuple(
        Evidence(EvidenceKind.WINDOWS_UNPROVEN, BlockId((1 << 62) + i), i << 22, text)
        for i in range(1000)
    )
    claimed = tuple(BlockId((1 << 62) + i) for i in range(20_000))
    peers = (PeerOutcome(PeerId("dn-2"), "ok", 1 << 60),)
    return RepairReport(
        verdict=Verdict.UNRECOVERABLE, evidence=facts, claimed_deleted=claimed, peers=peers
    )


@pytest.mark.parametrize("text", ["windows 3, 7-9: bad everywhere", "\U0001f4a5" * 50_000])
def test_results_that_gathered_are_delivered_in_messages_that_the_controller_takes(
    text: str,
) -> None:
    state, delivered = HeartbeatState(), list[str]()
    # Every field at its longest.
    held = [
        replace(
            replica((1 << 63) - 1 - i, root=(1 << 63) - 1),
            state=ReplicaState.QUASI_CLOSED,
            bcs_id=(1 << 63) - 1,
            used_bytes=(1 << 63) - 1,
            block_count=(1 << 63) - 1,
            replica_index=(1 << 31) - 1,
            data_scan_timestamp_ms=(1 << 62),
            read_only=True,
            fingerprint=b"f" * 32,
        )
        for i in range(2000)
    ]
    count = 400 if len(text) < 100 else 8
    for number in range(count):
        state.add_result(unrecoverable(number + 1, text))
    for _ in range(count):
        heartbeat = state.next_heartbeat(held, [])
        request = request_of(heartbeat, datanode_id=OURS, address="dn-1:1", incarnation=1)
        assert request.ByteSize() < MESSAGE_BYTES_MAX
        for sent, report in zip(request.progress, heartbeat.progress, strict=True):
            assert sent.ByteSize() <= report.bytes_max
        for sent_replica in request.report.replicas:
            assert sent_replica.ByteSize() + 4 <= REPLICA_BYTES_MAX
        state.handle_response(heartbeat, KNOWN)
        delivered += [report.job_id for report in heartbeat.progress]
        if not state.has_pending:
            break
    assert delivered == [f"job-{number + 1}" for number in range(count)]


def test_what_does_not_fit_into_one_heartbeat_follows_at_once() -> None:
    state, held = HeartbeatState(), [replica(i) for i in range(1, 120_001)]
    while True:
        heartbeat = state.next_heartbeat(held, [])
        state.handle_response(heartbeat, KNOWN)
        if not state.has_pending:
            break
    first = state.next_heartbeat([], [])
    assert (len(first.removed), state.has_pending) == (100_000, True)
    state.handle_response(first, KNOWN)
    second = state.next_heartbeat([], [])
    state.handle_response(second, KNOWN)
    assert sorted([*first.removed, *second.removed]) == list(range(1, 120_001))
    assert not state.has_pending


HELD = st.dictionaries(st.integers(1, 6), st.sampled_from([7, 7, 8]), max_size=6)
FATES = st.sampled_from(["heard", "heard", "lost", "answer lost", "agent restarts", "we restart"])


@given(st.lists(st.tuples(HELD, FATES), max_size=25), st.integers(1, 4))
def test_no_holder_is_missing_and_nothing_is_healthy_by_what_an_earlier_agent_reported(
    rounds: list[tuple[dict[int, int], str]], replicas_per_report: int
) -> None:
    """Reports come in parts, some are lost, and both sides restart between them.
    Container 9 is held all the time. Another datanode holds all, with root 7.
    """
    everything = [replace(replica(n), peer=PeerId("dn-2")) for n in (*range(1, 7), 9)]
    state, start, term, registry = HeartbeatState(replicas_per_report), 1, 0, None
    for roots, fate in [*rounds, *[({1: 7}, "heard")] * 20]:
        if fate == "we restart" or registry is None:
            registry, term, is_held = Registry(stale_after_s=90, dead_after_s=600), term + 1, False
            told, late = set[tuple[int, ContainerId]](), list[tuple[int, OutgoingHeartbeat]]()
            registry.handle_heartbeat(
                Datanode(PeerId("dn-2"), "", ""),
                incarnation=1,
                sequence=1,
                report=ReplicaReport(True, tuple(everything)),
                now_s=0,
            )
        if fate == "agent restarts":
            state, start = HeartbeatState(replicas_per_report), start + 1
        held = [replica(number, root) for number, root in (roots | {9: 7}).items()]
        heartbeat = state.next_heartbeat(held, [])
        # A lost one comes late, before the next.
        late.append((start, heartbeat))
        if fate == "lost":
            continue
        for incarnation, one in late:
            effect = registry.handle_heartbeat(
                Datanode(OURS, "", ""),
                incarnation=incarnation,
                sequence=one.sequence,
                report=ReplicaReport(one.full, one.replicas, one.removed, one.after, one.through),
                now_s=0,
            )
            told |= {(incarnation, r.container_id) for r in one.replicas}
        late.clear()
        if fate != "answer lost":
            answer = replace(KNOWN, full_report_wanted=effect.full_report_wanted, term=term)
            state.handle_response(heartbeat, answer)
        nine = [r.peer for r in registry.replicas(ContainerId(9))]
        is_held |= OURS in nine
        assert (OURS in nine) == is_held
        for number in registry.container_ids():
            if registry.compared(number).comparison is RootComparison.MATCH:
                assert (start, number) in told
    assert registry is not None
    assert {r.container_id: r for r in held} == {
        number: r
        for number in registry.container_ids()
        for r in registry.replicas(number)
        if r.peer == OURS
    }
    assert not effect.full_report_wanted
    assert not heartbeat.replicas
