"""A container of which an expected replica was not read is UNSEEN, and nothing else is
said of it.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from admin.sweep import exit_status
from chunktable.schema import ReplicaAttributes, rows_of
from merkle.columns import TreeColumns
from merkle.replica import ReplicaState, TreeSource
from runtime.disk import Disk
from runtime.exit_codes import ExitCode
from sweep.changes import UNDECIDED, UNSEEN_REPLICA, SweepChanges, compare_sweeps
from sweep.faults import fault_row
from sweep.ledger import EXPECTED_SCHEMA, REMOVED_SCHEMA, unread_replicas
from sweep.output import Summary, SweepStore, SweepTable
from tests.support.sweeps import run, table_of, tear, verdicts_of
from tests.support.tables import blocks, replica
from tests.support.volumes import flip
from tests.unit.test_sweep_inputs import Agents


def changes(out: Path, before: Summary, after: Summary) -> SweepChanges:
    return compare_sweeps(SweepStore(out, Disk()), before.sweep_id, after.sweep_id)


def unread(out: Path, summary: Summary) -> set[tuple[int, str]]:
    rows = table_of(out, SweepTable.UNSEEN, summary.sweep_id)
    return {(row["container_id"], row["datanode"]) for row in rows}


def chunks_of(agents: Agents, datanode: str) -> Path:
    return max((agents.to / datanode).glob("chunks-*"))


def test_one_flipped_bit_makes_nothing_healed_and_is_not_forgotten_the_night_after(
    tmp_path: Path,
) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.change(0, 2, matches=False, seed=0)
    agents.export(0, 1, 2)
    first = run(out, agents.to)
    assert first.diverged == (2,)
    chunks = chunks_of(agents, "dn-0")
    whole = chunks.read_bytes()
    flip(chunks, chunks.stat().st_size // 2)
    for _ in range(2):
        second = run(out, agents.to)
        assert second.verdicts == {"UNSEEN": 5}
        assert (second.unseen, second.compared) == (5, 0)
        assert exit_status(second) == ExitCode.PARTLY
        (row, *_) = table_of(out, SweepTable.VERDICTS, second.sweep_id)
        assert "1 of 3 expected replicas was not read: dn-0/DS-1: " in row["detail"]
        assert "does not match the checksum of its manifest" in row["detail"]
        assert row["unread"] == 1
        found = changes(out, first, second)
        assert (found.new, found.persisting, found.healed) == ((), (), ())
        assert set(found.unseen) == {
            (2, "corrupt_chunk"),
            *((number, UNSEEN_REPLICA) for number in range(1, 6)),
        }
        assert "does not match the checksum" in found.unseen[2, "corrupt_chunk"]
    chunks.write_bytes(whole)
    third = run(out, agents.to)
    assert (third.diverged, third.unseen) == ((2,), 0)
    agents.walks[0].put(replica(2, *blocks(2)))
    agents.export(0)
    assert changes(out, first, run(out, agents.to)).healed == ((2, "corrupt_chunk"),)


def test_the_good_copies_that_nobody_read_are_not_lost(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        agents = Agents(tmp_path / "unused")
        agents.change(0, 1, matches=bool(number), seed=0)
        tree = agents.walks[0].replicas_held[1].tree
        attributes = ReplicaAttributes(f"dn-{number}", "v", 1, ReplicaState.CLOSED, 7, 0, "tree")
        batches = list(rows_of(attributes, TreeColumns.of(tree)).batches())
        pq.write_table(pa.Table.from_batches(batches), folder / f"{number}.parquet")
    files = sorted(folder.iterdir())
    first = run(out, *files)
    assert first.verdicts == {"REPAIRABLE": 1}
    for path in files[1:]:
        tear(path)
    second = run(out, *files)
    assert (second.verdicts, second.diverged, second.unseen) == ({"UNSEEN": 1}, (), 2)
    # The corrupt chunk was read again, and is a finding still.
    assert exit_status(second) == ExitCode.FINDINGS
    assert (1, UNSEEN_REPLICA) in changes(out, first, second).unseen


def test_what_differs_among_those_that_were_read_differs_whoever_was_not(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.change(0, 2, matches=False, seed=0)
    agents.walks[2].put(replica(2, *blocks(1)))
    agents.export(0, 1, 2)
    first = run(out, agents.to)
    flip(chunks_of(agents, "dn-2"), 1000)
    second = run(out, agents.to)
    assert verdicts_of(out, second.sweep_id)[2] == "REPAIRABLE"
    found = changes(out, first, second)
    # That dn-2 lacks a block is not healed: it was not read.
    assert found.persisting == ((2, "corrupt_chunk"),)
    assert found.healed == ()
    assert (2, "missing_block") in found.unseen


def test_the_summary_names_the_sources_that_the_rows_have(tmp_path: Path) -> None:
    agents = Agents(tmp_path / "to")
    agents.walks[0].put(replica(1, *blocks(2), source=TreeSource.DATA))
    agents.walks[1].put(replica(1, source=None))
    agents.export(0, 1, 2)
    assert run(tmp_path / "out", agents.to).source == "data,none,tree"


def test_what_an_agent_says_it_removed_is_not_expected(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.export(0, 1, 2)
    run(out, agents.to)
    del agents.walks[0].replicas_held[1]
    for walk in agents.walks:
        del walk.replicas_held[5]
    agents.export(0, 1, 2)
    summary = run(out, agents.to)
    assert (summary.verdicts, summary.unseen) == ({"MATCH": 4}, 0)
    assert exit_status(summary) == 0


def test_what_is_gone_without_a_word_is_unseen_until_it_is_said_to_be_gone(
    tmp_path: Path,
) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.export(0, 1, 2)
    run(out, agents.to)
    del agents.walks[0].replicas_held[1]
    # A new folder knows nothing of the old one.
    Disk().remove_folder(agents.to / "dn-0")
    agents.export(0)
    summary = run(out, agents.to)
    assert unread(out, summary) == {(1, "dn-0")}
    (row,) = table_of(out, SweepTable.UNSEEN, summary.sweep_id)
    assert "no agent reported its removal" in row["reason"]
    for name in ("dn-0", "dn-0/DS-1", "container=1"):
        assert run(out, agents.to, gone=[name]).unseen == 0
        # It would be expected no more.
        Disk().remove_folder(out)
        agents.walks[0].put(replica(1, *blocks(2)))
        agents.export(0)
        run(out, agents.to)
        del agents.walks[0].replicas_held[1]
        Disk().remove_folder(agents.to / "dn-0")
        agents.export(0)


@pytest.mark.parametrize("keep", [1, 2])
def test_an_unread_replica_stays_expected_when_the_sweep_that_read_it_is_dropped(
    tmp_path: Path, keep: int
) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.change(0, 2, matches=False, seed=0)
    agents.export(0, 1, 2)
    first = run(out, agents.to, keep=keep)
    assert first.diverged == (2,)
    (agents.to / "dn-0").rename(tmp_path / "away")
    for _ in range(4):
        later = run(out, agents.to, keep=keep)
        assert (later.verdicts, later.unseen) == ({"UNSEEN": 5}, 5)
        (skipped,) = later.skipped
        assert skipped.input == "datanode dn-0"
        assert f"it was in sweep {first.sweep_id} and is in no input" in skipped.reason
        assert exit_status(later) == ExitCode.PARTLY
    assert len(SweepStore(out, Disk()).sweeps()) == keep
    rows = table_of(out, SweepTable.UNSEEN, later.sweep_id)
    assert {row["last_sweep"] for row in rows} == {first.sweep_id}
    (tmp_path / "away").rename(agents.to / "dn-0")
    assert run(out, agents.to, keep=keep).diverged == (2,)


def test_what_is_gone_on_purpose_is_expected_no_more_however_long_it_was_unread(
    tmp_path: Path,
) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.export(0, 1, 2)
    run(out, agents.to, keep=1)
    Disk().remove_folder(agents.to / "dn-0")
    assert [run(out, agents.to, keep=1).unseen for _ in range(3)] == [5, 5, 5]
    for gone in (["dn-0"], []):
        summary = run(out, agents.to, keep=1, gone=gone)
        assert (summary.verdicts, summary.skipped) == ({"MATCH": 5}, ())


def test_the_inventory_of_an_export_that_cannot_be_read_tells_what_is_missing_the_first_night(
    tmp_path: Path,
) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.export(0, 1, 2)
    flip(chunks_of(agents, "dn-1"), 1000)
    summary = run(out, agents.to)
    assert (summary.verdicts, summary.unseen) == ({"UNSEEN": 5}, 5)


def test_all_replicas_unread_is_a_verdict_too(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.walks[0].put(replica(9, *blocks(2)))
    agents.export(0, 1, 2)
    run(out, agents.to)
    Disk().remove_folder(agents.to / "dn-0")
    summary = run(out, agents.to)
    (row,) = [
        row
        for row in table_of(out, SweepTable.VERDICTS, summary.sweep_id)
        if row["container_id"] == 9
    ]
    assert (row["verdict"], row["replicas"], row["unread"]) == ("UNSEEN", 0, 1)
    assert summary.containers == 6


@pytest.mark.parametrize("state", list(ReplicaState))
def test_nothing_comparable_is_partly_done_and_all_excluded_is_clean(
    tmp_path: Path, state: ReplicaState
) -> None:
    agents = Agents(tmp_path / "to")
    agents.walks = agents.walks[:1]
    walk = agents.walks[0]
    walk.put(*(replica(number, *blocks(2), state=state) for number in walk.ids()))
    agents.export(0)
    summary = run(tmp_path / "out", agents.to)
    is_excluded = not state.is_closed and state is not ReplicaState.INVALID
    assert summary.verdicts == {"EXCLUDED" if is_excluded else "UNKNOWN": 5}
    assert exit_status(summary) == (0 if is_excluded else ExitCode.PARTLY)


def test_a_container_that_is_no_longer_decided_is_a_change(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.change(0, 2, matches=False, seed=0)
    agents.export(0, 1, 2)
    first = run(out, agents.to)
    assert exit_status(first) == ExitCode.FINDINGS
    agents.walks[0].put(replica(1, source=None), replica(2, source=None))
    # A replica that is excluded by design needs no tree.
    agents.walks[0].put(replica(7, source=None, state=ReplicaState.OPEN))
    agents.export(0)
    second = run(out, agents.to)
    assert second.verdicts == {"EXCLUDED": 1, "MATCH": 3, "UNKNOWN": 2}
    assert second.without_tree == 2
    assert exit_status(second) == ExitCode.PARTLY
    found = changes(out, first, second)
    assert (found.new, found.persisting, found.healed) == ((), (), ())
    reason = "UNKNOWN: 1 of 3 replicas have no root"
    assert found.unseen == {
        (1, UNDECIDED): reason,
        (2, "corrupt_chunk"): reason,
        (2, UNDECIDED): reason,
    }
    # What was not decided before is no change.
    assert changes(out, second, run(out, agents.to)).unseen == {}
    agents.walks[0].put(replica(1, *blocks(2)), replica(2, *blocks(2)))
    agents.export(0)
    third = run(out, agents.to)
    assert (third.without_tree, exit_status(third)) == (0, 0)


def test_findings_of_containers_that_are_unknown_or_equal_are_changes_too(tmp_path: Path) -> None:
    agents, out, folder = Agents(tmp_path / "unused"), tmp_path / "out", tmp_path / "in"
    folder.mkdir()
    for number, walk in enumerate(agents.walks):
        tree = walk.replicas_held[1].tree
        name = f"dn-{number}"
        attributes = ReplicaAttributes(name, "v", 1, ReplicaState.CLOSED, 7, 0, "tree")
        batches = list(rows_of(attributes, TreeColumns.of(tree)).batches())
        pq.write_table(pa.Table.from_batches(batches), folder / f"{number}.parquet")
    first = run(out, folder)
    assert (first.verdicts, exit_status(first)) == ({"MATCH": 1}, 0)
    again = pq.read_table(folder / "0.parquet")
    changed = again.set_column(
        again.column_names.index("bcs_id"),
        again.schema.field("bcs_id"),
        pa.repeat(pa.scalar(8, again.schema.field("bcs_id").type), again.num_rows),
    )
    pq.write_table(changed, folder / "3.parquet")
    second = run(out, folder)
    assert second.verdicts == {"UNKNOWN": 1}
    assert second.findings.keys() == {"rows_contradict"}
    found = changes(out, first, second)
    assert found.new == ((1, "rows_contradict"),)
    assert found.unseen.keys() == {(1, UNDECIDED)}
    assert changes(out, second, first).healed == ((1, "rows_contradict"),)
    # On a second volume of dn-0.
    volumes = pa.repeat(pa.scalar("w", again.schema.field("volume").type), again.num_rows)
    at = again.column_names.index("volume")
    pq.write_table(
        again.set_column(at, again.schema.field("volume"), volumes), folder / "3.parquet"
    )
    third = run(out, folder)
    assert third.verdicts == {"MATCH": 1}
    assert changes(out, first, third).new == ((1, "duplicate_replica"),)


def test_the_damage_of_a_replica_that_was_removed_is_gone_and_not_healed(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.change(0, 2, matches=False, seed=0)
    agents.change(1, 3, matches=False, seed=0)
    agents.export(0, 1, 2)
    first = run(out, agents.to)
    assert first.diverged == (2, 3)
    Disk().remove_folder(agents.to / "dn-0")
    agents.walks[1].put(replica(3, *blocks(2)))
    agents.export(1)
    second = run(out, agents.to, gone=["dn-0"])
    assert (second.verdicts, second.diverged) == ({"MATCH": 5}, ())
    found = changes(out, first, second)
    assert found.gone == {(2, "corrupt_chunk"): "the damaged replica of dn-0 is not in the sweep"}
    assert found.healed == ((3, "corrupt_chunk"),)
    assert (found.new, found.persisting, found.unseen) == ((), (), {})
    short = compare_sweeps(SweepStore(out, Disk()), first.sweep_id, second.sweep_id, each_max=0)
    assert (short.gone, short.left_out) == ({}, {"gone": 1, "healed": 1})


def test_what_only_a_removed_replica_had_is_not_healed(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    for walk in agents.walks[1:]:
        walk.put(replica(2, *blocks(1)))
    agents.export(0, 1, 2)
    first = run(out, agents.to)
    assert first.verdicts["REPAIRABLE"] == 1
    Disk().remove_folder(agents.to / "dn-0")
    second = run(out, agents.to, gone=["dn-0"])
    assert second.verdicts == {"MATCH": 5}
    found = changes(out, first, second)
    assert (found.healed, found.gone) == ((), {})
    assert found.unseen == {
        (2, "missing_block"): "nothing shows that it was repaired: the correct data of dn-0 is not"
        " in the sweep"
    }


def test_a_fault_that_only_its_detail_places_goes_with_its_replica(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.walks[0].put(replica(2, *blocks(2)))
    agents.export(0, 1, 2)
    first, second = run(out, agents.to), run(out, agents.to)
    path = SweepStore(out, Disk()).path(SweepTable.FINDINGS, first.sweep_id)
    found = pq.read_table(path)
    row = fault_row(("dn-9", "v"), "CORRUPT_CHUNK", "x", container_id=2, block_id=1, offset=0)
    here = fault_row(("dn-0", "v"), "MISSING_CHUNK", "x", container_id=2, block_id=1, offset=0)
    pq.write_table(pa.Table.from_pylist([row, here], found.schema), path)
    roots = SweepStore(out, Disk()).path(SweepTable.ROOTS, first.sweep_id)
    held = pq.read_table(roots)
    added = held.filter(pc.equal(held["container_id"], 2)).slice(0, 1).to_pylist()[0]
    more = pa.Table.from_pylist([added | {"datanode": "dn-9"}], held.schema)
    pq.write_table(pa.concat_tables([held, more]), roots)
    compared = changes(out, first, second)
    assert compared.gone.keys() == {(2, "CORRUPT_CHUNK")}
    assert compared.healed == ((2, "MISSING_CHUNK"),)


_AT = datetime(2026, 11, 22, tzinfo=UTC)
_KEYS = st.sets(
    st.tuples(st.integers(1, 3), st.sampled_from(["a", "b"]), st.sampled_from(["v", "w"]))
)


@given(
    expected=_KEYS,
    read=_KEYS,
    removed=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["a", "b"]), st.integers(-2, 2)), max_size=4
    ),
)
def test_unread_is_what_was_expected_and_neither_read_nor_moved_nor_removed(
    expected: set[tuple[int, str, str]],
    read: set[tuple[int, str, str]],
    removed: list[tuple[int, str, int]],
) -> None:
    names = ["container_id", "datanode", "volume"]
    rows = [
        dict(zip(names, key, strict=True)) | {"last_sweep": "s", "since": _AT} for key in expected
    ]
    found = unread_replicas(
        pa.Table.from_pylist(rows, EXPECTED_SCHEMA),
        pa.Table.from_pylist(
            [dict(zip(names, key, strict=True)) for key in read],
            pa.schema([EXPECTED_SCHEMA.field(name) for name in names]),
        ),
        pa.Table.from_pylist(
            [
                {"container_id": c, "datanode": d, "time": _AT + timedelta(hours=hours)}
                for c, d, hours in removed
            ],
            REMOVED_SCHEMA,
        ),
    )
    moved = {key[:2] for key in read - expected}
    gone = {(c, d) for c, d, hours in removed if hours >= 0}
    assert {tuple(row[name] for name in names) for row in found.to_pylist()} == {
        key for key in expected - read if key[:2] not in moved | gone
    }
