r"""Our Lipschitz bound of unnormalised attention (sigmoid, ReLU, linear, exponential), with its proof."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from otattn import _validate as check
from otattn._linalg import spectral_norm_upper
from otattn.attention import (
    AttentionMap,
    ExponentialAttention,
    LinearAttention,
    MaskedAttention,
    ReLUAttention,
    SigmoidAttention,
)
from otattn.attention.pointwise import PointwiseAttention
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.quadratic import max_norm_product
from otattn.lipschitz.regions import check_count, resolve_domain
from otattn.lipschitz.rounding import log, log_sum, up
from otattn.lipschitz.theorems import outward
from otattn.measures.domains import Domain, Ellipsoid

__all__ = ["pointwise_bound"]

Array = NDArray[np.float64]


def pointwise_bound(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
) -> Bound:
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

    Parameters
    ----------
    attention : SigmoidAttention, ReLUAttention, LinearAttention, ExponentialAttention, or MaskedAttention
    of one radius : float, optional
        Tokens in the centred ball; or ``domain``.
    domain : Domain, optional
    n : int, optional
        Recorded only.
    p : float
        In ``[1, inf]``.

    Examples
    --------
    >>> pointwise_bound(LinearAttention([[1.0]], [[1.0]]), radius=1.0).value
    3.000...

    References
    ----------
    otattn, unnormalised bound.
    """
    head = attention.attention if isinstance(attention, MaskedAttention) else attention
    if not isinstance(head, PointwiseAttention):
        raise ValueError(
            f"attention must be unnormalised (sigmoid, ReLU, linear, exponential) for this theorem, received "
            f"{type(head).__name__}; see otattn.bounds.table for the theorems that apply to it."
        )
    region = resolve_domain(radius, domain, attention.in_dim)
    return unnormalised(head, head.V, region, check_count(n), check.check_order(p))


def unnormalised(head: PointwiseAttention, V: Array | None, domain: Domain, n: int | None, p: float) -> Bound:
    """The bound with the value matrix V in place of the head's own; None is the identity."""
    A = head.A
    values = np.eye(len(A)) if V is None else V
    R = _radius(domain)
    a = up(R * domain.max_affine_norm(A))
    if isinstance(domain, Ellipsoid) and not np.any(domain.center):
        sigma = max_norm_product(values @ domain.shape, domain.shape.T @ A)
    else:
        sigma = max_norm_product(values, A) * R * R
    log_first, log_slope = _suprema(head, a)
    value = log_sum(log(spectral_norm_upper(values)) + log_first, log(sigma) + log_slope)
    source = "otattn.bounds.pointwise_bound: unnormalised bound"
    return outward(value, source, domain, n, p, {"sigma": sigma, "a": a})


def _radius(domain: Domain) -> float:
    return up(domain.max_norm)


def _suprema(head: Any, a: float) -> tuple[float, float]:
    """Logarithms of ``sup (|h| + a |h'|)`` and ``sup |h'|`` over ``|s| <= a``."""
    if isinstance(head, LinearAttention | ReLUAttention):
        return log(2.0 * a), 0.0
    if isinstance(head, ExponentialAttention):
        return a + math.log1p(a), a
    if isinstance(head, SigmoidAttention):
        # q + a q (1 - q) in q = h(s), largest at q = (1 + a) / (2 a) or at the end of the range
        top = float(expit(a))
        q = top if a <= 1.0 else min(top, (1.0 + a) / (2.0 * a))
        return math.log(q + a * q * (1.0 - q)), math.log(0.25)
    raise ValueError(
        f"attention must be one of the four unnormalised variants, received {type(head).__name__}; "
        "bounds of |h| and |h'| are known for those."
    )
