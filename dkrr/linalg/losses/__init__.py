"""Losses other than the square over the same Gram matrix: what they are, and how they are minimised.

    minimise over a, b      sum_i w_i loss(y_i, f_i) + alpha a^T K a          f = K a + b          (1^T a = 0)

See :mod:`dkrr.linalg.losses.loss` for the losses, :mod:`dkrr.linalg.losses.problem` for what is promised of an
answer, :mod:`dkrr.linalg.losses.decomposition` and :mod:`dkrr.linalg.losses.newton` for the two solvers.
"""
