"""A data volume of a datanode, held read-only or as owner.

A read-only hold is safe while a live datanode owns the volume: it reads a shadow of the
database and writes nothing under the volume. An owner is exclusive: our lock on
`hdds/VERSION` excludes other agents, and RocksDB's lock excludes a datanode.

An agent keeps its own files about a volume in `Volume.state_folder`, never in a
container folder: Ozone cannot export a container that has unknown entries.
"""

import fcntl
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from merkle.errors import ReconcileError
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError, VolumeError, VolumeLockedError
from ozone.rocks import Database
from runtime.disk import Disk, disk_error, owner_of
from runtime.errors import DatabaseError, DiskError
from runtime.folder_lock import lock_holder

_HDDS = "hdds"
_VERSION = "VERSION"
_LAYOUT_VERSION = "1"
_ID_MAX = (1 << 63) - 1
# IDs that become parts of paths.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
# 1 ms since the epoch up to the year 5138.
_CREATED_MS = re.compile(r"[1-9][0-9]{0,13}")


class Hold(Enum):
    """How a volume is held."""

    READ_ONLY = "read_only"
    OWNER = "owner"


@dataclass(frozen=True, slots=True)
class Version:
    """The content of `hdds/VERSION`.

    `created_ms` is in ms since the epoch, None if it is missing or impossible.
    """

    storage_id: str
    cluster_id: str
    datanode_id: str
    created_ms: int | None = None


def parse_version(raw: bytes) -> Version:
    """Parse a `VERSION` file, which is a Java properties file.

    Raises:
        VolumeError: a property is missing or impossible.
    """
    properties = {}
    for line in raw.decode("iso-8859-1").splitlines():
        text = line.strip()
        if text and text[0] not in "#!":
            key, _, value = text.partition("=")
            properties[key.strip()] = re.sub(r"\\(.)", r"\1", value.strip())
    if properties.get("layOutVersion") != _LAYOUT_VERSION:
        found = properties.get("layOutVersion")
        raise VolumeError(
            f"VERSION has layOutVersion {found!r}, not {_LAYOUT_VERSION}", reason="layout_version"
        )
    for key in ("storageID", "clusterID", "datanodeUuid"):
        if not _NAME.fullmatch(properties.get(key, "")):
            raise VolumeError(
                f"VERSION lacks a usable {key}: {properties.get(key)!r}", reason="version_invalid"
            )
    created = _CREATED_MS.fullmatch(properties.get("ctime", ""))
    return Version(
        properties["storageID"],
        properties["clusterID"],
        properties["datanodeUuid"],
        int(created[0]) if created else None,
    )


def read_version(path: Path, disk: Disk) -> Version:
    """The content of `hdds/VERSION` of the volume whose root, or `hdds` folder, is
    `path`, without opening it.

    Raises:
        VolumeError: it is invalid.
        DiskError: it cannot be read.
    """
    is_hdds = path.name == _HDDS and disk.length(path / _VERSION) is not None
    return parse_version(disk.read((path if is_hdds else path / _HDDS) / _VERSION))


class Volume:
    """One open volume (see `open_volume`); a context manager that closes it."""

    def __init__(
        self,
        hdds: Path,
        version: Version,
        hold: Hold,
        disk: Disk,
        *,
        state_folder: Path,
        database_path: Path,
    ) -> None:
        """Internal: use `open_volume`."""
        self.root = hdds.parent
        self.version_file = hdds / _VERSION
        self.datanode_id = version.datanode_id
        self.storage_id = version.storage_id
        self.cluster_id = version.cluster_id
        self.created_ms = version.created_ms
        self.working_folder = _working_folder(hdds, version, disk)
        self.hold = hold
        # The agent's files about this volume.
        self.state_folder = state_folder
        # Set by the first failed sync: the reason why nothing more may be written.
        self.suspect: str | None = None
        self._disk = disk
        self._database_path = database_path
        self._database: Database | DatabaseError | None = None
        self._lock_fd: int | None = None
        self._lock = Lock()

    @property
    def database(self) -> Database:
        """The database of the volume's containers.

        Raises:
            DatabaseError: it is missing, could not be opened, or the volume is closed.
        """
        if isinstance(self._database, Database):
            return self._database
        raise self._database or DatabaseError(
            f"the volume {self.root} is closed", path=str(self.root)
        )

    @property
    def is_closed(self) -> bool:
        """Whether the volume was closed: later database errors prove nothing about
        containers.
        """
        return self._database is None

    def container_ids(
        self, on_unreadable: Callable[[DiskError], None] | None = None
    ) -> list[ContainerId]:
        """The containers that have a folder, ascending; other entries are ignored.

        A group directory that cannot be listed is an error, unless `on_unreadable` is
        given: then it gets the error, and the other groups are listed.

        Raises:
            DiskError: the volume's folders cannot be listed.
        """
        return sorted(self._folders(on_unreadable))

    def container_folder(self, container_id: ContainerId) -> Path:
        """The folder of a container.

        Raises:
            ContainerNotFoundError: it has no folder.
            DiskError: the volume's folders cannot be read.
        """
        usual = self.usual_folder(container_id)
        folder = usual if self._disk.is_folder(usual) else self._folders().get(container_id)
        if folder is None:
            raise ContainerNotFoundError(
                f"there is no container {container_id} in {self.root}",
                container_id=container_id,
                path=str(self.root),
            )
        return folder

    def usual_folder(self, container_id: ContainerId) -> Path:
        """The folder in which a datanode would create the container."""
        return (
            self.working_folder
            / "current"
            / f"containerDir{container_id >> 9 & 0xFF}"
            / str(container_id)
        )

    def refresh(self) -> None:
        """Read the database anew, for what the datanode wrote since; an owner need not.

        Iterators over the previous database stay valid.
        """
        if self.hold is Hold.READ_ONLY:
            fresh = self._open_database()
            with self._lock:
                if self._database is not None:
                    self._database = fresh

    def close(self) -> None:
        """Release the volume; closing twice is not an error."""
        with self._lock:
            database, self._database = self._database, None
            lock_fd, self._lock_fd = self._lock_fd, None
        try:
            if isinstance(database, Database):
                database.close()
        finally:
            if lock_fd is not None:
                os.close(lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        if self.hold is Hold.OWNER:
            self._lock_fd = _flock(self.version_file)
        try:
            self._disk.make_folder(self.state_folder)
            self._database = self._open_database()
            if isinstance(self._database, DatabaseError) and self._database.facts.get("denied"):
                # Not a fault of the database: its containers would look damaged.
                raise _denied(self._database_path, self._database)
        except BaseException:
            self.close()
            raise

    def _open_database(self) -> Database | DatabaseError:
        # A volume without a readable database still has containers; their scans report
        # the fault.
        try:
            if self.hold is Hold.OWNER:
                return Database.open_owner(self._database_path, self._disk)
            return Database.open_shadow(self._database_path, self.state_folder)
        except DatabaseError as error:
            return error

    def _folders(
        self, on_unreadable: Callable[[DiskError], None] | None = None
    ) -> dict[ContainerId, Path]:
        current = self.working_folder / "current"
        found: dict[ContainerId, Path] = {}
        for group in _names(self._disk, current):
            try:
                for name in _names(self._disk, current / group):
                    container_id = container_id_of(name)
                    folder = current / group / name
                    if (
                        container_id is None
                        or not self._disk.is_folder(folder)
                        or folder.is_symlink()
                    ):
                        continue
                    # If a container has two folders, the usual one counts.
                    if container_id not in found or folder == self.usual_folder(container_id):
                        found[container_id] = folder
            except DiskError as error:
                if on_unreadable is None:
                    raise
                on_unreadable(error)
        return found


def open_volume(
    path: Path, *, hold: Hold, state_folder: Path, disk: Disk, database_volumes: Sequence[Path] = ()
) -> Volume:
    """Open the volume whose root, or `hdds` folder, is `path`.

    `state_folder` holds a folder of the agent's files for each volume.
    `database_volumes` are the directories of Ozone's setting
    `hdds.datanode.container.db.dir`, if the cluster uses it. A database that cannot be
    opened is an error only when `Volume.database` is read.

    Raises:
        VolumeError: `path` is not a volume, is inconsistent, or may not be read by this
            user; the fact `reason` is the cause.
        VolumeLockedError: for an owner, another process holds the volume; its ID is the
            fact `pid`.
        DiskError: a directory or the lock file cannot be read.
    """
    path, state_folder = path.absolute(), state_folder.absolute()
    try:
        hdds, version, database = _locate(path, state_folder, disk, database_volumes)
    except DiskError as error:
        if error.facts.get("denied"):
            raise _denied(path, error) from error
        raise
    volume = Volume(
        hdds,
        version,
        hold,
        disk,
        state_folder=state_folder / version.storage_id,
        database_path=database,
    )
    volume._open()
    return volume


def _locate(
    path: Path, state_folder: Path, disk: Disk, database_volumes: Sequence[Path]
) -> tuple[Path, Version, Path]:
    """The volume's `hdds` folder, its version, and the folder of its database."""
    try:
        hdds = path / _HDDS
        if path.name == _HDDS and disk.length(path / _VERSION) is not None:
            hdds = path
        is_folder = disk.is_folder(hdds)
    except DiskError as error:
        if error.facts.get("denied"):
            raise
        raise VolumeError(error.message, reason="no_hdds", path=str(path)) from error
    if not is_folder:
        raise VolumeError(
            f"{path} is not a volume: it has no folder {_HDDS}", reason="no_hdds", path=str(path)
        )
    if Path(os.path.realpath(state_folder)).is_relative_to(os.path.realpath(hdds.parent)):
        raise VolumeError(
            f"the state folder {state_folder} is inside the volume {hdds.parent}",
            reason="state_in_volume",
            path=str(path),
        )
    try:
        version = parse_version(disk.read(hdds / _VERSION))
    except DiskError as error:
        if error.facts.get("denied"):
            raise
        raise VolumeError(
            f"{path} is not a volume: {error.message}",
            hint=error.hint,
            reason="no_version",
            path=str(path),
        ) from error
    candidates = [_working_folder(hdds, version, disk) / version.storage_id]
    candidates += [
        other / "db" / version.cluster_id / version.storage_id for other in database_volumes
    ]
    found = (one for one in candidates if disk.is_folder(one / "container.db"))
    return hdds, version, next(found, candidates[0]) / "container.db"


def permission_hint(path: Path) -> str:
    """What to do if this process may not read a volume."""
    return f"Run this as the datanode's user, {owner_of(path)}."


def _denied(path: Path, error: ReconcileError) -> VolumeError:
    return VolumeError(
        error.message, hint=permission_hint(path), reason="permission_denied", path=str(path)
    )


def container_of_folder(path: Path) -> tuple[Path, ContainerId] | None:
    """The volume root and the container ID, if `path` has the form of a container
    folder.
    """
    path = path.absolute()
    container_id = container_id_of(path.name)
    if container_id is None or len(path.parents) < 5 or path.parents[1].name != "current":
        return None
    return (path.parents[4], container_id) if path.parents[3].name == _HDDS else None


def _working_folder(hdds: Path, version: Version, disk: Disk) -> Path:
    if disk.is_folder(hdds / version.cluster_id):
        return hdds / version.cluster_id
    # Before SCM HA, clusters named this folder after the SCM's ID.
    others = [n for n in disk.names(hdds) if n != "tmp" and disk.is_folder(hdds / n)]
    if len(others) != 1:
        raise VolumeError(
            f"{hdds} has no folder {version.cluster_id}, and {len(others)} other folders, not 1",
            reason="no_working_folder",
            path=str(hdds),
        )
    return hdds / others[0]


def _names(disk: Disk, folder: Path) -> list[str]:
    try:
        return disk.names(folder)
    except DiskError as error:
        # An unexpected file, or a volume that has no containers yet.
        if error.facts.get("missing"):
            return []
        raise


def container_id_of(name: str) -> ContainerId | None:
    """The container whose folder has this name, None if no container's could; IDs start
    at 1.
    """
    if name.isascii() and name.isdigit() and str(int(name)) == name and 0 < int(name) <= _ID_MAX:
        return ContainerId(int(name))
    return None


def _flock(file: Path) -> int:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise disk_error("lock", file, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        pid = lock_holder(fd)
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise disk_error("lock", file, error) from error
        raise VolumeLockedError(
            f"the volume of {file} is held by {f'process {pid}' if pid else 'another process'}",
            hint=(
                "Another agent or command owns this volume. Stop it first, or open the volume"
                " read-only."
            ),
            path=str(file),
            pid=pid,
        ) from error
    return fd
