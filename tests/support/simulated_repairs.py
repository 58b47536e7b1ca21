"""The repairs of a simulated cluster: the product's state machines, whose requests are
carried out one at a time, in an order that the seed chooses.

A request to a peer may be lost, or answered with a lie; one to our own disk may fail or
tear. What an agent reports of a job goes into its heartbeat state and into the ledger.
"""

from collections.abc import Iterable
from dataclasses import replace

from dnagent.heartbeat import JobReport, ReconcileCommand
from dnagent.jobs import error_report, options_of, report_of
from merkle.errors import ReconcileError
from merkle.outcome import OutcomeState, RepairOutcome, Verdict
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerTree
from merkle.windows import runs_of
from ozone.errors import ContainerNotFoundError
from repair.requests import (
    BcsIdAdvanced,
    CheckLocal,
    Event,
    FetchRecords,
    FetchTree,
    FetchWindows,
    LoadOwn,
    LoadRecords,
    LocalRequest,
    PeerRequest,
    PutBlock,
    ReportOutcome,
    Request,
    RequestFailed,
    Rescan,
    ReturnToService,
    StoreTree,
    TreeStored,
    WriteWindows,
)
from repair.runner import execute_local, execute_remote
from scm.jobs import task_of
from tests.support.cluster_control import AgentProcess, Run
from tests.support.faults import Damage, DamageKind, Fault, Forger, Lie
from tests.support.memory import CrashError
from tests.support.observer import hold, whole_chunks
from tests.support.peers import Evil, EvilPeer, MemoryPeer
from tests.support.run_witness import RunWitness
from tests.support.simulated_world import Node, Place, World
from tests.support.trace import EventKind, Subject

# These change nothing.
_READS = (LoadOwn, LoadRecords, CheckLocal)
# What a repair met, by the code of the request that failed.
_FAILURE_MARKS = {
    "block_not_found": "repair met a deleted block",
    "tree_stale": "repair met a stale tree",
    "chunk_gap": "file shrank under repair",
}


class SimulatedRepairs:
    """The repairs that run in the agents of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def work_somewhere(self, *, faults: bool) -> bool:
        """Begin a job that waits, or carry out one request, or deliver one answer.
        Return whether any agent had work.
        """
        world = self._world
        working = [node for node in world.nodes.values() if node.is_working]
        if not working:
            return False
        node = world.rng.choice(working)
        agent = node.agent
        assert agent is not None
        if agent.waiting and len(agent.runs) < world.setup.runs_max:
            self._begin(node, agent, agent.waiting.popleft())
        else:
            place = node.places[world.rng.choice(sorted(agent.runs))]
            run = place.run
            assert run is not None
            self._work(place, run, faults=faults)
        return True

    def deliver(self, place: Place, event: Event) -> None:
        """Give an event to the repair under way; whatever it asks for next waits."""
        run = place.run
        assert run is not None
        text = f"{place.node.name} takes in {type(event).__name__}"
        self._world.note(EventKind.DETAIL, text, place.container_id)
        run.witness.hears(event)
        asked = run.machine.step(event)
        run.witness.asked(asked)
        run.requests += _unreported(asked)
        if run.machine.outcome is not None:
            self._ended(place, run, run.machine.outcome)

    def refuse(
        self,
        node: Node,
        agent: AgentProcess,
        command: ReconcileCommand,
        error: ReconcileError,
        state: OutcomeState,
    ) -> None:
        """The agent reports that a job ended before it began, and why."""
        text = f"{node.name} refuses {command.job_id}: {error.message}"
        self._world.note(EventKind.OUTCOME, text, command.container_id)
        self.report_end(node, agent, error_report(command, error, state))

    def _begin(self, node: Node, agent: AgentProcess, command: ReconcileCommand) -> None:
        world, job_id = self._world, command.job_id
        place = node.places[command.container_id]
        subject = Subject(command.container_id)
        agent.begun[job_id] += 1
        again = agent.begun[job_id] > len(agent.told[job_id])
        text = f"{node.name} begins {job_id} twice for one command"
        hold(not again, text, "CR-052", subject)
        known, _, _ = task_of(job_id)
        text = f"{node.name} works for {known}, which nobody remembers"
        hold(known in world.stored_jobs(), text, subject=subject)
        if not place.replica.exists:
            world.marks["command for a container that is gone"] += 1
            agent.jobs.remove(command)
            error = ContainerNotFoundError("there is no such container")
            self.refuse(node, agent, command, error, OutcomeState.REFUSED)
            return
        peers = [world.by_address[peer.address].name for peer in command.peers]
        assert peers == [peer.peer for peer in command.peers]
        return_to = world.setup.return_to_service
        options = options_of(command, world.setup.fetches_max, return_to)
        machine = world.parts.machine(command.container_id, node.name, sorted(peers), options)
        lengths = {block_id: len(file) for block_id, file in place.replica.stored.files.items()}
        run = Run(command, options, machine, RunWitness(peers), lengths)
        text = f"{node.name} repairs container {command.container_id} twice at once"
        hold(place.run is None, text, subject=subject)
        agent.runs[command.container_id] = run
        text = f"{node.name} begins {job_id} with peers {', '.join(peers) or 'none'}"
        world.note(EventKind.ORDER, text, command.container_id)
        own = {(node.name, block_id) for block_id in world.blocks_of(command.container_id)}
        world.observer.faulted -= own
        run.requests = _unreported(run.machine.start())

    def _work(self, place: Place, run: Run, *, faults: bool) -> None:
        world = self._world
        text = f"{place.node.name} waits for nothing"
        hold(bool(run.requests or run.events), text, subject=Subject(place.container_id))
        if run.events and (not run.requests or world.rng.random() < 0.5):
            at = world.rng.randrange(len(run.events))
            if at:
                world.marks["answer late"] += 1
            self.deliver(place, run.events.pop(at))
            return
        request = run.requests.pop(world.rng.randrange(len(run.requests)))
        try:
            run.events.append(self._carry_out(place, run, request, faults))
        except CrashError:
            world.marks["write torn"] += 1
            world.crash_agent(place.node)

    def _carry_out(self, place: Place, run: Run, request: Request, faults: bool) -> Event:
        match request:
            case FetchTree() | FetchRecords() | FetchWindows():
                return self._ask(place, run, request, faults)
            case ReportOutcome():
                raise AssertionError
            case _:
                return self._act_here(place, run, request, faults)

    def _act_here(self, place: Place, run: Run, request: LocalRequest, faults: bool) -> Event:
        """Do to the replica what its own repair asks for."""
        world, replica = self._world, place.replica
        if isinstance(request, Rescan):
            world.marks["first scan"] += not run.fetched_from
        if isinstance(request, ReturnToService) and faults and world.happens(Fault.LATE_DAMAGE):
            self._find_damage(place)
        if isinstance(request, StoreTree) and faults and world.happens(Fault.LATE_DELETE):
            self._delete_repaired(place, request.tree)
        replica.failing_disk = faults and world.happens(Fault.DISK)
        if faults and world.happens(Fault.TEAR):
            replica.tear = lambda length: world.rng.randrange(length + 1)
        self._note_write(place, request)
        try:
            if isinstance(request, _READS):
                event = execute_local(request, replica)
            else:
                event = self._change_here(place, run, request)
        finally:
            failing, replica.failing_disk, replica.tear = replica.failing_disk, False, None
        if isinstance(event, RequestFailed):
            world.marks["disk failed"] += failing
            text = f"{place.node.name} fails at {type(request).__name__}: {event.code}"
            world.note(EventKind.WRITE, text, place.container_id)
            if event.code in _FAILURE_MARKS:
                world.marks[_FAILURE_MARKS[event.code]] += 1
        elif isinstance(event, BcsIdAdvanced):
            world.marks["commit advanced"] += 1
        return event

    def _find_damage(self, place: Place) -> None:
        """A bit flips, and a scan finds it before the repair goes on."""
        world, replica = self._world, place.replica
        blocks = [block_id for block_id, file in replica.stored.files.items() if file]
        if not blocks:
            return
        block_id = world.rng.choice(sorted(blocks))
        flip = Damage(DamageKind.FLIP, block_id)
        text = f"{place.node.name} {flip}, and scans"
        world.note(EventKind.DAMAGE, text, place.container_id, block_id)
        flip.apply(replica.stored)
        place.slow_scan = None
        world.observer.faulted.add((place.node.name, block_id))
        replica.scan()
        world.marks["damage found at the return to service"] += 1

    def _delete_repaired(self, place: Place, tree: ContainerTree) -> None:
        """The cluster deletes a block whose repair the tree is about to tell."""
        known, _ = place.replica.known_tree()
        before = {block.block_id: block for block in known.blocks} if known else {}
        repaired = [
            block.block_id
            for block in tree.blocks
            if not block.deleted and block != before.get(block.block_id)
        ]
        if repaired:
            self._world.observer.deleted.add(self._world.rng.choice(repaired))
            self._world.delete_blocks(place)
            self._world.marks["block deleted before the tree"] += 1

    def _change_here(self, place: Place, run: Run, request: LocalRequest) -> Event:
        """Carry out what may change the replica, and hold it against what was there."""
        world, replica = self._world, place.replica
        observer = world.observer
        faulted = {block_id for name, block_id in observer.faulted if name == place.node.name}
        run.witness.judge(request, replica, written=world.written, faulted=faulted)
        stored = replica.stored
        files = {block_id: bytes(file) for block_id, file in stored.files.items()}
        before = replace(stored, records=dict(stored.records), files=files)
        event = execute_local(request, replica)
        observer.looks(replica)
        if isinstance(request, StoreTree) and isinstance(event, TreeStored):
            _hold_no_revival(request.tree, event.tree)
        if stored.files == files and stored.records == before.records:
            return event
        lost = whole_chunks(before, world.written) - whole_chunks(stored, world.written)
        for block_id, _ in sorted(lost):
            text = f"{type(request).__name__} has cost block {block_id} a whole chunk"
            hold(False, text, "inv-I3", Subject(place.container_id, block_id))
        return event

    def _note_write(self, place: Place, request: LocalRequest) -> None:
        """Note a write before it is made, so that it stands last if it breaks an
        invariant.
        """
        match request:
            case WriteWindows(block_id, chunk, runs, source):
                windows = _windows(index for run in runs for index in run.windows)
                text = (
                    f"{place.node.name} writes {windows} of block {block_id}"
                    f" at {chunk.offset}, read from {source}"
                )
            case PutBlock(record):
                block_id = record.block_id
                ends = record.chunks[-1].end if record.chunks else 0
                text = f"{place.node.name} records block {block_id} up to {ends}"
            case _:
                return
        self._world.note(EventKind.WRITE, text, place.container_id, block_id)

    def _ask(self, place: Place, run: Run, request: PeerRequest, faults: bool) -> Event:
        """Have a peer answer a request, if it can and is willing."""
        world = self._world
        target = world.nodes[request.peer]
        unavailable = RequestFailed(request, "peer_unavailable", "", True)
        if faults and world.happens(Fault.LOSS):
            world.marks["answer lost"] += 1
            self._note_read(place, request, "lost")
            return unavailable
        if target.agent is None:
            world.marks["request to a dead agent"] += 1
            self._note_read(place, request, "no agent runs there")
            return unavailable
        if isinstance(request, FetchWindows):
            chunk = request.block_id, request.chunk.offset
            run.fetched_from.setdefault(chunk, set()).add(request.peer)
        honest = MemoryPeer(target.name, target.source)
        peer = honest
        if faults and target.lie is not None:
            world.marks["peer lied"] += 1
            peer = _liar(target, target.lie, world.rng.randrange(1 << 30))
        if not target.places[place.container_id].replica.exists:
            world.marks["request for a deleted container"] += 1
            self._note_read(place, request, "it has no such container")
            return RequestFailed(request, "peer_refused", "container_not_found", False)
        prove = world.parts.prove
        answer = execute_remote(request, place.container_id, peer, prove=prove)
        lied = peer is not honest and answer != execute_remote(
            request, place.container_id, honest, prove=prove
        )
        self._note_read(place, request, "lie" if lied else "", is_lie=lied)
        return answer

    def _note_read(
        self, place: Place, request: PeerRequest, end: str, *, is_lie: bool = False
    ) -> None:
        reader, peer = place.node.name, request.peer
        block_id: BlockId | None = None
        match request:
            case FetchTree():
                text = f"{reader} reads the tree of {peer}"
            case FetchRecords(_, block_ids):
                blocks = ", ".join(map(str, block_ids))
                text = f"{reader} reads records from {peer}: block {blocks}"
                block_id = block_ids[0] if len(block_ids) == 1 else None
            case FetchWindows(_, read_block, chunk, windows):
                block_id = read_block
                text = (
                    f"{reader} reads {_windows(windows)} of block {block_id}"
                    f" at {chunk.offset} from {peer}"
                )
        kind = EventKind.LIE if is_lie else EventKind.READ
        text = f"{text}: {end}" if end else text
        self._world.note(kind, text, place.container_id, block_id)

    def _ended(self, place: Place, run: Run, outcome: RepairOutcome) -> None:
        job_id, verdict = run.command.job_id, outcome.verdict
        said = ", ".join(filter(None, (verdict and verdict.value, outcome.error_code)))
        text = f"{place.node.name} ends {job_id} {outcome.state.value}: {said or 'no verdict'}"
        self._world.note(EventKind.OUTCOME, text, place.container_id)
        if outcome.state is OutcomeState.DONE:
            self._hold_no_tail(place, run)
        agent = place.node.agent
        assert agent is not None
        del agent.runs[place.container_id]
        agent.jobs.remove(run.command)
        self.report_end(place.node, agent, report_of(job_id, outcome))
        self._mark_outcome(run, outcome)

    def _hold_no_tail(self, place: Place, run: Run) -> None:
        """inv-I7: a repair leaves no bytes behind the recorded ones but those that it
        found there.
        """
        stored = place.replica.stored
        for block_id, file in stored.files.items():
            if (place.node.name, block_id) in self._world.observer.faulted:
                continue
            record = stored.records.get(block_id)
            recorded = record.chunks[-1].end if record and record.chunks else 0
            text = f"block {block_id} was left with bytes that no record lists"
            kept = len(file) <= max(recorded, run.lengths.get(block_id, 0))
            hold(kept, text, "inv-I7", Subject(place.container_id, block_id))

    def _mark_outcome(self, run: Run, outcome: RepairOutcome) -> None:
        progress = outcome.progress
        kinds = {evidence.kind for evidence in outcome.evidence}
        several = any(len(sources) > 1 for sources in run.fetched_from.values())
        added, fetched = progress.blocks_added, progress.bytes_fetched
        state: ReplicaState | None = run.options.return_to
        returned = state and outcome.replica_state is state and progress.scans
        for mark, fired in (
            ("tombstone adopted", progress.tombstones_adopted),
            ("block added", added),
            ("record taken in without fetching", added and not fetched),
            ("record without data taken in", added and fetched),
            ("several rounds", progress.rounds > 1),
            ("unrecoverable named", outcome.verdict is Verdict.UNRECOVERABLE),
            ("conflict named", outcome.verdict is Verdict.CONFLICT),
            ("hole named", "hole" in kinds),
            ("overlap named", "chunkings_overlap" in kinds),
            ("unverifiable named", "unverifiable" in kinds),
            ("unreachable named", "source_unreachable" in kinds),
            ("no peer", outcome.error_code == "no_peer"),
            ("cancelled", outcome.state is OutcomeState.INTERRUPTED),
            ("two sources for one chunk", several),
        ):
            self._world.marks[mark] += bool(fired)
        self._world.marks["returned to service"] += bool(returned)

    def report_end(self, node: Node, agent: AgentProcess, progress: JobReport) -> None:
        """The agent reports the end of a job until the controller confirms it."""
        self._world.ledger.ended(node.name, progress)
        agent.heartbeats.add_result(progress)


def _liar(target: Node, lie: Lie, seed: int) -> EvilPeer:
    if lie.forges:
        return Forger(target.name, target.source, Evil.BAD_BYTES, seed)
    return EvilPeer(target.name, target.source, lie.evil, seed)


def _unreported(requests: list[Request]) -> list[Request]:
    return [request for request in requests if not isinstance(request, ReportOutcome)]


def _hold_no_revival(asked: ContainerTree, stored: ContainerTree) -> None:
    """inv-I5: a tree that was made of the latest one has its deletes."""
    deleted = {block.block_id for block in stored.blocks if block.deleted}
    for block in asked.blocks:
        back = block.block_id in deleted and not block.deleted
        text = f"a repair's tree has block {block.block_id} as a live one again"
        hold(not back, text, "inv-I5", Subject(stored.container_id, block.block_id))


def _windows(indices: Iterable[int]) -> str:
    """Window numbers in short: `windows 0-2, 5`."""
    runs = list(runs_of(indices))
    text = ", ".join(str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in runs)
    return f"window {text}" if text.isdigit() else f"windows {text}"
