"""Buckets of a benchmark, as indexes without objects, and a verifier process over one.

    python -m benchmarks.proof_buckets FOLDER

serves the index in FOLDER. It prints its port, then answers each line of its standard
input with a line of JSON, and ends when that input does. Lines: `change PLAN`, with a
Changes as JSON, `undo`, and `cpu`: the seconds that the process has used.

An index is filled as by a listing (`StoredIndex.rebuild`), in the order of its keys,
and the other side is a copy of its folder. The service, its index and its transport are
the product's. Only the store behind it is empty: no comparison reads it.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random

from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import EvidenceLevel, HashAlgorithm, Item, Profile
from proof.kernel_loading import load_kernels
from proof.stored_index import StoredIndex
from replicator.refresh import IndexedBucket
from replicator.stores.opening import open_store
from replicator.verifier.process import CALL_LIMITS
from replicator.verifier.server import VerifierService
from runtime.access import Access
from runtime.disk import Disk
from runtime.rate_limit import SystemClock
from runtime.roles import RoleTable
from runtime.rpc import start_server
from tests.support.processes import LineProcess

PROFILE = Profile(b"k" * 32, HashAlgorithm.MD5)
# 41 bytes, as in a data lake.
DATED_KEYS = "warehouse/events/2026/11/{:016x}"
SHORT_KEYS = "{:016x}"
_KEY_BITS = 63
_LISTED = 5_000
_BATCH = 1_000
_RECORDED = ItemEvidence(EvidenceLevel.RECORDED)


class Place(StrEnum):
    """Where in the order of keys the changes of a target are."""

    RANDOM = "random"
    """All over the bucket: half changed, a quarter missing, a quarter extra."""
    ONE_PREFIX = "one prefix"
    """The same, in neighbouring keys."""
    LOST_PREFIX = "lost prefix"
    """Neighbouring keys, all of them missing."""


@dataclass(frozen=True, slots=True)
class ListedBucket:
    """So many objects, whose names and hashes follow from their numbers. Buckets of
    another `edition` have the same keys with other contents.
    """

    objects: int
    key_format: str = DATED_KEYS
    edition: int = 0

    def items(self) -> Iterator[StampedItem]:
        """All of it, in the order of keys."""
        return map(self.item, range(self.objects))

    def item(self, number: int) -> StampedItem:
        """One object; MD5, ETag, and a digest of properties."""
        hashed = blake2b(b"%d %d" % (self.edition, number), digest_size=32).digest()
        step = (1 << _KEY_BITS) // self.objects
        placed = blake2b(b"key %d" % number, digest_size=8).digest()
        key = self.key_format.format(number * step + int.from_bytes(placed, "big") % step)
        item = Item(key, int.from_bytes(hashed[:2], "big"), hashed[:16], hashed[16:])
        stamp = Stamp("", hashed[:16].hex(), 1_790_000_000_000 + number)
        return StampedItem(item, _RECORDED, stamp)


@dataclass(frozen=True, slots=True)
class Changes:
    """What a target differs in."""

    bucket: ListedBucket
    place: Place
    count: int

    def made(self) -> list[tuple[str, StampedItem | None]]:
        """For `StoredIndex.apply`."""
        numbers = self._numbers()
        if self.place is Place.LOST_PREFIX:
            return [(self.bucket.item(number).item.key, None) for number in numbers]
        changed, rest = numbers[: self.count // 2], numbers[self.count // 2 :]
        missing, extra = rest[: self.count // 4], rest[self.count // 4 :]
        other = ListedBucket(self.bucket.objects, self.bucket.key_format, edition=9)
        made: list[tuple[str, StampedItem | None]] = [
            (one.item.key, one) for one in map(other.item, changed)
        ]
        made += [(self.bucket.item(number).item.key, None) for number in missing]
        return made + [(one.item.key, one) for one in map(self._extra, extra)]

    def undone(self) -> list[tuple[str, StampedItem | None]]:
        """What takes them back."""
        numbers = self._numbers()
        held = {one.item.key: one for one in map(self.bucket.item, numbers)}
        return [(key, held.get(key)) for key, _ in self.made()]

    def _numbers(self) -> list[int]:
        if self.place is Place.RANDOM:
            return Random(self.count).sample(range(self.bucket.objects), self.count)
        first = min(self.bucket.objects // 3, self.bucket.objects - self.count)
        return list(range(first, first + self.count))

    def _extra(self, number: int) -> StampedItem:
        """An object just behind one that both sides have."""
        found = self.bucket.item(number)
        item = found.item
        key = item.key[:-1] + "g"
        return StampedItem(
            Item(key, item.size_bytes, item.content, item.properties), _RECORDED, found.stamp
        )


def build_index(folder: Path, bucket: ListedBucket) -> None:
    """Fill the index in a new folder."""
    index = StoredIndex(folder, PROFILE, disk=Disk())
    items = bucket.items()
    with index.rebuild(items=bucket.objects) as building:
        while some := list(islice(items, _LISTED)):
            building.add(some)
        building.finish()
    index.close()


def copied_index(folder: Path, to: Path) -> None:
    """The index of a target that holds the same."""
    shutil.copytree(folder, to)


class VerifierChild(LineProcess):
    """A verifier over the index in a folder, in a process of its own; a context
    manager that ends it.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` takes the empty store besides."""
        super().__init__("benchmarks.proof_buckets", str(folder))

    def change(self, changes: Changes) -> None:
        """Let the target differ."""
        self.ask(f"change {json.dumps(asdict(changes))}")

    def undo(self) -> None:
        """Take the latest changes back."""
        self.ask("undo")

    def cpu_s(self) -> float:
        """What the process has used, all threads, in seconds."""
        return float(self.ask("cpu"))


def _serve(folder: Path) -> None:
    # As the verifier's process does at its start.
    load_kernels(lambda: False)
    index = StoredIndex(folder / "index", PROFILE, disk=Disk())
    with open_store(f"local:{folder / 'objects'}", may_write=True, create=True) as store:
        bucket = IndexedBucket(store, index, PROFILE, SystemClock())
        service = VerifierService(bucket, access=Access(RoleTable(), is_enforced=False))
        server = start_server("127.0.0.1:0", [service.register], limits=CALL_LIMITS)
        print(server.port, flush=True)
        undone: list[tuple[str, StampedItem | None]] = []
        for line in sys.stdin:
            command, _, rest = line.strip().partition(" ")
            if command == "change":
                changes = _changes_from(rest)
                undone = changes.undone()
                _apply(index, changes.made())
            elif command == "undo":
                _apply(index, undone)
            print(json.dumps(time.process_time()), flush=True)
        server.stop()
        service.close()
    index.close()


def _changes_from(text: str) -> Changes:
    given = json.loads(text)
    return Changes(ListedBucket(**given["bucket"]), Place(given["place"]), given["count"])


def _apply(index: StoredIndex, changes: list[tuple[str, StampedItem | None]]) -> None:
    for first in range(0, len(changes), _BATCH):
        index.apply(changes[first : first + _BATCH])


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
