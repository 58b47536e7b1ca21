"""What the OM's difference of two snapshots means for keys.

Its entries are paths: DELETE, MODIFY and the source of RENAME of the older snapshot,
CREATE and the target of RENAME of the newer. In an FSO bucket a path may be a directory
with all that is below it. In another bucket paths lack slashes that the keys have. So
an entry says where to look, and both snapshots say what is there.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from ozone.key_pages import walk_tree
from ozone.manager_values import DiffEntry, DiffKind, KeyFacts
from replicator.stores.ozone_bucket import OzoneBucket
from replicator.stores.ozone_lister import OzoneLister
from replicator.stores.port import Change, ChangeKind

# The last text before a slash, by bytes.
_BEFORE_SLASH = ".\U0010ffff"


def changes_of(
    entries: Iterable[DiffEntry], older: OzoneBucket, newer: OzoneBucket
) -> Iterator[Change]:
    """Changes of keys; renames are in memory.

    Raises:
        StoreError: the OM did not say.
    """
    pair = _SnapshotPair(older, newer)
    renames, is_renamed = dict[str, str](), False
    for entry in entries:
        if entry.kind is DiffKind.RENAME:
            renames[entry.path] = entry.target
            continue
        if entry.kind is not DiffKind.DELETE and not is_renamed:
            is_renamed = True
            yield from pair.renamed(renames)
        match entry.kind:
            case DiffKind.DELETE:
                yield from pair.deleted(entry.path)
            case DiffKind.CREATE:
                yield from pair.touched(entry.path)
            case DiffKind.MODIFY:
                yield from pair.touched(_moved(entry.path, renames))
    if not is_renamed:
        yield from pair.renamed(renames)


class _SnapshotPair:
    """Looks at paths in both snapshots."""

    def __init__(self, older: OzoneBucket, newer: OzoneBucket) -> None:
        self._older, self._newer = older, newer
        self._has_below = lru_cache(maxsize=100_000)(self._look_below)

    def deleted(self, path: str) -> Iterator[Change]:
        """All keys that a deleted path stood for."""
        if self._older.is_tree and self._find(self._older, path) is None:
            for below in self._below(self._older, path):
                yield from self._state(below)
            return
        yield from self.touched(path)

    def touched(self, path: str) -> Iterator[Change]:
        """The keys that a path stands for, as they are in the newer snapshot."""
        for name in [path] if self._older.is_tree else self._names(path):
            yield from self._state(name)

    def renamed(self, renames: dict[str, str]) -> Iterator[Change]:
        """Objects that have another key, or are below a directory that has."""
        for path, target in renames.items():
            is_file = self._find(self._older, path) is not None
            if self._older.is_tree and not is_file and path != target:
                for below in self._below(self._older, path):
                    yield from self._rename(below, _moved(below, renames))
                continue
            names = {path} if self._older.is_tree else {*self._names(path), *self._names(target)}
            if names <= {path, target}:
                yield from self._rename(path, target)
            else:
                for name in sorted(names | {target}):
                    yield from self._state(name)

    def _rename(self, path: str, target: str) -> Iterator[Change]:
        old, new = self._find(self._older, path), self._find(self._newer, target)
        key, previous = self._newer_key(target), self._newer_key(path)
        is_one = old is not None and new is not None and old.object_id == new.object_id
        if not is_one or path == target or key is None or previous is None:
            yield from self._state(path)
            if target != path:
                yield from self._state(target)
            return
        yield Change(0, key, "", ChangeKind.RENAME, previous)
        if old is None or new is None or old.update_id == new.update_id:
            return
        if (old.etag, old.metadata, old.tags) != (new.etag, new.metadata, new.tags):
            yield Change(0, key, "", ChangeKind.PUT)

    def _state(self, name: str) -> Iterator[Change]:
        """That a key was written or deleted, as the newer snapshot has it or not."""
        key = self._newer_key(name)
        if key is None:
            return
        if self._exists(self._newer, name):
            yield Change(0, key, "", ChangeKind.PUT)
        elif self._exists(self._older, name):
            yield Change(0, key, "", ChangeKind.DELETE)

    def _newer_key(self, name: str) -> str | None:
        return self._newer.relative(self._newer.root + name)

    def _find(self, bucket: OzoneBucket, name: str) -> KeyFacts | None:
        key = bucket.relative(bucket.root + name)
        return None if key is None else bucket.key(key)

    def _exists(self, bucket: OzoneBucket, name: str) -> bool:
        if name.endswith("//"):
            # The OM takes it for a name with one slash.
            return name in self._rows(bucket, name.removesuffix("/"))
        return self._find(bucket, name) is not None

    def _below(self, bucket: OzoneBucket, path: str) -> Iterator[str]:
        """The files below a directory, by their whole names."""
        page = OzoneLister(bucket).directory_page
        for one in walk_tree(page, f"{bucket.root}{path}/", ""):
            yield one.key.removeprefix(bucket.root)

    def _names(self, path: str) -> list[str]:
        """All names that are this path once doubled, leading and trailing slashes are
        taken off, of which there is a key with the same beginning.
        """
        begins = [""]
        for part in path.split("/"):
            grown = [
                slashes + part
                for begin in begins
                for slashes in self._with_slashes(f"{begin}/" if begin.strip("/") else begin)
            ]
            begins = grown
        return [name for begin in begins for name in self._with_slashes(begin)]

    def _with_slashes(self, begin: str) -> list[str]:
        found = [begin]
        while self._has_below(found[-1]):
            found.append(found[-1] + "/")
        return found

    def _look_below(self, begin: str) -> bool:
        """Whether there is a key in either snapshot that begins so and goes on with a
        slash.
        """
        return any(self._rows(bucket, begin) for bucket in (self._older, self._newer))

    def _rows(self, bucket: OzoneBucket, begin: str) -> list[str]:
        """Names of some keys that begin so and go on with a slash: the first, where
        there is any. In UTF-16 order a slash comes as early as by bytes.
        """
        with bucket.guarded("cannot compare snapshots"):
            rows, _ = bucket.manager.list_keys(
                *bucket.place,
                prefix=bucket.root + begin,
                after=bucket.root + begin + _BEFORE_SLASH,
                count=2,
            )
        names = [row.name.removeprefix(bucket.root) for row in rows]
        return [name for name in names if name.startswith(f"{begin}/")]


def _moved(path: str, renames: dict[str, str]) -> str:
    """Where a path of the older snapshot is in the newer one."""
    if path in renames:
        return renames[path]
    above = path
    while "/" in above:
        above = above.rpartition("/")[0]
        if above in renames:
            return renames[above] + path[len(above) :]
    return path
