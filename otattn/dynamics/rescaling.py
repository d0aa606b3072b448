"""Rescaled tokens ``z = e^{-tV} x``: the attention that moves them, without ever forming x.

With ``E = e^{tV}`` the logits of ``x = E z`` are those of ``z`` under ``A_t = E^T A E``, and the values of a head
become ``E^{-1} V_h E`` acting on averages of z. So ``z' = Gamma_t(z) - V z`` for an attention map ``Gamma_t`` of the
same kind: no difference of large numbers is taken, however much x grows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from otattn.attention import (
    AttentionMap,
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    PointwiseAttention,
    Residual,
    SinkhornAttention,
    SoftmaxAttention,
)

__all__ = ["conjugate", "value_matrix"]

Array = NDArray[np.float64]


def value_matrix(attention: AttentionMap) -> Array:
    """The linear map V of one token alone: that of a head, ``sum_h W_h V_h`` of several.

    Raises
    ------
    ValueError
        The map has no value matrix (an MLP, a normalisation, a composition), or it is not square.
    """
    V = _values(attention)
    if V is None:
        raise ValueError(
            f'normalization="rescaled" must have an attention map with a value matrix, received '
            f'{type(attention).__name__}; use None or "sphere".'
        )
    if V.shape[0] != V.shape[1]:
        raise ValueError(f"V must be square for a flow, received shape {V.shape}; add an output matrix.")
    return V


def _values(attention: AttentionMap) -> Array | None:
    if isinstance(attention, MaskedAttention):
        return _values(attention.attention)
    if isinstance(attention, MultiHeadAttention):
        parts = [V for V in map(_values, attention.heads) if V is not None]
        if len(parts) < len(attention.heads):
            return None
        if attention.outputs is not None:
            parts = [W @ V for W, V in zip(attention.outputs, parts, strict=True)]
        return np.asarray(np.sum(parts, axis=0))
    if isinstance(attention, Residual):  # a layer moves tokens by its increment
        inner = _values(attention.map)
        return None if inner is None else attention.scale * inner
    if isinstance(attention, SoftmaxAttention | L2Attention | SinkhornAttention | PointwiseAttention):
        return attention.V
    return None


def conjugate(attention: AttentionMap, V: Array, t: float) -> AttentionMap:
    """The attention that acts on ``z = e^{-tV} x`` as ``attention`` acts on x: ``e^{-tV} Gamma(e^{tV} z)``.

    Raises
    ------
    OverflowError
        The rescaled parameters are not representable.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _conjugate(attention, expm(t * V), expm(-t * V))


def _conjugate(attention: AttentionMap, E: Array, inverse: Array) -> AttentionMap:
    if isinstance(attention, MaskedAttention):
        return MaskedAttention(_conjugate(attention.attention, E, inverse))
    if isinstance(attention, MultiHeadAttention):
        # values first mapped by each head's output matrix, so that all live in the space of the tokens
        heads = [_with_values(h, _outputs(attention, i), E, inverse) for i, h in enumerate(attention.heads)]
        bias = None if attention.output_bias is None else _finite(inverse @ attention.output_bias)
        return MultiHeadAttention(heads, output_bias=bias)
    if isinstance(attention, Residual):
        return Residual(_conjugate(attention.map, E, inverse), scale=attention.scale)
    return _with_values(attention, None, E, inverse)


def _outputs(attention: MultiHeadAttention, i: int) -> Array | None:
    return None if attention.outputs is None else attention.outputs[i]


def _with_values(head: AttentionMap, W: Array | None, E: Array, inverse: Array) -> AttentionMap:
    """One head on rescaled tokens, its values multiplied by W before they are rescaled."""
    if isinstance(head, MaskedAttention):
        return MaskedAttention(_with_values(head.attention, W, E, inverse))
    if isinstance(head, MultiHeadAttention):
        raise ValueError(
            "heads must be single heads for rescaled tokens, received a MultiHeadAttention inside another."
        )
    assert isinstance(head, SoftmaxAttention | L2Attention | SinkhornAttention | PointwiseAttention)
    left = inverse if W is None else inverse @ W
    V = _finite(left @ head.V @ E)
    if isinstance(head, SoftmaxAttention):
        bias = None if head.bias is None else _finite(E.T @ head.bias)
        offset = None if head.value_bias is None else _finite(left @ head.value_bias)
        return SoftmaxAttention(_finite(E.T @ head.A @ E), V, bias=bias, value_bias=offset)
    if isinstance(head, L2Attention):
        return L2Attention(_finite(head.Q @ E), _finite(head.K @ E), V)
    if isinstance(head, SinkhornAttention):
        return SinkhornAttention(_finite(E.T @ head.A @ E), V, tol=head.tol, max_iter=head.max_iter)
    kind: Any = type(head)
    return kind(_finite(E.T @ head.A @ E), V)


def _finite(M: Array) -> Array:
    if not np.isfinite(M).all():
        raise OverflowError("the parameters of rescaled tokens, e^{tV^T} A e^{tV}, are not representable in float64.")
    return M
