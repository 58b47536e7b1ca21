"""The calls of the agent's service that concern changes of its replicas: plans of
repairs, and the undo of jobs.
"""

import threading
from collections.abc import Sequence

import grpc

from dnagent.heartbeat import PeerAddress
from dnagent.plans import RepairPlans
from dnagent.undo_jobs import UndoJobs
from merkle.limits import MESSAGE_BYTES_MAX, PEERS_MAX, TEXT_CHARACTERS_MAX
from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos.agent_pb2 import (
    Holder,
    PlanRepairRequest,
    PlanRepairResponse,
    UndoJobRequest,
    UndoJobResponse,
)
from repair.wire import SERVICE
from runtime.access import Access
from runtime.errors import UsageError
from runtime.rpc import Handler

_PLAN_BYTES_MAX = MESSAGE_BYTES_MAX - 1024


class RepairService:
    """Plans and undoes repairs of one datanode's replicas."""

    def __init__(self, plans: RepairPlans, undos: UndoJobs, access: Access) -> None:
        self._plans = plans
        self._undos = undos
        self._access = access

    def register(self, server: grpc.Server) -> None:
        """Add the calls to this server."""
        unary = grpc.unary_unary_rpc_method_handler
        handlers: dict[str, Handler] = {
            "PlanRepair": unary(
                self.plan, PlanRepairRequest.FromString, PlanRepairResponse.SerializeToString
            ),
            "UndoJob": unary(
                self.undo, UndoJobRequest.FromString, UndoJobResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def plan(self, request: PlanRepairRequest, context: grpc.ServicerContext) -> PlanRepairResponse:
        """Plan a repair (RepairPlans.make). The end of the call ends the work.

        Raises:
            UsageError: there are too many peers, or the plan is larger than a message.
        """
        plan = self._plans.make(
            ContainerId(request.container_id),
            _peers(request.peers),
            _ended(context).is_set,
        )
        if len(plan.document) > _PLAN_BYTES_MAX:
            raise UsageError(
                f"the plan of container {request.container_id} has {len(plan.document)} bytes, more"
                " than a message",
                hint="Reconcile it without a plan.",
            )
        return PlanRepairResponse(plan=plan.document)

    def undo(self, request: UndoJobRequest, context: grpc.ServicerContext) -> UndoJobResponse:
        """Plan or carry out the undo of a job (UndoJobs.undo).

        Raises:
            UsageError: a text is too long, there are too many peers, or the plan is
                larger than a message.
        """
        for text in (request.reason, request.requested_by):
            if len(text) > TEXT_CHARACTERS_MAX or not text.isprintable():
                raise UsageError(f"a reason has at most {TEXT_CHARACTERS_MAX} printable characters")
        done = self._undos.undo(
            ContainerId(request.container_id),
            request.job_id,
            _peers(request.peers),
            digest=request.digest,
            who=self._access.requester(context, request.requested_by),
            why=request.reason,
        )
        if len(done.plan.document) > _PLAN_BYTES_MAX:
            raise UsageError(f"the plan has {len(done.plan.document)} bytes, more than a message")
        return UndoJobResponse(
            plan=done.plan.document,
            undo_id=done.undo_id,
            state=done.state,
            data_checksum=done.root or 0,
        )


def _peers(holders: Sequence[Holder]) -> list[PeerAddress]:
    if len(holders) > PEERS_MAX:
        raise UsageError(f"{len(holders)} peers are more than {PEERS_MAX}")
    return [PeerAddress(PeerId(one.datanode_id), one.address) for one in holders]


def _ended(context: grpc.ServicerContext) -> threading.Event:
    ended = threading.Event()
    # False if the call has already ended.
    if not context.add_callback(ended.set):
        ended.set()
    return ended
