"""docs/formats.md lists every configuration key with its default, and no other."""

import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from admin.client_config import ClientConfig
from dnagent.config import AgentConfig
from replicator.master.config import MasterConfig
from replicator.syncer.config import SyncerConfig
from replicator.verifier.config import VerifierConfig
from runtime.config import Settings, load
from runtime.setting_values import check_switch
from scm.config import ControllerConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
# No process: what commands read.
CLIENT = "client.toml"
MODELS: dict[str, type[Settings]] = {
    "treefold agent run": AgentConfig,
    "treefold scm run": ControllerConfig,
    "treefold verifier run": VerifierConfig,
    "treefold replication-master run": MasterConfig,
    "treefold syncer run": SyncerConfig,
    CLIENT: ClientConfig,
}
# Where a default is written for people, what a file would have to say first.
REQUIRED = {"volumes": '[{path = "/v"}]', "state_folder": '"/s"', "bucket": '"local:/b"'}


def documented(command: str) -> dict[str, str]:
    """Key and default of each row, the marks around them taken off."""
    section = PAGE.split(f"\n### Keys of `{command}`\n")[1].split("\n## ")[0].split("\n### ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `?([^|`]+)`? \| (\S.*) \|$", section, re.MULTILINE)
    assert len(rows) == section.count("\n| `")
    return {key: default.strip() for key, default, _ in rows}


def fields(model: type[Settings], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key that a file may have."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        inner = settings_in(field.annotation)
        if inner is None:
            found[prefix + name] = field
        else:
            is_list = getattr(field.annotation, "__origin__", None) is tuple
            found |= fields(inner, f"{prefix}{name}{'[]' if is_list else ''}.")
    return found


def settings_in(annotation: object) -> type[Settings] | None:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    inner = (settings_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found), None)


@pytest.mark.parametrize("command", MODELS)
def test_the_table_has_the_keys_of_the_settings_and_their_defaults(
    command: str, tmp_path: Path
) -> None:
    model, table = MODELS[command], documented(command)
    known = fields(model)
    assert list(table) == list(known)
    is_optional = {
        key for key, field in known.items() if field.default is None or key.startswith("tls.")
    }
    assert {key for key, default in table.items() if default == "none"} == is_optional
    is_required = {key for key, field in known.items() if field.is_required()} - is_optional
    assert {key for key, default in table.items() if default == "required"} == is_required
    required = [
        f"{key} = {REQUIRED[key]}" for key in sorted({key.split("[")[0] for key in is_required})
    ]
    given = [
        f"{key} = {text}"
        for key, text in table.items()
        if text not in ("none", "required") and "[]" not in key
    ]
    for name, lines in (("least", required), ("all", [*required, *given])):
        (tmp_path / name).write_text("\n".join(lines))
    assert load(tmp_path / "all", model) == load(tmp_path / "least", model)


@pytest.mark.parametrize("command", MODELS)
def test_no_setting_takes_a_word_or_a_number_for_true(command: str) -> None:
    switches = {
        key: field for key, field in fields(MODELS[command]).items() if field.annotation is bool
    }
    assert switches
    assert [key for key, field in switches.items() if check_switch not in _checks(field)] == []


def _checks(field: FieldInfo) -> list[object]:
    return [getattr(mark, "func", None) for mark in field.metadata]


def test_the_default_of_a_volume_is_as_documented(tmp_path: Path) -> None:
    hold = documented("treefold agent run")["volumes[].hold"]
    for name, more in (("least", ""), ("all", f", hold = {hold}")):
        (tmp_path / name).write_text(f'state_folder = "/s"\nvolumes = [{{path = "/v"{more}}}]')
    assert load(tmp_path / "all", AgentConfig) == load(tmp_path / "least", AgentConfig)
