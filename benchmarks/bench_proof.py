"""What proving two buckets equal costs: bytes on the wire, trips, CPU of each side.

    python -m benchmarks.bench_proof [--objects N ...] [--differences D ...]
        [--no-shapes] [--json]

The target is the verifier's service over an index on disk, in a process of its own. The
source is a client in this process with an index on disk. Between them is the counting
relay of the tests: bytes are all that crosses it in both directions, with the frames
and headers of HTTP/2, over a connection that has answered one call before, without TLS.
Names of keys that only the target has are taken off, as the bar has it. A trip is a
round of questions that are asked at once.

CPU is that of each process from the first question to the list of differences, in the
order of keys, with kind, key and version of each; all threads, with compiled kernels
that were loaded before. Both indexes are read from the page cache. `its items read`
adds what a sync reads besides: size, hashes and evidence of each item of the source.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Report, Samples
from benchmarks.proof_buckets import (
    PROFILE,
    SHORT_KEYS,
    Changes,
    ListedBucket,
    Place,
    VerifierChild,
    build_index,
    copied_index,
)
from proof.column_naming import difference_names
from proof.comparison import BucketComparison
from proof.stored_index import StoredIndex
from proof.symbols import KEPT_SYMBOLS, KERNEL_IDS_MIN, kernels_for
from replicator.proving import prove
from replicator.verifier.client import VerifierClient
from runtime.disk import Disk
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

OBJECTS = (1_000, 100_000, 1_000_000)
DIFFERENCES = (0, 1, 10, 100, 1_000, 10_000)
ROUNDS = 7
EQUAL_BYTES_MAX = 1_000
DIFFERENT_BYTES_MAX, DIFFERENCE_BYTES_MAX = 1_000, 80
# One where the sides are equal, two to ten differences.
TRIPS_MAX, FEW, FEW_TRIPS_MAX = 5, 10, 2
# The bar of CPU holds up to so many differences.
CPU_MS_MAX, CPU_DIFFERENCES_MAX = 20.0, 10_000
# A prefix that the target lost has a bar of its own where it is more than the kept
# symbols decode.
LOST_PREFIX_BYTES_MAX = 32_000
# Looks in a row at which no byte more was counted.
_QUIET_LOOKS = 5
# Of the shapes, which take the second of OBJECTS.
SHAPE_DIFFERENCES = 1_000


@dataclass(frozen=True)
class Cost:
    """Of one comparison."""

    wire_bytes: int
    name_bytes: int
    source_cpu_s: float
    target_cpu_s: float
    # To read the items of the differences afterwards.
    items_cpu_s: float
    found: BucketComparison


class Sides:
    """A source, and a target behind a counted link."""

    def __init__(
        self, source: StoredIndex, target: VerifierChild, link: WanLink, client: VerifierClient
    ) -> None:
        self._source, self._target, self._link, self._client = source, target, link, client

    def costs(self, rounds: int = ROUNDS) -> list[Cost]:
        """The costs of so many comparisons."""
        # So that the connection and both page caches are warm.
        prove(self._client, self._source, PROFILE)
        return [self._cost() for _ in range(rounds)]

    @contextmanager
    def differing(self, changes: Changes) -> Iterator[None]:
        """The target differs until the context ends."""
        if changes.count:
            self._target.change(changes)
        yield
        if changes.count:
            self._target.undo()

    def _cost(self) -> Cost:
        self._settle()
        self._link.reset()
        target_s, begun_s = self._target.cpu_s(), time.process_time()
        found = prove(self._client, self._source, PROFILE)
        named = sum(1 for _ in difference_names(found.differences))
        source_s = time.process_time() - begun_s
        target_s = self._target.cpu_s() - target_s
        crossed = self._settle()
        begun_s = time.process_time()
        extras = [one.key for one in found.differences if one.theirs is not None]
        items_s = time.process_time() - begun_s
        assert named == len(found.differences)
        names = sum(len(key.encode()) for key in extras)
        return Cost(crossed, names, source_s, target_s, items_s, found)

    def _settle(self) -> int:
        """The bytes counted, once no more come: windows and pings follow an answer."""
        counts = [-1, self._counted()]

        def is_quiet() -> bool:
            counts.append(self._counted())
            return counts[-_QUIET_LOOKS:] == _QUIET_LOOKS * counts[-1:]

        wait_until(is_quiet, "the link to be quiet")
        return counts[-1]

    def _counted(self) -> int:
        return self._link.traffic().total.length_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="+", default=OBJECTS)
    parser.add_argument("--differences", type=int, nargs="+", default=DIFFERENCES)
    parser.add_argument("--no-shapes", action="store_true", help="Random differences only.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    has_kernels = kernels_for(KERNEL_IDS_MIN) is not None
    notes = [
        f"{'with' if has_kernels else 'WITHOUT'} compiled kernels; bytes of HTTP/2 in both"
        " directions without TLS; names of extra keys taken off"
    ]
    report = Report("proof of two buckets", notes)
    for objects in arguments.objects:
        with tempfile.TemporaryDirectory(prefix="treefold-bench-") as folder:
            _measure(report, Path(folder), ListedBucket(objects), arguments.differences)
    if not arguments.no_shapes:
        _measure_shapes(report, sorted(arguments.objects)[-2:][0])
    report.show(as_json=arguments.json)


def _measure(
    report: Report, folder: Path, bucket: ListedBucket, differences: Sequence[int]
) -> None:
    """Random differences, by their number."""
    build_index(folder / "source", bucket)
    copied_index(folder / "source", folder / "target" / "index")
    with _opened(folder) as sides:
        for count in (one for one in differences if 4 * one <= bucket.objects):
            with sides.differing(Changes(bucket, Place.RANDOM, count)):
                costs = sides.costs()
            job = f"{bucket.objects:,} objects, {count:,} differ"
            _add_rows(report, job, count, costs)


def _measure_shapes(report: Report, objects: int) -> None:
    """Other keys and places, and sides that have nothing in common."""
    dated = ListedBucket(objects)
    with tempfile.TemporaryDirectory(prefix="treefold-bench-") as name:
        folder = Path(name)
        build_index(folder / "source", dated)
        copied_index(folder / "source", folder / "target" / "index")
        with _opened(folder) as sides:
            for changes in (
                Changes(dated, Place.ONE_PREFIX, SHAPE_DIFFERENCES),
                Changes(dated, Place.LOST_PREFIX, objects // 10),
                Changes(dated, Place.LOST_PREFIX, objects - 1),
            ):
                with sides.differing(changes):
                    costs = sides.costs(1)
                job = f"{objects:,} objects, {changes.count:,} differ, {changes.place}"
                _add_rows(report, job, changes.count, costs, place=changes.place)
        _measure_apart(report, folder, dated)
    with tempfile.TemporaryDirectory(prefix="treefold-bench-") as name:
        short = ListedBucket(objects, SHORT_KEYS)
        build_index(Path(name) / "source", short)
        copied_index(Path(name) / "source", Path(name) / "target" / "index")
        with _opened(Path(name)) as sides:
            with sides.differing(Changes(short, Place.RANDOM, SHAPE_DIFFERENCES)):
                costs = sides.costs(1)
            job = f"{objects:,} objects of 16-byte keys, {SHAPE_DIFFERENCES:,} differ"
            _add_rows(report, job, SHAPE_DIFFERENCES, costs)


def _measure_apart(report: Report, folder: Path, bucket: ListedBucket) -> None:
    """A target whose objects all have another content, and an empty one."""
    other = ListedBucket(bucket.objects, bucket.key_format, edition=1)
    for name, held in (("every object changed", other), ("an empty target", None)):
        target = folder / name
        target.mkdir()
        if held is not None:
            build_index(target / "index", held)
        with _opened(folder, target) as sides:
            costs = sides.costs(1)
        _add_rows(report, f"{bucket.objects:,} objects, {name}", bucket.objects, costs)


@contextmanager
def _opened(folder: Path, target: Path | None = None) -> Iterator[Sides]:
    """The sides whose indexes are in `source` and `target` of a folder."""
    with (
        closing(StoredIndex(folder / "source", PROFILE, disk=Disk())) as source,
        VerifierChild(target or folder / "target") as child,
        WanLink(child.address) as link,
        closing(VerifierClient(link.address)) as client,
    ):
        client.describe()
        yield Sides(source, child, link, client)


def _add_rows(
    report: Report, job: str, count: int, costs: Sequence[Cost], *, place: Place = Place.RANDOM
) -> None:
    assert all(len(cost.found.differences) == count for cost in costs), "not what differs was found"
    assert all(cost.found.is_equal == (not count) for cost in costs)
    crossed = [float(cost.wire_bytes - cost.name_bytes) for cost in costs]
    bytes_max = DIFFERENT_BYTES_MAX + DIFFERENCE_BYTES_MAX * count if count else EQUAL_BYTES_MAX
    if place is Place.LOST_PREFIX and count > KEPT_SYMBOLS:
        bytes_max = LOST_PREFIX_BYTES_MAX
    trips_max = 1 if not count else FEW_TRIPS_MAX if count <= FEW else TRIPS_MAX
    _add(report, f"{job}: bytes", "B", crossed, bytes_max)
    _add(report, f"{job}: trips", "trips", [float(cost.found.trips) for cost in costs], trips_max)
    has_bar = count <= CPU_DIFFERENCES_MAX
    for side, seconds, is_due in (
        ("source", [cost.source_cpu_s for cost in costs], has_bar),
        ("source, its items read", [c.source_cpu_s + c.items_cpu_s for c in costs], False),
        ("target", [cost.target_cpu_s for cost in costs], has_bar),
    ):
        figures = [1e3 * one for one in seconds]
        _add(report, f"{job}: CPU, {side}", "ms", figures, CPU_MS_MAX, has_bar=is_due)


def _add(
    report: Report,
    job: str,
    unit: str,
    figures: Sequence[float],
    most: float,
    *,
    has_bar: bool = True,
) -> None:
    ours = Samples("ours", tuple(figures))
    report.add(job, unit, ours, Samples("the bar", (most,)), most=1.0 if has_bar else None)


if __name__ == "__main__":
    main()
