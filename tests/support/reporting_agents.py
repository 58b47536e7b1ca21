"""Agents that hold nothing but what a test gives them, and talk to a real controller
over loopback.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from dnagent.ports import AgentStatus
from dnagent.server import AgentService
from merkle.checksum import fingerprint
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId
from protos import controller_pb2 as pb
from protos.controller_pb2_grpc import ControllerStub
from runtime.rpc import open_channel, start_server
from tests.support.peers import MemoryReplica, MemoryScans, MemorySource, MemoryStatus

CALL_S = 20
DoWork = Callable[[pb.ReconcileCommand], pb.ReconcileProgress]


def done(
    verdict: str = "REPAIRABLE",
    *,
    chunks_repaired: int = 0,
    bytes_fetched: int = 0,
    evidence: Sequence[pb.Evidence] = (),
    peers: Sequence[pb.PeerOutcome] = (),
) -> DoWork:
    """Carries out every order at once, with this result."""
    return lambda command: pb.ReconcileProgress(
        job_id=command.job_id,
        container_id=command.container_id,
        state="done",
        verdict=verdict,
        chunks_repaired=chunks_repaired,
        bytes_fetched=bytes_fetched,
        evidence=evidence,
        peers=peers,
    )


class ReportingAgent:
    """One datanode: reports when told to; once started it takes commands in a thread of
    its own.
    """

    def __init__(self, controller: str, peer: str, *replicas: MemoryReplica) -> None:
        self.peer = peer
        self.commands: list[pb.Command] = []
        self.returns_to_service = True
        source = MemorySource(*replicas)
        service = AgentService(
            source, MemoryScans(source), MemoryStatus(AgentStatus(PeerId(peer), False))
        )
        self._server = start_server("127.0.0.1:0", [service.register])
        self.address = self._server.address
        self._channel = open_channel(controller)
        self._stub = ControllerStub(self._channel)
        self._sequences = count(1)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(
        self,
        report: pb.ContainerReport | None = None,
        progress: Iterable[pb.ReconcileProgress] = (),
        acknowledged: Iterable[str] = (),
    ) -> pb.HeartbeatResponse:
        with self._lock:
            request = pb.HeartbeatRequest(
                datanode=pb.Datanode(
                    datanode_id=self.peer,
                    hostname=f"host-{self.peer}",
                    address=self._server.address,
                    returns_to_service=self.returns_to_service,
                ),
                incarnation="1",
                sequence=next(self._sequences),
                report=report,
                progress=progress,
                acknowledged_command_ids=acknowledged,
            )
            response: pb.HeartbeatResponse = self._stub.Heartbeat(
                request, timeout=CALL_S, wait_for_ready=True
            )
        return response

    def report(self, *replicas: ContainerReplica, full: bool = True) -> pb.HeartbeatResponse:
        return self.beat(
            pb.ContainerReport(full=full, replicas=[_message(replica) for replica in replicas])
        )

    def work(
        self, do: DoWork | None, after: Callable[[pb.ReconcileCommand], None] = lambda command: None
    ) -> None:
        """Take commands from now on: carry them out with `do` (None: never end), then
        call `after`.
        """
        self._thread = threading.Thread(target=self._run, args=(do, after), name=self.peer)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
        self._channel.close()
        self._server.stop(0)

    def _run(self, do: DoWork | None, after: Callable[[pb.ReconcileCommand], None]) -> None:
        progress: list[pb.ReconcileProgress] = []
        acknowledged: list[str] = []
        running: dict[str, int] = {}
        while not self._stop.is_set():
            answer = self.beat(progress=progress, acknowledged=acknowledged)
            progress, acknowledged = [], []
            for command in answer.commands:
                self.commands.append(command)
                acknowledged.append(command.command_id)
                if command.HasField("reconcile"):
                    running[command.reconcile.job_id] = command.reconcile.container_id
                    if do:
                        after(command.reconcile)
                        progress.append(do(command.reconcile))
                elif command.HasField("cancel") and command.cancel.job_id in running:
                    job_id = command.cancel.job_id
                    progress.append(
                        pb.ReconcileProgress(
                            job_id=job_id, container_id=running[job_id], state="interrupted"
                        )
                    )
            self._stop.wait(0.02)


def _message(replica: ContainerReplica) -> pb.ReplicaReport:
    message = pb.ReplicaReport(
        container_id=replica.container_id,
        state=replica.state.value,
        bcs_id=replica.bcs_id,
        used_bytes=replica.used_bytes,
        block_count=replica.block_count,
        replica_index=replica.replica_index,
        read_only=replica.read_only,
        fingerprint=replica.fingerprint,
    )
    if replica.data_scan_timestamp_ms is not None:
        # Controllers that are real processes have today's clock: any small time is now.
        at_ms, now_ms = replica.data_scan_timestamp_ms, int(time.time() * 1000)
        message.data_scan_timestamp = at_ms if at_ms > now_ms // 2 else now_ms
    if replica.data_checksum is not None:
        message.data_checksum = replica.data_checksum
    return message


def report_of(peer: str, replica: MemoryReplica) -> ContainerReplica:
    """What a scan of the replica would have its agent report."""
    root = replica.scanned_tree().data_checksum
    mark = fingerprint(repr(replica.scanned_tree()).encode())
    return ContainerReplica(
        PeerId(peer),
        ContainerId(replica.container_id),
        replica.state,
        root,
        replica.bcs_id,
        data_scan_timestamp_ms=0,
        fingerprint=mark,
    )
