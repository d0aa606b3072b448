"""The upper side of the local constant: against exact derivatives, and named for what it is."""

import mpmath as mp
import numpy as np
import pytest
from attention_maps import MAPS
from exact_local import big, norm_below, truth

import otattn as oa
from otattn.attention import MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.local import upper_side
from otattn.lipschitz.local.enclosed import enclosed_norms, made_of_softmax
from otattn.lipschitz.local.value import local_lipschitz
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

KINDS = ["softmax", "bias", "factors", "wide", "tall", "heads", "summed", "nested", "masked", "masked heads"]


def softmax_map(kind, rng, logits=1.0, values=1.0):
    def form(rows=3, columns=3):
        return logits * rng.normal(size=(rows, columns))

    def value(rows=3):
        return values * rng.normal(size=(rows, 3))

    def factors(e=3):
        return SoftmaxAttention.from_qkv(form(2), form(2), value(e), query_bias=rng.normal(size=2))

    if kind == "bias":
        return SoftmaxAttention(form(), value(), bias=logits * rng.normal(size=3))
    if kind == "factors":
        return factors()
    if kind in ("wide", "tall"):
        return SoftmaxAttention(form(), value(1 if kind == "wide" else 5))
    if kind == "heads":
        return MultiHeadAttention([factors(2), factors(1)], [rng.normal(size=(4, 2)), rng.normal(size=(4, 1))])
    if kind == "summed":
        return MultiHeadAttention([factors(), SoftmaxAttention(form(), value())])
    if kind == "nested":
        inner = MultiHeadAttention([factors(2), factors(2)], [rng.normal(size=(2, 2)) for _ in range(2)])
        return MultiHeadAttention([inner, factors(2)], [rng.normal(size=(3, 2)) for _ in range(2)])
    if kind == "masked":
        return MaskedAttention(factors())
    if kind == "masked heads":
        return MultiHeadAttention([MaskedAttention(factors()), MaskedAttention(SoftmaxAttention(form(), value()))])
    return SoftmaxAttention(form(), value())


def check(attention, points, weights=None):
    """``truth <= upper`` in exact numbers; returns how far above the value it is."""
    measure = points
    if weights is not None:
        times = np.linspace(0.0, 1.0, len(points))
        kind = SpaceTimeMeasure(times, points, weights) if attention.causal else DiscreteMeasure(points, weights)
        measure, weights = kind, kind.weights
    local = local_lipschitz(attention, measure)
    assert local.upper_kind == "proved"
    assert local.lower <= local.upper
    exact = truth(attention, points, weights)
    assert exact <= mp.mpf(local.upper)
    return float(local.upper / exact - 1) if exact > 0 else 0.0


@pytest.mark.parametrize("n", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_proved_bounds_hold_and_are_tight(kind, n):
    rng = np.random.default_rng([n, KINDS.index(kind)])
    for size in (0.01, 1.0, 4.0):
        attention, X = softmax_map(kind, rng), size * rng.normal(size=(n, 3))
        assert check(attention, X) <= 1e-9
        assert check(attention, X, rng.dirichlet(np.ones(n))) <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [1e-150, 1e-30, 1e25])
def test_scales_of_the_values(kind, values):
    rng = np.random.default_rng(KINDS.index(kind))
    assert check(softmax_map(kind, rng, values=values), rng.normal(size=(3, 3))) <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logits", [0.0, 1e-8, 30.0, 1e3, 1e12])
def test_scales_of_the_logits(kind, logits):
    rng = np.random.default_rng(KINDS.index(kind))
    excess = check(softmax_map(kind, rng, logits=logits), rng.normal(size=(4, 3)))
    assert excess <= 1e-6 or logits > 100.0  # a logit of 1e24 has no digit after the point


@pytest.mark.parametrize("shift", [1e3, 1e8])
@pytest.mark.parametrize("seed", range(5))
def test_clouds_far_from_the_origin(seed, shift):
    """The floats lose what cancels; the bound does not."""
    rng = np.random.default_rng(seed)
    attention = softmax_map("softmax", rng, logits=1.0 / shift)
    check(attention, shift + rng.normal(size=(4, 3)))


def test_entries_without_limits_leave_the_floats():
    """Logits of 1e60 say nothing in intervals: the bound is of another kind, or as wide as it must be."""
    attention = SoftmaxAttention(1e30 * np.eye(3), np.eye(3))
    local = local_lipschitz(attention, 1e15 * np.random.default_rng(0).normal(size=(4, 3)))
    assert local.value <= local.upper


def test_the_enclosure_is_needed():
    """Where the computed derivative is off by more than its norm's proof, its norm alone would not be a bound."""
    below = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        A, far = rng.normal(size=(3, 3)), 1e6 * rng.normal(size=3)
        attention, X = SoftmaxAttention(A, rng.normal(size=(3, 3)), bias=-A @ far), far + rng.normal(size=(4, 3))
        exact = truth(attention, X, splitting=False)
        assert exact <= mp.mpf(enclosed_norms(attention, attention.as_measure(X))[0])
        below += exact > mp.mpf(oa.operators.spectral_norm_bounds(attention.jacobian(X).to_dense()).upper)
    assert below > 0


def test_small_weights_and_dead_atoms():
    rng = np.random.default_rng(3)
    attention, X = softmax_map("softmax", rng), rng.normal(size=(4, 3))
    for least in (1e-3, 1e-12, 1e-100):
        w = np.array([least, 0.3, 0.3, 0.4])
        check(attention, X, w / w.sum())
    live = DiscreteMeasure(X, [0.0, 0.25, 0.25, 0.5])
    local = local_lipschitz(attention, live)
    assert local.upper_kind == "proved"
    assert truth(attention, X[1:], np.array([0.25, 0.25, 0.5])) <= mp.mpf(local.upper) <= local.lower * (1 + 1e-9)


def test_the_splitting_part_counts():
    # one masked token far from all others moves its own image only: the field is what decides
    attention = SoftmaxAttention(10 * np.eye(2), np.eye(2))
    for X in (np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([[0.3, 0.0], [-0.3, 0.0], [0.0, 0.01]])):
        check(attention, X)
    skew = oa.LinearAttention(1.6 * np.array([[0.0, 1.0], [-1.0, 0.0]]), np.eye(2))
    local = local_lipschitz(skew, [[1.0, 0.0]])
    assert local.particle == 0.0
    assert 1.6 <= local.upper <= 1.6 * (1 + 1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_every_map(name):
    """Above the norm of the matrix of floats, in exact numbers, and above the value; close to both."""
    rng = np.random.default_rng(5)
    attention = MAPS[name](rng)
    X = rng.normal(size=(4, 3))
    local = local_lipschitz(attention, X)
    assert local.upper_kind == ("proved" if made_of_softmax(attention) else "computed")
    assert local.lower <= local.upper <= local.lower * (1 + 1e-9)
    with mp.workdps(60):
        matrix = norm_below(big(attention.jacobian(attention.as_measure(X)).to_dense()))
    # a proved bound is of the exact derivative, of which the floats are an approximation
    assert matrix <= mp.mpf(local.upper) * (1 + mp.mpf(1e-13 if local.upper_kind == "proved" else 0.0))


def test_large_measures_get_a_probability():
    rng = np.random.default_rng(0)
    attention, X = softmax_map("softmax", rng, logits=0.5), rng.normal(size=(700, 3))
    local = local_lipschitz(attention, X)
    assert local.upper_kind == "probabilistic"
    assert local.value <= local.upper <= (1 + 1.001e-6) * local.value


@pytest.mark.parametrize("weighted", [False, True])
def test_probable_bounds_of_weighted_and_masked_maps(monkeypatch, weighted):
    monkeypatch.setattr(upper_side, "PROVED_SIDE", 0)
    rng = np.random.default_rng(0)
    points, weights = rng.normal(size=(100, 3)), rng.dirichlet(np.ones(100)) if weighted else np.full(100, 0.01)
    for kind in ("softmax", "heads", "masked"):
        attention = softmax_map(kind, rng)
        mu = (
            SpaceTimeMeasure(np.linspace(0, 1, 100), points, weights)
            if attention.causal
            else DiscreteMeasure(points, weights)
        )
        local = local_lipschitz(attention, mu, failure=1e-3)
        exact = float(np.linalg.norm(attention.jacobian(mu).reweighted(mu.weights).to_dense(), 2))
        assert (local.upper_kind, local.failure) == ("probabilistic", 1e-3)
        assert exact <= local.upper * (1 + 1e-12)
        assert local.upper <= (1 + 1.001e-6) * local.value


def test_the_two_kinds_agree(monkeypatch):
    rng = np.random.default_rng(1)
    attention, X = softmax_map("factors", rng), rng.normal(size=(150, 3))
    proved = local_lipschitz(attention, X)
    assert proved.upper_kind == "proved"
    monkeypatch.setattr(upper_side, "PROVED_SIDE", 0)
    probable = local_lipschitz(attention, X)
    assert probable.upper_kind == "probabilistic"
    assert probable.upper == pytest.approx(proved.upper, rel=1.1e-6)
    assert proved.lower == probable.lower


def test_the_bound_is_computed_when_asked_for_and_once(monkeypatch):
    calls = []
    honest = upper_side.constant_above

    def counted(*args, **options):
        calls.append(options)
        return honest(*args, **options)

    monkeypatch.setattr("otattn.lipschitz.local.value.constant_above", counted)
    local = local_lipschitz(softmax_map("softmax", np.random.default_rng(0)), np.eye(3))
    assert calls == []
    assert local.upper == local.upper
    assert local.upper_kind == "proved"
    assert len(calls) == 1


def test_other_orders_and_domains_are_named():
    rng = np.random.default_rng(0)
    attention, X = softmax_map("softmax", rng), rng.normal(size=(4, 3))
    for p in (1, np.inf):
        assert local_lipschitz(attention, X, p=p).upper_kind == "margins"
    far = local_lipschitz(attention, X, domain=oa.Ball(5.0))
    assert (far.upper, far.upper_kind) == (np.inf, "none")


def test_same_seed_same_bound(monkeypatch):
    monkeypatch.setattr(upper_side, "PROVED_SIDE", 0)
    rng = np.random.default_rng(2)
    attention, X = softmax_map("softmax", rng), rng.normal(size=(100, 3))
    a, b = (local_lipschitz(attention, X, rng=4) for _ in range(2))
    assert a.upper == b.upper
    assert a.seed == b.seed


def test_failure_is_a_probability():
    for failure in (0.0, 1.0, -1e-3, np.nan):
        with pytest.raises(ValueError, match="failure"):
            local_lipschitz(softmax_map("softmax", np.random.default_rng(0)), np.eye(3), failure=failure)
