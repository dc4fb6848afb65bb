"""A retrain job as an Airflow 3 DAG: copy it into the folder of DAGs, with the two paths edited.

Airflow schedules, retries and alerts; dkrr resumes. Only exit codes 6 (cluster) and 75 (interrupted) are tried again;
everything else, a refusal (7) among it, fails the run at once.
"""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.exceptions import AirflowFailException
from airflow.sdk import dag, task

FOLDER = "/srv/demo"
COMMAND = ["/opt/dkrr/bin/dkrr", "retrain", "RETRAIN.toml"]
RETRIED = (6, 75)


@dag(
    schedule="15 2 * * *",
    start_date=pendulum.datetime(2025, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    tags=["dkrr"],
)
def dkrr_retrain() -> None:
    """One tick of a retrain job a night."""

    @task(retries=3, retry_delay=timedelta(minutes=5))
    def retrain() -> None:
        import subprocess

        code = subprocess.run(COMMAND, cwd=FOLDER, check=False).returncode  # noqa: S603
        if code and code not in RETRIED:
            raise AirflowFailException(f"dkrr retrain ended with {code}; 7 is a refusal, and production stays")
        if code:
            raise RuntimeError(f"dkrr retrain ended with {code}; another attempt goes on from there")

    retrain()


nightly = dkrr_retrain()
