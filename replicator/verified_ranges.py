"""A verification of a huge bucket: ranges of keys, each a task of its own.

    look for keys that cut both listings into ranges
    list and verify each range at both sides; write what differs to a file
    merge counts and sums, read the files in the order of the ranges

Both stores list their keys in one order. So whatever either has of a range of keys is
known once the range is listed at both, and nothing has to be sorted or exchanged. A
task runs the verification of one machine (replicator.verify) on its range. What it
returns is a row of counts and sums, whose merge has no order.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from proof.item import ID_BYTES, EvidenceLevel
from proof.root import SetRoot
from replicator.compared_sets import SetSum
from replicator.copy_requests import ObjectStamp
from replicator.ledger import PairLedger
from replicator.ledger_view import LedgerView
from replicator.listing_range import ListingRange
from replicator.listing_shards import shard_bounds
from replicator.stores.opening import open_store
from replicator.stores.port import Store
from replicator.verify import (
    READERS_MAX,
    BucketVerification,
    Damage,
    KeyDifferenceKind,
    VerificationTally,
    VerifiedKey,
)
from runtime.disk import Disk, disk_error
from runtime.errors import DiskError, UsageError
from runtime.rate_limit import SystemClock
from runtime.retry import Backoff
from runtime.traffic import Traffic, TrafficCounter

if TYPE_CHECKING:
    # What prints is not among the packages of executors.
    from runtime.progress import ProgressSink

# In the state folder, while the command runs.
_WORK, _MARKER = "verify-ranges", "shared"
_RANGES_PER_CORE = 4
_TOKEN_BYTES = 8
_BATCH_ROWS = 1 << 14
# Rows of tasks that are Python objects at once: each has some 12 kB of sums.
_SUMMED_ROWS = 64

_TRAFFIC = ("requests", "bytes")
_COUNTS = pa.map_(pa.string(), pa.int64())
_RANGE_SCHEMA = pa.schema(
    [
        pa.field("number", pa.int32(), nullable=False),
        pa.field("after", pa.string(), nullable=False),
        pa.field("last", pa.string()),
    ]
)
# Keys that differ or changed meanwhile, and those of which the ledger is to note that
# their bytes are damaged (`damaged` is the stamp), or not any more (`is_mended`).
_DIFFERENCE_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("level", pa.int8(), nullable=False),
        pa.field("kind", pa.string()),
        pa.field("is_unsettled", pa.bool_(), nullable=False),
        pa.field("damage", pa.string()),
        pa.field(
            "damaged",
            pa.struct(
                [
                    ("version", pa.string()),
                    ("etag", pa.string()),
                    ("modified_ms", pa.int64()),
                    ("size_bytes", pa.int64()),
                ]
            ),
        ),
        pa.field("is_mended", pa.bool_(), nullable=False),
    ]
)
_SUM = pa.struct(
    [
        ("name", pa.string()),
        ("count", pa.int64()),
        ("total", pa.binary()),
        ("lanes", pa.binary()),
    ]
)
# What a verification has found of some keys, all told.
TALLY_SCHEMA = pa.schema(
    [
        pa.field("objects", pa.int64(), nullable=False),
        pa.field("unsettled", pa.int64(), nullable=False),
        pa.field("kinds", _COUNTS, nullable=False),
        pa.field("levels", _COUNTS, nullable=False),
        # Of equal keys, and how they are summed up.
        pa.field("equal_levels", _COUNTS, nullable=False),
        pa.field("oldest_read_at_s", pa.int64()),
        pa.field("sums", pa.list_(_SUM), nullable=False),
    ]
)
_DONE_SCHEMA = pa.schema(
    [
        pa.field("number", pa.int32(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        *TALLY_SCHEMA,
        *(
            pa.field(f"{side}_{name}", pa.int64(), nullable=False)
            for side in ("source", "target")
            for name in _TRAFFIC
        ),
    ]
)


class RangeEngine(Protocol):
    """Runs one task for each row of a table, on many machines."""

    def tasks_at_once(self) -> int:
        """How many run at a time, about."""

    def rows(
        self,
        ranges: pa.Table,
        work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: pa.Schema,
        marker: Path,
        advance: Callable[[int], None],
    ) -> pa.Table:
        """The rows, of a schema, that `work` returns for each row of `ranges`. It can
        be pickled, and sees the file `marker`. `advance` counts tasks.

        Raises:
            ReconcileError: a task failed, by its own error, or Spark did.
        """


class RangedVerification:
    """Verifies a target against a source by the tasks of an engine."""

    def __init__(
        self, source: Store, target: Store, ledger: PairLedger, *, level: EvidenceLevel
    ) -> None:
        """`ledger` has what earlier syncs recorded of this pair.

        Raises:
            UsageError: a side does not list all its keys in order.
        """
        for store in (source, target):
            if not store.capabilities.lists_all_keys:
                raise UsageError(
                    f"{store.address} does not list all its keys in order, and cannot be verified"
                    " in ranges",
                    hint="Leave out --engine spark.",
                )
        self._source, self._target = _MeteredStore(source), _MeteredStore(target)
        self._ledger, self._level = ledger, level
        self._folder = ledger.folder / _WORK

    @property
    def stores(self) -> tuple[Store, Store]:
        """The source and the target, whose traffic has that of tasks in it."""
        return self._source.store, self._target.store

    def differences(
        self,
        engine: RangeEngine,
        prefix: str,
        tally: VerificationTally,
        progress: "ProgressSink",
        *,
        ranges: int | None = None,
    ) -> Iterator[VerifiedKey]:
        """Every key that is not equal, ascending; before the first one `tally` has all
        keys. There are about `ranges` tasks; by default some for each core, as ranges
        are not quite equal.

        Raises:
            StoreError, SparkFailedError, FolderNotSharedError: a task failed, or a side
                did not answer.
            DatabaseError, DiskError: the state cannot be used.
        """
        disk = Disk()
        cuts = self._cut(prefix, ranges or _RANGES_PER_CORE * engine.tasks_at_once())
        self._ledger.settle()
        disk.remove_folder(self._folder)
        disk.make_folder(self._folder)
        try:
            marker = self._folder / _MARKER
            disk.replace(marker, b"")
            progress.begin("verify", len(cuts), "ranges")
            task = RangeTask(
                self._source.store.address,
                self._target.store.address,
                prefix,
                self._level,
                self._folder,
            )
            found = engine.rows(_range_table(cuts), task, _DONE_SCHEMA, marker, progress.advance)
            numbers = sorted(found["number"].to_pylist())
            # Keys that nobody listed would count as equal.
            assert numbers == list(range(len(cuts))), f"results of ranges: {numbers}"
            add_tallies(tally, found)
            for side, store in (("source", self._source), ("target", self._target)):
                store.add(*(pc.sum(found[f"{side}_{name}"]).as_py() for name in _TRAFFIC))
            for name in found.select(["number", "file"]).sort_by("number")["file"].to_pylist():
                yield from read_differences(self._folder / name, self._ledger)
        finally:
            disk.remove_folder(self._folder)

    def _cut(self, prefix: str, count: int) -> list[ListingRange]:
        # Of both: what only one of them has may be dense where the other has nothing.
        bounds = {
            bound
            for one in (self._source, self._target)
            for bound in shard_bounds(one.store.lister, count, prefix)
        }
        edges: list[str | None] = [None, *sorted(bounds), None]
        return [ListingRange(after or "", last) for after, last in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class RangeTask:
    """What a task does with the ranges that it gets; it can be pickled."""

    source: str
    target: str
    prefix: str
    level: EvidenceLevel
    folder: Path

    def __call__(self, ranges: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Verify each range, and return its row.

        Raises:
            StoreError: a listing is not complete, or a side did not answer.
            DatabaseError, DiskError: the ledger cannot be read, or a file not written.
        """
        for batch in ranges:
            for row in batch.to_pylist():
                keys = ListingRange(row["after"], row["last"])
                yield pa.RecordBatch.from_pylist([self._row(row["number"], keys)], _DONE_SCHEMA)

    def _row(self, number: int, keys: ListingRange) -> dict[str, object]:
        path = self.folder / f"{number:06}-{secrets.token_hex(_TOKEN_BYTES)}.parquet"
        with (
            open_store(self.source, may_write=False) as source,
            open_store(self.target, may_write=False) as target,
            LedgerView(self.folder.parent, keys) as ledger,
        ):
            views = keys.view(source), keys.view(target)
            tally = verify_range(*views, ledger, self.prefix, self.level, path)
            crossed = [one.traffic() if one.traffic else Traffic() for one in views]
        return {
            **tally_row(tally),
            "number": number,
            "file": path.name,
            "source_requests": crossed[0].requests,
            "source_bytes": crossed[0].bytes,
            "target_requests": crossed[1].requests,
            "target_bytes": crossed[1].bytes,
        }


def verify_range(
    source: Store,
    target: Store,
    ledger: LedgerView,
    prefix: str,
    level: EvidenceLevel,
    path: Path,
) -> VerificationTally:
    """Verify the range of keys that the stores and the ledger are views of; what
    differs goes to a file.

    Raises:
        StoreError: a listing is not complete, or a side did not answer.
        DatabaseError, DiskError: the ledger cannot be read, or the file not written.
    """
    with ThreadPoolExecutor(READERS_MAX, "verify") as readers:
        run = BucketVerification(
            source,
            target,
            ledger,
            level=level,
            readers=readers,
            # Nobody can hand these to a task, nor end its wait but with the task.
            clock=SystemClock(),
            sleep=time.sleep,
            backoff=Backoff(),
            is_cancelled=lambda: False,
        )
        tally = VerificationTally(ledger.secret)
        _write(path, _differing(run.keys(prefix), tally, ledger))
    return tally


def _differing(
    keys: Iterable[VerifiedKey], tally: VerificationTally, ledger: LedgerView
) -> Iterator[dict[str, object]]:
    """The rows of a file, while all keys are counted."""
    for key in keys:
        tally.add(key)
        is_marked = key.key in ledger.marks
        stamp = ledger.marks.pop(key.key, None)
        if key.kind is None and not key.is_unsettled and not is_marked:
            continue
        yield {
            "key": key.key,
            "level": int(key.level),
            "kind": key.kind.value if key.kind else None,
            "is_unsettled": key.is_unsettled,
            "damage": key.damage.value if key.damage else None,
            "damaged": asdict(stamp) if stamp else None,
            "is_mended": is_marked and stamp is None,
        }


def _write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    held = list[dict[str, object]]()
    try:
        with pq.ParquetWriter(path, _DIFFERENCE_SCHEMA) as writer:
            for row in rows:
                held.append(row)
                if len(held) >= _BATCH_ROWS:
                    writer.write_batch(pa.RecordBatch.from_pylist(held, _DIFFERENCE_SCHEMA))
                    held.clear()
            writer.write_batch(pa.RecordBatch.from_pylist(held, _DIFFERENCE_SCHEMA))
    except OSError as error:
        raise disk_error("write", path, error) from error


def read_differences(path: Path, ledger: PairLedger) -> Iterator[VerifiedKey]:
    """The keys that a task wrote to a file, without facts; the ledger gets what it says
    of damage.

    Raises:
        DiskError: it cannot be read.
    """
    for batch in _batches_of(path):
        for row in batch.to_pylist():
            key, stamp = row["key"], row["damaged"]
            if stamp is not None:
                ledger.save_damaged(key, ObjectStamp(**stamp))
            elif row["is_mended"]:
                ledger.save_damaged(key, None)
            if row["kind"] is not None or row["is_unsettled"]:
                yield VerifiedKey(
                    key,
                    None,
                    None,
                    EvidenceLevel(row["level"]),
                    kind=KeyDifferenceKind(row["kind"]) if row["kind"] else None,
                    is_unsettled=row["is_unsettled"],
                    damage=Damage(row["damage"]) if row["damage"] else None,
                )


def _batches_of(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH_ROWS)
    except OSError as error:
        raise disk_error("read", path, error) from error
    except pa.ArrowException as error:
        raise DiskError(f"{path} cannot be read: {error}", path=str(path)) from error


def tally_row(tally: VerificationTally) -> dict[str, object]:
    """A tally as a row of TALLY_SCHEMA."""
    sets = tally.sets
    return {
        "objects": tally.objects,
        "unsettled": tally.unsettled,
        "kinds": list({kind.value: count for kind, count in tally.kinds.items()}.items()),
        "levels": list({level.name: count for level, count in tally.levels.items()}.items()),
        "equal_levels": list({level.name: count for level, count in sets.levels.items()}.items()),
        "oldest_read_at_s": sets.oldest_read_at_s,
        "sums": [
            {
                "name": name,
                "count": one.root.count,
                "total": one.root.total.to_bytes(ID_BYTES, "big"),
                "lanes": one.lanes,
            }
            for name, one in sets.sums().items()
        ],
    }


def add_tallies(tally: VerificationTally, rows: pa.Table) -> None:
    """Add what was found of other keys, in rows of TALLY_SCHEMA."""
    for batch in rows.select(TALLY_SCHEMA.names).to_batches(max_chunksize=_SUMMED_ROWS):
        for row in batch.to_pylist():
            kinds = {KeyDifferenceKind(name): count for name, count in row["kinds"]}
            tally.objects += row["objects"]
            tally.unsettled += row["unsettled"]
            tally.differences += sum(kinds.values())
            tally.kinds.update(kinds)
            tally.levels.update({EvidenceLevel[name]: count for name, count in row["levels"]})
            sums = {
                one["name"]: SetSum(
                    SetRoot(one["count"], int.from_bytes(one["total"], "big")), one["lanes"]
                )
                for one in row["sums"]
            }
            levels = {EvidenceLevel[name]: count for name, count in row["equal_levels"]}
            tally.sets.add_sums(sums, levels, row["oldest_read_at_s"])


def _range_table(ranges: Sequence[ListingRange]) -> pa.Table:
    rows = [
        {"number": number, "after": one.after, "last": one.last}
        for number, one in enumerate(ranges)
    ]
    return pa.Table.from_pylist(rows, _RANGE_SCHEMA)


class _MeteredStore:
    """A store of the driver, whose traffic has that of tasks in it."""

    def __init__(self, store: Store) -> None:
        self._ours, self._of_tasks = store.traffic, TrafficCounter()
        self.store = replace(store, traffic=self._traffic if store.traffic else None)

    def add(self, requests: int, length_bytes: int) -> None:
        self._of_tasks.add(length_bytes, requests=requests)

    def _traffic(self) -> Traffic:
        ours = self._ours() if self._ours else Traffic()
        theirs = self._of_tasks.read()
        return Traffic(ours.requests + theirs.requests, ours.bytes + theirs.bytes)
