"""Syncs between real stores in every direction: each keeps all that it can, and what it
cannot is named.
"""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.checksum import Buffer
from replicator.copy_task import CopyLimits
from replicator.stores.errors import StoreUnavailableError, UnsupportedObjectError
from replicator.stores.port import ObjectProperties, Store, UploadedPart, UploadId, UploadWriter
from replicator.stores.s3 import open_s3
from tests.support.bucket_sync import SyncRunner
from tests.support.s3_servers import S3Endpoint
from tests.support.stores import (
    ANYTHING,
    ContractStore,
    content,
    current,
    local_store,
    s3_client,
    s3_store,
)

pytestmark = pytest.mark.e2e

MIB = 1 << 20
# The least that S3 takes.
LIMITS = CopyLimits(part_bytes=5 * MIB)
KEYS = (
    "plain",
    "folder/",
    "//",
    "a/../b",
    "..",
    "a?b=c",
    "100%25",
    "a+b c",
    " blanks ",
    "quote\"s'&<>",
    "\uff01x",
    "😀1",
    "n" * 1000,
)
PROPERTIES = ObjectProperties(
    metadata=(("colour", "blue"), ("empty", "")),
    tags=(("Team", "a+b"), ("empty", "")),
    headers=(("cache-control", "max-age=60"), ("content-type", "text/plain")),
)
KINDS = ("local", "ministack_server", "moto_server")


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Store]]:
    """An empty source and an empty target."""
    source, target = request.param

    def opener(kind: str, side: str) -> AbstractContextManager[ContractStore]:
        if kind == "local":
            return local_store(request, name=side)
        return s3_store(kind, request)

    with opener(source, "a") as ours, opener(target, "b") as theirs:
        yield ours.store, theirs.store


PAIRS = [(source, target) for source in KINDS for target in KINDS]
every_direction = pytest.mark.parametrize(
    "opened", PAIRS, indirect=True, ids=["-".join(pair) for pair in PAIRS]
)


def runner(pair: tuple[Store, Store], folder: Path) -> SyncRunner:
    return SyncRunner(*pair, folder / "state", delete=True, copy_limits=LIMITS)


def held(store: Store) -> dict[str, tuple[bytes, ObjectProperties]]:
    """All that a store has, without what stores add by themselves."""
    found = {}
    for facts in store.lister.list_objects(""):
        properties = store.reader.properties(facts.key)
        found[facts.key] = content(store, facts), replace(properties, acl=())
    return found


@every_direction
def test_all_that_both_stores_keep_crosses_and_the_rest_is_named(
    opened: tuple[Store, Store], tmp_path: Path
) -> None:
    source, target = opened
    written = set[str]()
    for key in KEYS:
        try:
            source.writer.put(key, key.encode(), PROPERTIES, ANYTHING)
            written.add(key)
        except UnsupportedObjectError:
            assert not source.capabilities.lists_all_keys
    if source.capabilities.kind == "local":
        # Longer than S3 takes, in a store that takes more.
        long = ObjectProperties(metadata=(("name", "x" * 4_000),))
        source.writer.put("long metadata", b"x", long, ANYTHING)
    target.writer.put("extra", b"x", PROPERTIES, ANYTHING)
    run = runner(opened, tmp_path)
    report = run()
    refused = {one.key for one in report.failed}
    assert {one.reason for one in report.failed} <= {"unsupported"}
    is_refused = source.capabilities.kind == "local" != target.capabilities.kind
    assert refused == ({"long metadata"} if is_refused else set())
    assert report.copied >= len(written)
    assert (report.deleted, report.equal) == (1, not refused)
    theirs = {key: one for key, one in held(source).items() if key not in refused}
    assert held(target) == theirs
    if refused:
        assert source.writer.delete(sorted(refused)) == []
        assert run().equal
    # One tag, one name of metadata, one body; one key goes.
    facts = current(source, "plain")
    source.writer.put_properties(facts, replace(PROPERTIES, tags=(("Team", "b"),)))
    facts = current(source, "folder/")
    source.writer.put_properties(facts, replace(PROPERTIES, metadata=(("colour", "red"),)))
    source.writer.put("//", b"new", PROPERTIES, ANYTHING)
    assert source.writer.delete([".."]) == []
    report = run()
    assert (report.copied, report.metadata_only, report.deleted) == (1, 2, 1)
    assert (report.bytes, report.equal, report.failed) == (3, True, ())
    assert held(target) == held(source)
    assert run().bytes == 0


@every_direction
def test_a_large_object_is_resumed_at_the_part_and_patched(
    opened: tuple[Store, Store], tmp_path: Path
) -> None:
    source, target = opened
    body = bytearray(random.Random(3).randbytes(3 * LIMITS.part_bytes + 1_000))
    source.writer.put("large", bytes(body), PROPERTIES, ANYTHING)
    cut = CuttingUploads(target.upload_writer, parts=2)
    run = runner((source, replace(target, upload_writer=cut, piece_writer=None)), tmp_path)
    report = run()
    assert [one.reason for one in report.failed] == ["unavailable"]
    assert cut.sent_bytes == 3 * LIMITS.part_bytes
    cut.parts = 1_000
    assert run().equal
    assert cut.sent_bytes <= len(body) + LIMITS.part_bytes
    assert held(target) == held(source)
    assert list(target.upload_reader.uploads("")) == []
    body[6 * MIB] ^= 1
    source.writer.put("large", bytes(body), PROPERTIES, ANYTHING)
    report = run()
    assert (report.copied, report.equal) == (1, True)
    if target.capabilities.copies_ranges:
        assert report.bytes <= 64 << 10
    assert held(target) == held(source)
    assert list(target.upload_reader.uploads("")) == []


@every_direction
def test_an_object_of_one_put_crosses_as_it_is_and_is_patched(
    opened: tuple[Store, Store], tmp_path: Path
) -> None:
    source, target = opened
    body = bytearray(random.Random(4).randbytes(2 * LIMITS.part_bytes + 1_000))
    source.writer.put("large", bytes(body), PROPERTIES, ANYTHING)
    run = runner(opened, tmp_path)
    report = run()
    assert (report.copied, report.bytes, report.equal) == (1, len(body), True)
    assert held(target) == held(source)
    body[6 * MIB] ^= 1
    source.writer.put("large", bytes(body), PROPERTIES, ANYTHING)
    report = run()
    assert (report.copied, report.equal) == (1, True)
    if target.capabilities.copies_ranges:
        assert report.bytes <= 64 << 10
    assert held(target) == held(source)


class CuttingUploads:
    """An UploadWriter whose connection is cut after some parts: the next one arrives,
    and its answer does not.
    """

    def __init__(self, writer: UploadWriter, *, parts: int) -> None:
        self._writer = writer
        self.parts = parts
        self.sent_bytes = 0
        self.begin = writer.begin
        self.copy_part = writer.copy_part
        self.complete = writer.complete
        self.abort = writer.abort

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
        self.sent_bytes += memoryview(body).nbytes
        part = self._writer.write_part(key, upload, number, body, with_digest=with_digest)
        self.parts -= 1
        if self.parts < 0:
            raise StoreUnavailableError("the connection was cut")
        return part


def test_a_copy_has_the_storage_class_of_its_target(
    moto_server: S3Endpoint, tmp_path: Path
) -> None:
    """OZ-033: whatever its source had, also where it crosses in parts. On Ozone the
    storage class of a request is the replication of its key.
    """
    buckets = [moto_server.fresh_bucket() for _ in range(2)]
    bodies = {"small": b"x", "large": bytes(11 * MIB)}
    with moto_server.client() as client, closing(s3_client(moto_server)) as ours:
        for key, body in bodies.items():
            client.put_object(
                Bucket=buckets[0].name, Key=key, Body=body, StorageClass="STANDARD_IA"
            )
        source, target = (
            open_s3(f"s3://{one.name}/", may_write=True, client=ours) for one in buckets
        )
        assert runner((source, target), tmp_path)().copied == 2
        classes = [
            [client.head_object(Bucket=one.name, Key=key).get("StorageClass") for key in bodies]
            for one in buckets
        ]
    assert classes == [["STANDARD_IA"] * 2, [None] * 2]
