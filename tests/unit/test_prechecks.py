"""What speaks against a replication is found before it begins, all at once (OZ-016 to
OZ-025); the properties of a bucket as a document (OZ-021).
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from admin.bucket_policies import note_prechecks, precheck_json
from admin.command_result import CommandResult
from replicator.bucket_properties import (
    DOCUMENT_BYTES_MAX,
    create_bucket,
    properties_json,
    read_properties,
)
from replicator.prechecks import (
    Precheck,
    PrecheckReport,
    facts_of,
    is_empty,
    lost_properties,
    precheck,
)
from replicator.stores.bucket_facts import BucketFacts, BucketGrant, BucketQuota
from replicator.stores.capabilities import OZONE_ACLS
from replicator.stores.errors import StoreError, UnsupportedObjectError
from replicator.stores.port import Store
from runtime.errors import UsageError
from tests.support.memory_store import MemoryStore

OWNER = BucketGrant("USER", "hadoop", ("ALL",))
FACTS = BucketFacts(
    "OBJECT_STORE",
    "RATIS/THREE",
    BucketQuota(),
    "hadoop",
    (OWNER,),
    False,
    True,
    (("k", "v"),),
)
WORLD = BucketGrant("WORLD", "", ("READ", "WRITE"))


def check(
    source: BucketFacts = FACTS,
    target: BucketFacts = FACTS,
    *,
    is_empty: bool = True,
    allow_nonempty: bool = False,
) -> PrecheckReport:
    return precheck(source, target, target_is_empty=is_empty, allow_nonempty=allow_nonempty)


def test_two_equal_buckets_pass_with_nothing_unknown() -> None:
    assert check() == PrecheckReport((), ())


def quota(
    bytes_max: int | None = None,
    objects_max: int | None = None,
    used_bytes: int = 0,
    used_objects: int = 0,
) -> BucketFacts:
    return replace(FACTS, quota=BucketQuota(bytes_max, objects_max, used_bytes, used_objects))


@pytest.mark.parametrize(
    ("source", "target", "found", "is_refused", "words"),
    [
        (
            FACTS,
            replace(FACTS, layout="FILE_SYSTEM_OPTIMIZED"),
            Precheck.LAYOUT,
            True,
            ("OBJECT_STORE", "FILE_SYSTEM_OPTIMIZED"),
        ),
        (FACTS, replace(FACTS, grants=()), Precheck.ACLS, False, ("user hadoop: ALL", "none")),
        (
            FACTS,
            replace(FACTS, default_replication="EC/rs-3-2"),
            Precheck.DEFAULT_REPLICATION,
            False,
            ("RATIS/THREE", "EC/rs-3-2"),
        ),
        (FACTS, quota(5), Precheck.QUOTA, True, ("5 bytes", "has none")),
        (quota(9), quota(5), Precheck.QUOTA, True, ("5 bytes", "is 9")),
        (quota(None, 3), quota(None, 2), Precheck.QUOTA, True, ("2 objects", "is 3")),
        (quota(4, None, 7), quota(5), Precheck.QUOTA, True, ("5 bytes", "holds 7")),
        (
            replace(FACTS, grants=(OWNER, WORLD)),
            replace(FACTS, grants=(OWNER, WORLD)),
            Precheck.TARGET_WRITERS,
            False,
            ("world : READ, WRITE",),
        ),
        (FACTS, replace(FACTS, has_snapshots=False), Precheck.SNAPSHOTS, True, ("target",)),
        (replace(FACTS, has_snapshots=False), FACTS, Precheck.SNAPSHOTS, True, ("source",)),
    ],
)
def test_what_is_wrong_is_named(
    source: BucketFacts,
    target: BucketFacts,
    found: Precheck,
    is_refused: bool,
    words: tuple[str, ...],
) -> None:
    report = check(source, target)
    [finding] = report.findings
    assert (finding.check, finding.is_refusal, report.is_refused) == (
        found,
        is_refused,
        is_refused,
    )
    assert all(word in finding.text for word in words)


@pytest.mark.parametrize("target", [quota(), quota(9), quota(12)])
def test_a_quota_that_is_large_enough_passes(target: BucketFacts) -> None:
    assert check(quota(9), target) == PrecheckReport((), ())


def test_a_target_with_objects_is_refused_unless_it_is_allowed() -> None:
    """OZ-022: with the warning that they may be overwritten."""
    [refusal] = check(is_empty=False).findings
    assert refusal.is_refusal
    [warning] = check(is_empty=False, allow_nonempty=True).findings
    assert not warning.is_refusal
    assert "overwritten" in warning.text


def test_all_of_it_is_listed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """OZ-025: one run says everything."""
    target = BucketFacts("LEGACY", "RATIS/ONE", BucketQuota(1), "other", (WORLD,), None, False)
    report = check(FACTS, target, is_empty=False)
    # What the target does not keep of objects is told by what its store can do, and
    # whether a verifier is one of it, by the verifier.
    others = {Precheck.PROPERTIES, Precheck.VERIFIER}
    assert {one.check for one in report.findings} == set(Precheck) - others
    answer = CommandResult("bucket add", as_json=False)
    assert not note_prechecks(answer, report)
    assert answer.exit_status == 6
    said = capsys.readouterr().err
    assert all(one.text in said for one in report.findings)
    document = precheck_json(report)
    assert document["unknown"] == []
    assert len(document["findings"]) == len(report.findings)


def test_what_a_store_has_no_such_thing_of_is_not_called_equal() -> None:
    report = check(BucketFacts(), FACTS)
    assert report.findings == ()
    assert set(report.unknown) == {
        Precheck.LAYOUT,
        Precheck.ACLS,
        Precheck.DEFAULT_REPLICATION,
        Precheck.SNAPSHOTS,
    }


class Described:
    """A bucket of which all is known."""

    def facts(self) -> BucketFacts:
        return FACTS


def test_a_store_is_asked_for_what_it_knows() -> None:
    memory = MemoryStore()
    store = memory.store()
    assert facts_of(store) == BucketFacts()
    assert facts_of(replace(store, bucket=Described())) == FACTS
    assert is_empty(store)
    memory.write("k", b"x")
    assert not is_empty(store)


def test_a_document_has_the_properties_and_not_what_the_bucket_holds(tmp_path: Path) -> None:
    full = replace(FACTS, quota=BucketQuota(5, 6, 3, 2))
    document = properties_json("ozone://a/v/b", full)
    other = properties_json("ozone://z/v9/c", replace(full, quota=BucketQuota(5, 6)))
    assert {key for key in document if document[key] != other[key]} == {"address"}
    path = tmp_path / "bucket.json"
    path.write_text(json.dumps(document))
    assert read_properties(path) == replace(FACTS, quota=BucketQuota(5, 6))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "other/1"}',
        '{"format": "treefold-bucket-properties/1"}',
        '{"format": "treefold-bucket-properties/1", "properties": {"layout": 5}}',
        '{"format": "treefold-bucket-properties/1", "properties": {"quota": {"bytes_max": "x"}}}',
        '{"format": "treefold-bucket-properties/1",'
        ' "properties": {"metadata": [["b", "1"], ["a", "2"]]}}',
        "[" * 100_000,
        '{"a": ' + "1" * DOCUMENT_BYTES_MAX + "}",
    ],
)
def test_what_is_no_such_document_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bucket.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_properties(path)


def test_a_document_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_properties(tmp_path / "none")


def test_a_local_bucket_is_made_and_takes_no_properties(tmp_path: Path) -> None:
    create_bucket(f"local:{tmp_path / 'b'}", BucketFacts())
    assert (tmp_path / "b").is_dir()
    with pytest.raises(StoreError, match="already"):
        create_bucket(f"local:{tmp_path / 'b'}", BucketFacts())
    with pytest.raises(UnsupportedObjectError):
        create_bucket(f"local:{tmp_path / 'c'}", FACTS)
    assert not (tmp_path / "c").exists()
    with pytest.raises(UnsupportedObjectError):
        create_bucket("s3://photos", BucketFacts())


def test_what_ozone_does_not_keep_of_objects_is_said_before_anything_is_copied() -> None:
    """OZ-029 to OZ-032: owner and times of no copy, ACLs to no other kind of store."""
    memory = MemoryStore("memory:a").store()
    ozone = replace(memory.capabilities, acl_form=OZONE_ACLS, keeps_headers=False)
    there = replace(memory, capabilities=ozone)

    def words(source: Store, target: Store) -> str:
        found = lost_properties(source, target)
        assert all((one.check, one.is_refusal) == (Precheck.PROPERTIES, False) for one in found)
        return " / ".join(one.text for one in found)

    assert words(memory, memory) == ""
    assert "owner" in words(there, there)
    assert "ACL" not in words(there, there)
    assert "ACL" in words(there, memory)
    to_ozone = words(memory, there)
    assert "ACL" in to_ozone
    assert "content headers" in to_ozone
    assert "owner" not in to_ozone
