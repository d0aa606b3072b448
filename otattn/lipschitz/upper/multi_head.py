r"""Several heads: one constant from one bound a head.

With ``Gamma = sum_h W_h Gamma^(h)`` and value matrices ``V_h`` let ``U_h = W_h V_h``, and let ``c_h`` bound the derivative
``y_h`` of head h with its value matrix replaced by the identity. For every s in the simplex, pointwise,

.. math:: \Bigl| \sum_h U_h y_h \Bigr| \le \Bigl\| \bigl[ c_h U_h / \sqrt{s_h} \bigr]_h \Bigr\|
          \Bigl( \sum_h s_h |y_h|^2 / c_h^2 \Bigr)^{1/2}

by Cauchy-Schwarz; the U_h act on tokens one by one. For ``p >= 2`` the root's ``L^p`` norm is at most
``(sum_h s_h ||y_h||_p^2 / c_h^2)^{1/2} <= 1`` times that of eps, by the triangle inequality of ``L^{p/2}``. So
``lambda_max( sum_h c_h^2 U_h U_h^T / s_h )^{1/2}`` bounds the sum, whatever s is; the best s is a convex problem in H variables. The
same holds with ``U_h = W_h`` and ``c_h`` a bound of head h with its own values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import AttentionMap, MaskedAttention, SoftmaxAttention
from otattn.attention.base import as_attention
from otattn.attention.head import Head, with_values
from otattn.attention.pointwise import PointwiseAttention
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import log
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants.regions import Region, Seen, see
from otattn.lipschitz.constants.sum_of_heads import combination, combine_heads, head_bounds, parts_of, total
from otattn.lipschitz.hypotheses import every, order_two, several_heads, single_heads, sum_of_heads
from otattn.lipschitz.theorem import check_count, domain_of, prove, resolve_domain, theorem
from otattn.lipschitz.upper import masked as masked  # whose theorems are registered when they are read
from otattn.lipschitz.upper.softmax import bounds_of, outward
from otattn.measures.domains import Ball, Domain


@head_bounds.register(SoftmaxAttention)
def _(
    map: SoftmaxAttention, head: Head, region: Region, counts: Sequence[int | None], p: float, seen: Seen | None = None
) -> list[Bound]:
    if seen is None:
        seen = see(head.on_span(ball=isinstance(region.domain, Ball)), region)
    whole = MaskedAttention(map) if head.causal else map
    return [b for n in counts for b in bounds_of(whole, seen, n, p)]


def multi_head(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
    head_bounds: Sequence[Bound] | None = None,
) -> Bound:
    r"""Several heads: ``min_s lambda_max( sum_h c_h^2 U_h U_h^T / s_h )^{1/2}``, s in the simplex.

    ``c_h`` are the smallest of our closed forms of each head, or the given bounds; the plain sum of the heads' closed forms (with
    values ``W_h V_h``) is a candidate too, and the only one for ``p < 2``.

    Parameters
    ----------
    attention : MultiHeadAttention of softmax, L2 or unnormalised heads, or MaskedAttention of one
    radius : float, optional
        Tokens in the centred ball; or ``domain``. Neither is needed where ``head_bounds`` say it.
    domain : Domain, optional
    n : int, optional
        None is the mean-field constant.
    p : float
        In ``[1, inf]``; 2 with ``head_bounds``.
    head_bounds : sequence of Bound (H,), optional
        Upper bounds, p = 2, for one domain and one n: of every head with the identity for its values, or of every head as it is
        (:func:`head_with_values` makes the maps). Which of the two stands in them: they are checked against the heads.

    Returns
    -------
    Bound
        ``details["log_head_bounds"]`` the ``log c_h``, ``details["shares"]`` the s found. With ``head_bounds`` a
        :class:`~otattn.lipschitz.certificate.Certificate` with the multiplier ``s`` (H,), whose ``verify`` proves the bounds of
        the heads too.

    Raises
    ------
    ValueError
        A head of another kind, or one for which no theorem applies (masked, mean-field, p = 1); head bounds that are too few, or
        that do not bound the heads on one domain.

    Examples
    --------
    >>> import numpy as np
    >>> import otattn as oa
    >>> heads = [oa.SoftmaxAttention(np.zeros((2, 2)), np.diag(v)) for v in ([3.0, 0.0], [0.0, 4.0])]
    >>> attention = oa.MultiHeadAttention(heads)
    >>> plain = [oa.bounds.column_bound(head_with_values(attention, h, None), radius=1.0, n=2) for h in (0, 1)]
    >>> round(multi_head(attention, head_bounds=plain).value, 4)  # orthogonal values: not 3 + 4
    5.0

    References
    ----------
    Our own theorem; the proof is in the docstring of this module.
    """
    as_attention(attention)
    order, count = check.check_order(p), check_count(n)
    if head_bounds is None:
        return prove("multi_head", attention, domain_of(attention, radius, domain), count, order)
    why = every(several_heads, sum_of_heads, order_two)(attention, None, None, order)
    if why is not None:
        raise ValueError(f"multi_head with head_bounds does not apply: {why}.")
    bounds = tuple(head_bounds)
    odd = next((b for b in bounds if not isinstance(b, Bound)), None)
    if odd is not None:
        raise ValueError(
            f"head_bounds must be Bounds, which say of what they are bounds, received {odd!r}; a number cannot be checked."
        )
    if not bounds or not np.isfinite([b.value for b in bounds]).all():
        raise ValueError(f"head_bounds must be finite, one a head, received {[b.value for b in bounds]}.")
    if radius is None and domain is None:
        # a bound for any measure is one for n tokens
        domain, count = bounds[0].domain, count or next((b.n for b in bounds if b.n is not None), None)
    else:
        domain = resolve_domain(radius, domain, attention.in_dim)
    statement = Statement(attention, domain, count, 2.0, {"heads": bounds})
    problem = _combination(statement)
    _, shares = combine_heads(problem["U"], problem["logs"])
    return certify(
        "multi_head_certificate",
        statement=statement,
        problem=problem,
        multipliers={"s": shares},
        solver="L-BFGS-B",
        solver_status="none",
        solver_value=math.nan,
        details={"values": problem["values"]},
    )


def head_with_values(attention: AttentionMap, h: int, V: Array | None) -> AttentionMap:
    """Head h of a sum with other values ``V (e, d)``, None for the identity; masked where the whole is."""
    head = parts_of(attention)[h]
    inner = with_values(head.map, V)
    return MaskedAttention(inner) if head.causal else inner


def _values_of(statement: Statement, heads: Sequence[Head]) -> str:
    """Whether the bounds are those of the heads with "identity" values or with their "own"; refused when neither."""
    bounds, reasons = statement.options["heads"], {}
    if len(bounds) != len(heads):
        raise ValueError(f"head_bounds must give one bound a head, received {len(bounds)} for {len(heads)} heads.")
    for name in ("identity", "own"):
        for h, (head, bound) in enumerate(zip(heads, bounds, strict=True)):
            inner = head.map if name == "own" else with_values(head.map, None)
            single = MaskedAttention(inner) if head.causal else inner
            reason = bound.covers(single, domain=statement.domain, n=statement.n, p=2.0)
            if reason is not None:
                reasons[name] = f"head_bounds[{h}]: {reason}"
                break
        else:
            return name
    raise ValueError(
        "head_bounds must bound every head with identity values, or every head as it is, for one domain and one n; "
        f"received bounds that fit neither ({reasons['identity']}; {reasons['own']})."
    )


@problem_function("multi_head_certificate")
def _problem(statement: Statement) -> dict[str, Any]:
    """The combination, of head bounds that are verified themselves."""
    for h, bound in enumerate(statement.options["heads"]):
        if not bound.verify(rigorous=statement.exact):
            raise CertificateError(f"the bound of head {h} is not proved.")
    return _combination(statement)


def _combination(statement: Statement) -> dict[str, Any]:
    """The factors ``U_h`` (in ``lost`` what rounding left out of them) and the logarithms of the bounds."""
    heads = parts_of(statement.attention, exact=statement.exact)
    values = _values_of(statement, heads)
    logs = [b.log_value for b in statement.options["heads"]]
    if values == "own":
        U, lost = [h.outer for h in heads], [h.output_error for h in heads]
    else:
        U, lost = [h.total for h in heads], [h.compact()[1] for h in heads]
    return {"U": U, "logs": logs, "lost": [log(e) + c for e, c in zip(lost, logs, strict=True)], "values": values}


@dual_function("multi_head_certificate", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    s = multiplier(multipliers, "s", (len(problem["U"]),), sign=True)
    if abs(float(s.sum()) - 1.0) > 1e-9:
        raise CertificateError(f"multiplier 's' must lie on the simplex, received a sum of {s.sum():g}.")
    joint, _ = combine_heads(problem["U"], problem["logs"], shares=s)
    return np.exp(total([joint], problem["lost"]))


def _each_is_bounded(attention: AttentionMap, domain: Any, n: int | None, p: float) -> str | None:
    """Every head has a closed form of its own."""
    for head, causal in single_heads(attention):
        order = p > 1.0 if isinstance(head, SoftmaxAttention) else math.isinf(p)
        if causal and n is None and not order and not isinstance(head, PointwiseAttention):
            return f"no closed form bounds masked {type(head).__name__} for any measure and p = {p:g}; give n, or another p"
    return None


@theorem(
    "multi_head",
    statement="min_s lambda_max(sum_h c_h^2 U_h U_h^T / s_h)^{1/2}",
    hypotheses="several softmax, L2 or unnormalised heads, each with a bound of its own; any domain",
    applies=every(several_heads, sum_of_heads, _each_is_bounded),
)
def _multi_head(attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    parts, region = parts_of(attention, exact=exact), Region.of(domain, exact=exact)
    bases = [see(part.on_span(), region) if isinstance(part.map, SoftmaxAttention) else None for part in parts]
    # for n equal atoms the bounds for any measure are bounds too
    counts = [n] if n is None or n == 1 else [n, None]

    def best(values: Sequence[Any]) -> list[float]:
        out = []
        for part, V, base in zip(parts, values, bases, strict=True):
            head, seen = part.with_values(V), None if base is None else base.with_values(V)
            out.append(min(b.log_value for b in head_bounds(part.map, head, region, counts, p, seen)))
        return out

    found = combination(parts, best, joint=p >= 2.0)
    details: dict[str, Any] = {"log_head_bounds": found.logs, "combination": found.name}
    if found.shares is not None:
        details["shares"] = [float(s) for s in found.shares]
    value: Any = lift(found.value) if exact and found.value > -math.inf else found.value
    return outward(value, "multi_head", domain, n, p, details)
