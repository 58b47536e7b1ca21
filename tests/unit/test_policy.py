"""What counts as agreement, who gets orders, and how long automatic mode waits."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merkle.outcome import Verdict
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from scm.eligibility import INVALID_HINT
from scm.policy import (
    BACKOFF_MOST_S,
    MATCH,
    ComparisonResult,
    Knowledge,
    RootComparison,
    Roots,
    RoundEnd,
    Visit,
    backoff_s,
    compare,
    free_slots,
    is_due,
    next_visit,
    peers_to_reorder,
    roots,
    targets,
    unwritten,
)
from tests.support.cluster_reports import replica, replicas

C1 = ContainerId(1)

some_replicas = st.lists(
    st.builds(
        replica,
        st.sampled_from([f"dn-{number}" for number in range(6)]),
        st.just(1),
        st.sampled_from(ReplicaState),
        st.one_of(st.none(), st.integers(0, 2)),
        index=st.sampled_from([0, 0, 0, 0, 1]),
        read_only=st.booleans(),
        fingerprint=st.sampled_from([b"", b"a", b"b"]),
    ),
    max_size=5,
    unique_by=lambda r: r.peer,
)
some_peers = st.frozensets(st.sampled_from([PeerId(f"dn-{number}") for number in range(6)]))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (replicas(7, 7, 7), RootComparison.MATCH),
        (replicas(0, 0, 0), RootComparison.MATCH),
        (replicas(7, 7, 8), RootComparison.DIVERGED),
        (replicas(7, 0), RootComparison.DIVERGED),
        (replicas(7, 8, None), RootComparison.DIVERGED),
        (replicas(7, 7, None), RootComparison.UNKNOWN),
        (replicas(None, None), RootComparison.UNKNOWN),
        (replicas(7), RootComparison.UNKNOWN),
        (
            [replica("dn-1", index=1, root=1), replica("dn-2", index=2, root=2)],
            RootComparison.NOT_APPLICABLE,
        ),
        ([replica(state=ReplicaState.OPEN)], RootComparison.NOT_APPLICABLE),
        ([replica("dn-1"), replica("dn-2", state=ReplicaState.CLOSING)], RootComparison.UNKNOWN),
        ([], RootComparison.UNKNOWN),
    ],
)
def test_an_unknown_root_is_neither_zero_nor_a_match(
    found: list[ContainerReplica], expected: RootComparison
) -> None:
    """CR-002, CR-014, CR-047; Ozone's own comparison takes 0 for a root (T11)."""
    assert compare(found).comparison is expected


def test_replicas_that_are_not_closed_are_named_and_what_to_do_about_an_invalid_one() -> None:
    note = compare([replica("dn-1"), replica("dn-2", state=ReplicaState.CLOSING)]).note
    assert note == "not closed: CLOSING on datanode dn-2"
    note = compare([replica("dn-1"), replica("dn-2", state=ReplicaState.INVALID)]).note
    assert note == f"not closed: INVALID on datanode dn-2; {INVALID_HINT}"


def test_equal_roots_that_know_of_different_deletes_are_diverged() -> None:
    found = [replica("dn-1", fingerprint=b"live"), replica("dn-2", fingerprint=b"dead")]
    compared = compare(found)
    assert compared.comparison is RootComparison.DIVERGED
    assert "tombstones" in compared.note


def test_a_replica_without_a_fingerprint_is_compared_by_its_root() -> None:
    assert (
        compare([replica("dn-1", fingerprint=b"x"), replica("dn-2")]).comparison
        is RootComparison.MATCH
    )


def test_a_silent_datanode_proves_no_match() -> None:
    assert (
        compare(replicas(7, 7), Knowledge(silent={PeerId("dn-2")})).comparison
        is RootComparison.UNKNOWN
    )
    assert (
        compare(replicas(7, 8), Knowledge(silent={PeerId("dn-2")})).comparison
        is RootComparison.DIVERGED
    )


@pytest.mark.parametrize(
    ("roots", "known", "note"),
    [
        ((), Knowledge(), "no replicas are known"),
        ((), Knowledge(required=3), "0 of 3 known"),
        ((7, 7), Knowledge(required=3), "2 of 3 known"),
        (
            (7, 7),
            Knowledge(missing={PeerId("dn-9"), PeerId("dn-8")}),
            "2 of 4 known: no report yet of datanode dn-8, dn-9",
        ),
        (
            (7, 7, 7),
            Knowledge(required=3, missing={PeerId(f"x{number}") for number in range(5)}),
            "3 of 8 known: no report yet of datanode x0, x1, x2 and 2 more",
        ),
    ],
)
def test_a_healthy_word_needs_all_expected_replicas(
    roots: tuple[int, ...], known: Knowledge, note: str
) -> None:
    compared = compare(replicas(*roots), known)
    assert (compared.comparison, compared.note) == (RootComparison.UNKNOWN, note)
    assert compared.roots_agree is bool(roots)
    if roots:
        # What differs is known to differ, whoever is missing.
        assert compare(replicas(8, *roots), known).comparison is RootComparison.DIVERGED


def test_a_healthy_word_needs_roots_of_recent_scans() -> None:
    known = Knowledge(scanned_after_ms=1_000)
    new, old, never = (
        replica(f"dn-{number}", scanned_ms=at) for number, at in enumerate((1_000, 999, None))
    )
    assert compare([new, replace(new, peer=PeerId("x"))], known) == MATCH
    assert compare([new, old], known) == ComparisonResult(
        RootComparison.UNKNOWN, "1 of 2 replicas were last scanned too long ago", roots_agree=True
    )
    assert compare([new, never], known).note == "the data of 1 of 2 replicas was never scanned"
    assert compare([new, old, never]) == MATCH


def test_replicas_without_an_order_that_differ_are_named_with_the_reason() -> None:
    found = [
        replica("dn-1", root=7, fingerprint=b"x"),
        replica("dn-2", root=8, read_only=True),
        replica("dn-3", root=8),
        replica("dn-4", root=7, fingerprint=b"y", read_only=True),
        replica("dn-5", root=7, fingerprint=b"x", read_only=True),
        replica("dn-6", root=None, read_only=True),
        replica("dn-7", root=9),
    ]
    assert unwritten(found, {PeerId("dn-1")}, by_plan=False) == {
        "dn-2": "it is held read-only",
        "dn-3": "it was not live when the job began",
        "dn-4": "it is held read-only",
        "dn-7": "it was not live when the job began",
    }
    # Replicas with an order are not named: their orders say what became of them.
    assert unwritten(found, {one.peer for one in found}, by_plan=False) == {}
    by_plan = unwritten(found, {PeerId("dn-1")}, by_plan=True)
    assert by_plan[PeerId("dn-2")] == "it is held read-only"
    assert by_plan[PeerId("dn-3")] == "the plan leaves it out"


def test_empty_trees_of_containers_with_blocks_prove_no_match() -> None:
    """Blocks without recorded checksums are in no scanned tree: equal roots say nothing
    of them.
    """
    found = [replace(one, block_count=2) for one in replicas(0, 0, 0)]
    assert compare(found).comparison is RootComparison.UNKNOWN
    assert (
        compare([replace(one, block_count=2) for one in replicas(0, 7, 7)]).comparison
        is RootComparison.DIVERGED
    )


def test_replicas_of_an_empty_container_match() -> None:
    """CR-009: unlike the root of a container with blocks, that of an empty one is known
    to be 0.
    """
    assert compare(replicas(0, 0, 0)) == MATCH


def test_a_match_of_unhealthy_replicas_says_so() -> None:
    found = [replica("dn-1", state=ReplicaState.UNHEALTHY), replica("dn-2")]
    assert compare(found).note == "1 of 2 replicas are UNHEALTHY"


@given(some_replicas, some_peers, some_peers, st.integers(0, 4))
def test_a_match_is_claimed_only_of_known_equal_closed_roots(
    found: list[ContainerReplica],
    silent: frozenset[PeerId],
    others: frozenset[PeerId],
    required: int,
) -> None:
    """inv-I12."""
    missing = others - {one.peer for one in found}
    known = Knowledge(required, silent, missing)
    if compare(found, known).comparison is RootComparison.MATCH:
        assert len(found) >= required
        assert not missing
        assert len(found) >= 2
        assert len({r.data_checksum for r in found}) == 1
        assert all(
            r.data_checksum is not None and r.state.is_closed and not r.is_erasure_coded
            for r in found
        )
        assert silent.isdisjoint(r.peer for r in found)


@given(some_replicas)
def test_the_comparison_does_not_depend_on_the_order(found: list[ContainerReplica]) -> None:
    assert compare(found) == compare(found[::-1])


@given(some_replicas, some_peers)
def test_orders_go_to_live_writable_replicas_only_and_never_name_others(
    found: list[ContainerReplica], live: frozenset[PeerId]
) -> None:
    """inv-I13: nothing is done to erasure-coded, open or lone replicas."""
    chosen = targets(found, live)
    by_peer = {r.peer: r for r in found}
    for target in chosen:
        assert target.peer in live
        assert not by_peer[target.peer].read_only
        assert set(target.peers) <= live & by_peer.keys()
        assert all(r.state.is_closed and not r.is_erasure_coded for r in found if r.peer in live)
    assert len({target.peer for target in chosen}) == len(chosen)


def test_a_read_only_replica_is_a_source_but_gets_no_order() -> None:
    found = [replica("dn-1", read_only=True), replica("dn-2", root=8)]
    [target] = targets(found, {PeerId("dn-1"), PeerId("dn-2")})
    assert (target.peer, target.peers) == ("dn-2", ("dn-1",))


def out_of_round(after: Roots, *, mended: str = "", unsettled: str = "") -> list[RoundEnd]:
    """How each came out of a round; `mended` and `unsettled` name some by the last
    digit of their names.
    """
    return [
        RoundEnd(root, repaired=root[0][-1] in mended, is_settled=root[0][-1] not in unsettled)
        for root in after
    ]


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        ("112", "117", "12"),
        ("112", "187", "123"),
        ("112", "112", ""),
        ("112", "777", ""),
        ("112", "11?", ""),
        ("11?", "112", "12"),
        ("113", "11", ""),
        ("12", "72", "2"),
    ],
)
def test_those_go_again_that_differ_from_a_peer_which_changed(
    before: str, after: str, again: str
) -> None:
    def named(found: str) -> Roots:
        return tuple(
            (PeerId(f"dn-{n}"), None if r == "?" else int(r), "")
            for n, r in enumerate(found, start=1)
        )

    assert peers_to_reorder(named(before), out_of_round(named(after))) == {
        f"dn-{number}" for number in again
    }


def test_replicas_with_equal_roots_go_again_where_they_know_of_different_deletes() -> None:
    dn1, dn2 = PeerId("dn-1"), PeerId("dn-2")
    assert peers_to_reorder(
        ((dn1, 7, "a"), (dn2, 7, "b")), out_of_round(((dn1, 7, "c"), (dn2, 7, "b")))
    ) == {dn2}
    # Who tells no fingerprint is compared by its root.
    assert (
        peers_to_reorder(((dn1, 7, "a"), (dn2, 7, "")), out_of_round(((dn1, 7, "c"), (dn2, 7, ""))))
        == set()
    )


@pytest.mark.parametrize(
    ("after", "mended", "unsettled", "again"),
    [
        # The first was done before the others found and mended what their trees did not
        # show.
        ("122", "23", "1", "123"),
        ("122", "3", "1", "123"),
        ("122", "", "1", "23"),
        # Equal in the end, and what was found on the way is left standing.
        ("111", "1", "2", "2"),
        ("111", "1", "1", ""),
        ("111", "12", "", ""),
        ("111", "", "123", ""),
    ],
)
def test_what_was_mended_may_help_those_that_were_left_with_something_open(
    after: str, mended: str, unsettled: str, again: str
) -> None:
    """inv-I1: trees may be older than the damage, and roots the same before and
    after.
    """
    before = tuple((PeerId(f"dn-{n}"), 1 if n == 1 else int(after[1]), "") for n in (1, 2, 3))
    roots = tuple((PeerId(f"dn-{n}"), int(r), "") for n, r in enumerate(after, start=1))
    if after == "122" and unsettled == "1":
        # Its own root is another, now that it knows its damage.
        before = ((PeerId("dn-1"), 2, ""), *before[1:])
    assert peers_to_reorder(before, out_of_round(roots, mended=mended, unsettled=unsettled)) == {
        f"dn-{n}" for n in again
    }


@given(st.integers(0, 10), st.integers(1, 10))
def test_slots_are_never_negative_nor_above_the_limit(running: int, limit: int) -> None:
    assert 0 <= free_slots(running, limit) <= limit
    assert running + free_slots(running, limit) <= max(running, limit)


@pytest.mark.parametrize(
    ("failures", "plain_s"),
    [
        (1, 60),
        (2, 120),
        (3, 240),
        (7, 3_840),
        (11, 61_440),
        (12, 86_400),
        (13, 86_400),
        (2_000, 86_400),
    ],
)
@given(container_id=st.integers(1, 2**63 - 1))
def test_waiting_doubles_from_a_minute_to_a_day(
    failures: int, plain_s: int, container_id: int
) -> None:
    """reliability 7.7: up to a tenth more, by the container."""
    assert plain_s <= backoff_s(ContainerId(container_id), failures) <= 1.1 * plain_s


def test_containers_that_failed_together_are_not_tried_together() -> None:
    """They are spread over all of the tenth, with no gap of half a second."""
    waits_s = sorted(backoff_s(ContainerId(number), 1) for number in range(1, 101))
    assert waits_s[0] < 60.2
    assert waits_s[-1] > 65.8
    assert max(b - a for a, b in pairwise(waits_s)) < 0.5


def ended(
    previous: Visit | None, verdict: Verdict | None, *, succeeded: bool, now_s: float, root: int = 7
) -> Visit:
    return next_visit(
        previous,
        container_id=C1,
        job_id="j",
        verdict=verdict,
        succeeded=succeeded,
        verdict_roots=roots(replicas(root, 8)),
        now_s=now_s,
    )


def test_failures_in_a_row_wait_longer_and_a_success_forgets_them() -> None:
    first = ended(None, None, succeeded=False, now_s=0)
    second = ended(first, None, succeeded=False, now_s=0)
    assert second.not_before_s > 1.8 * first.not_before_s
    assert ended(second, Verdict.MATCH, succeeded=True, now_s=0).failures == 0


@pytest.mark.parametrize("verdict", [Verdict.UNRECOVERABLE, Verdict.CONFLICT])
def test_what_cannot_be_mended_rests_until_a_root_changes(verdict: Verdict) -> None:
    visit = ended(None, verdict, succeeded=False, now_s=0)
    much_later_s = 100 * BACKOFF_MOST_S
    assert not is_due(visit, roots(replicas(7, 8)), much_later_s)
    assert is_due(visit, roots(replicas(9, 8)), much_later_s)
    assert not is_due(visit, roots(replicas(9, 8)), 0)


def test_a_hopeless_verdict_is_no_success_even_where_all_orders_ended() -> None:
    assert ended(None, Verdict.CONFLICT, succeeded=True, now_s=0).failures == 1


def test_a_container_never_visited_is_due() -> None:
    assert is_due(None, (), 0)
