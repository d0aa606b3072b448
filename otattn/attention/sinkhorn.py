"""Sinkhorn attention: the kernel normalised in rows and in columns."""

from __future__ import annotations

from collections.abc import Sequence
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
from otattn.errors import ConvergenceError, NotGaussianPreservingError
from otattn.measures import GaussianMeasure, MeasureLike

__all__ = ["SinkhornAttention"]


@dataclass(frozen=True, eq=False, init=False)
class SinkhornAttention(SingleHead):
    r"""Sinkhorn attention: ``k(x, y) = exp(<A x, y> + f(x) + h(y))`` with both marginals equal to one.

    .. math:: \int k(x, y)\, d\mu(y) = 1 = \int k(x, y)\, d\mu(x), \qquad
              \Gamma_\mu(x) = V \int k(x, y)\, y\, d\mu(y)

    At points off the support of ``mu`` the potential ``f`` is extended by the row condition, so the map is
    softmax attention with the column potential ``h`` added to the logits. With ``n_iter`` the kernel is normalised so many
    times instead, rows and columns by turns, as in the networks of the paper: rows first, hence ``n_iter=1`` is softmax
    attention, and rows last, so that the map still averages values. What is proven of the limit does not hold for it.

    Parameters
    ----------
    A : array_like (d, d)
    V : array_like (e, d)
    tol : float
        Largest allowed relative error of a column marginal (rows are exact).
    max_iter : int
        Passes over the kernel before ConvergenceError (Newton steps with Sinkhorn sweeps between; hard
        kernels take about a hundred).
    n_iter : int, optional
        Odd: normalisations of rows and columns, counted together (no limit is sought, ``tol`` and ``max_iter`` are not used).

    Raises
    ------
    ConvergenceError
        When the map is evaluated: the marginals do not reach ``tol``. Rounding of the logits l leaves ``1e-16
        |l|``.
    ValueError
        ``n_iter`` is even.

    References
    ----------
    Sander, Ablin, Blondel, Peyre, "Sinkformers", AISTATS 2022.

    Examples
    --------
    >>> attention = SinkhornAttention([[1.0]], [[1.0]])
    >>> attention([[-1.0], [1.0]], [[-1.0], [1.0]]).ravel()   # tanh(1)
    array([-0.76159416,  0.76159416])
    >>> X = [[0.0], [1.0], [3.0]]
    >>> softmax, three, limit = (SinkhornAttention([[1.0]], [[1.0]], n_iter=n).on_tokens(X).ravel() for n in (1, 3, None))
    >>> softmax.round(3), three.round(3), limit.round(3)
    (array([1.333, 2.646, 2.995]), array([0.674, 1.881, 2.974]), array([0.383, 0.832, 2.785]))
    """

    A: Array
    V: Array
    tol: float
    max_iter: int
    n_iter: int | None = None
    maskable = False

    def __init__(
        self, A: ArrayLike, V: ArrayLike, *, tol: float = 1e-10, max_iter: int = 10_000, n_iter: int | None = None
    ) -> None:
        form = square(A)
        object.__setattr__(self, "A", check.frozen(form))
        object.__setattr__(self, "V", check.frozen(check.matrix(V, "V", shape=(None, len(form)))))
        object.__setattr__(self, "tol", check.positive(tol, "tol"))
        object.__setattr__(self, "max_iter", check.count(max_iter, "max_iter"))
        if n_iter is not None and check.count(n_iter, "n_iter") % 2 == 0:
            raise ValueError(
                f"n_iter must be odd, so that rows are normalised last, received {n_iter}; ExponentialAttention has no "
                "normalisation, None is the limit."
            )
        object.__setattr__(self, "n_iter", None if n_iter is None else int(n_iter))

    def potentials(self, mu: MeasureLike, *, block_size: int | None = None) -> tuple[Array, Array]:
        """``f`` and ``h`` at the atoms (``(n,)`` each): ``exp(<A x_i, x_j> + f_i + h_j)`` has unit marginals.

        The gauge is ``sum_i w_i h_i = 0``. Atoms of zero weight get the extended values.

        Raises
        ------
        ConvergenceError
            A marginal is further than ``tol`` from one after ``max_iter`` passes over the kernel.
        ValueError
            The map has an ``n_iter``.
        """
        if (why := self.unfinished) is not None:
            raise ValueError(f"potentials are those of the limit, {why}.")
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
    def unfinished(self) -> str | None:
        """Why the marginals of the kernel are not both one, None when they are: what is known of the limit holds then."""
        if self.n_iter is None:
            return None
        return f"n_iter must be None for columns of mass one, received {self.n_iter}"

    @property
    def _tol(self) -> float:
        return self.tol if self.n_iter is None else 0.0

    @property
    def _kernels(self) -> int:
        return 1 if self.n_iter is None else (self.n_iter + 1) // 2

    def projections(self) -> Projections:
        """The affine maps of the head; potentials are added to its logits."""
        # only the limit does not see what a shift of the tokens adds to the logits
        return self._head(self.A) if self.n_iter is None else Projections(self.A, np.eye(self.in_dim), self.V)

    def _head(self, form: Array) -> Projections:
        return Projections(form, np.eye(self.in_dim), self.V, centred=True)

    def in_coordinates(self, E: Array, left: Array) -> SinkhornAttention:
        A, V = finite(E.T @ self.A @ E), finite(left @ self.V @ E)
        return SinkhornAttention(A, V, tol=self.tol, max_iter=self.max_iter, n_iter=self.n_iter)

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

    def _stopped(self, mu: Measure, block_size: int | None) -> list[NormalisedKernel]:
        """The kernels whose rows were normalised, in turn; the last one is that of the map."""
        assert self.n_iter is not None
        live = mu.weights > 0
        h = np.zeros((self.n_iter // 2 + 1, mu.n))
        if self.n_iter > 1:
            frame = NormalisedKernel(self.projections(), mu.points[live], mu.weights[live])
            solver = Potentials(
                frame.queries(frame.y),
                frame.K,
                frame.weights,
                tol=self.tol,
                max_iter=self.max_iter,
                block_size=block_size,
            )
            h[1:, live] = solver.sweeps(self.n_iter // 2)
        return [
            NormalisedKernel(self.projections(), mu.points, mu.weights, offset=offset, block_size=block_size)
            for offset in h
        ]

    def _kernel(self, mu: Measure, times: Array | None, block_size: int | None) -> NormalisedKernel:
        if times is not None:
            raise TypeError(
                "Sinkhorn attention has no causal form (a lower-triangular kernel with unit marginals is the "
                "identity); use masked softmax attention."
            )
        return self._solve(mu, block_size)[0] if self.n_iter is None else self._stopped(mu, block_size)[-1]

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        if self.n_iter is not None:
            return stopped_jacobian(self._stopped(mu, block_size), self.in_dim, self.out_dim)
        parts = NormalisedJacobian(self._kernel(mu, times, block_size), None)
        solver = Laplacian(parts.rows, mu.weights)  # the implicit function theorem

        def jvp(direction: Array) -> Array:
            # the derivative of the column marginals with h kept, then what h must do to undo it
            return parts.jvp(direction, extra=-solver.solve(parts.column_jvp(direction)))

        def vjp(cotangent: Array) -> Array:
            direct, column = parts.vjp(cotangent)
            return direct - parts.column_vjp(solver.solve(column))[0]

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
        if (why := self.unfinished) is not None:
            raise NotGaussianPreservingError(
                f"the image of a Gaussian is known for the limit, {why}; sample the Gaussian."
            )
        root = psd_sqrt(gaussian.cov)
        # rows of the form belong to y (logit y^T A x), columns to x
        U, b, _ = np.linalg.svd(root @ self.A @ root)
        F = root @ U
        G = self.V @ (F * (2.0 / (1.0 + np.hypot(1.0, 2.0 * b)))) @ F.T @ self.A
        return G, self.V @ gaussian.mean - G @ gaussian.mean


def stopped_jacobian(kernels: Sequence[NormalisedKernel], d: int, e: int) -> JacobianOperator:
    """The Jacobian of the last of the kernels, each one's column offset being made from the kernel before it.

    From one to the next ``h_j`` loses ``log c_j``, the column masses ``c_j = sum_i w_i P_ij``, that is ``dh_j - sum_i w_i dP_ij /
    c_j``: forwards from the first kernel, whose offset is zero, and backwards from the last one for the adjoint.
    """
    weights = kernels[0].weights
    parts = [NormalisedJacobian(kernel, None) for kernel in kernels]
    scales = []
    for part in parts[:-1]:
        mass = sum(weights[rows] @ P for rows, P in part.rows())
        if np.any((mass <= 0.0) & (weights > 0.0)):
            raise ConvergenceError(
                "the derivative needs columns of a mass above 1e-308 before they are normalised, received one that no row "
                "reaches; scale A down or take the limit (n_iter=None)."
            )
        scales.append(np.where(weights > 0.0, 1.0 / np.where(weights > 0.0, mass, 1.0), 0.0))

    def jvp(direction: Array) -> Array:
        dh = np.zeros(len(weights))
        for part, scale in zip(parts[:-1], scales, strict=True):
            dh = dh - scale * part.column_jvp(direction, dh)
        return parts[-1].jvp(direction, extra=dh)

    def vjp(cotangent: Array) -> Array:
        out, s = parts[-1].vjp(cotangent)
        for part, scale in zip(parts[-2::-1], scales[::-1], strict=True):
            moved, column = part.column_vjp(scale * s)
            out, s = out - moved, s - column
        return out

    return JacobianOperator(len(weights), d, e, jvp=jvp, vjp=vjp)
