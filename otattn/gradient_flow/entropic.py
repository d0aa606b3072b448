"""The energy of Sinkhorn attention: entropic transport of a measure with itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import SinkhornAttention
from otattn.gradient_flow.energy import Energy, Scaled, symmetric_form
from otattn.measures import DiscreteMeasure

__all__ = ["SinkhornEnergy"]


@dataclass(frozen=True, eq=False, init=False)
class SinkhornEnergy(Energy):
    r"""``E(mu) = 1/2 sup_pi { E_pi <A x, y> - KL(pi | mu x mu) }`` over the couplings of mu with itself.

    With the Schrödinger potentials, ``exp(<A x, y> + f(x) + h(y))`` of unit marginals, the supremum is attained at
    ``pi = exp(<A x, y> + f(x) + h(y)) mu x mu``, so that

    .. math:: E(\mu) = -\tfrac12 \int (f + h)\, d\mu, \qquad \varphi_\mu = -\tfrac12 (f + h),
       \qquad \nabla\varphi_\mu(x) = \tfrac12 (A^\top \bar y(x) + A\, \bar x(x)),

    ``ybar(x) = int k(x, y) y dmu(y)`` and ``xbar(x) = int k(y, x) y dmu(y)``. Proof: by duality the supremum is the
    minimum over (f, h) of ``-int f dmu - int h dmu + iint exp(<A x, y> + f + h) dmu dmu - 1``; by the envelope
    theorem its derivative in the direction ``nu - mu`` is ``int (2 - f - h) d(nu - mu)``, and the 2 integrates to
    0. Differentiating the row condition ``f(x) = -log int exp(<A x, y> + h(y)) dmu(y)`` gives ``grad f(x) = -A^T
    ybar(x)``, the column condition ``grad h(x) = -A xbar(x)``. For symmetric A both are equal, and the gradient is
    Sinkhorn attention with ``V = A``.

    An error of the potentials enters the value at second order: a marginal error of 1e-10 leaves 1e-15 or less.

    Parameters
    ----------
    A : array_like (d, d)
    tol, max_iter
        As for `SinkhornAttention`.

    Raises
    ------
    ConvergenceError
        When evaluated: the marginals do not reach ``tol``.

    Examples
    --------
    >>> energy = SinkhornEnergy([[1.0]])
    >>> round(energy([[-1.0], [1.0]]), 12)   # log(cosh 1) / 2
    0.216890415242

    References
    ----------
    Sander, Ablin, Blondel, Peyré, "Sinkformers", AISTATS 2022, proposition 2.
    """

    A: Array
    tol: float
    max_iter: int

    def __init__(self, A: ArrayLike, *, tol: float = 1e-10, max_iter: int = 10_000) -> None:
        object.__setattr__(self, "A", symmetric_form(A))
        object.__setattr__(self, "tol", check.positive(tol, "tol"))
        object.__setattr__(self, "max_iter", check.count(max_iter, "max_iter"))

    def _attention(self, form: Array, values: Array) -> SinkhornAttention:
        return SinkhornAttention(form, values, tol=self.tol, max_iter=self.max_iter)

    def _value(self, mu: DiscreteMeasure) -> tuple[float, float]:
        f, h = self._attention(self.A, np.eye(self.dim)).potentials(mu)
        return -0.5 * float(mu.weights @ (f + h)), 0.0

    def _variation(self, x: Array, mu: DiscreteMeasure) -> Scaled:
        # points of zero weight get the potentials that the marginal conditions extend to them
        joint = DiscreteMeasure(np.concatenate([mu.points, x]), np.concatenate([mu.weights, np.zeros(len(x))]))
        f, h = self._attention(self.A, np.eye(self.dim)).potentials(joint)
        return -0.5 * (f + h)[mu.n :], 0.0

    def _gradient(self, x: Array, mu: DiscreteMeasure) -> Scaled:
        rows = self._attention(self.A, self.A.T)(x, mu)
        if np.array_equal(self.A, self.A.T):
            return rows, 0.0
        return 0.5 * (rows + self._attention(self.A.T, self.A)(x, mu)), 0.0
