"""What a command does not need, it does not import: its start is part of its time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from admin.bucket import bucket
from admin.lazy_commands import LazyGroup
from tests.support.s3_servers import S3Bucket

# What a sync between two S3 buckets without a verifier has no use for.
UNNEEDED = {
    "asyncio",
    "botocore.session",
    "google.protobuf",
    "grpc",
    "llvmlite",
    "numba",
    "numpy",
    "ozone.rocks",
    "prometheus_client",
    "pyarrow",
    "pydantic",
    "replicator.stores.local",
    "replicator.verifier.client",
    "rich",
    "rocksdict",
    "ssl",
    "structlog",
    "tenacity",
    "urllib3",
}


def test_a_sync_of_two_s3_buckets_imports_only_what_it_needs(
    ministack_bucket: S3Bucket, tmp_path: Path
) -> None:
    endpoint = ministack_bucket.endpoint
    target = endpoint.fresh_bucket()
    with endpoint.client() as client:
        client.put_object(Bucket=ministack_bucket.name, Key="key", Body=b"body", Tagging="a=b")
    code = (
        "import sys\nfrom admin.cli import treefold\n"
        "status = treefold.main(sys.argv[1:], standalone_mode=False)\n"
        f"print('imported:', sorted({UNNEEDED!r} & set(sys.modules)))\n"
        "sys.exit(status)"
    )
    addresses = [
        f"s3://{one.name}?endpoint_url={endpoint.url}" for one in (ministack_bucket, target)
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "bucket",
            "sync",
            *addresses,
            "--json",
            "--state",
            str(tmp_path / "state"),
        ],
        env={
            "PATH": "/usr/bin",
            "HOME": str(tmp_path),
            "AWS_ACCESS_KEY_ID": endpoint.access_key,
            "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report, imported = done.stdout.splitlines()
    assert json.loads(report)["copied"] == 1
    assert imported == "imported: []"


def test_a_summary_is_that_of_the_command() -> None:
    assert isinstance(bucket, LazyGroup)
    for name, lazy in bucket.lazy.items():
        assert lazy.load().get_short_help_str(200) == lazy.summary, name


@pytest.mark.parametrize(
    "module", ["dnagent.cli", "scm.cli", "replicator.cli", "replicator.master.cli"]
)
def test_the_log_of_a_server_brings_no_coloured_tracebacks(module: str) -> None:
    code = (
        f"import sys, {module}\nprint(*{{'rich', 'structlog'}} & set(sys.modules))\n"
        "import rich.console"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["structlog"]
