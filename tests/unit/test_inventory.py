"""S3 Inventories and folders of Parquet files, as listings of a bucket."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from proof.errors import ListingInvalidError
from proof.inventory import ListingFile, ListingScope, read_folder, read_inventory
from runtime.errors import UsageError
from tests.support.listings import (
    CREATED_MS,
    ListedVersion,
    versions_by_chance,
    write_inventory,
    write_listing,
    write_manifest,
)

SCOPE = ListingScope(has_versions=True)
MD5 = "0123456789abcdef" * 2
Row = tuple[str, int, int, str, str, bool]


def read(*parts: ListingFile) -> list[Row]:
    found = []
    for part in parts:
        for batch in part.rows():
            for row in batch.to_pylist():
                key, size, modified, etag, version, is_md5 = row.values()
                found.append(
                    (key.decode(), size, modified, etag.decode(), version.decode(), is_md5)
                )
    return sorted(found)


def expected(row: ListedVersion) -> Row:
    is_md5 = not row.is_multipart and "KMS" not in row.encryption and row.encryption != "SSE-C"
    assert row.size is not None
    return row.key, row.size, row.modified_ms, row.etag, row.version, is_md5


@pytest.mark.parametrize("kind", ["CSV", "Parquet"])
def test_both_forms_say_the_same(tmp_path: Path, kind: str) -> None:
    rows = versions_by_chance(400)
    path = write_inventory(tmp_path / "destination", rows, kind)
    found = read_inventory(str(path), SCOPE)
    assert (found.bucket, found.created_ms, len(found.parts)) == ("photos", CREATED_MS, 3)
    assert read(*found.parts) == sorted(map(expected, rows))
    keys = [key for part in found.parts for some in part.listed_keys() for key in some.to_pylist()]
    assert sorted(keys) == sorted(row.key.encode() for row in rows)


@pytest.mark.parametrize("kind", ["CSV", "Parquet"])
def test_only_current_versions_count(tmp_path: Path, kind: str) -> None:
    rows = [
        ListedVersion("kept", MD5, version="2"),
        ListedVersion("kept", "a" * 32, version="1", is_latest=False),
        ListedVersion("deleted", "", None, version="4", is_marker=True),
        ListedVersion("deleted", MD5, version="3", is_latest=False),
        ListedVersion("back", "", None, version="5", is_latest=False, is_marker=True),
        ListedVersion("back", MD5, version="6"),
        ListedVersion("parts", f"{MD5}-3", is_multipart=True),
    ]
    found = read_inventory(str(write_inventory(tmp_path, rows, kind)), SCOPE)
    assert [(key, version) for key, _, _, _, version, _ in read(*found.parts)] == [
        ("back", "6"),
        ("kept", "2"),
        ("parts", ""),
    ]
    unversioned = read_inventory(str(tmp_path / _MANIFEST), ListingScope())
    assert {version for _, _, _, _, version, _ in read(*unversioned.parts)} == {""}


_MANIFEST = "reports/photos/daily/2026-11-25T01-00Z/manifest.json"


def test_keys_outside_of_the_address_are_passed_over(tmp_path: Path) -> None:
    names = ("data/", "data/a", "data/.scratch/x", "database", "other/a", "data/ä b+c", ".scratch/")
    rows = [ListedVersion(name, MD5) for name in names]
    scope = ListingScope("data/", ".scratch/")
    for kind in ("CSV", "Parquet"):
        found = read_inventory(str(write_inventory(tmp_path / kind, rows, kind)), scope)
        assert [key for key, *_ in read(*found.parts)] == ["a", "ä b+c"]


def test_an_inventory_without_files_lists_nothing(tmp_path: Path) -> None:
    assert read_inventory(str(write_inventory(tmp_path, [], "CSV", files=0)), SCOPE).parts == ()
    found = read_inventory(str(write_inventory(tmp_path / "empty", [], "CSV", files=1)), SCOPE)
    assert read(*found.parts) == []


def test_a_file_that_is_not_the_manifest_s_is_refused(tmp_path: Path) -> None:
    path = write_inventory(tmp_path, versions_by_chance(90), "CSV")
    victim = tmp_path / "reports/photos/daily/data/part-1.csv.gz"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    parts = read_inventory(str(path), SCOPE).parts
    assert len(read(parts[0], parts[2])) == 60
    with pytest.raises(ListingInvalidError, match=r"part-1\.csv\.gz: its MD5 is"):
        read(parts[1])
    victim.unlink()
    with pytest.raises(ListingInvalidError, match=r"part-1.csv.gz does not exist"):
        read(parts[1])


def test_a_manifest_is_refused_unless_its_checksum_agrees(tmp_path: Path) -> None:
    path = write_inventory(tmp_path, versions_by_chance(9), "CSV")
    checksum = path.with_name("manifest.checksum")
    checksum.write_text("0" * 32)
    with pytest.raises(ListingInvalidError, match=r"manifest\.checksum says '0000"):
        read_inventory(str(path), SCOPE)
    checksum.unlink()
    with pytest.raises(ListingInvalidError, match=r"manifest\.checksum does not exist"):
        read_inventory(str(path), SCOPE)
    with pytest.raises(ListingInvalidError, match=r"none\.json does not exist"):
        read_inventory(str(tmp_path / "none.json"), SCOPE)
    with pytest.raises(UsageError):
        read_inventory("gs://bucket/manifest.json", SCOPE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.pop("sourceBucket"), "it has no sourceBucket"),
        (lambda m: m.pop("files"), "no list of files"),
        (lambda m: m.update(files=[1]), "entry of files"),
        (lambda m: m.update(fileFormat="ORC"), "files of 'ORC' are not read"),
        (lambda m: m.update(creationTimestamp="soon"), "creationTimestamp is 'soon'"),
        (lambda m: m.update(fileSchema="Key, Key"), "names a column twice"),
        (lambda m: m.update(fileSchema="Bucket, Key, Size"), "no column last_modified_date, e_tag"),
        (
            lambda m: m.update(fileSchema="Key, VersionId, Size, LastModifiedDate, ETag"),
            "nobody knows which are current",
        ),
        (lambda m: m["files"][0].update(MD5checksum="x"), "the MD5 of"),
        (lambda m: m["files"][0].update(key="../../secret"), "not the key of a file below"),
        (lambda m: m["files"][0].update(key="/etc/passwd"), "not the key of a file below"),
        (lambda m: m["files"][0].update(key="gone"), "in no folder above it"),
    ],
)
def test_a_manifest_of_another_form_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    path = write_inventory(tmp_path, versions_by_chance(9), "CSV")
    manifest = json.loads(path.read_text())
    change(manifest)
    write_manifest(path, manifest)
    with pytest.raises(ListingInvalidError, match=said):
        read_inventory(str(path), SCOPE)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 10_000])
def test_what_is_no_manifest_is_named(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(body)
    (tmp_path / "manifest.checksum").write_text(hashlib.md5(body).hexdigest())
    with pytest.raises(ListingInvalidError, match="not the manifest of an inventory"):
        read_inventory(str(tmp_path / "manifest.json"), SCOPE)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("size", pa.array([-1]), "impossible size"),
        ("size", pa.array([1 << 60]), "impossible size"),
        ("size", pa.array([None], pa.int64()), "no size"),
        ("size", pa.array(["many"]), "cannot be read"),
        ("e_tag", pa.array(["x" * 2_000]), "impossible e_tag"),
        ("e_tag", pa.array([None], pa.string()), "no e_tag"),
        ("key", pa.array([None], pa.string()), "has no key"),
        ("key", pa.array([b"\xff"], pa.binary()), "cannot be read"),
        ("last_modified_date", pa.array([3]), "a number, and not a time"),
        ("last_modified_date", pa.array([-5], pa.timestamp("ms")), "impossible last_modified"),
        ("last_modified_date", pa.array(["yesterday"]), "cannot be read"),
    ],
)
def test_an_impossible_object_is_named(
    tmp_path: Path, column: str, values: pa.Array, said: str
) -> None:
    folder = write_listing(tmp_path / "l", [ListedVersion("a", MD5)])
    table = pq.read_table(folder / "a.parquet")
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, column, values), folder / "a.parquet")
    (part,) = read_folder(str(folder), SCOPE)
    with pytest.raises(ListingInvalidError, match=said) as caught:
        read(part)
    assert "a.parquet" in caught.value.message


def test_a_csv_of_another_width_is_named(tmp_path: Path) -> None:
    path = write_inventory(tmp_path, versions_by_chance(9), "CSV")
    manifest = json.loads(path.read_text())
    manifest["fileSchema"] += ", Extra"
    write_manifest(path, manifest)
    part = read_inventory(str(path), SCOPE).parts[0]
    with pytest.raises(ListingInvalidError, match="cannot be read"):
        read(part)


def test_a_folder_of_parquet_files_is_a_listing(tmp_path: Path) -> None:
    folder = write_listing(tmp_path / "l", [ListedVersion("a", f'"{MD5}"')])
    (folder / "deep").mkdir()
    table = pa.table(
        {"Key": ["b"], "Size": [2], "LastModified": ["2026-11-25T01:00:00.5Z"], "ETag": [MD5]}
    ).rename_columns(["Key", "Size", "Last_Modified", "ETag"])
    pq.write_table(table, folder / "deep" / "b.parquet")
    shutil.copy(folder / "a.parquet", folder / "_temporary.parquet")
    (folder / "readme.txt").write_text("x")
    found = read(*read_folder(str(folder), SCOPE))
    assert found == [
        ("a", 1, CREATED_MS, MD5, "", True),
        ("b", 2, 1_795_568_400_500, MD5, "", True),
    ]
    for name in ("none", "l/deep/b.parquet"):
        with pytest.raises(ListingInvalidError):
            read_folder(str(tmp_path / name), SCOPE)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ListingInvalidError, match="has no Parquet file"):
        read_folder(str(tmp_path / "hollow"), SCOPE)
    (folder / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(ListingInvalidError, match=r"c\.parquet cannot be read"):
        read_folder(str(folder), SCOPE)
