"""Records as rows of a database: kind, name, version, and the record as JSON."""

from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from replicator.master.records import (
    AssignmentRound,
    ClusterSettings,
    PolicyRecord,
    Record,
    RecordKey,
    RecordKind,
    ReplicationState,
    SyncerRecord,
)
from runtime.errors import DatabaseError

_ADAPTERS: Mapping[RecordKind, TypeAdapter[Record]] = {
    RecordKind.SETTINGS: TypeAdapter(ClusterSettings),
    RecordKind.ROUND: TypeAdapter(AssignmentRound),
    RecordKind.POLICY: TypeAdapter(PolicyRecord),
    RecordKind.STATE: TypeAdapter(ReplicationState),
    RecordKind.SYNCER: TypeAdapter(SyncerRecord),
}


def record_json(record: Record) -> str:
    """A record as JSON."""
    return _ADAPTERS[record.key.kind].dump_json(record).decode()


def record_key(kind: str, name: str) -> RecordKey:
    """The key of a row.

    Raises:
        DatabaseError: there is no such kind.
    """
    try:
        return RecordKey(RecordKind(kind), name)
    except ValueError as error:
        raise DatabaseError(f"a row has the unknown kind {kind!r}") from error


def parsed_record(key: RecordKey, text: str) -> Record:
    """The record in a row's JSON.

    Raises:
        DatabaseError: it is not one, or another than its key says.
    """
    try:
        # NaN and Infinity are no JSON: the next write would fail.
        from_json(text, allow_inf_nan=False)
        record = _ADAPTERS[key.kind].validate_json(text)
    except (ValidationError, ValueError, AssertionError) as error:
        raise DatabaseError(
            f"the record {key.kind.value} {key.name} has an invalid value",
            hint="Restore the database, or remove that row.",
        ) from error
    if record.key != key:
        raise DatabaseError(f"the record {key.kind.value} {key.name} is of {record.key.name}")
    return record
