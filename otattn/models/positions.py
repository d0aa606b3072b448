"""Positions in a configuration: rotary frequencies and their scalings, and windows of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.keys import number, short, whole

__all__ = ["RopeKeys", "Rotary", "Windows"]

Array = NDArray[np.float64]
_DICTS = ("rope_parameters", "rope_scaling")
_KNOWN = ("default", "linear", "llama3", "yarn")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
_NEUTRAL = {"factor": 1.0, "attention_factor": 1.0, "partial_rotary_factor": 1.0}
"""Values with which an option that a kind does not have is none."""
_ABOVE_ONE = 1.0 + 2.0**-52
"""The least base whose frequencies fall; a base of 1 turns all pairs alike."""


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a head: angles a position, how coordinates pair up, and a factor of what is turned.

    Attributes
    ----------
    frequencies : tuple of float
        Of the pairs; twice as many leading coordinates are turned.
    layout : str
        "half" or "adjacent", see :class:`otattn.attention.RotaryAttention`.
    factor : float
        Of the turned coordinates of queries and keys (the attention factor of YaRN).
    """

    frequencies: tuple[float, ...]
    layout: str
    factor: float = 1.0

    def enlarged(self, rows: Array) -> Array:
        """The rows (or entries) of turned coordinates times the factor; a new array."""
        out = np.array(rows)
        out[: 2 * len(self.frequencies)] *= self.factor
        return out


@dataclass(frozen=True)
class RopeKeys:
    """Where a family keeps its rotary positions: names of keys, and values when they are absent.

    ``part`` is the entry of ``rope_parameters`` for families with several, ``turned`` names keys of the number of turned
    coordinates (GGUF), ``partial`` keys of their part (none: all are turned), ``default`` the options of a configuration
    without any.
    """

    base: tuple[str, ...] = ("rope_theta",)
    partial: tuple[str, ...] = ()
    default_base: float = 10_000.0
    default_partial: float = 1.0
    layout: str = "half"
    part: str | None = None
    turned: tuple[str, ...] = ()
    default: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are read."""
        return (*_DICTS, *self.base, *self.partial, *self.turned)

    def read(self, given: Mapping[str, Any], width: int, length: int | None, origin: str) -> Rotary:
        """The positions of heads of ``width`` coordinates; ``length`` is the longest text, where it is known."""
        where, options = self._options(given, origin)
        kind = self._kind(where, options, length, origin)
        base = self._one("rope_theta", self.base, given, options, self.default_base, origin)
        base = number(base, f"rope_theta of {origin}", least=_ABOVE_ONE)
        partial = self._one("partial_rotary_factor", self.partial, given, options, self.default_partial, origin)
        turned = int(width * number(partial, f"partial_rotary_factor of {origin}", most=1.0))
        for key in self.turned:
            if given.get(key) is not None:
                turned = whole(given[key], f"{key} (configuration of {origin})", most=width)
        if turned % 2 or not turned:
            raise ValueError(
                f"the number of turned coordinates in {origin} must be even, received {turned} of {width} in a head; check "
                "the configuration."
            )
        frequencies, factor = base ** (-np.arange(0, turned, 2) / turned), 1.0
        numbers = {key: _number(where, key, value, origin) for key, value in options.items() if key in _read_by(kind)}
        if kind == "linear":
            frequencies = frequencies / numbers["factor"]
        elif kind == "llama3":
            frequencies = _llama3(frequencies, numbers)
        elif kind == "yarn":
            frequencies, factor = _yarn(frequencies, base, numbers)
        return Rotary(tuple(float(f) for f in frequencies), self.layout, factor)

    def _options(self, given: Mapping[str, Any], origin: str) -> tuple[str, dict[str, Any]]:
        """The key that holds them, and its options; both keys may be there when they agree."""
        where = _DICTS[0]
        merged: dict[str, Any] = {}
        for key in _DICTS:
            options = given.get(key)
            if isinstance(options, dict) and self.part is not None and options:
                if not {"full_attention", "sliding_attention"} >= set(options):
                    raise _refusal(key, "options of full_attention and sliding_attention", options, origin)
                options = options.get(self.part)
            if options is None or options == {}:
                continue
            if not isinstance(options, dict):
                raise _refusal(key, "a mapping", options, origin)
            if any(merged.get(name, value) != value for name, value in options.items()):
                raise _refusal(key, f"what {where} says", options, origin)
            where, merged = key, {**merged, **options}
        return where, merged or dict(self.default)

    def _kind(self, where: str, options: dict[str, Any], length: int | None, origin: str) -> str:
        """The kind of scaling, all of whose options are there and known."""
        named = [options[key] for key in ("rope_type", "type") if options.get(key) is not None]
        kind = named[0] if named else "default"
        if any(other != kind for other in named) or kind not in _KNOWN:
            raise _refusal(where, f"of one kind among {', '.join(_KNOWN)}", options, origin)
        if length is not None and options.get("original_max_position_embeddings") is None:
            options["original_max_position_embeddings"] = length
        missing = [key for key in _NEEDED[kind] if options.get(key) is None]
        if missing:
            raise _refusal(where, f"with {missing[0]} for the kind {kind!r}", options, origin)
        ours = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        for key, value in options.items():
            if (
                (key in ours and (key != "partial_rotary_factor" or self.partial))
                or key in _read_by(kind)
                or value is None
                or value is False
            ):
                continue
            if isinstance(value, bool) or _NEUTRAL.get(key) != value:
                raise _refusal(where, f"without {key} for the kind {kind!r}", options, origin)
        return kind

    def _one(
        self,
        name: str,
        keys: tuple[str, ...],
        given: Mapping[str, Any],
        options: Mapping[str, Any],
        default: float,
        origin: str,
    ) -> Any:
        """A number that may stand in several places, which must agree."""
        found = [v for v in (options.get(name), *(given.get(key) for key in keys)) if v is not None]
        if any(value != found[0] for value in found):
            raise ValueError(
                f"{' or '.join({name: 0, **dict.fromkeys(keys)})} in the configuration of {origin} must be one value, received "
                f"{found}; leave one of them out."
            )
        return found[0] if found else default


def _read_by(kind: str) -> tuple[str, ...]:
    return (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))


def _refusal(key: str, required: str, value: Any, origin: str) -> ValueError:
    return ValueError(
        f"{key} in the configuration of {origin} must be {required}, received {short(value)}: anything else is another map "
        "than is computed here."
    )


def _number(where: str, key: str, value: Any, origin: str) -> Any:
    if key == "truncate" or value is None:
        return value
    return number(value, f"{key} in {where} (configuration of {origin})", least=2.0**-52)


def _llama3(frequencies: Array, options: Mapping[str, float]) -> Array:
    """Slow pairs are slowed by the factor, fast ones stay, those between are mixed by their number of turns."""
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * frequencies / (2.0 * math.pi)
    mix = np.clip((turns - low) / (high - low), 0.0, 1.0) if high != low else (turns >= low).astype(np.float64)
    return np.asarray((1.0 - mix) * frequencies / options["factor"] + mix * frequencies)


def _yarn(frequencies: Array, base: float, options: Mapping[str, Any]) -> tuple[Array, float]:
    """Frequencies mixed by a ramp over the pairs, and the factor of queries and keys."""
    factor, length = options["factor"], options["original_max_position_embeddings"]
    dim = 2 * len(frequencies)
    turns = (options.get("beta_fast") or 32.0, options.get("beta_slow") or 1.0)
    low, high = (dim * math.log(length / (t * 2.0 * math.pi)) / (2.0 * math.log(base)) for t in turns)
    if options.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high  # as in the models' code
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    scale = options.get("attention_factor")
    if scale is None:
        over, all_dim = options.get("mscale"), options.get("mscale_all_dim")
        scale = _mscale(factor, over) / _mscale(factor, all_dim) if over and all_dim else _mscale(factor, 1.0)
    return ramp * frequencies / factor + (1.0 - ramp) * frequencies, float(scale)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Windows:
    """Which layers see a window only, and how far.

    Attributes
    ----------
    size : str
        The key of the window.
    default : int
    layers : {"all", "even", "late", "thirds"}
        Without ``layer_types``: all layers; those of even number; those from ``max_window_layers`` on, when
        ``use_sliding_window`` is on; all but every third (or ``global_attn_every_n_layers``-th).
    symmetric : bool
        A token sees as many tokens after it as before it: half of the window on each side.
    """

    size: str = "sliding_window"
    default: int = 4096
    layers: str = "all"
    symmetric: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are read."""
        more = {"late": ("use_sliding_window", "max_window_layers"), "thirds": ("global_attn_every_n_layers",)}
        return (self.size, *(() if self.layers == "all" else ("layer_types",)), *more.get(self.layers, ()))

    def read(self, given: Mapping[str, Any], layers: int, origin: str) -> tuple[int | None, ...]:
        """The farthest offset that each layer sees, None for all."""
        local = self._local(given, layers, origin)
        if not any(local):
            return (None,) * layers
        size = given.get(self.size, self.default)
        if size is None and self.layers == "all":
            return (None,) * layers
        size = whole(size, f"{self.size} (configuration of {origin})")
        reach = size // 2 if self.symmetric else size - 1
        return tuple(reach if here else None for here in local)

    def _local(self, given: Mapping[str, Any], layers: int, origin: str) -> list[bool]:
        if self.layers == "late" and given.get("use_sliding_window") not in (True, False, None):
            raise _refusal("use_sliding_window", "True or False", given["use_sliding_window"], origin)
        on = self.layers != "late" or given.get("use_sliding_window") is True
        types = None if self.layers == "all" else given.get("layer_types")
        if types is not None:
            kinds = ["full_attention", "sliding_attention"] if on else ["full_attention"]
            if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
                raise _refusal("layer_types", f"{layers} entries among {', '.join(kinds)}", types, origin)
            return [t == "sliding_attention" for t in types]
        if self.layers == "late":
            start = given.get("max_window_layers", 28)
            start = start if start == 0 else whole(start, f"max_window_layers (configuration of {origin})")
            return [on and i >= start for i in range(layers)]
        if self.layers == "thirds":
            every = whole(
                given.get("global_attn_every_n_layers", 3), f"global_attn_every_n_layers (configuration of {origin})"
            )
            return [i % every != 0 for i in range(layers)]
        return [self.layers == "all" or i % 2 == 0 for i in range(layers)]
