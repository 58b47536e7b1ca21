"""Rows of a frame folded by Spark SQL, without the files of a sweep."""

from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame

from spark.sql import aggregate, names_of, settled, unnamed_containers
from sweep.fragments import Int64s
from sweep.model import REQUEST_SCHEMA
from sweep.stages import CompareStage


class SqlFold(NamedTuple):
    """The replicas, and the containers whose rows must be sorted, as a comparison of
    them has it.
    """

    replicas: pa.Table
    exact: Int64s


def fold_frame(rows: DataFrame) -> SqlFold:
    with names_of(rows) as names:
        found = settled(aggregate(rows, names).toArrow())
        owners = unnamed_containers(rows, names).toArrow().cast(REQUEST_SCHEMA)
    requested = pa.concat_tables([found.requested, owners])
    compared = CompareStage()({"replicas": found.replicas, "requested": requested})
    return SqlFold(compared["roots"], compared["exact"]["container_id"].to_numpy())
