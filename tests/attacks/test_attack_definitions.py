"""The attackers' own definitions: floats against 60 digits, derivatives against differences, and attacks that must succeed."""

from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from definitions import along, distance, field_jacobian, image, jacobian, local_constant, mean_norm, operator_norm
from exact import digits, exact, field_stretch, masses, stretch
from exact import distance as exact_distance
from exact import image as exact_image
from problems import ALL, ORDERS, SOFTMAX, measure, problem
from quantities import QUANTITIES
from regions import region
from upper import attack, on_domain

import otattn as oa

KINDS = ("softmax", "qkv", "l2", *ALL[-4:], "rotary", "score", "open score")


def drawn(rng, kind, **options):
    """A problem of moderate logits with its tokens and weights."""
    q = problem(rng, kinds=(kind,), masked=None if kind != "score" else False, sizes=(3,), **options)
    X = q.region.points(rng.standard_normal((3, q.region.size)))
    return q, X, np.full(3, 1 / 3) if q.n else rng.dirichlet(np.ones(3)) + 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_floats_agree_with_many_digits_and_with_the_library(kind: str, heads: bool) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(6):
        q, X, w = drawn(rng, kind, heads=heads and kind != "rotary", gated=heads and kind in ("rotary", "score"))
        w = w / w.sum()
        ours = image(q.map, X[None], w[None])[0]
        with digits():
            true = np.array([[float(c) for c in row] for row in exact_image(q.map, exact(X), masses(w))])
        size = np.abs(ours).max() + 1e-300
        np.testing.assert_allclose(ours, true, rtol=0, atol=1e-9 * size)
        np.testing.assert_allclose(q.ours.pushforward(measure(q, X, w)).points, ours, rtol=0, atol=1e-9 * size)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_agree_with_differences_in_many_digits(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(4):
        q, X, w = drawn(rng, kind)
        w = w / w.sum()
        eps, u = rng.standard_normal(X.shape), rng.standard_normal(q.map.dim)
        moved = along(q.map, X[None], w[None], eps[None])
        np.testing.assert_allclose(
            moved[0],
            np.einsum("iejd,jd->ie", jacobian(q.map, X[None], w[None])[0], eps),
            rtol=0,
            atol=1e-12 * (np.abs(moved).max() + 1e-300) * 1e3,
        )
        D = field_jacobian(q.map, X[None], np.arange(3), X[None], w[None])[0]
        with digits():
            whole = float(stretch(q.map, exact(X), masses(w), eps, 3.0))
            part = float(field_stretch(q.map, 1, exact(X), masses(w), u))
        size = np.linalg.norm(jacobian(q.map, X[None], w[None]))
        ratio = float((mean_norm(moved, w[None], 3.0) / mean_norm(eps[None], w[None], 3.0))[0])
        assert ratio == pytest.approx(whole, rel=1e-8, abs=1e-8 * size)
        assert np.linalg.norm(D[1] @ u) / np.linalg.norm(u) == pytest.approx(part, rel=1e-8, abs=1e-8 * size)


@pytest.mark.parametrize("p", sorted(set(ORDERS)))
def test_norms_are_attained_and_not_beaten_by_random_directions(p: float) -> None:
    rng = np.random.default_rng(5)
    J, w = rng.standard_normal((4, 3, 2, 3, 2)), rng.dirichlet(np.ones(3), 4)
    value, eps = operator_norm(J, w, p, rounds=100)
    attained = mean_norm(np.einsum("biejd,bjd->bie", J, eps), w, p) / mean_norm(eps, w, p)
    np.testing.assert_allclose(attained, value, rtol=1e-9)
    many = rng.standard_normal((5000, 4, 3, 2))
    for some in many:
        reached = mean_norm(np.einsum("biejd,bjd->bie", J, some), w, p) / mean_norm(some, w, p)
        assert (reached <= value * (1 + 1e-9)).all()


def test_charts_agree_with_their_exact_form_and_stay_in_the_domain() -> None:
    rng = np.random.default_rng(6)
    for _ in range(60):
        where = region(rng, int(rng.integers(1, 4)))
        z = rng.standard_normal((4, where.size)) * rng.choice([0.3, 3.0])
        X = where.points(z)
        with digits():
            Y = np.array([[float(c) for c in row] for row in where.exact(z)])
        np.testing.assert_allclose(X, Y, rtol=0, atol=1e-13 * (np.abs(Y).max() + 1e-300))
        assert where.kind == "points" or where.holds(X)
        if where.kind in ("ball", "box", "ellipsoid"):
            assert where.domain.contains(X, tol=1e-9)


def test_distances_agree_with_many_digits() -> None:
    rng = np.random.default_rng(7)
    for p in (1.0, 2.5, np.inf):
        X, Y = rng.standard_normal((2, 4, 2))
        with digits():
            true = float(exact_distance(exact(X), exact(Y), p))
        assert distance(X, Y, p) == pytest.approx(true, rel=1e-13)


def lowered(function, factor):
    """The bound of a theorem times a factor below one."""
    return lambda q: replace(on_domain(function)(q), value=float(on_domain(function)(q)) * factor)


@pytest.mark.parametrize(
    ("function", "factor", "draw"),
    [
        (oa.bounds.column_bound, 1 - 1e-9, {"sizes": (1,), "any_measure": False}),
        (
            oa.bounds.column_bound,
            0.95,
            {"orders": (np.inf,), "forms": (0,), "plain": True, "regions": ("ball",), "any_measure": True},
        ),
        (oa.bounds.row_bound, 0.7, {"any_measure": False}),
        (oa.bounds.pointwise_bound, 0.8, {"kinds": ("linear",), "any_measure": True}),
        (oa.bounds.multi_head, 0.5, {"heads": True}),
        (oa.bounds.masked_row_bound, 0.7, {"masked": True, "any_measure": False}),
        (oa.bounds.l2_row_bound, 0.6, {"kinds": ("l2",), "any_measure": False}),
    ],
)
def test_attacks_find_what_is_false(function, factor: float, draw) -> None:
    run = attack("lowered", lowered(function, factor), **{"kinds": SOFTMAX, **draw})
    rng = np.random.default_rng(8)
    assert any(o.state == "violated" and o.share > 1 for o in (run(rng) for _ in range(100)))


@pytest.mark.parametrize(
    "name",
    [
        "bounds.field_bound",
        "relaxations.field_certificate",
        "relaxations.column_exponent",
        "bounds.column_sum",
        "relaxations.self_entropy",
    ],
)
def test_proven_quantities_are_nearly_attained(name: str) -> None:
    """An attack that reached little would prove little."""
    rng = np.random.default_rng(9)
    assert any(QUANTITIES[name](rng).share > 0.99 for _ in range(100))


def test_exact_local_constants_exceed_by_nothing() -> None:
    """The value that settles a suspicion is that of the float evaluator, to rounding."""
    rng = np.random.default_rng(10)
    for kind in KINDS:
        q, X, w = drawn(rng, kind)
        w = w / w.sum()
        value, eps = local_constant(q.map, X[None], w[None], 2)
        if value[0] > 0:
            with digits():
                assert mp.almosteq(stretch(q.map, exact(X), masses(w), eps[0], 2), mp.mpf(value[0]), rel_eps=1e-8)
