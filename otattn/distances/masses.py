"""Weights as exact integers, and what counts as their rounding.

A weight is known to a few units in its last place: it was rounded when it was stored and again when it was
normalised. Transport amplifies that (a mass 1e-16 moved over a distance 1 costs as much, for p = 2, as all
the mass moved over 1e-8), so flows are computed exactly, in integers, and a flow that is below the rounding
of *both* weights that it joins is rounding, not transport.
"""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array

__all__ = ["DUST", "exact_masses", "merge_atoms", "same_measure", "to_weights"]

#: A mass below 1/DUST = 4 eps of a weight is within the rounding of that weight.
DUST = 2**50


def exact_masses(a: Array, b: Array) -> tuple[list[int], list[int]]:
    """Integers proportional to the exact values of two weight vectors, with equal sums."""
    if (a == a[0]).all() and (b == b[0]).all():
        return [len(b)] * len(a), [len(a)] * len(b)
    A, B = _numerators(a), _numerators(b)
    total_a, total_b = sum(A), sum(B)
    return [v * total_b for v in A], [v * total_a for v in B]


def _numerators(w: Array) -> list[int]:
    mantissa, exponent = np.frexp(w)
    whole = np.ldexp(mantissa, 53).astype(np.int64)  # w = whole 2^(exponent - 53), exactly
    exponent = np.where(whole == 0, exponent.max(), exponent)
    return [v << s for v, s in zip(whole.tolist(), (exponent - exponent.min()).tolist(), strict=True)]


def to_weights(masses: list[int]) -> Array:
    """The masses over their sum, each correctly rounded."""
    total = sum(masses)
    return np.array([v / total for v in masses])


def merge_atoms(points: Array, masses: list[int]) -> tuple[Array, list[int]]:
    """Distinct points in lexicographic order with the exact sums of their masses; atoms of zero mass are
    dropped.
    """
    if not all(masses):
        points = points[[i for i, v in enumerate(masses) if v]]
        masses = [v for v in masses if v]
    x = points + 0.0  # -0.0 becomes 0.0
    order = np.argsort(x[:, 0])
    along = x[order, 0]
    if (along[1:] > along[:-1]).all():  # no two atoms share a coordinate: the others have no say
        return x[order], [masses[i] for i in order.tolist()]
    order = np.lexsort(x.T[::-1])
    x = x[order]
    first = np.ones(len(x), dtype=bool)
    first[1:] = (x[1:] != x[:-1]).any(axis=1)
    merged = [0] * int(first.sum())
    for group, i in zip((np.cumsum(first) - 1).tolist(), order.tolist(), strict=True):
        merged[group] += masses[i]
    return x[first], merged


def same_measure(x: Array, A: list[int], y: Array, B: list[int]) -> bool:
    """Equality of two merged measures, the weights up to their rounding."""
    if x.shape != y.shape or not (x == y).all():
        return False
    return all(abs(u - v) * DUST <= max(u, v) for u, v in zip(A, B, strict=True))
