"""A scan finds what Ozone's scanner finds and builds the tree that it builds (rows
S1-S5, S20).
"""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.checksum import ChecksumType, fold, window_checksums
from merkle.errors import RecordInvalidError
from merkle.record import ChunkRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ChunkTree, ContainerId, ContainerTree
from ozone.containers import Container, ContainerStore
from ozone.errors import ContainerUnsupportedError
from ozone.rocks import Batch, OzoneTable, block_key
from ozone.scan import (
    BUFFER_BYTES,
    Finding,
    FindingType,
    ScanResult,
    build_from_metadata,
    scan,
    scan_metadata,
)
from ozone.volume import Hold, open_volume
from runtime.disk import Disk, Reader, disk_error
from runtime.errors import OperationInterruptedError
from tests.support.handmade import VolumeMaker, chunk_record, whole
from tests.support.volumes import flip

Found = list[tuple[FindingType, int | None, int | None]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[VolumeMaker]:
    with VolumeMaker(tmp_path / "volume") as maker:
        yield maker


@contextmanager
def opened(
    made: VolumeMaker, container_id: int = 1, disk: Disk | None = None
) -> Iterator[Container]:
    made.database.close()
    state = made.root.parent / "state"
    with open_volume(made.root, hold=Hold.READ_ONLY, state_folder=state, disk=Disk()) as volume:
        yield ContainerStore(volume, disk or Disk()).get(ContainerId(container_id))


def scanned(made: VolumeMaker, disk: Disk | None = None) -> ScanResult:
    with opened(made, disk=disk) as container:
        return scan(container)


def found(result: ScanResult) -> Found:
    return [(finding.type, finding.block_id, finding.offset) for finding in result.findings]


def observed(record: ChunkRecord, data: bytes) -> int:
    return fold(window_checksums(data, record.checksum_type, record.bytes_per_checksum))


def break_folder(kind: str, folder: Path) -> None:
    descriptor = folder / "metadata" / "1.container"
    match kind:
        case "no container folder":
            shutil.rmtree(folder)
        case "no metadata folder":
            shutil.rmtree(folder / "metadata")
        case "no descriptor":
            descriptor.unlink()
        case "corrupt descriptor":
            flip(descriptor, descriptor.read_bytes().index(b"maxSize: 5") + 9)
        case "truncated descriptor":
            descriptor.write_bytes(descriptor.read_bytes()[:100])
        case "empty descriptor":
            descriptor.write_bytes(b"")
        case "another container's descriptor":
            shutil.copy(folder.parent / "2" / "metadata" / "2.container", descriptor)
        case "descriptor is a folder":
            descriptor.unlink()
            descriptor.mkdir()
        case "no chunks folder":
            shutil.rmtree(folder / "chunks")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("no container folder", FindingType.MISSING_CONTAINER_DIR),
        ("no metadata folder", FindingType.MISSING_METADATA_DIR),
        ("no descriptor", FindingType.MISSING_CONTAINER_FILE),
        ("corrupt descriptor", FindingType.CORRUPT_CONTAINER_FILE),
        ("truncated descriptor", FindingType.CORRUPT_CONTAINER_FILE),
        ("empty descriptor", FindingType.CORRUPT_CONTAINER_FILE),
        ("another container's descriptor", FindingType.CORRUPT_CONTAINER_FILE),
        ("descriptor is a folder", FindingType.CORRUPT_CONTAINER_FILE),
        ("no chunks folder", FindingType.MISSING_CHUNKS_DIR),
    ],
)
def test_s1_a_fault_of_the_folder_is_the_only_finding_and_no_data_are_read(
    made: VolumeMaker, kind: str, expected: FindingType
) -> None:
    made.container(2)
    folder = made.container()
    made.block(1, 20, whole(3000))
    flip(made.block_file(1, 20), 5)
    break_folder(kind, folder)

    result = scanned(made)

    assert found(result) == [(expected, None, None)]
    assert result.tree == ContainerTree.of(ContainerId(1), ())
    assert result.bytes_read == 0


def test_a_container_found_elsewhere_than_its_descriptor_says_is_no_finding(
    made: VolumeMaker,
) -> None:
    made.container()
    made.block(1, 20, whole(10))

    assert found(scanned(made)) == []


def test_s5_a_container_marked_as_deleted_has_no_findings(made: VolumeMaker) -> None:
    folder = made.container(state=ReplicaState.DELETED)
    made.block(1, 20, whole(10))
    shutil.rmtree(folder / "chunks")

    result = scanned(made)

    assert result.deleted
    assert found(result) == []


def test_a_container_that_goes_away_during_its_scan_has_no_findings(made: VolumeMaker) -> None:
    folder = made.container()
    made.block(1, 20, whole(10))
    made.block(1, 21, whole(10))

    with opened(made) as container:
        result = scan(container, on_bytes=lambda _: shutil.rmtree(folder, ignore_errors=True))

    assert result.deleted
    assert found(result) == []


@pytest.mark.parametrize(("schema", "layout"), [(None, 2), ("2", 2), ("3", 1)])
def test_containers_of_older_schemas_and_layouts_are_refused_by_name(
    made: VolumeMaker, schema: str | None, layout: int
) -> None:
    made.container(schema_version=schema, layout_version=layout)

    with opened(made) as container, pytest.raises(ContainerUnsupportedError):
        scan(container)


def test_s2_findings_come_by_block_and_chunk_and_the_tree_holds_what_was_seen(
    made: VolumeMaker,
) -> None:
    """CR-026"""
    made.container()
    for block in range(1, 7):
        made.block(1, block, whole(2048), whole(2048, 2048), whole(2048, 4096))
    flip(made.block_file(1, 1), 0)
    flip(made.block_file(1, 1), 6143)
    made.block_file(1, 2).unlink()
    made.block_file(1, 4).write_bytes(b"")

    result = scanned(made)

    assert found(result) == [
        (FindingType.CORRUPT_CHUNK, 1, 0),
        (FindingType.CORRUPT_CHUNK, 1, 4096),
        (FindingType.MISSING_DATA_FILE, 2, None),
        (FindingType.MISSING_CHUNK, 4, 0),
        (FindingType.MISSING_CHUNK, 4, 2048),
        (FindingType.MISSING_CHUNK, 4, 4096),
    ]
    assert [block.block_id for block in result.tree.blocks] == [1, 3, 4, 5, 6]
    assert [chunk.checksum_matches for chunk in result.tree.blocks[0].chunks] == [
        False,
        True,
        False,
    ]
    assert result.tree.blocks[2].chunks == ()
    assert result.bad_windows == {(1, 0): {0}, (1, 4096): {1}}


def test_s3_an_undamaged_container_has_the_tree_of_its_records(made: VolumeMaker) -> None:
    """CR-012"""
    made.container()
    for number, kind in enumerate(
        (ChecksumType.CRC32, ChecksumType.CRC32C, ChecksumType.SHA256, ChecksumType.MD5)
    ):
        made.block(
            1,
            100 - number,
            whole(5000, checksum_type=kind),
            whole(1, 5000, checksum_type=kind, window=16),
        )

    with opened(made) as container:
        result = scan(container)
        assert result.findings == ()
        assert result.tree == build_from_metadata(container) == scan_metadata(container).tree
        assert result.bytes_read == 4 * 5001


def test_s4_the_check_of_metadata_does_not_see_a_truncated_file_and_the_scan_does(
    made: VolumeMaker,
) -> None:
    made.container()
    record = made.block(1, 20, whole(4096))
    data = made.block_file(1, 20).read_bytes()
    os.truncate(made.block_file(1, 20), 2048)

    with opened(made) as container:
        assert found(scan_metadata(container)) == []
        result = scan(container)

    assert found(result) == [(FindingType.INCONSISTENT_CHUNK_LENGTH, 20, 0)]
    checksum = observed(record.chunks[0], data[:2048])
    assert result.tree.blocks[0].chunks == (ChunkTree(0, 2048, checksum, checksum_matches=False),)
    assert result.bad_windows == {(20, 0): {2, 3}}


def test_a_file_that_ends_inside_a_window_is_a_corrupt_chunk_of_the_length_read(
    made: VolumeMaker,
) -> None:
    made.container()
    record = made.block(1, 20, whole(4096))
    data = made.block_file(1, 20).read_bytes()
    os.truncate(made.block_file(1, 20), 2500)

    result = scanned(made)

    assert found(result) == [(FindingType.CORRUPT_CHUNK, 20, 0)]
    checksum = observed(record.chunks[0], data[:2500])
    assert result.tree.blocks[0].chunks == (ChunkTree(0, 2500, checksum, checksum_matches=False),)
    assert result.bad_windows == {(20, 0): {2, 3}}


def test_a_chunk_beyond_the_end_is_missing_while_the_one_before_is_short(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(2048), whole(2048, 2048))
    os.truncate(made.block_file(1, 20), 1024)

    assert found(scanned(made)) == [
        (FindingType.INCONSISTENT_CHUNK_LENGTH, 20, 0),
        (FindingType.MISSING_CHUNK, 20, 2048),
    ]


def test_bytes_behind_the_last_chunk_are_no_finding(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(2048))
    with made.block_file(1, 20).open("ab") as file:
        file.write(b"an uncommitted tail")

    assert found(scanned(made)) == []


def test_the_windows_of_the_next_chunk_are_not_read_into_the_last_one(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(1500), whole(1500, 1500))

    assert found(scanned(made)) == []


@pytest.mark.parametrize(
    "window", [1, 1000, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 1 << 20]
)
def test_windows_of_any_size_are_read_whole(made: VolumeMaker, window: int) -> None:
    made.container()
    length = 3000 if window == 1 else BUFFER_BYTES * 2 + 17
    made.block(1, 20, whole(length, window=window))
    made.block(1, 21, whole(length, window=window))
    flip(made.block_file(1, 21), length - 1)

    result = scanned(made)

    assert found(result) == [(FindingType.CORRUPT_CHUNK, 21, 0)]
    assert result.bad_windows == {(21, 0): {(length - 1) // window}}
    assert result.bytes_read == 2 * length


def test_an_empty_block_and_chunks_of_type_none_are_in_the_tree_by_records_alone(
    made: VolumeMaker,
) -> None:
    made.container()
    made.block(1, 20)
    made.block(1, 21, whole(100, checksum_type=ChecksumType.NONE, window=0))
    made.block(1, 22, whole(100, checksum_type=ChecksumType.NONE), whole(100, 100))

    with opened(made) as container:
        result = scan(container)
        by_records = build_from_metadata(container)

    assert [(b.block_id, [c.offset for c in b.chunks]) for b in by_records.blocks] == [
        (20, []),
        (21, [0]),
        (22, [0, 100]),
    ]
    assert by_records.blocks[1].chunks[0].data_checksum == 0
    assert [(b.block_id, [c.offset for c in b.chunks]) for b in result.tree.blocks] == [(22, [100])]
    assert found(result) == []
    assert any(
        "2 chunks in 2 blocks were written without checksums" in note for note in result.notes
    )


def test_chunks_of_type_none_whose_file_is_gone_are_missed(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 21, whole(100, checksum_type=ChecksumType.NONE, window=0)[0])

    assert found(scanned(made)) == [(FindingType.MISSING_DATA_FILE, 21, None)]


def test_a_block_whose_first_chunk_is_empty_needs_no_file(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, chunk_record(b""))

    result = scanned(made)

    assert found(result) == []
    assert result.tree.blocks == ()


def test_a_chunk_of_no_bytes_is_in_the_tree_where_there_is_a_file(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, (chunk_record(b""), b""))

    result = scanned(made)

    assert found(result) == []
    assert result.tree.blocks[0].chunks == (ChunkTree(0, 0, 0, checksum_matches=True),)


def test_a_block_deleted_during_the_scan_is_no_finding(tmp_path: Path) -> None:
    with VolumeMaker(tmp_path / "volume") as made:
        made.container()
        made.block(1, 20, whole(100))
        made.block(1, 21, whole(100))
        made.block(1, 22, whole(100))
        made.block_file(1, 22).unlink()

        def delete(_: int) -> None:
            made.block_file(1, 21).unlink(missing_ok=True)
            batch = Batch()
            batch.delete(OzoneTable.BLOCK_DATA, block_key(ContainerId(1), BlockId(21)))
            made.database.write(batch)

        # The datanode, here the maker, owns the volume all the while.
        state = tmp_path / "state"
        with open_volume(made.root, hold=Hold.READ_ONLY, state_folder=state, disk=Disk()) as volume:
            result = scan(ContainerStore(volume, Disk()).get(ContainerId(1)), on_bytes=delete)

    assert found(result) == [(FindingType.MISSING_DATA_FILE, 22, None)]


def test_files_without_a_record_are_noted_and_no_finding(made: VolumeMaker) -> None:
    folder = made.container()
    made.block(1, 20, whole(100))
    for name in ("21.block", "020.block", "20.block.tmp", "stray"):
        (folder / "chunks" / name).write_bytes(b"x")

    result = scanned(made)

    assert found(result) == []
    assert [note.split(":")[0] for note in result.notes] == [
        f"orphan file {name}" for name in ("020.block", "20.block.tmp", "21.block", "stray")
    ]


class FailingReader(Reader):
    def __init__(self, path: Path, fails_at: int, error: int) -> None:
        self._real = path.open("rb")
        super().__init__(path, self._real.fileno())
        self._fails_at = fails_at
        self._error = error

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if offset + len(buffer) > self._fails_at:
            raise disk_error("read", Path("block"), OSError(self._error, os.strerror(self._error)))
        return super().read_into(buffer, offset)

    def close(self) -> None:
        self._real.close()


class FailingReads(Disk):
    """Fails reads of block files from an offset on, or their opening."""

    def __init__(
        self, error: int, *, at: int | None = None, only: Callable[[Path], bool] = lambda _: True
    ) -> None:
        self._error = error
        self._at = at
        self._only = only

    @contextmanager
    def reader(self, path: Path) -> Iterator[Reader]:
        if not self._only(path):
            with super().reader(path) as reader:
                yield reader
            return
        if self._at is None:
            raise disk_error("open", path, OSError(self._error, os.strerror(self._error)))
        failing = FailingReader(path, self._at, self._error)
        try:
            yield failing
        finally:
            failing.close()


def test_an_io_error_makes_a_chunk_corrupt_with_the_windows_read_so_far_and_its_recorded_length(
    made: VolumeMaker,
) -> None:
    made.container()
    length = 2 * BUFFER_BYTES
    record = made.block(1, 20, whole(length), whole(1000, length))
    data = made.block_file(1, 20).read_bytes()

    result = scanned(made, FailingReads(errno.EIO, at=BUFFER_BYTES))

    assert found(result) == [
        (FindingType.CORRUPT_CHUNK, 20, 0),
        (FindingType.CORRUPT_CHUNK, 20, length),
    ]
    assert result.tree.blocks[0].chunks == (
        ChunkTree(
            0, length, observed(record.chunks[0], data[:BUFFER_BYTES]), checksum_matches=False
        ),
        ChunkTree(length, 1000, 0, checksum_matches=False),
    )
    assert result.bad_windows[BlockId(20), 0] == set(
        range(BUFFER_BYTES // 1024, 2 * BUFFER_BYTES // 1024)
    )
    assert not result.transient


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM])
def test_s20_a_lack_of_file_handles_or_of_permission_proves_nothing(
    made: VolumeMaker, error: int
) -> None:
    made.container()
    made.block(1, 20, whole(100))

    assert scanned(made, FailingReads(error)).transient


def test_s20_a_descriptor_that_cannot_be_opened_for_lack_of_handles_proves_nothing(
    made: VolumeMaker,
) -> None:
    made.container()

    class NoHandles(Disk):
        def read(self, path: Path) -> bytes:
            raise disk_error("read", path, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    with opened(made, disk=NoHandles()) as container:
        assert scan(container).transient
        assert scan_metadata(container).transient


def test_s20_a_real_fault_beside_a_lack_of_file_handles_counts(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(100))
    made.block(1, 21, whole(100))
    flip(made.block_file(1, 21), 3)

    result = scanned(made, FailingReads(errno.EMFILE, only=lambda path: path.name == "20.block"))

    assert len(result.findings) == 2
    assert not result.transient


@pytest.mark.parametrize("kind", ["symbolic link", "folder", "pipe"])
def test_a_block_file_that_is_no_file_is_corrupt_and_nothing_is_followed(
    made: VolumeMaker, kind: str
) -> None:
    made.container()
    made.block(1, 20, whole(4096), whole(100, 4096))
    path = made.block_file(1, 20)
    path.rename(made.root / "moved")
    match kind:
        case "symbolic link":
            path.symlink_to(made.root / "moved")
        case "folder":
            path.mkdir()
        case _:
            os.mkfifo(path)

    result = scanned(made)

    assert found(result) == [
        (FindingType.CORRUPT_CHUNK, 20, 0),
        (FindingType.CORRUPT_CHUNK, 20, 4096),
    ]
    assert result.bad_windows == {(20, 0): {0, 1, 2, 3}, (20, 4096): {0}}


def test_a_record_that_cannot_be_parsed_costs_its_own_block_only(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(100))
    made.block(1, 21, whole(100))
    made.put(OzoneTable.BLOCK_DATA, block_key(ContainerId(1), BlockId(20)), b"\x0a\xff")

    with opened(made) as container:
        for result in (scan(container), scan_metadata(container)):
            assert found(result) == [(FindingType.INACCESSIBLE_DB, 20, None)]
            assert [block.block_id for block in result.tree.blocks] == [21]
        with pytest.raises(RecordInvalidError):
            build_from_metadata(container)


def test_a_record_under_the_key_of_another_block_is_not_believed(made: VolumeMaker) -> None:
    made.container()
    record = made.block(1, 20, whole(100))
    moved = replace(record, block_id=BlockId(99))
    made.put(OzoneTable.BLOCK_DATA, block_key(ContainerId(1), BlockId(20)), b"")
    made.put_record(OzoneTable.BLOCK_DATA, moved)
    made.put(
        OzoneTable.BLOCK_DATA,
        block_key(ContainerId(1), BlockId(20)),
        made.database.get(OzoneTable.BLOCK_DATA, block_key(ContainerId(1), BlockId(99))) or b"",
    )

    assert (FindingType.INACCESSIBLE_DB, 20, None) in found(scanned(made))


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_a_volume_without_a_readable_database_has_a_finding_for_each_container(
    made: VolumeMaker, damage: str
) -> None:
    made.container()
    made.block(1, 20, whole(100))
    made.database.close()
    if damage == "missing":
        shutil.rmtree(made.database_path)
    else:
        for path in made.database_path.iterdir():
            path.write_bytes(b"garbage")

    result = scanned(made)

    assert found(result) == [(FindingType.INACCESSIBLE_DB, None, None)]
    assert result.tree.blocks == ()


def test_a_cancelled_scan_ends_with_an_error_and_no_result(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(2 * BUFFER_BYTES))
    seen: list[int] = []

    with opened(made) as container, pytest.raises(OperationInterruptedError):
        scan(container, on_bytes=seen.append, cancelled=lambda: len(seen) == 1)

    assert seen == [BUFFER_BYTES]


def test_erasure_coded_replicas_are_scanned_alike(made: VolumeMaker) -> None:
    made.container(replica_index=4)
    made.block(1, 20, whole(100))
    flip(made.block_file(1, 20), 3)

    assert found(scanned(made)) == [(FindingType.CORRUPT_CHUNK, 20, 0)]


def test_findings_name_every_failure_type_of_ozone_once() -> None:
    assert all(kind.name == kind.value for kind in FindingType)
    assert Finding(FindingType.MISSING_CHUNK) == Finding(FindingType("MISSING_CHUNK"))


def test_what_a_forked_process_reads_is_its_own() -> None:
    """Spark forks workers that scan from a process that has imported all this."""
    code = (
        "import os\n"
        "from ozone.scan import allocate_large_pages\n"
        "memory = allocate_large_pages(4096)\n"
        "if child := os.fork():\n"
        "    os.waitpid(child, 0)\n"
        "    raise SystemExit(memory[0])\n"
        "memory[0] = 7\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
