"""The tile Cholesky factor: factorise, substitute, solve; the same in memory for small n; an intercept as a border."""
