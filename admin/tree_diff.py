"""`treefold tree diff`: compare the replicas of one container."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from admin.comparison import comparison_json
from admin.tree_build import ReplicaTree
from admin.tree_sources import place_text
from merkle.comparison import Comparison, UnrecordedCopies, compare, unrecorded_copies
from merkle.errors import RecordInvalidError
from merkle.outcome import Evidence, EvidenceKind, Verdict
from merkle.replica import TreeSource
from merkle.survey import ChunkPlace
from merkle.tree import ContainerId
from merkle.windows import bad_windows, is_sound
from ozone.containers import Container
from ozone.errors import BlockNotFoundError
from ozone.scan import lost_chunks
from runtime.errors import DatabaseError, DiskError
from runtime.output import JsonObject, print_line, print_table


@dataclass(frozen=True, slots=True)
class ReplicaComparison:
    """The comparison of one container's replicas.

    `unread` has the replicas that could not be read, by path, with the reasons. If
    there are any, no replicas are compared.
    """

    comparison: Comparison
    unread: Mapping[str, str] = field(default_factory=dict)


def compare_replicas(
    container_id: ContainerId, replicas: Mapping[str, ReplicaTree], files: Mapping[str, Container]
) -> ReplicaComparison:
    """Compare replicas by their trees. Where a block record is lost, the block's files
    are read as well.
    """
    if any(replica.replica_index for replica in replicas.values()):
        return _not_compared(container_id, "erasure-coded: replicas differ by design")
    if not replicas:
        return _not_compared(container_id, "deleted everywhere")
    trees = {name: replica.tree for name, replica in replicas.items()}
    windows = {name: dict(replica.bad_windows) for name, replica in replicas.items()}
    lost = {
        name: _lost_places(replica, files[name])
        for name, replica in replicas.items()
        if replica.source is TreeSource.DATA and replica.findings
    }
    for copies in list(unrecorded_copies(trees, bad_windows=windows, lost=lost)):
        for name, bad in _bad_windows(copies, files):
            windows[name][copies.block_id, copies.offset] = bad
    places = {place for found in lost.values() for place in found}
    return ReplicaComparison(compare(trees, bad_windows=windows, lost=places))


def _not_compared(container_id: ContainerId, why: str) -> ReplicaComparison:
    evidence = Evidence(EvidenceKind.NOTHING_COMPARED, None, None, why)
    return ReplicaComparison(Comparison(container_id, Verdict.UNKNOWN, (), (evidence,)))


def _lost_places(replica: ReplicaTree, container: Container) -> frozenset[ChunkPlace]:
    """The recorded chunks of which a scan found no data at all."""
    # An unreadable database is a finding already.
    with suppress(DatabaseError, RecordInvalidError):
        lost = lost_chunks(container, replica.tree)
        return frozenset((block_id, at) for block_id, offsets in lost.items() for at in offsets)
    return frozenset()


def _bad_windows(
    copies: UnrecordedCopies, files: Mapping[str, Container]
) -> Iterator[tuple[str, frozenset[int]]]:
    """The bad windows of each readable file, checked against another replica's
    record.
    """
    record = None
    # The scan found the record; if it has become unreadable, nothing can be verified.
    with suppress(DatabaseError, RecordInvalidError):
        record = files[copies.recorder].record(copies.block_id)
    chunk = record.by_offset.get(copies.offset) if record else None
    if chunk is None or not is_sound(chunk):
        return
    for name in copies.holders:
        with suppress(BlockNotFoundError, DiskError):
            data = files[name].read(copies.block_id, copies.offset, chunk.length_bytes)
            yield name, frozenset(bad_windows(chunk, data))


def replica_comparison_json(compared: ReplicaComparison) -> JsonObject:
    shown = comparison_json(compared.comparison)
    if compared.unread:
        shown["unread"] = [
            {"replica": name, "reason": reason} for name, reason in compared.unread.items()
        ]
    return shown


def print_comparisons(compared: Iterable[ReplicaComparison]) -> None:
    ordered = list(compared)
    rows = [
        (c.comparison.container_id, c.comparison.verdict.value, len(c.comparison.differences))
        for c in ordered
    ]
    print_table(("CONTAINER", "VERDICT", "DIFFERENCES"), rows, numbers=("CONTAINER", "DIFFERENCES"))
    for one in ordered:
        container_id = one.comparison.container_id
        for difference in one.comparison.differences:
            where = place_text(difference.block_id, difference.offset)
            sources = ", ".join(difference.sources) or "nowhere"
            lacking = ", ".join(difference.lacking)
            print_line(
                f"container {container_id}: {difference.kind.value}{where}: {lacking} <- {sources}"
            )
        # Why not is on stderr already, with the error's code.
        for name in one.unread:
            print_line(f"container {container_id}: not compared: {name} cannot be read")
        for evidence in one.comparison.evidence:
            where = place_text(evidence.block_id, evidence.offset)
            note = f"{evidence.detail}:{where}" if where else evidence.detail
            print_line(f"container {container_id}: note: {note}", style="dim")
