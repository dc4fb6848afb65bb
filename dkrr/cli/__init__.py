"""What people type: ``dkrr ...``, the same as ``dask krr ...``."""

from dkrr.cli.app import main

__all__ = ["main"]
