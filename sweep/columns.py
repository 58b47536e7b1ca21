"""The columns of a chunk table as anybody may have written them: cast to CHUNK_SCHEMA,
and checked.
"""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from chunktable.manifest import TableRefusal, table_error
from chunktable.schema import CHUNK_SCHEMA, SOURCES
from merkle.replica import ReplicaState
from sweep.rows import TEXT
from sweep.runs import KEY

# The values of columns that are not free text.
_KNOWN = {
    "state": pa.array([state.value for state in ReplicaState], pa.string()),
    "source": pa.array(SOURCES, pa.string()),
}

_NAMES = {name: frozenset(known.to_pylist()) for name, known in _KNOWN.items()}


def cast_column(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column cast to its type in CHUNK_SCHEMA; text may stay a dictionary."""
    if column.type == field.type:
        return column
    if pa.types.is_dictionary(column.type):
        if field.name in TEXT and not column.dictionary.null_count:
            return pa.DictionaryArray.from_arrays(
                column.indices.cast(pa.int32()), column.dictionary.cast(pa.string())
            )
        column = column.cast(column.type.value_type)
    # Times may lose precision; integers must not.
    return column.cast(field.type, safe=field.name != "scanned_at")


def to_batch(columns: Mapping[str, pa.Array], count: int) -> pa.RecordBatch:
    """A batch of CHUNK_SCHEMA, with constant columns expanded."""
    arrays = []
    for field in CHUNK_SCHEMA:
        column = columns[field.name]
        if len(column) != count:
            column = pa.repeat(column[0], count)
        arrays.append(column.cast(field.type) if column.type != field.type else column)
    return pa.RecordBatch.from_arrays(arrays, schema=CHUNK_SCHEMA)


def check_values(location: str, columns: Mapping[str, pa.Array]) -> None:
    """Check that every row names its replica, and that no state or source is unknown.

    A row without a key belongs to a replica that would be judged without it. Nulls in
    other columns, whose replica is known, are its finding (sweep.exact).

    Raises:
        ChunkTableError: it is otherwise.
    """
    for name in KEY:
        if columns[name].null_count:
            raise table_error(TableRefusal.ROWS, f"{location} has rows without {name}")
    check_known(location, columns)


def has_known_values(values: Mapping[str, pa.Array]) -> bool:
    """Whether all of these values of columns, by column, are known."""
    return all(known.issuperset(values[name].to_pylist()) for name, known in _NAMES.items())


def check_known(location: str, columns: Mapping[str, pa.Array]) -> None:
    """Check that no state or source is unknown.

    Raises:
        ChunkTableError: one is.
    """
    for name, known in _KNOWN.items():
        column = columns[name]
        is_encoded = pa.types.is_dictionary(column.type)
        held = (column.dictionary if is_encoded else column.unique()).drop_null().cast(pa.string())
        unknown = held.filter(pc.invert(pc.is_in(held, value_set=known)))
        # A dictionary may have values that no row has.
        if len(unknown):
            used = column.dictionary_decode().cast(pa.string()).unique() if is_encoded else held
            wrong = sorted(set(unknown.to_pylist()) & set(used.to_pylist()))
            if wrong:
                text = f"{location} has rows with the unknown {name} {wrong[0]!r}"
                raise table_error(TableRefusal.ROWS, text)
