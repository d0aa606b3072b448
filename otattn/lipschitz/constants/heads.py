"""Softmax heads, token domains enclosed by round ones, and what the theorems read of both on the unit ball."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from otattn import _validate as check
from otattn._linalg import EPS, Array, norm_upper, product_error, spectral_norm_upper
from otattn.attention.head import Head, check_sizes, heads_of
from otattn.lipschitz.arithmetic.balls import BallMatrix, arithmetic_of
from otattn.lipschitz.arithmetic.rounding import least, product, top, up
from otattn.lipschitz.certificate import Statement
from otattn.lipschitz.constants.quadratic import max_norm_product, products
from otattn.lipschitz.constants.regions import Region, Seen, see
from otattn.lipschitz.constants.rows import VALUES
from otattn.lipschitz.hypotheses import softmax
from otattn.lipschitz.theorem import resolve_domain
from otattn.measures import Ball, Domain, Ellipsoid, LayerNormDomain


class Round(NamedTuple):
    """The set ``{E z + center : |z| <= 1}``; ``radius >= ||E||``."""

    E: Any
    center: Array
    radius: float


def softmax_head(attention: Any, *, masked: bool | None = None, exact: bool = False) -> Head:
    """The head of a softmax attention; ``masked`` None accepts both kinds, True or False only that kind."""
    why = softmax(masked)(attention, None, None, 2.0)
    if why is not None:
        raise ValueError(f"{why}; otattn.theorems(attention, ...) lists the theorems that apply to it.")
    check_sizes(attention)
    return heads_of(attention, arithmetic=arithmetic_of(exact))[0]


def gradient_error(head: Head, center: Any, size: float) -> float:
    """What rounding did to ``A x + c`` within ``size`` of the centre b, ``A b + c`` made in floats."""
    shifted = product_error(head.A, center[:, None]) + head.shift + 4.0 * EPS * float(norm_upper(head.c))
    return shifted + head.lost * (size + float(norm_upper(center)))


def enclosing_round(domain: Domain, d: int, *, exact: bool = False) -> Round:
    """The domain itself when it is round, a ball around the middle of the box or of the points otherwise."""
    wrap: Any = BallMatrix.exact if exact else np.asarray
    if isinstance(domain, Ball):
        return Round(wrap(domain.radius * np.eye(d)), np.zeros(d), domain.radius)
    region = Region.of(domain, exact=exact)
    assert region.center is not None
    radius = top(region.radius)
    return Round(region.shape if isinstance(domain, Ellipsoid) else wrap(radius * np.eye(d)), region.center, radius)


@dataclass(frozen=True, eq=False)
class UnitNumbers:
    """What the theorems read of a softmax head and its domain, scaled to the unit ball.

    Attributes
    ----------
    A : ndarray (d, d)
        ``R^2`` times the form of the head (on the subspace that the head sees).
    c : ndarray (d,)
        Offset of ``g(z) = A z + c``.
    a, top : float
        ``||A||`` and an upper bound of ``max |g|``, outward.
    v, sigma : float
        ``||V||`` and an upper bound of ``||V C A||`` over covariances C of measures on the domain.
    trace_sigma : float
        ``sup ||V C A|| / tr C`` over all covariances (attained at rank one), at most ``v a``.
    kappa : float
        The exponent of the column sums.
    noise : float
        What rounding may have done to ``g`` on the ball: the exact gradient is within this of ``A z + c``.
    own : ndarray (d, d), optional
        The form of a token's logit with itself, ``<own z + own_shift, z>``, on an ellipsoid; by default A.
    own_shift : ndarray (d,), optional
        By default c.
    turn : float
        At most 1: for a unit u, ``<u, V x> = v R turn <w, z> + const``, ``|w| <= 1``. Below 1 on ellipsoids only, ``||V E|| / (v R)``:
        in the ball around another set, values of a small range may have a deviation that the spread of z does not bound.
    values : ndarray (k, d), optional
        V on the span that the head sees; on ellipsoids that keep their shape it is left out.
    loose : float
        What rounding may have done to norms of A and of values, a factor at least 1.

    In exact arithmetic the matrices are balls, the scalars intervals, and ``noise`` is 0.
    """

    A: Any
    c: Any
    a: Any
    top: Any
    v: Any
    sigma: Any
    trace_sigma: Any
    kappa: Any
    noise: float = 0.0
    own: Any = None
    own_shift: Any = None
    turn: Any = 1.0
    values: Any = None
    loose: float = 1.0

    @cached_property
    def reach(self) -> Array:
        """Upper bounds of ``|V e|^2 |A^T e|^2 / (v a)^2`` over unit vectors e with ``|V e|^2 / v^2`` in the cells of ``VALUES``."""
        return products(self.values / self.v, self.A / self.a, VALUES, loose=self.loose**8)

    @property
    def self_form(self) -> Any:
        """The form of a token's logit with itself."""
        return self.A if self.own is None else self.own

    @property
    def self_shift(self) -> Any:
        """Its linear part."""
        return self.c if self.own is None else self.own_shift

    @property
    def centred(self) -> bool:
        """True when ``g`` is linear."""
        return not self.c.any()

    @property
    def exact(self) -> bool:
        """True for ball and interval arithmetic."""
        return isinstance(self.A, BallMatrix)


def unit_numbers(
    attention: Any, domain: Domain | float, *, masked: bool | None = False, exact: bool = False, shaped: bool = False
) -> UnitNumbers:
    """The head of a :class:`SoftmaxAttention` with its tokens scaled to the unit ball.

    ``masked`` says which are accepted, None both kinds; under a mask kappa bounds no column sums and is inf.

    Every domain is enclosed by a ball: an ellipsoid ``E z + b`` by the ball of radius ``||E||`` around b, a box or a
    finite set by a ball around a centre of it. A constant on the ball bounds the constant on the domain; the scalars
    ``top, sigma, kappa`` are those of the domain itself where they are sharper.

    ``shaped`` keeps the shape of an ellipsoid ``E z + b``: then ``g(z) = A z + c`` with ``|z| <= 1`` is still R times the
    gradient, A is ``R`` times the form times E, ``own = E^T (form) E``, and ``trace_sigma`` is for covariances of z.
    """
    region = resolve_domain(None, domain if isinstance(domain, Domain) else Ball(domain), attention.in_dim)
    form = softmax_head(attention, masked=masked, exact=exact).on_span(ball=isinstance(region, Ball))
    seen = see(form, region)
    # the unit of length is a float at or above the radius
    R = top(seen.R)
    if shaped and isinstance(region, Ellipsoid | LayerNormDomain):
        return _shaped(form, seen, R, exact)
    A = form.A * R * R
    bias = seen.bias
    if bias is None:
        c: Any = BallMatrix.exact(np.zeros(len(A))) if exact else np.zeros(len(A))
    else:
        c = R * bias
    loose = 1.0 + form.error
    a = spectral_norm_upper(A) * loose
    trace_sigma = least(product(max_norm_product(form.V, A), loose * loose), up(product(seen.v, a)))
    if not exact:
        A, c = check.frozen(A), check.frozen(c)
    # two roundings in each entry of A, one in those of c
    rounded = 0.0 if exact else EPS * (float(norm_upper(c)) + 4.0 * float(norm_upper(A)))
    return UnitNumbers(
        A,
        c,
        a,
        up(product(seen.G, R)),
        seen.v,
        least(seen.sigma, trace_sigma),
        trace_sigma,
        math.inf if form.causal else seen.kappa,
        0.0 if exact else R * seen.bias_error + form.error * a + rounded,
        values=form.V,
        loose=loose,
    )


def _shaped(form: Head, seen: Seen, R: float, exact: bool) -> UnitNumbers:
    """The numbers on an ellipsoid, in the coordinates of its unit ball."""
    E: Any = seen.shape
    bias: Any = seen.bias
    rounded = 0.0
    if not exact:
        # only E z counts: in an orthonormal basis of the span of its rows
        rounded = 64.0 * max(E.shape) ** 1.5 * EPS
        E = np.asarray(np.linalg.qr(E.T, mode="r")).T
    A, own = form.A @ E * R, E.T @ form.A @ E
    zero: Any = BallMatrix.exact(np.zeros(len(form.A))) if exact else np.zeros(len(form.A))
    c = zero if bias is None else bias * R
    shift = E.T @ (zero if bias is None else bias)
    loose = 1.0 + form.error + rounded
    a = up(spectral_norm_upper(form.A) * R * R * loose)
    noise = 0.0 if exact else R * seen.bias_error + (form.error + 2.0 * rounded) * (a + float(norm_upper(c)))
    top_gradient = up(product(seen.G, R))
    kappa = math.inf if form.causal else seen.kappa
    turn = 1.0 if R == 0.0 or top(seen.v) < 1e-290 else least(1.0, up(seen.value_radius / seen.v / R))
    if not exact:
        A, own, c, shift = (check.frozen(x) for x in (A, own, c, shift))
    return UnitNumbers(A, c, a, top_gradient, seen.v, seen.sigma, seen.sigma, kappa, noise, own, shift, turn)


def numbers_of(statement: Statement, *, masked: bool | None = False, shaped: bool = False) -> UnitNumbers:
    """The head of a certificate's statement."""
    return unit_numbers(statement.attention, statement.domain, masked=masked, exact=statement.exact, shaped=shaped)
