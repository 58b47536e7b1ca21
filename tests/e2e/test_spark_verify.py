"""`treefold bucket verify --engine spark` says what one machine says: by a server of
Spark Connect, and by this process's own Spark.
"""

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from admin.cli import treefold
from proof.item import EvidenceLevel
from replicator.stores.errors import StoreUnavailableError
from replicator.verified_ranges import RangeTask
from spark.bucket_verify import SparkRangeEngine
from spark.errors import FolderNotSharedError, SparkFailedError
from tests.support.bucket_command import flip_a_bit, opened, write

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.peers]

# More keys than a page of the listing has, else it is not cut.
KEYS = [
    f"{chance:03x}/{number:04}" for number in range(1_100) for chance in (number * 7919 % 4096,)
]
LARGE = b"large" * 10_000
TIMES = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+Z")


@dataclass(frozen=True)
class Pair:
    """Two buckets that differ by chance after a sync."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> "Pair":
        """Write them."""
        chance, pair = random.Random(7), cls(folder)
        write(folder / "source", dict.fromkeys(KEYS, b"1") | {"large": LARGE})
        assert pair.run("sync").exit_code == 0
        some = chance.sample(KEYS, 60)
        write(folder / "source", dict.fromkeys(some[:15], b"22") | {"new/é": b"", "new/😀": b"3"})
        write(folder / "target", dict.fromkeys(some[15:30], b"2") | {"only/\uff21": b"4"})
        with opened(folder / "target") as store:
            assert not store.writer.delete(some[30:45])
        with opened(folder / "source") as store:
            assert not store.writer.delete(some[45:])
        flip_a_bit(folder / "target", LARGE)
        return pair

    def run(self, *words: str, remote: str | None = None) -> Result:
        """Run a command on them; Spark's are done by a server."""
        name, *options = words
        place = [f"local:{self.folder}/source", f"local:{self.folder}/target"]
        line = ["bucket", name, *place, "--state", f"{self.folder}/state", *options]
        if remote is not None:
            line += ["--engine", "spark", "--conf", f"spark.pyspark.python={sys.executable}"]
        return CliRunner().invoke(treefold, line, env={"SPARK_REMOTE": remote})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.made(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    "options",
    [
        ("--level", "listed"),
        ("--level", "recorded", "--json"),
        ("--level", "read", "--json"),
        ("--prefix", "new/"),
    ],
)
def test_the_lines_and_the_status_are_those_of_one_machine(
    pair: Pair, server: str, options: tuple[str, ...]
) -> None:
    ours = pair.run("verify", *options, "--shards", "3", remote=server)
    theirs = pair.run("verify", *options)
    assert (ours.exit_code, theirs.exit_code) == (3, 3), ours.output + repr(ours.exception)
    assert TIMES.sub("T", ours.stdout) == TIMES.sub("T", theirs.stdout)
    # Both sign a receipt of what they have seen.
    receipts = (pair.folder / "state" / "receipts.jsonl").read_text().splitlines()[-2:]
    roots = [re.findall(r'"(?:root|set_digest|digest)": *"[^"]+"', line) for line in receipts]
    assert roots[0] == roots[1] != []


def test_what_is_equal_is_said_to_be(pair: Pair, server: str) -> None:
    done = pair.run("verify", "--prefix", "0", "--level", "listed", remote=server)
    assert done.exit_code == 0, done.output
    assert "74 keys compared: 74 by listing\nequal: root " in done.stdout


def test_ranges_are_rows_of_a_frame_and_keys_do_not_pass_through_spark(
    tmp_path: Path, session: SparkSession
) -> None:
    ranges = pa.table({"number": pa.array([0, 1], pa.int32()), "after": ["", "b"]})
    engine = SparkRangeEngine(session)
    task = RangeTask("local:a", "local:b", "", EvidenceLevel.LISTED, tmp_path)
    frame = engine.frame(ranges, task, ranges.schema, tmp_path / "marker")
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert (plan.count("Exchange"), plan.count("MapInArrow"), "Sort" in plan) == (1, 1, False)
    assert engine.tasks_at_once() == 2


def test_errors_of_tasks_have_their_names(tmp_path: Path, session: SparkSession) -> None:
    ranges = pa.table({"number": pa.array([0], pa.int32())})
    engine = SparkRangeEngine(session)

    def rows(text: str, marker: str) -> pa.Table:
        def work(_: object) -> object:
            yield from ()
            raise StoreUnavailableError(text) if text else ValueError("a defect")

        return engine.rows(ranges, work, ranges.schema, tmp_path / marker, lambda _: None)

    with pytest.raises(FolderNotSharedError, match=f"executors do not see {tmp_path}"):
        rows("", "none")
    (tmp_path / "marker").touch()
    with pytest.raises(StoreUnavailableError, match=r"^s3://b: it did not answer$") as caught:
        rows("s3://b: it did not answer", "marker")
    assert caught.value.exit_status == 7
    with pytest.raises(SparkFailedError, match=r"verifying a bucket failed on Spark: .*a defect"):
        rows("", "marker")
