"""What a sample of ratios says beyond itself: bootstrap intervals, and estimates of its supremum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.errors import ConvergenceError

__all__ = ["Statistic", "bootstrap_interval", "endpoint"]

Statistic = str | float | Callable[[Array], float]

LEAST_SAMPLE = 20
LEAST_TAIL = 10
NEARLY_GUMBEL = -0.05
_BATCH = 2**20


def evaluate(x: Array, statistic: Statistic) -> Callable[[Array], Array]:
    """The statistic along the last axis of an array of resamples."""
    if callable(statistic):
        return lambda rows: np.array([float(statistic(row)) for row in rows])
    if statistic == "mean":
        return lambda rows: np.mean(rows, axis=-1)
    if statistic == "median":
        return lambda rows: np.median(rows, axis=-1)
    if isinstance(statistic, (int, float)) and not isinstance(statistic, bool) and 0.0 <= statistic <= 1.0:
        return lambda rows: np.quantile(rows, statistic, axis=-1)
    raise ValueError(
        f'statistic must be "mean", "median", a quantile level in [0, 1] or a function, received {statistic!r}.'
    )


def bootstrap_interval(
    x: Array, statistic: Statistic, *, level: float, n_resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Percentile bootstrap interval, widened where it would miss the statistic of the sample itself."""
    apply = evaluate(x, statistic)
    step = max(1, _BATCH // len(x))
    values = [
        apply(x[rng.integers(0, len(x), size=(min(step, n_resamples - k), len(x)))])
        for k in range(0, n_resamples, step)
    ]
    low, high = np.quantile(np.concatenate(values), [0.5 - level / 2, 0.5 + level / 2])
    own = float(apply(x[None])[0])
    if not np.isfinite([low, high, own]).all():
        raise ConvergenceError(f"the statistic must be finite on resamples, received {own} and [{low}, {high}].")
    return min(float(low), own), max(float(high), own)


def endpoint(x: Array, tail: int | None = None) -> tuple[float, dict[str, Any]]:
    """Estimate of the right end of the distribution of ``x``, and how it was made.

    A generalised Pareto law is fitted to the excesses of the ``tail`` largest values by probability-weighted
    moments; a shape below -0.05 has the end ``threshold - scale / shape``. A shape near zero or above it (a
    tail that this sample cannot tell from an endless one), or an end below the largest value, falls back to
    the general estimator of Fraga Alves and Neves, a weighted sum of order statistics that is always finite
    and never below the largest value.
    """
    n = len(x)
    if n < LEAST_SAMPLE:
        raise ConvergenceError(
            f"an extreme-value estimate needs at least {LEAST_SAMPLE} ratios, received {n}; draw more pairs."
        )
    k = min(n // 2, max(LEAST_TAIL, round(n ** (2 / 3)))) if tail is None else tail
    if not 2 <= k <= n // 2:
        raise ValueError(f"tail must be an integer from 2 to {n // 2}, half of the {n} ratios, received {k}.")
    top = np.sort(x)[::-1]
    largest, threshold = float(top[0]), float(top[k])
    about: dict[str, Any] = {"tail": k, "threshold": threshold, "largest": largest}
    if largest - threshold <= 1e-12 * abs(largest):
        return largest, {**about, "method": "constant tail"}
    excess = top[:k][::-1] - threshold  # ascending
    a0 = float(excess.mean())
    a1 = float(np.mean((1.0 - (np.arange(1, k + 1) - 0.35) / k) * excess))
    shape = 2.0 - a0 / (a0 - 2.0 * a1)
    scale = 2.0 * a0 * a1 / (a0 - 2.0 * a1)
    about |= {"shape": shape, "scale": scale}
    if shape < NEARLY_GUMBEL:
        end = threshold - scale / shape
        if end >= largest:
            return end, {**about, "method": "generalised Pareto"}
    j = np.arange(k)
    weights = np.log1p(1.0 / (k + j)) / np.log(2.0)  # they sum to 1
    end = largest + threshold - float(weights @ top[k + j])
    return max(end, largest), {**about, "method": "order statistics"}
