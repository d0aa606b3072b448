"""The heads of an attention map as bilinear forms, all the witnesses need of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn.attention import AttentionMap, L2Attention, MultiHeadAttention, SoftmaxAttention

__all__ = ["Form", "forms_of"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Form:
    """One head: logit ``<A x + bias, y> - y^T H y`` of key y for query x, value ``V y``.

    Shapes ``A (d, d)``, ``V (e, d)``, ``bias (d,)``, ``H (d, d)`` symmetric or None (softmax).
    """

    A: Array
    V: Array
    bias: Array
    H: Array | None = None

    def restricted(self, basis: Array, offset: Array) -> Form:
        """The head on ``x = basis y + offset``, ``basis (d, r)`` orthonormal, as a head on ``y``."""
        shift = self.A @ offset + self.bias
        if self.H is not None:
            shift = shift - 2.0 * self.H @ offset
        H = None if self.H is None else basis.T @ self.H @ basis
        return Form(basis.T @ self.A @ basis, self.V @ basis, basis.T @ shift, H)


def forms_of(attention: AttentionMap) -> tuple[Form, ...] | None:
    """The heads of a softmax, L2 or multi-head attention map as forms; None for any other map.

    The output matrices of a multi-head map are multiplied into the values.
    """
    if isinstance(attention, SoftmaxAttention):
        bias = np.zeros(attention.in_dim) if attention.bias is None else attention.bias
        return (Form(attention.A, attention.V, bias),)
    if isinstance(attention, L2Attention):
        K = attention.K
        return (Form(2.0 * K.T @ attention.Q, attention.V, np.zeros(attention.in_dim), K.T @ K),)
    if isinstance(attention, MultiHeadAttention):
        out: list[Form] = []
        for h, head in enumerate(attention.heads):
            parts = forms_of(head)
            if parts is None:
                return None
            W = None if attention.outputs is None else attention.outputs[h]
            out += parts if W is None else [Form(f.A, W @ f.V, f.bias, f.H) for f in parts]
        return tuple(out)
    return None
