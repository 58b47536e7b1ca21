"""A replication that uses a verifier loses nothing in a storm, and proves nothing that
is not so: the rules of the storm without one, with another process that is killed.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.verified_storm import VerifiedStorm

STEPS = 300
SEEDS = 8


def weather(seed: int, folder: Path) -> VerifiedStorm:
    """One storm to its end; an error shows what happened to the key that it names."""
    storm = VerifiedStorm(seed, folder)
    try:
        storm.run(STEPS)
        storm.heal()
    except BaseException as error:
        key = getattr(error, "key", None)
        error.add_note("\n".join([f"seed {seed}", *storm.trace_of(key)]))
        raise
    finally:
        storm.close()
    return storm


@pytest.mark.parametrize(
    "start",
    [
        *range(0, 2 * SEEDS, SEEDS),
        *(pytest.param(start, marks=pytest.mark.long) for start in range(1_000, 1_400, SEEDS)),
    ],
)
def test_nothing_is_lost_in_a_storm_with_a_verifier(start: int, tmp_path: Path) -> None:
    """OZ-040, OZ-048, OZ-049, OZ-084, OZ-135."""
    marks = Counter[str]()
    for seed in range(start, start + SEEDS):
        marks += weather(seed, tmp_path / str(seed)).marks
    assert {"verified write", "verifier killed", "proven", "LIVE"} <= marks.keys()


def test_a_storm_with_a_verifier_is_the_same_each_time(tmp_path: Path) -> None:
    traces = [list(weather(3, tmp_path / name).trace) for name in "ab"]
    assert traces[0] == traces[1]
