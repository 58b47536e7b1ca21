"""Reading tables in buckets: `python -m benchmarks.bench_s3_files [--mb N] [--endpoint
URL] [--json]`.

Our file system over our S3 client against the S3 of pyarrow, on ministack, or on a
store that the environment's credentials open; also across a link with 40 ms for a round
trip. A server in Python limits both sides, so a real store says more.
"""

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from benchmarks.measure import Report, interleaved
from chunktable.places import resolve_location
from tests.support.s3_servers import S3Bucket, S3Endpoint, ministack
from tests.support.wan import WanLink

ROUNDS = 5
MB = 200
DELAY_MS = 20.0
# Our client may be no slower than this share of pyarrow's.
BAR = 0.7
COLUMNS = "abcdef"
GROUPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=MB, help="Size of the table.")
    parser.add_argument("--endpoint", help="A store in place of ministack.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = Report(f"a table of {arguments.mb} MB in a bucket")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = _endpoint(arguments.endpoint, folder, stack)
        os.environ |= endpoint.environment
        bucket = _bucket_with_table(endpoint, folder, arguments.mb)
        link = stack.enter_context(WanLink(endpoint.address, delay_ms=DELAY_MS))
        for name, way in (("", endpoint), (", 40 ms away", link.through(endpoint))):
            for job, read, mb in _jobs(arguments.mb):
                _measure(report, job + name, read, mb, S3Bucket(way, bucket.name))
    report.show(as_json=arguments.json)


def _endpoint(url: str | None, folder: Path, stack: ExitStack) -> S3Endpoint:
    if url is None:
        server = stack.enter_context(ministack(folder / "log"))
        return S3Endpoint(server.url, "test", "test")
    return S3Endpoint(url, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])


def _bucket_with_table(endpoint: S3Endpoint, folder: Path, mb: int) -> S3Bucket:
    rows = mb * 1_000_000 // (8 * len(COLUMNS))
    numbers = np.random.default_rng(random.Random(1).getrandbits(32))
    columns = {name: numbers.integers(0, 1 << 62, rows) for name in COLUMNS}
    path = folder / "table.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=-(-rows // GROUPS), compression="none")
    bucket = endpoint.fresh_bucket()
    with endpoint.client() as client:
        client.put_object(Bucket=bucket.name, Key="table", Body=path.read_bytes())
    return bucket


def _jobs(mb: int) -> list[tuple[str, Callable[[pa_fs.FileSystem, str], None], float]]:
    """What is read, how, and how much of the table that is in MB."""

    def table(filesystem: pa_fs.FileSystem, path: str) -> None:
        pq.read_table(path, filesystem=filesystem)

    def stream(filesystem: pa_fs.FileSystem, path: str) -> None:
        with filesystem.open_input_stream(path, compression=None) as source:
            while source.read(1 << 20):
                pass

    def part(filesystem: pa_fs.FileSystem, path: str) -> None:
        with filesystem.open_input_file(path) as source:
            for _ in pq.ParquetFile(source).iter_batches(row_groups=[1, 3], columns=["a", "c"]):
                pass

    share = 2 / GROUPS * 2 / len(COLUMNS)
    return [("whole table", table, mb), ("stream", stream, mb), ("part", part, mb * share)]


def _measure(
    report: Report,
    job: str,
    read: Callable[[pa_fs.FileSystem, str], None],
    mb: float,
    bucket: S3Bucket,
) -> None:
    endpoint, path = bucket.endpoint, f"{bucket.name}/table"
    ours, _ = resolve_location(f"s3://{bucket.name}?endpoint_url={endpoint.url}")
    theirs = pa_fs.S3FileSystem(
        access_key=endpoint.access_key,
        secret_key=endpoint.secret_key,
        endpoint_override=endpoint.address,
        scheme="http",
        region=endpoint.region,
    )
    variants = {"ours": lambda: read(ours, path), "pyarrow": lambda: read(theirs, path)}
    rates = interleaved(mb, variants, rounds=ROUNDS)
    report.add(job, "MB/s", rates["ours"], rates["pyarrow"], BAR)


if __name__ == "__main__":
    main()
