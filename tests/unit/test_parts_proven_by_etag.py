"""No MD5 is computed of an object in parts where both stores have computed theirs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from merkle.checksum import Buffer
from replicator.stores.port import (
    ObjectProperties,
    Store,
    StoreUnavailableError,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from runtime.errors import OperationInterruptedError
from tests.support.bucket_sync import SyncRunner
from tests.support.memory_store import UNPROVEN, MemoryStore

# The least that other clients send, which a copy guesses from the count of parts.
PART = 5 << 20
BODY = random.Random(1).randbytes(2 * PART + (1 << 20))
EVEN = (PART, PART, 1 << 20)


@dataclass
class BadLink:
    """An UploadWriter across a link that changes a byte of one part, when it is sent
    first without a digest, and that is cut when it is to complete.
    """

    writer: MemoryStore
    changes: int = 0
    is_cut: bool = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.writer, name)

    def write_part(
        self,
        key: str,
        upload: UploadId,
        number: int,
        body: Buffer,
        *,
        with_digest: bool = True,
    ) -> UploadedPart:
        """See UploadWriter."""
        if number == self.changes and not with_digest:
            body = bytes(reversed(bytes(body)))
        return self.writer.write_part(key, upload, number, body, with_digest=with_digest)

    def complete(self, *arguments: object) -> object:
        """See UploadWriter."""
        if self.is_cut:
            raise StoreUnavailableError("the link is cut")
        return self.writer.complete(*arguments)


@pytest.fixture
def source() -> MemoryStore:
    """One object in three parts, of the size that other clients send."""
    return with_parts(EVEN)


def with_parts(sizes: Sequence[int]) -> MemoryStore:
    store = MemoryStore("memory:a")
    upload = store.begin("k", ObjectProperties())
    parts, first = [], 0
    for number, size in enumerate(sizes, 1):
        parts.append(store.write_part("k", upload, number, BODY[first : first + size]))
        first += size
    assert first == len(BODY)
    store.complete("k", upload, parts, ObjectProperties(), WriteCondition())
    return store


def linked(target: MemoryStore, link: BadLink) -> Store:
    return replace(target.store(), upload_writer=link)


@pytest.mark.parametrize("known", [True, None], ids=["known", "not known"])
def test_the_etags_of_the_parts_prove_them(
    source: MemoryStore, tmp_path: Path, known: bool | None
) -> None:
    source.capabilities = replace(source.capabilities, part_etags_are_md5=known)
    target = MemoryStore("memory:b")
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal, target.undigested) == (1, True, 3)
    assert target.objects["k"].body == BODY
    assert target.objects["k"].facts.etag == source.objects["k"].facts.etag


@pytest.mark.parametrize("side", ["source", "target"])
def test_each_part_has_a_digest_where_a_store_has_no_md5s(side: str, tmp_path: Path) -> None:
    source, target = with_parts(EVEN), MemoryStore("memory:b")
    one = source if side == "source" else target
    one.capabilities = UNPROVEN
    assert SyncRunner(source.store(), target.store(), tmp_path)().copied == 1
    assert (target.undigested, target.objects["k"].body) == (0, BODY)


@pytest.mark.parametrize("changed", [1, 2, 3])
def test_a_part_that_arrives_changed_is_sent_again_before_there_is_an_object(
    source: MemoryStore, tmp_path: Path, changed: int
) -> None:
    target = MemoryStore("memory:b")
    report = SyncRunner(source.store(), linked(target, BadLink(target, changed)), tmp_path)()
    assert (report.copied, report.equal) == (1, True)
    assert target.objects["k"].body == BODY
    assert target.payload == len(BODY) + EVEN[changed - 1]
    assert target.calls.count("complete") == 1


def test_parts_of_other_sizes_are_proven_one_by_one_and_not_sent_again(tmp_path: Path) -> None:
    """And the next copies of the same run do not try."""
    source, target = with_parts((PART + 1, PART - 1, 1 << 20)), MemoryStore("memory:b")
    stored = source.objects["k"]
    source.objects["l"] = replace(stored, facts=replace(stored.facts, key="l"))
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal, target.undigested) == (2, True, 3)
    assert target.payload == 2 * len(BODY)
    assert target.objects["k"].body == target.objects["l"].body == BODY


@pytest.mark.parametrize("changed", [0, 2])
def test_parts_that_a_killed_run_has_sent_are_proven_by_the_next(
    source: MemoryStore, tmp_path: Path, changed: int
) -> None:
    target = MemoryStore("memory:b")
    link = BadLink(target, changed, is_cut=True)
    assert SyncRunner(source.store(), linked(target, link), tmp_path)().failed
    # Whatever the next run knows of the stores: what the first believed proves nothing.
    source.capabilities = UNPROVEN
    again = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (again.copied, target.objects["k"].body) == (1, BODY)
    # The first run has mended what its link has changed.
    assert target.payload == len(BODY) + (EVEN[changed - 1] if changed else 0)


@pytest.mark.parametrize("knows", [True, False], ids=["etags known", "etags unknown"])
def test_a_part_that_a_killed_run_left_changed_is_sent_again(
    source: MemoryStore, tmp_path: Path, knows: bool
) -> None:
    """Killed before it proves the parts: the ledger has them, and no proof of any."""
    target = MemoryStore("memory:b")
    run = SyncRunner(source.store(), linked(target, BadLink(target, 2)), tmp_path)
    run.is_cancelled = lambda: target.calls.count("write_part") >= 3
    with pytest.raises(OperationInterruptedError):
        run()
    if not knows:
        source.capabilities = UNPROVEN
    again = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (again.copied, target.objects["k"].body) == (1, BODY)
    assert target.payload == len(BODY) + PART
