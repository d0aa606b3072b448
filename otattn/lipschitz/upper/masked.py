r"""Our bounds of causal softmax attention, for the conditional ``W_p``: the mean p-norm on a sequence.

Column sums are not controlled by kappa under a mask (with ``A = 0`` and two tokens the constant is 1.144,
not 1): the first token is seen by every row. What holds instead uses ``P_ij <= E / (E + i - 1)``, ``E =
e^{2t}``, for the row that sees i tokens. Notation as in :mod:`otattn.lipschitz.upper.softmax`;
:func:`otattn.lipschitz.upper.softmax.row_bound` and, for ``p = inf``,
:func:`otattn.lipschitz.upper.softmax.column_bound` hold for masked attention as they are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from otattn.lipschitz.arithmetic.intervals import is_interval, lift, like
from otattn.lipschitz.arithmetic.rounding import log, log_sum, top, up
from otattn.lipschitz.constants.regions import Seen
from otattn.lipschitz.constants.rows import density_constant, hoelder_constant, row_norm
from otattn.lipschitz.hypotheses import every, order_between, order_two, softmax, tokens
from otattn.lipschitz.upper.softmax import closed_form

SUMMED_ROWS = 64
"""Terms of ``S_n`` that are added one by one; the others have a closed form."""
NEGLIGIBLE = 1e-17
"""Below this value of ``n e^{-spread}`` the sum ``S_n`` is n to rounding (and ``e^{-spread}`` may have lost its digits)."""
BLOCK_ROWS = 20_000
"""Rows up to here are taken in blocks by :func:`masked_row_bound`, at most 500 of them, those beyond by an integral."""


@closed_form(
    "masked_column_bound",
    statement="sigma + S_n^{1/p} N_p, S_n about e^{2t} log n",
    hypotheses="masked softmax; any domain and p; n tokens",
    applies=every(softmax(masked=True), tokens()),
)
def masked_column_bound(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""``sigma + S_n^{1/p} N_p`` with ``S_n = sum_{i=1}^n E / (E + i - 1)``, which grows like ``E log n``.

    Proof. That of ``column_bound``, with the column sums ``sum_{i >= j} P_ij <= S_n``: a row of i tokens
    whose logits differ by at most 2 t has weights of at most ``1 / (1 + (i-1) e^{-2t})``.
    """
    row = seen.row_deviation if p >= 2.0 else seen.v * hoelder_constant(seen.t_values, p)
    total = masked_column_sum(2.0 * seen.t, n)
    value = log_sum(log(seen.sigma), log(row) + (0.0 if math.isinf(p) else log(total) / p))
    return value, {"column_sum": total, "sigma": seen.sigma, "row": row}


def masked_column_sum(spread: Any, n: int) -> Any:
    r"""``S_n`` for logits that differ by at most ``spread`` in a row, never below the exact sum, in O(1) time.

    With ``r = e^{-spread}`` it is ``sum_{i=0}^{n-1} f(i)``, ``f(x) = 1 / (1 + r x)``, that is ``(psi(n + 1/r) -
    psi(1/r)) / r`` with the digamma function, a difference that loses all digits for small r. The first m = 64
    terms are added; the others are at most

    .. math:: \frac1r \log\frac{1 + (n - 1/2) r}{1 + (m - 1/2) r}
              - \frac{1}{24} \Big[ f'(n-1) - f'(m) + \frac{f''(m) + f''(n-1)}{2} \Big],

    which was found to exceed them by 1e-8 at most, whatever n and r are.

    Proof. f'' is convex, so ``f(i+h) + f(i-h) - 2 f(i) = int_0^h (h-s) (f''(i+s) + f''(i-s)) ds >= h^2 f''(i)``.
    Integrate over h in [0, 1/2]: ``f(i) <= int_{i-1/2}^{i+1/2} f - f''(i)/24``. Add over i = m..n-1; the first
    parts make up the logarithm, and ``sum f''(i) >= int_m^{n-1} f'' + (f''(m) + f''(n-1))/2``, since a chord of a
    convex function lies above it.
    """
    r = np.exp(-spread)
    if not top(n * r) > NEGLIGIBLE:
        return up(lift(float(n)) if is_interval(r) else float(n))  # every term is at most 1, and less by at most n r
    m = min(n, SUMMED_ROWS)
    total = (1.0 / (1.0 + np.arange(m) * r)).sum()
    if n > m:
        first, last = 1.0 / (1.0 + m * r), 1.0 / (1.0 + (n - 1.0) * r)
        slopes = r * (first * first - last * last) + r * r * (first**3 + last**3)
        total = total + np.log1p((n - m) * r / (1.0 + (m - 0.5) * r)) / r - slopes / 24.0
    return up(total)


@closed_form(
    "masked_row_bound",
    statement="(sum of Psi_i^2 / i)^{1/2} over the rows, and sigma",
    hypotheses="masked softmax; any domain; n tokens; p = 2",
    applies=every(softmax(masked=True), tokens(), order_two),
)
def masked_row_bound(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""n tokens, p = 2: ``sigma + v ( sum_i min(phi^2, Psi_i^2 / i) )^{1/2}``.

    Proof. The squared norm of K is at most the sum over rows of their squared norms from ``R^{i d}``. A row
    of i tokens has norm at most ``phi(t)``, and at most ``Psi_i / sqrt(i)``, since ``Psi_i`` bounds it from
    ``L^2`` of the i equal atoms that it sees.
    """
    phi2 = row_norm(seen.t_values) ** 2
    total: Any = 0.0
    i = 1
    # blocks of rows: Psi_i grows with i and 1/i falls, so a block is bounded by its last Psi and its first
    # 1/i
    while i <= min(n, BLOCK_ROWS):
        last = i if i < 64 else min(n, i + i // 64)
        psi2 = density_constant(seen.t_ball, last)[0] ** 2
        total = total + np.minimum(phi2, psi2 / np.arange(i, last + 1)).sum()
        i = last + 1
    if i <= n:
        total = total + _later_rows(phi2, density_constant(seen.t_ball, n)[0] ** 2, i - 1, n)
    value = log_sum(log(seen.sigma), log(seen.v) + 0.5 * log(up(total)))
    return value, {"row_constant": row_norm(seen.t_values), "row_sum": total, "sigma": seen.sigma}


def _later_rows(phi2: Any, psi2: Any, m: int, n: int) -> Any:
    """At least ``sum_{i=m+1}^n min(phi2, psi2 / i)``: the least ``(k - m) phi2 + psi2 log(n / k)``, k in [m, n].

    Every real k gives a bound: ``min(phi2, psi2 / x)`` falls, so the sum is at most its integral from m to n, and that
    at most phi2 on [m, k] and ``psi2 / x`` on [k, n].
    """
    k = float(n) if math.isinf(top(psi2)) else min(float(n), max(float(m), top(psi2) / top(phi2)))
    ratio = lift(float(n)) / k if is_interval(psi2) else n / k
    rows = lift(k) - m if is_interval(psi2) else k - m
    return rows * phi2 + (psi2 * np.log(ratio) if k < n else 0.0)


@closed_form(
    "masked_average_bound",
    statement="sigma + v N_r (e^{2t} p / (p - r))^{1/r}",
    hypotheses="masked softmax; any domain and n; 1 < p < inf",
    applies=every(softmax(masked=True), order_between(1.0, math.inf, low_open=True, high_open=True)),
    measures=True,
)
def masked_average_bound(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""Free of n: ``sigma + v inf_r N_r ( E p / (p - r) )^{1/r}``, r in [1, p), ``E = e^{2t}``.

    For ``1 < p < inf``. ``N_r`` is :func:`otattn.lipschitz.constants.rows.hoelder_constant`. It holds for
    every measure on ``[0, 1] x R^d`` in the conditional ``W_p``; every r gives a bound.

    Proof. ``|K eps|(s, x) <= N_r (E_P |eps|^r)^{1/r} <= N_r E^{1/r} (M h(s))^{1/r}`` with ``h = |eps|^r``
    and M the average over the times ``tau <= s``: the row's density against the normalised restriction is
    at most E. By Hardy's inequality for averages, which holds for every measure on times (Copson), ``||M
    h||_q <= q/(q-1) ||h||_q`` with ``q = p/r > 1``, so ``||K eps||_p <= N_r E^{1/r} (q/(q-1))^{1/r}
    ||eps||_p``.
    """
    r = np.concatenate([[1.0], 1.0 + (p - 1.0) * np.linspace(0.005, 0.995, 199)])
    best = float(r[int(_average_log(r, top(seen.t), top(seen.t_values), p).argmin())])
    order = like(best, seen.t)
    value = log_sum(log(seen.sigma), log(seen.v) + _average_log(order, seen.t, seen.t_values, p))
    return value, {"r": best, "sigma": seen.sigma}


def _average_log(r: Any, logits: Any, t: Any, p: float) -> Any:
    """``log( N_r (E p / (p - r))^{1/r} )``, ``E = e^{2 logits}``.

    N_r is ``(1 + t^2)^{1/r'} (1 + 2t)^{1 - 2/r'}`` for r < 2, ``1/r' = 1 - 1/r``.
    """
    conjugate = 1.0 - 1.0 / r
    square = 2.0 * np.log(np.hypot(1.0, t))
    norms = np.where(r < 2.0, conjugate * square + (1.0 - 2.0 * conjugate) * np.log1p(2.0 * t), 0.5 * square)
    return norms + (2.0 * logits + np.log(p / (p - r))) / r
