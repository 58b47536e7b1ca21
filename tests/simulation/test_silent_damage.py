"""Damage on the disk behind a bucket's own index: what is read is found, all of it and
nothing else, and a sync repairs it.
"""

import random
from pathlib import Path

import pytest

from proof.naming import ItemDifferenceKind
from replicator.hashing import blake3_of
from tests.support.stores import put
from tests.support.verifiers import VerifiedPair, held, verified_pair

OBJECTS, DAMAGES = 1_300, 1_000


def data_files(pair: VerifiedPair) -> dict[bytes, Path]:
    """The target's data files by the hash of their content."""
    files = (pair.folder / "target" / "data").rglob("*")
    return {blake3_of(file.read_bytes()): file for file in files if file.is_file()}


@pytest.mark.parametrize("seed", [1])
def test_all_damage_is_found_when_it_is_read_and_none_wrongly(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with verified_pair(tmp_path) as pair:
        bodies = {}
        for number in range(OBJECTS):
            # Larger than what is kept in rows, so that each has a file of its own.
            bodies[f"{number:05}"] = chance.randbytes(chance.randrange(17_000, 20_000))
            put(pair.source, f"{number:05}", bodies[f"{number:05}"])
        assert pair.sync().equal
        files = data_files(pair)
        wrong, extra = set[str](), set[str]()
        for number, key in enumerate(chance.sample(sorted(bodies), DAMAGES)):
            file = files[blake3_of(bodies[key])]
            match chance.choice(["flip", "remove", "cut", "extra"]):
                case "flip":
                    data = bytearray(file.read_bytes())
                    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                    file.write_bytes(data)
                    wrong.add(key)
                case "remove":
                    file.unlink()
                    wrong.add(key)
                case "cut":
                    file.write_bytes(file.read_bytes()[: chance.randrange(100)])
                    wrong.add(key)
                case "extra":
                    put(pair.target, f"extra-{number}", chance.randbytes(10))
                    extra.add(f"extra-{number}")
        # The store's own index shows only what was written through it.
        recorded = pair.prover().settle()
        assert {one.key for one in recorded.differences} == extra
        read_since_s = pair.bucket.clock.now_ms() // 1000
        read = pair.prover().settle(read_since_s=read_since_s)
        kinds = {one.key: one.kind for one in read.differences}
        assert {k for k, kind in kinds.items() if kind is ItemDifferenceKind.CHANGED} == wrong
        assert {k for k, kind in kinds.items() if kind is ItemDifferenceKind.EXTRA} == extra
        assert (len(kinds), read.in_flight) == (DAMAGES, 0)
        report = pair.sync(delete=True)
        assert (report.copied, report.deleted) == (len(wrong), len(extra))
        assert (report.equal, report.failed) == (True, ())
        assert {key: body for key, (body, _) in held(pair.target).items()} == bodies
        again = pair.prover().settle(read_since_s=pair.bucket.clock.now_ms() // 1000)
        assert again.is_equal
