"""`treefold bucket` between real stores: two independent Ceph sites and local buckets.
Run by `make test-peers`.
"""

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from replicator.stores.port import ObjectProperties, Store
from replicator.windows import WINDOW_BYTES
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
from tests.support.waiting import wait_until
from tests.support.wan import Crossing, WanLink

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

MIB = 1 << 20
# A request of a stitched patch costs about 1 kB, and there are 12 of them.
STITCHED_BYTES_MAX = 32_000
OWNED = ObjectProperties(
    metadata=(("owner", "ann"),), tags=(("team", "red"),), headers=(("content-type", "text/csv"),)
)
NONE = Crossing(0, 0, 0)


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
    source.writer.put_properties(
        current(source, "large"),
        ObjectProperties(given.metadata, (("tag", "new"),), given.headers, given.acl),
    )
    source.writer.put_properties(current(source, "small"), RICH["metadata"])
    assert source.writer.delete(["gone"]) == []
    left = commands.sync()
    assert (left.exit_status, left.last["differences"]) == (3, 1), left.documents
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


@pytest.fixture
def linked_pair(rgw_pair: RgwPair, tmp_path: Path) -> Iterator[tuple[RealPair, WanLink]]:
    """A bucket of site a, and one of site b behind a link."""
    here = rgw_pair.site("a").endpoint
    target, _ = rgw_target(rgw_pair, keeps_versions=False)
    source = s3_address(here.fresh_bucket())
    with WanLink(target.endpoint.address) as link, opened(source, here) as store:
        address = s3_address(target, link.through(target.endpoint))
        yield RealPair(store, target, BucketPair(source, address, tmp_path / "state", here)), link


def test_one_byte_of_a_large_object_crosses_as_its_window(
    linked_pair: tuple[RealPair, WanLink],
) -> None:
    pair, link = linked_pair
    body = bytearray(random.Random(2).randbytes(64 * MIB))
    write_large(pair.source, "large", bytes(body), OWNED)
    assert pair.commands.sync().last["equal"]
    link.reset()
    assert pair.commands.sync().last["copied"] == 0
    without_change = link.traffic().total.length_bytes
    body[40 * MIB + 5] ^= 1
    write_large(pair.source, "large", bytes(body), OWNED)
    link.reset()
    changed = pair.commands.sync()
    traffic = link.traffic()
    assert (changed.exit_status, changed.last["copied"]) == (0, 1), changed.last
    assert changed.last["bytes"] <= WINDOW_BYTES
    assert traffic.total.length_bytes - without_change <= STITCHED_BYTES_MAX, traffic
    found = held(pair.target)
    assert set(found) == {"large"}
    assert found["large"].body == digest(bytes(body))
    assert found["large"].metadata == dict(OWNED.metadata)
    assert found["large"].tags == dict(OWNED.tags)


def test_killed_in_the_middle_it_goes_on_where_it_was(
    linked_pair: tuple[RealPair, WanLink],
) -> None:
    pair, link = linked_pair
    body = bytearray(random.Random(3).randbytes(64 * MIB))
    write_large(pair.source, "large", bytes(body), RICH["all"])
    for number in range(20):
        pair.source.writer.put(f"small{number}", b"x" * 4096, RICH["tags"], ANYTHING)
    link.shape(delay_ms=2, mbit=400)
    # Within a part: a kill before an upload has parts may leave that upload.
    for length_bytes in (MIB, 52 * MIB):
        kill(pair, lambda: link.traffic().total.bytes_to, length_bytes, link)
    link.reset()
    done = pair.commands.sync()
    assert (done.exit_status, done.last["equal"]) == (0, True), done.last
    # Parts that the killed run had sent are not sent again.
    assert link.traffic().total.bytes_to < 56 * MIB
    check_equal(pair, {"large": bytes(body)} | {f"small{n}": b"x" * 4096 for n in range(20)})
    body[40 * MIB + 5] ^= 1
    write_large(pair.source, "large", bytes(body), RICH["all"])
    # The probe copies three ranges, before the patch does.
    for copies in (4, 6):
        kill(
            pair,
            lambda: link.traffic().kinds.get("PUT object?uploadId copy", NONE).requests,
            copies,
            link,
        )
    assert pair.commands.sync().last["equal"]
    check_equal(pair, {"large": bytes(body)} | {f"small{n}": b"x" * 4096 for n in range(20)})
    again = pair.commands.sync()
    assert (again.last["copied"], again.last["bytes"], again.last["equal"]) == (0, 0, True)


def kill(pair: RealPair, progress: Callable[[], int], enough: int, link: WanLink) -> None:
    """Start a sync, and kill it once it has come so far."""
    link.reset()
    with subprocess.Popen(
        pair.commands.sync_process(),
        cwd=ROOT,
        env={**os.environ, **pair.commands.endpoint.environment},
        stdout=subprocess.DEVNULL,
    ) as process:
        wait_until(lambda: process.poll() is not None or progress() >= enough, "the sync to begin")
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGKILL)


def check_equal(pair: RealPair, bodies: Mapping[str, bytes]) -> None:
    """The target has these objects, and nothing of a killed run is left."""
    found = held(pair.target)
    assert {key: one.body for key, one in found.items()} == {
        key: digest(body) for key, body in bodies.items()
    }
    with pair.target.endpoint.client() as client:
        assert not client.list_multipart_uploads(Bucket=pair.target.name).get("Uploads")


def test_damage_behind_the_index_is_found_by_reading_alone(
    rgw_pair: RgwPair, tmp_path: Path
) -> None:
    here = rgw_pair.site("a").endpoint
    target, address = rgw_target(rgw_pair, keeps_versions=False)
    commands = BucketPair(f"local:{tmp_path}/source", address, tmp_path / "state", here)
    with opened(commands.source, here) as source:
        for number in range(6):
            source.writer.put(f"k{number}", b"%d" % number * 100, ObjectProperties(), ANYTHING)
    assert commands.sync().exit_status == 0
    rgw_pair.damage("b", target.name, "k4", b"\1" * 100)
    rgw_pair.damage("b", target.name, "k5", None)
    # Ceph goes on listing both as they were: that is all these claim.
    assert commands.sync().last["level"] == "recorded:blake3"
    for level in ("listed", "recorded"):
        verified = commands.verify(level)
        assert verified.last["levels"]["read"] == 0
    verified = commands.verify("read")
    assert (verified.exit_status, verified.last["equal"]) == (3, False)
    assert [(one["key"], one["kind"]) for one in verified.documents[:-1]] == [
        ("k4", "damaged"),
        ("k5", "damaged"),
    ]


def test_damage_at_the_source_does_not_spread(rgw_pair: RgwPair, tmp_path: Path) -> None:
    here = rgw_pair.site("a").endpoint
    bucket = here.fresh_bucket()
    target, address = rgw_target(rgw_pair, keeps_versions=False)
    commands = BucketPair(s3_address(bucket), address, tmp_path / "state", here)
    with opened(commands.source, here) as source:
        for number in range(5):
            source.writer.put(f"k{number}", b"%d" % number * 100, ObjectProperties(), ANYTHING)
        assert commands.sync().last["equal"]
        source.writer.put("k5", b"5" * 100, ObjectProperties(), ANYTHING)
    rgw_pair.damage("a", bucket.name, "k3", b"\1" * 100)
    for key in ("k4", "k5"):
        rgw_pair.damage("a", bucket.name, key, None)
    report = commands.sync("--delete")
    assert (report.exit_status, report.last["equal"]) == (5, False)
    assert {(one["key"], one["reason"]) for one in report.last["failed"]} == {
        ("k4", "source_unreadable"),
        ("k5", "source_unreadable"),
    }
    # Ceph lost k4 and did not delete it: the copy is the last one that there is.
    assert {key: one.body for key, one in held(target).items()} == {
        f"k{number}": digest(b"%d" % number * 100) for number in range(5)
    }
    verified = commands.verify("read")
    assert [(one["key"], one["kind"]) for one in verified.documents[:-1]] == [
        ("k3", "damaged"),
        ("k4", "damaged"),
        ("k5", "missing"),
    ]
