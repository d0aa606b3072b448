"""Sinkhorn attention: the kernel normalised in rows and in columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array, psd_sqrt
from otattn.attention.base import Measure
from otattn.attention.jacobian import JacobianOperator, finite
from otattn.attention.kernels import NormalisedKernel, Projections
from otattn.attention.laplacian import Laplacian
from otattn.attention.schroedinger import Potentials
from otattn.attention.single_head import NormalisedJacobian, SingleHead, square
from otattn.measures import GaussianMeasure, MeasureLike

__all__ = ["SinkhornAttention"]


@dataclass(frozen=True, eq=False, init=False)
class SinkhornAttention(SingleHead):
    r"""Sinkhorn attention: ``k(x, y) = exp(<A x, y> + f(x) + h(y))`` with both marginals equal to one.

    .. math:: \int k(x, y)\, d\mu(y) = 1 = \int k(x, y)\, d\mu(x), \qquad
              \Gamma_\mu(x) = V \int k(x, y)\, y\, d\mu(y)

    At points off the support of ``mu`` the potential ``f`` is extended by the row condition, so the map is
    softmax attention with the column potential ``h`` added to the logits.

    Parameters
    ----------
    A : array_like (d, d)
    V : array_like (e, d)
    tol : float
        Largest allowed relative error of a column marginal (rows are exact).
    max_iter : int
        Passes over the kernel before ConvergenceError (Newton steps with Sinkhorn sweeps between; hard
        kernels take about a hundred).

    Raises
    ------
    ConvergenceError
        When the map is evaluated: the marginals do not reach ``tol``. Rounding of the logits l leaves ``1e-16
        |l|``.

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
    maskable = False

    def __init__(self, A: ArrayLike, V: ArrayLike, *, tol: float = 1e-10, max_iter: int = 10_000) -> None:
        form = square(A)
        object.__setattr__(self, "A", check.frozen(form))
        object.__setattr__(self, "V", check.frozen(check.matrix(V, "V", shape=(None, len(form)))))
        object.__setattr__(self, "tol", check.positive(tol, "tol"))
        object.__setattr__(self, "max_iter", check.count(max_iter, "max_iter"))

    def potentials(self, mu: MeasureLike, *, block_size: int | None = None) -> tuple[Array, Array]:
        """``f`` and ``h`` at the atoms (``(n,)`` each): ``exp(<A x_i, x_j> + f_i + h_j)`` has unit marginals.

        The gauge is ``sum_i w_i h_i = 0``. Atoms of zero weight get the extended values.

        Raises
        ------
        ConvergenceError
            A marginal is further than ``tol`` from one after ``max_iter`` passes over the kernel.
        """
        measure = self.as_measure(mu)
        y, w = measure.points, measure.weights
        kernel, f = self._solve(measure, block_size)
        h = kernel.mass.copy()
        live = w > 0
        h[live] -= np.log(w[live])
        if not live.all():
            # both extensions are explicit: f by the row condition, h by the column condition
            backward = NormalisedKernel(self._head(self.A.T), y[live], w[live], offset=f[live], block_size=block_size)
            h[~live] = -backward.log_normaliser(y[~live])
            f[~live] = -kernel.log_normaliser(y[~live])
        # <A x, y> = <A (x - m), y - m> + <A m, y - m> + <A x, m>, m the centre
        h -= (y - kernel.centre) @ (self.A @ kernel.centre)
        f -= y @ (self.A.T @ kernel.centre)
        gauge = float(w[live] @ h[live])
        return f + gauge, h - gauge

    @property
    def _tol(self) -> float:
        return self.tol

    def projections(self) -> Projections:
        """The affine maps of the head; potentials are added to its logits."""
        return self._head(self.A)

    def _head(self, form: Array) -> Projections:
        return Projections(form, np.eye(self.in_dim), self.V, centred=True)

    def in_coordinates(self, E: Array, left: Array) -> SinkhornAttention:
        A, V = finite(E.T @ self.A @ E), finite(left @ self.V @ E)
        return SinkhornAttention(A, V, tol=self.tol, max_iter=self.max_iter)

    def _solve(self, mu: Measure, block_size: int | None) -> tuple[NormalisedKernel, Array]:
        """The kernel with its column potential (centred logits), and the row potential, 0 at zero weight."""
        live = mu.weights > 0
        # the potentials absorb what depends on one point only, so queries and keys may both be centred
        frame = NormalisedKernel(self._head(self.A), mu.points[live], mu.weights[live])
        Y = mu.points[live] - frame.centre
        solver = Potentials(
            Y @ self.A.T, Y, mu.weights[live], tol=self.tol, max_iter=self.max_iter, block_size=block_size
        )
        f, h = np.zeros(mu.n), np.zeros(mu.n)
        f[live], h[live] = solver.solve()
        kernel = NormalisedKernel(self._head(self.A), mu.points, mu.weights, offset=h, block_size=block_size)
        return kernel, f

    def _kernel(self, mu: Measure, times: Array | None, block_size: int | None) -> NormalisedKernel:
        if times is not None:
            raise TypeError(
                "Sinkhorn attention has no causal form (a lower-triangular kernel with unit marginals is the "
                "identity); use masked softmax attention."
            )
        return self._solve(mu, block_size)[0]

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        kernel = self._kernel(mu, times, block_size)
        parts = NormalisedJacobian(kernel, None)
        solver = Laplacian(parts.rows, mu.weights)  # the implicit function theorem

        def jvp(direction: Array) -> Array:
            # the derivative of the column marginals with h kept, then what h must do to undo it
            moved = np.zeros(mu.n)
            for rows, _, dP in parts.row_derivatives(direction):
                moved += mu.weights[rows] @ dP
            return parts.jvp(direction, extra=-solver.solve(moved))

        def vjp(cotangent: Array) -> Array:
            direct, column = parts.vjp(cotangent)
            s = solver.solve(column)
            # adjoint of direction -> moved, applied to -s
            dQ, dK = np.empty_like(parts.Q), np.zeros_like(kernel.K)
            for rows, P in parts.rows():
                T = s[None, :] - (P @ s)[:, None]
                T *= P
                T *= mu.weights[rows, None]
                dQ[rows] = T @ kernel.K
                dK += T.T @ parts.Q[rows]
            return direct - dQ @ kernel.head.Wq - dK @ kernel.head.Wk

        return JacobianOperator(mu.n, self.in_dim, self.out_dim, jvp=jvp, vjp=vjp)

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        r"""``Gamma(x) = V (alpha + T A (x - alpha))`` with T the covariance of ``k(x, y) mu(dy)``.

        The logit plus a quadratic potential tilts ``N(alpha, Sigma)`` to a Gaussian of covariance
        ``T = Sigma^{1/2} U diag(2 / (1 + sqrt(1 + 4 b^2))) U^T Sigma^{1/2}`` and mean ``alpha + T A (x -
        alpha)``, where ``Sigma^{1/2} A Sigma^{1/2} = U diag(b) W^T``. (With ``M = U diag(2b / (1 + sqrt(1 + 4
        b^2))) W^T`` it is ``T A = Sigma^{1/2} M Sigma^{-1/2}``; here neither A nor Sigma is inverted, and x
        may lie off the support.)
        """
        self._check_dim(gaussian.dim)
        root = psd_sqrt(gaussian.cov)
        # rows of the form belong to y (logit y^T A x), columns to x
        U, b, _ = np.linalg.svd(root @ self.A @ root)
        F = root @ U
        G = self.V @ (F * (2.0 / (1.0 + np.hypot(1.0, 2.0 * b)))) @ F.T @ self.A
        return G, self.V @ gaussian.mean - G @ gaussian.mean
