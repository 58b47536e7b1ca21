"""`treefold bucket` as real processes: local buckets, emulators, a verifier."""

import random
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.stores.port import ObjectProperties
from tests.support.bucket_command import (
    PROPERTIES,
    BucketCommand,
    bodies_in,
    flip_a_bit,
    opened,
    write,
)
from tests.support.processes import TreefoldProcess
from tests.support.s3_servers import S3Bucket
from tests.support.stores import ANYTHING

pytestmark = pytest.mark.e2e

# Names that break others: beyond the BMP beside full-width forms, slashes, escapes.
ODD_KEYS = (
    "😀",
    "\uff21",
    "a//b",
    "dir/",
    "../up",
    "a?b=c",
    "100%25",
    "sp ace ",
    "quote'\"<&>",
    "x" * 1_000,
)
BODIES = {f"data/{number:03}": random.Random(number).randbytes(number * 7) for number in range(60)}
# Above the size that a local bucket keeps in its database.
FILE_BODY = random.Random(1).randbytes(40_000)


@pytest.fixture
def command(tmp_path: Path) -> BucketCommand:
    return BucketCommand(tmp_path / "home")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """A source with objects, and a target that does not exist."""
    write(tmp_path / "source", BODIES | {"file": FILE_BODY} | dict.fromkeys(ODD_KEYS, b"odd"))
    return f"local:{tmp_path}/source", f"local:{tmp_path}/target"


def wait_for_plan(process: "subprocess.Popen[str]") -> None:
    """Return when the command begins to copy."""
    assert process.stderr is not None
    assert any(line.startswith("plan: copy") for line in process.stderr)


def test_a_copy_is_equal_and_what_changes_is_found_and_copied(
    command: BucketCommand, pair: tuple[str, str], tmp_path: Path
) -> None:
    first = command.run("sync", *pair, "--json")
    assert (first.status, len(first.documents)) == (0, 1)
    root = first.last.pop("root")
    assert first.last | {"root": root} == {
        "copied": len(BODIES) + 1 + len(ODD_KEYS),
        "deleted": 0,
        "metadataOnly": 0,
        "bytes": sum(map(len, BODIES.values())) + len(FILE_BODY) + 3 * len(ODD_KEYS),
        "failed": [],
        "failedCount": 0,
        "equal": True,
        "level": "recorded:blake3",
        "root": root,
        "differences": 0,
    }
    assert bodies_in(tmp_path / "target") == bodies_in(tmp_path / "source")
    with opened(tmp_path / "target") as store:
        facts = store.reader.facts("data/001")
        assert facts is not None
        store.writer.put_properties(facts, replace(PROPERTIES, tags=(("team", "blue"),)))
        store.writer.delete(["data/002"])
        store.writer.put("extra", b"1", ObjectProperties(), ANYTHING)
    found = command.run("verify", *pair, "--json")
    assert found.status == 3
    assert {(one["kind"], one["key"]) for one in found.documents[:-1]} == {
        ("changed", "data/001"),
        ("missing", "data/002"),
        ("extra", "extra"),
    }
    assert (found.last["equal"], found.last["differences"]) == (False, 3)
    kept = command.call("sync", *pair, "--json")
    assert kept.status == 3
    assert (kept.last["copied"], kept.last["metadataOnly"], kept.last["deleted"]) == (1, 1, 0)
    assert (kept.last["equal"], kept.last["differences"]) == (False, 1)
    last = command.call("sync", *pair, "--delete", "--json")
    assert (last.status, last.last["deleted"], last.last["root"]) == (0, 1, root)


def test_a_dry_run_leaves_nothing_and_is_the_plan_that_is_executed(
    command: BucketCommand, pair: tuple[str, str], tmp_path: Path
) -> None:
    dry = command.run("sync", *pair, "--dry-run", "--json")
    assert (dry.status, dry.last["dryRun"]) == (0, True)
    assert not (tmp_path / "target").exists()
    assert not (tmp_path / "home").exists()
    done = command.call("sync", *pair, "--json")
    assert done.last["copied"] == dry.last["copies"] == len(dry.documents) - 1
    assert done.last["bytes"] == dry.last["bytes"]


def test_names_that_the_terminal_cannot_show_are_escaped(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    command = BucketCommand(tmp_path / "home", {"PYTHONIOENCODING": "latin-1"})
    plan = command.run("sync", *pair, "--dry-run", "--prefix", "😀")
    assert (plan.status, "\\U0001f600" in plan.stdout) == (0, True)


def test_damage_behind_the_index_is_found_by_reading_only_and_then_replaced(
    command: BucketCommand, pair: tuple[str, str], tmp_path: Path
) -> None:
    command.run("sync", *pair)
    flip_a_bit(tmp_path / "target", FILE_BODY)
    recorded = command.call("verify", *pair, "--json")
    assert (recorded.status, recorded.last["equal"]) == (0, True)
    assert "only" in recorded.stderr
    read = command.call("verify", *pair, "--level", "read", "--json")
    assert (read.status, read.documents[0]) == (
        3,
        {"kind": "damaged", "key": "file", "level": "read"},
    )
    assert len(read.documents) == 2
    assert command.call("verify", *pair).status == 3
    assert command.call("sync", *pair, "--json").last["copied"] == 1
    assert command.call("verify", *pair, "--level", "read").status == 0
    assert bodies_in(tmp_path / "target")["file"] == FILE_BODY


def test_a_killed_sync_continues_and_leaves_no_lock(
    command: BucketCommand, pair: tuple[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "source", {f"large{n}": random.Random(n).randbytes(400_000) for n in range(9)})
    with command.start("sync", *pair, "--rate", "500KiB/s", "--transfers", "1") as process:
        wait_for_plan(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(signal.SIGKILL)
    done = command.run("sync", *pair, "--json")
    assert (done.status, done.last["equal"]) == (0, True)
    total = sum(map(len, bodies_in(tmp_path / "source").values()))
    copied = done.last["bytes"]
    assert isinstance(copied, int)
    assert copied < total
    assert bodies_in(tmp_path / "target") == bodies_in(tmp_path / "source")


def test_an_interrupted_command_says_so(command: BucketCommand, pair: tuple[str, str]) -> None:
    with command.start("sync", *pair, "--rate", "1KiB/s") as process:
        wait_for_plan(process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted"


def test_an_emulator_gets_a_copy_and_gives_it_back(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    endpoint = s3_bucket.endpoint
    command = BucketCommand(tmp_path / "home", endpoint.environment)
    source, back = f"local:{tmp_path}/source", f"local:{tmp_path}/back"
    # A path with dots is resolved by HTTP clients on the way.
    odd = {key: b"odd" for key in ODD_KEYS if ".." not in key}
    write(tmp_path / "source", BODIES | odd)
    remote = f"s3://{s3_bucket.name}/pre?endpoint_url={endpoint.url}"
    there = command.run("sync", source, remote, "--json")
    assert (there.status, there.last["equal"], there.last["failed"]) == (0, True, [])
    assert "ACLs" in there.stderr
    assert command.call("verify", source, remote, "--level", "read", "--json").status == 0
    assert command.call("sync", remote, back).status == 0
    listed = command.call("verify", remote, back, "--level", "listed", "--json")
    assert (listed.status, listed.last["roundTrips"] != 0) == (0, True)
    assert bodies_in(tmp_path / "back") == bodies_in(tmp_path / "source")
    # A pair that nobody has synced is compared by what both stores say.
    fresh = BucketCommand(tmp_path / "other", endpoint.environment)
    checked = fresh.call("verify", source, remote, "--json")
    assert (checked.status, checked.last["differences"]) == (0, 0)


def test_a_verifier_proves_equality_with_less_than_a_kilobyte(
    command: BucketCommand, pair: tuple[str, str], tmp_path: Path
) -> None:
    with opened(tmp_path / "target"):
        pass
    arguments = ("verifier", "run", "--bucket", pair[1], "--state-folder", f"{tmp_path}/verifier")
    with TreefoldProcess(
        tmp_path / "run", *arguments, "--listen", "127.0.0.1:0", "--writes"
    ) as process:
        verifier = ("--verifier", process.address())
        done = command.run("sync", *pair, *verifier, "--json")
        assert (done.status, done.last["equal"]) == (0, True)
        proof = command.run("verify", *pair, *verifier, "--json")
        assert (proof.status, proof.last["equal"]) == (0, True)
        crossed = proof.last["bytesCrossed"]
        assert isinstance(crossed, int)
        assert crossed < 1_000
        flip_a_bit(tmp_path / "target", FILE_BODY)
        assert command.call("verify", *pair, *verifier).status == 0
        damaged = {"kind": "damaged", "key": "file", "level": "read"}
        read = command.call("verify", *pair, *verifier, "--level", "read", "--json")
        assert (read.status, read.documents[:-1]) == (3, [damaged])
        # It is known from then on, whatever is read again.
        later = command.call("verify", *pair, *verifier, "--json")
        assert (later.status, later.documents[0]["kind"]) == (3, "damaged")
        text = command.call("verify", *pair, *verifier)
        assert "damaged    file" in text.stdout
        assert "1 damaged" in text.stdout
        # A change is not damage.
        write(tmp_path / "source", {"changed": b"before"})
        command.call("sync", *pair, *verifier)
        write(tmp_path / "source", {"changed": b"after"})
        kinds = command.call("verify", *pair, *verifier, "--json").documents[:-1]
        assert [(one["kind"], one["key"]) for one in kinds] == [("changed", "changed")]
        command.call("sync", *pair, *verifier)
        assert command.call("verify", *pair, *verifier, "--level", "read").status == 0
        flip_a_bit(tmp_path / "source", FILE_BODY)
        read = command.call("verify", *pair, *verifier, "--level", "read", "--json")
        assert (read.status, read.documents[:-1]) == (3, [damaged])
        other = command.call("verify", pair[0], f"local:{tmp_path}/other", *verifier)
        assert (other.status, "is of" in other.stderr) == (2, True)
        busy = command.call("index", pair[1], "--state", f"{tmp_path}/verifier")
        assert busy.status == 8
        assert process.stop(signal.SIGTERM) == 0
    checked = command.call("index", pair[1], "--state", f"{tmp_path}/verifier", "--check", "--json")
    assert checked.last["indexDamage"] == []
    assert checked.last["objects"] == len(BODIES) + 2 + len(ODD_KEYS)
    down = command.call("verify", *pair, *verifier)
    assert down.status == 7
