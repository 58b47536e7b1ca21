"""A replication with a verifier beside its target: what crosses, in rows of its own.

Both links are counted, in both directions: that to the target's store, and that to its
verifier. The burst goes to an S3 emulator, with and without the verifier. For the gap
both buckets are local, and a copy of each other; the store's own writes would not be
counted there, so a run in which the verifier was passed by fails.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

from benchmarks.measure import Report, Samples
from replicator.replication import (
    Policy,
    PolicyId,
    ReplicationOptions,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.local import LocalBucket
from replicator.stores.opening import open_store
from replicator.stores.port import ObjectProperties, Store, WriteCondition
from replicator.syncer.engine import ReplicationEngine
from replicator.syncer.lease import LocalLease
from replicator.syncer.target_verifier import follower_client
from replicator.syncer.threads import ReplicationThreads
from runtime.disk import Disk
from runtime.rate_limit import SystemClock
from tests.support.processes import TreefoldProcess
from tests.support.s3_servers import S3Endpoint, free_port, ministack
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

OBJECT_BYTES = 4 << 10
BURST_OBJECTS = 2_000
GAP_CHANGES = 100
SMALL_RATIO_MAX = 1.25
GAP_BYTES_MAX = 100_000
_WAIT_S = 1_800.0


def measure_verified(
    only: Sequence[str], *, delay_ms: float, mbit: float, gap_objects: int
) -> Report:
    """The rows of some of the jobs."""
    notes = [f"{delay_ms:g} ms each way, {mbit:g} Mbit/s"]
    report = Report("following a bucket with a verifier", notes)
    with tempfile.TemporaryDirectory(prefix="bench-verified-") as name:
        folder = Path(name)
        if "burst" in only:
            _burst(report, folder / "burst", delay_ms=delay_ms, mbit=mbit)
        if "gap" in only:
            notes.append(_gap(report, folder / "gap", gap_objects, delay_ms=delay_ms, mbit=mbit))
    return report


def _burst(report: Report, folder: Path, *, delay_ms: float, mbit: float) -> None:
    """Many small objects at once."""
    payload = BURST_OBJECTS * OBJECT_BYTES
    crossed, rates = list[int](), list[float]()
    folder.mkdir()
    with ministack(folder / "log") as server:
        endpoint = S3Endpoint(server.url, "test", "test")
        os.environ.update(endpoint.environment)
        for is_verified in (True, False):
            bucket, port = endpoint.fresh_bucket(), free_port()
            part = folder / str(is_verified)
            part.mkdir()
            with ExitStack() as opened:
                links = [
                    opened.enter_context(WanLink(to, delay_ms=delay_ms, mbit=mbit))
                    for to in (endpoint.address, f"127.0.0.1:{port}")
                ]
                near, far = (
                    f"s3://{bucket.name}?endpoint_url={quote(url, safe='')}&region=us-east-1"
                    for url in (endpoint.url, links[0].through(endpoint).url)
                )
                opened.enter_context(_verifier(part, near, port))
                source = opened.enter_context(LocalBucket(part / "source", Disk(), create=True))
                target = opened.enter_context(open_store(far, may_write=True))
                address = links[1].address if is_verified else ""
                _fill(source.store(), range(BURST_OBJECTS))
                began_s = time.monotonic()
                # The probe of the store has crossed by now, and counts.
                with _following(part, source.store(), target, address) as engine:
                    _await(engine, lambda one: one.checkpoint.stage is Stage.LIVE)
                    _await(engine, lambda one: not one.queued)
                    rates.append(BURST_OBJECTS / (time.monotonic() - began_s))
                    crossed.append(sum(link.traffic().total.length_bytes for link in links))
    names = ("with a verifier", "without")
    job = f"{BURST_OBJECTS:,} objects of 4 KiB"
    mine, theirs = (Samples(name, (rate,)) for name, rate in zip(names, rates, strict=True))
    report.add(job, "objects/s", mine, theirs)
    mine, theirs = (
        Samples(name, (length / payload,)) for name, length in zip(names, crossed, strict=True)
    )
    report.add(f"{job}: crossed", "B/B", mine, theirs)
    bar = Samples("the bar", (SMALL_RATIO_MAX,))
    report.add(f"{job}: crossed", "B/B", mine, bar, most=1.0)


def _gap(report: Report, folder: Path, objects: int, *, delay_ms: float, mbit: float) -> str:
    """Changes that the log does not show any more; what else there is to say."""
    folder.mkdir()
    with LocalBucket(folder / "source", Disk(), create=True) as bucket:
        _fill(bucket.store(), range(objects))
    shutil.copytree(folder / "source", folder / "target")
    port = free_port()
    with ExitStack() as opened:
        target = f"local:{folder / 'target'}"
        opened.enter_context(_verifier(folder, target, port))
        link = opened.enter_context(WanLink(f"127.0.0.1:{port}", delay_ms=delay_ms, mbit=mbit))
        theirs = opened.enter_context(open_store(target, may_write=True))
        with (
            LocalBucket(folder / "source", Disk()) as bucket,
            _following(folder, bucket.store(), theirs, link.address) as engine,
        ):
            _await(engine, lambda one: one.proven_ms is not None)
        first = link.traffic().total.length_bytes
        changed = range(0, objects, max(1, objects // GAP_CHANGES))[:GAP_CHANGES]
        with LocalBucket(folder / "source", Disk()) as bucket:
            _fill(bucket.store(), changed)
        # Another log: nobody can tell from it what was changed.
        (folder / "source" / "log").write_text(f"{secrets.token_hex(16)}\n")
        link.reset()
        began_s = time.monotonic()
        with (
            LocalBucket(folder / "source", Disk()) as bucket,
            _following(folder, bucket.store(), theirs, link.address) as engine,
        ):
            _await(engine, lambda one: one.proven_ms is not None)
            sent = engine.report().sent_bytes
        seconds = time.monotonic() - began_s
        crossed = link.traffic().total.length_bytes
    assert sent == len(changed) * OBJECT_BYTES, sent
    job = f"gap: {len(changed)} changes among {objects:,} objects"
    bar = Samples("the bar", (GAP_BYTES_MAX,))
    report.add(f"{job}: beyond the payload", "B", Samples("ours", (crossed - sent,)), bar, most=1.0)
    return f"{job}: {seconds:.0f} s; the first proof of equal buckets took {first:,} B"


@contextmanager
def _following(
    folder: Path, source: Store, target: Store, verifier: str
) -> Iterator[ReplicationEngine]:
    """A replication that runs in this process."""
    policy = Policy(PolicyId("bench"), source.address, target.address, (), ReplicationOptions())
    with ExitStack() as opened:
        client = None
        if verifier:
            client = opened.enter_context(follower_client(verifier, tls=None, insecure=False))
        engine = ReplicationEngine(
            policy,
            source,
            target,
            parent=folder / "replication",
            syncer=SyncerId("bench"),
            lease=LocalLease(),
            checkpoint=None,
            clock=SystemClock(),
            verifier=client,
        )
        opened.enter_context(ReplicationThreads(engine, "bench"))
        yield engine


def _await(engine: ReplicationEngine, is_done: Callable[[ReplicationReport], bool]) -> None:
    """Wait for what a report says; nothing may be wrong meanwhile."""

    def is_reported() -> bool:
        report = engine.report()
        assert report.fault is None, report
        return is_done(report)

    wait_until(is_reported, "the report", timeout_s=_WAIT_S)


@contextmanager
def _verifier(folder: Path, bucket: str, port: int) -> Iterator[None]:
    """A verifier that listens."""
    path = folder / "verifier.toml"
    path.write_text(
        f'bucket = "{bucket}"\nstate_folder = "{folder / "verifier"}"\n'
        f'listen = "127.0.0.1:{port}"\nwrites = true\n'
    )
    with TreefoldProcess(folder / "run", "verifier", "run", "--config", str(path)) as process:
        assert process.address()
        yield


def _fill(store: Store, numbers: Sequence[int]) -> None:
    """New contents of these objects."""

    def put(number: int) -> None:
        body, key = secrets.token_bytes(OBJECT_BYTES), f"objects/{number:07}"
        store.writer.put(key, body, ObjectProperties(), WriteCondition())

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(put, numbers):
            pass
