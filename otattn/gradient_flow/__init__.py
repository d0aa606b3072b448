"""Is it a descent: the gradient-flow structure of attention, its energies, and their convexity."""

from otattn.gradient_flow import energies
from otattn.gradient_flow.convexity import (
    DisplacementConvexity,
    displacement_convexity,
    displacement_convexity_study,
)
from otattn.gradient_flow.dissipation import EnergyDissipation, energy_dissipation
from otattn.gradient_flow.gaussian_structure import bures_closedness, covariance_tangent
from otattn.gradient_flow.report import GradientFlowReport
from otattn.gradient_flow.structure import check_gradient_flow
from otattn.gradient_flow.table import StructureTable, structure_table

__all__ = [
    "DisplacementConvexity",
    "EnergyDissipation",
    "GradientFlowReport",
    "StructureTable",
    "bures_closedness",
    "check_gradient_flow",
    "covariance_tangent",
    "displacement_convexity",
    "displacement_convexity_study",
    "energies",
    "energy_dissipation",
    "structure_table",
]
