"""The local engine on synthetic clusters: what it finds is what was done to them,
however the rows lie.
"""

import json
from contextlib import chdir
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from admin.demo.ground_truth import GroundTruth
from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from chunktable.schema import CHUNK_SCHEMA
from merkle.outcome import Verdict
from protos.errors import AmbiguousIdError
from runtime.disk import Disk
from sweep.errors import SweepInputError
from sweep.history import whole_names
from sweep.model import REPLICA_SCHEMA
from sweep.output import SkippedInput, SweepStore, SweepTable
from sweep.report import write_report
from tests.support.short_ids import shortest
from tests.support.sweeps import OnePartWaves, findings_of, run, table_of, tear, verdicts_of

SMALL = SyntheticCluster(seed=3, datanodes=5, containers=120, blocks=6, chunks=8)


def holds(out: Path, sweep_id: str, truth: GroundTruth) -> None:
    assert findings_of(out, sweep_id) == {damage.finding for damage in truth.damages}
    bad = (Verdict.REPAIRABLE.value, Verdict.CONFLICT.value, Verdict.UNRECOVERABLE.value)
    told = {
        container_id: verdict
        for container_id, verdict in verdicts_of(out, sweep_id).items()
        if verdict in bad
    }
    assert told == {damage.container_id: damage.verdict.value for damage in truth.damages}


@pytest.mark.parametrize("order", list(RowOrder))
@pytest.mark.parametrize("chunks", [1, 8])
def test_all_damages_are_found_and_nothing_else(
    tmp_path: Path, order: RowOrder, chunks: int
) -> None:
    cluster = SyntheticCluster(
        seed=3, datanodes=5, containers=120, blocks=6, chunks=chunks, order=order
    )
    truth = synthetic(tmp_path / "table", cluster)
    summary = run(tmp_path / "out", tmp_path / "table")
    holds(tmp_path / "out", summary.sweep_id, truth)
    assert (summary.rows, summary.containers, summary.replicas) == (
        truth.rows,
        truth.containers,
        truth.replicas,
    )
    assert summary.diverged == tuple(damage.container_id for damage in truth.damages)
    assert set(truth.without_tree) <= {
        container_id
        for container_id, verdict in verdicts_of(tmp_path / "out", summary.sweep_id).items()
        if verdict == Verdict.UNKNOWN.value
    }
    assert set(summary.paths) == ({"filewise"} if order is RowOrder.CLUSTERED else {"exact"})


@pytest.mark.parametrize("order", list(RowOrder))
def test_a_container_larger_than_memory_is_judged_in_ranges_of_blocks(
    tmp_path: Path, order: RowOrder
) -> None:
    cluster = SyntheticCluster(
        seed=8, datanodes=3, containers=6, blocks=3, chunks=4, largest_blocks=600, order=order
    )
    truth = synthetic(tmp_path / "table", cluster)
    assert 1 in {damage.container_id for damage in truth.damages}
    whole = run(
        tmp_path / "whole",
        tmp_path / "table",
        engine=OnePartWaves(tmp_path / "spill", group_rows=1 << 20),
    )
    parts = run(
        tmp_path / "parts",
        tmp_path / "table",
        engine=OnePartWaves(tmp_path / "spill", group_rows=500),
    )
    for out, summary in ((tmp_path / "whole", whole), (tmp_path / "parts", parts)):
        holds(out, summary.sweep_id, truth)
    roots = [
        [
            {k: v for k, v in row.items() if k != "path"}
            for row in table_of(out, SweepTable.ROOTS, summary.sweep_id)
        ]
        for out, summary in ((tmp_path / "whole", whole), (tmp_path / "parts", parts))
    ]
    assert roots[0] == roots[1]


def test_what_was_right_the_night_before_and_is_wrong_now_changed_in_silence(
    tmp_path: Path,
) -> None:
    synthetic(tmp_path / "before", SMALL, healthy=True)
    truth = synthetic(tmp_path / "after", SMALL)
    first = run(tmp_path / "out", tmp_path / "before")
    second = run(tmp_path / "out", tmp_path / "after")
    assert not first.diverged
    assert second.previous == first.sweep_id
    silent = {
        finding[1:5]
        for finding in findings_of(tmp_path / "out", second.sweep_id)
        if finding[0] == "silent_change"
    }
    changed = [
        damage
        for damage in truth.damages
        if damage.kind.value in ("corrupt_chunk", "conflicting_chunk", "lost_chunk")
    ]
    assert silent == {
        (d.container_id, d.block_id, d.offset, (node,)) for d in changed for node in d.datanodes
    }
    assert run(tmp_path / "out", tmp_path / "after").findings.get("silent_change") is None


def test_a_datanode_that_an_earlier_sweep_had_is_missed_until_it_is_said_to_be_gone(
    tmp_path: Path,
) -> None:
    synthetic(tmp_path / "table", SMALL, healthy=True)
    first = run(tmp_path / "out", tmp_path / "table", keep=3)
    lost = sorted((tmp_path / "table").iterdir())[0]
    datanode = json.loads(next(lost.glob("manifest-*")).read_text())["datanode"]
    Disk().remove_folder(lost)
    for _ in range(2):
        (skipped,) = run(tmp_path / "out", tmp_path / "table", keep=3).skipped
        assert skipped.input == f"datanode {datanode}"
        assert f"was in sweep {first.sweep_id} and is in no input" in skipped.reason
    assert run(tmp_path / "out", tmp_path / "table", keep=3, gone=[datanode]).skipped == ()
    # Retention has dropped the sweep that had it.
    assert run(tmp_path / "out", tmp_path / "table", keep=3).skipped == ()


def test_what_is_gone_is_named_by_a_beginning_that_no_other_datanode_has(tmp_path: Path) -> None:
    # 17 datanodes have 16 possible first digits.
    cluster = SyntheticCluster(seed=3, datanodes=17, containers=60, blocks=2, chunks=1)
    synthetic(tmp_path / "table", cluster, healthy=True)
    summary = run(tmp_path / "out", tmp_path / "table")
    store = SweepStore(tmp_path / "out", Disk())
    known = sorted(store.datanodes(summary.sweep_id))
    alike = next([a, b] for a, b in pairwise(known) if a[0] == b[0])
    alike = [one for one in known if one[0] == alike[0][0]]

    for one in alike:
        short = shortest(one, known)
        assert whole_names(store, [short, f"{short}/DS-1"]) == (one, f"{one}/DS-1")
    as_given = (alike[0], "", "/DS-1", "zz", "container=7")
    assert whole_names(store, as_given) == as_given
    with pytest.raises(AmbiguousIdError, match=", ".join(alike)) as refused:
        run(tmp_path / "out", tmp_path / "table", gone=[alike[0][0]])
    assert refused.value.exit_status == 2


def test_an_empty_folder_among_exports_is_skipped_by_name(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL, healthy=True)
    run(tmp_path / "out", tmp_path / "table")
    empty = sorted((tmp_path / "table").iterdir())[0]
    Disk().remove_folder(empty)
    empty.mkdir()
    for hidden in (".in-the-making", "lost+found"):
        (tmp_path / "table" / hidden).mkdir()
    assert (
        SkippedInput(str(empty), "it is empty") in run(tmp_path / "out", tmp_path / "table").skipped
    )


def test_a_table_without_rows_is_skipped_by_name(tmp_path: Path) -> None:
    pq.write_table(CHUNK_SCHEMA.empty_table(), tmp_path / "empty.parquet")
    with pytest.raises(SweepInputError, match=r"empty\.parquet: there are no rows in it"):
        run(tmp_path / "out", tmp_path / "empty.parquet")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("roots/sweep_id={}/roots.parquet", "silent changes since {} are unknown"),
        ("chunks/{}/parts.json", "silent changes since {} are unknown"),
        ("summary/sweep_id={}/summary.parquet", "sweep {} is left out of the report"),
    ],
)
@pytest.mark.parametrize("is_torn", [True, False])
def test_a_damaged_file_of_an_earlier_sweep_is_a_note(
    tmp_path: Path, name: str, note: str, is_torn: bool
) -> None:
    synthetic(tmp_path / "before", SMALL, healthy=True)
    truth = synthetic(tmp_path / "after", SMALL)
    first = run(tmp_path / "out", tmp_path / "before").sweep_id
    path = tmp_path / "out" / name.format(first)
    if is_torn:
        tear(path)
    else:
        # Parquet's footer, and the beginning of JSON.
        path.write_bytes(bytes(one ^ 0x55 for one in path.read_bytes()))
    output = SweepStore(tmp_path / "out", Disk())
    for _ in range(2):
        second = run(
            tmp_path / "out", tmp_path / "after", report=lambda made: write_report(output, made)
        )
        assert second.diverged == tuple(damage.container_id for damage in truth.damages)
        assert output.report(second.sweep_id).exists()
        # The third is held against the second, too.
        if "parts" not in name:
            assert any(one.startswith(note.format(first)) for one in second.notes)
        elif second.previous == first:
            assert [one.startswith(note.format(first)) for one in second.notes] == [True]


def test_a_file_that_was_rewritten_since_an_earlier_sweep_read_it_is_not_compared(
    tmp_path: Path,
) -> None:
    """It has the rows of now: compared with those, nothing ever changed."""
    table = tmp_path / "table.parquet"
    for name, healthy in (("before", True), ("after", False)):
        synthetic(tmp_path / name, SMALL, healthy=healthy)
        pieces = [pq.read_table(path) for path in sorted((tmp_path / name).rglob("chunks-*"))]
        pq.write_table(pa.concat_tables(pieces), table)
        last = run(tmp_path / "out", table)
    assert last.previous is not None
    assert last.notes == (
        f"1 files that {last.previous} read are missing, changed or damaged: silent changes of"
        " their chunks are unknown",
    )
    assert "silent_change" not in last.findings


def test_a_change_while_its_datanode_was_skipped_is_told_the_night_after(tmp_path: Path) -> None:
    synthetic(tmp_path / "before", SMALL, healthy=True)
    synthetic(tmp_path / "after", SMALL)
    run(tmp_path / "whole", tmp_path / "before")
    whole = run(tmp_path / "whole", tmp_path / "after")
    run(tmp_path / "out", tmp_path / "before")
    tables = sorted((tmp_path / "before").iterdir())
    assert run(tmp_path / "out", *tables[1:]).skipped
    last = run(tmp_path / "out", tmp_path / "after")
    silent = [
        {one for one in findings_of(out, sweep_id) if one[0] == "silent_change"}
        for out, sweep_id in (
            (tmp_path / "whole", whole.sweep_id),
            (tmp_path / "out", last.sweep_id),
        )
    ]
    assert silent[0] == silent[1]
    assert last.notes == ()


def test_a_datanode_whose_rows_are_no_longer_kept_is_named(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL, healthy=True)
    first = run(tmp_path / "out", tmp_path / "table")
    tables = sorted((tmp_path / "table").iterdir())
    datanode = json.loads(next(tables[0].glob("manifest-*")).read_text())["datanode"]
    for _ in range(2):
        run(tmp_path / "out", *tables[1:])
    (note,) = run(tmp_path / "out", tmp_path / "table").notes
    assert note.startswith(
        f"silent changes of {datanode} are unknown: it was last in sweep {first.sweep_id}"
    )


def test_places_are_kept_as_the_next_night_finds_them_from_elsewhere(
    tmp_path: Path,
) -> None:
    synthetic(tmp_path / "before", SMALL, healthy=True)
    synthetic(tmp_path / "after", SMALL)
    with chdir(tmp_path):
        run(Path("out"), Path("before"))
    second = run(tmp_path / "out", tmp_path / "after")
    assert second.findings["silent_change"]
    assert second.notes == ()


def test_a_page_of_earlier_roots_that_was_flipped_is_a_note_and_no_silent_change(
    tmp_path: Path,
) -> None:
    synthetic(tmp_path / "table", SMALL, healthy=True)
    first = run(tmp_path / "out", tmp_path / "table").sweep_id
    path = SweepStore(tmp_path / "out", Disk()).path(SweepTable.ROOTS, first)
    column = pq.read_metadata(path).row_group(0).column(REPLICA_SCHEMA.get_field_index("root"))
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(raw)
    second = run(tmp_path / "out", tmp_path / "table")
    assert second.findings == {}
    assert [
        note.startswith(f"silent changes since {first} are unknown") for note in second.notes
    ] == [True]


def test_a_file_in_no_order_with_a_damaged_page_or_a_number_too_large_is_left_out(
    tmp_path: Path,
) -> None:
    synthetic(
        tmp_path / "made",
        SyntheticCluster(seed=3, datanodes=3, containers=40, damage={}, order=RowOrder.SHUFFLED),
    )
    table = pa.concat_tables(
        pq.read_table(path) for path in sorted((tmp_path / "made").rglob("*.parquet"))
    )
    (tmp_path / "table").mkdir()
    good, torn, wide = (tmp_path / "table" / f"{name}.parquet" for name in ("good", "torn", "wide"))
    pq.write_table(table, good)
    pq.write_table(
        table.slice(0, 300),
        torn,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    column = pq.read_metadata(torn).row_group(0).column(CHUNK_SCHEMA.names.index("checksum"))
    raw = bytearray(torn.read_bytes())
    raw[column.data_page_offset + column.total_compressed_size // 2] ^= 4
    torn.write_bytes(raw)
    indexes = pa.array([1 << 40, *[0] * 299], pa.int64())
    place = CHUNK_SCHEMA.names.index("replica_index")
    pq.write_table(table.slice(0, 300).set_column(place, "replica_index", indexes), wide)
    summary = run(tmp_path / "out", good, torn, wide)
    assert {one.input for one in summary.skipped} == {str(torn), str(wide)}
    assert summary.findings == {"unreadable": 2}
    assert summary.rows == table.num_rows
    assert not summary.diverged
