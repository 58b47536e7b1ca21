"""What became of the findings of a sweep in a later one.

A finding is healed only if the later sweep read all expected replicas of its container
and decided about them, by scans that are no older than those of the earlier sweep.
Otherwise it is unseen, with the reason: the stored trees of a replica may be older than
the damage that an earlier sweep found in its data. A container that the earlier sweep
decided, and about which the later one knows nothing, is a change too. A finding whose
damaged replica was removed is not healed but gone.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from merkle.outcome import DIVERGED_VERDICTS, Verdict
from merkle.replica import TreeSource
from sweep.exact import Row
from sweep.faults import Place, one_name
from sweep.gone_replicas import gone_replicas
from sweep.model import FindingKind, NotCompared
from sweep.output import SweepStore, SweepTable
from sweep.pieces import Range
from sweep.reader import SweepReader, ranges_of

# The kinds of entries of `unseen` that stand for no finding: for replicas that were not
# read, and for a container that is no longer decided.
UNSEEN_REPLICA = "unseen_replica"
UNDECIDED = "undecided"

# Sources of checksums that were compared with the data; a block record was not.
_READ = frozenset({TreeSource.TREE.value, TreeSource.DATA.value})
_SILENT = FindingKind.SILENT_CHANGE.value
_DECIDED = {verdict.value for verdict in (*DIVERGED_VERDICTS, Verdict.MATCH)}


@dataclass(frozen=True, slots=True)
class SweepChanges:
    """The findings of two sweeps by what became of them, each list ascending.

    `unseen` are the findings of the earlier sweep that the later one could not check,
    the containers that are UNSEEN in it, and those that are UNKNOWN in it and were
    decided in the earlier one, each with the reason. `gone` are findings whose damaged
    replica is not among those of the later sweep, although it read all that it
    expected. `left_out` counts by the name of a list what it has no room for.
    """

    new: tuple[Place, ...]
    persisting: tuple[Place, ...]
    healed: tuple[Place, ...]
    unseen: Mapping[Place, str]
    gone: Mapping[Place, str] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)


def compare_sweeps(
    sweeps: SweepStore, before: str, after: str, *, each_max: int | None = None
) -> SweepChanges:
    """The changes between two sweeps; of each list only the first `each_max`.

    The tables are compared range by range, so that no more is held than the lists and
    the findings of a range.

    Raises:
        DiskError: a table cannot be read.
    """
    earlier, later = SweepReader(sweeps, before), SweepReader(sweeps, after)
    changes = _ChangesSoFar(each_max)
    for wanted in ranges_of([earlier, later], [SweepTable.VERDICTS, SweepTable.FINDINGS]):
        changes.add_range(earlier, later, wanted)
    return changes.changes()


class _ChangesSoFar:
    """The changes in the ranges so far, which ascend."""

    def __init__(self, each_max: int | None) -> None:
        self._max = each_max
        self._places: dict[str, list[Place]] = {"new": [], "persisting": [], "healed": []}
        self._unseen, self._gone = dict[Place, str](), dict[Place, str]()
        self._left_out = Counter[str]()

    def changes(self) -> SweepChanges:
        """All of them."""
        lists = {name: tuple(places) for name, places in self._places.items()}
        return SweepChanges(**lists, unseen=self._unseen, gone=self._gone, left_out=+self._left_out)

    def add_range(self, before: SweepReader, after: SweepReader, wanted: Range) -> None:
        """Add the changes in a range."""
        earlier, later = _found(before, wanted), _found(after, wanted)
        known = earlier | later
        earlier, later = one_name(earlier, known), one_name(later, known)
        # A silent change is an event, so it neither persists nor heals.
        events = {place for place in earlier | later if place[1] == _SILENT}
        ended = earlier - later - events
        of_interest = {container_id for container_id, _ in ended}
        decided, reasons = set[int](), dict[int, str]()
        older = _known_from_before(before, after, wanted, of_interest)
        for row in _verdicts(after, wanted, of_interest):
            container_id = row["container_id"]
            if row["verdict"] in _DECIDED and not row["unread"] and container_id in older:
                reasons[container_id] = older[container_id]
            elif row["verdict"] in _DECIDED and not row["unread"]:
                decided.add(container_id)
            else:
                reasons[container_id] = f"{row['verdict']}: {row['detail']}"
        unseen, left_out = _unseen_containers(before, after, wanted, self._room(len(self._unseen)))
        for place in ended:
            if place[0] not in decided:
                unseen[place] = reasons.get(place[0], "the sweep read no replica of it")
        candidates = {place for place in ended if place[0] in decided}
        removed = gone_replicas(before, after, wanted, candidates)
        unseen |= removed.sources
        gone = {p: text for p, text in removed.lacking.items() if p not in removed.sources}
        self._add("new", (later - earlier) | (later & events))
        self._add("persisting", (later & earlier) - events)
        self._add("healed", candidates - gone.keys() - removed.sources.keys())
        self._add_reasons("unseen", self._unseen, unseen)
        self._left_out["unseen"] += left_out
        self._add_reasons("gone", self._gone, gone)

    def _room(self, held: int) -> int | None:
        return None if self._max is None else self._max - held

    def _add_reasons(self, name: str, held: dict[Place, str], reasons: Mapping[Place, str]) -> None:
        first = sorted(reasons)[: self._room(len(held))]
        held |= {place: reasons[place] for place in first}
        self._left_out[name] += len(reasons) - len(first)

    def _add(self, name: str, places: Set[Place]) -> None:
        held = self._places[name]
        first = sorted(places)[: self._room(len(held))]
        held += first
        self._left_out[name] += len(places) - len(first)


def _unseen_containers(
    before: SweepReader, after: SweepReader, wanted: Range, count: int | None
) -> tuple[dict[Place, str], int]:
    """The first `count` containers of a range that are UNSEEN in the later sweep, or
    UNKNOWN although the earlier one decided them, each with the reason, and the number
    of the others.
    """
    columns, found, seen = ["container_id", "verdict", "detail"], list[pa.Table](), 0
    decided = _decided_ids(before, wanted)
    for piece in after.pieces(SweepTable.VERDICTS, columns, wanted):
        is_unseen = pc.equal(piece["verdict"], NotCompared.UNSEEN.value)
        is_undecided = pc.and_(
            pc.equal(piece["verdict"], Verdict.UNKNOWN.value),
            pc.is_in(piece["container_id"], value_set=decided),
        )
        unseen = piece.filter(pc.or_(is_unseen, is_undecided))
        seen += unseen.num_rows
        found = [pa.concat_tables([*found, unseen]).sort_by("container_id").slice(0, count)]
    rows = found[0].to_pylist() if found else []
    reasons = dict[Place, str]()
    for row in rows:
        if row["verdict"] == NotCompared.UNSEEN.value:
            reasons[row["container_id"], UNSEEN_REPLICA] = row["detail"]
        else:
            reasons[row["container_id"], UNDECIDED] = f"{row['verdict']}: {row['detail']}"
    return reasons, seen - len(rows)


def _decided_ids(tables: SweepReader, wanted: Range) -> pa.ChunkedArray:
    """The containers of a range about which a sweep decided."""
    verdicts = pa.array(sorted(_DECIDED), pa.string())
    chunks = [
        chunk
        for piece in tables.pieces(SweepTable.VERDICTS, ["container_id", "verdict"], wanted)
        for chunk in piece.filter(pc.is_in(piece["verdict"], value_set=verdicts))[
            "container_id"
        ].chunks
    ]
    return pa.chunked_array(chunks, pa.int64())


def _verdicts(tables: SweepReader, wanted: Range, containers: set[int]) -> Iterator[Row]:
    """The verdicts of these containers."""
    ids = pa.array(sorted(containers), pa.int64())
    columns = ["container_id", "verdict", "unread", "detail"]
    for piece in tables.pieces(SweepTable.VERDICTS, columns, wanted) if containers else ():
        yield from piece.filter(pc.is_in(piece["container_id"], value_set=ids)).to_pylist()


def _is_older(earlier: Row, later: Row) -> bool:
    """Whether a sweep knew the data of a replica at a later time than the sweep after
    it. Both are rows with `source` and `scanned_at`.
    """
    if earlier["source"] not in _READ:
        # Nothing was known of its data.
        return False
    if later["source"] not in _READ:
        return True
    then, now = earlier["scanned_at"], later["scanned_at"]
    return then is not None and (now is None or now < then)


def _known_from_before(
    before: SweepReader, after: SweepReader, wanted: Range, containers: set[int]
) -> dict[int, str]:
    """Those of the containers with a replica of which the later sweep knows less than
    the earlier one, each with the reason.
    """
    earlier = {
        (row["container_id"], row["datanode"]): row for row in _roots(before, wanted, containers)
    }
    found = dict[int, str]()
    for row in _roots(after, wanted, containers):
        was = earlier.get((row["container_id"], row["datanode"]))
        if was is not None and _is_older(was, row):
            found.setdefault(
                row["container_id"],
                f"the sweep did not read the data of {row['datanode']}, and its last scan was"
                " before that of the earlier sweep",
            )
    return found


def _roots(tables: SweepReader, wanted: Range, containers: set[int]) -> Iterator[Row]:
    """What these containers were compared by: rows with container_id, datanode, source
    and scanned_at (in ms since the epoch, because foreign times may lie beyond
    Python's).
    """
    ids = pa.array(sorted(containers), pa.int64())
    columns = ["container_id", "datanode", "source", "scanned_at"]
    for piece in tables.pieces(SweepTable.ROOTS, columns, wanted) if containers else ():
        rows = piece.filter(pc.is_in(piece["container_id"], value_set=ids))
        at = columns.index("scanned_at")
        yield from rows.set_column(at, "scanned_at", rows["scanned_at"].cast("int64")).to_pylist()


def _found(tables: SweepReader, wanted: Range) -> set[Place]:
    """The kinds of findings in the containers of a range, whatever their verdict: also
    an UNKNOWN container, or one that matches, can have some. Those of whole inputs have
    no container, and are in the list of skipped ones.
    """
    places = set[Place]()
    for piece in tables.pieces(SweepTable.FINDINGS, ["container_id", "kind"], wanted):
        of_containers = piece.filter(pc.is_valid(piece["container_id"]))
        found = of_containers.group_by(piece.column_names).aggregate([])
        columns_found = (found[name].to_pylist() for name in ("container_id", "kind"))
        places.update(zip(*columns_found, strict=True))
    return places
