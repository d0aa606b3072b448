"""What attention moves: probability measures on tokens, and the domains that hold the tokens."""

from otattn.measures.discrete import DiscreteMeasure, as_discrete
from otattn.measures.domains import Ball, Box, Domain, Ellipsoid, LayerNormDomain, PointSet
from otattn.measures.gaussian import GaussianMeasure
from otattn.measures.like import AnyMeasure, MeasureLike
from otattn.measures.spacetime import SpaceTimeMeasure, as_spacetime

__all__ = [
    "AnyMeasure",
    "Ball",
    "Box",
    "DiscreteMeasure",
    "Domain",
    "Ellipsoid",
    "GaussianMeasure",
    "LayerNormDomain",
    "MeasureLike",
    "PointSet",
    "SpaceTimeMeasure",
    "as_discrete",
    "as_spacetime",
]
