"""The second derivative of a stack as one form: the bilinear maps, the bound of their norms, and the certificates they sharpen."""

from dataclasses import replace

import numpy as np
import pytest
from climbing import climbed
from scipy.integrate import quad

import otattn as oa
from otattn.attention import Sum
from otattn.attention.scores import Mask, Rotation, ScoreAttention
from otattn.lipschitz.near import bends, build, composed
from otattn.models import FeedForward

rng = np.random.default_rng(7)
n, d = 4, 3
X = rng.standard_normal((n, d))


def drawn(*shape):
    return rng.standard_normal(shape) / np.sqrt(shape[-1])


def scored(**options):
    heads = [ScoreAttention(drawn(2, d), 1.5 * drawn(2, d), drawn(2, d), **options) for _ in range(2)]
    return oa.MultiHeadAttention(heads, [drawn(d, 2), drawn(d, 2)])


HEAD = oa.SoftmaxAttention(2.0 * drawn(d, d), drawn(2, d), bias=drawn(d))
SEVERAL = oa.MultiHeadAttention([HEAD, oa.SoftmaxAttention(drawn(d, d), drawn(2, d))], [drawn(d, 2), drawn(d, 2)])
MLP = oa.MLP(drawn(6, d), drawn(6), drawn(d, 6))
NORM = oa.LayerNorm(1.0 + 0.3 * drawn(d), drawn(d), eps=1e-2)
KEYS = oa.RMSNorm(np.ones(2), eps=1e-2)
POST = oa.TransformerBlock(SEVERAL, MLP, attention_norm=NORM, mlp_norm=NORM, pre_norm=False)
PRE = oa.TransformerBlock(SEVERAL, MLP, attention_norm=NORM, mlp_norm=NORM)
MAPS = {
    "masked": oa.MaskedAttention(SEVERAL),
    "norm": NORM,
    "gated": FeedForward(drawn(6, d), drawn(d, 6), activation="silu", gate=drawn(6, d)),
    "window, sink and cap": scored(mask=Mask(before=1), sink=0.3, cap=1.5),
    "rotary with norms": scored(rotation=Rotation.of_base(10.0, 2), query_norm=KEYS, key_norm=KEYS),
    "parallel": oa.Residual(Sum(oa.Compose(NORM, SEVERAL), MLP), scale=0.7),
    "post": POST,
    "two": oa.Compose(PRE, POST),
}


def along(attention, D, E):
    """``D^2 f[D, E]``."""
    return bends.bent_along(build._path(attention, X), D[None], E[None])[-1][0]


def differences(f, D, E, h):
    return (f(X + h * (D + E)) - f(X + h * (D - E)) - f(X - h * (D - E)) + f(X - h * (D + E))) / (4.0 * h * h)


@pytest.mark.parametrize("name", MAPS)
def test_bilinear_maps_are_second_derivatives(name):
    attention, generator = MAPS[name], np.random.default_rng(0)
    D, E = generator.standard_normal((2, n, d))
    f = attention.on_tokens
    true = (4.0 * differences(f, D, E, 5e-4) - differences(f, D, E, 1e-3)) / 3.0
    found = along(attention, D, E)
    # the error of the differences is of fourth order in the step, their rounding about 1e-10
    assert np.linalg.norm(found - true) <= 1e-6 * np.linalg.norm(true)
    assert np.allclose(found, along(attention, E, D), rtol=0.0, atol=1e-12 * np.abs(found).max())


@pytest.mark.parametrize("name", MAPS)
def test_directions_move_as_the_jacobian_says(name):
    D = np.random.default_rng(1).standard_normal((3, n, d))
    moved = bends._through(build._path(MAPS[name], X), D)
    jacobian = MAPS[name].jacobian(X)
    assert np.allclose(moved, [jacobian.jvp(v) for v in D], rtol=0.0, atol=1e-11 * np.abs(moved).max())


def test_the_law_of_a_product_of_two_gaussians():
    """``E exp(-s g^2 h^2)`` as in the proof, and the factor at which it is used."""
    for s in (0.3, 5.0):
        mean = quad(lambda g, s=s: np.exp(-0.5 * g * g) / np.sqrt(2.0 * np.pi * (1.0 + 2.0 * s * g * g)), -12, 12)[0]
        y = 1.0 / (8.0 * s)
        assert composed.k0e(y) / np.sqrt(4.0 * np.pi * s) == pytest.approx(mean, rel=1e-8)
    generator = np.random.default_rng(0)
    x = (generator.standard_normal((4000, 30)) * generator.standard_normal((4000, 30))) ** 2
    factor = composed.sketch_factor(30, 0.1)
    failed = float((np.sqrt(x.mean(axis=1)) * factor < 1.0).mean())  # rank one, the worst case
    assert 0.001 < failed <= 0.1
    factors = [composed.sketch_factor(k, 1e-9) for k in (8, 64, 192, 4096)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 1.2


def test_the_bound_of_the_norm_of_a_form():
    path = build._path(MAPS["two"], X)
    basis = np.eye(n * d).reshape(-1, n, d)
    T = np.stack([bends.bent_along(path, np.broadcast_to(e, basis.shape), basis)[-1].reshape(n * d, -1) for e in basis])
    h = float(np.linalg.norm(T.reshape(-1, T.shape[2]), 2))
    found = bends.forms_of(path, [build.PLAIN] * (len(path) + 1))
    assert h <= found.whole[-1] <= 2.6 * h
    assert found.whole[0] == found.mixed[0] == 0.0
    assert np.all(found.weights > 0.0)
    # M: each e_t in its weight, all of them together one argument
    columns = []
    for t in range(1, len(path)):
        for e in basis:
            drawn = [np.zeros((len(basis), n, d)) for _ in path]
            drawn[t][:] = found.weights[t] * e
            columns.append(bends.bent_along(path, basis, drawn)[-1].reshape(-1, n * d))
    mixed = float(np.linalg.norm(np.concatenate(columns), 2))
    assert mixed <= found.mixed[-1] <= 2.6 * mixed


@pytest.fixture
def probabilistic(monkeypatch):
    monkeypatch.setattr("otattn.lipschitz.near.build.DENSE", 4)
    monkeypatch.setattr("otattn.lipschitz.near.composed.PAIRS", 64)


def attacked(attention, bound, kind):
    r = bound.domain.radius * np.sqrt(n)
    assert bound.details["how"] == "probabilistic"
    found = climbed(attention, X, r, np.random.default_rng(1), both=kind == "constant", starts=3, steps=8)
    assert found <= bound.value
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("two", "pairs"), ("rotary with norms", "constant"), ("parallel", "pairs")])
def test_no_pair_exceeds_the_largest_radius(name, kind, probabilistic):
    attention = oa.Compose(MAPS[name], POST)
    bound = oa.certified_radius(attention, X, factor=1.3, kind=kind, tol=1.0)
    attacked(attention, bound, kind)


@pytest.mark.parametrize("kind", ["pairs", "constant"])
def test_no_pair_exceeds_the_composed_certificate(kind, probabilistic):
    attention = oa.Compose(POST, POST)
    bound = oa.certify(attention, X, radius=1e-3, kind=kind)
    assert bound.value <= 1.3 * attacked(attention, bound, kind)
    assert bound.verify()
    assert not replace(bound, value=bound.value * (1 - 1e-6)).verify()
    shares = bound.details["shares"]
    assert shares["second"] + shares["crossed"] + sum(shares["stages"]) == pytest.approx(1.0, rel=1e-9)


def test_a_stack_is_sharpened(probabilistic):
    chain = build.chain_at(oa.Compose(POST, POST), X)
    assert chain.bends is not None
    alone = replace(chain, bends=None, _seen={})
    term_by_term = composed.bends_term_by_term(chain._expansions, chain.norms, chain.offs)
    assert chain.bends.whole[-1] < 0.2 * term_by_term[-1]
    for r in (1e-6, 1e-4):
        assert chain.remainder(r) < 0.5 * alone.remainder(r)
        assert chain.growth(r) < 0.5 * alone.growth(r)
        assert all(x <= y * (1 + 1e-9) for x, y in zip(chain.radii(r), alone.radii(r), strict=True))
        whole = chain.budget(r)
        assert whole["remainder"] == pytest.approx(chain.remainder(r), rel=1e-9)
        assert all(third <= stage for third, stage in zip(whole["third"], whole["stages"], strict=True))


def test_the_remainder_after_the_second_order(probabilistic):
    """``F(X + D) - F(X) - J D - B[D, D] / 2`` is at most what is left, which is of the third order."""
    attention = MAPS["two"]
    chain, path = build.chain_at(attention, X), build._path(attention, X)
    generator = np.random.default_rng(2)
    left = []
    for r in (1e-3, 1e-2):
        left.append(chain.third_remainder(r))
        for _ in range(20):
            D = generator.standard_normal((n, d))
            D *= r / np.linalg.norm(D)
            J = D
            for p in path:
                J = p.jacobian.jvp(J)
            bent = 0.5 * bends.bent_along(path, D[None], D[None])[-1][0]
            rest = attention.on_tokens(X + D) - attention.on_tokens(X) - J - bent
            assert np.linalg.norm(rest) <= left[-1]
    assert left[1] > 500.0 * left[0]


def test_relu_and_experts(probabilistic):
    """A ReLU has a second derivative of zero between its kinks; where a form is not known the bound is that without it."""
    relu = oa.MLP(drawn(6, d), drawn(6), drawn(d, 6), activation="relu")
    chain = build.chain_at(oa.Compose(relu, POST), X)
    assert chain.bends is not None
    assert np.isfinite(chain.remainder(1e-6))
    gated = FeedForward(drawn(6, d), drawn(d, 6), activation="relu", gate=drawn(6, d))
    assert build.chain_at(oa.Compose(gated, POST), X).bends is None
