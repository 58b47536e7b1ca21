"""The manifest of a chunk table: the files of one state, with sizes and checksums."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import Enum, StrEnum
from typing import Any

from chunktable.errors import ChunkTableError
from chunktable.schema import FORMAT, VERSION
from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from runtime.documents import parse_json

# No manifest is near this size: a larger file is not one.
MANIFEST_BYTES_MAX = 64 << 20
# Of up to this size the bytes are kept beside what they say: a sweep of a fleet holds
# thousands.
_KEPT_BYTES_MAX = 16 << 10

_MANIFEST_NAME = re.compile(r"manifest-([0-9]{9,18})\.json")
_FILE_NAME = re.compile(
    r"(chunks|containers|events|findings)-([0-9]{9,18})-[0-9a-f]{8}(-[0-9]{4,})?\.parquet"
)
_INT64 = range(-(1 << 63), 1 << 63)


class FileKind(StrEnum):
    """What a file of a table holds; its name begins with the value."""

    CHUNKS = "chunks"
    # The inventory (CONTAINER_SCHEMA), one per manifest.
    CONTAINERS = "containers"
    EVENTS = "events"
    FINDINGS = "findings"


class TableRefusal(Enum):
    """Why a table or manifest is refused: the `reason` of a ChunkTableError."""

    # The folder or file is missing or cannot be read.
    UNREADABLE = "unreadable"
    NO_MANIFEST = "no_manifest"
    NOT_A_MANIFEST = "not_a_manifest"
    NEWER_VERSION = "newer_version"
    CHECKSUM = "checksum"
    FILE_MISSING = "file_missing"
    FILE_SIZE = "file_size"
    # A Parquet file does not have the columns of its kind.
    SCHEMA = "schema"
    # Row counts of a file, its manifest and the inventory contradict each other.
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file of a table; `checksum` is the xxh3_128 of its bytes in hex.

    `pieces` divide a file of chunks: each row group with what lies before it, and the
    footer. Each has its length in bytes and its own checksum. Earlier releases have
    none.
    """

    name: str
    kind: FileKind
    rows: int
    length_bytes: int
    checksum: str
    created_at: datetime
    pieces: tuple[tuple[int, str], ...] = ()

    @property
    def sequence(self) -> int:
        """The number of the export that wrote the file."""
        return sequence_of(self.name)


@dataclass(frozen=True, slots=True)
class SkippedVolume:
    """A volume of the datanode that is not in the table, and why."""

    path: str
    error_code: str
    message: str


@dataclass(frozen=True, slots=True)
class AuditMark:
    """How far the agent's audit file was read: the first `length_bytes` bytes.

    `head` is the fingerprint, in hex, of its first `head_bytes` bytes: it identifies
    the file.
    """

    length_bytes: int
    head_bytes: int
    head: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One state of a table.

    `volumes` are the storage IDs of the volumes that were read. `containers` and `rows`
    count live rows. `volumes_created_ms` holds the creation times of volumes, in ms
    since the epoch, where they are recorded.
    """

    datanode: str
    sequence: int
    # The sequence of the previous table, whose files are kept too.
    previous: int | None
    # Before the first replica was read: later changes of an agent may be missing from
    # the rows.
    begun_at: datetime
    created_at: datetime
    source: TreeSource
    volumes: tuple[str, ...]
    skipped: tuple[SkippedVolume, ...]
    files: tuple[TableFile, ...]
    containers: int
    rows: int
    audit: AuditMark | None = None
    volumes_created_ms: Mapping[str, int] = field(default_factory=dict)
    # The bytes that it was read from, if they are few. A changed copy has none.
    _read_from: bytes = field(default=b"", init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The file name of this manifest."""
        return manifest_name(self.sequence)

    def of_kind(self, kind: FileKind) -> tuple[TableFile, ...]:
        """The files of one kind."""
        return tuple(file for file in self.files if file.kind is kind)

    def stored(self) -> bytes:
        """Bytes that are this manifest: those that it was read from, if kept."""
        return self._read_from or self.to_bytes()

    def to_bytes(self) -> bytes:
        """The file's bytes: JSON with a checksum over all other keys."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "datanode": self.datanode,
            "sequence": self.sequence,
            "previous": self.previous,
            "begun_at": self.begun_at.isoformat(timespec="milliseconds"),
            "created_at": self.created_at.isoformat(timespec="milliseconds"),
            "source": self.source.value,
            "volumes": list(self.volumes),
            "volumes_created_ms": dict(self.volumes_created_ms),
            "skipped": [asdict(volume) for volume in self.skipped],
            "counts": {"containers": self.containers, "rows": self.rows},
            "audit": asdict(self.audit) if self.audit else None,
            "files": [
                {
                    "name": file.name,
                    "kind": file.kind.value,
                    "rows": file.rows,
                    "bytes": file.length_bytes,
                    "checksum": file.checksum,
                    "created_at": file.created_at.isoformat(timespec="milliseconds"),
                    "pieces": [list(piece) for piece in file.pieces],
                }
                for file in self.files
            ],
        }
        signed = document | {"checksum": _json_checksum(document)}
        return json.dumps(signed, indent=1).encode() + b"\n"


def parse_manifest(raw: bytes, name: str, *, is_verified: bool = False) -> Manifest:
    """The manifest in these bytes of the file `name`; unknown keys are ignored. If
    `is_verified`, the bytes come from a process that has parsed them.

    Raises:
        ChunkTableError: the bytes are not a manifest, are damaged, or were written by a
            newer release.
    """
    try:
        document = parse_json(raw)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        version = _count(document["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise table_error(
            TableRefusal.NOT_A_MANIFEST, f"{name} is not a manifest of a chunk table: {error}"
        ) from error
    if version > VERSION:
        hint = "Read it with the release that wrote it, or a later one."
        text = f"{name} has version {version}; this release reads versions up to {VERSION}"
        raise table_error(TableRefusal.NEWER_VERSION, text, hint=hint)
    checksum = document.pop("checksum", None)
    if not is_verified and checksum != _json_checksum(document):
        raise table_error(TableRefusal.CHECKSUM, f"{name} does not match its own checksum")
    try:
        manifest = _parse_fields(document)
        if manifest.name != name:
            raise ValueError(f"sequence {manifest.sequence}")
        if len(raw) <= _KEPT_BYTES_MAX:
            object.__setattr__(manifest, "_read_from", raw)
    except (ValueError, KeyError, TypeError) as error:
        raise table_error(
            TableRefusal.NOT_A_MANIFEST, f"{name} is not a manifest of a chunk table: {error}"
        ) from error
    return manifest


def manifest_name(sequence: int) -> str:
    """The file name of the manifest with this sequence number."""
    return f"manifest-{sequence:09d}.json"


def manifest_sequence(name: str) -> int | None:
    """The sequence number in a file name; None if it is not the name of a manifest."""
    match = _MANIFEST_NAME.fullmatch(name)
    return int(match[1]) if match and manifest_name(int(match[1])) == name else None


def file_name(kind: FileKind, sequence: int, token: str, number: int | None = None) -> str:
    """The name of a file of an export.

    `token`, 8 hex digits, distinguishes exports that run at the same time.
    """
    name = (
        f"{kind.value}-{sequence:09d}-{token}"
        + ("" if number is None else f"-{number:04d}")
        + ".parquet"
    )
    assert _FILE_NAME.fullmatch(name)
    return name


def is_file_name(name: str) -> bool:
    """Whether a file of a table could have this name."""
    return bool(_FILE_NAME.fullmatch(name))


def sequence_of(name: str) -> int:
    """The number of the export that wrote the file `name`, a valid file name."""
    match = _FILE_NAME.fullmatch(name)
    assert match
    return int(match[2])


def check_files(manifest: Manifest, sizes: Mapping[str, int | None]) -> None:
    """Check that all files of a manifest exist and have their recorded sizes.

    `sizes` are in bytes, by file name.

    Raises:
        ChunkTableError: a file is missing or has another size.
    """
    for file in manifest.files:
        size = sizes.get(file.name)
        if size is None:
            raise table_error(
                TableRefusal.FILE_MISSING, f"{manifest.name} names {file.name}, which is missing"
            )
        if size != file.length_bytes:
            text = f"{file.name} has {size} bytes; {manifest.name} records {file.length_bytes}"
            raise table_error(TableRefusal.FILE_SIZE, text)


def check_counts(manifest: Manifest) -> None:
    """Check that a manifest's counts agree with those of its files.

    Without the check a manifest that lost its files would pass for an empty table.

    Raises:
        ChunkTableError: they contradict each other.
    """
    listed = sum(file.rows for file in manifest.of_kind(FileKind.CONTAINERS))
    held = sum(file.rows for file in manifest.of_kind(FileKind.CHUNKS))
    # Each replica has a row. Superseded rows are in the files but not counted.
    if manifest.containers != listed or not manifest.containers <= manifest.rows <= held:
        text = (
            f"{manifest.name} counts {manifest.containers} replicas and {manifest.rows} rows;"
            f" its files have {listed} and {held}"
        )
        raise table_error(TableRefusal.ROWS, text)


def _parse_fields(document: Mapping[str, Any]) -> Manifest:
    files = tuple(
        TableFile(
            name=_file_name(file["name"], FileKind(file["kind"])),
            kind=FileKind(file["kind"]),
            rows=_count(file["rows"]),
            length_bytes=_count(file["bytes"]),
            checksum=_text(file["checksum"]),
            created_at=_time(file["created_at"]),
            pieces=tuple((_count(n), _text(checksum)) for n, checksum in file.get("pieces", ())),
        )
        for file in document["files"]
    )
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    for file in files:
        if file.pieces and sum(length for length, _ in file.pieces) != file.length_bytes:
            raise ValueError(f"the pieces of {file.name} are not the whole file")
    audit = document["audit"]
    previous = document["previous"]
    return Manifest(
        datanode=_text(document["datanode"]),
        sequence=_count(document["sequence"]),
        previous=None if previous is None else _count(previous),
        begun_at=_time(document["begun_at"]),
        created_at=_time(document["created_at"]),
        source=TreeSource(document["source"]),
        volumes=tuple(_text(volume) for volume in document["volumes"]),
        # Missing in manifests of earlier releases.
        volumes_created_ms={
            v: _count(ms) for v, ms in dict(document.get("volumes_created_ms", {})).items()
        },
        skipped=tuple(
            SkippedVolume(_text(v["path"]), _text(v["error_code"]), _text(v["message"]))
            for v in document["skipped"]
        ),
        files=files,
        containers=_count(document["counts"]["containers"]),
        rows=_count(document["counts"]["rows"]),
        audit=(
            AuditMark(
                _count(audit["length_bytes"]), _count(audit["head_bytes"]), _text(audit["head"])
            )
            if audit
            else None
        ),
    )


def _file_name(value: object, kind: FileKind) -> str:
    # Checked in full, since the name becomes part of a path.
    if (
        not isinstance(value, str)
        or not _FILE_NAME.fullmatch(value)
        or not value.startswith(kind.value + "-")
    ):
        raise ValueError(f"{value!r} is not the name of a file of {kind.value}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value not in _INT64 or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _time(value: object) -> datetime:
    time = datetime.fromisoformat(_text(value))
    if time.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    return time


def _json_checksum(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return fingerprint(canonical.encode()).hex()


def table_error(refusal: TableRefusal, message: str, *, hint: str = "") -> ChunkTableError:
    """The error for a table that is refused for this reason."""
    return ChunkTableError(refusal.value, message, hint=hint)
