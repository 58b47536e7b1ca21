"""What makes copies fast, and what it must not cost."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.credentials import Credentials

from merkle.checksum import Buffer
from proof.item import HashAlgorithm
from replicator.copier import CopierLimits
from replicator.hashing import ContentHasher
from replicator.ledger import PairLedger
from replicator.stores.port import ObjectFacts, ObjectProperties, WriteCondition
from replicator.stores.s3_behaviour import S3Behaviour
from replicator.stores.s3_bucket import S3Bucket
from replicator.stores.s3_objects import S3Reader
from replicator.stores.s3_probe import probe
from replicator.stores.s3_uploads import S3UploadWriter
from runtime.s3 import S3Client
from runtime.s3_answers import S3Error
from tests.support import s3_servers
from tests.support.bucket_sync import SyncRunner
from tests.support.flawed_stores import FlawedReader
from tests.support.memory_store import UNPROVEN, MemoryStore
from tests.support.sigv4 import is_signed
from tests.support.stores import s3_client
from tests.support.waiting import wait_until
from tests.support.wire_server import answer, wire_server

OBJECTS = 8
WRITES = 2


class CountedWriter:
    """An ObjectWriter that counts how many write at once, and lets the first end only
    when twice as many objects have been read.
    """

    def __init__(self, store: MemoryStore, reads: list[str]) -> None:
        self.store = store
        self.reads = reads
        self.now = self.most = 0
        self._lock = threading.Lock()

    def put(
        self, key: str, body: Buffer, properties: ObjectProperties, condition: WriteCondition
    ) -> ObjectFacts:
        """See ObjectWriter."""
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        wait_until(lambda: len(self.reads) >= 2 * WRITES, "others to be read meanwhile")
        try:
            return self.store.put(key, body, properties, condition)
        finally:
            with self._lock:
                self.now -= 1

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_as_many_objects_are_read_as_are_written_and_no_more_are_written(tmp_path: Path) -> None:
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b")
    for number in range(OBJECTS):
        source.put(str(number), b"body", ObjectProperties(), WriteCondition())
    reader = FlawedReader(source.store())
    writer = CountedWriter(target, reader.reads)
    run = SyncRunner(
        replace(source.store(), reader=reader),
        replace(target.store(), writer=writer),
        tmp_path,
        copier_limits=CopierLimits(objects=WRITES, parts=1),
        new_executor=ThreadPoolExecutor,
    )
    report = run()
    assert (report.copied, report.equal) == (OBJECTS, True)
    assert writer.most == WRITES


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
