"""Any sequence of operations on a local bucket does what it does to a dictionary, over
restarts, through a second opener, and in snapshots.
"""

import hashlib
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import fastcrc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proof.item import HashAlgorithm
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, SnapshotLostError
from replicator.stores.local import LocalBucket
from replicator.stores.port import (
    ChangeKind,
    CopySource,
    ObjectFacts,
    ObjectProperties,
    SnapshotFacts,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from runtime.disk import Disk
from tests.support.stores import ANYTHING, changes_after, content

ROW_BYTES = 8
KEYS = st.sampled_from(["a", "a/b", "a//", "\uff01", "😀", "z"])
# To both sides of what fits a row.
BODIES = st.binary(max_size=20)
PROPERTIES = st.builds(
    ObjectProperties,
    metadata=st.lists(st.sampled_from([("a", "1"), ("b", "grün")]), unique=True).map(
        lambda pairs: tuple(sorted(pairs))
    ),
    tags=st.lists(st.sampled_from([("t", ""), ("u", "x")]), unique=True).map(
        lambda pairs: tuple(sorted(pairs))
    ),
)


@dataclass
class Upload:
    """An upload of the model."""

    key: str
    properties: ObjectProperties
    parts: dict[int, tuple[UploadedPart, bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    """One change of the model: a body, or None of a delete marker."""

    key: str
    body: bytes | None
    properties: ObjectProperties
    previous_key: str = ""
    is_half: bool = False
    """A marker of which only the rename after it is reported."""


class BucketMachine(RuleBasedStateMachine):
    """The bucket beside the list of all its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.bucket = self.opened(create=True)
        # Position 1 is the first.
        self.versions: list[Version] = []
        self.facts: dict[int, ObjectFacts] = {}
        self.trimmed = 0
        self.uploads: dict[UploadId, Upload] = {}
        self.snapshots: dict[str, tuple[SnapshotFacts, int]] = {}
        self.lost: list[SnapshotFacts] = []

    def teardown(self) -> None:
        self.bucket.close()
        shutil.rmtree(self.folder)

    def opened(self, *, create: bool = False) -> LocalBucket:
        return LocalBucket(self.folder / "bucket", Disk(), create=create, body_bytes_max=ROW_BYTES)

    def current(self, at: int | None = None) -> dict[str, int]:
        """The positions of the objects that exist."""
        newest = {
            version.key: position for position, version in enumerate(self.versions[:at], start=1)
        }
        return {key: at for key, at in newest.items() if self.versions[at - 1].body is not None}

    def made(self, facts: ObjectFacts, version: Version) -> None:
        self.versions.append(version)
        self.facts[len(self.versions)] = facts
        assert facts.version == str(len(self.versions))
        assert version.body is not None
        assert facts.size_bytes == len(version.body)

    @rule(key=KEYS, body=BODIES, properties=PROPERTIES)
    def put(self, key: str, body: bytes, properties: ObjectProperties) -> None:
        self.made(self.bucket.put(key, body, properties, ANYTHING), Version(key, body, properties))

    @rule(key=KEYS, body=BODIES, other=KEYS, absent=st.booleans())
    def put_if(self, key: str, body: bytes, other: str, absent: bool) -> None:
        now = self.current()
        etag = self.facts[now[other]].etag if other in now else "none"
        condition = WriteCondition(absent=True) if absent else WriteCondition(etag=etag)
        holds = key not in now if absent else key in now and self.facts[now[key]].etag == etag
        try:
            facts = self.bucket.put(key, body, ObjectProperties(), condition)
        except PreconditionFailedError:
            assert not holds
        else:
            assert holds
            self.made(facts, Version(key, body, ObjectProperties()))

    @precondition(lambda self: self.facts)
    @rule(data=st.data(), properties=PROPERTIES)
    def put_properties(self, data: st.DataObject, properties: ObjectProperties) -> None:
        position = data.draw(st.sampled_from(sorted(self.facts)))
        before = self.versions[position - 1]
        try:
            facts = self.bucket.put_properties(self.facts[position], properties)
        except PreconditionFailedError:
            assert self.current().get(before.key) != position
        else:
            assert self.current()[before.key] == position
            self.made(facts, Version(before.key, before.body, properties))

    @precondition(lambda self: self.facts)
    @rule(data=st.data(), key=KEYS)
    def rename(self, data: st.DataObject, key: str) -> None:
        position = data.draw(st.sampled_from(sorted(self.facts)))
        before, now = self.versions[position - 1], self.current()
        try:
            facts = self.bucket.rename(self.facts[position], key)
        except PreconditionFailedError:
            assert now.get(before.key) != position or key in now
        else:
            assert now[before.key] == position
            assert key not in now
            self.versions.append(Version(before.key, None, ObjectProperties(), is_half=True))
            self.made(facts, Version(key, before.body, before.properties, before.key))

    @rule(keys=st.lists(KEYS, max_size=4))
    def delete(self, keys: list[str]) -> None:
        assert self.bucket.delete(keys) == []
        for key in keys:
            if key in self.current():
                self.versions.append(Version(key, None, ObjectProperties()))

    @rule(key=KEYS, properties=PROPERTIES)
    def begin(self, key: str, properties: ObjectProperties) -> None:
        self.uploads[self.bucket.begin(key, properties)] = Upload(key, properties)

    @precondition(lambda self: self.uploads)
    @rule(data=st.data(), number=st.integers(1, 4), body=BODIES)
    def write_part(self, data: st.DataObject, number: int, body: bytes) -> None:
        upload = data.draw(st.sampled_from(list(self.uploads)))
        part = self.bucket.write_part(self.uploads[upload].key, upload, number, body)
        assert part.etag == hashlib.md5(body).hexdigest()
        self.uploads[upload].parts[number] = part, body

    @precondition(lambda self: self.uploads and self.facts)
    @rule(data=st.data(), number=st.integers(1, 4))
    def copy_part(self, data: st.DataObject, number: int) -> None:
        upload = data.draw(st.sampled_from(list(self.uploads)))
        position = data.draw(st.sampled_from(sorted(self.facts)))
        facts, version = self.facts[position], self.versions[position - 1]
        assert version.body is not None
        first = data.draw(st.integers(0, len(version.body)))
        end = data.draw(st.integers(first, len(version.body)))
        source = CopySource(version.key, facts.version, facts.etag, first, end)
        kept = self.is_kept(position)
        try:
            part = self.bucket.copy_part(self.uploads[upload].key, upload, number, source)
        except ObjectMissingError:
            assert not kept
        else:
            assert kept
            assert part.size_bytes == end - first
            self.uploads[upload].parts[number] = part, version.body[first:end]

    @precondition(lambda self: self.uploads)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        upload = data.draw(st.sampled_from(list(self.uploads)))
        made = self.uploads[upload]
        if not made.parts:
            return
        numbers = data.draw(st.lists(st.sampled_from(sorted(made.parts)), unique=True, min_size=1))
        parts = [made.parts[number][0] for number in numbers]
        facts = self.bucket.complete(made.key, upload, parts, made.properties, ANYTHING)
        body = b"".join(made.parts[number][1] for number in sorted(numbers))
        self.made(facts, Version(made.key, body, made.properties))
        del self.uploads[upload]

    @precondition(lambda self: self.uploads)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        upload = data.draw(st.sampled_from(list(self.uploads)))
        self.bucket.abort(self.uploads.pop(upload).key, upload)

    @rule(share=st.integers(0, 4))
    def trim(self, share: int) -> None:
        through = len(self.versions) * share // 4
        self.bucket.trim(through)
        self.trimmed = max(self.trimmed, through)

    @rule()
    def reopen(self) -> None:
        self.bucket.close()
        self.bucket = self.opened()

    @rule()
    def open_beside(self) -> None:
        before, self.bucket = self.bucket, self.opened()
        self.everything_is_as_in_the_model()
        before.close()

    @rule(name=st.sampled_from(["one", "two", "three"]))
    def create_snapshot(self, name: str) -> None:
        try:
            made = self.bucket.snapshots.create(name)
        except PreconditionFailedError:
            assert name in self.snapshots
        else:
            assert name not in self.snapshots
            assert made.position == self.bucket.feed.position()
            self.snapshots[name] = made, len(self.versions)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def delete_snapshot(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.snapshots)))
        self.bucket.snapshots.delete(name)
        self.lost.append(self.snapshots.pop(name)[0])

    @precondition(lambda self: len(self.snapshots) > 1)
    @rule()
    def difference(self) -> None:
        """Whoever knows the older one, and takes over what is named, has the newer."""
        (older, then), (newer, now), *_ = sorted(self.snapshots.values(), key=lambda one: one[1])
        ours, theirs = self.current(then), self.current(now)
        touched = list[str]()
        for change in self.bucket.snapshots.difference(older, newer):
            touched += [change.key, change.previous_key]
            if change.kind is ChangeKind.RENAME:
                before = self.versions[ours[change.previous_key] - 1]
                after = self.versions[theirs[change.key] - 1]
                assert (before.body, before.properties) == (after.body, after.properties)
            assert (change.kind is ChangeKind.DELETE) == (change.key not in theirs)
            if change.key in theirs:
                assert change.facts == self.facts[theirs[change.key]]
        changed = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
        assert changed == set(touched) - {""}

    def check_snapshots(self) -> None:
        for name, (snapshot, at) in self.snapshots.items():
            found = self.bucket.snapshots.find(name)
            assert found == snapshot
            view = self.bucket.snapshots.open(snapshot)
            then = self.current(at)
            shown = list(view.lister.list_objects(""))
            assert shown == [self.facts[then[key]] for key in sorted(then, key=str.encode)]
            for facts in shown:
                version = self.versions[int(facts.version) - 1]
                assert view.reader.read_whole(facts).body == version.body
                assert view.reader.properties(facts.key) == version.properties
        for snapshot in self.lost[-1:]:
            with pytest.raises(SnapshotLostError):
                list(self.bucket.snapshots.open(snapshot).lister.list_objects(""))

    def is_kept(self, position: int) -> bool:
        """Whether the history still has a version, or a snapshot shows it."""
        key = self.versions[position - 1].key
        later = [
            at
            for at, version in enumerate(self.versions, start=1)
            if version.key == key and at > position
        ]
        shown = any(position <= at < later[0] for _, at in self.snapshots.values() if later)
        return not later or later[0] > self.trimmed or shown

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        now, store = self.current(), self.bucket.store()
        found = list(store.lister.list_objects(""))
        assert found == [self.facts[now[key]] for key in sorted(now, key=str.encode)]
        assert [facts.key for facts in store.lister.list_objects("a", start_after="a")] == [
            key for key in sorted(now) if key.startswith("a/")
        ]
        for facts in found:
            version = self.versions[now[facts.key] - 1]
            body = version.body
            assert body is not None
            assert content(store, facts) == body
            assert content(store, facts, len(body) // 2) == body[len(body) // 2 :]
            assert store.reader.properties(facts.key) == version.properties
            hashes = {one.algorithm: one.digest for one in facts.hashes}
            assert hashes[HashAlgorithm.CRC32C] == fastcrc.crc32.iscsi(body).to_bytes(4, "big")
        for position, facts in self.facts.items():
            reads = store.reader.facts(facts.key, version=str(position))
            assert reads == (facts if self.is_kept(position) else None)
        assert self.bucket.feed.position().index == len(self.versions)
        assert [
            (change.index, change.key, change.kind, change.previous_key, change.facts)
            for change in changes_after(self.bucket.feed, self.trimmed)
        ] == [
            (
                position,
                version.key,
                ChangeKind.RENAME
                if version.previous_key
                else (ChangeKind.DELETE if version.body is None else ChangeKind.PUT),
                version.previous_key,
                self.facts.get(position),
            )
            for position, version in enumerate(self.versions, start=1)
            if position > self.trimmed and not version.is_half
        ]
        self.check_snapshots()
        assert dict(self.bucket.uploads("")) == {
            upload.key: max(u for u, other in self.uploads.items() if other.key == upload.key)
            for upload in self.uploads.values()
        }
        for upload_id, upload in self.uploads.items():
            assert list(self.bucket.parts(upload.key, upload_id)) == [
                upload.parts[number][0] for number in sorted(upload.parts)
            ]


TestLocalBucket = BucketMachine.TestCase
TestLocalBucket.settings = settings(max_examples=100, stateful_step_count=40)
