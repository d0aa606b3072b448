"""Displacement convexity: the second derivative of an energy along geodesics of measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.distances import bures_geodesic, bures_wasserstein, transport
from otattn.gradient_flow.energy import Energy
from otattn.gradient_flow.gaussian_energies import GaussianEnergy
from otattn.measures import AnyMeasure, DiscreteMeasure, GaussianMeasure, as_discrete

__all__ = ["DisplacementConvexity", "displacement_convexity", "displacement_convexity_study"]

Sampler = Callable[[np.random.Generator], tuple[Any, Any]]
Pair = tuple[DiscreteMeasure, DiscreteMeasure] | tuple[GaussianMeasure, GaussianMeasure]


@dataclass(frozen=True, eq=False)
class DisplacementConvexity(Result):
    r"""The second derivative of an energy along constant-speed geodesics, divided by the squared distance.

    E is lambda-convex along the geodesic when ``d^2/dt^2 E(mu_t) >= lambda W_2(mu_0, mu_1)^2``; then the flow that
    descends E contracts ``W_2`` at the rate lambda. All values are secants of the first derivative, hence averages of
    the second: the true infimum is at most ``least``, the true supremum at least ``greatest``.

    Attributes
    ----------
    least : float
        Smallest value found: the estimate of lambda, negative when E is not displacement convex.
    greatest : float
        Largest value found: minus the lambda of ``-E``.
    leasts, greatests : ndarray (n_pairs,)
        Of each pair.
    time : float
        Middle of the interval of ``least``.
    times, energies, slopes : ndarray (k,)
        The curve ``E(mu_t)`` of the most violating pair and its derivative.
    distance : float
        ``W_2(mu, nu)``.
    energy : Energy or GaussianEnergy
    mu, nu : measures
        The pair with the smallest value.
    kind : str
        "estimate".
    """

    least: float
    greatest: float
    leasts: Array
    greatests: Array
    time: float
    times: Array
    energies: Array
    slopes: Array
    distance: float
    energy: Energy | GaussianEnergy
    mu: DiscreteMeasure | GaussianMeasure
    nu: DiscreteMeasure | GaussianMeasure
    kind: ClassVar[Literal["estimate"]] = "estimate"

    _columns = ("times", "energies", "slopes")

    @property
    def n_pairs(self) -> int:
        """Number of geodesics."""
        return len(self.leasts)

    @property
    def convex(self) -> bool:
        """True when no violation was found (up to rounding of the slopes): no proof of convexity."""
        return self.least >= -_rounding(self.slopes, self.times, self.distance)

    def verify(self) -> bool:
        """Follow the geodesic of the stored pair again; False when its curve or ``least`` differs."""
        new = displacement_convexity(self.energy, self.mu, self.nu, n_times=len(self.times))
        size = 1e-8 * (1.0 + abs(new.least))
        return bool(
            abs(new.least - self.least) <= size
            and self.least == self.leasts.min()
            and self.greatest == self.greatests.max()
            and np.allclose(new.energies, self.energies, rtol=1e-9, atol=1e-12)
            and np.allclose(new.slopes, self.slopes, rtol=1e-7, atol=1e-9 * float(np.abs(new.slopes).max()))
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, with the kind and the number of pairs."""
        return {"kind": self.kind, "n_pairs": self.n_pairs, **super().to_dict()}

    def __repr__(self) -> str:
        return (
            f"DisplacementConvexity({type(self.energy).__name__}: second derivative in [{self.least:.4g}, "
            f"{self.greatest:.4g}] W^2 over {self.n_pairs} geodesic(s))"
        )


def displacement_convexity(
    energy: Energy | GaussianEnergy, mu: AnyMeasure, nu: AnyMeasure, *, n_times: int = 33
) -> DisplacementConvexity:
    r"""The second derivative of E along the ``W_2`` geodesic from ``mu`` to ``nu``.

    With an optimal plan pi, ``mu_t`` is the law of ``z_t = (1-t) x + t y`` and

    .. math:: \frac{d}{dt} E(\mu_t) = \int \langle \nabla\varphi_{\mu_t}(z_t), y - x\rangle \, d\pi(x, y);

    between Gaussians it is ``<u, m_1 - m_0> + tr(T Sigma_t') / 2`` with the Bures-Wasserstein gradient (u, T). The
    derivative is exact, its secants over ``n_times - 1`` intervals estimate the second derivative.

    Parameters
    ----------
    energy : Energy or GaussianEnergy
    mu, nu : DiscreteMeasure or array_like (n, d), (m, d); GaussianMeasure for a GaussianEnergy
    n_times : int
        Points of the curve, at least 3.

    Raises
    ------
    ValueError
        Equal measures, between which there is no direction.

    Examples
    --------
    >>> from otattn.gradient_flow.energies import SinkhornEnergy
    >>> A = [[1.0, 0.0], [0.0, -3.0]]   # on point masses E = <A x, x> / 2
    >>> result = displacement_convexity(SinkhornEnergy(A), [[0.0, 0.0]], [[0.0, 2.0]])
    >>> round(result.least, 9), result.convex
    (-3.0, False)

    References
    ----------
    McCann (1997), A convexity principle for interacting gases; Ambrosio, Gigli, Savaré (2008), section 9.1.
    """
    times = np.linspace(0.0, 1.0, check.count(n_times, "n_times", least=3))
    if isinstance(energy, GaussianEnergy):
        return _result(energy, times, *_gaussian_curve(energy, mu, nu, times))
    return _result(energy, times, *_discrete_curve(energy, mu, nu, times))


def displacement_convexity_study(
    energy: Energy | GaussianEnergy,
    sampler: Sampler,
    *,
    n_pairs: int,
    rng: np.random.Generator | int,
    n_times: int = 17,
) -> DisplacementConvexity:
    """The smallest second derivative over many random geodesics, with the most violating pair.

    Parameters
    ----------
    energy : Energy or GaussianEnergy
    sampler : callable ``rng -> (mu, nu)``
        Such as ``samplers.uniform_ball_pairs(n, dim, radius)`` or ``samplers.gaussian_measure_pairs(dim)``.
    n_pairs : int
    rng : Generator or int
    n_times : int
        Points of each curve.

    Returns
    -------
    DisplacementConvexity
        With the curve and the pair of the smallest value, and the extremes of every pair.

    Examples
    --------
    >>> from otattn.gradient_flow.energies import SigmoidEnergy
    >>> from otattn.stability import samplers
    >>> study = displacement_convexity_study(
    ...     SigmoidEnergy([[-4.0]]), samplers.uniform_ball_pairs(3, 1, 2.0), n_pairs=20, rng=0
    ... )
    >>> study.n_pairs, study.least < 0.0 < study.greatest
    (20, True)
    """
    generator = check.rng_from(rng)
    results = [
        displacement_convexity(energy, *sampler(generator), n_times=n_times)
        for _ in range(check.count(n_pairs, "n_pairs"))
    ]
    worst = min(results, key=lambda r: r.least)
    return replace(
        worst,
        greatest=max(r.greatest for r in results),
        leasts=np.array([r.least for r in results]),
        greatests=np.array([r.greatest for r in results]),
    )


def _result(
    energy: Energy | GaussianEnergy, times: Array, energies: Array, slopes: Array, distance: float, pair: Pair
) -> DisplacementConvexity:
    second = np.diff(slopes) / np.diff(times) / distance / distance
    k = int(second.argmin())
    least, greatest = float(second[k]), float(second.max())
    return DisplacementConvexity(
        least,
        greatest,
        np.array([least]),
        np.array([greatest]),
        0.5 * float(times[k] + times[k + 1]),
        times,
        energies,
        slopes,
        distance,
        energy,
        *pair,
    )


def _rounding(slopes: Array, times: Array, distance: float) -> float:
    step = float(np.diff(times).min())
    return 1e-12 * float(np.abs(slopes).max()) / step / distance / distance


def _different(distance: float) -> float:
    if distance == 0.0:
        raise ValueError(
            "mu and nu must be different measures, received two equal ones: no geodesic leads from one to the "
            "other; perturb one."
        )
    return distance


def _discrete_curve(energy: Energy, mu: Any, nu: Any, times: Array) -> tuple[Array, Array, float, Pair]:
    pair = as_discrete(mu, "mu"), as_discrete(nu, "nu")
    result = transport(*pair)
    distance = _different(result.value)
    plan = result.plan.tocoo()
    live = plan.data > 0.0
    x, y, mass = pair[0].points[plan.row[live]], pair[1].points[plan.col[live]], plan.data[live]
    energies, slopes = np.empty(len(times)), np.empty(len(times))
    for k, t in enumerate(times):
        measure = DiscreteMeasure.normalized((1.0 - t) * x + t * y, mass)
        energies[k] = energy(measure)
        slopes[k] = mass @ np.sum(energy.gradient(measure.points, measure) * (y - x), axis=1)
    return energies, slopes, distance, pair


def _gaussian_curve(energy: GaussianEnergy, mu: Any, nu: Any, times: Array) -> tuple[Array, Array, float, Pair]:
    distance = _different(bures_wasserstein(mu, nu))
    # Sigma_t is a quadratic polynomial in t: (1-t)^2 Sigma_0 + t (1-t) C + t^2 Sigma_1
    cross = 4.0 * bures_geodesic(mu, nu, 0.5).cov - mu.cov - nu.cov
    energies, slopes = np.empty(len(times)), np.empty(len(times))
    for k, t in enumerate(times):
        covariance = (1.0 - t) ** 2 * mu.cov + t * (1.0 - t) * cross + t * t * nu.cov
        gaussian = GaussianMeasure((1.0 - t) * mu.mean + t * nu.mean, covariance)
        u, T = energy.gradient(gaussian)
        moved = -2.0 * (1.0 - t) * mu.cov + (1.0 - 2.0 * t) * cross + 2.0 * t * nu.cov
        energies[k] = energy(gaussian)
        slopes[k] = u @ (nu.mean - mu.mean) + 0.5 * np.sum(T * moved)
    return energies, slopes, distance, (mu, nu)
