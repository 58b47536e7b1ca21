"""`python -m tests.support.sync_process DIR`: sync DIR/source to DIR/target."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from replicator.copier import CopierLimits
from replicator.stores.local import LocalBucket
from runtime.disk import Disk
from tests.support.bucket_sync import SyncRunner


def main() -> None:
    """Run one sync with threads and print its report."""
    folder = Path(sys.argv[1])
    with (
        LocalBucket(folder / "source", Disk()) as source,
        LocalBucket(folder / "target", Disk(), create=True) as target,
    ):
        runner = SyncRunner(
            source.store(),
            target.store(),
            folder / "state",
            copier_limits=CopierLimits(objects=4, parts=4, memory_bytes=1 << 20),
            new_executor=ThreadPoolExecutor,
        )
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        sys.stdout.write(f"{runner().document()}\n")


if __name__ == "__main__":
    main()
