"""Sinkhorn attention with a symmetric form: the form over pairs, its cells, measures that climb against it, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

import otattn as oa
from otattn.lipschitz.forms.sinkhorn_symmetric import Pairs, largest_of_boxes
from otattn.lipschitz.lower.charts import chart_of
from otattn.lipschitz.lower.witnesses import polyhedra
from otattn.lipschitz.relaxations import sinkhorn_symmetric


def rare_token(a):
    """The constant of a rare token whose own share is p, the others far: the best p."""
    p = np.linspace(0.0, 1.0, 100_001)
    return float((p + 8.0 * a * p * (1.0 - p) / (1.0 + p)).max())


def form(A, d):
    """The matrix of a form that may be given as a number."""
    return A * np.eye(d) if np.ndim(A) == 0 else A


def coupling(X, w, A):
    """The symmetric coupling with marginals w, by Newton-like halving of the potential."""
    L = X @ form(A, X.shape[1]) @ X.T
    f = np.zeros(len(w))
    for _ in range(20_000):
        z = L + f + np.log(w)
        top = z.max(axis=1)
        new = -(top + np.log(np.exp(z - top[:, None]).sum(axis=1)))
        step = np.abs(new - f).max()
        f = 0.5 * (f + new)
        if step < 1e-13:
            break
    pi = np.exp(L + f + f[:, None] + np.log(w) + np.log(w)[:, None])
    return pi, float(np.abs(pi.sum(axis=1) / w - 1.0).max())


def derivative(X, w, A, pi):
    """J on ``L^2(w)``, the potentials differentiated by a linear system: no projection is used."""
    n, d = X.shape
    P, J, keys = pi / w[:, None], np.zeros((n, d, n, d)), X @ form(A, d)
    system = np.block([[np.diag(w), pi], [pi.T, np.diag(w)]])
    scale = np.sqrt(np.concatenate([w, w]))
    inverse = np.linalg.pinv(system / scale / scale[:, None], rcond=1e-13)
    for k in range(n):
        for c in range(d):
            dl = np.zeros((n, n))
            dl[k] += keys[:, c]
            dl[:, k] += keys[:, c]
            right = np.concatenate([(pi * dl).sum(axis=1), (pi * dl).sum(axis=0)])
            d_potentials = -inverse @ (right / scale) / scale
            dl += d_potentials[:n, None] + d_potentials[n:]
            J[:, :, k, c] = (P * dl) @ X
            J[:, c, k, c] += P[:, k]
    root = np.sqrt(w)
    return (root[:, None, None, None] * J / root[:, None]).reshape(n * d, n * d)


def constant(X, w, A):
    pi, error = coupling(X, w, A)
    return float(np.linalg.norm(derivative(X, w, A, pi), 2)) if error < 1e-9 else 0.0


def ball(X):
    return X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1.0)


def test_the_derivative_is_self_adjoint_and_not_negative():
    rng = np.random.default_rng(0)
    for n, d, a in ((2, 1, 1.0), (4, 2, 3.0), (5, 3, 0.3)):
        X, w = ball(rng.normal(size=(n, d))), rng.dirichlet(np.ones(n))
        J = derivative(X, w, a, coupling(X, w, a)[0])
        assert np.allclose(J, J.T, atol=1e-8 * np.abs(J).max())
        assert np.linalg.eigvalsh(0.5 * (J + J.T)).min() > -1e-8
        attention = oa.SinkhornAttention(a * np.eye(d), np.eye(d), tol=1e-12)
        local = oa.local_lipschitz(attention, oa.DiscreteMeasure(X, w)).value
        assert local == pytest.approx(np.linalg.norm(J, 2), rel=1e-6)


REFLECTIONS = {
    "exchange": np.array([[0.0, 1.0], [1.0, 0.0]]),
    "signs": np.diag([1.0, -1.0, -1.0]),
    "oblique": np.eye(3) - 2.0 * np.outer([0.6, 0.0, 0.8], [0.6, 0.0, 0.8]),
    "minus": -np.eye(2),
}


@pytest.mark.parametrize("name", REFLECTIONS)
def test_turned_by_the_reflection_the_derivative_is_self_adjoint(name):
    O = REFLECTIONS[name]
    d, rng = len(O), np.random.default_rng(1)
    for n, a in ((2, 1.0), (4, 3.0), (5, 0.3)):
        X, w = ball(rng.normal(size=(n, d))), rng.dirichlet(np.ones(n))
        J = derivative(X, w, a * O, coupling(X, w, a * O)[0])
        turned = np.kron(np.eye(n), O) @ J
        assert np.allclose(turned, turned.T, atol=1e-8 * np.abs(J).max())
        assert np.linalg.eigvalsh(0.5 * (turned + turned.T)).min() > -1.0 - 1e-8
        attention = oa.SinkhornAttention(a * O, np.eye(d), tol=1e-12)
        local = oa.local_lipschitz(attention, oa.DiscreteMeasure(X, w)).value
        assert local == pytest.approx(np.linalg.norm(J, 2), rel=1e-6)


def test_a_reflection_is_enclosed_within_seven_percent():
    """Two atoms at ends of an isotropic line attain ``2 a``; the bound is ``2 a + 1/(8a)``."""
    for a in (1.0, 4.0):
        attention = oa.SinkhornAttention(a * REFLECTIONS["exchange"], np.eye(2))
        bound = sinkhorn_symmetric(attention, radius=1.0)
        X = np.array([[1.0, 0.0], [-1.0, 0.0]])
        assert constant(X, np.array([0.5, 0.5]), attention.A) == pytest.approx(2.0 * a, rel=1e-9)
        assert 2.0 * a <= bound.value <= 1.07 * 2.0 * a
        assert bound.verify()
    assert oa.lipschitz_upper_bound(attention, radius=1.0).theorem == "sinkhorn_symmetric"


def prism(height):
    """The corners of a prism over a regular triangle, on the sphere."""
    angles = 2.0 * np.pi * np.arange(3) / 3.0
    flat = np.stack([np.cos(angles), np.sin(angles), 0.0 * angles], axis=1)
    X = np.concatenate([flat + [0.0, 0.0, height], flat - [0.0, 0.0, height]])
    return X / np.linalg.norm(X, axis=1, keepdims=True)


@pytest.mark.parametrize(("a", "height", "part"), [(16.0, 0.33, 1.26), (1000.0, 0.062, 1.49)])
def test_under_repulsion_a_prism_has_three_quarters(a, height, part):
    """A token sees the four far corners; antipodes in the plane have a alone."""
    equal = np.full(6, 1.0 / 6.0)
    known = constant(prism(height), equal, -a)
    attention = oa.SinkhornAttention(-a * np.eye(3), np.eye(3), tol=1e-12)
    assert part * a < known <= sinkhorn_symmetric(attention, radius=1.0).value
    assert oa.local_lipschitz(attention, oa.DiscreteMeasure(prism(height), equal)).value == pytest.approx(
        known, rel=1e-6
    )
    if a < 100.0:
        assert oa.lipschitz_lower_bound(attention, radius=1.0, n=6, rng=0).value > 0.99 * known


def test_under_repulsion_a_tetrahedron_splits():
    """At a = 4 its atoms part in two: 1.024 a; no measure of the plane that is known has more than a."""
    attention = oa.SinkhornAttention(-4.0 * np.eye(3), np.eye(3))
    assert 4.09 < oa.lipschitz_lower_bound(attention, radius=1.0, rng=0).value <= 8.04


@pytest.mark.parametrize("domain", [oa.Ball(2.0, 1), oa.Box(-np.ones(2), np.ones(2)), oa.Ball(1.0, 2000)])
def test_polyhedra_lie_on_the_boundary_in_every_dimension(domain):
    """None on a line; in many dimensions without a square matrix of that size."""
    chart = chart_of(domain, domain.dim)
    found = polyhedra(chart)
    assert bool(found) == (domain.dim > 1)
    for batch in found:
        assert np.allclose(chart.size(batch.latents), 1.0)
        assert batch.latents.shape[-1] == domain.dim


FORMS = {
    **REFLECTIONS,
    "definite": np.array([[1.0, 0.2], [0.2, 0.8]]),
    "flat": np.diag([1.0, 0.3]),
    "indefinite": np.array([[0.3, 0.9], [0.9, -0.4]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_no_measure_climbs_above_it_for_any_form(name):
    A = FORMS[name] / np.linalg.norm(FORMS[name], 2)
    d, rng = len(A), np.random.default_rng(len(name))
    for a in (0.2, 0.7, 2.0):
        bound = sinkhorn_symmetric(oa.SinkhornAttention(a * A, np.eye(d)), radius=1.0).value
        for n in (2, 3, 4):

            def loss(z, n=n, a=a):
                w = np.exp(np.clip(z[n * d :], -12.0, 0.0))
                return -constant(ball(z[: n * d].reshape(n, d)), w / w.sum(), a * A)

            start = np.concatenate([1.5 * rng.normal(size=n * d), -rng.exponential(1.0, n)])
            found = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 150})
            assert -float(found.fun) <= bound


def test_other_forms_cost_the_root_of_their_condition():
    for A, V in ((np.diag([2.0, -1.0]), np.eye(2)), (np.array([[1.5, 0.5], [0.5, 1.5]]), np.diag([1.0, 3.0]))):
        attention = oa.SinkhornAttention(A, V)
        bound = sinkhorn_symmetric(attention, radius=0.3)
        assert bound.value == pytest.approx(np.sqrt(2.0) * np.linalg.norm(V, 2), rel=1e-9)
        assert bound.verify()
        assert not replace(bound, value=bound.value / 1.0001).verify()
        assert not replace(bound, attention=oa.SinkhornAttention(A @ np.diag([1.0, 0.9]), V)).verify()


@pytest.mark.parametrize("size", [5e-324, 1e-60, 1e-12, 1.0, 1e30])
def test_forms_of_every_size(size):
    pytest.importorskip("flint")
    for O in REFLECTIONS.values():
        radius = min(0.4 / np.sqrt(size), 1e30)
        attention = oa.SinkhornAttention(size * O, np.eye(len(O)))
        if size * radius**2 < 1e-6:
            with pytest.raises(ValueError, match="must lie in"):
                sinkhorn_symmetric(attention, radius=radius)
            continue
        bound = sinkhorn_symmetric(attention, radius=radius)
        assert bound.value == pytest.approx(1.0, rel=1e-9)
        assert bound.value >= 1.0
        assert bound.verify()
        assert bound.verify(rigorous=True)


def test_a_form_that_is_not_positive_definite_takes_no_multipliers():
    positive = sinkhorn_symmetric(oa.SinkhornAttention(4.0 * np.eye(2), np.eye(2)), radius=1.0)
    assert positive.multipliers
    for O in (-np.eye(2), np.diag([1.0, -1.0])):
        assert not replace(positive, attention=oa.SinkhornAttention(4.0 * O, np.eye(2))).verify()


@pytest.mark.parametrize("a", [0.1, 1.0, 25.0, 400.0])
def test_a_rare_token_comes_within_seven_percent(a):
    attention = oa.SinkhornAttention(a / 4.0 * np.eye(2), 3.0 * np.eye(2))
    bound = sinkhorn_symmetric(attention, radius=2.0)
    known = 3.0 * rare_token(a)
    assert known * (1.0 - 1e-9) <= bound.value <= 1.07 * known
    assert bound.value <= oa.bounds.sinkhorn_bound(attention, radius=2.0).value
    assert bound.verify()


def test_the_rare_token_is_real():
    """An atom of mass 1e-3 at 1, the other at -1 or nearer: the share p moves with the distance of the two, so a is chosen for it."""
    best = 0.0
    for mass in np.geomspace(1e-9, 1e-2, 15):
        best = max(best, constant(np.array([[1.0], [-1.0]]), np.array([mass, 1.0 - mass]), 4.0))
    assert 0.9 * rare_token(4.0) < best < sinkhorn_symmetric(oa.SinkhornAttention([[4.0]], [[1.0]]), radius=1.0).value


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_measure_that_climbs_exceeds_it(seed):
    rng = np.random.default_rng(seed)
    a, (n, d) = float(np.exp(rng.uniform(0.0, 1.8))), [(2, 1), (3, 1), (3, 2), (4, 2)][seed % 4]
    bound = sinkhorn_symmetric(oa.SinkhornAttention(a * np.eye(d), np.eye(d)), radius=1.0).value

    def loss(z):
        w = np.exp(np.clip(z[n * d :], -30.0, 0.0))
        return -constant(ball(z[: n * d].reshape(n, d)), w / w.sum(), a)

    best = 0.0
    for kind in ("any", "any", "rare"):
        X, logs = rng.normal(size=(n, d)), -rng.exponential(4.0, n)
        if kind == "rare":  # its share of itself is .4 at this mass
            X = np.where(np.arange(n)[:, None] == 0, 1.0, -1.0) * np.eye(d)[0] + 0.02 * rng.normal(size=(n, d))
            logs = np.where(np.arange(n) == 0, 0.15 - 4.0 * a, 0.0)
        found = minimize(loss, np.concatenate([X.ravel(), logs]), method="Nelder-Mead", options={"maxfev": 120})
        best = max(best, -float(found.fun))
    assert 0.8 * bound < best <= bound


def pair_matrix(x, y, pairs):
    """The form of one pair, for vectors of any dimension, from its definition."""
    d = len(x)
    L = np.concatenate([y - pairs.tau * x, x - pairs.tau * y])
    near = 1.0 / pairs.a + pairs.beta * np.exp(pairs.rate * np.sum((x - y) ** 2) / 2.0)
    B = (near + pairs.kappa * (x @ y)) * np.eye(d) - pairs.kappa * np.outer(y, x)
    return np.outer(L, L) + np.block([[np.zeros((d, d)), B], [B.T, np.zeros((d, d))]])


@pytest.mark.parametrize("a", [0.4, 4.0, 60.0])
def test_cells_bound_the_pairs(a):
    rng = np.random.default_rng(int(a))
    pairs = Pairs.choose(a)
    most = pairs.maximum(1e-3, 10**6)
    seen = 0.0
    for _ in range(1500):
        x, y = ball(rng.normal(size=(2, 3)) * rng.choice([0.3, 1.0, 9.0]))
        y = -x * rng.uniform(0.7, 1.0) + 0.02 * rng.normal(size=3) if rng.random() < 0.3 else y
        x, y = ball(np.array([x, y]))
        x, y = (x, y) if np.linalg.norm(x) >= np.linalg.norm(y) else (y, x)
        value = float(np.linalg.eigvalsh(pair_matrix(x, y, pairs))[-1]) / pairs.unit
        r, s = np.linalg.norm(x), np.linalg.norm(y)
        at = np.array([[r], [s], [np.arccos(np.clip(x @ y / (r * s), -1.0, 1.0))]])
        width = np.array([[1e-7], [1e-7], [1e-6]])
        low, high = np.maximum(at - width, 0.0), np.minimum(at + width, [[1.0], [1.0], [np.pi]])
        assert value <= pairs.bound(low, high)[0] <= value + 1e-4
        seen = max(seen, value)
    assert 0.95 * most.value < seen <= most.value


def test_a_box_of_matrices_is_below_its_bound():
    rng = np.random.default_rng(4)
    mid = rng.normal(size=(200, 4, 4)) * 10.0 ** rng.uniform(-6, 6, (200, 1, 1))
    mid += np.swapaxes(mid, 1, 2)
    mid[::5] = np.einsum("ki,kj->kij", mid[::5, 0], mid[::5, 0])
    rad = (
        np.abs(rng.normal(size=mid.shape))
        * np.abs(mid).max(axis=(1, 2), keepdims=True)
        * rng.choice([0, 1e-3], (200, 1, 1))
    )
    rad += np.swapaxes(rad, 1, 2)
    bound = largest_of_boxes(mid, rad)
    for _ in range(20):
        sign = rng.choice([-1.0, 1.0], rad.shape)
        inside = mid + np.tril(sign) * rad + np.swapaxes(np.tril(sign, -1), 1, 2) * rad
        assert (np.linalg.eigvalsh(inside)[:, -1] <= bound * (1.0 + 1e-13)).all()
    tops = np.linalg.eigvalsh(mid)[:, -1]
    still = (rad.max(axis=(1, 2)) == 0.0) & (tops > 0.0)
    assert (bound[still] <= tops[still] + 1e-11 * np.abs(mid[still]).max(axis=(1, 2))).all()


def test_the_proof_holds_in_intervals_and_is_not_altered():
    pytest.importorskip("flint")
    V = np.array([[1.0, 2.0, 0.0], [0.5, 0.0, 1.0]])
    for domain in (
        oa.Ball(1.5, 3),
        oa.Box([0.0, 5.0, -1.0], [1.0, 5.0, 1.0]),
        oa.Ellipsoid(np.diag([2.0, 1.0, 0.1]), np.ones(3)),
    ):
        bound = sinkhorn_symmetric(oa.SinkhornAttention(2.0 * np.eye(3), V), domain=domain)
        assert bound.verify()
        assert bound.verify(rigorous=True)
        assert not replace(bound, value=0.9 * bound.value).verify()
        for key, value in bound.multipliers.items():
            for wrong in (0.5 * value, value + 0.3, -value - 1.0, 1e300 * value, np.array([np.nan])):
                other = replace(bound, value=0.99 * bound.value, multipliers=bound.multipliers | {key: wrong})
                try:
                    assert not other.verify()
                except (ValueError, oa.CertificateError):
                    continue
        for target in (0.0, 1e-300, 1e300):
            assert not replace(bound, value=0.95 * bound.value, options={"target": target}).verify()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_up_to_a_quarter_nothing_is_stretched(sign):
    """``|alpha| R^2 <= 1/4``: the constant is the norm of V, exactly; above it is ``2 a + 1/(8a)`` at most."""
    bound = sinkhorn_symmetric(oa.SinkhornAttention(sign * np.eye(2), [[0.0, 2.0]]), radius=0.5)
    assert 2.0 <= bound.value <= 2.0 * (1.0 + 1e-10)
    assert bound.verify()
    for a in (0.25 + 1e-9, 0.5, 1e6):
        above = sinkhorn_symmetric(oa.SinkhornAttention(sign * a * np.eye(2), np.eye(2)), radius=1.0)
        assert above.value <= (2.0 * a + 0.125 / a) * (1.0 + 1e-10)
        assert (
            above.value
            <= oa.bounds.sinkhorn_bound(oa.SinkhornAttention(sign * a * np.eye(2), np.eye(2)), radius=1.0).value
        )
        assert above.verify()


def test_the_closed_form_is_attained_at_one_half():
    """Negative alpha, ``|alpha| R^2 = 1/2``: 5/4, and a witness has 1.249."""
    attention = oa.SinkhornAttention(-0.5 * np.eye(2), np.eye(2))
    low = oa.lipschitz_lower_bound(attention, radius=1.0, n=8, rng=0).value
    assert 1.24 < low <= sinkhorn_symmetric(attention, radius=1.0).value <= 1.25 * (1.0 + 1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_closed_form_bounds_every_pair(sign):
    rng = np.random.default_rng(7)
    for a in (0.05, 0.25, 0.4, 1.0, 9.0):
        tau, most = min(1.0, 0.25 / a), 2.0 * a + 0.125 / a if a > 0.25 else 1.0
        seen = 0.0
        for _ in range(500):
            x = ball(rng.normal(size=(1, 3)) * 3.0)[0]
            y = ball((rng.choice([-1.0, 1.0]) * x + rng.choice([0.0, 0.1, 3.0]) * rng.normal(size=3))[None])[0]
            L = np.concatenate([y - sign * tau * x, x - sign * tau * y])
            M = a * np.outer(L, L) + sign * np.kron([[0.0, 1.0], [1.0, 0.0]], np.eye(3))
            seen = max(seen, float(np.linalg.eigvalsh(M)[-1]))
        assert 0.99 * most < seen <= most * (1.0 + 1e-12)


def test_where_the_domain_lies_and_its_units_change_nothing():
    one = sinkhorn_symmetric(oa.SinkhornAttention(3.0 * np.eye(2), np.eye(2)), radius=1.0).value
    there = oa.Ellipsoid(1e-3 * np.eye(2), [1e3, -5.0])
    other = sinkhorn_symmetric(oa.SinkhornAttention(3e6 * np.eye(2), 1e5 * np.eye(2)), domain=there).value
    assert other == pytest.approx(1e5 * one, rel=2e-2)


def test_values_below_the_normal_numbers():
    """Digits run out there: with V = 5e-324 it was 3 units, and 3.18 are attained."""
    one = sinkhorn_symmetric(oa.SinkhornAttention([[2.0]], [[1.0]]), radius=1.0).value
    unit = float(np.nextafter(0.0, 1.0))
    for V in ([[unit]], [[1e-320], [1.3e-320]]):
        units = np.linalg.norm(np.array(V) / unit)
        for a, known in ((0.2, 1.0), (2.0, one / 1.03)):
            attention = oa.SinkhornAttention([[a]], V)
            for bound in (sinkhorn_symmetric(attention, radius=1.0), oa.bounds.sinkhorn_bound(attention, radius=1.0)):
                assert bound.value / unit >= known * units
                assert bound.verify()


def test_a_domain_of_another_space_proves_nothing():
    bound = sinkhorn_symmetric(oa.SinkhornAttention(0.1 * np.eye(2), np.eye(2)), radius=1.0)
    assert not replace(bound, domain=oa.Ball(1.0, 7)).verify()
    assert not replace(bound, domain=oa.Box(-np.ones(3), np.ones(3))).verify()


def test_it_is_the_best_for_sinkhorn_attention():
    attention = oa.SinkhornAttention(4.0 * np.eye(2), np.eye(2))
    assert oa.lipschitz_upper_bound(attention, radius=1.0).theorem == "sinkhorn_symmetric"
    assert oa.lipschitz_upper_bound(attention, radius=1.0, n=7).theorem == "sinkhorn_symmetric"
    assert oa.lipschitz_upper_bound(attention, radius=1.0, p=3).theorem == "sinkhorn_bound"
    assert sinkhorn_symmetric(oa.SinkhornAttention(np.eye(2), np.zeros((1, 2))), radius=1.0).value == 0.0


@pytest.mark.parametrize(
    ("attention", "given", "message"),
    [
        (oa.SinkhornAttention([[0.0, 1.0], [1.0 + 1e-12, 0.0]], np.eye(2)), {}, "must be symmetric"),
        (oa.SinkhornAttention(np.diag([1.0, 4.1]), np.eye(2)), {}, "within a factor 4"),
        (oa.SinkhornAttention(np.diag([1.0, 0.0]), np.eye(2)), {}, "within a factor 4"),
        (oa.SinkhornAttention(np.zeros((2, 2)), np.eye(2)), {}, "must lie in"),
        (oa.SinkhornAttention(np.eye(2), np.eye(2)), {"p": 3}, "p must be 2"),
        (oa.SinkhornAttention(np.eye(2), np.eye(2), n_iter=3), {}, "n_iter"),
        (oa.SoftmaxAttention(np.eye(2), np.eye(2)), {}, "SinkhornAttention"),
        (oa.SinkhornAttention(1e13 * np.eye(2), np.eye(2)), {}, "must lie in"),
    ],
)
def test_what_it_refuses(attention, given, message):
    with pytest.raises(ValueError, match=message):
        sinkhorn_symmetric(attention, radius=1.0, **given)


def test_a_rate_at_its_end_is_proved_in_intervals():
    """The exact ``||A|| R^2`` of a dense form is below that of floats: a rate equal to the latter was refused."""
    pytest.importorskip("flint")
    rng = np.random.default_rng(5)
    U = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    A = U @ np.diag(np.linspace(0.8, 1.0, 6)) @ U.T
    A = 0.59999987 * 0.5 * (A + A.T)
    bound = sinkhorn_symmetric(oa.SinkhornAttention(A, np.eye(6)), radius=1.0)
    assert bound.multipliers
    assert bound.verify()
    assert bound.verify(rigorous=True)
