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
    GatedAttention,
    L2Attention,
    LayerNorm,
    LinearAttention,
    Mask,
    MaskedAttention,
    MultiHeadAttention,
    PositionBias,
    ReLUAttention,
    Residual,
    RMSNorm,
    RotaryAttention,
    Rotation,
    ScoreAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    Sum,
    TransformerBlock,
    grouped_queries,
)
from otattn.models import Transformer, load_model

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


def norm_of(rng: Rng, d: int) -> LayerNorm:
    return LayerNorm(1.0 + 0.3 * rng.standard_normal(d), rng.standard_normal(d), eps=1e-3)


def norm(rng: Rng) -> LayerNorm:
    return norm_of(rng, D)


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
        "bert": syn.bert(syn.bert_weights(rng, d=D, hidden=5), num_heads=3, eps=1e-3),
        "gpt2": syn.gpt2(syn.gpt2_weights(rng, d=D), num_heads=1, eps=0.1),
        "llama": load_model(syn.llama_weights(rng, d=D, heads=2, kv=1, hidden=5, width=2), config=given),
    }


def rms(rng: Rng, k: int) -> RMSNorm:
    return RMSNorm(1.0 + 0.3 * rng.standard_normal(k), eps=0.3)


def score(rng: Rng, *, k: int = 4, e: int = D, **parts: object) -> ScoreAttention:
    biases = {"query_bias": rng.standard_normal(k), "key_bias": rng.standard_normal(k)}
    biases["value_bias"] = rng.standard_normal(e)
    return ScoreAttention(mat(rng, k), mat(rng, k), mat(rng, e), **biases, **parts)  # type: ignore[arg-type]


def every_part(rng: Rng, e: int = 2) -> ScoreAttention:
    """All parts at once, as no single model has them."""
    return score(
        rng,
        e=e,
        query_norm=rms(rng, 4),
        key_norm=rms(rng, 4),
        value_norm=rms(rng, e),
        rotation=Rotation([1.3], layout="adjacent"),
        bias=PositionBias(0.3, table=rng.standard_normal(7)),
        cap=0.8,
        mask=Mask(before=3),
        sink=0.4,
    )


def grouped(rng: Rng) -> MultiHeadAttention:
    """Two heads of queries on one of keys, each with a sink of its own."""
    Q, K, V = mat(rng, 8), mat(rng, 4), mat(rng, 2)
    own = [{"sink": 0.3}, {"sink": -1.0}]
    return grouped_queries(Q, K, V, mat(rng, D, 4), num_heads=2, num_kv_heads=1, per_head=own, rotation=Rotation([1.0]))


SCORES: dict[str, Callable[[Rng], AttentionMap]] = {
    "score": lambda r: score(r),
    "score-rotation": lambda r: score(r, rotation=Rotation.of_base(50.0, 4)),
    "score-alibi": lambda r: score(r, bias=PositionBias(0.5), mask=Mask()),
    "score-t5": lambda r: score(r, scale=1.0, bias=PositionBias(table=r.standard_normal(5))),
    "score-window": lambda r: score(r, mask=Mask(before=2)),
    "score-window-open": lambda r: score(r, mask=Mask(False, before=2, after=2.5), length=4.0, e=2),
    "score-blocks": lambda r: score(r, mask=Mask.blocks([1, 1], causal=False), length=2.0),
    "score-qk-norm": lambda r: score(r, query_norm=rms(r, 4), key_norm=norm_of(r, 4)),
    "score-cosine": lambda r: score(r, query_norm=RMSNorm([0.5] * 4), key_norm=RMSNorm([0.5] * 4, eps=0.1), scale=3.0),
    "score-value-norm": lambda r: score(r, value_norm=rms(r, D)),
    "score-cap": lambda r: score(r, cap=0.7, e=2),
    "score-sink": lambda r: score(r, mask=Mask(), sink=0.5),
    "score-sink-open": lambda r: score(r, sink=-0.5, length=2.0, e=5),
    "score-every-part": every_part,
    "gated": lambda r: GatedAttention(qkv(r, 2, 2), mat(r, 2), r.standard_normal(2)),
    "gated-alike": lambda r: GatedAttention(MaskedAttention(qkv(r, 2)), mat(r, 1)),
    "gated-score": lambda r: GatedAttention(every_part(r), mat(r, 2)),
    "grouped": grouped,
    "block-score": lambda r: TransformerBlock(
        every_part(r, D), mlp(r), attention_norm=norm(r), mlp_norm=norm(r), pre_norm=True
    ),
}
"""Attention with composed logits."""

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
    "sinkhorn-n_iter=1": lambda r: SinkhornAttention(mat(r), mat(r), n_iter=1),
    "sinkhorn-n_iter=5-e=2": lambda r: SinkhornAttention(mat(r), mat(r, 2), n_iter=5),
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
    "sum": lambda r: Sum(qkv(r, 2), mlp(r, "tanh")),
    "sum-masked": lambda r: Residual(Sum(Compose(norm(r), MaskedAttention(qkv(r, 2))), Compose(norm(r), mlp(r)))),
    "block-pre": lambda r: block(r, True),
    "block-post": lambda r: block(r, False),
    "block-masked-pre": lambda r: block(r, True, masked=True),
    "block-masked-post": lambda r: block(r, False, masked=True),
    "network-bert": lambda r: networks(r)["bert"].map(),
    "network-gpt2": lambda r: networks(r)["gpt2"].map(),
    "network-llama": lambda r: networks(r)["llama"].map(),
    "network-gpt2-last-layer": lambda r: networks(r)["gpt2"].map(-1, final_norm=False),
    **SCORES,
}
