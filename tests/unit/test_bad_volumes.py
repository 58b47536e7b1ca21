"""Volumes with something in them that no datanode would write: named, never followed,
never mended in passing.

Every case spoils one thing of a healthy volume with one container and looks at it with
the commands that a stranger would point at it. Rows of each table: what is wrong, how
to make it so, and what is said about it.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.checksum import ChecksumType
from merkle.errors import RecordInvalidError
from merkle.limits import CHUNK_BYTES_MAX, DESCRIPTOR_BYTES_MAX
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.containers import ContainerStore
from ozone.descriptor import dump_descriptor, parse_descriptor, with_checksum
from ozone.errors import DescriptorError
from ozone.rocks import (
    Batch,
    Counter,
    Database,
    OzoneTable,
    block_key,
    container_prefix,
    counter_key,
    long_bytes,
)
from ozone.volume import Hold, open_volume
from protos.convert import record_to_bytes
from protos.ozone_datanode_pb2 import BlockData
from runtime.disk import WHOLE_BYTES_MAX, Disk
from runtime.errors import DatabaseError
from tests.support.bad_input import refused, run, unchanged
from tests.support.handmade import (
    CLUSTER,
    NODE,
    STORAGE,
    VolumeMaker,
    block_record,
    chunk_record,
    some_bytes,
)

ONE, BLOCK = ContainerId(1), BlockId(20)
DATA = some_bytes(3000)
RECORD = block_record(ONE, BLOCK, [chunk_record(DATA)])
Spoil = Callable[[VolumeMaker], object]


@pytest.fixture
def made(tmp_path: Path) -> VolumeMaker:
    """A healthy volume, its database closed."""
    with VolumeMaker(tmp_path / "volume") as made:
        made.container(ONE)
        made.block(ONE, BLOCK, (RECORD.chunks[0], DATA))
    return made


def put(made: VolumeMaker, table: OzoneTable, key: bytes, value: bytes) -> None:
    database = Database.open_owner(made.database_path, Disk())
    batch = Batch()
    batch.put(table, key, value)
    database.write(batch)
    database.close()


def findings(root: Path) -> list[dict[str, object]]:
    """What `tree build` finds in the one container; its exit status must agree."""
    result = run("tree", "build", root, "--json")
    (line,) = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == (3 if line["findings"] else 0), result.output
    found = line["findings"]
    assert isinstance(found, list)
    return found


def problems(root: Path) -> list[str]:
    """What `doctor` says is wrong with the volume; its exit status must agree."""
    result = run("doctor", "--volume", root, "--json")
    (volume,) = json.loads(result.stdout)["data"]["volumes"]
    assert result.exit_code == (3 if volume["problems"] else 0)
    found = volume["problems"]
    assert isinstance(found, list)
    return found


def test_the_volume_that_is_spoiled_below_is_healthy(made: VolumeMaker) -> None:
    with unchanged(made.root):
        assert findings(made.root) == []
        assert problems(made.root) == []


def version(**values: str) -> Spoil:
    """VERSION with these properties in the place of its own."""
    properties = {
        "clusterID": CLUSTER,
        "storageID": STORAGE,
        "datanodeUuid": NODE,
        "layOutVersion": "1",
        **values,
    }
    text = "".join(f"{key}={value}\n" for key, value in properties.items())
    return content("hdds/VERSION", text.encode())


def content(name: str, raw: bytes) -> Spoil:
    return lambda made: (made.root / name).write_bytes(raw)


def both(first: Spoil, second: Spoil) -> Spoil:
    def spoil(made: VolumeMaker) -> None:
        first(made)
        second(made)

    return spoil


def a_pipe(name: str) -> Spoil:
    return both(gone(name), lambda made: os.mkfifo(made.root / name))


def a_folder(name: str) -> Spoil:
    return both(gone(name), lambda made: (made.root / name).mkdir())


def a_link(name: str, target: str) -> Spoil:
    return both(gone(name), lambda made: (made.root / name).symlink_to(target))


def a_socket(name: str) -> Spoil:
    def spoil(made: VolumeMaker) -> None:
        gone(name)(made)
        # By a short name: the address of a socket holds a hundred bytes.
        here = os.open((made.root / name).parent, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(f"/proc/self/fd/{here}/{Path(name).name}")
        finally:
            os.close(here)

    return spoil


def gone(name: str) -> Spoil:
    return lambda made: (made.root / name).unlink(missing_ok=True)


VERSION = "hdds/VERSION"
VERSIONS: list[tuple[str, Spoil]] = [
    ("a cluster of ..", version(clusterID="..")),
    ("a cluster of .", version(clusterID=".")),
    ("a cluster with a slash", version(clusterID="CID/../..")),
    ("a cluster with a NUL", version(clusterID="CID\0")),
    ("an absolute storage ID", version(storageID="/etc")),
    ("a storage ID with a NUL", version(storageID="DS\0x")),
    ("a storage ID of a space", version(storageID=" ")),
    ("a storage ID longer than a name", version(storageID="D" * 300)),
    ("a datanode with a line's end", version(datanodeUuid="a\\\nb")),
    ("a datanode in another script", version(datanodeUuid="\u0661")),
    ("layout 2", version(layOutVersion="2")),
    ("layout -1", version(layOutVersion="-1")),
    ("layout 1.0", version(layOutVersion="1.0")),
    ("empty", content(VERSION, b"")),
    ("only NULs", content(VERSION, bytes(4096))),
    ("a picture", content(VERSION, b"\x89PNG\r\n\x1a\n" + some_bytes(1000))),
    ("a pipe", a_pipe(VERSION)),
    ("a link to itself", a_link(VERSION, "VERSION")),
    ("a link out of the volume", a_link(VERSION, "/etc/hostname")),
]


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in VERSIONS])
def test_a_version_that_names_no_volume_is_refused(made: VolumeMaker, spoil: Spoil) -> None:
    spoil(made)
    with unchanged(made.root):
        for command in ("build", "check", "show"):
            refused("volume_invalid", 1, "tree", command, made.root)
        assert problems(made.root)


def descriptor(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def spoil(raw: bytes) -> bytes:
        assert old in raw
        # Without its checksum, so that what is wrong is judged by itself.
        lines = [
            line for line in raw.splitlines(keepends=True) if not line.startswith(b"checksum:")
        ]
        return b"".join(lines).replace(old, new)

    return spoil


def instead(raw: bytes) -> Callable[[bytes], bytes]:
    return lambda _: raw


HEAD = b"!<KeyValueContainerData>\n"
BOMB = (
    HEAD
    + b"a: &a [x, x]\n"
    + b"".join(b"%c: &%c [*%c, *%c]\n" % (i + 1, i + 1, i, i) for i in range(97, 117))
)
DESCRIPTORS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", instead(b""), "tag_missing"),
    ("only NULs", instead(bytes(400)), "not_yaml"),
    ("cut in half", lambda raw: raw[: len(raw) // 2], "field_missing"),
    ("UTF-16", lambda raw: raw.decode().encode("utf-16"), "not_yaml"),
    ("a list", instead(HEAD + b"- 1\n- 2\n"), "tag_missing"),
    ("two documents", lambda raw: raw + b"---\n" + raw, "not_yaml"),
    (
        "the tag of another class",
        descriptor(b"KeyValueContainerData>", b"java.lang.Runtime>"),
        "tag_missing",
    ),
    ("2 MiB", lambda raw: raw + b"#" * (2 * DESCRIPTOR_BYTES_MAX), "too_large"),
    ("brackets by the thousand", instead(HEAD + b"a: " + b"[" * 1500), "not_yaml"),
    ("lists by the thousand", instead(HEAD + b"a:\n " + b"- " * 1500), "not_yaml"),
    ("aliases that double twenty times", instead(BOMB), "alias"),
    ("a mapping in itself", descriptor(b"metadata: {}", b"metadata: &a {a: *a}"), "alias"),
    ("a character beyond all", descriptor(b"state: CLOSED", b'state: "\\U00110000"'), "not_yaml"),
    (
        "YAML of version 10^5000",
        lambda raw: b"%YAML 1." + b"1" * 5000 + b"\n--- " + raw,
        "not_yaml",
    ),
    ("state of nobody", descriptor(b"CLOSED", b"SHUT"), "state_unknown"),
    ("state in lower case", descriptor(b"CLOSED", b"closed"), "state_unknown"),
    ("state is a list", descriptor(b"CLOSED", b"[CLOSED]"), "field_invalid"),
    ("container ID -1", descriptor(b"containerID: 1", b"containerID: -1"), "field_invalid"),
    (
        "container ID 2^63",
        descriptor(b"containerID: 1", b"containerID: 9223372036854775808"),
        "field_invalid",
    ),
    (
        "container ID of 5000 digits",
        descriptor(b"containerID: 1", b"containerID: " + b"1" * 5000),
        "field_invalid",
    ),
    ("container ID 1e0", descriptor(b"containerID: 1", b"containerID: 1e0"), "field_invalid"),
    ("container ID is text", descriptor(b"containerID: 1", b"containerID: '1'"), "field_invalid"),
    (
        "container ID is a tag",
        descriptor(b"containerID: 1", b"containerID: !!int ''"),
        "field_invalid",
    ),
    ("container ID 0", descriptor(b"containerID: 1", b"containerID: 0"), "field_invalid"),
    ("of another container", descriptor(b"containerID: 1", b"containerID: 2"), "field_invalid"),
    ("a negative size", descriptor(b"maxSize: 5368709120", b"maxSize: -1"), "field_invalid"),
    ("no size", descriptor(b"maxSize: 5368709120\n", b""), "field_missing"),
    ("a type of old", descriptor(b"KeyValueContainer\n", b"OtherContainer\n"), "field_invalid"),
    ("another database", descriptor(b"RocksDB", b"LevelDB"), "field_invalid"),
    (
        "binary path",
        descriptor(b"chunksPath: /elsewhere", b"chunksPath: !!binary AAAA #"),
        "field_invalid",
    ),
    (
        "replica index -1",
        descriptor(b"schemaVersion", b"replicaIndex: -1\nschemaVersion"),
        "field_invalid",
    ),
    (
        "one letter changed",
        lambda raw: raw.replace(b"elsewhere", b"elsewhera"),
        "checksum_mismatch",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "reason"), [pytest.param(*rest, id=name) for name, *rest in DESCRIPTORS]
)
def test_a_descriptor_that_cannot_be_is_a_finding(
    made: VolumeMaker, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    path = made.folder(1) / "metadata" / "1.container"
    path.write_bytes(spoil(path.read_bytes()))
    with unchanged(made.root):
        assert findings(made.root) == [{"type": "CORRUPT_CONTAINER_FILE"}]
        assert len(problems(made.root)) == 1
        with volume(made) as store, pytest.raises(DescriptorError) as caught:
            store.open(ONE)
    assert caught.value.facts["reason"] == reason


@pytest.mark.parametrize(
    "changes",
    [{"schema_version": "2"}, {"schema_version": None}, {"layout_version": 1}],
    ids=["V2", "V1", "layout 1"],
)
def test_a_container_of_an_older_release_is_refused_by_name(
    made: VolumeMaker, changes: Mapping[str, str | int | None]
) -> None:
    path = made.folder(1) / "metadata" / "1.container"
    old = replace(parse_descriptor(path.read_bytes()), **changes)
    path.write_bytes(dump_descriptor(with_checksum(old)))
    with unchanged(made.root):
        result = run("tree", "build", made.root)
        assert (result.exit_code, "error [container_unsupported]" in result.stderr) == (1, True)
        assert problems(made.root) == []


@pytest.mark.parametrize("where", ["/etc", "../../../..", "", "a\0b", "\u202e"], ids=repr)
def test_a_path_in_a_descriptor_leads_nowhere(made: VolumeMaker, where: str) -> None:
    path = made.folder(1) / "metadata" / "1.container"
    moved = replace(parse_descriptor(path.read_bytes()), chunks_path=where, metadata_path=where)
    path.write_bytes(dump_descriptor(with_checksum(moved)))
    with unchanged(made.root):
        assert findings(made.root) == []


def volume(made: VolumeMaker) -> "Held":
    return Held(made)


class Held:
    """The containers of a volume, read-only, for a `with`."""

    def __init__(self, made: VolumeMaker) -> None:
        state = made.root.parent / "state"
        self._volume = open_volume(made.root, hold=Hold.READ_ONLY, state_folder=state, disk=Disk())

    def __enter__(self) -> ContainerStore:
        return ContainerStore(self._volume, Disk())

    def __exit__(self, *_: object) -> None:
        self._volume.close()


KEY = block_key(ONE, BLOCK)


def record(spoil: Callable[[BlockData], object]) -> bytes:
    message = BlockData.FromString(record_to_bytes(RECORD))
    spoil(message)
    return message.SerializePartialToString()


def of_chunk(name: str, value: int) -> bytes:
    return record(lambda message: setattr(message.chunks[0], name, value))


def of_sums(name: str, value: int) -> bytes:
    return record(lambda message: setattr(message.chunks[0].checksumData, name, value))


def again(offset: int) -> bytes:
    def spoil(message: BlockData) -> None:
        message.chunks.append(message.chunks[0])
        message.chunks[1].offset = offset
        message.size *= 2

    return record(spoil)


RECORDS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "unparsable"),
    ("garbage", b"\xff\xfe junk", "unparsable"),
    ("cut in half", record_to_bytes(RECORD)[:30], "unparsable"),
    ("without an ID", record(lambda m: m.ClearField("blockID")), "unparsable"),
    ("of another block", record(lambda m: setattr(m.blockID, "localID", 21)), "wrong_block"),
    ("of block -1", record(lambda m: setattr(m.blockID, "localID", -1)), "wrong_block"),
    ("of another container", record(lambda m: setattr(m.blockID, "containerID", 2)), "wrong_block"),
    ("offset 2^63", of_chunk("offset", 1 << 63), "negative_number"),
    ("offset 2^64-1", of_chunk("offset", (1 << 64) - 1), "negative_number"),
    ("length 2^63", of_chunk("len", 1 << 63), "negative_number"),
    ("length of 32 MiB and a byte", of_chunk("len", CHUNK_BYTES_MAX + 1), "chunk_too_large"),
    ("length without its windows", of_chunk("len", CHUNK_BYTES_MAX), "checksum_count"),
    ("windows of 0 bytes with CRC32", of_sums("bytesPerChecksum", 0), "window_size"),
    ("windows of 2^32-1 bytes", of_sums("bytesPerChecksum", (1 << 32) - 1), "negative_number"),
    ("windows of 1 byte", of_sums("bytesPerChecksum", 1), "checksum_count"),
    ("a checksum lost", record(lambda m: m.chunks[0].checksumData.checksums.pop()),
    "checksum_count"),
    ("a checksum of 3 bytes",
    record(lambda m: m.chunks[0].checksumData.checksums.__setitem__(0, b"abc")),
     "checksum_width"),
    ("CRC32 said to be MD5", of_sums("type", 5), "checksum_width"),
    ("a chunk twice", again(0), "chunks_unsorted"),
    ("a chunk in another", again(2999), "chunks_overlap"),
    ("a size of -1", record(lambda m: setattr(m, "size", -1)), "size_contradicts_chunks"),
    ("a size that is not its chunks'", record(lambda m: setattr(m, "size", 1)),
    "size_contradicts_chunks"),
    ("a name that is no text", record_to_bytes(RECORD).replace(b"chunk", b"\xff\xfe\xfd\xfc\xfb"),
    "not_text"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "reason"), [pytest.param(*rest, id=name) for name, *rest in RECORDS]
)
def test_a_record_that_cannot_be_is_a_finding_of_its_block(
    made: VolumeMaker, value: bytes, reason: str
) -> None:
    put(made, OzoneTable.BLOCK_DATA, KEY, value)
    with unchanged(made.root):
        assert findings(made.root) == [{"type": "INACCESSIBLE_DB", "blockID": str(BLOCK)}]
        with volume(made) as store, pytest.raises(RecordInvalidError) as caught:
            store.open(ONE).record(BLOCK)
    assert caught.value.facts["reason"] == reason


KEYS = {
    "nothing": b"",
    "text": b"twenty",
    "a sign": b"+20",
    "zeros in front": b"0020",
    "a blank": b" 20",
    "a NUL": b"20\0",
    "a path": b"../20",
    "another script": "\u0662".encode(),
    "2^63": b"9223372036854775808",
    "5000 digits": b"1" * 5000,
}


@pytest.mark.parametrize("suffix", KEYS.values(), ids=KEYS)
def test_a_record_under_a_key_that_is_no_block_is_a_finding(
    made: VolumeMaker, suffix: bytes
) -> None:
    put(made, OzoneTable.BLOCK_DATA, container_prefix(ONE) + suffix, record_to_bytes(RECORD))
    with unchanged(made.root):
        assert findings(made.root) == [{"type": "INACCESSIBLE_DB"}]
        with volume(made) as store, pytest.raises(RecordInvalidError) as caught:
            store.open(ONE).block_ids()
    assert caught.value.facts["reason"] == "key"


UNVERIFIABLE = chunk_record(DATA, checksum_type=ChecksumType.NONE)
ODD_RECORDS: dict[str, BlockRecord] = {
    "windows of 0 bytes without checksums": replace(
        RECORD, chunks=(replace(UNVERIFIABLE, bytes_per_checksum=0),)
    ),
    "checksums of type NONE": replace(RECORD, chunks=(replace(UNVERIFIABLE, checksums=(b"x",)),)),
    "a window larger than any chunk": replace(
        RECORD, chunks=(chunk_record(DATA, window=(1 << 31) - 1),)
    ),
    "no chunks": replace(RECORD, chunks=()),
    "an empty chunk": replace(RECORD, chunks=(chunk_record(b""),)),
    "a commit of 2^63-1": replace(RECORD, bcs_id=(1 << 63) - 1),
}


@pytest.mark.parametrize("odd", ODD_RECORDS.values(), ids=ODD_RECORDS)
def test_a_record_that_is_only_odd_is_no_finding(made: VolumeMaker, odd: BlockRecord) -> None:
    put(made, OzoneTable.BLOCK_DATA, KEY, record_to_bytes(odd))
    with unchanged(made.root):
        assert findings(made.root) == []


@pytest.mark.parametrize("raw", [b"", b"7", long_bytes(7) + b"\0"], ids=len)
def test_a_counter_that_is_no_number_is_an_error_with_its_name(
    made: VolumeMaker, raw: bytes
) -> None:
    put(made, OzoneTable.METADATA, counter_key(ONE, Counter.DATA_CHECKSUM), raw)
    with unchanged(made.root):
        assert findings(made.root) == []
        assert "#DATACHECKSUM" in run("tree", "check", made.root).stdout.replace("\n", "")
        with volume(made) as store, pytest.raises(DatabaseError):
            store.open(ONE).counters()


def in_database(pattern: str, spoil: Callable[[Path], object]) -> Spoil:
    def act(made: VolumeMaker) -> None:
        paths = list(made.database_path.glob(pattern))
        assert paths
        for path in paths:
            spoil(path)

    return act


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DATABASES: list[tuple[str, Spoil]] = [
    ("no CURRENT", in_database("CURRENT", Path.unlink)),
    ("an empty CURRENT", in_database("CURRENT", lambda p: p.write_bytes(b""))),
    (
        "CURRENT points nowhere",
        in_database("CURRENT", lambda p: p.write_bytes(b"MANIFEST-424242\n")),
    ),
    (
        "CURRENT points out",
        in_database("CURRENT", lambda p: p.write_bytes(b"../../../../VERSION\n")),
    ),
    (
        "CURRENT without its line's end",
        in_database("CURRENT", lambda p: p.write_bytes(p.read_bytes().strip())),
    ),
    ("CURRENT of NULs", in_database("CURRENT", lambda p: p.write_bytes(bytes(16)))),
    ("CURRENT is a folder", in_database("CURRENT", to_folder)),
    ("CURRENT is a pipe", in_database("CURRENT", to_pipe)),
    ("no MANIFEST", in_database("MANIFEST-*", Path.unlink)),
    ("an empty MANIFEST", in_database("MANIFEST-*", lambda p: p.write_bytes(b""))),
    ("half a MANIFEST", in_database("MANIFEST-*", half)),
    ("MANIFEST of garbage", in_database("MANIFEST-*", lambda p: p.write_bytes(some_bytes(4096)))),
    ("MANIFEST is a pipe", in_database("MANIFEST-*", to_pipe)),
    (
        "a table is garbage",
        in_database("*.sst", lambda p: p.write_bytes(some_bytes(p.stat().st_size))),
    ),
    ("a table is empty", in_database("*.sst", lambda p: p.write_bytes(b""))),
    ("a table is lost", in_database("*.sst", Path.unlink)),
    ("a table is a pipe", in_database("*.sst", to_pipe)),
]


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in DATABASES])
def test_a_database_that_cannot_be_read_is_a_finding(made: VolumeMaker, spoil: Spoil) -> None:
    # Opened and written once more, it has its rows in tables.
    put(made, OzoneTable.METADATA, counter_key(ONE, Counter.BLOCK_COUNT), long_bytes(1))
    spoil(made)
    with unchanged(made.root):
        assert findings(made.root) == [{"type": "INACCESSIBLE_DB"}]
        assert len(problems(made.root)) == 1
        run("tree", "check", made.root)


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in DATABASES])
def test_an_owner_leaves_a_database_that_it_cannot_open_as_it_is(
    made: VolumeMaker, spoil: Spoil
) -> None:
    """But for RocksDB's own log, which begins anew with every try."""
    put(made, OzoneTable.METADATA, counter_key(ONE, Counter.BLOCK_COUNT), long_bytes(1))
    spoil(made)

    def files() -> dict[str, object]:
        kept = (path for path in made.database_path.iterdir() if not path.name.startswith("LOG"))
        return {
            path.name: path.read_bytes() if path.is_file() else path.lstat().st_mode
            for path in kept
        }

    before = files()
    with pytest.raises(DatabaseError):
        Database.open_owner(made.database_path, Disk())
    assert files() == before


HARMLESS: list[tuple[str, Spoil]] = [
    ("OPTIONS of garbage", in_database("OPTIONS-*", lambda p: p.write_bytes(some_bytes(1000)))),
    ("no IDENTITY", in_database("IDENTITY", Path.unlink)),
    (
        "a link to itself",
        in_database("CURRENT", lambda p: (p.parent / "000099.sst").symlink_to("000099.sst")),
    ),
    (
        "junk beside it",
        in_database("CURRENT", lambda p: (p.parent / "\udcff\n").write_bytes(b"junk")),
    ),
]


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in HARMLESS])
def test_what_a_database_can_do_without_is_no_finding(made: VolumeMaker, spoil: Spoil) -> None:
    spoil(made)
    with unchanged(made.root):
        assert findings(made.root) == []


HERE = f"hdds/{CLUSTER}/current/containerDir0/1"
CHUNKS, METADATA = f"{HERE}/chunks", f"{HERE}/metadata"
FILE, TREE_FILE, DESCRIPTION = f"{CHUNKS}/20.block", f"{METADATA}/1.tree", f"{METADATA}/1.container"


def emptied(name: str) -> Spoil:
    def spoil(made: VolumeMaker) -> None:
        for path in (made.root / name).iterdir():
            path.unlink()
        (made.root / name).rmdir()

    return spoil


FILES: list[tuple[str, Spoil, list[str]]] = [
    ("the block file is a pipe", a_pipe(FILE), ["CORRUPT_CHUNK"]),
    ("the block file is a folder", a_folder(FILE), ["CORRUPT_CHUNK"]),
    ("the block file is a socket", a_socket(FILE), ["CORRUPT_CHUNK"]),
    ("the block file is a link out", a_link(FILE, "/etc/hostname"), ["CORRUPT_CHUNK"]),
    ("the block file is a link to its like", both(content(f"{CHUNKS}/x", DATA), a_link(FILE, "x")),
    ["CORRUPT_CHUNK"]),
    ("the block file is a link to itself", a_link(FILE, "20.block"), ["CORRUPT_CHUNK"]),
    ("the block file is a device", a_link(FILE, "/dev/zero"), ["CORRUPT_CHUNK"]),
    ("the block file is lost", gone(FILE), ["MISSING_DATA_FILE"]),
    ("the block file is empty", content(FILE, b""), ["MISSING_CHUNK"]),
    ("the block file is cut", content(FILE, DATA[:2048]), ["INCONSISTENT_CHUNK_LENGTH"]),
    ("chunks is a file", both(emptied(CHUNKS), content(CHUNKS, b"")), ["MISSING_CHUNKS_DIR"]),
    ("chunks is a link to itself", both(emptied(CHUNKS), a_link(CHUNKS, "chunks")),
    ["MISSING_CHUNKS_DIR"]),
    ("metadata is a file", both(emptied(METADATA), content(METADATA, b"")),
    ["MISSING_METADATA_DIR"]),
    ("the descriptor is lost", gone(DESCRIPTION), ["MISSING_CONTAINER_FILE"]),
    ("the descriptor is a pipe", a_pipe(DESCRIPTION), ["CORRUPT_CONTAINER_FILE"]),
    ("the descriptor is a folder", a_folder(DESCRIPTION), ["CORRUPT_CONTAINER_FILE"]),
    ("the descriptor is a link out", a_link(DESCRIPTION, "/etc/hostname"),
    ["CORRUPT_CONTAINER_FILE"]),
    ("the tree is a pipe", a_pipe(TREE_FILE), []),
    ("the tree is a folder", a_folder(TREE_FILE), []),
    ("the tree is a link to itself", a_link(TREE_FILE, "1.tree"), []),
    ("the tree is garbage", content(TREE_FILE, b"\xff" * 1000), []),
    ("a block file of no block", content(f"{CHUNKS}/9223372036854775808.block", b"x"), []),
    ("a name that is no text", content(f"{CHUNKS}/\udcff\x1b[2J.block", b"x"), []),
    ("a container of -1", a_folder(f"{HERE}/../-1"), []),
    ("a container of 2^63", a_folder(f"{HERE}/../9223372036854775808"), []),
    ("a container of a name", a_folder(f"{HERE}/../..."), []),
    ("a container that is a link", a_link(f"{HERE}/../2", "1"), []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "kinds"), [pytest.param(*rest, id=name) for name, *rest in FILES]
)
def test_what_lies_in_the_place_of_a_file_is_named_and_not_followed(
    made: VolumeMaker, spoil: Spoil, kinds: list[str]
) -> None:
    spoil(made)
    with unchanged(made.root):
        assert [finding["type"] for finding in findings(made.root)] == kinds
        for words in (("tree", "check"), ("tree", "show"), ("doctor", "--volume")):
            run(*words, made.root)


def test_a_folder_of_a_container_that_nobody_wrote_is_a_finding(made: VolumeMaker) -> None:
    container_id = (1 << 63) - 1
    made.folder(container_id).mkdir(parents=True)
    with unchanged(made.root):
        result = run("tree", "build", made.root, "--container", container_id, "--json")
    assert json.loads(result.stdout)["findings"] == [{"type": "MISSING_METADATA_DIR"}]


def test_a_folder_named_0_is_no_container_for_there_is_none_of_that_number(
    made: VolumeMaker,
) -> None:
    made.folder(0).mkdir(parents=True)
    with unchanged(made.root):
        refused("container_not_found", 1, "tree", "build", made.root, "--container", 0)
        assert json.loads(run("tree", "build", made.root, "--json").stdout)["containerID"] != 0


@pytest.mark.parametrize(
    "name", [DESCRIPTION, VERSION, TREE_FILE], ids=lambda name: Path(name).name
)
def test_a_file_that_claims_to_be_huge_is_not_read(made: VolumeMaker, name: str) -> None:
    path = made.root / name
    path.touch()
    os.truncate(path, WHOLE_BYTES_MAX + 1)
    if name == VERSION:
        refused("volume_invalid", 1, "tree", "build", made.root)
    else:
        assert [finding["type"] for finding in findings(made.root)] == (
            ["CORRUPT_CONTAINER_FILE"] if name == DESCRIPTION else []
        )
    assert path.stat().st_size == WHOLE_BYTES_MAX + 1
