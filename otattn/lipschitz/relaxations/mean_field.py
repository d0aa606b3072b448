r"""Upper bounds of the mean-field constant ``W_p-Lip(F on P(domain))``: M3 for every head, M4 for PSD forms.

Notation: unit ball (see :mod:`otattn.lipschitz.relaxations.regions`), ``g_x = A x + c``, ``k(x,y) = e^{<g_x,y>}/Z_x``,
``P_x = k(x,.) mu`` with mean ``m_x`` and covariance ``C_x``, ``lam_x = lambda_max(C_x)``, ``f(x) = |g(x)| - <g(x),x>``,
``kl(p|q)`` the binary divergence. The derivative of F along a displacement ``eps`` of mu is ``V (K + D) eps`` with
``K eps(x) = int k(x,y) (I + (y - m_x) g_x^T) eps(y) dmu(y)`` and ``D eps(x) = C_x A eps(x)``; ``||V D|| <= sigma`` (T0)
on every L^p(mu). If ``|K eps(x)|^p <= int k(x,y) w(x,y) |eps(y)|^p dmu(y)`` then, integrating over x,
``||K||^p <= sup_y T(y)``, ``T(y) = int k(x,y) w(x,y) dmu(x)``, and ``Lip <= sigma + v (sup T)^{1/p}``.

**M1 (identity).** For fixed y let ``alpha = k(.,y) w(.,y) mu / T``, mean ``xbar``. Averaging
``log Z_x = <g_x,x'> - log (dP_x/dmu)(x')`` over ``x' ~ alpha`` gives ``log Z_x = <g_x,xbar> + KL(alpha|P_x) -
KL(alpha|mu)``; averaging ``log T = <g_x,y> - log Z_x + log w - log dalpha/dmu`` over ``x ~ alpha`` gives

.. math:: \log T = \langle g(\bar x), y - \bar x\rangle + E_{x\sim\alpha}[\log w - KL(\alpha|P_x)]
          \le f(\bar x) + E_\alpha[\log w - KL(\alpha|P_x)] .

**M3.** Cauchy-Schwarz and Hoelder in the row give the weights ``w = (1 + |g_x|^2 lam_x)^{p/2}`` for p >= 2 and
``w = (1 + 2|g_x|)^{2-p} (1 + |g_x|^2 lam_x)^{p-1}`` for 1 <= p <= 2: with a unit u, ``b_y = |u + <u, y - m_x> g_x|``,
``<u, K eps> <= int k b |eps| <= (int k b^{p'})^{1/p'} (int k |eps|^p)^{1/p}``, ``b <= 1 + 2|g_x|`` and
``int k b^2 = 1 + |g_x|^2 u^T C_x u``. Send x' to +-1 with probabilities ``(1 +- <xbar,x'>/|xbar|)/2``: alpha gives
``pbar = (1 + |xbar|)/2``, ``P_x`` gives some q, so ``KL(alpha|P_x) >= kl(pbar|q)`` and
``lam_x <= 1 - |m_x|^2 <= 4 q (1-q)``. With ``c_s = max_q 4 q (1-q) e^{-kl(pbar|q)/s}``, attained at
``q = (pbar/s + 1)/(1/s + 2)`` and decreasing in ``|xbar|`` (``q <= pbar``), ``(1 + 4 G q (1-q))^s e^{-kl} <=
(1 + c_s G)^s``, concave after the logarithm, so Jensen applies with ``E_alpha |g_x|^2 = |g(xbar)|^2 +
E |A (x - xbar)|^2 <= Gam``, ``Gam = min(max|g|^2, |g(xbar)|^2 + a^2 (1 - |xbar|^2))``:

.. math:: \log T \le \sup_{\bar x} f + s_1 \log(1 + 2\sqrt{Gam}) + s_2 \log(1 + c_{s_2} Gam),

``(s_1, s_2) = (0, p/2)`` for p >= 2 and ``(2-p, p-1)`` below. Dropping the divergence gives T6 and T10.

**M4 (p = 2, c = 0, A symmetric PSD).** Put ``y(x) = A^{1/2} x / sqrt(a)``, ``|y| <= 1``, ``rho = |y(xbar)|``, ``B = a beta`` the
largest eigenvalue of ``Cov_alpha(A^{1/2} x)``; ``rho^2 + beta <= 1`` and ``<g(xbar), y - xbar> <= a (rho - rho^2)``.
Row: by Cauchy-Schwarz with ``(1, <u, y - m_x>/sqrt(h))`` and ``(<u,eps>, sqrt(h) <g_x,eps>)``, ``|K eps(x)|^2 <=
(1 + lam_x/h) int k |eps|^2 (1 + h <g_x, e_y>^2)``, h > 0 fixed, e_y the direction of ``eps(y)``; and
``E_alpha <A x, e>^2 = <A xbar, e>^2 + e^T A Cov A e <= a^2 (rho^2 + beta)``.
A coupling pi of alpha with itself, used in place of alpha in M1, gives ``log T = <g(xbar), y - xbar> -
[Cov_pi(A x, x') - KL(pi|alpha x alpha)] + E[log w - KL(pi_x|P_x)]``. Let x, x' be independent given
``Y = <u, A^{1/2} x> + noise``, noise of variance s^2, u the direction of variance B. Then the covariance is
``E |A^{1/2}(E[x|Y] - xbar)|^2 >= B^2/(B + s^2)`` (best linear predictor) and ``KL(pi|alpha x alpha) = I(x;x') <= I(x;Y) <=
log(1 + B/s^2)/2`` (Gaussian channel), so the gain is at least ``gain(B) = B - 1/2 - log(2B)/2`` for B >= 1/2 (at
``B/(B + s^2) = 1 - 1/(2B)``), else 0. Take theta times M1 plus 1 - theta times this. ``E_alpha <e,x'>^2 <= W`` for every
unit e with ``W = min(1, (a/a_min)(rho^2 + beta))``, a_min the least eigenvalue of A; x' -> 1 with probability
``<e,x'>^2`` gives ``KL(alpha|P_x) >= kl(W_e|U)``, ``W_e <= W``, ``U = E_{P_x} <e,x'>^2 >= lam_x``, so
``(1 + lam_x/h) e^{-theta KL} <= 1 + c_2/h``, ``c_2 = max_U U e^{-theta kl(W|U)}`` at ``U = (1 + theta W)/(1 + theta)``
(for U >= W, kl(W_e|U) >= kl(W|U); for U < W, U <= W <= c_2; c_2 increases in W by the envelope theorem). Hence, for every h,

.. math:: \log T \le \sup_{\rho^2 + \beta \le 1} \min_\theta \; a\rho(1-\rho) - (1-\theta)\, gain(a\beta)
          + \log(1 + c_2/h) + \log(1 + h a^2 (\rho^2 + \beta)) .

Every factor is monotone in each variable on a cell (the first is concave in rho); f is bounded through S2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import xlogy

from otattn import _validate as check
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.relaxations._cells import Maximum, boxes, maximise
from otattn.lipschitz.relaxations._problem import number, stored_head
from otattn.lipschitz.relaxations.certificate import certify, dual_function, multiplier
from otattn.lipschitz.relaxations.regions import SelfLogit, UnitHead, unit_head
from otattn.lipschitz.rounding import log, log_sum, safe_exp
from otattn.measures.domains import Domain

__all__ = ["mean_field"]

Array = NDArray[np.float64]

_THETAS = np.linspace(0.0, 1.0, 17)
_MARGIN = 1e-12
_CELLS = 200_000


_Trail = Any
"""The barycentre cells and their maximum, None where M3 was not evaluated."""


def _weight(rho: Array, s: float) -> Array:
    """``c_s = max_q 4 q (1-q) e^{-kl(pbar|q)/s}``, ``pbar = (1 + rho)/2``."""
    p = 0.5 * (1.0 + rho)
    q = (p / s + 1.0) / (1.0 / s + 2.0)
    kl = xlogy(p, p / q) + xlogy(1.0 - p, (1.0 - p) / (1.0 - q))
    return np.asarray(4.0 * q * (1.0 - q) * np.exp(-kl / s))


def _second_moment(W: Array, theta: float) -> Array:
    """``c_2 = max_U U e^{-theta kl(W|U)}``."""
    U = (1.0 + theta * W) / (1.0 + theta)
    kl = xlogy(W, W / U) + xlogy(1.0 - W, np.divide(1.0 - W, 1.0 - U, out=np.ones_like(W), where=U < 1.0))
    return np.asarray(np.minimum(1.0, U * np.exp(-theta * kl)))


def _gain(B: Array) -> Array:
    """``max_y B y + log(1 - y)/2`` over y in [0, 1)."""
    B = np.maximum(B, 0.5)
    return np.asarray(B - 0.5 - 0.5 * np.log(2.0 * B))


@dataclass(frozen=True, eq=False)
class _Barycentre:
    """Cells of ``(r, q)``: ``|xbar| = r`` and ``|g(xbar)|`` at the fraction q between its least and largest value at r."""

    head: UnitHead
    family: SelfLogit
    least: float
    """Lower bound of ``|A x| / |x|``."""

    def gamma(self, r: Array, q: Array) -> Array:
        """``|g|``: increasing in r and in q."""
        size = float(np.linalg.norm(self.head.c)) * (1 + 1e-14)
        high = np.minimum(self.head.top, self.head.a * r + size)
        return np.asarray((1 - q) * np.minimum(high, np.maximum(self.least * r - size, 0.0)) + q * high)

    def axes(self, count: int) -> tuple[Array, Array]:
        """Edges of r and q; q is one point when ``|g|`` is a function of r."""
        rigid = self.head.centred and self.least >= self.head.a * (1 - 1e-13)
        return np.linspace(0, 1, count + 1), np.ones(2) if rigid else np.linspace(0, 1, count + 1)

    def excess(self, r0: Array, r1: Array, g0: Array, g1: Array) -> Array:
        """Upper bound of ``f = |g| - <g,x>`` on each cell; exact in ``|g|`` for each multiplier."""
        best = g1 * (1.0 + r1)
        for nu, lam, const in zip(*self.family.arrays, strict=True):
            g = np.clip(0.5 / nu, g0, g1) if nu > 0 else g1
            best = np.minimum(best, g - nu * g**2 + lam * (r1 if lam >= 0 else r0) ** 2 + const)
        return np.asarray(best)

    def m3(self, s1: float, s2: float) -> Any:
        """Bound of ``f + s1 log(1 + 2 sqrt(Gam)) + s2 log(1 + c Gam)`` on cells of (r, q)."""
        a, top = self.head.a, self.head.top

        def bound(lo: Array, hi: Array) -> Array:
            (r0, q0), (r1, q1) = lo, hi
            g0, g1 = self.gamma(r0, q0), self.gamma(r1, q1)
            Gam = np.minimum(top**2, g1**2 + a**2 * (1 - r0**2))
            value = self.excess(r0, r1, g0, g1)
            if s1 > 0:
                value = value + s1 * np.log1p(2 * np.sqrt(Gam))
            if s2 > 0:
                value = value + s2 * np.log1p(_weight(r0, s2) * Gam)
            return np.asarray(value)

        return bound


def _m4_bound(a: float, least: float, h: float) -> Any:
    """Bound of M4 on cells of ``(rho, beta / (1 - rho^2))``."""

    def bound(lo: Array, hi: Array) -> Array:
        (r0, s0), (r1, s1) = lo, hi
        b0, b1 = (1 - r1**2) * s0, (1 - r0**2) * s1
        r = np.clip(0.5, r0, r1)
        total = np.minimum(1.0, r1**2 + b1)
        W = np.minimum(1.0, total * (a / least)) if least > 1e-9 * a else np.ones_like(total)
        gain = _gain(a * b0)
        row = np.min([np.log1p(_second_moment(W, t) / h) - (1 - t) * gain for t in _THETAS], axis=0)
        return np.asarray(a * (r - r**2) + row + np.log1p(h * a**2 * total))

    return bound


def _orders(p: float) -> tuple[float, float]:
    return (0.0, 0.5 * p) if p >= 2 else (2.0 - p, p - 1.0)


def _m4(a: float, least: float, h: float, tol: float, cells: int) -> Maximum:
    return maximise(
        _m4_bound(a, least, h), *boxes(np.linspace(0, 1, 25), np.linspace(0, 1, 25)), tol=tol, max_cells=cells
    )


def _enrich(field: _Barycentre, at: Maximum) -> SelfLogit:
    """The family with the best multipliers for the middle of the worst cell added to it."""
    r, q = 0.5 * (at.lo + at.hi)
    g = float(field.gamma(np.array(r), np.array(q)))
    head, family = field.head, field.family
    size = float(np.linalg.norm(head.c))
    now = int(np.argmax(family.nu * g**2 - family.lam * r**2 - family.const))
    nu, gap = float(family.nu[now]), float(family.gap[now])
    span = 0.1 * abs(nu) + 0.02 / head.a
    low, high = nu - span, nu + span

    def loss(nu: float, gap: float) -> float:
        one = SelfLogit.build(head, np.array([nu]), np.array([gap]))
        return -float(one.nu[0] * g**2 - one.lam[0] * r**2 - one.const[0])

    for _ in range(1 if head.centred else 3):
        nu = float(minimize_scalar(lambda t, e=gap: loss(t, e), bounds=(low, high), method="bounded").x)
        if not head.centred:
            best = minimize_scalar(lambda t, nu=nu: loss(nu, math.exp(t) * size), bounds=(-9.0, 5.0), method="bounded")
            gap = math.exp(float(best.x)) * size
    return family.join(SelfLogit.build(head, np.array([nu]), np.array([gap])))


def _least_stretch(A: Array, a: float) -> float:
    s = np.linalg.svd(A, compute_uv=False)
    return max(0.0, float(s[-1]) - 16 * len(A) * 2.3e-16 * a)


def _psd_defect(A: Array, a: float) -> float:
    """Distance of A to the symmetric PSD matrices, outward; inf beyond rounding (M4 does not apply then)."""
    skew = float(np.linalg.norm(A - A.T)) / 2
    if a == 0.0 or skew > 1e-10 * a:
        return math.inf
    low = float(np.linalg.eigvalsh(0.5 * (A + A.T))[0])
    defect = skew + max(0.0, -low) + 16 * len(A) * 2.3e-16 * a
    return defect if defect <= 1e-10 * a else math.inf


def _proof(problem: Mapping[str, Any], multipliers: Mapping[str, Array], tol: float) -> tuple[float, str, _Trail]:
    """Logarithm of the bound that the multipliers prove, the theorem that gives it, and where it stands."""
    head, p = stored_head(problem), number(problem, "p", least=1.0, most=math.inf)
    if head.v == 0.0:
        return -math.inf, "V = 0", None
    base = log(head.sigma)
    s1, s2 = _orders(p) if math.isfinite(p) else (0.0, 0.0)
    if math.isinf(p):
        return log_sum(base, log(head.v) + 0.5 * math.log1p(head.top**2)), "T10", None
    logs = {"T6" if p == 2 else "T10": head.kappa + s1 * math.log1p(2 * head.top) + s2 * math.log1p(head.top**2)}
    trail: _Trail = None
    if head.a > 0:
        least = _least_stretch(head.A, head.a)
        family = SelfLogit.of(head, multipliers)
        field = _Barycentre(head, family, least)
        found = maximise(field.m3(s1, s2), *boxes(*field.axes(24)), tol=tol, max_cells=_CELLS)
        logs["M3"] = found.value
        trail = (field, found)
        defect = _psd_defect(head.A, head.a) if head.centred and p == 2 else math.inf
        if math.isfinite(defect):
            h = float(multiplier(multipliers, "h", (1,), positive=True)[0])
            worst = _m4(head.a, max(0.0, least - defect), h, tol, _CELLS).value
            # log T moves by at most 2 |E|, and by h (2 a |E| + |E|^2) in the second factor, when A = PSD + E
            logs["M4"] = worst + 4 * defect * (1 + h * head.a)
    name = min(logs, key=lambda k: logs[k])
    power = logs[name] + _MARGIN * (1 + abs(logs[name]))
    return log_sum(base, log(head.v) + power / p), name, trail


@dual_function("mean_field")
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    return safe_exp(_proof(problem, multipliers, float(problem["tol"]))[0])


def _choose_h(a: float, least: float) -> float:
    """A good h of M4: the maximum over points is convex in ``log h``."""
    r, s = (
        x.ravel() for x in np.meshgrid(np.linspace(0, 1, 41), np.append(0, np.geomspace(0.5 / (40 * (a + 1)), 1, 30)))
    )
    points = np.array([r, s])

    def top(t: float) -> float:
        return float(_m4_bound(a, least, math.exp(t))(points, points).max())

    span = (-math.log(1 + a) - 4.0, 4.0)
    return math.exp(float(minimize_scalar(top, bounds=span, method="bounded", options={"xatol": 1e-2}).x))


def mean_field(attention: Any, domain: Domain | float, *, p: float = 2.0, effort: str = "fast") -> Bound:
    """Upper bound of ``W_p-Lip(F)`` over all measures on the domain: the least of T6 (T10), M3 and M4.

    Parameters
    ----------
    attention : SoftmaxAttention
        Any A, V and biases; M4 enters when A is symmetric PSD and the bias (after centring the domain) is zero.
    domain : Domain or float
        A float is the radius of a ball.
    p : float
        Order, in ``[1, inf]``.
    effort : {"fast", "deep"}
        Branch-and-bound gap of 1e-3 or 1e-5 in the logarithm of ``T``.

    Returns
    -------
    Certificate
        Its multipliers are those of S2 (``nu``, ``gap``) and M4 (``h``). ``details["log_value"]`` is the logarithm of the
        bound; when the bound exceeds the largest float the result is a plain :class:`Bound` of value inf.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = mean_field(SoftmaxAttention([[9.0]], [[1.0]]), 1.0)
    >>> bound.value < 27, bound.verify()
    (True, True)
    """
    if effort not in ("fast", "deep"):
        raise ValueError(f"effort must be 'fast' or 'deep', received {effort!r}.")
    order = check.check_order(p)
    head = unit_head(attention, domain)
    tol = 1e-3 if effort == "fast" else 1e-5
    names = ("A", "c", "a", "top", "v", "sigma", "trace_sigma", "kappa")
    problem = {"p": order, "tol": tol, **{k: getattr(head, k) for k in names}}
    family = SelfLogit.default(head)
    h = 1.0
    if head.a > 0 and math.isfinite(_psd_defect(head.A, head.a)):
        h = _choose_h(head.a, _least_stretch(head.A, head.a))
    multipliers = {"nu": family.nu, "gap": family.gap, "h": np.array([h])}
    log_value, name, trail = _proof(problem, multipliers, tol)
    for _ in range(4):
        # a multiplier made for the worst cell, as long as it helps
        if trail is None or name != "M3":
            break
        family = _enrich(*trail)
        richer = {**multipliers, "nu": family.nu, "gap": family.gap}
        better, new_name, trail = _proof(problem, richer, tol)
        if better < log_value - 1e-12:
            multipliers = richer
        gained, log_value, name = log_value - better, min(better, log_value), new_name
        if gained < 0.2 * tol:
            break
    source = f"otattn/lipschitz/relaxations/mean_field.py, {name}"
    details = {"log_value": log_value, "theorem": name, "kappa": head.kappa, "sigma": head.sigma}
    if log_value > 709.0:
        return Bound(math.inf, "upper", source, p=order, domain=domain, details=details)
    found = certify(
        "mean_field",
        problem=problem,
        multipliers=multipliers,
        source=source,
        solver="branch and bound",
        solver_status="closed",
        solver_value=safe_exp(log_value),
        domain=domain,
        details=details,
    )
    return replace(found, p=order)
