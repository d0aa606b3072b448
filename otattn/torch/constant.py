"""The local Lipschitz constant of a torch function, differentiable in its parameters and in the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from otattn import _validate as check
from otattn._derivatives.torch_graph import Graph, import_torch
from otattn.errors import ConvergenceError
from otattn.torch._krylov import top_right, unit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LocalConstant", "local_lipschitz"]


@dataclass(frozen=True, eq=False)
class LocalConstant:
    """A local constant of a torch function, with what the next call starts from.

    Attributes
    ----------
    value : Tensor () or (batch,)
        ``|J^T start|``, at most the norm of J; differentiable.
    output : Tensor
        What the function returned at the tokens, differentiable: the forward pass need not be run again.
    start : Tensor
        The left vector u, of norm one, that the value belongs to.
    right : Tensor
        ``v = J^T u / value``.
    steps : int
        Products with J that came before.
    """

    value: Tensor
    output: Tensor
    start: Tensor
    right: Tensor
    steps: int
    graph: Graph = field(repr=False)

    @cached_property
    def left(self) -> Tensor:
        """The direction of ``J v``: a power step on from ``start``, where the next call starts.

        ``J v`` is the gradient of the value in u. After ``backward`` through the value it is there, for nothing; before, it
        takes a product. Where neither is possible (other ways to a gradient, a penalty that was switched off) it is ``start``.
        """
        torch = import_torch()
        moved = self.graph.left_gradient()
        if moved is None:
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    moved = self.graph.jvp(self.right)
            except RuntimeError:  # the graph was freed by a backward that did not reach u
                return self.start
        direction = unit(moved.detach().to(self.start.dtype))
        usable = torch.isfinite(direction).all(dim=(-2, -1), keepdim=True) & (direction != 0).any(
            dim=(-2, -1), keepdim=True
        )
        return torch.where(usable, direction, self.start)

    @property
    def residual(self) -> Tensor:
        """``|J v - value u| / value``, 0 for an exact singular pair: some singular value lies within this part of ``value``."""
        torch = import_torch()
        cosine = torch.sum(self.left * self.start, dim=(-2, -1)).abs()
        sine = torch.linalg.vector_norm(self.left - _signed(self.left, self.start), dim=(-2, -1))
        return torch.where(self.value.detach() > 0, sine / cosine, 0.0)

    def __repr__(self) -> str:
        value = self.value.detach()
        if value.ndim:
            return f"LocalConstant({tuple(value.shape)}, largest {value.max().item():.6g}, steps={self.steps})"
        return f"LocalConstant({value.item():.6g}, steps={self.steps})"


def _signed(a: Tensor, b: Tensor) -> Tensor:
    """The part of a along the unit vector b."""
    return (a * b).sum(dim=(-2, -1), keepdim=True) * b


def local_lipschitz(
    function: Callable[..., Any],
    tokens: Tensor,
    *,
    start: Tensor | LocalConstant | None = None,
    steps: int | None = None,
    tol: float = 1e-6,
    max_iter: int = 1000,
) -> LocalConstant:
    r"""The norm of the derivative of ``tokens -> function(tokens)``, as a tensor that can be differentiated.

    .. math:: \sigma(\theta, X) = \|D_X f_\theta(X)\|_2, \qquad d\sigma = u^T\, (d J)\, v

    with the singular vectors u and v of :math:`J = D_X f_\theta(X)`: it is the W_2 local constant of the attention map at
    n tokens that move as wholes. ``value.backward()`` gives its gradient in the parameters of ``function``, and in ``tokens``
    if they require one, for one product with a second derivative.

    Parameters
    ----------
    function : callable Tensor -> Tensor, or torch.nn.Module
        ``(n, d) -> (n, e)``, or with leading batch dimensions, whose members must not interact: then each has its constant.
        Of a tuple the first tensor is taken. A ``torch.nn.MultiheadAttention`` is called as self-attention.
    tokens : Tensor (n, d) or (batch, n, d)
        In any floating type, on any device; autocast is obeyed.
    start : Tensor or LocalConstant, optional
        The result of the last call (or its ``left``): with parameters and tokens that moved little one step is enough.
    steps : int, optional
        So many power steps, whatever the residual: for training, where ``steps=1`` with ``start`` costs least. By default as many as
        the tolerance takes, by Krylov iterations in the case of no start.
    tol : float
        Largest residual, without ``steps``; the relative error of the value is about its square. At least a few roundings of the type.
    max_iter : int
        Largest number of products, without ``steps``.

    Returns
    -------
    LocalConstant
        ``value``, ``output``, and what the next call starts from.

    Raises
    ------
    ConvergenceError
        The tolerance was not reached; the message gives what was. Give ``steps``, or a larger ``tol``.
    ImportError
        Torch is not installed.
    TypeError, ValueError
        Tokens or values that are no floating tensors of such shapes; a start of another shape.

    Notes
    -----
    Products with J come from the graph of one evaluation: ``J^T u`` is a gradient, ``J v`` the gradient of
    ``<J^T u, v>`` in u. With ``w = J^T u``, u fixed, ``value = |w|`` has the differential ``<w / |w|, (dJ)^T u> = u^T (dJ) v``
    for ``v = w / |w|``, which is that of the singular value when u is its vector (to first order in the residual otherwise).
    Where the largest singular value is not simple the norm has no gradient; one of its one-sided derivatives is given. Fused attention
    kernels, which have no second derivative, are replaced by the plain operations.

    The constant is measured in the precision of the tokens and proves nothing; build the map with :func:`otattn.from_torch`
    (or ``FunctionAttention``) for certified neighbourhoods.

    Examples
    --------
    A penalty in training::

        state = None
        for X, y in batches:
            state = otattn.torch.local_lipschitz(layer, X, start=state, steps=1)
            loss = criterion(head(state.output), y) + 0.1 * state.value.mean()
            loss.backward()
    """
    torch = import_torch()
    x, run = _tokens(tokens), _callable(function)
    count = None if steps is None else check.count(steps, "steps")
    limit = check.count(max_iter, "max_iter")
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        graph = Graph(run, x if x.requires_grad else x.detach().clone().requires_grad_())
        wide = torch.promote_types(graph.y.dtype, torch.float32)
        used = 0
        if start is None:
            tight = 1e-2 if count is not None else max(tol, 4.0 * torch.finfo(x.dtype).eps)
            v, used = top_right(graph, 1 if count is not None else limit, tight)
            left = unit(graph.jvp(v).to(wide))
        else:
            left = _started(start, graph.y, wide)
        enough = max(tol, 8.0 * torch.finfo(graph.y.dtype).eps)
        while True:
            size, right = _norm(graph.pulled(left), wide)
            value, output = (size, graph.y) if grad else (size.detach(), graph.y.detach())
            found = LocalConstant(value, output, left, right, used, graph)
            if used + 1 >= (count or limit) or (count is None and bool((found.residual <= enough).all())):
                break
            left, used = found.left, used + 1
        if count is None and not bool((found.residual <= enough).all()):
            raise ConvergenceError(
                f"residual must be at most {enough:g}, reached {found.residual.max().item():.3g} after {used} products, value "
                f"{size.max().item():.6g} (a lower one); give steps=, a larger tol or a larger max_iter."
            )
    return found


def _tokens(tokens: Any) -> Tensor:
    torch = import_torch()
    if not isinstance(tokens, torch.Tensor) or not tokens.is_floating_point():
        what = f"a tensor of {tokens.dtype}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise TypeError(
            f"tokens must be a floating torch tensor, received {what}; torch.as_tensor(X, dtype=...) makes one, and "
            "otattn.local_lipschitz takes arrays."
        )
    if tokens.ndim < 2 or 0 in tokens.shape:
        raise ValueError(f"tokens must have shape (n, d) or (batch, n, d), received {tuple(tokens.shape)}.")
    return tokens.clone() if tokens.is_inference() else tokens


def _callable(function: Any) -> Callable[[Any], Any]:
    torch = import_torch()
    if hasattr(function, "on_tokens"):
        raise TypeError(
            f"function must be a torch module or function, received the attention map {type(function).__name__}; "
            "otattn.local_lipschitz takes it."
        )
    if not callable(function):
        raise TypeError(f"function must be a torch module or function, received {type(function).__name__}.")

    def run(x: Any) -> Any:
        if isinstance(function, torch.nn.MultiheadAttention):
            y = function(x, x, x, need_weights=False)[0]
        else:
            y = function(x)
        y = y[0] if isinstance(y, (tuple, list)) else y
        if not isinstance(y, torch.Tensor) or y.ndim != x.ndim or y.shape[:-1] != x.shape[:-1]:
            what = f"shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise TypeError(
                f"function must return one tensor of values for each token, like {(*x.shape[:-1], 'e')}, received {what}; wrap it: "
                "lambda X: module(X).last_hidden_state, or the like."
            )
        return y

    return run


def _started(start: Any, y: Tensor, wide: Any) -> Tensor:
    left = start.left if isinstance(start, LocalConstant) else start
    if not hasattr(left, "shape") or left.shape != y.shape:
        raise ValueError(
            f"start must have the shape {tuple(y.shape)} of the values, received {tuple(getattr(left, 'shape', ()))}; "
            "it is the result of a call at as many tokens."
        )
    return unit(left.detach().to(device=y.device, dtype=wide))


def _norm(pulled: Tensor, wide: Any) -> tuple[Tensor, Tensor]:
    """``|w|`` of each member, differentiable (with gradient 0 at 0), and its direction."""
    torch = import_torch()
    w = pulled.to(wide)
    right = unit(w.detach())
    # <w, w/|w|> with the direction fixed: the same differential as |w|, and none at 0 that divides by it
    return torch.sum(w * right, dim=(-2, -1)), right
