"""Chunk tables of synthetic clusters, by how many rows they are to have."""

from pathlib import Path

from spark.synthetic import Cluster, Truth, synthetic

# A container of the synthetic cluster: three replicas of 20 blocks of 64 chunks, four blocks of five full.
_ROWS_A_CONTAINER = 3 * 20 * 64 * 0.9


def make_table(folder: Path, rows: int) -> Truth:
    """A clustered table of about so many rows."""
    return synthetic(folder, Cluster(containers=max(1, round(rows / _ROWS_A_CONTAINER))))
