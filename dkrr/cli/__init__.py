"""What people type: ``dkrr ...``, the same as ``dask krr ...``."""

import sys

try:
    from dkrr.cli.app import main
except KeyboardInterrupt:  # Ctrl-C right at the start, which is no defect either
    from dkrr.store.interruption import interrupted_error

    sys.stderr.write(f"error: {interrupted_error().message}\nhint: {interrupted_error().hint}\n")
    sys.exit(interrupted_error().exit_code)

__all__ = ["main"]
