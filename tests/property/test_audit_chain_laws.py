"""No change of an audit file passes: whatever is edited, a check names it (R-chain)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.audit_check import AuditFault, check_chain
from runtime.disk import Disk
from tests.support.audit_files import check_folder, write_lines

LENGTH = 6


@pytest.fixture(scope="module")
def whole() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "audit.jsonl"
        write_lines(path, *(f"name {number}" for number in range(LENGTH)))
        yield path.read_bytes()


def fault(data: bytes, known_head: str = "") -> AuditFault | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "audit.jsonl"
        path.write_bytes(data)
        broken = check_chain([path], Disk(), known_head=known_head).broken
        return broken.fault if broken else None


@given(st.data())
def test_any_edit_of_any_bytes_is_found(whole: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start, min(len(whole), start + 200)))
    edited = whole[:start] + data.draw(st.binary(max_size=20)) + whole[stop:]
    # A cut at the end of a line leaves a shorter chain: the next test is about it.
    is_cut = whole.startswith(edited) and edited.endswith(b"\n")
    if edited != whole and edited and not is_cut:
        assert fault(edited) is not None


@given(st.data())
def test_what_was_done_to_whole_lines_is_named(whole: bytes, data: st.DataObject) -> None:
    lines = whole.splitlines(keepends=True)
    one = data.draw(st.integers(0, LENGTH - 2))
    other = data.draw(st.integers(one + 1, LENGTH - 1))
    removed = [line for number, line in enumerate(lines) if number != one]
    assert fault(b"".join(removed)) is AuditFault.REMOVED
    swapped = list(lines)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    assert fault(b"".join(swapped)) is AuditFault.REORDERED
    again = [*lines[: other + 1], lines[one], *lines[other + 1 :]]
    assert fault(b"".join(again)) is AuditFault.INSERTED
    foreign = [*lines[:other], b'{"kind": "foreign"}\n', *lines[other:]]
    assert fault(b"".join(foreign)) is AuditFault.INSERTED


@given(st.integers(0, LENGTH - 1))
def test_a_missing_end_shows_with_the_known_head_only(whole: bytes, kept: int) -> None:
    lines = whole.splitlines(keepends=True)
    head = lines[-1][-67:-3].decode()
    assert fault(whole, head) is None
    cut = b"".join(lines[:kept])
    assert fault(cut) is None
    assert fault(cut, head) is AuditFault.TRUNCATED


@given(st.lists(st.lists(st.text(max_size=40), max_size=5), max_size=4), st.integers(1, 2000))
def test_however_it_is_written_the_chain_holds(starts: list[list[str]], size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "audit.jsonl"
        write_lines(path)
        for names in starts:
            write_lines(path, *names, file_bytes_max=size)
        report = check_folder(path.parent)
        assert (report.lines, report.broken) == (sum(map(len, starts)), None)
