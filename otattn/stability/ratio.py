"""How much attention stretched one pair of measures, in Wasserstein distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import EPS
from otattn._tabular import Result
from otattn.attention.base import AttentionMap, as_attention
from otattn.distances.conditional import check_kind, distance_of
from otattn.measures import AnyMeasure, DiscreteMeasure, GaussianMeasure, SpaceTimeMeasure
from otattn.stability.certify import Evidence, Resolution, certify, extent, gaussian_margins

__all__ = ["Resolution", "StabilityRatio", "image_distances", "prepare_pair", "stability_ratio"]

Moved = DiscreteMeasure | SpaceTimeMeasure | GaussianMeasure

SHAVE = 1e-12
"""Taken off a certified value, and its rounding once more, so that another processor's rounding confirms it."""


@dataclass(frozen=True, eq=False)
class StabilityRatio(Result):
    """``W_p(F(mu), F(nu)) / W_p(mu, nu)`` for one pair of measures.

    Attributes
    ----------
    value : float
        ``numerator / denominator``.
    numerator, denominator : float
        ``W_p(F(mu), F(nu))`` and ``W_p(mu, nu)``; Bures-Wasserstein between Gaussians, conditional between
        space-time measures.
    certified_lower : float
        Proven: never above the exact ratio of the two measures, their floats (and those of the map) taken as exact
        numbers. A dual value of the numerator at distances that allow for all rounding of the images, over the cost
        of a plan between ``mu`` and ``nu``; never above ``value``. Nothing is proven where ``resolution`` says so.
    p : float
        Order.
    attention : AttentionMap or None
        None when the ratio was loaded from a file.
    mu, nu : measure
        The pair.
    resolution : Resolution
        Whether the float64 numbers above mean what they say.
    """

    value: float
    numerator: float
    denominator: float
    certified_lower: float
    p: float
    attention: AttentionMap | None
    mu: Moved
    nu: Moved
    resolution: Resolution

    def verify(self) -> bool:
        """Recompute images, distances and the certified value; False as soon as anything disagrees.

        Distances must agree to 1e-9, or to the rounding of the images where that is larger; the certified value
        must not exceed what is proven again.

        Raises
        ------
        ValueError
            There is no attention to recompute with.
        """
        if self.attention is None:
            raise ValueError("verify needs the attention, received a ratio loaded without it; pass it to load.")
        try:
            new, found = _analyse(self.attention, self.mu, self.nu, self.p)
        except (ValueError, TypeError, OverflowError):
            return False
        if not self.denominator > 0.0 or not np.isfinite([self.value, self.certified_lower]).all():
            return False
        return bool(
            abs(self.numerator - new.numerator) <= 1e-9 * new.numerator + min(found.noise, new.numerator)
            and abs(self.denominator - new.denominator) <= 1e-9 * new.denominator
            and abs(self.value - self.numerator / self.denominator) <= 4 * EPS * self.value
            and 0.0 <= self.certified_lower <= min(self.value, found.proven)
            and self.resolution == new.resolution
        )

    def __repr__(self) -> str:
        return (
            f"StabilityRatio({self.value:.6g}, certified >= {self.certified_lower:.6g}, p={self.p:g}, "
            f"W_p={self.denominator:.3g} -> {self.numerator:.3g}, {self.resolution})"
        )


def stability_ratio(attention: AttentionMap, mu: AnyMeasure, nu: AnyMeasure, *, p: float = 2) -> StabilityRatio:
    r"""The factor by which attention stretched the distance between two measures.

    .. math:: \frac{W_p(F(\mu), F(\nu))}{W_p(\mu, \nu)}, \qquad F(\mu) = (\Gamma_\mu)_\# \mu

    It is a lower bound of every Lipschitz constant of F on a set that holds both measures.

    Parameters
    ----------
    attention : AttentionMap
        A function ``(x, mu) -> values`` is one as ``FunctionAttention(function)``; nothing is then certified.
    mu, nu : measures or array_like (n, d), (m, d)
        Both discrete; or both Gaussian, with Bures-Wasserstein distances and ``p = 2``; or both space-time
        measures of one time marginal, with conditional distances. An array is the uniform measure on its
        rows, and the sequence of its rows when the attention is masked.
    p : float
        Order, ``1 <= p <= inf``.

    Returns
    -------
    StabilityRatio

    Raises
    ------
    ValueError
        The measures are equal (the ratio is 0/0), live in different spaces or have different time marginals;
        ``p`` is not 2 for Gaussians.
    TypeError
        The measures are of different kinds, or of a kind that the attention does not act on.
    OverflowError
        An image, a distance or the ratio is not representable in float64.
    ConvergenceError
        The transport could not be certified.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> attention = SoftmaxAttention([[0.0]], [[2.0]])   # the mean, doubled
    >>> stability_ratio(attention, [[0.0], [1.0]], [[3.0], [4.0]]).value
    2.0

    References
    ----------
    Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024, section 2.
    """
    order = check.check_order(p)
    first, second = prepare_pair(attention, mu, nu, order)
    return _analyse(attention, first, second, order)[0]


def prepare_pair(attention: AttentionMap, mu: AnyMeasure, nu: AnyMeasure, p: float) -> tuple[Moved, Moved]:
    """The pair as measures of one kind and one space, on which ``attention`` acts and ``W_p`` is defined."""
    as_attention(attention)
    pair: list[Any] = [m if isinstance(m, GaussianMeasure) else attention.as_measure(m) for m in (mu, nu)]
    first, second = pair
    check_kind(first, second, p)
    if first.dim != second.dim:
        raise ValueError(f"mu and nu must live in one space, received dimensions {first.dim} and {second.dim}.")
    return first, second


def image_distances(
    attention: AttentionMap, mu: Moved, nu: Moved, p: float, *, resolution: float = 0.0
) -> tuple[float, float]:
    """``W_p(F(mu), F(nu))`` and ``W_p(mu, nu)`` of a prepared pair.

    ``(0, 0)`` when the measures are equal, or closer than ``resolution`` times the size of ``mu``.
    """
    denominator = distance_of(mu, nu, p)
    if denominator == 0.0 or denominator < resolution * extent(mu):
        return 0.0, 0.0
    return distance_of(attention.pushforward(mu), attention.pushforward(nu), p), denominator


def _analyse(attention: AttentionMap, mu: Moved, nu: Moved, p: float) -> tuple[StabilityRatio, Evidence]:
    """The ratio of a prepared pair, with its evidence."""
    denominator = distance_of(mu, nu, p)
    if denominator == 0.0:
        raise ValueError(
            "mu and nu must be different measures, received two equal ones: the stability ratio is then 0/0; "
            "perturb one, or use local_lipschitz for the limit of close measures."
        )
    images: tuple[Any, Any] = (attention.pushforward(mu), attention.pushforward(nu))
    numerator = distance_of(*images, p)
    if not np.isfinite(numerator / denominator):
        raise OverflowError(
            f"the ratio must be finite, but {numerator:g} / {denominator:g} overflows; take measures further apart."
        )
    if isinstance(mu, GaussianMeasure) and isinstance(nu, GaussianMeasure):
        found = gaussian_margins(attention, (mu, nu), images, numerator, denominator)
    else:
        assert not isinstance(mu, GaussianMeasure)  # prepared pairs are of one kind
        assert not isinstance(nu, GaussianMeasure)
        found = certify(attention, (mu, nu), images, p, numerator, denominator)
    value = found.numerator / denominator
    certified = max(0.0, found.proven * (1.0 - SHAVE) - found.noise / denominator)
    ratio = StabilityRatio(
        value, found.numerator, denominator, min(certified, value), p, attention, mu, nu, found.resolution
    )
    return ratio, found
