"""How much memory a comparison takes that finds very many differences.

    python -m benchmarks.bench_proof_memory [CASE ...] [COUNT ...]

Two buckets are indexes without objects. Each case runs in a process of its own, which
opens both sides; the figure is how much its peak (VmHWM) grew by the comparison, until
each difference has been planned and put into the spool. `first` is a sync into an empty
target, `whole` the same without parts, `extras` a target with that many more keys below
one prefix, `random` a bucket of which half has changed.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

from proof.answers import TargetAnswers
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import ID_BYTES, EvidenceLevel, HashAlgorithm, Item, Profile
from proof.messages import AnswerMessage, QuestionMessage, WindowsAnswer
from proof.stored_index import StoredIndex
from proof.symbols import CodedSymbols, ids_from_bytes, peel
from proof.wire import decode_answer, decode_question, encode_answer, encode_question
from replicator.part_proofs import DIFFERENCES_MAX, compare_parts
from replicator.plan_spool import PlanSpool
from replicator.proven_plan import decide_step
from replicator.refresh import prefix_range
from runtime.disk import Disk

PROFILE = Profile(b"k" * 32, HashAlgorithm.MD5)
CASES = ("first", "whole", "extras", "random")
COUNTS = (100_000, 400_000)
_EVIDENCE = ItemEvidence(EvidenceLevel.RECORDED)
_SHARED = 20_000


def main() -> None:
    """Print a line for each case and count."""
    counts = [int(word) for word in sys.argv[1:] if word.isdigit()] or COUNTS
    for case in [word for word in sys.argv[1:] if word in CASES] or CASES:
        for count in counts:
            with tempfile.TemporaryDirectory() as folder:
                for step in ("fill", "measure"):
                    command = [sys.executable, "-m", __spec__.name, step, case, str(count), folder]
                    subprocess.run(command, check=True)


def measure(case: str, count: int, folder: Path) -> None:
    """Compare the two indexes of a case, in this process."""
    with (
        closing(_opened(folder / "source")) as source,
        closing(_opened(folder / "target")) as target,
        closing(PlanSpool(folder)) as spool,
    ):
        answers = TargetAnswers(target, PROFILE, lambda _question: WindowsAnswer(()))

        def ask(questions: Sequence[QuestionMessage]) -> list[AnswerMessage]:
            asked = [decode_question(encode_question(one)) for one in questions]
            return [decode_answer(encode_answer(answers.answer(one))) for one in asked]

        _compile_kernels()
        before, began_s, found = _peak_kib(), time.monotonic(), 0
        most = count if case == "whole" else DIFFERENCES_MAX
        whole = prefix_range("")
        for part in compare_parts(source, PROFILE, ask, whole, differences_max=most):
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


def fill(case: str, count: int, folder: Path) -> None:
    """Make the two indexes of a case."""
    shared = partial(_items, "shared/", _SHARED)
    match case:
        case "first" | "whole":
            sides = [_items("new/", count), iter(())]
        case "extras":
            sides = [shared(), _joined(_items("extra/", count), shared())]
        case _:
            sides = [_items("k/", 2 * count), _items("k/", 2 * count, changed=0.5)]
    for name, items in zip(("source", "target"), sides, strict=True):
        with closing(_opened(folder / name)) as index, index.rebuild(items=1) as building:
            while batch := list(islice(items, 5_000)):
                building.add(batch)
            building.finish()


def _joined(*parts: Iterator[StampedItem]) -> Iterator[StampedItem]:
    for part in parts:
        yield from part


def _items(prefix: str, count: int, *, changed: float = 0.0) -> Iterator[StampedItem]:
    chance = random.Random(1)
    for number in range(count):
        salt = chance.random() < changed
        content = (2 * number + salt).to_bytes(16, "big")
        item = Item(f"{prefix}{number:012}", 1_000, content, b"p" * 16)
        yield StampedItem(item, _EVIDENCE, Stamp("", content.hex(), 1_700_000_000_000))


def _compile_kernels() -> None:
    """Compiling takes more memory than most comparisons, once."""
    symbols = CodedSymbols.zeros(32)
    symbols.add(ids_from_bytes(bytes(range(5 * ID_BYTES))))
    peel(symbols)


def _opened(folder: Path) -> StoredIndex:
    return StoredIndex(folder, PROFILE, disk=Disk())


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    if sys.argv[1:2] in (["fill"], ["measure"]):
        {"fill": fill, "measure": measure}[sys.argv[1]](
            sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
        )
    else:
        main()
