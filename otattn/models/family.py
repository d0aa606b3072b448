"""The table of an architecture: which tensor is what, what each configuration key does; and its check against a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.checkpoint import Checkpoint
from otattn.models.keys import Keys

__all__ = ["Buffer", "Family", "Layout"]

MAX_LAYERS = 4096
_COMMON = frozenset({"model", "module", "base_model", "auto_model", "backbone", "encoder", "decoder", "transformer"})
"""Words before the names of tensors that say nothing about the architecture; numbers are such, too."""
_OLD = {"weight": "gamma", "bias": "beta"}
Buffer = Callable[[NDArray[np.float64], Mapping[str, Any]], str | None]
"""Of the values of a buffer and of the model's numbers: what it must hold, when it does not."""


@dataclass(frozen=True)
class Family:
    """An architecture in one table. Sides of shapes are letters, each the same number wherever it stands.

    Attributes
    ----------
    name, title : str
        As in ``model_type``, and for messages.
    embeddings : dict of (str, str)
        Use -> name and shape of a table of vectors; the rows of "words" are the vocabulary.
    norms, layer_norms : dict of str
        Use -> name of a normalisation outside of and inside the layers.
    layer : str
        What stands before the names in layer ``{i}``.
    linear : dict of (str, str)
        Use -> name and shape of a linear map in a layer. "fused": queries, keys and values in one.
    biases : {"all", "any"}
        Each linear map has a bias, or may have one.
    norm_bias : bool
        Normalisations have a bias (LayerNorm; RMSNorm has none).
    transposed : bool
        Linear maps are stored as ``y = x W + b``.
    pre_norm, causal : bool
    keys : Keys
    buffers, layer_buffers : dict of Buffer
        Tensors that hold no weights, and what they must hold.
    unused : tuple of str
        Regular expressions of tensors after the last layer, which no hidden state depends on.
    rotary : str or None
        The layout of rotary positions.
    """

    name: str
    title: str
    embeddings: Mapping[str, tuple[str, str]]
    norms: Mapping[str, str]
    layer: str
    linear: Mapping[str, tuple[str, str]]
    layer_norms: Mapping[str, str]
    biases: str
    norm_bias: bool
    transposed: bool
    pre_norm: bool
    causal: bool
    keys: Keys
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    layer_buffers: Mapping[str, Buffer] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    rotary: str | None = None
    doubt: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None] = lambda given, facts: None
    """Of the configuration and the numbers of the tensors: why it is another architecture all the same."""

    def fit(self, checkpoint: Checkpoint) -> Layout:
        """Every tensor of the checkpoint is given its use, or named in a ValueError."""
        prefix = self._prefix(checkpoint)
        stem, _, rest = (re.escape(part) for part in self.layer.partition("{i}"))
        inside = re.compile(f"{stem}(0|[1-9][0-9]{{0,5}}){rest}(.+)", re.DOTALL)
        layers: dict[int, set[str]] = {}
        strange = []
        for name in checkpoint.shapes:
            own = name.removeprefix(prefix) if name.startswith(prefix) else None
            found = None if own is None else inside.fullmatch(own)
            if found is not None:
                layers.setdefault(int(found[1]), set()).add(found[2])
                known = self._known(found[2], self.linear, self.layer_norms, self.layer_buffers)
            else:
                known = own is not None and self._known(own, self.embeddings, self.norms, self.buffers)
                known = known or any(re.fullmatch(p, n) for p in self.unused for n in (name, own) if n is not None)
            if not known:
                strange.append(name)
        if strange:
            raise ValueError(
                f"{checkpoint.origin} must hold tensors of a {self.title} model only, received {strange[0]!r}"
                f"{f' and {len(strange) - 1} others ({strange[-1]!r}, ...)' if len(strange) > 1 else ''}, whose use is not "
                "known here; merge adapters and quantised weights first, or leave out what the hidden states do not depend on."
            )
        count = max(layers, default=-1) + 1
        missing = [i for i in range(min(count, MAX_LAYERS)) if i not in layers]
        if not layers or missing or count > MAX_LAYERS:
            what = f"no layer {missing[0]} of {count}" if missing else f"{count} layers"
            raise ValueError(
                f"{checkpoint.origin} must hold at least one layer, at most {MAX_LAYERS}, and none missing in between, "
                f"received {what} ({prefix}{self.layer.format(i=missing[0] if missing else 0)}*)."
            )
        return Layout(self, checkpoint, prefix, count)

    def _prefix(self, checkpoint: Checkpoint) -> str:
        """What stands before the names."""
        anchor = f"{self.embeddings['words'][0]}.weight"
        found = [n[: -len(anchor)] for n in checkpoint.shapes if n.endswith(anchor)]
        found = [p for p in found if p == "" or p.endswith(".")]
        if len(found) != 1:
            raise ValueError(
                f"{checkpoint.origin} must hold one tensor whose name ends with {anchor!r}, received {len(found)} such names "
                f"among {len(checkpoint.shapes)}; is it a checkpoint of this architecture ({self.title})?"
            )
        words = [w for w in found[0].split(".") if w]
        strange = [w for w in words if not (w in _COMMON or w == self.name or w.isdigit())]
        if strange:
            raise ValueError(
                f"{checkpoint.origin} must be a {self.title} model, received tensors named {found[0]}*; {strange[0]!r} is "
                "another architecture, or rename them without it."
            )
        return found[0]

    def _known(
        self, name: str, maps: Mapping[str, tuple[str, str]], norms: Mapping[str, str], buffers: Mapping[str, Buffer]
    ) -> bool:
        stem, _, last = name.rpartition(".")
        if name in buffers:
            return True
        if stem in {n for n, _ in maps.values()}:
            return last == "weight" or (last == "bias" and maps is self.linear)
        kinds = ("weight", "bias") if self.norm_bias else ("weight",)
        return stem in norms.values() and last in (*kinds, *(_OLD[k] for k in kinds if self.norm_bias))


class Layout:
    """A family fitted to a checkpoint: full names by use, and the numbers that the shapes tell.

    Attributes
    ----------
    prefix : str
    facts : dict
        ``layers``, ``vocab``, ``positions``, ``types``, and the sides of the shapes by their letters.
    """

    def __init__(self, family: Family, checkpoint: Checkpoint, prefix: str, layers: int) -> None:
        self.family, self.checkpoint, self.prefix = family, checkpoint, prefix
        self.facts: dict[str, Any] = {"layers": layers}
        for name, shape in family.embeddings.values():
            self._shape(f"{prefix}{name}.weight", shape)
        for i in range(layers):
            for use, (_, shape) in family.linear.items():
                self._linear(i, use, shape)
        names = [prefix + n for n in family.norms.values()]
        names += [f"{self.stem(i)}{n}" for i in range(layers) for n in family.layer_norms.values()]
        for name in names:
            for full in self.norm(name):
                self._shape(full, "d")
        if family.biases == "any":
            for part, uses in (("attention", ("query", "key", "value", "output")), ("mlp", ("gate", "up", "down"))):
                self.facts[f"{part}_biases"] = {self.bias(i, use) is not None for i in range(layers) for use in uses}

    def stem(self, index: int) -> str:
        """What stands before the names of a layer."""
        return self.prefix + self.family.layer.format(i=index)

    def weight(self, index: int, use: str) -> str:
        return f"{self.stem(index)}{self.family.linear[use][0]}.weight"

    def bias(self, index: int, use: str) -> str | None:
        """The name of a bias, where there is one."""
        name = f"{self.stem(index)}{self.family.linear[use][0]}.bias"
        return name if name in self.checkpoint else None

    def norm(self, name: str) -> tuple[str, ...]:
        """Names of gain and bias; old checkpoints say gamma and beta."""
        out = []
        for kind in ("weight", "bias") if self.family.norm_bias else ("weight",):
            both = [n for n in (f"{name}.{kind}", f"{name}.{_OLD[kind]}") if n in self.checkpoint]
            if len(both) > 1:
                raise ValueError(f"{self.checkpoint.origin} must hold {both[0]} or {both[1]}, received both.")
            out.append(both[0] if both else f"{name}.{kind}")
        return tuple(out)

    def _linear(self, index: int, use: str, shape: str) -> None:
        sides = shape.split()
        self._shape(self.weight(index, use), shape)
        bias = self.bias(index, use)
        if bias is not None or self.family.biases == "all":
            name = f"{self.stem(index)}{self.family.linear[use][0]}.bias"
            self._shape(name, sides[-1] if self.family.transposed else sides[0])

    def _shape(self, name: str, shape: str) -> None:
        """The tensor is there, and its sides are what the same letters are elsewhere."""
        have = self.checkpoint.shapes.get(name)
        if have is None:
            some = ", ".join(sorted(self.checkpoint.shapes)[:4])
            raise ValueError(
                f"{self.checkpoint.origin} must hold the tensor {name!r}, received {len(self.checkpoint.shapes)} others "
                f"({some}, ...); is it a whole {self.family.title} model?"
            )
        sides = shape.split()
        for side, size in zip(sides, have, strict=False):
            if not side[0].isdigit():
                self.facts.setdefault(side, size)
        # "3d" is three times d
        wanted = tuple(int(s[0]) * self.facts[s[1:]] if s[0].isdigit() else self.facts.get(s) for s in sides)
        if have != wanted or 0 in have:
            raise ValueError(
                f"{name} in {self.checkpoint.origin} must have shape {wanted} ({' by '.join(sides)}), received {have}; it "
                "does not fit the other tensors."
            )
