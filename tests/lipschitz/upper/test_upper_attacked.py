"""A second adversary: formulas derived again from the definitions, against the cells, the bounds and the rechecks."""

import math
from dataclasses import replace

import numpy as np
import pytest
from psd_terms import some_multipliers, square, term, weight
from relaxation_attacks import climb, in_ball
from scipy.special import softmax, xlogy

from otattn.attention import RotaryAttention, SoftmaxAttention
from otattn.lipschitz.constants.heads import unit_numbers
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit
from otattn.lipschitz.forms.frontier_rows import frontier_rows
from otattn.lipschitz.forms.negative_identity import negative_identity
from otattn.lipschitz.forms.psd_mean_field import psd_mean_field
from otattn.lipschitz.lower.best import lipschitz_lower_bound
from otattn.lipschitz.lower.charts import forms_of
from otattn.lipschitz.lower.clusters import Configuration
from otattn.lipschitz.relaxations import field_certificate
from otattn.lipschitz.upper.mean_field import entropy_bound, mean_field
from otattn.lipschitz.upper.psd import psd
from otattn.lipschitz.upper.psd_columns import Columns, OwnTerm
from otattn.lipschitz.upper.psd_multipliers import OwnShare
from otattn.lipschitz.upper.rows_and_columns import Rows, Search, rows_and_columns
from otattn.lipschitz.upper.scores import rotary_row_bound
from otattn.measures import Ball, Box

SIZES = (2, 3, 4, 8, 64, 1000, 10**6)


# --- the row and column inequalities of psd ---------------------------------------------------------------------------


def some_columns(rng, n):
    """Numbers and weights far outside of what a search proposes."""
    a = 10 ** (rng.uniform(-4, 3) if rng.random() < 0.5 else rng.uniform(0, 1.5))
    stretch = float(rng.choice([1.0, 1.0, 1.5, 10.0, 1e6, np.inf]))
    split = (10 ** rng.uniform(-3, 1.7), 1 + 10 ** rng.uniform(-3, 1.7), 10 ** rng.uniform(-3, 1.7))
    eta = float(rng.choice([0.0, 10 ** rng.uniform(-3, 1.7)]))
    d, omega = int(rng.integers(1, 9)), 10 ** rng.uniform(-3, 1)
    return Columns(a, a * rng.uniform(0.5, 1.0), stretch, n, d, split, eta, 10 ** rng.uniform(-2, 3), omega)


def possible_rows(columns, rng, count):
    """Rows that meet every condition of N3 with their largest spread: ``(r, h, p, q), lam``."""
    a, n = columns.a, columns.n
    r, h = rng.random((2, count)) ** rng.choice([0.2, 1.0, 3.0])
    odds = a * r * h * rng.uniform(-1, 1, count) - a * h**2
    least, most = np.log(max(n - 2, 1)) - a * (h + h**2), np.log(max(n - 2, 1)) + a * (h - h**2)
    others = least + (most - least) * rng.random(count) if n > 2 else np.full(count, -np.inf)
    log_q = -np.logaddexp(np.logaddexp(0.0, odds), others)
    p, q, rest = np.exp(odds + log_q), np.exp(log_q), np.exp(others + log_q)
    E = a * h**2 - log_q + xlogy(p, p) + xlogy(q, q) + (xlogy(rest, rest / (n - 2)) if n > 2 else 0.0)
    lam = 1 - p * (1 - square(columns, r)) - q * (1 - square(columns, h)) - (np.maximum(E, 0) / (a * h)) ** 2
    for x in (p, q):
        lam = np.where(x > 0.5, np.minimum(lam, 4 * x * (1 - x)), lam)
    # no law has more in one direction: tests of row_spread
    lam = np.minimum(lam, columns.spread((h, h), (log_q, log_q)))
    ok = (a * h >= E) & (lam >= 0) & (p > 1e-6 / n) & (p < 1 - 1e-12)
    return np.array([r, h, p, q])[:, ok], lam[ok]


def test_boxes_of_rows_hold_what_the_definitions_say():
    rng = np.random.default_rng(0)
    seen = 0
    for k in range(14):
        columns = some_columns(rng, SIZES[k % len(SIZES)])
        (r, h, p, q), lam = possible_rows(columns, rng, 800)
        count, a = len(r), columns.a
        # a larger gap takes from the spread
        least = q * (1 - square(columns, h)) / (1 - p)
        gap = least + np.minimum(1 - least, lam / (1 - p)) * rng.random(count) ** rng.choice([1.0, 4.0])
        many = some_multipliers(rng, count, columns.omega, columns.n)
        true = term(columns, many, r, h, p, q, gap, (a * h) ** 2 * np.maximum(lam - (1 - p) * (gap - least), 0.0))
        z = np.array([r, h, np.log(p), np.log(q)])
        # wide and narrow sides, the point often at the lower end
        width = np.array([[0.3], [0.3], [3.0], [3.0]]) * 10 ** (-4 * rng.random(z.shape) * rng.integers(0, 2, z.shape))
        at = rng.random(z.shape) * (rng.random(z.shape) > 0.2)
        lo, hi = z - at * width, z + (1 - at) * width
        lo = np.maximum(lo, [[0.0], [0.0], [columns.log_least_p], [columns.log_least_q]])
        hi = np.minimum(hi, [[1.0], [1.0], [0.0], [0.0]])
        with np.errstate(all="ignore"):
            whole, _ = columns.off(lo, hi, many)
        # 1e-9: the logarithms are differences of terms of that size
        assert (true <= whole + 1e-9 * (1 + a) * (1 + many.sigma) ** 2).all()
        seen += count
    assert seen > 2500


@pytest.mark.slow
def test_own_terms_hold_what_the_definitions_say():
    rng = np.random.default_rng(1)
    seen = 0
    for k in range(14):
        columns = some_columns(rng, SIZES[k % len(SIZES)])
        a, n = columns.a, columns.n
        r = 1 - rng.random(200)
        q = 1 / (1 + (n - 1) * np.exp(a * (r * rng.uniform(-1, 1, 200) - r**2)))
        E = a * r**2 - np.log(q) + xlogy(q, q) + xlogy(1 - q, (1 - q) / (n - 1))
        lam = 1 - q * (1 - square(columns, r)) - (np.maximum(E, 0) / (a * r)) ** 2
        lam = np.where(q > 0.5, np.minimum(lam, 4 * q * (1 - q)), lam)
        ok = (lam >= 0) & (a * r >= E) & (q < 1 - 1e-12)
        r, q, lam = r[ok], q[ok], lam[ok]
        t = columns.t(r)
        metric = 1 + columns.omega * a * r**2
        true = (1 + t) * weight(columns, q, (a * r) ** 2 * lam / metric) * metric + (1 + 1 / t) * (columns.b * lam) ** 2
        side = 10 ** (-4 * rng.random(r.size)) * rng.random((2, r.size))
        with np.errstate(all="ignore"):
            whole = OwnTerm(columns)(np.maximum(r - side[0], 0), np.minimum(r + side[1], 1))
        assert (true <= whole * (1 + 1e-9)).all()
        seen += r.size
    assert seen > 1000


def structured_tokens(rng, n, d):
    """Clusters, two anchors with the rest near the centre, tokens at the centre, tokens that coincide, a cloud."""
    X = in_ball(2 * rng.standard_normal((n, d)), 1.0)
    kind = int(rng.integers(5))
    if kind == 0:
        X = X[rng.integers(0, max(1, n // 3), n)]
    elif kind == 1:
        X[2:] *= 0.05
        X[1] = -X[0]
    elif kind == 2:
        X[: n // 2] = 0.0
    elif kind == 3:
        X[:] = X[0] * rng.uniform(0.9, 1.0, (n, 1))
    return X


@pytest.mark.slow
def test_columns_of_attention_are_below_the_boxes_of_their_rows():
    rng = np.random.default_rng(2)
    seen = 0
    for _ in range(40):
        d, n = int(rng.integers(1, 4)), int(rng.integers(2, 12))
        values = np.append(1.0, rng.choice([0.0, 0.01, 1.0], d - 1)) * 10 ** rng.uniform(-1, 1.7)
        X = structured_tokens(rng, n, d)
        logits = (X * values) @ X.T
        P = softmax(logits, axis=1)
        columns = replace(
            some_columns(rng, n), a=values[0], d=d, stretch=values[0] / values.min() if values.min() else np.inf
        )
        m, h = P @ X, np.sqrt((values * X**2).sum(axis=1) / values[0])
        trace = np.einsum("ik,ikd->i", P, (X[None] - m[:, None]) ** 2)
        g, along = X * values, columns.omega / columns.a
        spread = (g**2).sum(axis=1) * trace / (1 + along * (g**2).sum(axis=1))
        terms = weight(columns, np.maximum(P, 1e-300), spread[:, None])
        terms = (1 + columns.t(h))[:, None] * terms
        one = some_multipliers(rng, 1, columns.omega, n)
        share, cell = OwnShare(one, n), np.zeros(n - 1, dtype=int)
        for j in range(n):
            rows = np.flatnonzero(np.arange(n) != j)
            p, q = P[rows, j], P[rows, rows]
            if p.min() < 1e-6 / n or max(p.max(), q.max()) > 1 - 1e-12:
                continue
            z = np.array([np.full(n - 1, h[j]), h[rows], np.log(p), np.log(q)])
            side = np.array([[0.05], [0.05], [0.4], [0.4]]) * rng.random((4, 1)) ** 2
            lo = np.maximum(
                z - side * rng.random(z.shape), [[0.0], [0.0], [columns.log_least_p], [columns.log_least_q]]
            )
            hi = np.minimum(z + side * rng.random(z.shape), [[1.0], [1.0], [0.0], [0.0]])
            with np.errstate(all="ignore"):
                value, _ = columns.off(lo, hi, one.at(cell))
            value = value + share(cell, np.exp(lo[3]) / -np.expm1(lo[2]))
            e = g[rows[0]] if rng.random() < 0.5 and g[rows[0]].any() else rng.standard_normal(d)
            factor = 1 + along * (g[rows] @ e) ** 2 / (e @ e)
            assert np.log((terms[rows, j] * factor).sum()) <= value.max() + 1e-9 * (1 + columns.a)
            seen += 1
    assert seen > 200


def ascend(attention, counts, rng, *, batch=16, steps=40):
    """Climbs that begin at structured configurations with coinciding tokens."""
    c, d = len(counts), attention.in_dim
    X = np.stack([structured_tokens(rng, c, d) for _ in range(batch)])
    # coinciding atoms have equal derivatives: a small push tells them apart
    X = in_ball(X + 1e-3 * rng.standard_normal(X.shape), 1.0)
    weights, best = np.tile(np.log(np.array(counts, dtype=float)), (batch, 1)), 0.0
    for k in range(steps):
        one = Configuration(forms_of(attention), X, weights)
        value, u, v = one.top()
        best = max(best, float(value.max()))
        step, _ = one.gradient(u, v)
        X = in_ball(
            X + 0.3 * (1 - k / steps) ** 2 * step / np.maximum(np.abs(step).max(axis=(1, 2), keepdims=True), 1e-300),
            1.0,
        )
    return best


TURN = np.array([[0.6, -0.8], [0.8, 0.6]])
PSD_CASES = [
    (2.0, np.diag([1.0, 0.0]), np.eye(2), (1, 1)),
    (14.0, np.diag([1.0, 0.0]), np.array([[0.0, 1.0]]), (1, 1, 3)),
    (6.0, TURN @ np.diag([1.0, 0.01]) @ TURN.T, np.diag([1.0, 0.2]), (1, 1)),
    (0.3, np.eye(1), np.eye(1), (1, 1)),
    (40.0, np.eye(2), np.array([[1.0, 2.0], [0.0, 1.0], [0.0, 3.0]]), (1, 2, 5)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(PSD_CASES)))
def test_psd_survives_climbs_from_structured_configurations(case):
    a, A, V, counts = PSD_CASES[case]
    attention, n = SoftmaxAttention(a * A, V), sum(counts)
    bound = psd(attention, radius=1.0, n=n, effort="fast").value
    rng = np.random.default_rng(case)
    assert 0.3 * bound <= ascend(attention, counts, rng) <= bound
    assert ascend(attention, (1,) * n, rng) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("case", [1, 2])
def test_psd_and_joint_survive_the_deep_search(case):
    a, A, V, counts = PSD_CASES[case]
    attention, n = SoftmaxAttention(a * A, V), min(sum(counts), 4)
    lower = lipschitz_lower_bound(attention, radius=1.0, n=n, rng=1, effort="deep").value
    assert lower <= psd(attention, radius=1.0, n=n, effort="fast").value
    assert lower <= rows_and_columns(attention, radius=1.0, n=n).value


@pytest.mark.slow
@pytest.mark.parametrize("a", [1e-12, 1e-200, 1e-320])
def test_psd_with_logits_near_nothing(a):
    # the map is the mean of the tokens; 3 percent: the fast search leaves K and D split
    assert 1.0 <= psd(SoftmaxAttention([[a]], [[1.0]]), radius=1.0, n=4, effort="fast").value <= 1.03


@pytest.mark.slow
def test_psd_with_values_near_nothing():
    # the product of the norms underflows, the bound does not
    assert (
        1e-170
        <= psd(SoftmaxAttention(1e-170 * np.eye(2), 1e-170 * np.eye(2)), radius=1.0, n=3, effort="fast").value
        < 1e-169
    )


# --- rectangles ---------------------------------------------------------------------------------------------------------


def test_covariances_of_rectangles_are_below_the_plane_bound():
    rng = np.random.default_rng(3)
    for k in range(60):
        A, V = rng.standard_normal((2, 2)), rng.standard_normal((int(rng.integers(1, 5)), 2))
        A = np.outer(A[0], A[1]) if k % 3 == 0 else A
        V = V[:, :1] * rng.standard_normal(2) if k % 5 == 0 else V
        A *= 10 ** rng.uniform(-30, 30)
        r, center = 10 ** rng.uniform(-3, 3, 2), rng.standard_normal(2)
        bound = field_certificate(SoftmaxAttention(A, V), domain=Box(center - r, center + r))
        assert bound.relaxation == "field_certificate/cells"
        assert bound.verify()
        r, best = bound.domain.half_widths, 0.0
        for _ in range(40):
            x = rng.uniform(-1, 1, (int(rng.integers(2, 5)), 2))
            x[np.arange(len(x)), rng.integers(0, 2, len(x))] = rng.choice([-1.0, 1.0], len(x))
            x[1:] = -x[0] if rng.random() < 0.6 else x[1:]
            p = rng.dirichlet(np.ones(len(x)))
            y = (x - p @ x) * r
            best = max(best, np.linalg.norm(V @ (y.T * p) @ y @ A, 2))
        t = np.linspace(-1, 1, 3001)
        for v in (np.array([np.ones_like(t), t]), np.array([t, np.ones_like(t)])):
            v = v * r[:, None]
            best = max(best, float((np.linalg.norm(V @ v, axis=0) * np.linalg.norm(A.T @ v, axis=0)).max()))
        # a grid of 3001 points finds the maximum to 1e-6
        assert (1 - 1e-5) * bound.value <= best <= bound.value


# --- rotary positions -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rotary_attention_is_below_its_row_bound():
    rng = np.random.default_rng(4)
    tight = 0.0
    for _ in range(60):
        k, d, e, n = (
            2 * int(rng.integers(1, 3)),
            int(rng.integers(1, 4)),
            int(rng.integers(1, 4)),
            int(rng.integers(1, 7)),
        )
        R = 10 ** rng.uniform(-1, 1)
        Q, K = rng.standard_normal((2, k, d))
        head = RotaryAttention(
            Q,
            -Q if rng.random() < 0.4 else K,
            rng.standard_normal((e, d)),
            base=float(rng.choice([1.5, 1e4])),
            layout=str(rng.choice(["adjacent", "half"])),
            scale=float(rng.choice([-1.0, 1.0])) * 10 ** rng.uniform(-2, 1) / R**2,
            query_bias=R * rng.standard_normal(k) if rng.random() < 0.4 else None,
            key_bias=3 * R * rng.standard_normal(k) if rng.random() < 0.4 else None,
            masked=bool(rng.random() < 0.5),
            length=float(rng.choice([0.1, 7.0, 1000.0])),
        )
        bound = rotary_row_bound(head, radius=R, n=n).value
        for _ in range(3):
            X, value, step = R * structured_tokens(rng, n, d) if n > 1 else R * np.ones((1, d)) / d, 0.0, 0.3 * R
            for _ in range(12):
                Y = in_ball(X + step * rng.standard_normal(X.shape), R)
                new = np.linalg.norm(head.jacobian(Y).to_dense(), 2)
                X, value, step = (Y, new, step) if new > value else (X, value, 0.8 * step)
            assert value <= bound
            tight = max(tight, value / bound)
    assert tight > 0.9


def test_rotary_bound_of_huge_logits_is_no_small_number():
    eye = np.eye(2)
    # the constants overflow: nothing is known, and nothing else may be said
    assert (
        rotary_row_bound(RotaryAttention(1e29 * eye, 1e29 * eye, eye, scale=1e300), radius=1.0, n=4).value == math.inf
    )
    with pytest.raises(ValueError, match="must have entries of at most"):
        rotary_row_bound(RotaryAttention(1e200 * eye, 1e200 * eye, eye), radius=1.0, n=4)
    huge = RotaryAttention(1e29 * eye, 1e29 * eye, 1e29 * eye)
    assert 1e140 < rotary_row_bound(huge, radius=1e29, n=4).value < math.inf
    assert rotary_row_bound(RotaryAttention(1e29 * eye, 1e29 * eye, 0 * eye, scale=1e300), radius=1.0, n=4).value == 0.0
    assert rotary_row_bound(
        RotaryAttention(0 * eye, 1e29 * eye, eye, scale=1e308), radius=1.0, n=2
    ).value == pytest.approx(math.sqrt(2))


# --- joint and mean-field ---------------------------------------------------------------------------------------------


def some_head(rng, d):
    A, V = rng.standard_normal((d, d)), rng.standard_normal((int(rng.integers(1, 4)), d))
    A = [A, A @ A.T, A - A.T, np.eye(d), -np.eye(d), np.outer(A[0], A[-1])][int(rng.integers(6))]
    A = A / max(np.linalg.norm(A, 2), 1e-300) * 10 ** rng.uniform(-0.5, 1.3)
    return SoftmaxAttention(A, V, bias=rng.standard_normal(d) if rng.random() < 0.4 else None)


def test_displacements_are_below_the_cell_of_their_norms():
    rng = np.random.default_rng(5)
    tight = 0.0
    for _ in range(10):
        d, n = int(rng.integers(1, 4)), int(rng.integers(2, 7))
        attention = some_head(rng, d)
        head = unit_numbers(attention, 1.0)
        family = SelfLogit.default(head)
        multipliers = {"nu": family.nu, "gap": family.gap, "edges": np.linspace(0, 1, 40)}
        search = Search(Rows.of({"head": head, "n": n, "atoms": 60}, multipliers))
        for _ in range(12):
            J = attention.jacobian(structured_tokens(rng, n, d)).to_dense()
            eps = np.linalg.svd(J)[2][0] if rng.random() < 0.7 else rng.standard_normal(n * d) ** 3
            eps = eps / np.linalg.norm(eps)
            e = np.sort(np.linalg.norm(eps.reshape(n, d), axis=1))[::-1]
            at = np.array([[np.hypot(e[0], e[1])], [np.arctan2(e[1], e[0])]])
            side = 0.05 * rng.random((2, 2, 1))
            lo, hi = np.maximum(at - side[0], 0.0), np.minimum(at + side[1], [[1.0], [math.pi / 4]])
            bound = head.v * math.exp(0.5 * search.bound(lo, np.maximum(hi, lo))[0])
            value = np.linalg.norm(J @ eps)
            assert value <= bound * (1 + 1e-12)
            tight = max(tight, value / bound)
    assert tight > 0.7


@pytest.mark.slow
def test_column_functions_of_measures_are_below_the_bound():
    """``T(y) = sum_x mu_x k(x, y) w(x, y)`` of random measures, at the barycentre that they have."""
    rng = np.random.default_rng(6)
    tight = -math.inf
    for trial in range(80):
        d, c = int(rng.integers(1, 4)), int(rng.integers(2, 7))
        X = structured_tokens(rng, c, d)
        mu = rng.dirichlet(np.full(c, rng.choice([0.1, 1.0])))
        mu = np.maximum(mu, 1e-12) / np.maximum(mu, 1e-12).sum()
        a = 10 ** rng.uniform(-0.5, 1.4)
        if trial % 2 == 0:
            basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
            values = np.append(1.0, rng.choice([0.05, 0.5, 1.0], d - 1))
            A, bias = a * basis * values @ basis.T, np.zeros(d)
        else:
            A = rng.standard_normal((d, d))
            A, bias = a * A / np.linalg.norm(A, 2), rng.standard_normal(d) * rng.integers(0, 2)
        G = X @ A.T + bias
        L = G @ X.T + np.log(mu)
        top = L.max(axis=1, keepdims=True)
        logZ = (top + np.log(np.exp(L - top).sum(axis=1, keepdims=True)))[:, 0]
        P = np.exp(L - logZ[:, None])
        Y = X[None] - (P @ X)[:, None]
        lam = np.maximum(np.linalg.eigvalsh(np.einsum("xk,xki,xkj->xij", P, Y, Y))[:, -1], 0.0)
        size = np.linalg.norm(G, axis=1)
        y = int(rng.integers(c))
        log_k = G @ X[y] - logZ
        head = unit_numbers(SoftmaxAttention(A, np.eye(d), bias=bias), 1.0)
        field = Barycentre.of(head, SelfLogit.default(head))
        for s1, s2 in ((0.0, 1.0), (0.6, 0.4), (0.0, 2.0)):
            log_alpha = np.log(mu) + log_k + s1 * np.log1p(2 * size) + s2 * np.log1p(size**2 * lam)
            log_T = float(np.logaddexp.reduce(log_alpha))
            xbar = np.exp(log_alpha - log_T) @ X
            r, g = np.linalg.norm(xbar), np.linalg.norm(A @ xbar + bias)
            low, high = field.gamma(np.array([r, r]), np.array([0.0, 1.0]))
            q = np.clip((g - low) / max(high - low, 1e-300), 0.0, 1.0)
            at = np.array([[r], [q]])
            bound = float(entropy_bound(field, s1, s2)(np.maximum(at - 1e-9, 0.0), np.minimum(at + 1e-9, 1.0))[0])
            assert log_T <= bound + 1e-9
            tight = max(tight, log_T - bound)
    # nearly attained
    assert tight > -0.2


@pytest.mark.parametrize("values", [[1.0, 0.05], [1.0, 0.5], [1.0, 0.0]])
@pytest.mark.parametrize("a", [3.0, 12.0])
def test_mean_field_survives_climbs_with_other_eigenvalues(values, a):
    attention = SoftmaxAttention(a * TURN * values @ TURN.T, np.array([[1.0, -0.5]]))
    bound = mean_field(attention, radius=1.0)
    assert climb(attention, None, 1.0, np.random.default_rng(7), batch=18, steps=40) <= bound.value
    assert bound.verify()


# --- rechecks of altered certificates -----------------------------------------------------------------------------------


ALTERED = {
    "nan": lambda x: np.nan * x,
    "inf": lambda x: np.inf if np.ndim(x) == 0 else np.full_like(x, np.inf),
    "-inf": lambda x: -np.inf if np.ndim(x) == 0 else np.full_like(x, -np.inf),
    "negative": lambda x: -x,
    "zero": lambda x: 0 * x,
    "minus one": lambda x: 0 * x - 1,
    "half": lambda x: 0.5 * x,
    "huge": lambda x: 0 * x + 1e300,
    "tiny": lambda x: 0 * x + 1e-300,
    "reversed": lambda x: x[::-1].copy(),
    "shorter": lambda x: x[:-1],
}
SPENT = {("psd", x, "zero") for x in ("sigma", "t", "nu", "s", "zeta")}
SPENT |= {("psd", "split", "huge"), ("psd", "sigma", "tiny"), ("frontier_rows", "lines", "half")}
"""With these a check says no only when its cells are spent, after ten seconds and more."""
DEAR = {"frontier_rows": ("tiny", "minus one"), "psd": ("half", "tiny")}
"""Valid multipliers, far from good ones: each takes seconds to say no."""
OTHER_WORDS = {word: lambda x, word=word: word for word in ("", "entropy", "covariance", "plain", "column", "x")}


def certificates():
    attention = SoftmaxAttention(-9.0 * np.eye(2), np.eye(2))
    lower = lipschitz_lower_bound(attention, radius=1.0, n=3, rng=0, effort="fast").value
    yield rows_and_columns(attention, radius=1.0, n=3), 0.95 * lower
    yield negative_identity(attention, radius=1.0, n=3), 0.95 * lower
    attention = SoftmaxAttention(np.array([[9.0, 2.0], [-1.0, 3.0]]), np.array([[1.0, 0.0], [0.2, 0.4]]))
    lower = lipschitz_lower_bound(attention, radius=1.0, n=3, rng=0, effort="fast").value
    yield frontier_rows(attention, radius=1.0, n=3), 0.95 * lower
    attention = SoftmaxAttention(4.0 * np.eye(2), np.eye(2))
    lower = lipschitz_lower_bound(attention, radius=1.0, n=3, rng=0, effort="fast").value
    yield psd(attention, radius=1.0, n=3, effort="fast"), 0.95 * lower
    lower = lipschitz_lower_bound(attention, radius=1.0, rng=0, effort="fast").value
    yield mean_field(attention, domain=Ball(1.0)), 0.95 * lower
    yield psd_mean_field(attention, domain=Ball(1.0)), 0.95 * lower
    bound = field_certificate(SoftmaxAttention(TURN, np.diag([1.0, 2.0])), domain=Box([-1.0, -2.0], [1.0, 2.0]))
    yield bound, 0.95 * bound.details["attained"]


@pytest.mark.slow
def test_no_altered_certificate_proves_less_than_the_truth():
    tried = 0
    for bound, false_value in certificates():
        assert bound.verify()
        low = replace(bound, value=false_value)
        for part in ("options", "multipliers"):
            data = getattr(bound, part)
            for key, old in data.items():
                for name, change in (OTHER_WORDS if isinstance(old, str) else ALTERED).items():
                    if np.ndim(old) == 0 and name in ("reversed", "shorter"):
                        continue
                    if (bound.relaxation, key, name) in SPENT or name in DEAR.get(bound.relaxation, ()):
                        continue
                    assert not replace(low, **{part: {**data, key: change(old)}}).verify(), (
                        bound.relaxation,
                        key,
                        name,
                    )
                    tried += 1
    assert tried > 100


def test_a_recheck_without_cells_of_the_mass_proves_nothing():
    bound = rows_and_columns(SoftmaxAttention(-9.0 * np.eye(2), np.eye(2)), radius=1.0, n=16)
    for atoms in (0, -1, 0.5, np.nan, np.inf):
        assert not replace(bound, options={**bound.options, "atoms": atoms}).verify(), atoms


@pytest.mark.slow
def test_psd_rechecks_refuse_statements_of_no_head():
    bound = psd(SoftmaxAttention(4.0 * np.eye(2), np.eye(2)), radius=1.0, n=3, effort="fast")
    for change in ({"n": 1}, {"n": np.inf}, {"n": None}, {"n": 2.5}, {"p": 1.0}, {"domain": None}, {"attention": None}):
        assert not replace(bound, **change).verify(), change
