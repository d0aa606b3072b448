"""What a lower bound is sought of: a map, the domain of its tokens and their number, and what the search sees of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from otattn._linalg import Array
from otattn.attention import (
    AttentionMap,
    Compose,
    GatedAttention,
    MaskedAttention,
    MultiHeadAttention,
    PointwiseAttention,
    Residual,
    ScoreAttention,
    SinkhornAttention,
)
from otattn.attention.base import as_attention
from otattn.attention.head import Head, check_sizes
from otattn.lipschitz.lower.charts import Chart, chart_of, forms_of
from otattn.lipschitz.theorem import domain_of
from otattn.measures import Domain

Effort = Literal["fast", "deep"]


@dataclass(frozen=True, eq=False)
class Problem:
    """A map on a domain, in the coordinates of its chart.

    Attributes
    ----------
    attention : AttentionMap
    domain : Domain
    chart : Chart
    forms : tuple of Head
        The heads in the reduced coordinates of the chart. Where the map is not their sum (not ``analytic``) they only tell
        where to start.
    analytic : bool
    causal : bool
        An atom sees those before it and itself.
    n : int or None
        Number of tokens, None for any measure.
    p : {1, 2, inf}
    effort : {"fast", "deep"}
    """

    attention: AttentionMap
    domain: Domain
    chart: Chart
    forms: tuple[Head, ...]
    analytic: bool
    causal: bool
    n: int | None = None
    p: float = 2.0
    effort: Effort = "fast"

    @property
    def tokens(self) -> int:
        """The number of tokens of a problem that has one."""
        assert self.n is not None
        return self.n

    @property
    def unmasked(self) -> Problem:
        """The same without the causal mask."""
        return replace(self, causal=False)

    def queries(self, form: Head, z: Array) -> Array:
        """``g(x) = A x + bias`` at latents ``z (m, k)``: the logit of a key y is ``<g(x), y>``."""
        return np.asarray(z @ self.chart.E.T @ form.A.T + form.c)


def problem_of(
    attention: Any,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2.0,
    effort: Effort = "fast",
) -> Problem:
    """The problem of a map whose tokens lie in a ball of this radius, or in this domain.

    Raises
    ------
    TypeError, ValueError
        No attention map; radius and domain both given or both missing; a dimension that nothing tells; a domain without
        displacements.
    """
    as_attention(attention)
    region = domain_of(attention, radius, domain)
    dim = attention.in_dim if attention.in_dim is not None else region.dim
    if dim is None:
        raise ValueError(
            "the dimension of the tokens must be known, received a map and a domain that fit any; give Ball(radius, dim)."
        )
    check_sizes(attention)
    heads = forms_of(attention.unmasked)
    chart = chart_of(region, dim, heads)
    usable = tuple(f for f in _hints(attention) if f.A.shape == (dim, dim)) if heads is None else heads
    return Problem(attention, region, chart, chart.restrict(usable), heads is not None, attention.causal, n, p, effort)


def _hints(attention: AttentionMap) -> tuple[Head, ...]:
    """Bilinear forms found inside a map, to draw starts from; none for a map that is not built from attention."""
    known = forms_of(attention)
    if known is not None:
        return known
    if isinstance(attention, (PointwiseAttention, SinkhornAttention)):
        return (Head.of(attention, attention.A, attention.V),)
    if isinstance(attention, ScoreAttention):
        return (Head.of(attention, attention.scale * attention.K.T @ attention.Q, attention.V),)
    parts: tuple[AttentionMap, ...] = ()
    if isinstance(attention, MaskedAttention):
        parts = (attention.attention,)
    elif isinstance(attention, MultiHeadAttention):
        parts = attention.heads
    elif isinstance(attention, (Residual, GatedAttention)):
        parts = (attention.map,)
    elif isinstance(attention, Compose):
        parts = attention.maps
    return tuple(f for part in parts for f in _hints(part))
