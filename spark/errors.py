"""Why Spark does not run, or not to the end."""

from merkle.errors import ReconcileError


class SparkMissingError(ReconcileError):
    """Spark cannot run here: there is no pyspark, no Java, or one that is too old."""

    code = "spark_missing"


class SparkFailedError(ReconcileError):
    """A job failed on Spark, and would again."""

    code = "spark_failed"
