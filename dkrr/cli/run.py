"""Commands that work on a job or on its model: ``plan``, ``fit``, ``tune``, ``retrain``, ``predict``, ``evaluate``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dkrr.cli.data import column, given_options, missing_option, text_options
from dkrr.cli.errors import Command, resumable
from dkrr.cli.models import model_location, registry_option
from dkrr.cli.output import print_facts, print_json, print_table
from dkrr.cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from dkrr.linalg.inference.leave_one_out import IntervalMethod

__all__ = [
    "evaluate_command",
    "fit_command",
    "plan_command",
    "predict_command",
    "retrain_command",
    "tune_command",
]

job_argument = click.argument("job")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What `dkrr init` takes, for a command that takes data in the place of a job file."""
    option = click.option("--target", multiple=True, metavar="NAME", help="Target column, where JOB is data.")
    return option(text_options(missing_option(command)))


def job_file(text: str, command: str, target: tuple[str, ...], **reading: Any) -> Path:
    """The job file that a text means: itself, or for data the one that is written for it."""
    reading = given_options(**reading)
    if text.endswith(".toml"):
        for name in ["target"] * bool(target) + list(reading):
            raise click.UsageError(f"--{name} is for data; {text} is a job file, which has [data] {name}")
        return Path(text)
    from dkrr.errors import JobFileError
    from dkrr.jobs.init import is_data, write_job

    if os.path.isfile(os.path.join(text, "job.json")):
        raise JobFileError(f"{text} is a run, not a job file", hint=f"`dkrr resume {text}` goes on with it")
    if not target and not is_data(text):
        return Path(text)
    path, is_new = write_job(text, [column(name) for name in target], reading, command=command)
    click.echo(f"wrote {path}" if is_new else f"{path} is there already and is the job for this", err=True)
    return path


@click.command("plan", cls=Command)
@job_argument
@data_options
@json_option
def plan_command(job: str, as_json: bool, **options: Any) -> None:
    """Say what JOB needs (memory, disk, tasks, time), and refuse (exit code 3) what cannot fit.

    JOB may be data: its job file is then written first, as for `dkrr fit`.
    """
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(job_file(job, "plan", **options))  # before the slow imports: most mistakes are in the file
    from dkrr.jobs.plan import plan

    result = plan(spec)
    if as_json:
        print_json(result.to_dict())
    else:
        print_table(result.table())
    result.check()


@click.command("fit", cls=Command)
@job_argument
@data_options
@json_option
def fit_command(job: str, as_json: bool, **options: Any) -> None:
    """Run JOB. Interrupted and started again, it continues with what is finished.

    JOB may be data, with --target: the job file that `dkrr init` makes is then written to the present folder, under the
    name of the data, and run. A file that is there already is never replaced; one that is the same is used.
    """
    from dkrr.jobs.spec import JobSpec

    path = job_file(job, "fit", **options)
    spec = JobSpec.load(path)
    from dkrr.jobs.run import fit_job

    with resumable(), ProgressDisplay() as progress:
        summary = fit_job(spec, progress=progress, source=path.read_bytes())
    if as_json:
        print_json(summary.to_dict())
    else:
        print_table(summary.table())


@click.command("tune", cls=Command)
@click.argument("job", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Job file to write.")
@click.option("--rows", type=click.IntRange(min=1), help="Most rows of the subsets; [tune] rows by default.")
@click.option("--time", "budget_seconds", type=float, metavar="SECONDS", help="Time for the search, about 8 minutes.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the subset.")
@click.option("--picture/--no-picture", default=True, help="Draw the search.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def tune_command(
    job: Path,
    output: Path,
    rows: int | None,
    budget_seconds: float | None,
    seed: int | None,
    picture: bool,
    as_json: bool,
) -> None:
    """Choose kernel, width (shared, and one for each feature) and alpha for JOB, and write a job that uses them.

    Searches on random subsets of the training rows, compares the best on more of them. Interrupted and started again,
    it continues with the trials that are finished.
    """
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(job)
    from dkrr.jobs.tune import tune_job

    with resumable(), ProgressDisplay() as progress:
        summary = tune_job(
            spec,
            output,
            rows=rows,
            budget_seconds=budget_seconds,
            seed=seed,
            picture=picture,
            progress=progress,
        )
    if as_json:
        print_json(summary.to_dict())
    else:
        print_table(summary.table())
    click.echo(summary.where, err=as_json)


@click.command("retrain", cls=Command)
@click.argument("job", type=click.Path(path_type=Path), metavar="RETRAIN.TOML")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--dry-run", is_flag=True, help="Only say which batches would be appended or refused, or are missing.")
def retrain_command(job: Path, as_json: bool, dry_run: bool) -> None:
    """Add the rows that were delivered, fit, judge, and promote what passes; with nothing new, do nothing.

    Started again after any interruption it does what is missing. Exit code 7: a batch or the model was refused, and the
    model in production stays. Retry only after 6 (cluster) and 75 (interrupted). With --dry-run nothing is changed, and
    refused batches are no error.
    """
    from dkrr.errors import RefusedError
    from dkrr.jobs.retrain.spec import RetrainSpec

    spec = RetrainSpec.load(job)
    from dkrr.jobs.retrain.run import retrain

    refused: RefusedError | None = None
    with resumable(), ProgressDisplay() as progress:
        try:
            summary = retrain(spec, progress=progress, dry_run=dry_run)
        except RefusedError as exc:
            refused, summary = exc, exc.summary
    if as_json:
        print_json(summary.to_dict())
    else:
        print_facts(summary.lines())
    if refused is not None:
        raise refused


@click.command("predict", cls=Command)
@click.argument("model")
@click.argument("data")
@click.option("-o", "--output", required=True, help="File to write: .zarr, .npy, .parquet or .csv.")
@click.option("--std", is_flag=True, help="Add a column with the standard deviation of each prediction.")
@click.option("--noise", is_flag=True, help="Standard deviations of new observations, and not of the function.")
@click.option("--interval", type=float, metavar="COVERAGE", help="Add the ends of prediction intervals, e.g. 0.9.")
@click.option(
    "--method",
    type=click.Choice(["jackknife", "normalised", "gaussian"]),
    default="jackknife",
    show_default=True,
    help="What intervals are made of.",
)
@click.option("--proba", is_flag=True, help="Probabilities of the classes, of a logistic loss.")
@click.option("--overwrite", is_flag=True, help="Replace what is at OUTPUT though dkrr did not write it so.")
@click.option("--keep", multiple=True, metavar="COLUMN", help="Copy a column of DATA, e.g. an id; repeatable.")
@text_options
@registry_option
def predict_command(
    model: str,
    data: str,
    output: str,
    std: bool,
    noise: bool,
    interval: float | None,
    method: IntervalMethod,
    proba: bool,
    overwrite: bool,
    keep: tuple[str, ...],
    registry: str | None,
    **reading: Any,
) -> None:
    """Predict the rows of DATA with MODEL (a model.zarr, the directory of a run, or NAME@ALIAS of a registry).

    Every row of DATA gets a prediction: one with a missing value is an error. Where the model and DATA have names of
    columns, names decide: their order is free, others are left aside. A model of classes adds the label of the largest
    score to .csv and .parquet; OUTPUT.json has the classes. --keep takes .csv or .parquet to either.

    NAME@production is looked up once. OUTPUT.json beside the output says which model made it, of which rows; earlier
    predictions are replaced when they are still what it describes, anything else only with --overwrite, MODEL and DATA
    never.

    Standard deviations need the float64 factor of the fit (or at most 6,000 training rows), jackknife intervals a fit
    with [evaluate] intervals.
    """
    from dkrr.errors import ParameterError
    from dkrr.jobs.registry import parse_reference
    from dkrr.jobs.uncertain import Asked

    if noise and not std:
        raise ParameterError("--noise without --std", hint="it says which standard deviation is meant")
    asked = Asked(std=std, noise=noise, interval=interval, method=method, probabilities=proba)
    given: dict[str, Any] = {"asked": asked, "reading": given_options(**reading), "overwrite": overwrite, "keep": keep}
    reference = parse_reference(model)
    if reference is not None:
        from dkrr.jobs.scoring import predict_registered

        with resumable(), ProgressDisplay() as progress:
            done = predict_registered(reference, data, output, registry=registry, **given, progress=progress)
        print_facts([("predictions", output), ("rows", f"{done.num_rows:,}"), ("version", done.version.id)])
        return
    from dkrr.jobs.serve import predict_job

    with resumable(), ProgressDisplay() as progress:
        num_rows = predict_job(model_location(model), data, output, **given, progress=progress)
    print_facts([("predictions", output), ("rows", f"{num_rows:,}")])


@click.command("evaluate", cls=Command)
@click.argument("model")
@click.argument("data")
@click.option(
    "--metric",
    type=click.Choice(["rmse", "r2", "accuracy", "balanced_accuracy", "log_loss", "pinball"]),
    help="Only this score.",
)
@click.option("--interval", type=float, metavar="COVERAGE", help="Count the rows inside these intervals (default 0.9).")
@text_options
@missing_option
@registry_option
@json_option
def evaluate_command(
    model: str,
    data: str,
    metric: str | None,
    interval: float | None,
    registry: str | None,
    as_json: bool,
    **reading: Any,
) -> None:
    """Score MODEL (a model.zarr, a run, or NAME@ALIAS of a registry) on the rows of DATA, whose targets are known."""
    from dkrr.jobs.serve import evaluate_job

    location, given = model_location(model, registry), given_options(**reading)
    with resumable(), ProgressDisplay() as progress:
        scores = evaluate_job(location, data, metric=metric, intervals=interval, reading=given, progress=progress)
    if as_json:
        print_json(scores)
    else:
        print_facts((name, f"{value:.6g}" if isinstance(value, float) else value) for name, value in scores.items())
