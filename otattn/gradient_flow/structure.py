"""Is a Transformer a gradient flow? The three nested questions and the Gaussian one, for one attention map."""

from __future__ import annotations

import numpy as np

from otattn import _validate as check
from otattn._linalg import EPS
from otattn.attention import AttentionMap
from otattn.attention.base import Measure, as_attention
from otattn.attention.head import check_sizes
from otattn.dynamics.velocity import check_values
from otattn.errors import NotGaussianPreservingError
from otattn.gradient_flow.asymmetry import Asymmetry, dense_asymmetry, mobility_defect, operator_asymmetry
from otattn.gradient_flow.dissipation import energy_dissipation
from otattn.gradient_flow.gaussian_structure import bures_closedness
from otattn.gradient_flow.known import known_gaussian_structure, known_structure
from otattn.gradient_flow.report import GradientFlowReport, verdict_of, worst
from otattn.gradient_flow.twisted import twisted_field
from otattn.measures import DiscreteMeasure, MeasureLike

__all__ = ["check_gradient_flow"]

MOVED = 0.1
"""Displacement of the extra clouds, as a share of the root mean square distance to the mean."""
FLOW_ATOMS = 256
"""Measures with more atoms are thinned to this many for the flow of the energy balance."""
GAUSSIANS = 3
"""Random covariances of the Gaussian test; one when the defect has to be estimated by probes."""
SMALL = 34


def check_gradient_flow(
    attention: AttentionMap,
    mu: MeasureLike,
    *,
    rng: np.random.Generator | int,
    tol: float = 1e-6,
    displaced: int = 2,
    probes: int = 16,
    dense_size: int = 1024,
) -> GradientFlowReport:
    r"""Test whether the flow ``d/dt mu + div(mu Gamma_mu) = 0`` is a gradient flow, and of what.

    (i) Is ``x -> Gamma_mu(x)`` a gradient for each measure? ``D_x Gamma_mu(x)`` must be symmetric.
    (ii) Is ``Gamma_mu = c grad phi_mu``, the Wasserstein gradient of an energy? On particles the gradient of ``E(sum
         w_i delta_{x_i})`` is ``w_i grad phi_mu(x_i)``, so ``w_i D_{x_j} Gamma_mu(x_i)`` must be a symmetric matrix, that is
         ``W^{1/2} J W^{-1/2}`` must be.
    (iii) Is ``Gamma_mu = c Z_mu^{-1} grad phi_mu``, a gradient flow with the mobility 1/Z? The same for ``Z_i f_i``, with
          the normaliser ``Z_i = sum_j w_j exp(l_ij)``; and is there a mobility of any kind?
    (iv) Is the flow of covariances of centred Gaussians a Bures-Wasserstein gradient flow? Tested at random
         covariances, and at that of the atoms when it is well conditioned.
    (v) Where an energy is known: does it change at the rate ``(1/c) int M^{-1} |Gamma|^2 dmu`` along a short flow?

    For a masked map the same tests decide about gradients in the conditional Wasserstein geometry of measures over
    time and space.

    Parameters
    ----------
    attention : AttentionMap
        With values in the space of the tokens.
    mu : DiscreteMeasure, SpaceTimeMeasure or array_like (n, d)
        Atoms of zero weight are dropped. A single token or ``d = 1`` is too special to exclude much.
    rng : Generator or int
        For displaced clouds, random points, covariances and probes.
    tol : float
        Defects up to it count as zero.
    displaced : int
        How many copies of ``mu``, displaced by a tenth of its size, are tested as well: symmetric configurations
        may hide a defect. Large measures (see ``dense_size``) are tested as they are.
    probes : int
        Number of Hutchinson probes of a large Jacobian, at least 2.
    dense_size : int
        Jacobians with at most so many rows are tested exactly.

    Returns
    -------
    GradientFlowReport

    Notes
    -----
    Logits of a size l carry a rounding of 1e-16 l, which the tolerance follows. Once they exceed some thousands,
    normalised kernels pick single atoms: then the field is constant in x to rounding (field defect 0 for any
    parameters) and the structure shows in the other defects only. Z is handled in logarithms throughout.

    Raises
    ------
    ValueError
        Values in another space than the tokens: there is no flow.
    OverflowError
        Unnormalised kernels with values beyond float64.

    Examples
    --------
    >>> from otattn.attention import SinkhornAttention, SoftmaxAttention
    >>> A, X = np.array([[1.0, 0.5], [0.5, -1.0]]), np.random.default_rng(0).standard_normal((5, 2))
    >>> check_gradient_flow(SinkhornAttention(A, A), X, rng=0).verdict
    'Wasserstein gradient flow'
    >>> report = check_gradient_flow(SoftmaxAttention(A, -A), X, rng=0)
    >>> report.verdict, report.coefficient, report.wasserstein_defect > 0.01, report.dissipation_defect < 1e-6
    ('gradient flow with mobility 1/Z', -1.0, True, True)

    References
    ----------
    Sander, Ablin, Blondel, Peyré, "Sinkformers", AISTATS 2022, section 3; Castin, Ablin, Carrillo, Peyré, "A
    unified perspective on the dynamics of deep Transformers", 2025.
    """
    measure = as_attention(attention).as_measure(mu).support()
    check_values(attention, measure.dim)
    settings = {
        "tol": check.positive(tol, "tol"),
        "displaced": check.count(displaced, "displaced", least=0),
        "probes": check.count(probes, "probes", least=2),
        "dense_size": check.count(dense_size, "dense_size"),
    }
    seed = int(rng) if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool) else None
    if seed is None:
        seed = int(check.rng_from(rng).integers(2**62))
    generator = check.rng_from(seed)
    check.moderate(measure.points, "mu")
    check_sizes(attention)
    copies = displaced if measure.n * measure.dim <= dense_size else 0
    clouds = [measure, *(_displaced(measure, generator) for _ in range(copies))]
    field = max(_field_defect(attention, cloud, generator) for cloud in clouds)
    found: dict[str, list[Asymmetry]] = {"wasserstein": [], "twisted": []}
    mobilities: list[float] = []
    span = 0.0
    for cloud in clouds:
        J = attention.jacobian(cloud)
        found["wasserstein"].append(
            operator_asymmetry(J.reweighted(cloud.weights), rng=generator, probes=probes, dense_size=dense_size)
        )
        twisted = twisted_field(attention, cloud)
        if twisted is not None:
            span = max(span, twisted.span)
            found["twisted"].append(
                operator_asymmetry(twisted.jacobian(), rng=generator, probes=probes, dense_size=dense_size)
            )
        if J.shape[0] <= dense_size:
            n, d = cloud.n, cloud.dim
            K, values = J.to_dense().reshape(n, d, n, d), attention(cloud.points, cloud)
            any_mobility = mobility_defect(K, values, one_sided=attention.causal)
            mobilities += [] if any_mobility is None else [any_mobility]
    wasserstein = worst(found["wasserstein"])
    twisted_worst = worst(found["twisted"]) if found["twisted"] else None
    bures = _bures(attention, measure, generator)
    limit = max(tol, 64.0 * EPS * span, 100.0 * attention._tol)
    structure, gaussian = known_structure(attention), known_gaussian_structure(attention)
    dissipation = None
    if structure is not None:
        dissipation = energy_dissipation(attention, _thinned(measure, generator))
    named = {"wasserstein": wasserstein, "twisted": twisted_worst, "bures": bures}
    return GradientFlowReport(
        field_defect=field,
        wasserstein_defect=wasserstein.value,
        twisted_defect=None if twisted_worst is None else twisted_worst.value,
        mobility_defect=max(mobilities) if mobilities else None,
        bures_defect=None if bures is None else bures.value,
        dissipation_defect=None if dissipation is None else dissipation.defect,
        energy=None if structure is None else structure.energy,
        coefficient=None if structure is None else structure.coefficient,
        gaussian_energy=None if gaussian is None else gaussian[0],
        gaussian_coefficient=None if gaussian is None else gaussian[1],
        verdict=verdict_of(
            field,
            wasserstein.value,
            None if twisted_worst is None else twisted_worst.value,
            None if bures is None else bures.value,
            tol=limit,
        ),
        tol=limit,
        errors={name: a.error for name, a in named.items() if a is not None and a.probes > 0},
        dissipation=dissipation,
        attention=attention,
        mu=measure,
        seed=seed,
        settings=settings,
    )


def _displaced(mu: Measure, rng: np.random.Generator) -> Measure:
    """The measure with every atom displaced, in units of the spread of its atoms (of their norms if they are equal)."""
    return mu._with_points(mu.points + MOVED * _spread(mu) * rng.standard_normal(mu.points.shape))


def _spread(mu: Measure) -> float:
    centred = mu.points - mu.weights @ mu.points
    for cloud in (centred, mu.points):
        size = float(np.sqrt(np.mean(mu.weights @ cloud**2)))
        if size > 0.0:
            return size
    return 1.0


def _field_defect(attention: AttentionMap, mu: Measure, rng: np.random.Generator) -> float:
    """The defect of ``D_x Gamma_mu`` at up to 256 atoms, and at as many points around them where the map is known there."""
    at = np.arange(mu.n) if mu.n <= FLOW_ATOMS else rng.choice(mu.n, FLOW_ATOMS, replace=False)
    x = mu.points[at]
    near = x + _spread(mu) * rng.standard_normal(x.shape)
    # times are those of the atoms; maps without a mask ignore them
    times = getattr(mu, "times", np.zeros(mu.n))[at]
    places = (x, near) if attention.everywhere else (x,)
    return max(dense_asymmetry(attention.field_jacobian(points, mu, times=times)) for points in places)


def _bures(attention: AttentionMap, mu: Measure, rng: np.random.Generator) -> Asymmetry | None:
    d = mu.dim
    size = _spread(mu) ** 2
    covariances = []
    for _ in range(GAUSSIANS if d <= SMALL else 1):
        F = rng.standard_normal((d, 2 * d + 2))
        covariances.append(size / F.shape[1] * (F @ F.T))
    own = DiscreteMeasure(mu.points, mu.weights).covariance()
    s = np.linalg.eigvalsh(own)
    if s[0] > 1e-4 * s[-1] and d <= SMALL:
        covariances.append(own)
    try:
        return worst([bures_closedness(attention, S, rng=rng, probes=16) for S in covariances])
    except NotGaussianPreservingError:
        return None


def _thinned(mu: Measure, rng: np.random.Generator) -> DiscreteMeasure:
    if mu.n <= FLOW_ATOMS:
        return DiscreteMeasure(mu.points, mu.weights)
    return DiscreteMeasure(mu.points[rng.choice(mu.n, FLOW_ATOMS, replace=False, p=mu.weights)])
