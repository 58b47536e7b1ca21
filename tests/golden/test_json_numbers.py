"""No number that a command prints as JSON loses digits in a reader that keeps 53 bits:
the block IDs of real datanodes do.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from runtime.json_numbers import EXACT_MAX
from tests.support.volumes import unpack


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The damaged replicas of three datanodes."""
    folder = unpack("damaged", tmp_path_factory.mktemp("volumes"))
    return [folder / node / "volume1" for node in ("dn1", "dn2", "dn3")]


def printed(*words: object) -> list[object]:
    """The JSON documents that a command prints."""
    result = CliRunner().invoke(treefold, [str(word) for word in words])
    assert result.exit_code in (0, 3, 4, 5), result.output
    return [json.loads(line, parse_int=exact_int) for line in result.stdout.splitlines()]


def exact_int(digits: str) -> int:
    number = int(digits)
    assert abs(number) <= EXACT_MAX, f"{digits} is rounded by many readers"
    return number


def block_ids(value: object) -> set[str]:
    """All block IDs in a document; each must be text."""
    if isinstance(value, list):
        return set[str]().union(*map(block_ids, value))
    if not isinstance(value, dict):
        return set()
    found = set[str]().union(*map(block_ids, value.values()))
    if (block_id := value.get("blockID")) is not None:
        assert isinstance(block_id, str)
        found.add(block_id)
    return found


@pytest.mark.parametrize("command", ["build", "show", "diff"])
def test_of_trees(command: str, volumes: list[Path]) -> None:
    given = volumes if command == "diff" else volumes[:1]
    documents = printed("tree", command, *given, "--json")
    assert any(int(block_id) > EXACT_MAX for block_id in block_ids(documents))


def test_of_a_sweep(volumes: list[Path], tmp_path: Path) -> None:
    given = [word for volume in volumes for word in ("--volume", volume)]
    printed("sweep", "run", *given, "--source", "data", "--out", tmp_path, "--json")
    documents = printed("sweep", "show", "latest", "--out", tmp_path, "--json")
    assert any(int(block_id) > EXACT_MAX for block_id in block_ids(documents))
