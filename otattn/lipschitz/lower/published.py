"""The published lower bounds of [CAP24] and [KPM21] (see :mod:`otattn.lipschitz.upper.published`), and the regime of large radii."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.attention.head import Head
from otattn.lipschitz.arithmetic.rounding import down, log, log_sum, safe_exp
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.hypotheses import any_measure, centred_ball, every, no_bias, order_two, softmax, tokens
from otattn.lipschitz.theorem import theorem
from otattn.measures import Ball, DiscreteMeasure, SpaceTimeMeasure

SEQUENCE_LIMIT = 4096
"""Tokens up to which the masked witness is given: it lists every one of them."""


def _real_eigenvalue(attention: AttentionMap, domain: Any, n: int | None, p: float) -> str | None:
    """A has a real eigenvalue: the witnesses lie along its eigenvector."""
    if _is_real(np.linalg.eigvals(softmax_head(attention).on_span().A)).any():
        return None
    return "A must have a real eigenvalue, received none (lipschitz_lower_bound has witnesses for every A)"


def _is_real(values: Any) -> Any:
    return np.abs(values.imag) <= 1e-10 * float(np.abs(values).max(initial=0.0))


@theorem(
    "castin2024_discrete_lower",
    statement="v sqrt(n - 1) / (1 + (n - 1) q), under a mask v (n / (1 + n q))^{1/2}, q = e^{-2 R^2 gamma}",
    hypotheses="softmax, masked or not, without a bias, A with a real eigenvalue; centred ball; n tokens; p = 2",
    applies=every(softmax(), tokens(), order_two, centred_ball, no_bias, _real_eigenvalue),
    reference="[CAP24] sections 3 and 4",
    kind="lower",
    rigorous=False,
)
def castin2024_discrete_lower(attention: AttentionMap, domain: Ball, count: int, p: float, exact: bool) -> Bound:
    r"""Lower bound for n tokens: ``v sqrt(n-1) / (1 + (n-1) q)``, under a mask ``v (n / (1 + n q))^{1/2}``.

    Here ``q = e^{-2 R^2 gamma}``, ``gamma = max(-gamma_min, gamma_max / 8)`` over the real eigenvalues of A. The theorem has ``V =
    I``, and for masked attention the same growth like ``sqrt(n)``; the factor v and the form under a mask are ours.

    The witness, with u a unit eigenvector, is ``(Ru, -Ru, ..., -Ru)`` when ``gamma = -gamma_min`` and ``(Ru, Ru/2, ..., Ru/2)``
    otherwise; under a mask it is a sequence, whose first token every row sees.

    Proof. Row i weighs the first token by ``P_i = 1 / (1 + k_i q)``, where ``k_i`` of its tokens are others: n - 1 without a mask,
    i - 1 with one. Moving the first token by e moves image i by ``P_i V (I + s_i u u^T) e`` with ``s_i = 2 R^2 gamma (1 - P_i) >=
    0``, and by ``V e`` for i = 1 under a mask. Let e = w be the top right singular vector of V: ``<V w, V u> = v^2 <w, u>``, so
    ``|V (I + s u u^T) w|^2 = v^2 + 2 s v^2 <u, w>^2 + s^2 <u, w>^2 |V u|^2 >= v^2`` for every ``s >= 0``, and the square of the
    Jacobian's norm is at least ``v^2 sum_i P_i^2``: n - 1 equal terms without a mask, and with one ``sum_{k=0}^{n-1} (1 + k q)^{-2}
    >= int_0^n (1 + x q)^{-2} dx = n / (1 + n q)``, the terms falling.

    So under a mask it does not fall again: it increases with n to ``v e^{R^2 gamma}``.

    Returns
    -------
    Bound
        kind "lower", with the witness: a measure of two atoms whose weights are multiples of 1/n. Under a mask it is the sequence,
        a SpaceTimeMeasure, up to 4096 tokens, and None beyond.

    Examples
    --------
    >>> from otattn.attention import MaskedAttention, SoftmaxAttention
    >>> head = SoftmaxAttention([[-1.0]], [[1.0]])
    >>> [round(castin2024_discrete_lower(head, radius=1.0, n=n).value, 4) for n in (2, 16, 10**6)]
    [0.8808, 1.2782, 0.0074]
    >>> [round(castin2024_discrete_lower(MaskedAttention(head), radius=1.0, n=n).value, 4) for n in (2, 16, 10**6)]
    [1.2546, 2.2483, 2.7183]
    """
    form, R = softmax_head(attention).on_span(), domain.radius
    gamma, u, anchor, factor = _rate(form, R)
    log_v, log_q = log(factor * float(np.linalg.norm(form.V, 2))), -2.0 * R * R * gamma
    light, heavy = R * form.lift(u), R * anchor * form.lift(u)
    witness: Any = None
    if form.causal:
        log_value = log_v + 0.5 * (math.log(count) - log_sum(0.0, math.log(count) + log_q))
        if count <= SEQUENCE_LIMIT:
            witness = SpaceTimeMeasure.from_sequence(np.stack([light, *[heavy] * (count - 1)]))
    else:
        # one token: the formula says 0, and so does an empty sum of moved images
        log_value = log_v + 0.5 * log(count - 1.0) - log_sum(0.0, log(count - 1.0) + log_q)
        two = count > 1
        witness = DiscreteMeasure(
            np.stack([light, heavy][: 1 + two]), [1 / count, (count - 1) / count] if two else None
        )
    return _below("castin2024_discrete_lower", log_value, domain, count, witness, {"gamma": gamma})


@theorem(
    "castin2024_mean_field_lower",
    statement="v (gamma / 2) R^2 e^{gamma R^2}",
    hypotheses="softmax without a mask and without a bias, A with a real eigenvalue; centred ball; any measure; p = 2",
    applies=every(softmax(masked=False), any_measure, order_two, centred_ball, no_bias, _real_eigenvalue),
    reference="[CAP24] section 3",
    kind="lower",
    rigorous=False,
)
def castin2024_mean_field_lower(attention: AttentionMap, domain: Ball, n: None, p: float, exact: bool) -> Bound:
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
    """
    form, R = softmax_head(attention).on_span(), domain.radius
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
    return _below("castin2024_mean_field_lower", log_value, domain, None, witness, details)


def _below(key: str, log_value: float, domain: Ball, n: int | None, witness: Any, details: dict[str, Any]) -> Bound:
    value = down(safe_exp(log_value))
    return Bound(value, "lower", "", 2.0, domain, n, witness, details, theorem=key, log_value=log_value)


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
    why = every(softmax(), no_bias)(attention, None, None, 2.0)
    if why is not None:
        raise ValueError(f"castin2024_large_radius does not apply: {why}.")
    form = softmax_head(attention).on_span()
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
    return Bound(value, "local", "[CAP24] section 3, large radius", domain=x, n=len(x), details={"margin": margin})


def _rate(form: Head, R: float) -> tuple[float, Array, float, float]:
    """gamma, its unit eigenvector u, the heavy atom's place in units of the light one's, and a factor.

    The logits of multiples of u depend on ``<A u, u>`` only, so that is what gamma is made of; the computed
    u has ``A u = <A u, u> u + delta``, which changes ``I + s u u^T`` by at most ``2 R^2 |delta|``: hence
    the factor.
    """
    values, vectors = np.linalg.eig(form.A)
    real = _is_real(values)
    best: tuple[float, Array, float] | None = None
    for vec in vectors.T[real]:
        u = vec.real if np.linalg.norm(vec.real) >= np.linalg.norm(vec.imag) else vec.imag
        u = u / np.linalg.norm(u)
        rayleigh = float(u @ form.A @ u)
        for rate, anchor in ((-rayleigh, -1.0), (rayleigh / 8.0, 0.5)):
            if best is None or rate > best[0]:
                best = (rate, u, anchor)
    assert best is not None  # a hypothesis of the theorems
    gamma, u, anchor = best
    # a complement of the reduced span only adds eigenvalues 0, and gamma >= 0 as it is
    residual = float(np.linalg.norm(form.A @ u - (u @ form.A @ u) * u))
    return max(gamma, 0.0), u, anchor, max(0.0, 1.0 - 2.0 * R * R * residual)


def _ball_or_all(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return None if domain is None else centred_ball(attention, domain, n, p)


@theorem(
    "kim2021_dot_product",
    statement="inf on R^d, about R^2 sup |V u| |A^T u| on the ball",
    hypotheses="softmax without a mask and without a bias; centred ball or all of R^d; n >= 2 tokens; p = 2",
    applies=every(softmax(masked=False), tokens(least=2), order_two, no_bias, _ball_or_all),
    reference="[KPM21] Theorem 3.1",
    kind="lower",
    rigorous=False,
    everywhere=True,
)
def kim2021_dot_product(attention: AttentionMap, domain: Ball | None, count: int, p: float, exact: bool) -> Bound:
    r"""Dot-product attention is not Lipschitz on ``R^d``: inf without a radius, at least ``c R^2`` with one.

    Put one token at 0 and the others at ``+-R u``, as evenly as n allows (n = 2: one at ``R u``; one left
    over stays at 0). The token at 0 weighs all alike, so its own block of the Jacobian is ``V/n + V C A``
    with ``C = (k/n) R^2 u u^T`` (k tokens away from 0; ``R^2 u u^T / 4`` for n = 2), which grows like ``R^2
    |V u| |A^T u|``.

    Returns
    -------
    Bound
        kind "lower", with the witness: a measure of two or three atoms whose weights are multiples of
        ``1/n``. For ``A = 0`` or ``V = 0`` the map is linear in the tokens and its constant ``||V||`` is
        returned.
    """
    form, key = softmax_head(attention).on_span(), "kim2021_dot_product"
    if not form.A.any() or not form.V.any():
        return Bound(down(float(np.linalg.norm(form.V, 2))), "lower", domain=domain, n=count, theorem=key)
    if domain is None:
        return Bound(math.inf, "lower", n=count, theorem=key)
    R = domain.radius
    candidates = np.concatenate(
        [np.linalg.svd(form.V)[2][:1], np.linalg.svd(form.A)[0].T[:1], np.linalg.svd(form.V @ form.A)[2][:1]]
    )
    balance = float(np.clip(float(np.linalg.norm(form.A, 2)) / float(np.linalg.norm(form.V, 2)), 1e-100, 1e100))
    mixed = np.linalg.eigh(balance * form.V.T @ form.V + form.A @ form.A.T / balance)[1][:, -1:]
    k = 2 * ((count - 1) // 2) if count > 2 else 1
    share = k / count if count > 2 else 0.25
    best, direction = 0.0, candidates[0]
    for u in np.concatenate([candidates, mixed.T]):
        block = form.V / count + share * R * R * np.outer(form.V @ u, form.A.T @ u)
        norm = float(np.linalg.norm(block, 2))
        if norm > best:
            best, direction = norm, u
    u = form.lift(direction)
    value = down(best)
    # equal tokens are one atom: n of them would take n rows
    places, counts = ([1.0, 0.0], [1, 1]) if count == 2 else ([1.0, -1.0, 0.0], [k // 2, k // 2, count - k])
    return Bound(
        value,
        "lower",
        domain=domain,
        n=count,
        witness=DiscreteMeasure(np.outer(R * np.array(places), u), [m / count for m in counts]),
        theorem=key,
    )
