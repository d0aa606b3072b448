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
from typing import Any

import numpy as np

from otattn._linalg import column_of, lambda_max_upper, norm_upper, spectral_norm_upper
from otattn.attention import AttentionMap
from otattn.attention.head import Head
from otattn.lipschitz import papers as papers  # so that help(otattn.lipschitz.papers) shows the page
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import LEAST, log, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.hypotheses import any_measure, centred_ball, every, order_two, softmax, tokens
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures import Ball


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
