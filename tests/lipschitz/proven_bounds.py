"""One ordinary bound of each theorem and relaxation, by name: what the tests of proofs and of tampering run over."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from otattn import bounds
from otattn.attention import (
    MLP,
    Compose,
    ExponentialAttention,
    FeedForward,
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
    TransformerBlock,
)
from otattn.lipschitz import bound, certify, relaxations
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Certificate
from otattn.lipschitz.upper.multi_head import head_with_values
from otattn.measures import Ball, Box, Ellipsoid, LayerNormDomain, PointSet

rng = np.random.default_rng(11)
A, V = 0.6 * rng.standard_normal((3, 3)), rng.standard_normal((2, 3))
Q, K = rng.standard_normal((2, 1, 6))
SHAPE = np.array([[0.9, 0.2, 0.0], [0.0, 0.5, 0.1], [0.1, 0.0, 0.7]])
DOMAINS = {
    "ball": Ball(0.9),
    "ellipsoid": Ellipsoid(SHAPE, [0.3, -0.1, 0.2]),
    "layer_norm": LayerNormDomain([0.5, 0.8, 0.3]),
    "box": Box([-0.7, -0.2, 0.1], [0.4, 0.9, 0.8]),
    "points": PointSet([[0.3, 0.2, -0.5], [-0.6, 0.1, 0.4], [0.2, -0.7, 0.1], [0.0, 0.5, 0.6]]),
}
SOFTMAX = SoftmaxAttention(A, V)
BIASED = SoftmaxAttention(A, V, bias=[0.2, -0.4, 0.1])
FACTORED = SoftmaxAttention.from_qkv(Q, K, rng.standard_normal((1, 6)), query_bias=[0.3])
IDENTITY = SoftmaxAttention.from_qkv(Q, K, np.eye(6))
L2 = L2Attention(0.5 * A, 0.4 * A.T + 0.1 * np.eye(3), V)
TIED = L2Attention(0.5 * A, 0.5 * A, 0.3 * A)
ROTARY = RotaryAttention(0.4 * A[:2], 0.3 * A[1:], V, query_bias=[0.1, 0.2])
SINKHORN = SinkhornAttention(A, V, tol=1e-12)
QK = {"query_norm": RMSNorm([0.9, -0.6], eps=0.2), "key_norm": LayerNorm([0.7, 1.1], [0.2, -0.1], eps=0.3)}
SCORES = {
    "capped": ScoreAttention(A[:2], A[1:], V, cap=0.4, query_bias=[0.1, 0.2], key_bias=[0.3, -0.2]),
    "normed": ScoreAttention(A[:2], A[1:], V, **QK, sink=0.3, length=2.0, value_bias=[0.4, 0.1]),
    "causal": ScoreAttention(A[:2], A[1:], V, cap=0.4, rotation=Rotation([1.0]), mask=Mask(), sink=0.2),
    "window": ScoreAttention(
        A[:2], A[1:], V, **QK, mask=Mask(False, before=2, after=1), bias=PositionBias(0.1, table=[0.2, 0.0, 0.5])
    ),
    "blocks": ScoreAttention(A[:2], A[1:], V, cap=0.4, mask=Mask.blocks([2, 3])),
}
HEADS = MultiHeadAttention([SOFTMAX, SoftmaxAttention(A.T, V)], [rng.standard_normal((2, 2)) for _ in range(2)])
GATES = {
    "softmax": GatedAttention(SOFTMAX, rng.standard_normal((2, 3)), [0.3, -0.5]),
    "score": GatedAttention(SCORES["window"], rng.standard_normal((1, 3))),
}
GROUPED = MultiHeadAttention([SCORES["causal"], SCORES["window"]], [rng.standard_normal((3, 2)) for _ in range(2)])
SEVERAL = MultiHeadAttention([SOFTMAX, L2], [rng.standard_normal((3, 2)) for _ in range(2)])
PSD = SoftmaxAttention(np.diag([1.5, 1.0, 1.2]), V)
NEGATIVE = SoftmaxAttention(-3.0 * np.eye(3), V)
UNNORMALISED = {
    "linear": LinearAttention(A, V),
    "relu": ReLUAttention(A, V),
    "sigmoid": SigmoidAttention(A, V),
    "exponential": ExponentialAttention(A, V),
}
SQUARE = SoftmaxAttention(A, A.T)
PERCEPTRON = MLP(rng.standard_normal((4, 3)), rng.standard_normal(4), rng.standard_normal((3, 4)))
GATED = FeedForward(
    rng.standard_normal((4, 3)), rng.standard_normal((3, 4)), activation="silu", gate=rng.standard_normal((4, 3))
)
NORM = LayerNorm([0.9, -0.4, 1.2], [0.1, 0.0, -0.3], eps=0.05)
BLOCKS = {
    "pre": TransformerBlock(SQUARE, PERCEPTRON, attention_norm=NORM, mlp_norm=RMSNorm([0.5, 0.7, 1.0], eps=0.1)),
    "post": TransformerBlock(MaskedAttention(SQUARE), GATED, attention_norm=NORM, mlp_norm=NORM, pre_norm=False),
    "norm": NORM,
    "residual": Residual(MultiHeadAttention([ROTARY], [rng.standard_normal((3, 2))]), scale=-0.5),
}
Maker = Callable[[], Bound]


def closed_forms() -> dict[str, Maker]:
    """Every closed form on every domain that it takes, for n tokens and any measure, and several orders."""
    out: dict[str, Maker] = {}

    def add(name: str, function: Callable[..., Bound], *args: object, **kwargs: object) -> None:
        out[name] = functools.partial(function, *args, **kwargs)

    for n, p in ((1, 2.0), (4, 2.0), (4, 3.0), (4, math.inf)):
        add(f"l2_tied_bound-{n}-{p}", bounds.l2_tied_bound, TIED, n=n, p=p)
    for place, domain in DOMAINS.items():
        for name, head in (("plain", SOFTMAX), ("biased", BIASED)):
            at = f"{name}-{place}"
            masked = MaskedAttention(head)
            add(f"field_bound-{at}", bounds.field_bound, head, domain=domain)
            for n in (None, 5):
                add(f"column_sum-{at}-{n}", bounds.column_sum, head, domain=domain, n=n)
                for p in (1.0, 1.5, 2.0, 3.0, math.inf):
                    add(f"column_bound-{at}-{n}-{p}", bounds.column_bound, head, domain=domain, n=n, p=p)
                for p in (2.0, 3.0, math.inf):
                    add(f"density_bound-{at}-{n}-{p}", bounds.density_bound, head, domain=domain, n=n, p=p)
            for n in (1, 2, 7):
                add(f"row_bound-{at}-{n}", bounds.row_bound, head, domain=domain, n=n)
            for n in (3, 200):
                add(f"masked_row_bound-{at}-{n}", bounds.masked_row_bound, masked, domain=domain, n=n)
                for p in (1.0, 1.5, 2.0, math.inf):
                    add(
                        f"masked_column_bound-{at}-{n}-{p}", bounds.masked_column_bound, masked, domain=domain, n=n, p=p
                    )
            for p in (1.5, 2.0, 4.0):
                add(f"masked_average_bound-{at}-{p}", bounds.masked_average_bound, masked, domain=domain, p=p)
        for n in (1, 4):
            add(f"l2_row_bound-{place}-{n}", bounds.l2_row_bound, L2, domain=domain, n=n)
            add(f"l2_column_bound-masked-{place}-{n}", bounds.l2_column_bound, MaskedAttention(L2), domain=domain, n=n)
            add(f"rotary_row_bound-{place}-{n}", bounds.rotary_row_bound, ROTARY, domain=domain, n=n)
            add(f"rotary_gram_bound-{place}-{n}", bounds.rotary_gram_bound, ROTARY, domain=domain, n=n)
        for n, p in ((None, 1.0), (None, 2.0), (4, 3.0), (None, math.inf)):
            add(f"l2_column_bound-{place}-{n}-{p}", bounds.l2_column_bound, L2, domain=domain, n=n, p=p)
            for name, head in (("two", HEADS), ("mixed", SEVERAL)):
                add(f"multi_head-{name}-{place}-{n}-{p}", bounds.multi_head, head, domain=domain, n=n, p=p)
        for name, head in SCORES.items():
            for n in (1, 4):
                add(f"score_row_bound-{name}-{place}-{n}", bounds.score_row_bound, head, domain=domain, n=n)
                for p in (1.0, 1.5, 2.0, math.inf):
                    at = f"{name}-{place}-{n}-{p}"
                    add(f"score_column_bound-{at}", bounds.score_column_bound, head, domain=domain, n=n, p=p)
        for n, p in ((1, 2.0), (4, 1.0), (4, 2.0)):
            for name, head in GATES.items():
                add(f"gated_bound-{name}-{place}-{n}-{p}", bounds.gated_bound, head, domain=domain, n=n, p=p)
            add(f"heads_bound-{place}-{n}-{p}", bounds.heads_bound, GROUPED, domain=domain, n=n, p=p)
        for p in (1.5, 3.0):
            at = f"causal-{place}-{p}"
            add(f"score_average_bound-{at}", bounds.score_average_bound, SCORES["causal"], domain=domain, p=p)
            add(
                f"score_column_bound-capped-{place}-{p}",
                bounds.score_column_bound,
                SCORES["capped"],
                domain=domain,
                p=p,
            )
        for name, head in UNNORMALISED.items():
            add(f"pointwise_bound-{name}-{place}", bounds.pointwise_bound, head, domain=domain, p=2.0)
        for n, p in ((1, 2.0), (None, 2.0), (5, 1.0), (None, 1.5), (3, 4.0), (None, math.inf)):
            add(f"sinkhorn_bound-{place}-{n}-{p}", bounds.sinkhorn_bound, SINKHORN, domain=domain, n=n, p=p)
        for name, head in (
            ("two", HEADS),
            ("biased", BIASED),
            ("l2", L2),
            ("sinkhorn", SINKHORN),
            *UNNORMALISED.items(),
        ):
            add(f"value_bound-{name}-{place}", bounds.value_bound, head, domain=domain)
            add(f"heads_field_bound-{name}-{place}", bounds.heads_field_bound, head, domain=domain)
            for n, p in ((None, 2.0), (4, 1.5), (4, 2.0)):
                at = f"{name}-{place}-{n}-{p}"
                add(f"fixed_query_bound-{at}", bounds.fixed_query_bound, head, domain=domain, n=n, p=p)
        for name, block in BLOCKS.items():
            add(f"whole_block-{name}-{place}", bounds.whole_block, block, domain=domain, n=4)
    everywhere = ScoreAttention(A[:2], A[1:], V, **QK, value_norm=RMSNorm([0.8, 1.3], eps=0.1))
    for n in (1, 4):
        add(f"score_row_bound-everywhere-{n}", bounds.score_row_bound, everywhere, n=n)
        add(f"score_column_bound-everywhere-{n}", bounds.score_column_bound, everywhere, n=n, p=1.5)
    for n in (1, 6):
        for name, head in (("plain", SOFTMAX), ("biased", BIASED)):
            add(f"castin2024_discrete-{name}-{n}", bounds.castin2024_discrete, head, radius=0.8, n=n)
            add(f"castin2024_masked-{name}-{n}", bounds.castin2024_masked, MaskedAttention(head), radius=0.8, n=n)
            add(f"castin2024_multi_head-{name}-{n}", bounds.castin2024_multi_head, HEADS, radius=0.8, n=n)
            add(f"castin2024_multi_head-{name}", bounds.castin2024_multi_head, HEADS, radius=0.8, n=None)
            add(f"geshkovski2024_mean_field-{name}-{n}", bounds.geshkovski2024_mean_field, head, radius=0.8)
        for name, head in (("factored", FACTORED), ("identity", IDENTITY)):
            add(f"row_bound-{name}-ball-{n}", bounds.row_bound, head, radius=0.8, n=n)
            add(f"row_bound-{name}-box-{n}", bounds.row_bound, head, domain=Box([-1.0] * 6, [0.5] * 6), n=n)
            add(
                f"column_bound-{name}-ellipsoid-{n}", bounds.column_bound, head, n=n, domain=Ellipsoid(np.eye(6)[:, :4])
            )
    return out


def relaxed() -> dict[str, Maker]:
    """Every relaxation on the domains that it takes."""
    out: dict[str, Maker] = {}
    for place, domain in DOMAINS.items():
        for name, head in (("plain", SOFTMAX), ("biased", BIASED)):
            out[f"field_certificate-{name}-{place}"] = functools.partial(
                relaxations.field_certificate, head, domain=domain
            )
            out[f"kappa-{name}-{place}"] = functools.partial(relaxations.column_exponent, head, domain=domain)
            for n in (1, 5):
                out[f"self_entropy-{name}-{place}-{n}"] = functools.partial(
                    relaxations.self_entropy, head, domain=domain, n=n
                )
                out[f"row_constant-{name}-{place}-{n}"] = functools.partial(
                    relaxations.row_certificate, head, domain=domain, n=n
                )
    flat = SoftmaxAttention(A[:2, :2], V[:, :2])
    out["field_certificate-plane"] = functools.partial(
        relaxations.field_certificate, flat, domain=Box([-1.0, 0.2], [0.5, 0.9])
    )
    out["field_certificate-sdp"] = functools.partial(
        relaxations.field_certificate, SOFTMAX, domain=DOMAINS["box"], solver="CLARABEL"
    )
    out["interval_simplex"] = functools.partial(
        relaxations.interval_simplex, DOMAINS["points"].points, [0.1, 0.0, 0.2, 0.05], [0.6, 0.5, 0.9, 0.3]
    )
    for values in ("identity", "own"):
        out[f"multihead-{values}"] = functools.partial(combined, values)
    return out


def combined(values: str) -> Bound:
    """The multi-head relaxation from closed forms of its heads."""
    heads = [head_with_values(HEADS, h, None) if values == "identity" else HEADS.heads[h] for h in (0, 1)]
    return bounds.multi_head(HEADS, head_bounds=[bounds.column_bound(head, radius=0.8, n=4) for head in heads])


def searched() -> dict[str, Maker]:
    """The relaxations by branch and bound: seconds each."""
    out: dict[str, Maker] = {
        "psd": lambda: relaxations.psd(PSD, radius=1.0, n=3, effort="fast"),
        "negative_identity": lambda: relaxations.negative_identity(NEGATIVE, radius=1.0, n=4),
        "psd_mean_field": lambda: relaxations.psd_mean_field(PSD, radius=1.0),
        "sinkhorn_symmetric": lambda: relaxations.sinkhorn_symmetric(SinkhornAttention(2.0 * np.eye(3), V), radius=1.0),
        "logit_gap": lambda: relaxations.logit_gap(SOFTMAX, radius=2.0),
        "frontier_rows": lambda: relaxations.frontier_rows(SOFTMAX, radius=1.0, n=4),
    }
    for name, head, domain in (
        ("plain", SOFTMAX, DOMAINS["ball"]),
        ("biased", BIASED, DOMAINS["ellipsoid"]),
        ("plain", SOFTMAX, DOMAINS["points"]),
    ):
        place = type(domain).__name__
        out[f"rows_and_columns-{name}-{place}"] = functools.partial(
            relaxations.rows_and_columns, head, domain=domain, n=4
        )
        if name == "biased":
            out[f"rows_and_columns-masked-{place}"] = functools.partial(
                relaxations.rows_and_columns, MaskedAttention(head), domain=domain, n=4
            )
        out[f"two_tokens-{name}-{place}"] = functools.partial(relaxations.two_tokens, head, domain=domain)
        for p in (1.0, 2.0, 4.0, math.inf):
            out[f"mean_field-{name}-{place}-{p}"] = functools.partial(relaxations.mean_field, head, domain=domain, p=p)
    tokens = DOMAINS["points"].points
    out["second_order"] = lambda: certify(BIASED, tokens, radius=1e-3, kind="constant")
    out["second_order/pairs"] = lambda: certify(BIASED, tokens, radius=1e-3)
    return out


def float_only() -> dict[str, Maker]:
    """What has no rigorous evaluation."""
    tokens = DOMAINS["points"].points
    return {
        "kim2021_l2": lambda: bounds.kim2021_l2(TIED, n=4),
        "at_measure_bound": lambda: bounds.at_measure_bound(HEADS, tokens),
        "near_tokens": lambda: relaxations.near_tokens(BIASED, tokens, 0.05),
        "near_tokens-global": lambda: relaxations.near_tokens(
            SOFTMAX, tokens, 0.5, global_bound=bounds.row_bound(SOFTMAX, radius=1.5, n=4)
        ),
        "second_order-stack": lambda: certify(
            Compose(RMSNorm(np.ones(3)), BIASED), tokens, radius=1e-3, kind="constant"
        ),
        "second_order/pairs-residual": lambda: certify(Residual(SoftmaxAttention(A, A)), tokens, radius=1e-3),
    }


@contextmanager
def evaluated_once() -> Iterator[None]:
    """What a statement proves is evaluated once in each arithmetic, however many values are claimed for it.

    Evaluations depend on the statement and the multipliers alone; they, and no value, are the key.
    """
    known: dict[tuple[object, ...], tuple[Any, Exception | None, object]] = {}

    def once(key: tuple[object, ...], call: Callable[[], Any], parts: object) -> Any:
        if key not in known:
            try:
                known[key] = call(), None, parts
            except Exception as error:
                known[key] = None, error, parts
        found, error, _ = known[key]  # the parts are kept, so that no other object gets their identity
        if error is not None:
            raise error
        return found

    prove, proved_value = bound.prove, Certificate.proved_value

    def prove_once(theorem: str, *statement: Any, exact: bool = False) -> Bound:
        attention, domain, n, p = statement
        key = (theorem, id(attention), id(domain), repr(n), repr(p), exact)
        return once(key, lambda: prove(theorem, *statement, exact=exact), statement)

    def proved_once(self: Certificate, *, rigorous: bool = False) -> float:
        multipliers = [
            (k, v.dtype.str, v.shape, v.tobytes()) for k, x in self.multipliers.items() for v in (np.asarray(x),)
        ]
        options = [(k, id(v)) for k, v in self.options.items()]
        where = (
            self.relaxation,
            self.quantity,
            id(self.attention),
            id(self.domain),
            repr(self.n),
            repr(self.p),
            rigorous,
        )
        return once((*where, *multipliers, *options), lambda: proved_value(self, rigorous=rigorous), self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "prove", prove_once)
        patch.setattr(Certificate, "proved_value", proved_once)
        yield
