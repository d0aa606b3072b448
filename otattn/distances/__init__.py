"""How far two measures are apart: Wasserstein, conditional Wasserstein and Bures-Wasserstein distances."""

from otattn.distances.bures import bures_geodesic, bures_wasserstein, covariance_distance, gaussian_transport_map
from otattn.distances.conditional import ConditionalTransport, conditional_transport, conditional_wasserstein
from otattn.distances.plan import CostTransport, transport_from_cost
from otattn.distances.transport import TransportResult, transport
from otattn.distances.wasserstein import wasserstein, wasserstein_batch

__all__ = [
    "ConditionalTransport",
    "CostTransport",
    "TransportResult",
    "bures_geodesic",
    "bures_wasserstein",
    "conditional_transport",
    "conditional_wasserstein",
    "covariance_distance",
    "gaussian_transport_map",
    "transport",
    "transport_from_cost",
    "wasserstein",
    "wasserstein_batch",
]
