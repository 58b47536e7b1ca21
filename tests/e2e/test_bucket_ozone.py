"""`treefold bucket` with Ozone's gateway as the target and as the source, whose
listings lose keys and whose ETags prove nothing. Run by `make test-ozone`.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from replicator.stores.port import ObjectProperties, Store
from replicator.windows import WINDOW_BYTES
from tests.support.bucket_commands import (
    ODD_KEYS,
    RICH,
    BucketPair,
    digest,
    held,
    opened,
    s3_address,
    write_all,
    write_large,
)
from tests.support.s3_servers import S3Bucket, S3Endpoint
from tests.support.stores import ANYTHING, current
from tests.support.waiting import wait_until
from tests.support.wan import Traffic, WanLink

pytestmark = [pytest.mark.ozone, pytest.mark.timeout(900)]

MIB = 1 << 20
# A request of a stitched patch costs about 1.1 kB, and there are 12 of them.
STITCHED_BYTES_MAX = 32_000
# Of a PUT of 4 KiB with metadata and a tag, by byte of the body.
PUT_RATIO_MAX = 1.25
OWNED = ObjectProperties(metadata=(("owner", "a" * 44),), tags=(("team", "red"),))
# A sync of one tag, and a key of DeleteObjects.
TAG_BYTES_MAX = 1_500
DELETE_BYTES_MAX = 100
# What the gateway takes for the creation of a bucket, or answers with an error.
HARMFUL = ("versioning", "acl", "versions", "attributes")


@dataclass(frozen=True)
class OzonePair:
    """A local source, and a bucket of Ozone behind a link as the target."""

    source: Store
    target: S3Bucket
    commands: BucketPair
    link: WanLink


@pytest.fixture
def ozone_pair(ozone_gateway: S3Endpoint, tmp_path: Path) -> Iterator[OzonePair]:
    target, source = ozone_gateway.fresh_bucket(), f"local:{tmp_path}/source"
    with WanLink(ozone_gateway.address) as link, opened(source, ozone_gateway) as store:
        address = s3_address(target, link.through(ozone_gateway))
        commands = BucketPair(source, address, tmp_path / "state", ozone_gateway)
        yield OzonePair(store, target, commands, link)


def beside_listings(traffic: Traffic) -> int:
    """All bytes but those of listings, which are the comparison: a run that changes
    something compares once more afterwards.
    """
    return traffic.total.length_bytes - traffic.kinds["GET bucket?list-type"].length_bytes


def check_harmless(traffic: Traffic) -> None:
    """No request named a sub-resource by which Ozone loses data."""
    assert not [kind for kind in traffic.kinds if kind.rpartition("?")[2] in HARMFUL]


def test_what_crosses_to_ozone_is_kept_and_never_said_to_be_equal(ozone_pair: OzonePair) -> None:
    bodies = write_all(ozone_pair.source)
    first = ozone_pair.commands.sync()
    assert (first.exit_status, first.last["failed"]) == (5, []), first.last
    assert (first.last["copied"], first.last["equal"]) == (len(bodies), False)
    # What the listing loses is not compared, but it is there.
    with ozone_pair.target.endpoint.client() as client:
        for key, body in bodies.items():
            answer = client.get_object(Bucket=ozone_pair.target.name, Key=key)
            assert answer["Body"].read() == body, key
            head = client.head_object(Bucket=ozone_pair.target.name, Key=key)
            given = RICH.get(key.removeprefix("rich/"), ObjectProperties())
            assert head["Metadata"] == dict(given.metadata)
            tags = client.get_object_tagging(Bucket=ozone_pair.target.name, Key=key)["TagSet"]
            assert {tag["Key"]: tag["Value"] for tag in tags} == dict(given.tags)
    ozone_pair.source.writer.delete(["plain", "😀1"])
    again = ozone_pair.commands.sync("--delete")
    assert (again.exit_status, again.last["deleted"], again.last["equal"]) == (3, 0, False)
    assert again.last["bytes"] == 0
    for level in ("listed", "recorded", "read"):
        assert not ozone_pair.commands.verify(level).last["equal"]
    with ozone_pair.target.endpoint.client() as client:
        for key in bodies:
            client.head_object(Bucket=ozone_pair.target.name, Key=key)
    check_harmless(ozone_pair.link.traffic())


def test_keys_that_the_listing_of_the_source_loses_are_not_deleted(
    ozone_gateway: S3Endpoint, tmp_path: Path
) -> None:
    bucket = ozone_gateway.fresh_bucket()
    # The gateway reads a row more than a page has, sorts by UTF-16 and drops the last.
    keys = ["\uff01", *(f"😀{number:03}" for number in range(1000))]
    with ozone_gateway.client() as client, ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda key: client.put_object(Bucket=bucket.name, Key=key), keys))
    with WanLink(ozone_gateway.address) as link:
        commands = BucketPair(
            s3_address(bucket, link.through(ozone_gateway)),
            f"local:{tmp_path}/target",
            tmp_path / "state",
            ozone_gateway,
        )
        with opened(commands.target, ozone_gateway) as target:
            for key in keys:
                target.writer.put(key, b"", ObjectProperties(), ANYTHING)
        with opened(commands.source, ozone_gateway) as source:
            listed = {facts.key for facts in source.lister.list_objects("")}
        assert listed == set(keys[1:]), "this gateway lists all keys: the guard is needed no more"
        report = commands.sync("--delete")
        assert (report.exit_status, report.last["equal"], report.last["deleted"]) == (3, False, 0)
        with opened(commands.target, ozone_gateway) as target:
            assert {facts.key for facts in target.lister.list_objects("")} == set(keys)
        check_harmless(link.traffic())


def test_a_small_object_crosses_with_few_bytes_beside_its_own(ozone_pair: OzonePair) -> None:
    count = 100
    for number in range(count):
        body = random.Random(number).randbytes(4096)
        ozone_pair.source.writer.put(f"folder/of/objects/{number:08}", body, OWNED, ANYTHING)
    ozone_pair.commands.sync()
    ozone_pair.link.reset()
    # The probe alone.
    ozone_pair.commands.sync()
    probe = ozone_pair.link.traffic().kinds["PUT object"]
    for number in range(count):
        body = random.Random(number + count).randbytes(4096)
        ozone_pair.source.writer.put(f"folder/of/objects2/{number:07}", body, OWNED, ANYTHING)
    ozone_pair.link.reset()
    assert ozone_pair.commands.sync().last["copied"] == count
    puts = ozone_pair.link.traffic().kinds["PUT object"]
    assert puts.requests - probe.requests == count
    ratio = (puts.length_bytes - probe.length_bytes) / (count * 4096)
    assert ratio <= PUT_RATIO_MAX


def test_one_byte_of_a_large_object_crosses_as_its_window(ozone_pair: OzonePair) -> None:
    body = bytearray(random.Random(2).randbytes(64 * MIB))
    ozone_pair.source.writer.put("large", bytes(body), OWNED, ANYTHING)
    assert ozone_pair.commands.sync().last["copied"] == 1
    ozone_pair.link.reset()
    assert ozone_pair.commands.sync().last["copied"] == 0
    without_change = beside_listings(ozone_pair.link.traffic())
    body[40 * MIB + 5] ^= 1
    ozone_pair.source.writer.put("large", bytes(body), OWNED, ANYTHING)
    ozone_pair.link.reset()
    changed = ozone_pair.commands.sync()
    traffic = ozone_pair.link.traffic()
    assert (changed.last["copied"], changed.last["failed"]) == (1, []), changed.last
    assert changed.last["bytes"] <= WINDOW_BYTES
    assert beside_listings(traffic) - without_change <= STITCHED_BYTES_MAX, traffic
    check_harmless(traffic)
    found = held(ozone_pair.target, has_acls=False)
    assert set(found) == {"large"}
    assert found["large"].body == digest(bytes(body))
    assert found["large"].metadata == dict(OWNED.metadata)
    assert found["large"].tags == dict(OWNED.tags)


def test_one_tag_crosses_in_one_small_request(ozone_pair: OzonePair) -> None:
    ozone_pair.source.writer.put("tagged", random.Random(5).randbytes(20 * MIB), OWNED, ANYTHING)
    assert ozone_pair.commands.sync().last["copied"] == 1
    ozone_pair.link.reset()
    ozone_pair.commands.sync()
    without_change = beside_listings(ozone_pair.link.traffic())
    blue = ObjectProperties(OWNED.metadata, (("team", "blue"),))
    facts = current(ozone_pair.source, "tagged")
    ozone_pair.source.writer.put_properties(facts, blue, tags_only=True)
    ozone_pair.link.reset()
    assert ozone_pair.commands.sync().last["metadataOnly"] == 1
    traffic = ozone_pair.link.traffic()
    assert beside_listings(traffic) - without_change <= TAG_BYTES_MAX, traffic
    assert held(ozone_pair.target, has_acls=False)["tagged"].tags == dict(blue.tags)
    check_harmless(traffic)


def test_many_keys_are_deleted_in_one_request(ozone_gateway: S3Endpoint) -> None:
    """No sync deletes there: this is what its adapter does where one asks it to."""
    bucket = ozone_gateway.fresh_bucket()
    keys = [f"folder/of/objects/{number:08}" for number in range(1_000)]
    with ozone_gateway.client() as client, ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda key: client.put_object(Bucket=bucket.name, Key=key), keys))
    with WanLink(ozone_gateway.address) as link:
        there = link.through(ozone_gateway)
        with opened(s3_address(bucket, there), there) as store:
            link.reset()
            assert store.writer.delete(keys) == []
            traffic = link.traffic()
            # Ozone may list what it has just deleted once more: see ContractStore.
            wait_until(lambda: not list(store.lister.list_objects("")), "no key is listed")
    assert set(traffic.kinds) == {"POST bucket?delete"}
    assert traffic.total.length_bytes <= DELETE_BYTES_MAX * len(keys), traffic


def test_what_ozone_has_crosses_from_it(ozone_gateway: S3Endpoint, tmp_path: Path) -> None:
    bucket = ozone_gateway.fresh_bucket()
    target = f"local:{tmp_path}/target"
    commands = BucketPair(s3_address(bucket), target, tmp_path / "state", ozone_gateway)
    with opened(commands.source, ozone_gateway) as source:
        bodies = write_all(source, keeps_headers=False)
        body = random.Random(4).randbytes(20 * MIB)
        write_large(source, "large", body, OWNED)
        bodies["large"] = body
        listed = {facts.key for facts in source.lister.list_objects("")}
    report = commands.sync()
    assert (report.exit_status, report.last["failed"], report.last["equal"]) == (5, [], False)
    with opened(target, ozone_gateway) as store:
        held_here = {facts.key for facts in store.lister.list_objects("")}
        assert held_here == listed
        assert listed >= set(bodies) - set(ODD_KEYS)
        for key in held_here:
            with store.reader.read(current(store, key)) as pieces:
                assert b"".join(pieces) == bodies[key]
        assert store.reader.properties("rich/metadata").metadata == RICH["metadata"].metadata
        assert store.reader.properties("rich/tags").tags == RICH["tags"].tags
        assert store.reader.properties("large").metadata == OWNED.metadata
