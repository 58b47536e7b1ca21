"""Configurations that cannot be meant: `agent run` and `scm run` refuse them by the key
before anything is begun.

The rules of a single value are in test_config.py and test_agent_config.py; here whole
files go through the commands. Rows: what is wrong, the file, and what the message must
say.
"""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dnagent.config import AgentConfig
from runtime.config import load
from runtime.disk import Disk
from runtime.settings_files import SETTINGS_BYTES_MAX
from scm.config import ControllerConfig
from tests.support.bad_input import refused, run, unchanged
from tests.support.processes import ROOT
from tests.support.volume_format import format_volume
from tests.support.volumes import VERSION

HEAD = 'state_folder = "/s"\n'
VOLUME = '[[volumes]]\npath = "/data/1"\n'


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Commands that run until they are told to stop take the signals of this
    process.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


AGENT: list[tuple[str, str, str]] = [
    ("empty", "", "state_folder: is required"),
    ("not TOML", "[[[", "not TOML"),
    ("a key twice", HEAD * 2 + VOLUME, "not TOML"),
    ("brackets by the thousand", "a = " + "[" * 5000, "not TOML"),
    ("a number of 5000 digits", "a = " + "1" * 5000, "not TOML"),
    ("larger than any", "#" * (SETTINGS_BYTES_MAX + 1), "larger than"),
    ("an unknown key", HEAD + VOLUME + "lisen = 1\n", "unknown key"),
    (
        "an unknown key at the top",
        HEAD + 'lisen = "127.0.0.1:1"\n' + VOLUME,
        "did you mean 'listen'?",
    ),
    ("an unknown key of a volume", HEAD + VOLUME + 'hodl = "owner"\n', "did you mean 'hold'?"),
    (
        "an unknown key of scans",
        HEAD + VOLUME + "[scan]\nenable = true\n",
        "did you mean 'enabled'?",
    ),
    (
        "an unknown key of repairs",
        HEAD + VOLUME + "[repair]\nundo_byte = 1\n",
        "did you mean 'undo_bytes'?",
    ),
    (
        "a table nobody knows",
        HEAD + VOLUME + "[repairs]\nenabled = true\n",
        "did you mean 'repair'?",
    ),
    ("volumes is a text", 'volumes = "/data/1"\n' + HEAD, "volumes: "),
    ("volumes is a table", HEAD + '[volumes]\npath = "/data/1"\n', "volumes: "),
    ("no volume at all", HEAD + "volumes = []\n", "volumes: "),
    (
        "257 volumes",
        HEAD + "".join(f'[[volumes]]\npath = "/data/{i}"\n' for i in range(257)),
        "volumes: ",
    ),
    (
        "a volume without a path",
        HEAD + "[[volumes]]\nhold = 'owner'\n",
        "volumes[0].path: is required",
    ),
    ("a volume with a number for a path", HEAD + "[[volumes]]\npath = 1\n", "volumes[0].path: "),
    (
        "a NUL in a path",
        HEAD + '[[volumes]]\npath = "/data\\u0000/1"\n',
        "volumes[0].path: expected a path",
    ),
    (
        "a NUL in the state folder",
        'state_folder = "/s\\u0000"\n' + VOLUME,
        "state_folder: expected a path",
    ),
    (
        "a volume twice, by dots",
        HEAD + VOLUME + '[[volumes]]\npath = "/data/2/../1"\n',
        "is listed twice",
    ),
    (
        "state inside a volume, by dots",
        'state_folder = "/data/2/../1/s"\n' + VOLUME,
        "state_folder: must not lie",
    ),
    (
        "state beside hdds",
        'state_folder = "/data/1/s"\n[[volumes]]\npath = "/data/1/hdds"\n',
        "must not lie",
    ),
    (
        "audit inside a volume",
        HEAD + 'audit_file = "/data/1/a"\n' + VOLUME,
        "audit_file: must not lie",
    ),
    (
        "hold of nobody",
        HEAD + VOLUME + 'hold = "maybe"\n',
        'volumes[0].hold: expected "read-only" or "owner", found',
    ),
    (
        "hold is a number",
        HEAD + VOLUME + "hold = 1\n",
        'volumes[0].hold: expected "read-only" or "owner", found 1',
    ),
    (
        "hold is a list",
        HEAD + VOLUME + "hold = ['owner']\n",
        'volumes[0].hold: expected "read-only" or "owner"',
    ),
    ("no port", HEAD + 'listen = "127.0.0.1"\n' + VOLUME, "listen: expected an address"),
    ("port 65536", HEAD + 'listen = "127.0.0.1:65536"\n' + VOLUME, "listen: expected an address"),
    ("port -1", HEAD + 'listen = "127.0.0.1:-1"\n' + VOLUME, "listen: expected an address"),
    (
        "port of 5000 digits",
        HEAD + f'listen = "127.0.0.1:{"1" * 5000}"\n' + VOLUME,
        "listen: expected an address",
    ),
    (
        "port in another script",
        HEAD + 'listen = "127.0.0.1:\u0661"\n' + VOLUME,
        "listen: expected an address",
    ),
    ("port is a number", HEAD + "listen = 9893\n" + VOLUME, "listen: "),
    (
        "a controller without port",
        HEAD + 'controller = "scm"\n' + VOLUME,
        "controller: expected an address",
    ),
    (
        "open to all without TLS",
        HEAD + 'listen = "0.0.0.0:9893"\n' + VOLUME,
        "listen: 0.0.0.0:9893 is not on loopback",
    ),
    ("all of IPv6 without TLS", HEAD + 'listen = "[::]:9893"\n' + VOLUME, "is not on loopback"),
    (
        "a controller elsewhere without TLS",
        HEAD + 'controller = "192.0.2.1:1"\n' + VOLUME,
        "controller: 192.0.2.1:1",
    ),
    (
        "metrics open to all",
        HEAD + 'metrics = "0.0.0.0:1"\n' + VOLUME,
        "metrics: 0.0.0.0:1 is not on loopback",
    ),
    ("half of TLS", HEAD + VOLUME + '[tls]\ncert = "/c"\nkey = "/k"\n', "tls.ca: is required"),
    (
        "TLS of empty paths",
        HEAD + VOLUME + '[tls]\ncert = ""\nkey = ""\nca = ""\n',
        "tls.cert: expected a path",
    ),
    (
        "a heartbeat without pause",
        HEAD + "heartbeat_interval_s = 0\n" + VOLUME,
        "heartbeat_interval_s: ",
    ),
    (
        "a heartbeat once a year",
        HEAD + 'heartbeat_interval_s = "365d"\n' + VOLUME,
        "heartbeat_interval_s: ",
    ),
    (
        "a negative rate",
        HEAD + VOLUME + "[scan]\nbytes_per_second = -1\n",
        "scan.bytes_per_second: ",
    ),
    (
        "a rate in parsecs",
        HEAD + VOLUME + '[scan]\nbytes_per_second = "1pc"\n',
        "scan.bytes_per_second: ",
    ),
    (
        "an endless size",
        HEAD + VOLUME + "[repair]\nundo_bytes = inf\n",
        "repair.undo_bytes: expected a size",
    ),
    (
        "a size of 400 digits",
        HEAD + VOLUME + f"[repair]\nundo_bytes = {'9' * 400}\n",
        "repair.undo_bytes: ",
    ),
    (
        "a text of 400 digits",
        HEAD + VOLUME + f'[repair]\nundo_bytes = "{"9" * 400}"\n',
        "repair.undo_bytes: ",
    ),
    (
        "an interval that is no number",
        HEAD + VOLUME + "[scan]\ninterval_s = nan\n",
        "scan.interval_s: ",
    ),
    (
        "an endless interval",
        HEAD + VOLUME + f'[scan]\ninterval_s = "{"9" * 400}d"\n',
        "scan.interval_s: ",
    ),
    (
        "maybe for true",
        HEAD + VOLUME + '[repair]\nenabled = "maybe"\n',
        "repair.enabled: expected true or false",
    ),
    (
        "yes for true",
        HEAD + VOLUME + '[repair]\nenabled = "yes"\n',
        "repair.enabled: expected true or false",
    ),
    (
        "1 for true",
        HEAD + VOLUME + "[repair]\nreturn_to_closed = 1\n",
        "repair.return_to_closed: expected true or",
    ),
    (
        "65 reconciliations",
        HEAD + VOLUME + "[repair]\nreconciliations_max = 65\n",
        "repair.reconciliations_max: ",
    ),
    ("undo for ever", HEAD + VOLUME + "[repair]\nundo_days = 3651\n", "repair.undo_days: "),
]

CONTROLLER: list[tuple[str, str, str]] = [
    ("not TOML", "= 1", "not TOML"),
    ("an unknown key", 'lissten = "x"\n', "did you mean 'listen'?"),
    ("an unknown key of automatic mode", "[automatic]\njob_max = 1\n", "did you mean 'jobs_max'?"),
    ("automatic is a switch", "automatic = true\n", "automatic: "),
    (
        "on for true",
        '[automatic]\nenabled = "on"\n',
        "automatic.enabled: expected true or false, found 'on'",
    ),
    ("0 for false", "insecure = 0\n", "insecure: expected true or false, found 0"),
    ("an agent's key", "volumes = []\n", "volumes: unknown key"),
    ("open to all without TLS", 'listen = "0.0.0.0:1"\n', "listen: 0.0.0.0:1 is not on loopback"),
    ("a name without TLS", 'listen = "scm.example:1"\n', "is not on loopback"),
    ("metrics open to all", 'metrics = "[::]:1"\n', "metrics: [::]:1 is not on loopback"),
    ("port 99999", 'listen = "127.0.0.1:99999"\n', "listen: expected an address"),
    ("dead before stale", 'dead_after_s = "1s"\n', "dead_after_s: must not be less"),
    ("stale at once", "stale_after_s = 0\n", "stale_after_s: "),
    ("65 replicas", "required_replicas = 65\n", "required_replicas: "),
    ("-1 replicas", "required_replicas = -1\n", "required_replicas: "),
    ("2.5 replicas", "required_replicas = 2.5\n", "required_replicas: "),
    ("no orders", "orders_per_datanode = 0\n", "orders_per_datanode: "),
    ("a deadline of 400 digits", f"command_deadline_s = {'9' * 400}\n", "command_deadline_s: "),
    ("state in an empty text", 'state_folder = ""\n', "state_folder: expected a path"),
    ("TLS that is a path", 'tls = "/pki"\n', "tls: "),
]


def written(folder: Path, text: str) -> Path:
    path = folder / "treefold.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("text", "named"), [pytest.param(*rest, id=name) for name, *rest in AGENT])
@pytest.mark.parametrize("check", [["--check-config"], []], ids=["checked", "run"])
def test_an_agent_is_not_begun_with_what_cannot_be(
    tmp_path: Path, text: str, named: str, check: list[str]
) -> None:
    path = written(tmp_path, text)
    with unchanged(tmp_path):
        message = refused("config_invalid", 2, "agent", "run", "--config", path, *check)
    assert named in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("text", "named"), [pytest.param(*rest, id=name) for name, *rest in CONTROLLER]
)
@pytest.mark.parametrize("check", [["--check-config"], []], ids=["checked", "run"])
def test_a_controller_is_not_begun_with_what_cannot_be(
    tmp_path: Path, text: str, named: str, check: list[str]
) -> None:
    path = written(tmp_path, text)
    with unchanged(tmp_path):
        message = refused("config_invalid", 2, "scm", "run", "--config", path, *check)
    assert named in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("command", "text", "given", "model"),
    [
        (
            "agent",
            'volumes = [{path = "/v"}]\nscan.min_gap_s = "5m"\n',
            ("--state-folder", "/s"),
            AgentConfig,
        ),
        (
            "scm",
            'dead_after_s = "1h"\nautomatic.jobs_max = 9\n',
            ("--automatic",),
            ControllerConfig,
        ),
    ],
)
def test_a_checked_configuration_is_printed_whole_and_nothing_is_begun(
    tmp_path: Path,
    command: str,
    text: str,
    given: tuple[str, ...],
    model: type[AgentConfig | ControllerConfig],
) -> None:
    path = written(tmp_path, text)
    with unchanged(tmp_path):
        result = run(
            command,
            "run",
            "--config",
            path,
            *given,
            "--check-config",
            "--port-file",
            tmp_path / "port",
        )
    assert (result.exit_code, result.stderr) == (0, "")
    overrides = {"automatic.enabled": True} if command == "scm" else {"state_folder": "/s"}
    assert model.model_validate(json.loads(result.stdout)) == load(path, model, overrides)


@pytest.mark.parametrize("command", ["agent", "scm"])
@pytest.mark.parametrize("kind", ["missing", "folder", "loop", "bytes"])
def test_what_is_no_file_of_text_is_no_configuration(
    tmp_path: Path, command: str, kind: str
) -> None:
    path = tmp_path / "x.toml"
    match kind:
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "bytes":
            path.write_bytes(b"\xff\xfe\x00")
    with unchanged(tmp_path):
        refused("config_invalid", 2, command, "run", "--config", path)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    root = tmp_path / "volume1"
    format_volume(root, VERSION, Disk(), created_ms=1)
    return root


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


def agent(volume: Path, *, state: Path, more: str = "", tables: str = "") -> str:
    return (
        f'state_folder = "{state}"\nlisten = "127.0.0.1:0"\n{more}\n[[volumes]]\npath ='
        f' "{volume}"\n{tables}'
    )


def test_an_agent_without_any_usable_volume_ends(tmp_path: Path, volume: Path) -> None:
    (tmp_path / "empty").mkdir()
    with unchanged(volume):
        for path in (tmp_path / "none", tmp_path / "empty", volume / "hdds" / "VERSION"):
            config = written(tmp_path, agent(path, state=tmp_path / "state"))
            assert "volume_failed" in refused_start("volume_invalid", 1, "agent", config)


def refused_start(code: str, exit_status: int, command: str, config: Path) -> str:
    """As `refused`, of a process that has begun to log."""
    result = run(command, "run", "--config", config)
    assert (result.exit_code, result.stdout) == (exit_status, ""), result.output
    assert f"error [{code}]: " in result.stderr
    return result.stderr


def test_state_that_a_link_leads_into_a_volume_is_refused(tmp_path: Path, volume: Path) -> None:
    (tmp_path / "link").symlink_to(volume / "hdds")
    with unchanged(volume):
        refused(
            "config_invalid",
            2,
            "agent",
            "run",
            "--config",
            written(tmp_path, agent(volume, state=tmp_path / "link")),
        )


@pytest.mark.parametrize("kind", ["file", "below a file", "loop"])
@pytest.mark.parametrize("command", ["agent", "scm"])
def test_state_where_no_folder_can_be_is_an_error_of_the_disk(
    tmp_path: Path, volume: Path, command: str, kind: str
) -> None:
    state = tmp_path / "state"
    if kind == "loop":
        state.symlink_to(state)
    else:
        state.write_bytes(b"")
    place = state / "below" if kind == "below a file" else state
    text = (
        agent(volume, state=place)
        if command == "agent"
        else f'state_folder = "{place}"\nlisten = "127.0.0.1:0"\n'
    )
    config = written(tmp_path, text)
    with unchanged(tmp_path):
        refused_start("disk_failed", 1, command, config)


@pytest.mark.parametrize("words", [[], ["--check-config"]], ids=["start", "check"])
def test_repair_of_a_read_only_volume_is_refused(
    tmp_path: Path, volume: Path, words: list[str]
) -> None:
    config = written(
        tmp_path, agent(volume, state=tmp_path / "state", tables="[repair]\nenabled = true\n")
    )
    with unchanged(tmp_path):
        result = run("agent", "run", "--config", str(config), *words)
    assert result.exit_code == 2
    assert f"repair.enabled: {volume} is read-only" in result.stderr
    assert 'hold = "owner"' in result.stderr


@pytest.mark.parametrize("key", ["listen", "metrics"])
@pytest.mark.parametrize("command", ["agent", "scm"])
def test_an_address_that_is_taken_is_named(
    tmp_path: Path, volume: Path, taken: str, command: str, key: str
) -> None:
    listen = "" if key == "listen" else 'listen = "127.0.0.1:0"\n'
    text = f'state_folder = "{tmp_path / "state"}"\n{listen}{key} = "{taken}"\n'
    config = written(
        tmp_path, text + (f'[[volumes]]\npath = "{volume}"\n' if command == "agent" else "")
    )
    with unchanged(volume):
        assert taken in refused_start("config_invalid", 2, command, config)


@pytest.mark.parametrize("command", ["agent", "scm"])
@pytest.mark.parametrize(
    "pem", [None, "", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n"], ids=repr
)
def test_tls_that_cannot_be_is_refused(
    tmp_path: Path, volume: Path, command: str, pem: str | None
) -> None:
    tables = "[tls]\n" + "".join(
        f'{name} = "{tmp_path / name}"\n' for name in ("cert", "key", "ca")
    )
    if pem is not None:
        for name in ("cert", "key", "ca"):
            (tmp_path / name).write_text(pem)
    state = tmp_path / "state"
    text = f'state_folder = "{state}"\nlisten = "127.0.0.1:0"\n' + tables
    config = written(
        tmp_path, agent(volume, state=state, tables=tables) if command == "agent" else text
    )
    with unchanged(volume):
        refused_start("config_invalid", 2, command, config)


@pytest.mark.parametrize("name", ["controller.db", "controller.db.lock"])
@pytest.mark.parametrize("kind", ["garbage", "folder"])
def test_a_controllers_state_that_is_none_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    state = tmp_path / "state"
    state.mkdir()
    if kind == "folder":
        (state / name).mkdir()
    elif name == "controller.db":
        (state / name).write_bytes(b"no database" * 1000)
    else:
        # A lock's content is nobody's business.
        (state / name).write_bytes(b"junk")
        (state / "controller.db").mkdir()
    config = written(tmp_path, f'state_folder = "{state}"\nlisten = "127.0.0.1:0"\n')
    refused_start("database_failed", 1, "scm", config)


def test_a_port_that_is_taken_is_all_that_a_terminal_shows(tmp_path: Path, taken: str) -> None:
    """As a real process: gRPC writes to stderr by itself unless it is told not to."""
    words = ["scm", "run", "--listen", taken, "--state-folder", str(tmp_path / "state")]
    result = subprocess.run(
        [sys.executable, "-m", "admin.cli", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error [config_invalid]: cannot listen on {taken}\n")
    assert len(result.stderr.splitlines()) == 2
