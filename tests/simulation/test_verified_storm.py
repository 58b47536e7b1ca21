"""A replication that uses a verifier loses nothing in a storm, and proves nothing that
is not so: the rules of the storm without one, with another process that is killed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from proof.comparison import BucketComparison
from replicator.proven_plan import ProvenStep
from replicator.proving import PairProof, PairProver
from replicator.stores.port import DeleteFailure
from replicator.syncer import index_proofs, proof
from replicator.syncer.index_proofs import IndexProofs
from replicator.syncer.verified_store import _VerifiedWriter
from replicator.verifier.key_applier import KeyApplier
from replicator.verifier.run_fence import RunFence, RunUnknownError
from replicator.verifier.values import KeyWrite, RunName, WriteOutcome
from tests.support.verified_storm import VerifiedStorm
from tests.support.weather import all_in_flight, shows_a_bug, weather

STEPS = 300
SEEDS = 8


@pytest.mark.parametrize(
    "start",
    [
        0,
        *(
            pytest.param(start, marks=pytest.mark.long)
            for start in (SEEDS, *range(1_000, 1_400, SEEDS))
        ),
    ],
)
def test_nothing_is_lost_in_a_storm_with_a_verifier(start: int, tmp_path: Path) -> None:
    """OZ-040, OZ-048, OZ-049, OZ-084, OZ-135."""
    marks = Counter[str]()
    for seed in range(start, start + SEEDS):
        marks += weather(VerifiedStorm(seed, tmp_path / str(seed)), STEPS).marks
    assert {"verified write", "verifier killed", "proven", "LIVE"} <= marks.keys()


def test_a_storm_that_once_failed_heals(tmp_path: Path) -> None:
    """A key that indexes showed to be equal had no row in an empty ledger. So rounds of
    a source without a log did not miss it when it was deleted.
    """
    weather(VerifiedStorm(20_189, tmp_path), STEPS)


def test_a_storm_with_a_verifier_is_the_same_each_time(tmp_path: Path) -> None:
    storms = [weather(VerifiedStorm(3, tmp_path / name), STEPS) for name in "ab"]
    one, other = ((list(storm.trace), storm.marks, storm.history.states) for storm in storms)
    assert one == other


def lets_all_write(self: RunFence, run: RunName | None) -> None:
    """A run writes although a later one has begun."""
    del self, run


def takes_unknown_runs(self: RunFence, run: RunName | None) -> None:
    """A verifier that has restarted takes what comes by any epoch."""
    with suppress(RunUnknownError):
        check(self, run)


def told_is_done(self: _VerifiedWriter, write: KeyWrite) -> WriteOutcome | None:
    """Whatever the verifier answers to a write, it is done."""
    (outcome,) = self._calls.run([write])
    return outcome


def told_is_deleted(self: _VerifiedWriter, keys: Sequence[str]) -> list[DeleteFailure]:
    """Whatever the verifier answers to a delete, it is done."""
    self._calls.run([KeyWrite(key) for key in keys])
    return []


def deletes_nothing(self: KeyApplier, keys: Sequence[str]) -> dict[str, object]:
    """The verifier says that keys are gone before they are."""
    del self
    return {key: (WriteOutcome(), [(key, None)]) for key in keys}


def one_old_look(
    prover: PairProver, take: Callable[[BucketComparison], None], *, must_settle: bool
) -> PairProof:
    """The indexes are compared as they were when somebody refreshed them last."""
    del must_settle
    return prover.compare(take, only_keys=True)


def finds_nothing(self: IndexProofs, *_given: object) -> Iterator[ProvenStep]:
    """What differs by the indexes is passed over."""
    del self
    yield from ()


check = RunFence.check
BUGS: dict[str, tuple[type | ModuleType, str, object]] = {
    "a later run fences nobody": (RunFence, "check", lets_all_write),
    "a run that is not known writes": (RunFence, "check", takes_unknown_runs),
    "what a verifier refuses is written": (_VerifiedWriter, "_outcome", told_is_done),
    "what a verifier refuses is deleted": (_VerifiedWriter, "delete", told_is_deleted),
    "a delete is answered and not done": (KeyApplier, "_delete", deletes_nothing),
    "old indexes are compared": (index_proofs, "_proof", one_old_look),
    "what indexes show is passed over": (IndexProofs, "_decided", finds_nothing),
    "every difference is in flight": (proof, "_is_among", all_in_flight),
}
# Seeds of storms that show what is found in few of them.
FIRST_SEEDS = {
    "what a verifier refuses is written": 50,
    "what a verifier refuses is deleted": 94,
}


@pytest.mark.crashes
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, wrong = BUGS[bug]
    monkeypatch.setattr(kind, name, wrong)
    first = FIRST_SEEDS.get(bug, 0)
    seeds = range(first, first + 60)
    assert shows_a_bug(lambda seed: VerifiedStorm(seed, tmp_path / str(seed)), STEPS, seeds)
