"""A sync that is killed at any point is continued by the next run: the target becomes
equal, and at most the one part that was on its way crosses twice; none where ETags are
MD5s, by which a part is known whose answer was not recorded. An object that is sent as
it is read may cross twice, and no more often, however often a run is killed.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.stores.port import ObjectFacts, ObjectProperties, WriteCondition
from replicator.sync import SyncReport
from replicator.windows import WINDOW_BYTES
from tests.support.bucket_sync import LIMITS, SyncRunner
from tests.support.kill_points import KillableLedger, KilledError, KillSwitch
from tests.support.memory_store import (
    MEMORY,
    STITCHING,
    UNGUARDED,
    UNPROVEN,
    MemoryStore,
    StoreFaults,
)

pytestmark = pytest.mark.crashes

PART = LIMITS.part_bytes
KINDS = {
    "md5": MEMORY,
    "unproven": UNPROVEN,
    "unguarded": UNGUARDED,
    "pieces": MEMORY,
    "parts in pieces": MEMORY,
}
CASES = ("first", "overwrite", "patch", "patches", "stitch")
STITCHES = {
    "md5": STITCHING,
    "unproven": replace(UNPROVEN, part_bytes_min=STITCHING.part_bytes_min),
}
PROPERTIES = ObjectProperties(metadata=(("owner", "ann"),), tags=(("team", "red"),))
POINTS_MAX = 2_000
# What crosses of a change, by the case.
PATCHED = {"patch": WINDOW_BYTES, "stitch": WINDOW_BYTES, "patches": 2 * WINDOW_BYTES}


def run_killed(runner: SyncRunner, target: MemoryStore, at: int | None) -> SyncReport | None:
    """One run that is killed at a point; None if it was."""
    switch = KillSwitch(at)
    target.faults = switch.faults()
    with KillableLedger(
        runner.folder, source=runner.source.address, target=runner.target.address
    ) as ledger:
        ledger.switch = switch
        with runner.open(ledger) as sync:
            try:
                return sync.execute(sync.plan())
            except KilledError:
                return None
            finally:
                target.faults = StoreFaults()


def changed(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def bodies(seed: int) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {"a": rng.randbytes(100), "large": rng.randbytes(int(4.5 * PART)), "z": b""}


def write_in_parts(
    store: MemoryStore, key: str, body: bytes, properties: ObjectProperties
) -> ObjectFacts:
    """Write as most clients write large objects."""
    if len(body) <= PART:
        return store.write(key, body, properties)
    upload = store.begin(key, properties)
    parts = [
        store.write_part(key, upload, number, body[first : first + PART])
        for number, first in enumerate(range(0, len(body), PART), 1)
    ]
    return store.complete(key, upload, parts, properties, WriteCondition())


def left_parts(target: MemoryStore) -> int:
    """Parts of uploads that nobody completed. An upload that was begun when the process
    ended may stay, without any: it cannot be told from those of others.
    """
    return sum(len(one.parts) for one in target.uploading.values())


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, case) for kind in ("md5", "unproven") for case in CASES),
        ("pieces", "first"),
        ("pieces", "overwrite"),
        ("parts in pieces", "first"),
        ("parts in pieces", "overwrite"),
    ],
)
def test_killed_at_any_point_it_sends_nothing_twice_but_the_part_on_its_way(
    kind: str, case: str, step: int, tmp_path: Path
) -> None:
    for at in range(0, POINTS_MAX, step):
        kinds = STITCHES if case == "stitch" else KINDS
        source = MemoryStore("memory:a")
        target = MemoryStore("memory:b", kinds[kind], takes_pieces=kind.endswith("pieces"))
        write = write_in_parts if kind == "parts in pieces" else MemoryStore.write
        foreign = target.begin("large", PROPERTIES)
        target.write_part("large", foreign, 1, b"of others")
        target.payload = 0
        target.write("extra", b"gone")
        runner = SyncRunner(source.store(), target.store(), tmp_path / str(at), delete=True)
        if case != "first":
            for key, body in bodies(1).items():
                write(source, key, body, PROPERTIES)
            assert runner().equal
            target.payload = 0
        wanted = bodies(1 if case == "first" else 2)
        if case in ("patch", "patches", "stitch"):
            wanted = {**bodies(1), "large": changed(bodies(1)["large"], 3 * PART + 5)}
        if case == "patches":
            wanted["large"] = changed(wanted["large"], PART + 5)
        for key, body in wanted.items():
            write(source, key, body, PROPERTIES)
        killed = run_killed(runner, target, at) is None
        report = runner()
        assert report.equal, at
        assert target.bodies() == wanted
        assert {one.properties for one in target.objects.values()} == {PROPERTIES}
        assert target.uploading.pop(foreign).parts, at
        assert not left_parts(target), at
        assert len(target.uploading) <= killed, at
        is_whole = case in ("first", "overwrite")
        sent = sum(map(len, wanted.values())) if is_whole else PATCHED[case]
        twice = PART if is_whole else WINDOW_BYTES
        if kind == "md5" and case != "stitch":
            twice = 0
        if kind == "pieces":
            twice = len(wanted["large"])
        assert target.payload <= sent + twice, at
        streamed = target.calls.count("write_part_pieces")
        assert bool(streamed) == (kind == "parts in pieces")
        if not killed:
            assert at > 20
            return
    raise AssertionError("it never came to its end")


def ends_after(name: str, count: int) -> StoreFaults:
    """The process ends when an operation was done so often."""
    calls = iter(range(1, 100))

    def end(called: str, _key: str) -> None:
        if called == name and next(calls) >= count:
            raise KilledError

    return StoreFaults(after=end)


def test_a_part_that_was_taken_over_is_known_to_the_run_after_that(tmp_path: Path) -> None:
    """One run ends when a part has arrived and is not recorded, one when all is done
    and not recorded. Of an object made of parts the store declares nothing.
    """
    source = MemoryStore("memory:a")
    target = MemoryStore("memory:b", replace(MEMORY, whole_hashes=()))
    runner = SyncRunner(source.store(), target.store(), tmp_path)
    source.write("large", bodies(2)["large"], PROPERTIES)
    assert runner().equal
    source.write("large", bodies(3)["large"], PROPERTIES)
    target.payload = 0
    for name, count in (("write_part", 2), ("complete", 1)):
        target.faults = ends_after(name, count)
        with pytest.raises(KilledError):
            runner()
    target.faults = StoreFaults()
    assert runner().level == "recorded:blake3"
    assert target.payload == len(bodies(3)["large"])
    assert target.bodies() == source.bodies()


@pytest.mark.parametrize("seed", range(5))
def test_killed_again_and_again_it_comes_to_its_end(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    source = MemoryStore("memory:a")
    target = MemoryStore("memory:b", rng.choice([*KINDS.values()]))
    runner = SyncRunner(source.store(), target.store(), tmp_path, delete=True)
    kills = 0
    for _ in range(6):
        for number in range(8):
            size = rng.choice([0, 10, 1000, PART, 3 * PART])
            source.write(f"k{number}", rng.randbytes(size), PROPERTIES)
        source.remove(f"k{rng.randrange(8)}")
        while run_killed(runner, target, rng.randrange(150)) is None:
            kills += 1
        assert target.bodies() == source.bodies()
    assert kills
    assert not left_parts(target)
