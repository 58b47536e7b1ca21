"""Indexes from an inventory in a bucket, beside what a refresh makes of the same
objects, on each server.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from replicator.stores.opening import open_store
from tests.support.listings import ListedVersion, write_inventory
from tests.support.s3_servers import S3Bucket
from tests.support.stores import fill
from tests.unit.test_index_build import bits_of


@pytest.fixture
def bucket(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    s3_bucket.endpoint.set_environment(monkeypatch)
    return s3_bucket


def index(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(treefold, ["bucket", "index", *words, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def rows_of(address: str) -> list[ListedVersion]:
    """What an inventory says of a bucket, with the times that HEAD tells."""
    rows, before = list[ListedVersion](), None
    with open_store(address, may_write=False) as store:
        for one in store.lister.list_versions(""):
            now = store.reader.facts(one.key) if one.key != before else None
            rows.append(
                ListedVersion(
                    f"data/{one.key}",
                    one.etag,
                    None if one.is_delete_marker else one.size_bytes,
                    one.modified_ms if now is None else now.modified_ms,
                    one.version,
                    is_latest=one.key != before,
                    is_marker=one.is_delete_marker,
                    is_multipart="-" in one.etag,
                )
            )
            before = one.key
    return rows


def upload(bucket: S3Bucket, folder: Path) -> None:
    with bucket.endpoint.client() as client:
        for path in folder.rglob("*"):
            if path.is_file():
                key = str(path.relative_to(folder))
                client.put_object(Bucket=bucket.name, Key=key, Body=path.read_bytes())


def put(bucket: S3Bucket, keys: Sequence[str], body: bytes) -> None:
    with bucket.endpoint.client() as client:
        for key in keys:
            client.put_object(Bucket=bucket.name, Key=key, Body=body)


@pytest.mark.parametrize("has_versions", [False, True])
@pytest.mark.parametrize("kind", ["CSV", "Parquet"])
def test_an_inventory_makes_the_index_of_a_refresh(
    bucket: S3Bucket, tmp_path: Path, kind: str, has_versions: bool
) -> None:
    endpoint, name = bucket.endpoint, bucket.name
    with endpoint.client() as client:
        if has_versions:
            versioning = {"Status": "Enabled"}
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration=versioning)
        put(bucket, [f"data/{number:03}" for number in range(40)], b"old")
        put(bucket, ["data/ü b+c%", "database", "data/.treefold-scratch/x"], b"1")
        put(bucket, [f"data/{number:03}" for number in range(0, 40, 3)], b"newer")
        client.delete_object(Bucket=name, Key="data/001")
    address = f"s3://{name}/data?endpoint_url={endpoint.url}"
    destination = endpoint.fresh_bucket()
    write_inventory(tmp_path / "local", rows_of(address), kind, bucket=name)
    upload(destination, tmp_path / "local")
    manifest = f"reports/{name}/daily/2026-11-25T01-00Z/manifest.json"
    place = f"s3://{destination.name}/{manifest}?endpoint_url={endpoint.url}"
    words = (address, "--state", f"{tmp_path}/built")
    built = index(*words, "--inventory", place, "--check")
    assert (built["objects"], built["indexDamage"]) == (40, [])
    assert built["levels"] == {"listed": 0, "recorded": 40, "read": 0}
    (tmp_path / "refreshed").mkdir()
    shutil.copy(tmp_path / "built" / "profile.json", tmp_path / "refreshed" / "profile.json")
    refreshed = index(address, "--state", f"{tmp_path}/refreshed")
    assert (refreshed["added"], refreshed["root"]) == (40, built["root"])
    ours, theirs = (bits_of(tmp_path / name / "index") for name in ("built", "refreshed"))
    assert ours[0] == theirs[0]
    assert ours[2] == theirs[2]
    # The refresh that follows takes every row as it is, and finds what is new.
    put(bucket, ["data/new"], b"1")
    after = index(*words, "--check")
    assert [after[name] for name in ("added", "changed", "removed", "bytesRead")] == [1, 0, 0, 0]
    assert after["indexDamage"] == []
    other = CliRunner().invoke(
        treefold,
        [
            *("bucket", "index", f"s3://{destination.name}?endpoint_url={endpoint.url}"),
            *("--state", f"{tmp_path}/other", "--inventory", place),
        ],
    )
    assert (other.exit_code, f"is of the bucket {name}" in other.output) == (2, True)


def test_a_bucket_that_is_listed_in_shards_has_the_index_of_a_refresh(
    bucket: S3Bucket, tmp_path: Path
) -> None:
    fill(bucket, (f"data/{number:04}" for number in range(1_100)), b"1")
    put(bucket, ["data/ü b+c%", "data/.treefold-scratch/x", "outside"], b"2")
    address = f"s3://{bucket.name}/data?endpoint_url={bucket.endpoint.url}"
    words = (address, "--state", f"{tmp_path}/state")
    built = index(*words, "--shards", "3", "--check")
    assert (built["objects"], built["parts"], built["indexDamage"]) == (1_101, 3, [])
    after = index(*words)
    assert after["root"] == built["root"]
    assert [after[name] for name in ("added", "changed", "removed", "bytesRead")] == [0, 0, 0, 0]
