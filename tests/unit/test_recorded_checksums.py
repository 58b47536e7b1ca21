"""A copy is checked against the hash that clients of its source have recorded, before
there is an object at the target (OZ-005).
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.object_checksum import Crc
from replicator.hashing import crc_hash
from replicator.replication import Stage
from replicator.stores.port import ObjectFacts, ObjectProperties, Store
from replicator.windows import WINDOW_BYTES
from tests.support.bucket_sync import LIMITS, SyncRunner
from tests.support.flawed_stores import FlawedReader
from tests.support.memory_store import DECLARING, UNPROVEN, MemoryStore
from tests.support.replications import Replication

SMALL = random.Random(1).randbytes(1000)
LARGE = random.Random(2).randbytes(LIMITS.part_bytes * 4 + 77)
NOTHING = ObjectProperties()


def flipped(body: bytes, at: int) -> bytes:
    """The same bytes but for one bit."""
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


class RecordingReader(FlawedReader):
    """Tells the recorded hash of one object, as Ozone does, and lists none."""

    crc = Crc.CRC32

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        found = super().facts(key, version=version)
        if found is None:
            return None
        with self.store.reader.read(found) as pieces:
            body = b"".join(pieces)
        return replace(found, hashes=(crc_hash(self.crc, body),))


def recording(store: MemoryStore, crc: Crc) -> Store:
    """A store that tells the recorded hash of one object."""
    found = store.store()
    reader = RecordingReader(found)
    reader.crc = crc
    capabilities = replace(found.capabilities, records_hashes=True)
    return replace(found, reader=reader, capabilities=capabilities)


class Pair:
    """A source whose listing has no hashes, and a target."""

    def __init__(self, folder: Path, *, target: MemoryStore, crc: Crc = Crc.CRC32) -> None:
        self.source = MemoryStore("memory:a", UNPROVEN)
        self.target = target
        store = self.source.store()
        self.reader = RecordingReader(store)
        self.reader.crc = crc
        capabilities = replace(store.capabilities, records_hashes=True)
        self.run = SyncRunner(
            replace(store, reader=self.reader, capabilities=capabilities),
            target.store(),
            folder / "state",
        )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path, target=MemoryStore("memory:b", UNPROVEN))


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["in one request", "in parts"])
@pytest.mark.parametrize("crc", [Crc.CRC32, Crc.CRC32C])
def test_bytes_that_are_not_the_recorded_ones_never_become_an_object(
    body: bytes, crc: Crc, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, target=MemoryStore("memory:b", UNPROVEN), crc=crc)
    pair.source.write("bad", body, NOTHING)
    pair.source.write("good", body, NOTHING)
    pair.reader.bodies["bad"] = flipped(body, 500)
    report = pair.run()
    assert [(one.key, one.reason) for one in report.failed] == [("bad", "source_disagrees")]
    assert pair.target.bodies() == {"good": body}
    assert not report.equal
    del pair.reader.bodies["bad"]
    assert pair.run().equal
    assert pair.target.bodies() == {"bad": body, "good": body}


def test_what_is_there_stays_where_its_successor_was_read_wrong(pair: Pair) -> None:
    pair.source.write("k", LARGE, NOTHING)
    pair.run()
    newer = flipped(LARGE, WINDOW_BYTES + 1)
    pair.source.write("k", newer, NOTHING)
    pair.reader.bodies["k"] = flipped(newer, 3 * LIMITS.part_bytes)
    assert [one.reason for one in pair.run().failed] == ["source_disagrees"]
    assert pair.target.bodies() == {"k": LARGE}
    pair.reader.bodies.clear()
    assert pair.run().equal
    assert pair.target.bodies() == {"k": newer}


def test_a_target_that_declares_the_recorded_crc_agrees(tmp_path: Path) -> None:
    """What arrived there has the CRC that the source's client recorded."""
    pair = Pair(tmp_path, target=MemoryStore("memory:b", DECLARING), crc=Crc.CRC64NVME)
    pair.source.write("k", LARGE, NOTHING)
    pair.source.write("empty", b"", NOTHING)
    assert pair.run().equal
    made = pair.target.facts("k")
    assert made is not None
    assert crc_hash(Crc.CRC64NVME, LARGE) in made.hashes


@pytest.mark.parametrize("crc", [Crc.CRC32, Crc.CRC32C])
@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "read"])
def test_what_a_killed_syncer_has_sent_is_not_sent_again(
    tmp_path: Path, crc: Crc, is_recorded: bool
) -> None:
    """The log comes once more, to a syncer without the ledger (OZ-048). An object that
    came in parts has the CRC at the target that is recorded at the source, or that its
    bytes have.
    """
    source = MemoryStore("memory:a", UNPROVEN, has_feed=True)
    target = MemoryStore("memory:b", UNPROVEN)
    ours = recording(source, crc) if is_recorded else source.store()
    theirs = recording(target, crc)
    first = Replication(ours, theirs, tmp_path / "first")
    first.run(60)
    checkpoint = first.engine.report().checkpoint
    assert checkpoint.stage is Stage.LIVE
    source.write("k", LARGE, NOTHING)
    first.run(20)
    assert target.bodies() == {"k": LARGE}
    first.kill()
    second = Replication(ours, theirs, tmp_path / "second", checkpoint=checkpoint)
    second.run(60)
    assert second.engine.report().applied == 1
    assert target.payload == len(LARGE)
    source.write("k", flipped(LARGE, 9), NOTHING)
    second.run(60)
    assert target.bodies() == {"k": flipped(LARGE, 9)}
