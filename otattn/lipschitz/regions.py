r"""Token regions seen by a softmax form: radius, diameter, and the maxima that the bounds are made of.

Attention with logits ``<A x + c, y>`` does not see a translation: with ``x = z + b`` the logits are
``<A z + (A b + c), z'>`` up to terms constant in the key, so every region is centred first and the bias is
``c + A b``. All bounds hold on the convex hull of the domain, since tokens travel along segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist

from otattn import _validate as check
from otattn._linalg import spectral_norm_upper
from otattn.lipschitz.quadratic import balanced_minimum, column_exponent, max_norm_product, max_quadratic
from otattn.lipschitz.rounding import up
from otattn.lipschitz.setting import SoftmaxForm
from otattn.measures.domains import Ball, Box, Domain, Ellipsoid, PointSet

__all__ = ["Region", "Seen", "check_count", "resolve_domain", "see"]

Array = NDArray[np.float64]
VERTEX_LIMIT = 12
"""Boxes of up to this many dimensions are bounded through their vertices."""
PAIR_LIMIT = 700
"""Point sets of up to this many points are bounded through their pairs."""


def resolve_domain(radius: float | None, domain: Domain | None, dim: int | None) -> Domain:
    """The domain that one of ``radius`` and ``domain`` names, its dimension checked."""
    if (radius is None) == (domain is None):
        received = "neither" if radius is None else "both"
        raise ValueError(f"exactly one of radius and domain must be given, received {received}.")
    if radius is not None:
        return Ball(radius)
    if not isinstance(domain, Domain):
        raise ValueError(f"domain must be a Ball, Ellipsoid, LayerNormDomain, Box or PointSet, received {domain!r}.")
    if dim is not None and domain.dim is not None and domain.dim != dim:
        raise ValueError(f"domain must have dimension {dim} like the attention, received {domain.dim}.")
    return domain


@dataclass(frozen=True, eq=False)
class Region:
    """A domain in centred coordinates ``z = x - center``, inside ``{|z| <= radius}`` and ``E {|w| <= 1}``.

    ``half_diameter`` is at most ``radius``; ``shape`` is E (None for a ball: radius times the identity).
    """

    domain: Domain
    center: Array | None
    radius: float
    half_diameter: float
    shape: Array | None
    centred_points: Array | None = None

    @classmethod
    def of(cls, domain: Domain) -> Region:
        """The region of a domain, all lengths rounded outward."""
        if isinstance(domain, Ball):
            return cls(domain, None, domain.radius, domain.radius, None)
        if isinstance(domain, Ellipsoid):
            R = spectral_norm_upper(domain.shape)
            return cls(domain, domain.center, R, R, domain.shape)
        if isinstance(domain, Box):
            r = domain.half_widths
            R = up(float(np.linalg.norm(r)))
            return cls(domain, domain.center, R, R, np.diag(up(np.sqrt(domain.dim)) * r))
        assert isinstance(domain, PointSet)
        x = domain.points
        b = _enclosing_center(x)
        z = x - b
        R = up(float(np.linalg.norm(z, axis=1).max()))
        half = R
        if 1 < len(x) <= PAIR_LIMIT:
            half = min(R, up(0.5 * float(pdist(z).max())))
        elif len(x) == 1:
            half = 0.0
        return cls(domain, b, R, half, None, z)


@dataclass(frozen=True, eq=False)
class Seen:
    """A region as a form ``(A, c, V)`` sees it: the numbers of the bounds, each never below the exact one."""

    form: SoftmaxForm
    region: Region

    def with_values(self, V: Array | None) -> Seen:
        """The same head and region with other values ``V (e, d)``, whose rows lie in the span of the form's basis.

        None is the identity. What does not depend on V is not computed again.
        """
        if V is None:
            rows = np.eye(len(self.form.A))
        else:
            rows = V if self.form.basis is None else V @ self.form.basis
        form = replace(self.form, V=rows)
        form.__dict__["norm_A"] = self.form.norm_A
        out = Seen(form, self.region)
        out.__dict__.update({name: getattr(self, name) for name in ("shape", "bias", "G", "kappa")})
        return out

    @property
    def R(self) -> float:
        """Radius of the centred region."""
        return self.region.radius

    @property
    def v(self) -> float:
        """``||V||``."""
        return self.form.norm_V

    def _in(self, x: Array) -> Array:
        """Vectors of R^d (rows) in the coordinates of the form."""
        return x if self.form.basis is None else x @ self.form.basis

    @cached_property
    def shape(self) -> Array | None:
        """The ellipsoid's matrix in the coordinates of the form."""
        E = self.region.shape
        return None if E is None else self._in(E.T).T

    @cached_property
    def bias(self) -> Array | None:
        """``c + A b``, None when zero."""
        c = self.form.c
        if self.region.center is not None:
            shift = self.form.A @ self._in(self.region.center[None])[0]
            c = shift if c is None else c + shift
        return None if c is None or not np.any(c) else c

    @cached_property
    def G(self) -> float:
        """``max |A x + c|`` over the domain."""
        A, c = self.form.A, self.bias
        simple = self.form.norm_A * self.R + (0.0 if c is None else up(float(np.linalg.norm(c))))
        best = simple
        if self.shape is not None:
            B = A @ self.shape
            best = min(best, spectral_norm_upper(B) + (0.0 if c is None else up(float(np.linalg.norm(c)))))
            if c is not None:
                best = min(best, _affine_norm(B, c, 1.0))
        elif c is not None and self.region.centred_points is None:
            best = min(best, _affine_norm(A, c, self.R))
        if isinstance(self.region.domain, Box | PointSet):
            M = A if self.form.basis is None else A @ self.form.basis.T
            best = min(best, up(self.region.domain.max_affine_norm(M, self.form.c)))
        return best

    @cached_property
    def t(self) -> float:
        """``G`` times the half diameter: half the largest spread of a row's logits."""
        return up(self.G * self.region.half_diameter)

    @cached_property
    def t_ball(self) -> float:
        """``G R``, R the radius of the centred region."""
        return up(self.G * self.R)

    @cached_property
    def value_radius(self) -> float:
        """At least every standard deviation of ``<u, V x>``, ``|u| = 1``, under a measure on the domain."""
        best = self.v * self.region.half_diameter
        return best if self.shape is None else min(best, spectral_norm_upper(self.form.V @ self.shape))

    @cached_property
    def row_deviation(self) -> float:
        """``sup lambda_max( V (I + |g|^2 C) V^T )^{1/2}``; the square need not be representable."""
        return up(math.hypot(self.v, self.G * self.value_radius))

    @cached_property
    def sigma(self) -> float:
        r"""The field constant ``sup ||V C A||`` over covariances C of measures on the domain.

        A covariance on the ball is a mixture of ``R^2 u u^T`` below trace ``R^2`` and the norm is convex:
        the supremum is ``R^2 max |V u| |A^T u|``. On an ellipsoid ``C = E C' E^T``. On any set, for unit p
        and q, ``Cov(<p, V x>, <A q, x>) <= Var( sqrt(s) <p, V x> + <A q, x> / sqrt(s) ) / 4`` and a
        variance is at most a quarter of the squared range: ``sup <= max_delta ( sqrt(s) |V delta| + |A^T
        delta| / sqrt(s) )^2 / 16`` over differences delta of two points, a maximum at pairs of points or of
        vertices.
        """
        A, V = self.form.A, self.form.V
        domain = self.region.domain
        if self.shape is not None:
            best = max_norm_product(V @ self.shape, self.shape.T @ A)
        else:
            best = max_norm_product(V, A) * self.R**2
        if isinstance(domain, Box) and domain.dim <= VERTEX_LIMIT:
            # opposite vertices: half of the sign patterns is enough
            bits = np.arange(2 ** (domain.dim - 1))[:, None] >> np.arange(domain.dim) & 1
            corners = self._in((2.0 * bits - 1.0) * domain.half_widths)
            q1, q2 = np.linalg.norm(corners @ V.T, axis=1), np.linalg.norm(corners @ A, axis=1)
            best = min(best, balanced_minimum(q1, q2) / 4.0)
        z = self.region.centred_points
        if z is not None and len(z) == 1:
            return 0.0
        if z is not None and len(z) <= PAIR_LIMIT:
            y = self._in(z)
            slack = 1e-14 * self.R
            q1 = pdist(y @ V.T) + slack * self.v
            q2 = pdist(y @ A) + slack * self.form.norm_A
            best = min(best, balanced_minimum(q1, q2) / 16.0)
        return up(best)

    @cached_property
    def kappa(self) -> float:
        """``max <A x + c, y - x>`` over two points of the hull."""
        A, c = self.form.A, self.bias
        bounds = [2.0 * self.t]
        if self.shape is not None:
            E = self.shape
            bounds.append(column_exponent(E.T @ A @ E, None if c is None else E.T @ c, 1.0))
        if self.shape is None or isinstance(self.region.domain, Box):
            bounds.append(column_exponent(A, c, self.R) if self.R > 0 else 0.0)
        return min(bounds)


def see(form: SoftmaxForm, region: Region | Domain) -> Seen:
    """The numbers of a form on a domain."""
    return Seen(form, region if isinstance(region, Region) else Region.of(region))


def _affine_norm(B: Array, c: Array, R: float) -> float:
    """``max_{|x| <= R} |B x + c|``."""
    square = max_quadratic(B.T @ B, 2.0 * (B.T @ c), R) + up(float(c @ c))
    return up(float(np.sqrt(square)))


def _enclosing_center(x: Array) -> Array:
    """Centre of a nearly smallest enclosing ball (Badoiu-Clarkson steps; any centre is valid)."""
    b = 0.5 * (x.min(axis=0) + x.max(axis=0))
    best, radius = b, float(np.linalg.norm(x - b, axis=1).max())
    for k in range(1, 200):
        far = np.linalg.norm(x - b, axis=1)
        i = int(far.argmax())
        if far[i] < radius:
            best, radius = b, float(far[i])
        b = b + (x[i] - b) / (k + 1.0)
    return np.asarray(best)


def check_count(n: Any) -> int | None:
    """``n`` as a number of tokens, None for the mean-field constant."""
    return None if n is None else check.count(n, "n")
