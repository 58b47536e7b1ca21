"""What the OM says of a bucket as a whole, and a bucket made like another (OZ-016 to
OZ-024), against an OM over real gRPC that keeps buckets as Ozone's does.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from ozone.manager import ManagerClient
from ozone.manager_values import BucketLayout, ManagerBucket
from protos import ozone_manager_pb2 as pb
from replicator.bucket_properties import create_bucket, properties_json, read_properties
from replicator.prechecks import Precheck, precheck
from replicator.stores.bucket_facts import BucketFacts, BucketGrant, BucketQuota
from replicator.stores.errors import PreconditionFailedError, StoreError, UnsupportedObjectError
from replicator.stores.ozone_bucket import OzoneBucket
from replicator.stores.ozone_describer import OzoneDescriber
from runtime.errors import UsageError
from tests.support.scripted_om import ScriptedOm, refusal, success

# Of the kinds of what has an ACL.
BUCKET = 2
ZOE = BucketGrant("USER", "zoe", ("ALL",))
GRANTS = (
    BucketGrant("CLIENT_IP", "10.0.0.1", ("READ",)),
    BucketGrant("GROUP", "staff", ("LIST", "READ")),
    ZOE,
    BucketGrant("USER", "zoe", ("ALL",), is_default=True),
    BucketGrant("WORLD", "WORLD", ("READ", "WRITE"), is_default=True),
)
RICH = BucketFacts(
    layout="FILE_SYSTEM_OPTIMIZED",
    default_replication="EC/rs-3-2-1048576",
    quota=BucketQuota(1 << 40, 9),
    owner="zoe",
    grants=GRANTS,
    is_versioned=True,
    has_snapshots=True,
    metadata=(("team", "red"),),
    encryption_key="photos-key",
)


class BucketsOm:
    """Keeps buckets as they were asked for, and grants all to whoever makes one; knows
    no volume but `v`.
    """

    def __init__(self) -> None:
        self.buckets = dict[str, pb.BucketInfo]()
        self.without_snapshots = 0

    def answer(self, request: pb.OMRequest) -> pb.OMResponse:
        match request.cmdType:
            case pb.CreateBucket:
                info = request.createBucketRequest.bucketInfo
                if info.volumeName != "v":
                    return refusal(request, pb.VOLUME_NOT_FOUND)
                if info.bucketName in self.buckets:
                    return refusal(request, pb.BUCKET_ALREADY_EXISTS)
                user = request.s3Authentication.accessId
                info.acls.append(pb.OzoneAclInfo(type=1, name=user, rights=b"\x80", aclScope=0))
                self.buckets[info.bucketName] = info
                return success(request)
            case pb.SetAcl:
                wanted = request.setAclRequest
                assert wanted.obj.resType == BUCKET
                found = self.buckets[wanted.obj.path.removeprefix("/v/")]
                if list(found.acls) == list(wanted.acl):
                    return refusal(request, pb.OK)
                del found.acls[:]
                found.acls.extend(wanted.acl)
                return success(request)
            case pb.InfoBucket:
                found = self.buckets.get(request.infoBucketRequest.bucketName)
                if found is None:
                    return refusal(request, pb.BUCKET_NOT_FOUND)
                body = pb.InfoBucketResponse(bucketInfo=found)
                return success(
                    request,
                    pb.OMResponse(cmdType=request.cmdType, status=pb.OK, infoBucketResponse=body),
                )
            case pb.DeleteSnapshot:
                name = request.deleteSnapshotRequest.snapshotName
                assert len(name) < 3, "a name that a snapshot can have"
                return refusal(request, self.without_snapshots or pb.INVALID_SNAPSHOT_ERROR)
        raise AssertionError(request.cmdType)


@pytest.fixture
def service() -> BucketsOm:
    return BucketsOm()


@pytest.fixture
def om(service: BucketsOm, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedOm]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "importer")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with ScriptedOm(service.answer) as running:
        yield running


def address(om: ScriptedOm, bucket: str, volume: str = "v") -> str:
    return f"ozone://{om.address}/{volume}/{bucket}?s3=http://127.0.0.1:1"


def described(om: ScriptedOm, bucket: str) -> BucketFacts:
    with closing(ManagerClient([om.address], user="zoe")) as manager:
        named = ManagerBucket("v", bucket, BucketLayout.OBJECT_STORE, 0, 0)
        return OzoneDescriber(OzoneBucket(manager, named, "")).facts()


def run(*words: str) -> Result:
    """A `treefold bucket` command."""
    return CliRunner().invoke(treefold, ["bucket", *words])


@pytest.mark.parametrize(
    "facts",
    [
        RICH,
        replace(RICH, default_replication="RATIS/THREE", encryption_key="", is_versioned=False),
        replace(RICH, default_replication=None, quota=BucketQuota(), layout="OBJECT_STORE"),
    ],
)
def test_a_bucket_made_from_a_document_has_an_equal_one(
    om: ScriptedOm, facts: BucketFacts, tmp_path: Path
) -> None:
    """OZ-021: two exports differ in their addresses only."""
    create_bucket(address(om, "one"), facts)
    first = properties_json("ozone://one", described(om, "one"))
    document = tmp_path / "one.json"
    document.write_text(json.dumps(first))
    create_bucket(address(om, "two"), read_properties(document))
    second = properties_json("ozone://two", described(om, "two"))
    assert described(om, "one") == facts
    assert {name for name in first if first[name] != second[name]} == {"address"}


def test_an_acl_that_is_there_already_is_no_failure(om: ScriptedOm) -> None:
    create_bucket(address(om, "b"), RICH)
    acl = (("user:zoe", "a"),)
    with closing(ManagerClient([om.address], user="zoe")) as manager:
        manager.set_acl("v", "b", "", acl)
        manager.set_acl("v", "b", "", acl)
        assert manager.bucket("v", "b").acl == acl


def test_the_command_makes_it_and_says_why_not(
    om: ScriptedOm, service: BucketsOm, tmp_path: Path
) -> None:
    document = tmp_path / "bucket.json"
    document.write_text(json.dumps(properties_json("ozone://x", RICH)))
    made = run("import", str(document), address(om, "b"), "--yes", "--json")
    assert made.exit_code == 0, made
    assert service.buckets["b"].owner == "zoe"
    again = run("import", str(document), address(om, "b"), "--yes", "--json")
    assert again.exit_code != 0
    assert "BUCKET_ALREADY_EXISTS" in again.output
    elsewhere = address(om, "b", volume="w")
    missing = run("import", str(document), elsewhere, "--yes", "--json")
    assert "VOLUME_NOT_FOUND" in missing.output


def test_a_dry_run_asks_the_om_for_nothing(om: ScriptedOm, tmp_path: Path) -> None:
    document = tmp_path / "bucket.json"
    document.write_text(json.dumps(properties_json("ozone://x", RICH)))
    shown = run("import", str(document), address(om, "b"), "--dry-run")
    assert shown.exit_code == 0
    assert om.requests == []


@pytest.mark.parametrize(
    "facts",
    [
        BucketFacts(),
        replace(RICH, layout="FLAT"),
        replace(RICH, default_replication="EC/rs-3-2"),
        replace(RICH, default_replication="RATIS/SEVEN"),
        replace(RICH, grants=(BucketGrant("ROLE", "x", ("ALL",)),)),
        replace(RICH, grants=(BucketGrant("USER", "x", ("OWN",)),)),
    ],
)
def test_properties_that_ozone_does_not_have_are_refused(
    om: ScriptedOm, facts: BucketFacts
) -> None:
    with pytest.raises(UnsupportedObjectError):
        create_bucket(address(om, "b"), facts)
    assert om.requests == []


def test_a_part_of_a_bucket_is_not_made(om: ScriptedOm) -> None:
    with pytest.raises(UsageError, match="prefix"):
        create_bucket(address(om, "b/below"), RICH)


def test_a_bucket_that_is_there_is_named(om: ScriptedOm) -> None:
    create_bucket(address(om, "b"), RICH)
    with pytest.raises(PreconditionFailedError, match="v/b"):
        create_bucket(address(om, "b"), RICH)


def test_all_that_speaks_against_two_buckets_is_found(om: ScriptedOm, service: BucketsOm) -> None:
    """OZ-016 to OZ-019, OZ-023, OZ-024, OZ-025."""
    create_bucket(address(om, "one"), replace(RICH, quota=BucketQuota()))
    service.buckets["one"].usedBytes = 5
    world = (BucketGrant("WORLD", "WORLD", ("WRITE",)),)
    other = replace(RICH, layout="OBJECT_STORE", default_replication="RATIS/THREE", grants=world)
    create_bucket(address(om, "two"), replace(other, quota=BucketQuota(4)))
    service.without_snapshots = pb.FEATURE_NOT_ENABLED
    report = precheck(
        described(om, "one"),
        described(om, "two"),
        target_is_empty=False,
        allow_nonempty=False,
    )
    others = {Precheck.PROPERTIES, Precheck.VERIFIER}
    assert {one.check for one in report.findings} == set(Precheck) - others
    assert report.unknown == ()
    [quota] = [one for one in report.findings if one.check is Precheck.QUOTA]
    assert "holds 5" in quota.text


def test_defaults_for_new_keys_let_nobody_write_to_the_bucket() -> None:
    facts = replace(RICH, grants=(ZOE, GRANTS[-1]))
    report = precheck(facts, facts, target_is_empty=True, allow_nonempty=False)
    assert report.findings == ()


def test_an_om_that_does_not_say_is_no_service_without_snapshots(
    om: ScriptedOm, service: BucketsOm
) -> None:
    create_bucket(address(om, "b"), RICH)
    service.without_snapshots = pb.PERMISSION_DENIED
    with pytest.raises(StoreError, match="PERMISSION_DENIED"):
        described(om, "b")
