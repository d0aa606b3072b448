"""Pictures of results: ``plot_X(result, *, ax=None) -> Axes``."""

from otattn.plotting.enclosure import plot_enclosure, plot_head_enclosures, plot_real_against_adversarial
from otattn.plotting.gradient_flows import (
    plot_displacement_convexity,
    plot_energy_dissipation,
    plot_structure_table,
)
from otattn.plotting.growth import plot_crossover, plot_local_growth
from otattn.plotting.stability import plot_stability
from otattn.plotting.style import COLORS, save

__all__ = [
    "COLORS",
    "plot_crossover",
    "plot_displacement_convexity",
    "plot_enclosure",
    "plot_energy_dissipation",
    "plot_head_enclosures",
    "plot_local_growth",
    "plot_real_against_adversarial",
    "plot_stability",
    "plot_structure_table",
    "save",
]
