"""JSON and TOML of others are read within limits: no text ends in a RecursionError."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from admin.cli import treefold
from runtime.config import Settings, load
from runtime.documents import parse_json, parse_toml
from runtime.errors import ConfigError
from tests.support.audit_files import signed_line

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@given(VALUES)
def test_what_is_json_is_read_as_it_was_written(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value


@given(st.integers(0, 100_000), st.booleans())
def test_a_text_is_read_up_to_a_depth_and_refused_below_it(depth: int, objects: bool) -> None:
    text = '{"a":' * depth + "1" + "}" * depth if objects else "[" * depth + "]" * depth
    if depth and depth <= 100:
        assert parse_json(text)
    elif depth:
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            parse_json(text)


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e999", '{"a": Infinity}', "9" * 5000, "\xff"]
)
def test_a_number_that_json_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize("depth", [101, 900, 5000])
def test_toml_is_read_up_to_a_depth(tmp_path: Path, depth: int) -> None:
    texts = ["a = " + "[" * depth + "]" * depth, ".".join(["a"] * depth) + " = 1"]
    for text in texts:
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            parse_toml(text.encode())
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.toml: not TOML: "):
            load(tmp_path / "config.toml", Settings)


@pytest.mark.parametrize("depth", [101, 400, 980, 100_000])
def test_an_audit_line_that_is_nested_too_deep_is_counted_and_broken(
    tmp_path: Path, depth: int
) -> None:
    path = tmp_path / "audit.jsonl"
    deep = "[" * depth + "]" * depth
    path.write_bytes(signed_line(0, f'{{"time": "t", "kind": "write", "deep": {deep}'))
    for words in (["--json"], []):
        shown = CliRunner().invoke(treefold, ["audit", "tail", str(path), *words])
        assert shown.exit_code == 0
        assert f"1 line is not shown, the first is line 1 of {path}" in shown.output
    checked = CliRunner().invoke(treefold, ["audit", "verify", str(path), "--json"])
    [chain] = json.loads(checked.stdout)["data"]["chains"]
    assert (checked.exit_code, chain["broken"]["line"]) == (3, 1)
    assert "is no JSON object" in chain["broken"]["detail"]


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": True},
        {"schema_version": 1.0},
        {"containers": [{"containerID": "1", "replicas": [], "unplanned": {}}]},
        {"containers": [{"containerID": 1e3, "replicas": [], "unplanned": {}}]},
        {"containers": [{"containerID": True, "replicas": [], "unplanned": {}}]},
    ],
)
def test_a_plan_file_has_numbers_where_numbers_are(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = tmp_path / "plan.json"
    whole = {"schema_version": 1, "format": "treefold-plan-1", "containers": []}
    path.write_text(json.dumps(whole | changes))
    asked = ["reconcile", "--apply", str(path), "--controller", "127.0.0.1:1"]
    result = CliRunner().invoke(treefold, asked)
    assert (result.exit_code, "is no plan file: " in result.stderr) == (2, True), result.output


def test_a_folder_without_audit_files_is_no_empty_list(tmp_path: Path) -> None:
    result = CliRunner().invoke(treefold, ["audit", "tail", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing is known" in result.stderr


@pytest.mark.parametrize("depth", [101, 400, 980, 100_000])
@pytest.mark.parametrize("name", ["records", "deep"])
def test_a_plan_file_that_is_nested_too_deep_is_a_usage_error(
    tmp_path: Path, depth: int, name: str
) -> None:
    path = tmp_path / "plan.json"
    deep = "[" * depth + "]" * depth
    plan = f'{{"digest": "0", "plan": {{"{name}": [{{"a": {deep}}}]}}}}'
    path.write_text(
        '{"schema_version": 1, "format": "treefold-plan-1", "containers":'
        f' [{{"containerID": 1, "unplanned": {{}}, "replicas": [{plan}]}}]}}'
    )
    asked = ["reconcile", "--apply", str(path), "--controller", "127.0.0.1:1"]
    result = CliRunner().invoke(treefold, asked)
    assert (result.exit_code, "error [usage]: " in result.stderr) == (2, True), result.output
