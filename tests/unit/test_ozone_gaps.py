"""Whatever happens to the log of an OM, what was missed in it is found by comparing,
and only that is sent (OZ-098, OZ-099, OZ-103; on an Ozone in memory).
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ozone.manager_values import BucketLayout
from replicator.stores.port import Store
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.ozone_follower import OzoneFollower
from tests.support.ozone_twin_service import TwinService
from tests.support.stores import changes_after, put

FLAT, TREE = BucketLayout.OBJECT_STORE, BucketLayout.FILE_SYSTEM_OPTIMIZED
BODY = random.Random(1).randbytes(10_000)
KEYS = [f"d/{number}" for number in range(12)]
Damage = Callable[[TwinService, Store], None]


@pytest.fixture
def service() -> Iterator[TwinService]:
    with TwinService() as running:
        yield running


@pytest.fixture
def buckets(service: TwinService) -> Iterator[OzoneBuckets]:
    with OzoneBuckets(service, service.s3_endpoint) as opened:
        yield opened


def change(store: Store) -> None:
    """Put, overwrite, rename and delete."""
    assert store.renamer is not None
    put(store, "d/new", BODY)
    put(store, "d/0", BODY[::-1])
    assert store.writer.delete(["d/1"]) == []
    found = store.reader.facts("d/2")
    assert found is not None
    store.renamer.rename(found, "d/renamed")


def purge(service: TwinService, store: Store) -> None:
    """What changed is no longer in the log."""
    change(store)
    service.twin.purge()


def lose_a_batch(service: TwinService, store: Store) -> None:
    """The log goes on with another number than the last one."""
    at = len(service.twin.log)
    change(store)
    del service.twin.log[at : at + 3]


def answer_elsewhere(service: TwinService, store: Store) -> None:
    """Another OM leads, whose numbers are its own."""
    change(store)
    service.twin.node_id = "om2"
    service.twin.number += 1000
    service.twin.purge()


def restore_and_go_on(service: TwinService, store: Store) -> None:
    """The database is an older one, and grows past what was read."""
    backup = service.twin.backup()
    put(store, "d/lost", BODY)
    assert store.feed is not None
    assert changes_after(store.feed, store.feed.position()) == []
    service.twin.restore(backup)
    change(store)


def restore(service: TwinService, store: Store) -> None:
    """The database is an older one, and ends before what was read."""
    backup = service.twin.backup()
    change(store)
    for number in range(20):
        put(store, f"d/lost{number}", BODY)
    service.twin.restore(backup)
    assert store.writer.delete(["d/3"]) == []


@pytest.mark.parametrize(
    "damage", [purge, lose_a_batch, answer_elsewhere, restore_and_go_on, restore]
)
@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_a_gap_is_healed_by_what_differs_alone(
    layout: BucketLayout,
    damage: Damage,
    service: TwinService,
    buckets: OzoneBuckets,
    tmp_path: Path,
) -> None:
    store = buckets.fresh(layout)
    for key in KEYS:
        put(store, key, BODY)
    follower = OzoneFollower.live(store, tmp_path)
    put(store, "d/followed", BODY)
    follower.settle()
    damage(service, store)
    assert follower.settle() <= 3 * len(BODY)
    follower.await_live()
    # And from then on the log counts again.
    put(store, "d/after", BODY)
    assert follower.settle() == len(BODY)


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_a_change_costs_an_om_one_look_and_an_idle_log_one_read(
    layout: BucketLayout, service: TwinService, buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-006, OZ-008: whatever the bucket holds."""
    store, count = buckets.fresh(layout), 100
    for key in KEYS:
        put(store, key, BODY)
    follower = OzoneFollower.live(store, tmp_path)
    assert store.feed is not None
    position, before = store.feed.position(), service.calls
    for _ in range(50):
        assert store.feed.read(position).changes == ()
    assert service.calls - before == 50
    for number in range(count):
        put(store, f"n/{number}", BODY)
    before = service.calls
    while len(follower.target.bodies()) < len(KEYS) + count:
        follower.replication.run(1)
    assert service.calls - before <= 1.5 * count


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_nothing_is_done_again_where_all_that_was_recorded_is_lost(
    layout: BucketLayout, service: TwinService, buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-107: what the target has is the second line of defence. Neither its disk nor
    its master tells the next syncer how far the last one was, and the log still has
    every change: none of them writes anything.
    """
    store = buckets.fresh(layout)
    follower = OzoneFollower.live(store, tmp_path / "one")
    for key in KEYS:
        put(store, key, BODY)
    change(store)
    follower.settle()
    before = {key: follower.target.facts(key) for key in follower.target.bodies()}
    follower.replication.kill()
    again = OzoneFollower.live(store, tmp_path / "two", target=follower.target)
    assert again.replication.engine.report().sent_bytes == 0
    assert {key: again.target.facts(key) for key in again.target.bodies()} == before
    assert service.twin.first_kept == 1
