"""otattn: measure and certify how stable attention is in the geometry of optimal transport.

Tokens are a probability measure, attention moves it: ``F(mu) = (Gamma_mu)_# mu``. Build a measure, build an attention
map, compare measures, ask how much the map stretches.

>>> import numpy as np
>>> import otattn as oa
>>> attention = oa.SoftmaxAttention(A=-np.eye(2), V=np.eye(2))
>>> mu = oa.DiscreteMeasure([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
>>> oa.local_lipschitz(attention, mu)
LocalLipschitz(1.45354, p=2, particle=1.45354, splitting=0.844638, n=3)
"""

from otattn import plotting
from otattn.attention import (
    MLP,
    AttentionMap,
    Compose,
    ExponentialAttention,
    JacobianOperator,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    Residual,
    RMSNorm,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    TransformerBlock,
)
from otattn.data import SampleLayer, load_layer, load_sample
from otattn.distances import (
    ConditionalTransport,
    OptimalPlan,
    TransportResult,
    bures_distance,
    bures_geodesic,
    bures_wasserstein,
    conditional_transport,
    conditional_wasserstein,
    gaussian_transport_map,
    transport,
    transport_plan,
    wasserstein,
)
from otattn.errors import (
    CertificateError,
    ConvergenceError,
    MemoryBudgetError,
    NotGaussianPreservingError,
    OtattnError,
    StoreError,
)
from otattn.lipschitz import Bound, Enclosure, LocalLipschitz, bounds, local_growth, local_lipschitz
from otattn.measures import (
    Ball,
    Box,
    DiscreteMeasure,
    Ellipsoid,
    GaussianMeasure,
    LayerNormDomain,
    PointSet,
    SpaceTimeMeasure,
)
from otattn.report import build_report
from otattn.stability import StabilityRatio, StabilityStudy, samplers, stability_ratio, stability_study

__all__ = [
    "MLP",
    "AttentionMap",
    "Ball",
    "Bound",
    "Box",
    "CertificateError",
    "Compose",
    "ConditionalTransport",
    "ConvergenceError",
    "DiscreteMeasure",
    "Ellipsoid",
    "Enclosure",
    "ExponentialAttention",
    "GaussianMeasure",
    "JacobianOperator",
    "L2Attention",
    "SampleLayer",
    "LayerNorm",
    "LayerNormDomain",
    "LinearAttention",
    "LocalLipschitz",
    "MaskedAttention",
    "MemoryBudgetError",
    "MultiHeadAttention",
    "NotGaussianPreservingError",
    "OptimalPlan",
    "OtattnError",
    "PointSet",
    "RMSNorm",
    "ReLUAttention",
    "Residual",
    "SigmoidAttention",
    "SinkhornAttention",
    "SoftmaxAttention",
    "SpaceTimeMeasure",
    "StabilityRatio",
    "StabilityStudy",
    "StoreError",
    "TransformerBlock",
    "TransportResult",
    "bounds",
    "build_report",
    "bures_distance",
    "bures_geodesic",
    "bures_wasserstein",
    "conditional_transport",
    "conditional_wasserstein",
    "gaussian_transport_map",
    "load_layer",
    "load_sample",
    "local_growth",
    "local_lipschitz",
    "plotting",
    "samplers",
    "stability_ratio",
    "stability_study",
    "transport",
    "transport_plan",
    "wasserstein",
]
