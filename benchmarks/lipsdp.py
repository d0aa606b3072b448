"""LipSDP-type bounds of one-layer networks ``x -> W1 phi(W0 x)``, by cvxpy, checked in numpy.

For phi with ``(phi(s) - phi(t)) T ((s - t) - (phi(s) - phi(t)) / beta) >= 0`` for every T of a cone, the constant is at
most ``sqrt(rho)`` whenever

    [[-rho I, beta W0^T T], [beta T W0, W1^T W1 - 2 T]] <= 0.

Entrywise phi of slopes in [0, beta]: T diagonal and non-negative (LipSDP-Neuron of Fazlyab, Robey, Hassani, Morari, Pappas,
"Efficient and accurate estimation of Lipschitz constants for deep neural networks", NeurIPS 2019; their larger cone was
found invalid by Pauli et al. 2021). Softmax: the gradient of a convex function whose gradient is 1/2-Lipschitz, so T is
a multiple of the identity, with beta = 1/2; rows may be centred, since softmax does not see a common shift and its
values sum to one.
"""

from __future__ import annotations

import math

import cvxpy as cp
import numpy as np

Array = np.ndarray


def certified(W0: Array, W1: Array, t: Array, beta: float) -> float:
    """The least ``sqrt(rho)`` that the multipliers prove, by the Schur complement; inf when they prove none."""
    top = float(np.linalg.eigvalsh(W1.T @ W1 / np.sqrt(np.outer(t, t)))[-1]) if (t > 0).all() else math.inf
    if not top < math.inf:
        return math.inf
    best = math.inf
    for scale in np.geomspace(1.0, 1e2, 41):  # 2 T must exceed W1^T W1: solvers leave it by a rounding error
        T = np.diag(t * scale)
        inner = 2.0 * T - W1.T @ W1
        if np.linalg.eigvalsh(inner)[0] <= 0:
            continue
        M = beta * T @ W0
        best = min(best, float(np.linalg.eigvalsh(M.T @ np.linalg.solve(inner, M))[-1]))
    return math.sqrt(best) * (1.0 + 1e-12) if best < math.inf else math.inf


def lipsdp(W0: Array, W1: Array, beta: float, *, scalar: bool = False) -> float:
    """The bound; ``scalar`` for softmax (one multiplier)."""
    n, d = W0.shape
    s0, s1 = np.linalg.norm(W0, 2), np.linalg.norm(W1, 2)
    A, B = W0 / s0, W1 / s1
    rho = cp.Variable()
    t = cp.Variable() if scalar else cp.Variable(n)
    T = t * np.eye(n) if scalar else cp.diag(t)
    block = cp.bmat([[-rho * np.eye(d), beta * A.T @ T], [beta * T @ A, B.T @ B - 2.0 * T]])
    problem = cp.Problem(cp.Minimize(rho), [0.5 * (block + block.T) << 0, t >= 1e-9])
    problem.solve(solver=cp.CLARABEL)
    multipliers = np.full(n, float(t.value)) if scalar else np.asarray(t.value)
    return certified(A, B, np.maximum(multipliers, 1e-9), beta) * s0 * s1
