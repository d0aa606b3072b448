r"""The covariance flow that is solved by an inverse: ``Sigma(t) = (Sigma_0^{-1} - t H)^{-1}``.

Softmax attention on Gaussians has ``Sigma' = V Sigma A Sigma + Sigma A^T Sigma V^T``. If V commutes with ``Sigma_0`` and
with ``H = V A + A^T V^T``, then ``Sigma' = Sigma H Sigma``, that is ``(Sigma^{-1})' = -H``.

Proof. Let ``Sigma(t) = (Sigma_0^{-1} - t H)^{-1}`` where it is defined. V commutes with the inverse, hence with ``Sigma(t)``,
and so does ``V^T`` (Sigma is symmetric). Therefore ``V Sigma A Sigma + Sigma A^T Sigma V^T = Sigma (V A + A^T V^T)
Sigma = Sigma'``; solutions are unique. Several heads ``U_h = W_h V_h`` that all commute with ``Sigma_0`` and with ``H
= sum_h U_h A_h + (U_h A_h)^T`` give the same with this H; so does linear attention with mean zero. Biases move the
mean only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from otattn._linalg import Array, psd_sqrt, symmetrize
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.dynamics.gaussian_fields import field_of
from otattn.dynamics.velocity import Field
from otattn.measures import GaussianMeasure

__all__ = ["CovarianceClosedForm", "covariance_closed_form"]

COMMUTE_TOL = 1e-12
"""Relative size of commutators that count as zero."""
EIGENVALUE_TOL = 1e-9
"""Relative distance at which eigenvalues count as equal, or as zero."""


@dataclass(frozen=True, eq=False)
class CovarianceClosedForm(Result):
    """``Sigma(t) = Sigma_0^{1/2} (I - t Sigma_0^{1/2} H Sigma_0^{1/2})^{-1} Sigma_0^{1/2}``, t from the start.

    Attributes
    ----------
    H : ndarray (d, d)
        ``V A + A^T V^T``, symmetric.
    root : ndarray (d, d)
        ``Sigma_0^{1/2}``.
    rates, directions : ndarray (d,), (d, d)
        Eigenvalues (ascending) and eigenvectors of ``Sigma_0^{1/2} H Sigma_0^{1/2}``.

    References
    ----------
    Castin, Ablin, Carrillo, Peyre, "A Unified Perspective on the Dynamics of Deep Transformers", 2025, for Gaussian
    flows; the proof is in this module.
    """

    H: Array
    root: Array
    rates: Array
    directions: Array

    _columns = ("rates",)

    @property
    def blow_up_time(self) -> float:
        """``1 / lambda_max`` when that is positive, else inf; counted from the start."""
        top = float(self.rates[-1])
        scale = float(np.abs(self.rates).max())
        return 1.0 / top if top > EIGENVALUE_TOL * scale else math.inf

    def __call__(self, t: float) -> Array:
        """The covariance at time t (from the start).

        Raises
        ------
        ValueError
            At or after the blow-up.
        """
        if not t < self.blow_up_time:
            raise ValueError(f"t must be below the blow-up time {self.blow_up_time:g}, received {t:g}.")
        F = self.root @ self.directions
        return symmetrize((F / (1.0 - t * self.rates)) @ F.T)

    def limit(self) -> Array:
        """What the covariance tends to; with a blow-up, what ``Sigma / tr Sigma`` tends to.

        Directions of negative rate die like ``1/t``, those of rate zero stay, the largest positive one wins.
        """
        scale = float(np.abs(self.rates).max())
        if self.blow_up_time < math.inf:
            chosen = self.rates >= (1.0 - EIGENVALUE_TOL) * self.rates[-1]
        else:
            chosen = np.abs(self.rates) <= EIGENVALUE_TOL * scale
        F = (self.root @ self.directions)[:, chosen]
        S = symmetrize(F @ F.T)
        return S / np.trace(S) if self.blow_up_time < math.inf else S


def covariance_closed_form(attention: Field, gaussian: GaussianMeasure) -> CovarianceClosedForm | None:
    """The closed form of the covariance flow, or None where the hypotheses do not hold.

    Parameters
    ----------
    attention : AttentionMap or callable t -> AttentionMap
        Constant in time: softmax attention, linear attention with a centred Gaussian, or several such heads.
    gaussian : GaussianMeasure

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> form = covariance_closed_form(SoftmaxAttention([[1.0]], [[1.0]]), GaussianMeasure([0.0], [[2.0]]))
    >>> round(form.blow_up_time, 12), form(0.125)
    (0.25, array([[4.]]))
    """
    field = field_of(attention) if isinstance(attention, AttentionMap) else None
    heads = None if field is None else field.products(not gaussian.mean.any())
    if heads is None or len(heads[0][0]) != gaussian.dim:
        return None
    S = gaussian.cov
    H = symmetrize(2.0 * sum((U @ A for U, A in heads), start=np.zeros_like(S)))
    if any(not _commute(U, X) for U, _ in heads for X in (S, H)):
        return None
    root = psd_sqrt(S)
    rates, directions = np.linalg.eigh(symmetrize(root @ H @ root))
    return CovarianceClosedForm(H, root, rates, directions)


def _commute(U: Array, X: Array) -> bool:
    gap = np.linalg.norm(U @ X - X @ U)
    return bool(gap <= COMMUTE_TOL * np.linalg.norm(U) * np.linalg.norm(X))
