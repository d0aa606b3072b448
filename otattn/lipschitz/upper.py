"""The best proven upper bound of a Lipschitz constant: the least of all theorems and relaxations that apply."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from otattn import _validate as check
from otattn._linalg import spectral_norm
from otattn.attention import AttentionMap, MultiHeadAttention, SoftmaxAttention
from otattn.errors import CertificateError
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.regions import resolve_domain
from otattn.lipschitz.relaxations.heads import head_with_values, multihead
from otattn.lipschitz.relaxations.joint import joint
from otattn.lipschitz.relaxations.mean_field import mean_field
from otattn.lipschitz.relaxations.pair import pair
from otattn.lipschitz.relaxations.psd import psd
from otattn.lipschitz.table import table
from otattn.measures import Domain

__all__ = ["Effort", "lipschitz_upper_bound", "upper_bounds"]

Effort = Literal["fast", "deep"]
PAIR_DIMENSION = 24
"""The bound of two tokens decomposes thousands of matrices of twice this size."""


def upper_bounds(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
    effort: Effort = "fast",
) -> list[Bound]:
    """All proven upper bounds that apply, from small to large; the parameters are those of :func:`lipschitz_upper_bound`.

    A relaxation whose certificate cannot be repaired is left out: the closed forms need no solver.
    """
    if effort not in ("fast", "deep"):
        raise ValueError(f'effort must be "fast" or "deep", received {effort!r}.')
    region = resolve_domain(radius, domain, attention.in_dim)
    order = check.check_order(p)
    out = [b for b in table(attention, radius=radius, domain=domain, n=n, p=p) if b.kind == "upper"]
    if isinstance(attention, SoftmaxAttention):
        calls: list[Callable[[], Bound]] = []
        if _worth_it(attention, out, order):
            calls.append(lambda: mean_field(attention, region, p=order, effort=effort))
        if n is not None and order == 2.0:
            calls.append(lambda: joint(attention, region, n, effort=effort))
            calls.append(lambda: psd(attention, region, n=n, effort=effort))
            if n == 2 and attention.in_dim <= PAIR_DIMENSION:
                calls.append(lambda: pair(attention, region, effort=effort))
        out += _attempts(calls)
    elif order == 2.0 and isinstance(attention, MultiHeadAttention) and _all_softmax(attention):
        # bounds of the heads with the identity for their values: multihead checks that this is what they are
        heads = [head_with_values(attention, h, None) for h in range(len(attention.heads))]
        singles = [upper_bounds(h, radius=radius, domain=domain, n=n, p=p, effort=effort)[0] for h in heads]
        out += _attempts([lambda: multihead(attention, singles)])
    return sorted(out, key=lambda b: (b.value, float(b.details.get("log_value", 0.0))))


def _all_softmax(attention: MultiHeadAttention) -> bool:
    return all(isinstance(h, SoftmaxAttention) for h in attention.heads)


def _worth_it(attention: SoftmaxAttention, closed: list[Bound], p: float) -> bool:
    """Whether the mean-field relaxation may win: it keeps the exponential ``v e^{kappa/p}`` of the column bound."""
    best = min((float(b.details.get("log_value", math.inf)) for b in closed if b.value > 0), default=math.inf)
    exponents = [float(b.details["kappa"]) for b in closed if b.theorem == "column_bound" and "kappa" in b.details]
    v = spectral_norm(attention.V)
    if not exponents or v == 0.0 or math.isinf(best) or math.isinf(p):
        return True
    return min(exponents) / p + math.log(v) < best + 0.5


def _attempts(calls: list[Callable[[], Bound]]) -> list[Bound]:
    out = []
    for call in calls:
        try:
            bound = call()
        except (CertificateError, ValueError):
            continue  # not certified, or its hypotheses do not hold (a form that is not PSD): the others stand
        if not math.isnan(bound.value):
            out.append(bound)
    return out


def lipschitz_upper_bound(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
    method: str = "best",
    effort: Effort = "fast",
) -> Bound:
    """A proven upper bound of the W_p Lipschitz constant of ``F(mu) = (Gamma_mu)_# mu``.

    Parameters
    ----------
    attention : AttentionMap
        Softmax, L2, unnormalised, or multi-head attention of such, masked or not (masked: the conditional W_p).
    radius : float, optional
        Tokens in the centred ball of this radius; or ``domain``.
    domain : Domain, optional
    n : int, optional
        n tokens of equal weight; None for all measures on the domain (mean-field).
    p : float
        Order, in ``[1, inf]``.
    method : str
        "best" for the least of all that apply, or a part of the name of one theorem (the sources that
        :func:`otattn.bounds.table` lists), for instance "row bound".
    effort : {"fast", "deep"}
        "deep" allows branch and bound that takes tens of seconds.

    Returns
    -------
    Bound
        Kind "upper"; ``source`` names the theorem that won, ``details["candidates"]`` the number compared.

    Raises
    ------
    ValueError
        No theorem covers the map, or ``method`` names none that applies.

    Examples
    --------
    >>> import numpy as np
    >>> bound = lipschitz_upper_bound(SoftmaxAttention(np.eye(2), np.eye(2)), radius=2.0, p=np.inf)
    >>> round(bound.value, 6)   # 4 + sqrt(17), whatever n is
    8.123106
    """
    candidates = upper_bounds(attention, radius=radius, domain=domain, n=n, p=p, effort=effort)
    if method != "best":
        candidates = [b for b in candidates if method.lower() in b.source.lower()]
    if not candidates:
        raise ValueError(
            f"no upper bound {'' if method == 'best' else f'named {method!r} '}applies to {type(attention).__name__} with "
            f"n={n}, p={p:g}; otattn.bounds.table lists what does."
        )
    best = candidates[0]
    return _with_count(best, len(candidates))


def _with_count(bound: Bound, count: int) -> Bound:
    return dataclasses.replace(bound, details={**bound.details, "candidates": count})
