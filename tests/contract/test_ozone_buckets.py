"""A bucket of Ozone by its OM: its log tells every change, its snapshots hold, what is
lost is named. On a twin in memory, and on a real Ozone by `make test-ozone`.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.bucket_policies import prechecked
from admin.cli import treefold
from merkle.object_checksum import Crc
from ozone.manager_values import BucketLayout, ManagerBucket
from proof.item import HashAlgorithm
from replicator.hashing import crc_hash
from replicator.prechecks import Precheck
from replicator.stores.errors import (
    FeedGapError,
    PositionTrimmedError,
    SnapshotLostError,
    StoreError,
    UnsupportedObjectError,
)
from replicator.stores.port import ChangeKind, FeedPosition, ObjectProperties, Store
from replicator.stores.stamps import same_stamp
from tests.support.bucket_commands import BucketPair, write_large
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.ozone_twin_service import TwinService
from tests.support.stores import ANYTHING, NOTHING, changes_after, content, current, keys, put
from tests.support.waiting import wait_until

FLAT, TREE = BucketLayout.OBJECT_STORE, BucketLayout.FILE_SYSTEM_OPTIMIZED
MIB = 1 << 20
# What a key has whose writer has given no ACL.
OWN = (("user:any", "a"),)
# Once in both orders by which an OM sorts and walks.
ODD = ["\uff01", "\ue000", "😀1", "\U0010ffff", "a b", "%25", "ü"]


@pytest.fixture(
    params=["twin", pytest.param("ozone", marks=[pytest.mark.ozone, pytest.mark.timeout(900)])]
)
def buckets(request: pytest.FixtureRequest) -> Iterator[OzoneBuckets]:
    if request.param == "ozone":
        cluster = request.getfixturevalue("ozone_cluster")
        with OzoneBuckets(cluster, request.getfixturevalue("ozone_gateway")) as opened:
            yield opened
        return
    with TwinService() as service, OzoneBuckets(service, service.s3_endpoint) as opened:
        yield opened


def followed(store: Store, begun: FeedPosition, wanted: dict[str, bool]) -> dict[str, bool]:
    """Which keys a follower of the log has, once it has read them all."""
    assert store.feed is not None
    feed, held, at = store.feed, dict[str, bool](), begun

    def is_there() -> bool:
        nonlocal at
        batch = feed.read(at)
        for change in batch.changes:
            match change.kind:
                case ChangeKind.PUT:
                    held[change.key] = True
                case ChangeKind.DELETE:
                    held.pop(change.key, None)
                case ChangeKind.RENAME:
                    held.pop(change.previous_key, None)
                    held[change.key] = True
                case ChangeKind.DELETE_PREFIX:
                    for key in [key for key in held if key.startswith(change.key)]:
                        del held[key]
                case ChangeKind.RENAME_PREFIX:
                    for key in [key for key in held if key.startswith(change.previous_key)]:
                        del held[key]
                        held[change.key + key.removeprefix(change.previous_key)] = True
        at = batch.position
        return held == wanted

    wait_until(is_there, "the log has told everything")
    return held


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_whoever_follows_the_log_has_the_keys_of_the_bucket(
    buckets: OzoneBuckets, layout: BucketLayout
) -> None:
    """OZ-091, OZ-113 to OZ-118: every row of the operations of an OM."""
    store, manager = buckets.fresh(layout), buckets.manager
    assert store.feed is not None
    assert store.renamer is not None
    place, begun = buckets.place(store), store.feed.position()
    for key in ["d/a", "d/b", "d/e/f", "top", "empty", *ODD]:
        put(store, key, b"" if key == "empty" else b"x")
    put(store, "d/a", b"again")
    store.writer.put_properties(
        current(store, "d/b"), ObjectProperties(tags=(("a", "b"),)), tags_only=True
    )
    store.renamer.rename(current(store, "top"), "moved")
    store.renamer.rename(current(store, "moved"), "moved2")
    upload = store.upload_writer.begin("parts", NOTHING)
    parts = [
        store.upload_writer.write_part("parts", upload, 1, bytes(5 * MIB)),
        store.upload_writer.write_part("parts", upload, 2, b"end"),
    ]
    store.upload_writer.complete("parts", upload, parts, NOTHING, ANYTHING)
    assert store.writer.delete(["empty", "d/b", "missing"]) == []
    if layout is TREE:
        manager.rename_key(*place, "d", "other")
        put(store, "other/new")
        manager.rename_key(*place, "other/e", "e")
    wanted = dict.fromkeys(keys(store), True)
    assert "parts" in wanted
    assert followed(store, begun, wanted) == wanted
    # Whoever comes anew knows the same from the same position.
    if layout is FLAT:
        with buckets.opened_again(store) as again:
            assert followed(again, begun, wanted) == wanted


@pytest.mark.parametrize("changed", ["tags", "nothing"])
def test_properties_that_are_there_are_not_written_again(
    buckets: OzoneBuckets, changed: str
) -> None:
    """OZ-048: a syncer that was killed has written them, and could not record that.
    Other metadata give an object another ETag, so that a record of before is refused.
    """
    store = buckets.fresh(FLAT)
    first = ObjectProperties(metadata=(("a", "b"),), tags=(("c", "d"),))
    store.writer.put("k", b"body", first, ANYTHING)
    tags_only = changed == "tags"
    given = replace(first, tags=(("c", "blue"),)) if tags_only else first
    # What the killed one knew, whose record is of before.
    known = replace(current(store, "k"), version="", modified_ms=0)
    store.writer.put_properties(known, given, tags_only=tags_only)
    before = current(store, "k")
    again = store.writer.put_properties(known, given, tags_only=tags_only)
    assert current(store, "k") == before
    assert same_stamp(again, before)
    found = store.reader.properties("k")
    assert (found.metadata, found.tags) == (given.metadata, given.tags)


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_a_change_says_what_the_object_is_then(buckets: OzoneBuckets, layout: BucketLayout) -> None:
    store = buckets.fresh(layout)
    assert store.feed is not None
    begun = store.feed.position()
    given = ObjectProperties(metadata=(("a", "b"),), tags=(("c", "d"),))
    store.writer.put("k", b"body", given, ANYTHING)
    feed = store.feed
    wait_until(lambda: bool(changes_after(feed, begun)), "the change is told")
    change = changes_after(feed, begun)[-1]
    assert change.facts == current(store, "k")
    assert change.time_ms == change.facts.modified_ms
    assert replace(store.reader.properties_of(change.facts), acl=()) == given


@pytest.mark.parametrize("layouts", [(FLAT, TREE), (TREE, FLAT)], ids=["to paths", "from paths"])
def test_a_sync_between_buckets_of_ozone_is_equal_and_deletes(
    buckets: OzoneBuckets,
    layouts: tuple[BucketLayout, BucketLayout],
    tmp_path: Path,
) -> None:
    """What the gateway's listing would lose, too."""
    source, target = map(buckets.fresh, layouts)
    given = ObjectProperties(metadata=(("a", "b"),), tags=(("c", "d"),))
    for key in ("d/a", "d-", "top", *ODD):
        source.writer.put(key, key.encode() * 9, given, ANYTHING)
    write_large(source, "large", random.Random(4).randbytes(20 * MIB), given)
    put(target, "extra")
    commands = BucketPair(source.address, target.address, tmp_path / "state", buckets.endpoint)
    report = commands.sync("--delete")
    assert (report.exit_status, report.last["equal"], report.last["deleted"]) == (0, True, 1)
    assert keys(target) == keys(source)
    for key in keys(source):
        assert target.reader.properties(key) == replace(given, acl=OWN)
    again = commands.sync("--delete")
    assert (again.last["copied"], again.last["equal"]) == (0, True)


def test_a_position_that_the_om_does_not_know_is_a_gap(buckets: OzoneBuckets) -> None:
    """OZ-098: purged, another node, another database, beyond the end."""
    store = buckets.fresh(FLAT)
    assert store.feed is not None
    put(store, "k")
    now = store.feed.position()
    node, bucket, term = now.log.split("/")
    for wrong in (
        replace(now, index=now.index + 1000),
        replace(now, log=f"{node}x/{bucket}/{term}"),
        replace(now, log=f"{node}/0-0/{term}"),
        replace(now, log=f"{node}/{bucket}/{int(term) + 1}"),
    ):
        with pytest.raises(FeedGapError):
            store.feed.read(wrong)
    with pytest.raises(PositionTrimmedError):
        store.feed.read(replace(now, index=-1))
    assert store.feed.read(now).position.index >= now.index


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_a_snapshot_deleted_by_others_never_looks_empty(
    buckets: OzoneBuckets, layout: BucketLayout
) -> None:
    """OZ-169."""
    store = buckets.fresh(layout)
    assert store.snapshots is not None
    put(store, "d/k")
    made = store.snapshots.create("one")
    view = store.snapshots.open(made)
    assert [facts.key for facts in view.lister.list_objects("")] == ["d/k"]
    buckets.manager.delete_snapshot(*buckets.place(store), "one")
    assert store.snapshots.find("one") is None
    with pytest.raises(SnapshotLostError):
        list(view.lister.list_objects(""))
    with pytest.raises(SnapshotLostError):
        view.reader.facts("d/k")


def test_a_difference_names_keys_whose_slashes_the_om_drops(buckets: OzoneBuckets) -> None:
    store = buckets.fresh(FLAT)
    assert store.snapshots is not None
    for key in ("q/slash/", "q//dbl", "/lead", "q/dbl", "stays"):
        put(store, key)
    older = store.snapshots.create("older")
    assert store.writer.delete(["q/slash/", "q//dbl", "/lead"]) == []
    put(store, "q//new")
    newer = store.snapshots.create("newer")
    found = {(one.key, one.kind) for one in store.snapshots.difference(older, newer)}
    assert found >= {
        ("q/slash/", ChangeKind.DELETE),
        ("q//dbl", ChangeKind.DELETE),
        ("/lead", ChangeKind.DELETE),
        ("q//new", ChangeKind.PUT),
    }
    assert {key for key, kind in found if kind is ChangeKind.DELETE} == {
        "q/slash/",
        "q//dbl",
        "/lead",
    }


def test_a_renamed_directory_is_told_by_its_files_in_a_difference(buckets: OzoneBuckets) -> None:
    store = buckets.fresh(TREE)
    assert store.snapshots is not None
    for key in ("a/x", "a/s/y", "a/gone"):
        put(store, key)
    older = store.snapshots.create("older")
    assert store.writer.delete(["a/gone"]) == []
    buckets.manager.rename_key(*buckets.place(store), "a", "b")
    put(store, "b/new")
    newer = store.snapshots.create("newer")
    changes = list(store.snapshots.difference(older, newer))
    renames = {(c.previous_key, c.key) for c in changes if c.kind is ChangeKind.RENAME}
    assert renames == {("a/x", "b/x"), ("a/s/y", "b/s/y")}
    assert ("a/gone", ChangeKind.DELETE) in {(c.key, c.kind) for c in changes}
    assert ("b/new", ChangeKind.PUT) in {(c.key, c.kind) for c in changes}


def test_an_object_in_parts_has_the_crc_that_its_client_recorded(buckets: OzoneBuckets) -> None:
    """By records of the OM and of datanodes alone."""
    store = buckets.fresh(FLAT)
    bodies = [random.Random(1).randbytes(5 * MIB + 77), random.Random(2).randbytes(100_001)]
    upload = store.upload_writer.begin("key", NOTHING)
    parts = [
        store.upload_writer.write_part("key", upload, number, body)
        for number, body in enumerate(bodies, start=1)
    ]
    store.upload_writer.complete("key", upload, parts, NOTHING, ANYTHING)
    facts = current(store, "key")
    assert [one.algorithm for one in facts.hashes] == [HashAlgorithm.CRC32]
    assert facts.hashes == (crc_hash(Crc.CRC32, b"".join(bodies)),)
    assert content(store, facts) == b"".join(bodies)


def test_names_that_a_bucket_of_paths_would_change_are_refused(buckets: OzoneBuckets) -> None:
    store = buckets.fresh(TREE)
    put(store, "d/k")
    for key in ("x//y", "/lead", "a/../b", "./x", "dir/", "a:b", "d", "d/k/below"):
        with pytest.raises(UnsupportedObjectError):
            put(store, key)
    assert keys(store) == ["d/k"]
    assert store.writer.delete(["d"]) == []
    assert keys(store) == ["d/k"]


def test_a_bucket_is_opened_by_a_link_and_no_other_passes_for_it(buckets: OzoneBuckets) -> None:
    store = buckets.fresh(FLAT)
    volume, bucket = buckets.place(store)
    put(store, "k")
    link = f"{bucket}-l"
    buckets.manager.create_bucket(ManagerBucket("s3v", link, FLAT, 0, 0, source=(volume, bucket)))
    with buckets.opened(link) as linked:
        assert keys(linked) == ["k"]
        assert linked.feed is not None
        assert store.feed is not None
        assert linked.feed.position().log == store.feed.position().log
    other = buckets.place(buckets.fresh(FLAT))[1]
    with pytest.raises(StoreError, match="shows"), buckets.opened(bucket, s3_bucket=other):
        pass


def test_a_bucket_is_made_like_another_and_may_be_replicated(
    buckets: OzoneBuckets,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OZ-016 to OZ-025: layout, quotas, ACL, replication, snapshots."""
    manager, name = buckets.manager, buckets.fresh_name()
    acl = (("default:user:zoe", "r"), ("group:staff", "rl"), ("user:zoe", "a"))
    given = ManagerBucket(
        "s3v",
        name,
        TREE,
        object_id=0,
        created_ms=0,
        owner="zoe",
        acl=acl,
        replication="RATIS/ONE",
        quota_bytes=1 << 30,
        quota_names=9,
        metadata=(("team", "red"),),
    )
    manager.create_bucket(given)
    # The OM has granted all to whoever made it.
    manager.set_acl("s3v", name, "", acl)
    buckets.endpoint.set_environment(monkeypatch)

    def run(*words: str) -> None:
        result = CliRunner().invoke(treefold, ["bucket", *words])
        assert result.exit_code == 0, result.output

    source, target = buckets.address(name), buckets.address(f"{name}-2")
    documents = tmp_path / "one.json", tmp_path / "two.json"
    run("export", source, "--output", str(documents[0]))
    run("import", str(documents[0]), target, "--yes")
    run("export", target, "--output", str(documents[1]))
    first, second = (json.loads(one.read_text()) for one in documents)
    assert {key for key in first if first[key] != second[key]} == {"address"}
    assert first["properties"]["layout"] == "FILE_SYSTEM_OPTIMIZED"
    assert first["properties"]["has_snapshots"] is True
    assert manager.bucket("s3v", f"{name}-2").acl == acl
    report = prechecked(source, target, allow_nonempty=False).report
    # OZ-030 to OZ-032: none of it crosses, and that is said.
    (lost,) = report.findings
    assert (lost.check, lost.is_refusal) == (Precheck.PROPERTIES, False)
    assert all(word in lost.text for word in ("owner", "creation time", "modification time"))
    assert report.unknown == ()


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_acls_cross_with_their_objects_and_alone(
    buckets: OzoneBuckets, layout: BucketLayout, tmp_path: Path
) -> None:
    """OZ-029: of objects in one request and in parts; another ACL moves no byte. An
    empty one crosses too: the target must not give its own.
    """
    source, target = buckets.fresh(layout), buckets.fresh(layout)
    put(source, "d/closed")
    put(source, "d/small")
    write_large(source, "d/large", random.Random(4).randbytes(12 * MIB), NOTHING)
    acl = (("group:staff", "rl"), ("user:alice", "rw"), *OWN)
    place = buckets.place(source)
    for key in ("d/small", "d/large"):
        buckets.manager.set_acl(*place, key, tuple(sorted(acl)))
    buckets.manager.set_acl(*place, "d/closed", ())
    commands = BucketPair(source.address, target.address, tmp_path / "state", buckets.endpoint)
    assert commands.sync().last["equal"]
    for key in ("d/small", "d/large"):
        assert target.reader.properties(key).acl == tuple(sorted(acl))
    assert target.reader.properties("d/closed").acl == ()
    etags = [current(target, key).etag for key in ("d/small", "d/large")]
    for key in ("d/small", "d/large"):
        buckets.manager.set_acl(*place, key, OWN)
    report = commands.sync()
    assert (report.last["metadataOnly"], report.last["bytes"], report.last["equal"]) == (2, 0, True)
    for key in ("d/small", "d/large"):
        assert target.reader.properties(key).acl == OWN
    assert [current(target, key).etag for key in ("d/small", "d/large")] == etags
    buckets.manager.set_acl(*place, "d/small", ())
    report = commands.sync()
    assert (report.last["metadataOnly"], report.last["bytes"], report.last["equal"]) == (1, 0, True)
    assert target.reader.properties("d/small").acl == ()
    assert commands.sync().last["metadataOnly"] == 0


def test_an_acl_that_ozone_does_not_have_is_refused_before_a_byte(buckets: OzoneBuckets) -> None:
    store = buckets.fresh(FLAT)
    for acl in ((("user:alice", "?"),), (('id="1"', "READ"),)):
        given = ObjectProperties(acl=acl)
        with pytest.raises(UnsupportedObjectError):
            store.writer.put("k", b"x", given, ANYTHING)
        with pytest.raises(UnsupportedObjectError):
            store.upload_writer.begin("k", given)
    assert keys(store) == []
