"""Sinkhorn attention stopped after few normalisations: against plain loops, its two ends, and what does not hold for it."""

from itertools import pairwise

import numpy as np
import pytest

import otattn as oa
from otattn.errors import ConvergenceError, NotGaussianPreservingError
from otattn.gradient_flow.known import known_gaussian_structure, known_structure
from otattn.lipschitz.theorem import THEOREMS


@pytest.fixture
def problem() -> tuple[np.ndarray, np.ndarray, oa.DiscreteMeasure]:
    rng = np.random.default_rng(4)
    weights = rng.uniform(0.2, 1.0, 9)
    weights[3] = 0.0  # its column is not normalised, and its row is as any other
    measure = oa.DiscreteMeasure(rng.standard_normal((9, 3)) + 1.0, weights / weights.sum())
    return 0.7 * rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), measure


@pytest.mark.parametrize("n_iter", [1, 3, 5, 8 + 13])
def test_kernel_is_normalised_by_turns(problem, n_iter):
    A, V, mu = problem
    live = mu.weights > 0
    w, X = mu.weights[live], mu.points[live]
    kernel = np.exp(X @ A.T @ X.T)
    for step in range(n_iter):
        kernel = kernel / (w @ kernel) if step % 2 else kernel / (kernel @ w)[:, None]
    found = oa.SinkhornAttention(A, V, n_iter=n_iter)(X, mu)
    np.testing.assert_allclose(found, kernel @ (w[:, None] * X) @ V.T, rtol=1e-12, atol=1e-13)


def test_from_softmax_to_the_limit(problem):
    A, V, mu = problem
    x = mu.points + 0.1  # also off the support
    softmax, limit = oa.SoftmaxAttention(A, V)(x, mu), oa.SinkhornAttention(A, V, tol=1e-13)(x, mu)
    np.testing.assert_allclose(oa.SinkhornAttention(A, V, n_iter=1)(x, mu), softmax, rtol=1e-13)
    errors = [np.abs(oa.SinkhornAttention(A, V, n_iter=n)(x, mu) - limit).max() for n in (1, 9, 41, 161)]
    assert all(b < 0.5 * a for a, b in pairwise(errors)), errors


@pytest.mark.parametrize("n_iter", [3, 7])
def test_jacobian_is_the_derivative(problem, n_iter):
    A, V, mu = problem
    rng = np.random.default_rng(5)
    attention = oa.SinkhornAttention(A, V, n_iter=n_iter)
    v, g = rng.standard_normal((9, 3)), rng.standard_normal((9, 2))
    J = attention.jacobian(mu)

    def at(t: float) -> np.ndarray:
        return attention.pushforward(oa.DiscreteMeasure(mu.points + t * v, mu.weights)).points

    # the error of a central difference is t^2 times a third derivative, down to rounding
    slopes = [np.abs((at(t) - at(-t)) / (2 * t) - J.jvp(v)).max() for t in (1e-2, 1e-3)]
    assert slopes[1] < 0.02 * slopes[0]
    assert np.sum(g * J.jvp(v)) == pytest.approx(np.sum(v * J.vjp(g)), rel=1e-12)


def test_theorems_of_the_limit_do_not_apply(problem):
    A, _, mu = problem
    A = A + A.T
    few = oa.SinkhornAttention(A, A, n_iter=5)
    reason = "n_iter must be None for columns of mass one, received 5"
    for key in ("sinkhorn_bound", "fixed_query_bound", "heads_field_bound"):
        theorem = THEOREMS[key]
        assert theorem.applies(few, oa.Ball(1.0, 3), None, 2.0) == reason
        assert theorem.applies(oa.SinkhornAttention(A, A), oa.Ball(1.0, 3), None, 2.0) is None
    assert oa.estimates(few, radius=1.0, ascent=False).passes is None
    assert known_structure(few) is None
    assert known_gaussian_structure(few) is None
    with pytest.raises(NotGaussianPreservingError, match="for the limit, n_iter must be None"):
        few.pushforward(oa.GaussianMeasure(np.zeros(3), np.eye(3)))
    with pytest.raises(NotGaussianPreservingError):
        oa.gaussian_flow(few, oa.GaussianMeasure(np.zeros(3), np.eye(3)), t_span=(0.0, 0.1))
    with pytest.raises(ValueError, match="potentials are those of the limit"):
        few.potentials(mu)


def test_even_numbers_and_columns_that_no_row_reaches():
    with pytest.raises(ValueError, match="n_iter must be odd, so that rows are normalised last, received 2"):
        oa.SinkhornAttention([[1.0]], [[1.0]], n_iter=2)
    # softmax chooses the last token alone; after columns of mass e^{-2000} and the like are normalised, values still are averages
    hard = oa.SinkhornAttention([[1000.0]], [[1.0]], n_iter=3)
    X = [[1.0], [2.0], [3.0]]
    assert np.all((hard.on_tokens(X) >= 1.0) & (hard.on_tokens(X) <= 3.0))
    with pytest.raises(ConvergenceError, match="received one that no row"):
        hard.jacobian(X)
