"""`bucket sync --watch` brings over what is there and what changes, until stopped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from ozone.manager_values import BucketLayout
from replicator.stores.local import LocalBucket
from replicator.stores.local_database import NotABucketError
from replicator.stores.port import ObjectProperties, WriteCondition
from runtime.disk import Disk
from runtime.exit_codes import ExitCode
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.ozone_twin_service import TwinService
from tests.support.s3_servers import S3Bucket
from tests.support.stores import keys
from tests.support.stores import put as put_object
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

pytestmark = pytest.mark.e2e


@contextmanager
def watching(
    folder: Path,
    *options: str,
    source: str = "",
    target: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    source, target = source or f"local:{folder / 'a'}", target or f"local:{folder / 'b'}"
    command = [sys.executable, "-m", "admin.cli", "bucket", "sync", "--watch", *options]
    command += ["--state", str(folder / "state"), source, target]
    with subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def put(bucket: LocalBucket, key: str, body: bytes) -> None:
    bucket.store().writer.put(key, body, ObjectProperties(), WriteCondition())


def sizes(folder: Path) -> dict[str, int]:
    """What the target holds; empty while nobody has made it."""
    try:
        with LocalBucket(folder / "b", Disk(), create=False) as bucket:
            return {one.key: one.size_bytes for one in bucket.store().lister.list_objects("")}
    except NotABucketError:
        return {}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LocalBucket]:
    with LocalBucket(tmp_path / "a", Disk(), create=True) as bucket:
        for number in range(3):
            put(bucket, f"k{number}", bytes(number + 1))
        yield bucket


def test_changes_cross_until_it_is_stopped(tmp_path: Path, source: LocalBucket) -> None:
    with watching(tmp_path, "--json") as process:
        wait_until(lambda: len(sizes(tmp_path)) == 3, "what was there")
        put(source, "k1", bytes(100))
        put(source, "late", bytes(7))
        source.store().writer.delete(["k2"])
        expected = {"k0": 1, "k1": 100, "late": 7}
        wait_until(lambda: sizes(tmp_path) == expected, "what has changed")
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    last = json.loads(printed.splitlines()[-1])
    assert last["stage"] == "LIVE"
    assert last["condition"] == "ACTIVE"
    assert last["applied"] == 3
    with watching(tmp_path) as process:
        put(source, "k0", bytes(50))
        wait_until(lambda: sizes(tmp_path).get("k0") == 50, "what came after a restart")
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert printed == "1 changes applied, 50 bytes sent\n"
    assert "following the log" in said


def test_a_target_is_made_once_and_not_anew_where_it_is_gone(
    tmp_path: Path, source: LocalBucket
) -> None:
    """Its disk may not be mounted: the one below would be filled."""
    target, away = tmp_path / "b", tmp_path / "away"

    def follow_until(count: int) -> None:
        with watching(tmp_path) as process:
            wait_until(lambda: len(sizes(tmp_path)) == count, "the objects")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)

    follow_until(3)
    target.rename(away)
    with watching(tmp_path) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == ExitCode.FAILED
    assert "mounted" in said
    assert not target.exists()
    away.rename(target)
    put(source, "late", b"late")
    follow_until(4)


def test_a_syncer_comes_and_goes_without_its_source_taking_notice(tmp_path: Path) -> None:
    """OZ-034: it is another process than OM and gateway, which serve their clients
    before, while and after it runs.
    """
    with TwinService() as service, OzoneBuckets(service, service.s3_endpoint) as buckets:
        store = buckets.fresh(BucketLayout.OBJECT_STORE)
        address = buckets.address(buckets.place(store)[1])
        environment = service.s3_endpoint.environment
        for number, end in enumerate((signal.SIGKILL, signal.SIGTERM)):
            put_object(store, f"before{number}")
            with watching(tmp_path, source=address, environment=environment) as process:
                put_object(store, f"beside{number}")
                wait_until(lambda: len(sizes(tmp_path)) == len(keys(store)), "all objects")
                process.send_signal(end)
                process.communicate(timeout=30)
        put_object(store, "after")
        assert len(keys(store)) == 5
    assert sizes(tmp_path).keys() == {"before0", "beside0", "before1", "beside1"}


def test_a_second_one_is_refused_while_the_first_runs(tmp_path: Path, source: LocalBucket) -> None:
    """OZ-143."""
    del source
    with watching(tmp_path):
        wait_until(lambda: len(sizes(tmp_path)) == 3, "what was there")
        with watching(tmp_path) as second:
            _, said = second.communicate(timeout=30)
        assert second.returncode == 8
        assert "in use" in said


def test_a_record_of_the_target_that_cannot_be_kept_ends_nothing(
    tmp_path: Path, source: LocalBucket, moto_bucket: S3Bucket
) -> None:
    """It saves the next process questions: what is wrong is said, and all goes on."""
    name, endpoint = moto_bucket.name, moto_bucket.endpoint
    address = f"s3://{name}?endpoint_url=http://{endpoint.address}"

    with endpoint.client() as client:

        def await_objects(count: int) -> None:
            wait_until(
                lambda: client.list_objects_v2(Bucket=name)["KeyCount"] == count, "the objects"
            )

        with watching(tmp_path, target=address, environment=endpoint.environment) as process:
            await_objects(3)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        (record,) = (tmp_path / "state").rglob("target-probe")
        record.unlink()
        # Not even root can write this.
        (record / "in-the-way").mkdir(parents=True)
        put(source, "late", b"late")
        with watching(
            tmp_path, "--json", target=address, environment=endpoint.environment
        ) as process:
            await_objects(4)
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=60)
    assert process.returncode in (0, ExitCode.PARTLY)
    last = json.loads(printed.splitlines()[-1])
    assert (last["condition"], last["fault"]) == ("ACTIVE", "local_disk")
    assert "target-probe" in last["message"]


def test_what_does_not_go_together_is_refused(tmp_path: Path, source: LocalBucket) -> None:
    del source
    with watching(tmp_path, "--dry-run") as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "--watch" in said


def test_the_next_process_takes_the_word_of_the_last_one_about_its_target(
    tmp_path: Path, source: LocalBucket, moto_bucket: S3Bucket
) -> None:
    """A target is asked some forty questions; also where what is kept is damaged."""
    name, endpoint = moto_bucket.name, moto_bucket.endpoint
    with WanLink(endpoint.address) as link, endpoint.client() as client:
        address = f"s3://{name}?endpoint_url=http://{link.address}"

        def writes_until_it_has(count: int) -> int:
            """The PUTs of a process that brings over all objects."""
            link.reset()
            with watching(tmp_path, target=address, environment=endpoint.environment) as process:
                wait_until(
                    lambda: client.list_objects_v2(Bucket=name)["KeyCount"] == count, "the objects"
                )
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
            # It may not have recorded yet that all was compared.
            assert process.returncode in (0, ExitCode.PARTLY)
            return link.traffic().kinds["PUT object"].requests

        assert writes_until_it_has(3) > 3 + 5
        put(source, "next", b"next")
        # What the last process had no time to record is sent again.
        assert 1 <= writes_until_it_has(4) <= 1 + 3
        (probe,) = (tmp_path / "state").rglob("target-probe")
        probe.write_bytes(b"\xff{")
        put(source, "last", b"last")
        assert writes_until_it_has(5) > 1 + 5
