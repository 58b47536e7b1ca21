"""Every store keeps what it was given, byte for byte, or says that it cannot: one suite
for all adapters of the ports.
"""

import hashlib
import mmap
import random
import resource
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import groupby, zip_longest
from pathlib import Path

import crcmod
import fastcrc
import pytest
from blake3 import blake3

from proof.item import ContentHash, HashAlgorithm
from replicator.replication import PolicyId
from replicator.stores.errors import (
    DigestMismatchError,
    FeedGapError,
    ObjectMissingError,
    PositionTrimmedError,
    PreconditionFailedError,
    SnapshotLostError,
    StoreError,
    UnsupportedObjectError,
)
from replicator.stores.port import (
    ChangeBatch,
    ChangeKind,
    CopySource,
    FeedPosition,
    ObjectFacts,
    ObjectProperties,
    Store,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from replicator.stores.stamps import same_stamp
from replicator.syncer.store_health import StoreHealth, health_key
from runtime.rate_limit import SystemClock
from tests.support.stores import (
    ANYTHING,
    NOTHING,
    OPENERS,
    PEERS,
    ContractStore,
    OpenedStores,
    changes_after,
    content,
    current,
    keys,
    put,
)
from tests.support.waiting import wait_until

GIB = 1 << 30
# Each broke some tool: for signatures, paths, XML, listings, URLs or their order.
KEYS = [
    "plain",
    "folder/file",
    "folder/",
    "/leading",
    "//",
    "a//b",
    "a/./b",
    "..",
    "../up",
    "a/../b",
    ".",
    "a?b=c",
    "a%b",
    "%25",
    "%2F",
    "a+b c",
    "a b",
    " leading and trailing ",
    "a#b",
    "a&b;c<d>e",
    "quote\"s'",
    "back\\slash",
    "star*{}[]|^`~",
    "=:@$,!()",
    "ünïcödé",
    "u\u0308",
    "\u00fc",
    # By UTF-16 units an emoji sorts before the full-width forms, by UTF-8 after.
    "\uff01x",
    "😀1",
    "\U0010ffff",
    "\ue000",
    "日本語/キー",
    "CASE",
    "case",
    "n" * 1000,
    "é" * 500,
]
crc64nvme = crcmod.mkCrcFun(0x1AD93D23594C93659, 0, True, (1 << 64) - 1)
METADATA_2K = tuple((f"name-{i}", f"{i}" * (2048 // 8 - 6)) for i in range(8))


@pytest.fixture(
    params=[
        *(pytest.param(opener, id=name) for name, opener in OPENERS.items()),
        *(
            # Real servers are slower, and the first test waits for them to start.
            pytest.param(opener, id=name, marks=[mark, pytest.mark.timeout(900)])
            for name, (mark, opener) in PEERS.items()
        ),
    ]
)
def target(request: pytest.FixtureRequest) -> Iterator[ContractStore]:
    with request.param(request) as opened:
        yield opened


@pytest.fixture(scope="module")
def opened_stores() -> Iterator[OpenedStores]:
    with ExitStack() as stack:
        yield OpenedStores(stack)


@pytest.fixture
def store(target: ContractStore) -> Store:
    return target.store


def noise(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def check_left(target: ContractStore, wanted: Sequence[str]) -> None:
    """Check which keys are left right after a deletion."""
    if target.lists_deletes_at_once:
        assert keys(target.store) == wanted
    else:
        # Even a later listing may show one once more.
        wait_until(lambda: keys(target.store) == wanted, "deleted keys are listed no more")


def same(found: Iterable[ObjectFacts | None], wanted: Sequence[ObjectFacts]) -> bool:
    """Whether these are those, as far as the store describes them each time."""
    pairs = list(zip_longest(found, wanted))
    return all(ours is not None and theirs and same_stamp(ours, theirs) for ours, theirs in pairs)


def part_bytes(store: Store) -> int:
    """The smallest part that is taken, and larger than what fits a row."""
    return max(store.capabilities.part_bytes_min, 20_000)


def known_hashes(body: bytes) -> dict[HashAlgorithm, bytes]:
    return {
        HashAlgorithm.MD5: hashlib.md5(body).digest(),
        HashAlgorithm.SHA256: hashlib.sha256(body).digest(),
        HashAlgorithm.CRC32: fastcrc.crc32.iso_hdlc(body).to_bytes(4, "big"),
        HashAlgorithm.CRC32C: fastcrc.crc32.iscsi(body).to_bytes(4, "big"),
        HashAlgorithm.CRC64NVME: crc64nvme(body).to_bytes(8, "big"),
        HashAlgorithm.BLAKE3: blake3(body).digest(),
    }


def write_parts(
    store: Store, key: str, bodies: dict[int, bytes], properties: ObjectProperties = NOTHING
) -> tuple[UploadId, list[UploadedPart]]:
    upload = store.upload_writer.begin(key, properties)
    return upload, [
        store.upload_writer.write_part(key, upload, number, body) for number, body in bodies.items()
    ]


def test_every_key_is_kept_or_refused(target: ContractStore) -> None:
    store, kept = target.store, list[str]()
    for key in KEYS:
        if key in target.broken_keys:
            continue
        body = key.encode() + b" body"
        try:
            put(store, key, body)
        except UnsupportedObjectError:
            assert not target.keeps_all_keys or not store.capabilities.lists_all_keys
            continue
        kept.append(key)
        assert content(store, current(store, key)) == body
    assert keys(store) == sorted(kept, key=str.encode)
    assert len(kept) > len(KEYS) // 2
    for key in kept:
        assert content(store, current(store, key)) == key.encode() + b" body"
    assert store.writer.delete(kept) == []
    check_left(target, [])


@pytest.mark.parametrize("key", ["", "n" * 1025, "\ud800"], ids=["empty", "long", "surrogate"])
def test_a_key_that_no_store_takes_is_refused(store: Store, key: str) -> None:
    with pytest.raises(UnsupportedObjectError):
        put(store, key)
    with pytest.raises(UnsupportedObjectError):
        store.upload_writer.begin(key, NOTHING)
    assert keys(store) == []


def test_a_listing_begins_after_any_key_and_has_any_prefix(target: ContractStore) -> None:
    store = target.store
    with suppress(UnsupportedObjectError):
        for key in KEYS:
            if key not in target.broken_keys:
                put(store, key)
    found = keys(store)
    for after in [*found, "a", "z", "~~", "😀"]:
        assert keys(store, start_after=after) == [
            key for key in found if key.encode() > after.encode()
        ]
    for prefix in ("a", "a/", "/", "folder/", "!", "😀", "n" * 1000, "none", "é" * 3):
        below = [key for key in found if key.startswith(prefix)]
        assert keys(store, prefix) == below
        assert [facts.key for facts in store.lister.list_versions(prefix)] == below
        if below:
            assert keys(store, prefix, below[0]) == below[1:]
        # Before, among and after the keys of the prefix.
        assert keys(store, prefix, "\x01") == below
        assert keys(store, prefix, "\U0010ffff\U0010ffff") == []


def test_a_listing_of_several_pages_is_whole_and_in_order(target: ContractStore) -> None:
    store = target.store
    # The last key of a page may begin the first of the next.
    wanted = sorted(["!", *(f"{i:04}{end}" for i in range(550) for end in ("", "!"))])
    for key in random.Random(1).sample(wanted, len(wanted)):
        put(store, key, b"")
    assert keys(store) == wanted
    assert [facts.key for facts in store.lister.list_versions("")] == wanted
    assert keys(store, start_after=wanted[998]) == wanted[999:]
    assert store.writer.delete([*wanted, "missing"]) == []
    check_left(target, [])


@pytest.mark.parametrize("length", [0, 1, 16 << 10, (16 << 10) + 1, (3 << 20) + 1])
def test_a_body_comes_back_and_its_hashes_are_those_of_its_bytes(store: Store, length: int) -> None:
    body = noise(length, seed=length)
    facts = put(store, "key", body)
    assert facts.size_bytes == length
    assert same_stamp(current(store, "key"), facts)
    assert same(store.lister.list_objects(""), [facts])
    assert content(store, facts) == body
    known = known_hashes(body)
    assert {one.algorithm.value for one in facts.hashes} >= set(store.capabilities.whole_hashes)
    for one in facts.hashes:
        assert one.digest == known[one.algorithm]


def test_any_range_can_be_read_and_no_other(store: Store) -> None:
    body = noise(100_000)
    facts = put(store, "key", body)
    for first, end in [(0, 1), (0, 100_000), (99_999, 100_000), (16_383, 65_537), (7, None)]:
        assert content(store, facts, first, end) == body[first:end]
    assert content(store, facts, 5, 5) == b""
    for first, end in [(0, 100_001), (100_001, 100_002), (5, 4), (-1, 4)]:
        with pytest.raises(StoreError):
            content(store, facts, first, end)


def test_a_buffer_that_is_not_bytes_is_written_whole(store: Store, tmp_path: Path) -> None:
    body = noise(40_000)
    (tmp_path / "file").write_bytes(body)
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        for buffer in (mapped, bytearray(body), memoryview(body)):
            assert content(store, store.writer.put("key", buffer, NOTHING, ANYTHING)) == body
        upload = store.upload_writer.begin("parts", NOTHING)
        part = store.upload_writer.write_part("parts", upload, 1, mapped)
        facts = store.upload_writer.complete("parts", upload, [part], NOTHING, ANYTHING)
        assert content(store, facts) == body
        mapped.close()


ALL_KINDS = ObjectProperties(
    metadata=(("colour", "blue"), ("empty", ""), ("spaced", "a  b"), ("x-y.z-1", "=?;,\"'")),
    tags=(("Team", "a+b = c"), ("empty", ""), ("ü", "日本")),
    headers=(
        ("cache-control", "max-age=60, public"),
        ("content-disposition", 'attachment; filename="a.txt"'),
        ("content-encoding", "gzip"),
        ("content-language", "de"),
        ("content-type", "text/plain; charset=utf-8"),
        ("expires", "Wed, 21 Oct 2026 07:28:00 GMT"),
    ),
)


def supported(store: Store, properties: ObjectProperties) -> ObjectProperties:
    capabilities = store.capabilities
    changes_names = "keeps_underscores" in dict(capabilities.reasons)
    return replace(
        properties,
        metadata=tuple(
            (name, value)
            for name, value in properties.metadata
            if not (changes_names and "_" in name)
        ),
        tags=properties.tags if capabilities.keeps_tags else (),
        headers=properties.headers if capabilities.keeps_headers else (),
        acl=properties.acl if capabilities.keeps_acls else (),
    )


def user_given(found: ObjectProperties, given: ObjectProperties) -> ObjectProperties:
    """Without what a store adds by itself: a content type, the owner's grant."""
    headers = dict(found.headers)
    if "content-type" not in dict(given.headers):
        headers.pop("content-type", None)
    return replace(found, headers=tuple(sorted(headers.items())), acl=given.acl)


PROPERTIES = {
    "none": NOTHING,
    "all kinds": ALL_KINDS,
    "2 KiB": ObjectProperties(metadata=METADATA_2K),
    "ten tags": ObjectProperties(tags=tuple((f"tag{i}", f"value {i}") for i in range(10))),
    "long tags": ObjectProperties(tags=(("k" * 128, "v" * 256),)),
    "not ASCII": ObjectProperties(metadata=(("name", "grün 日本 😀"),)),
    "latin": ObjectProperties(metadata=(("name", "grün"),)),
    "blanks around": ObjectProperties(metadata=(("name", " x "),)),
    "like encoded words": ObjectProperties(metadata=(("name", "=?UTF-8?Q?gr=C3=BCn?="),)),
    "per cent": ObjectProperties(metadata=(("name", "100%25"),)),
    "underscore": ObjectProperties(metadata=(("a_b", "x"),)),
    "lines": ObjectProperties(metadata=(("name", "a\r\nx-amz-acl: public-read"),)),
    "eleven tags": ObjectProperties(tags=tuple((f"tag{i:02}", "x") for i in range(11))),
    "large": ObjectProperties(metadata=(("name", "x" * 9000),)),
}
# What every store keeps: a refusal of anything else is as good.
MUST_BE_KEPT = {"none", "all kinds", "2 KiB", "ten tags", "long tags"}


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("way", ["put", "parts", "put_properties"])
def test_properties_are_kept_or_refused_and_never_changed(
    store: Store, name: str, way: str
) -> None:
    given = supported(store, PROPERTIES[name])
    try:
        if way == "put":
            facts = store.writer.put("key", b"body", given, ANYTHING)
        elif way == "parts":
            upload, parts = write_parts(store, "key", {1: b"body"}, given)
            facts = store.upload_writer.complete("key", upload, parts, given, ANYTHING)
        else:
            before = store.writer.put("key", b"body", supported(store, ALL_KINDS), ANYTHING)
            facts = store.writer.put_properties(before, given)
            if store.capabilities.keeps_versions:
                assert not same_stamp(facts, before)
    except UnsupportedObjectError:
        assert name not in MUST_BE_KEPT
        if way == "put_properties":
            assert same_stamp(current(store, "key"), before)
            given = supported(store, ALL_KINDS)
        else:
            assert store.reader.facts("key") is None
            return
    else:
        assert same_stamp(current(store, "key"), facts)
    found = store.reader.properties("key")
    assert user_given(found, given) == given
    assert content(store, current(store, "key")) == b"body"


def test_tags_alone_are_replaced_and_the_object_stays_as_it_is_described(store: Store) -> None:
    if not store.capabilities.keeps_tags:
        return
    given = supported(store, ALL_KINDS)
    store.writer.put("key", b"body", given, ANYTHING)
    [before] = store.lister.list_objects("")
    changed = replace(given, tags=(("other", "1"),))
    facts = store.writer.put_properties(before, changed, tags_only=True)
    assert same(store.lister.list_objects(""), [facts])
    assert user_given(store.reader.properties("key"), changed) == changed
    assert content(store, facts) == b"body"


@pytest.mark.parametrize(
    "given",
    [
        ObjectProperties(metadata=(("Upper", "x"),)),
        ObjectProperties(metadata=(("a b", "x"),)),
        ObjectProperties(metadata=(("", "x"),)),
        ObjectProperties(metadata=(("a", "x"), ("a", "y"))),
        ObjectProperties(metadata=(("a", "\ud800"),)),
        ObjectProperties(headers=(("x-other", "x"),)),
        ObjectProperties(metadata=(("a", "x" * 100_000),)),
    ],
    ids=["upper", "blank", "empty", "twice", "surrogate", "header", "100 kB"],
)
def test_properties_that_no_store_keeps_are_refused(store: Store, given: ObjectProperties) -> None:
    with pytest.raises(UnsupportedObjectError):
        store.writer.put("key", b"x", given, ANYTHING)
    with pytest.raises(UnsupportedObjectError):
        store.upload_writer.begin("key", given)
    assert keys(store) == []
    facts = put(store, "key")
    with pytest.raises(UnsupportedObjectError):
        store.writer.put_properties(facts, given)
    assert same_stamp(current(store, "key"), facts)


def test_new_tags_answer_the_stamp_that_the_object_has_then(store: Store) -> None:
    if not store.capabilities.keeps_tags:
        return
    store.writer.put("key", b"body", ObjectProperties(tags=(("a", "b"),)), ANYTHING)
    (listed,) = store.lister.list_objects("")
    given = ObjectProperties(tags=(("c", "d"),))
    facts = store.writer.put_properties(listed, given, tags_only=True)
    (now,) = store.lister.list_objects("")
    assert same_stamp(now, facts)
    assert user_given(store.reader.properties_of(now), given) == given


def test_properties_are_those_of_just_this_object(store: Store) -> None:
    given = ObjectProperties(metadata=(("a", "b"),))
    first = store.writer.put("key", b"one", given, ANYTHING)
    assert store.reader.properties_of(first).metadata == given.metadata
    put(store, "key", b"two")
    if store.capabilities.keeps_versions:
        assert store.reader.properties_of(first).metadata == given.metadata
    else:
        with pytest.raises(PreconditionFailedError):
            store.reader.properties_of(first)
    with pytest.raises((PreconditionFailedError, ObjectMissingError)):
        store.reader.properties_of(replace(first, key="other"))


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 1200], ids=len)
def test_a_whole_object_is_its_bytes_and_properties(store: Store, body: bytes) -> None:
    given = ObjectProperties(
        metadata=(("a", "b"),), tags=(("c", "d"),) if store.capabilities.keeps_tags else ()
    )
    store.writer.put("key", body, given, ANYTHING)
    (listed,) = store.lister.list_objects("")
    found = store.reader.read_whole(listed)
    assert found.body == body
    assert found.properties == store.reader.properties_of(listed)
    assert user_given(found.properties, given) == given
    without = store.reader.read_whole(listed, with_acl=False)
    assert without.body == body
    acl = found.properties.acl if without.has_acl else ()
    assert without.properties == replace(found.properties, acl=acl)


def test_a_whole_object_is_just_this_one(store: Store) -> None:
    given = ObjectProperties(metadata=(("a", "b"),))
    first = store.writer.put("key", b"one", given, ANYTHING)
    put(store, "key", b"two")
    if store.capabilities.keeps_versions:
        found = store.reader.read_whole(first)
        assert (found.body, found.properties.metadata) == (b"one", given.metadata)
    else:
        with pytest.raises(PreconditionFailedError):
            store.reader.read_whole(first)
    with pytest.raises((PreconditionFailedError, ObjectMissingError)):
        store.reader.read_whole(replace(first, key="other"))


def test_a_write_if_absent_happens_once(store: Store) -> None:
    if not store.capabilities.creates_conditionally:
        return
    absent = WriteCondition(absent=True)
    first = store.writer.put("key", b"one", NOTHING, absent)
    with pytest.raises(PreconditionFailedError):
        store.writer.put("key", b"two" * 10_000, NOTHING, absent)
    assert same_stamp(current(store, "key"), first)
    assert store.writer.delete(["key"]) == []
    assert content(store, store.writer.put("key", b"three", NOTHING, absent)) == b"three"


def test_a_write_if_unchanged_replaces_that_object_only(store: Store) -> None:
    if not store.capabilities.replaces_conditionally:
        return
    first = put(store, "key", b"one")
    second = store.writer.put("key", b"two", NOTHING, WriteCondition(etag=first.etag))
    for etag in (first.etag, "0" * 32):
        with pytest.raises(PreconditionFailedError):
            store.writer.put("key", b"three" * 9000, NOTHING, WriteCondition(etag=etag))
    with pytest.raises(PreconditionFailedError):
        store.writer.put("other", b"x", NOTHING, WriteCondition(etag=first.etag))
    assert same(store.lister.list_objects(""), [second])


def test_an_upload_completes_if_its_condition_holds(store: Store) -> None:
    if not store.capabilities.completes_conditionally:
        return
    upload, parts = write_parts(store, "key", {1: b"new"})
    old = put(store, "key", b"old")
    for condition in (WriteCondition(absent=True), WriteCondition(etag="0" * 32)):
        with pytest.raises(PreconditionFailedError):
            store.upload_writer.complete("key", upload, parts, NOTHING, condition)
    assert same_stamp(current(store, "key"), old)
    # The upload is still there.
    done = store.upload_writer.complete(
        "key", upload, parts, NOTHING, WriteCondition(etag=old.etag)
    )
    assert content(store, done) == b"new"


def test_a_read_gets_the_bytes_of_its_facts_or_an_error(store: Store) -> None:
    first = put(store, "key", b"one" * 10_000)
    second = put(store, "key", b"two" * 10_000)
    assert content(store, second) == b"two" * 10_000
    if store.capabilities.keeps_versions:
        assert content(store, first) == b"one" * 10_000
    else:
        with pytest.raises(PreconditionFailedError):
            content(store, first)
        assert store.writer.delete(["key"]) == []
        with pytest.raises((PreconditionFailedError, ObjectMissingError)):
            content(store, second)
    with pytest.raises((PreconditionFailedError, ObjectMissingError)):
        content(store, replace(first, key="other"))


def test_what_does_not_exist_is_named(target: ContractStore) -> None:
    store = target.store
    put(store, "key")
    assert store.reader.facts("other") is None
    with pytest.raises(ObjectMissingError):
        store.reader.properties("other")
    if store.capabilities.keeps_versions:
        for version in ("0", "17171717171717171", "no version", "٣"):
            with pytest.raises((StoreError, AssertionError)):
                assert store.reader.facts("key", version=version) is not None
    upload = UploadId("0123456789abcdef0123456789abcdef")
    with pytest.raises((ObjectMissingError, target.missing_upload)):
        store.upload_writer.write_part("key", upload, 1, b"x")
    with pytest.raises((ObjectMissingError, target.missing_upload)):
        list(store.upload_reader.parts("key", upload))
    with pytest.raises((ObjectMissingError, target.missing_upload)):
        store.upload_writer.complete(
            "key", upload, [UploadedPart(1, 1, "0" * 32)], NOTHING, ANYTHING
        )
    store.upload_writer.abort("key", upload)


def test_properties_change_only_for_the_object_that_was_meant(store: Store) -> None:
    first = put(store, "key", b"one")
    put(store, "key", b"two")
    given = ObjectProperties(metadata=(("a", "b"),))
    with pytest.raises(PreconditionFailedError):
        store.writer.put_properties(first, given)
    with pytest.raises((PreconditionFailedError, ObjectMissingError)):
        store.writer.put_properties(replace(first, key="other"), given)
    assert store.reader.properties("key").metadata == ()


def test_versions_and_delete_markers_are_kept(target: ContractStore) -> None:
    store = target.store
    if not store.capabilities.keeps_versions:
        return
    written = [put(store, "b", body) for body in (b"1", b"22", b"333")]
    assert store.writer.delete(["b"]) == []
    put(store, "a")
    put(store, "c")
    found = list(store.lister.list_versions(""))
    assert [(facts.key, facts.is_delete_marker) for facts in found] == [
        ("a", False),
        ("b", True),
        ("b", False),
        ("b", False),
        ("b", False),
        ("c", False),
    ]
    assert same(found[2:5], written[::-1])
    assert len({facts.version for facts in found if facts.key == "b"}) == 4
    assert keys(store) == ["a", "c"]
    assert store.reader.facts("b") is None
    assert store.reader.facts("b", version=found[1].version) is None
    for facts, body in zip(written, (b"1", b"22", b"333"), strict=True):
        assert same([store.reader.facts("b", version=facts.version)], [facts])
        assert content(store, facts) == body
    with pytest.raises(ObjectMissingError):
        store.reader.properties("b")
    if target.reads_tags_below_markers:
        assert store.reader.properties("b", version=written[0].version).metadata == ()


def test_many_versions_of_one_key_are_listed_newest_first(store: Store) -> None:
    if not store.capabilities.keeps_versions:
        return
    put(store, "a")
    written = [put(store, "key", str(i).encode()) for i in range(1005)]
    put(store, "z")
    found = [facts for facts in store.lister.list_versions("") if facts.key == "key"]
    assert same(found, written[::-1])
    assert [key for key, _ in groupby(store.lister.list_versions(""), lambda f: f.key)] == [
        "a",
        "key",
        "z",
    ]


def test_parts_in_any_order_become_the_object(store: Store) -> None:
    size = part_bytes(store)
    bodies = {3: b"the end", 1: noise(size, 1), 2: noise(size + 1, 2)}
    given = ObjectProperties(metadata=(("a", "b"),))
    upload, parts = write_parts(store, "key", bodies, given)
    assert store.reader.facts("key") is None
    assert list(store.upload_reader.uploads("")) == [("key", upload)]
    assert list(store.upload_reader.parts("key", upload)) == sorted(parts, key=lambda p: p.number)
    facts = store.upload_writer.complete("key", upload, parts, given, ANYTHING)
    body = b"".join(bodies[number] for number in sorted(bodies))
    assert (content(store, facts), facts.size_bytes) == (body, len(body))
    assert same_stamp(current(store, "key"), facts)
    assert store.reader.properties("key").metadata == (("a", "b"),)
    assert content(store, facts, size - 5, size + 5) == body[size - 5 : size + 5]
    assert content(store, facts, 2 * size - 5) == body[2 * size - 5 :]
    assert {one.algorithm.value for one in facts.hashes} >= set(store.capabilities.whole_hashes)
    for one in facts.hashes:
        assert one.digest == known_hashes(body)[one.algorithm]
    assert list(store.upload_reader.uploads("")) == []


def test_a_part_has_its_md5_as_etag_where_the_store_says_so(store: Store) -> None:
    size = part_bytes(store)
    bodies = {1: noise(size, 1), 2: noise(size, 2), 3: b"end"}
    upload, _ = write_parts(store, "key", bodies)
    if store.capabilities.part_etags_are_md5:
        found = {part.number: part.etag for part in store.upload_reader.parts("key", upload)}
        assert found == {n: hashlib.md5(body).hexdigest() for n, body in bodies.items()}
    store.upload_writer.abort("key", upload)


def test_parts_are_compared_with_the_crc_of_the_whole_where_the_store_declares_one(
    store: Store,
) -> None:
    if not store.capabilities.upload_crc:
        return
    algorithm = HashAlgorithm(store.capabilities.upload_crc)
    size, body = part_bytes(store), noise(3 * part_bytes(store) - 5)
    base = put(store, "base", body)
    bodies = {1: body[:size], 2: body[size : 2 * size]}
    upload, parts = write_parts(store, "key", bodies)
    kept = CopySource("base", base.version, base.etag, 2 * size, len(body))
    parts.append(store.upload_writer.copy_part("key", upload, 3, kept))
    whole = ContentHash(algorithm, known_hashes(body)[algorithm])
    other = ContentHash(algorithm, known_hashes(body[1:])[algorithm])
    if "upload_crc" not in dict(store.capabilities.reasons):
        with pytest.raises(DigestMismatchError):
            store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING, other)
        assert store.reader.facts("key") is None
    facts = store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING, whole)
    assert whole in facts.hashes
    assert whole in current(store, "key").hashes
    assert content(store, facts) == body


def test_an_upload_goes_on_where_it_was_left(store: Store) -> None:
    size = part_bytes(store)
    upload, _ = write_parts(store, "a/key", {1: noise(size, 1), 2: noise(size, 9)})
    other, _ = write_parts(store, "b", {1: b"x"})
    # Nothing of the process that began is known but what the store has.
    assert list(store.upload_reader.uploads("a/")) == [("a/key", upload)]
    assert sorted(store.upload_reader.uploads("")) == [("a/key", upload), ("b", other)]
    store.upload_writer.write_part("a/key", upload, 2, noise(size, 2))
    store.upload_writer.write_part("a/key", upload, 5, b"end")
    parts = list(store.upload_reader.parts("a/key", upload))
    assert [(part.number, part.size_bytes) for part in parts] == [(1, size), (2, size), (5, 3)]
    facts = store.upload_writer.complete("a/key", upload, parts, NOTHING, ANYTHING)
    assert content(store, facts) == noise(size, 1) + noise(size, 2) + b"end"
    assert list(store.upload_reader.uploads("")) == [("b", other)]


def test_a_part_that_was_not_named_is_no_part_of_the_object(target: ContractStore) -> None:
    store = target.store
    size = part_bytes(store)
    upload, parts = write_parts(store, "key", {1: noise(size, 1), 2: noise(size, 2), 3: b"3"})
    if not target.completes_some_parts:
        with pytest.raises(StoreError, match="InvalidPart"):
            store.upload_writer.complete("key", upload, parts[::2], NOTHING, ANYTHING)
        assert list(store.upload_reader.parts("key", upload)) == parts
        return
    facts = store.upload_writer.complete("key", upload, [parts[0], parts[2]], NOTHING, ANYTHING)
    assert content(store, facts) == noise(size, 1) + b"3"


def test_a_completed_upload_is_completed_no_second_time(target: ContractStore) -> None:
    store = target.store
    upload, parts = write_parts(store, "key", {1: b"one"})
    first = store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING)
    try:
        again = store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING)
    except ObjectMissingError:
        again = first
    assert (again.etag, again.version) == (first.etag, first.version)
    assert same(store.lister.list_versions(""), [first])
    with pytest.raises((ObjectMissingError, target.missing_upload)):
        store.upload_writer.write_part("key", upload, 2, b"two")


def test_an_aborted_upload_is_gone(target: ContractStore) -> None:
    store = target.store
    upload, parts = write_parts(store, "key", {1: noise(part_bytes(store))})
    store.upload_writer.abort("key", upload)
    store.upload_writer.abort("key", upload)
    assert list(store.upload_reader.uploads("")) == []
    for action in (
        lambda: store.upload_writer.write_part("key", upload, 1, b"x"),
        lambda: store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING),
        lambda: list(store.upload_reader.parts("key", upload)),
    ):
        with pytest.raises((ObjectMissingError, target.missing_upload)):
            action()
    assert keys(store) == []


def test_an_upload_with_other_parts_than_the_store_has_is_not_completed(store: Store) -> None:
    upload, parts = write_parts(store, "key", {1: b"one"})
    wrong: list[list[UploadedPart]] = [
        [],
        [replace(parts[0], etag="0" * 32)],
        [replace(parts[0], number=2)],
        [parts[0], replace(parts[0], number=2)],
        [parts[0], parts[0]],
    ]
    for named in wrong:
        with pytest.raises(StoreError):
            store.upload_writer.complete("key", upload, named, NOTHING, ANYTHING)
    assert keys(store) == []
    assert (
        content(store, store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING))
        == b"one"
    )


def test_part_numbers_are_those_of_s3(store: Store) -> None:
    upload = store.upload_writer.begin("key", NOTHING)
    for number in (-1, 0, 10_001):
        with pytest.raises(StoreError):
            store.upload_writer.write_part("key", upload, number, b"x")
    last = store.upload_writer.write_part("key", upload, 10_000, b"last")
    facts = store.upload_writer.complete("key", upload, [last], NOTHING, ANYTHING)
    assert content(store, facts) == b"last"


def test_a_small_part_before_the_last_is_refused_where_parts_have_a_least_size(
    target: ContractStore,
) -> None:
    store = target.store
    upload, parts = write_parts(store, "key", {1: b"small", 2: b"last"})
    if store.capabilities.part_bytes_min and target.refuses_small_parts:
        with pytest.raises(StoreError):
            store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING)
        assert keys(store) == []
    else:
        facts = store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING)
        assert content(store, facts) == b"smalllast"


def test_a_range_of_an_object_becomes_a_part(store: Store) -> None:
    if not store.capabilities.copies_ranges:
        return
    size, writer = part_bytes(store), store.upload_writer
    body = noise(3 * size)
    base = put(store, "base", body)

    def source(first: int, end: int) -> CopySource:
        return CopySource("base", base.version, base.etag, first, end)

    upload = writer.begin("key", NOTHING)
    parts = [
        writer.copy_part("key", upload, 1, source(1, size + 1)),
        writer.write_part("key", upload, 2, noise(size, 5)),
        writer.copy_part("key", upload, 3, source(2 * size - 1, 3 * size)),
    ]
    assert [part.size_bytes for part in parts] == [size, size, size + 1]
    facts = writer.complete("key", upload, parts, NOTHING, ANYTHING)
    expected = body[1 : size + 1] + noise(size, 5) + body[2 * size - 1 :]
    assert content(store, facts) == expected
    for one in facts.hashes:
        if one.algorithm is HashAlgorithm.CRC32C:
            assert one.digest == fastcrc.crc32.iscsi(expected).to_bytes(4, "big")
    # Onto itself, from an object that was itself put together.
    upload = writer.begin("key", NOTHING)
    pinned = CopySource("key", facts.version, facts.etag, size - 3, 2 * size + 3)
    again = writer.complete(
        "key", upload, [writer.copy_part("key", upload, 1, pinned)], NOTHING, ANYTHING
    )
    assert content(store, again) == expected[size - 3 : 2 * size + 3]
    # The object does not depend on what it was copied from.
    assert store.writer.delete(["base"]) == []
    assert content(store, again) == expected[size - 3 : 2 * size + 3]


def test_a_range_of_another_object_than_meant_is_not_copied(store: Store) -> None:
    if not store.capabilities.copies_ranges:
        return
    size = part_bytes(store)
    old = put(store, "base", noise(size, 1))
    put(store, "base", noise(size, 2))
    upload = store.upload_writer.begin("key", NOTHING)
    refused = [
        CopySource("base", "", old.etag, 0, size),
        CopySource("none", "", old.etag, 0, size),
        CopySource("base", "", current(store, "base").etag, 0, size + 1),
        CopySource("base", "", current(store, "base").etag, 5, 4),
    ]
    for source in refused:
        with pytest.raises(StoreError):
            store.upload_writer.copy_part("key", upload, 1, source)
    assert list(store.upload_reader.parts("key", upload)) == []
    if store.capabilities.keeps_versions:
        part = store.upload_writer.copy_part(
            "key", upload, 1, CopySource("base", old.version, old.etag, 0, size)
        )
        facts = store.upload_writer.complete("key", upload, [part], NOTHING, ANYTHING)
        assert content(store, facts) == noise(size, 1)


def test_ten_thousand_parts_become_an_object(target: ContractStore) -> None:
    if not target.takes_large:
        return
    store = target.store
    upload, parts = write_parts(store, "key", {i: b"%05d" % i for i in range(10_000, 0, -1)})
    assert len(list(store.upload_reader.parts("key", upload))) == 10_000
    facts = store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING)
    body = b"".join(b"%05d" % i for i in range(1, 10_001))
    assert content(store, facts) == body
    assert content(store, facts, 24_998, 25_012) == body[24_998:25_012]
    assert facts.hashes[0].digest == fastcrc.crc32.iscsi(body).to_bytes(4, "big")


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Private memory for 256 MiB more than now; maps of files do not count."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + (256 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.usefixtures("little_memory")
def test_five_gigabytes_cross_without_being_in_memory(
    target: ContractStore, tmp_path: Path
) -> None:
    if not target.takes_large:
        return
    size = 5 * GIB
    store, marks = target.store, {0: b"begin", size // 2 - 2: b"middle", size - 3: b"end"}
    # On a disk: where memory is the file system, a map fills the holes that it reads.
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        for at, mark in marks.items():
            file.seek(at)
            file.write(mark)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        # Else every page of a hole is a fault of its own, twice the time of all hashes.
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        view = memoryview(mapped)
        upload = store.upload_writer.begin("key", NOTHING)
        # S3 takes parts of up to 5 GiB: one large, one small.
        bodies = [view[: size - 100], view[size - 100 :]]
        parts = [
            store.upload_writer.write_part("key", upload, number, body)
            for number, body in enumerate(bodies, start=1)
        ]
        facts = store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING)
        for body in (*bodies, view):
            body.release()
        mapped.close()
    assert facts.size_bytes == size
    for at, mark in marks.items():
        assert content(store, facts, at, at + len(mark)) == mark
    # Sparse there as here: the folder has not grown by gigabytes.
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert used < 100 << 20


def test_many_keys_are_deleted_at_once_and_missing_ones_count_as_deleted(
    target: ContractStore,
) -> None:
    store = target.store
    for number in range(50, 1100, 50):
        put(store, f"{number:04}")
    put(store, "stays")
    assert store.writer.delete([]) == []
    assert store.writer.delete([f"{i:04}" for i in range(1100)]) == []
    check_left(target, ["stays"])
    assert store.writer.delete(["stays", "stays"]) == []
    check_left(target, [])


def test_the_feed_reports_each_change_once_in_order(target: ContractStore) -> None:
    store, feed = target.store, target.store.feed
    if feed is None or not target.tells_each_change:
        return
    begun = feed.position()
    assert feed.read(begun) == ChangeBatch((), begun, begun.index)
    first = put(store, "a")
    second = put(store, "b")
    third = store.writer.put_properties(first, ObjectProperties(metadata=(("a", "b"),)))
    assert store.writer.delete(["b", "b", "missing"]) == []
    upload, parts = write_parts(store, "c", {1: b"x"})
    fourth = store.upload_writer.complete("c", upload, parts, NOTHING, ANYTHING)
    found = changes_after(feed, begun)
    assert [(change.key, change.kind) for change in found] == [
        ("a", ChangeKind.PUT),
        ("b", ChangeKind.PUT),
        ("a", ChangeKind.PUT),
        ("b", ChangeKind.DELETE),
        ("c", ChangeKind.PUT),
    ]
    indexes = [change.index for change in found]
    assert indexes == sorted(set(indexes))
    assert feed.position() == replace(begun, index=indexes[-1])
    written = [change for change in found if change.kind is ChangeKind.PUT]
    assert [change.version for change in written] == [
        facts.version for facts in (first, second, third, fourth)
    ]
    for change, facts in zip(written, (first, second, third, fourth), strict=True):
        assert change.facts is None or same_stamp(change.facts, facts)
        assert change.time_ms >= 0
    for number, index in enumerate(indexes, start=1):
        assert changes_after(feed, replace(begun, index=index)) == found[number:]


def test_a_feed_is_read_page_by_page(target: ContractStore) -> None:
    store, feed = target.store, target.store.feed
    if feed is None or not target.tells_each_change:
        return
    begun = at = feed.position()
    for i in range(1050):
        put(store, f"{i}", b"")
    found, pages = list[str](), 0
    while (batch := feed.read(at)).position != at:
        assert batch.changes
        assert batch.newest_index == feed.position().index
        found += [change.key for change in batch.changes]
        at, pages = batch.position, pages + 1
    assert pages > 1
    assert found == [f"{i}" for i in range(1050)]
    assert at == feed.position() != begun


def test_a_position_of_another_log_is_a_gap(store: Store) -> None:
    feed = store.feed
    if feed is None:
        return
    put(store, "a")
    now = feed.position()
    for wrong in (FeedPosition("another", now.index), replace(now, index=now.index + 1)):
        with pytest.raises(FeedGapError):
            feed.read(wrong)


def test_a_renamed_object_is_the_same_by_another_key(target: ContractStore) -> None:
    store, renamer = target.store, target.store.renamer
    if renamer is None:
        return
    blue = ObjectProperties(metadata=(("colour", "blue"),))
    first = store.writer.put("a", b"body" * 9000, blue, ANYTHING)
    other = put(store, "taken")
    begun = store.feed.position() if store.feed and target.tells_each_change else None
    with pytest.raises(PreconditionFailedError):
        renamer.rename(first, "taken")
    with pytest.raises(PreconditionFailedError):
        renamer.rename(replace(first, etag="0" * 32), "free")
    with pytest.raises(PreconditionFailedError):
        renamer.rename(replace(first, key="missing"), "free")
    made = renamer.rename(first, "new")
    assert (made.key, made.size_bytes, made.etag) == ("new", first.size_bytes, first.etag)
    assert same(store.lister.list_objects(""), [current(store, "new"), other])
    assert content(store, made) == b"body" * 9000
    assert user_given(store.reader.properties("new"), blue) == blue
    assert store.reader.facts("a") is None
    with pytest.raises(PreconditionFailedError):
        renamer.rename(first, "again")
    if begun is not None and store.feed is not None:
        (change,) = changes_after(store.feed, begun)
        assert (change.kind, change.key, change.previous_key) == (ChangeKind.RENAME, "new", "a")
    # The old key is free, and the new one an object as any other.
    put(store, "a", b"y")
    assert store.writer.delete(["new"]) == []
    assert renamer.rename(current(store, "a"), "new").key == "new"
    assert keys(store) == ["new", "taken"]


def test_a_snapshot_shows_what_was_there(target: ContractStore) -> None:
    store, snapshots = target.store, target.store.snapshots
    if snapshots is None:
        return
    blue = ObjectProperties(metadata=(("colour", "blue"),))
    first = store.writer.put("a", b"old" * 9000, blue, ANYTHING)
    put(store, "b")
    made = snapshots.create("one")
    if store.feed is not None and target.tells_each_change:
        assert made.position == store.feed.position()
    assert snapshots.find("one") == made
    assert snapshots.find("two") is None
    assert list(snapshots.named("on")) == [made]
    assert list(snapshots.named("two")) == []
    with pytest.raises(PreconditionFailedError):
        snapshots.create("one")
    put(store, "a", b"new")
    put(store, "c")
    assert store.writer.delete(["b"]) == []
    view = snapshots.open(made)
    assert [facts.key for facts in view.lister.list_objects("")] == ["a", "b"]
    assert view.reader.facts("c") is None
    assert user_given(view.reader.properties("a"), blue) == blue
    found = view.reader.facts("a")
    assert found is not None
    assert same_stamp(found, first)
    whole = view.reader.read_whole(found)
    assert (user_given(whole.properties, blue), whole.body) == (blue, b"old" * 9000)
    with view.reader.read(found, first=1, end=4) as pieces:
        assert b"".join(pieces) == b"ldo"
    snapshots.delete("one")
    snapshots.delete("one")
    assert list(snapshots.named("")) == []
    again = snapshots.create("one" if target.frees_names_at_once else "another")
    assert again.snapshot_id != made.snapshot_id
    reads: list[Callable[[], object]] = [
        lambda: list(view.lister.list_objects("")),
        lambda: view.reader.facts("a"),
        lambda: view.reader.properties("a"),
        lambda: view.reader.read_whole(found),
        lambda: list(snapshots.difference(made, again)),
        lambda: list(snapshots.difference(again, made)),
    ]
    for read in reads:
        with pytest.raises(SnapshotLostError):
            read()


def test_the_difference_of_snapshots_names_what_changed_between_them(store: Store) -> None:
    snapshots = store.snapshots
    if snapshots is None:
        return
    for key in ("changed", "gone", "stays", "moved", "replaced"):
        put(store, key)
    older = snapshots.create("older")
    put(store, "changed", b"y")
    assert store.writer.delete(["gone", "replaced"]) == []
    put(store, "new")
    put(store, "replaced", b"y")
    put(store, "passing")
    assert store.writer.delete(["passing"]) == []
    if store.renamer is not None:
        store.renamer.rename(current(store, "moved"), "there")
    newer = snapshots.create("newer")
    put(store, "later")
    changes = list(snapshots.difference(older, newer))
    named = {(change.key, change.previous_key, change.kind) for change in changes}
    assert all(change.index == 0 for change in changes)
    assert {("changed", "", ChangeKind.PUT), ("gone", "", ChangeKind.DELETE)} <= named
    assert {("new", "", ChangeKind.PUT), ("replaced", "", ChangeKind.PUT)} <= named
    touched = {one[0] for one in named} | {one[1] for one in named}
    moved = {"moved", "there"} if store.renamer is not None else set[str]()
    assert touched - {"", "passing"} == {"changed", "gone", "new", "replaced"} | moved
    assert list(snapshots.difference(newer, newer)) == []


def test_a_failed_write_is_no_change(target: ContractStore) -> None:
    store, feed = target.store, target.store.feed
    if feed is None or not target.tells_each_change:
        return
    put(store, "key")
    before = feed.position()
    failures: list[Callable[[], object]] = [
        lambda: store.writer.put("key", b"x", NOTHING, WriteCondition(absent=True)),
        lambda: store.writer.put("key", b"x" * 50_000, NOTHING, WriteCondition(etag="0")),
        lambda: put(store, ""),
    ]
    for failure in failures:
        with pytest.raises(StoreError):
            failure()
    assert (feed.position(), changes_after(feed, before)) == (before, [])
    with pytest.raises(PositionTrimmedError):
        feed.read(replace(before, index=-1))


def test_a_question_whether_a_store_answers_leaves_nothing(store: Store) -> None:
    """Nor does one that a killed process has begun, once there was another."""
    policy = PolicyId("policy-1")
    for key in ("a", "b"):
        put(store, key, b"body")
    store.upload_writer.begin(health_key(policy), NOTHING)
    health = StoreHealth(store, store, policy, SystemClock())
    for _ in range(2):
        assert health.ask(avoided={"a"}).both_answer
    assert keys(store) == ["a", "b"]
    assert list(store.upload_reader.uploads("")) == []
