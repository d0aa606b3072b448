"""Which energy belongs to which attention map, read off its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn._tabular import Result
from otattn.attention import (
    AttentionMap,
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.gradient_flow.energy import CombinedEnergy, Energy
from otattn.gradient_flow.entropic import SinkhornEnergy
from otattn.gradient_flow.gaussian_energies import (
    GaussianEnergy,
    GaussianL2Energy,
    GaussianSinkhornEnergy,
    GaussianSoftmaxEnergy,
)
from otattn.gradient_flow.interaction import ExponentialEnergy, LinearEnergy, ReLUEnergy, SigmoidEnergy

__all__ = ["KnownStructure", "known_gaussian_structure", "known_structure", "unwrapped"]

_PARALLEL = 1e-12
"""Matrices count as proportional when they differ by this share of their norm."""


@dataclass(frozen=True, eq=False)
class KnownStructure(Result):
    """``Gamma_mu = c M grad phi_mu``: an energy, a coefficient, and a mobility M.

    Attributes
    ----------
    energy : Energy
    coefficient : float
        c, from ``V = c A``; the flow climbs the energy when it is positive and descends it when negative.
    mobility : bool
        True when M is ``1/Z_mu(x)`` (times ``exp(-<c, x>)`` for a bias c in the logits), False when it is 1.
    """

    energy: Energy
    coefficient: float
    mobility: bool


@singledispatch
def known_structure(attention: AttentionMap) -> KnownStructure | None:
    """The energy of the map, None when its parameters admit none that is known.

    A new attention map registers its own: ``known_structure.register(NewAttention)``.

    Known are the cases with symmetric A and ``V = c A``: exponential, linear, ReLU, sigmoid and Sinkhorn attention
    and sums of such heads, and softmax attention (with value bias ``c`` times the bias of its logits).

    Examples
    --------
    >>> structure = known_structure(SoftmaxAttention([[2.0]], [[-1.0]]))
    >>> type(structure.energy).__name__, structure.coefficient, structure.mobility
    ('ExponentialEnergy', -0.5, True)
    >>> known_structure(SoftmaxAttention([[0.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]])) is None
    True
    """
    return None


@known_structure.register
def _sum(attention: MultiHeadAttention) -> KnownStructure | None:
    plain = unwrapped(attention)
    if plain is not attention:
        return known_structure(plain)
    if attention.output_bias is not None and attention.output_bias.any():
        return None
    if attention.outputs is not None and attention.values() is None:
        return None  # output matrices cannot be multiplied into heads of which no values are known
    parts = [known_structure(head) for head in attention.folded()]
    known = [part for part in parts if part is not None and not part.mobility]
    if len(known) < len(parts):
        return None
    return KnownStructure(CombinedEnergy([p.energy for p in known], [p.coefficient for p in known]), 1.0, False)


@known_structure.register
def _softmax(attention: SoftmaxAttention) -> KnownStructure | None:
    found = _proportional(attention.V, attention.A)
    if found is None:
        return None
    form, c = found
    wanted = np.zeros(len(form)) if attention.bias is None else c * attention.bias
    given = np.zeros(len(form)) if attention.value_bias is None else attention.value_bias
    if np.abs(given - wanted).max() > _PARALLEL * max(float(np.abs(wanted).max()), float(np.abs(given).max())):
        return None
    return KnownStructure(ExponentialEnergy(form, bias=attention.bias), c, True)


def _gradient(attention: Any, energy: Callable[[Array], Energy]) -> KnownStructure | None:
    """A Wasserstein gradient: symmetric A and ``V = c A``."""
    found = _proportional(attention.V, attention.A)
    return None if found is None else KnownStructure(energy(found[0]), found[1], False)


@known_structure.register
def _sinkhorn(attention: SinkhornAttention) -> KnownStructure | None:
    if attention.unfinished is not None:
        return None
    return _gradient(attention, partial(SinkhornEnergy, tol=attention.tol, max_iter=attention.max_iter))


known_structure.register(ExponentialAttention, partial(_gradient, energy=ExponentialEnergy))
known_structure.register(LinearAttention, partial(_gradient, energy=LinearEnergy))
known_structure.register(ReLUAttention, partial(_gradient, energy=ReLUEnergy))
known_structure.register(SigmoidAttention, partial(_gradient, energy=SigmoidEnergy))


def unwrapped(attention: AttentionMap) -> AttentionMap:
    """A single softmax head in MultiHeadAttention as plain softmax attention; anything else as it is."""
    if not (isinstance(attention, MultiHeadAttention) and len(attention.heads) == 1):
        return attention
    (head,) = attention.heads
    if not isinstance(head, SoftmaxAttention):
        return attention
    (head,), b = attention.folded(), attention.output_bias
    assert isinstance(head, SoftmaxAttention)
    offset = head.value_bias if b is None else b if head.value_bias is None else head.value_bias + b
    return SoftmaxAttention(head.A, head.V, bias=head.bias, value_bias=offset)


@singledispatch
def known_gaussian_structure(attention: AttentionMap) -> tuple[GaussianEnergy, float] | None:
    """The energy of the covariance flow on centred Gaussians and its coefficient, None when none is known.

    Softmax and linear attention share one energy, Sinkhorn attention has its own (all with symmetric A, ``V =
    c A``), and L2 attention has one when ``Q = a K`` and ``V = c K^T K``.

    Examples
    --------
    >>> energy, c = known_gaussian_structure(L2Attention([[3.0]], [[1.0]], [[2.0]]))
    >>> type(energy).__name__, c
    ('GaussianL2Energy', 6.0)
    """
    return None


@known_gaussian_structure.register
def _gaussian_l2(attention: L2Attention) -> tuple[GaussianEnergy, float] | None:
    H = attention.K.T @ attention.K
    a, c = _ratio(attention.Q, attention.K), _ratio(attention.V, H)
    return None if a is None or c is None else (GaussianL2Energy(attention.K), a * c)


def _gaussian_form(attention: Any, energy: Callable[[Array], GaussianEnergy]) -> tuple[GaussianEnergy, float] | None:
    found = _proportional(attention.V, attention.A)
    return None if found is None else (energy(found[0]), found[1])


known_gaussian_structure.register(SoftmaxAttention, partial(_gaussian_form, energy=GaussianSoftmaxEnergy))
known_gaussian_structure.register(LinearAttention, partial(_gaussian_form, energy=GaussianSoftmaxEnergy))


@known_gaussian_structure.register
def _gaussian_sinkhorn(attention: SinkhornAttention) -> tuple[GaussianEnergy, float] | None:
    return None if attention.unfinished is not None else _gaussian_form(attention, GaussianSinkhornEnergy)


def _proportional(V: Array, A: Array) -> tuple[Array, float] | None:
    """A, symmetrised, and c with ``V = c A``; None when A is not symmetric or there is no such c."""
    c = _ratio(V, A)
    return None if c is None or np.abs(A - A.T).max() > _PARALLEL * np.abs(A).max() else (0.5 * (A + A.T), c)


def _ratio(V: Array, A: Array) -> float | None:
    """c with ``V = c A``, None when there is none or it is 0."""
    top = float(np.abs(A).max())
    if V.shape != A.shape or top == 0.0 or not V.any():
        return None
    unit = A / top
    c = float(np.sum(V * unit) / np.sum(unit * unit))
    return c / top if np.abs(V - c * unit).max() <= _PARALLEL * np.abs(V).max() else None
