"""Measures that are not compact: attention keeps Gaussians Gaussian, and covariances follow a matrix equation."""

import numpy as np
from scipy.integrate import solve_ivp
from seed import CACP25, SABP22, TALKS, seed

import otattn as oa

RNG = np.random.default_rng
A, V = np.array([[1.0, 0.5], [-0.3, -0.8]]), np.array([[0.7, 0.2], [-0.4, 1.1]])
MEAN, COV = np.array([0.3, -0.2]), np.array([[0.5, 0.1], [0.1, 0.4]])
GAUSSIAN = oa.GaussianMeasure(MEAN, COV)


def quadrature(gaussian: oa.GaussianMeasure, nodes: int = 24) -> oa.DiscreteMeasure:
    """Gauss-Hermite points: attention of this measure is that of the Gaussian to many digits."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[x] * gaussian.dim, indexing="ij"), axis=-1).reshape(-1, gaussian.dim)
    weights = np.prod(np.stack(np.meshgrid(*[w] * gaussian.dim, indexing="ij"), axis=-1), axis=-1).ravel()
    return oa.DiscreteMeasure.normalized(gaussian.mean + grid @ np.linalg.cholesky(gaussian.cov).T, weights)


def affine_as_measured(attention: oa.AttentionMap, gaussian: oa.GaussianMeasure = GAUSSIAN) -> None:
    """``Gamma_mu`` is the affine map that the library says, at points around the mean."""
    G, b = attention.gaussian_affine(gaussian)
    x = gaussian.mean + 0.5 * RNG(0).standard_normal((4, gaussian.dim))
    np.testing.assert_allclose(attention(x, quadrature(gaussian)), x @ G.T + b, rtol=1e-7, atol=1e-9)


@seed(CACP25, "agrees", "otattn.SoftmaxAttention", "otattn.GaussianMeasure")
def test_softmax_keeps_gaussians() -> None:
    """Softmax attention of ``mu = N(alpha, Sigma)`` is affine, ``Gamma_mu(x) = V (alpha + Sigma A x)``, so it keeps
    Gaussians Gaussian.
    """
    attention = oa.SoftmaxAttention(A, V)
    affine_as_measured(attention)
    G, b = attention.gaussian_affine(GAUSSIAN)
    np.testing.assert_allclose(G, V @ COV @ A, rtol=1e-12)
    np.testing.assert_allclose(b, V @ MEAN, rtol=1e-12)
    image = attention.pushforward(GAUSSIAN)
    np.testing.assert_allclose(image.cov, G @ COV @ G.T, rtol=1e-12)


@seed(CACP25, "agrees", "otattn.L2Attention", "otattn.GaussianMeasure")
def test_l2_keeps_gaussians() -> None:
    """L2 attention: ``Gamma_mu(x) = V (Sigma^{-1} + 2 K^T K)^{-1} (Sigma^{-1} alpha + 2 K^T Q x)``."""
    Q, K = A, 0.5 * A + 0.1
    attention = oa.L2Attention(Q, K, V)
    affine_as_measured(attention)
    precision = np.linalg.inv(COV)
    G, b = attention.gaussian_affine(GAUSSIAN)
    np.testing.assert_allclose(G, V @ np.linalg.solve(precision + 2 * K.T @ K, 2 * K.T @ Q), rtol=1e-10)
    np.testing.assert_allclose(b, V @ np.linalg.solve(precision + 2 * K.T @ K, precision @ MEAN), rtol=1e-10)


@seed(f"{CACP25}; {SABP22}", "agrees", "otattn.SinkhornAttention", "otattn.GaussianMeasure")
def test_sinkhorn_keeps_gaussians() -> None:
    """Sinkhorn attention: affine through the entropic coupling of the Gaussian with itself; for scalars ``Gamma(x) = V
    (alpha + 2b / (1 + sqrt(1 + 4 b^2)) (x - alpha))``, ``b = A Sigma``.
    """
    gaussian = oa.GaussianMeasure([0.3], [[0.5]])
    attention = oa.SinkhornAttention([[1.4]], [[0.9]], tol=1e-12)
    affine_as_measured(attention, gaussian)
    b = 1.4 * 0.5
    np.testing.assert_allclose(
        attention.gaussian_affine(gaussian)[0], 0.9 * 2 * b / (1 + np.sqrt(1 + 4 * b * b)), rtol=1e-12
    )


@seed(CACP25, "agrees", "otattn.MultiHeadAttention", "otattn.GaussianMeasure")
def test_multi_head_keeps_gaussians() -> None:
    """Multi-head attention: sums of affine maps, so Gaussians stay Gaussian."""
    affine_as_measured(oa.MultiHeadAttention([oa.SoftmaxAttention(A, V), oa.SoftmaxAttention(-A.T, V)], [V, A]))


@seed(f"{CACP25}; {TALKS}", "agrees", "otattn.LinearAttention", "otattn.GaussianMeasure")
def test_linear_attention_keeps_gaussians() -> None:
    """Linear attention: ``Gamma_mu(x) = V (Sigma + alpha alpha^T) A x``."""
    attention = oa.LinearAttention(A, V)
    affine_as_measured(attention)
    np.testing.assert_allclose(attention.gaussian_affine(GAUSSIAN)[0], V @ (COV + np.outer(MEAN, MEAN)) @ A, rtol=1e-12)


@seed(
    CACP25,
    "agrees",
    "otattn.ExponentialAttention",
    "otattn.SigmoidAttention",
    "otattn.NotGaussianPreservingError",
)
def test_which_do_not_keep_gaussians() -> None:
    """Sigmoid attention and other unnormalised kernels do not: ``Gamma_mu`` is not affine. They are refused."""
    x = np.array([[-2.0], [1.0], [4.0]]) * np.ones((1, 2))
    for attention in (oa.SigmoidAttention(A, V), oa.ReLUAttention(A, V), oa.ExponentialAttention(A, V)):
        values = attention(x, quadrature(GAUSSIAN))
        assert np.abs(values[0] + values[2] - 2 * values[1]).max() > 1e-3
        try:
            attention.gaussian_affine(GAUSSIAN)
        except oa.NotGaussianPreservingError:
            continue
        raise AssertionError(attention)


@seed(CACP25, "agrees", "otattn.gaussian_flow", "otattn.covariance_closed_form")
def test_covariance_equation() -> None:
    """Along the PDE ``alpha' = V (I + Sigma A) alpha`` and ``Sigma' = V Sigma A Sigma + Sigma A^T Sigma V^T``."""
    path = oa.gaussian_flow(oa.SoftmaxAttention(A, V), GAUSSIAN, t_span=(0.0, 0.5), t_eval=[0.5])

    def field(t, y):
        alpha, S = y[:2], y[2:].reshape(2, 2)
        G = V @ S @ A
        return np.concatenate([V @ alpha + G @ alpha, (G @ S + S @ G.T).ravel()])

    end = solve_ivp(field, (0.0, 0.5), np.concatenate([MEAN, COV.ravel()]), rtol=1e-11, atol=1e-13).y[:, -1]
    np.testing.assert_allclose(path.means[-1], end[:2], rtol=1e-8)
    np.testing.assert_allclose(path.covs[-1], end[2:].reshape(2, 2), rtol=1e-8)


@seed(CACP25, "agrees", "otattn.covariance_closed_form", "otattn.gaussian_flow", value="0.2500")
def test_closed_form() -> float:
    """If V commutes with ``H = VA + A^T V^T`` and with ``Sigma_0``: ``Sigma(t) = (Sigma_0^{-1} - t H)^{-1}``, up to the
    time ``1 / lambda_max(Sigma_0^{1/2} H Sigma_0^{1/2})`` if that is positive, else for all times.

    Value: that time for ``A = V = 1``, ``Sigma_0 = 2``.
    """
    form = np.array([[1.0, 0.4], [0.4, -0.7]])
    attention = oa.SoftmaxAttention(form, np.eye(2))
    closed = oa.covariance_closed_form(attention, GAUSSIAN)
    np.testing.assert_allclose(closed(0.3), np.linalg.inv(np.linalg.inv(COV) - 0.3 * 2 * form), rtol=1e-10)
    path = oa.gaussian_flow(attention, GAUSSIAN, t_span=(0.0, 0.3), t_eval=[0.3])
    np.testing.assert_allclose(path.covs[-1], closed(0.3), rtol=1e-8)
    return oa.covariance_closed_form(
        oa.SoftmaxAttention([[1.0]], [[1.0]]), oa.GaussianMeasure([0.0], [[2.0]])
    ).blow_up_time


@seed(CACP25, "agrees", "otattn.gaussian_flow", story="plot_blow_up.py", value="0.2500")
def test_blow_up_in_finite_time() -> float:
    """Softmax flows of Gaussians may blow up in finite time.

    Value: the time that the integration finds for ``Sigma' = 2 Sigma^2``, ``Sigma_0 = 2`` (exact: a quarter).
    """
    path = oa.gaussian_flow(
        oa.SoftmaxAttention([[1.0]], [[1.0]]), oa.GaussianMeasure([0.0], [[2.0]]), t_span=(0.0, 1.0)
    )
    assert path.status == "blow_up"
    return path.blow_up_time


@seed(CACP25, "agrees", "otattn.gaussian_flow", story="plot_blow_up.py")
def test_multi_head_blows_up() -> None:
    """So do flows of several heads."""
    heads = oa.MultiHeadAttention(
        [oa.SoftmaxAttention(np.diag([1.0, -0.5]), np.eye(2)), oa.SoftmaxAttention(np.diag([-0.2, 0.3]), np.eye(2))]
    )
    path = oa.gaussian_flow(heads, oa.GaussianMeasure([0.0, 0.0], np.eye(2)), t_span=(0.0, 10.0))
    assert path.status == "blow_up"
    np.testing.assert_allclose(
        path.blow_up_time, 1.0 / (2 * 0.8), rtol=1e-6
    )  # 0.8 is the first entry of the sum of the heads


@seed(CACP25, "agrees", "otattn.gaussian_flow", story="plot_blow_up.py", value="rate 2.00")
def test_l2_never_blows_up() -> float:
    """Under L2 attention nothing blows up in finite time: the covariance may diverge, at most exponentially.

    Value: the rate of the trace between t = 20 and 30, ``V = K = I``, ``Q = diag(1, 1/2)``; 2 at most.
    """
    attention = oa.L2Attention(np.diag([1.0, 0.5]), np.eye(2), np.eye(2))
    path = oa.gaussian_flow(attention, GAUSSIAN, t_span=(0.0, 30.0), t_eval=[20.0, 30.0])
    assert path.status == "success"
    return float(path.log_traces[-1] - path.log_traces[0]) / 10.0


@seed(CACP25, "agrees", "otattn.gaussian_flow", value="rate 2.0")
def test_sinkhorn_never_blows_up() -> float:
    """Nor under Sinkhorn attention: ``|M| <= 1`` in ``Gamma(x) = V (alpha + M (x - alpha))``.

    Value: the rate of the trace between t = 10 and 20, ``A = V = I``, which is 2 for large covariances.
    """
    attention = oa.SinkhornAttention(np.eye(2), np.eye(2))
    path = oa.gaussian_flow(attention, GAUSSIAN, t_span=(0.0, 20.0), t_eval=[10.0, 20.0])
    assert path.status == "success"
    return float(path.log_traces[-1] - path.log_traces[0]) / 10.0


@seed(CACP25, "agrees", "otattn.gaussian_flow", value="rank 2")
def test_the_rank_is_conserved() -> int:
    """The rank of the covariance is constant in time; it drops in the limit only."""
    F = np.array([[1.0, 0.2], [0.3, 0.5], [-0.4, 0.6]])
    form, values = RNG(0).standard_normal((2, 3, 3))
    path = oa.gaussian_flow(
        oa.SoftmaxAttention(0.3 * form, values), oa.GaussianMeasure(np.zeros(3), F @ F.T), t_span=(0.0, 0.3)
    )
    eigenvalues = np.linalg.eigvalsh(path.shapes[-1])
    return int((eigenvalues > 1e-9).sum())


@seed(f"{CACP25}; {TALKS}", "agrees", "otattn.bures_wasserstein", "otattn.bures_geodesic")
def test_bures_wasserstein() -> None:
    """``W_2(N(a, S), N(b, T))^2 = |a - b|^2 + tr S + tr T - 2 tr (S^{1/2} T S^{1/2})^{1/2}``, and geodesics stay Gaussian."""
    other = oa.GaussianMeasure([1.0, 0.0], [[1.0, -0.3], [-0.3, 0.6]])
    w, U = np.linalg.eigh(COV)
    root = (U * np.sqrt(w)) @ U.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ other.cov @ root)).sum()
    squared = np.sum((MEAN - other.mean) ** 2) + np.trace(COV) + np.trace(other.cov) - 2 * cross
    distance = oa.bures_wasserstein(GAUSSIAN, other)
    np.testing.assert_allclose(distance, np.sqrt(squared), rtol=1e-10)
    middle = oa.bures_geodesic(GAUSSIAN, other, 0.5)
    np.testing.assert_allclose(oa.bures_wasserstein(GAUSSIAN, middle), distance / 2, rtol=1e-9)


@seed(f"{SABP22}", "agrees", "otattn.SinkhornAttention", "otattn.L2Attention", value="-0.500, rows only -1.00")
def test_heat_limit_of_sinkhorn_attention() -> tuple[float, float]:
    """As ``A = I / eps`` and ``eps -> 0`` Sinkhorn attention operates a heat diffusion: ``(x - Gamma_mu(x)) / eps`` tends
    to ``-(1/2) grad log mu``.

    On N(0, 1), where ``grad log mu = -x``. Value: ``(Gamma_mu(x) - x) / (eps x)`` at eps = 1e-4, and the same for rows
    of ``e^{-|x-y|^2 / 2 eps}`` normalised once.
    """
    eps, gaussian = 1e-4, oa.GaussianMeasure([0.0], [[1.0]])
    K = [[1 / np.sqrt(2 * eps)]]
    maps = (oa.SinkhornAttention([[1 / eps]], [[1.0]]), oa.L2Attention(K, K, [[1.0]]))
    once, twice = ((float(attention.gaussian_affine(gaussian)[0][0, 0]) - 1.0) / eps for attention in maps)
    return once, twice


@seed(TALKS, "open", "otattn.SoftmaxAttention", "otattn.gaussian_flow", value="0.56 away from affine")
def test_mixtures_of_gaussians() -> float:
    """Beyond Gaussians: are mixtures kept?

    Not by softmax: ``Gamma_mu`` is an average of affine maps with weights that depend on x. Value: second difference of
    it between the means of ``N(-1, 0.1)`` and ``N(1, 0.1)``, ``A = V = 1``.
    """
    halves = [quadrature(oa.GaussianMeasure([m], [[0.1]])) for m in (-1.0, 1.0)]
    mixture = oa.DiscreteMeasure(
        np.concatenate([half.points for half in halves]), np.concatenate([half.weights for half in halves]) / 2
    )
    attention = oa.SoftmaxAttention([[1.0]], [[1.0]])
    x = np.array([[0.0], [1.0], [2.0]])
    m, g = np.array([-1.0, 1.0]), 0.1
    weights = np.exp(x * m + x**2 * g / 2)
    values = attention(x, mixture)
    np.testing.assert_allclose(
        values,
        (weights * (m + g * x)).sum(axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True),
        rtol=1e-8,
        atol=1e-12,
    )
    return abs(float(values[0, 0] - 2 * values[1, 0] + values[2, 0]))
