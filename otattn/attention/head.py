"""One head of an attention map: the matrices that every theorem and every witness reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array, mid, norm_upper, product_error, spectral_norm_upper
from otattn.attention.base import AttentionMap

__all__ = ["FLOATS", "Arithmetic", "Head", "check_sizes", "heads_of", "near_product", "with_values"]

_EPS = float(np.finfo(np.float64).eps)


class Arithmetic(NamedTuple):
    """What the matrices of a head are made of: floats, or balls that hold them."""

    matrix: Callable[[Any], Any]
    """A float array in this arithmetic."""
    orthonormal: Callable[[Sequence[Array]], Any]
    """Orthonormal columns whose span holds the rows of the blocks; None when it cannot be told."""


FLOATS = Arithmetic(np.asarray, lambda blocks: np.linalg.qr(np.concatenate(blocks).T)[0])


@dataclass(frozen=True, eq=False)
class Head:
    """Logits ``<A x + c, y> - <H y, y>`` of key y for query x, values ``V y``, output ``W``.

    Tokens enter through ``basis^T x`` when a basis is there: ``A = basis A_r basis^T``, ``V = V_r basis^T``, ``c = basis c_r``,
    and a centred ball of R^d is seen as the ball of the same radius of R^r.

    Attributes
    ----------
    map : AttentionMap
        The map of this head alone, without mask and output; it says what becomes of the logits.
    A : (d, d), V : (e, d), c : (d,)
        Arrays, or balls in exact arithmetic.
    H : (d, d), optional
        Symmetric; None but for L2 attention.
    output : (D, e), optional
        None is the identity.
    causal : bool
        A mask hides later tokens.
    basis : (d, r), optional
        Orthonormal columns.
    error, shift, output_error : float
        What rounding did to A (and to V and A on the basis) relative to their norms, to c, and to the output.
    """

    map: Any
    A: Any
    V: Any
    c: Any
    H: Any | None = None
    output: Any | None = None
    causal: bool = False
    basis: Any | None = None
    error: float = 0.0
    shift: float = 0.0
    output_error: float = 0.0
    factors: tuple[Array, Array] | None = None
    """``(Q, K)`` with fewer rows than columns and ``A = K^T Q``, where the map runs on them."""
    arithmetic: Arithmetic = FLOATS

    @classmethod
    def of(
        cls,
        map: Any,
        A: Array,
        V: Array,
        c: Array | None = None,
        *,
        factors: tuple[Array, Array, Array | None] | None = None,
        arithmetic: Arithmetic = FLOATS,
    ) -> Head:
        """The head of float matrices; ``factors (Q, K, b)`` replace A and c by the products ``K^T Q`` and ``K^T b``."""
        wrap = arithmetic.matrix
        if factors is None:
            return cls(map, wrap(A), wrap(V), wrap(np.zeros(len(A)) if c is None else c), arithmetic=arithmetic)
        q, k, b = factors
        biased = b is not None and bool(np.any(b))
        form = wrap(k.T) @ wrap(q)
        offset = wrap(k.T) @ wrap(b) if biased else wrap(np.zeros(len(form)))
        out = cls(map, form, wrap(V), offset, factors=(q, k), arithmetic=arithmetic)
        if arithmetic is not FLOATS:
            return out
        # rounding of the product, and of turning it to a basis
        lost = 4.0 * (len(form) + 8) * _EPS * float(norm_upper(q)) * float(norm_upper(k))
        near, error = near_product(form, lost)
        shift = 2.0 * product_error(k.T, b[:, None]) if b is not None and biased else 0.0
        return replace(out, A=near, error=error, shift=shift, factors=(q, k) if near is form else None)

    @property
    def d(self) -> int:
        """Dimension in which the matrices are given."""
        return len(self.A)

    @property
    def exact(self) -> bool:
        """True when the matrices are balls."""
        return self.arithmetic is not FLOATS

    @cached_property
    def norm_A(self) -> Any:
        """``||A||``, rounded outward."""
        return spectral_norm_upper(self.A) * (1.0 + self.error)

    @cached_property
    def norm_V(self) -> Any:
        """``||V||``, rounded outward."""
        return spectral_norm_upper(self.V) * (1.0 + self.error)

    @property
    def lost(self) -> float:
        """What rounding did to A, in the operator norm."""
        return self.error * float(self.norm_A) if self.error else 0.0

    @property
    def total(self) -> Any:
        """``W V``, the values with the output."""
        return self.V if self.output is None else self.output @ self.V

    @property
    def outer(self) -> Any:
        """``W``, the identity when there is none."""
        return self.arithmetic.matrix(np.eye(len(self.V))) if self.output is None else self.output

    def with_values(self, V: Any | None) -> Head:
        """The head with values ``V (e, d)`` in place of its own, and without its output; None is the identity."""
        values = np.eye(self.d) if V is None else V
        wrapped = self.arithmetic.matrix(values) if isinstance(values, np.ndarray) else values
        out = replace(self, V=wrapped, output=None, output_error=0.0)
        if "norm_A" in self.__dict__:
            out.__dict__["norm_A"] = self.norm_A
        return out

    def with_output(self, W: Array | None) -> Head:
        """The head with one more output matrix, floats, on the left of its own."""
        if W is None:
            return self
        left = self.arithmetic.matrix(W)
        if self.output is None:
            return replace(self, output=left)
        error = 0.0 if self.exact else product_error(W, self.output) + self.output_error * float(norm_upper(W))
        return replace(self, output=left @ self.output, output_error=error)

    def compact(self) -> tuple[Any, float]:
        """``M (e', d)`` with ``|M x| = |W V x|`` and few rows, and what rounding left out of it (operator norm)."""
        V, W = self.V, self.output
        if self.exact:
            return self.total, 0.0
        M, error = V, 0.0
        size = float(norm_upper(V))
        if W is not None:
            error = self.output_error * size
            size *= float(norm_upper(W))
            M = (np.linalg.qr(W, mode="r") if W.shape[0] > W.shape[1] else W) @ V
        if M.shape[0] > M.shape[1]:
            M = np.asarray(np.linalg.qr(M, mode="r"))
        if M is not V:
            rows, columns = (len(V), len(V)) if W is None else W.shape
            error += 8.0 * (rows + columns + sum(V.shape)) * _EPS * size
        return np.asarray(M), error

    def on_span(self, *, ball: bool = False) -> Head:
        """The head on the span that it sees, where that is smaller; of the values only ``|V x|`` is kept.

        ``ball`` says that tokens live in a centred ball: then identity values may be restricted to the span of A, where ``|u|``
        and ``|u| |A^T u|`` have their maxima over unit vectors. On other domains they see what A does not, and nothing is left
        out.
        """
        A, V, c, basis = self.A, self.V, self.c, self.basis
        wrap = self.arithmetic.matrix
        values = mid(V)
        known = not self.exact or not (V - values).any()  # products of balls are not: their span is not that of floats
        plain = known and values.shape[0] == values.shape[1] and np.array_equal(values, np.eye(len(values)))
        rows = 0 if plain else len(values)
        if known and (ball or not plain) and self.factors is not None and 2 * len(self.factors[0]) + rows < self.d:
            q, k = self.factors
            # c = K^T b lies in the row space of K already
            basis = self.arithmetic.orthonormal([q, k] if plain else [q, k, values])
            if basis is not None:
                A = (basis.T @ wrap(k.T)) @ (wrap(q) @ basis)
                V = wrap(np.eye(len(A))) if plain else V @ basis
                c = basis.T @ c
        if not self.exact and V.shape[0] > V.shape[1]:
            V = np.asarray(np.linalg.qr(V, mode="r"))
        return replace(self, A=A, V=V, c=c, basis=basis, factors=None if basis is not None else self.factors)

    def restricted(self, basis: Array, offset: Array) -> Head:
        """The head on ``x = basis y + offset``, ``basis (d, r)`` orthonormal, as a head on ``y``; floats."""
        shift = self.A @ offset + self.c
        if self.H is not None:
            shift = shift - 2.0 * self.H @ offset
        H = None if self.H is None else basis.T @ self.H @ basis
        A, V = basis.T @ self.A @ basis, self.V @ basis
        return replace(self, A=A, V=V, c=basis.T @ shift, H=H, factors=None)

    def heated(self, factor: float) -> Head:
        """The head with its logits multiplied by a factor; floats."""
        H = None if self.H is None else factor * self.H
        return replace(self, A=factor * self.A, c=factor * self.c, shift=abs(factor) * self.shift, H=H, factors=None)

    def lift(self, x: Array) -> Array:
        """A vector of ``R^r`` as one of ``R^d``."""
        return x if self.basis is None else np.asarray(self.basis @ x)


def near_product(form: Array, lost: float) -> tuple[Array, float]:
    """A matrix near the exact product of which ``form`` is what rounding left, and its distance relative to its own norm.

    ``lost`` bounds the rounding. Where the product cancels down to it, ``form`` may be far smaller than the exact product, or
    zero. Then ``form + 16 lost I`` is returned: its norm is at least 8 lost, and the exact product is within 17 lost of it.
    """
    size = float(spectral_norm_upper(form))
    if size >= 8.0 * lost:
        return form, lost / max(size, 1e-300)
    return form + 16.0 * lost * np.eye(len(form)), 3.0


def heads_of(attention: AttentionMap, *, arithmetic: Arithmetic = FLOATS) -> tuple[Head, ...]:
    """The heads whose sum an attention map is, masks and outputs handed down; none where a map is no such sum."""
    return attention._heads(arithmetic)


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


def with_values(attention: Any, V: Array | None) -> Any:
    """A map of one head with the values ``V (e, d)`` in place of its own and no value bias; None is the identity."""
    out = object.__new__(type(attention))
    for field in fields(attention):
        value = getattr(attention, field.name)
        object.__setattr__(out, field.name, None if field.name == "value_bias" else value)
    values = np.eye(attention.in_dim) if V is None else V
    object.__setattr__(out, "V", check.frozen(np.array(values, dtype=np.float64)))
    return out
