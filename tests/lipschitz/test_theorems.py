"""Our closed-form bounds: sharp cases, formulas, laws of scaling, domains, special sizes, hypotheses."""

import math

import numpy as np
import pytest

import otattn.lipschitz.bounds as bounds
from otattn.attention import (
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.lipschitz.constants.quadratic import column_exponent, max_norm_product, max_quadratic
from otattn.lipschitz.constants.rows import density_constant, density_constant_p, fixed_query_constant
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, LayerNormDomain, PointSet

INF = math.inf
OUTWARD = 1e-10  # returned values are raised by 1e-11, and by a few margins of 1e-12 before that
"""Relative size of all outward rounding together."""


def _norm(attention, X, weights=None):
    mu = DiscreteMeasure(X, weights) if not attention.causal else X
    w = np.full(len(X), 1.0 / len(X)) if weights is None else np.asarray(weights)
    J = attention.jacobian(mu).to_dense().reshape(len(X), -1, len(X), np.shape(X)[1])
    root = np.sqrt(w)
    n, e, _, d = J.shape
    return float(np.linalg.norm((J * root[:, None, None, None] / root[:, None]).reshape(n * e, n * d), 2))


# constants of one row


def test_row_constant_closed_form():
    assert bounds.row_norm(0.0) == bounds.row_norm(0.5) == 1.0
    for t in (0.6, 1.0, 5.0, 1e3):
        s = np.linspace(0.0, 1.0, 200_001)
        grid = np.sqrt((1.0 + (s + t * (1.0 - s * s)) ** 2) / 2.0).max()
        assert grid <= bounds.row_norm(t)
        # the grid misses the maximiser by up to 2.5e-6, the maximum by t times its square
        assert bounds.row_norm(t) == pytest.approx(grid, rel=1e-10)
    assert bounds.row_norm(1e200) == pytest.approx(1e200 / math.sqrt(2.0))


def test_row_constant_is_attained():
    # weights (1 + s)/2 at R u, (1 - s)/2 at -R u, g along u
    t = 3.0
    s = 1.0 / (2.0 * t)
    p = np.array([(1 + s) / 2, (1 - s) / 2])
    row = p * (1.0 + t * (np.array([1.0, -1.0]) - s))
    assert np.linalg.norm(row) == pytest.approx(bounds.row_norm(t), rel=OUTWARD)


def test_row_constant_bounds_random_rows():
    rng = np.random.default_rng(0)
    for _ in range(500):
        d, n = int(rng.integers(1, 4)), int(rng.integers(1, 7))
        y = rng.standard_normal((n, d))
        y /= np.maximum(1.0, np.linalg.norm(y, axis=1, keepdims=True))
        p = rng.dirichlet(np.full(n, 0.5))
        g = rng.standard_normal(d) * np.exp(rng.uniform(-2, 3))
        t = float(np.linalg.norm(g))
        B = np.eye(d) + (y - p @ y)[:, :, None] * g
        row = (p[:, None, None] * B).transpose(1, 0, 2).reshape(d, -1)
        assert np.linalg.norm(row, 2) <= bounds.row_norm(t)
        for order in (1.0, 1.4, 2.0, 4.0, INF):
            dual = INF if order == 1.0 else order / (order - 1.0) if order < INF else 1.0
            u = rng.standard_normal(d)
            u /= np.linalg.norm(u)
            sizes = np.linalg.norm(B.transpose(0, 2, 1) @ u, axis=1)
            value = sizes[p > 0].max() if dual == INF else float(p @ sizes**dual) ** (1.0 / dual)
            assert value <= bounds.hoelder_constant(t, order)


def test_hoelder_constant_meets_its_ends():
    for t in (0.1, 1.0, 30.0):
        assert bounds.hoelder_constant(t, 1.0) == pytest.approx(1.0 + 2.0 * t, rel=OUTWARD)
        assert bounds.hoelder_constant(t, INF) == pytest.approx(math.hypot(1.0, t), rel=OUTWARD)
        q = np.linspace(0.0, 1.0, 100_001)
        for p in (1.05, 1.5, 1.9):
            dual = p / (p - 1.0)
            grid = (q * (1 + 2 * t * (1 - q)) ** dual + (1 - q) * np.abs(1 - 2 * t * q) ** dual).max() ** (1 / dual)
            # cells of width 8e-6 around the maximum: first order in the width
            assert grid <= bounds.hoelder_constant(t, p) <= grid * (1 + 2e-3)
        # from p = 1 and p = 2 the constant is continuous
        assert bounds.hoelder_constant(t, 1.0 + 1e-7) == pytest.approx(1.0 + 2.0 * t, rel=1e-5)


def test_density_constant_closed_form():
    q = np.concatenate([np.linspace(0.0, 1.0, 100_001), 1.0 - np.geomspace(1e-300, 0.5, 2000)])
    for t in (0.0, 1e-8, 0.3, 0.51, 1.0, 10.0, 300.0, 1e5):
        r = math.exp(-2.0 * t)
        for n in (None, 1, 2, 3, 1000, 10**9):
            with np.errstate(divide="ignore"):
                first = 2.0 * t + np.log((1.0 - q) + r * q)
            if n is not None:
                first = np.minimum(first, math.log(n) - math.log1p((n - 1.0) * r))
            rounding = 1e-12 + 1e-15 * t  # the grid's own logarithms are of size 2 t
            for p in (2.0, 3.0, 10.0):
                grid = float((first + 0.5 * p * np.log1p(4.0 * t * t * q * (1.0 - q))).max() / p)
                assert grid <= density_constant_p(t, n, p)[1] + rounding
                if p == 2.0:
                    value, log_value = density_constant(t, n)
                    assert log_value == pytest.approx(grid, rel=1e-6, abs=1e-9 * max(1.0, t))
                    assert value == INF or value == pytest.approx(math.exp(log_value), rel=OUTWARD)


# certified maxima


def test_column_exponent_closed_forms():
    for R in (0.1, 1.0, 7.0):
        for d in (1, 2, 5):
            eye = np.eye(d)
            assert column_exponent(3.0 * eye, None, R) == pytest.approx(0.75 * R * R, rel=1e-7)  # a kink in nu
            assert column_exponent(-3.0 * eye, None, R) == pytest.approx(6.0 * R * R, rel=1e-10)
        skew = np.array([[0.0, 3.0], [-3.0, 0.0]])
        assert column_exponent(skew, None, R) == pytest.approx(3.0 * R * R, rel=1e-10)
    assert column_exponent(np.zeros((2, 2)), None, 1.0) == 0.0
    assert column_exponent(np.zeros((2, 2)), np.array([3.0, 4.0]), 2.0) == pytest.approx(20.0)


def _ascend(f, gradient, x, R, steps=150):
    size = 0.3 * R
    for _ in range(steps):
        g = gradient(x)
        y = x + size * g / (np.linalg.norm(g) + 1e-300)
        y *= min(1.0, R / np.linalg.norm(y))
        if f(y) > f(x):
            x = y
        else:
            size *= 0.8
    return f(x)


def test_certified_maxima_are_reached_and_not_exceeded():
    rng = np.random.default_rng(1)
    for k in range(12):
        d, R = int(rng.integers(1, 6)), 1.3
        A, V = rng.standard_normal((d, d)), rng.standard_normal((3, d))
        c = np.zeros(d) if k % 2 else rng.standard_normal(d) * (0.01, 1.0, 100.0)[k % 3]
        starts = [R * rng.random() * u / np.linalg.norm(u) for u in rng.standard_normal((8, d))]

        def kappa(x, A=A, c=c, R=R):
            g = A @ x + c
            return R * np.linalg.norm(g) - g @ x

        def kappa_gradient(x, A=A, c=c, R=R):
            g = A @ x + c
            return R * A.T @ g / (np.linalg.norm(g) + 1e-300) - g - A.T @ x

        found = max(_ascend(kappa, kappa_gradient, x, R) for x in starts)
        value = column_exponent(A, c if k % 2 == 0 else None, R)
        assert found <= value <= found * (1 + 1e-6)

        Q = A + A.T
        found = max(
            _ascend(lambda x, Q=Q, c=c: x @ Q @ x + c @ x, lambda x, Q=Q, c=c: 2 * Q @ x + c, x, R) for x in starts
        )
        value = max_quadratic(Q, c, R)
        assert found <= value <= found * (1 + 1e-6) + 1e-9

        product = max_norm_product(V, A)
        best = 0.0
        for u in rng.standard_normal((8, d)):
            for _ in range(150):
                u = u / np.linalg.norm(u)
                p, q = u @ V.T @ V @ u, u @ A @ A.T @ u
                g = V.T @ V @ u / p + A @ A.T @ u / q
                u = u + 0.5 * (g / np.linalg.norm(g) - u)
            best = max(best, math.sqrt(p * q))
        assert best <= product * (1 + 1e-12)
        assert product <= best * (1 + 1e-6)


def test_max_norm_product_needs_no_overlap_of_the_tops():
    # V sees e1, A^T sees e2: the best u is between them
    assert max_norm_product(np.diag([1.0, 0.0]), np.diag([0.0, 1.0])) == pytest.approx(0.5, rel=1e-9)
    assert max_norm_product(np.diag([1e8, 0.0]), np.diag([0.0, 1e-8])) == pytest.approx(0.5, rel=1e-9)
    # a nearly vanishing partner: the search for s runs far
    assert max_norm_product(np.eye(1), np.array([[1e-9]])) == pytest.approx(1e-9, rel=1e-9)


# sharp cases


def test_w_inf_bound_is_sharp_for_multiples_of_the_identity():
    b = bounds.column_bound(SoftmaxAttention(np.eye(2), np.eye(2)), radius=2.0, p=INF)
    assert b.value == pytest.approx(4.0 + math.sqrt(17.0), rel=OUTWARD)
    assert b.n is None
    # the token x = R e has a vanishing mass and sees R u and -R u, u orthogonal to e, with equal weights:
    # its image
    # moves by the mean of |u + R g| and |u - R g|, sqrt(1 + a^2), and by R^2 |A^T u| = a
    atoms = np.array([[0.0, 2.0], [0.0, -2.0], [2.0, 0.0]])
    w = np.array([0.5, 0.5, 1e-12])
    w[:2] -= 5e-13
    J = SoftmaxAttention(np.eye(2), np.eye(2)).jacobian(DiscreteMeasure(atoms, w)).to_dense().reshape(3, 2, 3, 2)
    u = np.array([0.0, 1.0])
    reached = float(np.linalg.norm(np.einsum("ejd,e->jd", J[2], u), axis=1).sum())
    # e^4 times the mass 1e-12 is what the token sees of itself
    assert reached == pytest.approx(b.value, rel=1e-8)


def test_column_sum_is_nearly_attained():
    # A = alpha I: a cluster at R/2 and one token at R: e^{a/4} from below as n grows
    a, n = 4.0, 100_000
    x, y = 0.5, 1.0
    P = 1.0 / (1.0 + (n - 1) * math.exp(a * x * (x - y)))
    own = 1.0 / (1.0 + (n - 1) * math.exp(a * y * (x - y)))
    value = (n - 1) * P + own
    T = bounds.column_sum(SoftmaxAttention([[a]], [[1.0]]), radius=1.0, n=n).value
    assert value <= T
    assert math.e * (1 + 1e-7) >= T  # kappa is found to 1e-8 at its kink
    assert value >= 2.718


def test_unnormalised_bounds_are_sharp():
    # one token at the end of the ball in d = 1: h + 2 x^2 h' A, the formula itself
    for variant in (SigmoidAttention, ReLUAttention, LinearAttention, ExponentialAttention):
        attention = variant([[1.0]], [[1.0]])
        b = bounds.pointwise_bound(attention, radius=0.6)
        reached = max(_norm(attention, np.array([[x]])) for x in np.linspace(-0.6, 0.6, 61))
        assert reached <= b.value
        # sigmoid: the suprema of its two terms sit at different logits
        assert reached >= b.value * ((1 - 1e-9) if variant is not SigmoidAttention else 0.97)


def test_one_token_gives_exactly_the_value_matrix():
    rng = np.random.default_rng(2)
    A, V = rng.standard_normal((3, 3)), rng.standard_normal((2, 3))
    v = np.linalg.norm(V, 2)
    softmax, l2 = SoftmaxAttention(A, V, bias=rng.standard_normal(3)), L2Attention(A, A.T, V)
    masked = MaskedAttention(softmax)
    values = [bounds.column_bound(softmax, radius=2.0, n=1, p=p).value for p in (1, 1.5, 2, 5, INF)]
    values += [bounds.row_bound(a, radius=2.0, n=1).value for a in (softmax, masked)]
    values += [bounds.density_bound(softmax, radius=2.0, n=1, p=p).value for p in (2, 5)]
    values += [bounds.masked_column_bound(masked, radius=2.0, n=1, p=p).value for p in (1, 2)]
    values += [bounds.masked_row_bound(masked, radius=2.0, n=1).value]
    values += [bounds.masked_average_bound(masked, radius=2.0, n=1).value]
    values += [
        bounds.l2_row_bound(l2, radius=2.0, n=1).value,
        bounds.l2_column_bound(l2, radius=2.0, n=1).value,
    ]
    np.testing.assert_allclose(values, v, rtol=OUTWARD)
    assert min(values) >= v


# formulas


def test_softmax_formulas_on_the_ball():
    A, V, R = np.diag([2.0, -1.0, 0.5]), np.eye(3), 1.5
    a = 2.0 * R * R
    softmax, masked = SoftmaxAttention(A, V), MaskedAttention(SoftmaxAttention(A, V))
    phi = bounds.row_norm(a)
    kappa = column_exponent(A, None, R)
    for n in (2, 3, 50):
        alpha = n * phi**2 + 2 * math.sqrt(2) * phi * a
        beta = 2 * phi * a * math.sqrt(n - 2)
        row = math.sqrt(a * a + (alpha + math.hypot(alpha, beta)) / 2)
        for attention in (softmax, masked):
            assert bounds.row_bound(attention, radius=R, n=n).value == pytest.approx(row, rel=1e-10)
        assert row <= (math.sqrt(n) * phi + a) * (1 + 1e-12)
        T = min(n, math.exp(kappa), 1 + 1 / (1 / (n - 1) + math.exp(-kappa)), n / (1 + (n - 1) * math.exp(-2 * a)))
        assert bounds.column_sum(softmax, radius=R, n=n).value == pytest.approx(T, rel=1e-10)
        column = a + math.sqrt(T * (1 + a * a))
        assert bounds.column_bound(softmax, radius=R, n=n).value == pytest.approx(column, rel=1e-10)
        S = sum(1.0 / (1.0 + i * math.exp(-2 * a)) for i in range(n))
        value = bounds.masked_column_bound(masked, radius=R, n=n).value
        assert value == pytest.approx(a + math.sqrt(S * (1 + a * a)), rel=1e-10)
        rows = sum(min(phi**2, density_constant(a, i)[0] ** 2 / i) for i in range(1, n + 1))
        value = bounds.masked_row_bound(masked, radius=R, n=n).value
        assert value == pytest.approx(a + math.sqrt(rows), rel=1e-10)
    for p, factor in ((1, (1 + 2 * a) * math.exp(kappa)), (3, math.exp(kappa / 3) * math.hypot(1, a))):
        assert bounds.column_bound(softmax, radius=R, p=p).value == pytest.approx(a + factor, rel=1e-10)
    psi = min(density_constant(a, None)[0], math.exp(fixed_query_constant(a)))
    assert bounds.density_bound(softmax, radius=R).value == pytest.approx(a + psi, rel=1e-10)


def test_ours_are_below_the_published_bounds():
    rng = np.random.default_rng(3)
    for _ in range(40):
        d = int(rng.integers(1, 5))
        attention = SoftmaxAttention(
            rng.standard_normal((d, d)) * np.exp(rng.uniform(-2, 2)), rng.standard_normal((d, d))
        )
        n = int(rng.integers(1, 300))
        assert (
            bounds.row_bound(attention, radius=1.3, n=n).value
            <= bounds.castin2024_discrete(attention, radius=1.3, n=n).value
        )
        ours = bounds.column_bound(attention, radius=1.3).log_value
        assert ours <= bounds.geshkovski2024_mean_field(attention, radius=1.3).log_value


def test_long_masked_sums_are_bounded_by_integrals():
    masked = MaskedAttention(SoftmaxAttention([[1.0]], [[1.0]]))
    a, n = 1.0, 200_000
    exact = float(np.sum(1.0 / (1.0 + np.arange(n) * math.exp(-2 * a))))
    value = bounds.masked_column_bound(masked, radius=1.0, n=n).details["column_sum"]
    assert exact <= value <= exact * (1 + 1e-5)
    rows = bounds.masked_row_bound(masked, radius=1.0, n=n).details["row_sum"]
    i = np.array([1.0 * k for k in range(1, 2001)])
    part = sum(min(bounds.row_norm(a) ** 2, density_constant(a, int(k))[0] ** 2 / k) for k in i)
    tail = density_constant(a, 2000)[0] ** 2 * float(np.sum(1.0 / np.arange(2001, n + 1)))
    # blocks of 1/64 of their length, and Psi_n against Psi_2000
    assert part + tail <= rows <= (part + tail) * 1.02
    assert bounds.masked_column_bound(masked, radius=1.0, n=10**12).value < 100.0


def test_masked_rows_of_huge_logits_are_bounded():
    for a, v, R, n in (
        (-222.88, 5229.9, 1.757, 6),
        (1e3, 1e4, 1.0, 40_000),
        (30.0, 1e25, 1e20, 10**6),
        (1e30, 1e30, 1e30, 3),
    ):
        b = bounds.masked_row_bound(MaskedAttention(SoftmaxAttention([[a]], [[v]])), radius=R, n=n)
        t = abs(a) * R * R
        # sigma, and a first row of norm v
        assert math.log(v) + math.log(t) <= b.log_value <= math.log(v) + math.log(t + math.sqrt(n) * (t + 1))
        assert b.value == pytest.approx(math.exp(b.log_value), rel=1e-9)


def test_column_sums_fail_under_a_mask():
    # A = 0, two tokens in sequence: the constant is above the 1 that kappa = 0 would give
    masked = MaskedAttention(SoftmaxAttention([[0.0]], [[1.0]]))
    assert _norm(masked, np.array([[0.3], [-0.2]])) == pytest.approx(1.144, abs=1e-3)
    assert bounds.row_bound(masked, radius=1.0, n=2).value >= 1.1441
    with pytest.raises(ValueError, match="without a mask"):
        bounds.column_bound(masked, radius=1.0, n=2)


def test_tied_l2_attention_has_a_small_mean_field_exponent():
    Q = np.array([[1.0, 0.5], [0.0, 1.0]])
    b = bounds.l2_column_bound(L2Attention(Q, Q, np.eye(2)), radius=1.5)
    assert b.details["kappa"] == pytest.approx(np.linalg.norm(Q, 2) ** 2 * 2.25, rel=1e-10)
    assert math.isfinite(b.value)
    # column sums themselves, on random measures
    rng = np.random.default_rng(4)
    for k in range(200):
        d = int(rng.integers(1, 4))
        Q = rng.standard_normal((d, d)) * np.exp(rng.uniform(-1, 1))
        K = Q if k % 2 else rng.standard_normal((d, d)) * np.exp(rng.uniform(-1, 1))
        X = rng.standard_normal((6, d))
        X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
        shift = (k % 3) * rng.standard_normal(d)
        w = rng.dirichlet(np.full(6, 0.3)) + 1e-9
        w /= w.sum()
        X = X + shift
        logits = -np.sum(((X @ Q.T)[:, None] - (X @ K.T)[None]) ** 2, axis=2)
        P = w * np.exp(logits - logits.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        domain = Ellipsoid(np.eye(d), shift)
        kappa = bounds.l2_column_bound(L2Attention(Q, K, np.eye(d)), domain=domain).details["kappa"]
        assert math.log(((w @ P) / w).max()) <= kappa * (1 + 1e-12) + 1e-12


# several heads


def test_heads_of_orthogonal_outputs_do_not_add_up():
    rng = np.random.default_rng(5)
    A = [rng.standard_normal((4, 4)) for _ in range(2)]
    V = rng.standard_normal((2, 4))
    heads = [SoftmaxAttention(M, V) for M in A]
    outputs = [np.eye(4)[:, :2], np.eye(4)[:, 2:]]
    joint = bounds.multi_head(MultiHeadAttention(heads, outputs), radius=1.0, n=5)
    singles = [
        min(b.value for b in bounds.table(head, radius=1.0, n=5) if b.kind == "upper" and b.reference == "otattn")
        for head in heads
    ]
    # the search for the shares is a smoothed one
    assert math.hypot(*singles) <= joint.value <= math.hypot(*singles) * (1 + 1e-4)
    assert sum(joint.details["shares"]) == pytest.approx(1.0)


def test_one_head_of_many_is_that_head():
    rng = np.random.default_rng(6)
    head = SoftmaxAttention(rng.standard_normal((3, 3)), rng.standard_normal((3, 3)))
    for p in (1, 2, INF):
        table = bounds.table(head, radius=1.0, n=4, p=p)
        single = min(b.value for b in table if b.kind == "upper")
        multi = bounds.multi_head(MultiHeadAttention([head]), radius=1.0, n=4, p=p).value
        assert multi == pytest.approx(single, rel=1e-10)
    nested = MultiHeadAttention([MultiHeadAttention([head], [2.0 * np.eye(3)])], [np.eye(3)[:2]])
    expected = min(
        b.value for b in bounds.table(SoftmaxAttention(head.A, 2.0 * head.V[:2]), radius=1.0, n=4) if b.kind == "upper"
    )
    assert bounds.multi_head(nested, radius=1.0, n=4).value == pytest.approx(expected, rel=1e-10)


# laws


def _all(attention, **keys):
    return [b for b in bounds.table(attention, **keys) if b.kind == "upper"]


def test_scaling_laws():
    """A times t with R / sqrt(t) changes nothing, V times t is t times (factors 1e6 and 1e-6)."""
    rng = np.random.default_rng(7)
    A, V, c = rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), rng.standard_normal(3)
    for t in (1e-6, 1e6):
        for p in (1, 1.5, 2, 4, INF):
            for wrap in (lambda x: x, MaskedAttention):
                base = _all(wrap(SoftmaxAttention(A, V, bias=c)), radius=1.2, n=9, p=p)
                same = _all(
                    wrap(SoftmaxAttention(A * t, V / t, bias=c * math.sqrt(t))),
                    radius=1.2 / math.sqrt(t),
                    n=9,
                    p=p,
                )
                assert len(base) == len(same) > 0
                for b, s in zip(base, same, strict=True):
                    # the searches stop at 1e-7 of their scalar: second order, except at kinks
                    assert s.value * t == pytest.approx(b.value, rel=1e-6)
        Q, K = rng.standard_normal((2, 3)), rng.standard_normal((2, 3))
        for b, s in zip(
            _all(L2Attention(Q, K, V), radius=1.0, n=9),
            _all(L2Attention(Q * t, K * t, V / t), radius=1 / t, n=9),
            strict=True,
        ):
            assert s.value * t == pytest.approx(b.value, rel=1e-9)


def test_extreme_sizes_stay_finite_or_say_so():
    for t in (1e-150, 1e30):
        b = bounds.column_bound(SoftmaxAttention([[t]], [[1.0]]), radius=1.0)
        assert not math.isnan(b.value)
        r = bounds.row_bound(SoftmaxAttention([[t]], [[1.0]]), radius=1.0, n=4)
        assert math.isfinite(r.value)
    with pytest.raises(ValueError, match="rescale the units"):
        bounds.column_bound(SoftmaxAttention([[1e150]], [[1.0]]), radius=1.0)
    # squares of the norms underflow, the bound must not
    tiny = SoftmaxAttention(1e-170 * np.eye(3), 1e-170 * np.eye(3))
    for bound in (bounds.column_bound, bounds.row_bound, bounds.density_bound):
        assert bound(tiny, radius=1e-3, n=4).value >= 1e-170
    huge = bounds.column_bound(SoftmaxAttention([[-2000.0]], [[1.0]]), radius=1.0)
    assert huge.value == INF
    assert huge.log_value == pytest.approx(2000.0 + math.log(2000.0), rel=1e-9)
    many = bounds.column_bound(SoftmaxAttention([[-2000.0]], [[1.0]]), radius=1.0, n=10)
    assert math.isfinite(many.value)
    psi = bounds.density_bound(SoftmaxAttention([[-2000.0]], [[1.0]]), radius=1.0)
    assert psi.value == INF
    assert math.isfinite(psi.log_value)
    assert bounds.pointwise_bound(ExponentialAttention([[900.0]], [[1.0]]), radius=1.0).value == INF


def test_zero_matrices():
    A, V, O = np.eye(2), np.eye(2), np.zeros((2, 2))
    for p in (1, 1.5, 2, 3, INF):
        for attention in (
            SoftmaxAttention(A, O),
            MaskedAttention(SoftmaxAttention(A, O)),
            L2Attention(A, A, O),
            SigmoidAttention(A, O),
            MultiHeadAttention([SoftmaxAttention(A, O), LinearAttention(A, O)]),
        ):
            assert [b.value for b in _all(attention, radius=1.0, n=3, p=p) if b.domain is not None] != []
            assert all(b.value == 0.0 for b in _all(attention, radius=1.0, n=3, p=p))
    # A = 0: averaging, of constant v for every measure
    mean = SoftmaxAttention(O, V)
    assert bounds.field_bound(mean, radius=1.0).value == 0.0
    for p in (1, 1.5, 2, 3, INF):
        assert bounds.column_bound(mean, radius=1.0, p=p).value == pytest.approx(1.0, rel=OUTWARD)
    assert bounds.pointwise_bound(LinearAttention(O, V), radius=1.0).value == 0.0
    assert bounds.at_measure_bound(SoftmaxAttention(A, O), np.eye(2)).value == 0.0


def test_bounds_grow_with_n_and_with_the_domain():
    rng = np.random.default_rng(8)
    A, V = rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
    for attention in (SoftmaxAttention(A, V), MaskedAttention(SoftmaxAttention(A, V)), L2Attention(A, A, V)):
        previous = 0.0
        for n in (1, 2, 3, 5, 30, 1000, 10**6):
            best = _all(attention, radius=1.0, n=n)[0].value
            assert best >= previous * (1 - 1e-12)
            previous = best
        previous = 0.0
        for R in (0.01, 0.1, 1.0, 3.0, 10.0):
            best = _all(attention, radius=R, n=7)[0].value
            assert best >= previous * (1 - 1e-9)
            previous = best


# domains


def test_a_ball_is_an_ellipsoid():
    rng = np.random.default_rng(9)
    attention = SoftmaxAttention(rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), bias=rng.standard_normal(3))
    for n in (4, None):
        ball = _all(attention, domain=Ball(1.3), n=n)
        round_ = _all(attention, domain=Ellipsoid(1.3 * np.eye(3)), n=n)
        for b, r in zip(ball, round_, strict=True):
            assert r.value == pytest.approx(b.value, rel=1e-8)


def test_domains_do_not_see_where_they_are_but_the_bias_does():
    rng = np.random.default_rng(10)
    A, V, s = rng.standard_normal((3, 3)), rng.standard_normal((3, 3)), 5.0 * rng.standard_normal(3)
    E = rng.standard_normal((3, 2))
    here = _all(SoftmaxAttention(A, V), domain=Ellipsoid(E, s), n=5)
    there = _all(SoftmaxAttention(A, V, bias=A @ s), domain=Ellipsoid(E), n=5)
    moved = {(b.theorem, b.n): b.value for b in there if b.reference == "otattn"}
    assert moved
    for b in here:
        if b.reference == "otattn":
            assert moved[b.theorem, b.n] == pytest.approx(b.value, rel=1e-8)


def test_smaller_domains_give_smaller_constants():
    rng = np.random.default_rng(11)
    A, V = rng.standard_normal((3, 3)), rng.standard_normal((2, 3))
    attention = SoftmaxAttention(A, V)
    X = rng.standard_normal((6, 3))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    flat = np.linalg.qr(rng.standard_normal((3, 2)))[0] @ np.diag([1.0, 0.3])
    half = np.array([0.6, 0.5, 0.4])
    for domain in (PointSet(X), Ellipsoid(flat), Box(-half, half)):
        assert np.linalg.norm(getattr(domain, "points", half[None]), axis=1).max() <= 1 + 1e-12
        for f in (bounds.field_bound, bounds.column_sum):
            # boxes and sets are also bounded by circumscribed figures, found to about 1e-7
            assert f(attention, domain=domain).value <= f(attention, domain=Ball(1.0)).value * (1 + 1e-6)
    one = PointSet([[1.0, 2.0, 3.0]])
    assert bounds.field_bound(attention, domain=one).value == 0.0
    assert bounds.row_bound(attention, domain=one, n=7).value == pytest.approx(
        np.linalg.norm(V, 2) * math.sqrt(7), rel=1e-9
    )


def test_field_bounds_of_boxes_and_sets_are_close_to_two_point_measures():
    rng = np.random.default_rng(12)
    for _ in range(20):
        A, V = rng.standard_normal((3, 3)), rng.standard_normal((3, 3))
        attention = SoftmaxAttention(A, V)
        points = rng.standard_normal((12, 3))
        delta = points[:, None] - points[None]
        pairs = (np.linalg.norm(delta @ V.T, axis=2) * np.linalg.norm(delta @ A, axis=2)).max() / 4.0
        value = bounds.field_bound(attention, domain=PointSet(points)).value
        assert pairs * (1 - 1e-12) <= value <= 1.1 * pairs
        half = np.array([1.0, 0.5, 2.0])
        corners = np.array(np.meshgrid(*[[-1.0, 1.0]] * 3)).reshape(3, -1).T * half
        pairs = (np.linalg.norm(corners @ V.T, axis=1) * np.linalg.norm(corners @ A, axis=1)).max()
        value = bounds.field_bound(attention, domain=Box(2 - half, 2 + half)).value
        assert pairs * (1 - 1e-12) <= value <= 1.1 * pairs


def test_layer_norm_tokens():
    rng = np.random.default_rng(13)
    domain = LayerNormDomain(np.exp(0.3 * rng.standard_normal(4)), 0.2 * rng.standard_normal(4))
    attention = SoftmaxAttention(0.3 * rng.standard_normal((4, 4)), rng.standard_normal((4, 4)))
    X = domain.sample(8, rng)
    uppers = [b.value for b in _all(attention, domain=domain, n=8)]
    assert _norm(attention, X) <= min(uppers)
    ball = [b.value for b in _all(attention, radius=domain.max_norm, n=8)]
    assert min(uppers) < min(ball)


def test_factored_heads_are_reduced_to_their_span():
    rng = np.random.default_rng(14)
    d, k = 40, 3
    Q, K, V = (rng.standard_normal((k, d)) for _ in range(3))
    b = rng.standard_normal(k)
    small = SoftmaxAttention.from_qkv(Q, K, V, query_bias=b)
    full = SoftmaxAttention(small.A, small.V, bias=small.bias)
    E = rng.standard_normal((d, 5))
    for domain in (
        Ball(0.3),
        Ellipsoid(0.1 * E, 0.01 * E[:, 0]),
        PointSet(0.1 * E.T),
        Box(-0.1 * np.ones(d), 0.2 * np.ones(d)),
    ):
        for p in (1, 2, INF):
            for x, y in zip(_all(small, domain=domain, n=6, p=p), _all(full, domain=domain, n=6, p=p), strict=True):
                assert x.value == pytest.approx(y.value, rel=1e-6)


# the local bound


def test_local_bound_is_attained_and_scales():
    # all tokens equal: the Jacobian of n equal tokens has norm v (they move together)
    V = np.diag([2.0, 1.0])
    X = np.repeat([[0.3, -0.4]], 5, axis=0)
    b = bounds.at_measure_bound(SoftmaxAttention(np.diag([3.0, -1.0]), V), X)
    assert b.value == pytest.approx(2.0, rel=1e-9)
    assert b.kind == "upper"
    rng = np.random.default_rng(15)
    A, V, X = rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), rng.standard_normal((7, 3))
    base = bounds.at_measure_bound(SoftmaxAttention(A, V), X).value
    for t in (1e-6, 1e6):
        same = bounds.at_measure_bound(SoftmaxAttention(A * t, V / t), X / math.sqrt(t)).value
        assert same * t == pytest.approx(base, rel=1e-9)
    # a far cloud is the same cloud with a bias
    far = bounds.at_measure_bound(SoftmaxAttention(A, V), X + 100.0).value
    near = bounds.at_measure_bound(SoftmaxAttention(A, V, bias=A @ np.full(3, 100.0)), X).value
    assert far == pytest.approx(near, rel=1e-7)  # the rounding of a cloud far from the origin is counted


def test_local_bound_sees_the_measure_and_not_its_list_of_atoms():
    rng = np.random.default_rng(16)
    attention = SoftmaxAttention(rng.standard_normal((3, 3)), rng.standard_normal((2, 3)))
    X = rng.standard_normal((3, 3))
    doubled = bounds.at_measure_bound(attention, np.repeat(X, [2, 1, 3], axis=0)).value
    merged = bounds.at_measure_bound(attention, DiscreteMeasure(X, [2 / 6, 1 / 6, 3 / 6])).value
    assert doubled == pytest.approx(merged, rel=1e-12)
    ghost = DiscreteMeasure(np.vstack([X, [[1e3, 0, 0]]]), [2 / 6, 1 / 6, 3 / 6, 0.0])
    assert bounds.at_measure_bound(attention, ghost).value == pytest.approx(merged, rel=1e-12)


def test_local_bound_of_l2_attention_keeps_the_cross_term():
    rng = np.random.default_rng(17)
    for _ in range(60):
        d = int(rng.integers(1, 4))
        attention = L2Attention(2 * rng.standard_normal((d, d)), 2 * rng.standard_normal((d, d)), np.eye(d))
        X = rng.standard_normal((5, d))
        w = rng.dirichlet(np.ones(5))
        assert _norm(attention, X, w) <= bounds.at_measure_bound(attention, DiscreteMeasure(X, w)).value


def test_local_bound_at_the_kink_of_relu():
    # skew A: the logit of a token with itself is 0 up to rounding, and either slope occurs nearby
    rng = np.random.default_rng(19)
    for _ in range(40):
        B = rng.standard_normal((3, 3))
        attention = ReLUAttention(B - B.T, rng.standard_normal((2, 3)))
        X = np.repeat(rng.standard_normal((1, 3)), 3, axis=0)
        upper = bounds.at_measure_bound(attention, X).value
        for Y in (X, X + 1e-9 * rng.standard_normal(X.shape), X * (1 + 1e-9)):
            fields = np.linalg.norm(attention.field_jacobian(Y, Y), ord=2, axis=(1, 2)).max()
            assert max(_norm(attention, Y), float(fields)) <= upper * (1 + 1e-7)  # Y differs from X by 1e-9


# the table, the crossover, the hypotheses


def test_table_is_sorted_and_consistent():
    rng = np.random.default_rng(18)
    attention = SoftmaxAttention(np.diag([1.0, -2.0]), np.eye(2))
    table = bounds.table(attention, radius=1.0, n=8)
    uppers = [b.value for b in table if b.kind == "upper"]
    lowers = [b.value for b in table if b.kind == "lower"]
    assert list(table[: len(uppers)]) == [b for b in table if b.kind == "upper"]
    assert uppers == sorted(uppers)
    assert lowers == sorted(lowers, reverse=True)
    assert lowers[0] <= uppers[0]
    assert {b.theorem for b in table} >= {"castin2024_discrete", "row_bound"}
    assert [b.theorem for b in bounds.table(SinkhornAttention(np.eye(2), np.eye(2)), radius=1.0)] == ["sinkhorn_bound"]
    mean_field = bounds.table(attention, radius=1.0)
    assert all(b.n is None for b in mean_field)
    assert any(b.kind == "lower" for b in mean_field)
    biased = SoftmaxAttention(np.eye(2), np.eye(2), bias=rng.standard_normal(2))
    assert all(b.kind == "upper" for b in bounds.table(biased, radius=1.0, n=8))
    masked_mean = bounds.table(MaskedAttention(attention), radius=1.0, p=1)
    assert masked_mean.bounds == ()


def test_crossover():
    attention = SoftmaxAttention(np.diag([1.0, -0.5]), np.diag([1.0, 2.0]))
    c = bounds.crossover(attention, 1.0)
    for number, discrete, mean in (
        (
            c.published,
            lambda n: bounds.castin2024_discrete(attention, radius=1.0, n=n).value,
            bounds.geshkovski2024_mean_field(attention, radius=1.0).value,
        ),
        (
            c.ours,
            lambda n: bounds.row_bound(attention, radius=1.0, n=n).value,
            min(
                bounds.column_bound(attention, radius=1.0).value,
                bounds.density_bound(attention, radius=1.0).value,
            ),
        ),
    ):
        n = int(number)
        assert n == number
        assert math.log(n) == pytest.approx(c.log_published if number is c.published else c.log_ours, rel=1e-15)
        assert discrete(n) >= mean
        assert n == 1 or discrete(n - 1) < mean
    assert c.ours < c.published
    steep = bounds.crossover(SoftmaxAttention([[-1000.0]], [[1.0]]), 1.0)
    assert steep.published == INF
    # sqrt(n) v ||A|| R^2 2 sqrt3 = 3 a e^{2a}
    assert steep.log_published == pytest.approx(2 * (2000 + math.log(3 / (2 * math.sqrt(3)))), rel=1e-6)
    assert bounds.crossover(SoftmaxAttention(np.zeros((2, 2)), np.zeros((2, 2))), 1.0).ours == 1.0


def test_hypotheses_are_checked():
    softmax = SoftmaxAttention(np.eye(2), np.eye(2))
    masked = MaskedAttention(softmax)
    l2 = L2Attention(np.eye(2), np.eye(2), np.eye(2))
    cases = [
        (lambda: bounds.row_bound(softmax, n=2), "exactly one of radius and domain"),
        (lambda: bounds.row_bound(softmax, radius=1.0, domain=Ball(1.0), n=2), "received both"),
        (lambda: bounds.row_bound(softmax, domain=Ball(1.0, 3), n=2), "dimension 2"),
        (lambda: bounds.row_bound(softmax, domain=[1.0], n=2), "domain must be"),
        (lambda: bounds.row_bound(softmax, radius=-1.0, n=2), "radius"),
        (lambda: bounds.row_bound(softmax, radius=1.0, n=0), "n must be at least 1"),
        (lambda: bounds.row_bound(softmax, radius=1.0, n=2, p=3), "p must be 2"),
        (lambda: bounds.row_bound(l2, radius=1.0, n=2), "L2Attention"),
        (lambda: bounds.column_bound(masked, radius=1.0), "without a mask"),
        (lambda: bounds.column_bound(softmax, radius=1.0, p=0.5), r"\[1, inf\]"),
        (lambda: bounds.density_bound(softmax, radius=1.0, p=1.5), r"p must lie in \[2, inf\]"),
        (lambda: bounds.masked_column_bound(softmax, radius=1.0, n=2), "MaskedAttention"),
        (lambda: bounds.masked_row_bound(masked, radius=1.0, n=2, p=1), "p must be 2"),
        (lambda: bounds.masked_average_bound(masked, radius=1.0, p=1), "p must lie in"),
        (lambda: bounds.l2_row_bound(softmax, radius=1.0, n=2), "SoftmaxAttention"),
        (lambda: bounds.l2_column_bound(MaskedAttention(l2), radius=1.0), "without a mask"),
        (lambda: bounds.pointwise_bound(softmax, radius=1.0), "sigmoid, ReLU, linear or exponential"),
        (lambda: bounds.multi_head(SinkhornAttention(np.eye(2), np.eye(2)), radius=1.0), "Sinkhorn"),
        (lambda: bounds.multi_head(MaskedAttention(MultiHeadAttention([softmax])), radius=1.0, p=1), "give n"),
        (lambda: bounds.at_measure_bound(SinkhornAttention(np.eye(2), np.eye(2)), np.eye(2)), "Sinkhorn"),
        (lambda: bounds.field_bound(l2, radius=1.0), "SoftmaxAttention"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert bounds.column_bound(masked, radius=1.0, p=INF).value == bounds.column_bound(softmax, radius=1.0, p=INF).value
