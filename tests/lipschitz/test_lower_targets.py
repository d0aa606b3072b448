"""Lower bounds that must be reached, each witness evaluated again by finite differences or exact transport."""

import math

import numpy as np
import pytest

import otattn as oa


def lower(A: np.ndarray, radius: float, n: int | None) -> tuple[oa.SoftmaxAttention, oa.Bound]:
    attention = oa.SoftmaxAttention(A, np.eye(len(A)))
    return attention, oa.lipschitz_lower_bound(attention, radius=radius, n=n, rng=0)


def finite_difference_norm(attention: oa.AttentionMap, X: np.ndarray, h: float) -> float:
    columns = []
    for k in range(X.size):
        step = np.zeros(X.size)
        step[k] = h
        step = step.reshape(X.shape)
        columns.append((attention.on_tokens(X + step) - attention.on_tokens(X - step)).ravel() / (2 * h))
    return float(np.linalg.norm(np.stack(columns, axis=1), 2))


def displacement_ratio(attention: oa.AttentionMap, mu: oa.DiscreteMeasure, h: float) -> float:
    """Exact W_2 ratio along the top right singular vector of the particle part."""
    local = oa.local_lipschitz(attention, mu)
    step = local.displacement()
    nu = oa.DiscreteMeasure(mu.points + h * step, mu.weights)
    return oa.wasserstein(attention.pushforward(mu), attention.pushforward(nu)) / oa.wasserstein(mu, nu)


@pytest.mark.slow
def test_minus_identity_32_tokens_by_finite_differences() -> None:
    attention, bound = lower(-np.eye(4), 4.0, 32)
    assert bound.value >= 64.1
    X = bound.witness.tokens(32)
    assert np.linalg.norm(X, axis=1).max() <= 4.0 * (1 + 1e-12)
    assert finite_difference_norm(attention, X, 1e-5) == pytest.approx(bound.value, rel=1e-6)
    published = oa.bounds.castin2024_discrete_lower(attention, radius=4.0, n=32)
    assert published.value == pytest.approx(5.57, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("A", "radius", "n", "target"),
    [
        (-np.eye(3), 10.0, 10**6, 0.70 * 100 * 1e3),
        (np.eye(3), math.sqrt(1000.0), 10**4, 0.33 * 1000 * 1e2),
    ],
    ids=["minus identity, a million tokens", "identity, ten thousand tokens"],
)
def test_many_tokens_in_few_clusters(A: np.ndarray, radius: float, n: int, target: float) -> None:
    attention, bound = lower(A, radius, n)
    assert bound.value >= target
    assert np.abs(bound.witness.weights * n - np.rint(bound.witness.weights * n)).max() < 1e-6
    assert bound.witness.radius() <= radius * (1 + 1e-12)
    # logits of size 100 to 1000 curve the map within 1e-3: the displacement is far below that
    assert displacement_ratio(attention, bound.witness, 1e-9) == pytest.approx(bound.value, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("d", [3, 8])
def test_generic_matrices_reach_the_leading_constant(d: int) -> None:
    rng = np.random.default_rng(d)
    A = rng.normal(size=(d, d))
    A /= np.linalg.norm(A, 2)
    # c* = max over |z| <= 1 of sqrt(|Az|^2 - (<Az,z>_+)^2) / sqrt 2, by dense random search from below
    z = rng.normal(size=(200_000, d))
    z *= (rng.random((200_000, 1)) ** (1 / d)) / np.linalg.norm(z, axis=1, keepdims=True)
    Az = z @ A.T
    h = np.maximum(np.sum(Az * z, axis=1), 0.0)
    leading = math.sqrt((np.sum(Az * Az, axis=1) - h**2).max() / 2)
    _, bound = lower(A, math.sqrt(1000.0), 10**5)
    assert bound.value >= 0.97 * leading * 1000 * math.sqrt(10**5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("A", "target"),
    [
        (-4 * np.eye(3), 165.0),
        (9 * np.eye(3), 13.9),
        (25 * np.eye(3), 94.0),
        (9 * np.array([[0.0, 1.0], [-1.0, 0.0]]), 405.0),
    ],
    ids=["minus identity, 4", "identity, 9", "identity, 25", "skew, 9"],
)
def test_mean_field_witnesses(A: np.ndarray, target: float) -> None:
    attention, bound = lower(A, 1.0, None)
    assert bound.value >= target
    assert bound.witness.n <= 5
    assert bound.witness.radius() <= 1.0 + 1e-12
    # the bound counts displacements that stay in the ball, the local constant at the witness all of them
    ratio = displacement_ratio(attention, bound.witness, 1e-8)
    assert bound.value * (1 - 1e-3) <= ratio <= 1.1 * bound.value


@pytest.mark.slow
@pytest.mark.parametrize("method", ["castin-antipodal", "castin-half", "two-anchor", "ascent", "best"])
def test_methods_give_tokens_of_the_domain(method: str) -> None:
    attention = oa.SoftmaxAttention(-np.eye(3), np.eye(3))
    mu = oa.adversarial_tokens(attention, n=12, radius=2.0, method=method, rng=0)
    X = mu.tokens(12)
    assert X.shape == (12, 3)
    assert np.linalg.norm(X, axis=1).max() <= 2.0 * (1 + 1e-12)
    assert finite_difference_norm(attention, X, 1e-5) <= oa.lipschitz_upper_bound(attention, radius=2.0, n=12).value


@pytest.mark.slow
def test_masked_tokens_by_finite_differences() -> None:
    attention = oa.MaskedAttention(oa.SoftmaxAttention(-np.eye(2), np.eye(2)))
    bound = oa.lipschitz_lower_bound(attention, radius=2.0, n=6, rng=0)
    X = bound.witness.points
    order = np.argsort(bound.witness.times, kind="stable")
    assert finite_difference_norm(attention, X[order], 1e-5) == pytest.approx(bound.value, rel=1e-5)
    upper = oa.lipschitz_upper_bound(attention, radius=2.0, n=6)
    assert 1.0 < bound.value <= upper.value


@pytest.mark.slow
@pytest.mark.parametrize(
    "domain",
    [
        oa.Ellipsoid(np.array([[2.0, 0.0], [0.0, 0.5]])),
        oa.LayerNormDomain([1.0, 2.0, 0.5]),
        oa.Box([-1.0, -2.0], [1.0, 0.5]),
    ],
    ids=["ellipsoid", "layer norm", "box"],
)
def test_other_domains(domain) -> None:
    attention = oa.SoftmaxAttention(-np.eye(domain.dim), np.eye(domain.dim))
    bound = oa.lipschitz_lower_bound(attention, domain=domain, n=6, rng=0)
    assert domain.contains(bound.witness.points, tol=1e-8)
    upper = oa.lipschitz_upper_bound(attention, domain=domain, n=6)
    assert 0 < bound.value <= upper.value * (1 + 1e-9)


@pytest.mark.parametrize("kind", [oa.SigmoidAttention, oa.ReLUAttention, oa.LinearAttention, oa.ExponentialAttention])
def test_unnormalised_variants(kind) -> None:
    rng = np.random.default_rng(1)
    attention = kind(rng.normal(size=(2, 2)), rng.normal(size=(2, 2)))
    bound = oa.lipschitz_lower_bound(attention, radius=1.0, n=4, rng=0)
    assert 0 < bound.value <= oa.lipschitz_upper_bound(attention, radius=1.0, n=4).value * (1 + 1e-9)


def test_sharp_values_of_zero_maps() -> None:
    zero = oa.SoftmaxAttention(np.zeros((2, 2)), np.eye(2))
    assert oa.lipschitz_lower_bound(zero, radius=1.0, n=5, rng=0).value == pytest.approx(1.0, rel=1e-9)
    dead = oa.SoftmaxAttention(np.eye(2), np.zeros((2, 2)))
    assert oa.lipschitz_lower_bound(dead, radius=1.0, n=5, rng=0).value == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [107, 108, 121])
def test_short_masked_sequences_are_not_missed(seed: int) -> None:
    """Biased heads under a mask: a blind climb over every token finds no more."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 7))
    A = rng.normal(size=(2, 2)) * rng.uniform(0.5, 2.0)
    head = oa.SoftmaxAttention(A, rng.normal(size=(2, 2)), bias=rng.normal(size=2))
    masked, ball, climbed = oa.MaskedAttention(head), oa.Ball(1.2, 2), 0.0
    found = oa.lipschitz_lower_bound(masked, radius=1.2, n=n, rng=0, effort="fast").value
    for _ in range(12):
        X, size = ball.sample(n, rng), 1.0
        value = np.linalg.norm(masked.jacobian(X).to_dense(), 2)
        for _ in range(150):
            Y = ball.project(X + size * rng.normal(size=X.shape))
            moved = np.linalg.norm(masked.jacobian(Y).to_dense(), 2)
            X, value, size = (Y, moved, 1.2 * size) if moved > value else (X, value, 0.9 * size)
        climbed = max(climbed, value)
    assert found >= 0.995 * climbed
