r"""Covariance flows followed over decades of time, to where each eigenvalue is seen to stay or to vanish.

The few columns that move (:mod:`otattn.dynamics.low_rank_flow`) are integrated in ``log t`` by a linearly implicit method
with error control, each member of a stack with its own step. The criterion, on ``d log lambda / d log t`` measured over
each step:

- an eigenvalue *stays* when that was at most ``STILL`` in size all through the last decade;
- it *vanishes* when that was below ``-FALL`` all through the last ``FALL_DECADES`` decades, or when it is below
  ``NEGLIGIBLE`` times the largest (times the least such ratio of the start);
- the flow has settled when every eigenvalue does one or the other, and, where one stays, the covariance as a whole changed
  by at most ``STILL`` of its norm per factor e of time all through the last decade (eigenvalues may stay and directions turn).

Why ``STILL`` is so small: a flow may stand nearly still for long and go on. At ``A = -q q^T`` the moving column is ``n =
e^{-sigma V} n_0`` with ``d sigma / dt = (q n)^2``, so between the times ``1/v_2`` and ``1/v_1`` of two eigenvalues of V
(in the units of that plateau) the covariance hardly moves, and ``d log lambda / d log t`` falls like ``1/t`` and then
rises like t: it is below ``STILL`` for a decade only if ``v_2 / v_1 > 10 / STILL^2 = 10^11``. Decay like ``t^{-1/2}`` in a
factor (``1/t`` in an eigenvalue) or faster is what the flows show once they are past their plateaus.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import Radau

from otattn._linalg import Array
from otattn.dynamics.gaussian_fields import GaussianField
from otattn.dynamics.gaussian_integrator import GaussianSystem
from otattn.dynamics.low_rank_flow import LowRankFlow

__all__ = ["ERROR_ORDER", "STILL", "Followed", "Record", "follow", "follow_alone", "rosenbrock_step"]

GAMMA = 0.25
ERROR_ORDER = 4
"""The error estimate is of the order ``h^4``."""
# rows of the arguments (stages 2 to 5; stage 6 and the new state add the stage before) and of the right-hand sides
ARGUMENTS = (
    (),
    (1.544,),
    (0.9466785280815826, 0.2557011698983284),
    (3.314825187068521, 2.896124015972201, 0.9986419139977817),
    (1.221224509226641, 6.019134481288629, 12.53708332932087, -0.6878860361058950),
)
SIDES = (
    (),
    (-5.6688,),
    (-2.430093356833875, -0.2063599157091915),
    (-0.1073529058151375, -9.594562251023355, -20.47028614809616),
    (7.496443313967647, -10.24680431464352, -33.99990352819905, 11.70890893206160),
    (8.083246795921522, -7.981132988064893, -31.52159432874371, 16.31930543123136, -6.058818238834054),
)


def rosenbrock_step(rate: Callable[[Array], Array], jacobian: Array, h: Array) -> tuple[Array, Array]:
    """The increments of one step from 0, and estimates of their errors, for many small stiff systems at once.

    The method is RODAS (Hairer and Wanner, *Solving Ordinary Differential Equations II*, section VI.4): six stages,
    order 4 with an embedded method of order 3, L-stable and stiffly accurate. Each stage solves with the one matrix
    ``1/(h gamma) - J``, so a stack of systems costs one batched inverse and six batched products.

    Parameters
    ----------
    rate : callable (B, m) -> (B, m)
        Right-hand sides of B autonomous systems, as functions of the increments of their states.
    jacobian : ndarray (B, m, m)
        Their Jacobians at the start of the step.
    h : ndarray (B,)
        A step for each.
    """
    B, m = jacobian.shape[:2]
    inverse = np.linalg.inv(np.eye(m) / (GAMMA * h)[:, None, None] - jacobian)
    stages: list[Array] = []
    point = np.zeros((B, m))
    for i, side in enumerate(SIDES):
        if i < len(ARGUMENTS):
            point = sum((a * u for a, u in zip(ARGUMENTS[i], stages, strict=True)), start=np.zeros((B, m)))
        else:
            point = point + stages[-1]
        memory = sum((c * u for c, u in zip(side, stages, strict=True)), start=np.zeros((B, m)))
        stages.append(np.asarray((inverse @ (rate(point) + memory / h[:, None])[:, :, None])[:, :, 0]))
    return point + stages[-1], stages[-1]


Index = NDArray[np.intp]
Flags = NDArray[np.bool_]
_Verdict = tuple[Array, Flags, Flags]

RTOL = 1e-6
"""Relative error of a step in N and in Y, each in its Frobenius norm."""
STILL, STILL_DECADES = 1e-5, 1.0
FALL, FALL_DECADES = 0.5, 3.0
NEGLIGIBLE = 1e-12
LATEST = 1e17
"""Initial time units after which a flow is left."""
MAX_STEPS = 1500
GROWN = 1e6
"""Growth of the largest singular value after which a flow is left: it does not come to rest."""
SHORTEST = 1e-10
"""Step in ``log t`` below which a flow is left: it blows up."""
ALONE_RTOL, ALONE_ATOL, ALONE_STEPS = 1e-8, 1e-11, 600
"""For fields without columns that rest (scipy's Radau, in the pseudo-time of the integrator)."""
Y_FLOOR = 1e-13
"""Size of Y, relative to ``|Q| |N|``, below which its digits no longer matter (exponential decay goes on for ever)."""
AT_REST = 1e-13
"""Initial rate, relative to ``|V| |P| |E Y|``, that is rounding: the start is a limit."""


@dataclass(eq=False)
class Followed:
    """Where each member ended: left singular vectors and values of its factor (descending), what stays, elapsed time,
    trends over the last step, and whether it has settled."""

    vectors: Array
    values: Array
    stays: Flags
    times: Array
    trends: Array
    settled: Flags


class Record:
    """Since when each eigenvalue has stayed, and since when it has fallen.

    Parameters
    ----------
    first : ndarray (B, d)
        Singular values of the initial factors, descending.
    """

    def __init__(self, first: Array) -> None:
        ratio = np.where(first > 0.0, first / np.where(first[:, :1] > 0.0, first[:, :1], 1.0), math.inf) ** 2
        # what is zero up to rounding at the start has no digits to lose
        self.floor = NEGLIGIBLE * np.where(ratio > 1e-26, ratio, 1.0).min(axis=1, keepdims=True)
        self.first = first[:, 0].copy()
        self.moved = np.zeros_like(first)
        self.rose = np.zeros_like(first)
        self.turned = np.zeros(len(first))
        self.covariance = np.zeros((*first.shape, first.shape[1]))
        self.size = np.zeros(len(first))
        self.last = np.full(len(first), -math.inf)
        self.logs = np.zeros_like(first)

    def update(self, members: Index, x: Array, U: Array, values: Array, sizes: Array | None = None) -> _Verdict:
        """Trends since the last call, what stays and who has settled, at logarithmic times ``x`` of some members.

        ``U, values`` are singular vectors and values of the factors, up to a common scale whose logarithms are ``sizes``.
        """
        size = np.zeros(len(x)) if sizes is None else sizes
        logs = 2.0 * (np.log(np.maximum(values, 1e-300)) + size[:, None])
        covariance = (U * values[:, None, :] ** 2) @ np.swapaxes(U, 1, 2)
        before = np.exp(np.clip(2.0 * (self.size[members] - size), -600.0, 600.0))[:, None, None]
        change = _norm(covariance - before * self.covariance[members])
        step = (x - self.last[members])[:, None]
        known = np.isfinite(step) & (step > 0.0)
        span = np.where(known, step, 1.0)
        trends = np.where(known, (logs - self.logs[members]) / span, 1.0)
        turns = ~known[:, 0] | ~(change <= STILL * span[:, 0] * _norm(covariance))
        at = x[:, None]
        self.moved[members] = np.where(np.abs(trends) > STILL, at, self.moved[members])
        self.rose[members] = np.where(trends > -FALL, at, self.rose[members])
        self.turned[members] = np.where(turns, x, self.turned[members])
        self.last[members], self.logs[members] = x, logs
        self.covariance[members], self.size[members] = covariance, size
        decade = math.log(10.0)
        gone = values**2 <= self.floor[members] * values[:, :1] ** 2
        stays = (at - self.moved[members] >= STILL_DECADES * decade) & ~gone
        vanishes = (at - self.rose[members] >= FALL_DECADES * decade) | gone
        rests = (x - self.turned[members] >= STILL_DECADES * decade) | ~stays.any(axis=1)
        return trends, stays, (stays | vanishes).all(axis=1) & rests


class _State:
    """``N``, ``Y`` and ``t + unit`` of a stack, with logarithmic steps ``h``."""

    def __init__(self, flow: LowRankFlow) -> None:
        self.flow, self.N, self.Y = flow, flow.N.copy(), flow.Y.copy()
        _, P, _, X = flow._parts(self.N, self.Y)
        speed = np.linalg.norm(flow.rate(self.N, self.Y), axis=(1, 2))
        natural = _norm(flow.V) * _norm(P) * _norm(X)
        self.rest = ~(speed > AT_REST * natural)
        size = _norm(flow.factor(self.N))
        self.unit = np.where(self.rest, 1.0, size / np.where(self.rest, 1.0, speed))
        self.clock = self.unit.copy()
        self.h = np.full(len(speed), 1e-3)
        self.floor = Y_FLOOR * _norm(flow.Q)
        self.inverse = np.linalg.pinv(flow.Q, rcond=1e-12)

    def step(self, members: Index) -> Flags:
        """Try one step of each of some members; returns those that took it."""
        N, Y, clock, h = self.N[members], self.Y[members], self.clock[members], self.h[members]
        flow = self.flow.take(members)
        n = _norm(N)[:, None, None]
        n = np.where(n > 0.0, n, 1.0)
        # increments are measured in units of N and Y, so that the solves keep the digits of a small Y
        y = np.maximum(_norm(Y), self.floor[members] * n[:, 0, 0])[:, None, None]
        y = np.where(y > 0.0, y, 1.0)
        B, d, r = N.shape

        def split(u: Array) -> tuple[Array, Array, Array]:
            return N + n * u[:, : d * r].reshape(B, d, r), Y + y * u[:, d * r : -1].reshape(B, r, r), 1.0 + u[:, -1]

        def rate(u: Array) -> Array:
            M, Z, grown = split(u)
            moved = flow.rate(M, Z) * (clock * grown)[:, None, None]
            lifted = flow.Q @ moved / y
            return np.concatenate([(moved / n).reshape(B, -1), lifted.reshape(B, -1), grown[:, None]], axis=1)

        u, error = rosenbrock_step(rate, self._jacobian(flow, N, Y, n, y, clock), h)
        M, Z, grown = split(u)
        M = M + self.inverse[members] @ (Z - flow.Q @ M)  # Q N = Y
        of_n = np.linalg.norm(error[:, : d * r], axis=1) / np.maximum(_norm(M) / n[:, 0, 0], 1e-3)
        of_y = np.linalg.norm(error[:, d * r : -1], axis=1) / np.maximum(_norm(Z) / y[:, 0, 0], 0.2)
        size = np.maximum(of_n, of_y) / RTOL
        size = np.where(np.isfinite(size), size, 1e10)
        good = size < 1.0
        g = members[good]
        self.N[g], self.Y[g], self.clock[g] = M[good], Z[good], (clock * grown)[good]
        self.h[members] = h * np.clip(0.9 * np.maximum(size, 1e-10) ** (-1.0 / ERROR_ORDER), 0.2, 4.0)
        return np.asarray(good)

    @staticmethod
    def _jacobian(flow: LowRankFlow, N: Array, Y: Array, n: Array, y: Array, clock: Array) -> Array:
        """Of the scaled system in ``log t``."""
        B, d, r = N.shape
        time = clock[:, None, None]
        own = flow.jacobian(N, Y) * time
        moved = (flow.rate(N, Y) * time).reshape(B, d * r, 1)
        top = np.concatenate([own[:, :, : d * r] * n, own[:, :, d * r :] * y, moved], axis=2)
        J = np.zeros((B, d * r + r * r + 1, d * r + r * r + 1))
        J[:, : d * r] = top / n
        J[:, d * r : -1] = (flow.Q @ top.reshape(B, d, -1)).reshape(B, r * r, -1) / y
        J[:, -1, -1] = 1.0
        return J


def follow(flow: LowRankFlow, *, max_steps: int = MAX_STEPS) -> Followed:
    """Follow a stack of covariance flows until each has settled, or is left."""
    state = _State(flow)
    B, d = flow.N.shape[:2]
    U, w, _ = np.linalg.svd(flow.factor(flow.N))
    gone = w <= 1e-13 * w[:, :1]
    out = Followed(U, w, state.rest[:, None] & ~gone, np.zeros(B), np.zeros((B, d)), state.rest.copy())
    record = Record(w)
    active = np.flatnonzero(~state.rest)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for _ in range(max_steps):
            if not active.size:
                break
            try:
                good = state.step(active)
            except np.linalg.LinAlgError:  # a member that blows up has left float64
                break
            g = active[good]
            done = state.h[active] < SHORTEST
            if g.size:
                done[good] |= _observe(state, record, out, g)
            active = active[~done]
    return out


def _observe(state: _State, record: Record, out: Followed, g: Index) -> Flags:
    """Note the eigenvalues of members that have moved; returns those that are done."""
    elapsed = (state.clock[g] - state.unit[g]) / state.unit[g]
    factor = state.flow.take(g).factor(state.N[g])
    finite = np.isfinite(factor).all(axis=(1, 2)) & (elapsed > 0.0)
    U, w, _ = np.linalg.svd(np.where(finite[:, None, None], factor, 0.0))
    trends, stays, settled = record.update(g, np.log(np.where(finite, elapsed, 1e-300)), U, w)
    settled &= finite
    out.vectors[g], out.values[g], out.stays[g], out.trends[g] = U, w, stays, trends
    out.times[g], out.settled[g] = elapsed * state.unit[g], settled
    grown = w[:, 0] > GROWN * record.first[g]
    return np.asarray(settled | ~finite | grown | (elapsed > LATEST))


def _norm(M: Array) -> Array:
    return np.asarray(np.linalg.norm(M, axis=(-2, -1)))


def follow_alone(gaussians: GaussianField, M: Array, s: Array, alpha: Array) -> Followed:
    """The same for any field, one member after the other, the factor whole: slower, and with fewer digits."""
    B, d = alpha.shape
    out = Followed(
        np.broadcast_to(np.eye(d), (B, d, d)).copy(),
        np.zeros((B, d)),
        np.zeros((B, d), dtype=bool),
        np.zeros(B),
        np.zeros((B, d)),
        np.zeros(B, dtype=bool),
    )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the solver's own remarks: its status says the same
        for b in range(B):
            _follow_one(gaussians.take(np.array([b])), M[b], float(s[b]), alpha[b], out, b)
    return out


def _follow_one(gaussians: GaussianField, M: Array, s: float, alpha: Array, out: Followed, b: int) -> None:
    d = len(alpha)
    y = np.concatenate([M.ravel(), [s], alpha, [0.0]])
    speed = float(GaussianSystem(gaussians, alpha[None], 0.0, d, np.array([1e300]), False).rates(y)[3][0])
    U, w, _ = np.linalg.svd(M)
    if not speed > AT_REST:
        out.vectors[b], out.values[b], out.stays[b], out.settled[b] = U, math.exp(s) * w, w > 1e-13 * w[0], True
        return
    system = GaussianSystem(gaussians, alpha[None], 0.0, d, np.array([1.0 / speed]), True)
    record = Record(w[None])
    solver = Radau(system, 0.0, y, math.inf, rtol=ALONE_RTOL, atol=ALONE_ATOL)
    for _ in range(ALONE_STEPS):
        try:
            solver.step()
        except (ValueError, np.linalg.LinAlgError):  # the trial of a step has left float64
            return
        if solver.status == "failed" or not np.isfinite(solver.y).all():
            return
        F, size, _, t = system.split(solver.y)
        elapsed = float(t[0]) * speed
        if not elapsed > 0.0 or elapsed > LATEST:
            return
        U, w, _ = np.linalg.svd(F[0])
        at = np.array([math.log(elapsed)])
        trends, stays, settled = record.update(np.array([0]), at, U[None], w[None], size - s)
        out.vectors[b], out.values[b] = U, math.exp(min(float(size[0]), 300.0)) * w
        out.trends[b], out.stays[b], out.times[b] = trends[0], stays[0], float(t[0])
        if settled[0]:
            out.settled[b] = True
            return
