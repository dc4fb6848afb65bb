"""The group of all commands. Imports nothing but click: ``dask`` loads it for every command of its own."""

from __future__ import annotations

import click

from dkrr._version import __version__
from dkrr.cli.data import ingest_command, init_command
from dkrr.cli.errors import CommandGroup
from dkrr.cli.inspect import doctor_command, gc_command, help_command, info_command
from dkrr.cli.models import models_command
from dkrr.cli.run import (
    evaluate_command,
    fit_command,
    plan_command,
    predict_command,
    retrain_command,
    tune_command,
)
from dkrr.cli.runs import (
    cancel_command,
    list_command,
    logs_command,
    report_command,
    resume_command,
    status_command,
    submit_command,
    wait_command,
)

__all__ = ["main"]


@click.group(name="krr", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dkrr")
def main() -> None:
    """Exact kernel ridge regression, out of core, on Dask and Zarr.

    Start with `dkrr init DATA > job.toml`, look at it with `dkrr plan job.toml`, run it with `dkrr fit job.toml`,
    or `dkrr submit job.toml` and walk away. `dkrr fit DATA --target NAME` writes such a file and runs it.

    `dkrr help job` lists the keys of a job file, `dkrr help exit-codes` what a command ends with.
    """


for command in (
    init_command,
    ingest_command,
    plan_command,
    fit_command,
    tune_command,
    predict_command,
    evaluate_command,
    submit_command,
    status_command,
    logs_command,
    wait_command,
    cancel_command,
    resume_command,
    list_command,
    report_command,
    info_command,
    doctor_command,
    gc_command,
    help_command,
    models_command,
    retrain_command,
):
    main.add_command(command)
