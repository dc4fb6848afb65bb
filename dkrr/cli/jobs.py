"""Commands about a job: its file, its rows, its plan, its fit and search, retraining, and what its model predicts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dkrr.cli.app import column, json_option, main, missing_option, print_facts, reading_options, show
from dkrr.cli.models import model_location, registry_option
from dkrr.cli.runs import ProgressDisplay
from dkrr.errors import JobFileError, ParameterError, RefusedError
from dkrr.store.interruption import resumable

path_type = click.Path(path_type=Path)
target_help = "Target column: a name or a number (-1 is the last); may be repeated."
target_option = click.option("--target", multiple=True, type=column, metavar="NAME", help=target_help)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """JOB, and what `dkrr init` takes where JOB is data."""
    for option in (json_option, missing_option, target_option, click.argument("job")):
        command = option(command)
    return command


def job_file(text: str, command: str, target: tuple[str | int, ...], reading: dict[str, Any]) -> Path:
    """The job file that a text means: itself, or for data the one that is written for it."""
    if text.endswith(".toml"):
        for name in ["target"] * bool(target) + list(reading):
            raise click.UsageError(f"--{name} is for data; this is a job file, which has [data] {name}")
        return Path(text)
    from dkrr.jobs.init import is_data, write_job

    if os.path.isfile(os.path.join(text, "job.json")):
        raise JobFileError(f"{text} is a run, not a job file", hint=f"`dkrr resume {text}` goes on with it")
    if not target and not is_data(text):
        return Path(text)
    path, is_new = write_job(text, list(target), reading, command=command)
    click.echo(f"wrote {path}" if is_new else f"{path} is there already and is the job for this", err=True)
    return path


@main.command("init")
@click.argument("data")
@target_option
@missing_option
@reading_options
@click.option("-o", "--output", type=path_type, help="File to write, instead of stdout.")
def init_command(data: str, target: tuple[str | int, ...], output: Path | None, reading: dict[str, Any]) -> None:
    """Print a commented job file for DATA, with whitening and a gamma from the median distance of its rows."""
    from dkrr.jobs.init import init_job
    from dkrr.store.documents import create_bytes

    exists = JobFileError(f"{output} exists", hint="choose another name or remove it")
    if output is not None and os.path.lexists(output):
        raise exists
    text = init_job(data, list(target) or None, base=None if output is None else output.parent, reading=reading)
    if output is None:
        click.echo(text, nl=False)
    elif create_bytes(output.parent, output.name, text.encode()) is None:
        raise exists
    else:
        click.echo(f"wrote {output}", err=True)


@main.command("ingest")
@click.argument("source")
@click.argument("dest", required=False)
@target_option
@click.option(
    "--features", multiple=True, type=column, metavar="NAME", help="Feature column, instead of all others; repeatable."
)
@click.option("--weight", type=column, metavar="NAME", help="Column of sample weights.")
@missing_option
@reading_options
@click.option("--one-hot", is_flag=True, help="Turn the classes of the target into one column each.")
@click.option("--append", is_flag=True, help="Add the rows to the data set that DEST holds, as one generation.")
@click.option("--label", metavar="TEXT", help="What the generation is called; appended once under this name.")
@click.option("--drop-generation", multiple=True, type=int, metavar="K", help="Take generation K out; repeatable.")
@click.option("--keep-generations", type=click.IntRange(min=1), metavar="K", help="Keep the last K generations.")
@click.option("--keep-rows", type=click.IntRange(min=1), metavar="M", help="Keep the last M rows.")
def ingest_command(
    source: str,
    dest: str | None,
    target: tuple[str | int, ...],
    features: tuple[str | int, ...],
    drop_generation: tuple[int, ...],
    keep_generations: int | None,
    keep_rows: int | None,
    reading: dict[str, Any],
    **options: Any,
) -> None:
    """Bring the rows of SOURCE into the data set DEST, or take rows out of it.

    SOURCE is a .csv, .csv.gz, .parquet, .npy or .zarr, or sklearn:digits, or generate:friedman?n=20480&d=10.

    With --drop-generation, --keep-generations or --keep-rows the data set becomes a new version with fewer rows, after
    the append if there is one; without SOURCE (`dkrr ingest DEST --keep-rows 100000`) nothing else happens.
    """
    from dkrr.dataset import drop_generations, ingest, keep_last, open_dataset
    from dkrr.dataset.writer import check_generations
    from dkrr.errors import DkrrError, told

    keeps, append = keep_generations is not None or keep_rows is not None, options["append"]
    takes_out = bool(drop_generation) or keeps
    refusals = {
        "DEST is missing: where shall the rows go?": dest is None and not takes_out,
        "rows are taken out of a data set by itself, or after --append": takes_out and dest is not None and not append,
        "--keep-generations or --keep-rows, not both": keep_generations is not None and keep_rows is not None,
        "--label names an append: give --append as well": options["label"] is not None and not append,
    }
    for message in (message for message, is_made in refusals.items() if is_made):
        raise click.UsageError(message)
    if dest is not None:
        if drop_generation:  # before the append, which a corrected command would repeat
            check_generations(open_dataset(dest), drop_generation)
        dataset = ingest(
            source, dest, target=list(target) or None, features=list(features) or None, **options, **reading
        )
    try:
        if drop_generation:
            dataset = drop_generations(dest or source, drop_generation)
        if keeps:
            dataset = keep_last(dest or source, generations=keep_generations, rows=keep_rows)
    except (DkrrError, KeyboardInterrupt) as exc:
        if dest is None:
            raise
        error = told(exc)
        said = f"{source} has been appended: leave it out next time (`dkrr ingest {dest} ...`)"
        error.hint = f"{error.hint}; {said}" if error is exc else said
        raise error from exc
    dropped = [("dropped", f"{dataset.num_dropped:,} rows with missing values")]
    print_facts(
        [
            ("data set", dataset.path),
            ("rows", f"{dataset.num_rows:,}"),
            *(dropped if dataset.num_dropped else []),
            ("generations", len(dataset.generations)),
            ("features", dataset.num_features),
            ("targets", ", ".join(dataset.target_names) or "none"),
        ]
    )


@main.command("plan")
@job_options
@reading_options
def plan_command(job: str, target: tuple[str | int, ...], reading: dict[str, Any], as_json: bool) -> None:
    """Say what JOB needs (memory, disk, tasks, time), and refuse (exit code 3) what cannot fit.

    JOB may be data: its job file is then written first, as for `dkrr fit`.
    """
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(
        job_file(job, "plan", target, reading)
    )  # before the slow imports: most refusals are in the file
    from dkrr.jobs.plan import plan

    result = plan(spec)
    show(as_json, result.to_dict(), result.facts(), "plan")
    result.check()


@main.command("fit")
@job_options
@reading_options
def fit_command(job: str, target: tuple[str | int, ...], reading: dict[str, Any], as_json: bool) -> None:
    """Run JOB. Interrupted and started again, it continues with what is finished.

    JOB may be data, with --target: the job file that `dkrr init` makes is then written to the present folder, under the
    name of the data, and run. A file that is there already is never replaced; one that is the same is used.
    """
    from dkrr.jobs.spec import JobSpec

    path = job_file(job, "fit", target, reading)
    spec, source = JobSpec.load(path), path.read_bytes()
    from dkrr.jobs.run import fit_job

    with resumable(), ProgressDisplay() as progress:
        summary = fit_job(spec, progress=progress, source=source)
    show(as_json, summary.to_dict(), summary.facts(), "fit")


@main.command("tune")
@click.argument("job", type=path_type)
@click.option("-o", "--output", required=True, type=path_type, help="Job file to write.")
@click.option("--rows", type=click.IntRange(min=1), help="Most rows of the subsets; [tune] rows by default.")
@click.option("--time", "budget_seconds", type=float, metavar="SECONDS", help="Time for the search, about 8 minutes.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the subset.")
@click.option("--picture/--no-picture", default=True, help="Draw the search.")
@json_option
def tune_command(job: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Choose kernel, width (shared, and one for each feature) and alpha for JOB, and write a job that uses them.

    Searches on random subsets of the training rows, compares the best on more of them. Interrupted and started again,
    it continues with the trials that are finished.
    """
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(job)
    from dkrr.jobs.tune import tune_job

    with resumable(), ProgressDisplay() as progress:
        summary = tune_job(spec, output, progress=progress, **options)
    show(as_json, summary.to_dict(), summary.facts(), "tune")
    click.echo(summary.where, err=as_json)


@main.command("retrain")
@click.argument("job", type=path_type, metavar="RETRAIN.TOML")
@json_option
@click.option("--dry-run", is_flag=True, help="Only say which batches would be appended or refused, or are missing.")
def retrain_command(job: Path, as_json: bool, dry_run: bool) -> None:
    """Add the rows that were delivered, fit, judge, and promote what passes; with nothing new, do nothing.

    Started again after any interruption it does what is missing. Exit code 7: a batch or the model was refused, and the
    model in production stays. Retry only after 6 (cluster) and 75 (interrupted). With --dry-run nothing is changed, and
    refused batches are no error.
    """
    from dkrr.jobs.retrain_spec import RetrainSpec

    spec = RetrainSpec.load(job)
    from dkrr.jobs.retrain import retrain

    refused: RefusedError | None = None
    with resumable(), ProgressDisplay() as progress:
        try:
            summary = retrain(spec, progress=progress, dry_run=dry_run)
        except RefusedError as exc:
            refused, summary = exc, exc.summary
    show(as_json, summary.to_dict(), summary.facts())
    if refused is not None:
        raise refused


@main.command("predict")
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
@click.option("--proba", "probabilities", is_flag=True, help="Probabilities of the classes, of a logistic loss.")
@click.option("--overwrite", is_flag=True, help="Replace what is at OUTPUT though dkrr did not write it so.")
@click.option("--keep", multiple=True, metavar="COLUMN", help="Copy a column of DATA, e.g. an id; repeatable.")
@reading_options
@registry_option
def predict_command(
    model: str,
    data: str,
    output: str,
    overwrite: bool,
    keep: tuple[str, ...],
    registry: str | None,
    reading: dict[str, Any],
    **asked: Any,
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
    from dkrr.jobs.predict import Extras, predict_job
    from dkrr.jobs.registry import parse_reference

    if asked["noise"] and not asked["std"]:
        raise ParameterError("--noise without --std", hint="it says which standard deviation is meant")
    given: dict[str, Any] = {"extras": Extras(**asked), "reading": reading, "overwrite": overwrite, "keep": keep}
    wanted = parse_reference(model) or model_location(model)
    with resumable(), ProgressDisplay() as progress:
        done = predict_job(wanted, data, output, registry=registry, **given, progress=progress)
    version = [] if done.version is None else [("version", done.version.id)]
    print_facts([("predictions", output), ("rows", f"{done.num_rows:,}"), *version])


@main.command("evaluate")
@click.argument("model")
@click.argument("data")
@click.option(
    "--metric",
    type=click.Choice(["rmse", "r2", "accuracy", "balanced_accuracy", "log_loss", "pinball"]),
    help="Only this score.",
)
@click.option("--interval", type=float, metavar="COVERAGE", help="Count the rows inside these intervals (default 0.9).")
@missing_option
@reading_options
@registry_option
@json_option
def evaluate_command(
    model: str,
    data: str,
    metric: str | None,
    interval: float | None,
    registry: str | None,
    as_json: bool,
    reading: dict[str, Any],
) -> None:
    """Score MODEL (a model.zarr, a run, or NAME@ALIAS of a registry) on the rows of DATA, whose targets are known."""
    from dkrr.jobs.predict import evaluate_job

    location = model_location(model, registry)
    with resumable(), ProgressDisplay() as progress:
        scores = evaluate_job(location, data, metric=metric, intervals=interval, reading=reading, progress=progress)
    show(as_json, scores, [(k, f"{value:.6g}" if isinstance(value, float) else value) for k, value in scores.items()])
