"""The loader that MLflow finds by name in the models that dkrr logs: a model.zarr with MLflow's ``predict``."""

from __future__ import annotations

from typing import Any

import numpy as np

from dkrr.models.model import Model, load_model

__all__ = ["Predictor"]


class Predictor:
    """What ``mlflow.pyfunc.load_model`` wraps."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Predictions for rows of features: a data frame with the model's columns, or an array."""
        if hasattr(model_input, "columns"):
            model_input = self.model.matched(model_input).to_numpy(dtype=np.float64)
        return self.model.predict(model_input)


def _load_pyfunc(data_path: str) -> Predictor:
    return Predictor(load_model(data_path))
