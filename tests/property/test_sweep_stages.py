"""A sweep says the same in however many ranges its containers are compared, and folds
the same in however many pieces.
"""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from chunktable.schema import CHUNK_SCHEMA
from sweep.output import SweepTable
from sweep.rows import rows_of
from sweep.runs import RUN_SCHEMA, fold_batches, run_pieces, settle
from tests.support.sweeps import OnePartWaves, run, table_of

SMALL = SyntheticCluster(seed=4, datanodes=4, containers=80, blocks=5, chunks=6)
TABLES = (SweepTable.ROOTS, SweepTable.VERDICTS, SweepTable.FINDINGS, SweepTable.UNSEEN)


@pytest.mark.parametrize("order", list(RowOrder))
def test_many_ranges_of_containers_come_to_what_one_range_comes_to(
    tmp_path: Path, order: RowOrder
) -> None:
    for name, healthy in (("before", True), ("after", False)):
        synthetic(tmp_path / name, replace(SMALL, order=order), healthy=healthy)
    found = []
    for rows in (1 << 20, 20):
        out = tmp_path / str(rows)
        run(out, tmp_path / "before", engine=OnePartWaves(tmp_path / "spill", range_rows=rows))
        # A datanode is missing on the second night.
        after = sorted((tmp_path / "after").iterdir())[1:]
        engine = OnePartWaves(tmp_path / "spill", range_rows=rows)
        summary = run(out, *after, engine=engine)
        tables = [table_of(out, table, summary.sweep_id) for table in TABLES]
        assert all(tables[:3])
        assert bool(tables[3]) == (order is RowOrder.CLUSTERED)
        # Each has sweeps of its own.
        texts = [[re.sub(r"\d{8}T\d{6}Z-\w{4}", "ID", repr(row)) for row in t] for t in tables]
        found.append((texts, summary.verdicts, summary.findings, summary.paths, summary.diverged))
    assert found[0] == found[1]


def test_more_replicas_than_one_piece_holds_fold_to_one_run_each() -> None:
    """Some continue from batch to batch, where a piece may end."""
    count, batch = 500_000, 99_999
    rng = np.random.default_rng(5)
    ids = np.repeat(np.arange(count // 2), 2)
    blocks = np.tile([1, 2], count // 2)
    constants = {
        "datanode": "a",
        "volume": "v",
        "state": "CLOSED",
        "bcs_id": 1,
        "replica_index": 0,
        "chunk_offset": 0,
        "length": 4096,
        "matches": True,
        "deleted": False,
        "source": "tree",
        "generation": 1,
        "scanned_at": None,
    }
    columns = {
        field.name: pa.array([constants.get(field.name)], field.type)
        for field in CHUNK_SCHEMA
        if field.name in constants
    }
    changing = {
        "container_id": ids,
        "block_id": blocks,
        "checksum": rng.integers(0, 1 << 32, count),
    }
    edges = [*range(0, count, batch), count]
    stretches = [
        rows_of(columns | {n: pa.array(c[a:b]) for n, c in changing.items()}, b - a)
        for a, b in pairwise(edges)
    ]
    pieces = list(run_pieces(stretches))
    assert len(pieces) > 1
    assert all(2 * piece.num_rows < count for piece in pieces)
    runs = pa.concat_tables(pieces)
    assert runs.schema == RUN_SCHEMA
    assert runs["container_id"].to_pylist() == list(range(count // 2))
    assert all(runs["ordered"].to_pylist())
    whole = pa.RecordBatch.from_arrays(
        [
            pa.array(changing[name]) if name in changing else pa.repeat(columns[name][0], count)
            for name in CHUNK_SCHEMA.names
        ],
        schema=CHUNK_SCHEMA,
    )
    assert settle(runs).replicas == settle(fold_batches([whole])).replicas
