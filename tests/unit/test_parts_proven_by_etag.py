"""No MD5 is computed of an object in parts where both stores have computed theirs."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from merkle.checksum import Buffer
from proof.item import HashAlgorithm
from replicator.hashing import ContentHasher
from replicator.ledger import PairLedger
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import (
    ObjectFacts,
    ObjectProperties,
    Store,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from replicator.windows import WindowHasher
from runtime.errors import OperationInterruptedError
from tests.support.bucket_sync import SyncRunner
from tests.support.memory_store import UNPROVEN, MemoryStore, StoreFaults

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


class CutLink(MemoryStore):
    """The target, which a part reaches as far as `cuts` says of its first attempts."""

    def __init__(self, cuts: dict[int, list[str]]) -> None:
        super().__init__("memory:b", takes_pieces=True)
        self.cuts = cuts

    def write_part_pieces(
        self,
        key: str,
        upload: UploadId,
        number: int,
        pieces: Iterable[Buffer],
        length_bytes: int,
    ) -> UploadedPart:
        """See PieceWriter."""
        cut = self.cuts.get(number, [])
        what = cut.pop(0) if cut else ""
        if what == "before":
            raise StoreUnavailableError("not reached")
        if what == "within":
            self.payload += len(next(iter(pieces)))
            raise StoreUnavailableError("cut")
        part = super().write_part_pieces(key, upload, number, pieces, length_bytes)
        if what == "after":
            raise StoreUnavailableError("the answer was lost")
        return part


def test_parts_that_are_proven_together_cross_as_they_are_read(
    source: MemoryStore, tmp_path: Path
) -> None:
    target = CutLink({})
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal, report.bytes) == (1, True, len(BODY))
    assert (target.objects["k"].body, target.payload) == (BODY, len(BODY))
    assert target.calls.count("write_part_pieces") == 3
    assert "write_part" not in target.calls
    assert recorded(tmp_path) == hashes_of(BODY)


@pytest.mark.parametrize("cut", ["before", "within", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_that_is_cut_as_it_is_read_is_sent_again_alone(
    source: MemoryStore, tmp_path: Path, cut: str, number: int
) -> None:
    """And what is recorded of the object has each byte once."""
    target = CutLink({number: [cut]})
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal) == (1, True)
    assert target.objects["k"].body == BODY
    again = 0 if cut == "before" else EVEN[number - 1]
    assert target.payload <= len(BODY) + again
    assert target.calls.count("write_part") == 1
    assert recorded(tmp_path) == hashes_of(BODY)


def test_a_source_that_ends_within_a_part_costs_that_part_only(
    source: MemoryStore, tmp_path: Path
) -> None:
    target = CutLink({})
    reader = EndingReader(source, ends_at=PART + PART // 2)
    report = SyncRunner(replace(source.store(), reader=reader), target.store(), tmp_path)()
    assert (report.copied, report.equal, target.objects["k"].body) == (1, True, BODY)
    assert target.payload < len(BODY) + PART
    assert recorded(tmp_path) == hashes_of(BODY)


def test_a_source_that_changes_within_a_part_is_not_published_as_it_was(
    source: MemoryStore, tmp_path: Path
) -> None:
    other = bytes(reversed(BODY))
    target = CutLink({})

    def change(called: str, _key: str) -> None:
        if called == "write_part_pieces" and source.objects["k"].body == BODY:
            source.write("k", other)

    target.faults = StoreFaults(before=change)
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal, target.objects["k"].body) == (1, True, other)
    assert not target.uploading


def test_a_part_that_arrives_changed_in_pieces_is_sent_again(
    source: MemoryStore, tmp_path: Path
) -> None:
    class Changing(CutLink):
        """One that a byte of the first part reaches changed."""

        def write_part_pieces(
            self,
            key: str,
            upload: UploadId,
            number: int,
            pieces: Iterable[Buffer],
            length_bytes: int,
        ) -> UploadedPart:
            """See PieceWriter."""
            body = b"".join(map(bytes, pieces))
            arrived = b"?" + body[1:] if number == 1 else body
            return super().write_part_pieces(key, upload, number, [arrived], length_bytes)

    target = Changing({})
    report = SyncRunner(source.store(), target.store(), tmp_path)()
    assert (report.copied, report.equal, target.objects["k"].body) == (1, True, BODY)
    assert target.payload == len(BODY) + PART


class EndingReader:
    """An ObjectReader whose first answer ends early."""

    def __init__(self, store: MemoryStore, *, ends_at: int) -> None:
        self.store = store
        self.ends_at = ends_at

    @contextmanager
    def read(
        self, facts: ObjectFacts, *, first: int = 0, end: int | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See ObjectReader."""
        with self.store.read(facts, first=first, end=end) as pieces:
            body = b"".join(pieces)
            if first <= self.ends_at < first + len(body):
                body, self.ends_at = body[: self.ends_at - first], len(BODY)
            yield iter([body[at : at + (1 << 20)] for at in range(0, len(body), 1 << 20)])

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def recorded(folder: Path) -> dict[HashAlgorithm, bytes]:
    """The hashes that the ledger has of the object."""
    with PairLedger(folder, source="memory:a", target="memory:b") as ledger:
        row = ledger.row("k")
        assert row is not None
        windows = ledger.windows("k", len(BODY))
        hasher = WindowHasher(ledger.secret, len(BODY))
    hasher.update(BODY)
    assert windows == hasher.table()
    return {one.algorithm: one.digest for one in row.hashes}


def hashes_of(body: bytes) -> dict[HashAlgorithm, bytes]:
    hasher = ContentHasher()
    hasher.update(body)
    return {one.algorithm: one.digest for one in hasher.hashes()}
