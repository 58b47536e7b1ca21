"""rclone, with which we compare ourselves: it copies, it checks, its bytes are
counted.
"""

import pytest

from tests.support.rclone import rclone_check, rclone_sync, rclone_version
from tests.support.s3_servers import S3Bucket
from tests.support.wan import WanLink


@pytest.fixture
def target(ministack_bucket: S3Bucket) -> S3Bucket:
    return ministack_bucket.endpoint.fresh_bucket()


def test_it_is_new_enough_to_be_compared_with() -> None:
    assert rclone_version().startswith("v1.")


def test_a_sync_copies_and_its_bytes_are_counted(
    ministack_bucket: S3Bucket, target: S3Bucket
) -> None:
    endpoint, body = ministack_bucket.endpoint, bytes(50_000)
    with endpoint.client() as client, WanLink(endpoint.address) as link:
        for i in range(3):
            client.put_object(Bucket=ministack_bucket.name, Key=f"key-{i}", Body=body)
        done = rclone_sync(ministack_bucket, target, link)
        assert done.exit_status == 0, done.log
        listed = client.list_objects_v2(Bucket=target.name)["Contents"]
        assert {row["Key"]: row["Size"] for row in listed} == {f"key-{i}": 50_000 for i in range(3)}
        assert done.traffic.kinds["PUT object"].requests == 3
        assert done.traffic.total.bytes_to > 3 * len(body)
        # The source is on this side of the link.
        assert "GET object" not in done.traffic.kinds


def test_a_check_counts_what_is_equal_and_what_differs(
    ministack_bucket: S3Bucket, target: S3Bucket
) -> None:
    endpoint = ministack_bucket.endpoint
    with endpoint.client() as client, WanLink(endpoint.address) as link:
        for bucket in (ministack_bucket, target):
            for i in range(3):
                client.put_object(Bucket=bucket.name, Key=f"key-{i}", Body=b"same")
        equal = rclone_check(ministack_bucket, target, link)
        assert (equal.exit_status, equal.differences, equal.matching) == (0, 0, 3), equal.log
        client.put_object(Bucket=target.name, Key="key-1", Body=b"else")
        found = rclone_check(ministack_bucket, target, link)
        assert (found.exit_status, found.differences, found.matching) == (1, 1, 2), found.log
