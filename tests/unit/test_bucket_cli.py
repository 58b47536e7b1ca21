"""`treefold bucket`: wrong input is named and changes nothing; receipts offline."""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from admin.bucket_pair import open_pair
from admin.cli import treefold
from admin.verify_metrics import VerifyOutcome
from proof.item import HashAlgorithm
from proof.receipts import load_signing_key, public_key_bytes
from replicator.stores.local import LocalBucket
from replicator.stores.opening import open_store
from replicator.verifier.process import CALL_LIMITS
from replicator.verifier.server import VerifierService
from replicator.verifier.state import locked_state, open_index
from runtime.disk import Disk
from runtime.folder_lock import FolderLock
from runtime.rate_limit import SystemClock
from runtime.rpc import start_server
from tests.support.bucket_command import bodies_in, opened, write
from tests.support.identities import ANYBODY
from tests.support.listings import (
    ListedVersion,
    version_of,
    versions_by_chance,
    write_inventory,
    write_listing,
)
from tests.support.receipts import OUR_KEY, THEIR_KEY, chain_of

INDEX = ("local:DIR/source", "--state", "DIR/i")


@dataclass(frozen=True)
class Place:
    """A folder with a source of three objects, and a home."""

    folder: Path

    def bucket(self, *arguments: str) -> Result:
        """Run `treefold bucket` in this process."""
        environment = {"XDG_STATE_HOME": str(self.folder / "home")}
        words = [word.replace("DIR", str(self.folder)) for word in arguments]
        return CliRunner().invoke(treefold, ["bucket", *words], env=environment)

    def names(self) -> set[str]:
        """What is in the folder."""
        return set(os.listdir(self.folder))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    write(tmp_path / "source", {"a": b"1", "b": b"22", "c": b"333"})
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").write_text("x")
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("sync", "local:DIR/source", ""), 2, "address of a store is empty"),
        (("sync", "local:DIR/source", "DIR/target"), 2, "local:"),
        (("sync", "local:DIR/source", "s3://k:s@b"), 2, "no credentials"),
        (("sync", "local:DIR/source", "s3://b?endpoint_url=http://127.0.0.1:1"), 2, "AWS_ACCESS"),
        (("sync", "local:DIR/none", "local:DIR/target"), 1, "does not exist"),
        (("sync", "local:DIR/plain", "local:DIR/target"), 1, "no bucket"),
        (("sync", "local:DIR/source", "local:DIR/plain"), 1, "no bucket"),
        (("sync", "local:DIR/source", "local:DIR/plain/file"), 1, "not a directory"),
        (("sync", "local:DIR/source", "local:DIR/source"), 6, "same bucket"),
        (("sync", "local:DIR/source", "local:DIR/source/data/t"), 6, "inside the other"),
        (("sync", "local:DIR/source", "local:DIR"), 6, "inside the other"),
        (("precheck", "local:DIR/source", "local:DIR/plain/../source"), 6, "same bucket"),
        (("verify", "local:DIR/source", "local:DIR/target"), 1, "does not exist"),
        (("verify", "local:DIR/source", "local:DIR/t", "--level", "deep"), 2, "recorded"),
        (("sync", "local:DIR/source", "local:DIR/t", "--state", ""), 2, "it is empty"),
        (("sync", "local:DIR/source", "local:DIR/t", "--state", "DIR/plain/file"), 2, "is a file"),
        (("sync", "local:DIR/source", "local:DIR/t", "--state", "/proc/x"), 1, "/proc/x"),
        (("sync", "local:DIR/source", "local:DIR/t", "--state", "s3://x/y"), 2, "is an address"),
        (("sync", "local:DIR/source", "local:DIR/t", "--state", "DIR/t"), 2, "inside the bucket"),
        (("sync", "local:DIR/source", "local:DIR/t", "--state", "DIR/source/x"), 2, "inside the"),
        (("sync", "local:DIR/source", "local:DIR/t", "--rate", "fast"), 2, "5MiB/s"),
        (("sync", "local:DIR/source", "local:DIR/t", "--verifier", "host"), 2, "--verifier"),
        (("sync", "local:DIR/source", "local:DIR/t", "--insecure"), 2, "need --verifier"),
        (("verify", "local:DIR/source", "local:DIR/t", "--tls-ca", "x"), 2, "need --verifier"),
        (
            ("verify", "local:DIR/source", "local:DIR/t", "--verifier", "127.0.0.1:1"),
            7,
            "verifier_unavailable",
        ),
        (
            ("verify", "local:DIR/a", "local:DIR/b", "--level=listed", "--verifier=127.0.0.1:1"),
            2,
            "exclude each other",
        ),
        (("verify", "local:DIR/a", "local:DIR/b", "--shards", "2"), 2, "is for --engine spark"),
        (("verify", "local:DIR/a", "local:DIR/b", "--conf", "a=b"), 2, "are for --engine spark"),
        (
            ("verify", "local:DIR/a", "local:DIR/b", "--engine=spark", "--verifier=127.0.0.1:1"),
            2,
            "Leave out one of them",
        ),
        (
            ("verify", "local:DIR/source", "local:DIR/t", "--metrics-file", "DIR/none/x.prom"),
            2,
            "there is no folder",
        ),
        (("index", "local:DIR/none", "--state", "DIR/index"), 1, "does not exist"),
        (("index", "local:DIR/source", "--state", "DIR/source/i"), 2, "inside the bucket"),
        (("index", *INDEX, "--engine", "spark"), 2, "needs --inventory, --listing or"),
        (("index", *INDEX, "--master", "local[2]"), 2, "are for --engine spark"),
        (("index", *INDEX, "--inventory", "x", "--listing", "y"), 2, "exclude each other"),
        (("index", *INDEX, "--shards", "2", "--listing", "y"), 2, "exclude each other"),
        (("index", *INDEX, "--shards", "0"), 2, "--shards"),
        (("index", *INDEX, "--inventory", "x", "--read"), 2, "--read is for a refresh"),
        (("index", *INDEX, "--inventory", "DIR/none/manifest.json"), 1, "does not exist"),
        (("index", *INDEX, "--inventory", "gs://b/manifest.json"), 2, "not an address that is"),
        (("index", *INDEX, "--listing", "DIR/plain"), 1, "has no Parquet file"),
        (("index", *INDEX, "--listing", "DIR/none"), 1, "cannot be listed"),
        (
            ("index", "ozone://om:8981/v/b?s3=http://g", "--state", "DIR/i", "--listing", "x"),
            2,
            "no listing has what an Ozone Manager says",
        ),
        (("receipts", "verify", "DIR/none"), 2, "does not exist"),
        (("receipts", "verify", "DIR/plain/file"), 2, "receipts.key"),
        (("receipts", "verify", "DIR/plain/file", "--key", "zz"), 2, "no key and no file"),
        (("receipts", "verify", "DIR/plain/file", "--key", "DIR/plain/file"), 2, "has no key"),
        (("receipts", "verify", "DIR/plain/file", "--head", "1"), 2, "64 hexadecimal digits"),
    ],
)
def test_wrong_input_is_named_and_changes_nothing(
    place: Place, arguments: tuple[str, ...], status: int, said: str
) -> None:
    before = place.names()
    result = place.bucket(*arguments)
    assert (result.exit_code, said in result.output) == (status, True), result.output
    assert place.names() == before


def test_a_verification_leaves_its_outcome_in_a_file(place: Place) -> None:
    """Equal, different, and unknown: a target that hides keys is not called equal."""
    pair = ("local:DIR/source", "local:DIR/copy")
    assert place.bucket("sync", *pair).exit_code == 0
    metrics = place.folder / "verify.prom"
    found = dict[str, str]()

    def verify(expected: int) -> None:
        result = place.bucket("verify", *pair, "--metrics-file", "DIR/verify.prom")
        assert result.exit_code == expected, result.output
        values = (line.rsplit(" ", 1) for line in metrics.read_text().splitlines())
        found.clear()
        found.update(
            {re.sub(r",?(source|target)=\"[^\"]*\"", "", name): value for name, value in values}
        )

    verify(0)
    assert found['bucket_verify_outcome{outcome="equal"}'] == "1.0"
    assert found['bucket_verify_outcome{outcome="different"}'] == "0.0"
    assert found["bucket_verify_differences{}"] == "0.0"
    assert abs(float(found["bucket_verify_finished_timestamp_seconds{}"]) - time.time()) < 3600
    with LocalBucket(place.folder / "copy", Disk()) as bucket:
        bucket.delete([next(bucket.view.list_objects("")).key])
    verify(3)
    assert found['bucket_verify_outcome{outcome="equal"}'] == "0.0"
    assert found['bucket_verify_outcome{outcome="different"}'] == "1.0"
    assert found["bucket_verify_differences{}"] == "1.0"


@pytest.mark.parametrize(
    ("differences", "is_equal", "outcome"),
    [(0, True, "equal"), (2, False, "different"), (0, False, "unknown")],
)
def test_no_difference_is_not_yet_equal(differences: int, is_equal: bool, outcome: str) -> None:
    assert VerifyOutcome.of(differences, is_equal=is_equal).value == outcome


def test_the_state_of_another_pair_is_refused_before_its_target_is_made(place: Place) -> None:
    state = ("--state", "DIR/state")
    assert place.bucket("sync", "local:DIR/source", "local:DIR/one", *state).exit_code == 0
    result = place.bucket("sync", "local:DIR/source", "local:DIR/two", *state)
    assert (result.exit_code, "is the state of" in result.output) == (2, True)
    assert "two" not in place.names()


def test_a_state_folder_that_is_in_use_is_busy(place: Place) -> None:
    (place.folder / "state").mkdir()
    lock = FolderLock(place.folder / "state", "another")
    result = place.bucket("sync", "local:DIR/source", "local:DIR/one", "--state", "DIR/state")
    lock.release()
    assert (result.exit_code, "in use by another" in result.output) == (8, True)
    assert "one" not in place.names()


def test_a_folder_whose_name_begins_like_another_is_not_inside_it(place: Place) -> None:
    assert place.bucket("sync", "local:DIR/source", "local:DIR/source-copy").exit_code == 0


def test_two_spellings_of_a_pair_share_its_state(place: Place) -> None:
    place.bucket("sync", "local:DIR/source", "local:DIR/one")
    again = place.bucket("sync", "local:DIR/source/", "local:DIR/plain/../one")
    assert (again.exit_code, "receipt 2 in" in again.output) == (0, True)


def test_a_trial_keeps_nothing(place: Place) -> None:
    addresses = ("local:DIR/source", "local:DIR/one")
    source, target = (word.replace("DIR", str(place.folder)) for word in addresses)
    before = place.names()
    with open_pair(source, target, None, may_write=True, is_trial=True) as pair:
        assert pair.state is None
        assert pair.target.address == target
        assert list(pair.target.lister.list_objects("")) == []
    assert place.names() == before
    assert place.bucket("precheck", *addresses).exit_code == 0
    assert place.names() == before


def test_an_empty_source_is_named_before_all_is_deleted(place: Place) -> None:
    pair = ("sync", "local:DIR/source", "local:DIR/one", "--delete")
    assert "warning" not in place.bucket(*pair).output
    with opened(place.folder / "source") as store:
        store.writer.delete(["a", "b"])
    part = place.bucket(*pair, "--dry-run", "--prefix", "b")
    assert "no object with a key that begins with 'b'" in part.stderr
    assert "all of the target's (1)" in part.stderr
    assert "warning" not in place.bucket(*pair, "--dry-run").output
    with opened(place.folder / "source") as store:
        store.writer.delete(["c"])
    whole = place.bucket(*pair)
    assert whole.exit_code == 0
    assert whole.stderr.index("warning: the source has no object;") < whole.stderr.index("plan:")
    assert bodies_in(place.folder / "one") == {}
    assert "Both sides are empty." in whole.stdout
    assert "not compared" not in whole.output


@pytest.mark.parametrize("command", ["sync", "verify"])
def test_a_prefix_that_no_key_has_is_named(place: Place, command: str) -> None:
    place.bucket("sync", "local:DIR/source", "local:DIR/one")
    result = place.bucket(command, "local:DIR/source", "local:DIR/one", "--prefix", "/a")
    assert (result.exit_code, "a key begins with '/a'" in result.stdout) == (0, True)
    assert "not compared" not in result.output


def test_receipts_that_cannot_be_continued_are_named_before_anything_is_copied(
    place: Place,
) -> None:
    pair = ("local:DIR/source", "local:DIR/one", "--state", "DIR/state")
    place.bucket("sync", *pair)
    (place.folder / "state" / "receipts.jsonl").write_bytes(b"{}\n")
    write(place.folder / "source", {"d": b"4444"})
    result = place.bucket("sync", *pair)
    assert (result.exit_code, "does not follow" in result.stderr) == (1, True)
    assert "d" not in bodies_in(place.folder / "one")
    assert place.bucket("sync", *pair, "--dry-run").exit_code == 0
    assert place.bucket("verify", *pair).exit_code == 1


def test_a_bucket_that_the_environment_names_is_recognised(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    named = "s3://b/x?endpoint_url=http://127.0.0.1:1"
    for command in ("sync", "verify", "precheck"):
        result = place.bucket(command, "s3://b", named)
        assert (result.exit_code, "inside the other" in result.output) == (6, True)


@contextmanager
def hiding_verifier(folder: Path, address: str) -> Iterator[str]:
    """The address of a verifier whose store does not list all keys."""
    with open_store(address, may_write=False) as store:
        capabilities = replace(store.capabilities, lists_all_keys=False)
        hiding = replace(store, capabilities=capabilities)
        clock = SystemClock()
        with (
            locked_state(folder, address) as state,
            open_index(state, hiding, clock, bucket=address, algorithm=None) as bucket,
        ):
            service = VerifierService(bucket, access=ANYBODY)
            rpc = start_server("127.0.0.1:0", [service.register], limits=CALL_LIMITS)
            try:
                yield rpc.address
            finally:
                rpc.stop()
                service.close()


def test_a_verifier_whose_store_hides_keys_shows_no_equality(place: Place) -> None:
    write(place.folder / "one", {"a": b"1", "b": b"22", "c": b"333"})
    pair = ("local:DIR/source", "local:DIR/one")
    with hiding_verifier(place.folder / "verifier", f"local:{place.folder}/one") as address:
        result = place.bucket("verify", *pair, "--verifier", address, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["equal"], found["differences"]) == (5, False, 0)
    assert "does not list all keys" in result.stderr
    assert "no receipt" in result.stderr
    assert "ACLs were not compared" in result.stderr


def test_each_comparison_that_ends_is_a_receipt_of_its_chain(place: Place) -> None:
    addresses = ("local:DIR/source", "local:DIR/one", "--state", "DIR/state")
    place.bucket("sync", *addresses)
    with opened(place.folder / "one") as store:
        store.writer.delete(["a"])
    heads = [
        place.bucket(*words, *addresses).output.partition("head ")[2][:64]
        for words in (("verify",), ("verify", "--level", "read"), ("sync",), ("sync", "--dry-run"))
    ]
    file = "DIR/state/receipts.jsonl"
    shown = place.bucket("receipts", "show", file, "--json")
    documents = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [one["equal"] for one in documents] == [True, False, False, True]
    assert [one["level"] for one in documents] == ["recorded", "listed", "listed", "recorded"]
    checked = place.bucket("receipts", "verify", file, "--head", heads[1], "--json")
    assert checked.exit_code == 0
    assert json.loads(checked.stdout) == {
        "valid": True,
        "records": 4,
        "head": heads[2],
        "broken": None,
    }
    key = load_signing_key(place.folder / "state" / "receipts.key", Disk())
    assert documents[0]["keys"] == [public_key_bytes(key).hex()]
    assert "equal" in place.bucket("receipts", "show", file).stdout


def receipt_file(place: Place, lines: list[bytes]) -> str:
    path = place.folder / "r.jsonl"
    path.write_bytes(b"".join(lines))
    return str(path)


def test_the_first_broken_record_is_named(place: Place) -> None:
    lines, head = chain_of(5)
    key = ("--key", public_key_bytes(OUR_KEY).hex())

    def check(changed: list[bytes], *more: str) -> tuple[int, object]:
        file = receipt_file(place, changed)
        result = place.bucket("receipts", "verify", file, *(more or key), "--json")
        return result.exit_code, json.loads(result.stdout)["broken"]

    assert check(lines) == (0, None)
    status, broken = check([*lines[:2], *lines[3:]])
    assert (status, isinstance(broken, dict) and (broken["record"], broken["fault"])) == (
        3,
        (2, "removed"),
    )
    changed = lines[3].replace(b'"time_ms":1003', b'"time_ms":1004')
    status, broken = check([*lines[:3], changed, *lines[4:]])
    assert (status, isinstance(broken, dict) and (broken["record"], broken["fault"])) == (
        3,
        (3, "changed"),
    )
    status, broken = check(lines, "--key", public_key_bytes(THEIR_KEY).hex())
    assert (status, isinstance(broken, dict) and broken["fault"]) == (3, "foreign_key")
    assert check(lines, *key, "--head", head.hash.hex()) == (0, None)
    status, broken = check(lines[:4], *key, "--head", head.hash.hex())
    assert (status, isinstance(broken, dict) and broken["fault"]) == (3, "truncated")


def test_a_key_is_taken_from_a_file_of_either_kind(place: Place) -> None:
    lines, _ = chain_of(2)
    file = receipt_file(place, lines)
    pem = OUR_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for name, data in (("pem", pem), ("hex", public_key_bytes(OUR_KEY).hex().encode() + b"\n")):
        (place.folder / name).write_bytes(data)
        assert place.bucket("receipts", "verify", file, "--key", f"DIR/{name}").exit_code == 0
    (place.folder / "invalid").write_bytes(b"\xff")
    shown = place.bucket("receipts", "show", "DIR/invalid")
    assert (shown.exit_code, "line 1 is not a receipt" in shown.output) == (3, True)


def test_an_index_is_built_refreshed_and_checked(place: Place) -> None:
    words = ("index", "local:DIR/source", "--state", "DIR/index", "--json")
    first = json.loads(place.bucket(*words).stdout)
    assert (first["objects"], first["added"], first["levels"]["recorded"]) == (3, 3, 3)
    write(place.folder / "source", {"d": b"4"})
    second = json.loads(place.bucket(*words, "--read", "--check").stdout)
    assert (second["objects"], second["added"], second["levels"]["read"]) == (4, 1, 4)
    assert second["indexDamage"] == []
    result = place.bucket("index", "local:DIR/plain/../source", "--state", "DIR/index")
    assert (result.exit_code, "all" in result.output or "4 objects" in result.output) == (0, True)


def test_an_index_is_built_from_a_listing_in_a_new_state_folder_only(place: Place) -> None:
    with open_store(f"local:{place.folder}/source", may_write=False) as store:
        rows = [version_of(facts) for facts in store.lister.list_objects("")]
    gone = ListedVersion("gone", "e" * 32)
    write_listing(place.folder / "listing", [*rows, gone, replace(gone, modified_ms=1)])
    words = ("index", "local:DIR/source", "--state", "DIR/index")
    listing = ("--listing", "DIR/listing")
    built = json.loads(place.bucket(*words, *listing, "--check", "--json").stdout)
    assert (built["objects"], built["repeatedKeys"], built["indexDamage"]) == (4, 1, [])
    assert (built["engine"], built["listingCreatedAt"]) == ("local", None)
    assert not (place.folder / "index" / "index-build").exists()
    refused = place.bucket(*words, *listing)
    assert (refused.exit_code, "has 4 objects already" in refused.output) == (2, True)
    refreshed = json.loads(place.bucket(*words, "--json").stdout)
    assert [refreshed[name] for name in ("objects", "added", "changed", "removed")] == [3, 0, 0, 1]
    # An index that covers more than a listing tells is not one that it can fill.
    other = ("index", "local:DIR/source", "--state", "DIR/other")
    assert place.bucket(*other).exit_code == 0
    refused = place.bucket(*other, *listing)
    assert (refused.exit_code, "by blake3" in refused.output) == (2, True)
    address, md5 = f"local:{place.folder}/source", HashAlgorithm.MD5
    with (
        open_store(address, may_write=False) as store,
        locked_state(place.folder / "wide", address) as folder,
        open_index(folder, store, SystemClock(), bucket=address, algorithm=md5),
    ):
        pass
    wide = ("index", "local:DIR/source", "--state", "DIR/wide", *listing)
    refused = place.bucket(*wide)
    assert (refused.exit_code, "covers properties" in refused.output) == (2, True)
    text = place.bucket("index", "local:DIR/source", "--state", "DIR/third", *listing)
    assert (text.exit_code, "1 rows named a key once more" in text.output) == (0, True)


def test_a_build_that_was_interrupted_is_continued(place: Place) -> None:
    write_inventory(place.folder / "dest", versions_by_chance(200), "CSV", bucket="b")
    data = place.folder / "dest/reports/b/daily/data/part-2.csv.gz"
    body = data.read_bytes()
    data.write_bytes(body[:-1])
    manifest = "DIR/dest/reports/b/daily/2026-11-25T01-00Z/manifest.json"
    words = ("index", "local:DIR/source", "--state", "DIR/index", "--inventory", manifest)
    broken = place.bucket(*words)
    assert (broken.exit_code, "part-2.csv.gz: its MD5 is" in broken.output) == (1, True)
    data.write_bytes(body)
    done = place.bucket(*words)
    assert (done.exit_code, "200 objects, root" in done.output) == (0, True), done.output
    assert "old. What changed since is not in it" in done.output


def test_an_index_is_built_from_the_store_s_own_listing_in_shards(place: Place) -> None:
    words = ("index", "local:DIR/source", "--state", "DIR/index")
    built = json.loads(place.bucket(*words, "--shards", "4", "--json").stdout)
    assert (built["objects"], built["levels"]["recorded"]) == (3, 3)
    assert not (place.folder / "index" / "index-listing").exists()
    refreshed = json.loads(place.bucket(*words, "--json").stdout)
    assert [refreshed[name] for name in ("objects", "added", "changed", "removed")] == [3, 0, 0, 0]
