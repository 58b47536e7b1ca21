"""`treefold tree build`: the tree of a replica, from data, block records or tree
file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

from admin.build_results import BuildResult, BuildResults
from admin.paths import state_home
from admin.tree_sources import (
    STATE_UNKNOWN,
    ContainerFailures,
    TreePath,
    place_text,
    used_bytes,
)
from merkle.errors import ReconcileError, RecordInvalidError, TreeRefusedError
from merkle.replica import TreeSource
from merkle.tree import BlockId, ContainerId, ContainerTree, root_hex
from ozone.containers import Container
from ozone.errors import DescriptorError
from ozone.mapped import MappedReader
from ozone.scan import Finding
from ozone.survey import UNREADABLE, ReplicaSnapshot, survey_container
from runtime.errors import DatabaseError, DiskError
from runtime.json_numbers import exact
from runtime.output import JsonObject, print_json, print_line, print_row
from runtime.progress import ProgressSink

# Columns and their widths, for rows that are printed before all are known: those of the
# usual values, negative where they are aligned to the right.
_COLUMNS = {
    "CONTAINER": -9,
    "STATE": 12,
    "ROOT": -8,
    "BLOCKS": -6,
    "DELETED": -7,
    "FINDINGS": -8,
}


@dataclass(frozen=True)
class ReplicaTree:
    """The tree of a replica from one source, with findings and notes."""

    container_id: ContainerId
    state: str
    replica_index: int
    source: TreeSource
    tree: ContainerTree
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    bad_windows: Mapping[tuple[BlockId, int], frozenset[int]] = field(default_factory=dict)
    deleted: bool = False
    # Why the content of the replica is unknown; None if it is known.
    unread: ReconcileError | None = None


def replica_tree(
    container: Container,
    source: TreeSource,
    on_bytes: Callable[[int], None] | None,
    mapped: MappedReader | None = None,
) -> ReplicaTree:
    found = survey_container(container, source, fall_back=False, on_bytes=on_bytes, mapped=mapped)
    surplus = () if source is TreeSource.TREE else _surplus_bytes(container)
    return ReplicaTree(
        container.container_id,
        found.state.name if found.state else STATE_UNKNOWN,
        found.replica_index,
        source,
        found.tree,
        found.findings,
        (*found.notes, *surplus),
        found.bad_windows,
        found.deleted,
        _unread_blocks(container, source, found),
    )


def _unread_blocks(
    container: Container, source: TreeSource, found: ReplicaSnapshot
) -> ReconcileError | None:
    """Why the content of a replica is unknown, which is not the same as empty; None if
    it is known.
    """
    if found.source is not None and found.state is not None:
        return None
    # A container without a folder is known to be empty.
    if source is not TreeSource.TREE and not container.disk.is_folder(container.folder):
        return None
    # With the source TREE the replica is not scanned, so it has faults, not findings.
    why = "; ".join(one.detail for one in found.findings or found.faults if one.block_id is None)
    if found.state is None:
        return DescriptorError(why or "the descriptor cannot be read")
    if source is not TreeSource.TREE:
        return DatabaseError(why)
    # A tree that was never built is not a fault, and its blocks do not count as
    # missing.
    return TreeRefusedError(UNREADABLE, why) if why else None


def _surplus_bytes(container: Container) -> Iterator[str]:
    """Notes on blocks with bytes after their last recorded chunk. These are not a
    fault and are never cut off.
    """
    # Unreadable blocks are findings already.
    with suppress(DatabaseError, RecordInvalidError):
        for block_id in container.block_ids():
            with suppress(DiskError, RecordInvalidError):
                record = container.record(block_id)
                if record is not None and (length_bytes := container.unrecorded_bytes(record)):
                    yield (
                        f"block {block_id} has {length_bytes} bytes after its last recorded chunk"
                    )


def _build_json(built: ReplicaTree) -> JsonObject:
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
    block_id = exact(finding.block_id)
    parts = {"type": finding.type.value, "blockID": block_id, "offset": finding.offset}
    return {key: value for key, value in parts.items() if value is not None}


def _build_result(name: str, built: ReplicaTree) -> BuildResult:
    """What is printed of a tree from this PATH."""
    which = f"{name}: container {built.container_id}: "
    findings = (
        f"{which}{one.type.value}{place_text(one.block_id, one.offset)}: {one.detail}"
        for one in built.findings
    )
    notes = (f"{which}note: {note}" for note in built.notes)
    return BuildResult(name, _build_json(built), tuple(findings), tuple(notes))


def _print_heading() -> None:
    print_row([*_COLUMNS, "PATH"], _COLUMNS.values())


def _print_result(one: BuildResult) -> None:
    """A row of one container, and its findings and notes below."""
    shown = one.shown
    keys = ("containerID", "state", "dataChecksum", "blocks", "deletedBlocks")
    print_row([*(shown[key] for key in keys), len(one.findings), one.name], _COLUMNS.values())
    for finding in one.findings:
        print_line(finding)
    for note in one.notes:
        print_line(note, style="dim")


@contextmanager
def open_results(
    paths: Sequence[TreePath], source: str, *, resume: bool
) -> Iterator[BuildResults | None]:
    """The results of a build, kept below the state folder of the user. None where they
    cannot be kept: the build does without, and says so.

    Raises:
        BusyError: another build of the same paths runs.
        DiskError: the results to be continued cannot be read.
    """
    roots = [path.root / str(path.container_id or "") for path in paths]
    try:
        folder = state_home() / "tree-build"
        results = BuildResults(folder, roots, source, resume=resume)
    except DiskError as error:
        if resume:
            raise
        print_line(f"note: this build cannot be resumed: {error.message}", stderr=True)
        yield None
        return
    if resume and not results.count:
        print_line("note: there is nothing to resume: all containers are read", stderr=True)
    with closing(results):
        yield results


class TreeBuild:
    """One run of `treefold tree build`: prints and keeps each result as it comes."""

    def __init__(self, results: BuildResults | None, sink: ProgressSink, *, as_json: bool) -> None:
        self.failures = ContainerFailures()
        # Whether there are findings.
        self.found = False
        self._results = results
        self._sink = sink
        self._as_json = as_json
        self._done = self._resumed = 0

    def take(
        self,
        name: str,
        container: Container,
        read: Callable[[], ReplicaTree],
        *,
        reads_data: bool,
    ) -> None:
        """Read a container, unless the interrupted build did, and print its result."""
        with self.failures.catch(name, container.container_id):
            kept = self._results.earlier(container) if self._results else None
            if kept is not None:
                self._resumed += 1
                if reads_data:
                    self._sink.skip(used_bytes(container))
                self._print(kept)
                return
            # Before the data are read: what is written meanwhile is a change.
            version = _version(container) if self._results else None
            built = read()
            one = _build_result(name, built)
            self._print(one)
            if self._results and version is not None and built.unread is None:
                self._results.add(container, version, one)

    def note_interruption(self, containers: int) -> None:
        """Say how far an interrupted build came."""
        text = f"{self._done} of {containers} containers are done"
        if self._results:
            text += "; the same command with --resume continues with the rest"
        print_line(text, stderr=True)

    def finish(self) -> None:
        """Say what was not read again, and drop the results: the build has ended."""
        if self._resumed:
            what = "container was" if self._resumed == 1 else "containers were"
            text = "read by the interrupted build and not changed since: not read again"
            print_line(f"{self._resumed} {what} {text}", stderr=True)
        if self._results:
            self._results.finish()

    def _print(self, one: BuildResult) -> None:
        with self._sink.results():
            if self._as_json:
                print_json(one.shown)
            else:
                if not self._done:
                    _print_heading()
                _print_result(one)
        self._done += 1
        self.found = self.found or bool(one.findings)


def _version(container: Container) -> str | None:
    # What is wrong with the container is found, and reported, as it is read.
    with suppress(DatabaseError, DiskError):
        return container.version()
    return None
