"""Gaussian measures on R^d, possibly degenerate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import psd_eigh, psd_sqrt, symmetrize
from otattn.measures.discrete import DiscreteMeasure

__all__ = ["GaussianMeasure", "check_covariance", "check_covariances"]

COVARIANCE_TOL = 1e-10
"""Relative to the largest entry: asymmetry, and negative eigenvalues, that count as rounding of float64 arithmetic."""
ROUNDINGS = 4.0
"""Coarser types leave more: this many roundings of the type that the matrix came in, times its dimension d."""


def check_covariance(
    value: Any, name: str = "cov", *, dim: int | None = None, resolution: float | None = None
) -> NDArray[np.float64]:
    """A symmetric PSD matrix ``(d, d)``, symmetrised to the bit; see :func:`check_covariances`."""
    S = check.matrix(value, name, shape=(dim, dim))
    if S.shape[0] != S.shape[1]:
        raise ValueError(f"{name} must be square, received shape {S.shape}.")
    return check_covariances(value, name, resolution=resolution)


def check_covariances(value: Any, name: str, *, resolution: float | None = None) -> NDArray[np.float64]:
    r"""Symmetric PSD matrices ``(..., d, d)``, symmetrised to the bit.

    Asymmetry and negative eigenvalues count as rounding up to a part :math:`\max(10^{-10}, 4 d \varepsilon)` of the
    largest entry, with the rounding :math:`\varepsilon` of the type that the matrices came in: each entry of ``R S R^T``
    or of a sample covariance is a sum, so its error is a few roundings of its terms, and an error of that size in each
    entry moves an eigenvalue by at most d times as much. What is negative beyond float64's part is projected to zero.
    ``resolution`` is that rounding where ``value`` has been converted before.
    """
    S = check.as_float_array(value, name)
    if S.ndim < 2 or S.shape[-1] != S.shape[-2] or S.size == 0:
        raise ValueError(f"{name} must be one or more square matrices (..., d, d), received shape {S.shape}.")
    tol = max(COVARIANCE_TOL, ROUNDINGS * S.shape[-1] * (resolution or check.resolution(value)))
    size = np.abs(S).max(axis=(-2, -1))
    with np.errstate(over="ignore"):
        skew = np.abs(S - np.swapaxes(S, -1, -2)).max(axis=(-2, -1))
    if (skew > tol * size).any():
        raise ValueError(
            f"{name} is not symmetric: entries differ by {skew.max():g} from the transpose; pass (S + S.T) / 2."
        )
    S = symmetrize(S)
    least = np.linalg.eigvalsh(S)[..., 0]
    if (least < -tol * size).any():
        raise ValueError(
            f"{name} is not positive semi-definite: its least eigenvalue is {least.min():g}; project it first."
        )
    coarse = least < -COVARIANCE_TOL * size
    if coarse.any():
        s, E = psd_eigh(S[coarse])
        S[coarse] = symmetrize((E * s[..., None, :]) @ np.swapaxes(E, -1, -2))
    return S


@dataclass(frozen=True, eq=False, init=False)
class GaussianMeasure(Saved):
    """The Gaussian measure ``N(mean, cov)``, of any rank.

    Parameters
    ----------
    mean : array_like (d,)
    cov : array_like (d, d)
        Symmetric positive semi-definite, to a part 1e-10 of its largest entry, or to the rounding of the type that it
        comes in (``4 d eps`` for float32 and coarser).

    Raises
    ------
    ValueError
        ``cov`` is not symmetric, not positive semi-definite, or of another size than ``mean``.

    Examples
    --------
    >>> g = GaussianMeasure([0.0, 1.0], [[1.0, 0.0], [0.0, 0.0]])
    >>> g.pushforward_affine([[2.0, 0.0]], [1.0]).cov
    array([[4.]])
    """

    mean: NDArray[np.float64]
    cov: NDArray[np.float64]

    def __init__(self, mean: ArrayLike, cov: ArrayLike) -> None:
        m = check.vector(mean, "mean")
        if m.size == 0:
            raise ValueError("mean must have at least one entry, received none.")
        object.__setattr__(self, "mean", check.frozen(m))
        object.__setattr__(self, "cov", check.frozen(check_covariance(cov, dim=m.size)))

    @classmethod
    def from_samples(cls, points: ArrayLike | DiscreteMeasure) -> GaussianMeasure:
        """The Gaussian with the mean and the covariance of points ``(n, d)`` or of a weighted measure (divided by n, not n - 1).

        Examples
        --------
        >>> GaussianMeasure.from_samples([[0.0], [2.0]]).cov
        array([[1.]])
        """
        measure = points if isinstance(points, DiscreteMeasure) else DiscreteMeasure(points)
        return cls(measure.mean(), measure.covariance())

    @property
    def dim(self) -> int:
        """Dimension d of the space."""
        return int(self.mean.size)

    def sample(self, n: int, rng: np.random.Generator | int) -> DiscreteMeasure:
        """The empirical measure of ``n`` independent draws."""
        z = check.rng_from(rng).standard_normal((check.count(n, "n"), self.dim))
        return DiscreteMeasure(self.mean + z @ psd_sqrt(self.cov))

    def pushforward_affine(self, matrix: ArrayLike, offset: ArrayLike | None = None) -> GaussianMeasure:
        """The image ``N(M m + b, M Sigma M^T)`` under ``x -> M x + b``; ``matrix`` has shape ``(e, d)``."""
        M = check.matrix(matrix, "matrix", shape=(None, self.dim))
        b = np.zeros(M.shape[0]) if offset is None else check.vector(offset, "offset", size=M.shape[0])
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below, by name
            F = M @ psd_sqrt(self.cov)  # F F^T is PSD to rounding, M Sigma M^T is not
            mean, cov = M @ self.mean + b, F @ F.T
        return GaussianMeasure(mean, cov)

    def __repr__(self) -> str:
        return f"GaussianMeasure(dim={self.dim}, trace={float(np.trace(self.cov)):.6g})"
