"""What an error of Spark says of its cause."""

import pytest

from runtime.errors import DiskError
from spark.errors import (
    FolderNotSharedError,
    PackagesMissingError,
    SparkFailedError,
    cause_of,
    failure_of,
    task_failure,
)

PYTHON = """[X] Job aborted due to stage failure: Task 0 failed 4 times, most recent failure: \
Lost task 0.3 in stage 1.0: PythonException: thrown from the Python worker:
Traceback (most recent call last):
  File "worker.py", line 2, in read
{error}

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:5)
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            PYTHON.format(error="runtime.errors.DiskError: cannot write /x"),
            "DiskError: cannot write /x",
        ),
        (
            PYTHON.format(error="ModuleNotFoundError: No module named 'click'"),
            "ModuleNotFoundError: No module named 'click'",
        ),
        ("Job aborted, most recent failure: Lost executor 3", "Lost executor 3"),
        ("An error\n: java.io.IOException: No space\n\tat x", "java.io.IOException: No space"),
        ("anything", "anything"),
    ],
)
def test_the_first_cause_that_helps_is_named(text: str, cause: str) -> None:
    assert cause_of(text) == cause


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError: No module named 'pyarrow.lib'",
        # Of a worker that does not start.
        "/usr/bin/python3: Error while finding module specification (No module named pyarrow)",
    ],
)
def test_what_executors_lack_is_an_error_of_its_own(error: str) -> None:
    found = failure_of("reading", PYTHON.format(error=error))
    assert isinstance(found, PackagesMissingError)
    assert found.message == "reading failed: executors cannot import pyarrow"
    assert "sweep pack" in found.hint


def test_any_other_failure_says_what_failed() -> None:
    found = failure_of("reading", PYTHON.format(error="OSError: no room"))
    assert isinstance(found, SparkFailedError)
    assert found.message == "reading failed on Spark: OSError: no room"


def test_an_error_of_a_task_is_the_last_of_ours_in_a_chain() -> None:
    chain = (
        "OSError: [Errno 5] Input/output error\n\nThe above exception was the direct cause:\n\n"
        "runtime.errors.DiskError: cannot read /x\n\nDuring handling:\n\n"
        "spark.errors.FolderNotSharedError: executors do not see /x"
    )
    found = task_failure("work", PYTHON.format(error=chain))
    assert isinstance(found, FolderNotSharedError)
    assert found.message == "executors do not see /x"
    assert "--state" in found.hint
    disk = task_failure("work", "runtime.errors.DiskError: cannot read /x")
    assert isinstance(disk, DiskError)
    for other in (
        "somewhere.OtherError: a text",
        "ValueError: runtime.errors.DiskError: quoted",
        "java.io.IOException: runtime.errors.DiskError: quoted",
    ):
        assert isinstance(task_failure("work", PYTHON.format(error=other)), SparkFailedError)
