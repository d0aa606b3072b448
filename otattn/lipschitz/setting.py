"""What the closed-form bounds need to know of an attention map and of its token domain."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._linalg import spectral_norm_upper
from otattn.attention import MaskedAttention, SoftmaxAttention

__all__ = ["SoftmaxForm", "check_sizes", "check_two", "form_of", "refuse_bias", "softmax_form"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SoftmaxForm:
    """The matrices of a softmax head, restricted to the subspace that they see.

    ``basis (d, r)`` is orthonormal and its span holds the row and column spaces of A, the row space of V
    and c, so ``A = basis A_r basis^T``, ``V = V_r basis^T``, ``c = basis c_r``: tokens enter through
    ``basis^T x`` only, and a centred ball of R^d is seen as the ball of the same radius of R^r. None when
    no reduction was made.
    """

    A: Array
    V: Array
    c: Array | None
    causal: bool
    basis: Array | None

    def lift(self, x: Array) -> Array:
        """A vector of ``R^r`` as one of ``R^d``."""
        return x if self.basis is None else self.basis @ x

    @cached_property
    def norm_A(self) -> float:
        """``||A||``, rounded outward."""
        return spectral_norm_upper(self.A)

    @cached_property
    def norm_V(self) -> float:
        """``||V||``, rounded outward."""
        return spectral_norm_upper(self.V)


def check_sizes(attention: Any) -> None:
    """Refuse maps whose matrices or biases are so large that their products overflow."""
    if not is_dataclass(attention):
        return
    for field in fields(attention):
        value = getattr(attention, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, np.ndarray):
                check.moderate(part, field.name)
            elif is_dataclass(part):
                check_sizes(part)


def softmax_form(attention: Any, *, masked: bool | None = None, name: str = "attention") -> SoftmaxForm:
    """The form of a softmax head; ``masked`` None accepts both kinds, True or False only that kind."""
    causal = isinstance(attention, MaskedAttention)
    head = attention.attention if isinstance(attention, MaskedAttention) else attention
    if not isinstance(head, SoftmaxAttention) or (masked is not None and masked != causal):
        wanted = {None: "SoftmaxAttention, masked or not", True: "MaskedAttention(SoftmaxAttention)"}
        received = f"MaskedAttention({type(head).__name__})" if causal else type(head).__name__
        raise ValueError(
            f"{name} must be a {wanted.get(masked, 'SoftmaxAttention without a mask')} for this theorem, "
            f"received {received}; see otattn.bounds.table for the theorems that apply to it."
        )
    check_sizes(head)
    return form_of(head, head.V, causal=causal)


def form_of(head: SoftmaxAttention, V: Array | None, *, causal: bool) -> SoftmaxForm:
    """The form of a head with the value matrix ``V (e, d)`` in place of its own; None is the identity."""
    c = head.bias if head.bias is not None and np.any(head.bias) else None
    basis: Array | None = None
    A = head.A
    rows = 0 if V is None else len(V)
    if head.factors is not None and 2 * len(head.factors[0]) + rows < head.in_dim:
        q, k, _ = head.factors
        # c = K^T b_q lies in the row space of K already
        basis = np.linalg.qr(np.concatenate([q, k] if V is None else [q, k, V]).T)[0]
        A = (basis.T @ k.T) @ (q @ basis)
        V = None if V is None else V @ basis
        c = None if c is None else basis.T @ c
    if V is None:
        # bounds see V through |V u| and |V u| |A^T u|, whose maxima the identity attains in the span of A
        V = np.eye(len(A))
    elif V.shape[0] > V.shape[1]:
        V = np.asarray(np.linalg.qr(V, mode="r"))  # only |V x| matters
    return SoftmaxForm(np.asarray(A), np.asarray(V), c, causal, basis)


def check_two(p: Any, theorem: str) -> None:
    """Published theorems are about W_2."""
    if check.check_order(p) != 2.0:
        raise ValueError(f"p must be 2 for {theorem}, received {p!r}; see otattn.bounds.column_bound for other orders.")


def refuse_bias(form: SoftmaxForm, theorem: str) -> None:
    """A theorem that is stated without biases."""
    if form.c is not None:
        raise ValueError(
            f"{theorem} assumes no bias, received a query bias of norm {float(np.linalg.norm(form.c)):g}; "
            "set it to zero, or use a bound of our own (otattn.bounds.table)."
        )
