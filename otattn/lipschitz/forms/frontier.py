r"""How much a direction orthogonal to ``A x`` can still see of A and of V, when ``|A x|`` is large.

Unit ball, ``||A|| <= 1``, ``||V|| <= 1``. Let M be symmetric PSD, ``|A x| >= gamma_0``, and d orthogonal to ``A x``. The largest
eigenvalue of M is then not free: what is left of it orthogonal to ``A x`` is bounded below ``||M||``.

**Lemma.** Let W be symmetric, invertible, with at most one positive eigenvalue, and ``eta = ||M - y - W^{-1}||``. If for some ``t >
0`` and ``gamma_0 > 0``

.. math:: \lambda_{\max}\bigl(A^T (I - t W) A\bigr) < \gamma_0^2 ,

then ``<d, M d> <= (y + eta) |d|^2`` for every d orthogonal to ``g = A x``, ``|x| <= 1``, ``|g| >= gamma_0``.

*Proof.* ``gamma_0^2 <= |g|^2`` and ``|g|^2 - t <g, W g> < gamma_0^2``, so ``<g, W g> > 0``. The matrix ``[[W^{-1}, g], [g^T,
0]]`` has the inertia of ``W^{-1}`` and of ``-<g, W g>`` together: one positive eigenvalue. It also has that of the restriction of
``W^{-1}`` to the complement of g and one of each sign (g is not 0). So the restriction has no positive eigenvalue, and ``M <= y +
eta + W^{-1}``. ∎ With ``E = I - W (M - y)``, ``||E|| < 1``: ``eta <= ||M - y|| ||E|| / (1 - ||E||)``. W comes from the eigenvalues
of M, y and t from a search; each is as good as it proves to be. The best t loses nothing when d is at least 3 (two quadratic forms
in g).

**The forms.** ``V^T V`` gives ``beta``, the largest ``|V d|/|d|``; ``A A^T`` gives ``delta``, the largest ``|A^T d|/|d|``; ``M_s =
(s V^T V + A A^T / s)/2`` bounds ``|V d| |A^T d| / |d|^2``. The smaller of beta and delta bounds this too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from otattn._linalg import EPS, Array, lambda_max_upper, mid, norm_upper, product_error, spectral_norm_upper
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.certificate import multiplier

HEIGHTS = 24
"""Heights y of each form, between its second eigenvalue and its first."""
BALANCES = np.array([0.4, 1.0, 2.5])
"""The numbers s of the forms ``M_s``."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Bounds of the forms ``V^T V, A A^T, M_s, ...`` orthogonal to ``A x``; ``A``, ``V`` arrays or balls of norm at most 1.

    ``heights`` are the y, ``shares`` the t of the lemma, ``(forms, HEIGHTS)``.
    """

    A: Any
    V: Any
    heights: Array
    shares: Array

    @classmethod
    def of(cls, A: Any, V: Any, multipliers: Mapping[str, Array]) -> Frontier:
        """The frontier that the multipliers prove."""
        shape = (2 + BALANCES.size, HEIGHTS)
        heights = multiplier(multipliers, "heights", shape, positive=True)
        return cls(A, V, heights, multiplier(multipliers, "shares", shape, positive=True))

    @classmethod
    def found(cls, A: Array, V: Array) -> Frontier:
        """Heights between the two largest eigenvalues, each with a t that serves it."""
        heights, shares = [], []
        for M in cls(A, V, np.empty(0), np.empty(0)).forms:
            w = np.append(0.0, np.linalg.eigvalsh(M))
            ys = w[-2] + (w[-1] - w[-2]) * np.linspace(0.02, 0.98, HEIGHTS) + 1e-9
            heights.append(ys)
            shares.append([_share(A, _inverse(M, y)) for y in ys.tolist()])
        return cls(A, V, np.array(heights), np.array(shares))

    @cached_property
    def forms(self) -> list[Any]:
        """``V^T V``, ``A A^T`` and the ``M_s``."""
        values, keys = self.V.T @ self.V, self.A @ self.A.T
        return [values, keys, *(0.5 * (s * values + keys / s) for s in BALANCES.tolist())]

    @cached_property
    def norms(self) -> Array:
        """Upper bounds of ``||M||``."""
        lost = self._lost
        return np.array([top(spectral_norm_upper(M)) + lost for M in self.forms])

    @property
    def _lost(self) -> float:
        """What rounding did to the forms."""
        error = product_error(self.V.T, self.V) + product_error(self.A, self.A.T)
        return 0.0 if error == 0.0 else 2.0 * error / float(BALANCES.min()) + 16.0 * EPS

    @cached_property
    def proved(self) -> tuple[Array, Array]:
        """``gamma^2`` and ``y + eta`` of each height: beyond the first the second holds; ``inf`` where nothing is proved."""
        pairs = [
            [self._prove(M, y, t) for y, t in zip(ys, ts, strict=True)]
            for M, ys, ts in zip(self.forms, self.heights.tolist(), self.shares.tolist(), strict=True)
        ]
        out = np.array(pairs)
        return out[..., 0], out[..., 1]

    def _prove(self, M: Any, y: float, t: float) -> tuple[float, float]:
        d = len(M)
        W = _inverse(mid(M), y)
        size = float(np.linalg.norm(W))
        if not np.isfinite(size * t) or size > 1e12:
            return math.inf, math.inf
        w, U = np.linalg.eigh(W)
        if d > 1:
            wrap: Any = BallMatrix.exact if isinstance(M, BallMatrix) else np.asarray
            u = wrap(U[:, -1:])
            rest = top(lambda_max_upper(wrap(W) - (u @ u.T) * (2.0 * abs(float(w[-1])))))
            if not rest + 16.0 * d * EPS * size < 0.0:
                return math.inf, math.inf
        shifted = M - y * np.eye(d)
        E = np.eye(d) - W @ shifted
        miss = top(norm_upper(E)) + product_error(W, shifted) + size * self._lost + (d + 4) * EPS
        if not miss < 0.5:
            return math.inf, math.inf
        eta = 2.0 * (top(spectral_norm_upper(M)) + y) * miss
        near = self.A.T @ ((np.eye(d) - t * W) @ self.A)
        rounded = 0.0 if isinstance(M, BallMatrix) else 64.0 * d * EPS * (1.0 + t * size)
        return top(lambda_max_upper(0.5 * (near + near.T))) + rounded, (y + eta) * (1.0 + 4.0 * EPS)

    def at(self, gamma: Array) -> Array:
        """Bounds of the forms ``(forms, cells)`` where ``|A x| >= gamma``."""
        square, height = self.proved
        proved = (square[:, :, None] * (1.0 + 4.0 * EPS) < gamma**2) & (gamma > 0.0)
        return np.minimum(self.norms[:, None], np.where(proved, height[:, :, None], np.inf).min(axis=1))


def _inverse(M: Array, y: float) -> Array:
    """A symmetric matrix near ``(M - y)^{-1}``."""
    w, U = np.linalg.eigh(M)
    gap = w - y
    gap = np.where(np.abs(gap) < 1e-13, -1e-13, gap)
    W = (U / gap) @ U.T
    return np.asarray(0.5 * (W + W.T))


def _share(A: Array, W: Array) -> float:
    """A t near the least largest eigenvalue of ``A^T (I - t W) A``, which is convex in t."""
    N, B = A.T @ A, A.T @ W @ A
    size = max(float(np.linalg.norm(B)), 1e-300)

    def largest(x: float) -> float:
        return float(np.linalg.eigvalsh(N - math.exp(x) / size * B)[-1])

    return (
        math.exp(float(minimize_scalar(largest, bounds=(-8.0, 8.0), method="bounded", options={"xatol": 1e-4}).x))
        / size
    )
