"""`treefold demo` on damage that it was not made for: real processes, real volumes, an
independent look at the end.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from admin.demo.damage import DamageMethod, inflict
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.containers import ContainerStore
from ozone.descriptor import dump_descriptor, parse_descriptor, with_checksum
from ozone.rocks import Batch, OzoneTable, block_key
from ozone.scan import FindingType, scan
from ozone.volume import Hold, open_volume
from protos.convert import record_to_bytes
from runtime.disk import Disk
from tests.support.oracle import Seen, faults, look
from tests.support.processes import ROOT
from tests.support.volumes import ERASURE_CODED, container_folder, copy_volume, owned, unpack

NAMES = ("dn1", "dn2", "dn3")
WINDOW = 16 << 10
# Container 1 ends with a block of two chunks; container 5 has no checksums; container 6
# has blocks of several chunks.
UNVERIFIABLE = 5
WITHIN_S = 60
UNCOMMITTED = b"a write that no commit followed"
LAYOUT = re.compile(
    r"dn\d+(/volume1(/hdds(/VERSION|/CID-[^/]*(/DS-[^/]*(/container\.db(/(\d+\.(sst|log)|IDENTITY|CURRENT|LOCK"
    r"|MANIFEST-\d+|OPTIONS-\d+))?)?|/tmp(/disk-check|/deleted-containers)?"
    r"|/current(/containerDir\d+(/\d+(/metadata(/\d+\.(tree|container))?|/chunks(/\d+\.block)?)?)?)?)?)?)?)?"
)

Roots = Mapping[str, Path]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("healthy", tmp_path_factory.mktemp("healthy"))


def _demo(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(treefold, ["demo", "--json", "--check", *words])
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)["data"]
    assert answer["elapsed_s"] < WITHIN_S
    return done.exit_code, answer


def _copies(healthy: Path, folder: Path) -> dict[str, Path]:
    return {name: copy_volume(healthy, name, folder / name / "volume1") for name in NAMES}


def _look(roots: Roots, scratch: Path) -> dict[int, dict[str, Seen]]:
    found: dict[int, dict[str, Seen]] = {}
    with ExitStack() as stack:
        for name, root in roots.items():
            volume = open_volume(
                root, hold=Hold.READ_ONLY, state_folder=scratch / name, disk=Disk()
            )
            store = ContainerStore(stack.enter_context(volume), Disk())
            for container_id in store.ids():
                found.setdefault(container_id, {})[name] = look(store, container_id)
    return found


def _file(root: Path, container_id: int, which: int) -> Path:
    return sorted((container_folder(root, container_id) / "chunks").glob("*.block"))[which]


def _flip(root: Path, container_id: int, which: int, offset: int) -> None:
    with _file(root, container_id, which).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def _truncate(root: Path, container_id: int, which: int, length: int) -> None:
    os.truncate(_file(root, container_id, which), length)


def _verdicts(roots: Roots) -> dict[int, str]:
    """What `treefold tree diff` says can be done."""
    done = CliRunner().invoke(treefold, ["tree", "diff", "--json", *map(str, roots.values())])
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {one["containerID"]: one["verdict"] for one in found}


def _lose_record(root: Path, container_id: int, which: int) -> None:
    block_id = BlockId(int(_file(root, container_id, which).stem))
    with owned(root, root.parents[1] / "damage" / root.parent.name) as held:
        batch = Batch()
        batch.delete(OzoneTable.BLOCK_DATA, block_key(ContainerId(container_id), block_id))
        held.volume.database.write(batch)


def _contradict(root: Path, container_id: int, which: int) -> None:
    """Another record than the other replicas', of bytes that do not match it either."""
    block_id = BlockId(int(_file(root, container_id, which).stem))
    with owned(root, root.parents[1] / "damage" / root.parent.name) as held:
        record = held.store.get(ContainerId(container_id)).record(block_id)
        assert record is not None
        first = replace(record.chunks[0], checksums=(b"none", *record.chunks[0].checksums[1:]))
        batch = Batch()
        changed = record_to_bytes(replace(record, chunks=(first, *record.chunks[1:])))
        batch.put(OzoneTable.BLOCK_DATA, block_key(ContainerId(container_id), block_id), changed)
        held.volume.database.write(batch)


def _state(root: Path, container_id: int, state: ReplicaState) -> None:
    path = container_folder(root, container_id) / "metadata" / f"{container_id}.container"
    path.write_bytes(
        dump_descriptor(with_checksum(replace(parse_descriptor(path.read_bytes()), state=state)))
    )


def _tree(root: Path, container_id: int) -> Path:
    return container_folder(root, container_id) / "metadata" / f"{container_id}.tree"


def _windows(roots: Roots) -> None:
    """Flips in different windows of one chunk, in the same one, and cut short files,
    over all replicas.
    """
    for number, name in enumerate(NAMES):
        _flip(roots[name], 1, -1, 3 * number * WINDOW)
        _truncate(roots[name], 6, number, (0, 65536, 70_001)[number])
        _flip(roots[name], 3, -1, (number + 4) * WINDOW)
        _state(roots[name], 2, ReplicaState.UNHEALTHY)
        _state(roots[name], 4, ReplicaState.QUASI_CLOSED)
    _flip(roots["dn1"], 1, -1, 100 * WINDOW)
    _flip(roots["dn2"], 1, -1, 100 * WINDOW + 1)
    _truncate(roots["dn2"], 1, -1, 4 << 20)
    _file(roots["dn1"], 2, 0).unlink()
    _file(roots["dn3"], 2, 0).unlink()
    _flip(roots["dn3"], 4, -1, 1)
    with _file(roots["dn2"], 4, 0).open("ab") as file:
        file.write(UNCOMMITTED)


def _metadata(roots: Roots) -> None:
    """Lost records, trees and folders; files that outlived their records are the only
    good copies.

    One is of a block whose record is left only where its file is not.
    """
    for name in ("dn2", "dn3"):
        _lose_record(roots[name], 6, 4)
    for name in ("dn1", "dn3"):
        _file(roots[name], 6, 4).unlink()
    _lose_record(roots["dn1"], 1, -1)
    _flip(roots["dn2"], 1, -1, WINDOW)
    _flip(roots["dn3"], 1, -1, WINDOW)
    _lose_record(roots["dn1"], 6, 2)
    _lose_record(roots["dn2"], 6, 2)
    _file(roots["dn2"], 6, 2).unlink()
    _tree(roots["dn1"], 6).unlink()
    _tree(roots["dn3"], 6).write_bytes(b"")
    _tree(roots["dn1"], 2).write_bytes(_tree(roots["dn1"], 3).read_bytes())
    _tree(roots["dn2"], 4).write_bytes(b"no tree")
    shutil.rmtree(container_folder(roots["dn2"], 3) / "chunks")
    (container_folder(roots["dn3"], 4) / "chunks" / "777.block").write_bytes(b"an orphan")
    _lose_record(roots["dn2"], UNVERIFIABLE, 0)


@pytest.mark.parametrize("damage", [_windows, _metadata])
def test_everything_that_is_left_somewhere_comes_back(
    healthy: Path, tmp_path: Path, damage: Callable[[Roots], None]
) -> None:
    roots = _copies(healthy, tmp_path / "fixture")
    damage(roots)
    before = _look(roots, tmp_path / "before")
    said = _verdicts(roots)
    status, answer = _demo("--fixture", str(tmp_path / "fixture"), "--keep", str(tmp_path / "kept"))
    assert (status, answer["healed"], answer["unverifiable"]) == (
        0,
        [1, 2, 3, 4, 6],
        [UNVERIFIABLE],
    )
    # What can be done was known beforehand.
    assert {said[container_id] for container_id in answer["healed"]} <= {"MATCH", "REPAIRABLE"}
    after = _look(
        {name: tmp_path / "kept" / name / "volume1" for name in NAMES}, tmp_path / "after"
    )
    for container_id in answer["healed"]:
        assert faults(before[container_id], after[container_id]) == []
    surplus = [
        (extra["containerID"], extra["replica"], extra["length"])
        for extra in answer["proof"]["surplus"]
    ]
    assert surplus == ([(4, "dn2", len(UNCOMMITTED))] if damage is _windows else [])
    for name in NAMES:
        assert after[UNVERIFIABLE][name].files == before[UNVERIFIABLE][name].files
        # The fixture itself is as it was.
        assert {c: seen[name] for c, seen in _look(roots, tmp_path / "again").items()} == {
            c: seen[name] for c, seen in before.items()
        }
    for container in answer["containers"]:
        if container["containerID"] in answer["healed"]:
            assert all(
                replica["state"] in ("CLOSED", "QUASI_CLOSED")
                for replica in container["after"].values()
            )


def test_what_is_lost_or_contradicts_is_named_and_everything_else_heals(
    healthy: Path, tmp_path: Path
) -> None:
    roots = _copies(healthy, tmp_path / "fixture")
    for name in NAMES:
        _flip(roots[name], 1, -1, 7 * WINDOW)
        _file(roots[name], 6, 0).unlink()
    _flip(roots["dn1"], 1, -1, 9 * WINDOW)
    _flip(roots["dn2"], 6, 3, 5)
    _contradict(roots["dn1"], 2, 1)
    descriptor = container_folder(roots["dn1"], 3) / "metadata" / "3.container"
    descriptor.write_bytes(descriptor.read_bytes().replace(b"CLOSED", b"CLOSEX"))
    _state(roots["dn2"], UNVERIFIABLE, ReplicaState.OPEN)
    _flip(roots["dn3"], 4, 1, 0)
    before = _look(roots, tmp_path / "before")
    said = _verdicts(roots)
    status, answer = _demo("--fixture", str(tmp_path / "fixture"), "--keep", str(tmp_path / "kept"))
    assert status == 4
    assert (said[1], said[4], said[6]) == ("UNRECOVERABLE", "REPAIRABLE", "UNRECOVERABLE")
    assert (answer["unrecoverable"], answer["conflicts"], answer["healed"]) == ([1, 6], [2], [4])
    assert answer["unhealed"] == [1, 2, 3, 6]
    after = _look(
        {name: tmp_path / "kept" / name / "volume1" for name in NAMES}, tmp_path / "after"
    )
    for container_id in (1, 4, 6):
        assert faults(before[container_id], after[container_id]) == []
    # Of a container with a loss, all but the loss is whole: the other window, the other
    # block.
    whole = _look(_copies(healthy, tmp_path / "whole"), tmp_path / "unhurt")
    first, last = min(whole[6]["dn1"].records), max(whole[1]["dn1"].records)
    for name in NAMES:
        kept = after[1][name].file(last)
        assert kept[9 * WINDOW : 10 * WINDOW] == whole[1][name].file(last)[9 * WINDOW : 10 * WINDOW]
        assert {k: v for k, v in whole[6][name].files.items() if k != f"{first}.block"} == after[6][
            name
        ].files


def test_the_healed_volumes_are_kept_as_a_fixture_and_nothing_else(tmp_path: Path) -> None:
    """The agent of the second datanode is killed after its first write, and has to
    finish. The picture of it is that of the README: `make pictures` draws it anew.
    """
    kept, picture = tmp_path / "kept", tmp_path / "healed.svg"
    words = ("--kill", "2", "--during", "repair", "--svg", str(picture))
    status, answer = _demo("--keep", str(kept), *words)
    assert picture.read_text() == (ROOT / "docs" / "healed.svg").read_text()
    assert (status, answer["proof"]["flaws"]) == (0, [])
    assert answer["kill"]["replica"] == "dn2"
    assert answer["kill"]["windowsWritten"] >= 1
    names = [str(path.relative_to(kept)) for path in kept.rglob("*")]
    assert [name for name in names if not LAYOUT.fullmatch(name)] == []
    assert {name for name in names if "/" not in name} == {*NAMES}


def test_two_datanodes_are_enough_and_added_damage_everywhere_is_a_loss(
    healthy: Path, tmp_path: Path
) -> None:
    for name in NAMES[:2]:
        copy_volume(healthy, name, tmp_path / name / "volume1")
    status, answer = _demo("--fixture", str(tmp_path), "--damage", "all-replicas")
    assert (status, answer["unrecoverable"], answer["healed"]) == (4, [1], [2, 3, 4, 6])
    assert [one["replica"] for one in answer["damageAdded"]] == ["dn1", "dn2"]


def test_erasure_coded_replicas_are_read_and_checked_and_none_is_called_healed(
    tmp_path: Path,
) -> None:
    unpack("healthy", tmp_path, fixture=ERASURE_CODED)
    status, answer = _demo("--fixture", str(tmp_path))
    assert (status, answer["unhealed"], answer["healed"]) == (6, [], [])
    assert answer["notReconciled"] == [one["containerID"] for one in answer["containers"]] != []
    assert answer["proof"]["bytesVerified"] > 0
    assert answer["jobs"] == []
    for container in answer["containers"]:
        assert (container["refused"], container["healed"]) == ("INELIGIBLE_REPLICATION_TYPE", False)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (DamageMethod.FLIP, FindingType.CORRUPT_CHUNK),
        (DamageMethod.TRUNCATE, FindingType.CORRUPT_CHUNK),
        (DamageMethod.LOST_FILE, FindingType.MISSING_DATA_FILE),
        (DamageMethod.LOST_RECORD, None),
        (DamageMethod.LOST_TREE, None),
        (DamageMethod.ALL_REPLICAS, FindingType.CORRUPT_CHUNK),
    ],
)
def test_added_damage_is_where_it_says(
    healthy: Path, tmp_path: Path, damage: DamageMethod, found: FindingType | None
) -> None:
    roots = _copies(healthy, tmp_path)
    before = _look(roots, tmp_path / "before")
    added = inflict(damage, roots, tmp_path / "scratch")
    assert [one.replica for one in added] == (
        list(NAMES) if damage is DamageMethod.ALL_REPLICAS else ["dn1"]
    )
    after = _look(roots, tmp_path / "after")
    changed = {
        (c, name) for c, seen in before.items() for name in NAMES if seen[name] != after[c][name]
    }
    assert changed == {(one.container_id, one.replica) for one in added}
    for one in added:
        volume = open_volume(
            roots[one.replica],
            hold=Hold.READ_ONLY,
            state_folder=tmp_path / "scan" / one.replica,
            disk=Disk(),
        )
        with volume:
            findings = scan(ContainerStore(volume, Disk()).get(one.container_id)).findings
        assert {finding.type for finding in findings} <= {found, FindingType.MISSING_CHUNK}
        assert bool(findings) == (found is not None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kill", "2"), "go together"),
        (("--during", "repair"), "go together"),
        (("--kill", "4", "--during", "repair", "--keep", "KEEP"), "there is no agent 4"),
        (("--kill", "0", "--during", "repair"), "0 is not in the range"),
        (("--damage", "flood"), "is not one of"),
        (("--fixture", "EMPTY"), "does not hold the volumes"),
        (("--fixture", "NOWHERE"), "does not exist"),
        (("--fixture", "TWINS", "--keep", "KEEP"), "same datanode"),
        (("--keep", "FULL"), "is not an empty folder"),
    ],
)
def test_bad_arguments_start_nothing_and_leave_nothing(
    healthy: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    places = {
        name: tmp_path / name.lower() for name in ("EMPTY", "NOWHERE", "TWINS", "KEEP", "FULL")
    }
    places["EMPTY"].mkdir()
    places["FULL"].mkdir()
    (places["FULL"] / "file").touch()
    if "TWINS" in words:
        for name in NAMES[:2]:
            copy_volume(healthy, "dn1", places["TWINS"] / name / "volume1")
    given = [str(places.get(word, word)) for word in words]
    done = CliRunner().invoke(treefold, ["demo", "--json", *given])
    assert (done.exit_code, said in done.stdout) == (2, True), done.stdout
    assert not places["KEEP"].exists()
