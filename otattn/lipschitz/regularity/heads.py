"""A map as a sum of heads whose field is known, Sinkhorn attention among them, and one bound from one bound a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from otattn.attention import (
    AttentionMap,
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    PointwiseAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.attention.head import Arithmetic, Head, check_sizes, heads_of
from otattn.lipschitz.arithmetic.balls import arithmetic_of
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import Region, Seen, see
from otattn.lipschitz.constants.sum_of_heads import combination
from otattn.lipschitz.hypotheses import single_heads
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain

Evaluate = Callable[[Head, Region, "Seen | None"], Any]
"""The logarithm of a bound for one head with its values and without its output."""


def known_heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Softmax, L2, Sinkhorn and unnormalised heads, one or several, masked or not."""
    for head, _ in single_heads(attention):
        if not isinstance(head, SoftmaxAttention | L2Attention | SinkhornAttention | PointwiseAttention):
            kind = head.kind if isinstance(head, AttentionMap) else type(head).__name__
            return f"attention must be built of softmax, L2, Sinkhorn or unnormalised heads, received {kind}"
        if isinstance(head, SinkhornAttention) and head.unfinished is not None:
            return head.unfinished
    return None


def parts(attention: AttentionMap, *, exact: bool) -> tuple[Head, ...]:
    """The heads whose sum the map is, its sizes checked."""
    check_sizes(attention)
    return tuple(_parts(attention, arithmetic_of(exact)))


def _parts(attention: Any, arithmetic: Arithmetic) -> Iterator[Head]:
    if isinstance(attention, MaskedAttention):
        yield from (replace(head, causal=True) for head in _parts(attention.attention, arithmetic))
    elif isinstance(attention, MultiHeadAttention):
        outputs = attention.outputs or (None,) * len(attention.heads)
        for inner, W in zip(attention.heads, outputs, strict=True):
            yield from (head.with_output(W) for head in _parts(inner, arithmetic))
    elif found := heads_of(attention, arithmetic=arithmetic):
        yield from found
    else:  # of other heads only the values are known
        A = attention.A if isinstance(attention, SinkhornAttention) else np.eye(attention.in_dim)
        yield Head.of(attention, A, attention.V, arithmetic=arithmetic)


def bound_of_heads(
    key: str, evaluate: Evaluate, attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool
) -> Bound:
    """The bound of a theorem about vectors that a sum of heads adds up, from its logarithms for the heads.

    With ``y_h`` the vector of head h with identity values, ``|y_h| <= c_h``, and ``U_h = W_h V_h``: ``|sum_h U_h y_h| <=
    lambda_max( sum_h c_h^2 U_h U_h^T / s_h )^{1/2}`` for every s in the simplex, by Cauchy-Schwarz; and the same from the heads
    with their own values (``U_h = W_h``).
    """
    heads, region = parts(attention, exact=exact), Region.of(domain, exact=exact)
    bases = [see(h.on_span(), region) if isinstance(h.map, SoftmaxAttention) else None for h in heads]

    def best(values: Sequence[Any]) -> list[float]:
        triples = zip(heads, values, bases, strict=True)
        logs = (evaluate(h.with_values(V), region, None if b is None else b.with_values(V)) for h, V, b in triples)
        return [top(one) for one in logs]

    found = combination(heads, best)
    value: Any = found.value
    details: dict[str, Any] = {} if len(heads) == 1 else {"combination": found.name}
    return outward(lift(value) if exact and value > -1e300 else value, key, domain, n, p, details)
