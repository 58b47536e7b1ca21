"""`treefold agent export-checksums`: what it prints, how it ends, and that it never
changes or breaks a volume.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.fs as pa_fs
import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from chunktable.reader import latest_manifest, read_events, read_faults
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from ozone.treefile import TreeFiles
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from tests.support.handmade import NODE, STORAGE, VolumeMaker, whole
from tests.support.processes import ROOT
from tests.support.tables import current_rows, trees_of
from tests.support.volumes import MOMENTS, flip, owned, state_of, unpack

LOCAL = pa_fs.LocalFileSystem()


@pytest.fixture
def made(tmp_path: Path) -> VolumeMaker:
    """A volume with containers 1 and 2, each with block 20 of two chunks."""
    with VolumeMaker(tmp_path / "v") as made:
        for container_id in (1, 2):
            made.container(container_id)
            made.block(container_id, 20, whole(3000), whole(3000, 3000))
    return made


def run(*words: object, status: int = 0) -> Result:
    result = CliRunner().invoke(treefold, ["agent", "export-checksums", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    assert result.exit_code == status, result.output
    return result


def table(to: Path, datanode: str = NODE) -> str:
    return str(to / datanode)


def trees(to: Path, datanode: str = NODE) -> dict[tuple[str, int], ContainerTree | None]:
    folder = table(to, datanode)
    return trees_of(current_rows(LOCAL, folder, latest_manifest(LOCAL, folder)))


@pytest.mark.parametrize("moment", MOMENTS)
def test_volumes_of_real_datanodes_are_exported_untouched(tmp_path: Path, moment: str) -> None:
    folder, to = unpack(moment, tmp_path / "volumes"), tmp_path / "to"
    before = state_of(folder)
    volumes = [
        word for node in ("dn1", "dn2", "dn3") for word in ("--volume", folder / node / "volume1")
    ]
    (tables,) = [json.loads(run(*volumes, "--to", to, "--json").stdout)["tables"]]
    assert state_of(folder) == before
    assert [row["containers"] for row in tables] == [6, 6, 6]
    for row in tables:
        assert Path(row["location"], row["manifest"]).exists()
        assert len(trees(to, row["datanode"])) == 6


def test_a_summary_says_what_was_done(made: VolumeMaker, tmp_path: Path) -> None:
    words = ("--volume", made.root, "--to", tmp_path / "to")
    assert "2 containers, 4 rows; 2 changed" in run(*words).stdout
    second = run(*words)
    assert "2 containers, 4 rows; 0 changed" in second.stdout
    assert "manifest-000000002.json" in second.stdout
    assert "2 changed" in run(*words, "--full").stdout


def test_findings_and_lost_volumes_have_an_exit_status(made: VolumeMaker, tmp_path: Path) -> None:
    to = tmp_path / "to"
    flip(made.block_file(1, 20), 100)
    assert run("--volume", made.root, "--to", to).exit_code == 0
    run("--volume", made.root, "--to", to, "--source", "data", status=3)
    (fault,) = read_faults(LOCAL, table(to), latest_manifest(LOCAL, table(to))).to_pylist()
    assert (fault["kind"], fault["container_id"], fault["block_id"]) == ("CORRUPT_CHUNK", 1, 20)
    partly = run(
        "--volume", made.root, "--volume", tmp_path / "nothing", "--to", to, "--json", status=5
    )
    assert "error [volume_invalid]" in partly.stderr
    (skipped,) = json.loads(partly.stdout)["skipped"]
    assert (skipped["path"], skipped["error_code"]) == (str(tmp_path / "nothing"), "volume_invalid")
    assert latest_manifest(LOCAL, table(to)).skipped[0].path == str(tmp_path / "nothing")
    assert (
        "error [volume_invalid]"
        in run("--volume", tmp_path / "nothing", "--to", to, status=1).stderr
    )


def test_a_volume_that_was_in_the_table_and_is_not_given_is_named(
    made: VolumeMaker, tmp_path: Path
) -> None:
    to, other = tmp_path / "to", tmp_path / "other"
    shutil.copytree(made.root, other)
    version = other / "hdds" / "VERSION"
    shutil.move(
        other / "hdds" / made.working.name / STORAGE, other / "hdds" / made.working.name / "DS-2"
    )
    version.write_text(version.read_text().replace(STORAGE, "DS-2"))
    run("--volume", made.root, "--volume", other, "--to", to)
    assert set(trees(to)) == {(STORAGE, 1), (STORAGE, 2), ("DS-2", 1), ("DS-2", 2)}
    assert "warning: the volume DS-2 was not given" in run("--volume", made.root, "--to", to).stderr
    assert set(trees(to)) == {(STORAGE, 1), (STORAGE, 2)}


def test_what_makes_no_sense_is_refused_and_nothing_is_written(
    made: VolumeMaker, tmp_path: Path
) -> None:
    to, copy = tmp_path / "to", shutil.copytree(made.root, tmp_path / "copy")
    before = state_of(made.root)
    for words in (
        ("--to", to),
        ("--volume", made.root),
        ("--volume", made.root, "--config", tmp_path / "agent.toml", "--to", to),
        ("--volume", made.root, "--volume", made.root, "--to", to),
        ("--volume", made.root, "--volume", copy, "--to", to),
        ("--volume", made.root, "--to", made.root / "hdds" / "table"),
        ("--volume", made.root / "hdds", "--to", made.root / "table"),
        ("--volume", made.root, "--to", "gopher://x"),
        ("--volume", made.root, "--to", "s3://key:secret@bucket"),
        ("--volume", made.root, "--to", to, "--source", "gossip"),
        ("--config", tmp_path / "nothing.toml"),
    ):
        run(*words, status=2)
    assert state_of(made.root) == before
    assert not to.exists()


def test_a_place_that_cannot_be_written_is_named(made: VolumeMaker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert (
        "error [disk_failed]"
        in run("--volume", made.root, "--to", tmp_path / "file", status=1).stderr
    )


def settings(tmp_path: Path, volume: Path, hold: str = "read-only", more: str = "") -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(
        f'state_folder = "{tmp_path / "state"}"\n{more}\n[[volumes]]\npath = "{volume}"\nhold ='
        f' "{hold}"\n[export]\nto = "{tmp_path / "to"}"\n'
    )
    return path


def test_settings_name_place_source_and_what_the_agent_keeps(
    made: VolumeMaker, tmp_path: Path
) -> None:
    path = settings(tmp_path, made.root)
    run("--config", path)
    # An agent that never ran keeps nothing, and gets no folder.
    assert not (tmp_path / "state").exists()
    assert {tree.data_checksum for tree in trees(tmp_path / "to").values() if tree} != {None}
    ours = ContainerTree.of(ContainerId(1), [BlockTree.live(BlockId(20), [ChunkTree(0, 3000, 5)])])
    disk = Disk()
    with open_volume(
        made.root, hold=Hold.READ_ONLY, state_folder=tmp_path / "state", disk=disk
    ) as volume:
        TreeFiles(volume, disk).update(ContainerId(1), ours)
        scans = volume.state_folder / "scans"
        scans.mkdir()
        (scans / "1.json").write_text('{"at_ms": 1800000000000, "findings": []}')
    (tmp_path / "state" / "audit.jsonl").write_text(
        '{"time": "2026-11-22T03:00:00.000+00:00", "container": 1, "block": 20, "offset": 0,'
        ' "length": 1024, "source": "dn-2", "job": "j1"}\n'
    )
    run("--config", path)
    assert trees(tmp_path / "to")[(STORAGE, 1)] == ours
    manifest = latest_manifest(LOCAL, table(tmp_path / "to"))
    rows = current_rows(LOCAL, table(tmp_path / "to"), manifest)
    first = next(row for row in rows.to_pylist() if row["container_id"] == 1)
    assert first["scanned_at"].timestamp() == 1_800_000_000
    (event,) = read_events(LOCAL, table(tmp_path / "to"), manifest).to_pylist()
    assert (event["kind"], event["block_id"], event["length"]) == ("repair", 20, 1024)
    # Flags win over the file.
    run("--config", path, "--to", tmp_path / "elsewhere", "--source", "metadata")
    assert trees(tmp_path / "elsewhere")[(STORAGE, 1)] != ours


def test_an_export_runs_beside_an_owner(made: VolumeMaker, tmp_path: Path) -> None:
    path = settings(tmp_path, made.root, "owner")
    with owned(made.root, tmp_path / "state"):
        before = state_of(made.root)
        run("--config", path)
        assert state_of(made.root) == before
    assert len(trees(tmp_path / "to")) == 2


def test_who_exports_nothing_needs_no_extra_and_who_does_is_told_of_it(
    made: VolumeMaker, tmp_path: Path
) -> None:
    program = (
        "import sys\nsys.modules['pyarrow'] = None\nfrom admin.cli import treefold\n"
        f"words = ['--volume', {str(made.root)!r}, '--to', {str(tmp_path / 'to')!r}]\n"
        "treefold.main(['agent', 'export-checksums', *words])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "error [usage]: pyarrow is not installed" in done.stderr
    assert "treefold[sweep]" in done.stderr
    assert not (tmp_path / "to").exists()


def test_an_agent_that_is_to_export_without_the_extra_does_not_start(
    made: VolumeMaker, tmp_path: Path
) -> None:
    config = settings(tmp_path, made.root, more='listen = "127.0.0.1:0"')
    program = (
        "import sys\nsys.modules['pyarrow'] = None\nfrom admin.cli import treefold\n"
        f"treefold.main(['agent', 'run', '--config', {str(config)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 2
    assert "error [config_invalid]: export.to: pyarrow is not installed" in done.stderr
