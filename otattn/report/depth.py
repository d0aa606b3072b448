"""The depth profile that the command line asks for: a checkpoint, a text or token indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._files.npz import read_npy
from otattn.data import load_excerpt
from otattn.lipschitz.local.depth import DepthProfile, depth_profile
from otattn.models import load_model, load_tokenizer, read_text, text_windows
from otattn.models.transformer import Transformer

__all__ = ["profile_of"]


def profile_of(options: Any) -> DepthProfile:
    """The profile of ``options``: model, text or tokens, other, n, layers, composed, splitting, heads, seed, quiet."""
    if options.text is not None and options.tokens is not None:
        raise ValueError("at most one of --text and --tokens must be given, received both.")
    model = load_model(Path(options.model), num_heads=options.heads)
    if options.layers is not None and options.layers > model.num_layers:
        raise ValueError(f"--layers must be at most {model.num_layers}, received {options.layers}.")
    if options.tokens is not None:
        ids = _from_file(options.tokens, options.n)
    else:
        ids = _from_text(model, load_excerpt() if options.text is None else read_text(options.text), options.n)
    return depth_profile(
        model,
        ids,
        last=options.layers,
        partial=not options.composed,
        other=None if options.other is None else _from_text(model, read_text(options.other), len(ids)),
        splitting=options.splitting,
        rng=options.seed,
        progress=not options.quiet,
    )


def _from_text(model: Transformer, text: str, n: int) -> NDArray[np.int64]:
    return np.asarray(text_windows(text, load_tokenizer(model), length=n, count=1)[0])


def _from_file(path: str, n: int) -> NDArray[np.int64]:
    ids = read_npy(path)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.shape[-1] < n:
        raise ValueError(
            f"--tokens must hold token indices (n,) or (w, n) with n at least {n}, received {ids.dtype} of shape {ids.shape}; "
            "give --n, or a text with --text."
        )
    return np.asarray(ids.reshape(-1, ids.shape[-1])[0, :n], dtype=np.int64)
