"""What proving two buckets equal costs: bytes, trips and CPU of each side.

    python -m benchmarks.bench_proof [--objects N ...] [--json]

Of d differing keys half are changed, a quarter is missing and a quarter extra. Both
indexes are in memory, with their symbols kept up to date. Bytes are those of the
messages and of HEADER_BYTES of headers each; names of extra keys are counted apart. CPU
is that of a side up to the certified IDs, peeling and the coding of messages included;
`with names` adds the items behind the IDs.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Report, Samples
from proof.answers import TargetAnswers
from proof.comparison import BucketComparison, SourceComparison
from proof.index import IndexedItem
from proof.item import Item
from proof.messages import NamesQuestion
from proof.symbols import KEPT_SYMBOLS, KERNEL_IDS_MIN, kernels_for
from proof.wire import decode_answer, decode_question, encode_answer, encode_question
from tests.support.memory_index import PROFILE, MemoryIndex, no_windows

OBJECTS = (1_000, 100_000, 1_000_000)
DIFFERENCES = (0, 1, 10, 100, 1_000, 10_000)
# Of a message, on a warm connection.
HEADER_BYTES = 48
ROUNDS = 5
EQUAL_BYTES_MAX = 1_000
DIFFERENT_BYTES_MAX, DIFFERENCE_BYTES_MAX = 1_000, 80
TRIPS_MAX = 5
CPU_MS_MAX = 20.0
# A prefix that the target lost, as a share of all objects, and its bar where it is more
# than the kept symbols decode.
PREFIX_SHARE = 10
PREFIX_BYTES_MAX = 32_000


@dataclass
class Cost:
    """Of one comparison; CPU in seconds."""

    message_bytes: int = 0
    trips: int = 0
    source_cpu_s: float = 0.0
    target_cpu_s: float = 0.0
    # Up to the first names.
    proof_source_cpu_s: float = 0.0
    proof_target_cpu_s: float = 0.0
    outcome: BucketComparison | None = field(default=None, repr=False)

    @property
    def name_bytes(self) -> int:
        """Of the extra keys themselves."""
        assert self.outcome is not None
        return sum(len(one.key.encode()) for one in self.outcome.differences if one.theirs)


class TimedIndex(MemoryIndex):
    """Notes when items are first looked up: the IDs are certified then."""

    first_find_s = 0.0

    def find(self, key_hashes: NDArray[np.uint64]) -> list[IndexedItem]:
        """See ItemSnapshot."""
        self.first_find_s = self.first_find_s or time.process_time()
        return super().find(key_hashes)


def compare(source: TimedIndex, target: MemoryIndex) -> Cost:
    """Compare once, through the bytes of the wire."""
    cost, side = Cost(), SourceComparison(source, PROFILE, b"a bench.")
    answers = TargetAnswers(target, PROFILE, no_windows)
    begun_s = time.process_time()
    questions = side.start()
    while questions:
        if isinstance(questions[0].question, NamesQuestion) and not cost.proof_target_cpu_s:
            cost.proof_target_cpu_s = cost.target_cpu_s
        asked = [encode_question(question) for question in questions]
        sent_s = time.process_time()
        answered = [encode_answer(answers.answer(decode_question(raw))) for raw in asked]
        received_s = time.process_time()
        cost.source_cpu_s += sent_s - begun_s
        cost.target_cpu_s += received_s - sent_s
        cost.message_bytes += sum(len(raw) + HEADER_BYTES for raw in (*asked, *answered))
        cost.trips += 1
        begun_s = time.process_time()
        source.first_find_s = 0.0
        questions = side.step([decode_answer(raw) for raw in answered])
        if source.first_find_s and not cost.proof_source_cpu_s:
            cost.proof_source_cpu_s = cost.source_cpu_s + source.first_find_s - begun_s
    cost.source_cpu_s += time.process_time() - begun_s
    cost.proof_source_cpu_s = cost.proof_source_cpu_s or cost.source_cpu_s
    cost.proof_target_cpu_s = cost.proof_target_cpu_s or cost.target_cpu_s
    cost.outcome = side.outcome
    return cost


def items(count: int) -> list[Item]:
    """Objects of 41-byte keys, with the hashes of content and properties."""
    rng = random.Random(1)
    return [
        Item(
            key=f"warehouse/events/2026/11/{rng.getrandbits(64):016x}",
            size_bytes=rng.getrandbits(20),
            content=rng.randbytes(16),
            properties=rng.randbytes(16),
        )
        for _ in range(count)
    ]


@contextmanager
def differing(target: MemoryIndex, held: Sequence[Item], count: int) -> Iterator[None]:
    """The target differs in so many keys until the context ends."""
    picked = random.Random(count).sample(held, count)
    changed, missing = picked[: count // 2], picked[count // 2 : count // 2 + count // 4]
    extra = picked[count // 2 + count // 4 :]
    for item in changed:
        target.put(Item(item.key, item.size_bytes + 1, item.content, item.properties))
    for item in missing:
        target.delete(item.key)
    for item in extra:
        target.put(Item(item.key[:-1] + "g", item.size_bytes, item.content, item.properties))
    target.prepare()
    gc.freeze()
    yield
    for item in (*changed, *missing):
        target.put(item)
    for item in extra:
        target.delete(item.key[:-1] + "g")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="+", default=OBJECTS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    fast = kernels_for(KERNEL_IDS_MIN) is not None
    notes = [
        f"{'with' if fast else 'WITHOUT'} compiled kernels; messages with {HEADER_BYTES} bytes of"
        " headers each, without TLS"
    ]
    report = Report("proof of two buckets", notes)
    for count in arguments.objects:
        measure(report, count)
    report.show(as_json=arguments.json)


def measure(report: Report, count: int) -> None:
    """Add the rows of buckets of this size."""
    held = items(count)
    source, target = TimedIndex(held), MemoryIndex(held)
    source.prepare()
    # An index on disk has no million objects for the garbage collector to look at.
    gc.freeze()
    for number in (one for one in DIFFERENCES if 4 * one <= count):
        with differing(target, held, number):
            costs = [compare(source, target) for _ in range(ROUNDS)]
        outcome = costs[0].outcome
        assert outcome is not None
        assert len(outcome.differences) == number
        _add_rows(report, f"{count:,} objects, {number:,} differ", number, costs)
    lost = sorted(item.key for item in held)[count // 3 :][: count // PREFIX_SHARE]
    for key in lost:
        target.delete(key)
    target.prepare()
    cost = compare(source, target)
    assert cost.outcome is not None
    assert len(cost.outcome.differences) == len(lost)
    job = f"{count:,} objects, a prefix of {len(lost):,} lost"
    most = PREFIX_BYTES_MAX if len(lost) > KEPT_SYMBOLS else _most(len(lost))
    _add(report, f"{job}: bytes", "B", [cost.message_bytes], most)
    _add(report, f"{job}: trips", "trips", [cost.trips], TRIPS_MAX)


def _add_rows(report: Report, job: str, number: int, costs: Sequence[Cost]) -> None:
    crossed = [cost.message_bytes - cost.name_bytes for cost in costs]
    _add(report, f"{job}: bytes", "B", crossed, _most(number) if number else EQUAL_BYTES_MAX)
    _add(report, f"{job}: trips", "trips", [costs[0].trips], TRIPS_MAX if number else 1)
    for side, proof, whole in (
        (
            "source",
            [cost.proof_source_cpu_s for cost in costs],
            [cost.source_cpu_s for cost in costs],
        ),
        (
            "target",
            [cost.proof_target_cpu_s for cost in costs],
            [cost.target_cpu_s for cost in costs],
        ),
    ):
        _add(report, f"{job}: CPU, {side}", "ms", [1e3 * one for one in proof], CPU_MS_MAX)
        _add(report, f"{job}: CPU, {side}, with names", "ms", [1e3 * one for one in whole], None)


def _most(number: int) -> float:
    return DIFFERENT_BYTES_MAX + DIFFERENCE_BYTES_MAX * number


def _add(report: Report, job: str, unit: str, figures: Sequence[float], most: float | None) -> None:
    """A figure beside its bar; without one beside that of the proof alone."""
    ours = Samples("ours", tuple(max(figure, 1e-6) for figure in figures))
    peer = Samples("the bar", (CPU_MS_MAX if most is None else most,))
    report.add(job, unit, ours, peer, most=None if most is None else 1.0)


if __name__ == "__main__":
    main()
