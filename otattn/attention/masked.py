"""Causal (masked) attention on space-time measures and on sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Measure, as_attention
from otattn.attention.compose import Composite
from otattn.attention.head import Arithmetic, Head
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.kernels import Values

__all__ = ["MaskedAttention"]


@dataclass(frozen=True, eq=False, init=False)
class MaskedAttention(Composite):
    r"""Causal attention: the token ``(s, x)`` sees only atoms ``(tau, y)`` with ``tau <= s``.

    On a measure over ``[0, 1] x R^d`` it is ``(s, x) -> (s, Gamma_{mu restricted to tau <= s}(x))``; a
    sequence ``(n, d)`` is the measure with token i at time ``i / n``, which gives the usual lower-triangular
    mask.

    Parameters
    ----------
    attention : SoftmaxAttention, L2Attention, pointwise or MultiHeadAttention
        The unmasked attention. Sinkhorn attention has no causal form.

    A token of zero weight that comes before all mass sees the atoms of zero weight that are not later than
    it, all alike (the limit of equal vanishing weights); no other output ever depends on them.

    Raises
    ------
    TypeError
        The attention cannot be masked.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> masked = MaskedAttention(SoftmaxAttention([[0.0]], [[1.0]]))
    >>> masked.on_tokens([[1.0], [3.0]]).ravel()
    array([1., 2.])

    References
    ----------
    Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024, section 4.
    """

    attention: AttentionMap

    def __init__(self, attention: AttentionMap) -> None:
        if as_attention(attention).causal or not attention.maskable:
            raise TypeError(
                "attention must be softmax, L2, pointwise or multi-head attention without a mask, received "
                f"{attention.kind}; Sinkhorn kernels and compositions have no causal form."
            )
        object.__setattr__(self, "attention", attention)

    @property
    def _parts(self) -> tuple[AttentionMap, ...]:
        return (self.attention,)

    @property
    def causal(self) -> bool:
        return True

    @property
    def kind(self) -> str:
        return f"MaskedAttention({self.attention.kind})"

    @property
    def unmasked(self) -> AttentionMap:
        return self.attention

    def values(self) -> tuple[Values, ...] | None:
        return self.attention.values()

    def in_coordinates(self, E: Array, left: Array) -> MaskedAttention:
        return MaskedAttention(self.attention.in_coordinates(E, left))

    def logits(self, x: Array, head: int = 0) -> Array:
        return self.attention.logits(x, head)

    def _heads(self, arithmetic: Arithmetic) -> tuple[Head, ...]:
        return tuple(replace(head, causal=True) for head in self.attention._heads(arithmetic))

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self.attention._apply(x, mu, times, block_size)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self.attention._field(x, mu, times, block_size)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        return self.attention._jacobian(mu, times, block_size)
