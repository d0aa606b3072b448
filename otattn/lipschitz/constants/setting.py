"""What the closed-form bounds need to know of an attention map and of its token domain."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._linalg import norm_upper, product_error, spectral_norm_upper
from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.arithmetic.balls import BallMatrix, orthonormal_rows

__all__ = ["SoftmaxForm", "check_sizes", "form_of", "softmax_form", "with_values"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SoftmaxForm:
    """The matrices of a softmax head, restricted to the subspace that they see.

    ``basis (d, r)`` is orthonormal and its span holds the row and column spaces of A, the row space of V
    and c, so ``A = basis A_r basis^T``, ``V = V_r basis^T``, ``c = basis c_r``: tokens enter through
    ``basis^T x`` only, and a centred ball of R^d is seen as the ball of the same radius of R^r. None when
    no reduction was made. ``error`` bounds what rounding did to A and V on the way, relative to their norms,
    ``shift`` what it did to c; in exact arithmetic (``exact``) the matrices are balls and nothing was rounded.
    """

    A: Any
    V: Any
    c: Any | None
    causal: bool
    basis: Any | None
    error: float = 0.0
    shift: float = 0.0

    @property
    def exact(self) -> bool:
        """True when the matrices are balls."""
        return isinstance(self.A, BallMatrix)

    def lift(self, x: Array) -> Array:
        """A vector of ``R^r`` as one of ``R^d``."""
        return x if self.basis is None else np.asarray(self.basis @ x)

    @cached_property
    def norm_A(self) -> Any:
        """``||A||``, rounded outward."""
        return spectral_norm_upper(self.A) * (1.0 + self.error)

    @cached_property
    def norm_V(self) -> Any:
        """``||V||``, rounded outward."""
        return spectral_norm_upper(self.V) * (1.0 + self.error)


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


def softmax_form(
    attention: Any, *, masked: bool | None = None, name: str = "attention", exact: bool = False, ball: bool = False
) -> SoftmaxForm:
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
    return form_of(head, head.V, causal=causal, exact=exact, ball=ball)


def form_of(
    head: SoftmaxAttention, V: Array | None, *, causal: bool, exact: bool = False, ball: bool = False
) -> SoftmaxForm:
    """The form of a head with the value matrix ``V (e, d)`` in place of its own; None is the identity.

    With ``exact`` its matrices are balls that hold the products of the head's floats. ``ball`` says that tokens live in a
    centred ball: then identity values may be restricted to the span of A, where ``|u|`` and ``|u| |A^T u|`` have their maxima
    over unit vectors. On other domains they see what A does not, and nothing is left out.
    """
    wrap: Any = BallMatrix.exact if exact else np.asarray
    if V is not None and _is_identity(V):
        V = None
    c: Any = None
    A: Any = wrap(head.A)
    error = shift = 0.0
    if head.factors is not None and len(head.factors[0]) < head.in_dim:
        # the map runs on its factors, so they are what it is made of
        q, k, bq = head.factors
        A = wrap(k.T) @ wrap(q)
        c = None if bq is None or not np.any(bq) else wrap(k.T) @ wrap(bq)
        if not exact:
            error = _factor_error(A, q, k)
            shift = 0.0 if bq is None else 2.0 * product_error(k.T, bq[:, None])
    elif head.bias is not None and np.any(head.bias):
        c = wrap(head.bias)
    basis: Any = None
    rows = 0 if V is None else len(V)
    seen_whole = V is None and not ball
    if not seen_whole and head.factors is not None and 2 * len(head.factors[0]) + rows < head.in_dim:
        # c = K^T b_q lies in the row space of K already
        seen = [q, k] if V is None else [q, k, V]
        if exact:
            U = orthonormal_rows(seen)
            basis = None if U is None else U.T
        else:
            basis = np.linalg.qr(np.concatenate(seen).T)[0]
        if basis is not None:
            A = (basis.T @ wrap(k.T)) @ (wrap(q) @ basis)
            V = None if V is None else wrap(V) @ basis
            c = None if c is None else basis.T @ c
    if V is None:
        V = np.eye(len(A))
    elif V.shape[0] > V.shape[1] and not exact:
        V = np.asarray(np.linalg.qr(V, mode="r"))  # only |V x| matters
    return SoftmaxForm(A, wrap(V) if isinstance(V, np.ndarray) else V, c, causal, basis, error, shift)


def _is_identity(V: Array) -> bool:
    return V.shape[0] == V.shape[1] and bool(np.array_equal(V, np.eye(len(V))))


def _factor_error(A: Array, q: Array, k: Array) -> float:
    """What rounding the product of the factors, and turning it to a basis, may add to ``||A||``, relative to it."""
    size = float(norm_upper(q)) * float(norm_upper(k))
    d = q.shape[1]
    return min(1.0, 4.0 * (d + 8) * float(np.finfo(np.float64).eps) * size / max(float(spectral_norm_upper(A)), 1e-300))


def with_values(head: Any, V: Array | None) -> Any:
    """A head with the value matrix ``V (e, d)`` in place of its own and no value bias; None is the identity."""
    values = np.eye(head.in_dim) if V is None else V
    out = object.__new__(type(head))
    for field in fields(head):
        value = getattr(head, field.name)
        object.__setattr__(out, field.name, None if field.name == "value_bias" else value)
    object.__setattr__(out, "V", check.frozen(np.array(values, dtype=np.float64)))
    return out
