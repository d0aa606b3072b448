"""Every kind of map that a flow accepts, with random parameters on R^3."""

from collections.abc import Callable

import numpy as np

from otattn.attention import (
    MLP,
    AttentionMap,
    Compose,
    ExponentialAttention,
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

D = 3
Rng = np.random.Generator


def mat(rng: Rng, rows: int = D, columns: int = D) -> np.ndarray:
    return 0.6 * rng.standard_normal((rows, columns))


def head(rng: Rng, e: int = D) -> SoftmaxAttention:
    return SoftmaxAttention.from_qkv(
        mat(rng, 2), mat(rng, 2), mat(rng, e), query_bias=rng.standard_normal(2), value_bias=rng.standard_normal(e)
    )


def heads(rng: Rng) -> MultiHeadAttention:
    return MultiHeadAttention(
        [head(rng, 2), L2Attention(mat(rng, 2), mat(rng, 2), mat(rng))], [mat(rng, D, 2), mat(rng)]
    )


def block(rng: Rng, *, pre_norm: bool, masked: bool) -> TransformerBlock:
    attention: AttentionMap = MaskedAttention(heads(rng)) if masked else heads(rng)
    perceptron = MLP(mat(rng, 5), rng.standard_normal(5), mat(rng, D, 5))
    norms = [LayerNorm(1 + 0.3 * rng.standard_normal(D), rng.standard_normal(D), eps=1e-2) for _ in range(2)]
    return TransformerBlock(attention, perceptron, attention_norm=norms[0], mlp_norm=norms[1], pre_norm=pre_norm)


VARIANTS: dict[str, Callable[[Rng], AttentionMap]] = {
    "softmax": lambda r: SoftmaxAttention(mat(r), mat(r)),
    "softmax-qkv": head,
    "l2": lambda r: L2Attention(mat(r, 2), mat(r, 2), mat(r)),
    "sinkhorn": lambda r: SinkhornAttention(mat(r), mat(r)),
    "sigmoid": lambda r: SigmoidAttention(mat(r), mat(r)),
    "relu": lambda r: ReLUAttention(mat(r), mat(r)),
    "linear": lambda r: LinearAttention(mat(r), mat(r)),
    "exponential": lambda r: ExponentialAttention(mat(r), mat(r)),
    "multihead": heads,
    "masked-softmax": lambda r: MaskedAttention(head(r)),
    "masked-linear": lambda r: MaskedAttention(LinearAttention(mat(r), mat(r))),
    "masked-multihead": lambda r: MaskedAttention(heads(r)),
    "layernorm": lambda r: LayerNorm(mat(r)[0], mat(r)[0], eps=1e-2),
    "rmsnorm": lambda r: RMSNorm(mat(r)[0], eps=1e-2),
    "mlp": lambda r: MLP(mat(r, 5), r.standard_normal(5), mat(r, D, 5), activation="tanh"),
    "residual": lambda r: Residual(SoftmaxAttention(mat(r), mat(r)), scale=0.5),
    "residual-masked": lambda r: Residual(MaskedAttention(head(r))),
    "compose": lambda r: Compose(LayerNorm(mat(r)[0], eps=1e-2), head(r)),
    "block-pre": lambda r: block(r, pre_norm=True, masked=False),
    "block-post": lambda r: block(r, pre_norm=False, masked=False),
    "block-masked": lambda r: block(r, pre_norm=True, masked=True),
}
