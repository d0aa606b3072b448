"""The numbers of a model: from its tensors, and from its configuration, checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np

from otattn.attention.feed_forward import activation_name
from otattn.models.checkpoint import Checkpoint
from otattn.models.family import Layout
from otattn.models.files import is_folder, named_path, read_json
from otattn.models.formats.gguf_file import GGUFCheckpoint
from otattn.models.keys import number, plain_activation, whole
from otattn.models.positions import Rotary

__all__ = ["Config", "ModelConfig", "configure", "read_config"]

Config = Mapping[str, Any] | str | PathLike[str] | None
HEAD_DIM = 64
"""Of all published sizes of GPT-2."""


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that a checkpoint's tensors do not tell, and those that they do.

    Attributes
    ----------
    family : str
    num_layers, num_heads, num_kv_heads, dim, vocab_size : int
        The vocabulary of a model of images is 0.
    max_length : int or None
        Longest text, None when positions are unbounded.
    eps : float
        Of normalisations.
    activation : str
    order : {"post", "pre", "parallel"}
    causal : bool
    scale : float or None
        Of the logits, ``1 / sqrt(k)`` when None.
    cap : float or None
        Of the logits.
    rotary, local_rotary : Rotary or None
        Rotary positions; those of layers with a window where they differ.
    reach : tuple of (int or None)
        The farthest offset that each layer sees.
    first_position : int
        The row of the first token's position.
    pad : int or None
        The padding token, for families whose positions depend on it.
    farthest : int
        Where the buckets of relative offsets end.
    experts : tuple of (str, number)
        Options of :class:`otattn.models.experts.Experts`.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dim: int
    vocab_size: int
    max_length: int | None
    eps: float
    activation: str
    order: str
    causal: bool
    scale: float | None = None
    cap: float | None = None
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None
    reach: tuple[int | None, ...] = ()
    first_position: int = 0
    pad: int | None = None
    farthest: int = 0
    experts: tuple[tuple[str, float], ...] = ()


def read_config(checkpoint: Checkpoint, config: Config, num_heads: int | None = None) -> dict[str, Any]:
    """The configuration: a mapping, a file, or ``config.json`` beside the checkpoint (empty when there is none)."""
    if isinstance(checkpoint, GGUFCheckpoint):
        if config is not None or num_heads is not None:
            raise ValueError(
                f"config and num_heads must be left out for {checkpoint.origin}: a GGUF file carries its own configuration."
            )
        return _metadata(checkpoint)
    told: Any = config
    if hasattr(told, "to_dict"):  # of transformers
        return dict(told.to_dict())
    if isinstance(config, Mapping):
        return dict(config)
    if config is not None:
        path = named_path(config)
        return read_json(path / "config.json" if is_folder(path) else path)
    if checkpoint.folder is not None and (checkpoint.folder / "config.json").is_file():
        return read_json(checkpoint.folder / "config.json")
    return {}


def _metadata(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """Scalars and numeric lists; lists of strings, which only tokenizers have, by their length."""
    out = dict(checkpoint.metadata)
    for key, size in checkpoint.lists.items():
        long = size > 1 << 16 or key.startswith("tokenizer.")
        out[key] = f"a list of {size}" if long else checkpoint.items(key)
    words = checkpoint.lists.get("tokenizer.ggml.tokens")
    rows = checkpoint.shapes.get("token_embd.weight", (words,))[0]
    if words is not None and words != rows:
        raise ValueError(
            f"tokenizer.ggml.tokens in {checkpoint.origin} must have as many entries as token_embd.weight has rows, {rows}, "
            f"received {words}; the file is damaged or mixed."
        )
    return out


def configure(layout: Layout, given: Mapping[str, Any], *, num_heads: int | None = None) -> ModelConfig:
    """The numbers of a model.

    Parameters
    ----------
    layout : Layout
    given : mapping
        The configuration.
    num_heads : int, optional
        In place of the configuration's.
    """
    family, facts, origin = layout.family, layout.facts, layout.checkpoint.origin
    given = _per_layer(given, facts["layers"]) if isinstance(layout.checkpoint, GGUFCheckpoint) else given
    values = _Values(layout, given)
    heads = whole(values.heads(num_heads), values.label("heads", num_heads), most=1 << 16)
    groups = values.read("kv_heads")
    groups = heads if groups is None else whole(groups, values.label("kv_heads"), most=heads)
    names = [values.label(name, num_heads) for name in ("heads", "kv_heads") if name in family.keys.fields]
    _fit_heads(layout, heads, groups, " and ".join(names))
    # what contradicts the tensors is told before what is merely unknown
    ropes = [rope for rope in (family.rotary, family.local_rotary) if rope is not None]
    read = {key for part in (*ropes, family.windows) if part is not None for key in part.keys}
    family.keys.check(given, {**facts, "given": given}, origin, read)
    doubt = family.doubt(given, facts) if given.get("model_type") is None else None
    if doubt is not None:
        raise ValueError(f"{origin} must be a {family.title} model, but {doubt}; give config= with its model_type.")
    length = values.read("max_length")
    length = None if length is None else whole(length, values.label("max_length"))
    pad, start = values.read("pad"), family.first_position
    if start is None:
        start = 1 + (pad if pad == 0 else whole(pad, values.label("pad")))
    rotary = [_divided(rope.read(given, facts["width"], length, origin), layout) for rope in ropes]
    rows = facts.get("positions") if family.embeddings else None
    return ModelConfig(
        family=given.get("model_type") or family.name,
        num_layers=facts["layers"],
        num_heads=heads,
        num_kv_heads=groups,
        dim=facts["d"],
        vocab_size=facts.get("vocab", 0),
        max_length=rows - start if rows is not None else length,
        eps=_graph_eps(values),
        activation=activation_name(plain_activation(values.read("activation")), values.label("activation")),
        order="pre" if values.read("parallel") is False else family.order,
        causal=family.causal,
        scale=values.scale(),
        cap=None if values.read("cap") is None else values.number("cap", least=1e-6),
        rotary=rotary[0] if rotary else None,
        local_rotary=rotary[1] if len(rotary) > 1 else None,
        reach=family.windows.read(given, facts["layers"], origin)
        if family.windows is not None
        else (None,) * facts["layers"],
        first_position=start,
        pad=pad,
        farthest=0
        if "farthest" not in family.keys.fields
        else whole(values.read("farthest"), values.label("farthest")),
        experts=values.experts(),
    )


@dataclass(frozen=True)
class _Values:
    """Numbers of a configuration by their use."""

    layout: Layout
    given: Mapping[str, Any]

    def read(self, name: str) -> Any:
        """None for what the family does not have."""
        keys = self.layout.family.keys
        value = keys.read(self.given, name, self.layout.checkpoint.origin) if name in keys.fields else None
        return value(self.layout.facts) if callable(value) else value

    def number(self, name: str, *, least: float = 0.0) -> float:
        """A finite number that is there."""
        value = self.read(name)
        if value is None:
            raise self._missing(name)
        return number(value, self.label(name), least=least, most=1e6)

    def heads(self, given: int | None) -> Any:
        """Their number: given, of the configuration, or one for 64 rows of GPT-2."""
        value = self.read("heads") if given is None else given
        if value is not None:
            return value
        d = self.layout.facts["d"]
        if "n_head" in self.layout.family.keys.fields["heads"].keys and d % HEAD_DIM == 0:
            return d // HEAD_DIM
        raise self._missing("heads")

    def scale(self) -> float | None:
        """Of the logits, where it is not 1 / sqrt(k)."""
        fields = self.layout.family.keys.fields
        if "width_of_scale" in fields:
            return self.number("width_of_scale", least=1e-6) ** -0.5
        return None if "scale" not in fields else float(self.read("scale"))

    def experts(self) -> tuple[tuple[str, float], ...]:
        """Options of the experts."""
        if "top" not in self.layout.family.keys.fields:
            return ()
        top = whole(self.read("top"), self.label("top"), most=self.layout.facts["experts"])
        return (("top", top), ("alpha", self.number("alpha")), ("limit", self.number("limit")))

    def label(self, name: str, given: Any = None) -> str:
        """The name of a number in messages: the argument, or the keys and the file."""
        keys = self.layout.family.keys.fields[name].keys
        if given is not None or not keys:
            return "num_heads" if name == "heads" else name
        return f"{' or '.join(keys)} (configuration of {self.layout.checkpoint.origin})"

    def _missing(self, name: str) -> ValueError:
        more = "num_heads=, or " if name == "heads" else ""
        return ValueError(
            f"{self.layout.family.keys.fields[name].keys[0]} must be in the configuration of {self.layout.checkpoint.origin}, "
            f"received {sorted(self.given)[:5]}; give {more}config= with the model's config.json."
        )


def _graph_eps(values: _Values) -> float:
    """The eps of normalisations; a graph that tells it must agree."""
    eps = values.number("eps")
    for told in getattr(values.layout.checkpoint, "epsilons", ()):
        if abs(told - eps) > 1e-6 * eps:  # it is stored in float32
            raise ValueError(
                f"{values.label('eps')} must be {told:.6g}, as the graph of the file has it, received {eps:g}; give config= with "
                "the model's own config.json."
            )
    return eps


def _divided(rotary: Rotary, layout: Layout) -> Rotary:
    """The frequencies divided by the tensor of the family that has such numbers, where it is there."""
    name = f"{layout.prefix}{layout.family.divisors}"
    if layout.family.divisors is None or name not in layout.checkpoint:
        return rotary
    divisors = layout.checkpoint.tensor(name, len(rotary.frequencies))
    if not (divisors > 0.0).all():
        raise ValueError(
            f"{name} in {layout.checkpoint.origin} must be positive, received {divisors.min():g}; the file is damaged."
        )
    return replace(rotary, frequencies=tuple(float(f) for f in np.array(rotary.frequencies) / divisors))


def _fit_heads(layout: Layout, heads: int, groups: int, names: str) -> None:
    """Heads share the rows evenly; their widths become facts."""
    facts, origin = layout.facts, layout.checkpoint.origin
    q, k, v, out = (facts.get(side, facts["d"]) for side in ("q", "k", "v", "o"))
    if heads % groups or q % heads or k % groups or v % groups or q // heads != k // groups:
        raise ValueError(
            f"{names} must divide {q} and {k} rows (and {v} of values) into heads of one width, and one "
            f"another, in {origin}, received {heads} and {groups}; check the configuration."
        )
    if out != heads * (v // groups):
        raise ValueError(
            f"the output matrices in {origin} must have {heads * (v // groups)} columns for {heads} heads of "
            f"{v // groups} values, received {out}; check the configuration."
        )
    told = {"heads": heads, "width": q // heads}
    for name, value in told.items():
        if facts.get(name, value) != value:
            raise ValueError(
                f"{names} must fit the tensors of {origin} that have one entry a head or a coordinate of a head, {facts[name]} "
                f"of them, received {value}; check the configuration."
            )
    facts.update(told, kv_heads=groups, value_width=v // groups)


def _per_layer(given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Lists with one equal entry a layer are that entry; others stay, and are refused where they count."""
    return {
        key: value[0]
        if isinstance(value, list) and len(value) == layers and all(v == value[0] for v in value)
        else value
        for key, value in given.items()
    }
