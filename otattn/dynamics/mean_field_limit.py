"""The mean-field limit: flows of n tokens sampled from a law, as n grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.distances import bures_wasserstein, wasserstein
from otattn.dynamics.flow import flow
from otattn.dynamics.gaussian_flow import gaussian_flow
from otattn.lipschitz.local.growth import Exponent, fit_exponent
from otattn.measures import DiscreteMeasure, GaussianMeasure

__all__ = ["MeanFieldLimit", "mean_field_limit"]

Law = GaussianMeasure | Callable[[int, np.random.Generator], ArrayLike]


@dataclass(frozen=True, eq=False)
class MeanFieldLimit(Result):
    """Distance of n-particle flows from the limit flow.

    Attributes
    ----------
    n_values : ndarray (m,)
        Numbers of particles n.
    distances : ndarray (m, s)
        At the final time, for s independent samples.
    initial : ndarray (m, s)
        The same at time 0.
    reference : str
        "gaussian": Bures-Wasserstein distance between the Gaussian with the particles' mean and covariance and the
        Gaussian flow, a lower bound of their W_2 (Gelbrich). "particles": W_2 to a flow of many particles.
    time : float
    """

    n_values: Array
    distances: Array
    initial: Array
    reference: str
    time: float

    def fit(self) -> Exponent:
        """Power law of the distances in n (exponent near -1/2 for moments; -1/d for W_2 in dimension d > 4)."""
        return fit_exponent(self.n_values, self.distances.T)

    @property
    def rate(self) -> float:
        """``-exponent``: distances fall like ``n^{-rate}``."""
        return -self.fit().exponent

    def rows(self) -> list[dict[str, Any]]:
        """One record a size: mean distance over the samples, at the end and at time 0."""
        means = (self.n_values, self.distances.mean(axis=1), self.initial.mean(axis=1))
        return [
            {"n": int(n), "distance": float(last), "initial": float(first)}
            for n, last, first in zip(*means, strict=True)
        ]

    def __repr__(self) -> str:
        return f"MeanFieldLimit({self.reference}, n={self.n_values.astype(int).tolist()}, rate={self.rate:.3g}, t={self.time:g})"


def mean_field_limit(
    attention: AttentionMap,
    law: Law,
    *,
    n_values: Sequence[int],
    t_span: tuple[float, float],
    samples: int = 4,
    reference: Literal["gaussian", "particles"] | None = None,
    reference_size: int = 1000,
    rtol: float = 1e-6,
    rng: np.random.Generator | int,
) -> MeanFieldLimit:
    """Flows of n tokens drawn from ``law``, compared at the end with the flow of the law itself.

    Parameters
    ----------
    attention : AttentionMap
    law : GaussianMeasure, or callable (n, rng) -> (n, d)
    n_values : sequence of int
        Numbers of tokens, at least two of them.
    t_span : (float, float)
    samples : int
        Independent samples of each size, on which the error of the rate rests.
    reference : {"gaussian", "particles"}, optional
        "gaussian" for a Gaussian law (the map must keep it Gaussian), else "particles".
    reference_size : int
        Number of tokens of the reference flow for "particles".
    rtol : float
        Tolerance of the particle flows.
    rng : Generator or int

    Raises
    ------
    ValueError
        A flow ends before ``t_span`` does.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> law = GaussianMeasure([0.0], [[1.0]])
    >>> contraction = SoftmaxAttention([[1.0]], [[-1.0]])
    >>> mean_field_limit(contraction, law, n_values=[30, 120, 480], samples=8, t_span=(0.0, 1.0), rng=0)
    MeanFieldLimit(gaussian, n=[30, 120, 480], rate=0.4..., t=1)

    References
    ----------
    Gelbrich (1990); Fournier and Guillin (2015), On the rate of convergence in Wasserstein distance of the empirical
    measure; Castin, Ablin, Carrillo, Peyre (2025).
    """
    kind = reference or ("gaussian" if isinstance(law, GaussianMeasure) else "particles")
    if kind not in ("gaussian", "particles"):
        raise ValueError(f'reference must be "gaussian" or "particles", received {kind!r}.')
    if kind == "gaussian" and not isinstance(law, GaussianMeasure):
        raise ValueError(
            'reference="gaussian" must have a GaussianMeasure as law, received a callable; use "particles".'
        )
    gen = check.rng_from(rng)
    counts = [check.count(n, "n_values", least=2) for n in n_values]
    if len(counts) < 2:
        raise ValueError(f"n_values must hold at least two numbers of tokens, received {len(counts)}.")
    repeats = check.count(samples, "samples")

    def draw(n: int) -> DiscreteMeasure:
        return law.sample(n, gen) if isinstance(law, GaussianMeasure) else DiscreteMeasure(law(n, gen))

    def ends(mu: Any) -> tuple[DiscreteMeasure, DiscreteMeasure]:
        trajectory = flow(attention, mu, t_span=t_span, rtol=rtol, atol=1e-2 * rtol, dense=False)
        if trajectory.status != "success":
            raise ValueError(f"the flow must exist on t_span, received {trajectory!r}; shorten t_span.")
        return mu, DiscreteMeasure(trajectory.points[-1], mu.weights)

    first: Any
    last: Any
    if kind == "gaussian":
        assert isinstance(law, GaussianMeasure)
        exact = gaussian_flow(attention, law, t_span=t_span, t_eval=[float(t_span[1])])
        if exact.status != "success":
            raise ValueError(f"the Gaussian flow must exist on t_span, received {exact!r}; shorten t_span.")
        first, last = law, exact.measure(-1)
    else:
        first, last = ends(draw(check.count(reference_size, "reference_size", least=2)))
    distances, initial = np.empty((len(counts), repeats)), np.empty((len(counts), repeats))
    for i, n in enumerate(counts):
        for j in range(repeats):
            start, stop = ends(draw(n))
            initial[i, j], distances[i, j] = _distance(start, first), _distance(stop, last)
    return MeanFieldLimit(
        check.frozen(np.array(counts, dtype=np.float64)),
        check.frozen(distances),
        check.frozen(initial),
        kind,
        float(t_span[1]),
    )


def _distance(mu: DiscreteMeasure, other: DiscreteMeasure | GaussianMeasure) -> float:
    if isinstance(other, GaussianMeasure):
        S = mu.covariance()
        return bures_wasserstein(GaussianMeasure(mu.mean(), 0.5 * (S + S.T)), other)
    return wasserstein(mu, other)
