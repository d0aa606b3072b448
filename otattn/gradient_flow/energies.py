"""The energies that attention climbs or descends, by name (``oa.energies``)."""

from otattn.gradient_flow.energy import CombinedEnergy, Energy
from otattn.gradient_flow.entropic import SinkhornEnergy
from otattn.gradient_flow.gaussian_energies import (
    GaussianEnergy,
    GaussianL2Energy,
    GaussianSinkhornEnergy,
    GaussianSoftmaxEnergy,
)
from otattn.gradient_flow.interaction import (
    ExponentialEnergy,
    InteractionEnergy,
    LinearEnergy,
    ReLUEnergy,
    SigmoidEnergy,
)
from otattn.gradient_flow.known import KnownStructure, known_gaussian_structure, known_structure

__all__ = [
    "CombinedEnergy",
    "Energy",
    "ExponentialEnergy",
    "GaussianEnergy",
    "GaussianL2Energy",
    "GaussianSinkhornEnergy",
    "GaussianSoftmaxEnergy",
    "InteractionEnergy",
    "KnownStructure",
    "LinearEnergy",
    "ReLUEnergy",
    "SigmoidEnergy",
    "SinkhornEnergy",
    "known_gaussian_structure",
    "known_structure",
]
