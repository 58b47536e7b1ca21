"""Laws of conversion: what was written is read back, and bytes of any kind give a value
or a named refusal.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merkle.checksum import WIDTH, ChecksumType
from merkle.columns import encode_tree
from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.record import BlockRecord, ChunkRecord, WindowChecksums
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from protos.convert import (
    chunk_from_proto,
    record_from_bytes,
    record_to_bytes,
    tombstones_from_bytes,
    tree_from_bytes,
)
from protos.ozone_datanode_pb2 import ChecksumData, ChunkInfo

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
CONTAINER = ContainerId(100)


@st.composite
def metadata(draw: st.DrawFn) -> tuple[tuple[str, str | None], ...]:
    entries = draw(st.dictionaries(TEXT, st.none() | TEXT, max_size=3))
    return tuple(sorted(entries.items(), key=lambda entry: entry[0].encode("utf-16-be")))


@st.composite
def chunk_records(draw: st.DrawFn, offset: int) -> ChunkRecord:
    kind = draw(st.sampled_from(ChecksumType))
    length = draw(st.integers(0, 1 << 16))
    window = draw(st.integers(1 << 12, 1 << 17))
    width = WIDTH[kind]
    windows = -(-length // window) if width else 0
    checksums = tuple(draw(st.binary(min_size=width, max_size=width)) for _ in range(windows))
    stripe = draw(st.none() | st.binary(max_size=8))
    return ChunkRecord(
        offset, length, kind, window, checksums, draw(TEXT), draw(metadata()), stripe
    )


@st.composite
def block_records(draw: st.DrawFn) -> BlockRecord:
    offset, chunks = 0, []
    for _ in range(draw(st.integers(0, 3))):
        chunks.append(draw(chunk_records(offset)))
        offset = chunks[-1].end + draw(st.integers(1, 100))
    return BlockRecord(
        ContainerId(draw(INT64)),
        BlockId(draw(INT64)),
        draw(st.integers(0, (1 << 63) - 1)),
        tuple(chunks),
        draw(metadata()),
        draw(st.none() | st.integers(0, 9)),
    )


@st.composite
def trees(draw: st.DrawFn) -> ContainerTree:
    blocks = []
    for block_id in sorted(draw(st.sets(INT64, max_size=4))):
        if draw(st.booleans()):
            blocks.append(BlockTree.tombstone(BlockId(block_id), draw(INT64)))
        else:
            offsets = sorted(draw(st.sets(INT64, max_size=3)))
            chunks = tuple(
                ChunkTree(o, draw(INT64), draw(INT64), draw(st.booleans())) for o in offsets
            )
            blocks.append(BlockTree(BlockId(block_id), draw(INT64), False, chunks))
    return ContainerTree(CONTAINER, draw(st.none() | INT64), tuple(blocks))


def value_or_reason(parse: Callable[[bytes], object], raw: bytes) -> object:
    try:
        return parse(raw)
    except (RecordInvalidError, TreeRefusedError) as error:
        return error.facts["reason"]


@given(block_records())
def test_a_record_is_read_back_as_it_was_written(record: BlockRecord) -> None:
    raw = record_to_bytes(record)

    assert record_from_bytes(raw) == record
    assert record_to_bytes(record_from_bytes(raw)) == raw


@given(st.lists(st.sampled_from((0, 2, 4, 6, 16, 32)), max_size=4), st.data())
def test_checksums_are_read_exactly_where_each_has_the_width_of_its_type(
    widths: list[int], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from([kind for kind in ChecksumType if WIDTH[kind]]))
    # Every other one of the right width, lest nothing be ever right; and bytes that
    # look like the start of another.
    widths = data.draw(st.sampled_from((widths, [WIDTH[kind]] * len(widths))))
    checksums = [
        (data.draw(st.sampled_from((b"\x1a\x04", b"\0", b"ab"))) * 32)[:width] for width in widths
    ]
    window = data.draw(st.integers(1, 1 << 22))
    sums = ChecksumData(type=kind.name, bytesPerChecksum=window, checksums=checksums)
    message = ChunkInfo(chunkName="1", offset=0, len=len(checksums) * window, checksumData=sums)

    if set(widths) <= {WIDTH[kind]}:
        assert chunk_from_proto(message).checksums == tuple(checksums)
    else:
        assert value_or_reason(lambda _: chunk_from_proto(message), b"") == "checksum_width"


@given(st.sampled_from([4, 16, 32]), st.integers(0, 5), st.data())
def test_joined_checksums_are_as_good_as_a_tuple_of_them(
    width: int, count: int, data: st.DataObject
) -> None:
    plain = tuple(data.draw(st.binary(min_size=width, max_size=width)) for _ in range(count))
    joined = WindowChecksums(b"".join(plain), width)

    assert joined == plain == joined == WindowChecksums(b"".join(plain), width)
    assert hash(joined) == hash(plain)
    assert (len(joined), list(joined), repr(joined)) == (len(plain), list(plain), repr(plain))
    assert [joined[i] for i in range(-count, count)] == [plain[i] for i in range(-count, count)]
    cut = slice(data.draw(st.integers(-6, 6)), data.draw(st.none() | st.integers(-6, 6)))
    assert joined[cut] == plain[cut]
    assert joined != (*plain, bytes(width))
    assert WindowChecksums(bytes(32), 4) != WindowChecksums(bytes(32), 16)
    with pytest.raises(IndexError):
        joined[count]


@given(trees())
def test_a_tree_is_read_back_as_it_was_encoded(tree: ContainerTree) -> None:
    assert tree_from_bytes(encode_tree(tree), CONTAINER) == tree


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_refused_with_a_reason(raw: bytes) -> None:
    record = value_or_reason(record_from_bytes, raw)

    if isinstance(record, BlockRecord):
        assert record_from_bytes(record_to_bytes(record)) == record
    else:
        assert record


@given(block_records(), st.data())
def test_a_flipped_bit_gives_a_value_or_a_refusal(record: BlockRecord, data: st.DataObject) -> None:
    raw = bytearray(record_to_bytes(record))
    position = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[position // 8] ^= 1 << position % 8

    assert value_or_reason(record_from_bytes, bytes(raw))


@given(trees(), st.data())
def test_a_tree_with_a_flipped_bit_gives_a_value_or_a_refusal(
    tree: ContainerTree, data: st.DataObject
) -> None:
    raw = bytearray(encode_tree(tree))
    position = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[position // 8] ^= 1 << position % 8

    assert value_or_reason(lambda damaged: tree_from_bytes(damaged, CONTAINER), bytes(raw))


@given(trees(), st.booleans())
def test_the_tombstones_alone_are_those_of_the_tree(tree: ContainerTree, has_root: bool) -> None:
    whole = ContainerTree.of(CONTAINER, tree.blocks)
    raw = encode_tree(whole if has_root else replace(whole, data_checksum=None))

    assert tombstones_from_bytes(raw, CONTAINER) == tuple(
        block for block in tree.blocks if block.deleted
    )
    assert tombstones_from_bytes(raw, ContainerId(CONTAINER + 1)) == ()


@given(trees(), st.data())
def test_of_a_tree_with_a_flipped_bit_no_other_tombstones_are_read(
    tree: ContainerTree, data: st.DataObject
) -> None:
    raw = bytearray(encode_tree(ContainerTree.of(CONTAINER, tree.blocks)))
    position = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[position // 8] ^= 1 << position % 8
    found = tombstones_from_bytes(bytes(raw), CONTAINER)
    parsed = value_or_reason(lambda damaged: tree_from_bytes(damaged, CONTAINER), bytes(raw))

    assert not isinstance(parsed, ContainerTree) or {*found} <= {*parsed.blocks}


@given(st.binary(max_size=200))
def test_any_bytes_have_tombstones_or_none(raw: bytes) -> None:
    assert all(block.deleted for block in tombstones_from_bytes(raw, CONTAINER))
