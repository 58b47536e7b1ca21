"""What makes copies fast, and what it must not cost."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from botocore.credentials import Credentials

from merkle.checksum import Buffer
from proof.item import HashAlgorithm
from replicator.copier import CopierLimits
from replicator.copy_task import CopyLimits
from replicator.hashing import ContentHasher
from replicator.ledger import PairLedger
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import (
    ObjectFacts,
    ObjectProperties,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from replicator.stores.s3_behaviour import S3Behaviour
from replicator.stores.s3_bucket import S3Bucket
from replicator.stores.s3_objects import S3Reader
from replicator.stores.s3_probe import probe
from replicator.stores.s3_uploads import S3UploadWriter
from runtime.s3 import S3Client
from runtime.s3_answers import S3Error
from tests.support import s3_servers
from tests.support.bucket_sync import LIMITS, SyncRunner
from tests.support.flawed_stores import FlawedReader
from tests.support.memory_store import UNPROVEN, MemoryStore
from tests.support.sigv4 import is_signed
from tests.support.stores import s3_client
from tests.support.waiting import wait_until
from tests.support.wire_server import answer, wire_server

OBJECTS = 8
PARTS = 4


class CountedWriter:
    """An ObjectWriter that counts how many write at once, and lets the first end only
    when twice as many objects have been read, or with `gathers` when so many write.
    """

    def __init__(
        self, store: MemoryStore, reads: list[str], writes: int, *, gathers: bool = False
    ) -> None:
        self.store = store
        self.reads = reads
        self.writes = writes
        self.gathers = gathers
        self.now = self.most = 0
        self._lock = threading.Lock()

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if self.gathers:
            wait_until(lambda: self.most >= self.writes, "others to be written meanwhile")
        else:
            wait_until(lambda: len(self.reads) >= 2 * self.writes, "others to be read meanwhile")
        try:
            return self.store.put(key, body, properties, condition)
        finally:
            with self._lock:
                self.now -= 1

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


@pytest.mark.parametrize("writes", [1, 2, 4])
def test_as_many_objects_are_read_as_are_written_and_no_more_are_written(
    writes: int, tmp_path: Path
) -> None:
    """OZ-055: as many are under way as were asked for, and the end is the same."""
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b")
    for number in range(OBJECTS):
        source.put(str(number), b"body", ObjectProperties(), WriteCondition())
    reader = FlawedReader(source.store())
    writer = CountedWriter(target, reader.reads, writes)
    run = SyncRunner(
        replace(source.store(), reader=reader),
        replace(target.store(), writer=writer),
        tmp_path,
        copier_limits=CopierLimits(objects=writes, parts=1),
        new_executor=ThreadPoolExecutor,
    )
    report = run()
    assert (report.copied, report.equal) == (OBJECTS, True)
    assert writer.most == writes
    assert target.bodies() == source.bodies()


@pytest.mark.parametrize(("size_bytes", "most"), [(4, 4), ((1 << 20) + 1, 2)])
def test_more_small_objects_are_written_at_once(tmp_path: Path, size_bytes: int, most: int) -> None:
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b")
    for number in range(8):
        source.put(str(number), bytes(size_bytes), ObjectProperties(), WriteCondition())
    writer = CountedWriter(target, [], most, gathers=True)
    run = SyncRunner(
        source.store(),
        replace(target.store(), writer=writer),
        tmp_path,
        copier_limits=CopierLimits(objects=2, parts=1, small_objects=4),
        copy_limits=CopyLimits(part_bytes=8 << 20),
        new_executor=ThreadPoolExecutor,
    )
    assert run().copied == 8
    assert writer.most == most


class HalvingReader:
    """An ObjectReader that sends halves of parts, and counts the bytes of each key that
    have been taken over.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.taken = Counter[str]()
        self.answers = 0

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader."""
        self.answers += 1
        with self.store.read(facts, first=first, end=end) as pieces:
            yield self._halves(facts.key, b"".join(pieces))

    def _halves(self, key: str, body: bytes) -> Iterator[bytes]:
        step = LIMITS.part_bytes // 2
        for at in range(0, len(body), step):
            yield body[at : at + step]
            self.taken[key] += step

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


@dataclass
class LateWriter:
    """An UploadWriter that takes the bytes of a part while the next is being read."""

    store: MemoryStore
    reader: HalvingReader

    def write_part(
        self,
        key: str,
        upload: UploadId,
        number: int,
        body: Buffer,
        *,
        with_digest: bool = True,
    ) -> UploadedPart:
        """See UploadWriter."""
        if number < PARTS:
            ahead = number * LIMITS.part_bytes + LIMITS.part_bytes // 2
            wait_until(lambda: self.reader.taken[key] >= ahead, "the next part to be read")
        return self.store.write_part(key, upload, number, body, with_digest=with_digest)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_the_memory_of_a_part_is_no_other_parts_until_it_is_sent(tmp_path: Path) -> None:
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b", UNPROVEN)
    for number in range(3):
        body = random.Random(number).randbytes(PARTS * LIMITS.part_bytes)
        source.put(str(number), body, ObjectProperties(), WriteCondition())
    reader = HalvingReader(source)
    run = SyncRunner(
        replace(source.store(), reader=reader),
        replace(target.store(), upload_writer=LateWriter(target, reader)),
        tmp_path,
        copier_limits=CopierLimits(objects=1, parts=2, memory_bytes=5 * LIMITS.part_bytes),
        new_executor=ThreadPoolExecutor,
    )
    assert run().copied == 3
    assert target.bodies() == source.bodies()
    # One for the parts of each object.
    assert reader.answers == 3


@dataclass
class OverwritingWriter:
    """An UploadWriter after which the memory of a part is another part's at once; it is
    cut when it is to complete.
    """

    store: MemoryStore
    is_cut: bool = True

    def write_part(
        self,
        key: str,
        upload: UploadId,
        number: int,
        body: Buffer,
        *,
        with_digest: bool = True,
    ) -> UploadedPart:
        """See UploadWriter."""
        part = self.store.write_part(key, upload, number, body, with_digest=with_digest)
        view = memoryview(body)
        view[:] = bytes(view.nbytes)
        return part

    def complete(self, *arguments: object) -> object:
        """See UploadWriter."""
        if self.is_cut:
            raise StoreUnavailableError("the link is cut")
        return self.store.complete(*arguments)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_what_is_recorded_of_a_part_is_of_the_bytes_that_were_sent(tmp_path: Path) -> None:
    """So that a later run takes it over, from a store whose ETags prove nothing."""
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b", UNPROVEN)
    body = random.Random(3).randbytes(3 * LIMITS.part_bytes)
    source.put("key", body, ObjectProperties(), WriteCondition())
    writer = OverwritingWriter(target)
    run = SyncRunner(source.store(), replace(target.store(), upload_writer=writer), tmp_path)
    assert run().failed_count == 1
    writer.is_cut = False
    report = run()
    assert (report.copied, report.bytes) == (1, 0)
    assert target.bodies() == {"key": body}


@pytest.mark.parametrize("etag", ["0" * 32, "0" * 32 + "-4", "opaque", "a-b"])
def test_the_md5_of_the_whole_is_left_out_of_objects_in_parts_only(
    tmp_path: Path, etag: str
) -> None:
    """Nobody declares one of those; of all others it may be compared."""
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b", UNPROVEN)
    run = SyncRunner(source.store(), target.store(), tmp_path)
    body = bytes(3 * run.copy_limits.part_bytes)
    source.put("key", body, ObjectProperties(), WriteCondition())
    stored = source.objects["key"]
    source.objects["key"] = replace(stored, facts=replace(stored.facts, etag=etag, hashes=()))
    assert run().copied == 1
    with PairLedger(tmp_path, source="memory:a", target="memory:b") as ledger:
        row = ledger.row("key")
    assert row is not None
    hasher = ContentHasher()
    hasher.update(body)
    assert {one.algorithm for one in row.hashes} == {one.algorithm for one in hasher.hashes()} - (
        {HashAlgorithm.MD5} if etag.endswith("-4") else set()
    )
    assert set(row.hashes) <= set(hasher.hashes())


@pytest.mark.parametrize("with_digest", [True, False])
@pytest.mark.parametrize("checks_part_md5", [False, True])
def test_a_part_is_guarded_by_a_signed_hash_of_its_bytes(
    checks_part_md5: bool, with_digest: bool
) -> None:
    """Unless its sender proves it later, and the store takes it so."""
    with wire_server() as server:
        client = S3Client(endpoint_url=server.url, region="r", credentials=Credentials("a", "b"))
        with closing(client):
            bucket = S3Bucket(client, "bucket", "", "bucket")
            bucket.behaviour = S3Behaviour(checks_part_md5=checks_part_md5)
            uploads = S3UploadWriter(bucket, S3Reader(bucket))
            server.answers.append(answer(200, b"", 'ETag: "e"\r\n'))
            uploads.write_part("key", "u", 1, b"part", with_digest=with_digest)
    (one,) = server.arrived
    assert is_signed(one.method, one.target, one.headers, one.body, "b")
    if with_digest or not checks_part_md5:
        assert one.headers["content-md5"] == "9Mk4XxkC9zNLALm07NFk3g=="
        names = one.headers["authorization"].partition("SignedHeaders=")[2]
        assert "content-md5" in names.partition(",")[0].split(";")
    else:
        assert "content-md5" not in one.headers
    is_unsigned = one.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert is_unsigned == checks_part_md5


def test_a_body_is_left_unsigned_only_where_another_md5_is_refused(
    s3_bucket: s3_servers.S3Bucket,
) -> None:
    with closing(s3_client(s3_bucket.endpoint)) as client:
        bucket = S3Bucket(client, s3_bucket.name, "", s3_bucket.name)
        behaviour = probe(bucket, may_write=True)
        upload = S3UploadWriter(bucket, S3Reader(bucket)).begin("key", ObjectProperties())
        query = (("partNumber", "1"), ("uploadId", upload))
        headers = {"content-md5": "9Mk4XxkC9zNLALm07NFk3g=="}

        def is_taken(body: bytes) -> bool:
            try:
                bucket.request(
                    "PUT", "key", query=query, headers=headers, body=body, signs_body=False
                )
            except S3Error:
                return False
            return True

        assert behaviour.checks_part_md5 == (is_taken(b"part") and not is_taken(b"other"))
