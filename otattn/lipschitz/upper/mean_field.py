r"""Upper bounds of the mean-field constant ``W_p-Lip(F on P(domain))`` by entropy, for every head.

Notation: unit ball (see :mod:`otattn.lipschitz.constants.self_logit`), ``g_x = A x + c``, ``k(x,y) = e^{<g_x,y>}/Z_x``,
``P_x = k(x,.) mu`` with mean ``m_x`` and covariance ``C_x``, ``lam_x = lambda_max(C_x)``, ``f(x) = |g(x)| - <g(x),x>``,
``kl(p|q)`` the binary divergence. The derivative of F along a displacement ``eps`` of mu is ``V (K + D) eps`` with
``K eps(x) = int k(x,y) (I + (y - m_x) g_x^T) eps(y) dmu(y)`` and ``D eps(x) = C_x A eps(x)``; ``||V D|| <= sigma``
on every L^p(mu). If ``|K eps(x)|^p <= int k(x,y) w(x,y) |eps(y)|^p dmu(y)`` then, integrating over x,
``||K||^p <= sup_y T(y)``, ``T(y) = int k(x,y) w(x,y) dmu(x)``, and ``Lip <= sigma + v (sup T)^{1/p}``.

**M1 (identity).** For fixed y let ``alpha = k(.,y) w(.,y) mu / T``, mean ``xbar``. Averaging
``log Z_x = <g_x,x'> - log (dP_x/dmu)(x')`` over ``x' ~ alpha`` gives ``log Z_x = <g_x,xbar> + KL(alpha|P_x) -
KL(alpha|mu)``; averaging ``log T = <g_x,y> - log Z_x + log w - log dalpha/dmu`` over ``x ~ alpha`` gives

.. math:: \log T = \langle g(\bar x), y - \bar x\rangle + E_{x\sim\alpha}[\log w - KL(\alpha|P_x)]
          \le f(\bar x) + E_\alpha[\log w - KL(\alpha|P_x)] .

**Entropy.** Cauchy-Schwarz and Hoelder in the row give the weights ``w = (1 + |g_x|^2 lam_x)^{p/2}`` for p >= 2 and
``w = (1 + 2|g_x|)^{2-p} (1 + |g_x|^2 lam_x)^{p-1}`` for 1 <= p <= 2: with a unit u, ``b_y = |u + <u, y - m_x> g_x|``,
``<u, K eps> <= int k b |eps| <= (int k b^{p'})^{1/p'} (int k |eps|^p)^{1/p}``, ``b <= 1 + 2|g_x|`` and
``int k b^2 = 1 + |g_x|^2 u^T C_x u``. Send x' to +-1 with probabilities ``(1 +- <xbar,x'>/|xbar|)/2``: alpha gives
``pbar = (1 + |xbar|)/2``, ``P_x`` gives some q, so ``KL(alpha|P_x) >= kl(pbar|q)`` and
``lam_x <= 1 - |m_x|^2 <= 4 q (1-q)``. With ``c_s = max_q 4 q (1-q) e^{-kl(pbar|q)/s}``, attained at
``q = (pbar/s + 1)/(1/s + 2)`` and decreasing in ``|xbar|`` (``q <= pbar``), ``(1 + 4 G q (1-q))^s e^{-kl} <=
(1 + c_s G)^s``, concave after the logarithm, so Jensen applies with ``E_alpha |g_x|^2 = |g(xbar)|^2 +
E |A (x - xbar)|^2 <= Gam``, ``Gam = min(max|g|^2, |g(xbar)|^2 + a^2 (1 - |xbar|^2))``:

.. math:: \log T \le \sup_{\bar x} f + s_1 \log(1 + 2\sqrt{Gam}) + s_2 \log(1 + c_{s_2} Gam),

``(s_1, s_2) = (0, p/2)`` for p >= 2 and ``(2-p, p-1)`` below. Dropping the divergence gives the column bound. At p = 2 there is
a third branch, in which K and D are not added: :class:`otattn.lipschitz.constants.rows.JointRows`.

Every factor is monotone in each variable on a cell; f is bounded by the self-logit inequality. For a positive semidefinite
form and p = 2, :mod:`otattn.lipschitz.forms.psd_mean_field` is sharper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from otattn._linalg import Array, norm_upper
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.intervals import lift, like, upper, xlogy
from otattn.lipschitz.arithmetic.rounding import is_zero, log, log_sum, safe_exp, top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number, trivial
from otattn.lipschitz.constants.cells import CellBound, Maximum, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of
from otattn.lipschitz.constants.rows import VALUES, JointRows
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit
from otattn.lipschitz.hypotheses import any_measure, every, softmax
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain

_MARGIN = 1e-12
_CELLS = 200_000
KINDS = "joint", "joint_domain"
"""Branches of joint rows; the certificate keeps which, as the better of the two changes with the domain."""
_SQUARES = 1e-100, 1e100
"""Sizes of a and ``|g|`` for joint rows: their squares are floats."""


def heavy_share(rho: Any, s: float) -> Any:
    """``c_s = max_q 4 q (1-q) e^{-kl(pbar|q)/s}``, ``pbar = (1 + rho)/2``.

    At the maximum ``p / q = (1 + 2 s) p / (p + s)`` and ``(1-p)/(1-q) = (1 + 2 s)(1-p) / (1 - p + s)``.
    """
    p, rest = 0.5 * (1.0 + rho), 0.5 * (1.0 - rho)
    whole: Any = 1.0 + 2.0 * like(s, rho)
    kl = xlogy(p, whole * p / (p + s)) + xlogy(rest, whole * rest / (rest + s))
    return 4.0 * ((p + s) / whole) * ((rest + s) / whole) * np.exp(-kl / s)


def entropy_bound(field: Barycentre, s1: float, s2: float) -> CellBound:
    """Bound of ``f + s1 log(1 + 2 sqrt(Gam)) + s2 log(1 + c Gam)`` on cells of (r, q)."""

    def bound(lo: Any, hi: Any) -> Array:
        r0, *_, excess, Gam = field.cell(lo, hi)
        value = excess + s1 * np.log1p(2 * np.sqrt(Gam))
        if s2 > 0:
            value = value + s2 * np.log1p(heavy_share(r0, s2) * Gam)
        return np.asarray(upper(value))

    return bound


def joint_bound(field: Barycentre, rows: JointRows) -> CellBound:
    """Bound of ``f`` and the weights of joint rows on cells of (r, q)."""

    def bound(lo: Any, hi: Any) -> Array:
        *_, excess, Gam = field.cell(lo, hi)
        return np.asarray(upper(excess + rows.log_weight(lo[0], Gam)))

    return bound


def _orders(p: float) -> tuple[float, float]:
    return (0.0, 0.5 * p) if p >= 2 else (2.0 - p, p - 1.0)


def _enrich(head: UnitNumbers, family: SelfLogit, at: Maximum) -> SelfLogit:
    """The family with the best multipliers for the middle of the worst cell added to it."""
    if top(head.a) < 1e-100:  # the gradients are constant as far as it matters
        return family
    r, q = 0.5 * (at.lo + at.hi)
    g = float(Barycentre.of(head, family).gamma(np.array(r), np.array(q)))
    size = float(norm_upper(head.c))

    def known(family: SelfLogit) -> Array:
        return np.asarray(family.nu * g**2 - family.lam * r**2 - family.const)

    def loss(nu: float, gap: float) -> float:
        return -float(known(SelfLogit.build(head, np.array([nu]), np.array([gap])))[0])

    now = int(np.argmax(known(family)))
    nu, gap = float(family.nu[now]), float(family.gap[now])
    span = 0.1 * abs(nu) + 0.02 / head.a
    around = nu - span, nu + span
    for _ in range(1 if head.centred else 3):
        nu = float(minimize_scalar(lambda t, e=gap: loss(t, e), bounds=around, method="bounded").x)
        if not head.centred:
            best = minimize_scalar(lambda t, nu=nu: loss(nu, math.exp(t) * size), bounds=(-9.0, 5.0), method="bounded")
            gap = math.exp(float(best.x)) * size
    return family.join(SelfLogit.build(head, np.array([nu]), np.array([gap])))


def _plain(head: UnitNumbers, p: float) -> Any:
    """``log sup T`` of the column bound, without the divergence."""
    if math.isinf(p):
        return 0.0
    s1, s2 = _orders(p)
    return head.kappa + (s1 * np.log1p(2 * head.top) + s2 * np.log1p(np.square(head.top)))


def entropy_cells(
    head: UnitNumbers, p: float, multipliers: Mapping[str, Array], rows: JointRows | None = None
) -> tuple[CellBound, tuple[Array, Array]]:
    """The bound of ``log sup T`` by entropy on cells, of joint rows where they are given, and cells that cover everything."""
    field = Barycentre.of(head, SelfLogit.of(head, multipliers))
    return (entropy_bound(field, *_orders(p)) if rows is None else joint_bound(field, rows)), field.boxes(24)


def joint_rows(head: UnitNumbers, excess: float, kind: str = "joint", **size: int) -> JointRows:
    """The joint rows of a head: for covariances of rank one on the ball, or for what the domain has of ``||V C A||``."""
    if not _squares(head):
        raise ValueError(f"a and |g| must lie in [{_SQUARES[0]:g}, {_SQUARES[1]:g}], received {top(head.a):g}.")
    share, rank_one = (min(1.0, top(x / (head.v * head.a)) * (1.0 + 1e-12)) for x in (head.sigma, head.trace_sigma))
    if kind == "joint_domain":
        return JointRows(head.a, head.top, share, excess, np.full(VALUES.size - 1, rank_one**2 * (1.0 + 1e-15)), **size)
    return JointRows(head.a, head.top, rank_one, excess, head.reach, **size)


def _squares(head: UnitNumbers) -> bool:
    """True where squares of a and ``|g|`` neither vanish nor overflow, and sigma has its digits."""
    return all(_SQUARES[0] <= top(x) <= _SQUARES[1] for x in (head.a, head.top)) and top(head.sigma) > 1e-290


def _joint(head: UnitNumbers, p: float, family: SelfLogit) -> dict[str, JointRows]:
    """Joint rows of each kind with a good excess: the least bound over points, with coarse weights."""
    if p != 2.0 or not _squares(head):
        return {}
    field = Barycentre.of(head, family)
    points = np.stack(np.meshgrid(np.linspace(0, 1, 33), np.linspace(0, 1, 33))).reshape(2, -1)

    def loss(t: float, kind: str) -> float:
        rows = joint_rows(head, math.exp(t), kind, places=32, shares=128)
        return float(rows.log_square(float(np.max(joint_bound(field, rows)(points, points)))))

    found = {}
    # on a ball the domain has no less than the covariances of rank one
    for kind in KINDS if head.sigma < head.trace_sigma else KINDS[:1]:
        best = minimize_scalar(loss, args=(kind,), bounds=(-5.0, 8.0), method="bounded", options={"xatol": 0.05})
        found[kind] = joint_rows(head, math.exp(float(best.x)), kind)
    return found


@dataclass(frozen=True)
class _Trial:
    """A bound of ``log sup T`` in float64, the branch it comes from, where it stands, and the logarithm of the constant."""

    log_T: float
    name: str
    at: Maximum | None
    log_value: float

    @classmethod
    def best(
        cls, head: UnitNumbers, p: float, multipliers: Mapping[str, Array], rows: Mapping[str, JointRows], tol: float
    ) -> _Trial:
        """The least of the branches at these multipliers."""
        plain = float(_plain(head, p))
        best = cls(plain, "plain", None, float(log_bound(head, p, plain)))
        if not head.a > 0 or math.isinf(p):
            return best
        for name in ("entropy", *rows):
            joint = rows.get(name)
            bound, cover = entropy_cells(head, p, multipliers, joint)
            at = maximise(bound, *cover, tol=tol, max_cells=_CELLS)
            value = float(log_bound(head, p, at.value, joint))
            if value < best.log_value:
                best = cls(at.value, name, at, value)
        return best


def log_bound(head: UnitNumbers, p: float, log_sum_T: Any, rows: JointRows | None = None) -> Any:
    """Logarithm of ``sigma + v (sup T)^{1/p}``; of ``v (Delta + sup T)^{1/2}`` for joint rows."""
    if math.isinf(p):
        return log_sum(log(head.sigma), log(head.v) + 0.5 * np.log1p(np.square(head.top)))
    power = log_sum_T if head.exact else log_sum_T + _MARGIN * (1 + abs(log_sum_T))
    if rows is not None:
        return log(head.v) + 0.5 * rows.log_square(power)
    return log_sum(log(head.sigma), log(head.v) + power / p)


@problem_function("mean_field")
def _problem(statement: Statement) -> dict[str, Any]:
    head = numbers_of(statement)
    if is_zero(head.v):
        raise ValueError("V must not be zero for mean_field.")
    target = number(statement.options, "target", least=-math.inf)
    branch = str(statement.options["branch"])
    if branch not in ("plain", "entropy", *KINDS):
        raise ValueError(f"the branch must be plain, entropy or one of {KINDS}, received {branch!r}; it was altered.")
    return {"head": head, "p": statement.p, "branch": branch, "target": target}


@dual_function("mean_field", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    head, p = problem["head"], problem["p"]
    branch = problem["branch"]
    if branch == "plain" or math.isinf(p):
        return safe_exp(log_bound(head, p, _plain(head, p)))
    rows = None
    if branch in KINDS:
        if p != 2.0:
            raise ValueError(f"p must be 2 for joint rows, received {p:g}.")
        rows = joint_rows(head, float(multiplier(multipliers, "excess", (1,), positive=True)[0]), branch)
    bound, cover = entropy_cells(head, p, multipliers, rows)
    value = proved_below(bound, *cover, target=problem["target"], max_cells=2 * _CELLS)
    return safe_exp(log_bound(head, p, lift(value) if head.exact else value, rows))


def _used(multipliers: dict[str, Array], branch: str, rows: JointRows | None) -> dict[str, Array]:
    """What a branch reads of the multipliers."""
    if rows is not None:
        return multipliers | {"excess": np.array([rows.excess])}
    return multipliers if branch == "entropy" else {}


@theorem(
    "mean_field",
    statement="sigma + N_p T^{1/p}, T by entropy and barycentres; at p = 2 also v (Delta + T)^{1/2}, the parts of a row not added",
    hypotheses="softmax without a mask; any domain and p; any measure",
    applies=every(softmax(masked=False), any_measure),
    closed=False,
)
def mean_field(attention: AttentionMap, domain: Domain, n: int | None, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound of ``W_p-Lip(F)`` over all measures on the domain: the least of the column bound and entropy.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Branch-and-bound gap of 1e-3 or 1e-5 in the logarithm of ``T``.

    Returns
    -------
    Certificate
        Its multipliers are ``nu`` and ``gap`` where entropy wins, and ``excess`` too where joint rows do; the column bound has
        none.
        When the bound exceeds the largest float the result is a plain :class:`Bound` of value inf with its ``log_value``.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = mean_field(SoftmaxAttention([[-4.0]], [[1.0]]), radius=1.0)
    >>> bound.value < 185, bound.verify()
    (True, True)
    """
    statement = Statement(attention, domain, n, p)
    head = numbers_of(statement)
    if head.v == 0.0:
        return trivial(statement)
    tol = 1e-3 if effort == "fast" else 1e-5
    family = SelfLogit.default(head)
    multipliers = {"nu": family.nu, "gap": family.gap}
    rows = _joint(head, p, family)
    best = _Trial.best(head, p, multipliers, rows, tol)
    for _ in range(4):
        # a multiplier made for the worst cell, as long as it helps
        if best.at is None:
            break
        family = _enrich(head, SelfLogit.of(head, multipliers), best.at)
        richer = {"nu": family.nu, "gap": family.gap}
        trial = _Trial.best(head, p, richer, rows, tol)
        gained = best.log_value - trial.log_value
        if gained > 1e-12:
            best, multipliers = trial, richer
        if gained < 0.1 * tol:
            break
    name, log_value = best.name, best.log_value
    details = {"branch": name, "kappa": head.kappa, "sigma": head.sigma}
    if log_value > 709.0:
        return replace(outward(log_value, "mean_field", domain, n, p, details), attention=attention)
    return certify(
        "mean_field",
        statement=replace(statement, options={"branch": name, "target": best.log_T}),
        multipliers=_used(multipliers, name, rows.get(name)),
        solver="branch and bound",
        solver_status="closed",
        solver_value=safe_exp(log_value),
        details=details,
    )
