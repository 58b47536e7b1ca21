"""`treefold demo`: real processes on loopback heal real replicas, and then the disk is
asked whether it is true.

One controller and an agent per datanode are started on copies of volumes that real
Ozone datanodes wrote. Every replica is scanned, `treefold reconcile` is run, every
replica is scanned again, everything is stopped, and the volumes are read once more
without any of it (admin.demo.offline_check).
"""

import json
import os
import re
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from admin.demo.cluster import LocalCluster, ScannedReplica
from admin.demo.damage import DamageMethod, inflict
from admin.demo.offline_check import prove
from admin.demo.result import AgentKill, DemoResult, listed, report
from merkle.comparison import compare
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.replica import ContainerReplica
from merkle.tree import ContainerId, ContainerTree, root_hex
from repair.picture import cells, legend, strips
from runtime.errors import DiskError, UsageError
from runtime.output import console, print_json

_VOLUME = "volume1"
# Slow enough that an agent can be killed between two of its writes.
_SLOW_BYTES_PER_SECOND = 48 << 10


@dataclass(frozen=True, slots=True)
class _DemoOptions:
    """What the command line asked for."""

    fixture: Path | None = None
    keep: Path | None = None
    pictures: bool = True
    damage: DamageMethod | None = None
    # The agent to kill, counted from 1.
    kill: int | None = None


class _Demo:
    """One run, from the unpacked volumes to the proof."""

    def __init__(self, options: _DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._started = time.monotonic()
        self.outcome = DemoResult()

    def run(self) -> DemoResult:
        """Heal the volumes and prove it; the outcome says what came of it.

        Raises:
            UsageError: the folders given are not what they should be; nothing was
                started.
            ReconcileError: a process failed.
        """
        with (
            tempfile.TemporaryDirectory(prefix="treefold-demo-") as name,
            self._work_folder(Path(name)) as work,
        ):
            scratch = Path(name)
            volumes = self._volumes(work)
            reference = None if self._options.fixture else _unpacked("healthy", scratch / "healthy")
            self.outcome.replicas = tuple(volumes)
            if self._options.damage:
                self.outcome.inflicted = inflict(self._options.damage, volumes, scratch / "damage")
                for one in self.outcome.inflicted:
                    at = f", block {one.block_id} at byte {one.offset}" if one.block_id else ""
                    self._say(
                        f"added damage: {one.damage.value} on {one.replica}, container"
                        f" {one.container_id}{at}"
                    )
            with LocalCluster(volumes, scratch / "processes") as cluster:
                self._say(
                    f"started 1 controller and {len(volumes)} agents on {', '.join(volumes)},"
                    " loopback only"
                )
                self._heal(cluster)
            for log in (
                log for path in volumes.values() for log in path.glob("hdds/*/*/container.db/LOG*")
            ):
                # What RocksDB says of its own doings is no part of the data.
                log.unlink()
            self.outcome.proof = prove(volumes, scratch / "proof", reference=reference)
            self._conclude(reference is not None)
        self.outcome.elapsed_s = time.monotonic() - self._started
        return self.outcome

    def _heal(self, cluster: LocalCluster) -> None:
        self.outcome.before = cluster.scan(_held(cluster))
        self._show("scanned", cluster, self.outcome.before)
        eligible = []
        for view in cluster.containers():
            if view.ruling.is_ok:
                eligible.append(str(view.container_id))
            else:
                self.outcome.refused[view.container_id] = view.ruling.eligibility.value
                self._say(f"container {view.container_id} is not eligible: {view.ruling.message}")
        if eligible and self._options.kill is not None:
            with self._killer(cluster, list(self.outcome.replicas)[self._options.kill - 1]):
                self._reconcile(cluster, eligible)
            # What the killed agent could not finish in the first run it finishes in the
            # next one.
            self.outcome.jobs.clear()
        if eligible:
            self._reconcile(cluster, eligible)
        self.outcome.after = cluster.scan(_held(cluster))
        self._show("rescanned", cluster, self.outcome.after)
        # What was in no tree, and one replica put together from other replicas' files,
        # the rest can see only now.
        before = {
            (replica.replica, replica.container_id): replica.data_checksum
            for replica in self.outcome.before
        }
        changed = {
            r.container_id
            for r in self.outcome.after
            if before.get((r.replica, r.container_id)) != r.data_checksum
        }
        if again := [name for name in eligible if int(name) in self.outcome.diverged & changed]:
            self._reconcile(cluster, again)
            self.outcome.after = cluster.scan(_held(cluster))
            self._show("rescanned", cluster, self.outcome.after)

    def _reconcile(self, cluster: LocalCluster, container_ids: Sequence[str]) -> None:
        self._say(f"treefold reconcile {' '.join(container_ids)} --yes --wait")
        _, answer = cluster.command(
            "reconcile", *container_ids, "--yes", "--wait", "--reason", "demo"
        )
        self.outcome.jobs += answer["data"]["jobs"]
        for job in self.outcome.jobs:
            container_id = ContainerId(int(str(job["containerID"])))
            self.outcome.verdicts[container_id] = Verdict(str(job["verdict"] or "UNKNOWN"))

    @contextmanager
    def _killer(self, cluster: LocalCluster, victim: str) -> Iterator[None]:
        """Make the victim slow, kill it after its first write, and start it again at
        full speed.
        """
        cluster.stop_agent(victim)
        cluster.start_agent(victim, bytes_per_second=_SLOW_BYTES_PER_SECOND)
        over = threading.Event()
        audit = cluster.audit_file(victim)

        def watch() -> None:
            while not _writes(audit):
                if over.wait(0.001):
                    return
            cluster.kill_agent(victim)
            after_s, writes = time.monotonic() - self._started, _writes(audit)
            self._say(f"killed the agent of {victim} after its first write; starting it again")
            cluster.start_agent(victim)
            self.outcome.kill = AgentKill(
                victim, after_s, len(writes), ContainerId(writes[0]["container"])
            )

        with ThreadPoolExecutor(1) as pool:
            watched = pool.submit(watch)
            try:
                yield
            finally:
                over.set()
            # An error of the watcher is one of the demo.
            watched.result()
        if self.outcome.kill is None:
            self._say(f"the agent of {victim} had nothing to write, so it was not killed")
            cluster.stop_agent(victim)
            cluster.start_agent(victim)

    def _conclude(self, compared: bool) -> None:
        proof = self.outcome.proof
        assert proof is not None
        against = (
            "records, files, trees as undamaged"
            if compared
            else "every window as recorded, replicas equal"
        )
        for flaw in proof.flaws:
            if flaw.container_id in self.outcome.unhealed:
                self._say(f"container {flaw.container_id} on {flaw.replica}: {flaw.text}")
        for extra in proof.surplus:
            where = f"container {extra.container_id} on {extra.replica}, block {extra.block_id}"
            self._say(
                f"{where}: {extra.length_bytes} bytes behind the last recorded chunk, left as"
                " they are"
            )
        for container_id in self.outcome.unverifiable:
            self._say(
                f"container {container_id} has no recorded checksums: unverifiable, left alone"
            )
        if self.outcome.healed:
            self._say(f"read again without any agent: {listed(self.outcome.healed)}: {against}")
        if self.outcome.lost:
            self._say(
                f"nobody holds what {listed(self.outcome.lost)} lost: unrecoverable, left as it is"
            )
        if self.outcome.conflicts:
            self._say(
                f"records of {listed(self.outcome.conflicts)} contradict each other: in conflict,"
                " left as it is"
            )

    def _show(self, verb: str, cluster: LocalCluster, scanned: Sequence[ScannedReplica]) -> None:
        faults = sum(len(replica.findings) for replica in scanned)
        self._say(f"{verb} {len(scanned)} replicas: {faults} findings")
        for replica in scanned:
            if replica.refusal:
                self._say(
                    f"container {replica.container_id} on {replica.replica} was not scanned:"
                    f" {replica.refusal}"
                )
        if not self._options.pictures:
            return
        for container_id in sorted({replica.container_id for replica in scanned}):
            replicas = [replica for replica in scanned if replica.container_id == container_id]
            trees = dict(_trees(cluster, replicas))
            if not trees:
                continue
            comparison = compare(trees)
            beside = {
                r.replica: f"{root_hex(r.data_checksum):>8}  {r.state}"
                for r in replicas
                if r.replica in trees
            }
            self._console.print(
                Text(f"\n    container {container_id}  {comparison.verdict.value}", "bold")
            )
            self._console.print(Padding(strips(cells(trees, comparison), beside), (0, 0, 0, 4)))
        self._console.print(Padding(legend(), (1, 0, 1, 4)))

    def _say(self, text: str) -> None:
        line = f"[{time.monotonic() - self._started:5.1f}s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _work_folder(self, scratch: Path) -> Iterator[Path]:
        """Where the volumes are healed: the folder to keep, if one is asked for, or one
        that goes with the rest.
        """
        keep = self._options.keep
        if keep is None:
            yield scratch / "volumes"
            return
        if os.path.lexists(keep) and (not keep.is_dir() or any(keep.iterdir())):
            raise UsageError(f"{keep} is not an empty folder", hint="Name a new folder for --keep.")
        try:
            yield keep
        except BaseException:
            # Half-healed volumes would be taken for healed ones.
            shutil.rmtree(keep, ignore_errors=True)
            raise

    def _volumes(self, work: Path) -> dict[str, Path]:
        fixture = self._options.fixture
        if fixture is None:
            volumes = _unpacked("damaged", work)
            self._require_agent(len(volumes))
            return volumes
        found = sorted(
            (
                path
                for path in fixture.glob("dn*")
                if path.name[2:].isdigit() and (path / _VOLUME / "hdds").is_dir()
            ),
            key=lambda path: int(path.name[2:]),
        )
        if len(found) < 2:
            raise UsageError(
                f"{fixture} does not hold the volumes of two or more datanodes",
                hint=(
                    "It should have folders dn1/volume1, dn2/volume1 and so on, each a datanode's"
                    " volume."
                ),
            )
        self._require_agent(len(found))
        volumes = {path.name: work / path.name / _VOLUME for path in found}
        try:
            for path in found:
                shutil.copytree(path / _VOLUME, volumes[path.name], symlinks=True)
        except (OSError, shutil.Error) as error:
            raise DiskError(f"{fixture} cannot be copied to {work}: {error}") from error
        return volumes

    def _require_agent(self, agents: int) -> None:
        if self._options.kill and self._options.kill > agents:
            raise UsageError(f"there is no agent {self._options.kill}: the fixture has {agents}")


def _unpacked(moment: str, folder: Path) -> dict[str, Path]:
    """One of the packaged moments of a real cluster, unpacked: its volumes by
    datanode.
    """
    with (
        as_file(files("admin") / "data" / f"{moment}.tar.xz") as archive,
        tarfile.open(archive) as packed,
    ):
        # An attribute, not an argument: Python 3.11 before 3.11.4, Debian 12's, knows
        # neither and has no such filter.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder, [member for member in packed if member.name.startswith("dn")])
    return {path.name: path / _VOLUME for path in sorted(folder.glob("dn*"))}


def _writes(audit: Path) -> list[dict[str, int]]:
    """The lines of an audit file that tell of bytes written, not of deletes."""
    lines = map(json.loads, audit.read_text().splitlines() if audit.exists() else ())
    return [line for line in lines if line["length"]]


def _held(cluster: LocalCluster) -> dict[str, dict[ContainerId, ContainerReplica]]:
    """The replicas of each agent as it reported them, by the name of its volume."""
    names = cluster.names_by_datanode()
    held: dict[str, dict[ContainerId, ContainerReplica]] = {name: {} for name in names.values()}
    for view in cluster.containers():
        for replica in view.replicas:
            held[names[replica.datanode.peer]][view.container_id] = replica.replica
    return held


def _trees(
    cluster: LocalCluster, replicas: Sequence[ScannedReplica]
) -> Iterator[tuple[str, ContainerTree]]:
    """The trees that there are, by replica: one whose folder is damaged has none."""
    for replica in replicas:
        with suppress(ReconcileError):
            yield replica.replica, cluster.tree(replica.replica, replica.container_id)


@click.command()
@click.option(
    "--fixture",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=(
        "A folder with dn1/volume1, dn2/volume1 and so on: volumes of stopped datanodes. A copy is"
        " healed. Default: six damaged containers that come with Treefold."
    ),
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Leave the healed volumes in this new folder, as dn1/volume1 ...",
)
@click.option(
    "--damage",
    type=click.Choice([damage.value for damage in DamageMethod]),
    help="Before healing, add damage of this kind; named in the output.",
)
@click.option(
    "--kill",
    type=click.IntRange(min=1),
    metavar="N",
    help="Kill the agent of the Nth datanode (SIGKILL).",
)
@click.option(
    "--during",
    type=click.Choice(["repair"]),
    help=(
        "When --kill strikes: after the agent's first write. It is started again and has to finish."
    ),
)
@click.option("--check", is_flag=True, help="Print no pictures; the exit status tells.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; what happens goes to stderr."
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw what is printed into this file.",
)
def demo(
    fixture: Path | None,
    keep: Path | None,
    damage: str | None,
    kill: int | None,
    during: str | None,
    check: bool,
    as_json: bool,
    svg: Path | None,
) -> None:
    """Heal damaged replicas of real Ozone containers, on loopback.

    Starts a controller and an agent per datanode on copies of volumes, scans, runs
    `treefold reconcile`, stops everything and proves the result by reading the volumes
    again. Ends by itself; nothing stays but what --keep names.

    Exit status: 0 all healed (what has no checksums is named and left alone), 4 if data
    are lost beyond every replica or replicas are in conflict, 1 otherwise.
    """
    if (kill is None) != (during is None):
        raise UsageError(
            "--kill and --during go together", hint="For example: --kill 2 --during repair"
        )
    out = Console(
        file=console(stderr=as_json).file,
        record=svg is not None,
        highlight=False,
        width=100 if svg else None,
    )
    options = _DemoOptions(
        fixture=fixture,
        keep=keep,
        pictures=not (check or as_json),
        damage=DamageMethod(damage) if damage else None,
        kill=kill,
    )
    outcome = _Demo(options, out).run()
    status = outcome.exit_status
    summary = {
        0: "HEALED",
        4: "NOT HEALED: data are lost on every replica, or replicas in conflict",
    }.get(status, "NOT HEALED")
    out.print(
        Text(f"[{outcome.elapsed_s:5.1f}s] {summary}", "bold green" if status == 0 else "bold red")
    )
    if svg:
        # Without the fonts that the picture would load from elsewhere: it has to be
        # seen without a network.
        svg.write_text(
            re.sub(
                r"@font-face \{.*?\}\s*", "", out.export_svg(title="treefold demo"), flags=re.DOTALL
            )
        )
    if as_json:
        print_json(
            {"schema_version": 1, "command": "demo", "ok": status == 0, "data": report(outcome)}
        )
    click.get_current_context().exit(status)
