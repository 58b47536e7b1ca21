"""One sync of a bucket: what crosses, what is left alone, and what is said of it."""

import random
from pathlib import Path

import pytest

from replicator.stores.port import Capabilities, ObjectProperties
from tests.support.bucket_sync import LIMITS, SyncRunner
from tests.support.memory_store import MEMORY, PLAIN, UNGUARDED, UNPROVEN, MemoryStore

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
    assert report.bytes == target.payload == 16 << 10
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
    target.faults.before = lambda name, _key: (
        source.write("back", b"3") and None if name == "delete" else None
    )
    source.faults.before = lambda name, _key: None
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
    assert [(one.key, one.reason) for one in report.failed] == [("k", "target_changed")]
    assert not report.equal
    assert target.bodies() == {"k": b"foreign"}
    assert not target.uploading


def test_a_source_that_changes_once_is_copied_as_it_is_then(
    pair: tuple[MemoryStore, MemoryStore], tmp_path: Path
) -> None:
    source, target = pair
    source.write("k", large(5))
    changes = iter([large(6)])
    reads = iter(range(100))

    def change(name: str, _key: str) -> None:
        if name == "read" and next(reads) == 2:
            source.write("k", next(changes))

    source.faults.before = change
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
        def _keep(self, key, body, properties, etag):  # type: ignore[no-untyped-def]
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
