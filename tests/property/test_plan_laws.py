"""Plans on real volumes with random damage: a plan writes nothing, its repair writes
what it has and nothing else, in whatever order the replicas carry theirs out.
"""

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from merkle.outcome import OutcomeState, RepairOutcome
from merkle.tree import BlockId, ContainerId
from merkle.windows import prove
from repair.planning import make_plan
from repair.ports import ReplicaAccess
from repair.replica_plan import PlanChangedError, PlannedReplica, ReplicaPlan
from repair.runner import RepairJob
from tests.support.in_process import Datanode, datanodes, scan_replica
from tests.support.volumes import (
    VERSION,
    container_folder,
    new_volume,
    owned,
    tree_of_files,
    write_block,
)

NAMES = ("dn1", "dn2", "dn3")
CONTAINERS = range(1, 13)
BLOCKS = (1, 2, 3)
LENGTHS = (5000, 3000)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Datanode]]:
    folder = tmp_path_factory.mktemp("plans")
    first = new_volume(folder / "dn1", version=replace(VERSION))
    with owned(first, folder / "writer") as owner:
        for container_id in CONTAINERS:
            owner.writer.create_container(ContainerId(container_id))
            for bcs_id, block in enumerate(BLOCKS, 1):
                write_block(owner.writer, container_id, block, *LENGTHS, bcs_id=bcs_id)
            owner.writer.close(ContainerId(container_id))
    for name in NAMES[1:]:
        shutil.copytree(first, folder / name)
    with datanodes({name: folder / name for name in NAMES}, folder / "state") as running:
        yield running


def access(node: Datanode, container_id: int) -> ReplicaAccess:
    return node.store.open_replica(
        ContainerId(container_id), "job-1", cancelled=Event(), on_bytes=lambda _: None
    )


def plan(nodes: dict[str, Datanode], name: str, container_id: int) -> ReplicaPlan:
    node = nodes[name]
    peers = {other.name: other.peer() for other in nodes.values() if other is not node}
    return make_plan(
        ContainerId(container_id), node.name, access(node, container_id), peers, may_return=True
    )


def carry_out(nodes: dict[str, Datanode], name: str, made: ReplicaPlan) -> RepairOutcome:
    node = nodes[name]
    peers = {other.name: other.peer() for other in nodes.values() if other is not node}
    return node.runner.run(
        RepairJob("job-1", made.container_id, made.options(3, None), made.rules),
        lambda _: PlannedReplica(made, access(node, made.container_id)),
        peers,
    )


def files(node: Datanode, container_id: int) -> dict[str, bytes]:
    return tree_of_files(container_folder(node.held.volume.root, container_id))


def damage(nodes: dict[str, Datanode], container_id: int, rng: random.Random) -> None:
    for node in rng.sample(list(nodes.values()), rng.choice((1, 2, 3))):
        folder = container_folder(node.held.volume.root, container_id) / "chunks"
        for block in rng.sample(BLOCKS, rng.choice((1, 2))):
            path = folder / f"{block}.block"
            data = bytearray(path.read_bytes())
            match rng.choice(("flip", "flip", "cut", "lose")):
                case "flip":
                    for _ in range(rng.randint(1, 4)):
                        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                    path.write_bytes(data)
                case "cut":
                    path.write_bytes(data[: rng.randrange(len(data))])
                case _:
                    path.unlink()
        scan_replica(node, container_id)


@pytest.mark.parametrize("container_id", CONTAINERS[:-1])
def test_a_repair_by_plan_writes_the_plan_and_nothing_else(
    nodes: dict[str, Datanode], container_id: int
) -> None:
    rng = random.Random(container_id)
    damage(nodes, container_id, rng)
    before = {name: files(node, container_id) for name, node in nodes.items()}
    plans = {name: plan(nodes, name, container_id) for name in NAMES}
    assert {name: files(node, container_id) for name, node in nodes.items()} == before
    again = {name: plan(nodes, name, container_id) for name in NAMES}
    assert {n: replace(p, made_at="") for n, p in plans.items()} == {
        n: replace(p, made_at="") for n, p in again.items()
    }
    for name in rng.sample(NAMES, len(NAMES)):
        node, made = nodes[name], plans[name]
        node.audit.clear()
        outcome = carry_out(nodes, name, made)
        assert outcome.state is OutcomeState.DONE, outcome
        written = {
            (block, at, source)
            for _, block, offset, length, source, _ in node.audit
            for at in range(offset, offset + length)
        }
        wanted = {
            (write.block_id, at, write.source)
            for write in made.writes
            for at in range(write.offset, write.offset + write.length)
        }
        assert written == wanted
        # A plan is carried out once.
        if made.writes:
            with pytest.raises(PlanChangedError):
                carry_out(nodes, name, made)
            now = files(node, container_id)
            for path, data in now.items():
                block, _, suffix = Path(path).name.partition(".")
                if suffix == "block":
                    old = before[name].get(path, b"")
                    changed = {
                        at for at in range(len(data)) if data[at : at + 1] != old[at : at + 1]
                    }
                    assert changed <= {at for b, at, _ in wanted if b == BlockId(int(block))}


def test_what_the_plan_does_not_have_is_refused_at_the_replica(nodes: dict[str, Datanode]) -> None:
    container_id = CONTAINERS[-1]
    node = nodes["dn1"]
    path = container_folder(node.held.volume.root, container_id) / "chunks" / "1.block"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    scan_replica(node, container_id)
    made = plan(nodes, "dn1", container_id)
    guarded = PlannedReplica(made, access(node, container_id))
    record = guarded.records([BlockId(1)])[BlockId(1)]
    chunk, good = record.chunks[0], nodes["dn2"].store
    whole = good.read(made.container_id, BlockId(1), 0, chunk.length_bytes)
    runs = prove(chunk, 0, whole)
    with pytest.raises(PlanChangedError, match="not in the plan"):
        guarded.write_windows(BlockId(1), chunk, runs)
    with pytest.raises(PlanChangedError, match="not in the plan"):
        guarded.write_windows(BlockId(2), chunk, prove(chunk, 0, whole[:1024]))
    with pytest.raises(PlanChangedError, match="not that of the plan"):
        guarded.put_block(replace(record, bcs_id=99))
    with pytest.raises(PlanChangedError, match="above"):
        guarded.advance_bcs_id(99)
    other = replace(made, own_records={BlockId(1): "0" * 32})
    with pytest.raises(PlanChangedError, match="has changed"):
        PlannedReplica(other, access(node, container_id)).records([BlockId(1)])
    assert path.read_bytes() == data
    planned = prove(chunk, 0, whole[:1024])
    assert guarded.write_windows(BlockId(1), chunk, planned) == (0,)
