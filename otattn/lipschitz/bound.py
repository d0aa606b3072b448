"""A constant with its meaning: which side it bounds, of what, by which theorem, with which proof of work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from otattn._tabular import html_table

__all__ = ["Bound", "Enclosure", "Kind"]

Kind = Literal["lower", "upper", "local", "estimate"]


@dataclass(frozen=True, eq=False)
class Bound:
    """A Lipschitz or stability constant and what it stands for.

    Attributes
    ----------
    value : float
        The constant, in ``[0, inf]``.
    kind : {"lower", "upper", "local", "estimate"}
        "lower" is witnessed, "upper" is proved, "local" belongs to one measure, "estimate" is statistical.
    p : float
        Order of the Wasserstein distance.
    source : str
        Paper and theorem, or the name of our own proof.
    domain : object
        The token domain or the measure that the constant belongs to.
    n : int or None
        Number of tokens; None for the mean-field constant (any measure).
    witness : object
        The measure that attains a lower bound, or the certificate of an upper one.
    details : dict
        Intermediate quantities by name.
    """

    value: float
    kind: Kind
    source: str
    p: float = 2.0
    domain: Any = None
    n: int | None = None
    witness: Any = None
    details: dict[str, Any] = field(default_factory=dict)

    def __float__(self) -> float:
        return float(self.value)

    def to_dict(self) -> dict[str, Any]:
        """The plain numbers, ready for JSON."""
        plain = {k: v for k, v in self.details.items() if isinstance(v, (int, float, str, bool))}
        return {
            "value": self.value,
            "kind": self.kind,
            "p": self.p,
            "n": self.n,
            "source": self.source,
            **plain,
        }

    def _repr_html_(self) -> str:
        tokens = "any measure" if self.n is None else self.n
        row = {"bound": self.kind, "value": self.value, "p": self.p, "n": tokens, "source": self.source}
        return html_table([row])

    def __repr__(self) -> str:
        tokens = "any measure" if self.n is None else f"n={self.n}"
        return f"Bound({self.kind} {self.value:.6g}, p={self.p:g}, {tokens}, {self.source})"


@dataclass(frozen=True, eq=False)
class Enclosure:
    """A witnessed lower and a proved upper bound of one constant."""

    lower: Bound
    upper: Bound

    @property
    def ratio(self) -> float:
        """``upper / lower``; inf when the lower bound is 0 and the upper is not, 1 when both are 0."""
        if self.upper.value == self.lower.value:
            return 1.0
        return self.upper.value / self.lower.value if self.lower.value > 0 else float("inf")

    def _repr_html_(self) -> str:
        row = {
            "lower": self.lower.value,
            "upper": self.upper.value,
            "upper / lower": self.ratio,
            "p": self.upper.p,
            "n": "any measure" if self.upper.n is None and self.lower.n is None else self.lower.n,
            "upper bound by": self.upper.source,
        }
        return html_table([row])

    def __repr__(self) -> str:
        return f"Enclosure([{self.lower.value:.6g}, {self.upper.value:.6g}], ratio={self.ratio:.4g})"
