"""What `Disk` promises as durable is synced by the system."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.disk import Disk
from tests.support.disk import recorded_syncs

CHANGES: dict[str, tuple[Callable[[Disk, Path], None], list[str]]] = {
    "sync": (lambda disk, folder: disk.sync(folder / "file"), ["file"]),
    "sync of a folder": (lambda disk, folder: disk.sync_folder(folder), ["."]),
    "replace": (lambda disk, folder: disk.replace(folder / "file", b"new"), ["file.tmp", "."]),
    "make folder": (lambda disk, folder: disk.make_folder(folder / "a" / "b"), [".", "a"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_made_durable_is_synced_in_this_order(name: str, tmp_path: Path) -> None:
    change, expected = CHANGES[name]
    (tmp_path / "file").write_bytes(b"old")
    with recorded_syncs() as synced:
        change(Disk(), tmp_path)
    assert synced == [tmp_path / path for path in expected]
