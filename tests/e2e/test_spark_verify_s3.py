"""`treefold bucket verify --engine spark` of two buckets of S3 says what one machine
says: each task lists and reads both over the network.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from tests.support.decaying_link import DecayingLink
from tests.support.s3_servers import S3Bucket, S3Endpoint

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.peers]

# More keys than a page of the listing has, else it is not cut.
KEYS = [f"many/{number * 7919 % 4096:03x}" for number in range(1_001)]
DECAYED = b"what a disk forgets"


@dataclass(frozen=True)
class S3Pair:
    """Two buckets that differ after a sync, one of which is across a link."""

    source: str
    target: str
    state: Path
    environment: dict[str, str]

    def run(self, name: str, *options: str, remote: str | None = None) -> Result:
        """Run a command on them; Spark's are done by a server."""
        line = ["bucket", name, self.source, self.target, "--state", str(self.state), *options]
        if remote is not None:
            line += ["--engine", "spark", "--conf", f"spark.pyspark.python={sys.executable}"]
        environment = self.environment | {"SPARK_REMOTE": remote}
        return CliRunner().invoke(treefold, line, env=environment)


def address(bucket: S3Bucket, endpoint: S3Endpoint) -> str:
    return f"s3://{bucket.name}?endpoint_url={endpoint.url}"


@pytest.fixture(scope="module")
def pair(
    ministack_server: S3Endpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Pair]:
    ours, theirs = ministack_server.fresh_bucket(), ministack_server.fresh_bucket()
    with DecayingLink(ministack_server, DECAYED) as link, ministack_server.client() as client:
        pair = S3Pair(
            address(ours, ministack_server),
            address(theirs, link.endpoint),
            tmp_path_factory.mktemp("pair") / "state",
            ministack_server.environment,
        )

        def put(bucket: S3Bucket, bodies: dict[str, bytes]) -> None:
            for key, body in bodies.items():
                client.put_object(Bucket=bucket.name, Key=key, Body=body)

        put(ours, {f"few/{name}": name.encode() for name in ("same", "gone", "é", "edited")})
        put(ours, {"few/decayed": DECAYED * 100})
        synced = pair.run("sync")
        assert synced.exit_code == 0, synced.output
        for bucket in (ours, theirs):
            put(bucket, dict.fromkeys(KEYS, b"1"))
        put(ours, {"few/new/😀": b"3", KEYS[7]: b"22"})
        put(theirs, {"few/edited": b"editor", "few/only/\uff21": b"4"})
        client.delete_object(Bucket=theirs.name, Key="few/gone")
        client.delete_object(Bucket=theirs.name, Key=KEYS[500])
        link.decays.set()
        yield pair


DEEP = [
    ("changed", "few/edited"),
    ("damaged", "few/decayed"),
    ("extra", "few/only/\uff21"),
    ("missing", "few/gone"),
    ("missing", "few/new/😀"),
]


def test_damage_is_found_by_tasks_that_read_both_buckets(pair: S3Pair, server: str) -> None:
    options = ("--prefix", "few/", "--level", "read", "--json")
    ours, theirs = (pair.run("verify", *options, remote=place) for place in (server, None))
    assert (ours.exit_code, theirs.exit_code) == (3, 3), ours.output + repr(ours.exception)
    assert without_times(ours) == without_times(theirs)
    *lines, _ = map(json.loads, ours.stdout.splitlines())
    assert sorted((one["kind"], one["key"]) for one in lines) == DEEP
    assert_receipts_agree(pair)


def test_ranges_of_two_listings_are_those_of_one(pair: S3Pair, server: str) -> None:
    options = ("--level", "listed", "--json")
    ours = pair.run("verify", *options, "--shards", "4", remote=server)
    theirs = pair.run("verify", *options)
    assert (ours.exit_code, theirs.exit_code) == (3, 3), ours.output + repr(ours.exception)
    assert without_times(ours) == without_times(theirs)
    keys = [json.loads(line).get("key") for line in ours.stdout.splitlines()]
    assert {KEYS[7], KEYS[500]} < set(keys)
    # It was cut: each range is asked of both buckets.
    assert last(ours)["roundTrips"] > last(theirs)["roundTrips"]
    assert_receipts_agree(pair)


def last(result: Result) -> dict[str, int]:
    found: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return found


def without_times(result: Result) -> list[dict[str, object]]:
    """The lines, without what a second run or more requests change."""
    changing = {"oldestReadAt", "bytesCrossed", "roundTrips"}
    lines = map(json.loads, result.stdout.splitlines())
    return [{name: line[name] for name in line.keys() - changing} for line in lines]


def assert_receipts_agree(pair: S3Pair) -> None:
    """Both runs signed a receipt of the same sets."""
    ours, theirs = (pair.state / "receipts.jsonl").read_text().splitlines()[-2:]
    roots = [re.findall(r'"(?:root|set_digest|digest)": *"[^"]+"', one) for one in (ours, theirs)]
    assert roots[0] == roots[1] != []
