r"""Token regions seen by a softmax form: radius, diameter, and the maxima that the bounds are made of.

Attention with logits ``<A x + c, y>`` does not see a translation: with ``x = z + b`` the logits are
``<A z + (A b + c), z'>`` up to terms constant in the key, so every region is centred first and the bias is
``c + A b``. All bounds hold on the convex hull of the domain, since tokens travel along segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.spatial.distance import pdist

from otattn._linalg import EPS, Array, norm_upper, product_error, spectral_norm_upper
from otattn.attention.head import Head
from otattn.lipschitz.arithmetic.balls import BallMatrix, arithmetic_of
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import is_zero, least, product, top, up
from otattn.lipschitz.constants.quadratic import affine_norm, balanced_minimum, column_exponent, max_norm_product
from otattn.measures.domains import Ball, Box, Domain, Ellipsoid, PointSet
from otattn.measures.shape import enclosing_center

VERTEX_LIMIT = 12
"""Boxes of up to this many dimensions are bounded through their vertices."""
PAIR_LIMIT = 700
"""Point sets of up to this many points are bounded through their pairs."""


@dataclass(frozen=True, eq=False)
class Region:
    """A domain in centred coordinates ``z = x - center``, inside ``{|z| <= radius}`` and ``E {|w| <= 1}``.

    ``half_diameter`` is at most ``radius``; ``shape`` is E (None for a ball: radius times the identity), ``reach`` the half
    widths of a box. All lengths are rounded outward, or intervals in exact arithmetic.
    """

    domain: Domain
    center: Any
    radius: Any
    half_diameter: Any
    shape: Any | None
    centred_points: Any | None = None
    reach: Any = None
    exact: bool = False

    @classmethod
    def of(cls, domain: Domain, *, exact: bool = False) -> Region:
        """The region of a domain."""
        wrap: Any = BallMatrix.exact if exact else np.asarray
        if isinstance(domain, Ball):
            radius = lift(domain.radius) if exact else domain.radius
            return cls(domain, None, radius, radius, None, exact=exact)
        if isinstance(domain, Ellipsoid):
            shape = wrap(domain.shape)
            R = spectral_norm_upper(shape)
            return cls(domain, domain.center, R, R, shape, exact=exact)
        if isinstance(domain, Box):
            b, r = domain.center, _half_widths(domain)
            R = norm_upper(wrap(r))
            # any float matrix that is large enough will do; the step counts for subnormal widths
            sides = np.where(r > 0.0, np.nextafter(up(np.sqrt(domain.dim)) * r, np.inf), 0.0)
            return cls(domain, b, R, R, wrap(np.diag(sides)), reach=r, exact=exact)
        if not isinstance(domain, PointSet):
            raise ValueError(
                f"domain must be a Ball, Ellipsoid, LayerNormDomain, Box or PointSet, received {domain!r}."
            )
        x = domain.points
        b = enclosing_center(x)
        z = lift(x) - b if exact else x - b
        sizes = np.sqrt((z * z).sum(axis=1)) if exact else np.linalg.norm(z, axis=1)
        # the differences were rounded once
        R = sizes.max() if exact else up(float(sizes.max()))
        half = R
        if 1 < len(x) <= PAIR_LIMIT:
            half = least(R, up(0.5 * _pair_lengths(z).max()))
        elif len(x) == 1:
            half = 0.0 * R
        return cls(domain, b, R, half, None, z, exact=exact)


def _half_widths(domain: Box) -> Array:
    """Distances from the centre that the sides reach, rounded outward; 0 where the sides meet."""
    b = domain.center
    r = np.maximum(domain.upper - b, b - domain.lower)
    return np.where(r > 0.0, np.nextafter(r, np.inf), 0.0)


def _pair_lengths(y: Any) -> Any:
    """The lengths of all differences of two rows."""
    if isinstance(y, np.ndarray):
        return pdist(y)
    i, j = np.triu_indices(len(y), 1)
    d = y[i] - y[j]
    return np.sqrt((d * d).sum(axis=1))


def _intervals(M: Any) -> Any:
    """A ball matrix as an interval matrix, an array as it is."""
    return M.interval() if isinstance(M, BallMatrix) else M


@dataclass(frozen=True, eq=False)
class Seen:
    """A region as a form ``(A, c, V)`` sees it: the numbers of the bounds, each never below the exact one.

    What rounding does to the preliminaries (``c + A b``, ``A E``, ``V E``, ``E^T A E``) is added to the numbers, since it
    may be all that is left of them when terms cancel; in exact arithmetic it is zero.
    """

    form: Head
    region: Region

    def with_values(self, V: Array | None) -> Seen:
        """The same head and region with other values ``V (e, d)``, whose rows lie in the span of the form's basis.

        None is the identity. What does not depend on V is not computed again.
        """
        rows = V if V is None or self.form.basis is None else self.form.arithmetic.matrix(V) @ self.form.basis
        out = Seen(self.form.with_values(rows), self.region)
        out.__dict__.update({name: getattr(self, name) for name in ("shape", "bias", "bias_error", "G", "kappa")})
        return out

    @property
    def domain(self) -> Domain:
        """The domain itself."""
        return self.region.domain

    @property
    def R(self) -> Any:
        """Radius of the centred region."""
        return self.region.radius

    @property
    def v(self) -> Any:
        """``||V||``."""
        return self.form.norm_V

    def _in(self, x: Any) -> Any:
        """Vectors of R^d (rows) in the coordinates of the form."""
        return x if self.form.basis is None else x @ self.form.basis

    def _points(self, x: Any) -> Any:
        """The same for interval arrays or arrays of points."""
        return x if self.form.basis is None else x @ _intervals(self.form.basis)

    @cached_property
    def shape(self) -> Any | None:
        """The ellipsoid's matrix in the coordinates of the form."""
        E = self.region.shape
        return None if E is None else self._in(E.T).T

    @cached_property
    def bias(self) -> Any | None:
        """``c + A b``, None when zero."""
        c = self.form.c
        if self.region.center is not None and np.any(self.region.center):
            c = c + self.form.A @ self._center
        return None if not c.any() and is_zero(self.bias_error) else c

    @cached_property
    def _center(self) -> Any:
        b = self.region.center
        if self.form.exact:
            return self._in(BallMatrix.exact(b[None]))[0]
        return self._in(b[None])[0]

    @cached_property
    def bias_error(self) -> float:
        """What rounding may have added to :attr:`bias`."""
        if self.form.exact:
            return 0.0
        error = self.form.shift
        if self.region.center is not None:
            b = self.region.center
            error += 2.0 * product_error(self.form.A, self._center[:, None])
            error += self.form.error * top(self.form.norm_A) * norm_upper(b)
            if self.form.basis is not None:
                error += top(self.form.norm_A) * 2.0 * product_error(b[None], self.form.basis)
            error += 4.0 * EPS * norm_upper(self.form.c)
        return error

    def _error(self, left: Any, right: Any) -> float:
        """What rounding may have added to a product of two matrices, with that of the form before it."""
        rounded = 2.0 * product_error(left, right)
        return rounded + self.form.error * float(norm_upper(left)) * float(norm_upper(right)) if rounded else 0.0

    @cached_property
    def _bias_norm(self) -> Any:
        return self.bias_error if self.bias is None else norm_upper(self.bias) + self.bias_error

    @cached_property
    def G(self) -> Any:
        """``max |A x + c|`` over the domain."""
        A, c = self.form.A, self.bias
        best = self.form.norm_A * self.R + self._bias_norm
        if self.shape is not None:
            B = A @ self.shape
            rounded = self._error(A, self.shape)
            best = least(best, spectral_norm_upper(B) + rounded + self._bias_norm)
            if c is not None:
                best = least(best, affine_norm(B, c, 1.0) + rounded + self.bias_error)
        elif c is not None and self.region.centred_points is None:
            best = least(
                best, affine_norm(A, c, self.R) + self.bias_error + self.form.error * self.form.norm_A * self.R
            )
        if self.region.reach is not None or self.region.centred_points is not None:
            best = least(best, self._extreme_gradient())
        return up(best)

    def _extreme_gradient(self) -> Any:
        """The same for a box, row by row, or for a finite set, point by point."""
        A = _intervals(self.form.A)
        zero = np.zeros(len(A)) if self.bias is None else _intervals(self.bias)
        if self.region.reach is None:
            z = self._points(self.region.centred_points)
            rows = z @ A.T + zero
            sizes = np.sqrt((rows * rows).sum(axis=1)).max()
            rounded = 0.0 if self.form.exact else self._error(z, A.T)
        else:
            # on the form's coordinates the box is the image of a box
            M = A if self.form.basis is None else A @ _intervals(self.form.basis).T
            rows = np.abs(zero) + np.abs(M) @ self.region.reach
            sizes = np.sqrt((rows * rows).sum())
            rounded = 0.0 if self.form.exact else self._error(np.abs(M), self.region.reach[:, None])
        return up(sizes) + rounded + self.bias_error

    @cached_property
    def t(self) -> Any:
        """``G`` times the half diameter: half the largest spread of a row's logits."""
        return up(product(self.G, self.region.half_diameter))

    @cached_property
    def t_ball(self) -> Any:
        """``G R``, R the radius of the centred region."""
        return up(product(self.G, self.R))

    @cached_property
    def value_radius(self) -> Any:
        """At least half the range of every ``<u, V x>``, ``|u| = 1``, on the domain: so no standard deviation is larger."""
        best = product(self.v, self.region.half_diameter)
        lengths = None if is_zero(best) else self._extreme_lengths(self.form.V)
        if lengths is not None:
            best = least(best, up(lengths.max()) * (0.5 if self.region.reach is None else 1.0))
        if self.shape is None:
            return best
        return least(best, spectral_norm_upper(self.form.V @ self.shape) + self._error(self.form.V, self.shape))

    @cached_property
    def t_values(self) -> Any:
        """``G value_radius / v``, never above `t`: half the largest spread of logits and of values, in units of ``v``."""
        # values near the least float have lost their digits
        if top(self.v) < 1e-290:
            return self.t
        return least(self.t, up(product(self.G, self.value_radius / self.v)))

    @cached_property
    def row_deviation(self) -> Any:
        """``sup lambda_max( V (I + |g|^2 C) V^T )^{1/2}``; the square need not be representable."""
        return up(np.hypot(self.v, product(self.G, self.value_radius)))

    @cached_property
    def sigma(self) -> Any:
        r"""The field constant ``sup ||V C A||`` over covariances C of measures on the domain.

        A covariance on the ball is a mixture of ``R^2 u u^T`` below trace ``R^2`` and the norm is convex:
        the supremum is ``R^2 max |V u| |A^T u|``. On an ellipsoid ``C = E C' E^T``. On any set, for unit p
        and q, ``Cov(<p, V x>, <A q, x>) <= Var( sqrt(s) <p, V x> + <A q, x> / sqrt(s) ) / 4`` and a
        variance is at most a quarter of the squared range: ``sup <= max_delta ( sqrt(s) |V delta| + |A^T
        delta| / sqrt(s) )^2 / 16`` over differences delta of two points, a maximum at pairs of points or of
        vertices.
        """
        form, z = self.form, self.region.centred_points
        if z is not None and len(z) == 1:
            return 0.0
        if self.shape is not None:
            values, keys = form.V @ self.shape, self.shape.T @ form.A
            error = self._error(form.V, self.shape), self._error(self.shape.T, form.A)
            best = max_norm_product(values, keys)
            if max(error) > 0.0:
                size = spectral_norm_upper(values), spectral_norm_upper(keys)
                best = best + size[0] * error[1] + size[1] * error[0] + error[0] * error[1]
        else:
            # lengths first: the product of two small matrices may not be a float
            R = top(self.R)
            best = product(max_norm_product(form.V * R, form.A * R), (1.0 + 2.0 * form.error) ** 2)
        q1, q2 = self._extreme_lengths(form.V), self._extreme_lengths(form.A.T)
        if q1 is not None and q2 is not None:
            best = least(best, product(balanced_minimum(q1, q2), 1.0 / 16.0 if self.region.reach is None else 0.25))
        return up(best)

    def _extreme_lengths(self, M: Any) -> Any | None:
        """``|M d|`` over the differences d of two points, or over the vertices d of a centred box; None where they are many."""
        domain, M = self.region.domain, _intervals(M)
        if isinstance(domain, Box) and domain.dim <= VERTEX_LIMIT:
            # opposite vertices: half of the sign patterns is enough
            bits = np.arange(2 ** (domain.dim - 1))[:, None] >> np.arange(domain.dim) & 1
            corners = self._points((2.0 * bits - 1.0) * self.region.reach)
            images = corners @ M.T
            lengths = np.sqrt((images * images).sum(axis=1))
        elif self.region.centred_points is not None and len(self.region.centred_points) <= PAIR_LIMIT:
            corners = self._points(self.region.centred_points)
            lengths = _pair_lengths(corners @ M.T)
        else:
            return None
        if self.form.exact:
            return lengths
        # the images of the points were rounded, and so were the points
        noise = 8.0 * (corners.shape[1] + 4) * EPS * float(norm_upper(np.abs(corners).max(axis=0)))
        return lengths + noise * norm_upper(M)

    @cached_property
    def kappa(self) -> Any:
        """``max <A x + c, y - x>`` over two points of the hull."""
        A, c = self.form.A, self.bias
        bounds = [2.0 * self.t]
        if self.shape is not None:
            E = self.shape
            left = E.T @ A
            value = column_exponent(left @ E, None if c is None else E.T @ c, 1.0)
            rounded = self._error(left, E) + self._error(E.T, A) * float(norm_upper(E)) if not self.form.exact else 0.0
            if c is not None:
                rounded += 0.0 if self.form.exact else 2.0 * product_error(E.T, c[:, None])
            bounds.append(value + 2.0 * rounded + 2.0 * self.bias_error * self.R)
        if self.shape is None or isinstance(self.region.domain, Box):
            value = column_exponent(A, c, self.R)
            loose = 2.0 * self.form.error * self.form.norm_A * self.R * self.R + 2.0 * self.bias_error * self.R
            bounds.append(value + loose)
        return least(*bounds)


def largest_norm(domain: Domain, *, exact: bool = False) -> Any:
    """``max |x|`` over the domain, from the origin."""
    if isinstance(domain, Ball):
        return lift(domain.radius) if exact else up(domain.radius)
    identity = np.eye(domain.dim or 1)
    return Seen(Head.of(None, identity, identity, arithmetic=arithmetic_of(exact)), Region.of(domain, exact=exact)).G


def see(form: Head, region: Region | Domain) -> Seen:
    """The numbers of a form on a domain."""
    return Seen(form, region if isinstance(region, Region) else Region.of(region, exact=form.exact))
