"""Log what a retrain job did to MLflow: one run for each version, and the model itself.

You need it to see dkrr's models beside others. The registry of dkrr stays what decides about production: a tracking
server that is away costs a warning, and no model. The model is logged with its loader by name
(this module); nothing is pickled. Needs ``dkrr[mlflow]``.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dkrr.errors import ParameterError
from dkrr.jobs.registry import NamedModel
from dkrr.jobs.retrain_spec import MlflowSpec
from dkrr.markup import cut
from dkrr.models.model import Model, load_model
from dkrr.store.files import is_url

if TYPE_CHECKING:
    from dkrr.jobs.retrain import RetrainSummary

logger = logging.getLogger("dkrr.retrain")


def log_tick(spec: MlflowSpec, summary: RetrainSummary, named: NamedModel) -> str | None:
    """Log the version that a tick fitted; the id of MLflow's run, None where nothing was fitted or logged.

    A version is logged once: a run with its id that is there already is found.

    Raises
    ------
    ParameterError
        MLflow is not installed.
    """
    if summary.version is None:
        return None
    mlflow = load_mlflow()
    try:
        return _log(mlflow, spec, summary, named)
    except Exception as exc:  # whatever a client of a server raises: the model is where it belongs, whoever notes it
        logger.warning("%s was not logged to MLflow (%s)", summary.version, cut(repr(exc)))
        return None


def load_mlflow() -> Any:
    """The library, with its telemetry off.

    Raises
    ------
    ParameterError
        It is not installed.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    try:
        import mlflow
    except ImportError as exc:
        raise ParameterError("[mlflow] needs MLflow, which is not installed", hint="install dkrr[mlflow]") from exc
    return mlflow


def _log(mlflow: Any, spec: MlflowSpec, summary: RetrainSummary, named: NamedModel) -> str:
    mlflow.set_tracking_uri(spec.tracking_uri)
    experiment = mlflow.set_experiment(spec.experiment)
    where = f"tags.dkrr_model = '{summary.name}' and tags.dkrr_version = '{summary.version}'"
    found = mlflow.search_runs([experiment.experiment_id], filter_string=where, output_format="list")
    if found:
        return str(found[0].info.run_id)
    version = named.resolve(str(summary.version))
    with mlflow.start_run(run_name=f"{summary.name} {summary.version}") as run:
        mlflow.set_tags(
            {
                "dkrr_model": summary.name,
                "dkrr_version": summary.version,
                "dkrr_outcome": summary.outcome,
                "dkrr_model_digest": version.model_digest,
            }
        )
        mlflow.log_params({f"model.{name}": value for name, value in version.facts.get("model", {}).items()})
        mlflow.log_metrics(_metrics(summary))
        mlflow.log_dict(summary.to_dict(), "report.json")
        mlflow.log_text(f"{summary}\n", "report.txt")
        if spec.log_model and not is_url(version.model_path):
            mlflow.pyfunc.log_model(name="model", loader_module=__name__, data_path=version.model_path)
        return str(run.info.run_id)


@dataclass
class Predictor:
    """What ``mlflow.pyfunc.load_model`` wraps: a model.zarr with MLflow's ``predict``."""

    model: Model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Predictions for rows of features: a data frame with the model's columns, or an array."""
        if hasattr(model_input, "columns"):
            model_input = self.model.matched(model_input).to_numpy(dtype=np.float64)
        return self.model.predict(model_input)


def _load_pyfunc(data_path: str) -> Predictor:  # MLflow finds the loader by this name
    return Predictor(load_model(data_path))


def _metrics(summary: RetrainSummary) -> dict[str, float]:
    found: dict[str, Any] = {
        "num_rows": summary.num_rows,
        "relative_residual": max(summary.fit.get("relative_residual") or [], default=None),
        "gap": max(summary.fit.get("gap") or [], default=None),
        "seconds": summary.fit.get("seconds"),
    }
    score = summary.fit.get("score") or {}
    found |= {name: score.get(name) for name in ("rmse", "r2", "pinball", "accuracy", "balanced_accuracy", "log_loss")}
    # of several targets the mean; what was not finite became None
    values = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
    return {name: float(np.mean(items)) for name, items in values.items() if items and None not in items}
