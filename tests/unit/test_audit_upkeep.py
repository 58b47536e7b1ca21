"""What happens to an audit file while its process runs: counts of refusals are written
without another refusal, and a chain that somebody breaks is called broken.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime.audit_chain import AuditFile
from runtime.audit_check import check_tail
from runtime.audit_upkeep import AUDIT_FAULTS, AuditUpkeep
from runtime.disk import Operation
from runtime.metrics import Metrics
from runtime.thread_health import ThreadHealth
from scm.metrics import CONTROLLER_METRICS, PROCESS
from tests.support.audit_files import audit_lines, check_folder
from tests.support.disk import FailingDisk
from tests.support.waiting import wait_until


@dataclass
class Rig:
    """An audit file with its upkeep, on a clock that a test sets."""

    path: Path
    now_s: float = 0.0
    is_full: bool = False
    metrics: Metrics = field(default_factory=lambda: Metrics(CONTROLLER_METRICS))

    def __post_init__(self) -> None:
        disk = FailingDisk(
            errno.ENOSPC, lambda operation, _: self.is_full and operation is Operation.WRITE
        )
        self.audit = AuditFile(self.path, disk=disk, monotonic_s=lambda: self.now_s)

    @contextmanager
    def running(self) -> Iterator[None]:
        upkeep = AuditUpkeep(
            self.audit,
            self.metrics,
            PROCESS,
            ThreadHealth(),
            look_every_s=0.002,
            monotonic_s=lambda: self.now_s,
        )
        try:
            yield
        finally:
            upkeep.stop()

    def next_check(self) -> float:
        """Whether the next check finds a fault of the chain."""
        self.metrics.set(PROCESS.audit_fault, -1, fault="chain")
        self.now_s += 3600
        wait_until(lambda: self.metrics.value(PROCESS.audit_fault, fault="chain") >= 0, "a check")
        return self.metrics.value(PROCESS.audit_fault, fault="chain")

    def refuse(self) -> None:
        self.audit.refused(who="dn-1", what="Reconcile", why="not an operator")

    def wait_for(self, **faults: int) -> None:
        def are_there() -> bool:
            found = {
                fault: self.metrics.value(PROCESS.audit_fault, fault=fault)
                for fault in AUDIT_FAULTS
            }
            return found == {fault: float(faults.get(fault, 0)) for fault in AUDIT_FAULTS}

        wait_until(are_there, f"the faults {faults}")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "audit.jsonl")
    yield made
    made.audit.close()


def test_counts_are_on_disk_within_a_minute_without_another_refusal(rig: Rig) -> None:
    """What is there when the process is killed then has lost none."""
    for _ in range(5):
        rig.refuse()
    with rig.running():
        rig.wait_for()
        assert [line.get("repeated") for line in audit_lines(rig.path)] == [None]
        rig.now_s = 50.0
        wait_until(lambda: len(audit_lines(rig.path)) == 2, "the counts")
    assert [line.get("repeated") for line in audit_lines(rig.path)] == [None, 4]
    assert check_folder(rig.path.parent).broken is None


def test_what_is_not_due_is_not_written(rig: Rig) -> None:
    rig.now_s = 30.0
    rig.refuse()
    rig.refuse()
    rig.now_s = 44.9
    rig.audit.write_counts()
    assert len(audit_lines(rig.path)) == 1
    # Nothing was counted: there is no line of it.
    rig.now_s = 45.0
    rig.audit.write_counts()
    rig.now_s = 99.0
    rig.audit.write_counts()
    assert [line.get("repeated") for line in audit_lines(rig.path)] == [None, 1]


def test_a_line_that_cannot_be_written_is_a_fault_until_one_can(rig: Rig) -> None:
    rig.refuse()
    rig.refuse()
    rig.is_full, rig.now_s = True, 50.0
    with rig.running():
        rig.wait_for(write=1)
        rig.is_full = False
        rig.wait_for()
    assert [line.get("repeated") for line in audit_lines(rig.path)] == [None, 1]


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"second", b"sacond"))


def cut_off(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    os.truncate(path, len(lines[0]))


@pytest.mark.parametrize("tamper", [changed, cut_off, Path.unlink])
def test_a_chain_that_somebody_breaks_below_the_process_is_a_fault(
    rig: Rig, tamper: Callable[[Path], None]
) -> None:
    rig.audit.append([{"kind": "first"}, {"kind": "second"}])
    with rig.running():
        assert rig.next_check() == 0
        tamper(rig.path)
        assert rig.next_check() == 1


def test_a_broken_file_that_was_moved_away_is_no_fault_for_ever(rig: Rig) -> None:
    rig.audit.append([{"kind": "first"}, {"kind": "second"}])
    changed(rig.path)
    with rig.running():
        assert rig.next_check() == 1
        rig.path.rename(rig.path.with_name("broken.jsonl"))
        rig.audit.append([{"kind": "third"}])
        assert [rig.next_check(), rig.next_check()] == [1, 0]


def test_a_file_that_is_gone_is_a_fault_until_a_line_begins_another(rig: Rig) -> None:
    rig.audit.append([{"kind": "first"}])
    with rig.running():
        rig.path.unlink()
        assert [rig.next_check(), rig.next_check()] == [1, 1]
        rig.audit.append([{"kind": "second"}])
        assert [rig.next_check(), rig.next_check()] == [1, 0]


def test_lines_from_before_there_was_a_chain_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"kind": "old"}\n{"kind": "older"}\n')
    audit = AuditFile(path)
    assert check_tail(audit.tail()).broken is None
    audit.append([{"kind": "first of the chain"}])
    assert check_tail(audit.tail()).broken is None
    audit.close()


def test_full_files_hold_whether_or_not_older_ones_were_archived(tmp_path: Path) -> None:
    audit = AuditFile(tmp_path / "audit.jsonl", file_bytes_max=300)
    for number in range(12):
        audit.append([{"kind": f"line {number}"}])
    metrics = Metrics(CONTROLLER_METRICS)
    health = ThreadHealth()
    for removed in (0, 1, 1):
        for path in sorted(tmp_path.glob("audit-*.jsonl"))[:removed]:
            path.unlink()
        metrics.set(PROCESS.audit_fault, 2, fault="chain")
        upkeep = AuditUpkeep(audit, metrics, PROCESS, health)
        upkeep.stop()
        assert metrics.value(PROCESS.audit_fault, fault="chain") == 0
    audit.close()


def test_texts_from_outside_are_bounded_and_do_not_reach_a_terminal(rig: Rig) -> None:
    rig.audit.refused(who="\x1b[2Jalice", what="a\nb", why="é\udc80" + "x" * 5000)
    [line] = audit_lines(rig.path)
    assert (line["who"], line["what"]) == ("\\x1b[2Jalice", "a\\nb")
    assert line["why"] == "é\\udc80" + "x" * 1022 + "..."
