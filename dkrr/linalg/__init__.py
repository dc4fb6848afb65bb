"""Algorithms on tiles: Gram matrix, ridge operator, Cholesky factor, triangular solves, true residual."""
