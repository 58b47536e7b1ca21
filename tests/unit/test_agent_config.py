"""An agent's settings: safe unless said otherwise, and refused as a whole when they
cannot hold together.
"""

from pathlib import Path

import pytest

from dnagent.config import AgentConfig, VolumeSettings
from merkle.replica import TreeSource
from ozone.volume import Hold
from runtime.config import load
from runtime.errors import ConfigError

VOLUME = '[[volumes]]\npath = "/data/1"\n'


def parse(folder: Path, text: str) -> AgentConfig:
    path = folder / "agent.toml"
    path.write_text(text)
    return load(path, AgentConfig)


def test_the_defaults_write_nothing_and_listen_on_loopback(tmp_path: Path) -> None:
    config = parse(tmp_path, 'state_folder = "/state"\n' + VOLUME)
    assert config.volumes == (VolumeSettings(path=Path("/data/1"), hold=Hold.READ_ONLY),)
    assert config.listen == "127.0.0.1:9893"
    assert not config.repair.enabled
    assert config.repair.return_to_closed
    assert not config.scan.mapped
    assert (config.scan.interval_s, config.scan.min_gap_s, config.scan.bytes_per_second) == (
        604800,
        900,
        5242880,
    )
    assert config.repair.undo_bytes == 1 << 30
    assert (config.export.to, config.export.interval_s, config.export.source) == (
        None,
        86_400,
        TreeSource.TREE,
    )
    assert config.rpc_tls is None
    assert config.audit_path == Path("/state/audit.jsonl")


def test_a_whole_file_is_understood(tmp_path: Path) -> None:
    config = parse(
        tmp_path,
        """
state_folder = "/state"
listen = "0.0.0.0:9893"
advertised = "dn1.example:9893"
controller = "scm.example:9896"
heartbeat_interval_s = "30s"
database_volumes = ["/ssd/1", "/ssd/2"]
metrics = "127.0.0.1:9892"
audit_file = "/var/log/treefold/audit.jsonl"
volumes = [{path = "/data/1", hold = "owner"}, {path = "/data/2", hold = "owner"}]
[scan]
bytes_per_second = "40MiB/s"
[repair]
enabled = true
undo_bytes = "2GiB"
[export]
to = "s3://backup/tables?region=eu"
interval_s = "6h"
source = "data"
[tls]
cert = "/pki/cert.pem"
key = "/pki/key.pem"
ca = "/pki/ca.pem"
""",
    )
    assert [volume.hold for volume in config.volumes] == [Hold.OWNER, Hold.OWNER]
    assert (config.export.to, config.export.interval_s) == ("s3://backup/tables?region=eu", 21_600)
    assert config.export.source is TreeSource.DATA
    assert config.audit_path == Path("/var/log/treefold/audit.jsonl")
    assert config.database_volumes == (Path("/ssd/1"), Path("/ssd/2"))
    assert config.scan.bytes_per_second == 40 << 20
    tls = config.rpc_tls
    assert tls is not None
    assert tls.key == Path("/pki/key.pem")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "state_folder: is required"),
        ("", "volumes: is required"),
        ('state_folder = "/s"\nvolumes = []\n', "volumes: "),
        ('state_folder = "/s"\n[[volumes]]\npath = "/d"\nhold = "mine"\n', "volumes[0].hold: "),
        ('state_folder = "/s"\n' + VOLUME * 2, "volumes: /data/1 is listed twice"),
        (
            'state_folder = "/data/1/state"\n' + VOLUME,
            "state_folder: must not lie inside the volume /data/1",
        ),
        (
            'state_folder = "/s"\n' + VOLUME + '[export]\nto = "/data/1/hdds/t"',
            "export.to: must not lie inside the volume",
        ),
        ('state_folder = "/s"\n' + VOLUME + '[export]\nto = ""', "export.to: "),
        (
            'state_folder = "/s"\n' + VOLUME + "[repair]\nenabled = true",
            "repair.enabled: /data/1 is read-only, so nothing can be repaired there",
        ),
        (
            'state_folder = "/s"\n[repair]\nenabled = true\n[[volumes]]\npath = "/data/0"\n'
            'hold = "owner"\n' + VOLUME,
            "repair.enabled: /data/1 is read-only",
        ),
        (
            'state_folder = "/s"\n' + VOLUME + '[export]\nto = "s3://key:word@b/p"',
            "export.to: credentials belong in",
        ),
        (
            'state_folder = "/s"\n' + VOLUME + "[export]\ninterval_s = 0.5",
            "export.interval_s: expected at least 1s",
        ),
        ('state_folder = "/s"\n' + VOLUME + '[export]\nsource = "gossip"', "export.source: "),
        (
            'state_folder = "/s"\nlisten = "0.0.0.0:9893"\n' + VOLUME,
            "listen: 0.0.0.0:9893 is not on loopback",
        ),
        (
            'state_folder = "/s"\ncontroller = "scm:9896"\n' + VOLUME,
            "controller: scm:9896 is not on loopback",
        ),
        (
            'state_folder = "/s"\nmetrics = "0.0.0.0:9892"\n' + VOLUME,
            "metrics: 0.0.0.0:9892 is not on loopback",
        ),
        ('state_folder = "/s"\nlisten = "localhost"\n' + VOLUME, "listen: expected an address"),
        ('state_folder = "/s"\nlisten = "::1:22"\n' + VOLUME, "listen: expected an address"),
        (
            'state_folder = "/s"\nlisten = "127.0.0.1:65536"\n' + VOLUME,
            "listen: expected an address",
        ),
        (
            'state_folder = "/s"\nheartbeat_interval_s = 0\n' + VOLUME,
            "heartbeat_interval_s: expected between",
        ),
        (
            'state_folder = "/s"\n' + VOLUME + "[repair]\nenable = true\n",
            "repair.enable: unknown key; did you mean",
        ),
        ('state_folder = "/s"\n' + VOLUME + "[repair]\nfetches_max = 0\n", "repair.fetches_max: "),
        ('state_folder = "/s"\n' + VOLUME + '[tls]\ncert = "/c"\n', "tls.key: is required"),
    ],
)
def test_what_cannot_hold_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text)
    assert named in caught.value.message


def test_a_hold_that_cannot_be_is_the_only_problem(tmp_path: Path) -> None:
    """Not also that there are no volumes."""
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, 'state_folder = "/s"\n' + VOLUME + 'hold = "boss"\n')
    assert caught.value.facts["problems"] == (
        'volumes[0].hold: expected "read-only" or "owner", found \'boss\'',
    )


@pytest.mark.parametrize("hold", ["read-only", "read_only"])
def test_a_hold_may_be_written_either_way(tmp_path: Path, hold: str) -> None:
    config = parse(tmp_path, 'state_folder = "/s"\n' + VOLUME + f'hold = "{hold}"\n')
    assert config.volumes[0].hold is Hold.READ_ONLY


def test_off_loopback_an_explicit_insecure_is_enough(tmp_path: Path) -> None:
    assert parse(
        tmp_path, 'state_folder = "/s"\nlisten = "0.0.0.0:0"\ninsecure = true\n' + VOLUME
    ).insecure
