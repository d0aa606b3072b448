r"""What a row of softmax attention can see: the logit of a token with itself, and the spread of its row.

Everything is scaled to the unit ball: tokens are ``x = center + R z`` with ``|z| <= 1``, logits ``<g(z), z'>`` with
``g(z) = A z + c`` (a shift of all tokens only changes the vector c, up to terms that the softmax cancels), and
``a = ||A||`` is the dimensionless ``||A|| R^2`` of the closed forms.

**The self-logit inequality.** For every real nu, every ``lam > lambda_max(nu A^T A - S)`` with ``S = (A + A^T)/2``, and
every z, with ``b = c - 2 nu A^T c``,

.. math:: \langle g(z), z\rangle \;\ge\; \nu |g(z)|^2 - \lambda |z|^2 - \nu |c|^2
          - \tfrac14 b^T (\lambda I - \nu A^T A + S)^{-1} b .

On an ellipsoid the logit of a token with itself is ``<F z + f, z>`` with another form, ``F = E^T A' E``, and gradient norm
``|A z + c|``: the same with ``S = (F + F^T)/2`` and ``b = f - 2 nu A^T c``.

Proof: ``<g,z> - nu |g|^2 + lam |z|^2 = z^T (S - nu A^T A + lam I) z + b^T z - nu |c|^2`` is a convex quadratic in z;
its minimum is attained at ``-(...)^{-1} b / 2``. (For c = 0, ``lam = lambda_max`` itself is allowed.) The bound is
affine in ``|g|^2`` and in ``|z|^2``, so its minimum over a cell ``|g| in [g0, g1], |z| in [r0, r1]`` sits at a corner.

**Self-token entropy.** In row i let ``pi = P_ii``. ``E_P l = log Z - H(P)``, ``log Z = l_ii - log pi`` and
``H(P) <= h(pi) + (1 - pi) log(n-1)``, so ``E_P l >= l_ii - (1 - pi) [logit pi + log(n-1)]``. With ``s = logit pi`` the
subtracted term is ``(s + L)/(1 + e^s)``, ``L = log(n-1)``; its maximum solves ``e^{-s} = s + L - 1 =: w``, that is
``w e^w = (n-1)/e``, and equals w. Hence ``<g_i, m_i> = E_P l >= <g_i, z_i> - tau_n``, ``tau_n = W_0((n-1)/e)``, and

.. math:: \lambda_{\max}(C_i) \le \operatorname{tr} C_i \le 1 - |m_i|^2
          \le 1 - \bigl((\langle g_i, z_i\rangle - \tau_n)_+ / |g_i|\bigr)^2 .

**Barycentres.** A measure alpha on the ball of mean xbar has ``E|g_x|^2 = |g(xbar)|^2 + E|A (x - xbar)|^2 <= |g(xbar)|^2 + a^2 (1 -
|xbar|^2)``; the self-logit inequality bounds ``f(xbar) = |g(xbar)| - <g(xbar),xbar>``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import lambertw

from otattn._linalg import EPS, Array, bordered, mid, norm_upper
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.balls import BallMatrix, proves_psd
from otattn.lipschitz.arithmetic.intervals import lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.certificate import multiplier
from otattn.lipschitz.constants.cells import boxes, ends
from otattn.lipschitz.constants.heads import UnitNumbers

_LARGEST = 1e15
"""Of ``|nu| ||A||``: useful ones are below 1e3, and infinite products would compare as nothing."""


@dataclass(frozen=True, eq=False)
class SelfLogit:
    """A family of lower bounds ``<g,z> >= nu |g|^2 - lam |z|^2 - const``, all valid for every z in R^d.

    ``nu`` and ``gap`` are the multipliers, from which :meth:`build` computes ``lam`` and ``const``: they are a certificate.
    """

    nu: Array
    gap: Array
    lam: Array
    const: Array

    @classmethod
    def build(cls, head: UnitNumbers, nu: Array, gap: Array) -> SelfLogit:
        """The family at ``nu`` with ``lam = lambda_max(nu A^T A - S) + gap`` (``gap`` >= 0; ignored when c = 0).

        ``lam`` and ``const`` are floats; in exact arithmetic each pair is proved, raised where it must be.
        """
        A, F = mid(head.A), mid(head.self_form)
        S, M = 0.5 * (F + F.T), A.T @ A
        a = top(head.a)
        nu, gap = np.broadcast_arrays(np.atleast_1d(nu).astype(float), np.atleast_1d(gap).astype(float))
        slack = 16 * len(S) * EPS * (np.abs(nu) * a**2 + a)
        # g within noise of A z + c moves <g, z> by at most noise, and |g|^2 by noise (2 |g| + noise)
        loose = head.noise * (1.0 + np.abs(nu) * (2.0 * top(head.top) + head.noise))
        if not (np.abs(nu) * a <= _LARGEST * (1.0 + a)).all():
            raise CertificateError(
                f"nu must be at most {_LARGEST:g} / ||A||, received {np.abs(nu).max():g}: its products overflow."
            )
        lam, const = np.empty(len(nu)), np.zeros(len(nu))
        if head.centred:
            for k, t in enumerate(nu):
                lam[k] = np.linalg.eigvalsh(t * M - S)[-1]
            return cls(nu.copy(), gap.copy(), lam + slack, const + loose)._proved(head)
        c, shift = mid(head.c), mid(head.self_shift)
        Atc, size = A.T @ c, float(norm_upper(c))
        last: float | None = None
        for k in np.argsort(nu, kind="stable"):
            if last is None or nu[k] != last:
                theta, basis = np.linalg.eigh(nu[k] * M - S)
                last = float(nu[k])
            # exact arithmetic on a matrix within slack/2 of the true one: lam is raised by that much
            inner = theta[-1] + max(float(gap[k]), 1e-9 * (a * (1 + abs(nu[k]) * a) + size))
            b = basis.T @ (shift - 2 * nu[k] * Atc)
            lam[k] = inner
            const[k] = nu[k] * size**2 + 0.25 * float(np.sum(b**2 / (inner - theta)))
        const = const + 1e-12 * (np.abs(const) + np.abs(nu) * size**2) + loose
        return cls(nu.copy(), gap.copy(), lam + slack, const)._proved(head)

    def _proved(self, head: UnitNumbers) -> SelfLogit:
        """In exact arithmetic: ``lam |z|^2 + const + <g,z> - nu |g|^2 >= 0`` for every z, as a form in ``(z, 1)``."""
        if not head.exact:
            return self
        S, M = 0.5 * (head.self_form + head.self_form.T), head.A.T @ head.A
        lam, const = self.lam.copy(), self.const.copy()
        k = len(S)
        for i, nu in enumerate(self.nu):
            form = S - nu * M
            if not head.centred:
                form = bordered(form, 0.5 * head.self_shift - nu * (head.A.T @ head.c))
            size = top(head.a) * (1.0 + abs(nu) * top(head.a)) + abs(const[i])
            for step in (0.0, 1e-13, 1e-11, 1e-9):
                corner = np.diag(np.append(np.full(k, lam[i] + step * size), const[i] + step * size)[: len(form)])
                if head.centred:
                    proved = proves_psd(form + corner)
                else:
                    square = np.zeros((k + 1, k + 1))
                    square[k, k] = 1.0
                    proved = proves_psd(form + corner - (BallMatrix.exact(square) * (nu * (head.c @ head.c))))
                if proved:
                    lam[i], const[i] = lam[i] + step * size, const[i] + (0.0 if head.centred else step * size)
                    break
            else:
                raise CertificateError(f"the multiplier nu = {nu:g} could not be confirmed in balls; drop it.")
        return SelfLogit(self.nu, self.gap, lam, const)

    @classmethod
    def of(cls, head: UnitNumbers, multipliers: Mapping[str, Array]) -> SelfLogit:
        """The family of stored multipliers ``nu`` and ``gap``."""
        nu = multiplier(multipliers, "nu", multipliers["nu"].shape)
        return cls.build(head, nu, multiplier(multipliers, "gap", nu.shape, sign=True))

    @classmethod
    def default(cls, head: UnitNumbers, *, count: int = 200) -> SelfLogit:
        """A geometric family of both signs of nu, pruned to the members that win somewhere on ``(|g|, |z|)``."""
        if top(head.a) < 1e-100:
            # g = c as far as it matters: <c, z> >= -|c| |z|, left to the trivial bound of `lower`
            return cls(np.zeros(1), np.zeros(1), np.zeros(1), np.full(1, np.inf))
        unit = np.concatenate([-np.geomspace(0.02, 50.0, count // 4), [0.0], np.geomspace(0.01, 300.0, count)])
        nu = np.append(unit, 1.0) / head.a
        gap = np.zeros(1)
        if not head.centred:
            gap = np.geomspace(1e-3, 30.0, 14) * float(norm_upper(head.c))
        pairs = np.array([(t, e) for t in nu for e in gap])
        family = cls.build(head, pairs[:, 0], pairs[:, 1])
        g, r = (x.ravel() for x in np.meshgrid(np.linspace(0, head.top, 40), np.linspace(0, 1, 40)))
        value = family.nu * g[:, None] ** 2 - family.lam * r[:, None] ** 2 - family.const
        # at a pair (|g|, |z|) that no z attains the dual grows without bound: its winners are of no use
        attained = value.max(axis=1) <= g * r + 1e-6 * head.top
        anywhere = family.nu * g[:, None] ** 2 - np.maximum(family.lam, 0.0) - family.const
        winners = np.concatenate([value[attained].argmax(axis=1), anywhere[:40].argmax(axis=1)])
        return family.take(np.unique(winners))

    def take(self, index: Array) -> SelfLogit:
        """The members at ``index``."""
        return SelfLogit(*(x[index] for x in (self.nu, self.gap, self.lam, self.const)))

    def decisive(self, g0: Array, g1: Array) -> SelfLogit:
        """The members that :meth:`lower` takes on these cells of ``|g|``, for all z of the ball."""
        quad = np.where(self.nu >= 0, self.nu * (g0**2)[:, None], self.nu * (g1**2)[:, None])
        return self.take(np.unique((quad - np.maximum(self.lam, 0.0) - self.const).argmax(axis=1)))

    def join(self, other: SelfLogit) -> SelfLogit:
        """Both families together."""
        return SelfLogit(
            *(np.concatenate([getattr(self, k), getattr(other, k)]) for k in ("nu", "gap", "lam", "const"))
        )

    def members(self) -> Iterable[tuple[float, float, float]]:
        """``(nu, lam, const)`` of each."""
        return zip(self.nu, self.lam, self.const, strict=True)

    def lower(self, g0: Any, g1: Any, r0: Any = 0.0, r1: Any = 1.0) -> Any:
        """Lower bound of ``<g(z), z>`` on each cell ``|g| in [g0, g1], |z| in [r0, r1]`` (shape of ``g0``)."""
        best = -(g1 * r1)
        for nu, lam, const in self.members():
            quad = nu * (g0 if nu >= 0 else g1) ** 2
            best = np.maximum(best, quad - lam * np.square(r1 if lam >= 0 else r0) - const)
        return best


def entropy_gap(n: int) -> float:
    """``tau_n = W_0((n-1)/e)``, never below the exact number (0 for a single token).

    ``w + log w`` increases, and equals ``log(n-1) - 1`` at tau: a w that exceeds it in interval arithmetic is above tau.
    """
    if n == 1:
        return 0.0
    w = float(lambertw((n - 1) / math.e).real)
    w = w * (1 + 1e-13) + 1e-300
    target = np.log(lift(float(n - 1))) - 1.0
    while not float(lower(lift(w) + np.log(lift(w)) - target)) >= 0.0:
        w *= 1 + 1e-14
    return w


def spread_region(head: UnitNumbers, n: int, family: SelfLogit, edges: Array) -> tuple[Array, Array]:
    """Corners ``(gamma, spread)`` of what the self-token entropy allows, on the cells of ``|g| / top`` that ``edges`` bound.

    Every row of every configuration of n tokens has ``|g_i| <= gamma_k`` and ``tr C_i <= spread_k`` for one k;
    dominated corners are dropped.
    """
    if edges.ndim != 1 or edges.size < 2 or edges[0] != 0.0 or edges[-1] != 1.0 or not (np.diff(edges) > 0).all():
        raise ValueError(f"edges must increase from 0 to 1, received {edges!r}.")
    g0, g1 = head.top * edges[:-1], head.top * edges[1:]
    low = family.lower(g0, g1) - (0.0 if head.exact else 1e-12 * head.top)
    excess = np.maximum(low - entropy_gap(n), 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        spread = np.where(g1 > 0, 1.0 - np.minimum(excess / g1, 1.0) ** 2, 1.0)
    # <g, z> <= |g|: a cell with a larger lower bound is empty
    empty = lower(low) > upper(g1) * (1.0 if head.exact else 1 + 1e-12)
    gamma, spread = upper(g1)[~empty], np.clip(upper(spread)[~empty] + 1e-14, 0.0, 1.0)
    above = np.maximum.accumulate(spread[::-1])[::-1]
    front = np.append(spread[:-1] > above[1:], True)
    return gamma[front], spread[front]


def least_stretch(head: UnitNumbers) -> float:
    """A number at or below the least singular value of A."""
    A, a = mid(head.A), top(head.a)
    s = float(np.linalg.svd(A, compute_uv=False)[-1])
    for margin in (16.0, 1e3, 1e5):
        low = max(0.0, s - margin * len(A) * 2.3e-16 * a - head.noise)
        if not head.exact or low == 0.0:
            return low
        if proves_psd(head.A.T @ head.A - BallMatrix.exact(np.eye(len(A))) * (lift(low) * lift(low))):
            return low
    return 0.0


def psd_defect(head: UnitNumbers) -> float:
    """Distance of A to the symmetric PSD matrices, outward; inf beyond rounding (no theorem of PSD forms applies then)."""
    A, a = mid(head.A), top(head.a)
    skew = top(norm_upper(head.A - head.A.T)) / 2
    if a == 0.0 or skew > 1e-10 * a:
        return math.inf
    low = float(np.linalg.eigvalsh(0.5 * (A + A.T))[0])
    for margin in (16.0, 1e3, 1e5):
        below = max(0.0, -low) + margin * len(A) * 2.3e-16 * a
        defect = (skew + below + head.noise) * (1.0 + 1e-12)
        if defect > 1e-10 * a:
            break
        if not head.exact or proves_psd(0.5 * (head.A + head.A.T) + BallMatrix.exact(below * np.eye(len(A)))):
            return defect
    return math.inf


def form_reason(head: UnitNumbers, *, semidefinite: bool = True) -> str | None:
    """Why a theorem of forms ``<A x, y>``, semidefinite ones, does not apply; None where it does."""
    if not head.centred:
        return (
            "it needs logits <A x, y> without a bias on a domain centred at 0, received a bias of norm "
            f"{top(norm_upper(head.c)):g} (the head's own, or A times the centre)"
        )
    if semidefinite and not math.isfinite(psd_defect(head)):
        A = mid(head.A)
        return (
            "the form A must be symmetric positive semidefinite, received a skew part of norm "
            f"{np.linalg.norm(A - A.T) / 2:g} and a least eigenvalue {np.linalg.eigvalsh(0.5 * (A + A.T))[0]:g} (times R^2)"
        )
    return None


@dataclass(frozen=True, eq=False)
class Barycentre:
    """Cells of ``(r, q)``: ``|xbar| = r`` and ``|g(xbar)|`` at the fraction q between its least and largest value at r."""

    head: UnitNumbers
    family: SelfLogit
    least: float
    """Lower bound of ``|A x| / |x|``."""

    @classmethod
    def of(cls, head: UnitNumbers, family: SelfLogit) -> Barycentre:
        """That of a head, with these multipliers."""
        return cls(head, family, least_stretch(head))

    def gamma(self, r: Any, q: Any) -> Any:
        """``|g|``: increasing in r and in q."""
        size = norm_upper(self.head.c) + self.head.noise
        high = np.minimum(self.head.top, self.head.a * r + size)
        return (1 - q) * np.minimum(high, np.maximum(self.least * r - size, 0.0)) + q * high

    @property
    def rigid(self) -> bool:
        """True when ``|g|`` is a function of r: then q is 1."""
        return self.head.centred and self.least >= top(self.head.a) * (1 - 1e-13)

    def boxes(self, count: int) -> tuple[Array, Array]:
        """Cells of (r, q)."""
        edges = np.linspace(0, 1, count + 1)
        return boxes(edges, np.ones(2) if self.rigid else edges)

    def excess(self, r0: Any, r1: Any, g0: Any, g1: Any) -> Any:
        """Upper bound of ``f = |g| - <g,x>`` on each cell; exact in ``|g|`` for each multiplier."""
        best = g1 * (1.0 + r1)
        for nu, lam, const in self.family.members():
            g = np.clip((lift(0.5) if self.head.exact else 0.5) / nu, g0, g1) if nu > 0 else g1
            best = np.minimum(best, g - nu * g**2 + lam * (r1 if lam >= 0 else r0) ** 2 + const)
        return best

    def sides(self, lo: Any, hi: Any) -> tuple[Any, Any, Any, Any]:
        """The ends of r and of ``|g|`` on cells of (r, q)."""
        (r0, q0), (r1, q1) = ends(lo, hi, self.head.exact)
        g0, g1 = self.gamma(r0, q0), self.gamma(r1, q1)
        if self.rigid:
            g0 = np.minimum(g0, self.least * r0)  # |g| is not quite a function of r
        return r0, r1, g0, g1

    def cell(self, lo: Any, hi: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        """The ends of r and of ``|g|``, the bound of f, and Gam on cells of (r, q)."""
        r0, r1, g0, g1 = self.sides(lo, hi)
        Gam = np.minimum(self.head.top**2, g1**2 + self.head.a**2 * (1 - r0**2))
        return r0, r1, g0, g1, self.excess(r0, r1, g0, g1), Gam
