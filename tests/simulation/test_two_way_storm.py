"""Buckets that replicate to each other in a storm come to rest: no newer write is lost.

A pair and a ring of three with `newest_wins`: writers work at all buckets at once, also
between a syncer's look and its write; syncers are killed and lose their disks, links
are cut, logs have gaps, and clocks jump.
"""

from collections import Counter
from pathlib import Path

import pytest

from replicator.origin import Origin, OriginMarks
from replicator.stores.port import ObjectFacts, ObjectProperties
from replicator.syncer.conflict import KeySides, Standing
from replicator.syncer.two_way import TwoWayRules
from tests.support.two_way_storm import TwoWayStorm
from tests.support.weather import shows_a_bug, weather

STEPS = 300
SEEDS = 12


@pytest.mark.parametrize(
    ("names", "start"),
    [
        ("ab", 0),
        ("abc", 0),
        *(
            pytest.param(names, start, marks=pytest.mark.long)
            for names in ("ab", "abc")
            for start in range(1_000, 1_600, SEEDS)
        ),
    ],
)
def test_buckets_come_to_rest_and_lose_no_newer_write(
    names: str, start: int, tmp_path: Path
) -> None:
    """OZ-155, OZ-156, OZ-158."""
    marks, operations = Counter[str](), 0
    for seed in range(start, start + SEEDS):
        storm = weather(TwoWayStorm(seed, tmp_path / str(seed), names), STEPS)
        marks += storm.marks
        operations += storm.operations
    assert operations > 400
    assert {"killed", "race"} <= marks.keys()


@pytest.mark.parametrize(
    ("names", "seed"),
    [
        # Properties were judged by a row about objects that neither side had any more.
        ("ab", 50),
        # A look by the ledger's row began the wait for the other direction anew.
        ("ab", 119),
        # Tags set just after a copy had brought others: one direction left them to the
        # other, which did not look at its target's properties.
        ("ab", 1_511),
        # A ring where two sides had set tags of one object at once.
        ("abc", 20_273),
        # A deletion between two snapshots was judged by a row about a copy that the
        # target had sent since.
        ("abc", 494),
    ],
)
def test_a_storm_that_once_failed_heals(names: str, seed: int, tmp_path: Path) -> None:
    """OZ-155."""
    weather(TwoWayStorm(seed, tmp_path, names), STEPS)


def time_of_copying(self: OriginMarks, facts: ObjectFacts, properties: ObjectProperties) -> Origin:
    """A copy counts as written when it was copied."""
    del properties
    return Origin(self.bucket, facts.modified_ms, facts.size_bytes, facts.etag, is_copy=False)


def always_newer(self: KeySides) -> Standing:
    """Whatever a change says is newer than what the target has."""
    del self
    return Standing.NEWER


def never_newer(self: KeySides) -> Standing:
    """What the target has always stays."""
    del self
    return Standing.OLDER


def any_delete(self: TwoWayRules, *_given: object) -> bool:
    """A deletion takes whatever the target has by now."""
    del self
    return True


BUGS: dict[str, tuple[object, str, object]] = {
    "a copy has the time of its copying": (OriginMarks, "of", time_of_copying),
    "whatever comes wins": (KeySides, "standing", always_newer),
    "what is there wins": (KeySides, "standing", never_newer),
    "a deletion takes what it has not seen": (TwoWayRules, "may_delete", any_delete),
}
# Seeds of storms that show what is found in few of them.
FIRST_SEEDS = {
    ("a copy has the time of its copying", "ab"): 82,
    ("a deletion takes what it has not seen", "ab"): 28,
}


@pytest.mark.crashes
@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_found(
    bug: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name, wrong = BUGS[bug]
    monkeypatch.setattr(kind, name, wrong)
    first = FIRST_SEEDS.get((bug, names), 0)
    seeds = range(first, first + 60)
    assert shows_a_bug(lambda seed: TwoWayStorm(seed, tmp_path / str(seed), names), STEPS, seeds)
