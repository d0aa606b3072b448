"""Rows and columns together: the row constant against random rows, the joint bound against adversaries."""

from dataclasses import replace

import numpy as np
import pytest
from relaxation_attacks import FORMS, climb

from otattn.attention import SoftmaxAttention
from otattn.lipschitz.constants.self_logit import SelfLogit, unit_numbers
from otattn.lipschitz.lower.best import lipschitz_lower_bound
from otattn.lipschitz.upper.rows_and_columns import Rows, Search, column_sum, rows_and_columns
from otattn.measures import Ball, Ellipsoid


def rows_of(A, n, *, atoms=80, edges=25):
    head = unit_numbers(SoftmaxAttention(A, np.eye(len(A))), 1.0)
    family = SelfLogit.default(head)
    multipliers = {"nu": family.nu, "gap": family.gap, "edges": np.linspace(0, 1, edges)}
    return Rows.of({"head": head, "n": n, "atoms": atoms}, multipliers)


def closed_row_bound(n, a):
    """The row bound on the unit ball, V = I: what the program must not exceed when it knows nothing more."""
    phi = np.sqrt(a**2 / 2 + 0.75 + 1 / (32 * a**2))
    alpha, beta = n * phi**2 + np.sqrt(8) * phi * a, 2 * phi * a * np.sqrt(n - 2)
    return np.sqrt(a**2 + (alpha + np.hypot(alpha, beta)) / 2)


@pytest.mark.slow
def test_row_constant_bounds_random_rows():
    rng = np.random.default_rng(0)
    rows = rows_of(-5.0 * np.eye(2), 4)
    for _ in range(600):
        c = int(rng.integers(2, 6))
        p = rng.dirichlet(np.full(c, rng.choice([0.2, 1.0])))
        x = rng.standard_normal((c, 2))
        x /= (
            np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))
            if rng.random() < 0.5
            else np.linalg.norm(x, axis=1, keepdims=True)
        )
        m = p @ x
        y = x - m
        lam = np.linalg.eigvalsh((p[:, None] * y).T @ y)[-1]
        g = rng.standard_normal(2)
        gamma = 5.0 * rng.random()
        g *= gamma / np.linalg.norm(g)
        e = np.sort(rng.random(c) ** rng.choice([1, 8]))[::-1]
        e = e[rng.permutation(c)]
        u = rng.standard_normal(2)
        u /= np.linalg.norm(u)
        # the best eps of given norms for the output direction u
        value = (p * e * np.linalg.norm(u + (y @ u)[:, None] * g, axis=1)).sum()
        first, second = np.sort(e)[::-1][:2]
        one = replace(rows, gamma=np.array([gamma]), spread=np.array([lam]), diagonal=np.zeros(1))
        assert value <= one.row(np.array([first]), np.array([second]))[0, 0] * (1 + 1e-12)


def test_row_constant_is_known_at_the_ends():
    for G, lam in ((3.0, 1.0), (20.0, 1.0), (20.0, 0.3)):
        rows = replace(
            rows_of(-np.eye(2), 4, atoms=800), gamma=np.array([G]), spread=np.array([lam]), diagonal=np.zeros(1)
        )
        equal = rows.row(np.ones(1), np.ones(1))[0, 0]
        assert equal == pytest.approx(np.sqrt(1 + G**2 * lam), rel=3e-3)
        p = np.linspace(0.01, 0.99, 9999)
        # one token moves: its mass times the norm of its block
        alone = (p + G * np.minimum(2 * p * (1 - p), np.sqrt(lam * p * (1 - p)))).max()
        assert rows.row(np.ones(1), np.zeros(1))[0, 0] == pytest.approx(alone, rel=5e-3)
    assert (np.diff(rows.row(np.ones(9), np.linspace(0, 1, 9))[:, 0]) >= 0).all()


@pytest.mark.slow
def test_the_lagrangian_is_an_upper_bound_of_the_program():
    # random feasible points of the joint program never exceed it, whatever the multipliers
    rng = np.random.default_rng(1)
    n = 6
    rows = rows_of(7.0 * np.eye(2), n)
    for _ in range(60):
        e = np.sort(rng.random(n) ** 3)[::-1]
        e /= np.linalg.norm(e)
        k = rows.row(e[:1], e[1:2])
        j = rng.integers(rows.gamma.size, size=n)
        x = k[0, j] * rng.random(n)
        scale = np.sqrt(min(1.0, rows.T / (x**2 / rows.omega[j]).sum()))
        value = ((scale * x + rows.diagonal[j] * e) ** 2).sum()
        alpha, mu = rng.random() * 30, rng.random() * 100
        rem = np.array([1 - e[0] ** 2 - e[1] ** 2])
        bound = rows.total(k, e[:1], e[1:2], rem, np.array([alpha]), np.array([mu]))[0]
        assert value <= bound * (1 + 1e-12)
        at = np.array([[np.hypot(e[0], e[1])], [np.arctan2(e[1], e[0])]])
        best, _, _ = Search(rows).optimum(at, at)
        assert value <= best[0] * (1 + 1e-12)


def test_cells_dominate_their_points():
    rng = np.random.default_rng(2)
    search = Search(rows_of(6.0 * np.eye(2), 5))
    lo = np.array([rng.uniform(0.65, 0.95, 12), rng.uniform(0.1, 0.7, 12)])
    hi = np.minimum(lo + rng.random((2, 12)) * 0.1, [[1.0], [np.pi / 4]])
    whole = search.bound(lo, hi)
    for _ in range(4):
        inside = lo + rng.random(lo.shape) * (hi - lo)
        # 3e-3: a cell and a point choose multipliers by their own short searches
        assert (search.bound(inside, inside) <= whole + 3e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_never_violated_by_climbs(name):
    A, V = FORMS[name]
    rng = np.random.default_rng(3)
    for a, counts in ((3.0, (1, 1)), (9.0, (1, 1, 1)), (25.0, (1, 1, 6)), (9.0, (2, 3))):
        attention = SoftmaxAttention(a * A, V)
        bound = rows_and_columns(attention, radius=1.0, n=sum(counts))
        assert climb(attention, counts, 1.0, rng) <= bound.value
        assert bound.verify()


@pytest.mark.slow
def test_never_violated_with_a_bias_and_on_another_radius():
    rng = np.random.default_rng(4)
    A, V = FORMS["generic"]
    attention = SoftmaxAttention(A, V, bias=[1.0, -0.5, 0.3])
    for n, counts in ((3, (1, 1, 1)), (10, (1, 1, 8))):
        assert climb(attention, counts, 2.0, rng) <= rows_and_columns(attention, domain=Ball(2.0), n=n).value


def test_ellipsoids_are_bounded_through_their_ball():
    A, V = FORMS["generic"]
    domain = Ellipsoid(np.diag([1.0, 0.5, 0.2]), [0.3, 0.0, 1.0])
    rng = np.random.default_rng(5)
    bound = rows_and_columns(SoftmaxAttention(4 * A, V), domain=domain, n=4)
    for _ in range(30):
        X = domain.sample(4, rng)
        assert np.linalg.norm(SoftmaxAttention(4 * A, V).jacobian(X).to_dense(), 2) <= bound.value


@pytest.mark.parametrize(("a", "n"), [(4.0, 4), (25.0, 16), (100.0, 64)])
def test_it_is_the_row_bound_when_rows_are_free(a, n):
    bound = rows_and_columns(SoftmaxAttention(-a * np.eye(2), np.eye(2)), radius=1.0, n=n)
    # 1e-2: the gap of the fast search, and its cells of p
    assert bound.value <= closed_row_bound(n, a) * 1.01
    assert bound.value >= 0.9 * a / np.sqrt(2) * np.sqrt(n - 2)


@pytest.mark.slow
def test_self_entropy_and_column_sums_sharpen_it_for_the_identity():
    for a, n in ((25.0, 8), (4.0, 64)):
        bound = rows_and_columns(SoftmaxAttention(a * np.eye(2), np.eye(2)), radius=1.0, n=n)
        assert bound.value < 0.7 * closed_row_bound(n, a)
        assert bound.details["column_sum"] == pytest.approx(column_sum(n, a / 4), rel=1e-7)


@pytest.mark.slow
def test_simple_cases():
    A, V = np.array([[2.0, 1.0], [0.0, -1.0]]), np.array([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert rows_and_columns(SoftmaxAttention(A, V), radius=1.0, n=1).value == pytest.approx(3.0)
    assert rows_and_columns(SoftmaxAttention(A, 0 * V), radius=1.0, n=5).value == 0.0
    # A = 0: the map is the mean, of norm ||V||
    assert 3.0 <= rows_and_columns(SoftmaxAttention(0 * A, V), radius=1.0, n=5).value <= 3.0 * np.sqrt(2)
    assert (
        rows_and_columns(SoftmaxAttention([[2.0]], [[1.0]]), radius=1.0, n=2).value
        < rows_and_columns(SoftmaxAttention([[2.0]], [[1.0]]), radius=1.0, n=3).value
    )
    with pytest.raises(ValueError, match="effort"):
        rows_and_columns(SoftmaxAttention(A, V), radius=1.0, n=2, effort="slow")
    with pytest.raises(ValueError, match="n must be at least 1"):
        rows_and_columns(SoftmaxAttention(A, V), radius=1.0, n=0)


def test_it_scales_as_theory_says():
    A, V = FORMS["generic"]
    one = rows_and_columns(SoftmaxAttention(5 * A, V), radius=1.0, n=6).value
    assert rows_and_columns(SoftmaxAttention(5e6 * A, 1e-6 * V), radius=1e-3, n=6).value == pytest.approx(
        1e-6 * one, rel=1e-6
    )


@pytest.mark.slow
def test_the_recheck_rejects_tampering():
    bound = rows_and_columns(SoftmaxAttention(9 * np.eye(2), np.eye(2)), radius=1.0, n=5)
    assert bound.verify()
    assert not replace(bound, value=0.999 * bound.value).verify()
    for key, value in (
        ("nu", np.full_like(bound.multipliers["nu"], np.nan)),
        ("gap", -1.0 - bound.multipliers["gap"]),
        ("edges", bound.multipliers["edges"][1:]),
        ("edges", np.array([0.0, 1.0])),
    ):
        assert not replace(bound, multipliers={**bound.multipliers, key: value}).verify()
    # other admissible multipliers may prove less, never something false
    other = replace(bound, multipliers={**bound.multipliers, "nu": 0.5 * bound.multipliers["nu"]})
    assert other.proved_value() >= climb(
        SoftmaxAttention(9 * np.eye(2), np.eye(2)), (1, 1, 3), 1.0, np.random.default_rng(6)
    )


def test_finer_cells_never_give_more():
    rows = rows_of(-9.0 * np.eye(2), 6)
    values = [Search(rows).maximum(tol).value for tol in (0.1, 0.03, 0.01)]
    # 1e-3: halves may find worse multipliers than their whole, which they then inherit
    assert values[0] >= values[1] - 1e-3
    assert values[1] >= values[2] - 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "a", "n"),
    [
        *((name, 9.0, 4) for name in ("identity", "negative", "skew", "generic")),
        ("identity", 25.0, 16),
        ("generic", 25.0, 16),
        ("negative", 100.0, 64),
    ],
)
def test_it_encloses_the_searched_lower_bound(name, a, n):
    A, V = FORMS[name]
    attention = SoftmaxAttention(a * A, V)
    lower = lipschitz_lower_bound(attention, radius=1.0, n=n, rng=0).value
    upper = rows_and_columns(attention, radius=1.0, n=n, effort="deep").value
    assert lower <= upper
    assert upper <= rows_and_columns(attention, radius=1.0, n=n).value * (1 + 2e-3)
    assert upper <= 2.3 * lower
