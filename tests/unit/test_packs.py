"""Copies of exports for the next night: many small ones in a file."""

import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from chunktable.errors import ChunkTableError
from chunktable.files import Files
from chunktable.manifest import FileKind, Manifest, TableFile, file_name
from chunktable.packs import PACKED_BYTES_MAX
from chunktable.reader import read_verified
from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from runtime.disk import Disk
from sweep.exports import KeepExports, export_folder, here, open_export, read_manifests

NOON = datetime(2026, 9, 1, 12, tzinfo=UTC)


def put_export(folder: Path, inventory: bytes) -> tuple[str, Manifest]:
    """An export with this inventory: the location of its manifest, and the manifest."""
    name = file_name(FileKind.CONTAINERS, 7, "0123abcd")
    checksum = fingerprint(inventory).hex()
    file = TableFile(name, FileKind.CONTAINERS, 0, len(inventory), checksum, NOON)
    manifest = Manifest(
        folder.name, 7, None, NOON, NOON, TreeSource.TREE, ("DS-1",), (), (file,), 0, 0
    )
    folder.mkdir(parents=True)
    (folder / name).write_bytes(inventory)
    (folder / manifest.name).write_bytes(manifest.to_bytes())
    return str(folder / manifest.name), manifest


def kept(out: Path, exports: Mapping[str, Manifest]) -> dict[str, str]:
    """The location of each copy."""
    texts = [KeepExports.text(p, one, one.datanode) for p, one in exports.items()]
    copied = KeepExports(out, Files(Disk()))(texts)
    return {row["place"]: row["copy"] for row in copied.to_pylist()}


def inventory_of(place: str) -> bytes:
    filesystem, folder = export_folder(place)
    (file,) = open_export(place)[2].of_kind(FileKind.CONTAINERS)
    return read_verified(filesystem, folder, file)


def test_small_exports_share_a_file_and_a_large_one_has_a_folder(tmp_path: Path) -> None:
    rng = random.Random(1)
    sizes = (*(rng.randrange(5000) for _ in range(20)), PACKED_BYTES_MAX, 0, 100)
    contents = {f"dn-{i}": rng.randbytes(size) for i, size in enumerate(sizes)}
    exports = dict(put_export(tmp_path / "to" / name, raw) for name, raw in contents.items())
    copies = kept(tmp_path / "out", exports)
    assert len(copies) == len(set(copies.values())) == len(sizes)
    for place, manifest in exports.items():
        _, _, copy = open_export(copies[place])
        assert copy == manifest
        assert inventory_of(copies[place]) == contents[manifest.datanode]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [names[0].partition("-")[0], *names[1:]] == ["copies", "dn-20"]


def test_an_export_whose_inventory_is_gone_or_another_has_no_copy(tmp_path: Path) -> None:
    exports = dict(put_export(tmp_path / "to" / f"dn-{i}", b"%d" % i) for i in range(3))
    (first, _, last) = exports
    next(Path(first).parent.glob("containers-*")).unlink()
    next(Path(last).parent.glob("containers-*")).write_bytes(b"3")
    (copy,) = kept(tmp_path / "out", exports).values()
    assert inventory_of(copy) == b"1"


@pytest.mark.parametrize("change", ["cut", "removed", "another byte"])
def test_a_damaged_pack_is_an_unreadable_table(tmp_path: Path, change: str) -> None:
    exports = dict(put_export(tmp_path / "to" / f"dn-{i}", b"%d" % i * 9) for i in range(2))
    first, last = kept(tmp_path / "out", exports).values()
    (pack,) = (tmp_path / "out").iterdir()
    raw = pack.read_bytes()
    if change == "removed":
        pack.unlink()
    else:
        pack.write_bytes(raw[:-1] + (b"x" if change == "another byte" else b""))
    with pytest.raises(ChunkTableError):
        inventory_of(last)
    if change != "removed":
        assert inventory_of(first) == b"0" * 9


def test_a_changed_manifest_is_not_what_it_was_read_from(tmp_path: Path) -> None:
    place, manifest = put_export(tmp_path / "dn-1", b"")
    read = open_export(place)[2]
    assert read.stored() == Path(place).read_bytes()
    other = replace(read, datanode="dn-2")
    assert other.stored() == replace(manifest, datanode="dn-2").to_bytes() != read.stored()


def test_manifests_that_others_read_are_those_that_one_reads_itself(tmp_path: Path) -> None:
    """More than a driver reads alone go to tasks, and their bytes come back."""
    place, manifest = put_export(tmp_path / "dn-1", b"")
    broken, _ = put_export(tmp_path / "dn-2", b"")
    Path(broken).write_bytes(Path(broken).read_bytes()[:-9])
    for places in ([place, broken], [place, broken] * 513):
        assert read_manifests(places, here) == {place: manifest}
