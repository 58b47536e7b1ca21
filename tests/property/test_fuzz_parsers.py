"""Nearly valid inputs for every parser: each is a valid value or refused by name, in
time and without filling memory.

`make test` runs a slice of them, `make test-long` all; both start from the same seeds.
A failure prints the target, the number of the input, and its bytes.
"""

import random
import resource
import time
from pathlib import Path

import pytest

from merkle.errors import ReconcileError
from tests.support.bucket_fuzz_targets import BUCKET_FILES, bucket_targets
from tests.support.command_fuzz_targets import COMMAND_FILES
from tests.support.fuzz_targets import Target, targets

NAMES = [
    *(target.name for target in (*targets(Path()), *bucket_targets())),
    *BUCKET_FILES,
    *COMMAND_FILES,
]
FILES = {**BUCKET_FILES, **COMMAND_FILES}
SLICE, ALL = 120, 4_500
# Of one input: far above what any takes, far below what a deadline allows.
CPU_S_MAX = 2.0
# Of the process, over all inputs of a target.
GROWTH_KIB_MAX = 256 << 10


def _find(name: str, scratch: Path) -> Target:
    if name in FILES:
        return FILES[name](scratch)
    made = (*targets(scratch), *bucket_targets())
    return next(target for target in made if target.name == name)


def _fuzz(target: Target, first: int, count: int) -> None:
    refused = 0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, first + count):
        raw = target.make(random.Random(f"{target.name} {number}"))
        begun_s = time.process_time()
        try:
            target.accept(raw)
        except ReconcileError:
            refused += 1
        except Exception as error:  # noqa: BLE001 - any is the defect that is looked for
            pytest.fail(f"{target.name}, input {number}: {error!r} of {raw[:2000]!r}")
        spent_s = time.process_time() - begun_s
        assert spent_s < CPU_S_MAX, f"{target.name}, input {number}: {spent_s:.1f} s"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_kib
    assert grown_kib < GROWTH_KIB_MAX, f"{target.name}: {grown_kib >> 10} MiB"
    # Mutations that are all harmless, or all fatal, would prove little.
    assert refused < count, f"{target.name}: all refused"
    assert (refused > 0) == target.refuses, f"{target.name}: {refused} of {count} refused"


@pytest.mark.parametrize("name", NAMES)
def test_nearly_valid_input_is_a_value_or_refused_by_name(tmp_path: Path, name: str) -> None:
    _fuzz(_find(name, tmp_path), 0, SLICE)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_great_many_of_them_are(tmp_path: Path, name: str) -> None:
    _fuzz(_find(name, tmp_path), SLICE, ALL)


def test_the_long_run_has_more_than_100_000_inputs() -> None:
    assert len(NAMES) * ALL >= 100_000
