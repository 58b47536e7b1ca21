"""The stages of a sweep that need all rows of a container at once, as pure functions.

A stage maps tables with all rows of some containers to tables about these containers.
An engine decides how the containers are grouped and where a stage runs: the local
engine reads one range of containers after the other, and Spark shuffles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sweep.compare import compare_replicas
from sweep.duplicates import duplicate_findings
from sweep.faults import list_once
from sweep.fragments import Int64s
from sweep.model import (
    FINDING_SCHEMA,
    REPLICA_SCHEMA,
    REQUEST_SCHEMA,
    VERDICT_SCHEMA,
    RootMethod,
)
from sweep.order import ReplicaOrder
from sweep.runs import RUN_SCHEMA, settle

Tables = Mapping[str, pa.Table]


class ContainerStage(Protocol):
    """A stage. It can be pickled."""

    @property
    def schemas(self) -> Mapping[str, pa.Schema]:
        """The schemas of the tables that it returns."""
        ...

    def __call__(self, tables: Tables) -> Tables:
        """The tables about some containers, from all of their rows in each input."""
        ...


@dataclass(frozen=True, slots=True)
class CompareStage:
    """Joins runs to replicas, and compares the replicas of each container.

    Inputs: `runs` (RUN_SCHEMA), `replicas` (REPLICA_SCHEMA) that are whole, and
    `requested` (REQUEST_SCHEMA), the containers whose rows must be sorted.

    Outputs: `roots`, the replicas; `judged`, the verdicts; `faults`, findings; and for
    the containers to inspect `candidates` with their replicas, `chosen`. The containers
    of `exact` are in no other output: their rows must be sorted.
    """

    @property
    def schemas(self) -> Mapping[str, pa.Schema]:
        """See ContainerStage."""
        return {
            "roots": REPLICA_SCHEMA,
            "judged": VERDICT_SCHEMA,
            "faults": FINDING_SCHEMA,
            "candidates": REQUEST_SCHEMA,
            "chosen": REPLICA_SCHEMA,
            "exact": REQUEST_SCHEMA,
        }

    def __call__(self, tables: Tables) -> Tables:
        """See ContainerStage."""
        runs = tables.get("runs", RUN_SCHEMA.empty_table())
        whole = tables.get("replicas", REPLICA_SCHEMA.empty_table())
        requested = tables.get("requested", REQUEST_SCHEMA.empty_table())
        settled = settle(runs)
        replicas, order = _sorted(pa.concat_tables([settled.replicas, whole]))
        mixed = _mixed(replicas, order, runs)
        exact = np.union1d(np.union1d(settled.exact, _ids(requested)), mixed)
        if len(exact):
            is_exact = pc.is_in(replicas["container_id"], value_set=pa.array(exact))
            replicas = replicas.filter(pc.invert(is_exact))
            order = ReplicaOrder.of(replicas)
        compared = compare_replicas(replicas, order)
        is_candidate = pc.is_in(replicas["container_id"], pa.array(compared.candidates))
        chosen = replicas.filter(is_candidate)
        return {
            "roots": replicas,
            "judged": compared.verdicts,
            "faults": pa.concat_tables([compared.findings, duplicate_findings(replicas, order)]),
            "candidates": requests(compared.candidates, _rows_of(compared.candidates, chosen)),
            "chosen": chosen,
            "exact": requests(exact, _rows_of(exact, runs, whole, requested)),
        }


@dataclass(frozen=True, slots=True)
class FindingsStage:
    """Lists each fault once, and sorts findings by container, block and offset.

    Input and output: `findings` (FINDING_SCHEMA).
    """

    @property
    def schemas(self) -> Mapping[str, pa.Schema]:
        """See ContainerStage."""
        return {"findings": FINDING_SCHEMA}

    def __call__(self, tables: Tables) -> Tables:
        """See ContainerStage."""
        rows = list_once(tables["findings"])
        names = ("container_id", "block_id", "chunk_offset", "kind", "detail")
        return {"findings": sort_by(rows, *names)}


def _mixed(replicas: pa.Table, order: ReplicaOrder, runs: pa.Table) -> Int64s:
    """The containers whose rows must be sorted because of where they were: in several
    inputs. `replicas` are sorted.

    Fingerprints of SQL are comparable only with each other. A replica whose rows were
    folded in two places may be whole in neither.
    """
    paths, ids = replicas["path"], replicas["container_id"].to_numpy()
    is_sql = pc.equal(paths, RootMethod.SQL.value).to_numpy()
    folded = pc.is_in(paths, value_set=_FOLDED).to_numpy()
    mixed = np.empty(0, np.int64)
    if is_sql.any():
        mixed = np.intersect1d(ids[is_sql], np.union1d(ids[folded], _ids(runs)))
    settled = folded | is_sql
    again = settled[1:] & settled[:-1] & ~order.begins_volume[1:]
    several: Int64s = np.union1d(mixed, ids[1:][again])
    return several


_FOLDED = pa.array([RootMethod.FILE_WISE.value, RootMethod.FRAGMENTS.value])


def requests(container_ids: Int64s, rows: Int64s) -> pa.Table:
    """A table of REQUEST_SCHEMA."""
    return pa.table([pa.array(container_ids), pa.array(rows)], schema=REQUEST_SCHEMA)


def requested_rows(requested: pa.Table) -> tuple[Int64s, Int64s]:
    """The containers of a table of REQUEST_SCHEMA, ascending, and the approximate
    number of rows of each.
    """
    ids = _ids(requested)
    return ids, _rows_of(ids, requested)


# The columns whose sum is about the number of rows that a row of each table stands for;
# a deleted block counts as one.
_COUNTED = (
    ("rows",),
    ("chunks", "blocks"),
)


def _rows_of(container_ids: Int64s, *tables: pa.Table) -> Int64s:
    """The approximate number of rows of these containers, at least one each. IDs
    ascend.
    """
    rows = np.zeros(len(container_ids), np.int64)
    for table in tables:
        names = next(names for names in _COUNTED if names[0] in table.column_names)
        held = table.filter(pc.is_in(table["container_id"], pa.array(container_ids, pa.int64())))
        if held.num_rows:
            places = np.searchsorted(container_ids, held["container_id"].to_numpy())
            np.add.at(rows, places, np.sum([held[name].to_numpy() for name in names], axis=0))
    return np.maximum(rows, 1)


def by_replica(replicas: pa.Table) -> pa.Table:
    """The replicas by container, datanode and volume."""
    return _sorted(replicas)[0]


def _sorted(replicas: pa.Table) -> tuple[pa.Table, ReplicaOrder]:
    order = ReplicaOrder.of(replicas)
    return replicas.take(pa.array(order.rows)), order.of_sorted()


def sort_by(table: pa.Table, *names: str) -> pa.Table:
    """The table sorted by these columns, nulls first."""
    keys = {}
    for name in names:
        column = table[name]
        keys[name] = pc.fill_null(column, "" if pa.types.is_string(column.type) else -(1 << 63))
    return table.take(pc.sort_indices(pa.table(keys), [(name, "ascending") for name in names]))


def _ids(table: pa.Table) -> Int64s:
    ids: Int64s = np.unique(table["container_id"].to_numpy())
    return ids
