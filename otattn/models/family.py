"""The table of an architecture: which tensor is what, what each configuration key does; and its check against a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.checkpoint import Checkpoint
from otattn.models.keys import Keys
from otattn.models.positions import RopeKeys, Windows

__all__ = ["Buffer", "Family", "Layout", "linear", "side_size"]

MAX_LAYERS = 4096
_COMMON = frozenset({"model", "module", "base_model", "auto_model", "backbone", "encoder", "decoder", "transformer"})
"""Words before the names of tensors that say nothing about the architecture; numbers are such, too."""
_OLD = {"weight": "gamma", "bias": "beta"}
_ATTENTION, _MLP = ("query", "key", "value", "output", "fused", "by_head"), ("gate", "up", "down", "gate_up")
_GROUPS = {"attention": _ATTENTION, "mlp": _MLP, "qkv": ("query", "key", "value"), "linear": _ATTENTION + _MLP}
"""Parts of a layer whose biases a configuration switches on and off together."""
Buffer = Callable[[NDArray[np.float64], Mapping[str, Any]], str | None]
"""Of the values of a buffer and of the model's numbers: what it must hold, when it does not."""
Names = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Family:
    """An architecture in one table. Sides of shapes are letters, each the same number wherever it stands.

    Attributes
    ----------
    name, title : str
        As in ``model_type``, and for messages.
    keys : Keys
    layer : str
        What stands before the names in layer ``{i}``.
    linear : dict of (str, str)
        Use -> name and shape of a linear map in a layer. "fused": queries, keys and values in one, "by_head": the same head by
        head, "gate_up": gate and up in one.
    layer_norms, norms : dict of str
        Use -> name of a normalisation inside and outside of the layers: "first" and "second" before (or after, see ``order``)
        attention and MLP, "after_first" and "after_second" on what they add; "embedding", "final".
    embeddings : dict of (str, str)
        Use -> name and shape of a table of vectors; the rows of "words" are the vocabulary.
    arrays, layer_arrays : dict of (str, str)
        Use -> whole name and shape of any other tensor.
    optional : dict of (str, str)
        Arrays outside of the layers that are there together or not at all; needed when sides of the first differ.
    aliases : tuple of str
        Other values of ``model_type``.
    prefixes : tuple of str
        Words that may stand before the names, besides those that say nothing.
    biases : str
        "all": each linear map has one; "any": may have one; else the uses that have one.
    norm : {"layer", "bare", "rms", "shifted"}
        LayerNorm, LayerNorm without bias, RMSNorm, RMSNorm whose gain is one more than the tensor.
    order : {"post", "pre", "parallel"}
        Normalisation after attention and MLP, before them, or before both, side by side.
    transposed, causal : bool
        Linear maps are stored as ``y = x W + b``; the mask.
    buffers, layer_buffers : dict of Buffer
        Tensors that hold no weights, and what they must hold.
    unused : tuple of str
        Regular expressions of tensors that no hidden state depends on.
    tied : tuple of str
        Copies of the table of words, whole names.
    rotary, local_rotary : RopeKeys or None
        Rotary positions, and those of layers with a window where they have their own.
    divisors : str or None
        The tensor of numbers, one a pair, by which the rotary frequencies are divided, in models that have it.
    windows : Windows or None
    first_position : int or None
        The row of the first token's position; None: the one after the padding token's, counted over tokens that are not padding.
    counted : bool
        Positions count the tokens that are not padding.
    scaled_words : bool
        Words are multiplied by the square root of the dimension.
    plain_first : bool
        Layer 0 has no "first" normalisation.
    doubt : function
        Of the configuration and the numbers of the tensors: why it is another architecture all the same.
    """

    name: str
    title: str
    keys: Keys
    layer: str
    linear: Names
    layer_norms: Mapping[str, str]
    norms: Mapping[str, str]
    embeddings: Names = field(default_factory=dict)
    arrays: Names = field(default_factory=dict)
    layer_arrays: Names = field(default_factory=dict)
    optional: Names = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    biases: str = "all"
    norm: str = "layer"
    order: str = "pre"
    transposed: bool = False
    causal: bool = True
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    layer_buffers: Mapping[str, Buffer] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    rotary: RopeKeys | None = None
    local_rotary: RopeKeys | None = None
    divisors: str | None = None
    windows: Windows | None = None
    first_position: int | None = 0
    counted: bool = False
    scaled_words: bool = False
    plain_first: bool = False
    doubt: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None] = lambda given, facts: None

    @property
    def model_types(self) -> tuple[str, ...]:
        """The values of ``model_type`` that mean this family."""
        return (self.name, *self.aliases)

    @property
    def anchor(self) -> str:
        """The tensor whose name tells what stands before all names."""
        return f"{self.embeddings['words'][0]}.weight" if self.embeddings else next(iter(self.arrays.values()))[0]

    def tensors(self, layers: int) -> Iterator[tuple[str, str, str]]:
        """Name, shape and kind of each tensor: "weight", "gain", "bias", and "maybe" for a bias that may be absent."""
        yield from ((f"{name}.weight", shape, "weight") for name, shape in self.embeddings.values())
        yield from ((name, shape, "weight") for name, shape in self.arrays.values())
        for i in range(layers):
            stem = self.layer.format(i=i)
            for use, (name, shape) in self.linear.items():
                yield f"{stem}{name}.weight", shape, "weight"
                if self.may_have_bias(use):
                    side = shape.split()[-1 if self.transposed else 0]
                    yield f"{stem}{name}.bias", side, "bias" if self.must_have_bias(use) else "maybe"
            for use, (name, shape) in self.layer_arrays.items():
                yield stem + name, shape, "gain" if use.endswith("_norm") else "weight"
            for use, name in self.layer_norms.items():
                if not (self.plain_first and i == 0 and use == "first"):
                    yield from self._norm(stem + name, "d")
        inner = self.embeddings["words"][1].split()[1] if self.embeddings else "d"
        for use, name in self.norms.items():
            yield from self._norm(name, inner if use == "embedding" else "d")

    def _norm(self, name: str, side: str) -> Iterator[tuple[str, str, str]]:
        yield f"{name}.weight", side, "gain"
        if self.norm == "layer":
            yield f"{name}.bias", side, "bias"

    def prefix(self, checkpoint: Checkpoint) -> str:
        """What stands before the names; a ValueError when it does not fit the family."""
        found = [n[: -len(self.anchor)] for n in checkpoint.shapes if n.endswith(self.anchor)]
        found = [p for p in found if p == "" or p.endswith(".")]
        if len(found) != 1:
            raise ValueError(
                f"{checkpoint.origin} must hold one tensor whose name ends with {self.anchor!r}, received {len(found)} such names "
                f"among {len(checkpoint.shapes)}; is it a checkpoint of this architecture ({self.title})?"
            )
        words = [w for w in found[0].split(".") if w]
        own = (*self.model_types, *self.prefixes)
        strange = [w for w in words if not (w in _COMMON or w in own or w.isdigit())]
        if strange:
            raise ValueError(
                f"{checkpoint.origin} must be a {self.title} model, received tensors named {found[0]}*; {strange[0]!r} is "
                "another architecture, or rename them without it."
            )
        return found[0]

    def sort(self, checkpoint: Checkpoint, prefix: str) -> tuple[set[int], list[str]]:
        """The numbers of the layers, and the tensors that have no place in the table."""
        stem, _, rest = (re.escape(part) for part in self.layer.partition("{i}"))
        inside = re.compile(f"{stem}(0|[1-9][0-9]{{0,5}}){rest}(.+)", re.DOTALL)
        arrays = (*self.arrays.values(), *self.optional.values())
        whole = {*(name for name, _ in arrays), *self.tied, *self.buffers, self.divisors}
        layers: set[int] = set()
        strange = []
        for name in checkpoint.shapes:
            own = name.removeprefix(prefix) if name.startswith(prefix) else None
            found = None if own is None else inside.fullmatch(own)
            known = own in whole
            if found is not None:
                layers.add(int(found[1]))
                known = known or self._known_inside(int(found[1]), found[2])
            elif not known:
                known = own is not None and self._known(own, self.embeddings, self.norms)
                known = known or any(re.fullmatch(p, n) for p in self.unused for n in (name, own) if n is not None)
            if not known:
                strange.append(name)
        return layers, strange

    def missing(self, checkpoint: Checkpoint, prefix: str, layers: int) -> list[str]:
        """The tensors of a whole model with so many layers that are not there."""
        wanted = ((prefix + name, kind) for name, _, kind in self.tensors(layers) if kind != "maybe")
        return [name for name, _ in wanted if name not in checkpoint and _old_name(name) not in checkpoint]

    def fit(self, checkpoint: Checkpoint) -> Layout:
        """Every tensor of the checkpoint is given its use, or named in a ValueError."""
        prefix = self.prefix(checkpoint)
        layers, strange = self.sort(checkpoint, prefix)
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

    def _known_inside(self, index: int, name: str) -> bool:
        if self.plain_first and index == 0 and name.startswith(self.layer_norms["first"] + "."):
            return False
        exact = name in self.layer_buffers or any(name == own for own, _ in self.layer_arrays.values())
        return exact or self._known(name, self.linear, self.layer_norms)

    def _known(self, name: str, maps: Names, norms: Mapping[str, str]) -> bool:
        stem, _, last = name.rpartition(".")
        uses = [use for use, (n, _) in maps.items() if n == stem]
        if uses:
            return last == "weight" or (last == "bias" and self.may_have_bias(uses[0]))
        kinds = ("weight", "bias") if self.norm == "layer" else ("weight",)
        return stem in norms.values() and last in (*kinds, *(_OLD[k] for k in kinds if self.norm == "layer"))

    def may_have_bias(self, use: str) -> bool:
        """Whether a bias of this linear map has a place."""
        return use in self.linear and (self.biases == "any" or self.must_have_bias(use))

    def must_have_bias(self, use: str) -> bool:
        """Whether this linear map has a bias in every model of the family."""
        return self.biases == "all" or use in self.biases.split()


def linear(names: str, *, free: bool = False) -> dict[str, tuple[str, str]]:
    """The linear maps of a layer by their names: query, key, value, output, up, down, and gate where there is one.

    ``free``: heads need not fill the dimension.
    """
    shapes = ("q d", "k d", "v d", "d o") if free else ("d d",) * 4
    uses = ("query", "key", "value", "output", "up", "down", "gate")
    return dict(zip(uses, zip(names.split(), (*shapes, "h d", "d h", "h d"), strict=False), strict=False))


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
        first = sum(use in family.arrays for use in ("class", "distillation"))
        self.facts: dict[str, Any] = {"layers": layers, "firsts": first}
        for name, shape, kind in family.tensors(layers):
            full = self._spelt(prefix + name)
            if kind != "maybe" or full in checkpoint:
                self._shape(full, shape)
        self._optional()
        self.facts["biases"] = {
            part: {self.bias(i, use) is not None for i in range(layers) for use in uses if use in family.linear}
            for part, uses in _GROUPS.items()
        }

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
        kinds = ("weight", "bias") if self.family.norm == "layer" else ("weight",)
        return tuple(self._spelt(f"{name}.{kind}") for kind in kinds)

    def _spelt(self, name: str) -> str:
        """The name in this checkpoint."""
        old = _old_name(name)
        if old == name or old not in self.checkpoint:
            return name
        if name in self.checkpoint:
            raise ValueError(f"{self.checkpoint.origin} must hold {name} or {old}, received both.")
        return old

    def _optional(self) -> None:
        names = [(self.prefix + name, shape) for name, shape in self.family.optional.values()]
        sides = {side_size(side, self.facts) for _, shape in names[:1] for side in shape.split()}
        if len(sides) > 1 or any(name in self.checkpoint for name, _ in names):
            for name, shape in names:
                self._shape(name, shape)

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
        wanted = tuple(side_size(side, self.facts) for side in sides)
        if have != wanted or 0 in have:
            raise ValueError(
                f"{name} in {self.checkpoint.origin} must have shape {wanted} ({' by '.join(sides)}), received {have}; it "
                "does not fit the other tensors."
            )


def _old_name(name: str) -> str:
    """As old checkpoints spell gain and bias of a normalisation."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}.{_OLD.get(kind, kind)}"


def side_size(side: str, facts: Mapping[str, Any]) -> int | None:
    """A side of a shape as a number: "1", "d", or "3d", three times d; None when it is not known yet.

    Examples
    --------
    >>> side_size("3d", {"d": 4}), side_size("1", {}), side_size("h", {})
    (12, 1, None)
    """
    letters = side.lstrip("0123456789")
    known = facts.get(letters) if letters else 1
    return None if known is None else int(side.removesuffix(letters) or 1) * int(known)
