"""Lanczos from one start: the recurrence with what rounding leaves of it, and its top Ritz pair.

The recurrence is ours because a bound from above needs its numbers, from a run without restarts, which ARPACK does not give.
The same run serves the singular value: on the fused products of three layers it took 15 to 23 products where ``eigsh`` took
21 to 31, which fills its basis before it looks, and 0.7 to 0.8 of its CPU time in float32, 0.7 to 0.9 with the switch from
float32 to float64 (``benchmarks/local_upper.py``). Restarts are ARPACK's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dstev
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from otattn.attention import memory as attention_memory

__all__ = ["Lanczos", "NonFiniteError", "RitzPair", "top_eigenpair"]

Array = NDArray[Any]

FEW_STEPS = 24
"""Steps up to which all Ritz vectors, by one call of LAPACK, take less time than the last two of them."""
LARGEST_BASIS = 320
SMALLEST_BASIS = 8


class NonFiniteError(ValueError):
    """A product has left the range of its precision."""


class Lanczos:
    r"""``A q_j = beta_{j-1} q_{j-1} + alpha_j q_j + beta_j q_{j+1} + f_j`` for a symmetric A, positive semi-definite.

    Each new vector is orthogonalised against those that are stored (as many as the memory budget takes, 320 at most;
    the last two always). Nothing is restarted. ``lost`` holds what was measured of the norms ``|f_j|``.

    Parameters
    ----------
    start : (N,) array
        ``q_0``, scaled to norm 1; its dtype is that of the work.
    measured : bool
        False leaves ``lost`` empty: who wants no bound from above need not pay for it.
    """

    def __init__(self, start: Array, *, measured: bool = True) -> None:
        self.measured = measured
        room = attention_memory.MEMORY_BUDGET // (start.size * start.itemsize)
        self.basis = np.empty((min(start.size, max(SMALLEST_BASIS, min(LARGEST_BASIS, room))), start.size), start.dtype)
        self.last = np.zeros_like(start)
        self.next = start / np.linalg.norm(start)
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.lost: list[float] = []
        self.eps = float(np.finfo(start.dtype).eps)

    @property
    def stored(self) -> int:
        """The number of vectors that are kept."""
        return min(len(self.alpha), len(self.basis))

    @property
    def full(self) -> bool:
        """True when no further vector can be kept."""
        return len(self.alpha) >= len(self.basis)

    @property
    def exhausted(self) -> bool:
        """True when the vectors span an invariant subspace (to rounding)."""
        return self.beta[-1] <= 10.0 * self.eps * max(self.alpha) or len(self.alpha) >= self.next.size

    def step(self, image: Array) -> None:
        """Enter ``image``, the product of A with ``next``."""
        if not np.isfinite(image).all():
            raise NonFiniteError(
                "operator must give finite products, received NaN or infinite entries; scale its data."
            )
        q, number = self.next, self.next.dtype.type
        if not self.full:
            self.basis[len(self.alpha)] = q
        known = image - number(self.beta[-1]) * self.last if self.beta else np.array(image)
        alpha = max(float(q @ known), 0.0)
        known -= number(alpha) * q
        self.alpha.append(alpha)
        w, before = known.copy() if self.measured else known, float(np.linalg.norm(known))
        for _ in range(2):
            V = self.basis[: self.stored]
            w -= (V @ w) @ V
            beta = float(np.linalg.norm(w))
            if beta > 0.5 * before:
                break
            before = beta
        after = w / number(beta) if beta > 0.0 else np.zeros_like(w)
        if self.measured:
            self.lost.append(float(np.linalg.norm(known - number(beta) * after)))
        self.beta.append(beta)
        self.last, self.next = q, after

    def ritz(self, count: int | None = None) -> tuple[float, float, Array]:
        """The two largest Ritz values (0 where there is no second) of ``count`` steps, the coordinates of the first."""
        k = len(self.alpha) if count is None else count
        if k <= FEW_STEPS:
            values, vectors, failed = dstev(self.alpha[:k], self.beta[: max(k - 1, 1)])
            values = values[-2:]
        if k > FEW_STEPS or failed:
            values, vectors = eigh_tridiagonal(
                self.alpha[:k], self.beta[: k - 1], select="i", select_range=(max(k - 2, 0), k - 1)
            )
        return max(float(values[-1]), 0.0), max(float(values[0]), 0.0) if k > 1 else 0.0, vectors[:, -1]

    def vector(self) -> Array:
        """The top Ritz vector of the stored steps, of norm 1."""
        out = self.ritz(self.stored)[2].astype(self.basis.dtype) @ self.basis[: self.stored]
        return np.asarray(out / np.linalg.norm(out))


@dataclass(frozen=True, eq=False)
class RitzPair:
    """The top Ritz pair, the second Ritz value, the products used; ``settled`` is False when they ran out."""

    value: float
    vector: Array
    second: float
    products: int
    settled: bool


def top_eigenpair(
    product: Callable[[Array], Array],
    start: Array,
    *,
    tol: float,
    max_products: int,
    first: Array | None = None,
    min_steps: int = 1,
) -> RitzPair:
    """Lanczos from ``start`` until the residual of the top Ritz pair is at most ``tol`` times its value.

    When the memory budget takes no further vector, ARPACK goes on from the best one with its implicit restarts.

    Parameters
    ----------
    product : callable (size,) -> (size,)
        A symmetric positive semi-definite operator, in the dtype of ``start``.
    start : (size,) array
    tol : float
    max_products : int
    first : (size,) array, optional
        The operator's image of ``start`` (of norm 1), if known.
    min_steps : int
        Steps before convergence is believed. A random start in a tight cluster has a small residual at once, although a
        top eigenvalue outside the cluster is in it with weight ``1 / size`` only; a few steps bring that out.

    Raises
    ------
    NonFiniteError
        A product is not finite.
    """
    lanczos, products = Lanczos(start, measured=False), 0
    while True:
        if first is None:
            products += 1
        lanczos.step(product(lanczos.next) if first is None else first)
        first = None
        value, second, coordinates = lanczos.ritz()
        done = lanczos.beta[-1] * abs(float(coordinates[-1])) <= tol * value and len(lanczos.alpha) >= min_steps
        settled = done or lanczos.exhausted
        if settled or products >= max_products or lanczos.full:
            break
    pair, room = RitzPair(value, lanczos.vector(), second, products, settled), len(lanczos.basis)
    if settled or products >= max_products:
        return pair
    del lanczos  # its memory goes to ARPACK
    return _restarted(product, pair, tol, max_products, room)


def _restarted(product: Callable[[Array], Array], pair: RitzPair, tol: float, max_products: int, room: int) -> RitzPair:
    """ARPACK from the vector of ``pair`` on; that pair itself where the products do not suffice."""
    used, size = pair.products, pair.vector.size

    def counted(x: Array) -> Array:
        nonlocal used
        used += 1
        return product(x.reshape(-1))

    operator = LinearOperator((size, size), matvec=counted, dtype=pair.vector.dtype)
    # the first sweep takes ``room`` products, each restart at most one less
    sweeps = (max_products - used - room) // max(room - 1, 1)
    if sweeps < 1:
        return RitzPair(pair.value, pair.vector, pair.second, used, False)
    try:
        values, vectors = eigsh(operator, k=1, v0=pair.vector, ncv=room, tol=tol, maxiter=sweeps)
    except ArpackNoConvergence:
        return RitzPair(pair.value, pair.vector, pair.second, used, False)
    return RitzPair(float(values[0]), vectors[:, 0], pair.second, used, True)
