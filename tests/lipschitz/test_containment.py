"""Sets of tokens inside others, decided for the floats as exact numbers, and bounds that cover them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from otattn import bounds
from otattn.attention import L2Attention, MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.containment import NearTokens, domain_contains, same
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, LayerNormDomain, PointSet

ABOVE = float(np.nextafter(1.0, 2.0))
BELOW = float(np.nextafter(1.0, 0.0))
POINT = np.array([[0.6, 0.8]])
"""Of norm a little above 1 in exact arithmetic: 0.6 and 0.8 are rounded to 0.59999... and 0.80000...4."""


def test_the_point_is_outside_the_unit_ball_by_less_than_a_rounding() -> None:
    assert float(np.linalg.norm(POINT)) == 1.0
    assert domain_contains(Ball(1.0), PointSet(POINT)) is not None
    assert domain_contains(Ball(ABOVE), PointSet(POINT)) is None


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (None, Ball(1e20)),
        (Ball(1.0), Ball(1.0)),
        (Ball(1.0), Ball(BELOW)),
        (Ball(1.5), Box([-1.0, 0.0], [1.0, 1.0])),
        (Ball(5.0), Box([3.0], [5.0])),
        (Ball(1.5), NearTokens(np.array([[0.0, 1.0]]), 0.5)),
        (Ball(1.0), PointSet([[1.0, 0.0], [0.0, -1.0]])),
        (Box([-1.0, -1.0], [1.0, 1.0]), Ball(1.0)),
        (Box([-1.0, -1.0], [1.0, 1.0]), Box([-1.0, -0.5], [1.0, 1.0])),
        (Box([-1.0, -1.0], [1.0, 1.0]), PointSet([[1.0, -1.0], [0.0, 0.0]])),
        (Box([-1.0, -1.0], [1.0, 1.0]), NearTokens(np.array([[0.5, 0.0], [0.0, -0.5]]), 0.5)),
        (Ellipsoid(np.eye(2), [1.0, 0.0]), Ellipsoid(np.eye(2), [1.0, 0.0])),
        (LayerNormDomain([1.0, 2.0]), LayerNormDomain([1.0, 2.0])),
        (PointSet(POINT), PointSet(POINT)),
        (DiscreteMeasure(POINT), DiscreteMeasure(POINT)),
        (NearTokens(POINT, 0.1), NearTokens(POINT.copy(), 0.1)),
    ],
)
def test_what_is_inside(outer: object, inner: object) -> None:
    assert domain_contains(outer, inner) is None


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (Ball(1.0), None),
        (Ball(1.0), Ball(ABOVE)),
        (Ball(1.0), Box([-1.0, 0.0], [0.0, 5e-324])),
        (Ball(1.5), NearTokens(np.array([[0.0, 1.0]]), 0.5 + 1e-16 * 2)),
        (Ball(0.5), NearTokens(np.array([[0.0, 0.0]]), 0.6)),
        (Ball(1e-200), PointSet([[1e-200, 1e-220]])),
        (Box([-1.0], [1.0]), Ball(ABOVE)),
        (Box([-1.0, -1.0], [1.0, BELOW]), Ball(1.0)),
        (Box([-1.0, -1.0], [1.0, 1.0]), Box([-1.0, -1.0], [1.0, ABOVE])),
        (Box([-1.0, -1.0], [1.0, 1.0]), Box([-1.0], [1.0])),
        (Box([-1.0, -1.0], [1.0, 1.0]), PointSet([[0.0, 0.0], [0.0, ABOVE]])),
        (Box([-1.0, 0.0], [1.0, 1.0]), NearTokens(np.array([[0.0, 0.3]]), float(np.nextafter(0.3, 1.0)))),
        (Ellipsoid(np.eye(2)), Ball(0.5)),
        (Ellipsoid(np.eye(2)), Ellipsoid(0.5 * np.eye(2))),
        (Ellipsoid(np.eye(2)), Ellipsoid(np.eye(2), [1e-300, 0.0])),
        (Ball(10.0), Ellipsoid(np.eye(2))),
        (PointSet([[0.0], [1.0]]), PointSet([[0.0], [0.5]])),
        (PointSet([[0.0], [1.0]]), Box([0.0], [1.0])),
        (NearTokens(POINT, 0.1), NearTokens(POINT, 0.1 + 1e-16)),
        (NearTokens(POINT, 0.1), PointSet(POINT)),
        (DiscreteMeasure([[0.0], [1.0]]), DiscreteMeasure([[0.0], [1.0]], [0.4, 0.6])),
        (Ball(1.0), DiscreteMeasure([[0.0]])),
    ],
)
def test_what_is_outside_or_not_known_to_be_inside(outer: object, inner: object) -> None:
    assert isinstance(domain_contains(outer, inner), str)


@pytest.mark.parametrize("seed", range(20))
def test_random_sets_against_samples(seed: int) -> None:
    """Whatever is called inside holds every sampled token of the inner set."""
    rng = np.random.default_rng(seed)
    side = rng.uniform(0.0, 0.8, 2)
    inner = [
        Ball(rng.uniform(0.1, 1.5)),
        Box(-side, side * rng.uniform(0.1, 1.0, 2)),
        PointSet(rng.uniform(-1.0, 1.0, (4, 2))),
        NearTokens(rng.uniform(-0.7, 0.7, (3, 2)), rng.uniform(0.0, 0.5)),
    ][seed % 4]
    for outer in (Ball(rng.uniform(0.3, 2.0)), Box([-rng.uniform(0.2, 1.4)] * 2, [rng.uniform(0.2, 1.4)] * 2)):
        u = rng.standard_normal((400, 2))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        if isinstance(inner, Ball):
            x = inner.radius * u
        elif isinstance(inner, Box):
            x = rng.uniform(inner.lower, inner.upper, (400, 2))
        elif isinstance(inner, PointSet):
            x = inner.points
        else:
            x = (inner.points[:, None] + inner.radius * u).reshape(-1, 2)
        room = 1e-12
        if isinstance(outer, Ball):
            inside = np.linalg.norm(x, axis=1).max() <= outer.radius + room
        else:
            inside = (x >= outer.lower - room).all() and (x <= outer.upper + room).all()
        if domain_contains(outer, inner) is None:
            assert inside
        elif not isinstance(inner, Box):  # of a box the farthest vertex may be mirrored, and samples miss the vertices
            farther = np.abs(x).max() if isinstance(outer, Box) else np.linalg.norm(x, axis=1).max()
            least = min(outer.upper.min(), -outer.lower.max()) if isinstance(outer, Box) else outer.radius
            assert farther > 0.98 * least


# --- the map


def test_maps_of_the_same_numbers() -> None:
    A, V = np.array([[1.0, 0.2], [0.0, 1.0]]), np.eye(2)
    head = SoftmaxAttention(A, V)
    assert same(head, SoftmaxAttention(A.copy(), V))
    assert same(MultiHeadAttention([head, head]), MultiHeadAttention([head, SoftmaxAttention(A, V)]))
    nudged = A.copy()
    nudged[0, 1] = np.nextafter(0.2, 1.0)
    factored = SoftmaxAttention.from_qkv(A, np.eye(2), V, scale=1.0)
    for other in (
        SoftmaxAttention(nudged, V),
        SoftmaxAttention(A, V[:1]),
        SoftmaxAttention(A, V, bias=[0.0, 1e-300]),
        SoftmaxAttention(A, V, value_bias=[0.0, 1e-300]),
        MaskedAttention(head),
        L2Attention(A, A, V),
        MultiHeadAttention([head]),
        factored,
        None,
        "head",
    ):
        assert not same(head, other)
        assert not same(other, head)
    assert not same(MultiHeadAttention([head]), MultiHeadAttention([head], [V]))
    assert not same(MultiHeadAttention([head]), MultiHeadAttention([head, head]))


def test_a_bound_covers_what_it_says_only() -> None:
    head = SoftmaxAttention([[1.0, 0.0], [0.3, 1.0]], np.eye(2))
    bound = bounds.column_bound(head, radius=2.0, p=3.0)
    same = SoftmaxAttention(head.A, head.V)
    assert bound.covers(same, domain=Ball(1.0), n=7, p=3.0) is None
    assert bound.covers(same, domain=Box([-1.0, -1.0], [1.0, 1.0]), n=None, p=3.0) is None
    refused = (
        (MaskedAttention(head), Ball(1.0), 7, 3.0, "another attention map"),
        (head, Ball(2.1), 7, 3.0, "does not contain"),
        (head, None, 7, 3.0, "not known to contain"),
        (head, Ball(1.0), 7, 2.0, "holds for p = 3"),
        (head, Ball(1.0), 7, float("nan"), "holds for p = 3"),
    )
    for attention, domain, n, p, message in refused:
        assert message in str(bound.covers(attention, domain=domain, n=n, p=p))
        if domain is not None:
            assert not bound.verify(attention, domain=domain, n=n, p=p)
    for quantity in ("field", "column_sum", "row", "local"):
        assert "bounds 'lipschitz'" in str(bound.covers(head, domain=Ball(1.0), n=7, p=3.0, quantity=quantity))
    few = bounds.column_bound(head, radius=2.0, n=5)
    assert few.covers(head, domain=Ball(1.0), n=5) is None
    for n in (None, 4, 6):
        assert "holds for n = 5" in str(few.covers(head, domain=Ball(1.0), n=n))
        assert not few.verify(n=n)
    assert "a lower bound" in str(replace(bound, kind="lower").covers(head, domain=Ball(1.0), n=7, p=3.0))
