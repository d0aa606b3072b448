"""Hypotheses of theorems: each a function that answers why a theorem does not apply, or None when it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from otattn.attention import (
    AttentionMap,
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    RotaryAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.attention.pointwise import PointwiseAttention
from otattn.measures.domains import Ball

Reason = Callable[[Any, Any, "int | None", float], "str | None"]
"""``(attention, domain, n, p)`` -> why the theorem does not apply, None when it does."""


def every(*reasons: Reason) -> Reason:
    """All hypotheses; the first that fails is the reason."""

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        return next((why for reason in reasons if (why := reason(attention, domain, n, p)) is not None), None)

    return applies


def order_two(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The Wasserstein distance is W_2."""
    return None if p == 2.0 else f"p must be 2, received {p:g}"


def order_between(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Reason:
    """p lies in the interval."""
    ends = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        inside = low <= p <= high and not (low_open and p == low) and not (high_open and p == high)
        return None if inside else f"p must lie in {ends}, received {p:g}"

    return applies


def tokens(least: int = 1) -> Reason:
    """A number of equal tokens is given."""

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        if n is None:
            return "n, a number of tokens, must be given; it says nothing of any measure"
        return None if n >= least else f"n must be at least {least}, received {n}"

    return applies


def any_measure(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The constant over all measures."""
    return None if n is None else f"n must be None, it is about any measure, received {n}"


def no_domain(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """All of ``R^d``."""
    return None if domain is None else f"it is about all of R^d, domain None, received {domain!r}"


def centred_ball(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The domain of the published theorems."""
    return None if isinstance(domain, Ball) else f"domain must be a centred ball, received {domain!r}"


def no_bias(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """A softmax head whose logits are ``<A x, y>`` alone."""
    head = attention.unmasked
    biases = [head.bias, None if head.factors is None else head.factors[2]]
    size = max((float(np.abs(b).max(initial=0.0)) for b in biases if b is not None), default=0.0)
    return f"it assumes no query bias, received one with entries up to {size:g}" if size > 0.0 else None


def _head(kinds: type | tuple[type, ...], name: str, masked: bool | None) -> Reason:
    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        causal = isinstance(attention, MaskedAttention)
        if isinstance(attention.attention if causal else attention, kinds) and masked in (None, causal):
            return None
        wanted = {None: f"{name}, masked or not", True: f"MaskedAttention({name})", False: f"{name} without a mask"}
        received = attention.kind if isinstance(attention, AttentionMap) else type(attention).__name__
        return f"attention must be {wanted[masked]}, received {received}"

    return applies


def softmax(masked: bool | None = None) -> Reason:
    """A softmax head; ``masked`` None accepts both kinds."""
    return _head(SoftmaxAttention, "SoftmaxAttention", masked)


def l2(masked: bool | None = None) -> Reason:
    """An L2 head."""
    return _head(L2Attention, "L2Attention", masked)


unnormalised_map: Reason = _head(PointwiseAttention, "sigmoid, ReLU, linear or exponential attention", None)
rotary: Reason = _head(RotaryAttention, "RotaryAttention", False)


def sinkhorn(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Sinkhorn attention, rows and columns of mass one both."""
    return _head(SinkhornAttention, "SinkhornAttention", False)(attention, domain, n, p) or attention.unfinished


def single_heads(attention: Any, causal: bool = False) -> Iterator[tuple[Any, bool]]:
    """The heads of a map, nested sums opened, each with whether a mask hides later tokens from it."""
    if isinstance(attention, MaskedAttention):
        yield from single_heads(attention.attention, True)
    elif isinstance(attention, MultiHeadAttention):
        for head in attention.heads:
            yield from single_heads(head, causal)
    else:
        yield attention, causal


def sum_of_heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Softmax, L2 and unnormalised heads, one or several."""
    for head, _ in single_heads(attention):
        if not isinstance(head, SoftmaxAttention | L2Attention | PointwiseAttention):
            return f"attention must be built of softmax, L2 or unnormalised heads, received {type(head).__name__}"
    return None


def several_heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """A sum of heads."""
    if isinstance(attention.unmasked, MultiHeadAttention):
        return None
    return f"attention must be MultiHeadAttention, masked or not, received {attention.kind}"


def unless(condition: Callable[[int | None, float], bool], reason: Reason) -> Reason:
    """The hypothesis, waived where ``condition(n, p)`` holds."""

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        return None if condition(n, p) else reason(attention, domain, n, p)

    return applies
