"""Who may be reconciled: Ozone's rules T3-T10 with Ozone's sentences, then ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merkle.replica import ReplicaState
from merkle.tree import ContainerId
from scm.eligibility import (
    Availability,
    ContainerState,
    Eligibility,
    container_state,
    describe_not_closed,
    evaluate,
    evaluate_availability,
)
from tests.support.cluster_reports import World, replica, replicas

C1 = ContainerId(1)
# What Ozone itself can answer; the others are rules of ours.
OZONE = {
    Eligibility.OK,
    Eligibility.CONTAINER_NOT_FOUND,
    Eligibility.INELIGIBLE_CONTAINER_STATE,
    Eligibility.NO_REPLICAS_FOUND,
    Eligibility.INELIGIBLE_REPLICA_STATES,
    Eligibility.INELIGIBLE_REPLICATION_TYPE,
    Eligibility.NOT_ENOUGH_REQUIRED_NODES,
}


def test_t3_an_erasure_coded_container_is_refused() -> None:
    """CR-024. Operator rule R20."""
    coded = [replica("dn-1"), replica("dn-2", index=2)]
    ruling = evaluate(C1, ContainerState.CLOSED, coded, required_nodes=3)
    assert ruling.eligibility is Eligibility.INELIGIBLE_REPLICATION_TYPE
    assert (
        ruling.message == "Cannot reconcile container #1 with replication type EC. "
        "Reconciliation is currently only supported for Ratis containers."
    )


def test_t3_nothing_is_sent_for_an_erasure_coded_container() -> None:
    world = World()
    world.report(replica("dn-1", index=1, root=1), replica("dn-2", index=2, root=2))
    assert world.reconcile(1) == []
    assert world.sink.orders == []


@pytest.mark.parametrize("required", [0, 1])
def test_t4_a_container_with_one_required_node_is_refused(required: int) -> None:
    ruling = evaluate(C1, ContainerState.CLOSED, [replica()], required_nodes=required)
    assert ruling.eligibility is Eligibility.NOT_ENOUGH_REQUIRED_NODES
    assert (
        ruling.message == f"Cannot reconcile container #1 with {required} required nodes. "
        "Reconciliation is only supported for containers with more than 1 required node."
    )


def test_t5_a_controller_that_does_not_lead_sends_nothing() -> None:
    world = World()
    world.report(*replicas(1, 2, 3))
    world.leadership.value = None
    assert world.reconcile(1) == []
    assert world.sink.orders == []
    assert evaluate(C1, ContainerState.CLOSED, replicas(1, 2, 3), required_nodes=3).is_ok
    view = world.controller.queries.container(C1)
    assert view is not None
    assert view.ruling.eligibility is Eligibility.NOT_LEADER


def test_t6_an_unknown_container_is_not_found() -> None:
    ruling = evaluate(ContainerId(12), None, [], required_nodes=3)
    assert ruling.eligibility is Eligibility.CONTAINER_NOT_FOUND
    assert ruling.message == "Container #12 not found for reconciliation."


def test_t7_a_container_without_replicas_is_refused() -> None:
    ruling = evaluate(C1, ContainerState.CLOSED, [], required_nodes=3)
    assert ruling.eligibility is Eligibility.NO_REPLICAS_FOUND
    assert ruling.message == "Cannot reconcile container 1 because no replicas could be found."


def test_t7_a_container_whose_replicas_vanished_is_still_known() -> None:
    world = World()
    world.report(replica("dn-1"))
    world.beat("dn-1", [])
    view = world.controller.queries.container(C1)
    assert view is not None
    assert view.ruling.eligibility is Eligibility.NO_REPLICAS_FOUND


@pytest.mark.parametrize("state", list(ContainerState), ids=lambda state: state.name)
def test_t8_only_closed_and_quasi_closed_containers_are_eligible(state: ContainerState) -> None:
    ruling = evaluate(C1, state, replicas(1, 2, 3), required_nodes=3)
    if state in (ContainerState.CLOSED, ContainerState.QUASI_CLOSED):
        assert ruling.is_ok
    else:
        assert ruling.eligibility is Eligibility.INELIGIBLE_CONTAINER_STATE
        assert ruling.message == f"Cannot reconcile container 1 in state {state.value}."


def test_t9_each_of_three_replicas_gets_a_command_with_the_other_two_as_peers() -> None:
    """CR-019"""
    world = World()
    world.leadership.value = 17
    world.report(*replicas(1, 2, 3))
    [job] = world.reconcile(1)
    assert len(world.sink.orders) == 3
    for peer, others in (
        ("dn-1", {"dn-2", "dn-3"}),
        ("dn-2", {"dn-1", "dn-3"}),
        ("dn-3", {"dn-1", "dn-2"}),
    ):
        [order] = world.orders(peer)
        assert {datanode.peer for datanode in order.peers} == others
        assert (order.term, order.container_id, order.job_id) == (17, 1, job.job_id)


@pytest.mark.parametrize("state", list(ReplicaState), ids=lambda state: state.name)
def test_t10_one_replica_in_each_state(state: ReplicaState) -> None:
    found = [replica("dn-1"), replica("dn-2"), replica("dn-3", state=state)]
    ruling = evaluate(C1, ContainerState.CLOSED, found, required_nodes=3)
    if state in (ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED, ReplicaState.UNHEALTHY):
        assert ruling.is_ok
    else:
        assert ruling.eligibility is Eligibility.INELIGIBLE_REPLICA_STATES
        assert (
            ruling.message
            == "Cannot reconcile container #1 in state CLOSED with replica states: CLOSED, CLOSED,"
            f" {state.name} ({state.name} on datanode dn-3)"
        )


def test_all_replicas_that_are_not_closed_are_named_with_their_datanodes() -> None:
    found = [
        replica("dn-3", state=ReplicaState.OPEN),
        replica("dn-2", state=ReplicaState.INVALID),
        replica("dn-1"),
    ]
    assert describe_not_closed(found) == "INVALID on datanode dn-2, OPEN on datanode dn-3"
    assert describe_not_closed(replicas(1, 2)) == ""


def test_the_first_rule_that_is_broken_is_the_one_named() -> None:
    open_and_coded = [replica("dn-1", state=ReplicaState.OPEN, index=1)]
    assert evaluate(C1, ContainerState.CLOSED, open_and_coded, required_nodes=1).eligibility is (
        Eligibility.INELIGIBLE_REPLICA_STATES
    )
    coded = [replica("dn-1", index=1)]
    assert evaluate(C1, ContainerState.CLOSED, coded, required_nodes=1).eligibility is (
        Eligibility.INELIGIBLE_REPLICATION_TYPE
    )
    assert (
        evaluate(C1, ContainerState.OPEN, [], required_nodes=1).eligibility
        is Eligibility.INELIGIBLE_CONTAINER_STATE
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], None),
        ([ReplicaState.CLOSED, ReplicaState.OPEN], ContainerState.CLOSED),
        ([ReplicaState.UNHEALTHY, ReplicaState.CLOSED], ContainerState.CLOSED),
        ([ReplicaState.QUASI_CLOSED, ReplicaState.CLOSING], ContainerState.QUASI_CLOSED),
        ([ReplicaState.RECOVERING, ReplicaState.QUASI_CLOSED], ContainerState.RECOVERING),
        ([ReplicaState.CLOSING, ReplicaState.OPEN], ContainerState.CLOSING),
        ([ReplicaState.OPEN, ReplicaState.UNHEALTHY], ContainerState.OPEN),
        ([ReplicaState.UNHEALTHY, ReplicaState.UNHEALTHY], ContainerState.CLOSED),
        ([ReplicaState.INVALID], ContainerState.CLOSED),
        ([ReplicaState.DELETED, ReplicaState.DELETED], ContainerState.DELETED),
        ([ReplicaState.DELETED, ReplicaState.UNHEALTHY], ContainerState.CLOSED),
    ],
)
def test_the_state_of_a_container_follows_from_its_replicas(
    states: list[ReplicaState], expected: ContainerState | None
) -> None:
    found = [replica(f"dn-{number}", state=state) for number, state in enumerate(states)]
    assert container_state(found) is expected
    assert container_state(reversed(found)) is expected


@given(st.lists(st.sampled_from(ReplicaState), min_size=1, max_size=5))
def test_what_is_eligible_has_closed_replicas_only(states: list[ReplicaState]) -> None:
    found = [replica(f"dn-{number}", state=state) for number, state in enumerate(states)]
    ruling = evaluate(C1, container_state(found), found, required_nodes=3)
    assert ruling.is_ok == all(state.is_closed for state in states)
    assert ruling.eligibility in OZONE


@pytest.mark.parametrize(
    ("availability", "expected"),
    [
        (Availability(is_leader=True, live_replicas=3, live_writable_replicas=1), Eligibility.OK),
        (
            Availability(is_leader=False, live_replicas=0, live_writable_replicas=0),
            Eligibility.NOT_LEADER,
        ),
        (
            Availability(is_leader=True, live_replicas=1, live_writable_replicas=1),
            Eligibility.NO_LIVE_PEERS,
        ),
        (
            Availability(is_leader=True, live_replicas=0, live_writable_replicas=0),
            Eligibility.NO_LIVE_PEERS,
        ),
        (
            Availability(is_leader=True, live_replicas=2, live_writable_replicas=0),
            Eligibility.READ_ONLY,
        ),
    ],
)
def test_our_own_rules_ask_whether_anybody_could_do_it(
    availability: Availability, expected: Eligibility
) -> None:
    ruling = evaluate_availability(C1, availability)
    assert ruling.eligibility is expected
    assert expected is Eligibility.OK or expected not in OZONE
    assert bool(ruling.message) != ruling.is_ok
