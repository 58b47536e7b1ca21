"""A replication in a storm loses nothing, and says nothing that is not so: R1 to R5."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.replication_storm import ReplicationStorm

STEPS = 400


def weather(seed: int, folder: Path) -> ReplicationStorm:
    """One storm to its end."""
    storm = ReplicationStorm(seed, folder)
    try:
        storm.run(STEPS)
        storm.heal()
    except BaseException as error:
        lines = "\n".join(storm.trace)
        error.add_note(f"seed {seed}\n{lines}")
        raise
    finally:
        storm.close()
    return storm


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_nothing_is_lost_in_a_storm(start: int, tmp_path: Path) -> None:
    marks, operations = Counter[str](), 0
    for seed in range(start, start + 10):
        storm = weather(seed, tmp_path / str(seed))
        marks += storm.marks
        operations += storm.operations
    assert operations > 2_500
    print(marks)
