r"""The largest singular values of one softmax head at many windows of one length, iterated in step.

At a hundred tokens a product of one head takes less time than the calls that surround it. Here the windows lie side by side as the
heads of :mod:`otattn.operators.stacked` do: each step of all their Lanczos runs is one product. Each run has its own numbers
and stops by its own residual, as in :func:`~otattn.operators.lanczos.top_singular`, whose stages these are; values and residuals come
from products in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dstev

from otattn.attention import AttentionMap
from otattn.attention import memory as attention_memory
from otattn.operators.fused import FusedJacobian
from otattn.operators.krylov import NonFiniteError
from otattn.operators.lanczos import FLOAT32_RESIDUAL, RANDOM_SHARE, RANDOM_STEPS, VANISHED, WARM_STEPS, top_singular
from otattn.operators.layer import FEW_TOKENS, SoftmaxLayer
from otattn.operators.network import measure_jacobian
from otattn.operators.stacked import StackedHeads

__all__ = ["top_singular_windows"]

Array = NDArray[Any]
LARGEST_BASIS = 40
"""Steps after which a run that has not settled goes on by itself."""


def top_singular_windows(
    attention: AttentionMap, windows: Array, *, tol: float, starts: Array | None = None
) -> tuple[Array, Array]:
    """Largest singular values ``(b,)`` of the Jacobian at windows ``(b, n, d)`` of equal weights, and right vectors.

    Parameters
    ----------
    attention : AttentionMap
        Only a single softmax head, masked or not, at few tokens is iterated in step; other maps go window by window.
    windows : (b, n, d) array
    tol : float
        Relative error of each, as for :func:`~otattn.operators.top_singular`.
    starts : (b, n, d) array, optional
        Guesses of the right vectors.

    Raises
    ------
    SingularValueError
        As for :func:`~otattn.operators.top_singular`, at any of them.
    """
    operators = [measure_jacobian(attention, tokens) for tokens in windows]
    layers = [J.layer for J in operators if isinstance(J, FusedJacobian)]
    values, rights = np.full(len(windows), np.nan), np.array(windows if starts is None else starts, dtype=np.float64)
    if len(layers) == len(operators) and _in_step(layers):
        settled = _iterate(layers, rights, starts is not None, 2.0 * tol, values)
    else:
        settled = np.zeros(len(windows), dtype=bool)
    for i in np.flatnonzero(~settled):
        guess = None if starts is None and np.isnan(values[i]) else rights[i]
        top = top_singular(operators[i], precision="precise", tol=tol, rng=0, start=guess)
        values[i], rights[i] = top.value, top.right.reshape(rights[i].shape)
    return values, rights


def _in_step(layers: Sequence[SoftmaxLayer]) -> bool:
    """True where windows can be stacked: one head, equal weights, few tokens, float32 in range."""
    n, first = layers[0].n, layers[0]
    plain = all(
        len(x.heads) == 1 and x.outputs is None and x.root is None and x.column is None and x.atoms == x.n == n
        for x in layers
    )
    room = 8 * len(layers) * n * max(n, LARGEST_BASIS * first.d) <= attention_memory.MEMORY_BUDGET
    return plain and n <= FEW_TOKENS and room and all(x.fits_float32 for x in layers)


class _Windows:
    """``J``, ``J^T`` and ``J^T J`` of one head at each window, in units of the layer's scale; ``(b, d, n)`` arrays."""

    def __init__(self, layers: Sequence[SoftmaxLayer], dtype: Any) -> None:
        dtype = np.dtype(dtype)
        Q, K, V = (
            np.stack([part(x).T.astype(dtype) for x in layers])
            for part in (lambda x: x.queries(0), lambda x: x.keys(0), lambda x: x.values(0))
        )
        self.heads = StackedHeads(Q, K, V, None, layers[0].visible)
        self.W = np.stack([x.stacked(dtype) for x in layers])
        self.shape = len(layers), layers[0].d, layers[0].n
        k = layers[0].heads[0].k
        self.wide = np.empty((*self.W.shape[:2], layers[0].n), dtype)
        self.parts = np.split(self.wide, (k, 2 * k), axis=1)

    def forward(self, x: Array) -> Array:
        """``J x`` of flat ``x (b, d n)``, ``(b, e, n)``."""
        np.matmul(self.W, x.reshape(self.shape), out=self.wide)
        return self.heads.forward(*self.parts)

    def backward(self, g: Array) -> Array:
        """``J^T g``, flat."""
        self.heads.backward(g, *self.parts)
        return np.matmul(np.swapaxes(self.W, 1, 2), self.wide).reshape(len(g), -1)

    def gram(self, x: Array) -> Array:
        """``J^T J x`` of flat ``x``, flat."""
        return self.backward(self.forward(x))


def _iterate(
    layers: Sequence[SoftmaxLayer], rights: Array, warm: bool, target: float, values: Array
) -> NDArray[np.bool_]:
    """The stages of ``top_singular`` for all windows; which of them reached ``target``. Values and vectors in place."""
    b, n, d = rights.shape
    v = np.random.default_rng(0).standard_normal(n * d).reshape(n, d).T.reshape(1, -1)
    v = np.repeat(v / np.linalg.norm(v), b, axis=0)
    steps = RANDOM_STEPS
    if warm:
        guess = np.swapaxes(rights, 1, 2).reshape(b, -1)
        v, steps = _unit(_unit(guess) + RANDOM_SHARE * v), WARM_STEPS
    settled = np.zeros(b, dtype=bool)
    try:
        single = _Windows(layers, np.float32)
        values32, v32, found = _lanczos(single, v.astype(np.float32), max(0.9 * target, FLOAT32_RESIDUAL), steps, None)
    except NonFiniteError:
        return settled
    del single
    if not (values32 > VANISHED).all():  # float64 decides whether they vanish
        return settled
    left, v = np.arange(b), _unit(v32.astype(np.float64))
    for stage in range(2):
        exact = _Windows([layers[i] for i in left.tolist()], np.float64)
        y = exact.forward(v)
        theta = np.einsum("bin,bin->b", y, y)
        image = exact.backward(y)
        residual = np.linalg.norm(image - theta[:, None] * v, axis=1) / np.where(theta > 0.0, theta, 1.0)
        done = found & (residual <= target) & (theta > 0.0)
        rights[left] = np.swapaxes(v.reshape(-1, d, n), 1, 2)
        values[left] = np.sqrt(theta) * layers[0].scale
        settled[left[done]] = True
        rest = np.flatnonzero(~done)
        if stage or not rest.size:
            break
        # steps that single precision has taken need no second time
        left, v, first = left[rest], v[rest], image[rest]
        exact = exact if len(left) == len(done) else _Windows([layers[i] for i in left.tolist()], np.float64)
        _, v, found = _lanczos(exact, v, 0.5 * target, 1 if found[rest].all() else steps, first)
        v = _unit(v)
    return settled


def _unit(x: Array) -> Array:
    size = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(np.divide(x, size, out=np.zeros_like(x), where=size > 0.0))


def _lanczos(
    operator: _Windows, start: Array, tol: float, min_steps: int, first: Array | None
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Top Ritz values and vectors of the runs from the unit vectors ``start (b, N)``, each until its residual is ``tol``.

    As :class:`~otattn.operators.krylov.Lanczos`, fully reorthogonalised; False where the basis was full before.
    """
    b, N = start.shape
    room, eps = min(LARGEST_BASIS, N), float(np.finfo(start.dtype).eps)
    basis, q = np.empty((b, room, N), start.dtype), start
    alpha, beta = np.zeros((b, room)), np.zeros((b, room))
    values, settled = np.zeros(b), np.zeros(b, dtype=bool)
    coordinates = np.zeros((b, room), start.dtype)
    for j in range(room):
        basis[:, j] = q
        w = operator.gram(q) if first is None or j else np.array(first)
        if not np.isfinite(w).all():
            raise NonFiniteError("operator must give finite products, received NaN or infinite entries.")
        if j:
            w -= beta[:, j - 1, None].astype(w.dtype) * basis[:, j - 1]
        alpha[:, j] = np.maximum(np.einsum("bn,bn->b", q, w), 0.0)
        w -= alpha[:, j, None].astype(w.dtype) * q
        before, V = np.sqrt(np.einsum("bn,bn->b", w, w)), basis[:, : j + 1]
        for _ in range(2):
            w -= np.matmul(np.swapaxes(np.matmul(V, w[:, :, None]), 1, 2), V)[:, 0]
            after = np.sqrt(np.einsum("bn,bn->b", w, w))
            if (after > 0.5 * before).all():
                break
            before = after
        beta[:, j] = after
        for i in np.flatnonzero(~settled):
            ritz, vectors, _ = dstev(alpha[i, : j + 1], beta[i, : max(j, 1)])
            values[i], coordinates[i, : j + 1] = max(ritz[-1], 0.0), vectors[:, -1]
            close = after[i] * abs(vectors[-1, -1]) <= tol * values[i] and j + 1 >= min_steps
            settled[i] = close or after[i] <= 10.0 * eps * alpha[i].max() or j + 1 >= N
        if settled.all():
            break
        q = np.divide(w, after[:, None], out=np.zeros_like(w), where=~settled[:, None]).astype(start.dtype, copy=False)
    return values, np.matmul(coordinates[:, None, : j + 1], basis[:, : j + 1])[:, 0], settled
