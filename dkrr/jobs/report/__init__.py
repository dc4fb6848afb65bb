"""The page of a run: one self-contained HTML file, made from what the run's directory records."""
