r"""Estimate 1, the size of the field: ``sup |Gamma_mu(x)|`` over points and measures of a domain, with its proof."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from otattn._linalg import EPS, norm_upper
from otattn.attention import (
    AttentionMap,
    ExponentialAttention,
    MaskedAttention,
    MultiHeadAttention,
    PointwiseAttention,
    SigmoidAttention,
)
from otattn.attention.head import Arithmetic, Head
from otattn.lipschitz.arithmetic.balls import arithmetic_of
from otattn.lipschitz.arithmetic.intervals import like
from otattn.lipschitz.arithmetic.rounding import log, log_sum, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import Region, Seen, see
from otattn.lipschitz.hypotheses import single_heads
from otattn.lipschitz.regularity.heads import bound_of_heads, parts
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.lipschitz.upper.unnormalised import scalars
from otattn.measures.domains import Domain


def averaging_heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Heads that average affine values with weights of mass at most one, or unnormalised ones."""
    for head, _ in single_heads(attention):
        terms = head.values() if isinstance(head, AttentionMap) else None
        if isinstance(head, PointwiseAttention) or (terms and len(terms) == 1 and terms[0].mass != "any"):
            continue
        return f"attention must be built of heads that average their values, received {type(head).__name__}"
    return None


@theorem(
    "value_bound",
    statement="max |V y + b|; sup |h| max |V y| for unnormalised heads",
    hypotheses="heads that average affine values, or unnormalised ones, masked or not; any domain, n and p",
    applies=averaging_heads,
    quantity="value",
)
def value_bound(attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    r"""``sup |Gamma_mu(x)|``: at most ``max |V y + b|`` over the domain for weights of mass at most one.

    On the ball ``||V|| R`` without a value bias, attained at ``mu = delta_y``. So a flow of such a map stays in the ball of
    radius ``R e^{t ||V||}``. Sigmoid attention has the factor ``1 / (1 + e^{-a}) < 1``, ``a = max |x| max |A x|``, though
    nothing normalises it; linear and ReLU attention have ``a`` (of degree 3 in R: their flows may leave every ball in
    finite time), exponential attention ``e^a``.

    Proof. ``Gamma_mu(x) - b`` is an average of values ``V y`` with weights of mass m <= 1, so ``Gamma_mu(x)`` or, for m < 1,
    its value part lies in the convex hull of the ``V y + b`` and 0. Unnormalised: ``|int h V y dmu| <= sup |h| max |V y|``
    with ``|<A x, y>| <= a``. Several heads are combined as in :func:`otattn.lipschitz.regularity.heads.bound_of_heads`, and
    the norm of the sum of their biases is added.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> value_bound(SoftmaxAttention([[5.0]], [[3.0]], value_bias=[1.0]), radius=2.0).value
    7.000...
    """
    heads = parts(attention, exact=exact)
    bias = getattr(heads[0].map, "value_bias", None)
    if len(heads) == 1 and heads[0].output is None and bias is not None:
        offset = heads[0].arithmetic.matrix(bias)
        return outward(log(_largest(heads[0], Region.of(domain, exact=exact), offset)), "value_bound", domain, n, p, {})
    found = bound_of_heads("value_bound", _size, attention, domain, n, p, exact)
    moved = _bias_norm(attention, exact)
    if top(moved) == 0.0:
        return found
    return outward(log_sum(like(found.log_value, moved), log(moved)), "value_bound", domain, n, p, found.details)


def _size(head: Head, region: Region, seen: Seen | None) -> Any:
    """The logarithm for a head with its values, without biases."""
    size = log(_largest(head, region, None))
    if not isinstance(head.map, PointwiseAttention):
        return size
    _, a, _ = scalars(head, region)
    if isinstance(head.map, ExponentialAttention):
        return a + size
    if isinstance(head.map, SigmoidAttention):
        return size - np.log1p(np.exp(-a))
    return log(a) + size


def _largest(head: Head, region: Region, offset: Any) -> Any:
    """``max |V y + offset|`` over the region."""
    c = head.arithmetic.matrix(np.zeros(len(head.V))) if offset is None else offset
    affine = replace(head, A=head.V, c=c, H=None, factors=None, basis=None, shift=0.0)
    return see(affine, region).G


def _bias_norm(attention: AttentionMap, exact: bool) -> Any:
    """The norm of the sum of all biases behind their outputs, rounded outward."""
    arithmetic = arithmetic_of(exact)
    vector = _bias(attention, arithmetic)
    if vector is None:
        return 0.0
    if any(term.mass == "at most one" and term.bias is not None for term in attention.values() or ()):
        return up(
            norm_upper(_bias(attention, arithmetic, np.abs))
        )  # shares of the biases, whose signs no longer cancel
    size = norm_upper(vector)
    if exact:
        return size
    steps = sum(head.outer.shape[1] + 2 for head in parts(attention, exact=False)) + 8
    lost = 2.0 * steps * EPS * float(np.linalg.norm(_bias(attention, arithmetic, np.abs)))
    return up(float(size) + lost)


def _bias(attention: Any, arithmetic: Arithmetic, of: Any = np.asarray) -> Any:
    """The sum itself; ``of`` is taken of every array before, so ``np.abs`` bounds the sums that rounding sees."""
    if isinstance(attention, MaskedAttention):
        return _bias(attention.attention, arithmetic, of)
    if not isinstance(attention, MultiHeadAttention):
        own = getattr(attention, "value_bias", None)
        return None if own is None else arithmetic.matrix(of(own))
    terms = [_bias(head, arithmetic, of) for head in attention.heads]
    outputs = attention.outputs or (None,) * len(terms)
    terms = [b if b is None or W is None else arithmetic.matrix(of(W)) @ b for b, W in zip(terms, outputs, strict=True)]
    terms += [] if attention.output_bias is None else [arithmetic.matrix(of(attention.output_bias))]
    present = [b for b in terms if b is not None]
    return sum(present[1:], present[0]) if present else None
