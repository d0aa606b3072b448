r"""``J^T J`` of a softmax layer on a device of torch: rows in blocks, the heads of one size in one batched product.

The formulas are those of :mod:`otattn.operators.fused`, with the weights ``P`` normalised. Here only iterations take place: values
and residuals are evaluated in float64 by numpy. So nothing depends on what a device rounds (TF32 where
``torch.set_float32_matmul_precision`` allows it) but the number of products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn._derivatives.torch_graph import import_torch
from otattn.attention import AttentionMap, MultiHeadAttention
from otattn.attention import memory as attention_memory
from otattn.operators.layer import SoftmaxLayer, supports_fused
from otattn.operators.streaming import FLOOR

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DeviceGram", "check_device", "has_float64"]

Array = NDArray[Any]
FREE_SHARE = 4
"""Of the free memory of a GPU, one part in so many may hold kernels."""
ARRAYS = 4
"""Arrays of the size of a block of kernels that a product holds at a time."""


def check_device(device: Any, attention: AttentionMap | None = None) -> Any:
    """The ``torch.device`` of that name, which must be there, and a map that has a product on it.

    Raises
    ------
    ImportError
        Torch is not installed.
    TypeError
        No name of a device, or a map that the product does not cover.
    ValueError
        Torch has no such device here.
    """
    torch = import_torch()
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f'device must be a name like "cpu" or "cuda:0", received {type(device).__name__}.')
    if attention is not None and not supports_fused(attention):
        raise TypeError(
            "device needs softmax attention, multi-head attention of softmax heads, or one of them masked, received "
            f"{_named(attention)}, which has no product on a device; leave device out."
        )
    try:
        found = torch.device(device)
        float(torch.zeros(1, device=found))
    except (RuntimeError, AssertionError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise ValueError(
            f'device must be one that torch can use here, received "{device}" ({reason}); try "cpu".'
        ) from exc
    return found


def _named(attention: AttentionMap) -> str:
    """The map's name; of several heads with that of the one that has no product."""
    inner = attention.unmasked
    heads = inner.heads if isinstance(inner, MultiHeadAttention) else ()
    others = [type(head.unmasked).__name__ for head in heads if not supports_fused(head)]
    return f"{type(inner).__name__} with a head of {others[0]}" if others else type(inner).__name__


def has_float64(device: Any) -> bool:
    """Whether the device computes in float64 (Apple's does not)."""
    torch = import_torch()
    try:
        torch.zeros(1, device=device, dtype=torch.float64)
    except (RuntimeError, TypeError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class _Heads:
    """Heads of one size, side by side: ``(g, n, k)`` queries and keys, ``(g, n, e)`` values and outputs."""

    index: tuple[int, ...]
    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor
    clip: bool
    kept: dict[int, Tensor]
    """The weights P of each block of rows that starts there, where they are kept."""


class DeviceGram:
    """``J^T J / scale^2`` in L^2(mu) on a device; numpy arrays in and out.

    Parameters
    ----------
    layer : SoftmaxLayer
    device : torch.device
    dtype : float32 or float64
    memory : int, optional
        Bytes that the kernels may take, kept where they fit; a quarter of what is free on a GPU, otherwise the memory budget.
    """

    def __init__(self, layer: SoftmaxLayer, device: Any, dtype: Any, *, memory: int | None = None) -> None:
        torch = import_torch()
        self.layer, self.dtype, self.device = layer, np.dtype(dtype), device
        self.n, self.d, self.scale = layer.atoms, layer.d, layer.scale
        self._kind = torch.float32 if self.dtype == np.float32 else torch.float64
        self._stack = self._put(layer.stacked(np.dtype(np.float64)))
        self._outputs = None if layer.outputs is None else self._put(layer.outputs)
        self._root = None if layer.root is None else self._put(layer.root)
        self._column = None if layer.column is None else self._put(layer.column)
        self._visible = None if layer.visible is None else torch.as_tensor(layer.visible, device=device)
        budget = self._budget() if memory is None else memory
        row = len(layer.heads) * layer.n * self.dtype.itemsize
        self._keep = row * layer.n <= budget
        self._rows = max(1, min(layer.n, budget // (ARRAYS * row)))
        sizes: dict[tuple[int, int], list[int]] = {}
        for h, where in enumerate(layer.heads):
            sizes.setdefault((where.k, where.e), []).append(h)
        self._groups = [self._group(index) for index in sizes.values()]
        for heads in self._groups:
            for start, stop, seen in self._blocks():
                heads.O[:, start:stop] = self._weights(heads, start, stop, seen) @ heads.V[:, :seen]

    def _put(self, array: Array) -> Tensor:
        torch = import_torch()
        return torch.from_numpy(np.array(array, dtype=self.dtype)).to(self.device)

    def _budget(self) -> int:
        torch = import_torch()
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0]) // FREE_SHARE
        return attention_memory.MEMORY_BUDGET

    def _group(self, index: list[int]) -> _Heads:
        torch, layer = import_torch(), self.layer
        Q, K, V = (
            torch.stack([self._put(part(h)) for h in index]) for part in (layer.queries, layer.keys, layer.values)
        )
        # as in KernelTiles: where no logit can be that far below the largest, nothing is denormal
        reach = 2.0 * float((Q.norm(dim=2).amax(1) * K.norm(dim=2).amax(1)).max())
        reach += 0.0 if layer.column is None else float(np.ptp(layer.column))
        return _Heads(tuple(index), Q, K, V, torch.empty_like(V), not reach < -FLOOR, {})

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        """Start and end of each block of rows, and how many columns its rows see."""
        n, visible = self.layer.n, self.layer.visible
        for start in range(0, n, self._rows):
            stop = min(n, start + self._rows)
            yield start, stop, n if visible is None else int(visible[stop - 1])

    def _weights(self, heads: _Heads, start: int, stop: int, seen: int) -> Tensor:
        """``P`` of the rows, ``(g, rows, seen)``."""
        if start in heads.kept:
            return heads.kept[start]
        torch = import_torch()
        S = heads.Q[:, start:stop] @ heads.K[:, :seen].mT
        if self._column is not None:
            S += self._column[:seen]
        if self._visible is not None:
            hidden = torch.arange(seen, device=self.device) >= self._visible[start:stop, None]
            S.masked_fill_(hidden, -torch.inf)
        S -= S.amax(dim=2, keepdim=True)
        if heads.clip:
            S.masked_fill_(S < FLOOR, -torch.inf)
        P = S.exp_()
        P /= P.sum(dim=2, keepdim=True)
        if self._keep:
            heads.kept[start] = P
        return P

    def scaled_gram(self, direction: ArrayLike) -> Array:
        """``J^T J / scale^2`` applied to ``(n, d)``."""
        torch, layer = import_torch(), self.layer
        with torch.inference_mode():
            x = self._put(layer.gather(np.asarray(direction).reshape(self.n, self.d)))
            y = self._gram(x if self._root is None else x / self._root)
            out: Array = (y if self._root is None else y / self._root).cpu().numpy()
        return layer.scatter(out)

    def _gram(self, x: Tensor) -> Tensor:
        torch, layer = import_torch(), self.layer
        moved = x @ self._stack.mT
        back = torch.zeros_like(moved)
        moves = [tuple(self._columns(moved, heads, part) for part in range(3)) for heads in self._groups]
        sums = [(torch.zeros_like(heads.K), torch.zeros_like(heads.V)) for heads in self._groups]
        for start, stop, seen in self._blocks():
            o = torch.empty((stop - start, layer.value_width), dtype=self._kind, device=self.device)
            kernels = [self._weights(heads, start, stop, seen) for heads in self._groups]
            for heads, P, (dQ, dK, dV) in zip(self._groups, kernels, moves, strict=True):
                left = torch.cat([dQ[:, start:stop], heads.Q[:, start:stop]], dim=2)
                T = left @ torch.cat([heads.K[:, :seen], dK[:, :seen]], dim=2).mT
                T *= P
                do = T @ heads.V[:, :seen] + P @ dV[:, :seen] - T.sum(dim=2, keepdim=True) * heads.O[:, start:stop]
                for h, values in zip(heads.index, do, strict=True):
                    o[:, layer.heads[h].values] = values
            g = o if self._outputs is None else (o @ self._outputs.mT) @ self._outputs
            if self._root is not None:
                g = g * self._root[start:stop] ** 2
            for heads, P, (K, V) in zip(self._groups, kernels, sums, strict=True):
                c = torch.stack([g[:, layer.heads[h].values] for h in heads.index])
                T = c @ heads.V[:, :seen].mT
                T -= (c * heads.O[:, start:stop]).sum(dim=2, keepdim=True)
                T *= P
                for h, values in zip(heads.index, T @ heads.K[:, :seen], strict=True):
                    back[start:stop, layer.heads[h].parts[0]] = values
                K[:, :seen] += T.mT @ heads.Q[:, start:stop]
                V[:, :seen] += P.mT @ c
        for heads, (K, V) in zip(self._groups, sums, strict=True):
            for h, keys, values in zip(heads.index, K, V, strict=True):
                back[:, layer.heads[h].parts[1]], back[:, layer.heads[h].parts[2]] = keys, values
        return back @ self._stack

    def _columns(self, moved: Tensor, heads: _Heads, part: int) -> Tensor:
        """The queries (0), keys (1) or values (2) of the heads in stacked projections, ``(g, n, ...)``."""
        return import_torch().stack([moved[:, self.layer.heads[h].parts[part]] for h in heads.index])
