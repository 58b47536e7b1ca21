"""A sync with a verifier, of which either side is killed at any write: of the journal
and rows of an index, of the ledger, of an object at the target. The next run makes the
sides equal, and what was written is not sent again but for what was on its way.
"""

import random
from contextlib import suppress
from pathlib import Path

import pytest

from replicator.stores.port import ObjectProperties
from replicator.verifier.client import VerifierUnavailableError
from tests.support.kill_points import KilledError
from tests.support.memory_store import StoreFaults
from tests.support.proven_storm import LIMITS, ProvenStorm

pytestmark = pytest.mark.crashes

PROPERTIES = ObjectProperties(metadata=(("owner", "ann"),), tags=(("team", "red"),))
OTHERS = ObjectProperties(metadata=(("owner", "bob"),))
MIB = 1 << 20
# Two batches, and a part of a large object.
ON_THEIR_WAY = 2 * MIB + LIMITS.part_bytes
WRITES = frozenset({"put", "put_properties", "delete", "begin", "write_part", "complete"})
POINTS_MAX = 500


class KilledPair(ProvenStorm):
    """A pair in calm weather, until one of its processes is killed at a write."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1, folder)
        self.at: int | None = None
        self.passed = 0

    def kill_at(self, at: int | None) -> None:
        """Kill whoever passes the point with this number, from 0."""
        self.at, self.passed = at, 0
        self.target.faults = StoreFaults(self._write_point, self._write_point)

    def _write_point(self, operation: str, _key: str) -> None:
        life = self.host.life if self.link.method else self._life
        life.check()
        if operation in WRITES:
            self._strike_verifier() if self.link.method else self._strike_syncer()

    def _strike_verifier(self) -> None:
        if self._is_it():
            self.host.kill()

    def _strike_syncer(self) -> None:
        self._life.check()
        if self._is_it():
            self._life.end()

    def _is_it(self) -> bool:
        self.passed += 1
        return self.at is not None and self.passed == self.at + 1


def bodies(seed: int, *, large: bool) -> dict[str, bytes]:
    rng = random.Random(seed)
    # Two batches.
    found = {f"k{number}": rng.randbytes(360_000) for number in range(3)} | {"z": b""}
    return found | ({"large": rng.randbytes(MIB + 70_000)} if large else {})


def changed(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def prepare(pair: KilledPair, case: str) -> tuple[dict[str, bytes], int]:
    """Set up a case; what the target must hold, and how many bytes must cross."""
    pair.target.is_foreign = True
    pair.target.write("extra", b"gone")
    pair.target.is_foreign = False
    before = bodies(1, large=True)
    if case == "first":
        wanted, sent = before, sum(map(len, before.values()))
    else:
        write_all(pair, before)
        assert pair.sync().equal
        pair.target.is_foreign = True
        pair.target.write("extra", b"gone again")
        pair.target.is_foreign = False
    if case == "overwrite":
        wanted = bodies(2, large=False)
        wanted["large"] = before["large"]
        pair.source.remove("k0")
        del wanted["k0"]
        sent = sum(len(body) for key, body in wanted.items() if key != "large")
        pair.source.touch("large", OTHERS)
    if case == "patch":
        wanted = before | {"large": changed(before["large"], MIB)}
        # The verifier makes the whole object from its windows.
        sent = len(wanted["large"])
    for key, body in wanted.items():
        if key not in pair.source.objects or pair.source.objects[key].body != body:
            pair.source.write(key, body, PROPERTIES)
    pair.target.payload = 0
    return wanted, sent


def write_all(pair: KilledPair, wanted: dict[str, bytes]) -> None:
    for key, body in wanted.items():
        pair.source.write(key, body, PROPERTIES)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", ["first", "overwrite", "patch"])
def test_killed_at_any_write_the_next_run_is_equal(
    case: str, step: int, memory_folder: Path
) -> None:
    killed = dict.fromkeys(("syncer", "verifier"), 0)
    for at in range(0, POINTS_MAX, step):
        pair = KilledPair(memory_folder / f"{case}-{at}")
        wanted, sent = prepare(pair, case)
        pair.kill_at(at)
        # A sync without its verifier ends, or names the object that it could not patch.
        with suppress(KilledError, VerifierUnavailableError):
            report = pair.sync()
            assert report.equal or report.failed or pair.host.kills
        if pair.passed <= at:
            break
        killed["verifier" if pair.host.kills else "syncer"] += 1
        pair.kill_at(None)
        report = pair.sync()
        assert report.equal, at
        assert pair.target.bodies() == wanted
        assert pair.target.payload <= sent + ON_THEIR_WAY, at
        assert not [one.parts for one in pair.target.uploading.values() if one.parts], at
        assert pair.host.bucket.index.self_check().damage == ()
    else:
        raise AssertionError("it never came to its end")
    assert min(killed.values()) > 0


def test_killed_again_and_again_it_comes_to_its_end(memory_folder: Path) -> None:
    rng = random.Random(3)
    pair = KilledPair(memory_folder / "pair")
    kills = 0
    for number in range(5):
        for key, body in bodies(number, large=rng.random() < 0.5).items():
            if rng.random() < 0.7:
                pair.source.write(key, body, PROPERTIES)
            else:
                pair.source.remove(key)
        while True:
            pair.kill_at(rng.randrange(40))
            try:
                pair.sync()
            except (KilledError, VerifierUnavailableError):
                kills += 1
            else:
                break
        assert pair.target.bodies() == pair.source.bodies()
    assert kills > 5
