"""What the S3 adapter asks of a store, and what it never asks of Ozone's gateway."""

from collections.abc import Iterator
from contextlib import closing
from urllib.parse import unquote

import pytest
from botocore.credentials import Credentials

from merkle.object_checksum import Crc
from replicator.hashing import crc_hash
from replicator.stitching import BytePatch, StitchPlan, plan_stitch, stitch
from replicator.stores.errors import PreconditionFailedError, StoreError, UnsupportedObjectError
from replicator.stores.port import ObjectFacts, ObjectProperties, WholeObject
from replicator.stores.s3 import open_s3
from replicator.stores.s3_bucket import SCRATCH_PREFIX, S3Bucket, S3Location
from replicator.stores.s3_objects import delete_versions
from runtime.errors import UsageError
from runtime.retry import Backoff
from runtime.s3 import S3Client
from tests.support import s3_servers
from tests.support.stores import content, current, keys, put, s3_client
from tests.support.wire_server import WireServer, answer, wire_server

LISTING = "<ListBucketResult><IsTruncated>{more}</IsTruncated>{token}{entries}</ListBucketResult>"
ENTRY = (
    "<Contents><Key>{}</Key><LastModified>2026-11-23T12:00:00Z</LastModified>"
    "<ETag>0cc175b9c0f1b6a831c399e269772661</ETag><Size>1</Size></Contents>"
)
VERSIONING = b"<VersioningConfiguration/>"
A = b"a"


def listing(*names: str, token: str = "") -> bytes:
    shown = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    entries = "".join(ENTRY.format(name) for name in names)
    return LISTING.format(more=str(bool(token)).lower(), token=shown, entries=entries).encode()


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as made:
        yield made


@pytest.fixture
def client(server: WireServer) -> Iterator[S3Client]:
    made = S3Client(
        endpoint_url=server.url,
        region="us-east-1",
        credentials=Credentials("A", "B"),
        backoff=Backoff(attempts_max=1),
    )
    with closing(made):
        yield made


@pytest.mark.parametrize("version", ["", "v1"])
def test_a_bulk_delete_is_not_repeated_blindly(server: WireServer, version: str) -> None:
    """What its lost attempt has deleted may have been written anew by others."""
    with closing(
        S3Client(
            endpoint_url=server.url,
            region="us-east-1",
            credentials=Credentials("A", "B"),
            backoff=Backoff(attempts_max=3, first_s=0, jitter_s=0),
        )
    ) as client:
        bucket = S3Bucket(client, "bucket", "", "bucket")
        server.answers += [b"", answer(200, b"<DeleteResult/>")]
        if version:
            assert delete_versions(bucket, [("key", version)]) == []
        else:
            with pytest.raises(StoreError):
                delete_versions(bucket, [("key", version)])
        assert [one.method for one in server.arrived] == ["POST"] * (2 if version else 1)


@pytest.mark.parametrize("server_name", ["Ozone", "ozone/2.2"])
def test_a_gateway_of_ozone_gets_no_sub_resource_of_a_bucket(
    server: WireServer, client: S3Client, server_name: str
) -> None:
    etag = 'ETag: "0cc175b9c0f1b6a831c399e269772661"\r\n'
    said = f"Server: {server_name}\r\n"
    server.answers.append(answer(200, listing("x"), said))
    store = open_s3("s3://bucket", may_write=False, client=client)
    assert store.capabilities.kind == "ozone"
    assert not store.capabilities.lists_all_keys
    assert "lists_all_keys" in dict(store.capabilities.reasons)
    server.answers.append(answer(200, listing("\U0001f600", "x", "\uff01", "x")))
    found = list(store.lister.list_versions(""))
    # Sorted, each once, and no ETag proves anything.
    assert [facts.key for facts in found] == ["x", "\uff01", "\U0001f600"]
    assert {facts.hashes for facts in found} == {()}
    server.answers.append(
        answer(200, b"", said + etag + "Last-Modified: Mon, 23 Nov 2026 12:00:00 GMT\r\n")
    )
    store.reader.properties("x")
    buckets = [one.target for one in server.arrived if one.target.startswith("/bucket?")]
    assert len(buckets) == 2
    assert all("list-type=2" in target for target in buckets)
    assert not [one for one in server.arrived if "acl" in one.target or "tagging" in one.target]


ACL = b"<AccessControlPolicy><Owner><ID>u</ID></Owner><AccessControlList/></AccessControlPolicy>"
TAGS = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
CEPH = (
    "Server: Ceph Object Gateway (pacific)\r\n"
    'ETag: "0cc175b9c0f1b6a831c399e269772661"\r\n'
    "Last-Modified: Mon, 23 Nov 2026 12:00:00 GMT\r\n"
)


@pytest.mark.parametrize("tags", [0, 1])
def test_ceph_is_asked_for_tags_where_it_counts_some(
    server: WireServer, client: S3Client, tags: int
) -> None:
    """It counts them with each answer; and an empty bucket of it tells of ACLs."""
    counted = CEPH + (f"x-amz-tagging-count: {tags}\r\n" if tags else "")
    documents = {"acl": ACL, "tagging": TAGS, "versioning": VERSIONING}

    def answer_to(method: str, target: str) -> bytes:
        path, _, query = target.partition("?")
        if query in documents:
            return answer(200, documents[query], counted)
        body = A if path.count("/") > 1 else listing()
        return answer(200, body, counted)[: -len(body) if method == "HEAD" else None]

    def asked() -> list[tuple[str, str]]:
        found = [(one.method, one.target.partition("?")[2]) for one in server.arrived]
        server.arrived.clear()
        return found

    server.answer_to = answer_to
    store = open_s3("s3://bucket", may_write=False, client=client)
    assert store.capabilities.keeps_acls
    asked()
    facts = ObjectFacts("x", 1, "0cc175b9c0f1b6a831c399e269772661", 1_795_435_200_000)
    given = ObjectProperties(tags=(("a", "b"),) * tags)
    assert store.reader.read_whole(facts) == WholeObject(given, A)
    tagged = [("GET", "tagging"), ("HEAD", "")] if tags else []
    assert asked() == [("GET", "acl"), ("GET", ""), *tagged]
    without = store.reader.read_whole(facts, with_acl=False)
    assert without == WholeObject(given, A, has_acl=False)
    assert asked() == [("GET", ""), *tagged]
    assert store.reader.properties_of(facts) == given
    assert asked() == [("GET", "acl"), ("HEAD", ""), *tagged]


@pytest.mark.parametrize("named", ["a", "b", "KEY"])
def test_a_deletion_that_names_another_key_as_refused_tells_nothing(
    server: WireServer, client: S3Client, named: str
) -> None:
    """Else the one that stays would count as deleted."""
    error = f"<Error><Key>{named}</Key><Code>AccessDenied</Code></Error>"
    server.answers.append(answer(200, f"<DeleteResult>{error}</DeleteResult>".encode()))
    bucket = S3Bucket(client, "bucket", "p/", "bucket")
    with pytest.raises(StoreError, match="not named"):
        delete_versions(bucket, [("a", ""), ("key", "")])


def test_an_old_gateway_that_takes_tags_for_content_is_not_sent_any(
    server: WireServer, client: S3Client
) -> None:
    """GET ?tagging answers with the object there: nothing is put to ?tagging."""
    etag = 'ETag: "0cc175b9c0f1b6a831c399e269772661"\r\nServer: Ozone\r\n'
    server.answers.append(answer(200, listing(), etag))
    ok = answer(200, b"", etag + "x-amz-meta-treefold-pro_be: 1\r\n")
    itself = answer(200, b"the object itself", etag)
    # Questions of a probe are asked at a time, in any order.
    server.answer_to = lambda method, target: (
        None
        if server.answers
        else itself
        if (method, "?tagging" in target) == ("GET", True)
        else ok
    )
    with pytest.raises(StoreError):
        open_s3("s3://bucket", may_write=True, client=client)
    assert [one.method for one in server.arrived if "tagging" in one.target] == ["GET"]


def test_a_probe_that_only_reads_reads_small_objects(server: WireServer, client: S3Client) -> None:
    for size in (0, 1 << 30):
        page = listing("x").replace(b"<Size>1<", b"<Size>%d<" % size)
        server.answers += [answer(200, page), answer(200, VERSIONING)]
        open_s3("s3://bucket", may_write=False, client=client)
    assert {one.target.partition("?")[0] for one in server.arrived} == {"/bucket"}


@pytest.mark.parametrize(
    "pages",
    [
        [listing("b", "a")],
        [listing("a", "a")],
        [listing("\U0001f600", "\uff01")],
        [listing("b", token="t"), listing("a")],
        [listing("a", token="t"), listing("b", token="t")],
        [listing("a", token="t"), b"<ListBucketResult>"],
        [listing("a", token="t"), b""],
        [listing("other/b")],
    ],
)
def test_a_listing_that_cannot_be_whole_is_an_error(
    server: WireServer, client: S3Client, pages: list[bytes]
) -> None:
    server.answers += [answer(200, listing()), answer(200, VERSIONING)]
    store = open_s3("s3://bucket", may_write=False, client=client)
    server.answers += [answer(200, page) for page in pages]
    prefix = "p/" if b"other" in pages[0] else ""
    with pytest.raises(StoreError):
        list(store.lister.list_objects(prefix))


def test_of_a_store_that_is_read_only_the_refused_write_is_named(
    server: WireServer, client: S3Client
) -> None:
    refused = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    server.answers += [answer(200, listing("x")), answer(200, VERSIONING)]
    server.answers += [answer(403, refused)] * 2
    with pytest.raises(StoreError, match="cannot probe bucket: PUT"):
        open_s3("s3://bucket", may_write=True, client=client)
    # The scratch object could be there all the same.
    assert [one.method for one in server.arrived] == ["GET", "GET", "PUT", "POST"]


def test_an_etag_is_an_md5_only_if_an_object_proves_it(
    server: WireServer, client: S3Client
) -> None:
    etag = 'ETag: "0cc175b9c0f1b6a831c399e269772661"\r\n'
    for body, is_proven in ((A, True), (b"b", False)):
        server.answers += [
            answer(200, listing("x")),
            answer(200, VERSIONING),
            answer(200, b"", etag),
            answer(200, body, etag),
            answer(200, b"<Tagging><TagSet/></Tagging>"),
            answer(501),
        ]
        store = open_s3("s3://bucket", may_write=False, client=client)
        server.answers.append(answer(200, listing("x", "y")))
        hashes = [facts.hashes for facts in store.lister.list_objects("")]
        assert [len(one) for one in hashes] == [is_proven] * 2
        server.answers.clear()
    assert {one.method for one in server.arrived} == {"GET", "HEAD"}


@pytest.mark.parametrize("kind", ["Ceph Object Gateway", "another"])
def test_tags_that_ceph_dropped_are_none_and_an_empty_answer_of_others_is_an_error(
    server: WireServer, client: S3Client, kind: str
) -> None:
    said = f"Server: {kind}\r\n"
    server.answers += [answer(200, listing(), said), answer(200, VERSIONING)]
    store = open_s3("s3://bucket", may_write=False, client=client)
    facts = ObjectFacts("x", 1, "0cc175b9c0f1b6a831c399e269772661", 0)
    etag = f'ETag: "{facts.etag}"\r\nLast-Modified: Mon, 23 Nov 2026 12:00:00 GMT\r\n'
    whole = answer(200, A, etag + "x-amz-meta-a: b\r\n")
    server.answer_to = lambda _, target: answer(200) if "tagging" in target else whole
    if kind == "another":
        with pytest.raises(StoreError, match="XML"):
            store.reader.read_whole(facts)
        return
    found = store.reader.read_whole(facts)
    assert found.body == A
    assert found.properties == ObjectProperties(metadata=(("a", "b"),))


@pytest.mark.parametrize("second", [0, 1])
def test_a_whole_object_with_the_same_bytes_and_a_later_time_is_another_one(
    server: WireServer, client: S3Client, second: int
) -> None:
    """Its properties may be others."""
    server.answers += [answer(200, listing()), answer(200, VERSIONING)]
    store = open_s3("s3://bucket", may_write=False, client=client)
    server.answers.append(answer(200, listing("x")))
    (facts,) = store.lister.list_objects("")
    said = f'ETag: "{facts.etag}"\r\nLast-Modified: Mon, 23 Nov 2026 12:00:0{second} GMT\r\n'
    server.answers += [answer(200, b"<Tagging><TagSet/></Tagging>"), answer(200, A, said)]
    if second:
        with pytest.raises(PreconditionFailedError):
            store.reader.read_whole(facts)
    else:
        assert store.reader.read_whole(facts).body == A


@pytest.mark.parametrize("second", [0, 1])
def test_a_whole_object_of_ozone_is_described_by_a_head_of_the_same_version(
    server: WireServer, client: S3Client, second: int
) -> None:
    server.answers.append(answer(200, listing("x"), "Server: Ozone\r\n"))
    store = open_s3("s3://bucket", may_write=False, client=client)
    facts = ObjectFacts("x", 1, "0cc175b9c0f1b6a831c399e269772661", 1_795_435_200_000)
    said = f'ETag: "{facts.etag}"\r\nLast-Modified: Mon, 23 Nov 2026 12:00:0{second} GMT\r\n'
    server.answers += [answer(200, A, said), answer(200, A, said + "x-amz-meta-a: b\r\n")]
    server.arrived.clear()
    if second:
        with pytest.raises(PreconditionFailedError):
            store.reader.read_whole(facts)
    else:
        found = store.reader.read_whole(facts)
        assert found == WholeObject(ObjectProperties(metadata=(("a", "b"),)), A)
    # The gateway counts no tags, so that nothing more is asked.
    assert [one.method for one in server.arrived] == ["GET", "HEAD"]


def test_an_address_has_all_that_a_store_needs() -> None:
    location = S3Location.parse(
        "s3://bucket/a%20b/c?endpoint_url=http%3A%2F%2Fhost%3A1&region=r&profile=p&scratch_bucket=s"
    )
    assert (location.bucket, location.prefix, location.scratch_bucket) == ("bucket", "a b/c/", "s")
    assert location.settings.endpoint_url == "http://host:1"
    assert (location.settings.region, location.settings.profile) == ("r", "p")
    assert S3Location.parse("s3://bucket").prefix == ""
    assert S3Location.parse("s3://bucket/").prefix == ""
    for wrong in ("bucket", "s3://", "s3:///x", "s3://b?colour=x", "s3://b?region", "s3://u@b"):
        with pytest.raises(UsageError):
            S3Location.parse(wrong)


def test_scratch_keys_are_hidden_reserved_and_cleaned(s3_bucket: s3_servers.S3Bucket) -> None:
    with closing(s3_client(s3_bucket.endpoint)) as client:
        store = open_s3(f"s3://{s3_bucket.name}/below", may_write=True, client=client)
        with pytest.raises(UnsupportedObjectError):
            put(store, SCRATCH_PREFIX + "mine")
        assert store.scratch is not None
        left = put(store, store.scratch.new_key())
        upload = store.upload_writer.begin(store.scratch.new_key(), ObjectProperties())
        put(store, "object")
        assert keys(store) == ["object"]
        assert list(store.upload_reader.uploads("")) == []
        assert store.scratch.clean(before_ms=1) == 0
        assert store.reader.facts(left.key) is not None
        assert store.scratch.clean(before_ms=1 << 60) == 2
        assert store.reader.facts(left.key) is None
        assert upload
        assert keys(store) == ["object"]
        assert [unquote(key) for key in keys(store)] == ["object"]


def test_a_stitched_object_has_the_new_bytes_and_leaves_nothing(
    s3_bucket: s3_servers.S3Bucket,
) -> None:
    given = ObjectProperties(
        metadata=(("a", "b"),), tags=(("t", "u"),), headers=(("content-type", "text/x"),)
    )
    old = bytes(i * 31 % 251 for i in range(1 << 16)) * 176 + b"end"
    patches = [
        BytePatch(3, 0, b"inserted"),
        BytePatch(6 << 20, 5, b""),
        BytePatch(len(old), 0, b"appended"),
    ]
    with closing(s3_client(s3_bucket.endpoint)) as client:
        store = open_s3(f"s3://{s3_bucket.name}", may_write=True, client=client)
        base = put(store, "key", old)
        plan = plan_stitch(len(old), patches)
        assert isinstance(plan, StitchPlan)
        facts = stitch(store, base, plan, given)
        wanted = old[:3] + b"inserted" + old[3 : 6 << 20] + old[(6 << 20) + 5 :] + b"appended"
        assert content(store, facts) == wanted
        assert facts.size_bytes == plan.size_bytes == len(wanted)
        # It has no MD5; whatever CRC the store declares is that of the whole.
        assert set(facts.hashes) <= {crc_hash(crc, wanted) for crc in Crc}
        found = store.reader.properties("key")
        assert (found.metadata, found.tags, found.headers) == (
            given.metadata,
            given.tags,
            given.headers,
        )
        with pytest.raises(PreconditionFailedError):
            stitch(store, base, plan, given)
        assert content(store, current(store, "key")) == wanted
        assert store.scratch is not None
        assert store.scratch.clean(before_ms=1 << 60) == 0
        assert list(store.upload_reader.uploads("")) == []
