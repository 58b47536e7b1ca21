"""What an error of Spark says of its cause."""

import pytest

from spark.errors import cause_of

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
