r"""What one softmax head makes of a measure that is merged into clusters, and how far that is from the truth at most.

Let :math:`\mu = \sum_k W_k \mu_k`, where :math:`\mu_k` has keys :math:`\kappa_k + y` and values :math:`v_k + \eta`, both y and
:math:`\eta` of mean 0, and let :math:`\bar\mu` have the centroids as atoms of mass :math:`W_k`. At a query q, with
:math:`P_k` and :math:`m = \sum_k P_k v_k` the softmax of :math:`\bar\mu` and its mean, :math:`s = \langle q, y \rangle`,
:math:`M_k = E_k e^s`, :math:`N_k = E_k[\eta e^s]`,

.. math:: \Gamma_\mu - m = \frac{\sum_k P_k [ (M_k - 1)(v_k - m) + N_k ]}{\sum_k P_k M_k},

because :math:`\sum_k P_k (v_k - m) = 0`. Kept of each cluster are: the covariance of y (:math:`\sigma_k^2` is the variance
of s) and its covariance with :math:`\eta`; the radii :math:`\rho_k = \max |y|` and :math:`r_k = \max |\eta|`; the norm
:math:`\lambda_k` of the covariance of :math:`\eta`; the least share p of an atom. So :math:`|s| \le u_k =
\min(|q| \rho_k, \sigma_k \sqrt{(1 - p) / p})`, :math:`1 \le M_k \le H_k`
(:mod:`otattn.stability.compression.exponential`), :math:`|N_k| \le \min(r_k M_k, a_k)` with :math:`a_k = \sqrt{\lambda_k}
\sigma_k (e^{u_k} - 1) / u_k`: the first as a mean, the second by :math:`N_k = E_k[\eta (e^s - 1)]`, Cauchy-Schwarz and
:math:`|e^s - 1| \le |s| (e^u - 1) / u`. Three bounds follow; the least counts (:math:`d_k = |v_k - m|`).

**The fraction.** :math:`|\Gamma_\mu - m| \le t` as soon as :math:`\sum_k P_k [ (M_k - 1)(d_k - t) + \min(r_k M_k, a_k) ] \le t`
for all :math:`M_k \in [1, H_k]`. The left side is at most

.. math:: G(t) = \sum_k P_k \min\big( r_k + (H_k - 1)(d_k + r_k - t)_+,\; a_k + (H_k - 1)(d_k - t)_+ \big),

which falls as t grows, so :math:`\max(t, G(t))` is a bound for every t, and near the root the best one.

**The second order.** The denominator is at least 1, :math:`N_k - E_k[\eta s] = E_k[\eta s^2 \chi(s)]`, and
:math:`|s| \chi(s) \le u \chi(u)`, so

.. math:: |\Gamma_\mu - m| \le \Big| \sum_k P_k \big( \tfrac12 \sigma_k^2 (v_k - m) + E_k[\eta s] \big) \Big| + \sum_k P_k
          \big[ |M_k - 1 - \tfrac12 \sigma_k^2| \, d_k + \chi(u_k) \sigma_k \min(r_k \sigma_k, \sqrt{\lambda_k}\, u_k) \big].

**The hull.** :math:`\Gamma_\mu` is a mean of values, so it is within :math:`\max_k (d_k + r_k)` of m.

All is evaluated in enclosed arithmetic: the bounds hold for the floats of map and measure, the centroids being exact ones
that no float needs to hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import EPS, Array, norm_upper, spectral_norm_upper
from otattn.attention.memory import blocks
from otattn.stability import functions
from otattn.stability.atoms import stack
from otattn.stability.compression.exponential import expansion
from otattn.stability.enclosed import UNIT, Enclosed, upward
from otattn.stability.transport_bounds import distance_bounds

__all__ = ["Cloud", "MergedHead", "lengths"]

Index = NDArray[np.intp]
HALVINGS = 60
"""Of the interval in which the root of ``G(t) = t`` lies."""


def most(x: Enclosed) -> Array:
    """An upper bound of the absolute values."""
    return upward(np.abs(x.high) + x.radius)


def lengths(x: Enclosed) -> Array:
    """Upper bounds of the Euclidean norms of the rows, inf where nothing is known."""
    size = distance_bounds(x, Enclosed.exact(np.zeros((1, x.shape[1]))))[1][:, 0]
    return np.nan_to_num(size, nan=np.inf)


def summed(P: Array, terms: Array) -> Array:
    """An upper bound of the row sums of products of non-negative numbers."""
    return upward(np.sum(P * terms, axis=1) * (1.0 + (P.shape[1] + 4.0) * UNIT))


@dataclass(frozen=True, eq=False)
class Cloud:
    """Atoms as a head sees them: keys and values enclosed, masses up to a factor, ``(1, n)``."""

    keys: Enclosed
    values: Enclosed
    masses: Enclosed

    def softmax(self, Q: Enclosed) -> tuple[Enclosed, Enclosed]:
        """Weights ``(m, n)`` and mean ``(m, e)`` at the queries; where rounding leaves no bound, all that is possible."""
        S = Q @ self.keys.T
        E = functions.exp(S - S.high.max(axis=1, keepdims=True)) * self.masses
        P = E / (E @ np.ones((E.shape[1], 1)))
        mean, values = P @ self.values, self.values
        low, high = (values.high - values.radius).min(axis=0), (values.high + values.radius).max(axis=0)
        middle = 0.5 * low + 0.5 * high
        reach = upward(np.maximum(high - middle, middle - low) + UNIT * (np.abs(low) + np.abs(high)))
        known = np.isfinite(P.high).all(axis=1) & (P.radius <= 0.5).all(axis=1)
        rows = np.logical_not(known & (mean.radius <= reach).all(axis=1))[:, None]
        P = Enclosed(np.where(rows, 0.5, P.high), None, np.where(rows, 0.5, P.radius))
        return P, Enclosed(np.where(rows, middle, mean.high), None, np.where(rows, reach, mean.radius))

    def merged(self, labels: Index) -> MergedHead:
        """The clusters ``labels (n,)``, which are 0, ..., k - 1 and none empty."""
        belongs = np.equal.outer(labels, np.arange(labels.max() + 1)).astype(np.float64)
        W = self.masses @ belongs
        shares = self.masses.T / W[0][labels][:, None]
        inside = Enclosed(belongs * self.masses.high.T, None, belongs * self.masses.radius.T).T
        centroids = [(inside @ part) / W.T for part in (self.keys, self.values)]
        several = (np.bincount(labels) > 1)[labels][:, None]
        y, eta = (
            (part - middle[labels]).where(np.broadcast_to(several, part.shape))
            for part, middle in zip((self.keys, self.values), centroids, strict=True)
        )
        rest = most((W[0][labels][:, None] - self.masses.T) / self.masses.T)[:, 0]
        odds = _largest(np.where(several[:, 0], np.sqrt(rest) * (1.0 + 4.0 * UNIT), 0.0), labels)
        norms = np.array([_weighted_norm(eta[labels == k], shares[labels == k]) for k in range(len(odds))])
        within = Enclosed(belongs * shares.high, None, belongs * shares.radius)
        radii = (_largest(lengths(y), labels), _largest(lengths(eta), labels))
        return MergedHead(Cloud(centroids[0], centroids[1], W), labels, y, eta, within, *radii, norms, odds)


def _largest(x: Array, labels: Index) -> Array:
    out = np.zeros(labels.max() + 1)
    np.maximum.at(out, labels, np.nan_to_num(x, nan=np.inf))
    return out


def _weighted_norm(eta: Enclosed, shares: Enclosed) -> float:
    """An upper bound of ``||diag(shares)^(1/2) eta||``, which grows with the shares."""
    if not (eta.bounded and shares.bounded):
        return np.inf
    root = np.sqrt(most(shares)) * (1.0 + 4.0 * UNIT)
    M = root * eta.high
    error = float(norm_upper(M)) * EPS + float(norm_upper(root * eta.radius)) * (1.0 + 4.0 * EPS)
    return float(upward(np.asarray(float(spectral_norm_upper(M)) + error)))


@dataclass(frozen=True, eq=False)
class MergedHead:
    """Centroids, and what is kept of the clusters (the names of the module's formulas)."""

    centroids: Cloud
    labels: Index
    y: Enclosed
    eta: Enclosed
    within: Enclosed
    """Shares of the atoms in their clusters, ``(n, k)``."""
    rho: Array
    r: Array
    root_lambda: Array
    odds: Array

    def bounds(self, Q: Enclosed) -> tuple[Array, Enclosed]:
        r"""Upper bounds of ``|Gamma_mu - m|`` at the queries ``(q, k)``, and m."""
        parts = [self._rows(Q[rows]) for rows in self._blocks(len(Q.high))]
        return np.concatenate([bound for bound, _ in parts]), stack([mean for _, mean in parts])

    def _blocks(self, m: int) -> Iterator[slice]:
        return blocks(m, len(self.labels), None, 16)

    def _rows(self, Q: Enclosed) -> tuple[Array, Enclosed]:
        P, mean = self.centroids.softmax(Q)
        s = Q @ self.y.T
        variance = (s * s) @ self.within
        top = most(variance)
        sigma = np.sqrt(top) * (1.0 + 4.0 * UNIT)
        u = upward(np.fmin(lengths(Q)[:, None] * self.rho, sigma * self.odds))
        d = upward(np.nan_to_num(distance_bounds(mean, self.centroids.values)[1], nan=np.inf))
        e = expansion(top, u)
        a = upward(self.root_lambda * sigma * e.growth)
        weight = np.minimum(most(P), 1.0)
        lead = self._lead(P, mean, s, variance)
        rest = upward(e.chi * sigma * np.minimum(self.r * sigma, self.root_lambda * u))
        taylor = upward(lead + summed(weight, upward(e.beyond * d + rest)))
        hull = upward((d + self.r).max(axis=1))
        found = np.stack([hull, _fraction(weight, e.excess, d, self.r, a, hull), taylor])
        return np.nan_to_num(found, nan=np.inf).min(axis=0), mean

    def _lead(self, P: Enclosed, mean: Enclosed, s: Enclosed, variance: Enclosed) -> Array:
        """``|sum_k P_k (sigma_k^2 (v_k - m) / 2 + E_k[eta s])|``."""
        T = P * variance
        first = (T @ self.centroids.values - (T @ np.ones((T.shape[1], 1))) * mean) * 0.5
        shares = (self.within @ np.ones((self.within.shape[1], 1))).T  # one entry a row is not 0
        return lengths(first + (P[:, self.labels] * shares * s) @ self.eta)


def _fraction(P: Array, H: Array, d: Array, r: Array, a: Array, hull: Array) -> Array:
    """``max(t, G(t))`` for t near the root."""

    def G(t: Array) -> Array:
        # (x - t)_+ of floats is rounded once, like the sums and products
        gap_r, gap_a = upward(d + r) - t[:, None], d - t[:, None]
        over_r = upward(r + np.where(gap_r > 0.0, H * gap_r, 0.0))
        over_a = upward(a + np.where(gap_a > 0.0, H * gap_a, 0.0))
        return summed(P, np.minimum(over_r, over_a))

    low, high = np.zeros(len(P)), hull.copy()
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        beyond = G(middle) > middle
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return np.maximum(high, G(high))
