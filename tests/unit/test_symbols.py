"""IDs, coded symbols and roots, against a second implementation of them."""

import random
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest

from proof import symbols as module
from proof.item import (
    HashAlgorithm,
    Item,
    ItemHasher,
    Profile,
    check_bits,
    properties_digest,
)
from proof.root import ROOT_EMPTY, SetRoot
from proof.symbols import (
    KEPT_SYMBOLS,
    CodedSymbols,
    Ids,
    estimated_difference,
    ids_from_bytes,
    ids_from_hashes,
    ids_to_bytes,
    kernels_for,
    key_hashes,
    peel,
)
from tests.support.proof_reference import (
    id_of,
    is_certified,
    peeled,
    places_of,
    profile_digest_of,
    properties_digest_of,
    root_digest_of,
    symbols_of,
)

SECRET = bytes(range(32))


def some_ids(count: int, seed: int) -> list[bytes]:
    """Random IDs whose checks are right."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        high, low = rng.getrandbits(64), rng.getrandbits(32) << 32
        found.append((high << 64 | low | check_bits(high, low)).to_bytes(16, "big"))
    return found


def coded(ids: list[bytes], size: int, salt: int = 0) -> CodedSymbols:
    symbols = CodedSymbols.zeros(size, salt)
    symbols.add(ids_from_bytes(b"".join(ids)))
    return symbols


def compiled() -> ModuleType:
    """The kernels. That they refuse to load is a failure where there is numba."""
    pytest.importorskip("numba", reason="the extra `fast` is not installed", exc_type=ImportError)
    return import_module("proof.kernels")


def as_pairs(symbols: CodedSymbols) -> list[tuple[int, int]]:
    return [
        (int(high) << 64 | int(low), int(count))
        for (high, low), count in zip(symbols.sums, symbols.counts, strict=True)
    ]


def as_set(ids: Ids) -> set[bytes]:
    data = ids_to_bytes(ids)
    return {data[at : at + 16] for at in range(0, len(data), 16)}


def test_ids_are_those_of_the_second_implementation() -> None:
    hasher, rng = ItemHasher(Profile(SECRET)), random.Random(1)
    items = [
        Item(
            key=f"é{'k' * (n % 7)}/{n}",
            size_bytes=rng.getrandbits(n % 64),
            content=None if n % 3 else rng.randbytes(n % 33),
            properties=rng.randbytes(n % 17),
            version="" if n % 2 else f"v{n}",
            is_delete_marker=n % 5 == 0,
        )
        for n in range(300)
    ]
    expected = [
        id_of(
            SECRET,
            item.key,
            item.version,
            item.is_delete_marker,
            item.size_bytes,
            item.content,
            item.properties,
        )
        for item in items
    ]
    assert [hasher.id(item) for item in items] == expected
    assert len({*expected}) == len(items)
    bulk = ids_from_hashes(b"".join(hasher.hashes(item) for item in items))
    assert ids_to_bytes(bulk) == b"".join(expected)
    assert [one.to_bytes(6, "big") for one in key_hashes(bulk).tolist()] == [
        one[:6] for one in expected
    ]


def test_digests_are_those_of_the_second_implementation() -> None:
    for algorithm in (None, *HashAlgorithm):
        profile = Profile(SECRET, algorithm, ("metadata", "tags"))
        name = algorithm.value if algorithm else ""
        assert profile.digest == profile_digest_of(SECRET, name, ["metadata", "tags"])
    root = (7, 2**128 - 5)
    digest = ItemHasher(profile).root_digest(b"a job", *root)
    assert digest == root_digest_of(SECRET, b"a job", *root)
    groups = ((("a", "é"), ("b", "")), (), (("a", "x" * 300),))
    assert properties_digest(*groups) == properties_digest_of(groups)


def test_another_secret_gives_other_ids() -> None:
    item = Item("key", 1)
    one, other = (ItemHasher(Profile(secret)).id(item) for secret in (SECRET, bytes(32)))
    assert one[:6] != other[:6]
    assert one[6:12] != other[6:12]


@pytest.mark.parametrize("salt", [0, 0xFEDC_BA98_7654_3210])
@pytest.mark.parametrize("count", [0, 1, 5, 9, 100, 3000])
def test_symbols_are_those_of_the_second_implementation(count: int, salt: int) -> None:
    ids = some_ids(count, seed=count)
    assert as_pairs(coded(ids, 700, salt)) == symbols_of(ids, 700, salt)


def test_kernels_and_arrays_make_the_same_symbols() -> None:
    kernels = compiled()
    ids = ids_from_bytes(b"".join(some_ids(4000, seed=3)))
    for size in (0, 1, 2, 31, 5000):
        ours = CodedSymbols.zeros(size, salt=99)
        module._add_arrays(ids, ours, 1)
        one_by_one = CodedSymbols.zeros(size, salt=99)
        module._add_plain(ids, one_by_one, 1)
        sums, counts = np.zeros((size, 2), np.uint64), np.zeros(size, np.int16)
        kernels.add(ids, np.uint64(99), 1, sums, counts)
        for symbols in (ours, one_by_one):
            assert np.array_equal(symbols.sums, sums)
            assert np.array_equal(symbols.counts, counts)


@pytest.mark.parametrize("size", [10, 60, 100, 300])
def test_kernels_and_plain_python_peel_alike(size: int) -> None:
    kernels = compiled()
    for seed in range(20):
        ids = some_ids(60, seed)
        difference = coded(ids[:40], size) - coded(ids[40:], size)
        results = []
        for peel_symbols in (kernels.peel, module._peel_plain):
            found, signs = np.zeros((size, 2), np.uint64), np.zeros(size, np.int8)
            salt = np.uint64(0) if peel_symbols is kernels.peel else 0
            number = peel_symbols(
                salt, difference.sums.copy(), difference.counts.copy(), found, signs
            )
            kept = max(number, 0)
            results.append(
                (number, {*zip(as_list(found[:kept]), signs[:kept].tolist(), strict=True)})
            )
        assert results[0] == results[1]


def as_list(ids: Ids) -> list[bytes]:
    data = ids_to_bytes(ids)
    return [data[at : at + 16] for at in range(0, len(data), 16)]


@pytest.mark.parametrize("size", [4, 16, 40, 150])
def test_what_peels_is_what_the_second_implementation_peels(size: int) -> None:
    for seed in range(15):
        ids = some_ids(90, seed)
        ours, theirs = ids[:60], ids[30 + seed :]
        found = peel(coded(ours, size) - coded(theirs, size))
        expected = peeled(symbols_of(ours, size), symbols_of(theirs, size))
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert (as_set(found.ours), as_set(found.theirs)) == expected
        assert expected == ({*ours} - {*theirs}, {*theirs} - {*ours})
        assert is_certified(ours, theirs, *expected)
        assert SetRoot.of(found.ours) - SetRoot.of(found.theirs) == root(ours) - root(theirs)


def root(ids: list[bytes]) -> SetRoot:
    return SetRoot.of(ids_from_bytes(b"".join(ids)))


def test_roots_and_certificates_are_those_of_the_second_implementation() -> None:
    ids = some_ids(500, seed=8)
    assert root(ids) == SetRoot(500, sum(int.from_bytes(one, "big") for one in ids) % 2**128)
    singles = [SetRoot.of_item(one) for one in ids]
    assert sum(singles, ROOT_EMPTY) == SetRoot.of_all(singles) == root(ids)
    for lost in (set[bytes](), {ids[3]}):
        only = {*ids[:5]} - lost
        holds = root(ids) - root(ids[5:]) == root(sorted(only))
        assert holds == is_certified(ids, ids[5:], only, set()) == (not lost)


def test_removing_is_the_inverse_of_adding() -> None:
    ids = ids_from_bytes(b"".join(some_ids(200, seed=5)))
    symbols = CodedSymbols.zeros(KEPT_SYMBOLS)
    symbols.add(ids)
    for one in ids:
        symbols.remove(one.reshape(1, 2))
    assert not symbols.sums.any()
    assert not symbols.counts.any()


def test_symbols_survive_storage_at_18_bytes_each() -> None:
    symbols = coded(some_ids(70_000, seed=6)[:3], 50) - coded(some_ids(9, seed=7), 50)
    data = symbols.to_bytes()
    assert len(data) == 18 * 50
    again = CodedSymbols.from_bytes(data)
    assert np.array_equal(again.sums, symbols.sums)
    assert np.array_equal(again.counts, symbols.counts)


def test_counts_wrap_and_still_give_the_difference() -> None:
    """70,000 IDs overflow the count of the first symbol twice."""
    rng = np.random.default_rng(1)
    many = rng.integers(0, 2**64, (70_000, 2), np.uint64)
    ours, theirs = coded(some_ids(20, seed=1), 64), CodedSymbols.zeros(64)
    for symbols in (ours, theirs):
        symbols.add(many)
    found = peel(ours - theirs)
    assert found is not None
    assert as_set(found.ours) == {*some_ids(20, seed=1)}
    only = CodedSymbols.zeros(2048)
    only.add(many)
    assert 60_000 < estimated_difference(only, 70_000) < 80_000


@pytest.mark.parametrize(("size", "spread"), [(32, 0.7), (2048, 0.15)])
def test_counts_estimate_the_difference(size: int, spread: float) -> None:
    for ours, theirs in ((3000, 0), (1500, 1500), (200, 2800), (0, 3000)):
        difference = coded(some_ids(ours, 1), size) - coded(some_ids(theirs, 2), size)
        assert abs(estimated_difference(difference, ours - theirs) / 3000 - 1) < spread


def test_a_large_surplus_does_not_spoil_the_estimate() -> None:
    ids = np.random.default_rng(5).integers(0, 2**64, (200_000, 2), np.uint64)
    symbols = CodedSymbols.zeros(32)
    symbols.add(ids)
    assert 100_000 < estimated_difference(symbols, 200_000) < 350_000


def test_32_symbols_decode_ten_ids_in_nearly_all_cases() -> None:
    decoded = sum(peel(coded(some_ids(10, seed), 32)) is not None for seed in range(400))
    assert decoded > 0.97 * 400


def test_symbols_of_a_wrong_id_do_not_peel() -> None:
    """A bit of the check, of a hash or of the count: none of it gives an ID."""
    ids = some_ids(3, seed=2)
    for bit in range(128):
        symbols = coded(ids, 40)
        symbols.sums[:, bit // 64] ^= np.uint64(1 << bit % 64)
        assert peel(symbols) is None
    symbols = coded(ids, 40)
    symbols.counts[5] += 2
    assert peel(symbols) is None


def test_an_id_out_of_its_places_does_not_peel() -> None:
    (one,) = some_ids(1, seed=2)
    wrong = next(i for i in range(100) if i not in places_of(one, 100))
    symbols = CodedSymbols.zeros(100)
    symbols.sums[wrong], symbols.counts[wrong] = ids_from_bytes(one)[0], 1
    assert peel(symbols) is None


def test_an_id_in_one_of_its_places_alone_does_not_peel_for_ever() -> None:
    """It is taken out of the others, from where it is taken out of this one again."""
    (one,) = some_ids(1, seed=2)
    for peel_symbols in (module._peel_plain, compiled().peel):
        for place in places_of(one, 40):
            symbols = CodedSymbols.zeros(40)
            symbols.sums[place], symbols.counts[place] = ids_from_bytes(one)[0], 1
            found, signs = np.zeros((40, 2), np.uint64), np.zeros(40, np.int8)
            assert peel_symbols(0, symbols.sums, symbols.counts, found, signs) == -1


def test_other_symbols_serve_another_salt() -> None:
    ids = some_ids(50, seed=4)
    plain, salted = coded(ids, 200), coded(ids, 200, salt=7)
    assert not np.array_equal(plain.sums, salted.sums)
    found = peel(salted)
    assert found is not None
    assert as_set(found.ours) == {*ids}


def test_kernels_load_once_there_is_enough_work() -> None:
    assert (kernels_for(module.KERNEL_IDS_MIN) is None) == (module._load() is None)
