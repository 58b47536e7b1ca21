"""Which run of a pair may write at a verifier: the latest, none of an older lease."""

import threading
from pathlib import Path

import pytest

from replicator.verifier.run_fence import RunFence, RunSupersededError, RunUnknownError
from replicator.verifier.values import RunName
from runtime.errors import ConfigError

PAIR, OTHER = b"pair-one", b"pair-two"


def run(name: str, epoch: int = 0, pair: bytes = PAIR) -> RunName:
    return RunName(pair, name.encode().ljust(8), epoch)


def test_an_older_epoch_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    """OZ-048, OZ-049."""
    path = tmp_path / "epochs.json"
    fence = RunFence(threading.Lock(), path)
    fence.begin(run("a", 6))
    fence.begin(run("b", 7))
    with pytest.raises(RunSupersededError, match="epoch 7"):
        fence.begin(run("a", 6))
    with pytest.raises(RunSupersededError):
        fence.check(run("a", 6))
    fence.check(run("b", 7))
    fence = RunFence(threading.Lock(), path)
    with pytest.raises(RunSupersededError):
        fence.begin(run("a", 6))
    # What such a run sent before the restart is not taken either.
    with pytest.raises(RunUnknownError):
        fence.check(run("a", 6))
    with pytest.raises(RunUnknownError):
        fence.check(run("b", 7))
    fence.begin(run("b", 7))
    fence.check(run("b", 7))


def test_pairs_do_not_fence_each_other(tmp_path: Path) -> None:
    fence = RunFence(threading.Lock(), tmp_path / "epochs.json")
    fence.begin(run("a", 9))
    fence.begin(run("b", 1, OTHER))
    fence.check(run("a", 9))
    fence.check(run("b", 1, OTHER))
    # A run without a lease need not begin, as long as no other one has.
    fence.check(run("c", pair=b"pair-six"))


@pytest.mark.parametrize("text", ["", "[]", '{"00": 1}', '{"zz": 1}', '{"00": "x"}'])
def test_damaged_epochs_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "epochs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        RunFence(threading.Lock(), path)
