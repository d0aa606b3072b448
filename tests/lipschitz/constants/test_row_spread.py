"""The largest variance of a row against rows of attention that climb towards it, and its table in two arithmetics."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import softmax

from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.constants.row_spread import Spread

LEAST = -7.0


def rows_of(X, A, root):
    """The largest eigenvalues of the covariances, ``h`` and ``log P_ii``."""
    P = softmax(X @ A @ X.T, axis=1)
    centred = X[None] - (P @ X)[:, None]
    top = np.linalg.eigvalsh(np.einsum("ik,ikd,ike->ide", P, centred, centred))[:, -1]
    return top, np.minimum(np.linalg.norm(X @ root, axis=1), 1.0), np.log(np.diag(P))


@pytest.mark.parametrize(
    ("n", "values"), [(8, (4.0, 4.0, 4.0)), (3, (1.0, 1.0)), (20, (9.0, 9.0)), (6, (6.0, 2.0, 0.3))]
)
def test_no_row_has_more(n, values):
    """A step up of the variance over its bound: two clusters, three clusters and tokens at random, on the sphere and inside."""
    rng = np.random.default_rng(0)
    a, d = max(values), len(values)
    A, root = np.diag(values), np.diag(np.sqrt(np.array(values) / a))
    spread, best = Spread(a, a / min(values), n, LEAST), 0.0

    def tokens(x):
        X = x.reshape(n, d)
        return X / np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))

    def ratio(x):
        top, h, lq = rows_of(tokens(x), A, root)
        return top[0] / float(spread((h[:1], h[:1]), (lq[:1], lq[:1]))[0])

    for trial in range(12):
        centres = rng.standard_normal((2 + trial % 3, d))
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        X = centres[rng.integers(0, len(centres), n)] + 0.1 * rng.standard_normal((n, d))
        X = X if trial % 4 else rng.standard_normal((n, d))
        X[0] = centres[0] * rng.choice([0.6, 0.8, 1.0])
        found = minimize(lambda x: -ratio(x), X.ravel(), method="L-BFGS-B", options={"maxiter": 15})
        top, h, lq = rows_of(tokens(found.x), A, root)
        assert (top <= spread((h, h), (lq, lq)) + 1e-12).all()
        best = max(best, -found.fun)
    # nor is it much more than a row has
    assert best > 0.85


def test_a_row_that_holds_all_of_itself_has_no_variance():
    spread = Spread(4.0, 1.0, 8, LEAST)
    h = np.linspace(0.5, 1.0, 9)
    few, many = (spread((h, h), (np.full(9, lq), np.full(9, lq))) for lq in (-1e-3, -1.0))
    # the last cell of log q ends at 0 and begins at LEAST / 64
    assert (few < 0.45).all()
    assert (many > few).all()


@pytest.mark.parametrize(("a", "stretch"), [(4.0, 1.0), (2.0, 3.0), (1.0, np.inf)])
def test_intervals_and_floats_give_one_table(a, stretch):
    own = Spread(a, stretch, 5, LEAST)
    exact = Spread(lift(a), lift(stretch) if np.isfinite(stretch) else stretch, 5, LEAST)
    assert np.abs(np.asarray(upper(exact.levels)) - own.levels).max() < 1e-11


def test_ranges_dominate_their_points():
    rng = np.random.default_rng(1)
    spread = Spread(4.0, 1.0, 8, LEAST)
    h, lq = 0.45 + 0.55 * rng.random((2, 4000)), LEAST * rng.random((2, 4000))
    h, lq = np.sort(h, axis=0), np.sort(lq, axis=0)
    side = 10 ** (-4 * rng.random(4000))
    h[1], lq[1] = h[0] + side * (h[1] - h[0]), lq[0] + side * (lq[1] - lq[0])
    whole = spread(tuple(h), tuple(lq))
    for _ in range(20):
        x, y = h[0] + rng.random(4000) * (h[1] - h[0]), lq[0] + rng.random(4000) * (lq[1] - lq[0])
        assert (spread((x, x), (y, y)) <= whole).all()
    assert (whole < 1).sum() > 1000
    assert (spread((h[0], h[0]), (lq[0], lq[0]))[h[0] < 0.5] == 1).all()


def test_no_table_where_the_trace_is_no_larger():
    assert (Spread(25.0, 1.0, 8, LEAST).levels == 1).all()
