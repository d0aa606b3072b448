"""Forms ``A = -alpha I``: the bound of one row against real attention, cells against points, the bound against adversaries."""

import math
from dataclasses import replace

import numpy as np
import pytest
from relaxation_attacks import climb

import otattn as oa
from otattn.lipschitz.constants.rows import row_norm
from otattn.lipschitz.constants.self_logit import entropy_gap
from otattn.lipschitz.forms.anchor_rows import AnchorRows
from otattn.lipschitz.forms.negative_identity import Total
from otattn.lipschitz.relaxations import negative_identity
from otattn.lipschitz.upper_bound import upper_bounds
from otattn.measures import Ellipsoid

TILTED = np.array([[1.0, 0.3], [0.0, -0.7]])


def head(a, d=2, V=None):
    return oa.SoftmaxAttention(-a * np.eye(d), np.eye(d) if V is None else V)


def some_tokens(rng, n, d):
    """On the sphere, inside, two opposite anchors and a crowd, or a few clusters."""
    X = rng.standard_normal((n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    kind = rng.integers(4)
    if kind == 1:
        X *= rng.random((n, 1))
    if kind == 2:
        X[2:], X[1] = X[2], -X[0]
        X += 0.2 * rng.standard_normal(X.shape)
    if kind == 3:
        X = X[rng.integers(0, 3, n)] + 0.03 * rng.standard_normal(X.shape)
    return X / np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))


def test_rows_of_real_attention_are_below_both_bounds():
    """The least over the multipliers, on cells of c that hold little more than the token's own c."""
    rng = np.random.default_rng(0)
    own, generic = 0.0, 0.0
    for _ in range(12):
        n, d, a = int(rng.integers(3, 9)), int(rng.integers(1, 4)), float(np.exp(rng.uniform(-1.0, 5.0)))
        X = some_tokens(rng, n, d)
        J = head(a, d).jacobian(X)
        top = np.linalg.svd(J.to_dense())[2][0].reshape(n, d)
        c = np.clip((-X @ X.T).max(axis=1), -1.0, 1.0)
        stretched = np.array([row_norm(a * math.sqrt((1.0 + x) / 2.0)) for x in c])
        for eps in (top, rng.standard_normal((n, d)) * rng.random((n, 1)) ** 3):
            R = np.linalg.norm((J @ eps.ravel()).reshape(n, d), axis=1)
            e = np.linalg.norm(eps, axis=1)
            two = np.sort(stretched * e)[-2:]
            generic = max(generic, float((R / (math.hypot(*two) + a * e)).max()))
            for i in range(n):
                s = math.hypot(*np.sort(np.delete(e, i))[-2:])
                levels = np.array([max(c[i] - 1e-9, 0.0), max(c[i] + 1e-9, 1e-9)])
                rows = AnchorRows(a, entropy_gap(n), np.array([[e[i]]]), np.array([[s]]), levels)
                radii = np.append(np.linspace(0.0, 1.0, 11), max(c[i] - entropy_gap(n) / a, 0.0))
                least = min(rows.row(np.array([[0.0, r]]))[0, 1 if c[i] > 0 else 0] for r in radii)
                own = max(own, float(R[i] / least))
    assert 0.6 < own <= 1.0
    assert 0.6 < generic <= 1.0


def test_cells_hold_what_the_vertices_of_the_proof_are():
    """``max(N, S)`` by brute force at points of the cells: weights, heights, radii of the mean."""
    rng = np.random.default_rng(1)
    p, t = (x.ravel() for x in np.meshgrid(np.linspace(0.0, 1.0, 60), np.linspace(0.0, 1.0, 60)))
    tight = 0.0
    for trial in range(200):
        a, n = float(np.exp(rng.uniform(-1.0, 5.0))), int(rng.choice([3, 8, 100]))
        e, s = rng.random(2)
        low = rng.random()
        levels = np.array([low, min(1.0, low + 0.02 * rng.random() + 1e-6)])
        tau, r = entropy_gap(n), rng.random()
        rows = AnchorRows(a, tau, np.array([[e]]), np.array([[s]]), levels)
        found = float(rows.vertices(np.array([[0.0, r]]))[0, 1])
        # lambda = -F'(r) / a, by a difference
        F = [s * math.sqrt(1 + 0.5 * a**2 * (1 - x**2)) + a * (1 - x**2) * e for x in (r - 1e-6, min(r + 1e-6, 1.0))]
        lam = (F[0] - F[1]) / (min(r + 1e-6, 1.0) - (r - 1e-6)) / a
        c = rng.uniform(*levels)
        m = np.linspace(0.0, 1.0, 500)
        N = s * np.sqrt(1 + 0.5 * a**2 * (1 - m**2)) + a * (1 - m**2) * e + lam * a * np.minimum(m - c, 0.0)
        h = c + (1 - c) * t
        d, q = np.sqrt(1 + h**2 + 2 * c), 1 - p
        S = p * e + q * s + p * q * a * d * (np.sqrt(1 + 4 * h**2 + 4 * c) * e + h * s) - lam * a * p * (c + h**2)
        truth = max(N.max(), S.max()) + lam * tau
        assert truth <= found * (1 + 2e-6), trial
        tight = max(tight, truth / found)
        # a negative c pays nothing
        free = max(s * math.sqrt(1 + 0.5 * a**2) + a * e, (p * e + q * s + p * q * a * np.sqrt(1 + t) * (
            np.sqrt(1 + 4 * t) * e + np.sqrt(t) * s)).max())  # fmt: skip
        assert free <= rows.vertices(np.zeros((1, 2)))[0, 0] * (1 + 1e-9)
    assert tight > 0.99


@pytest.mark.slow
def test_boxes_hold_the_norms_of_displacements():
    """The program at the norms of random displacements, from its formula, is below every box around them."""
    rng = np.random.default_rng(2)
    for n in (3, 4, 9):
        a = 6.0
        bound = negative_identity(head(a), radius=1.0, n=n)
        total = Total.of(a, n, bound.multipliers)
        e = np.sort(rng.dirichlet(np.full(n, 0.5), 300), axis=1)[:, ::-1] ** 0.5
        order = rng.permutation(n) if n > 3 else np.arange(n)
        J, K = e[:, order[0]], e[:, order[1]]
        J, K, rest = np.maximum(J, K), np.minimum(J, K), np.sort(e[:, order[2:]], axis=1)[:, ::-1]
        fourth = rest[:, 1] if n > 3 else 0.0 * J
        pairs = [
            (x, np.sqrt(np.maximum(y**2 + rest[:, 0] ** 2, rest[:, 0] ** 2 + fourth**2))) for x, y in ((J, K), (K, J))
        ]
        values = np.full(300, np.inf)
        for row, xi in zip(total.phi, total.xi, strict=True):
            parts = (rest**2).sum(axis=1) + rest.sum(axis=1) ** 2 / (xi * (n - 2))
            phi = []
            for x, s in pairs:
                # the table below the true direction: it is increasing only up to its cells
                rho = np.maximum(x[:, None] / total.corners[0], s[:, None] / total.corners[1])
                phi.append((row * rho**2).min(axis=1))
            values = np.minimum(values, sum(phi) + a**2 * parts)
        z = np.array([np.hypot(J, K), np.arctan2(K, J), rest[:, 0] if n > 3 else 0.0 * J])
        width = 0.1 * rng.random(z.shape) * rng.integers(0, 2, z.shape) * ([1, 1, 1] if n > 3 else [1, 1, 0])[0]
        lo, hi = np.maximum(z - width - 1e-12, 0.0), z + width + 1e-12
        lo[2], hi[2] = (lo[2], hi[2]) if n > 3 else (0.0 * J, 0.0 * J)
        assert (np.log(values) <= total.bound(lo, hi) + 1e-9).all()


@pytest.mark.parametrize(
    ("a", "n", "most"),
    [
        (4.0, 8, 9.81),
        pytest.param(25.0, 8, 57.1, marks=pytest.mark.slow),
        pytest.param(100.0, 64, 571.5, marks=pytest.mark.slow),
    ],
)
def test_it_is_sharper_than_what_holds_for_every_form(a, n, most):
    bound = negative_identity(head(a), radius=1.0, n=n)
    assert bound.value < most
    assert bound.verify()
    assert bound.value < oa.relaxations.rows_and_columns(head(a), radius=1.0, n=n).value
    assert not replace(bound, value=0.98 * bound.value).verify()


@pytest.mark.slow
@pytest.mark.parametrize(("a", "n"), [(2.0, 3), (4.0, 3), (25.0, 4), (4.0, 8), (25.0, 8), (100.0, 8), (25.0, 64)])
def test_no_configuration_that_we_know_exceeds_it(a, n):
    bound = negative_identity(head(a), radius=1.0, n=n).value
    assert 0.6 * bound <= oa.lipschitz_lower_bound(head(a), radius=1.0, n=n, rng=0).value <= bound


@pytest.mark.slow
def test_it_survives_climbs():
    rng = np.random.default_rng(3)
    most = 0.0
    for _ in range(12):
        n, d, a = int(rng.integers(3, 8)), int(rng.integers(1, 4)), float(np.exp(rng.uniform(-1.0, 4.5)))
        radius = 10.0 ** rng.uniform(-2, 2)
        attention = oa.SoftmaxAttention(-a / radius**2 * np.eye(d), rng.standard_normal((2, d)))
        bound = negative_identity(attention, radius=radius, n=n).value
        most = max(most, climb(attention, (1,) * n, radius, rng) / bound)
    assert 0.5 < most <= 1.0


def test_units_dimension_and_values():
    """``alpha R^2`` and ``||V||`` are all that counts; the bias of a domain's centre is taken back."""
    bound = negative_identity(head(9.0), radius=1.0, n=3)
    for other in (
        negative_identity(head(1.0), radius=3.0, n=3),
        negative_identity(head(9.0, 7), radius=1.0, n=3),
        negative_identity(head(9.0, V=np.diag([0.2, -1.0])), radius=1.0, n=3),
        negative_identity(
            oa.SoftmaxAttention(-9.0 * np.eye(2), np.eye(2), bias=[4.5, -9.0]),
            domain=Ellipsoid(np.eye(2), [0.5, -1.0]),
            n=3,
        ),
    ):
        assert other.value == pytest.approx(bound.value, rel=1e-6)
        assert other.verify()
    assert negative_identity(head(9.0, V=3.0 * TILTED), radius=1.0, n=3).value == pytest.approx(
        3.0 * np.linalg.norm(TILTED, 2) * bound.value, rel=1e-9
    )
    assert negative_identity(head(9.0, V=np.zeros((1, 2))), radius=1.0, n=3).value == 0.0


@pytest.mark.parametrize(
    ("attention", "given", "word"),
    [
        (head(4.0), {"n": 2}, "at least 3"),
        (head(4.0), {"n": 4, "p": 1.0}, "p must be 2"),
        (head(4.0), {"n": None}, "number of tokens"),
        (head(4.0), {"n": 4, "radius": None, "domain": Ellipsoid(np.eye(2), [0.1, 0.0])}, "bias"),
        (head(-4.0), {"n": 4}, "alpha > 0"),
        (head(1e-8), {"n": 4}, "must lie in"),
        (head(1e8), {"n": 4}, "must lie in"),
        (oa.SoftmaxAttention(-np.diag([4.0, 4.001]), np.eye(2)), {"n": 4}, "multiple of I"),
        (oa.SoftmaxAttention(-4.0 * np.eye(2), np.eye(2), bias=[0.1, 0.0]), {"n": 4}, "bias"),
        (oa.MaskedAttention(head(4.0)), {"n": 4}, "without a mask"),
    ],
)
def test_other_statements_are_refused(attention, given, word):
    with pytest.raises(ValueError, match=word):
        negative_identity(attention, **{"radius": 1.0, **given})


def test_forms_of_a_subspace_are_refused():
    """Two tokens far apart in what A does not see have no logit that says so."""
    Q = np.eye(1, 4)
    with pytest.raises(ValueError, match="does not apply"):
        negative_identity(oa.SoftmaxAttention.from_qkv(Q, -Q, np.eye(4), scale=4.0), radius=1.0, n=4)
    whole = negative_identity(
        oa.SoftmaxAttention.from_qkv(np.eye(4), -np.eye(4), np.eye(4), scale=4.0), radius=1.0, n=4
    )
    assert whole.value == pytest.approx(negative_identity(head(4.0), radius=1.0, n=4).value, rel=1e-9)


@pytest.mark.slow
def test_the_search_for_the_best_bound_tries_it_where_it_can_win():
    assert oa.lipschitz_upper_bound(head(25.0), radius=1.0, n=8).theorem == "negative_identity"
    for a, n in ((1.0, 64), (0.5, 4)):
        assert "negative_identity" not in [b.theorem for b in upper_bounds(head(a), radius=1.0, n=n)]


def test_the_logarithm_of_a_tiny_value_is_checked():
    """Where the value is subnormal its logarithm is a number of its own."""
    tiny = oa.SoftmaxAttention(-9.0 * np.eye(2), 1e-310 * np.eye(2))
    bound = negative_identity(tiny, radius=1.0, n=4)
    assert bound.verify()
    assert not replace(bound, log_value=bound.log_value - 0.5).verify()


@pytest.mark.slow
def test_altered_multipliers():
    """What is no multiplier is refused; other cells, radii and shares prove a bound, never a smaller one than the truth."""
    attention = head(9.0)
    bound = negative_identity(attention, radius=1.0, n=3)
    truth = climb(attention, (1, 1, 1), 1.0, np.random.default_rng(4), steps=20)
    parts = bound.multipliers
    low = replace(bound, value=0.97 * truth)
    coarse = {"angles": parts["angles"][::4], "levels": parts["levels"][::4], "radii": parts["radii"][::4, ::4]}
    for change in (
        {"radii": 1.0 + parts["radii"]},
        {"radii": -parts["radii"]},
        {"radii": parts["radii"] + 0.1},
        {"radii": parts["radii"][1:]},
        {"angles": 0.9 * parts["angles"]},
        {"angles": parts["angles"][::-1]},
        {"levels": 0.9 * parts["levels"]},
        {"xi": -parts["xi"]},
        {"xi": 0.0 * parts["xi"]},
        {"xi": parts["xi"][:0]},
    ):
        assert not replace(bound, multipliers={**parts, **change}).verify(), list(change)
    for change in (coarse, {"radii": 0.0 * parts["radii"]}, {"xi": 0.0 * parts["xi"] + 0.1}, {"xi": 1e9 * parts["xi"]}):
        altered = replace(low, multipliers={**parts, **change})
        assert not altered.verify()
        assert altered.proved_value() >= truth
    assert 0.6 * bound.value < truth < bound.value


@pytest.mark.parametrize(("a", "n"), [(2.0, 3), (25.0, 5)])
def test_proof_in_intervals(a, n):
    pytest.importorskip("flint")
    attention = oa.SoftmaxAttention(-a / 1.3**2 * np.eye(2), TILTED)
    bound = negative_identity(attention, radius=1.3, n=n)
    assert bound.verify(rigorous=True)
    assert bound.rigorous_value() == pytest.approx(bound.value, rel=1e-9)
