"""A picture of a search: the error of each trial, of each alpha, and the planes (width x alpha) that were computed.

Nothing is interpolated: every point and every cell is an error that a trial found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["draw_search"]

_COLOURS = {
    "rbf": "tab:blue",
    "matern12": "tab:orange",
    "matern32": "tab:green",
    "matern52": "tab:red",
    "laplacian": "tab:purple",
}
MOST_FEATURES = 30


def draw_search(search: dict[str, Any], path: str) -> None:
    """Draw the document that `dkrr tune` leaves as BEST.search.json to a .png, .svg or .pdf file."""
    from matplotlib.figure import Figure  # it takes half a second to import

    slices = search["slices"]
    num_planes = max(1, len(slices))
    figure = Figure(figsize=(4.2 * (1 + num_planes), 7.5), layout="constrained")
    axes = figure.subplots(2, 1 + num_planes, squeeze=False)
    _draw_trials(axes[0, 0], search["trials"])
    _draw_widths(axes[1, 0], search["best"], search["feature_names"])
    for column in range(num_planes):
        if column < len(slices):
            _draw_alphas(axes[0, 1 + column], slices[column])
            _draw_plane(figure, axes[1, 1 + column], slices[column])
        else:
            for row in range(2):
                axes[row, 1 + column].set_axis_off()
    best = search["best"]
    figure.suptitle(
        f"{best['kernel']}, {_widths_in_words(best)}, alpha {best['alpha']:.3g}: "
        f"{_error_name(best)} {_error(best):.4f} on {best['num_rows']:,} of {search['num_rows']:,} rows"
    )
    # no date and no version in the file: the same search is the same picture
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.endswith(".png") else None)


def _error(found: dict[str, Any]) -> float:
    """Of a candidate or a trial: leave-one-out, or of folds."""
    return float(found["loo_rmse"] if "loo_rmse" in found else found["error"])


def _error_name(found: dict[str, Any]) -> str:
    """What the errors of a candidate or a plane are."""
    return f"held-out error ({found['metric'].replace('_', ' ')})" if "metric" in found else "leave-one-out error"


def _widths_in_words(candidate: dict[str, Any]) -> str:
    shared = candidate["widths_kind"] == "shared"
    return f"width {candidate['widths'][0]:.3g}" if shared else "one width for each feature"


def _draw_trials(axes: Any, trials: list[dict[str, Any]]) -> None:
    """The error that each trial ended with; filled: one width for each feature."""
    shown: set[str] = set()
    for trial in trials:
        colour = _COLOURS.get(trial["family"], "black")
        per_feature = len(trial["widths"]) > 1
        label = None if trial["family"] in shown else trial["family"]
        shown.add(trial["family"])
        axes.plot(
            trial["number"],
            _error(trial),
            marker={"search": "o", "slice": "s", "check": "D", "folds": "s"}[trial["kind"]],
            markersize=5,
            linestyle="none",
            color=colour,
            fillstyle="full" if per_feature else "none",
            label=label,
        )
    axes.set(xlabel="trial (circle: search, square: slice or folds, diamond: check)", ylabel="error", yscale="log")
    axes.set_title("trials (filled: a width for each feature)", fontsize="medium")
    axes.legend(fontsize="small")


def _draw_widths(axes: Any, best: dict[str, Any], names: list[str]) -> None:
    """1 / width for each feature, largest first: how much the function may change along it."""
    if best["widths_kind"] == "shared":
        axes.text(0.5, 0.5, "one width for all features", ha="center", va="center")
        axes.set_axis_off()
        return
    inverse = 1.0 / np.array(best["widths"])
    order = np.argsort(-inverse, kind="stable")[:MOST_FEATURES]
    axes.barh(np.arange(len(order)), inverse[order], color="tab:gray")
    axes.set_yticks(np.arange(len(order)), [str(names[k])[:20] for k in order], fontsize="x-small")
    axes.invert_yaxis()
    axes.set(xlabel="1 / width", xscale="log")
    axes.set_title("features by their widths", fontsize="medium")


def _draw_alphas(axes: Any, plane: dict[str, Any]) -> None:
    """The error against alpha for each factor on the widths."""
    for factor, errors in zip(plane["factors"], plane["errors"], strict=True):
        axes.plot(plane["alphas"], errors, marker=".", linewidth=0.8, label=f"widths x {factor:.2g}")
    axes.set(xlabel="alpha", ylabel=_error_name(plane), xscale="log")
    axes.set_title(_plane_title(plane), fontsize="medium")
    axes.legend(fontsize="small")


def _draw_plane(figure: Any, axes: Any, plane: dict[str, Any]) -> None:
    """One cell for each (alpha, factor) that was computed."""
    errors = np.array(plane["errors"])
    drawn = axes.imshow(errors, aspect="auto", origin="lower", interpolation="none", cmap="viridis_r")
    ticks = np.linspace(0, len(plane["alphas"]) - 1, 5).astype(int)
    axes.set_xticks(ticks, [f"{plane['alphas'][k]:.1e}" for k in ticks], fontsize="small")
    axes.set_yticks(np.arange(len(plane["factors"])), [f"{factor:.2g}" for factor in plane["factors"]])
    i, j = np.unravel_index(int(np.argmin(errors)), errors.shape)
    axes.plot(j, i, marker="x", color="white", markersize=9)
    axes.set(xlabel="alpha", ylabel="factor on the widths")
    figure.colorbar(drawn, ax=axes, label=_error_name(plane))


def _plane_title(plane: dict[str, Any]) -> str:
    return f"{plane['kernel']}, {_widths_in_words(plane)}, {plane['num_rows']:,} rows"
