"""A crash at any operation of an export: the table is the one before or the new
one, each whole, and the next export ends where this one would have, with nothing left
over and every event told once.
"""

import json
import shutil
from pathlib import Path

import pyarrow.fs as pa_fs
import pytest

from chunktable.places import LocalDestination
from chunktable.reader import check_content, latest_manifest, read_events
from dnagent.export import ExportLimits, ExportResult, export
from merkle.replica import TreeSource
from merkle.tree import ContainerTree
from ozone.survey import ReplicaFault
from repair.audit import AuditLog
from runtime.disk import Disk, Operation
from tests.support.disk import ImagingDisk
from tests.support.tables import MemoryWalk, blocks, current_rows, replica, trees_of

pytestmark = pytest.mark.crashes

LOCAL = pa_fs.LocalFileSystem()
# So small that an export closes files, joins old ones and has several pieces of events
# and faults.
SMALL = ExportLimits(group_rows=8, file_rows_max=16, small_files_max=1, piece_rows=3)
STEPS = 3


def walk(step: int) -> MemoryWalk:
    """What the volume holds at each export: something new, changed, deleted, and as it
    was.
    """
    found = MemoryWalk()
    found.put(
        replica(1, *blocks(3)),
        replica(2, *blocks(3, seed=step), faults=(ReplicaFault("unreadable", "x"),) * 3),
        replica(3, *blocks(2 + step)),
        replica(10 + step, *blocks(4)),
    )
    return found


def audited(folder: Path, step: int) -> Path:
    path = folder / "audit.jsonl"
    audit = AuditLog(path)
    for block in range(3):
        audit.write(
            container=2, block=10 * step + block, offset=0, length=1, source="dn-2", job="j"
        )
    audit.close()
    return path


def run(folder: Path, step: int, disk: Disk) -> ExportResult:
    destination = LocalDestination(folder / "table", disk)
    return export(
        [walk(step)],
        [],
        destination,
        source=TreeSource.TREE,
        audit_file=folder / "audit.jsonl",
        limits=SMALL,
    )


def trees(folder: Path) -> dict[tuple[str, int], ContainerTree | None]:
    """What a reader finds, every file of it proven."""
    table = str(folder / "table")
    manifest = latest_manifest(LOCAL, table)
    for file in manifest.files:
        check_content(LOCAL, table, file)
    return trees_of(current_rows(LOCAL, table, manifest))


def is_begun(folder: Path) -> bool:
    """Whether there is a table yet."""
    return any((folder / "table").glob("manifest-*.json"))


def events(folder: Path) -> list[tuple[object, ...]]:
    table = str(folder / "table")
    rows = read_events(LOCAL, table, latest_manifest(LOCAL, table)).to_pylist()
    return sorted((row["kind"], row["container_id"], row["block_id"] or 0) for row in rows)


def named(folder: Path) -> set[str]:
    """What may be in the folder: two tables."""
    done = latest_manifest(LOCAL, str(folder / "table"))
    names = {done.name} | {file.name for file in done.files}
    before = [path for path in (folder / "table").glob("manifest-*") if path.name != done.name]
    for path in before:
        names |= {path.name} | set(file_names(path))
    assert len(before) <= 1
    return names


def file_names(manifest: Path) -> list[str]:
    return [file["name"] for file in json.loads(manifest.read_text())["files"]]


@pytest.mark.parametrize("first", [False, True], ids=["third export", "first export"])
def test_an_export_cut_short_anywhere_is_done_or_undone(memory_folder: Path, first: bool) -> None:
    start = memory_folder / "start"
    start.mkdir()
    for step in range(0 if first else STEPS):
        audited(start, step)
        run(start, step, Disk())
    audited(start, STEPS)
    before = is_begun(start) and trees(start)
    undisturbed = shutil.copytree(start, memory_folder / "undisturbed")
    disk = ImagingDisk(undisturbed, memory_folder / "images")
    run(undisturbed, STEPS, disk)
    expected, told = trees(undisturbed), events(undisturbed)
    assert len(set(told)) == len(told)
    removals = [path for operation, path in disk.operations if operation is Operation.REMOVE]
    assert bool(removals) != first
    for image in disk.finish():
        crashed = image.folder
        found = is_begun(crashed) and trees(crashed)
        assert found == expected or (found == before and not image.is_final), image
        run(crashed, STEPS, Disk())
        assert trees(crashed) == expected, image
        assert events(crashed) == told, image
        assert {path.name for path in (crashed / "table").iterdir()} == named(crashed), image
        shutil.rmtree(crashed)
