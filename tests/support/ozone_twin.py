"""An Ozone in memory: buckets, snapshots, differences and the log of a database, as an
Ozone Manager shows them to its clients, with the traps that a live one has.

`ozone_twin_om` answers its clients, `ozone_twin_gateway` those of S3, and
`ozone_twin_datanode` those who ask for what writers recorded. Every change is written
to the log as a live OM writes it: two batches of a put, rows of tables that nobody
wants, the row of a snapshot once more later.
"""

import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from ozone.log_rows import signed
from ozone.manager_values import BucketLayout, DiffEntry, DiffKind
from ozone.write_batch import BatchRecord, RowOperation
from protos import ozone_manager_pb2 as pb
from tests.support.ozone_rows import FAMILIES, batch_bytes

SNAPSHOT_ROOT = ".snapshot/"
BLOCK_BYTES = 16 << 20
VOLUME = "s3v"
ACTIVE, DELETED = 1, 2
_HIGHEST_BIT = 1 << 63
_SNAPSHOT_NAME = re.compile("[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ALL_RIGHTS = bytes([128])

Row = tuple[str, str, bytes | None]


class RefusedError(Exception):
    """What an OM refuses, by its status."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(f"{pb.Status.Name(status)} {message}")
        self.status, self.message = status, message


@dataclass(frozen=True)
class TwinKey:
    """A key by its whole name, and its bytes."""

    info: pb.KeyInfo
    body: bytes


@dataclass
class TwinSnapshot:
    """What a bucket was."""

    info: pb.SnapshotInfo
    keys: dict[str, TwinKey]
    directories: dict[str, pb.DirectoryInfo]


@dataclass
class TwinBucket:
    """A bucket; directories by their paths without a slash at the end."""

    info: pb.BucketInfo
    keys: dict[str, TwinKey] = field(default_factory=dict)
    directories: dict[str, pb.DirectoryInfo] = field(default_factory=dict)
    snapshots: dict[str, TwinSnapshot] = field(default_factory=dict)
    diffs: set[tuple[str, str]] = field(default_factory=set)

    @property
    def is_tree(self) -> bool:
        """Whether names are paths."""
        return self.info.bucketLayout == BucketLayout.FILE_SYSTEM_OPTIMIZED

    @property
    def place(self) -> str:
        """As keys of rows begin."""
        return f"/{self.info.volumeName}/{self.info.bucketName}"


class OzoneTwin:
    """All that the servers of one Ozone show. Thread-safe by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.node_id, self.term = "om1", 1
        self.buckets = dict[tuple[str, str], TwinBucket]()
        self.log = list[tuple[int, bytes]]()
        # The number of the newest record, and the first that the log still has.
        self.number, self.first_kept = 0, 1
        self.datanode = ""
        self._index = 0
        self.volume_id = self._new_id()

    def now_ms(self) -> int:
        """The time of a change."""
        return time.time_ns() // 1_000_000

    def purge(self) -> None:
        """Throw away the log up to now, as an OM does once it is old enough."""
        with self.lock:
            self.log.clear()
            self.first_kept = self.number + 1

    def backup(self) -> "OzoneTwin":
        """The database as it is now."""
        made = OzoneTwin()
        made._take(self)
        return made

    def restore(self, backup: "OzoneTwin") -> None:
        """Start again from an older database; its OM is elected in another term."""
        with self.lock:
            term = self.term
            self._take(backup)
            self.term = term + 1

    def bucket(self, volume: str, name: str) -> TwinBucket:
        """A bucket, by whatever links."""
        found = self.buckets.get((volume, name))
        if found is None:
            raise RefusedError(pb.BUCKET_NOT_FOUND)
        if found.info.sourceBucket:
            return self.bucket(found.info.sourceVolume, found.info.sourceBucket)
        return found

    def create_bucket(self, info: pb.BucketInfo) -> None:
        """Make a bucket, which grants all to its owner."""
        place = info.volumeName, info.bucketName
        if place in self.buckets:
            raise RefusedError(pb.BUCKET_ALREADY_EXISTS)
        made = pb.BucketInfo()
        made.CopyFrom(info)
        made.creationTime, made.objectID = self.now_ms(), self._new_id()
        made.acls.add(type=1, name=info.owner, rights=_ALL_RIGHTS, aclScope=0)
        self.buckets[place] = bucket = TwinBucket(made)
        self._commit([("bucketTable", bucket.place, made.SerializeToString())])

    def find(self, bucket: TwinBucket, name: str) -> TwinKey | None:
        """A key, also one of a snapshot; None where there is none, or a directory."""
        keys, _, rest = self.view(bucket, name)
        return keys.get(rest)

    def view(
        self, bucket: TwinBucket, name: str
    ) -> tuple[dict[str, TwinKey], dict[str, pb.DirectoryInfo], str]:
        """Keys and directories where a name is, and the name there."""
        if not name.startswith(SNAPSHOT_ROOT):
            return bucket.keys, bucket.directories, name
        snapshot, _, rest = name.removeprefix(SNAPSHOT_ROOT).partition("/")
        found = self.active(bucket, snapshot)
        return found.keys, found.directories, rest

    def active(self, bucket: TwinBucket, name: str) -> TwinSnapshot:
        """A snapshot that can be read."""
        found = bucket.snapshots.get(name)
        if found is None or found.info.snapshotStatus != ACTIVE:
            raise RefusedError(pb.FILE_NOT_FOUND, f"the snapshot {name}")
        return found

    def put(
        self,
        bucket: TwinBucket,
        name: str,
        body: bytes,
        *,
        etag: str,
        metadata: Iterable[tuple[str, str]] = (),
        tags: Iterable[tuple[str, str]] = (),
        owner: str = "",
        in_parts: bool = False,
    ) -> TwinKey:
        """Open a key, and commit it; it has the ID of what was there."""
        rows = list[Row](self._made_directories(bucket, name))
        old = bucket.keys.get(name)
        open_row = f"{self._row(bucket, name)[1]}/{self._next_index()}"
        info = pb.KeyInfo(
            volumeName=bucket.info.volumeName,
            bucketName=bucket.info.bucketName,
            keyName=name,
            dataSize=len(body),
            type=1,
            factor=3,
            creationTime=self.now_ms(),
            modificationTime=self.now_ms(),
            objectID=old.info.objectID if old else self._new_id(),
            parentID=self._parent_id(bucket, name),
            isFile=not in_parts,
            ownerName=owner,
            metadata=[pb.KeyValue(key=key, value=value) for key, value in metadata],
            tags=[pb.KeyValue(key=key, value=value) for key, value in tags],
        )
        if etag:
            info.metadata.add(key="ETag", value=etag)
        info.acls.add(type=1, name=owner, rights=_ALL_RIGHTS, aclScope=0)
        locations = info.keyLocationList.add(version=0).keyLocations
        for first in range(0, len(body), BLOCK_BYTES):
            block = pb.BlockID(
                containerBlockID=pb.ContainerBlockID(containerID=1, localID=self._next_index())
            )
            length_bytes = min(BLOCK_BYTES, len(body) - first)
            locations.add(blockID=block, offset=0, length=length_bytes)
        table = "openFileTable" if bucket.is_tree else "openKeyTable"
        self._commit([*rows, (table, open_row, info.SerializeToString())])
        rows = [(table, open_row, None)]
        if old is not None and old.info.dataSize:
            leaf = name.rpartition("/")[2] if bucket.is_tree else name
            rows.append(self._deleted(bucket, leaf, old, self._new_id()))
        made = TwinKey(info, body)
        self._keep(bucket, made, rows)
        return made

    def change(self, bucket: TwinBucket, name: str, **fields: object) -> None:
        """Give a key other tags, times or grants."""
        info = pb.KeyInfo()
        old = bucket.keys.get(name)
        if old is None:
            raise RefusedError(pb.KEY_NOT_FOUND)
        info.CopyFrom(old.info)
        for field_name in fields:
            info.ClearField(field_name)  # type: ignore[arg-type]
        info.MergeFrom(pb.KeyInfo(**fields))  # type: ignore[arg-type]
        self._keep(bucket, TwinKey(info, old.body), [])

    def rename(self, bucket: TwinBucket, name: str, target: str) -> None:
        """Rename a key, or a directory with all that is below it."""
        if target in bucket.keys or target in bucket.directories:
            raise RefusedError(pb.KEY_ALREADY_EXISTS)
        above = target.rpartition("/")[0]
        if bucket.is_tree and above and above not in bucket.directories:
            raise RefusedError(pb.KEY_RENAME_ERROR, "the parent does not exist")
        if name in bucket.directories:
            self._rename_directory(bucket, name, target)
            return
        old = bucket.keys.pop(name, None)
        if old is None:
            raise RefusedError(pb.KEY_NOT_FOUND)
        info = pb.KeyInfo()
        info.CopyFrom(old.info)
        info.keyName, info.parentID = target, self._parent_id(bucket, target)
        row = f"{bucket.place}/{info.objectID}"
        rows: list[Row] = [
            (*self._row(bucket, name), None),
            ("snapshotRenamedTable", row, name.encode()),
        ]
        self._keep(bucket, TwinKey(info, old.body), rows)

    def delete(self, bucket: TwinBucket, names: Sequence[str]) -> list[tuple[str, int]]:
        """Delete keys; those that were not deleted, and why."""
        rows, failures = list[Row](), list[tuple[str, int]]()
        for name in names:
            old = bucket.keys.pop(name, None)
            if old is None:
                below = any(key.startswith(f"{name}/") for key in bucket.keys)
                is_directory = name in bucket.directories and below
                status = pb.DIRECTORY_NOT_EMPTY if is_directory else pb.KEY_NOT_FOUND
                failures.append((name, status))
                continue
            rows.append((*self._row(bucket, name), None))
            if old.info.dataSize:
                rows.append(self._deleted(bucket, name, old, old.info.objectID))
        if rows:
            self._commit(rows)
        return failures

    def snapshot(self, bucket: TwinBucket, name: str) -> TwinSnapshot:
        """Make a snapshot; its row is alone in its batch, and comes once more later."""
        if not _SNAPSHOT_NAME.fullmatch(name) or name.isdecimal():
            raise RefusedError(pb.INVALID_SNAPSHOT_ERROR, f"invalid name {name}")
        if name in bucket.snapshots:
            raise RefusedError(pb.FILE_ALREADY_EXISTS)
        found = uuid.uuid4().int
        high, low = (part - (1 << 64) * (part >> 63) for part in divmod(found, 1 << 64))
        index = self._next_index()
        info = pb.SnapshotInfo(
            snapshotID=pb.UUID(mostSigBits=high, leastSigBits=low),
            name=name,
            volumeName=bucket.info.volumeName,
            bucketName=bucket.info.bucketName,
            snapshotStatus=ACTIVE,
            creationTime=self.now_ms(),
            createTransactionInfo=f"{self.term}#{index}".encode(),
        )
        made = TwinSnapshot(info, dict(bucket.keys), dict(bucket.directories))
        bucket.snapshots[name] = made
        row = ("snapshotInfoTable", f"{bucket.place}/{name}", info.SerializeToString())
        self._commit([row], index=index)
        self._commit([row])
        return made

    def updates(self, after: int, limit: int) -> tuple[list[bytes], int] | None:
        """Batches after a number, and the newest number; None beyond that."""
        if after > self.number:
            return None
        if after + 1 < self.first_kept:
            raise RefusedError(
                pb.INTERNAL_ERROR,
                "Unable to read full data from RocksDB wal to get delta updates. Requested"
                f" sequence number is {after} and first available sequence number is"
                f" {self.first_kept} in wal.",
            )
        found = list[bytes]()
        for first, raw in self.log:
            if first > after:
                found.append(raw)
                if first - after >= limit:
                    break
        return found, self.number

    def _take(self, other: "OzoneTwin") -> None:
        self.buckets, self.log = deepcopy(other.buckets), list(other.log)
        self.number, self.first_kept = other.number, other.first_kept
        self._index, self.volume_id = other._index, other.volume_id

    def _rename_directory(self, bucket: TwinBucket, name: str, target: str) -> None:
        """One row alone: what is below names its parent by its ID."""
        info = pb.DirectoryInfo()
        info.CopyFrom(bucket.directories[name])
        old_row = self._directory_row(bucket, info)
        for path in [path for path in bucket.directories if path.startswith(f"{name}/")]:
            bucket.directories[target + path[len(name) :]] = bucket.directories.pop(path)
        for path in [path for path in bucket.keys if path.startswith(f"{name}/")]:
            old = bucket.keys.pop(path)
            moved = pb.KeyInfo()
            moved.CopyFrom(old.info)
            moved.keyName = target + path[len(name) :]
            bucket.keys[moved.keyName] = TwinKey(moved, old.body)
        del bucket.directories[name]
        info.name, info.parentID = target.rpartition("/")[2], self._parent_id(bucket, target)
        bucket.directories[target] = info
        self._commit(
            [
                ("directoryTable", old_row, None),
                (
                    "directoryTable",
                    self._directory_row(bucket, info),
                    info.SerializeToString(),
                ),
            ]
        )

    def _made_directories(self, bucket: TwinBucket, name: str) -> Iterator[Row]:
        """Rows of the directories above a key, which are made now."""
        if not bucket.is_tree:
            return
        if name in bucket.directories:
            raise RefusedError(pb.NOT_A_FILE)
        above = ""
        for part in name.split("/")[:-1]:
            path = f"{above}/{part}" if above else part
            if path in bucket.keys:
                raise RefusedError(pb.FILE_ALREADY_EXISTS)
            if path not in bucket.directories:
                info = pb.DirectoryInfo(
                    name=part,
                    creationTime=self.now_ms(),
                    modificationTime=self.now_ms(),
                    objectID=self._new_id(),
                    updateID=self._index,
                    parentID=self._parent_id(bucket, path),
                )
                bucket.directories[path] = info
                yield (
                    "directoryTable",
                    self._directory_row(bucket, info),
                    info.SerializeToString(),
                )
            above = path

    def _keep(self, bucket: TwinBucket, made: TwinKey, rows: list[Row]) -> None:
        """Write a key's row with others, and what the bucket holds by now."""
        index = self._next_index()
        made.info.updateID = index
        bucket.keys[made.info.keyName] = made
        row = pb.KeyInfo()
        row.CopyFrom(made.info)
        if bucket.is_tree:
            row.keyName = made.info.keyName.rpartition("/")[2]
        bucket.info.usedBytes = sum(len(one.body) for one in bucket.keys.values())
        usage = ("bucketTable", bucket.place, bucket.info.SerializeToString())
        key_row = (*self._row(bucket, made.info.keyName), row.SerializeToString())
        self._commit([*rows, key_row, usage], index=index)

    def _deleted(self, bucket: TwinBucket, name: str, old: TwinKey, object_id: int) -> Row:
        value = pb.RepeatedKeyInfo(keyInfo=[old.info], bucketId=bucket.info.objectID)
        row = f"{bucket.place}/{name}/{signed(object_id)}"
        return "deletedTable", row, value.SerializeToString()

    def _row(self, bucket: TwinBucket, name: str) -> tuple[str, str]:
        """Table and key of the row of a key."""
        if not bucket.is_tree:
            return "keyTable", f"{bucket.place}/{name}"
        parent = self._parent_id(bucket, name)
        return "fileTable", self._tree_row(bucket, parent, name.rpartition("/")[2])

    def _directory_row(self, bucket: TwinBucket, info: pb.DirectoryInfo) -> str:
        return self._tree_row(bucket, info.parentID, info.name)

    def _tree_row(self, bucket: TwinBucket, parent_id: int, leaf: str) -> str:
        ids = (self.volume_id, bucket.info.objectID, parent_id)
        return f"/{'/'.join(map(signed, ids))}/{leaf}"

    def _parent_id(self, bucket: TwinBucket, name: str) -> int:
        above = name.rpartition("/")[0]
        if not bucket.is_tree:
            return 0
        return bucket.directories[above].objectID if above else bucket.info.objectID

    def _next_index(self) -> int:
        self._index += 1
        return self._index

    def _new_id(self) -> int:
        return _HIGHEST_BIT + (self._next_index() << 8)

    def _commit(self, rows: Iterable[Row], *, index: int = 0) -> None:
        transaction = f"{self.term}#{index or self._next_index()}".encode()
        final = {(table, key): value for table, key, value in rows}
        final["transactionInfoTable", "#TRANSACTIONINFO"] = transaction
        records = [
            BatchRecord(
                RowOperation.DELETE if value is None else RowOperation.PUT,
                FAMILIES[table],
                key.encode(),
                value or b"",
            )
            for (table, key), value in final.items()
        ]
        self.log.append((self.number + 1, batch_bytes(self.number + 1, records)))
        self.number += len(records)


def difference(bucket: TwinBucket, older: TwinSnapshot, newer: TwinSnapshot) -> list[DiffEntry]:
    """What an OM says of two snapshots: by IDs of objects, deletes first, and by paths
    that lack some slashes of the keys.
    """
    old, new = _objects(bucket, older), _objects(bucket, newer)
    found = list[DiffEntry]()
    for object_id in old.keys() - new.keys():
        found.append(DiffEntry(DiffKind.DELETE, old[object_id].path))
    for object_id in new.keys() - old.keys():
        found.append(DiffEntry(DiffKind.CREATE, new[object_id].path))
    for object_id in old.keys() & new.keys():
        before, after = old[object_id], new[object_id]
        is_moved = before.place != after.place
        # New times alone are told as a rename to the same name.
        if is_moved or (before.change != after.change and before.content == after.content):
            found.append(DiffEntry(DiffKind.RENAME, before.path, after.path))
        if before.content != after.content:
            found.append(DiffEntry(DiffKind.MODIFY, before.path))
    order = (DiffKind.DELETE, DiffKind.RENAME, DiffKind.CREATE, DiffKind.MODIFY)
    return sorted(found, key=lambda one: order.index(one.kind))


@dataclass(frozen=True)
class _Object:
    path: str
    place: tuple[int, str]
    change: int
    content: bytes


def _objects(bucket: TwinBucket, snapshot: TwinSnapshot) -> dict[int, _Object]:
    """Keys and directories by ID."""
    found = dict[int, _Object]()
    for name, key in snapshot.keys.items():
        info = key.info
        path = name if bucket.is_tree else "/".join(filter(None, name.split("/")))
        leaf = name.rpartition("/")[2] if bucket.is_tree else name
        content = pb.KeyInfo(
            volumeName="",
            bucketName="",
            keyName="",
            dataSize=info.dataSize,
            type=1,
            creationTime=0,
            modificationTime=0,
            keyLocationList=info.keyLocationList,
            metadata=info.metadata,
            tags=info.tags,
        ).SerializeToString()
        found[info.objectID] = _Object(path, (info.parentID, leaf), info.updateID, content)
    for path, one in snapshot.directories.items():
        found[one.objectID] = _Object(path, (one.parentID, one.name), one.updateID, b"")
    return found
