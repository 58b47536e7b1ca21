"""The storm of a simulated cluster: faults of all kinds between and during repairs.

Each step lets a little time go by, draws which faults happen to one replica, its
datanode or the controller, and then does some of what waits to be done.
"""

from collections.abc import Callable
from dataclasses import replace

from merkle.checksum import ChecksumType
from merkle.tree import ContainerId
from ozone.errors import StaleTreeError
from repair.requests import Cancelled
from tests.support.faults import Damage, DamageKind, Fault, drawn_damage
from tests.support.observer import client_reads, hold
from tests.support.simulated_network import SimulatedNetwork
from tests.support.simulated_repairs import SimulatedRepairs
from tests.support.simulated_world import Place, World
from tests.support.trace import EventKind, Subject

STEP_S = 1.0
# From a little to more than any deadline.
_CLOCK_JUMPS_S = (-86_400.0, -3_700.0, -120.0, 120.0, 3_700.0, 86_400.0)


class Storm:
    """The faults of a world, one by one or as its seed draws them."""

    def __init__(self, world: World, repairs: SimulatedRepairs, network: SimulatedNetwork) -> None:
        self._world = world
        self._repairs = repairs
        self._network = network

    def run(self, steps: int, after_step: Callable[[], None] = lambda: None) -> None:
        """Damage some replicas, then take so many steps."""
        rng = self._world.rng
        for _ in range(rng.randint(1, 5)):
            self._damage_somewhere(rng.choice(self._world.places()))
        for place in self._world.places():
            if place.replica.exists and rng.random() < 0.8:
                place.replica.scan()
        for _ in range(steps):
            self._step()
            after_step()
            self.check()

    def check(self) -> None:
        """Look at the disks of some replicas; writes were judged as they were made."""
        for place in self._world.places():
            if self._world.rng.random() <= 0.1:
                self._world.observer.looks(place.replica)

    def _step(self) -> None:
        world, rng = self._world, self._world.rng
        world.now_s += rng.expovariate(1 / STEP_S)
        world.start_what_is_due()
        place = rng.choice(world.places())
        for fault, act in (
            (Fault.DAMAGE, self._damage_somewhere),
            (Fault.CRASH, lambda place: world.crash_agent(place.node)),
            (Fault.DELETE, self._delete_somewhere),
            (Fault.DELETE_CONTAINER, self.delete_container),
            (Fault.REPLICATE, self._replicate),
            (Fault.CANCEL, lambda _: self._cancel_some_job()),
            (Fault.CONTROLLER_CRASH, lambda _: world.crash_controller()),
            (Fault.LEAD, lambda _: self._lose_lead()),
            (Fault.PAUSE, lambda _: self._pause()),
            (Fault.ONE_WAY, self._deafen),
            (Fault.CLOCK, self._set_clock),
        ):
            if world.happens(fault):
                act(place)
        if rng.random() < world.setup.ask_chance:
            self._network.ask_for_job(place.container_id)
        match rng.randrange(20):
            case 0:
                self._client_reads(place)
            case 1:
                begun = [place for place in world.places() if place.slow_scan is not None]
                self._slow_scan(rng.choice([place, *begun]))
            case 2 | 3:
                self._network.tick()
            case 4 | 5 | 6:
                for _ in range(rng.randint(1, 3)):
                    self._network.beat_somewhere()
            case 7 | 8 | 9 | 10 | 11:
                for _ in range(rng.randint(1, 5)):
                    self._network.carry_message(faults=True)
            case _:
                for _ in range(rng.randint(1, 6)):
                    if not self._repairs.work_somewhere(faults=True):
                        self._network.carry_message(faults=True)

    def damage(self, place: Place, damage: Damage) -> None:
        """A disk fails, and no agent knows it before a scan."""
        self._note_damage(place, damage)
        self._world.observer.looks(place.replica)
        damage.apply(place.replica.stored)
        # What it found may be gone by another fault, which no generation counts.
        place.slow_scan = None
        self._world.observer.changes(place.replica)
        self._world.marks[damage.mark] += 1

    def _note_damage(self, place: Place, damage: Damage) -> None:
        text = f"{place.node.name} {damage}"
        self._world.note(EventKind.DAMAGE, text, place.container_id, damage.block_id)

    def _damage_somewhere(self, place: Place) -> None:
        stored, rng = place.replica.stored, self._world.rng
        if not stored.files or not place.replica.exists:
            return
        block_id = rng.choice(sorted(stored.files))
        damage = drawn_damage(stored, block_id, rng)
        if place.run is not None:
            self._world.observer.faulted.add((place.node.name, block_id))
        if damage is not None:
            self.damage(place, damage)
        match rng.randrange(4):
            case 0 | 1:
                place.replica.scan()
            case 2:
                self._slow_scan(place)

    def lose_shifted_chunks(self, place: Place) -> None:
        """Blocks whose record lists a chunk that nobody wrote go: only people can say
        which of two chunks counts.
        """
        stored = place.replica.stored
        for block_id, record in sorted(stored.records.items()):
            true, _ = self._world.written[block_id]
            if not record.by_offset.keys() <= true.by_offset.keys():
                has_file = block_id in stored.files
                kind = DamageKind.LOSE_BLOCK if has_file else DamageKind.LOSE_RECORD
                self.damage(place, Damage(kind, block_id))

    def damage_everywhere(self, container_id: ContainerId) -> None:
        """One chunk suffers on each replica, in another window if it has as many: then
        only pieces of it are left.

        One replica may have lost the block: it can have it back once another has put it
        together. And all but one may have lost the record, so that this one must be
        whole before any other can be.
        """
        world, rng = self._world, self._world.rng
        block_id = rng.choice(world.blocks_of(container_id))
        chunk = max(world.written[block_id][0].chunks, key=lambda chunk: len(chunk.checksums))
        places = world.holders(container_id)
        bereft = rng.choice((None, 0))
        sole = rng.choice((None, len(places) - 1))
        for number, place in enumerate(places):
            stored = place.replica.stored
            world.observer.looks(place.replica)
            world.observer.faulted.add((place.node.name, block_id))
            if number == bereft or sole not in (None, number):
                kind = DamageKind.LOSE_BLOCK if number == bereft else DamageKind.LOSE_RECORD
                self._note_damage(place, Damage(kind, block_id))
                stored.records.pop(block_id, None)
            if number == bereft:
                stored.files.pop(block_id, None)
                world.observer.changes(place.replica)
                continue
            offset = chunk.offset + chunk.window(number % max(1, len(chunk.checksums)))[0]
            if offset < len(stored.files.get(block_id, b"")):
                flip = Damage(DamageKind.FLIP, block_id, offset)
                self._note_damage(place, flip)
                flip.apply(stored)
            world.observer.changes(place.replica)

    def delete_container(self, place: Place) -> None:
        """The cluster deletes a replica, as long as two others are left."""
        world, holders = self._world, self._world.holders(place.container_id)
        if len(holders) <= 2 or not place.replica.exists or not place.node.agent:
            return
        text = f"{place.node.name} deletes container {place.container_id}"
        world.note(EventKind.REPLICA, text, place.container_id)
        world.marks["container deleted in repair"] += place.run is not None
        if place.run is not None:
            self._repairs.deliver(place, Cancelled("the container is being deleted"))
            text = "the deletion of a container did not end its repair"
            hold(place.run is None, text, "CR-057", Subject(place.container_id))
        place.replica.delete_container()
        world.observer.changes(place.replica)
        del place.node.source.replicas[place.container_id]

    def _replicate(self, place: Place) -> None:
        """The cluster has a replica copied to where there is none, as it is just now
        (CR-052).
        """
        world, rng = self._world, self._world.rng
        container_id = place.container_id
        sources = [
            other
            for other in world.places()
            if other.container_id == container_id and other.replica.exists and other.node.agent
        ]
        if place.replica.exists or not place.node.agent or not sources:
            return
        source = rng.choice(sources)
        text = f"{place.node.name} imports container {container_id} from {source.node.name}"
        world.note(EventKind.REPLICA, text, container_id)
        world.marks["replica imported"] += 1
        world.marks["replica imported in repair"] += any(other.run is not None for other in sources)
        theirs = source.replica.stored
        stored = replace(
            theirs,
            records=dict(theirs.records),
            files={block_id: bytearray(file) for block_id, file in theirs.files.items()},
            # An archive of an older datanode has no tree: a scan makes one later.
            tree=theirs.tree if rng.random() < 0.7 else None,
        )
        imported = world.add_replica(place.node, container_id, stored).replica
        tree, _ = imported.known_tree()
        assert tree is not None
        imported.remembered = {block.block_id: block for block in tree.blocks if block.deleted}
        world.observer.appears(imported)
        blocks = world.blocks_of(container_id)
        world.observer.faulted |= {(place.node.name, block_id) for block_id in blocks}

    def _delete_somewhere(self, place: Place) -> None:
        """The cluster deletes a block; the replicas hear of it at different times
        (CR-052).
        """
        world = self._world
        if not world.observer.deleted or world.rng.random() < 0.3:
            world.observer.deleted.add(world.rng.choice(list(world.written)))
        world.delete_blocks(place, range(4) if world.rng.random() < 0.3 else ())

    def _slow_scan(self, place: Place) -> None:
        """A background scan that began before other things happened, and ends after
        them.
        """
        if not place.replica.exists or place.node.agent is None:
            return
        if place.slow_scan is None:
            place.slow_scan = place.replica.begin_scan()
            return
        scan, place.slow_scan = place.slow_scan, None
        try:
            place.replica.end_scan(scan)
        except StaleTreeError:
            self._world.marks["slow scan refused as stale"] += 1
        else:
            self._world.marks["slow scan stored"] += 1

    def _client_reads(self, place: Place) -> None:
        records = place.replica.stored.records
        if not records:
            return
        block_id = self._world.rng.choice(sorted(records))
        if records[block_id].chunks[0].checksum_type is ChecksumType.NONE:
            return
        for passed in client_reads(place.replica, block_id, self._world.written):
            self._world.marks["client read good" if passed else "client read bad"] += 1

    def _cancel_some_job(self) -> None:
        active = self._world.host.active() if self._world.host else []
        if active:
            job = self._world.rng.choice(active)
            self._world.note(EventKind.ORDER, f"somebody cancels {job.job_id}", job.container_id)
            self._network.of_controller(lambda host: host.cancel(job.job_id))

    def _lose_lead(self) -> None:
        """Another controller leads for a while."""
        world = self._world
        if world.host is not None and world.host.leadership.value is not None:
            world.host.leadership.value = None
            world.leads_again_at_s = world.now_s + world.rng.choice((1.0, 10.0, 50.0))
            world.note(EventKind.NETWORK, "the controller loses the lead")
            world.marks["lead lost"] += 1
            world.marks["lead lost with jobs under way"] += bool(world.host.active())

    def _deafen(self, place: Place) -> None:
        """A datanode's messages pass, and no answer reaches it, as by a wrong rule of a
        firewall.
        """
        world, node = self._world, place.node
        deaf_s = world.rng.choice((20.0, 60.0, 120.0))
        node.deaf_until_s = max(node.deaf_until_s, world.now_s + deaf_s)
        world.note(EventKind.NETWORK, f"{node.name} hears nothing for {deaf_s:.0f} s")

    def _set_clock(self, place: Place) -> None:
        """The wall clock of the controller's machine or of a datanode is set, as by a
        time server or a battery that is empty.
        """
        world, node = self._world, place.node
        jump_s = world.rng.choice(_CLOCK_JUMPS_S)
        if world.rng.random() < 0.5:
            world.wall_error_s += jump_s
            name = "the controller"
        else:
            node.wall_error_s += jump_s
            name = node.name
        world.marks["clock set forwards" if jump_s > 0 else "clock set back"] += 1
        world.note(EventKind.NETWORK, f"the clock of {name} is set by {jump_s:+.0f} s")

    def _pause(self) -> None:
        """Nobody is heard of for a while, as when a switch is restarted."""
        pause_s = self._world.rng.choice((15.0, 60.0, 100.0, 250.0))
        self._world.now_s += pause_s
        self._world.note(EventKind.NETWORK, f"nobody is heard of for {pause_s:.0f} s")
        self._network.tick()
