"""How far attention of a compressed measure is from attention of the whole one: proven, measured, and to first order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import cdist

from otattn import _validate as check
from otattn._linalg import Array, row_norms
from otattn._tabular import Result
from otattn.attention.base import AttentionMap
from otattn.distances import wasserstein
from otattn.lipschitz import local_lipschitz
from otattn.measures import DiscreteMeasure, MeasureLike, as_discrete
from otattn.stability.atoms import linear, shifted
from otattn.stability.compression.features import head_features
from otattn.stability.compression.heads import Part, softmax_parts
from otattn.stability.compression.merged import Cloud, lengths
from otattn.stability.enclosed import Enclosed, upward
from otattn.stability.transport_bounds import (
    Problem,
    distance_bounds,
    pair_slices,
    pairs_upper,
    plan_upper,
    transport_lower,
    transport_upper,
)

__all__ = ["CompressionBound", "compression_bound"]

Index = NDArray[np.intp]
RECHECK = 1e-9
"""Relative: how far a value that is computed again may lie from the one that was kept."""


@dataclass(frozen=True, eq=False)
class CompressionBound(Result):
    r"""``W_p`` of the images of a measure and of a smaller one: a bound, and what is measured.

    Attributes
    ----------
    value : float
        Proven upper bound of ``W_p(F(mu), F(nu))``, from what is kept of each cluster
        (:mod:`otattn.stability.compression.merged`), all rounding counted. With fixed queries: of ``W_p`` of their images.
    measured : float
        The distance of the images in float64.
    lower, upper : float
        Proven bounds of the same distance from both maps evaluated at all atoms: what is kept of the clusters does not
        give them, they need every token.
    distance : float
        ``W_p(mu, nu)``.
    local : float or None
        Local Lipschitz constant of F at mu; ``local * distance`` is what it predicts, to first order. For p = 2 and queries
        that move; None otherwise.
    p : float
    attention : AttentionMap
    mu, nu : DiscreteMeasure
        Without atoms of zero weight.
    queries : DiscreteMeasure or None
        The fixed queries; None when they move with the atoms.
    labels : ndarray (n,) of int
        The atom of nu that stands for each atom of mu.
    errors, bounds : ndarray (q,)
        At each query (each atom of mu when they move): ``|Gamma_mu(x) - Gamma_nu(x)|`` measured, and a proven bound of it.
    """

    value: float
    measured: float
    lower: float
    upper: float
    distance: float
    local: float | None
    p: float
    attention: AttentionMap
    mu: DiscreteMeasure
    nu: DiscreteMeasure
    queries: DiscreteMeasure | None
    labels: Index
    errors: Array
    bounds: Array

    def at(self, x: ArrayLike) -> Array:
        """Proven bounds of ``|Gamma_mu(x) - Gamma_nu(x)|`` at any queries ``x (m, d)``, ``(m,)``."""
        points = check.points(x, "x", dim=self.mu.dim)
        return _Pair(softmax_parts(self.attention), self.mu, self.nu).deviations(points, self.labels)[1]

    def verify(self) -> bool:
        """Prove and measure all again; False as soon as anything disagrees (to 1e-9, or the rounding of the images)."""
        try:
            new = compression_bound(
                self.attention, self.mu, self.nu, p=self.p, queries=self.queries, labels=self.labels
            )
        except (ValueError, TypeError, OverflowError, IndexError):
            return False
        slack = 0.0 if not np.isfinite(new.upper) else new.upper - new.lower
        near = RECHECK * max(new.measured, new.distance * 1e-9)
        return bool(
            (self.value >= new.value * (1.0 - RECHECK))
            and self.bounds.shape == new.bounds.shape
            and (self.bounds >= new.bounds * (1.0 - RECHECK)).all()
            and abs(self.measured - new.measured) <= near + slack
            and self.lower <= new.lower * (1.0 + RECHECK) + slack
            and self.upper >= new.upper * (1.0 - RECHECK) - slack
            and abs(self.distance - new.distance) <= RECHECK * new.distance
            and (self.local is None) == (new.local is None)
            and abs((self.local or 0.0) - (new.local or 0.0)) <= 1e-6 * (new.local or 0.0)
        )

    def __repr__(self) -> str:
        first_order = "" if self.local is None else f", local constant times W_p {self.local * self.distance:.4g}"
        return (
            f"CompressionBound({self.mu.n} to {self.nu.n} atoms, p={self.p:g}, W_p of the images {self.measured:.4g} "
            f"<= {self.value:.4g}{first_order})"
        )


def compression_bound(
    attention: AttentionMap,
    mu: MeasureLike,
    nu: MeasureLike,
    *,
    p: float = 2,
    queries: MeasureLike | None = None,
    labels: ArrayLike | None = None,
) -> CompressionBound:
    r"""A proven bound of what is lost when attention sees ``nu``, pruned or merged, instead of ``mu``.

    Each atom of ``mu`` is given to one of ``nu``; let :math:`\bar\mu` be ``mu`` with each cluster merged in its centroid. What
    merging does is bounded from what is kept of the clusters, :math:`|\Gamma_\mu(x) - \Gamma_{\bar\mu}(x)| \le \tau(x)`
    (:mod:`otattn.stability.compression.merged` has formulas and proofs); what is left, :math:`\Gamma_{\bar\mu}` against
    :math:`\Gamma_\nu`, both of few atoms, is evaluated. So

    .. math:: W_p(F(\mu), F(\nu)) \le \min_\pi \Big( \sum_{ij} \pi_{ij} \big( \tau(x_i) + |\Gamma_{\bar\mu}(x_i) -
              \Gamma_\nu(z_j)| \big)^p \Big)^{1/p}

    over plans between the weights of ``mu`` and ``nu``. Any ``nu`` will do; the bound is small when its atoms are near
    centroids, in the space that the heads see, of clusters of its weights (:func:`compress`).

    Parameters
    ----------
    attention : AttentionMap
        Softmax attention, or a multi-head sum of softmax heads (their bounds are added).
    mu, nu : DiscreteMeasure or array_like (n, d), (k, d)
    p : float
        Order, ``1 <= p <= inf``.
    queries : DiscreteMeasure or array_like (q, d), optional
        Queries that stay while keys and values are compressed, as in a cache: then the bound is of ``W_p`` between their
        images, :math:`(\sum_i w_i |\Gamma_\mu(x_i) - \Gamma_\nu(x_i)|^p)^{1/p}` at most. Without it the atoms are queries too,
        and move.
    labels : array_like (n,) of int, optional
        The atom of ``nu`` for each atom of ``mu``, counted among those of positive weight; by default the nearest one, in the
        space that the heads see or in R^d, whichever gives the smaller bound.

    Returns
    -------
    CompressionBound

    Raises
    ------
    TypeError
        The map is another one; the message says what to do.
    ValueError
        The measures do not live in the head's space; labels that are no atoms of ``nu``.
    ConvergenceError
        A transport problem could not be solved: weights or distances over too many orders of magnitude.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> head = SoftmaxAttention([[1.0]], [[1.0]])
    >>> bound = compression_bound(head, [[0.0], [0.2], [2.0]], DiscreteMeasure([[0.1], [2.0]], [2 / 3, 1 / 3]))
    >>> bound.measured <= bound.value
    True
    """
    order = check.check_order(p)
    parts = softmax_parts(attention)
    measures = [mu, nu] if queries is None else [mu, nu, queries]
    live = [as_discrete(m, name).support() for m, name in zip(measures, ("mu", "nu", "queries"), strict=False)]
    for m, name in zip(live, ("mu", "nu", "queries"), strict=False):
        if m.dim != attention.in_dim:
            raise ValueError(f"{name} must live in R^{attention.in_dim}, where attention acts, received R^{m.dim}.")
    full, small, fixed = live[0], live[1], live[2] if len(live) > 2 else None
    pair = _Pair(parts, full, small)
    if labels is None:
        candidates = _nearest(attention, full, small, fixed or full)
    else:
        candidates = [_checked_labels(labels, full.n, small.n)]
    problem = Problem(full.weights, small.weights, pair_slices(full, small), order)
    with np.errstate(all="ignore"):  # what leaves float64 is not bounded, and says so
        found = [_bounded(pair, candidate, fixed, problem) for candidate in candidates]
        value, bounds, chosen = min(found, key=lambda one: one[0])
        measured = _measured(attention, pair, fixed, problem)
    local = float(local_lipschitz(attention, full).value) if order == 2.0 and fixed is None else None
    distance = wasserstein(full, small, p=order)
    return CompressionBound(
        value, *measured[:3], distance, local, order, attention, full, small, fixed, chosen, measured[3], bounds
    )


@dataclass(frozen=True, eq=False)
class _Pair:
    """Both measures as the heads see them, from one centre."""

    parts: tuple[Part, ...]
    mu: DiscreteMeasure
    nu: DiscreteMeasure

    def _seen(self, points: Array) -> Enclosed:
        return Enclosed.exact(points) - self.mu.points[np.argmax(self.mu.weights)]

    def _cloud(self, part: Part, measure: DiscreteMeasure) -> Cloud:
        head, W = part
        maps, Z = head.projections(), self._seen(measure.points)
        values = linear(Z, maps.V)
        masses = np.ones(measure.n) if measure.is_uniform else measure.weights
        return Cloud(linear(Z, maps.Wk), values if W is None else values @ W.T, Enclosed.exact(masses[None, :]))

    def _queries(self, part: Part, x: Array) -> Enclosed:
        maps = part[0].projections()
        return shifted(linear(Enclosed.exact(x), maps.Wq), maps.bq)

    def field(self, measure: DiscreteMeasure, x: Array) -> Enclosed:
        """``Gamma`` of a measure at the points, up to one constant."""
        terms = [self._cloud(part, measure).softmax(self._queries(part, x))[1] for part in self.parts]
        return _total(terms)

    def merged(self, x: Array, labels: Index) -> tuple[Array, Enclosed]:
        """``tau`` and the field of the centroids at the points, up to the same constant."""
        _, dense = np.unique(labels, return_inverse=True)
        terms, tau = [], np.zeros(len(x))
        for part in self.parts:
            bound, mean = self._cloud(part, self.mu).merged(dense).bounds(self._queries(part, x))
            terms.append(mean)
            tau = upward(tau + bound)
        return tau, _total(terms)

    def deviations(self, x: Array, labels: Index) -> tuple[Array, Array, Enclosed]:
        """``tau``, bounds of ``|Gamma_mu - Gamma_nu|`` at the points, and the field of the centroids."""
        with np.errstate(all="ignore"):
            tau, mean = self.merged(x, labels)
            return tau, upward(tau + lengths(mean - self.field(self.nu, x))), mean


def _total(terms: list[Enclosed]) -> Enclosed:
    out = terms[0]
    for term in terms[1:]:
        out = out + term
    return out


def _bounded(
    pair: _Pair, labels: Index, queries: DiscreteMeasure | None, problem: Problem
) -> tuple[float, Array, Index]:
    """The bound of ``W_p`` with given clusters, the bounds at the queries, and the clusters."""
    x = pair.mu if queries is None else queries
    tau, bounds, mean = pair.deviations(x.points, labels)
    if queries is not None:
        return pairs_upper(x.weights, bounds, problem.p), bounds, labels
    apart = distance_bounds(mean, pair.field(pair.nu, pair.nu.points))[1]
    return plan_upper(upward(apart + tau[:, None]), problem, float(np.median(apart))), bounds, labels


def _measured(
    attention: AttentionMap, pair: _Pair, queries: DiscreteMeasure | None, problem: Problem
) -> tuple[float, float, float, Array]:
    """The distance of the images in float64, its proven bounds, and the error at each query."""
    x = pair.mu if queries is None else queries
    of_mu, of_nu = attention(x.points, pair.mu), attention(x.points, pair.nu)
    ends = pair.field(pair.mu, x.points), pair.field(pair.nu, pair.nu.points if queries is None else x.points)
    if queries is None:
        images = DiscreteMeasure(of_mu, x.weights), attention.pushforward(pair.nu)
    else:
        images = DiscreteMeasure(of_mu, x.weights), DiscreteMeasure(of_nu, x.weights)
        problem = replace(problem, a=x.weights, b=x.weights, slices=pair_slices(x, x))
    measured: Any = wasserstein(*images, p=problem.p)
    lower = transport_lower(*ends, problem, measured)
    upper = max(transport_upper(*ends, problem, measured), lower)
    return min(max(measured, lower), upper), lower, upper, row_norms(of_mu - of_nu)


def _nearest(
    attention: AttentionMap, mu: DiscreteMeasure, nu: DiscreteMeasure, queries: DiscreteMeasure
) -> list[Index]:
    """The nearest atom of nu for each of mu, as the heads see them and in R^d."""
    seen = [head_features(attention, m.points, mu, queries) for m in (mu, nu)]
    out = [cdist(*seen).argmin(axis=1), cdist(mu.points, nu.points).argmin(axis=1)]
    return out[:1] if (out[0] == out[1]).all() else out


def _checked_labels(labels: ArrayLike, n: int, k: int) -> Index:
    found = np.asarray(labels)
    if found.shape != (n,) or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= k:
        raise ValueError(
            f"labels must be {n} integers from 0 to {k - 1}, the atom of nu for each atom of mu of positive weight, received "
            f"{found.dtype} of shape {found.shape}."
        )
    return found.astype(np.intp)
