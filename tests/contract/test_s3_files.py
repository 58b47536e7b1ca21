"""Buckets as files for pyarrow: our file system behaves as pyarrow's own, on each
server.
"""

import random
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunktable.places import resolve_location
from runtime.errors import UsageError
from tests.support.s3_servers import S3Bucket, S3Endpoint
from tests.support.stores import fill

KEYS = ("a/b/one", "a/b/two", "a/three", "a b/ü+%", "top", "marker/")
LENGTH = 5 << 20


@pytest.fixture
def bucket(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    s3_bucket.endpoint.set_environment(monkeypatch)
    return s3_bucket


@pytest.fixture
def ours(bucket: S3Bucket) -> pa_fs.FileSystem:
    filesystem, path = resolve_location(f"s3://{bucket.name}?endpoint_url={bucket.endpoint.url}")
    assert path == bucket.name
    return filesystem


def pyarrow_s3(endpoint: S3Endpoint) -> pa_fs.FileSystem:
    return pa_fs.S3FileSystem(
        access_key=endpoint.access_key,
        secret_key=endpoint.secret_key,
        endpoint_override=endpoint.address,
        scheme="http",
        region=endpoint.region,
    )


@pytest.fixture
def theirs(bucket: S3Bucket) -> pa_fs.FileSystem:
    return pyarrow_s3(bucket.endpoint)


def facts(found: list[pa_fs.FileInfo]) -> list[tuple[object, ...]]:
    rows = [(one.path, one.type, one.size, one.mtime is not None and one.is_file) for one in found]
    return sorted(rows, key=lambda row: str(row[0]))


def test_folders_and_objects_are_those_that_pyarrow_sees(
    bucket: S3Bucket, ours: pa_fs.FileSystem, theirs: pa_fs.FileSystem
) -> None:
    with bucket.endpoint.client() as client:
        for key in KEYS:
            client.put_object(Bucket=bucket.name, Key=key, Body=b"" if key[-1] == "/" else b"x")
    names = ("", "/a", "/a/b", "/a/b/one", "/a b", "/a b/ü+%", "/none", "/a/none", "/to")
    paths = [bucket.name + name for name in names]
    for one, other in zip(ours.get_file_info(paths), theirs.get_file_info(paths), strict=True):
        assert facts([one]) == facts([other])
    for name in ("", "/a", "/a b"):
        for recursive in (False, True):
            selector = pa_fs.FileSelector(bucket.name + name, recursive=recursive)
            assert facts(ours.get_file_info(selector)) == facts(theirs.get_file_info(selector))


def test_a_listing_of_several_pages_is_whole(bucket: S3Bucket, ours: pa_fs.FileSystem) -> None:
    names = {f"{i:04}" for i in range(1101)}
    fill(bucket, (f"many/{name}" for name in names))
    found = ours.get_file_info(pa_fs.FileSelector(f"{bucket.name}/many"))
    assert {one.base_name for one in found} == names


@pytest.mark.parametrize("length", [0, 1, 16 << 20, (33 << 20) + 7])
def test_what_was_written_is_read(
    bucket: S3Bucket, ours: pa_fs.FileSystem, theirs: pa_fs.FileSystem, length: int
) -> None:
    data = random.Random(length).randbytes(length)
    with ours.open_output_stream(f"{bucket.name}/x/y", compression=None) as out:
        for at in range(0, length, 10_000_000):
            out.write(data[at : at + 10_000_000])
        # It is there when it is complete, and not before.
        assert ours.get_file_info(f"{bucket.name}/x/y").type is pa_fs.FileType.NotFound
    for filesystem in (ours, theirs):
        with filesystem.open_input_stream(f"{bucket.name}/x/y", compression=None) as stream:
            assert stream.read() == data
    with bucket.endpoint.client() as client:
        assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket.name)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH // 3)), max_size=8))
def test_every_range_has_the_bytes_of_the_object(
    ranged: tuple[bytes, pa_fs.FileSystem, str], ranges: list[tuple[int, int]]
) -> None:
    data, filesystem, path = ranged
    with filesystem.open_input_file(path) as file:
        assert file.size() == len(data)
        for at, length in ranges:
            file.seek(at)
            # Twice in a row: the second is read ahead.
            assert file.read(length) == data[at : at + length]
            assert file.read(length) == data[at + length : at + 2 * length]
            assert file.tell() == min(at + 2 * length, max(at, len(data)))


@pytest.fixture(scope="module")
def ranged(
    ministack_server: S3Endpoint,
) -> Iterator[tuple[bytes, pa_fs.FileSystem, str]]:
    bucket, data = ministack_server.fresh_bucket(), random.Random(1).randbytes(LENGTH)
    with ministack_server.client() as client:
        client.put_object(Bucket=bucket.name, Key="key", Body=data)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ministack_server.environment.items():
            patched.setenv(name, value)
        filesystem, _ = resolve_location(f"s3://b?endpoint_url={ministack_server.url}")
        yield data, filesystem, f"{bucket.name}/key"


def test_a_table_is_read_and_written_as_by_pyarrow(
    bucket: S3Bucket, ours: pa_fs.FileSystem, theirs: pa_fs.FileSystem
) -> None:
    table = pa.table({"n": range(100_000), "s": [str(i % 7) for i in range(100_000)]})
    for writer, name in ((ours, "ours"), (theirs, "theirs")):
        path = f"{bucket.name}/t/{name}.parquet"
        pq.write_table(table, path, filesystem=writer, row_group_size=10_000)
        for reader in (ours, theirs):
            assert pq.read_table(path, filesystem=reader, columns=["s", "n"]).equals(
                table.select(["s", "n"])
            )


def test_an_object_that_changes_while_it_is_read_is_an_error(
    bucket: S3Bucket, ours: pa_fs.FileSystem
) -> None:
    with bucket.endpoint.client() as client:
        client.put_object(Bucket=bucket.name, Key="key", Body=b"1" * LENGTH)
        with ours.open_input_file(f"{bucket.name}/key") as file:
            assert file.read(10) == b"1" * 10
            client.put_object(Bucket=bucket.name, Key="key", Body=b"2" * LENGTH)
            file.seek(LENGTH - 10)
            with pytest.raises(OSError, match="412"):
                file.read(10)


def test_a_deleted_object_and_one_that_never_was_are_missing(
    bucket: S3Bucket, ours: pa_fs.FileSystem
) -> None:
    path = f"{bucket.name}/key"
    with ours.open_output_stream(path, compression=None) as out:
        out.write(b"x")
    ours.delete_file(path)
    with pytest.raises(FileNotFoundError):
        ours.open_input_file(path)
    for folder in (f"{bucket.name}/none", "no-such-bucket/x"):
        with pytest.raises(FileNotFoundError):
            ours.get_file_info(pa_fs.FileSelector(folder))
        assert ours.get_file_info(pa_fs.FileSelector(folder, allow_not_found=True)) == []


def test_an_object_has_the_same_time_by_a_listing_and_by_itself(
    bucket: S3Bucket, ours: pa_fs.FileSystem
) -> None:
    """By it the next sweep knows the files that the last one has read."""
    with ours.open_output_stream(f"{bucket.name}/a/one") as out:
        out.write(b"x")
    (listed,) = ours.get_file_info(pa_fs.FileSelector(f"{bucket.name}/a"))
    assert listed.mtime_ns == ours.get_file_info(f"{bucket.name}/a/one").mtime_ns


def test_a_refusal_is_an_os_error_with_its_reason(
    signing_ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = signing_ministack_bucket.endpoint
    endpoint.set_environment(monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    # A store that this process has used before keeps its credentials.
    filesystem, _ = resolve_location(f"s3://b/x?endpoint_url={endpoint.url}&addressing=path")
    with pytest.raises(OSError, match=r"SignatureDoesNotMatch.*Check the secret key"):
        filesystem.get_file_info(pa_fs.FileSelector(signing_ministack_bucket.name))


@pytest.mark.parametrize(
    ("query", "reason"),
    [("bogus=1", "unknown parameters: bogus"), ("x", "is not an address"), ("", "no bucket")],
)
def test_an_address_that_is_none_is_refused(query: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        resolve_location(f"s3://{'b' * bool(query)}/p?{query}")


@pytest.mark.parametrize(
    "query",
    ["endpoint_url={url}", "endpoint_override={address}&scheme=http", "endpoint_override={url}"],
)
def test_both_ways_to_name_an_endpoint_lead_there(
    ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    endpoint = ministack_bucket.endpoint
    endpoint.set_environment(monkeypatch)
    asked = query.format(url=endpoint.url, address=endpoint.address)
    filesystem, path = resolve_location(f"s3://{ministack_bucket.name}/?{asked}&region=us-east-1")
    assert filesystem.get_file_info(path).type is pa_fs.FileType.Directory


def test_the_region_of_a_bucket_is_taken_from_the_store_unless_it_is_named(
    ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ministack_bucket.endpoint.set_environment(monkeypatch)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    location = f"s3://{ministack_bucket.name}?endpoint_url={ministack_bucket.endpoint.url}"
    filesystem, path = resolve_location(f"{location}&profile=")
    assert filesystem.get_file_info(path).type is pa_fs.FileType.Directory
    filesystem, path = resolve_location(f"{location}&region=eu-west-1")
    with pytest.raises(OSError, match="The bucket is in another region"):
        filesystem.get_file_info(path)
