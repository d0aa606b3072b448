"""Coordinates between the stages of a long stack, in which what comes before, or after, stretches about evenly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

from otattn.lipschitz.arithmetic.largest_eigenvalue import FAILURE
from otattn.lipschitz.near.stack import Linear
from otattn.operators import spectral_norm_bounds

__all__ = ["PLAIN", "Frame", "frames_of", "likely_norm", "norm_table", "roots_of"]

Array = NDArray[np.float64]
PROBES = 24
"""Random directions that are sent through the stack; the coordinates are only good or less good, never wrong."""
FLOOR = 1.0
"""Share of the mean stretch that is added to all directions."""
ANCHOR = 4
"""Norms between stages that are farther apart are bounded by products at every fourth stage, but for those from the first stage
and to the last."""
ACCURACY = 2e-2


@dataclass(frozen=True, eq=False)
class Frame:
    """``P`` and ``Q^{-1}`` at the border of two stages, with ``P^{-1}`` and ``Q``: matrices (d, d), None for the identity."""

    P: Array | None = None
    P_inverse: Array | None = None
    Q: Array | None = None
    Q_inverse: Array | None = None

    @property
    def turn(self) -> float:
        """``||P Q^{-1}||``."""
        return self._norm(self.P, self.Q_inverse)

    @property
    def back(self) -> float:
        """``||Q P^{-1}||``."""
        return self._norm(self.Q, self.P_inverse)

    @staticmethod
    def _norm(left: Array | None, right: Array | None) -> float:
        if left is None and right is None:
            return 1.0
        M = left if right is None else right if left is None else left @ right
        assert M is not None
        return float(np.linalg.norm(M, 2)) * (1.0 + 1e-12)


PLAIN = Frame()


def frames_of(parts: list[Linear]) -> list[Frame]:
    """The frames of the borders 0, .., S; those at the ends are plain.

    ``P^{-2}`` is the mean over tokens and directions of ``J_{1:a} J_{1:a}^T``, ``Q^2`` that of ``J_{a+1:S}^T J_{a+1:S}``.
    """
    S, n = len(parts), parts[0].shape[0]
    rng = np.random.default_rng(0)
    before = [np.zeros((p.shape[1], p.shape[1])) for p in parts]
    after = [np.zeros_like(M) for M in before]
    for _ in range(PROBES):
        v = rng.standard_normal((n, parts[0].shape[1]))
        for a in range(S - 1):
            v = parts[a].jvp(v)
            before[a + 1] += v.T @ v / (n * PROBES)
        g = rng.standard_normal((n, parts[-1].shape[2]))
        for a in range(S - 1, 0, -1):
            g = parts[a].vjp(g)
            after[a] += g.T @ g / (n * PROBES)
    frames = [PLAIN]
    for a in range(1, S):
        P_inverse, P = roots_of(before[a])
        Q, Q_inverse = roots_of(after[a])
        frames.append(Frame(P, P_inverse, Q, Q_inverse))
    return [*frames, PLAIN]


def roots_of(M: Array) -> tuple[Array, Array]:
    """``(M + floor)^{1/2}`` and its inverse."""
    w, E = np.linalg.eigh(M)
    w = np.maximum(w, 0.0) + FLOOR * max(float(w.mean()), 1e-300)
    return (E * np.sqrt(w)) @ E.T, (E / np.sqrt(w)) @ E.T


def norm_table(parts: list[Linear], frames: list[Frame], known: list[float | None]) -> Array:
    """``||P_b J_{a+1:b} Q_a^{-1}||`` for all a <= b, each with probability ``1 - FAILURE``; ``known`` of single stages."""
    S = len(parts)
    norms = np.diag([f.turn for f in frames])
    anchors = set(range(ANCHOR, S, ANCHOR)) if S > 2 * ANCHOR else set(range(S + 1))
    for a in range(S):
        for b in range(a + 1, S + 1):
            between = [c for c in anchors if a < c < b]
            single = known[a] if b == a + 1 else None
            if single is not None:
                norms[a, b] = single
            elif a == 0 or b == S or b in anchors or not between:
                norms[a, b] = likely_norm(parts[a:b], frames[b].P, frames[a].Q_inverse)
            else:
                c = max(between)
                norms[a, b] = norms[a, c] * frames[c].back * norms[c, b]
    return norms


def likely_norm(parts: list[Linear], left: Array | None, right: Array | None) -> float:
    """The norm of a product of operators, first factor first, by Lanczos with a stated probability.

    ``left`` is a matrix, or one for each token ``(n, D, e)``.
    """
    n, d, e = parts[0].shape[0], parts[0].shape[1], parts[-1].shape[2]

    def forward(v: Array) -> Array:
        w = np.asarray(v).reshape(n, d)
        w = w if right is None else w @ right.T
        for p in parts:
            w = p.jvp(w)
        if left is not None:
            w = w @ left.T if left.ndim == 2 else np.matmul(left, w[:, :, None])[:, :, 0]
        return np.asarray(w).ravel()

    def backward(g: Array) -> Array:
        w = np.asarray(g).reshape(n, e)
        if left is not None:
            w = w @ left if left.ndim == 2 else np.matmul(w[:, None, :], left)[:, 0]
        for p in reversed(parts):
            w = p.vjp(w)
        return np.asarray(w if right is None else w @ right).ravel()

    operator = LinearOperator((n * e, n * d), matvec=forward, rmatvec=backward, dtype=np.float64)
    return float(spectral_norm_bounds(operator, failure=FAILURE, tol=ACCURACY).upper)
