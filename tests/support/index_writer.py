"""Changes an index for ever, the same way each time, until it is killed."""

import sys
from itertools import count
from pathlib import Path

from proof.index import AppliedPositions, Position, StampedItem
from tests.support.stored_indexes import open_index, openers_of, stamped

KEYS = 60
Batch = list[tuple[str, StampedItem | None]]


def batch(number: int) -> Batch:
    """The batch with this number, from 1."""
    keys = (number * 7, number * 13 + 1, number * 29 + 2)
    return [
        (f"k{key % KEYS}", stamped(f"k{key % KEYS}", number) if key % 5 else None) for key in keys
    ]


def main(folder: Path, kind: str) -> None:
    """Continue after the last batch that the index has, which it notes as applied."""
    index = open_index(folder, openers_of(kind))
    with index.snapshot() as now:
        done = now.applied.through if now.applied else 0
    for number in count(done + 1):
        index.apply(batch(number), applied=AppliedPositions(Position(number)))
        print(number, flush=True)  # noqa: T201 - the test reads it
        if number % 25 == 0:
            with index.rebuild(items=1) as building:
                building.add(index.rows(start_after="", limit=KEYS))
                building.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
