"""What people type: ``dkrr ...``, the same as ``dask krr ...``."""

import sys

try:
    from dkrr.cli import jobs, models, runs  # noqa: F401  (their commands are those of the group)
    from dkrr.cli.app import main
except KeyboardInterrupt:  # Ctrl-C right at the start, which is no defect either
    from dkrr.errors import told

    error = told(KeyboardInterrupt())
    sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
    sys.exit(error.exit_code)

__all__ = ["main"]
