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

A value above the largest float is reported as inf; ``details["log_value"]`` is always finite. Statements that
fail as printed are in :mod:`otattn.lipschitz.papers`.

References
----------
.. [CAP24] Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024.
.. [GLPR23] Geshkovski, Letrouit, Polyanskiy, Rigollet, "The emergence of clusters in self-attention
dynamics", 2023. .. [KPM21] Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn._linalg import column_of, lambda_max_upper, norm_upper, spectral_norm_upper
from otattn.attention import AttentionMap
from otattn.lipschitz import papers as papers  # so that help(otattn.lipschitz.papers) shows the page
from otattn.lipschitz.bound import Bound, prove, prover
from otattn.lipschitz.intervals import lift
from otattn.lipschitz.kim2021 import kim2021_dot_product, kim2021_l2
from otattn.lipschitz.rounding import LEAST, down, log, log_sum, product, safe_exp, top, up
from otattn.lipschitz.setting import SoftmaxForm, check_two, refuse_bias, softmax_form
from otattn.lipschitz.theorems import rounded_bound
from otattn.measures import Ball, DiscreteMeasure

__all__ = [
    "castin2024_discrete",
    "castin2024_discrete_lower",
    "castin2024_large_radius",
    "castin2024_masked",
    "castin2024_mean_field_lower",
    "geshkovski2024_mean_field",
    "kim2021_dot_product",
    "kim2021_l2",
]

Array = NDArray[np.float64]


def castin2024_discrete(attention: AttentionMap, *, radius: float, n: int, p: float = 2) -> Bound:
    r"""Upper bound for n tokens: ``sqrt(3) v (||A||^2 R^4 (4 n + 1) + n)^{1/2}``.

    Parameters
    ----------
    attention : SoftmaxAttention
    radius : float
        R > 0; tokens in the centred ball of ``R^d``.
    n : int
        Number of tokens, at least 1.
    p : float
        Only 2.

    Returns
    -------
    Bound
        kind "upper".

    Raises
    ------
    ValueError
        Another attention, p other than 2, or parameters out of range.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> castin2024_discrete(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0, n=1)
    Bound(upper 4.24264, p=2, n=1, castin2024_discrete: [CAP24] Theorem 3.3)

    References
    ----------
    [CAP24] Theorem 3.3.
    """
    check_two(p, "castin2024_discrete")
    return prove("castin2024_discrete", attention, Ball(radius), check.count(n, "n"), 2.0)


@prover("castin2024_discrete")
def _castin_discrete(attention: AttentionMap, domain: Ball, n: int | None, p: float, exact: bool) -> Bound:
    source = "castin2024_discrete: [CAP24] Theorem 3.3"
    return _castin(softmax_form(attention, masked=False, exact=exact, ball=True), domain, n, p, source)


def castin2024_masked(attention: AttentionMap, *, radius: float, n: int, p: float = 2) -> Bound:
    """Upper bound for n tokens under the causal mask: the formula of :func:`castin2024_discrete`.

    Parameters
    ----------
    attention : MaskedAttention
        Of a softmax head. The metric is the conditional W_2 on sequences, the Frobenius norm on tokens.
    radius, n, p
        As for :func:`castin2024_discrete`.

    References
    ----------
    [CAP24] section 4 (masked attention).
    """
    check_two(p, "castin2024_masked")
    return prove("castin2024_masked", attention, Ball(radius), check.count(n, "n"), 2.0)


@prover("castin2024_masked")
def _castin_masked(attention: AttentionMap, domain: Ball, n: int | None, p: float, exact: bool) -> Bound:
    source = "castin2024_masked: [CAP24] section 4"
    return _castin(softmax_form(attention, masked=True, exact=exact, ball=True), domain, n, p, source)


def _castin(form: SoftmaxForm, domain: Ball, n: int | None, p: float, source: str) -> Bound:
    check_two(p, source)
    value, details = castin_upper(form, _radius(domain), check.count(n, "n"))
    return _published(log(value), source, domain, n, details)


def castin_upper(form: SoftmaxForm, R: float, n: int) -> tuple[Any, dict[str, Any]]:
    """The formula shared by the plain and the masked theorem, and its details."""
    a, details = _absorbed(form, R)
    one: Any = lift(1.0) if form.exact else 1.0
    # hypot of sqrt(4n+1) a and sqrt(n) cannot overflow before the value does
    with np.errstate(over="ignore"):
        value = product(form.norm_V, np.hypot(np.sqrt((12.0 * n + 3.0) * one) * a, np.sqrt(3.0 * n * one)))
    return up(value), details


def _radius(domain: Any) -> float:
    if not isinstance(domain, Ball):
        raise ValueError(f"the published theorems are about centred balls, received {domain!r}.")
    return check.positive(domain.radius, "radius")


def _published(log_value: Any, source: str, domain: Ball, n: int | None, details: dict[str, Any]) -> Bound:
    """An upper bound of a published theorem from its logarithm, rounded outward like our own."""
    return rounded_bound(log_value, source.partition(":")[0], source, domain, n, 2.0, details)


def castin2024_discrete_lower(attention: AttentionMap, *, radius: float, n: int, p: float = 2) -> Bound:
    r"""Lower bound for n tokens: ``v sqrt(n-1) / (1 + (n-1) e^{-2 R^2 gamma})``.

    Here ``gamma = max(-gamma_min, gamma_max / 8)`` over the real eigenvalues of A. The theorem has ``V = I``.

    The witness, with u a unit eigenvector, is ``(Ru, -Ru, ..., -Ru)`` when ``gamma = -gamma_min`` and
    ``(Ru, Ru/2, ..., Ru/2)`` otherwise. The factor ``v`` is ours: moving the first token moves each other
    image by ``P V (I + s u u^T) e`` with the same ``s >= 0`` and ``P = 1 / (1 + (n-1) e^{-2 R^2 gamma})``,
    and ``||V|| <= ||V M|| ||M^{-1}|| <= ||V M||`` for ``M = I + s u u^T``; so the Jacobian there has norm
    at least ``sqrt(n-1) P v``.

    Parameters
    ----------
    attention : SoftmaxAttention
        Without query bias; A must have a real eigenvalue.
    radius, n, p
        As for :func:`castin2024_discrete`.

    Returns
    -------
    Bound
        kind "lower", with the witness (a measure of two atoms whose weights are multiples of 1/n).

    References
    ----------
    [CAP24] section 3, lower bounds.
    """
    check_two(p, "castin2024_discrete_lower")
    form = softmax_form(attention, masked=False)
    R, count = check.positive(radius, "radius"), check.count(n, "n")
    gamma, u, anchor, factor = _rate(form, R)
    # one token: the formula says 0, and so does an empty sum of moved images
    share = log_sum(0.0, log(count - 1.0) - 2.0 * R * R * gamma)
    log_value = log(factor * float(np.linalg.norm(form.V, 2))) + 0.5 * log(count - 1.0) - share
    points = R * np.stack([form.lift(u), anchor * form.lift(u)])
    witness = DiscreteMeasure(
        points[: 1 if count == 1 else 2], None if count == 1 else [1 / count, (count - 1) / count]
    )
    details = {"log_value": log_value, "gamma": gamma}
    source = "castin2024_discrete_lower: [CAP24] section 3"
    return Bound(down(safe_exp(log_value)), "lower", source, domain=Ball(R), n=count, witness=witness, details=details)


def geshkovski2024_mean_field(attention: AttentionMap, *, radius: float, p: float = 2) -> Bound:
    r"""Upper bound for any measure of the ball: ``v (1 + 3 a) e^{2 a}``.

    Parameters
    ----------
    attention : SoftmaxAttention
    radius : float
        R > 0.
    p : float
        Only 2.

    References
    ----------
    [GLPR23] appendix on well-posedness; stated as the mean-field bound in [CAP24] section 3.
    """
    check_two(p, "geshkovski2024_mean_field")
    return prove("geshkovski2024_mean_field", attention, Ball(radius), None, 2.0)


@prover("geshkovski2024_mean_field")
def _geshkovski(attention: AttentionMap, domain: Ball, n: int | None, p: float, exact: bool) -> Bound:
    source = "geshkovski2024_mean_field: [GLPR23], [CAP24] section 3"
    check_two(p, source)
    form = softmax_form(attention, masked=False, exact=exact, ball=True)
    a, details = _absorbed(form, _radius(domain))
    return _published(log(form.norm_V) + np.log1p(3.0 * a) + 2.0 * a, source, domain, n, details)


def castin2024_mean_field_lower(attention: AttentionMap, *, radius: float, p: float = 2) -> Bound:
    r"""Lower bound for any measure of the ball: ``v (gamma / 2) R^2 e^{gamma R^2}``.

    gamma is that of :func:`castin2024_discrete_lower`.

    The paper states the growth for large R and ``V = I``. The same witness proves it for every R: with
    ``q = e^{-2 s}``, ``s = gamma R^2``, the measure ``q delta_{Ru} + (1-q) delta_{-Ru}`` (or ``...
    delta_{Ru/2}``) gives its heavy atom's image the sensitivity ``V P (I + 2 s (1-P) u u^T)`` to the light
    atom, ``P = 1/(2-q)``; in ``L^2(mu)`` that entry of the Jacobian is multiplied by ``sqrt((1-q)/q)``, and
    ``e^s sqrt(1-q)/(2-q) (1 + 2 s (1-q)/(2-q)) >= (s/2) e^s`` for every ``s >= 0``. The factor ``v`` is
    ours, for ``V != I``: the direction u may be one that V kills, so what is proved is ``e^s
    sqrt(1-q)/(2-q) v`` at least, and ``|V u|`` times the whole; the larger of ``v e^s sqrt(1-q)/(2-q)`` and
    ``|V u| (s/2) e^s`` is reported.

    Returns
    -------
    Bound
        kind "lower"; ``details["witness_value"]`` is the witness's whole entry, never smaller. The witness is None where s is
        0, and above 354, where a float does not hold all digits of q.

    References
    ----------
    [CAP24] section 3, lower bounds.
    """
    check_two(p, "castin2024_mean_field_lower")
    form = softmax_form(attention, masked=False)
    R = check.positive(radius, "radius")
    gamma, u, anchor, factor = _rate(form, R)
    s = gamma * R * R
    q, rest = math.exp(-2.0 * s), -math.expm1(-2.0 * s)
    along = factor * float(np.linalg.norm(form.V @ u))
    head = s + 0.5 * log(rest) - math.log(2.0 - q)
    published = log(along) + log(s / 2.0) + s
    log_value = max(published, log(factor * float(np.linalg.norm(form.V, 2))) + head)
    M = form.V + 2.0 * s * rest / (2.0 - q) * np.outer(form.V @ u, u)
    whole = log(factor * float(np.linalg.norm(M, 2))) + head
    witness = None
    if np.finfo(np.float64).tiny <= q and rest > 0.0:
        witness = DiscreteMeasure(R * np.stack([form.lift(u), anchor * form.lift(u)]), [q, rest])
    details = {
        "log_value": log_value,
        "gamma": gamma,
        "witness_value": down(safe_exp(whole)),
        "log_witness_value": whole,
    }
    source = "castin2024_mean_field_lower: [CAP24] section 3"
    return Bound(down(safe_exp(log_value)), "lower", source, domain=Ball(R), witness=witness, details=details)


def castin2024_large_radius(attention: AttentionMap, X: ArrayLike) -> Bound:
    r"""Limit of the local constant at ``R X`` as R grows: ``v sqrt(most rows with the same argmax)``.

    With ``m_i`` the unique argmax over j of ``<A x_i, x_j>``, row i of the attention matrix tends to the
    indicator of ``m_i`` faster than any power of R, so the Jacobian at ``R X`` tends to ``eps -> (V
    eps_{m_1}, ..., V eps_{m_n})``.

    Parameters
    ----------
    attention : SoftmaxAttention or MaskedAttention
        Of a softmax head without query bias (a bias is negligible at large R and is refused).
    X : array_like (n, d)
        Tokens at which no row has a tie for the largest logit ("generic").

    Returns
    -------
    Bound
        kind "local", at ``domain = X``; ``details["margin"]`` is the least gap of the two largest logits of
        a row.

    Raises
    ------
    ValueError
        A row has a tie, or the attention has a query bias.

    References
    ----------
    [CAP24] section 3, the large-radius regime.
    """
    form = softmax_form(attention)
    refuse_bias(form, "castin2024_large_radius")
    x = check.points(X, "X", dim=attention.in_dim)
    y = x if form.basis is None else x @ form.basis
    logits = y @ form.A.T @ y.T
    if form.causal:
        logits[np.triu_indices(len(x), 1)] = -np.inf
    top = logits.argmax(axis=1)
    count = int(np.bincount(top).max())
    margin = math.inf
    if len(x) > 1:
        two = np.sort(logits, axis=1)[:, -2:]
        margin = float((two[:, 1] - two[:, 0]).min())
    scale = form.norm_A * float((y * y).sum(axis=1).max())
    if margin <= 1e-13 * scale:
        raise ValueError(
            "X must give every row one largest logit, received a row whose two largest differ by "
            f"{margin:g}; perturb the tokens."
        )
    value = form.norm_V * math.sqrt(count)
    source = "castin2024_large_radius: [CAP24] section 3"
    return Bound(value, "local", source, domain=x, n=len(x), details={"log_value": log(value), "margin": margin})


def _absorbed(form: SoftmaxForm, R: float) -> tuple[Any, dict[str, Any]]:
    """``||A'|| R'^2`` of the bias-free attention in one more dimension (module docstring), r optimised."""
    if form.c is None:
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


def _rate(form: SoftmaxForm, R: float) -> tuple[float, Array, float, float]:
    """gamma, its unit eigenvector u, the heavy atom's place in units of the light one's, and a factor.

    The logits of multiples of u depend on ``<A u, u>`` only, so that is what gamma is made of; the computed
    u has ``A u = <A u, u> u + delta``, which changes ``I + s u u^T`` by at most ``2 R^2 |delta|``: hence
    the factor.
    """
    refuse_bias(form, "the lower bounds of [CAP24]")
    values, vectors = np.linalg.eig(form.A)
    real = np.abs(values.imag) <= 1e-10 * float(np.abs(values).max(initial=0.0))
    best: tuple[float, Array, float] | None = None
    for vec in vectors.T[real]:
        u = vec.real if np.linalg.norm(vec.real) >= np.linalg.norm(vec.imag) else vec.imag
        u = u / np.linalg.norm(u)
        rayleigh = float(u @ form.A @ u)
        for rate, anchor in ((-rayleigh, -1.0), (rayleigh / 8.0, 0.5)):
            if best is None or rate > best[0]:
                best = (rate, u, anchor)
    if best is None:
        raise ValueError(
            "A must have a real eigenvalue for the lower bounds of [CAP24], received none; "
            "lipschitz_lower_bound has witnesses for every A."
        )
    gamma, u, anchor = best
    # a complement of the reduced span only adds eigenvalues 0, and gamma >= 0 as it is
    residual = float(np.linalg.norm(form.A @ u - (u @ form.A @ u) * u))
    return max(gamma, 0.0), u, anchor, max(0.0, 1.0 - 2.0 * R * R * residual)
