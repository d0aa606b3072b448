r"""Our Lipschitz bound of unnormalised attention (sigmoid, ReLU, linear, exponential), with its proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from otattn.attention import (
    AttentionMap,
    ExponentialAttention,
    LinearAttention,
    ReLUAttention,
    SigmoidAttention,
)
from otattn.attention.head import Head
from otattn.attention.pointwise import PointwiseAttention
from otattn.lipschitz.arithmetic.intervals import like
from otattn.lipschitz.arithmetic.rounding import least, log, log_sum, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.quadratic import max_norm_product
from otattn.lipschitz.constants.regions import Region, Seen, largest_norm, see
from otattn.lipschitz.constants.sum_of_heads import head_bounds, parts_of
from otattn.lipschitz.hypotheses import unnormalised_map
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain, Ellipsoid


@theorem(
    "pointwise_bound",
    statement="v sup(|h| + a |h'|) + sigma sup |h'|",
    hypotheses="unnormalised, masked or not; any domain, n and p",
    applies=unnormalised_map,
)
def pointwise_bound(attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    r"""``v sup (|h(s)| + a |h'(s)|) + sigma sup |h'(s)|`` over ``|s| <= a``, for every p and every measure.

    ``Gamma(x) = V int h(<A x, y>) y dmu(y)``, ``R = max |x|`` (from the origin: this map sees translations),
    ``a = R max |A x|``, ``sigma = R^2 max_{|u|=1} |V u| |A^T u|`` (the largest ``||V M A||`` over second
    moments M).

    Proof. Moving the tokens by eps moves the image of x by ``V int (h I + h' y g^T) eps(y) dmu(y)
    + V (int h' y y^T dmu) A eps(x)`` with ``g = A x``. The first kernel has norm at most ``|h| + |h'| |y|
    |g|`` for every pair, so its integral maps ``L^p(mu)`` to ``L^p(mu)`` with that constant, mu having mass
    1. The matrices ``int h' y y^T dmu`` lie in the convex hull of ``+- sup|h'| R^2 u u^T``. Under a mask a
    row integrates over part of mu. ReLU is Lipschitz and has this derivative almost everywhere along every
    path.

    Examples
    --------
    >>> pointwise_bound(LinearAttention([[1.0]], [[1.0]]), radius=1.0).value
    3.000...
    """
    (head,) = parts_of(attention, exact=exact)
    return _of_head(head, Region.of(domain, exact=exact), n, p)


@head_bounds.register(PointwiseAttention)
def _(
    map: PointwiseAttention, head: Head, region: Region, counts: Sequence[int | None], p: float, seen: Any = None
) -> list[Bound]:
    return [_of_head(head, region, counts[0], p)]


def _of_head(head: Head, region: Region, n: int | None, p: float) -> Bound:
    seen, a, sigma = scalars(head, region)
    log_first, log_slope = suprema(head.map, a)
    value = log_sum(log(seen.v) + log_first, log(sigma) + log_slope)
    return outward(value, "pointwise_bound", region.domain, n, p, {"sigma": sigma, "a": a})


def scalars(head: Head, region: Region) -> tuple[Seen, Any, Any]:
    """The head on the region, ``a = max |x| max |A x|``, and ``sup ||V M A||`` over second moments M."""
    R = largest_norm(region.domain, exact=region.exact)
    # the largest |A x| is the gradient bound of a softmax head without bias
    seen = see(head, region)
    sigma = product(max_norm_product(head.V, head.A), R, R)
    if isinstance(region.domain, Ellipsoid) and not np.any(region.domain.center):
        sigma = least(sigma, seen.sigma)
    return seen, up(product(R, seen.G)), sigma


def suprema(head: Any, a: Any) -> tuple[Any, Any]:
    """Logarithms of ``sup (|h| + a |h'|)`` and ``sup |h'|`` over ``|s| <= a``."""
    if isinstance(head, LinearAttention | ReLUAttention):
        return log(2.0 * a), 0.0
    if isinstance(head, ExponentialAttention):
        return a + np.log1p(a), a
    if isinstance(head, SigmoidAttention):
        number: Any = like(1.0, a)
        # q + a q (1 - q) in q = h(s), largest at q = (1 + a) / (2 a), or at the end of the range
        end = number / (1.0 + np.exp(-a))
        inner = 0.25 * (np.square(1.0 + a) / np.maximum(a, 1e-300))
        at_end = end + a * end * (1.0 - end)
        largest = at_end if top(a) <= 1.0 else np.where((a > 1.0) & (end * (2.0 * a) > 1.0 + a), inner, at_end)
        return log(largest), np.log(0.25 * number)
    raise ValueError(
        f"attention must be one of the four unnormalised variants, received {type(head).__name__}; "
        "bounds of |h| and |h'| are known for those."
    )
