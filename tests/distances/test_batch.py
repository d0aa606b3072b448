"""Batched transport: the values of the single problems, also where floats are short."""

import numpy as np
import pytest

import otattn as oa
from otattn._linalg import polar_factor


@pytest.mark.parametrize("p", [1, 1.5, 2, 8, 20, np.inf])
@pytest.mark.parametrize("shape", [(40, 1, 3), (40, 5, 1), (40, 6, 3), (3, 40, 2)])
def test_values_of_single_problems(p, shape) -> None:
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(2, *shape))
    values = oa.wasserstein_batch(X, Y, p=p)
    single = [oa.wasserstein(x, y, p=p) for x, y in zip(X, Y, strict=True)]
    assert values == pytest.approx(single, rel=1e-13)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_near_far_and_equal_clouds(p) -> None:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(8, 7, 3))
    shift = np.array([0.6, 0.0, 0.8])
    for scale, offset in ((1e-8, 10.0), (1e-12, 0.0), (1e-170, 0.0), (1e-320, 0.0), (1e160, 0.0)):
        Z = offset + (X if scale > 1e-100 else X * scale)
        Y = Z + scale * shift
        # the shift as it is stored moves every point: no plan is shorter than the move of the mean
        moved = np.linalg.norm((Y - Z).mean(axis=1) / scale, axis=1) * scale
        assert oa.wasserstein_batch(Z, Y, p=p) == pytest.approx(moved, rel=1e-6 if offset or scale < 1e-300 else 1e-3)
    assert (oa.wasserstein_batch(X, X[:, ::-1], p=p) == 0.0).all()


def test_bad_shapes() -> None:
    X = np.zeros((2, 3, 2))
    for Y in (np.zeros((2, 4, 2)), np.zeros((3, 2)), np.zeros((0, 3, 2)), np.full((2, 3, 2), np.nan)):
        with pytest.raises(ValueError, match="Y"):
            oa.wasserstein_batch(X, Y)
    with pytest.raises(ValueError, match="at least one"):
        oa.wasserstein_batch(X[:0], X[:0])
    with pytest.raises(ValueError, match="p"):
        oa.wasserstein_batch(X, X, p=0.5)


def test_polar_factor_in_the_plane_is_that_of_the_svd() -> None:
    rng = np.random.default_rng(2)
    M = rng.normal(size=(500, 2, 2))
    M[:100] *= np.array([1.0, 1e-7])
    U, _, Wt = np.linalg.svd(M)
    assert polar_factor(M) == pytest.approx(U @ Wt, abs=1e-9)
    for special in (np.zeros((2, 2)), np.ones((2, 2)), np.diag([1.0, -1.0]), 1e-300 * np.eye(2)):
        Q = polar_factor(special)
        assert np.abs(Q.T @ Q - np.eye(2)).max() < 1e-15
        assert np.trace(Q.T @ special) == pytest.approx(np.linalg.svd(special)[1].sum(), rel=1e-14)
