"""How fast a hot container is scanned, beside a bare read of the same file: `python -m benchmarks.bench_scan [--json]`.

One thread, everything in the page cache. A plain scan copies the bytes out of the page cache and then checksums them,
so the best that it can do is what those two in series allow. The product's own scan is measured beside that, records
and findings included; a mapped scan has no copy, and its peer is the bare read.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from mmap import mmap
from pathlib import Path

from benchmarks.measure import Report, Samples, in_series, interleaved
from merkle.checksum import ChecksumType, kernels, window_checksums
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.containers import Container
from ozone.mapped import MappedRange, MappedReader
from ozone.scan import BUFFER_BYTES, scan
from tests.support.volumes import Owned, block_record, chunk_record, new_volume, owned

BLOCK_ID = BlockId(1)
BLOCK_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20
WINDOW_BYTES = 16 << 10
GB = 1e9
# What Apache Ozone 2.2.0's scanner reads from a hot page cache, at its best.
DATANODE = Samples("Ozone datanode, stated", (4.5,))


def main(as_json: bool) -> None:
    report = Report("scan of a hot container", [f"{name}: {serves}" for name, serves in kernels().items()][:2])
    with tempfile.TemporaryDirectory(prefix="treefold-bench-") as folder:
        root = Path(folder)
        with owned(new_volume(root / "volume1"), root / "state") as volume, MappedReader() as reader:
            for container_id, checksum_type in enumerate((ChecksumType.CRC32, ChecksumType.CRC32C), 1):
                record = _write(volume, container_id, checksum_type)
                _scans(report, volume.store.open(ContainerId(container_id)), record, reader, checksum_type.name)
    report.show(as_json=as_json)


def _write(volume: Owned, container_id: int, checksum_type: ChecksumType) -> BlockRecord:
    """A closed container of one full block."""
    volume.writer.create_container(ContainerId(container_id))
    chunks = []
    for offset in range(0, BLOCK_BYTES, CHUNK_BYTES):
        data = os.urandom(CHUNK_BYTES)
        chunks.append(chunk_record(offset, data, checksum_type=checksum_type, bytes_per_checksum=WINDOW_BYTES))
        volume.writer.write_chunk(ContainerId(container_id), BLOCK_ID, offset, data)
    record = block_record(container_id, BLOCK_ID, chunks)
    assert volume.writer.put_block(record)
    volume.writer.close(ContainerId(container_id))
    return record


def _scans(report: Report, container: Container, record: BlockRecord, reader: MappedReader, name: str) -> None:
    checksum_type = record.chunks[0].checksum_type
    path = container.block_path(record.block_id)
    expected = b"".join(entry for chunk in record.chunks for entry in chunk.checksums)
    ranges = [MappedRange(c.offset, c.length_bytes, c.checksum_type, c.bytes_per_checksum) for c in record.chunks]
    buffer = memoryview(mmap(-1, BUFFER_BYTES))
    checked = partial(window_checksums, buffer, checksum_type, WINDOW_BYTES)

    def each_piece(act: Callable[[int, int], object]) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            for offset in range(0, BLOCK_BYTES, BUFFER_BYTES):
                act(fd, offset)
        finally:
            os.close(fd)

    def read_and_checked() -> None:
        entries = []

        def both(fd: int, offset: int) -> None:
            os.preadv(fd, [buffer], offset)
            entries.append(checked())

        each_piece(both)
        assert b"".join(entries) == expected

    def scanned() -> None:
        result = scan(container)
        assert result.bytes_read == BLOCK_BYTES
        assert not result.findings

    def mapped() -> None:
        assert reader.checksums(path, ranges) == expected

    rates = interleaved(
        BLOCK_BYTES / GB,
        {
            "bare read": lambda: each_piece(lambda fd, offset: os.preadv(fd, [buffer], offset)),
            "kernel": lambda: each_piece(lambda fd, offset: checked()),
            "read and kernel": read_and_checked,
            "scan": scanned,
            "mapped": mapped,
        },
    )
    design = in_series("bare read and kernel in series", rates["bare read"], rates["kernel"])
    report.add(f"{name} read and kernel", "GB/s", rates["read and kernel"], design, 0.8)
    report.add(f"{name} whole scan", "GB/s", rates["scan"], design, 0.8)
    report.add(f"{name} whole scan", "GB/s", rates["scan"], DATANODE, 1)
    report.add(f"{name} mapped, in a worker", "GB/s", rates["mapped"], rates["bare read"], 0.8)
    report.add(f"{name} mapped, in a worker", "GB/s", rates["mapped"], DATANODE, 1)
    report.add(f"{name} kernel alone, buffer in cache", "GB/s", rates["kernel"], rates["bare read"])


if __name__ == "__main__":
    main("--json" in sys.argv[1:])
