"""The source of a replication, whose errors say that they are of the source.

What follows from an error depends on the side that it comes from: a source that forbids
one object, and answers for others, holds up that object alone.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.stores.errors import (
    ObjectMissingError,
    PreconditionFailedError,
    SnapshotLostError,
    StoreError,
    UnsupportedObjectError,
)
from replicator.stores.port import ObjectFacts, ObjectProperties, ObjectReader, WholeObject

T = TypeVar("T")

# These say what they are about, whichever side they come from.
_CLEAR = (
    CopyFailedError,
    ObjectMissingError,
    PreconditionFailedError,
    SnapshotLostError,
    UnsupportedObjectError,
)


class SourceReader:
    """Reads a source. What it refuses is a CopyFailedError, with SOURCE_UNREADABLE."""

    def __init__(self, reader: ObjectReader) -> None:
        """`reader` is that of the store."""
        self._reader = reader

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        return _asked(lambda: self._reader.facts(key, version=version))

    def properties(self, key: str, *, version: str = "") -> ObjectProperties:
        """See ObjectReader."""
        return _asked(lambda: self._reader.properties(key, version=version))

    def properties_of(self, facts: ObjectFacts) -> ObjectProperties:
        """See ObjectReader."""
        return _asked(lambda: self._reader.properties_of(facts))

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader."""
        with ExitStack() as opened:
            reading = self._reader.read(facts, first=first, end=end)
            # What the caller does with them may fail at the target.
            yield _pieces(_asked(lambda: opened.enter_context(reading)))

    def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
        """See ObjectReader."""
        return _asked(lambda: self._reader.read_whole(facts, with_acl=with_acl))


def _pieces(pieces: Iterator[bytes]) -> Iterator[bytes]:
    with _errors_of_source():
        yield from pieces


def _asked(call: Callable[[], T]) -> T:
    with _errors_of_source():
        return call()


@contextmanager
def _errors_of_source() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        if error.retryable or isinstance(error, _CLEAR):
            raise
        text = f"{error.message} {error.hint}".strip()
        raise CopyFailedError(FailureReason.SOURCE_UNREADABLE, text) from error
