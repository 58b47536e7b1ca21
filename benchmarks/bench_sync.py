"""Copying buckets beside rclone: bytes that cross to the target's region, and rates.

    python -m benchmarks.bench_sync [--target emulator|rgw|ozone] [--json]

`emulator` starts two ministacks. `rgw` starts two Ceph stores, which `make setup-peers`
installs; CEPH_RGW_DISK_GB is the room of each, and 64 large objects take 30. `ozone`
copies from a ministack to the S3 gateway at --endpoint, and without it starts a cluster
(wants Maven and Java).

Bytes are those of plain HTTP in both directions, headers included, counted by a proxy
before the target. What a run costs is told apart: its listings (the comparison), the
probe of the target when it is opened (what a sync without anything to do costs beside
its listing), and the copy, which is the rest.

Rates are those of runs without the proxy, which takes CPU. The rounds alternate between
the two tools. The start of each is told apart: it is a sync of two empty buckets, with
the start of the process, the probe and the listings. CPU is that of the client, user
and system, and depends little on other load; the stores' CPU is not in it.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.measure import Report, Samples
from benchmarks.sync_runs import (
    PART_BYTES,
    BucketPair,
    CommandRun,
    PairFactory,
    fill,
    key_of,
    listings,
    opened_stores,
    others,
    parts_of,
    put_changed,
)
from tests.support.rclone import RcloneRun, rclone_check, rclone_sync, rclone_version
from tests.support.waiting import wait_until

JOBS = ("small", "changes", "large", "cuts")
ROUNDS = 3
OBJECTS = 2_000
OBJECT_BYTES = 4 << 10
LARGE_BYTES = 64 << 20
# 1 and 4 GiB: of the smaller job the start is a larger part.
LARGE_OBJECTS = (16, 64)
DELETES = 100
CUT_MIB = 256
# One way, and in each direction.
DELAY_MS = 25
DELAYED_MBIT = 400
# As many as ours; rclone's own default is 4. It copies no tags.
RCLONE = ("--transfers", "8", "--checkers", "8", "--metadata")
# Rclone sends 64 MiB in one PUT unless told otherwise, and parts cost a store more.
RCLONE_IN_PARTS = (*RCLONE, "--s3-upload-cutoff", "8Mi", "--s3-chunk-size", "8Mi")

SMALL_RATIO_MAX = 1.25
PATCH_BYTES_MAX = 32_000
TAG_BYTES_MAX = 1_500
DELETE_BYTES_MAX = 100
OBJECT_RATE_MIN = 1.0
BYTE_RATE_MIN = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("emulator", "rgw", "ozone"), default="emulator")
    parser.add_argument("--endpoint", help="A running gateway of Ozone.")
    parser.add_argument("--objects", type=int, default=OBJECTS, help="Small objects.")
    parser.add_argument(
        "--large-objects",
        type=int,
        nargs="+",
        default=LARGE_OBJECTS,
        help="Objects of 64 MiB, for each job. The stores take as much several times.",
    )
    parser.add_argument(
        "--cut-mib", type=int, default=CUT_MIB, help="Size of the copy that is cut; 1024 is 1 GiB."
    )
    parser.add_argument("--only", choices=JOBS, nargs="+", default=JOBS, help="Default: all.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    notes = [f"beside {rclone_version()} {' '.join(RCLONE)}; bytes without TLS"]
    report = Report(f"copying buckets to {arguments.target}", notes)
    with opened_stores(arguments.target, arguments.endpoint) as stores:
        if "small" in arguments.only:
            small_objects(report, notes, stores, arguments.objects, arguments.rounds)
        if "changes" in arguments.only:
            one_large_object(report, stores)
        if "large" in arguments.only:
            large_objects(report, stores, arguments.large_objects, arguments.rounds)
        if "cuts" in arguments.only:
            cut_copies(report, stores, arguments.cut_mib << 20, arguments.rounds)
    report.show(as_json=arguments.json)


def small_objects(
    report: Report, notes: list[str], stores: PairFactory, count: int, rounds: int
) -> None:
    """The first sync of small objects, one without anything to do, checks, deletes."""
    pair = stores.pair()
    fill(pair.source, count, OBJECT_BYTES)
    job = f"{count:,} objects of {OBJECT_BYTES >> 10} KiB"
    _rates(report, pair, job, count, "objects/s", OBJECT_RATE_MIN, rounds)
    kept = pair.fresh_target(), pair.fresh_target()
    ours, theirs = kept[0].sync(), _rclone(kept[1])
    idle = kept[0].sync()
    assert idle.report["copied"] == 0
    opening = others(idle.traffic)
    payload = count * OBJECT_BYTES
    copied = [(others(ours.traffic) - opening) / payload]
    _bar(report, f"{job}, copy", "B/B", copied, SMALL_RATIO_MAX)
    copied_by_peer = [others(theirs.traffic) / payload]
    _beside(report, f"{job}, copy", "B/B", copied, copied_by_peer)
    _beside(
        report, f"{job}, listings of the first sync", "B/object",
        [listings(ours.traffic) / count],
        [listings(theirs.traffic) / count],
    )  # fmt: skip
    notes.append(f"opening and probing the target cost {opening:,} bytes a run, not counted here")
    again = _rclone(kept[1])
    _beside(
        report, f"{job}, nothing to do", "B/object",
        [(listings(idle.traffic)) / count], [again.traffic.total.length_bytes / count],
    )  # fmt: skip
    verified, checked = kept[0].verify(), rclone_check(kept[1].source, kept[1].target, pair.link)
    assert verified.report["equal"] == pair.shows_equality
    assert checked.exit_status == 0, checked.log
    _beside(
        report, f"{job}, verify and check", "B/object",
        [verified.traffic.total.length_bytes / count],
        [checked.traffic.total.length_bytes / count],
    )  # fmt: skip
    if pair.shows_equality:
        # Elsewhere a sync deletes nothing.
        _deletes(report, kept, opening)


def _deletes(report: Report, kept: tuple[BucketPair, BucketPair], opening: int) -> None:
    ours, theirs = kept
    with ours.source.endpoint.client() as client:
        keys = [{"Key": key_of(number)} for number in range(DELETES)]
        client.delete_objects(Bucket=ours.source.name, Delete={"Objects": keys})
    run = ours.sync("--delete")
    assert run.report["deleted"] == DELETES
    crossed = [(others(run.traffic) - opening) / DELETES]
    _bar(report, f"{DELETES} deletes", "B/delete", crossed, DELETE_BYTES_MAX)
    peer = others(_rclone(theirs).traffic) / DELETES
    _beside(report, f"{DELETES} deletes", "B/delete", crossed, [peer])


def one_large_object(report: Report, stores: PairFactory) -> None:
    """Small changes of one large object."""
    pair = stores.pair()
    theirs = pair.fresh_target()
    name = f"{LARGE_BYTES >> 20} MiB"
    fill(pair.source, 1, LARGE_BYTES)
    pair.sync()
    _rclone(theirs)
    opening = others(pair.sync().traffic)
    bucket, key = pair.source.name, key_of(0)

    def measure(what: str, most: float, *, metadata_only: int) -> None:
        run = pair.sync()
        assert run.report["metadataOnly"] == metadata_only, run.report
        crossed = [others(run.traffic) - opening]
        if most:
            _bar(report, f"{name}, {what}", "B", crossed, most)
        peer = others(_rclone(theirs).traffic)
        _beside(report, f"{name}, {what}", "B", crossed, [peer])

    with pair.source.endpoint.client() as client:
        put_changed(client, pair.source, LARGE_BYTES)
        measure("one byte changed", PATCH_BYTES_MAX, metadata_only=0)
        tags = {"TagSet": [{"Key": "team", "Value": "archive"}]}
        client.put_object_tagging(Bucket=bucket, Key=key, Tagging=tags)
        measure("one tag changed", TAG_BYTES_MAX, metadata_only=1)
        if not pair.shows_equality:
            # Ozone refuses what rclone does then, a copy of the object onto itself.
            return
        client.copy_object(
            Bucket=bucket,
            Key=key,
            CopySource={"Bucket": bucket, "Key": key},
            MetadataDirective="REPLACE",
            Metadata={"origin": "elsewhere"},
        )
        measure("metadata changed", 0, metadata_only=1)


def large_objects(report: Report, stores: PairFactory, counts: Sequence[int], rounds: int) -> None:
    """The first sync of so many large objects. Of those that came in one PUT, a store
    declares the MD5 of the whole: ours is compared with it, and rclone sends it along.
    Parts are kept, because only equal parts have equal ETags; rclone is told to make
    as many, and is shown without them, too.
    """
    ways = (
        ("in parts", True, RCLONE_IN_PARTS, BYTE_RATE_MIN),
        ("in parts, by rclone of one PUT", True, RCLONE, None),
        ("of one PUT", False, RCLONE, BYTE_RATE_MIN),
    )
    for (way, in_parts, flags, least), count in product(ways, counts):
        pair = stores.pair()
        fill(pair.source, count, LARGE_BYTES, in_parts=in_parts)
        job = f"{count} x {LARGE_BYTES >> 20} MiB {way}"
        amount = count * LARGE_BYTES / 1e6
        _rates(report, pair, job, amount, "MB/s", least, rounds, flags)


def cut_copies(report: Report, stores: PairFactory, size_bytes: int, rounds: int) -> None:
    """What is sent twice of an object whose copy is cut at a random point, and how fast
    one object crosses a link with delay. Of one that the source has in parts, parts
    cross as they are read; another one is too large for one PUT.
    """
    share = random.SystemRandom()
    for in_parts in (True, False):
        small, pair = stores.pair(), stores.pair()
        fill(small.source, 1, 2 * PART_BYTES, in_parts=True)
        fill(pair.source, 1, size_bytes, in_parts=in_parts)
        parts = parts_of(small.sync().traffic)
        head_bytes = (parts.bytes_to - 2 * PART_BYTES) // parts.requests
        for what in ("process killed", "link cut"):
            found = [
                _resent(pair.fresh_target(), size_bytes, head_bytes, share.uniform(0.1, 0.9), what)
                for _ in range(rounds)
            ]
            way = "in parts" if in_parts else "of one PUT"
            job = f"{size_bytes >> 20} MiB {way}, {what}: sent again"
            _bar(report, job, "MB", [one / 1e6 for one in found], PART_BYTES / 1e6)
    pair.link.shape(delay_ms=DELAY_MS, mbit=DELAYED_MBIT)
    runs = [pair.fresh_target().sync() for _ in range(rounds)]
    pair.link.shape(delay_ms=0, mbit=0)
    rate = Samples("ours", tuple(size_bytes / 1e6 / run.seconds for run in runs))
    job = f"{size_bytes >> 20} MiB, {2 * DELAY_MS} ms there and back, {DELAYED_MBIT} Mbit/s"
    report.add(job, "MB/s", rate, Samples("the link", (DELAYED_MBIT / 8,)))


def _resent(pair: BucketPair, size_bytes: int, head_bytes: int, share: float, what: str) -> int:
    """Bytes of parts beyond the object, after a cut when this share has crossed."""
    pair.link.reset()
    process = pair.start_sync()

    def crossed() -> int:
        parts = parts_of(pair.link.traffic())
        return parts.bytes_to - head_bytes * parts.requests

    def has_crossed() -> bool:
        assert process.poll() is None, process.communicate()
        return crossed() >= share * size_bytes

    wait_until(has_crossed, f"{share:.2f} of the object to cross", timeout_s=600)
    if what == "link cut":
        pair.link.cut()
        pair.link.mend()
        pair.finished(process)
        return max(crossed() - size_bytes, 0)
    process.kill()
    process.communicate()
    before = crossed()
    # The link is reset.
    pair.sync()
    return max(before + crossed() - size_bytes, 0)


def _rates(
    report: Report,
    pair: BucketPair,
    job: str,
    amount: float,
    unit: str,
    least: float | None,
    rounds: int,
    flags: Sequence[str] = RCLONE,
) -> None:
    """Rates and CPU of first syncs to fresh buckets, and of starts."""
    pair = pair.direct()
    # With the first upload in parts of all, Ceph makes a pool, which takes seconds.
    pair.fresh_source().fresh_target().sync()
    starts, runs = list[_Timed](), list[_Timed]()
    for number in range(rounds):
        starts.append(_timed(pair.fresh_source(), flags, is_first=number % 2 == 0))
        runs.append(_timed(pair, flags, is_first=number % 2 == 0))

    def add(
        what: str, unit: str, figures: Iterable[tuple[float, float]], least: float | None
    ) -> None:
        found = list(figures)
        report.add(
            f"{job}, {what}", unit,
            Samples("ours", tuple(one for one, _ in found)),
            Samples("rclone", tuple(one for _, one in found)), least,
        )  # fmt: skip

    add("start", "s", ((one.ours.seconds, one.theirs.seconds) for one in starts), None)
    add("start", "s of CPU", ((one.ours.cpu_s, one.theirs.cpu_s) for one in starts), None)
    add(
        "first sync", unit,
        ((amount / one.ours.seconds, amount / one.theirs.seconds) for one in runs), least,
    )  # fmt: skip
    add(
        "first sync without start", unit,
        (
            (
                amount / max(run.ours.seconds - start.ours.seconds, 1e-3),
                amount / max(run.theirs.seconds - start.theirs.seconds, 1e-3),
            )
            for start, run in zip(starts, runs, strict=True)
        ), None,
    )  # fmt: skip
    add("first sync", "s of CPU", ((one.ours.cpu_s, one.theirs.cpu_s) for one in runs), None)


@dataclass(frozen=True, slots=True)
class _Timed:
    """The same sync by either tool."""

    ours: CommandRun
    theirs: RcloneRun


def _timed(pair: BucketPair, flags: Sequence[str], *, is_first: bool) -> _Timed:
    """A sync to a fresh bucket each; ours comes first or second."""
    ours, theirs = pair.fresh_target(), pair.fresh_target()
    run, peer = None, None
    for is_ours in (is_first, not is_first):
        if is_ours:
            run = ours.sync()
            ours.empty_target()
        else:
            peer = _rclone(theirs, flags)
            theirs.empty_target()
    assert run is not None
    assert peer is not None
    return _Timed(run, peer)


def _rclone(pair: BucketPair, flags: Sequence[str] = RCLONE) -> RcloneRun:
    link = None if pair.is_direct else pair.link
    run = rclone_sync(pair.source, pair.target, link, *flags)
    assert run.exit_status == 0, run.log
    return run


def _bar(report: Report, job: str, unit: str, figures: Sequence[float], most: float) -> None:
    """A figure beside the most that it may be."""
    ours = Samples("ours", tuple(max(figure, 1e-6) for figure in figures))
    report.add(job, unit, ours, Samples("the bar", (most,)), most=1.0)


def _beside(
    report: Report, job: str, unit: str, figures: Sequence[float], peer: Sequence[float]
) -> None:
    """A figure beside that of rclone."""
    ours = Samples("ours", tuple(max(figure, 1e-6) for figure in figures))
    report.add(job, unit, ours, Samples("rclone", tuple(max(one, 1e-6) for one in peer)))


if __name__ == "__main__":
    main()
