"""How far two measures are apart: Wasserstein, conditional Wasserstein and Bures-Wasserstein distances."""

from otattn.distances.batch import wasserstein_batch
from otattn.distances.bures import bures_distance, bures_geodesic, bures_wasserstein, gaussian_transport_map
from otattn.distances.conditional import ConditionalTransport, conditional_transport, conditional_wasserstein
from otattn.distances.plan import OptimalPlan, transport_plan
from otattn.distances.transport import TransportResult, transport
from otattn.distances.wasserstein import wasserstein

__all__ = [
    "ConditionalTransport",
    "OptimalPlan",
    "TransportResult",
    "bures_distance",
    "bures_geodesic",
    "bures_wasserstein",
    "conditional_transport",
    "conditional_wasserstein",
    "gaussian_transport_map",
    "transport",
    "transport_plan",
    "wasserstein",
    "wasserstein_batch",
]
