"""Models of any known family: read from a path, a mapping or a model object, or made untrained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.models.checkpoint import ArrayCheckpoint, Checkpoint, NpzCheckpoint
from otattn.models.config import Config, configure, read_config
from otattn.models.families.decoders import DECODERS
from otattn.models.families.encoders import ENCODERS
from otattn.models.families.gguf import GGUF
from otattn.models.family import Family, side_size
from otattn.models.files import existing, foreign, is_folder, is_onnx, named_path
from otattn.models.formats.gguf_file import GGUFCheckpoint
from otattn.models.formats.onnx_file import ONNXCheckpoint
from otattn.models.formats.safetensors_file import SafetensorsCheckpoint, ShardedCheckpoint
from otattn.models.transformer import Transformer

__all__ = ["FAMILIES", "family_of", "load_model", "open_checkpoint", "random"]

FAMILIES: tuple[Family, ...] = (*ENCODERS, *DECODERS)
Source = Checkpoint | Mapping[str, Any] | str | PathLike[str]
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.[^.]+", re.DOTALL)
_FOREIGN = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ckpt")


def load_model(source: Source | Any, *, config: Config = None, num_heads: int | None = None) -> Transformer:
    """A model of any known family, told by its configuration (``model_type``) or else by the names of its tensors.

    Parameters
    ----------
    source : path, mapping of arrays, Checkpoint, or model object
        A folder with ``config.json`` and ``.safetensors`` files, whole or in shards; one ``.safetensors``, ``.gguf``,
        ``.onnx`` or ``.npz`` file; a ``state_dict`` (with ``config``); or a model of ``transformers``, whose tensors and
        configuration are read. Names may have a prefix ("bert.", "model.", ...).
    config : mapping, path or object with ``to_dict()``, optional
        The model's ``config.json``; the one beside the file by default, where there is one.
    num_heads : int, optional
        In place of the configuration's: tensors do not tell it.

    Returns
    -------
    Transformer
        ``hidden_states(token_ids)``, ``map()``, and ``layers`` with ``heads``, ``attention``, ``domain``, ``block``.

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        A damaged file, tensors that are missing, do not fit or are not known, an unknown number of heads, another
        architecture, a key of the configuration that changes the map (the message names file and key).

    Notes
    -----
    Families, by ``model_type``: bert (MiniLM among them), roberta, xlm-roberta, electra, distilbert, modernbert, vit, deit, t5
    (its encoder); gpt2, opt, gpt_neox, llama, mistral, qwen2, qwen3, gemma2, gpt_oss. GGUF files hold llama (Mistral
    among them), qwen2, qwen3, gemma2 or gpt2; their quantised weights are what is measured. ONNX files are
    read for BERT and its kin; the weights are those of the graph, all else is as the configuration says (``config.json``).

    With grouped-query attention several query heads share their keys and values; each is returned as a head of its own.

    Examples
    --------
    >>> weights = {name: model.checkpoint.tensor(name) for model in [random("gpt2", rng=0)] for name in model.checkpoint.shapes}
    >>> model = load_model(weights, config={"model_type": "gpt2", "n_head": 4})
    >>> model, model.hidden_states([1, 2, 3]).shape, model.layers[0]
    (Transformer(gpt2, layers=2, heads=4, dim=64), (3, 3, 64), ModelLayer(0, heads=4, kv_heads=4, dim=64))
    """
    checkpoint = open_checkpoint(source)
    if config is None and hasattr(source, "state_dict"):
        config = getattr(source, "config", None)
    given = read_config(checkpoint, config, num_heads)
    layout = family_of(checkpoint, given).fit(checkpoint)
    return Transformer(layout, configure(layout, given, num_heads=num_heads))


def family_of(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Family:
    """The table of a checkpoint: that of its ``model_type``, else the one with the fewest tensors that have no place in it."""
    if isinstance(checkpoint, GGUFCheckpoint):
        kind = given.get("general.architecture")
        if kind not in GGUF:
            raise ValueError(
                f"general.architecture in {checkpoint.origin} must be one of {', '.join(GGUF)}, received {kind!r}; take the files "
                "of the model with config.json, or build its layers from plain arrays."
            )
        return GGUF[kind]
    kind = given.get("model_type")
    known = [family for family in FAMILIES if kind is None or kind in family.model_types]
    if not known:
        names = sorted({name for family in FAMILIES for name in family.model_types})
        raise ValueError(
            f"model_type in the configuration of {checkpoint.origin} must be one of {', '.join(names)}, received {kind!r}; build "
            "the layers of another architecture from plain arrays."
        )
    strange = [_strange(family, checkpoint) for family in known]
    best = min(range(len(known)), key=strange.__getitem__)
    held = [f for f in known if any(f".{name}".endswith(f".{f.anchor}") for name in checkpoint.shapes)]
    if strange[best] == len(checkpoint.shapes) and held:  # under another name
        return held[0]
    if strange[best] == len(checkpoint.shapes) and kind is None:
        anchors = ", ".join(dict.fromkeys(family.anchor for family in FAMILIES))
        raise ValueError(
            f"{checkpoint.origin} must hold the first table of a known family ({anchors}), received none of them; give config= "
            "with the model_type, or build the layers from plain arrays."
        )
    return known[best]


def _strange(family: Family, checkpoint: Checkpoint) -> int:
    """How many tensors have no place in the table; all of them when its first one is missing."""
    try:
        return len(family.sort(checkpoint, family.prefix(checkpoint))[1])
    except ValueError:
        return len(checkpoint.shapes)


def open_checkpoint(source: Any) -> Checkpoint:
    """The tensors of a file (``.safetensors``, ``.gguf``, ``.npz``, ``.onnx``, told apart by content), a folder, a mapping or a
    model.

    Parameters
    ----------
    source : path, mapping of arrays, Checkpoint, or object with ``state_dict()``
        A file, ``model.safetensors.index.json``, or a folder that holds ``model.safetensors``, that index, one GGUF
        model, split or not, or one ONNX file (``model.onnx``, or in a folder ``onnx``). One shard alone is refused.

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        A damaged file, one of another format (the message says which), a part of a model.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, Mapping):
        return ArrayCheckpoint(source)
    if hasattr(source, "state_dict"):  # a model object of torch
        return ArrayCheckpoint(source.state_dict(), origin=f"the given {type(source).__name__}")
    path = named_path(source)
    file = existing(_in_folder(path) if is_folder(path) else path)
    with open(file, "rb") as stream:
        magic = stream.read(4)
    if magic == b"GGUF":
        return GGUFCheckpoint(file)
    if magic[:2] == b"PK":
        what = foreign(file)
        if what is None:
            return NpzCheckpoint(file)
        raise ValueError(f"{file} must be a .safetensors, .gguf or .npz file, received {what[0]}; {what[1]}.")
    if is_onnx(file):
        return ONNXCheckpoint(file)
    if file.name.endswith(".safetensors.index.json"):
        return ShardedCheckpoint(file)
    shard = _SHARD.fullmatch(file.name)
    out = SafetensorsCheckpoint(file)
    if shard is not None and int(shard[2]) > 1:
        raise ValueError(
            f"{file} is shard {int(shard[1])} of {int(shard[2])}; give the folder or the index {_INDEX} with all shards."
        )
    return out


def _in_folder(folder: Path) -> Path:
    """The file of the weights in a folder."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        raise ValueError(
            f"{folder} must hold a whole model, but has an adapter ({adapter.name}), which is not applied here; merge it "
            "into the weights first, or name the file of the weights to read them alone."
        )
    for name in (_WHOLE, _INDEX):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.gguf"))
    firsts = [file for file in found if (part := _SHARD.fullmatch(file.name)) is None or int(part[1]) == 1]
    graphs = sorted((*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")))
    whole = [file for file in graphs if file.name == "model.onnx"] or graphs
    if len(firsts) == 1 or (len(whole) == 1 and not found):
        return (firsts or whole)[0]
    others = sorted(file.name for pattern in _FOREIGN for file in folder.glob(pattern))
    have = [file.name for file in found + graphs] + others
    raise ValueError(
        f"{folder} must be a file, or a folder with {_WHOLE}, {_INDEX} or one .gguf or .onnx model, received "
        f"{', '.join(have[:4]) or 'none of them'}; "
        + ("save the model with safetensors." if others else "name the file of the weights.")
    )


def random(
    family: str,
    *,
    layers: int = 2,
    dim: int = 64,
    heads: int = 4,
    hidden: int | None = None,
    vocab: int = 256,
    length: int = 256,
    spread: float = 0.02,
    rng: int | np.random.Generator,
) -> Transformer:
    """An untrained model: Gaussian matrices, unit normalisations, no biases.

    Parameters
    ----------
    family : str
        The ``model_type``, such as "gpt2".
    layers, dim, heads : int
    hidden : int, optional
        Of the feed-forward part, ``4 dim`` by default.
    vocab, length : int
        Tokens of the vocabulary, and rows of a table of positions. Models of images take ``9 x 9`` patches of ``4 x 4``.
    spread : float
        Standard deviation of the entries, 0.02 as at the start of training.
    rng : int or Generator

    Examples
    --------
    >>> random("llama", layers=3, dim=32, heads=2, rng=0).hidden_states([1, 2, 3]).shape
    (4, 3, 32)
    """
    table = next((table for table in FAMILIES if family in table.model_types), None)
    if table is None:
        names = sorted({name for table in FAMILIES for name in table.model_types})
        raise ValueError(f"family must be one of {', '.join(names)}, received {family!r}.")
    draw = check.rng_from(rng)
    d, H = check.count(dim, "dim"), check.count(heads, "heads")
    if (d % (2 * H) and table.rotary is not None) or d % H:
        raise ValueError(
            f"heads must divide dim into heads of (with rotary positions) even width, received {H} and {d}."
        )
    first = sum(use in table.arrays for use in ("class", "distillation"))
    sides = {
        "d": d,
        "e": d,
        "q": d,
        "k": d,
        "v": d,
        "o": d,
        "h": 4 * d if hidden is None else check.count(hidden, "hidden"),
    }
    sides |= {
        "vocab": check.count(vocab, "vocab"),
        "types": 2,
        "heads": H,
        "width": d // H,
        "experts": 4,
        "buckets": 32,
    }
    sides |= {"positions": check.count(length, "length"), "channels": 3, "patch": 4}
    if not table.embeddings:
        sides["positions"] = 81 + first
    arrays: dict[str, NDArray[np.float64]] = {}
    for name, shape, kind in table.tensors(check.count(layers, "layers")):
        size = [int(side_size(side, sides) or 0) for side in shape.split()]
        fill = 1.0 if kind == "gain" and table.norm != "shifted" else 0.0
        if kind != "maybe":
            arrays[name] = spread * draw.standard_normal(size) if kind == "weight" else np.full(size, fill)
    return load_model(arrays, config={"model_type": family}, num_heads=H)
