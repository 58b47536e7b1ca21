"""A sweep as the comparison with earlier sweeps sees it (sweep.history)."""

from collections.abc import Callable, Mapping, Sequence

from sweep.engine import Engine, Revisit
from sweep.exports import parts_of_holders
from sweep.fragments import Int64s
from sweep.model import FINDING_SCHEMA, Part
from sweep.pieces import StoredTable
from sweep.stages import ContainerStage
from sweep.totals import SweepTotals
from sweep.work import SweepStage


class Night:
    """What the history needs of the sweep that runs. Findings go to the stage
    `revisited`, which is emptied: events may have been added since it was filled.
    """

    def __init__(
        self,
        engine: Engine,
        by_range: Callable[..., SweepStage],
        parts: Sequence[Part],
        revisited: SweepStage,
    ) -> None:
        self.for_each = engine.for_each
        self._engine = engine
        self._by_range = by_range
        self._parts = parts
        revisited.clear()
        self._revisited = revisited

    def changed(self, stage: ContainerStage, inputs: Mapping[str, StoredTable]) -> StoredTable:
        """The replicas whose trees changed since the earlier sweeps in `inputs`."""
        key = ",".join(inputs)
        done = self._by_range("changed", stage, inputs, {}, SweepTotals(), key=key)
        return done.table("changed", stage.schemas["changed"])

    def revisit(
        self,
        work: Revisit,
        earlier: Sequence[Part],
        requested: tuple[Int64s, Int64s],
        changed: StoredTable,
    ) -> None:
        """Store the findings of `work` about these containers."""
        places = {"findings": self._revisited.place("findings", FINDING_SCHEMA)}
        parts = parts_of_holders(self._parts, changed)
        for found in self._engine.revisit(work, parts, earlier, requested, changed, places):
            self._revisited.add({}, {"findings": found.findings}, found.files)
