"""Listings of buckets for tests: inventories as S3 writes them, and Parquet files."""

import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote_plus

import pyarrow as pa
import pyarrow.parquet as pq

from replicator.stores.port import ObjectFacts

CREATED_MS = 1_790_000_000_000
CSV_NAMES = (
    "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, LastModifiedDate, ETag,"
    " StorageClass, IsMultipartUploaded, EncryptionStatus"
)
_PARQUET = pa.schema(
    [
        ("bucket", pa.string()),
        ("key", pa.string()),
        ("version_id", pa.string()),
        ("is_latest", pa.bool_()),
        ("is_delete_marker", pa.bool_()),
        ("size", pa.int64()),
        ("last_modified_date", pa.timestamp("ms", "UTC")),
        ("e_tag", pa.string()),
        ("storage_class", pa.string()),
        ("is_multipart_uploaded", pa.bool_()),
        ("encryption_status", pa.string()),
    ]
)


@dataclass(frozen=True)
class ListedVersion:
    """A row of an inventory."""

    key: str
    etag: str
    size: int | None = 1
    modified_ms: int = CREATED_MS
    version: str = ""
    is_latest: bool = True
    is_marker: bool = False
    is_multipart: bool = False
    encryption: str = "SSE-S3"


def version_of(facts: ObjectFacts) -> ListedVersion:
    """The row of a current object."""
    return ListedVersion(facts.key, facts.etag, facts.size_bytes, facts.modified_ms, facts.version)


def versions_by_chance(count: int, seed: int = 1) -> list[ListedVersion]:
    """Rows with ETags and keys of all kinds, in no order."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        key = f"{chance.choice(['a', 'logs/2026', 'é', '名'])}/{number:05}{chance.choice('+ %&z')}"
        etag = chance.choice(
            [chance.randbytes(16).hex()] * 5
            + [f"{chance.randbytes(16).hex()}-{chance.randrange(1, 99)}"]
            + ["", "abc", "ABCDEF" * 6, "é" * 40, "0" * 64, "W/odd"]
        )
        rows.append(
            ListedVersion(
                key,
                etag,
                chance.choice([0, 1, 255, 256, 1 << 40]),
                CREATED_MS - chance.randrange(1 << 36),
                chance.choice(["", "v" * 32, "w" * 300]),
                encryption=chance.choice(["SSE-S3", "SSE-S3", "SSE-KMS", "NOT-SSE"]),
            )
        )
    chance.shuffle(rows)
    return rows


def write_inventory(
    folder: Path,
    rows: Sequence[ListedVersion],
    kind: str,
    *,
    bucket: str = "photos",
    files: int = 3,
) -> Path:
    """Write an inventory as S3 does, below the folder of its destination bucket; the
    path of its manifest.
    """
    home = folder / "reports" / bucket / "daily"
    (home / "data").mkdir(parents=True)
    (home / "2026-11-25T01-00Z").mkdir()
    entries = []
    for number in range(files):
        name = f"data/part-{number}.{'csv.gz' if kind == 'CSV' else 'parquet'}"
        some = rows[number::files]
        if kind == "CSV":
            (home / name).write_bytes(gzip.compress(_csv(some, bucket).encode()))
        else:
            pq.write_table(_table(some, bucket), home / name)
        data = (home / name).read_bytes()
        key = f"reports/{bucket}/daily/{name}"
        entries.append(
            {"key": key, "size": len(data), "MD5checksum": hashlib.md5(data).hexdigest()}
        )
    manifest = {
        "sourceBucket": bucket,
        "destinationBucket": "arn:aws:s3:::destination",
        "version": "2016-11-30",
        "creationTimestamp": str(CREATED_MS),
        "fileFormat": kind,
        "fileSchema": CSV_NAMES if kind == "CSV" else "message s3.inventory { ... }",
        "files": entries,
    }
    return write_manifest(home / "2026-11-25T01-00Z" / "manifest.json", manifest)


def write_manifest(path: Path, manifest: object) -> Path:
    """Write a manifest and its checksum."""
    body = json.dumps(manifest).encode()
    path.write_bytes(body)
    path.with_name("manifest.checksum").write_text(hashlib.md5(body).hexdigest() + "\n")
    return path


def write_listing(folder: Path, rows: Iterable[ListedVersion], name: str = "a.parquet") -> Path:
    """Write a folder of one Parquet file."""
    folder.mkdir(exist_ok=True)
    table = _table(list(rows), "photos").drop_columns(["bucket", "storage_class"])
    pq.write_table(table, folder / name)
    return folder


def _table(rows: Sequence[ListedVersion], bucket: str) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "bucket": bucket,
                "key": row.key,
                "version_id": row.version or None,
                "is_latest": row.is_latest,
                "is_delete_marker": row.is_marker,
                "size": row.size,
                "last_modified_date": row.modified_ms,
                "e_tag": row.etag,
                "storage_class": "STANDARD",
                "is_multipart_uploaded": row.is_multipart,
                "encryption_status": row.encryption,
            }
            for row in rows
        ],
        _PARQUET,
    )


def _csv(rows: Sequence[ListedVersion], bucket: str) -> str:
    lines = []
    for row in rows:
        time = datetime.fromtimestamp(row.modified_ms / 1000, UTC)
        fields = (
            bucket,
            quote_plus(row.key, safe="/"),
            row.version,
            str(row.is_latest).lower(),
            str(row.is_marker).lower(),
            "" if row.size is None else str(row.size),
            time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            row.etag,
            "" if row.is_marker else "STANDARD",
            "" if row.is_marker else str(row.is_multipart).lower(),
            row.encryption,
        )
        lines.append(",".join(f'"{field}"' for field in fields) + "\n")
    return "".join(lines)
