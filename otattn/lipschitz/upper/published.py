r"""The published Lipschitz bounds, one function a theorem: the baselines of our own.

Notation: logits ``<A x, y>``, values ``V y``, tokens in the ball of radius R, ``a = ||A|| R^2``, ``v =
||V||`` (spectral norms), n tokens; the constant is that of the token map for the Frobenius norm (n given,
``W_2`` between n atoms of weight 1/n) or of ``mu -> F(mu)`` in ``W_2`` on all measures of the ball (n
None).

The theorems are stated without biases. A query bias (logits ``<A x + c, y>``) is absorbed exactly: the tokens
``(x, r)`` of ``R^{d+1}`` with the constant last coordinate ``r`` and the matrices ``A' = [[A, c/r], [0,
0]]``, ``V' = [V, 0]`` give the same attention, so an upper bound for ``A'``, ``V'`` and the radius
``sqrt(R^2 + r^2)`` holds, for every ``r > 0``. A value bias moves all outputs together and changes no
constant. The lower bounds refuse a bias.

A value above the largest float is reported as inf; ``log_value`` is always finite. Statements that
fail as printed are in :mod:`otattn.lipschitz.papers`.

References
----------
.. [CAP24] Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024.
.. [GLPR23] Geshkovski, Letrouit, Polyanskiy, Rigollet, "The emergence of clusters in self-attention dynamics", 2023.
.. [KPM21] Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.special import lambertw

from otattn._linalg import Array, column_of, lambda_max_upper, norm_upper, spectral_norm_upper
from otattn.attention import AttentionMap, L2Attention, MultiHeadAttention, SoftmaxAttention
from otattn.attention.head import Head
from otattn.errors import CertificateError
from otattn.lipschitz import papers as papers  # so that help(otattn.lipschitz.papers) shows the page
from otattn.lipschitz.arithmetic.balls import BallMatrix, proves_psd, upper_end
from otattn.lipschitz.arithmetic.intervals import lift, lower
from otattn.lipschitz.arithmetic.rounding import LEAST, ROUNDING, least, log, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.constants.sum_of_heads import parts_of, total
from otattn.lipschitz.hypotheses import (
    any_measure,
    centred_ball,
    every,
    no_domain,
    order_two,
    several_heads,
    single_heads,
    softmax,
    tokens,
)
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures import Ball

EXACT_RANK = 64
"""Ranks are decided in fractions up to this dimension; values of wider heads must not need it."""


@theorem(
    "castin2024_discrete",
    statement="sqrt(3) v (a^2 (4n + 1) + n)^{1/2}",
    hypotheses="softmax without a mask; centred ball; n tokens; p = 2",
    applies=every(softmax(masked=False), tokens(), order_two, centred_ball),
    reference="[CAP24] Theorem 3.3",
)
def castin2024_discrete(attention: AttentionMap, domain: Ball, n: int | None, p: float, exact: bool) -> Bound:
    r"""Upper bound for n tokens: ``sqrt(3) v (||A||^2 R^4 (4 n + 1) + n)^{1/2}``.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> castin2024_discrete(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0, n=1)
    Bound(upper 4.24264, p=2, n=1, castin2024_discrete)
    """
    return _castin("castin2024_discrete", attention, domain, n, exact)


@theorem(
    "castin2024_masked",
    statement="sqrt(3) v (a^2 (4n + 1) + n)^{1/2}",
    hypotheses="masked softmax; centred ball; n tokens; p = 2",
    applies=every(softmax(masked=True), tokens(), order_two, centred_ball),
    reference="[CAP24] section 4",
)
def castin2024_masked(attention: AttentionMap, domain: Ball, n: int | None, p: float, exact: bool) -> Bound:
    """Upper bound for n tokens under the causal mask: the formula of :func:`castin2024_discrete`."""
    return _castin("castin2024_masked", attention, domain, n, exact)


def _castin(key: str, attention: AttentionMap, domain: Ball, n: int | None, exact: bool) -> Bound:
    assert n is not None
    value, details = castin_upper(softmax_head(attention, exact=exact).on_span(ball=True), domain.radius, n)
    return outward(log(value), key, domain, n, 2.0, details)


def castin_upper(form: Head, R: float, n: int) -> tuple[Any, dict[str, Any]]:
    """The formula shared by the plain and the masked theorem, and its details."""
    a, details = _absorbed(form, R)
    one: Any = lift(1.0) if form.exact else 1.0
    # hypot of sqrt(4n+1) a and sqrt(n) cannot overflow before the value does
    with np.errstate(over="ignore"):
        value = product(form.norm_V, np.hypot(np.sqrt((12.0 * n + 3.0) * one) * a, np.sqrt(3.0 * n * one)))
    return up(value), details


@theorem(
    "geshkovski2024_mean_field",
    statement="v (1 + 3a) e^{2a}",
    hypotheses="softmax without a mask; centred ball; any measure; p = 2",
    applies=every(softmax(masked=False), any_measure, order_two, centred_ball),
    reference="[GLPR23], [CAP24] section 3",
    measures=True,
)
def geshkovski2024_mean_field(attention: AttentionMap, domain: Ball, n: int | None, p: float, exact: bool) -> Bound:
    r"""Upper bound for any measure of the ball: ``v (1 + 3 a) e^{2 a}``.

    References
    ----------
    [GLPR23] appendix on well-posedness; stated as the mean-field bound in [CAP24] section 3.
    """
    form = softmax_head(attention, exact=exact).on_span(ball=True)
    a, details = _absorbed(form, domain.radius)
    return outward(log(form.norm_V) + np.log1p(3.0 * a) + 2.0 * a, "geshkovski2024_mean_field", domain, n, 2.0, details)


def _absorbed(form: Head, R: float) -> tuple[Any, dict[str, Any]]:
    """``||A'|| R'^2`` of the bias-free attention in one more dimension (module docstring), r optimised."""
    if not form.c.any():
        return product(form.norm_A, R, R), {}
    alpha, size = top(form.norm_A), top(norm_upper(form.c))
    # minimises (alpha^2 + |c|^2 / r^2) (R^2 + r^2)^2; any r > 0 is valid. In units of R and of b = |c| /
    # (alpha R):
    if alpha * R > 0 and (b := size / (alpha * R)) < 1e6:
        b2 = max(b * b, 1e-300)
        r2 = 2.0 * b2 / (b2 + math.sqrt(b2 * b2 + 8.0 * b2))
    else:
        r2 = 1.0
    r = R * math.sqrt(r2)
    if form.exact:
        # ||[A, c/r]||^2 is the largest eigenvalue of A A^T + c c^T / r^2, and R'^2 = R^2 + r^2
        column = column_of(form.c)
        square = lambda_max_upper(form.A @ form.A.T + (column / r) @ (column / r).T)
        return np.sqrt(square) * (np.square(lift(R)) + np.square(lift(r))), {"bias_absorbed": True}
    # with R inside the norm, since c / r may exceed the largest float
    root = math.sqrt(r2)
    widened = np.column_stack([form.A * R, form.c / root])
    norm = up(spectral_norm_upper(widened) * (1.0 + form.error) + form.shift / root) + widened.size * LEAST
    return product(norm, R) * (1.0 + r2), {"bias_absorbed": True}


def _softmax_heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Softmax heads, without a mask where any measure is meant."""
    for head, causal in single_heads(attention):
        if not isinstance(head, SoftmaxAttention):
            return f"every head must be SoftmaxAttention, received {type(head).__name__}"
        if causal and n is None:
            return "n, a number of tokens, must be given under a mask; the bound for any measure is stated without one"
    return None


@theorem(
    "castin2024_multi_head",
    statement="sum_h ||W_h|| c_h, c_h the published bound of head h",
    hypotheses="several softmax heads, masked for n tokens only; centred ball; p = 2",
    applies=every(several_heads, _softmax_heads, order_two, centred_ball),
    reference="[CAP24] Theorem 3.3 and [GLPR23], head by head",
    measures=True,
)
def castin2024_multi_head(attention: AttentionMap, domain: Ball, n: int | None, p: float, exact: bool) -> Bound:
    r"""Several heads ``sum_h W_h Gamma^h``: ``sum_h ||W_h|| c_h``, c_h the published bound of head h on its own.

    The smaller of :func:`castin2024_discrete` (n tokens) and :func:`geshkovski2024_mean_field` (without a mask). Ours,
    :func:`otattn.lipschitz.upper.multi_head.multi_head`, weighs the heads jointly.

    Examples
    --------
    >>> from otattn.attention import MultiHeadAttention, SoftmaxAttention
    >>> heads = MultiHeadAttention([SoftmaxAttention([[1.0]], [[1.0]])] * 2, [[[1.0]], [[3.0]]])
    >>> castin2024_multi_head(heads, radius=1.0, n=1).value   # four times 4.2426
    16.970562...
    """
    logs = []
    for head in parts_of(attention, exact=exact):
        form, R = head.on_span(ball=True), domain.radius
        values = [] if n is None else [log(castin_upper(form, R, n)[0])]
        if not head.causal:  # for any measure, so for n tokens too
            a, _ = _absorbed(form, R)
            values.append(log(form.norm_V) + np.log1p(3.0 * a) + 2.0 * a)
        mix: Any = 1.0 if head.output is None else spectral_norm_upper(head.output) + head.output_error
        logs.append(log(mix) + least(*values))
    return outward(total(logs, []), "castin2024_multi_head", domain, n, 2.0, {})


def _l2_heads(attention: AttentionMap) -> tuple[AttentionMap, ...]:
    inner = attention.unmasked
    return inner.heads if isinstance(inner, MultiHeadAttention) else (inner,)


def tied(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Heads with tied keys and values that factor through them."""
    for i, head in enumerate(_l2_heads(attention)):
        if not isinstance(head, L2Attention):
            return (
                f"attention must be L2Attention (or heads of it), received {type(head).__name__} as head {i}; softmax "
                "attention is not Lipschitz on R^d (kim2021_dot_product)"
            )
        if not np.array_equal(head.Q, head.K):
            gap = float(np.abs(head.Q - head.K).max())
            return f"attention must have tied keys, K = Q, received entries that differ by {gap:g}"
        if not _factors(head.V, head.Q):
            return (
                "attention must have values that factor through the queries exactly, V = M Q, received a V with a part "
                "outside the row space of Q; on all of R^d the smallest such part makes the constant infinite"
            )
    return None


def _order_of_kim(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return None if p in (2.0, math.inf) else f"p must be 2 or inf, received {p:g}"


def _factors(V: Array, Q: Array) -> bool:
    """Whether the rows of V lie in the row space of Q, as exact numbers."""
    s = np.linalg.svd(Q, compute_uv=False)
    if len(s) == Q.shape[1] and s[-1] > 8.0 * max(Q.shape) * np.finfo(float).eps * s[0]:
        return True  # the rows of Q span everything
    live = np.any(Q != 0.0, axis=0)
    if np.any(V[:, ~live]):
        return False
    if Q.shape[1] > EXACT_RANK:
        return not V.any()
    return _rank(np.vstack([Q, V])) == _rank(Q)


def _rank(M: Array) -> int:
    """The rank of a matrix of floats, by elimination in fractions."""
    rows = [[Fraction(float(x)) for x in row] for row in M]
    rank = 0
    for j in range(M.shape[1]):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][j]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            if factor := rows[i][j] / rows[rank][j]:
                rows[i] = [x - factor * y for x, y in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


@theorem(
    "kim2021_l2",
    statement="n^{1/p} (4 tau_n + 1) (sum_h ||Q||^2 ||V Q^+||^2)^{1/2} ||W||",
    hypotheses="L2 with K = Q and values that factor through Q; all of R^d; n tokens; p = 2 or inf",
    applies=every(tied, tokens(), _order_of_kim, no_domain),
    reference="[KPM21] Theorem 3.2, constant re-derived",
    rigorous=False,
    everywhere=True,
)
def kim2021_l2(attention: AttentionMap, domain: None, n: int, p: float, exact: bool) -> Bound:
    r"""Bound of tied L2 attention on all of ``R^d``: ``n^{1/p} (4 phi^{-1}(n-1) + 1) ||Q|| ||V Q^+||``, p = 2 or inf.

    ``phi(x) = x e^{x+1}``, ``P_ij`` proportional to ``exp(-|Q x_i - Q x_j|^2)`` (keys tied to queries, ``K
    = Q``, no scale: put the paper's ``(D/H)^{-1/4}`` into Q) and values that factor through the queries,
    ``V = M Q``, ``M = V Q^+``. Several heads with outputs ``W_h``: ``||[W_1, ..., W_H]|| (sum_h
    c_h^2)^{1/2}``, ``c_h`` the bound of head h. In the paper's notation (``Q = W_Q^T / (D/H)^{1/4}``, ``V =
    W_V^T W_Q W_Q^T / sqrt(D/H)``) this is at most ``sqrt(n) / sqrt(D/H) (4 phi^{-1}(n-1) + 1) (sum_h
    ||W_Q^h||^4 ||W_V^h||^2)^{1/2} ||W_O||``. A form with ``||W_Q||^2`` under the root is quoted elsewhere;
    it cannot hold, since the map is homogeneous of degree 2 in ``W_Q`` (n = 1 is the linear map ``V``).

    Proof. Let ``y = Q x``: the map is ``M h(Q x)`` with ``h(y)_i = m_i = sum_j P_ij y_j``. With ``D_j = y_j
    - y_i``, ``d m_i = sum_j P_ij e_j + 2 C_i e_i - 2 sum_j P_ij (y_j - m_i) <D_j, e_j>``, C_i the
    covariance of row i. Write ``t_j = |D_j|^2``, so ``tau_i = sum_j P_ij t_j`` with ``P_ij`` proportional
    to ``e^{-t_j}`` and ``t_i = 0``: at a maximum over the n - 1 others ``1 - t_j = -tau`` for all, so they
    are equal and ``tau e^{tau+1} = n - 1``: ``tau_i <= phi^{-1}(n-1)``. For ``sum_j |e_j|^2 = 1`` the three
    terms are at most 1, ``2 tr C_i <= 2 tau`` (the variance around the mean is at most that around y_i) and
    ``2 sum_j P_ij |y_j - m_i| |D_j| <= 2 (tr C_i)^{1/2} tau^{1/2} <= 2 tau``. So each row has norm at most
    ``4 tau + 1`` and n rows ``sqrt(n)`` times that. For p = inf the bound of a row, for ``max_j |e_j| = 1``, is that of the
    map: about ``4 log n`` (the paper states it in coordinate-wise norms; here tokens move in the Euclidean one). The rows of
    several heads add up to at most ``||[W_1, ..., W_H]|| (sum_h c_h^2)^{1/2}``. A causal mask leaves fewer others in each row,
    and the proof as it is.
    """
    tau = largest_variance(n)
    rows = 1.0 if math.isinf(p) else math.sqrt(n)
    value = up(rows * (4.0 * tau + 1.0) * tied_norms(attention)) * (1.0 + ROUNDING)
    return Bound(value, "upper", p=p, n=n, details={"phi_inverse": tau}, theorem="kim2021_l2")


def largest_variance(n: int) -> float:
    """``tau_n = phi^{-1}(n-1)``, ``phi(x) = x e^{x+1}``: the largest ``sum_j P_ij |y_j - y_i|^2`` of a row that sees itself."""
    return raised_root(1.0, n)


def raised_root(shift: float, n: int) -> float:
    """At least the root of ``x e^{x + shift} = n - 1``, proved by intervals: the left side increases."""
    if n == 1:
        return 0.0
    others = float(np.nextafter(float(n - 1), math.inf))
    x = float(up(float(lambertw(others * math.exp(-shift)).real)))
    if not lower(np.log(lift(x)) + x + shift - np.log(lift(others))) >= 0.0:
        raise CertificateError(f"a constant of {n} tokens could not be confirmed in intervals; please report it.")
    return x


def tied_norms(attention: AttentionMap, *, exact: bool = False) -> float:
    """``||[W_1, ..., W_H]|| (sum_h (||Q_h|| ||V_h Q_h^+||)^2)^{1/2}`` of tied heads; with ``exact`` as balls prove it."""
    heads, inner, mix = _l2_heads(attention), attention.unmasked, 1.0
    total = math.hypot(*(_tied_norm(head, exact) for head in heads))  # squares of tiny norms vanish
    if isinstance(inner, MultiHeadAttention):
        mix = math.sqrt(len(heads))
        if inner.outputs is not None:
            outputs = np.hstack(inner.outputs)
            mix = upper_end(BallMatrix.exact(outputs).spectral_norm()) if exact else spectral_norm_upper(outputs)
    return float(up(total * mix))


def _tied_norm(head: Any, exact: bool) -> float:
    """``||Q|| ||M||`` of a tied head, ``V = M Q``, ``M = V Q^+``.

    Balls prove it for ``M' + (V - M' Q) Q^+``, M' the floats of M, and ``Q Q^T >= lambda`` (``Q^T Q``, where that is the smaller one).
    """
    Q, V = head.Q, head.V
    _, s, Wt = np.linalg.svd(Q, full_matrices=False)
    keep = s > s.max(initial=0.0) * max(Q.shape) * 1e-15
    if not keep.any():
        return 0.0  # then V = 0 too
    if exact:
        return _tied_norm_in_balls(Q, V, float(s[-1]))
    W = Wt[keep].T
    M = (V @ W) / s[keep]
    # the relative error of the smallest kept singular value enters M
    slack = 1.0 + 16.0 * max(Q.shape) * np.finfo(float).eps * float(s[0] / s[keep].min())
    return float(spectral_norm_upper(Q) * spectral_norm_upper(M) * slack)


def _tied_norm_in_balls(Q: Array, V: Array, least: float) -> float:
    rows = BallMatrix.exact(Q)
    gram, floor = (rows @ rows.T if len(Q) <= Q.shape[1] else rows.T @ rows), 0.9 * least
    if not proves_psd(gram - BallMatrix.exact(floor * np.eye(len(gram))) * floor):
        return math.inf
    M = BallMatrix.exact(V @ np.linalg.pinv(Q))
    rest = BallMatrix.exact(V) - M @ rows
    return float(up(upper_end(rows.spectral_norm()) * (upper_end(M.spectral_norm()) + upper_end(rest.norm()) / floor)))
