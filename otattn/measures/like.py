"""What counts as a measure where one is asked for."""

from numpy.typing import ArrayLike

from otattn.measures.discrete import DiscreteMeasure
from otattn.measures.gaussian import GaussianMeasure
from otattn.measures.spacetime import SpaceTimeMeasure

__all__ = ["AnyMeasure", "MeasureLike"]

MeasureLike = DiscreteMeasure | SpaceTimeMeasure | ArrayLike
"""Atoms, with times for causal maps; an array ``(n, d)`` is the uniform measure on its rows, or the sequence of them."""
AnyMeasure = MeasureLike | GaussianMeasure
