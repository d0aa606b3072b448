"""Which energy belongs to which attention map, read off its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

Array = NDArray[np.float64]
_PARALLEL = 1e-12
"""Matrices count as proportional when they differ by this share of their norm."""
_POINTWISE: dict[type[AttentionMap], Callable[[Any], Energy]] = {
    ExponentialAttention: ExponentialEnergy,
    LinearAttention: LinearEnergy,
    ReLUAttention: ReLUEnergy,
    SigmoidAttention: SigmoidEnergy,
}


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


def known_structure(attention: AttentionMap) -> KnownStructure | None:
    """The energy of the map, None when its parameters admit none that is known.

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
    attention = unwrapped(attention)
    if not isinstance(attention, MultiHeadAttention):
        return _one_head(attention, None)
    if attention.output_bias is not None and attention.output_bias.any():
        return None
    outputs = attention.outputs or (None,) * len(attention.heads)
    parts = [_one_head(head, W) for head, W in zip(attention.heads, outputs, strict=True)]
    known = [part for part in parts if part is not None and not part.mobility]
    if len(known) < len(parts):
        return None
    return KnownStructure(CombinedEnergy([p.energy for p in known], [p.coefficient for p in known]), 1.0, False)


def unwrapped(attention: AttentionMap) -> AttentionMap:
    """A single softmax head in MultiHeadAttention as plain softmax attention; anything else as it is."""
    if not (isinstance(attention, MultiHeadAttention) and len(attention.heads) == 1):
        return attention
    head = attention.heads[0]
    if not isinstance(head, SoftmaxAttention):
        return attention
    V, b = head.V, np.zeros(head.out_dim) if head.value_bias is None else head.value_bias
    if attention.outputs is not None:
        V, b = attention.outputs[0] @ V, attention.outputs[0] @ b
    if attention.output_bias is not None:
        b = b + attention.output_bias
    return SoftmaxAttention(head.A, V, bias=head.bias, value_bias=b)


def _one_head(attention: AttentionMap, output: Array | None) -> KnownStructure | None:
    A, V = getattr(attention, "A", None), getattr(attention, "V", None)
    if A is None or V is None or not _symmetric(A):
        return None
    c = _ratio(V if output is None else output @ V, A)
    if c is None:
        return None
    form = 0.5 * (A + A.T)
    if isinstance(attention, SoftmaxAttention):
        bias = attention.bias
        wanted = np.zeros(len(A)) if bias is None else c * bias
        given = np.zeros(len(A)) if attention.value_bias is None else attention.value_bias
        if np.abs(given - wanted).max() > _PARALLEL * max(float(np.abs(wanted).max()), float(np.abs(given).max())):
            return None
        return KnownStructure(ExponentialEnergy(form, bias=bias), c, True)
    if isinstance(attention, SinkhornAttention):
        return KnownStructure(SinkhornEnergy(form, tol=attention.tol, max_iter=attention.max_iter), c, False)
    energy = _POINTWISE.get(type(attention))
    return None if energy is None else KnownStructure(energy(form), c, False)


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
    if isinstance(attention, L2Attention):
        H = attention.K.T @ attention.K
        a, c = _ratio(attention.Q, attention.K), _ratio(attention.V, H)
        return None if a is None or c is None else (GaussianL2Energy(attention.K), a * c)
    if not isinstance(attention, (SoftmaxAttention, LinearAttention, SinkhornAttention)):
        return None
    c = _ratio(attention.V, attention.A)
    if c is None or not _symmetric(attention.A):
        return None
    form = 0.5 * (attention.A + attention.A.T)
    return (GaussianSinkhornEnergy if isinstance(attention, SinkhornAttention) else GaussianSoftmaxEnergy)(form), c


def _symmetric(A: Array) -> bool:
    return bool(np.abs(A - A.T).max() <= _PARALLEL * np.abs(A).max())


def _ratio(V: Array, A: Array) -> float | None:
    """c with ``V = c A``, None when there is none or it is 0."""
    top = float(np.abs(A).max())
    if V.shape != A.shape or top == 0.0 or not V.any():
        return None
    unit = A / top
    c = float(np.sum(V * unit) / np.sum(unit * unit))
    return c / top if np.abs(V - c * unit).max() <= _PARALLEL * np.abs(V).max() else None
