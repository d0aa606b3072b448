"""The whole network, layer by layer: what composing does, against the product of the layers' constants."""

from __future__ import annotations

from functools import partial
from typing import Any

from numpy.typing import ArrayLike

from otattn.data import SampleLayer
from otattn.lipschitz.local.depth import depth_profile
from otattn.models.transformer import Transformer
from otattn.plotting import plot_depth
from otattn.report.section import Section, number, table

__all__ = ["network_section"]


def network_section(
    layer: SampleLayer, *, network: tuple[Transformer, ArrayLike], seed: int, advance: Any
) -> Section:  # layer: as all sections have it
    """Norms of the derivative of the first 1, 2, ... layers at the tokens, and of each layer at what enters it."""
    model, ids = network
    profile = depth_profile(model, ids, partial=False, rng=seed)
    rows = profile.rows()
    columns = ("stage", "block", "composed", "error_bar", "product", "product_over_composed")
    header = ["layer", "layer alone", "composed so far", "error bar", "product so far", "product / composed"]
    lines = [
        f"Local W_2 Lipschitz constants of the layers of {model.checkpoint.origin} at {profile.mu.n} tokens, whole layers with "
        "residual, normalisation and perceptron: each alone at what enters it, composed up to it, and the product of those "
        "alone, which is what one gets by multiplying constants.",
        "",
        *table(header, [[row["stage"], *(number(row[name]) for name in columns[1:])] for row in rows]),
    ]
    data = {
        "tokens": profile.mu.n,
        **{name: [row[name] for row in rows] for name in columns},
    }
    advance()
    return Section("The network", lines, data, {"network.png": partial(plot_depth, profile)})
