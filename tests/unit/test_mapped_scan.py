"""A mapped scan finds what a plain one finds, also when files are damaged, cut short, or cut short underneath it."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.checksum import ChecksumType
from merkle.errors import DiskError, InterruptedRepairError, MappedReadError
from merkle.record import ChunkRecord
from merkle.tree import ContainerId
from ozone.containers import Container, ContainerStore
from ozone.disk import Disk, Reader, disk_error
from ozone.mapped import MappedRange, MappedReader
from ozone.scan import MAPPED_BYTES, FindingType, ScanResult, scan
from ozone.volume import Hold, open_volume
from tests.support.handmade import VolumeMaker, chunk_record, some_bytes
from tests.support.mapping import wait_until_mapped
from tests.support.volumes import ERASURE_CODED, OZONE, unpack

CHUNK_BYTES = 4 << 20
# Two of these fit into one call to the worker.
LARGE_BYTES = 24 << 20


@pytest.fixture(scope="module")
def reader() -> Iterator[MappedReader]:
    with MappedReader(timeout_s=60) as shared:
        yield shared


@pytest.fixture
def made(tmp_path: Path) -> Iterator[VolumeMaker]:
    with VolumeMaker(tmp_path / "volume") as maker:
        yield maker


@contextmanager
def opened(root: Path, disk: Disk | None = None) -> Iterator[ContainerStore]:
    with open_volume(root, hold=Hold.READ_ONLY, state_folder=root.parent / "state", disk=Disk()) as volume:
        yield ContainerStore(volume, disk or Disk())


@contextmanager
def first(made: VolumeMaker, disk: Disk | None = None) -> Iterator[Container]:
    made.database.close()
    with opened(made.root, disk) as store:
        yield store.get(ContainerId(1))


def whole(length: int, offset: int = 0, **kind: object) -> tuple[ChunkRecord, bytes]:
    data = some_bytes(length, offset)
    return chunk_record(data, offset, **kind), data  # type: ignore[arg-type]


def large_block(made: VolumeMaker, block_id: int, chunks: int) -> None:
    """A block of large chunks of zeros, which take no room on disk."""
    record = chunk_record(bytes(LARGE_BYTES), window=1 << 20)
    made.block(1, block_id, *(replace(record, offset=i * LARGE_BYTES) for i in range(chunks)))
    made.block_file(1, block_id).touch()
    os.truncate(made.block_file(1, block_id), chunks * LARGE_BYTES)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


class CountingReader(MappedReader):
    """Notes what it was asked and whether it could answer."""

    def __init__(self) -> None:
        super().__init__(timeout_s=60)
        self.calls: list[tuple[str, int, bool]] = []

    def checksums(self, path: Path, ranges: Sequence[MappedRange]) -> bytes:
        answered = False
        try:
            entries = super().checksums(path, ranges)
            answered = True
        finally:
            self.calls.append((path.name, len(ranges), answered))
        return entries


@pytest.mark.parametrize(
    ("fixture", "moment"), [(OZONE, "damaged"), (OZONE, "detected"), (ERASURE_CODED, "healthy")], ids=str
)
def test_what_real_datanodes_wrote_is_seen_alike_in_both_modes(
    tmp_path: Path, reader: MappedReader, fixture: str, moment: str
) -> None:
    """Findings with their words, tree, windows, bytes read and notes: the results are equal as values."""
    compared = 0
    for root in sorted(unpack(moment, tmp_path, fixture=fixture).glob("dn*/volume1")):
        with opened(root) as store:
            for container_id in store.ids():
                assert scan(store.get(container_id), mapped=reader) == scan(store.get(container_id))
                compared += 1
    assert compared >= 6


def damage(kind: str, path: Path) -> None:
    match kind:
        case "one bit in each of two chunks":
            flip(path, 1)
            flip(path, 3 * CHUNK_BYTES + 5000)
        case "cut inside the last chunk":
            os.truncate(path, 3 * CHUNK_BYTES + 100_000)
        case "cut at a chunk's end":
            os.truncate(path, 2 * CHUNK_BYTES)
        case "cut and damaged":
            os.truncate(path, CHUNK_BYTES + 7)
            flip(path, 9)
        case "empty":
            os.truncate(path, 0)
        case "lost":
            path.unlink()
        case "longer than recorded":
            with path.open("ab") as file:
                file.write(b"an uncommitted tail")
        case "a symbolic link":
            path.rename(path.with_suffix(".moved"))
            path.symlink_to(path.with_suffix(".moved"))
        case "a folder":
            path.unlink()
            path.mkdir()
        case "holes":
            length = path.stat().st_size
            os.truncate(path, 0)
            os.truncate(path, length)


@pytest.mark.parametrize(
    "kind",
    [
        "nothing",
        "one bit in each of two chunks",
        "cut inside the last chunk",
        "cut at a chunk's end",
        "cut and damaged",
        "empty",
        "lost",
        "longer than recorded",
        "a symbolic link",
        "a folder",
        "holes",
    ],
)
def test_every_damage_of_a_file_is_seen_alike_in_both_modes(made: VolumeMaker, reader: MappedReader, kind: str) -> None:
    made.container()
    made.block(1, 20, *(whole(CHUNK_BYTES, i * CHUNK_BYTES, window=16384) for i in range(4)))
    made.block(1, 21, *(whole(3000, i * 3000, checksum_type=ChecksumType(i + 1), window=1000) for i in range(5)))
    damage(kind, made.block_file(1, 20))

    with first(made) as container:
        by_reading, by_mapping = scan(container), scan(container, mapped=reader)

    assert by_mapping == by_reading
    assert bool(by_reading.findings) is (kind not in ("nothing", "longer than recorded"))


def test_the_worker_is_asked_for_many_chunks_at_once_and_no_more_of_a_file_that_it_fails_on(made: VolumeMaker) -> None:
    made.container()
    large_block(made, 20, 5)
    large_block(made, 21, 5)
    os.truncate(made.block_file(1, 20), 100)

    with first(made) as container, CountingReader() as reader:
        scan(container, mapped=reader)

    assert MAPPED_BYTES // LARGE_BYTES == 2
    assert reader.calls == [("20.block", 2, False), ("21.block", 2, True), ("21.block", 2, True), ("21.block", 1, True)]


class SlowReader(MappedReader):
    """Has its worker go over the second chunk again and again, so that there is time to cut the file meanwhile."""

    def __init__(self) -> None:
        super().__init__(timeout_s=60)
        self.errors: list[str] = []

    def checksums(self, path: Path, ranges: Sequence[MappedRange]) -> bytes:
        repeated = [MappedRange(CHUNK_BYTES, CHUNK_BYTES, ChecksumType.SHA256, 1 << 20)] * 1500
        if path.name != "20.block":
            return super().checksums(path, ranges)
        try:
            return super().checksums(path, [*ranges, *repeated])
        except MappedReadError as error:
            self.errors.append(error.message)
            raise


@pytest.mark.parametrize("left_bytes", [0, CHUNK_BYTES + 16384])
def test_a_file_cut_short_while_it_is_mapped_is_survived_and_found(made: VolumeMaker, left_bytes: int) -> None:
    """The worker dies of SIGBUS; the scan reads that file the plain way and the next one by a new worker."""
    made.container()
    made.block(1, 20, *(whole(CHUNK_BYTES, i * CHUNK_BYTES, window=16384) for i in range(2)))
    made.block(1, 21, whole(5000))
    path = made.block_file(1, 20)
    stop = threading.Event()

    def cut() -> None:
        wait_until_mapped(path, stop)
        os.truncate(path, left_bytes)

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        with first(made) as container, SlowReader() as slow:
            result = scan(container, mapped=slow)
            stop.set()
            cutter.join(30)
            plain = scan(container)
    finally:
        stop.set()
        cutter.join(30)

    assert len(slow.errors) == 1
    assert "SIGBUS" in slow.errors[0]
    assert result == plain
    kinds = [finding.type for finding in result.findings]
    assert kinds == ([FindingType.INCONSISTENT_CHUNK_LENGTH] if left_bytes else [FindingType.MISSING_CHUNK] * 2)


def test_an_answer_that_does_not_match_is_never_a_finding_by_itself(made: VolumeMaker) -> None:
    """A file cut inside its last page shows zeros to whoever had it mapped: only a plain read may accuse."""

    class LyingReader(MappedReader):
        def checksums(self, path: Path, ranges: Sequence[MappedRange]) -> bytes:
            return bytes(4 * sum(-(-part.length_bytes // part.bytes_per_checksum) for part in ranges))

    made.container()
    made.block(1, 20, whole(5000), whole(5000, 5000))
    told: list[int] = []

    with first(made) as container:
        result = scan(container, mapped=LyingReader(), on_bytes=told.append)
        assert result == scan(container)

    assert result.findings == ()
    assert sum(told) == result.bytes_read == 10_000


class UnreadableDisk(Disk):
    """Every plain read of a block file fails."""

    @contextmanager
    def reader(self, path: Path) -> Iterator[Reader]:
        class Failing(Reader):
            def read_into(self, buffer: memoryview, offset: int) -> int:
                raise disk_error("read", path, OSError(errno.EIO, os.strerror(errno.EIO)))

        with path.open("rb") as file:
            yield Failing(path, file.fileno())


class DeadReader(MappedReader):
    """Its worker has died, as it does where the disk cannot read."""

    def checksums(self, path: Path, ranges: Sequence[MappedRange]) -> bytes:
        raise MappedReadError(f"cannot check {path} mapped: the worker died (SIGBUS)", path=str(path))


def test_an_io_error_has_the_words_of_the_plain_read(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(5000), whole(5000, 5000))

    with first(made, UnreadableDisk()) as container:
        result: ScanResult = scan(container, mapped=DeadReader())
        assert result == scan(container)

    assert [finding.type for finding in result.findings] == [FindingType.CORRUPT_CHUNK] * 2
    assert "EIO" in result.findings[0].detail or os.strerror(errno.EIO) in result.findings[0].detail
    assert issubclass(MappedReadError, DiskError)


def test_a_mapped_scan_is_told_of_and_cancelled_between_calls(made: VolumeMaker, reader: MappedReader) -> None:
    made.container()
    large_block(made, 20, 4)
    told: list[int] = []

    with first(made) as container, pytest.raises(InterruptedRepairError):
        scan(container, mapped=reader, on_bytes=told.append, cancelled=lambda: bool(told))

    assert told == [LARGE_BYTES] * 2
