"""Whole blocks on a domain: constants that are attained, images that stay inside, logarithms beyond floats."""

import math

import mpmath as mp
import numpy as np
import pytest
from attention_maps import MAPS, D

import otattn as oa
from otattn.attention import FeedForward
from otattn.attention.feed_forward import ACTIVATIONS
from otattn.lipschitz.constants.regions import largest_norm
from otattn.lipschitz.constants.token_maps import SLOPES, Setting, token_map

whole_block = oa.bounds.whole_block
NAMES = [
    n
    for n in MAPS
    if n.startswith(("block", "network", "residual", "mlp", "layernorm-eps", "rmsnorm")) or n == "compose"
]


def test_a_chain_of_residuals_attains_the_product():
    half = oa.MLP([[1.0]], [0.0], [[0.5]], activation="relu")
    F = oa.Compose(*[oa.Residual(half)] * 3)
    bound = whole_block(F, radius=2.0, n=1)
    assert oa.local_lipschitz(F, [[1.0]]).value <= bound.value <= 1.5**3 * (1 + 1e-9)
    assert [r["radius_before"] for r in bound.details["budget"]] == pytest.approx([2.0, 3.0, 4.5])


@pytest.mark.parametrize("eps", [1e-12, 1e-3, 4.0])
def test_a_norm_is_as_steep_at_its_singularity(eps):
    gain = np.array([0.3, -2.0, 1.0])
    bound = whole_block(oa.RMSNorm(gain, eps=eps), radius=1.0)
    assert bound.value == pytest.approx(2.0 / math.sqrt(eps), rel=1e-9)
    at = oa.local_lipschitz(oa.RMSNorm(gain, eps=eps), np.zeros((1, 3))).value
    assert at == pytest.approx(bound.value, rel=1e-9)
    assert at <= bound.value


def test_a_norm_away_from_its_singularity():
    """Centre c, radius R: the steepest token is the nearest one, and eps no longer matters."""
    c, R = np.array([3.0, 0.0, -3.0]), 1.0
    domain = oa.Ellipsoid(R * np.eye(3), c)
    F = oa.LayerNorm(np.ones(3), eps=0.0)
    bound = whole_block(F, domain=domain)
    nearest = c * (1 - R / np.linalg.norm(c))
    assert bound.value == pytest.approx(math.sqrt(3) / np.linalg.norm(nearest), rel=1e-9)
    assert oa.local_lipschitz(F, nearest[None]).value == pytest.approx(bound.value, rel=1e-9)
    assert whole_block(F, radius=1.0).value == math.inf
    shifted = oa.Ellipsoid(R * np.eye(3), c + 1e9)  # the mean goes, whatever it is
    assert whole_block(F, domain=shifted).value == pytest.approx(bound.value, rel=1e-5)
    assert whole_block(oa.RMSNorm(np.ones(3)), domain=shifted).value < 1e-8


@pytest.mark.parametrize("name", sorted(SLOPES))
def test_ranges_of_slopes(name):
    m, M = SLOPES[name]
    functions = {
        "relu": lambda s: max(s, mp.mpf(0)),
        "gelu": lambda s: s * mp.ncdf(s),
        "gelu_tanh": lambda s: s * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (s + mp.mpf("0.044715") * s**3))) / 2,
        "silu": lambda s: s / (1 + mp.e ** (-s)),
        "tanh": mp.tanh,
        "identity": lambda s: s,
    }
    f = functions[name]
    grid = [mp.mpf(k) / 64 + mp.mpf(1) / 1000 for k in range(-640, 640)]
    slopes = [mp.diff(f, s) for s in grid]
    assert m <= min(slopes)
    assert max(slopes) <= M
    if name in ("gelu", "gelu_tanh", "silu"):  # the ends, where the second derivative vanishes
        for start, end in ((1.5, M), (-1.5, m)):
            at = mp.findroot(lambda s: mp.diff(f, s, 2), start if name != "silu" else 1.6 * start)
            assert abs(mp.diff(f, at)) <= abs(end)
            assert abs(mp.diff(f, at)) >= abs(end) - 1e-3
    assert all(abs(f(s)) <= abs(s) for s in grid)
    if name in ACTIVATIONS:
        x = np.array([float(s) for s in grid])
        assert np.allclose(ACTIVATIONS[name][1](x), [float(s) for s in slopes], atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "domain", [oa.Ball(1.5, D), oa.Ellipsoid(0.3 * np.eye(D), [2.0, 0.0, -1.0])], ids=["ball", "off"]
)
def test_local_constants_stay_below(name, domain):
    rng = np.random.default_rng(0)
    F = MAPS[name](rng)
    bound = oa.lipschitz_upper_bound(F, domain=domain, n=4)
    assert bound.theorem == "whole_block"
    assert bound.verify()
    for _ in range(4):
        X = domain.project(rng.standard_normal((4, D)))
        assert oa.local_lipschitz(F, X).value <= bound.value


@pytest.mark.parametrize("gated", [False, True])
def test_images_of_token_maps_stay_inside(gated):
    rng = np.random.default_rng(1)
    parts = [
        oa.LayerNorm(rng.standard_normal(D), rng.standard_normal(D), eps=0.1),
        oa.RMSNorm(rng.standard_normal(D), eps=1e-6),
        oa.MLP(
            rng.standard_normal((5, D)), rng.standard_normal(5), rng.standard_normal((D, 5)), output_bias=[1.0, 0, 0]
        ),
        FeedForward(
            rng.standard_normal((5, D)),
            rng.standard_normal((D, 5)),
            activation="silu",
            gate=rng.standard_normal((5, D)) if gated else None,
            up_bias=rng.standard_normal(5),
        ),
    ]
    for part in parts:
        for domain in (oa.Ball(2.0, D), oa.Ellipsoid(rng.standard_normal((D, D)), [3.0, 1.0, 0.0])):
            value, image = token_map(part, domain, largest_norm(domain), Setting(1, 2.0, False))
            X = domain.project(5.0 * rng.standard_normal((500, D)))
            Y = part.on_tokens(X)
            assert np.abs(image.project(Y) - Y).max() <= 1e-9 * np.abs(Y).max()
            norms = np.linalg.norm(part.field_jacobian(X, X), 2, axis=(1, 2))
            assert norms.max() <= value


def test_products_beyond_floats_are_carried_as_logarithms():
    steep = oa.Residual(
        oa.Compose(oa.RMSNorm([1.0, 1.0], eps=1e-12), oa.MLP(np.eye(2), [0, 0], np.eye(2), activation="relu"))
    )
    bound = whole_block(oa.Compose(*[steep] * 60), radius=1.0, n=3)
    assert bound.value == math.inf
    assert bound.log_value / math.log(10.0) == pytest.approx(360.0, rel=1e-6)
    assert bound.verify()
    assert len(bound.details["budget"]) == 120


def test_what_has_no_rule_is_named():
    softmax = oa.SoftmaxAttention(np.eye(2), np.eye(2))
    with pytest.raises(ValueError, match="composition, a residual or a token-wise map"):
        whole_block(softmax, radius=1.0, n=2)
    with pytest.raises(ValueError, match="no rule for SigmoidAttention"):
        whole_block(oa.Residual(oa.SigmoidAttention(np.eye(2), np.eye(2))), radius=1.0, n=2)
    with pytest.raises(ValueError, match="no theorem of ours bounds RotaryAttention"):
        whole_block(oa.Residual(oa.RotaryAttention(np.eye(2), np.eye(2), np.eye(2))), radius=1.0, n=2, p=1)
    assert whole_block(oa.Compose(oa.Residual(softmax)), radius=1.0, n=2).value < 10.0


def test_the_bound_of_a_part_is_that_of_the_best_theorem_of_ours():
    head = oa.SoftmaxAttention(0.5 * np.eye(2), np.eye(2))
    one = oa.lipschitz_upper_bound(head, radius=1.0, n=4, theorem="row_bound").value
    least = min(
        b.value for b in oa.bounds.table(head, radius=1.0, n=4) if b.kind == "upper" and "otattn" in b.reference
    )
    bound = whole_block(oa.Residual(head, scale=-2.0), radius=1.0, n=4)
    assert bound.value == pytest.approx(1.0 + 2.0 * least, rel=1e-9)
    assert least <= one
