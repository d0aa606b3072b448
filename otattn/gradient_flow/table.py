"""Every variant of attention by the gradient-flow structure that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array
from otattn._progress import watched
from otattn._tabular import Result
from otattn.attention import (
    AttentionMap,
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    ReLUAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.gradient_flow.report import GradientFlowReport
from otattn.gradient_flow.structure import check_gradient_flow

__all__ = ["StructureRow", "StructureTable", "structure_table"]

VARIANTS: dict[str, Callable[[Array, Array], AttentionMap]] = {
    "softmax": SoftmaxAttention,
    "L2": lambda A, V: L2Attention(A, np.eye(len(A)), V),
    "Sinkhorn": SinkhornAttention,
    "exponential": ExponentialAttention,
    "linear": LinearAttention,
    "ReLU": ReLUAttention,
    "sigmoid": SigmoidAttention,
    "masked softmax": lambda A, V: MaskedAttention(SoftmaxAttention(A, V)),
}
"""Built from a form A and values V; L2 attention has ``Q = A``, ``K = I``, so that ``Q^T K = A^T``."""


@dataclass(frozen=True, eq=False)
class StructureRow(Result):
    """One variant with one choice of parameters, and what the check found."""

    variant: str
    values: str
    report: GradientFlowReport

    def rows(self) -> list[dict[str, Any]]:
        """One record: variant, parameters, defects, verdict."""
        return [{"variant": self.variant, "parameters": self.values, **self.report.rows()[0]}]

    def to_dict(self) -> dict[str, Any]:
        """The names beside the numbers of the report."""
        return {"variant": self.variant, "values": self.values, **self.report.to_dict()}


@dataclass(frozen=True, eq=False)
class StructureTable(Result):
    """The defects of every variant.

    Attributes
    ----------
    entries : tuple of StructureRow
    dim, n : int
        Dimension and number of the random tokens.
    seed : int
    """

    entries: tuple[StructureRow, ...]
    dim: int
    n: int
    seed: int

    def report(self, variant: str, values: str) -> GradientFlowReport:
        """The report of one row.

        Raises
        ------
        KeyError
            No such row; the message lists the names.
        """
        for row in self.entries:
            if (row.variant, row.values) == (variant, values):
                return row.report
        raise KeyError(f"no row ({variant!r}, {values!r}); there are {[(r.variant, r.values) for r in self.entries]}.")

    def to_dict(self) -> dict[str, Any]:
        """The plain numbers, ready for JSON."""
        return {
            "dim": self.dim,
            "n": self.n,
            "seed": self.seed,
            "rows": [r.to_dict() for r in self.entries],
        }

    def to_markdown(self) -> str:
        """A table in markdown: defects, verdict and energy."""
        names = ("field", "wasserstein", "twisted", "mobility", "bures", "dissipation")
        head = ["variant", "parameters", *names, "verdict", "energy"]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in self.entries:
            r = row.report
            cells = ["-" if r.defects[name] is None else f"{r.defects[name]:.1e}" for name in names]
            energy = "-"
            if r.energy is not None and r.coefficient is not None:
                energy = f"{type(r.energy).__name__}, {'ascent' if r.coefficient > 0 else 'descent'}"
            lines.append("| " + " | ".join([row.variant, row.values, *cells, r.verdict, energy]) + " |")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, Any]]:
        """One record a variant: its defects and the verdict."""
        return [row for entry in self.entries for row in entry.rows()]

    def __repr__(self) -> str:
        return f"StructureTable({len(self.entries)} rows, dim={self.dim}, n={self.n}, seed={self.seed})"


def structure_table(
    *, dim: int = 3, n: int = 8, rng: np.random.Generator | int, scale: float = 1.0, progress: bool = False
) -> StructureTable:
    """Check every variant with symmetric A and ``V = A, -A, I``, with ``V = A^T`` for an A that is not
    symmetric, and L2 attention with tied queries and keys, on random tokens.

    Parameters
    ----------
    dim, n : int
        Dimension (at least 2: on a line every field is a gradient) and number (at least 3) of normal tokens.
    rng : Generator or int
    scale : float
        Size of A, whose entries are of the order ``scale / sqrt(dim)``.
    progress : bool
        Show a bar on the error stream.

    Returns
    -------
    StructureTable
        34 rows; about a second.

    Examples
    --------
    >>> table = structure_table(dim=2, n=4, rng=0)
    >>> table.report("Sinkhorn", "V = A").verdict, table.report("softmax", "V = A").verdict
    ('Wasserstein gradient flow', 'gradient flow with mobility 1/Z')
    >>> table.report("softmax", "V = I").verdict
    'no gradient structure'

    References
    ----------
    Sander, Ablin, Blondel, Peyré, "Sinkformers", AISTATS 2022, section 3; Castin, Ablin, Carrillo, Peyré, 2025.
    """
    check.count(dim, "dim", least=2)
    check.count(n, "n", least=3)
    check.positive(scale, "scale")
    seed = int(rng) if isinstance(rng, (int, np.integer)) else int(check.rng_from(rng).integers(2**62))
    generator = check.rng_from(seed)
    X = generator.standard_normal((n, dim))
    G = generator.standard_normal((dim, dim)) * (scale / np.sqrt(dim))
    A = (G + G.T) / np.sqrt(2.0)
    parameters = {
        "V = A": (A, A),
        "V = -A": (A, -A),
        "V = I": (A, np.eye(dim)),
        "V = A^T, A not symmetric": (G, G.T),
    }
    K = 0.5 * A  # tied tokens that are far apart see only themselves
    maps = [(v, p, build(*form)) for v, build in VARIANTS.items() for p, form in parameters.items()]
    maps += [
        ("L2, Q = K", "V = Q^T K", L2Attention(K, K, K.T @ K)),
        ("L2, Q = K", "V = I", L2Attention(K, K, np.eye(dim))),
    ]
    cases = watched(maps, "variants", progress=progress, note=lambda case: f"{case[0]}, {case[1]}", unit="variant")
    rows = (StructureRow(v, p, check_gradient_flow(attention, X, rng=seed)) for v, p, attention in cases)
    return StructureTable(tuple(rows), dim, n, seed)
