"""The volumes that real Ozone datanodes wrote: unpack them, and prove that nobody wrote into them."""

import os
import tarfile
from pathlib import Path

from merkle.checksum import fingerprint

DATA = Path(__file__).resolve().parents[1] / "golden" / "data" / "fixtures"
OZONE = DATA / "ozone-2.2.0"
OZONE_EC = DATA / "ozone-2.2.0-ec"


def unpack(archive: Path, target: Path) -> Path:
    """Unpack one moment into `target`, which then holds `dn1/volume1` and so on."""
    with tarfile.open(archive) as tar:
        # Not as an argument: Python 3.11.2, Debian 12's, does not know it.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(target)
    return target


def container_folder(volume: Path, container_id: int) -> Path:
    """Where a container lies in an unpacked volume."""
    (folder,) = volume.glob(f"hdds/CID-*/current/containerDir*/{container_id}")
    return folder


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every entry below a folder with its mode, time of change and content: equal iff nothing was touched."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = fingerprint(path.read_bytes()) if path.is_file() and not path.is_symlink() else b""
        found[os.fspath(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found
