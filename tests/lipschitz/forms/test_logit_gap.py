"""Weights that grow with the gap of a logit: the law of a row, its inequality, and the bound against measures."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

import otattn as oa
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.constants.heads import unit_numbers
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit
from otattn.lipschitz.forms.circle_law import SHAPE, CircleLaw, found
from otattn.lipschitz.forms.logit_gap import GapRows
from otattn.lipschitz.forms.logit_gap_search import Samples
from otattn.lipschitz.relaxations import logit_gap

TURN = np.array([[0.0, 1.0], [-1.0, 0.0]])


def on_ball(rng, n, d):
    """Points on the sphere and inside."""
    X = rng.normal(size=(n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return X * rng.choice([1.0, 1.0, 0.6, 0.1], (n, 1))


def spread(P, y, g, rate):
    """``Lambda``: the largest eigenvalue of ``E chi (I + d g^T)(I + g d^T)``, ``d = y - m``."""
    chi = np.exp(-rate * (np.linalg.norm(g) - y @ g))
    moved = np.eye(len(g)) + (y - P @ y)[:, :, None] * g
    return float(np.linalg.eigvalsh(np.einsum("k,kij,klj->il", P * chi, moved, moved))[-1])


def multipliers(rng, count):
    """Any that are allowed."""
    half = 0.5 + 10.0 ** rng.uniform(-2, 1, count)
    return np.stack(
        [rng.normal(size=count) * 2 - 1, half, half * rng.normal(size=count), half * rng.normal(size=count)]
    )


def around(x, width, low, high, rng):
    """A cell that holds x."""
    share = rng.uniform(size=x.size)
    return np.maximum(x - width * share, low), np.minimum(x + width * (1.0 - share), high)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_no_law_exceeds_the_bound_of_its_cell(d, exact):
    rng = np.random.default_rng(d)
    least = math.inf
    for trial in range(40):
        rate, sharp, count = rng.uniform(), rng.uniform(0.0, 8.0) * (trial % 4 > 0), 10
        pole, x = on_ball(rng, count, d), on_ball(rng, count, d)
        pole /= np.linalg.norm(pole, axis=1, keepdims=True)
        G = 10.0 ** rng.uniform(-1.5, 1.5, count)
        r, zeta = np.linalg.norm(x, axis=1), (pole * x).sum(axis=1)
        law = CircleLaw(40.0, rate, sharp, np.empty(0), exact)
        at = multipliers(rng, count) if trial % 2 else found(40.0, rate, sharp, (G, r, zeta), 60)
        width = rng.choice([1e-12, 0.02, 0.5])
        cells = [around(G, width, 0.0, 40.0, rng), around(r, width, 0.0, 1.0, rng), around(zeta, width, -1.0, 1.0, rng)]
        bound = law.by(at, *((tuple(map(lift, c)) if exact else c) for c in cells))
        for k in range(count):
            y = np.concatenate([on_ball(rng, 3, d), np.array([pole[k], x[k], -pole[k], -x[k]])[: trial % 5]])
            P = rng.dirichlet(np.full(len(y), rng.choice([0.2, 1.0])))
            W = spread(P, y, G[k] * pole[k], rate) * (P @ np.exp(-sharp * (1.0 - y @ x[k])))
            assert math.log(W) <= bound[k] + 1e-12
            least = min(least, bound[k] - math.log(W))
    assert least < 0.3, least


def test_the_largest_logit_of_b_where_a_token_is_shorter_than_its_part_along_the_pole():
    """Behind the pole, in a cell of many lengths, the worst token is the shortest: it was left out."""
    law = CircleLaw(1.0, 0.5, 3.0, np.empty(0))
    r, zeta = (np.array([0.5]), np.array([1.0])), (np.array([0.4]), np.array([0.9]))
    angle = np.linspace(-np.pi, np.pi, 97)[None]
    seen = law._seen((np.cos(angle), np.sin(angle)), [x[:, None] for x in r], [x[:, None] for x in zeta])[0]
    rho, z = (x.ravel() for x in np.meshgrid(np.linspace(0.5, 1.0, 101), np.linspace(0.4, 0.9, 101)))
    rho, z = rho[z <= rho], z[z <= rho]
    true = z[:, None] * np.cos(angle) + np.sqrt(rho**2 - z**2)[:, None] * np.sin(angle)
    most = np.exp(-3.0 * (1.0 - true.max(axis=0)))
    assert (seen >= most * (1 - 1e-12)).all()
    assert (seen <= most * 1.05).all()


def test_two_atoms_are_nearly_worst():
    """One near the pole, one near the token, at a right angle: within an eighth of the bound over all laws."""

    def log_product(v):
        q = 1.0 / (1.0 + math.exp(v[0]))
        y = np.array([[math.cos(v[1]), math.sin(v[1])], [math.cos(v[2]), math.sin(v[2])]])
        P = np.array([q, 1.0 - q])
        return math.log(spread(P, y, np.array([25.0, 0.0]), 0.6) * (P @ np.exp(-8.0 * (1.0 - y[:, 1]))))

    starts = [(t, 0.1, 1.6) for t in (0.0, 1.0, 2.0)] + [(1.0, -0.1, 1.8)]
    options = {"maxiter": 2000, "xatol": 1e-8, "fatol": 1e-10}
    best = max(-minimize(lambda v: -log_product(v), x, method="Nelder-Mead", options=options).fun for x in starts)
    point = np.array([25.0]), np.array([1.0]), np.array([0.0])
    law = CircleLaw(25.0, 0.6, 8.0, np.empty(0))
    bound = float(law.by(found(25.0, 0.6, 8.0, point, 400), *((x, x) for x in point))[0])
    assert bound - 0.125 < best <= bound, (best, bound)


def some_rows(head, rate, sharp, exact=False):
    """Rows of a head with weights that are proved."""
    field, above = Barycentre.of(head, SelfLogit.default(head)), SelfLogit.default(replace(head, A=-head.A, c=-head.c))
    law = Samples(field, above).law(rate, sharp, 30)
    rows = GapRows(field, above, law, np.array([0.0, -0.3, 0.02, 0.1]))
    value = rows.excess(*rows.cover())[0].max()
    return replace(rows, weights=np.array([value, *rows.weights[1:]]))


def test_rows_and_columns_of_random_measures():
    rng = np.random.default_rng(5)
    tight = -math.inf
    for trial in range(8):
        d = int(rng.integers(1, 4))
        A = rng.normal(size=(d, d)) if trial % 3 else (TURN if d == 2 else -np.eye(d))
        A = A * np.exp(rng.uniform(0.8, 2.5)) / np.linalg.norm(A, 2)
        V, c = rng.normal(size=(2, d)), rng.normal(size=d) * (trial % 2)
        head = unit_numbers(oa.SoftmaxAttention(A, V, bias=c), 1.0)
        rate, sharp = rng.uniform(), rng.uniform(0.0, 3.0)
        rows = some_rows(head, rate, sharp)
        w = rows.weights
        for _ in range(30):
            n = int(rng.integers(2, 6))
            X = on_ball(rng, n, d)
            mu = rng.dirichlet(np.full(n, 0.3)) + 1e-9
            mu /= mu.sum()
            g = X @ A.T + c
            G = np.linalg.norm(g, axis=1)
            k = np.exp(g @ X.T - (g @ X.T).max(axis=1, keepdims=True))
            k /= (k @ mu)[:, None]
            P = k * mu
            centred = X[None] - (P @ X)[:, None]
            chi = np.exp(-rate * (G[:, None] - g @ X.T))
            Lam = np.array([spread(P[i], X, g[i], rate) for i in range(n)])
            W = Lam * (P * np.exp(-sharp * (1.0 - X @ X.T))).sum(axis=1)
            z = (g * X).sum(axis=1)
            assert (np.log(W) + rate * G <= w[0] + w[1] * (X**2).sum(axis=1) + w[2] * G**2 + w[3] * z + 1e-9).all()
            eps = rng.normal(size=(n, d)) * rng.choice([0.1, 1.0], (n, 1))
            moved = P @ eps + np.einsum("xk,xki,xk->xi", P, centred, g @ eps.T)
            norms = (eps**2).sum(axis=1)
            left = ((moved @ V.T) ** 2).sum(axis=1)
            assert (left <= np.linalg.norm(V, 2) ** 2 * Lam * ((P / chi) @ norms) * (1 + 1e-12)).all()
            T = (mu * Lam) @ (k / chi)
            alpha = (mu * Lam)[:, None] * k / chi / T
            xbar = alpha.T @ X
            r, gamma = np.linalg.norm(xbar, axis=1), np.linalg.norm(xbar @ A.T + c, axis=1)
            low, high = (rows.field.gamma(r, np.full(n, q)) for q in (0.0, 1.0))
            at = np.array([r, np.clip((gamma - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)])
            bound = rows.bound(np.maximum(at - 1e-9, 0.0), np.minimum(at + 1e-9, 1.0))
            assert (np.log(T) <= bound + 1e-9).all()
            tight = max(tight, float((np.log(T) - bound).max()))
    assert tight > -4.0


def test_every_token_is_in_a_cell_that_is_not_empty():
    """Of a skew form ``<g,x> = 0``: only thin cells hold a token."""
    rng = np.random.default_rng(0)
    for A, c in (
        (9.0 * TURN, np.zeros(2)),
        (rng.normal(size=(3, 3)) * 3.0, rng.normal(size=3)),
        (-4.0 * np.eye(2), np.zeros(2)),
    ):
        head = unit_numbers(oa.SoftmaxAttention(A, np.eye(len(A)), bias=c), 1.0)
        rows = some_rows(head, 0.4, 1.0)
        X = on_ball(rng, 200, len(A))
        g = X @ A.T + c
        r, G, z = np.linalg.norm(X, axis=1), np.linalg.norm(g, axis=1), (g * X).sum(axis=1)
        low, high = (rows.field.gamma(r, np.full(200, q)) for q in (0.0, 1.0))
        q = np.ones(200) if rows.field.rigid else np.clip((G - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
        at = np.array([r, q, 0.5 + 0.5 * z / head.top])
        for width in (1e-9, 1e-2):
            cell = np.maximum(at - width, 0.0), np.minimum(at + width, 1.0)
            *_, z0, z1, none = rows.place(*cell)
            assert not none.any()
            assert (z0 <= z + 1e-9 * head.top).all()
            assert (z <= z1 + 1e-9 * head.top).all()


def test_a_root_of_almost_nothing_is_refused():
    """``2 half - chi`` of 1e-9 kept no digits: floats gave a value 8e-9 of itself too small."""
    G, half = 7.135e-4, 0.5 + 6.8e-10
    point = np.array([G]), np.array([1.0]), np.array([1.0])
    law = CircleLaw(1.0, 2.23e-7, 0.0, np.empty(0))
    assert np.isinf(law.by(np.array([[0.0], [half], [half + 1.0 / G], [0.0]]), *((x, x) for x in point))[0])


def test_intervals_hold_the_floats():
    rng = np.random.default_rng(2)
    count = 60
    at = multipliers(rng, count)
    G, r, zeta = rng.uniform(0.0, 30.0, count), rng.uniform(size=count), rng.uniform(-1.0, 1.0, count)
    cells = [around(G, 0.3, 0.0, 40.0, rng), around(r, 0.1, 0.0, 1.0, rng), around(zeta * r, 0.1, -1.0, 1.0, rng)]
    floats = CircleLaw(30.0, 0.3, 1.5, np.zeros(SHAPE)).by(at, *cells)
    exact = CircleLaw(30.0, 0.3, 1.5, np.zeros(SHAPE), True).by(at, *(tuple(map(lift, c)) for c in cells))
    np.testing.assert_allclose(upper(exact), floats, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_measure_exceeds_the_bound(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 5))
    B = rng.normal(size=(d, d))
    A = (B - B.T, B, np.outer(B[0], B[1]))[seed % 3]
    A *= np.exp(rng.uniform(1.0, 3.2)) / np.linalg.norm(A, 2)
    V = np.eye(d) if seed % 2 else rng.normal(size=(d, d))
    attention = oa.SoftmaxAttention(A, V, bias=rng.normal(size=d) if seed > 3 else None)
    bound = logit_gap(attention, radius=1.0)
    assert bound.verify()
    assert oa.lipschitz_lower_bound(attention, radius=1.0, rng=seed).value <= bound.value


def test_it_wins_for_skew_forms():
    """mean_field 637, mean-field lower bound 409."""
    attention = oa.SoftmaxAttention(9.0 * TURN, np.eye(2))
    bound = oa.lipschitz_upper_bound(attention, radius=1.0)
    assert bound.theorem == "logit_gap"
    assert 409.0 < bound.value < 475.0
    assert bound.verify()


@pytest.mark.slow
def test_the_proof_holds_in_intervals():
    for attention in (
        oa.SoftmaxAttention(25.0 * TURN, np.eye(2)),
        oa.SoftmaxAttention(9.0 * TURN - 2.0 * np.eye(2), np.array([[1.0, 2.0]]), bias=[0.3, -0.2]),
    ):
        bound = logit_gap(attention, radius=1.0)
        assert bound.verify()
        assert bound.verify(rigorous=True)
    for key, value in bound.multipliers.items():
        lower = replace(bound, value=0.97 * bound.value, multipliers=bound.multipliers | {key: 0.9 * value})
        assert not lower.verify()


def test_a_majorant_that_is_negative_where_no_alpha_is():
    """Its logarithm was a nan, and no upper bound at all was found for this head."""
    A = np.array([[27.0, -92, 47, -34], [-150, -54, 21, 50], [13, 4, 37, -17], [93, 12, 23, 43]])
    attention = oa.SoftmaxAttention(A, np.eye(4), bias=[85.0, 19, -16, 19])
    bound = oa.lipschitz_upper_bound(attention, radius=1.0)
    assert bound.theorem == "logit_gap"
    assert 1.0e98 < bound.value < 1.2e98
    assert bound.verify()


def test_two_antipodal_atoms_come_close():
    """-I at 60: the smaller atom has the weight ``e^{-120}`` about; its derivative is ``.65 a e^a`` of what is proved, and more."""
    a = 60.0
    bound = logit_gap(oa.SoftmaxAttention(-a * np.eye(2), np.eye(2)), radius=1.0)
    lower = oa.lipschitz_lower_bound(oa.SoftmaxAttention(-a * np.eye(2), np.eye(2)), radius=1.0, rng=0)
    assert 0.9 * bound.value < lower.value < bound.value


def test_the_largest_gradient_that_is_allowed():
    assert logit_gap(oa.SoftmaxAttention(-300.0 * np.eye(2), np.eye(2)), radius=1.0).verify()


def test_it_scales():
    one = logit_gap(oa.SoftmaxAttention(9.0 * TURN, np.eye(2)), radius=1.0)
    other = logit_gap(oa.SoftmaxAttention(9e6 * TURN, 1e-5 * np.eye(2)), radius=1e-3)
    assert other.value == pytest.approx(1e-5 * one.value, rel=1e-3)


@pytest.mark.parametrize(
    ("attention", "given", "message"),
    [
        (oa.SoftmaxAttention(TURN, np.eye(2)), {"radius": 1.0}, "must lie in"),
        (oa.SoftmaxAttention(1e3 * TURN, np.eye(2)), {"radius": 1.0}, "must lie in"),
        (oa.SoftmaxAttention(9.0 * TURN, 0.0 * np.eye(2)), {"radius": 1.0}, "V must not be zero"),
        (oa.SoftmaxAttention(9.0 * TURN, np.eye(2)), {"radius": 1.0, "p": 3}, "p"),
        (oa.SoftmaxAttention(9.0 * TURN, np.eye(2)), {"radius": 1.0, "effort": "slow"}, "effort"),
    ],
)
def test_what_it_refuses(attention, given, message):
    with pytest.raises(ValueError, match=message):
        logit_gap(attention, **given)
