"""Mistakes of an operator with --cluster, against a cluster in memory: each ends in an
error by name with its documented status, and changes nothing.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from tests.support.peers import WINDOW_BYTES
from tests.support.rescue_twin import RescueTwin, rescue_twin

SCM, DATANODE, NOBODY = "{scm}", "{datanode}", "127.0.0.1:1"


@dataclass
class Cluster:
    """A cluster with container 1, which only a rescue could heal."""

    twin: RescueTwin
    folder: Path

    def run(self, words: str) -> tuple[int, dict[str, object]]:
        """The exit status of a command, and its document."""
        places = {
            "scm": self.twin.live.address,
            "datanode": self.twin.live.servers[0].address,
            "rescue": f"rescue --cluster {self.twin.live.address}",
            "folder": str(self.folder),
        }
        arguments = [*words.format(**places).split(), "--json"]
        result = CliRunner().invoke(treefold, arguments)
        return result.exit_code, json.loads(result.stdout)

    def state(self) -> object:
        """All that a command could have changed."""
        live = self.twin.live
        files = [
            [bytes(data) for one in source.replicas.values() for data in one.files.values()]
            for source in live.sources
        ]
        return files, list(live.scm.registrations), list(live.scm.reconciled)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(tmp_path / "client.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    header = {"schema_version": 1, "clusterID": "CID-twin", "deep": False, "ids": None, "after": 0}
    start = json.dumps(header, separators=(",", ":")) + "\n"
    (tmp_path / "text").write_text("mine\n")
    (tmp_path / "other").write_text(start.replace("twin", "other"))
    (tmp_path / "edited").write_text(start + '{"containerID":1}\n')
    (tmp_path / "forged").write_text(start + '{"verdict":[],"containerID":"x"}\n')
    with rescue_twin() as twin:
        twin.live.add(1)
        for datanode in (1, 2, 3):
            twin.damage(1, datanode, 20, datanode * WINDOW_BYTES + 7)
        yield Cluster(twin, tmp_path)


# What was typed, the status, and the error's name. `--json` is added.
MISTAKES: list[tuple[str, int, str]] = [
    *(
        (f"{command} --cluster {where}", status, code)
        for command in ("rescue 1 --yes", "reconcile 1 --yes", "diagnose 1", "doctor", "status")
        for where, status, code in (
            ("nonsense", 2, "usage"),
            ("127.0.0.1:99999", 2, "usage"),
            (f"{SCM},", 2, "usage"),
            (NOBODY, 7, "peer_unavailable"),
            (DATANODE, 7, "peer_unavailable"),
            ("no.such.host.invalid:9860", 7, "peer_unavailable"),
        )
    ),
    *(
        (f"container {command} --cluster {where}", status, code)
        for command in ("list", "info 1", "diff 1")
        for where, status, code in (
            ("nonsense", 2, "usage"),
            (NOBODY, 7, "peer_unavailable"),
            (DATANODE, 7, "peer_unavailable"),
            (f"{SCM} --controller {NOBODY}", 2, "usage"),
        )
    ),
    *(
        (f"{command} {number} --cluster {SCM}", status, code)
        for command in ("rescue --yes", "reconcile --yes", "diagnose", "container info")
        for number, status, code in (
            ("0", 2, "usage"),
            ("1e3", 2, "usage"),
            ("٣", 2, "usage"),
            ("9223372036854775808", 2, "usage"),
            ("999", 1, "container_not_found"),
            ("9223372036854775807", 1, "container_not_found"),
        )
    ),
    ("rescue 1 --yes", 2, "usage"),
    ("diagnose", 2, "usage"),
    ("{rescue}", 2, "usage"),
    ("{rescue} 1", 6, "refused"),
    ("{rescue} 1 --clean", 2, "usage"),
    ("{rescue} --clean --dry-run", 2, "usage"),
    ("{rescue} --clean --plan {folder}/plan", 2, "usage"),
    ("{rescue} 1 999 --yes", 1, "container_not_found"),
    ("{rescue} 1 --rate fast --yes", 2, "usage"),
    ("{rescue} 1 --rate -1 --yes", 2, "usage"),
    ("{rescue} 1 --rate nan --yes", 2, "usage"),
    ("{rescue} 1 --listen nonsense --yes", 2, "usage"),
    ("{rescue} 1 --listen 127.0.0.1:99999 --yes", 2, "usage"),
    ("{rescue} 1 --listen 192.0.2.1:24000 --yes", 2, "config_invalid"),
    ("{rescue} 1 --listen {scm} --yes", 2, "config_invalid"),
    ("{rescue} 1 --plan {folder} --yes", 2, "usage"),
    ("{rescue} 1 --plan s3://bucket/plan --yes", 2, "usage"),
    ("{rescue} 1 --plan {folder}/none/plan --yes", 1, "disk_failed"),
    ("{rescue} 1 --plan /proc/plan --yes", 1, "disk_failed"),
    ("{rescue} 1 --datanode-port 0 --yes", 2, "usage"),
    ("{rescue} 1 --datanode-port 65536 --yes", 2, "usage"),
    ("{rescue} 1 --datanode-port 1 --yes", 5, "rescue_incomplete"),
    ("diagnose 1 --after 1 --cluster {scm}", 2, "usage"),
    ("diagnose --after -1 --cluster {scm}", 2, "usage"),
    ("diagnose --after 9223372036854775808 --cluster {scm}", 2, "usage"),
    ("diagnose --rate x --cluster {scm}", 2, "usage"),
    ("diagnose --out {folder} --cluster {scm}", 2, "usage"),
    ("diagnose --out {folder}/none/file --cluster {scm}", 1, "disk_failed"),
    ("diagnose --out /dev/null --cluster {scm}", 1, "disk_failed"),
    ("diagnose --out {folder}/text --cluster {scm}", 1, "results_invalid"),
    ("diagnose --out {folder}/other --cluster {scm}", 2, "usage"),
    ("diagnose --out {folder}/edited --cluster {scm}", 1, "results_invalid"),
    ("diagnose --out {folder}/forged --cluster {scm}", 1, "results_invalid"),
    ("container list --state FOO --cluster {scm}", 2, "usage"),
    ("container list --limit 0 --cluster {scm}", 2, "usage"),
    ("container list --after 9223372036854775808 --cluster {scm}", 2, "usage"),
    ("container diff x --cluster {scm}", 2, "usage"),
    ("container diff 999 --cluster {scm}", 1, "container_not_found"),
    ("reconcile --cluster {scm}", 2, "usage"),
    ("reconcile 1 --cluster {scm}", 6, "refused"),
    ("reconcile 1 --settle x --yes --cluster {scm}", 2, "usage"),
    ("reconcile 1 --settle -1s --yes --cluster {scm}", 2, "usage"),
    ("reconcile 1 --settle 0 --yes --cluster {scm}", 2, "usage"),
    ("reconcile 1 --per-datanode 0 --yes --cluster {scm}", 2, "usage"),
    ("reconcile 1 --per-hour -1 --yes --cluster {scm}", 2, "usage"),
    ("reconcile 1 --all-diverged --yes --cluster {scm}", 2, "usage"),
    ("reconcile 1 --status --cluster {scm}", 2, "usage"),
    ("reconcile 1 --wait --yes --cluster {scm}", 2, "usage"),
    ("reconcile 1 --yes --controller 127.0.0.1:1 --cluster {scm}", 2, "usage"),
    ("reconcile 1 --settle 5s --yes", 2, "usage"),
    ("doctor --cluster {scm} {folder}", 2, "usage"),
]
# Their message says what to do.
_HINTLESS = ("usage", "disk_failed")


@pytest.mark.parametrize(("words", "status", "code"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_mistake_is_an_error_by_name_and_changes_nothing(
    words: str, status: int, code: str, cluster: Cluster
) -> None:
    before, files = cluster.state(), {one.name for one in cluster.folder.iterdir()}
    found, document = cluster.run(words)
    errors = document["errors"]
    assert isinstance(errors, list)
    assert (found, [error["code"] for error in errors][:1]) == (status, [code])
    assert all(error["message"].isprintable() for error in errors)
    assert all(error["hint"] for error in errors if error["code"] not in _HINTLESS)
    assert cluster.state() == before
    assert {one.name for one in cluster.folder.iterdir()} - files <= {"state"}
    assert not list(cluster.folder.glob("state/treefold/rescue/*/container-*"))


@pytest.mark.parametrize("cluster_id", ["/tmp/x", "..", "../../x", "", "a/b", "\x1b[2J", "c" * 300])
def test_a_cluster_id_that_is_a_path_makes_no_folder(cluster_id: str, cluster: Cluster) -> None:
    cluster.twin.live.scm.cluster_id = cluster_id
    status, document = cluster.run("{rescue} 1 --dry-run")
    assert (status, document["errors"][0]["code"]) == (1, "remote_protocol")
    assert not (cluster.folder / "state").exists()
