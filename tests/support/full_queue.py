"""A process that queues many changes, takes and acknowledges some, and prints how many
there were and the most memory that it had, in KiB.
"""

import sys
from pathlib import Path

from replicator.stores.port import Change, ChangeBatch, ChangeKind, FeedPosition, ObjectFacts
from replicator.syncer.queue import ChangeQueue

_BATCH = 5_000


def _fill(folder: Path, count: int) -> None:
    queue = ChangeQueue(folder)
    queue.begin(FeedPosition("log", 0))
    for first in range(1, count + 1, _BATCH):
        changes = []
        for index in range(first, min(first + _BATCH, count + 1)):
            key = f"warehouse/table/part-{index:09d}.parquet"
            facts = ObjectFacts(key, 1 << 20, f'"{index:032x}"', 1_700_000_000_000)
            changes.append(Change(index, key, "", ChangeKind.PUT, facts=facts))
        position = FeedPosition("log", changes[-1].index)
        queue.append(ChangeBatch(tuple(changes), position, count), entries_max=count)
    queue = ChangeQueue(folder)
    waiting = queue.count
    for _ in range(20):
        queue.acknowledge(queue.take(1_000)[-1].number)
    # Not ru_maxrss: that has the peak of the process that forked this one, too.
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    sys.stdout.write(f"{waiting} {int(status['VmHWM'].split()[0])}\n")


if __name__ == "__main__":
    _fill(Path(sys.argv[1]), int(sys.argv[2]))
