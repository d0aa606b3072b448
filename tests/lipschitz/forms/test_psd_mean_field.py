"""Positive semidefinite forms and any measure: each lemma by brute force, cells against points, the bound against adversaries."""

import math
from dataclasses import replace

import numpy as np
import pytest
from relaxation_attacks import climb, in_ball

import otattn as oa
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.constants.heads import unit_numbers
from otattn.lipschitz.forms.concentration import exponent
from otattn.lipschitz.forms.psd_mean_field import Columns, _bound, _numbers
from otattn.lipschitz.forms.self_coupling import gain
from otattn.lipschitz.relaxations import mean_field, psd_mean_field
from otattn.lipschitz.table import table
from otattn.lipschitz.theorem import THEOREMS
from otattn.lipschitz.upper_bound import _worth_it, upper_bounds
from otattn.measures import Ellipsoid

TILTED = np.array([[1.0, 0.3], [0.0, -0.7]])
GRID = np.linspace(0.0, 1.0, 20_001)[1:-1]


def head(a, d=2, V=None):
    return oa.SoftmaxAttention(a * np.eye(d), np.eye(d) if V is None else V)


def some_columns(rng, a, stretch=1.0, share=1.0):
    return Columns(a, stretch, share, 10 ** rng.uniform(-2, 1) / a, 10 ** rng.uniform(-0.5, 1))


def test_gain_is_its_maximum():
    for B in (1e-3, 0.5, 1.0, 4.0, 30.0):
        # a grid of 5e-5 misses the maximum by its square, over 1 - t^2
        assert gain(np.array(B)) == pytest.approx((B * GRID + 0.5 * np.log1p(-(GRID**2))).max(), rel=1e-4, abs=1e-8)
    assert (np.diff(gain(np.linspace(0.0, 50.0, 300))) > 0).all()


def test_couplings_gain_at_least_what_gaussians_gain():
    """``sup_pi Cov_pi(x, x') - KL(pi|alpha x alpha)`` by Sinkhorn's iteration, the value of its coupling on the line."""
    rng = np.random.default_rng(8)
    tried, least = 0, math.inf
    for _ in range(40):
        n = int(rng.integers(2, 7))
        x, p = rng.normal(size=n) * rng.uniform(0.2, 3.0), rng.dirichlet(np.full(n, rng.choice([0.3, 1.0, 5.0])))
        p = np.maximum(p, 1e-9) / np.maximum(p, 1e-9).sum()
        x = x - p @ x
        cost, f = np.outer(x, x), np.zeros(n)
        for _ in range(400):
            z = cost - f + np.log(p)
            top = z.max(axis=1)
            f = 0.5 * (f + top + np.log(np.exp(z - top[:, None]).sum(axis=1)))
        density = cost - f[:, None] - f
        pi = np.exp(density) * p[:, None] * p
        if np.abs(pi.sum(axis=1) - p).max() > 1e-9:
            continue
        tried, least = tried + 1, min(least, float((pi * (cost - density)).sum() - gain(np.array(p @ x**2))))
    assert tried > 30
    assert -1e-8 <= least < 1e-2


def test_concentrated_laws_are_far_from_spread_ones():
    """Random alpha, P with the same atoms and two more at the ends, random ``m <= s`` and C: the lemma, nearly attained."""
    rng = np.random.default_rng(0)
    closest = -math.inf
    for _ in range(3000):
        n = int(rng.integers(1, 5))
        z = np.clip(rng.uniform(-1, 1, n) * rng.random() + rng.uniform(-0.3, 0.9), -1.0, 1.0)
        alpha = rng.dirichlet(np.ones(n))
        P = rng.dirichlet(np.append(alpha * rng.uniform(0.5, 20) + 1e-3, rng.uniform(0.01, 5, size=2)))
        if P.min() == 0.0:
            continue
        ends = np.append(z, [1.0, -1.0])
        V = P @ ends**2 - (P @ ends) ** 2
        divergence = alpha @ np.log(alpha / P[:n])
        mean, variance = abs(alpha @ z), alpha @ z**2 - (alpha @ z) ** 2
        s, b = mean + (1 - mean) * rng.random() * rng.integers(0, 2), variance * (1 + rng.random() * rng.integers(0, 2))
        m = np.repeat(s * np.array([0.0, 0.3, 0.6, 1.0]), 4)
        C = (1.0 + m) ** 2 * (1.0 + 10 ** rng.uniform(-3, 1, 16))
        bounds = np.log(C - V) + exponent(s, b, m, C)
        assert -divergence <= bounds.min() + 1e-9
        closest = max(closest, -divergence - bounds.min())
    assert closest > -1e-3


def test_the_exponent_increases():
    rng = np.random.default_rng(1)
    for _ in range(300):
        m = 0.9 * rng.random()
        C = (1.0 + m) ** 2 * (1.0 + 10 ** rng.uniform(-2, 1))
        s, b = np.linspace(m, 1.0, 200), 10 ** rng.uniform(-3, 0)
        assert (np.diff(exponent(s, b, m, C)) >= -1e-10).all()
        assert (np.diff(exponent(s[50], np.linspace(0.0, 1.0, 50), m, C)) >= -1e-12).all()


def test_the_row_lemma():
    """The largest eigenvalue of ``sum_k P_k N_k Q^{-1} N_k^T``, ``N_k = I + (x_k - m) g^T``, ``Q = I + h g g^T``: attained."""
    rng = np.random.default_rng(2)
    most = 0.0
    for _ in range(500):
        n, d = int(rng.integers(2, 6)), int(rng.integers(1, 4))
        X, P = in_ball(rng.standard_normal((n, d)), 1.0), rng.dirichlet(np.full(n, 0.5))
        g, h = rng.standard_normal(d) * 10 ** rng.uniform(-1, 1.3), 10 ** rng.uniform(-3, 2)
        Y = X - P @ X
        lam, G = np.linalg.eigvalsh((P[:, None] * Y).T @ Y)[-1], g @ g
        inverse = np.linalg.inv(np.eye(d) + h * np.outer(g, g))
        rows = [np.eye(d) + np.outer(y, g) for y in Y]
        whole = sum(p * N @ inverse @ N.T for p, N in zip(P, rows, strict=True))
        most = max(most, np.linalg.eigvalsh(whole)[-1] / (1.0 + lam * G / (1.0 + h * G)))
    assert 0.99 < most <= 1.0 + 1e-9


@pytest.mark.parametrize("share", [1.0, 0.37])
def test_peaks_are_above_a_fine_grid(share):
    rng = np.random.default_rng(3)
    U = np.linspace(0.0, 1.0, 5001)
    for a in (0.3, 4.0, 40.0):
        columns = some_columns(rng, a, share=share)
        H, Delta = columns.h + a**-2, a**2 * (share**2 + columns.excess)
        weight = (1.0 + U / H) / (1.0 - a**2 * np.minimum(U, share) ** 2 / Delta)
        for i, theta in enumerate(np.linspace(0.0, 1.0, 17)):
            for j, C in enumerate(1.0 + np.geomspace(1e-3, 8.0, 32)):
                most = (np.log(weight) + theta * np.log(C - U)).max()
                assert most - 1e-12 <= columns.peaks[i, j] <= most + 2e-3


@pytest.mark.parametrize("stretch", [1.0, 3.0, math.inf])
def test_cells_dominate_their_points(stretch):
    rng = np.random.default_rng(4)
    for a in (1.0, 6.0, 30.0):
        columns = some_columns(rng, a, stretch=stretch)
        lo = 0.9 * rng.random((2, 150))
        hi = np.minimum(1.0, lo + 0.2 * rng.random((2, 150)))
        whole = columns.bound(lo, hi)
        for _ in range(10):
            inside = lo + rng.random(lo.shape) * (hi - lo)
            assert (columns.bound(inside, inside) <= whole + 1e-9).all()


def test_cells_in_intervals_are_those_in_floats():
    rng = np.random.default_rng(9)
    for stretch in (1.0, 3.0, math.inf):
        columns = some_columns(rng, 5.0, stretch=stretch, share=0.8)
        exact = replace(columns, a=lift(5.0), stretch=stretch if math.isinf(stretch) else lift(stretch))
        lo = 0.9 * rng.random((2, 100))
        hi = np.minimum(1.0, lo + 0.05 * rng.random((2, 100)))
        assert exact.bound(lo, hi) == pytest.approx(columns.bound(lo, hi), abs=1e-10)


def test_what_a_form_says_of_tokens_that_it_stretches():
    """``|x|^2 <= (a/a_min) |y|^2``, for means and for standard deviations; nothing when the form is singular."""
    lo, hi = np.array([[0.2], [0.1]]), np.array([[0.3], [0.2]])
    s, b, gained = Columns(5.0, 4.0, 1.0, 1.0, 1.0).law(lo, hi)
    assert [s[0], b[0]] == pytest.approx([0.6, 4.0 * (1 - 0.04) * 0.2])
    assert gained[0] == pytest.approx(gain(5.0 * (1 - 0.09) * 0.1))
    s, b, _ = Columns(5.0, math.inf, 1.0, 1.0, 1.0).law(lo, hi)
    assert [s[0], b[0]] == [1.0, 1.0]


def test_numbers_of_a_head():
    a, stretch, share, defect = _numbers(unit_numbers(oa.SoftmaxAttention(np.diag([4.0, 0.5]), TILTED), 1.0))
    assert [a, stretch] == pytest.approx([4.0, 8.0])
    # max |V u| |A u| over the ball, on a grid
    t = np.linspace(0.0, math.pi, 100_001)
    u = np.array([np.cos(t), np.sin(t)])
    field = (np.linalg.norm(TILTED @ u, axis=0) * np.linalg.norm(np.diag([4.0, 0.5]) @ u, axis=0)).max()
    assert share == pytest.approx(field / (4.0 * np.linalg.norm(TILTED, 2)), rel=1e-6)
    assert share < 0.97
    # the distance to a PSD form is paid for
    columns = Columns(a, stretch, share, 1.0, 1.0)
    assert 0.0 < defect < 1e-12
    assert _bound(3.0, columns, 1.0, 1e-3) >= _bound(3.0 + 2e-3 * (1.0 + a), columns, 1.0, 0.0)


def test_columns_of_measures_are_below_the_bound():
    """``T(y) = sum_x mu_x k(x, y) w(lam_x) (1 + h <g_x, e>^2)`` of random measures, at the law alpha that they have."""
    rng = np.random.default_rng(5)
    tight = -math.inf
    for _ in range(100):
        d, c = int(rng.integers(1, 4)), int(rng.integers(2, 7))
        X = in_ball(2 * rng.standard_normal((c, d)), 1.0)
        X[1:] *= rng.choice([1.0, 0.05])
        mu = rng.dirichlet(np.full(c, rng.choice([0.1, 1.0]))) + 1e-12
        a, values = 10 ** rng.uniform(-0.5, 1.5), np.append(1.0, rng.choice([0.05, 0.5, 1.0, 1.0], d - 1))
        share = rng.choice([1.0, 0.5])
        columns = some_columns(rng, a, stretch=1.0 / values.min(), share=share)
        G = a * values * X
        L = G @ X.T + np.log(mu)
        logZ = np.logaddexp.reduce(L, axis=1)
        P = np.exp(L - logZ[:, None])
        Y = X[None] - (P @ X)[:, None]
        lam = np.clip(np.linalg.eigvalsh(np.einsum("xk,xki,xkj->xij", P, Y, Y))[:, -1], 0.0, 1.0)
        Delta = a**2 * (share**2 + columns.excess)
        w = (1.0 + lam / (columns.h + a**-2)) / (1.0 - a**2 * np.minimum(lam, share) ** 2 / Delta)
        y, e = int(rng.integers(c)), rng.standard_normal(d)
        log_alpha = np.log(mu) + G @ X[y] - logZ + np.log(w) + np.log1p(columns.h * (G @ e) ** 2 / (e @ e))
        log_T = float(np.logaddexp.reduce(log_alpha))
        alpha, images = np.exp(log_alpha - log_T), X * np.sqrt(values)
        centred = images - alpha @ images
        rho = min(1.0, float(np.linalg.norm(alpha @ images)))
        beta = np.linalg.eigvalsh((alpha[:, None] * centred).T @ centred)[-1]
        at = np.array([[rho], [np.clip(beta / max(1.0 - rho**2, 1e-300), 0.0, 1.0)]])
        bound = float(columns.bound(np.maximum(at - 1e-9, 0.0), np.minimum(at + 1e-9, 1.0))[0])
        assert log_T <= bound + 1e-9
        tight = max(tight, log_T - bound)
    assert tight > -0.3


@pytest.mark.parametrize(
    ("a", "most"),
    [
        (4.0, 8.84),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((1.0, 2.4905), (9.0, 23.45), (16.0, 65.7), (25.0, 244.5), (40.0, 2180.0))
        ),
    ],
)
def test_values(a, most):
    bound = psd_mean_field(head(a, 3), radius=1.0)
    assert bound.value < most
    assert bound.verify()
    assert bound.value < 0.98 * mean_field(head(a, 3), radius=1.0).value
    assert not replace(bound, value=0.99 * bound.value).verify()


def test_units_dimension_and_values():
    """``alpha R^2`` and ``||V||`` are all that counts; the bias of a domain's centre is taken back."""
    bound = psd_mean_field(head(1.0), radius=1.0)
    for other in (
        psd_mean_field(head(0.25), radius=2.0),
        psd_mean_field(head(1.0, 7, np.diag([0.2, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])), radius=1.0),
        psd_mean_field(
            oa.SoftmaxAttention(np.eye(2), np.eye(2), bias=[-0.5, 1.0]), domain=Ellipsoid(np.eye(2), [0.5, -1.0])
        ),
    ):
        assert other.value == pytest.approx(bound.value, rel=1e-6)
    assert psd_mean_field(head(1.0, V=3.0 * TILTED), radius=1.0).value == pytest.approx(
        3.0 * np.linalg.norm(TILTED, 2) * bound.value, rel=1e-9
    )
    assert psd_mean_field(head(1.0, V=np.zeros((1, 2))), radius=1.0).value == 0.0


@pytest.mark.parametrize(
    ("attention", "given", "word"),
    [
        (head(4.0), {"n": 4}, "any measure"),
        (head(4.0), {"p": 1.0}, "p must be 2"),
        (head(4.0), {"radius": None, "domain": Ellipsoid(np.eye(2), [0.1, 0.0])}, "bias"),
        (head(-4.0), {}, "semidefinite"),
        (oa.SoftmaxAttention([[4.0, 0.1], [0.0, 4.0]], np.eye(2)), {}, "semidefinite"),
        (head(1e-9), {}, "must lie in"),
        (head(1e5), {}, "must lie in"),
        (oa.SoftmaxAttention(4.0 * np.eye(2), np.eye(2), bias=[0.1, 0.0]), {}, "bias"),
        (oa.MaskedAttention(head(4.0)), {}, "without a mask"),
    ],
)
def test_other_statements_are_refused(attention, given, word):
    with pytest.raises(ValueError, match=word):
        psd_mean_field(attention, **{"radius": 1.0, **given})


def test_the_search_for_the_best_bound_tries_it_where_it_can_win():
    record, attention = THEOREMS["psd_mean_field"], head(16.0)
    closed = {n: [b for b in table(attention, radius=1.0, n=n).bounds if b.kind == "upper"] for n in (3, 10**6, None)}
    assert [_worth_it(record, attention, n, 2.0, bounds) for n, bounds in closed.items()] == [False, True, True]
    assert oa.lipschitz_upper_bound(head(1.0), radius=1.0).theorem == "psd_mean_field"


@pytest.mark.slow
def test_it_is_the_best_for_many_tokens():
    found = upper_bounds(head(4.0), radius=1.0, n=1000)
    assert found[0].theorem == "psd_mean_field"
    assert found[0].verify(n=1000)


@pytest.mark.parametrize(("a", "V"), [(4.0, np.eye(2)), (0.5, np.array([[1.0, -0.5]]))])
def test_it_survives_climbs(a, V):
    bound = psd_mean_field(head(a, V=V), radius=1.0).value
    assert 0.5 * bound < climb(head(a, V=V), None, 1.0, np.random.default_rng(6), batch=18, steps=30) <= bound


@pytest.mark.slow
def test_it_survives_climbs_with_other_eigenvalues():
    rng = np.random.default_rng(7)
    most = 0.0
    for _ in range(12):
        d, a, radius = int(rng.integers(1, 4)), float(np.exp(rng.uniform(-1.0, 3.5))), 10.0 ** rng.uniform(-2, 2)
        basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
        values = np.append(1.0, rng.choice([0.0, 0.05, 0.5, 1.0], d - 1)) * a / radius**2
        attention = oa.SoftmaxAttention(basis * values @ basis.T, rng.standard_normal((2, d)))
        bound = psd_mean_field(attention, radius=radius)
        assert bound.verify()
        most = max(most, climb(attention, None, radius, rng) / bound.value)
    assert 0.4 < most <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("a", [1.0, 4.0, 9.0, 25.0])
def test_no_measure_that_we_know_exceeds_it(a):
    bound = psd_mean_field(head(a), radius=1.0).value
    assert 0.36 * bound <= oa.lipschitz_lower_bound(head(a), radius=1.0, rng=0).value <= bound
    assert oa.lipschitz_lower_bound(head(a), radius=1.0, n=64, rng=0, effort="fast").value <= bound


def test_altered_multipliers():
    """What is no multiplier is refused; others prove a bound, never a smaller one than the truth."""
    attention = head(4.0)
    bound = psd_mean_field(attention, radius=1.0)
    truth = climb(attention, None, 1.0, np.random.default_rng(4), batch=12, steps=30)
    parts = bound.multipliers
    for key in ("h", "excess"):
        for wrong in (-parts[key], 0.0 * parts[key], np.append(parts[key], 1.0), parts[key] * math.nan):
            assert not replace(bound, multipliers={**parts, key: wrong}).verify()
        assert not replace(bound, multipliers={k: v for k, v in parts.items() if k != key}).verify()
        assert replace(bound, multipliers={**parts, key: 30.0 * parts[key]}).proved_value() > bound.value
    assert 0.5 * bound.value < truth < bound.value
    assert not replace(bound, value=truth, options={"target": 0.5 * bound.options["target"]}).verify()
    assert not replace(bound, n=4, p=1.0).verify()


def test_the_logarithm_of_a_tiny_value_is_checked():
    bound = psd_mean_field(head(1.0, V=1e-310 * np.eye(2)), radius=1.0)
    assert bound.verify()
    assert not replace(bound, log_value=bound.log_value - 0.5).verify()


@pytest.mark.parametrize(
    ("A", "V"),
    [
        (np.eye(2), TILTED),
        pytest.param(np.diag([1.0, 0.3]), TILTED, marks=pytest.mark.slow),
        pytest.param(np.diag([1.0, 0.0]), np.eye(2), marks=pytest.mark.slow),
    ],
)
def test_proof_in_intervals(A, V):
    pytest.importorskip("flint")
    bound = psd_mean_field(oa.SoftmaxAttention(2.0 / 1.3**2 * A, V), radius=1.3)
    assert bound.verify(rigorous=True)
    assert bound.rigorous_value() == pytest.approx(bound.value, rel=1e-9)
    assert not replace(bound, value=bound.value * (1 - 1e-6)).verify(rigorous=True)
