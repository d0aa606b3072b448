"""Limits of Gaussian flows: the four patterns, ranks and their bounds."""

import numpy as np
import pytest

from otattn.attention import L2Attention, LinearAttention, MultiHeadAttention, SinkhornAttention, SoftmaxAttention
from otattn.dynamics import (
    covariance_closed_form,
    gaussian_flow,
    gaussian_limit,
    isotropic_dimension,
    limit_rank_histogram,
)
from otattn.dynamics.gaussian_fields import SoftmaxField
from otattn.dynamics.gaussian_limit import gaussian_limits, scaled_factor
from otattn.measures import GaussianMeasure

I2 = np.eye(2)
S0 = np.array([[1.0, 0.4], [0.4, 0.8]])
START = GaussianMeasure([0.0, 0.0], S0)


def test_pattern_zero():
    out = gaussian_limit(SoftmaxAttention(np.diag([-1.0, -2.0]), I2), START)
    assert (out.kind, out.rank) == ("zero", 0)
    assert not out.covariance.any()


def test_pattern_line():
    """A = diag(-1, 0): the second axis stays, with the variance Sigma_22 - Sigma_12^2 / Sigma_11 given the first."""
    out = gaussian_limit(SoftmaxAttention(np.diag([-1.0, 0.0]), I2), START)
    assert (out.kind, out.rank, out.exact) == ("finite", 1, True)
    assert np.allclose(out.covariance, np.diag([0.0, 0.8 - 0.4**2]), atol=1e-12)


def test_pattern_plane():
    """V = diag(1, 0), A = diag(0, -1): the off-diagonal entry dies, b is constant, a loses c^2 / b."""
    out = gaussian_limit(SoftmaxAttention(np.diag([0.0, -1.0]), np.diag([1.0, 0.0])), START)
    assert (out.kind, out.rank, out.exact) == ("finite", 2, False)
    assert np.allclose(out.covariance, np.diag([1.0 - 0.4**2 / 0.8, 0.8]), atol=1e-5)


def test_pattern_two_lines():
    """V = diag(1, -1), A = diag(-1, 1): the isotropic lines x = y and x = -y of the form of A, by the sign of c."""
    attention = SoftmaxAttention(np.diag([-1.0, 1.0]), np.diag([1.0, -1.0]))
    for sign in (1.0, -1.0):
        out = gaussian_limit(attention, GaussianMeasure([0.0, 0.0], [[1.0, 0.4 * sign], [0.4 * sign, 0.8]]))
        assert (out.kind, out.rank) == ("finite", 1)
        shape = out.covariance / np.trace(out.covariance)
        assert np.allclose(shape, 0.5 * np.array([[1.0, sign], [sign, 1.0]]), atol=1e-3)


def test_blow_up_and_divergence():
    out = gaussian_limit(SoftmaxAttention(np.diag([1.0, -1.0]), I2), START)
    assert (out.kind, out.rank) == ("blow_up", 1)
    assert np.trace(out.covariance) == pytest.approx(1.0)
    trajectory = gaussian_flow(SoftmaxAttention(np.diag([1.0, -1.0]), I2), START, t_span=(0, 10))
    assert np.abs(trajectory.shapes[-1] - trajectory.limit).max() < 1e-8
    assert trajectory.limit_rank == 1
    isotropic = gaussian_limit(SoftmaxAttention(I2, I2), GaussianMeasure([0.0, 0.0], I2))
    assert (isotropic.kind, isotropic.rank) == ("blow_up", 2)
    several = MultiHeadAttention(
        [SoftmaxAttention(np.diag([1.0, 0.0]), I2), SoftmaxAttention(I2, [[0.5, -0.8], [0.8, 0.5]])]
    )
    assert gaussian_limit(several, START).kind == "blow_up"
    l2 = gaussian_limit(L2Attention(np.diag([2.0, 1.0]), I2, I2), START)
    assert (l2.kind, l2.rank, l2.blow_up_time) == ("divergent", 1, np.inf)
    assert np.allclose(l2.covariance, np.diag([1.0, 0.0]), atol=1e-3)
    shrinking = gaussian_limit(SinkhornAttention(I2, -I2), START)
    assert (shrinking.kind, shrinking.rank) == ("zero", 0)
    # the mean runs away, the covariance does not care; with linear attention it does
    moved = GaussianMeasure([1.0, 1.0], S0)
    assert gaussian_limit(SoftmaxAttention(-I2, I2), moved).kind == "zero"
    assert gaussian_limit(LinearAttention(I2, I2), moved).kind == "blow_up"


@pytest.mark.parametrize("d", [2, 3, 5])
def test_integrated_limits_are_the_exact_ones(d):
    """Sixty random flows with V = I: kind, rank and limit of the integration against the closed form."""
    rng = np.random.default_rng(d)
    F = rng.normal(size=(60, d, d))
    covs = F @ np.swapaxes(F, 1, 2)
    K = rng.normal(size=(60, max(1, d // 2), d))
    A = -np.swapaxes(K, 1, 2) @ K
    A[::3] *= -1.0
    M, s = scaled_factor(covs)
    found = gaussian_limits(SoftmaxField(A, np.broadcast_to(np.eye(d), A.shape)), M, s, np.zeros((60, d)), tol=1e-9)
    for form, S, out in zip(A, covs, found, strict=True):
        attention = SoftmaxAttention(form, np.eye(d))
        exact = gaussian_limit(attention, GaussianMeasure(np.zeros(d), S))
        closed = covariance_closed_form(attention, GaussianMeasure(np.zeros(d), S))
        assert (out.kind, out.rank, out.settled) == (exact.kind, exact.rank, True)
        if out.kind == "blow_up":
            assert out.blow_up_time == pytest.approx(closed.blow_up_time, rel=1e-5)
            assert np.abs(out.covariance - exact.covariance).max() < 1e-4
        else:
            # 1/t of what dies is left in the directions that stay
            assert np.abs(out.covariance - exact.covariance).max() < 0.05 * np.abs(exact.covariance).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "d"), [("softmax", 3), ("softmax", 4), ("softmax", 5), ("l2", 3), ("l2", 4), ("l2", 5)]
)
def test_ranks_for_identity_values(variant, d):
    """A of rank floor(d/2): no rank above ceil(d/2), and finite limits have exactly that rank."""
    for symmetric in (True, False):
        study = limit_rank_histogram(variant, dim=d, draws=100, symmetric=symmetric, rng=d)
        top = -(-d // 2)
        assert study.ranks.max() <= top
        assert (study.ranks <= study.bounds).all()
        finite = np.array([l.kind == "finite" for l in study.limits])
        assert (study.ranks[finite] == top).all()
        assert finite.any() == symmetric  # x -> A + A^T of generic A has a positive direction
        assert study.counts.sum() == 100
        assert sum(study.kinds.values()) == 100
        if variant == "softmax":
            assert study.settled.all()


@pytest.mark.slow
@pytest.mark.parametrize("d", [3, 4, 5])
def test_ranks_for_random_values(d):
    """V random, A symmetric: settled finite limits have rank between dim - rank A (a kernel is kept) and the largest
    dimension on which the form of A vanishes, which for indefinite A exceeds ceil(d/2)."""
    study = limit_rank_histogram("softmax", dim=d, draws=60, value="random", symmetric=True, rng=d)
    finite = np.array([l.kind == "finite" and l.settled for l in study.limits])
    assert finite.sum() >= 10
    assert (study.ranks[finite] >= d - d // 2).all()
    assert (study.ranks[finite] <= study.bounds[finite]).all()
    assert study.settled.mean() > 0.9


def test_isotropic_dimension():
    assert isotropic_dimension(np.diag([1.0, -1.0])) == 1
    assert isotropic_dimension(np.eye(4)) == 0
    assert isotropic_dimension([[0.0, 1.0], [-1.0, 0.0]]) == 2  # skew: nothing moves for V = I
    assert isotropic_dimension(np.diag([1.0, -1.0, 0.0, 2.0, 0.0])) == 3


def test_degenerate_and_bad_input():
    dirac = gaussian_limit(SinkhornAttention(I2, I2), GaussianMeasure([1.0, 0.0], np.zeros((2, 2))))
    assert (dirac.kind, dirac.rank) == ("zero", 0)
    with pytest.raises(TypeError, match="constant in time"):
        gaussian_limit(lambda t: SoftmaxAttention(I2, I2), START)
    with pytest.raises(ValueError, match="dimension 2"):
        gaussian_limit(SoftmaxAttention(I2, I2), GaussianMeasure([0.0], [[1.0]]))
    with pytest.raises(ValueError, match="variant"):
        limit_rank_histogram("linear", dim=2, rng=0)
    with pytest.raises(ValueError, match="dim"):
        limit_rank_histogram(dim=0, rng=0)
