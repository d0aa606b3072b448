"""All closed-form bounds of one attention map side by side, and where the mean-field one takes over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from otattn import _validate as check
from otattn.attention import (
    AttentionMap,
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    RotaryAttention,
    SoftmaxAttention,
)
from otattn.attention.pointwise import PointwiseAttention
from otattn.lipschitz import published
from otattn.lipschitz.bound import Bound, stated
from otattn.lipschitz.head_bounds import head_upper_bounds, heads_of, multi_head_bound
from otattn.lipschitz.regions import Region, check_count, largest_norm, resolve_domain, see
from otattn.lipschitz.rotary_bounds import rotary_row_bound
from otattn.lipschitz.rounding import log, safe_exp
from otattn.lipschitz.setting import softmax_form
from otattn.lipschitz.theorems import row_bound_of, softmax_bounds
from otattn.measures.domains import Ball, Domain

__all__ = ["Crossover", "crossover", "table"]


def table(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
) -> list[Bound]:
    """Every closed-form bound that applies: upper ones, smallest first, then lower ones, largest first.

    Parameters
    ----------
    attention : softmax, L2, unnormalised or multi-head attention, masked or not
        Other kinds have no closed-form bound here and give an empty list.
    radius : float, optional
        Tokens in the centred ball; or ``domain`` (the published bounds then use its largest norm).
    domain : Domain, optional
    n : int, optional
        Number of tokens; the bounds for any measure apply to them too and are listed with ``n = None``.
    p : float
        In ``[1, inf]``.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> for bound in table(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0, n=1)[:2]:
    ...     print(bound)
    Bound(upper 1, p=2, n=1, otattn.bounds.column_bound: column bound)
    Bound(upper 1, p=2, n=1, otattn.bounds.row_bound: row bound)
    """
    region, count, order = (
        resolve_domain(radius, domain, attention.in_dim),
        check_count(n),
        check.check_order(p),
    )
    bounds = _ours(attention, region, count, order)
    if order == 2.0:
        bounds += _published(attention, radius if radius is not None else float(largest_norm(region)), count)
    seen: dict[tuple[str, int | None], Bound] = {}
    for b in bounds:
        seen.setdefault((b.source, b.n), stated(b, attention))
    uppers = sorted((b for b in seen.values() if b.kind == "upper"), key=_size)
    lowers = sorted((b for b in seen.values() if b.kind == "lower"), key=_size, reverse=True)
    return uppers + lowers


def _size(b: Bound) -> float:
    return float(b.details.get("log_value", b.value))


def _ours(attention: AttentionMap, domain: Domain, n: int | None, p: float) -> list[Bound]:
    inner = attention.attention if isinstance(attention, MaskedAttention) else attention
    if isinstance(inner, SoftmaxAttention | L2Attention | PointwiseAttention):
        part = heads_of(attention)[0]
        return head_upper_bounds(part.head, part.compact, Region.of(domain), n, p, causal=part.causal)
    if isinstance(inner, RotaryAttention):
        return [rotary_row_bound(inner, domain=domain, n=n)] if n is not None and p == 2.0 else []
    if isinstance(inner, MultiHeadAttention):
        try:
            return [multi_head_bound(attention, domain=domain, n=n, p=p)]
        except ValueError:
            return []  # a head of a kind, or an order, that no theorem covers
    return []


def _published(attention: AttentionMap, R: float, n: int | None) -> list[Bound]:
    calls: list[Callable[[], Bound]] = []
    if n is not None:
        calls += [
            lambda: published.castin2024_discrete(attention, radius=R, n=n),
            lambda: published.castin2024_masked(attention, radius=R, n=n),
            lambda: published.castin2024_discrete_lower(attention, radius=R, n=n),
            lambda: published.kim2021_l2(attention, n=n),
        ]
        if n >= 2:
            calls.append(lambda: published.kim2021_dot_product(attention, n=n, radius=R))
    calls.append(lambda: published.geshkovski2024_mean_field(attention, radius=R))
    if n is None:
        calls.append(lambda: published.castin2024_mean_field_lower(attention, radius=R))
    out: list[Bound] = []
    for call in calls:
        try:
            out.append(call())
        except ValueError:
            continue  # the theorem's hypotheses do not hold here
    return out


@dataclass(frozen=True)
class Crossover:
    """The least number of tokens from which a mean-field bound is at most the bound for n tokens.

    Attributes
    ----------
    published, ours : float
        That number for the published pair and for ours; inf when it exceeds the largest float.
    log_published, log_ours : float
        Their natural logarithms.
    """

    published: float
    ours: float
    log_published: float
    log_ours: float


def crossover(attention: AttentionMap, radius: float) -> Crossover:
    """Where the mean-field bound becomes the smaller one, published ([CAP24] against [GLPR23]) and ours.

    Bounds for n tokens grow like ``sqrt(n)``, the mean-field ones do not know n. Ours compares
    ``row_bound`` with the smaller of the mean-field ``column_bound`` and ``density_bound``.

    Parameters
    ----------
    attention : SoftmaxAttention
    radius : float

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> c = crossover(SoftmaxAttention([[1.0]], [[1.0]]), 1.0)
    >>> c.published > c.ours
    True
    """
    form = softmax_form(attention, masked=False)
    seen = see(form, Ball(radius))

    def log_of(b: Bound) -> float:
        return float(b.details["log_value"])

    mean = log_of(published.geshkovski2024_mean_field(attention, radius=radius))
    ours = min(log_of(b) for b in softmax_bounds(seen, None, 2.0))
    first = _least(lambda n: log(published.castin_upper(form, radius, n)[0]), mean)
    second = _least(lambda n: log_of(row_bound_of(seen, n)), ours)
    return Crossover(first[0], second[0], first[1], second[1])


def _least(log_bound: Callable[[int], float], level: float) -> tuple[float, float]:
    """The least n with ``log_bound(n) >= level``, and its logarithm; beyond 2^60 by the growth ``sqrt(n)``."""
    if not math.isfinite(level) or log_bound(1) >= level:
        return 1.0, 0.0
    high = 1 << 60
    if log_bound(high) < level:
        log_n = math.log(high) + 2.0 * (level - log_bound(high))
        return safe_exp(log_n), log_n
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if log_bound(middle) >= level else (middle, high)
    return float(high), math.log(high)
