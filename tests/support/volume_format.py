"""A new, empty volume, as a datanode formats one."""

from pathlib import Path

from ozone.rocks import Database
from ozone.volume import Version
from runtime.disk import Disk


def format_volume(root: Path, version: Version, disk: Disk, *, created_ms: int) -> None:
    """A new, empty volume such as a datanode makes: VERSION, folders and database.

    Raises:
        DiskError, DatabaseError: it cannot be made, or there is one.
    """
    hdds = root / "hdds"
    working = hdds / version.cluster_id
    for folder in (
        working / "current",
        working / "tmp" / "disk-check",
        working / "tmp" / "deleted-containers",
    ):
        disk.make_folder(folder)
    Database.create(working / version.storage_id / "container.db", disk).close()
    lines = (
        # Java's properties begin with a comment, by custom the date.
        "#Treefold",
        f"clusterID={version.cluster_id}",
        "layOutVersion=1",
        f"storageID={version.storage_id}",
        f"datanodeUuid={version.datanode_id}",
        f"ctime={created_ms}",
    )
    # Last: a volume with a VERSION is a whole one.
    disk.replace(hdds / "VERSION", "".join(f"{line}\n" for line in lines).encode())
