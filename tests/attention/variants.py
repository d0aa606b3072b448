"""The variants of attention by name, from a form A and values V, for tests that run over all of them."""

from collections.abc import Callable

import numpy as np

from otattn.attention import (
    AttentionMap,
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)

Build = Callable[[np.ndarray, np.ndarray], AttentionMap]


def l2(A: np.ndarray, V: np.ndarray) -> L2Attention:
    """``-|A x - y|^2``, whose product of query and key is ``2 <A x, y>``."""
    return L2Attention(A, np.eye(len(A)), V)


def heads(A: np.ndarray, V: np.ndarray) -> MultiHeadAttention:
    """Half of the softmax map and half of the L2 map."""
    half = 0.5 * np.eye(len(V))
    return MultiHeadAttention([SoftmaxAttention(A, V), l2(A, V)], [half, half])


NORMALISED: dict[str, Build] = {
    "softmax": SoftmaxAttention,
    "softmax-qkv": lambda A, V: SoftmaxAttention.from_qkv(A, np.eye(len(A)), V, scale=1.0),
    "l2": l2,
    "sinkhorn": SinkhornAttention,
    "multihead": heads,
}
POINTWISE: dict[str, Build] = {
    "sigmoid": SigmoidAttention,
    "relu": ReLUAttention,
    "linear": LinearAttention,
    "exponential": ExponentialAttention,
}


def masked(build: Build) -> Build:
    return lambda A, V: MaskedAttention(build(A, V))


MASKED: dict[str, Build] = {
    f"masked-{name}": masked(build) for name, build in (NORMALISED | POINTWISE).items() if name != "sinkhorn"
}
ALL = NORMALISED | POINTWISE | MASKED
