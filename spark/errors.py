"""Errors of starting Spark and of its jobs."""

from merkle.errors import ReconcileError


class SparkMissingError(ReconcileError):
    """Spark cannot run here: pyspark or Java is missing, or Java is too old."""

    code = "spark_missing"


class SparkFailedError(ReconcileError):
    """A Spark job failed after all retries of its tasks."""

    code = "spark_failed"


class FolderNotSharedError(ReconcileError):
    """Executors do not see the folder that the driver writes a sweep to."""

    code = "folder_not_shared"
