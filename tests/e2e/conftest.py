"""What tests of several files share because it is dear."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def session() -> Iterator["SparkSession"]:
    """A local Spark of two cores; all tests that ask for it are of the xdist group
    "spark".
    """
    from spark.session import spark_session

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with spark_session("local[2]", settings={"spark.sql.shuffle.partitions": "2"}) as session:
        yield session
