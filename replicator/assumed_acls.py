"""Which objects were copied without a look at their ACL.

No answer of S3 to a GET or a listing tells an ACL: it takes one request of three for a
small object, and hardly an object has another one than the default. So once many in a
row had that, the next ones are taken to have it, and their ACLs are read when nothing
else waits. Until then it is known of each that this is still to be done.
"""

import threading
from typing import Protocol

from replicator.copy_requests import AclSeen, CopyResult
from replicator.ledger import LedgerRow
from replicator.stores.port import ObjectFacts

# Default ACLs in a row from which on they are expected.
DEFAULT_IN_A_ROW = 64
# While so many are to be read, others are read before they are copied.
_ASSUMED_MAX = 4_000


class Settling(Protocol):
    """What is being done about an ACL that was another one."""

    @property
    def is_done(self) -> bool:
        """Whether the target has it."""


class AssumedAcls:
    """The keys of one pair whose ACLs are to be read. Thread-safe."""

    def __init__(
        self, *, default_in_a_row: int = DEFAULT_IN_A_ROW, assumed_max: int = _ASSUMED_MAX
    ) -> None:
        """After so many default ACLs in a row they are expected, while fewer than
        `assumed_max` are to be read. Nothing is assumed before somebody promises to
        read it: `is_watched`.
        """
        self.is_watched = False
        self._default_in_a_row = default_in_a_row
        self._assumed_max = assumed_max
        self._lock = threading.Lock()
        self._in_a_row = 0
        # The versions that were copied, the first copy first.
        self._copied = dict[str, ObjectFacts]()
        self._asked = set[str]()
        self._settling = list[tuple[int, Settling]]()
        self._least_ms: int | None = None
        self._settled = 0

    @property
    def may_assume(self) -> bool:
        """Whether the next object may be copied without its ACL."""
        has_room = len(self._copied) < self._assumed_max
        return self.is_watched and self._in_a_row >= self._default_in_a_row and has_room

    @property
    def oldest_ms(self) -> int | None:
        """When the oldest object was written whose ACL may be missing at the target, or
        earlier; None where there is none.
        """
        with self._lock:
            self._settling = [one for one in self._settling if not one[1].is_done]
            times = [at_ms for at_ms, _ in self._settling]
            if self._least_ms is not None:
                times.append(self._least_ms)
            return min(times, default=None)

    def note(self, result: CopyResult) -> None:
        """Note what a copy has seen of the ACL."""
        source = result.source
        with self._lock:
            if result.acl is AclSeen.ASSUMED:
                self._asked.discard(source.key)
                self._copied.pop(source.key, None)
                self._copied[source.key] = source
                least_ms = source.modified_ms if self._least_ms is None else self._least_ms
                self._least_ms = min(least_ms, source.modified_ms)
            elif result.acl is not AclSeen.NOTHING:
                self._in_a_row = self._in_a_row + 1 if result.acl is AclSeen.DEFAULT else 0
                self._drop(source.key)

    def next(self) -> str | None:
        """A key whose ACL is to be read, told once."""
        with self._lock:
            key = next((one for one in self._copied if one not in self._asked), None)
            if key is not None:
                self._asked.add(key)
            return key

    def give_back(self) -> None:
        """Tell all keys again that are not settled."""
        with self._lock:
            self._asked.clear()

    def forget(self, key: str, row: LedgerRow | None) -> bool:
        """Whether `row`, the key's row by now, is of another version than the one that
        was noted: that is the matter of another copy.
        """
        with self._lock:
            copied = self._copied.get(key)
            if copied is not None and row is not None and row.source.agrees(copied):
                return False
            self._drop(key)
            return True

    def settle(self, row: LedgerRow, settling: Settling | None, *, is_default: bool) -> None:
        """Note that the ACL of the version of a row was read; `settling` brings it to
        the target.
        """
        with self._lock:
            copied = self._copied.get(row.key)
            if copied is None or not row.source.agrees(copied):
                return
            if not is_default:
                self._in_a_row = 0
            if settling is not None:
                self._settling.append((copied.modified_ms, settling))
            self._drop(row.key)

    def _drop(self, key: str) -> None:
        self._asked.discard(key)
        if self._copied.pop(key, None) is None:
            return
        self._settled += 1
        # Not for each: the least of many would be looked for again and again.
        if self._settled * 4 > len(self._copied):
            self._settled = 0
            self._least_ms = min((one.modified_ms for one in self._copied.values()), default=None)
