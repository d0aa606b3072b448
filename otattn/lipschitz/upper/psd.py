r"""The discrete constant of positive semidefinite forms at moderate ``||A|| R^2``: weighted column sums.

Let A be symmetric PSD, without bias, V any matrix, tokens ``|x_i| <= R = 1``, ``a = ||A||``, ``v = ||V||``. Logits
are ``l_ik = a <y_i, y_k>`` with ``y = A^{1/2} x / sqrt(a)``, ``|y| <= |x| <= 1``. Write ``h_i = |y_i|``, ``g_i = A
x_i``, so ``|g_i| <= a h_i``; ``P_ij``, ``m_i``, ``C_i`` for the weights, mean and covariance of row i, ``lam_i = tr
C_i``, ``top_i`` its largest eigenvalue and ``Gamma_i = a^2 h_i^2 top_i``, at least ``|g_i|^2 top_i``. Then ``D f eps = V (K eps
+ D eps)``, ``K_i eps = sum_k P_ik (I + (x_k - m_i) g_i^T) eps_k``, ``|V C_i A eps_i| <= v d_i |eps_i|``, ``d_i = min(b lam_i, a
top_i)``, ``v b = max_{|u|=1} |V u| |A^T u|``.

**Row.** For a unit u let ``n_k = u + <u, x_k - m_i> g_i``, so that ``<u, K_i eps> = sum_k P_ik <n_k, eps_k>``, and ``Q = I +
(omega/a) g_i g_i^T``, ``omega >= 0``: ``<n_k, eps>^2 <= N_k^2 (eps^T Q eps)`` with ``N_k^2 = n_k^T Q^{-1} n_k``. Put ``G_i =
Gamma_i / (1 + omega a h_i^2)``. As ``Q^{-1}`` divides by ``1 + omega |g|^2/a`` along g and the ``x_k - m_i`` are centred, ``sum_k
P_ik N_k^2 <= 1 + G``. A single token of mass p at distance s from the mean along u has ``p s^2 + (1-p) (p s/(1-p))^2 <= top`` and
``N_k <= 1 + |s| |g|/(1 + omega |g|^2/a)^{1/2}``, so ``p N_k^2 <= D(p) := (1 + tau) p + (1 + 1/tau) (1-p) G`` for each ``tau > 0``,
and ``sum_k P_ik (P_ik N_k^2 / D(P_ik)) <= 1``. By Cauchy-Schwarz, for every ``eta >= 0`` and with ``e_k`` the direction of
``eps_k``,

.. math:: |K_i\epsilon|^2 \le \sum_k c(P_{ik}, G_i) f_{ik} |\epsilon_k|^2, \qquad
          \frac{1 + \eta}{c(p, G)} = \frac{1}{p (1 + G)} + \frac{\eta}{D(p)} , \qquad
          f_{ik} = 1 + \tfrac{\omega}{a} \langle g_i, e_k\rangle^2 ,

since ``sum_k (P_ik N_k)^2 / c <= (1 + eta)/(1 + eta)``. A token that holds most of a row moves its mean little: c is
far below ``p (1 + G)`` for p near 1. It increases in G, and is concave in it.

**N1 (K and D do not add).** ``|K_i eps + D_i eps_i|^2 <= (1 + t_i) |K_i eps|^2 + (1 + 1/t_i) |D_i eps_i|^2``; collect
by ``|eps_j|^2``, with ``t_i = t(h_i) top_i^power``, where power is 0 or from 1 to 2, and ``h_j = r``, so that ``f_jj <= 1 + omega a
r^2``:

.. math:: \|Df\|^2 \le v^2 \max_j \Bigl[ \sum_{i \ne j} (1 + t_i) c(P_{ij}, G_i) f_{ij}
          + (1 + t_j) c(P_{jj}, G_j) f_{jj} + (1 + 1/t_j) d_j^2 \Bigr] .

All terms increase in ``top_i``, the last one until ``a top_j = b lam_j``: rows of small variance need no split.

**N2 (column sums).** Let ``S`` be the sum over ``i != j``, ``w_i f_i`` its terms, ``p_i = P_ij``, ``q_i = P_ii``, ``alpha_i = w_i
f_i / S``, ``ybar = E_alpha y``. With H the entropy of alpha, ``log S = E_alpha[log w_i + log f_i] + H``. H is bounded in three
ways, with shares ``1 - mu``, ``mu - nu`` and ``nu``. The first: ``H = E_alpha[-log alpha_i]`` where ``E_alpha[1/alpha_i] <= n -
1``. For the others let ``Q_i = P_i / (1 - p_i)`` on the tokens ``k != j``, and let pi be a coupling of alpha with itself, of
mutual information I, ``pi_i`` the law of the second token given the first. Gibbs' identity ``log sum_{k != j} e^{l_ik} = H(pi_i) +
sum_k pi_i(k) l_ik + KL(pi_i|Q_i)`` and ``logit p_i = l_ij - log sum_{k != j} e^{l_ik}`` give, averaged over alpha, as ``E_alpha
H(pi_i) = H - I``,

.. math:: H = a\langle \bar y, y_j - \bar y\rangle - E_\alpha[\operatorname{logit} p_i] - [a\,Cov_\pi(y, y') - I]
          - E_\alpha[KL(\pi_i|Q_i)] .

*The product* has ``pi_i = alpha`` and nothing in the bracket; ``KL(alpha|Q_i) >= kl(alpha_i | q_i/(1-p_i))``, the binary
divergence of "token i or not": a row that sees itself has few like it. *A Gaussian channel*: in d dimensions, by
:mod:`otattn.lipschitz.forms.self_coupling` in an orthonormal basis that begins with a unit vector e, with ``beta`` the variance of
``<y, e>`` under alpha and ``0 <= t, s < 1``, the bracket is at least

.. math:: t a (E_\alpha h_i^2 - |\bar y|^2) + (s - t) a \beta + \tfrac{d-1}{2} \log(1 - t^2) + \tfrac12 \log(1 - s^2) :

rows that are spread over many directions see each other little. Then the divergence says that the tokens which the rows see are
those that alpha is made of, short and on the side of ``y_j``. With ``z(h) = min(1, h^2 a/a_min) >= |x|^2``, a_min the least
eigenvalue of A, ``w_k = 1 - z(h_k) + chi (1 + <y_k, y_j>)``, from 0 to ``1 + 2 chi``, the *gap* ``delta_i = E_{Q_i} w_k`` and ``zeta
>= 0``, the test function ``1 + zeta w_k`` gives (Donsker and Varadhan)

.. math:: -E_\alpha KL(\pi_i|Q_i) \le E_\alpha[\log(1 + \zeta \delta_i) - \log(1 + \zeta w_i)] , \qquad
          w_i = 1 - z(h_i) + \chi (1 + l_{ij}/a) ,

because the second token has the law alpha, too. Let e be the direction of ``A^{1/2} e_j``: ``f_i <= 1 + omega a <y_i, e>^2``, and
for each ``phi > 0`` the concave logarithm has ``E log f_i <= log(omega/phi) + phi/omega - 1 + phi a (<ybar, e>^2 + beta)``. What
of ``phi a beta`` is not paid by ``nu (s - t) a beta``, the part ``left = (phi - nu (s - t))_+``, is at most ``left a (E h_i^2 -
|ybar|^2)``. All in all ``|ybar|^2`` has the factor ``-kappa a``, ``kappa = mu - nu t - phi + left``, at least ``mu - nu s >= 0``
(for ``s < t`` too). With u the direction
of ``y_j``, ``s_i = <y_i, u>``, ``-|ybar|^2 <= sigma'^2 - 2 sigma' E s``, ``sigma' = sigma r``. Hence, for all multipliers,
functions of r, a maximum over single rows bounds the sum:

.. math:: \log S \le \max \; & \log w + \mu [\log(1-p) - \log p] + (\mu - 2\kappa\sigma) l_{ij} + (left - \nu t) a h^2
          + \nu \log\frac{1 + \zeta\delta}{1 + \zeta w} + \kappa a \sigma^2 r^2 \\
          & - \tfrac{\nu}{2} [(d-1) \log(1 - t^2) + \log(1 - s^2)] + \log\tfrac{\omega}{\varphi} + \tfrac{\varphi}{\omega} - 1
          + \max_{0 < x \le 1} \{ -(1-\mu)\log x - (\mu - \nu)\, kl(x | \tfrac{q}{1-p}) + \xi (n - 1 - 1/x) \} .

Rows with ``p < 1e-6/n`` are left out of S and added at their largest: alpha then lives on fewer tokens, which changes
nothing.

**N3 (what a row can be).** ``l_ij = a h^2 + log(p/q)`` and ``|l_ij| <= a r h``. With ``rho = 1 - p - q``, the other
tokens have ``|l_ik| <= a h``, so ``(n-2) q e^{-a(h + h^2)} <= rho <= (n-2) q e^{a(h - h^2)}``. ``E_{P_i} l = log Z -
H(P_i)`` with ``log Z = l_ii - log q`` and ``H(P_i) <= -p log p - q log q - rho log(rho/(n-2))`` gives

.. math:: a h |m^y_i| \ge \langle g_i, m_i\rangle \ge E := a h^2 - \log q + p \log p + q \log q + \rho \log\frac{\rho}{n-2},

``m^y`` the mean of y, ``|m^y| <= |m|``. ``lam_i = E|x|^2 - |m|^2``, and ``|m^y|^2 >= 2 <m^y, u> - |u|^2`` for ``u = e y_i/h + (chi/2)
y_j``, ``e = (E - chi l_ij/2)_+ / (ah)``. As ``<m^y, y_j> = p r^2 + (1-p) E_{Q_i} <y_k, y_j>``, by the definition of the gap

.. math:: \lambda_i \le 1 - p (1 - z(r)) + \chi (1 - p + \tfrac{\chi}{4} r^2 - p r^2) - (1-p) \delta
          - \Bigl(\frac{E - \chi l_{ij}/2}{ah}\Bigr)_+^2 , \qquad (1-p) \delta \ge q w_i ,

and ``lam <= 4 p (1-p)`` when p > 1/2 (``m = p x_j + (1-p) m'``, so ``|m| >= p |x_j| - (1-p)``, and the bound of the
trace increases with ``|x_j| <= 1``), likewise for q. ``a^2 h^2`` times this bounds Gamma, increasing in ``|g|``. For
the row j itself: p merges with q, ``1 - q`` is shared by n - 1 tokens. And ``top_i <= lam_i`` has a bound by h and q of its own,
:mod:`otattn.lipschitz.constants.row_spread`: a row that holds much of itself and little of what is far from it is not
stretched along one line.

**The loss.** Gamma is at most ``reach - loss``, ``loss = a^2 h^2 (1-p) delta``, and the term of a row is concave in the loss, but
for ``log(1 + t)``, whose slopes are bounded for all losses up to an end of their range: on a box of ``(r, h, log p, log q)`` the best
losses lie where the slopes, as ranges over the box, can change sign; or where Gamma meets a cap, ``4 a^2 h^2 p (1-p)`` or that of
``top``, or at the least loss.

**Evaluation.** All is a function of ``(r, h, log p, log q)`` that increases in r: boxes, branch and bound. Large ``zeta`` takes
many boxes. Weights
and multipliers may be any: they are searched for on samples, and only the last maximum is proved.

When A is within delta of a PSD matrix (rounding), the constant moves by at most ``v delta ((4 + 7a) sqrt(n) + 2a +
1)``: along the segment the logits move by delta, so ``|dP_ik| <= 2 delta P_ik``, ``|dm_i| <= 2 delta``, ``||dC_i|| <=
2 delta``; insert these in ``D f`` and use ``||P|| <= sqrt(n)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.intervals import lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import least, product, top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number, trivial
from otattn.lipschitz.constants.cells import CellBound, Maximum, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of, unit_numbers
from otattn.lipschitz.constants.self_logit import form_reason, least_stretch, psd_defect
from otattn.lipschitz.hypotheses import every, order_two, softmax, tokens
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.psd_columns import Columns, OwnTerm
from otattn.lipschitz.upper.psd_multipliers import Multipliers, OwnShare
from otattn.lipschitz.upper.psd_search import Plan, add_rows, choose, refine
from otattn.measures.domains import Domain

_MARGIN = 5e-10, 1e-14
"""Added to the logarithm of the square, the second times ``a^2``: above what the operations on boxes can lose."""
_CELLS = 6_000_000
_RECHECKED = 1_500_000
"""A recheck splits boxes above the target only: about a tenth of what the search for it took."""
_LOOSE, _NEAR = 0.05, 0.1
"""A search that leaves more than the first in the logarithm of the square is tried again with a smaller zeta; both are proved when
they end within the second."""
_DROP = 6.0
"""How much looseness of the other sides a fall of the own term outweighs."""
_LARGEST = 1000.0
"""Beyond this ``||A|| R^2`` the masses of rows underflow; a row then sees nothing of its own token anyway."""


def _cell_bound(columns: Columns, edges: Array, multipliers: Multipliers) -> CellBound:
    """The logarithm of ``(bound / v)^2`` on boxes."""
    own, share = OwnTerm(columns), OwnShare(multipliers, columns.n, exact=columns.exact)
    faint = top(columns.faint())
    wrap: Any = lift if columns.exact else np.asarray

    def bound(lo: Array, hi: Array) -> tuple[Array, Array]:
        cell = np.clip(np.searchsorted(edges, 0.5 * (lo[0] + hi[0])) - 1, 0, edges.size - 2)
        off, pull = columns.off(lo, hi, multipliers.at(cell))
        seen = np.minimum(1.0, np.exp(wrap(lo[3])) / np.maximum(-np.expm1(wrap(lo[2])), 1e-300))
        alone = own(lo[0], hi[0])
        whole = wrap(off) + share(cell, np.asarray(lower(seen)))
        off = np.asarray(upper(whole))
        total = np.asarray(upper(np.logaddexp(whole, np.log(wrap(alone) + faint))))
        pull = pull * np.exp(np.minimum(off - total, 0.0))
        middle, wide = 0.5 * (lo[0] + hi[0]), hi[0] > lo[0]
        # the upper half has the larger sum over the other rows: halving r helps only when its own term is smaller
        drop = (alone - own(middle, hi[0])) * np.exp(-np.minimum(total, 700.0))
        excess = 2 * alone - own(lo[0], middle) - own(middle, hi[0])
        pull[0] = np.where(wide, np.minimum(pull[0] + excess * np.exp(-np.minimum(total, 700.0)), _DROP * drop), 0.0)
        return np.where(off == -np.inf, -np.inf, total), pull  # a nan is no empty box

    return bound


def _prove(columns: Columns, edges: Array, multipliers: Multipliers, *, tol: float, max_cells: int) -> Maximum:
    """The maximum over all boxes."""
    return maximise(_cell_bound(columns, edges, multipliers), *columns.start(edges), tol=tol, max_cells=max_cells)


@problem_function("psd")
def _problem(statement: Statement) -> dict[str, Any]:
    if statement.p != 2.0:
        raise ValueError(f"p must be 2 for psd, received {statement.p:g}.")
    n = check.count(statement.n, "n", least=2)
    return {"head": numbers_of(statement), "n": n, "target": number(statement.options, "target", least=-math.inf)}


@dual_function("psd", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    head, n = problem["head"], problem["n"]
    t0, g, t1 = multiplier(multipliers, "split", (3,), sign=True).tolist()
    eta, power, chi = (float(multiplier(multipliers, key, (1,), sign=True)[0]) for key in ("eta", "power", "chi"))
    tau, omega = (float(multiplier(multipliers, key, (1,), positive=True)[0]) for key in ("tau", "omega"))
    edges = multiplier(multipliers, "edges", multipliers["edges"].shape, sign=True)
    cells = (edges.size - 1,)
    if edges.ndim != 1 or edges.size < 2 or edges[0] != 0 or edges[-1] != 1 or not (np.diff(edges) > 0).all():
        raise ValueError(f"edges must increase from 0 to 1, received {edges!r}.")
    if g < 1 or t1 <= 0:
        raise ValueError(f"g must be at least 1, t1 positive, received {g}, {t1}.")
    own = _columns_of(multipliers, cells)
    stretch, defect = _hypotheses(head)
    if (power != 0 and not 1 <= power <= 2) or chi > 4:
        raise ValueError(f"power must be 0 or from 1 to 2, chi at most 4, received {power} and {chi}.")
    columns = Columns(head.a, _field_share(head), stretch, n, len(head.A), (t0, g, t1), eta, tau, omega, power, chi)
    # boxes below the target need no splitting: only that none exceeds it is to be shown
    bound, cover = _cell_bound(columns, edges, own), columns.start(edges)
    log_square = proved_below(bound, *cover, target=problem["target"], max_cells=_RECHECKED)
    return _bound(log_square, head, n, defect)


def _columns_of(multipliers: Mapping[str, Array], cells: tuple[int]) -> Multipliers:
    """The multipliers of the cells of r, validated."""
    mu, nu, t, zeta, s = (multiplier(multipliers, key, cells, sign=True) for key in ("mu", "nu", "t", "zeta", "s"))
    if (mu > 1).any() or (nu > mu).any() or (t >= 1).any() or (s >= 1).any():
        raise ValueError(f"0 <= nu <= mu <= 1 and t, s < 1 are required, received {nu!r}, {mu!r}, {t!r}, {s!r}.")
    sigma = multiplier(multipliers, "sigma", cells)
    xi, phi = (multiplier(multipliers, key, cells, positive=True) for key in ("xi", "phi"))
    return Multipliers(mu, nu, sigma, xi, t, zeta, phi, s)


def _bound(log_square: float, head: UnitNumbers, n: int, defect: float) -> Any:
    """The bound that a proved maximum gives, outward."""
    a, log_value = head.a, lift(log_square) if head.exact else log_square
    whole = np.exp(0.5 * (log_value + (0.0 if head.exact else _MARGIN[0] + _MARGIN[1] * a**2)))
    return head.v * (whole + defect * (1 + 1e-12) * ((4 + 7 * a) * np.sqrt(lift(n) if head.exact else n) + 2 * a + 1))


def _field_share(head: UnitNumbers) -> Any:
    """``sup ||V C A|| / (||V|| tr C)``."""
    # a subnormal product has lost its digits
    if top(head.trace_sigma) <= 1e-290:
        return head.a
    return least(head.a, product(head.trace_sigma / head.v, 1 + 1e-14))


def _fails(head: UnitNumbers) -> str | None:
    """Why the head is none of this theorem."""
    if top(head.v) == 0.0 or (top(head.a) == 0.0 and head.centred):
        return None
    if top(head.a) > _LARGEST:
        return f"||A|| R^2 must be at most {_LARGEST:g}, received {top(head.a):g}"
    return form_reason(head)


def _semidefinite(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return _fails(unit_numbers(attention, domain))


def _hypotheses(head: UnitNumbers) -> tuple[Any, float]:
    """``a`` over the least eigenvalue, and the distance of A to the PSD matrices, both outward."""
    why = _fails(head)
    if why is not None:
        raise ValueError(f"psd does not apply: {why}; use relaxations.rows_and_columns, which has no such hypothesis.")
    defect = psd_defect(head)
    # singular values of A are within the defect of those of the PSD matrix
    low = (least_stretch(head) - defect) * (1 - 1e-12)
    return (head.a / low if low > 1e-12 * top(head.a) else math.inf), defect


@theorem(
    "psd",
    statement="small forms, where a row still sees its own token: a program over one row",
    hypotheses="softmax without a mask and without a bias, A symmetric PSD; domain centred at 0; n >= 2 tokens; p = 2",
    applies=every(softmax(masked=False), tokens(least=2), order_two, _semidefinite),
    closed=False,
)
def psd(attention: AttentionMap, domain: Domain, n: int, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound of the Lipschitz constant of n tokens for a positive semidefinite form, by branch and bound.

    It is much sharper than the general bounds for ``||A|| R^2`` up to about 30, where a row still sees its own token and those
    that resemble it, and n up to a hundred or so; the dimension matters little. For multiples of the identity it knows the norm
    of every token; for other PSD forms it knows the norms of ``A^{1/2} x``, and how much they say of ``|x|`` through the least
    eigenvalue.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Search for the multipliers, and gap of the branch and bound: 1 percent or 0.5 percent.

    Returns
    -------
    Certificate
        Multipliers: the weights ``split`` (t0, g, t1), ``power``, ``eta``, ``tau``, ``omega``, ``chi``; the cells of r (``edges``)
        with their ``mu``, ``nu``, ``sigma``, ``xi``, ``t``, ``s``, ``zeta`` and ``phi``. A plain :class:`Bound` when A or V is zero.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = psd(SoftmaxAttention([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]), radius=1.0, n=3, effort="fast")
    >>> bound.value < 2.3, bound.verify()
    (True, True)
    """
    statement = Statement(attention, domain, n, p)
    head = numbers_of(statement)
    if head.v == 0.0 or (head.a == 0.0 and head.centred):
        # A = 0: the mean of the tokens, n times over
        return trivial(statement)
    stretch, defect = _hypotheses(head)
    deep = effort == "deep"
    base = Columns(
        head.a, _field_share(head), stretch, n, len(head.A), (1.0, 2.0, 0.4), 0.05, max(0.5, 0.3 * head.a), 0.1
    )
    tol, cells = (1e-2, _CELLS) if deep else (2e-2, _CELLS // 12)
    few = cells // (6 if deep else 2)
    plans = [_polished(base, deep=deep, most_zeta=20.0 if deep else 4.0, tol=4 * tol, max_cells=few)]
    if plans[0][1].value > plans[0][1].seen + _LOOSE + 4 * tol:
        # too many boxes: what needs fewer may be the better bound
        plans.append(_polished(base, deep=False, most_zeta=4.0 if deep else 0.1, tol=4 * tol, max_cells=few))
    least = min(found.value for _, found in plans) + (_NEAR if deep else 0.0)
    proved = [
        (x, _prove(x.columns, x.edges, x.multipliers, tol=tol, max_cells=cells)) for x, y in plans if y.value <= least
    ]
    plan, found = min(proved, key=lambda pair: pair[1].value)
    columns, sought = plan.columns, plan.multipliers
    return certify(
        "psd",
        statement=replace(statement, options={"target": found.value}),
        multipliers={
            "split": np.array(columns.split),
            **{key: np.array([getattr(columns, key)]) for key in ("eta", "tau", "omega", "power", "chi")},
            "edges": plan.edges,
            **{key: getattr(sought, key) for key in Multipliers.names()},
        },
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=float(_bound(found.seen, head, n, 0.0)),
        details={"sigma": head.trace_sigma, "cells": found.cells, "radius_at_worst": float(found.hi[0])},
        # the maximum has just been proved: what a recheck raises it by is added
        proved=float(_bound(found.value + 1e-11, head, n, defect)),
    )


def _polished(base: Columns, *, deep: bool, most_zeta: float, tol: float, max_cells: int) -> tuple[Plan, Maximum]:
    """Weights and multipliers, better ones where the maximum stands, whose box joins the sampled rows, and that maximum."""
    plan = choose(base, deep=deep, most_zeta=most_zeta)
    found = _prove(plan.columns, plan.edges, plan.multipliers, tol=tol, max_cells=max_cells)
    for _ in range(4 if deep else 2):
        if not deep and found.value > found.seen + _LOOSE + tol:  # too many boxes
            break
        cell = int(np.clip(np.searchsorted(plan.edges, 0.5 * (found.lo[0] + found.hi[0])) - 1, 0, plan.edges.size - 2))
        weights = np.array(np.meshgrid(*[np.linspace(0.0, 1.0, 3)] * 4)).reshape(4, -1)
        points = found.lo[:, None] + weights * (found.hi - found.lo)[:, None]
        richer = add_rows(plan, cell, points)
        trial = refine(richer, cell)
        better = _prove(trial.columns, trial.edges, trial.multipliers, tol=tol, max_cells=max_cells)
        if better.value > found.value - 0.1 * tol:
            break
        plan, found = trial, better
    return plan, found
