"""`treefold tree diff`: the replicas of one container side by side."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from admin.output import JsonObject, print_line, print_table
from admin.tree_build import ReplicaTree
from admin.tree_sources import place_text
from merkle.errors import RecordInvalidError
from merkle.outcome import Verdict
from merkle.plan import Comparison, compare
from merkle.replica import TreeSource
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import bad_windows, is_sound
from ozone.containers import Container
from ozone.errors import BlockNotFoundError
from ozone.scan import lost_chunks
from runtime.errors import DatabaseError, DiskError


@dataclass(frozen=True, slots=True)
class ReplicaComparison:
    """The replicas of one container side by side, and remarks for people.

    Where some are `unread`, by the paths given and each with the reason, none are
    compared.
    """

    comparison: Comparison
    remarks: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether the replicas are known to differ."""
        return bool(self.comparison.differences) or self.comparison.verdict not in (
            Verdict.MATCH,
            Verdict.UNKNOWN,
        )


def compare_replicas(
    container_id: ContainerId, replicas: Mapping[str, ReplicaTree], files: Mapping[str, Container]
) -> ReplicaComparison:
    if any(replica.replica_index for replica in replicas.values()):
        return ReplicaComparison(
            Comparison(container_id, Verdict.UNKNOWN), ("erasure-coded: replicas differ by design",)
        )
    if not replicas:
        return ReplicaComparison(Comparison(container_id, Verdict.UNKNOWN), ("deleted everywhere",))
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
    return ReplicaComparison(comparison, (*remarks, *lost, *found))


def _in_no_tree(
    replicas: Mapping[str, ReplicaTree], files: Mapping[str, Container]
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
        where = place_text(block_id, offset)
        if bad:
            lost.append(f"nobody has all bytes of what is recorded as{where}")
        else:
            found.append(f"only files without a record hold what is recorded elsewhere as{where}")
    return lost, found


def _unrecorded(
    replicas: Mapping[str, ReplicaTree], files: Mapping[str, Container]
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


def comparison_json(compared: ReplicaComparison) -> JsonObject:
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
        for name, reason in one.unread.items():
            print_line(f"container {container_id}: not compared: {name}: {reason}")
        for remark in one.remarks:
            print_line(f"container {container_id}: note: {remark}", style="dim")
