r"""The norm of any operator from both sides: proved for small matrices, with a stated failure probability for large ones."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.linalg import solveh_banded
from scipy.sparse.linalg import LinearOperator

from otattn import _validate as check
from otattn._linalg import EPS, Array
from otattn.attention import JacobianOperator
from otattn.attention import memory as attention_memory
from otattn.operators.krylov import Lanczos
from otattn.operators.lanczos import top_singular
from otattn.operators.proved_norm import proved_norm
from otattn.operators.scaled import ScaledOperator

__all__ = ["NormBounds", "spectral_norm_bounds"]

How = Literal["proved", "computed", "probabilistic"]
DENSE_SIDE = 2048
"""Matrices whose smaller side is at most this are factorised."""
DENSE_PRODUCTS = 256
"""Operators are written out as matrices when that takes at most so many products."""
RUN_FAILURES = {"float64": 1e-5, "float32": 0.1}
"""Rarer failures are shared among several runs: a start that has too little of the top vector cannot be told from the
rounding of products in that precision."""
PRODUCT_ROUNDING = 64.0
"""The rounding model, in units of the relative spacing of floats: a float product ``J^T J x`` differs from the exact one
by at most so much of ``||J||^2 |x|``. A part of it is room for the solution of the tridiagonal systems."""


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

    Arrays and assembled Jacobians whose smaller side is at most 2048, other operators of at most 256, are factorised:
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
    check.probability(failure, "failure")
    budget = check.count(max_iter, "max_iter")
    generator = check.rng_from(rng)
    wrapped = ScaledOperator(operator)
    matrix, how = _written_out(operator, wrapped)
    if matrix is not None:
        return NormBounds(*_of_matrix(matrix, budget, generator), how)
    share = RUN_FAILURES["float64" if wrapped.eps == EPS else "float32"]
    runs = max(1, math.ceil(math.log(failure) / math.log(share)))
    bounds = NormBounds(0.0, 0.0, "probabilistic")
    for _ in range(runs):
        low, high = _run(wrapped, failure ** (1.0 / runs), tol, budget, generator, bounds)
        bounds = NormBounds(max(low, bounds.lower), max(low, high, bounds.upper), "probabilistic")
    return bounds


def _written_out(operator: Any, wrapped: ScaledOperator) -> tuple[Array | None, How]:
    """The matrix, where it is given or costs few products."""
    side, room = min(wrapped.outputs, wrapped.size), attention_memory.MEMORY_BUDGET // 8
    if wrapped.outputs * wrapped.size > room:
        return None, "probabilistic"
    if not isinstance(operator, LinearOperator):
        if side > DENSE_SIDE:
            return None, "probabilistic"
        given = np.asarray(operator.toarray() if hasattr(operator, "toarray") else operator)
        matrix = given.astype(np.float64)
        with np.errstate(invalid="ignore"):
            same = bool(np.all(matrix.astype(given.dtype) == given))
        return matrix, "proved" if same else "computed"
    assembled = isinstance(operator, JacobianOperator) and operator.assembled
    if side > (DENSE_SIDE if assembled else DENSE_PRODUCTS):
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
    # the product rounds by its terms, which are at most the rows' norms; so do its norm and that of the vector
    low = found - 2.0 * (max(M.shape) + 8) * EPS * float(np.linalg.norm(Z))
    low = math.ldexp(max(low, 0.0), power)
    return (low if low > 1e-300 else max(low - 5e-324, 0.0)), upper


def _threshold(failure: float, size: int) -> float:
    """``t`` with ``P(|<v, q_0>| < t) <= failure`` for the float start: uniform, normalised, rounded."""
    t = min(1.0, failure * math.sqrt(math.pi / (2.0 * size)))
    return t * (1.0 - (size + 8) * EPS) - 2.0 * EPS


def _share(lanczos: Lanczos, top: float, rounding: float) -> float:
    """The theorem's right side for a largest eigenvalue ``top``; inf where T has a larger one."""
    alpha, beta = np.array(lanczos.alpha), np.array(lanczos.beta)
    k, size = len(alpha), lanczos.next.size
    band, e = np.zeros((2, k)), np.zeros(k)
    band[0], band[1, : k - 1], e[0] = top - alpha, -beta[:-1], 1.0
    try:
        g = solveh_banded(band, e, lower=True) if k > 1 else e / band[0] if band[0, 0] > 0.0 else np.full(1, np.inf)
    except np.linalg.LinAlgError:
        return math.inf
    if not (np.isfinite(g).all() and (g >= 0.0).all()):
        return math.inf
    # what rounded in measuring f and in solving with T: 16 eps of the row of T
    rows = alpha + beta
    rows[1:] += beta[:-1]
    lost = (1.0 + size * EPS) * np.array(lanczos.lost) + 16.0 * EPS * rows + rounding * top
    return (float(beta[-1] * g[-1]) + float(g @ lost)) * (1.0 + (size + k + 16) * EPS)


def _largest(lanczos: Lanczos, least: float, t: float, rounding: float) -> float:
    """The number at which the right side falls below ``t``, to 1e-3 of its distance from the top Ritz value."""
    base = lanczos.ritz()[0]
    if base == lanczos.beta[-1] == max(lanczos.lost) == 0.0:
        return 0.0 if t > rounding else math.inf
    step = max(least - base, 4.0 * EPS * base, 1e-300)
    while _share(lanczos, base + step, rounding) >= t:
        step *= 4.0
        if not math.isfinite(base + step):
            return math.inf
    below = 0.0
    while step - below > 1e-3 * step and base + step > base:
        middle = 0.5 * (below + step)
        below, step = (middle, step) if _share(lanczos, base + middle, rounding) >= t else (below, middle)
    return (base + step) * (1.0 + 4.0 * EPS)


def _run(
    operator: ScaledOperator, failure: float, tol: float, budget: int, rng: np.random.Generator, before: NormBounds
) -> tuple[float, float]:
    """The bounds of one start, which fails with probability ``failure``; it need not be below those of runs before."""
    t, start = _threshold(failure, operator.size), rng.standard_normal(operator.size)
    rounding = PRODUCT_ROUNDING * operator.eps
    start /= np.linalg.norm(start)
    lanczos = Lanczos(start)
    lanczos.step(operator.evaluate(start)[2])  # sets the scale
    known, least = before.lower / operator.scale, before.upper / operator.scale if before.upper < math.inf else 0.0
    while True:
        known = max(known, math.sqrt(lanczos.ritz()[0]))
        goal = max(known * (1.0 + 0.999 * tol), least) ** 2  # the rest is for rounding
        if lanczos.exhausted or _share(lanczos, goal, rounding) < t or len(lanczos.alpha) >= budget:
            break
        lanczos.step(operator.gram(lanczos.next))
    high = operator.scale * math.sqrt(_largest(lanczos, goal, t, rounding)) * (1.0 + 4.0 * EPS)
    low = operator.scale * math.sqrt(operator.evaluate(lanczos.vector())[0]) * (1.0 - rounding)
    return float(low), high if high == 0.0 or high > 1e-300 else high + 5e-324
