"""Ozone's site files: a secured cluster is refused by name, wherever it is seen."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from admin.cli import treefold
from ozone.errors import SecuredClusterError
from ozone.site import check_unsecured, read_site, secured_settings, volumes_of
from runtime.errors import ConfigError

KERBEROS = "Kerberos and delegation tokens"
# By setting: a value that secures a cluster, and what it is called.
ALONE = {
    "ozone.security.enabled": ("true", KERBEROS),
    "hadoop.security.authentication": ("kerberos", "Kerberos"),
    "hadoop.security.key.provider.path": ("kms://http@kms:9600/kms", "encrypted buckets"),
}
WITH_SECURITY = {
    "hdds.block.token.enabled": "block tokens",
    "hdds.container.token.enabled": "container tokens",
    "hdds.grpc.tls.enabled": "TLS of Ozone's ports",
}


def written(path: Path, **properties: str) -> Path:
    items = "".join(
        f"<property><name>{name}</name><value> {value} </value></property>"
        for name, value in properties.items()
    )
    path.write_text(f"<configuration>{items}</configuration>")
    return path


@pytest.mark.parametrize("name", ALONE)
def test_each_setting_that_secures_a_cluster_is_named(tmp_path: Path, name: str) -> None:
    value, meaning = ALONE[name]
    site = read_site(written(tmp_path / "ozone-site.xml", **{name: value}))
    with pytest.raises(SecuredClusterError) as caught:
        check_unsecured(site)
    assert caught.value.message == (
        f"the Ozone cluster of {site.file} is secured: {name} = {value} ({meaning})"
    )
    assert caught.value.exit_status == 6
    assert "docs/operations.md" in caught.value.hint


@given(
    st.dictionaries(
        st.sampled_from([*ALONE, *WITH_SECURITY]),
        st.sampled_from(["true", "TRUE", "false", "", "simple", "kerberos", "${env.SECURE}"]),
    )
)
def test_a_cluster_is_secured_if_and_only_if_a_setting_says_so(properties: dict[str, str]) -> None:
    """Tokens and TLS only count in a cluster with security, as in Ozone."""

    def is_on(name: str) -> bool:
        return properties.get(name, "") in ("true", "TRUE", "${env.SECURE}")

    found = secured_settings(properties)
    named = {setting.partition(" = ")[0] for setting in found}
    security = is_on("ozone.security.enabled")
    assert ("ozone.security.enabled" in named) == security
    for name in WITH_SECURITY:
        assert (name in named) == (security and is_on(name))
    authentication = properties.get("hadoop.security.authentication", "")
    assert ("hadoop.security.authentication" in named) == (authentication not in ("", "simple"))
    keys = properties.get("hadoop.security.key.provider.path", "")
    assert ("hadoop.security.key.provider.path" in named) == bool(keys)
    assert len(found) == len(named)


def test_the_core_site_beside_counts_and_the_ozone_site_wins(tmp_path: Path) -> None:
    site = written(tmp_path / "ozone-site.xml", **{"hdds.datanode.dir": "/d"})
    core = written(tmp_path / "core-site.xml", **{"hadoop.security.authentication": "kerberos"})
    with pytest.raises(SecuredClusterError, match="Kerberos"):
        check_unsecured(read_site(tmp_path))
    written(site, **{"hdds.datanode.dir": "/d", "hadoop.security.authentication": "simple"})
    check_unsecured(read_site(site))
    core.write_text("<configuration")
    with pytest.raises(ConfigError, match=r"core-site\.xml is not XML"):
        read_site(tmp_path)
    core.unlink()
    # What cannot be read may say anything.
    core.symlink_to(core)
    with pytest.raises(ConfigError, match=r"cannot read .*core-site\.xml"):
        read_site(tmp_path)
    core.unlink()
    assert volumes_of(read_site(tmp_path)) == ([Path("/d")], [])


def test_doctor_refuses_a_secured_cluster(tmp_path: Path) -> None:
    secured = {"hdds.datanode.dir": "/no/such/volume", "ozone.security.enabled": "true"}
    written(tmp_path / "ozone-site.xml", **secured)
    done = CliRunner().invoke(treefold, ["doctor", "--ozone-conf", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (6, "")
    assert done.stderr.startswith("error [cluster_secured]: the Ozone cluster of ")


def test_doctor_does_not_call_unknown_what_it_read_nor_known_what_it_did_not(
    tmp_path: Path,
) -> None:
    written(tmp_path / "ozone-site.xml", **{"hdds.datanode.dir": str(tmp_path / "none")})
    for words, secured, said in (
        ([], None, "Ozone: unknown, since no volume shows it; give --ozone-conf"),
        (["--ozone-conf", str(tmp_path)], False, f"Ozone: none, by {tmp_path}/ozone-site.xml"),
    ):
        done = CliRunner().invoke(treefold, ["doctor", *words, "--json"])
        assert json.loads(done.stdout)["data"]["secured"] is secured
        assert said in CliRunner().invoke(treefold, ["doctor", *words]).stdout


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "--check-config"],
        ["export-checksums", "--to", "/no/such/folder"],
        ["import-trees", "/no/such/folder"],
    ],
    ids=" ".join,
)
def test_an_agent_refuses_a_secured_cluster_before_it_opens_a_volume(
    tmp_path: Path, words: list[str]
) -> None:
    written(tmp_path / "ozone-site.xml", **{"ozone.security.enabled": "true"})
    config = tmp_path / "agent.toml"
    config.write_text(
        f'volumes = [{{ path = "/no/such/volume" }}]\nstate_folder = "{tmp_path / "state"}"\n'
        f'ozone_conf = "{tmp_path}"\n'
    )
    done = CliRunner().invoke(treefold, ["agent", *words, "--config", str(config)])
    assert done.exit_code == 6
    assert "ozone.security.enabled = true (Kerberos and delegation tokens)" in done.stderr
    assert not (tmp_path / "state").exists()
