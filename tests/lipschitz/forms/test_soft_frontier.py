"""The soft lemma: its lines against rational arithmetic, against climbs over x, and lines that prove nothing."""

import math
from fractions import Fraction

import numpy as np
import pytest

from otattn.lipschitz.arithmetic.balls import BallMatrix, exact_arithmetic
from otattn.lipschitz.arithmetic.entropy import entropies, varentropies, varentropy
from otattn.lipschitz.forms.frontier import TILTS, Frontier


def unit(M):
    return M / np.linalg.norm(M, 2)


def some_pairs(rng):
    """Forms and values in one dimension and more, of full and of lower rank, skew, orthogonal, with equal singular values."""
    for d in (1, 2, 2, 3, 4, 6):
        A, V = rng.standard_normal((d, d)), rng.standard_normal((int(rng.integers(1, d + 2)), d))
        yield unit(A), unit(V)
        yield unit(np.outer(A[0], A[-1])), unit(V)
        yield unit(A), unit(np.outer(A[0], V[0]))
        yield np.diag(np.append(1.0, np.full(d - 1, 0.4))), np.eye(d)
        yield np.linalg.qr(A)[0], unit(V)
        if d > 1:
            yield unit(A - A.T), unit(V)


def form(A, V, s):
    return V.T @ V if s == 0.0 else 0.5 * (s * V.T @ V + A @ A.T / s)


def over(A, V, line, height, x):
    """How far ``M - lambda g' g'^T`` is above its height, for rows x of norm one; -inf where ``A x`` is 0."""
    s, _, slope, _ = line
    g = x @ A.T
    size = np.linalg.norm(g, axis=1)
    g = g / np.maximum(size, 1e-300)[:, None]
    M = form(A, V, s) - slope * g[:, :, None] * g[:, None, :]
    return np.where(size > 0.0, np.linalg.eigvalsh(M)[:, -1] - height, -np.inf), size


def test_lines_hold_every_direction_in_rational_arithmetic():
    """``<d, M d> <= (y + eta) |d|^2 + lambda <d, g>^2 / |g|^2`` without rounding, at x and d of floats."""
    rng = np.random.default_rng(0)
    exact = np.vectorize(Fraction, otypes=[object])
    checked = 0
    for A, V in some_pairs(rng):
        frontier, d = Frontier.found(A, V), len(A)
        square, height = frontier.proved_lines
        good = np.flatnonzero(square < 0.99 * np.linalg.norm(A, 2) ** 2)
        A_, V_ = exact(A), exact(V)
        values, keys = V_.T @ V_, A_ @ A_.T
        top = np.linalg.svd(A)[2][0]
        for k in rng.permutation(good)[:25].tolist():
            s, _, slope, _ = (Fraction(v) for v in frontier.lines[k].tolist())
            M = values if s == 0 else (s * values + keys / s) / 2
            for spread in (0.0, 0.2, 0.6):
                x = top + spread * rng.standard_normal(d)
                x_ = exact(x / np.linalg.norm(x) * (1.0 - 1e-15))
                g = A_ @ x_
                if not (x_ @ x_ <= 1 and g @ g > Fraction(float(square[k]))):
                    continue
                worst = np.linalg.eigh(
                    form(A, V, float(s)) - float(slope) * np.outer(*2 * [(A @ x) / np.linalg.norm(A @ x)])
                )[1][:, -1]
                for direction in (worst, rng.standard_normal(d)):
                    e = exact(direction)
                    assert e @ M @ e <= Fraction(float(height[k])) * (e @ e) + slope * (e @ g) ** 2 / (g @ g)
                    checked += 1
    assert checked > 1000


def test_lines_survive_climbs_and_are_near_the_truth():
    rng = np.random.default_rng(1)
    tight = []
    for A, V in some_pairs(rng):
        frontier, d = Frontier.found(A, V), len(A)
        square, height = frontier.proved_lines
        good = np.flatnonzero(square < 0.99)
        most = -math.inf
        for k in rng.permutation(good)[:12].tolist():
            x = np.linalg.svd(A)[2][0] + 0.4 * rng.standard_normal((200, d))
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            line, width = frontier.lines[k], 0.3

            def score(x, line=line, k=k, A=A, V=V, square=square, height=height):
                value, size = over(A, V, line, height[k], x)
                return np.where(size**2 > square[k], value, -np.inf)

            best = score(x)
            for _ in range(40):
                y = x + width * rng.standard_normal(x.shape)
                y /= np.linalg.norm(y, axis=1, keepdims=True)
                found = score(y)
                x, best = np.where((found > best)[:, None], y, x), np.maximum(found, best)
                width *= 0.85
            assert best.max() <= 1e-13
            most = max(most, float(best.max()))
        tight += [most] if d > 1 and good.size else []
    assert len(tight) > 10
    assert np.median(tight) > -0.02


def test_lines_are_below_what_was_known():
    """The lemma with the form's norm along ``A x`` gives ``((y c')^{1/2} + (norm c)^{1/2})^2``, ``c' = 1 - c``: lines are less."""
    A = np.array([[1.0, 0.2, 0.0], [-0.1, 0.5, 0.3], [0.4, 0.0, -0.2]])
    A, V = unit(A), np.diag([1.0, 0.4, 0.3])
    frontier = Frontier.found(A, V)
    gamma = np.array([0.8, 0.9, 0.97])
    for values, hard, norm in ((True, frontier.at(gamma)[0], 1.0), (False, frontier.at(gamma)[2:].min(axis=0), 1.0)):
        y, slope, _ = frontier.least(gamma, TILTS, norm, values=values)
        for c in (0.02, 0.05, 0.1, 0.2):
            line = (y + slope * c).min(axis=0)
            assert (line < 0.97 * (np.sqrt(hard * (1 - c)) + math.sqrt(norm * c)) ** 2).all()


def test_lines_that_prove_nothing_leave_the_norm():
    A, V = unit(np.array([[1.0, 0.2, 0.0], [-0.1, 0.5, 0.3], [0.4, 0.0, -0.2]])), np.diag([1.0, 0.4, 0.3])
    good = Frontier.found(A, V)
    gamma = np.array([0.5, 0.9, 0.999])
    assert (good.least(gamma, TILTS, 1.0, values=True)[0][0, 1:] < 0.9).all()
    for factor in ([1.0, 0.1, 1.0, 1.0], [1.0, 1.0, 1.0, 1e-9], [1.0, 1.0, 1.0, 1e9]):
        none = Frontier(A, V, good.heights, good.shares, good.lines * factor)
        for values in (True, False):
            y, slope, which = none.least(gamma, TILTS, 1.0, values=values)
            assert (which == -1).all()
            assert (y == 1.0).all()
            assert (slope == 0.0).all()
    # a slope that is too small is not proved: along the eigenvector a line is no lower than the form
    y, slope, which = Frontier(A, V, good.heights, good.shares, good.lines * [1.0, 1.0, 0.3, 1.0]).least(
        gamma, TILTS, 1.0, values=True
    )
    assert ((which == -1) | (y + slope >= 1.0)).all()
    y, slope, which = good.least(np.zeros(2), TILTS, 0.7, values=False)
    assert (y == 0.7).all()
    assert (which == -1).all()
    for wrong in ([[0.0, 1.0, 1.0, 0.0]], [[1e-4, 1.0, 1.0, 1.0]], [[1.0, 0.0, 1.0, 1.0]], [[1.0, 1.0, 0.0, 1.0]]):
        with pytest.raises(ValueError, match="lines must be"):
            Frontier.of(A, V, {"heights": good.heights, "shares": good.shares, "lines": np.array(wrong)})


def test_decisive_lines_are_enough():
    A, V = next(pair for pair in some_pairs(np.random.default_rng(2)) if len(pair[0]) == 3)
    good, gamma = Frontier.found(A, V), np.linspace(0.0, 1.0, 21)
    few = good.decisive((gamma, TILTS))
    assert 0 < len(few.lines) < 0.2 * len(good.lines)
    for values in (True, False):
        for one, other in zip(*(f.least(gamma, TILTS, 1.0, values=values)[:2] for f in (good, few)), strict=True):
            assert (one == other).all()


def test_balls_prove_the_same_lines():
    pytest.importorskip("flint")
    rng = np.random.default_rng(3)
    for A, V in list(some_pairs(rng))[:17:3]:
        good = Frontier.found(A, V)
        index = np.arange(0, len(good.lines), 37)
        with exact_arithmetic():
            balls = Frontier(BallMatrix.exact(A), BallMatrix.exact(V), good.heights, good.shares, good.lines[index])
            square, height = balls.proved_lines
        near = good.proved_lines
        alike = np.isfinite(square) & np.isfinite(near[0][index])
        assert alike.sum() >= 0.9 * index.size or len(A) == 1
        assert square[alike] == pytest.approx(near[0][index][alike], abs=1e-6)
        assert height[alike] == pytest.approx(near[1][index][alike], abs=1e-9)
        assert (height[alike] >= good.lines[index][alike, 1]).all()


def test_varentropy_of_laws_with_an_entropy():
    """Laws at random, on two values, and climbed ones."""
    rng = np.random.default_rng(4)
    for m in (2, 3, 7, 40):
        ends = entropies(m + 1)
        bound = varentropies(m, ends)
        Q = rng.dirichlet(np.full(m, 0.4), 3000) + 1e-300
        k = rng.integers(1, m, 3000)
        s = 1.0 / (1.0 + np.exp(-rng.uniform(-9.0, 9.0, 3000)))
        first = np.arange(m) < k[:, None]
        Q[::2] = np.where(first, (s / k)[:, None], ((1 - s) / (m - k))[:, None])[::2]
        close = np.zeros(bound.size)
        for _ in range(25):
            Q = Q / Q.sum(axis=1, keepdims=True)
            H = -(Q * np.log(Q)).sum(axis=1)
            nu = (Q * np.log(Q) ** 2).sum(axis=1) - H**2
            cell = np.clip(np.searchsorted(ends, H) - 1, 0, bound.size - 1)
            assert (nu <= bound[cell] * (1.0 + 1e-12) + 1e-12).all()
            np.maximum.at(close, cell, nu / bound[cell])
            Q = Q ** (1.0 + 0.1 * rng.standard_normal(Q.shape) * (rng.random(Q.shape) < 0.3)) + 1e-300
        assert np.median(close) > 0.9
        assert 0.97 < bound.max() / varentropy(m) < 1.03
        assert bound[-1] < 0.2 * bound.max()
