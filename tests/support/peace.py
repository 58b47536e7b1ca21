"""The peace after a storm: faults end, and the controller alone must bring every job to
its end and every container to equal replicas, or to a verdict that says why not.
"""

from collections.abc import Callable
from functools import partial

from dnagent.messages import DEADLINE_S
from merkle.outcome import FINAL_VERDICTS, Verdict
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.controller import Controller
from scm.jobs import Job, JobId, JobState, OrderState
from scm.policy import RootComparison, roots
from tests.support.observer import (
    Promise,
    ViolationError,
    different_blocks,
    hold,
    hold_healed,
    is_only_unverifiable,
    promise_of,
)
from tests.support.simulated_network import SimulatedNetwork
from tests.support.simulated_repairs import SimulatedRepairs
from tests.support.simulated_world import Place, World
from tests.support.storm import Storm
from tests.support.trace import EventKind, Subject

# Verdicts that name what cannot be made equal.
NAMED = frozenset({Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.UNKNOWN})
# Time between heartbeats while a job is active.
INTERVAL_S = 5.0
ATTEMPTS_TO_SETTLE = 20_000
# Within so long a time of peace every job that was under way ends; the deadline of
# commands is not needed for it.
SETTLED_AFTER_S = 900.0
# Longer rests are cut short by somebody who asks.
PATIENCE_S = 3_000.0


class Peace:
    """Brings a world to rest, and judges what it has come to."""

    def __init__(
        self, world: World, repairs: SimulatedRepairs, network: SimulatedNetwork, storm: Storm
    ) -> None:
        self._world = world
        self._repairs = repairs
        self._network = network
        self._storm = storm
        self._ticks_next = False
        self._everything_sent_at_s = 0.0

    def heal(self) -> None:
        """Faults end; deletes are finished, everybody scans. The rest is the
        controller's.

        Raises:
            ViolationError: a job does not end; the controller does not know how the
                replicas are; they differ and nobody said why; or a further job would
                write again.
        """
        self._end_faults()
        self._settle()
        for container_id in self._world.containers:
            self._heal_container(container_id)
        self._hold_truth()
        self._tally()

    def ask_for_job(self, container_id: ContainerId) -> JobId:
        """Ask for a job that the controller has no reason to refuse."""
        job_id = self._network.ask_for_job(container_id)
        text = f"container {container_id} may not be reconciled, though nothing fails"
        hold(job_id is not None, text, subject=Subject(container_id))
        assert job_id is not None
        return job_id

    def run_until(
        self,
        done: Callable[[], bool],
        why: str,
        *,
        limit_s: float = SETTLED_AFTER_S,
        faults: bool = False,
    ) -> None:
        """Let the world go on until then; `why` says what is wrong if it never is."""
        until_s = self._world.now_s + limit_s
        for _ in range(ATTEMPTS_TO_SETTLE):
            if done():
                return
            hold(self._world.now_s < until_s, why)
            self._step(faults=faults)
        raise ViolationError(why)

    def _step(self, *, faults: bool) -> None:
        """Whatever can be done at once; else time goes by, everybody reports what is
        new, and the controller ticks.
        """
        world, network = self._world, self._network
        working = any(node.is_working for node in world.nodes.values())
        if not network.is_silent or working:
            world.now_s += 0.02
            if not (
                working and world.rng.random() < 0.7 and self._repairs.work_somewhere(faults=faults)
            ):
                network.carry_message(faults=faults)
        elif self._ticks_next:
            self._ticks_next = False
            network.tick()
        else:
            self._ticks_next = True
            world.now_s += INTERVAL_S if world.host and world.host.active() else 50.0
            for node in world.nodes.values():
                if network.may_beat(node):
                    network.beat(node)
        self._storm.check()

    def is_quiet(self) -> bool:
        """Whether nothing is under way and the controller knows all replicas as they
        are.
        """
        world = self._world
        return (
            self._network.is_silent
            and world.host is not None
            and not world.host.active()
            and all(self._is_heard(node.name) for node in world.nodes.values())
            and all(node.agent and node.agent.is_idle for node in world.nodes.values())
            and all(self._is_known(container_id) for container_id in world.containers)
        )

    @property
    def _controller(self) -> Controller:
        assert self._world.host is not None
        return self._world.host.controller

    @property
    def _controller_s(self) -> float:
        """The time by the controller's clock, which may have been set before its
        start.
        """
        assert self._world.host is not None
        return self._world.host.now_s()

    def job(self, job_id: JobId) -> Job:
        """The job as the controller has it now."""
        return self._controller.job(job_id)

    def _end_faults(self) -> None:
        world = self._world
        back_at_s = [node.back_at_s for node in world.nodes.values()]
        world.now_s = max(world.now_s, world.host_back_at_s, world.leads_again_at_s, *back_at_s)
        world.note(EventKind.PHASE, "faults end")
        world.start_what_is_due()
        for node in world.nodes.values():
            node.lie = None
        if world.rng.random() < world.setup.pieces_chance:
            self._storm.damage_everywhere(world.rng.choice(world.containers))
        for place in world.places():
            place.slow_scan = None
            place.node.deaf_until_s = 0.0
            if not place.replica.exists:
                continue
            self._storm.lose_shifted_chunks(place)
            if world.rng.random() < 0.7:
                self._world.delete_blocks(place)
            place.replica.pending_deletes.clear()
            place.replica.scan()

    def _settle(self) -> None:
        """Every job that is under way ends, and the controller hears of all that there
        is.
        """
        world = self._world
        for node in world.nodes.values():
            # Whoever waits for an answer that was lost gives up.
            if node.agent and node.agent.sent:
                node.agent.sent_at_s -= DEADLINE_S
        self.run_until(lambda: self._network.is_silent, "messages stay under way")
        # A dead agent's heartbeat that came late may have shut the living one out, for
        # as long as a silence counts.
        self._everything_sent_at_s = world.now_s
        assert world.host is not None
        for job in world.host.active():
            text = f"{job.job_id} does not end, though nothing fails any more"
            ended = self._is_ended(job.job_id)
            self.run_until(ended, text)
        self.run_until(self.is_quiet, "the controller does not hear how the replicas are")

    def _is_ended(self, job_id: JobId) -> Callable[[], bool]:
        return lambda: self.job(job_id).state.is_terminal

    def _is_heard(self, peer: PeerId) -> bool:
        if not self._controller.queries.is_live(peer):
            return False
        age_s = self._controller.queries.heartbeat_age_s(peer, self._controller_s)
        return age_s < self._world.now_s - self._everything_sent_at_s

    def _is_known(self, container_id: ContainerId) -> bool:
        view = self._controller.queries.container(container_id)
        truth = [place.report() for place in self._world.holders(container_id)]
        return view is not None and list(view.replicas) == truth

    def _heal_container(self, container_id: ContainerId) -> None:
        """One job after another, until one has made the replicas equal or has named,
        twice, what cannot be.
        """
        places = self._world.holders(container_id)
        replicas = [place.replica for place in places]
        promise = promise_of(replicas, self._world.written)
        needed = 0
        named = False
        for number in range(1, 4):
            before = different_blocks(replicas)
            job = self._next_job(container_id, promise)
            self._hold_done_by_all(job, places)
            is_only = is_only_unverifiable(job, self._world.written)
            named = job.verdict in NAMED and not is_only
            different = different_blocks(replicas)
            if not different and not named:
                needed = number
                break
            if named and number > 1:
                break
        subject = Subject(container_id, next(iter(different or before), None))
        if needed:
            self._world.marks["healed"] += 1
            self._world.marks["put together from pieces"] += promise is Promise.PIECES
            hold_healed(replicas, self._world.written)
        else:
            self._world.marks["nothing to be had named"] += promise is Promise.LOST
            hold(named, "the replicas differ and no verdict says why", "inv-I1", subject)
        is_enough = needed == 1 or promise is Promise.LOST
        hold(is_enough, "one job was not enough", "inv-I1", subject)
        self._hold_rest(container_id)
        self._hold_idempotent(container_id, places)

    def _hold_done_by_all(self, job: Job, places: list[Place]) -> None:
        states = {order.peer: order.state for order in job.orders}
        everybody = {place.node.name: OrderState.DONE for place in places}
        text = f"{job.job_id} is not done by all, though nothing fails: {job.detail}"
        hold(states == everybody, text, subject=Subject(job.container_id))

    def _hold_idempotent(self, container_id: ContainerId, places: list[Place]) -> None:
        """inv-I8: a further job finds nothing to write."""
        before = [(place.replica.bytes_written, place.replica.puts) for place in places]
        self._end_of(self.ask_for_job(container_id))
        after = [(place.replica.bytes_written, place.replica.puts) for place in places]
        hold(before == after, "a finished job wrote again", "inv-I8", Subject(container_id))

    def _next_job(self, container_id: ContainerId, promise: Promise) -> Job:
        """The container's next job, at its end: the controller's own where it is to
        start one, else one asked for.
        """
        world = self._world
        view = self._controller.queries.container(container_id)
        assert view is not None
        diverged = view.compared.comparison is RootComparison.DIVERGED
        if not world.setup.rules.automatic or not diverged:
            return self._end_of(self.ask_for_job(container_id))
        visit = view.visit
        resting = visit is not None and visit.hopeless_roots == roots(view.replicas)
        far = visit is not None and visit.not_before_s > self._controller_s + PATIENCE_S
        if resting or far:
            world.marks["hopeless and resting"] += resting
            # Only who was lied to may rest on a verdict that is not so.
            stands = promise is Promise.LOST or bool(world.setup.lies)
            text = "the controller rests though what is lacking can be had"
            hold(far or stands, text, subject=Subject(container_id))
            return self._end_of(self.ask_for_job(container_id))
        backs_off = visit is not None and visit.not_before_s > self._controller_s + INTERVAL_S
        world.marks["backed off"] += backs_off
        self.run_until(
            lambda: self._active_job(container_id) is not None,
            "the controller does not take up a diverged container",
            limit_s=2 * PATIENCE_S,
        )
        job_id = self._active_job(container_id)
        assert job_id is not None
        job = self._end_of(job_id)
        view = self._controller.queries.container(container_id)
        assert view is not None
        healed = view.compared.comparison is RootComparison.MATCH
        world.marks["healed by automatic mode"] += healed
        return job

    def _active_job(self, container_id: ContainerId) -> JobId | None:
        assert self._world.host is not None
        active = self._world.host.active()
        return next((job.job_id for job in active if job.container_id == container_id), None)

    def _end_of(self, job_id: JobId) -> Job:
        """The job once it has ended and all is reported; what it says of the replicas
        is so.
        """
        container_id = self.job(job_id).container_id
        ended = self._is_ended(job_id)
        self.run_until(ended, f"{job_id} does not end")
        job = self.job(job_id)
        is_known = partial(self._is_known, container_id)
        self.run_until(is_known, "the controller does not hear what was repaired")
        subject = Subject(container_id)
        is_good = job.state in (JobState.DONE, JobState.PARTIAL)
        hold(is_good, f"{job_id} is {job.state.value}: {job.detail}", subject=subject)
        is_open = (job.state is JobState.DONE) == (job.verdict not in FINAL_VERDICTS)
        hold(is_open, f"{job_id} hides its verdict", subject=subject)
        return job

    def _hold_rest(self, container_id: ContainerId) -> None:
        """A container that cannot be healed is not tried again and again."""
        world = self._world
        view = self._controller.queries.container(container_id)
        if not world.setup.rules.automatic or view is None or view.visit is None:
            return
        if view.visit.hopeless_roots != roots(view.replicas):
            return
        made = world.jobs_made
        rest_s = view.visit.not_before_s - self._controller_s
        until_s = world.now_s + min(rest_s, PATIENCE_S) + 150.0
        while world.now_s < until_s:
            self._step(faults=False)
        tried = [self.job(JobId(f"job{n}")) for n in range(made + 1, world.jobs_made + 1)]
        rests = all(job.container_id != container_id for job in tried)
        hold(rests, "a hopeless container is tried again", subject=Subject(container_id))

    def _hold_truth(self) -> None:
        """inv-I12: what the controller says of the containers is what their replicas
        are.
        """
        for container_id in self._world.containers:
            self.run_until(partial(self._is_known, container_id), "reports do not arrive")
            view = self._controller.queries.container(container_id)
            assert view is not None
            states = {(replica.data_checksum, replica.fingerprint) for replica in view.replicas}
            differ = len(states) > 1
            is_said = view.compared.comparison is RootComparison.DIVERGED
            text = (
                "replicas that differ are not called diverged"
                if differ
                else "replicas that agree are called diverged"
            )
            hold(is_said == differ, text, "inv-I12", Subject(container_id))

    def _tally(self) -> None:
        """Note what became of the jobs of this seed."""
        marks = self._world.marks
        for job in self._world.ledger.finished.values():
            marks[f"job {job.state.value.lower()}"] += 1
            marks["job of automatic mode"] += job.automatic
            marks["visit"] += job.reason == "visit"
            marks["further round"] += any(order.round > 1 for order in job.orders)
            for order in job.orders:
                marks["agent restarted in an order"] += order.attempts > 1
                marks["attempts used up"] += order.detail.startswith("agent restarted")
                marks["order refused"] += order.state is OrderState.REFUSED
                expired = order.state is OrderState.EXPIRED
                marks["order expired"] += expired and order.detail.startswith("no progress")
                marks["order given up"] += expired and "dead" in order.detail
