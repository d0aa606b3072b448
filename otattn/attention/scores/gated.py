"""Attention whose output is gated by the token itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.compose import Composite
from otattn.attention.jacobian import JacobianOperator

__all__ = ["GatedAttention"]


@dataclass(frozen=True, eq=False, init=False)
class GatedAttention(Composite):
    r"""``x -> sigmoid(G x + g) o Gamma_mu(x)``, entry by entry.

    Parameters
    ----------
    map : AttentionMap
        With values of dimension e.
    gate : array_like (e, d) or (1, d)
        The matrix G; one row gates all entries alike.
    gate_bias : array_like (e,) or (1,), optional

    Raises
    ------
    ValueError
        Shapes that do not fit.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> GatedAttention(SoftmaxAttention([[0.0]], [[1.0]]), [[0.0]]).on_tokens([[2.0], [4.0]]).ravel()
    array([1.5, 1.5])

    References
    ----------
    Qiu et al., "Gated attention for large language models: non-linearity, sparsity, and attention-sink-free", 2025.
    """

    map: AttentionMap
    gate: Array
    gate_bias: Array | None

    def __init__(self, map: AttentionMap, gate: ArrayLike, gate_bias: ArrayLike | None = None) -> None:
        if not isinstance(map, AttentionMap) or map.out_dim is None:
            received = map.kind if isinstance(map, AttentionMap) else type(map).__name__
            raise TypeError(f"map must be an attention map that says its value dimension, received {received}.")
        G = check.matrix(gate, "gate", shape=(None, map.in_dim))
        if len(G) not in (1, map.out_dim):
            raise ValueError(
                f"gate must have 1 or {map.out_dim} rows, one a value or one for all, received {len(G)}; check its shape."
            )
        object.__setattr__(self, "map", map)
        object.__setattr__(self, "gate", check.frozen(G))
        b = None if gate_bias is None else check.frozen(check.vector(gate_bias, "gate_bias", size=len(G)))
        object.__setattr__(self, "gate_bias", b)

    @property
    def _parts(self) -> tuple[AttentionMap, ...]:
        return (self.map,)

    @property
    def kind(self) -> str:
        return f"GatedAttention({self.map.kind})"

    def _slopes(self, x: Array) -> tuple[Array, Array]:
        """The gates and their derivatives at the rows of x, ``(m, e)`` or ``(m, 1)``."""
        s = x @ self.gate.T
        if self.gate_bias is not None:
            s = s + self.gate_bias
        return np.asarray(expit(s)), np.asarray(expit(s) * expit(-s))

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._slopes(x)[0] * self.map._apply(x, mu, times, block_size)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        gate, slope = self._slopes(x)
        moved = (slope * self.map._apply(x, mu, times, block_size))[:, :, None] * self.gate
        return np.asarray(gate[:, :, None] * self.map._field(x, mu, times, block_size) + moved)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        J = self.map._jacobian(mu, times, block_size)
        x, (gate, slope) = mu.points, self._slopes(mu.points)
        lever = slope * self.map._apply(x, mu, times, block_size)  # (n, e)

        def vjp(g: Array) -> Array:
            back = lever * g
            if len(self.gate) == 1:
                back = back.sum(axis=1, keepdims=True)
            return J.vjp(gate * g) + back @ self.gate

        def dense() -> Array:
            out = J.to_dense().reshape(J.n, J.e, J.n, J.d) * np.broadcast_to(gate, lever.shape)[:, :, None, None]
            out[np.arange(J.n), :, np.arange(J.n)] += lever[:, :, None] * self.gate
            return out

        return JacobianOperator(
            J.n,
            J.d,
            J.e,
            jvp=lambda v: gate * J.jvp(v) + lever * (v @ self.gate.T),
            vjp=vjp,
            dense=dense if J.assembled else None,
        )
