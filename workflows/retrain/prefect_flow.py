"""A Prefect 3 flow that runs `dkrr retrain`: on a schedule of its own, or once, with or without a server.

    pip install "dkrr[prefect]"
    python prefect_flow.py RETRAIN.toml                        # once
    python prefect_flow.py RETRAIN.toml --cron "15 2 * * *"    # serves a deployment until Ctrl-C
    python prefect_flow.py RETRAIN.toml --every 3600

Without PREFECT_API_URL Prefect starts a server for the occasion. Prefect schedules, retries and alerts; what a retry
finds done is not done again, for that is dkrr's part. Only what another attempt can mend is retried: exit codes 6 (the
cluster) and 75 (interrupted). A refusal (7) fails the run, and the model in production stays. Prefect's telemetry is
switched off.
"""

from __future__ import annotations

import os

# before Prefect is imported, which reads them then
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
# a server for the occasion has 20 s to start, which a busy machine does not always manage
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")

import argparse
import json
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact

RETRIED = (6, 75)
DELAYS = [float(text) for text in os.environ.get("DKRR_RETRY_SECONDS", "60,300,900").split(",")]


class CommandEnded(RuntimeError):
    """`dkrr` ended with an exit code other than 0."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"exit code {code}: {message}")
        self.code = code


def worth_a_retry(task: Any, run: Any, state: Any) -> bool:
    """Whether another attempt can end in another way."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, CommandEnded) and error.code in RETRIED


@task(retries=len(DELAYS), retry_delay_seconds=DELAYS, retry_condition_fn=worth_a_retry, task_run_name="retrain {job}")
def retrain(job: str) -> dict[str, Any]:
    """`dkrr retrain JOB --json`; its report becomes an artifact."""
    logger = get_run_logger()
    command = [sys.executable, "-m", "dkrr.cli", "retrain", job, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
    try:
        out, err = process.communicate()
    except BaseException:  # a cancelled flow: the command ends in order, and a later run goes on from there
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    for line in err.splitlines():
        logger.info(line)
    report: dict[str, Any] = json.loads(out) if out.strip() else {}
    if report:
        create_markdown_artifact(markdown=as_markdown(report), key="retrain", description=f"{report['name']}")
    if process.returncode:
        raise CommandEnded(process.returncode, err.strip().splitlines()[-1] if err.strip() else "no message")
    return report


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page of Prefect shows it."""
    lines = [f"# {report['name']}: {report['outcome']}", "", f"production: `{report['production']}`", ""]
    lines += [f"- {batch['name']}: {batch['outcome']}" for batch in report["batches"]]
    lines += [f"- {'passed' if check['passed'] else '**refused**'}: {check['sentence']}" for check in report["checks"]]
    lines += [f"- reason: {reason}" for reason in report["reasons"]]
    return "\n".join(lines)


@flow(name="dkrr-retrain")
def retrain_flow(job: str) -> dict[str, Any]:
    """One tick of a retrain job."""
    report = retrain(job)
    get_run_logger().info("%s: %s, production %s", report["name"], report["outcome"], report["production"])
    return report


def main() -> None:
    """Run the flow once, or serve it on a schedule."""
    parser = argparse.ArgumentParser(description="Run dkrr retrain from Prefect.")
    parser.add_argument("job", metavar="RETRAIN.toml", type=os.path.abspath)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--cron", help="schedule of a deployment that is served until Ctrl-C")
    when.add_argument("--every", type=float, metavar="SECONDS", help="the same, at this interval")
    parser.add_argument("--name", default="retrain", help="of the deployment")
    options = parser.parse_args()
    if options.cron is None and options.every is None:
        retrain_flow(options.job)
        return
    retrain_flow.serve(
        name=options.name,
        cron=options.cron,
        interval=None if options.every is None else timedelta(seconds=options.every),
        parameters={"job": options.job},
        limit=1,  # the lease of the model would refuse a second one anyway, with exit code 8
    )


if __name__ == "__main__":
    main()
