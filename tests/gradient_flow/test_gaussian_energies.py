"""Energies on Gaussians: Bures-Wasserstein gradients, closedness of covariance flows, limits of particles."""

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
from otattn.gradient_flow import bures_closedness, covariance_tangent, energies
from otattn.gradient_flow import gaussian_structure as module
from otattn.measures import GaussianMeasure

BUILDERS = {
    "softmax": energies.GaussianSoftmaxEnergy,
    "sinkhorn": energies.GaussianSinkhornEnergy,
    "l2": energies.GaussianL2Energy,
}


def _sym(rng: np.random.Generator, d: int) -> np.ndarray:
    B = rng.standard_normal((d, d)) / np.sqrt(d)
    return (B + B.T) / np.sqrt(2.0)


def _cov(rng: np.random.Generator, d: int, rank: int | None = None) -> np.ndarray:
    F = rng.standard_normal((d, rank or 2 * d)) / np.sqrt(2 * d)
    return F @ F.T


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("rank", [None, 2])
def test_gradient_along_curves_of_gaussians(name: str, rank: int | None) -> None:
    """``E`` along ``N(m + s u, (I + s U) S (I + s U))`` has the slope ``<grad_m, u> + tr(T S U)``, any rank of S."""
    rng = np.random.default_rng(0)
    d = 3
    energy = BUILDERS[name](_sym(rng, d))
    m, S, u, U = rng.standard_normal(d), _cov(rng, d, rank), rng.standard_normal(d), _sym(rng, d)

    def along(s: float) -> float:
        M = np.eye(d) + s * U
        return energy(GaussianMeasure(m + s * u, M @ S @ M.T))

    h = 1e-4
    slope = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    du, T = energy.gradient(GaussianMeasure(m, S))
    assert np.array_equal(T, T.T)
    assert slope == pytest.approx(du @ u + np.sum(T * (S @ U)), rel=1e-9)


def test_sinkhorn_gaussian_gradient_for_a_form_that_is_not_symmetric() -> None:
    rng = np.random.default_rng(1)
    A, S, U, m = rng.standard_normal((3, 3)), _cov(rng, 3), _sym(rng, 3), rng.standard_normal(3)
    energy = energies.GaussianSinkhornEnergy(A)
    h = 1e-4
    values = [energy(GaussianMeasure(m, (np.eye(3) + s * U) @ S @ (np.eye(3) + s * U))) for s in (-h, h)]
    _, T = energy.gradient(GaussianMeasure(m, S))
    assert (values[1] - values[0]) / (2 * h) == pytest.approx(np.sum(T * (S @ U)), rel=1e-6)


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("c", [1.0, -1.0, 0.5])
def test_covariance_flows_are_the_gradients(d: int, c: float) -> None:
    rng = np.random.default_rng(10 * d)
    A, K, S = _sym(rng, d), rng.standard_normal((d, d)), _cov(rng, d)
    for attention in (
        SoftmaxAttention(A, c * A),
        LinearAttention(A, c * A),
        SinkhornAttention(A, c * A),
        L2Attention(2.0 * K, K, c * K.T @ K),
    ):
        known = energies.known_gaussian_structure(attention)
        assert known is not None
        energy, coefficient = known
        assert coefficient == pytest.approx(2.0 * c if isinstance(attention, L2Attention) else c, rel=1e-12)
        T = covariance_tangent(attention, S)
        assert np.allclose(T, coefficient * energy.gradient(GaussianMeasure(np.zeros(d), S))[1], rtol=1e-9, atol=1e-11)


def test_sinkhorn_closed_form_against_its_coupling() -> None:
    """``E = (E <A x, y> - KL) / 2`` with the joint covariance that the closed form of the map implies."""
    rng = np.random.default_rng(3)
    for d in (1, 2, 5):
        A, S, m = rng.standard_normal((d, d)), _cov(rng, d), rng.standard_normal(d)
        G, _ = SinkhornAttention(A, np.eye(d)).gaussian_affine(GaussianMeasure(m, S))
        cross = G @ S  # cov(y, x)
        joint = np.block([[S, cross.T], [cross, S]])
        kl = 0.5 * (2.0 * np.linalg.slogdet(S)[1] - np.linalg.slogdet(joint)[1])
        expected = 0.5 * (np.sum(A * cross) + m @ A @ m - kl)
        assert energies.GaussianSinkhornEnergy(A)(GaussianMeasure(m, S)) == pytest.approx(expected, rel=1e-9)


def test_sinkhorn_gaussian_is_the_limit_of_particles() -> None:
    """Quantiles of a normal law: the discrete energy tends to the closed form (error of the quadrature 1e-3)."""
    from scipy.stats import norm

    n = 400
    x = norm.ppf((np.arange(n) + 0.5) / n)[:, None]
    exact = energies.GaussianSinkhornEnergy([[1.5]])(GaussianMeasure([0.0], [[1.0]]))
    assert energies.SinkhornEnergy([[1.5]])(x) == pytest.approx(exact, rel=1e-2)
    coarse = abs(energies.SinkhornEnergy([[1.5]])(x[::8] + 0.0) - exact)
    assert abs(energies.SinkhornEnergy([[1.5]])(x) - exact) < 0.5 * coarse


def test_sinkhorn_energy_of_tiny_and_huge_covariances() -> None:
    """``E ~ tr(A S A S) / 4`` for small S, ``E ~ tr |B| / 2`` for large S; no cancellation in either."""
    A = np.array([[1.0, 0.5], [0.5, -2.0]])
    for s in (1e-3, 1e-6, 1e-9):
        S = s * np.array([[2.0, 0.3], [0.3, 1.0]])
        small = energies.GaussianSinkhornEnergy(A)(GaussianMeasure([0.0, 0.0], S))
        limit = energies.GaussianSoftmaxEnergy(A)(GaussianMeasure([0.0, 0.0], S))
        assert small == pytest.approx(limit, rel=100 * s * s + 1e-9)
    S = 1e12 * np.eye(2)
    large = energies.GaussianSinkhornEnergy(A)(GaussianMeasure([0.0, 0.0], S))
    assert large == pytest.approx(0.5 * 1e12 * np.abs(np.linalg.eigvalsh(A)).sum(), rel=1e-10)
    assert energies.GaussianSinkhornEnergy(A)(GaussianMeasure([0.0, 0.0], np.zeros((2, 2)))) == 0.0


@pytest.mark.parametrize("d", [2, 3, 4, 5])
def test_closed_exactly_where_there_is_an_energy(d: int) -> None:
    rng = np.random.default_rng(d)
    A, B, K, S = _sym(rng, d), rng.standard_normal((d, d)), rng.standard_normal((d, d)), _cov(rng, d)
    for V in (A, -A):
        for build in (SoftmaxAttention, SinkhornAttention, LinearAttention):
            assert bures_closedness(build(A, V), S).value < 1e-10
    assert bures_closedness(L2Attention(1.5 * K, K, K.T @ K), S).value < 1e-10
    two = MultiHeadAttention([SoftmaxAttention(A, A), SinkhornAttention(A @ A, -A @ A)])
    assert bures_closedness(two, S).value < 1e-10
    for attention in (
        SoftmaxAttention(A, np.eye(d)),
        SinkhornAttention(A, np.eye(d)),
        SoftmaxAttention(B, B.T),
        SinkhornAttention(B, B.T),
        L2Attention(A, np.eye(d), A),
        L2Attention(B, K, B.T @ K),
        L2Attention(K, K, np.eye(d)),
    ):
        assert bures_closedness(attention, S).value > 1e-2


def test_closedness_against_differences_of_the_tangent() -> None:
    rng = np.random.default_rng(7)
    d = 2
    A, S = rng.standard_normal((d, d)), _cov(rng, d)
    basis = [np.diag([1.0, 0.0]), np.diag([0.0, 1.0]), np.array([[0.0, 1.0], [1.0, 0.0]]) / np.sqrt(2.0)]
    for attention in (
        SoftmaxAttention(A, np.eye(d)),
        SinkhornAttention(A, A.T),
        L2Attention(A, np.eye(d), A.T),
        LinearAttention(A, A),
    ):
        h = 1e-5
        D = np.array(
            [
                [
                    np.sum((covariance_tangent(attention, S + h * U) - covariance_tangent(attention, S - h * U)) * W)
                    / (2 * h)
                    for U in basis
                ]
                for W in basis
            ]
        )
        expected = np.linalg.norm(D - D.T) / np.linalg.norm(D + D.T)
        assert bures_closedness(attention, S).value == pytest.approx(expected, rel=1e-6)


def test_probes_agree_with_the_exact_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    A, S = _sym(rng, 4), _cov(rng, 4)
    none, closed = SoftmaxAttention(A, np.eye(4)), SinkhornAttention(A, A)
    exact = bures_closedness(none, S).value
    monkeypatch.setattr(module, "BASIS_SIZE", 1)
    estimate = bures_closedness(none, S, rng=1, probes=4000)
    assert estimate.probes == 4000
    assert 0.0 < estimate.error < 0.1 * exact
    assert abs(estimate.value - exact) < 5.0 * estimate.error
    assert bures_closedness(closed, S, rng=1).value < 1e-10


def test_energy_rises_along_the_covariance_flow() -> None:
    """``dE/dt = tr(T S T) / c`` for ``S' = T S + S T``."""
    rng = np.random.default_rng(9)
    A, K, S = _sym(rng, 3), rng.standard_normal((3, 3)), _cov(rng, 3)
    for attention in (SoftmaxAttention(A, -A), SinkhornAttention(A, A), L2Attention(K, K, -K.T @ K)):
        known = energies.known_gaussian_structure(attention)
        assert known is not None
        energy, c = known
        T = covariance_tangent(attention, S)
        h = 1e-5
        up, down = (energy(GaussianMeasure(np.zeros(3), S + s * h * (T @ S + S @ T))) for s in (1.0, -1.0))
        assert (up - down) / (2 * h) == pytest.approx(np.trace(T @ S @ T) / c, rel=1e-7)


def test_bad_input() -> None:
    A = np.array([[1.0, 0.5], [0.5, -1.0]])
    with pytest.raises(ValueError, match="symmetric"):
        energies.GaussianSoftmaxEnergy([[1.0, 2.0], [0.0, 1.0]])
    with pytest.raises(TypeError, match="must be a GaussianMeasure"):
        energies.GaussianSoftmaxEnergy(A)(np.eye(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dimension 2 of the energy, received 1"):
        energies.GaussianSinkhornEnergy(A)(GaussianMeasure([0.0], [[1.0]]))
    with pytest.raises(ValueError, match="positive definite"):
        bures_closedness(SoftmaxAttention(A, A), np.diag([1.0, 0.0]))
    with pytest.raises(ValueError, match="2 -> 1"):
        bures_closedness(SoftmaxAttention(A, A[:1]), np.eye(2))
    for attention in (SigmoidAttention(A, A), MaskedAttention(SoftmaxAttention(A, A))):
        with pytest.raises(NotGaussianPreservingError):
            bures_closedness(attention, np.eye(2))
    for attention in (SoftmaxAttention(A, np.eye(2)), SigmoidAttention(A, A), L2Attention(A, np.eye(2), A)):
        assert energies.known_gaussian_structure(attention) is None
