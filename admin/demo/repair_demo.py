"""`treefold demo`: heal damaged replicas with real processes on loopback, and verify
the result on disk.

It starts a controller and an agent per datanode on copies of volumes that real Ozone
datanodes wrote. It scans every replica, runs `treefold reconcile`, scans again, stops
all processes, and reads the volumes once more (admin.demo.offline_check).
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from admin.demo.cluster import (
    VOLUME,
    LocalCluster,
    ScannedReplica,
    reported_replicas,
    unpack_volumes,
)
from admin.demo.damage import DamageMethod, inflict
from admin.demo.healed_picture import write_healed_picture
from admin.demo.offline_check import prove
from admin.demo.result import AgentKill, DemoResult, containers_text, report
from admin.option_types import WholeNumber
from merkle.comparison import compare
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.tree import ContainerId, ContainerTree, root_hex
from repair.picture import cells, legend, strips
from runtime.documents import parse_json
from runtime.errors import DiskError, UsageError
from runtime.exit_codes import ExitCode
from runtime.output import console, print_json

# Slow enough that an agent can be killed between two of its writes.
_SLOW_BYTES_PER_SECOND = 48 << 10


@dataclass(frozen=True, slots=True)
class _DemoOptions:
    """The options of the command line."""

    fixture: Path | None = None
    keep: Path | None = None
    pictures: bool = True
    svg: Path | None = None
    damage: DamageMethod | None = None
    # The agent to kill, counted from 1.
    kill: int | None = None


class _Demo:
    """One run of the demo, from the unpacked volumes to the proof."""

    def __init__(self, options: _DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._started = time.monotonic()
        self.outcome = DemoResult()
        # The trees after each scan, by container and replica.
        self._seen: list[dict[ContainerId, dict[str, ContainerTree]]] = []

    def run(self) -> DemoResult:
        """Heal the volumes, and verify them.

        Raises:
            UsageError: a folder is not usable; nothing was started.
            ReconcileError: a process failed.
        """
        with (
            tempfile.TemporaryDirectory(prefix="treefold-demo-") as name,
            self._work_folder(Path(name)) as work,
        ):
            scratch = Path(name)
            volumes = self._volumes(work)
            reference = (
                None if self._options.fixture else unpack_volumes("healthy", scratch / "healthy")
            )
            self.outcome.replicas = tuple(volumes)
            if self._options.damage:
                self.outcome.inflicted = inflict(self._options.damage, volumes, scratch / "damage")
                for one in self.outcome.inflicted:
                    at = f", block {one.block_id} at byte {one.offset}" if one.block_id else ""
                    self._print(
                        f"added damage: {one.damage.value} on {one.replica}, container"
                        f" {one.container_id}{at}"
                    )
            with LocalCluster(volumes, scratch / "processes") as cluster:
                self._print(
                    f"started 1 controller and {len(volumes)} agents on {', '.join(volumes)},"
                    " loopback only"
                )
                self._heal(cluster)
            for log in (
                log for path in volumes.values() for log in path.glob("hdds/*/*/container.db/LOG*")
            ):
                # RocksDB's own log files are not data.
                log.unlink()
            self.outcome.proof = prove(volumes, scratch / "proof", reference=reference)
            self._conclude(reference is not None)
        if self._options.svg is not None:
            write_healed_picture(self._options.svg, self.outcome, self._seen[0], self._seen[-1])
        self.outcome.elapsed_s = time.monotonic() - self._started
        return self.outcome

    def _heal(self, cluster: LocalCluster) -> None:
        self.outcome.before = cluster.scan(reported_replicas(cluster))
        self._show("scanned", cluster, self.outcome.before)
        eligible = []
        for view in cluster.containers():
            if view.ruling.is_ok:
                eligible.append(str(view.container_id))
            else:
                self.outcome.refused[view.container_id] = view.ruling.eligibility.value
                self._print(f"container {view.container_id} is not eligible: {view.ruling.message}")
        if eligible and self._options.kill is not None:
            with self._killer(cluster, list(self.outcome.replicas)[self._options.kill - 1]):
                self._reconcile(cluster, eligible)
            # The killed agent finishes its work in the next reconciliation.
            self.outcome.jobs.clear()
        if eligible:
            self._reconcile(cluster, eligible)
        self.outcome.after = cluster.scan(reported_replicas(cluster))
        self._show("rescanned", cluster, self.outcome.after)
        # A replica may have been rebuilt from files that were in no tree. The other
        # replicas can copy it only now.
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
            self.outcome.after = cluster.scan(reported_replicas(cluster))
            self._show("rescanned", cluster, self.outcome.after)

    def _reconcile(self, cluster: LocalCluster, container_ids: Sequence[str]) -> None:
        self._print(f"treefold reconcile {' '.join(container_ids)} --yes --wait")
        _, answer = cluster.command(
            "reconcile", *container_ids, "--yes", "--wait", "--reason", "demo"
        )
        self.outcome.jobs += answer["data"]["jobs"]
        for job in self.outcome.jobs:
            container_id = ContainerId(int(str(job["containerID"])))
            self.outcome.verdicts[container_id] = Verdict(str(job["verdict"] or "UNKNOWN"))

    @contextmanager
    def _killer(self, cluster: LocalCluster, victim: str) -> Iterator[None]:
        """Slow the agent down, kill it after its first write, and restart it at full
        speed.
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
            self._print(f"killed the agent of {victim} after its first write; starting it again")
            cluster.start_agent(victim)
            self.outcome.kill = AgentKill(
                victim, after_s, len(writes), ContainerId(writes[0]["container"])
            )

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                yield
            finally:
                over.set()
            # Raise an error of the thread here.
            watching.result()
        if self.outcome.kill is None:
            self._print(f"the agent of {victim} had nothing to write, so it was not killed")
            cluster.stop_agent(victim)
            cluster.start_agent(victim)

    def _conclude(self, compared: bool) -> None:
        proof = self.outcome.proof
        assert proof is not None
        against = (
            "equal to the undamaged volumes"
            if compared
            else "every window matches its record, and replicas are equal"
        )
        for flaw in proof.flaws:
            if flaw.container_id in self.outcome.unhealed:
                self._print(f"container {flaw.container_id} on {flaw.replica}: {flaw.text}")
        for extra in proof.surplus:
            where = f"container {extra.container_id} on {extra.replica}, block {extra.block_id}"
            self._print(
                f"{where}: {extra.length_bytes} bytes after the last recorded chunk were left as"
                " they are"
            )
        for container_id in self.outcome.unverifiable:
            self._print(
                f"container {container_id} has no recorded checksums: unverifiable, left alone"
            )
        if self.outcome.not_reconciled:
            self._print(
                f"read and checked, not reconciled: {containers_text(self.outcome.not_reconciled)}"
            )
        if self.outcome.healed:
            self._print(
                f"read again without any agent: {containers_text(self.outcome.healed)}: {against}"
            )
        if self.outcome.lost:
            self._print(
                f"no replica holds the data that {containers_text(self.outcome.lost)} lost:"
                " unrecoverable, left as it is"
            )
        if self.outcome.conflicts:
            self._print(
                f"records of {containers_text(self.outcome.conflicts)} contradict each other: in"
                " conflict, left as it is"
            )

    def _show(self, verb: str, cluster: LocalCluster, scanned: Sequence[ScannedReplica]) -> None:
        faults = sum(len(replica.findings) for replica in scanned)
        self._print(f"{verb} {len(scanned)} replicas: {faults} findings")
        for replica in scanned:
            if replica.refusal:
                self._print(
                    f"container {replica.container_id} on {replica.replica} was not scanned:"
                    f" {replica.refusal}"
                )
        if not self._options.pictures and self._options.svg is None:
            return
        seen = {
            container_id: dict(
                _trees(cluster, [one for one in scanned if one.container_id == container_id])
            )
            for container_id in sorted({replica.container_id for replica in scanned})
        }
        self._seen.append(seen)
        if self._options.pictures:
            self._draw(seen, scanned)

    def _draw(
        self,
        seen: Mapping[ContainerId, Mapping[str, ContainerTree]],
        scanned: Sequence[ScannedReplica],
    ) -> None:
        for container_id, trees in seen.items():
            replicas = [replica for replica in scanned if replica.container_id == container_id]
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
            drawn = strips(cells(trees, comparison), beside, self._console.width - 4)
            self._console.print(Padding(drawn, (0, 0, 0, 4)))
        self._console.print(Padding(legend(), (1, 0, 1, 4)))

    def _print(self, text: str) -> None:
        line = f"[{time.monotonic() - self._started:5.1f}s] {text}"
        # In a log a line stays one; on a terminal no word is broken.
        soft = not self._console.is_terminal
        self._console.print(line, markup=False, highlight=False, soft_wrap=soft)

    @contextmanager
    def _work_folder(self, scratch: Path) -> Iterator[Path]:
        """The folder in which the volumes are healed: that of --keep, otherwise a
        temporary one.
        """
        keep = self._options.keep
        if keep is None:
            yield scratch / "volumes"
            return
        if os.path.lexists(keep) and (not keep.is_dir() or any(keep.iterdir())):
            raise UsageError(
                f"{keep} is not an empty folder", hint="Choose a new folder for --keep."
            )
        try:
            yield keep
        except BaseException:
            # Partly healed volumes could be mistaken for healed ones.
            shutil.rmtree(keep, ignore_errors=True)
            raise

    def _volumes(self, work: Path) -> dict[str, Path]:
        fixture = self._options.fixture
        if fixture is None:
            volumes = unpack_volumes("damaged", work)
            self._require_agent(len(volumes))
            return volumes
        found = sorted(
            (
                path
                for path in fixture.glob("dn*")
                if path.name[2:].isdigit() and (path / VOLUME / "hdds").is_dir()
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
        volumes = {path.name: work / path.name / VOLUME for path in found}
        try:
            for path in found:
                shutil.copytree(path / VOLUME, volumes[path.name], symlinks=True)
        except (OSError, shutil.Error) as error:
            raise DiskError(f"{fixture} cannot be copied to {work}: {error}") from error
        return volumes

    def _require_agent(self, agents: int) -> None:
        if self._options.kill and self._options.kill > agents:
            raise UsageError(f"there is no agent {self._options.kill}: the fixture has {agents}")


def _writes(audit: Path) -> list[dict[str, int]]:
    """The lines of an audit file that record written bytes."""
    lines = map(parse_json, audit.read_text().splitlines() if audit.exists() else ())
    return [line for line in lines if line["kind"] == "write"]


def _trees(
    cluster: LocalCluster, replicas: Sequence[ScannedReplica]
) -> Iterator[tuple[str, ContainerTree]]:
    """The trees by replica, without replicas that have no tree."""
    for replica in replicas:
        with suppress(ReconcileError):
            yield replica.replica, cluster.tree(replica.replica, replica.container_id)


@click.command()
@click.option(
    "--fixture",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=(
        "A folder with the volumes of stopped datanodes as dn1/volume1, dn2/volume1 and so on; a"
        " copy is healed. Default: six damaged containers that come with Treefold."
    ),
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Keep the healed volumes in this new folder, as dn1/volume1 and so on.",
)
@click.option(
    "--damage",
    type=click.Choice([damage.value for damage in DamageMethod]),
    help="Add damage of this kind before healing; the output shows where.",
)
@click.option(
    "--kill",
    type=WholeNumber(min=1),
    metavar="N",
    help="Kill the agent of the Nth datanode with SIGKILL.",
)
@click.option(
    "--during",
    type=click.Choice(["repair"]),
    help=(
        "When to kill the agent: during its repair, after its first write. It is restarted and must"
        " finish."
    ),
)
@click.option("--check", is_flag=True, help="Print no pictures; for use in scripts.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to stderr."
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw the replicas before and after as a picture in this file.",
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
    `treefold reconcile`, stops all processes, and verifies the result by reading the
    volumes again. Keeps no files unless --keep is given.

    Erasure-coded containers are read and checked, but not reconciled: their replicas
    differ by design. They are listed, and do not count as healed.

    Exit status: 0 healed, apart from containers without checksums or not eligible,
    which are listed, 4 data are lost on every replica or replicas are in conflict, 6 no
    container is eligible, so none was reconciled, 1 otherwise.
    """
    if (kill is None) != (during is None):
        raise UsageError(
            "--kill and --during go together", hint="For example: --kill 2 --during repair"
        )
    out = Console(file=console(stderr=as_json).file, highlight=False)
    options = _DemoOptions(
        fixture=fixture,
        keep=keep,
        pictures=not (check or as_json),
        svg=svg,
        damage=DamageMethod(damage) if damage else None,
        kill=kill,
    )
    outcome = _Demo(options, out).run()
    status = outcome.exit_status
    style = {ExitCode.CLEAN: "bold green", ExitCode.REFUSED: "bold yellow"}.get(status, "bold red")
    out.print(Text(f"[{outcome.elapsed_s:5.1f}s] {outcome.summary}", style))
    if as_json:
        print_json(
            {"schema_version": 1, "command": "demo", "ok": status == 0, "data": report(outcome)}
        )
    click.get_current_context().exit(status)
