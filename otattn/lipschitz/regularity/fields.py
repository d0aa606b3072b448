r"""Estimate 2, the slope of the field: ``sup ||D_x Gamma_mu(x)||`` for every variant, with its proof."""

from __future__ import annotations

from typing import Any

from otattn.attention import AttentionMap, PointwiseAttention
from otattn.attention.head import Head
from otattn.lipschitz.arithmetic.rounding import log
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import Region, Seen, see
from otattn.lipschitz.regularity.heads import bound_of_heads, known_heads
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.unnormalised import scalars, suprema
from otattn.measures.domains import Domain


@theorem(
    "heads_field_bound",
    statement="sup ||V C A|| (normalised; A = 2 K^T Q for L2); sup |h'| sup ||V M A|| for unnormalised heads",
    hypotheses="softmax, L2, Sinkhorn or unnormalised heads, one or several, masked or not; any domain, n and p",
    applies=known_heads,
    quantity="field",
)
def heads_field_bound(attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    r"""``sup ||D_x Gamma_mu(x)||``, the measure kept: of ``field_bound`` for softmax, and its kin.

    Normalised kernels whose logits have the gradient ``A^T y`` in x up to a term that all keys share have ``D_x Gamma_mu(x) =
    V C_x A`` with ``C_x`` the covariance of the weights: softmax attention; L2 attention with ``A = 2 K^T Q``; Sinkhorn
    attention, whose potential of the keys does not change with x and whose potential of the queries is that of the row
    condition. The supremum over covariances of measures on the domain is ``sigma``
    (:meth:`otattn.lipschitz.constants.regions.Seen.sigma`). Unnormalised kernels have ``V int h' y y^T dmu A``, in the convex hull of
    ``+- sup |h'|`` times second moments: ``R^2 max_{|u|=1} |V u| |A^T u| sup |h'|``, with 1/4 for the sigmoid and 1 for linear and
    ReLU attention. A mask leaves part of the measure. Several heads are combined as in
    :func:`otattn.lipschitz.regularity.heads.bound_of_heads`.

    Examples
    --------
    >>> from otattn.attention import SigmoidAttention
    >>> heads_field_bound(SigmoidAttention([[2.0]], [[3.0]]), radius=2.0).value
    6.000...
    """
    return bound_of_heads("heads_field_bound", _slope, attention, domain, n, p, exact)


def _slope(head: Head, region: Region, seen: Seen | None) -> Any:
    if isinstance(head.map, PointwiseAttention):
        _, a, sigma = scalars(head, region)
        return log(sigma) + suprema(head.map, a)[1]
    return log((see(head, region) if seen is None else seen).sigma)
