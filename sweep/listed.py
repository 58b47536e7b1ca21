"""The replicas that an export lists in one of its files, and how many of their rows
were read.

An export may have a few replicas or a million, so all is looked up at once in sorted
arrays.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from sweep.fragments import Bools, Int64s
from sweep.model import RootMethod
from sweep.rows import EncodedRows, Rows
from sweep.runs import RUN_SCHEMA, RunJoiner, Stretches, replicas_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Making one takes as long as reading a small export.
_NO_RUNS = RUN_SCHEMA.empty_table()


class ListedReplicas:
    """The replicas in an inventory (chunktable.schema.CONTAINER_SCHEMA) of one file."""

    def __init__(
        self,
        names: Sequence[str],
        codes: "NDArray[np.integer]",
        ids: Int64s,
        rows: Int64s,
        volumes: Sequence[str] | None,
    ) -> None:
        """The volume of each replica as an index into `names`, its container, and the
        number of rows that it has in the file. `volumes` are those that are read; None
        are all.
        """
        # There may be names of other files.
        is_used = np.bincount(codes, minlength=len(names)) > 0
        codes = (np.cumsum(is_used) - 1)[codes]
        self._volumes = list(compress(names, is_used.tolist()))
        self.rows = rows
        # As agents write them; else sorting takes more memory than all the rest.
        is_sorted = (codes[1:] > codes[:-1]) | ((codes[1:] == codes[:-1]) & (ids[1:] >= ids[:-1]))
        if not is_sorted.all():
            order = np.lexsort((ids, codes))
            ids, codes, self.rows = ids[order], codes[order], self.rows[order]
        self._ids = ids
        self._counts = np.zeros(len(ids), np.int64)
        # Where the replicas of each volume begin.
        self._starts = np.searchsorted(codes, np.arange(len(self._volumes) + 1))
        is_read = [volumes is None or volume in volumes for volume in self._volumes]
        self._is_read = np.array(is_read, np.bool_)[codes]

    @classmethod
    def of(cls, inventory: pa.Table, volumes: Sequence[str] | None) -> Self:
        """Those in a table of CONTAINER_SCHEMA."""
        encoded = inventory["volume"].combine_chunks().dictionary_encode()
        codes, ids = encoded.indices.to_numpy(), inventory["container_id"].to_numpy()
        names = encoded.dictionary.to_pylist()
        return cls(names, codes, ids, inventory["rows"].to_numpy(), volumes)

    def places(self, volumes: pa.ChunkedArray | pa.Array, container_ids: pa.Array) -> Int64s:
        """The index of each replica in `rows`, -1 if it is not listed."""
        if isinstance(volumes, pa.ChunkedArray):
            volumes = volumes.combine_chunks()
        if not pa.types.is_dictionary(volumes.type):
            volumes = volumes.dictionary_encode()
        codes = volumes.indices.fill_null(-1).to_numpy()
        found = self._places_of(volumes.dictionary.to_pylist(), codes, container_ids.to_numpy())
        found[codes < 0] = -1
        return found

    def places_of(self, found: Stretches) -> Int64s:
        """Like `places`, of the replica of each stretch."""
        volume = found.text["volume"]
        ids = found.integers["container_id"]
        return self._places_of(volume.values.to_pylist(), volume.codes, ids)

    def _places_of(self, names: Sequence[str], codes: "NDArray[np.integer]", ids: Int64s) -> Int64s:
        found = np.full(len(ids), -1, np.int64)
        for code, volume in enumerate(names):
            if volume in self._volumes:
                ours = slice(None) if len(names) == 1 else codes == code
                found[ours] = self._places(self._volumes.index(volume), ids[ours])
        return found

    def _places(self, volume: int, ids: Int64s) -> Int64s:
        first, end = self._starts[volume : volume + 2]
        held = self._ids[first:end]
        places = np.searchsorted(held, ids)
        is_listed = held[np.minimum(places, len(held) - 1)] == ids
        listed: Int64s = np.where(is_listed, first + places, -1)
        return listed

    def is_live(self, places: Int64s) -> Bools:
        """Whether the replicas in these places are listed, on a volume that is read."""
        is_live: Bools = places >= 0
        if len(self._is_read):
            is_live &= self._is_read[places]
        return is_live

    def count(self, places: Int64s, rows: Int64s) -> None:
        """Count rows that were read of the replicas in these places."""
        listed = places >= 0
        np.add.at(self._counts, places[listed], rows[listed])

    def wrong(self) -> str:
        """Which replica has another number of rows than it should have; "" if all that
        should be there were counted.
        """
        # A replica that is listed twice was counted once.
        is_new = np.ones(len(self._ids), np.bool_)
        is_new[1:] = self._ids[1:] != self._ids[:-1]
        is_new[self._starts[:-1]] = True
        counts = self._counts[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
        wrong = np.flatnonzero(counts != self.rows)
        if not len(wrong):
            return ""
        at = wrong[0]
        volume = self._volumes[int(np.searchsorted(self._starts, at, "right")) - 1]
        return (
            f"{counts[at]} rows of container {self._ids[at]} on volume {volume}, and the inventory"
            f" says {self.rows[at]}"
        )

    def settled(
        self, stretches: Iterable[Rows | EncodedRows]
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """The replicas (REPLICA_SCHEMA) that these rows have whole, and the runs
        (RUN_SCHEMA) of others, some at a time; without those that are not listed or not
        live. Counts the rows.
        """
        joiner = RunJoiner()
        for rows in stretches:
            found = Stretches.of(rows)
            places = self.places_of(found)
            self.count(places, found.counts)
            is_live = self.is_live(places)
            is_whole = is_live & found.ordered
            is_whole[is_whole] = found.counts[is_whole] == self.rows[places[is_whole]]
            # Most replicas are whole in a batch, and need no table of runs.
            if is_whole.any():
                yield found.chosen(is_whole).replicas(), _NO_RUNS
            if (others := is_live & ~is_whole).any():
                yield from map(self._settle_joined, joiner.add(found.chosen(others).runs()))
        yield from map(self._settle_joined, joiner.close())

    def _settle_joined(self, runs: pa.Table) -> tuple[pa.Table, pa.Table]:
        places = self.places(runs["volume"], runs["container_id"])
        is_whole = runs["ordered"].to_numpy() & (runs["rows"].to_numpy() == self.rows[places])
        whole, others = (runs.filter(pa.array(mask)) for mask in (is_whole, ~is_whole))
        paths = pa.repeat(pa.scalar(RootMethod.FILE_WISE.value), whole.num_rows)
        return replicas_of(whole, paths), others
