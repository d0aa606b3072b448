"""Unnormalised attention: weights ``h(<A x, y>)`` for a scalar h, integrated against the measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import memory
from otattn.attention.base import Measure
from otattn.attention.head import Arithmetic, Head
from otattn.attention.jacobian import JacobianOperator, finite
from otattn.attention.kernels import Kernel, Mass, Projections
from otattn.attention.memory import blocks
from otattn.attention.single_head import SingleHead, square
from otattn.measures import GaussianMeasure

__all__ = [
    "ExponentialAttention",
    "LinearAttention",
    "PointwiseAttention",
    "ReLUAttention",
    "SigmoidAttention",
]


@dataclass(frozen=True)
class Pointwise:
    """A scalar function h of the logit with its derivative, both vectorised; neither changes its argument."""

    value: Callable[[Array], Array]
    derivative: Callable[[Array], Array]


class PointwiseKernel(Kernel):
    """Weights ``w_j h(l_ij)`` without normalisation, in row blocks."""

    def __init__(
        self,
        head: Projections,
        h: Pointwise,
        y: Array,
        weights: Array,
        *,
        times: Array | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__(head, y, weights, times, block_size)
        # atoms of zero weight never enter, not even through an overflow of h
        live = np.where(weights[:, None] > 0, y, 0.0)
        self.K, self.Vy = live @ head.Wk.T, live @ head.V.T
        self.h = h

    def weights_of(
        self, Q: Array, times: Array | None, rows: slice, *functions: Callable[[Array], Array]
    ) -> list[Array]:
        """``w_j f(l_ij)`` on a block of rows for each function f; zero where the mask hides the atom."""
        S = Q[rows] @ self.K.T
        hidden = self.hidden(times, rows)
        if hidden is not None:
            S[hidden] = 0.0  # what is not seen must not overflow either
        out = []
        for f in functions:
            H = f(S)
            H *= self.weights
            if hidden is not None:
                H[hidden] = 0.0
            out.append(H)
        return out

    def apply(self, x: Array, times: Array | None) -> Array:
        """``Gamma`` at the rows of x."""
        Q = x @ self.head.Wq.T
        out = np.empty((len(x), self.head.e))
        with np.errstate(over="ignore", invalid="ignore"):  # values beyond float64 are refused where they come out
            for rows in blocks(len(x), self.n, self.block_size):
                out[rows] = self.weights_of(Q, times, rows, self.h.value)[0] @ self.Vy
        return out

    def field(self, x: Array, times: Array | None) -> Array:
        """``D_x Gamma``: ``sum_j w_j h'(l_ij) v_j k_j^T W_q``."""
        Q = x @ self.head.Wq.T
        out = np.empty((len(x), self.head.e, self.head.d))
        for rows in self.field_blocks(len(x)):
            H = self.weights_of(Q, times, rows, self.h.derivative)[0]
            values = np.swapaxes(H[:, :, None] * self.Vy, 1, 2)
            out[rows] = (values @ self.K) @ self.head.Wq
        return out

    def jacobian(self, times: Array | None) -> JacobianOperator:
        """Products with the derivative at the atoms; the kernels are kept when they fit half the budget."""
        head, n = self.head, self.n
        Q = self.y @ head.Wq.T
        cut = list(blocks(n, n, self.block_size))

        def compute(rows: slice) -> list[Array]:
            return self.weights_of(Q, times, rows, self.h.value, self.h.derivative)

        keep = self.block_size is None and 16 * n * n <= memory.MEMORY_BUDGET // 2
        stored = [compute(rows) for rows in cut] if keep else None

        def kernels() -> Iterator[tuple[slice, Array, Array]]:
            for i, rows in enumerate(cut):
                H, D = stored[i] if stored is not None else compute(rows)
                yield rows, H, D

        def jvp(direction: Array) -> Array:
            dQ, dK, dV = direction @ head.Wq.T, direction @ head.Wk.T, direction @ head.V.T
            out = np.empty((n, head.e))
            for rows, H, D in kernels():
                T = dQ[rows] @ self.K.T
                T += Q[rows] @ dK.T
                T *= D
                out[rows] = T @ self.Vy + H @ dV
            return out

        def vjp(cotangent: Array) -> Array:
            dQ, dK, dV = np.empty_like(Q), np.zeros_like(self.K), np.zeros_like(self.Vy)
            for rows, H, D in kernels():
                T = cotangent[rows] @ self.Vy.T
                T *= D
                dQ[rows] = T @ self.K
                dK += T.T @ Q[rows]
                dV += H.T @ cotangent[rows]
            return dQ @ head.Wq + dK @ head.Wk + dV @ head.V

        def dense() -> Array:
            out = np.empty((n, head.e, n, head.d))
            G = Q @ head.Wk
            for rows, H, D in kernels():
                part = H[:, None, :, None] * head.V[None, :, None, :]
                part += (D[:, :, None] * self.Vy).swapaxes(1, 2)[..., None] * G[rows, None, None, :]
                out[rows] = part
            out[np.arange(n), :, np.arange(n)] += self.field(self.y, times)
            return out

        return JacobianOperator(n, head.d, head.e, jvp=jvp, vjp=vjp, dense=dense)


def _exp(S: Array) -> Array:
    top = float(S.max())
    if top > 709.0:
        raise OverflowError(
            f"the logits of unnormalised exponential attention must stay below 709, received {top:.4g}; "
            "scale A or the tokens down, or normalise (softmax)."
        )
    return np.asarray(np.exp(S))


def _expit_derivative(S: Array) -> Array:
    return np.asarray(expit(S) * expit(-S))  # no cancellation in 1 - expit(S)


@dataclass(frozen=True, eq=False, init=False)
class PointwiseAttention(SingleHead):
    r"""``Gamma_mu(x) = V int h(<A x, y>) y dmu(y)``; the base of the unnormalised variants.

    Parameters
    ----------
    A : array_like (d, d)
    V : array_like (e, d)
    """

    A: Array
    V: Array
    h: ClassVar[Pointwise]
    mass: ClassVar[Mass] = "any"

    def __init__(self, A: ArrayLike, V: ArrayLike) -> None:
        form = square(A)
        object.__setattr__(self, "A", check.frozen(form))
        object.__setattr__(self, "V", check.frozen(check.matrix(V, "V", shape=(None, len(form)))))

    @property
    def _kernels(self) -> int:
        return 2

    def projections(self) -> Projections:
        """The linear maps of the head."""
        return Projections(self.A, np.eye(self.in_dim), self.V)

    def _heads(self, arithmetic: Arithmetic) -> tuple[Head, ...]:
        return (Head.of(self, self.A, self.V, arithmetic=arithmetic),)

    def in_coordinates(self, E: Array, left: Array) -> PointwiseAttention:
        return type(self)(finite(E.T @ self.A @ E), finite(left @ self.V @ E))

    def _kernel(self, mu: Measure, times: Array | None, block_size: int | None) -> PointwiseKernel:
        atom_times = getattr(mu, "times", None) if times is not None else None
        return PointwiseKernel(
            self.projections(), self.h, mu.points, mu.weights, times=atom_times, block_size=block_size
        )

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        return self._kernel(mu, times, block_size).jacobian(times)


class SigmoidAttention(PointwiseAttention):
    """Attention with the logistic function, ``h(s) = 1 / (1 + exp(-s))``, integrated against the measure.

    Examples
    --------
    >>> SigmoidAttention([[1.0]], [[1.0]])([[0.0]], [[2.0]])
    array([[1.]])
    """

    h = Pointwise(lambda S: np.asarray(expit(S)), _expit_derivative)
    mass = "at most one"


class ReLUAttention(PointwiseAttention):
    """Attention with ``h(s) = max(s, 0)``; the derivative at 0 is taken as 0.

    Examples
    --------
    >>> ReLUAttention([[1.0]], [[1.0]])([[1.0]], [[2.0]])
    array([[4.]])
    """

    h = Pointwise(lambda S: np.maximum(S, 0.0), lambda S: (S > 0).astype(np.float64))


class LinearAttention(PointwiseAttention):
    """Attention with ``h(s) = s``: ``Gamma_mu(x) = V (int y y^T dmu) A x``.

    Examples
    --------
    >>> LinearAttention([[1.0]], [[1.0]])([[1.0]], [[2.0]])
    array([[4.]])
    """

    h = Pointwise(lambda S: S.copy(), lambda S: np.ones_like(S))

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """``Gamma(x) = V (Sigma + alpha alpha^T) A x``."""
        self._check_dim(gaussian.dim)
        second = gaussian.cov + np.outer(gaussian.mean, gaussian.mean)
        return self.V @ second @ self.A, np.zeros(self.out_dim)


class ExponentialAttention(PointwiseAttention):
    """Unnormalised exponential attention, ``h(s) = exp(s)``.

    Logits above 709 raise an OverflowError (the value is not representable): of every row that is asked for,
    atoms of zero weight included, against the atoms of positive weight that it sees.

    Examples
    --------
    >>> ExponentialAttention([[1.0]], [[1.0]])([[0.0]], [[2.0]])
    array([[2.]])
    """

    h = Pointwise(_exp, _exp)
