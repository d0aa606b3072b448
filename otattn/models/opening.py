"""Opening a model: its table is fitted to the checkpoint, its configuration checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from otattn.attention.feed_forward import activation_name
from otattn.models.checkpoint import Checkpoint
from otattn.models.family import Family, Layout
from otattn.models.files import is_folder, named_path, read_json
from otattn.models.gguf_file import GGUFCheckpoint
from otattn.models.keys import number, whole
from otattn.models.transformer import ModelConfig

__all__ = ["Config", "Source", "configure", "read_config"]

Source = Checkpoint | Mapping[str, Any] | str | PathLike[str]
_ABOVE_ONE = 1.0 + 2.0**-52
"""The least base whose frequencies fall; a base of 1 turns all pairs alike, which RotaryAttention refuses."""
Config = Mapping[str, Any] | str | PathLike[str] | None


def read_config(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """The configuration: a mapping, a file, or ``config.json`` beside the checkpoint (empty when there is none)."""
    if isinstance(checkpoint, GGUFCheckpoint):
        if config is not None:
            raise ValueError(
                f"config must be left out for {checkpoint.origin}: a GGUF file carries its own configuration."
            )
        return _metadata(checkpoint)
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


def configure(
    layout: Layout, given: Mapping[str, Any], *, rotary: Mapping[str, Any] | None = None, **override: Any
) -> ModelConfig:
    """The numbers of a model: from the tensors, the configuration, and what the caller gives in its place.

    Parameters
    ----------
    layout : Layout
    given : mapping
        The configuration.
    rotary : mapping, optional
        Base of the frequencies; layout and turned coordinates come on top.
    **override : heads, eps, activation
        None leaves the configuration's.
    """
    family, facts, origin = layout.family, layout.facts, layout.checkpoint.origin
    given = _per_layer(given, facts["layers"]) if isinstance(layout.checkpoint, GGUFCheckpoint) else given
    values = _Values(family, given, override, origin)
    heads = whole(values.read("heads"), values.label("heads"), most=1 << 16)
    groups = values.read("kv_heads")
    groups = heads if groups is None else whole(groups, values.label("kv_heads"), most=heads)
    names = [values.label(name) for name in ("heads", "kv_heads") if name in family.keys.fields]
    _fit_heads(layout, heads, groups, " and ".join(names))
    # what contradicts the tensors is told before what is merely unknown
    family.keys.check(given, {**facts, "given": given}, origin)
    doubt = family.doubt(given, facts) if given.get("model_type") is None else None
    if doubt is not None:
        raise ValueError(f"{origin} must be a {family.title} model, but {doubt}; give config= with its model_type.")
    length = values.read("max_length")
    return ModelConfig(
        family=family.name,
        num_layers=facts["layers"],
        num_heads=heads,
        num_kv_heads=groups,
        dim=facts["d"],
        vocab_size=facts["vocab"],
        max_length=facts.get("positions") if length is None else whole(length, values.label("max_length")),
        eps=number(values.read("eps"), values.label("eps"), most=1e6),
        activation=activation_name(values.read("activation"), values.label("activation")),
        pre_norm=family.pre_norm,
        causal=family.causal,
        rotary=None if rotary is None else _rotary(values, rotary["base"], facts["width"]),
    )


@dataclass(frozen=True)
class _Values:
    """Numbers of a configuration by their use, those that the caller gives first."""

    family: Family
    given: Mapping[str, Any]
    override: Mapping[str, Any]
    origin: str

    def read(self, name: str) -> Any:
        """None for what the family does not have."""
        if name not in self.family.keys.fields:
            return None
        value = self.override.get(name)
        return self.family.keys.read(self.given, name, self.origin) if value is None else value

    def label(self, name: str) -> str:
        """The name of a number in messages: the argument, or the keys and the file."""
        keys = self.family.keys.fields[name].keys
        if self.override.get(name) is not None or not keys:
            return "num_heads" if name == "heads" else name
        return f"{' or '.join(keys)} (configuration of {self.origin})"


def _rotary(values: _Values, base: Any, width: int) -> dict[str, float | int | str]:
    """Base, layout and number of turned coordinates, all of a head by default."""
    turned = values.read("rotary_dim")
    turned = width if turned is None else whole(turned, values.label("rotary_dim"), most=width)
    if turned % 2:
        raise ValueError(
            f"the number of turned coordinates in {values.origin} must be even, received {turned} of {width} in a head; check "
            "the configuration."
        )
    layout = str(values.family.rotary)
    return {"base": number(base, values.label("base"), least=_ABOVE_ONE), "layout": layout, "rotary_dim": turned}


def _fit_heads(layout: Layout, heads: int, groups: int, names: str) -> None:
    """Heads share the rows evenly; their widths become facts."""
    facts = layout.facts
    q, k, v, out = (facts.get(side, facts["d"]) for side in ("q", "k", "v", "o"))
    if heads % groups or q % heads or k % groups or v % groups or q // heads != k // groups:
        raise ValueError(
            f"{names} must divide {q} and {k} rows (and {v} of values) into heads of one width, and one "
            f"another, in {layout.checkpoint.origin}, received {heads} and {groups}; check the configuration."
        )
    if out != heads * (v // groups):
        raise ValueError(
            f"the output matrices in {layout.checkpoint.origin} must have {heads * (v // groups)} columns for {heads} heads of "
            f"{v // groups} values, received {out}; check the configuration."
        )
    facts.update(heads=heads, kv_heads=groups, width=q // heads, value_width=v // groups)


def _per_layer(given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Lists with one equal entry a layer are that entry; others stay, and are refused where they count."""
    return {
        key: value[0]
        if isinstance(value, list) and len(value) == layers and all(v == value[0] for v in value)
        else value
        for key, value in given.items()
    }
