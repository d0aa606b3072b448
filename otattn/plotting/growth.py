"""Local constants and errors of sampling against the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from otattn.lipschitz.local.growth import LocalGrowth
from otattn.plotting.style import COLORS, axes, expect, finished, metric, power
from otattn.stability.sample_complexity import SampleComplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_crossover", "plot_local_growth", "plot_sample_complexity"]


def plot_local_growth(
    growth: LocalGrowth, *, bounds: Mapping[str, Sequence[float]] | None = None, ax: Axes | None = None
) -> Axes:
    """Local constants of each head (thin), their geometric mean with its fitted exponent, and upper bounds; log-log.

    Parameters
    ----------
    growth : LocalGrowth
    bounds : mapping of label to values at ``growth.n_values``, optional
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
    """
    expect(growth, LocalGrowth, "growth")
    ax = axes(ax)
    n = growth.n_values
    per_head = growth.values.mean(axis=1)
    for k, values in enumerate(per_head):
        label = "one head, mean over windows" if k == 0 else None
        ax.plot(n, values, color=COLORS["sky"], lw=0.8, alpha=0.8, label=label)
    mean = np.exp(np.log(np.maximum(growth.values, 1e-300)).mean(axis=(0, 1)))
    fit = growth.mean_exponent()
    label = f"geometric mean, fitted growth {power(fit.exponent, fit.standard_error)}"
    ax.plot(n, mean, color=COLORS["blue"], marker="o", ms=4, lw=2, label=label)
    for (name, values), color in zip((bounds or {}).items(), ("red", "orange", "purple", "green"), strict=False):
        ax.plot(n, values, color=COLORS[color], ls="--", lw=1.5, label=name)
    return against_tokens(ax, n)


def against_tokens(ax: Any, n: Sequence[float] | NDArray[np.float64]) -> Any:
    """The end of a picture of local constants against the numbers of tokens ``n``: both axes in logarithms."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(n, [f"{int(v)}" for v in n])
    return finished(ax, xlabel="number of tokens n", ylabel=f"local Lipschitz constant in {metric(2)}")


def plot_crossover(
    n_values: Sequence[float],
    log10_discrete: Mapping[str, Sequence[float]],
    log10_mean_field: Mapping[str, float],
    *,
    crossings: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Discrete bounds that grow with n against mean-field bounds that do not; both axes in powers of ten.

    Parameters
    ----------
    n_values : log10 of the numbers of tokens, shape (m,)
    log10_discrete : label -> log10 of the bound at each n
    log10_mean_field : label -> log10 of the bound
    crossings : label -> log10 of the n at which the mean-field bound becomes the smaller one
    ax : matplotlib Axes, optional
    """
    ax = axes(ax)
    palette = ("red", "blue", "purple", "green")
    for (name, values), color in zip(log10_discrete.items(), palette, strict=False):
        ax.plot(n_values, values, color=COLORS[color], lw=2, label=name)
    for (name, level), color in zip(log10_mean_field.items(), palette, strict=False):
        ax.axhline(level, color=COLORS[color], ls="--", lw=1.5, label=name)
    for (name, at), color in zip((crossings or {}).items(), palette, strict=False):
        label = f"{name}, crossing at $n = 10^{{{at:.1f}}}$"
        ax.axvline(at, ymax=0.7, color=COLORS[color], ls=":", lw=1, label=label)
    return finished(
        ax, xlabel=r"$\log_{10}$ of the number of tokens n", ylabel=rf"$\log_{{10}}$ of the {metric(2)} Lipschitz bound"
    )


def plot_sample_complexity(result: SampleComplexity, *, ax: Axes | None = None) -> Axes:
    """The largest error on each ball with its range over the samples and its fitted power, ``C / sqrt(n)`` dashed; log-log.

    Parameters
    ----------
    result : SampleComplexity
    ax : matplotlib Axes, optional
    """
    expect(result, SampleComplexity, "result")
    ax = axes(ax)
    n, palette = result.sizes, ("blue", "orange", "green", "purple", "red")
    top = 3.0 * float(result.errors.max())
    for i, radius in enumerate(result.radii):
        color, found, fit = COLORS[palette[i % len(palette)]], result.errors[i], result.fit(i)
        label = f"R = {radius:g}: {power(fit.exponent, fit.standard_error)}"
        ax.plot(n, np.exp(np.log(found).mean(axis=1)), color=color, marker="o", ms=4, lw=2, label=label)
        ax.fill_between(n, found.min(axis=1), found.max(axis=1), color=color, alpha=0.15, lw=0)
        if result.constants is not None and result.constants[i] / np.sqrt(n[-1]) < top:
            expected = f"$C / \\sqrt{{n}}$ at R = {radius:g}"
            ax.plot(n, result.constants[i] / np.sqrt(n), color=color, ls="--", lw=1, label=expected)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(n, [f"{int(v)}" for v in n])
    label = r"$\sup_{|x| \leq R} |\Gamma_{\mu_n}(x) - \Gamma_\mu(x)|$"
    return finished(ax, xlabel="number of tokens n", ylabel=label)
