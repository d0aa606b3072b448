"""kappa: closed forms, attacked maxima, and the column sums that it bounds."""

import numpy as np
import pytest

from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.relaxations import column_exponent
from otattn.measures import Ball, Box, Ellipsoid, LayerNormDomain, PointSet


def column_sums(A, c, X, w):
    logits = (X @ A.T + c) @ X.T
    P = w * np.exp(logits - logits.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    return (w @ P) / w


def farthest(domain, g):
    """The point of the domain with the largest <g, y>, row by row."""
    if isinstance(domain, Ball):
        return domain.radius * g / np.linalg.norm(g, axis=1, keepdims=True)
    if isinstance(domain, Box):
        return np.where(g > 0, domain.upper, domain.lower)
    if isinstance(domain, PointSet):
        return domain.points[(g @ domain.points.T).argmax(axis=1)]
    h = g @ domain.shape
    return h / np.linalg.norm(h, axis=1, keepdims=True) @ domain.shape.T + domain.center


def ascended(A, c, domain, rng, starts=60, steps=300):
    if isinstance(domain, Ellipsoid):  # in its own coordinates, where projections are cheap
        E, b = domain.shape, domain.center
        return ascended(E.T @ A @ E, E.T @ (A @ b + c), Ball(1.0, E.shape[1]), rng)
    X = domain.sample(starts, rng)
    best = 0.0
    for step in np.geomspace(1.0, 1e-3, steps):
        g = X @ A.T + c
        Y = farthest(domain, g)
        best = max(best, float(((Y - X) * g).sum(axis=1).max()))
        X = domain.project(X + step * ((Y - X) @ A - g) / np.linalg.norm(A, 2))
    return best


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("biased", [False, True])
def test_above_every_attack_and_tight_on_round_domains(d, biased):
    rng = np.random.default_rng(d)
    A = rng.standard_normal((d, d))
    c = rng.standard_normal(d) if biased else np.zeros(d)
    attention = SoftmaxAttention(A, np.eye(d), bias=c)
    for domain, slack in (
        (Ball(1.5, d), 2e-3),
        (Ellipsoid(rng.standard_normal((d, d)), rng.standard_normal(d)), 2e-3),
        (Box(-rng.random(d), 1 + rng.random(d)), 0.3),
    ):
        bound = column_exponent(attention, domain=domain)
        best = ascended(A, c, domain, rng)
        # in dimension 2 with a bias the relaxation may have a gap; the ascent stops within 1e-6 of its optimum
        assert best <= bound.value <= best * (1 + slack) + 1e-12
        assert bound.verify()


@pytest.mark.parametrize("alpha", [1e-12, 0.3, 1e6])
def test_closed_forms(alpha):
    R, d = 1.7, 3
    a = alpha * R**2
    skew = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    for A, exact in ((np.eye(d), a / 4), (-np.eye(d), 2 * a), (skew, a)):
        value = column_exponent(SoftmaxAttention(alpha * A, np.eye(d)), domain=Ball(R)).value
        assert exact * (1 - 1e-15) <= value <= exact * (1 + 1e-8)
    constant = SoftmaxAttention(np.zeros((d, d)), np.eye(d), bias=[3.0, 4.0, 0.0])
    assert column_exponent(constant, domain=Ball(R)).value == pytest.approx(2 * 5 * R, rel=1e-9)
    assert column_exponent(constant, domain=Box(-np.ones(3), np.ones(3))).value == pytest.approx(14.0, rel=1e-6)
    zero = SoftmaxAttention(np.zeros((d, d)), np.eye(d))
    for domain in (Ball(R), Box(-np.ones(3), np.ones(3)), PointSet(np.eye(3)), LayerNormDomain(np.ones(3))):
        assert column_exponent(zero, domain=domain).value == 0.0
    assert column_exponent(SoftmaxAttention(np.eye(3), np.eye(3)), domain=Box(np.ones(3), np.ones(3))).value == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_column_sums_stay_below_its_exponential(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 5))
    A, c = 2 * rng.standard_normal((d, d)), rng.standard_normal(d)
    attention = SoftmaxAttention(A, np.eye(d), bias=c)
    low = rng.standard_normal(d)
    for domain in (
        Ball(1.0, d),
        Ellipsoid(rng.standard_normal((d, max(1, d - 1))), rng.standard_normal(d)),
        Box(low, low + 1),
        PointSet(rng.standard_normal((7, d))),
    ):
        top = column_exponent(attention, domain=domain).value
        for _ in range(20):
            X = domain.sample(int(rng.integers(1, 40)), rng)
            w = rng.dirichlet(np.full(len(X), 0.2)) + 1e-9
            assert np.log(column_sums(A, c, X, w / w.sum()).max()) <= top


def test_sharp_for_the_identity():
    # light atom at R u, the rest at R u / 2: the column of the light atom tends to e^{a/4}
    a, n = 4.0, 100_000
    attention = SoftmaxAttention(a * np.eye(1), np.eye(1))
    sums = column_sums(attention.A, np.zeros(1), np.array([[1.0], [0.5]]), np.array([1.0, n - 1.0]) / n)
    top = np.exp(column_exponent(attention, domain=Ball(1.0)).value)
    assert 0.999 * top < sums.max() <= top


def test_translation_and_bias_enter_together():
    rng = np.random.default_rng(1)
    A, b = rng.standard_normal((3, 3)), rng.standard_normal(3)
    moved = column_exponent(SoftmaxAttention(A, np.eye(3)), domain=Ellipsoid(2 * np.eye(3), b)).value
    biased = column_exponent(SoftmaxAttention(A, np.eye(3), bias=A @ b), domain=Ball(2.0)).value
    assert moved == pytest.approx(biased, rel=1e-9)
    scaled = column_exponent(SoftmaxAttention(1e6 * A, np.eye(3), bias=1e6 * A @ b), domain=Ball(2.0)).value
    assert scaled == pytest.approx(1e6 * biased, rel=1e-9)


def test_low_rank_in_large_dimension():
    rng = np.random.default_rng(2)
    A = rng.standard_normal((200, 4)) @ rng.standard_normal((4, 200))
    bound = column_exponent(SoftmaxAttention(A, np.eye(200), bias=A @ rng.standard_normal(200)), domain=Ball(0.5))
    assert bound.verify()
    small = column_exponent(SoftmaxAttention(A, np.eye(200)), domain=Ball(0.5), solver="SCS")
    assert small.verify()
    assert column_exponent(SoftmaxAttention(A, np.eye(200)), domain=Ball(0.5)).value <= small.value * (1 + 1e-10)


def test_masked_attention_is_refused():
    with pytest.raises(ValueError, match="without a mask"):
        column_exponent(MaskedAttention(SoftmaxAttention(np.eye(2), np.eye(2))), domain=Ball(1.0))
