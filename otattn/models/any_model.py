"""A model of any known family, told by its checkpoint."""

from __future__ import annotations

from otattn.models.bert import FAMILY as BERT
from otattn.models.bert import bert
from otattn.models.gguf_file import GGUFCheckpoint
from otattn.models.gpt2 import FAMILY as GPT2_FAMILY
from otattn.models.gpt2 import gpt2
from otattn.models.llama import HUGGING_FACE, llama
from otattn.models.opening import Config, Source
from otattn.models.shards import open_checkpoint
from otattn.models.transformer import Transformer

__all__ = ["open_model"]


def open_model(source: Source, *, config: Config = None, num_heads: int | None = None) -> Transformer:
    """A BERT, GPT-2 or Llama-type model, by the name of its table of words.

    Parameters
    ----------
    source : path, mapping of arrays, or Checkpoint
        As :func:`bert`, :func:`gpt2` and :func:`llama` take it.
    config : mapping or path, optional
        ``config.json``, the one beside the file by default.
    num_heads : int, optional
        For BERT and GPT-2 without a configuration.

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        Another architecture, or what the family's own function refuses.

    Examples
    --------
    >>> open_model({"a.weight": [[1.0]]})
    Traceback (most recent call last):
    ...
    ValueError: the given arrays must hold the table of words of a known family (...), received none of them; ...
    """
    checkpoint = open_checkpoint(source)
    if isinstance(checkpoint, GGUFCheckpoint):
        return llama(checkpoint, config=config)
    anchors = {family.name: f"{family.embeddings['words'][0]}.weight" for family in (BERT, GPT2_FAMILY, HUGGING_FACE)}
    found = [key for key, anchor in anchors.items() if any(_ends(name, anchor) for name in checkpoint.shapes)]
    if len(found) != 1:
        raise ValueError(
            f"{checkpoint.origin} must hold the table of words of a known family ({', '.join(anchors.values())}), received "
            f"{'none of them' if not found else ' and '.join(found)}; use otattn.models.bert, gpt2 or llama, or build the "
            "layers from plain arrays."
        )
    if found[0] == HUGGING_FACE.name:
        return llama(checkpoint, config=config)
    return (bert if found[0] == BERT.name else gpt2)(checkpoint, config=config, num_heads=num_heads)


def _ends(name: str, anchor: str) -> bool:
    return name == anchor or name.endswith("." + anchor)
