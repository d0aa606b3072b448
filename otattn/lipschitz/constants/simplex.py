r"""Largest covariance over an interval simplex: ``lambda_max(Cov_p(y))``, ``l <= p <= u``, ``sum p = 1``.

For a unit vector v, ``Var_p <v, y> <= sum_j p_j <v, y_j - b>^2`` for every centre b. With
``Y_j = (y_j - b)(y_j - b)^T``, ``U = v v^T`` and ``U_j = p_j U`` that is at most

.. math:: \max \sum_j \operatorname{tr}(Y_j U_j),
          \quad l_j U \preceq U_j \preceq u_j U, \ \sum_j U_j = U, \ \operatorname{tr} U = 1.

Dual: for every symmetric N and all ``L_j >= 0`` with ``L_j >= N - Y_j``,

.. math:: \lambda_{\max}\bigl( N + \sum_j u_j (Y_j - N) + \sum_j (u_j - l_j) L_j \bigr)

is an upper bound: ``Y_j - N = (Y_j - N + L_j) - L_j``, both parts PSD, so
``sum_j tr(Y_j U_j) = tr(N U) + sum_j tr((Y_j - N) U_j)`` is at most
``tr(N U) + sum_j u_j tr((Y_j - N + L_j) U) - l_j tr(L_j U)``.

A cheap family, one scalar: ``N = eta I`` with the spectral parts for L_j gives, with ``yhat = y/|y|``,
``eta (1 - sum l) + lambda_max( sum_j [ l_j min(eta, |y_j|^2) + u_j (|y_j|^2 - eta)_+ ] yhat_j yhat_j^T )``
for every ``eta >= 0``; it is exact for d = 1 (the linear program's dual).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import EPS, Array, lambda_max_upper, symmetrize
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.balls import BallMatrix, proves_psd
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import LEAST
from otattn.lipschitz.certificate import (
    Certificate,
    Statement,
    certify,
    dual_function,
    multiplier,
    problem_function,
)
from otattn.lipschitz.constants._solve import Proposal, cvxpy_solve
from otattn.lipschitz.theorem import theorem


@dataclass(frozen=True, eq=False)
class IntervalSimplex:
    """All weights p on ``points (n, d)`` with ``lower <= p <= upper`` and ``sum p = 1``: the domain of the certificate."""

    points: Array
    lower: Array
    upper: Array

    def check(self) -> None:
        """Refuse bounds that no weights meet (to the rounding of a sum)."""
        low, high = self.lower, self.upper
        if (low < 0).any() or (low > high).any() or low.sum() > 1 + 1e-12 or high.sum() < 1 - 1e-12:
            raise ValueError(
                "lower and upper must satisfy 0 <= lower <= upper and sum(lower) <= 1 <= sum(upper), received "
                f"sums {low.sum():g} and {high.sum():g}, least lower {low.min():g}, largest lower - upper "
                f"{(low - high).max():g}; widen the interval."
            )


def interval_simplex(
    points: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    *,
    solver: str = "CLARABEL",
    max_iter: int | None = None,
) -> Certificate:
    r"""Certified bound of the covariance's norm over all weights between ``lower`` and ``upper``.

    Parameters
    ----------
    points : array_like (n, d)
    lower, upper : array_like (n,)
        ``0 <= lower <= upper``, ``sum lower <= 1 <= sum upper``.
    solver : {"CLARABEL", "SCS"}
    max_iter : int, optional
        Iteration limit of the solver.

    Returns
    -------
    Certificate
        Multipliers ``N`` (d, d) and ``L`` (n, d, d). ``details["attained"]`` is the covariance's norm that
        an ascent over the weights reached. Costs 2 n matrix inequalities of size d: seconds for n = 32, d =
        8.

    Raises
    ------
    ValueError
        No weights lie between the bounds.
    CertificateError
        The solver proposed nothing usable.

    Examples
    --------
    >>> bound = interval_simplex([[-1.0], [1.0]], [0.0, 0.0], [1.0, 1.0])
    >>> round(bound.value, 6)
    1.0

    References
    ----------
    Our own relaxation; the proof is in the docstring of this module.
    """
    y = check.points(points, "points")
    low = check.vector(lower, "lower", size=len(y))
    high = check.vector(upper, "upper", size=len(y))
    simplex = IntervalSimplex(*(check.frozen(np.array(x)) for x in (y, low, high)))
    simplex.check()
    statement = Statement(None, simplex, len(y), 2.0)
    center, scale, middle = _centre(simplex)
    high = np.minimum(high, 1.0)
    z = (y - center) / scale if scale > 0 else np.zeros_like(y)
    N, L, proposal = (
        np.zeros((y.shape[1],) * 2),
        np.zeros((len(y), y.shape[1], y.shape[1])),
        Proposal(),
    )
    if scale > 0:
        N, L, proposal = _sdp(z, low, high, solver, max_iter)
    return certify(
        "interval_simplex",
        statement=statement,
        multipliers={"N": N, "L": L},
        **proposal.claims(scale**2),
        details={"attained": _attained(y - center, low, high, middle)},
    )


def _centre(simplex: IntervalSimplex) -> tuple[Array, float, Array]:
    """A centre of the points, their largest distance from it, and weights in the middle of the simplex."""
    low, high = simplex.lower, np.minimum(simplex.upper, 1.0)
    spread = high - low
    total = float(spread.sum())
    middle = low + spread * ((1.0 - low.sum()) / total if total > 0 else 0.0)
    center = middle @ simplex.points
    gaps = simplex.points - center
    # squares may underflow before the distances do
    unit = float(np.abs(gaps).max())
    return center, unit * float(np.linalg.norm(gaps / unit, axis=1).max()) if unit > 0.0 else 0.0, middle


@problem_function("interval_simplex")
def _problem(statement: Statement) -> dict[str, Any]:
    simplex: IntervalSimplex = statement.domain
    simplex.check()
    if statement.exact:
        sums = [sum((Fraction(float(x)) for x in bound), Fraction(0)) for bound in (simplex.lower, simplex.upper)]
        if sums[0] > 1 or sums[1] < 1:
            raise ValueError("the bounds admit no weights in exact arithmetic; the covariance of none is bounded.")
    center, scale, _ = _centre(simplex)
    y: Any = lift(simplex.points) if statement.exact else simplex.points
    z = (y - center) / scale if scale > 0 else np.zeros_like(y)
    return {"points": z, "lower": simplex.lower, "upper": np.minimum(simplex.upper, 1.0), "scale": scale}


@dual_function("interval_simplex", exact=True, quantity="covariance")
def dual_value(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    y, low, high = problem["points"], problem["lower"], problem["upper"]
    n, d = y.shape
    N = symmetrize(multiplier(multipliers, "N", (d, d)))
    L = symmetrize(multiplier(multipliers, "L", (n, d, d)))
    if not isinstance(y, np.ndarray):
        return np.square(lift(problem["scale"])) * _proved(y, low, high, N, L)
    # differences to the centre were rounded in proportion to the points
    gaps = y[:, :, None] * y[:, None, :] - N
    # the least shift that makes L_j and L_j + Y_j - N PSD, by more than the error of the eigenvalues
    size = 1.0 + float(np.abs(N).sum()) + np.abs(L).sum(axis=(1, 2))
    least = np.minimum(np.linalg.eigvalsh(L)[:, 0], np.linalg.eigvalsh(L + gaps)[:, 0])
    shift = np.maximum(0.0, -least) + 8.0 * d * EPS * size
    total = N + np.einsum("j,jab->ab", high, gaps) + np.einsum("j,jab->ab", high - low, L)
    value = lambda_max_upper(total) + float((high - low) @ shift)
    value = max(value + 16.0 * (n + d) * EPS * float(high @ size), 0.0)  # nan stays nan, which proves nothing
    return max(float(problem["scale"] ** 2 * value), LEAST if problem["scale"] > 0.0 else 0.0)


def _proved(y: Any, low: Array, high: Array, N: Array, L: Array) -> Any:
    """The dual function in balls: every ``L_j`` and ``L_j + Y_j - N`` is shifted until it is proved PSD."""
    n, d = y.shape
    total = BallMatrix.exact(N)
    for j in range(n):
        row = BallMatrix.between(y[j : j + 1])
        gap = row.T @ row - N
        least = min(float(np.linalg.eigvalsh(M)[0]) for M in (L[j], L[j] + symmetrize(gap.mid())))
        size = 1.0 + float(np.abs(N).sum()) + float(np.abs(L[j]).sum())
        shifted = next(
            (
                S
                for step in (1e-15, 1e-13, 1e-11, 1e-9)
                for S in (L[j] + (max(0.0, -least) + 8 * d * step * size) * np.eye(d),)
                if proves_psd(BallMatrix.exact(S)) and proves_psd(gap + S)
            ),
            None,
        )
        if shifted is None:
            raise CertificateError(f"the multiplier L[{j}] could not be confirmed in balls.")
        total = total + gap * float(high[j]) + BallMatrix.exact(shifted) * (lift(high[j]) - low[j])
    return np.maximum(0.0, lambda_max_upper(total))


def _sdp(y: Array, low: Array, high: Array, solver: str, max_iter: int | None) -> tuple[Array, Array, Proposal]:
    import cvxpy as cp

    n, d = y.shape
    N = cp.Variable((d, d), symmetric=True)
    L = [cp.Variable((d, d), PSD=True) for _ in range(n)]
    Y = y[:, :, None] * y[:, None, :]
    total = N + sum(high[j] * (Y[j] - N) + (high[j] - low[j]) * L[j] for j in range(n))
    constraints = [L[j] + Y[j] - N >> 0 for j in range(n)]
    proposal = cvxpy_solve(cp.Problem(cp.Minimize(cp.lambda_max(total)), constraints), solver, max_iter)
    return np.asarray(N.value), np.stack([np.asarray(Lj.value) for Lj in L]), proposal


def _attained(y: Array, low: Array, high: Array, start: Array) -> float:
    """The norm of the covariance that alternating between the direction and the weights reaches."""
    best = 0.0
    p = start
    for _ in range(30):
        m = p @ y
        w, U = np.linalg.eigh(((y - m) * p[:, None]).T @ (y - m))
        best = max(best, float(w[-1]))
        # the variance is concave in p: its linearisation at p is maximised by filling the largest gains
        gain = ((y - m) @ U[:, -1]) ** 2
        order = np.argsort(-gain)
        room = np.cumsum((high - low)[order])
        q = low.copy()
        q[order] += np.diff(np.minimum(room, 1.0 - low.sum()), prepend=0.0)
        p = 0.5 * (p + q)
    return best


def threshold_bounds(y: Array, low: Array, high: Array, eta: Array) -> Array:
    """One-scalar bounds of a batch: ``y (m, n, d)``, ``low, high (m, n)``, ``eta (m,)`` >= 0; returns ``(m,)``.

    The entries of ``y`` are differences to any centre, the same within each of the m problems.
    """
    size = np.sum(y**2, axis=-1)
    level = eta[:, None]
    # coefficient of y y^T: that of yhat yhat^T over |y|^2, finite at y = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.where(size > 0, np.minimum(level / size, 1.0), 1.0)
        outside = np.where(size > 0, np.maximum(1.0 - level / size, 0.0), 0.0)
    weights = low * inside + high * outside
    scaled = np.sqrt(weights)[..., None] * y
    k, d = y.shape[-2:]
    gram = np.swapaxes(scaled, -1, -2) @ scaled if d <= k else scaled @ np.swapaxes(scaled, -1, -2)
    top = np.linalg.eigvalsh(gram)[:, -1] * (1.0 + 8.0 * (k + d) * EPS)
    return np.asarray(eta * np.maximum(0.0, 1.0 - low.sum(axis=1) * (1.0 - 4 * k * EPS)) + np.maximum(top, 0.0))


def _simplex(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    wanted = "it is about points and bounds of their weights, and no map (relaxations.interval_simplex)"
    return None if attention is None and isinstance(domain, IntervalSimplex) else wanted


@theorem(
    "interval_simplex",
    statement="sup lambda_max of a covariance over weights between bounds",
    hypotheses="points, and bounds of their weights",
    applies=_simplex,
    closed=False,
    quantity="covariance",
)
def _best(attention: None, simplex: IntervalSimplex, n: int | None, p: float) -> Certificate:
    return interval_simplex(simplex.points, simplex.lower, simplex.upper)
