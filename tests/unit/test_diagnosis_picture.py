"""The picture of a diagnosis: replicas, blocks and windows, all inside of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from admin.cli import treefold
from admin.diagnosis_picture import DrawnDiagnosis, draw_diagnoses, drawn_diagnosis
from merkle.tree import BlockId
from repair.picture import BlockCell
from repair.svg_picture import WIDTH
from tests.support.live_twin import LiveTwin, live_twin
from tests.support.peers import CHUNK_BYTES, WINDOW_BYTES

SVG = "{http://www.w3.org/2000/svg}"
NAMES = st.text("0123456789abcdef (host)<&>", min_size=1, max_size=30)
WINDOWS = st.sampled_from([BlockCell.HEALTHY, BlockCell.CORRUPT, BlockCell.MISSING])


def rows(
    cells: st.SearchStrategy[BlockCell], most: int
) -> st.SearchStrategy[Mapping[str, Sequence[BlockCell]]]:
    return st.dictionaries(NAMES, st.lists(cells, max_size=most), max_size=4)


DRAWN = st.lists(
    st.builds(
        DrawnDiagnosis,
        st.integers(1, 10**9).map("container {}: REPAIRABLE".format),
        st.sampled_from(["", "datanode 1 did not answer <&>", "x" * 150]),
        rows(st.sampled_from(BlockCell), 34),
        st.lists(st.tuples(st.just("block 1, chunk at 0: 9 windows"), rows(WINDOWS, 100))).map(
            tuple
        ),
    ),
    max_size=4,
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveTwin]:
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(tmp_path / "client.toml"))
    with live_twin() as found:
        yield found


def texts(drawn: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


@settings(max_examples=30, deadline=None)
@given(DRAWN)
def test_everything_is_inside_of_the_picture(containers: list[DrawnDiagnosis]) -> None:
    """Law: whatever is drawn, it is well formed, and nothing is cut off."""
    root = ElementTree.fromstring(draw_diagnoses("title <&>", "subtitle", containers))
    _, _, width, height = map(int, root.attrib["viewBox"].split())
    assert width == WIDTH
    for element in root.iter():
        if element.tag in (f"{SVG}rect", f"{SVG}text"):
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            letters = 0 if element.get("text-anchor") else 7.4 * len(element.text or "")
            wide = float(element.get("width", 0)) or (letters if element.tag == f"{SVG}text" else 0)
            assert x + wide <= width, ElementTree.tostring(element)
            assert 0 <= y + float(element.get("height", 0)) <= height


def test_the_windows_of_a_damaged_chunk_are_those_that_do_not_match(cluster: LiveTwin) -> None:
    first, second, _ = cluster.add(1, {20: 2 * CHUNK_BYTES, 21: 5_000})
    first.flip(20, CHUNK_BYTES + 2 * WINDOW_BYTES)
    del second.files[BlockId(21)]
    drawn = drawn_diagnosis(cluster.diagnose(deep=True)[1])
    assert drawn.heading == "container 1: REPAIRABLE"
    good, bad, lost = BlockCell.HEALTHY, BlockCell.CORRUPT, BlockCell.MISSING
    assert dict(drawn.chunks) == {
        f"block 20, chunk at {CHUNK_BYTES}: 4 windows": {
            "1fffffff (host1)": [good, good, bad, good],
            "2fffffff (host2)": [good] * 4,
            "3fffffff (host3)": [good] * 4,
        },
        "block 21, chunk at 0: 2 windows": {
            "1fffffff (host1)": [good] * 2,
            "2fffffff (host2)": [lost] * 2,
            "3fffffff (host3)": [good] * 2,
        },
    }
    assert drawn.blocks["1fffffff (host1)"] == [bad, good]


def test_a_diagnosis_writes_its_picture(cluster: LiveTwin, tmp_path: Path) -> None:
    """Of equal containers it shows their number, of others their replicas; a replica
    that was not read says so.
    """
    cluster.add(1)
    cluster.add(2)[0].flip(20, 100)
    cluster.add(3, replicas=3)
    cluster.scm.replicas[3] = cluster.scm.replicas[3][:2]
    path = tmp_path / "found.svg"
    words = ["diagnose", "--cluster", cluster.address, "--deep", "--svg", str(path)]
    assert CliRunner().invoke(treefold, words).exit_code == 3
    found = texts(path.read_text())
    assert "container 2: REPAIRABLE" in found
    assert any(one.startswith("container 3: UNKNOWN") for one in found)
    assert not any(one.startswith("container 1:") for one in found)
    assert any("3 containers" in one for one in found)
    cluster.stop(3)
    assert CliRunner().invoke(treefold, words).exit_code == 3
    assert "3fffffff (host3): not read" in texts(path.read_text())
