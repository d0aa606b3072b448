"""The ratio of two Gaussian measures: closed forms with margins, which are no proof.

Image and distances are closed forms in float64 (square roots, inverses, singular values); their rounding is not
enclosed. What counts instead is the error that the distance documents, and for the images how they respond to
measures nudged by a few units in the last place, times a safety factor.
"""

from __future__ import annotations

import numpy as np

from otattn.attention.base import AttentionMap
from otattn.distances.bures import bures_wasserstein
from otattn.measures import GaussianMeasure
from otattn.stability.certify import RESOLVED, Evidence, Resolution

__all__ = ["gaussian_margins"]

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
    """Evidence with margins; nothing is claimed where rounding may be felt in the numerator."""
    noise = sum(_rounding(attention, g, image) for g, image in zip(pair, images, strict=True))
    if noise > RESOLVED * numerator:
        return Evidence(numerator, noise, 0.0, Resolution.ROUNDING)
    lower = max(0.0, numerator * (1.0 - BURES_MARGIN) - noise)
    return Evidence(numerator, noise, lower / (denominator * (1.0 + BURES_MARGIN)), Resolution.MARGINS)


def _rounding(attention: AttentionMap, gaussian: GaussianMeasure, image: GaussianMeasure) -> float:
    """How far rounding may have moved an image, guessed from images of nudged measures."""
    size = float(np.abs(image.mean).max() + np.sqrt(np.trace(image.cov)))
    rng = np.random.default_rng(0)
    worst, d = 0.0, gaussian.dim
    for _ in range(NUDGES):
        M = np.eye(d) + NUDGE * (2.0 * rng.integers(0, 2, size=(d, d)) - 1.0)
        moved = attention.pushforward(GaussianMeasure(M @ gaussian.mean, M @ gaussian.cov @ M.T))
        worst = max(worst, bures_wasserstein(moved, image))
    return NUDGE_SAFETY * (worst + NUDGE * size)
