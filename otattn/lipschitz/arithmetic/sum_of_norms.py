"""``max sum_i |B_i u|`` over unit vectors u: a value from below by ascent, one from above by duality."""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array, lambda_max_upper


def max_sum_of_norms(
    B: Array, rng: np.random.Generator, *, starts: int = 4, max_iter: int = 200
) -> tuple[float, float, Array]:
    """``max_{|u|=1} sum_k |B_k u|`` for a stack ``B (m, r, c)``: lower value, upper value, the direction found."""
    lower, u = ascend_sum_of_norms(B, rng, starts=starts, max_iter=max_iter)
    return lower, max(lower, dual_upper(B, u, lower)), u


def ascend_sum_of_norms(
    B: Array, rng: np.random.Generator, *, starts: int = 4, max_iter: int = 200
) -> tuple[float, Array]:
    """The lower value of :func:`max_sum_of_norms` and its direction, by the monotone fixed point."""
    m, r, c = B.shape
    flat = B.reshape(m * r, c)
    _, _, Vt = np.linalg.svd(flat, full_matrices=False)
    U = np.column_stack([Vt[:2].T, Vt.T @ rng.standard_normal((len(Vt), starts))])
    U /= np.maximum(np.linalg.norm(U, axis=0), 1e-300)
    value = np.zeros(U.shape[1])
    for _ in range(max_iter):
        image = (flat @ U).reshape(m, r, -1)
        norms = np.linalg.norm(image, axis=1)
        new = norms.sum(axis=0)
        done = bool((new <= value * (1 + 1e-13)).all())
        value = np.maximum(value, new)
        if done:
            break
        direction = np.divide(image, norms[:, None], out=np.zeros_like(image), where=norms[:, None] > 0)
        step = flat.T @ direction.reshape(m * r, -1)
        length = np.linalg.norm(step, axis=0)
        U = np.where(length > 0, step / np.where(length > 0, length, 1.0), U)
    totals = np.linalg.norm((flat @ U).reshape(m, r, -1), axis=1).sum(axis=0)
    best = int(totals.argmax())
    return float(totals[best]), U[:, best]


def cheap_upper(B: Array) -> float:
    """``min(sum_k ||B_k||_F, sqrt(m) ||[B_1; ...; B_m]||)``: enough to discard most stacks."""
    m, r, c = B.shape
    frobenius = float(np.linalg.norm(B.reshape(m, -1), axis=1).sum())
    stacked = float(np.linalg.norm(B.reshape(m * r, c), 2)) * np.sqrt(m)
    return min(frobenius, stacked) * (1 + 1e-12)


def dual_upper(B: Array, u: Array, lower: float) -> float:
    """The best certificate met: first s from the ascent's u (tight when u is the maximiser), then Frank-Wolfe steps."""
    m, r, c = B.shape
    if lower == 0.0:
        return 0.0 if not B.any() else cheap_upper(B)
    if min(m * r, c) < c:  # directions orthogonal to every row do nothing
        basis = np.linalg.qr(B.reshape(m * r, c).T)[0]
        B, u = B @ basis, basis.T @ u
        c = B.shape[2]
    gram = np.swapaxes(B, 1, 2) @ B
    floor = 1e-9 * lower
    X = np.outer(u, u)
    best = min(float(np.linalg.norm(B, ord=2, axis=(1, 2)).sum()) * (1 + 1e-12), cheap_upper(B))
    for it in range(80):
        s = np.sqrt(np.maximum(np.einsum("kcd,dc->k", gram, X), 0.0)) + floor
        M = np.tensordot(0.5 / s, gram, axes=1)
        best = min(best, (lambda_max_upper(M) + 0.5 * float(s.sum())) * (1 + 1e-13))
        if best <= lower * (1 + 1e-8):
            break
        top = np.linalg.eigh(M)[1][:, -1]
        step = 2.0 / (it + 3.0)
        X = (1 - step) * X + step * np.outer(top, top)  # Frank-Wolfe on the concave relaxed maximum
        floor = max(1e-9, 1e-3 / (it + 1.0) ** 2) * lower / m
    return best
