"""A real Ozone by its OM, in what no twin of it can show. Run by `make test-ozone`."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.object_checksum import Crc
from ozone.errors import ManagerError
from ozone.manager import ManagerClient
from ozone.manager_values import BucketLayout
from replicator.copy_task import CopyLimits
from replicator.hashing import crc_hash
from tests.support.bucket_sync import SyncRunner
from tests.support.flawed_stores import FlawedReader
from tests.support.ozone import OzoneCluster
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.s3_servers import S3Endpoint
from tests.support.stores import content, current, keys

# With the tests of datanodes, which take less time than the others.
pytestmark = [pytest.mark.ozone, pytest.mark.datanodes, pytest.mark.timeout(900)]
FLAT, TREE = BucketLayout.OBJECT_STORE, BucketLayout.FILE_SYSTEM_OPTIMIZED
MIB = 1 << 20
# Once in both orders by which an OM sorts and walks.
ODD = ["\uff01", "\ue000", "😀1", "\U0010ffff", "a b", "%25", "ü"]


@pytest.fixture
def buckets(ozone_cluster: OzoneCluster, ozone_gateway: S3Endpoint) -> Iterator[OzoneBuckets]:
    with OzoneBuckets(ozone_cluster, ozone_gateway) as opened:
        yield opened


def test_a_copy_has_the_crc_that_its_writer_recorded(
    buckets: OzoneBuckets, ozone_cluster: OzoneCluster, tmp_path: Path
) -> None:
    """OZ-005: of keys that came through no gateway, and so have no ETag. A bit of what
    is read flips on the way.
    """
    source, target = buckets.fresh(FLAT), buckets.fresh(FLAT)
    volume, bucket = buckets.place(source)
    bodies = {"small": random.Random(1).randbytes(100_001), "large": bytes(20 * MIB + 5)}
    for key, body in bodies.items():
        (tmp_path / key).write_bytes(body)
    ozone_cluster.shell(*(f"key put /{volume}/{bucket}/{key} {tmp_path / key}" for key in bodies))
    for key, body in bodies.items():
        assert current(source, key).hashes == (crc_hash(Crc.CRC32, body),)
    reader = FlawedReader(source)
    run = SyncRunner(
        replace(source, reader=reader), target, tmp_path / "state", copy_limits=CopyLimits()
    )
    for key, body in bodies.items():
        reader.bodies[key] = body[:-1] + bytes([body[-1] ^ 1])
    report = run()
    assert {(one.key, one.reason) for one in report.failed} == {
        ("small", "source_disagrees"),
        ("large", "source_disagrees"),
    }
    assert keys(target) == []
    reader.bodies.clear()
    assert run().equal
    for key, body in bodies.items():
        assert content(target, current(target, key)) == body


def test_errors_of_the_om_have_its_name_and_no_traceback(ozone_cluster: OzoneCluster) -> None:
    with ExitStack() as stack:
        client = ManagerClient([ozone_cluster.om_address], user="zoe")
        manager = stack.enter_context(closing(client))
        with pytest.raises(ManagerError) as missing:
            manager.bucket("s3v", "no-such-bucket")
        assert missing.value.facts["status"] == "BUCKET_NOT_FOUND"
        assert [node.is_leader for node in manager.nodes()] == [True]
