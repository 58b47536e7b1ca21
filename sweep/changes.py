"""What became of the findings of a sweep in a later one.

A finding is healed only if the later sweep read all expected replicas of its container
and decided about them, by scans that are no older than those of the earlier sweep.
Otherwise it is unseen, with the reason: the stored trees of a replica may be older than
the damage that an earlier sweep found in its data.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from merkle.outcome import DIVERGED_VERDICTS, Verdict
from merkle.replica import TreeSource
from sweep.exact import Row
from sweep.faults import Place, one_name
from sweep.model import FindingKind, NotCompared
from sweep.output import SweepStore, SweepTable

# The kind of an entry of `unseen` that stands for replicas, not for a finding.
UNSEEN_REPLICA = "unseen_replica"

# Sources of checksums that were compared with the data; a block record was not.
_READ = frozenset({TreeSource.TREE.value, TreeSource.DATA.value})
_DECIDED = {verdict.value for verdict in (*DIVERGED_VERDICTS, Verdict.MATCH)}


@dataclass(frozen=True, slots=True)
class SweepChanges:
    """The findings of two sweeps by what became of them, each list ascending.

    `unseen` are the findings of the earlier sweep that the later one could not check,
    and the containers that are UNSEEN in it, each with the reason.
    """

    new: tuple[Place, ...]
    persisting: tuple[Place, ...]
    healed: tuple[Place, ...]
    unseen: Mapping[Place, str]


def compare_sweeps(sweeps: SweepStore, before: str, after: str) -> SweepChanges:
    """The changes between two sweeps.

    Raises:
        DiskError: a table cannot be read.
    """
    earlier, later = _found(sweeps, before), _found(sweeps, after)
    known = earlier | later
    earlier, later = one_name(earlier, known), one_name(later, known)
    # A silent change is an event, so it neither persists nor heals.
    events = {place for place in earlier | later if place[1] == FindingKind.SILENT_CHANGE.value}
    gone = earlier - later - events
    of_interest = {container_id for container_id, _ in gone}
    decided, unseen, reasons = set[int](), dict[Place, str](), dict[int, str]()
    older = _known_from_before(sweeps, before, after, of_interest)
    for row in _of_interest(sweeps, after, of_interest):
        container_id = row["container_id"]
        if row["verdict"] == NotCompared.UNSEEN.value:
            unseen[container_id, UNSEEN_REPLICA] = row["detail"]
        if row["verdict"] in _DECIDED and not row["unread"] and container_id in older:
            reasons[container_id] = older[container_id]
        elif row["verdict"] in _DECIDED and not row["unread"]:
            decided.add(container_id)
        else:
            reasons[container_id] = f"{row['verdict']}: {row['detail']}"
    for place in gone:
        if place[0] not in decided:
            unseen[place] = reasons.get(place[0], "the sweep read no replica of it")
    return SweepChanges(
        tuple(sorted((later - earlier) | (later & events))),
        tuple(sorted((later & earlier) - events)),
        tuple(sorted(place for place in gone if place[0] in decided)),
        dict(sorted(unseen.items())),
    )


def _of_interest(sweeps: SweepStore, sweep_id: str, containers: set[int]) -> list[Row]:
    """The verdicts of these containers, and of all that are UNSEEN."""
    wanted, found = pa.array(sorted(containers), pa.int64()), list[Row]()
    columns = ["container_id", "verdict", "unread", "detail"]
    for piece in sweeps.pieces(SweepTable.VERDICTS, sweep_id, columns):
        is_unseen = pc.equal(piece["verdict"], NotCompared.UNSEEN.value)
        is_wanted = pc.or_(is_unseen, pc.is_in(piece["container_id"], value_set=wanted))
        found += piece.filter(is_wanted).to_pylist()
    return found


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
    sweeps: SweepStore, before: str, after: str, containers: set[int]
) -> dict[int, str]:
    """Those of the containers with a replica of which the later sweep knows less than
    the earlier one, each with the reason.
    """
    earlier = {(r["container_id"], r["datanode"]): r for r in _roots(sweeps, before, containers)}
    found = dict[int, str]()
    for row in _roots(sweeps, after, containers):
        was = earlier.get((row["container_id"], row["datanode"]))
        if was is not None and _is_older(was, row):
            found.setdefault(
                row["container_id"],
                f"the sweep did not read the data of {row['datanode']}, and its last scan was"
                " before that of the earlier sweep",
            )
    return found


def _roots(sweeps: SweepStore, sweep_id: str, containers: set[int]) -> list[Row]:
    """What these containers were compared by: rows with container_id, datanode, source
    and scanned_at (in ms since the epoch, because foreign times may lie beyond
    Python's).
    """
    wanted, found = pa.array(sorted(containers), pa.int64()), list[Row]()
    columns = ["container_id", "datanode", "source", "scanned_at"]
    for piece in sweeps.pieces(SweepTable.ROOTS, sweep_id, columns) if containers else ():
        rows = piece.filter(pc.is_in(piece["container_id"], value_set=wanted))
        at = columns.index("scanned_at")
        found += rows.set_column(at, "scanned_at", rows["scanned_at"].cast("int64")).to_pylist()
    return found


def _found(sweeps: SweepStore, sweep_id: str) -> set[Place]:
    """The kinds of differences in diverged and UNSEEN containers, and the silent
    changes.
    """
    columns = ["container_id", "verdict", "diverged"]
    is_counted = pc.field("diverged") | (pc.field("verdict") == NotCompared.UNSEEN.value)
    verdicts = sweeps.read(SweepTable.VERDICTS, sweep_id, columns, where=is_counted)
    counted = verdicts["container_id"]
    findings = sweeps.read(SweepTable.FINDINGS, sweep_id, ["container_id", "kind"])
    counts = pc.is_in(findings["container_id"], value_set=counted)
    silent = pc.equal(findings["kind"], FindingKind.SILENT_CHANGE.value)
    places = (
        findings.filter(pc.or_(counts, silent)).group_by(["container_id", "kind"]).aggregate([])
    )
    return set(zip(places["container_id"].to_pylist(), places["kind"].to_pylist(), strict=True))
