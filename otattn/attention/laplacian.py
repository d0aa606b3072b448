"""The graph Laplacian ``diag(P^T w) - P^T W P`` of a kernel with unit marginals, and its inverse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.sparse.linalg import LinearOperator, cg

from otattn._linalg import Array
from otattn.attention import memory
from otattn.errors import ConvergenceError

__all__ = ["DENSE_LIMIT", "Laplacian", "fits"]

Rows = Callable[[], Iterator[tuple[slice, Array]]]
DENSE_LIMIT = 1024
"""Up to this many atoms derivatives come from a factorisation. Beyond, they come from conjugate gradients, and from
a factorisation only where these stall and it fits the memory budget. Newton steps change over at a quarter of it."""


def fits(n: int) -> bool:
    """Whether a factorisation of n atoms fits the memory budget."""
    return 32 * n * n <= memory.MEMORY_BUDGET


class Laplacian:
    """Solves ``(diag(P^T w) - P^T W P) x = r`` on atoms of positive weight, dense or by conjugate gradients.

    The matrix is that of a weighted graph: symmetric PSD, with the constants in its kernel, so the right side sums to
    zero and any gauge gives the same derivative of the map. It is scaled to a unit diagonal; directions that rounding
    cannot see (nearly separate parts of the kernel) do not move the map either.

    Parameters
    ----------
    rows : callable
        Row blocks of P with their slices.
    weights : ndarray (n,)
    dense : bool, optional
        Factorise; by default up to ``DENSE_LIMIT`` atoms.
    """

    def __init__(self, rows: Rows, weights: Array, *, dense: bool | None = None) -> None:
        self.rows, self.w, self.live = rows, weights, weights > 0
        self.root = np.sqrt(weights[self.live])
        self.matrix: Array | None = None
        self.factors: dict[float, tuple[Array, tuple[Array, bool]]] = {}
        n = len(self.root)
        if n <= DENSE_LIMIT and fits(n) if dense is None else dense:
            self._assemble()
        else:
            self.exchange = _Exchange(rows, weights)
            self.diagonal = self.exchange.diagonal[self.live] / weights[self.live]

    def _assemble(self) -> None:
        P = np.concatenate([block for _, block in self.rows()])
        self.matrix = _scaled_laplacian(P if self.live.all() else P[np.ix_(self.live, self.live)], self.root)
        self.diagonal = np.diag(self.matrix).copy()

    def solve(
        self, r: Array, *, damping: float = 0.0, tol: float = 1e-13, max_iter: int = 500, required: float = 1e-10
    ) -> Array:
        """``x (n,)`` with ``(L + damping W) x = r`` for ``r (n,)`` of sum zero; zero at atoms of zero weight.

        Conjugate gradients stop at the relative residual ``tol`` or after ``max_iter`` steps; where they stall the matrix
        is factorised. The answer is nan where it is not definite.

        Raises
        ------
        ConvergenceError
            They stall above ``required``, and the matrix does not fit the memory budget.
        """
        # an atom that exchanges no mass at all (its links underflow) has no equation: its x is 0
        alone = self.diagonal + damping < 1e-290
        scale = 1.0 / np.sqrt(np.where(alone, 1.0, self.diagonal + damping))
        null = np.where(alone, 0.0, self.root / scale)
        null /= max(float(np.linalg.norm(null)), 1e-300)
        rhs = np.where(alone, 0.0, scale * (r[self.live] / self.root))
        rhs = rhs - null * (null @ rhs)
        if self.matrix is None:

            def product(z: Array) -> Array:
                x = np.zeros(len(self.w))
                x[self.live] = scale * z / self.root
                image = scale * (self.exchange.product(x)[self.live] / self.root + damping * scale * z)
                return np.asarray(np.where(alone, z, image + null * (null @ z)))

            operator = LinearOperator((len(rhs), len(rhs)), matvec=product, dtype=np.float64)
            z, info = cg(operator, rhs, rtol=tol, atol=0.0, maxiter=max_iter)
            if info != 0 and fits(len(rhs)):
                self._assemble()
                return self.solve(r, damping=damping)
            reached = 0.0 if info == 0 else float(np.linalg.norm(product(z) - rhs))
            if reached > required * float(np.linalg.norm(rhs)):
                raise ConvergenceError(
                    f"the derivative of the Sinkhorn potentials needs residual {required:g}, reached {reached:.3g} in "
                    f"{max_iter} conjugate-gradient steps; scale A down (the kernel is close to a permutation)."
                )
        else:
            try:
                z = self._solve_dense(rhs, damping, scale, null, alone)
            except LinAlgError:
                z = np.full(len(rhs), np.nan)
        out = np.zeros(len(self.w))
        out[self.live] = scale * z / self.root
        return out

    def _solve_dense(self, rhs: Array, damping: float, scale: Array, null: Array, alone: NDArray[np.bool_]) -> Array:
        """The scaled system by a factorisation, which is kept, and one step of refinement."""
        if damping not in self.factors:
            assert self.matrix is not None
            M = self.matrix * scale[:, None] * scale + np.outer(null, null)
            M[np.diag_indices_from(M)] += np.where(alone, 1.0, damping * scale**2)
            self.factors = {damping: (M, cho_factor(M + 1e-15 * np.eye(len(M)), overwrite_a=True))}
        M, factor = self.factors[damping]
        z = cho_solve(factor, rhs)
        return np.asarray(z + cho_solve(factor, rhs - M @ z))


def _scaled_laplacian(P: Array, root: Array) -> Array:
    """``W^{-1/2} (diag(P^T w) - P^T W P) W^{-1/2}``, without cancellation; its kernel is ``root``."""
    B = root[:, None] * P / root
    M = B.T @ B
    M *= -1.0
    M[np.diag_indices_from(M)] = 0.0
    M[np.diag_indices_from(M)] = -(M @ root) / root
    return np.asarray(M)


class _Exchange:
    """The graph Laplacian ``diag(P^T w) - P^T W P``, matrix-free.

    Where a row is close to one-hot it is referred to its largest entry, so that the rounding of a product is
    relative to what the row exchanges with other columns: for a kernel close to a permutation far less than one.
    """

    def __init__(self, rows: Callable[[], Iterator[tuple[slice, Array]]], w: Array) -> None:
        self.rows, self.w = rows, w
        n = len(w)
        self.top: list[NDArray[np.intp] | None] = []
        self.rest = np.empty(n)
        self.column, self.diagonal = np.zeros(n), np.zeros(n)
        for block, P in rows():
            top = P.argmax(axis=1) if P.max() > 0.9 else None
            self.top.append(top)
            others = self._others(P, top)
            self.column += w[block] @ others
            self.diagonal += w[block] @ (others * (1.0 - others))
            if top is not None:
                rest = self.rest[block] = others.sum(axis=1)
                self.diagonal += np.bincount(top, weights=w[block] * (1.0 - rest) * rest, minlength=n)

    @staticmethod
    def _others(P: Array, top: NDArray[np.intp] | None) -> Array:
        if top is None:
            return P
        out = P.copy()
        out[np.arange(len(P)), top] = 0.0
        return out

    def product(self, u: Array) -> Array:
        out = self.column * u
        for (block, P), top in zip(self.rows(), self.top, strict=True):
            w, others = self.w[block], self._others(P, top)
            mean = others @ u
            if top is not None:  # the mean of u over the row, from its value at the largest entry
                rest = self.rest[block]
                mean -= rest * u[top]
                out -= np.bincount(top, weights=w * (1.0 - rest) * mean, minlength=len(u))
                mean += u[top]
            out -= (w * mean) @ others
        return np.asarray(out)
