r"""Certificates of second order: how much a map stretches the measure of given tokens, and measures near it, in W_2.

Let mu be the measure of tokens X with equal masses, and nu one of n equal atoms with ``W_2(mu, nu) <= rho``. An optimal matching
of equal atoms is a permutation, so nu is the measure of ``X + D`` with ``|D|_F = sqrt(n) W_2(mu, nu) <= r := sqrt(n) rho``
when its atoms are numbered rightly; the map does not see the numbers (masked maps do: for them the tokens are sequences,
atoms are compared place by place, and the statement is about ``|.|_F / sqrt(n)`` itself). Splitting of atoms is excluded: every
statement here is among measures of n equal atoms, as the certificate's domain says, and not about any measure near mu.

- kind "pairs": ``W_2(F mu, F nu) <= |F(X + D) - F(X)|_F / sqrt(n) <= L W_2(mu, nu)``, L the stretch of the chain
  (:mod:`~otattn.lipschitz.near.stack`) at r.
- kind "constant": ``W_2(F nu, F nu') <= L W_2(nu, nu')`` for any two such measures, L the chain's constant on the ball of
  radius s, where s = r when the optimal matching of nu with nu' is that of the numbers, and 2 r in general: on the segment
  from ``X + D`` to the matched atoms of nu' every point is within ``W_2(nu, nu') / 2 + rho <= 2 rho`` of nu or of nu' and
  then of mu. It is that of the numbers when any two tokens are at least ``2 sqrt2 r`` apart: another matching moves
  m >= 2 atoms by ``(sum |x_i - x_{pi i} + ..|^2)^{1/2} >= sqrt(m) 2 sqrt2 r - 2 r >= 2 r``, no less than the first.

Both tend to the exact local constant ``||D_X F||`` as rho -> 0, and hold for each token moved by at most rho.

What is proved: for attention alone, n d up to 2048 coordinates or one map whose Gram matrix fits, everything with rounding
counted ("proved"). Token-wise maps have margins: the suprema of the activations' derivatives are proved, but the rounding of
their values, and of LayerNorm (1e-10), is allowed for and not enclosed ("margins"). For longer stacks the norms of the partial
products are bounded by Lanczos iterations that fail with a stated probability over their random starts, under the model of
rounding of :func:`~otattn.operators.spectral_norm_bounds`, and the second derivative of the whole by its values at random pairs
of directions, with as small a probability (:mod:`otattn.lipschitz.near.composed`); other remainders are as before
("probabilistic").
``details["how"]`` says which.

``verify(rigorous=True)`` (extra ``proof``) proves every number of the first kind again in ball and interval arithmetic
(:mod:`~otattn.lipschitz.rigorous.chain`); of token-wise maps and of stacks it says that there is no such evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import pdist

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.errors import CertificateError
from otattn.lipschitz.certificate import Certificate, Statement, certify_value, dual_function, problem_function
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.containment import NearMeasure
from otattn.lipschitz.hypotheses import every, order_two
from otattn.lipschitz.near.build import chain_at, why_not
from otattn.lipschitz.near.stack import Chain
from otattn.lipschitz.rigorous.chain import ProvedChain, proved_chain, why_not_proved
from otattn.lipschitz.theorem import theorem
from otattn.measures import as_discrete

__all__ = ["certified_constants", "certified_radius", "certify"]

Kind = Literal["pairs", "constant"]
_NAMES = {"pairs": "second_order/pairs", "constant": "second_order"}


def certify(map: AttentionMap, tokens: ArrayLike, *, radius: float, p: float = 2, kind: Kind = "pairs") -> Certificate:
    r"""A certified Lipschitz constant of a map, or of a stack of maps, in the W_2 ball around the measure of given tokens.

    Parameters
    ----------
    map : AttentionMap
        Softmax or rotary heads, or heads with composed logits (:class:`~otattn.attention.ScoreAttention`), one or several, masked
        or not; LayerNorm, RMSNorm, MLP, FeedForward, experts; Residual, Sum, Compose, TransformerBlock and ``model.map()`` of
        these, one in the other.
    tokens : array_like (n, d)
        Equal masses. For masked and rotary maps a sequence.
    radius : float
        Of the ball in W_2, ``|D|_F / sqrt(n)``. It holds the configurations whose tokens move by at most ``radius`` each.
    p : float
        2.
    kind : {"pairs", "constant"}
        "pairs": ``W_2(F mu, F nu) <= L W_2(mu, nu)``, mu the tokens' measure, for every nu of n equal atoms in the ball.
        "constant": for any two measures of n equal atoms in the ball. Neither says anything of measures in which atoms split.

    Returns
    -------
    Certificate
        ``value`` is L, ``domain`` the ball, ``quantity`` "pairs" or "lipschitz". ``details`` hold ``norm`` (upper bound of the norm
        of the Jacobian at the tokens), ``how`` ("proved", "margins" or "probabilistic"), and what the remainder is made of: the stage
        ``worst_stage`` with the largest share, ``worst_share``, and all ``shares``, those of the ``stages`` and, for longer stacks,
        ``second`` of the second derivative of the whole, ``crossed`` of second derivatives with errors of stages before, and
        ``third``, the parts of third derivatives in those of the stages. ``verify()`` computes it again from the map, the tokens and
        the radius. The value is finite only where the ball is small enough for the series; the error of the
        constant grows linearly with the radius.

    Raises
    ------
    ValueError
        Weights that differ, a negative radius, another order, a map that is not made of these parts.
    CertificateError
        The ball is too large: nothing finite is proved.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import SoftmaxAttention
    >>> attention = SoftmaxAttention(np.eye(2), np.eye(2))
    >>> bound = certify(attention, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], radius=1e-3)
    >>> bound.verify(), 1.0 < bound.value / bound.details["norm"] < 1.01
    (True, True)
    """
    statement = _statement(map, tokens, radius, p, kind)
    return _certificate(statement, _chain(statement), kind)


def certified_radius(
    map: AttentionMap, tokens: ArrayLike, *, factor: float = 2.0, kind: Kind = "pairs", tol: float = 1e-2
) -> Certificate:
    """The certificate of the largest ball in which the constant is proved to stay below ``factor`` times that at the tokens.

    Parameters
    ----------
    map : AttentionMap
        As for :func:`certify`.
    tokens : array_like (n, d)
    factor : float
        Above 1; of the upper bound of the norm of the Jacobian at the tokens (``details["norm"]``).
    kind : {"pairs", "constant"}
    tol : float
        Relative accuracy of the radius.

    Returns
    -------
    Certificate
        ``domain.radius`` is the radius, ``value`` at most ``factor * details["norm"]``.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import SoftmaxAttention
    >>> ball = certified_radius(SoftmaxAttention(np.eye(2), np.eye(2)), [[1.0, 0.0], [0.0, 1.0]])
    >>> 0.01 < ball.domain.radius < 1.0, ball.value <= 2.0 * ball.details["norm"]
    (True, True)
    """
    if not check.positive(factor, "factor") > 1.0:
        raise ValueError(f"factor must be above 1, received {factor:g}; 2 doubles the local constant.")
    check.positive(tol, "tol")
    statement = _statement(map, tokens, 0.0, 2, kind)
    chain = _chain(statement)
    limit = factor * chain.norm * (1.0 - 1e-10)
    size = max(float(np.linalg.norm(statement.domain.points, axis=1).max()), 1e-300)
    low, high = 0.0, size
    while _value(chain, statement.domain.points, high, kind, map.causal) <= limit:
        low, high = high, 16.0 * high
        if high > 1e12 * size:
            break
    else:
        ratio = 16.0
        while ratio > 1.0 + tol or low == 0.0:
            middle = high / 16.0 if low == 0.0 else math.sqrt(low * high)
            if middle < 1e-30 * size:
                break
            inside = _value(chain, statement.domain.points, middle, kind, map.causal) <= limit
            low, high = (middle, high) if inside else (low, middle)
            ratio = high / low if low > 0.0 else 16.0
    near = NearMeasure(statement.domain.points, low)
    return _certificate(Statement(map, near, statement.n, 2.0, {}), chain, kind)


def certified_constants(map: AttentionMap, tokens: ArrayLike, radii: ArrayLike, *, kind: Kind = "pairs") -> Array:
    """The values of :func:`certify` at many radii, inf where nothing is proved."""
    found = [_statement(map, tokens, float(rho), 2, kind) for rho in np.atleast_1d(np.asarray(radii, dtype=np.float64))]
    chain = _chain(found[0])
    return np.array([_value(chain, s.domain.points, s.domain.radius, kind, map.causal) for s in found])


def _statement(map: Any, tokens: Any, radius: float, p: float, kind: str) -> Statement:
    if kind not in _NAMES:
        raise ValueError(f'kind must be "pairs" or "constant", received {kind!r}.')
    if check.check_order(p) != 2.0:
        raise ValueError(f"p must be 2, received {p:g}; remainders are bounded in Frobenius norm.")
    why = (
        why_not(map)
        if isinstance(map, AttentionMap)
        else f"map must be an attention map, received {type(map).__name__}"
    )
    if why is not None:
        raise ValueError(f"map cannot be expanded: {why}.")
    mu = as_discrete(tokens)
    check.moderate(mu.points, "tokens")
    if not mu.is_uniform:
        raise ValueError(
            f"tokens must have equal weights, received weights from {mu.weights.min():g} to {mu.weights.max():g}; give an "
            "(n, d) array with tokens repeated as often as they occur."
        )
    points = check.points(mu.points, "tokens", dim=map.in_dim)
    rho = check.positive(radius, "radius", zero=True, limit=check.LARGEST)
    return Statement(map, NearMeasure(check.frozen(np.array(points)), rho), len(points), 2.0, {})


def _chain(statement: Statement) -> Chain:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return chain_at(statement.attention, statement.domain.points)


def _value(chain: Chain | ProvedChain, points: Array, radius: float, kind: str, causal: bool) -> float:
    r = math.sqrt(len(points)) * radius * (1.0 + 4.0 * EPS)
    if kind == "pairs":
        return chain.stretch(r)
    return chain.constant(r if causal or _apart(points, r) else 2.0 * r)


def _apart(points: Array, r: float) -> bool:
    """Whether any two tokens are at least ``2 sqrt2 r`` apart."""
    if len(points) < 2 or r == 0.0:
        return True
    lost = 8.0 * (points.shape[1] + 8) * EPS
    return bool(pdist(points).min() * (1.0 - lost) >= 2.8284271247461907 * r)


def _certificate(statement: Statement, chain: Chain, kind: str) -> Certificate:
    near = statement.domain
    value = _value(chain, near.points, near.radius, kind, statement.attention.causal)
    if not math.isfinite(value):
        raise CertificateError(
            f"nothing finite is proved on a ball of radius {near.radius:g}; certified_radius finds one that is small enough."
        )
    shares = _shares(chain.budget(math.sqrt(len(near.points)) * near.radius))
    stage = int(np.argmax(shares["stages"]))
    details = {"norm": chain.norm, "how": chain.how, "worst_stage": stage, "worst_share": shares["stages"][stage]}
    details["shares"] = shares
    return certify_value(_NAMES[kind], statement=statement, value=value, details=details)


def _shares(budget: dict[str, Any]) -> dict[str, Any]:
    """The parts of a budget over the whole."""
    total = budget.pop("remainder")
    scale = 1.0 / total if 0.0 < total < math.inf else 0.0
    return {k: [scale * x for x in part] if isinstance(part, list) else scale * part for k, part in budget.items()}


@problem_function("second_order", "second_order/pairs")
def _problem(statement: Statement) -> dict[str, Any]:
    near = statement.domain
    if not isinstance(near, NearMeasure) or statement.n != len(near.points) or statement.p != 2.0 or statement.options:
        raise ValueError(
            "a certificate of second order is about p = 2 and the ball around given tokens; it was altered."
        )
    fresh = _statement(statement.attention, near.points, near.radius, 2.0, "pairs")
    chain: Any = _chain(fresh)
    if statement.exact:
        chain = proved_chain(fresh.attention, near.points, chain)
    return {"chain": chain, "near": near, "causal": statement.attention.causal}


def _unproved(map: Any, domain: Any) -> str | None:
    """Why there is no rigorous evaluation; None where there is one."""
    known = isinstance(map, AttentionMap) and isinstance(domain, NearMeasure)
    return why_not_proved(map, domain.points) if known else None  # a statement that was altered is refused as any other


@dual_function("second_order", exact=_unproved)
def _constant(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    return _value(problem["chain"], problem["near"].points, problem["near"].radius, "constant", problem["causal"])


@dual_function("second_order/pairs", exact=_unproved, quantity="pairs")
def _pairs(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    return _value(problem["chain"], problem["near"].points, problem["near"].radius, "pairs", problem["causal"])


def _near(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    if not isinstance(domain, NearMeasure):
        return f"domain must be the W_2 ball around given tokens (certify), received {domain!r}"
    if n != len(domain.points):
        return f"n must be {len(domain.points)}, the number of tokens, received {n}"
    return why_not(attention)


@theorem(
    "second_order",
    statement="||J|| + C r + r^2 int (1 - s) D3(s r) ds, r = sqrt(n) radius; for stacks by norms of partial products",
    hypotheses="softmax and rotary heads, composed logits, token-wise maps, residuals, sums, compositions; n equal atoms near given "
    "tokens; p = 2",
    applies=every(order_two, _near),
    closed=False,
)
def _best(attention: AttentionMap, near: NearMeasure, n: int, p: float, effort: str) -> Certificate:
    return certify(attention, near.points, radius=near.radius, kind="constant")
