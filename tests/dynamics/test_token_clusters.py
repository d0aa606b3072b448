"""Clusters, leaders and limiting polytopes."""

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.integrate import quad

from otattn.attention import (
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    SigmoidAttention,
    SoftmaxAttention,
)
from otattn.dynamics import flow, limit_polytope, renyi_centres, token_clusters, token_leaders
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

I2 = np.eye(2)
STILL = SoftmaxAttention(I2, 0 * I2)


def still(points, weights=None):
    """A trajectory that does not move."""
    return flow(STILL, DiscreteMeasure(points, weights), t_span=(0, 1), t_eval=[0.0, 1.0])


# ------------------------------------------------------------------------------------------------ clusters


def test_labels_and_masses():
    X = [[5.0, 0.0], [0.0, 0.0], [5.1, 0.0], [9.0, 9.0], [0.1, 0.0], [0.2, 0.0]]
    out = token_clusters(still(X, [0.1, 0.2, 0.3, 0.0, 0.2, 0.2]), tol=0.15)
    assert out.labels[0].tolist() == [0, 1, 0, -1, 1, 1]  # a chain is one cluster, no weight is no cluster
    assert out.counts.tolist() == [2, 2]
    assert np.allclose(out.masses[0], [0.4, 0.6])
    assert token_clusters(still([[1.0, 2.0]])).counts.tolist() == [1, 1]


def test_single_linkage_is_scipys():
    X = np.random.default_rng(0).normal(size=(30, 2))
    out = token_clusters(still(X), tol=0.4)
    assert out.counts[0] == fcluster(linkage(X, "single"), 0.4, "distance").max()


def test_time_to_cluster_on_the_circle():
    """Two tokens: the time at which their chord falls below tol, from the scalar equation of the angle."""
    theta, tol = 2.5, 0.1
    X = np.array([[1.0, 0.0], [np.cos(theta), np.sin(theta)]])
    end = 2 * np.arcsin(tol / 2)
    exact = quad(lambda a: (1 + np.exp(1 - np.cos(a))) / (2 * np.sin(a)), end, theta)[0]
    times = np.linspace(0, 2 * exact, 401)
    out = token_clusters(
        flow(SoftmaxAttention(I2, I2), X, t_span=(0, times[-1]), t_eval=times, normalization="sphere"), tol=tol
    )
    assert exact <= out.time_to(1) <= exact + times[1]
    assert out.time_to(2) == 0.0
    assert out.counts[[0, -1]].tolist() == [2, 1]
    plateaus = out.plateaus()
    assert [p.count for p in plateaus] == [2, 1]
    assert plateaus[0].duration == pytest.approx(out.time_to(1))
    assert token_clusters(still(X), tol=tol).time_to(1) == np.inf


def test_metastability_on_the_sphere():
    """Three groups, sharp attention: three clusters soon, and for long."""
    angles = np.array([0.0, 0.1, 0.15, 2.0, 2.1, 4.0, 4.05])
    X = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    times = np.linspace(0, 60, 601)
    out = token_clusters(
        flow(SoftmaxAttention(5 * I2, I2), X, t_span=(0, 60), t_eval=times, normalization="sphere"), tol=0.02
    )
    assert (np.diff(out.counts) <= 0).all()
    longest = max(out.plateaus(), key=lambda p: p.duration)
    assert longest.count == 3
    assert longest.duration > 5 * longest.start


def test_leaders():
    X = np.array([[2.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    out = token_leaders(still(X))
    assert out.follows[0].tolist() == [0, 0, 2]
    assert out.leader[0].tolist() == [True, False, True]
    assert out.followers[0].tolist() == [2, 0, 1]
    assert out.counts.tolist() == [2, 2]
    P = np.exp(X @ X.T)
    assert np.allclose(out.received[0], (P / P.sum(axis=1, keepdims=True)).mean(axis=0), rtol=1e-13)
    weighted = token_leaders(still(X, [0.0, 0.5, 0.5]))
    assert weighted.follows[0].tolist() == [1, 1, 2]
    assert weighted.received[0].sum() == pytest.approx(1.0)
    assert weighted.received[0][0] == 0.0
    masked = token_leaders(flow(MaskedAttention(STILL), X[::-1], t_span=(0, 1), t_eval=[0.0]))
    assert masked.follows[0].tolist() == [0, 1, 2]
    # nearest neighbours under L2 attention: everybody leads
    heads = MultiHeadAttention([STILL, L2Attention(I2, I2, 0 * I2)])
    assert token_leaders(flow(heads, X, t_span=(0, 1), t_eval=[0.0]), head=1).counts.tolist() == [3]
    with pytest.raises(ValueError, match="softmax or L2"):
        token_leaders(flow(SigmoidAttention(I2, I2), X, t_span=(0, 1)))
    with pytest.raises(ValueError, match="head"):
        token_leaders(flow(heads, X, t_span=(0, 1)), head=2)


# ------------------------------------------------------------------------------------------------ polytopes


@pytest.mark.parametrize("d", [2, 3])
def test_the_limit_of_a_square(d):
    """Tokens at the vertices of a cross-polytope and inside it, rescaled: they go to vertices, and those stay."""
    corners = np.vstack([np.eye(d), -np.eye(d)])
    X = np.vstack([corners, 0.3 * np.random.default_rng(0).normal(size=(12, d)) / d])
    out = flow(SoftmaxAttention(4 * np.eye(d), np.eye(d)), X, t_span=(0, 7), normalization="rescaled")
    polytope = limit_polytope(out)
    assert polytope.n_vertices == 2 * d
    assert polytope.affine_dim == d
    off_axis = np.sort(np.abs(polytope.vertices), axis=1)[:, :-1]
    assert off_axis.max() < 1e-2  # tokens of a group still differ by e^{-t}
    assert sum(len(m) for m in polytope.members) >= len(X) - 4  # a few may wait on an edge
    assert polytope.boundary_distance.max() < polytope.tol


def test_near_vertices_and_flat_points_are_no_vertices():
    square = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    near = square + 1e-5
    edge = np.array([[0.5, -1e-4], [0.5, 0.5]])
    out = limit_polytope(still(np.vstack([square, near, edge])), tol=1e-3)
    assert out.n_vertices == 4
    assert [len(m) for m in out.members] == [2, 2, 2, 2]
    assert out.boundary_distance[-1] == pytest.approx(0.5, abs=1e-3)
    assert limit_polytope(still(np.vstack([square, edge])), tol=1e-6).n_vertices == 5
    assert limit_polytope(still(square, [0.4, 0.3, 0.3, 0.0])).n_vertices == 3


def test_degenerate_hulls():
    line = np.outer([0.0, 1.0, 3.0, 0.5], [1.0, 2.0]) + 5.0
    out = limit_polytope(still(line))
    assert (out.n_vertices, out.affine_dim) == (2, 1)
    assert out.boundary_distance == pytest.approx([0.0, np.sqrt(5), 0.0, 0.5 * np.sqrt(5)], abs=1e-9)
    point = limit_polytope(still(np.full((4, 2), 1e3)))
    assert (point.n_vertices, point.affine_dim) == (1, 0)
    assert limit_polytope(still([[1.0, 2.0]])).n_vertices == 1
    flat = np.random.default_rng(0).normal(size=(10, 2)) @ np.random.default_rng(1).normal(size=(2, 9))
    still_high = flow(SoftmaxAttention(np.eye(9), 0 * np.eye(9)), flat, t_span=(0, 1), t_eval=[1.0])
    assert limit_polytope(still_high).affine_dim == 2
    corners = np.vstack([np.eye(9), np.full((1, 9), 0.1)])
    simplex = flow(SoftmaxAttention(np.eye(9), 0 * np.eye(9)), corners, t_span=(0, 1), t_eval=[1.0])
    high = limit_polytope(simplex)
    assert (high.n_vertices, high.affine_dim) == (10, 9)
    assert high.boundary_distance.size == 0


def test_nothing_to_cluster():
    empty = flow(LinearAttention([[1.0]], [[1.0]]), [[1.0]], t_span=(0, 1), t_eval=[0.9])
    for function in (token_clusters, limit_polytope):
        with pytest.raises(ValueError, match="at least one time"):
            function(empty)


# ------------------------------------------------------------------------------------------------ Renyi centres


def test_centres_are_a_packing_that_leaves_no_room():
    """Centres lie apart, every token is near one that is not later, and strong ones are far from all that is earlier."""
    X = np.random.default_rng(0).standard_normal((200, 3))
    D = np.linalg.norm(X[:, None] - X[None], axis=2)
    centres, strong = renyi_centres(X, 0.8), renyi_centres(X, 0.8, strong=True)
    assert set(strong) <= set(centres)
    assert centres[0] == strong[0] == 0
    assert (D[np.ix_(centres, centres)] + 9.0 * np.eye(len(centres)) > 0.8).all()
    for i in range(len(X)):
        assert (D[i, centres[centres <= i]] <= 0.8).any()
        assert (i in strong) == (D[i, :i] > 0.8).all()
    assert 1 < len(strong) < len(centres) < len(X)
    assert renyi_centres(X, 99.0).tolist() == [0]
    assert renyi_centres(X, 0.0).tolist() == list(
        range(200)
    )  # a token at the place of another has no room, none is here
    assert renyi_centres([[1.0], [1.0]], 0.0).tolist() == [0]
    with pytest.raises(ValueError, match="radius"):
        renyi_centres(X, -1.0)


def test_masked_tokens_on_the_circle_gather_at_the_centres():
    """At beta = 64, r = 3 / 8 the strong centres have hardly moved by t = 8; at beta = 1 all tokens end at the first."""
    beta, X = 64.0, np.random.default_rng(0).standard_normal((32, 2))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    masked = MaskedAttention(SoftmaxAttention(beta * I2, I2))
    run = flow(
        masked, SpaceTimeMeasure.from_sequence(X), t_span=(0.0, 8.0), normalization="sphere", rtol=1e-6, atol=1e-9
    )
    r = 3.0 / beta**0.5
    strong = renyi_centres(X, r, strong=True)
    assert len(strong) >= 4
    assert np.linalg.norm(run.points[-1, strong] - X[strong], axis=1).max() < 0.2 * r
    mild = MaskedAttention(SoftmaxAttention(I2, I2))
    late = flow(
        mild, SpaceTimeMeasure.from_sequence(X[:8]), t_span=(0.0, 60.0), normalization="sphere", rtol=1e-6, atol=1e-9
    )
    assert np.abs(late.points[-1] - X[0]).max() < 1e-3
    assert np.abs(late.points[:, 0] - X[0]).max() < 1e-9
