"""The mean-field bound: its lemmas by brute force, its cells, its targets, adversaries on measures, tampering."""

import math
from dataclasses import replace

import numpy as np
import pytest
from relaxation_attacks import FORMS, climb
from scipy.special import xlogy

from otattn.attention import SoftmaxAttention
from otattn.lipschitz import Bound
from otattn.lipschitz.constants.heads import unit_numbers
from otattn.lipschitz.constants.rows import VALUES, JointRows
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit, least_stretch
from otattn.lipschitz.lower.best import lipschitz_lower_bound
from otattn.lipschitz.relaxations import mean_field as mean_field_of_the_package
from otattn.lipschitz.upper.mean_field import entropy_bound, heavy_share, joint_bound, joint_rows, mean_field
from otattn.measures import Ball, Ellipsoid

GRID = np.linspace(0.0, 1.0, 20_001)[1:-1]


def kl(p, q):
    return xlogy(p, p / q) + xlogy(1 - p, (1 - p) / (1 - q))


def test_weight_is_the_maximum_over_the_share():
    for rho in (0.0, 0.2, 0.7, 0.99):
        for s in (0.3, 0.5, 1.0, 2.0, 8.0):
            brute = (4 * GRID * (1 - GRID) * np.exp(-kl((1 + rho) / 2, GRID) / s)).max()
            # a grid of 5e-5 misses a smooth maximum by 1e-8
            assert heavy_share(np.array(rho), s) == pytest.approx(brute, rel=1e-6)
    rho = np.linspace(0, 1, 50)
    assert (np.diff(heavy_share(rho, 1.0)) <= 0).all()
    assert heavy_share(np.array(0.0), 1.0) == pytest.approx(1.0)
    assert heavy_share(np.array(1.0), 1.0) == pytest.approx(16 / 27)


def test_the_column_identity_on_random_measures():
    """``log T = <g(xbar), y - xbar> + E_alpha[log w - KL(alpha | P_x)]``, and the bounds of its pieces."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        d, n = int(rng.integers(1, 4)), int(rng.integers(2, 7))
        A = rng.normal(size=(d, d)) * np.exp(rng.uniform(-1, 1.5))
        X = rng.normal(size=(n, d))
        X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
        mu, w = rng.dirichlet(np.ones(n)), np.exp(rng.normal(size=n))
        logits = X @ A.T @ X.T  # [x, y]
        Z = np.log(np.exp(logits) @ mu)
        k = np.exp(logits - Z[:, None])
        P = k * mu
        for y in range(n):
            T = float((mu * k[:, y] * w).sum())
            alpha = mu * k[:, y] * w / T
            xbar = alpha @ X
            divergence = (xlogy(alpha, alpha)[None] - alpha * np.log(P)).sum(axis=1)
            right = A @ xbar @ (X[y] - xbar) + alpha @ (np.log(w) - divergence)
            assert math.log(T) == pytest.approx(right, abs=1e-12)
            # the binary divergence of the data processing step is a lower bound, the variance is 4 q (1 - q) at most
            rho = float(np.linalg.norm(xbar))
            sign = X @ xbar / max(rho, 1e-300)
            p, q = (1 + rho) / 2, P @ (1 + sign) / 2
            assert (divergence >= kl(p, np.clip(q, 1e-300, 1 - 1e-16)) - 1e-9).all()
            centred = X[None] - (P @ X)[:, None]
            lam = np.linalg.eigvalsh(np.einsum("xk,xki,xkj->xij", P, centred, centred))[:, -1]
            assert (lam <= 4 * q * (1 - q) + 1e-12).all()


@pytest.mark.parametrize(("largest", "share", "excess"), [(1.0, 1.0, 0.4), (4.0, 0.8, 2.0), (30.0, 0.1, 1e-3)])
def test_joint_weights_are_maxima_over_the_share(largest, share, excess):
    rows = JointRows(largest, largest, share, excess)
    U = 4 * GRID * (1 - GRID)
    split = np.log(share**2 + excess) - np.log(share**2 + excess - np.minimum(U, share) ** 2)
    for place in (0, 20, 128, 255, 256):
        p = rows.heavier[place]
        base = split - kl(p, GRID)
        for found, G in zip(rows.table, (0.0, largest**2), strict=True):
            brute = (base + np.log1p(G * U)).max()
            # a cell of q of width 1/2048 loses a slope times that; the grid nothing that counts
            assert brute - 1e-12 <= found[place] <= brute + 5e-3 / excess**0.5
    assert all((np.diff(x) <= 1e-12).all() for x in rows.table)
    with pytest.raises(ValueError, match="excess"):
        JointRows(largest, largest, share, 1e-9)


def test_joint_rows_on_random_measures():
    """The row inequality of both parts together, and the columns at the barycentre that they have."""
    rng = np.random.default_rng(8)
    tight = -math.inf
    for trial in range(7):
        d = int(rng.integers(1, 4))
        A = rng.normal(size=(d, d)) if trial % 3 else -np.eye(d)
        A *= np.exp(rng.uniform(-0.7, 1.5)) / np.linalg.norm(A, 2)
        V = rng.normal(size=(2, d))
        head = unit_numbers(SoftmaxAttention(A, V), 1.0)
        v = np.linalg.norm(V, 2)
        rows = JointRows(
            head.a, head.top, min(1.0, head.sigma / (v * head.a) * (1 + 1e-12)), rng.choice([0.05, 0.5, 3.0])
        )
        Delta = head.a**2 * (rows.share**2 + rows.excess)
        field = Barycentre(head, SelfLogit.default(head), least_stretch(head))
        for _ in range(40):
            n = int(rng.integers(2, 6))
            X = rng.normal(size=(n, d))
            X /= np.maximum(rng.choice([0.3, 1.0]), np.linalg.norm(X, axis=1, keepdims=True))
            X /= max(1.0, np.linalg.norm(X, axis=1).max())
            mu = rng.dirichlet(np.full(n, 0.3)) + 1e-9
            mu /= mu.sum()
            G = X @ A.T
            k = np.exp(G @ X.T)
            k /= (k @ mu)[:, None]
            P = k * mu
            centred = X[None] - (P @ X)[:, None]
            C = np.einsum("xk,xki,xkj->xij", P, centred, centred)
            lam = np.linalg.eigvalsh(C)[:, -1]
            size = (G**2).sum(axis=1)
            w = (1 + size * lam) / (1 - (head.a * np.minimum(lam, rows.share)) ** 2 / Delta)
            eps = rng.normal(size=(n, d)) * rng.choice([0.1, 1.0], (n, 1))
            # rows: V (K eps + D eps)
            moved = P @ eps + np.einsum("xk,xki,xk->xi", P, centred, G @ eps.T) + np.einsum("xij,jk,xk->xi", C, A, eps)
            left = ((moved @ V.T) ** 2).sum(axis=1)
            norms = (eps**2).sum(axis=1)
            assert (left <= v**2 * (w * (P @ norms) + Delta * norms) * (1 + 1e-12)).all()
            log_T = np.log((mu * w) @ k)
            xbar = ((mu * w)[:, None] * k / np.exp(log_T)).T @ X
            r, gamma = np.linalg.norm(xbar, axis=1), np.linalg.norm(xbar @ A.T, axis=1)
            low, high = (field.gamma(r, np.full(n, q)) for q in (0.0, 1.0))
            at = np.array([r, np.clip((gamma - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)])
            bound = joint_bound(field, rows)(np.maximum(at - 1e-9, 0.0), np.minimum(at + 1e-9, 1.0))
            assert (log_T <= bound + 1e-9).all()
            tight = max(tight, float((log_T - bound).max()))
    assert tight > -0.5


def test_rows_see_values_and_gradients_in_one_direction():
    """Quotients of covariances of every rank, those of rank one climbed, against the largest weight of a row."""
    rng = np.random.default_rng(3)
    tight = 0.0
    for trial in range(24):
        d, k = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        A, V = rng.normal(size=(d, d)), rng.normal(size=(k, d))
        if trial % 4 == 0:
            V = V[:1]
        if trial % 5 == 0:
            A = np.outer(A[0], A[-1])
        A *= np.exp(rng.uniform(-1.0, 2.5)) / np.linalg.norm(A, 2)
        head = unit_numbers(SoftmaxAttention(A, V), 1.0)
        rows = joint_rows(head, rng.choice([0.05, 0.5, 3.0]))
        v, a, W = float(head.v), float(head.a), V / float(head.v)
        Delta = a**2 * (rows.share**2 + rows.excess)

        def quotient(C, directions, W=W, A=A, a=a, Delta=Delta):
            w = directions @ W
            moved = w @ C
            size = ((w**2).sum(axis=-1) + a**2 * (moved * w).sum(axis=-1)) / (
                1 - ((moved @ A) ** 2).sum(axis=-1) / Delta
            )
            return float(size.max())

        u = rng.normal(size=(64, k if trial % 4 else 1))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        u = np.concatenate([u, np.linalg.svd(V)[0].T])
        for U in (0.1, 0.6, 1.0):
            most = float(np.exp(rows.row(np.array([U]))[1][0]))
            worst = 0.0
            e = np.concatenate([rng.normal(size=(40, d)), np.linalg.svd(V)[2], np.linalg.svd(A)[0].T])
            for step in range(6):
                e /= np.linalg.norm(e, axis=1, keepdims=True)
                # for C = U e e^T the best u is V e
                found = [
                    quotient(U * np.outer(x, x), np.concatenate([u, [W @ x / max(np.linalg.norm(W @ x), 1e-12)]]))
                    for x in e
                ]
                worst = max(worst, *found)
                e = np.concatenate(
                    [e[[np.argmax(found)]], e[np.argmax(found)] + 0.3 / 2**step * rng.normal(size=(40, d))]
                )
            for _ in range(20):
                B = rng.normal(size=(d, int(rng.integers(1, d + 1)))) * rng.choice([0.1, 1.0], (d, 1))
                worst = max(worst, quotient(U * (B @ B.T) / (B**2).sum(), u))
            assert worst <= most * (1 + 1e-12)
            tight = max(tight, worst / most)
            # never above what the norm of V and sigma alone say
            alone = (1 + a**2 * U) / (1 - min(1.0, U) ** 2 * rows.share**2 / (rows.share**2 + rows.excess))
            assert most <= alone * (1 + 1e-9)
        reached = ((e @ W.T) ** 2).sum(axis=1), ((e @ A) ** 2).sum(axis=1) / a**2
        norms = (e**2).sum(axis=1)
        X, Y = (x / norms for x in reached)
        cell = np.clip(np.searchsorted(VALUES, X, side="right") - 1, 0, VALUES.size - 2)
        assert (head.reach[cell] + 1e-12 >= X * Y).all()
        assert v > 0
    assert tight > 0.98


def test_values_that_look_elsewhere_help():
    """V that sees well what A^T does not: a smaller weight than by the norm of V and sigma alone; the exact recheck agrees."""
    A, V = np.diag([1.0, 0.2, 0.1]), np.diag([0.3, 1.0, 0.2])
    attention = SoftmaxAttention(A @ np.roll(np.eye(3), 1, axis=0), V)
    bound = mean_field(attention, radius=1.0)
    head = unit_numbers(attention, 1.0)
    assert bound.options["branch"] == "joint"
    assert bound.verify(rigorous=True)
    alone = replace(joint_rows(head, float(bound.multipliers["excess"][0])), reach=np.full(VALUES.size - 1, 1.0))
    field = Barycentre.of(head, SelfLogit.of(head, bound.multipliers))
    at = np.array([[0.5], [0.7]])
    assert joint_bound(field, alone)(at, at) > joint_bound(field, joint_rows(head, alone.excess))(at, at) + 0.02
    assert climb(attention, None, 1.0, np.random.default_rng(4), batch=12, steps=25) <= bound.value


def near_ball(s):
    """An ellipsoid whose half axes are 1, s and ``s^2`` times 2; a head whose V and A^T look in different directions."""
    A, V = np.diag([1.0, 0.2, 0.1]), np.diag([0.3, 1.0, 0.2])
    return SoftmaxAttention(A @ np.roll(np.eye(3), 1, axis=0), V), Ellipsoid(
        2.0 * np.diag([1.0, s, s * s]), np.zeros(3)
    )


@pytest.mark.parametrize("less", [0.0, 1e-13, 1e-12, 3e-10, 1e-9, 1e-7, 1e-3])
def test_ellipsoids_near_the_ball_keep_its_rows(less):
    """The value does not jump where a domain begins to have less than the covariances of rank one; the kind is stored."""
    attention, domain = near_ball(1.0 - less)
    ball = mean_field(attention, radius=2.0)
    bound = mean_field(attention, domain=domain)
    assert ball.value * (1 - 2 * less - 1e-6) <= bound.value <= ball.value * (1 + 1e-5)
    assert bound.options["branch"] == "joint"
    assert bound.verify()
    assert bound.verify(rigorous=True)


def test_both_kinds_of_joint_rows_win_somewhere():
    """Kinds of rows, each proved on the domain of the other, the better one kept; one that is not known is refused."""
    generic = SoftmaxAttention(*FORMS["generic"]), Ellipsoid(np.diag([1.0, 0.85, 0.85**2]), np.zeros(3))
    for (attention, domain), name in ((near_ball(0.99), "joint"), (generic, "joint_domain")):
        head = unit_numbers(attention, domain)
        assert head.sigma < head.trace_sigma
        bound = mean_field(attention, domain=domain)
        assert bound.options["branch"] == name
        assert bound.verify(rigorous=True)
        assert lipschitz_lower_bound(attention, domain=domain, rng=0).value <= bound.value
        # the other kind of rows proves more than the value, but is a proof
        for other in {"joint", "joint_domain"} - {name}:
            options = {**bound.options, "branch": other}
            assert not replace(bound, options=options).verify()
            assert replace(bound, options={**options, "target": 9.0}, value=1e3).verify()
        for unknown in ("Joint", "joint ", "", "rank one"):
            assert not replace(bound, options={**bound.options, "branch": unknown}, value=1e9).verify()


def test_rows_on_domains_inside_the_ball():
    """Quotients of covariances of measures on an ellipsoid, in full, against the largest weight of both kinds of rows."""
    rng = np.random.default_rng(11)
    tight = dict.fromkeys(("joint", "joint_domain"), 0.0)
    for s in (1.0 - 1e-10, 0.999, 0.97, 0.8):
        for A, V in (FORMS["generic"], (rng.normal(size=(3, 3)), rng.normal(size=(2, 3)))):
            attention = SoftmaxAttention(4.0 * A, V)
            E = np.linalg.qr(rng.normal(size=(3, 3)))[0] @ np.diag([1.0, s, s])
            head = unit_numbers(attention, Ellipsoid(E, np.zeros(3)))
            a, W = float(head.a), V / float(head.v)
            form = np.asarray(head.A)
            excess = rng.choice([0.05, 0.5, 3.0])
            for kind in tight:
                rows = joint_rows(head, excess, kind)
                Delta = a**2 * (rows.share**2 + rows.excess)
                most = float(np.exp(rows.row(np.array([1.0]))[1][0]))
                B = rng.normal(size=(3000, 3, 3)) * rng.choice([0.01, 1.0], (3000, 1, 3))
                C = B @ B.transpose(0, 2, 1)
                C = E @ (C / np.trace(C, axis1=1, axis2=2)[:, None, None]) @ E.T
                u = rng.normal(size=(3000, len(V)))
                w = (u / np.linalg.norm(u, axis=1, keepdims=True)) @ W
                for _ in range(3):
                    moved = np.einsum("ki,kij->kj", w, C)
                    # the direction that is read best is a good one for the next round
                    best = moved @ W.T
                    w = best / np.maximum(np.linalg.norm(best, axis=1, keepdims=True), 1e-12) @ W
                moved = np.einsum("ki,kij->kj", w, C)
                part = ((moved @ form) ** 2).sum(axis=1) / Delta
                assert (part < 1.0).all()
                found = ((w**2).sum(axis=1) + head.top**2 * (moved * w).sum(axis=1)) / (1.0 - part)
                assert found.max() <= most * (1 + 1e-12)
                tight[kind] = max(tight[kind], found.max() / most)
    assert min(tight.values()) > 0.8


def test_joint_rows_win_on_small_forms():
    """At ``||A|| R^2 = 1``: 4.430, 3.081 where the parts are added."""
    for A, value in ((-np.eye(3), 3.95), (np.array([[0.0, 1.0], [-1.0, 0.0]]), 2.84)):
        attention = SoftmaxAttention(A, np.eye(len(A)))
        bound = mean_field(attention, radius=1.0)
        assert bound.options["branch"] == "joint"
        assert bound.value < value
        assert climb(attention, None, 1.0, np.random.default_rng(4), batch=12, steps=25) <= bound.value
        assert bound.verify(rigorous=len(A) == 2)


@pytest.mark.parametrize("name", ["identity", "skew", "generic"])
def test_cells_dominate_their_points(name):
    rng = np.random.default_rng(1)
    A, V = FORMS[name]
    head = unit_numbers(SoftmaxAttention(6.0 * A, V), 1.0)
    field = Barycentre(head, SelfLogit.default(head), least_stretch(head))
    joint = joint_bound(field, JointRows(head.a, head.top, 1.0, 0.7))
    for bound in (entropy_bound(field, 0.0, 1.0), entropy_bound(field, 0.6, 0.4), joint):
        lo = 0.9 * rng.random((2, 200))
        hi = np.minimum(1.0, lo + 0.2 * rng.random((2, 200)))
        whole = bound(lo, hi)
        for _ in range(20):
            inside = lo + rng.random(lo.shape) * (hi - lo)
            assert (bound(inside, inside) <= whole + 1e-9).all()


@pytest.mark.parametrize("name", ["generic", "skew", "negative"])
def test_the_exponent_bounds_every_barycentre(name):
    """No point of the ball has more than what the cells of ``(|x|, |g|)`` allow."""
    rng = np.random.default_rng(2)
    A, V = FORMS[name]
    head = unit_numbers(SoftmaxAttention(5.0 * A, V), 1.0)
    field = Barycentre(head, SelfLogit.default(head), least_stretch(head))
    x = rng.normal(size=(4000, len(A)))
    x *= rng.random((4000, 1)) ** (1 / len(A)) / np.linalg.norm(x, axis=1, keepdims=True)
    g = x @ head.A.T
    r, gamma = np.linalg.norm(x, axis=1), np.linalg.norm(g, axis=1)
    true = gamma - np.sum(g * x, axis=1)
    assert (true <= field.excess(r, r, gamma, gamma) + 1e-9).all()


def test_minus_the_identity():
    bound = mean_field(SoftmaxAttention(-4.0 * np.eye(3), np.eye(3)), radius=1.0)
    assert bound.value <= 185.0
    assert bound.verify()


QUICK = [("generic", 6.0), ("line", 6.0), ("identity", 6.0)]


@pytest.mark.parametrize(
    ("name", "a"),
    [
        *(
            pytest.param(name, a, marks=pytest.mark.slow)
            for name in FORMS
            for a in (1.0, 6.0)
            if (name, a) not in QUICK
        ),
        *QUICK,
    ],
)
def test_never_violated_by_measures(name, a):
    A, V = FORMS[name]
    attention = SoftmaxAttention(a * A, V)
    bound = mean_field(attention, radius=1.0)
    assert climb(attention, None, 1.0, np.random.default_rng(3)) <= bound.value
    assert lipschitz_lower_bound(attention, radius=1.0, rng=0).value <= bound.value * (1 + 1e-9)
    assert bound.verify()


@pytest.mark.slow
def test_every_order_is_above_its_witness():
    A, V = FORMS["generic"]
    attention = SoftmaxAttention(3.0 * A, V, bias=[0.4, -0.2, 0.1])
    values = {p: mean_field(attention, domain=Ball(1.2), p=p).value for p in (1, 1.5, 2, 4, np.inf)}
    for p in (1, 2, np.inf):
        assert lipschitz_lower_bound(attention, radius=1.2, p=p, rng=0).value <= values[p] * (1 + 1e-9)
    # W_inf knows no exponential
    assert values[np.inf] < min(values[p] for p in (1, 1.5, 2))
    sharp = mean_field(SoftmaxAttention(np.eye(2), np.eye(2)), radius=2.0, p=np.inf)
    assert sharp.value == pytest.approx(4 + math.sqrt(17), rel=1e-9)


def test_scaling_zero_maps_and_other_domains():
    A, V = FORMS["generic"]
    one = mean_field(SoftmaxAttention(5 * A, V), radius=1.0).value
    assert mean_field(SoftmaxAttention(5e6 * A, 1e-6 * V), radius=1e-3).value == pytest.approx(1e-6 * one, rel=1e-6)
    assert mean_field(SoftmaxAttention(A, 0 * V), radius=1.0).value == 0.0
    assert mean_field(SoftmaxAttention(0 * A, V), radius=1.0).value == pytest.approx(np.linalg.norm(V, 2), rel=1e-9)
    flat = Ellipsoid(np.diag([1.0, 0.5, 0.2]), [0.3, 0.0, 1.0])
    bound = mean_field(SoftmaxAttention(4 * A, V), domain=flat)
    assert lipschitz_lower_bound(SoftmaxAttention(4 * A, V), domain=flat, rng=0).value <= bound.value


def test_a_bound_beyond_the_floats_keeps_its_logarithm():
    bound = mean_field(SoftmaxAttention(-2000.0 * np.eye(2), np.eye(2)), radius=1.0)
    assert type(bound) is Bound
    assert bound.value == math.inf
    # the rate e^{kappa / 2} = e^{a} is exact for A = -a I
    assert bound.log_value == pytest.approx(2000.0, abs=10.0)


@pytest.mark.parametrize("name", ["identity", "generic"])
def test_the_recheck_rejects_tampering(name):
    A, V = FORMS[name]
    bound = mean_field(SoftmaxAttention(9.0 * A, V), radius=1.0)
    assert bound.verify()
    assert not replace(bound, value=0.99 * bound.value).verify()
    # what is stored is used
    assert set(bound.multipliers) == {"nu", "gap", "excess"}
    for key in bound.multipliers:
        assert not replace(bound, multipliers={k: v for k, v in bound.multipliers.items() if k != key}).verify()
        broken = {**bound.multipliers, key: np.full_like(bound.multipliers[key], np.nan)}
        assert not replace(bound, multipliers=broken).verify()
    # the column bound proves more
    assert not replace(bound, options={**bound.options, "branch": "plain"}).verify()


def test_bad_input():
    with pytest.raises(ValueError, match="effort"):
        mean_field(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0, effort="slow")
    with pytest.raises(ValueError, match="p"):
        mean_field(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0, p=0.5)
    assert mean_field_of_the_package is mean_field
