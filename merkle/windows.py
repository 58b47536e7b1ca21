"""Prove bytes against recorded checksums, window by window: the one gate between a
peer's bytes and our disk.

Nothing is written to a replica but `Proven`, and `prove` alone makes it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from merkle.checksum import WIDTH, Buffer, ChecksumType, window_checksums
from merkle.limits import BLOCK_BYTES_MAX, CHUNK_BYTES_MAX
from merkle.record import ChunkRecord


@dataclass(frozen=True, slots=True)
class Proven:
    """Adjacent windows of a chunk, from window `first` on, whose bytes match the
    record. Made by `prove` alone.
    """

    first: int
    count: int
    data: bytes

    @property
    def windows(self) -> range:
        """The indices of the windows."""
        return range(self.first, self.first + self.count)


def is_sound(chunk: ChunkRecord) -> bool:
    """Whether the record can prove bytes at all: it has checksums, one a window, and
    sane bounds.
    """
    width = WIDTH[chunk.checksum_type]
    return (
        chunk.checksum_type is not ChecksumType.NONE
        and 0 < chunk.length_bytes <= CHUNK_BYTES_MAX
        and chunk.end <= BLOCK_BYTES_MAX
        and chunk.bytes_per_checksum > 0
        and len(chunk.checksums) == -(-chunk.length_bytes // chunk.bytes_per_checksum)
        and all(len(entry) == width for entry in chunk.checksums)
    )


def bad_windows(chunk: ChunkRecord, data: Buffer) -> tuple[int, ...]:
    """The windows of a chunk that `data`, what the disk holds of it from its start,
    does not match or lacks.
    """
    observed = window_checksums(
        memoryview(data)[: chunk.length_bytes], chunk.checksum_type, chunk.bytes_per_checksum
    )
    if observed == chunk.entries:
        return ()
    width = WIDTH[chunk.checksum_type]
    entries = (observed[i : i + width] for i in range(0, len(observed), width))
    good = {
        index
        for index, (ours, entry) in enumerate(zip(entries, chunk.checksums, strict=False))
        if ours == entry
    }
    return tuple(index for index in range(len(chunk.checksums)) if index not in good)


def prove(chunk: ChunkRecord, first: int, data: Buffer) -> tuple[Proven, ...]:
    """Those windows of `data` that match the record, as runs; `data` starts at window
    `first`, and may end early.
    """
    view, width = memoryview(data), WIDTH[chunk.checksum_type]
    start, _ = chunk.window(first)
    count = 0
    length = 0
    for index in range(first, len(chunk.checksums)):
        _, size = chunk.window(index)
        if length + size > len(view):
            break
        count, length = count + 1, length + size
    observed = window_checksums(view[:length], chunk.checksum_type, chunk.bytes_per_checksum)
    good = [
        index
        for index in range(first, first + count)
        if observed[(index - first) * width : (index - first + 1) * width] == chunk.checksums[index]
    ]
    runs = []
    for run in runs_of(good):
        low, _ = chunk.window(run.start)
        high, size = chunk.window(run.stop - 1)
        runs.append(Proven(run.start, len(run), bytes(view[low - start : high + size - start])))
    return tuple(runs)


def runs_of(windows: Iterable[int]) -> Iterator[range]:
    """Ascending window numbers as runs of adjacent ones."""
    start = stop = None
    for index in windows:
        if start is None or stop is None:
            start = index
        elif index != stop:
            yield range(start, stop)
            start = index
        stop = index + 1
    if start is not None and stop is not None:
        yield range(start, stop)
