"""Listing a bucket of Ozone by its OM, in the order of the bytes of the keys.

Gateways lose keys of a listing, and show a snapshot that is gone as an empty bucket.
"""

from collections.abc import Iterator

from ozone.errors import ManagerMissingError
from ozone.key_pages import list_keys, walk_tree
from ozone.manager_values import FileStatus, KeyFacts
from replicator.stores.ozone_bucket import OzoneBucket, facts_of
from replicator.stores.port import ObjectFacts


class OzoneLister:
    """See ObjectLister. Directories are no objects."""

    def __init__(self, bucket: OzoneBucket) -> None:
        self._bucket = bucket

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """See ObjectLister."""
        bucket = self._bucket
        begin, after = bucket.name(prefix), bucket.name(start_after) if start_after else ""
        if after and after.encode() > begin.encode() and not after.startswith(begin):
            return
        if after and not after.startswith(begin):
            # The OM would begin there, and end at the first key without the prefix.
            after = ""
        with bucket.guarded(f"cannot list {'/'.join(bucket.place)}"):
            for one in self._tree(begin, after) if bucket.is_tree else self._keys(begin, after):
                bucket.seen.note(one.update_id)
                key = bucket.relative(one.name)
                if key is not None and one.is_finished:
                    yield facts_of(key, one)

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """See ObjectLister: Ozone keeps no versions that can be read."""
        return self.list_objects(prefix)

    def _keys(self, begin: str, after: str) -> Iterator[KeyFacts]:
        bucket = self._bucket

        def page(prefix: str, last: str, count: int) -> tuple[tuple[KeyFacts, ...], bool]:
            return bucket.manager.list_keys(*bucket.place, prefix=prefix, after=last, count=count)

        return list_keys(page, begin, after)

    def _tree(self, begin: str, after: str) -> Iterator[KeyFacts]:
        for one in walk_tree(self.directory_page, begin, after):
            yield one.facts

    def directory_page(self, directory: str, start: str, count: int) -> tuple[FileStatus, ...]:
        """Entries of a directory by its full name; none where there is no directory.

        Raises:
            ManagerError: the OM did not say.
        """
        try:
            return self._bucket.manager.list_directory(
                *self._bucket.place, directory, start=start, count=count
            )
        except ManagerMissingError:
            return ()
