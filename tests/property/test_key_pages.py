"""A bucket is listed whole and in the order of bytes, by requests that sort and drop
rows as a real OM does.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from ozone.key_pages import list_keys, walk_tree
from ozone.manager_values import FileStatus, KeyFacts
from tests.support.ozone_listing import ListedBucket, ListedTree

# Two characters of each kind whose orders differ, and what paths are made of.
LETTERS = "a-/\ue000\uff01😀\U0010ffff"
NAMES = st.text(LETTERS, min_size=1, max_size=4)
PARTS = st.text(LETTERS.replace("/", "!"), min_size=1, max_size=3)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)


@given(
    names=st.sets(NAMES, max_size=40),
    rows=st.integers(2, 7),
    prefix=st.sampled_from(["", "a", "😀"]),
)
@example(names={"a", "\uff01x", "😀1", "😀2", "😀3", "😀4"}, rows=3, prefix="")
@example(names={"\uff01", "😀1", "😀2", "😀3", "😀4"}, rows=3, prefix="")
def test_every_key_is_listed_once_in_order(names: set[str], rows: int, prefix: str) -> None:
    bucket = ListedBucket(names, rows_max=rows)
    wanted = sorted((name for name in names if name.startswith(prefix)), key=str.encode)
    assert [one.name for one in list_keys(bucket.page, prefix, "")] == wanted
    for after in wanted:
        left = [one.name for one in list_keys(bucket.page, prefix, after)]
        assert left == [name for name in wanted if name.encode() > after.encode()]


def test_a_careless_pager_loses_keys_of_this_bucket() -> None:
    """The model is worth something."""
    bucket = ListedBucket({"a", "\uff01x", "😀1", "😀2", "😀3", "😀4"}, rows_max=3)
    found, after, has_more = set[str](), "", True
    while has_more:
        rows, has_more = bucket.page("", after, 3)
        found |= {one.name for one in rows}
        after = rows[-1].name
    assert "\uff01x" not in found


@given(paths=st.sets(PATHS, max_size=30), rows=st.integers(2, 6))
@example(paths={"a/b/c", "a-", "x/1", "x-y", "x!", "top"}, rows=2)
def test_a_tree_is_walked_in_the_order_of_the_whole_keys(paths: set[str], rows: int) -> None:
    files = {one for one in paths if not any(other.startswith(f"{one}/") for other in paths)}
    tree = ListedTree(files, rows_max=rows)
    wanted = sorted(files, key=str.encode)
    assert [one.key for one in walk_tree(tree.page, "", "")] == wanted
    for prefix in ("a", "a/", "😀", "\uff01/"):
        below = [one for one in wanted if one.startswith(prefix)]
        assert [one.key for one in walk_tree(tree.page, prefix, "")] == below
    for after in wanted:
        left = [one.key for one in walk_tree(tree.page, "", after)]
        assert left == [one for one in wanted if one.encode() > after.encode()]


def test_values_of_the_model_are_those_of_the_client() -> None:
    (row,), has_more = ListedBucket({"k"}, rows_max=2).page("", "", 5)
    assert isinstance(row, KeyFacts)
    assert not has_more
    (entry,) = ListedTree({"d/k"}, rows_max=2).page("", "", 5)
    assert isinstance(entry, FileStatus)
    assert entry.is_directory
