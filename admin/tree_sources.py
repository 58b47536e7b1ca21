"""Open the volumes and containers that the paths of the `tree` commands name."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from merkle.errors import ReconcileError
from merkle.replica import TreeSource
from merkle.tree import BlockId, ContainerId
from ozone.containers import Container, ContainerStore
from ozone.errors import ContainerNotFoundError, VolumeError
from ozone.volume import Hold, container_of_folder, open_volume, permission_hint
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError
from runtime.exit_codes import ExitCode
from runtime.progress import BYTES, ProgressSink

# The state of a container whose descriptor cannot be read.
STATE_UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class TreePath:
    """A PATH argument: the root of a volume, or one container in it."""

    name: str
    root: Path
    container_id: ContainerId | None


@dataclass(frozen=True, slots=True)
class OpenPath:
    """A PATH argument whose volume is open."""

    name: str
    store: ContainerStore
    container_id: ContainerId | None


def paths_of(names: Sequence[str]) -> list[TreePath]:
    return [_path(name) for name in names]


def _path(name: str) -> TreePath:
    try:
        # Absolute, because a container's folder is recognized by its parent folders.
        path = Path(name or "/nothing/").resolve(strict=True)
    except PermissionError as error:
        raise _denied(name, error) from error
    except (OSError, RuntimeError) as error:
        raise VolumeError(
            f"there is nothing at {name}", reason="path_missing", path=name
        ) from error
    if not path.is_dir():
        raise VolumeError(f"{name} is not a folder", reason="not_a_folder", path=name)
    found = container_of_folder(path)
    if found is not None:
        return TreePath(name, *found)
    try:
        has_only_metadata = not (path / "hdds").is_dir() and (path / "metadata").is_dir()
    except PermissionError as error:
        raise _denied(name, error) from error
    if has_only_metadata:
        raise VolumeError(
            f"{name} is the folder of a container outside of a volume",
            hint=(
                "Its block records are in the volume's database: give the folder inside the volume."
            ),
            reason="container_without_volume",
            path=name,
        )
    return TreePath(name, path, None)


def _denied(name: str, error: PermissionError) -> VolumeError:
    return VolumeError(
        f"{name} cannot be read: {error.strerror}",
        hint=permission_hint(Path(name)),
        reason="permission_denied",
        path=name,
    )


@contextmanager
def open_paths(paths: Sequence[TreePath]) -> Iterator[list[OpenPath]]:
    """Open the volumes of all paths read-only, each volume once.

    Raises:
        VolumeError: a path is not a volume that can be opened.
        DiskError: there is no temporary folder, or a volume cannot be read.
    """
    disk = Disk()
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="treefold-"))
        except OSError as error:
            raise DiskError(
                f"cannot create a temporary folder: {error.strerror or error}"
            ) from error
        stores: dict[Path, ContainerStore] = {}
        for path in paths:
            if path.root not in stores:
                # Separate folders, because copies of a volume have the same ID.
                state = Path(scratch) / str(len(stores))
                volume = open_volume(path.root, hold=Hold.READ_ONLY, state_folder=state, disk=disk)
                stores[path.root] = ContainerStore(stack.enter_context(volume), disk)
        yield [OpenPath(path.name, stores[path.root], path.container_id) for path in paths]


def containers_of(
    places: Sequence[OpenPath], ids: Sequence[int]
) -> list[tuple[OpenPath, ContainerId]]:
    """The containers of all paths; with `ids`, only these.

    Raises:
        ContainerNotFoundError: one of `ids` is in none of the paths.
    """
    jobs = [
        (place, container_id)
        for place in places
        for container_id in _held(place)
        if not ids or container_id in ids
    ]
    missing = sorted(set(ids) - {container_id for _, container_id in jobs})
    if missing:
        names = ", ".join(place.name for place in places)
        raise ContainerNotFoundError(
            f"there is no container {missing[0]} in {names}", container_id=missing[0]
        )
    return jobs


def _held(place: OpenPath) -> list[ContainerId]:
    if place.container_id is not None:
        return [place.container_id]
    lost: list[ContainerId] = []
    # An unreadable database becomes a finding of every container.
    with suppress(DatabaseError):
        lost = place.store.ids_without_folder()
    return sorted([*place.store.ids(), *lost])


class ContainerFailures:
    """Reports and counts errors that each affect one container."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def catch(self, name: str, container_id: ContainerId | None) -> Iterator[None]:
        """Report a ReconcileError in the context as this container's."""
        try:
            yield
        except ReconcileError as error:
            self.report(name, container_id, error)

    def report(self, name: str, container_id: ContainerId | None, error: ReconcileError) -> None:
        """Print a container's error to stderr, and count it."""
        self._count += 1
        which = "" if container_id is None else f", container {container_id}"
        click.echo(f"error [{error.code}]: {name}{which}: {error.message}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)

    def exit_status(self, *, found: bool) -> int:
        """The exit status; `found` is whether the command has findings."""
        return ExitCode.FAILED if self._count else ExitCode.FINDINGS if found else 0


def begin_scan(
    sink: ProgressSink,
    what: str,
    jobs: Sequence[tuple[OpenPath, ContainerId]],
    source: TreeSource,
) -> Callable[[int], None] | None:
    """Begin the progress of reading all data of some containers. Takes the bytes that
    were read; None with a source that reads no data.
    """
    if source is not TreeSource.DATA:
        return None
    sink.begin(what, sum(used_bytes(place.store.get(number)) for place, number in jobs), BYTES)
    return sink.advance


def used_bytes(container: Container) -> int:
    """The size of a container as its counters have it; 0 if they cannot be read, which
    its own turn reports.
    """
    with suppress(DatabaseError, DiskError):
        return container.counters().used_bytes or 0
    return 0


def place_text(block_id: BlockId | None, offset: int | None) -> str:
    block = "" if block_id is None else f" block {block_id}"
    return block if offset is None else f"{block} offset {offset}"
