"""The depth profile that the command line asks for: a model, a text or token indices."""

from __future__ import annotations

from typing import Any

from otattn.lipschitz.local.depth import DepthProfile, depth_profile
from otattn.models import read_text
from otattn.report.opened import open_model, refuse, text_of, windows_of

__all__ = ["profile_of"]


def profile_of(options: Any, *, progress: bool) -> DepthProfile:
    """The profile of ``options``: model, text or tokens, other, n, layers, composed, splitting, heads, seed."""
    refuse(
        options, "layer", "head", because="must be left out: depth goes through whole layers, --layers tells how many"
    )
    model = open_model(options)
    if options.layers is not None and options.layers > model.num_layers:
        raise ValueError(f"--layers must be at most {model.num_layers}, received {options.layers}.")
    if not model.layout.family.embeddings:
        raise ValueError(
            f"{model.checkpoint.origin} reads images: depth takes texts; call otattn.depth_profile in Python."
        )
    ids = windows_of(model, options, length=options.n)[0]
    return depth_profile(
        model,
        ids,
        last=options.layers,
        partial=not options.composed,
        other=None if options.other is None else text_of(model, read_text(options.other), len(ids))[0],
        splitting=options.splitting,
        rng=options.seed,
        progress=progress,
    )
