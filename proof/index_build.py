"""Build the files of an index from a listing, on one machine or on many.

    sample keys  ->  cut into ranges  ->  rows, names and sums of each range
                 ->  entries by hash of each share  ->  sums merged

An engine decides where the tasks run (`proof.index_parts`); the local one is here. What
a build was cut into is in its folder, with the files of all ranges that are done. So a
build of the same listing goes on where an earlier one ended.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from merkle.checksum import RunningFingerprint
from proof.index_parts import (
    PLAN,
    IndexJob,
    IndexSums,
    ranged_rows,
    read_slices,
    write_slices,
)
from proof.listed_rows import ListedItemRules
from proof.listing import (
    LISTED_SCHEMA,
    KeySample,
    ListingPart,
    sample_part,
)
from runtime.disk import Disk
from runtime.documents import parse_json
from runtime.progress import ProgressSink

# Objects in one range: a task holds them, with some hundred bytes each.
RANGE_ROWS = 1 << 17
# Shares of hashes are told apart in 64 bits.
_RANGES_MAX = 1 << 16
# Tasks at a time that wait for a store.
_WAITING_THREADS = 16
_FORMAT = 1


class IndexEngine(Protocol):
    """Runs the tasks of a build. Every method raises ListingInvalidError, DiskError or
    DatabaseError as the task did, or an error of the engine itself.
    """

    def run(self, tasks: Sequence[Callable[[], None]], advance: Callable[[int], None]) -> None:
        """Call each of these, which can be pickled; `advance` counts them."""

    def sample(
        self, parts: Sequence[ListingPart], advance: Callable[[int], None]
    ) -> Iterator[pa.Table]:
        """The sample of each part (`sample_part`), in any order; `advance` counts
        parts.
        """

    def index_ranges(
        self,
        job: IndexJob,
        parts: Sequence[ListingPart],
        wanted: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        """Make the files of these ranges; `advance` counts ranges."""

    def index_hashes(self, job: IndexJob, advance: Callable[[int], None]) -> None:
        """Make the entries by hash of all shares, once all ranges are done; `advance`
        counts shares.
        """

    def sums(self, job: IndexJob) -> IndexSums:
        """The sums of all ranges."""


@dataclass(frozen=True, slots=True)
class BuiltFiles:
    """What a build has made: all files, and the sums of their items. `listed` counts
    the rows that a sample has seen, `resumed` the ranges that an earlier run had made.
    """

    files: tuple[Path, ...]
    sums: IndexSums
    listed: int
    ranges: int
    resumed: int


def build_files(
    engine: IndexEngine,
    parts: Sequence[ListingPart],
    folder: Path,
    rules: ListedItemRules,
    *,
    disk: Disk,
    progress: ProgressSink,
    range_rows: int = RANGE_ROWS,
) -> BuiltFiles:
    """Make the files of the index of a listing in a folder of its own; go on with what
    an earlier run of the same listing has made there.

    Raises:
        ListingInvalidError: a part cannot be read, or is not what its manifest says.
        IndexDamagedError: a file of the folder is not what was written.
        DiskError, DatabaseError: a file cannot be written.
    """
    disk.make_folder(folder)
    disk.remove_temporaries(folder)
    plan = _Plan.stored(folder, _identity(parts, rules), disk)
    if plan is None:
        disk.remove_folder(folder)
        disk.make_folder(folder)
        progress.begin("sample the listing", len(parts), "parts")
        sample = KeySample.of(engine.sample(parts, progress.advance))
        # A huge listing has larger ranges.
        rows = max(range_rows, sample.rows // (_RANGES_MAX // 2))
        plan = _Plan(sample.rows, sample.bounds(rows))
        plan.store(folder, _identity(parts, rules), disk)
    job = IndexJob(folder, rules, plan.bounds)
    assert job.ranges < _RANGES_MAX
    wanted = [number for number in range(job.ranges) if not job.is_done(number)]
    progress.begin("index ranges of keys", job.ranges, "ranges")
    progress.skip(job.ranges - len(wanted))
    if wanted:
        engine.index_ranges(job, parts, wanted, progress.advance)
    progress.begin("index hashes", job.shares, "shares")
    engine.index_hashes(job, progress.advance)
    files, sums = tuple(job.files()), engine.sums(job)
    return BuiltFiles(files, sums, plan.rows, job.ranges, job.ranges - len(wanted))


class LocalIndexEngine:
    """An IndexEngine of threads. Rows are sorted into ranges on disk, so that memory
    holds some ranges at a time, whatever the order of the listing.
    """

    def __init__(self, disk: Disk, *, threads: int | None = None) -> None:
        self._disk = disk
        self._threads = threads or os.cpu_count() or 1

    def run(self, tasks: Sequence[Callable[[], None]], advance: Callable[[int], None]) -> None:
        """See IndexEngine. They wait for others most of the time."""
        with self._pool(_WAITING_THREADS) as pool:
            for _ in pool.map(lambda task: task(), tasks):
                advance(1)

    def sample(
        self, parts: Sequence[ListingPart], advance: Callable[[int], None]
    ) -> Iterator[pa.Table]:
        """See IndexEngine."""
        with self._pool() as pool:
            sample = partial(sample_part, parts=len(parts))
            for one in pool.map(sample, range(len(parts)), parts):
                advance(1)
                yield one

    def index_ranges(
        self,
        job: IndexJob,
        parts: Sequence[ListingPart],
        wanted: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        """See IndexEngine."""
        spilled = job.folder / "spilled"
        self._disk.remove_folder(spilled)
        self._disk.make_folder(spilled)
        with self._pool() as pool:
            spill = partial(_spill, job, frozenset(wanted), spilled)
            paths = [path for found in pool.map(spill, range(len(parts)), parts) for path in found]

            def index(number: int) -> int:
                listed = read_slices(paths, number, job.ranges, LISTED_SCHEMA)
                return job.index_range(number, listed, self._disk)

            for _ in pool.map(index, wanted):
                advance(1)
        self._disk.remove_folder(spilled)

    def index_hashes(self, job: IndexJob, advance: Callable[[int], None]) -> None:
        """See IndexEngine."""
        with self._pool() as pool:
            index = partial(job.index_hashes, disk=self._disk)
            for _ in pool.map(index, range(job.shares)):
                advance(1)

    def sums(self, job: IndexJob) -> IndexSums:
        """See IndexEngine."""
        return job.sums(range(job.ranges), self._disk)

    @contextmanager
    def _pool(self, threads: int | None = None) -> Iterator[Executor]:
        """Threads; what was not begun when an error ends the context is not done."""
        pool = ThreadPoolExecutor(threads or self._threads, "index")
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _spill(
    job: IndexJob, wanted: frozenset[int], folder: Path, number: int, part: ListingPart
) -> list[Path]:
    """Sort the objects of a part into slices of files, one for each range."""
    paths = list[Path]()
    for rows, ranges in ranged_rows(part, job.bounds, wanted):
        paths.append(folder / f"{number:06}-{len(paths):06}.arrow")
        write_slices(paths[-1], rows, ranges, job.ranges)
    return paths


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a build was cut."""

    rows: int
    bounds: tuple[bytes, ...]

    @classmethod
    def stored(cls, folder: Path, identity: str, disk: Disk) -> "_Plan | None":
        """That of an earlier run of the same build; None if there is none."""
        if disk.length(folder / PLAN) is None:
            return None
        try:
            held = parse_json(disk.read(folder / PLAN))
            if (held["format"], held["identity"]) != (_FORMAT, identity):
                return None
            return cls(int(held["rows"]), tuple(bytes.fromhex(one) for one in held["bounds"]))
        except (ValueError, KeyError, TypeError):
            # Nobody else writes there; whatever it is, the build begins anew.
            return None

    def store(self, folder: Path, identity: str, disk: Disk) -> None:
        """Keep it for a later run."""
        bounds = [bound.hex() for bound in self.bounds]
        document = {"format": _FORMAT, "identity": identity, "rows": self.rows, "bounds": bounds}
        disk.replace(folder / PLAN, json.dumps(document).encode())


def _identity(parts: Sequence[ListingPart], rules: ListedItemRules) -> str:
    """What is the same only for a build of the same items."""
    running = RunningFingerprint()
    running.update(f"{rules.profile.digest.hex()} {rules.etags_prove}".encode())
    for part in parts:
        running.update(f"\n{part!r}".encode())
    return running.digest().hex()
