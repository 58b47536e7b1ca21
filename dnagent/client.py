"""The Agent service as commands use it: one scan at a time."""

from dataclasses import dataclass

import grpc

from merkle.tree import ContainerId
from protos.agent_pb2 import ScanContainerRequest, ScanContainerResponse
from protos.agent_pb2_grpc import AgentStub
from runtime.errors import PeerUnavailableError
from runtime.rpc import named_errors


@dataclass(frozen=True, slots=True)
class ScanAnswer:
    """A replica as its agent's scan left it: the name of its state, its root, and the
    type of each finding.
    """

    state: str
    data_checksum: int
    findings: tuple[str, ...]


class AgentClient:
    """An agent on an open channel, which stays the caller's."""

    def __init__(self, channel: grpc.Channel, target: str) -> None:
        """`target` names the agent in errors."""
        self._stub = AgentStub(channel)
        self._target = target

    def scan(self, container_id: ContainerId, *, timeout_s: float) -> ScanAnswer:
        """Read a replica's data now; its tree is stored.

        Raises:
            PeerUnavailableError: the agent does not answer in time.
            ReconcileError: the agent refuses, with its reason.
        """
        with named_errors(self._target, PeerUnavailableError):
            answer: ScanContainerResponse = self._stub.ScanContainer(
                ScanContainerRequest(container_id=container_id), timeout=timeout_s
            )
        findings = tuple(finding.type for finding in answer.findings)
        return ScanAnswer(answer.state, answer.data_checksum, findings)
