"""One sync of a bucket: what crosses, what is left alone, and what is said of it."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.object_checksum import Crc
from proof.item import ContentHash
from replicator.copier import CopierLimits
from replicator.copy_requests import CopyResult
from replicator.crossing import lacking
from replicator.hashing import crc_hash
from replicator.ledger import PairLedger
from replicator.listing import ListingOrderError
from replicator.stores.capabilities import Capabilities
from replicator.stores.errors import StoreError, StoreUnavailableError
from replicator.stores.port import ObjectFacts, ObjectProperties
from replicator.windows import WINDOW_BYTES
from runtime.errors import OperationInterruptedError
from tests.support.bucket_sync import LIMITS, SyncRunner
from tests.support.memory_store import (
    DECLARING,
    MEMORY,
    PLAIN,
    STITCHING,
    UNGUARDED,
    UNPROVEN,
    MemoryStore,
)

PART = LIMITS.part_bytes
KINDS = {"md5": MEMORY, "unproven": UNPROVEN, "unguarded": UNGUARDED, "plain": PLAIN}
PROPERTIES = ObjectProperties(
    metadata=(("owner", "ann"),), tags=(("team", "red"),), headers=(("content-type", "text/csv"),)
)


def large(seed: int, parts: float = 3.5) -> bytes:
    return random.Random(seed).randbytes(int(parts * PART))


@pytest.fixture(params=sorted(KINDS))
def capabilities(request: pytest.FixtureRequest) -> Capabilities:
    return KINDS[request.param]


@pytest.fixture(params=[False, True], ids=["stamped", "says-little"])
def pair(
    capabilities: Capabilities, request: pytest.FixtureRequest
) -> tuple[MemoryStore, MemoryStore]:
    target = MemoryStore("memory:b", capabilities, says_little=request.param)
    return MemoryStore("memory:a", MEMORY), target


def runner(pair: tuple[MemoryStore, MemoryStore], folder: Path, **more: bool) -> SyncRunner:
    return SyncRunner(pair[0].store(), pair[1].store(), folder / "state", **more)


def test_a_bucket_is_copied_and_then_nothing_is_left_to_do(
    pair: tuple[MemoryStore, MemoryStore], tmp_path: Path
) -> None:
    source, target = pair
    bodies = {f"k{number}": bytes([number]) * number for number in range(20)}
    bodies["large"] = large(1)
    for key, body in bodies.items():
        source.write(key, body, PROPERTIES)
    report = runner(pair, tmp_path)()
    assert target.bodies() == source.bodies() == bodies
    assert target.objects["k1"].properties.metadata == PROPERTIES.metadata
    assert (report.copied, report.equal, report.failed) == (21, True, ())
    assert report.level == "recorded:blake3"
    assert report.bytes == target.payload == sum(map(len, bodies.values()))
    again = runner(pair, tmp_path)()
    assert (again.copied, again.bytes, again.equal) == (0, 0, True)
    assert (again.root, again.level) == (report.root, report.level)
    assert not target.uploading


def test_a_change_of_properties_moves_no_data(
    pair: tuple[MemoryStore, MemoryStore], tmp_path: Path
) -> None:
    source, target = pair
    source.write("small", b"abc", PROPERTIES)
    source.write("large", large(2), PROPERTIES)
    run = runner(pair, tmp_path)
    run()
    target.payload = 0
    other = ObjectProperties(metadata=(("owner", "bob"),), headers=PROPERTIES.headers)
    source.write("small", b"abc", other)
    source.write("large", large(2), other)
    report = run()
    assert (report.metadata_only, report.copied, report.bytes, report.equal) == (2, 0, 0, True)
    assert target.payload == 0
    assert {one.properties.metadata for one in target.objects.values()} == {(("owner", "bob"),)}


def test_a_tag_alone_crosses_although_no_stamp_shows_it(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    facts = source.write("k", b"abc", PROPERTIES)
    run = runner(pair, tmp_path)
    run()
    before = target.objects["k"].facts
    blue = ObjectProperties(PROPERTIES.metadata, (("team", "blue"),), PROPERTIES.headers)
    source.put_properties(facts, blue, tags_only=True)
    report = run()
    assert (report.metadata_only, report.equal) == (1, True)
    assert target.objects["k"].properties.tags == (("team", "blue"),)
    assert target.objects["k"].facts == before


@pytest.mark.parametrize("kind", ["md5", "unproven", "unguarded"])
def test_one_changed_byte_of_a_large_object_moves_its_window(kind: str, tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", KINDS[kind])
    source, target = pair
    body = bytearray(large(3, 6))
    source.write("large", bytes(body), PROPERTIES)
    run = runner(pair, tmp_path)
    run()
    target.payload = 0
    body[100_000] ^= 1
    source.write("large", bytes(body), PROPERTIES)
    report = run()
    assert (report.copied, report.equal) == (1, True)
    assert report.bytes == target.payload == WINDOW_BYTES
    assert target.bodies() == source.bodies()
    body += b"tail"
    source.write("large", bytes(body[5:]), PROPERTIES)
    assert run().equal
    assert target.bodies() == source.bodies()


def test_a_target_that_copies_no_ranges_gets_the_whole_object(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", PLAIN)
    source, target = pair
    body = bytearray(large(3))
    source.write("large", bytes(body))
    run = runner(pair, tmp_path)
    run()
    body[5] ^= 1
    source.write("large", bytes(body))
    assert run().bytes == len(body)
    assert target.bodies() == source.bodies()


def test_empty_objects_and_deletes_show_their_progress(tmp_path: Path) -> None:
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b")
    for number in range(5):
        source.write(f"empty{number}", b"")
        target.write(f"extra{number}", b"x")
    run = SyncRunner(source.store(), target.store(), tmp_path, delete=True)
    assert run().equal
    assert run.progress.stages[1:] == [
        ("copy", 5, "keys"),
        ("verify", 10, "keys"),
        ("delete", 5, "keys"),
    ]
    # Ten keys are compared, five copied, ten compared again, and five deleted.
    assert run.progress.done == 30


def test_extras_are_differences_until_somebody_asks_to_delete(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    source.write("both", b"1")
    target.write("extra", b"2")
    report = runner(pair, tmp_path)()
    assert (report.copied, report.deleted, report.equal, report.differences) == (1, 0, False, 1)
    report = runner(pair, tmp_path, delete=True)()
    assert (report.deleted, report.equal, report.differences) == (1, True, 0)
    assert target.bodies() == {"both": b"1"}


def test_a_key_that_is_written_again_is_not_deleted(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    target.write("back", b"2")
    run = runner(pair, tmp_path, delete=True)
    plan, steps = run.plan()
    assert (plan.deletes, steps) == (1, [("back", "delete")])
    with run._ledger() as ledger, run.open(ledger) as sync:
        made = sync.plan()
        source.write("back", b"3")
        report = sync.execute(made)
    assert report.deleted == 0
    assert not report.equal
    assert "delete" not in target.calls
    assert run().equal
    assert target.bodies() == {"back": b"3"}


def test_what_the_source_lists_and_lost_is_not_deleted(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    for key in ("good", "lost"):
        source.write(key, b"1")
    run = runner(pair, tmp_path, delete=True)
    assert run().equal
    source.write("new", b"2")
    source.lost |= {"lost", "new"}
    report = run()
    assert sorted((one.key, one.reason) for one in report.failed) == [
        ("lost", "source_unreadable"),
        ("new", "source_unreadable"),
    ]
    assert (report.deleted, report.equal) == (0, False)
    assert target.bodies() == {"good": b"1", "lost": b"1"}
    source.remove("lost")
    assert run().deleted == 1


def test_a_run_without_its_ledger_continues_over_what_the_target_holds(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    for number in range(5):
        source.write(f"k{number}", b"x" * number, PROPERTIES)
    runner(pair, tmp_path / "one")()
    target.payload = 0
    report = runner(pair, tmp_path / "two")()
    assert (report.copied, target.payload, report.equal) == (0, 0, True)
    assert report.level == "recorded:md5"


def test_equal_sizes_alone_are_said_to_be_listed(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a", UNPROVEN), MemoryStore("memory:b", UNPROVEN)
    source, target = pair
    source.write("k", b"abc")
    target.write("k", b"xyz")
    report = runner(pair, tmp_path)()
    assert (report.copied, report.level) == (0, "listed")


def test_an_older_object_of_equal_size_is_replaced(tmp_path: Path) -> None:
    source = MemoryStore("memory:a", UNPROVEN, now_ms=lambda: 2_000)
    target = MemoryStore("memory:b", UNPROVEN, now_ms=lambda: 1_000)
    source.write("k", b"abc")
    target.write("k", b"xyz")
    assert runner((source, target), tmp_path)().level == "recorded:blake3"
    assert target.bodies() == {"k": b"abc"}


def test_an_object_that_others_changed_at_the_target_is_copied_anew(
    pair: tuple[MemoryStore, MemoryStore], tmp_path: Path
) -> None:
    source, target = pair
    source.write("k", b"abc", PROPERTIES)
    run = runner(pair, tmp_path)
    run()
    target.write("k", b"xyz", PROPERTIES)
    report = run()
    assert (report.copied, report.equal) == (1, True)
    assert target.bodies() == {"k": b"abc"}


@pytest.mark.parametrize("size_parts", [0.5, 3.5])
def test_a_foreign_write_during_the_run_is_not_overwritten(
    pair: tuple[MemoryStore, MemoryStore], tmp_path: Path, size_parts: float
) -> None:
    source, target = pair
    source.write("k", large(4, size_parts))
    run = runner(pair, tmp_path)
    with run._ledger() as ledger, run.open(ledger) as sync:
        plan = sync.plan()
        target.write("k", b"foreign")
        report = sync.execute(plan)
    assert sorted((one.key, one.reason) for one in report.failed) == [("k", "target_changed")]
    assert not report.equal
    assert target.bodies() == {"k": b"foreign"}
    assert not target.uploading


def test_a_source_that_changes_once_is_copied_as_it_is_then(
    pair: tuple[MemoryStore, MemoryStore], tmp_path: Path
) -> None:
    source, target = pair
    source.write("k", large(5))
    changes = iter([large(6)])
    parts = iter(range(100))

    def change(name: str, _key: str) -> None:
        if name == "write_part" and next(parts) == 2:
            source.write("k", next(changes))

    target.faults.before = change
    report = runner(pair, tmp_path)()
    assert report.equal
    assert target.bodies() == {"k": large(6)}
    assert not target.uploading


def test_a_source_that_keeps_changing_fails_by_name(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    source.write("k", b"0")
    count = iter(range(1, 100))
    source.faults.before = lambda name, key: (
        source.write(key, b"%d" % next(count)) and None if name == "read" else None
    )
    report = runner(pair, tmp_path)()
    assert [one.reason for one in report.failed] == ["source_changed"]
    assert (report.equal, target.bodies()) == (False, {})


def test_a_target_that_answers_other_facts_is_not_believed(tmp_path: Path) -> None:
    class Damaging(MemoryStore):
        def _keep(self, key, body, properties, etag):
            damaged = bytes([body[0] ^ 1]) + body[1:]
            return super()._keep(key, damaged, properties, etag)

    source, target = MemoryStore("memory:a"), Damaging("memory:b")
    source.write("k", b"abc")
    report = runner((source, target), tmp_path)()
    assert [one.reason for one in report.failed] == ["target_disagrees"]
    assert not report.equal


def test_metadata_that_the_target_cannot_keep_fails_by_name(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    pair[0].write("k", b"abc", ObjectProperties(metadata=(("long", "x" * 4_000),)))
    report = runner(pair, tmp_path)()
    assert [one.reason for one in report.failed] == ["unsupported"]
    assert pair[1].bodies() == {}


def test_a_change_is_stitched_where_small_parts_are_refused(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", STITCHING)
    source, target = pair
    body = bytearray(large(7, 20))
    source.write("large", bytes(body), PROPERTIES)
    run = runner(pair, tmp_path)
    assert run().equal
    target.payload = 0
    body[600_000] ^= 1
    source.write("large", bytes(body), PROPERTIES)
    report = run()
    assert (report.copied, report.equal) == (1, True)
    assert report.bytes == target.payload == WINDOW_BYTES
    assert target.bodies() == source.bodies()
    assert not target.uploading


def test_parts_that_arrived_as_other_bytes_become_no_object_where_crcs_are_declared(
    tmp_path: Path,
) -> None:
    """The ETag, the size and the answer are those of what was sent."""
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", DECLARING)
    source, target = pair
    source.write("large", large(8), PROPERTIES)

    def damage(name: str, _key: str) -> None:
        for upload in target.uploading.values() if name == "complete" else ():
            part, body = upload.parts[2]
            upload.parts[2] = part, bytes([body[0] ^ 1]) + body[1:]

    target.faults.before = damage
    report = runner(pair, tmp_path)()
    assert [one.reason for one in report.failed] == ["target_disagrees"]
    assert (target.bodies(), target.uploading) == ({}, {})
    target.faults.before = lambda *_: None
    assert runner(pair, tmp_path)().equal
    assert target.bodies() == source.bodies()


@pytest.mark.parametrize("kind", [DECLARING, replace(DECLARING, part_bytes_min=60 << 10)])
def test_a_patch_of_other_bytes_than_were_copied_ends_as_the_whole_object(
    kind: Capabilities, tmp_path: Path
) -> None:
    """Damage that no stamp shows: the old object is not what its windows say."""
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", kind)
    source, target = pair
    body = bytearray(large(9, 20))
    source.write("large", bytes(body), PROPERTIES)
    run = runner(pair, tmp_path)
    assert run().equal
    held = target.objects["large"]
    target.objects["large"] = replace(held, body=b"?" + held.body[1:])
    body[600_000] ^= 1
    source.write("large", bytes(body), PROPERTIES)
    assert run().equal
    assert target.bodies() == source.bodies()
    assert not target.uploading


def test_the_crc_that_a_target_declares_of_a_whole_is_recorded(tmp_path: Path) -> None:
    class NotedCopies(PairLedger):
        hashes: tuple[ContentHash, ...] = ()

        def save_copy(self, result: CopyResult) -> None:
            self.hashes = result.hashes
            super().save_copy(result)

    pair = MemoryStore("memory:a"), MemoryStore("memory:b", DECLARING)
    pair[0].write("large", large(10), PROPERTIES)
    run = runner(pair, tmp_path)
    with (
        NotedCopies(run.folder, source="memory:a", target="memory:b") as ledger,
        run.open(ledger) as sync,
    ):
        assert sync.execute(sync.plan()).level == "recorded:blake3"
    assert crc_hash(Crc.CRC64NVME, large(10)) in ledger.hashes


def test_a_plan_changes_nothing_and_says_what_will_happen(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    source.write("new", b"123")
    source.write("same", b"4")
    target.write("same", b"4")
    source.write("tagged", b"5", PROPERTIES)
    target.write("tagged", b"5")
    target.write("extra", b"6")
    before = dict(target.objects)
    plan, steps = runner(pair, tmp_path, delete=True).plan()
    assert steps == [("extra", "delete"), ("new", "copy"), ("tagged", "properties")]
    assert (plan.copies, plan.deletes, plan.properties, plan.equal, plan.bytes) == (1, 1, 1, 1, 3)
    assert target.objects == before
    report = runner(pair, tmp_path, delete=True)()
    assert (report.copied, report.deleted, report.metadata_only, report.equal) == (1, 1, 1, True)


def test_a_listing_that_fails_deletes_nothing(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    for number in range(9):
        source.write(f"k{number}", b"1")
        target.write(f"k{number}", b"1")
    lists = iter(range(100))

    def fail(name: str, _key: str) -> None:
        if name == "list" and next(lists) >= 1:
            raise StoreUnavailableError("503")

    source.faults.before = fail
    with pytest.raises(StoreUnavailableError):
        runner(pair, tmp_path, delete=True)()
    assert len(target.objects) == 9
    assert set(target.calls) <= {"list", "properties", "facts"}


def test_a_listing_goes_on_behind_the_last_key(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, _ = pair
    for number in range(9):
        source.write(f"k{number}", b"1")
    lists = iter(range(100))

    def fail(name: str, _key: str) -> None:
        if name == "list" and next(lists) % 2:
            raise StoreUnavailableError("503")

    source.faults.before = fail
    run = runner(pair, tmp_path)
    run.attempts_max = 2
    assert run().copied == 9


def test_a_listing_out_of_order_is_named(tmp_path: Path) -> None:
    class Unordered(MemoryStore):
        def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
            return iter(list(super().list_objects(prefix, start_after=start_after))[::-1])

    pair = Unordered("memory:a"), MemoryStore("memory:b")
    pair[0].write("a", b"1")
    pair[0].write("b", b"1")
    with pytest.raises(ListingOrderError, match="'a' after 'b'"):
        runner(pair, tmp_path)()


def test_a_store_that_hides_keys_allows_no_delete_and_no_equality(tmp_path: Path) -> None:
    hiding = replace(MEMORY, lists_all_keys=False)
    pair = MemoryStore("memory:a", hiding), MemoryStore("memory:b")
    source, target = pair
    source.write("a", b"1")
    target.write("extra", b"1")
    run = runner(pair, tmp_path, delete=True)
    report = run()
    assert (report.copied, report.deleted, report.equal) == (1, 0, False)
    target.remove("extra")
    report = run()
    assert (report.differences, report.equal) == (0, False)


def test_what_the_target_lacks_is_said_in_sentences() -> None:
    assert lacking(MEMORY, MEMORY) == (
        "the stamps of the source do not show all changes of properties: they are read",
    )
    # No older version crosses, whatever the target keeps.
    versioned = replace(MEMORY, keeps_versions=True)
    assert "older versions do not cross" in lacking(versioned, versioned)[0]
    said = " / ".join(lacking(MEMORY, replace(PLAIN, keeps_acls=False, lists_all_keys=False)))
    for word in ("no tags", "no ACLs", "condition", "no hash", "no ranges", "not list all keys"):
        assert word in said
    # What neither has, or both, is not said.
    whole = replace(MEMORY, stamps_cover_properties=True)
    for name, note in (
        ("keeps_tags", "no tags"),
        ("keeps_headers", "no content headers"),
        ("keeps_acls", "no ACLs"),
    ):
        without = replace(whole, **{name: False})
        for source in (whole, without):
            assert lacking(source, whole) == ()
        assert lacking(without, without) == ()
        assert note in " / ".join(lacking(whole, without))
    for name in ("creates", "replaces", "completes"):
        without = replace(whole, **{f"{name}_conditionally": False})
        assert lacking(without, whole) == ()
        assert "does not guard every write" in " / ".join(lacking(whole, without))
    unlisted = replace(whole, lists_all_keys=False)
    for pair, side in (((unlisted, whole), "source"), ((whole, unlisted), "target")):
        assert f"the {side} does not list all keys" in " / ".join(lacking(*pair))


def test_an_interrupted_run_ends_by_name_and_the_next_one_goes_on(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    source.write("large", large(8, 6))
    run = runner(pair, tmp_path)
    run.is_cancelled = lambda: target.calls.count("write_part") >= 3
    with pytest.raises(OperationInterruptedError):
        run()
    target.calls.clear()
    run.is_cancelled = lambda: False
    assert run().equal
    assert target.payload == 6 * PART
    assert target.bodies() == source.bodies()


@pytest.mark.parametrize("capabilities", [MEMORY, UNPROVEN, UNGUARDED])
def test_with_many_threads_the_result_is_the_same(
    capabilities: Capabilities, tmp_path: Path
) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", capabilities)
    source, target = pair
    for number in range(40):
        source.write(f"k{number}", large(number, number % 5), PROPERTIES)
    run = runner(pair, tmp_path)
    run.copier_limits = CopierLimits(objects=6, parts=4, memory_bytes=4 * PART)
    run.new_executor = ThreadPoolExecutor
    report = run()
    assert (report.copied, report.equal) == (40, True)
    assert target.bodies() == source.bodies()
    assert target.payload == report.bytes


def test_a_fault_of_the_source_is_not_blamed_on_the_target(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    for key in ("bad", "good"):
        source.write(key, b"1")

    def fail(name: str, key: str) -> None:
        if (name, key) == ("read", "bad"):
            raise StoreError("AccessDenied")

    source.faults.before = fail
    report = runner(pair, tmp_path)()
    assert sorted((one.key, one.reason) for one in report.failed) == [("bad", "source_unreadable")]
    assert (report.copied, report.equal, report.differences) == (1, False, 1)
    assert report.document()["failed"] == [{"key": "bad", "reason": "source_unreadable"}]
    assert list(target.objects) == ["good"]


def test_properties_of_a_newer_version_are_not_those_of_the_listed_one(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    other = replace(PROPERTIES, metadata=(("owner", "bob"),))
    source.write("k", b"old", PROPERTIES)
    target.write("k", b"old", other)

    def change(name: str, key: str) -> None:
        if name == "properties" and source.bodies()["k"] == b"old":
            source.write(key, b"new", other)

    source.faults.before = change
    report = runner(pair, tmp_path)()
    assert (report.copied, report.equal) == (1, True)
    assert target.bodies() == {"k": b"new"}


@pytest.mark.parametrize(("operation", "size_parts"), [("put", 0.5), ("complete", 3.5)])
@pytest.mark.parametrize("kind", ["md5", "unproven"])
def test_a_write_whose_answer_was_lost_is_found(
    kind: str, operation: str, size_parts: float, tmp_path: Path
) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", KINDS[kind])
    source, target = pair
    source.write("k", large(9, size_parts), PROPERTIES)

    def lose(name: str, _key: str) -> None:
        if name == operation and target.calls.count(operation) == 1:
            raise StoreUnavailableError("500 after it was written")

    target.faults.after = lose
    run = runner(pair, tmp_path)
    run.attempts_max = 2
    report = run()
    assert (report.copied, report.equal, report.failed) == (1, True, ())
    assert target.payload == len(large(9, size_parts))
    assert report.level == "recorded:blake3"


def test_the_source_is_looked_at_before_a_large_object_appears(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b")
    source, target = pair
    source.write("k", large(10))

    def change(name: str, _key: str) -> None:
        if name == "facts" and source.bodies()["k"] == large(10):
            source.write("k", large(11))

    source.faults.before = change
    assert runner(pair, tmp_path)().equal
    assert target.bodies() == {"k": large(11)}
    assert target.calls.count("complete") == 1
