"""`treefold bucket` between real stores: two independent Ceph sites and local buckets.
Run by `make test-peers`.
"""

import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from replicator.stores.port import ObjectProperties, Store
from tests.support.bucket_commands import (
    RICH,
    BucketPair,
    digest,
    held,
    opened,
    s3_address,
    write_all,
    write_large,
)
from tests.support.processes import ROOT
from tests.support.rgw import RgwPair
from tests.support.s3_servers import S3Bucket
from tests.support.stores import ANYTHING, current
from tests.support.wan import WanLink

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

MIB = 1 << 20
# A request of a stitched patch costs about 1 kB, and there are 12 of them.
STITCHED_BYTES_MAX = 32_000


@dataclass(frozen=True)
class RealPair:
    """A source that a test writes to, and a Ceph bucket as the target."""

    source: Store
    target: S3Bucket
    commands: BucketPair


def rgw_target(pair: RgwPair, *, keeps_versions: bool) -> tuple[S3Bucket, str]:
    """A fresh bucket of site b, and its address."""
    site = pair.site("b").endpoint
    bucket, scratch = site.fresh_bucket(), ""
    if keeps_versions:
        with site.client() as client:
            client.put_bucket_versioning(
                Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
            )
        scratch = f"&scratch_bucket={site.fresh_bucket().name}"
    return bucket, s3_address(bucket) + scratch


@pytest.fixture(params=["local to plain", "local to versions", "plain to plain", "versions"])
def real_pair(
    rgw_pair: RgwPair, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[RealPair]:
    here = rgw_pair.site("a").endpoint
    source = f"local:{tmp_path}/source"
    if not request.param.startswith("local"):
        bucket = here.fresh_bucket()
        source = s3_address(bucket)
        if request.param == "versions":
            with here.client() as client:
                client.put_bucket_versioning(
                    Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
                )
    target, address = rgw_target(rgw_pair, keeps_versions="versions" in request.param)
    with opened(source, here) as store:
        yield RealPair(store, target, BucketPair(source, address, tmp_path / "state", here))


def test_every_object_crosses_with_all_that_belongs_to_it(real_pair: RealPair) -> None:
    bodies = write_all(real_pair.source)
    first = real_pair.commands.sync()
    assert (first.exit_status, first.last["failed"]) == (0, []), first.stderr
    assert first.last["copied"] == len(bodies)
    assert (first.last["equal"], first.last["level"]) == (True, "recorded:blake3")
    found = held(real_pair.target)
    assert {key: one.body for key, one in found.items()} == {
        key: digest(body) for key, body in bodies.items()
    }
    for name, given in RICH.items():
        one = found[f"rich/{name}"]
        assert one.metadata == dict(given.metadata)
        assert one.tags == dict(given.tags)
        assert dict(given.headers).items() <= one.headers.items()
        assert len(one.grants) == len(given.acl)
    again = real_pair.commands.sync()
    assert (again.exit_status, again.last["copied"], again.last["bytes"]) == (0, 0, 0)
    assert (again.last["metadataOnly"], again.last["equal"]) == (0, True)
    assert (again.last["level"], again.last["root"]) == (first.last["level"], first.last["root"])
    for level in ("listed", "recorded", "read"):
        verified = real_pair.commands.verify(level)
        assert (verified.exit_status, verified.last["equal"]) == (0, True), verified.documents
        assert verified.last["levels"][level] == len(bodies)


def test_a_change_crosses_as_that_change_alone(real_pair: RealPair) -> None:
    source, commands = real_pair.source, real_pair.commands
    body = bytearray(random.Random(1).randbytes(64 * MIB))
    given = RICH["all"]
    write_large(source, "large", bytes(body), given)
    for key in ("small", "gone"):
        source.writer.put(key, b"x" * 4096, ObjectProperties(), ANYTHING)
    assert commands.sync().exit_status == 0
    # One tag, other metadata, one object less: no byte of any object.
    source.writer.put_properties(current(source, "large"), ObjectProperties(
        given.metadata, (("tag", "new"),), given.headers, given.acl
    ))
    source.writer.put_properties(current(source, "small"), RICH["metadata"])
    assert source.writer.delete(["gone"]) == []
    left = commands.sync()
    assert (left.exit_status, left.last["differences"]) == (3, 1)
    assert (left.last["copied"], left.last["metadataOnly"], left.last["bytes"]) == (0, 2, 0)
    deleted = commands.sync("--delete")
    assert (deleted.exit_status, deleted.last["deleted"]) == (0, 1), deleted.last
    found = held(real_pair.target)
    assert found["large"].body == digest(bytes(body))
    assert found["large"].tags == {"tag": "new"}
    assert found["large"].metadata == dict(given.metadata)
    assert dict(given.headers).items() <= found["large"].headers.items()
    assert len(found["large"].grants) == 1
    assert found["small"].metadata == dict(RICH["metadata"].metadata)
    assert set(found) == {"large", "small"}
