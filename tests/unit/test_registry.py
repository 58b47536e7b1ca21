"""Who is alive and holds what, whatever the order in which reports come."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from runtime.errors import UsageError
from scm.datanodes import Datanode, Liveness
from scm.limits import ControllerLimits
from scm.policy import RootComparison
from scm.registry import HeartbeatEffect, Registry, ReplicaReport
from tests.support.cluster_reports import replica, replicas

DN1 = Datanode(PeerId("dn-1"), "host-1", "127.0.0.1:1")


def make() -> Registry:
    return Registry(stale_after_s=90, dead_after_s=600)


def observe(
    registry: Registry,
    *found: ContainerReplica,
    peer: str = "dn-1",
    incarnation: int = 1,
    sequence: int = 1,
    full: bool = True,
    removed: tuple[int, ...] = (),
    after: int = 0,
    through: int | None = None,
    now_s: float = 0.0,
) -> HeartbeatEffect:
    return registry.handle_heartbeat(
        Datanode(PeerId(peer), "", "127.0.0.1:1"),
        incarnation=incarnation,
        sequence=sequence,
        report=ReplicaReport(full, found, tuple(map(ContainerId, removed)), after, through),
        now_s=now_s,
    )


def held(registry: Registry, container_id: int = 1) -> list[tuple[str, int | None]]:
    return [(r.peer, r.data_checksum) for r in registry.replicas(ContainerId(container_id))]


def test_a_full_report_replaces_all_that_was_known() -> None:
    registry = make()
    observe(registry, replica(container_id=1), replica(container_id=2))
    changed = observe(
        registry, replica(container_id=2, root=9), replica(container_id=3), sequence=2
    ).changed
    assert changed == {1, 2, 3}
    assert list(registry.container_ids()) == [1, 2, 3]
    assert (held(registry, 1), held(registry, 2)) == ([], [("dn-1", 9)])


def test_an_incremental_report_changes_what_it_names() -> None:
    registry = make()
    observe(registry, replica(container_id=1), replica(container_id=2), replica(container_id=3))
    changed = observe(
        registry, replica(container_id=2, root=9), sequence=2, full=False, removed=(3, 99)
    ).changed
    assert changed == {2, 3}
    assert (held(registry, 1), held(registry, 2), held(registry, 3)) == (
        [("dn-1", 7)],
        [("dn-1", 9)],
        [],
    )


def test_a_report_without_news_touches_nothing() -> None:
    registry = make()
    observe(registry, replica(), replica(container_id=2))
    assert observe(registry, replica(), replica(container_id=2), sequence=2).changed == frozenset()


def test_a_deleted_replica_is_gone() -> None:
    registry = make()
    observe(registry, replica())
    observe(registry, replica(state=ReplicaState.DELETED), sequence=2, full=False)
    assert held(registry) == []
    assert registry.state(ContainerId(1)) is ContainerState.CLOSED
    assert not registry.has_container(ContainerId(2))


def test_an_unhealthy_replica_may_return_to_closed_only_where_one_was_closed() -> None:
    """CR-001"""
    registry = make()

    def returns(container_id: int) -> ReplicaState:
        return registry.returns_to(ContainerId(container_id), required_nodes=3)

    unhealthy = [replica(container_id=number, state=ReplicaState.UNHEALTHY) for number in (1, 2)]
    observe(registry, *unhealthy)
    assert returns(1) is ReplicaState.QUASI_CLOSED
    quasi = replica("dn-2", 2, ReplicaState.QUASI_CLOSED)
    observe(registry, replica("dn-2"), quasi, peer="dn-2")
    assert (returns(1), returns(2)) == (ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED)
    # Damage that is found on the last closed replica does not open the container again.
    observe(registry, replica("dn-2", state=ReplicaState.UNHEALTHY), quasi, peer="dn-2", sequence=2)
    assert returns(1) is ReplicaState.CLOSED


@pytest.mark.parametrize(
    ("commits", "states", "expected"),
    [
        ((5, 5, 5), ("UNHEALTHY",) * 3, ReplicaState.CLOSED),
        ((5, 5, 6), ("UNHEALTHY",) * 3, ReplicaState.QUASI_CLOSED),
        # A third one may have another.
        ((5, 5), ("UNHEALTHY",) * 2, ReplicaState.QUASI_CLOSED),
        ((5, 5, 5), ("UNHEALTHY", "UNHEALTHY", "QUASI_CLOSED"), ReplicaState.QUASI_CLOSED),
    ],
)
def test_replicas_that_are_all_unhealthy_may_return_to_closed_if_there_is_one_commit(
    commits: tuple[int, ...], states: tuple[str, ...], expected: ReplicaState
) -> None:
    """CR-001"""
    registry = make()
    for number, (commit, state) in enumerate(zip(commits, states, strict=True)):
        found = replace(replica(f"dn-{number}", state=ReplicaState(state)), bcs_id=commit)
        observe(registry, found, peer=f"dn-{number}")
    assert registry.returns_to(ContainerId(1), required_nodes=3) is expected


@pytest.mark.parametrize("order", list(permutations([1, 2, 3])))
def test_late_and_reordered_reports_never_overwrite_newer_ones(order: tuple[int, ...]) -> None:
    """CR-052."""
    registry = make()
    for sequence in order:
        observe(registry, replica(root=sequence), sequence=sequence, full=sequence == 1)
    assert held(registry) == [("dn-1", 3)]


def test_a_report_that_comes_twice_counts_once() -> None:
    registry = make()
    assert observe(registry, replica(), sequence=4).applied
    assert not observe(registry, replica(), sequence=4).applied


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("silent_s", [0, 90, 600, 10_000])
def test_a_late_report_of_an_earlier_start_replaces_nothing(seen: bool, silent_s: float) -> None:
    """Whether that start was ever heard of, and however long the later one has been
    silent.
    """
    registry = make()
    if seen:
        observe(registry, replica(root=1), incarnation=99, sequence=50)
    born = observe(registry, replica(root=2), incarnation=100)
    assert (born.applied, born.restarted) == (True, seen)
    registry.update_liveness(silent_s)
    liveness = registry.datanodes(silent_s)[0].liveness
    late = observe(registry, replica(root=3), incarnation=99, sequence=51, now_s=silent_s)
    assert (late.applied, late.outdated) == (False, True)
    assert registry.datanodes(silent_s)[0].liveness is liveness
    assert held(registry) == ([("dn-1", 2)] if silent_s < 600 else [])
    # The later one is not shut out.
    assert observe(registry, replica(root=4), incarnation=100, sequence=2, now_s=silent_s).applied
    assert held(registry) == [("dn-1", 4)]


REPORTS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))


@given(st.lists(REPORTS, max_size=20))
def test_the_latest_start_and_in_it_the_latest_report_decide(
    reports: list[tuple[int, int, int]],
) -> None:
    """In whatever order they come: what is held is what the highest pair of incarnation
    and sequence reported when it first came.
    """
    registry, last, root = make(), (0, 0), None
    for incarnation, sequence, reported in reports:
        effect = observe(
            registry, replica(root=reported), incarnation=incarnation, sequence=sequence
        )
        assert effect.applied == ((incarnation, sequence) > last)
        assert effect.outdated == (incarnation < last[0])
        if (incarnation, sequence) > last:
            last, root = (incarnation, sequence), reported
    assert held(registry) == ([("dn-1", root)] if reports else [])


def test_a_full_report_is_asked_for_until_it_comes() -> None:
    registry = make()
    first = observe(registry, replica(), full=False)
    assert first.registered
    assert first.full_report_wanted
    assert observe(registry, sequence=2, full=False).full_report_wanted
    assert not observe(registry, replica(), sequence=3).full_report_wanted
    assert observe(registry, incarnation=2, full=False).full_report_wanted


def comparisons(registry: Registry) -> str:
    """The first letters of the comparisons of all containers, by ID."""
    return "".join(
        registry.compared(number).comparison.value[0] for number in registry.container_ids()
    )


def of_four(peer: str, *numbers: int, root: int = 7) -> list[ContainerReplica]:
    return [replica(peer, number, root=root) for number in numbers or range(1, 5)]


def test_the_parts_of_a_full_report_replace_what_they_list_and_nothing_else() -> None:
    """Until it is complete, the replicas of parts to come stay, as old, and their
    containers are unknown.
    """
    registry = make()
    observe(registry, *of_four("dn-2"), peer="dn-2", now_s=10)
    observe(registry, *of_four("dn-1"), now_s=20)
    assert comparisons(registry) == "mmmm"
    # The agent restarts. Meanwhile it has lost container 2.
    first = observe(registry, *of_four("dn-1", 1), incarnation=2, sequence=1, through=2, now_s=50)
    assert (first.full_report_wanted, first.changed, first.reassigned) == (True, {2}, {2})
    assert [len(held(registry, number)) for number in range(1, 5)] == [2, 1, 2, 2]
    assert comparisons(registry) == "muuu"
    note = registry.compared(ContainerId(3)).note
    assert note == (
        "the replica on datanode dn-1 is known from an earlier report; a full one is under way"
    )
    ages = [registry.report_age_s(ContainerId(n), PeerId("dn-1"), 60) for n in (1, 3, 4)]
    assert ages == [10, 40, 40]
    # A change in a part to come is known at once; the rest of the part is not, and gets
    # no younger if the report starts over. What a pause of ours lasted is left out.
    observe(registry, *of_four("dn-1", 4, root=9), incarnation=2, sequence=2, full=False, now_s=60)
    assert comparisons(registry) == "muud"
    assert registry.report_age_s(ContainerId(4), PeerId("dn-1"), 60) == 0
    observe(registry, *of_four("dn-1", 1), incarnation=2, sequence=3, through=1, now_s=70)
    assert registry.report_age_s(ContainerId(3), PeerId("dn-1"), 70) == 50
    registry.resume(100)
    assert registry.report_age_s(ContainerId(3), PeerId("dn-1"), 170) == 50
    last = observe(
        registry,
        *of_four("dn-1", 3),
        *of_four("dn-1", 4),
        incarnation=2,
        sequence=4,
        after=1,
        now_s=170,
    )
    assert not last.full_report_wanted
    assert comparisons(registry) == "mumm"
    assert registry.report_age_s(ContainerId(3), PeerId("dn-1"), 170) == 0


def test_a_part_that_is_lost_or_a_restart_between_parts_keeps_the_report_incomplete() -> None:
    registry = make()
    observe(registry, *of_four("dn-2"), peer="dn-2")
    observe(registry, *of_four("dn-1"))
    observe(registry, *of_four("dn-1", 1), incarnation=2, through=1)
    # The part with container 2 is lost.
    lost = observe(registry, *of_four("dn-1", 3, 4), incarnation=2, sequence=3, after=2)
    assert lost.full_report_wanted
    assert comparisons(registry) == "mumm"
    # The agent starts over, restarts again after the first part, and starts over.
    observe(registry, *of_four("dn-1", 1, 2), incarnation=2, sequence=4, through=2)
    assert comparisons(registry) == "mmuu"
    again = observe(registry, *of_four("dn-1", 1), incarnation=3, through=1)
    assert (again.restarted, comparisons(registry)) == (True, "muuu")
    end = observe(registry, *of_four("dn-1", 2, 3, 4), incarnation=3, sequence=2, after=1)
    assert (end.full_report_wanted, comparisons(registry)) == (False, "mmmm")


def test_a_restarted_controller_waits_for_each_part_of_what_was_held() -> None:
    holders = {ContainerId(n): frozenset({PeerId("dn-1"), PeerId("dn-2")}) for n in range(1, 5)}
    registry = Registry(stale_after_s=90, dead_after_s=600, holders=holders)
    observe(registry, *of_four("dn-2"), peer="dn-2")
    # A part that is not the first, from before the restart, completes nothing.
    assert observe(registry, *of_four("dn-1", 3, 4), after=2).full_report_wanted
    assert comparisons(registry) == "uumm"
    assert registry.compared(ContainerId(1)).note.startswith("1 of 2 known: no report yet of")
    observe(registry, *of_four("dn-1", 1), sequence=2, through=1)
    assert comparisons(registry) == "muuu"
    assert not observe(registry, *of_four("dn-1", 2, 3, 4), sequence=3, after=1).full_report_wanted
    assert comparisons(registry) == "mmmm"


def test_a_gap_in_the_sequence_asks_for_nothing() -> None:
    registry = make()
    observe(registry, replica())
    assert not observe(registry, sequence=9, full=False).full_report_wanted


def test_a_datanode_grows_stale_then_dead_and_comes_back() -> None:
    registry = make()
    observe(registry, replica("dn-1"), peer="dn-1")
    observe(registry, replica("dn-2"), peer="dn-2", now_s=80)
    assert registry.update_liveness(89) == []
    assert registry.update_liveness(90) == [("dn-1", Liveness.STALE)]
    assert registry.update_liveness(91) == []
    assert registry.compared(ContainerId(1)).comparison is RootComparison.UNKNOWN
    assert registry.live() == {"dn-2"}
    assert registry.update_liveness(600) == [("dn-1", Liveness.DEAD), ("dn-2", Liveness.STALE)]
    assert held(registry) == [("dn-2", 7)]
    for peer in ("dn-1", "dn-2"):
        observe(registry, peer=peer, sequence=2, full=False, now_s=601)
    assert held(registry) == [("dn-1", 7), ("dn-2", 7)]
    assert registry.compared(ContainerId(1)).comparison is RootComparison.MATCH


def test_the_replicas_of_a_dead_datanode_neither_match_nor_diverge() -> None:
    registry = make()
    for found in replicas(1, 2, 2):
        observe(registry, found, peer=found.peer, now_s=0 if found.peer == "dn-1" else 590)
    assert list(registry.diverged()) == [1]
    registry.update_liveness(600)
    assert list(registry.diverged()) == []
    assert registry.compared(ContainerId(1)).comparison is RootComparison.MATCH


def test_null_checksums_of_old_containers_do_not_break_the_comparison() -> None:
    """CR-047."""
    registry = make()
    observe(registry, replica("dn-1", root=None), peer="dn-1")
    observe(registry, replica("dn-2", root=None), peer="dn-2")
    assert registry.compared(ContainerId(1)).comparison is RootComparison.UNKNOWN
    assert registry.counts()[RootComparison.UNKNOWN] == 1


actions = st.lists(
    st.tuples(
        st.sampled_from(["dn-1", "dn-2", "dn-3"]),
        st.booleans(),
        st.dictionaries(st.integers(1, 4), st.sampled_from([None, 1, 2]), max_size=4),
        st.floats(0, 400),
    ),
    max_size=12,
)


@settings(max_examples=200)
@given(actions)
def test_the_index_always_says_what_a_fresh_comparison_would(
    steps: list[tuple[str, bool, dict[int, int | None], float]],
) -> None:
    registry, now_s = make(), 0.0
    for sequence, (peer, full, roots, wait_s) in enumerate(steps, start=1):
        now_s += wait_s
        found = [replica(peer, container_id, root=root) for container_id, root in roots.items()]
        observe(registry, *found, peer=peer, sequence=sequence, full=full, now_s=now_s)
        registry.update_liveness(now_s)
    fresh = make()
    for status in registry.datanodes(now_s):
        peer = status.datanode.peer
        every = [
            r
            for c in registry.container_ids()
            for r in registry._replicas.get(c, {}).values()
            if r.peer == peer
        ]
        observe(fresh, *every, peer=peer, now_s=now_s - status.heartbeat_age_s)
    fresh.update_liveness(now_s)
    for container_id in registry.container_ids():
        assert registry.compared(container_id) == fresh.compared(container_id)
    assert set(registry.diverged()) == set(fresh.diverged())
    shown = Counter(registry.compared(number).comparison for number in registry.container_ids())
    assert +Counter(registry.counts()) == shown
    assert len(registry) == shown.total()


def restarted(**settings: float) -> Registry:
    """A registry whose earlier process knew container 1 on three datanodes."""
    peers = frozenset({PeerId("dn-1"), PeerId("dn-2"), PeerId("dn-3")})
    return Registry(
        stale_after_s=90,
        dead_after_s=600,
        holders={ContainerId(1): peers},
        **settings,
    )


def word(registry: Registry) -> tuple[RootComparison, str]:
    compared = registry.compared(ContainerId(1))
    return compared.comparison, compared.note


def test_after_a_start_a_container_is_unknown_until_its_holders_have_reported() -> None:
    registry = restarted()
    assert list(registry.container_ids()) == [1]
    assert registry.counts()[RootComparison.UNKNOWN] == 1
    waiting = "no report yet of datanode"
    assert word(registry)[1] == f"0 of 3 known: {waiting} dn-1, dn-2, dn-3"
    observe(registry, replica("dn-1"), peer="dn-1")
    observe(registry, replica("dn-2"), peer="dn-2")
    assert word(registry) == (RootComparison.UNKNOWN, f"2 of 3 known: {waiting} dn-3")
    # A heartbeat without a report says nothing of the replica.
    registry.handle_heartbeat(
        Datanode(PeerId("dn-3"), "", "127.0.0.1:1"),
        incarnation=1,
        sequence=1,
        report=None,
        now_s=0.0,
    )
    assert word(registry)[0] is RootComparison.UNKNOWN
    observe(registry, replica("dn-3"), peer="dn-3", sequence=2)
    assert word(registry) == (RootComparison.MATCH, "")
    assert registry.expected_replicas(ContainerId(1)) == 3


@pytest.mark.parametrize(
    ("required_nodes", "expected"), [(2, RootComparison.MATCH), (3, RootComparison.UNKNOWN)]
)
def test_a_datanode_that_never_came_back_is_dead_in_time(
    required_nodes: int, expected: RootComparison
) -> None:
    registry = restarted(required_nodes=required_nodes)
    for number, now_s in enumerate((0.0, 590.0, 605.0), start=1):
        for peer in ("dn-1", "dn-2"):
            observe(registry, replica(peer), peer=peer, sequence=number, now_s=now_s)
        registry.update_liveness(now_s)
        assert word(registry)[0] is (RootComparison.UNKNOWN if now_s < 600 else expected)
    # When it does come, its report counts.
    observe(registry, replica("dn-3", root=8), peer="dn-3", now_s=700)
    assert word(registry)[0] is RootComparison.DIVERGED


def test_a_holder_that_reports_without_the_replica_is_no_longer_expected() -> None:
    registry = restarted(required_nodes=2)
    observe(registry, replica("dn-1"), peer="dn-1")
    observe(registry, replica("dn-2"), peer="dn-2")
    effect = observe(registry, peer="dn-3")
    assert effect.reassigned == {1}
    assert registry.holders(ContainerId(1)) == {"dn-1", "dn-2"}
    assert word(registry) == (RootComparison.MATCH, "")


def test_when_all_datanodes_are_dead_nothing_is_known() -> None:
    registry = Registry(stale_after_s=90, dead_after_s=600, required_nodes=3)
    for peer, root in (("dn-1", 7), ("dn-2", 7), ("dn-3", 7)):
        observe(registry, replica(peer, 1, root=root), replica(peer, 2, root=len(peer)), peer=peer)
    assert registry.counts()[RootComparison.MATCH] == 2
    registry.update_liveness(700.0)
    assert +Counter(registry.counts()) == {RootComparison.UNKNOWN: 2}
    assert word(registry) == (RootComparison.UNKNOWN, "0 of 3 known")
    assert len(registry) == 2


def test_roots_go_stale_without_a_report() -> None:
    day_s = 86_400.0
    start_s = 1_000_000.0
    registry = Registry(
        stale_after_s=90, dead_after_s=600, roots_stale_after_s=30 * day_s, now_s=start_s
    )
    for sequence, days in enumerate((0, 29.9, 30.1), start=1):
        now_s = start_s + days * day_s
        for peer in ("dn-1", "dn-2"):
            observe(registry, replica(peer), peer=peer, sequence=sequence, full=False, now_s=now_s)
        registry.update_liveness(now_s)
        assert (word(registry)[0] is RootComparison.MATCH) == (days < 30)
    assert registry.ages.oldest_s == pytest.approx(start_s, abs=3600)
    for peer in ("dn-1", "dn-2"):
        scanned = replica(peer, scanned_ms=int((start_s + 30 * day_s) * 1000))
        observe(registry, scanned, peer=peer, sequence=9, full=False, now_s=start_s + 31 * day_s)
    assert word(registry) == (RootComparison.MATCH, "")
    observe(registry, replica("dn-2", 5, scanned_ms=None), peer="dn-2", sequence=10, full=False)
    assert registry.ages.never_scanned == 1


@settings(max_examples=200)
@given(actions, st.dictionaries(st.integers(1, 4), st.sets(st.sampled_from(["dn-1", "dn-9"]))))
def test_the_holders_are_what_reports_say_and_each_change_is_told(
    steps: list[tuple[str, bool, dict[int, int | None], float]], stored: dict[int, set[str]]
) -> None:
    known = {
        ContainerId(number): frozenset(map(PeerId, peers))
        for number, peers in stored.items()
        if peers
    }
    registry = Registry(stale_after_s=90, dead_after_s=600, holders=known)
    model = {(peer, number) for number, peers in known.items() for peer in peers}
    for sequence, (peer, full, roots, _) in enumerate(steps, start=1):
        found = [replica(peer, number, root=root) for number, root in roots.items()]
        removed = () if full else (1,)
        effect = observe(registry, *found, peer=peer, sequence=sequence, full=full, removed=removed)
        before = set(model)
        if full:
            model = {held for held in model if held[0] != peer}
        model -= {(peer, ContainerId(1))} if removed and 1 not in roots else set()
        model |= {(PeerId(peer), ContainerId(number)) for number in roots}
        assert effect.reassigned == {number for _, number in before ^ model}
        held = {(p, n) for n in registry.container_ids() for p in registry.holders(n)}
        assert held == model


def test_a_datanode_with_too_many_containers_is_refused_by_name() -> None:
    limits = ControllerLimits(containers_per_datanode_max=3)
    registry = Registry(stale_after_s=90, dead_after_s=600, limits=limits)
    four = [replica(container_id=number) for number in range(1, 5)]
    with pytest.raises(UsageError, match=r"dn-1 reports 4 containers; the limit is 3"):
        observe(registry, *four)
    assert (len(registry), registry.datanode_count) == (0, 0)
    observe(registry, *four[:3])
    with pytest.raises(UsageError, match="dn-1 reports 4 containers"):
        observe(registry, four[3], sequence=2, full=False)
    assert list(registry.container_ids()) == [1, 2, 3]
    # What it has already, what it replaces and what it loses is not counted twice.
    observe(registry, *four[:3], sequence=3, full=False)
    observe(registry, four[3], sequence=4, full=False, removed=(1,))
    observe(registry, *four[:3], sequence=5)
    assert len(held(registry, 1)) == 1
    # Each datanode has a limit of its own.
    observe(registry, replica("dn-2", 9), peer="dn-2")


def calls_of(work: Callable[[], object]) -> int:
    """How many functions a piece of work calls: its cost, whatever the machine."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_report_costs_by_what_it_names_and_not_by_what_is_known() -> None:
    full, incremental = dict[int, int](), dict[int, int]()
    for size in (1_000, 4_000):
        registry = make()
        for peer in ("dn-1", "dn-2", "dn-3"):
            found = [
                replica(peer, number, root=number if peer != "dn-3" or number % 1000 else 0)
                for number in range(1, size + 1)
            ]
            full[size] = calls_of(partial(observe, registry, *found, peer=peer))
        assert (len(registry.diverged()), len(registry)) == (size // 1000, size)
        changed = replica("dn-1", 7, root=5)
        incremental[size] = calls_of(partial(observe, registry, changed, sequence=2, full=False))
    # A step that is not linear would cost sixteen times as much.
    assert full[4_000] <= 4.4 * full[1_000]
    assert incremental[4_000] <= 1.1 * incremental[1_000]
