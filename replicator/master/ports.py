"""Where masters keep their records."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from replicator.master.records import Record, RecordKey, StoredState


class MasterStore(Protocol):
    """The database of one or several masters. Thread-safe."""

    def read(self) -> StoredState:
        """All records as of one moment, and what the database's clock said then. The
        clock may jump.

        Raises:
            DatabaseError: the database does not answer, or a row has an invalid value.
        """

    def write(
        self,
        expected: Mapping[RecordKey, int],
        records: Sequence[Record],
        removed: Sequence[RecordKey] = (),
    ) -> bool:
        """Write and remove records, all or none of them, durably. Nothing is changed,
        and the answer is False, unless all records in `expected` have these versions
        still; 0 is a record that does not exist.

        Raises:
            DatabaseError: the database does not answer; it is not known whether the
                records were written.
        """

    def close(self) -> None:
        """Close the database; idempotent."""
