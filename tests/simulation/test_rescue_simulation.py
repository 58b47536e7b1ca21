"""A rescue's state machine against a simulated cluster that loses calls and restarts
SCM; and a rescue that is killed at each of its requests.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from live.rescue import (
    ATTEMPTS_MAX,
    Beat,
    ChunkRead,
    Event,
    Failed,
    ListReplicas,
    OrderReconcile,
    ReadChunk,
    ReadTree,
    Register,
    ReplicasListed,
    ReportNothing,
    Request,
    Rescue,
    RescueOutcome,
    RescuePhase,
    Succeeded,
    TreeRead,
    Wait,
)
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree

OWN = PeerId("own")
PEERS = (PeerId("dn1"), PeerId("dn2"), PeerId("dn3"))
NUMBER = ContainerId(1)
BLOCK = BlockId(20)


def tree_of(*, is_whole: bool, other: int = 7) -> ContainerTree:
    """A tree of a rescued chunk at 0, and of another at 4096."""
    chunks = [ChunkTree(0, 4096, 5 if is_whole else 6, is_whole), ChunkTree(4096, 4096, other)]
    return ContainerTree.of(NUMBER, [BlockTree.live(BLOCK, chunks)])


STAGED = tree_of(is_whole=True)


@dataclass
class Cluster:
    """SCM and three datanodes; each call may be lost before or after it took effect."""

    chance: random.Random
    loss: float = 0.0
    # A reconcile heals each datanode with this probability.
    heals: float = 1.0
    # Their other chunk, which differs from the staged one in a rescue of a part.
    other: int = 7
    is_registered: bool = False
    has_replica: bool = False
    trees: dict[PeerId, ContainerTree] = field(default_factory=dict)
    ordered_unlisted: int = 0
    # A chunk has other bytes than its tree says with this probability.
    lies: float = 0.0
    read_back: list[PeerId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trees = {peer: tree_of(is_whole=False, other=self.other) for peer in PEERS}

    def call(self, request: Request) -> Event:
        if not isinstance(request, Wait) and self.chance.random() < self.loss:
            if self.chance.random() < 0.5:
                self.effect(request)
            return Failed("lost")
        return self.effect(request)

    def effect(self, request: Request) -> Event:
        match request:
            case Register():
                self.is_registered = self.has_replica = True
            case Beat():
                # As the runner does with a command to register again.
                self.is_registered = self.has_replica = True
            case ReportNothing():
                self.is_registered, self.has_replica = True, False
            case OrderReconcile():
                self.ordered_unlisted += not self.has_replica
                for peer in PEERS:
                    if self.has_replica and self.chance.random() < self.heals:
                        self.trees[peer] = tree_of(is_whole=True, other=self.other)
            case ListReplicas():
                return ReplicasListed(list(self.listed()))
            case ReadTree(peer):
                return TreeRead(self.trees[peer])
            case ReadChunk(peer, place):
                self.read_back.append(peer)
                assert place == (BLOCK, 0)
                is_whole = self.trees[peer].blocks[0].chunks[0].checksum_matches
                return ChunkRead(is_whole and self.chance.random() >= self.lies, 4096)
            case Wait():
                pass
        return Succeeded()

    def listed(self) -> Iterator[ContainerReplica]:
        for peer, tree in self.trees.items():
            yield ContainerReplica(peer, NUMBER, ReplicaState.UNHEALTHY, tree.data_checksum, 1)
        if self.has_replica:
            yield ContainerReplica(OWN, NUMBER, ReplicaState.UNHEALTHY, STAGED.data_checksum, 1)


def run(
    cluster: Cluster, *, restarts: float = 0.0, stop_after: int | None = None
) -> tuple[RescueOutcome | None, list[Request]]:
    """The outcome, None if the rescue was killed after `stop_after` requests."""
    machine = Rescue(OWN, STAGED, frozenset({(BLOCK, 0)}), PEERS)
    now_s, made = 0.0, list[Request]()
    request: Request | None = machine.start(now_s)
    while request is not None:
        if stop_after is not None and len(made) >= stop_after:
            return None, made
        made.append(request)
        assert len(made) < 5_000
        if cluster.chance.random() < restarts:
            cluster.is_registered = cluster.has_replica = False
        event = cluster.call(request)
        now_s += request.seconds if isinstance(request, Wait) else 0.05
        request = machine.step(event, now_s)
    assert machine.phase is RescuePhase.DONE
    return machine.outcome, made


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_lost_a_rescue_ends_and_leaves(seed: int) -> None:
    chance = random.Random(seed)
    cluster = Cluster(
        chance,
        loss=chance.choice([0.0, 0.1, 0.3]),
        heals=chance.choice([0.3, 1.0]),
        other=chance.choice([7, 8]),
        lies=chance.choice([0.0, 0.4]),
    )
    outcome, made = run(cluster, restarts=chance.choice([0.0, 0.02]))
    assert outcome is not None
    # What it says is true.
    for peer in outcome.healed:
        assert cluster.trees[peer].blocks[0].chunks[0].checksum_matches
        assert peer in cluster.read_back
    assert sorted((*outcome.healed, *outcome.unhealed)) == sorted(PEERS)
    if outcome.has_left:
        assert not cluster.has_replica
    assert sum(isinstance(one, OrderReconcile) for one in made) <= ATTEMPTS_MAX
    if not outcome.is_complete:
        assert outcome.reason or not outcome.has_left


@pytest.mark.parametrize("other", [7, 8])
def test_an_undisturbed_rescue_heals_all_with_one_reconcile(other: int) -> None:
    cluster = Cluster(random.Random(0), other=other)
    outcome, made = run(cluster)
    assert outcome is not None
    assert outcome.is_complete
    assert outcome.attempts == 1
    assert {one.peer for one in made if isinstance(one, ReadTree)} == set(PEERS)
    assert cluster.ordered_unlisted == 0
    assert sorted(cluster.read_back) == sorted(PEERS)
    assert outcome.bytes_read_back == 3 * 4096


@pytest.mark.parametrize(
    ("failures", "is_final", "orders", "is_complete"),
    [
        *((failures, False, failures + 1, True) for failures in range(1, ATTEMPTS_MAX)),
        (ATTEMPTS_MAX, False, ATTEMPTS_MAX, False),
        (1, True, 1, False),
    ],
)
def test_an_order_that_fails_while_scms_elect_is_given_again(
    failures: int, is_final: bool, orders: int, is_complete: bool
) -> None:
    """One that SCM refuses is not."""
    cluster = Cluster(random.Random(0))
    machine = Rescue(OWN, STAGED, frozenset({(BLOCK, 0)}), PEERS)
    now_s, made = 0.0, 0
    request: Request | None = machine.start(now_s)
    while request is not None:
        made += isinstance(request, OrderReconcile)
        is_failed = isinstance(request, OrderReconcile) and made <= failures
        event = Failed("no leader", is_final) if is_failed else cluster.call(request)
        now_s += request.seconds if isinstance(request, Wait) else 20.0 if is_failed else 0.05
        request = machine.step(event, now_s)
    assert machine.outcome is not None
    assert (made, machine.outcome.is_complete) == (orders, is_complete)
    assert machine.outcome.has_left


def test_a_rescue_killed_at_any_request_can_be_run_again() -> None:
    _, whole = run(Cluster(random.Random(0)))
    for stop_after in range(len(whole)):
        cluster = Cluster(random.Random(0))
        run(cluster, stop_after=stop_after)
        # Nothing that a datanode holds is worse than before.
        for tree in cluster.trees.values():
            assert tree in (tree_of(is_whole=False), tree_of(is_whole=True))
        outcome, _ = run(cluster)
        assert outcome is not None
        assert outcome.is_complete, stop_after
        assert not cluster.has_replica


@pytest.mark.parametrize("deaf_s", [5.0, 30.0, 80.0])
def test_an_order_that_datanodes_drop_is_given_again_soon(deaf_s: float) -> None:
    """As for seconds after a rescue was killed, while they wait for it."""
    cluster = Cluster(random.Random(0))
    machine = Rescue(OWN, STAGED, frozenset({(BLOCK, 0)}), PEERS)
    now_s = 0.0
    request: Request | None = machine.start(now_s)
    while request is not None:
        cluster.heals = float(now_s >= deaf_s)
        event = cluster.call(request)
        now_s += request.seconds if isinstance(request, Wait) else 0.05
        request = machine.step(event, now_s)
    assert machine.outcome is not None
    assert machine.outcome.is_complete
    assert now_s < 15 + 2 * deaf_s


def test_the_order_is_given_as_soon_as_scm_lists_the_staged_replica() -> None:
    """One that is late misses the next heartbeat of the datanodes."""
    cluster = Cluster(random.Random(0))
    machine = Rescue(OWN, STAGED, frozenset({(BLOCK, 0)}), PEERS)
    now_s, listed_s = 0.0, 1.3
    request: Request | None = machine.start(now_s)
    while not isinstance(request, OrderReconcile):
        assert request is not None
        event = cluster.call(request)
        if isinstance(event, ReplicasListed) and now_s < listed_s:
            event = ReplicasListed([one for one in event.replicas if one.peer != OWN])
        now_s += request.seconds if isinstance(request, Wait) else 0.01
        request = machine.step(event, now_s)
    assert listed_s < now_s < listed_s + 0.3


def test_a_root_that_scm_reports_is_not_believed_before_the_tree_is_read() -> None:
    cluster = Cluster(random.Random(0))
    machine = Rescue(OWN, STAGED, frozenset({(BLOCK, 0)}), PEERS)
    now_s = 0.0
    request: Request | None = machine.start(now_s)
    while request is not None:
        event = cluster.call(request)
        if isinstance(request, ReadTree) and request.peer == PEERS[2]:
            event = TreeRead(tree_of(is_whole=False))
        now_s += request.seconds if isinstance(request, Wait) else 0.05
        request = machine.step(event, now_s)
    assert machine.outcome is not None
    assert machine.outcome.unhealed == (PEERS[2],)
    assert machine.outcome.attempts == ATTEMPTS_MAX
    assert machine.outcome.has_left


def test_bytes_that_do_not_match_are_not_healed_whatever_the_tree_says() -> None:
    cluster = Cluster(random.Random(0), lies=1.0)
    outcome, _ = run(cluster)
    assert outcome is not None
    assert outcome.unhealed == PEERS
    assert outcome.attempts == ATTEMPTS_MAX
    assert outcome.has_left
    # Once for each reconcile: nothing else can change what is on disk.
    assert len(cluster.read_back) == ATTEMPTS_MAX * len(PEERS)


def test_heartbeats_go_on_while_many_chunks_are_read_back() -> None:
    """SCM calls a datanode stale after 9 s at the shortest."""
    chunks = [ChunkTree(at * 4096, 4096, 5) for at in range(200)]
    staged = ContainerTree.of(NUMBER, [BlockTree.live(BLOCK, chunks)])
    places = frozenset((BLOCK, chunk.offset) for chunk in chunks)
    machine = Rescue(OWN, staged, places, PEERS[:1])
    own, real = (
        ContainerReplica(peer, NUMBER, ReplicaState.CLOSED, staged.data_checksum, 1)
        for peer in (OWN, PEERS[0])
    )
    now_s, last_s, read = 0.0, 0.0, 0
    request: Request | None = machine.start(now_s)
    while request is not None:
        is_member = machine.phase is not RescuePhase.LEAVING
        match request:
            case Beat() | Register():
                assert now_s - last_s < 9
                last_s, event = now_s, Succeeded()
            case ReadTree():
                event = TreeRead(staged)
            case ReadChunk():
                read, event = read + 1, ChunkRead(True, 4096)
                now_s += 0.5
            case ListReplicas():
                event = ReplicasListed([real, own] if is_member else [real])
            case Wait(seconds):
                now_s, event = now_s + seconds, Succeeded()
            case _:
                event = Succeeded()
        request = machine.step(event, now_s)
    assert machine.outcome is not None
    assert machine.outcome.is_complete
    assert read == 200
