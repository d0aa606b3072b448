"""Which maps have certificates near given tokens: rotary heads, decoders, nested sums; and which are refused by name."""

from dataclasses import replace

import climbing
import numpy as np
import pytest

import otattn as oa
from otattn.attention import RotaryAttention, Sum
from otattn.lipschitz.near.build import chain_at
from otattn.lipschitz.near.heads import heads_at
from otattn.lipschitz.near.rotary import lifted
from otattn.models import FeedForward

rng = np.random.default_rng(11)
X = rng.standard_normal((5, 3))


def drawn(*shape):
    return rng.standard_normal(shape)


def rotary(**options):
    biases = {"query_bias": drawn(4), "key_bias": drawn(4), "value_bias": drawn(2)}
    return RotaryAttention(0.5 * drawn(4, 3), 0.5 * drawn(4, 3), drawn(2, 3), base=10.0, **biases, **options)


FIRST, SECOND, OPEN = rotary(), rotary(), rotary(masked=False)
SHARED = RotaryAttention(0.5 * drawn(4, 3), FIRST.K, FIRST.V, base=10.0, key_bias=FIRST.key_bias)
ROTARY = {
    "one": FIRST,
    "halves": rotary(layout="half", rotary_dim=2, scale=0.3),
    "length": rotary(length=2.5),
    "open": OPEN,
    "several": oa.MultiHeadAttention([FIRST, SECOND], [drawn(3, 2), drawn(3, 2)], output_bias=drawn(3)),
    "summed": oa.MultiHeadAttention([FIRST, SECOND]),
    "shared keys": oa.MultiHeadAttention([FIRST, SHARED], [drawn(3, 2), drawn(3, 2)]),
}
PLAIN = oa.SoftmaxAttention(0.5 * drawn(3, 3), drawn(2, 3), bias=drawn(3))
SUM = oa.MultiHeadAttention([PLAIN, PLAIN], [drawn(3, 2), drawn(3, 2)], output_bias=drawn(3))
NORM, ROOT = oa.LayerNorm([1.0, 0.7, 1.3], drawn(3), eps=1e-2), oa.RMSNorm([1.0, 0.7, 1.3], eps=1e-2)
LLAMA = oa.TransformerBlock(
    ROTARY["several"],
    FeedForward(0.4 * drawn(6, 3), 0.4 * drawn(3, 6), activation="silu", gate=0.4 * drawn(6, 3)),
    attention_norm=ROOT,
    mlp_norm=ROOT,
)
GPT2 = oa.TransformerBlock(
    oa.MaskedAttention(SUM),
    FeedForward(0.4 * drawn(6, 3), 0.4 * drawn(3, 6), activation="gelu_tanh", up_bias=drawn(6), down_bias=drawn(3)),
    attention_norm=NORM,
    mlp_norm=NORM,
)
PERCEPTRON = FeedForward(0.4 * drawn(6, 3), 0.4 * drawn(3, 6), activation="gelu", up_bias=drawn(6), down_bias=drawn(3))
NEOX = oa.Residual(Sum(oa.Compose(NORM, ROTARY["several"]), oa.Compose(ROOT, PERCEPTRON)))
DECODERS = {
    "neox": oa.Compose(NEOX, NEOX, NORM),
    "a sum": Sum(SUM, oa.Residual(PERCEPTRON, scale=-0.5), NORM),
    "llama": oa.Compose(LLAMA, LLAMA, ROOT),
    "gpt2": oa.Compose(GPT2, GPT2, NORM),
    "nested": oa.Residual(oa.Compose(NORM, oa.Residual(oa.Compose(oa.Compose(SUM), oa.Residual(ROOT, scale=0.2))))),
    "sum in a sum": oa.Compose(oa.MultiHeadAttention([oa.MultiHeadAttention([PLAIN], [drawn(3, 2)])]), NORM),
}


def norm(attention, tokens=X):
    return climbing.norm(attention, tokens)


def climbed(attention, r, both=False, starts=6):
    return climbing.climbed(attention, X, r, rng, both, starts)


@pytest.mark.parametrize("name", ROTARY)
def test_a_rotary_map_is_softmax_heads_of_turned_tokens(name):
    attention = ROTARY[name]
    lift, heads = lifted(attention, len(X))
    placed, error = lift.images(X)
    assert np.allclose(heads.on_tokens(placed), attention.on_tokens(X), rtol=0, atol=1e-13)
    J = heads.jacobian(placed).to_dense().reshape(-1, placed.size) @ lift.matrix(len(X))
    assert np.allclose(J, attention.jacobian(X).to_dense().reshape(J.shape), rtol=0, atol=1e-12)
    v, g = drawn(*X.shape), drawn(*placed.shape)
    assert np.allclose(lift.matrix(len(X)) @ v.ravel(), lift.jvp(v).ravel(), rtol=0, atol=1e-13)
    assert np.allclose(lift.matrix(len(X)).T @ g.ravel(), lift.vjp(g).ravel(), rtol=0, atol=1e-13)
    assert 0.0 < error < 1e-11
    image, lost = heads_at(heads, placed).images()
    assert np.abs(image - attention.on_tokens(X)).max() <= 1e-12
    assert 0.0 < lost < 1e-9
    assert not heads.causal or attention.masked if isinstance(attention, RotaryAttention) else heads.causal


def test_heads_share_rows():
    alone, shared = (len(lifted(ROTARY[name], 5)[0].L) for name in ("several", "shared keys"))
    assert alone == 2 * (4 + 4 + 2)
    assert shared == 2 * 4 + 4 + 2 + 2  # the values of the first have a bias


QUICK = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("gpt2", "neox") else name for name in (*ROTARY, *DECODERS)
]


@pytest.mark.parametrize("name", QUICK)
def test_it_tends_to_the_local_constant(name):
    attention = (ROTARY | DECODERS)[name]
    here = norm(attention)
    for kind in ("pairs", "constant"):
        values = [oa.certify(attention, X, radius=rho, kind=kind).value for rho in (1e-5, 1e-12)]
        assert values == sorted(values, reverse=True)
        assert here * (1 - 1e-12) <= values[-1] <= here * (1 + 1e-6)


@pytest.mark.parametrize("starts", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", QUICK)
def test_nothing_climbs_above(name, starts):
    attention = (ROTARY | DECODERS)[name]
    for kind in ("pairs", "constant"):
        bound = oa.certify(attention, X, radius=1e-3 if name in ROTARY else 1e-5, kind=kind)
        r = bound.domain.radius * np.sqrt(len(X))
        found = climbed(attention, r, both=kind == "constant", starts=starts)
        assert norm(attention) * 0.8 < found <= bound.value <= 3.0 * norm(attention)


@pytest.mark.parametrize("name", ["several", "a sum", pytest.param("llama", marks=pytest.mark.slow)])
def test_long_ones_by_products(name, monkeypatch):
    attention = (ROTARY | DECODERS)[name]
    monkeypatch.setattr("otattn.lipschitz.near.build.DENSE", 4)
    chain = chain_at(attention, X)
    assert chain.how == "probabilistic"
    assert norm(attention) <= chain.norm * (1 + 1e-9) <= norm(attention) * 1.05
    r = 1e-4
    assert climbed(attention, r) <= chain.stretch(r)
    assert climbed(attention, r, both=True) <= chain.constant(r)


def test_what_is_off_in_a_sum_adds():
    """Remainders of the branches are reached together where they point one way: the same branch twice."""
    one, two = (chain_at(m, X) for m in (SUM, Sum(SUM, SUM)))
    for r in (1e-3, 1e-2):
        assert two.remainder(r) == pytest.approx(2.0 * one.remainder(r), rel=1e-9)
        assert two.growth(r) == pytest.approx(2.0 * one.growth(r), rel=1e-9)
    assert two.image_error >= 2.0 * one.image_error


def test_biases_of_sums_inside_sums_move_the_tokens():
    """A bias that is lost inside would leave the norm of another network."""
    inner = oa.MultiHeadAttention([PLAIN], [drawn(3, 2)], output_bias=[5.0, -3.0, 1.0])
    for outer in (oa.MultiHeadAttention([inner, inner]), oa.MaskedAttention(oa.MultiHeadAttention([inner]))):
        attention = oa.Compose(outer, NORM)
        assert oa.certify(attention, X, radius=1e-10).value == pytest.approx(norm(attention), rel=1e-6)
    W = drawn(3, 3)
    summed = oa.MultiHeadAttention(
        [oa.MultiHeadAttention([oa.SoftmaxAttention(np.eye(3), W)], output_bias=[2.0, 1, 0])], [W]
    )
    attention = oa.Compose(summed, NORM)
    assert oa.certify(attention, X, radius=1e-10).value == pytest.approx(norm(attention), rel=1e-6)


def test_a_form_that_is_all_rounding_counts_as_such():
    """K^T Q is 0 up to rounding: with large tokens rounding alone moves the logits."""
    Q, K = np.array([[3.3e4, 0.0, 0.0, 0.0]] * 2), np.array([[1e4 / 3, 0.0, 0.0, 0.0], [-1e4 / 3, 0.0, 0.0, 0.0]])
    head = oa.SoftmaxAttention.from_qkv(Q, K, np.eye(4), scale=1.0)
    small, large = np.eye(4)[:3], 1e6 * np.eye(4)[:3]
    assert oa.certify(head, small, radius=1e-9).value == pytest.approx(norm(head, small), rel=1e-2)
    found = heads_at(head, large)
    assert np.all(np.abs(found.heads[0].P - 1.0 / 3.0) <= found.heads[0].dP)  # the exact form is 0
    image, lost = found.images()
    assert np.linalg.norm(image - large.mean(axis=0)) <= lost


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        (oa.L2Attention(np.eye(3), np.eye(3), np.eye(3)), "received L2Attention"),
        (Sum(NORM, oa.L2Attention(np.eye(3), np.eye(3), np.eye(3))), "received L2Attention"),
        (oa.Residual(oa.L2Attention(np.eye(3), np.eye(3), np.eye(3))), "received L2Attention"),
        (oa.MultiHeadAttention([PLAIN, oa.L2Attention(np.eye(3), np.eye(3), drawn(2, 3))]), "L2Attention among them"),
        (oa.MultiHeadAttention([FIRST, oa.MaskedAttention(PLAIN)]), "must be written as one sum"),
        (oa.MultiHeadAttention([FIRST, OPEN]), "must be written as one sum"),
        (oa.MultiHeadAttention([SUM], [drawn(2, 3)]), "output matrices at two levels"),
    ],
)
def test_what_has_none_is_named(attention, says):
    with pytest.raises(ValueError, match=says):
        oa.certify(attention, X, radius=1e-3)


def test_tampered_rotary_certificates():
    bound = oa.certify(FIRST, X, radius=1e-3)
    assert bound.verify()
    options = {"query_bias": FIRST.query_bias, "key_bias": FIRST.key_bias, "value_bias": FIRST.value_bias}
    same, faster, later = (
        RotaryAttention(FIRST.Q, FIRST.K, FIRST.V, base=base, length=length, **options)
        for base, length in ((10.0, 5.0), (3.0, 5.0), (10.0, 9.0))
    )
    assert replace(bound, attention=same).verify()
    steep = [m for m in (faster, later) if oa.certify(m, X, radius=1e-3).value > bound.value]
    assert steep
    for attention in steep:
        assert not replace(bound, attention=attention).verify()
    assert not replace(bound, value=bound.value * (1 - 1e-6)).verify()
    backwards = oa.certify(FIRST, X[::-1].copy(), radius=1e-3)
    assert replace(bound, domain=backwards.domain).verify() == (backwards.value <= bound.value)
    assert replace(backwards, domain=bound.domain).verify() == (
        bound.value <= backwards.value
    )  # the order is the sequence
