r"""Integration of Gaussian flows in a time that stays bounded through blow-ups.

State of each member: ``(M, s, alpha, t)`` with ``Sigma = e^{2s} M M^T``, moved in the common pseudo-time tau by

    ``dt/dtau = 1 / rho``,  ``ds/dtau = <M, G M> / (|M|^2 rho)``,  ``dM/dtau = G M / rho - (ds/dtau) M``,

``rho^2 = |G M|^2 / |M|^2 + |alpha'|^2 / (|alpha|^2 + |alpha_0|^2 + e^{2s}) + (slowest rate)^2``. All right-hand sides
are bounded (``|ds/dtau| <= 1``) and ``|M|`` is constant; at a blow-up ``t(tau)`` converges to ``t*`` while
``s`` grows like tau. Each member has its own t, so a stack of Gaussians with different blow-up times takes the
steps of one. Members that are done leave the stack.

At the end the growth rate ``g = d/dt log(size)`` of a flow of cubic growth (softmax, linear) has ``1/g -> 0``
linearly with slope -2, so ``t* = t + 1 / (2 g)`` up to the relative error of the shape times ``1/(g t) = 1e-10``.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import DOP853, LSODA

from otattn._linalg import Array
from otattn.dynamics.gaussian_fields import GaussianField

__all__ = ["BLOW_UP_GROWTH", "GaussianRun", "GaussianSystem", "integrate"]

BLOW_UP_GROWTH = 1e10
"""Growth rate times elapsed time at which a flow has blown up."""
MAX_MEAN = 1e140
"""Means beyond this size end a flow: their squares leave float64."""
EXPLICIT_STEPS = 300
"""Steps, plus one a member, after which those that are left count as stiff."""
BAND_ENTRIES = 2**23
"""Of the band that LSODA keeps for stiff members that go together."""
ROOT_STEPS = 60
"""Evaluations for a wanted time inside a step; four to ten are usual."""
EPS = float(np.finfo(np.float64).eps)
NODES = 0.5 - 0.5 * np.cos(np.pi * np.arange(14) / 13.0)
"""Fourteen points carry the interpolants of DOP853 (degree 7) and LSODA (degree 12 at most) exactly."""
WEIGHTS = (-1.0) ** np.arange(14) * np.where(np.arange(14) % 13 == 0, 0.5, 1.0)


@dataclass(eq=False)
class GaussianRun:
    """What an integration left, for a stack of B Gaussians.

    Attributes
    ----------
    rows : list of B lists of states
        ``(M, s, alpha, t)``, flat, at the local times t that were reached.
    status : list of B strings
        "success", "blow_up", "overflow" or "failed".
    blow_up_times : ndarray (B,)
    last : ndarray (B, d d + d + 2)
        The states in which the members stopped.
    """

    rows: list[list[Array]]
    status: list[str]
    blow_up_times: Array
    last: Array


def split_states(Y: Array, d: int) -> tuple[Array, Array, Array, Array]:
    """``M, s, alpha, t`` of a stack of flat states."""
    return Y[:, : d * d].reshape(-1, d, d), Y[:, d * d], Y[:, d * d + 1 : -1], Y[:, -1]


class GaussianSystem:
    """The flat right-hand side of the members that still move."""

    def __init__(
        self,
        gaussians: GaussianField,
        alpha0: Array,
        start: float,
        d: int,
        unit: Array,
        logs: bool,
        end: float = math.inf,
    ) -> None:
        self.gaussians, self.start, self.d, self.unit, self.logs, self.end = gaussians, start, d, unit, logs, end
        self.anchor = (alpha0**2).sum(axis=1)

    def split(self, y: Array) -> tuple[Array, Array, Array, Array]:
        return split_states(y.reshape(len(self.anchor), -1), self.d)

    def rates(self, y: Array) -> tuple[Array, Array, Array, Array]:
        """``G M``, ``ds/dt``, ``alpha'`` and the clock rate rho."""
        M, s, alpha, t = self.split(y)
        # the last step may reach beyond the end, where the caller's parameters need not exist
        GM, da = self.gaussians.rates(M, s, alpha, self.start + np.minimum(t, self.end))
        size = (M**2).sum(axis=(1, 2))
        safe = np.where(size > 0, size, 1.0)
        ds = (M * GM).sum(axis=(1, 2)) / safe
        spread = np.exp(np.minimum(2.0 * s, 600.0)) * (size > 0)
        room = (alpha**2).sum(axis=1) + self.anchor + spread
        drift = (da**2).sum(axis=1) / np.where(room > 0, room, 1.0)
        own = (GM**2).sum(axis=(1, 2)) / safe + drift
        # never slower than one unit of time, or (towards a limit) than a factor e of the elapsed time
        slowest = 1.0 / (np.maximum(t, 0.0) + self.unit) if self.logs else 1.0 / self.unit
        return GM, ds, da, np.sqrt(own + slowest**2)

    def __call__(self, tau: float, y: Array) -> Array:
        M = self.split(y)[0]
        GM, ds, da, rho = self.rates(y)
        r = rho[:, None]
        dM = (GM - ds[:, None, None] * M) / r[..., None]
        return np.asarray(np.concatenate([dM.reshape(len(M), -1), ds[:, None] / r, da / r, 1.0 / r], axis=1).ravel())

    def growth(self, y: Array) -> Array:
        """``d/dt log (e^{2s} |M|^2 + |alpha|^2)^{1/2}``."""
        M, s, alpha, _ = self.split(y)
        _, ds, da, _ = self.rates(y)
        size = (M**2).sum(axis=(1, 2))
        shrink = np.exp(-2.0 * np.clip(s, -300.0, 300.0))
        mean, moved = shrink * (alpha**2).sum(axis=1), shrink * (alpha * da).sum(axis=1)
        total = size + mean
        return np.asarray((ds * size + moved) / np.where(total > 0, total, 1.0))


def integrate(
    gaussians: GaussianField,
    M: Array,
    s: Array,
    alpha: Array,
    *,
    start: float,
    duration: float,
    t_eval: Array | None,
    rtol: float,
    atol: float,
    max_steps: int,
) -> GaussianRun:
    """Integrate a stack of Gaussians over ``duration`` (local times from 0); see the module's docstring."""
    B = len(alpha)
    y = np.concatenate([M.reshape(B, -1), s[:, None], alpha, np.zeros((B, 1))], axis=1)
    run = GaussianRun([[] for _ in range(B)], ["failed"] * B, np.full(B, math.inf), y)
    if t_eval is None or t_eval[0] == 0.0:
        _keep(run, np.arange(B), y[:, -1], y)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        rates = GaussianSystem(gaussians, alpha, start, alpha.shape[1], np.full(B, duration), False, duration).rates(y)[
            3
        ]
    unit = 1.0 / np.where(np.isfinite(rates), rates, 1.0 / duration)
    task = _Task(gaussians, alpha, start, duration, unit, t_eval, rtol, atol)
    explicit = EXPLICIT_STEPS + B
    left = _march(run, np.arange(B), task, DOP853, min(explicit, max_steps))
    if left.size and max_steps > explicit:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LSODA's own remarks: its status says the same
            _march_stiff(run, left, task, max_steps - explicit)
    return run


def _march_stiff(run: GaussianRun, members: NDArray[np.intp], task: _Task, max_steps: int) -> None:
    """Stiff members go on together, with a solver for them whose Jacobian has one block a member.

    Its error norm is a maximum: each member meets the tolerance. Those whose company ends in a failure are tried alone.
    """
    size = run.last.shape[1]
    together = max(1, BAND_ENTRIES // (3 * size**2))
    for start in range(0, len(members), together):
        group = members[start : start + together]
        for b in _march(run, group, task, LSODA, max_steps):
            if len(group) > 1:
                _march(run, np.array([b]), task, LSODA, max_steps)


@dataclass(frozen=True, eq=False)
class _Task:
    """What all members of a stack share."""

    gaussians: GaussianField
    alpha0: Array
    start: float
    duration: float
    unit: Array
    """In which each member first moves."""
    t_eval: Array | None
    rtol: float
    atol: float


def _march(run: GaussianRun, active: NDArray[np.intp], task: _Task, method: Any, max_steps: int) -> NDArray[np.intp]:
    """Move members until they are done or ``max_steps`` are taken; returns those that are not."""
    y, d = run.last, task.alpha0.shape[1]
    # DOP853's error norm is a mean over the stack: a single member must meet the tolerance alone. LSODA's is a maximum
    multistep = method is LSODA
    share = 1.0 if multistep else math.sqrt(active.size)
    solver: Any = None
    tau, first, taken = 0.0, None, 0
    moving = np.ones(active.size, dtype=bool)
    while moving.any() and taken < max_steps:
        if solver is None:
            unit = task.unit[active] if multistep and active.size > 1 else np.full(active.size, task.duration)
            gaussians, alpha0 = task.gaussians.take(active), task.alpha0[active]
            system = GaussianSystem(gaussians, alpha0, task.start, d, unit, multistep, task.duration)
            band = {"lband": y.shape[1] - 1, "uband": y.shape[1] - 1} if multistep and active.size > 1 else {}
            with np.errstate(over="ignore", invalid="ignore"):
                solver = method(
                    system,
                    tau,
                    y[active].ravel(),
                    math.inf,
                    rtol=max(task.rtol / share, 3e-14),
                    atol=task.atol / share,
                    first_step=first,
                    **band,
                )
        before = y[active, -1]
        with np.errstate(over="ignore", invalid="ignore"):
            solver.step()
        taken += 1
        if solver.status == "failed" or not np.isfinite(solver.y).all():
            break
        Y = solver.y.reshape(active.size, -1)
        y[active[moving]] = Y[moving]
        now = Y[:, -1]
        arrived = moving & (now >= task.duration)
        with np.errstate(over="ignore", invalid="ignore"):
            growth = system.growth(solver.y)
        grown = moving & ~arrived & (growth * now >= BLOW_UP_GROWTH)
        lost = moving & ~arrived & ~grown & (np.abs(Y[:, d * d + 1 : -1]).max(axis=1) > MAX_MEAN)
        done = arrived | grown | lost
        if task.t_eval is not None or arrived.any():
            _between(run, solver, active, before, np.minimum(now, task.duration), arrived, moving, task.t_eval)
        if task.t_eval is None:
            still = moving & ~arrived
            _keep(run, active[still], now[still], Y[still])
        if done.any():
            for k in np.flatnonzero(done):
                b = int(active[k])
                run.status[b] = "success" if arrived[k] else "blow_up" if grown[k] else "overflow"
                if grown[k]:
                    run.blow_up_times[b] = now[k] + 0.5 / growth[k]
            moving &= ~done
            # a start costs a multistep method its order: members that have arrived drift on until half have
            if not multistep or (grown | lost).any() or 2 * moving.sum() <= active.size:
                tau, first = float(solver.t), float(solver.step_size)
                active, moving, solver = active[moving], moving[moving], None
    return active[moving]


def _keep(run: GaussianRun, members: NDArray[np.intp], times: Array, Y: Array) -> None:
    """Append states, with their times."""
    for b, time, row in zip(members, times, Y, strict=True):
        run.rows[int(b)].append(np.append(row[:-1], time))


def _between(
    run: GaussianRun,
    solver: Any,
    active: NDArray[np.intp],
    before: Array,
    now: Array,
    arrived: NDArray[np.bool_],
    moving: NDArray[np.bool_],
    t_eval: Array | None,
) -> None:
    """States at the wanted times inside the last step: ``t(tau)`` is inverted on the solver's interpolant."""
    if t_eval is None:
        members = np.flatnonzero(arrived)
        targets = now[members]
    else:
        inside = moving[:, None] & (t_eval > before[:, None]) & (t_eval <= now[:, None])
        members, which = np.nonzero(inside)
        targets = t_eval[which]
    if not members.size:
        return
    nodes = solver.t_old + (solver.t - solver.t_old) * NODES
    values = solver.dense_output()(nodes).reshape(active.size, -1, NODES.size)[members]
    _keep(run, active[members], targets, _at(values, _places(values[:, -1:], targets)))


def _places(clocks: Array, targets: Array) -> Array:
    """Where increasing polynomials ``(m, 1, k)`` take their targets, in [0, 1]: false position, an end that stays twice halved."""
    low, high = np.zeros(len(targets)), np.ones(len(targets))
    below, above = clocks[:, 0, 0] - targets, clocks[:, 0, -1] - targets
    fell = np.zeros(len(targets), dtype=np.int8)
    x = high
    for _ in range(ROOT_STEPS):
        gap = above - below
        x = np.clip(low - below * np.divide(high - low, gap, out=np.zeros_like(gap), where=gap > 0), low, high)
        off = _at(clocks, x)[:, 0] - targets
        if (np.abs(off) <= 4.0 * EPS * targets).all():
            break
        left = off < 0
        above = np.where(left, np.where(fell == 1, 0.5 * above, above), off)
        below = np.where(left, off, np.where(fell == -1, 0.5 * below, below))
        low, high = np.where(left, x, low), np.where(left, high, x)
        fell = np.where(left, 1, -1).astype(np.int8)
    return np.asarray(x)


def _at(values: Array, x: Array) -> Array:
    """Polynomials ``(m, c)`` through the values ``(m, c, k)`` at the nodes, each at its own x (barycentric formula)."""
    gap = x[:, None] - NODES
    hit = gap == 0.0
    weight = np.where(hit.any(axis=1, keepdims=True), hit, WEIGHTS / np.where(hit, 1.0, gap))
    return np.asarray((values @ weight[..., None])[..., 0] / weight.sum(axis=1, keepdims=True))
