"""Jobs: what a TOML file says, what it will cost, and its execution as a run."""
