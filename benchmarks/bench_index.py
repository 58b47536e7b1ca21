"""Size and speed of a bucket's index on disk: `python -m benchmarks.bench_index
[--json]`.

An index of 100,000 and of 1,000,000 objects is built from a listing, then changed in
random places, 1,000 changes a commit with full sync. Keys have 41 bytes; content is an
MD5 that is the ETag too, and properties have a digest. Rates include IDs, sums and
symbols. Of a change both the time and the CPU of the process are told: the time also
has the disk's and that of whoever else uses the machine. Set hashes of receipts are
measured beside it.
"""

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measure import Report, Samples
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import EvidenceLevel, HashAlgorithm, Item, Profile
from proof.lthash import LtHash
from proof.stored_index import StoredIndex
from runtime.disk import Disk

OBJECTS = (100_000, 1_000_000)
BATCH = 1_000
LISTED = 5_000
ROUNDS, BATCHES = 5, 4
PROFILE = Profile(b"k" * 32, HashAlgorithm.MD5)
# Bytes an object with a million of them, and microseconds a change.
SIZE_BAR, CHANGE_BAR = 170.0, 150.0
BUILD_BAR = 13.0


def main(as_json: bool) -> None:
    report = Report("index of a bucket", [f"{BATCH} changes a commit, SQLite, full sync"])
    for objects in OBJECTS:
        with tempfile.TemporaryDirectory(prefix="treefold-bench-") as folder:
            _measure(report, Path(folder), objects)
    _measure_hash(report)
    report.show(as_json=as_json)


def _measure(report: Report, folder: Path, objects: int) -> None:
    chance = random.Random(objects)
    keys = sorted(_key(chance.getrandbits(63)) for _ in range(objects))
    index = StoredIndex(folder, PROFILE, disk=Disk())
    built_s = 0.0
    with index.rebuild(items=objects) as building:
        for items in _batches(keys, chance):
            start = time.perf_counter()
            building.add(items)
            built_s += time.perf_counter() - start
        start = time.perf_counter()
        building.finish()
        built_s += time.perf_counter() - start
    size_bytes = sum(path.stat().st_size for path in folder.iterdir()) / objects
    rates, cpu = list[float](), list[float]()
    for _ in range(ROUNDS):
        some = [[(k, _item(k, chance)) for k in chance.sample(keys, BATCH)] for _ in range(BATCHES)]
        start, used = time.perf_counter(), time.process_time()
        for changes in some:
            index.apply(changes)
        rates.append((time.perf_counter() - start) / BATCH / BATCHES * 1e6)
        cpu.append((time.process_time() - used) / BATCH / BATCHES * 1e6)
    assert not index.self_check().damage
    index.close()
    most = SIZE_BAR if objects == max(OBJECTS) else None
    add = partial(_add, report, objects)
    add("size", "bytes an object", (size_bytes,), SIZE_BAR, most is not None)
    add("built from a listing", "us an object", (built_s / objects * 1e6,), BUILD_BAR, False)
    add("a change", "us", tuple(rates), CHANGE_BAR, True)
    add("a change, CPU", "us", tuple(cpu), CHANGE_BAR, True)


def _add(
    report: Report,
    objects: int,
    job: str,
    unit: str,
    rates: tuple[float, ...],
    bar: float,
    is_due: bool,
) -> None:
    peer = Samples(f"bar of {bar:g}", (bar,))
    most = 1.0 if is_due else None
    report.add(f"{job}, {objects:,}", unit, Samples("ours", rates), peer, most=most)


def _measure_hash(report: Report) -> None:
    chance = random.Random(1)
    items = [_item(_key(number), chance).item for number in range(LISTED)]
    rates = list[float]()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        LtHash().add(items)
        rates.append((time.perf_counter() - start) / LISTED * 1e6)
    measured = Samples("expansion by BLAKE3, measured before", (1.3,))
    report.add("set hash", "us an item", Samples("ours", tuple(rates)), measured)


def _batches(keys: list[str], chance: random.Random) -> Iterator[list[StampedItem]]:
    for start in range(0, len(keys), LISTED):
        yield [_item(key, chance) for key in keys[start : start + LISTED]]


def _key(number: int) -> str:
    return f"warehouse/events/2026/11/{number:016x}"


def _item(key: str, chance: random.Random) -> StampedItem:
    content, properties = chance.randbytes(16), chance.randbytes(16)
    item = Item(key, chance.randrange(1 << 24), content, properties)
    stamp = Stamp("", content.hex(), 1_790_000_000_000 + chance.randrange(1 << 32))
    return StampedItem(item, ItemEvidence(EvidenceLevel.RECORDED), stamp)


if __name__ == "__main__":
    main("--json" in sys.argv[1:])
