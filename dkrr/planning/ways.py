"""Which ways to an answer a choice allows; what they cost is not known here.

An approximation is never among those of "auto", nor is an answer in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dkrr.kernels.features import count_features
from dkrr.linalg.lowrank.rpcholesky import choose_rank
from dkrr.linalg.primal.solver import MAX_FEATURES
from dkrr.linalg.sizes import choose_gram
from dkrr.planning.candidates import Problem
from dkrr.planning.choices import SolverChoice

__all__ = [
    "PRIMAL",
    "Way",
    "is_plainly_primal",
    "may_be_primal",
    "primal_is_less",
    "ranks_of",
    "small_choice",
    "ways_of",
]

RANKS = (0, 250, 500, 1000, 2000, 4000)

Way = tuple[str, str, str, int]  # solver, precision, gram, rank
PRIMAL: Way = ("primal", "float64", "on_the_fly", 0)


def ways_of(problem: Problem, choice: SolverChoice) -> list[Way]:
    """All ways that the words of the choice allow."""
    return list(dict.fromkeys(_all_ways(problem, choice)))


def _all_ways(problem: Problem, choice: SolverChoice) -> Iterator[Way]:
    usual = choose_gram(problem.kernel, problem.num_alphas)
    dear = choose_gram(problem.kernel, 1)  # several alphas cost cg nothing
    given = problem.kernel is None
    if choice.solver == "nystrom":
        yield "nystrom", "float64" if choice.precision == "auto" else choice.precision, "on_the_fly", 0
        return
    if choice.solver == "primal":
        yield PRIMAL
        return
    if may_be_primal(problem, choice):
        yield PRIMAL
    precisions = {"auto": ("float64", "mixed")}.get(choice.precision, (choice.precision,))
    for precision in precisions:
        if choice.solver in ("auto", "cholesky"):
            yield "cholesky", precision, usual if choice.gram == "auto" else choice.gram, 0
        if choice.solver == "cg" or (choice.solver == "auto" and precision != "float32" and not given):
            grams = (dear,) if choice.gram == "auto" else (choice.gram,)
            for gram in grams:
                for rank in ranks_of(problem, choice):
                    yield "cg", precision, gram, rank


def may_be_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether "auto" may become primal: fewer features than rows, and no word about matrices that it has not."""
    size = count_features(problem.kernel, problem.num_features)
    if not problem.primal or choice.solver != "auto" or size is None:
        return False
    asked = choice.precision in ("auto", "float64") and choice.gram == "auto"
    return asked and size < problem.num_rows and size <= MAX_FEATURES


def is_plainly_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether n D^2 + D^3 / 3 flops are less than 10 for each entry of K: then no way through K is faster."""
    if not may_be_primal(problem, choice):
        return False
    n, size = problem.num_rows, count_features(problem.kernel, problem.num_features) or 0
    return n * size**2 + problem.num_alphas * size**3 / 3 < 10 * n**2


def primal_is_less(problem: Problem) -> bool:
    """Whether n D^2 + D^3 / 3 flops are less than n^3 / 3, where nothing is measured."""
    n, size = problem.num_rows, count_features(problem.kernel, problem.num_features) or 0
    return n * size**2 + problem.num_alphas * size**3 / 3 < n**3 / 3 * problem.num_alphas


def ranks_of(problem: Problem, choice: SolverChoice) -> Iterator[int]:
    """Ranks of the preconditioner that the choice allows, 0 for none."""
    if choice.preconditioner in ("none", "factor"):
        yield 0
    elif choice.rank != "auto":
        yield min(choice.rank, problem.num_rows)
    else:
        yield from (rank for rank in RANKS if rank <= problem.num_rows / 4)


def small_choice(problem: Problem, choice: SolverChoice) -> dict[str, Any]:
    """What "auto" becomes where measuring would cost more than the best choice could save."""
    named: dict[str, Any] = {}
    if choice.solver == "auto":
        named["solver"] = "primal" if may_be_primal(problem, choice) and primal_is_less(problem) else "cholesky"
    if choice.precision == "auto":
        named["precision"] = "float64"
    if choice.solver == "cg" and choice.rank == "auto" and choice.preconditioner not in ("none", "factor"):
        n, d = problem.num_rows, problem.num_features
        named["rank"] = choose_rank(n, d, min(problem.alpha), tol=choice.tol, num_columns=problem.num_targets)
    return named
