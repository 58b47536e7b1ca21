"""The network of a simulated cluster: heartbeats, their answers, and the commands in
them, between agents and a controller that may not be there.

A message may be lost, doubled or overtaken by a later one. Whoever asks the controller
for something gets no answer where it is down, or dies of the request.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from dnagent.heartbeat import CancelCommand, Command, ReconcileCommand, ScanCommand, ThrottleCommand
from dnagent.jobs import absence_report, running_report
from dnagent.messages import DEADLINE_S, response_of
from merkle.outcome import OutcomeState
from merkle.tree import ContainerId
from protos import controller_pb2 as pb
from repair.requests import Cancelled
from runtime.errors import BusyError, OperationInterruptedError
from scm.datanodes import Liveness
from scm.jobs import JobId
from tests.support.cluster_control import AgentProcess, ControllerProcess, Message
from tests.support.faults import Fault
from tests.support.memory import CrashError
from tests.support.simulated_repairs import SimulatedRepairs
from tests.support.simulated_world import Node, World
from tests.support.trace import EventKind

T = TypeVar("T")


class SimulatedNetwork:
    """What passes between the agents and the controller of a world."""

    def __init__(self, world: World, repairs: SimulatedRepairs) -> None:
        self._world = world
        self._repairs = repairs

    @property
    def is_silent(self) -> bool:
        """Whether no message is under way."""
        return not self._world.requests and not self._world.answers

    def may_beat(self, node: Node) -> bool:
        """Not while a heartbeat is under way, unless it was waited for for too long."""
        agent = node.agent
        return agent is not None and (
            agent.sent is None or self._world.now_s - agent.sent_at_s >= DEADLINE_S
        )

    def beat_somewhere(self) -> None:
        """One agent that may sends a heartbeat."""
        ready = [node for node in self._world.nodes.values() if self.may_beat(node)]
        if ready:
            self.beat(self._world.rng.choice(ready))

    def beat(self, node: Node) -> None:
        """The agent sends a heartbeat; from now on it is under way."""
        world, agent = self._world, node.agent
        assert agent is not None
        world.marks["given up waiting"] += agent.sent is not None
        replicas = node.replicas()
        world.ledger.reports(replicas)
        running = [
            running_report(run.command.job_id, container_id, run.machine.progress)
            for container_id, run in agent.runs.items()
        ]
        heartbeat = agent.heartbeats.next_heartbeat(replicas, running)
        agent.sent, agent.sent_at_s = heartbeat, world.now_s
        kind = "full report" if heartbeat.full else "incremental report"
        world.marks[kind] += bool(heartbeat.replicas)
        world.marks["removal told"] += bool(heartbeat.removed)
        in_parts = heartbeat.full and len(heartbeat.replicas) < len(replicas)
        world.marks["report in parts"] += in_parts
        raw = world.parts.request_of(
            heartbeat,
            datanode_id=node.name,
            address=node.address,
            incarnation=agent.incarnation,
        ).SerializeToString()
        world.requests.append(
            Message(node.name, agent.incarnation, heartbeat.sequence, raw, world.now_s)
        )

    def carry_message(self, *, faults: bool) -> None:
        """One of the messages under way arrives, or is lost, or arrives and stays under
        way.
        """
        world = self._world
        ready = [
            m for m in (*world.requests, *world.answers) if m.due_s <= world.now_s or not faults
        ]
        if not ready:
            return
        message = world.rng.choice(ready)
        box = world.requests if message in world.requests else world.answers
        box.remove(message)
        if faults and box is world.requests and world.happens(Fault.HEARTBEAT_DOUBLE):
            world.marks["heartbeat doubled"] += 1
            self._note(f"a heartbeat of {message.peer} will arrive twice")
            box.append(replace(message, due_s=world.now_s + world.rng.choice((0.0, 10.0, 40.0))))
        node = world.nodes[message.peer]
        is_deaf = box is world.answers and world.now_s < node.deaf_until_s
        lost = is_deaf or (faults and world.happens(Fault.HEARTBEAT_LOSS))
        world.marks["heard and hears nothing"] += is_deaf
        if box is world.answers:
            world.marks["answer to a heartbeat lost"] += lost
            if lost:
                self._note(f"an answer to {message.peer} is lost")
            else:
                self._hear_answer(message)
        elif lost or world.host is None:
            world.marks["heartbeat lost"] += 1
            self._note(f"a heartbeat of {message.peer} is lost")
        else:
            self._hear_heartbeat(message, faults=faults)

    def tick(self) -> None:
        """The controller does what is due by its clock."""
        world = self._world
        if world.host is None:
            return
        self.of_controller(lambda host: host.tick())
        if world.host is not None:
            statuses = world.host.controller.queries.datanodes(world.host.now_s())
            found = {status.liveness for status in statuses}
            world.marks["datanode stale"] += Liveness.STALE in found
            world.marks["datanode dead"] += Liveness.DEAD in found

    def ask_for_job(self, container_id: ContainerId) -> JobId | None:
        """Somebody asks for a job; None where the controller refuses or is down."""
        made = self._world.jobs_made
        outcome = self.of_controller(lambda host: host.reconcile(container_id))
        if outcome is None:
            return None
        self._world.marks["job asked for" if outcome.job_id else "job refused"] += 1
        if not outcome.job_id:
            return None
        is_new = self._world.jobs_made > made
        text = f"somebody asks for {outcome.job_id}"
        self._world.note(EventKind.ORDER if is_new else EventKind.DETAIL, text, container_id)
        return JobId(outcome.job_id)

    def of_controller(self, act: Callable[[ControllerProcess], T]) -> T | None:
        """What the controller answers; None where it is not there, or dies of it."""
        world, host = self._world, self._world.host
        if host is None:
            return None
        try:
            answer = act(host)
        except CrashError:
            world.marks["controller crashed before a save"] += host.store.dies_before_save
            world.marks["controller crashed after a save"] += host.store.dies_after_save
            world.crash_controller()
            return None
        host.store.dies_before_save = host.store.dies_after_save = False
        for job in world.ledger.check(host.controller, world.containers):
            verdict = job.verdict.value if job.verdict else "no verdict"
            text = f"{job.job_id} ends {job.state.value}: {verdict}"
            world.note(EventKind.OUTCOME, text, job.container_id)
        return answer

    def _hear_heartbeat(self, message: Message, *, faults: bool) -> None:
        world = self._world
        assert world.host is not None
        agent = world.nodes[message.peer].agent
        is_earlier = agent is not None and agent.incarnation != message.incarnation
        world.marks["heartbeat of an earlier life"] += is_earlier
        world.marks["heartbeat overtaken"] += any(
            (other.peer, other.incarnation) == (message.peer, message.incarnation)
            and other.sequence < message.sequence
            for other in world.requests
        )
        if is_earlier:
            self._note(f"a heartbeat of an earlier life of {message.peer} arrives")
        if faults and world.happens(Fault.SAVE):
            world.host.store.dies_before_save = world.rng.random() < 0.5
            world.host.store.dies_after_save = not world.host.store.dies_before_save
        try:
            answer = self.of_controller(lambda host: host.heartbeat(message.raw))
        except BusyError:
            # A later life has reported. The one that sent this waits for no answer.
            assert agent is None or is_earlier
            return
        if answer is not None:
            host = world.host
            if host.controller.queries.heartbeat_age_s(message.peer, host.now_s()) == 0:
                world.ledger.hears(message.peer)
            world.answers.append(replace(message, raw=answer, sent_at_s=world.now_s))

    def _hear_answer(self, message: Message) -> None:
        world, node = self._world, self._world.nodes[message.peer]
        agent = node.agent
        if agent is None or agent.sent is None or (agent.incarnation, agent.sent.sequence) != (
            message.incarnation, message.sequence
        ):  # fmt: skip
            world.marks["answer nobody waits for"] += 1
            return
        answer = response_of(pb.HeartbeatResponse.FromString(message.raw))
        for envelope in answer.envelopes:
            if isinstance(envelope.command, ReconcileCommand):
                told = agent.told.setdefault(envelope.command.job_id, set())
                world.marks["command sent again"] += envelope.command_id in told
                told.add(envelope.command_id)
        ended = agent.sent.progress
        commands = agent.heartbeats.handle_response(agent.sent, answer)
        agent.sent = None
        told_again = any(p.is_final for p in ended) and answer.full_report_wanted
        world.marks["end told twice"] += told_again
        is_late = world.now_s - message.sent_at_s > DEADLINE_S / 2
        world.marks["late command"] += bool(commands) and is_late
        for command in commands:
            self._obey(node, agent, command)

    def _obey(self, node: Node, agent: AgentProcess, command: Command) -> None:
        match command:
            case ReconcileCommand():
                text = f"{node.name} is ordered to run {command.job_id}"
                self._world.note(EventKind.ORDER, text, command.container_id)
                try:
                    if agent.jobs.admit(command):
                        agent.waiting.append(command)
                except BusyError as error:
                    self._repairs.refuse(node, agent, command, error, OutcomeState.REFUSED)
            case CancelCommand():
                self._cancel_job(node, agent, command)
            case ThrottleCommand(job_id):
                # Bytes cost no time here.
                text = f"{node.name} limits {job_id}"
                self._world.note(EventKind.ORDER, text)
            case ScanCommand(container_id):
                if node.places[container_id].replica.exists:
                    node.places[container_id].replica.scan()

    def _cancel_job(self, node: Node, agent: AgentProcess, cancel: CancelCommand) -> None:
        world, command = self._world, agent.jobs.find(cancel.job_id)
        if command is None:
            world.marks["cancel of nothing"] += 1
            self._repairs.report_end(node, agent, absence_report(cancel))
            return
        world.note(EventKind.ORDER, f"{node.name} cancels {cancel.job_id}", command.container_id)
        if command in agent.waiting:
            world.marks["cancel before the beginning"] += 1
            agent.waiting.remove(command)
            agent.jobs.remove(command)
            error = OperationInterruptedError("cancelled before it began")
            self._repairs.refuse(node, agent, command, error, OutcomeState.INTERRUPTED)
        else:
            place = node.places[command.container_id]
            self._repairs.deliver(place, Cancelled("the job was cancelled"))

    def _note(self, text: str) -> None:
        self._world.note(EventKind.NETWORK, text)
