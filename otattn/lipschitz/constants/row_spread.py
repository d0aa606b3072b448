r"""The largest variance of a row in one direction, from the norm of its token and its weight on itself.

Notation of :mod:`otattn.lipschitz.upper.psd`. Let g be ``A x_i``, ``xi_k`` the component of ``x_k`` along g, ``q = P_ii`` and
``h = |y_i|``. As ``<g, x_k> = |g| xi_k``, ``<g, x_i> = a h^2`` and ``a h / sqrt(stretch) <= |g| <= a h``,

.. math:: P_{ik} = q\, e^{|g| \xi_k - a h^2} \le q\, w(\xi_k), \qquad
          w(\xi) = e^{a (h \xi_+ - h \xi_- / \sqrt{stretch} - h^2)} :

a token far from the top of the row has little weight, and there are ``n - 1`` others. A unit vector is, up to its sign, ``c g/|g| + s
e`` with ``c = cos psi, s = sin psi >= 0`` and a unit vector e orthogonal to g, where ``|<x_k,e>| <= (1 - xi_k^2)^{1/2}``. A variance
is at most the second moment about any point: for every m,

.. math:: Var_{P_i}\langle u, x\rangle \le f(\psi) = q (c A_i + s B_i)^2 + \sum_{k \ne i} P_{ik} (c A(\xi_k) + s B(\xi_k))^2 ,
          \qquad A(\xi) = |\xi - m|, \quad B(\xi) = \sqrt{1 - \xi^2} ,

``A_i`` the largest ``|xi_i - m|``, ``h <= xi_i <= min(1, h sqrt(stretch))``; ``B_i^2 = z(h) - h^2``, ``z(h) >= |x_i|^2``. For every
``eta >= 0``, as the others have the mass ``1 - q``,

.. math:: f(\psi) \le q (c A_i + s B_i)^2 + \eta (1 - q) + (n - 1)\, q \max_\xi w(\xi) \bigl[(c A(\xi) + s B(\xi))^2 - \eta\bigr]_+ ,

which is affine in q. For a fixed e the variance is a positive semidefinite form in ``(c, s)``, so ``mid + rho cos 2 (psi - psi*)``
with ``mid >= rho >= 0``; psi* lies between 0 and ``pi/2`` if the sign of e makes its covariance with xi not negative. At an angle
within ``step/2`` of psi* it is at least ``mid + rho cos(step) >= (mid + rho) cos^2(step/2)``. So the largest of the bounds at the
angles ``0, step, ..., pi/2``, over ``cos^2(step/2)``, bounds the variance in every direction, the largest eigenvalue of ``C_i``. The
points m and the numbers eta may be any, others at each angle.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import top

_H, _Q, _XI, _ANGLES = 64, 64, 192, 17
"""Cells of h, q and xi, and angles."""
_ABOUT = np.linspace(0.0, 0.9, 10)
"""The points m that are tried."""
_ETAS = np.linspace(0.0, 1.5, 31)
_LEVELS = 4
_USEFUL = 12.0
"""Beyond this ``||A|| R^2`` the trace is no larger."""
_ROUNDED = 1e-11
"""Above what rounding can take from a variance, which is at most one."""


class Spread:
    """The largest variance on ranges of ``(h, log q)``, from a table; one for h below one half, where the trace says no less.

    Parameters
    ----------
    a, stretch : float or Interval
        As in :class:`~otattn.lipschitz.upper.psd_rows.Rows`.
    n : int
        Number of tokens.
    least : float
        Below every ``log q``.
    """

    def __init__(self, a: Any, stretch: Any, n: int, least: float) -> None:
        self.least = least
        if top(a) > _USEFUL:
            # no less than the trace
            self.levels = np.ones((_LEVELS + 2, _H, _Q))
            return
        table = np.asarray(upper(_Moments.of(a, stretch, n).table(np.linspace(least, 0.0, _Q + 1))))
        table = np.minimum(table + _ROUNDED, 1.0)
        levels = [table]
        for k in range(_LEVELS):
            wide = np.pad(levels[-1], (0, 2**k), mode="edge")
            # windows of 2, 3, 5, 9 cells: they hold the ranges from a cell to the 1st, 2nd, 4th, 8th beyond it
            shift = 2 ** max(k - 1, 0)
            parts = [wide[i : i + _H, j : j + _Q] for i in (0, shift) for j in (0, shift)]
            levels.append(np.max(parts, axis=0))
        self.levels = np.array([*levels, np.ones_like(table)])

    def __call__(self, h: tuple[Array, Array], lq: tuple[Array, Array]) -> Array:
        """Upper bound for every row with ``h`` and ``log q`` in these ranges."""
        x = [np.clip(2.0 * v - 1.0, 0.0, 1.0) * _H for v in h]
        y = [np.clip(1.0 - v / self.least, 0.0, 1.0) * _Q for v in lq]
        (i0, i1), (j0, j1) = _cells(x, _H), _cells(y, _Q)
        span = np.maximum(i1 - i0, j1 - j0)
        level = np.searchsorted([0, *(2 ** np.arange(_LEVELS))], span)
        return np.where(h[0] < 0.5, 1.0, self.levels[level, i0, j0])


def _cells(x: list[Array], size: int) -> list[Array]:
    """First and last cell of ranges, outward by far more than the rounding of x."""
    return [np.clip(np.floor(v), 0, size - 1).astype(int) for v in (x[0] - 1e-9, x[1] + 1e-9)]


@lru_cache(maxsize=16)
def spread_of(a: float, stretch: float, n: int, least: float) -> Spread:
    """The same table for the same numbers."""
    return Spread(a, stretch, n, least)


class _Moments(NamedTuple):
    """What second moments are made of, on the cells of h.

    ``weight (_H, _XI)``: the largest w on the cells of xi, which have the given ``ends``. ``own``: the ends of ``xi_i (_H,)``.
    ``own_across``: the largest ``B_i``.
    """

    n: int
    exact: bool
    weight: Any
    ends: tuple[Array, Array]
    own: tuple[Any, Any]
    own_across: Any

    @classmethod
    def of(cls, a: Any, stretch: Any, n: int) -> _Moments:
        """From the numbers of a head."""
        exact = is_interval(a)
        wrap: Any = lift if exact else np.asarray
        h0, h1 = (wrap(x) for x in (0.5 + 0.5 * np.arange(_H) / _H, 0.5 + 0.5 * np.arange(1, _H + 1) / _H))
        xi = np.linspace(-1.0, 1.0, _XI + 1)
        finite = math.isfinite(float(upper(stretch)))
        root = np.sqrt(wrap(stretch)) if finite else wrap(1.0)
        y = np.where(xi[1:] >= 0, wrap(xi[1:]), wrap(xi[1:]) / root if finite else wrap(np.zeros(_XI)))
        peak = np.clip(0.5 * y, h0[:, None], h1[:, None])
        weight = np.exp(a * (peak * y - peak**2))
        most = np.minimum(1.0, h1 * root) if finite else wrap(np.ones(_H))
        # z(h) - h^2
        square = np.minimum(1 - h0**2, (wrap(stretch) - 1) * h1**2) if finite else 1 - h0**2
        across = np.sqrt(np.maximum(square, 0.0))
        return cls(n, exact, weight, (xi[:-1], xi[1:]), (h0, most), across)

    def table(self, log_q: Array) -> Any:
        """The bound on the cells of h and of log q ``(_H, _Q)``."""
        chosen = self.choice(log_q)
        wrap: Any = lift if self.exact else np.asarray
        q, step = np.exp(wrap(log_q)), 0.5 * math.pi / (_ANGLES - 1)
        worst = wrap(np.zeros((_H, _Q)))
        rows = np.arange(_H)
        for k in range(_ANGLES):
            about, eta = chosen[0][k], chosen[1][k]
            value = wrap(np.zeros((_H, _Q)))
            for j in range(_Q):
                single, beyond = self.parts(k * step, about[:, j], eta[:, j], rows)
                at = [single * x + eta[:, j] * (1 - x) + (self.n - 1) * x * beyond for x in (q[j], q[j + 1])]
                value[:, j] = np.maximum(*at)
            worst = np.maximum(worst, value)
        return worst / np.cos(wrap(0.5 * step)) ** 2

    def parts(self, psi: float, about: Any, eta: Any, rows: Any) -> tuple[Any, Any]:
        """The square of the own token, and ``max w [(c A + s B)^2 - eta]_+``, for cells of h ``rows``, m and eta."""
        wrap: Any = lift if self.exact else np.asarray
        c, s = np.maximum(np.cos(wrap(psi)), 0.0), np.sin(wrap(psi))
        m, (x0, x1) = wrap(about), (wrap(x) for x in self.ends)
        along = np.maximum(np.abs(x0 - m[..., None]), np.abs(x1 - m[..., None]))
        across = np.sqrt(1 - np.minimum(x0**2, x1**2))
        square = (c * along + s * across) ** 2
        beyond = (self.weight[rows] * np.maximum(square - wrap(eta)[..., None], 0.0)).max(axis=-1)
        near, far = (x[rows] for x in self.own)
        single = (c * np.maximum(np.abs(near - m), np.abs(far - m)) + s * self.own_across[rows]) ** 2
        return single, beyond

    def choice(self, log_q: Array) -> tuple[Array, Array]:
        """A good m and eta for each angle and cell ``(_ANGLES, _H, _Q)``; nothing is proved here."""
        flat = self._replace(
            exact=False,
            weight=_float(self.weight),
            own=(_float(self.own[0]), _float(self.own[1])),
            own_across=_float(self.own_across),
        )
        q, step = np.exp(0.5 * (log_q[1:] + log_q[:-1])), 0.5 * math.pi / (_ANGLES - 1)
        about, etas, rows = np.zeros((_ANGLES, _H, _Q)), np.zeros((_ANGLES, _H, _Q)), np.arange(_H)
        for k in range(_ANGLES):
            best = np.full((_H, _Q), np.inf)
            for m in _ABOUT:
                for eta in _ETAS:
                    single, beyond = flat.parts(k * step, np.full(_H, m), np.full(_H, eta), rows)
                    value = single[:, None] * q + eta * (1 - q) + (self.n - 1) * q * beyond[:, None]
                    better = value < best
                    best = np.where(better, value, best)
                    about[k], etas[k] = np.where(better, m, about[k]), np.where(better, eta, etas[k])
        return about, etas


def _float(x: Any) -> Array:
    return np.asarray(0.5 * (lower(x) + upper(x)))
