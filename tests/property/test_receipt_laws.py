"""The laws of receipts: a set's hash forgets order and keeps every bit; no change of a
chain passes.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from proof.item import Item
from proof.lthash import LANES, STATE_BYTES, LtHash, fast_sum, sha256, slow_sum
from proof.receipts import ChainFault, ChainHead, ReceiptRecord, verify_chain
from tests.support.receipts import OUR_KEY, TRUSTED, chain_of, receipt

LENGTH = 5
LINES, HEAD = chain_of(LENGTH)
CHAIN = b"".join(LINES)

items = st.builds(
    Item,
    key=st.text(max_size=5),
    size_bytes=st.integers(0, 1 << 40),
    content=st.none() | st.binary(max_size=4),
    properties=st.sampled_from([b"", b"\0" * 16]),
    version=st.sampled_from(["", "v1"]),
    is_delete_marker=st.booleans(),
)
some = st.lists(items, max_size=8)


def hashed(added: list[Item]) -> LtHash:
    made = LtHash()
    made.add(added)
    return made


@given(some, st.randoms(use_true_random=False))
def test_the_order_of_adding_does_not_matter(added: list[Item], order: random.Random) -> None:
    other = list(added)
    order.shuffle(other)
    cut = order.randint(0, len(other))
    made = hashed(other[:cut])
    made.add(other[cut:])
    assert made.state == hashed(added).state


@given(some, some)
def test_removing_undoes_adding(kept: list[Item], gone: list[Item]) -> None:
    made = LtHash(hashed(kept).state)
    made.add(gone)
    assert (made.state == hashed(kept).state) == (not gone)
    made.remove(gone)
    assert made.state == hashed(kept).state


@given(some, some)
def test_sets_that_differ_have_other_digests(one: list[Item], other: list[Item]) -> None:
    def in_order(added: list[Item]) -> list[Item]:
        return sorted(added, key=repr)

    is_equal = hashed(one).digest == hashed(other).digest
    assert is_equal == (in_order(one) == in_order(other))


def test_more_items_than_a_batch_add_up() -> None:
    many = [Item(str(number), number) for number in range(1000)]
    made = LtHash()
    for one in reversed(many):
        made.add([one])
    assert made.state == hashed(many).state
    assert made.digest == sha256(made.state)
    assert len(made.state) == STATE_BYTES


@given(st.lists(st.binary(min_size=1, max_size=8), max_size=9), st.integers(1, 40))
def test_both_ways_of_adding_up_lanes_agree(seeds: list[bytes], often: int) -> None:
    expanded = [(seed * STATE_BYTES)[:STATE_BYTES] for seed in (*seeds, b"\xff")] * often
    lanes = [
        sum(int.from_bytes(one[2 * lane : 2 * lane + 2], "little") for one in expanded) % (1 << 16)
        for lane in range(LANES)
    ]
    expected = b"".join(lane.to_bytes(2, "little") for lane in lanes)
    assert slow_sum(expanded).to_bytes(STATE_BYTES, "little") == expected
    assert fast_sum(expanded) == slow_sum(expanded)


def test_an_untouched_chain_holds() -> None:
    report = verify_chain(CHAIN, trusted=TRUSTED, known=HEAD)
    assert (report.head, report.broken) == (HEAD, None)


@given(st.integers(0, len(CHAIN) - 1), st.integers(0, 7), st.booleans())
def test_any_flip_is_found_where_it_is(at: int, bit: int, is_known: bool) -> None:
    flipped = bytearray(CHAIN)
    flipped[at] ^= 1 << bit
    line = CHAIN[:at].count(b"\n")
    report = verify_chain(bytes(flipped), trusted=TRUSTED, known=HEAD if is_known else None)
    assert report.broken is not None
    assert report.broken.number == line
    assert report.head == ChainHead(line, sha256(LINES[line - 1][:-1]) if line else bytes(32))
    is_end = at == len(CHAIN) - 1
    cut = ChainFault.TRUNCATED if is_known else ChainFault.CUT
    assert report.broken.fault is (cut if is_end else ChainFault.CHANGED)


@given(st.integers(0, LENGTH - 2))
def test_a_removed_record_is_named(number: int) -> None:
    report = verify_chain(b"".join(LINES[:number] + LINES[number + 1 :]), trusted=TRUSTED)
    assert report.broken is not None
    assert (report.broken.number, report.broken.fault) == (number, ChainFault.REMOVED)


@given(st.permutations(range(LENGTH)))
def test_moved_records_are_named(order: list[int]) -> None:
    report = verify_chain(b"".join(LINES[number] for number in order), trusted=TRUSTED)
    if order == sorted(order):
        assert report.broken is None
        return
    first = next(place for place, number in enumerate(order) if place != number)
    assert report.broken is not None
    assert (report.broken.number, report.broken.fault) == (first, ChainFault.REORDERED)


@given(st.integers(0, LENGTH - 1))
def test_a_repeated_record_is_named(number: int) -> None:
    twice = LINES[: number + 1] + LINES[number:]
    report = verify_chain(b"".join(twice), trusted=TRUSTED)
    assert report.broken is not None
    assert (report.broken.number, report.broken.fault) == (number + 1, ChainFault.REORDERED)


@given(st.integers(0, len(CHAIN)))
def test_a_missing_end_is_found_against_a_known_head(length: int) -> None:
    report = verify_chain(CHAIN[:length], trusted=TRUSTED, known=HEAD)
    whole = CHAIN[:length].count(b"\n")
    assert report.head.records == whole
    if length == len(CHAIN):
        assert report.broken is None
    else:
        assert report.broken is not None
        assert (report.broken.number, report.broken.fault) == (whole, ChainFault.TRUNCATED)


@given(st.integers(0, LENGTH - 1))
def test_who_holds_the_key_cannot_rewrite_before_a_known_head(number: int) -> None:
    rewritten, previous = LINES[:number], bytes(32)
    if number:
        previous = sha256(LINES[number - 1][:-1])
    for place in range(number, LENGTH):
        record = ReceiptRecord(place, previous, receipt(place + 100)).signed_by(OUR_KEY)
        rewritten, previous = [*rewritten, record.line + b"\n"], sha256(record.line)
    whole = b"".join(rewritten)
    assert verify_chain(whole, trusted=TRUSTED).broken is None
    report = verify_chain(whole, trusted=TRUSTED, known=HEAD)
    assert report.broken is not None
    assert report.broken.fault is ChainFault.CHANGED
    spliced = rewritten[: number + 1] + LINES[number + 1 :]
    assert verify_chain(b"".join(spliced), trusted=TRUSTED, known=HEAD).broken is not None
