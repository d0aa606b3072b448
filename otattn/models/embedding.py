"""What enters the first layer: vectors of tokens and positions, or patches of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.models.config import ModelConfig
from otattn.models.family import Layout
from otattn.models.heads import tokenwise
from otattn.models.layer import projection, read_norm

__all__ = ["embed", "images_of", "ragged", "token_ids_of"]

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


def ragged(inputs: Any) -> bool:
    """Texts of several lengths."""
    if isinstance(inputs, np.ndarray) or not isinstance(inputs, Sequence) or isinstance(inputs, str):
        return False
    return len({len(text) if isinstance(text, (Sequence, np.ndarray)) else -1 for text in inputs}) > 1


def token_ids_of(token_ids: ArrayLike, config: ModelConfig) -> Ids:
    """``token_ids`` as ``(windows, n)`` integers of the vocabulary."""
    if ragged(token_ids):
        raise ValueError(
            "token_ids must be windows of one length here, received texts of several lengths; take them one by one."
        )
    raw = np.asarray(token_ids)
    if raw.dtype.kind not in "iu" or raw.ndim not in (1, 2) or raw.size == 0:
        raise ValueError(
            f"token_ids must be integers of shape (n,) or (windows, n), received {raw.dtype} of shape {raw.shape}; "
            "otattn.models.text_windows makes them from text."
        )
    if raw.min() < 0 or raw.max() >= config.vocab_size:
        raise ValueError(
            f"token_ids must lie in [0, {config.vocab_size}), received [{raw.min()}, {raw.max()}]; "
            "use the tokenizer of this model."
        )
    limit = config.max_length
    if limit is not None and raw.shape[-1] > limit:
        raise ValueError(f"token_ids must have at most {limit} tokens a window, received {raw.shape[-1]}; cut them.")
    return raw.astype(np.int64).reshape(-1, raw.shape[-1])


def images_of(images: ArrayLike, layout: Layout) -> Array:
    """``images`` as ``(windows, channels, height, width)`` numbers."""
    facts = layout.facts
    side = round((facts["positions"] - facts["firsts"]) ** 0.5) * facts["patch"]
    raw = check.as_float_array(images, "images")
    shape = (facts["channels"], side, side)
    if raw.ndim not in (3, 4) or raw.shape[-3:] != shape or raw.size == 0:
        raise ValueError(
            f"images must have shape {shape} or (windows, {', '.join(map(str, shape))}), received {raw.shape}; scale and "
            "normalise them as the model was trained."
        )
    return raw.reshape(-1, *shape)


def embed(layout: Layout, config: ModelConfig, inputs: Ids | Array, visible: Mask | None = None) -> Array:
    """What enters the first layer, ``(windows, n, d)``, for token indices or images."""
    family, read = layout.family, layout.checkpoint.tensor
    if not family.embeddings:
        return _patches(layout, np.asarray(inputs, dtype=np.float64))
    ids = np.asarray(inputs, dtype=np.int64)
    tables = {use: f"{layout.prefix}{name}.weight" for use, (name, _) in family.embeddings.items()}
    words, index = np.unique(ids, return_inverse=True)
    X = read(tables["words"], rows=words)[index.reshape(ids.shape)]
    if family.scaled_words:
        X = X * np.sqrt(config.dim)
    if "positions" in tables:
        places, index = np.unique(_positions(layout, config, ids, visible), return_inverse=True)
        X = X + read(tables["positions"], rows=places)[index.reshape(ids.shape)]
    if "types" in tables:  # one text: all tokens are of the first type
        X = X + read(tables["types"])[0]
    if "embedding" in family.norms:
        X = tokenwise(read_norm(layout, config, layout.prefix + family.norms["embedding"]), X)
    project = projection(layout)
    return np.asarray(X if project is None else X @ project[0].T + project[1])


def _positions(layout: Layout, config: ModelConfig, ids: Ids, visible: Mask | None) -> Ids:
    """The row of each token's position ``(windows, n)``.

    Padding at the start moves the first position; families that count tokens (OPT, and RoBERTa by the padding token) do so.
    """
    seen = np.ones(ids.shape, dtype=bool) if visible is None else visible
    if config.pad is not None:
        real = ids != config.pad
        return np.where(real, np.cumsum(real, axis=1) + config.first_position - 1, config.pad)
    if layout.family.counted:
        return np.where(seen, np.cumsum(seen, axis=1), 0) + config.first_position - 1
    before = np.argmax(seen, axis=1)[:, None]
    return np.maximum(np.arange(ids.shape[1]) - before, 0) + config.first_position


def _patches(layout: Layout, images: Array) -> Array:
    """The vectors of patches, the first tokens before them, positions added."""
    arrays = {use: layout.checkpoint.tensor(layout.prefix + name) for use, (name, _) in layout.family.arrays.items()}
    W, p = arrays["patches"], layout.facts["patch"]
    w, c, height, width = images.shape
    cut = images.reshape(w, c, height // p, p, width // p, p).transpose(0, 2, 4, 1, 3, 5).reshape(w, -1, c * p * p)
    X = cut @ W.reshape(len(W), -1).T + arrays["patch_bias"]
    firsts = [np.broadcast_to(arrays[use], (w, 1, len(W))) for use in ("class", "distillation") if use in arrays]
    return np.asarray(np.concatenate([*firsts, X], axis=1) + arrays["positions"])
