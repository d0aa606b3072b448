r"""Whole blocks and networks on a domain: what each part does to the tokens' region, and the product of the parts' constants.

**What is bounded.** For a map ``F(mu) = (Gamma_mu)_# mu``, an order p and a domain K, let ``L(F; K)`` be the least number with

.. math:: \|\Gamma_\mu(x) - \Gamma_\nu(y)\|_{L^p(\pi)} \le L\, \|x - y\|_{L^p(\pi)}

for all measures mu, nu on K (with n equal atoms, where n is given) and all couplings pi of them (couplings that move equal
masses of single tokens, that is permutations, for n tokens; couplings that keep the times, for causal maps). The image of pi
is a coupling of ``F mu`` and ``F nu``, so with an optimal pi L is at least the Lipschitz constant of F in ``W_p``.

**Rules.** Let ``F_1`` take measures on K to measures on K'.

1. ``L(F_2 o F_1; K) <= L(F_2; K') L(F_1; K)``: the image of pi under ``F_1`` is a coupling of measures on K'. For n tokens a
   permutation stays one, and a coupling that keeps times does.
2. ``L(id + s Gamma; K) <= 1 + |s| L(Gamma; K)``: the triangle inequality in ``L^p(pi)``.
3. ``L(b + sum_h W_h Gamma^h; K) <= sum_h ||W_h|| L(Gamma^h; K)``: the same.
4. A token-wise map phi has ``L <= sup ||D phi||`` over the convex hull of K, for every p: ``|phi(x) - phi(y)| <= sup |x - y|``
   point by point (the mean value inequality along segments).
5. Attention: every theorem of our own bounds the norm of the derivative of ``mu -> Gamma_mu`` on ``L^p`` along the straight
   path ``(1-t) x + t y`` of a coupling (see :mod:`otattn.lipschitz`), whose integral is the left side above: it bounds L, not
   only the constant in W_p. Published theorems, whose proofs may be about ``W_p`` alone, are left out.

**Token-wise maps**: :mod:`otattn.lipschitz.constants.token_maps`.

**Images.** Attention with normalised kernels gives averages of its values: ``||V|| R + |b_V|`` a head (those of a sink are zero,
gates are at most one), through its output matrix. A residual connection gives the ball of radius ``R + |s| R_out``.

Such products say little of a network at its tokens (:mod:`otattn.lipschitz.local.depth`): they hold everywhere in the domain, at
the worst tokens of each part at once, and no token is at the worst place of two parts. Constants of ``10^264`` for ordinary
networks are known from the literature; they are carried as logarithms here.

References
----------
otattn, whole blocks. Newhouse et al., "Training transformers with enforced Lipschitz constants", 2025 (constants of unconstrained
networks by products).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from otattn.attention import (
    MLP,
    Compose,
    FeedForward,
    GatedAttention,
    L2Attention,
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    Residual,
    RotaryAttention,
    ScoreAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.lipschitz.arithmetic.intervals import is_interval
from otattn.lipschitz.arithmetic.rounding import is_zero, log, log_sum, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import largest_norm
from otattn.lipschitz.constants.scores import ScoreNumbers
from otattn.lipschitz.constants.token_maps import SLOPES, Setting, radius_of, token_map
from otattn.lipschitz.theorem import THEOREMS, Theorem, theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Ball, Domain

__all__ = ["best_own", "own_theorems", "reach", "whole_block"]

KEY = "whole_block"
WIDE = 64
_NORMALISED = (SoftmaxAttention, L2Attention, RotaryAttention, SinkhornAttention, ScoreAttention)
_TOKENWISE = (LayerNorm, MLP, FeedForward)
_ATTENTION = (
    SoftmaxAttention,
    L2Attention,
    RotaryAttention,
    ScoreAttention,
    MaskedAttention,
    GatedAttention,
    MultiHeadAttention,
)


def _composite(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The map is no attention alone, and each part of it has a rule."""
    if not isinstance(attention, (Compose, Residual, *_TOKENWISE)):
        return f"attention must be a composition, a residual or a token-wise map, received {type(attention).__name__}"
    return _unknown(attention, n, p)


def _unknown(part: Any, n: int | None, p: float) -> str | None:
    """Why some part has no rule."""
    if isinstance(part, Compose):
        return next((why for m in part.maps if (why := _unknown(m, n, p)) is not None), None)
    if isinstance(part, Residual):
        return _unknown(part.map, n, p)
    if isinstance(part, _TOKENWISE):
        known = getattr(part, "activation", "identity") in SLOPES
        return None if known else f"the slopes of {getattr(part, 'activation', None)!r} are not known"
    if not isinstance(part, _ATTENTION) or not _normalised(part):
        return f"no rule for {type(part).__name__} inside a block"
    if own_theorems(part, Ball(1.0), n, p):
        return None
    if isinstance(part, MultiHeadAttention):
        return next((why for head in part.heads if (why := _unknown(head, n, p)) is not None), None)
    return f"no theorem of ours bounds {type(part).__name__} for p = {p:g} and {'any measure' if n is None else 'n tokens'}"


def _normalised(part: Any) -> bool:
    if isinstance(part, MaskedAttention):
        return _normalised(part.attention)
    if isinstance(part, GatedAttention):
        return _normalised(part.map)
    if isinstance(part, MultiHeadAttention):
        return all(_normalised(h) for h in part.heads)
    return isinstance(part, _NORMALISED)


def own_theorems(part: Any, domain: Domain, n: int | None, p: float) -> list[tuple[Theorem, int | None]]:
    """Closed forms of our own that apply, each with its number of tokens (a bound for any measure is one for n).

    In many dimensions these take seconds each: where a theorem has a form for n tokens, that one alone is asked.
    """
    out: list[tuple[Theorem, int | None]] = []
    wide = (part.in_dim or 0) > WIDE
    for record in THEOREMS.values():
        ours = record.closed and record.kind == "upper" and record.quantity == "lipschitz" and not record.published
        for count in dict.fromkeys((n, None)) if ours and record.key != KEY else ():
            if wide and out and out[-1][0] is record:
                continue
            if record.reason(part, domain, count, p) is None:
                out.append((record, count))
    return out


@dataclass(frozen=True, eq=False)
class _Found:
    """The logarithm of a part's constant, where its tokens go, and the records of what it is made of."""

    log: Any
    domain: Domain
    rows: tuple[dict[str, Any], ...]


@theorem(
    KEY,
    statement="the product of the parts' constants, 1 + L for a residual connection, each on the region that reaches it",
    hypotheses="compositions, residual connections, blocks, LayerNorm, RMSNorm, MLP; any domain, n and p of the attention's theorems",
    applies=_composite,
    measures=True,
)
def whole_block(attention: Any, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    """A composition, residual connection, transformer block or token-wise map on a domain: the product of its parts' constants.

    ``details["budget"]`` has one record a part: its constant (``log10``), the radius of the tokens before and after it, and
    the theorem that gave it.

    Examples
    --------
    >>> from otattn.attention import MLP
    >>> half = MLP([[1.0]], [0.0], [[0.5]], activation="relu")
    >>> whole_block(Compose(Residual(half), Residual(half)), radius=1.0).value   # 1.5 * 1.5
    2.25...

    References
    ----------
    otattn, whole blocks.
    """
    found = _part(attention, domain, Setting(n, p, exact), "")
    return outward(found.log, KEY, domain, n, p, {"budget": found.rows})


def _part(part: Any, domain: Domain, s: Setting, where: str) -> _Found:
    if isinstance(part, Compose):
        return _compose(part, domain, s, where)
    if isinstance(part, Residual):
        return _residual(part, domain, s, where)
    R = largest_norm(domain, exact=s.exact)
    if isinstance(part, _TOKENWISE):
        value, image = token_map(part, domain, R, s)
        return _leaf(log(up(value)), image, part, R, KEY, where)
    return _attention(part, domain, R, s, where)


def _leaf(value: Any, image: Domain, part: Any, R: Any, key: str, where: str) -> _Found:
    row = {
        "part": f"{where}{type(part).__name__}",
        "log10": top(value) / math.log(10.0),
        "radius_before": top(R),
        "radius_after": float(top(largest_norm(image))),
        "theorem": key,
    }
    return _Found(value, image, (row,))


def _compose(part: Compose, domain: Domain, s: Setting, where: str) -> _Found:
    logs: list[Any] = []
    rows: tuple[dict[str, Any], ...] = ()
    for i, m in enumerate(part.maps):
        found = _part(m, domain, s, f"{where}{i}.")
        logs.append(found.log)
        rows, domain = rows + found.rows, found.domain
    return _Found(_total(logs), domain, rows)


def _total(logs: list[Any]) -> Any:
    """The sum of logarithms, rounded outward; a part that is constant makes the whole constant."""
    if any(top(x) == -math.inf for x in logs):
        return -math.inf
    total = sum(logs[1:], logs[0])
    if is_interval(total) or not math.isfinite(total):
        return total
    return total + 4e-16 * len(logs) * sum(abs(x) for x in logs)


def _residual(part: Residual, domain: Domain, s: Setting, where: str) -> _Found:
    inner = _part(part.map, domain, s, f"{where}residual.")
    scale = s.number(abs(part.scale))
    if is_zero(scale) or top(inner.log) == -math.inf:
        value = s.number(0.0)
    else:
        value = log_sum(s.number(0.0), log(scale) + inner.log)
    R = largest_norm(domain, exact=s.exact)
    reach = R + product(scale, largest_norm(inner.domain, exact=s.exact))
    return _Found(value, Ball(radius_of(reach)), inner.rows)


def best_own(part: Any, domain: Domain, s: Setting) -> tuple[float, str]:
    """The least logarithm that a closed form of ours proves for an attention map, and its key; inf when there is none."""
    candidates = [
        (record.evaluate(part, domain, n, s.p, s.exact).log_value, record.key)
        for record, n in own_theorems(part, domain, s.n, s.p)
        if record.rigorous or not s.exact
    ]
    return min(candidates, default=(math.inf, ""))


def _attention(part: Any, domain: Domain, R: Any, s: Setting, where: str) -> _Found:
    best = best_own(part, domain, s)
    if isinstance(part, MultiHeadAttention) and not best[1]:
        best = min(best, (top(_sum_of_heads(part, domain, R, s, where)), KEY))
    return _leaf(s.number(best[0]), Ball(radius_of(reach(part, R, s))), part, R, best[1], where)


def _sum_of_heads(part: MultiHeadAttention, domain: Domain, R: Any, s: Setting, where: str) -> Any:
    terms = []
    for h, head in enumerate(part.heads):
        w = s.number(1.0) if part.outputs is None else s.norm(part.outputs[h])
        one = _attention(head, domain, R, s, where).log
        if not is_zero(w) and top(one) > -math.inf:
            terms.append(log(up(w)) + one)
    return log_sum(*terms) if terms else -math.inf


def reach(part: Any, R: Any, s: Setting) -> Any:
    """The largest norm of a value: an average of ``V y + b_V``, less with a sink or a gate; None where it is not known."""
    if isinstance(part, MaskedAttention):
        return reach(part.attention, R, s)
    if isinstance(part, GatedAttention):
        return reach(part.map, R, s)
    if isinstance(part, MultiHeadAttention):
        total = s.length(part.output_bias)
        for h, head in enumerate(part.heads):
            w = 1.0 if part.outputs is None else s.norm(part.outputs[h])
            one = reach(head, R, s)
            if one is None:
                return None
            total = total + product(w, one)
        return total
    if isinstance(part, ScoreAttention):
        return ScoreNumbers(part, Ball(radius_of(R)), s.exact).reach
    if not isinstance(part, _NORMALISED):
        return None
    return product(s.norm(part.V), R) + s.length(getattr(part, "value_bias", None))
