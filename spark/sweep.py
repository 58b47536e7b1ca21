"""One sweep from start to end: fold all parts, judge all containers, write the tables.

What an engine computes is pure and in other modules; an engine only says where and how many at a time. Whatever it
hands to `store` is on disk when `store` returns, so that a sweep that ends anywhere goes on behind its last wave.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark.model import Part

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wave:
    """All that came of some parts, which are never folded again.

    An engine that computes whole replicas gives these instead of runs, and names in `exact` the containers that it
    cannot decide; where a container has both runs and replicas, the sweep decides it along the exact path.
    """

    part_ids: tuple[str, ...]
    # Rows of the chunk table that were read.
    rows: int
    # spark.runs.RUN_SCHEMA; any order.
    runs: pa.Table
    # REPLICA_SCHEMA and FINDING_SCHEMA.
    replicas: pa.Table
    findings: pa.Table
    # Containers, ascending.
    exact: Int64s


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of the rows of some containers, each of them whole: REPLICA_SCHEMA, VERDICT_SCHEMA, FINDING_SCHEMA."""

    replicas: pa.Table
    verdicts: pa.Table
    findings: pa.Table


class Engine(Protocol):
    """Where the work is done. Whatever an engine reads or keeps is bounded, however large a container is."""

    @property
    def name(self) -> str:
        """What the summary calls it."""
        ...

    def fold(self, parts: Sequence[Part], store: Callable[[Wave], None], tell: Callable[[int], None]) -> None:
        """Fold all parts, in waves of a few minutes at most, each given to `store`; `tell` of rows as they are read.

        All parts are of files: the volumes of this machine are made into some first. A part that cannot be read is no
        error: a finding names it.
        """
        ...

    def exact(self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s) -> Iterator[Judged]:
        """Replicas and findings of these containers from their sorted rows (spark.exact), without verdicts.

        `rows` says about how many rows each of them has.
        """
        ...

    def inspect(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Iterator[Judged]:
        """Verdicts and findings of these containers from their rows (spark.compare), without replicas.

        `replicas` are those of these containers, whether they take part or not.
        """
        ...
