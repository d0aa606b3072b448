"""Interaction energies: half the double integral of a function of the logit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.memory import blocks
from otattn.gradient_flow.energy import Energy, Scaled, symmetric_form
from otattn.measures import DiscreteMeasure

__all__ = ["ExponentialEnergy", "InteractionEnergy", "LinearEnergy", "ReLUEnergy", "SigmoidEnergy"]


@dataclass(frozen=True, eq=False, init=False)
class InteractionEnergy(Energy):
    r"""``E(mu) = 1/2 iint H(<A x, y>) dmu(x) dmu(y)`` with ``H' = h``; the base of the four kernels below.

    .. math:: \varphi_\mu(x) = \tfrac12 \int [H(\langle Ax, y\rangle) + H(\langle Ay, x\rangle)]\, d\mu(y), \qquad
              \nabla\varphi_\mu(x) = \tfrac12 \int [h(\langle Ax, y\rangle) A^\top y
                                                   + h(\langle Ay, x\rangle) A y]\, d\mu(y)

    For symmetric A the gradient is ``A int h(<A x, y>) y dmu(y)``: unnormalised attention with values
    ``V = A``. Subclasses name H and h.

    Parameters
    ----------
    A : array_like (d, d)
        Any square matrix.
    """

    A: Array

    def __init__(self, A: ArrayLike) -> None:
        object.__setattr__(self, "A", symmetric_form(A))

    @abstractmethod
    def _H(self, S: Array) -> Array: ...

    @abstractmethod
    def _h(self, S: Array) -> Array: ...

    def _sides(self) -> list[Array]:
        """A and its transpose, once when they are equal: the logits of x as query and as key."""
        return [self.A] if np.array_equal(self.A, self.A.T) else [self.A, self.A.T]

    def _logits(self, B: Array, x: Array, y: Array) -> Iterator[tuple[slice, Array]]:
        """``<B x, y>`` in blocks of rows."""
        q = x @ B.T
        for rows in blocks(len(x), len(y), None):
            yield rows, q[rows] @ y.T

    def _exponent(self, x: Array, y: Array) -> float:
        """What is taken off the logits before H and h are applied."""
        return 0.0

    def _keys(self, B: Array, y: Array) -> Array:
        """The gradient of the logit in x."""
        return y @ B

    def _value(self, mu: DiscreteMeasure) -> tuple[float, float]:
        y, w = mu.points, mu.weights
        top = self._exponent(y, y)
        with np.errstate(over="ignore", invalid="ignore"):
            total = sum(float(w[rows] @ (self._H(S - top) @ w)) for rows, S in self._logits(self.A, y, y))
        return 0.5 * total, top

    def _variation(self, x: Array, mu: DiscreteMeasure) -> Scaled:
        sides, top, out = self._sides(), self._exponent(x, mu.points), np.zeros(len(x))
        with np.errstate(over="ignore", invalid="ignore"):
            for B in sides:
                for rows, S in self._logits(B, x, mu.points):
                    out[rows] += self._H(S - top) @ mu.weights / len(sides)
        return out, top

    def _gradient(self, x: Array, mu: DiscreteMeasure) -> Scaled:
        sides, top, out = self._sides(), self._exponent(x, mu.points), np.zeros_like(x)
        with np.errstate(over="ignore", invalid="ignore"):
            for B in sides:
                keys = self._keys(B, mu.points) * (mu.weights[:, None] / len(sides))
                for rows, S in self._logits(B, x, mu.points):
                    out[rows] += self._h(S - top) @ keys
        return out, top


@dataclass(frozen=True, eq=False, init=False)
class ExponentialEnergy(InteractionEnergy):
    r"""``E(mu) = 1/2 iint exp(<A x, y> + <c, x + y>) dmu dmu``, for logits of any size.

    For symmetric A and ``c = 0`` its gradient is ``A int exp(<A x, y>) y dmu(y)``: exponential attention with
    ``V = A``, and ``Z_mu(x)`` times softmax attention with ``V = A``, ``Z_mu(x) = int exp(<A x, y>) dmu(y)``.
    So softmax attention is the gradient flow with the mobility ``1/Z``. With a bias c in its logits and the
    value bias ``V = A, b_V = c`` it is the one with mobility ``exp(-<c, x>) / Z``.

    Parameters
    ----------
    A : array_like (d, d)
    bias : array_like (d,), optional
        The vector c, zero by default.

    Examples
    --------
    >>> energy = ExponentialEnergy([[1.0]])
    >>> energy([[0.0]]), round(energy.log([[100.0]]), 6)   # log(exp(10000) / 2)
    (0.5, 9999.306853)

    References
    ----------
    Sander, Ablin, Blondel, Peyré, "Sinkformers", AISTATS 2022, section 3; Castin, Ablin, Carrillo, Peyré, "A
    unified perspective on the dynamics of deep Transformers", 2025 (mobility).
    """

    bias: Array | None

    def __init__(self, A: ArrayLike, *, bias: ArrayLike | None = None) -> None:
        super().__init__(A)
        c = None if bias is None else check.frozen(check.vector(bias, "bias", size=len(self.A), limit=check.LARGEST))
        object.__setattr__(self, "bias", c)

    def _H(self, S: Array) -> Array:
        return np.asarray(np.exp(S, out=S))

    _h = _H

    def _logits(self, B: Array, x: Array, y: Array) -> Iterator[tuple[slice, Array]]:
        for rows, S in super()._logits(B, x, y):
            if self.bias is not None:
                S += (x[rows] @ self.bias)[:, None]
                S += y @ self.bias
            yield rows, S

    def _keys(self, B: Array, y: Array) -> Array:
        keys = super()._keys(B, y)
        return keys if self.bias is None else keys + self.bias

    def _exponent(self, x: Array, y: Array) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            top = max(float(S.max()) for B in self._sides() for _, S in self._logits(B, x, y))
        if not np.isfinite(top):
            raise OverflowError("the logits <A x, y> are not representable in float64; scale A or the points down.")
        return top


class LinearEnergy(InteractionEnergy):
    """``H(s) = s^2 / 2``: the energy of linear attention.

    Examples
    --------
    >>> LinearEnergy([[1.0]])([[2.0]])   # 16 / 4
    4.0
    """

    def _H(self, S: Array) -> Array:
        return np.asarray(0.5 * S * S)

    def _h(self, S: Array) -> Array:
        return S


class ReLUEnergy(InteractionEnergy):
    """``H(s) = max(s, 0)^2 / 2``: the energy of attention with the positive part.

    Examples
    --------
    >>> ReLUEnergy([[1.0]])([[-1.0], [1.0]])   # two of the four logits are positive
    0.125
    """

    def _H(self, S: Array) -> Array:
        return np.asarray(0.5 * np.maximum(S, 0.0) ** 2)

    def _h(self, S: Array) -> Array:
        return np.asarray(np.maximum(S, 0.0))


class SigmoidEnergy(InteractionEnergy):
    """``H(s) = log(1 + exp(s))``: the energy of attention with the logistic function.

    Examples
    --------
    >>> SigmoidEnergy([[1.0]])([[0.0]])   # log(2) / 2
    0.34657359027997264
    """

    def _H(self, S: Array) -> Array:
        return np.asarray(np.logaddexp(0.0, S))

    def _h(self, S: Array) -> Array:
        return np.asarray(expit(S))
