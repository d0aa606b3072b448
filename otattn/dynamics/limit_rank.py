"""How the ranks of limits of Gaussian flows are distributed over random attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.dynamics.gaussian_fields import GaussianField, L2Field, SoftmaxField
from otattn.dynamics.gaussian_limit import GaussianLimit, gaussian_limits, isotropic_dimension, scaled_factor

__all__ = ["RankHistogram", "limit_rank_histogram"]

Variant = Literal["softmax", "l2"]
Value = Literal["identity", "random", "gram"]


@dataclass(frozen=True, eq=False)
class RankHistogram(Result):
    """Ranks of the limits of random Gaussian flows.

    Attributes
    ----------
    ranks : ndarray (draws,) of int
        Of the limit, or of the limit of ``Sigma / tr Sigma`` when Sigma diverges or blows up.
    limits : tuple of GaussianLimit
        With kind, eigenvalues, and whether the flow had settled.
    bounds : ndarray (draws,) of int
        ``dim ker A + min(#positive, #negative eigenvalues)`` of the symmetric part of A: the bound of the rank of a finite
        limit for ``V = I``, and for symmetric A and generic V (no two eigenvalues of V of sum zero).
    dim, rank, variant, value, symmetric, semidefinite
        The experiment: dimension, rank of A, "softmax" or "l2", V "identity", "random" or "gram", A symmetric or not, A
        negative semi-definite or not.
    """

    ranks: NDArray[np.intp]
    limits: tuple[GaussianLimit, ...]
    bounds: NDArray[np.intp]
    dim: int
    rank: int
    variant: Variant
    value: str
    symmetric: bool
    semidefinite: bool = False

    _columns = ("ranks", "bounds")

    @property
    def counts(self) -> NDArray[np.intp]:
        """How many limits have rank 0, ..., dim."""
        return np.bincount(self.ranks, minlength=self.dim + 1)

    @property
    def kinds(self) -> dict[str, int]:
        """How many flows went to zero, to a finite limit, diverged, or blew up."""
        return {k: sum(l.kind == k for l in self.limits) for k in ("zero", "finite", "divergent", "blow_up")}

    @property
    def settled(self) -> NDArray[np.bool_]:
        """Which flows had settled: the ranks of others (which turn, or move for too long) are guesses, but where their
        ``status`` is "rank_only"."""
        return np.array([l.settled for l in self.limits])

    def __repr__(self) -> str:
        return (
            f"RankHistogram({self.variant}, dim={self.dim}, rank A={self.rank}, V {self.value}, "
            f"counts={self.counts.tolist()}, {int(self.settled.sum())} of {len(self.ranks)} settled)"
        )


def limit_rank_histogram(
    variant: Variant = "softmax",
    *,
    dim: int,
    draws: int = 100,
    value: Value = "identity",
    rank: int | None = None,
    symmetric: bool = False,
    semidefinite: bool = False,
    rng: np.random.Generator | int,
    tol: float = 1e-9,
) -> RankHistogram:
    """Ranks of the limits of Gaussian flows with random parameters, all in one vectorised integration.

    Each draw has ``A = K^T Q`` with standard normal K, Q of shape (rank, dim) (symmetric A: ``Q = D K``, D random signs;
    semi-definite A: ``-Q^T Q / sqrt(dim)``), ``V = I``, standard normal, or ``F^T F`` with F standard normal ("gram"), and
    ``Sigma_0 = F F^T``, F standard normal. The published law is ``value="gram", semidefinite=True``: its limits are finite
    and of rank exactly ``dim - rank`` (:mod:`otattn.dynamics.low_rank_flow`).

    Two facts frame the result, for softmax and L2. Along the flow ``L' = G L`` with ``G = (...) A`` or ``(...) Q``, so
    ``L r`` is constant for r in the kernel of ``Q L_0``: a limit that is finite has rank at least ``dim - rank``. And it
    satisfies ``V Sigma A Sigma + (V Sigma A Sigma)^T = 0`` (softmax), for symmetric A and generic V only if ``Sigma A Sigma
    = 0``, which bounds its rank by ``bounds``. With A of rank ``floor(d/2)`` and semi-definite both are ``ceil(d/2)``.

    Parameters
    ----------
    variant : {"softmax", "l2"}
    dim : int
    draws : int
    value : {"identity", "random", "gram"}
    rank : int, optional
        ``floor(dim / 2)`` by default.
    symmetric, semidefinite : bool
        A semi-definite A is symmetric.
    rng : Generator or int
    tol : float
        Relative size below which an eigenvalue counts as zero.

    Examples
    --------
    >>> limit_rank_histogram(dim=2, draws=10, rng=0)   # x -> A + A^T has a positive direction: one line wins
    RankHistogram(softmax, dim=2, rank A=1, V identity, counts=[0, 10, 0], 10 of 10 settled)

    References
    ----------
    Castin, Ablin, Carrillo, Peyre, "A Unified Perspective on the Dynamics of Deep Transformers", 2025.
    """
    if variant not in ("softmax", "l2") or value not in ("identity", "random", "gram"):
        raise ValueError(
            'variant must be "softmax" or "l2" and value "identity", "random" or "gram", received '
            f"{variant!r} and {value!r}."
        )
    d, B = check.count(dim, "dim"), check.count(draws, "draws")
    r = max(1, d // 2) if rank is None else check.count(rank, "rank")
    gen = check.rng_from(rng)
    K, Q = gen.standard_normal((B, r, d)), gen.standard_normal((B, r, d))
    if semidefinite:
        Q = Q / d**0.25
        K = -Q
    elif symmetric:
        Q = K * gen.choice([-1.0, 1.0], size=(B, r, 1))
    V: Array = np.broadcast_to(np.eye(d), (B, d, d)) if value == "identity" else gen.standard_normal((B, d, d))
    V = np.swapaxes(V, 1, 2) @ V if value == "gram" else V
    F = gen.standard_normal((B, d, d))
    A = np.swapaxes(K, 1, 2) @ Q
    fields: GaussianField = SoftmaxField(A, V) if variant == "softmax" else L2Field(Q, K, V)
    M, s = scaled_factor(F @ np.swapaxes(F, 1, 2))
    limits = gaussian_limits(fields, M, s, np.zeros((B, d)), tol=check.positive(tol, "tol"))
    bounds: Any = np.array([isotropic_dimension(form) for form in A], dtype=np.intp)
    ranks = np.array([l.rank for l in limits], dtype=np.intp)
    kind = symmetric or semidefinite
    return RankHistogram(ranks, tuple(limits), bounds, d, r, variant, value, kind, semidefinite)
