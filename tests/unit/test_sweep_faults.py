"""A fault is listed once: as a difference, or in the words of its scan."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from admin.sweep_metrics import write_metrics
from chunktable.manifest import SkippedVolume
from chunktable.places import LocalDestination
from dnagent.export import export
from merkle.comparison import DifferenceKind
from merkle.replica import TreeSource
from merkle.tree import BlockTree
from ozone.scan import FindingType
from ozone.survey import ReplicaFault
from runtime.disk import Disk
from sweep.changes import compare_sweeps
from sweep.exact import Row
from sweep.faults import fault_row, list_once, one_name
from sweep.model import FINDING_SCHEMA
from sweep.output import SweepStore, SweepTable
from tests.support.sweeps import run, table_of
from tests.support.tables import MemoryWalk, blocks, replica
from tests.support.volumes import unpack

DIFFERENCES = {kind.value for kind in DifferenceKind}


def listed(*rows: Row) -> list[Row]:
    found: list[Row] = list_once(pa.Table.from_pylist(rows, FINDING_SCHEMA)).to_pylist()
    return found


def difference(
    kind: DifferenceKind, block: int, offset: int | None, lacking: tuple[str, ...], detail: str = ""
) -> Row:
    where = {"container_id": 1, "block_id": block, "chunk_offset": offset}
    return {"kind": kind.value, **where, "lacking": lacking, "sources": [], "detail": detail}


def fault(
    kind: FindingType, datanode: str, block: int | None, offset: int | None = None, text: str = "x"
) -> Row:
    place = (datanode, f"DS-{datanode}")
    return fault_row(place, kind.value, text, container_id=1, block_id=block, offset=offset)


def test_a_sweep_of_damaged_volumes_lists_each_fault_in_one_word(tmp_path: Path) -> None:
    """In the table, the summary, the metrics and the comparison of two sweeps."""
    volumes = sorted(unpack("damaged", tmp_path / "cluster").glob("dn*/volume1"))
    out, metrics = tmp_path / "out", tmp_path / "sweep.prom"
    first, second = (run(out, volumes=volumes, source=TreeSource.DATA) for _ in range(2))
    assert first.findings == {"corrupt_chunk": 9, "deleted_block": 4, "missing_block": 2}
    found = table_of(out, SweepTable.FINDINGS, first.sweep_id)
    assert len(found) == 15
    # Nothing that the scans said is lost.
    details = " ".join(row["detail"] for row in found)
    assert (details.count("CORRUPT_CHUNK on "), details.count("MISSING_DATA_FILE on ")) == (12, 1)
    write_metrics(metrics, second)
    assert "CORRUPT_CHUNK" not in metrics.read_text()
    changes = compare_sweeps(SweepStore(out, Disk()), first.sweep_id, second.sweep_id)
    assert {kind for _, kind in changes.persisting} <= DIFFERENCES
    assert (changes.new, changes.healed, changes.unseen) == ((), (), {})


@pytest.mark.parametrize("source", [TreeSource.TREE, TreeSource.METADATA])
def test_stored_trees_older_than_the_damage_heal_nothing(
    tmp_path: Path, source: TreeSource
) -> None:
    volumes = sorted(unpack("damaged", tmp_path / "cluster").glob("dn*/volume1"))
    out = tmp_path / "out"
    first = run(out, volumes=volumes, source=TreeSource.DATA)
    stale = run(out, volumes=volumes, source=source)
    changes = compare_sweeps(SweepStore(out, Disk()), first.sweep_id, stale.sweep_id)
    assert changes.healed == ()
    assert (1, "corrupt_chunk") in changes.unseen
    assert "last scan was before that of the earlier sweep" in changes.unseen[1, "corrupt_chunk"]
    # By the data, what was repaired since is healed.
    healthy = sorted(unpack("healthy", tmp_path / "healthy").glob("dn*/volume1"))
    mended = run(out, volumes=healthy, source=TreeSource.DATA)
    changes = compare_sweeps(SweepStore(out, Disk()), first.sweep_id, mended.sweep_id)
    assert {container_id for container_id, _ in changes.healed} == {1, 2, 3, 4, 6}


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (FindingType.CORRUPT_CHUNK, difference(DifferenceKind.CORRUPT_CHUNK, 2, 64, ("a", "b"))),
        (
            FindingType.INCONSISTENT_CHUNK_LENGTH,
            difference(DifferenceKind.CORRUPT_CHUNK, 2, 64, ("a",)),
        ),
        (FindingType.MISSING_CHUNK, difference(DifferenceKind.MISSING_CHUNK, 2, 64, ("a",))),
        # All chunks of the block are missing.
        (FindingType.MISSING_CHUNK, difference(DifferenceKind.MISSING_BLOCK, 2, None, ("a",))),
        # The replica has another copy on a second volume.
        (FindingType.CORRUPT_CHUNK, difference(DifferenceKind.CORRUPT_CHUNK, 2, 64, ("a/DS-a",))),
    ],
)
def test_a_difference_shows_the_fault_of_its_replica(found: FindingType, shown: Row) -> None:
    (one,) = listed(fault(found, "a", 2, 64, "1 of 4 windows differ"), shown)
    assert one["lacking"] == list(shown["lacking"])
    assert one["detail"] == f"{found.value} on a/DS-a: 1 of 4 windows differ"


@pytest.mark.parametrize(
    "other",
    [
        difference(DifferenceKind.CORRUPT_CHUNK, 2, 64, ("b", "a/DS-other")),
        difference(DifferenceKind.CORRUPT_CHUNK, 2, 0, ("a",)),
        difference(DifferenceKind.CORRUPT_CHUNK, 3, 64, ("a",)),
        difference(DifferenceKind.DELETED_BLOCK, 2, None, ("a",)),
        difference(DifferenceKind.MISSING_CHUNK, 2, 64, ("a",)),
        difference(DifferenceKind.CORRUPT_CHUNK, 2, 64, ("a",)) | {"container_id": 7},
    ],
)
def test_a_fault_that_no_difference_shows_stays(other: Row) -> None:
    alone = fault(FindingType.CORRUPT_CHUNK, "a", 2, 64)
    assert {row["kind"]: row["detail"] for row in listed(alone, other)} == {
        alone["kind"]: alone["detail"],
        other["kind"]: "",
    }


def test_a_lost_file_is_one_finding_with_the_first_chunk_that_it_lacks() -> None:
    rows = [difference(DifferenceKind.MISSING_CHUNK, 2, at, ("a",)) for at in (64, 0)]
    found = listed(fault(FindingType.MISSING_DATA_FILE, "a", 2, text="gone"), *rows)
    assert {row["chunk_offset"]: row["detail"] for row in found} == {
        0: "MISSING_DATA_FILE on a/DS-a: gone",
        64: "",
    }


def test_what_is_not_written_out_is_counted() -> None:
    lost = difference(DifferenceKind.MISSING_BLOCK, 2, None, ("a",), "no copy")
    (row,) = listed(lost, *(fault(FindingType.MISSING_CHUNK, "a", 2, at) for at in range(9)))
    assert row["detail"].startswith("no copy; MISSING_CHUNK on a/DS-a: x; ")
    assert row["detail"].endswith("; and 5 more faults")
    assert row["detail"].count("MISSING_CHUNK") == 4


PLACES = st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.sampled_from([None, 0, 64]))


@given(
    st.lists(st.tuples(st.sampled_from(FindingType), PLACES), max_size=8),
    st.lists(st.tuples(st.sampled_from(DifferenceKind), PLACES), unique=True, max_size=8),
)
def test_every_fault_is_listed_exactly_once(
    faults: list[tuple[FindingType, tuple[str, int, int | None]]],
    differences: list[tuple[DifferenceKind, tuple[str, int, int | None]]],
) -> None:
    """As a row of its own or in one detail, and no difference is lost or made up; what
    is listed once is not listed anew.
    """
    # Each text is unique, and none is a part of another.
    rows = [fault(kind, *place, text=f"<{number}>") for number, (kind, place) in enumerate(faults)]
    shown = [difference(kind, block, at, (name,)) for kind, (name, block, at) in differences]
    found = listed(*rows, *shown)
    text = "".join(row["detail"] for row in found)
    hidden = sum(int(row["detail"].split()[-3]) for row in found if "more faults" in row["detail"])
    assert max([0, *(text.count(f"<{number}>") for number in range(len(rows)))]) <= 1
    assert sum(text.count(f"<{number}>") for number in range(len(rows))) == len(rows) - hidden

    def key(row: Row) -> tuple[object, ...]:
        return row["kind"], row["block_id"], row["chunk_offset"], tuple(row["lacking"])

    assert Counter(key(row) for row in found if row["kind"] in DIFFERENCES) == Counter(
        map(key, shown)
    )
    again = listed(*found)
    assert sorted(map(str, again)) == sorted(map(str, found))


def test_a_fault_is_not_healed_when_only_its_word_has_changed() -> None:
    """The table of an earlier release has both words; that of a container which could
    not be compared has Ozone's.
    """
    both, ours = {(1, "CORRUPT_CHUNK"), (1, "corrupt_chunk")}, {(1, "corrupt_chunk")}
    assert one_name(both, both | ours) == ours
    assert one_name({(1, "MISSING_CHUNK")}, {(1, "missing_block")}) == {(1, "missing_block")}
    assert one_name({(2, "CORRUPT_CHUNK")}, both) == {(2, "CORRUPT_CHUNK")}


def test_the_faults_of_an_export_are_shown_by_differences_too(tmp_path: Path) -> None:
    bad, good = MemoryWalk(datanode="dn-0"), MemoryWalk(datanode="dn-1")
    (block,) = blocks(1)
    corrupt = BlockTree.live(
        block.block_id, (replace(block.chunks[0], checksum_matches=False), *block.chunks[1:])
    )
    seen = (ReplicaFault("CORRUPT_CHUNK", "1 of 4 windows differ", block.block_id, 0),)
    bad.put(replica(1, corrupt, faults=seen))
    good.put(replica(1, block))
    out = tmp_path / "out"
    for walk in (bad, good):
        place = LocalDestination(tmp_path / "exports" / walk.datanode, Disk())
        export([walk], (), place, source=TreeSource.TREE)
    summary = run(out, tmp_path / "exports")
    (row,) = table_of(out, SweepTable.FINDINGS, summary.sweep_id)
    assert (row["kind"], row["lacking"], row["sources"]) == ("corrupt_chunk", ["dn-0"], ["dn-1"])
    assert row["detail"] == "CORRUPT_CHUNK on dn-0/DS-1: 1 of 4 windows differ"


def test_a_volume_that_an_agent_could_not_read_is_listed_once(tmp_path: Path) -> None:
    walk = MemoryWalk(datanode="dn-0")
    walk.put(replica(1, *blocks(1)))
    lost = SkippedVolume("/data/9", "volume_invalid", "no folder hdds")
    place = LocalDestination(tmp_path / "dn-0", Disk())
    export([walk], (lost,), place, source=TreeSource.TREE)
    summary = run(tmp_path / "out", tmp_path / "dn-0")
    assert summary.findings == {"unreadable": 1}
    (row,) = table_of(tmp_path / "out", SweepTable.FINDINGS, summary.sweep_id)
    assert row["detail"].endswith("volume /data/9: volume_invalid: no folder hdds")
