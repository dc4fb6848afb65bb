"""A retrain job as a Dagster asset: the model in production, materialised every night. Edit the two paths, then

    dagster dev -f dagster_asset.py

Dagster schedules, retries and alerts; dkrr resumes. Only exit codes 6 (cluster) and 75 (interrupted) are tried again;
everything else, a refusal (7) among it, fails the run at once.
"""

# no "from __future__ import annotations": Dagster reads the annotation of the context
import json
import subprocess

from dagster import (
    AssetExecutionContext,
    Definitions,
    Failure,
    MaterializeResult,
    RetryRequested,
    ScheduleDefinition,
    asset,
    define_asset_job,
)

FOLDER = "/srv/demo"
COMMAND = ["/opt/dkrr/bin/dkrr", "retrain", "RETRAIN.toml", "--json"]
RETRIED = (6, 75)


@asset(name="demo_production", description="The model that is served as demo@production.")
def production(context: AssetExecutionContext) -> MaterializeResult:
    """One tick of a retrain job."""
    done = subprocess.run(COMMAND, cwd=FOLDER, capture_output=True, text=True, check=False)  # noqa: S603
    context.log.info(done.stderr)
    if done.returncode in RETRIED:
        raise RetryRequested(max_retries=3, seconds_to_wait=300)
    if done.returncode:
        raise Failure(f"dkrr retrain ended with {done.returncode}: {done.stderr}", allow_retries=False)
    report = json.loads(done.stdout)
    return MaterializeResult(metadata={"outcome": report["outcome"], "version": report["production"] or "none"})


night = define_asset_job("retrain_demo", selection=[production])
definitions = Definitions(
    assets=[production], jobs=[night], schedules=[ScheduleDefinition(job=night, cron_schedule="15 2 * * *")]
)
