"""From a job to the same job with kernel, widths and alpha chosen: `dkrr tune`.

Beside the new job file BEST.toml the search leaves BEST.trials.jsonl (one line a trial: what it began with, rows, what
it found, seconds), BEST.search.json (candidates, slices and trials: all that a report needs) and BEST.search.png. The
subset and a document for each trial are in the store, under ``tune``: interrupted and started again, the search
continues with the trials that are finished.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dkrr.engine.tasks import DaskExecutor, Progress
from dkrr.errors import DkrrError, JobFileError, StoreError
from dkrr.fit.inputs import nothing_new
from dkrr.jobs import toml
from dkrr.jobs.plan import make_plan
from dkrr.jobs.prepare import Prepared, check_loss_targets, prepare
from dkrr.jobs.run import job_executor
from dkrr.jobs.spec import JobSpec, TuneSpec
from dkrr.markup import Facts, known
from dkrr.selection.choice import TuneResult, TuneSettings
from dkrr.selection.tuning import tune
from dkrr.store.documents import create_bytes
from dkrr.store.files import join, name_of, parent_of, read_json, relative_to, write_file
from dkrr.store.lease import hold_lock

# no trial is still running when it took so long and more time than the whole search has
LEAST_STALL_SECONDS = 600.0

_COLOURS = {
    "rbf": "tab:blue",
    "matern12": "tab:orange",
    "matern32": "tab:green",
    "matern52": "tab:red",
    "laplacian": "tab:purple",
}
_MARKERS = {"search": "o", "slice": "s", "check": "D", "folds": "s"}


@dataclass(kw_only=True)
class TuneSummary:
    """What a search chose, and where that stands."""

    path: str
    num_rows: int
    settings: TuneSettings
    result: TuneResult
    run_directory: str
    job_directory: str
    foreseen_seconds: dict[str, float]
    has_picture: bool = True

    @property
    def files(self) -> dict[str, str | None]:
        """What stands beside the job file."""
        found: dict[str, str | None] = {name: str(place) for name, place in _beside(Path(self.path)).items()}
        return found if self.has_picture else found | {"picture": None}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = self.result.to_dict()
        return (
            {name: getattr(self, name) for name in ("path", "num_rows", "run_directory", "foreseen_seconds")}
            | self.files
            | {name: found[name] for name in ("best", "least_error", "candidates", "notes", "seconds")}
            | {"num_trials": len(self.result.records)}
        )

    @property
    def where(self) -> str:
        """A line that says where a fit of the job file will be."""
        said = f"dkrr fit {self.path}: the run will be {self.run_directory}"
        changed = self.run_directory != self.job_directory
        return said + (f" ([output] directory of the job that was tuned is {self.job_directory})" if changed else "")

    def facts(self) -> Facts:
        """The finalists of a search beside each other, and where everything is."""
        result, loss = self.result, self.settings.fold_loss
        error = "leave-one-out, in standard deviations of the target"
        if loss is not None:
            error = f"{loss.words} of {loss.num_folds} folds, less is better"
        return [("", line) for line in self.candidates()] + known(
            ("error", f"{error}; s.e.: of its difference to the smallest"),
            *self._cost_and_saving(),
            ("trials", f"{len(result.records)}, {result.seconds:.0f} s"),
            *(("note", note) for note in result.notes),
            ("job", self.path),
            *((name + " in" * (name != "picture"), place) for name, place in self.files.items()),
        )

    def candidates(self) -> list[str]:
        """The finalists as lines of aligned columns, below a head."""
        is_square = self.settings.fold_loss is None
        penalty = "alpha" if is_square else "C"
        rows = [["kernel", "widths", "from", penalty, "error", "s.e.", "condition", "rows", ""]]
        rows += [
            [
                candidate.family,
                "per feature" if candidate.kind == "per_feature" else f"{candidate.widths[0]:.4g}",
                candidate.origin + (f" x {candidate.factor:.2g}" if candidate.factor != 1.0 else ""),
                f"{candidate.alpha if is_square else _C_of(candidate.alpha):.3g}",
                f"{candidate.loo_rmse:.4f}",
                "" if candidate.excess_error is None else f"{candidate.excess_error:.4f}",
                "" if candidate.condition is None else f"{candidate.condition:.1e}",
                f"{candidate.num_rows:,}",
                self.result.mark(candidate),
            ]
            for candidate in self.result.candidates
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]

    def _cost_and_saving(self) -> Facts:
        """What it costs to fit what was chosen instead of the smallest error, and what it saves."""
        best, least, foreseen_seconds = self.result.best, self.result.least_error, self.foreseen_seconds
        foreseen = f"about {foreseen_seconds['best']:.0f} s" if "best" in foreseen_seconds else ""
        if best is least:
            nothing = "nothing: the smallest error" + (
                " is the best conditioned of those as good" * bool(best.condition)
            )
            return known(("cost", nothing), ("fit", foreseen))
        cost = best.loo_rmse / least.loo_rmse - 1.0 if least.loo_rmse else 0.0
        saved = f"condition {best.condition:.1e} instead of {least.condition:.1e}"
        if "least_error" in foreseen_seconds and foreseen:
            other = f"about {foreseen_seconds['least_error']:.0f} s"
            saved += f", a fit of {foreseen} " + ("either way" if other == foreseen else f"instead of {other}")
        return [("cost", f"error +{100 * cost:.2f} %, as good as the smallest"), ("saved", saved)]


def tune_job(
    job: JobSpec | str | Path,
    output: str | os.PathLike[str],
    *,
    rows: int | None = None,
    budget_seconds: float | None = None,
    seed: int | None = None,
    picture: bool = True,
    progress: Progress | None = None,
) -> TuneSummary:
    """Choose kernel, widths and alpha for the training rows of a job, and write the job that uses them.

    Parameters
    ----------
    output
        The job file to write; it must not exist.
    rows, budget_seconds, seed
        Instead of those of ``[tune]``.
    picture
        Whether to draw the search.

    Raises
    ------
    JobFileError
        ``output`` exists, or appeared while the search ran, or beside it what a search would write and no search wrote;
        or the job is of a kind that has no such choice.
    LockedError
        Another search writes the same file.
    """
    if not isinstance(job, JobSpec):
        job = JobSpec.load(job)
    path = Path(output).absolute()
    settings = _settings(job, rows=rows, budget_seconds=budget_seconds, seed=seed)
    _refuse(job, path)
    with hold_lock(str(path)):
        store = job.store
        with nothing_new(store):
            prepared = prepare(job, store)
        if settings.fold_loss is not None:
            check_loss_targets(job, prepared.train)
        with job_executor(job) as executor:
            if isinstance(executor, DaskExecutor):
                executor.stall_seconds = max(LEAST_STALL_SECONDS, settings.budget_seconds)
            result = tune(
                prepared.train,
                settings=settings,
                store=store,
                executor=executor,
                fit_intercept=job.model.fit_intercept,
                progress=progress,
            )
        _refuse(job, path)  # the first time was a while ago
        train = prepared.train
        foreseen = _foreseen_seconds(job, path, result, prepared, store)
        document = {
            "format": 1,
            "num_rows": train.num_rows,
            "feature_names": list(train.feature_names),
            "picture": picture,
            "foreseen_seconds": foreseen,
            **result.to_dict(),
        }
        summary = TuneSummary(
            path=str(path),
            num_rows=train.num_rows,
            settings=settings,
            result=result,
            run_directory=_job(job, path, result.best.keys()).output.directory,
            job_directory=job.output.directory,
            foreseen_seconds=foreseen,
            has_picture=picture,
        )
        lines = [json.dumps(record, sort_keys=True) for record in result.records]
        beside = _beside(path)
        with contextlib.suppress(StoreError):
            if not picture and (read_json(path.parent, beside["search"].name) or {}).get("picture"):
                beside["picture"].unlink(missing_ok=True)  # of the search whose figures go now
        write_file(beside["search"], json.dumps(document, indent=1, sort_keys=True).encode())
        write_file(beside["trials"], "".join(f"{line}\n" for line in lines).encode())
        if picture:
            draw_search(document, str(beside["picture"]))
        # last: when the job file is there, so is all that it came from
        text = _job_text(job, summary, train.names)
        if create_bytes(path.parent, path.name, text.encode()) is None:
            raise _exists(path)
    return summary


def _foreseen_seconds(job: JobSpec, path: Path, result: TuneResult, prepared: Prepared, store: str) -> dict[str, float]:
    """What a plan foresees for the fit of the choice ("best"), and for that of the smallest error where it is another.

    Nothing decides by it: the samples of a plan take a second or two, and what they say of seconds is rough.
    """
    found = {}
    wanted = {"best": result.best} | ({} if result.best is result.least_error else {"least_error": result.least_error})
    for name, candidate in wanted.items():
        with contextlib.suppress(DkrrError):  # what a fit says of it is said when it is fitted
            planned = make_plan(_job(job, path, candidate.keys()), prepared, store)
            found[name] = round(planned.total_seconds, 3)
    return found


def _settings(job: JobSpec, **given: Any) -> TuneSettings:
    """Those of ``[tune]``, or others where they are given; smaller ``rows`` make the search smaller too."""
    found = replace((job.tune or TuneSpec()).settings(), fold_loss=job.fold_loss())
    changed = {name: value for name, value in given.items() if value is not None}
    if "rows" in changed:
        changed["search_rows"] = tuple(sorted({min(size, changed["rows"]) for size in found.search_rows}))
    return replace(found, **changed)


def _beside(path: Path) -> dict[str, Path]:
    """What a search leaves beside its job file, which need not end in .toml."""
    endings = {"trials": "trials.jsonl", "search": "search.json", "picture": "search.png"}
    return {name: path.with_name(f"{path.name.removesuffix('.toml')}.{end}") for name, end in endings.items()}


def _refuse(job: JobSpec, path: Path) -> None:
    """Find before the search what would be wrong after it."""
    beside, search = _beside(path), None
    with contextlib.suppress(StoreError):
        search = read_json(path.parent, beside["search"].name)
    # what an earlier search left is known by the document that it wrote first
    is_ours = isinstance(search, dict) and search.keys() >= {"format", "num_rows", "feature_names"}
    if is_ours and not beside["search"].is_symlink():
        # and drew no picture, where it says so
        beside = {} if search.get("picture", True) else {"picture": beside["picture"]}  # type: ignore[union-attr]
    for found in [path, *beside.values()]:
        if os.path.lexists(found):
            raise _exists(found)
    if job.model.kernel == "precomputed":
        raise JobFileError("[model] kernel = 'precomputed' has no width", hint="give the rows")
    if job.solver.name == "primal":
        raise JobFileError("[solver] name = 'primal', and kernels with a width have no features", hint="leave it out")
    _job(job, path, {"kernel": "rbf", "gamma": 1.0, "alpha": 1.0})  # raises what the solver does not allow
    path.parent.mkdir(parents=True, exist_ok=True)


def _exists(path: Path) -> JobFileError:
    return JobFileError(f"{path} exists", hint="choose another name or remove it")


def _job(job: JobSpec, path: Path, keys: dict[str, Any]) -> JobSpec:
    return JobSpec.from_dict(_document(job, path, keys), base=path.parent, name=path.stem)


def _document(
    job: JobSpec, path: Path, keys: dict[str, Any], features: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The job with another model, for a file at ``path``.

    ``features`` has the names that its widths belong to, in their order.
    """

    def near(text: str) -> str:
        return relative_to(text, str(path.parent)) or text

    document = job.written(near, exclude_unset=True, exclude={"tune"})
    by_default = job.model.loss != "square"
    if by_default:
        keys = {name: value for name, value in keys.items() if name != "alpha"} | {"C": _C_of(keys["alpha"])}
        keys |= {"loss": job.model.loss, **job.model.loss_parameters}
    intercept = {} if job.model.fit_intercept == by_default else {"fit_intercept": job.model.fit_intercept}
    document["model"] = {**keys, **intercept}
    if features:
        document["data"]["features"] = list(features)
    directory = job.output.directory
    if "{id}" not in directory:  # the run of the job itself, if there is one, stays
        own = path.stem if path.stem != name_of(directory) else f"{name_of(directory)}-tuned"
        directory = join(parent_of(directory), own)
    # rows that were ingested and split for the search are found again by the fit
    document["output"] = {**document.get("output", {}), "directory": near(directory), "store": near(job.store)}
    order = ["data", "evaluate", "model", "solver", "cluster", "storage", "output"]
    return {table: document[table] for table in order if document.get(table)}


def _C_of(alpha: float) -> float:
    """1 / (2 alpha), without the rounding of alpha."""
    return float(f"{0.5 / alpha:.12g}")


def _job_text(job: JobSpec, summary: TuneSummary, names: Sequence[str]) -> str:
    """The job file, with the candidates as a comment above its model."""
    result, settings = summary.result, summary.settings
    best, loss = result.best, settings.fold_loss
    what = "the smallest leave-one-out error"
    if loss is not None:
        what = f"the smallest {loss.words} of {loss.num_folds} folds"
    comment = [
        f"Chosen by dkrr tune (seed {settings.seed}) for {summary.num_rows:,} training rows: "
        f"of {len(result.records)} trials",
        f"the best conditioned of those as good as {what} on {best.num_rows:,} rows{', in' if loss is None else ','}",
        ("standard deviations of the target, " if loss is None else "")
        + "by the standard error (s.e.) of the difference:",
        "",
        *summary.candidates(),
        *(f"note: {note}" for note in result.notes),
    ]
    document = _document(job, Path(summary.path), best.keys(), names if best.widths.size > 1 else ())
    commented = "".join(f"# {line}".rstrip() + "\n" for line in comment)
    head = "# A job of dkrr: `dkrr plan` says what it needs, `dkrr fit` runs it.\n\n"
    return head + toml.dumps(document).replace("[model]\n", f"{commented}[model]\n", 1)


def draw_search(search: dict[str, Any], path: str) -> None:
    """Draw the document that `dkrr tune` leaves as BEST.search.json to a .png, .svg or .pdf file.

    The error of each trial, and of each alpha in the planes (width x alpha) that were computed. Nothing is
    interpolated: every point is an error that a trial found.
    """
    from matplotlib.figure import Figure  # it takes half a second to import

    planes, best = search["slices"], search["best"]
    figure = Figure(figsize=(4.8 * (1 + len(planes)), 4.2), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(planes), squeeze=False)[0]
    _draw_trials(first, search["trials"])
    for axes, plane in zip(others, planes, strict=True):
        for factor, row in zip(plane["factors"], plane["errors"], strict=True):
            axes.plot(plane["alphas"], row, marker=".", linewidth=0.8, label=f"widths x {factor:.2g}")
        axes.set(xlabel="alpha", ylabel=_error_name(plane), xscale="log")
        axes.set_title(f"{plane['kernel']}, {_widths_in_words(plane)}, {plane['num_rows']:,} rows", fontsize="medium")
        axes.legend(fontsize="small")
    figure.suptitle(
        f"{best['kernel']}, {_widths_in_words(best)}, alpha {best['alpha']:.3g}: "
        f"{_error_name(best)} {_error(best):.4f} on {best['num_rows']:,} of {search['num_rows']:,} rows"
    )
    # no date and no version in the file: the same search is the same picture
    form, picture = Path(path).suffix[1:], io.BytesIO()
    figure.savefig(picture, format=form, dpi=110, metadata={"Software": None} if form == "png" else None)
    write_file(Path(path), picture.getvalue())  # in the place of a link, not of what it names


def _error(found: dict[str, Any]) -> float:
    """Of a candidate or a trial: leave-one-out, or of folds."""
    return float(found["loo_rmse"] if "loo_rmse" in found else found["error"])


def _error_name(found: dict[str, Any]) -> str:
    """What the errors of a candidate or a plane are."""
    return f"held-out error ({found['metric'].replace('_', ' ')})" if "metric" in found else "leave-one-out error"


def _widths_in_words(candidate: dict[str, Any]) -> str:
    shared = candidate["widths_kind"] == "shared"
    return f"width {candidate['widths'][0]:.3g}" if shared else "one width for each feature"


def _draw_trials(axes: Any, trials: list[dict[str, Any]]) -> None:
    """The error that each trial ended with; filled: one width for each feature."""
    seen: set[str] = set()
    for trial in trials:
        axes.plot(
            trial["number"],
            _error(trial),
            marker=_MARKERS[trial["kind"]],
            markersize=5,
            linestyle="none",
            color=_COLOURS.get(trial["family"], "black"),
            fillstyle="full" if len(trial["widths"]) > 1 else "none",
            label="_" * (trial["family"] in seen) + trial["family"],  # a legend has each once
        )
        seen.add(trial["family"])
    axes.set(xlabel="trial (circle: search, square: slice or folds, diamond: check)", ylabel="error", yscale="log")
    axes.set_title("trials (filled: a width for each feature)", fontsize="medium")
    axes.legend(fontsize="small")
