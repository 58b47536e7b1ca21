"""Rows of an Ozone Manager's database, and write batches of them, as an OM writes them:
a small OM of which tests know every change.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ozone.log_rows import signed
from ozone.manager_values import BucketLayout, ManagerBucket
from ozone.write_batch import BatchRecord, RowOperation
from protos import ozone_manager_pb2 as pb

# As a fresh OM of 2.2 numbers them.
FAMILIES = {
    "fileTable": 1,
    "deletedTable": 3,
    "transactionInfoTable": 6,
    "openKeyTable": 7,
    "snapshotInfoTable": 8,
    "directoryTable": 9,
    "deletedDirectoryTable": 16,
    "openFileTable": 18,
    "snapshotRenamedTable": 19,
    "keyTable": 22,
    "bucketTable": 23,
}
VOLUME, VOLUME_ID, BUCKET_ID = "v", (1 << 63) + 256, (1 << 63) + 512


def varint(value: int) -> bytes:
    """A number as RocksDB writes it."""
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def record_bytes(record: BatchRecord) -> bytes:
    """A put or a delete of a row."""
    is_put = record.operation is RowOperation.PUT
    texts = [record.key, record.value] if is_put else [record.key]
    return (
        bytes([5 if is_put else 4])
        + varint(record.family)
        + b"".join(varint(len(text)) + text for text in texts)
    )


def batch_bytes(first: int, records: Iterable[BatchRecord]) -> bytes:
    """A write batch with its header."""
    encoded = [record_bytes(record) for record in records]
    return first.to_bytes(8, "little") + len(encoded).to_bytes(4, "little") + b"".join(encoded)


def bucket_facts(layout: BucketLayout, bucket: str = "b") -> ManagerBucket:
    """The bucket of the rows below."""
    return ManagerBucket(VOLUME, bucket, layout, BUCKET_ID, created_ms=1)


def key_message(
    name: str, object_id: int, update_id: int, *, parent_id: int = 0, bucket: str = "b"
) -> pb.KeyInfo:
    """A key without blocks."""
    return pb.KeyInfo(
        volumeName=VOLUME,
        bucketName=bucket,
        keyName=name,
        dataSize=update_id,
        type=1,
        creationTime=1,
        modificationTime=update_id,
        objectID=object_id,
        updateID=update_id,
        parentID=parent_id,
        metadata=[pb.KeyValue(key="ETag", value=f"{update_id:032x}")],
    )


@dataclass
class RowWriter:
    """Rows of one batch: of each row only the last change is kept, in no order."""

    rows: dict[tuple[str, str], bytes | None] = field(default_factory=dict)

    def put(self, table: str, key: str, value: bytes) -> None:
        """Write a row."""
        self.rows[table, key] = value

    def delete(self, table: str, key: str) -> None:
        """Delete a row."""
        self.rows[table, key] = None

    def put_key(self, name: str, object_id: int, update_id: int) -> None:
        """Commit a key of a bucket without directories."""
        message = key_message(name, object_id, update_id)
        self.delete("openKeyTable", f"/{VOLUME}/b/{name}/{update_id}")
        self.put("keyTable", f"/{VOLUME}/b/{name}", message.SerializeToString())

    def put_file(self, parent_id: int, name: str, object_id: int, update_id: int) -> None:
        """Commit a file of a bucket with directories."""
        message = key_message(name, object_id, update_id, parent_id=parent_id)
        self.put("fileTable", file_row(parent_id, name), message.SerializeToString())

    def put_directory(self, parent_id: int, name: str, object_id: int, update_id: int) -> None:
        """Make, move or change a directory."""
        message = pb.DirectoryInfo(
            name=name,
            creationTime=1,
            modificationTime=1,
            objectID=object_id,
            updateID=update_id,
            parentID=parent_id,
        )
        self.put("directoryTable", file_row(parent_id, name), message.SerializeToString())

    def delete_directory(self, parent_id: int, name: str, object_id: int) -> None:
        """Delete a directory; what is below it goes later."""
        row = file_row(parent_id, name)
        message = key_message(name, object_id, 1, parent_id=parent_id)
        self.delete("directoryTable", row)
        key = f"{row}/{signed(object_id)}"
        self.put("deletedDirectoryTable", key, message.SerializeToString())

    def encoded(self, first: int, *, term: int, index: int) -> bytes:
        """The batch of these rows."""
        self.put("transactionInfoTable", "#TRANSACTIONINFO", f"{term}#{index}".encode())
        return batch_bytes(
            first,
            [
                BatchRecord(
                    RowOperation.DELETE if value is None else RowOperation.PUT,
                    FAMILIES[table],
                    key.encode(),
                    value or b"",
                )
                for (table, key), value in self.rows.items()
            ],
        )


def file_row(parent_id: int, name: str) -> str:
    """The key of a row of a file or a directory."""
    ids = (signed(one) for one in (VOLUME_ID, BUCKET_ID, parent_id))
    return f"/{'/'.join(ids)}/{name}"
