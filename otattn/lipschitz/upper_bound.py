"""The best proven upper bound of a Lipschitz constant: the least of all theorems and relaxations that apply."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from otattn import _validate as check
from otattn._linalg import spectral_norm
from otattn.attention import AttentionMap, SoftmaxAttention
from otattn.attention.base import as_attention
from otattn.errors import CertificateError
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.catalogue import theorems
from otattn.lipschitz.hypotheses import every, order_two, several_heads
from otattn.lipschitz.table import closed_bounds, table
from otattn.lipschitz.theorem import THEOREMS, Theorem, check_count, check_effort, domain_of
from otattn.lipschitz.theorem import theorem as _theorem
from otattn.lipschitz.upper.multi_head import head_with_values, multi_head
from otattn.measures import Domain

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
    check_effort(effort)
    region = domain_of(as_attention(attention), radius, domain)
    order = check.check_order(p)
    out = [b for b in table(attention, radius=radius, domain=domain, n=n, p=p) if b.kind == "upper"]
    for record in THEOREMS.values():
        if record.closed or record.quantity != "lipschitz" or not _worth_it(record, attention, n, order, out):
            continue
        out += _attempt(record, attention, region, n, order, effort)
    return sorted(out, key=lambda b: (b.value, b.log_value))


def _attempt(
    record: Theorem, attention: AttentionMap, region: Domain, n: int | None, p: float, effort: Effort
) -> list[Bound]:
    # a theorem about any measure bounds the constant for n tokens too
    counts = [c for c in dict.fromkeys((n, None)) if record.reason(attention, region, c, p) is None]
    if not counts:
        return []
    try:
        bound = record.search(attention, region, counts[0], p, effort)
    except CertificateError:
        return []  # what the solver proposed cannot be repaired: the others stand
    return [] if math.isnan(bound.value) else [bound]


def _plain_softmax(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    whole: Any = attention.unmasked
    odd = next((h for h in whole.heads if not isinstance(h, SoftmaxAttention)), None)
    return None if odd is None else f"every head must be SoftmaxAttention, received {type(odd).__name__}"


@_theorem(
    "multi_head_certificate",
    statement="min_s lambda_max(sum_h c_h^2 U_h U_h^T / s_h)^{1/2} of the heads' best bounds",
    hypotheses="several softmax heads, masked or not; any domain and n; p = 2",
    applies=every(several_heads, order_two, _plain_softmax),
    closed=False,
)
def _of_heads(attention: Any, domain: Domain, n: int | None, p: float, *, effort: Effort = "fast") -> Bound:
    # bounds of the heads with the identity for their values: multi_head checks that this is what they are
    whole: Any = attention.unmasked
    heads = [head_with_values(attention, h, None) for h in range(len(whole.heads))]
    bounds = [upper_bounds(h, domain=domain, n=n, p=p, effort=effort)[0] for h in heads]
    return multi_head(attention, domain=domain, n=n, head_bounds=bounds)


def _worth_it(record: Theorem, attention: AttentionMap, n: int | None, p: float, closed: list[Bound]) -> bool:
    """Whether a relaxation may win, or costs little; a wrong answer costs time, or a sharper bound, never a proof."""
    rule = _RULES.get(record.key)
    return rule is None or not isinstance(attention, SoftmaxAttention) or rule(attention, n, p, closed)


def _few_dimensions(attention: SoftmaxAttention, n: int | None, p: float, closed: list[Bound]) -> bool:
    return attention.in_dim <= PAIR_DIMENSION


def _rows_count(
    attention: SoftmaxAttention, n: int | None, p: float, closed: list[Bound], *, share: float = 1.0
) -> bool:
    """For ``A = -alpha I`` it is never below ``v phi(a) sqrt(n - 2)``: one token moves, and n - 2 rows look at it."""
    row = next((b.details for b in closed if b.theorem == "row_bound" and "t" in b.details), None)
    if row is None or n is None:
        return True
    least = share * spectral_norm(attention.V) * row["row_constant"] * math.sqrt(max(n - 2.0, 0.0))
    return bool(row["t"] > 0.8 and least < min(b.value for b in closed))


def _rows_of_a_form(attention: SoftmaxAttention, n: int | None, p: float, closed: list[Bound]) -> bool:
    """Multiples of the identity have sharper bounds of their own; for other forms seldom below half of the rows (measured)."""
    A = attention.A
    plain = np.linalg.norm(A - np.trace(A) / len(A) * np.eye(len(A))) <= 1e-9 * np.linalg.norm(A)
    return not plain and len(A) <= PAIR_DIMENSION and _rows_count(attention, n, p, closed, share=0.5)


def _columns_count(log_excess: Callable[[float], float]) -> _Rule:
    """Both keep the exponential of the column bound: about ``v e^{kappa/p}`` times the excess (measured)."""

    def rule(attention: SoftmaxAttention, n: int | None, p: float, closed: list[Bound]) -> bool:
        best = min((b.log_value for b in closed if b.value > 0), default=math.inf)
        exponents = [float(b.details["kappa"]) for b in closed if b.theorem == "column_bound" and "kappa" in b.details]
        v = spectral_norm(attention.V)
        if not exponents or v == 0.0 or math.isinf(best) or math.isinf(p):
            return True
        kappa = min(exponents)
        return kappa / p + math.log(v) + log_excess(kappa) < best

    return rule


def _gaps_count(attention: SoftmaxAttention, n: int | None, p: float, closed: list[Bound]) -> bool:
    """It wins for forms that are not near the identity and not small, and comes no lower than .42 of the column bound's row, .64 where
    kappa is at most 5 (measured)."""
    best = min((b.log_value for b in closed if b.value > 0), default=math.inf)
    columns = [b.details for b in closed if b.theorem == "column_bound" and "kappa" in b.details]
    v = spectral_norm(attention.V)
    if not columns or v == 0.0:
        return True
    kappa, row = (min(float(x[key]) for x in columns) for key in ("kappa", "row"))
    return kappa > max(2.2, 0.4 * row / v) and 0.5 * kappa + math.log((0.42 if kappa > 5.0 else 0.64) * row) < best


def _many(attention: SoftmaxAttention, n: int | None, p: float, closed: list[Bound]) -> bool:
    """Two tokens and logits of less than .7 have sharper theorems (measured)."""
    sizes = [b.details["t"] for b in closed if b.theorem == "row_bound" and "t" in b.details]
    return (n != 2 or not _few_dimensions(attention, n, p, closed)) and min(sizes, default=1.0) > 0.7


_Rule = Callable[[SoftmaxAttention, "int | None", float, list[Bound]], bool]
_RULES: dict[str, _Rule] = {
    "two_tokens": _few_dimensions,
    "psd": _many,
    "negative_identity": _rows_count,
    "frontier_rows": _rows_of_a_form,
    "mean_field": _columns_count(lambda kappa: -0.5),
    "psd_mean_field": _columns_count(math.log1p),
    "logit_gap": _gaps_count,
}
"""When a relaxation is tried for a softmax head; the others always are."""


def lipschitz_upper_bound(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
    theorem: str | None = None,
    effort: Effort = "fast",
) -> Bound:
    """A proven upper bound of the W_p Lipschitz constant of ``F(mu) = (Gamma_mu)_# mu``.

    Parameters
    ----------
    attention : AttentionMap
        Softmax, L2, unnormalised, rotary attention, attention with composed logits, gated or multi-head attention of such, masked
        or not (masked: the conditional W_p).
    radius : float, optional
        Tokens in the centred ball of this radius; or ``domain``.
    domain : Domain, optional
        Without either, a head of a checkpoint has the domain of its layer: where the normalisation in front puts its tokens.
    n : int, optional
        n tokens of equal weight; None for all measures on the domain (mean-field).
    p : float
        Order, in ``[1, inf]``.
    theorem : str, optional
        Key of one theorem of the catalogue (:func:`otattn.theorems`), for instance "row_bound"; by default the least of all
        that apply.
    effort : {"fast", "deep"}
        "deep" allows branch and bound that takes tens of seconds.

    Returns
    -------
    Bound
        Kind "upper"; ``theorem`` names the one that won, ``details["candidates"]`` the number compared.

    Raises
    ------
    ValueError
        No theorem covers the map, or ``theorem`` does not apply; the message has the reasons.
    CertificateError
        The relaxation ``theorem`` could not be certified.

    Examples
    --------
    >>> import numpy as np
    >>> bound = lipschitz_upper_bound(SoftmaxAttention(np.eye(2), np.eye(2)), radius=2.0, p=np.inf)
    >>> round(bound.value, 6)   # 4 + sqrt(17), whatever n is
    8.123106
    """
    if theorem is not None:
        region, order = domain_of(as_attention(attention), radius, domain), check.check_order(p)
        return _of_theorem(theorem, attention, region, check_count(n), order, effort)
    candidates = upper_bounds(attention, radius=radius, domain=domain, n=n, p=p, effort=effort)
    if not candidates:
        catalogue = theorems(attention, radius=radius, domain=domain, n=n, p=p)
        why = "; ".join(dict.fromkeys(reason for reason in catalogue.reasons or () if reason))
        raise ValueError(
            f"no upper bound applies to {type(attention).__name__} with n={n}, p={p:g} ({why}); see otattn.theorems."
        )
    best = candidates[0]
    return dataclasses.replace(best, details={**best.details, "candidates": len(candidates)})


def _of_theorem(key: str, attention: AttentionMap, region: Domain, n: int | None, p: float, effort: Effort) -> Bound:
    """The bound of one theorem."""
    record = THEOREMS.get(key)
    if record is None or record.kind != "upper" or record.quantity != "lipschitz":
        known = sorted(t.key for t in THEOREMS.values() if t.kind == "upper" and t.quantity == "lipschitz")
        raise ValueError(f"theorem must be one of {', '.join(known)}, received {key!r}.")
    if record.closed:
        found = closed_bounds(record, attention, region, n, p)
    else:
        found = _attempt(record, attention, region, n, p, effort)
    if not found:
        why = record.reason(attention, region, n, p)
        if why is None:
            raise CertificateError(f"what the solver proposed for {key} proves nothing; try effort='deep'.")
        raise ValueError(f"{key} does not apply: {why}; otattn.theorems(attention, ...) lists what does.")
    return min(found, key=lambda b: b.log_value)
