"""Conjugate gradients: the iteration, its checkpoints and errors, the solver around it, a factor as preconditioner."""
