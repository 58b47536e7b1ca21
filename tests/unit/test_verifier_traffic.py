"""What crosses between a syncer and a verifier, headers counted, over a warm
connection.
"""

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.verifier.client import VerifierClient
from tests.support.stores import put
from tests.support.verifiers import VerifiedPair, fill, verified_pair
from tests.support.wan import WanLink


@contextmanager
def far_pair(folder: Path) -> Iterator[tuple[VerifiedPair, WanLink]]:
    """A pair whose verifier is reached across a link."""
    with (
        verified_pair(folder) as pair,
        WanLink(pair.client.address) as link,
        closing(VerifierClient(link.address)) as client,
    ):
        client.describe()
        yield replace(pair, client=client), link


def crossed(link: WanLink) -> int:
    return link.traffic().total.length_bytes


def test_equal_buckets_cost_a_round_trip(tmp_path: Path) -> None:
    with far_pair(tmp_path) as (pair, link):
        fill(pair.source, 300)
        pair.sync()
        prover = pair.prover()
        prover.refresh()
        link.reset()
        proof = prover.compare()
        assert (proof.is_equal, proof.round_trips) == (True, 1)
        assert crossed(link) <= 1_000


def test_one_byte_of_64_mib_crosses_in_24_kb(tmp_path: Path) -> None:
    with far_pair(tmp_path) as (pair, link):
        body = bytearray(random.Random(1).randbytes(64 << 20))
        put(pair.source, "k", body)
        pair.sync()
        body[40_000_000] ^= 1
        put(pair.source, "k", body)
        link.reset()
        report = pair.sync()
        assert (report.equal, report.copied, report.bytes) == (True, 1, 16 << 10)
        assert crossed(link) <= 24_000


def test_small_objects_cost_little_more_than_their_bytes(tmp_path: Path) -> None:
    with far_pair(tmp_path) as (pair, link):
        chance = random.Random(1)
        for number in range(400):
            put(pair.source, f"logs/2026/{number:06}", chance.randbytes(4096))
        link.reset()
        report = pair.sync()
        assert (report.equal, report.copied) == (True, 400)
        assert crossed(link) <= 1.1 * 400 * 4096


@pytest.mark.parametrize(("extras", "kept"), [(400, 0), (400, 400)])
def test_a_delete_costs_less_than_100_bytes(tmp_path: Path, extras: int, kept: int) -> None:
    """All that crosses in the run: two comparisons, the names, the deletes, the answers
    and the last comparison. Row OZ-010. Which symbols are needed differs with the
    secret of the pair; of fewer deletes that is more than a margin.
    """
    with far_pair(tmp_path) as (pair, link):
        for number in range(kept):
            for store in (pair.source, pair.target):
                put(store, f"kept/{number:06}", b"%d" % number)
        chance = random.Random(1)
        for _ in range(extras):
            # Names that hardly compress.
            put(pair.target, f"logs/2026/{chance.randbytes(8).hex()}", chance.randbytes(100))
        assert pair.sync().differences == extras
        link.reset()
        report = pair.sync(delete=True)
        assert (report.equal, report.deleted) == (True, extras)
        assert crossed(link) <= extras * 100
