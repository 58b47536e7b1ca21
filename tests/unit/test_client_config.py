"""Commands take address and TLS from the client's settings; options win over them."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner, Result

from admin.cli import treefold
from admin.client_config import ClientConfig, client_config
from runtime.config import TlsSettings
from runtime.errors import ConfigError
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.bad_input import another_user
from tests.support.certificates import issue
from tests.support.identities import certificate, tls_in

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
TLS = '[tls]\ncert = "us.pem"\nkey = "keys/us.key"\nca = "/etc/ca.pem"\n'


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    for environment in ({}, {"HOME": str(tmp_path)}, {"XDG_CONFIG_HOME": str(tmp_path)}):
        assert client_config(environment) == ClientConfig()


def test_the_file_that_is_named_wins_over_the_usual_places(tmp_path: Path) -> None:
    home, base = tmp_path / "home", tmp_path / "base"
    written(home / ".config/treefold/client.toml", 'controller = "home:1"')
    environment = {"HOME": str(home)}
    assert client_config(environment).controller == "home:1"
    environment["XDG_CONFIG_HOME"] = str(base)
    assert client_config(environment) == ClientConfig()
    written(base / "treefold/client.toml", 'controller = "base:1"')
    assert client_config(environment).controller == "base:1"
    environment["TREEFOLD_CONFIG"] = str(written(tmp_path / "other.toml", 'controller = "other:1"'))
    assert client_config(environment).controller == "other:1"


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "etc/client.toml", TLS)
    found = client_config({"TREEFOLD_CONFIG": str(path)}).tls
    folder = tmp_path / "etc"
    assert found == TlsSettings(
        cert=folder / "us.pem", key=folder / "keys/us.key", ca=Path("/etc/ca.pem")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('controler = "a:1"', "controller"),
        ('controller = "a"', "controller: expected an address"),
        ('[tls]\ncert = "a"', "tls.key"),
        ("insecure = 1", "insecure: expected true or false"),
        ("=", "not TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "client.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"client\.toml") as caught:
        client_config({"TREEFOLD_CONFIG": str(path)})
    assert message in caught.value.message


def run(environment: Mapping[str, str], *words: str) -> Result:
    nothing = {"HOME": None, "XDG_CONFIG_HOME": None, "TREEFOLD_CONTROLLER": None}
    return CliRunner(env={**nothing, **environment}).invoke(treefold, words)


def test_options_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "client.toml", 'controller = "127.0.0.1:3"')
    environment = {"TREEFOLD_CONFIG": str(path)}
    words = ("job", "list")
    assert "no controller answers at 127.0.0.1:3" in run(environment, *words).stderr
    environment["TREEFOLD_CONTROLLER"] = "127.0.0.1:2"
    assert "no controller answers at 127.0.0.1:2" in run(environment, *words).stderr
    words = (*words, "--controller", "127.0.0.1:1")
    assert "no controller answers at 127.0.0.1:1" in run(environment, *words).stderr


def test_a_bad_file_ends_a_command_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "client.toml", "[tls")
    result = run({"TREEFOLD_CONFIG": str(path)}, "job", "list", "--json")
    assert result.exit_code == 2
    assert '"code": "config_invalid"' in result.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a user with the client.toml of the README, and a controller by mutual TLS."""
    authority = trustme.CA()
    tls = issue(authority, tmp_path / "served", identity="controller/main")
    server = ControllerServer(
        ControllerConfig(
            listen="127.0.0.1:0",
            state_folder=tmp_path / "state",
            tls=TlsSettings(cert=tls.cert, key=tls.key, ca=tls.ca),
        )
    )
    home = tmp_path / ".config" / "treefold"
    (text,) = re.findall(r"```toml\n# \S+/client.toml\n(.*?)```", README, re.DOTALL)
    written(home / "client.toml", text.replace("10.0.0.2:9896", server.address))
    ours = tls_in(certificate(authority, tmp_path, "ours", "operator/alice"))
    for path, name in ((ours.cert, "client.pem"), (ours.key, "client.key"), (ours.ca, "ca.pem")):
        path.rename(home / name)
    yield {"HOME": str(tmp_path)}
    server.stop()


def test_a_file_is_all_that_a_command_needs_for_tls(environment: dict[str, str]) -> None:
    assert run(environment, "job", "list").exit_code == 0
    # Without TLS there is nobody for us.
    done = run(environment, "job", "list", "--insecure")
    assert done.exit_code == 7
    assert "it wants TLS, and no certificate was given" in done.stderr


def test_the_sequence_of_the_readme_reaches_the_controller_as_printed(
    environment: dict[str, str],
) -> None:
    """What it answers without any agent is the controller's own."""
    (block,) = re.findall(r"```sh\n(treefold scan .*?)```", README, re.DOTALL)
    lines = [line.partition(" #")[0].rstrip() for line in block.splitlines()]
    assert len(lines) == 7
    for line in lines:
        done = run(environment, *shlex.split(line)[1:])
        is_status = line == "treefold status"
        said = "no agent has reported" if is_status else "No live agent reports"
        assert said in done.output, line


def test_a_usual_file_in_a_folder_of_someone_else_is_named(tmp_path: Path) -> None:
    """As under `sudo -u hdds` with the HOME of root."""
    (tmp_path / ".config").mkdir(mode=0o700)
    with another_user():
        result = CliRunner(env={"HOME": str(tmp_path)}).invoke(treefold, ["job", "list"])
    assert result.exit_code == 2
    assert "error [config_invalid]: " in result.stderr
    assert "client.toml: cannot be read: Permission denied" in result.stderr
