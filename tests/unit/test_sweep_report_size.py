"""The report of a sweep with any number of findings: totals are true, the worst
containers are shown, and what is held does not grow.
"""

import re
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from runtime.disk import Disk
from sweep.changes import compare_sweeps
from sweep.fragments import Int64s
from sweep.model import FINAL_VERDICT_SCHEMA, FINDING_SCHEMA, REPLICA_SCHEMA, UNSEEN_SCHEMA
from sweep.output import Summary, SweepStore, SweepTable
from sweep.report import write_report

BEFORE, AFTER = "20261122T013000Z-aa", "20261123T013000Z-aa"
NODE = "d732b051-6d55-f77b-8a44-5cb5f9b046e0"


def column(kind: pa.DataType, count: int) -> pa.Array:
    """Zeros, empty texts, or one datanode in each list."""
    if pa.types.is_string(kind):
        return pa.repeat("", count)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), [NODE] * count)
    if pa.types.is_timestamp(kind):
        return pa.nulls(count, kind)
    return pa.array(np.zeros(count, np.int64)).cast(kind)


def table(schema: pa.Schema, ids: Int64s, **given: object) -> pa.Table:
    held = {
        one.name: pa.array(given[one.name], one.type)
        if not isinstance(given.get(one.name, ""), str)
        else pa.repeat(given[one.name], len(ids))
        if one.name in given
        else column(one.type, len(ids))
        for one in schema
    }
    return pa.table(held | {"container_id": ids}, schema)


def write(store: SweepStore, sweep_id: str, verdict: str, ids: Int64s, findings: Int64s) -> Summary:
    """A sweep of these containers, each with the verdict, and a missing block for each
    ID of `findings`.
    """
    diverged = np.full(len(ids), verdict == "REPAIRABLE")
    tables = {
        SweepTable.ROOTS: table(REPLICA_SCHEMA, ids, datanode=NODE),
        SweepTable.VERDICTS: table(
            FINAL_VERDICT_SCHEMA, ids, verdict=verdict, diverged=diverged, detail="not read " * 20
        ),
        SweepTable.FINDINGS: table(
            FINDING_SCHEMA, findings, kind="missing_block", block_id=np.arange(len(findings))
        ),
        SweepTable.UNSEEN: UNSEEN_SCHEMA.empty_table(),
    }
    for name, rows in tables.items():
        with store.write_table(name, sweep_id) as writer:
            for first in range(0, rows.num_rows, 10_000):
                writer.add(rows.slice(first, 10_000))
    count = len(ids)
    return Summary(
        sweep_id,
        "local",
        "tree",
        datetime(2026, 11, 23, tzinfo=UTC),
        1.0,
        count,
        count,
        count,
        0,
        tuple(ids[diverged].tolist()),
        {verdict: count},
        {"missing_block": len(findings)} if len(findings) else {},
        {},
        (),
        count,
    )


def page_of(store: SweepStore, summary: Summary) -> str:
    assert write_report(store, summary) == ()
    return store.access.read(store.report(summary.sweep_id)).decode()


def test_the_worst_container_is_shown_however_many_findings_come_before_it(tmp_path: Path) -> None:
    store, ids = SweepStore(tmp_path, Disk()), np.arange(1, 100_002)
    findings = np.concatenate([ids[:-1], np.full(5_000, ids[-1])])
    page = page_of(store, write(store, AFTER, "REPAIRABLE", ids, findings))
    assert "<b>105,000</b>findings" in page
    shown = re.findall(r"treefold reconcile (\d+)<", page)
    assert shown[:2] == ["100001", "1"]
    assert len(shown) == 5_000
    assert "95,001 more are in the table of findings" in page
    assert "and 4952 more blocks" in page


def peak_bytes(store: SweepStore, summary: Summary) -> int:
    """What a report held at most, of Arrow's memory and Python's."""
    counted, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(counted)
    tracemalloc.start()
    try:
        page_of(store, summary)
        return counted.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


@pytest.mark.parametrize("shape", ["UNSEEN", "REPAIRABLE", "one container"])
def test_a_report_of_four_times_the_size_takes_no_more_memory(tmp_path: Path, shape: str) -> None:
    peaks = list[int]()
    smaller = 125_000 if shape == "one container" else 40_000
    for count in (smaller, 4 * smaller):
        store, ids = SweepStore(tmp_path / str(count), Disk()), np.arange(1, count + 1)
        nothing, findings = ids[:0], ids[:0]
        if shape == "REPAIRABLE":
            findings = ids
        elif shape == "one container":
            ids, findings = ids[:1], np.ones(count, np.int64)
        store.write_summary(write(store, BEFORE, "MATCH", ids, nothing))
        verdict = "UNSEEN" if shape == "UNSEEN" else "REPAIRABLE"
        peaks.append(peak_bytes(store, write(store, AFTER, verdict, ids, findings)))
    assert peaks[1] < 1.2 * peaks[0], [f"{peak >> 20} MiB" for peak in peaks]


def test_changes_without_room_are_counted_and_the_first_are_kept(tmp_path: Path) -> None:
    store, ids = SweepStore(tmp_path, Disk()), np.arange(1, 100_001)
    write(store, BEFORE, "REPAIRABLE", ids, ids[:70_000])
    write(store, AFTER, "UNSEEN", ids, ids[:0])
    whole = compare_sweeps(store, BEFORE, AFTER)
    first = compare_sweeps(store, BEFORE, AFTER, each_max=5)
    assert (len(whole.unseen), whole.left_out) == (170_000, {})
    assert list(first.unseen.items()) == list(whole.unseen.items())[:5]
    assert list(first.unseen) == sorted(whole.unseen)[:5]
    assert first.left_out == {"unseen": 169_995}
