"""Saved models for registries."""

from __future__ import annotations

import pytest

from tests.jobs.registry.helpers import make_model


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three models."""
    folder = tmp_path_factory.mktemp("saved")
    return [make_model(folder / f"{alpha}.zarr", alpha) for alpha in (0.1, 1.0, 10.0)]
