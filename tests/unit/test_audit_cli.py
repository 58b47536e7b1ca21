"""`treefold audit`: what a check says of sound and broken files, and the lines by
container, job and requester.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from repair.audit import AuditLog
from tests.support.audit_files import audit_lines


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(treefold, ["audit", *map(str, arguments)])


def data(result: Result) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(result.stdout)["data"]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    audit = AuditLog(tmp_path / "audit.jsonl", file_bytes_max=500)
    for container, job, who in ((1, "a", "alice"), (1, "a.2", "alice"), (2, "b", "bob")):
        audit.begin("reconcile", container=container, job=job, who=who, why="ticket", root=7)
        audit.write(container=container, block=1 << 60, offset=0, length=9, source="dn-2", job=job)
    audit.refused(who="mallory", what="Reconcile", why="not an operator")
    audit.close()
    return tmp_path


def test_sound_files_are_said_to_be_so_with_their_head(folder: Path) -> None:
    result = run("verify", folder, "--json")
    assert result.exit_code == 0
    [chain] = data(result)["chains"]
    assert (chain["valid"], chain["lines"], chain["broken"]) == (True, 7, None)
    last = audit_lines(folder / "audit.jsonl")[-1]
    assert chain["head"] == last["hash"]
    assert "missing at the end shows with --head only" in run("verify", folder).stdout
    assert "lines after it: 0" in run("verify", folder, "--head", str(last["hash"])).stdout


def test_of_a_chain_without_a_line_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").touch()
    result = run("verify", tmp_path, "--json")
    assert result.exit_code == 1
    assert "audit_empty" in result.stdout
    assert data(result)["chains"] == [
        {**data(result)["chains"][0], "valid": None, "lines": 0, "head": None}
    ]
    shown = run("verify", tmp_path)
    assert (shown.exit_code, "all lines hold" in shown.stdout) == (1, False)


def test_the_first_line_that_breaks_is_named(folder: Path) -> None:
    path = folder / "audit.jsonl"
    head = str(audit_lines(path)[-1]["hash"])
    path.write_text(path.read_text().replace("mallory", "nobody!"))
    result = run("verify", folder, "--json")
    assert result.exit_code == 3
    [chain] = data(result)["chains"]
    broken = chain["broken"]
    assert isinstance(broken, dict)
    assert (broken["file"], broken["fault"]) == (str(path), "changed")
    assert f"line {broken['line']}" in run("verify", folder).stdout
    path.unlink()
    assert run("verify", folder).exit_code == 0
    assert run("verify", folder, "--head", head).exit_code == 3


def test_a_head_that_is_no_hash_is_a_usage_error(folder: Path) -> None:
    assert run("verify", folder, "--head", "abc").exit_code == 2
    other = AuditLog(folder / "other.jsonl")
    other.close()
    assert run("verify", folder, "--head", "0" * 64).exit_code == 2


def test_lines_are_found_by_container_job_and_requester(folder: Path) -> None:
    def found(*options: str) -> list[tuple[object, object]]:
        lines = data(run("tail", folder, "--json", *options))["lines"]
        return [(line["kind"], line.get("job")) for line in lines]

    of_a = [(kind, job) for job in ("a", "a.2") for kind in ("reconcile", "write")]
    assert found("--container", "1") == of_a
    assert found("--job", "a") == of_a
    assert found("--who", "bob") == [("reconcile", "b")]
    assert found("--limit", "1") == [("refused", None)]
    assert "not an operator" in run("tail", folder).stdout


@pytest.mark.parametrize(("words", "status"), [((), 1), (("--head", "a" * 64), 3)])
def test_where_no_audit_file_is_nothing_is_known(
    tmp_path: Path, words: tuple[str, ...], status: int
) -> None:
    """With a known head all of the chain is missing."""
    done = CliRunner().invoke(treefold, ["audit", "verify", str(tmp_path), *words, "--json"])
    assert (done.exit_code, '"audit_not_found"' in done.stdout) == (status, True)
