"""Compressed measures: the bound is never below the exact distance of the images (60 digits), and where it is reached."""

import dataclasses

import mpmath as mp
import numpy as np
import pytest
from exact_images import DIGITS, distance, exact_distance, exact_image, vectors

import otattn as oa
from otattn.stability.compression.exponential import expansion

SAMPLE = oa.load_sample()


def exact_field(attention, mu, x):
    """The queries are atoms of weight 0."""
    points = vectors(mu.points) + vectors(x)
    return exact_image(attention, points, np.concatenate([mu.weights, np.zeros(len(x))]))[mu.n :]


def centroids(mu, labels):
    """The merged measure of the clusters."""
    belongs = np.equal.outer(np.arange(labels.max() + 1), labels) * mu.weights
    masses = belongs.sum(axis=1)
    return oa.DiscreteMeasure.normalized(belongs @ mu.points / masses[:, None], masses)


def random_weights(rng, n):
    w = [np.ones(n), rng.exponential(size=n), 10.0 ** rng.uniform(-12, 0, n)][rng.integers(3)]
    w = np.where((rng.random(n) < 0.2) & (np.arange(n) > 0), 0.0, w)
    return w / w.sum()


def random_points(rng, n, d, size):
    X = rng.normal(size=(n, d))
    kind = rng.integers(4)
    if kind == 1:
        X = rng.choice([-1.0, 1.0], size=(n, d))  # ties
    elif kind == 2:
        X = X[rng.integers(0, max(1, n // 2), n)]  # duplicates
    elif kind == 3:
        X = X[:1] + 10.0 ** rng.uniform(-12, -1) * X
    return size * X


def random_map(rng, d, scale):
    def head(e):
        V = 10.0 ** rng.uniform(-6, 6) * rng.normal(size=(e, d))
        if rng.random() < 0.3:
            Q, K = rng.normal(size=(2, 1, d))
            return oa.SoftmaxAttention.from_qkv(scale * Q, K, V, query_bias=rng.normal(size=1))
        return oa.SoftmaxAttention(scale * rng.normal(size=(d, d)), V, value_bias=rng.normal(size=e))

    if rng.random() < 0.2:
        return oa.MultiHeadAttention([head(1), head(2)], [rng.normal(size=(2, 1)), rng.normal(size=(2, 2))])
    return head(int(rng.integers(1, 3)))


def random_case(rng):
    """Map, measure, a measure in its place, queries or None, order."""
    d, n = int(rng.integers(1, 4)), int(rng.integers(1, 8))
    size = 10.0 ** rng.uniform(-6, 6)
    attention = random_map(rng, d, 10.0 ** rng.uniform(-3, 2.5) / size**2)
    mu = oa.DiscreteMeasure(random_points(rng, n, d, size), random_weights(rng, n))
    live = mu.support()
    k = int(rng.integers(1, live.n + 1))
    kind = rng.integers(4)
    if kind == 0:
        nu = oa.compress(mu, k, attention=attention, method=["merge", "prune"][rng.integers(2)])
    elif kind == 1:
        m = int(rng.integers(1, 5))
        nu = oa.DiscreteMeasure(random_points(rng, m, d, size), random_weights(rng, m))
    else:
        nu = centroids(live, np.unique(rng.integers(0, k, live.n), return_inverse=True)[1])
    queries = None if rng.random() < 0.5 else oa.DiscreteMeasure(random_points(rng, 3, d, size))
    return attention, mu, nu, queries, [1.0, 1.5, 2.0, 3.0, np.inf][rng.integers(5)]


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_bounds_hold(count):
    rng = np.random.default_rng(count)
    close = []
    with mp.workdps(DIGITS):
        for case in range(count):
            attention, mu, nu, queries, p = random_case(rng)
            bound = oa.compression_bound(attention, mu, nu, p=p, queries=queries)
            x = (bound.mu if queries is None else queries).points
            images = [exact_field(attention, m, x) for m in (bound.mu, bound.nu)]
            exact = [distance(u, v) for u, v in zip(*images, strict=True)]
            assert all(mp.mpf(float(b)) >= e for b, e in zip(bound.bounds, exact, strict=True)), case
            close += [float(b / e) for b, e in zip(bound.bounds, exact, strict=True) if e > 1e-9 * np.abs(x).max()]
            assert 0.0 <= bound.lower <= bound.measured <= bound.upper, case
            assert bound.lower <= bound.value < np.inf, case
            if queries is not None:  # uniform: exact transport between the images
                whole = exact_distance(*images, p)
                assert bound.lower <= whole <= bound.upper, case
                assert whole <= bound.value, case
    assert min(close) < 1.01  # they would notice a bound that is one percent too small


def test_bounds_of_moved_atoms_hold():
    """Uniform weights: exact transport over all permutations, a merged atom as several."""
    rng = np.random.default_rng(3)
    with mp.workdps(DIGITS):
        for case in range(15):
            labels = np.array([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2], [0, 1, 2, 3]][case % 4])
            X = rng.normal(size=(4, 2)) * rng.uniform(0.3, 3.0)
            attention = oa.SoftmaxAttention(rng.normal(size=(2, 2)), rng.normal(size=(2, 2)))
            mu = oa.DiscreteMeasure(X)
            nu, p = centroids(mu, labels), [1.0, 2.0, np.inf][case % 3]
            bound = oa.compression_bound(attention, mu, nu, p=p)
            moved = exact_image(attention, vectors(nu.points), nu.weights)
            exact = exact_distance(exact_image(attention, vectors(X), mu.weights), [moved[k] for k in labels], p)
            assert bound.lower <= exact <= bound.upper * (1 + 1e-15), case
            assert exact <= bound.value, case


def test_expansion_against_sixty_digits():
    rng = np.random.default_rng(0)
    S, u = 10.0 ** rng.uniform(-30, 3, 150), 10.0 ** rng.uniform(-16, 2, 150)
    found = expansion(S, u)
    with mp.workdps(160):
        for i in range(len(S)):
            s, x = mp.mpf(float(S[i])), mp.mpf(float(u[i]))
            excess = (x**2 * mp.exp(-s / x) + s * mp.exp(x)) / (x**2 + s) - 1

            def chi(t):
                return (mp.exp(t) - 1 - t) / t**2

            beyond = max(excess - s / 2, s * (0.5 - chi(-x)))
            exact = (excess, beyond, mp.expm1(x) / x, chi(x))
            for value, truth in zip(found, exact, strict=True):
                assert truth <= value[i] <= truth * (1 + mp.mpf("1e-12"))


def test_two_atoms_reach_the_fraction():
    """One cluster of two atoms far apart, and a third that is kept: Bennett's variable itself, so little is lost."""
    X = np.array([[2.0], [-0.5], [40.0]])
    mu = oa.DiscreteMeasure(X, [0.2 * 0.5, 0.8 * 0.5, 0.5])
    nu = centroids(mu, np.array([0, 0, 1]))
    head = oa.SoftmaxAttention([[1.0]], [[1.0]])
    for x in (0.02, -0.05, 1.0):
        bound = oa.compression_bound(head, mu, nu, queries=[[x]], labels=[0, 0, 1])
        assert bound.value == pytest.approx(bound.measured, rel=0.25)
        assert bound.upper == pytest.approx(bound.lower, rel=1e-9)


def test_nothing_is_lost_where_nothing_is_merged():
    X = np.random.default_rng(0).normal(size=(6, 3))
    head = oa.SoftmaxAttention(np.eye(3), np.eye(3))
    whole = oa.compress(X, 6)
    assert whole.n == 6
    assert oa.compression_bound(head, X, whole).value < 1e-12
    doubled = np.concatenate([X, X])
    assert oa.compress(doubled, 6, attention=head).n == 6
    assert oa.compression_bound(head, doubled, X).value < 1e-12
    # an atom of no weight is no atom
    padded = oa.DiscreteMeasure(np.vstack([X, 1e3 * X]), [1 / 6] * 6 + [0.0] * 6)
    assert oa.compression_bound(head, padded, X).value < 1e-12
    one = oa.compress(X, 1)
    assert np.allclose(one.points, X.mean(axis=0), atol=1e-15)
    assert oa.compression_bound(head, X, one).value < np.inf


def test_logits_beyond_float64_leave_the_hull():
    """Rounding of logits of size 1e18 is unbounded: what is left is that images are means of values."""
    X = np.array([[1e6, 0.0], [1e6, 1e6], [-1e6, 0.0]])
    head = oa.SoftmaxAttention(1e6 * np.array([[1.0, 0.3], [-0.7, 0.9]]), np.eye(2))
    bound = oa.compression_bound(head, X, oa.compress(X, 2))
    assert bound.lower <= bound.measured <= bound.value <= 5e6


@pytest.mark.parametrize(("head", "most"), [(0, (0.57, 2.5)), (6, (0.36, 1.05))])
def test_trained_heads(head, most):
    """128 tokens to 32 atoms: measured, proven, to first order."""
    attention, X = SAMPLE.heads[head], SAMPLE.tokens(0)
    nu = oa.compress(X, 32, attention=attention, rng=0)
    bound = oa.compression_bound(attention, X, nu)
    assert bound.measured < most[0]
    assert bound.value < most[1]
    assert 20.0 * bound.value < bound.local * bound.distance
    plain = oa.compression_bound(attention, X, oa.compress(X, 32, rng=0), queries=X)
    cached = oa.compression_bound(attention, X, nu, queries=X)
    assert cached.local is None
    assert 1.2 * cached.value < plain.value
    assert cached.upper <= np.sqrt(np.mean(cached.errors**2)) * (1 + 1e-6)
    assert cached.at(X[:3]) == pytest.approx(cached.bounds[:3], rel=1e-9)


def test_what_compress_keeps():
    X = SAMPLE.tokens(0, 40)
    mu = oa.DiscreteMeasure.normalized(X, np.arange(1.0, 41.0))
    for attention in (None, SAMPLE.heads[2], SAMPLE.attention):
        nu = oa.compress(mu, 8, attention=attention, rng=5)
        assert nu.n == 8
        assert np.allclose(nu.mean(), mu.mean(), atol=1e-12)
        again = oa.compress(mu, 8, attention=attention, rng=5)
        assert np.array_equal(nu.points, again.points)
    pruned = oa.compress(mu, 8, method="prune")
    assert np.array_equal(pruned.points, X[-8:])  # the heaviest
    assert np.allclose(pruned.weights, mu.weights[-8:] / mu.weights[-8:].sum())
    head = oa.SoftmaxAttention([[1.0]], [[1.0]])
    assert oa.compress([[-3.0], [1.0], [4.0]], 1, attention=head, method="prune").points == [[4.0]]


def test_a_bound_that_was_changed_does_not_verify():
    X = SAMPLE.tokens(0, 12)
    bound = oa.compression_bound(SAMPLE.heads[1], X, oa.compress(X, 4))
    assert bound.verify()
    assert dataclasses.replace(bound, value=2.0 * bound.value).verify()  # weaker, and true
    for change in (
        {"value": 0.99 * bound.value},
        {"measured": 1.01 * bound.measured},
        {"bounds": 0.99 * bound.bounds},
        {"lower": 1.01 * bound.lower},
        {"upper": 0.99 * bound.upper},
        {"distance": 1.01 * bound.distance},
        {"local": 1.01 * bound.local},
        {"mu": oa.DiscreteMeasure(2.0 * X)},
    ):
        assert not dataclasses.replace(bound, **change).verify()


def test_other_maps_and_arguments_are_refused():
    X = SAMPLE.tokens(0, 5)
    eye = np.eye(X.shape[1])
    head = oa.SoftmaxAttention(eye, eye)
    for attention, word in (
        (oa.L2Attention(eye, eye, eye), "received L2Attention; measure wasserstein"),
        (oa.MaskedAttention(head), "without the mask, the tokens that a query sees as mu"),
        (oa.MultiHeadAttention([head, oa.SigmoidAttention(eye, eye)]), "received SigmoidAttention"),
        (oa.Residual(head), "received Residual"),
    ):
        for call in (oa.compression_bound, lambda a, x, y: oa.compress(x, 2, attention=a)):
            with pytest.raises(TypeError, match=word):
                call(attention, X, X[:2])
    with pytest.raises(ValueError, match="k must be at most the number of atoms of positive weight, 5"):
        oa.compress(X, 6)
    with pytest.raises(ValueError, match='method must be "merge" or "prune"'):
        oa.compress(X, 2, method="median")
    with pytest.raises(ValueError, match="mu must live in"):
        oa.compress(X[:, :3], 2, attention=head)
    for bad in ({"mu": X[:, :2]}, {"nu": X[:, :2]}, {"queries": X[:, :2]}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must live in R"):
            oa.compression_bound(head, **{"mu": X, "nu": X[:2], **bad})
    for labels in ([0, 1, 0, 1], [0, 1, 0, 1, 2], [0, 1, 0, -1, 1], [0.0, 1.0, 0.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match="labels must be 5 integers from 0 to 1"):
            oa.compression_bound(head, X, X[:2], labels=labels)
