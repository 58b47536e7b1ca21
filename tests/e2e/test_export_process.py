"""An agent as a real process exports its chunk table by itself, and a command does so
beside it.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.fs as pa_fs
import pytest

from chunktable.errors import ChunkTableError
from chunktable.manifest import Manifest
from chunktable.reader import latest_manifest, tables_in
from merkle.tree import root_hex
from tests.support.processes import ROOT, TreefoldProcess
from tests.support.tables import current_rows, trees_of
from tests.support.volumes import OZONE, state_of, unpack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
LOCAL = pa_fs.LocalFileSystem()


def settings(folder: Path, volume: Path, hold: str, interval: str) -> Path:
    path = folder / "agent.toml"
    path.write_text(
        f'state_folder = "{folder / "state"}"\nlisten = "127.0.0.1:0"\nmetrics = "127.0.0.1:0"\n'
        f'[[volumes]]\npath = "{volume}"\nhold = "{hold}"\n[scan]\nenabled = false\n'
        f"[repair]\nenabled = {str(hold == 'owner').lower()}\n"
        f'[export]\nto = "{folder / "to"}"\ninterval_s = "{interval}"\n'
    )
    return path


def latest(to: Path) -> Manifest | None:
    try:
        (table,) = tables_in(LOCAL, str(to))
        return latest_manifest(LOCAL, table)
    except (ChunkTableError, ValueError):
        return None


def roots(to: Path) -> dict[int, str]:
    (table,) = tables_in(LOCAL, str(to))
    trees = trees_of(current_rows(LOCAL, table, latest_manifest(LOCAL, table)))
    return {
        container_id: root_hex(tree.data_checksum)
        for (_, container_id), tree in trees.items()
        if tree
    }


def expected(moment: str, node: str) -> dict[int, str]:
    rows = json.loads((OZONE / "expected.json").read_text())[moment]
    return {row["containerID"]: row["treeFileRoot"] for row in rows if row["datanode"] == node}


def events(process: TreefoldProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in process.stderr.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("hold", ["read-only", "owner"])
def test_an_agent_exports_now_and_then_and_a_command_beside_it(tmp_path: Path, hold: str) -> None:
    volume = unpack("healthy", tmp_path / "volumes") / "dn1" / "volume1"
    config = settings(tmp_path, volume, hold, "1s")
    before = state_of(volume)
    with TreefoldProcess(
        tmp_path / "run", "agent", "run", "--config", str(config), "--log-format", "json"
    ) as agent:
        agent.address()
        wait_until(
            lambda: (found := latest(tmp_path / "to")) is not None and found.sequence >= 2,
            "two exports",
        )
        done = subprocess.run(
            [
                *(sys.executable, "-m", "admin.cli", "agent", "export-checksums"),
                *("--config", str(config), "--to", str(tmp_path / "beside"), "--json"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["tables"][0]["containers"] == 6
        assert roots(tmp_path / "beside") == expected("healthy", "dn1")
        assert agent.stop(signal.SIGTERM) == 0
    # Now that no export replaces it any more.
    assert roots(tmp_path / "to") == expected("healthy", "dn1")
    exports = [line for line in events(agent) if line["event"] == "export_finished"]
    assert exports[0]["rows"] == exports[0]["rows_written"]
    assert exports[1]["rows_written"] == 0
    assert hold == "owner" or state_of(volume) == before


def test_a_bucket_that_cannot_be_reached_keeps_no_agent_from_its_work(tmp_path: Path) -> None:
    volume = unpack("healthy", tmp_path / "volumes") / "dn1" / "volume1"
    config = settings(tmp_path, volume, "read-only", "1s")
    config.write_text(
        config.read_text().replace(
            f"{tmp_path / 'to'}", "s3://b/p?endpoint_override=127.0.0.1:1&scheme=http"
        )
    )
    with TreefoldProcess(
        tmp_path / "run", "agent", "run", "--config", str(config), "--log-format", "json"
    ) as agent:
        agent.address()
        wait_until(
            lambda: any(line["event"] == "export_failed" for line in events(agent)), "the failure"
        )
        (first, *_) = [line for line in events(agent) if line["event"] == "export_failed"]
        assert first["error_code"] == "destination_failed"
        assert agent.stop(signal.SIGTERM) == 0


def test_an_export_that_cannot_be_done_is_logged_and_counted_and_the_agent_goes_on(
    tmp_path: Path,
) -> None:
    volume = unpack("healthy", tmp_path / "volumes") / "dn1" / "volume1"
    (tmp_path / "to").write_text("not a folder")
    config = settings(tmp_path, volume, "read-only", "1s")
    with TreefoldProcess(
        tmp_path / "run", "agent", "run", "--config", str(config), "--log-format", "json"
    ) as agent:
        agent.address()

        def failed() -> list[dict[str, object]]:
            return [line for line in events(agent) if line["event"] == "export_failed"]

        wait_until(lambda: len(failed()) >= 2, "two failures")
        assert failed()[0]["error_code"] == "disk_failed"
        assert agent.process.poll() is None
        assert agent.stop(signal.SIGTERM) == 0
