r"""Gated attention, and several heads of any kinds, from bounds of their parts: two rules with their proofs.

**A gate.** ``x -> gamma(x) o Gamma_mu(x)``, ``gamma = sigmoid(G x + g)`` entry by entry. Moving the tokens moves the image of
x by ``gamma o dGamma + Gamma o gamma' o G eps(x)``: with ``gamma' <= 1/4`` the constant is at most ``gamma_max L + ||G||
reach / 4``, L a bound of the inner map and reach the largest norm of its values (``|diag(Gamma) w| <= max_k |Gamma_k| |w|``;
a gate with one row has ``|Gamma (G eps)| <= |Gamma| |G| |eps|``), ``gamma_max <= 1`` the largest gate, the sigmoid of ``max_k
(|G_k| R + g_k)``.

**Several heads.** ``b + sum_h W_h Gamma^h``, ``c_h`` a bound of head h with its own values: at most ``sum_h ||W_h|| c_h`` for
every p, and for ``p >= 2`` at most ``lambda_max( sum_h c_h^2 W_h W_h^T / s_h )^{1/2}`` for every s in the simplex, by
Cauchy-Schwarz as in :mod:`otattn.lipschitz.upper.multi_head`. Heads may share their keys and values (grouped queries).

Both use the derivative on ``L^p`` along the path of a coupling, which every theorem of our own bounds
(:mod:`otattn.lipschitz.upper.blocks`, rule 5).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from otattn.attention import GatedAttention, MultiHeadAttention
from otattn.attention.head import check_sizes
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import is_zero, log, log_sum, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import largest_norm
from otattn.lipschitz.constants.sum_of_heads import combine_heads
from otattn.lipschitz.constants.token_maps import Setting
from otattn.lipschitz.hypotheses import every, sum_of_heads
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.blocks import best_own, own_theorems, reach
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain

__all__ = ["gated_bound", "heads_bound"]


def _gated(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    if not isinstance(attention, GatedAttention):
        return f"attention must be GatedAttention, received {type(attention).__name__}"
    return _bounded(attention.map, domain, n, p)


def _heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    if not isinstance(attention, MultiHeadAttention):
        return f"attention must be MultiHeadAttention of any heads, received {type(attention).__name__}"
    if sum_of_heads(attention, domain, n, p) is None:
        return "heads of softmax, L2 and unnormalised attention have multi_head, which is sharper"
    return next((why for head in attention.heads if (why := _bounded(head, domain, n, p)) is not None), None)


def _bounded(part: Any, domain: Any, n: int | None, p: float) -> str | None:
    """A closed form of ours bounds the part, and its values are averages of values that are bounded."""
    if not own_theorems(part, domain, n, p):
        return f"no theorem of ours bounds {part.kind} for p = {p:g} and {'any measure' if n is None else 'n tokens'}"
    return (
        None if reach(part, 1.0, Setting(n, p, False)) is not None else f"the values of {part.kind} have no bound here"
    )


@theorem(
    "gated_bound",
    statement="gamma L + ||G|| reach / 4, L a bound of the map inside",
    hypotheses="gated attention of a map with a bound of its own; any domain; n and p of that bound",
    applies=_gated,
    measures=True,
)
def gated_bound(attention: GatedAttention, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    """``gamma_max L + ||G|| reach / 4``.

    Proof. In the docstring of this module.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> mean = SoftmaxAttention([[0.0]], [[1.0]])
    >>> round(gated_bound(GatedAttention(mean, [[4.0]]), radius=1.0, n=1).value, 3)   # sigmoid(4) + 1
    1.982

    References
    ----------
    otattn, gated attention.
    """
    check_sizes(attention)
    s = Setting(n, p, exact)
    R = largest_norm(domain, exact=exact)
    inner, _ = best_own(attention.map, domain, s)
    G, b = attention.gate, attention.gate_bias
    shifts = np.zeros(len(G)) if b is None else b
    open_ = max(top(up(product(s.length(row), R))) + float(shift) for row, shift in zip(G, shifts, strict=True))
    open_ = max(-700.0, open_ + 1e-12 * abs(open_))  # below, the gate is still at least the sigmoid of what it is
    one = lift(1.0) if exact else 1.0
    gate = up(one / (1.0 + np.exp(-one * open_)))
    lever = product(0.25, s.norm(G), reach(attention.map, R, s))
    terms = [log(gate) + s.number(inner)] if inner > -math.inf else []
    terms += [] if is_zero(lever) else [log(up(lever))]
    return outward(log_sum(*terms) if terms else -math.inf, "gated_bound", domain, n, p, {"gate": gate, "lever": lever})


@theorem(
    "heads_bound",
    statement="min_s lambda_max(sum_h c_h^2 W_h W_h^T / s_h)^{1/2}, sum_h ||W_h|| c_h for p < 2",
    hypotheses="several heads of any kinds, each with a bound of its own; any domain; n and p of those bounds",
    applies=every(_heads),
    measures=True,
)
def heads_bound(attention: MultiHeadAttention, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    """The least of ``sum_h ||W_h|| c_h`` and, for ``p >= 2``, of the joint bound at the best shares found.

    Proof. In the docstring of this module.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import ScoreAttention
    >>> averages = ScoreAttention([[0.0]], [[0.0]], [[1.0]])
    >>> both = MultiHeadAttention([averages, averages], [[[3.0], [0.0]], [[0.0], [4.0]]])
    >>> round(heads_bound(both, radius=1.0, n=1).value, 4)   # orthogonal outputs: not 3 + 4
    5.0

    References
    ----------
    otattn, several heads.
    """
    check_sizes(attention)
    s = Setting(n, p, exact)
    found = [best_own(head, domain, s)[0] for head in attention.heads]
    outputs = attention.outputs or tuple(np.eye(head.out_dim or 1) for head in attention.heads)
    sizes = [s.norm(W) for W in outputs]
    terms = [
        log(up(size)) + s.number(c) for size, c in zip(sizes, found, strict=True) if not is_zero(size) and c > -math.inf
    ]
    value = log_sum(*terms) if terms else -math.inf
    details: dict[str, Any] = {"log_head_bounds": found}
    if p >= 2.0 and len(terms) > 1 and math.isfinite(top(value)):
        joint, shares = combine_heads([s.wrap(W) for W in outputs], found)
        if top(joint) < top(value):
            value, details["shares"] = joint, [float(x) for x in shares]
    return outward(value, "heads_bound", domain, n, p, details)
