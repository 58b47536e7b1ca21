"""Compare both sides beside rounds that go from snapshot to snapshot.

The comparison reads the source as it is now, while rounds go on, and applies nothing.
The next snapshot that is made after its end has all that it has seen. The round of that
one sees to the keys that differed, and the differences of the rounds up to then name
each key that was changed meanwhile: it is in flight, and no difference.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from replicator.stores.port import Change, SnapshotFacts
from replicator.syncer.comparing import Comparing
from replicator.syncer.differences_found import DifferenceSink, KeptDifferences
from replicator.syncer.phase import SyncPhase
from replicator.syncer.round_proofs import RoundProofs

# With more differences both sides are compared anew, while the rounds wait.
_FOUND_MAX = 10_000
# Keys that are noted while both sides are compared.
_NOTED_MAX = 100_000


@dataclass
class _Proof:
    """One comparison, and what it waits for."""

    phase: SyncPhase
    comparing: Comparing
    kept: KeptDifferences
    moved: set[str] | None = field(default_factory=set)
    # Made after the comparison has ended.
    snapshot: SnapshotFacts | None = None


class SnapshotProofs:
    """The comparisons of one replication by snapshots. Owned by one thread."""

    def __init__(
        self,
        proofs: RoundProofs,
        new_phase: Callable[[], SyncPhase],
        compare: Callable[[SyncPhase, DifferenceSink], Comparing],
    ) -> None:
        """`proofs` says when one is due. `new_phase` gives the tools for the source as
        it is now, and `compare` begins to compare with them.
        """
        self._proofs = proofs
        self._new_phase = new_phase
        self._compare = compare
        self._proof: _Proof | None = None
        self.must_compare = False
        """Whether there are too many differences to be kept."""

    @property
    def is_under_way(self) -> bool:
        """Whether a comparison runs, or waits for its round."""
        return self._proof is not None

    @property
    def awaits_answer(self) -> bool:
        """Whether keys are being read."""
        return self._proof is not None and self._proof.comparing.is_waiting

    def advance(self, pending: Iterable[Change]) -> bool:
        """Compare a little where that is due; `pending` is what is being applied.
        Whether there was something to do.

        Raises:
            ReconcileError: a side did not answer; call it again.
        """
        proof = self._proof
        if proof is None:
            if not self._proofs.is_due or self.must_compare:
                return False
            phase, kept = self._new_phase(), KeptDifferences()
            proof = self._proof = _Proof(phase, self._compare(phase, kept), kept)
            self.note_changes(pending)
        if proof.comparing.is_done:
            return False
        proof.comparing.advance()
        if len(proof.kept.found) > _FOUND_MAX:
            self.cancel()
            self.must_compare = True
        return not proof.comparing.is_waiting

    def note_changes(self, changes: Iterable[Change]) -> None:
        """Note changes that a round applies."""
        proof = self._proof
        if proof is None or proof.moved is None:
            return
        for one in changes:
            proof.moved.update(name for name in (one.key, one.previous_key) if name)
        if len(proof.moved) > _NOTED_MAX:
            proof.moved = None

    def note_snapshot(self, snapshot: SnapshotFacts) -> None:
        """Note that a snapshot was made just now."""
        proof = self._proof
        if proof is not None and proof.snapshot is None and proof.comparing.is_done:
            proof.snapshot = snapshot

    def apply(self, snapshot: SnapshotFacts, sink: DifferenceSink) -> None:
        """At the beginning of the round of a snapshot: let what differs be applied."""
        proof = self._proof
        if proof is not None and proof.snapshot == snapshot:
            proof.kept.apply(sink)

    def end_round(self, snapshot: SnapshotFacts, *, failed: int) -> None:
        """At the end of the round of a snapshot: note what was proven. So many keys
        have `failed`.
        """
        proof = self._proof
        if proof is None or proof.snapshot != snapshot:
            return
        # The rounds have named all that moved.
        result = replace(proof.comparing.result(), in_flight=0)
        self._proofs.note(result, moved=proof.moved, failed=failed, names_moved=True)
        self.cancel()

    def cancel(self) -> None:
        """End what is under way: nobody wants it any more."""
        proof, self._proof = self._proof, None
        if proof is not None:
            proof.comparing.cancel()
            proof.phase.close()
