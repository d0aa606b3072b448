"""Energies whose Bures-Wasserstein gradients are the covariance flows of attention on centred Gaussians."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import Array, psd_sqrt, symmetrize
from otattn.gradient_flow.energy import symmetric_form
from otattn.measures import GaussianMeasure

__all__ = ["GaussianEnergy", "GaussianL2Energy", "GaussianSinkhornEnergy", "GaussianSoftmaxEnergy"]


class GaussianEnergy(Saved, ABC):
    r"""A function of Gaussian measures ``N(m, Sigma)`` with its Bures-Wasserstein gradient.

    The tangent ``(u, T)``, T symmetric, is the field ``x -> u + T (x - m)``; it moves the covariance by
    ``T Sigma + Sigma T`` and has the squared length ``|u|^2 + tr(T Sigma T)``. The gradient is
    ``u = dE/dm``, ``T = 2 dE/dSigma``.
    """

    A: Array

    @property
    def dim(self) -> int:
        """Dimension d of the space: the size of the form A, where there is one."""
        return len(self.A)

    @abstractmethod
    def _value(self, m: Array, S: Array) -> float: ...

    @abstractmethod
    def _gradient(self, m: Array, S: Array) -> tuple[Array, Array]: ...

    def __call__(self, gaussian: GaussianMeasure) -> float:
        """``E(N(m, Sigma))``."""
        g = self._checked(gaussian)
        return float(self._value(g.mean, g.cov))

    def gradient(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """The Bures-Wasserstein gradient ``u (d,)`` and ``T (d, d)``."""
        g = self._checked(gaussian)
        u, T = self._gradient(g.mean, g.cov)
        return u, symmetrize(T)

    def _checked(self, gaussian: Any) -> GaussianMeasure:
        if not isinstance(gaussian, GaussianMeasure):
            raise TypeError(
                f"gaussian must be a GaussianMeasure, received {type(gaussian).__name__}; build one from a mean "
                "and a covariance, or use the energies of discrete measures."
            )
        if gaussian.dim != self.dim:
            raise ValueError(f"gaussian must have the dimension {self.dim} of the energy, received {gaussian.dim}.")
        return gaussian


@dataclass(frozen=True, eq=False, init=False)
class GaussianSoftmaxEnergy(GaussianEnergy):
    r"""``E = tr(A Sigma A Sigma) / 4``, whose gradient ``T = A Sigma A`` is softmax attention with ``V = A``.

    Linear attention has the same covariance flow on centred Gaussians. The mean does not enter: on Gaussians
    that are not centred, softmax attention moves the mean by ``A (I + Sigma A) m``, and no energy has that
    and T as its gradient (``dE/dm`` would depend on Sigma where ``dE/dSigma`` does not depend on m).

    Parameters
    ----------
    A : array_like (d, d), symmetric

    Examples
    --------
    >>> from otattn.measures import GaussianMeasure
    >>> energy = GaussianSoftmaxEnergy([[2.0]])
    >>> energy(GaussianMeasure([0.0], [[3.0]])), energy.gradient(GaussianMeasure([0.0], [[3.0]]))[1]
    (9.0, array([[12.]]))

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, "A unified perspective on the dynamics of deep Transformers", 2025.
    """

    A: Array

    def __init__(self, A: ArrayLike) -> None:
        object.__setattr__(self, "A", symmetric_form(A, needs=True))

    def _value(self, m: Array, S: Array) -> float:
        B = self.A @ S
        return 0.25 * float(np.sum(B * B.T))

    def _gradient(self, m: Array, S: Array) -> tuple[Array, Array]:
        return np.zeros_like(m), self.A @ S @ self.A


@dataclass(frozen=True, eq=False, init=False)
class GaussianSinkhornEnergy(GaussianEnergy):
    r"""The Sinkhorn energy of a Gaussian, ``1/2 sup_pi { E_pi <A x, y> - KL(pi | mu x mu) }``, in closed form.

    With the singular values ``b_i`` of ``Sigma^{1/2} A Sigma^{1/2}`` and ``u_i = (sqrt(1 + 4 b_i^2) - 1) / 2``,

    .. math:: E = \tfrac12 \langle A m, m\rangle + \tfrac12 \sum_i (u_i - \tfrac12 \log(1 + u_i)).

    Proof: the optimal coupling is Gaussian, with cross-correlations ``mu_i = 2 b_i / (1 + sqrt(1 + 4 b_i^2))`` along
    the singular vectors; so ``E_pi <A x, y> = <A m, m> + sum b_i mu_i``, ``KL = -1/2 sum log(1 - mu_i^2)``, and
    ``mu_i = b_i (1 - mu_i^2)``, ``b_i mu_i = u_i``, ``1 - mu_i^2 = 1 / (1 + u_i)``. The gradient is ``u = (A + A^T) m
    / 2`` and ``T = (A^T Z A + A Z' A^T) / 2``, Z and Z' the covariances of y given x and of x given y; for symmetric A
    the two terms agree and ``T = A Z A`` is Sinkhorn attention with ``V = A``, on centred Gaussians and on the others.

    Parameters
    ----------
    A : array_like (d, d)

    Examples
    --------
    >>> from otattn.measures import GaussianMeasure
    >>> round(GaussianSinkhornEnergy([[1.0]])(GaussianMeasure([0.0], [[2.0]])), 12)   # b = 2, u = 1.5616
    0.545622995878

    References
    ----------
    Janati, Muzellec, Peyré, Cuturi, "Entropic optimal transport between unbalanced Gaussian measures has a
    closed form", NeurIPS 2020, theorem 1 (for the quadratic cost).
    """

    A: Array

    def __init__(self, A: ArrayLike) -> None:
        object.__setattr__(self, "A", symmetric_form(A))

    def _value(self, m: Array, S: Array) -> float:
        root = psd_sqrt(S)
        b = np.linalg.svd(root @ self.A @ root, compute_uv=False)
        u = 2.0 * b * b / (1.0 + np.hypot(1.0, 2.0 * b))
        return 0.5 * float(m @ self.A @ m) + 0.5 * float(np.sum(u - 0.5 * np.log1p(u)))

    def _gradient(self, m: Array, S: Array) -> tuple[Array, Array]:
        root = psd_sqrt(S)
        U, b, Wt = np.linalg.svd(root @ self.A @ root)
        left, right = self.A.T @ root @ U, self.A @ root @ Wt.T
        shrink = 2.0 / (1.0 + np.hypot(1.0, 2.0 * b))
        T = 0.5 * ((left * shrink) @ left.T + (right * shrink) @ right.T)
        return symmetrize(self.A) @ m, T


@dataclass(frozen=True, eq=False, init=False)
class GaussianL2Energy(GaussianEnergy):
    r"""``E = tr(H Sigma) / 2 - log det(I + 2 K Sigma K^T) / 4`` with ``H = K^T K``: tied L2 attention.

    Its gradient is ``T = 2 H (I + 2 Sigma H)^{-1} Sigma H``, the covariance flow of L2 attention with ``Q = K``
    and ``V = Q^T K = H`` (a factor c in ``Q = c K`` and another in V only scale it). Proof: with ``N = (I + 2 Sigma
    H)^{-1}``, ``dE = tr(H dSigma) / 2 - tr(N^T H dSigma) / 2`` and ``H - N^T H = 2 H Sigma N^T H`` is T. It is the
    only case: with ``V = Q^T K`` and another Q (H invertible) the flow is ``T = 2 B^T N Sigma B``, ``B = K^T Q``,
    with the derivative ``U -> 2 X U X^T``, ``X = B^T N``. That is self-adjoint iff X is symmetric (a skew X cannot be
    for all Sigma). Differentiating X at ``Sigma = 0`` in the direction ``z z^T`` leaves ``(B^T z)(H z)^T`` symmetric,
    so ``B^T z`` is parallel to ``H z`` for every z, and ``B = c H``.

    Parameters
    ----------
    K : array_like (k, d)

    Examples
    --------
    >>> from otattn.measures import GaussianMeasure
    >>> GaussianL2Energy([[1.0]]).gradient(GaussianMeasure([0.0], [[1.0]]))[1].round(6)
    array([[0.666667]])

    References
    ----------
    Our own proof, above; Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021, for
    the map.
    """

    K: Array

    def __init__(self, K: ArrayLike) -> None:
        object.__setattr__(self, "K", check.frozen(check.matrix(K, "K")))

    @property
    def dim(self) -> int:
        return int(self.K.shape[1])

    def _value(self, m: Array, S: Array) -> float:
        F = self.K @ psd_sqrt(S)
        s = np.linalg.svd(F, compute_uv=False) ** 2
        # x / 2 - log(1 + 2 x) / 4 in each singular direction
        return float(np.sum(0.5 * s - 0.25 * np.log1p(2.0 * s)))

    def _gradient(self, m: Array, S: Array) -> tuple[Array, Array]:
        H = self.K.T @ self.K
        solved = np.linalg.solve(np.eye(self.dim) + 2.0 * S @ H, S @ H)
        return np.zeros_like(m), 2.0 * H @ solved
