"""A retrain job as a Prefect 3 flow: once, or on a schedule.

    pip install 'dkrr[prefect]'
    python prefect_flow.py RETRAIN.toml                        # once; no server is needed
    PREFECT_SERVER_ANALYTICS_ENABLED=false prefect server start
    PREFECT_API_URL=http://127.0.0.1:4200/api python prefect_flow.py RETRAIN.toml --cron "15 2 * * *"

The last line serves a deployment until Ctrl-C. Prefect schedules, retries and alerts; dkrr resumes: what an attempt had
finished, the next one finds. Only exit codes 6 (cluster) and 75 (interrupted) are tried again; everything else, a
refusal (7) among it, fails the run at once, and the model in production stays. The command's report becomes an artifact
of the run. Prefect's telemetry is off.
"""

from __future__ import annotations

import os

# before Prefect is imported, which reads them then
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
# without a server Prefect starts one for the occasion and gives it 20 s, which a busy machine does not always manage
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.settings import PREFECT_API_URL

RETRIED = (6, 75)
DELAYS = [float(text) for text in os.environ.get("DKRR_RETRY_SECONDS", "60,300,900").split(",")]


class CommandEnded(RuntimeError):
    """`dkrr retrain` ended with an exit code other than 0."""

    @property
    def code(self) -> int:
        return int(self.args[0])

    def __str__(self) -> str:
        return f"dkrr retrain ended with {self.code}: {self.args[1]}"


def another_attempt_may_mend_it(task: Any, run: Any, state: Any) -> bool:
    """Whether to try again."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, CommandEnded) and error.code in RETRIED


@task(name="retrain", retries=len(DELAYS), retry_delay_seconds=DELAYS, retry_condition_fn=another_attempt_may_mend_it)
def retrain(job: str, dkrr: str) -> dict[str, Any]:
    """`dkrr retrain JOB --json`: its messages go to the log, its report becomes an artifact."""
    logger = get_run_logger()
    said = []
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(  # noqa: S603
            [dkrr, "retrain", job, "--json"], cwd=os.path.dirname(job), stdout=output, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            for line in process.stderr or ():
                said.append(line.rstrip())
                logger.info(said[-1])
            process.wait()
        except BaseException:  # cancelled: the command ends in order, and a later run goes on from there
            process.send_signal(signal.SIGTERM)
            process.communicate()
            raise
        output.seek(0)
        text = output.read()
    report: dict[str, Any] = json.loads(text) if text.strip() else {}
    if report:
        create_markdown_artifact(markdown=as_markdown(report), key="retrain", description=report["name"])
    if process.returncode:
        errors = [line for line in said if line.startswith("error: ")] or said[-1:]
        raise CommandEnded(process.returncode, " ".join(errors) or "no message")
    return report


def as_markdown(report: dict[str, Any]) -> str:
    """The report as Prefect's page shows it."""
    lines = [f"# {report['name']}: {report['outcome']}", "", f"production: `{report['production']}`", ""]
    lines += [f"- batch {batch['name']}: {batch['outcome']}" for batch in report["batches"]]
    lines += [f"- {'passed' if check['passed'] else '**refused**'}: {check['sentence']}" for check in report["checks"]]
    lines += [f"- reason: {reason}" for reason in report["reasons"]]
    return "\n".join(lines)


@flow(name="dkrr-retrain")
def retrain_flow(job: str, dkrr: str = "dkrr") -> dict[str, Any]:
    """One tick of a retrain job."""
    report = retrain(job, dkrr)
    get_run_logger().info("%s: %s, production %s", report["name"], report["outcome"], report["production"])
    return report


def main() -> None:
    """Run the flow once, or serve it on a schedule."""
    beside = shutil.which("dkrr", path=os.path.dirname(sys.executable))
    parser = argparse.ArgumentParser(description="Run dkrr retrain from Prefect.")
    parser.add_argument("job", metavar="RETRAIN.toml", type=os.path.abspath)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--cron", metavar="EXPRESSION", help='serve a deployment with this schedule, as "15 2 * * *"')
    when.add_argument("--every", type=float, metavar="SECONDS", help="the same, at this interval")
    parser.add_argument("--name", default="retrain", help="of the deployment (%(default)s)")
    parser.add_argument("--dkrr", default=beside or "dkrr", help="the program (%(default)s)")
    given = parser.parse_args()
    if given.cron is None and given.every is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the command would go on without us
        try:
            retrain_flow(given.job, given.dkrr)
        except CommandEnded as exc:
            sys.exit(exc.code)
        return
    if not PREFECT_API_URL.value():
        parser.error(
            "a schedule needs a Prefect server, and PREFECT_API_URL names none: start one with `prefect server start`"
        )
    retrain_flow.serve(
        name=given.name,
        cron=given.cron,
        interval=None if given.every is None else timedelta(seconds=given.every),
        parameters={"job": given.job, "dkrr": given.dkrr},
        limit=1,  # a second one at the same time would end with 8 (locked)
    )


if __name__ == "__main__":
    main()
