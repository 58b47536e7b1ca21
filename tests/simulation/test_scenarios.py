"""Scenarios chosen by hand, and what a failing one prints."""

from collections.abc import Iterator

import pytest

from merkle.outcome import Verdict
from runtime.log import LogLevel, configure
from scm.jobs import JobState
from tests.support.cluster_control import Parts
from tests.support.observer import ViolationError
from tests.support.peers import Evil
from tests.support.planted_bugs import BUGS
from tests.support.scenario import Scenario
from tests.support.simulation import simulate
from tests.support.trace import REPORT_LINES_MAX

# The planted bugs here show within a few seeds; `test_reconcile_simulation` hunts the
# rare ones.
SEEDS_TO_FAIL = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Crashes are part of a scenario, and no warning is due."""
    configure(level=LogLevel.ERROR)
    yield
    configure()


def test_a_lost_block_comes_back_past_a_liar_and_a_crash() -> None:
    scenario = Scenario(blocks={10: 64, 20: 48}, lies={"dn3": Evil.BAD_BYTES})
    dn1, dn2, _ = scenario.datanodes
    dn1.flip_bit(10, offset=5)
    dn2.lose_block(20)
    scenario.scan()
    scenario.start_job()
    dn2.crash()
    job = scenario.finish_job()
    assert (job.state, job.verdict) == (JobState.DONE, Verdict.REPAIRABLE)
    assert dn1.is_whole(10)
    assert dn2.is_whole(20)
    scenario.heal()


def test_a_block_that_one_datanode_deleted_is_deleted_by_all() -> None:
    scenario = Scenario(blocks={10: 64, 20: 48})
    dn1, dn2, dn3 = scenario.datanodes
    dn1.delete_block(20)
    dn2.lose_file(20)
    scenario.scan()
    scenario.run_job()
    assert all(datanode.is_deleted(20) for datanode in (dn1, dn2, dn3))


def test_a_block_damaged_everywhere_is_put_together_from_pieces() -> None:
    scenario = Scenario(blocks={10: 64})
    dn1, dn2, dn3 = scenario.datanodes
    dn1.flip_bit(10, offset=5)
    dn2.truncate(10, offset=40)
    dn3.lose_record(10)
    dn3.lose_tree()
    scenario.scan()
    scenario.start_job()
    scenario.crash_controller()
    assert scenario.finish_job().state is JobState.DONE
    scenario.heal()
    assert all(datanode.is_whole(10) for datanode in (dn1, dn2, dn3))


def test_a_block_whose_delete_was_only_recorded_takes_no_byte_and_holds_up_no_commit() -> None:
    """inv-I5, inv-I7: our tree and all others still have the block as a live one."""
    scenario = Scenario(blocks={10: 64, 20: 48, 30: 32})
    dn1, dn2, dn3 = scenario.datanodes
    dn1.lose_block(30)
    dn1.lose_commit(2)
    dn1.flip_bit(20, offset=5)
    scenario.scan()
    dn1.die_deleting(20)
    job = scenario.run_job()
    assert (job.state, job.verdict) == (JobState.DONE, Verdict.UNKNOWN)
    assert scenario.cluster.world.marks["repair met a deleted block"]
    assert not dn1.is_whole(20)
    assert not dn1.is_deleted(20)
    assert dn1.is_whole(30)
    assert dn1.commit == 3
    dn2.delete_block(20)
    assert scenario.run_job().state is JobState.DONE
    assert all(datanode.is_deleted(20) for datanode in (dn1, dn2, dn3))
    scenario.heal()


def test_a_scenario_reads_as_what_happened() -> None:
    scenario = Scenario(blocks={20: 32}, lies={"dn1": Evil.BAD_BYTES})
    _, dn2, _ = scenario.datanodes
    dn2.flip_bit(20, offset=3)
    scenario.scan()
    scenario.run_job()
    expected = (
        "dn1, dn2, dn3 hold container 7 (blocks 20); jobs are asked for",
        "dn1 lies: bad_bytes",
        "dn2 flips a bit of block 20 at 3",
        "dn2 reads window 0 of block 20 at 0 from dn1: lie",
        "dn2 writes window 0 of block 20 at 0, read from dn3",
        "job1 ends DONE: REPAIRABLE",
    )
    printed = "\n".join(scenario.lines())
    positions = [printed.find(text) for text in expected]
    assert -1 not in positions, printed
    assert positions == sorted(positions), printed


def test_a_violation_names_its_invariant_and_the_damage_in_a_few_lines() -> None:
    scenario = Scenario(blocks={10: 64, 20: 48}, parts=BUGS["_WritesGoodWindowsToo"])
    _, dn2, _ = scenario.datanodes
    dn2.flip_bit(20, offset=5)
    scenario.scan()
    with pytest.raises(ViolationError) as caught:
        scenario.run_job()
    lines = str(caught.value).splitlines()
    assert lines[0] == "inv-I4: good window at 16 of block 20 overwritten"
    at = lines.index("initial damage:")
    assert lines[at + 1 : at + 3] == ["  dn2 flips a bit of block 20 at 5", "events:"]
    assert " dn2 writes windows 0-1 of block 20 at 0, read from " in lines[-2]
    assert len(lines) <= REPORT_LINES_MAX


@pytest.mark.parametrize("bug", ["_believe", "_IgnoresGaps", "_TakesTheCommitOfWhatItLacks"])
def test_a_failing_seed_prints_a_short_scenario(bug: str) -> None:
    violation, seed = _first_violation(BUGS[bug])
    lines = str(violation).splitlines()
    assert lines[0].startswith(f"{violation.invariant}: ")
    assert lines[1] == f"seed {seed}:"
    block = f"block {violation.subject.block_id}"
    damage = lines[lines.index("initial damage:") + 1 : lines.index("events:")]
    assert damage
    assert all(block in line or "tree" in line for line in damage)
    assert block in lines[-2], "the last event is the write that broke the invariant"
    assert len(lines) <= REPORT_LINES_MAX


def _first_violation(parts: Parts) -> tuple[ViolationError, int]:
    """The first that begins with damage: lies alone may suffice."""
    for seed in range(SEEDS_TO_FAIL):
        try:
            simulate(seed, parts=parts)
        except ViolationError as violation:
            if "initial damage:" in violation.scenario:
                return violation, seed
    raise AssertionError(f"no violation within {SEEDS_TO_FAIL} seeds")
