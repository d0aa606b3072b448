"""The polytope that rescaled tokens tend to, with its vertices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.spatial import ConvexHull

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.dynamics.clustering import linked
from otattn.dynamics.trajectory import Trajectory

__all__ = ["LimitPolytope", "limit_polytope"]

LARGEST_HULL_DIM = 7
"""Qhull lists facets, of which there are too many in higher dimension; vertices are then found by projections alone."""


@dataclass(frozen=True, eq=False)
class LimitPolytope(Result):
    """The convex hull of tokens, with vertices that stand apart.

    Attributes
    ----------
    vertices : ndarray (m, d)
        Each the mean of the tokens that sit at it.
    members : tuple of m index arrays
        The tokens at each vertex.
    affine_dim : int
        Dimension of the hull: 0 for a point, 1 for a segment.
    boundary_distance : ndarray (n,)
        Distance of each token of positive weight to the boundary of the hull, inside its affine hull; empty when the
        hull has no facets listed (dimensions above 7).
    time : float
    tol : float
        Absolute distance below which tokens are one vertex, and a point counts as on the hull of others.
    """

    vertices: Array
    members: tuple[NDArray[np.intp], ...]
    affine_dim: int
    boundary_distance: Array
    time: float
    tol: float

    @property
    def n_vertices(self) -> int:
        """Number of vertices."""
        return len(self.vertices)

    def __repr__(self) -> str:
        return f"LimitPolytope({self.n_vertices} vertices, dim={self.affine_dim} in R^{self.vertices.shape[1]}, t={self.time:g})"


def limit_polytope(trajectory: Trajectory, *, k: int = -1, tol: float = 1e-3) -> LimitPolytope:
    """The convex hull of the tokens at ``times[k]``, as a polytope with vertices that are further than ``tol`` apart.

    For ``V = I`` and A positive definite the rescaled tokens ``e^{-t} x`` tend to 0 or to the boundary of a convex
    polytope: follow them with ``flow(..., normalization="rescaled")`` first.

    Flat clouds are projected to their affine hull (singular values above ``tol`` times the largest). Tokens within
    ``tol`` of each other (single linkage) stand for one point; a point within ``tol`` of the convex hull of the other
    vertices is none.

    Parameters
    ----------
    trajectory : Trajectory
    k : int
        Index of the time, the last by default.
    tol : float
        Relative to the diameter of the tokens.

    Returns
    -------
    LimitPolytope

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.dynamics import flow
    >>> X = [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.2, 0.1]]
    >>> rescaled = flow(SoftmaxAttention(3 * np.eye(2), np.eye(2)), X, t_span=(0.0, 6.0), normalization="rescaled")
    >>> limit_polytope(rescaled)
    LimitPolytope(4 vertices, dim=2 in R^2, t=6)

    References
    ----------
    Geshkovski, Letrouit, Polyanskiy, Rigollet, "The emergence of clusters in self-attention dynamics", 2023.
    """
    if not len(trajectory):
        raise ValueError("trajectory must hold at least one time, received none; choose t_eval before the blow-up.")
    level = check.positive(tol, "tol")
    if level > 1.0:
        raise ValueError(f"tol must be at most 1 (it is relative to the cloud's size), received {tol!r}.")
    live = np.flatnonzero(trajectory.weights > 0)
    x = check.moderate(trajectory.points[k][live], "trajectory")
    centre = x.mean(axis=0)
    y = x - centre
    size = float(np.linalg.norm(y, axis=1).max())
    time = float(trajectory.times[k])
    # a cloud that is one point but for rounding (of its offset from the origin)
    if size <= max(1e-12 * float(np.abs(x).max()), 1e-300):
        return LimitPolytope(centre[None], (live,), 0, np.zeros(len(x)), time, 0.0)
    near = 2.0 * level * size
    _, s, Wt = np.linalg.svd(y, full_matrices=False)
    r = int((s > level * s[0]).sum())
    z = y @ Wt[:r].T
    raw = linked(z, near)
    groups = [np.flatnonzero(raw == c) for c in np.unique(raw)]
    points = np.stack([z[g].mean(axis=0) for g in groups])
    chosen = _vertices(points, r, near)
    chosen.sort(key=lambda c: int(groups[c][0]))
    members = tuple(live[groups[c]] for c in chosen)
    vertices = np.stack([x[groups[c]].mean(axis=0) for c in chosen])
    return LimitPolytope(check.frozen(vertices), members, r, check.frozen(_depth(z, points[chosen], r)), time, near)


def _vertices(points: Array, r: int, near: float) -> list[int]:
    """Indices of the points that are further than ``near`` from the hull of the other vertices."""
    if r == 1:
        candidates = sorted({int(points[:, 0].argmin()), int(points[:, 0].argmax())})
    elif r <= LARGEST_HULL_DIM and len(points) > r + 1:
        candidates = [int(v) for v in ConvexHull(points).vertices]
    else:
        candidates = list(range(len(points)))
    while len(candidates) > 1:
        gaps = [_distance(points[c], points[[o for o in candidates if o != c]]) for c in candidates]
        least = int(np.argmin(gaps))
        if gaps[least] > near:
            break
        candidates.pop(least)
    return candidates


def _distance(p: Array, others: Array) -> float:
    """Distance of p to a convex hull, by non-negative least squares with the sum of the weights penalised to one."""
    scale = max(float(np.abs(others - p).max()), 1e-300)
    M = np.vstack([(others - p).T / scale, np.full(len(others), 1e4)])
    weights, _ = nnls(M, np.append(np.zeros(len(p)), 1e4))
    total = float(weights.sum())
    weights = weights / total if total > 0 else np.full(len(others), 1.0 / len(others))
    return float(np.linalg.norm(weights @ others - p))


def _depth(z: Array, vertices: Array, r: int) -> Array:
    """Distance of the tokens to the boundary of the polytope, inside its affine hull."""
    if r == 1:
        low, high = float(vertices.min()), float(vertices.max())
        return np.maximum(np.minimum(z[:, 0] - low, high - z[:, 0]), 0.0)
    if r > LARGEST_HULL_DIM or len(vertices) <= r:
        return np.empty(0)
    equations = ConvexHull(vertices).equations
    return np.maximum(-(z @ equations[:, :-1].T + equations[:, -1]).max(axis=1), 0.0)
