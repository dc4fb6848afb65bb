"""Ridge regression in explicit features: sums over the rows in passes, D x D equations in memory."""
