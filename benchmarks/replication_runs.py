"""Two replicators between the same two Ceph stores: Ceph's own, and `bucket sync
--watch`. Each has buckets and links of its own, so that its bytes are told apart.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from botocore.client import BaseClient
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from replicator.stores.port import ChangeFeed, ChangeKind
from replicator.stores.s3_documents import parse_listing
from runtime.s3 import S3Client
from tests.support.rgw import RgwMultisite
from tests.support.s3_servers import S3Bucket, S3Endpoint
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

# What is written, and how long nothing is, whatever the stores are.
OBJECT_BYTES = 4 << 10
TRICKLE_OBJECTS, TRICKLE_PER_S = 300, 20.0
BURST_OBJECTS = 2_000
LARGE_BYTES = 64 << 20
IDLE_S = 60.0
CUT_S, CUT_OBJECTS = 30.0, 500
# Bars on all stores: bytes of an idle minute, bytes crossed by byte of small objects,
# bytes of each change of a large object, seconds after a kill and after a cut.
IDLE_BYTES_MAX = 60_000
SMALL_RATIO_MAX = 1.25
CHANGE_BYTES_MAX = {"one byte": 32_000, "one tag": 1_500}
RESTART_S_MAX, CAUGHT_UP_S_MAX = 10.0, 5.0

_WRITERS = 8
# As a replication does of small objects (replicator.syncer.limits).
_BARE_COPIES = 96
# Looks at the target: lags are rounded up by so much, and by the time of a listing.
_LOOK_S = 0.1
# The same where it has a log.
_LOG_S = 0.02
_WAIT_S = 300.0
# Before a job is measured nothing of the one before may still cross.
_SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How objects came to the target. Lags are in seconds, sorted: from the answer to
    a PUT to the first listing of the target that has the object. `seconds` is from the
    first PUT to the last arrival, `flow` the objects a second between the first arrival
    and the last, `written_s` to the last answer to a PUT, `crossed` all bytes on the
    links, `cpu_s` the CPU seconds of stores and replicator in that time, by part.
    """

    lags: tuple[float, ...]
    seconds: float
    flow: float
    written_s: float
    crossed: int
    cpu_s: Mapping[str, float]

    def lag_s(self, share: float) -> float:
        """The lag within which this share of the objects came."""
        return self.lags[min(len(self.lags) - 1, int(len(self.lags) * share))]


@dataclass(frozen=True, slots=True)
class Replicator:
    """A running replicator: where one writes, where it arrives, what links it uses, and
    how it is killed, and started again; how it is paused, and goes on. Arrivals are
    seen in the target's log where it has one, `feed`, otherwise by listings. `cpu_s`
    tells the CPU seconds so far of the stores and of the replicator.
    """

    name: str
    source: S3Bucket
    target: S3Bucket
    links: Sequence[WanLink]
    kill: Callable[[], None]
    start: Callable[[], None]
    pause: Callable[[], None]
    resume: Callable[[], None]
    feed: ChangeFeed | None = None
    cpu_s: Callable[[], Mapping[str, float]] = dict

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is replicated meanwhile."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def crossed(self) -> int:
        """Bytes in both directions since `reset`."""
        return sum(link.traffic().total.length_bytes for link in self.links)

    def reset(self) -> None:
        """Wait until what was written before has crossed, and count from nothing."""
        time.sleep(_SETTLE_S)
        for link in self.links:
            link.reset()

    def idle(self, seconds: float) -> int:
        """The bytes that cross in a time in which nothing is written."""
        self.reset()
        time.sleep(seconds)
        return self.crossed()

    def many(
        self,
        name: str,
        count: int,
        size_bytes: int,
        *,
        per_second: float = 0.0,
        is_paused: bool = False,
    ) -> Arrivals:
        """Write so many objects below a prefix, at most so many a second (0 for no
        limit), and wait for all. With `is_paused` nothing is replicated meanwhile, and
        `seconds` count from when it goes on.
        """
        self.reset()
        if is_paused:
            self.pause()
        written, seen = dict[str, float](), dict[str, float]()
        stop = threading.Event()
        look = self._look if self.feed is None else self._read_log
        looks = threading.Thread(target=look, args=(f"{name}/", count, seen, stop))
        body = os.urandom(size_bytes)
        client = _bare_client(self.source.endpoint)
        with closing(client), ThreadPoolExecutor(_WRITERS) as writers:
            if not is_paused:
                looks.start()
            begun, cpu_s = time.monotonic(), self.cpu_s()

            def put(number: int) -> None:
                if per_second:
                    time.sleep(max(0.0, begun + number / per_second - time.monotonic()))
                key = f"{name}/{number:06d}"
                client.request("PUT", self.source.name, key, body=body)
                written[key] = time.monotonic()

            list(writers.map(put, range(count)))
        written_s = max(written.values()) - begun
        if is_paused:
            begun, cpu_s = time.monotonic(), self.cpu_s()
            looks.start()
            self.resume()
        looks.join(_WAIT_S)
        stop.set()
        looks.join()
        assert len(seen) == count, f"{self.name}: {len(seen)} of {count} objects came"
        lags = sorted(max(0.0, at - written[key]) for key, at in seen.items())
        first, last = min(seen.values()), max(seen.values())
        later = sum(at > first for at in seen.values())
        flow = later / (last - first) if later else float(count)
        spent_s = {part: now - cpu_s[part] for part, now in self.cpu_s().items()}
        return Arrivals(tuple(lags), last - begun, flow, written_s, self.crossed(), spent_s)

    def change(
        self, act: Callable[[BaseClient], object], seen: Callable[[BaseClient], bool]
    ) -> int:
        """The bytes that cross for one change, until the target shows it."""
        self.reset()
        with self.source.endpoint.client() as client:
            act(client)
        with self.target.endpoint.client() as client:
            self.wait(lambda: seen(client))
        time.sleep(_SETTLE_S)
        return self.crossed()

    def changes(self, size_bytes: int) -> dict[str, int]:
        """The bytes that cross for one byte of a large object, for a tag of it and for
        its delete, by the name of the change.
        """
        body, key, found = bytearray(os.urandom(size_bytes)), "large", dict[str, int]()
        source = {"Bucket": self.source.name, "Key": key}
        target = {"Bucket": self.target.name, "Key": key}
        etag = ""

        def put(client: BaseClient) -> None:
            nonlocal etag
            etag = client.put_object(**source, Body=bytes(body))["ETag"]

        def has_bytes(client: BaseClient) -> bool:
            # An object that was put together from old and new ranges has another ETag.
            with client.get_object(**target)["Body"] as stream:
                return bool(stream.read() == bytes(body))

        self.change(put, has_bytes)
        body[size_bytes // 2] ^= 1
        found["one byte"] = self.change(put, has_bytes)
        tags = {"TagSet": [{"Key": "team", "Value": "storage"}]}
        found["one tag"] = self.change(
            lambda client: client.put_object_tagging(**source, Tagging=tags),
            lambda client: bool(client.get_object_tagging(**target)["TagSet"] == tags["TagSet"]),
        )

        def is_gone(client: BaseClient) -> bool:
            listed = client.list_objects_v2(Bucket=self.target.name, Prefix=key)
            return not listed.get("KeyCount")

        found["deleted"] = self.change(lambda client: client.delete_object(**source), is_gone)
        return found

    def restarted_s(self) -> float:
        """Kill it, write an object, and start it again: the seconds from the kill until
        the target has the object.
        """
        self.many("before", 50, OBJECT_BYTES)
        begun = time.monotonic()
        self.kill()
        self.wait_for_object("after", self.start)
        return time.monotonic() - begun

    def caught_up_s(self) -> float:
        """Cut all links for a while in which objects are written: the seconds from then
        on until the target has them all.
        """
        cut_at, rest_s = 0.0, 0.0

        def cut() -> None:
            nonlocal cut_at
            cut_at = time.monotonic()
            for link in self.links:
                link.cut()

        def mend() -> None:
            nonlocal rest_s
            rest_s = max(0.0, cut_at + CUT_S - time.monotonic())
            # The cut lasts by the clock: nothing happens that could be waited for.
            time.sleep(rest_s)
            for link in self.links:
                link.mend()

        beside = replace(self, pause=cut, resume=mend)
        return beside.many("cut", CUT_OBJECTS, OBJECT_BYTES, is_paused=True).seconds - rest_s

    def wait_for_bucket(self) -> None:
        """Wait until the second site has heard of the target."""
        with self.target.endpoint.client() as client:

            def has_bucket() -> bool:
                client.head_bucket(Bucket=self.target.name)
                return True

            self.wait(has_bucket)

    def wait_for_object(self, key: str, then: Callable[[], None] = lambda: None) -> None:
        """Write an object, `then` do something, and wait until the target has it."""
        with self.source.endpoint.client() as client:
            client.put_object(Bucket=self.source.name, Key=key, Body=b"x")
        then()
        with self.target.endpoint.client() as client:

            def has_it() -> bool:
                client.head_object(Bucket=self.target.name, Key=key)
                return True

            self.wait(has_it)

    def wait(self, holds: Callable[[], bool]) -> float:
        """Wait until something holds of the target; seconds that it took."""
        begun = time.monotonic()
        while time.monotonic() < begun + _WAIT_S:
            try:
                if holds():
                    return time.monotonic() - begun
            except ClientError:
                pass
            time.sleep(_LOOK_S)
        raise AssertionError(f"{self.name}: nothing arrived in {_WAIT_S:.0f} s")

    def _read_log(
        self, prefix: str, count: int, seen: dict[str, float], stop: threading.Event
    ) -> None:
        assert self.feed is not None
        position = self.feed.position()
        while len(seen) < count and not stop.wait(_LOG_S):
            batch = self.feed.read(position)
            position, at = batch.position, time.monotonic()
            for change in batch.changes:
                if change.kind is ChangeKind.PUT and change.key.startswith(prefix):
                    seen.setdefault(change.key, at)

    def _look(self, prefix: str, count: int, seen: dict[str, float], stop: threading.Event) -> None:
        """List what is not all there yet: most keys come in order, and a listing of all
        would cost the store more than the copies do.
        """
        client, first = _bare_client(self.target.endpoint), 0
        with closing(client):
            while len(seen) < count and not stop.is_set():
                at = time.monotonic()
                while f"{prefix}{first:06d}" in seen:
                    first += 1
                for key in _listed(client, self.target.name, prefix, first):
                    seen.setdefault(key, at)
                time.sleep(_LOOK_S)


def _listed(client: S3Client, bucket: str, prefix: str, first: int) -> Iterator[str]:
    """The keys below a prefix from this number on."""
    after = f"{prefix}{first - 1:06d}" if first else prefix
    while True:
        query = (("list-type", "2"), ("prefix", prefix), ("start-after", after))
        page = parse_listing(client.request("GET", bucket, query=query).body)
        yield from (one.key for one in page.objects)
        if not page.token:
            return
        after = page.objects[-1].key


def bare_copies(
    sites: RgwMultisite, source: S3Bucket, prefix: str, *, delay_ms: float, mbit: float
) -> tuple[float, float]:
    """Copy all objects below a prefix across a link by a GET and a conditional PUT
    each, many at a time, and nothing else: what nobody who reads and writes by S3 does
    in less. Objects a second, and CPU seconds of the stores and of this process.
    """
    target = sites.site("a").endpoint.fresh_bucket()
    sites.leave_out(target.name)
    with WanLink(sites.site("b").endpoint.address, delay_ms=delay_ms, mbit=mbit) as link:
        far = S3Bucket(link.through(sites.site("b").endpoint), target.name)
        with source.endpoint.client() as client:
            pages = client.get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=source.name, Prefix=prefix)
            keys = [one["Key"] for page in found for one in page.get("Contents", [])]
        with far.endpoint.client() as client:
            wait_until(lambda: _has_bucket(client, far.name), far.name, timeout_s=_WAIT_S)
        # Ceph tells its zones of the new bucket, by no event that others see.
        time.sleep(_SETTLE_S)
        reader, writer = _bare_client(source.endpoint), _bare_client(far.endpoint)

        def copy(key: str) -> None:
            body = reader.request("GET", source.name, key).body
            writer.request("PUT", far.name, key, headers={"if-none-match": "*"}, body=body)

        with ThreadPoolExecutor(_BARE_COPIES) as threads:
            begun, cpu_s = time.monotonic(), sum(sites.cpu_s().values()) + time.process_time()
            list(threads.map(copy, keys))
            seconds = time.monotonic() - begun
            spent_s = sum(sites.cpu_s().values()) + time.process_time() - cpu_s
        for one in (reader, writer):
            one.close()
    return len(keys) / seconds, spent_s


def _bare_client(endpoint: S3Endpoint) -> S3Client:
    return S3Client(
        endpoint_url=endpoint.url,
        region=endpoint.region,
        credentials=Credentials(endpoint.access_key, endpoint.secret_key),
    )


def _has_bucket(client: BaseClient, name: str) -> bool:
    try:
        client.head_bucket(Bucket=name)
    except ClientError:
        return False
    return True


@contextmanager
def ceph_replication(sites: RgwMultisite) -> Iterator[Replicator]:
    """Ceph's own replication of one bucket with versions, as it demands them least."""
    source = sites.site("a").endpoint.fresh_bucket()
    target = S3Bucket(sites.site("b").endpoint, source.name)

    def kill() -> None:
        sites.kill("b", "rgw")

    def start() -> None:
        sites.start("b", "rgw")

    def pause() -> None:
        sites.pause("b", "rgw")

    def resume() -> None:
        sites.resume("b", "rgw")

    acts = kill, start, pause, resume
    peer = Replicator("Ceph multisite", source, target, sites.links, *acts, cpu_s=sites.cpu_s)
    peer.wait_for_bucket()
    sites.wait_until_synced()
    yield peer


@contextmanager
def watched_sync(
    sites: RgwMultisite, folder: Path, *, delay_ms: float, mbit: float, interval_s: float
) -> Iterator[Replicator]:
    """`bucket sync --watch` between two buckets of which Ceph replicates nothing."""
    source = sites.site("a").endpoint.fresh_bucket()
    target = sites.site("a").endpoint.fresh_bucket()
    for bucket in (source, target):
        sites.leave_out(bucket.name)
    target = S3Bucket(sites.site("b").endpoint, target.name)
    with WanLink(target.endpoint.address, delay_ms=delay_ms, mbit=mbit) as link:
        ours = _Watch(
            source, S3Bucket(link.through(target.endpoint), target.name), folder, interval_s
        )
        acts = ours.kill, ours.start, ours.pause, ours.resume
        replicator = Replicator(
            "Treefold",
            source,
            target,
            (link,),
            *acts,
            cpu_s=lambda: sites.cpu_s() | {"treefold": ours.cpu_s()},
        )
        replicator.wait_for_bucket()
        ours.start()
        try:
            # As Ceph's is waited for: at its start it asks what the target can do.
            replicator.wait_for_object("first")
            yield replicator
        finally:
            ours.stop()


class _Watch:
    """The process of a watched sync."""

    def __init__(self, source: S3Bucket, target: S3Bucket, folder: Path, interval_s: float) -> None:
        self._sides = {"source": source, "target": target}
        self._folder = folder
        self._interval_s = interval_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; what it prints goes to a file."""
        credentials = self._folder / "credentials"
        credentials.write_text(
            "".join(
                f"[{name}]\naws_access_key_id = {side.endpoint.access_key}\n"
                f"aws_secret_access_key = {side.endpoint.secret_key}\n"
                for name, side in self._sides.items()
            )
        )
        words = [
            f"s3://{side.name}?endpoint_url={side.endpoint.url}&profile={name}"
            for name, side in self._sides.items()
        ]
        with (self._folder / "watch.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "admin.cli", "bucket", "sync", *words),
                    *("--watch", "--interval", f"{self._interval_s:g}", "--json"),
                    *("--state", str(self._folder / "state")),
                ],
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
                    "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
                    "AWS_CONFIG_FILE": os.devnull,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def cpu_s(self) -> float:
        """CPU seconds so far of the process that runs."""
        assert self._process is not None
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def kill(self) -> None:
        """As a crash does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop it where it is."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ask it to end.

        Raises:
            AssertionError: it has ended by itself.
        """
        assert self._process is not None
        log = self._folder / "watch.log"
        assert self._process.poll() is None, log.read_text()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
