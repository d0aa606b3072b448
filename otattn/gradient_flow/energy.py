"""What an energy is: a functional of measures with its first variation and its Wasserstein gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import Array
from otattn.measures import DiscreteMeasure, MeasureLike, as_discrete

__all__ = ["CombinedEnergy", "Energy", "symmetric_form"]

Scaled = tuple[Array, float]
"""Numbers and the exponent L of their common factor ``exp(L)``."""


class Energy(Saved, ABC):
    r"""A functional E of probability measures on R^d.

    Its first variation ``phi_mu`` is defined, up to a constant, by

    .. math:: \frac{d}{ds} E((1-s)\mu + s\nu)\Big|_{s=0} = \int \varphi_\mu \, d(\nu - \mu),

    its Wasserstein gradient is the field ``x -> grad phi_mu(x)``. The measure flow with velocity
    ``Gamma_mu = c grad phi_mu`` climbs E for ``c > 0`` and descends it for ``c < 0``, at the speed
    ``dE/dt = (1/c) int |Gamma|^2 dmu``.

    Subclasses give values as numbers times ``exp(L)``, so that exponentials of huge logits keep a meaning.
    """

    A: Array

    @property
    def dim(self) -> int:
        """Dimension d of the points: the size of the form A, where there is one."""
        return len(self.A)

    @abstractmethod
    def _value(self, mu: DiscreteMeasure) -> tuple[float, float]: ...

    @abstractmethod
    def _variation(self, x: Array, mu: DiscreteMeasure) -> Scaled: ...

    @abstractmethod
    def _gradient(self, x: Array, mu: DiscreteMeasure) -> Scaled: ...

    def __call__(self, mu: MeasureLike) -> float:
        """``E(mu)``.

        Parameters
        ----------
        mu : DiscreteMeasure or array_like (n, d)

        Raises
        ------
        OverflowError
            The value exceeds float64; :meth:`scaled` and :meth:`log` do not.
        """
        value, exponent = self.scaled(mu)
        return float(_unscaled(np.array(value), exponent))

    def scaled(self, mu: MeasureLike) -> tuple[float, float]:
        """A number v and an exponent L with ``E(mu) = v exp(L)``."""
        value, exponent = self._value(self._measure(mu))
        return float(value), float(exponent)

    def log(self, mu: MeasureLike) -> float:
        """``log E(mu)``, for any size of the logits.

        Raises
        ------
        ValueError
            The energy is not positive at ``mu``.
        """
        value, exponent = self.scaled(mu)
        if not value > 0.0:
            raise ValueError(f"log needs a positive energy, received {value:.6g} at this measure; use scaled.")
        return float(np.log(value) + exponent)

    def first_variation(self, x: ArrayLike, mu: MeasureLike) -> Array:
        """``phi_mu`` at the rows of ``x (m, d)``, shape ``(m,)`` (the constant is the one of the subclass).

        Raises
        ------
        OverflowError
            A value exceeds float64.
        """
        return _unscaled(*self._variation(check.points(x, "x", dim=self.dim), self._measure(mu)))

    def gradient(self, x: ArrayLike, mu: MeasureLike) -> Array:
        """``grad phi_mu`` at the rows of ``x (m, d)``, shape ``(m, d)``.

        Raises
        ------
        OverflowError
            A value exceeds float64; :meth:`scaled_gradient` does not.
        """
        return _unscaled(*self.scaled_gradient(x, mu))

    def scaled_gradient(self, x: ArrayLike, mu: MeasureLike) -> Scaled:
        """An array G ``(m, d)`` and an exponent L with ``grad phi_mu = G exp(L)``."""
        return self._gradient(check.points(x, "x", dim=self.dim), self._measure(mu))

    def _measure(self, mu: MeasureLike) -> DiscreteMeasure:
        measure = as_discrete(mu)
        if measure.dim != self.dim:
            raise ValueError(
                f"mu must have the dimension {self.dim} of the energy, received {measure.dim}; check A or the points."
            )
        return measure.support()


@dataclass(frozen=True, eq=False, init=False)
class CombinedEnergy(Energy):
    """``sum_k c_k E_k``: several heads, or an energy with another sign.

    Parameters
    ----------
    energies : sequence of Energy
    coefficients : array_like (k,)

    Examples
    --------
    >>> from otattn.gradient_flow.interaction import LinearEnergy
    >>> descent = CombinedEnergy([LinearEnergy([[1.0]])], [-1.0])
    >>> descent([[2.0]]), descent.gradient([[2.0]], [[2.0]])
    (-4.0, array([[-8.]]))
    """

    energies: tuple[Energy, ...]
    coefficients: Array

    def __init__(self, energies: Sequence[Energy], coefficients: ArrayLike) -> None:
        parts = tuple(energies)
        if not parts or not all(isinstance(part, Energy) for part in parts):
            raise ValueError(f"energies must be a non-empty sequence of energies, received {energies!r}.")
        if len({part.dim for part in parts}) > 1:
            raise ValueError(f"energies must act in one space, received dimensions {[part.dim for part in parts]}.")
        object.__setattr__(self, "energies", parts)
        object.__setattr__(
            self, "coefficients", check.frozen(check.vector(coefficients, "coefficients", size=len(parts)))
        )

    @property
    def dim(self) -> int:
        return self.energies[0].dim

    def _sum(self, terms: list[Scaled]) -> Scaled:
        top = max(exponent for _, exponent in terms)
        parts = (c * np.exp(L - top) * v for c, (v, L) in zip(self.coefficients, terms, strict=True))
        return np.asarray(sum(parts)), top

    def _value(self, mu: DiscreteMeasure) -> tuple[float, float]:
        value, exponent = self._sum([(np.asarray(v), L) for v, L in (part._value(mu) for part in self.energies)])
        return float(value), exponent

    def _variation(self, x: Array, mu: DiscreteMeasure) -> Scaled:
        return self._sum([part._variation(x, mu) for part in self.energies])

    def _gradient(self, x: Array, mu: DiscreteMeasure) -> Scaled:
        return self._sum([part._gradient(x, mu) for part in self.energies])


def symmetric_form(value: ArrayLike, name: str = "A", *, needs: bool = False) -> Array:
    """A square matrix, read-only; with ``needs`` it must be symmetric to 1e-12 of its norm."""
    A = check.matrix(value, name)
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"{name} must be square, (d, d), received shape {A.shape}; multiply the factors: K.T @ Q.")
    if needs and np.abs(A - A.T).max() > 1e-12 * np.abs(A).max():
        raise ValueError(
            f"{name} must be symmetric, received entries that differ by {np.abs(A - A.T).max():.3g} from the "
            "transpose; without symmetry the covariance flow has no energy: pass (A + A.T) / 2 if it is meant."
        )
    return check.frozen(A)


def _unscaled(values: Array, exponent: float) -> Array:
    """``values exp(exponent)``, an OverflowError where that is not representable."""
    if exponent == 0.0:
        out = values
    else:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            half = np.exp(0.5 * exponent)  # in two steps: small numbers may have large exponents
            out = np.where(values == 0.0, 0.0, (values * half) * half)
    if not np.isfinite(out).all():
        raise OverflowError(
            f"a value of the energy is not representable in float64 (exponent {exponent:.4g}); use scaled, "
            "scaled_gradient or log, or scale A or the points down."
        )
    return np.asarray(out)
