"""An object of one PUT crosses as it is read, under the MD5 that its source has."""

import hashlib
import random
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.credentials import Credentials

from merkle.checksum import Buffer
from proof.item import HashAlgorithm
from replicator.copy_task import CopyLimits
from replicator.hashing import ContentHasher
from replicator.ledger import LedgerRow, PairLedger
from replicator.stores.errors import PreconditionFailedError, StoreError, StoreUnavailableError
from replicator.stores.port import ObjectFacts, ObjectProperties, WriteCondition
from replicator.stores.s3_behaviour import S3Behaviour
from replicator.stores.s3_bucket import S3Bucket
from replicator.stores.s3_objects import S3Reader
from replicator.stores.s3_pieces import S3PieceWriter
from replicator.stores.s3_probe import probe
from runtime.s3 import S3Client
from tests.support import s3_servers
from tests.support.bucket_sync import LIMITS, SyncRunner
from tests.support.flawed_stores import FlawedReader
from tests.support.kill_points import KilledError
from tests.support.memory_store import MEMORY, UNPROVEN, MemoryStore, StoreFaults
from tests.support.sigv4 import is_signed
from tests.support.stores import s3_client
from tests.support.wire_server import answer, wire_server

BODY = random.Random(5).randbytes(3 * LIMITS.part_bytes + 1)
NOTHING = ObjectProperties()
ANYTHING = WriteCondition()
MD5 = hashlib.md5(b"part").digest()
FACTS = ObjectFacts("key", 4, MD5.hex(), 0)


@pytest.fixture
def source() -> MemoryStore:
    store = MemoryStore("memory:a")
    store.write("k", BODY, ObjectProperties(metadata=(("owner", "ann"),)))
    return store


@pytest.fixture
def target() -> MemoryStore:
    return MemoryStore("memory:b", takes_pieces=True)


def row(folder: Path) -> LedgerRow:
    with PairLedger(folder, source="memory:a", target="memory:b") as ledger:
        found = ledger.row("k")
    assert found is not None
    return found


def known_hashes(body: bytes) -> set[object]:
    hasher = ContentHasher()
    hasher.update(body)
    return set(hasher.hashes())


def test_it_crosses_once_in_one_request_and_all_its_hashes_are_recorded(
    source: MemoryStore, target: MemoryStore, tmp_path: Path
) -> None:
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal, report.bytes) == (1, True, len(BODY))
    assert (target.bodies(), target.payload) == ({"k": BODY}, len(BODY))
    assert target.calls.count("put_pieces") == 1
    assert not {"begin", "write_part"} & set(target.calls)
    assert set(row(tmp_path).hashes) == known_hashes(BODY)
    assert target.objects["k"].properties == source.objects["k"].properties


@pytest.mark.parametrize("declares", [True, False])
def test_of_a_source_whose_etag_lies_nothing_is_published_under_it(
    source: MemoryStore, target: MemoryStore, tmp_path: Path, declares: bool
) -> None:
    """Where the store is known to give MD5s, the object is damaged. Else its ETag was
    none, it is copied in parts, and no MD5 is said to be the source's.
    """
    wrong = hashlib.md5(b"other").hexdigest()
    stored = source.objects["k"]
    hashes = (replace(stored.facts.hashes[0], digest=bytes.fromhex(wrong)),)
    facts = replace(stored.facts, etag=wrong, hashes=hashes if declares else ())
    source.objects["k"] = replace(stored, facts=facts)
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert not target.uploading
    if declares:
        assert [one.reason for one in report.failed] == ["source_disagrees"]
        assert not target.objects
    else:
        assert (report.copied, target.bodies()) == (1, {"k": BODY})
        assert set(row(tmp_path).hashes) == known_hashes(BODY)


@pytest.mark.parametrize("takes_pieces", [True, False])
def test_what_was_read_damaged_is_not_published(
    source: MemoryStore, tmp_path: Path, takes_pieces: bool
) -> None:
    target = MemoryStore("memory:b", takes_pieces=takes_pieces)
    reader = FlawedReader(source.store(), bodies={"k": BODY[:-1] + b"?"})
    damaged = replace(source.store(), reader=reader)
    report = SyncRunner(damaged, target.store(), tmp_path)()
    assert [one.reason for one in report.failed] == ["source_disagrees"]
    assert not target.objects
    assert not target.uploading
    assert SyncRunner(source.store(), target.store(), tmp_path)().equal
    assert target.bodies() == {"k": BODY}


class OnceDamaged(MemoryStore):
    """What first arrives in pieces has been changed on the way."""

    damaged = False

    def arrived(self, body: bytes) -> bytes:
        """See MemoryStore."""
        if self.damaged:
            return super().arrived(body)
        self.damaged = True
        return super().arrived(b"?" + body[1:])


def test_what_arrives_damaged_is_refused_and_sent_again_in_parts(
    source: MemoryStore, tmp_path: Path
) -> None:
    target = OnceDamaged("memory:b", takes_pieces=True)
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal) == (1, True)
    assert target.bodies() == {"k": BODY}
    assert {"put_pieces", "complete"} <= set(target.calls)


@pytest.mark.parametrize("ending", [StoreUnavailableError("cut"), KilledError()])
def test_after_a_cut_or_a_kill_it_goes_in_parts(
    source: MemoryStore, target: MemoryStore, tmp_path: Path, ending: BaseException
) -> None:
    """So that it arrives also by a link that is cut again and again."""

    def end(called: str, _key: str) -> None:
        if called == "put_pieces":
            raise ending

    target.faults = StoreFaults(before=end)
    run = SyncRunner(source.store(), target.store(), tmp_path)
    if isinstance(ending, KilledError):
        with pytest.raises(KilledError):
            run()
    report = run()
    assert (report.copied, report.equal, target.bodies()) == (1, True, {"k": BODY})
    assert target.calls.count("put_pieces") == 1
    assert target.calls.count("write_part") == 4
    assert not target.uploading


def test_a_source_that_changes_while_it_is_read_is_not_published_as_it_was(
    source: MemoryStore, target: MemoryStore, tmp_path: Path
) -> None:
    other = random.Random(6).randbytes(len(BODY))
    looks = iter(range(10))

    def change(_key: str) -> None:
        if next(looks) == 0:
            source.write("k", other, NOTHING)

    reader = FlawedReader(source.store(), before_facts=change)
    run = SyncRunner(replace(source.store(), reader=reader), target.store(), tmp_path)
    assert run().copied == 1
    assert target.bodies() == {"k": other}
    # The bytes of the first version without its last piece, and all of the second.
    assert len(BODY) < target.payload < 2 * len(BODY)
    assert target.calls.count("put_pieces") == 2


@pytest.mark.parametrize("case", ["too large", "opaque etag", "in parts", "no writer"])
def test_all_others_go_in_parts(
    source: MemoryStore, target: MemoryStore, tmp_path: Path, case: str
) -> None:
    if case == "no writer":
        target = MemoryStore("memory:b", UNPROVEN)
    stored = source.objects["k"]
    etags = {"opaque etag": "A" * 32, "in parts": "0" * 32 + "-4"}
    facts = replace(stored.facts, etag=etags.get(case, stored.facts.etag), hashes=())
    source.objects["k"] = replace(stored, facts=facts)
    limits = replace(LIMITS, pieces_bytes_max=len(BODY) - (case == "too large"))
    run = SyncRunner(source.store(), target.store(), tmp_path, copy_limits=limits)
    assert run().copied == 1
    assert target.bodies() == {"k": BODY}
    assert "put_pieces" not in target.calls


def test_an_object_of_others_is_not_replaced(
    source: MemoryStore, target: MemoryStore, tmp_path: Path
) -> None:
    def write(called: str, _key: str) -> None:
        if called == "put_pieces":
            target.write("k", b"of others")

    target.faults = StoreFaults(before=write)
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert [one.reason for one in report.failed] == ["target_changed"]
    assert target.bodies() == {"k": b"of others"}


def test_the_default_limit_bounds_what_a_cut_costs() -> None:
    assert CopyLimits().pieces_bytes_max == 64 << 20
    assert MEMORY.part_etags_are_md5


def pieces_of(*pieces: bytes | StoreError) -> Iterable[Buffer]:
    for piece in pieces:
        if isinstance(piece, StoreError):
            raise piece
        yield piece


def test_pieces_are_signed_by_their_md5_and_announced_whole() -> None:
    with wire_server() as server:
        client = S3Client(endpoint_url=server.url, region="r", credentials=Credentials("a", "b"))
        with closing(client):
            bucket = S3Bucket(client, "bucket", "", "bucket", S3Behaviour(checks_put_md5=True))
            writer = S3PieceWriter(bucket, S3Reader(bucket))
            server.answers.append(answer(200, b"", f'ETag: "{MD5.hex()}"\r\n'))
            made = writer.put_pieces(FACTS, MD5, pieces_of(b"pa", b"rt"), NOTHING, ANYTHING)
    (one,) = server.arrived
    assert (made.etag, one.body) == (MD5.hex(), b"part")
    assert is_signed(one.method, one.target, one.headers, one.body, "b")
    assert one.headers["content-md5"] == "9Mk4XxkC9zNLALm07NFk3g=="
    names = one.headers["authorization"].partition("SignedHeaders=")[2]
    assert "content-md5" in names.partition(",")[0].split(";")
    assert one.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


def test_a_store_is_given_pieces_only_where_another_md5_is_refused(
    s3_bucket: s3_servers.S3Bucket,
) -> None:
    with closing(s3_client(s3_bucket.endpoint)) as client:
        bucket = S3Bucket(client, s3_bucket.name, "", s3_bucket.name)
        bucket.behaviour = replace(probe(bucket, may_write=True))
        checks = bucket.behaviour.checks_put_md5
        bucket.behaviour = replace(bucket.behaviour, checks_put_md5=True)
        reader = S3Reader(bucket)
        writer = S3PieceWriter(bucket, reader)
        if checks:
            with pytest.raises(StoreError):
                writer.put_pieces(FACTS, MD5, pieces_of(b"pa", b"st"), NOTHING, ANYTHING)
            assert reader.facts("key") is None
        cut = StoreUnavailableError("the source ended")
        with pytest.raises(StoreUnavailableError, match="the source ended"):
            writer.put_pieces(FACTS, MD5, pieces_of(b"pa", cut), NOTHING, ANYTHING)
        assert reader.facts("key") is None
        made = writer.put_pieces(FACTS, MD5, pieces_of(b"pa", b"rt"), NOTHING, ANYTHING)
        with reader.read(made) as found:
            assert b"".join(found) == b"part"
        if bucket.behaviour.creates_conditionally:
            absent = WriteCondition(absent=True)
            with pytest.raises(PreconditionFailedError):
                writer.put_pieces(FACTS, MD5, pieces_of(b"pa", b"rt"), NOTHING, absent)
        assert made.hashes == () or made.hashes[0].algorithm is HashAlgorithm.MD5
