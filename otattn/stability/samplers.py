"""Random pairs of measures: frozen, picklable callables ``rng -> (mu, nu)``.

Each sampler prints as the call that made it, and ``domain`` names the set that holds its tokens where there
is one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import Array
from otattn.measures import Ball, DiscreteMeasure, GaussianMeasure, MeasureLike, SpaceTimeMeasure, as_discrete

__all__ = [
    "gaussian_measure_pairs",
    "gaussian_pairs",
    "perturbation_pairs",
    "sequence_pairs",
    "two_dirac_pairs",
    "uniform_ball_pairs",
    "window_pairs",
]

Rng = np.random.Generator


class _Pairs(Saved):
    """Sizes and lengths that are checked by their names, and the ball of a radius as the domain."""

    dim: int

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if field.name in ("n", "m", "dim", "rank"):
                check.count(value, field.name)
            elif field.name in ("radius", "scale"):
                check.positive(value, field.name, limit=check.LARGEST)

    @property
    def domain(self) -> Ball | None:
        """The ball; None for points that lie in no bounded set."""
        radius = getattr(self, "radius", None)
        return None if radius is None else Ball(radius, self.dim)


@dataclass(frozen=True)
class uniform_ball_pairs(_Pairs):
    """Two independent clouds, uniform in the ball.

    Parameters
    ----------
    n, dim : int
        Number of points of ``mu`` and their dimension.
    radius : float
    m : int, optional
        Number of points of ``nu``, n by default.
    random_weights : bool
        Weights uniform on the simplex instead of equal ones.

    Examples
    --------
    >>> sampler = uniform_ball_pairs(8, 2, 1.0)
    >>> mu, nu = sampler(np.random.default_rng(0))
    >>> mu.n, mu.radius() <= 1.0, sampler
    (8, True, uniform_ball_pairs(n=8, dim=2, radius=1.0, m=None, random_weights=False))
    """

    n: int
    dim: int
    radius: float
    m: int | None = None
    random_weights: bool = False

    def __call__(self, rng: Rng) -> tuple[DiscreteMeasure, DiscreteMeasure]:
        sizes = self.n, self.n if self.m is None else self.m
        mu, nu = (_measure(_in_ball(k, self.dim, self.radius, rng), self.random_weights, rng) for k in sizes)
        return mu, nu


@dataclass(frozen=True)
class gaussian_pairs(_Pairs):
    """Two independent clouds of ``n`` normal points of standard deviation ``scale`` a coordinate.

    Parameters
    ----------
    n, dim : int
    scale : float
    """

    n: int
    dim: int
    scale: float = 1.0

    def __call__(self, rng: Rng) -> tuple[DiscreteMeasure, DiscreteMeasure]:
        mu, nu = (DiscreteMeasure(self.scale * rng.standard_normal((self.n, self.dim))) for _ in range(2))
        return mu, nu


@dataclass(frozen=True, eq=False, init=False)
class perturbation_pairs(Saved):
    """A fixed measure and itself with every atom displaced, in a random direction of ``L^2(mu)``.

    Parameters
    ----------
    mu : DiscreteMeasure, SpaceTimeMeasure or array_like (n, d)
        Times and weights are kept.
    size : float
        Root mean square displacement, so ``W_2(mu, nu) <= size``, with equality once it is well below the
        least distance between atoms.
    """

    mu: DiscreteMeasure | SpaceTimeMeasure
    size: float

    def __init__(self, mu: MeasureLike, size: float) -> None:
        object.__setattr__(self, "mu", mu if isinstance(mu, SpaceTimeMeasure) else as_discrete(mu))
        object.__setattr__(self, "size", check.positive(size, "size"))

    @property
    def domain(self) -> Ball | None:
        """The ball around the origin that holds every perturbed atom of positive weight."""
        live = self.mu.weights[self.mu.weights > 0]
        return Ball(self.mu.radius() + self.size / float(np.sqrt(live.min())), self.mu.dim)

    def __call__(self, rng: Rng) -> tuple[Any, Any]:
        step = rng.standard_normal(self.mu.points.shape)
        step *= self.size / np.sqrt(self.mu.weights @ np.einsum("ij,ij->i", step, step))
        return self.mu, self.mu._with_points(self.mu.points + step)


@dataclass(frozen=True)
class two_dirac_pairs(_Pairs):
    r"""Two-atom measures ``q delta_x + (1 - q) delta_{s x}``, where the largest stretches are found.

    ``x`` is uniform on the sphere, ``s`` uniform in [-1, 1] and the mass ``q`` log-uniform: the published
    lower bounds have ``s = -1`` or ``s = 1/2`` and a light first atom. ``nu`` has the same masses and atoms
    displaced inside the ball, or is drawn independently.

    Parameters
    ----------
    dim : int
    radius : float
    min_mass : float
        Least mass q, in (0, 1/2].
    size : float or None
        Largest displacement of an atom as a fraction of the radius; None for independent pairs.

    References
    ----------
    Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024, section 3.
    """

    dim: int
    radius: float
    min_mass: float = 1e-2
    size: float | None = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        if check.positive(self.min_mass, "min_mass") > 0.5:
            raise ValueError(f"min_mass must lie in (0, 1/2], received {self.min_mass}; choose a smaller one.")
        if self.size is not None:
            check.positive(self.size, "size")

    def _one(self, rng: Rng) -> DiscreteMeasure:
        x = rng.standard_normal(self.dim)
        x *= self.radius / np.linalg.norm(x)
        q = float(np.exp(rng.uniform(np.log(self.min_mass), np.log(0.5))))
        return DiscreteMeasure(np.stack([x, rng.uniform(-1.0, 1.0) * x]), [q, 1.0 - q])

    def __call__(self, rng: Rng) -> tuple[DiscreteMeasure, DiscreteMeasure]:
        mu = self._one(rng)
        if self.size is None:
            return mu, self._one(rng)
        moved = mu.points + _in_ball(2, self.dim, self.size * self.radius, rng)
        return mu, mu._with_points(Ball(self.radius, self.dim).project(moved))


@dataclass(frozen=True)
class gaussian_measure_pairs(_Pairs):
    """Two independent Gaussians: normal means, Wishart covariances.

    Parameters
    ----------
    dim : int
    scale : float
        ``E[cov] = scale^2 I`` at full rank.
    mean_scale : float, optional
        Standard deviation of each coordinate of the means; ``scale`` by default, 0 for centred Gaussians.
    rank : int, optional
        Rank of the covariances, ``dim`` by default.
    """

    dim: int
    scale: float = 1.0
    mean_scale: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean_scale is not None:
            check.positive(self.mean_scale, "mean_scale", zero=True)
        if self.rank is not None and self.rank > self.dim:
            raise ValueError(f"rank must be at most dim = {self.dim}, received {self.rank}.")

    def _one(self, rng: Rng) -> GaussianMeasure:
        mean = (self.scale if self.mean_scale is None else self.mean_scale) * rng.standard_normal(self.dim)
        F = self.scale / np.sqrt(self.dim) * rng.standard_normal((self.dim, self.rank or self.dim))
        return GaussianMeasure(mean, F @ F.T)

    def __call__(self, rng: Rng) -> tuple[GaussianMeasure, GaussianMeasure]:
        mu, nu = self._one(rng), self._one(rng)
        return mu, nu


@dataclass(frozen=True)
class sequence_pairs(_Pairs):
    """Two independent sequences of ``n`` tokens, uniform in the ball, token i at time ``i / n``.

    Parameters
    ----------
    n, dim : int
    radius : float
    """

    n: int
    dim: int
    radius: float

    def __call__(self, rng: Rng) -> tuple[SpaceTimeMeasure, SpaceTimeMeasure]:
        X, Y = (_in_ball(self.n, self.dim, self.radius, rng) for _ in range(2))
        return SpaceTimeMeasure.from_sequence(X), SpaceTimeMeasure.from_sequence(Y)


@dataclass(frozen=True, eq=False, init=False)
class window_pairs(Saved):
    """Two runs of ``n`` consecutive tokens from recorded windows, at random places.

    Parameters
    ----------
    windows : array_like (w, length, d) or (length, d)
        Recorded tokens, such as ``SampleLayer.hidden_states``. The two runs may come from one window and
        overlap.
    n : int
        Tokens of a run.
    causal : bool
        Make sequences, for masked attention, instead of measures.
    """

    windows: Array
    n: int
    causal: bool

    def __init__(self, windows: ArrayLike, n: int, *, causal: bool = False) -> None:
        tokens = check.as_float_array(windows, "windows")
        tokens = tokens[None] if tokens.ndim == 2 else tokens
        if tokens.ndim != 3 or tokens.size == 0:
            raise ValueError(
                f"windows must have shape (w, length, d) or (length, d), received {np.shape(windows)}; stack them."
            )
        if check.count(n, "n") > tokens.shape[1]:
            raise ValueError(f"n must be at most the length {tokens.shape[1]} of a window, received {n}.")
        if tokens.shape[0] == 1 and n == tokens.shape[1]:
            raise ValueError(f"n must be below {n} for a single window, whose only run of {n} tokens is itself.")
        object.__setattr__(self, "windows", check.frozen(tokens))
        object.__setattr__(self, "n", int(n))
        object.__setattr__(self, "causal", bool(causal))

    @property
    def domain(self) -> Ball:
        """The centred ball around all recorded tokens."""
        return Ball(float(np.linalg.norm(self.windows, axis=2).max()), self.windows.shape[2])

    def __call__(self, rng: Rng) -> tuple[Any, Any]:
        w, length, _ = self.windows.shape
        places = zip(rng.integers(0, w, 2), rng.integers(0, length - self.n + 1, 2), strict=True)
        runs = [self.windows[k, start : start + self.n] for k, start in places]
        kind = SpaceTimeMeasure.from_sequence if self.causal else DiscreteMeasure
        return kind(runs[0]), kind(runs[1])


def _in_ball(n: int, dim: int, radius: float, rng: Rng) -> Array:
    """``n`` points uniform in the centred ball, none of them outside by a rounding."""
    z = rng.standard_normal((n, dim))
    norm = np.sqrt(np.einsum("ij,ij->i", z, z))
    r = radius * (1.0 - 4e-16) * rng.random(n) ** (1.0 / dim)
    return np.asarray(z * (r / norm)[:, None])


def _measure(points: Array, random_weights: bool, rng: Rng) -> DiscreteMeasure:
    if not random_weights:
        return DiscreteMeasure(points)
    return DiscreteMeasure.normalized(points, rng.standard_exponential(len(points)))
