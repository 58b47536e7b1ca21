"""The S3 servers that tests run against: each is the one it claims to be, and ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.support.processes import ROOT
from tests.support.s3_servers import S3Bucket, S3Endpoint, ServerProcess, free_port, ministack
from tests.support.waiting import wait_until


def listens(url: str) -> bool:
    host, _, port = url.partition("://")[2].partition(":")
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_what_was_put_into_a_fresh_bucket_is_there_and_nothing_else(s3_bucket: S3Bucket) -> None:
    with s3_bucket.endpoint.client() as client:
        assert "Contents" not in client.list_objects_v2(Bucket=s3_bucket.name)
        client.put_object(Bucket=s3_bucket.name, Key="a//b", Body=b"bytes")
        answer = client.get_object(Bucket=s3_bucket.name, Key="a//b")
        assert answer["Body"].read() == b"bytes"


def test_each_test_gets_a_bucket_of_its_own(ministack_server: S3Endpoint) -> None:
    one, other = ministack_server.fresh_bucket(), ministack_server.fresh_bucket()
    assert one.name != other.name


def test_a_wrong_secret_is_refused_where_signatures_are_checked(
    signing_ministack_bucket: S3Bucket,
) -> None:
    endpoint, name = signing_ministack_bucket.endpoint, signing_ministack_bucket.name
    with endpoint.client() as client:
        client.put_object(Bucket=name, Key="key", Body=b"bytes")
    with (
        replace(endpoint, secret_key="wrong").client() as client,
        pytest.raises(ClientError, match="SignatureDoesNotMatch"),
    ):
        client.put_object(Bucket=name, Key="key", Body=b"bytes")


def test_a_server_ends_with_its_block(tmp_path: Path) -> None:
    with ministack(tmp_path / "log") as server:
        assert listens(server.url)
    assert not listens(server.url)


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from tests.support.s3_servers import ministack\n"
        "with ministack(pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert listens(url)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not listens(url), "the server to end")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "raise SystemExit('no memory')"]
    server = ServerProcess(program, {}, "/", tmp_path / "log", free_port)
    with pytest.raises(AssertionError, match="ended while it started: no memory"), server:
        pass


def test_a_port_that_was_taken_meanwhile_is_given_up(tmp_path: Path) -> None:
    """The thief answers in the server's place, and is not taken for it."""
    with ministack(tmp_path / "thief") as thief:
        port = int(thief.url.rpartition(":")[2])
        ports = iter([port, port])
        server = ministack(tmp_path / "log", choose_port=lambda: next(ports, None) or free_port())
        with server:
            assert server.url != thief.url
