"""The kernels that a search may choose: k(a, b) = phi(r), r^2 = sum_j ((a_j - b_j) / l_j)^2, and their slopes.

For rbf and matern the derivative in a logarithmic width has one form for every feature,

    dk / d log l_j = G(r) ((a_j - b_j) / l_j)^2,    G(r) = -phi'(r) / r,

so that the derivatives for all features come from one matrix product. The laplacian, a function of the 1-norm, has
dk / d log l_j = k |a_j - b_j| / l_j, for which there is no such product.

    family     phi                            G
    rbf        exp(-r^2 / 2)                  exp(-r^2 / 2)
    matern12   exp(-r)                        exp(-r) / r
    matern32   (1 + s) exp(-s), s = 3^.5 r    3 exp(-s)
    matern52   (1 + s + s^2 / 3) exp(-s),     5 / 3 (1 + s) exp(-s)
               s = 5^.5 r

You need it to turn widths into a kernel, and into the keys of a job file that build it.

References
----------
Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 4.2.1 and 5.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ParameterError
from dkrr.kernels import Kernel, make_kernel

__all__ = ["FAMILIES", "family_kernel", "kernel_keys", "scaled_slope"]

FloatArray = NDArray[np.float64]

FAMILIES = ("rbf", "matern12", "matern32", "matern52", "laplacian")
_NU = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
# squared distances below this share of the rows' squared norms are rounding errors of the matrix product
_ROUNDING = 1e-14


def kernel_keys(family: str, widths: FloatArray) -> dict[str, Any]:
    """The keys of ``[model]`` and arguments of :func:`~dkrr.kernels.make_kernel` for widths (1,) or (d,).

    Raises
    ------
    ParameterError
        An unknown family.
    """
    if family not in FAMILIES:
        raise ParameterError(f"kernel family {family!r}", hint=f"one of {', '.join(FAMILIES)} is expected")
    values = [float(width) for width in widths]
    if family in _NU:
        length_scale = values[0] if len(values) == 1 else values
        return {"kernel": "matern", "kernel_params": {"nu": _NU[family], "length_scale": length_scale}}
    if len(values) == 1:
        gamma = 0.5 / values[0] ** 2 if family == "rbf" else 1.0 / values[0]
        return {"kernel": family, "gamma": gamma}
    gamma = 0.5 if family == "rbf" else 1.0
    return {"kernel": family, "gamma": gamma, "kernel_params": {"length_scale": values}}


def family_kernel(family: str, widths: FloatArray) -> Kernel:
    """The kernel of a family with one width (1,), or one for each feature (d,)."""
    keys = kernel_keys(family, widths)
    return make_kernel(keys.pop("kernel"), **keys)


def scaled_slope(family: str, squared: FloatArray, norms: FloatArray) -> None:
    """Replace squared scaled distances r^2 of a block by the slopes G(r), in place.

    Parameters
    ----------
    squared : (m, n)
        From a matrix product, so that what should be 0 may be anything up to the rounding of ``norms``.
    norms : (m,)
        Squared norms of the rows of the block.
    """
    np.maximum(squared, 0.0, out=squared)
    if family == "rbf":
        np.multiply(squared, -0.5, out=squared)
        np.exp(squared, out=squared)
        return
    if family == "matern12":
        # rows that coincide have no slope; G itself is infinite there
        apart = squared > _ROUNDING * (1.0 + norms[:, None])
        r = np.sqrt(squared, out=squared)
        scratch = np.exp(-r)
        np.divide(scratch, r, out=squared, where=apart)
        squared[~apart] = 0.0
        return
    s = np.sqrt(2.0 * _NU[family] * squared)
    np.negative(s, out=squared)
    np.exp(squared, out=squared)
    if family == "matern32":
        squared *= 3.0
    else:
        s += 1.0
        s *= 5.0 / 3.0
        squared *= s
