"""`treefold sweep` from end to end: its answers, its exit status, and what a kill
leaves behind. A process is started where it is what is tried: each takes a second.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold as cli
from admin.demo.cluster import LocalCluster
from admin.demo.ground_truth import GroundTruth
from admin.demo.synthetic import SyntheticCluster, synthetic
from merkle.outcome import Verdict
from tests.support.sweeps import findings_of
from tests.support.volumes import unpack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def treefold(*words: object, check: int | None = None) -> Result:
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert check is None or done.exit_code == check, done.stderr
    return done


def said(*words: object, check: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(treefold(*words, "--json", check=check).stdout)
    return found


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GroundTruth]:
    """Exports of two nights, the second with damages."""
    folder = tmp_path_factory.mktemp("nights")
    cluster = SyntheticCluster(seed=12, datanodes=4, containers=60, blocks=4, chunks=4)
    synthetic(folder / "first", cluster, healthy=True)
    return folder, synthetic(folder / "second", cluster)


def test_night_after_night(tmp_path: Path, nights: tuple[Path, GroundTruth]) -> None:
    folder, truth = nights
    out, damaged = tmp_path / "out", [damage.container_id for damage in truth.damages]
    first = said("sweep", "run", "--table", folder / "first", "--out", out, check=0)
    assert (first["diverged"], first["containers"], first["skipped"]) == ([], 60, [])
    metrics = tmp_path / "sweep.prom"
    second = said(
        "sweep",
        "run",
        "--table",
        folder / "second",
        "--out",
        out,
        "--metrics-file",
        metrics,
        check=3,
    )
    assert second["diverged"] == damaged
    assert second["engine"] == "local"
    assert sum(second["verdicts"].values()) == 60
    assert second["findings"] == sum(second["findingsByKind"].values())
    assert 'sweep_containers{verdict="CONFLICT"} 1.0' in metrics.read_text()
    # Made by exports whose volumes were bought over years.
    assert all(
        f">{age}</text>" in Path(second["report"]).read_text()
        for age in ("1 to 6 months", "1 to 3 years")
    )
    shown = said("sweep", "show", "latest", "--out", out, check=0)
    assert shown["sweepID"] == second["sweepID"]
    assert [one["containerID"] for one in shown["containersDiverged"]] == damaged
    assert all(one["findings"] for one in shown["containersDiverged"])
    changes = said("sweep", "compare", first["sweepID"], second["sweepID"], "--out", out, check=3)
    assert {one["containerID"] for one in changes["new"]} == set(damaged)
    assert (changes["persisting"], changes["healed"], changes["unseen"]) == ([], [], [])
    back = said("sweep", "compare", second["sweepID"], first["sweepID"], "--out", out, check=0)
    # What changed in silence did so in one night, and nothing was mended.
    assert (
        back["healed"]
        == [one for one in changes["new"] if one["kind"] != "silent_change"]
        != changes["new"]
    )
    third = said("sweep", "run", "--table", folder / "second", "--out", out, check=3)
    later = said("sweep", "compare", second["sweepID"], third["sweepID"], "--out", out, check=3)
    assert (later["new"], later["persisting"], later["healed"]) == ([], back["healed"], [])
    for words in (("show", second["sweepID"]), ("compare", first["sweepID"], second["sweepID"])):
        people = treefold("sweep", *words, "--out", out).stdout
        assert all(str(container_id) in people for container_id in damaged)


def test_several_tables_may_follow_one_option_and_a_lost_one_is_partly_done(
    tmp_path: Path, nights: tuple[Path, GroundTruth]
) -> None:
    exports = sorted((nights[0] / "first").iterdir())
    found = said(
        "sweep", "run", "--out", tmp_path, "--table", *exports, nights[0] / "nothing", check=5
    )
    assert (found["containers"], found["diverged"]) == (60, [])
    assert [one["input"] for one in found["skipped"]] == [str(nights[0] / "nothing")]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("stray",),
        ("--volume", "x", "stray"),
        ("--table", "x", "--pack", "y"),
        ("--table", "x", "--engine", "spark", "--pack", "y"),
        ("--table", "x", "--engine", "spark", "--threads", "2"),
        ("--table", "x", "--engine", "spark", "--conf", "spark.cores.max"),
        ("--table", "x", "--metrics-file", "/nonexistent/sweep.prom"),
        ("--table", "/"),
    ],
)
def test_what_cannot_be_understood_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert (
        "error [usage]"
        in treefold("sweep", "run", "--out", tmp_path / "out", *words, check=2).stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--table", "hdfs://name/x"), "hdfs:// is not an address that is served"),
        (("--table", "ofs://om/volume/bucket"), "Use Ozone's S3 gateway"),
        (("--table", "hdfs:/x"), "hdfs:// is not an address that is served"),
        (("--table", "s3:/bucket/x"), "Write s3://BUCKET/PREFIX"),
        (("--table", "file:/tmp/x"), "Write file:///PATH"),
        (("--volume", "hdfs:/x"), "volumes are folders of this machine"),
        (("--table", "gs://bucket/x"), "gs:// is not an address that is served"),
        (("--volume", "s3://bucket/x"), "volumes are folders of this machine"),
        (("--table", "x", "--out", "s3://"), "it names no bucket"),
        (("--table", "x", "--out", "hdfs://name/x"), "hdfs:// is not an address that is served"),
        (("--table", "x", "--out", "ofs://om/x"), "Use Ozone's S3 gateway"),
        (("--table", "x", "--metrics-file", "s3://bucket/x.prom"), "is an address"),
    ],
)
def test_an_address_that_is_not_served_is_refused_at_once(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """In this process: starting another takes longer than the answer may."""
    out = () if "--out" in words else ("--out", str(tmp_path / "out"))
    with chdir(tmp_path):
        started = time.monotonic()
        done = CliRunner().invoke(cli, ["sweep", "run", *words, *out])
        assert time.monotonic() - started < 1
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_an_empty_word_is_no_folder(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "admin.cli",
        "sweep",
        "run",
        "--table",
        str(tmp_path),
        "--out",
        "",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "Invalid value for '--out'" in done.stderr


def test_what_is_not_there_has_a_name(tmp_path: Path) -> None:
    assert (
        "error [sweep_input]"
        in treefold("sweep", "run", "--out", tmp_path, "--table", "/no", check=1).stderr
    )
    assert (
        "error [sweep_not_found]"
        in treefold("sweep", "show", "latest", "--out", tmp_path, check=1).stderr
    )


@pytest.mark.parametrize("missing", ["pyarrow", "jinja2"])
def test_the_extra_that_sweeps_need_is_named(missing: str) -> None:
    program = (
        f"import sys\nsys.modules[{missing!r}] = None\nfrom admin.cli import treefold\n"
        "treefold.main(['sweep', 'run', '--table', 'x', '--out', 'y'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"error [usage]: {missing} is not installed\n  pip install 'treefold[sweep]'\n"
    )


def test_a_folder_that_cannot_be_made_has_a_name(
    tmp_path: Path, nights: tuple[Path, GroundTruth]
) -> None:
    words = ("sweep", "run", "--table", nights[0] / "first")
    assert (
        "error [disk_failed]"
        in treefold(*words, "--out", tmp_path / ("x" * 300) / "y", check=1).stderr
    )


@pytest.mark.crashes
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_interrupted_the_same_command_goes_on(
    tmp_path: Path, end: signal.Signals
) -> None:
    truth = synthetic(
        tmp_path / "table",
        SyntheticCluster(seed=2, datanodes=3, containers=4000, blocks=20, chunks=16),
    )
    # Whoever runs tests in the background has SIGINT ignored, and so has what they
    # start.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "admin.cli",
        "sweep",
        "run",
        "--threads",
        "1",
        "--json",
    ]
    words = ["--table", str(tmp_path / "table"), "--out", str(tmp_path / "out")]
    running = subprocess.Popen(
        [*command, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(
        lambda: any((tmp_path / "out").glob("work/*/plan.json")),
        "the sweep has a plan",
        timeout_s=60,
    )
    running.send_signal(end)
    running.communicate(timeout=60)
    assert running.returncode == (130 if end is signal.SIGINT else -signal.SIGKILL)
    assert list((tmp_path / "out").glob("summary/*")) == []
    done = treefold(*command[command.index("sweep") :], *words, check=3)
    summary = json.loads(done.stdout)
    assert f"resuming sweep {summary['sweepID']}" in done.stderr
    assert summary["rows"] == truth.rows
    assert findings_of(tmp_path / "out", summary["sweepID"]) == {
        damage.finding for damage in truth.damages
    }


@pytest.mark.parametrize("order", ["clustered", "shuffled"])
def test_the_demo_finds_what_was_done_and_nothing_else(order: str) -> None:
    words = ("--engine", "local", "--containers", 60, "--chunks", 4, "--order", order)
    found = said("sweep", "demo", *words, check=0)
    assert found["wrong"] == []
    assert found["damages"] == 6
    assert len(found["engines"]["local"]["diverged"]) == 6
    # It stays, when all else goes.
    report = Path(found["engines"]["local"]["report"])
    assert found["engines"]["local"]["sweepID"] in report.read_text()
    shutil.rmtree(report.parent)


def test_a_sweep_of_volumes_says_first_and_last_what_it_compared(tmp_path: Path) -> None:
    volumes = sorted(unpack("detected", tmp_path / "cluster").glob("dn*/volume1"))
    options = [word for path in volumes for word in ("--volume", str(path))]
    words = ("sweep", "run", *options, "--out", str(tmp_path / "out"))
    for source, told in (
        ("tree", "the stored trees of "),
        ("metadata", "the block records of 18 replicas, whose data were not read"),
        ("data", "read: the data of "),
    ):
        done = treefold(*words, "--source", source, check=3)
        first, *_, last = done.stdout.splitlines()
        assert first == last
        assert told in first
        assert ("To compare the data: --source data" in first) == (source != "data")
        if source == "tree":
            assert re.search(r"as of the last scans, \d+ \w+( to \d+ \w+)? old", first)
        done = treefold(*words, "--source", source, "--json", check=3)
        assert json.loads(done.stdout)["source"] == source
        assert done.stderr.splitlines().count(first) == 2 or source == "tree"
        assert done.stderr.count("compared: ") == 2


def test_a_controller_that_does_not_answer_leaves_the_sweep_complete(
    tmp_path: Path, nights: tuple[Path, GroundTruth]
) -> None:
    words = (
        "--table",
        nights[0] / "second",
        "--out",
        tmp_path,
        "--reconcile",
        "--controller",
        "127.0.0.1:1",
    )
    done = treefold("sweep", "run", *words, "--json", check=7)
    document = json.loads(done.stdout)
    assert document["diverged"] == [damage.container_id for damage in nights[1].damages]
    assert [error["code"] for error in document["errors"]] == ["controller_unavailable"]
    assert "error [controller_unavailable]" in done.stderr


@pytest.mark.parametrize(("moment", "source"), [("detected", "tree"), ("damaged", "data")])
def test_what_a_sweep_finds_repairable_is_repaired_and_the_next_one_finds_nothing(
    tmp_path: Path, moment: str, source: str
) -> None:
    volumes = {
        path.parent.name: path
        for path in sorted(unpack(moment, tmp_path / "cluster").glob("dn*/volume1"))
    }
    options = [word for path in volumes.values() for word in ("--volume", str(path))]
    words = ("sweep", "run", *options, "--source", source, "--out", str(tmp_path / "out"))
    with LocalCluster(volumes, tmp_path / "processes") as cluster:
        status, first = cluster.command(*words, "--reconcile")
        # Container 5 has no checksums, and nobody can tell.
        assert (status, first["diverged"]) == (3, [1, 2, 3, 4, 6])
        assert first["reconcile"] == {"jobs": 5, "refused": {}}
        deadline, jobs = time.monotonic() + 120, list[dict[str, Any]]()
        while not jobs or any(job["finishedAt"] is None for job in jobs):
            assert time.monotonic() < deadline, jobs
            jobs = cluster.command("job", "list")[1]["data"]["jobs"]
            # The controller's default: two orders under way at a datanode.
            at = Counter(
                one["id"]
                for job in jobs
                for one in job["datanodes"]
                if one["state"] in ("issued", "running")
            )
            assert all(count <= 2 for count in at.values())
        assert sorted(job["containerID"] for job in jobs) == first["diverged"]
        assert {(job["state"], job["requestedBy"], job["reason"]) for job in jobs} == {
            ("DONE", "treefold sweep (unproven)", f"sweep {first['sweepID']}")
        }
        status, second = cluster.command(*words, "--reconcile")
        # Nor does it take for a silent change what was repaired.
        assert (status, second["diverged"], second["findings"]) == (0, [], 0)
        assert second["reconcile"] == {"jobs": 0, "refused": {}}
    changes = said(
        "sweep", "compare", first["sweepID"], "latest", "--out", tmp_path / "out", check=0
    )
    assert {one["containerID"] for one in changes["healed"]} == {1, 2, 3, 4, 6}


def test_what_the_controller_refuses_is_counted_by_reason(tmp_path: Path) -> None:
    volumes = {
        path.parent.name: path
        for path in sorted(unpack("healthy", tmp_path / "cluster").glob("dn*/volume1"))
    }
    # Containers that no agent has reported.
    truth = synthetic(
        tmp_path / "table",
        SyntheticCluster(seed=12, datanodes=4, containers=60, blocks=4, chunks=4),
    )
    repairable = [damage for damage in truth.damages if damage.verdict is Verdict.REPAIRABLE]
    with LocalCluster(volumes, tmp_path / "processes") as cluster:
        words = ("--table", str(tmp_path / "table"), "--out", str(tmp_path / "out"), "--reconcile")
        status, said = cluster.command("sweep", "run", *words)
    assert status == 3
    assert said["reconcile"] == {"jobs": 0, "refused": {"CONTAINER_NOT_FOUND": len(repairable)}}
