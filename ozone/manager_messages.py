"""Messages of the Ozone Manager to and from values, checked on the way in."""

import uuid
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from ozone.manager_values import (
    ETAG,
    OWN_METADATA,
    UNFINISHED,
    BucketLayout,
    DiffEntry,
    DiffKind,
    DiffPage,
    DiffState,
    DirectoryFacts,
    KeyBlock,
    KeyFacts,
    ManagerBucket,
    ManagerNode,
    OzoneSnapshot,
    TransactionIndex,
)
from protos import ozone_manager_pb2 as pb

Pairs = tuple[tuple[str, str], ...]

# Of Ozone's enums, by number: ACL types, the bits of rights, replication.
_GRANTEES = {1: "user", 2: "group", 3: "world", 4: "anonymous", 5: "client-ip"}
_RIGHTS = "rwcldxyan"
_DEFAULT_SCOPE = "default:"
_REPLICATIONS = {1: "RATIS", 2: "STANDALONE"}
_EC = 4
# Data, parity and bytes of a chunk.
_EC_NUMBERS = 3
_FACTORS = {1: "ONE", 3: "THREE"}
_SNAPSHOT_ACTIVE = 1
_DIFF_STATES = {1: DiffState.RUNNING, 2: DiffState.RUNNING, 3: DiffState.DONE}
NO_QUOTA = -1
_LEADER = "LEADER"
_READ_PORT = "STANDALONE"


def key_from(message: pb.KeyInfo) -> KeyFacts:
    """A key; of several versions the newest, which is the only one that readers get.

    Raises:
        ValueError: a text in it is not UTF-8.
    """
    metadata = {one.key: one.value for one in message.metadata}
    locations = message.keyLocationList[-1].keyLocations if message.keyLocationList else ()
    return KeyFacts(
        volume=message.volumeName,
        bucket=message.bucketName,
        name=message.keyName,
        size_bytes=message.dataSize,
        modified_ms=message.modificationTime,
        object_id=message.objectID,
        update_id=message.updateID,
        parent_id=message.parentID,
        etag=metadata.get(ETAG, ""),
        metadata=tuple(sorted((k, v) for k, v in metadata.items() if k not in OWN_METADATA)),
        tags=tuple(sorted((one.key, one.value) for one in message.tags)),
        acl=_acl_from(message.acls),
        owner=message.ownerName,
        replication=_replication(message.type, message.factor, message.ecReplicationConfig),
        is_encrypted=message.HasField("fileEncryptionInfo"),
        is_finished=UNFINISHED not in metadata,
        blocks=tuple(map(_block_from, locations)),
    )


def bucket_from(message: pb.BucketInfo) -> ManagerBucket:
    """A bucket.

    Raises:
        ValueError: it has a layout that is not known, or a text that is not UTF-8.
    """
    config = message.defaultReplicationConfig
    has_config = message.HasField("defaultReplicationConfig")
    is_link = bool(message.sourceVolume and message.sourceBucket)
    return ManagerBucket(
        volume=message.volumeName,
        bucket=message.bucketName,
        layout=BucketLayout(message.bucketLayout or BucketLayout.LEGACY),
        object_id=message.objectID,
        created_ms=message.creationTime,
        owner=message.owner,
        acl=_acl_from(message.acls),
        replication=_replication(config.type, config.factor, config.ecReplicationConfig)
        if has_config
        else "",
        quota_bytes=message.quotaInBytes if message.quotaInBytes >= 0 else None,
        quota_names=message.quotaInNamespace if message.quotaInNamespace >= 0 else None,
        used_bytes=message.usedBytes,
        used_names=message.usedNamespace,
        is_versioned=message.isVersionEnabled,
        encryption_key=message.beinfo.keyName,
        metadata=tuple(sorted((one.key, one.value) for one in message.metadata)),
        source=(message.sourceVolume, message.sourceBucket) if is_link else None,
    )


def snapshot_from(message: pb.SnapshotInfo) -> OzoneSnapshot:
    """A snapshot.

    Raises:
        ValueError: it has no ID, or a text that is not UTF-8.
    """
    if not message.HasField("snapshotID"):
        raise ValueError("a snapshot without an ID")
    mask = (1 << 64) - 1
    high, low = message.snapshotID.mostSigBits & mask, message.snapshotID.leastSigBits & mask
    return OzoneSnapshot(
        volume=message.volumeName,
        bucket=message.bucketName,
        name=message.name,
        snapshot_id=str(uuid.UUID(int=high << 64 | low)),
        created_ms=message.creationTime,
        is_active=message.snapshotStatus == _SNAPSHOT_ACTIVE,
        transaction=TransactionIndex.parse(message.createTransactionInfo),
    )


def nodes_from(message: pb.ServiceListResponse) -> tuple[ManagerNode, ...]:
    """The OMs among the services."""
    return tuple(
        ManagerNode(one.omRole.nodeId, one.omRole.serverRole == _LEADER, one.OMVersion)
        for one in message.serviceInfo
        if one.HasField("omRole")
    )


def diff_page_from(message: pb.SnapshotDiffResponse) -> DiffPage:
    """A page of a difference.

    Raises:
        ValueError: an entry is of an unknown kind, or has no path.
    """
    report = message.snapshotDiffReport
    entries = []
    for one in report.diffList:
        kind = DiffKind(one.diffType)
        if not one.sourcePath or (kind is DiffKind.RENAME) != bool(one.targetPath):
            raise ValueError("an entry of a difference without its path")
        entries.append(DiffEntry(kind, one.sourcePath, one.targetPath))
    state = _DIFF_STATES.get(message.jobStatus, DiffState.ENDED)
    return DiffPage(state, tuple(entries), report.token, message.reason)


def key_row(value: bytes) -> KeyFacts | None:
    """The key in a row's value; None where it is none."""
    try:
        message = pb.KeyInfo.FromString(value)
        if not message.IsInitialized() or not (message.volumeName and message.bucketName):
            return None
        return key_from(message)
    except (DecodeError, ValueError):
        return None


def directory_row(value: bytes) -> DirectoryFacts | None:
    """The directory in a row's value; None where it is none."""
    try:
        message = pb.DirectoryInfo.FromString(value)
        if not message.IsInitialized():
            return None
        return DirectoryFacts(message.name, message.objectID, message.parentID)
    except (DecodeError, ValueError):
        return None


def snapshot_row(value: bytes) -> OzoneSnapshot | None:
    """The snapshot in a row's value; None where it is none."""
    try:
        return snapshot_from(pb.SnapshotInfo.FromString(value))
    except (DecodeError, ValueError):
        return None


def bucket_row(value: bytes) -> ManagerBucket | None:
    """The bucket in a row's value; None where it is none."""
    try:
        message = pb.BucketInfo.FromString(value)
        return bucket_from(message) if message.IsInitialized() else None
    except (DecodeError, ValueError):
        return None


def deleted_row(value: bytes) -> tuple[KeyFacts, ...] | None:
    """The deleted keys in a row's value; None where there are none."""
    try:
        message = pb.RepeatedKeyInfo.FromString(value)
        if not message.keyInfo or not message.IsInitialized():
            return None
        return tuple(map(key_from, message.keyInfo))
    except (DecodeError, ValueError):
        return None


def bucket_to(bucket: ManagerBucket, *, owner: str) -> pb.BucketInfo:
    """The message of a bucket that is to be made.

    Raises:
        ValueError: its replication, or an entry of its ACL, is not one of Ozone's.
    """
    info = pb.BucketInfo(
        volumeName=bucket.volume,
        bucketName=bucket.bucket,
        isVersionEnabled=bucket.is_versioned,
        storageType=1,
        bucketLayout=bucket.layout,
        owner=owner,
        acls=acl_to(bucket.acl),
        quotaInBytes=NO_QUOTA if bucket.quota_bytes is None else bucket.quota_bytes,
        quotaInNamespace=NO_QUOTA if bucket.quota_names is None else bucket.quota_names,
        metadata=[pb.KeyValue(key=key, value=value) for key, value in bucket.metadata],
    )
    if bucket.replication:
        info.defaultReplicationConfig.CopyFrom(_replication_to(bucket.replication))
    if bucket.encryption_key:
        info.beinfo.keyName = bucket.encryption_key
    if bucket.source is not None:
        info.sourceVolume, info.sourceBucket = bucket.source
    return info


def acl_to(acl: Pairs) -> list[pb.OzoneAclInfo]:
    """The messages of an ACL as `_acl_from` has read it.

    Raises:
        ValueError: a grantee or a right is not one of Ozone's.
    """
    kinds = {name: number for number, name in _GRANTEES.items()}
    found = []
    for grantee, rights in acl:
        text = grantee.removeprefix(_DEFAULT_SCOPE)
        kind, _, name = text.partition(":")
        if kind not in kinds or not rights or set(rights) - set(_RIGHTS):
            raise ValueError(f"{grantee} {rights} is no entry of an ACL of Ozone")
        bits = sum(1 << _RIGHTS.index(right) for right in set(rights))
        size_bytes = (bits.bit_length() + 7) // 8
        found.append(
            pb.OzoneAclInfo(
                type=kinds[kind],
                name=name,
                rights=bits.to_bytes(size_bytes, "little"),
                aclScope=int(text != grantee),
            )
        )
    return found


def _acl_from(messages: Iterable[pb.OzoneAclInfo]) -> Pairs:
    """Grantee, such as `user:alice` or `default:world:`, and letters of rights."""
    found = []
    for one in messages:
        bits = int.from_bytes(one.rights[:8], "little")
        rights = "".join(right for at, right in enumerate(_RIGHTS) if bits >> at & 1)
        scope = _DEFAULT_SCOPE if one.aclScope else ""
        found.append((f"{scope}{_GRANTEES.get(one.type, one.type)}:{one.name}", rights))
    return tuple(sorted(found))


def _replication(kind: int, factor: int, config: pb.ECReplicationConfig) -> str:
    if kind == _EC:
        return f"EC/{config.codec}-{config.data}-{config.parity}-{config.ecChunkSize}"
    return f"{_REPLICATIONS.get(kind, kind)}/{_FACTORS.get(factor, factor)}"


def _replication_to(text: str) -> pb.DefaultReplicationConfig:
    """The message of a replication as `bucket_from` has read it.

    Raises:
        ValueError: it is not one of Ozone's.
    """
    kind, _, rest = text.partition("/")
    if kind == "EC":
        codec, *numbers = rest.split("-")
        if codec and len(numbers) == _EC_NUMBERS and all(map(_is_count, numbers)):
            data, parity, chunk_bytes = map(int, numbers)
            config = pb.ECReplicationConfig(
                codec=codec, data=data, parity=parity, ecChunkSize=chunk_bytes
            )
            return pb.DefaultReplicationConfig(type=_EC, ecReplicationConfig=config)
    kinds = {name: number for number, name in _REPLICATIONS.items()}
    factors = {name: number for number, name in _FACTORS.items()}
    if kind not in kinds or rest not in factors:
        raise ValueError(f"{text!r} is no replication of Ozone")
    return pb.DefaultReplicationConfig(type=kinds[kind], factor=factors[rest])


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) > 0


def _block_from(message: pb.KeyLocation) -> KeyBlock:
    place = message.blockID.containerBlockID
    datanodes = (
        f"{member.ipAddress}:{port.value}"
        for member in message.pipeline.members
        for port in member.ports
        if port.name == _READ_PORT
    )
    return KeyBlock(place.containerID, place.localID, message.length, tuple(datanodes))
