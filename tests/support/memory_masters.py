"""The records of replication masters in memory: the twin of the databases, with a clock
that the test sets.
"""

from collections.abc import Callable, Mapping, Sequence

from replicator.master.records import Record, RecordKey, StoredRecord, StoredState


class MemoryMasterStore:
    """A MasterStore of a test."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self.clock_ms = clock_ms
        self.records: dict[RecordKey, StoredRecord] = {}
        self._last = 0

    def read(self) -> StoredState:
        return StoredState(self.clock_ms(), dict(self.records))

    def write(
        self,
        expected: Mapping[RecordKey, int],
        records: Sequence[Record],
        removed: Sequence[RecordKey] = (),
    ) -> bool:
        for key, version in expected.items():
            found = self.records.get(key)
            if (found.version if found else 0) != version:
                return False
        for record in records:
            self._last += 1
            self.records[record.key] = StoredRecord(self._last, record)
        for key in removed:
            self.records.pop(key, None)
        return True

    def close(self) -> None:
        pass
