"""A constant with its meaning: which side it bounds, of which map, where, by which theorem, with which proof of work."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Literal

from numpy.linalg import LinAlgError

from otattn._tabular import Result, plain
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.rounding import ROUNDING, log
from otattn.lipschitz.containment import domain_contains, same
from otattn.lipschitz.theorem import THEOREMS, Quantity, prove

Kind = Literal["lower", "upper", "local", "estimate"]


_NORMAL = 1e-300
"""Values from here on have a logarithm of their own, whatever was given."""


@dataclass(frozen=True, eq=False)
class Bound(Result):
    """A Lipschitz or stability constant and what it stands for.

    The statement of an upper bound is ``(attention, domain, n, p, quantity)``: the value bounds that quantity of that map.

    Attributes
    ----------
    value : float
        The constant, in ``[0, inf]``.
    kind : {"lower", "upper", "local", "estimate"}
        "lower" is witnessed, "upper" is proved, "local" belongs to one measure, "estimate" is statistical.
    p : float
        Order of the Wasserstein distance.
    reference : str
        Paper and theorem, or what stands behind a value without one; by default that of the catalogue.
    domain : object
        The token domain or the measure that the constant belongs to.
    n : int or None
        Number of tokens; None for the mean-field constant (any measure).
    witness : object
        The measure that attains a lower bound, or the certificate of an upper one.
    details : dict
        Intermediate quantities by name.
    attention : AttentionMap or None
        The map.
    theorem : str
        Key of the theorem that proves the value, "" when there is none.
    quantity : str
        What is bounded, "lipschitz" unless the function says otherwise.
    log_value : float
        The natural logarithm of the value, also of one beyond the largest or below the smallest float.
    """

    value: float
    kind: Kind
    reference: str = ""
    p: float = 2.0
    domain: Any = None
    n: int | None = None
    witness: Any = None
    details: dict[str, Any] = field(default_factory=dict)
    attention: Any = None
    theorem: str = ""
    quantity: Quantity = "lipschitz"
    log_value: float = math.nan

    def __post_init__(self) -> None:
        if self.theorem in THEOREMS and not self.reference:
            object.__setattr__(self, "reference", THEOREMS[self.theorem].reference)
        if math.isnan(self.log_value) or _NORMAL <= self.value < math.inf:
            object.__setattr__(self, "log_value", log(self.value))

    def __float__(self) -> float:
        return float(self.value)

    def covers(
        self, attention: Any, *, domain: Any, n: int | None, p: float = 2.0, quantity: Quantity = "lipschitz"
    ) -> str | None:
        """Why this upper bound does not bound that constant of that map; None when it does.

        A bound for any measure covers n tokens, and one on a domain covers the domains inside it.
        """
        if self.kind != "upper":
            return f"it is a {self.kind} bound"
        if self.quantity != quantity:
            return f"it bounds {self.quantity!r}, not {quantity!r}"
        if not same(self.attention, attention):
            return "it belongs to another attention map"
        if self.p != p:
            return f"it holds for p = {self.p:g}, not {p:g}"
        if self.n is not None and self.n != n:
            return f"it holds for n = {self.n}, not {'any measure' if n is None else n}"
        return domain_contains(self.domain, domain)

    def verify(
        self,
        attention: Any = None,
        *,
        domain: Any = None,
        n: int | EllipsisType | None = ...,
        p: float | None = None,
        rigorous: bool = False,
    ) -> bool:
        """True when the value is proved again, from the statement alone.

        Parameters
        ----------
        attention : AttentionMap, optional
            The caller's own statement: the map, ``domain``, ``n`` and ``p``. What is left out is taken from the bound; the answer
            is False when the bound does not cover it.
        domain : Domain, optional
        n : int or None, optional
            None is any measure.
        p : float, optional
        rigorous : bool
            False: in float64, with margins for rounding. True: with ball and interval arithmetic (extra ``proof``), which
            proves the value for the floats of the map and of the domain as exact numbers.

        Raises
        ------
        ValueError
            The bound has no theorem, or no rigorous evaluation exists for it.
        ImportError
            ``rigorous`` without python-flint.
        """
        if not self._provable:
            raise ValueError(
                f"verify needs an upper bound with a theorem, received kind {self.kind!r} and theorem {self.theorem!r}; "
                "a lower bound is checked by evaluating its witness."
            )
        if self.kind != "upper":
            return False
        if rigorous:
            self._check_exact()
        wanted = self.statement(attention, domain, n, p)
        if self.covers(wanted[0], domain=wanted[1], n=wanted[2], p=wanted[3], quantity=self.quantity) is not None:
            return False
        try:
            return self._proves(rigorous)
        except (CertificateError, LookupError, ArithmeticError, AttributeError, ValueError, TypeError, LinAlgError):
            return False  # the statement, or the multipliers, do not satisfy the theorem's hypotheses

    def statement(
        self, attention: Any = None, domain: Any = None, n: int | EllipsisType | None = ..., p: float | None = None
    ) -> tuple[Any, Any, int | None, float]:
        """``(attention, domain, n, p)``, with what is not given taken from the bound."""
        return (
            self.attention if attention is None else attention,
            self.domain if domain is None else domain,
            self.n if isinstance(n, EllipsisType) else n,
            self.p if p is None else float(p),
        )

    @property
    def _provable(self) -> bool:
        record = THEOREMS.get(self.theorem)
        return record is not None and record.closed and record.kind == "upper"

    @property
    def _has_exact(self) -> bool:
        return THEOREMS[self.theorem].rigorous

    def _check_exact(self) -> None:
        if not self._has_exact:
            raise ValueError(
                f"no rigorous evaluation is offered for {self.theorem!r}; verify() checks it in float64 with margins for "
                "rounding."
            )

    def _proves(self, rigorous: bool) -> bool:
        if math.isnan(self.value) or self.quantity != THEOREMS[self.theorem].quantity:
            return False  # whatever the theorem says, and that may take long
        new = prove(self.theorem, self.attention, self.domain, self.n, self.p, exact=rigorous)
        return self._at_least(new, 0.0 if rigorous else ROUNDING)

    def _at_least(self, new: Bound, slack: float) -> bool:
        """Whether the value, or its logarithm beyond the largest float, is at least the new one."""
        if self.value == math.inf:
            return self.log_value >= new.log_value - slack
        return bool(new.value <= self.value * (1.0 + slack))

    def rigorous_value(self) -> float:
        """The value that ball and interval arithmetic proves for the statement (extra ``proof``).

        Raises
        ------
        CertificateError
            Nothing is proved.
        """
        self._check_exact()
        return float(prove(self.theorem, self.attention, self.domain, self.n, self.p, exact=True).value)

    def to_dict(self) -> dict[str, Any]:
        """The plain numbers, ready for JSON."""
        found = {
            "value": self.value,
            "kind": self.kind,
            "p": self.p,
            "n": self.n,
            "theorem": self.theorem,
            "reference": self.reference,
            **({} if math.isfinite(self.value) else {"log_value": self.log_value}),
            **({} if self.quantity == "lipschitz" else {"quantity": self.quantity}),
            **{k: v for k, v in self.details.items() if isinstance(v, (int, float, str, bool))},
        }
        return dict(plain(found))

    def rows(self) -> list[dict[str, Any]]:
        """One record: which side, value, order, number of tokens (None: any measure), by which theorem."""
        return [{"bound": self.kind, "value": self.value, "p": self.p, "n": self.n, "by": self.name}]

    @property
    def name(self) -> str:
        """The key of the theorem, or what stands behind a value without one."""
        return self.theorem or self.reference

    def __repr__(self) -> str:
        tokens = "any measure" if self.n is None else f"n={self.n}"
        name = self.name if len(self.name) <= 120 else f"{self.name[:117]}..."
        return f"{type(self).__name__}({self.kind} {self.value:.6g}, p={self.p:g}, {tokens}, {name})"


def stated(bound: Bound, attention: Any) -> Bound:
    """The bound with the map that it is about."""
    return bound if bound.attention is attention else dataclasses.replace(bound, attention=attention)


@dataclass(frozen=True, eq=False)
class Enclosure(Result):
    """A witnessed lower and a proved upper bound of one constant.

    Raises
    ------
    CertificateError
        The lower bound exceeds the upper one: one of them is false, and a report is asked for.
    ValueError
        The bounds belong to different maps, domains, orders or numbers of tokens.
    """

    lower: Bound
    upper: Bound

    def __post_init__(self) -> None:
        low, high = self.lower, self.upper
        if low.kind != "lower" or high.kind != "upper":
            raise ValueError(f"an enclosure needs a lower and an upper bound, received {low.kind!r} and {high.kind!r}.")
        if low.attention is not None:
            reason = high.covers(low.attention, domain=low.domain, n=low.n, p=low.p)
            if reason is not None:
                raise ValueError(f"the upper bound must cover the constant of the lower one, but {reason}.")
        if not low.value <= high.value:
            raise CertificateError(
                f"the lower bound {low.value!r} ({low.name}) exceeds the upper bound {high.value!r} ({high.name}): one of "
                "them is false. Please report the attention map, the domain, n and p."
            )

    @property
    def ratio(self) -> float:
        """``upper / lower``; inf when the lower bound is 0 and the upper is not, 1 when both are 0."""
        if self.upper.value == self.lower.value:
            return 1.0
        return self.upper.value / self.lower.value if self.lower.value > 0 else float("inf")

    def rows(self) -> list[dict[str, Any]]:
        """One record: both values, their ratio, order, number of tokens (None: any measure), by what they are known."""
        low, high = self.lower, self.upper
        both = {"lower": low.value, "upper": high.value, "ratio": self.ratio}
        return [{**both, "p": high.p, "n": low.n, "upper_by": high.name, "lower_by": low.name}]

    def __repr__(self) -> str:
        return f"Enclosure([{self.lower.value:.6g}, {self.upper.value:.6g}], ratio={self.ratio:.4g})"
