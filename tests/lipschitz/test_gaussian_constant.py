"""The Bures-Wasserstein local constant against accurate finite differences and closed forms."""

import math

import numpy as np
import pytest

from otattn.attention import (
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.errors import NotGaussianPreservingError
from otattn.lipschitz.local.gaussian import gaussian_local_constant
from otattn.measures import GaussianMeasure


def _distance(m1, F1, m2, F2):
    """Bures-Wasserstein from factors: ``min_Q |F1 - F2 Q|``, accurate to rounding of the factors."""
    U, _, Wt = np.linalg.svd(F2.T @ F1)
    return math.hypot(np.linalg.norm(m1 - m2), np.linalg.norm(F1 - F2 @ U @ Wt))


def _image(attention, m, F):
    G, b = attention.gaussian_affine(GaussianMeasure(m, F @ F.T))
    return G @ m + b, G @ F


def _ratio(attention, m, F, u, D, step):
    near = (m + step * u, F + step * D)
    return _distance(*_image(attention, *near), *_image(attention, m, F)) / _distance(*near, m, F)


def _factor(cov):
    s, E = np.linalg.eigh(cov)
    return E * np.sqrt(np.where(s > 1e-12 * s.max(), s, 0.0))


def _attention(kind, d, e, rng):
    A, V = rng.standard_normal((d, d)), rng.standard_normal((e, d))
    k = int(rng.integers(1, 4))
    if kind == "softmax":
        return SoftmaxAttention(A, V, bias=rng.standard_normal(d), value_bias=rng.standard_normal(e))
    if kind == "linear":
        return LinearAttention(A, V)
    if kind == "l2":
        return L2Attention(rng.standard_normal((k, d)), rng.standard_normal((k, d)), V)
    if kind == "sinkhorn":
        return SinkhornAttention(A, V)
    heads = [SoftmaxAttention(A, V), SinkhornAttention(A.T, V), L2Attention(A, A, V)]
    outputs = None if k == 1 else [rng.standard_normal((2, e)) for _ in heads]
    return MultiHeadAttention(heads, outputs)


@pytest.mark.parametrize("kind", ["softmax", "linear", "l2", "sinkhorn", "heads"])
@pytest.mark.parametrize("full", [True, False])
def test_constant_is_the_limit_of_ratios_along_its_witness_and_of_no_other(kind, full):
    rng = np.random.default_rng(0 if full else 1)
    for _ in range(6):
        d, e = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        attention = _attention(kind, d, e, rng)
        rank = d if full else int(rng.integers(1, d + 1))
        F = rng.standard_normal((d, rank))
        g = GaussianMeasure(rng.standard_normal(d), F @ F.T)
        bound = gaussian_local_constant(attention, g)
        assert bound.kind == "local"
        assert bound.details["rank"] == rank
        F = _factor(g.cov)
        u, D = bound.witness
        assert math.hypot(np.linalg.norm(u), np.linalg.norm(D)) == pytest.approx(1.0, rel=1e-12)
        # symmetric differences: the error is the second derivative of the ratio times the square of the step
        reached = 0.5 * sum(_ratio(attention, g.mean, F, u, D, s) for s in (1e-4, -1e-4))
        assert reached == pytest.approx(bound.value, rel=1e-6)
        for _ in range(15):
            u, D = rng.standard_normal(d), rng.standard_normal((d, d))
            # first order in the step
            assert _ratio(attention, g.mean, F, u, D, 1e-6) <= bound.value * (1 + 1e-4)


def test_softmax_in_one_dimension():
    for A, v, s, m in ((0.7, 1.3, 2.0, 0.4), (-0.5, 2.0, 0.8, -1.0), (1.0, 1.0, 1.0, 0.0)):
        expected = np.linalg.norm([[v * (1 + A * s), 2 * v * A * math.sqrt(s) * m], [0.0, 3 * v * abs(A) * s]], 2)
        value = gaussian_local_constant(SoftmaxAttention([[A]], [[v]]), GaussianMeasure([m], [[s]])).value
        assert value == pytest.approx(expected, rel=1e-12)


def test_a_map_that_moves_means_only():
    # A = 0: every token goes to V m, the image is a point
    V = np.array([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    g = GaussianMeasure([1.0, 2.0], [[2.0, 0.5], [0.5, 1.0]])
    for attention in (SoftmaxAttention(np.zeros((2, 2)), V), SinkhornAttention(np.zeros((2, 2)), V)):
        bound = gaussian_local_constant(attention, g)
        assert bound.details["image_rank"] == 0
        assert bound.value == pytest.approx(np.linalg.norm(V, 2), rel=1e-12)
    assert gaussian_local_constant(SoftmaxAttention(np.eye(2), np.zeros((2, 2))), g).value == 0.0


def test_a_point_mass():
    # at a Dirac, softmax is the value matrix to first order: S A S A^T S is of third order in the deviation
    V = np.array([[2.0, 0.3], [0.0, 1.0]])
    dirac = GaussianMeasure([1.0, -1.0], np.zeros((2, 2)))
    bound = gaussian_local_constant(SoftmaxAttention(np.eye(2), V), dirac)
    assert bound.value == pytest.approx(np.linalg.norm(V, 2), rel=1e-12)
    # linear attention moves a deviation by V m m^T A
    linear = gaussian_local_constant(LinearAttention(np.eye(2), np.eye(2)), dirac)
    assert math.isfinite(linear.value)


def test_laws():
    rng = np.random.default_rng(2)
    A, V, B = rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), rng.standard_normal((3, 3))
    g = GaussianMeasure(rng.standard_normal(3), B @ B.T)
    base = gaussian_local_constant(SoftmaxAttention(A, V), g).value
    Q = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    turned = GaussianMeasure(Q @ g.mean, Q @ g.cov @ Q.T)
    assert gaussian_local_constant(SoftmaxAttention(Q @ A @ Q.T, V @ Q.T), turned).value == pytest.approx(
        base, rel=1e-9
    )
    for t in (1e-6, 1e6):
        scaled = GaussianMeasure(math.sqrt(t) * g.mean, t * g.cov)
        assert gaussian_local_constant(SoftmaxAttention(A / t, V), scaled).value == pytest.approx(base, rel=1e-9)
        assert gaussian_local_constant(SoftmaxAttention(A, V * t), g).value == pytest.approx(base * t, rel=1e-9)
    # a shift of the mean is a bias for softmax, and nothing for Sinkhorn attention
    here = gaussian_local_constant(SoftmaxAttention(A, V, bias=A @ g.mean), GaussianMeasure(np.zeros(3), g.cov)).value
    assert here == pytest.approx(base, rel=1e-9)
    sinkhorn = [
        gaussian_local_constant(SinkhornAttention(A, V), GaussianMeasure(m, g.cov)).value for m in (g.mean, 0 * g.mean)
    ]
    assert sinkhorn[0] == pytest.approx(sinkhorn[1], rel=1e-12)


def test_one_head_is_itself_and_equal_heads_add():
    rng = np.random.default_rng(3)
    A, V, B = rng.standard_normal((2, 2)), rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
    g = GaussianMeasure(rng.standard_normal(2), B @ B.T)
    head = SoftmaxAttention(A, V)
    single = gaussian_local_constant(head, g).value
    assert gaussian_local_constant(MultiHeadAttention([head]), g).value == pytest.approx(single, rel=1e-12)
    assert gaussian_local_constant(MultiHeadAttention([head, head]), g).value == pytest.approx(2 * single, rel=1e-12)


def test_other_maps_are_refused():
    g = GaussianMeasure([0.0], [[1.0]])
    for attention in (
        SigmoidAttention([[1.0]], [[1.0]]),
        MaskedAttention(SoftmaxAttention([[1.0]], [[1.0]])),
    ):
        with pytest.raises(NotGaussianPreservingError, match="received"):
            gaussian_local_constant(attention, g)
    with pytest.raises(ValueError, match="dimension"):
        gaussian_local_constant(SoftmaxAttention(np.eye(2), np.eye(2)), g)
