"""Self-token entropy and the row constant, against attacked configurations."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import lambertw

from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.relaxations import row_certificate, self_entropy
from otattn.measures import Ball, Box, Ellipsoid, LayerNormDomain, PointSet


def row(A, c, X, i, masked=False):
    """Query, probabilities and centred tokens of row i."""
    Y = X[: i + 1] if masked else X
    g = A @ X[i] + c
    l = Y @ g
    p = np.exp(l - l.max())
    p /= p.sum()
    return g, p, Y - p @ Y


def spread(A, c, X, i, masked=False):
    g, p, y = row(A, c, X, i, masked)
    return float(g @ g * np.linalg.eigvalsh((y * p[:, None]).T @ y)[-1])


def row_norm(A, c, X, i):
    g, p, y = row(A, c, X, i)
    blocks = [p_j * (np.eye(len(g)) + np.outer(y_j, g)) for p_j, y_j in zip(p, y, strict=True)]
    return float(np.linalg.norm(np.concatenate(blocks, axis=1), 2))


def attacked(value, domain, n, d, rng, starts=2):
    """The largest value over n tokens of the domain that quasi-Newton ascents reach."""
    best = 0.0
    for _ in range(starts):
        start = domain.sample(n, rng)
        result = minimize(
            lambda z: -value(domain.project(z.reshape(n, d))), start.ravel(), method="L-BFGS-B", options={"maxiter": 12}
        )
        best = max(best, -float(result.fun))
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 1), (3, 2), (6, 3)])
def test_no_configuration_exceeds_it(n, d):
    rng = np.random.default_rng(n)
    A = 2.0 * rng.standard_normal((d, d))
    if n == 3:
        A = 3.0 * np.eye(d)  # where the self token matters most
    c = 0.5 * rng.standard_normal(d)
    attention = SoftmaxAttention(A, np.eye(d), bias=c)
    low = rng.standard_normal(d)
    domains = [Ball(1.5, d), Ellipsoid(rng.standard_normal((d, d)), rng.standard_normal(d)), Box(low, low + 1)]
    domains += [PointSet(rng.standard_normal((9, d)))]
    domains += [LayerNormDomain(rng.random(d), rng.standard_normal(d))] if d > 1 else []
    for domain in domains:
        W, norm = self_entropy(attention, domain=domain, n=n), row_certificate(attention, domain=domain, n=n)
        assert W.verify()
        assert norm.verify()
        if isinstance(domain, (Ball, Ellipsoid)):
            best = attacked(lambda X: spread(A, c, X, 0), domain, n, d, rng)
            assert best <= W.value * (1 + 1e-12)
            best = attacked(lambda X: row_norm(A, c, X, 0), domain, n, d, rng)
            assert best <= norm.value * (1 + 1e-12)
        for _ in range(30):
            X = domain.sample(n, rng)
            i = int(rng.integers(n))
            assert spread(A, c, X, i) <= W.value
            assert spread(A, c, X, i, masked=True) <= W.value
            assert row_norm(A, c, X, i) <= norm.value


def test_row_constant_of_small_logits_is_one_and_of_large_ones_is_phi():
    small = SoftmaxAttention(0.1 * np.eye(2), np.eye(2))
    assert row_certificate(small, domain=Ball(1.0), n=10).value == pytest.approx(1.0, rel=1e-10)
    # A = -I: the self token repels itself, W = a^2, and phi(a) is the least
    a = 9.0
    phi = np.sqrt(a**2 / 2 + 0.75 + 1 / (32 * a**2))
    assert row_certificate(SoftmaxAttention(-a * np.eye(2), np.eye(2)), domain=Ball(1.0), n=4).value == pytest.approx(
        phi, rel=1e-10
    )
    # A = I: W is about a^2 / 4, and 1 + sqrt(W / 2) wins
    W = self_entropy(SoftmaxAttention(100.0 * np.eye(2), np.eye(2)), domain=Ball(1.0), n=4).value
    value = row_certificate(SoftmaxAttention(100.0 * np.eye(2), np.eye(2)), domain=Ball(1.0), n=4).value
    assert value == pytest.approx(1 + np.sqrt(W / 2), rel=1e-9)
    assert W < 0.3 * 100.0**2


@pytest.mark.parametrize("n", [1, 2, 17, 100_000])
def test_identity_closed_form(n):
    # max over r in [0, 1] of a^2 r^2 - ((a r^2 - tau)_+)^2, at r^2 = 1/2 + tau/a if that is at most 1
    a = 50.0
    tau = float(lambertw((n - 1) / np.e).real)
    exact = a**2 / 4 + a * tau if tau <= a / 2 else a**2 - max(0.0, a - tau) ** 2
    bound = self_entropy(SoftmaxAttention(a * np.eye(2), np.eye(2)), domain=Ball(1.0), n=n)
    assert exact * (1 - 1e-14) <= bound.value <= exact * (1 + 1e-9)
    assert bound.details["tau"] == pytest.approx(tau, rel=1e-14)


@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1e6])
def test_scaling_keeps_the_dimensionless_value(factor):
    rng = np.random.default_rng(0)
    A = 5.0 * rng.standard_normal((3, 3))
    plain = self_entropy(SoftmaxAttention(A, np.eye(3)), domain=Ball(1.0), n=6).value
    scaled = self_entropy(SoftmaxAttention(factor * A, np.eye(3)), domain=Ball(factor**-0.5), n=6).value
    assert scaled == pytest.approx(plain, rel=1e-10)


def test_solvers_agree_and_zero_is_zero():
    rng = np.random.default_rng(1)
    attention = SoftmaxAttention(rng.standard_normal((4, 4)), np.eye(4), bias=rng.standard_normal(4))
    search = self_entropy(attention, domain=Ball(2.0), n=8).value
    for solver in ("CLARABEL", "SCS"):
        value = self_entropy(attention, domain=Ball(2.0), n=8, solver=solver).value
        assert search * (1 - 1e-10) <= value <= search * (1 + 1e-5)
    zero = SoftmaxAttention(np.zeros((2, 2)), np.eye(2))
    for domain in (Ball(1.0), Box(-np.ones(2), np.ones(2))):
        assert self_entropy(zero, domain=domain, n=5).value == 0.0
    assert self_entropy(attention, domain=Box(np.ones(4), np.ones(4)), n=5).value == 0.0


def test_masked_attention_and_bad_arguments():
    attention = SoftmaxAttention(np.eye(2), np.eye(2))
    plain = self_entropy(attention, domain=Ball(1.0), n=5).value
    assert self_entropy(MaskedAttention(attention), domain=Ball(1.0), n=5).value == plain
    with pytest.raises(ValueError, match="n must be at least 1"):
        self_entropy(attention, domain=Ball(1.0), n=0)
    with pytest.raises(ValueError, match="n must be an integer"):
        row_certificate(attention, domain=Ball(1.0), n=2.5)
