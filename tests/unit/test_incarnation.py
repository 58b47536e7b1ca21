"""Each start of an agent has a higher number than all before."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnagent.incarnation import next_incarnation
from runtime.disk import Disk
from runtime.errors import DiskError


@given(st.lists(st.integers(0, 100), max_size=10))
def test_numbers_rise_whatever_the_clock_does(times_ms: list[int]) -> None:
    last = 0
    with TemporaryDirectory() as folder:
        for now_ms in times_ms:
            number = next_incarnation(Path(folder), Disk(), now_ms)
            assert number > last
            assert number >= now_ms
            last = number
        # With the clock set right again, it is the time.
        assert next_incarnation(Path(folder), Disk(), 1_000) == 1_000


@pytest.mark.parametrize("text", ["", "x", "9" * 19, "-5", "\xff"])
def test_a_number_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "incarnation").write_text(text, encoding="latin-1")
    assert next_incarnation(tmp_path, Disk(), 7) == 7
    assert (tmp_path / "incarnation").read_text() == "7"


def test_a_number_that_cannot_be_stored_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError):
        next_incarnation(tmp_path / "gone", Disk(), 7)
