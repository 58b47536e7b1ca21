"""The totals of a sweep, counted where its tables are written."""

from collections import Counter
from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from merkle.outcome import Verdict
from merkle.replica import ReplicaState
from sweep.model import FINAL_VERDICT_SCHEMA, FINDING_SCHEMA, REPLICA_SCHEMA
from sweep.output import SweepTable

_DECIDED = pa.array(
    [verdict.value for verdict in Verdict if verdict is not Verdict.UNKNOWN], pa.string()
)

# States in which a replica should take part.
_TAKING_PART = pa.array(
    [s.value for s in ReplicaState if s.is_closed or s is ReplicaState.INVALID], pa.string()
)

_NUMBERS = ("containers", "replicas", "excluded", "compared", "unseen", "without_tree")
_COUNTERS = ("verdicts", "findings", "paths")


class SweepTotals:
    """Counts replicas, verdicts and findings for the summary."""

    def __init__(self) -> None:
        self.containers = 0
        self.replicas = 0
        self.excluded = 0
        self.compared = 0
        self.unseen = 0
        self.without_tree = 0
        self.diverged: list[int] = []
        self.verdicts = Counter[str]()
        self.findings = Counter[str]()
        self.paths = Counter[str]()

    @classmethod
    def of(cls, tables: Mapping[str, pa.Table]) -> "SweepTotals":
        """The totals of tables by the names of SweepTable; others are ignored."""
        totals = cls()
        totals.add_replicas(tables.get(SweepTable.ROOTS.value, REPLICA_SCHEMA.empty_table()))
        totals.add_verdicts(
            tables.get(SweepTable.VERDICTS.value, FINAL_VERDICT_SCHEMA.empty_table())
        )
        totals.add_findings(tables.get(SweepTable.FINDINGS.value, FINDING_SCHEMA.empty_table()))
        return totals

    def counts(self) -> dict[str, int]:
        """All but `diverged`, as numbers by name; counters have names in two parts."""
        found = {name: getattr(self, name) for name in _NUMBERS}
        for name in _COUNTERS:
            found |= {f"{name}/{key}": count for key, count in getattr(self, name).items()}
        return found

    def add_counts(self, counts: Mapping[str, int], diverged: Iterable[int]) -> None:
        """Add the totals that `counts` and `diverged` returned elsewhere."""
        for name, count in counts.items():
            counter, is_counter, key = name.partition("/")
            if is_counter:
                getattr(self, counter)[key] += count
            else:
                setattr(self, name, getattr(self, name) + count)
        self.diverged += diverged

    def add_replicas(self, replicas: pa.Table) -> None:
        """Count rows of REPLICA_SCHEMA."""
        self.replicas += replicas.num_rows
        should_take_part = pc.and_(
            pc.is_in(replicas["state"], value_set=_TAKING_PART),
            pc.equal(replicas["replica_index"], 0),
        )
        is_without = pc.and_(should_take_part, pc.equal(replicas["source"], "none"))
        self.without_tree += pc.sum(is_without).as_py() or 0
        self.paths.update(_counts(replicas["path"]))

    def add_verdicts(self, verdicts: pa.Table) -> None:
        """Count rows of FINAL_VERDICT_SCHEMA."""
        self.containers += verdicts.num_rows
        self.unseen += pc.sum(verdicts["unread"]).as_py() or 0
        decided = verdicts.filter(pc.is_in(verdicts["verdict"], value_set=_DECIDED))
        taking_part = pc.subtract(decided["replicas"], decided["excluded"])
        self.compared += pc.sum(taking_part).as_py() or 0
        self.excluded += pc.sum(verdicts["excluded"]).as_py() or 0
        self.verdicts.update(_counts(verdicts["verdict"]))
        self.diverged += verdicts.filter(verdicts["diverged"])["container_id"].to_pylist()

    def add_findings(self, findings: pa.Table) -> None:
        """Count rows of FINDING_SCHEMA."""
        self.findings.update(_counts(findings["kind"]))


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {one["values"]: one["counts"] for one in pc.value_counts(column).to_pylist()}
