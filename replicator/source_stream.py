"""Bytes of one object as a copy reads them: in order, from one answer of the store.

A request for each part would cost the store as much again for each, and would leave it
idle while we send. So what follows a part is asked for with it. A store gives up an
answer that nobody takes for a minute, because the target is slow; what it had already
sent is lost then. After that the copy asks for each part by itself.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from merkle.errors import ReconcileError
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import ObjectFacts

# Bodies that one answer has at most. What was begun is sent as it was, also if the
# object is replaced meanwhile: with the next answer that shows.
_BODIES_MAX = 8


class _RangeReader(Protocol):
    """Of a store's ObjectReader, what is used here."""

    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """See ObjectReader.read."""


class SourceStream:
    """Reads ranges of one object, and keeps the answer open for the next. It is of one
    thread.
    """

    def __init__(self, reader: _RangeReader) -> None:
        self._reader = reader
        self._answer: ExitStack | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._rest = memoryview(b"")
        self._facts: ObjectFacts | None = None
        self._at = self._end = 0
        self._may_wait = True

    def read(self, facts: ObjectFacts, first: int, body: memoryview, *, until: int) -> None:
        """Fill `body` with the bytes from `first` on. Those up to `until` are what the
        next calls will probably ask for.

        Raises:
            StoreError: as ObjectReader.read.
        """
        end = first + body.nbytes
        assert end <= until
        if self._continues(facts, first, end):
            try:
                self._fill(facts.key, body)
                return
            except ReconcileError:
                # Whatever ended this answer, the next one says what is the matter.
                self._may_wait = False
        self._open(facts, first, end, until)
        self._fill(facts.key, body)

    def pieces(
        self, facts: ObjectFacts, first: int, end: int, *, until: int
    ) -> Iterator[memoryview]:
        """The bytes `first` to `end`, each piece once it has arrived. Those up to
        `until` are what the next calls will probably ask for.

        Raises:
            StoreError: as ObjectReader.read.
        """
        assert end <= until
        is_open = self._continues(facts, first, end)
        if is_open:
            try:
                self._await_piece(facts.key)
            except ReconcileError:
                # As above.
                self._may_wait = is_open = False
        if not is_open:
            self._open(facts, first, end, until)
        try:
            yield from self._taken(facts.key, end - first)
        except ReconcileError:
            self._may_wait &= not is_open
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up what was not read; idempotent."""
        answer, self._answer = self._answer, None
        self._facts, self._rest = None, memoryview(b"")
        if answer is not None:
            answer.close()

    def _continues(self, facts: ObjectFacts, first: int, end: int) -> bool:
        return (self._facts, self._at) == (facts, first) and end <= self._end

    def _open(self, facts: ObjectFacts, first: int, end: int, until: int) -> None:
        self.close()
        self._end = min(until, first + _BODIES_MAX * (end - first)) if self._may_wait else end
        try:
            self._answer = ExitStack()
            opened = self._reader.read(facts, first=first, end=self._end)
            self._pieces = self._answer.enter_context(opened)
            self._facts, self._at = facts, first
        except BaseException:
            self.close()
            raise

    def _fill(self, key: str, body: memoryview) -> None:
        at = 0
        try:
            for piece in self._taken(key, body.nbytes):
                body[at : at + piece.nbytes] = piece
                at += piece.nbytes
        except BaseException:
            self.close()
            raise

    def _taken(self, key: str, length_bytes: int) -> Iterator[memoryview]:
        """The next bytes of the answer, in pieces as they come."""
        left = length_bytes
        while left:
            self._await_piece(key)
            piece = self._rest[:left]
            self._rest = self._rest[piece.nbytes :]
            left -= piece.nbytes
            # What was given out is not read again from this answer.
            self._at += piece.nbytes
            yield piece
        if self._at == self._end:
            # To its end, where the store may still say that bytes were missing, and
            # the connection is free for the next request.
            for _ in self._pieces:
                pass
            self.close()

    def _await_piece(self, key: str) -> None:
        """Wait until there are bytes in `_rest`."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                raise StoreUnavailableError(
                    f"{key}: the answer ended at {self._at} instead of {self._end}"
                )
            self._rest = memoryview(piece)
