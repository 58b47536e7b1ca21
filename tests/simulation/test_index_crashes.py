"""An index whose process is killed at any moment, or whose log was cut, is one that was
there after some batch: after every batch that was acknowledged, if the process alone
ended.
"""

import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from merkle.errors import ReconcileError
from proof.index import AppliedPositions, Position
from proof.stored_index import StoredIndex
from tests.support.index_writer import batch
from tests.support.stored_indexes import Model, assert_is, changed, open_index, openers_of

pytestmark = pytest.mark.crashes

KILLS = 6


def batches_in(index: StoredIndex) -> int:
    with index.snapshot() as now:
        return now.applied.through if now.applied else 0


def model_after(batches: int) -> Model:
    model = Model()
    for number in range(1, batches + 1):
        changed(model, batch(number))
    return model


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb"])
def test_a_killed_writer_loses_no_acknowledged_batch(tmp_path: Path, kind: str) -> None:
    chance, last = random.Random(kind), 0
    command = [sys.executable, "-m", "tests.support.index_writer", str(tmp_path / "index"), kind]
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            # What is cut off is decided by the moment of the kill, whenever it comes.
            time.sleep(chance.random() * 0.2)
            process.kill()
            lines += process.stdout.readlines()
        acknowledged = max(int(line) for line in lines if line.endswith("\n"))
        index = open_index(tmp_path / "index", openers_of(kind))
        found = batches_in(index)
        # One batch may be durable and its acknowledgement lost.
        assert found in (acknowledged, acknowledged + 1)
        assert found > last
        assert_is(index, model_after(found))
        index.close()
        last = found


def test_a_log_cut_at_any_byte_leaves_an_earlier_batch(tmp_path: Path) -> None:
    folder, chance = tmp_path / "index", random.Random(3)
    index = open_index(folder)
    for number in range(1, 31):
        index.apply(batch(number), applied=AppliedPositions(Position(number)))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    index.close()
    (log,) = copy.glob("*-wal")
    whole, seen = log.read_bytes(), set[int]()
    for cut in [0, len(whole), *(chance.randrange(len(whole)) for _ in range(40))]:
        again = tmp_path / "again"
        shutil.copytree(copy, again)
        (again / log.name).write_bytes(whole[:cut])
        (again / log.name.replace("-wal", "-shm")).unlink()
        index = open_index(again)
        found = batches_in(index)
        assert_is(index, model_after(found))
        index.close()
        seen.add(found)
        shutil.rmtree(again)
    assert len(seen) > 10
    assert max(seen) == 30


def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path: Path) -> None:
    folder, chance = tmp_path / "index", random.Random(5)
    index = open_index(folder)
    for number in range(1, 41):
        index.apply(batch(number), applied=AppliedPositions(Position(number)))
    index.close()
    (path,) = folder.glob("*.sqlite")
    whole, model, found = path.read_bytes(), model_after(40), 0
    saved = whole.index(b"state") + 5000
    places = [chance.randrange(len(whole)) for _ in range(60)]
    places += [whole.index(key.encode()) + 9 for key, _ in sorted(model)[:20]]
    for place in [*places, saved]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            index = open_index(folder)
        except ReconcileError:
            found += 1
            continue
        check = index.self_check()
        if check.damage:
            found += 1
        else:
            assert_is(index, model)
        with suppress(ReconcileError):
            index.close()
    assert found > 20
