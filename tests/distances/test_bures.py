"""Bures-Wasserstein against 60 digits, near and far, of any rank; maps and geodesics."""

import mpmath as mp
import numpy as np
import pytest
from distance_truth import bures_digits, relative_error

from otattn._linalg import psd_sqrt
from otattn.distances import bures_geodesic, bures_wasserstein, covariance_distance, gaussian_transport_map
from otattn.distances.double_double import DoubleDouble, add, matmul, pivoted_factor, transpose
from otattn.measures import GaussianMeasure


def symmetric(M):
    return 0.5 * (M + M.T)


def conditioned(d, condition, rng):
    E = np.linalg.qr(rng.normal(size=(d, d)))[0]
    return symmetric((E * np.geomspace(1.0, 1.0 / condition, d)) @ E.T)


# ------------------------------------------------------------------------------------------------ cases B1 to
# B4


def test_B1_rank_one_against_the_identity():
    ones = np.ones((3, 3))
    assert covariance_distance(ones, np.eye(3)) == pytest.approx(np.sqrt((np.sqrt(3) - 1) ** 2 + 2), rel=1e-14)
    assert covariance_distance(ones, np.eye(3)) == pytest.approx(1.592450, abs=1e-6)
    thin = np.array([[1.0, 0.1], [0.1, 0.01]])
    assert covariance_distance(thin, np.eye(2)) == pytest.approx(np.sqrt((np.sqrt(1.01) - 1) ** 2 + 1), rel=1e-14)
    assert covariance_distance(thin, np.eye(2)) == pytest.approx(1.0000124, abs=1e-7)
    for S in (ones, thin, np.eye(3)):
        assert covariance_distance(S, S) == 0.0


@pytest.mark.parametrize(("S", "message"), [(-np.eye(2), "positive semi-definite"), ([[1, 0.5], [0, 1]], "symmetric")])
def test_B2_no_covariances(S, message):
    with pytest.raises(ValueError, match=f"not {message}"):
        covariance_distance(S, np.eye(2))
    with pytest.raises(ValueError, match=f"not {message}"):
        covariance_distance(np.eye(2), S)
    with pytest.raises(ValueError, match=f"not {message}"):
        GaussianMeasure(np.zeros(2), S)


@pytest.mark.parametrize("delta", [1e-4, 1e-8, 1e-12, 1e-15])
def test_B3_close_variances(delta):
    a, b = 1.0, 1.0 + delta
    value = bures_wasserstein(GaussianMeasure([0.0], [[a]]), GaussianMeasure([0.0], [[b]]))
    with mp.workdps(50):
        assert relative_error(value, mp.sqrt(mp.mpf(b)) - 1) < 1e-15
    assert value == pytest.approx(delta / 2, rel=0.2 if delta == 1e-15 else 1e-3)


def test_B4_covariance_of_few_samples():
    X = np.random.default_rng(4).normal(size=(4, 6))
    X -= X.mean(axis=0)
    S = X.T @ X / 4
    assert covariance_distance(S, S) == 0.0
    # the three directions of the samples, and three that are missing
    s = np.linalg.svd(X / 2, compute_uv=False)[:3]
    assert covariance_distance(S, np.eye(6)) == pytest.approx(np.sqrt(((s - 1) ** 2).sum() + 3), rel=1e-13)
    assert np.isfinite(covariance_distance(np.eye(6), S))


# ------------------------------------------------------------------------------------------------------
# accuracy


@pytest.mark.parametrize(
    ("d", "condition"),
    [
        *((d, c) for d in (1, 2) for c in (1.0, 1e4, 1e8)),
        (5, 1e8),
        *(pytest.param(d, c, marks=pytest.mark.slow) for d, c in ((5, 1.0), (5, 1e4), (16, 1e8))),
    ],
)
def test_sixty_digits_near_and_far(d, condition):
    rng = np.random.default_rng(d)
    S1 = conditioned(d, condition, rng)
    for delta in (1e-1, 1e-4, 1e-8, 1e-12) if d < 16 else (1e-2, 1e-12):
        M = np.eye(d) + delta * symmetric(rng.normal(size=(d, d)))
        Z = rng.normal(size=(d, d))
        for S2 in (symmetric(M @ S1 @ M.T), symmetric(S1 + delta * (Z @ Z.T) / d)):
            if (S2 == S1).all():
                continue
            truth = bures_digits(S1, S2)
            for value in (covariance_distance(S1, S2), covariance_distance(S2, S1)):
                assert relative_error(value, truth) < 1e-11


@pytest.mark.parametrize(
    ("d", "r", "q"),
    [
        (2, 1, 1),
        (3, 1, 2),
        (4, 2, 3),
        (6, 3, 3),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((6, 6, 2), (9, 4, 5))),
    ],
)
def test_sixty_digits_rank_deficient(d, r, q):
    """Integer factors: the rank deficiency of the stored covariances is exact."""
    rng = np.random.default_rng(10 * d + r)
    F, G = (rng.integers(-4, 5, size=(d, k)).astype(float) for k in (r, q))
    F[:r, :r] += 9 * np.eye(r)
    N = rng.integers(-3, 4, size=(r, r)).astype(float)
    N = N @ N.T + np.eye(r)
    S = F @ F.T
    others = [G @ G.T, np.eye(d), np.zeros((d, d)), 4.0 * S]
    for k in (4, 20, 30, 38):
        others.append(S + F @ N @ F.T * 2.0**-k)  # the same range
        others.append(S + np.diag(np.eye(d)[d - 1]) * 2.0**-k)  # a direction more, when there is one
    for other in others:
        truth = bures_digits(S, other, dps=90)
        assert relative_error(covariance_distance(S, other), truth) < 1e-14
        assert relative_error(covariance_distance(other, S), truth) < 1e-14


def test_diagonal_covariances_down_to_1e_12_of_the_scale():
    for a, b in (
        ([1, 0], [1, 1e-24]),
        ([1, 1e-24], [1, 4e-24]),
        ([1, 0, 3], [1, 1e-24, 3]),
        ([1e-30, 1], [4e-30, 1]),
    ):
        a, b = np.array(a, dtype=float), np.array(b, dtype=float)
        truth = np.linalg.norm(np.sqrt(a) - np.sqrt(b))
        assert covariance_distance(np.diag(a), np.diag(b)) == pytest.approx(truth, rel=1e-14)


def test_scales_with_the_units():
    rng = np.random.default_rng(3)
    S1, S2 = conditioned(4, 1e3, rng), conditioned(4, 1e3, rng)
    base = covariance_distance(S1, S2)
    near = covariance_distance(S1, S1 * (1 + 1e-9))
    for unit in (1e-200, 1e-10, 1e10, 1e200):
        assert covariance_distance(unit * S1, unit * S2) == pytest.approx(np.sqrt(unit) * base, rel=1e-12)
    for unit in (2.0**-600, 2.0**600):
        assert covariance_distance(unit * S1, unit * (S1 * (1 + 1e-9))) == pytest.approx(
            np.sqrt(unit) * near, rel=1e-13
        )


def test_factors_in_float64_leave_only_the_rounding_of_storage():
    """F F^T of a thin F is stored with eigenvalues near 1e-17 that mean nothing: they must not count."""
    rng = np.random.default_rng(8)
    for d, r in ((3, 1), (8, 3), (16, 7)):
        F = rng.normal(size=(d, r))
        s = np.linalg.svd(F, compute_uv=False)
        S = F @ F.T
        assert covariance_distance(S, np.eye(d)) == pytest.approx(np.sqrt(((s - 1) ** 2).sum() + d - r), rel=1e-13)
        G = F * (1 + 1e-6)
        assert covariance_distance(S, G @ G.T) == pytest.approx(1e-6 * np.linalg.norm(F), rel=1e-8)


# ----------------------------------------------------------------------------------------------------------
# laws


def test_batches_agree_with_single_pairs():
    rng = np.random.default_rng(5)
    Z = rng.normal(size=(2, 3, 4, 6))
    S = Z @ np.swapaxes(Z, -1, -2)
    near = S * (1 + 1e-9)
    mixed = np.where(np.arange(3)[None, :, None, None] == 0, near, S[::-1])
    batch = covariance_distance(S, mixed)
    assert batch.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        assert batch[i, j] == pytest.approx(float(covariance_distance(S[i, j], mixed[i, j])), rel=1e-12)
    assert covariance_distance(S, np.eye(4)).shape == (2, 3)
    assert covariance_distance(S[0, 0], S[0, 0]).shape == ()


def test_laws_of_a_distance():
    rng = np.random.default_rng(6)
    for ranks in ((4, 4, 4), (2, 3, 4), (1, 1, 2)):
        S, T, U = (Z @ Z.T for Z in (rng.normal(size=(4, r)) for r in ranks))
        assert covariance_distance(S, T) == pytest.approx(covariance_distance(T, S), rel=1e-13)
        assert covariance_distance(S, T) <= covariance_distance(S, U) + covariance_distance(U, T)
        Q = np.linalg.qr(rng.normal(size=(4, 4)))[0]
        turned = symmetric(Q @ S @ Q.T), symmetric(Q @ T @ Q.T)
        # turning rounds the covariances by 1e-16, and square roots of zero eigenvalues by 1e-8 times less
        # than that
        assert covariance_distance(*turned) == pytest.approx(covariance_distance(S, T), rel=1e-12)


def test_commuting_covariances_have_a_closed_form():
    rng = np.random.default_rng(7)
    a, b = rng.random(5), rng.random(5)
    E = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    value = covariance_distance(symmetric((E * a) @ E.T), symmetric((E * b) @ E.T))
    assert value == pytest.approx(np.linalg.norm(np.sqrt(a) - np.sqrt(b)), rel=1e-12)


def test_means_add_in_squares():
    g1 = GaussianMeasure([0.0, 0.0], np.eye(2))
    g2 = GaussianMeasure([3.0, 0.0], 25.0 * np.eye(2))
    assert bures_wasserstein(g1, g2) == pytest.approx(np.sqrt(9 + 32), rel=1e-14)
    assert bures_wasserstein(g1, g1) == 0.0
    near = GaussianMeasure([1e-9, 0.0], np.eye(2))
    assert bures_wasserstein(g1, near) == 1e-9


def test_bad_arguments():
    g = GaussianMeasure([0.0], [[1.0]])
    with pytest.raises(TypeError, match="GaussianMeasure"):
        bures_wasserstein(g, np.eye(1))
    with pytest.raises(ValueError, match="dimensions 1 and 2"):
        bures_wasserstein(g, GaussianMeasure([0.0, 0.0], np.eye(2)))
    with pytest.raises(ValueError, match="square"):
        covariance_distance(np.ones((2, 3)), np.eye(2))
    with pytest.raises(ValueError, match="one size"):
        covariance_distance(np.eye(2), np.eye(3))
    with pytest.raises(ValueError, match="finite"):
        covariance_distance([[np.nan]], [[1.0]])


# --------------------------------------------------------------------------------------------- map and
# geodesic


@pytest.mark.parametrize(("r", "q"), [(4, 4), (4, 2), (3, 3), (2, 1), (1, 0)])
def test_the_map_pushes_forward_and_is_optimal(r, q):
    rng = np.random.default_rng(10 * r + q)
    F, G = (
        rng.integers(-4, 5, size=(4, r)) + 5.0 * np.eye(4)[:, :r],
        rng.integers(-4, 5, size=(4, q)).astype(float),
    )
    g1, g2 = GaussianMeasure(rng.normal(size=4), F @ F.T), GaussianMeasure(rng.normal(size=4), G @ G.T)
    T, b = gaussian_transport_map(g1, g2)
    np.testing.assert_allclose(T @ g1.cov @ T.T, g2.cov, atol=1e-11 * np.abs(g2.cov).max(initial=1.0))
    np.testing.assert_allclose(T @ g1.mean + b, g2.mean, atol=1e-12)
    # E|x - Tx - b|^2 is the squared distance
    I = np.eye(4)
    spread = np.trace((I - T) @ g1.cov @ (I - T).T) + np.sum((g1.mean - g2.mean) ** 2)
    assert spread == pytest.approx(bures_wasserstein(g1, g2) ** 2, rel=1e-11)
    if r == 4:
        np.testing.assert_allclose(T, T.T, atol=0)
        assert np.linalg.eigvalsh(T)[0] > -1e-12
        root = psd_sqrt(g1.cov)
        closed = np.linalg.solve(root, psd_sqrt(root @ g2.cov @ root)) @ np.linalg.inv(root)
        # the closed form takes square roots of square roots: 1e-8 where g2 is singular
        np.testing.assert_allclose(T, closed, atol=1e-11 if q == 4 else 1e-6)


def test_no_map_raises_the_rank():
    line, plane = GaussianMeasure([0.0, 0.0], np.diag([1.0, 0.0])), GaussianMeasure([0.0, 0.0], np.eye(2))
    with pytest.raises(ValueError, match="ranks 1 and 2"):
        gaussian_transport_map(line, plane)
    T, _ = gaussian_transport_map(plane, line)
    np.testing.assert_allclose(T, np.diag([1.0, 0.0]), atol=1e-15)
    # orthogonal lines: every coupling is optimal, one of them is a map
    other = GaussianMeasure([0.0, 0.0], np.diag([0.0, 4.0]))
    T, _ = gaussian_transport_map(line, other)
    np.testing.assert_allclose(T @ line.cov @ T.T, other.cov, atol=1e-15)


@pytest.mark.parametrize(("r", "q"), [(3, 3), (3, 1), (1, 3), (1, 1)])
def test_geodesics_have_constant_speed(r, q):
    rng = np.random.default_rng(r + 5 * q)
    F, G = rng.normal(size=(3, r)), rng.normal(size=(3, q))
    g1, g2 = GaussianMeasure(rng.normal(size=3), F @ F.T), GaussianMeasure(rng.normal(size=3), G @ G.T)
    length = bures_wasserstein(g1, g2)
    points = [bures_geodesic(g1, g2, t) for t in (0.0, 0.25, 0.5, 1.0)]
    assert points[0] is g1
    assert points[-1] is g2
    for a, s in zip(points, (0.0, 0.25, 0.5, 1.0), strict=True):
        for b, t in zip(points, (0.0, 0.25, 0.5, 1.0), strict=True):
            # a point of low rank is stored with eigenvalues of rounding size
            assert bures_wasserstein(a, b) == pytest.approx(abs(s - t) * length, rel=1e-9, abs=1e-12)


def test_geodesic_is_the_interpolated_map():
    rng = np.random.default_rng(9)
    g1, g2 = (GaussianMeasure(rng.normal(size=3), conditioned(3, 10.0, rng)) for _ in range(2))
    T, b = gaussian_transport_map(g1, g2)
    t = 0.3
    pushed = g1.pushforward_affine((1 - t) * np.eye(3) + t * T, t * b)
    middle = bures_geodesic(g1, g2, t)
    np.testing.assert_allclose(middle.cov, pushed.cov, atol=1e-14)
    np.testing.assert_allclose(middle.mean, pushed.mean, atol=1e-14)
    for wrong in (-0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match=r"t must"):
            bures_geodesic(g1, g2, wrong)


# ------------------------------------------------------------------------------------------- double-double
# pieces


def as_digits(a: DoubleDouble, i: int = 0):
    return mp.matrix(a.high[i].tolist()) + mp.matrix(a.low[i].tolist())


@pytest.mark.parametrize(("m", "k", "n"), [(3, 3, 3), (5, 40, 2), (1, 1, 1)])
def test_products_have_thirty_digits(m, k, n):
    rng = np.random.default_rng(k)
    a = DoubleDouble(rng.normal(size=(2, m, k)), 1e-17 * rng.normal(size=(2, m, k)))
    b = DoubleDouble(rng.normal(size=(2, k, n)), 1e-17 * rng.normal(size=(2, k, n)))
    product = matmul(a, b)
    with mp.workdps(60):
        for i in range(2):
            error = as_digits(product, i) - as_digits(a, i) * as_digits(b, i)
            assert max(abs(v) for v in error) < 1e-28


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_pivoted_factors_reproduce_the_matrix(rank):
    F = np.random.default_rng(rank).integers(-9, 10, size=(5, rank)).astype(float)
    S = (F @ F.T)[None]
    factor = pivoted_factor(S, 1e-14)
    assert (factor.high[0, :, rank:] == 0.0).all()
    square = matmul(factor, transpose(factor))
    defect = add(square, DoubleDouble(-S, np.zeros_like(S)))
    assert np.abs(defect.high + defect.low).max() < 1e-28 * np.abs(S).max()
