"""The ledger of a pair as tasks on other machines read it."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicator.copy_requests import ObjectStamp
from replicator.ledger import FILE, LedgerRow, PairLedger
from replicator.ledger_values import binary
from replicator.listing_range import ListingRange


class LedgerView(PairLedger):
    """What a settled ledger (`PairLedger.settle`) has of a range of keys. Any number of
    processes read one, while its owner changes nothing.

    It records no rows. `marks` has what it was given of damaged keys, for the owner.
    """

    def __init__(self, folder: Path, keys: ListingRange) -> None:
        """Open the ledger in a folder.

        Raises:
            LedgerDamagedError, DatabaseError: it cannot be read.
        """
        self._path, self._keys = folder / FILE, keys
        self._read_lock = threading.Lock()
        self._connection = self._reading = None
        self.marks = dict[str, ObjectStamp | None]()
        # Without locks and without a log, which a network file system may not share.
        address = f"{self._path.absolute().as_uri()}?mode=ro&immutable=1"
        with self._translated():
            self._reading = sqlite3.connect(
                address, uri=True, isolation_level=None, check_same_thread=False
            )
        self.secret = self._query(lambda values: binary(values[0]), "SELECT secret FROM pair")[0]

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def rows(self, prefix: str, *, start_after: str = "") -> Iterator[LedgerRow]:
        """See PairLedger; those of the range."""
        for row in super().rows(prefix, start_after=max(start_after, self._keys.after)):
            if self._keys.is_before(row.key):
                return
            yield row

    def save_damaged(self, key: str, stamp: ObjectStamp | None) -> None:
        """See PairLedger; kept for its owner."""
        self.marks[key] = stamp

    def save_rows(self, rows: Sequence[LedgerRow]) -> None:
        """Nothing is recorded."""

    def revise(self, found: Sequence[tuple[LedgerRow | None, LedgerRow | None]]) -> None:
        """Nothing is recorded."""
