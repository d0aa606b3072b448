"""Any form: frontier and own pairs against samples, rows of real attention against the table, the bound against adversaries."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from relaxation_attacks import climb

import otattn as oa
from otattn.lipschitz.certificate import Statement
from otattn.lipschitz.forms.entropic_rows import EntropicRows
from otattn.lipschitz.forms.frontier import BALANCES, Frontier
from otattn.lipschitz.forms.frontier_rows import Whole, _entropic, _rows, _total
from otattn.lipschitz.forms.frontier_total import Total
from otattn.lipschitz.forms.own_pairs import OwnPairs
from otattn.lipschitz.relaxations import frontier_rows
from otattn.lipschitz.upper_bound import upper_bounds
from otattn.measures import Ball, Box, Ellipsoid

FORM = np.array([[1.0, 0.2, 0.0], [-0.1, 0.5, 0.3], [0.4, 0.0, -0.2]])
FACTORS = np.array([[1.0, 0.0, 0.0, 0.0, 0.0]]), np.array([[0.6, 0.8, 0.0, 0.0, 0.0]])
VALUES = np.diag([1.0, 0.4, 0.3])


def unit(M):
    return M / np.linalg.norm(M, 2)


def head(a=25.0, A=FORM, V=VALUES):
    return oa.SoftmaxAttention(a * unit(A), V)


@cache
def bound_of(a, n):
    return frontier_rows(head(a), radius=1.0, n=n)


def some_pairs(rng, count):
    """Forms and values of every shape and rank, norms 1."""
    for k in range(count):
        d = int(rng.integers(1, 7))
        A, V = rng.standard_normal((d, d)), rng.standard_normal((int(rng.integers(1, d + 2)), d))
        if k % 4 == 1:
            A = A[:, :1] @ A[:1] + 0.3 * (k % 8 == 1) * A[:, -1:] @ A[-1:]
        if k % 4 == 2 and d > 1:
            A = A - A.T
        if k % 4 == 3:
            A, V = np.linalg.qr(A)[0] * np.geomspace(1.0, 0.1, d), np.eye(d)
        yield unit(A), unit(V)


def some_tokens(rng, n, A):
    """On the sphere, inside, clusters, two anchors across the gradient of a crowd, or singular vectors."""
    d = len(A)
    X = rng.standard_normal((n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    kind = rng.integers(5)
    if kind == 1:
        X *= rng.random((n, 1))
    if kind == 2:
        X = X[rng.integers(0, 3, n)] + 0.03 * rng.standard_normal(X.shape)
    if kind == 3:
        g = A @ X[-1]
        u = X[0] - g * (g @ X[0]) / (g @ g + 1e-300)
        u /= np.linalg.norm(u) + 1e-300
        h = rng.random() * g / (np.linalg.norm(g) + 1e-300)
        root = math.sqrt(1.0 - h @ h)
        X[2:], X[0], X[1] = X[-1], h + root * u, h - root * u
    if kind == 4:
        U, _, W = np.linalg.svd(A)
        X = np.concatenate([U.T, -U.T, W, -W])[rng.integers(0, 4 * d, n)]
    return X / np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))


def test_the_frontier_holds_directions_across_the_gradient():
    """Brute force, with the direction chosen best for each x; the best x of a climb comes near it."""
    rng = np.random.default_rng(0)
    tight = []
    for A, V in some_pairs(rng, 8):
        frontier = Frontier.found(A, V)
        d = len(A)
        forms = [V.T @ V, A @ A.T, *(0.5 * (s * V.T @ V + A @ A.T / s) for s in BALANCES)]
        x = rng.standard_normal((400, d))
        x = np.concatenate([x, np.linalg.svd(A)[2][:1] + 0.3 * x])
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        g = x @ A.T
        gamma = np.linalg.norm(g, axis=1)
        keep = gamma > 1e-3
        g, gamma = g[keep] / gamma[keep, None], gamma[keep]
        across = np.eye(d) - g[:, :, None] * g[:, None, :]
        bound = frontier.at(gamma)
        for M, most in zip(forms, bound, strict=True):
            left = np.linalg.eigvalsh(across @ M @ across)[:, -1]
            assert (left <= most * (1 + 1e-12)).all()
        left = np.linalg.eigvalsh(across @ forms[1] @ across)[:, -1]
        narrow = (bound[1] < 0.8) & (bound[1] > 0.1)
        tight += [float((left / bound[1])[narrow].max())] if narrow.any() else []
    assert len(tight) > 2
    assert max(tight) > 0.9


def test_heights_and_shares_that_prove_nothing_leave_the_norm():
    A, V = unit(FORM), unit(VALUES)
    good = Frontier.found(A, V)
    gamma = np.array([0.5, 0.9, 0.999])
    norms = np.repeat(good.norms[:, None], 3, axis=1)
    assert (good.at(gamma) < 0.95 * norms).any()
    for heights, shares in (
        (0.0 * good.heights + 1e-3, good.shares),  # two eigenvalues above
        (0.0 * good.heights + 5.0, good.shares),
        (good.heights, 0.0 * good.shares + 1e-9),
        (good.heights, 0.0 * good.shares + 1e9),
    ):
        assert (Frontier(A, V, heights, shares).at(gamma) >= 0.999 * norms).all()
    assert (good.at(np.zeros(1)) == good.norms[:, None]).all()


def test_own_pairs_hold_two_tokens():
    """The value and the best payment that the two logits allow, at random and extreme pairs."""
    rng = np.random.default_rng(1)
    levels = np.array([0.0, 0.3, 1.0, 3.0])
    tight = 0.0
    for A, V in some_pairs(rng, 6):
        d, a = len(A), float(np.exp(rng.uniform(-1.0, 5.0)))
        pairs = OwnPairs.found(A, V)
        x, y = rng.standard_normal((2, 3000, d))
        x[::2], y[::3] = np.linalg.svd(A)[2][0] + 0.2 * x[::2], -x[::3]
        x, y = (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1.0) for z in (3.0 * x, 3.0 * y))
        D, g = x - y, x @ A.T
        sizes = [np.linalg.norm(z, axis=1) for z in (D @ V.T, g + D @ A, g)]
        p, lead = rng.random(3000), (g * D).sum(axis=1)
        p[::5] = 0.5
        for angle in (0.0, 0.4, 0.8, 1.2, math.pi / 2):
            e, s = math.sin(angle), math.cos(angle)
            value = p * e + (1 - p) * s + a * p * (1 - p) * sizes[0] * (sizes[1] * e + sizes[2] * s)
            bound = pairs.values(np.array([[e]]), np.array([[s]]), a, levels)[0]
            for lam, most in zip(levels, bound, strict=True):
                # the row's mean is below its largest logit by the weight of the lower one
                paid = value - lam * a * np.where(lead > 0, 1 - p, p) * np.abs(lead)
                assert paid.max() <= most * (1 + 1e-12)
                tight = max(tight, float(paid.max() / most))
    assert tight > 0.95


def ratios(attention, n, rng, bound, trials):
    """The largest row of a real configuration over the table of rows, and the largest constant over the bound."""
    whole = Whole.of(Statement(attention, Ball(1.0), n, 2.0))
    parts = bound.multipliers
    table = _total(whole, _rows(whole, parts), _entropic(whole, parts), parts)
    rows, values = 0.0, 0.0
    for _ in range(trials):
        X = some_tokens(rng, n, attention.A)
        J = attention.jacobian(X).to_dense()
        top = np.linalg.svd(J)
        values = max(values, float(top[1][0]) / bound.value)
        block = np.linalg.svd(J.reshape(n, -1, J.shape[1])[rng.integers(n)])[2][0]
        for eps in (
            top[2][0],
            block,
            rng.standard_normal(block.size) * np.repeat(rng.random(n) ** 3, len(attention.A)),
        ):
            e = np.linalg.norm(eps.reshape(n, -1), axis=1)
            s = np.array([math.hypot(*np.sort(np.delete(e, i))[-2:]) for i in range(n)])
            R = np.linalg.norm((J @ eps).reshape(n, -1), axis=1)
            most = whole.v * np.sqrt(table.row(e, s, table.cell(e, s)))
            rows = max(rows, float((R / most).max()))
    return rows, values


def test_rows_of_real_attention_are_below_the_table():
    rng = np.random.default_rng(2)
    for attention, n, bound, least in (
        (head(1.5, V=np.eye(3)), 3, frontier_rows(head(1.5, V=np.eye(3)), radius=1.0, n=3), 0.4),
        (head(), 8, bound_of(25.0, 8), 0.1),
    ):
        rows, values = ratios(attention, n, rng, bound, 20)
        assert least < rows <= 1.0
        assert least < values <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_it_survives_climbs(seed):
    rng = np.random.default_rng(10 + seed)
    most = 0.0
    for A, V in some_pairs(rng, 6):
        n, a, radius = int(rng.integers(3, 8)), float(np.exp(rng.uniform(0.0, 4.5))), 10.0 ** rng.uniform(-2, 2)
        attention = oa.SoftmaxAttention(a / radius**2 * A, V)
        bound = frontier_rows(attention, radius=radius, n=n).value
        most = max(most, climb(attention, (1,) * n, radius, rng) / bound)
    assert 0.3 < most <= 1.0


def test_boxes_hold_the_norms_of_displacements():
    """The program at the norms of random displacements, from its formula, is below every box around them."""
    rng = np.random.default_rng(3)
    angles = np.linspace(0.0, math.pi / 2, 41)
    rows = 2.0 + np.sin(angles[1:])
    # of cells that never, sometimes and always bound a row better than the table
    cells = [EntropicRows(0.0 * x, x, 0.5 * x, 1.2 * x) for x in (9.0 * np.ones(1), np.array([1.4, 2.0]), np.ones(1))]
    least_gap = math.inf
    for n, entropic in ((3, cells[0]), (3, cells[1]), (4, cells[1]), (9, cells[1]), (9, cells[2])):
        total = Total(n, angles, rows, np.geomspace(0.1, 50.0, 24), False, entropic)
        e = np.sort(rng.dirichlet(np.full(n, 0.5), 400), axis=1)[:, ::-1] ** 0.5
        two = np.sqrt(e[:, 0] ** 2 + e[:, 1] ** 2)
        s = np.stack([np.hypot(e[:, 1], e[:, 2]), np.hypot(e[:, 0], e[:, 2]), *([two] * (n - 2))], axis=1)
        scale = np.maximum(e[..., None] / total.corners[0], s[..., None] / total.corners[1])
        values = (scale * rows).min(axis=-1)
        rem = np.maximum(1.0 - (e[:, :3] ** 2).sum(axis=1), 0.0)
        fourth = e[:, 3] if n > 3 else 0.0 * two
        for i in range(n):
            most = [e[:, k] for k in range(3) if k != i]
            H = entropic.row(e[None, :, i], most, fourth, rem, n - 1 - len(most))[0]
            values[:, i] = np.minimum(values[:, i], H)
        values = (values**2).sum(axis=1)
        z = np.array([two, np.arctan2(e[:, 1], e[:, 0]), e[:, 2] / two])
        width = 0.1 * rng.random(z.shape) * rng.integers(0, 2, z.shape)
        lo, hi = np.maximum(z - width - 1e-12, 0.0), z + width + 1e-12
        gap = total.bound(lo, hi) - np.log(values)
        assert (gap >= -1e-9).all()
        least_gap = min(least_gap, float(gap.min()))
        exact = Total(n, angles, rows, total.mu, True, entropic).bound(lo, hi)
        assert exact == pytest.approx(total.bound(lo, hi), abs=1e-11)
    assert least_gap < 0.1


def test_it_is_sharp_and_holds_what_it_says():
    bound = bound_of(25.0, 8)
    assert bound.value < 49.2
    assert bound.verify()
    assert not replace(bound, value=0.98 * bound.value).verify()


@pytest.mark.slow
@pytest.mark.parametrize(("a", "n"), [(25.0, 8), (100.0, 64)])
def test_it_is_sharper_than_rows_and_columns(a, n):
    bound = bound_of(a, n)
    assert bound.verify()
    assert bound.value < 0.9 * oa.relaxations.rows_and_columns(head(a), radius=1.0, n=n).value


@pytest.mark.slow
def test_units():
    """``A R^2`` and V are all that counts."""
    A, V = np.random.default_rng(0).standard_normal((6, 6)), np.diag(np.geomspace(1.0, 0.1, 6))
    bound = frontier_rows(head(9.0, A, V), radius=1.0, n=64)
    for other, factor in (
        (frontier_rows(head(1.0, A, V), radius=3.0, n=64), 1.0),
        (frontier_rows(head(9.0, A, -3.0 * V), radius=1.0, n=64), 3.0),
        (frontier_rows(head(9.0, A, V[::-1]), radius=1.0, n=64), 1.0),
    ):
        assert other.value == pytest.approx(factor * bound.value, rel=5e-3)
        assert other.verify()


@pytest.mark.parametrize(("a", "n", "most"), [(4.0, 8, 8.6), (4.0, 3, 6.4)])
def test_the_mass_of_the_own_token_counts(a, n, most):
    """10.2 and 7.3 by rows of two tokens alone."""
    assert frontier_rows(head(a), radius=1.0, n=n).value < most


def test_values_count_by_more_than_their_norm():
    assert bound_of(25.0, 8).value < 0.95 * frontier_rows(head(V=np.eye(3)), radius=1.0, n=8).value
    assert frontier_rows(head(V=np.zeros((1, 3))), radius=1.0, n=5).value == 0.0


@pytest.mark.slow
def test_what_the_form_does_not_see_may_part_two_tokens():
    """Factors of a form on few of its dimensions, identity values, in both arithmetics."""
    part = oa.SoftmaxAttention.from_qkv(*FACTORS, np.eye(5), scale=9.0)
    bound = frontier_rows(part, radius=1.0, n=9)
    assert bound.verify()
    pytest.importorskip("flint")
    assert bound.verify(rigorous=True)
    assert bound.rigorous_value() == pytest.approx(bound.value, rel=1e-9)


@pytest.mark.slow
def test_factors_are_as_good_as_the_form():
    Q, K = FACTORS
    part = frontier_rows(oa.SoftmaxAttention.from_qkv(Q, K, np.eye(5), scale=9.0), radius=1.0, n=4)
    whole = frontier_rows(oa.SoftmaxAttention(9.0 * K.T @ Q, np.eye(5)), radius=1.0, n=4)
    assert part.value == pytest.approx(whole.value, rel=5e-3)


@pytest.mark.parametrize(
    ("attention", "given", "word"),
    [
        (head(), {"n": 2}, "at least 3"),
        (head(), {"n": 4, "p": 1.0}, "p must be 2"),
        (head(), {"n": None}, "number of tokens"),
        (head(), {"n": 4, "radius": None, "domain": Box(-np.ones(3), np.ones(3))}, "centred ball"),
        (head(), {"n": 4, "radius": None, "domain": Ellipsoid(np.eye(3), [0.1, 0.0, 0.0])}, "centred ball"),
        (head(1e-4), {"n": 4}, "must lie in"),
        (head(1e8), {"n": 4}, "must lie in"),
        (oa.SoftmaxAttention(unit(FORM), VALUES, bias=[0.1, 0.0, 0.0]), {"n": 4}, "bias"),
        (oa.MaskedAttention(head()), {"n": 4}, "without a mask"),
        (oa.L2Attention(np.eye(3), np.eye(3), np.eye(3)), {"n": 4}, "SoftmaxAttention"),
    ],
)
def test_other_statements_are_refused(attention, given, word):
    with pytest.raises(ValueError, match=word):
        frontier_rows(attention, **{"radius": 1.0, **given})


@pytest.mark.slow
def test_the_search_for_the_best_bound_tries_it_where_it_can_win():
    assert oa.lipschitz_upper_bound(head(), radius=1.0, n=8).theorem == "frontier_rows"
    for attention, n in ((head(0.5), 8), (oa.SoftmaxAttention(-25.0 * np.eye(3), VALUES), 8)):
        assert "frontier_rows" not in [b.theorem for b in upper_bounds(attention, radius=1.0, n=n)]


@pytest.mark.slow
def test_altered_multipliers():
    """What is no multiplier is refused; others prove a bound, never a smaller one than the truth."""
    attention = head(9.0, FORM[:2, :2], VALUES[:2, :2])
    bound = frontier_rows(attention, radius=1.0, n=3)
    truth = climb(attention, (1, 1, 1), 1.0, np.random.default_rng(4), steps=20)
    parts = bound.multipliers
    wrong = parts["pairs"].copy()
    wrong[0, 0] = -1.0
    for change in (
        {"radii": 1.0 + parts["radii"]},
        {"radii": parts["radii"][1:]},
        {"choice": parts["choice"] + 0.5},
        {"choice": parts["choice"] + 1000.0},
        {"level": -1.0 - parts["level"]},
        {"levels": parts["levels"][::-1]},
        {"levels": parts["levels"] + 0.1},
        {"angles": 0.9 * parts["angles"]},
        {"angles": parts["angles"][::-1]},
        {"edges": 0.9 * parts["edges"]},
        {"edges": parts["edges"][::-1]},
        {"heights": -parts["heights"]},
        {"shares": 0.0 * parts["shares"]},
        {"lines": -parts["lines"]},
        {"lines": parts["lines"] * [1e4, 1.0, 1.0, 1.0]},
        {"lines": parts["lines"] * [1.0, 1.0, 0.0, 1.0]},
        {"lines": parts["lines"][:, :3]},
        {"pairs": wrong},
        {"pairs": parts["pairs"][:0]},
        {"blocks": -parts["blocks"]},
        {"blocks": parts["blocks"][:0]},
        {"blocks": parts["blocks"][:1]},
        {"mu": -parts["mu"]},
        {"mu": np.append(parts["mu"][:-1], 1e300)},
        {"mu": np.append(parts["mu"][:-1], 1e20)},
        {"mu": parts["mu"][:0]},
    ):
        assert not replace(bound, multipliers={**parts, **change}).verify(), list(change)
    tied = 0.0 * parts["choice"] + 20.0
    nothing = {"level": 0.0 * parts["level"], "radii": 0.0 * parts["radii"], "choice": 0.0 * parts["choice"]}
    for change in (
        nothing,
        {"choice": tied, "level": 0.0 * parts["level"] + parts["levels"].size - 1.0},
        {"mu": 0.0 * parts["mu"]},
        {"heights": 1.1 * parts["heights"]},
        {"shares": 10.0 * parts["shares"]},
        {"lines": parts["lines"][:0]},
        {"lines": parts["lines"] * [1.0, 0.7, 1.0, 1.0]},
        {"lines": parts["lines"] * [1.0, 1.0, 1e-9, 3.0]},
        {"pairs": parts["pairs"][:1]},
        {"pairs": parts["pairs"] * [1.0, 1.0, 2.0, 1.0, 0.5, 0.0]},
        {"levels": 3.0 * parts["levels"]},
        {"blocks": parts["blocks"] * [1.0, 1.0, 2.0, 1.0, 0.5, 0.3, 0.0]},
        {"blocks": parts["blocks"] * [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]},
    ):
        assert replace(bound, multipliers={**parts, **change}).proved_value() >= truth, list(change)
    assert 0.4 * bound.value < truth < bound.value


@pytest.mark.slow
@pytest.mark.parametrize(("a", "n", "A"), [(2.0, 3, FORM), (25.0, 4, FORM), (40.0, 5, FORM[:, :1] @ FORM[:1])])
def test_proof_in_intervals(a, n, A):
    pytest.importorskip("flint")
    attention = oa.SoftmaxAttention(a / 1.3**2 * unit(A), VALUES)
    bound = frontier_rows(attention, radius=1.3, n=n)
    assert bound.verify(rigorous=True)
    assert bound.rigorous_value() == pytest.approx(bound.value, rel=1e-9)
