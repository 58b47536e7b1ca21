"""Automatic mode over a real Ozone cluster without agents, against one command after
another: `python -m benchmarks.bench_drive [--containers N] [--json]`.

The cluster has three datanodes with heartbeats of a second. One replica of each
container has a damaged byte that SCM knows of. `treefold scm run --cluster` heals N
of them unattended. Beside it an operator heals N others in order: for each `ozone admin
container reconcile ID`, a look at SCM's roots until they are equal or 20 seconds went
by, and the command again.
"""

import shutil
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import click

from benchmarks.measure import Report, Samples
from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster, first_cluster
from tests.support.ozone_containers import closed_with, damage, diverged
from tests.support.processes import TreefoldProcess
from tests.support.s3_servers import S3Endpoint

_HOUR_S = 3600.0
_LOOK_S = 0.2
# Of an operator who waits for one container.
_PATIENCE_S = 20.0
_TIMEOUT_S = 1800.0
_SETTINGS = """\
listen = "127.0.0.1:0"
orders_per_datanode = {at_once}
[automatic]
enabled = true
jobs_max = {at_once}
[cluster]
scms = ["{scm}"]
settle_s = "8s"
poll_s = "1s"
read_every_s = "5s"
"""


@click.command()
@click.option("--containers", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--at-once", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, containers: int, at_once: int, as_json: bool) -> None:
    """Measure both, and print the report."""
    if shutil.which("java") is None:
        print("skipped: there is no Java for a cluster", file=sys.stderr)
        return
    with first_cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        gateway = S3Endpoint(f"http://{cluster.s3_address}", "any", "thing")
        made = closed_with(cluster, gateway.fresh_bucket(), [200_000], count=2 * containers)
        # The others are damaged later: automatic mode would heal them too.
        damage(cluster, made[:containers])
        ours = Samples("automatic mode", (_automatic(cluster, made[:containers], folder, at_once),))
        damage(cluster, made[containers:])
        peer = Samples("ozone admin, one by one", (_one_by_one(cluster, made[containers:]),))
    notes = (f"{containers} containers each, {at_once} at a datanode at once",)
    report = Report("Driving Ozone's reconciliation", notes)
    report.add("healed", "containers/hour", ours, peer)
    report.show(as_json=as_json)


def _automatic(
    cluster: OzoneCluster, containers: list[ContainerId], folder: str, at_once: int
) -> float:
    """Containers in an hour, from the start of the process to the last equal root."""
    settings = Path(folder) / "controller.toml"
    settings.write_text(_SETTINGS.format(scm=cluster.scm_address, at_once=at_once))
    words = ("--config", str(settings), "--state-folder", str(Path(folder) / "state"))
    begun_s = time.monotonic()
    with (
        TreefoldProcess(Path(folder) / "logs", "scm", "run", *words),
        closing(ScmClient([cluster.scm_address])) as scm,
    ):
        assert _are_equal(scm, containers, _TIMEOUT_S), "automatic mode left some diverged"
        return len(containers) * _HOUR_S / (time.monotonic() - begun_s)


def _one_by_one(cluster: OzoneCluster, containers: list[ContainerId]) -> float:
    begun_s = time.monotonic()
    with closing(ScmClient([cluster.scm_address])) as scm:
        for container_id in containers:
            while not _are_equal(scm, [container_id], 0.0):
                assert time.monotonic() - begun_s < _TIMEOUT_S, "some never become equal"
                cluster.admin("container", "reconcile", str(container_id))
                _are_equal(scm, [container_id], _PATIENCE_S)
    return len(containers) * _HOUR_S / (time.monotonic() - begun_s)


def _are_equal(scm: ScmClient, containers: list[ContainerId], timeout_s: float) -> bool:
    """Whether the replicas of all are equal within this time."""
    end_s = time.monotonic() + timeout_s
    while diverged(scm, containers):
        if time.monotonic() >= end_s:
            return False
        # SCM tells of no change by itself.
        time.sleep(_LOOK_S)
    return True


if __name__ == "__main__":
    main()
