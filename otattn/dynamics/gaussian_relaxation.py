r"""Gaussian flows followed to where they seem to settle: many at once, each at its own pace.

This finds blow-ups and growth, and a first guess of limits; :mod:`otattn.dynamics.gaussian_settling` decides on limits.

The state and the pseudo-time are those of :mod:`otattn.dynamics.gaussian_integrator`, with a clock that lets t grow by a
factor e per unit, so that algebraic decay is followed over many powers of ten. Each member of the stack has its own step
(scipy's Runge-Kutta 4(5) coefficients, applied to all of them at once): one stiff member does not slow the others.
Those that an explicit method cannot finish in a reasonable number of steps go to LSODA, one by one.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import LSODA, RK45

from otattn._linalg import Array
from otattn.dynamics.gaussian_fields import GaussianField
from otattn.dynamics.gaussian_integrator import BLOW_UP_GROWTH, GaussianSystem

__all__ = ["DROWNED", "LEFT_BEHIND", "Relaxation", "directions"]

RTOL, ATOL = 1e-6, 1e-9
HORIZON = 60.0
"""Pseudo-time after which a member is left as it is: it turns for ever."""
ROUNDS = 250
"""Explicit steps before LSODA takes over."""
LSODA_STEPS = 200
PATIENCE, LAPSE = 6.0, 50.0
"""A limit is looked for after so much pseudo-time, or so many of the initial time units."""
SETTLED, UNDECIDED = 1e-2, (0.04, 0.75)
"""It is there when the shape changes by at most ``SETTLED`` per factor e of elapsed time, and the trace follows a power of
time that is clearly zero or clearly not."""
NEGLIGIBLE = 1e-9
"""Relative size of eigenvalues that need not be told apart."""
LEFT_BEHIND = 1e-7
"""Relative size of eigenvalues that a growing trace has left behind."""
HASTE = 3.0
"""Exponential growth has ``t d log|L| / dt`` equal to the growth of ``log|L|`` so far; a blow-up has much more."""
LATEST = 1e9
"""Units after which the trends tell (further on they drown in rounding)."""
BLOW_UP_SIZE, DROWNED = 5.0, 8.0
"""Logarithms of the growth that a blow-up must have shown, and of that after which ``A L`` of stiff directions is rounding."""


class Relaxation:
    """A stack of Gaussians that is followed until each has come to rest, blown up, or reached the horizon.

    Members that an explicit method has not finished are ``left``; :meth:`finish` takes them on. ``y`` holds the states where
    the members ended (:func:`split_states`), ``start`` their initial s; ``settled`` says which have come to rest or blown
    up, ``turning`` which still turned at the horizon.
    """

    def __init__(self, gaussians: GaussianField, M: Array, s: Array, alpha: Array) -> None:
        B, self.d = alpha.shape
        self.gaussians = gaussians
        self.y = np.concatenate([M.reshape(B, -1), s[:, None], alpha, np.zeros((B, 1))], axis=1)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            rates = GaussianSystem(gaussians, alpha, 0.0, self.d, np.full(B, 1e300), False).rates(self.y)[3]
            self.unit = 1.0 / np.where(rates > 1e-100, rates, 1.0)
            self.start, self.blow_up_times = s.copy(), np.full(B, math.inf)
            self.settled, self.turning = np.zeros(B, dtype=bool), np.zeros(B, dtype=bool)
            self.left = _explicit(self)

    def finish(self, members: NDArray[np.intp]) -> None:
        """Follow some of those that are left, one by one."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for b in members:
                _implicit(self, int(b))


def _explicit(work: Relaxation) -> NDArray[np.intp]:
    """Runge-Kutta 4(5), every member with its own step; returns the members that are not done."""
    y, d = work.y, work.d
    active = np.arange(len(y))
    tau, h = np.zeros(len(y)), np.full(len(y), 1e-2)
    A, Bw, E = np.asarray(RK45.A), np.asarray(RK45.B), np.asarray(RK45.E)
    start = y.copy()
    for _ in range(ROUNDS):
        system = GaussianSystem(
            work.gaussians.take(active), start[active, d * d + 1 : -1], 0.0, d, work.unit[active], True
        )
        Y, step = y[active], h[active][:, None]
        K = np.empty((7, *Y.shape))
        K[0] = system(0.0, Y).reshape(Y.shape)
        for i in range(1, 6):
            K[i] = system(0.0, Y + step * np.tensordot(A[i, :i], K[:i], 1)).reshape(Y.shape)
        new = Y + step * np.tensordot(Bw, K[:6], 1)
        K[6] = system(0.0, new).reshape(Y.shape)
        scale = ATOL + RTOL * np.maximum(np.abs(Y), np.abs(new))
        error = np.sqrt(np.mean((step * np.tensordot(E, K, 1) / scale) ** 2, axis=1))
        good = error < 1.0
        y[active[good]] = new[good]
        tau[active[good]] += h[active[good]]
        factor = 0.9 * np.where(error > 0, error, 1e-10) ** -0.2
        h[active] *= np.where(np.isfinite(factor), np.clip(factor, 0.2, 5.0), 0.2)
        done = good & _finished(work, system, new, tau[active], active)
        active = active[~done]
        if not active.size:
            break
    return active


def _implicit(work: Relaxation, b: int) -> None:
    """LSODA for one member, which stays where it was when that fails."""
    y, d, member = work.y, work.d, np.array([b])
    before = y[b].copy()
    system = GaussianSystem(work.gaussians.take(member), y[member, d * d + 1 : -1], 0.0, d, work.unit[member], True)
    solver = LSODA(system, 0.0, y[b], HORIZON, rtol=1e-8, atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LSODA's own remarks: its status says the same
        for k in range(LSODA_STEPS):
            solver.step()
            if solver.status == "failed" or not np.isfinite(solver.y).all():
                y[b] = before
                return
            y[b] = solver.y
            if (k % 8 == 7 or solver.status == "finished") and _finished(
                work, system, y[member], np.array([solver.t]), member, stiff=True
            ).all():
                return


def _finished(
    work: Relaxation, system: GaussianSystem, Y: Array, tau: Array, members: NDArray[np.intp], *, stiff: bool = False
) -> NDArray[np.bool_]:
    """Which members are done; their verdicts are stored."""
    M, s, _, t = system.split(Y)
    GM, ds, _, _ = system.rates(Y)
    growth = system.growth(Y)
    grown = (growth * t >= BLOW_UP_GROWTH) & (s - work.start[members] >= BLOW_UP_SIZE)
    elapsed = t / system.unit
    size = np.maximum((M**2).sum(axis=(1, 2)), 1e-300)
    turn = (GM - ds[:, None, None] * M) @ np.swapaxes(M, 1, 2)
    still = t * np.linalg.norm(turn + np.swapaxes(turn, 1, 2), axis=(1, 2)) <= SETTLED * size
    trend = np.abs(2.0 * t * ds)
    settled = still & ((tau > PATIENCE) | (elapsed > LAPSE)) & ((trend < UNDECIDED[0]) | (trend > UNDECIDED[1]))
    # a trace that grows faster than any power of its growth so far suggests is on its way to a blow-up
    settled &= t * ds <= HASTE * np.maximum(s - work.start[members], 1.0)
    if settled.any():
        some = np.flatnonzero(settled)
        lam, trends, total = directions(M[some], GM[some], t[some])
        # what stays (in proportion to a trace that grows or falls) must be told from what dies, and nothing may still rise
        relative = trends - np.where(np.abs(total) > UNDECIDED[1], total, 0.0)[:, None]
        # of a trace that grows nothing more will be seen: what is left behind must be small, not only on its way
        grows = (total > UNDECIDED[1])[:, None]
        small = lam <= np.where(grows, LEFT_BEHIND, NEGLIGIBLE) * lam[:, -1:]
        clear = (np.abs(relative) < UNDECIDED[0]) | (~grows & (relative < -UNDECIDED[1])) | small
        settled[some] = clear.all(axis=1)
    done = np.asarray(grown | settled | (tau >= HORIZON) | (elapsed >= LATEST))
    if stiff:
        done |= s - work.start[members] > DROWNED
    work.settled[members[done]] = (grown | settled)[done]
    work.turning[members[done]] = ((tau >= HORIZON) & ~settled & ~grown)[done]
    chosen = members[grown]
    work.blow_up_times[chosen] = t[grown] + 0.5 / growth[grown]
    return done


def directions(M: Array, GM: Array, t: Array) -> tuple[Array, Array, Array]:
    """Eigenvalues of ``M M^T`` (ascending), their trends ``d log lambda_i / d log t``, and that of the trace."""
    Mt = np.swapaxes(M, 1, 2)
    lam, E = np.linalg.eigh(M @ Mt)
    moved = GM @ Mt
    slopes = np.einsum("bji,bjk,bki->bi", E, moved + np.swapaxes(moved, 1, 2), E)
    lam = np.maximum(lam, 0.0)
    trends = np.where(lam > 0, t[:, None] * slopes / np.where(lam > 0, lam, 1.0), -math.inf)
    size = (M**2).sum(axis=(1, 2))
    total = 2.0 * t * (M * GM).sum(axis=(1, 2)) / np.where(size > 0, size, 1.0)
    return lam, trends, np.asarray(total)
