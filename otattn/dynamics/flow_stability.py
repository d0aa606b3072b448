"""How far two flows drift apart, against what Gronwall's inequality allows (:mod:`otattn.dynamics.gronwall`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.distances.conditional import check_kind, distance_of
from otattn.dynamics.flow import check_span, check_times, flow
from otattn.dynamics.gaussian_flow import GaussianTrajectory, gaussian_flow
from otattn.dynamics.gronwall import gronwall
from otattn.dynamics.trajectory import Trajectory
from otattn.dynamics.velocity import Field, layer_at
from otattn.measures import AnyMeasure, GaussianMeasure, SpaceTimeMeasure

__all__ = ["FlowStability", "flow_stability"]


@dataclass(frozen=True, eq=False)
class FlowStability(Result):
    """``W_p(mu_t, nu_t) / W_p(mu_0, nu_0)`` along two flows of one attention map.

    Attributes
    ----------
    times : ndarray (T,)
        Times that both flows reached; the first is the start.
    distances : ndarray (T,)
        Wasserstein; conditional for space-time measures, Bures-Wasserstein for Gaussians.
    p : float
    log_bounds : dict of name to ndarray (T,)
        ``int_0^t L``, logarithms of the Gronwall bounds of the ratio. "published" and "ours" (the least of all theorems, the
        published ones among them) take the radius from :func:`flow_radius_bound` (normalised kernels only), "ours, radius along
        the flow" from the flows (for other kernels the larger radius of two neighbouring times, which is no proof between
        them). Maps that depend on time are asked at 8 times of each interval, and the larger of two neighbouring constants is
        taken: a bound where they are monotone in between. inf where the integral exceeds the largest float; no entry where no
        theorem applies.
    radii : ndarray (T,) or None
        Larger of the two support radii (None for Gaussians).
    radius_bounds : ndarray (T,) or None
        What :func:`flow_radius_bound` allows.
    n : int or None
        Number of equal atoms for which the bounds were taken; None for any measure.
    flows : pair of Trajectory or GaussianTrajectory
    status : str
        "success", or that of the flow that ended first.
    attention
    """

    times: Array
    distances: Array
    p: float
    log_bounds: dict[str, Array]
    radii: Array | None
    radius_bounds: Array | None
    n: int | None
    flows: tuple[Trajectory, Trajectory] | tuple[GaussianTrajectory, GaussianTrajectory]
    status: str
    attention: Field

    @property
    def ratios(self) -> Array:
        """``distances / distances[0]``."""
        return np.asarray(self.distances / self.distances[0])

    @property
    def worst(self) -> float:
        """Largest ratio."""
        return float(self.ratios.max())

    def rows(self) -> list[dict[str, Any]]:
        """One record a time: distance, ratio, and the logarithm of each Gronwall bound."""
        columns = {"time": self.times, "distance": self.distances, "ratio": self.ratios}
        columns |= {f"log bound, {name}": values for name, values in self.log_bounds.items()}
        return [
            dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)
        ]

    def verify(self, *, rtol: float = 1e-6) -> bool:
        """True when the distances are those of the two flows again, and no ratio exceeds a bound (to ``rtol``)."""
        again = np.array(
            [distance_of(self.flows[0].measure(k), self.flows[1].measure(k), self.p) for k in range(len(self.times))]
        )
        if not np.allclose(again, self.distances, rtol=1e-9, atol=0.0):
            return False
        with np.errstate(divide="ignore"):
            logs = np.log(self.ratios)
        return all(bool((logs <= bound + rtol).all()) for bound in self.log_bounds.values())

    def __repr__(self) -> str:
        return (
            f"FlowStability(worst ratio {self.worst:.6g}, p={self.p:g}, t=[{self.times[0]:g}, {self.times[-1]:g}], "
            f"bounds={sorted(self.log_bounds)}, {self.status})"
        )


def flow_stability(
    attention: Field,
    mu0: AnyMeasure,
    nu0: AnyMeasure,
    *,
    t_span: tuple[float, float],
    p: float = 2,
    t_eval: ArrayLike | None = None,
    rtol: float = 1e-9,
    atol: float = 1e-12,
    bounds: bool = True,
    progress: bool = False,
) -> FlowStability:
    """Distance of two flows in time, with Gronwall bounds from published and from our constants.

    Parameters
    ----------
    attention : AttentionMap or callable t -> AttentionMap
        Parameters ``A(t), V(t)`` are those of the callable.
    mu0, nu0 : measures or array_like (n, d)
        Both discrete, both space-time measures of one time marginal, or both Gaussian (p = 2).
    t_span : (float, float)
    p : float
        Order, ``1 <= p <= inf``.
    t_eval : array_like (T,), optional
        Strictly increasing; 21 equidistant times by default. The start is added when it is missing.
    rtol, atol : float
        Tolerances of the flows.
    bounds : bool
        Also the Gronwall bounds: hundreds of theorems evaluated, seconds for small maps, minutes for a layer of many heads.
    progress : bool
        Show a bar for each of the two flows on the error stream.

    Returns
    -------
    FlowStability
        Up to the time at which the first of the two flows ends.

    Raises
    ------
    ValueError
        Equal measures (the ratio is 0/0), or measures between which the distance is not defined.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> drift = flow_stability(SoftmaxAttention([[0.0]], [[1.0]]), [[1.0]], [[2.0]], t_span=(0.0, 1.0))   # x' = x
    >>> round(drift.worst, 6), drift.verify()
    (2.718282, True)

    References
    ----------
    Castin, Ablin, Peyre (2024) and Geshkovski et al. (2023) for the published constants; otattn.bounds for ours.
    """
    span = check_span(t_span)
    order = check.check_order(p)
    times = np.linspace(*span, 21) if t_eval is None else check_times(t_eval, *span)
    if times[0] > span[0]:
        times = np.insert(times, 0, span[0])
    layer = layer_at(attention, span[0])
    pair: list[Any] = [m if isinstance(m, GaussianMeasure) else layer.as_measure(m) for m in (mu0, nu0)]
    first, second = pair
    check_kind(first, second, order, ("mu0", "nu0"))
    gaussian = isinstance(first, GaussianMeasure)
    if distance_of(first, second, order) == 0.0:
        raise ValueError("mu0 and nu0 must be different, received two equal measures: the ratio is 0/0; perturb one.")
    flows: Any
    if gaussian:
        flows = tuple(gaussian_flow(attention, g, t_span=span, t_eval=times) for g in pair)
    else:
        options: dict[str, Any] = {"t_eval": times, "rtol": rtol, "atol": atol, "dense": False, "progress": progress}
        flows = tuple(flow(attention, m, t_span=span, **options) for m in pair)
    ended = min(flows, key=lambda f: len(f.times))
    times = times[: len(ended.times)]
    distances = np.array([distance_of(flows[0].measure(k), flows[1].measure(k), order) for k in range(len(times))])
    radii, caps, n = None, None, None
    found: dict[str, Array] = {}
    if not gaussian:
        radii = np.maximum(*(f.radii()[: len(times)] for f in flows))
        n = _equal_atoms(first, second)
        if bounds:
            found, caps = gronwall(attention, times, radii, n, order)
    return FlowStability(
        check.frozen(times), check.frozen(distances), order, found, radii, caps, n, flows, ended.status, attention
    )


def _equal_atoms(mu: Any, nu: Any) -> int | None:
    """n when both measures are n equal atoms (one token a time under a mask), else None."""
    if mu.n != nu.n or not ((mu.weights == mu.weights[0]).all() and (nu.weights == nu.weights[0]).all()):
        return None
    if isinstance(mu, SpaceTimeMeasure) and len(np.unique(mu.times)) < mu.n:
        return None
    return int(mu.n)
