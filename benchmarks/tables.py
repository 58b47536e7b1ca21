"""Chunk tables of synthetic clusters, by how many rows they are to have."""

from pathlib import Path

from admin.demo.synthetic import GroundTruth, SyntheticCluster, synthetic

# A container of the synthetic cluster: three replicas of 20 blocks of 64 chunks, and
# half as many where not full.
_ROWS_A_CONTAINER = 3 * 20 * 64


def make_table(folder: Path, rows: int, *, full: float = 0.8) -> GroundTruth:
    """A clustered table of about so many rows, this share of blocks full."""
    containers = max(1, round(rows / (_ROWS_A_CONTAINER * (1 + full) / 2)))
    return synthetic(folder, SyntheticCluster(containers=containers, full=full))
