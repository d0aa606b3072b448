"""Positive semidefinite forms and any measure: smooth climbs over points and free weights, with an operator of their own."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

import otattn as oa
from otattn.lipschitz.forms.psd_mean_field import Columns
from otattn.lipschitz.relaxations import mean_field, psd_mean_field


def in_unit_ball(Z):
    size = np.sqrt((Z * Z).sum(axis=1, keepdims=True))
    return Z / np.where(size.real > 1.0, size, 1.0)


def derivative(X, w, A, V):
    """``eps -> V (K + D) eps`` on ``L^2(w)`` as a matrix; holomorphic in points and weights."""
    (c, d), (e, _) = X.shape, V.shape
    L = X @ A.T @ X.T + np.log(w)
    P = np.exp(L - L.real.max(axis=1, keepdims=True))
    P = P / P.sum(axis=1, keepdims=True)
    Y, root = X[None] - (P @ X)[:, None], np.sqrt(w)
    own = np.einsum("ij,ijk,ijl->ikl", P, Y, Y) @ A
    seen = np.eye(d) + Y[..., None] * (X @ A.T)[:, None, None, :]
    blocks = (P * root[:, None] / root)[..., None, None] * seen
    blocks[np.arange(c), np.arange(c)] += own
    return np.einsum("ek,ijkl->iejl", V, blocks).reshape(c * e, c * d)


def split(z, c, d):
    weights = np.exp(z[c * d :] - z[c * d :].real.max())
    return in_unit_ball(z[: c * d].reshape(c, d)), weights / weights.sum()


def climbed(A, V, starts):
    """The largest norm found by L-BFGS from each start ``(points, log weights)``; gradients by complex steps."""
    best = 0.0
    for points, logs in starts:
        c, d = points.shape

        def loss(z, c=c, d=d):
            left, size, right = np.linalg.svd(derivative(*split(z, c, d), A, V))
            steps = z + 1e-30j * np.eye(z.size)
            slope = [(left[:, 0] @ derivative(*split(s, c, d), A, V) @ right[0]).imag * 1e30 for s in steps]
            return -size[0], -np.array(slope)

        bounds = [(-1.6, 1.6)] * (c * d) + [(-60.0, 60.0)] * c
        start = np.append(points.ravel(), logs)
        best = max(
            best, -minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40}).fun
        )
    return best


def some_starts(rng, a, d, count):
    """A light atom at the end of the leading axis, a heavy one halfway, and others."""
    for k in range(count):
        X = 0.3 * rng.standard_normal((3, d))
        X[0] = np.eye(d)[0]
        X[1] = (0.5 if k % 2 else -1.0) * np.eye(d)[0]
        yield X, np.array([-rng.uniform(0.3, 2.0) * a - 1.0, 0.0, -rng.uniform(0.0, a + 1.0)])


def test_the_derivative_is_that_of_the_map():
    rng = np.random.default_rng(0)
    X, w, A, V = (
        rng.standard_normal((4, 3)),
        rng.dirichlet(np.ones(4)),
        np.diag([2.0, 0.5, 0.0]),
        rng.standard_normal((2, 3)),
    )
    eps = rng.standard_normal((4, 3))

    def image(X):
        P = np.exp(X @ A @ X.T) * w
        return (P / P.sum(axis=1, keepdims=True)) @ X @ V.T

    root = np.sqrt(w)[:, None]
    found = (derivative(X, w, A, V) @ (root * eps).ravel()).reshape(4, 2) / root
    np.testing.assert_allclose(found, (image(X + 1e-6 * eps) - image(X - 1e-6 * eps)) / 2e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("a", "values", "V", "least"),
    [
        (0.01, [1.0], [[1.0]], 0.999),
        (0.1, [1.0, 0.01], np.eye(2), 0.98),
        (1.0, [1.0, 0.5, 0.0], np.eye(3), 0.75),
        (4.0, [1.0], [[1.0]], 0.7),
        (40.0, [1.0, 0.01], [[1.0, 2.0]], 0.1),
    ],
)
def test_climbs_end_below_the_bound(a, values, V, least):
    A, V = a * np.diag(values), np.asarray(V)
    bound = psd_mean_field(oa.SoftmaxAttention(A, V), radius=1.0)
    found = climbed(A, V, some_starts(np.random.default_rng(1), a, len(A), 4))
    assert least * bound.value < found <= bound.value


@pytest.mark.parametrize(
    ("a", "values", "share", "closest"), [(0.1, [1.0, 1.0], 0.05, 0.01), (4.0, [1.0, 0.01], 0.5, 0.8)]
)
def test_climbs_of_a_column_end_below_its_bound(a, values, share, closest):
    """``log T`` over points, weights and directions, at multipliers that no search chose."""
    rng = np.random.default_rng(2)
    A, c, d = a * np.diag(values), 3, len(values)
    columns = Columns(a, 1.0 / min(values), share, 0.1 / a, 0.5)

    def log_T(z):
        X, w = split(z[: c * (d + 1)], c, d)
        e, G = z[c * (d + 1) :], X @ A
        L = G @ X.T + np.log(w)
        logZ = np.logaddexp.reduce(L, axis=1)
        P = np.exp(L - logZ[:, None])
        Y = X[None] - (P @ X)[:, None]
        lam = np.clip(np.linalg.eigvalsh(np.einsum("xk,xki,xkj->xij", P, Y, Y))[:, -1], 0.0, 1.0)
        weight = np.log1p(lam / (columns.h + a**-2))
        weight -= np.log1p(-(np.minimum(lam, share) ** 2) / (share**2 + columns.excess))
        seen = np.log1p(columns.h * (G @ e) ** 2 / (e @ e))
        return np.logaddexp.reduce(np.log(w) + G @ X[0] - logZ + weight + seen)

    best = -math.inf
    for points, logs in some_starts(rng, a, d, 4):
        start = np.concatenate([points.ravel(), logs, np.eye(d)[0] + 0.1 * rng.standard_normal(d)])
        found = minimize(lambda z: -log_T(z), start, method="L-BFGS-B", options={"maxiter": 40})
        best = max(best, -found.fun)
    most = columns.maximum(1e-3).value
    assert most - closest < best <= most


def test_large_logits():
    """Beyond ``||A|| R^2 = 2000`` it is still finite, proved, and below what entropy gives."""
    attention = oa.SoftmaxAttention(2500.0 * np.eye(2), np.eye(2))
    bound = psd_mean_field(attention, radius=1.0)
    assert bound.verify()
    assert 2500.0 / 8.0 < bound.log_value < mean_field(attention, radius=1.0).log_value - 1.0
