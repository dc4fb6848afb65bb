"""One test for each figure that is promised: ``pytest -m measure``."""
