"""The manifest of a chunk table: the files of one state of it, sizes and checksums."""

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

# A manifest names some files; a larger one is another file of that name.
MANIFEST_BYTES_MAX = 64 << 20


_MANIFEST_NAME = re.compile(r"manifest-([0-9]{9,18})\.json")


_FILE_NAME = re.compile(
    r"(chunks|containers|events|findings)-([0-9]{9,18})-[0-9a-f]{8}(-[0-9]{4,})?\.parquet"
)


_INT64 = range(-(1 << 63), 1 << 63)


class FileKind(StrEnum):
    """What a file of a table holds; the value begins its name."""

    CHUNKS = "chunks"
    # The inventory, by CONTAINER_SCHEMA; one a manifest.
    CONTAINERS = "containers"
    EVENTS = "events"
    FINDINGS = "findings"


class TableRefusal(Enum):
    """Why a table or a manifest is not read: the reason of a ChunkTableError."""

    # The folder or file is not there, or cannot be read.
    UNREADABLE = "unreadable"
    NO_MANIFEST = "no_manifest"
    NOT_A_MANIFEST = "not_a_manifest"
    NEWER_VERSION = "newer_version"
    CHECKSUM = "checksum"
    FILE_MISSING = "file_missing"
    FILE_SIZE = "file_size"
    # A Parquet file whose columns are not those of its kind.
    SCHEMA = "schema"
    # A file has not the rows that the inventory or the manifest says, or these
    # contradict each other.
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file: rows, bytes, and the xxh3_128 of its bytes in hex."""

    name: str
    kind: FileKind
    rows: int
    length_bytes: int
    checksum: str
    created_at: datetime

    @property
    def sequence(self) -> int:
        """Of the export that wrote it."""
        return sequence_of(self.name)


@dataclass(frozen=True, slots=True)
class SkippedVolume:
    """A volume of the datanode that is not in the table, and why."""

    path: str
    error_code: str
    message: str


@dataclass(frozen=True, slots=True)
class AuditMark:
    """How far the agent's audit file was read: so many bytes, whose first ones have
    this fingerprint in hex.
    """

    length_bytes: int
    head_bytes: int
    head: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One state of a table. `volumes` are the storage IDs of those that were read;
    counts are of live rows.

    `volumes_created_ms` says since when volumes exist, in ms since the epoch, as far as
    they tell.
    """

    datanode: str
    sequence: int
    # The sequence of the table before, whose files are kept too.
    previous: int | None
    # Before the first replica was read: what an agent did later need not be in the
    # rows.
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

    @property
    def name(self) -> str:
        """The file name of this manifest."""
        return manifest_name(self.sequence)

    def of_kind(self, kind: FileKind) -> tuple[TableFile, ...]:
        """The files of one kind."""
        return tuple(file for file in self.files if file.kind is kind)

    def to_bytes(self) -> bytes:
        """The file's bytes: JSON with a checksum over all the rest."""
        said: dict[str, Any] = {
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
                }
                for file in self.files
            ],
        }
        return json.dumps(said | {"checksum": _json_checksum(said)}, indent=1).encode() + b"\n"


def parse_manifest(raw: bytes, name: str) -> Manifest:
    """The manifest in the bytes of the file of that name; keys that are not known are
    passed over.

    Raises:
        ChunkTableError: it is none, is damaged, or a newer release wrote it.
    """
    try:
        said = json.loads(raw)
        if said["format"] != FORMAT:
            raise ValueError(f"format {said['format']!r}")
        version = _number(said["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refused(
            TableRefusal.NOT_A_MANIFEST, f"{name} is no manifest of a chunk table: {error}"
        ) from error
    if version > VERSION:
        hint = "Read it with the release that wrote it, or a later one."
        text = f"{name} has version {version}, and this release reads up to {VERSION}"
        raise refused(TableRefusal.NEWER_VERSION, text, hint=hint)
    checksum = said.pop("checksum", None)
    if checksum != _json_checksum(said):
        raise refused(TableRefusal.CHECKSUM, f"{name} does not match its own checksum")
    try:
        manifest = _manifest(said)
        if manifest.name != name:
            raise ValueError(f"sequence {manifest.sequence}")
    except (ValueError, KeyError, TypeError) as error:
        raise refused(
            TableRefusal.NOT_A_MANIFEST, f"{name} is no manifest of a chunk table: {error}"
        ) from error
    return manifest


def manifest_name(sequence: int) -> str:
    """The name of the manifest with this number."""
    return f"manifest-{sequence:09d}.json"


def manifest_sequence(name: str) -> int | None:
    """The number in the name of a manifest; None where it is not one's."""
    match = _MANIFEST_NAME.fullmatch(name)
    return int(match[1]) if match and manifest_name(int(match[1])) == name else None


def file_name(kind: FileKind, sequence: int, token: str, number: int | None = None) -> str:
    """The name of a file that this export writes; `token`, 8 hex digits, keeps apart
    two that run at once.
    """
    name = (
        f"{kind.value}-{sequence:09d}-{token}"
        + ("" if number is None else f"-{number:04d}")
        + ".parquet"
    )
    assert _FILE_NAME.fullmatch(name)
    return name


def is_file_name(name: str) -> bool:
    """Whether it is the name of a file of a table."""
    return bool(_FILE_NAME.fullmatch(name))


def sequence_of(name: str) -> int:
    """The number of the export that wrote the file of that name."""
    match = _FILE_NAME.fullmatch(name)
    assert match
    return int(match[2])


def check_files(manifest: Manifest, sizes: Mapping[str, int | None]) -> None:
    """Whether all files that a manifest names are there and have their sizes.

    Raises:
        ChunkTableError: one is missing or of another size.
    """
    for file in manifest.files:
        size = sizes.get(file.name)
        if size is None:
            raise refused(
                TableRefusal.FILE_MISSING, f"{manifest.name} names {file.name}, which is not there"
            )
        if size != file.length_bytes:
            text = f"{file.name} has {size} bytes, and {manifest.name} says {file.length_bytes}"
            raise refused(TableRefusal.FILE_SIZE, text)


def check_counts(manifest: Manifest) -> None:
    """Whether a manifest's counts are those of its files: one that names no file would
    pass for an empty table.

    Raises:
        ChunkTableError: they contradict each other.
    """
    listed = sum(file.rows for file in manifest.of_kind(FileKind.CONTAINERS))
    held = sum(file.rows for file in manifest.of_kind(FileKind.CHUNKS))
    # Each replica has a row at least, and rows that are superseded do not count.
    if manifest.containers != listed or not manifest.containers <= manifest.rows <= held:
        text = (
            f"{manifest.name} counts {manifest.containers} replicas and {manifest.rows} rows,"
            f" and its files have {listed} and {held}"
        )
        raise refused(TableRefusal.ROWS, text)


def _manifest(said: Mapping[str, Any]) -> Manifest:
    files = tuple(
        TableFile(
            name=_file_name(file["name"], FileKind(file["kind"])),
            kind=FileKind(file["kind"]),
            rows=_number(file["rows"]),
            length_bytes=_number(file["bytes"]),
            checksum=_text(file["checksum"]),
            created_at=_time(file["created_at"]),
        )
        for file in said["files"]
    )
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    audit = said["audit"]
    previous = said["previous"]
    return Manifest(
        datanode=_text(said["datanode"]),
        sequence=_number(said["sequence"]),
        previous=None if previous is None else _number(previous),
        begun_at=_time(said["begun_at"]),
        created_at=_time(said["created_at"]),
        source=TreeSource(said["source"]),
        volumes=tuple(_text(volume) for volume in said["volumes"]),
        # Manifests of earlier releases have none.
        volumes_created_ms={
            v: _number(ms) for v, ms in dict(said.get("volumes_created_ms", {})).items()
        },
        skipped=tuple(
            SkippedVolume(_text(v["path"]), _text(v["error_code"]), _text(v["message"]))
            for v in said["skipped"]
        ),
        files=files,
        containers=_number(said["counts"]["containers"]),
        rows=_number(said["counts"]["rows"]),
        audit=(
            AuditMark(
                _number(audit["length_bytes"]), _number(audit["head_bytes"]), _text(audit["head"])
            )
            if audit
            else None
        ),
    )


def _file_name(value: object, kind: FileKind) -> str:
    # A name becomes a part of a path.
    if (
        not isinstance(value, str)
        or not _FILE_NAME.fullmatch(value)
        or not value.startswith(kind.value + "-")
    ):
        raise ValueError(f"{value!r} is no name of a file of {kind.value}")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value not in _INT64 or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _time(value: object) -> datetime:
    time = datetime.fromisoformat(_text(value))
    if time.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    return time


def _json_checksum(said: Mapping[str, Any]) -> str:
    return fingerprint(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hex()


def refused(refusal: TableRefusal, message: str, *, hint: str = "") -> ChunkTableError:
    return ChunkTableError(refusal.value, message, hint=hint)
