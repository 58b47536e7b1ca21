"""Mapped reads: the same checksums as plain ones, and a worker whose death is an error
with a name.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from merkle.checksum import ChecksumType, window_checksums
from ozone.errors import MappedReadError
from ozone.mapped import MappedRange, MappedReader, MappedRequest
from runtime.errors import DiskError
from tests.support.mapping import wait_until_mapped

DATA = np.random.default_rng(5).integers(0, 256, 60_001, np.uint8).tobytes()
WHOLE = MappedRange(0, len(DATA), ChecksumType.CRC32, 16384)


@pytest.fixture(scope="module")
def reader() -> Iterator[MappedReader]:
    with MappedReader(timeout_s=60) as shared:
        yield shared


@pytest.fixture
def block_file(tmp_path: Path) -> Path:
    path = tmp_path / "1.block"
    path.write_bytes(DATA)
    return path


def test_every_range_is_cut_into_its_own_windows(reader: MappedReader, block_file: Path) -> None:
    ranges = [
        MappedRange(0, 20_000, ChecksumType.CRC32, 16384),
        MappedRange(20_000, 40_001, ChecksumType.CRC32C, 1000),
        MappedRange(5, 7, ChecksumType.SHA256, 3),
        MappedRange(0, 10, ChecksumType.NONE, 0),
        MappedRange(len(DATA), 0, ChecksumType.MD5, 8),
    ]
    expected = [
        window_checksums(
            DATA[r.offset : r.offset + r.length_bytes], r.checksum_type, r.bytes_per_checksum
        )
        for r in ranges
    ]
    assert reader.checksums(block_file, ranges) == b"".join(expected)


def test_an_empty_file_has_no_entries(reader: MappedReader, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert (
        reader.checksums(tmp_path / "empty", [MappedRange(0, 0, ChecksumType.CRC32, 16384)]) == b""
    )
    assert reader.checksums(tmp_path / "empty", []) == b""


def test_what_cannot_be_mapped_is_refused_with_the_reason(
    reader: MappedReader, block_file: Path
) -> None:
    folder = block_file.parent
    (folder / "link").symlink_to(block_file)
    os.mkfifo(folder / "pipe")
    beyond = MappedRange(1, len(DATA), ChecksumType.CRC32, 16384)
    cases = [
        (folder / "absent", WHOLE, "No such file"),
        (folder / "link", WHOLE, "symbolic link"),
        (folder / "pipe", WHOLE, "not a regular file"),
        (folder, WHOLE, "not a regular file"),
        (block_file, beyond, "ends at 60001"),
    ]
    for path, part, reason in cases:
        with pytest.raises(MappedReadError, match=reason) as caught:
            reader.checksums(path, [part])
        assert caught.value.facts["path"] == str(path)
    assert reader.checksums(block_file, [WHOLE]) == window_checksums(
        DATA, ChecksumType.CRC32, 16384
    )


def test_a_file_cut_short_underneath_kills_the_worker_and_nobody_else(
    block_file: Path, tmp_path: Path
) -> None:
    """The worker dies of SIGBUS; the caller learns so, and its next call is served by a
    new worker.
    """
    big = tmp_path / "2.block"
    big.touch()
    length_bytes = 64 << 20
    os.truncate(big, length_bytes)
    # Hashed again and again, so that there is time to cut the file once it is mapped.
    ranges = [MappedRange(0, length_bytes, ChecksumType.SHA256, 1 << 20)] * 100
    stop = threading.Event()

    def cut() -> None:
        wait_until_mapped(big, stop)
        os.truncate(big, 0)

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        with MappedReader(timeout_s=60) as reader:
            with pytest.raises(MappedReadError, match="the worker died") as caught:
                reader.checksums(big, ranges)
            assert "SIGBUS" in caught.value.message
            assert isinstance(caught.value, DiskError)
            assert reader.checksums(block_file, [WHOLE]) == window_checksums(
                DATA, ChecksumType.CRC32, 16384
            )
    finally:
        stop.set()
        cutter.join(10)


def test_the_request_behind_one_that_kills_the_worker_is_answered_by_the_next(
    block_file: Path, tmp_path: Path
) -> None:
    big = tmp_path / "2.block"
    big.touch()
    os.truncate(big, 64 << 20)
    slow = MappedRequest(big, (MappedRange(0, 64 << 20, ChecksumType.SHA256, 1 << 20),) * 100)
    good = MappedRequest(block_file, (WHOLE,))
    stop = threading.Event()

    def cut() -> None:
        wait_until_mapped(big, stop)
        os.truncate(big, 0)

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        with MappedReader(timeout_s=60) as reader:
            first, *others = reader.answers([slow, good, good])
    finally:
        stop.set()
        cutter.join(10)
    assert isinstance(first, MappedReadError)
    assert others == [window_checksums(DATA, ChecksumType.CRC32, 16384)] * 2


def test_answers_that_nobody_waits_for_are_never_given_to_another(block_file: Path) -> None:
    first, second = (
        MappedRequest(block_file, (MappedRange(0, n, ChecksumType.CRC32, 16384),)) for n in (10, 20)
    )
    before = workers()
    with MappedReader(timeout_s=60) as reader:
        abandoned = reader.answers([first, second, first])
        next(abandoned)
        abandoned.close()
        assert workers() == before
        (answer,) = reader.answers([first])
        assert answer == window_checksums(DATA[:10], ChecksumType.CRC32, 16384)


def test_two_callers_at_once_have_a_worker_each(block_file: Path) -> None:
    request = MappedRequest(block_file, (WHOLE,))
    before = workers()
    with MappedReader(timeout_s=60) as reader:
        one, other = reader.answers([request] * 3), reader.answers([request] * 3)
        assert [next(one), next(other), *one, *other] == [
            window_checksums(DATA, ChecksumType.CRC32, 16384)
        ] * 6
        assert len(workers() - before) == 2
    assert workers() == before


def test_a_worker_that_does_not_answer_is_given_up(block_file: Path) -> None:
    before = workers()
    with MappedReader(timeout_s=0) as reader, pytest.raises(MappedReadError, match="no answer"):
        reader.checksums(block_file, [WHOLE])
    assert workers() == before


def test_a_closed_reader_leaves_no_process_behind(block_file: Path) -> None:
    before = workers()
    reader = MappedReader()
    reader.checksums(block_file, [WHOLE])
    assert len(workers() - before) == 1
    reader.close()
    assert workers() == before
    reader.close()


def workers() -> set[int]:
    """The process IDs of our children that serve a reader."""
    children = psutil.Process().children()
    return {child.pid for child in children if "ozone.mapped" in " ".join(child.cmdline())}
