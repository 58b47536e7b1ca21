"""Which objects are copied without their ACL, and what is known of them until it is
read.
"""

from dataclasses import dataclass

import pytest

from proof.item import EvidenceLevel
from replicator.assumed_acls import AssumedAcls
from replicator.copy_requests import AclSeen, CopyResult, ObjectStamp
from replicator.ledger import LedgerRow
from replicator.stores.port import ObjectFacts


@dataclass
class Settling:
    is_done: bool = False


def facts(key: str, at_ms: int) -> ObjectFacts:
    return ObjectFacts(key, 1, f"etag{at_ms}", at_ms)


def row(key: str, at_ms: int) -> LedgerRow:
    stamp = ObjectStamp.of(facts(key, at_ms))
    return LedgerRow(key, stamp, stamp, (), b"p", EvidenceLevel.LISTED)


def copied(key: str, at_ms: int, acl: AclSeen = AclSeen.ASSUMED) -> CopyResult:
    return CopyResult(facts(key, at_ms), facts(key, at_ms), (), b"p", 1, acl=acl)


@pytest.fixture
def acls() -> AssumedAcls:
    found = AssumedAcls()
    found.is_watched = True
    return found


def test_only_many_default_ones_in_a_row_are_expected_to_go_on(acls: AssumedAcls) -> None:
    def see(acl: AclSeen, count: int) -> None:
        for number in range(count):
            acls.note(copied(f"k{number}", number, acl))

    see(AclSeen.DEFAULT, 63)
    assert not acls.may_assume
    see(AclSeen.NOTHING, 5)
    see(AclSeen.DEFAULT, 1)
    assert acls.may_assume
    acls.is_watched = False
    assert not acls.may_assume
    acls.is_watched = True
    see(AclSeen.OTHER, 1)
    see(AclSeen.DEFAULT, 63)
    assert not acls.may_assume


def test_one_that_was_not_default_ends_it(acls: AssumedAcls) -> None:
    for number in range(64):
        acls.note(copied(f"k{number}", number, AclSeen.DEFAULT))
    acls.note(copied("a", 100))
    acls.settle(row("a", 100), None, is_default=True)
    assert acls.may_assume
    acls.note(copied("a", 101))
    acls.settle(row("a", 101), Settling(), is_default=False)
    assert not acls.may_assume


def test_the_oldest_counts_until_its_acl_is_at_the_target(acls: AssumedAcls) -> None:
    assert acls.oldest_ms is None
    for key, at_ms in (("a", 30), ("b", 10), ("c", 20)):
        acls.note(copied(key, at_ms))
    assert acls.oldest_ms == 10
    settling = Settling()
    acls.settle(row("b", 10), settling, is_default=False)
    assert acls.oldest_ms == 10
    settling.is_done = True
    assert acls.oldest_ms == 20
    acls.settle(row("c", 20), None, is_default=True)
    acls.note(copied("a", 40, AclSeen.DEFAULT))
    assert acls.oldest_ms is None


def test_each_is_told_once_and_again_where_reading_failed(acls: AssumedAcls) -> None:
    for key in "ab":
        acls.note(copied(key, 1))
    assert [acls.next(), acls.next(), acls.next()] == ["a", "b", None]
    acls.settle(row("a", 1), None, is_default=True)
    acls.give_back()
    assert [acls.next(), acls.next()] == ["b", None]


def test_another_version_is_the_matter_of_its_own_copy(acls: AssumedAcls) -> None:
    acls.note(copied("a", 1))
    assert acls.next() == "a"
    # It was copied once more while the ACL of the first version was read.
    acls.note(copied("a", 2))
    acls.settle(row("a", 1), None, is_default=True)
    assert (acls.next(), acls.oldest_ms) == ("a", 1)
    assert not acls.forget("a", row("a", 2))
    assert acls.forget("a", row("a", 3))
    assert (acls.next(), acls.oldest_ms) == (None, None)
    acls.note(copied("a", 4))
    assert acls.forget("a", None)
    assert acls.oldest_ms is None


def test_only_so_many_wait() -> None:
    acls = AssumedAcls(default_in_a_row=0, assumed_max=2)
    acls.is_watched = True
    for key in "ab":
        assert acls.may_assume
        acls.note(copied(key, 1))
    assert not acls.may_assume
