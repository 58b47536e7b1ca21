"""`treefold tree`: build, show, compare and check trees offline, from tree files,
container folders and volumes.

Volumes are opened read-only through a shadow of their database in a temporary folder:
not a byte is written under them, and a live datanode may own them. Whatever is wrong
with a container is said in its line; an error ends only that container, and the others
still get theirs.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from admin.output import ProgressStyle, byte_progress, print_json, print_line, print_table
from merkle.check import check_tree
from merkle.errors import ReconcileError, RecordInvalidError, TreeRefusedError
from merkle.outcome import Verdict
from merkle.plan import Comparison, compare
from merkle.replica import TreeSource
from merkle.tree import BlockId, ContainerId, ContainerTree, root_hex
from merkle.windows import bad_windows, is_sound
from ozone.containers import Container, ContainerStore
from ozone.errors import BlockNotFoundError, ContainerNotFoundError, DescriptorError, VolumeError
from ozone.mapped import MappedReader
from ozone.scan import Finding, lost_chunks
from ozone.survey import UNREADABLE, ReplicaSnapshot, survey_container
from ozone.volume import Hold, container_of_folder, open_volume
from protos.convert import container_id_of_tree, tree_from_bytes
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError, UsageError

EXIT_FAILED = 1
EXIT_FINDINGS = 3
# A container whose descriptor cannot be read has some state, which nobody can tell.
STATE_UNKNOWN = "UNKNOWN"

JsonObject = dict[str, object]


_paths = click.argument("paths", metavar="PATH...", nargs=-1, required=True)
_ids = click.option(
    "--container",
    "ids",
    metavar="ID",
    type=click.IntRange(0, (1 << 63) - 1),
    multiple=True,
    help="Only this container; may be given again.",
)
_json = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a line and container."
)


@click.group()
def tree() -> None:
    """Build, show, compare and check trees offline.

    PATH is the root of a volume or the folder of a container in one; show and check
    also take tree files. Nothing is ever written there.
    """


@tree.command()
@_paths
@_ids
@click.option(
    "--source",
    type=click.Choice([TreeSource.DATA.value, TreeSource.METADATA.value]),
    default=TreeSource.DATA.value,
    show_default=True,
    help="Read all data and verify it, or believe the block records.",
)
@click.option(
    "--mapped",
    is_flag=True,
    help="Map files in a worker process instead of copying what they hold.",
)
@_json
@click.pass_obj
def build(
    output: ProgressStyle,
    paths: tuple[str, ...],
    ids: tuple[int, ...],
    source: str,
    mapped: bool,
    as_json: bool,
) -> int:
    """Build the trees of containers and say what is wrong.

    The tombstones of the stored tree are laid over each. Notes are no faults.

    Exit status: 0 nothing found, 3 findings, 1 a container could not be read.
    """
    if mapped and TreeSource(source) is not TreeSource.DATA:
        raise UsageError("--mapped says how data are read, and --source metadata reads none")
    built: list[tuple[str, _Built]] = []
    with _opened(_places(paths)) as places, ExitStack() as stack:
        reader = stack.enter_context(MappedReader()) if mapped else None
        jobs = _jobs(places, ids)
        failures = _Failures()
        with _progress("building", jobs, TreeSource(source), output) as on_bytes:
            for place, container_id in jobs:
                with failures.caught(place.name, container_id):
                    one = _built(
                        place.store.get(container_id), TreeSource(source), on_bytes, reader
                    )
                    if as_json:
                        print_json(_build_json(one))
                    built.append((place.name, one))
    if not as_json:
        _print_built(built)
    return failures.exit_status(found=any(one.findings for _, one in built))


@tree.command()
@_paths
@_ids
@_json
def show(paths: tuple[str, ...], ids: tuple[int, ...], as_json: bool) -> int:
    """Show stored trees: root, blocks, chunks, tombstones.

    Exit status: 0 shown, 1 a tree is not there or could not be read.
    """
    failures = _Failures()
    with _stored_trees(paths, ids) as files:
        for file in files:
            with failures.caught(file.name, file.container_id):
                container_id, stored = file.parsed()
                if as_json:
                    print_json(_tree_json(container_id, stored))
                else:
                    _print_tree(file.name, container_id, stored)
    return failures.exit_status(found=False)


@tree.command()
@_paths
@_ids
@_json
def check(paths: tuple[str, ...], ids: tuple[int, ...], as_json: bool) -> int:
    """Verify stored trees.

    Order, ranges, limits, all sums, and the root against the volume's database.

    Exit status: 0 all are right, 3 some are not, each with its reasons.
    """
    failures, rows, wrong = _Failures(), [], False
    with _stored_trees(paths, ids) as files:
        for file in files:
            with failures.caught(file.name, file.container_id):
                checked = file.checked()
                wrong = wrong or bool(checked.reasons)
                if as_json:
                    print_json(checked.json(file.path))
                else:
                    verdict = ", ".join(checked.reasons) or "right"
                    # A file that is no tree and is not named by a number tells no
                    # container.
                    which = "unknown" if checked.container_id is None else checked.container_id
                    rows.append((which, checked.root, verdict, "; ".join(checked.notes), file.name))
    if not as_json:
        columns = ("CONTAINER", "ROOT", "VERDICT", "NOTES", "PATH")
        print_table(columns, rows, numbers=("CONTAINER", "ROOT"), folded=("NOTES", "PATH"))
    return failures.exit_status(found=wrong)


@tree.command("diff")
@_paths
@_ids
@click.option(
    "--source",
    type=click.Choice([source.value for source in TreeSource]),
    default=TreeSource.DATA.value,
    show_default=True,
    help=(
        "Read all data and compare what it is, believe the block records, or compare the stored"
        " trees."
    ),
)
@_json
@click.pass_obj
def diff_command(
    output: ProgressStyle, paths: tuple[str, ...], ids: tuple[int, ...], source: str, as_json: bool
) -> int:
    """Compare the replicas of containers.

    Says of each difference who lacks what and who has it, and of each container what
    can be done. Given a folder of a container, only that container is compared.
    Erasure-coded replicas hold different parts by design: they are not compared, and
    their verdict is unknown, as is that of a container with one replica here. Nor is a
    container where a replica cannot be read: that replica is named with the reason.

    Verdicts: MATCH, REPAIRABLE, UNRECOVERABLE, CONFLICT, UNKNOWN. With --source data,
    UNRECOVERABLE is what `treefold reconcile` would come to: it takes good windows
    wherever they are, also out of a file whose record is lost. By records or stored
    trees alone it is a presumption. Records that contradict each other, a conflict too,
    show only in a reconciliation.

    Exit status: 0 no differences, 3 differences, 1 a replica could not be read.
    """
    if len(set(paths)) < 2 or len(set(paths)) < len(paths):
        raise UsageError("give two or more different paths to compare")
    failures, compared = _Failures(), list[_Compared]()
    with _opened(_places(paths)) as places:
        folders = tuple(place.container_id for place in places if place.container_id is not None)
        jobs = _jobs(places, ids or folders)
        with _progress("comparing", jobs, TreeSource(source), output) as on_bytes:
            for container_id in sorted({container_id for _, container_id in jobs}):
                holders = [place for place, held in jobs if held == container_id]
                replicas, unread = dict[str, _Built](), dict[str, str]()
                for place in holders:
                    try:
                        built = _built(place.store.get(container_id), TreeSource(source), on_bytes)
                        if built.unread is not None:
                            raise built.unread
                        replicas[place.name] = built
                    except ReconcileError as error:
                        failures.tell(place.name, container_id, error)
                        unread[place.name] = error.message
                # A verdict without one of the replicas could call lost what only that
                # one holds.
                if unread:
                    one = _Compared(Comparison(container_id, Verdict.UNKNOWN), unread=unread)
                else:
                    live = {
                        name: replica for name, replica in replicas.items() if not replica.deleted
                    }
                    stores = {place.name: place.store for place in holders}
                    files = {name: stores[name].get(container_id) for name in live}
                    one = _compare(container_id, live, files)
                if as_json:
                    print_json(_compared_json(one))
                compared.append(one)
    if not as_json:
        _print_compared(compared)
    return failures.exit_status(found=any(one.differs for one in compared))


@tree.result_callback()
@click.pass_context
def _exit(ctx: click.Context, status: int) -> None:
    ctx.exit(status)


@dataclass(frozen=True, slots=True)
class _Path:
    """One PATH as given: a volume, or one container in it."""

    name: str
    root: Path
    container_id: ContainerId | None


@dataclass(frozen=True, slots=True)
class _Place:
    """A PATH with its volume open."""

    name: str
    store: ContainerStore
    container_id: ContainerId | None


def _places(names: Sequence[str]) -> list[_Path]:
    return [_path(name) for name in names]


def _path(name: str) -> _Path:
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
        return _Path(name, *found)
    if not (path / "hdds").is_dir() and (path / "metadata").is_dir():
        raise VolumeError(
            f"{name} is the folder of a container outside of a volume",
            hint=(
                "Its block records are in the database of its volume; give it where it lies in one."
            ),
            reason="container_without_volume",
            path=name,
        )
    return _Path(name, path, None)


@contextmanager
def _opened(paths: Sequence[_Path]) -> Iterator[list[_Place]]:
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
        yield [_Place(path.name, stores[path.root], path.container_id) for path in paths]


def _jobs(places: Sequence[_Place], ids: Sequence[int]) -> list[tuple[_Place, ContainerId]]:
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


def _held(place: _Place) -> list[ContainerId]:
    if place.container_id is not None:
        return [place.container_id]
    lost: list[ContainerId] = []
    # A database that cannot be read is a finding of every container.
    with suppress(DatabaseError):
        lost = place.store.ids_without_folder()
    return sorted([*place.store.ids(), *lost])


class _Failures:
    """Errors that ended one container each."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def caught(self, name: str, container_id: ContainerId | None) -> Iterator[None]:
        try:
            yield
        except ReconcileError as error:
            self.tell(name, container_id, error)

    def tell(self, name: str, container_id: ContainerId | None, error: ReconcileError) -> None:
        self._count += 1
        which = "" if container_id is None else f", container {container_id}"
        click.echo(f"error [{error.code}]: {name}{which}: {error.message}", err=True)

    def exit_status(self, *, found: bool) -> int:
        return EXIT_FAILED if self._count else EXIT_FINDINGS if found else 0


@contextmanager
def _progress(
    what: str, jobs: Sequence[tuple[_Place, ContainerId]], source: TreeSource, output: ProgressStyle
) -> Iterator[Callable[[int], None] | None]:
    if source is not TreeSource.DATA:
        yield None
        return
    total = 0
    for place, container_id in jobs:
        with suppress(DatabaseError):
            total += place.store.get(container_id).counters().used_bytes or 0
    with byte_progress(what, total, output) as advance:
        yield advance


@dataclass(frozen=True)
class _Built:
    """One replica's tree, from whatever source, and what was met on the way."""

    container_id: ContainerId
    state: str
    replica_index: int
    source: TreeSource
    tree: ContainerTree
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    bad_windows: Mapping[tuple[BlockId, int], frozenset[int]] = field(default_factory=dict)
    deleted: bool = False
    # Why the tree does not tell what the replica holds.
    unread: ReconcileError | None = None


def _built(
    container: Container,
    source: TreeSource,
    on_bytes: Callable[[int], None] | None,
    mapped: MappedReader | None = None,
) -> _Built:
    found = survey_container(container, source, fall_back=False, on_bytes=on_bytes, mapped=mapped)
    surplus = () if source is TreeSource.TREE else _surplus(container)
    return _Built(
        container.container_id,
        found.state.name if found.state else STATE_UNKNOWN,
        found.replica_index,
        source,
        found.tree,
        found.findings,
        (*found.notes, *surplus),
        found.bad_windows,
        found.deleted,
        _unread(container, source, found),
    )


def _unread(
    container: Container, source: TreeSource, found: ReplicaSnapshot
) -> ReconcileError | None:
    """Why nothing is known of what a replica holds, which must not pass for nothing;
    None where it is known.
    """
    if found.source is not None and found.state is not None:
        return None
    # A container whose folder is lost does hold nothing.
    if source is not TreeSource.TREE and not container.disk.is_folder(container.folder):
        return None
    # By its stored tree alone a replica is not scanned.
    why = "; ".join(one.detail for one in found.findings or found.faults if one.block_id is None)
    if found.state is None:
        return DescriptorError(why or "the descriptor cannot be read")
    if source is not TreeSource.TREE:
        return DatabaseError(why)
    # One that was never built is no fault, and of such a tree nothing counts as
    # missing.
    return TreeRefusedError(UNREADABLE, why) if why else None


def _surplus(container: Container) -> Iterator[str]:
    """What lies behind the last recorded chunk of a block: no fault, and never cut off,
    but worth a word.
    """
    # What cannot be read is a finding already.
    with suppress(DatabaseError, RecordInvalidError):
        for block_id in container.block_ids():
            with suppress(DiskError, RecordInvalidError):
                record = container.record(block_id)
                if record is not None and (length_bytes := container.unrecorded_bytes(record)):
                    yield (
                        f"block {block_id} has {length_bytes} bytes behind its last recorded chunk"
                    )


def _build_json(built: _Built) -> JsonObject:
    deleted = sum(block.deleted for block in built.tree.blocks)
    return {
        "containerID": built.container_id,
        "state": built.state,
        "dataChecksum": root_hex(built.tree.data_checksum),
        "source": built.source.value,
        "blocks": len(built.tree.blocks) - deleted,
        "deletedBlocks": deleted,
        "findings": [_finding_json(finding) for finding in built.findings],
        "notes": list(built.notes),
    }


def _finding_json(finding: Finding) -> JsonObject:
    parts = {"type": finding.type.value, "blockID": finding.block_id, "offset": finding.offset}
    return {key: value for key, value in parts.items() if value is not None}


def _print_built(built: Sequence[tuple[str, _Built]]) -> None:
    rows = []
    for name, one in built:
        shown = _build_json(one)
        keys = ("containerID", "state", "dataChecksum", "blocks", "deletedBlocks")
        rows.append([*(shown[key] for key in keys), len(one.findings), name])
    columns = ("CONTAINER", "STATE", "ROOT", "BLOCKS", "DELETED", "FINDINGS", "PATH")
    print_table(
        columns,
        rows,
        numbers=("CONTAINER", "ROOT", "BLOCKS", "DELETED", "FINDINGS"),
        folded=("PATH",),
    )
    for name, one in built:
        for finding in one.findings:
            where = _where(finding.block_id, finding.offset)
            print_line(
                f"{name}: container {one.container_id}: {finding.type.value}{where}:"
                f" {finding.detail}"
            )
        for note in one.notes:
            print_line(f"{name}: container {one.container_id}: note: {note}", style="dim")


def _where(block_id: BlockId | None, offset: int | None) -> str:
    block = "" if block_id is None else f" block {block_id}"
    return block if offset is None else f"{block} offset {offset}"


@dataclass(frozen=True, slots=True)
class _TreeFile:
    """A tree file: in a volume, with the root that the database has for it, or by
    itself.
    """

    name: str
    path: Path
    container_id: ContainerId | None
    container: Container | None = None

    def parsed(self) -> tuple[ContainerId, ContainerTree]:
        raw = Disk().read(self.path)
        container_id = (
            self.container_id if self.container_id is not None else container_id_of_tree(raw)
        )
        return container_id, tree_from_bytes(raw, container_id)

    def checked(self) -> "_Checked":
        checked = _Checked(self.container_id)
        recorded = None
        if self.container is not None:
            try:
                recorded = self.container.counters().data_checksum
            except DatabaseError as error:
                checked.notes.append(error.message)
        length = Disk().length(self.path)
        if length is None:
            # Ozone builds a tree in its own time; one that had a root once is lost.
            if recorded is not None:
                checked.reasons.append("missing")
            else:
                checked.notes.append("no tree was built yet")
            return checked
        if length == 0:
            checked.reasons.append("empty")
            return checked
        try:
            checked.container_id, stored = self.parsed()
            if stored.data_checksum is None:
                checked.notes.append("the tree has no root: only deletions were recorded so far")
            else:
                checked.root = root_hex(stored.data_checksum)
            check_tree(stored)
        except TreeRefusedError as error:
            checked.reasons.append(error.reason)
            checked.notes.append(error.message)
            return checked
        if None not in (recorded, stored.data_checksum) and recorded != stored.data_checksum:
            checked.reasons.append("root_differs_from_database")
            checked.notes.append(f"the database has {root_hex(recorded)}")
        return checked


@dataclass(slots=True)
class _Checked:
    """What came of checking one tree file; it is right where there are no reasons
    against it.
    """

    container_id: ContainerId | None
    root: str = ""
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def json(self, path: Path) -> JsonObject:
        return {
            "containerID": self.container_id,
            "path": str(path),
            "dataChecksum": self.root or None,
            "reasons": self.reasons,
            "notes": self.notes,
        }


@contextmanager
def _stored_trees(names: Sequence[str], ids: Sequence[int]) -> Iterator[list[_TreeFile]]:
    """The tree files that the paths stand for: files themselves, or those of
    containers.
    """
    files = [name for name in names if os.path.isfile(name)]
    with _opened(_places([name for name in names if name not in files])) as places:
        found = [_lone_file(name) for name in files]
        lone = {file.container_id for file in found}
        for place, container_id in (
            _jobs(places, [i for i in ids if i not in lone]) if places else ()
        ):
            container = place.store.get(container_id)
            found.append(_TreeFile(place.name, container.tree_path, container_id, container))
        yield [file for file in found if not ids or file.container_id in ids]


def _lone_file(name: str) -> _TreeFile:
    """A file by itself; its name tells the container, else its content does."""
    stem = Path(name).name.removesuffix(".tree")
    named = ContainerId(int(stem)) if stem.isascii() and stem.isdigit() and len(stem) < 20 else None
    return _TreeFile(name, Path(name), named)


def _tree_json(container_id: ContainerId, stored: ContainerTree) -> JsonObject:
    return {
        "containerID": container_id,
        "dataChecksum": None if stored.data_checksum is None else root_hex(stored.data_checksum),
        "blocks": [
            {
                "blockID": block.block_id,
                "dataChecksum": root_hex(block.data_checksum),
                "deleted": block.deleted,
                "chunks": [
                    {
                        "offset": chunk.offset,
                        "length": chunk.length_bytes,
                        "dataChecksum": root_hex(chunk.data_checksum),
                        "checksumMatches": chunk.checksum_matches,
                    }
                    for chunk in block.chunks
                ],
            }
            for block in stored.blocks
        ],
    }


def _print_tree(name: str, container_id: ContainerId, stored: ContainerTree) -> None:
    root = "none" if stored.data_checksum is None else root_hex(stored.data_checksum)
    deleted = sum(block.deleted for block in stored.blocks)
    print_line(
        f"{name}: container {container_id}, root {root}, {len(stored.blocks) - deleted} blocks,"
        f" {deleted} deleted"
    )
    rows: list[tuple[object, ...]] = []
    for block in stored.blocks:
        state = "deleted" if block.deleted else "live"
        rows.append((block.block_id, state, root_hex(block.data_checksum), "", "", "", ""))
        rows += [
            (
                "",
                "",
                "",
                chunk.offset,
                chunk.length_bytes,
                root_hex(chunk.data_checksum),
                "matches" if chunk.checksum_matches else "corrupt",
            )
            for chunk in block.chunks
        ]
    columns = ("BLOCK", "STATE", "CHECKSUM", "OFFSET", "LENGTH", "CHUNK", "DATA")
    if rows:
        print_table(columns, rows, numbers=("BLOCK", "CHECKSUM", "OFFSET", "LENGTH", "CHUNK"))


@dataclass(frozen=True, slots=True)
class _Compared:
    """The replicas of one container side by side, and remarks for people.

    Where some are `unread`, by the paths given and each with the reason, none are
    compared.
    """

    comparison: Comparison
    remarks: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        return bool(self.comparison.differences) or self.comparison.verdict not in (
            Verdict.MATCH,
            Verdict.UNKNOWN,
        )


def _compare(
    container_id: ContainerId, replicas: Mapping[str, _Built], files: Mapping[str, Container]
) -> _Compared:
    if any(replica.replica_index for replica in replicas.values()):
        return _Compared(
            Comparison(container_id, Verdict.UNKNOWN), ("erasure-coded: replicas differ by design",)
        )
    if not replicas:
        return _Compared(Comparison(container_id, Verdict.UNKNOWN), ("deleted everywhere",))
    unrecorded = _unrecorded(replicas, files)
    comparison = compare(
        {name: replica.tree for name, replica in replicas.items()},
        bad_windows={
            name: {**replica.bad_windows, **unrecorded[name]} for name, replica in replicas.items()
        },
    )
    remarks = tuple(evidence.detail for evidence in comparison.evidence)
    lost, found = _in_no_tree(replicas, files)
    if lost and len(replicas) > 1:
        comparison = replace(comparison, verdict=Verdict.UNRECOVERABLE)
    elif found and comparison.verdict in (Verdict.MATCH, Verdict.UNKNOWN):
        comparison = replace(comparison, verdict=Verdict.REPAIRABLE)
    return _Compared(comparison, (*remarks, *lost, *found))


def _in_no_tree(
    replicas: Mapping[str, _Built], files: Mapping[str, Container]
) -> tuple[list[str], list[str]]:
    """What is on record and of which no replica with a record has a byte: what is lost,
    and what other files hold.
    """
    blocks = [block for replica in replicas.values() for block in replica.tree.blocks]
    passed_over = {block.block_id for block in blocks if block.deleted}
    held = {(block.block_id, chunk.offset) for block in blocks for chunk in block.chunks}
    recorders: dict[tuple[BlockId, int], str] = {}
    for name, replica in replicas.items():
        if replica.source is TreeSource.DATA and replica.findings:
            with suppress(DatabaseError, RecordInvalidError):
                places = lost_chunks(files[name], replica.tree).items()
                recorders |= {
                    (block_id, offset): name for block_id, offsets in places for offset in offsets
                }
    lost, found = list[str](), list[str]()
    for block_id, offset in sorted(recorders.keys() - held):
        record = files[recorders[block_id, offset]].stored_record(block_id)
        chunk = record.by_offset.get(offset) if record else None
        if block_id in passed_over or chunk is None:
            continue
        bad = set(range(len(chunk.checksums)))
        for replica_files in files.values():
            with suppress(BlockNotFoundError, DiskError):
                bad.intersection_update(
                    bad_windows(chunk, replica_files.read(block_id, offset, chunk.length_bytes))
                )
        where = _where(block_id, offset)
        if bad:
            lost.append(f"nobody has all bytes of what is recorded as{where}")
        else:
            found.append(f"only files without a record hold what is recorded elsewhere as{where}")
    return lost, found


def _unrecorded(
    replicas: Mapping[str, _Built], files: Mapping[str, Container]
) -> dict[str, dict[tuple[BlockId, int], frozenset[int]]]:
    """Of chunks that nobody has whole, the bad windows of files that are there though
    no readable record names them.

    What is good is told by the records of the replicas whose scans found those chunks
    corrupt.
    """
    found: dict[str, dict[tuple[BlockId, int], frozenset[int]]] = {name: {} for name in replicas}
    corrupt = {place: other for other, replica in replicas.items() for place in replica.bad_windows}
    if not corrupt:
        return found
    entries = {name: _chunks(replica.tree) for name, replica in replicas.items()}
    for place, other in corrupt.items():
        if any(held.get(place) for held in entries.values()):
            continue
        for name in (name for name, held in entries.items() if place not in held):
            block_id, offset = place
            # What cannot be read here is of no use; that the other has it on record is
            # known from its scan.
            with suppress(BlockNotFoundError, DiskError, RecordInvalidError):
                record = files[other].record(block_id)
                chunk = record.by_offset.get(offset) if record else None
                if chunk is not None and is_sound(chunk):
                    data = files[name].read(block_id, offset, chunk.length_bytes)
                    found[name][place] = frozenset(bad_windows(chunk, data))
    return found


def _chunks(built: ContainerTree) -> dict[tuple[BlockId, int], bool]:
    """Whether each chunk of a tree matches its record."""
    return {(b.block_id, c.offset): c.checksum_matches for b in built.blocks for c in b.chunks}


def _compared_json(compared: _Compared) -> JsonObject:
    differences = []
    for difference in compared.comparison.differences:
        one: JsonObject = {"kind": difference.kind.value, "blockID": difference.block_id}
        if difference.offset is not None:
            one["offset"] = difference.offset
        differences.append(
            one | {"lacking": list(difference.lacking), "sources": list(difference.sources)}
        )
    shown: JsonObject = {
        "containerID": compared.comparison.container_id,
        "verdict": compared.comparison.verdict.value,
        "differences": differences,
    }
    if compared.unread:
        shown["unread"] = [
            {"replica": name, "reason": reason} for name, reason in compared.unread.items()
        ]
    return shown


def _print_compared(compared: Iterable[_Compared]) -> None:
    ordered = list(compared)
    rows = [
        (c.comparison.container_id, c.comparison.verdict.value, len(c.comparison.differences))
        for c in ordered
    ]
    print_table(("CONTAINER", "VERDICT", "DIFFERENCES"), rows, numbers=("CONTAINER", "DIFFERENCES"))
    for one in ordered:
        container_id = one.comparison.container_id
        for difference in one.comparison.differences:
            where = _where(difference.block_id, difference.offset)
            sources = ", ".join(difference.sources) or "nowhere"
            lacking = ", ".join(difference.lacking)
            print_line(
                f"container {container_id}: {difference.kind.value}{where}: {lacking} <- {sources}"
            )
        for name, reason in one.unread.items():
            print_line(f"container {container_id}: not compared: {name}: {reason}")
        for remark in one.remarks:
            print_line(f"container {container_id}: note: {remark}", style="dim")
