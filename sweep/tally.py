"""Compare replicas piece by piece, and collect the containers to inspect."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sweep.compare import compare_replicas
from sweep.duplicates import duplicate_findings
from sweep.gather import Int64s
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA
from sweep.output import SweepTotals, TableWriter
from sweep.runs import RUN_SCHEMA


class Comparisons:
    """Compares replicas, writes their rows and verdicts, and collects candidates."""

    def __init__(self, roots: TableWriter, verdicts: TableWriter, totals: SweepTotals) -> None:
        self.totals = totals
        self.findings = [FINDING_SCHEMA.empty_table()]
        self._roots = roots
        self._verdicts = verdicts
        self._candidates = [np.empty(0, np.int64)]
        self._rows = [np.empty(0, np.int64)]
        self._replicas = [REPLICA_SCHEMA.empty_table()]

    def add(self, replicas: pa.Table) -> None:
        """Compare all replicas (REPLICA_SCHEMA) of some containers."""
        replicas = sort_by(replicas, "container_id", "datanode", "volume")
        compared = compare_replicas(replicas)
        self._roots.add(replicas)
        self._verdicts.add(compared.verdicts)
        self.totals.add_replicas(replicas)
        self.findings += [compared.findings, duplicate_findings(replicas)]
        is_candidate = pc.is_in(replicas["container_id"], pa.array(compared.candidates))
        of_candidates = replicas.filter(is_candidate)
        counted = rows_by_container(RUN_SCHEMA.empty_table(), of_candidates)
        self._candidates.append(compared.candidates)
        self._rows.append(np.array([counted[int(i)] for i in compared.candidates], np.int64))
        self._replicas.append(of_candidates)

    def candidates(self) -> tuple[Int64s, Int64s, pa.Table]:
        """The containers to inspect, ascending, the approximate number of rows of each,
        and their replicas.
        """
        ids, rows = np.concatenate(self._candidates), np.concatenate(self._rows)
        order = np.argsort(ids)
        return ids[order], rows[order], pa.concat_tables(self._replicas)


def rows_by_container(runs: pa.Table, replicas: pa.Table) -> Mapping[int, int]:
    """The approximate number of rows of each container; a deleted block counts as
    one.
    """
    counted = Counter[int]()
    for table, names in (
        (runs, ("ends", "first_chunks", "last_chunks", "inner_chunks", "inner_blocks")),
        (replicas, ("chunks", "blocks")),
    ):
        if table.num_rows:
            rows = np.sum([table[name].to_numpy() for name in names], axis=0)
            ids, places = np.unique(table["container_id"].to_numpy(), return_inverse=True)
            totals = np.bincount(places, weights=rows).astype(np.int64)
            counted.update(dict(zip(ids.tolist(), totals.tolist(), strict=True)))
    return counted


def sort_by(table: pa.Table, *names: str) -> pa.Table:
    """The table sorted by these columns, nulls first."""
    keys = {}
    for name in names:
        column = table[name]
        keys[name] = pc.fill_null(column, "" if pa.types.is_string(column.type) else -(1 << 63))
    return table.take(pc.sort_indices(pa.table(keys), [(name, "ascending") for name in names]))
