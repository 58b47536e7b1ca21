"""The demo says what a sweep missed, made up, or called by another verdict."""

from dataclasses import replace
from pathlib import Path

import pytest

from admin.demo.ground_truth import DamageKind, GroundTruth
from admin.demo.sweep_demo import EngineResult, mistakes
from admin.demo.synthetic import SyntheticCluster, synthetic
from tests.support.sweeps import run


@pytest.fixture
def told(tmp_path: Path) -> tuple[GroundTruth, EngineResult]:
    """A truth, and a sweep that found all of it."""
    truth = synthetic(
        tmp_path / "table",
        SyntheticCluster(containers=30, chunks=2, damage={DamageKind.MISSING_BLOCK: 0.1}),
    )
    summary = run(tmp_path / "out", tmp_path / "table")
    found = frozenset(damage.finding for damage in truth.damages)
    verdicts = frozenset(
        (damage.container_id, damage.verdict.value, 3, 0) for damage in truth.damages
    )
    return truth, EngineResult(summary, tmp_path / "report.html", found, verdicts, frozenset())


def test_all_found_is_no_mistake(told: tuple[GroundTruth, EngineResult]) -> None:
    assert mistakes(told[0], {"one": told[1]}) == []


def test_what_was_missed_or_made_up_is_named(told: tuple[GroundTruth, EngineResult]) -> None:
    truth, swept = told
    gone = truth.damages[0]
    made_up = ("missing_chunk", 1, 2, 3, (), ())
    other = replace(swept, found=swept.found - {gone.finding} | {made_up}, verdicts=frozenset())
    text = mistakes(truth, {"one": swept, "other": other})
    assert (
        f"other: not found: missing_block in container {gone.container_id}, block {gone.block_id}"
        in text
    )
    assert "other: found, but not done: missing_chunk in container 1, block 2, offset 3" in text
    assert f"other: container {gone.container_id} is not REPAIRABLE" in text
    assert "one and other differ in 2 findings" in text
