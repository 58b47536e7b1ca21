"""Descriptors: Ozone's bytes in, Ozone's bytes out, and a named reason for whatever is
refused.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merkle.limits import DESCRIPTOR_BYTES_MAX
from merkle.replica import ReplicaState
from merkle.tree import ContainerId
from ozone.descriptor import (
    Descriptor,
    DescriptorRefusal,
    descriptor_checksum,
    dump_descriptor,
    parse_descriptor,
    with_checksum,
)
from ozone.errors import DescriptorError
from tests.support.volumes import ERASURE_CODED, MOMENTS, OZONE, unpack

FOLDER = "/data/hdds/hdds/CID-f6f7a8b0-aaaa-4bbb-8ccc-0123456789ab/current/containerDir0/100"
SHOWN = f"""!<KeyValueContainerData>
checksum: 0338deca7c3987e75b4d4f31d9b6f3a8b13c80990201772a1bd8395504b4e54d
chunksPath: {FOLDER}/chunks
containerDBType: RocksDB
containerID: 100
containerType: KeyValueContainer
dataScanTimestamp: 1755900000123
layOutVersion: 2
maxSize: 5368709120
metadata: {{OWNER: ozone, VOLUME: hdfs}}
metadataPath: {FOLDER}/metadata
originNodeId: 7f541a06-6c26-476d-9994-c6e1947e11cb
originPipelineId: 1297e8a9-2850-4ced-b96c-5ae31d2c73ad
schemaVersion: '3'
state: CLOSED
""".encode()
DESCRIPTOR = parse_descriptor(SHOWN)
UPSTREAM = Descriptor(
    container_id=ContainerId((1 << 63) - 1),
    state=ReplicaState.CLOSED,
    chunks_path="/hdds/current/aed-fg4-hji-jkl/containerDir0/1",
    metadata_path="/hdds/current/aed-fg4-hji-jkl/containerDir0/1",
    max_size_bytes=5368709120,
    origin_node_id="7f541a06-6c26-476d-9994-c6e1947e11cb",
    origin_pipeline_id="1297e8a9-2850-4ced-b96c-5ae31d2c73ad",
    layout_version=1,
    schema_version=None,
    metadata=(("OWNER", "ozone"), ("VOLUME", "hdfs")),
)


@pytest.mark.parametrize(
    ("descriptor", "checksum"),
    [
        (DESCRIPTOR, "0338deca7c3987e75b4d4f31d9b6f3a8b13c80990201772a1bd8395504b4e54d"),
        (
            replace(DESCRIPTOR, data_scan_timestamp_ms=None, metadata=()),
            "ec29857f9b784301be6e55b7f5f8b7f975333c746627d08cdb7754a2b119f3fa",
        ),
        (
            replace(DESCRIPTOR, replica_index=3, origin_pipeline_id=""),
            "14696aca8ff2a71186047b755702dc8a117d8fd3fdaec8cce2608a1d3f85b05b",
        ),
        (UPSTREAM, "61db56da7d50798561b5365c123c5fbf7faf99fbbbd571a746af79020b7f79ba"),
    ],
    ids=["shown", "never-scanned", "erasure-coded", "upstream-schema-1"],
)
def test_the_checksum_is_that_of_the_reference_implementation(
    descriptor: Descriptor, checksum: str
) -> None:
    assert descriptor_checksum(descriptor) == checksum


@pytest.mark.parametrize(
    ("fixture", "moment"), [*((OZONE, moment) for moment in MOMENTS), (ERASURE_CODED, "healthy")]
)
def test_every_descriptor_of_a_real_datanode_comes_back_byte_for_byte(
    fixture: Path, moment: str, tmp_path: Path
) -> None:
    files = sorted(unpack(moment, tmp_path, fixture=fixture).rglob("*.container"))
    assert len(files) >= 15
    for file in files:
        raw = file.read_bytes()
        assert dump_descriptor(parse_descriptor(raw)) == raw


def test_a_changed_state_or_scan_time_keeps_everything_else() -> None:
    changed = with_checksum(
        replace(DESCRIPTOR, state=ReplicaState.UNHEALTHY, data_scan_timestamp_ms=1755900000124)
    )
    before, after = SHOWN.decode().splitlines(), dump_descriptor(changed).decode().splitlines()
    assert parse_descriptor(dump_descriptor(changed)) == changed
    differing = {new.split(":")[0] for old, new in zip(before, after, strict=True) if old != new}
    assert differing == {"checksum", "dataScanTimestamp", "state"}


def test_order_and_unknown_fields_do_not_matter() -> None:
    head, *lines = SHOWN.decode().splitlines()
    shuffled = "\n".join([head, *reversed(lines), "futureField: {a: [1, 2]}"]) + "\n"
    assert parse_descriptor(shuffled.encode()) == DESCRIPTOR


def test_a_file_without_checksum_is_not_verified() -> None:
    lines = [line for line in SHOWN.decode().splitlines() if not line.startswith("checksum")]
    assert parse_descriptor("\n".join(lines).encode()).checksum is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("0144", 100), ("0x64", 100), ("0b1100100", 100), ("1_00", 100), ("1:40", 100), ("+100", 100)],
)
def test_integers_are_those_of_yaml_1_1(text: str, value: int) -> None:
    raw = SHOWN.replace(b"containerID: 100", f"containerID: {text}".encode())
    assert parse_descriptor(raw).container_id == value


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("plain", "originNodeId: plain"),
        ("3", "originNodeId: '3'"),
        ("1.5", "originNodeId: '1.5'"),
        ("1e5", "originNodeId: '1e5'"),
        ("1.e5", "originNodeId: '1.e5'"),
        ("08", "originNodeId: '08'"),
        ("0_", "originNodeId: '0_'"),
        ("08a", "originNodeId: 08a"),
        ("1:20", "originNodeId: '1:20'"),
        ("1:60", "originNodeId: 1:60"),
        ("0b_1", "originNodeId: '0b_1'"),
        ("-.5e1", "originNodeId: '-.5e1'"),
        ("<<", "originNodeId: '<<'"),
        ("y", "originNodeId: y"),
        ("true", "originNodeId: 'true'"),
        ("off", "originNodeId: 'off'"),
        ("null", "originNodeId: 'null'"),
        ("~", "originNodeId: '~'"),
        ("", "originNodeId: ''"),
        ("2026-01-02", "originNodeId: '2026-01-02'"),
        ("a: b", "originNodeId: 'a: b'"),
        ("a #b", "originNodeId: 'a #b'"),
        (" a", "originNodeId: ' a'"),
        ("@a", "originNodeId: '@a'"),
        ("- a", "originNodeId: '- a'"),
        ("it's", "originNodeId: it's"),
        ("=", "originNodeId: ="),
        ("größe", "originNodeId: größe"),
        ("a:b", "originNodeId: a:b"),
    ],
)
def test_text_is_quoted_where_it_would_read_as_something_else(value: str, line: str) -> None:
    """The lines are what SnakeYAML 2.5 writes."""
    dumped = dump_descriptor(replace(DESCRIPTOR, origin_node_id=value)).decode()
    assert line in dumped.splitlines()


def test_only_text_with_blanks_is_folded_at_80_columns() -> None:
    words = "/" + " ".join(["data"] * 30)
    dumped = dump_descriptor(replace(DESCRIPTOR, chunks_path=words)).decode().splitlines()
    start = next(i for i, line in enumerate(dumped) if line.startswith("chunksPath"))
    assert dumped[start + 1].startswith("  data")
    assert 80 < len(dumped[start]) <= 85
    # From SnakeYAML 2.5.
    spaced = (
        "/data "
        + "long" * 6
        + " "
        + "long" * 6
        + " vol umes it's a: x - b data # data data data longer"
    )
    assert (
        "chunksPath: '/data longlonglonglonglonglong longlonglonglonglonglong vol umes it''s\n"
        "  a: x - b data # data data data longer'\n"
    ) in dump_descriptor(replace(DESCRIPTOR, chunks_path=spaced)).decode()
    long = "/" + "d" * 500
    assert (
        f"chunksPath: {long}"
        in dump_descriptor(replace(DESCRIPTOR, chunks_path=long)).decode().splitlines()
    )


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=120)


@given(
    st.builds(
        Descriptor,
        container_id=st.integers(0, (1 << 63) - 1).map(ContainerId),
        state=st.sampled_from(ReplicaState),
        chunks_path=_TEXT,
        metadata_path=_TEXT,
        max_size_bytes=st.integers(0, (1 << 63) - 1),
        origin_node_id=st.none() | _TEXT,
        origin_pipeline_id=st.none() | _TEXT,
        layout_version=st.sampled_from([1, 2]),
        replica_index=st.integers(0, 20),
        schema_version=st.sampled_from([None, "2", "3"]),
        data_scan_timestamp_ms=st.none() | st.integers(0, 1 << 45),
        metadata=st.dictionaries(_TEXT, _TEXT, max_size=4).map(lambda d: tuple(sorted(d.items()))),
    )
)
def test_whatever_is_written_reads_back_the_same(descriptor: Descriptor) -> None:
    signed = with_checksum(descriptor)
    assert parse_descriptor(dump_descriptor(signed)) == signed


def _with(old: bytes, new: bytes) -> bytes:
    assert old in SHOWN
    return SHOWN.replace(old, new)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", DescriptorRefusal.TAG_MISSING),
        (b"\xff\xfe\x00", DescriptorRefusal.NOT_YAML),
        (b"\x00" * 300, DescriptorRefusal.NOT_YAML),
        (b"- a\n b: [", DescriptorRefusal.NOT_YAML),
        (b"[" * 20_000, DescriptorRefusal.NOT_YAML),
        (SHOWN + b"---\n" + SHOWN, DescriptorRefusal.NOT_YAML),
        (_with(b"!<KeyValueContainerData>\n", b""), DescriptorRefusal.TAG_MISSING),
        (_with(b"!<KeyValueContainerData>", b"!<EvilData>"), DescriptorRefusal.TAG_MISSING),
        (b"!<KeyValueContainerData>\n- a\n", DescriptorRefusal.TAG_MISSING),
        (_with(b"state: CLOSED", b"state: SHUT"), DescriptorRefusal.STATE_UNKNOWN),
        (_with(b"state: CLOSED", b"state: [CLOSED]"), DescriptorRefusal.FIELD_INVALID),
        (_with(b"state: CLOSED\n", b""), DescriptorRefusal.FIELD_MISSING),
        (_with(b"containerID: 100\n", b""), DescriptorRefusal.FIELD_MISSING),
        (_with(b"containerID: 100", b"containerID: hundred"), DescriptorRefusal.FIELD_INVALID),
        (_with(b"containerID: 100", b"containerID: -1"), DescriptorRefusal.FIELD_INVALID),
        (
            _with(b"containerID: 100", b"containerID: 9223372036854775808"),
            DescriptorRefusal.FIELD_INVALID,
        ),
        (_with(b"containerID: 100", b"containerID: 1.5"), DescriptorRefusal.FIELD_INVALID),
        (_with(b"metadata: {OWNER", b"metadata: {[OWNER]"), DescriptorRefusal.FIELD_INVALID),
        (
            _with(b"metadata: {OWNER: ozone, VOLUME: hdfs}", b"metadata: none"),
            DescriptorRefusal.FIELD_INVALID,
        ),
        (_with(b"schemaVersion: '3'", b"schemaVersion: 3"), DescriptorRefusal.FIELD_INVALID),
        (
            _with(b"{OWNER: ozone, VOLUME: hdfs}", b"&a {OWNER: ozone, VOLUME: *a}"),
            DescriptorRefusal.ALIAS,
        ),
        (
            _with(b"maxSize: 5368709120", b"maxSize: 5368709121"),
            DescriptorRefusal.CHECKSUM_MISMATCH,
        ),
        (_with(b"checksum: 03", b"checksum: 13"), DescriptorRefusal.CHECKSUM_MISMATCH),
        (SHOWN + b"#" * DESCRIPTOR_BYTES_MAX, DescriptorRefusal.TOO_LARGE),
    ],
)
def test_a_descriptor_that_cannot_be_trusted_is_refused_by_name(
    raw: bytes, reason: DescriptorRefusal
) -> None:
    with pytest.raises(DescriptorError) as refused:
        parse_descriptor(raw)
    assert refused.value.facts["reason"] == reason.value


def test_a_descriptor_of_the_largest_size_is_read() -> None:
    filler = b"#" * (DESCRIPTOR_BYTES_MAX - len(SHOWN))
    assert parse_descriptor(SHOWN + filler) == DESCRIPTOR
