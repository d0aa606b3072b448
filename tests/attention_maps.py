"""Every map of the library with random parameters on R^3: the list that the conformance suite runs over."""

import sys
from collections.abc import Callable
from pathlib import Path

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
    RotaryAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    TransformerBlock,
)
from otattn.models import Transformer, bert, gpt2, llama

sys.path.append(str(Path(__file__).parent / "models"))
import synthetic as syn

D = 3
Rng = np.random.Generator


def mat(rng: Rng, rows: int = D, columns: int = D, scale: float = 0.6) -> np.ndarray:
    return scale * rng.standard_normal((rows, columns))


def qkv(rng: Rng, k: int, e: int = D) -> SoftmaxAttention:
    return SoftmaxAttention.from_qkv(
        mat(rng, k),
        mat(rng, k),
        mat(rng, e),
        query_bias=rng.standard_normal(k),
        key_bias=rng.standard_normal(k),
        value_bias=rng.standard_normal(e),
    )


def sinkhorn(rng: Rng, e: int = D) -> SinkhornAttention:
    # the derivative is compared with differences of values, so the marginals are wanted to rounding
    return SinkhornAttention(mat(rng), mat(rng, e), tol=1e-14)


def mixed(rng: Rng) -> MultiHeadAttention:
    heads = [
        qkv(rng, 2, 2),
        L2Attention(mat(rng), mat(rng), mat(rng)),
        sinkhorn(rng, 4),
        SigmoidAttention(mat(rng), mat(rng)),
    ]
    return MultiHeadAttention(
        heads, [mat(rng, 2, 2), mat(rng, 2), mat(rng, 2, 4), mat(rng, 2)], output_bias=[1.0, -1.0]
    )


def mlp(rng: Rng, activation: str = "gelu", e: int = D) -> MLP:
    return MLP(
        mat(rng, 5),
        rng.standard_normal(5),
        mat(rng, e, 5),
        activation=activation,
        output_bias=mat(rng, e)[:, 0],
    )


def norm(rng: Rng) -> LayerNorm:
    return LayerNorm(1.0 + 0.3 * rng.standard_normal(D), rng.standard_normal(D), eps=1e-3)


def block(rng: Rng, pre_norm: bool, *, masked: bool = False) -> TransformerBlock:
    attention: AttentionMap = MultiHeadAttention([qkv(rng, 2, 2), qkv(rng, 2, 2)], [mat(rng, D, 2), mat(rng, D, 2)])
    attention = MaskedAttention(attention) if masked else attention
    return TransformerBlock(attention, mlp(rng), attention_norm=norm(rng), mlp_norm=norm(rng), pre_norm=pre_norm)


def networks(rng: Rng) -> dict[str, Transformer]:
    """Two layers of each family on tokens of dimension 3."""
    given = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-3,
        "hidden_act": "silu",
        "head_dim": 2,
    }
    return {
        "bert": bert(syn.bert_weights(rng, d=D, hidden=5), num_heads=3, eps=1e-3),
        "gpt2": gpt2(syn.gpt2_weights(rng, d=D), num_heads=1, eps=0.1),
        "llama": llama(syn.llama_weights(rng, d=D, heads=2, kv=1, hidden=5, width=2), config=given),
    }


MAPS: dict[str, Callable[[Rng], AttentionMap]] = {
    "softmax": lambda r: SoftmaxAttention(mat(r), mat(r)),
    "softmax-bias": lambda r: SoftmaxAttention(mat(r), mat(r), bias=[1.0, 0.0, -1.0], value_bias=[0.0, 2.0, 0.0]),
    "softmax-e=2": lambda r: SoftmaxAttention(mat(r), mat(r, 2)),
    "softmax-e=5": lambda r: SoftmaxAttention(mat(r), mat(r, 5)),
    "softmax-qkv-k=2": lambda r: qkv(r, 2),
    "softmax-qkv-k=5": lambda r: qkv(r, 5, 2),
    "l2": lambda r: L2Attention(mat(r), mat(r), mat(r)),
    "l2-k=2-e=4": lambda r: L2Attention(mat(r, 2), mat(r, 2), mat(r, 4)),
    "sinkhorn": lambda r: sinkhorn(r),
    "sinkhorn-e=4": lambda r: sinkhorn(r, 4),
    "sigmoid": lambda r: SigmoidAttention(mat(r), mat(r, 2)),
    "relu": lambda r: ReLUAttention(mat(r), mat(r, 4)),
    "linear": lambda r: LinearAttention(mat(r), mat(r, 2)),
    "exponential": lambda r: ExponentialAttention(mat(r), mat(r, 4)),
    "multihead": lambda r: MultiHeadAttention([qkv(r, 2, 2), qkv(r, 2, 1)], [mat(r, 4, 2), mat(r, 4, 1)]),
    "multihead-summed": lambda r: MultiHeadAttention([qkv(r, 2), SoftmaxAttention(mat(r), mat(r))]),
    "multihead-mixed": mixed,
    "masked-softmax": lambda r: MaskedAttention(SoftmaxAttention(mat(r), mat(r), bias=[0.5, 0.0, 0.0])),
    "masked-softmax-qkv": lambda r: MaskedAttention(qkv(r, 2, 2)),
    "masked-l2": lambda r: MaskedAttention(L2Attention(mat(r), mat(r), mat(r))),
    "masked-sigmoid": lambda r: MaskedAttention(SigmoidAttention(mat(r), mat(r))),
    "masked-relu": lambda r: MaskedAttention(ReLUAttention(mat(r), mat(r))),
    "masked-linear": lambda r: MaskedAttention(LinearAttention(mat(r), mat(r))),
    "masked-exponential": lambda r: MaskedAttention(ExponentialAttention(mat(r), mat(r))),
    "masked-multihead": lambda r: MaskedAttention(
        MultiHeadAttention([qkv(r, 2, 2), L2Attention(mat(r), mat(r), mat(r))], [mat(r, 2, 2), mat(r, 2)])
    ),
    "multihead-of-masked": lambda r: MultiHeadAttention([MaskedAttention(qkv(r, 2)), MaskedAttention(qkv(r, 2))]),
    "rotary": lambda r: RotaryAttention(mat(r, 4), mat(r, 4), mat(r), base=50.0, key_bias=r.standard_normal(4)),
    "rotary-half": lambda r: RotaryAttention(mat(r, 4), mat(r, 4), mat(r, 2), base=50.0, layout="half"),
    "rotary-open": lambda r: RotaryAttention(mat(r, 2), mat(r, 2), mat(r), base=50.0, masked=False),
    "multihead-of-rotary": lambda r: MultiHeadAttention(
        [RotaryAttention(mat(r, 4), mat(r, 4), mat(r, 2)), RotaryAttention(mat(r, 2), mat(r, 2), mat(r, 2))],
        [mat(r, 3, 2), mat(r, 3, 2)],
    ),
    "layernorm": lambda r: LayerNorm(mat(r)[0], mat(r)[0]),
    "layernorm-eps": norm,
    "rmsnorm": lambda r: RMSNorm(mat(r)[0], eps=1e-2),
    "mlp-gelu": lambda r: mlp(r, "gelu", 2),
    "mlp-relu": lambda r: mlp(r, "relu"),
    "mlp-silu": lambda r: mlp(r, "silu", 4),
    "mlp-tanh": lambda r: mlp(r, "tanh"),
    "mlp-identity": lambda r: mlp(r, "identity"),
    "residual": lambda r: Residual(SoftmaxAttention(mat(r), mat(r)), scale=0.5),
    "residual-masked": lambda r: Residual(MaskedAttention(qkv(r, 2))),
    "compose": lambda r: Compose(Residual(qkv(r, 2)), norm(r), L2Attention(mat(r), mat(r), mat(r, 2))),
    "compose-nested": lambda r: Compose(Compose(norm(r), Residual(sinkhorn(r))), Compose(qkv(r, 2), mlp(r, "tanh", 2))),
    "compose-masked": lambda r: Compose(
        norm(r), MaskedAttention(qkv(r, 2)), Residual(SigmoidAttention(mat(r), mat(r)))
    ),
    "block-pre": lambda r: block(r, True),
    "block-post": lambda r: block(r, False),
    "block-masked-pre": lambda r: block(r, True, masked=True),
    "block-masked-post": lambda r: block(r, False, masked=True),
    "network-bert": lambda r: networks(r)["bert"].map(),
    "network-gpt2": lambda r: networks(r)["gpt2"].map(),
    "network-llama": lambda r: networks(r)["llama"].map(),
    "network-gpt2-last-layer": lambda r: networks(r)["gpt2"].map(-1, final_norm=False),
}
