"""The real layer that comes with the package."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import as_file, files

from otattn._files.npz import read_npz
from otattn.data.layer import SampleLayer, build_layer

__all__ = ["load_excerpt", "load_sample"]


@lru_cache(maxsize=1)
def load_sample() -> SampleLayer:
    """Attention layer 3 of all-MiniLM-L6-v2 on the opening of *Alice's Adventures in Wonderland*.

    12 heads of dimension 32 on tokens of dimension 384, with the hidden states of 4 windows of 128 tokens
    that enter the layer; read once a process. ``origin`` says where all that comes from, and its licence.

    Returns
    -------
    SampleLayer

    Examples
    --------
    >>> layer = load_sample()
    >>> layer
    SampleLayer(heads=12, dim=384, windows=4 of 128 tokens)
    >>> layer.heads[0].on_tokens(layer.tokens(0, 5)).shape
    (5, 32)
    """
    folder = files("otattn.data")
    with as_file(folder.joinpath("minilm_layer3.npz")) as path:
        arrays = read_npz(path)
    origin = folder.joinpath("ORIGIN.md").read_text(encoding="utf-8")
    return build_layer(arrays, arrays["hidden_states"], arrays["token_ids"], origin=origin)


def load_excerpt() -> str:
    """The passage of *Alice's Adventures in Wonderland* that the sample's tokens come from.

    Examples
    --------
    >>> load_excerpt()[:31]
    'Alice was beginning to get very'
    """
    return files("otattn.data").joinpath("alice_excerpt.txt").read_text(encoding="utf-8")
