"""`treefold tree`: what it prints, how it ends, and that it never changes or breaks
anything.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.cli import Root, treefold
from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.replica import ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from ozone.errors import ReadOnlyError
from ozone.rocks import Batch, Counter, Database, OzoneTable, block_key, counter_key, long_bytes
from runtime.disk import Disk
from runtime.output import size_text
from runtime.progress import BYTES, ProgressStyle, progress_sink
from tests.support.handmade import VolumeMaker, chunk_record, some_bytes
from tests.support.volumes import ERASURE_CODED, OZONE, container_folder, flip, state_of, unpack

NONE = ChecksumType.NONE
JsonObject = dict[str, object]


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(treefold, ["tree", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    return result


def lines(*arguments: object, status: int = 0) -> list[JsonObject]:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def whole(length: int, offset: int = 0, seed: int = 0, **kind: object) -> tuple[object, bytes]:
    data = some_bytes(length, offset + seed)
    return chunk_record(data, offset, **kind), data


def make(root: Path, fill: Callable[[VolumeMaker], object] = lambda _: None) -> VolumeMaker:
    """A volume with container 1, which has block 20 of two chunks."""
    with VolumeMaker(root) as made:
        made.container()
        made.block(1, 20, whole(3000), whole(3000, 3000))
        fill(made)
    return made


def tree_path(made: VolumeMaker, container_id: int = 1) -> Path:
    return made.folder(container_id) / "metadata" / f"{container_id}.tree"


@pytest.fixture
def made(tmp_path: Path) -> VolumeMaker:
    return make(tmp_path / "volume")


def test_build_prints_one_bare_object_a_container_with_exactly_these_keys(
    made: VolumeMaker,
) -> None:
    flip(made.block_file(1, 20), 3500)

    (line,) = lines("build", made.root, status=3)

    assert list(line) == [
        "containerID",
        "state",
        "dataChecksum",
        "source",
        "blocks",
        "deletedBlocks",
        "findings",
        "notes",
    ]
    assert line | {"dataChecksum": ""} == {
        "containerID": 1,
        "state": "CLOSED",
        "dataChecksum": "",
        "source": "data",
        "blocks": 1,
        "deletedBlocks": 0,
        "findings": [{"type": "CORRUPT_CHUNK", "blockID": "20", "offset": 3000}],
        "notes": ["there is no stored tree"],
    }


def test_build_gives_the_roots_and_findings_of_real_volumes(tmp_path: Path) -> None:
    unpack("damaged", tmp_path)
    expected = {
        (row["datanode"], row["containerID"]): row
        for row in json.loads((OZONE / "expected.json").read_text())["damaged"]
    }
    for datanode in ("dn1", "dn2", "dn3"):
        for source, root in (("data", "rootFromData"), ("metadata", "rootFromMetadata")):
            built = lines(
                "build",
                tmp_path / datanode / "volume1",
                "--source",
                source,
                status=3 if source == "data" else 0,
            )
            for line in built:
                row = expected[datanode, line["containerID"]]
                assert (line["dataChecksum"], line["source"]) == (row[root], source)
                assert (line["state"], line["deletedBlocks"]) == (
                    row["state"],
                    row["deletedBlocks"],
                )
                if source == "data":
                    assert len(line["findings"]) == len(row["damagedChunks"])
                else:
                    assert line["findings"] == []
            assert [line["containerID"] for line in built] == [1, 2, 3, 4, 5, 6]


def test_build_says_the_same_of_mapped_files_and_refuses_to_map_what_it_does_not_read(
    tmp_path: Path,
) -> None:
    unpack("damaged", tmp_path)
    volumes = [tmp_path / name / "volume1" for name in ("dn1", "dn2", "dn3")]

    assert lines("build", *volumes, "--mapped", status=3) == lines("build", *volumes, status=3)
    assert run("build", volumes[0], "--mapped", "--source", "metadata").exit_code == 2


def test_build_takes_the_folder_of_one_container(tmp_path: Path) -> None:
    unpack("healthy", tmp_path, fixture=ERASURE_CODED)
    folder = container_folder(tmp_path / "dn1" / "volume1", 2)

    (line,) = lines("build", folder)

    assert (line["containerID"], line["dataChecksum"]) == (2, "606f2c2")


def test_a_root_is_hex_without_padding_and_an_empty_tree_is_zero(tmp_path: Path) -> None:
    with VolumeMaker(tmp_path / "volume") as made:
        made.container()

    assert lines("build", made.root)[0]["dataChecksum"] == "0"


def test_only_the_containers_asked_for_are_built(tmp_path: Path) -> None:
    made = make(tmp_path / "volume", lambda made: [made.container(i) for i in (7, 8, 9)])

    built = lines("build", made.root, "--container", 9, "--container", 7)

    assert [line["containerID"] for line in built] == [7, 9]


def test_tombstones_of_the_stored_tree_are_laid_over_what_is_built(made: VolumeMaker) -> None:
    tombstone = BlockTree.tombstone(BlockId(19), 5)
    tree_path(made).write_bytes(encode_tree(ContainerTree.of(ContainerId(1), [tombstone])))

    for source in ("data", "metadata"):
        (line,) = lines("build", made.root, "--source", source)
        assert (line["blocks"], line["deletedBlocks"], line["notes"]) == (1, 1, [])


@pytest.mark.parametrize(
    ("stored", "note"),
    [
        (b"", "empty"),
        (b"\x01\x02\x03", "unparsable"),
        (
            encode_tree(ContainerTree.of(ContainerId(2), [BlockTree.tombstone(BlockId(1), 1)])),
            "wrong_container",
        ),
    ],
)
def test_a_stored_tree_that_cannot_be_read_is_noted_and_counts_as_absent(
    made: VolumeMaker, stored: bytes, note: str
) -> None:
    (without,) = lines("build", made.root)
    tree_path(made).write_bytes(stored)

    (line,) = lines("build", made.root)

    assert line | {"notes": without["notes"]} == without
    assert note in str(line["notes"])


def test_a_stored_tree_that_is_a_folder_is_noted(made: VolumeMaker) -> None:
    tree_path(made).mkdir()

    assert "unreadable" in str(lines("build", made.root)[0]["notes"])


def test_orphans_chunks_without_checksums_and_open_containers_are_notes(tmp_path: Path) -> None:
    def fill(made: VolumeMaker) -> None:
        made.container(2, state=ReplicaState.OPEN)
        made.block(2, 21, whole(10, checksum_type=NONE))
        (made.folder(2) / "chunks" / os.fsdecode(b"99\xff\x1b[2J.block")).write_bytes(b"")

    made = make(tmp_path / "volume", fill)

    notes = str(lines("build", made.root)[1]["notes"])

    assert "NONE" in notes
    assert "orphan" in notes
    assert "OPEN" in notes
    # A name may hold anything: it must not reach a terminal as it is.
    assert "\x1b" not in run("build", made.root).stdout


@pytest.mark.parametrize("source", ["data", "metadata"])
def test_an_unreadable_descriptor_still_gives_a_line(made: VolumeMaker, source: str) -> None:
    (made.folder(1) / "metadata" / "1.container").write_bytes(b"junk")

    (line,) = lines("build", made.root, "--source", source, status=3)

    assert (line["state"], line["findings"]) == ("UNKNOWN", [{"type": "CORRUPT_CONTAINER_FILE"}])
    # Records lie in the database, and are believed without the folder.
    assert line["blocks"] == (1 if source == "metadata" else 0)


def test_a_container_whose_folder_is_lost_still_gives_a_line(made: VolumeMaker) -> None:
    shutil.rmtree(made.folder(1))

    (line,) = lines("build", made.root, status=3)

    assert (line["containerID"], line["findings"]) == (1, [{"type": "MISSING_CONTAINER_DIR"}])


def test_one_container_that_is_not_supported_does_not_cost_the_others(tmp_path: Path) -> None:
    made = make(tmp_path / "volume", lambda made: made.container(2, schema_version="2"))

    result = run("build", made.root, "--json")

    assert result.exit_code == 1
    assert [json.loads(line)["containerID"] for line in result.stdout.splitlines()] == [1]
    assert "error [container_unsupported]" in result.stderr


def test_people_get_a_table_and_a_list_of_findings(made: VolumeMaker) -> None:
    flip(made.block_file(1, 20), 3500)

    result = run("build", made.root)

    assert result.exit_code == 3
    assert "CONTAINER" in result.stdout
    assert "CORRUPT_CHUNK block 20 offset 3000: 1 of 3 windows differ" in result.stdout


@pytest.fixture
def replicas(tmp_path: Path) -> list[VolumeMaker]:
    return [make(tmp_path / f"dn{number}") for number in (1, 2, 3)]


def roots(replicas: list[VolumeMaker]) -> list[str]:
    return [str(made.root) for made in replicas]


def test_equal_replicas_match(replicas: list[VolumeMaker]) -> None:
    assert lines("diff", *roots(replicas)) == [
        {"containerID": 1, "verdict": "MATCH", "differences": []}
    ]


def test_diff_names_who_lacks_and_who_has_by_the_paths_given(replicas: list[VolumeMaker]) -> None:
    one, two, three = roots(replicas)
    flip(replicas[0].block_file(1, 20), 10)
    os.truncate(replicas[1].block_file(1, 20), 3000)

    assert lines("diff", one, two, three, status=3) == [
        {
            "containerID": 1,
            "verdict": "REPAIRABLE",
            "differences": [
                {
                    "kind": "corrupt_chunk",
                    "blockID": "20",
                    "offset": 0,
                    "lacking": [one],
                    "sources": [two, three],
                },
                {
                    "kind": "missing_chunk",
                    "blockID": "20",
                    "offset": 3000,
                    "lacking": [two],
                    "sources": [one, three],
                },
            ],
        }
    ]


def test_diff_says_what_only_the_bad_windows_of_all_can_decide(replicas: list[VolumeMaker]) -> None:
    for number, made in enumerate(replicas):
        flip(made.block_file(1, 20), 1024 * number)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "REPAIRABLE"

    for number, made in enumerate(replicas):
        flip(made.block_file(1, 20), 1024 * number)
        flip(made.block_file(1, 20), 2100 + number)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"


def _lose_record(made: VolumeMaker) -> None:
    database = Database.open_owner(made.database_path, Disk())
    batch = Batch()
    batch.delete(OzoneTable.BLOCK_DATA, block_key(ContainerId(1), BlockId(20)))
    database.write(batch)
    database.close()


def test_diff_looks_for_good_windows_in_a_file_whose_record_is_lost_as_a_repair_does(
    replicas: list[VolumeMaker],
) -> None:
    one, two, three = replicas
    flip(one.block_file(1, 20), 10)
    flip(two.block_file(1, 20), 20)
    _lose_record(three)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "REPAIRABLE"
    # Neither tree nor records can tell: a presumption.
    flip(three.block_file(1, 20), 30)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"
    flip(three.block_file(1, 20), 30)
    os.truncate(three.block_file(1, 20), 1023)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"
    os.truncate(three.block_file(1, 20), 0)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"
    three.block_file(1, 20).unlink()
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"


def test_diff_looks_for_what_is_in_no_tree_in_files_whose_record_is_lost(
    replicas: list[VolumeMaker],
) -> None:
    """The record on one replica, the bytes on another: each tree lacks the block."""
    one, two, three = replicas
    one.block_file(1, 20).unlink()
    _lose_record(two)
    _lose_record(three)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "REPAIRABLE"
    flip(two.block_file(1, 20), 10)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "REPAIRABLE"
    flip(three.block_file(1, 20), 10)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"
    two.block_file(1, 20).unlink()
    three.block_file(1, 20).unlink()
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"


@pytest.mark.parametrize("left", [None, 0, 3000])
def test_diff_calls_lost_what_is_recorded_everywhere_and_held_nowhere(
    replicas: list[VolumeMaker], left: int | None
) -> None:
    """Of what nobody has a byte there is nothing in any tree, so that trees match."""
    for made in replicas:
        if left is None:
            made.block_file(1, 20).unlink()
        else:
            os.truncate(made.block_file(1, 20), left)
    assert lines("diff", *roots(replicas), status=3)[0]["verdict"] == "UNRECOVERABLE"
    result = run("diff", *roots(replicas))
    where = {None: "block 20", 0: "block 20 offset 0", 3000: "block 20 offset 3000"}[left]
    assert f"note: no replica has all bytes of a recorded chunk: {where}" in result.output


def test_bytes_behind_the_last_recorded_chunk_are_a_note_and_no_difference(
    replicas: list[VolumeMaker],
) -> None:
    with replicas[0].block_file(1, 20).open("ab") as file:
        file.write(bytes(5))
    assert "block 20 has 5 bytes after its last recorded chunk" in str(
        lines("build", replicas[0].root)[0]["notes"]
    )
    assert lines("diff", *roots(replicas))[0]["verdict"] == "MATCH"


def test_damage_that_only_reading_finds_is_no_difference_of_records_and_stored_trees(
    replicas: list[VolumeMaker],
) -> None:
    flip(replicas[0].block_file(1, 20), 10)

    assert lines("diff", *roots(replicas), "--source", "metadata")[0]["verdict"] == "MATCH"
    # No tree was ever stored.
    assert lines("diff", *roots(replicas), "--source", "tree")[0]["verdict"] == "UNKNOWN"


def test_folders_of_a_container_are_compared_alone(
    replicas: list[VolumeMaker], tmp_path: Path
) -> None:
    flip(replicas[0].block_file(1, 20), 10)
    more = make(tmp_path / "more", lambda made: made.container(2))

    compared = lines("diff", replicas[0].folder(1), more.root, status=3)

    assert [line["containerID"] for line in compared] == [1]
    assert str(replicas[0].folder(1)) in str(compared[0]["differences"])


def test_a_container_held_once_and_erasure_coded_ones_are_unknown(tmp_path: Path) -> None:
    def fill(index: int) -> Callable[[VolumeMaker], object]:
        return lambda made: (
            made.container(3, replica_index=index),
            made.block(3, 30, whole(100, seed=index)),
            made.container(4) if index == 1 else None,
        )

    one, two = (make(tmp_path / f"dn{index}", fill(index)) for index in (1, 2))

    assert lines("diff", one.root, two.root)[1:] == [
        {"containerID": 3, "verdict": "UNKNOWN", "differences": []},
        {"containerID": 4, "verdict": "UNKNOWN", "differences": []},
    ]


def _break_descriptor(made: VolumeMaker) -> None:
    (made.folder(1) / "metadata" / "1.container").write_bytes(b"junk")


def _break_database(made: VolumeMaker) -> None:
    (made.database_path / "CURRENT").write_text("x")


def _break_tree(made: VolumeMaker) -> None:
    tree_path(made).write_bytes(b"junk")


@pytest.mark.parametrize(
    ("damage", "source", "code", "reason"),
    [
        (_break_descriptor, "data", "descriptor_invalid", "the descriptor "),
        (_break_descriptor, "metadata", "descriptor_invalid", "the descriptor "),
        (_break_descriptor, "tree", "descriptor_invalid", "the descriptor "),
        (_break_database, "data", "database_failed", "cannot open a shadow of the database"),
        (_break_database, "metadata", "database_failed", "cannot open a shadow of the database"),
        (_break_tree, "tree", "tree_refused", "the stored tree is unreadable"),
    ],
)
def test_a_replica_that_cannot_be_read_is_named_and_nothing_is_compared(
    replicas: list[VolumeMaker],
    damage: Callable[[VolumeMaker], None],
    source: str,
    code: str,
    reason: str,
) -> None:
    """It may hold the only good copy: as an empty one it would lack all that the others
    have.
    """
    flip(replicas[0].block_file(1, 20), 10)
    damage(replicas[2])
    path = str(replicas[2].root)

    (line,) = lines("diff", *roots(replicas), "--source", source, status=1)
    result = run("diff", *roots(replicas), "--source", source)

    unread = line.pop("unread")
    assert isinstance(unread, list)
    assert [one["replica"] for one in unread] == [path]
    assert unread[0]["reason"].startswith(reason)
    assert line == {"containerID": 1, "verdict": "UNKNOWN", "differences": []}
    assert f"error [{code}]: {path}, container 1: {reason}" in result.stderr
    # The fault is listed once: stdout only says which replica it is that is left out.
    assert f"container 1: not compared: {path} cannot be read\n" in result.stdout
    assert result.output.count(reason) == 1


def test_a_replica_that_cannot_be_read_costs_its_container_alone(tmp_path: Path) -> None:
    one, two = (make(tmp_path / f"dn{number}", lambda made: made.container(2)) for number in (1, 2))
    _break_descriptor(one)

    compared = lines("diff", one.root, two.root, status=1)

    assert [(line["containerID"], "unread" in line) for line in compared] == [(1, True), (2, False)]


def test_a_lost_container_lacks_everything(replicas: list[VolumeMaker]) -> None:
    shutil.rmtree(replicas[2].folder(1))

    (line,) = lines("diff", *roots(replicas), status=3)

    assert line["verdict"] == "REPAIRABLE"
    assert [d["lacking"] for d in line["differences"]] == [[str(replicas[2].root)]]


def test_diff_of_real_damage_finds_what_was_done(tmp_path: Path) -> None:
    unpack("damaged", tmp_path)

    compared = lines(
        "diff", *(tmp_path / f"dn{number}" / "volume1" for number in (1, 2, 3)), status=3
    )

    verdicts = ["REPAIRABLE"] * 4 + ["UNKNOWN", "REPAIRABLE"]
    assert [line["verdict"] for line in compared] == verdicts
    kinds = [[d["kind"] for d in line["differences"]] for line in compared]
    assert kinds[0] == ["missing_block", "corrupt_chunk", "corrupt_chunk"]
    assert kinds[3] == ["missing_block"]
    assert kinds[5].count("deleted_block") == 4


def test_diff_of_real_healthy_volumes_matches(tmp_path: Path) -> None:
    unpack("healthy", tmp_path)
    paths = [tmp_path / f"dn{number}" / "volume1" for number in (1, 2, 3)]

    for source in ("data", "metadata", "tree"):
        compared = lines("diff", *paths, "--source", source)
        assert [line["verdict"] for line in compared] == ["MATCH"] * 4 + ["UNKNOWN", "MATCH"]


def test_show_decodes_a_tree_file(tmp_path: Path) -> None:
    tree = ContainerTree.of(
        ContainerId(7),
        [
            BlockTree.live(
                BlockId(1),
                [ChunkTree(0, 10, 0xABC), ChunkTree(10, 5, 0xDEF, checksum_matches=False)],
            ),
            BlockTree.tombstone(BlockId(2), -1),
        ],
    )
    for name in ("7.tree", "saved"):
        (tmp_path / name).write_bytes(encode_tree(tree))

        (line,) = lines("show", tmp_path / name)

        assert line["containerID"] == 7
        assert line["blocks"][0]["chunks"][1] == {
            "offset": 10,
            "length": 5,
            "dataChecksum": "def",
            "checksumMatches": False,
        }
        assert line["blocks"][1] == {
            "blockID": "2",
            "dataChecksum": "ffffffffffffffff",
            "deleted": True,
            "chunks": [],
        }
        assert "corrupt" in run("show", tmp_path / name).stdout


def test_check_finds_stored_trees_of_real_volumes_right_and_a_lost_one_missing(
    tmp_path: Path,
) -> None:
    unpack("damaged", tmp_path)

    checked = lines(
        "check", *(tmp_path / f"dn{number}" / "volume1" for number in (1, 2, 3)), status=3
    )

    assert [line["reasons"] for line in checked] == [[]] * 11 + [["missing"]] + [[]] * 6
    assert lines("check", checked[0]["path"])[0]["dataChecksum"] == "2358d1bb"


@pytest.mark.parametrize(
    ("reason", "stored"),
    [
        ("unparsable", b"\x01"),
        ("empty", b""),
        ("wrong_container", b"\x08\x02"),
        ("root_checksum", encode_tree(ContainerTree(ContainerId(1), 5))),
        (
            "block_checksum",
            encode_tree(ContainerTree.of(ContainerId(1), [BlockTree(BlockId(1), 1)])),
        ),
        ("root_differs_from_database", encode_tree(ContainerTree.of(ContainerId(1), []))),
    ],
)
def test_check_names_what_is_wrong_with_a_stored_tree(
    tmp_path: Path, reason: str, stored: bytes
) -> None:
    made = make(
        tmp_path / "volume",
        lambda made: made.put(
            OzoneTable.METADATA,
            counter_key(ContainerId(1), Counter.DATA_CHECKSUM),
            long_bytes(0xABCDEF),
        ),
    )
    tree_path(made).write_bytes(stored)

    (line,) = lines("check", made.root, status=3)

    assert line["reasons"] == [reason]
    assert reason in run("check", made.root).stdout


def test_a_file_that_names_no_container_is_not_called_none(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0:root:/root:/bin/sh\n")

    result = run("check", path)

    assert (result.exit_code, "None" in result.stdout) == (3, False)
    assert "unknown" in result.stdout
    assert lines("check", path, status=3)[0]["containerID"] is None


def test_check_says_what_it_checked_and_that_it_read_no_data(tmp_path: Path) -> None:
    unpack("healthy", tmp_path)
    volume = tmp_path / "dn1" / "volume1"
    for block in volume.glob("hdds/*/current/*/1/chunks/*.block"):
        flip(block, 0)

    result = run("check", volume, "--container", 1)

    assert (result.exit_code, "well formed; data not read" in result.stdout) == (0, True)
    assert "right" not in result.stdout
    assert lines("check", volume, "--container", 1)[0]["dataRead"] is False


def test_a_tree_that_was_never_built_is_no_fault(made: VolumeMaker) -> None:
    assert lines("check", made.root)[0]["reasons"] == []
    assert "no tree; data not read" in run("check", made.root).stdout


def no_volume(tmp_path: Path, kind: str) -> Path:
    made = make(tmp_path / "volume")
    version = made.root / "hdds" / "VERSION"
    match kind:
        case "nothing":
            return tmp_path / "nothing"
        case "name too long":
            return tmp_path / ("a" * 300)
        case "file":
            return version
        case "empty folder":
            (tmp_path / "empty").mkdir()
            return tmp_path / "empty"
        case "loop":
            (tmp_path / "loop").symlink_to(tmp_path / "loop")
            return tmp_path / "loop"
        case "no VERSION":
            version.unlink()
        case "VERSION of garbage":
            version.write_bytes(b"\xff\x00" * 100)
        case "VERSION of another layout":
            version.write_text(version.read_text().replace("layOutVersion=1", "layOutVersion=2"))
        case "VERSION leads out":
            version.write_text(version.read_text().replace("clusterID=", "clusterID=../"))
        case "no working folder":
            shutil.rmtree(made.working)
        case "container without volume":
            return Path(shutil.copytree(made.folder(1), tmp_path / "1"))
    return made.root


@pytest.mark.parametrize("command", ["build", "diff", "show", "check"])
@pytest.mark.parametrize(
    "kind",
    [
        "nothing",
        "name too long",
        "empty folder",
        "loop",
        "no VERSION",
        "VERSION of garbage",
        "VERSION of another layout",
        "VERSION leads out",
        "no working folder",
        "container without volume",
    ],
)
def test_what_is_no_volume_is_refused_by_name_and_left_alone(
    tmp_path: Path, command: str, kind: str
) -> None:
    path = no_volume(tmp_path, kind)
    before = state_of(tmp_path)
    other = make(tmp_path / "other").root if command == "diff" else None

    result = run(command, path, *([other] if other else []))

    assert result.exit_code == 1
    assert result.stderr.startswith("error [volume_invalid]: ")
    assert result.stdout == ""
    if other:
        shutil.rmtree(other)
    assert state_of(tmp_path) == before


def test_a_file_is_no_volume(tmp_path: Path) -> None:
    assert "error [volume_invalid]" in run("build", no_volume(tmp_path, "file")).stderr


@pytest.mark.parametrize("damage", ["missing", "garbage", "current", "manifest", "table"])
def test_a_broken_database_is_a_finding_and_nothing_is_changed(
    made: VolumeMaker, damage: str
) -> None:
    match damage:
        case "missing":
            shutil.rmtree(made.database_path)
        case "garbage":
            for path in made.database_path.iterdir():
                path.write_bytes(b"garbage")
        case "current":
            (made.database_path / "CURRENT").write_text("MANIFEST-999999\n")
        case "manifest":
            for path in made.database_path.glob("MANIFEST-*"):
                path.write_bytes(b"")
        case _:
            for path in (*made.database_path.glob("*.log"), *made.database_path.glob("*.sst")):
                path.write_bytes(b"\xff" * 1000)
    before = state_of(made.root)

    result = run("build", made.root, "--json")

    assert result.exit_code in (0, 3)
    (line,) = map(json.loads, result.stdout.splitlines())
    assert line["findings"] == [{"type": "INACCESSIBLE_DB"}] or damage == "table"
    assert state_of(made.root) == before
    assert run("check", made.root).exit_code == 0


def test_a_broken_record_is_a_finding_of_its_block(tmp_path: Path) -> None:
    made = make(
        tmp_path / "volume",
        lambda made: made.put(
            OzoneTable.BLOCK_DATA, block_key(ContainerId(1), BlockId(19)), b"junk"
        ),
    )

    (line,) = lines("build", made.root, status=3)

    assert (line["blocks"], line["findings"]) == (1, [{"type": "INACCESSIBLE_DB", "blockID": "19"}])


def test_a_container_that_is_not_there_is_named(made: VolumeMaker) -> None:
    result = run("build", made.root, "--container", 99)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error [container_not_found]: there is no container 99")


@pytest.mark.parametrize(
    "arguments",
    [
        ["build"],
        ["build", "--source", "guess", "x"],
        ["build", "--container", "one", "x"],
        ["build", "--container", "-1", "x"],
        ["diff", "x"],
        ["diff", "x", "x"],
        ["rebuild", "x"],
        ["show", "--chunks", "x"],
    ],
)
def test_wrong_arguments_are_a_usage_error(arguments: list[str]) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert "rror" in result.stderr


@pytest.mark.parametrize("content", [b"", b"\x01", b"\x08\x05\x12\xff"])
def test_a_file_that_is_no_tree_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "5.tree"
    path.write_bytes(content)

    shown, checked = run("show", path), run("check", path)

    assert checked.exit_code == 3
    if content:
        assert shown.exit_code == 1
        assert "error [tree_refused]" in shown.stderr


def test_reading_changes_nothing_under_the_volumes(replicas: list[VolumeMaker]) -> None:
    flip(replicas[0].block_file(1, 20), 10)
    before = [state_of(made.root) for made in replicas]

    for command in ("build", "show", "check", "diff"):
        run(command, *roots(replicas))

    assert [state_of(made.root) for made in replicas] == before


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from admin.cli import treefold\ntreefold.main(['--help'],"
        " standalone_mode=False)\nheavy = {'rocksdict', 'numpy', 'numba', 'grpc',"
        " 'google.protobuf', 'rich', 'pydantic'}\nsys.exit(', '.join(heavy &"
        " set(sys.modules)) or 0)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert "tree" in result.stdout


def test_an_interrupted_command_ends_with_130() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    result = CliRunner().invoke(
        Root("treefold", callback=interrupted, invoke_without_command=True), []
    )

    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_an_error_ends_with_its_code_its_hint_and_its_exit_status() -> None:
    def refused() -> None:
        raise ReadOnlyError("the volume is held read-only", hint="Hold it as owner.")

    result = CliRunner().invoke(Root("treefold", callback=refused, invoke_without_command=True), [])

    assert result.stderr == "error [read_only]: the volume is held read-only\n  Hold it as owner.\n"
    assert (result.exit_code, result.stdout) == (6, "")


def test_without_a_terminal_progress_is_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Operator rule R18."""
    now = 0.0

    with progress_sink(ProgressStyle(bars=False), clock=lambda: now) as sink:
        sink.begin("reading", 100 << 20, BYTES)
        for _ in range(100):
            now += 0.5
            sink.advance(1 << 20)
        sink.begin("importing", None, "trees")
        for _ in range(9):
            now += 5.0
            sink.advance(1_000)

    told = capsys.readouterr().err.splitlines()
    assert len(told) == 5 + 4
    assert told[0] == "reading  20.0 MiB of 100.0 MiB  2.0 MiB/s  ETA 40s"
    assert told[4] == "reading  100.0 MiB of 100.0 MiB  2.0 MiB/s  finishing"
    assert told[5] == "importing  2,000 trees  200/s"


def test_sizes_are_for_people() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
    ]
