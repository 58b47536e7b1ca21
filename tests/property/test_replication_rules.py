"""Laws of what a replication takes of a log, and of which of two objects counts."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from replicator.origin import Origin
from replicator.stores.port import Change, ChangeKind
from replicator.syncer.conflict import DELETE_MARGIN_MS, KeySides, Standing, delete_wins, wins
from replicator.syncer.prefixes import change_within, covers, parts_below, uncovered

KEYS = ("a/x", "a/y", "ab", "b/x", "b/c/x", "c")
PREFIXES = ("a/", "b/", "b/c/", "c")
some_prefixes = st.lists(st.sampled_from(PREFIXES), unique=True, max_size=3).map(
    lambda found: tuple(sorted(found))
)


@given(some_prefixes, st.sampled_from(KEYS), st.sampled_from(KEYS))
def test_a_rename_across_the_border_is_a_new_key_or_a_deleted_one(
    prefixes: tuple[str, ...], old: str, new: str
) -> None:
    """OZ-119, OZ-120, OZ-161."""
    found = change_within(Change(1, new, "", ChangeKind.RENAME, old), prefixes)
    match covers(prefixes, old), covers(prefixes, new):
        case True, True:
            assert found is not None
            assert (found.kind, found.key, found.previous_key) == (ChangeKind.RENAME, new, old)
        case True, False:
            assert found is not None
            assert (found.kind, found.key) == (ChangeKind.DELETE, old)
        case False, True:
            assert found is not None
            assert (found.kind, found.key) == (ChangeKind.PUT, new)
        case _:
            assert found is None


@given(some_prefixes, st.sampled_from(("", "a/", "b/", "b/c/")))
def test_each_key_below_a_prefix_is_seen_once(prefixes: tuple[str, ...], prefix: str) -> None:
    for key in KEYS:
        seen = sum(key.startswith(part) for part in parts_below(prefixes, prefix))
        assert seen == (key.startswith(prefix) and covers(prefixes, key))


@given(some_prefixes, some_prefixes)
def test_what_is_missing_and_what_is_known_are_all_that_is_wanted(
    wanted: tuple[str, ...], known: tuple[str, ...]
) -> None:
    missing = uncovered(wanted, known)
    for key in KEYS:
        if covers(wanted, key):
            assert key.startswith(missing) or key.startswith(known)


origins = st.builds(
    Origin,
    bucket=st.sampled_from("abc"),
    written_ms=st.integers(1, 3),
    size_bytes=st.integers(0, 2),
    etag=st.sampled_from("ab"),
    is_copy=st.booleans(),
    properties=st.sampled_from([b"p", b"q"]),
)


@given(origins, origins)
def test_both_directions_choose_the_same_object(one: Origin, other: Origin) -> None:
    """OZ-158: never both, and neither only where nothing tells them apart."""
    assert not (wins(one, other) and wins(other, one))
    if not wins(one, other) and not wins(other, one):
        assert (one.rank, one.properties) == (other.rank, other.properties)


@given(origins, origins, origins)
def test_the_order_of_writes_has_no_circle(one: Origin, other: Origin, third: Origin) -> None:
    """OZ-155: objects that win over each other in a ring would go round for ever."""
    if wins(one, other) and wins(other, third):
        assert wins(one, third)


@given(origins, origins, st.booleans(), st.booleans())
def test_a_copy_never_takes_the_place_of_a_newer_write(
    source: Origin, target: Origin, source_was_seen: bool, target_was_seen: bool
) -> None:
    """OZ-158: only what a client wrote over the target's object ranks lower."""
    source = replace(source, is_copy=True)
    sides = KeySides(source, target, "c", source_was_seen, target_was_seen)
    is_repair = source_was_seen and target_was_seen
    if sides.standing() is Standing.NEWER and not is_repair:
        assert source.rank >= target.rank


@given(origins, st.booleans())
def test_what_the_target_has_deleted_does_not_come_back(source: Origin, seen: bool) -> None:
    """OZ-155: neither what it was seen to have, nor what was written there."""
    standing = KeySides(source, None, "c", seen, target_was_seen=False).standing()
    was_there = seen or source.bucket == "c"
    assert standing is (Standing.SUPERSEDED if was_there else Standing.NEWER)


@given(origins, st.integers(0, 200_000))
def test_a_deletion_spares_what_clients_wrote_meanwhile(target: Origin, time_ms: int) -> None:
    """OZ-158: a syncer deletes a little later than it has looked."""
    target = replace(target, is_copy=False)
    if time_ms <= target.written_ms + DELETE_MARGIN_MS:
        assert not delete_wins(time_ms, target, target.bucket)
    assert delete_wins(0, replace(target, is_copy=True), target.bucket)
