"""The client of the Ozone Manager: whom it asks, as whom, how often, and what it says
of an answer.
"""

from contextlib import closing

import pytest

from ozone.errors import (
    LogGapError,
    LogTrimmedError,
    ManagerBusyError,
    ManagerError,
    ManagerExistsError,
    ManagerForbiddenError,
    ManagerFullError,
    ManagerMissingError,
    ManagerUnavailableError,
)
from ozone.manager import ManagerClient
from protos import ozone_manager_pb2 as pb
from runtime.errors import ConfigError, RemoteProtocolError
from runtime.retry import Backoff
from tests.support.s3_servers import free_port
from tests.support.scripted_om import Answer, ScriptedOm, refusal, success

ONCE = Backoff(attempts_max=1)
TWICE = Backoff(attempts_max=2, first_s=0, most_s=0, jitter_s=0)
NOT_LEADER = (
    "org.apache.hadoop.ozone.om.exceptions.OMNotLeaderException: OM:om1 is not the leader."
    " Suggested leader is OM:om2[h/10.0.0.2]."
)


def client(*addresses: str, backoff: Backoff = ONCE) -> "closing[ManagerClient]":
    return closing(ManagerClient(addresses, user="zoe", backoff=backoff))


def test_every_request_bears_the_identity_whole() -> None:
    """Without both entries of metadata an OM runs it as its own user."""
    with ScriptedOm(success) as om, client(om.address) as manager:
        manager.rename_key("v", "b", "old", "new")
    (request,) = om.requests
    assert (request.s3Authentication.accessId, request.version) == ("zoe", 3)
    assert {"client_hostname", "client_ip_address"} <= set(om.metadata[0])


def test_the_om_that_leads_is_found_and_asked_first_from_then_on() -> None:
    def follower(_: pb.OMRequest) -> str:
        return NOT_LEADER

    with (
        ScriptedOm(follower) as one,
        ScriptedOm(success) as two,
        client(one.address, two.address) as manager,
    ):
        before = manager.generation
        manager.rename_key("v", "b", "old", "new")
        assert manager.generation > before
        manager.rename_key("v", "b", "old", "new")
    assert (len(one.requests), len(two.requests)) == (1, 2)


def test_nobody_leads_is_an_error_that_may_pass() -> None:
    with ScriptedOm(lambda _: NOT_LEADER) as om, client(om.address, backoff=TWICE) as manager:
        with pytest.raises(ManagerUnavailableError, match="does not lead") as error:
            manager.nodes()
        assert error.value.retryable
    assert len(om.requests) == 2


def test_a_server_that_is_not_there_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with client(address) as manager, pytest.raises(ManagerUnavailableError, match=address):
        manager.nodes()


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (pb.BUCKET_NOT_FOUND, ManagerMissingError, False),
        (pb.KEY_ALREADY_EXISTS, ManagerExistsError, False),
        (pb.PERMISSION_DENIED, ManagerForbiddenError, False),
        (pb.QUOTA_EXCEEDED, ManagerFullError, False),
        (pb.SCM_IN_SAFE_MODE, ManagerBusyError, True),
        # OZ-172: a replication waits while its cluster is upgraded.
        (pb.NOT_SUPPORTED_OPERATION_WHEN_PREPARED, ManagerBusyError, True),
        (pb.INVALID_REQUEST, ManagerError, False),
        (4711, ManagerError, False),
    ],
)
def test_a_refusal_is_named_by_its_status(
    status: int, kind: type[ManagerError], retryable: bool
) -> None:
    def answer(request: pb.OMRequest) -> pb.OMResponse:
        return refusal(request, status, "why\x1b[31m")

    with ScriptedOm(answer) as om, client(om.address) as manager, pytest.raises(kind) as error:
        manager.bucket("v", "b")
    assert type(error.value) is kind
    assert error.value.retryable == retryable
    assert "\x1b" not in error.value.message
    name = str(status) if status == 4711 else pb.Status.Name(status)
    assert error.value.facts["status"] == name


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: pb.OMResponse(cmdType=pb.ListKeys, status=pb.OK),
        lambda _: "",
        lambda request: success(
            request,
            pb.OMResponse(
                cmdType=request.cmdType,
                status=pb.OK,
                infoBucketResponse=pb.InfoBucketResponse(
                    bucketInfo=pb.BucketInfo(
                        volumeName="v",
                        bucketName="b",
                        isVersionEnabled=False,
                        storageType=1,
                        bucketLayout=77,
                    )
                ),
            ),
        ),
    ],
    ids=["another request's", "Java's exception without a text", "unknown layout"],
)
def test_an_answer_that_is_none_is_a_named_error_and_tried_once(answer: Answer) -> None:
    with (
        ScriptedOm(answer) as om,
        client(om.address, backoff=TWICE) as manager,
        pytest.raises(RemoteProtocolError),
    ):
        manager.bucket("v", "b")
    assert len(om.requests) == 1


def test_missing_keys_count_as_deleted_and_others_say_why() -> None:
    def answer(request: pb.OMRequest) -> pb.OMResponse:
        found = refusal(request, pb.PARTIAL_DELETE)
        for key, code in (("gone", "KEY_NOT_FOUND"), ("kept", "ACCESS_DENIED")):
            found.deleteKeysResponse.errors.add(key=key, errorCode=code, errorMsg="no")
        return found

    with ScriptedOm(answer) as om, client(om.address) as manager:
        assert manager.delete_keys("v", "b", ["gone", "kept"]) == {"kept": "ACCESS_DENIED: no"}
        with pytest.raises(RemoteProtocolError):
            manager.delete_keys("v", "b", ["gone"])


def test_every_sign_of_a_lost_place_in_the_log_is_named() -> None:
    """OZ-098: purged, and a number beyond the newest."""
    purged = (
        "Unable to read full data from RocksDB wal to get delta updates. Requested sequence"
        " number is 0 and first available sequence number is 11 in wal."
    )
    answers = [
        lambda request: refusal(request, pb.INTERNAL_ERROR, purged),
        lambda request: refusal(request, pb.INTERNAL_ERROR, "invalid transaction log iterator"),
        lambda request: success(
            request,
            pb.OMResponse(
                cmdType=request.cmdType,
                status=pb.OK,
                dbUpdatesResponse=pb.DBUpdatesResponse(
                    sequenceNumber=(1 << 64) - 1, dbUpdateSuccess=False
                ),
            ),
        ),
    ]
    script = iter(answers)
    with ScriptedOm(lambda request: next(script)(request)) as om, client(om.address) as manager:
        with pytest.raises(LogTrimmedError) as error:
            manager.updates(0, limit=1)
        assert error.value.facts["first"] == 11
        with pytest.raises(LogTrimmedError) as error:
            manager.updates(0, limit=1)
        assert error.value.facts["first"] is None
        with pytest.raises(LogGapError):
            manager.updates(99, limit=1)
    # Nobody checks an identity here, and an idle feed costs half without.
    assert not any(request.HasField("s3Authentication") for request in om.requests)
    assert not any("client_hostname" in entries for entries in om.metadata)


def test_an_address_off_loopback_is_meant() -> None:
    with pytest.raises(ConfigError):
        ManagerClient(["om.example:8981"], user="zoe")
