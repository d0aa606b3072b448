"""The findings of a stability study, on their own: statistics, bounds, and the file they are kept in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._files.result_file import can_keep
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.attention.base import AttentionMap
from otattn.errors import ConvergenceError
from otattn.lipschitz.bound import Bound
from otattn.measures import GaussianMeasure
from otattn.stability.ratio import StabilityRatio

__all__ = ["Sampler", "Seed", "StabilityStudy", "Statistic", "bootstrap_interval", "child_seed", "endpoint"]

Statistic = str | float | Callable[[Array], float]

LEAST_SAMPLE = 20
LEAST_TAIL = 10
NEARLY_GUMBEL = -0.05
_BATCH = 2**20


def _along_rows(statistic: Statistic) -> Callable[[Array], Array]:
    """The statistic along the last axis of an array of resamples."""
    if callable(statistic):
        return lambda rows: np.array([float(statistic(row)) for row in rows])
    if statistic == "mean":
        return lambda rows: np.mean(rows, axis=-1)
    if statistic == "median":
        return lambda rows: np.median(rows, axis=-1)
    if isinstance(statistic, (int, float)) and not isinstance(statistic, bool) and 0.0 <= statistic <= 1.0:
        return lambda rows: np.quantile(rows, statistic, axis=-1)
    raise ValueError(
        f'statistic must be "mean", "median", a quantile level in [0, 1] or a function, received {statistic!r}.'
    )


def bootstrap_interval(
    x: Array, statistic: Statistic, *, level: float, n_resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Percentile bootstrap interval, widened where it would miss the statistic of the sample itself."""
    apply = _along_rows(statistic)
    step = max(1, _BATCH // len(x))
    values = [
        apply(x[rng.integers(0, len(x), size=(min(step, n_resamples - k), len(x)))])
        for k in range(0, n_resamples, step)
    ]
    low, high = np.quantile(np.concatenate(values), [0.5 - level / 2, 0.5 + level / 2])
    own = float(apply(x[None])[0])
    if not np.isfinite([low, high, own]).all():
        raise ConvergenceError(f"the statistic must be finite on resamples, received {own} and [{low}, {high}].")
    return min(float(low), own), max(float(high), own)


def endpoint(x: Array, tail: int | None = None) -> tuple[float, dict[str, Any]]:
    """Estimate of the right end of the distribution of ``x``, and how it was made.

    A generalised Pareto law is fitted to the excesses of the ``tail`` largest values by probability-weighted
    moments; a shape below -0.05 has the end ``threshold - scale / shape``. A shape near zero or above it (a
    tail that this sample cannot tell from an endless one), or an end below the largest value, falls back to
    the general estimator of Fraga Alves and Neves, a weighted sum of order statistics that is always finite
    and never below the largest value.
    """
    n = len(x)
    if n < LEAST_SAMPLE:
        raise ConvergenceError(
            f"an extreme-value estimate needs at least {LEAST_SAMPLE} ratios, received {n}; draw more pairs."
        )
    k = min(n // 2, max(LEAST_TAIL, round(n ** (2 / 3)))) if tail is None else tail
    if not 2 <= k <= n // 2:
        raise ValueError(f"tail must be an integer from 2 to {n // 2}, half of the {n} ratios, received {k}.")
    top = np.sort(x)[::-1]
    largest, threshold = float(top[0]), float(top[k])
    about: dict[str, Any] = {"tail": k, "threshold": threshold, "largest": largest}
    if largest - threshold <= 1e-12 * abs(largest):
        return largest, {**about, "method": "constant tail"}
    excess = top[:k][::-1] - threshold  # ascending
    a0 = float(excess.mean())
    a1 = float(np.mean((1.0 - (np.arange(1, k + 1) - 0.35) / k) * excess))
    shape = 2.0 - a0 / (a0 - 2.0 * a1)
    scale = 2.0 * a0 * a1 / (a0 - 2.0 * a1)
    about |= {"shape": shape, "scale": scale}
    if shape < NEARLY_GUMBEL:
        end = threshold - scale / shape
        if end >= largest:
            return end, {**about, "method": "generalised Pareto"}
    j = np.arange(k)
    weights = np.log1p(1.0 / (k + j)) / np.log(2.0)  # they sum to 1
    end = largest + threshold - float(weights @ top[k + j])
    return max(end, largest), {**about, "method": "order statistics"}


Sampler = Callable[[np.random.Generator], tuple[Any, Any]]
Seed = tuple[int, tuple[int, ...]]
"""Entropy and spawn key of a SeedSequence."""


@dataclass(frozen=True, eq=False)
class StabilityStudy(Result):
    """The stability ratios of ``n_pairs`` random pairs of measures.

    Attributes
    ----------
    numerators, denominators : ndarray (n_pairs,)
        ``W_p(F(mu), F(nu))`` and ``W_p(mu, nu)`` of every pair; both 0 where the pair was skipped because its
        measures are equal, or closer than 1e-12 times their size.
    best : StabilityRatio
        The largest ratio, certified, with its pair.
    p : float
        Order.
    seed : tuple
        Entropy and spawn key of the root seed; pair i is drawn from its i-th child.
    attention, sampler
        What was studied; functions of the caller are None after :meth:`load` without them.
    labels : dict
        "attention" and "sampler" in words.
    """

    numerators: Array
    denominators: Array
    best: StabilityRatio
    p: float
    seed: Seed
    attention: AttentionMap | None
    sampler: Sampler | None
    labels: dict[str, str]

    @property
    def n_pairs(self) -> int:
        """Number of pairs drawn."""
        return len(self.numerators)

    @property
    def n_skipped(self) -> int:
        """Number of pairs of equal measures, which have no ratio."""
        return int((self.denominators == 0.0).sum())

    @property
    def indices(self) -> NDArray[np.intp]:
        """Indices of the pairs that have a ratio, in the order of ``ratios``."""
        return np.flatnonzero(self.denominators)

    @property
    def ratios(self) -> Array:
        """``W_p(F(mu), F(nu)) / W_p(mu, nu)`` of the pairs that were not skipped."""
        live = self.indices
        return self.numerators[live] / self.denominators[live]

    @property
    def seeds(self) -> list[np.random.SeedSequence]:
        """The child seed of each pair, skipped ones included."""
        return [child_seed(self.seed, i) for i in range(self.n_pairs)]

    def pair(self, index: int) -> tuple[Any, Any]:
        """The pair of that index, drawn again from its child seed."""
        if self.sampler is None:
            raise ValueError("pair needs the sampler, received a study loaded without it; pass it to load.")
        if not 0 <= check.count(index, "index", least=0) < self.n_pairs:
            raise ValueError(f"index must be below {self.n_pairs}, received {index}.")
        mu, nu = self.sampler(np.random.default_rng(child_seed(self.seed, index)))
        return mu, nu

    def quantile(self, q: float) -> float:
        """Empirical quantile of the ratios at the level ``q`` in [0, 1]."""
        level = check.positive(q, "q", zero=True)
        if level > 1.0:
            raise ValueError(f"q must lie in [0, 1], received {q}.")
        return float(np.quantile(self.ratios, level))

    def confidence_interval(
        self,
        level: float = 0.95,
        *,
        statistic: Statistic = "mean",
        n_resamples: int = 2000,
        rng: np.random.Generator | int = 0,
    ) -> tuple[float, float]:
        """Percentile bootstrap interval of a statistic of the ratios under the sampler.

        Parameters
        ----------
        level : float
            In (0, 1).
        statistic : "mean", "median", float or callable
            A float in [0, 1] is a quantile level; a callable takes ratios ``(k,)`` to a number. The
            bootstrap says nothing about the maximum: use :meth:`estimate` for the supremum.
        n_resamples : int
        rng : Generator or int

        Returns
        -------
        low, high : float
            The interval contains the statistic of the study itself.
        """
        if not 0.0 < check.positive(level, "level") < 1.0:
            raise ValueError(f"level must lie strictly between 0 and 1, received {level}; 0.95 is usual.")
        draws = check.count(n_resamples, "n_resamples", least=10)
        return bootstrap_interval(
            self.ratios, statistic, level=float(level), n_resamples=draws, rng=check.rng_from(rng)
        )

    def estimate(self, *, tail: int | None = None) -> Bound:
        """Extreme-value estimate of the supremum of the ratio under the sampler.

        A statistical guess, not a bound: it speaks of pairs as the sampler draws them, whose supremum may
        lie far below the Lipschitz constant, and its error is large when few pairs come near the supremum.
        ``details`` names the method ("generalised Pareto", "order statistics" when the tail shows no end,
        "constant tail").

        Parameters
        ----------
        tail : int, optional
            Number of largest ratios to use, ``n^(2/3)`` by default.

        Raises
        ------
        ConvergenceError
            Fewer than 20 ratios.

        References
        ----------
        Hosking and Wallis, "Parameter and quantile estimation for the generalized Pareto distribution", 1987;
        Fraga Alves and Neves, "Estimation of the finite right endpoint in the Gumbel domain", 2014.
        """
        value, details = endpoint(self.ratios, None if tail is None else check.count(tail, "tail", least=2))
        source = f"extreme-value estimate ({details['method']}) from {len(self.ratios)} random pairs"
        about = {**details, "n_pairs": self.n_pairs}
        return Bound(value, "estimate", source, self.p, self._domain, details=about)

    def lower_bound(self) -> Bound:
        """The certified ratio of the best pair: a lower bound of the Lipschitz constant, with its witness."""
        mu, nu = self.best.mu, self.best.nu
        n = None
        if not isinstance(mu, GaussianMeasure) and not isinstance(nu, GaussianMeasure) and mu.n == nu.n:
            uniform = all((m.weights == m.weights[0]).all() for m in (mu, nu))
            n = mu.n if uniform else None
        return Bound(
            self.best.certified_lower,
            "lower",
            f"largest stability ratio of {len(self.ratios)} random pairs",
            self.p,
            self._domain,
            n,
            (mu, nu),
            {"ratio": self.best.value, "n_pairs": self.n_pairs, "n_skipped": self.n_skipped},
        )

    @property
    def _domain(self) -> Any:
        return getattr(self.sampler, "domain", None)

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain values, ready for JSON; "estimate" is None where there are too few ratios."""
        ratios = self.ratios
        estimate = self.estimate().to_dict() if len(ratios) >= LEAST_SAMPLE else None
        levels = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
        return {
            "p": self.p,
            "n_pairs": self.n_pairs,
            "n_skipped": self.n_skipped,
            "seed": {"entropy": str(self.seed[0]), "spawn_key": list(self.seed[1])},
            **self.labels,
            "mean": float(ratios.mean()),
            "mean_interval_95": list(self.confidence_interval()),
            "quantiles": {str(q): float(np.quantile(ratios, q)) for q in levels},
            "max": self.best.value,
            "resolution": str(self.best.resolution),
            "lower_bound": self.lower_bound().to_dict(),
            "estimate": estimate,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record a pair that was not skipped: its index, ratio, numerator and denominator."""
        live = self.indices
        columns = live, self.ratios, self.numerators[live], self.denominators[live]
        names = ("pair", "ratio", "numerator", "denominator")
        return [dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in columns), strict=True)]

    def _html_rows(self) -> list[dict[str, Any]]:
        low, high = self.confidence_interval(statistic="median")
        row = {"pairs": self.n_pairs, **self.best.rows()[0], "median": self.quantile(0.5)}
        return [{**row, "95% of the median": f"[{low:.6g}, {high:.6g}]"}]

    def _to_fields(self) -> dict[str, Any]:
        """A function of the caller is no part of a file: its name is kept in ``labels``."""
        state = super()._to_fields()
        if not can_keep(self.sampler):
            state["sampler"] = None
        if not can_keep(self.attention):
            state |= {"attention": None, "best": replace(self.best, attention=None)}
        return state

    @classmethod
    def _from_fields(cls, state: dict[str, Any]) -> StabilityStudy:
        study: StabilityStudy = super()._from_fields(state)
        if study.numerators.shape != study.denominators.shape or study.best.value != study.ratios.max():
            raise ValueError(f"its best value {study.best.value!r} is not the largest of its ratios")
        return study

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        attention: AttentionMap | None = None,
        sampler: Sampler | None = None,
    ) -> StabilityStudy:
        """Read what :meth:`save` wrote; an attention or a sampler that are functions of yours are no part of the file, give
        them to verify the best pair or to draw pairs again."""
        study = super().load(path)
        attention = study.attention if attention is None else attention
        best = replace(study.best, attention=attention)
        return replace(study, best=best, attention=attention, sampler=study.sampler if sampler is None else sampler)

    def __repr__(self) -> str:
        return (
            f"StabilityStudy({len(self.ratios)} ratios, p={self.p:g}, median {self.quantile(0.5):.4g}, "
            f"largest {self.best.value:.4g})"
        )


def child_seed(seed: Seed, index: int) -> np.random.SeedSequence:
    """The child that a fresh ``SeedSequence.spawn`` gives at that index, without spawning the others."""
    return np.random.SeedSequence(seed[0], spawn_key=(*seed[1], index))
