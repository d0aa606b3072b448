"""What happens in depth: flows of tokens and of Gaussians, clusters, mean-field limit, stability in time."""

from otattn.dynamics.clustering import ClusterHistory, Leaders, Plateau, renyi_centres, token_clusters, token_leaders
from otattn.dynamics.flow import flow
from otattn.dynamics.flow_stability import FlowStability, flow_stability
from otattn.dynamics.gaussian_closed_form import CovarianceClosedForm, covariance_closed_form
from otattn.dynamics.gaussian_flow import gaussian_flow, gaussian_flow_batch
from otattn.dynamics.gaussian_limit import GaussianLimit, gaussian_limit, isotropic_dimension
from otattn.dynamics.gaussian_trajectory import GaussianFlowBatch, GaussianTrajectory
from otattn.dynamics.gronwall import flow_radius_bound
from otattn.dynamics.limit_rank import RankHistogram, limit_rank_histogram
from otattn.dynamics.mean_field_limit import MeanFieldLimit, mean_field_limit
from otattn.dynamics.polytope import LimitPolytope, limit_polytope
from otattn.dynamics.residual import DepthConvergence, depth_convergence, residual_steps
from otattn.dynamics.trajectory import Trajectory

__all__ = [
    "ClusterHistory",
    "CovarianceClosedForm",
    "DepthConvergence",
    "FlowStability",
    "GaussianFlowBatch",
    "GaussianLimit",
    "GaussianTrajectory",
    "Leaders",
    "LimitPolytope",
    "MeanFieldLimit",
    "Plateau",
    "RankHistogram",
    "Trajectory",
    "covariance_closed_form",
    "depth_convergence",
    "flow",
    "flow_radius_bound",
    "flow_stability",
    "gaussian_flow",
    "gaussian_flow_batch",
    "gaussian_limit",
    "isotropic_dimension",
    "limit_polytope",
    "limit_rank_histogram",
    "mean_field_limit",
    "renyi_centres",
    "residual_steps",
    "token_clusters",
    "token_leaders",
]
