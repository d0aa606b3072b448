"""The local constant at an explicit measure, through the attention map's own Jacobian, with the functional behind it.

This is the path by which every witness is evaluated; it shares no formula with the ascents on clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.sum_of_norms import ascend_sum_of_norms
from otattn.lipschitz.lower.charts import Chart, tangent
from otattn.lipschitz.lower.problem import Problem
from otattn.lipschitz.lower.singular import leading_direction

SLOPE_STEP = 6e-6
"""About the cube root of the rounding unit: what a central difference of first derivatives loses least at."""
DENSE_LIMIT = 400
"""Jacobians of at most this many rows or columns are decomposed densely."""


@dataclass(frozen=True, eq=False)
class Extremal:
    """A local constant and the linear functional of the derivatives that attains it.

    ``functional(mu)`` evaluates the same functional at another measure of as many atoms: its derivative in atoms and
    weights is that of the constant (envelope theorem).
    """

    value: float
    part: str
    functional: Callable[[Any], float]
    slope: Callable[[Array], Array] | None = None
    """Of the atoms' latents ``(c, k)``: the gradient of the constant in them at fixed weights, where two products give it."""


def extremal(problem: Problem, mu: Any, counts: Array | None) -> Extremal:
    r"""The W_p local constant of ``mu`` for displacements that stay in the domain, from below.

    Parameters
    ----------
    mu : measure
        Atoms of positive weight in the domain.
    counts : ndarray (c,) or None
        Tokens at each atom: only atoms of two tokens or more can split. None: every atom can, in any proportion.

    Notes
    -----
    p = 2: the norm of ``W^{1/2} J W^{-1/2}``, and ``||D_x Gamma||`` at atoms that can split. p = 1: one token moves.
    p = inf: one output decides. In both cases the share of an atom that moves on its own is one token, or infinitesimal.
    """
    return _euclidean(problem, mu, counts) if problem.p == 2.0 else _mixed(problem, mu, counts)


def _normals(chart: Chart, mu: Any) -> Array | None:
    if chart.kind != "sphere":
        return None
    # a sphere's chart has an invertible E in the coordinates of its hull
    y = (mu.points - chart.offset) @ chart.basis
    return chart.normals(np.linalg.solve(chart.E, y.T).T)


def _fields(problem: Problem, mu: Any) -> Array:
    """``D_x Gamma`` at the atoms on admissible displacements, ``(c, e, r)``."""
    times = mu.times if problem.attention.causal else None
    D = problem.attention.field_jacobian(mu.points, mu, times=times) @ problem.chart.basis
    normals = _normals(problem.chart, mu)
    return D if normals is None else tangent(D, normals[:, None])


def _euclidean(problem: Problem, mu: Any, counts: Array | None) -> Extremal:
    attention, chart = problem.attention, problem.chart
    normals = _normals(chart, mu)
    basis = chart.basis
    J = attention.jacobian(mu).reweighted(mu.weights)
    c, r = mu.n, basis.shape[1]

    def forward(x: Array) -> Array:
        return J.jvp(tangent(x.reshape(c, r), normals) @ basis.T).ravel()

    def backward(y: Array) -> Array:
        return tangent(J.vjp(y.reshape(c, J.e)) @ basis, normals).ravel()

    if min(c * J.e, c * r) <= DENSE_LIMIT:
        M = tangent(J.to_dense().reshape(c * J.e, c, -1) @ basis, normals)
        v = np.linalg.svd(M.reshape(c * J.e, c * r), full_matrices=False)[2][0]
    else:
        v = leading_direction(forward, backward, c * J.e, c * r, tol=1e-7)
    v = tangent(v.reshape(c, r), normals)
    v = v / max(float(np.linalg.norm(v)), 1e-300)
    image = forward(v)
    # squares of values beyond e^350 would overflow
    size = max(float(np.abs(image).max()), 1e-300)
    value = size * float(np.linalg.norm(image / size))
    u = image.reshape(c, J.e) / max(value, 1e-300)

    def particle(other: Any) -> float:
        K = attention.jacobian(other).reweighted(other.weights)
        return float(np.sum(u * K.jvp(tangent(v, _normals(chart, other)) @ basis.T)))

    def slope(z: Array) -> Array:
        """``<u, J(X) w>`` has the gradient ``D J(X)[w]^T u``, second derivatives being symmetric: a difference along w."""
        root = np.sqrt(mu.weights)[:, None]
        w = v @ basis.T / root
        h = SLOPE_STEP * (1.0 + float(np.abs(mu.points).max())) / max(float(np.abs(w).max()), 1e-300)
        ahead, behind = (attention.jacobian(mu._with_points(mu.points + t * w)).vjp(root * u) for t in (h, -h))
        out = (ahead - behind) / (2.0 * h) @ basis @ chart.E
        return out if normals is None else out + chart.normal_gradient(z, J.vjp(u) @ basis, v)

    best = Extremal(value, "particle", particle, slope)
    can_split = np.ones(c, dtype=bool) if counts is None else counts >= 1.5
    if not can_split.any():
        return best
    D = _fields(problem, mu)
    norms = np.where(can_split, np.linalg.norm(D, 2, axis=(1, 2)), 0.0)
    k = int(norms.argmax())
    if norms[k] <= value:
        return best
    U, _, Wt = np.linalg.svd(D[k])

    def splitting(other: Any) -> float:
        return float(U[:, 0] @ _fields(problem, other)[k] @ Wt[0])

    return Extremal(float(norms[k]), "splitting", splitting)


def _mixed(problem: Problem, mu: Any, counts: Array | None) -> Extremal:
    attention, chart, p = problem.attention, problem.chart, problem.p

    def stacks(other: Any) -> tuple[Array, Array, Array]:
        J = attention.jacobian(other)
        normals = _normals(chart, other)
        blocks = tangent(J.to_dense().reshape(other.n, J.e, other.n, -1) @ chart.basis, normals)
        return blocks, _fields(problem, other), other.weights

    def parts(blocks: Array, D: Array, weights: Array, k: int) -> Array:
        """The matrices whose summed norms are maximised: ``(c + 1, rows, columns)``, the moving share last."""
        share = 0.0 if counts is None else 1.0 / counts[k]
        K = blocks[k, :, k] - D[k]
        if p == 1.0:
            out = blocks[:, :, k] * (weights / weights[k])[:, None, None]
        else:
            out = np.swapaxes(blocks[k], 0, 1)
        out = np.concatenate([out, out[:1]])
        out[k], out[-1] = (1.0 - share) * K, share * K + D[k]
        # for p = inf the output direction is the variable
        return out if p == 1.0 else np.swapaxes(out, 1, 2)

    at_mu = stacks(mu)
    rng = np.random.default_rng(0)
    best_value, best_k, best_u = -1.0, 0, np.zeros(0)
    for k in range(mu.n):
        value, u = ascend_sum_of_norms(parts(*at_mu, k), rng, starts=2)
        if value > best_value:
            best_value, best_k, best_u = value, k, u
    images = parts(*at_mu, best_k) @ best_u
    units = images / np.maximum(np.linalg.norm(images, axis=1, keepdims=True), 1e-300)

    def functional(other: Any) -> float:
        return float(np.sum(units * (parts(*stacks(other), best_k) @ best_u)))

    return Extremal(float(np.linalg.norm(images, axis=1).sum()), "token" if p == 1.0 else "output", functional)
