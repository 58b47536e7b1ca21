"""Files of this machine and objects of buckets behave alike, on each server."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunktable.errors import BucketMissingError, StoreDeniedError, StoreUnreachableError
from chunktable.files import (
    AnyPath,
    Files,
    ObjectPath,
    is_inside,
    open_parquet,
    path_of,
    read_object,
    swap_object,
)
from runtime.disk import Disk
from runtime.errors import BusyError, DiskError, UsageError
from tests.support.s3_servers import S3Bucket, free_port

KINDS = ["folder", "ministack_bucket", "moto_bucket"]


@pytest.fixture(params=KINDS)
def root(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AnyPath:
    if request.param == "folder":
        return tmp_path / "root"
    bucket: S3Bucket = request.getfixturevalue(request.param)
    bucket.endpoint.set_environment(monkeypatch)
    return ObjectPath.of(f"s3://{bucket.name}/a%20b?endpoint_url={bucket.endpoint.url}")


def test_what_is_written_is_read_listed_and_removed(root: AnyPath) -> None:
    files = Files(Disk())
    assert (files.names(root), files.files_below(root), files.exists(root)) == ([], [], False)
    files.make_folder(root / "x" / "ü=%25")
    files.replace(root / "x" / "ü=%25" / "one", b"1")
    files.replace(root / "x" / "ü=%25" / "one", b"one")
    files.make_folder(root / "y")
    files.replace(root / "y" / "two", b"")
    assert files.read(root / "x" / "ü=%25" / "one") == b"one"
    assert (files.names(root), files.names(root / "x")) == (["x", "y"], ["ü=%25"])
    assert files.files_below(root) == ["x/ü=%25/one", "y/two"]
    assert files.exists(root / "x")
    assert files.exists(root / "y" / "two")
    # The text of a path leads there again.
    assert files.read(path_of(str(root / "x" / "ü=%25" / "one"))) == b"one"
    files.remove(root / "y" / "two")
    files.remove(root / "y" / "two")
    with pytest.raises(DiskError) as error:
        files.read(root / "y" / "two")
    assert error.value.facts["missing"]
    files.remove_folder(root / "x")
    files.remove_folder(root / "x")
    assert files.files_below(root) == []


@pytest.mark.parametrize("rows", [3, 4_000_000])
def test_a_new_file_appears_when_it_is_closed_and_never_if_it_is_discarded(
    root: AnyPath, rows: int
) -> None:
    """The larger one is an upload in parts."""
    files, path = Files(Disk()), root / "t.parquet"
    table = pa.table({"n": pa.array(range(rows), pa.int64())})
    for is_kept in (False, True):
        new = files.create(path)
        with pq.ParquetWriter(
            new.target, table.schema, compression="none", use_dictionary=False
        ) as writer:
            writer.write_table(table)
        assert not files.exists(path)
        (new.close if is_kept else new.discard)()
    assert files.files_below(root) == ["t.parquet"]
    with open_parquet(path) as file:
        assert file.read() == table


def test_an_entry_of_a_log_is_written_once(root: AnyPath) -> None:
    files = Files(Disk())
    files.make_folder(root)
    files.append(root / "1", b"ours")
    # The answer was lost, and the client asks again.
    files.append(root / "1", b"ours")
    if isinstance(root, ObjectPath):
        with pytest.raises(BusyError, match="another process has written"):
            files.append(root / "1", b"theirs")
        assert files.read(root / "1") == b"ours"


@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_object_is_swapped_only_for_the_one_that_was_read(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: S3Bucket = request.getfixturevalue(kind)
    bucket.endpoint.set_environment(monkeypatch)
    path = ObjectPath.of(f"s3://{bucket.name}/lock?endpoint_url={bucket.endpoint.url}")
    assert read_object(path) is None
    first = swap_object(path, b"1", "")
    assert first
    assert swap_object(path, b"2", "") is None
    second = swap_object(path, b"2", first)
    assert second
    assert swap_object(path, b"3", first) is None
    found = read_object(path)
    assert found is not None
    assert (found.content, found.etag) == (b"2", second)
    assert 0 <= found.age_s < 60
    Files(Disk()).remove(path)
    assert swap_object(path, b"4", second) is None


def test_no_change_of_a_bucket_passes_a_check_that_refuses(
    ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ministack_bucket.endpoint.set_environment(monkeypatch)
    place = f"s3://{ministack_bucket.name}/x?endpoint_url={ministack_bucket.endpoint.url}"
    root, is_refused = ObjectPath.of(place), False

    def check() -> None:
        if is_refused:
            raise BusyError("another")

    files = Files(Disk(), check)
    files.replace(root / "old", b"old")
    new = files.create(root / "new")
    is_refused = True
    for act in (
        lambda: files.replace(root / "old", b"new"),
        lambda: files.append(root / "new", b"new"),
        lambda: files.remove(root / "old"),
        lambda: files.remove_folder(root),
        lambda: files.create(root / "new"),
        new.close,
    ):
        with pytest.raises(BusyError):
            act()
    new.discard()
    assert (files.files_below(root), files.read(root / "old")) == (["old"], b"old")


def test_a_missing_bucket_a_wrong_key_and_a_dead_store_have_names(
    signing_ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, name = signing_ministack_bucket.endpoint, signing_ministack_bucket.name
    endpoint.set_environment(monkeypatch)

    def refuses(address: str, kind: type[DiskError]) -> None:
        files, root = Files(Disk()), ObjectPath.of(address)
        for act in (
            lambda: files.read(root / "x"),
            lambda: files.names(root),
            lambda: files.files_below(root),
            lambda: files.replace(root / "x", b""),
            lambda: files.append(root / "x", b""),
            files.create(root / "x").close,
        ):
            with pytest.raises(kind):
                act()

    refuses(f"s3://no-such-bucket/x?endpoint_url={endpoint.url}", BucketMissingError)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    # Another region, lest the client with the right key be used.
    refuses(f"s3://{name}/x?endpoint_url={endpoint.url}&region=eu-west-1", StoreDeniedError)
    gone = f"http://127.0.0.1:{free_port()}"
    refuses(f"s3://{name}/x?endpoint_url={gone}", StoreUnreachableError)


def test_paths_of_buckets_are_as_those_of_folders() -> None:
    path = ObjectPath.of("s3://b/x/y?region=r")
    assert str(path / "z=1" / "%") == "s3://b/x/y/z=1/%25?region=r"
    assert (path.name, str(path.parent), str(path.with_name("q"))) == (
        "y",
        "s3://b/x?region=r",
        "s3://b/x/q?region=r",
    )
    assert path_of("s3://b?region=r") / "x" / "y" == path
    assert path_of("/x/y") == Path("/x/y")
    with pytest.raises(UsageError, match="gs:// is not an address"):
        path_of("gs://b/x")
    whole = ObjectPath.of("s3://b")
    assert is_inside(path, whole)
    assert is_inside(path, ObjectPath.of("s3://b/x"))
    assert not is_inside(path, ObjectPath.of("s3://b/x/yy"))
    assert not is_inside(path, ObjectPath.of("s3://c/x"))
    assert not is_inside(path, Path("/b/x"))
    assert is_inside(Path("/b/x"), Path("/b"))
    assert not is_inside(Path("/b"), Path("/b/x"))
