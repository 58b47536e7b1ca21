"""The systemd units are ones that systemd takes, are hardened, and run a command line
that treefold understands.
"""

import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from admin.cli import treefold
from runtime.exit_codes import ExitCode
from spark.addresses import check_master
from tests.support.long_running import (
    DEPLOY,
    EXECUTABLE,
    LONG_RUNNING,
    ROOT,
    command_line,
    services,
    unit_of,
)

FOLDER = DEPLOY / "systemd"
UNITS = sorted(unit for unit in FOLDER.iterdir() if unit.suffix in (".service", ".timer"))
DROP_IN = FOLDER / "owner.conf"
CONTAINERFILE = ROOT / "Containerfile"
# What a service of ours never needs. What each of them does, systemd.exec(5) says.
HARDENED = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "AmbientCapabilities": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectControlGroups": "yes",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "@system-service",
    "UMask": "0027",
}
# systemd's own measure, 0 to 100 in tenths of a point: below 20 it calls a service OK.
EXPOSURE_MAX = 20


def keys(unit: Path) -> dict[str, str]:
    """The keys of a unit, of all sections; none of ours is there twice."""
    found = re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def parsed(words: Sequence[str]) -> dict[str, object]:
    """The options of a command line. All types and requirements are checked; nothing is
    run.
    """
    left, command = list(words), treefold
    context = click.Context(treefold, info_name="treefold")
    while isinstance(command, click.Group):
        found = command.get_command(context, left.pop(0))
        assert found is not None
        command = found
    return dict(command.make_context(command.name, left, parent=context).params)


@pytest.mark.parametrize("unit", services(), ids=lambda unit: unit.name)
def test_what_a_unit_runs_is_understood(unit: Path) -> None:
    assert parsed(command_line(unit))


@pytest.mark.parametrize("unit", services(), ids=lambda unit: unit.name)
def test_a_unit_is_hardened(unit: Path) -> None:
    found = keys(unit)
    assert {key: found.get(key) for key in HARDENED} == HARDENED
    assert found["User"] != "root"


@pytest.mark.parametrize(("job", "folder"), [("sweep", "out"), ("verify", "state")])
def test_a_nightly_job_writes_where_it_may(job: str, folder: str) -> None:
    unit = FOLDER / f"treefold-{job}.service"
    options = parsed(command_line(unit))
    writable = [Path("/var/lib") / name for name in keys(unit)["StateDirectory"].split()]
    metrics = options["metrics_file"]
    assert isinstance(metrics, Path)
    assert [options[folder], metrics.parent] == writable


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


@pytest.mark.parametrize("name", ["treefold-sweep.yaml", "treefold-verify.yaml"])
def test_a_cron_job_runs_one_hardened_command_at_a_time(name: str) -> None:
    job = documents(name)[0]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    assert job["metadata"]["name"] == name.removesuffix(".yaml")
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert parsed(container["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["scratch"] == "/tmp"
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"USER {pod['securityContext']['runAsUser']}:" in CONTAINERFILE.read_text()
    guarded = container["securityContext"]
    assert guarded["capabilities"] == {"drop": ["ALL"]}
    assert guarded["readOnlyRootFilesystem"]
    assert not guarded["allowPrivilegeEscalation"]


def test_the_cron_job_of_a_verification_keeps_its_state() -> None:
    job, claim = documents("treefold-verify.yaml")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert parsed(container["args"])["state"] == Path(mounts["state"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    name = volumes["state"]["persistentVolumeClaim"]["claimName"]
    assert (claim["kind"], claim["metadata"]["name"]) == ("PersistentVolumeClaim", name)


def test_the_cron_job_of_a_sweep_continues_it_and_does_not_repeat_a_complete_one() -> None:
    (job,) = documents("treefold-sweep.yaml")
    spec = job["spec"]["jobTemplate"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    # Another pod has nothing of the first one's disk.
    assert not isinstance(parsed(container["args"])["out"], Path)
    (rule,) = [one for one in spec["podFailurePolicy"]["rules"] if one["action"] == "FailJob"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["operator"] == "In"
    final = {ExitCode.USAGE, ExitCode.FINDINGS, ExitCode.PARTLY}
    assert set(rule["onExitCodes"]["values"]) == final
    assert spec["backoffLimit"] > 0


def test_the_cron_job_of_a_sweep_shows_what_spark_needs() -> None:
    text = (DEPLOY / "kubernetes" / "treefold-sweep.yaml").read_text()
    shown = re.findall(r"^#   (.*)$", text, re.MULTILINE)
    added = yaml.safe_load("\n".join(shown))
    (job,) = documents("treefold-sweep.yaml")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    options = parsed([*pod["containers"][0]["args"], *added["args"]])
    assert (options["engine"], options["pack"]) == ("spark", Path("/opt/treefold/pack"))
    check_master(str(options["master"]))
    settings = options["settings"]
    assert isinstance(settings, tuple)
    assert all(re.fullmatch(r"spark(\.\w+)+=\S+", setting) for setting in settings)
    given = {one["name"] for one in added["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(added["args"]))) == given
    # The Spark of the executors is that of the driver.
    (image,) = [one for one in settings if one.startswith("spark.kubernetes.container.image=")]
    assert image.endswith(f":{version('pyspark')}")


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_long_running_process_says_when_it_is_ready_and_is_watched(command: str) -> None:
    found = keys(unit_of(command))
    assert (found["Type"], found["NotifyAccess"]) == ("notify", "main")
    assert found["WatchdogSec"].endswith("min")
    assert found["Restart"] == "on-failure"
    assert found["RestartPreventExitStatus"] == "2"
    assert int(found["StartLimitBurst"]) > 1
    # As many restarts as the limit allows must be possible within its interval.
    seconds = 60 * int(found["StartLimitIntervalSec"].removesuffix("min"))
    assert int(found["StartLimitBurst"]) * int(found["RestartSec"].removesuffix("s")) < seconds
    assert int(found["LimitNOFILE"]) >= 65536
    assert found["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_unit_documents_itself_with_a_page_that_is_there(command: str) -> None:
    page = keys(unit_of(command))["Documentation"]
    assert page == f"man:treefold-{command.replace(' ', '-')}(1)"


@pytest.mark.parametrize(
    "timer", [unit for unit in UNITS if unit.suffix == ".timer"], ids=lambda unit: unit.name
)
def test_a_timer_starts_a_unit_that_is_there(timer: Path) -> None:
    assert timer.with_suffix(".service") in UNITS


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units, and the drop-in of an agent that repairs, where systemd looks for
    them.
    """
    folder = tmp_path_factory.mktemp("units")
    for unit in UNITS:
        # Where it is not installed, it is not the unit that is wrong.
        (folder / unit.name).write_text(unit.read_text().replace(EXECUTABLE, "/bin/true"))
    drop_ins = folder / "treefold-agent.service.d"
    drop_ins.mkdir()
    (drop_ins / DROP_IN.name).write_text(DROP_IN.read_text())
    return folder


def analysed(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, words)], capture_output=True, text=True, check=False
    )


def test_systemd_takes_the_units(installed: Path) -> None:
    copies = sorted(path for path in installed.iterdir() if path.is_file())
    assert len(copies) == len(UNITS)
    done = analysed("verify", "--man=no", *copies)
    told = [
        line
        for line in done.stderr.splitlines()
        if str(installed) in line or any(copy.name in line for copy in copies)
    ]
    assert (done.returncode, told) == (0, [])


def test_systemd_calls_the_services_little_exposed(installed: Path) -> None:
    copies = sorted(installed.glob("*.service"))
    done = analysed("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", *copies)
    assert done.returncode == 0, done.stdout + done.stderr
