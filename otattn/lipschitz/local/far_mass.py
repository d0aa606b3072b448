"""How much the field of a map stretches: at given points, and over a domain, where a tiny mass may go."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from otattn import _validate as check
from otattn._linalg import row_norms
from otattn.attention import AttentionMap
from otattn.attention.base import Measure
from otattn.measures import Domain

__all__ = ["far_mass", "field_norms", "largest_field_norm"]

Array = NDArray[np.float64]
FEW_NORMS = 2
"""Norms that are taken at first, of the largest bounds; then twice as many."""
FAR_DIRECTIONS = 8
"""Directions in which far mass is climbed by differences: each costs one field."""


def largest_field_norm(D: Array, floor: float) -> float:
    """``max(floor, max_i ||D_i||)``, of as few decompositions as it takes: ``||D||^2 <= ||D D^T||_F``.

    The largest eigenvalue of a Gram matrix is as exact as the square of the largest singular value.
    """
    scale = float(np.abs(D).max(initial=0.0))
    if scale == 0.0:
        return floor
    Z = D / scale
    grams = Z @ np.swapaxes(Z, 1, 2) if D.shape[1] <= D.shape[2] else np.swapaxes(Z, 1, 2) @ Z
    bound = scale * np.sqrt(np.linalg.norm(grams, axis=(1, 2))) * (1.0 + 1e-12)
    order = np.argsort(-bound, kind="stable")
    start, step = 0, FEW_NORMS
    while start < len(order) and bound[order[start]] > floor:
        some = order[start : start + step]
        top = float(np.linalg.eigvalsh(grams[some[bound[some] > floor]])[:, -1].max())
        floor = max(floor, scale * np.sqrt(max(top, 0.0)))
        start, step = start + step, 2 * step
    return float(floor)


def field_norms(D: Array) -> Array:
    """Spectral norms of a stack ``(m, e, d)``: from the smaller Gram matrix where that is much smaller."""
    e, d = D.shape[1:]
    if max(e, d) <= 4 * min(e, d):
        return np.asarray(np.linalg.norm(D, ord=2, axis=(1, 2)))
    scale = np.abs(D).max(axis=(1, 2), keepdims=True)
    Z = D / np.where(scale > 0, scale, 1.0)
    gram = Z @ np.swapaxes(Z, 1, 2) if e < d else np.swapaxes(Z, 1, 2) @ Z
    return np.asarray(np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[:, -1], 0.0)) * scale[:, 0, 0])


def far_mass(
    attention: AttentionMap, mu: Any, domain: Domain, *, rng: np.random.Generator | int = 0, starts: int = 32
) -> float:
    """A value from below of ``sup_{y in domain} ||D_x Gamma_mu(y)||``: the best of atoms, random points and ascents."""
    measure = attention.as_measure(mu)
    if attention.causal:
        raise ValueError("far_mass is defined for maps without a mask; a causal map compares slices of equal time.")
    generator = check.rng_from(rng)
    d = measure.dim
    few = d <= FAR_DIRECTIONS
    if domain.dim is None:
        free = generator.standard_normal((starts, d))
        drawn = domain.project(1e3 * free) * generator.random((starts, 1)) ** (1.0 / d)
    else:
        drawn = domain.sample(starts, generator)
    centre = measure.weights @ measure.points
    pairs = 0.5 * (measure.points + measure.points[generator.permutation(measure.n)])
    cand = domain.project(np.concatenate([measure.points, drawn, centre[None], pairs, np.zeros((1, d))]))
    norms = field_norms(attention.field_jacobian(cand, measure))
    best = float(norms.max())

    def objective(y: Array) -> float:
        return -float(field_norms(attention.field_jacobian(domain.project(y[None]), measure))[0])

    for i in np.argsort(norms)[::-1][: 4 if few else 2]:
        y = cand[i]
        for _ in range(1 if few else 2):
            basis = _far_directions(attention, measure, y, generator)
            result = minimize(
                lambda z, y=y, basis=basis: objective(y + basis @ z),
                np.zeros(basis.shape[1]),
                method="L-BFGS-B",
                options={"maxiter": 30 if few else 8},
            )
            best = max(best, -float(result.fun))
            y = domain.project((y + basis @ result.x)[None])[0]
    return best


def _far_directions(attention: AttentionMap, mu: Measure, y: Array, rng: np.random.Generator) -> Array:
    """Orthonormal directions in which the field at y is climbed by differences: all, or those that promise most.

    That is the one that the field stretches most, those to the centre and to the nearest and farthest atoms, and random ones.
    """
    d = len(y)
    if d <= FAR_DIRECTIONS:
        return np.eye(d)
    right = np.linalg.svd(attention.field_jacobian(y[None], mu)[0], full_matrices=False)[2][:2]
    apart = mu.points - y
    order = np.argsort(row_norms(apart))
    chosen = [*right, mu.weights @ apart, apart[order[len(order) // 2]], apart[order[-1]]]
    chosen += list(rng.standard_normal((FAR_DIRECTIONS - len(chosen), d)))
    return np.asarray(np.linalg.qr(np.array(chosen).T)[0])
