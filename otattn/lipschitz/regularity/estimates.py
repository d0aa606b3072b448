r"""The three estimates of a variant side by side, proven and measured, and whether it passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from otattn import _validate as check
from otattn._tabular import Result
from otattn.attention import (
    AttentionMap,
    L2Attention,
    PointwiseAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.attention.base import as_attention
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.hypotheses import single_heads
from otattn.lipschitz.regularity.ascent import measured
from otattn.lipschitz.theorem import THEOREMS, Quantity, check_count, domain_of, prove, read_all
from otattn.measures.domains import Domain

__all__ = ["Estimates", "estimates"]

QUANTITIES: tuple[Quantity, ...] = ("value", "field", "measure")
SYMBOLS = {
    "value": "sup |Gamma_mu(x)|",
    "field": "sup ||D_x Gamma_mu(x)||",
    "measure": "sup_x Lip(mu -> Gamma_mu(x))",
}


@dataclass(frozen=True, eq=False)
class Estimates(Result):
    """The three estimates that well-posedness asks of a field, on one domain.

    Attributes
    ----------
    attention : AttentionMap
    domain : Domain
    n : int or None
        Number of equal atoms; None for any measure.
    p : float
        Order of the Wasserstein distance of estimate 3.
    value : Bound or None
        Estimate 1, ``sup |Gamma_mu(x)|``: the least of the theorems that apply, None where there is none.
    field : Bound or None
        Estimate 2, ``sup ||D_x Gamma_mu(x)||``.
    measure : Bound or None
        Estimate 3, the largest constant of ``mu -> Gamma_mu(x)`` from ``W_p``, x kept.
    reasons : tuple of str
        Why each has no proven value; "" where it has one.
    measured : tuple of (Bound or None)
        What a short ascent found of each, from below: kind "lower", its witness a query and a measure.
    unmeasured : tuple of str
        Why each has no measured value; "" where it has one.
    passes : bool or None
        Whether flows of the map exist for all times by these estimates; None where they are not known.
    verdict : str
        Why.
    """

    attention: AttentionMap
    domain: Any
    n: int | None
    p: float
    value: Bound | None
    field: Bound | None
    measure: Bound | None
    reasons: tuple[str, ...]
    measured: tuple[Bound | None, ...]
    unmeasured: tuple[str, ...]
    passes: bool | None
    verdict: str

    @property
    def proven(self) -> tuple[Bound | None, ...]:
        """The three proven values in order."""
        return (self.value, self.field, self.measure)

    def rows(self) -> list[dict[str, Any]]:
        """One record an estimate: proven value, theorem, measured value, and why one is missing."""
        out = []
        for k, name in enumerate(QUANTITIES):
            high, low = self.proven[k], self.measured[k]
            out.append(
                {
                    "estimate": k + 1,
                    "of": SYMBOLS[name],
                    "proven": None if high is None else high.value,
                    "by": "no theorem" if high is None else high.name,
                    "measured": None if low is None else low.value,
                    "reason": "; ".join(filter(None, (self.reasons[k], self.unmeasured[k]))),
                }
            )
        return out

    def verify(self, *, rigorous: bool = False) -> bool:
        """True when every proven value is proved again (see :meth:`Bound.verify`) and none is below what was measured."""
        pairs = list(zip(self.proven, self.measured, strict=True))
        above = all(high is None or low is None or low.value <= high.value * (1.0 + 1e-9) for high, low in pairs)
        return above and all(high is None or high.verify(rigorous=rigorous) for high, _ in pairs)

    def __repr__(self) -> str:
        shown = ", ".join("no theorem" if b is None else f"{b.value:.6g}" for b in self.proven)
        tokens = "any measure" if self.n is None else f"n={self.n}"
        passes = {True: "passes", False: "fails", None: "not known"}[self.passes]
        return f"Estimates({self.attention.kind}: {shown}, p={self.p:g}, {tokens}, {passes})"


def estimates(
    attention: AttentionMap,
    domain: Domain | None = None,
    *,
    radius: float | None = None,
    n: int | None = None,
    p: float = 2,
    ascent: bool = True,
) -> Estimates:
    r"""The three estimates of a field on a domain: its size, its slope in the token, its slope in the measure.

    .. math:: \sup |\Gamma_\mu(x)|, \qquad \sup \|D_x \Gamma_\mu(x)\|, \qquad
              \sup_x \sup_{\mu \ne \nu} \frac{|\Gamma_\mu(x) - \Gamma_\nu(x)|}{W_p(\mu, \nu)}

    over points and measures of the domain (n equal atoms each in the last, where n is given). A variant passes when the first
    grows at most like the radius, so that no flow leaves every ball in finite time, and the other two are finite on every ball.
    What is proven is the least of the theorems of :func:`otattn.theorems` about that quantity; what is measured is the end
    of a short ascent, a lower value and no more.

    Parameters
    ----------
    attention : AttentionMap
        Softmax, L2, Sinkhorn, sigmoid, ReLU, linear or exponential heads, masked (the conditional distance) and several, have
        theorems; of other maps it is said that none is known.
    domain : Domain, optional
        Of the tokens and of the query; or ``radius``.
    radius : float, optional
        Of a centred ball.
    n : int, optional
        Number of equal atoms of the measures that are compared; None is any measure.
    p : float
        In ``[1, inf]``.
    ascent : bool
        Also what a short ascent finds: tenths of a second for small maps, seconds for a head of a model.

    Returns
    -------
    Estimates

    Raises
    ------
    ValueError
        Both or none of domain and radius; a domain of another dimension.

    Examples
    --------
    >>> import otattn as oa
    >>> found = oa.estimates(oa.SigmoidAttention([[1.0]], [[1.0]]), radius=2.0, ascent=False)
    >>> found
    Estimates(SigmoidAttention: 1.96403, 1, 1.5625, p=2, any measure, passes)
    >>> oa.estimates(oa.SoftmaxAttention([[9.0]], [[1.0]]), radius=1.0, n=100, ascent=False).measure.value  # printed: 9
    64.2264...

    References
    ----------
    Castin, Ablin, Carrillo, Peyre, "A Unified Perspective on the Dynamics of Deep Transformers", 2025, for the three
    estimates; the proofs of the values are in the modules of :mod:`otattn.lipschitz.regularity`.
    """
    region = domain_of(as_attention(attention), radius, domain)
    count, order = check_count(n), check.check_order(p)
    read_all()
    found = [_proven(attention, region, count, order, what) for what in QUANTITIES]
    lower = [measured(attention, region, count, order, q) if ascent else "no ascent was asked for" for q in QUANTITIES]
    size, field, measure = (b if isinstance(b, Bound) else None for b in found)
    passes, verdict = _verdict(attention)
    return Estimates(
        attention,
        region,
        count,
        order,
        size,
        field,
        measure,
        reasons=tuple("" if isinstance(b, Bound) else b for b in found),
        measured=tuple(b if isinstance(b, Bound) else None for b in lower),
        unmeasured=tuple("" if isinstance(b, Bound) else b for b in lower),
        passes=passes,
        verdict=verdict,
    )


def _proven(attention: AttentionMap, region: Domain, n: int | None, p: float, quantity: Quantity) -> Bound | str:
    """The least proven value of a quantity, or the reason of the theorem that comes nearest."""
    reasons, bounds = [], []
    for record in THEOREMS.values():
        if record.quantity != quantity or not record.closed or record.kind != "upper":
            continue
        for count in dict.fromkeys((n, None)):
            why = record.reason(attention, region, count, p)
            if why is None:
                bounds.append(prove(record.key, attention, region, count, p))
            elif count == n:
                reasons.append(why)
    return min(bounds, key=lambda b: b.log_value) if bounds else f"no theorem: {reasons[-1]}"


NORMALISED = "the weights have mass one, so |Gamma| <= max |V y + b| grows at most like R: flows exist for all times"
SIGMOID = (
    "the weights sigma(<A x, y>) have mass below one, so |Gamma| < max |V y| grows at most like R though nothing normalises "
    "them: flows exist for all times. A talk counts sigmoid attention among the variants that fail, the abstract of the paper "
    "among those that are covered; the abstract is right"
)
UNBOUNDED = (
    "the weights grow with <A x, y>, so |Gamma| grows faster than R: the estimates hold on every ball, but a flow may leave "
    "every ball in finite time (x' = x^3 for linear attention on the line)"
)
MASK = (
    "; under a mask estimate 3 at time s carries theta([0, s])^{-1/p}, and F is Lipschitz in the conditional distance"
)


_KNOWN = (SoftmaxAttention, L2Attention, SinkhornAttention, PointwiseAttention)


def _verdict(attention: AttentionMap) -> tuple[bool | None, str]:
    heads = list(single_heads(attention))
    for head, _ in heads:
        if not isinstance(head, _KNOWN):
            return None, f"no theorem says that {head.kind} satisfies all three estimates"
        if isinstance(head, SinkhornAttention) and head.unfinished is not None:
            return None, f"estimate 3 is proven for the limit, {head.unfinished}"
    words = {_words(head) for head, _ in heads}
    masked = MASK if any(causal and not isinstance(head, PointwiseAttention) for head, causal in heads) else ""
    if UNBOUNDED in words:
        return False, UNBOUNDED + masked
    return True, "; ".join(w for w in (SIGMOID, NORMALISED) if w in words) + masked


def _words(head: Any) -> str:
    """What bounds the growth of a head's values, or that nothing does."""
    if not isinstance(head, PointwiseAttention):
        return NORMALISED
    return SIGMOID if head.mass == "at most one" else UNBOUNDED
