"""What a checkpoint holds: its family, its tensors, what is missing or has no place, and why it cannot be opened."""

from __future__ import annotations

import math
import re
from typing import Any

from otattn.models.checkpoint import Checkpoint
from otattn.models.config import read_config
from otattn.models.family import Family
from otattn.models.load import family_of, load_model, open_checkpoint
from otattn.models.text import model_path

__all__ = ["contents_of", "contents_text"]

SHOWN = 5
"""Names of tensors in a line of text; the data have all of them."""


def contents_of(path: Any) -> dict[str, Any]:
    """The contents of a checkpoint, of the folder of one, or of an installed package that holds one.

    Keys: ``origin``, ``tensors`` and ``numbers`` (how many), ``family`` (None when it is not known), ``missing`` and ``strange``
    (tensors of the family that are not there, and others), ``unused`` (no hidden state depends on them), ``model`` (its numbers,
    and the kind of map of its first layer's attention), ``problem`` (why it cannot be opened, else None).
    """
    checkpoint = open_checkpoint(model_path(path))
    shapes = checkpoint.shapes
    out: dict[str, Any] = {"origin": checkpoint.origin, "tensors": len(shapes), "family": None}
    out["numbers"] = sum(math.prod(shape) for shape in shapes.values())
    out |= {"missing": [], "strange": [], "unused": [], "model": None, "problem": None}
    try:
        given = read_config(checkpoint, None)
        family = family_of(checkpoint, given)
        out["family"] = given.get("model_type") or family.name
        out |= _tensors(checkpoint, family)
        model = load_model(checkpoint)
        c = model.config
        out["model"] = {
            **{"layers": c.num_layers, "heads": c.num_heads, "kv_heads": c.num_kv_heads, "dim": c.dim},
            **{"vocabulary": c.vocab_size, "longest_text": c.max_length, "attention": model.layers[0].attention.kind},
        }
    except ValueError as exc:
        out["problem"] = str(exc)
    return out


def _tensors(checkpoint: Checkpoint, family: Family) -> dict[str, list[str]]:
    """Names that are missing, that have no place, and that are not used."""
    prefix = family.prefix(checkpoint)
    layers, strange = family.sort(checkpoint, prefix)
    unused = [
        name for name in checkpoint.shapes if any(re.fullmatch(p, name.removeprefix(prefix)) for p in family.unused)
    ]
    return {
        "missing": family.missing(checkpoint, prefix, max(layers, default=0) + 1),
        "strange": strange,
        "unused": unused,
    }


def contents_text(data: dict[str, Any]) -> list[str]:
    """The lines that the command line prints."""
    lines = [
        f"{data['origin']}: {data['tensors']} tensors, {data['numbers']:,} numbers",
        f"family: {data['family'] or 'unknown'}",
    ]
    if data["model"] is not None:
        lines.append(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in data["model"].items()))
    for name, title in (("missing", "missing"), ("strange", "without a place"), ("unused", "not used by the layers")):
        found = data[name]
        rest = f", and {len(found) - SHOWN} others" if len(found) > SHOWN else ""
        lines.append(f"{title}: {', '.join(found[:SHOWN]) + rest if found else 'none'}")
    lines.append("opens: yes" if data["problem"] is None else f"opens: no, {data['problem']}")
    return lines
