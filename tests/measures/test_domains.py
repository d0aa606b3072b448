"""Domains of tokens: projections, support radii, norms of affine maps."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otattn.measures import Ball, Box, Ellipsoid, LayerNormDomain, PointSet

RNG = np.random.default_rng(0)
SHAPES = {
    "round": np.diag([2.0, 2.0, 2.0]),
    "long": np.diag([10.0, 1.0, 1e-3]),
    "flat": np.array([[1.0, 0.5], [0.0, 2.0], [1.0, 0.0]]),
    "line": np.array([[1.0], [2.0], [-1.0]]),
    "point": np.zeros((3, 2)),
    "wide": RNG.normal(size=(3, 5)),
}
DOMAINS = {
    "ball": Ball(1.5, 3),
    **{f"ellipsoid {name}": Ellipsoid(E, [0.3, -1.0, 2.0]) for name, E in SHAPES.items()},
    "layernorm": LayerNormDomain([1.0, -2.0, 0.5], [0.1, 0.2, 0.3]),
    "layernorm with a dead coordinate": LayerNormDomain([1.0, 0.0, 0.5]),
    "layernorm with two dead coordinates": LayerNormDomain([0.0, 3.0, 0.0]),
    "layernorm of gain zero": LayerNormDomain([0.0, 0.0, 0.0], [1.0, 2.0, 3.0]),
    "box": Box([-1.0, 0.0, 2.0], [1.0, 3.0, 2.0]),
    "points": PointSet(RNG.normal(size=(12, 3))),
}
CONVEX = [k for k in DOMAINS if not k.startswith(("layernorm", "points"))]


@pytest.mark.parametrize("name", DOMAINS)
def test_projection_lands_inside_and_stays(name):
    domain = DOMAINS[name]
    x = np.vstack(
        [
            5.0 * RNG.normal(size=(40, 3)),
            1e-3 * RNG.normal(size=(10, 3)),
            np.zeros((1, 3)),
            [[1e6, -1e6, 1e6]],
        ]
    )
    y = domain.project(x)
    assert y.shape == x.shape
    assert domain.contains(y, tol=1e-9)
    np.testing.assert_allclose(domain.project(y), y, atol=1e-9 * domain.max_norm)
    inside = domain.sample(30, 1)
    assert inside.shape == (30, 3)
    assert domain.contains(inside)
    np.testing.assert_allclose(domain.project(inside), inside, atol=1e-9 * domain.max_norm)


@pytest.mark.parametrize("name", CONVEX)
def test_projection_is_the_nearest_point(name):
    """y is nearest to x in a convex set iff <x - y, z - y> <= 0 for all of its points z."""
    domain = DOMAINS[name]
    x = 4.0 * RNG.normal(size=(60, 3))
    y = domain.project(x)
    z = np.vstack([domain.sample(400, 2), domain.project(10 * RNG.normal(size=(400, 3)))])
    products = np.einsum("id,ijd->ij", x - y, z[None] - y[:, None])
    assert products.max() <= 1e-8 * np.linalg.norm(x - y, axis=1).max() * domain.max_norm


def test_projection_on_a_finite_set_is_the_nearest_point():
    domain = DOMAINS["points"]
    x = RNG.normal(size=(50, 3))
    distance = np.linalg.norm(x[:, None] - domain.points, axis=2)
    np.testing.assert_array_equal(domain.project(x), domain.points[distance.argmin(axis=1)])


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**31), st.floats(-12, 6), st.floats(-6, 6))
def test_ellipsoids_of_every_shape(seed, distance, eccentricity):
    rng = np.random.default_rng(seed)
    E = rng.normal(size=(4, 4)) * 10.0 ** (eccentricity * rng.random(4))
    domain = Ellipsoid(E)
    on_it = E @ (lambda z: z / np.linalg.norm(z))(rng.normal(size=4))
    x = on_it * (1.0 + 10.0**distance)  # just outside, and far outside
    y = domain.project(x[None])[0]
    assert domain.contains(y[None])
    z = (lambda z: z / np.linalg.norm(z, axis=1, keepdims=True))(rng.normal(size=(200, 4))) @ E.T
    # a coordinate is rounded by 1e-16 of the largest axis
    rounding = 1e-13 * domain.max_norm**2
    assert ((x - y) @ (z - y).T).max() <= 1e-7 * np.linalg.norm(x - y) * domain.max_norm + rounding
    # never further than the point it came from
    assert np.linalg.norm(x - y) <= np.linalg.norm(x - on_it) * (1 + 1e-6) + 1e-12 * domain.max_norm


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize("e", [1, 3, 5])
def test_affine_norms_bound_every_token(name, e):
    domain = DOMAINS[name]
    rng = np.random.default_rng(e)
    tokens = np.vstack([domain.sample(300, 3), domain.project(20 * rng.normal(size=(300, 3)))])
    for c in (None, rng.normal(size=e)):
        A = rng.normal(size=(e, 3))
        bound = domain.max_affine_norm(A, c)
        reached = np.linalg.norm(tokens @ A.T + (0.0 if c is None else c), axis=1).max()
        assert reached <= bound
    assert np.linalg.norm(tokens, axis=1).max() <= domain.max_norm
    with pytest.raises(ValueError, match="A must have shape"):
        domain.max_affine_norm(np.eye(2))


def test_affine_norms_that_are_attained():
    A = np.diag([3.0, 1.0])
    assert Ball(2.0).max_affine_norm(A) == pytest.approx(6.0, rel=1e-13)
    assert Ball(2.0).max_affine_norm(A, [0.5, 0.0]) == pytest.approx(6.5, rel=1e-13)
    assert Ellipsoid(np.diag([1.0, 6.0])).max_affine_norm(A) == pytest.approx(6.0, rel=1e-13)
    assert Box([-1.0, -1.0], [1.0, 1.0]).max_affine_norm(np.eye(2)) == pytest.approx(np.sqrt(2), rel=1e-12)
    assert PointSet([[1.0, 0.0], [0.0, 2.0]]).max_affine_norm(A) == pytest.approx(3.0, rel=1e-11)
    # LayerNorm with unit gain: the sphere of radius sqrt(d)
    assert LayerNormDomain(np.ones(8)).max_norm == pytest.approx(np.sqrt(8), rel=1e-12)


def exact_square(M, c, x):
    """``|M x + c|^2`` of the floats as they are, a fraction."""
    rows = [
        Fraction(s) + sum(Fraction(a) * Fraction(b) for a, b in zip(row, x, strict=True))
        for row, s in zip(M, c, strict=True)
    ]
    return sum(r * r for r in rows)


@pytest.mark.parametrize(
    "build", [lambda x: Box(x, x), lambda x: Ellipsoid(0 * x[:, None], x), lambda x: PointSet(x[None])]
)
@pytest.mark.parametrize("d", [1, 2, 7])
def test_affine_norms_count_the_rounding_of_offsets_that_cancel(build, d):
    rng = np.random.default_rng(d)
    lost = 0
    for _ in range(60):
        x = rng.normal(size=d) * 10 ** rng.uniform(0, 6)
        M = rng.normal(size=(2, d))
        c = -M @ x
        exact = exact_square(M, c, x)
        bound = build(x).max_affine_norm(M, c)
        assert exact <= Fraction(bound) ** 2
        # of the size of rounding
        assert bound <= 1e-14 * d * np.linalg.norm(np.abs(M) @ np.abs(x))
        lost += exact > Fraction(float(np.linalg.norm(M @ x + c))) ** 2
    assert lost > 10  # float64 alone falls short


def test_zero_maps_and_zero_offsets_give_zero():
    for domain in (Box([-1.0], [2.0]), Ellipsoid([[1.0]], [3.0]), PointSet([[1.0], [2.0]]), Ball(2.0)):
        assert domain.max_affine_norm([[0.0]]) == 0.0
        assert domain.max_affine_norm([[0.0]], [0.0]) == 0.0


def test_layernorm_domain_holds_what_layernorm_gives():
    rng = np.random.default_rng(4)
    gain, bias = rng.normal(size=6), rng.normal(size=6)
    domain = LayerNormDomain(gain, bias)
    x = rng.normal(size=(50, 6))
    z = x - x.mean(axis=1, keepdims=True)
    tokens = gain * z / z.std(axis=1, keepdims=True) + bias
    np.testing.assert_allclose(domain.project(tokens), tokens, atol=1e-12)
    assert domain.contains(tokens)
    assert not domain.contains(tokens + 0.01)
    # on the boundary of its ellipsoid
    flat = Ellipsoid(domain.shape, domain.center)
    assert flat.contains(tokens)
    weights = np.linalg.lstsq(domain.shape, (tokens - bias).T, rcond=None)[0]
    np.testing.assert_allclose(np.linalg.norm(weights, axis=0), 1.0, rtol=1e-12)


def test_a_ball_without_dimension_exists_in_every_dimension():
    ball = Ball(2.0)
    assert ball.dim is None
    assert ball.max_norm == 2.0
    assert ball.contains([[2.0, 0.0]])
    assert not ball.contains([[2.0, 0.1, 0.0]])
    with pytest.raises(ValueError, match="dimension"):
        ball.sample(3, 0)
    assert Ball(2.0) == Ball(2.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Ball(0.0), "radius must be finite and positive"),
        (lambda: Ball(-1.0), "radius must be"),
        (lambda: Ball(np.inf), "radius must be"),
        (lambda: Ball("x"), "radius must be a number"),
        (lambda: Ball(1.0, 0), "dim must be at least 1"),
        (lambda: Ellipsoid([[np.nan]]), "shape must be finite"),
        (lambda: Ellipsoid(np.eye(2), [0.0]), "center must have 2 entries"),
        (lambda: LayerNormDomain([1.0]), "at least 2 entries"),
        (lambda: LayerNormDomain([1.0, 1.0], [0.0]), "bias must have 2 entries"),
        (lambda: Box([0.0, 1.0], [1.0, 0.0]), r"received 1 > 0 in coordinate 1"),
        (lambda: Box([0.0], [1.0, 2.0]), "upper must have 1 entries"),
        (lambda: Box([], []), "at least one entry"),
        (lambda: PointSet(np.zeros((0, 2))), "at least one point"),
    ],
)
def test_bad_domains(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", DOMAINS)
def test_samples_follow_the_seed(name):
    domain = DOMAINS[name]
    np.testing.assert_array_equal(domain.sample(4, 7), domain.sample(4, np.random.default_rng(7)))
    with pytest.raises(TypeError, match="rng"):
        domain.sample(4, None)
    with pytest.raises(ValueError, match="n must be"):
        domain.sample(0, 1)
    with pytest.raises(ValueError, match="dimension 3"):
        domain.project(np.zeros((2, 2)))
