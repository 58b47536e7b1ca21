"""A mapped scan finds what a plain one finds, also when files are damaged, cut short,
or cut short underneath it.
"""

import errno
import os
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from merkle.checksum import ChecksumType
from merkle.tree import ContainerId
from ozone.containers import Container, ContainerStore
from ozone.errors import MappedReadError
from ozone.mapped import RANGES_MAX, MappedRange, MappedReader, MappedRequest
from ozone.scan import MAPPED_BYTES, FindingType, ScanResult, scan
from ozone.volume import Hold, open_volume
from runtime.disk import Disk, Reader, disk_error
from runtime.errors import DiskError, OperationInterruptedError
from tests.support.handmade import VolumeMaker, chunk_record, whole
from tests.support.mapping import wait_until_mapped
from tests.support.volumes import ERASURE_CODED, OZONE, flip, unpack

Answers: TypeAlias = Generator[bytes | MappedReadError, None, None]
CHUNK_BYTES = 4 << 20
# Two of these fit into one call to the worker.
LARGE_BYTES = 12 << 20


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
    with open_volume(
        root, hold=Hold.READ_ONLY, state_folder=root.parent / "state", disk=Disk()
    ) as volume:
        yield ContainerStore(volume, disk or Disk())


@contextmanager
def first(made: VolumeMaker, disk: Disk | None = None) -> Iterator[Container]:
    made.database.close()
    with opened(made.root, disk) as store:
        yield store.get(ContainerId(1))


def large_block(made: VolumeMaker, block_id: int, chunks: int) -> None:
    """A block of large chunks of zeros, which take no room on disk."""
    record = chunk_record(bytes(LARGE_BYTES), window=1 << 20)
    made.block(1, block_id, *(replace(record, offset=i * LARGE_BYTES) for i in range(chunks)))
    made.block_file(1, block_id).touch()
    os.truncate(made.block_file(1, block_id), chunks * LARGE_BYTES)


class CountingReader(MappedReader):
    """Notes what it was asked, and whether it could answer."""

    def __init__(self) -> None:
        super().__init__(timeout_s=60)
        self.asked: list[tuple[str, int]] = []
        self.answered: list[bool] = []

    def answers(self, requests: Iterable[MappedRequest]) -> Answers:
        def noted() -> Iterator[MappedRequest]:
            for request in requests:
                self.asked.append((request.path.name, len(request.ranges)))
                yield request

        for answer in super().answers(noted()):
            self.answered.append(isinstance(answer, bytes))
            yield answer


@pytest.mark.parametrize(
    ("fixture", "moment"),
    [(OZONE, "damaged"), (OZONE, "detected"), (ERASURE_CODED, "healthy")],
    ids=["damaged", "detected", "erasure coded"],
)
def test_what_real_datanodes_wrote_is_seen_alike_in_both_modes(
    tmp_path: Path, reader: MappedReader, fixture: Path, moment: str
) -> None:
    """Findings with their words, tree, windows, bytes read and notes: the results are
    equal as values.
    """
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
def test_every_damage_of_a_file_is_seen_alike_in_both_modes(
    made: VolumeMaker, reader: MappedReader, kind: str
) -> None:
    made.container()
    made.block(1, 20, *(whole(CHUNK_BYTES, i * CHUNK_BYTES, window=16384) for i in range(4)))
    made.block(
        1,
        21,
        *(whole(3000, i * 3000, checksum_type=ChecksumType(i + 1), window=1000) for i in range(5)),
    )
    damage(kind, made.block_file(1, 20))

    with first(made) as container:
        by_reading, by_mapping = scan(container), scan(container, mapped=reader)

    assert by_mapping == by_reading
    assert bool(by_reading.findings) is (kind not in ("nothing", "longer than recorded"))


def test_the_worker_is_asked_for_many_chunks_at_once_and_no_more_of_a_file_that_it_fails_on(
    made: VolumeMaker,
) -> None:
    made.container()
    large_block(made, 20, 5)
    large_block(made, 21, 5)
    os.truncate(made.block_file(1, 20), 100)

    with first(made) as container, CountingReader() as reader:
        scan(container, mapped=reader)

    assert MAPPED_BYTES // LARGE_BYTES == 2
    # One request more was sent already when the first answer came.
    assert reader.asked == [("20.block", 2)] * 2 + [
        ("21.block", 2),
        ("21.block", 2),
        ("21.block", 1),
    ]
    assert reader.answered == [False, False, True, True, True]


class SlowReader(MappedReader):
    """Has its worker go over the second chunk again and again, so that there is time to
    cut the file meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(timeout_s=60)
        self.errors: list[str] = []

    def answers(self, requests: Iterable[MappedRequest]) -> Answers:
        repeated = (MappedRange(CHUNK_BYTES, CHUNK_BYTES, ChecksumType.SHA256, 1 << 20),) * 200
        slow = (
            replace(r, ranges=r.ranges + repeated) if r.path.name == "20.block" else r
            for r in requests
        )
        for answer in super().answers(slow):
            if isinstance(answer, MappedReadError):
                self.errors.append(answer.message)
            yield answer


@pytest.mark.parametrize("left_bytes", [0, CHUNK_BYTES + 16384])
def test_a_file_cut_short_while_it_is_mapped_is_survived_and_found(
    made: VolumeMaker, left_bytes: int
) -> None:
    """The worker dies of SIGBUS; the scan reads that file the plain way and the next
    one by a new worker.
    """
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
    assert kinds == (
        [FindingType.INCONSISTENT_CHUNK_LENGTH] if left_bytes else [FindingType.MISSING_CHUNK] * 2
    )


def test_an_answer_that_does_not_match_is_never_a_finding_by_itself(made: VolumeMaker) -> None:
    """A file cut inside its last page shows zeros to whoever had it mapped: only a
    plain read may accuse.
    """

    class LyingReader(MappedReader):
        def answers(self, requests: Iterable[MappedRequest]) -> Answers:
            for request in requests:
                yield bytes(
                    4
                    * sum(
                        -(-part.length_bytes // part.bytes_per_checksum) for part in request.ranges
                    )
                )

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

    def answers(self, requests: Iterable[MappedRequest]) -> Answers:
        return (request.failed("the worker died (SIGBUS)") for request in requests)


def test_an_io_error_has_the_words_of_the_plain_read(made: VolumeMaker) -> None:
    made.container()
    made.block(1, 20, whole(5000), whole(5000, 5000))

    with first(made, UnreadableDisk()) as container:
        result: ScanResult = scan(container, mapped=DeadReader())
        assert result == scan(container)

    assert [finding.type for finding in result.findings] == [FindingType.CORRUPT_CHUNK] * 2
    assert "EIO" in result.findings[0].detail or os.strerror(errno.EIO) in result.findings[0].detail
    assert issubclass(MappedReadError, DiskError)


def test_a_mapped_scan_is_told_of_and_cancelled_between_calls(
    made: VolumeMaker, reader: MappedReader
) -> None:
    made.container()
    large_block(made, 20, 4)
    told: list[int] = []

    with first(made) as container, pytest.raises(OperationInterruptedError):
        scan(container, mapped=reader, on_bytes=told.append, cancelled=lambda: bool(told))

    assert told == [LARGE_BYTES] * 2


def test_blocks_are_judged_in_order_whatever_was_asked_of_the_worker(
    made: VolumeMaker, reader: MappedReader
) -> None:
    """Empty blocks, blocks without checksums and lost files stand between those that
    the worker sees.
    """
    made.container()
    for block_id in range(1, 12):
        match block_id % 4:
            case 0:
                made.block(1, block_id)
            case 1:
                made.block(1, block_id, whole(5000), whole(5000, 5000))
                flip(made.block_file(1, block_id), 5000 + block_id)
            case 2:
                made.block(1, block_id, whole(100, checksum_type=ChecksumType.NONE, window=0))
            case _:
                made.block(1, block_id, whole(100)[0])

    with first(made) as container:
        by_mapping = scan(container, mapped=reader)
        assert by_mapping == scan(container)

    assert [finding.block_id for finding in by_mapping.findings] == [1, 3, 5, 7, 9, 11]


def test_many_small_chunks_are_asked_for_in_requests_that_fit_into_the_pipe(
    made: VolumeMaker,
) -> None:
    made.container()
    made.block(1, 20, *(whole(10, i * 10, window=16) for i in range(700)))

    with first(made) as container, CountingReader() as reader:
        assert scan(container, mapped=reader).findings == ()

    assert [count for _, count in reader.asked] == [RANGES_MAX, RANGES_MAX, 700 - 2 * RANGES_MAX]
