"""Gaussian closed forms: against Gauss-Hermite quadrature, which converges to rounding, and against other formulas."""

from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest

from otattn.attention import (
    MLP,
    AttentionMap,
    Compose,
    ExponentialAttention,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    Residual,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.errors import NotGaussianPreservingError
from otattn.measures import DiscreteMeasure, GaussianMeasure

Rng = np.random.Generator


def covariance(rng: Rng, d: int, rank: int | None = None) -> np.ndarray:
    F = 0.6 * rng.standard_normal((d, d if rank is None else rank))
    return F @ F.T + (0.2 * np.eye(d) if rank is None else 0.0)


def quadrature(gaussian: GaussianMeasure, nodes: int) -> DiscreteMeasure:
    """The tensor rule on the range of the covariance, exact for polynomials of degree ``2 nodes - 1``."""
    s, E = np.linalg.eigh(gaussian.cov)
    keep = s > 1e-12 * s.max()
    F = E[:, keep] * np.sqrt(s[keep])
    t, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[t] * F.shape[1], indexing="ij"), axis=-1).reshape(-1, F.shape[1])
    mass = np.prod(np.stack(np.meshgrid(*[w] * F.shape[1], indexing="ij"), axis=-1).reshape(-1, F.shape[1]), axis=1)
    return DiscreteMeasure.normalized(gaussian.mean + grid @ F.T, mass)


def mat(rng: Rng, rows: int, columns: int) -> np.ndarray:
    return 0.5 * rng.standard_normal((rows, columns))


def qkv(rng: Rng, d: int, e: int, k: int) -> SoftmaxAttention:
    return SoftmaxAttention.from_qkv(
        mat(rng, k, d),
        mat(rng, k, d),
        mat(rng, e, d),
        query_bias=rng.standard_normal(k),
        key_bias=rng.standard_normal(k),
        value_bias=rng.standard_normal(e),
    )


def heads(rng: Rng, d: int) -> MultiHeadAttention:
    parts: list[SoftmaxAttention | L2Attention | SinkhornAttention | LinearAttention] = [
        qkv(rng, d, 2, 1),
        L2Attention(mat(rng, 2, d), mat(rng, 2, d), mat(rng, 3, d)),
        SinkhornAttention(mat(rng, d, d), mat(rng, d, d), tol=1e-12),
        LinearAttention(mat(rng, d, d), mat(rng, 1, d)),
    ]
    return MultiHeadAttention(parts, [mat(rng, d, h.out_dim) for h in parts], output_bias=rng.standard_normal(d))


MAPS: dict[str, Callable[[Rng, int], AttentionMap]] = {
    "softmax": lambda r, d: SoftmaxAttention(mat(r, d, d), mat(r, d, d)),
    "softmax-bias": lambda r, d: SoftmaxAttention(
        mat(r, d, d), mat(r, 3, d), bias=mat(r, 1, d)[0], value_bias=[1, 2, 3]
    ),
    "softmax-qkv": lambda r, d: qkv(r, d, 2, 1),
    "l2": lambda r, d: L2Attention(mat(r, 2, d), mat(r, 2, d), mat(r, 2, d)),
    "sinkhorn": lambda r, d: SinkhornAttention(mat(r, d, d), mat(r, 3, d), tol=1e-12),
    "linear": lambda r, d: LinearAttention(mat(r, d, d), mat(r, 2, d)),
    "multihead": heads,
    "residual": lambda r, d: Residual(SoftmaxAttention(mat(r, d, d), mat(r, d, d)), scale=0.3),
    "compose": lambda r, d: Compose(Residual(qkv(r, d, d, 2)), L2Attention(mat(r, d, d), mat(r, d, d), mat(r, 2, d))),
}


@pytest.mark.parametrize("shape", ["d=1", "d=2", "d=2-rank=1", "d=2-point"])
@pytest.mark.parametrize("name", MAPS)
def test_closed_form_is_the_limit_of_quadrature(name: str, shape: str) -> None:
    rng = np.random.default_rng(7)
    d = int(shape[2])
    rank = {"d=2-rank=1": 1, "d=2-point": 0}.get(shape)
    attention = MAPS[name](rng, d)
    gaussian = GaussianMeasure(rng.standard_normal(d), covariance(rng, d, rank))
    G, b = attention.gaussian_affine(gaussian)
    measure = (
        quadrature(gaussian, 40 if d == 1 or rank is not None else 24)
        if rank != 0
        else DiscreteMeasure([gaussian.mean])
    )
    # also off the support: where Sinkhorn extends its potential by the row condition
    x = gaussian.mean + rng.standard_normal((5, d))
    # 1e-8: the error of the rule, largest for the composition, whose second map sees a wider measure
    assert np.abs(attention(x, measure) - (x @ G.T + b)).max() < 1e-8
    field = attention.field_jacobian(x, measure)
    assert np.abs(field - G).max() < 1e-7
    image = attention.pushforward(gaussian)
    pushed = attention.pushforward(measure)
    assert np.allclose(image.mean, pushed.mean(), rtol=0, atol=1e-8)
    assert np.allclose(image.cov, pushed.covariance(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", MAPS)
def test_samples_converge_to_the_closed_form(name: str) -> None:
    rng = np.random.default_rng(8)
    attention = MAPS[name](rng, 2)
    gaussian = GaussianMeasure(rng.standard_normal(2), 0.3 * covariance(rng, 2))
    G, b = attention.gaussian_affine(gaussian)
    x = gaussian.mean + 0.3 * rng.standard_normal((3, 2))
    errors = []
    repeats = 3 if name in ("sinkhorn", "multihead") else 24
    for n in (50, 1250):
        draws = [attention(x, gaussian.sample(n, rng)) - (x @ G.T + b) for _ in range(repeats if n > 50 else 24)]
        errors.append(np.sqrt(np.mean(np.square(draws))))
    # Monte Carlo: five times smaller for 25 times the sample, give or take the noise of the draws
    assert errors[1] < 0.45 * errors[0]
    assert errors[1] < 0.1


def floats(M: mp.matrix) -> np.ndarray:
    return np.array([[float(x) for x in row] for row in M.tolist()])


def mp_sqrt(M: mp.matrix) -> mp.matrix:
    """The root of a positive definite matrix by its eigenvectors, at the working precision of mpmath."""
    s, E = mp.eigsy(M)
    return E * mp.diag([mp.sqrt(x) for x in s]) * E.T


def entropic_plan(A: np.ndarray, S: np.ndarray) -> np.ndarray:
    """``A^{-1}`` times the coupling of N(0, A S A^T) and N(0, S) against ``S^{-1}`` (Janati et al. 2020, theorem 1).

    The coupling is a difference of two nearly equal matrices for small A: 50 digits leave more than 40 of them.
    """
    with mp.workdps(50):
        form, cov, one = mp.matrix(A.tolist()), mp.matrix(S.tolist()), mp.eye(len(A))
        root = mp_sqrt(form * cov * form.T)
        cross = (root * mp_sqrt(4 * root * cov * root + one) * root**-1 - one) / 2
        return floats((form**-1 * cross).T * cov**-1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_sinkhorn_closed_form_against_entropic_transport(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    A = scale * (rng.standard_normal((3, 3)) + 1.5 * np.eye(3))
    S = covariance(rng, 3)
    G, b = SinkhornAttention(A, np.eye(3)).gaussian_affine(GaussianMeasure(np.zeros(3), S))
    # the tilted covariance is known to 1e-15 |S| (a dozen roundings of dimension 3), and A multiplies that error
    size = np.linalg.norm(S, 2) * np.linalg.norm(A, 2)
    assert np.abs(G - entropic_plan(A, S)).max() <= 2e-14 * size
    assert (b == 0).all()


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_sinkhorn_coupling_has_the_right_precision(rank: int, scale: float) -> None:
    """``G = (S - G S G^T) A``: the conditional covariance times the form, for singular A and S as well."""
    rng = np.random.default_rng(rank)
    A = scale * rng.standard_normal((3, 2)) @ rng.standard_normal((2, 3))
    S = covariance(rng, 3, rank)
    G, _ = SinkhornAttention(A, np.eye(3)).gaussian_affine(GaussianMeasure(np.ones(3), S))
    error = np.abs(G - (S - G @ S @ G.T) @ A).max()
    # G loses the ratio of the largest to the smallest entry of the tilted covariance, about |S| |A|, and the identity
    # multiplies that error by |A| once more
    size = max(1.0, np.abs(A).max())
    assert error <= 1e-14 * size**2
    # the coupling has correlations at most one
    assert np.linalg.eigvalsh(S - G @ S @ G.T).min() >= -1e-12


def test_sinkhorn_keeps_the_mean_and_matches_the_symmetric_form() -> None:
    rng = np.random.default_rng(3)
    S, A, V = covariance(rng, 3), rng.standard_normal((3, 3)), rng.standard_normal((2, 3))
    mean = rng.standard_normal(3)
    gaussian = GaussianMeasure(mean, S)
    G, b = SinkhornAttention(A, V).gaussian_affine(gaussian)
    assert np.allclose(G @ mean + b, V @ mean, rtol=1e-13, atol=1e-14)
    with mp.workdps(50):
        root = mp_sqrt(mp.matrix(S.tolist()))
        U, s, Wt = mp.svd_r(root * mp.matrix(A.tolist()) * root)
        M = U * mp.diag([2 * x / (1 + mp.sqrt(1 + 4 * x * x)) for x in s]) * Wt
        exact = floats(mp.matrix(V.tolist()) * root * M * root**-1)
    assert np.allclose(G, exact, rtol=1e-13, atol=1e-14)


def test_l2_does_not_invert_the_covariance() -> None:
    rng = np.random.default_rng(4)
    Q, K, V, S = (rng.standard_normal((3, 3)) for _ in range(4))
    S = S @ S.T
    mean = rng.standard_normal(3)
    G, b = L2Attention(Q, K, V).gaussian_affine(GaussianMeasure(mean, S))
    with mp.workdps(50):
        q, k, v, precision = (mp.matrix(M.tolist()) for M in (Q, K, V, S))
        precision = precision**-1
        posterior = v * (precision + 2 * k.T * k) ** -1
        slope, shift = floats(2 * posterior * k.T * q), floats(posterior * precision * mp.matrix(mean.tolist()))
    # a hundred roundings of numbers of the size of the factors
    size = np.linalg.norm(V, 2) * max(1.0, np.linalg.norm(S, 2)) * max(1.0, np.linalg.norm(K, 2) ** 2)
    assert np.abs(G - slope).max() <= 2e-14 * size * np.linalg.norm(Q, 2)
    assert np.abs(b - shift.ravel()).max() <= 2e-14 * size * np.linalg.norm(mean)


@pytest.mark.parametrize("name", MAPS)
def test_pushforward_is_the_affine_image(name: str) -> None:
    rng = np.random.default_rng(9)
    attention = MAPS[name](rng, 3)
    gaussian = GaussianMeasure(rng.standard_normal(3), covariance(rng, 3, 2))
    G, b = attention.gaussian_affine(gaussian)
    image = attention.pushforward(gaussian)
    assert isinstance(image, GaussianMeasure)
    assert np.allclose(image.mean, G @ gaussian.mean + b, rtol=0, atol=1e-12)
    assert np.allclose(image.cov, G @ gaussian.cov @ G.T, rtol=0, atol=1e-12)


def test_compositions_push_the_gaussian_through() -> None:
    rng = np.random.default_rng(10)
    first, second = Residual(qkv(rng, 2, 2, 2), scale=0.5), SinkhornAttention(mat(rng, 2, 2), mat(rng, 2, 2))
    gaussian = GaussianMeasure(rng.standard_normal(2), covariance(rng, 2))
    once, both = second.pushforward(first.pushforward(gaussian)), Compose(first, second).pushforward(gaussian)
    assert np.allclose(both.mean, once.mean, rtol=0, atol=1e-13)
    assert np.allclose(both.cov, once.cov, rtol=0, atol=1e-13)


EYE = np.eye(2)


@pytest.mark.parametrize(
    "attention",
    [
        SigmoidAttention(EYE, EYE),
        ReLUAttention(EYE, EYE),
        ExponentialAttention(EYE, EYE),
        MaskedAttention(SoftmaxAttention(EYE, EYE)),
        LayerNorm([1.0, 1.0]),
        MLP(EYE, [0.0, 0.0], EYE),
        MultiHeadAttention([SoftmaxAttention(EYE, EYE), SigmoidAttention(EYE, EYE)]),
        Residual(ReLUAttention(EYE, EYE)),
        Compose(SoftmaxAttention(EYE, EYE), LayerNorm([1.0, 1.0])),
    ],
    ids=lambda a: type(a).__name__,
)
def test_other_variants_refuse_gaussians(attention: AttentionMap) -> None:
    gaussian = GaussianMeasure([0.0, 0.0], EYE)
    with pytest.raises(NotGaussianPreservingError, match="does not map Gaussian"):
        attention.pushforward(gaussian)


@pytest.mark.parametrize("name", MAPS)
def test_wrong_dimension_and_wrong_entry_are_named(name: str) -> None:
    attention = MAPS[name](np.random.default_rng(0), 2)
    with pytest.raises(ValueError, match="must live in dimension 2, received 3"):
        attention.gaussian_affine(GaussianMeasure(np.zeros(3), np.eye(3)))
    with pytest.raises(TypeError, match="GaussianMeasure"):
        attention([[0.0, 0.0]], GaussianMeasure(np.zeros(2), np.eye(2)))
