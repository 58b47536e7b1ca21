"""Which run of a pair of buckets may write: the latest that has begun.

A run that is killed may have sent a batch that the verifier has not read yet. It would
be applied while the next run goes on, to the items that it names. So each run tells the
verifier a name of its own before it compares anything, and names itself in whatever
changes an object. What a run before it has sent is refused from then on.

The names are kept in memory. What was sent to a verifier that has ended is lost with
its connections.
"""

from collections import OrderedDict
from contextlib import AbstractContextManager

from merkle.errors import ReconcileError
from replicator.verifier.values import RunName

# Pairs whose latest run is known; of others no run is refused.
_PAIRS_MAX = 1_024


class RunSupersededError(ReconcileError):
    """A later run of the same pair has begun, so this one may not write any more."""

    code = "run_superseded"


class RunFence:
    """The latest run of each pair. Thread-safe."""

    def __init__(self, writing: AbstractContextManager[object]) -> None:
        """`writing` is held by whoever changes objects."""
        self._writing = writing
        self._latest = OrderedDict[bytes, bytes]()

    def begin(self, run: RunName) -> None:
        """Let this run write, and none before it of its pair. What an earlier one is
        writing has ended on return.
        """
        with self._writing:
            self._latest[run.pair] = run.run
            self._latest.move_to_end(run.pair)
            while len(self._latest) > _PAIRS_MAX:
                self._latest.popitem(last=False)

    def check(self, run: RunName | None) -> None:
        """Check that a later run has not begun; `writing` is held. A caller that names
        no run is not checked.

        Raises:
            RunSupersededError: one has.
        """
        if run is not None and self._latest.get(run.pair, run.run) != run.run:
            raise RunSupersededError(
                "a later run of this pair of buckets has begun",
                hint="Let one sync of a state folder run at a time.",
            )
