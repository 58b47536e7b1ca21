"""The audit file is one chain over restarts, full files and crashes; whoever moves it,
damages it or fills its disk does not end it.
"""

import errno
import os
from pathlib import Path

import pytest

from runtime.audit_chain import AuditFile
from runtime.audit_check import AuditFault
from runtime.disk import Operation
from runtime.errors import BusyError, DiskError
from tests.support.audit_files import audit_lines, check_folder, write_lines
from tests.support.disk import FailingDisk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def names(path: Path) -> list[object]:
    return [line.get("name") or line.get("kind") for line in audit_lines(path)]


def test_the_chain_goes_on_over_restarts_and_full_files(path: Path) -> None:
    for start in range(3):
        write_lines(path, *(f"{start}-{number}" for number in range(4)), file_bytes_max=600)
    report = check_folder(path.parent)
    assert (report.lines, report.broken) == (12, None)
    assert len(report.files) > 2
    assert [name for file in report.files for name in names(file)] == [
        f"{start}-{number}" for start in range(3) for number in range(4)
    ]


def test_a_torn_last_line_is_cut_off_and_the_chain_says_so(path: Path) -> None:
    write_lines(path, "one", "two")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time": "2026')
    broken = check_folder(path.parent).broken
    assert broken is not None
    assert broken.fault is AuditFault.TORN
    write_lines(path, "three")
    assert names(path) == ["one", "two", "cut", "three"]
    assert audit_lines(path)[2]["bytes"] == 14
    assert path.read_bytes().startswith(whole)
    assert check_folder(path.parent).broken is None


def test_a_long_torn_line_is_written_over_and_leaves_nothing(path: Path) -> None:
    write_lines(path, "one")
    path.write_bytes(path.read_bytes() + b"x" * 5000)
    write_lines(path, "two")
    assert names(path) == ["one", "cut", "two"]
    assert check_folder(path.parent).broken is None


def test_a_file_from_before_the_chain_is_covered_by_its_first_line(path: Path) -> None:
    path.write_text('{"kind": "write", "container": 1}\n{"kind": "write", "container": 2}\n')
    write_lines(path, "one")
    report = check_folder(path.parent)
    assert (report.broken, report.unchained, report.lines) == (None, 2, 1)
    path.write_text(path.read_text().replace('"container": 2', '"container": 3'))
    assert check_folder(path.parent).broken is not None


def test_a_damaged_line_is_named_alone_also_when_a_process_went_on_after_it(path: Path) -> None:
    write_lines(path, "one", "two")
    path.write_text(path.read_text().replace("two", "TWO"))
    write_lines(path, "three")
    broken = check_folder(path.parent).broken
    assert broken is not None
    assert (broken.line, broken.fault) == (2, AuditFault.CHANGED)
    assert [line["seq"] for line in audit_lines(path)] == [0, 1, 2]


def test_a_file_that_was_moved_away_is_continued_in_a_new_one(path: Path) -> None:
    audit = AuditFile(path)
    audit.append([{"name": "one"}])
    path.rename(path.with_name("audit-000000000000.jsonl"))
    audit.append([{"name": "two"}])
    audit.close()
    assert names(path) == ["two"]
    report = check_folder(path.parent)
    assert (report.lines, report.broken) == (2, None)


def test_archived_files_are_answered_for_by_the_hash_of_their_last_line(path: Path) -> None:
    write_lines(path, "one")
    head = check_folder(path.parent).head
    path.rename(path.with_name("audit-000000000000.jsonl"))
    write_lines(path, "two")
    path.with_name("audit-000000000000.jsonl").unlink()
    broken = check_folder(path.parent).broken
    assert broken is not None
    assert broken.fault is AuditFault.REMOVED
    assert check_folder(path.parent, after=head).broken is None
    assert check_folder(path.parent, after="0" * 64).broken is not None


def test_a_second_process_is_refused_by_name(path: Path) -> None:
    audit = AuditFile(path)
    with pytest.raises(BusyError, match=f"in use by process {os.getpid()}"):
        AuditFile(path)
    audit.close()
    write_lines(path, "one")


def test_a_write_that_failed_leaves_a_chain_that_goes_on(path: Path) -> None:
    is_full = False
    disk = FailingDisk(errno.ENOSPC, lambda operation, _: is_full and operation is Operation.WRITE)
    audit = AuditFile(path, disk=disk)
    audit.append([{"name": "one"}])
    is_full = True
    with pytest.raises(DiskError, match="No space left"):
        audit.append([{"name": "lost"}])
    is_full = False
    # What a full disk may leave of the line.
    with path.open("ab") as file:
        file.write(b'{"time"')
    audit.append([{"name": "two"}])
    audit.close()
    assert names(path) == ["one", "cut", "two"]
    assert check_folder(path.parent).broken is None


def test_after_a_failed_sync_nothing_is_recorded_until_the_next_start(path: Path) -> None:
    fails = False
    disk = FailingDisk(errno.EIO, lambda operation, _: fails and operation is Operation.SYNC)
    audit = AuditFile(path, disk=disk)
    audit.append([{"name": "one"}])
    fails = True
    for _ in range(2):
        with pytest.raises(DiskError, match="cannot be written"):
            audit.append([{"name": "unknown"}])
        fails = False
    audit.close()
    write_lines(path, "two")
    assert check_folder(path.parent).broken is None


def test_a_refusal_that_repeats_is_counted_and_never_fills_the_disk(path: Path) -> None:
    now_s = 0.0
    audit = AuditFile(path, monotonic_s=lambda: now_s)
    for _ in range(5):
        audit.refused(who="dn-1", what="Reconcile", why="not an operator")
    audit.refused(who="dn-2", what="Reconcile", why="not an operator")
    now_s = 61.0
    audit.refused(who="dn-1", what="Reconcile", why="not an operator")
    for number in range(1100):
        audit.refused(who="dn-3", what="Heartbeat", why=f"is not x{number}")
    audit.refused(who="dn-4", what="Reconcile", why="not an operator")
    audit.close()
    found = [(line["who"], line.get("repeated")) for line in audit_lines(path)]
    assert found[:4] == [("dn-1", None), ("dn-2", None), ("dn-1", 4), ("dn-1", None)]
    # One that finds ever new reasons keeps nobody else off the record.
    assert found[4:] == [("dn-3", None)] * 20 + [("dn-4", None), ("dn-3", 1080)]


def test_of_ever_more_callers_a_thousand_have_lines(path: Path) -> None:
    audit = AuditFile(path)
    for number in range(2100):
        audit.refused(who=f"x{number}", what="Reconcile", why="not an operator")
    audit.close()
    found = [(line["who"], line.get("repeated")) for line in audit_lines(path)]
    assert len(found) == 1000 + 1000 + 1
    assert found[-1] == ("", 100)


def test_a_refusal_that_could_not_be_written_is_written_when_it_comes_again(path: Path) -> None:
    is_full, now_s = False, 0.0
    disk = FailingDisk(errno.ENOSPC, lambda operation, _: is_full and operation is Operation.WRITE)
    audit = AuditFile(path, disk=disk, monotonic_s=lambda: now_s)
    is_full = True
    with pytest.raises(DiskError):
        audit.refused(who="dn-1", what="Reconcile", why="why")
    is_full = False
    for _ in range(3):
        audit.refused(who="dn-1", what="Reconcile", why="why")
    now_s, is_full = 61.0, True
    with pytest.raises(DiskError):
        audit.refused(who="dn-2", what="Reconcile", why="why")
    is_full = False
    audit.refused(who="dn-2", what="Reconcile", why="why")
    audit.close()
    found = [(line["who"], line.get("repeated")) for line in audit_lines(path)]
    assert found == [("dn-1", None), ("dn-1", 2), ("dn-2", None)]
