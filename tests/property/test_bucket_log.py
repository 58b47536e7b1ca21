"""The changes of a bucket, told from its OM's log alone, lead from what was there to
what is there, however the OM gathers them in batches.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ozone.bucket_log import BucketLog, KeyChange, KeyEvent
from ozone.directory_map import DirectoryMap
from ozone.errors import LogGapError
from ozone.log_rows import signed
from ozone.manager_values import BucketLayout, TransactionIndex
from ozone.write_batch import parse_batch
from protos import ozone_manager_pb2 as pb
from tests.support.ozone_rows import (
    BUCKET_ID,
    VOLUME,
    VOLUME_ID,
    RowWriter,
    bucket_facts,
    file_row,
)

FLAT, TREE = BucketLayout.OBJECT_STORE, BucketLayout.FILE_SYSTEM_OPTIMIZED


def apply(held: dict[str, int], changes: tuple[KeyChange, ...]) -> None:
    """Change a copy as a target would: content is the ID of the last change. What a
    rename does not find is read from the source.
    """
    for one in changes:
        written = one.facts.update_id if one.facts is not None else 0
        match one.kind:
            case KeyEvent.PUT:
                held[one.key] = written
            case KeyEvent.DELETE:
                held.pop(one.key, None)
            case KeyEvent.RENAME:
                held.pop(one.previous, None)
                held[one.key] = written
            case KeyEvent.DELETE_PREFIX:
                for key in [key for key in held if key.startswith(one.key)]:
                    del held[key]
            case KeyEvent.RENAME_PREFIX:
                for key in [key for key in held if key.startswith(one.previous)]:
                    held[one.key + key.removeprefix(one.previous)] = held.pop(key)


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 32), batches=st.integers(1, 12), learned=st.booleans())
def test_a_copy_that_follows_the_log_is_equal(seed: int, batches: int, learned: bool) -> None:
    draw = random.Random(seed)
    names = ["a", "b", "a/b", "b/1", "c"]
    source, copy = dict[str, tuple[int, int]](), dict[str, int]()
    log = BucketLog(bucket_facts(FLAT), VOLUME_ID)
    number, index = 1, 10
    if learned:
        rows = RowWriter()
        rows.put_key("z", 99, 1)
        log.take(parse_batch(rows.encoded(number, term=1, index=9)))
        rows.delete("keyTable", f"/{VOLUME}/b/z")
        source["z"], copy["z"] = (99, 1), 1
    for _ in range(batches):
        rows = RowWriter()
        for _ in range(draw.randint(1, 4)):
            index += 1
            name, other = draw.choice(names), draw.choice(names)
            match draw.choice(["put", "delete", "rename"]):
                case "put":
                    object_id = source[name][0] if name in source else 1000 + index
                    source[name] = object_id, index
                    rows.put_key(name, object_id, index)
                case "delete" if name in source:
                    del source[name]
                    rows.delete("keyTable", f"/{VOLUME}/b/{name}")
                case "rename" if name in source and other not in source:
                    object_id, _ = source.pop(name)
                    source[other] = object_id, index
                    rows.delete("keyTable", f"/{VOLUME}/b/{name}")
                    rows.put_key(other, object_id, index)
                    key = f"/{VOLUME}/b/{object_id}"
                    rows.put("snapshotRenamedTable", key, f"/{VOLUME}/b/{name}".encode())
                case _:
                    pass
        batch = parse_batch(rows.encoded(number, term=1, index=index))
        number = batch.last + 1
        found = log.take(batch)
        assert found.transaction == TransactionIndex(1, index)
        apply(copy, found.changes)
        for name in found.unplaced:
            # As the store does: what is missing now was deleted.
            if name not in source:
                copy.pop(name, None)
    assert copy == {name: written for name, (_, written) in source.items()}


def test_a_rename_is_one_change_and_an_overwrite_none_of_it() -> None:
    log = BucketLog(bucket_facts(FLAT), VOLUME_ID)
    rows = RowWriter()
    rows.put_key("a", 5, 1)
    log.take(parse_batch(rows.encoded(1, term=1, index=1)))
    rows = RowWriter()
    rows.delete("keyTable", f"/{VOLUME}/b/a")
    rows.put_key("new", 5, 2)
    (change,) = log.take(parse_batch(rows.encoded(10, term=1, index=2))).changes
    assert (change.kind, change.key, change.previous) == (KeyEvent.RENAME, "new", "a")


def test_rows_of_other_buckets_are_no_changes_of_this_one() -> None:
    log = BucketLog(bucket_facts(FLAT, bucket="other"), VOLUME_ID)
    rows = RowWriter()
    rows.put_key("a", 5, 1)
    rows.delete("keyTable", f"/{VOLUME}/b/gone")
    found = log.take(parse_batch(rows.encoded(1, term=1, index=1)))
    assert (found.changes, found.unplaced) == ((), ())


def test_a_deleted_bucket_ends_its_log() -> None:
    log = BucketLog(bucket_facts(FLAT), VOLUME_ID)
    rows = RowWriter()
    info = pb.BucketInfo(volumeName=VOLUME, bucketName="x", isVersionEnabled=False, storageType=1)
    rows.put("bucketTable", f"/{VOLUME}/x", info.SerializeToString())
    log.take(parse_batch(rows.encoded(1, term=1, index=1)))
    rows = RowWriter()
    rows.delete("bucketTable", f"/{VOLUME}/b")
    with pytest.raises(LogGapError):
        log.take(parse_batch(rows.encoded(3, term=1, index=2)))


class TreeWriter:
    """A bucket of directories, and the log of all that happens to it."""

    def __init__(self) -> None:
        self.rows = RowWriter()
        self.directories = DirectoryMap(BUCKET_ID)
        self.files = dict[tuple[int, str], tuple[int, int]]()
        self.index = 10

    def mkdir(self, parent: int, name: str) -> None:
        self.index += 1
        object_id = (1 << 62) + self.index
        self.directories.put(object_id, parent, name)
        self.rows.put_directory(parent, name, object_id, self.index)

    def put(self, parent: int, name: str) -> None:
        self.index += 1
        object_id = self.files.get((parent, name), (1000 + self.index, 0))[0]
        self.files[parent, name] = object_id, self.index
        self.rows.put_file(parent, name, object_id, self.index)

    def delete(self, parent: int, name: str) -> None:
        del self.files[parent, name]
        self.rows.delete("fileTable", file_row(parent, name))

    def move(self, object_id: int, parent: int, name: str) -> None:
        self.index += 1
        old = self.directories.place(object_id)
        assert old is not None
        self.rows.delete("directoryTable", file_row(*old))
        self.directories.put(object_id, parent, name)
        self.rows.put_directory(parent, name, object_id, self.index)

    def remove(self, object_id: int) -> None:
        place = self.directories.place(object_id)
        assert place is not None
        self.directories.remove(object_id)
        self.rows.delete_directory(*place, object_id)

    def ids(self) -> list[int]:
        """Directories within reach, and the bucket itself."""
        found = range((1 << 62) + 10, (1 << 62) + self.index + 1)
        return [BUCKET_ID, *(one for one in found if self.directories.prefix(one) is not None)]

    def content(self) -> dict[str, int]:
        prefixes = {parent: self.directories.prefix(parent) for parent, _ in self.files}
        return {
            f"{prefixes[parent]}{name}": written
            for (parent, name), (_, written) in self.files.items()
            if prefixes[parent] is not None
        }


@settings(max_examples=300)
@given(seed=st.integers(0, 1 << 32), batches=st.integers(1, 12), at_once=st.integers(1, 3))
def test_a_copy_of_a_tree_follows_its_directories(seed: int, batches: int, at_once: int) -> None:
    draw = random.Random(seed)
    tree, copy = TreeWriter(), dict[str, int]()
    log = BucketLog(bucket_facts(TREE), VOLUME_ID, DirectoryMap(BUCKET_ID))
    tree.mkdir(BUCKET_ID, "first")
    tree.put(BUCKET_ID, "learned")
    tree.delete(BUCKET_ID, "learned")
    number = 1
    for _ in range(batches):
        for _ in range(draw.randint(1, at_once)):
            _step(tree, draw)
        batch = parse_batch(tree.rows.encoded(number, term=1, index=tree.index))
        tree.rows, number = RowWriter(), batch.last + 1
        before = dict(copy)
        try:
            found = log.take(batch)
        except LogGapError:
            # Named, and healed by a comparison: allowed where much happened at once.
            assert at_once > 1
            return
        apply(copy, found.changes)
        for name in found.unplaced:
            if name not in tree.content():
                copy.pop(name, None)
        assert copy == tree.content(), (before, found.changes)


def _step(tree: TreeWriter, draw: random.Random) -> None:
    """One thing that happens, where it can."""
    ids, name = tree.ids(), draw.choice("xyz")
    parent = draw.choice(ids)
    is_free = tree.directories.child(parent, name) is None and (parent, name) not in tree.files
    match draw.choice(["mkdir", "put", "put", "delete", "move", "remove"]):
        case "mkdir" if is_free:
            tree.mkdir(parent, name)
        case "put" if tree.directories.child(parent, name) is None:
            tree.put(parent, name)
        case "delete" if (parent, name) in tree.files:
            tree.delete(parent, name)
        case "move" if is_free and len(ids) > 1:
            one = draw.choice(ids[1:])
            path, to = tree.directories.prefix(one), tree.directories.prefix(parent)
            assert path is not None
            assert to is not None
            if not to.startswith(path):
                tree.move(one, parent, name)
        case "remove" if len(ids) > 1:
            tree.remove(draw.choice(ids[1:]))
        case _:
            pass


def test_a_directory_renamed_before_its_log_was_followed_is_a_gap() -> None:
    tree = TreeWriter()
    tree.mkdir(BUCKET_ID, "old")
    (object_id,) = tree.ids()[1:]
    tree.rows = RowWriter()
    tree.move(object_id, BUCKET_ID, "new")
    batch = parse_batch(tree.rows.encoded(5, term=1, index=3))
    # The directories were looked at after the rename.
    log = BucketLog(bucket_facts(TREE), VOLUME_ID, tree.directories, known_from=batch.last)
    with pytest.raises(LogGapError):
        log.take(batch)


def test_ids_in_rows_have_a_sign() -> None:
    assert signed(9223372036854799104) == "-9223372036854752512"
