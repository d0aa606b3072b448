"""Gaussian measures on R^d, possibly degenerate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn._linalg import psd_sqrt, symmetrize
from otattn.measures.discrete import DiscreteMeasure

__all__ = ["GaussianMeasure", "check_covariance"]

SYMMETRY_TOL = 1e-10
PSD_TOL = 1e-10


def check_covariance(value: Any, name: str = "cov", *, dim: int | None = None) -> NDArray[np.float64]:
    """A symmetric PSD matrix (``(d, d)``), symmetrised to the bit; tolerances are relative to its norm."""
    S = check.matrix(value, name, shape=(dim, dim))
    if S.shape[0] != S.shape[1]:
        raise ValueError(f"{name} must be square, received shape {S.shape}.")
    scale = float(np.abs(S).max())
    skew = float(np.abs(S - S.T).max())
    if skew > SYMMETRY_TOL * scale:
        raise ValueError(f"{name} is not symmetric: entries differ by {skew:g} from the transpose; pass (S + S.T) / 2.")
    S = symmetrize(S)
    least = float(np.linalg.eigvalsh(S)[0])
    if least < -PSD_TOL * scale:
        raise ValueError(f"{name} is not positive semi-definite: its least eigenvalue is {least:g}; project it first.")
    return S


@dataclass(frozen=True, eq=False, init=False)
class GaussianMeasure:
    """The Gaussian measure ``N(mean, cov)``, of any rank.

    Parameters
    ----------
    mean : array_like (d,)
    cov : array_like (d, d)
        Symmetric positive semi-definite (relative tolerance 1e-10).

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
        return f"GaussianMeasure(dim={self.dim}, rank={int(np.linalg.matrix_rank(self.cov, hermitian=True))})"
