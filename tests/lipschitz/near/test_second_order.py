"""Certificates near given tokens: they tend to the local constant, say what they are about, and refuse what they do not cover."""

from dataclasses import replace

import numpy as np
import pytest

import otattn as oa
from otattn.errors import CertificateError
from otattn.lipschitz.containment import NearMeasure, domain_contains
from otattn.lipschitz.near import stack
from otattn.lipschitz.near.build import chain_at
from otattn.lipschitz.relaxations import near_tokens

RADII = (1e-1, 1e-2, 1e-4, 1e-6, 1e-9, 1e-12)
rng = np.random.default_rng(4)
X = rng.standard_normal((5, 3))
A, V, W = rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), rng.standard_normal((3, 2))
HEAD = oa.SoftmaxAttention(A, V, bias=rng.standard_normal(3))
SEVERAL = oa.MultiHeadAttention([HEAD, oa.SoftmaxAttention(A.T, V)], [W, 0.5 * W])
MLP = oa.MLP(rng.standard_normal((6, 3)), rng.standard_normal(6), rng.standard_normal((3, 6)))
NORM = oa.LayerNorm([1.0, 0.5, 2.0], eps=1e-3)
BLOCK = oa.TransformerBlock(SEVERAL, MLP, attention_norm=NORM, mlp_norm=oa.RMSNorm([1.0, 1.0, 0.7], eps=1e-3))
MAPS = {
    "head": HEAD,
    "masked": oa.MaskedAttention(HEAD),
    "several": SEVERAL,
    "block": BLOCK,
    "post": oa.TransformerBlock(SEVERAL, MLP, attention_norm=NORM, mlp_norm=NORM, pre_norm=False),
    "two": oa.Compose(BLOCK, oa.Residual(oa.MaskedAttention(SEVERAL), scale=0.3)),
}


def norm(attention, tokens):
    return float(np.linalg.norm(attention.jacobian(tokens).to_dense().reshape(-1, tokens.size), 2))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("kind", ["pairs", "constant"])
def test_it_tends_to_the_local_constant(name, kind):
    attention = MAPS[name]
    here = norm(attention, X)
    excess = []
    for rho in RADII[2:]:
        bound = oa.certify(attention, X, radius=rho, kind=kind)
        assert bound.details["how"] == ("margins" if name in ("block", "post", "two") else "proved")
        assert bound.value >= here * (1 - 1e-12)
        excess.append(bound.value / here - 1.0)
    assert excess == sorted(excess, reverse=True)
    assert excess[-1] < 1e-6  # what rounding costs
    assert excess[0] - excess[-1] == pytest.approx(100.0 * (excess[1] - excess[-1]), rel=0.3)  # linear in the radius


@pytest.mark.parametrize("masked", [False, True])
def test_local_ball_tends_to_the_local_constant(masked):
    attention = oa.MaskedAttention(HEAD) if masked else HEAD
    here = norm(attention, X)
    values = [near_tokens(attention, X, rho).value for rho in (*RADII, 0.0)]
    assert values == sorted(values, reverse=True)
    assert here * (1 - 1e-12) <= values[-1] <= values[-2] <= here * (1 + 1e-8)
    slope = (values[2] - values[-1]) / 1e-4
    assert all(v - values[-1] <= 2.0 * slope * rho + 1e-9 * here for v, rho in zip(values[2:], RADII[2:], strict=False))


def test_local_ball_tends_to_it_where_the_jacobian_is_large():
    """n e = 2240: the norm at the tokens is proved by a factorisation of a Gram matrix."""
    generator = np.random.default_rng(0)
    head = oa.SoftmaxAttention(generator.standard_normal((35, 35)) / 20, np.eye(35))
    tokens = generator.standard_normal((64, 35)) / 4
    bound = near_tokens(head, tokens, 1e-9)
    assert bound.details["local_value"] <= bound.value <= bound.details["local_value"] * (1 + 1e-6)
    assert bound.details["second_order"] <= bound.details["perturbation"]
    J = head.jacobian(tokens)
    v = generator.standard_normal(J.shape[1])
    for _ in range(30):
        v = J.rmatvec(J.matvec(v))
        v /= np.linalg.norm(v)
    assert np.linalg.norm(J.matvec(v)) <= bound.value


@pytest.mark.parametrize("name", ["head", "masked", "block"])
def test_pairs_in_the_wasserstein_ball(name):
    """Climbed from the top singular direction, atoms numbered anew: the distances are optimal matchings."""
    attention, rho = MAPS[name], 3e-2
    bound, wide = (oa.certify(attention, X, radius=rho, kind=kind) for kind in ("pairs", "constant"))
    generator = np.random.default_rng(1)
    image = attention.on_tokens(X)
    top = np.linalg.svd(attention.jacobian(X).to_dense().reshape(-1, X.size))[2][0].reshape(X.shape)
    best = 0.0
    for k in range(40):
        D = top if k < 2 else generator.standard_normal(X.shape)
        for _ in range(4):
            D = (-1.0) ** k * D * rho * np.sqrt(len(X)) / np.linalg.norm(D)
            moved = attention.on_tokens(X + D)
            if attention.causal:
                ratio = np.linalg.norm(moved - image) / np.linalg.norm(D)
            else:
                order = generator.permutation(len(X))
                ratio = oa.wasserstein(image, moved[order]) / oa.wasserstein(X, (X + D)[order])
            best = max(best, float(ratio))
            D = attention.jacobian(X + D).rmatvec((moved - image).ravel()).reshape(X.shape)
    assert norm(attention, X) < best <= bound.value <= wide.value


def test_a_stack_is_far_better_than_the_product_of_its_blocks():
    maps = [
        oa.Residual(oa.SoftmaxAttention(0.2 * rng.standard_normal((3, 3)), rng.standard_normal((3, 3))))
        for _ in range(6)
    ]
    whole = oa.Compose(*maps)
    bound = oa.certify(whole, X, radius=1e-9)
    tokens, product = X, 1.0
    for m in maps:
        product *= norm(m, tokens)
        tokens = m.on_tokens(tokens)
    assert bound.value == pytest.approx(norm(whole, X), rel=1e-4)
    assert product > 2.0 * bound.value


@pytest.mark.parametrize("kind", ["pairs", pytest.param("constant", marks=pytest.mark.slow)])
def test_the_largest_radius(kind):
    found = oa.certified_radius(BLOCK, X, factor=1.5, kind=kind)
    rho = found.domain.radius
    assert found.value <= 1.5 * found.details["norm"]
    assert oa.certify(BLOCK, X, radius=rho, kind=kind).value == pytest.approx(found.value, rel=1e-9)
    try:
        assert oa.certify(BLOCK, X, radius=1.02 * rho, kind=kind).value > 1.5 * found.details["norm"]
    except CertificateError:
        assert kind == "constant"


def test_the_largest_radius_of_an_affine_map():
    linear = oa.certified_radius(oa.MLP(np.eye(3), np.zeros(3), np.eye(3), activation="identity"), X)
    assert linear.domain.radius > 1e6  # affine: it never ends
    with pytest.raises(ValueError, match="factor must be above 1"):
        oa.certified_radius(BLOCK, X, factor=1.0)


def test_equal_tokens_double_the_radius_of_the_constant():
    """Two measures near one with a double atom need not match number by number."""
    twice = np.concatenate([X[:3], X[:1]])
    apart = X[:4]
    for tokens, factor in ((twice, 2.0), (apart, 1.0)):
        chain = chain_at(HEAD, tokens)
        bound = oa.certify(HEAD, tokens, radius=1e-3, kind="constant")
        assert bound.value == pytest.approx(chain.constant(factor * 1e-3 * 2.0), rel=1e-9)


@pytest.mark.parametrize("kind", ["pairs", pytest.param("constant", marks=pytest.mark.slow)])
def test_tampering(kind):
    bound = oa.certify(BLOCK, X, radius=1e-3, kind=kind)
    assert bound.verify()
    moved = X.copy()
    moved[0, 0] += 0.5
    for wrong in (
        {"value": bound.value * (1 - 1e-6)},
        {"domain": NearMeasure(X, 2e-3)},
        {"domain": NearMeasure(moved, 1e-3)},
        {"attention": oa.Compose(BLOCK, BLOCK)},
        {"n": 4},
        {"p": 1.0},
        {"quantity": "lipschitz" if kind == "pairs" else "pairs"},
        {"options": {"kind": "pairs"}},
        {"kind": "lower"},
    ):
        assert not replace(bound, **wrong).verify(), wrong
    assert replace(bound, domain=NearMeasure(X, 5e-4)).verify()  # a smaller ball
    assert not bound.verify(domain=NearMeasure(X, 2e-3))
    with pytest.raises(ValueError, match="no rigorous evaluation"):
        bound.verify(rigorous=True)
    if kind == "pairs":
        assert not replace(bound, relaxation="second_order").verify()


def test_balls_in_balls():
    assert domain_contains(NearMeasure(X, 1.0), NearMeasure(X, 0.5)) is None
    assert domain_contains(NearMeasure(X, 0.5), NearMeasure(X, 1.0)) is not None
    assert domain_contains(NearMeasure(X, 0.5), NearMeasure(X + 1.0, 0.1)) is not None
    assert repr(NearMeasure(X, 0.5)) == "NearMeasure(n=5 equal atoms, d=3, radius=0.5)"
    assert "n=5 equal atoms" in str(oa.certify(HEAD, X, radius=1e-3).domain)  # splitting is not covered, and it says so


def test_refusals():
    with pytest.raises(ValueError, match=r"softmax and rotary heads.*received L2Attention"):
        oa.certify(oa.L2Attention(A, A, V), X, radius=0.1)
    with pytest.raises(ValueError, match="received str"):
        oa.certify("map", X, radius=0.1)
    with pytest.raises(ValueError, match="kind must be"):
        oa.certify(HEAD, X, radius=0.1, kind="all")
    with pytest.raises(ValueError, match="p must be 2"):
        oa.certify(HEAD, X, radius=0.1, p=1)
    with pytest.raises(ValueError, match="equal weights"):
        oa.certify(HEAD, oa.DiscreteMeasure(X[:2], [0.3, 0.7]), radius=0.1)
    with pytest.raises(ValueError, match="radius must be"):
        oa.certify(HEAD, X, radius=-1.0)
    with pytest.raises(CertificateError, match="certified_radius"):
        oa.certify(HEAD, X, radius=1e3)


def test_long_stacks_say_that_their_norms_are_probabilistic(monkeypatch):
    exact = oa.certify(BLOCK, X, radius=1e-4)
    monkeypatch.setattr("otattn.lipschitz.near.build.DENSE", 4)
    bound = oa.certify(BLOCK, X, radius=1e-4)
    assert bound.details["how"] == "probabilistic"
    assert norm(BLOCK, X) <= bound.value <= exact.value * 1.05
    single = oa.certify(HEAD, X, radius=1e-4)
    assert single.details["how"] == "proved"
    assert single.value == pytest.approx(oa.certify(HEAD, X, radius=1e-4).value, rel=1e-7)
    assert single.details["norm"] <= norm(HEAD, X) * (1 + 1e-7)  # by its Gram matrix, not by products
    assert stack.DENSE == 2048


@pytest.mark.parametrize("outputs", [None, [np.eye(2), np.eye(2)]])
def test_two_equal_heads_are_twice_one(outputs):
    twice = oa.MultiHeadAttention([HEAD, HEAD], outputs)
    for kind in ("pairs", "constant"):
        one, two = (oa.certify(m, X, radius=1e-2, kind=kind).value for m in (HEAD, twice))
        assert two == pytest.approx(2.0 * one, rel=0.05)  # the part of A may be counted head by head
        assert two >= 2.0 * one * (1 - 1e-9)
    assert near_tokens(twice, X, 1e-3).value == pytest.approx(2.0 * near_tokens(HEAD, X, 1e-3).value, rel=1e-3)


EDGES = {
    "one": X[:1],
    "equal": np.repeat(X[:1], 3, axis=0),
    "zero": np.zeros((3, 3)),
    "far": X[:3] + 1e8,
    "huge": 1e25 * X[:3],
    "tiny": 1e-150 * X[:3],
}
ODD = {
    "no logits": oa.SoftmaxAttention(np.zeros((3, 3)), V),
    "no values": oa.SoftmaxAttention(A, 0.0 * V),
    "huge values": oa.SoftmaxAttention(A, 1e100 * V),
    "tiny values": oa.SoftmaxAttention(A, 1e-200 * V),
    "hot": oa.SoftmaxAttention(1e6 * A, V),
    "cold": oa.SoftmaxAttention(1e-200 * A, V),
    "rotary": oa.RotaryAttention(W.T, V, V, base=10.0),
    "block": BLOCK,
}


def quick(name, tokens):
    """Every kind of map, and of tokens, at least twice."""
    return (list(ODD).index(name) + list(EDGES).index(tokens)) % 3 == 0


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        pytest.param(name, tokens, marks=() if quick(name, tokens) else pytest.mark.slow)
        for name in ODD
        for tokens in EDGES
    ],
)
def test_edges(name, tokens):
    """Where numbers vanish, overflow or coincide a certificate is above what moves do, or there is none."""
    attention, x = ODD[name], EDGES[tokens]
    generator = np.random.default_rng(0)
    for rho, kind in ((1e-12, "constant"), (1e-3, "pairs"), (1e25, "constant")):
        try:
            bound = oa.certify(attention, x, radius=rho, kind=kind)
        except CertificateError:
            continue
        assert norm(attention, x) <= bound.value * (1 + 1e-9)
        D = generator.standard_normal(x.shape)
        D *= rho * np.sqrt(len(x)) / np.linalg.norm(D)
        if rho > 1e-7 * max(np.abs(x).max(), 1e-3):  # else float differences say nothing
            moved = np.linalg.norm((attention.on_tokens(x + D) - attention.on_tokens(x)) / np.linalg.norm(D))
            assert moved <= bound.value * (1 + 1e-6)


def test_one_dimension():
    x = np.array([[0.3], [-1.0], [0.3]])
    for attention in (oa.SoftmaxAttention([[1.5]], [[-2.0]]), oa.MLP([[2.0]], [0.1], [[1.0]], activation="tanh")):
        for kind in ("pairs", "constant"):
            bound = oa.certify(attention, x, radius=1e-2, kind=kind)
            assert norm(attention, x) <= bound.value <= 1.2 * norm(attention, x)
            moved = attention.on_tokens(x + 1e-2) - attention.on_tokens(x)
            assert np.linalg.norm(moved) <= bound.value * np.sqrt(3) * 1e-2 * (1 + 1e-12)
