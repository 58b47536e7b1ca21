"""What the kernels find in the pages of an index is what SQLite finds there, whatever
was written, whoever reads meanwhile, and whatever is damaged.
"""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest

from proof.columns import ByteColumn
from proof.errors import IndexDamagedError
from proof.item import KEY_HASH_BYTES
from proof.sqlite_index import SqliteTables
from proof.sqlite_pages import LOOKUPS_MIN, PageFile, PageReader
from proof.symbols import KERNEL_IDS_MIN, kernels_for
from proof.tables import ItemRow, RowColumns, TableBatch
from runtime.errors import DatabaseError

Rows = dict[tuple[bytes, bytes], bytes]
pytestmark = pytest.mark.skipif(
    kernels_for(KERNEL_IDS_MIN) is None, reason="without the compiled kernels SQLite answers"
)


def random_row(chance: random.Random) -> ItemRow:
    """Also keys that need overflow pages, hashes of few bits, and twins."""
    key = chance.choice([b"", b"a", b"logs/2026/", bytes(8)]) + chance.randbytes(
        chance.randrange(9)
    )
    key += b"k" * chance.choice([0, 0, 0, 0, 20, 200, 500, 1_000])
    version = chance.choice([b"", b"", b"v", chance.randbytes(30)])
    bits = chance.choice([0, 1, 7, 8, 15, 31, 40, 47, 48, 48, 48])
    hashed = crc32(key + version) * 0x1_0001 % (1 << bits) if bits else 0
    row = hashed.to_bytes(KEY_HASH_BYTES, "big") + chance.randbytes(chance.choice([6, 60, 60, 700]))
    return ItemRow(key, version, row)


def random_batch(chance: random.Random, held: Rows) -> TableBatch:
    """New rows, and deletes; `held` follows."""
    batch = TableBatch(values={"v": b"v"})
    for (key, version), row in chance.sample(sorted(held.items()), len(held) // 10):
        batch.deletes.append(ItemRow(key, version, row))
        del held[key, version]
    # An update keeps the hash, which is that of the name.
    for (key, version), row in chance.sample(sorted(held.items()), len(held) // 10):
        held[key, version] = row[:KEY_HASH_BYTES] + chance.randbytes(50)
        batch.puts.append(ItemRow(key, version, held[key, version]))
    for one in (random_row(chance) for _ in range(800)):
        if (one.key, one.version) not in held:
            held[one.key, one.version] = one.row
            batch.puts.append(one)
    return batch


def tables_with(path: Path, chance: random.Random) -> tuple[SqliteTables, Rows]:
    held = Rows()
    with closing(SqliteTables(path, building=True)) as tables:
        tables.write(random_batch(chance, held))
        tables.settle()
    return SqliteTables(path), held


def hash_of(row: bytes) -> int:
    return int.from_bytes(row[:KEY_HASH_BYTES], "big")


def wanted(chance: random.Random, held: Rows) -> npt.NDArray[np.uint64]:
    """Enough hashes, some of which nothing has."""
    some = {hash_of(row) for row in held.values() if chance.random() < 0.8}
    some |= {chance.getrandbits(48) for _ in range(LOOKUPS_MIN)}
    return np.array(sorted(some), np.uint64)


def of(found: RowColumns) -> list[tuple[bytes, bytes, bytes]]:
    names, rows = found.names, found.rows.texts()
    return sorted(zip(names.keys.texts(), names.versions.texts(), rows, strict=True))


def answers(
    view: object, hashes: npt.NDArray[np.uint64]
) -> tuple[list[tuple[bytes, bytes, bytes]], list[tuple[bytes, bytes]]]:
    rows, names = view.by_hash(hashes), view.names_by_hash(hashes)  # type: ignore[attr-defined]
    return of(rows), sorted(zip(names.keys.texts(), names.versions.texts(), strict=True))


def expected(
    held: Rows, hashes: npt.NDArray[np.uint64]
) -> tuple[list[tuple[bytes, bytes, bytes]], list[tuple[bytes, bytes]]]:
    asked = set(hashes.tolist())
    rows = sorted((*name, row) for name, row in held.items() if hash_of(row) in asked)
    return rows, [(key, version) for key, version, _ in rows]


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[PageFile]:
    """Of the file `pages.sqlite`, whichever it is."""
    path = tmp_path / "pages.sqlite"
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    made = PageFile(path, connection)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_view_finds_what_was_there_when_it_began(tmp_path: Path, seed: int) -> None:
    """Also while the log is not written back, and after others wrote."""
    chance = random.Random(seed)
    tables, held = tables_with(tmp_path / "pages.sqlite", chance)
    with closing(tables):
        for _ in range(4):
            then, asked = dict(held), wanted(chance, held)
            with tables.view() as before:
                assert answers(before, asked) == expected(then, asked)
                tables.write(random_batch(chance, held))
                with tables.view() as now:
                    for hashes in (asked, wanted(chance, held)):
                        assert answers(now, hashes) == expected(held, hashes)
                        assert answers(before, hashes) == expected(then, hashes)
            tables.write(random_batch(chance, held))


def test_the_file_is_read_only_once_the_log_is_in_it(tmp_path: Path, pages: PageFile) -> None:
    chance = random.Random(1)
    tables, held = tables_with(tmp_path / "pages.sqlite", chance)
    with closing(tables):
        with tables.view():
            assert pages.reader(LOOKUPS_MIN - 1) is None
            assert pages.reader(LOOKUPS_MIN) is not None
            tables.write(random_batch(chance, held))
            # A checkpoint now would change pages under the view.
            assert pages.reader(LOOKUPS_MIN) is None
        with tables.view():
            assert pages.reader(LOOKUPS_MIN) is not None


def test_most_rows_are_found_without_sqlite(tmp_path: Path, pages: PageFile) -> None:
    path, chance = tmp_path / "pages.sqlite", random.Random(2)
    rows = [ItemRow(b"logs/%06d" % n, b"", chance.randbytes(80)) for n in range(2_000)]
    with closing(SqliteTables(path, building=True)) as tables:
        tables.write(TableBatch(puts=rows, values={"v": b"v"}))
        tables.settle()
    hashes = np.array(sorted(hash_of(row.row) for row in rows), np.uint64)
    with closing(SqliteTables(path)) as tables, tables.view():
        reader = pages.reader(len(hashes))
        assert isinstance(reader, PageReader)
        names, left = reader.names(hashes)
        assert len(names) + len(left) == len(hashes)
        found, unread = reader.rows(hashes)
        assert len(found) + len(unread) == len(hashes)
        # Entries of interior pages are left to SQLite.
        assert len(left) == len(unread) < len(hashes) / 20


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_named_or_changes_nothing_but_what_is_damaged(tmp_path: Path, seed: int) -> None:
    """Bits, bytes and whole pages: no look-up ends the process, or does not end."""
    chance = random.Random(seed)
    path = tmp_path / "pages.sqlite"
    tables, held = tables_with(path, chance)
    tables.close()
    whole = path.read_bytes()
    page_bytes = int.from_bytes(whole[16:18], "big")
    hashes = wanted(chance, held)
    for _ in range(25):
        spoilt = bytearray(whole)
        page = chance.randrange(1, len(whole) // page_bytes) * page_bytes
        for _ in range(chance.choice([1, 4, 100])):
            spoilt[page + chance.randrange(chance.choice([16, page_bytes]))] = chance.choice(
                [0, 255, 127, 128, chance.randrange(256)]
            )
        if chance.random() < 0.3:
            # A page that leads to itself, or to any other.
            spoilt[page] = 2
            spoilt[page + 8 : page + 12] = chance.choice(
                [page // page_bytes + 1, chance.randrange(1 << 32)]
            ).to_bytes(4, "big")
        if chance.random() < 0.2:
            other = chance.randrange(len(whole) // page_bytes) * page_bytes
            spoilt[page : page + page_bytes] = whole[other : other + page_bytes]
        path.write_bytes(spoilt)
        with (
            suppress(IndexDamagedError, DatabaseError),
            closing(SqliteTables(path)) as damaged,
            damaged.view() as view,
        ):
            view.names_by_hash(hashes)
            view.by_hash(hashes)
    path.write_bytes(whole[: len(whole) // 2])
    with (
        suppress(IndexDamagedError, DatabaseError),
        closing(SqliteTables(path)) as cut,
        cut.view() as view,
    ):
        view.by_hash(hashes)


def entry(hashed: int, key: bytes) -> bytes:
    """A cell of the index by hash: its head, a hash of six bytes, a key, no version."""
    record = bytes((4, 5, 12 + 2 * len(key), 12)) + hashed.to_bytes(KEY_HASH_BYTES, "big") + key
    return bytes((len(record),)) + record


def test_no_page_is_not_the_page_that_was_refused_before(tmp_path: Path) -> None:
    """A root leads to a leaf with more cells than a page holds, and to page 0. What the
    refused leaf left in memory answers nothing.
    """
    page_kernels = pytest.importorskip("proof.page_kernels")
    page_bytes, wanted_hash = 512, 200
    root, leaf = bytearray(page_bytes), bytearray(page_bytes)
    split = (3).to_bytes(4, "big") + entry(100, b"split")
    root[: 12 + 2] = (2, 0, 0, 0, 1, 0, 0, 0, *(0).to_bytes(4, "big"), *(400).to_bytes(2, "big"))
    root[400 : 400 + len(split)] = split
    cells = page_bytes // 2
    leaf[:8] = (10, 0, 0, *cells.to_bytes(2, "big"), 0, 0, 0)
    first, others = entry(wanted_hash, b"first"), entry(wanted_hash + 1, b"other")
    leaf[300 : 300 + len(first)], leaf[350 : 350 + len(others)] = first, others
    # The cells that a search for the first one looks at.
    looked_at = [cells >> n for n in range(1, cells.bit_length())]
    for cell in looked_at:
        leaf[8 + 2 * cell : 10 + 2 * cell] = (350).to_bytes(2, "big")
    leaf[8:10] = (300).to_bytes(2, "big")
    path = tmp_path / "pages.sqlite"
    path.write_bytes(bytes(page_bytes) + root + leaf)
    hashes = np.array([50, wanted_hash], np.uint64)
    with path.open("rb") as file:
        is_found = page_kernels.find_names(file.fileno(), page_bytes, 3, 2, hashes)[3]
    assert not is_found.any()
    # The same leaf with fewer cells is one that the kernel reads.
    leaf[3:5] = (2).to_bytes(2, "big")
    path.write_bytes(bytes(page_bytes) + root + leaf)
    with path.open("rb") as file:
        alone = page_kernels.find_names(file.fileno(), page_bytes, 3, 3, hashes[1:])
    assert bytes(alone[0]) == b"first"


@pytest.mark.parametrize("seed", range(40))
def test_columns_are_ordered_as_bytes_are(seed: int) -> None:
    chance = random.Random(seed)
    prefix = chance.randbytes(chance.choice([0, 3, 8, 17]))
    texts = [
        prefix
        + bytes(chance.choices([0, 1, 97, 255], k=chance.randrange(chance.choice([1, 3, 20]))))
        for _ in range(chance.choice([0, 1, 2, 200]))
    ]
    assert [texts[at] for at in ByteColumn.of(texts).order().tolist()] == sorted(texts)
