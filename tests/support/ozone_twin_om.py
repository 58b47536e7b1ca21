"""What the Ozone Manager of a twin answers, over real gRPC by `ScriptedOm`."""

import re
from typing import Any

from ozone.manager_values import BucketLayout
from protos import ozone_manager_pb2 as pb
from tests.support.ozone_twin import (
    DELETED,
    SNAPSHOT_ROOT,
    VOLUME,
    OzoneTwin,
    RefusedError,
    TwinBucket,
    TwinKey,
    difference,
)
from tests.support.scripted_om import refusal, success

# OMVersion of Ozone 2.2.
_VERSION = 12
_OM = 1
_RUNNING, _DONE, _NOT_FOUND = 2, 3, 6
_NEWEST = (1 << 64) - 1
# Between two words of the name of a request.
_BORDER = re.compile("(?<=[a-z0-9])(?=[A-Z])")


class TwinOm:
    """Answers requests from the state of a twin."""

    def __init__(self, twin: OzoneTwin) -> None:
        self._twin = twin

    def __call__(self, request: pb.OMRequest) -> pb.OMResponse | str:
        """The answer; a text is that of a Java exception."""
        name = _BORDER.sub("_", pb.Type.Name(request.cmdType)).lower()
        with self._twin.lock:
            try:
                if request.cmdType == pb.DBUpdates and not request.dbUpdatesRequest.limitCount:
                    return ""
                body = getattr(self, f"_{name}")(request)
            except RefusedError as error:
                return refusal(request, error.status, error.message)
            if isinstance(body, pb.OMResponse):
                return body
        found = pb.OMResponse(cmdType=request.cmdType, status=pb.OK, **body)
        return success(request, found)

    def _bucket(self, place: Any) -> TwinBucket:
        return self._twin.bucket(place.volumeName, place.bucketName)

    def _service_list(self, _: pb.OMRequest) -> dict[str, Any]:
        role = pb.OMRoleInfo(nodeId=self._twin.node_id, serverRole="LEADER")
        service = pb.ServiceInfo(nodeType=_OM, hostname="h", omRole=role, OMVersion=_VERSION)
        return {"serviceListResponse": pb.ServiceListResponse(serviceInfo=[service])}

    def _volume(self) -> pb.VolumeInfo:
        return pb.VolumeInfo(
            adminName="a", ownerName="a", volume=VOLUME, objectID=self._twin.volume_id
        )

    def _info_volume(self, request: pb.OMRequest) -> dict[str, Any]:
        if request.infoVolumeRequest.volumeName != VOLUME:
            raise RefusedError(pb.VOLUME_NOT_FOUND)
        return {"infoVolumeResponse": pb.InfoVolumeResponse(volumeInfo=self._volume())}

    def _get_s3_volume_context(self, _: pb.OMRequest) -> dict[str, Any]:
        body = pb.GetS3VolumeContextResponse(volumeInfo=self._volume())
        return {"getS3VolumeContextResponse": body}

    def _create_bucket(self, request: pb.OMRequest) -> dict[str, Any]:
        info = request.createBucketRequest.bucketInfo
        if info.volumeName != VOLUME:
            raise RefusedError(pb.VOLUME_NOT_FOUND)
        if not info.bucketLayout:
            info.bucketLayout = BucketLayout.FILE_SYSTEM_OPTIMIZED
        self._twin.create_bucket(info)
        return {"createBucketResponse": pb.CreateBucketResponse()}

    def _info_bucket(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.infoBucketRequest
        found = self._twin.buckets.get((body.volumeName, body.bucketName))
        if found is None:
            raise RefusedError(pb.BUCKET_NOT_FOUND)
        return {"infoBucketResponse": pb.InfoBucketResponse(bucketInfo=found.info)}

    def _get_key_info(self, request: pb.OMRequest) -> dict[str, Any]:
        args = request.getKeyInfoRequest.keyArgs
        bucket = self._bucket(args)
        keys, directories, name = self._twin.view(bucket, args.keyName)
        root = args.keyName[: len(args.keyName) - len(name)]
        if name in keys:
            info = self._shown(keys[name], root, with_datanodes=not args.headOp)
        elif name.rstrip("/") in directories:
            info = _directory(bucket, f"{root}{name.rstrip('/')}/")
        else:
            raise RefusedError(pb.KEY_NOT_FOUND)
        return {"getKeyInfoResponse": pb.GetKeyInfoResponse(keyInfo=info)}

    def _shown(self, key: TwinKey, root: str, *, with_datanodes: bool) -> pb.KeyInfo:
        info = pb.KeyInfo()
        info.CopyFrom(key.info)
        info.keyName = root + info.keyName
        if with_datanodes and self._twin.datanode:
            host, port = self._twin.datanode.split(":")
            member = pb.DatanodeDetails(ipAddress=host, hostName=host)
            member.ports.add(name="STANDALONE", value=int(port))
            for one in info.keyLocationList[-1].keyLocations:
                one.pipeline.members.append(member)
        return info

    def _list_keys(self, request: pb.OMRequest) -> dict[str, Any]:
        """By bytes, but each page by UTF-16; the first one drops a row of more."""
        body = request.listKeysRequest
        bucket = self._bucket(body)
        if bucket.is_tree or not body.count:
            return {"listKeysResponse": pb.ListKeysResponse()}
        root = _root(body.prefix)
        keys, _, prefix = self._twin.view(bucket, body.prefix)
        after = body.startKey.removeprefix(root)
        names = sorted(
            (one for one in keys if one.startswith(prefix) and one.encode() > after.encode()),
            key=str.encode,
        )
        page = names[: body.count + (not after)]
        page.sort(key=_utf16)
        rows = [self._shown(keys[name], root, with_datanodes=False) for name in page[: body.count]]
        answer = pb.ListKeysResponse(keyInfo=rows, isTruncated=len(names) > body.count)
        return {"listKeysResponse": answer}

    def _list_status(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.listStatusRequest
        bucket, root = self._bucket(body.keyArgs), _root(body.keyArgs.keyName)
        keys, directories, path = self._twin.view(bucket, body.keyArgs.keyName)
        if path and path not in directories:
            raise RefusedError(pb.FILE_NOT_FOUND)
        begin = f"{path}/" if path else ""
        start = body.startKey.removeprefix(root)
        names = [
            one
            for one in (*keys, *directories)
            if one.startswith(begin)
            and "/" not in one[len(begin) :]
            and one.encode() >= start.encode()
        ]
        page = sorted(sorted(names, key=str.encode)[: body.numEntries], key=_utf16)
        answer = pb.ListStatusResponse()
        for name in page:
            if name in keys:
                info = self._shown(keys[name], root, with_datanodes=False)
            else:
                info = _directory(bucket, root + name, directories[name].objectID)
            answer.statuses.add(keyInfo=info, isDirectory=name not in keys)
        return {"listStatusResponse": answer}

    def _rename_key(self, request: pb.OMRequest) -> dict[str, Any]:
        args = request.renameKeyRequest.keyArgs
        self._twin.rename(self._bucket(args), args.keyName, request.renameKeyRequest.toKeyName)
        return {"renameKeyResponse": pb.RenameKeyResponse()}

    def _delete_keys(self, request: pb.OMRequest) -> dict[str, Any] | pb.OMResponse:
        args = request.deleteKeysRequest.deleteKeys
        failures = self._twin.delete(self._bucket(args), args.keys)
        if not failures:
            return {"deleteKeysResponse": pb.DeleteKeysResponse(status=True)}
        found = refusal(request, pb.PARTIAL_DELETE)
        for name, status in failures:
            found.deleteKeysResponse.errors.add(key=name, errorCode=pb.Status.Name(status))
        return found

    def _put_object_tagging(self, request: pb.OMRequest) -> dict[str, Any]:
        args = request.putObjectTaggingRequest.keyArgs
        self._twin.change(self._bucket(args), args.keyName, tags=args.tags)
        return {"putObjectTaggingResponse": pb.PutObjectTaggingResponse()}

    def _set_acl(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.setAclRequest
        _, volume, name, *rest = body.obj.path.split("/", 3)
        bucket = self._twin.bucket(volume, name)
        if rest:
            self._twin.change(bucket, rest[0], acls=body.acl)
        else:
            del bucket.info.acls[:]
            bucket.info.acls.extend(body.acl)
        return {"setAclResponse": pb.SetAclResponse(response=True)}

    def _create_snapshot(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.createSnapshotRequest
        made = self._twin.snapshot(self._bucket(body), body.snapshotName)
        return {"createSnapshotResponse": pb.SnapshotResponse(snapshotInfo=made.info)}

    def _get_snapshot_info(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.snapshotInfoRequest
        found = self._bucket(body).snapshots.get(body.snapshotName)
        if found is None:
            raise RefusedError(pb.FILE_NOT_FOUND)
        return {"snapshotInfoResponse": pb.SnapshotResponse(snapshotInfo=found.info)}

    def _list_snapshot(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.listSnapshotRequest
        snapshots = self._bucket(body).snapshots
        names = sorted(
            one for one in snapshots if one.startswith(body.prefix) and one > body.prevSnapshot
        )
        page = names[: body.maxListResult]
        answer = pb.ListSnapshotResponse(
            snapshotInfo=[snapshots[name].info for name in page],
            lastSnapshot=page[-1] if len(names) > len(page) else "",
        )
        return {"listSnapshotResponse": answer}

    def _delete_snapshot(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.deleteSnapshotRequest
        if len(body.snapshotName) < 3:
            raise RefusedError(pb.INVALID_SNAPSHOT_ERROR)
        found = self._twin.active(self._bucket(body), body.snapshotName)
        found.info.snapshotStatus = DELETED
        return {"deleteSnapshotResponse": pb.DeleteSnapshotResponse()}

    def _submit_snapshot_diff(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.submitSnapshotDiffRequest
        bucket = self._bucket(body)
        for name in (body.fromSnapshot, body.toSnapshot):
            self._twin.active(bucket, name)
        answer = pb.SubmitSnapshotDiffResponse(response="Submitting a new job.")
        return {"submitSnapshotDiffResponse": answer}

    def _snapshot_diff(self, request: pb.OMRequest) -> dict[str, Any]:
        """Running when it is asked for the first time."""
        body = request.snapshotDiffRequest
        bucket, pair = self._bucket(body), (body.fromSnapshot, body.toSnapshot)
        older, newer = (self._twin.active(bucket, name) for name in pair)
        if pair not in bucket.diffs:
            bucket.diffs.add(pair)
            return {"snapshotDiffResponse": pb.SnapshotDiffResponse(jobStatus=_RUNNING)}
        entries, first = difference(bucket, older, newer), int(body.token or 0)
        page = entries[first : first + body.pageSize]
        is_last = first + len(page) == len(entries)
        report = pb.SnapshotDiffReport(token="" if is_last else str(first + len(page)))
        for one in page:
            report.diffList.add(
                diffType=one.kind, sourcePath=one.path, targetPath=one.target or None
            )
        answer = pb.SnapshotDiffResponse(snapshotDiffReport=report, jobStatus=_DONE)
        return {"snapshotDiffResponse": answer}

    def _dbupdates(self, request: pb.OMRequest) -> dict[str, Any]:
        body = request.dbUpdatesRequest
        found = self._twin.updates(body.sequenceNumber, body.limitCount)
        if found is None:
            answer = pb.DBUpdatesResponse(
                sequenceNumber=0, latestSequenceNumber=_NEWEST, dbUpdateSuccess=False
            )
            return {"dbUpdatesResponse": answer}
        batches, newest = found
        answer = pb.DBUpdatesResponse(
            sequenceNumber=newest if batches else _NEWEST,
            data=batches,
            latestSequenceNumber=newest,
            dbUpdateSuccess=True,
        )
        return {"dbUpdatesResponse": answer}


def _root(name: str) -> str:
    """How names in a snapshot begin."""
    if not name.startswith(SNAPSHOT_ROOT):
        return ""
    snapshot, _, _ = name.removeprefix(SNAPSHOT_ROOT).partition("/")
    return f"{SNAPSHOT_ROOT}{snapshot}/"


def _utf16(name: str) -> bytes:
    """As Java compares texts."""
    return name.encode("utf-16-be")


def _directory(bucket: TwinBucket, name: str, object_id: int = 0) -> pb.KeyInfo:
    return pb.KeyInfo(
        volumeName=bucket.info.volumeName,
        bucketName=bucket.info.bucketName,
        keyName=name,
        dataSize=0,
        type=1,
        factor=3,
        creationTime=1,
        modificationTime=1,
        objectID=object_id,
        isFile=False,
    )
