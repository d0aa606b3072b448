r"""Bounds of one head of any kind, and of several heads together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from otattn import _validate as check
from otattn.attention import AttentionMap, SoftmaxAttention
from otattn.attention.head import Head
from otattn.attention.pointwise import PointwiseAttention
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import log, log_sum, top
from otattn.lipschitz.bound import Bound, prove
from otattn.lipschitz.catalogue import theorem
from otattn.lipschitz.constants.regions import Region, Seen, check_count, resolve_domain, see
from otattn.lipschitz.constants.sum_of_heads import combine_heads, head_bounds, parts_of
from otattn.lipschitz.hypotheses import every, several_heads, single_heads, sum_of_heads
from otattn.lipschitz.upper.masked import masked_softmax_bounds
from otattn.lipschitz.upper.softmax import outward, softmax_bounds
from otattn.measures.domains import Ball, Domain

__all__ = ["multi_head_bound"]


@head_bounds.register(SoftmaxAttention)
def _(
    map: SoftmaxAttention, head: Head, region: Region, counts: Sequence[int | None], p: float, seen: Seen | None = None
) -> list[Bound]:
    if seen is None:
        seen = see(head.on_span(ball=isinstance(region.domain, Ball)), region)
    bounds = masked_softmax_bounds if head.causal else softmax_bounds
    return [b for n in counts for b in bounds(seen, n, p)]


def multi_head_bound(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
) -> Bound:
    r"""Several heads: ``min_s lambda_max( sum_h c_h^2 U_h U_h^T / s_h )^{1/2}``, s in the simplex.

    For ``p >= 2``, with ``U_h = W_h V_h`` and ``c_h`` the smallest of our bounds of head h with the identity
    for a value matrix; or with ``U_h = W_h`` and ``c_h`` the bound of head h as it is. The plain sum of the
    heads' bounds (with values ``W_h V_h``) is the third candidate, and the only one for ``p < 2``.

    Proof. With ``y_h`` the derivative of that head, for every s in the simplex
    ``|sum_h U_h y_h| <= || [c_h U_h / sqrt(s_h)]_h || ( sum_h s_h |y_h|^2 / c_h^2 )^{1/2}`` pointwise; the
    root's ``L^p`` norm is at most ``(sum_h s_h ||y_h||_p^2 / c_h^2)^{1/2} <= 1`` times that of eps, by the
    triangle inequality of ``L^{p/2}``. Every s certifies; the search below lowers a convex function.

    Parameters
    ----------
    attention : MultiHeadAttention of softmax, L2 or unnormalised heads, or MaskedAttention of one
    radius : float, optional
        Tokens in the centred ball; or ``domain``.
    domain : Domain, optional
    n : int, optional
        None is the mean-field constant.
    p : float
        In ``[1, inf]``.

    Returns
    -------
    Bound
        kind "upper"; ``details["log_head_bounds"]`` the ``log c_h``, ``details["shares"]`` the s found.

    Raises
    ------
    ValueError
        A head of another kind, or one for which no theorem applies (masked, mean-field, p = 1).

    References
    ----------
    otattn, multi-head bound.
    """
    region = resolve_domain(radius, domain, attention.in_dim)
    return prove("multi_head_bound", attention, region, check_count(n), check.check_order(p))


def _each_is_bounded(attention: AttentionMap, domain: Any, n: int | None, p: float) -> str | None:
    """Every head has a closed form of its own."""
    for head, causal in single_heads(attention):
        order = p > 1.0 if isinstance(head, SoftmaxAttention) else math.isinf(p)
        if causal and n is None and not order and not isinstance(head, PointwiseAttention):
            return f"no closed form bounds masked {type(head).__name__} for any measure and p = {p:g}; give n, or another p"
    return None


@theorem(
    "multi_head_bound",
    statement="min_s lambda_max(sum_h c_h^2 U_h U_h^T / s_h)^{1/2}",
    hypotheses="several softmax, L2 or unnormalised heads, each with a bound of its own; any domain",
    applies=every(several_heads, sum_of_heads, _each_is_bounded),
)
def _multi_head(attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    parts, region = parts_of(attention, exact=exact), Region.of(domain, exact=exact)
    bases = [see(part.on_span(), region) if isinstance(part.map, SoftmaxAttention) else None for part in parts]
    compact = [part.compact() for part in parts]
    errors = [error for _, error in compact]
    # for n equal atoms the bounds for any measure are bounds too
    counts = [n] if n is None or n == 1 else [n, None]

    def best(values: Sequence[Any]) -> list[float]:
        out = []
        for part, V, base in zip(parts, values, bases, strict=True):
            head, seen = part.with_values(V), None if base is None else base.with_values(V)
            out.append(min(b.log_value for b in head_bounds(part.map, head, region, counts, p, seen)))
        return out

    def total(logs: Sequence[float], lost: Sequence[float]) -> float:
        terms = [x for x in (*logs, *lost) if x > -math.inf]
        return top(log_sum(*(lift(x) for x in terms)) if exact and terms else log_sum(*(terms or [-math.inf])))

    # what rounding left out of the products W V moves the image by at most its norm times a head's bound with the identity
    identity = best([None] * len(parts))
    rounded = [log(error) + c for error, c in zip(errors, identity, strict=True)]
    logs = best([M for M, _ in compact])
    shares, combination, value = None, "sum", total(logs, rounded)
    if p >= 2.0 and len(parts) > 1 and math.isfinite(value):
        own = best([part.V for part in parts])
        outer = [log(part.output_error) + c for part, c in zip(parts, own, strict=True)]
        for name, factors, singles, lost in (
            ("identity", [part.total for part in parts], identity, rounded),
            ("outputs", [part.outer for part in parts], own, outer),
        ):
            joint, s = combine_heads(factors, singles)
            bound = total([top(joint)], lost)
            if bound < value:
                value, shares, combination, logs = bound, s, name, singles
    details: dict[str, Any] = {"log_head_bounds": logs, "combination": combination}
    if shares is not None:
        details["shares"] = [float(s) for s in shares]
    return outward(lift(value) if exact and value > -math.inf else value, "multi_head_bound", domain, n, p, details)
