"""The replication master's gRPC service, which converts messages into calls."""

from collections.abc import Callable
from functools import partial

import grpc
from google.protobuf.message import Message

from protos import replication_pb2 as pb
from replicator.master.audit import MasterAudit
from replicator.master.master import ReplicationMaster
from replicator.master.messages import (
    PAGE,
    assignment_to,
    caller_from,
    capacity_from,
    check_text,
    desired_from,
    held_from,
    known_from,
    options_from,
    policy_from,
    policy_id_from,
    prefixes_from,
    registration_from,
)
from replicator.master.orders import OperatorOrder
from replicator.master.syncer_rules import Caller
from replicator.master.view_messages import status_to, view_to
from replicator.master.views import MasterStatus, replication_view
from replicator.replication import PolicyId
from replicator.stores.address import canonical_address
from runtime.access import Access
from runtime.errors import UsageError
from runtime.metrics import Metrics

SERVICE = "treefold.replication.v1.ReplicationMaster"
# A syncer beats so often within its lease: two lost heartbeats cost nothing.
_HEARTBEATS_PER_LEASE = 4
# Orders go with the answer: a pause takes effect within 2 s, however long a lease is.
_HEARTBEAT_MS_MAX = 1_000


class ReplicationMasterService:
    """The ReplicationMaster service of one master."""

    def __init__(
        self,
        master: ReplicationMaster,
        *,
        access: Access,
        audit: MasterAudit,
        metrics: Metrics,
        status: Callable[[], MasterStatus],
    ) -> None:
        """`access` is that of the server to which it is added, and `status` what
        GetStatus answers.
        """
        self._master = master
        self._access = access
        self._audit = audit
        self._metrics = metrics
        self._status = status

    def register(self, server: grpc.Server) -> None:
        """Add the service to this server."""
        methods: tuple[tuple[str, Callable[..., Message], type[Message]], ...] = (
            ("Register", self.register_syncer, pb.RegisterRequest),
            ("Heartbeat", self.heartbeat, pb.HeartbeatRequest),
            ("SaveReport", self.save_report, pb.SaveReportRequest),
            ("Release", self.release, pb.ReleaseRequest),
            ("AddPolicy", self.add_policy, pb.AddPolicyRequest),
            ("DeletePolicy", self.delete_policy, pb.DeletePolicyRequest),
            ("SetDesiredState", self.set_desired, pb.SetDesiredStateRequest),
            ("SetOptions", self.set_options, pb.SetOptionsRequest),
            ("SetPrefixes", self.set_prefixes, pb.SetPrefixesRequest),
            ("SetEnabled", self.set_enabled, pb.SetEnabledRequest),
            ("ListReplications", self.list_replications, pb.ListReplicationsRequest),
            ("GetReplication", self.get_replication, pb.GetReplicationRequest),
            ("GetStatus", self.get_status, pb.GetStatusRequest),
            ("Failover", self.fail_over, pb.FailoverRequest),
            ("EndFailover", self.end_failover, pb.EndFailoverRequest),
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialize)
            for name, method, request in methods
        }
        known = pb.DESCRIPTOR.services_by_name["ReplicationMaster"].methods_by_name
        assert set(handlers) == set(known)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def register_syncer(
        self, request: pb.RegisterRequest, context: grpc.ServicerContext
    ) -> pb.RegisterResponse:
        """Give a syncer's process its lease.

        Raises:
            UsageError: the request is invalid.
            BusyError: another process of the syncer may still work.
            SyncerRefusedError: another certificate registered the ID.
            DatabaseError: see ReplicationMaster.
        """
        caller = self._caller(request.caller, context)
        self._master.register(caller, registration_from(request))
        lease_ms, heartbeat_ms = self._times()
        return pb.RegisterResponse(lease_ms=lease_ms, heartbeat_ms=heartbeat_ms)

    def heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatResponse:
        """Renew a lease; the response has all that the syncer has.

        Raises:
            UsageError: the request is invalid.
            LeaseLostError: the lease has ended.
            SyncerRefusedError: another certificate registered the ID.
            DatabaseError: see ReplicationMaster.
        """
        known = known_from(request)
        reports = [held_from(one) for one in request.reports]
        if len({one.policy_id for one in reports}) != len(reports):
            raise UsageError("a heartbeat reports a replication twice")
        caller = self._caller(request.caller, context)
        answer = self._master.heartbeat(caller, capacity_from(request.capacity), reports)
        self._metrics.count("replication_master_heartbeats_total")
        self._metrics.count("replication_master_reports_refused_total", len(answer.refused))
        lease_ms, heartbeat_ms = self._times()
        return pb.HeartbeatResponse(
            lease_ms=lease_ms,
            heartbeat_ms=heartbeat_ms,
            assignments=[assignment_to(one, known) for one in answer.assignments],
            refused_policy_ids=answer.refused,
        )

    def save_report(
        self, request: pb.SaveReportRequest, context: grpc.ServicerContext
    ) -> pb.SaveReportResponse:
        """Save one report durably.

        Raises:
            UsageError: the request is invalid, or the position would go back.
            LeaseLostError: the replication is not the caller's in this epoch.
            SyncerRefusedError: another certificate registered the ID.
            DatabaseError: see ReplicationMaster.
        """
        held = held_from(request.held)
        self._master.save_report(self._caller(request.caller, context), held)
        return pb.SaveReportResponse()

    def release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        """Note that a syncer has stopped.

        Raises:
            UsageError: the request is invalid.
            SyncerRefusedError: another certificate registered the ID.
            DatabaseError: see ReplicationMaster.
        """
        released = [(policy_id_from(one.policy_id), one.epoch) for one in request.released]
        caller = self._caller(request.caller, context)
        self._master.release(caller, released, ends=request.ends)
        return pb.ReleaseResponse()

    def add_policy(
        self, request: pb.AddPolicyRequest, context: grpc.ServicerContext
    ) -> pb.Replication:
        """Begin a replication.

        Raises:
            UsageError: the policy is invalid, or has another address than its store
                would name itself by.
            PolicyRefusedError, PolicyNotFoundError: see orders.add_policy.
            DatabaseError: see ReplicationMaster.
            DiskError: it cannot be recorded in the audit file.
        """
        policy = policy_from(request.policy)
        for address in (policy.source, policy.target):
            # A path relative to the caller's folder would be another one elsewhere.
            if canonical_address(address) != address:
                raise UsageError(f"{address}: is not the whole address of a store")
        order = self._order(request.requested_by, request.reason, context)
        returns = policy_id_from(request.returns_policy_id) if request.returns_policy_id else None
        record = partial(self._audit.added, policy, order)
        self._master.add_policy(policy, order, returns, record=record)
        return self._view(policy.policy_id)

    def delete_policy(
        self, request: pb.DeletePolicyRequest, context: grpc.ServicerContext
    ) -> pb.DeletePolicyResponse:
        """End and forget a replication; see orders.delete_policy."""
        policy_id = policy_id_from(request.policy_id)
        order = self._order(request.requested_by, request.reason, context)
        record = partial(self._audit.ordered, "delete", policy_id, order)
        is_gone = self._master.delete_policy(policy_id, order, force=request.force, record=record)
        return pb.DeletePolicyResponse(is_gone=is_gone)

    def set_desired(
        self, request: pb.SetDesiredStateRequest, context: grpc.ServicerContext
    ) -> pb.Replication:
        """Pause, resume or cancel a replication; see orders.set_desired."""
        policy_id, desired = policy_id_from(request.policy_id), desired_from(request.desired)
        order = self._order(request.requested_by, request.reason, context)
        kind = {"ENABLED": "resume", "PAUSED": "pause", "CANCELLED": "cancel"}[desired.value]
        record = partial(self._audit.ordered, kind, policy_id, order)
        self._master.set_desired(policy_id, desired, order, record=record)
        return self._view(policy_id)

    def set_options(
        self, request: pb.SetOptionsRequest, context: grpc.ServicerContext
    ) -> pb.Replication:
        """Change the options of a replication; see orders.set_options."""
        policy_id, options = policy_id_from(request.policy_id), options_from(request.options)
        order = self._order(request.requested_by, request.reason, context)
        record = partial(self._audit.options, policy_id, options, order)
        self._master.set_options(
            policy_id, options, order, revision=request.revision, record=record
        )
        return self._view(policy_id)

    def set_prefixes(
        self, request: pb.SetPrefixesRequest, context: grpc.ServicerContext
    ) -> pb.Replication:
        """Change which keys of a replication cross; see orders.set_prefixes."""
        policy_id, prefixes = policy_id_from(request.policy_id), prefixes_from(request.prefixes)
        order = self._order(request.requested_by, request.reason, context)
        record = partial(self._audit.prefixes, policy_id, prefixes, order)
        self._master.set_prefixes(policy_id, prefixes, order, record=record)
        return self._view(policy_id)

    def set_enabled(
        self, request: pb.SetEnabledRequest, context: grpc.ServicerContext
    ) -> pb.SetEnabledResponse:
        """Let replications run cluster-wide, or none of them."""
        order = self._order(request.requested_by, request.reason, context)
        kind = "enable" if request.enabled else "disable"
        record = partial(self._audit.ordered, kind, PolicyId(""), order)
        self._master.set_enabled(order, is_enabled=request.enabled, record=record)
        return pb.SetEnabledResponse()

    def list_replications(
        self, request: pb.ListReplicationsRequest, _: grpc.ServicerContext
    ) -> pb.ListReplicationsResponse:
        """A page of replications, by ID."""
        state = self._master.read()
        after = request.after_policy_id
        found = [one for one in state.policies if one.policy.policy_id > after]
        return pb.ListReplicationsResponse(
            replications=[view_to(replication_view(state, one)) for one in found[:PAGE]],
            more=len(found) > PAGE,
        )

    def get_replication(
        self, request: pb.GetReplicationRequest, _: grpc.ServicerContext
    ) -> pb.Replication:
        """One replication."""
        return self._view(policy_id_from(request.policy_id))

    def get_status(
        self, _request: pb.GetStatusRequest, _: grpc.ServicerContext
    ) -> pb.GetStatusResponse:
        """How this master is, and which syncers there are."""
        return status_to(self._status())

    def fail_over(
        self, request: pb.FailoverRequest, context: grpc.ServicerContext
    ) -> pb.Replication:
        """Fence a replication; see orders.fail_over."""
        policy_id = policy_id_from(request.policy_id)
        order = self._order(request.requested_by, request.reason, context)
        record = partial(self._audit.ordered, "failover", policy_id, order)
        self._master.fail_over(policy_id, order, record=record)
        return self._view(policy_id)

    def end_failover(
        self, request: pb.EndFailoverRequest, context: grpc.ServicerContext
    ) -> pb.Replication:
        """Let a replication go on after a failover; see orders.end_failover."""
        policy_id = policy_id_from(request.policy_id)
        order = self._order(request.requested_by, request.reason, context)
        record = partial(self._audit.ordered, "end_failover", policy_id, order)
        self._master.end_failover(policy_id, order, record=record)
        return self._view(policy_id)

    def _view(self, policy_id: PolicyId) -> pb.Replication:
        return view_to(self._master.replication(policy_id))

    def _times(self) -> tuple[int, int]:
        lease_ms = self._master.rules.lease_ms
        return lease_ms, min(lease_ms // _HEARTBEATS_PER_LEASE, _HEARTBEAT_MS_MAX)

    def _caller(self, message: pb.Caller, context: grpc.ServicerContext) -> Caller:
        """The caller; its owner is who the certificate says, and nobody without TLS."""
        return caller_from(message, self._access.requester(context, ""))

    def _order(self, claimed: str, reason: str, context: grpc.ServicerContext) -> OperatorOrder:
        who = self._access.requester(context, check_text(claimed, "requester"))
        return OperatorOrder(who, check_text(reason, "reason"))


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
