"""The fused Jacobian against the dense one of the attention maps, with every option."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

from otattn.attention import (
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    Residual,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.data import load_sample
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure
from otattn.operators import FusedJacobian, measure_jacobian
from otattn.operators.stacked import StackedProducts

D, N = 5, 13


def softmax(seed, k=None, e=3):
    rng = np.random.default_rng(seed)
    V, bv = rng.normal(size=(e, D)), rng.normal(size=e)
    if k is None:
        return SoftmaxAttention(rng.normal(size=(D, D)), V, bias=rng.normal(size=D), value_bias=bv)
    Q, K, bq, bk = rng.normal(size=(k, D)), rng.normal(size=(k, D)), rng.normal(size=k), rng.normal(size=k)
    return SoftmaxAttention.from_qkv(Q, K, V, query_bias=bq, key_bias=bk, value_bias=bv)


def outputs(seed, *sizes, rows=4):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(rows, e)) for e in sizes]


LAYERS = {
    "plain": softmax(1),
    "factors": softmax(2, k=2),
    "heads summed": MultiHeadAttention([softmax(1), softmax(2, k=2)]),
    "outputs": MultiHeadAttention([softmax(1), softmax(3, k=3, e=2)], outputs(4, 3, 2), output_bias=np.ones(4)),
    "wide outputs": MultiHeadAttention([softmax(1), softmax(3, k=3, e=2), softmax(2, 2)], outputs(5, 3, 2, 3, rows=20)),
    "narrow outputs": MultiHeadAttention(
        [softmax(1), softmax(3, k=3, e=2), softmax(2, 2)], outputs(5, 3, 2, 3, rows=2)
    ),
    "one output": MultiHeadAttention([softmax(3, k=3, e=2)], outputs(6, 2)),
    "concatenated": MultiHeadAttention(
        [softmax(3, k=3, e=2), softmax(7, k=1, e=2)], [np.eye(4)[:, :2], 2.0 * np.eye(4)[:, 2:]]
    ),
}
MASKED = {f"masked {name}": MaskedAttention(layer) for name, layer in LAYERS.items()}
MASKED["masked heads"] = MultiHeadAttention([MaskedAttention(softmax(1)), MaskedAttention(softmax(2, k=2))])
MAPS = LAYERS | MASKED

# kept whole; recomputed tile by tile; recomputed with the panels of all heads kept; by two threads
OPTIONS = [{}, {"memory": 0}, {"memory": 6_000}, {"workers": 2}, {"workers": 3, "memory": 0}]


def measure(layer, *, weighted, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D))
    w = None
    if weighted:
        w = rng.random(N)
        w[[2, 7]] = 0.0
        w /= w.sum()
    if not layer.causal:
        return DiscreteMeasure(x, w)
    times = rng.choice(np.linspace(0.0, 1.0, 6), size=N)  # unsorted, with ties
    return SpaceTimeMeasure(times, x, w)


@functools.cache
def case(name, weighted):
    """A map, a measure, and the dense Jacobian."""
    layer = MAPS[name]
    mu = measure(layer, weighted=weighted)
    return layer, mu, embedded(layer, mu)


def embedded(layer, mu):
    """The dense ``W^{1/2} J W^{-1/2}`` with zero rows and columns at atoms of zero weight."""
    live = mu.weights > 0
    J = layer.jacobian(mu.support()).reweighted(mu.weights[live])
    out = np.zeros((mu.n, J.e, mu.n, J.d))
    block = J.to_dense().reshape(J.n, J.e, J.n, J.d)
    out[np.ix_(live, range(J.e), live, range(J.d))] = block
    return out.reshape(mu.n * J.e, mu.n * J.d)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
@pytest.mark.parametrize("name", MAPS)
def test_products_are_those_of_the_dense_jacobian(name, weighted, options):
    layer, mu, truth = case(name, weighted)
    J = FusedJacobian(layer, mu, **options)
    assert J.shape == truth.shape
    size = np.abs(truth).max()
    rng = np.random.default_rng(1)
    x, g = rng.normal(size=(mu.n, J.d)), rng.normal(size=(mu.n, J.e))
    np.testing.assert_allclose(J.jvp(x).ravel(), truth @ x.ravel(), rtol=0, atol=1e-12 * size)
    np.testing.assert_allclose(J.vjp(g).ravel(), truth.T @ g.ravel(), rtol=0, atol=1e-12 * size)
    np.testing.assert_allclose(J.gram(x).ravel(), truth.T @ (truth @ x.ravel()), rtol=0, atol=1e-11 * size**2)
    np.testing.assert_allclose(J.to_dense(), truth, rtol=0, atol=1e-12 * size)


@pytest.mark.parametrize("name", MAPS)
def test_float32_is_exact_to_its_precision(name):
    layer, mu, truth = case(name, True)
    for options in ({}, {"memory": 0}):
        J = FusedJacobian(layer, mu, dtype=np.float32, **options)
        assert J.dtype == np.float32
        assert J.jvp(np.ones((N, D))).dtype == np.float32
        # float32 has 6e-8; logits up to 30 multiply it
        np.testing.assert_allclose(J.to_dense(), truth, rtol=0, atol=5e-6 * np.abs(truth).max())


@pytest.mark.parametrize("name", ["factors", "outputs", "concatenated", "masked outputs"])
def test_gram_is_symmetric_positive_semidefinite(name):
    layer = MAPS[name]
    J = FusedJacobian(layer, measure(layer, weighted=True))
    G = np.stack([J.gram(row).ravel() for row in np.eye(J.shape[1])])
    np.testing.assert_allclose(G, G.T, rtol=0, atol=1e-13 * np.abs(G).max())
    assert np.linalg.eigvalsh(G)[0] >= -1e-13 * np.abs(G).max()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", ["factors", "outputs", "masked heads summed"])
def test_adjoint_identity(name, dtype):
    layer = MAPS[name]
    J = FusedJacobian(layer, measure(layer, weighted=True), dtype=dtype)
    rng = np.random.default_rng(2)
    x, g = rng.normal(size=(N, J.d)), rng.normal(size=(N, J.e))
    left, right = float(np.vdot(g, J.jvp(x))), float(np.vdot(J.vjp(g), x))
    assert left == pytest.approx(right, rel=1e-12 if dtype == np.float64 else 1e-4)
    quadratic = float(np.vdot(x, J.gram(x)))
    assert quadratic == pytest.approx(float(np.sum(J.jvp(x) ** 2)), rel=1e-12 if dtype == np.float64 else 1e-5)


def test_sequences_have_the_triangular_mask():
    layer = MASKED["masked outputs"]
    X = np.random.default_rng(3).normal(size=(N, D))
    np.testing.assert_allclose(FusedJacobian(layer, X).to_dense(), layer.jacobian(X).to_dense(), rtol=0, atol=1e-12)


def test_several_panels_and_tiles():
    # 300 rows make two panels; one-megabyte tiles of 256 rows hold 512 columns, so 700 columns make two
    rng = np.random.default_rng(4)
    layer = MultiHeadAttention([softmax(2, k=2), softmax(3, k=3, e=2)], outputs(4, 3, 2))
    for attention in (layer, MaskedAttention(layer)):
        X = rng.normal(size=(700, D))
        J = attention.jacobian(X)
        x, g = rng.normal(size=(700, D)), rng.normal(size=(700, 4))
        truth = J.vjp(J.jvp(x))
        for options in ({}, {"memory": 0}, {"memory": 3 * 10**6, "workers": 2}):
            F = FusedJacobian(attention, X, **options)
            np.testing.assert_allclose(F.jvp(x), J.jvp(x), rtol=0, atol=1e-11)
            np.testing.assert_allclose(F.vjp(g), J.vjp(g), rtol=0, atol=1e-11)
            np.testing.assert_allclose(F.gram(x), truth, rtol=0, atol=1e-13 * np.abs(truth).max())


def test_unweighted_jacobian_on_request():
    layer = LAYERS["outputs"]
    mu = measure(layer, weighted=True).support()
    J = FusedJacobian(layer, mu, reweight=False)
    np.testing.assert_allclose(J.to_dense(), layer.jacobian(mu).to_dense(), rtol=0, atol=1e-12)


def test_far_clouds_lose_no_digits():
    layer = softmax(2, k=2)
    X = np.random.default_rng(5).normal(size=(N, D))
    unbiased = SoftmaxAttention(layer.A, layer.V)
    shift = 1e6 * np.linalg.svd(layer.A)[2][-1]  # A shift = 0: the map only gains a constant
    assert np.linalg.norm(layer.A @ shift) < 1e-8
    near, far = FusedJacobian(unbiased, X).to_dense(), FusedJacobian(unbiased, X + shift).to_dense()
    # the tokens themselves are rounded to 1e6 * 1e-16, and so are their logits
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-8 * np.abs(near).max())


@pytest.mark.parametrize("factor", [1e-150, 1e-30, 1.0, 1e30, 1e150])
def test_values_of_any_size(factor):
    layer = softmax(2, k=2)
    X = np.random.default_rng(6).normal(size=(N, D))
    scaled = SoftmaxAttention(layer.A, factor * layer.V)
    expected = factor * SoftmaxAttention(layer.A, layer.V).jacobian(X).to_dense()
    J = FusedJacobian(scaled, X)
    np.testing.assert_allclose(J.to_dense(), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    x = np.ones((N, D))
    product = J.scaled_gram(x).ravel() * (J.scale / factor) ** 2
    plain = expected / factor
    np.testing.assert_allclose(product, plain.T @ (plain @ x.ravel()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [1e-120, 1e-30, 1e30, 1e120])
def test_tokens_of_any_size(size):
    """Tokens times s and A divided by s^2 leave the Jacobian alone."""
    rng = np.random.default_rng(13)
    X, A, V = rng.normal(size=(N, D)), rng.normal(size=(D, D)), rng.normal(size=(3, D))
    truth = SoftmaxAttention(A, V).jacobian(X).to_dense()
    for dtype, tol in ((np.float64, 1e-12), (np.float32, 5e-6)):
        J = FusedJacobian(SoftmaxAttention(A / size / size, V), size * X, dtype=dtype)
        np.testing.assert_allclose(J.to_dense(), truth, rtol=0, atol=tol * np.abs(truth).max())


def test_huge_logits_are_finite_and_leave_float32():
    X = np.array([[1.0], [-1.0], [0.5]])
    layer = SoftmaxAttention([[1e6]], [[1.0]])
    J = FusedJacobian(layer, X, dtype=np.float32)
    assert J.dtype == np.float64
    np.testing.assert_allclose(J.to_dense(), layer.jacobian(X).to_dense(), rtol=0, atol=1e-12)


def test_wide_logits_in_float32_have_no_denormals():
    rng = np.random.default_rng(7)
    X = rng.normal(size=(N, D))
    layer = SoftmaxAttention(40.0 * rng.normal(size=(D, D)), np.eye(D))
    J = FusedJacobian(layer, X, dtype=np.float32)
    truth = layer.jacobian(X).to_dense()
    # logits of 400 are rounded to 400 * 6e-8 in float32
    np.testing.assert_allclose(J.to_dense(), truth, rtol=0, atol=2e-4 * np.abs(truth).max())
    for head in J._products.heads:
        for tiles in head.tiles._stored:
            for E in tiles:
                assert not ((E != 0) & (np.abs(E) < np.finfo(np.float32).tiny)).any()


def test_extreme_weights_keep_float64():
    w = np.array([1.0, 1e-200, 0.0, 1e-290])
    X = np.random.default_rng(8).normal(size=(4, 2))
    mu = DiscreteMeasure(X, w / w.sum())
    layer = SoftmaxAttention(np.eye(2), np.eye(2))
    J = FusedJacobian(layer, mu, dtype=np.float32)
    assert J.dtype == np.float64
    np.testing.assert_allclose(J.to_dense(), embedded(layer, mu), rtol=0, atol=1e-12)


def test_one_token_one_dimension_and_zero_values():
    J = FusedJacobian(SoftmaxAttention([[3.0]], [[2.0]]), [[5.0]])
    np.testing.assert_allclose(J.to_dense(), [[2.0]], rtol=1e-15)
    zero = FusedJacobian(SoftmaxAttention(np.eye(2), np.zeros((3, 2))), np.ones((4, 2)))
    assert not zero.to_dense().any()
    flat = FusedJacobian(SoftmaxAttention(np.zeros((2, 2)), np.eye(2)), np.ones((4, 2)))
    np.testing.assert_allclose(flat.to_dense(), np.kron(np.full((4, 4), 0.25), np.eye(2)), atol=1e-15)


def test_duplicated_atoms_change_nothing():
    """Splitting every atom in two leaves the norm in L^2(mu) alone."""
    layer = LAYERS["outputs"]
    X = np.random.default_rng(9).normal(size=(6, D))
    once = np.linalg.norm(FusedJacobian(layer, X).to_dense(), 2)
    merged = DiscreteMeasure(X, np.full(6, 1 / 6))
    twice = np.linalg.norm(FusedJacobian(layer, np.repeat(X, 2, axis=0)).to_dense(), 2)
    # the split atoms may also move apart, which the field part bounds; here the particle part is larger
    field = np.linalg.norm(layer.field_jacobian(X, merged), ord=2, axis=(1, 2)).max()
    assert twice == pytest.approx(max(once, field), rel=1e-12)


def test_sample_layer():
    sample = load_sample()
    X = sample.tokens(0, 20)
    J, F = sample.attention.jacobian(X), FusedJacobian(sample.attention, X)
    rng = np.random.default_rng(10)
    x = rng.normal(size=X.shape)
    np.testing.assert_allclose(F.jvp(x), J.jvp(x), rtol=0, atol=1e-11)
    np.testing.assert_allclose(F.gram(x), J.vjp(J.jvp(x)), rtol=0, atol=1e-10)


def test_concurrent_products_agree():
    layer = LAYERS["outputs"]
    rng = np.random.default_rng(11)
    J = FusedJacobian(layer, rng.normal(size=(60, D)), workers=2)
    xs = rng.normal(size=(6, 60, D))
    expected = [J.gram(x) for x in xs]
    found: list = [None] * len(xs)

    def work(i):
        found[i] = J.gram(xs[i])

    pool = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_measure_jacobian_serves_every_map():
    rng = np.random.default_rng(12)
    A, V = 0.3 * rng.normal(size=(D, D)), rng.normal(size=(D, D))
    mu = measure(softmax(1), weighted=True)
    live = mu.weights > 0
    assert isinstance(measure_jacobian(softmax(1), mu), FusedJacobian)
    for layer in (
        SigmoidAttention(A, V),
        L2Attention(A, A, V),
        SinkhornAttention(A, V),
        Residual(SoftmaxAttention(A, V)),
    ):
        J = measure_jacobian(layer, mu)
        assert not isinstance(J, FusedJacobian)
        truth = layer.jacobian(mu.support()).reweighted(mu.weights[live]).to_dense()
        np.testing.assert_allclose(J.to_dense(), truth, rtol=0, atol=1e-9)


def test_refusals():
    with pytest.raises(TypeError, match="measure_jacobian"):
        FusedJacobian(SigmoidAttention(np.eye(2), np.eye(2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="float32 or float64"):
        FusedJacobian(softmax(1), np.ones((3, D)), dtype=np.float16)
    with pytest.raises(ValueError, match="dimension 5, received 2"):
        FusedJacobian(softmax(1), np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"direction must have shape \(3, 5\)"):
        FusedJacobian(softmax(1), np.ones((3, D))).jvp(np.ones((3, 2)))


@pytest.mark.parametrize("name", ["equal", "wide", "masked"])
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_heads_side_by_side_give_the_products_of_heads_one_by_one(name, weighted):
    rows = {"equal": 4, "wide": 20, "masked": 4}[name]
    layer = MultiHeadAttention([softmax(s, k=2, e=2) for s in (1, 2, 3)], outputs(4, 2, 2, 2, rows=rows))
    rng = np.random.default_rng(0)
    mu = DiscreteMeasure(rng.normal(size=(N, D)), rng.dirichlet(np.ones(N)) if weighted else None)
    if name == "masked":
        layer, mu = MaskedAttention(layer), SpaceTimeMeasure(rng.integers(5, size=N) / 4.0, mu.points, mu.weights)
    stacked, single = FusedJacobian(layer, mu, dtype=np.float32), FusedJacobian(layer, mu, workers=1)
    assert stacked.prepare()._products.__class__ is StackedProducts
    x, g = rng.normal(size=(N, D)), rng.normal(size=(N, single.e))
    for got, want in (
        (stacked.jvp(x), single.jvp(x)),
        (stacked.vjp(g), single.vjp(g)),
        (stacked.gram(x), single.gram(x)),
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())
