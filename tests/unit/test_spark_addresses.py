"""A master that Spark does not know is refused before Java starts."""

import pytest

from runtime.errors import UsageError
from spark.addresses import check_master


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[1]",
        "local[16]",
        "local[*]",
        "local[2,4]",
        "local[*, 4]",
        "spark://one:7077,two:7077",
        "yarn",
        "k8s://https://10.0.0.1:6443",
        "sc://connect.example.com:15002/;use_ssl=true",
    ],
)
def test_a_master_of_a_form_that_spark_knows_is_taken(master: str) -> None:
    check_master(master)


@pytest.mark.parametrize(
    "master",
    [
        "nonsense",
        "",
        "LOCAL",
        "local[]",
        "local[0]",
        "local[2,0]",
        "local[abc]",
        "local[-1]",
        "local[2",
        "local[\u0663]",
        "local[99999999999]",
        "local:2",
        "spark://",
        "spark:/one:7077",
        "yarn-client",
        "k8s://",
        "mesos://one:5050",
        " yarn",
        "yarn\n",
    ],
)
def test_any_other_is_a_usage_error(master: str) -> None:
    with pytest.raises(UsageError, match="is not a Spark master") as caught:
        check_master(master)
    assert "spark://HOST:PORT" in caught.value.hint


def test_what_may_be_secret_is_not_printed() -> None:
    with pytest.raises(UsageError) as caught:
        check_master("sc:/one:15002/;token=secret")
    assert "secret" not in caught.value.message
