"""Where a chunk table is written: a local folder, and whatever pyarrow reaches by
names, behave alike.

A bucket of S3 is the second kind; that it is one is tested against a real gateway
(tests/e2e).
"""

from collections.abc import Callable
from pathlib import Path

import pyarrow.fs as pa_fs
import pytest

from chunktable.errors import DestinationError
from chunktable.manifest import FileKind, manifest_name
from chunktable.places import Destination, LocalDestination, ObjectDestination, destination_of
from chunktable.reader import check_content, latest_manifest
from dnagent.export import ExportLimits, ExportResult, export
from merkle.errors import ReconcileError
from merkle.replica import TreeSource
from runtime.disk import Disk, Operation
from runtime.errors import DiskError
from tests.support.disk import FailingDisk
from tests.support.tables import MemoryWalk, blocks, current_rows, replica, trees_of

SMALL = ExportLimits(group_rows=4, file_rows_max=12, small_files_max=1, piece_rows=2)
Fails = Callable[[str, str], bool]


class FailingHandler(pa_fs.FileSystemHandler):
    """A file system that fails where it is told to, before anything is done."""

    def __init__(self, under: pa_fs.FileSystem, fails: Fails) -> None:
        self._under = under
        self._fails = fails

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def get_type_name(self) -> str:
        return "failing"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pa_fs.FileInfo]:
        return self._under.get_file_info(paths)

    def get_file_info_selector(self, selector: pa_fs.FileSelector) -> list[pa_fs.FileInfo]:
        self._check("list", selector.base_dir)
        return self._under.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        raise NotImplementedError

    def delete_dir(self, path: str) -> None:
        raise NotImplementedError

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._check("remove", path)
        self._under.delete_file(path)

    def move(self, source: str, target: str) -> None:
        raise NotImplementedError

    def copy_file(self, source: str, target: str) -> None:
        raise NotImplementedError

    def open_input_stream(self, path: str) -> object:
        return self._under.open_input_stream(path)

    def open_input_file(self, path: str) -> object:
        return self._under.open_input_file(path)

    def open_output_stream(self, path: str, metadata: object) -> object:
        self._check("write", path)
        return self._under.open_output_stream(path)

    def open_append_stream(self, path: str, metadata: object) -> object:
        raise NotImplementedError

    def _check(self, operation: str, path: str) -> None:
        if self._fails(operation, path.rpartition("/")[2]):
            raise OSError(f"{operation} of {path} failed")


def local(folder: Path, fails: Fails) -> Destination:
    """Fails where it is written to or removed."""
    names = {Operation.WRITE: "write", Operation.REMOVE: "remove"}
    disk = FailingDisk(
        5, lambda op, path: op in names and fails(names[op], path.name.removesuffix(".tmp"))
    )
    return LocalDestination(folder, disk)


def objects(folder: Path, fails: Fails) -> Destination:
    folder.mkdir(exist_ok=True)
    under = pa_fs.SubTreeFileSystem(str(folder.parent), pa_fs.LocalFileSystem())
    return ObjectDestination(pa_fs.PyFileSystem(FailingHandler(under, fails)), folder.name)


def never(_operation: str, _name: str) -> bool:
    return False


@pytest.fixture(params=[local, objects])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Fails], Destination]:
    return lambda fails: request.param(tmp_path / "table", fails)


def walk(step: int) -> MemoryWalk:
    found = MemoryWalk()
    found.put(
        replica(1, *blocks(3)), replica(2, *blocks(3, seed=step)), replica(10 + step, *blocks(4))
    )
    return found


def run(destination: Destination, step: int) -> ExportResult:
    return export([walk(step)], [], destination, source=TreeSource.TREE, limits=SMALL)


def names(destination: Destination) -> set[str]:
    selector = pa_fs.FileSelector(destination.folder, allow_not_found=True)
    return {entry.base_name for entry in destination.filesystem.get_file_info(selector)}


def check(destination: Destination, done: ExportResult, step: int) -> None:
    """The table is whole and says what was exported."""
    filesystem, folder = destination.filesystem, destination.folder
    assert latest_manifest(filesystem, folder) == done.manifest
    for file in done.manifest.files:
        check_content(filesystem, folder, file)
    expected = {("DS-1", i): found.tree for i, found in walk(step).replicas_held.items()}
    assert trees_of(current_rows(filesystem, folder, done.manifest)) == expected


def test_tables_follow_each_other_and_two_are_kept(make: Callable[[Fails], Destination]) -> None:
    destination = make(never)
    done = []
    for step in range(5):
        done.append(run(destination, step))
        check(destination, done[-1], step)
    manifests = {name for name in names(destination) if name.startswith("manifest")}
    assert manifests == {manifest_name(4), manifest_name(5)}
    assert {file.name for one in done[3:] for file in one.manifest.files} <= names(destination)
    files = {name for name in names(destination) if name.startswith("chunks")}
    assert len(files) <= sum(len(one.manifest.of_kind(FileKind.CHUNKS)) for one in done[3:])


@pytest.mark.parametrize("kind", ["chunks", "containers", "events", "manifest"])
def test_a_write_that_fails_leaves_the_table_as_it_was(
    make: Callable[[Fails], Destination], kind: str
) -> None:
    whole = make(never)
    first = run(whole, 0)
    before = names(whole)
    failing = make(lambda operation, name: operation == "write" and name.startswith(kind))
    with pytest.raises(ReconcileError) as failed:
        run(failing, 1)
    assert isinstance(failed.value, DiskError | DestinationError)
    assert {name for name in names(whole) if name.startswith("manifest")} == {manifest_name(1)}
    # Up to the manifest what was written is removed at once.
    assert kind == "manifest" or names(whole) == before
    check(whole, first, 0)
    check(whole, run(whole, 1), 1)


def test_what_cannot_be_removed_does_not_undo_an_export_and_is_removed_later(
    make: Callable[[Fails], Destination],
) -> None:
    failing = make(lambda operation, _: operation == "remove")
    for step in range(4):
        check(failing, run(failing, step), step)
    assert {manifest_name(i) for i in range(1, 5)} <= names(failing)
    whole = make(never)
    check(whole, run(whole, 4), 4)
    assert {name for name in names(whole) if name.startswith("manifest")} == {
        manifest_name(4),
        manifest_name(5),
    }


def test_what_is_not_there_is_removed_without_an_error(
    make: Callable[[Fails], Destination],
) -> None:
    destination = make(never)
    run(destination, 0)
    destination.remove("chunks-000000009-0123abcd-0001.parquet")


def test_two_exports_at_once_leave_one_whole_table(tmp_path: Path) -> None:
    """Where nobody can be kept out: the later manifest counts, and neither removes what
    the other needs.
    """
    slow, quick = objects(tmp_path / "table", never), objects(tmp_path / "table", never)
    run(quick, 0)
    overtaken = False

    def overtake(_: object) -> None:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            run(quick, 1)

    done = export([walk(2)], [], slow, source=TreeSource.TREE, limits=SMALL, on_done=overtake)
    assert done.manifest.sequence == 2
    check(quick, done, 2)
    check(quick, run(quick, 3), 3)


def test_a_destination_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    destination = objects(tmp_path / "table", lambda operation, _: operation == "list")
    with pytest.raises(DestinationError, match="cannot list"):
        run(destination, 0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DiskError):
        run(LocalDestination(tmp_path / "file" / "table", Disk()), 0)


def test_a_place_is_local_unless_it_is_a_uri(tmp_path: Path) -> None:
    assert isinstance(destination_of(str(tmp_path), "dn", Disk()), LocalDestination)
    assert isinstance(destination_of(tmp_path.as_uri(), "dn", Disk()), LocalDestination)
    bucket = destination_of(
        "s3://bucket/a?endpoint_override=127.0.0.1:1&scheme=http&region=x", "dn", Disk()
    )
    assert (isinstance(bucket, ObjectDestination), bucket.folder) == (True, "bucket/a/dn")
