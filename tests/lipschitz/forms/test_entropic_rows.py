"""Rows with the mass of their own token: each inequality of the proof against samples, the rows against adversaries."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.arithmetic.entropy import entropies, mean_square, varentropy
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.certificate import Statement
from otattn.lipschitz.constants.self_logit import SelfLogit
from otattn.lipschitz.forms.entropic_rows import GAMMA, EntropicRows, Sight, _apart, _merged
from otattn.lipschitz.forms.frontier import Frontier
from otattn.lipschitz.forms.frontier_rows import Whole
from otattn.lipschitz.forms.own_blocks import MASSES, OwnBlocks
from otattn.measures import Ball

FORM = np.array([[1.0, 0.2, 0.0], [-0.1, 0.5, 0.3], [0.4, 0.0, -0.2]])
VALUES = np.diag([1.0, 0.4, 0.3])
HEADS = {
    "generic": (FORM, VALUES),
    "minus one": (-np.eye(2), np.eye(2)),
    "skew": (np.array([[0.0, 1.0], [-1.0, 0.0]]), np.array([[1.0, 0.3]])),
    "one dimension": (np.array([[1.0]]), np.array([[1.0]])),
}


def unit(M):
    return M / np.linalg.norm(M, 2)


@cache
def known(name, a, n):
    """The head, the own blocks and what is known of the rows."""
    A, V = (unit(M) for M in HEADS[name])
    whole = Whole.of(Statement(oa.SoftmaxAttention(a * A, V), Ball(1.0), n, 2.0))
    frontier = Frontier.found(whole.A, whole.V)
    blocks = OwnBlocks.found(whole.A, whole.V, whole.field)
    low = SelfLogit.default(whole.head).lower(a * GAMMA[:-1], a * GAMMA[1:]) - 1e-12 * a
    sight = Sight.of(a, n, low, whole.field, frontier)
    return A, V, sight, blocks, EntropicRows.of(sight, blocks)


def tokens(rng, n, A):
    """On the sphere, inside, clusters, singular vectors, or two tokens across the gradient of one, with the others far below."""
    d, kind = len(A), rng.integers(5)
    X = rng.standard_normal((n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    if kind == 1:
        X *= rng.random((n, 1))
    if kind == 2:
        X = X[rng.integers(0, 3, n)]
    if kind == 3:
        U, _, W = np.linalg.svd(A)
        X = np.concatenate([U.T, -U.T, W, -W])[rng.integers(0, 4 * d, n)]
    if kind == 4:
        g = A @ X[0] / (np.linalg.norm(A @ X[0]) + 1e-300)
        u, h = X[1] - g * (g @ X[1]), rng.random() * g
        u *= math.sqrt(1.0 - h @ h) / (np.linalg.norm(u) + 1e-300)
        X[1], X[2], X[3:] = h + u, h - u, -g
    return X / np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))


def first_row(X, A, V, a):
    """Gradient, weights, differences to the mean, covariance and blocks of the row of the first token."""
    g = A @ X[0]
    logits = a * X @ g
    P = np.exp(logits - logits.max())
    P /= P.sum()
    Y = X - P @ X
    C = (P[:, None] * Y).T @ Y
    J = P[:, None, None] * (V + a * (Y @ V.T)[:, :, None] * g)
    J[0] += a * V @ C @ A
    return g, P, Y, C, J


def largest(J, e, u):
    """The largest image of the row at token norms e, from the direction u by alternation."""
    for _ in range(15):
        z = np.einsum("nij,i->nj", J, u)
        eps = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-300) * e[:, None]
        u = np.einsum("nij,nj->i", J, eps)
        R = float(np.linalg.norm(u))
        u = u / max(R, 1e-300)
    return R


def bound_of(rows, e):
    one, two, *rest = np.sort(e[1:])[::-1]
    third, rem, n = max(rest, default=0.0), float(np.square(rest).sum()), e.size
    one, two, third, rem = (np.array([x]) for x in (one, two, third, rem))
    bounds = [float(x.row(e[None, :1], (one, two), third, rem, n - 3)[0, 0]) for x in (rows, rows.coarse)]
    assert bounds[0] <= bounds[1] * (1.0 + 1e-12)
    if n > 3:
        # a third norm for itself
        more = rows.row(
            e[None, :1], (one, two, third), np.sort(rest)[-2:-1] if n > 4 else 0.0 * third, rem - third**2, n - 4
        )
        bounds.append(float(more[0, 0]))
        assert bounds[2] <= bounds[0] * (1.0 + 1e-12)
    return min(bounds)


@pytest.mark.parametrize(
    ("name", "a", "n", "least"),
    [("generic", 4.0, 8, 0.4), ("minus one", 12.0, 3, 0.6), ("skew", 1.0, 5, 0.6), ("one dimension", 3.0, 4, 0.6)],
)
def test_rows_survive_climbs(name, a, n, least):
    rng = np.random.default_rng(0)
    A, V, _, _, rows = known(name, a, n)
    most = 0.0

    def ratio(X, e):
        J = first_row(X, A, V, a)[-1]
        starts = (rng.standard_normal(len(V)), np.linalg.svd(J[e.argmax()])[0][:, 0])
        return max(largest(J, e, u) for u in starts) / bound_of(rows, e)

    for _ in range(20):
        X, e = tokens(rng, n, A), np.sqrt(rng.dirichlet(np.full(n, 0.4)))
        best, step = ratio(X, e), 0.3
        for _ in range(25):
            Y = X + step * rng.standard_normal(X.shape) * (rng.random((n, 1)) < 0.6)
            Y /= np.maximum(1.0, np.linalg.norm(Y, axis=1, keepdims=True))
            f = np.abs(e + step * rng.standard_normal(n) * (rng.random() < 0.6))
            f /= np.linalg.norm(f)
            if (value := ratio(Y, f)) > best:
                X, e, best = Y, f, value
            step *= 0.9
        most = max(most, best)
    assert least < most <= 1.0


def test_the_entropy_of_a_row_and_its_logits():
    """The identities of the proof, and the variance of logits."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        n, a, (A, V) = int(rng.integers(3, 9)), float(np.exp(rng.uniform(-1.0, 2.0))), (unit(FORM), unit(VALUES))
        X = tokens(rng, n, A)
        g, P, Y, C, _ = first_row(X, A, V, a)
        p, q, Q = P[0], 1.0 - P[0], P[1:] / (1.0 - P[0])
        eta, logit = -(Q @ np.log(Q)), math.log(P[0] / (1.0 - P[0]))
        assert a * g @ (X[0] - Q @ X[1:]) == pytest.approx(logit + eta, abs=1e-9)
        assert a * g @ (P @ X) == pytest.approx(a * g @ X[0] - q * (logit + eta), abs=1e-9)
        along = np.log(Q) @ (Q * np.log(Q)) - eta**2
        assert along <= varentropy(n - 1)
        assert a * a * g @ C @ g == pytest.approx(q * along + p * q * (logit + eta) ** 2, abs=1e-9)
        heavy = 1 + int(Q.argmax())
        assert a * g @ Y[heavy] == pytest.approx(math.log(P[heavy]) - P @ np.log(P), abs=1e-9)


def test_varentropy_is_attained():
    for m in (2, 3, 7, 63):
        s = np.linspace(0.01, 0.99, 9801)
        attained = (s * (1 - s) * (np.log(s / (1 - s)) + math.log(m - 1)) ** 2).max()
        assert attained <= varentropy(m) <= 1.01 * attained


def test_own_blocks_hold_pairs():
    """The braces with the real ``pq``, at random and extreme pairs."""
    rng = np.random.default_rng(2)
    for name in HEADS:
        A, V, _, blocks, _ = known(name, 4.0, 5)
        d = len(A)
        x, y = rng.standard_normal((2, 2000, d))
        x[::2], y[::3] = np.linalg.svd(A)[2][0] + 0.2 * x[::2], -x[::3]
        x, y = (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1.0) for z in (3.0 * x, 3.0 * y))
        D, g = x - y, x @ A.T
        product = np.linalg.norm(D @ V.T, axis=1) * np.linalg.norm(g + D @ A, axis=1)
        best = 0.0
        for (at, theta, _, nu, xi, *_), W in zip(blocks.members[::29], blocks.W[::29], strict=True):
            p = rng.uniform(MASSES[int(at)], MASSES[int(at) + 1], 2000)
            value = p * (1 - p) * product + (1 - p) * theta * (1.0 - np.square(y).sum(axis=1))
            value += xi * np.square(g).sum(axis=1) - nu * (g * D).sum(axis=1)
            most = (1.0 - MASSES[int(at)]) * theta + W
            assert (value <= most + 1e-12).all()
            best = max(best, float((value / max(most, 1e-12)).max()))
        assert best > 0.9


def test_field_parts_lie_below_their_lines():
    """``||V C_Q A|| <= theta tr C_Q + omega`` for rows of real attention, each on its cell of gamma."""
    rng = np.random.default_rng(3)
    a, n, close = 40.0, 5, 0.0
    A, V, sight, _, _ = known("generic", a, n)
    theta = sight.field * np.array([0.0, 0.3, 0.6, 1.0])[:, None, None]
    omega = sight.beyond(theta)[:, :, 0]
    for _ in range(600):
        X = tokens(rng, n, A)
        g, P, *_ = first_row(X, A, V, a)
        Q, Z = P[1:] / max(float(P[1:].sum()), 1e-300), X[1:]
        Z = Z - Q @ Z
        C = (Q[:, None] * Z).T @ Z
        cell = min(int(np.linalg.norm(g) * (GAMMA.size - 1)), GAMMA.size - 2)
        line = theta[:, 0, 0] * np.trace(C) + omega[:, cell]
        f = np.linalg.norm(V @ C @ A, 2)
        assert (f <= line + 1e-12).all()
        close = max(close, float(f / max(line.min(), 1e-9)))
    assert close > 0.5
    assert omega[0, -1] < 0.8 * sight.field  # the frontier says something


def test_what_the_others_see_of_a_unit_vector():
    """``q^2 T`` at its largest over the unit vectors, with the row's own ``1 - |m|^2``, at random and climbed."""
    rng = np.random.default_rng(6)
    for name, a, n, least in (("generic", 4.0, 8, 0.6), ("skew", 2.0, 4, 0.75), ("one dimension", 3.0, 4, 0.85)):
        A, V, sight, _, _ = known(name, a, n)

        def ratio(X, A=A, V=V, a=a, sight=sight, n=n):
            g, P, Y, *_ = first_row(X, A, V, a)
            at = int(np.searchsorted(MASSES, P[0], side="right")) - 1
            if not 0 < at < MASSES.size - 2:
                return 0.0
            Q = P[1:] / P[1:].sum()
            column = np.searchsorted(entropies(n), -(Q @ np.log(Q))) - 1
            row = min(int(np.linalg.norm(g) * (GAMMA.size - 1)), GAMMA.size - 2)
            seen = [V + a * np.outer(V @ y, g) for y in Y[1:]]
            T = np.linalg.eigvalsh(sum(w * N @ N.T for w, N in zip(Q, seen, strict=True)))[-1]
            bound = _apart(sight, at, 1.0 - np.square(P @ X).sum() + np.zeros((GAMMA.size - 1, 1)))
            return float((1.0 - P[0]) ** 2 * T / bound[row, max(column, 0)])

        best = 0.0
        for _ in range(30):
            X = tokens(rng, n, A)
            value, step = ratio(X), 0.4
            for _ in range(30):
                Y = X + step * rng.standard_normal(X.shape) * (rng.random((n, 1)) < 0.6)
                Y /= np.maximum(1.0, np.linalg.norm(Y, axis=1, keepdims=True))
                if (found := ratio(Y)) > value:
                    X, value = Y, found
                step *= 0.9
            best = max(best, value)
        assert least < best <= 1.0 + 1e-12


def test_gibbs_bounds_the_mean_square():
    rng = np.random.default_rng(4)
    for _ in range(100):
        m = int(rng.integers(2, 9))
        Q = rng.dirichlet(np.full(m, 0.5)) + 1e-300
        e = np.sort(np.sqrt(rng.dirichlet(np.full(m, 0.4))))[::-1]
        third, rem = (e[2], float(np.square(e[2:]).sum())) if m > 2 else (0.0, 0.0)
        eta = np.array([-(Q @ np.log(Q))])
        one, two, third, rem = args = [np.array([x]) for x in (e[0], e[1], third, rem)]
        S = float(mean_square((one, two), third, rem, m - 2, eta)[0, 0])
        assert np.sort(Q)[::-1] @ e**2 <= S + 1e-12
        one_, two_, third_, rem_ = (lift(x) for x in args)
        assert mean_square((one_, two_), third_, rem_, m - 2, eta)[0, 0] == pytest.approx(S, abs=1e-10)
        for most, below in (((one,), e[1:]), ((one, two, third), e[3:])):
            left, many = np.array([float(np.square(below).sum())]), max(m - len(most), 0)
            S = float(mean_square(most, np.array([max(below, default=0.0)]), left, many, eta)[0, 0])
            assert np.sort(Q)[::-1] @ e**2 <= S + 1e-12


def test_boxes_together_and_alone():
    """Cells that a group of boxes leaves out change no bound by more than the group is wide."""
    rng = np.random.default_rng(5)
    rows = known("generic", 4.0, 8)[-1]
    for width in (1e-9, 0.01, 0.3):
        one, two, third = np.array([[0.7], [0.5], [0.3]]) * (1.0 + width * rng.random((3, 20)))
        e, rem = np.array([[0.0], [0.2], [0.6]]) * (1.0 + width * rng.random((3, 20))), 0.2 + 0.0 * one
        alone = np.concatenate(
            [rows.row(e[:, [k]], (one[[k]], two[[k]]), third[[k]], rem[[k]], 5) for k in range(20)], axis=1
        )
        together = rows.row(e, (one, two), third, rem, 5)
        assert (together >= alone * (1.0 - 1e-12)).all()
        assert (together <= alone * (1.0 + 1e-12) + 1e-7 * (width < 1e-8)).all() or width == 0.3
        assert (together.max(axis=1) <= 1.001 * alone.max(axis=1)).all()


def test_intervals_prove_the_same_cells():
    """The same head as intervals: bounds outward, and nearly the same."""
    _, _, sight, blocks, rows = known("generic", 4.0, 8)
    exact = EntropicRows.of(replace(sight, a=lift(sight.a), low=lift(sight.low), forms=lift(sight.forms)), blocks)
    e = np.array([[0.0], [0.4], [0.9]])
    one, two, third, rem = (np.array([x]) for x in (0.7, 0.5, 0.2, 0.1))
    found = rows.row(e, (one, two), third, rem, 5)
    assert exact.row(e, (one, two), third, rem, 5) == pytest.approx(found, rel=1e-9)
    assert exact.row(e, (lift(one), lift(two)), lift(third), lift(rem), 5) == pytest.approx(found, rel=1e-9)
    assert entropies(8)[-1] >= math.log(7.0)


def test_members_out_of_range_are_refused():
    A, V, _, blocks, _ = known("generic", 4.0, 8)
    good = blocks.members
    last = good[:, 0] == MASSES.size - 2
    for column, value, where in (
        (0, 0.5, ...),
        (0, 99.0, ...),
        (2, 0.0, ...),
        (1, -1.0, ...),
        (3, 1.0, last),
        (5, -1.0, ...),
        (4, 1e9, ...),
    ):
        wrong = good.copy()
        wrong[where, column] = value
        with pytest.raises(ValueError, match="blocks must be"):
            OwnBlocks.of(A, V, {"blocks": wrong})
    with pytest.raises(ValueError, match="each cell of p"):
        OwnBlocks.of(A, V, {"blocks": good[~last]})


def test_merged_cells_hold_all_and_little_more():
    rng = np.random.default_rng(5)
    table = np.vstack([rng.integers(0, 4, 300) / 3.0, np.exp(0.05 * rng.standard_normal((3, 300)))])
    table[1, ::50] = 0.0
    merged = _merged(table, 0.02)
    over = (merged[0] <= table[0, :, None]) & (merged[1:, None] >= table[1:, :, None]).all(axis=0)
    assert over.any(axis=1).all()
    near = (merged[0] == table[0, :, None]) & (merged[1:, None] <= 1.02 * table[1:, :, None]).all(axis=0)
    assert near.any(axis=0).all()
    assert 5 < merged.shape[1] < 150
    table[2, 7] = np.nan
    assert np.isnan(_merged(table, 0.02)).any()
