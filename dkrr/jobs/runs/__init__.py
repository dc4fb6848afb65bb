"""Runs: directories with a name that can be watched, stopped, resumed and trusted, wherever their drivers are."""
