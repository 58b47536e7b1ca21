"""What became of the findings of a sweep in a later one.

A finding is healed only if the later sweep read all expected replicas of its container
and decided about them. Otherwise it is unseen, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from merkle.outcome import DIVERGED_VERDICTS, Verdict
from sweep.exact import Row
from sweep.faults import Place, one_name
from sweep.model import FindingKind, NotCompared
from sweep.output import SweepStore, SweepTable

# The kind of an entry of `unseen` that stands for replicas, not for a finding.
UNSEEN_REPLICA = "unseen_replica"

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
    decided, unseen, reasons = set[int](), dict[Place, str](), dict[int, str]()
    for row in _of_interest(sweeps, after, {container_id for container_id, _ in gone}):
        container_id = row["container_id"]
        if row["verdict"] == NotCompared.UNSEEN.value:
            unseen[container_id, UNSEEN_REPLICA] = row["detail"]
        if row["verdict"] in _DECIDED and not row["unread"]:
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


def _found(sweeps: SweepStore, sweep_id: str) -> set[Place]:
    """The kinds of differences in diverged and UNSEEN containers, and the silent
    changes.
    """
    verdicts = sweeps.read(SweepTable.VERDICTS, sweep_id, ["container_id", "verdict", "diverged"])
    is_unseen = pc.equal(verdicts["verdict"], NotCompared.UNSEEN.value)
    counted = verdicts.filter(pc.or_(verdicts["diverged"], is_unseen))["container_id"]
    findings = sweeps.read(SweepTable.FINDINGS, sweep_id, ["container_id", "kind"])
    counts = pc.is_in(findings["container_id"], value_set=counted)
    silent = pc.equal(findings["kind"], FindingKind.SILENT_CHANGE.value)
    places = (
        findings.filter(pc.or_(counts, silent)).group_by(["container_id", "kind"]).aggregate([])
    )
    return set(zip(places["container_id"].to_pylist(), places["kind"].to_pylist(), strict=True))
