"""One sweep of the whole cluster each night, for Apache Airflow 3.

Change the addresses, and copy this file into Airflow's folder of DAGs. Workers need the
command `treefold` with the extra `sweep`, and for Spark `spark` and Java 17. Keys for
S3 are in the environment of the workers, or in ~/.aws.

Airflow 2 has the same classes as `airflow.DAG` and
`airflow.operators.bash.BashOperator`.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

# "" is the engine of one machine: the worker that runs the task.
SPARK = "--engine spark --master spark://master:7077 --pack /srv/treefold/pack"
SWEEP = (
    "treefold sweep run --table 's3://exports?endpoint_url=http://s3g:9878'"
    f" --out 's3://sweeps/prod?endpoint_url=http://s3g:9878' {SPARK}"
)

# A sweep that ends with 0, 3 (findings) or 5 (not all was read) is complete: a retry
# would be another one. The last line is what the next task gets.
RUN = f"""
status=0
{SWEEP} || status=$?
echo $status
case $status in 0|3|5) ;; *) exit $status ;; esac
"""

with DAG(
    "treefold_sweep",
    description="Compare every replica of the cluster",
    # After the agents' exports.
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    # A second one would end with 8: another sweep writes there.
    max_active_runs=1,
):
    sweep = BashOperator(
        task_id="sweep",
        bash_command=RUN,
        # The next try continues what was committed.
        retries=3,
        retry_delay=timedelta(minutes=10),
        execution_timeout=timedelta(hours=20),
    )
    # Findings are a result; what could not be read whole is a failure, which no retry
    # mends.
    all_was_read = BashOperator(
        task_id="all_was_read",
        bash_command="test '{{ ti.xcom_pull(task_ids=\"sweep\") }}' != 5",
        retries=0,
    )
    sweep.set_downstream(all_was_read)
