"""The field part: never below what measures reach, exact on round domains, scaling, degenerate data, large spans."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from otattn.attention import L2Attention, MaskedAttention, SoftmaxAttention
from otattn.lipschitz.constants import _field_hull
from otattn.lipschitz.relaxations import field_certificate
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, LayerNormDomain, PointSet


def head(rng, d, e=None, rank=None):
    A = rng.standard_normal((d, d)) if rank is None else rng.standard_normal((d, rank)) @ rng.standard_normal((rank, d))
    return SoftmaxAttention(A, rng.standard_normal((e or d, d)), bias=rng.standard_normal(d))


def sphere_maximum(V, B, rng, starts=40):
    """max |Vz| |Bz| over unit z: many fixed-point ascents from random starts."""
    M1, M2, best = V.T @ V, B.T @ B, 0.0
    for z in rng.standard_normal((starts, V.shape[1])):
        for _ in range(300):
            a, b = z @ M1 @ z, z @ M2 @ z
            z = M1 @ z / a + M2 @ z / b
            z /= np.linalg.norm(z)
        best = max(best, np.linalg.norm(V @ z) * np.linalg.norm(B @ z))
    return best


def domains(rng, d):
    low = rng.standard_normal(d)
    yield Ball(1.7, d)
    yield Ellipsoid(rng.standard_normal((d, max(1, d - 1))), rng.standard_normal(d))
    yield Box(low, low + rng.random(d))
    yield PointSet(rng.standard_normal((12, d)))
    if d > 1:
        yield LayerNormDomain(rng.standard_normal(d), rng.standard_normal(d))


@pytest.mark.parametrize("d", [1, 2, 3, 5])
@pytest.mark.parametrize("e", [1, 4])
def test_no_measure_exceeds_the_bound_and_the_witness_attains_what_it_says(d, e):
    rng = np.random.default_rng(10 * d + e)
    attention = head(rng, d, e)
    for domain in domains(rng, d):
        bound = field_certificate(attention, domain=domain)
        assert bound.verify()
        assert bound.kind == "upper"
        for _ in range(15):
            points = domain.sample(int(rng.integers(2, 6)), rng)
            mu = DiscreteMeasure(points, rng.dirichlet(0.4 * np.ones(len(points))))
            jacobians = attention.field_jacobian(domain.sample(3, rng), mu)
            assert np.linalg.norm(jacobians, 2, axis=(1, 2)).max() <= bound.value
        C = bound.witness.covariance()
        attained = np.linalg.norm(attention.V @ C @ attention.A, 2)
        assert attained == pytest.approx(bound.details["attained"], rel=1e-9, abs=1e-14)
        assert attained <= bound.value
        assert domain.contains(bound.witness.points, tol=1e-7)


@pytest.mark.parametrize("d", [1, 2, 3, 8, 64])
def test_exact_on_round_domains(d):
    rng = np.random.default_rng(d)
    attention = head(rng, d, max(1, d - 1))
    bound = field_certificate(attention, domain=Ball(2.0))
    best = 4.0 * sphere_maximum(attention.V, attention.A.T, rng, starts=40 if d < 10 else 10)
    assert best <= bound.value <= best * (1 + 1e-6)
    assert bound.details["attained"] == pytest.approx(bound.value, rel=1e-8)
    E = rng.standard_normal((d, d))
    flat = field_certificate(attention, domain=Ellipsoid(E, np.ones(d)))
    best = sphere_maximum(attention.V @ E, attention.A.T @ E, rng, starts=40 if d < 10 else 10)
    assert best <= flat.value <= best * (1 + 1e-6)


@pytest.mark.parametrize("solver", ["CLARABEL", "scs"])
def test_solvers_agree_on_round_domains_and_boxes(solver):
    rng = np.random.default_rng(3)
    attention = head(rng, 4)
    search = field_certificate(attention, domain=Ball(1.0)).value
    # SCS stops at 1e-5 or so; whatever it proposes may only be above the exact value
    assert (
        search * (1 - 1e-10)
        <= field_certificate(attention, domain=Ball(1.0), solver=solver).value
        <= search * (1 + 1e-6)
    )
    box = Box(-np.ones(4), np.ones(4))
    vertices, program = (
        field_certificate(attention, domain=box),
        field_certificate(attention, domain=box, solver=solver),
    )
    assert program.relaxation != vertices.relaxation
    assert vertices.value <= program.value * (1 + 1e-9)
    assert program.verify()


@pytest.mark.parametrize("d", [1, 2, 4, 7, 10])
def test_box_against_vertices(d):
    rng = np.random.default_rng(d)
    signs = np.array(list(itertools.product([-1.0, 0.0, 1.0], repeat=d))) if d < 8 else None
    if signs is None:
        signs = np.array(list(itertools.product([-1.0, 1.0], repeat=d)))
    excess = []
    for _ in range(7):
        attention = head(rng, d)
        low = rng.standard_normal(d)
        r = 0.5 * rng.random(d)
        step = signs * r
        best = (np.linalg.norm(step @ attention.V.T, axis=1) * np.linalg.norm(step @ attention.A, axis=1)).max()
        bound = field_certificate(attention, domain=Box(low, low + 2 * r))
        assert best <= bound.value
        excess.append(bound.value / best)
    # two atoms with a free coordinate may beat those of this enumeration
    assert np.median(excess) <= 1 + 1e-9
    assert max(excess) <= 1.1


@pytest.mark.parametrize("d", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("seed", range(3))
def test_boxes_are_exact(d, seed):
    rng = np.random.default_rng([d, seed])
    attention, r = head(rng, d), rng.random(d)
    bound = field_certificate(attention, domain=Box(-r, r))
    assert bound.details["attained"] <= bound.value <= bound.details["attained"] * (1 + 1e-6)
    assert bound.verify()
    # measures with any number of atoms, climbed from random ones, never do better
    for _ in range(200):
        c = int(rng.integers(2, 6))
        X = np.where(rng.random((c, d)) < 0.7, rng.choice([-1.0, 1.0], (c, d)), rng.uniform(-1, 1, (c, d))) * r
        w = rng.dirichlet(np.ones(c))
        Y = X - w @ X
        assert np.linalg.norm(attention.V @ (w[:, None] * Y).T @ Y @ attention.A, 2) <= bound.value
    # a level that is too low is raised, one that is no number is refused
    low = replace(bound, multipliers={"level": 0.9 * bound.multipliers["level"]})
    assert low.proved_value() >= bound.details["attained"]
    assert not replace(bound, multipliers={"level": np.array([-1.0])}).verify()


def test_a_box_where_no_vertex_is_best():
    """``|V v| |A^T v|`` with V and A^T far out of balance at every vertex: the best step lies within an edge."""
    c, s = np.cos(0.6), np.sin(0.6)
    attention = SoftmaxAttention(np.outer([1.0, -1.0], [c, s]), [[c, s]])
    value = field_certificate(attention, domain=Box([-1, -1], [1, 1])).value
    y = np.linspace(-1, 1, 20001)
    best = ((c + s * y) * (1.0 - y)).max()  # on the edge x = 1; its ends have 0 and 2 (c - s)
    assert best <= value <= best * (1 + 1e-6)
    assert best > 1.5 * 2.0 * (c - s)


def test_low_rank_ascent_matches_the_semidefinite_program():
    rng = np.random.default_rng(0)
    attention, box = head(rng, 41), Box(-np.ones(41), np.ones(41))
    ascent = field_certificate(attention, domain=box)
    assert ascent.solver == "low-rank ascent"
    program = field_certificate(attention, domain=box, solver="SCS")
    # both repaired, so both valid; the ascent is the more accurate of the two
    assert ascent.details["attained"] <= ascent.value <= program.value * (1 + 1e-4)
    assert ascent.verify()


def test_point_set_is_covered_by_its_hull_and_by_its_ball():
    rng = np.random.default_rng(4)
    attention = head(rng, 3)
    points = rng.standard_normal((40, 3))
    bound = field_certificate(attention, domain=PointSet(points)).value
    for _ in range(50):
        mixed = rng.dirichlet(np.ones(40) * 0.1, size=4) @ points
        C = DiscreteMeasure(mixed, rng.dirichlet(np.ones(4))).covariance()
        assert np.linalg.norm(attention.V @ C @ attention.A, 2) <= bound
    radius = np.linalg.norm(points, axis=1).max()
    assert bound <= field_certificate(attention, domain=Ball(radius)).value
    far = field_certificate(attention, domain=PointSet(points + 1e6)).value
    assert far == pytest.approx(bound, rel=1e-8)  # the points themselves were rounded at 1e6 * eps
    assert far >= bound * (1 - 1e-9)
    assert field_certificate(attention, domain=PointSet(points[:1])).value == 0.0


def test_large_point_sets_go_through_blocks(monkeypatch):
    monkeypatch.setattr(_field_hull, "_BLOCK", 16)
    rng = np.random.default_rng(5)
    attention = head(rng, 2)
    points = rng.standard_normal((90, 2))
    keys, values = points @ attention.A, points @ attention.V.T
    dk = np.linalg.norm(keys[:, None] - keys[None], axis=2)
    dv = np.linalg.norm(values[:, None] - values[None], axis=2)
    best = (dk * dv).max() / 4
    bound = field_certificate(attention, domain=PointSet(points))
    assert bound.details["attained"] == pytest.approx(best, rel=1e-10)
    assert best <= bound.value <= 1.1 * best


@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1e6])
@pytest.mark.parametrize("kind", ["ball", "ellipsoid", "box", "points", "box-sdp"])
def test_scaling_laws(factor, kind):
    rng = np.random.default_rng(6)
    A, V, points = rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), rng.standard_normal((9, 3))
    domain = {
        "ball": Ball(1.3),
        "ellipsoid": Ellipsoid(np.diag([1.0, 2.0, 0.5]), np.ones(3)),
        "box": Box([-1, 0, 1], [1, 1, 1.5]),
        "points": PointSet(points),
        "box-sdp": Box([-1, 0, 1], [1, 1, 1.5]),
    }[kind]
    options = {"solver": "CLARABEL"} if kind == "box-sdp" else {}
    plain = field_certificate(SoftmaxAttention(A, V), domain=domain, **options).value
    inverse = field_certificate(SoftmaxAttention(factor * A, V / factor), domain=domain, **options).value
    # the interior-point method sees the same data up to rounding, and stops a rounding apart
    tol = 1e-7 if kind == "box-sdp" else 1e-11
    assert inverse == pytest.approx(plain, rel=tol)
    both = field_certificate(SoftmaxAttention(factor * A, factor * V), domain=domain, **options).value
    assert both == pytest.approx(plain * factor**2, rel=tol, abs=0)
    if kind == "ball":
        wide = field_certificate(SoftmaxAttention(A, V), domain=Ball(1.3 * factor)).value
        assert wide == pytest.approx(plain * factor**2, rel=1e-11, abs=0)


@pytest.mark.parametrize("zero", ["A", "V", "both"])
def test_zero_matrices_give_zero(zero):
    A = np.zeros((3, 3)) if zero in ("A", "both") else np.eye(3)
    V = np.zeros((2, 3)) if zero in ("V", "both") else np.ones((2, 3))
    attention = SoftmaxAttention(A, V)
    for domain in (Ball(1.0), Ellipsoid(np.eye(3)), Box(-np.ones(3), np.ones(3)), PointSet(np.eye(3))):
        bound = field_certificate(attention, domain=domain)
        assert bound.value == 0.0
        assert bound.verify()
        assert bound.verify(rigorous=True)
    point = field_certificate(SoftmaxAttention(np.eye(3), np.eye(3)), domain=Box(np.ones(3), np.ones(3)))
    # a box without width: zero up to the outward rounding of its vertices
    assert 0.0 <= point.value <= 1e-12


def test_known_values():
    assert field_certificate(SoftmaxAttention([[-2.0]], [[3.0]]), domain=Ball(2.0)).value == pytest.approx(
        24.0, rel=1e-10
    )
    # V and A^T see orthogonal directions: the best u is halfway
    attention = SoftmaxAttention(np.diag([0.0, 1.0]), np.array([[1.0, 0.0]]))
    assert field_certificate(attention, domain=Ball(1.0)).value == pytest.approx(0.5, rel=1e-9)
    skew = SoftmaxAttention([[0.0, 5.0], [-5.0, 0.0]], np.eye(2))
    assert field_certificate(skew, domain=Ball(1.0)).value == pytest.approx(5.0, rel=1e-10)


def test_large_dimension_is_reduced_to_its_span():
    rng = np.random.default_rng(7)
    d, r = 384, 32
    A = rng.standard_normal((d, r)) @ rng.standard_normal((r, d)) / d
    V = rng.standard_normal((r, d))
    bound = field_certificate(SoftmaxAttention(A, V), domain=Ball(3.0))
    assert bound.details["attained"] <= bound.value <= bound.details["attained"] * (1 + 1e-6)


def test_masked_attention_has_the_same_field_part_and_others_are_refused():
    attention = SoftmaxAttention(np.eye(2), np.eye(2))
    masked = field_certificate(MaskedAttention(attention), domain=Ball(1.0))
    assert masked.value == field_certificate(attention, domain=Ball(1.0)).value
    with pytest.raises(ValueError, match="SoftmaxAttention"):
        field_certificate(L2Attention(np.eye(2), np.eye(2), np.eye(2)), domain=Ball(1.0))
    with pytest.raises(ValueError, match="dimension 2 like the attention, received 3"):
        field_certificate(attention, domain=Ball(1.0, 3))
    with pytest.raises(ValueError, match="domain must be"):
        field_certificate(attention, domain=1.0)
    with pytest.raises(ValueError, match="solver must be one of"):
        field_certificate(attention, domain=Ball(1.0), solver="GUROBI")
    with pytest.raises(ValueError, match="None for a PointSet"):
        field_certificate(attention, domain=PointSet(np.eye(2)), solver="SCS")
