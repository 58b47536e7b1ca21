"""What the `tree` commands read: volumes, and containers in them, by their paths."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from merkle.errors import ReconcileError
from merkle.replica import TreeSource
from merkle.tree import BlockId, ContainerId
from ozone.containers import ContainerStore
from ozone.errors import ContainerNotFoundError, VolumeError
from ozone.volume import Hold, container_of_folder, open_volume
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError
from runtime.exit_codes import ExitCode
from runtime.progress import BYTES, ProgressStyle, progress_sink

# A container whose descriptor cannot be read has some state, which nobody can tell.
STATE_UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class TreePath:
    """One PATH as given: a volume, or one container in it."""

    name: str
    root: Path
    container_id: ContainerId | None


@dataclass(frozen=True, slots=True)
class OpenPath:
    """A PATH with its volume open."""

    name: str
    store: ContainerStore
    container_id: ContainerId | None


def paths_of(names: Sequence[str]) -> list[TreePath]:
    return [_path(name) for name in names]


def _path(name: str) -> TreePath:
    try:
        # Absolute, so that a container's folder can be told by those above it.
        path = Path(name or "/nothing/").resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise VolumeError(
            f"there is nothing at {name}", reason="path_missing", path=name
        ) from error
    if not path.is_dir():
        raise VolumeError(f"{name} is no folder", reason="not_a_folder", path=name)
    found = container_of_folder(path)
    if found is not None:
        return TreePath(name, *found)
    if not (path / "hdds").is_dir() and (path / "metadata").is_dir():
        raise VolumeError(
            f"{name} is the folder of a container outside of a volume",
            hint=(
                "Its block records are in the database of its volume; give it where it lies in one."
            ),
            reason="container_without_volume",
            path=name,
        )
    return TreePath(name, path, None)


@contextmanager
def opened(paths: Sequence[TreePath]) -> Iterator[list[OpenPath]]:
    """The volumes of all paths, each opened once, read-only."""
    disk = Disk()
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="treefold-"))
        except OSError as error:
            raise DiskError(
                f"no temporary folder can be made: {error.strerror or error}"
            ) from error
        stores: dict[Path, ContainerStore] = {}
        for path in paths:
            if path.root not in stores:
                # A folder each: copies of one volume have the same ID.
                state = Path(scratch) / str(len(stores))
                volume = open_volume(path.root, hold=Hold.READ_ONLY, state_folder=state, disk=disk)
                stores[path.root] = ContainerStore(stack.enter_context(volume), disk)
        yield [OpenPath(path.name, stores[path.root], path.container_id) for path in paths]


def containers_of(
    places: Sequence[OpenPath], ids: Sequence[int]
) -> list[tuple[OpenPath, ContainerId]]:
    """Every container to be looked at; one that was asked for must be somewhere."""
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
    # A database that cannot be read is a finding of every container.
    with suppress(DatabaseError):
        lost = place.store.ids_without_folder()
    return sorted([*place.store.ids(), *lost])


class ContainerFailures:
    """Errors that ended one container each."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def caught(self, name: str, container_id: ContainerId | None) -> Iterator[None]:
        """Report an error inside as that container's and go on."""
        try:
            yield
        except ReconcileError as error:
            self.tell(name, container_id, error)

    def tell(self, name: str, container_id: ContainerId | None, error: ReconcileError) -> None:
        """Print a container's error on stderr and count it."""
        self._count += 1
        which = "" if container_id is None else f", container {container_id}"
        click.echo(f"error [{error.code}]: {name}{which}: {error.message}", err=True)

    def exit_status(self, *, found: bool) -> int:
        """What the command returns; `found` says that something was found."""
        return ExitCode.FAILED if self._count else ExitCode.FINDINGS if found else 0


@contextmanager
def scan_progress(
    what: str,
    jobs: Sequence[tuple[OpenPath, ContainerId]],
    source: TreeSource,
    output: ProgressStyle,
) -> Iterator[Callable[[int], None] | None]:
    if source is not TreeSource.DATA:
        yield None
        return
    total = 0
    for place, container_id in jobs:
        with suppress(DatabaseError):
            total += place.store.get(container_id).counters().used_bytes or 0
    with progress_sink(output) as sink:
        sink.begin(what, total, BYTES)
        yield sink.advance


def place_text(block_id: BlockId | None, offset: int | None) -> str:
    block = "" if block_id is None else f" block {block_id}"
    return block if offset is None else f"{block} offset {offset}"
