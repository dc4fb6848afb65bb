"""Retraining: new rows in, a model that was judged out, and nothing broken in between."""

from dkrr.jobs.retrain.run import RetrainSummary, retrain
from dkrr.jobs.retrain.spec import RetrainSpec

__all__ = ["RetrainSpec", "RetrainSummary", "retrain"]
