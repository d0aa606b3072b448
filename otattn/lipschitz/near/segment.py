r"""Attention and the token-wise maps that follow it as one stage near given tokens, each token with a budget of its own.

Stages ``f_0`` (heads, or ``x + s heads(x)``) and ``f_1, .., f_T`` (LayerNorm, RMSNorm, perceptrons, ``x + s f(x)`` of these),
``J_t`` their Jacobians at the float tokens ``x_t`` that enter them; ``M_{u:t,i} = J_{t,i} .. J_{u+1,i}`` for token i. Inputs
move by D, ``|D| <= r``.

**Coordinates.** ``S_{1,i}`` is above the Gram matrix of the rows of token i of ``J_0``, ``S_{t+1,i}`` above ``J_{t,i} S_{t,i}
J_{t,i}^T``, ``R = S^{1/2}``. So ``z_{t,i} = R_{t,i}^{-1} (J_{0:t-1} D)_i`` has ``|z_{t,i}| <= |D|``: no token is charged more
than its own rows can do. And ``sum_i |z_{t,i}|^2 <= alpha^2 |D|^2``, ``alpha`` the norm of the rows ``R_{1,i}^{-1} J_{0,i}``,
since ``S_{t+1} >= J S_t J^T`` gives ``|R_{t+1}^{-1} J v| <= |R_t^{-1} v|``. An error of stage t is measured by ``Q_{t,i}``,
``Q^T Q >= (L M_{t:T})^T (L M_{t:T})`` with L the coordinates of what follows.

**Images.** What enters stage t is, for token i, ``J_{0:t-1} D`` and the errors ``rho_u`` of the stages before, so

``b_{t,i} = r + k_{t0,i} R_0(r) + sum_{0 < u < t} k_{tu,i} R_{u,i}(b_{u,i})``, ``k_{tu,i} = ||R_{t,i}^{-1} M_{u:t-1,i} Q_{u,i}^{-1}||``

bounds its length in the coordinates R; with alpha r in place of r and sums of squares over the tokens, that of all tokens.
The error of a token is at most ``R_{t,i}(|z_i|) <= |z_i| R_{t,i}(b_i) / b_i`` (remainders over lengths increase), hence that
of a stage the root of ``max sum_i (R_i / b_i)^2 a_i`` over ``a_i <= b_i^2``, ``sum a_i`` at most the square of the length of
all: the largest quotients first. The sum over the stages, with ``||L M_{0:T} Q_0^{-1}|| R_0(r)``, bounds the error of the segment.

**Jacobians.** ``J'_T .. J'_0 - J_T .. J_0 = sum_t J_T .. J_{t+1} E_t J'_{t-1} .. J'_0``; in the same coordinates the rows of
``J'_{t-1} .. J'_0`` have norms at most ``1 + k_{t0,i} g_0 + sum_u k_{tu,i} g_{u,i} ..``, g the growths, and the same sums
bound the change.

Rounding. The float tokens are not the images of each other: ``x_{t+1} = f_t(x_t) + eps_t``. Displacements are taken from the
float tokens; then eps adds to b, and cancels in ``F(x + D) - F(x)``, which is ``J_T .. J_0 D`` and the errors at ``x + D`` less
those at x: both are counted or, where it is less, ``|D|`` times the largest change of the Jacobian between them. So is the
change of the Jacobian from that at the images to the product. The J of the token-wise stages are floats: ``Q (J - float) R`` is a
linear part of their remainder, and of their growth. Products of matrices of single tokens, whose condition is
below 1e4, have a margin of 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import spectral_norm_upper
from otattn.attention import Residual, TokenwiseMap
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.coordinates import likely_norm, roots_of
from otattn.lipschitz.near.expansion import Expansion
from otattn.lipschitz.near.gram_jacobian import row_grams
from otattn.lipschitz.near.head import HeadAtTokens
from otattn.lipschitz.near.heads import turned
from otattn.lipschitz.near.stack import Linear, Stage, product
from otattn.lipschitz.near.tokenwise import tokenwise_expansion

__all__ = ["Run", "Segment", "TokenStage", "output_frame", "segment_of"]

Array = NDArray[np.float64]
MARGIN = 1.0 + 1e-9
FLOOR_IN = 3e-2
"""Share of the largest eigenvalue that is added to S: directions in which a token does not move are not free."""
FLOOR_OUT = 3e-2
"""The same for ``Q^T Q``."""


@dataclass(frozen=True, eq=False)
class TokenStage:
    """A token-wise stage at float tokens.

    Attributes
    ----------
    slopes : (n, e, d)
        Jacobians of the tokens.
    expansion : callable
        ``(i, left, right)`` gives that of ``left f_i(right z)``.
    slope_error, image_error : float
        Of a Jacobian (operator norm), and of the images of all tokens.
    """

    slopes: Array
    expansion: Callable[[int, Array | None, Array], Expansion]
    slope_error: float
    image_error: float


@dataclass(frozen=True, eq=False)
class Segment:
    """The expansion of the segment (the letters of the module)."""

    first: Expansion
    out: float
    alpha: float
    tokens: tuple[tuple[Expansion, ...], ...]
    tilts: tuple[Array, ...]
    """``|Q_{t,i} (J_{t,i} - float) R_{t,i}|`` ``(n,)``: the J of the coordinates are floats."""
    k: tuple[tuple[Array, ...], ...]
    """``k[t - 1][u]`` ``(n,)``, u < t."""
    slack: tuple[float, ...]
    """What the errors eps add to the lengths that enter stage t."""
    image_error: float
    """What they add to the image."""

    def remainder(self, r: float, off: float = 0.0) -> float:
        if off > 0.0:  # f(Y + D) - f(X) and f(Y) - f(X), and the change of the Jacobian
            return self.remainder(r + off) + self.remainder(off) + self.growth(off) * r
        # the errors at both ends, or the largest change of the Jacobian between them
        value = min(self._walk(r)[0] + self._walk(0.0)[0], self.change(r) * r)
        return (value + self.change(0.0) * r) * MARGIN if np.isfinite(value) else float("inf")

    def growth(self, r: float, off: float = 0.0) -> float:
        if off > 0.0:
            return self.growth(r + off) + self.growth(off)
        return (self.change(r) + self.change(0.0)) * MARGIN

    @property
    def float_error(self) -> float:
        """How far the image of the float tokens is from the floats."""
        return (self._walk(0.0)[0] + self.image_error) * MARGIN

    def _walk(self, r: float) -> tuple[float, list[Array]]:
        """The error of the segment, and the lengths ``b_t``."""
        rho = self.first.remainder(r)
        value, lengths = self.out * rho, []
        errors: list[Array] = []
        for stages, tilt, k, slack in zip(self.tokens, self.tilts, self.k, self.slack, strict=True):
            parts = [k[u + 1] * errors[u] for u in range(len(errors))]
            b = r + k[0] * rho + sum(parts) + slack
            total = self.alpha * r + float(k[0].max()) * rho + sum(float(np.linalg.norm(p)) for p in parts) + slack
            lost = np.array([f.remainder(float(x)) for f, x in zip(stages, b, strict=True)]) + tilt * b
            value += _shared(lost, b, total)
            lengths.append(b)
            errors.append(lost)
        return float(value) if value == value else float("inf"), lengths

    def change(self, r: float) -> float:
        """How far the Jacobian at tokens within r is from the product of those at the float tokens."""
        grown = self.first.growth(r)
        value = self.out * grown
        errors: list[Array] = []
        for stages, tilt, k, b in zip(self.tokens, self.tilts, self.k, self._walk(r)[1], strict=True):
            parts = [k[u + 1] * errors[u] for u in range(len(errors))]
            rows = 1.0 + k[0] * grown + sum(parts)
            total = self.alpha + float(k[0].max()) * grown + sum(float(np.linalg.norm(p)) for p in parts)
            grown_by = np.array([f.growth(float(x)) for f, x in zip(stages, b, strict=True)])
            errors.append((grown_by + tilt) * rows)
            value += _shared(errors[-1], rows, total)
        return float(value) if value == value else float("inf")


def _shared(values: Array, lengths: Array, total: float) -> float:
    """``max (sum_i (values_i / lengths_i)^2 a_i)^{1/2}`` over ``0 <= a_i <= lengths_i^2``, ``sum a_i <= total^2``."""
    if not np.all(np.isfinite(values)):
        return float("inf")
    if not values.any():
        return 0.0
    rates = (values / np.maximum(lengths, 1e-300)) ** 2
    order = np.argsort(-rates)
    caps = lengths[order] ** 2
    before = np.concatenate([[0.0], np.cumsum(caps)[:-1]])
    return float(np.sqrt(rates[order] @ np.clip(total**2 - before, 0.0, caps))) * MARGIN


def segment_of(
    first: Expansion,
    frame: tuple[Array, Array],
    grams: Array,
    rows: Callable[[Array], float],
    stages: list[TokenStage],
    left: Array | None,
    first_error: float,
) -> Segment:
    """The segment of ``f_0`` and ``stages``.

    Parameters
    ----------
    first : Expansion
        Of ``Q_0 f_0``, ``frame = (Q_0, Q_0^{-1})``.
    grams : (n, d, d)
        Matrices above the Gram matrices of the rows of ``J_0``.
    rows : callable
        An upper bound of the norm of the rows ``T_i J_{0,i}``, for T ``(n, d, d)``.
    left : (D, e) or None
        L.
    first_error : float
        ``|eps_0|``.
    """
    ends = _ends(stages, left)
    out = float(_norms(ends[0] @ frame[1]).max())
    S, tokens, tilts, k, slack = grams * MARGIN, [], [], [], []
    alpha = 0.0
    turns: list[Array] = []  # M_{u:t-1} Q_u^{-1}
    sizes = [float(_norms(frame[0][None])[0])]  # ||Q_u||
    errors = [first_error, *(s.image_error for s in stages)]
    for t, stage in enumerate(stages):
        R, inverse = _roots(S, FLOOR_IN, errors[t])
        if t == 0:
            alpha = rows(inverse) * MARGIN
            turns.append(np.broadcast_to(frame[1], S.shape))
        k.append(tuple(_norms(inverse @ M) for M in turns))
        slack.append(sum(float(x.max()) * size * e for x, size, e in zip(k[t], sizes, errors, strict=False)))
        last = t == len(stages) - 1
        Q = None if last else _roots(np.swapaxes(ends[t + 1], 1, 2) @ ends[t + 1] * MARGIN, FLOOR_OUT)
        lefts = [left] * len(S) if Q is None else list(Q[0])
        tokens.append(tuple(stage.expansion(i, lefts[i], R[i]) for i in range(len(S))))
        measured = (
            np.eye(stage.slopes.shape[1])[None]
            if left is None and Q is None
            else np.stack([np.asarray(q) for q in lefts])
        )
        tilts.append(stage.slope_error * _norms(measured) * _norms(R))
        turns = [stage.slopes @ M for M in turns]
        if Q is not None:
            turns.append(Q[1])
            sizes.append(float(_norms(Q[0]).max()))
            S = stage.slopes @ (R @ R) @ np.swapaxes(stage.slopes, 1, 2) * MARGIN
    image = sum(float(_norms(M).max()) * e for M, e in zip(ends, errors, strict=True))
    return Segment(first, out, alpha, tuple(tokens), tuple(tilts), tuple(k), tuple(slack), image)


def output_frame(stages: list[TokenStage], left: Array | None) -> Array:
    """The mean over the tokens of ``(L M_{0:T})^T (L M_{0:T})``."""
    M = _ends(stages, left)[0]
    return np.asarray((np.swapaxes(M, 1, 2) @ M).mean(axis=0))


def _ends(stages: list[TokenStage], left: Array | None) -> list[Array]:
    """``L M_{t:T}``, t = 0, .., T."""
    n, e = stages[-1].slopes.shape[:2]
    out = [np.broadcast_to(np.eye(e) if left is None else left, (n, e if left is None else len(left), e))]
    for stage in reversed(stages):
        out.insert(0, out[0] @ stage.slopes)
    return out


def _norms(M: Array) -> Array:
    return np.asarray(np.linalg.svd(M, compute_uv=False)[:, 0]) * MARGIN


def _roots(S: Array, floor: float, error: float = 0.0) -> tuple[Array, Array]:
    """``(S + max(floor ||S||, error^2))^{1/2}`` and its inverse: nothing is finer than the error of what enters."""
    w, E = np.linalg.eigh(0.5 * (S + np.swapaxes(S, 1, 2)))
    w = np.maximum(w, 0.0) + np.maximum(floor * w[:, -1:], max(error**2, 1e-250))
    root = np.sqrt(w)[:, None, :]
    return np.asarray((E * root) @ np.swapaxes(E, 1, 2)), np.asarray((E / root) @ np.swapaxes(E, 1, 2))


@dataclass(frozen=True, eq=False)
class Run:
    """Points of a path (:mod:`~otattn.lipschitz.near.build`) that are one stage: attention and the token-wise maps after it.

    ``bare`` are the points without what passes by in residual maps.
    """

    branches: tuple[tuple[Any, ...], ...]
    bare: tuple[Any, ...]
    jacobian: Linear
    rounded: float
    """What the product of the float matrices lost."""
    map: None = None
    heads: None = None

    @classmethod
    def of(cls, points: list[Any], bare: list[Any]) -> Run:
        jacobian, lost = product([p.jacobian for p in points])
        return cls((tuple(points),), tuple(bare), jacobian, lost)

    def expansion(self, left: Array | None, right: Array | None) -> Segment:
        """Of ``left f(right z)``."""
        first = self.branches[0][0]
        stages = self._stages
        inverse, root = roots_of(output_frame(stages, left))[::-1]
        residual = None if first.heads is not None else np.eye(first.x.shape[1]) if right is None else right
        grams = row_grams(turned(self._heads, None, right), _scale(first), residual)

        def rows(T: Array) -> float:
            lost = float(np.linalg.norm(T, axis=(1, 2)).max()) * first.jacobian_error * _size(right)
            M = first.jacobian.matrix
            if M is None:
                return likely_norm([first.jacobian], T, right) + lost
            blocks = T @ M.reshape(len(T), T.shape[2], -1)
            if right is not None:
                blocks = blocks.reshape(*T.shape[:2], len(T), -1) @ right
            return float(spectral_norm_upper(blocks.reshape(len(T) * T.shape[1], -1))) + lost

        return segment_of(first.expansion(root, right), (root, inverse), grams, rows, stages, left, first.image_error)

    def stage(self, left: Array | None, right: Array | None) -> Stage:
        """The stage, with the errors that the floats of its parts make."""
        found = self.expansion(left, right)
        # of the first stage; those of the others are in the segment
        ends = float(np.prod([np.linalg.norm(s.slopes, axis=(1, 2)).max() for s in self._stages]))
        lost = (ends * self.branches[0][0].jacobian_error + self.rounded) * MARGIN
        lost = _size(left) * lost * _size(right) + found.change(0.0)
        return Stage(self.jacobian, found, lost, found.float_error)

    @property
    def _heads(self) -> list[HeadAtTokens]:
        return list(self.bare[0].heads.heads)

    @cached_property
    def _stages(self) -> list[TokenStage]:
        return [_token_stage(p, b) for p, b in zip(self.branches[0][1:], self.bare[1:], strict=True)]


def _token_stage(p: Any, bare: Any) -> TokenStage:
    """A token-wise stage, token by token."""
    inner: TokenwiseMap = bare.map
    n, d, e = p.jacobian.shape
    slopes = np.empty((n, e, d))
    for k in range(d):
        slopes[:, :, k] = p.jacobian.jvp(np.broadcast_to(np.eye(d)[k], (n, d)))

    def expansion(i: int, left: Array | None, right: Array) -> Expansion:
        scale = _scale(p)
        if scale != 1.0:
            left = scale * (np.eye(e) if left is None else left) * (1.0 + 4.0 * EPS)
        return tokenwise_expansion(inner, p.x[i : i + 1], left, right)

    return TokenStage(slopes, expansion, p.jacobian_error, p.image_error)


def _scale(p: Any) -> float:
    return p.map.scale if isinstance(p.map, Residual) else 1.0


def _size(M: Array | None) -> float:
    return 1.0 if M is None else float(spectral_norm_upper(M))
