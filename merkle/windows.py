"""Proves bytes against recorded checksums, window by window.

Only `ProvenWindows` are written to a replica, and only `prove` makes them. A peer's
bytes therefore cannot reach our disk unchecked.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from merkle.checksum import WIDTH, Buffer, ChecksumType, window_checksums
from merkle.limits import BLOCK_BYTES_MAX, CHUNK_BYTES_MAX
from merkle.record import ChunkRecord


@dataclass(frozen=True, slots=True)
class ProvenWindows:
    """Adjacent windows of a chunk, from window `first` on, whose bytes match the
    record. Only `prove` makes them.
    """

    first: int
    count: int
    data: bytes

    @property
    def windows(self) -> range:
        """The indices of the windows."""
        return range(self.first, self.first + self.count)


def is_sound(chunk: ChunkRecord) -> bool:
    """Whether the record can prove bytes: it has one checksum per window, and its
    bounds are within the limits.
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
    """The indices of the windows that do not match the record, or that `data` does not
    hold whole; `data` is the chunk's bytes from its start.
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


def prove(chunk: ChunkRecord, first: int, data: Buffer) -> tuple[ProvenWindows, ...]:
    """The windows of `data` that match the record, in runs of adjacent ones. `data`
    starts at window `first` and may end early.
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
        runs.append(
            ProvenWindows(run.start, len(run), bytes(view[low - start : high + size - start]))
        )
    return tuple(runs)


def runs_of(windows: Iterable[int]) -> Iterator[range]:
    """Ascending window indices as ranges of adjacent ones."""
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
