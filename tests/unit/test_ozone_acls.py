"""What a copy in Ozone costs its OM for the ACL."""

from collections.abc import Iterator

import pytest

from ozone.manager_values import BucketLayout
from replicator.stores.ozone_bucket import NEW_ACL_S, NewObjectAcls
from replicator.stores.port import ObjectProperties, Store, WriteCondition
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.ozone_twin_service import TwinService

ABSENT = WriteCondition(absent=True)
OTHER = ObjectProperties(acl=(("user:zoe", "r"),), replaces_acl=True)
SEEN = (("user:zoe", "a"),)


@pytest.fixture
def service() -> Iterator[TwinService]:
    with TwinService() as service:
        yield service


@pytest.fixture
def store(service: TwinService) -> Iterator[Store]:
    with OzoneBuckets(service, service.s3_endpoint) as buckets:
        yield buckets.fresh(BucketLayout.OBJECT_STORE)


def calls_of(service: TwinService, store: Store, key: str, given: ObjectProperties) -> int:
    before = service.calls
    store.writer.put(key, b"x", given, ABSENT)
    return service.calls - before


def test_new_objects_with_the_acl_of_others_around_them_cost_no_look(
    service: TwinService, store: Store
) -> None:
    store.writer.put("d/first", b"x", ObjectProperties(), ABSENT)
    same = ObjectProperties(acl=store.reader.properties("d/first").acl, replaces_acl=True)
    assert calls_of(service, store, "d/1", same) == 1
    assert calls_of(service, store, "d/2", same) == 0
    # Prefixes and directories may have ACLs of their own for what is made in them.
    assert calls_of(service, store, "d/e/3", same) == 1
    assert calls_of(service, store, "d/4", OTHER) == 2
    assert calls_of(service, store, "d/5", same) == 0
    assert [store.reader.properties(f"d/{n}").acl for n in "1245"] == [
        same.acl,
        same.acl,
        OTHER.acl,
        same.acl,
    ]


def test_an_object_that_replaces_another_is_looked_at(service: TwinService, store: Store) -> None:
    """It keeps the ACL of the one before."""
    same = ObjectProperties(acl=SEEN, replaces_acl=True)
    made = store.writer.put("k", b"x", same, ABSENT)
    before = service.calls
    store.writer.put("k", b"y", same, WriteCondition(etag=made.etag))
    assert service.calls > before


def test_what_was_seen_counts_for_some_seconds() -> None:
    now = [0.0]
    acls = NewObjectAcls(lambda: now[0])
    assert not acls.has("d/k", SEEN)
    acls.note("d/k", SEEN)
    now[0] = NEW_ACL_S - 0.1
    assert acls.has("d/other", SEEN)
    assert not acls.has("d/other", ())
    assert not acls.has("k", SEEN)
    now[0] = NEW_ACL_S
    assert not acls.has("d/other", SEEN)


def test_no_more_than_some_folders_are_kept() -> None:
    acls = NewObjectAcls(lambda: 0.0)
    for number in range(2_500):
        acls.note(f"{number}/k", SEEN)
    assert acls.has("2499/k", SEEN)
    assert sum(acls.has(f"{number}/k", SEEN) for number in range(2_500)) <= 1_000
