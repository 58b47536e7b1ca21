"""The folder of one replication at its syncer: whose it is, how far it is, its queue.

Nothing in it is needed by another syncer: what counts is the checkpoint at the master.
"""

import json
import uuid
from pathlib import Path
from typing import Self
from urllib.parse import quote

from replicator.hashing import blake3_of
from replicator.replication import Checkpoint, Stage, SyncerId
from replicator.stores.port import FeedPosition, SnapshotFacts
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.errors import ConfigError
from runtime.folder_lock import FolderLock

LOCK_FILE = "in_use.lock"
_META = "META"
_CHECKPOINT = "checkpoint"
_UUID = "syncer_uuid"
# File systems take 255 bytes.
_NAME_BYTES_MAX = 200


class SyncerFolder:
    """Holds the folder of one replication, which one process opens at a time."""

    def __init__(
        self, parent: Path, *, syncer: SyncerId, source: str, target: str, disk: Disk | None = None
    ) -> None:
        """Open the folder of a pair of addresses below `parent`, created as needed.

        Raises:
            BusyError: another process uses it (OZ-143).
            ConfigError: it is of another syncer or pair (OZ-138).
            DiskError: it cannot be created, locked, read or written.
        """
        self._disk = disk or Disk()
        self.path = parent / folder_name(source, target)
        self._disk.make_folder(self.path)
        self._lock = FolderLock(self.path, "treefold syncer", file=LOCK_FILE)
        try:
            self._check_meta(syncer, source, target)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder; idempotent."""
        self._lock.release()

    @property
    def disk(self) -> Disk:
        """How files of the folder are written."""
        return self._disk

    def checkpoint(self) -> Checkpoint | None:
        """What was saved last; None where nothing was.

        Raises:
            ConfigError: the file is damaged.
            DiskError: it cannot be read.
        """
        path = self.path / _CHECKPOINT
        if self._disk.length(path) is None:
            return None
        try:
            return _parsed(parse_json(self._disk.read(path)))
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                f"{path}: is damaged: {error}",
                hint=f"Remove {self.path}: both sides are compared anew, and nothing that is"
                " equal is sent again.",
                path=str(path),
            ) from error

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint; durable when this returns.

        Raises:
            DiskError: it cannot be written.
        """
        text = json.dumps(_document(checkpoint), indent=1)
        self._disk.replace(self.path / _CHECKPOINT, text.encode())

    def remove(self) -> None:
        """Remove the folder with all that is in it; others beside it stay (OZ-050).

        Raises:
            DiskError: it cannot be removed.
        """
        self._disk.remove_folder(self.path)
        self.close()

    def _check_meta(self, syncer: SyncerId, source: str, target: str) -> None:
        path = self.path / _META
        ours = {"syncer": syncer, "source": source, "target": target}
        if self._disk.length(path) is None:
            self._disk.replace(path, json.dumps(ours, indent=1).encode())
            return
        try:
            theirs = parse_json(self._disk.read(path))
        except ValueError as error:
            raise ConfigError(f"{path}: is damaged: {error}", path=str(path)) from error
        if theirs != ours:
            raise ConfigError(
                f"{self.path} is the state of another syncer or another pair of buckets",
                hint="Give each syncer a folder of its own. What it holds can be removed:"
                " both sides are compared anew.",
                path=str(path),
            )


def folder_name(source: str, target: str) -> str:
    """The name of a pair's folder: the parts of both addresses joined by dashes, source
    and target by two, and dashes in them escaped, so that no two pairs share one
    (OZ-137). A long one is cut, with a hash of the whole.
    """
    name = f"{_joined(source)}--{_joined(target)}"
    if len(name) <= _NAME_BYTES_MAX:
        return name
    digest = blake3_of(name.encode()).hex()[:32]
    return f"{name[: _NAME_BYTES_MAX - 33]}.{digest}"


def has_checkpoint(parent: Path, source: str, target: str, disk: Disk) -> bool:
    """Whether a replication of this pair has recorded below `parent` how far it is.

    Raises:
        DiskError: the folder cannot be read.
    """
    return disk.length(parent / folder_name(source, target) / _CHECKPOINT) is not None


def syncer_id(parent: Path, disk: Disk) -> SyncerId:
    """The UUID of the syncer that works below this folder; made at its first start, and
    the same ever after (OZ-035).

    Raises:
        ConfigError: the file with it is damaged.
        DiskError: it cannot be read or written.
    """
    disk.make_folder(parent)
    path = parent / _UUID
    if disk.length(path) is None:
        disk.replace(path, f"{uuid.uuid4()}\n".encode())
    try:
        return SyncerId(str(uuid.UUID(disk.read(path).decode().strip())))
    except ValueError as error:
        raise ConfigError(f"{path}: is no UUID", path=str(path)) from error


def _joined(address: str) -> str:
    parts = (one for one in address.split("/") if one)
    return "-".join(quote(one, safe="").replace("-", "%2D") for one in parts)


def _document(checkpoint: Checkpoint) -> dict[str, object]:
    position = checkpoint.position
    return {
        "stage": checkpoint.stage.value,
        "base": _snapshot_document(checkpoint.base),
        "snapshot": _snapshot_document(checkpoint.snapshot),
        "lastKey": checkpoint.last_key,
        "position": [position.log, position.index] if position is not None else None,
        "prefixes": list(checkpoint.prefixes),
        "compared": list(checkpoint.compared),
        "hasFailed": checkpoint.has_failed,
    }


def _snapshot_document(snapshot: SnapshotFacts | None) -> list[object] | None:
    if snapshot is None:
        return None
    position = snapshot.position
    place = [position.log, position.index] if position is not None else None
    return [snapshot.name, snapshot.snapshot_id, place, snapshot.created_ms]


def _parsed(found: dict[str, object]) -> Checkpoint:
    # Older versions wrote neither what the last key is about nor whether keys failed.
    prefixes, compared = found["prefixes"], found.get("compared", [])
    has_failed = found.get("hasFailed", True)
    if not (isinstance(prefixes, list) and isinstance(compared, list)):
        raise TypeError("prefixes are no list")
    if not isinstance(has_failed, bool):
        raise TypeError("hasFailed is neither true nor false")
    return Checkpoint(
        stage=Stage(found["stage"]),
        base=_snapshot(found["base"]),
        snapshot=_snapshot(found["snapshot"]),
        last_key=str(found["lastKey"]),
        position=_position(found["position"]),
        prefixes=tuple(map(str, prefixes)),
        compared=tuple(map(str, compared)),
        has_failed=has_failed,
    )


def _snapshot(found: object) -> SnapshotFacts | None:
    if found is None:
        return None
    if not isinstance(found, list):
        raise TypeError("a snapshot is no list")
    name, snapshot_id, place, created_ms = found
    return SnapshotFacts(str(name), str(snapshot_id), _position(place), int(created_ms))


def _position(found: object) -> FeedPosition | None:
    if found is None:
        return None
    if not isinstance(found, list):
        raise TypeError("a position is no list")
    log, index = found
    return FeedPosition(str(log), int(index))
