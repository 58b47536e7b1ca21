"""What a sweep reads of what it is given, and what it skips by name."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from admin.sweep import exit_status
from chunktable.manifest import FileKind, Manifest, SkippedVolume, file_name, parse_manifest
from chunktable.places import LocalDestination, resolve_location
from chunktable.reader import latest_manifest
from dnagent.export import export
from merkle.checksum import fingerprint
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import BlockTree
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from sweep.engine import SweepRequest
from sweep.exports import open_export
from sweep.files import fold_part
from sweep.inputs import is_unchanged, rows_of_part, table_parts
from sweep.output import Summary, SweepTable
from sweep.run import sweep
from tests.support.sweeps import Killed, OnePartWaves, Quiet, run, table_of
from tests.support.tables import MemoryWalk, blocks, replica
from tests.support.volumes import flip

SMALL = SyntheticCluster(seed=6, datanodes=3, containers=30, blocks=4, chunks=4, damage={})


@pytest.fixture
def exports(tmp_path: Path) -> list[Path]:
    synthetic(tmp_path / "table", SMALL)
    return sorted((tmp_path / "table").iterdir())


def test_exports_are_found_at_any_depth(tmp_path: Path, exports: list[Path]) -> None:
    deep = tmp_path / "a" / "b"
    deep.parent.mkdir()
    (tmp_path / "table").rename(deep)
    found = table_parts([str(tmp_path)])
    assert (len(found.parts), len(found.manifests), found.skipped) == (3, 3, ())


def test_of_a_datanode_with_two_exports_the_newest_counts(
    tmp_path: Path, exports: list[Path]
) -> None:
    synthetic(tmp_path / "copy", SMALL)
    older = tmp_path / "copy" / exports[0].name
    manifest = latest_manifest(*resolve_location(str(older)))
    aged = replace(manifest, created_at=manifest.created_at.replace(year=2001))
    (older / manifest.name).write_bytes(aged.to_bytes())
    found = table_parts([str(older), *map(str, exports)])
    assert sorted(part.location for part in found.parts) == sorted(
        str(next(e.glob("chunks-*"))) for e in exports
    )
    assert found.skipped == ()
    (note,) = found.notes
    assert note.startswith(f"{older}/{manifest.name} is superseded by {exports[0]}/")


@pytest.mark.parametrize("turned", [False, True])
def test_exports_of_one_datanode_are_joined_by_volume_in_any_order(
    tmp_path: Path, turned: bool
) -> None:
    """Of a volume in both, the rows of the newer count: in the older one container 1 of
    the second volume is damaged.
    """
    walks = [MemoryWalk(f"DS-{i}", datanode="dn-0") for i in range(3)]
    for number, walk in enumerate(walks):
        walk.put(replica(number, *blocks(2)))
    at = datetime(2026, 11, 22, tzinfo=UTC)
    one, other = blocks(2)
    bad = BlockTree.live(one.block_id, (replace(one.chunks[0], checksum_matches=False),))
    disk, source = Disk(), TreeSource.TREE
    walks[1].put(replica(1, bad, other))
    export(walks[:2], (), LocalDestination(tmp_path / "a", disk), source=source, now=lambda: at)
    walks[1].put(replica(1, one, other))
    later = at + timedelta(hours=1)
    export(walks[1:], (), LocalDestination(tmp_path / "b", disk), source=source, now=lambda: later)
    tables = [tmp_path / "a", tmp_path / "b"]
    for _ in range(2):
        summary = run(tmp_path / "out", *(reversed(tables) if turned else tables))
        roots = table_of(tmp_path / "out", SweepTable.ROOTS, summary.sweep_id)
        assert [(row["container_id"], row["volume"], row["corrupt"]) for row in roots] == [
            (0, "DS-0", 0),
            (1, "DS-1", 0),
            (2, "DS-2", 0),
        ]
        assert len(summary.notes) == 2
        assert f"{tmp_path}/a/manifest-000000001.json is superseded by" in summary.notes[0]
        assert "is joined to" in summary.notes[1]
        assert not summary.findings


@pytest.mark.parametrize("joined", [True, False])
def test_of_a_container_on_two_volumes_the_one_that_counts_is_compared(
    tmp_path: Path, joined: bool
) -> None:
    """In one export, and in two that are joined. The other is a finding, and neither
    damages the container nor stands in for a replica.
    """
    one, two = (MemoryWalk(f"DS-{i}", datanode="dn-0") for i in range(2))
    peer = MemoryWalk(datanode="dn-1")
    good = blocks(2)
    bad = BlockTree.live(good[0].block_id, (replace(good[0].chunks[0], checksum_matches=False),))
    one.put(replica(1, bad, state=ReplicaState.QUASI_CLOSED), replica(2, *good))
    two.put(replica(1, *good), replica(2, *good, bcs_id=6))
    peer.put(replica(1, *good))
    for number, walks in enumerate([[one], [two]] if joined else [[one, two]]):
        place = LocalDestination(tmp_path / "in" / str(number), Disk())
        export(walks, (), place, source=TreeSource.TREE)
    export([peer], (), LocalDestination(tmp_path / "in" / "peer", Disk()), source=TreeSource.TREE)
    summary = run(tmp_path / "out", tmp_path / "in")
    verdicts = table_of(tmp_path / "out", SweepTable.VERDICTS, summary.sweep_id)
    assert [(row["container_id"], row["verdict"], row["excluded"]) for row in verdicts] == [
        (1, "MATCH", 1),
        (2, "UNKNOWN", 1),
    ]
    assert verdicts[1]["detail"] == "only one replica takes part"
    found = table_of(tmp_path / "out", SweepTable.FINDINGS, summary.sweep_id)
    assert [(row["kind"], row["container_id"], row["detail"][:9]) for row in found] == [
        ("duplicate_replica", 1, "dn-0/DS-0"),
        ("duplicate_replica", 2, "dn-0/DS-1"),
    ]
    assert exit_status(summary) == ExitCode.FINDINGS


def test_an_old_export_does_not_stand_in_for_a_volume_that_could_not_be_read(
    tmp_path: Path,
) -> None:
    walks = [MemoryWalk(f"DS-{i}", datanode="dn-0") for i in range(2)]
    for number, walk in enumerate(walks):
        walk.put(replica(number, *blocks(2)))
    disk, source = Disk(), TreeSource.TREE
    export(walks, (), LocalDestination(tmp_path / "a", disk), source=source)
    lost = SkippedVolume("/data/1", "disk_failed", "it is gone")
    export(walks[:1], (lost,), LocalDestination(tmp_path / "b", disk), source=source)
    found = table_parts([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [Path(part.location).parent.name for part in found.parts] == ["b"]
    assert any("could not read all volumes" in note for note in found.notes)


@pytest.mark.parametrize("harm", ["footer", "page", "key", "column"])
def test_of_a_folder_of_plain_files_all_are_compared_or_none(tmp_path: Path, harm: str) -> None:
    folder, out = tmp_path / "table", tmp_path / "out"
    synthetic(tmp_path / "other", replace(SMALL, order=RowOrder.SHUFFLED))
    # Each replica is in all files.
    synthetic(folder, replace(SMALL, order=RowOrder.SHUFFLED))
    path = sorted(folder.glob("*.parquet"))[1]
    table = pq.read_table(path)
    match harm:
        case "footer":
            path.write_bytes(path.read_bytes()[:-20])
        case "page":
            pq.write_table(table, path, write_page_checksum=True, compression="none")
            flip(path, 2000)
        case "key":
            nulls = pa.nulls(table.num_rows, pa.int64())
            place = table.schema.get_field_index("container_id")
            pq.write_table(table.set_column(place, "container_id", nulls), path)
        case "column":
            pq.write_table(table.drop_columns(["checksum"]), path)
    alone = sorted((tmp_path / "other").glob("*.parquet"))[0]
    summary = run(out, folder, alone)
    reasons = {one.input: one.reason for one in summary.skipped}
    assert path.name in reasons[str(folder)]
    assert "none of its files is compared" in reasons[str(folder)]
    assert [one.input for one in summary.skipped] == [str(folder)]
    # What is left is a file that was named itself.
    assert summary.rows == pq.read_metadata(alone).num_rows


def test_a_volume_is_no_table(tmp_path: Path) -> None:
    """Nor is a folder in it, nor the folder of a datanode. The hint has the volume."""
    volume = tmp_path / "dn" / "disk"
    deep = volume / "hdds" / "CID-1" / "current" / "containerDir0"
    deep.mkdir(parents=True)
    (volume / "hdds" / "VERSION").write_text("")
    (tmp_path / "link").symlink_to(volume / "hdds")
    for name, relation in (
        (str(volume), "is"),
        (str(volume / "hdds"), "is"),
        (f"file://{volume}", "is"),
        (f"file://{volume}/hdds", "is"),
        (str(tmp_path / "link"), "is"),
        (str(volume / "hdds" / "CID-1"), "is in"),
        (str(deep), "is in"),
        (str(volume.parent), "has"),
    ):
        with pytest.raises(UsageError) as refused:
            sweep(SweepRequest(tmp_path / "out", (name,)), OnePartWaves(tmp_path), Quiet())
        assert refused.value.message.startswith(f"--table {name} {relation} a volume of a datanode")
        assert refused.value.hint == f"Use --volume {volume}."


def test_links_that_lead_to_each_other_are_skipped_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    synthetic(tmp_path / "table", SMALL)
    found = run(tmp_path / "out", tmp_path / "table", tmp_path / "a")
    assert [one.input for one in found.skipped] == [str(tmp_path / "a")]


def test_a_table_beside_a_volume_is_read(tmp_path: Path) -> None:
    """On the same disk, as an agent may export it."""
    (tmp_path / "hdds").mkdir()
    (tmp_path / "hdds" / "VERSION").write_text("")
    synthetic(tmp_path / "exports", SMALL)
    assert run(tmp_path / "out", tmp_path / "exports").skipped == ()


def test_a_folder_that_may_not_be_listed_costs_what_is_in_it_and_nothing_else() -> None:
    # Nothing is forbidden to root, and to nobody all that pytest makes.
    with tempfile.TemporaryDirectory() as name:
        table = Path(name) / "table"
        synthetic(table, SMALL)
        Path(name).chmod(0o755)
        forbidden, *others = sorted(table.iterdir())
        forbidden.chmod(0)
        me = os.geteuid()
        try:
            if me == 0:
                os.seteuid(65534)
            found = table_parts([str(table)])
        finally:
            os.seteuid(me)
            forbidden.chmod(0o755)
    assert [one.input for one in found.skipped] == [str(forbidden)]
    assert "Permission denied" in found.skipped[0].reason
    assert [Path(part.location).parent for part in found.parts] == others


@pytest.mark.parametrize(
    "harm", ["manifest lost", "manifest changed", "file lost", "file cut", "newer version"]
)
def test_a_broken_export_is_skipped_by_name_and_no_container_diverges(
    tmp_path: Path, exports: list[Path], harm: str
) -> None:
    broken = exports[1]
    (manifest,), (chunks,) = broken.glob("manifest-*"), broken.glob("chunks-*")
    match harm:
        case "manifest lost":
            manifest.unlink()
        case "manifest changed":
            manifest.write_bytes(manifest.read_bytes().replace(b'"rows": ', b'"rows": 1'))
        case "file lost":
            chunks.unlink()
        case "file cut":
            chunks.write_bytes(chunks.read_bytes()[:-1])
        case "newer version":
            newer = manifest.read_bytes().replace(b'"version": 2', b'"version": 3')
            manifest.write_bytes(newer)
    summary = run(tmp_path / "out", tmp_path / "table")
    assert [one.input for one in summary.skipped] == [str(broken)]
    assert summary.diverged == ()
    assert summary.findings == {"unreadable": 1}
    assert 0 < summary.replicas < 3 * SMALL.containers


def test_a_file_whose_pages_are_broken_takes_its_whole_export_out_of_the_sweep(
    tmp_path: Path, exports: list[Path]
) -> None:
    """Half a replica would pass for a damaged one."""
    (chunks,) = exports[1].glob("chunks-*")
    raw = bytearray(chunks.read_bytes())
    raw[len(raw) // 3 : len(raw) // 2] = bytes(len(raw) // 2 - len(raw) // 3)
    chunks.write_bytes(raw)
    summary = run(tmp_path / "out", tmp_path / "table")
    assert len(summary.skipped) == 1
    assert str(exports[1]) in summary.skipped[0].input
    assert summary.diverged == ()
    assert summary.replicas == sum(
        latest_manifest(*resolve_location(str(export))).containers
        for export in (exports[0], exports[2])
    )


@pytest.mark.parametrize("kind", [FileKind.CHUNKS, FileKind.CONTAINERS])
@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99])
def test_one_flipped_bit_anywhere_in_an_export_takes_it_out_of_the_sweep(
    tmp_path: Path, exports: list[Path], kind: FileKind, place: float
) -> None:
    """In a footer, pyarrow may take it for fewer rows or end the process: nothing is
    parsed before it is verified.
    """
    (broken,) = exports[1].glob(f"{kind.value}-*")
    flip(broken, int(broken.stat().st_size * place))
    summary = run(tmp_path / "out", tmp_path / "table")
    (skipped,) = summary.skipped
    assert str(exports[1]) in skipped.input
    assert f"{broken.name} does not match the checksum of its manifest" in skipped.reason
    assert (summary.diverged, summary.findings) == ((), {"unreadable": 1})


def _say(export: Path, manifest: Manifest) -> None:
    """One that says something else under the same name, and is whole."""
    (export / manifest.name).write_bytes(manifest.to_bytes())


def _with_inventory(export: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    manifest = latest_manifest(*resolve_location(str(export)))
    (recorded,) = manifest.of_kind(FileKind.CONTAINERS)
    table = change(pq.read_table(export / recorded.name))
    pq.write_table(table, export / recorded.name)
    raw = (export / recorded.name).read_bytes()
    recorded = replace(
        recorded, rows=table.num_rows, length_bytes=len(raw), checksum=fingerprint(raw).hex()
    )
    files = (*manifest.of_kind(FileKind.CHUNKS), recorded)
    _say(export, replace(manifest, files=files, containers=table.num_rows))


@pytest.mark.parametrize(
    "harm", ["counts", "no files", "rows of a file", "replica not there", "rows of a replica"]
)
def test_a_manifest_that_contradicts_its_files_is_no_export(
    tmp_path: Path, exports: list[Path], harm: str
) -> None:
    manifest = latest_manifest(*resolve_location(str(exports[1])))
    match harm:
        case "counts":
            _say(exports[1], replace(manifest, containers=manifest.containers - 1))
        case "no files":
            _say(exports[1], replace(manifest, files=()))
        case "rows of a file":
            _say(
                exports[1],
                replace(
                    manifest,
                    files=tuple(replace(file, rows=file.rows + 1) for file in manifest.files),
                ),
            )
        case "replica not there":
            _with_inventory(
                exports[1],
                lambda table: pa.concat_tables(
                    [table, _column(table.slice(0, 1), "container_id", 999)]
                ),
            )
        case "rows of a replica":
            _with_inventory(exports[1], lambda table: _column(table, "rows", 1))
    summary = run(tmp_path / "out", tmp_path / "table")
    (skipped,) = summary.skipped
    assert str(exports[1]) in skipped.input
    assert "rows" in skipped.reason
    assert (summary.diverged, summary.findings) == ((), {"unreadable": 1})


def _column(table: pa.Table, name: str, value: int) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(name), pa.array([value] * table.num_rows))


def test_findings_of_an_agent_that_cannot_be_read_are_skipped_by_name_alone(
    tmp_path: Path, exports: list[Path]
) -> None:
    manifest = latest_manifest(*resolve_location(str(exports[1])))
    (chunks,) = manifest.of_kind(FileKind.CHUNKS)
    lost = replace(
        chunks, name=file_name(FileKind.FINDINGS, 1, "0123abcd", 1), kind=FileKind.FINDINGS
    )
    (exports[1] / lost.name).write_bytes(bytes(lost.length_bytes))
    _say(exports[1], replace(manifest, files=(*manifest.files, lost)))
    summary = run(tmp_path / "out", tmp_path / "table")
    (skipped,) = summary.skipped
    assert str(exports[1]) in skipped.input
    assert lost.name in skipped.reason
    assert summary.replicas == 3 * SMALL.containers
    assert summary.findings == {"unreadable": 1}


def test_files_of_an_export_are_cut_by_rows_and_each_row_group_is_read_once(
    tmp_path: Path, exports: list[Path]
) -> None:
    (chunks,) = exports[0].glob("chunks-*")
    table = pq.read_table(chunks)
    pq.write_table(table, chunks, row_group_size=7)
    manifest = latest_manifest_of(exports[0], chunks)
    parts = table_parts([str(exports[0])], part_rows=25).parts
    assert len(parts) == -(-table.num_rows // 25)
    assert [fold_part(part).skipped for part in parts] == [""] * len(parts)
    assert (
        sum(fold_part(part).rows for part in parts)
        == sum(part.rows for part in parts)
        == manifest.rows
    )


def latest_manifest_of(export: Path, changed: Path) -> Manifest:
    """With the file as it is now."""
    (place,) = export.glob("manifest-*")
    manifest = parse_manifest(place.read_bytes(), place.name)
    raw = changed.read_bytes()
    files = tuple(
        replace(file, length_bytes=len(raw), checksum=fingerprint(raw).hex(), pieces=())
        if file.name == changed.name
        else file
        for file in manifest.files
    )
    manifest = replace(manifest, files=files)
    place.write_bytes(manifest.to_bytes())
    return manifest


def test_plain_files_need_no_manifest_and_foreign_ones_are_skipped(tmp_path: Path) -> None:
    truth = synthetic(tmp_path / "table", replace(SMALL, order=RowOrder.SHUFFLED))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "table" / "other.parquet")
    (tmp_path / "table" / "torn.parquet").write_bytes(b"PAR1")
    (tmp_path / "table" / "_temporary.parquet").write_bytes(b"")
    found = table_parts([str(tmp_path / "table")])
    assert (found.parts, truth.rows > 0) == ((), True)
    # The entry of the folder names the torn file, which has none of its own.
    assert [Path(one.input).name for one in found.skipped] == ["other.parquet", "table"]
    assert "datanode" in found.skipped[0].reason
    assert f"{tmp_path}/table/torn.parquet: " in found.skipped[1].reason
    (tmp_path / "table" / "torn.parquet").unlink()
    found = table_parts([str(tmp_path / "table")])
    assert sum(part.rows for part in found.parts) == truth.rows


def test_a_folder_of_plain_files_with_several_faults_has_one_entry(tmp_path: Path) -> None:
    table = tmp_path / "table"
    synthetic(table, replace(SMALL, order=RowOrder.SHUFFLED))
    for path in table.glob("*.parquet"):
        path.write_bytes(b"PAR1")
    (skipped,) = table_parts([str(table)]).skipped
    assert skipped.input == str(table)
    assert ", and 2 more cannot be read; the folder is one table" in skipped.reason
    for path in table.glob("*.parquet"):
        path.unlink()
    synthetic(table, replace(SMALL, order=RowOrder.SHUFFLED))
    Path(os.fsdecode(os.fsencode(table) + b"/caf\xe9.parquet")).touch()
    (skipped,) = table_parts([str(table)]).skipped
    assert skipped.input == str(table)
    assert "caf\\xe9.parquet: its name is not UTF-8 text; the folder is one" in skipped.reason


def test_a_file_that_is_given_twice_is_read_once(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=RowOrder.SHUFFLED))
    (first, *_) = sorted((tmp_path / "table").glob("*.parquet"))
    assert len(table_parts([str(first), str(tmp_path / "table")]).parts) == 3


@pytest.mark.parametrize("turned", [False, True])
def test_a_torn_file_that_is_given_twice_leaves_out_its_folder(
    tmp_path: Path, turned: bool
) -> None:
    table = tmp_path / "table"
    synthetic(table, replace(SMALL, order=RowOrder.SHUFFLED))
    torn = sorted(table.glob("*.parquet"))[1]
    torn.write_bytes(b"PAR1")
    names = [str(table), str(torn)]
    found = table_parts(names[::-1] if turned else names)
    assert found.parts == ()
    assert [one.input for one in found.skipped] == [str(table)]


def test_large_files_are_cut_between_row_groups(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=RowOrder.SHUFFLED))
    (first, *_) = sorted((tmp_path / "table").glob("*.parquet"))
    table = pq.read_table(first)
    pq.write_table(table, first, row_group_size=10)
    found = table_parts([str(first)], part_rows=25)
    assert [(part.first, part.rows) for part in found.parts][:2] == [(0, 20), (2, 20)]
    assert sum(part.rows for part in found.parts) == table.num_rows
    assert len({part.part_id for part in found.parts}) == len(found.parts)


def test_a_part_tells_when_its_file_changed(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=RowOrder.SHUFFLED))
    part = table_parts([str(tmp_path / "table")]).parts[0]
    assert is_unchanged(part)
    Path(part.location).write_bytes(Path(part.location).read_bytes() + b"x")
    assert not is_unchanged(part)
    Path(part.location).unlink()
    assert not is_unchanged(part)


def test_an_events_file_is_no_table(exports: list[Path]) -> None:
    manifest = latest_manifest(*resolve_location(str(exports[0])))
    assert {file.kind for file in manifest.files} == {FileKind.CHUNKS, FileKind.CONTAINERS}
    assert len(table_parts([str(exports[0])]).parts) == 1


@dataclass
class Agents:
    """Three datanodes that hold the same containers, and export by hand or by an agent
    that repairs nothing.
    """

    to: Path
    audit: bool = True
    walks: list[MemoryWalk] = field(
        default_factory=lambda: [MemoryWalk(datanode=f"dn-{i}") for i in range(3)]
    )

    def __post_init__(self) -> None:
        for walk in self.walks:
            walk.put(*(replica(number, *blocks(2)) for number in range(1, 6)))

    def export(self, *places: int) -> None:
        for place in places:
            walk, told = self.walks[place], self.to.parent / "audit.jsonl" if self.audit else None
            folder = LocalDestination(self.to / walk.datanode, Disk())
            export([walk], (), folder, source=TreeSource.TREE, audit_file=told)

    def change(self, place: int, container_id: int, *, matches: bool = True, seed: int = 1) -> None:
        one, other = blocks(2, seed=seed)
        first = replace(one.chunks[0], checksum_matches=matches)
        changed = BlockTree.live(one.block_id, (first, *one.chunks[1:]))
        self.walks[place].put(replica(container_id, changed, other))


def after_a_night(tmp_path: Path) -> tuple[Agents, Path]:
    """Agents, of which the first two changed a chunk in silence since the sweep into
    the folder that is given too.
    """
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.export(0, 1, 2)
    run(out, tmp_path / "to")
    agents.change(0, 2)
    agents.change(1, 3)
    return agents, out


def silent(out: Path, summary: Summary) -> set[tuple[int, str]]:
    """Container and datanode of what changed in silence."""
    rows = table_of(out, SweepTable.FINDINGS, summary.sweep_id)
    return {
        (row["container_id"], row["lacking"][0]) for row in rows if row["kind"] == "silent_change"
    }


@pytest.mark.parametrize("is_of_this_release", [True, False])
def test_agents_that_export_twice_between_two_sweeps_are_compared_as_the_others_are(
    tmp_path: Path, is_of_this_release: bool
) -> None:
    agents, out = after_a_night(tmp_path)
    if not is_of_this_release:
        (kept,) = (out / "chunks").glob("*/parts.json")
        document = json.loads(kept.read_text())
        del document["exports"]
        kept.write_text(json.dumps(document))
    agents.export(0, 1, 1, 1, 2, 2)
    summary = run(out, tmp_path / "to")
    assert silent(out, summary) == {(2, "dn-0"), (3, "dn-1")}
    assert summary.notes == ()


def copy_of(out: Path, datanode: str, kind: str) -> tuple[Path, int]:
    """The file that has a copy of the datanode's manifest, or of its inventory, and
    where in the file its middle is.
    """
    (kept,) = (out / "chunks").iterdir()
    places = json.loads((kept / "parts.json").read_text())["manifests"]
    (place,) = (one for one in places if open_export(one)[2].datanode == datanode)
    *_, pack, numbers, _ = place.split("/")
    at, first, second = map(int, numbers.split("-"))
    return kept / pack, at + (first // 2 if kind == "manifest" else first + second // 2)


@pytest.mark.parametrize("kind", ["manifest", "containers", "chunks"])
def test_what_is_lost_of_the_sweep_before_costs_one_datanode_alone(
    tmp_path: Path, kind: str
) -> None:
    agents, out = after_a_night(tmp_path)
    (chunks,) = (tmp_path / "to" / "dn-0").glob("chunks-*")
    agents.export(0, 1, 2)
    if kind == "chunks":
        flip(chunks, chunks.stat().st_size // 2)
    else:
        flip(*copy_of(out, "dn-0", kind))
    # It still held what did not change, which this puts elsewhere.
    agents.export(0)
    summary = run(out, tmp_path / "to")
    assert silent(out, summary) == {(3, "dn-1")}
    assert any("damaged" in note for note in summary.notes)
    # The copies are read for rows alone, not for what all of them say.
    assert not any("are unknown for" in note for note in summary.notes)
    assert summary.skipped == ()


def test_events_that_cannot_be_read_cost_one_datanode_alone(tmp_path: Path) -> None:
    agents, out = after_a_night(tmp_path)
    # A delete is an event.
    for walk in agents.walks:
        del walk.replicas_held[5]
    agents.export(0, 1, 2)
    (events,) = (tmp_path / "to" / "dn-0").glob("events-*")
    flip(events, events.stat().st_size // 2)
    summary = run(out, tmp_path / "to")
    assert silent(out, summary) == {(3, "dn-1")}
    (note,) = summary.notes
    assert events.name in note


@pytest.mark.parametrize("audit", [True, False])
def test_where_no_agent_exports_a_mended_chunk_did_not_change_in_silence(
    tmp_path: Path, audit: bool
) -> None:
    agents, out = Agents(tmp_path / "to", audit), tmp_path / "out"
    agents.change(0, 2, matches=False)
    agents.export(0, 1, 2)
    run(out, tmp_path / "to")
    # Mended by others; the other chunk's checksum matches as it did, and is another.
    agents.walks[0].put(replica(2, *blocks(2)))
    agents.export(0, 1, 2)
    summary = run(out, tmp_path / "to")
    found = [
        row
        for row in table_of(out, SweepTable.FINDINGS, summary.sweep_id)
        if row["kind"] == "silent_change"
    ]
    is_first = {(row["block_id"], row["chunk_offset"]) == (1, 0) for row in found}
    assert is_first == ({True, False} if audit else {False})


def test_a_killed_sweep_does_not_go_on_with_exports_that_were_made_anew(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.export(0, 1, 2)
    with pytest.raises(Killed):
        run(out, tmp_path / "to", engine=OnePartWaves(tmp_path / "spill", dies_after=1))
    agents.export(0, 1, 2, 0, 1, 2)
    progress = Quiet()
    summary = run(out, tmp_path / "to", progress=progress)
    assert summary.verdicts == {"MATCH": 5}
    assert not any("going on" in note for note in progress.notes)


def test_of_names_that_are_no_text_only_those_of_tables_matter(tmp_path: Path) -> None:
    synthetic(tmp_path / "to", SMALL)
    path = os.fsencode(tmp_path / "to")
    Path(os.fsdecode(path + b"/caf\xe9.txt")).touch()
    summary = run(tmp_path / "out", tmp_path / "to")
    assert not summary.skipped
    Path(os.fsdecode(path + b"/caf\xe9.parquet")).touch()
    folder = Path(os.fsdecode(path + b"/d\xe9"))
    folder.mkdir()
    (folder / "1.parquet").touch()
    summary = run(tmp_path / "out", tmp_path / "to")
    reason = "its name is not UTF-8 text"
    assert {(one.input, one.reason) for one in summary.skipped} == {
        (f"{tmp_path}/to/caf\\xe9.parquet", reason),
        (f"{tmp_path}/to/d\\xe9", reason),
    }
    for request in (
        SweepRequest(tmp_path / "out", (str(folder),)),
        SweepRequest(tmp_path / "out", volumes=(str(folder),)),
        SweepRequest(folder / "out", (str(tmp_path / "to"),)),
    ):
        with pytest.raises(UsageError, match=r"d\\xe9.*: its name is not UTF-8 text"):
            sweep(request, OnePartWaves(tmp_path / "spill"), Quiet())


def test_parts_are_cut_by_replicas_as_well_as_by_rows() -> None:
    mebi = 1 << 20
    assert rows_of_part(16 * mebi, 13_000) == 4 * mebi
    assert rows_of_part(16 * mebi, 2 * mebi) == 2 * mebi
    # Never less than a row group, which is read whole.
    assert rows_of_part(16 * mebi, 8 * mebi) == mebi
    assert rows_of_part(1000, 400, rows_max=300) == 300
