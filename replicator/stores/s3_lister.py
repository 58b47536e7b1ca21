"""Listing the objects of one S3 bucket, in the order of the bytes of their keys."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TypeVar

from replicator.stores.errors import StoreError
from replicator.stores.port import ObjectFacts
from replicator.stores.s3_bucket import S3Bucket, translated
from replicator.stores.s3_documents import (
    ListingPage,
    VersionsPage,
    fits_xml,
    parse_listing,
    parse_versions,
)
from runtime.s3 import Query

Page = TypeVar("Page", ListingPage, VersionsPage)
_PAGE_KEYS = "1000"


class S3Lister:
    """See ObjectLister."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        """See ObjectLister. A gateway of Ozone lists in another order: its listing is
        read whole and sorted here.
        """
        found = self._current(prefix, start_after)
        if self._bucket.behaviour.is_ozone:
            by_key = {facts.key: facts for facts in found}
            found = (by_key[key] for key in sorted(by_key, key=str.encode))
        return _in_order(found, start_after)

    def list_versions(self, prefix: str) -> Iterator[ObjectFacts]:
        """See ObjectLister; where the bucket keeps no versions, its objects."""
        if not self._bucket.behaviour.keeps_versions:
            return self.list_objects(prefix)
        return _grouped(self._versions(prefix))

    def _current(self, prefix: str, start_after: str) -> Iterator[ObjectFacts]:
        query = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", _PAGE_KEYS)]
        query.append(("prefix", self._bucket.prefix + prefix))
        # The answer repeats this text, and Ceph leaves characters in it that XML lacks.
        # What is listed because less was sent is passed over afterwards.
        after = "".join(takewhile(fits_xml, start_after))
        if after and not self._bucket.behaviour.is_ozone:
            query.append(("start-after", self._bucket.prefix + after))
        tokens = set[str]()
        page = self._page(query, parse_listing)
        while True:
            yield from self._relative(page.objects, prefix)
            if not page.token:
                return
            if page.token in tokens:
                raise StoreError(f"the listing of {self._bucket.bucket} does not advance")
            tokens.add(page.token)
            page = self._page([*query, ("continuation-token", page.token)], parse_listing)

    def _versions(self, prefix: str) -> Iterator[ObjectFacts]:
        query = [("versions", ""), ("encoding-type", "url"), ("max-keys", _PAGE_KEYS)]
        query.append(("prefix", self._bucket.prefix + prefix))
        page = self._page(query, parse_versions)
        while True:
            yield from self._relative(page.versions, prefix)
            if not page.key_marker:
                return
            markers = [("key-marker", page.key_marker)]
            if page.version_marker:
                markers.append(("version-id-marker", page.version_marker))
            before = (page.key_marker, page.version_marker)
            page = self._page([*query, *markers], parse_versions)
            if (page.key_marker, page.version_marker) == before:
                raise StoreError(f"the listing of {self._bucket.bucket} does not advance")

    def _page(self, query: Query, parse: Callable[[bytes], Page]) -> Page:
        bucket = self._bucket
        with translated(f"cannot list {bucket.bucket}/{bucket.prefix}"):
            return parse(bucket.client.request("GET", bucket.bucket, query=query).body)

    def _relative(self, listed: Sequence[ObjectFacts], prefix: str) -> Iterator[ObjectFacts]:
        for facts in listed:
            key = self._bucket.relative(facts.key)
            if key is None:
                continue
            if not key.startswith(prefix):
                raise StoreError(f"the store listed {key!r}, which is not below {prefix!r}")
            yield ObjectFacts(
                key,
                facts.size_bytes,
                facts.etag,
                facts.modified_ms,
                facts.version,
                facts.is_delete_marker,
                self._bucket.hashes(facts.etag),
            )


def _in_order(found: Iterator[ObjectFacts], start_after: str) -> Iterator[ObjectFacts]:
    """Those after a key; an error where the order of bytes is broken."""
    before = start_after.encode()
    bound = before
    for facts in found:
        name = facts.key.encode()
        if name <= bound and start_after:
            continue
        if name <= before and before:
            raise StoreError(f"the store lists {facts.key!r} out of order")
        before = name
        yield facts


def _grouped(found: Iterator[ObjectFacts]) -> Iterator[ObjectFacts]:
    """Versions, an error where the order of their keys is broken."""
    before = b""
    for facts in found:
        name = facts.key.encode()
        if name < before:
            raise StoreError(f"the store lists {facts.key!r} out of order")
        before = name
        yield facts
