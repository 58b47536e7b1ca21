"""Who may write to a folder of a bucket: one process at a time, whatever stops."""

from dataclasses import dataclass, field

import pytest

from chunktable.errors import StoreUnreachableError
from chunktable.files import StoredObject
from runtime.errors import BusyError
from sweep.lease import LEASE_S, SweepLease


@dataclass
class MemoryStore:
    """A twin of a bucket's object (LeaseStore), with a clock that its users share."""

    obeys: bool = True
    now_s: float = 0.0
    held: StoredObject | None = None
    written_at_s: float = 0.0
    is_cut: bool = False
    # What the network loses: the answer, after the object was written.
    loses_answers: int = 0
    others: list["SweepLease"] = field(default_factory=list)
    writes: int = 0

    def read(self) -> StoredObject | None:
        self._reach()
        if self.held is None:
            return None
        return StoredObject(self.held.content, self.held.etag, self.now_s - self.written_at_s)

    def swap(self, content: bytes, etag: str) -> str | None:
        self._reach()
        if self.obeys and (self.held.etag if self.held else "") != etag:
            return None
        self.writes += 1
        self.held = StoredObject(content, f"e{self.writes}", 0.0)
        self.written_at_s = self.now_s
        if self.loses_answers:
            self.loses_answers -= 1
            raise StoreUnreachableError("the answer was lost")
        return self.held.etag

    def sleep(self, seconds: float) -> None:
        """Time passes, in which living holders renew."""
        self.now_s += seconds
        for lease in self.others:
            lease.renew()

    def _reach(self) -> None:
        if self.is_cut:
            raise StoreUnreachableError("no route")


def lease_of(store: MemoryStore, notes: list[str] | None = None) -> SweepLease:
    note = (notes if notes is not None else []).append
    return SweepLease(store, "s3://b/out", note, clock=lambda: store.now_s, sleep=store.sleep)


@pytest.fixture(params=[True, False], ids=["conditional", "unconditional"])
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(obeys=request.param)


def test_a_second_process_is_refused_while_the_first_renews(store: MemoryStore) -> None:
    first, second = lease_of(store), lease_of(store)
    first.acquire()
    store.others.append(first)
    with pytest.raises(BusyError, match="another sweep is running in s3://b/out: process"):
        second.acquire()
    first.check()


def test_what_is_released_is_free_at_once(store: MemoryStore) -> None:
    first, second = lease_of(store), lease_of(store)
    first.acquire()
    first.release()
    begun_s = store.now_s
    second.acquire()
    # A store without conditions is given time to show who else has written.
    assert store.now_s - begun_s < LEASE_S / 2


def test_a_killed_process_is_followed_after_its_lease_and_finds_out_if_it_was_only_paused(
    store: MemoryStore,
) -> None:
    first, second, notes = lease_of(store), lease_of(store), list[str]()
    first.acquire()
    begun_s = store.now_s
    second = lease_of(store, notes)
    second.acquire()
    assert store.now_s - begun_s >= LEASE_S
    assert any("waiting whether it goes on" in note for note in notes)
    with pytest.raises(BusyError):
        first.check()
    with pytest.raises(BusyError):
        first.renew()
    # It must not end the lease of its successor either.
    first.release()
    second.check()
    second.renew()


def test_a_lease_of_another_night_is_taken_without_waiting(store: MemoryStore) -> None:
    lease_of(store).acquire()
    store.now_s += 20 * LEASE_S
    begun_s = store.now_s
    lease_of(store).acquire()
    assert store.now_s - begun_s < LEASE_S / 2


def test_two_that_take_over_at_once_are_not_both_let_in(store: MemoryStore) -> None:
    lease_of(store).acquire()
    second, third = lease_of(store), lease_of(store)

    @dataclass
    class Racing:
        """The third takes the lease between the second's last look and its put."""

        has_raced: bool = False

        def read(self) -> StoredObject | None:
            return store.read()

        def swap(self, content: bytes, etag: str) -> str | None:
            if not self.has_raced and not store.others:
                self.has_raced = True
                store.others.append(third)
                third.acquire()
            return store.swap(content, etag)

    store.now_s += 20 * LEASE_S
    second = SweepLease(
        Racing(), "s3://b/out", lambda _: None, clock=lambda: store.now_s, sleep=store.sleep
    )
    let_in = 0
    for one in (second, third):
        try:
            if one is second:
                one.acquire()
            one.check()
            one.renew()
            let_in += 1
        except BusyError:
            pass
    assert let_in <= 1


def test_a_lost_answer_loses_no_lease(store: MemoryStore) -> None:
    lease = lease_of(store)
    store.loses_answers = 1
    lease.acquire()
    store.loses_answers = 1
    lease.renew()
    lease.renew()
    store.others.append(lease)
    with pytest.raises(BusyError):
        lease_of(store).acquire()


def test_a_store_that_is_gone_stops_changes_but_keeps_the_lease(store: MemoryStore) -> None:
    lease = lease_of(store)
    lease.acquire()
    store.is_cut = True
    with pytest.raises(StoreUnreachableError):
        lease.renew()
    lease.check()
    store.now_s += LEASE_S
    with pytest.raises(StoreUnreachableError):
        lease.check()
    store.is_cut = False
    lease.check()


def test_a_store_that_ignores_conditions_is_named() -> None:
    notes = list[str]()
    lease_of(MemoryStore(obeys=False), notes).acquire()
    assert any("ignores conditional puts" in note for note in notes)
    notes.clear()
    lease_of(MemoryStore(), notes).acquire()
    assert notes == []
