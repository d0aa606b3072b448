"""Attention maps of the library from torch modules, checked against the modules' own forward pass."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._derivatives.torch_graph import import_torch
from otattn.attention import AttentionMap, Compose
from otattn.torch._recipes import RECIPES, Made
from otattn.torch._weights import Weights

__all__ = ["from_torch"]

Array = NDArray[np.float64]
CHECK_TOKENS = 7
"""Random tokens at which map and module are compared."""
AGREEMENT = 1e-5
"""Relative to the largest value. Modules that turn to float32 inside (normalisations, softmax) differ by about 1e-7."""


def from_torch(module: Any, *, causal: bool = False) -> AttentionMap:
    """A torch module as an attention map of the library, with its Jacobian and the theorems that cover it.

    The map is built of the module's own tensors in float64, in evaluation mode (no dropout). It is then compared with the
    module's own forward pass, in float64, at random tokens.

    Parameters
    ----------
    module : torch.nn.Module
        ``torch.nn``: MultiheadAttention (as self-attention), TransformerEncoderLayer, TransformerEncoder, Sequential of such.
        ``transformers``: attention and layers of BERT, GPT-2, Llama, ViT and DeiT. ``timm``: attention and blocks of vision
        transformers (DeiT among them), with and without a norm of queries and keys.
        Layers of :class:`torch.nn.LayerNorm` in a Sequential are taken too.
    causal : bool
        With a causal mask, where the module takes one in its calls (``torch.nn``, ``timm``). Modules of ``transformers`` know.

    Returns
    -------
    AttentionMap
        :class:`MultiHeadAttention` (masked or rotary where the module is) or a composition of parts. It keeps float64
        copies of the weights and no tie to the module.

    Raises
    ------
    TypeError
        No module, or one that is not known; the message says what to do with it.
    ValueError
        A tensor or an option of the module whose use is not known; values that differ from those of the module.
    ImportError
        Torch is not installed.

    Examples
    --------
    ::

        layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        block = oa.from_torch(layer)
        oa.local_lipschitz(block, tokens)          # tokens (n, 64): an array or a tensor
        oa.at_measure_bound(oa.from_torch(layer.self_attn), tokens)
    """
    torch = import_torch()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, received {type(module).__name__}; a function of tokens is "
            "FunctionAttention(function, dim), a model or a folder is opened by otattn.models."
        )
    made = _made(module, bool(causal))
    _compare(module, made)
    return made.map


def _made(module: Any, causal: bool) -> Made:
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
    if names[0] in ("torch.nn.modules.container.Sequential", "torch.nn.modules.transformer.TransformerEncoder"):
        return _sequence(module, causal)
    recipe = next((RECIPES[name] for name in names if name in RECIPES), None)
    if recipe is None:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in RECIPES}))
        raise TypeError(
            f"module must be one of {known}, or a Sequential or TransformerEncoder of them, received {names[0]}; use its layers one "
            "by one, or FunctionAttention(lambda X: ..., dim) with a call on tokens (n, d)."
        )
    weights = Weights(module)
    made = recipe(module, weights, causal)
    weights.all_read(names[0])
    return made


def _sequence(module: Any, causal: bool) -> Made:
    """Layers one after another; a TransformerEncoder may have a norm at its end."""
    encoder = hasattr(module, "layers")
    layers = list(module.layers) if encoder else list(module)
    if encoder and module.norm is not None:
        layers.append(module.norm)
    if not layers:
        raise ValueError(f"module must hold at least one layer, received an empty {type(module).__name__}.")
    parts = [_made(layer, causal) for layer in layers]

    def run(whole: Any, X: Any) -> Any:
        own = [*whole.layers, *([] if whole.norm is None else [whole.norm])] if encoder else list(whole)
        for layer, part in zip(own, parts, strict=True):
            X = part.run(layer, X)
        return X

    return Made(parts[0].map if len(parts) == 1 else Compose(*(p.map for p in parts)), run)


def _compare(module: Any, made: Made) -> None:
    """The map at random tokens against the module itself."""
    torch = import_torch()
    own = copy.deepcopy(module).to(device="cpu", dtype=torch.float64).eval()
    for config in {id(c): c for part in own.modules() if (c := getattr(part, "config", None)) is not None}.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"  # fused kernels have no float64; the configuration is a copy too
    X = np.random.default_rng(0).standard_normal((CHECK_TOKENS, made.map.in_dim or 1))
    with torch.no_grad():
        out = made.run(own, torch.tensor(X))
    expected, found = out.numpy(), made.map.on_tokens(X)
    size = float(np.abs(expected).max())
    gap = float(np.abs(found - expected).max()) if found.shape == expected.shape else float("inf")
    if not gap <= AGREEMENT * max(size, 1e-300):
        raise ValueError(
            f"the map must agree with {type(module).__name__} at random tokens within {AGREEMENT:g}, received a "
            f"difference of {gap:.3g} of {size:.3g}; it has an option or a forward pass that is not known here: use "
            "FunctionAttention(lambda X: ..., dim) with a call on tokens (n, d)."
        )
