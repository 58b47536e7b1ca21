"""Write batches of RocksDB: what was encoded comes back, and whatever else arrives is
named, never a traceback.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ozone.errors import WriteBatchError
from ozone.write_batch import BatchRecord, RowOperation, parse_batch
from tests.support.ozone_rows import batch_bytes, record_bytes

RECORDS = st.lists(
    st.builds(
        BatchRecord,
        st.sampled_from([RowOperation.PUT, RowOperation.DELETE]),
        st.integers(0, (1 << 32) - 1),
        st.binary(max_size=300),
        st.binary(max_size=300),
    ).map(
        lambda one: (
            one
            if one.operation is RowOperation.PUT
            else BatchRecord(one.operation, one.family, one.key, b"")
        )
    ),
    max_size=20,
)


@given(first=st.integers(0, 1 << 40), records=RECORDS)
def test_a_batch_is_read_as_it_was_written(first: int, records: list[BatchRecord]) -> None:
    batch = parse_batch(batch_bytes(first, records))
    assert batch.records == tuple(records)
    assert (batch.first, batch.last) == (first, first + max(len(records), 1) - 1)


def test_the_vector_of_the_format_is_read() -> None:
    raw = bytes.fromhex(
        "0100000000000000040000000501062f762f622f6b0356414c0402092f762f622f6b2f3737"
        "01016401780e01022f61022f62"
    )
    batch = parse_batch(raw)
    assert [(one.operation, one.family, one.key) for one in batch.records] == [
        (RowOperation.PUT, 1, b"/v/b/k"),
        (RowOperation.DELETE, 2, b"/v/b/k/77"),
        (RowOperation.PUT, 0, b"d"),
        (RowOperation.OTHER, 1, b"/a"),
    ]
    assert (batch.first, batch.last) == (1, 4)


@given(records=RECORDS, data=st.data())
def test_a_damaged_batch_is_named_or_is_another_batch(
    records: list[BatchRecord], data: st.DataObject
) -> None:
    raw = bytearray(batch_bytes(7, records))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    end = data.draw(st.integers(0, len(raw)))
    try:
        batch = parse_batch(bytes(raw[:end]))
    except WriteBatchError:
        return
    assert batch.last - batch.first + 1 == max(len(batch.records), 1)


@given(records=RECORDS.filter(bool), data=st.data())
def test_no_part_of_a_batch_passes_for_the_whole(
    records: list[BatchRecord], data: st.DataObject
) -> None:
    raw = batch_bytes(7, records)
    with pytest.raises(WriteBatchError):
        parse_batch(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(WriteBatchError):
        parse_batch(raw + record_bytes(records[0]))


@pytest.mark.parametrize(
    "tail",
    [b"\x7f", b"\x0b\x01x", b"\x05\xff\xff\xff\xff\xff\x01", b"\x05\xff\xff\xff\xff\x1f"],
    ids=["unknown tag", "two phases", "endless number", "33 bits"],
)
def test_what_is_not_known_ends_the_batch_with_a_name(tail: bytes) -> None:
    raw = (1).to_bytes(8, "little") + (1).to_bytes(4, "little") + tail
    with pytest.raises(WriteBatchError):
        parse_batch(raw)
