"""A client of the Ozone Manager: its gRPC port takes all requests of Ozone's clients.

An OM runs a request as the user whose access ID it bears, and only if two entries of
metadata are there as well; else as the user of its own process, an administrator. So
every request bears all three. Of several addresses, one OM leads and answers; the
others say that they do not. The OM keeps no record of requests over gRPC, so a write
whose answer was lost is not sent again here: whoever asked for it looks first.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from merkle.errors import ReconcileError
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
from ozone.manager_messages import (
    NO_QUOTA,
    Pairs,
    acl_to,
    bucket_from,
    bucket_to,
    diff_page_from,
    key_from,
    nodes_from,
    snapshot_from,
)
from ozone.manager_values import (
    DiffPage,
    FileStatus,
    KeyFacts,
    ManagerBucket,
    ManagerNode,
    OzoneSnapshot,
    Updates,
)
from protos import ozone_manager_pb2 as pb
from runtime.connection_watch import ConnectionWatch
from runtime.errors import RemoteProtocolError
from runtime.retry import Backoff, Sleep, call_with_retry
from runtime.rpc import UnaryCall, named_errors, open_channel, printable

METHOD = "/hadoop.ozone.OzoneManagerService/submitRequest"
# Of one answer. The OM's own limit is 128 MiB; a batch of its log is never split.
_ANSWER_BYTES_MAX = 128 << 20
_KEYS_PER_PAGE = 1000
_DEADLINE_S = 60.0
# With lower numbers the OM hides keys of newer layouts.
_CLIENT_VERSION = 3
_CLIENT_ID = "treefold"
_METADATA = (("client_hostname", "treefold"), ("client_ip_address", "127.0.0.1"))
_NO_LEADER = ("OMNotLeaderException", "OMLeaderNotReadyException")
_OZONE_STORE, _BUCKET, _KEY = 1, 2, 3
_TRIMMED = "first available sequence number"
_SNAPSHOTS_PER_PAGE = 1000
_NO_SNAPSHOTS = ("FEATURE_NOT_ENABLED", "NOT_SUPPORTED_OPERATION_PRIOR_FINALIZATION")

_MISSING = (ManagerMissingError, "")
_EXISTS = (ManagerExistsError, "")
_BUSY = (ManagerBusyError, "Wait until the cluster is out of safe mode and its OM leads.")
_FORBIDDEN = (ManagerForbiddenError, "Grant the user the right, or give the keys of another one.")
_FULL = (ManagerFullError, "Raise the quota, or free space in it.")
# By status, what kind of an error it is and what to do.
_STATUSES: Mapping[int, tuple[type[ManagerError], str]] = {
    pb.VOLUME_NOT_FOUND: _MISSING,
    pb.BUCKET_NOT_FOUND: _MISSING,
    pb.KEY_NOT_FOUND: _MISSING,
    pb.FILE_NOT_FOUND: _MISSING,
    pb.DIRECTORY_NOT_FOUND: _MISSING,
    pb.VOLUME_ALREADY_EXISTS: _EXISTS,
    pb.BUCKET_ALREADY_EXISTS: _EXISTS,
    pb.KEY_ALREADY_EXISTS: _EXISTS,
    pb.FILE_ALREADY_EXISTS: _EXISTS,
    pb.DIRECTORY_ALREADY_EXISTS: _EXISTS,
    pb.ACCESS_DENIED: _FORBIDDEN,
    pb.PERMISSION_DENIED: _FORBIDDEN,
    pb.UNAUTHORIZED: _FORBIDDEN,
    pb.INVALID_TOKEN: _FORBIDDEN,
    pb.S3_SECRET_NOT_FOUND: _FORBIDDEN,
    pb.ACCESS_ID_NOT_FOUND: _FORBIDDEN,
    pb.QUOTA_EXCEEDED: _FULL,
    pb.QUOTA_ERROR: _FULL,
    pb.TIMEOUT: _BUSY,
    pb.RATIS_ERROR: _BUSY,
    pb.SCM_IN_SAFE_MODE: _BUSY,
    pb.OM_NOT_INITIALIZED: _BUSY,
    pb.SCM_GET_PIPELINE_EXCEPTION: _BUSY,
    pb.FEATURE_NOT_ENABLED: (ManagerError, "Set ozone.filesystem.snapshot.enabled at the OM."),
    pb.TOO_MANY_SNAPSHOTS: (ManagerError, "Delete snapshots that nobody needs."),
    pb.NOT_SUPPORTED_OPERATION_WHEN_PREPARED: (ManagerBusyError, "Finish the cluster's upgrade."),
    pb.NOT_SUPPORTED_OPERATION_PRIOR_FINALIZATION: (
        ManagerError,
        "Finalize the upgrade of the cluster.",
    ),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """The OM at one address."""

    address: str
    channel: grpc.Channel
    submit: UnaryCall


class ManagerClient:
    """The OM of one service, at one address or several. Thread-safe.

    Every method may raise ManagerError, of the class that says what it is, and
    RemoteProtocolError where an answer is invalid.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        user: str,
        insecure: bool = False,
        backoff: Backoff | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        """`addresses` are host:port, tried in this order; `user` is the access ID that
        requests run as.

        Raises:
            ConfigError: an address is off loopback, without `insecure`.
        """
        assert addresses
        self._user, self._backoff, self._sleep = user, backoff or Backoff(), sleep
        self._endpoints = [self._open(address, insecure) for address in addresses]
        self._lock = threading.Lock()
        self._current = 0
        self._generation = 0
        self._watches = list[ConnectionWatch]()
        self.target = ",".join(addresses)

    def close(self) -> None:
        """Close all connections; running calls fail."""
        for watch in self._watches:
            watch.end()
        for endpoint in self._endpoints:
            endpoint.channel.close()

    @property
    def generation(self) -> int:
        """Grows whenever another process may be answering than before, from the first
        call on.
        """
        with self._lock:
            # Only who asks pays for the threads that watch.
            if not self._watches:
                channels = (endpoint.channel for endpoint in self._endpoints)
                self._watches = [ConnectionWatch(one, self._note_reconnected) for one in channels]
            return self._generation

    def nodes(self) -> tuple[ManagerNode, ...]:
        """The OMs of the service, with the role that each has by now."""
        request = pb.OMRequest(
            cmdType=pb.ServiceList, clientId=_CLIENT_ID, serviceListRequest=pb.ServiceListRequest()
        )
        return nodes_from(self._asked(request).serviceListResponse)

    def bucket(self, volume: str, bucket: str) -> ManagerBucket:
        """A bucket; of a link its own row, with its source."""
        body = pb.InfoBucketRequest(volumeName=volume, bucketName=bucket)
        answer = self._asked(
            pb.OMRequest(cmdType=pb.InfoBucket, clientId=_CLIENT_ID, infoBucketRequest=body)
        ).infoBucketResponse
        return self._checked(lambda: bucket_from(answer.bucketInfo))

    def volume_id(self, volume: str) -> int:
        """The object ID of a volume."""
        body = pb.InfoVolumeRequest(volumeName=volume)
        answer = self._asked(
            pb.OMRequest(cmdType=pb.InfoVolume, clientId=_CLIENT_ID, infoVolumeRequest=body)
        ).infoVolumeResponse
        return answer.volumeInfo.objectID

    def s3_volume(self) -> str:
        """The volume whose buckets S3 gateways show to this user."""
        body = pb.GetS3VolumeContextRequest()
        request = pb.OMRequest(
            cmdType=pb.GetS3VolumeContext, clientId=_CLIENT_ID, getS3VolumeContextRequest=body
        )
        return self._asked(request).getS3VolumeContextResponse.volumeInfo.volume

    def create_volume(self, volume: str) -> None:
        """Create a volume without quotas, owned by the user."""
        # Left out, quotas become 0, and no bucket in it can have one.
        info = pb.VolumeInfo(
            adminName=self._user,
            ownerName=self._user,
            volume=volume,
            quotaInBytes=NO_QUOTA & (1 << 64) - 1,
            quotaInNamespace=NO_QUOTA,
        )
        body = pb.CreateVolumeRequest(volumeInfo=info)
        self._told(
            pb.OMRequest(cmdType=pb.CreateVolume, clientId=_CLIENT_ID, createVolumeRequest=body)
        )

    def create_bucket(self, facts: ManagerBucket) -> None:
        """Create a bucket, or a link, with all of `facts` but IDs, times and usage.

        Raises:
            ValueError: its replication, or an entry of its ACL, is not one of Ozone's.
        """
        info = bucket_to(facts, owner=facts.owner or self._user)
        body = pb.CreateBucketRequest(bucketInfo=info)
        self._told(
            pb.OMRequest(cmdType=pb.CreateBucket, clientId=_CLIENT_ID, createBucketRequest=body)
        )

    def key(
        self, volume: str, bucket: str, name: str, *, with_datanodes: bool = False
    ) -> KeyFacts | None:
        """A key as it is now; None where there is none. Of a directory the name that is
        answered ends with a slash.

        Raises:
            ManagerMissingError: the bucket, or the snapshot in the name, is missing.
        """
        args = _key_args(volume, bucket, name)
        args.headOp = not with_datanodes
        body = pb.GetKeyInfoRequest(keyArgs=args)
        try:
            answer = self._asked(
                pb.OMRequest(cmdType=pb.GetKeyInfo, clientId=_CLIENT_ID, getKeyInfoRequest=body)
            )
        except ManagerMissingError as error:
            if error.facts["status"] == pb.Status.Name(pb.KEY_NOT_FOUND):
                return None
            raise
        return self._checked(lambda: key_from(answer.getKeyInfoResponse.keyInfo))

    def list_keys(
        self, volume: str, bucket: str, *, prefix: str, after: str, count: int
    ) -> tuple[tuple[KeyFacts, ...], bool]:
        """A page of keys after one, and whether there may be more. Within the page they
        are in the order of UTF-16; see `ozone.key_pages`.
        """
        body = pb.ListKeysRequest(
            volumeName=volume, bucketName=bucket, startKey=after, prefix=prefix, count=count
        )
        answer = self._asked(
            pb.OMRequest(cmdType=pb.ListKeys, clientId=_CLIENT_ID, listKeysRequest=body)
        ).listKeysResponse
        rows = self._checked(lambda: tuple(map(key_from, answer.keyInfo)))
        return rows, answer.isTruncated

    def list_directory(
        self, volume: str, bucket: str, directory: str, *, start: str, count: int
    ) -> tuple[FileStatus, ...]:
        """Entries of a directory from one on, inclusive; empty for the first. Names are
        whole keys. See `ozone.key_pages`.
        """
        args = _key_args(volume, bucket, directory)
        args.headOp = True
        body = pb.ListStatusRequest(keyArgs=args, recursive=False, startKey=start, numEntries=count)
        answer = self._asked(
            pb.OMRequest(cmdType=pb.ListStatus, clientId=_CLIENT_ID, listStatusRequest=body)
        ).listStatusResponse
        return self._checked(
            lambda: tuple(
                FileStatus(key_from(one.keyInfo), one.isDirectory) for one in answer.statuses
            )
        )

    def rename_key(self, volume: str, bucket: str, name: str, target: str) -> None:
        """Rename a key.

        Raises:
            ManagerExistsError: there is one of the new name.
            ManagerMissingError: there is no such key.
        """
        body = pb.RenameKeyRequest(keyArgs=_key_args(volume, bucket, name), toKeyName=target)
        self._told(pb.OMRequest(cmdType=pb.RenameKey, clientId=_CLIENT_ID, renameKeyRequest=body))

    def delete_keys(self, volume: str, bucket: str, names: Sequence[str]) -> dict[str, str]:
        """Delete keys; returns those that were not deleted, with the reason. A missing
        one counts as deleted.
        """
        args = pb.DeleteKeyArgs(volumeName=volume, bucketName=bucket, keys=names)
        request = pb.OMRequest(
            cmdType=pb.DeleteKeys,
            clientId=_CLIENT_ID,
            deleteKeysRequest=pb.DeleteKeysRequest(deleteKeys=args),
        )
        self._sign(request)
        answer = self._sent(request, is_repeatable=False)
        if answer.status == pb.PARTIAL_DELETE:
            failures = {
                one.key: f"{one.errorCode}: {printable(one.errorMsg)}"
                for one in answer.deleteKeysResponse.errors
                if one.errorCode != pb.Status.Name(pb.KEY_NOT_FOUND)
            }
            if set(failures) - set(names):
                raise RemoteProtocolError(f"{self.target} names keys that were not to be deleted")
            return failures
        self._check(answer)
        return {}

    def put_tags(self, volume: str, bucket: str, name: str, tags: Pairs) -> None:
        """Replace the tags of a key."""
        args = _key_args(volume, bucket, name)
        args.tags.extend(pb.KeyValue(key=key, value=value) for key, value in tags)
        body = pb.PutObjectTaggingRequest(keyArgs=args)
        self._asked(
            pb.OMRequest(
                cmdType=pb.PutObjectTagging, clientId=_CLIENT_ID, putObjectTaggingRequest=body
            )
        )

    def set_acl(self, volume: str, bucket: str, name: str, acl: Pairs) -> None:
        """Replace the ACL of a key; without a name that of the bucket.

        Raises:
            ValueError: an entry is not one of Ozone's.
        """
        path = f"/{volume}/{bucket}" + (f"/{name}" if name else "")
        kind = _KEY if name else _BUCKET
        thing = pb.OzoneObj(resType=kind, storeType=_OZONE_STORE, path=path)
        body = pb.SetAclRequest(obj=thing, acl=acl_to(acl))
        request = pb.OMRequest(cmdType=pb.SetAcl, clientId=_CLIENT_ID, setAclRequest=body)
        self._sign(request)
        answer = self._sent(request, is_repeatable=True)
        # Of an ACL that was there already the OM says OK and no success.
        if answer.status != pb.OK:
            self._check(answer)

    def create_snapshot(self, volume: str, bucket: str, name: str) -> OzoneSnapshot:
        """Make a snapshot of a bucket.

        Raises:
            ManagerExistsError: there is one of this name.
        """
        body = _snapshot_request(volume, bucket, name)
        answer = self._told(
            pb.OMRequest(cmdType=pb.CreateSnapshot, clientId=_CLIENT_ID, createSnapshotRequest=body)
        )
        return self._checked(lambda: snapshot_from(answer.createSnapshotResponse.snapshotInfo))

    def snapshot(self, volume: str, bucket: str, name: str) -> OzoneSnapshot | None:
        """A snapshot, also a deleted one that is still there; None where it is not."""
        body = _snapshot_request(volume, bucket, name)
        try:
            answer = self._asked(
                pb.OMRequest(
                    cmdType=pb.GetSnapshotInfo, clientId=_CLIENT_ID, snapshotInfoRequest=body
                )
            )
        except ManagerMissingError as error:
            if error.facts["status"] == pb.Status.Name(pb.FILE_NOT_FOUND):
                return None
            raise
        return self._checked(lambda: snapshot_from(answer.snapshotInfoResponse.snapshotInfo))

    def snapshots(self, volume: str, bucket: str, *, prefix: str = "") -> Iterator[OzoneSnapshot]:
        """The snapshots of a bucket by name, deleted ones that are still there too."""
        last = ""
        while True:
            body = pb.ListSnapshotRequest(
                volumeName=volume,
                bucketName=bucket,
                prefix=prefix,
                prevSnapshot=last,
                maxListResult=_SNAPSHOTS_PER_PAGE,
            )
            answer = self._asked(
                pb.OMRequest(cmdType=pb.ListSnapshot, clientId=_CLIENT_ID, listSnapshotRequest=body)
            )
            page = answer.listSnapshotResponse
            yield from self._checked(partial(tuple, map(snapshot_from, page.snapshotInfo)))
            if not page.lastSnapshot:
                return
            if page.lastSnapshot <= last:
                raise RemoteProtocolError(f"{self.target}: its list of snapshots does not advance")
            last = page.lastSnapshot

    def delete_snapshot(self, volume: str, bucket: str, name: str) -> None:
        """Delete a snapshot; one that is missing is not an error."""
        body = _snapshot_request(volume, bucket, name)
        try:
            self._asked(
                pb.OMRequest(
                    cmdType=pb.DeleteSnapshot, clientId=_CLIENT_ID, deleteSnapshotRequest=body
                )
            )
        except ManagerMissingError as error:
            if error.facts["status"] != pb.Status.Name(pb.FILE_NOT_FOUND):
                raise

    def has_snapshots(self, volume: str, bucket: str) -> bool:
        """Whether the service makes snapshots. Requests that read do not tell; so this
        is one to delete a snapshot of a name that none can have: it is always refused.
        """
        try:
            self.delete_snapshot(volume, bucket, "?")
        except ManagerError as error:
            if error.facts.get("status") in _NO_SNAPSHOTS:
                return False
            if error.facts.get("status") != pb.Status.Name(pb.INVALID_SNAPSHOT_ERROR):
                raise
        return True

    def submit_diff(self, volume: str, bucket: str, older: str, newer: str) -> None:
        """Ask for the difference of two snapshots; one that ended without a result is
        begun again.
        """
        body = _diff_request(volume, bucket, older, newer)
        self._asked(
            pb.OMRequest(
                cmdType=pb.SubmitSnapshotDiff, clientId=_CLIENT_ID, submitSnapshotDiffRequest=body
            )
        )

    def diff_page(
        self, volume: str, bucket: str, older: str, newer: str, *, token: str
    ) -> DiffPage:
        """A page of a difference that was submitted.

        Raises:
            ManagerMissingError: one of the snapshots is gone.
        """
        body = _diff_request(volume, bucket, older, newer)
        body.token, body.pageSize = token, _KEYS_PER_PAGE
        answer = self._asked(
            pb.OMRequest(cmdType=pb.SnapshotDiff, clientId=_CLIENT_ID, snapshotDiffRequest=body)
        )
        return self._checked(lambda: diff_page_from(answer.snapshotDiffResponse))

    def updates(self, after: int, *, limit: int) -> Updates:
        """The write batches after a sequence number of the OM's database: whole ones,
        until about `limit` numbers are passed.

        Raises:
            LogTrimmedError: they are no longer kept; the fact `first` is the number of
                the oldest that is, None where the OM does not say.
            LogGapError: the number is beyond the newest.
        """
        assert limit > 0, "the OM fails on a limit of 0"
        body = pb.DBUpdatesRequest(sequenceNumber=after, limitCount=limit)
        # Nobody checks an identity here, and without one an idle feed costs half.
        request = pb.OMRequest(cmdType=pb.DBUpdates, clientId=_CLIENT_ID, dbUpdatesRequest=body)
        answer = self._sent(request, is_repeatable=True)
        if answer.status == pb.INTERNAL_ERROR:
            text = answer.message
            first = text.partition(_TRIMMED)[2].partition("is ")[2].split(" ")[0]
            number = int(first) if first.isdecimal() and len(first) <= 20 else None
            raise LogTrimmedError(f"{self.target}: {printable(text)}", first=number)
        self._check(answer)
        found = answer.dbUpdatesResponse
        if not found.dbUpdateSuccess:
            raise LogGapError(f"{self.target} does not know the number {after} of its log")
        return Updates(tuple(found.data), found.latestSequenceNumber)

    def _asked(self, request: pb.OMRequest) -> pb.OMResponse:
        """The answer to a request that may run twice."""
        self._sign(request)
        answer = self._sent(request, is_repeatable=True)
        self._check(answer)
        return answer

    def _told(self, request: pb.OMRequest) -> pb.OMResponse:
        """The answer to a request that must run once at most."""
        self._sign(request)
        answer = self._sent(request, is_repeatable=False)
        self._check(answer)
        return answer

    def _sign(self, request: pb.OMRequest) -> None:
        request.version = _CLIENT_VERSION
        request.s3Authentication.accessId = self._user
        request.s3Authentication.stringToSign = request.s3Authentication.signature = ""

    def _sent(self, request: pb.OMRequest, *, is_repeatable: bool) -> pb.OMResponse:
        backoff = self._backoff if is_repeatable else Backoff(attempts_max=1)
        return call_with_retry(
            lambda: self._round(request, is_repeatable=is_repeatable),
            sleep=self._sleep,
            backoff=backoff,
        )

    def _round(self, request: pb.OMRequest, *, is_repeatable: bool) -> pb.OMResponse:
        """The answer of the first OM that leads."""
        with self._lock:
            first = self._current
        failures = []
        count = len(self._endpoints)
        for at in itertools.islice(itertools.cycle(range(count)), first, first + count):
            endpoint = self._endpoints[at]
            try:
                answer = self._call(endpoint, request)
            except ManagerUnavailableError as error:
                with self._lock:
                    self._generation += 1
                is_done_nowhere = "leader" in error.facts
                if not is_repeatable and not is_done_nowhere:
                    raise
                failures.append(error.message)
                continue
            with self._lock:
                if at != self._current:
                    self._current = at
                    self._generation += 1
            return answer
        raise ManagerUnavailableError(
            "; ".join(failures),
            hint="Name the gRPC port of an OM that runs, 8981 by default.",
        )

    def _call(self, endpoint: _Endpoint, request: pb.OMRequest) -> pb.OMResponse:
        target = f"OM {endpoint.address}"
        try:
            with named_errors(target, ManagerUnavailableError):
                metadata = _METADATA if request.HasField("s3Authentication") else ()
                raw = endpoint.submit(request, timeout=_DEADLINE_S, metadata=metadata)
        except ReconcileError as error:
            if any(name in error.message for name in _NO_LEADER):
                raise ManagerUnavailableError(f"{target} does not lead", leader=False) from error
            raise
        try:
            answer = pb.OMResponse.FromString(raw)
        except DecodeError as error:
            raise RemoteProtocolError(f"{target} sent an invalid answer") from error
        if not answer.IsInitialized() or answer.cmdType != request.cmdType:
            raise RemoteProtocolError(f"{target} sent an answer to another request")
        return answer

    def _check(self, answer: pb.OMResponse) -> None:
        if answer.success and answer.status == pb.OK:
            return
        kind, hint = _STATUSES.get(answer.status, (ManagerError, ""))
        known = pb.Status.values()
        status = pb.Status.Name(answer.status) if answer.status in known else str(answer.status)
        raise kind(
            f"{self.target}: {status}: {printable(answer.message)}", hint=hint, status=status
        )

    def _checked(self, convert: Callable[[], T]) -> T:
        try:
            return convert()
        except ValueError as error:
            raise RemoteProtocolError(f"{self.target} sent an invalid answer: {error}") from error

    def _open(self, address: str, insecure: bool) -> _Endpoint:
        channel = open_channel(address, insecure=insecure, receive_bytes_max=_ANSWER_BYTES_MAX)
        submit: UnaryCall = channel.unary_unary(METHOD, pb.OMRequest.SerializeToString, None)
        return _Endpoint(address, channel, submit)

    def _note_reconnected(self) -> None:
        with self._lock:
            self._generation += 1


def _key_args(volume: str, bucket: str, name: str) -> pb.KeyArgs:
    return pb.KeyArgs(volumeName=volume, bucketName=bucket, keyName=name)


def _snapshot_request(volume: str, bucket: str, name: str) -> pb.SnapshotRequest:
    return pb.SnapshotRequest(volumeName=volume, bucketName=bucket, snapshotName=name)


def _diff_request(volume: str, bucket: str, older: str, newer: str) -> pb.SnapshotDiffRequest:
    return pb.SnapshotDiffRequest(
        volumeName=volume, bucketName=bucket, fromSnapshot=older, toSnapshot=newer
    )
