"""The model, the layer and the tokens that the command line asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._files.npz import read_npy
from otattn.data import SampleLayer, load_excerpt
from otattn.models import load_model, load_tokenizer, model_path, read_text, text_windows
from otattn.models.transformer import Transformer

__all__ = ["model_layer", "network_of", "no_model", "open_model", "refuse", "windows_of"]

LENGTH, WINDOWS = 128, 4
"""Tokens a window, and windows of a text, that a layer is measured on."""
DEPTH_TOKENS = 32
"""Tokens that a whole network is measured on."""


def open_model(options: Any) -> Transformer:
    """The model of ``--model``, a path or the name of an installed package; ``--heads`` where nothing else tells them."""
    return load_model(model_path(options.model), num_heads=options.heads)


def no_model(options: Any) -> None:
    """Without ``--model`` nothing is asked that only a model has."""
    if options.model is None:
        refuse(options, "layer", "text", "heads", because="needs --model: name the model that it is of")


def refuse(options: Any, *names: str, because: str) -> None:
    """A ValueError when one of these options is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} {because}.")


def model_layer(options: Any) -> SampleLayer:
    """Layer ``--layer`` (0 by default) with the tokens of ``--text`` or ``--tokens`` that its attention sees."""
    refuse(options, "weights", because="must be left out when --model is given: it names another layer")
    model = open_model(options)
    layer = 0 if options.layer is None else options.layer
    if not -model.num_layers <= layer < model.num_layers:
        raise ValueError(f"--layer must lie in [-{model.num_layers}, {model.num_layers}), received {layer}.")
    return model.sample(layer, windows_of(model, options))


def network_of(options: Any) -> tuple[Transformer, NDArray[Any]] | None:
    """The model and the first tokens that it reads; None where it reads images."""
    model = open_model(options)
    if not model.layout.family.embeddings:
        return None
    return model, windows_of(model, options)[0][:DEPTH_TOKENS]


def windows_of(model: Transformer, options: Any, *, length: int | None = None) -> NDArray[Any]:
    """What the model reads, ``(windows, n)`` indices or images: of ``--tokens``, else of ``--text``, else of the bundled passage.

    ``length`` is the number of tokens a window, which must be there; by default as many as there are, up to 128 of a text.
    """
    refuse(
        options, *(["text"] if options.tokens is not None else []), because="and --tokens are one too many: give one"
    )
    if options.tokens is not None:
        return _from_file(model, options.tokens, length)
    return text_of(model, load_excerpt() if options.text is None else read_text(options.text), length)


def text_of(model: Transformer, text: str, length: int | None) -> NDArray[np.int64]:
    """Windows of a text."""
    if not model.layout.family.embeddings:
        raise ValueError(f"{model.checkpoint.origin} reads images, no text: give them with --tokens FILE.npy.")
    tokenizer = load_tokenizer(model)
    if length is not None:
        return text_windows(text, tokenizer, length=length, count=1)
    most = min(LENGTH, model.config.max_length or LENGTH)
    have = len(tokenizer.encode(text, add_special_tokens=False).ids)
    return text_windows(text, tokenizer, length=min(most, max(3, have)))[:WINDOWS]


def _from_file(model: Transformer, path: str, length: int | None) -> NDArray[Any]:
    """Indices of tokens, or images."""
    read = read_npy(path)
    if not model.layout.family.embeddings:
        return read
    if read.dtype.kind not in "iu" or read.ndim not in (1, 2) or read.shape[-1] < (length or 1):
        raise ValueError(
            f"--tokens must hold token indices (n,) or (w, n) with n at least {length or 1}, received {read.dtype} of shape "
            f"{read.shape}; give --n, or a text with --text."
        )
    ids = np.asarray(read.reshape(-1, read.shape[-1]), dtype=np.int64)
    return ids if length is None else ids[:1, :length]
