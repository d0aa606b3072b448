r"""Certified maxima of quadratic forms: field constant, column exponent, size of the logits' gradient.

Each is a maximum over a ball that has an exact dual in one scalar. The scalar comes from a search in
floating point; the dual function is then evaluated once, its largest eigenvalue rounded outward. Every
scalar gives a valid bound, so no search needs to have converged. Matrices are float64 arrays, or ball matrices:
then the last evaluation is a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from otattn._linalg import EPS, Array, bordered, lambda_max_upper, mid, norm_upper, spectral_norm_upper
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.arithmetic.rounding import is_zero, product, top, up

_SCALES = np.geomspace(0.7, 6.0, 11)
"""Multipliers s of the products: V counts most where X is near 1. Six times as many gain one in a thousand."""
RANK_TOL = 1e-15
"""Eigenvalues of a form, over the largest, that a search may leave out: what it finds is evaluated on the whole form."""


def max_norm_product(V: Any, B: Any) -> Any:
    r"""``max_{|u| = 1} |V u| |B^T u|``, never below the exact value; ``V (e, d)``, ``B (d, k)``.

    ``|V u| |B^T u| = min_s (s |V u|^2 + |B^T u|^2 / s) / 2``, so the maximum is at most
    ``lambda_max(s V^T V + B B^T / s) / 2`` for every ``s > 0``. The best s attains it: the joint range of two
    quadratic forms on the sphere is convex for d >= 3 and the boundary of its hull for d = 2, and ``sqrt(x
    y)`` increases in both arguments, so maximum and minimum may be exchanged.
    """
    v, b = spectral_norm_upper(V), spectral_norm_upper(B)
    if is_zero(v) or is_zero(b):
        return 0.0
    near1, near2 = mid((V / v).T @ (V / v)), mid((B / b) @ (B / b).T)
    U = _range_of(near1 + near2)
    near1, near2 = U.T @ near1 @ U, U.T @ near2 @ U

    def dual(x: float) -> float:
        return 0.5 * float(np.linalg.eigvalsh(math.exp(x) * near1 + math.exp(-x) * near2)[-1])

    # s and 1/s must be inverse to each other: both are made of one float, and exact balls divide by it
    s = math.exp(_minimise(dual))
    return product(up(norm_product_dual(V / v, (B / b).T, s)), v, b)


def norm_product_dual(V: Any, K: Any, s: float) -> Any:
    """``lambda_max(s V^T V + K^T K / s) / 2``: at least ``max |V u| |K u|`` over unit vectors, for every ``s > 0``."""
    return 0.5 * np.maximum(0.0, lambda_max_upper(s * (V.T @ V) + (K.T @ K) / s))


def products(V: Any, B: Any, edges: Array, *, loose: float = 1.0) -> Array:
    """Upper bounds of ``X Y``, ``X = |V u|^2``, ``Y = |B^T u|^2``, over unit vectors u with X in each cell that ``edges`` bound.

    ``s X + Y/s <= 2 dual(s)`` for every ``s > 0``, so ``X Y <= s X (2 dual(s) - s X)``: a parabola with its top at ``dual(s)/s``.
    ``loose`` is a factor, at least 1, on the dual.
    """
    best: Array = np.full(edges.size - 1, np.inf)
    for s in _SCALES:
        reached = norm_product_dual(V, B.T, float(s)) * loose
        X = np.clip(reached / s, edges[:-1], edges[1:])
        best = np.minimum(best, upper(s * X * np.maximum(0.0, 2.0 * reached - s * X)))
    return best * (1.0 + 1e-12)


def balanced_minimum(q1: Any, q2: Any) -> Any:
    """``min_s max_k (sqrt(s) q1_k + q2_k / sqrt(s))^2``, evaluated at a good s (any s is an upper bound)."""
    t1, t2 = top(q1.max(initial=0.0)), top(q2.max(initial=0.0))
    if t1 == 0.0 or t2 == 0.0:
        return 0.0  # as s tends to 0 or infinity
    q1, q2 = q1 / t1, q2 / t2
    near1, near2 = np.asarray(upper(q1)), np.asarray(upper(q2))

    def largest(x: float) -> float:
        return float((math.exp(0.5 * x) * near1 + math.exp(-0.5 * x) * near2).max())

    root = math.exp(0.5 * _minimise(largest))
    return product(up((root * q1 + q2 / root).max() ** 2), t1, t2)


def column_exponent(A: Any, c: Any | None, R: Any) -> Any:
    r"""``kappa = max_{|x|, |y| <= R} <A x + c, y - x>``, never below the exact value.

    The maximum over y is ``R |A x + c| - <A x + c, x>``, and ``R |g| <= R^2 / (4 nu) + nu |g|^2`` for every
    ``nu > 0``: what is left is a quadratic in x. Without bias, ``kappa <= R^2 / (4 nu) + R^2 (lambda_max(nu
    A^T A - S))_+`` with ``S = (A + A^T) / 2``, and the best nu attains kappa (the objective is concave in
    ``x x^T`` and linear in its dual). Values: ``a/4`` for ``A = alpha I``, ``2a`` for ``A = -alpha I``,
    ``a`` for skew A, ``a = ||A|| R^2``.
    """
    alpha = spectral_norm_upper(A)
    size = 0.0 if c is None else norm_upper(c)
    if is_zero(R):
        return 0.0
    if is_zero(alpha):
        return up(2.0 * R * size)
    # in units: A / unit, c / (unit r), x / r, with floats near the norm and the radius; kappa is unit r^2 times the value
    r = top(R)
    unit = top(alpha) + top(size) / r
    B = A / unit
    b = np.zeros(len(A)) if c is None else c / unit / r
    near_B, near_b = mid(B), mid(b)
    U = _range_of(near_B @ near_B.T + near_B.T @ near_B + np.outer(near_b, near_b))
    near_B, near_b = U.T @ near_B @ U, U.T @ near_b

    def value(x: float) -> float:
        nu = math.exp(x)
        parts = _ball_multipliers(*_column_form(near_B, near_b, nu))
        return 0.25 / nu + nu * float(near_b @ near_b) + sum(parts)

    # kappa <= 2 forces nu >= 1/8, and nu |A|^2 - |A| <= 2 bounds it above
    x = minimize_scalar(value, bounds=(-5.0, 5.0), method="bounded", options={"xatol": 1e-10}).x
    if isinstance(B, BallMatrix) and c is None:
        b = BallMatrix.exact(b)
    return product(up(column_dual(B, b, math.exp(float(x)))), unit, r, r)


def column_dual(A: Any, c: Any, nu: float) -> Any:
    """``1 / (4 nu) + max nu |A z + c|^2 - <A z + c, z>`` over the unit ball: at least kappa there, for every ``nu > 0``."""
    return 0.25 / _number(nu, A) + nu * (c @ c) + ball_maximum(*_column_form(A, c, nu))


def _column_form(A: Any, c: Any, nu: float) -> tuple[Any, Any]:
    return nu * (A.T @ A) - 0.5 * (A + A.T), 2.0 * nu * (A.T @ c) - c


def _number(x: float, like: Any) -> Any:
    """A float as a number of the arithmetic of a matrix: its products with floats are then not rounded away."""
    return x if isinstance(like, np.ndarray) else lift(x)


def max_quadratic(Q: Any, b: Any, R: Any) -> Any:
    """``max_{|x| <= R} <Q x, x> + <b, x>`` for symmetric Q, never below the exact value."""
    r = top(R)
    unit = top(spectral_norm_upper(Q)) * r * r + top(norm_upper(b)) * r
    if unit == 0.0:
        if r == 0.0 or isinstance(Q, np.ndarray) or not (Q.any() or b.any()):
            return 0.0
        unit = 5e-324  # the products of the sizes underflow, those of the balls do not
    return up(ball_maximum(Q * r / unit * r, b * r / unit)) * unit


def ball_maximum(Q: Any, b: Any) -> Any:
    """The same on the unit ball, for data of norm about 1; 0 in dimension 0.

    For all ``lam >= 0`` and t the maximum is at most ``lam + t + 2 (lambda_max(N))_+`` with
    ``N = [[Q - lam I, b/2], [b^T/2, -t]]``: apply N to ``(x, 1)``, of squared norm at most 2.
    """
    k = len(b)
    if k == 0:
        return 0.0
    lam, t = _ball_multipliers(mid(Q), mid(b))
    corner = np.zeros((k + 1, k + 1))
    corner[np.arange(k), np.arange(k)], corner[k, k] = -lam, -t
    N = bordered(Q, 0.5 * b) + corner
    return _number(lam, Q) + t + 2.0 * np.maximum(0.0, lambda_max_upper(N))


def _ball_multipliers(Q: Array, b: Array) -> tuple[float, float]:
    """``lam``, which solves the secular equation, and ``t = sum_k beta_k^2 / (4 (lam - q_k))``.

    They make the matrix of :func:`ball_maximum` negative semi-definite up to rounding, so ``lam + t`` is its value.
    """
    q, U = np.linalg.eigh(Q)
    beta2 = 0.25 * (b @ U) ** 2
    low = max(0.0, float(q[-1]))
    high = low + math.sqrt(float(beta2.sum()))
    lam, t = low, 0.0
    if high > low:
        lam = high
        for _ in range(60):
            # Newton on 1/|w(lam)| = 1, w = beta / (lam - q), kept inside the bracket
            gap = lam - q
            size = math.sqrt(float(np.sum(beta2 / gap**2)))
            low, high = (lam, high) if size > 1.0 else (low, lam)
            if abs(size - 1.0) < 1e-13 or high - low <= 1e-14 * (1.0 + high):
                break
            lam += (size - 1.0) * size * size / float(np.sum(beta2 / gap**3))
            if not low < lam < high:
                lam = 0.5 * (low + high)
        lam = max(lam, float(q[-1]) + 1e-14 * (1.0 + abs(float(q[-1]))))
        t = float(np.sum(beta2 / (lam - q)))
    return lam, t


def _range_of(S: Array) -> Array:
    """An orthonormal basis of the range of a form: heads of low rank are searched in a small space."""
    sizes, U = np.linalg.eigh(S)
    return np.asarray(U[:, sizes > RANK_TOL * sizes[-1]])


def _minimise(f: Callable[[float], float]) -> float:
    """A minimiser of a convex function of a logarithm, sought around 0 first."""
    for width in (6.0, 40.0):
        x = float(minimize_scalar(f, bounds=(-width, width), method="bounded", options={"xatol": 1e-7}).x)
        if abs(x) < width - 0.5:
            break
    return x


def affine_norm(B: Any, c: Any, R: Any) -> Any:
    """``max_{|x| <= R} |B x + c|``."""
    if isinstance(B, np.ndarray):
        unit = max(float(spectral_norm_upper(B)) * top(R), float(norm_upper(c)))
        if unit == 0.0:
            return 0.0
        # squares: in units in which they are near one; the forms of the quadratic are rounded by much less than up() adds
        square = max_quadratic((B.T / unit) @ (B / unit), 2.0 * ((B.T / unit) @ (c / unit)), R) + (c / unit) @ (
            c / unit
        )
        return up(unit * math.sqrt(square * (1.0 + 8.0 * (len(c) + 8) * EPS)))
    return np.sqrt(max_quadratic(B.T @ B, 2.0 * (B.T @ c), R) + c @ c)
