"""Random fits compared with dense references in extended precision.

A case is drawn from one number: rows, kernel, weights, intercept, solver, precision, storage and history. Its reference
solves the same equations by Gaussian elimination in NumPy's long double, with distances by differences. An answer may
be off by 100 cond eps of its precision, or by cond tol where an iteration ended at ``tol``; it may be refused by a
:class:`dkrr.DkrrError`; nothing else is allowed.

    python -m tests.contract.differential --cases 3000 --seed 0
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dkrr

Long = np.longdouble
FACTOR, TOL = 100.0, 1e-10
MEASURED = ("prediction", "dual_coef", "leave_one_out", "variance")
HISTORIES = ("plain", "plain", "saved", "named", "grown", "changed", "cv")


@dataclass(kw_only=True)
class Case:
    """One random problem; ``describe`` is what a failure prints."""

    seed: int
    X: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    Z: np.ndarray = field(repr=False)
    weight: np.ndarray | None = field(repr=False)
    kernel: dict[str, Any]
    alpha: float | list[float]
    fit_intercept: bool
    solver: str
    precision: str
    tile_size: int | None
    history: str
    rows: str
    scale: float
    shift: float

    @property
    def num_centers(self) -> int:
        """Every row that counts: then the Nystrom approximation is none."""
        return len(self.X) if self.weight is None else int(np.count_nonzero(self.weight))


def _kernel(rng: np.random.Generator, d: int, width: float, depth: int = 0) -> dict[str, Any]:
    """A random kernel for rows whose distances are about ``width``."""
    names = ["linear", "poly", "rbf", "rbf", "laplacian", "matern", "matern", "cosine", "sigmoid"]
    if depth == 0:
        names += ["sum", "product", "chi2"]
    name = str(rng.choice(names))
    near = 10 ** rng.uniform(-0.7, 0.7) / width
    match name:
        case "poly":
            return {
                "kernel": name,
                "degree": int(rng.integers(1, 4)),
                "gamma": near**2,
                "coef0": float(rng.choice([0, 1, 2.5])),
            }
        case "sigmoid":
            return {"kernel": name, "gamma": near**2, "coef0": 0.5}
        case "rbf" | "laplacian" if rng.random() < 0.3:  # a width for each feature
            return {
                "kernel": name,
                "gamma": 1.0,
                "length_scale": [float(v) for v in 10 ** rng.uniform(-0.5, 0.5, d) / near],
            }
        case "rbf":
            return {"kernel": name, "gamma": near**2}
        case "laplacian":
            return {"kernel": name, "gamma": near}
        case "chi2":
            return {"kernel": name, "gamma": near}
        case "matern":
            return {"kernel": name, "nu": float(rng.choice([0.5, 1.5, 2.5])), "length_scale": 1 / near}
        case "sum" | "product":
            parts = [_kernel(rng, d, width, 1) for _ in range(2)]
            if rng.random() < 0.3:
                parts.append({"kernel": "constant", "value": float(rng.uniform(0.1, 3))})
            return {"kernel": name, "terms" if name == "sum" else "factors": parts}
    return {"kernel": name}


def draw(seed: int) -> Case:
    """The case of this number."""
    rng = np.random.default_rng(seed)
    n, d, m = int(rng.integers(4, 70)), int(rng.integers(1, 6)), 9
    rows = str(rng.choice(["cloud", "cloud", "cloud", "two groups", "near pairs", "grid"]))
    X = rng.standard_normal((n + m, d))
    if rows == "two groups":
        X += np.where(rng.random((n + m, 1)) < 0.5, -1, 1) * 10 ** rng.uniform(0, 6)
    elif rows == "near pairs":
        half = (n + m) // 2
        X[:half] = X[half : 2 * half] + 10 ** rng.uniform(-9, -1) * rng.standard_normal((half, d))
    elif rows == "grid":
        X = np.round(2 * X)  # duplicated rows
    X = X[rng.permutation(n + m)]
    scale = 10 ** float(rng.choice([0, 0, rng.uniform(-8, 8)]))
    shift = float(rng.choice([0, 0, 0, 1e3, 1e6]))
    X = (X + shift) * scale
    width = scale if rng.random() < 0.7 else 10 ** rng.uniform(-2, 2)
    kernel = _kernel(rng, d, width)
    if "chi2" in str(kernel):
        X = np.abs(X)
    t = int(rng.choice([0, 0, 1, 3]))
    y = rng.standard_normal((n, t) if t else n) + rng.choice([0, 0, 100.0])
    y *= 10 ** float(rng.choice([0, 0, rng.uniform(-8, 8)]))
    Z = X[n:].copy()
    Z[:3] = X[:3]  # rows of the training set, and rows beside some
    Z[3:5] = X[1:3] * (1 + 1e-12)
    X = X[:n]
    weight = None
    match str(rng.choice(["none", "none", "mild", "wide", "zeros"])):
        case "mild":
            weight = rng.uniform(0.1, 3, n)
        case "wide":
            weight = 10 ** rng.uniform(-6, 6, n)
        case "zeros":
            weight = rng.uniform(0.1, 3, n) * (np.arange(n) % 3 > 0)
            if seed % 2:  # a value that stands for a missing one, where it does not count
                y[weight == 0] = 9.96921e36
    size = float(np.abs(reference_kernel(kernel, X, X).diagonal()).mean())
    if not np.isfinite(size) or size == 0:
        size = 1.0
    alpha: Any = size * 10 ** rng.uniform(-9, 1)
    if t == 3 and rng.random() < 0.4:
        alpha = [alpha, 10 * alpha, alpha]
    solver = str(rng.choice(["auto", "auto", "cholesky", "cholesky", "cg", "nystrom", "primal"]))
    if solver == "primal" and not (kernel["kernel"] == "linear" or kernel["kernel"] == "poly"):
        solver = "cholesky"
    history = str(rng.choice(HISTORIES))
    if solver == "nystrom" and history == "grown":
        history = "plain"  # half of the rows have fewer centres
    precision = str(rng.choice(["auto", "auto", "float64", "mixed", "float32"]))
    if (precision == "float32" and solver not in ("auto", "cholesky")) or solver == "primal":
        precision = "auto"  # iterations and features have no float32 answer
    tile_size = int(rng.choice([7, 16, 33])) if rng.random() < 0.5 else None
    return Case(
        seed=seed, X=X, y=y, Z=Z, weight=weight, kernel=kernel, alpha=alpha, fit_intercept=bool(rng.random() < 0.3),
        solver=solver, precision=precision, tile_size=tile_size, history=history, rows=rows,
        scale=scale, shift=shift,
    )  # fmt: skip


def _differences(A: Any, B: Any, scale: Any = 1.0) -> Any:
    a, b = np.asarray(A, dtype=Long), np.asarray(B, dtype=Long)
    return (a[:, None] - b[None]) / np.asarray(scale, dtype=Long)


def reference_kernel(values: dict[str, Any], A: np.ndarray, B: np.ndarray) -> Any:
    """k(A, B) (m, n) in long double, straight from the formula."""
    a, b, p = A.astype(Long), B.astype(Long), values
    scale = p.get("length_scale", 1.0)
    with np.errstate(all="ignore"):
        match p["kernel"]:
            case "linear":
                return a @ b.T
            case "poly":
                return (Long(p["gamma"]) * (a @ b.T) + Long(p["coef0"])) ** p["degree"]
            case "sigmoid":
                return np.tanh(Long(p["gamma"]) * (a @ b.T) + Long(p["coef0"]))
            case "cosine":
                norms = np.sqrt((a * a).sum(1))[:, None] * np.sqrt((b * b).sum(1))
                return np.divide(a @ b.T, norms, out=np.zeros_like(norms), where=norms > 0)
            case "rbf":
                return np.exp(-Long(p["gamma"]) * (_differences(A, B, scale) ** 2).sum(-1))
            case "laplacian":
                return np.exp(-Long(p["gamma"]) * np.abs(_differences(A, B, scale)).sum(-1))
            case "matern":
                r = np.sqrt(2 * Long(p["nu"]) * (_differences(A, B, scale) ** 2).sum(-1))
                return {0.5: 1.0, 1.5: 1 + r, 2.5: 1 + r + r**2 / 3}[p["nu"]] * np.exp(-r)
            case "chi2":
                total = a[:, None] + b[None]
                terms = np.divide(_differences(A, B) ** 2, total, out=np.zeros_like(total), where=total > 0)
                return np.exp(-Long(p["gamma"]) * terms.sum(-1))
            case "constant":
                return np.full((len(a), len(b)), Long(p["value"]))
            case "sum":
                return np.sum([reference_kernel(part, A, B) for part in p["terms"]], axis=0)
            case "product":
                return np.prod([reference_kernel(part, A, B) for part in p["factors"]], axis=0)
    raise NotImplementedError(p["kernel"])


def eliminate(A: Any, B: Any) -> Any:
    """A^-1 B by Gaussian elimination with partial pivoting, in long double."""
    A, B = A.astype(Long), B.astype(Long)
    n = len(A)
    for k in range(n):
        pivot = k + int(np.argmax(np.abs(A[k:, k])))
        if A[pivot, k] == 0:
            raise ZeroDivisionError("the reference matrix is singular")
        if pivot != k:
            A[[k, pivot]], B[[k, pivot]] = A[[pivot, k]], B[[pivot, k]]
        multipliers = A[k + 1 :, k] / A[k, k]
        A[k + 1 :, k:] -= multipliers[:, None] * A[k, k:]
        B[k + 1 :] -= multipliers[:, None] * B[k]
    for k in range(n - 1, -1, -1):
        B[k] = (B[k] - A[k, k + 1 :] @ B[k + 1 :]) / A[k, k]
    return B


@dataclass(kw_only=True)
class Reference:
    """What is right, and per target how far an answer may be from it in units of cond eps."""

    dual_coef: Any
    prediction: Any
    prediction_size: Any
    residual: Any  # leave-one-out
    residual_size: Any
    variance: Any
    variance_size: Any
    condition: Any


def solve_reference(case: Case, alpha: Any) -> Reference:
    X, Y, Z = case.X, case.y.reshape(len(case.y), -1), case.Z
    n, t = Y.shape
    K, Kz = reference_kernel(case.kernel, X, X), reference_kernel(case.kernel, Z, X)
    kzz = reference_kernel(case.kernel, Z, Z).diagonal()
    s = np.ones(n, dtype=Long) if case.weight is None else np.sqrt(case.weight.astype(Long))
    columns: dict[str, list[Any]] = {name: [] for name in Reference.__annotations__}
    for j, a in enumerate(np.broadcast_to(np.asarray(alpha, dtype=Long), t)):
        G = s[:, None] * K * s + a * np.eye(n, dtype=Long)
        rhs = np.concatenate([(s * Y[:, j])[:, None], np.eye(n, dtype=Long), (Kz * s).T], axis=1)
        if case.fit_intercept:
            G = np.block([[G, s[:, None]], [s[None], np.zeros((1, 1), dtype=Long)]])
            rhs = np.concatenate([rhs, np.zeros((1, rhs.shape[1]), dtype=Long)])
            rhs[-1, 1 + n :] = 1
        found = eliminate(G, rhs)
        u, b = found[:n, 0], found[n, 0] if case.fit_intercept else Long(0)
        inverse = found[:n, 1 : 1 + n]
        values = np.linalg.eigvalsh(G[:n, :n].astype(float))
        smallest = max(float(np.abs(values).min()), 1e-300)
        columns["condition"].append(float(np.abs(values).max()) / smallest)
        # an entry of k(z, X) has an error of eps sqrt(k(z, z) k(x, x)), be it as small as it may
        floor = np.sqrt(np.abs(kzz)[:, None] * np.abs(K.diagonal()) * s**2 / n)
        reach = np.sqrt((np.maximum(np.abs(Kz * s), floor) ** 2).sum(1))
        columns["dual_coef"].append(s * u)
        columns["prediction"].append(Kz @ (s * u) + b)
        columns["prediction_size"].append(reach * np.sqrt((u**2).sum()) + abs(b))
        diagonal = inverse.diagonal()
        with np.errstate(all="ignore"):
            residual = u / diagonal / s
            columns["residual"].append(residual)
            columns["residual_size"].append((np.sqrt((u**2).sum()) + np.abs(residual * s) / smallest) / diagonal / s)
        columns["variance"].append(kzz - (rhs[:, 1 + n :] * found[:, 1 + n :]).sum(0))
        own = np.abs(found[n, 1 + n :]) if case.fit_intercept else 0.0
        columns["variance_size"].append(kzz + reach**2 / smallest + own)
    return Reference(**{name: np.stack(values, axis=-1) for name, values in columns.items()})


def _frame(rows: np.ndarray) -> Any:
    return pd.DataFrame(rows, columns=[f"c{j}" for j in range(rows.shape[1])])


def answer(case: Case, folder: Path) -> tuple[Any, Any, np.ndarray]:
    """Fit as the case's history says: (estimator, alpha that was used, predictions (m, t))."""
    est = dkrr.KernelRidge(
        alpha=case.alpha, kernel=case.kernel, fit_intercept=case.fit_intercept, solver=case.solver,
        precision=case.precision, tol=TOL, tile_size=case.tile_size or "auto",
        store=str(folder / "store") if case.tile_size and case.seed % 2 else None,
        solver_params={"num_centers": case.num_centers} if case.solver == "nystrom" else None,
    )  # fmt: skip
    alpha: Any = case.alpha
    X, y, w, Z = case.X, case.y, case.weight, case.Z
    half = max(2, len(X) // 2)
    match case.history:
        case "named":
            est.fit(_frame(X), y, sample_weight=w)
            est.save(folder / "model.zarr")
            model = dkrr.load_model(folder / "model.zarr")
            shuffled = _frame(Z)[[f"c{j}" for j in reversed(range(X.shape[1]))]]
            return est, alpha, model.predict(shuffled.assign(other=1.0))
        case "grown" if w is None:
            est.store = str(folder / "store")
            data = folder / "data.zarr"
            est.fit(dkrr.ingest(X[:half], data, y=y[:half]))
            est.fit(dkrr.ingest(X[half:], data, y=y[half:], append=True))
        case "changed":
            est.store = str(folder / "store")
            other = X.copy()
            other[len(X) // 3] += X[0] - X[1]
            try:  # what is left of a fit that was refused must not matter either
                est.fit(other, 2 * y, sample_weight=w)
                est.set_params(alpha=np.multiply(3, case.alpha)).fit(X, y, sample_weight=w)
            except dkrr.DkrrError:
                pass
            est.set_params(alpha=case.alpha).fit(X, y, sample_weight=w)
        case "cv" if case.solver in ("auto", "cholesky") and case.precision != "float32" and len(X) > 8:
            est = dkrr.KernelRidgeCV(
                alphas=[float(np.max(case.alpha)) * f for f in (1, 10, 100)], kernel=case.kernel,
                fit_intercept=case.fit_intercept, tile_size=case.tile_size or "auto",
            )  # fmt: skip
            est.fit(X, y, sample_weight=w)
            alpha = est.alpha_
        case _:
            est.fit(X, y, sample_weight=w)
    if case.history == "saved":
        est.save(folder / "model.zarr")
        return est, alpha, dkrr.load_model(folder / "model.zarr").predict(Z)
    return est, alpha, est.predict(Z)


def _worst(difference: Any, size: Any, allowed: Any) -> float:
    """The largest share of what is allowed that a difference takes."""
    with np.errstate(all="ignore"):
        share = np.abs(difference) / (allowed * size)
    share = np.where(np.abs(difference) == 0, 0.0, share)
    return float(np.nan_to_num(share, nan=np.inf, posinf=np.inf).max())


def check(case: Case, truth: Case | None = None) -> dict[str, float | str]:
    """Shares of the allowed error: predictions, dual_coef, leave-one-out, variance; or the error's name.

    ``truth`` is the problem that the reference solves, the case itself unless a test wants to see a failure.
    """
    outcome: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            est, alpha, prediction = answer(case, Path(name))
        except dkrr.DkrrError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        reference = solve_reference(truth or case, alpha if truth is None else truth.alpha)
        solution = est.solution_
        eps = float(np.finfo(np.float32 if case.precision == "float32" else np.float64).eps)
        unit = FACTOR * eps
        if solution.num_iterations > 1 or solution.solver in ("cg", "nystrom"):
            unit = max(unit, TOL)
        if solution.solver == "nystrom":
            unit = max(unit, 1e-8)
        allowed = unit * reference.condition
        shape = reference.prediction.shape
        outcome["prediction"] = _worst(
            prediction.reshape(shape) - reference.prediction, reference.prediction_size, allowed
        )
        if solution.solver == "nystrom":
            return outcome
        if (hasattr(est, "dual_coef_")) and solution.solver != "primal":
            size = np.sqrt((reference.dual_coef**2).sum(0))
            if case.weight is None or case.weight.max() < 10 * case.weight[case.weight > 0].min():
                outcome["dual_coef"] = _worst(
                    np.reshape(est.dual_coef_, reference.dual_coef.shape) - reference.dual_coef, size, allowed
                )
        if case.seed % 3 == 0:
            try:
                found = est.leave_one_out()
                kept = slice(None) if case.weight is None else case.weight > 0
                outcome["leave_one_out"] = _worst(
                    (np.reshape(found.residuals, reference.residual.shape) - reference.residual)[kept],
                    reference.residual_size[kept],
                    allowed,
                )
            except dkrr.DkrrError as error:
                outcome["leave_one_out refused"] = f"{type(error).__name__}: {error}"
        if case.seed % 3 == 1 and solution.solver != "primal":
            try:
                Z = _frame(case.Z) if case.history == "named" else case.Z
                _, std = est.predict(Z, return_std=True, sigma2=1.0)
                outcome["variance"] = _worst(
                    np.reshape(std, shape) ** 2 - np.maximum(reference.variance, 0), reference.variance_size, allowed
                )
            except dkrr.DkrrError as error:
                outcome["variance refused"] = f"{type(error).__name__}: {error}"
    return outcome


def failures(outcome: dict[str, float | str]) -> dict[str, float | str]:
    """What of an outcome is not allowed."""
    return {name: outcome[name] for name in MEASURED if name in outcome and not float(outcome[name]) <= 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong, refused, largest = 0, Counter[str](), Counter[str]()
    for seed in range(options.seed, options.seed + options.cases):
        case = draw(seed)
        try:
            outcome = check(case)
        except Exception as error:
            outcome = {"prediction": np.inf, "exception": f"{type(error).__name__}: {error}"}
        if found := failures(outcome):
            wrong += 1
            print(f"WRONG {found} {outcome}\n  {case}", flush=True)
        for name, value in outcome.items():
            if isinstance(value, str):
                refused[f"{name} {case.kernel['kernel']} {value[:60]}"] += 1
            elif name in MEASURED and name not in found:
                largest[name] = max(largest[name], value)  # type: ignore[assignment]
    print(f"{options.cases} cases: {wrong} wrong; largest share of what is allowed: {dict(largest)}")
    for name, count in refused.most_common():
        print(f"{count:5d} {name}")


if __name__ == "__main__":
    main()
