"""Sinkhorn attention: the kernel normalised in rows and in columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse.linalg import LinearOperator, cg

from otattn import _validate as check
from otattn._linalg import psd_eigh
from otattn.attention import base
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.kernels import Head, NormalisedKernel, _blocks, _NormalisedJacobian
from otattn.errors import ConvergenceError
from otattn.measures import GaussianMeasure

__all__ = ["SinkhornAttention"]

Array = NDArray[np.float64]
DENSE_LIMIT = 1024
"""Up to this many atoms the implicit-function system is factorised; beyond, it is solved by conjugate gradients."""


@dataclass(frozen=True, eq=False, init=False)
class SinkhornAttention(AttentionMap):
    r"""Sinkhorn attention: ``k(x, y) = exp(<A x, y> + f(x) + h(y))`` with both marginals equal to one.

    .. math:: \int k(x, y)\, d\mu(y) = 1 = \int k(x, y)\, d\mu(x), \qquad \Gamma_\mu(x) = V \int k(x, y)\, y\, d\mu(y)

    At points off the support of ``mu`` the potential ``f`` is extended by the row condition, so the map is softmax
    attention with the column potential ``h`` added to the logits.

    Parameters
    ----------
    A : array_like (d, d)
    V : array_like (e, d)
    tol : float
        Largest allowed relative error of a column marginal (rows are exact).
    max_iter : int
        Sinkhorn sweeps before ConvergenceError.

    References
    ----------
    Sander, Ablin, Blondel, Peyre, "Sinkformers", AISTATS 2022.

    Examples
    --------
    >>> attention = SinkhornAttention([[1.0]], [[1.0]])
    >>> attention([[-1.0], [1.0]], [[-1.0], [1.0]]).ravel()   # tanh(1)
    array([-0.76159416,  0.76159416])
    """

    A: Array
    V: Array
    tol: float
    max_iter: int

    def __init__(self, A: ArrayLike, V: ArrayLike, *, tol: float = 1e-10, max_iter: int = 10_000) -> None:
        form = check.matrix(A, "A")
        if form.shape[0] != form.shape[1]:
            raise ValueError(f"A must be square, (d, d), received shape {form.shape}; multiply the factors: K.T @ Q.")
        object.__setattr__(self, "A", check.frozen(form))
        object.__setattr__(self, "V", check.frozen(check.matrix(V, "V", shape=(None, len(form)))))
        object.__setattr__(self, "tol", check.positive(tol, "tol"))
        object.__setattr__(self, "max_iter", check.count(max_iter, "max_iter"))

    @property
    def in_dim(self) -> int:
        return int(self.V.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.V.shape[0])

    def potentials(self, mu: Any, *, block_size: int | None = None) -> tuple[Array, Array]:
        """``f`` and ``h`` at the atoms (``(n,)`` each): ``w_j exp(<A x_i, x_j> + f_i + h_j)`` has unit marginals.

        The gauge is ``sum_i w_i h_i = 0``. Atoms of zero weight get the extended values.

        Raises
        ------
        ConvergenceError
            A marginal is further than ``tol`` from one after ``max_iter`` sweeps.
        """
        measure = self.as_measure(mu)
        h = self._column_potential(measure, block_size)
        kernel = self._kernel(measure, None, block_size, offset=h)
        return -kernel.log_normaliser(measure.points), h

    def _head(self) -> Head:
        return Head(self.A, np.eye(self.in_dim), self.V)

    def _column_potential(self, mu: Measure, block_size: int | None) -> Array:
        """Log-domain Sinkhorn with Newton steps on the concave dual once the sweeps slow down."""
        live = mu.weights > 0
        y, w = mu.points[live], mu.weights[live]
        centred = y - w @ y
        # the potentials absorb what depends on one point only: iterate on centred logits, undo the shift at the end
        L = _LogitRows(centred @ self.A.T, centred, block_size)
        logw = np.log(w)
        h = np.zeros(len(w))
        error = np.inf
        for sweep in range(self.max_iter):
            f = -L.row_logsumexp(h + logw)
            column = L.column_logsumexp(f + logw)
            error = float(np.abs(np.expm1(column + h)).max())
            if error <= self.tol:
                break
            if sweep >= 20 and error < 0.5 and len(w) <= DENSE_LIMIT:
                h = self._newton(L, h, f, w)
            else:
                h = -column
        else:
            raise ConvergenceError(
                f"Sinkhorn attention needs marginals to {self.tol:g}, reached {error:.3g} after {self.max_iter} "
                "sweeps; raise max_iter or tol, or scale A down."
            )
        # <A x, y> = <A (x - m), y - m> + terms in x alone + <A m, y> + const
        mean = w @ y
        shifted = h - centred @ (self.A @ mean)
        shifted -= w @ shifted
        if live.all():
            return shifted
        out = np.zeros(mu.n)
        out[live] = shifted
        # extension by the column condition; these columns carry no mass, the values only inform
        dead = ~live
        const = NormalisedKernel(
            Head(self.A.T, np.eye(self.in_dim), self.V), y, w, offset=-self._row_norm(y, w, shifted)
        )
        out[dead] = -const.log_normaliser(mu.points[dead])
        return out

    def _row_norm(self, y: Array, w: Array, h: Array) -> Array:
        return NormalisedKernel(self._head(), y, w, offset=h).log_normaliser(y)

    @staticmethod
    def _newton(L: _LogitRows, h: Array, f: Array, w: Array) -> Array:
        """One damped Newton step for the column condition ``sum_i w_i P_ij = w_j`` as a function of h."""
        logw = np.log(w)
        P = np.exp(L.dense() + f[:, None] + (h + logw)[None, :])
        residual = w - w @ P
        M = np.diag(w @ P) - (P.T * w) @ P
        step = cho_solve(cho_factor(M + np.outer(w, w) + 1e-14 * np.diag(w)), residual)
        size = float(np.abs(step).max())
        return np.asarray(h + step * min(1.0, 1.0 / max(size, 1e-300)))

    def _kernel(
        self, mu: Measure, times: Array | None, block_size: int | None, offset: Array | None = None
    ) -> NormalisedKernel:
        if times is not None:
            raise TypeError(
                "Sinkhorn attention has no causal form (a lower-triangular kernel with unit marginals is the identity); "
                "use masked softmax attention."
            )
        h = self._column_potential(mu, block_size) if offset is None else offset
        return NormalisedKernel(self._head(), mu.points, mu.weights, offset=h, block_size=block_size)

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).apply(x, None)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).field(x, None)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        kernel = self._kernel(mu, times, block_size)
        parts = _NormalisedJacobian(kernel, None)
        solver = _MarginalSolver(parts, mu.weights)

        def jvp(direction: Array) -> Array:
            dQ, dK, _, _ = parts.key_direction(direction)
            moved = np.zeros(mu.n)
            for rows, P in parts.rows():
                T = parts.logit_block(rows, dQ, dK, None)
                T *= P
                r = T.sum(axis=1, keepdims=True)
                moved += mu.weights[rows] @ (T - r * P)
            return parts.jvp(direction, extra=-solver.solve(moved))

        def vjp(cotangent: Array) -> Array:
            direct, column = parts.vjp(cotangent, extra=True)
            assert column is not None
            s = solver.solve(column)
            # adjoint of direction -> moved, applied to -s
            dQ, dK = np.empty_like(parts.Q), np.zeros_like(kernel.K)
            for rows, P in parts.rows():
                T = (mu.weights[rows, None] * P) * (s[None, :] - (P @ s)[:, None])
                dQ[rows] = T @ kernel.K
                dK += T.T @ parts.Q[rows]
            return direct - dQ @ kernel.head.Wq - dK @ kernel.head.Wk

        return JacobianOperator(mu.n, self.in_dim, self.out_dim, jvp=jvp, vjp=vjp)

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        r"""``Gamma(x) = V (alpha + Sigma^{1/2} M Sigma^{-1/2} (x - alpha))`` on the range of Sigma.

        With ``B = Sigma^{1/2} A Sigma^{1/2} = U diag(b) W^T``, ``M = U diag(2b / (1 + sqrt(1 + 4 b^2))) W^T`` has the
        cross-correlation of the coupling of N(0, Sigma) with itself whose joint precision has off-diagonal block -A.
        """
        s, E = psd_eigh(gaussian.cov)
        keep = s > s.max() * len(s) * np.finfo(np.float64).eps
        root, basis = np.sqrt(s[keep]), E[:, keep]
        B = root[:, None] * (basis.T @ self.A @ basis) * root
        U, b, Wt = np.linalg.svd(B)
        M = (U * (2.0 * b / (1.0 + np.sqrt(1.0 + 4.0 * b * b)))) @ Wt
        # E[y | x] = Sigma^{1/2} M Sigma^{-1/2} x: the rows of B belong to y (logit y^T A x), the columns to x
        G = self.V @ (basis * root) @ M @ (basis / root).T
        return G, self.V @ gaussian.mean - G @ gaussian.mean


class _LogitRows:
    """Row-blocked log-sum-exps of ``G Y^T`` over rows and columns."""

    def __init__(self, G: Array, Y: Array, block_size: int | None) -> None:
        self.G, self.Y = G, Y
        self.blocks = list(_blocks(len(G), len(Y), block_size))
        self.stored = G @ Y.T if 8 * len(G) * len(Y) <= base.MEMORY_BUDGET // 4 else None

    def _rows(self, rows: slice) -> Array:
        return self.stored[rows] if self.stored is not None else self.G[rows] @ self.Y.T

    def dense(self) -> Array:
        return self.stored if self.stored is not None else self.G @ self.Y.T

    def row_logsumexp(self, column: Array) -> Array:
        out = np.empty(len(self.G))
        for rows in self.blocks:
            S = self._rows(rows) + column
            top = S.max(axis=1)
            out[rows] = top + np.log(np.exp(S - top[:, None]).sum(axis=1))
        return out

    def column_logsumexp(self, row: Array) -> Array:
        top = np.full(len(self.Y), -np.inf)
        total = np.zeros(len(self.Y))
        for rows in self.blocks:
            S = self._rows(rows) + row[rows, None]
            new = np.maximum(top, S.max(axis=0))
            total = total * np.exp(top - new) + np.exp(S - new).sum(axis=0)
            top = new
        return np.asarray(top + np.log(total))


class _MarginalSolver:
    """Solves ``(D_w - P^T D_w P) dh = r`` on the complement of the constants, for the implicit function theorem.

    The matrix is symmetric PSD with kernel 1 (on atoms of positive weight), so the right side sums to zero and any
    gauge gives the same derivative of the map.
    """

    def __init__(self, parts: _NormalisedJacobian, weights: Array) -> None:
        self.parts, self.w = parts, weights
        self.live = weights > 0
        self.root = np.sqrt(weights[self.live])
        self.factor: Any = None
        if len(self.root) <= DENSE_LIMIT:
            P = np.concatenate([block for _, block in parts.rows()])[np.ix_(self.live, self.live)]
            B = self.root[:, None] * P / self.root
            # singular values of B lie in [0, 1]; 1 - s^2 through the eigenvalues keeps the small ones accurate
            M = np.eye(len(B)) - B.T @ B + np.outer(self.root, self.root)
            self.factor = cho_factor(M + 1e-15 * np.eye(len(B)))

    def _product(self, z: Array) -> Array:
        full = np.zeros(len(self.w))
        full[self.live] = z / self.root
        out = np.zeros(len(self.w))
        for rows, P in self.parts.rows():
            out += (self.w[rows] * (P @ full)) @ P
        return np.asarray(z - out[self.live] / self.root + self.root * (self.root @ z))

    def solve(self, r: Array) -> Array:
        rhs = r[self.live] / self.root
        rhs = rhs - self.root * (self.root @ rhs)
        if self.factor is not None:
            z = cho_solve(self.factor, rhs)
        else:
            operator = LinearOperator((len(rhs), len(rhs)), matvec=self._product, dtype=np.float64)
            z, info = cg(operator, rhs, rtol=1e-14, atol=0.0, maxiter=2000)
            reached = float(np.linalg.norm(self._product(z) - rhs))
            if info != 0 and reached > 1e-10 * float(np.linalg.norm(rhs)):
                raise ConvergenceError(
                    f"the derivative of the Sinkhorn potentials needs residual 1e-10, reached {reached:.3g} in 2000 "
                    "conjugate-gradient steps; scale A down (the kernel is close to a permutation)."
                )
        out = np.zeros(len(self.w))
        out[self.live] = z / self.root
        return out


