"""Packs: files that hold the manifests and inventories of many small exports.

A file of its own for each takes longer to write than all that is in it. A pack is their
bytes, end to end. The location of a copy says where it lies:

    <folder>/copies-<unique>.pack/<offset>-<manifest>-<inventory>/<name>

with the lengths of both in bytes. So it reads like a folder with two files, and their
checksums are held against them as those of any other.
"""

import re
from uuid import uuid4

import pyarrow.fs as pa_fs

from chunktable.files import AnyPath, Files
from chunktable.manifest import manifest_sequence

# An export of more is not small. A process holds a pack of some hundreds.
PACKED_BYTES_MAX = 64 << 10

_NUMBER = "([0-9]{1,15})"
_PACKED = re.compile(rf"(.*/copies-[0-9a-f]{{32}}\.pack)/{_NUMBER}-{_NUMBER}-{_NUMBER}/([^/]+)")


class PackWriter:
    """Gathers the exports of one pack."""

    def __init__(self, folder: AnyPath, files: Files) -> None:
        self._path, self._files = folder / f"copies-{uuid4().hex}.pack", files
        self._held = list[bytes]()
        self._length = 0

    def add(self, name: str, manifest: bytes, inventory: bytes) -> str:
        """Take in an export whose manifest has this name; returns the location of its
        copy, which is there once the pack is closed.
        """
        place = f"{self._length}-{len(manifest)}-{len(inventory)}"
        self._held += (manifest, inventory)
        self._length += len(manifest) + len(inventory)
        return str(self._path / place / name)

    def close(self) -> None:
        """Write the pack, if there is anything in it.

        Raises:
            DiskError: it cannot be written.
        """
        if self._held:
            self._files.make_folder(self._path.parent)
            self._files.replace(self._path, b"".join(self._held))


def read_packed(filesystem: pa_fs.FileSystem, path: str) -> bytes | None:
    """The bytes of a file in a pack; None if the path is that of a file of its own.

    Raises:
        OSError: the pack cannot be read.
    """
    found = _PACKED.fullmatch(path)
    if found is None:
        return None
    pack, name = found[1], found[5]
    offset, manifest, inventory = map(int, found.groups()[1:4])
    with filesystem.open_input_file(pack) as file:
        if manifest_sequence(name) is not None:
            data: bytes = file.read_at(manifest, offset)
        else:
            data = file.read_at(inventory, offset + manifest)
    return data
