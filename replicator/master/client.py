"""Clients of replication masters: one for syncers, one for commands.

Several masters share a database, so any of them may answer: a call that does not reach
one goes to the next. Calls can be repeated: whatever a master did before its answer was
lost changes nothing the second time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from protos import replication_pb2 as pb
from protos.replication_pb2_grpc import ReplicationMasterStub
from replicator.master.errors import MasterUnavailableError
from replicator.master.messages import (
    assignment_from,
    caller_to,
    capacity_to,
    checked_answer,
    held_to,
    options_to,
    policy_to,
)
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import Assignment, Caller, HeldReport
from replicator.master.view_messages import status_from, view_from
from replicator.master.views import MasterStatus, ReplicationView
from replicator.replication import DesiredState, Policy, PolicyId, ReplicationOptions
from runtime.errors import RemoteProtocolError
from runtime.roles import Role
from runtime.rpc import named_errors, open_channel
from runtime.tls_files import Tls

# A command waits so long for one master.
DEADLINE_S = 30.0
# A syncer asks the next master after this time: a lease lasts a few seconds.
_SYNCER_DEADLINE_S = 2.0
_MASTERS_MAX = 16
_AnswerT = TypeVar("_AnswerT", bound=Message)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease: it lasts from when it was asked for, on the clock of time.monotonic. The
    next heartbeat is due after `heartbeat_s`.
    """

    asked_s: float
    duration_s: float
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class SyncerWork:
    """What an answer to a heartbeat says: the lease, all replications that the syncer
    has, and those whose reports did not count. What it had and is not in `assignments`
    it must stop, and release then.
    """

    lease: HeldLease
    assignments: tuple[Assignment, ...]
    refused: tuple[PolicyId, ...]


class _MasterCalls:
    """Calls to the first of some masters that answers. Thread-safe."""

    def __init__(
        self, addresses: Sequence[str], *, tls: Tls | None, insecure: bool, deadline_s: float
    ) -> None:
        assert 0 < len(addresses) <= _MASTERS_MAX
        self.addresses = tuple(addresses)
        self._deadline_s = deadline_s
        self._channels: list[grpc.Channel] = []
        # Where the last call was answered: others ask there first.
        self._current = 0
        try:
            for address in addresses:
                channel = open_channel(
                    address, tls=tls, insecure=insecure, server=Role.REPLICATION_MASTER
                )
                self._channels.append(channel)
        except BaseException:
            self.close()
            raise
        self._stubs = [ReplicationMasterStub(channel) for channel in self._channels]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def call(
        self, method: Callable[[ReplicationMasterStub], Callable[..., _AnswerT]], request: Message
    ) -> _AnswerT:
        """Raises MasterUnavailableError if none answers, RemoteProtocolError, and what
        the master returns.
        """
        first = self._current
        for step in range(len(self._stubs)):
            at = (first + step) % len(self._stubs)
            try:
                with named_errors(
                    f"replication master {self.addresses[at]}", MasterUnavailableError
                ):
                    answer = method(self._stubs[at])(request, timeout=self._deadline_s)
            except MasterUnavailableError:
                if step + 1 == len(self._stubs):
                    raise
                continue
            self._current = at
            # The stubs have it as a message; a server may have sent bytes of another.
            if not isinstance(answer, Message):
                raise RemoteProtocolError("a replication master sent an invalid answer")
            return answer
        raise AssertionError("there is a master to ask")


class SyncerClient:
    """A syncer's connection to its masters; it connects on first use. Every call may
    raise MasterUnavailableError, RemoteProtocolError for an invalid answer, and what a
    master returns. Calls that register and beat come from one thread; `save_report` and
    `release` are thread-safe.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        caller: Caller,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`caller` has the syncer's ID and a session made for this process alone."""
        self._calls = _MasterCalls(
            addresses, tls=tls, insecure=insecure, deadline_s=_SYNCER_DEADLINE_S
        )
        self._caller = caller
        self._monotonic_s = monotonic_s
        # By policy: the digest of what is known, and what that is.
        self._known: dict[PolicyId, tuple[int, Assignment]] = {}

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()

    def register(self, host: str, started_ms: int, capacity: SyncerCapacity) -> HeldLease:
        """Ask for a lease; before, the syncer must have stopped whatever it had.

        Raises:
            BusyError: another process of this syncer may still work; try again.
            SyncerRefusedError: another certificate registered this ID.
        """
        self._known.clear()
        request = pb.RegisterRequest(
            caller=caller_to(self._caller),
            host=host,
            started_ms=started_ms,
            capacity=capacity_to(capacity),
        )
        sent_s = self._monotonic_s()
        answer: pb.RegisterResponse = self._calls.call(lambda stub: stub.Register, request)
        return _lease(sent_s, answer.lease_ms, answer.heartbeat_ms)

    def heartbeat(self, capacity: SyncerCapacity, reports: Sequence[HeldReport]) -> SyncerWork:
        """Renew the lease, report what is new, and learn what the syncer has.

        Raises:
            LeaseLostError: the lease has ended: stop all, and register again.
        """
        request = pb.HeartbeatRequest(
            caller=caller_to(self._caller),
            capacity=capacity_to(capacity),
            reports=[held_to(one) for one in reports],
            known=[
                pb.KnownAssignment(policy_id=policy_id, digest=digest)
                for policy_id, (digest, _) in self._known.items()
            ],
        )
        sent_s = self._monotonic_s()
        answer: pb.HeartbeatResponse = self._calls.call(lambda stub: stub.Heartbeat, request)
        known = dict[PolicyId, tuple[int, Assignment]]()
        with checked_answer():
            for message in answer.assignments:
                policy_id = PolicyId(message.policy_id)
                found = assignment_from(message)
                if found is None:
                    digest, found = self._known.get(policy_id, (None, None))
                    if found is None or digest != message.digest:
                        raise RemoteProtocolError(f"replication {policy_id!r} came without content")
                known[policy_id] = message.digest, found
        self._known = known
        return SyncerWork(
            _lease(sent_s, answer.lease_ms, answer.heartbeat_ms),
            tuple(assignment for _, assignment in known.values()),
            tuple(PolicyId(text) for text in answer.refused_policy_ids),
        )

    def save_report(self, held: HeldReport) -> None:
        """Have a report on the master's disk.

        Raises:
            LeaseLostError: the replication is not this process's in this epoch.
            UsageError: its position would go back.
        """
        request = pb.SaveReportRequest(caller=caller_to(self._caller), held=held_to(held))
        self._calls.call(lambda stub: stub.SaveReport, request)

    def release(self, released: Sequence[tuple[PolicyId, int]], *, ends: bool = False) -> None:
        """Say that this process has stopped working on replications, each with the
        epoch by which it had it; with `ends` on all, and that it gives up its lease.
        """
        request = pb.ReleaseRequest(
            caller=caller_to(self._caller),
            released=[pb.Released(policy_id=name, epoch=epoch) for name, epoch in released],
            ends=ends,
        )
        self._calls.call(lambda stub: stub.Release, request)


class MasterClient:
    """An operator's connection to replication masters. Every call may raise
    MasterUnavailableError, RemoteProtocolError for an invalid answer, and what a master
    returns. `requested_by` is who asks, for masters without TLS. Thread-safe.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        requested_by: str = "",
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> None:
        self._calls = _MasterCalls(addresses, tls=tls, insecure=insecure, deadline_s=DEADLINE_S)
        self.addresses = self._calls.addresses
        self.tls, self.insecure = tls, insecure
        self._by = requested_by

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()

    def add_policy(
        self, policy: Policy, reason: str, returns_policy: PolicyId | None = None
    ) -> ReplicationView:
        """Begin a replication; see orders.add_policy."""
        request = pb.AddPolicyRequest(
            policy=policy_to(policy),
            requested_by=self._by,
            reason=reason,
            returns_policy_id=returns_policy or "",
        )
        return _view(self._calls.call(lambda stub: stub.AddPolicy, request))

    def delete_policy(self, policy_id: PolicyId, reason: str, *, force: bool) -> bool:
        """End and forget a replication; returns whether it is gone already."""
        request = pb.DeletePolicyRequest(
            policy_id=policy_id, requested_by=self._by, reason=reason, force=force
        )
        answer: pb.DeletePolicyResponse = self._calls.call(lambda stub: stub.DeletePolicy, request)
        return answer.is_gone

    def set_desired(
        self, policy_id: PolicyId, desired: DesiredState, reason: str
    ) -> ReplicationView:
        """Pause, resume or cancel a replication; see orders.set_desired."""
        request = pb.SetDesiredStateRequest(
            policy_id=policy_id, desired=desired.value, requested_by=self._by, reason=reason
        )
        return _view(self._calls.call(lambda stub: stub.SetDesiredState, request))

    def set_options(
        self, policy_id: PolicyId, options: ReplicationOptions, reason: str, *, revision: int
    ) -> ReplicationView:
        """Change the options of a replication while it runs; see orders.set_options."""
        request = pb.SetOptionsRequest(
            policy_id=policy_id,
            options=options_to(options),
            revision=revision,
            requested_by=self._by,
            reason=reason,
        )
        return _view(self._calls.call(lambda stub: stub.SetOptions, request))

    def set_prefixes(
        self, policy_id: PolicyId, prefixes: Sequence[str], reason: str
    ) -> ReplicationView:
        """Change which keys of a replication cross; see orders.set_prefixes."""
        request = pb.SetPrefixesRequest(
            policy_id=policy_id, prefixes=prefixes, requested_by=self._by, reason=reason
        )
        return _view(self._calls.call(lambda stub: stub.SetPrefixes, request))

    def set_enabled(self, reason: str, *, is_enabled: bool) -> None:
        """Let replications run cluster-wide, or none of them."""
        request = pb.SetEnabledRequest(enabled=is_enabled, requested_by=self._by, reason=reason)
        self._calls.call(lambda stub: stub.SetEnabled, request)

    def replications(self) -> Iterator[ReplicationView]:
        """All replications, by ID; pages are fetched as needed."""
        after = ""
        while True:
            request = pb.ListReplicationsRequest(after_policy_id=after)
            page: pb.ListReplicationsResponse = self._calls.call(
                lambda stub: stub.ListReplications, request
            )
            views = [_view(message) for message in page.replications]
            yield from views
            if not page.more or not views or views[-1].policy_id <= after:
                return
            after = views[-1].policy_id

    def replication(self, policy_id: PolicyId) -> ReplicationView:
        """One replication.

        Raises:
            PolicyNotFoundError: there is none.
        """
        request = pb.GetReplicationRequest(policy_id=policy_id)
        return _view(self._calls.call(lambda stub: stub.GetReplication, request))

    def status(self) -> MasterStatus:
        """How the master that answers is, and which syncers there are."""
        answer: pb.GetStatusResponse = self._calls.call(
            lambda stub: stub.GetStatus, pb.GetStatusRequest()
        )
        with checked_answer():
            return status_from(answer)

    def fail_over(self, policy_id: PolicyId, reason: str) -> ReplicationView:
        """Fence a replication; see orders.fail_over."""
        request = pb.FailoverRequest(policy_id=policy_id, requested_by=self._by, reason=reason)
        return _view(self._calls.call(lambda stub: stub.Failover, request))

    def end_failover(self, policy_id: PolicyId, reason: str) -> ReplicationView:
        """Let a replication go on after a failover; see orders.end_failover."""
        request = pb.EndFailoverRequest(policy_id=policy_id, requested_by=self._by, reason=reason)
        return _view(self._calls.call(lambda stub: stub.EndFailover, request))


def _view(message: pb.Replication) -> ReplicationView:
    with checked_answer():
        return view_from(message)


def _lease(sent_s: float, lease_ms: int, heartbeat_ms: int) -> HeldLease:
    if not 0 < heartbeat_ms < lease_ms:
        raise RemoteProtocolError("a lease is over before the next heartbeat")
    return HeldLease(sent_s, lease_ms / 1000, heartbeat_ms / 1000)
