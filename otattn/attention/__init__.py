"""What moves the measures: attention maps ``Gamma_mu``, their push-forward and their derivatives."""

from otattn.attention.base import AttentionMap
from otattn.attention.compose import Compose, Residual, Sum, TransformerBlock
from otattn.attention.feed_forward import MLP, FeedForward
from otattn.attention.function import FunctionAttention
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.l2 import L2Attention
from otattn.attention.masked import MaskedAttention
from otattn.attention.multihead import MultiHeadAttention
from otattn.attention.pointwise import (
    ExponentialAttention,
    LinearAttention,
    PointwiseAttention,
    ReLUAttention,
    SigmoidAttention,
)
from otattn.attention.rotary import RotaryAttention
from otattn.attention.scores import (
    GatedAttention,
    Mask,
    PositionBias,
    Rotation,
    ScoreAttention,
    alibi_slopes,
    grouped_queries,
)
from otattn.attention.sinkhorn import SinkhornAttention
from otattn.attention.softmax import SoftmaxAttention
from otattn.attention.tokenwise import LayerNorm, RMSNorm, TokenwiseMap

__all__ = [
    "MLP",
    "AttentionMap",
    "Compose",
    "ExponentialAttention",
    "FeedForward",
    "FunctionAttention",
    "GatedAttention",
    "JacobianOperator",
    "L2Attention",
    "LayerNorm",
    "LinearAttention",
    "Mask",
    "MaskedAttention",
    "MultiHeadAttention",
    "PointwiseAttention",
    "PositionBias",
    "RMSNorm",
    "ReLUAttention",
    "Residual",
    "RotaryAttention",
    "Rotation",
    "ScoreAttention",
    "SigmoidAttention",
    "SinkhornAttention",
    "SoftmaxAttention",
    "Sum",
    "TokenwiseMap",
    "TransformerBlock",
    "alibi_slopes",
    "grouped_queries",
]
