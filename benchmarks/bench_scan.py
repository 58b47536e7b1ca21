"""The speed of scanning a container in the page cache, compared with only reading its
files: `python -m benchmarks.bench_scan [--json]`.

One thread scans 1 GiB. A plain scan copies the data from the page cache and then
computes checksums, so its limit is these two steps in series, with the read at its best
buffer size. A mapped scan, in its worker process, does not copy; it is compared with
the read alone. Each scan opens the container and includes descriptor, records,
comparison, tree and findings.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.containers import WINDOW_BYTES, held, new_volume, write_container
from benchmarks.measure import Report, Samples, in_series, interleaved
from dnagent.volumes import ManagedVolume
from merkle.checksum import ChecksumType, implementations, window_checksums
from merkle.record import BlockRecord
from merkle.tree import ContainerId
from ozone.mapped import MappedReader
from ozone.scan import BUFFER_BYTES, allocate_large_pages, scan

# Blocks of the size that Ozone's clients write.
BLOCKS, CHUNKS = 4, 64
BLOCK_BYTES = 256 << 20
TOTAL_BYTES = BLOCKS * BLOCK_BYTES
BUFFERS = tuple(1 << bits for bits in range(19, 24))
ROUNDS = 15
GB = 1e9
# The best rate of Apache Ozone 2.2.0's scanner from a hot page cache.
DATANODE = Samples("Ozone datanode, stated", (4.5,))


def main(as_json: bool) -> None:
    report = Report(
        "scan of a hot container",
        [f"{name}: {serves}" for name, serves in implementations().items()][:2],
    )
    with tempfile.TemporaryDirectory(prefix="treefold-bench-") as folder:
        root = Path(folder)
        with (
            held(new_volume(root / "volume1", 1), root / "state") as (volume, writer),
            MappedReader() as reader,
        ):
            for checksum_type in (ChecksumType.CRC32, ChecksumType.CRC32C):
                container_id = ContainerId(checksum_type.value)
                records = write_container(
                    writer, container_id, blocks=BLOCKS, chunks=CHUNKS, checksum_type=checksum_type
                )
                _measure(report, volume, records, reader, checksum_type)
    report.show(as_json=as_json)


def _measure(
    report: Report,
    volume: ManagedVolume,
    records: Sequence[BlockRecord],
    reader: MappedReader,
    checksum_type: ChecksumType,
) -> None:
    store, name = volume.containers, checksum_type.name
    container_id = records[0].container_id
    paths = [store.get(container_id).block_path(record.block_id) for record in records]
    expected = b"".join(chunk.entries for record in records for chunk in record.chunks)
    memory = memoryview(allocate_large_pages(max(BUFFERS)))
    buffer = memory[:BUFFER_BYTES]
    checked = partial(window_checksums, buffer, checksum_type, WINDOW_BYTES)

    def each_piece(act: Callable[[int, int], object], piece_bytes: int = BUFFER_BYTES) -> None:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                for offset in range(0, BLOCK_BYTES, piece_bytes):
                    act(fd, offset)
            finally:
                os.close(fd)

    def bare(piece_bytes: int) -> None:
        piece = memory[:piece_bytes]
        each_piece(lambda fd, offset: os.preadv(fd, [piece], offset), piece_bytes)

    def read_and_checked() -> None:
        entries = []

        def both(fd: int, offset: int) -> None:
            os.preadv(fd, [buffer], offset)
            entries.append(checked())

        each_piece(both)
        assert b"".join(entries) == expected

    def scanned(mapped: MappedReader | None) -> None:
        result = scan(store.open(container_id), mapped=mapped)
        assert result.bytes_read == TOTAL_BYTES
        assert not result.findings

    reads = {f"bare read, {size >> 10} KiB buffer": partial(bare, size) for size in BUFFERS}
    rates = interleaved(
        TOTAL_BYTES / GB,
        {
            **reads,
            "kernel": lambda: each_piece(lambda fd, offset: checked()),
            "read and kernel": read_and_checked,
            "scan": lambda: scanned(None),
            "mapped scan": lambda: scanned(reader),
        },
        rounds=ROUNDS,
    )
    best = max((rates[read] for read in reads), key=lambda read: read.median)
    design = in_series("best bare read and kernel in series", best, rates["kernel"])
    report.add(f"{name} whole scan", "GB/s", rates["scan"], design, 0.8)
    report.add(f"{name} whole scan", "GB/s", rates["scan"], DATANODE, 1)
    report.add(f"{name} whole mapped scan", "GB/s", rates["mapped scan"], best, 0.8)
    report.add(f"{name} whole mapped scan", "GB/s", rates["mapped scan"], DATANODE, 1)
    report.add(f"{name} read and kernel alone", "GB/s", rates["read and kernel"], design)
    report.add(f"{name} kernel alone, buffer in cache", "GB/s", rates["kernel"], best)
    used = rates[f"bare read, {BUFFER_BYTES >> 10} KiB buffer"]
    report.add(f"{name} bare read with the scan's buffer", "GB/s", used, best)


if __name__ == "__main__":
    main("--json" in sys.argv[1:])
