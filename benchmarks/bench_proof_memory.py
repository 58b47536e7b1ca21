"""How much memory a comparison takes that finds very many differences.

    python -m benchmarks.bench_proof_memory [COUNT ...]

Two buckets are indexes without objects. Each case runs in a process of its own, which
has both sides; the figure is how much its peak (VmHWM) grew by the comparison, until
each difference has been planned and put into the spool. `first` is a sync into an empty
target, `extras` a target with that many more keys below one prefix, `random` a bucket
of which half has changed.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from proof.answers import TargetAnswers
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import EvidenceLevel, HashAlgorithm, Item, Profile
from proof.messages import AnswerMessage, QuestionMessage, WindowsAnswer
from proof.stored_index import StoredIndex
from proof.wire import decode_answer, decode_question, encode_answer, encode_question
from replicator.part_proofs import compare_parts
from replicator.plan_spool import PlanSpool
from replicator.proven_plan import decide_step
from replicator.refresh import prefix_range
from runtime.disk import Disk

PROFILE = Profile(b"k" * 32, HashAlgorithm.MD5)
CASES = ("first", "extras", "random")
COUNTS = (100_000, 400_000)
_EVIDENCE = ItemEvidence(EvidenceLevel.RECORDED)
_SHARED = 20_000


def main() -> None:
    """Print a line for each case and count."""
    counts = [int(word) for word in sys.argv[1:]] or COUNTS
    for case in CASES:
        for count in counts:
            command = [sys.executable, "-m", __spec__.name, case, str(count)]
            subprocess.run(command, check=True)


def measure(case: str, count: int) -> None:
    """One case, in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = _fill(folder, case, count)
        answers = TargetAnswers(target, PROFILE, lambda _question: WindowsAnswer(()))

        def ask(questions: Sequence[QuestionMessage]) -> list[AnswerMessage]:
            asked = [decode_question(encode_question(one)) for one in questions]
            return [decode_answer(encode_answer(answers.answer(one))) for one in asked]

        before, began_s, spool, found = _peak_kib(), time.monotonic(), PlanSpool(folder), 0
        for part in compare_parts(source, PROFILE, ask, prefix_range("")):
            for difference in part.differences:
                spool.add(decide_step(difference, None, may_delete=True))
                found += 1
        assert found == len(spool) == sum(1 for _ in spool)
        grown_mib = (_peak_kib() - before) / 1024
        print(
            f"{case:8} {count:>9,} differences: {found:>9,} found, peak {grown_mib:6.1f} MiB more,"
            f" {time.monotonic() - began_s:.1f} s",
            flush=True,
        )
        source.close()
        target.close()


def _fill(folder: Path, case: str, count: int) -> tuple[StoredIndex, StoredIndex]:
    shared = partial(_items, "shared/", _SHARED)
    match case:
        case "first":
            sides = [_items("new/", count), iter(())]
        case "extras":
            sides = [shared(), _joined(_items("extra/", count), shared())]
        case _:
            sides = [_items("k/", 2 * count), _items("k/", 2 * count, changed=0.5)]
    return _index(folder / "source", sides[0]), _index(folder / "target", sides[1])


def _joined(*parts: Iterator[StampedItem]) -> Iterator[StampedItem]:
    for part in parts:
        yield from part


def _items(prefix: str, count: int, *, changed: float = 0.0) -> Iterator[StampedItem]:
    chance = random.Random(1)
    for number in range(count):
        salt = chance.random() < changed
        content = random.Random(2 * number + salt).randbytes(16)
        item = Item(f"{prefix}{number:012}", 1_000, content, b"p" * 16)
        yield StampedItem(item, _EVIDENCE, Stamp("", content.hex(), 1_700_000_000_000))


def _index(folder: Path, items: Iterator[StampedItem]) -> StoredIndex:
    index = StoredIndex(folder, PROFILE, disk=Disk())
    with index.rebuild(items=1_000_000) as building:
        while batch := [one for _, one in zip(range(5_000), items, strict=False)]:
            building.add(batch)
        building.finish()
    return index


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main()
