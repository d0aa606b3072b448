"""All closed-form bounds of one attention map side by side, and where the mean-field one takes over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from otattn import _validate as check
from otattn._progress import watched
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.rounding import log, safe_exp
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.constants.regions import largest_norm, see
from otattn.lipschitz.theorem import THEOREMS, Theorem, check_count, domain_of, prove, read_all
from otattn.lipschitz.upper import published
from otattn.lipschitz.upper.softmax import bound_of, bounds_of
from otattn.measures.domains import Ball, Domain


@dataclass(frozen=True, eq=False)
class BoundTable(Result, Sequence[Bound]):
    """Bounds of one constant side by side: upper ones, smallest first, then lower ones, largest first."""

    bounds: tuple[Bound, ...]

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, index: Any) -> Any:
        return self.bounds[index]

    def rows(self) -> list[dict[str, Any]]:
        """One record a bound."""
        return [row for bound in self.bounds for row in bound.rows()]


def table(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
    progress: bool = False,
) -> BoundTable:
    """Every closed-form bound that applies: upper ones, smallest first, then lower ones, largest first.

    Parameters
    ----------
    attention : softmax, L2, unnormalised or multi-head attention, masked or not
        Other kinds have no closed-form bound here and give an empty table.
    radius, domain, n, p
        As for :func:`otattn.lipschitz_upper_bound`. The published bounds use the largest norm of a domain; bounds for any
        measure apply to n tokens too and are listed with ``n = None``.
    progress : bool
        Show a bar on the error stream.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> for bound in table(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0, n=1)[:2]:
    ...     print(bound)
    Bound(upper 1, p=2, n=1, row_bound)
    Bound(upper 1, p=2, n=1, column_bound)
    """
    region, count, order = domain_of(attention, radius, domain), check_count(n), check.check_order(p)
    read_all()
    found: list[Bound] = []
    records = [record for record in THEOREMS.values() if record.closed and record.quantity == "lipschitz"]
    for record in watched(records, "bounds", progress=progress, note=lambda record: record.key, unit="theorem"):
        found += closed_bounds(record, attention, region, count, order)
    uppers = sorted((b for b in found if b.kind == "upper"), key=lambda b: b.log_value)
    lowers = sorted((b for b in found if b.kind == "lower"), key=lambda b: -b.log_value)
    return BoundTable((*uppers, *lowers))


def closed_bounds(record: Theorem, attention: AttentionMap, region: Domain, n: int | None, p: float) -> list[Bound]:
    """What a theorem says of n tokens, and of any measure where that is another bound for n tokens too."""
    # the published theorems are about balls; what holds on all of R^d holds here
    ball = _ball(region) if record.published else region
    out = []
    for domain in (ball, None):
        if record.reason(attention, domain, n, p) is None:
            out.append(prove(record.key, attention, domain, n, p))
            break
    if n is not None and (n > 1 or not out) and record.measures and record.reason(attention, ball, None, p) is None:
        out.append(prove(record.key, attention, ball, None, p))
    return out


def _ball(region: Domain) -> Domain:
    """The centred ball that holds the domain; the domain itself when it is the origin."""
    size = float(largest_norm(region))
    return region if isinstance(region, Ball) or size == 0.0 else Ball(size)


@dataclass(frozen=True)
class Crossover(Result):
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

    @property
    def log10(self) -> dict[str, float]:
        """Both as powers of ten."""
        return {"published": self.log_published / math.log(10.0), "ours": self.log_ours / math.log(10.0)}


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
    form = softmax_head(attention, masked=False).on_span()
    seen = see(form, Ball(radius))

    def log_of(b: Bound) -> float:
        return float(b.log_value)

    mean = log_of(published.geshkovski2024_mean_field(attention, radius=radius))
    ours = min(log_of(b) for b in bounds_of(attention, seen, None, 2.0))
    first = _least(lambda n: log(published.castin_upper(form, radius, n)[0]), mean)
    second = _least(lambda n: bound_of("row_bound", seen, n, 2.0).log_value, ours)
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
