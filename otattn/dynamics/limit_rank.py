"""How the ranks of limits of Gaussian flows are distributed over random attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.dynamics.gaussian_fields import GaussianField, L2Field, SoftmaxField, SumField
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
        ``proved`` where it is known. Else, for one head and for ``V = I``,
        ``dim ker A + min(#positive, #negative eigenvalues)`` of the symmetric part of A: the bound of the rank of a finite
        limit for ``V = I``, and for symmetric A and generic V (no two eigenvalues of V of sum zero); of the sum of the A for
        several heads. ``dim`` for several heads of other V.
    dim, rank, variant, value, symmetric, semidefinite, heads
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
    heads: int = 1
    proved: int | None = None
    """The rank that every limit has, by a theorem (:mod:`otattn.dynamics.low_rank_flow`), for almost all draws; None where
    none is known."""

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
        several = "" if self.heads == 1 else f"{self.heads} heads, "
        proved = "" if self.proved is None else f", proved {self.proved}"
        return (
            f"RankHistogram({self.variant}, {several}dim={self.dim}, rank A={self.rank}, V {self.value}, "
            f"counts={self.counts.tolist()}{proved}, {int(self.settled.sum())} of {len(self.ranks)} settled)"
        )


def limit_rank_histogram(
    variant: Variant = "softmax",
    *,
    dim: int,
    draws: int = 100,
    law: Literal["published"] | None = None,
    value: Value = "identity",
    rank: int | None = None,
    symmetric: bool = False,
    semidefinite: bool = False,
    heads: int = 1,
    rng: np.random.Generator | int,
    tol: float = 1e-9,
) -> RankHistogram:
    """Ranks of the limits of Gaussian flows with random parameters, all in one vectorised integration.

    Each draw has ``A = K^T Q`` with standard normal K, Q of shape (rank, dim) (symmetric A: ``Q = D K``, D random signs;
    semi-definite A: ``-Q^T Q / sqrt(dim)``), ``V = I``, standard normal, or ``F^T F`` with F standard normal ("gram"), and
    ``Sigma_0 = F F^T``, F standard normal. The published law is ``value="gram", semidefinite=True``: its limits are finite
    and of rank exactly ``dim - rank`` (:mod:`otattn.dynamics.low_rank_flow`), ``max(dim - heads * rank, 0)`` for several heads.

    Two facts frame the result, for softmax and L2. Along the flow ``L' = G L`` with ``G = (...) A`` or ``(...) Q``, so
    ``L r`` is constant for r in the kernel of ``Q L_0``: a limit that is finite has rank at least ``dim - rank``. And it
    satisfies ``V Sigma A Sigma + (V Sigma A Sigma)^T = 0`` (softmax), for symmetric A and generic V only if ``Sigma A Sigma
    = 0``, which bounds its rank by ``bounds``. With A of rank ``floor(d/2)`` and semi-definite both are ``ceil(d/2)``.

    Parameters
    ----------
    variant : {"softmax", "l2"}
    dim : int
    draws : int
    law : {"published"}, optional
        The law of the papers, in place of ``value``, ``symmetric`` and ``semidefinite``.
    value : {"identity", "random", "gram"}
    rank : int, optional
        ``floor(dim / 2)`` by default.
    symmetric, semidefinite : bool
        A semi-definite A is symmetric.
    heads : int
        Independent heads whose velocities are added. Several are integrated one draw after the other: seconds a draw.
    rng : Generator or int
    tol : float
        Relative size below which an eigenvalue counts as zero.

    Examples
    --------
    >>> limit_rank_histogram(dim=2, draws=10, rng=0)   # x -> A + A^T has a positive direction: one line wins
    RankHistogram(softmax, dim=2, rank A=1, V identity, counts=[0, 10, 0], 10 of 10 settled)
    >>> limit_rank_histogram("l2", dim=3, draws=5, law="published", rng=0)
    RankHistogram(l2, dim=3, rank A=1, V gram, counts=[0, 0, 5, 0], proved 2, 5 of 5 settled)

    References
    ----------
    Castin, Ablin, Carrillo, Peyre, "A Unified Perspective on the Dynamics of Deep Transformers", 2025.
    """
    if variant not in ("softmax", "l2") or value not in ("identity", "random", "gram"):
        raise ValueError(
            'variant must be "softmax" or "l2" and value "identity", "random" or "gram", received '
            f"{variant!r} and {value!r}."
        )
    if law is not None:
        if law != "published" or value != "identity" or symmetric or semidefinite:
            raise ValueError(
                'law must be "published", which says what value, symmetric and semidefinite are, received '
                f"law={law!r} with value={value!r}, symmetric={symmetric}, semidefinite={semidefinite}; leave them out."
            )
        value, semidefinite = "gram", True
    d, B, H = check.count(dim, "dim"), check.count(draws, "draws"), check.count(heads, "heads")
    r = max(1, d // 2) if rank is None else check.count(rank, "rank")
    gen = check.rng_from(rng)
    parts = [_drawn_head(variant, (B, r, d), value, symmetric, semidefinite, gen) for _ in range(H)]
    F = gen.standard_normal((B, d, d))
    fields = parts[0][1] if H == 1 else SumField([field for _, field in parts], None, None)
    M, s = scaled_factor(F @ np.swapaxes(F, 1, 2))
    limits = gaussian_limits(fields, M, s, np.zeros((B, d)), tol=check.positive(tol, "tol"))
    proved = max(d - H * r, 0) if semidefinite and value != "random" else None
    if proved is not None:
        bounds = np.full(B, proved, dtype=np.intp)
    elif H == 1 or value == "identity":
        forms = np.sum([A for A, _ in parts], axis=0)
        bounds = np.array([isotropic_dimension(form) for form in forms], dtype=np.intp)
    else:
        bounds = np.full(B, d, dtype=np.intp)
    ranks = np.array([l.rank for l in limits], dtype=np.intp)
    kind = symmetric or semidefinite
    return RankHistogram(ranks, tuple(limits), bounds, d, r, variant, value, kind, semidefinite, H, proved)


def _drawn_head(
    variant: Variant, shape: tuple[int, int, int], value: Value, symmetric: bool, semidefinite: bool, gen: Any
) -> tuple[Array, GaussianField]:
    """A stack of heads ``(B, rank, d)``: their A, and the field."""
    B, r, d = shape
    K, Q = gen.standard_normal(shape), gen.standard_normal(shape)
    if semidefinite:
        Q = Q / d**0.25
        K = -Q
    elif symmetric:
        Q = K * gen.choice([-1.0, 1.0], size=(B, r, 1))
    V: Array = np.broadcast_to(np.eye(d), (B, d, d)) if value == "identity" else gen.standard_normal((B, d, d))
    V = np.swapaxes(V, 1, 2) @ V if value == "gram" else V
    A = np.swapaxes(K, 1, 2) @ Q
    return A, SoftmaxField(A, V) if variant == "softmax" else L2Field(Q, K, V)
