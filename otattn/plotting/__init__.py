"""Pictures of results: ``plot_X(result, *, ax=None) -> Axes``."""

from otattn.plotting.depth import plot_depth
from otattn.plotting.enclosure import plot_enclosure, plot_head_enclosures, plot_real_against_adversarial
from otattn.plotting.flows import (
    animate_flow,
    axes_3d,
    plot_cluster_counts,
    plot_depth_convergence,
    plot_flow_stability,
    plot_limit_polytope,
    plot_mean_field_limit,
    plot_sphere_flow,
    plot_token_flow,
)
from otattn.plotting.gaussian_flows import (
    cone_coordinates,
    plot_covariance_cone,
    plot_covariance_ellipses,
    plot_rank_histogram,
    plot_shape_disc,
)
from otattn.plotting.gradient_flows import (
    plot_displacement_convexity,
    plot_energy_dissipation,
    plot_structure_table,
)
from otattn.plotting.growth import plot_crossover, plot_local_growth, plot_sample_complexity
from otattn.plotting.stability import plot_stability
from otattn.plotting.style import COLORS, metric, save

__all__ = [
    "COLORS",
    "animate_flow",
    "axes_3d",
    "cone_coordinates",
    "metric",
    "plot_cluster_counts",
    "plot_covariance_cone",
    "plot_covariance_ellipses",
    "plot_crossover",
    "plot_depth",
    "plot_depth_convergence",
    "plot_displacement_convexity",
    "plot_enclosure",
    "plot_energy_dissipation",
    "plot_flow_stability",
    "plot_head_enclosures",
    "plot_limit_polytope",
    "plot_local_growth",
    "plot_mean_field_limit",
    "plot_rank_histogram",
    "plot_real_against_adversarial",
    "plot_sample_complexity",
    "plot_shape_disc",
    "plot_sphere_flow",
    "plot_stability",
    "plot_structure_table",
    "plot_token_flow",
    "save",
]
