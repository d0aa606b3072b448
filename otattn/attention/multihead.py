"""Multi-head attention: a sum of heads, each with its output matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.compose import Composite
from otattn.attention.head import Arithmetic, Head
from otattn.attention.jacobian import JacobianOperator, finite
from otattn.attention.kernels import Values
from otattn.measures import GaussianMeasure

__all__ = ["MultiHeadAttention"]


@dataclass(frozen=True, eq=False, init=False)
class MultiHeadAttention(Composite):
    r"""``Gamma_mu(x) = b + sum_h W_h Gamma^{(h)}_mu(x)``.

    Parameters
    ----------
    heads : sequence of AttentionMap
        All on the same space, all masked or none.
    outputs : sequence of array_like (D, e_h), optional
        The matrices ``W_h``; without them the heads' values are summed.
    output_bias : array_like (D,), optional

    Raises
    ------
    ValueError
        No heads, or shapes that do not fit.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> head = SoftmaxAttention([[0.0]], [[1.0]])
    >>> MultiHeadAttention([head, head], [[[1.0]], [[2.0]]]).on_tokens([[1.0]])
    array([[3.]])
    """

    heads: tuple[AttentionMap, ...]
    outputs: tuple[Array, ...] | None
    output_bias: Array | None

    def __init__(
        self,
        heads: Sequence[AttentionMap],
        outputs: Sequence[ArrayLike] | None = None,
        *,
        output_bias: ArrayLike | None = None,
    ) -> None:
        hs = tuple(heads)
        if not hs or not all(isinstance(h, AttentionMap) for h in hs):
            raise ValueError(f"heads must be a non-empty sequence of attention maps, received {heads!r}.")
        if len({h.in_dim for h in hs}) > 1:
            raise ValueError(f"heads must act on one space, received dimensions {[h.in_dim for h in hs]}.")
        if len({h.causal for h in hs}) > 1:
            raise ValueError("heads must be all masked or all unmasked; wrap the whole in MaskedAttention instead.")
        ws: tuple[Array, ...] | None = None
        if outputs is not None:
            if len(outputs) != len(hs):
                raise ValueError(f"outputs must give one matrix a head, received {len(outputs)} for {len(hs)} heads.")
            ws = tuple(
                check.frozen(check.matrix(W, f"outputs[{i}]", shape=(None, h.out_dim)))
                for i, (W, h) in enumerate(zip(outputs, hs, strict=True))
            )
            if len({len(W) for W in ws}) > 1:
                raise ValueError(f"outputs must have equally many rows, received {[len(W) for W in ws]}.")
        elif len({h.out_dim for h in hs}) > 1:
            raise ValueError(
                "heads that are summed must have values of one dimension, received "
                f"{[h.out_dim for h in hs]}; give outputs."
            )
        object.__setattr__(self, "heads", hs)
        object.__setattr__(self, "outputs", ws)
        size = self.out_dim
        bias = None if output_bias is None else check.frozen(check.vector(output_bias, "output_bias", size=size))
        object.__setattr__(self, "output_bias", bias)

    @property
    def _parts(self) -> tuple[AttentionMap, ...]:
        return self.heads

    @property
    def out_dim(self) -> int | None:
        return super().out_dim if self.outputs is None else len(self.outputs[0])

    @property
    def kind(self) -> str:
        return f"MultiHeadAttention({', '.join(sorted({h.kind for h in self.heads}))})"

    @property
    def maskable(self) -> bool:  # type: ignore[override]
        return all(h.maskable for h in self.heads)

    @property
    def unmasked(self) -> AttentionMap:
        if not self.causal:
            return self
        return MultiHeadAttention([h.unmasked for h in self.heads], self.outputs, output_bias=self.output_bias)

    def _heads(self, arithmetic: Arithmetic) -> tuple[Head, ...]:
        parts = [head._heads(arithmetic) for head in self.heads]
        outputs = self.outputs or (None,) * len(parts)
        return tuple(h.with_output(W) for found, W in zip(parts, outputs, strict=True) for h in found if all(parts))

    def folded(self) -> tuple[AttentionMap, ...]:
        """The heads, each with its output matrix multiplied into its values."""
        if self.outputs is None:
            return self.heads
        return tuple(
            h.in_coordinates(np.eye(self.in_dim or 1), W) for h, W in zip(self.heads, self.outputs, strict=True)
        )

    def values(self) -> tuple[Values, ...] | None:
        out: list[Values] = []
        for i, head in enumerate(self.heads):
            terms = head.values()
            if terms is None:
                return None
            W = None if self.outputs is None else self.outputs[i]
            out += terms if W is None else [Values(W @ V, b if b is None else W @ b, mass) for V, b, mass in terms]
        if self.output_bias is not None:
            out.append(Values(np.zeros_like(out[0].V), self.output_bias, "one"))
        return tuple(out)

    def in_coordinates(self, E: Array, left: Array) -> MultiHeadAttention:
        # values first mapped by each head's output matrix, so that all live in the space of the tokens
        outputs = self.outputs or [np.eye(left.shape[1])] * len(self.heads)
        heads = [h.in_coordinates(E, left @ W) for h, W in zip(self.heads, outputs, strict=True)]
        bias = None if self.output_bias is None else finite(left @ self.output_bias)
        return MultiHeadAttention(heads, output_bias=bias)

    def logits(self, x: Array, head: int = 0) -> Array:
        if not 0 <= head < len(self.heads):
            raise ValueError(f"head must be below the number of heads {len(self.heads)}, received {head}.")
        return self.heads[head].logits(x)

    def _output(self, h: int, values: Array) -> Array:
        return values if self.outputs is None else values @ self.outputs[h].T

    def _sum(self, terms: Any) -> Array:
        total: Array | None = None
        for term in terms:
            total = term if total is None else total + term
        assert total is not None
        return total

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        out = self._sum(self._output(i, h._apply(x, mu, times, block_size)) for i, h in enumerate(self.heads))
        return out if self.output_bias is None else out + self.output_bias

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        fields = (h._field(x, mu, times, block_size) for h in self.heads)
        return self._sum(D if self.outputs is None else self.outputs[i] @ D for i, D in enumerate(fields))

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        parts = [h._jacobian(mu, times, block_size) for h in self.heads]

        def dense() -> Array:
            blocks = (J.to_dense().reshape(J.n, J.e, J.n, J.d) for J in parts)
            return self._sum(
                B if self.outputs is None else np.einsum("fe,iejd->ifjd", self.outputs[i], B, optimize=True)
                for i, B in enumerate(blocks)
            )

        return JacobianOperator(
            mu.n,
            parts[0].d,
            parts[0].e if self.outputs is None else len(self.outputs[0]),
            jvp=lambda v: self._sum(self._output(i, J.jvp(v)) for i, J in enumerate(parts)),
            vjp=lambda g: self._sum(
                J.vjp(g if self.outputs is None else g @ self.outputs[i]) for i, J in enumerate(parts)
            ),
            dense=dense if all(J._dense is not None for J in parts) else None,
            method=max(parts, key=lambda J: J.error).method,
            error=max(J.error for J in parts),
        )

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """Sum over heads of ``W_h (b_h + G_h x)``."""
        self._check_dim(gaussian.dim)
        maps = [h.gaussian_affine(gaussian) for h in self.heads]
        if self.outputs is not None:
            maps = [(W @ G, W @ b) for W, (G, b) in zip(self.outputs, maps, strict=True)]
        offset = self._sum(b for _, b in maps)
        return self._sum(G for G, _ in maps), offset if self.output_bias is None else offset + self.output_bias
