"""How reliable the peers have been in one job, and what each has sent."""

from collections.abc import Iterable

from merkle.outcome import PeerOutcome
from merkle.replica import PeerId

# After this many failures a peer gets no more requests in the job.
_FAILURES_MAX = 3


class Sources:
    """The reliability of the peers in this job, and the bytes fetched from each."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.bytes_fetched: dict[PeerId, int] = dict.fromkeys(peers, 0)
        self._failures: dict[PeerId, int] = dict.fromkeys(self.bytes_fetched, 0)
        self._false_claims: dict[PeerId, int] = dict.fromkeys(self.bytes_fetched, 0)
        self._codes: dict[PeerId, str] = {}

    def record_failure(self, peer: PeerId, code: str) -> None:
        """Count a request that the peer did not answer, or answered with an error."""
        self._failures[peer] += 1
        self._codes[peer] = code

    def record_false_claim(self, peer: PeerId, code: str) -> None:
        """Count a chunk that the peer's tree calls healthy, but that it did not deliver
        healthy.

        The peer lies, or its last scan was before the damage. Others are preferred from
        now on. The peer stays usable, because it may be the only one with the next
        window whole; each chunk is requested from it only once.
        """
        self._false_claims[peer] += 1
        self._codes.setdefault(peer, code)

    def failure_score(self, peer: PeerId) -> int:
        """The number of failures and false claims; peers with fewer are preferred."""
        return self._failures[peer] + self._false_claims[peer]

    def is_usable(self, peer: PeerId) -> bool:
        """Whether the peer may get further requests in this job."""
        return self._failures[peer] < _FAILURES_MAX

    def outcomes(self) -> tuple[PeerOutcome, ...]:
        """The outcome of each peer."""
        return tuple(
            PeerOutcome(peer, self._codes.get(peer, "ok"), fetched)
            for peer, fetched in self.bytes_fetched.items()
        )
