"""Growth of the local constant with the number of tokens, over heads and windows of a real layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm.auto import tqdm

from otattn import _validate as check
from otattn._linalg import row_norms
from otattn._tabular import Result, plain
from otattn.attention import AttentionMap
from otattn.lipschitz.local.value import local_lipschitz

__all__ = ["Exponent", "LocalGrowth", "fit_exponent", "local_growth"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Exponent(Result):
    """A fitted power law ``value ~ n^exponent`` with its standard error."""

    exponent: float
    standard_error: float
    prefactor: float

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Normal confidence interval of the exponent."""
        from scipy.stats import norm

        half = float(norm.ppf(0.5 + level / 2)) * self.standard_error
        return self.exponent - half, self.exponent + half


def fit_exponent(n_values: ArrayLike, values: ArrayLike) -> Exponent:
    """Least squares of ``log value`` on ``log n``; repeated series (the rows of ``values``) give the standard error.

    Parameters
    ----------
    n_values : array_like (m,)
    values : array_like (m,) or (s, m)
        Positive values; each of the s rows is one independent series (a window). With one row the standard error is
        that of the regression, with several it is that of the mean of the rows' slopes.

    Examples
    --------
    >>> round(fit_exponent([1, 4, 16], [1.0, 2.0, 4.0]).exponent, 12)
    0.5
    """
    x = np.log(check.vector(n_values, "n_values"))
    y = check.as_float_array(values, "values")
    y = y.reshape(-1, len(x))
    if len(x) < 2 or (y <= 0).any():
        raise ValueError(f"a power law needs at least 2 sizes and positive values, received {len(x)} and {y.min():g}.")
    y = np.log(y)
    centred = x - x.mean()
    slopes = y @ centred / (centred @ centred)
    slope = float(slopes.mean())
    intercept = float(y.mean() - slope * x.mean())
    if len(y) > 1:
        error = float(slopes.std(ddof=1) / np.sqrt(len(y)))
    elif len(x) > 2:
        rest = y[0] - intercept - slope * x
        error = float(np.sqrt(rest @ rest / (len(x) - 2) / (centred @ centred)))
    else:
        error = float("nan")
    return Exponent(slope, error, float(np.exp(intercept)))


@dataclass(frozen=True, eq=False)
class LocalGrowth(Result):
    """Local constants of several heads at the first n tokens of several windows.

    Attributes
    ----------
    n_values : ndarray (m,)
    particle, splitting : ndarray (heads, windows, m)
    radii : ndarray (windows, m)
        Largest token norm of the first n tokens.
    """

    n_values: Array
    particle: Array
    splitting: Array
    radii: Array

    @property
    def values(self) -> Array:
        """The W_2 local constants, ``max(particle, splitting)``."""
        return np.maximum(self.particle, self.splitting)

    def exponent(self, head: int) -> Exponent:
        """Fitted growth of one head's particle part, standard error over windows."""
        return fit_exponent(self.n_values, self.particle[head])

    def mean_exponent(self) -> Exponent:
        """Growth of the geometric mean over heads, standard error over windows."""
        return fit_exponent(self.n_values, np.exp(np.log(self.particle).mean(axis=0)))

    def rows(self) -> list[dict[str, Any]]:
        """One record a head, window and size."""
        heads, windows, sizes = self.particle.shape
        return [
            {
                "head": h,
                "window": w,
                "n": int(self.n_values[k]),
                "particle": float(self.particle[h, w, k]),
                "splitting": float(self.splitting[h, w, k]),
                "radius": float(self.radii[w, k]),
            }
            for h in range(heads)
            for w in range(windows)
            for k in range(sizes)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, ready for JSON."""
        return {
            "n": [int(n) for n in self.n_values],
            "particle": plain(self.particle),
            "splitting": plain(self.splitting),
            "radius": plain(self.radii),
        }


def sizes_within(length: int) -> list[int]:
    """Numbers of tokens that are measured in windows of a length."""
    return [n for n in (8, 16, 32, 64, 128) if n <= length] or [length]


def local_growth(
    heads: Sequence[AttentionMap],
    windows: ArrayLike,
    *,
    n_values: Sequence[int] = (8, 16, 32, 64, 128),
    tol: float = 1e-8,
    progress: bool = False,
) -> LocalGrowth:
    """W_2 local constants of ``heads`` at the first n tokens of each window.

    Parameters
    ----------
    heads : sequence of AttentionMap
    windows : array_like (windows, length, d)
    n_values : sequence of int
        Numbers of tokens, at most ``length``.
    tol : float
        Residual of the singular value solver.
    progress : bool
        Show a bar on stderr.
    """
    X = check.as_float_array(windows, "windows", ndim=3)
    sizes = [check.count(n, "n_values") for n in n_values]
    if not sizes or max(sizes) > X.shape[1]:
        raise ValueError(f"n_values must be at most the window length {X.shape[1]}, received {sizes}.")
    particle = np.empty((len(heads), len(X), len(sizes)))
    splitting = np.empty_like(particle)
    jobs: Iterable[tuple[int, int, int]] = [
        (h, w, k) for h in range(len(heads)) for w in range(len(X)) for k in range(len(sizes))
    ]
    for h, w, k in tqdm(jobs, desc="local constants", disable=not progress, leave=False):
        local = local_lipschitz(heads[h], X[w, : sizes[k]], tol=tol)
        particle[h, w, k], splitting[h, w, k] = local.particle, local.splitting
    norms = row_norms(X.reshape(-1, X.shape[2])).reshape(X.shape[:2])
    radii = np.stack([norms[:, :n].max(axis=1) for n in sizes], axis=1)
    return LocalGrowth(np.asarray(sizes, dtype=np.float64), particle, splitting, radii)
