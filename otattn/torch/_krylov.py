"""Top right singular vectors of the derivatives of a batch of token maps, by restarted Krylov spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from otattn._derivatives.torch_graph import Graph

__all__ = ["top_right", "unit"]

BASIS = 24
"""Vectors of a Krylov space before it is restarted with its best one."""
SEED = 0


def unit(v: Tensor) -> Tensor:
    """Each member divided by its norm; zero where it is zero."""
    import torch

    size = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    return v / torch.where(size > 0, size, 1.0)


def top_right(graph: Graph, limit: int, tol: float) -> tuple[Tensor, int]:
    """Right singular vectors ``(..., n, d)`` from a random start, and the products with ``J^T J`` that they took.

    The Rayleigh-Ritz pair of ``J^T J`` on an orthonormal basis of its Krylov space, restarted. Stops when the residual of
    every pair is at most ``tol`` of its eigenvalue.
    """
    import torch

    x = graph.x.detach()
    wide = torch.promote_types(graph.y.dtype, torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    v = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device=x.device, dtype=wide)
    v, used = unit(v), 0
    while True:
        basis, images = [v], []
        while True:
            images.append(graph.vjp(graph.jvp(basis[-1])).to(wide))
            used += 1
            value, v, image = _ritz(basis, images)
            gap = torch.linalg.vector_norm(image - value[..., None, None] * v, dim=(-2, -1))
            # two products from a random start say nothing yet of the largest singular value
            if used >= limit or (len(basis) > 2 and bool((gap <= tol * value).all())):
                return unit(v), used
            if len(basis) == BASIS:
                break
            basis.append(_orthonormal(images[-1], basis))
        v = unit(v)


def _orthonormal(w: Tensor, basis: list[Tensor]) -> Tensor:
    """The direction of w beyond the basis; zero where there is none."""
    import torch

    size = torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)
    for _ in range(2):
        for b in basis:
            w = w - torch.sum(w * b, dim=(-2, -1), keepdim=True) * b
    rest = torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)
    keep = rest > 1e2 * torch.finfo(w.dtype).eps * size
    return torch.where(keep, w / torch.where(keep, rest, 1.0), 0.0)


def _ritz(basis: list[Tensor], images: list[Tensor]) -> tuple[Any, Any, Any]:
    """The largest Ritz value, its vector and the image of that."""
    import torch

    V, W = torch.stack(basis, dim=-1).flatten(-3, -2), torch.stack(images, dim=-1).flatten(-3, -2)
    H = V.mT @ W
    values, vectors = torch.linalg.eigh(0.5 * (H + H.mT))
    top = vectors[..., -1:]
    shape = basis[0].shape
    return values[..., -1], (V @ top).reshape(shape), (W @ top).reshape(shape)
