r"""What is proven of one stability ratio, and what rounding leaves of its float64 value.

The images of both measures are enclosed (`images`), and so is ``W_p`` between enclosed atoms (`transport_bounds`),
hence

.. math:: \frac{W_p(F(\mu), F(\nu))}{W_p(\mu, \nu)} \ge \frac{lower(F(\mu), F(\nu))}{upper(\mu, \nu)}

holds for the floats as given. Plain float64 comes first; images whose rounding is felt are enclosed again in
double-double, while the problem is small, and the numerator is then taken from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from otattn.attention.base import AttentionMap, Measure
from otattn.distances.bures import bures_wasserstein
from otattn.distances.costs import pair_distances, power_mean
from otattn.measures import GaussianMeasure
from otattn.stability.enclosed import UNIT, Enclosed
from otattn.stability.images import image
from otattn.stability.transport_bounds import Problem, pair_slices, transport_lower, transport_upper

__all__ = ["RESOLVED", "Evidence", "Resolution", "certify", "extent", "gaussian_margins"]

REFINE = 1e-9
"""Images whose rounding may exceed this part of their distance are enclosed again in double-double ..."""
FINE_ENTRIES = 2**18
"""... where n^2 d is at most this (about a second of work)."""
RESOLVED = 1e-3
"""A value is a number when rounding is at most this part of it: it has three digits."""
VANISHING = 1e-290
"""Rounding that is this part of the distance of the measures is none (an image that is 0 exactly)."""


class Resolution(StrEnum):
    """What rounding leaves of a ratio.

    RESOLVED: ``value`` is right to three digits at least; ``certified_lower`` is proven.
    ROUNDING: the images are so close that rounding is felt in these digits, ``value`` is partly noise;
    ``certified_lower`` is proven, and may be 0.
    UNBOUNDED: no bound of the rounding is known (a map without a rule in ``images``, Sinkhorn attention with logits
    too large, numbers near the ends of float64); nothing is proven, ``certified_lower`` is 0.
    MARGINS: between Gaussians closed forms count with margins (`gaussian_margins`), which is no proof.
    """

    RESOLVED = "resolved"
    ROUNDING = "rounding"
    UNBOUNDED = "unbounded"
    MARGINS = "margins"


@dataclass(frozen=True)
class Evidence:
    """The numerator (better known, perhaps, than before), how far rounding may have moved it, the proven ratio."""

    numerator: float
    noise: float
    proven: float
    resolution: Resolution


def certify(
    attention: AttentionMap,
    pair: tuple[Measure, Measure],
    images: tuple[Measure, Measure],
    p: float,
    numerator: float,
    denominator: float,
) -> Evidence:
    """Evidence for the ratio of a pair whose images and distances are known in float64."""
    mu, nu = pair
    problem = Problem(mu.weights[mu.weights > 0], nu.weights[nu.weights > 0], pair_slices(mu, nu), p)
    lower, noise = 0.0, np.inf
    x, y = image(attention, mu), image(attention, nu)
    if x is not None and y is not None:
        noise = _apart(x, images[0], p) + _apart(y, images[1], p)
    coarse = not noise <= max(REFINE * numerator, VANISHING * denominator)
    fine = coarse and max(mu.n, nu.n) ** 2 * mu.dim <= FINE_ENTRIES
    if fine:
        better = image(attention, mu, fine=True), image(attention, nu, fine=True)
        fine = better[0] is not None and better[1] is not None
        x, y = better if fine else (x, y)
    if x is not None and y is not None:
        lower = transport_lower(x, y, problem, numerator)
        if fine:
            upper = transport_upper(x, y, problem, numerator)
            numerator, noise = min(max(numerator, lower), upper), upper - lower
    primal = transport_upper(_points(mu), _points(nu), problem, denominator)
    proven = lower / primal * (1.0 - 8.0 * UNIT)
    if not np.isfinite([noise, proven]).all():
        return Evidence(numerator, 0.0, 0.0, Resolution.UNBOUNDED)
    resolved = noise <= max(RESOLVED * numerator, VANISHING * denominator)
    return Evidence(numerator, noise, proven, Resolution.RESOLVED if resolved else Resolution.ROUNDING)


def _points(mu: Measure) -> Enclosed:
    return Enclosed.exact(mu.points[mu.weights > 0])


def _apart(x: Enclosed, moved: Measure, p: float) -> float:
    """How far the float image is from the exact one, at most, in ``W_p``."""
    live = moved.weights > 0
    points = moved.points[live]
    apart = pair_distances(x.high, points) + pair_distances(x.radius, np.zeros_like(points))
    return power_mean(apart, moved.weights[live], p)


BURES_MARGIN = 1e-8
"""Relative margin on the closed form, ten times the error that it documents."""
NUDGES = 3
NUDGE_SAFETY = 8.0
NUDGE = 2.0**-50


def gaussian_margins(
    attention: AttentionMap,
    pair: tuple[GaussianMeasure, GaussianMeasure],
    images: tuple[GaussianMeasure, GaussianMeasure],
    numerator: float,
    denominator: float,
) -> Evidence:
    """Evidence with margins, which are no proof; nothing is claimed where rounding may be felt in the numerator.

    Image and distances are closed forms in float64 (square roots, inverses, singular values); their rounding is not
    enclosed. What counts instead is the error that the distance documents, and for the images how they respond to
    measures nudged by a few units in the last place, times a safety factor.
    """
    noise = sum(_rounding(attention, g, image) for g, image in zip(pair, images, strict=True))
    if noise > RESOLVED * numerator:
        return Evidence(numerator, noise, 0.0, Resolution.ROUNDING)
    lower = max(0.0, numerator * (1.0 - BURES_MARGIN) - noise)
    return Evidence(numerator, noise, lower / (denominator * (1.0 + BURES_MARGIN)), Resolution.MARGINS)


def _rounding(attention: AttentionMap, gaussian: GaussianMeasure, image: GaussianMeasure) -> float:
    """How far rounding may have moved an image, guessed from images of nudged measures."""
    rng = np.random.default_rng(0)
    worst, d = 0.0, gaussian.dim
    for _ in range(NUDGES):
        M = np.eye(d) + NUDGE * (2.0 * rng.integers(0, 2, size=(d, d)) - 1.0)
        moved = attention.pushforward(GaussianMeasure(M @ gaussian.mean, M @ gaussian.cov @ M.T))
        worst = max(worst, bures_wasserstein(moved, image))
    return NUDGE_SAFETY * (worst + NUDGE * extent(image))


def extent(mu: Measure | GaussianMeasure) -> float:
    """Largest coordinate, the unit in which the rounding of the points is counted."""
    if isinstance(mu, GaussianMeasure):
        return float(np.abs(mu.mean).max() + np.sqrt(np.trace(mu.cov)))
    return float(np.abs(mu.points).max())
