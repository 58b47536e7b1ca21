"""A manifest proves itself, a table is the highest one that is whole, and nothing else
is read.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet
import pytest

from chunktable.errors import ChunkTableError
from chunktable.manifest import (
    AuditMark,
    FileKind,
    Manifest,
    SkippedVolume,
    TableFile,
    check_counts,
    file_name,
    is_file_name,
    manifest_name,
    manifest_sequence,
    parse_manifest,
)
from chunktable.places import LocalDestination, resolve_location
from chunktable.reader import (
    check_content,
    check_content_once,
    find_live_replicas,
    latest_manifest,
    mark_superseded,
    read_inventory,
    tables_in,
)
from chunktable.schema import CHUNK_SCHEMA, VERSION, replica_stretches
from dnagent.export import ExportResult, export
from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import UsageError
from tests.support.tables import MemoryWalk, blocks, replica

AT = datetime(2026, 11, 22, 3, 0, 0, 123000, tzinfo=UTC)
LOCAL = pa_fs.LocalFileSystem()
JsonObject = dict[str, object]


def a_file(kind: FileKind = FileKind.CHUNKS, number: int | None = 1) -> TableFile:
    pieces = ((60, "11" * 16), (40, "22" * 16)) if kind is FileKind.CHUNKS else ()
    return TableFile(file_name(kind, 3, "0123abcd", number), kind, 5, 100, "00" * 16, AT, pieces)


MANIFEST = Manifest(
    datanode="dn",
    sequence=3,
    previous=2,
    begun_at=AT - timedelta(hours=3),
    created_at=AT,
    source=TreeSource.TREE,
    volumes=("DS-1",),
    skipped=(SkippedVolume("/data/2", "volume_invalid", "no folder hdds"),),
    files=(a_file(), a_file(FileKind.CONTAINERS, None)),
    containers=1,
    rows=5,
    audit=AuditMark(100, 100, "ab"),
    volumes_created_ms={"DS-1": 1_700_000_000_000},
)


def changed(change: Callable[[JsonObject], object], *, checksum: bool = True) -> bytes:
    """The manifest's bytes with a change, and with a checksum that fits it unless said
    otherwise.
    """
    said = json.loads(MANIFEST.to_bytes())
    kept = said.pop("checksum")
    change(said)
    right = fingerprint(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hex()
    return json.dumps(said | {"checksum": right if checksum else kept}).encode()


def test_a_manifest_comes_back_as_it_was_written() -> None:
    assert parse_manifest(MANIFEST.to_bytes(), MANIFEST.name) == MANIFEST
    bare = replace(MANIFEST, previous=None, audit=None, skipped=(), files=())
    assert parse_manifest(bare.to_bytes(), bare.name) == bare


def test_a_manifest_of_before_volumes_had_an_age_is_read() -> None:
    raw = changed(lambda said: said.pop("volumes_created_ms"))
    assert parse_manifest(raw, MANIFEST.name) == replace(MANIFEST, volumes_created_ms={})


def test_a_manifest_of_before_files_had_pieces_is_read() -> None:
    raw = changed(lambda said: [file.pop("pieces") for file in said["files"]])
    files = parse_manifest(raw, MANIFEST.name).files
    assert files == tuple(replace(file, pieces=()) for file in MANIFEST.files)


def test_keys_of_later_releases_are_passed_over() -> None:
    assert (
        parse_manifest(changed(lambda said: said.update(colour="blue")), MANIFEST.name) == MANIFEST
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not_a_manifest"),
        (b"[]", "not_a_manifest"),
        (b"null", "not_a_manifest"),
        (b"{}", "not_a_manifest"),
        (b"\xff\xfe", "not_a_manifest"),
        (b"[" * 100_000, "not_a_manifest"),
        (changed(lambda said: said.update(format="another")), "not_a_manifest"),
        (changed(lambda said: said.update(version="1")), "not_a_manifest"),
        (changed(lambda said: said.update(version=VERSION + 1)), "newer_version"),
        # Whatever else a newer release changed.
        (changed(lambda said: said.update(version=VERSION + 1), checksum=False), "newer_version"),
        (changed(lambda said: said.update(source="data"), checksum=False), "checksum"),
        (changed(lambda said: said.update(sequence=4)), "not_a_manifest"),
        (changed(lambda said: said.update(sequence=-1)), "not_a_manifest"),
        (changed(lambda said: said.update(sequence=True)), "not_a_manifest"),
        (changed(lambda said: said.update(source="gossip")), "not_a_manifest"),
        (changed(lambda said: said.update(created_at="yesterday")), "not_a_manifest"),
        (changed(lambda said: said.update(created_at="2026-11-22T03:00:00")), "not_a_manifest"),
        (changed(lambda said: said.update(volumes_created_ms={"DS-1": "soon"})), "not_a_manifest"),
        (changed(lambda said: said.update(volumes_created_ms=7)), "not_a_manifest"),
        (changed(lambda said: said.pop("files")), "not_a_manifest"),
        (
            changed(lambda said: said.update(files=[*said["files"], *said["files"]])),
            "not_a_manifest",
        ),
        (changed(lambda said: said["files"][0].update(name="../../etc/passwd")), "not_a_manifest"),
        (changed(lambda said: said["files"][0].update(kind="events")), "not_a_manifest"),
        (changed(lambda said: said["files"][0]["pieces"].pop()), "not_a_manifest"),
        (changed(lambda said: said["files"][0].update(pieces=[[100]])), "not_a_manifest"),
        (changed(lambda said: said["files"][0].update(pieces=7)), "not_a_manifest"),
        (changed(lambda said: said["files"][0].update(rows=1 << 64)), "not_a_manifest"),
    ],
)
def test_what_is_no_whole_manifest_is_refused_by_name(raw: bytes, reason: str) -> None:
    with pytest.raises(ChunkTableError) as refused:
        parse_manifest(raw, MANIFEST.name)
    assert refused.value.reason == reason


@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_however_deep_a_manifest_is_nested_it_is_refused_by_name(
    opened: bytes, closed: bytes
) -> None:
    """There is a depth that can be parsed, and is too deep to be written again."""
    raw = MANIFEST.to_bytes()
    for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit() + 1):
        nested = raw.replace(
            b'"rows": 5,', b'"x": ' + opened * depth + b"1" + closed * depth + b",", 1
        )
        assert nested != raw
        with pytest.raises(ChunkTableError):
            parse_manifest(nested, MANIFEST.name)


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    raw = MANIFEST.to_bytes()
    for at in range(len(raw)):
        flipped = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        try:
            assert parse_manifest(flipped, MANIFEST.name) == MANIFEST
        except ChunkTableError:
            continue
        # White space between the words means nothing.
        assert raw[at : at + 1] in b" \n"


def test_names_tell_what_a_file_is() -> None:
    assert manifest_sequence("manifest-000000012.json") == 12
    for name in (
        "manifest-12.json",
        "manifest-0000000012.json",
        "manifest-000000012.json.tmp",
        "chunks",
    ):
        assert manifest_sequence(name) is None
    assert manifest_sequence(manifest_name(10**10)) == 10**10
    assert not is_file_name("chunks-000000001-0123abcd-0001.parquet.tmp")
    assert is_file_name(file_name(FileKind.EVENTS, 7, "0123abcd", 12_345))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "table"


def exported(folder: Path, walk: MemoryWalk) -> ExportResult:
    return export([walk], [], LocalDestination(folder, Disk()), source=TreeSource.TREE)


def two_exports(folder: Path) -> tuple[Manifest, Manifest]:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)), replica(2, *blocks(2)))
    first = exported(folder, walk).manifest
    walk.put(replica(2, *blocks(2, seed=1)))
    return first, exported(folder, walk).manifest


def latest(folder: Path) -> Manifest:
    return latest_manifest(LOCAL, str(folder))


def test_the_highest_manifest_that_is_whole_counts(folder: Path) -> None:
    first, second = two_exports(folder)
    assert latest(folder) == second
    newest = folder / next(f.name for f in second.files if f.sequence == 2)
    content = newest.read_bytes()
    for damage in (content[:-1], content + b"x"):
        newest.write_bytes(damage)
        assert latest(folder) == first
    newest.unlink()
    assert latest(folder) == first
    newest.write_bytes(content)
    assert latest(folder) == second
    (folder / second.name).write_bytes(b"{}")
    assert latest(folder) == first


def test_a_table_of_a_newer_release_has_no_older_stand_in(folder: Path) -> None:
    two_exports(folder)
    newer = json.dumps({"format": "treefold-chunk-table", "version": VERSION + 1})
    (folder / manifest_name(3)).write_text(newer)
    with pytest.raises(ChunkTableError) as refused:
        latest(folder)
    assert refused.value.reason == "newer_version"


def test_why_no_table_is_whole_is_said_of_the_highest(folder: Path) -> None:
    for manifest in two_exports(folder):
        for file in manifest.files:
            (folder / file.name).unlink(missing_ok=True)
    with pytest.raises(ChunkTableError, match="manifest-000000002") as refused:
        latest(folder)
    assert refused.value.reason == "file_missing"
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(ChunkTableError) as refused:
        latest(folder)
    assert refused.value.reason == "no_manifest"
    with pytest.raises(ChunkTableError) as refused:
        latest(folder / "nothing")
    assert refused.value.reason == "unreadable"


def test_a_flipped_bit_of_a_file_is_found_by_its_checksum(folder: Path) -> None:
    _, second = two_exports(folder)
    for file in second.files:
        check_content(LOCAL, str(folder), file)
        path = folder / file.name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
        with pytest.raises(ChunkTableError) as refused:
            check_content(LOCAL, str(folder), file)
        assert refused.value.reason == "checksum"
        with pytest.raises(ChunkTableError) as refused:
            check_content(
                LOCAL, str(folder), replace(file, name="chunks-000000009-0123abcd-0001.parquet")
            )
        assert refused.value.reason == "unreadable"


def test_an_inventory_that_is_something_else_is_refused(folder: Path) -> None:
    _, second = two_exports(folder)
    (inventory,) = second.of_kind(FileKind.CONTAINERS)
    (chunks, *_) = second.of_kind(FileKind.CHUNKS)
    for content, reason in (
        ((folder / chunks.name).read_bytes(), "schema"),
        (b"PAR1 nonsense", "unreadable"),
    ):
        (folder / inventory.name).write_bytes(content)
        with pytest.raises(ChunkTableError) as refused:
            read_inventory(LOCAL, str(folder), second)
        assert refused.value.reason == "checksum"
        recorded = replace(inventory, checksum=fingerprint(content).hex())
        said = replace(second, files=(*second.of_kind(FileKind.CHUNKS), recorded))
        with pytest.raises(ChunkTableError) as refused:
            read_inventory(LOCAL, str(folder), said)
        assert refused.value.reason == reason


def test_an_inventory_of_other_rows_or_files_than_the_manifest_has_is_refused(folder: Path) -> None:
    _, second = two_exports(folder)
    (inventory,), chunks = second.of_kind(FileKind.CONTAINERS), second.of_kind(FileKind.CHUNKS)
    for files in ((*chunks, replace(inventory, rows=inventory.rows + 1)), (*chunks[1:], inventory)):
        with pytest.raises(ChunkTableError) as refused:
            read_inventory(LOCAL, str(folder), replace(second, files=files))
        assert refused.value.reason == "rows"


def test_counts_that_are_not_those_of_the_files_are_refused(folder: Path) -> None:
    _, second = two_exports(folder)
    check_counts(second)
    inventory, chunks = second.of_kind(FileKind.CONTAINERS), second.of_kind(FileKind.CHUNKS)
    for told in (
        replace(second, containers=second.containers + 1),
        replace(second, rows=sum(file.rows for file in chunks) + 1),
        replace(second, rows=second.containers - 1),
        replace(second, files=inventory),
        replace(second, files=chunks),
        replace(second, files=()),
    ):
        with pytest.raises(ChunkTableError) as refused:
            check_counts(told)
        assert refused.value.reason == "rows"


def test_a_file_is_verified_once_as_long_as_it_is_as_it_was(folder: Path) -> None:
    _, second = two_exports(folder)
    (file,) = second.of_kind(FileKind.CONTAINERS)
    path = folder / file.name
    raw, times = path.read_bytes(), path.stat()
    check_content_once(LOCAL, str(folder), file)
    path.write_bytes(bytes([*raw[:-1], raw[-1] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    check_content_once(LOCAL, str(folder), file)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    for _ in range(2):
        with pytest.raises(ChunkTableError, match="checksum of its manifest"):
            check_content_once(LOCAL, str(folder), file)
    path.write_bytes(raw)
    check_content_once(LOCAL, str(folder), file)


def test_tables_are_found_in_their_folder_and_above_it(folder: Path) -> None:
    two_exports(folder)
    (folder.parent / "other").mkdir()
    assert tables_in(LOCAL, str(folder)) == [str(folder)]
    assert tables_in(LOCAL, str(folder.parent)) == [str(folder)]
    assert tables_in(LOCAL, str(folder.parent / "other")) == []
    with pytest.raises(ChunkTableError):
        tables_in(LOCAL, str(folder / "nothing"))


def test_rows_that_moved_to_a_later_file_are_superseded(folder: Path) -> None:
    first, second = two_exports(folder)
    inventory = read_inventory(LOCAL, str(folder), second)
    (old,) = first.of_kind(FileKind.CHUNKS)
    table = pa.parquet.read_table(folder / old.name)
    (batch,) = table.to_batches()
    gone = mark_superseded(batch, find_live_replicas(inventory, old.name))
    assert set(np.array(table["container_id"])[gone]) == {2}
    assert set(np.array(table["container_id"])[~gone]) == {1}


def test_stretches_end_where_the_volume_changes_too() -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(1, 1)))
    rows = []
    for volume in ("DS-1", "DS-2", "DS-2"):
        row = dict.fromkeys(CHUNK_SCHEMA.names, 0) | {"volume": volume, "container_id": 1}
        rows.append(
            row
            | {
                "datanode": "d",
                "state": "CLOSED",
                "source": "tree",
                "matches": True,
                "deleted": False,
            }
        )
    batch = pa.RecordBatch.from_pylist(rows, CHUNK_SCHEMA)
    assert list(replica_stretches(batch)) == [("DS-1", 1, 0, 1), ("DS-2", 1, 1, 3)]
    assert list(replica_stretches(batch.slice(0, 0))) == []
    encoded = batch.set_column(1, "volume", batch["volume"].dictionary_encode())
    assert list(replica_stretches(encoded.slice(1))) == [("DS-2", 1, 0, 2)]


def test_places_are_folders_and_uris(tmp_path: Path) -> None:
    filesystem, path = resolve_location(str(tmp_path / "x"))
    assert (isinstance(filesystem, pa_fs.LocalFileSystem), path) == (True, str(tmp_path / "x"))
    filesystem, path = resolve_location(
        "s3://bucket/some/prefix/?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    )
    assert (filesystem.type_name, path) == ("py::s3", "bucket/some/prefix")
    for location, named in (
        ("s3://key:secret@bucket/x", "environment"),
        ("gopher://x/y", "is not an address that is served"),
    ):
        with pytest.raises(UsageError, match=named) as refused:
            resolve_location(location)
        assert "secret" not in refused.value.message
