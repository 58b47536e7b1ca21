"""The verifier beside a target, as one replication uses it, while it answers.

A verifier makes a replication cheaper, never possible: what it does not do is done with
the target's own store. It is told the epoch of the lease before anything else, so that
it refuses whoever had an older one. When it fails it is passed by for a while, and the
replication says so.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from merkle.errors import ReconcileError
from proof.item import Profile
from replicator.hashing import blake3_of
from replicator.replication import Policy, ReplicationFault
from replicator.stores.address import same_bucket
from replicator.stores.errors import StoreError
from replicator.syncer.faults import FaultVerdict
from replicator.syncer.lease import Lease, LeaseLostError
from replicator.verifier.client import (
    AnswerLimits,
    VerifierClient,
    VerifierUnavailableError,
)
from replicator.verifier.run_fence import RunSupersededError, RunUnknownError
from replicator.verifier.values import RUN_BYTES, Description, RunName, WritesRefusedError
from runtime.errors import OperationInterruptedError, UsageError
from runtime.rate_limit import Clock
from runtime.tls_files import Tls

T = TypeVar("T")
# How long a verifier that failed is passed by, at first and in the end.
_FIRST_WAIT_S = 1.0
_WAIT_MAX_S = 30.0
# A run that the verifier does not know begins once more.
_TRIES = 2
# A call has a megabyte at most; while it is waited for, nothing else is tried.
LIMITS = AnswerLimits(answer_s=30.0, batch_s=30.0)


@contextmanager
def follower_client(address: str, *, tls: Tls | None, insecure: bool) -> Iterator[VerifierClient]:
    """A client of a verifier that waits no longer than a replication can."""
    client = VerifierClient(address, tls=tls, insecure=insecure, limits=LIMITS)
    try:
        yield client
    finally:
        client.close()


def check_verifier(client: VerifierClient, target: str) -> None:
    """Check that a verifier that answers is beside the target, and takes writes; from
    now on this client waits no longer than a replication can.

    Raises:
        UsageError: it is beside another bucket.
        WritesRefusedError: it takes no writes.
    """
    client.limits = LIMITS
    # One that is silent now is asked again; until then the work goes on without it.
    with suppress(VerifierUnavailableError):
        described(client, target)


def described(client: VerifierClient, target: str) -> Description:
    """What a verifier says of itself.

    Raises:
        UsageError: it is beside another bucket.
        WritesRefusedError: it takes no writes.
        VerifierUnavailableError: it does not answer.
        RemoteProtocolError, AccessDeniedError: see VerifierClient.
    """
    said = client.describe()
    if not same_bucket(said.address, target):
        raise UsageError(
            f"the verifier at {client.address} is of {said.address}, not of {target}",
            hint="Name its bucket as TARGET, or another verifier.",
        )
    if not said.takes_writes:
        raise WritesRefusedError(
            "this verifier takes no writes",
            hint="Set writes = true in its configuration, or replicate without it.",
        )
    return said


@dataclass(frozen=True, slots=True)
class VerifierSession:
    """What a verifier has said of itself when a run began at it."""

    profile: Profile
    lists_all_keys: bool


class TargetVerifier:
    """Connects to a verifier, and says whether it may be used now. Thread-safe."""

    def __init__(self, client: VerifierClient, policy: Policy, lease: Lease, clock: Clock) -> None:
        """Nothing is asked yet."""
        self.client = client
        self._target = policy.target
        self._lease = lease
        self._clock = clock
        pair = "\n".join(("replication", policy.policy_id, policy.source, policy.target))
        self._pair = blake3_of(pair.encode())[:RUN_BYTES]
        self._lock = threading.Lock()
        self._session: VerifierSession | None = None
        self._failures = 0
        self._not_before_s = 0.0
        self._trouble: FaultVerdict | None = None

    @property
    def trouble(self) -> FaultVerdict | None:
        """Why it is passed by; None while it is used, or was not asked yet."""
        return self._trouble

    def session(self) -> VerifierSession | None:
        """What is known of it; None while it is passed by.

        Raises:
            LeaseLostError: another syncer works on this.
        """
        session = self._session
        if session is not None or self._clock.monotonic_s() < self._not_before_s:
            return session
        # While one thread asks a verifier that has failed, the others pass it by.
        if not self._lock.acquire(blocking=not self._failures):
            return None
        try:
            if self._session is None and self._clock.monotonic_s() >= self._not_before_s:
                self._session = self._begun()
            return self._session
        finally:
            self._lock.release()

    def call(self, ask: Callable[[VerifierSession], T]) -> T | None:
        """What `ask` returns; None where the verifier cannot be used, or has failed.

        Raises:
            LeaseLostError: another syncer works on this.
            OperationInterruptedError: it was interrupted.
        """
        for _ in range(_TRIES):
            session = self.session()
            if session is None:
                return None
            self._lease.check()
            try:
                return ask(session)
            except RunUnknownError as error:
                # It has restarted: it has to be told the epoch again.
                self.drop(session, error, again=True)
            except (LeaseLostError, OperationInterruptedError):
                raise
            except ReconcileError as error:
                is_its_own = isinstance(error, VerifierUnavailableError | RunSupersededError)
                if is_its_own or not isinstance(error, StoreError):
                    self.drop(session, error)
                return None
        return None

    def drop(self, session: VerifierSession, error: ReconcileError, *, again: bool = False) -> None:
        """Note that a verifier has failed; with `again` it is asked anew at once."""
        with self._lock:
            if self._session is session:
                self._session = None
                if not again:
                    self._fail(error)

    def _begun(self) -> VerifierSession | None:
        """Begin a run at the verifier; None where that fails."""
        self._lease.check()
        try:
            said = described(self.client, self._target)
            name = secrets.token_bytes(RUN_BYTES)
            self.client.begin(said.profile, RunName(self._pair, name, self._lease.epoch))
        except ReconcileError as error:
            self._fail(error)
            return None
        self._failures, self._trouble = 0, None
        return VerifierSession(said.profile, said.lists_all_keys)

    def _fail(self, error: ReconcileError) -> None:
        wait_s = min(_FIRST_WAIT_S * 2 ** min(self._failures, 10), _WAIT_MAX_S)
        self._failures += 1
        self._not_before_s = self._clock.monotonic_s() + wait_s
        text = f"{error.message} {error.hint}".strip()
        self._trouble = FaultVerdict(
            ReplicationFault.VERIFIER_UNAVAILABLE,
            f"verifier {self.client.address} is passed by: {text}",
            waits=True,
        )
