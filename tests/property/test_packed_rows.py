"""Rows that travel packed arrive as they were, each in its group."""

import random

import numpy as np
import pyarrow as pa
import pytest

from spark.columnar import COUNT, packed, packed_fields, unpacked
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, UNSEEN_SCHEMA, VERDICT_SCHEMA
from sweep.runs import RUN_SCHEMA

SCHEMAS = REPLICA_SCHEMA, VERDICT_SCHEMA, FINDING_SCHEMA, UNSEEN_SCHEMA, RUN_SCHEMA


def value(rng: random.Random, field: pa.Field, few: bool) -> object:
    """A value of a column, perhaps one of few, or null where it may be."""
    if field.nullable and rng.random() < 0.2:
        return None
    number = rng.choice((0, 1)) if few else rng.randrange(1 << 31)
    if pa.types.is_boolean(field.type):
        return bool(number % 2)
    if pa.types.is_list(field.type):
        return [f"dn-{i}" for i in range(number % 3)]
    return f"text {number}" if pa.types.is_string(field.type) else number


def through_an_exchange(rows: pa.Table, groups: np.ndarray) -> dict[int, pa.Table]:
    """By group, the rows that come out, in batches of a few packed rows."""
    schema = pa.schema([COUNT, *packed_fields(rows.schema)])
    of_rows, columns = packed(rows, groups)
    whole = pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)
    found = {}
    for group in set(of_rows.tolist()):
        ours = whole.filter(pa.array(of_rows == group))
        batches = [ours.slice(at, 3) for at in range(0, ours.num_rows, 3)]
        found[group] = unpacked(batches, rows.schema)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rows_arrive_as_they_were(seed: int) -> None:
    rng = random.Random(seed)
    schema = SCHEMAS[seed % len(SCHEMAS)]
    few = {field.name: rng.random() < 0.5 for field in schema}
    count = rng.choice((1, 7, 300, 20_000))
    rows = pa.Table.from_pylist(
        [{f.name: value(rng, f, few[f.name]) for f in schema} for _ in range(count)], schema
    )
    groups = np.array([rng.randrange(5) for _ in range(count)])
    if rng.random() < 0.5:
        groups.sort()
    found = through_an_exchange(rows, groups)
    assert found.keys() == set(groups.tolist())
    for group, held in found.items():
        assert held.schema == schema
        assert held == rows.filter(pa.array(groups == group))


def test_a_constant_column_travels_as_one_value() -> None:
    rows = pa.Table.from_pylist(
        [dict.fromkeys(REPLICA_SCHEMA.names, 0)
         | dict.fromkeys(("datanode", "volume", "state", "source", "path"), "same")
         | {"container_id": number} for number in range(1000)],
        REPLICA_SCHEMA,
    )  # fmt: skip
    _, columns = packed(rows, np.zeros(1000, np.int64))
    lengths = {
        name: len(column.flatten()) for name, column in columns.items() if name != "row_count"
    }
    assert lengths.pop("container_id") == 1000
    assert set(lengths.values()) == {1}
