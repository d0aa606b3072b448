"""What is known about the gradient-flow structure of one attention map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn._tabular import Result, plain
from otattn.attention import AttentionMap
from otattn.attention.base import Measure
from otattn.gradient_flow.asymmetry import Asymmetry
from otattn.gradient_flow.dissipation import EnergyDissipation
from otattn.gradient_flow.energy import Energy
from otattn.gradient_flow.gaussian_energies import GaussianEnergy

__all__ = ["VERDICTS", "GradientFlowReport", "verdict_of"]

VERDICTS = (
    "Wasserstein gradient flow",
    "gradient flow with mobility 1/Z",
    "gradient flow on centred Gaussians",
    "gradient field of each measure",
    "no gradient structure",
)
"""The verdicts, from the strongest structure to none; the first whose defect is below the tolerance is given."""


@dataclass(frozen=True, eq=False)
class GradientFlowReport(Result):
    """Defects from gradient structure; 0 where it holds, of order 0.1 to 1 where it fails.

    Every defect is ``|J - J^T|_F / |J + J^T|_F`` of the matrix that has to be symmetric, the largest over ``mu`` and
    the displaced clouds. A small defect at these measures is a necessary condition; a large one is a proof (up to
    rounding) that there is no such structure.

    Attributes
    ----------
    field_defect : float
        Is ``x -> Gamma_mu(x)`` a gradient, for the given measure: ``D_x Gamma_mu`` at the atoms and between them.
    wasserstein_defect : float
        Is ``Gamma_mu`` the Wasserstein gradient of an energy: ``W^{1/2} D_X f W^{-1/2}``.
    twisted_defect : float or None
        Is ``Z_mu Gamma_mu`` one: softmax and L2 attention, masked or not; None for maps without one normaliser.
    mobility_defect : float or None
        Is ``M_mu Gamma_mu`` one for any positive M (a necessary condition); None where it is not tested.
    bures_defect : float or None
        Is the flow of covariances of centred Gaussians a Bures-Wasserstein gradient flow; None for maps that do
        not keep Gaussians Gaussian.
    dissipation_defect : float or None
        Relative error of the energy balance along a short flow; None without a known energy.
    energy, coefficient : Energy or None, float or None
        ``Gamma_mu = c M_mu grad phi_mu``; the flow climbs for ``c > 0``, descends for ``c < 0``.
    gaussian_energy, gaussian_coefficient
        The same for covariances.
    verdict : str
        One of ``VERDICTS``.
    tol : float
        Defects up to it count as zero: 1e-6 as given, raised to the rounding of huge logits and to 100 times the
        tolerance of an iterative kernel.
    errors : dict
        Standard error of each defect that was estimated by probes.
    dissipation : EnergyDissipation or None
        The short flow.
    attention : AttentionMap
    mu : measure
    seed : int
        Of the probes and the displaced clouds.
    settings : dict
        The options of the check.
    """

    field_defect: float
    wasserstein_defect: float
    twisted_defect: float | None
    mobility_defect: float | None
    bures_defect: float | None
    dissipation_defect: float | None
    energy: Energy | None
    coefficient: float | None
    gaussian_energy: GaussianEnergy | None
    gaussian_coefficient: float | None
    verdict: str
    tol: float
    errors: dict[str, float]
    dissipation: EnergyDissipation | None
    attention: AttentionMap
    mu: Measure
    seed: int
    settings: dict[str, Any]

    @property
    def defects(self) -> dict[str, float | None]:
        """The defects by name."""
        return {
            "field": self.field_defect,
            "wasserstein": self.wasserstein_defect,
            "twisted": self.twisted_defect,
            "mobility": self.mobility_defect,
            "bures": self.bures_defect,
            "dissipation": self.dissipation_defect,
        }

    def verify(self) -> bool:
        """Run the check again from the same seed; False as soon as a defect or the verdict differs."""
        from otattn.gradient_flow.structure import check_gradient_flow

        new = check_gradient_flow(self.attention, self.mu, rng=self.seed, **self.settings)
        return self.verdict == new.verdict and all(
            (a is None) == (b is None) and (a is None or b is None or np.isclose(a, b, rtol=1e-6, atol=1e-7))
            for a, b in zip(self.defects.values(), new.defects.values(), strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """The plain numbers, ready for JSON."""
        found = {
            "attention": type(self.attention).__name__,
            **{f"{name}_defect": value for name, value in self.defects.items()},
            "energy": None if self.energy is None else type(self.energy).__name__,
            "coefficient": self.coefficient,
            "gaussian_energy": None if self.gaussian_energy is None else type(self.gaussian_energy).__name__,
            "gaussian_coefficient": self.gaussian_coefficient,
            "verdict": self.verdict,
            "tol": self.tol,
            "standard_errors": self.errors,
        }
        return dict(plain(found))

    def rows(self) -> list[dict[str, Any]]:
        """One record: the defects and the verdict."""
        return [{**self.defects, "verdict": self.verdict}]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:.1e}" for name, value in self.defects.items() if value is not None)
        return f"GradientFlowReport({self.verdict!r}: {shown})"


def verdict_of(field: float, wasserstein: float, twisted: float | None, bures: float | None, *, tol: float) -> str:
    """The first of ``VERDICTS`` whose defect is at most the tolerance.

    Examples
    --------
    >>> verdict_of(0.0, 0.5, 1e-15, None, tol=1e-6)
    'gradient flow with mobility 1/Z'
    """
    defects = (wasserstein, twisted, bures, field)
    for verdict, defect in zip(VERDICTS, defects, strict=False):
        if defect is not None and defect <= tol:
            return verdict
    return VERDICTS[-1]


def worst(values: list[Asymmetry]) -> Asymmetry:
    """The largest of several defects."""
    return max(values, key=lambda a: a.value)
