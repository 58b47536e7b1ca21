"""A bucket's listing in shards: many listings of ranges of its keys at a time, as files
of Parquet that an index is built from (proof.inventory).

The ranges are found by looking into the listing at keys between those that are known:
a page shows how dense keys are there. So ranges have about equal counts where keys are
like those that were seen. Wherever they are cut, each key is in exactly one of them.
"""

import json
import secrets
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replicator.listing import list_resumed
from replicator.listing_range import ListingRange, RangeLister
from replicator.stores.opening import open_store
from replicator.stores.port import ObjectFacts, ObjectLister
from runtime.disk import Disk, disk_error
from runtime.documents import parse_json
from runtime.retry import Backoff

# Keys of one look: what a request of S3 answers.
_PAGE = 1_000
_BATCH_ROWS = 1 << 16
_PLAN = "shards.json"
_TOKEN_BYTES = 8
# Keys are numbers of so many digits here, of printable ASCII: what lies between two of
# them is a key that any store takes in a request.
_DIGITS, _FIRST, _LAST = 64, " ", "~"
# Looks that it may take to find where keys that begin alike begin to differ.
_LOOKS_MIN = 400
_BASE = ord(_LAST) - ord(_FIRST) + 1
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("last_modified_date", pa.timestamp("ms", "UTC"), nullable=False),
        pa.field("e_tag", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class ListingShard:
    """A task: list the keys after one and up to another, to a file. None is no end. It
    can be pickled.
    """

    address: str
    path: Path
    after: str
    last: str | None

    def __call__(self) -> None:
        """List them, unless an earlier run has.

        Raises:
            StoreError: the listing is not complete.
            DiskError: the file cannot be written.
        """
        if self.path.is_file():
            return
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")
        disk = Disk()
        try:
            with open_store(self.address, may_write=False) as store:
                self._write(temporary, store.lister)
            disk.sync(temporary)
            disk.rename(temporary, self.path)
        except BaseException:
            disk.remove(temporary)
            raise
        disk.sync_folder(self.path.parent)

    def _write(self, path: Path, lister: ObjectLister) -> None:
        listing = self._objects(lister)
        try:
            with pq.ParquetWriter(path, _SCHEMA) as writer:
                while some := list(islice(listing, _BATCH_ROWS)):
                    columns = [
                        [one.key for one in some],
                        [one.size_bytes for one in some],
                        [one.modified_ms for one in some],
                        [one.etag for one in some],
                    ]
                    arrays = [
                        pa.array(column, field.type)
                        for column, field in zip(columns, _SCHEMA, strict=True)
                    ]
                    writer.write_table(pa.table(arrays, schema=_SCHEMA))
        except OSError as error:
            raise disk_error("write", path, error) from error

    def _objects(self, lister: ObjectLister) -> Iterator[ObjectFacts]:
        keys = RangeLister(lister, ListingRange(self.after, self.last))
        # A task of an executor: nobody can hand a clock to it or end its wait.
        return list_resumed(keys, "", sleep=time.sleep, backoff=Backoff())


def plan_shards(
    address: str, lister: ObjectLister, folder: Path, count: int, disk: Disk
) -> list[ListingShard]:
    """About `count` shards of a store's listing, with files in this folder; those of an
    earlier run, if it has begun there.

    Raises:
        StoreError: the store did not answer.
        DiskError: the folder cannot be written.
    """
    disk.make_folder(folder)
    disk.remove_temporaries(folder)
    bounds = _stored_bounds(folder, address, disk)
    if bounds is None:
        disk.remove_folder(folder)
        disk.make_folder(folder)
        bounds = shard_bounds(lister, count)
        document = {"address": address, "bounds": bounds}
        disk.replace(folder / _PLAN, json.dumps(document).encode())
    edges: list[str | None] = ["", *bounds, None]
    return [
        ListingShard(address, folder / f"shard-{number:06}.parquet", after or "", last)
        for number, (after, last) in enumerate(pairwise(edges))
    ]


def _stored_bounds(folder: Path, address: str, disk: Disk) -> list[str] | None:
    if disk.length(folder / _PLAN) is None:
        return None
    try:
        held = parse_json(disk.read(folder / _PLAN))
        bounds = [str(bound) for bound in held["bounds"]]
        return bounds if held["address"] == address else None
    except (ValueError, KeyError, TypeError):
        # Nobody else writes there; whatever it is, the listing begins anew.
        return None


@dataclass(frozen=True, slots=True, order=True)
class _Gap:
    """What lies behind a page of the listing, up to what is known next: about so many
    keys.
    """

    weight: float
    start: int
    end: int


def shard_bounds(lister: ObjectLister, count: int, prefix: str = "") -> list[str]:
    """At most `count - 1` keys, ascending, that cut a listing below a prefix into
    shards: each but the last ends with one of them. It takes about two requests for
    each.

    Raises:
        StoreError: the store did not answer.
    """
    looks, bounds = _LOOKS_MIN + 2 * count, set[str]()
    gaps = list[_Gap]()
    first = _look(lister, prefix, "")
    if len(first) < _PAGE:
        return []
    insort(gaps, _gap_behind(first, _number_of(prefix + _LAST * _DIGITS) + 1))
    while gaps and looks > 0 and len(bounds) < count - 1:
        looks -= 1
        gap = gaps.pop()
        middle = (gap.start + gap.end) // 2
        page = _look(lister, prefix, _text_of(middle))
        found = _number_of(page[0].key) if page else gap.end
        if middle <= gap.start or found >= gap.end:
            # Nothing lies behind the middle; what is before it may be dense.
            if middle > gap.start:
                insort(gaps, _Gap(gap.weight / 2, gap.start, middle))
            continue
        bounds.add(page[0].key)
        insort(gaps, _Gap(gap.weight / 2, gap.start, middle))
        behind = _gap_behind(page, gap.end)
        if len(page) == _PAGE and behind.start < behind.end:
            insort(gaps, behind)
    return sorted(bounds, key=str.encode)


def _look(lister: ObjectLister, prefix: str, after: str) -> list[ObjectFacts]:
    return list(islice(lister.list_objects(prefix, start_after=after), _PAGE))


def _gap_behind(page: Sequence[ObjectFacts], end: int) -> _Gap:
    """Behind a page, keys are as dense as in it, as far as it tells."""
    first, last = _number_of(page[0].key), _number_of(page[-1].key)
    return _Gap(len(page) * (end - last) / max(last - first, 1), last, end)


def _number_of(key: str) -> int:
    """A key's first digits as a number; the order is that of keys, but for what it does
    not tell apart.
    """
    number = 0
    for place in range(_DIGITS):
        letter = min(max(key[place], _FIRST), _LAST) if place < len(key) else _FIRST
        number = number * _BASE + ord(letter) - ord(_FIRST)
    return number


def _text_of(number: int) -> str:
    digits = []
    for _ in range(_DIGITS):
        number, digit = divmod(number, _BASE)
        digits.append(chr(digit + ord(_FIRST)))
    return "".join(reversed(digits))
