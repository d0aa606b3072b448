r"""How much a direction orthogonal, or nearly orthogonal, to ``A x`` can still see of A and of V, when ``|A x|`` is large.

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

**Soft lemma.** Let W and eta be as in the lemma and ``lambda > 0``. If for some ``t > 0`` and ``gamma_0 > 0``

.. math:: \lambda_{\max}\bigl(A^T (I - t (W - 1/\lambda)) A\bigr) < \gamma_0^2 ,

then ``M <= (y + eta) I + lambda g' g'^T`` as matrices, ``g' = A x / |A x|``, for ``|x| <= 1``, ``|A x| >= gamma_0``. So for every
direction d whose share along ``A x`` is ``c = <d, g'>^2 / |d|^2``: ``<d, M d> <= (y + eta + lambda c) |d|^2``.

*Proof.* As above ``<g, (W - 1/lambda) g> > 0``, that is ``<g', W g'> > 1/lambda``. By its two Schur complements the matrix
``[[W^{-1}, g'], [g'^T, 1/lambda]]`` has the inertia of ``W^{-1}`` and of ``1/lambda - <g', W g'> < 0`` together, so at most one
positive eigenvalue, and that of ``1/lambda > 0`` and of ``W^{-1} - lambda g' g'^T`` together. So the latter has none: ``W^{-1} <=
lambda g' g'^T``, and ``M <= y + eta + W^{-1}``. ∎ The lemma is its limit for large lambda. Of a symmetric PSD matrix C (a
covariance) it says ``tr(M C) <= (y + eta) tr C + lambda <g', C g'>``.

**The forms.** ``V^T V`` gives ``beta``, the largest ``|V d|/|d|``; ``A A^T`` gives ``delta``, the largest ``|A^T d|/|d|``; ``M_s =
(s V^T V + A A^T / s)/2`` bounds ``|V d| |A^T d| / |d|^2``. The smaller of beta and delta bounds this too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array, lambda_max_upper, mid, norm_upper, product_error, spectral_norm_upper
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.certificate import multiplier

HEIGHTS = 24
"""Heights y of each form, between its second eigenvalue and its first."""
BALANCES = np.array([0.4, 1.0, 2.5])
"""The numbers s of the forms ``M_s``."""
SIZES = np.geomspace(0.4, 2.5, 7)
"""The numbers s of the forms ``M_s`` of the soft lemma."""
SLOPES = np.array([1.1, 1.4, 2.0, 3.0, 6.0, 15.0, 50.0])
"""Slopes lambda tried at each height, over its distance to the largest eigenvalue."""
TILTS = np.geomspace(1e-3, 1.5, 13)
"""Shares c along ``A x`` at which a line is chosen."""
_LEAST = 1e-3
"""The numbers s of the lines are between this and one over it."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Bounds of the forms ``V^T V, A A^T, M_s, ...`` orthogonal to ``A x``; ``A``, ``V`` arrays or balls of norm at most 1.

    ``heights`` are the y, ``shares`` the t of the lemma, ``(forms, HEIGHTS)``; ``lines`` are rows ``(s, y, lambda, t)`` of the soft
    lemma for ``M_s``, s = 0 for ``V^T V``.
    """

    A: Any
    V: Any
    heights: Array
    shares: Array
    lines: Array = field(default_factory=lambda: np.empty((0, 4)))

    @classmethod
    def of(cls, A: Any, V: Any, multipliers: Mapping[str, Array]) -> Frontier:
        """The frontier that the multipliers prove."""
        shape = (2 + BALANCES.size, HEIGHTS)
        heights = multiplier(multipliers, "heights", shape, positive=True)
        shares = multiplier(multipliers, "shares", shape, positive=True)
        lines = multiplier(multipliers, "lines", (len(multipliers["lines"]), 4), sign=True)
        s = lines[:, 0]
        if not (((s == 0.0) | ((s >= _LEAST) & (s <= 1.0 / _LEAST))).all() and (lines[:, 1:] > 0.0).all()):
            raise ValueError(
                f"lines must be rows (s, y, lambda, t), s = 0 or in [{_LEAST:g}, {1.0 / _LEAST:g}], the others positive."
            )
        return cls(A, V, heights, shares, lines)

    @classmethod
    def found(cls, A: Array, V: Array) -> Frontier:
        """Heights between the two largest eigenvalues, for the soft lemma with slopes beyond what they lack; each with a t."""
        heights, shares, lines = [], [], []
        for M in cls(A, V, np.empty(0), np.empty(0)).forms:
            ys, W, _ = _heights(M)
            heights.append(ys)
            shares.append(_shares(A, W))
        for s in (0.0, *SIZES.tolist()):
            M = _form(A, V, s)
            ys, W, left = _heights(M)
            for factor in SLOPES.tolist():
                slopes = factor * np.maximum(left, 1e-6)
                t = _shares(A, W - np.eye(len(M)) / slopes[:, None, None])
                lines.append(np.stack([np.full(ys.size, s), ys, slopes, t], axis=1))
        return cls(A, V, np.array(heights), np.array(shares), np.concatenate(lines))

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

    @cached_property
    def _lost(self) -> float:
        """What rounding did to the forms."""
        return self._rounded(float(BALANCES.min()))

    def _rounded(self, s: float) -> float:
        """The same for ``M_s``, and for ``M_{1/s}``; s at most 1."""
        error = product_error(self.V.T, self.V) + product_error(self.A, self.A.T)
        return 0.0 if error == 0.0 else (2.0 * error + 8.0 * EPS) / s

    @cached_property
    def proved(self) -> tuple[Array, Array]:
        """``gamma^2`` and ``y + eta`` of each height: beyond the first the second holds; ``inf`` where nothing is proved."""
        pairs = [
            [_prove(self.A, _inverted(M, y, self._lost), 0.0, t) for y, t in zip(ys, ts, strict=True)]
            for M, ys, ts in zip(self.forms, self.heights.tolist(), self.shares.tolist(), strict=True)
        ]
        out = np.array(pairs)
        return out[..., 0], out[..., 1]

    @cached_property
    def proved_lines(self) -> tuple[Array, Array]:
        """The same for each of the lines."""
        known: dict[tuple[float, float], _Inverted | None] = {}
        pairs = []
        for s, y, slope, t in self.lines.tolist():
            if (s, y) not in known:
                known[s, y] = _inverted(_form(self.A, self.V, s), y, self._rounded(min(s, 1.0 / s) if s else 1.0))
            pairs.append(_prove(self.A, known[s, y], (1.0 + 2.0 * EPS) / slope, t))
        square, height = np.array(pairs).reshape(-1, 2).T
        return square, height

    def at(self, gamma: Array) -> Array:
        """Bounds of the forms ``(forms, cells)`` where ``|A x| >= gamma``."""
        square, height = self.proved
        proved = (square[:, :, None] * (1.0 + 4.0 * EPS) < gamma**2) & (gamma > 0.0)
        return np.minimum(self.norms[:, None], np.where(proved, height[:, :, None], np.inf).min(axis=1))

    def least(self, gamma: Array, tilts: Array, norm: float, *, values: bool) -> tuple[Array, Array, Array]:
        """Lines ``(y + eta, lambda)`` that hold where ``|A x| >= gamma``, each ``(tilts, cells)``: the least at each of the tilts.

        For ``V^T V`` (``values``), or else for ``|V d| |A^T d|``. Where none is lower it is ``(norm, 0)``. The third array tells which
        of the ``lines`` it is, -1 for none.
        """
        which = np.flatnonzero((self.lines[:, 0] == 0.0) == values)
        square, height = (x[which, None] for x in self.proved_lines)
        y = np.where((square * (1.0 + 4.0 * EPS) < gamma**2) & (gamma > 0.0), height, np.inf)
        y = np.concatenate([np.full((1, gamma.size), norm), y])
        slope, which = np.append(0.0, self.lines[which, 2]), np.append(-1, which)
        best = np.array([(y + c * slope[:, None]).argmin(axis=0) for c in tilts.tolist()])
        return y[best, np.arange(gamma.size)], slope[best], which[best]

    def decisive(self, *parts: tuple[Array, Array]) -> Frontier:
        """Those lines alone that are least on one of the pairs ``(gamma, tilts)``."""
        used = [self.least(*part, 1.0, values=values)[2].ravel() for part in parts for values in (True, False)]
        index = np.unique(np.concatenate(used))
        return Frontier(self.A, self.V, self.heights, self.shares, self.lines[index[index >= 0]])


@dataclass(frozen=True, eq=False)
class _Inverted:
    """W of the lemma, its size, and ``y + eta``."""

    W: Any
    size: float
    height: float


def _form(A: Any, V: Any, s: float) -> Any:
    """``V^T V`` for s = 0, ``M_s`` for others."""
    return V.T @ V if s == 0.0 else (V.T @ V * s + A @ A.T / s) * 0.5


def _inverted(M: Any, y: float, lost: float) -> _Inverted | None:
    """W and eta, when rounding changed M by at most ``lost``; None where W does not serve."""
    d = len(M)
    W = _inverse(mid(M), y)
    size = float(np.linalg.norm(W))
    if not np.isfinite(size) or size > 1e12:
        return None
    w, U = np.linalg.eigh(W)
    wrap: Any = BallMatrix.exact if isinstance(M, BallMatrix) else np.asarray
    if d > 1:
        u = wrap(U[:, -1:])
        rest = top(lambda_max_upper(wrap(W) - (u @ u.T) * (2.0 * abs(float(w[-1])))))
        if not rest + 16.0 * d * EPS * size < 0.0:
            return None
    shifted = M - wrap(np.eye(d)) * y
    E = np.eye(d) - W @ shifted
    miss = top(norm_upper(E)) + product_error(W, shifted) + size * lost + (d + 4) * EPS
    if not miss < 0.5:
        return None
    eta = 2.0 * (top(spectral_norm_upper(M)) + y) * miss
    return _Inverted(wrap(W), size, (y + eta) * (1.0 + 4.0 * EPS))


def _prove(A: Any, inverted: _Inverted | None, reciprocal: float, t: float) -> tuple[float, float]:
    """``lambda_max(A^T (I - t (W - reciprocal)) A)`` and ``y + eta``, outward."""
    if inverted is None or not np.isfinite((inverted.size + reciprocal) * t):
        return math.inf, math.inf
    d, exact = len(A), isinstance(A, BallMatrix)
    one: Any = BallMatrix.exact(np.eye(d)) if exact else np.eye(d)
    near = A.T @ ((one - (inverted.W - one * reciprocal) * t) @ A)
    rounded = 0.0 if exact else 64.0 * d * EPS * (1.0 + t * (inverted.size + reciprocal))
    return top(lambda_max_upper((near + near.T) * 0.5)) + rounded, inverted.height


def _inverse(M: Array, y: float) -> Array:
    """A symmetric matrix near ``(M - y)^{-1}``."""
    w, U = np.linalg.eigh(M)
    gap = w - y
    gap = np.where(np.abs(gap) < 1e-13, -1e-13, gap)
    W = (U / gap) @ U.T
    return np.asarray(0.5 * (W + W.T))


def _heights(M: Array) -> tuple[Array, Array, Array]:
    """Heights between the two largest eigenvalues of M, the W of each, and how far each is below the largest."""
    w = np.append(0.0, np.linalg.eigvalsh(M))
    ys = w[-2] + (w[-1] - w[-2]) * np.linspace(0.02, 0.98, HEIGHTS) + 1e-9
    return ys, np.array([_inverse(M, y) for y in ys.tolist()]), w[-1] - ys


def _shares(A: Array, W: Array) -> Array:
    """For each W a t near the least largest eigenvalue of ``A^T (I - t W) A``, which is convex in t."""
    N, B = A.T @ A, A.T @ W @ A
    size = np.maximum(np.linalg.norm(B, axis=(1, 2)), 1e-300)
    golden = 0.5 * (math.sqrt(5.0) - 1.0)
    low, high = np.full(len(W), -8.0), np.full(len(W), 8.0)
    for _ in range(26):
        left, right = high - golden * (high - low), low + golden * (high - low)
        at = [np.linalg.eigvalsh(N - (np.exp(x) / size)[:, None, None] * B)[:, -1] for x in (left, right)]
        low, high = np.where(at[0] < at[1], low, left), np.where(at[0] < at[1], right, high)
    return np.asarray(np.exp(0.5 * (low + high)) / size)
