"""Weights that grow with the gap of a logit: the law of a row, its inequality, and the bound against measures."""

import math
from dataclasses import replace

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.constants.heads import unit_numbers
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit
from otattn.lipschitz.forms.logit_gap import GapRows
from otattn.lipschitz.forms.pole_law import product_bound
from otattn.lipschitz.relaxations import logit_gap

TURN = np.array([[0.0, 1.0], [-1.0, 0.0]])


def on_ball(rng, n, d):
    """Points on the sphere and inside."""
    X = rng.normal(size=(n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return X * rng.choice([1.0, 1.0, 0.6, 0.1], (n, 1))


def product(P, y, pole, e, G, rate, sharp):
    """``E b E[chi (1 + G |y - m|)^2]``, D and psi of a law on points."""
    m = P @ y
    chi = np.exp(-rate * G * (1.0 - y @ pole))
    far = (1.0 + G * np.linalg.norm(y - m, axis=1)) ** 2
    value = (P @ np.exp(-sharp * (1.0 - y @ e))) * (P @ (chi * far))
    return value, float(P @ np.linalg.norm(y - pole, axis=1)), math.acos(np.clip(pole @ e, -1.0, 1.0))


def bound_at(G, psi, D, rate, sharp, width=0.0):
    """The bound on a cell around a point."""
    ends = [
        (np.array([max(x - width * s, 0.0)]), np.array([min(x + width * s, s)])) for x, s in ((psi, math.pi), (D, 2.0))
    ]
    return float(product_bound((np.array([G]), np.array([G])), *ends, rate, sharp)[0])


@pytest.mark.parametrize("d", [1, 2, 3])
def test_no_law_exceeds_the_bound_of_its_cell(d):
    rng = np.random.default_rng(d)
    largest = 0.0
    for trial in range(400):
        G, rate, sharp = 10.0 ** rng.uniform(-1, 1.5), rng.uniform(), rng.uniform(0.0, 8.0)
        pole, e = on_ball(rng, 2, d)
        pole, e = pole / np.linalg.norm(pole), e / np.linalg.norm(e)
        y = np.concatenate([on_ball(rng, 3, d), np.array([pole, e, -pole, -e])[: trial % 5]])
        P = rng.dirichlet(np.full(len(y), rng.choice([0.2, 1.0])))
        value, D, psi = product(P, y, pole, e, G, rate, sharp)
        bound = bound_at(G, psi, D, rate, sharp, rng.choice([1e-12, 0.02]))
        assert value <= bound
        largest = max(largest, value / bound)
    assert largest > 0.6, largest


def test_two_atoms_are_nearly_worst():
    """Mass q at the pole and the rest on e, at a right angle: within a fifth of the bound over all laws."""
    pole, e = np.eye(2)
    best = bound = 0.0
    for q in np.linspace(0.05, 0.6, 12):
        value, D, psi = product(np.array([q, 1 - q]), np.array([pole, e]), pole, e, 25.0, 0.6, 8.0)
        best, bound = max(best, value), max(bound, bound_at(25.0, psi, D, 0.6, 8.0))
    assert 0.8 * bound < best <= bound


def some_rows(head, rate, sharp):
    """Rows of a head with weights that are proved."""
    field = Barycentre.of(head, SelfLogit.default(head))
    rows = GapRows(field, rate, sharp, np.array([0.0, -0.05, 0.1, 0.2]))
    lo, hi = rows.cover()
    return replace(rows, weights=np.array([rows.law(lo, hi)[0].max(), *rows.weights[1:]]))


def test_rows_and_columns_of_random_measures():
    rng = np.random.default_rng(5)
    tight = -math.inf
    for trial in range(8):
        d = int(rng.integers(1, 4))
        A = rng.normal(size=(d, d)) if trial % 3 else (TURN if d == 2 else -np.eye(d))
        A = A * np.exp(rng.uniform(0.8, 2.5)) / np.linalg.norm(A, 2)
        V, c = rng.normal(size=(2, d)), rng.normal(size=d) * (trial % 2)
        head = unit_numbers(oa.SoftmaxAttention(A, V, bias=c), 1.0)
        rate, sharp = rng.uniform(), rng.uniform(0.0, 6.0)
        rows = some_rows(head, rate, sharp)
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
            Lam = (P * chi * (1 + G[:, None] * np.linalg.norm(centred, axis=-1)) ** 2).sum(axis=1)
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
    """mean_field 637 and 5.17e6, mean-field lower bounds 409 and 3.19e6."""
    attention = oa.SoftmaxAttention(9.0 * TURN, np.eye(2))
    bound = oa.lipschitz_upper_bound(attention, radius=1.0)
    assert bound.theorem == "logit_gap"
    assert 409.0 < bound.value < 575.0
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
