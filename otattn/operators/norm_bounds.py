r"""The norm of any operator from both sides: proved for small matrices, with a stated failure probability for large ones."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal, solveh_banded
from scipy.sparse.linalg import LinearOperator

from otattn import _validate as check
from otattn.attention import base as attention_base
from otattn.operators.lanczos import _Operator, top_singular
from otattn.operators.proved_norm import proved_norm

__all__ = ["NormBounds", "spectral_norm_bounds"]

Array = NDArray[np.float64]
How = Literal["proved", "computed", "probabilistic"]
_EPS = float(np.finfo(np.float64).eps)
DENSE_SIDE = 2048
"""Matrices whose smaller side is at most this are factorised."""
DENSE_PRODUCTS = 256
"""Operators are written out as matrices when that takes at most so many products."""
FAILURE_OF_A_RUN = 1e-5
"""Rarer failures are shared among several runs: a start that has less than ``sqrt(eps)`` or so of the top vector cannot
be told from rounding."""
PRODUCT_ROUNDING = 64.0 * _EPS
"""The rounding model: a float product ``J^T J x`` differs from the exact one by at most this times ``||J||^2 |x|``. Half
of it leaves room for the solution of the tridiagonal systems."""


class NormBounds(NamedTuple):
    """``lower <= ||J|| <= upper``, and which kind of bound ``upper`` is.

    ``how`` is "proved" (all rounding counted; of the matrix that was given), "computed" (the same, of the matrix whose
    columns are the operator's float products) or "probabilistic" (fails with the stated probability, over the random
    starts, under a model of rounding).
    """

    lower: float
    upper: float
    how: How


def spectral_norm_bounds(
    operator: Any,
    *,
    failure: float = 1e-9,
    tol: float = 1e-6,
    max_iter: int = 1000,
    rng: np.random.Generator | int = 0,
) -> NormBounds:
    r"""The largest singular value of ``operator`` from below and from above.

    Arrays whose smaller side is at most 2048, and operators of at most 256 columns or rows, are factorised:
    :func:`~otattn.operators.proved_norm.proved_norm`. Larger ones get a bound that holds with probability at least
    ``1 - failure`` over the random starts.

    Parameters
    ----------
    operator : LinearOperator or matrix
        Real; anything ``scipy.sparse.linalg.aslinearoperator`` takes.
    failure : float
        Largest probability that ``upper`` is below the norm, in (0, 1).
    tol : float
        The iteration ends when ``upper <= (1 + tol) lower``.
    max_iter : int
        Largest number of products with ``J^T J`` in a run; the bound that they give is returned, however wide.
    rng : Generator or int
        Of the starts. They must not depend on the operator.

    Returns
    -------
    NormBounds
        ``(lower, upper, how)``.

    Notes
    -----
    Theorem. Let ``A`` be symmetric with largest eigenvalue ``lambda_1`` and unit eigenvector ``v``, ``q_0`` a unit
    vector and ``A q_j = beta_{j-1} q_{j-1} + alpha_j q_j + beta_j q_{j+1} + f_j`` for j < k, whatever the vectors
    ``|q_j| <= 1`` and the numbers ``alpha_j, beta_j >= 0`` are; T is the tridiagonal matrix of these numbers. If
    ``lambda_1`` exceeds the largest eigenvalue of T, then with ``g = (lambda_1 - T)^{-1} e_0``

    .. math:: |\langle v, q_0 \rangle| \le \beta_{k-1}\, g_{k-1} + \sum_j g_j |f_j| .

    Proof. With ``c_j = <v, q_j>`` the products of the recurrences with v say ``(lambda_1 - T) c = beta_{k-1} c_k
    e_{k-1} + (<v, f_j>)_j``; solve, take the first entry. The inverse is symmetric, and it has no negative entry: it
    is the sum of the powers of T over those of lambda_1. QED

    The right side falls as lambda_1 grows, and where ``|f_j|`` stands for ``|f_j| + r lambda_1`` too (``lambda_1 g_j``
    is the same sum of powers). So if ``|<v, q_0>| >= t``, then ``lambda_1`` is at most the number at which it equals
    t, *whatever the number of steps and whatever made them stop*: the event belongs to the start alone. For q_0
    uniform on the sphere of dimension N

    .. math:: P(|\langle v, q_0 \rangle| < t) \le t \sqrt{2 N / \pi}

    (the density of a coordinate is at most ``Gamma(N/2) / (sqrt(pi) Gamma((N-1)/2)) <= sqrt((N-1) / (2 pi))`` for
    N >= 3; for N = 2 the probability is ``(2/pi) arcsin t <= t``; for N = 1 it is 0 for t <= 1). Runs from
    independent starts fail independently: R runs at ``failure^{1/R}`` each, of which the largest bound is returned.

    No orthogonality is assumed, the ``f_j`` are measured, and rounding of the products enters as r. A run is never
    restarted. Without looking at T the theorem gives, for positive semi-definite A and exact arithmetic, that the top
    Ritz value after k steps is below ``(1 - e) lambda_1`` with probability at most ``sqrt(2 N / pi) / cosh((2k - 1)
    artanh sqrt(e)) <= 1.648 sqrt(N) exp(-(2k - 1) sqrt(e))``, the theorem of Kuczynski and Wozniakowski (test
    polynomial ``U_{2k-2}(sqrt(x / (1 - e)))``); what is returned is the sharper bound that the steps taken prove.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse.linalg import LinearOperator
    >>> w = 2.0 * 0.9 ** np.arange(5000)
    >>> J = LinearOperator((5000, 5000), matvec=lambda x: w * x, rmatvec=lambda x: w * x, dtype=float)
    >>> lower, upper, how = spectral_norm_bounds(J)
    >>> bool(lower <= 2.0 <= upper <= (1 + 1e-6) * lower), how
    (True, 'probabilistic')

    References
    ----------
    Kuczynski, Wozniakowski, "Estimating the largest eigenvalue by the power and Lanczos algorithms with a random start",
    SIAM J. Matrix Anal. Appl. 13 (1992), Theorem 4.2. Van Dorsselaer, Hochstenbach, van der Vorst, "Computing
    probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos method", SIAM J. Matrix Anal.
    Appl. 22 (2000): the bound from one polynomial in exact arithmetic.
    """
    check.positive(tol, "tol")
    if not 0.0 < check.positive(failure, "failure") < 1.0:
        raise ValueError(f"failure must lie in (0, 1), received {failure:g}; it is a probability.")
    budget = check.count(max_iter, "max_iter")
    generator = check.rng_from(rng)
    wrapped = _Operator(operator)
    matrix, how = _written_out(operator, wrapped)
    if matrix is not None:
        return NormBounds(*_of_matrix(matrix, budget, generator), how)
    runs = max(1, math.ceil(math.log(failure) / math.log(FAILURE_OF_A_RUN)))
    lower = upper = 0.0
    for _ in range(runs):
        low, high = _run(wrapped, failure ** (1.0 / runs), tol, budget, generator, lower, upper)
        lower, upper = max(lower, low), max(upper, high)
    return NormBounds(lower, max(lower, upper), "probabilistic")


def _written_out(operator: Any, wrapped: _Operator) -> tuple[Array | None, How]:
    """The matrix, where it is given or costs few products."""
    side, room = min(wrapped.outputs, wrapped.size), attention_base.MEMORY_BUDGET // 8
    if wrapped.outputs * wrapped.size > room:
        return None, "probabilistic"
    if not isinstance(operator, LinearOperator):
        given = operator.toarray() if hasattr(operator, "toarray") else operator
        return (np.asarray(given, dtype=np.float64), "proved") if side <= DENSE_SIDE else (None, "probabilistic")
    if side > DENSE_PRODUCTS:
        return None, "probabilistic"
    if hasattr(operator, "to_dense"):
        return np.asarray(operator.to_dense(), dtype=np.float64), "computed"
    if side == wrapped.size:
        return np.stack([operator.matvec(e) for e in np.eye(side)], axis=1).astype(np.float64), "computed"
    return np.stack([operator.rmatvec(e) for e in np.eye(side)], axis=0).astype(np.float64), "computed"


def _of_matrix(M: Array, budget: int, rng: np.random.Generator) -> tuple[float, float]:
    """A product with a singular vector from below, :func:`proved_norm` from above."""
    upper = proved_norm(M)
    if upper == 0.0:
        return 0.0, 0.0
    power = math.frexp(float(np.abs(M).max()))[1]
    Z = np.ldexp(M, -power)
    found = top_singular(Z, tol=1e-9, rng=rng, max_iter=budget, allow_unconverged=True).value
    # each entry of a product rounds by the terms that it is made of, which are at most the rows' norms
    low = found - (max(M.shape) + 8) * _EPS * float(np.linalg.norm(Z))
    low = math.ldexp(max(low, 0.0), power)
    return (low if low > 1e-300 else max(low - 5e-324, 0.0)), upper


def _threshold(failure: float, size: int) -> float:
    """``t`` with ``P(|<v, q_0>| < t) <= failure`` for the float start: uniform, normalised, rounded."""
    t = min(1.0, failure * math.sqrt(math.pi / (2.0 * size)))
    return t * (1.0 - (size + 8) * _EPS) - 2.0 * _EPS


class _Recurrence:
    """The numbers of the theorem: ``alpha``, ``beta`` and what is measured of ``|f_j|``, in units of the operator."""

    def __init__(self, size: int) -> None:
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.lost: list[float] = []
        self.size = size

    def append(self, alpha: float, beta: float, lost: float) -> None:
        # what rounded in measuring f and, later, in solving with T: 16 eps of the row of T
        row = alpha + beta + (self.beta[-1] if self.beta else 0.0)
        self.lost.append(lost * (1.0 + self.size * _EPS) + 16.0 * _EPS * row)
        self.alpha.append(alpha)
        self.beta.append(beta)

    def ritz(self, count: int | None = None) -> tuple[float, Array]:
        """The largest eigenvalue of (the first ``count`` rows of) T and its vector."""
        k = len(self.alpha) if count is None else count
        values, vectors = eigh_tridiagonal(self.alpha[:k], self.beta[: k - 1], select="i", select_range=(k - 1, k - 1))
        return max(float(values[0]), 0.0), vectors[:, 0]

    def share(self, top: float) -> float:
        """The theorem's right side for a largest eigenvalue ``top``; inf where T has a larger one."""
        k = len(self.alpha)
        band = np.zeros((2, k))
        band[0] = top - np.array(self.alpha)
        band[1, : k - 1] = -np.array(self.beta[:-1])
        e = np.zeros(k)
        e[0] = 1.0
        try:
            g = solveh_banded(band, e, lower=True) if k > 1 else e / band[0] if band[0, 0] > 0.0 else np.full(1, np.inf)
        except np.linalg.LinAlgError:
            return math.inf
        if not (np.isfinite(g).all() and (g >= 0.0).all()):
            return math.inf
        total = self.beta[-1] * float(g[-1]) + float(g @ self.lost) + PRODUCT_ROUNDING * top * float(g.sum())
        return total * (1.0 + (self.size + k + 16) * _EPS)

    def largest(self, least: float, t: float) -> float:
        """The number at which the right side falls below ``t``, to 1e-3 of its distance from the top Ritz value."""
        base = self.ritz()[0]
        if base == 0.0 and self.beta[-1] == 0.0 and max(self.lost) == 0.0:
            return 0.0 if t > PRODUCT_ROUNDING else math.inf
        step = max(least - base, 4.0 * _EPS * base, 1e-300)
        while self.share(base + step) >= t:
            step *= 4.0
            if not math.isfinite(base + step):
                return math.inf
        below = 0.0
        while step - below > 1e-3 * step and base + step > base:
            middle = 0.5 * (below + step)
            below, step = (middle, step) if self.share(base + middle) >= t else (below, middle)
        return (base + step) * (1.0 + 4.0 * _EPS)


def _run(
    operator: _Operator,
    failure: float,
    tol: float,
    budget: int,
    rng: np.random.Generator,
    lower: float,
    upper: float,
) -> tuple[float, float]:
    """The bounds of one start, which fails with probability ``failure``; it stops at the ``upper`` of those before."""
    size, t = operator.size, _threshold(failure, operator.size)
    room = attention_base.MEMORY_BUDGET // (8 * size)
    basis = np.empty((max(2, min(size, budget, room)), size))
    q = rng.standard_normal(size)
    q /= np.linalg.norm(q)
    before, numbers = np.zeros(size), _Recurrence(size)
    theta, _, image = operator.evaluate(q)
    known = max(lower / operator.scale, math.sqrt(theta))
    for j in range(budget):
        if j > 0:
            image = operator.gram(q)
        if not np.isfinite(image).all():
            raise ValueError("operator must give finite products, received NaN or infinite entries; scale its data.")
        if j < len(basis):
            basis[j] = q
        stored = basis[: j + 1]
        past = numbers.beta[-1] if j > 0 else 0.0
        w = image - past * before
        alpha = max(float(q @ w), 0.0)
        w -= alpha * q
        for _ in range(2):
            w -= (stored @ w) @ stored
        beta = float(np.linalg.norm(w))
        after = w / beta if beta > 0.0 else np.zeros(size)
        lost = float(np.linalg.norm(image - past * before - alpha * q - beta * after))
        numbers.append(alpha, beta, lost)
        ritz = numbers.ritz()[0]
        known = max(known, math.sqrt(ritz))
        goal = (known * (1.0 + 0.999 * tol)) ** 2  # the rest is for rounding
        if upper < math.inf:
            goal = max(goal, (upper / operator.scale) ** 2)
        if beta <= 4.0 * _EPS * ritz or numbers.share(goal) < t:
            break
        before, q = q, after
    high = operator.scale * math.sqrt(numbers.largest(goal, t))
    count = min(len(numbers.alpha), len(basis))
    y = numbers.ritz(count)[1] @ basis[:count]
    low = operator.scale * math.sqrt(operator.evaluate(y / np.linalg.norm(y))[0]) * (1.0 - PRODUCT_ROUNDING)
    return float(low), high * (1.0 + 4.0 * _EPS) + (0.0 if high == 0.0 or high > 1e-300 else 5e-324)
