"""A function of torch tensors at a point: its value, and products with its derivative from one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Graph", "differentiable_attention", "import_torch"]

NEEDS = "this needs torch, which is not installed; install it with the extra: pip install 'otattn[torch]'."


def import_torch() -> Any:
    """Torch, or an ImportError that says how to have it."""
    try:
        import torch
    except ImportError as exc:
        raise ImportError(NEEDS) from exc
    return torch


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention is computed by operations that have second derivatives (fused kernels have only first ones)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


class Graph:
    """``y = function(x)`` with products of its derivative.

    ``J^T u`` is a gradient; it is linear in u, so that ``J v`` is the gradient of ``<J^T u, v>`` in u: one graph gives both,
    whatever operations the function is made of, and both can be differentiated again.

    Parameters
    ----------
    function : callable Tensor -> Tensor
    x : Tensor
        Requires a gradient.
    """

    def __init__(self, function: Callable[[Any], Any], x: Tensor) -> None:
        with differentiable_attention():
            self.x, self.y = x, function(x)
        self._left: Tensor | None = None
        self._pulled: Tensor | None = None

    def pulled(self, left: Tensor) -> Tensor:
        """``J^T left``, which can be differentiated in everything it depends on; kept for :meth:`jvp`."""
        import torch

        self._left = left.detach().to(self.y.dtype).requires_grad_()
        self._pulled = self._gradient(self.y, self.x, self._left, create_graph=True)
        if self._pulled is None:
            self._pulled = torch.zeros_like(self.x)
        return self._pulled

    def left_gradient(self) -> Tensor | None:
        """What a ``backward`` left at the u of :meth:`pulled`."""
        return None if self._left is None else self._left.grad

    def vjp(self, g: Tensor) -> Tensor:
        """``J^T g``."""
        import torch

        out = self._gradient(self.y, self.x, g.to(self.y.dtype))
        return torch.zeros_like(self.x) if out is None else out

    def jvp(self, v: Tensor) -> Tensor:
        """``J v``."""
        import torch

        if self._pulled is None:
            self.pulled(torch.zeros_like(self.y))
        assert self._pulled is not None
        out = self._gradient(self._pulled, self._left, v.to(self._pulled.dtype))
        return torch.zeros_like(self.y) if out is None else out

    @staticmethod
    def _gradient(y: Tensor, x: Any, g: Tensor, create_graph: bool = False) -> Any:
        import torch

        if not y.requires_grad:  # y does not depend on x
            return None
        return torch.autograd.grad(y, x, g, retain_graph=True, create_graph=create_graph, allow_unused=True)[0]
