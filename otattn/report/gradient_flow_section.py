"""Gradient-flow structure: the variants of attention on random tokens, and the layer itself on its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from otattn.data import SampleLayer
from otattn.gradient_flow import check_gradient_flow, structure_table
from otattn.plotting import plot_structure_table
from otattn.report.section import Section, number

__all__ = ["gradient_flow_section"]

TOKENS = 12
"""Tokens of the layer's first window that are checked; the Jacobian has ``tokens * dimension`` columns."""


def gradient_flow_section(layer: SampleLayer, *, seed: int, advance: Any) -> Section:
    """The table of variants, and the defects of the layer's multi-head map."""
    variants = structure_table(dim=3, n=8, rng=seed)
    advance()
    data: dict[str, Any] = {"variants": variants.to_dict()}
    lines = [
        "Is attention a gradient flow? Defects are `|J - J^T| / |J + J^T|` of the matrix that must be symmetric: 0 where the "
        "structure holds, of order 0.1 to 1 where it fails. *field*: x -> Gamma_mu(x) is a gradient; *wasserstein*: "
        "F's velocity is the Wasserstein gradient of an energy; *twisted*: after multiplication by the softmax normaliser; "
        "*mobility*: by any positive function; *bures*: on covariances of centred Gaussians; *dissipation*: the energy "
        "balance along a short flow. Random tokens, A symmetric unless said otherwise.",
        "",
        *variants.to_markdown().splitlines(),
        "",
    ]
    attention = layer.attention
    if attention.in_dim == attention.out_dim:
        found = check_gradient_flow(attention, layer.tokens(0)[:TOKENS], rng=seed)
        data["layer"] = found.to_dict()
        shown = ", ".join(f"{name} {number(value, 2)}" for name, value in found.defects.items() if value is not None)
        lines += [f"This layer (all heads, {TOKENS} real tokens): {found.verdict}; defects: {shown}.", ""]
    else:
        lines += ["This layer maps to another dimension than its own: it has no flow.", ""]
    advance()
    return Section(
        "Gradient-flow structure", lines, data, {"gradient_flow.png": partial(plot_structure_table, variants)}
    )
