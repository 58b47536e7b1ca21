"""Laws of what a replication takes of a log, and of which of two objects counts."""

from hypothesis import given
from hypothesis import strategies as st

from replicator.stores.port import Change, ChangeKind, ObjectFacts
from replicator.syncer.conflict import wins
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


facts = st.builds(
    lambda seconds, size, etag: ObjectFacts("k", size, etag, seconds * 500),
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from(["a", "b"]),
)


@given(facts, facts)
def test_both_directions_choose_the_same_object(one: ObjectFacts, other: ObjectFacts) -> None:
    """OZ-158: never both, and neither only where nothing tells them apart."""
    assert not (wins(one, other) and wins(other, one))
    if not wins(one, other) and not wins(other, one):
        assert (one.size_bytes, one.etag) == (other.size_bytes, other.etag)
