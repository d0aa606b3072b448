"""Ceilings of the splitting part: against exact fields, and the values that they save from being computed."""

import copy
import pickle

import numpy as np
import pytest
from exact_local import truth
from test_local_upper import softmax_map

import otattn as oa
from otattn.lipschitz.local import field_ceiling
from otattn.lipschitz.local import value as local_module
from otattn.lipschitz.local.far_mass import field_norms
from otattn.lipschitz.local.field_ceiling import field_ceilings
from otattn.lipschitz.local.splitting import splitting_part
from otattn.operators.layer import SoftmaxLayer

KINDS = ["softmax", "bias", "factors", "wide", "tall", "heads", "summed", "masked", "masked heads"]


def measure_of(attention, points, weights):
    if attention.causal:
        order = np.random.default_rng(len(points)).permutation(len(points)) / len(points)
        return oa.SpaceTimeMeasure(order, points, weights)
    return oa.DiscreteMeasure(points, weights)


def norms_and_ceilings(attention, mu, floor):
    mu = attention.as_measure(mu).support()
    layer = SoftmaxLayer(attention, mu)
    ceilings = np.empty(mu.n)
    ceilings[layer.chosen] = field_ceilings(layer, floor)
    times = mu.times if attention.causal else None
    return field_norms(attention.field_jacobian(mu.points, mu, times=times)), ceilings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logits", [0.0, 1.0, 30.0])
def test_no_field_exceeds_its_ceiling(kind, logits):
    rng = np.random.default_rng(KINDS.index(kind))
    for size in (1e-25, 1e-12, 1e-3, 1.0, 50.0):  # of the first two, moments and their squares vanish in float32
        attention = softmax_map(kind, rng, logits=logits)
        mu = measure_of(attention, size * rng.normal(size=(7, 3)), rng.dirichlet(np.ones(7)))
        for floor in (0.0, np.inf):
            norms, ceilings = norms_and_ceilings(attention, mu, floor)
            assert (norms <= ceilings).all()


@pytest.mark.parametrize("values", [1e-150, 1e25])
@pytest.mark.parametrize("shift", [0.0, 1e3, 1e8])
def test_scales_and_clouds_far_from_the_origin(values, shift):
    rng = np.random.default_rng(3)
    for kind in ("softmax", "heads"):
        attention = softmax_map(kind, rng, logits=1.0 / max(shift, 1.0), values=values)
        points = shift + rng.normal(size=(6, 3))
        norms, ceilings = norms_and_ceilings(attention, points, 0.0)
        assert (norms <= ceilings).all()


def test_a_ceiling_is_close_to_the_norm_of_frobenius_where_heads_are_joined():
    rng = np.random.default_rng(0)
    parts = [oa.SoftmaxAttention.from_qkv(*rng.normal(size=(3, 4, 24))) for _ in range(5)]
    layer = oa.MultiHeadAttention(parts, [rng.normal(size=(24, 4)) for _ in parts])
    X = 0.3 * rng.normal(size=(20, 24))
    joint = field_ceilings(SoftmaxLayer(layer, X), 0.0)
    frobenius = np.linalg.norm(layer.field_jacobian(X, X), axis=(1, 2))
    assert (frobenius <= joint).all()
    assert (joint <= 1.01 * frobenius).all()
    assert (joint < 0.9 * field_ceilings(SoftmaxLayer(layer, X), np.inf)).all()


def test_the_ceiling_of_one_head_is_close_to_its_norm():
    rng = np.random.default_rng(0)
    head = oa.SoftmaxAttention.from_qkv(*rng.normal(size=(3, 6, 24)))
    X = 0.3 * rng.normal(size=(20, 24))
    norms, ceilings = norms_and_ceilings(head, X, 0.0)
    fields = head.field_jacobian(X, X)
    fourth = np.sum(np.linalg.svd(fields, compute_uv=False) ** 4, axis=1) ** 0.25
    assert (norms <= ceilings).all()
    np.testing.assert_allclose(ceilings, fourth, rtol=1e-3)
    assert (ceilings < norms_and_ceilings(head, X, np.inf)[1]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_few_fields_give_the_largest_norm_of_many(kind, monkeypatch):
    rng = np.random.default_rng(KINDS.index(kind))
    attention = softmax_map(kind, rng)
    mu = measure_of(attention, rng.normal(size=(300, 3)), rng.dirichlet(np.ones(300))).support()
    found = []
    honest = type(attention).field_jacobian

    def counted(self, x, *args, **options):
        found.append(len(x))
        return honest(self, x, *args, **options)

    norms, _ = norms_and_ceilings(attention, mu, 0.0)
    monkeypatch.setattr(type(attention), "field_jacobian", counted)
    assert splitting_part(attention, mu) == pytest.approx(norms.max(), rel=1e-12)
    assert sum(found) < 300
    # blocks of weights in many parts
    monkeypatch.setattr(field_ceiling, "WEIGHT_BYTES", 8 * 300 * 7)
    assert splitting_part(attention, mu) == pytest.approx(norms.max(), rel=1e-12)


def test_logits_that_float64_does_not_resolve_have_no_ceiling():
    attention = oa.SoftmaxAttention(1e9 * np.eye(3), np.eye(3))
    X = 1e3 * np.random.default_rng(0).normal(size=(5, 3))
    assert np.isinf(field_ceilings(SoftmaxLayer(attention, X), 0.0)).all()


@pytest.fixture
def iterative(monkeypatch):
    """The way of large problems: float products and ceilings."""
    monkeypatch.setattr(local_module, "DENSE_ENTRIES", 0)


def test_the_splitting_part_is_computed_when_asked_for_and_once(monkeypatch, iterative, tmp_path):
    calls = []
    honest = local_module.splitting_part

    def counted(*args, **options):
        calls.append(options)
        return honest(*args, **options)

    monkeypatch.setattr(local_module, "splitting_part", counted)
    head, X = softmax_map("softmax", np.random.default_rng(0)), np.random.default_rng(1).normal(size=(12, 3))
    local = oa.local_lipschitz(head, X)
    assert calls == []
    assert f"splitting<={local.splitting_ceiling:.6g}" in repr(local)
    local.save(tmp_path / "x.npz")
    again = [oa.LocalLipschitz.load(tmp_path / "x.npz"), pickle.loads(pickle.dumps(local)), copy.deepcopy(local)]
    assert calls == []
    exact = field_norms(head.field_jacobian(X, X)).max()
    for one in (local, *again):
        assert one.splitting == one.splitting == pytest.approx(exact, rel=1e-12)
        assert one.splitting <= one.splitting_ceiling
        assert f"splitting={one.splitting:.6g}" in repr(one)
        assert one.value == max(one.particle, one.splitting)
        assert one.to_dict()["splitting"] == one.rows()[0]["splitting"] == one.splitting
    assert len(calls) == 4
    local.save(tmp_path / "x.npz")
    assert oa.LocalLipschitz.load(tmp_path / "x.npz").known_splitting == local.splitting


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_is_the_larger_part(kind, iterative):
    rng = np.random.default_rng(KINDS.index(kind))
    for size in (0.1, 0.7, 3.0, 12.0):
        attention = softmax_map(kind, rng)
        mu = measure_of(attention, size * rng.normal(size=(9, 3)), rng.dirichlet(np.ones(9)))
        local = oa.local_lipschitz(attention, mu)
        norms, _ = norms_and_ceilings(attention, mu, 0.0)
        assert local.splitting == pytest.approx(norms.max(), rel=1e-12)
        assert local.value == max(local.particle, local.splitting)
        assert local.splitting <= local.splitting_ceiling


def test_where_the_splitting_part_is_the_larger_one(iterative):
    """Skew A and two tokens: the ceilings do not hide the part that decides."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        A, V, X = rng.normal(size=(3, 2, 2))
        attention = oa.SoftmaxAttention(3.0 * (A - A.T), V)
        local = oa.local_lipschitz(attention, X)
        exact, particle = truth(attention, X), truth(attention, X, splitting=False)
        assert local.value == pytest.approx(float(exact), rel=1e-9)
        assert local.particle == pytest.approx(float(particle), rel=1e-9)
        if exact > 1.05 * particle:
            assert local.value == local.splitting == local.splitting_ceiling
            break
    else:
        pytest.fail("no draw has a larger splitting part")
