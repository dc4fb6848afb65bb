"""Random signs to probe a matrix with, and functions of estimates that are free of the bias that noise gives them.

    diag(B)_i = E z_i (B z)_i            for z of independent signs, E z z^T = I

    D^-1 = E (D^ + i tau xi)^-1          D^ normal around D with variance tau^2, xi standard normal and independent

The second line is the mean value property: D^ + i tau xi is D plus noise that is round in the complex plane, and an
analytic function has its value at D as the mean over circles around it. So the mean over xi alone is a function of the
estimate D^ and its standard error whose own mean is D^-1, where 1 / D^ is too large by tau^2 / D^3 and more. In closed
form it is Mills' ratio, finite for every D^.

Cost: O(1) an entry.

References
----------
Hutchinson, A stochastic estimator of the trace of the influence matrix, Communications in Statistics 18 (1989); Bekas,
Kokiopoulou and Saad, An estimator for the diagonal of a matrix, Applied Numerical Mathematics 57 (2007).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx

__all__ = ["rademacher", "unbiased_powers"]

FloatVector = NDArray[np.float64]

# Below this (tau / D)^2 the closed forms cancel and the series is exact to 1e-8.
SERIES = 3e-3


def rademacher(n: int, probe: int, seed: int) -> FloatVector:
    """n signs -1.0 or 1.0 of one probe; sign i depends on the seed, the probe and i alone, not on n."""
    words = np.random.Philox(key=np.array([seed % 2**64, probe], dtype=np.uint64)).random_raw(-(-n // 64))
    bits = np.unpackbits(np.asarray(words, dtype="<u8").view(np.uint8), bitorder="little")
    return np.asarray(2.0 * bits[:n] - 1.0, dtype=np.float64)


def unbiased_powers(estimate: FloatVector, error: FloatVector) -> tuple[FloatVector, FloatVector, FloatVector]:
    """Estimates of 1/D, 1/D^2 and 2/D^3 from one of D.

        M_k = integral over s > 0 of s^k exp(-D s - tau^2 s^2 / 2) = k! E (D + i tau xi)^-(k+1)

        M_0 = sqrt(pi/2) / tau  erfcx(D / (sqrt(2) tau)),   M_1 = (1 - D M_0) / tau^2,   M_2 = (M_0 - D M_1) / tau^2

    Parameters
    ----------
    estimate, error : (n,)
        D, positive, and its standard error tau >= 0.

    Returns
    -------
    M_0, M_1, M_2 : (n,)
        Of tau = 0: 1/D, 1/D^2, 2/D^3. The derivative of M_k by D is -M_(k+1).
    """
    rho = np.square(error / estimate)
    first = (1 - rho + 3 * rho**2 - 15 * rho**3) / estimate
    second = (1 - 3 * rho + 15 * rho**2 - 105 * rho**3) / estimate**2
    third = 2 * (1 - 6 * rho + 45 * rho**2 - 420 * rho**3) / estimate**3
    wide = rho > SERIES
    value, tau = estimate[wide], error[wide]
    first[wide] = np.sqrt(np.pi / 2) / tau * erfcx(value / (np.sqrt(2) * tau))
    second[wide] = (1 - value * first[wide]) / tau**2
    third[wide] = (first[wide] - value * second[wide]) / tau**2
    return first, second, third
