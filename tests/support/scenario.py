"""A small language for scenarios: a cluster whose faults a test chooses one by one.

    scenario = Scenario(blocks={10: 64, 20: 48}, lies={"dn3": Evil.BAD_BYTES})
    dn1, dn2, dn3 = scenario.datanodes
    dn2.lose_block(20)
    scenario.scan()
    job = scenario.run_job()
    assert dn2.is_whole(20)

Nothing fails that was not asked for, and `lines` prints what happened in the form in
which a failing seed prints it. Peers lie until `heal`, which is the peace of any seed.
"""

import random
from collections.abc import Callable, Mapping

from merkle.checksum import ChecksumType
from merkle.record import BlockRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from scm.jobs import Job, JobId
from scm.rules import Rules
from tests.support.cluster_control import Parts
from tests.support.faults import Damage, DamageKind, Lie
from tests.support.observer import Written
from tests.support.peers import Evil, chunk_record
from tests.support.simulated_world import Place, Setup, World
from tests.support.simulation import SimulatedCluster, replica_of_written
from tests.support.trace import EventKind, Subject

CONTAINER = ContainerId(7)
WINDOW_BYTES = 16
CHUNK_BYTES = 2 * WINDOW_BYTES


class ScenarioDatanode:
    """One datanode of a scenario: what befalls it, and what it holds."""

    def __init__(self, cluster: SimulatedCluster, name: PeerId) -> None:
        self.name = name
        self._cluster = cluster
        self._node = cluster.world.nodes[name]

    @property
    def _place(self) -> Place:
        return self._node.places[CONTAINER]

    def flip_bit(self, block_id: int, *, offset: int) -> None:
        """One bit on disk changes."""
        self._damage(DamageKind.FLIP, block_id, offset)

    def truncate(self, block_id: int, *, offset: int) -> None:
        """The block's file ends there."""
        self._damage(DamageKind.TRUNCATE, block_id, offset)

    def lose_file(self, block_id: int) -> None:
        """The block's record stays, its bytes are gone."""
        self._damage(DamageKind.LOSE_FILE, block_id)

    def lose_record(self, block_id: int) -> None:
        """The block's bytes stay, its record is gone."""
        self._damage(DamageKind.LOSE_RECORD, block_id)

    def lose_block(self, block_id: int) -> None:
        """The block's record and bytes are gone."""
        self._damage(DamageKind.LOSE_BLOCK, block_id)

    def lose_tree(self) -> None:
        """The tree's file is gone."""
        self._damage(DamageKind.LOSE_TREE)

    def lose_commit(self, commit: int) -> None:
        """The container falls back to an earlier commit."""
        self._place.replica.stored.bcs_id = commit

    def delete_block(self, block_id: int) -> None:
        """The cluster deletes a block, and this datanode is the next to hear of it."""
        with self._cluster.explained():
            self._cluster.world.observer.deleted.add(BlockId(block_id))
            self._cluster.world.delete_blocks(self._place)

    def die_deleting(self, block_id: int) -> None:
        """The agent records that the cluster deletes a block, and dies before anything
        of it is done.
        """
        with self._cluster.explained():
            self._cluster.world.observer.deleted.add(BlockId(block_id))
            self._cluster.world.delete_blocks(self._place, crash_after=(0,))

    def crash(self) -> None:
        """The agent dies with its repairs, and starts again within 20 s."""
        self._cluster.world.crash_agent(self._node)

    def is_whole(self, block_id: int) -> bool:
        """Whether the block is recorded here, and its bytes are those written."""
        stored, key = self._place.replica.stored, BlockId(block_id)
        record, data = self._cluster.world.written[key]
        same_bytes = bytes(stored.files.get(key, b"")) == data
        return same_bytes and stored.records.get(key) == record

    @property
    def commit(self) -> int:
        """The container's commit here."""
        return self._place.replica.stored.bcs_id

    def is_deleted(self, block_id: int) -> bool:
        """Whether the replica's tree has the block as a tombstone."""
        tree, _ = self._place.replica.known_tree()
        entry = tree.block(BlockId(block_id)) if tree else None
        return entry is not None and entry.deleted

    def _damage(self, kind: DamageKind, block_id: int | None = None, offset: int = 0) -> None:
        hit = None if block_id is None else BlockId(block_id)
        if hit is not None and self._place.run is not None:
            self._cluster.world.observer.faulted.add((self.name, hit))
        self._cluster.faults.damage(self._place, Damage(kind, hit, offset))


class Scenario:
    """One container on a few datanodes, and what happens to it in order."""

    def __init__(
        self,
        *,
        blocks: Mapping[int, int],
        datanodes: int = 3,
        lies: Mapping[str, Evil] | None = None,
        parts: Parts | None = None,
    ) -> None:
        written = _written(blocks)
        names = [PeerId(f"dn{number}") for number in range(1, datanodes + 1)]
        setup = Setup(
            (CONTAINER,),
            written,
            {
                block_id: (record.bcs_id,) * len(record.chunks)
                for block_id, (record, _) in written.items()
            },
            {name: {CONTAINER: replica_of_written(written, CONTAINER)} for name in names},
            Rules(automatic=False),
            lies={PeerId(name): Lie(evil) for name, evil in (lies or {}).items()},
        )
        # It orders messages and requests; no fault is left to it.
        rng = random.Random(0)
        self.cluster = SimulatedCluster(World(setup, rng, parts=parts), "scenario")
        self.datanodes = [ScenarioDatanode(self.cluster, name) for name in names]
        self._job_id: JobId | None = None

    def scan(self) -> None:
        """All datanodes scan, so that their trees show the damage."""
        self.cluster.world.note(EventKind.PHASE, "all scan")
        for place in self.cluster.world.holders(CONTAINER):
            place.replica.scan()

    def crash_controller(self) -> None:
        """The controller dies, and starts again within 20 s."""
        self.cluster.world.crash_controller()

    def start_job(self) -> None:
        """Ask for a job, and go on until a datanode has begun its part."""
        world = self.cluster.world
        with self.cluster.explained():
            self._run_until(self.cluster.peace.is_quiet, "the cluster does not come to rest")
            self._job_id = self.cluster.peace.ask_for_job(CONTAINER)
            self._run_until(
                lambda: any(place.run for place in world.places()), "no datanode begins the job"
            )

    def finish_job(self) -> Job:
        """Go on until the job has ended; peers that lie do so all the while."""
        job_id = self._job_id
        assert job_id is not None, "no job was started"
        world, peace = self.cluster.world, self.cluster.peace
        with self.cluster.explained():
            self._run_until(
                lambda: world.host is not None and peace.job(job_id).state.is_terminal,
                f"{job_id} does not end",
            )
            return peace.job(job_id)

    def run_job(self) -> Job:
        """One job from its start to its end."""
        self.start_job()
        return self.finish_job()

    def heal(self) -> None:
        """Faults end, and the controller heals what can be healed: see `Peace.heal`."""
        self.cluster.heal()

    def lines(self) -> list[str]:
        """What happened, as a failure would print it."""
        return self.cluster.world.trace.lines(Subject(CONTAINER))

    def _run_until(self, done: Callable[[], bool], why: str) -> None:
        def is_reached() -> bool:
            self.cluster.world.start_what_is_due()
            return done()

        self.cluster.peace.run_until(is_reached, why, faults=True)


def _written(blocks: Mapping[int, int]) -> Written:
    """Blocks given by ID and length."""
    written = {}
    for commit, (number, length) in enumerate(blocks.items(), start=1):
        data = random.Random(number).randbytes(length)
        chunks = tuple(
            chunk_record(
                data[offset : offset + CHUNK_BYTES], offset, ChecksumType.CRC32C, WINDOW_BYTES
            )
            for offset in range(0, length, CHUNK_BYTES)
        )
        block_id = BlockId(number)
        written[block_id] = BlockRecord(CONTAINER, block_id, commit, chunks), data
    return written
