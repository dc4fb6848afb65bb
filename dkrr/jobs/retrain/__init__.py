"""Retraining: new rows in, a model that was judged out, and nothing broken in between."""

from dkrr.jobs.retrain.run import retrain
from dkrr.jobs.retrain.spec import RetrainSpec
from dkrr.jobs.retrain.summary import RetrainSummary

__all__ = ["RetrainSpec", "RetrainSummary", "retrain"]
