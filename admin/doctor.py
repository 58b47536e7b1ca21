"""`treefold doctor`: check this machine and a datanode's volumes, without changing
anything.

It shows which libraries compute the checksums. Of each volume it reads VERSION,
descriptors, lock and, through a shadow in a temporary folder, the database. For each
volume it shows whether an agent could own it or only read it.
"""

import platform
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import click

from admin.clusters import cluster_option
from admin.command_result import command_result
from merkle.checksum import implementations
from merkle.errors import ReconcileError
from ozone.containers import Container, ContainerStore
from ozone.errors import (
    ContainerNotFoundError,
    ContainerUnsupportedError,
    DescriptorError,
    VolumeError,
)
from ozone.rocks_lock import lock_holder
from ozone.site import check_unsecured, read_site, volumes_of
from ozone.volume import Hold, Volume, open_volume, permission_hint
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError, UsageError
from runtime.output import print_json, print_line, print_table

LIBRARIES = ("rocksdict", "grpcio", "protobuf", "numpy", "fastcrc", "xxhash")
_FINDINGS = 3
_SECURITY_UNKNOWN = "unknown, since no volume shows it; give --ozone-conf"


@dataclass(slots=True)
class VolumeDiagnosis:
    """The state of one volume; `problems` are texts, each of which needs attention."""

    path: str
    datanode_id: str = ""
    cluster_id: str = ""
    states: Counter[str] = field(default_factory=Counter)
    erasure_coded: int = 0
    without_tree: int = 0
    not_supported: int = 0
    holder_pid: int | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def possible(self) -> str:
        """How an agent could open the volume now."""
        if not self.datanode_id:
            return "nothing"
        return "read-only" if self.holder_pid is not None or self.problems else "read-only or owner"


def examine(path: Path, scratch: Path, database_volumes: Sequence[Path] = ()) -> VolumeDiagnosis:
    """Check one volume. Faults are in the diagnosis' `problems`."""
    diagnosis, disk = VolumeDiagnosis(str(path)), Disk()
    try:
        volume = open_volume(
            path,
            hold=Hold.READ_ONLY,
            state_folder=scratch,
            disk=disk,
            database_volumes=database_volumes,
        )
    except (VolumeError, DiskError) as error:
        diagnosis.problems.append(_with_hint(error))
        return diagnosis
    with volume:
        diagnosis.datanode_id, diagnosis.cluster_id = volume.datanode_id, volume.cluster_id
        _examine_database(volume, diagnosis)
        store = ContainerStore(volume, disk)
        try:
            ids = store.ids()
        except DiskError as error:
            diagnosis.problems.append(_with_hint(error))
            return diagnosis
        for container_id in ids:
            try:
                _examine_container(store.open(container_id), diagnosis)
            except ContainerUnsupportedError:
                diagnosis.not_supported += 1
            except (ContainerNotFoundError, DescriptorError, DiskError) as error:
                diagnosis.states["UNREADABLE"] += 1
                diagnosis.problems.append(f"container {container_id}: {_with_hint(error)}")
    return diagnosis


def _examine_container(container: Container, diagnosis: VolumeDiagnosis) -> None:
    has_tree = container.disk.length(container.tree_path) is not None
    diagnosis.states[container.state.value] += 1
    diagnosis.erasure_coded += container.replica_index > 0
    diagnosis.without_tree += container.state.is_closed and not has_tree


def _with_hint(error: ReconcileError) -> str:
    hint = error.hint
    if error.facts.get("denied"):
        hint = permission_hint(Path(str(error.facts["path"])))
    return f"{error.message}. {hint}" if hint else error.message


def _examine_database(volume: Volume, diagnosis: VolumeDiagnosis) -> None:
    try:
        diagnosis.holder_pid = lock_holder(volume.database.path / "LOCK")
    except DatabaseError as error:
        diagnosis.problems.append(_with_hint(error))


@click.command()
@click.option(
    "--volume",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="The root of a data volume. May be repeated.",
)
@click.option(
    "--ozone-conf",
    type=click.Path(exists=True, path_type=Path),
    help="ozone-site.xml or its folder: checks the volumes that it configures.",
)
@cluster_option()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(
    paths: tuple[Path, ...], ozone_conf: Path | None, cluster: str | None, as_json: bool
) -> None:
    """Check this machine and a datanode's volumes, or a cluster; changes nothing.

    Shows which libraries compute the checksums. For each volume it shows the
    containers, the process that uses it, and how an agent could open it: as owner or
    read-only. A secured cluster (Kerberos, tokens, encryption) is refused; without
    --ozone-conf it is unknown whether it is one.

    With --cluster it asks a running cluster instead: its SCMs, and each datanode for
    the tree of one replica, which shows that its port can be reached and that its
    release has trees.

    Exit status: 0 no problems, 3 a volume or the cluster has problems, 6 the cluster is
    secured, 7 SCM is unreachable.
    """
    if cluster is not None:
        if paths or ozone_conf:
            raise UsageError("--cluster goes without --volume and --ozone-conf")
        # Imported here: a machine of a datanode need not reach SCM.
        from admin.cluster_health import check

        with command_result("doctor", as_json=as_json) as answer:
            check(cluster, answer)
        return
    volumes, databases = list(paths), list[Path]()
    security = _SECURITY_UNKNOWN
    if ozone_conf:
        site = read_site(ozone_conf)
        check_unsecured(site)
        security = f"none, by {site.file}"
        named, databases = volumes_of(site)
        volumes += [path for path in named if path not in volumes]
    with tempfile.TemporaryDirectory(prefix="treefold-doctor-") as scratch:
        examined = [
            examine(path, Path(scratch) / str(at), databases) for at, path in enumerate(volumes)
        ]
    machine = {
        "treefold": version("treefold"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    machine |= {name: version(name) for name in LIBRARIES}
    healthy = not any(diagnosis.problems for diagnosis in examined)
    if as_json:
        data = {
            "machine": machine,
            "kernels": implementations(),
            # Whether the cluster is; null is unknown.
            "secured": False if ozone_conf else None,
            "volumes": [_as_json(diagnosis) for diagnosis in examined],
        }
        print_json({"schema_version": 1, "command": "doctor", "ok": healthy, "data": data})
    else:
        print_diagnoses(machine, examined, security)
    click.get_current_context().exit(0 if healthy else _FINDINGS)


def _as_json(diagnosis: VolumeDiagnosis) -> dict[str, object]:
    return {
        "path": diagnosis.path,
        "datanodeID": diagnosis.datanode_id,
        "clusterID": diagnosis.cluster_id,
        "containers": dict(sorted(diagnosis.states.items())),
        "erasureCoded": diagnosis.erasure_coded,
        "closedWithoutTree": diagnosis.without_tree,
        "notSupported": diagnosis.not_supported,
        "holderPid": diagnosis.holder_pid,
        "possible": diagnosis.possible,
        "problems": diagnosis.problems,
    }


def print_diagnoses(
    machine: dict[str, str], examined: Sequence[VolumeDiagnosis], security: str
) -> None:
    """Print what `treefold doctor` found: versions of libraries, the security of the
    cluster, then the volumes.
    """
    print_line("  ".join(f"{name} {value}" for name, value in machine.items()))
    print_table(["checksum", "computed by"], implementations().items(), folded=["computed by"])
    print_line(f"Kerberos, tokens and encryption of Ozone: {security}")
    for diagnosis in examined:
        print_line("")
        print_line(f"volume {diagnosis.path}")
        for name, text in _described(diagnosis):
            print_line(f"  {name:11} {text}")


def _described(diagnosis: VolumeDiagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.datanode_id:
        counts = [f"{count} {state}" for state, count in sorted(diagnosis.states.items())]
        yield "datanode", diagnosis.datanode_id
        yield "cluster", diagnosis.cluster_id
        coded = f"{diagnosis.erasure_coded} erasure-coded"
        yield "containers", f"{', '.join(counts) or 'none'}; {coded}"
        if diagnosis.not_supported:
            yield "skipped", f"{diagnosis.not_supported} of an older schema or layout"
        yield "trees", f"{diagnosis.without_tree} closed containers have none yet"
        if diagnosis.holder_pid is not None:
            yield "in use", f"by process {diagnosis.holder_pid or 'unknown'}"
    yield "possible", diagnosis.possible
    for problem in diagnosis.problems:
        yield "problem", problem
