"""Truth for the tests of the distances: brute force, linear programs, 60 digits; from the stored floats."""

from __future__ import annotations

import itertools

import mpmath as mp
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.spatial.distance import cdist

Array = NDArray[np.float64]

ORDERS = (1, 1.5, 2, 3, np.inf)


def digits(value: float) -> mp.mpf:
    return mp.mpf(float(value))


def distance_digits(x: Array, y: Array) -> mp.mpf:
    return mp.sqrt(sum((digits(u) - digits(v)) ** 2 for u, v in zip(x, y, strict=True)))


def assignment_by_brute_force(x: Array, y: Array, p: float) -> mp.mpf:
    """W_p of uniform measures on n <= 7 points each, over all permutations, in 60 digits."""
    with mp.workdps(60):
        D = [[distance_digits(a, b) for b in y] for a in x]
        n = len(x)
        if np.isinf(p):
            return min(max(D[i][s[i]] for i in range(n)) for s in itertools.permutations(range(n)))
        C = [[v**p for v in row] for row in D]
        best = min(sum(C[i][s[i]] for i in range(n)) for s in itertools.permutations(range(n)))
        return (best / n) ** (mp.mpf(1) / p)


def linear_program(C: Array, a: Array, b: Array) -> float:
    """Optimal transport cost by scipy's HiGHS."""
    n, m = C.shape
    rows = np.kron(np.eye(n), np.ones(m))
    cols = np.kron(np.ones(n), np.eye(m))
    scale = C.max() or 1.0
    found = linprog(
        C.ravel() / scale,
        A_eq=np.vstack([rows, cols])[:-1],  # one constraint is redundant
        b_eq=np.concatenate([a, b])[:-1],
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.status == 0
    return float(found.fun) * scale


def wasserstein_by_program(x: Array, a: Array, y: Array, b: Array, p: float) -> float:
    """W_p by linear programming; for p = inf by bisection over programs with the cost [D > t]."""
    D = cdist(x, y)
    if not np.isinf(p):
        top = D.max() or 1.0
        return float(top * linear_program((D / top) ** p, a, b) ** (1 / p))
    levels = np.unique(D)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        far = linear_program((levels[middle] < D).astype(float), a, b)
        low, high = (low, middle) if far < 1e-9 else (middle + 1, high)
    return float(levels[low])


def bures_digits(S1: Array, S2: Array, dps: int = 60) -> mp.mpf:
    """Bures-Wasserstein distance of the PSD parts of two stored covariances."""
    with mp.workdps(dps):
        roots, traces = [], []
        for S in (S1, S2):
            s, E = mp.eigsy(mp.matrix(np.asarray(S, dtype=float).tolist()))
            s = [v if v > mp.mpf(10) ** (-dps + 15) else mp.mpf(0) for v in s]
            roots.append(E * mp.diag([mp.sqrt(v) for v in s]) * E.T)
            traces.append(sum(s))
        M = roots[0] * roots[1] * roots[1] * roots[0]
        m = mp.eigsy((M + M.T) / 2, eigvals_only=True)
        cross = sum(mp.sqrt(v) for v in m if v > mp.mpf(10) ** (-dps + 10))
        return mp.sqrt(max(traces[0] + traces[1] - 2 * cross, mp.mpf(0)))


def relative_error(value: float, truth: mp.mpf) -> float:
    with mp.workdps(60):
        return float(abs(digits(value) / truth - 1))


def random_weights(n: int, rng: np.random.Generator) -> Array:
    return rng.dirichlet(np.ones(n))
