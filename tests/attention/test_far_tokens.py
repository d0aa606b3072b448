"""One token far away takes no digits from the others: values and derivatives against 60 digits."""

import mpmath as mp
import numpy as np
import pytest

import otattn as oa
from otattn._linalg import cloud_centre

RNG = np.random.default_rng(0)
A, V = RNG.normal(size=(2, 2)), RNG.normal(size=(2, 2))
HEAD = oa.SoftmaxAttention(A, V)
FAR = [1e3, 1e8, 1e12, 1e17, 1e30]


def exact(A, V, X):
    """Values at the tokens and the spectral norm of the derivative, from the product rule."""
    with mp.workdps(120):
        n, d = X.shape
        A, V, X = (mp.matrix(M.tolist()) for M in (A, V, X))
        L, P = X * A.T * X.T, mp.matrix(n, n)
        for i in range(n):
            E = [mp.exp(L[i, j] - max(L[i, :])) for j in range(n)]
            for j in range(n):
                P[i, j] = E[j] / sum(E)
        columns = []
        for k in range(n):
            for c in range(d):
                D, dP = mp.matrix(n, d), mp.matrix(n, n)
                D[k, c] = 1
                dL = D * A.T * X.T + X * A.T * D.T
                for i in range(n):
                    mean = sum(P[i, j] * dL[i, j] for j in range(n))
                    for j in range(n):
                        dP[i, j] = P[i, j] * (dL[i, j] - mean)
                columns.append(list((dP * X + P * D) * V.T))
        norm = float(mp.svd_r(mp.matrix(columns), compute_uv=False)[0])
        return np.array((P * X * V.T).tolist(), dtype=float), norm


@pytest.mark.parametrize("far", FAR)
def test_values_and_derivatives(far):
    X = np.array([[0.3, -0.5], [1.0, 0.2], [-far, 0.4]])
    values, norm = exact(A, V, X)
    np.testing.assert_allclose(HEAD.on_tokens(X), values, rtol=1e-12)
    ordinary = X.copy()
    ordinary[2, 0] = 1.0
    batch = HEAD.on_batch(np.stack([ordinary, X]))
    np.testing.assert_allclose(batch[1], values, rtol=1e-12)
    np.testing.assert_allclose(batch[0], exact(A, V, ordinary)[0], rtol=1e-12)
    assert np.linalg.norm(HEAD.jacobian(X).to_dense(), 2) == pytest.approx(norm, rel=1e-12)
    assert oa.local_lipschitz(HEAD, X).particle == pytest.approx(norm, rel=1e-12)
    heads = oa.MultiHeadAttention([HEAD, HEAD], [np.eye(2), np.eye(2)])
    assert oa.local_lipschitz(heads, X).particle == pytest.approx(2.0 * norm, rel=1e-12)


@pytest.mark.parametrize("far", FAR)
def test_other_variants_keep_the_near_tokens(far):
    """Values at the near tokens, whose logits to the far one are minus infinity, are those without it."""
    near = np.array([[0.3, -0.5], [1.0, 0.2]])
    X = np.r_[near, [[-far, -far]]]
    for attention in (
        oa.L2Attention(np.eye(2), np.eye(2), V),
        oa.SoftmaxAttention(np.eye(2) * 200.0, V, bias=[2e3, 2e3]),
    ):
        expected = attention.on_tokens(near)
        np.testing.assert_allclose(attention.on_tokens(X)[:2], expected, rtol=1e-12)


def test_the_centre():
    uniform = np.full(4, 0.25)
    cloud = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [2.0, 2.0]])
    assert cloud_centre(cloud, uniform).tolist() == [2.0, 2.0]
    offset = cloud + 1e8
    assert cloud_centre(offset, uniform).tolist() == [1e8 + 2.0, 1e8 + 2.0]
    cloud[3] = [4e9, 0.0]
    assert np.abs(cloud_centre(cloud, uniform)).max() <= 3.0
    # far atoms that weigh nothing do not move the mean
    assert np.abs(cloud_centre(cloud, np.array([0.5, 0.5, 0.0, 0.0]))).tolist() == [1.5, 1.5]
    assert np.isfinite(cloud_centre(np.full((2, 2), 1.7e308) * [[1.0], [-1.0]], np.full(2, 0.5))).all()


def test_a_query_keeps_its_digits_beside_a_far_first_token():
    """A masked map measures keys from the first token; a query is not, or it would see all logits alike."""
    attention = oa.MaskedAttention(oa.SoftmaxAttention([[1.0, 0.2], [-0.3, 0.5]], np.eye(2)))
    out = attention.on_tokens([[1e17, 0.0], [0.3, 0.2], [1.0, 0.5]])
    # <A x, 1e17 e_1> is 3.4e16 and 1.1e17: each row sees the first token alone
    np.testing.assert_array_equal(out, np.tile([1e17, 0.0], (3, 1)))
