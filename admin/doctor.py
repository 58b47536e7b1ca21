"""`treefold doctor`: look at this machine and at a datanode's volumes, touching
nothing.

What is read: the processor and libraries that the checksums will run on; each volume's
VERSION, descriptors and lock; its database through a shadow outside the volume. What
could be done with each volume is said in one word.
"""

import platform
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import click

from merkle.checksum import implementations
from ozone.containers import ContainerStore
from ozone.errors import (
    ContainerNotFoundError,
    ContainerUnsupportedError,
    DescriptorError,
    VolumeError,
)
from ozone.rocks import lock_holder
from ozone.volume import Hold, Volume, open_volume
from runtime.disk import Disk
from runtime.errors import ConfigError, DatabaseError, DiskError
from runtime.output import console, print_json, print_table

LIBRARIES = ("rocksdict", "grpcio", "protobuf", "numpy", "fastcrc", "xxhash")
# A site file of Ozone is some kilobytes; a larger one is something else.
_SITE_BYTES_MAX = 4 << 20
_FINDINGS = 3


@dataclass(slots=True)
class VolumeDiagnosis:
    """What was seen of one volume; `problems` are sentences, each a reason to look
    closer.
    """

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
        """What an agent could do here now."""
        if not self.datanode_id:
            return "nothing"
        return "read-only" if self.holder_pid is not None or self.problems else "read-only or owner"


def examine(path: Path, scratch: Path, database_volumes: Sequence[Path] = ()) -> VolumeDiagnosis:
    """Look at one volume; whatever is wrong with it becomes a problem in the answer."""
    seen, disk = VolumeDiagnosis(str(path)), Disk()
    try:
        volume = open_volume(
            path,
            hold=Hold.READ_ONLY,
            state_folder=scratch,
            disk=disk,
            database_volumes=database_volumes,
        )
    except (VolumeError, DiskError) as error:
        seen.problems.append(error.message)
        return seen
    with volume:
        seen.datanode_id, seen.cluster_id = volume.datanode_id, volume.cluster_id
        _examine_database(volume, seen)
        store = ContainerStore(volume, disk)
        for container_id in store.ids():
            try:
                container = store.open(container_id)
            except ContainerUnsupportedError:
                seen.not_supported += 1
                continue
            except (ContainerNotFoundError, DescriptorError, DiskError) as error:
                seen.states["UNREADABLE"] += 1
                seen.problems.append(f"container {container_id}: {error.message}")
                continue
            found = container.descriptor
            seen.states[container.state.value] += 1
            seen.erasure_coded += found.replica_index > 0
            tree = container.metadata_folder / f"{container_id}.tree"
            seen.without_tree += container.state.is_closed and not tree.exists()
    return seen


def _volumes_of_site(folder: Path) -> tuple[list[Path], list[Path]]:
    """The data volumes and the dedicated database volumes that an `ozone-site.xml`
    names.

    Raises:
        ConfigError: there is no such file, or it is none that Hadoop would read.
    """
    file = folder / "ozone-site.xml" if folder.is_dir() else folder
    try:
        raw = file.read_bytes()[: _SITE_BYTES_MAX + 1]
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", path=str(file)) from error
    # Entities have no use in a site file, and could make it expand without end.
    if len(raw) > _SITE_BYTES_MAX or b"<!DOCTYPE" in raw or b"<!ENTITY" in raw:
        raise ConfigError(
            f"{file} is no site file: too large, or with a document type", path=str(file)
        )
    try:
        # As text, so that no other encoding hides a document type.
        root = ElementTree.fromstring(raw.decode())
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not XML in UTF-8: {error}", path=str(file)) from error
    values = {
        (item.findtext("name") or "").strip(): (item.findtext("value") or "").strip()
        for item in root.iter("property")
    }
    try:
        data, databases = (
            _folders(values.get(f"hdds.datanode.{key}", "")) for key in ("dir", "container.db.dir")
        )
    except ValueError as error:
        raise ConfigError(
            f"{file} names a folder by what is no URL: {error}", path=str(file)
        ) from error
    if not data:
        raise ConfigError(f"{file} does not set hdds.datanode.dir", path=str(file))
    return data, databases


def _folders(value: str) -> list[Path]:
    # Each may have a storage type in front, `[SSD]`, and be written as a file: URL.
    places = (place.strip().rpartition("]")[2] for place in value.split(",") if place.strip())
    return [Path(urlsplit(place).path if place.startswith("file:") else place) for place in places]


def _examine_database(volume: Volume, seen: VolumeDiagnosis) -> None:
    try:
        path = volume.database.path
    except DatabaseError as error:
        seen.problems.append(error.message)
        return
    seen.holder_pid = lock_holder(path / "LOCK")


@click.command()
@click.option(
    "--volume",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A data volume; may be given again.",
)
@click.option(
    "--ozone-conf",
    type=click.Path(exists=True, path_type=Path),
    help="A folder with ozone-site.xml, to find volumes by.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(paths: tuple[Path, ...], ozone_conf: Path | None, as_json: bool) -> None:
    """Look at this machine and at a datanode's volumes, touching nothing.

    Exit status: 0 all well, 3 if something about a volume needs a closer look.
    """
    volumes, databases = list(paths), list[Path]()
    if ozone_conf:
        named, databases = _volumes_of_site(ozone_conf)
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
    healthy = not any(seen.problems for seen in examined)
    if as_json:
        data = {
            "machine": machine,
            "kernels": implementations(),
            "volumes": [_as_json(seen) for seen in examined],
        }
        print_json({"schema_version": 1, "command": "doctor", "ok": healthy, "data": data})
    else:
        _print(machine, examined)
    click.get_current_context().exit(0 if healthy else _FINDINGS)


def _as_json(seen: VolumeDiagnosis) -> dict[str, object]:
    return {
        "path": seen.path,
        "datanodeID": seen.datanode_id,
        "clusterID": seen.cluster_id,
        "containers": dict(sorted(seen.states.items())),
        "erasureCoded": seen.erasure_coded,
        "closedWithoutTree": seen.without_tree,
        "notSupported": seen.not_supported,
        "holderPid": seen.holder_pid,
        "possible": seen.possible,
        "problems": seen.problems,
    }


def _print(machine: dict[str, str], examined: list[VolumeDiagnosis]) -> None:
    out = console()
    out.print("  ".join(f"{name} {value}" for name, value in machine.items()))
    print_table(["checksum", "computed by"], implementations().items(), folded=["computed by"])
    for seen in examined:
        out.print(f"\nvolume {seen.path}")
        if seen.datanode_id:
            states = (
                ", ".join(f"{count} {state}" for state, count in sorted(seen.states.items()))
                or "none"
            )
            out.print(f"  datanode    {seen.datanode_id} of cluster {seen.cluster_id}")
            out.print(f"  containers  {states}; {seen.erasure_coded} erasure-coded")
            if seen.not_supported:
                out.print(f"  skipped     {seen.not_supported} of an older schema or layout")
            out.print(f"  trees       {seen.without_tree} closed containers have none yet")
            if seen.holder_pid is not None:
                out.print(f"  in use      by process {seen.holder_pid or 'unknown'}")
        out.print(f"  possible    {seen.possible}")
        for problem in seen.problems:
            out.print(f"  problem     {problem}")
