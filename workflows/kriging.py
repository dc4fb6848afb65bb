"""Kriging: a map of a field that is known, with noise, at scattered places, and how sure it is.

    python workflows/kriging.py [-o kriging.png] [--places 400]

The field is made here: a Gaussian random field of mean 10, sill 1 and Matern covariance (nu = 3/2, range 0.15). Kriging
is kernel ridge regression with the correlation as the kernel and alpha = nugget / sill; the mean is unknown, as in
ordinary kriging, so a constant is fitted with it. Takes seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RANGE, SILL, NUGGET, MEAN = 0.15, 1.0, 0.05, 10.0
EDGE = 100  # cells of the map along a side


def field(places: Any, seed: int = 0, waves: int = 2_000) -> Any:
    """The field at places (n, 2): random waves with the spectrum of the Matern covariance, a t distribution.

    f(x) = mean + sqrt(2 sill / m) sum_j cos(w_j . x + p_j),   w_j = z_j sqrt(3 / c_j) / range

    with z_j normal, c_j of chi-square with 3 = 2 nu degrees of freedom, and p_j uniform.
    """
    random = np.random.default_rng(seed)
    frequencies = random.standard_normal((waves, 2)) * np.sqrt(3 / random.chisquare(3, (waves, 1))) / RANGE
    phases = random.uniform(0, 2 * np.pi, waves)
    return MEAN + np.sqrt(2 * SILL / waves) * np.cos(places @ frequencies.T + phases).sum(axis=1)


def samples(count: int, seed: int = 1) -> tuple[Any, Any]:
    """Places (count, 2), few of them on the right, and the values there with noise of variance ``NUGGET``."""
    random = np.random.default_rng(seed)
    places = random.random((count, 2)) ** [1.6, 1.0]
    return places, field(places) + np.sqrt(NUGGET) * random.standard_normal(count)


def krige(places: Any, values: Any, grid: Any) -> tuple[Any, Any]:
    """The kriging map (m,) of a grid (m, 2), and the square root of the kriging variance."""
    import dkrr

    est = dkrr.KernelRidge(
        alpha=NUGGET / SILL,
        kernel="matern",
        kernel_params={"nu": 1.5, "length_scale": RANGE},
        fit_intercept=True,
    )
    return est.fit(places, values).predict(grid, return_std=True, sigma2=SILL)


def draw(path: Path, count: int) -> None:
    """Krige, and write the picture."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    places, values = samples(count)
    side = (np.arange(EDGE) + 0.5) / EDGE
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    mean, deviation = krige(places, values, grid)
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    levels = MaxNLocator(12).tick_values(min(values), max(values))
    shown = axes[0].scatter(*places.T, c=values, s=9, vmin=levels[0], vmax=levels[-1])
    maps = [shown]
    maps.append(axes[1].contourf(side, side, mean.reshape(EDGE, EDGE), levels, extend="both"))
    maps.append(axes[2].contourf(side, side, deviation.reshape(EDGE, EDGE), 10, cmap="magma_r"))
    for axis, drawn, title in zip(axes, maps, (f"{count} values", "kriged", "standard deviation"), strict=True):
        axis.set(title=title, aspect="equal", xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
        figure.colorbar(drawn, ax=axis, shrink=0.9)
    figure.savefig(path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture and say how good the map is."""
    parser = argparse.ArgumentParser(description="Krige a generated field and draw the map.")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".png"), help="the picture")
    parser.add_argument("--places", type=int, default=400, help="how many values are known (default: 400)")
    options = parser.parse_args(arguments)
    draw(options.output, options.places)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
