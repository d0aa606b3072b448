r"""The column potential of Sinkhorn attention with a proven error, from the contraction of Sinkhorn's sweeps.

For logits S and weights w, let ``T`` take a column potential h to the one after a sweep: the rows are
normalised, then the columns, ``T(h) = h - log M(h)`` with ``M_j = (1 / w_j) sum_i w_i P_ij``, ``P_ij = w_j
e^{S_ij + h_j} / sum_k w_k e^{S_ik + h_k}``. By Birkhoff's theorem each half of a sweep contracts the oscillation
``osc(h - h') = max - min`` by ``kappa = tanh(Delta / 4)``, with ``Delta = max_{ijkl} S_ij - S_kj - S_il + S_kl``
(Franklin and Lorenz 1989). The fixed point ``h*`` is unique up to a constant, which no row of P sees, hence

.. math:: osc(h - h^*) \le \frac{osc(h - T h)}{1 - \kappa^2} = osc(\log M(h)) \cosh^2(\Delta / 4),

and with the constant in the middle every entry of h is within half of that of ``h*``.
"""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array
from otattn.attention.schroedinger import Potentials
from otattn.attention.sinkhorn import SinkhornAttention
from otattn.stability.enclosed import TINY, UNIT, Enclosed
from otattn.stability.functions import exp

__all__ = ["column_potential"]

DENSE = 256
"""Up to this many atoms Newton steps polish the potential, and Delta is the maximum over all quadruples."""
POLISH = 3


def column_potential(attention: SinkhornAttention, Z: Enclosed, weights: Array) -> Enclosed | None:
    """``h (1, n)`` for the logits ``<A z_i, z_j>``, the exact one up to a constant; None when not bounded."""
    S = (Z @ attention.A.T) @ Z.T
    solver = Potentials(
        Z.high @ attention.A.T, Z.high, weights, tol=attention.tol, max_iter=attention.max_iter, block_size=None
    )
    h = Enclosed.exact(solver.solve()[1][None, :], fine=Z.fine)
    amplification = _amplification(S)
    best: Enclosed | None = None
    for step in range(POLISH + 1):
        P, M = _marginals(S, h, weights)
        reach = _log_oscillation(M) * amplification
        if not np.isfinite(reach):
            break
        if best is None or reach < 2.0 * float(best.radius.max()):
            best = Enclosed(h.high, h.low, np.full(h.shape, 0.5 * reach * (1.0 + 8.0 * UNIT) + TINY))
        if step == POLISH or len(weights) > DENSE:
            break
        moved = h + _newton(P, M, weights)
        h = Enclosed(moved.high, moved.low)  # any floats will do
    return best


def _marginals(S: Enclosed, h: Enclosed, weights: Array) -> tuple[Enclosed, Enclosed]:
    """``P`` and ``M (1, n)``."""
    L = S + h
    E = exp(L - L.high.max(axis=1, keepdims=True))
    # E w / (E w 1): the weights of a column cancel in M, so they are left out of P / w
    mass = E @ weights[:, None]
    ratio = E / mass
    total = Enclosed.exact(weights[None, :], fine=S.fine) @ ratio
    return ratio, total


def _log_oscillation(M: Enclosed) -> float:
    """An upper bound of ``max log M - min log M``."""
    rest = M - 1.0
    low = 0.0 if rest.low is None else rest.low
    top, bottom = (rest.high + low) + rest.radius, (rest.high + low) - rest.radius
    if not (bottom > -0.5).all():
        return np.inf
    # log(1 + x) is between x - x^2 and x for x > -1/2
    spread = float(top.max() - (bottom - bottom**2).min())
    return max(0.0, spread) * (1.0 + 8.0 * UNIT) + 4.0 * UNIT * float(np.abs(rest.high).max()) + TINY


def _amplification(S: Enclosed) -> float:
    """``cosh^2(Delta / 4)``, rounded up."""
    n, L = len(S.high), S.high
    if n <= DENSE:
        delta = max(float(np.ptp(L[:, [j]] - L, axis=0).max()) for j in range(n))
    else:
        delta = 2.0 * min(float(np.ptp(L, axis=0).max()), float(np.ptp(L, axis=1).max()))
    delta += 4.0 * float(S.radius.max()) + 16.0 * UNIT * float(np.abs(L).max())
    with np.errstate(over="ignore"):
        return float(np.cosh(0.25 * delta) ** 2 * (1.0 + 1e-12))


def _newton(ratio: Enclosed, M: Enclosed, weights: Array) -> Array:
    """The step that makes all M one to first order: ``(diag(M) - R^T W R W) dh = 1 - M``, ``R = P / w``."""
    R = ratio.high
    J = np.diag(M.high[0]) - (R.T * weights) @ (R * weights)
    rest = M - 1.0
    residual = -(rest.high + (0.0 if rest.low is None else rest.low))[0]
    root = np.sqrt(weights)
    scaled = root[:, None] * J / root
    step = np.linalg.lstsq(scaled, root * residual, rcond=1e-13)[0] / root
    return np.asarray(step[None, :])
