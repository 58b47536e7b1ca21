"""Generate chunk tables of synthetic clusters with a given number of rows."""

from pathlib import Path

from admin.demo.ground_truth import GroundTruth
from admin.demo.synthetic import SyntheticCluster, synthetic

# Rows of a container with full blocks: three replicas of 20 blocks of 64 chunks. Other
# blocks have half as many chunks on average.
_CONTAINER_ROWS = 3 * 20 * 64


def make_table(folder: Path, rows: int, *, full: float = 0.8) -> GroundTruth:
    """Write a table with about `rows` rows in the order that agents write; `full` is
    the share of full blocks.
    """
    containers = max(1, round(rows / (_CONTAINER_ROWS * (1 + full) / 2)))
    return synthetic(folder, SyntheticCluster(containers=containers, full=full))
