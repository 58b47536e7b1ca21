"""`treefold tree show` and `check`: tree files, inside or outside of volumes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from admin.tree_sources import containers_of, open_paths, paths_of
from merkle.check import check_tree
from merkle.errors import TreeRefusedError
from merkle.tree import ContainerId, ContainerTree, root_hex
from ozone.containers import Container
from protos.convert import container_id_of_tree, tree_from_bytes
from runtime.disk import Disk
from runtime.errors import DatabaseError
from runtime.json_numbers import exact
from runtime.output import JsonObject, print_line, print_table


@dataclass(frozen=True, slots=True)
class LocatedTreeFile:
    """A tree file. If it is in a volume, `container` is its container."""

    name: str
    path: Path
    container_id: ContainerId | None
    container: Container | None = None

    def parse(self) -> tuple[ContainerId, ContainerTree]:
        """The container ID and the tree in the file.

        Raises:
            TreeRefusedError: the file is not a valid tree.
            DiskError: the file cannot be read.
        """
        raw = Disk().read(self.path)
        container_id = (
            self.container_id if self.container_id is not None else container_id_of_tree(raw)
        )
        return container_id, tree_from_bytes(raw, container_id)

    def check(self) -> "TreeFileCheck":
        """Check the tree against all rules, and its root against the database.

        Raises:
            DiskError: the file cannot be read.
        """
        checked = TreeFileCheck(self.container_id)
        recorded = None
        if self.container is not None:
            try:
                recorded = self.container.counters().data_checksum
            except DatabaseError as error:
                checked.notes.append(error.message)
        length = Disk().length(self.path)
        if length is None:
            # Ozone builds trees later than containers. With a root in the database, the
            # tree existed and is lost.
            if recorded is not None:
                checked.reasons.append("missing")
            else:
                checked.notes.append("no tree was built yet")
            checked.exists = False
            return checked
        if length == 0:
            checked.reasons.append("empty")
            return checked
        try:
            checked.container_id, stored = self.parse()
            if stored.data_checksum is None:
                checked.notes.append("the tree has no root: only deletions were recorded so far")
            else:
                checked.root = root_hex(stored.data_checksum)
            check_tree(stored)
        except TreeRefusedError as error:
            checked.reasons.append(error.reason)
            checked.notes.append(error.message)
            return checked
        if None not in (recorded, stored.data_checksum) and recorded != stored.data_checksum:
            checked.reasons.append("root_differs_from_database")
            checked.notes.append(f"the database has {root_hex(recorded)}")
        return checked


@dataclass(slots=True)
class TreeFileCheck:
    """The result of checking one tree file, which is well formed if there are no
    `reasons`. The data that it describes are not read.
    """

    container_id: ContainerId | None
    root: str = ""
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    exists: bool = True

    @property
    def verdict(self) -> str:
        """What was found, and what was not looked at."""
        found = "well formed" if self.exists else "no tree"
        return ", ".join(self.reasons) or f"{found}; data not read"

    def json(self, path: Path) -> JsonObject:
        """The check as a JSON object."""
        return {
            "containerID": self.container_id,
            "path": str(path),
            "dataChecksum": self.root or None,
            "reasons": self.reasons,
            "notes": self.notes,
            "dataRead": False,
        }


@contextmanager
def stored_trees(names: Sequence[str], ids: Sequence[int]) -> Iterator[list[LocatedTreeFile]]:
    """The tree files at these paths: files, or those of containers in volumes. With
    `ids`, only those of these containers.
    """
    files = [name for name in names if os.path.isfile(name)]
    with open_paths(paths_of([name for name in names if name not in files])) as places:
        found = [_lone_file(name) for name in files]
        lone = {file.container_id for file in found}
        for place, container_id in (
            containers_of(places, [i for i in ids if i not in lone]) if places else ()
        ):
            container = place.store.get(container_id)
            found.append(LocatedTreeFile(place.name, container.tree_path, container_id, container))
        yield [file for file in found if not ids or file.container_id in ids]


def _lone_file(name: str) -> LocatedTreeFile:
    """A tree file outside of a volume. Its container ID is in its name, otherwise in
    its content.
    """
    stem = Path(name).name.removesuffix(".tree")
    named = ContainerId(int(stem)) if stem.isascii() and stem.isdigit() and len(stem) < 20 else None
    return LocatedTreeFile(name, Path(name), named)


def tree_json(container_id: ContainerId, stored: ContainerTree) -> JsonObject:
    return {
        "containerID": container_id,
        "dataChecksum": None if stored.data_checksum is None else root_hex(stored.data_checksum),
        "blocks": [
            {
                "blockID": exact(block.block_id),
                "dataChecksum": root_hex(block.data_checksum),
                "deleted": block.deleted,
                "chunks": [
                    {
                        "offset": chunk.offset,
                        "length": chunk.length_bytes,
                        "dataChecksum": root_hex(chunk.data_checksum),
                        "checksumMatches": chunk.checksum_matches,
                    }
                    for chunk in block.chunks
                ],
            }
            for block in stored.blocks
        ],
    }


def print_tree(name: str, container_id: ContainerId, stored: ContainerTree) -> None:
    root = "none" if stored.data_checksum is None else root_hex(stored.data_checksum)
    deleted = sum(block.deleted for block in stored.blocks)
    print_line(
        f"{name}: container {container_id}, root {root}, {len(stored.blocks) - deleted} blocks,"
        f" {deleted} deleted"
    )
    rows: list[tuple[object, ...]] = []
    for block in stored.blocks:
        state = "deleted" if block.deleted else "live"
        rows.append((block.block_id, state, root_hex(block.data_checksum), "", "", "", ""))
        rows += [
            (
                "",
                "",
                "",
                chunk.offset,
                chunk.length_bytes,
                root_hex(chunk.data_checksum),
                "matches" if chunk.checksum_matches else "corrupt",
            )
            for chunk in block.chunks
        ]
    columns = ("BLOCK", "STATE", "CHECKSUM", "OFFSET", "LENGTH", "CHUNK", "DATA")
    if rows:
        print_table(columns, rows, numbers=("BLOCK", "CHECKSUM", "OFFSET", "LENGTH", "CHUNK"))
