r"""The particle flow of attention: ``x_i'(t) = Gamma_{mu(t)}(x_i(t))`` with scipy's solvers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from otattn import _validate as check
from otattn._linalg import Array
from otattn._progress import LOG, reaching
from otattn.dynamics.trajectory import FlowStatus, Trajectory
from otattn.dynamics.velocity import Field, Normalization, Velocity, layer_at, linear_growth
from otattn.errors import ConvergenceError
from otattn.measures import MeasureLike

__all__ = ["check_span", "check_times", "flow"]

Event = Callable[[float, Array], float]
Method = Literal["DOP853", "RK45", "RK23", "Radau", "BDF"]
METHODS = ("DOP853", "RK45", "RK23", "Radau", "BDF")

BLOW_UP_GROWTH = 1e9
"""Growth rate times elapsed time at which a flow counts as blowing up: what is left of it is 1e-9 of that time."""
COLLAPSE_GROWTH = 1e3
"""The same where the steps have collapsed to rounding."""
STEEP = 1e6
"""Relative speed times duration above which the first step is ours."""


class _Guard:
    """The velocity on flat states in local time; what cannot be evaluated is nan, which makes the solver step back."""

    def __init__(self, velocity: Velocity, weights: Array, limit: int) -> None:
        self.limit = limit
        self.velocity, self.live = velocity, weights > 0
        self.shape = velocity.measure.points.shape
        self.reason, self.overflow = "", False
        self.count = 0
        self.reached: Callable[[float], None] = lambda t: None

    def __call__(self, t: float, y: Array) -> Array:
        self.count += 1
        if self.count > self.limit:
            self.reason = f"The velocity was evaluated {self.limit} times; raise max_evaluations or loosen rtol."
            return np.full(y.shape, np.nan)
        if not np.isfinite(y).all():
            return np.full(y.shape, np.nan)
        self.reached(t)
        try:
            v = self.velocity(self.velocity.start + t, y.reshape(self.shape)).ravel()
        except (OverflowError, ConvergenceError, ValueError) as exc:
            self.reason, self.overflow = str(exc), isinstance(exc, OverflowError)
            return np.full(y.shape, np.nan)
        return v if np.isfinite(v).all() else np.full(y.shape, np.nan)

    def growth(self, t: float, y: Array, scale: float) -> float:
        """``d log|x| / dt`` of the tokens of positive weight, counted from the size ``scale``."""
        v = self(t, y).reshape(self.shape)[self.live]
        x = y.reshape(self.shape)[self.live]
        top = max(float(np.abs(x).max()), scale)
        return float(((x / top) * (v / top)).sum() / (((x / top) ** 2).sum() + (scale / top) ** 2))


def flow(
    attention: Field,
    mu: MeasureLike,
    *,
    t_span: tuple[float, float],
    normalization: Normalization = None,
    t_eval: ArrayLike | None = None,
    method: Method = "DOP853",
    rtol: float = 1e-8,
    atol: float = 1e-10,
    events: Event | Sequence[Event] | None = None,
    dense: bool = True,
    max_evaluations: int = 50_000,
    progress: bool = False,
) -> Trajectory:
    r"""Tokens that follow the attention of their own measure.

    .. math:: \dot x_i = \Gamma_{\mu(t)}(x_i), \qquad \mu(t) = \sum_i w_i \delta_{x_i(t)}

    The limit of a residual network ``x + (1/L) Gamma`` of infinite depth (:func:`residual_steps` is the finite one).
    A layer that holds its own skip connection (Residual, TransformerBlock) moves tokens by its increment. Tokens of
    zero weight are carried along and act on nobody.

    Flows of normalised kernels exist for all times: the support radius is at most ``R_0 e^{t ||V||}``. Others may
    leave every ball in finite time: the flow then stops with status "blow_up", keeps what was computed, and gives
    the time, extrapolated from the growth rate ``g = d log|x| / dt`` (``1 / g`` reaches 0 at the blow-up).

    Parameters
    ----------
    attention : AttentionMap or callable t -> AttentionMap
        Any map with values in the space of the tokens.
    mu : measure or array_like (n, d)
        DiscreteMeasure, SpaceTimeMeasure (kept with its times), or tokens of equal weights.
    t_span : (float, float)
        Start and end, start < end.
    normalization : None, "sphere" or "rescaled"
        "sphere" projects the velocity so that each token keeps its norm; "rescaled" gives ``z = e^{-tV} x`` (t from
        the start; ``E(t)^{-1} x`` with ``E' = V(t) E`` for a callable), whose parameters stay bounded for ``||A|| e^{2 t
        ||V||}`` below 1e308.
    t_eval : array_like (T,), optional
        Strictly increasing times within ``t_span`` to report; the solver's steps by default.
    method : {"DOP853", "RK45", "RK23", "Radau", "BDF"}
        Solver of scipy.
    rtol, atol : float
        Relative and absolute tolerance of a step.
    events : callable or sequence of callables, optional
        ``event(t, X) -> float`` with ``X (n, d)``; its zeros are reported, and end the flow when
        ``event.terminal`` is true (``event.direction`` as in scipy).
    dense : bool
        Keep the interpolation between steps, so that ``trajectory(t)`` works (7 copies of the tokens a step).
    max_evaluations : int
        Evaluations of the velocity after which the flow ends with status "failed", keeping what was computed.
    progress : bool
        Show a bar on the error stream.

    Returns
    -------
    Trajectory

    Raises
    ------
    ValueError
        A reversed or empty time span, times outside it, values in another space, zero tokens on the sphere.
    ConvergenceError
        A Sinkhorn kernel does not converge at the initial tokens.

    Examples
    --------
    >>> from otattn.attention import LinearAttention, SoftmaxAttention
    >>> mean_field = SoftmaxAttention([[0.0]], [[-1.0]])       # everybody moves against the mean
    >>> flow(mean_field, [[1.0]], t_span=(0.0, 1.0)).points[-1]
    array([[0.36787944]])
    >>> flow(LinearAttention([[1.0]], [[1.0]]), [[1.0]], t_span=(0.0, 1.0)).blow_up_time   # x' = x^3
    0.5000000...

    References
    ----------
    Sander, Ablin, Blondel, Peyre, "Sinkformers", AISTATS 2022; Geshkovski, Letrouit, Polyanskiy, Rigollet, "The
    emergence of clusters in self-attention dynamics", 2023; Castin, Ablin, Carrillo, Peyre, "A Unified Perspective
    on the Dynamics of Deep Transformers", 2025.
    """
    start, stop = check_span(t_span)
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, received {method!r}.")
    measure = layer_at(attention, start).as_measure(mu)
    velocity = Velocity(attention, measure, normalization, start, stop)
    wanted = None if t_eval is None else check_times(t_eval, start, stop)
    duration = stop - start
    guard = _Guard(velocity, measure.weights, check.count(max_evaluations, "max_evaluations"))
    y0 = velocity.retract(measure.points).ravel()
    try:
        v0 = velocity(start, y0.reshape(guard.shape))
    except OverflowError as exc:
        # the first velocity exceeds the largest float: whatever happens, happens before the next representable time
        kept = int(wanted is None or wanted[0] == start)
        return Trajectory.along(
            velocity,
            np.array([start])[:kept],
            measure.points[None][:kept],
            np.empty(0) if wanted is None else wanted[wanted > start],
            status="blow_up",
            blow_up_time=start,
            end=start,
            t_span=(start, stop),
            solver=method,
            tolerance=(rtol, atol),
            evaluations=1,
            message=f"the first velocity is beyond float64: {exc}",
        )
    user = [] if events is None else list(events) if isinstance(events, Sequence) else [events]
    watch = not linear_growth(attention) and normalization is None
    scale = float(np.abs(y0).max()) or float(np.abs(v0).max()) * duration or 1.0
    calls = [_wrapped(e, velocity) for e in user]
    if watch:
        calls.append(_blow_up_event(guard, scale))
    first = {}
    speed = float(np.abs(v0).max()) / scale
    if speed * duration > STEEP:  # the solver's own guess squares such velocities
        first = {"first_step": min(duration, 1e-2 / speed)}
    with np.errstate(all="ignore"), reaching("flow", duration, progress=progress) as guard.reached:
        solution = solve_ivp(
            guard,
            (0.0, duration),
            y0,
            method=method,
            t_eval=None if wanted is None else np.clip(wanted - start, 0.0, duration),
            rtol=check.positive(rtol, "rtol"),
            atol=check.positive(atol, "atol", zero=True),
            events=calls or None,
            dense_output=True,
            **first,
        )
        status, blow_up, message = _outcome(solution, guard, watch, scale, start, duration, y0)
    LOG.info("flow: %s at t = %.6g after %d evaluations", status, start + float(solution.sol.ts[-1]), guard.count)
    flat, count = np.transpose(solution.y), len(solution.t)
    if count == 0 and wanted is not None and wanted[0] == start:
        flat, count = y0[None], 1  # without a single step scipy does not report the initial state
    times = solution.t + start if wanted is None else wanted[:count]
    states = np.asarray(flat, dtype=np.float64).reshape(count, *guard.shape)
    steps = np.asarray(solution.sol.ts)
    kept = len(user)
    event_times = tuple(np.asarray(t) + start for t in (solution.t_events or [])[:kept])
    event_states = tuple(np.reshape(y, (-1, *guard.shape)) for y in (solution.y_events or [])[:kept])
    return Trajectory.along(
        velocity,
        times,
        velocity.retract(states),
        np.empty(0) if wanted is None else wanted[count:],
        status=status,
        blow_up_time=blow_up,
        end=min(start + float(steps[-1]), stop),
        t_span=(start, stop),
        solver=method,
        tolerance=(float(rtol), float(atol)),
        evaluations=guard.count,
        message=message,
        event_times=event_times,
        event_points=event_states,
        steps=check.frozen(steps) if dense else None,
        dense=solution.sol if dense else None,
    )


def check_span(t_span: Any) -> tuple[float, float]:
    """Start and end of a flow, in this order."""
    span = check.vector(t_span, "t_span", size=2)
    if not span[0] < span[1]:
        raise ValueError(
            f"t_span must be (start, end) with start < end, received ({span[0]:g}, {span[1]:g}); swap them, or change "
            "the sign of V to go backwards."
        )
    return float(span[0]), float(span[1])


def check_times(t_eval: ArrayLike, start: float, stop: float) -> Array:
    """Strictly increasing times within the span."""
    times = check.vector(t_eval, "t_eval")
    if times.size == 0 or (np.diff(times) <= 0).any():
        raise ValueError(f"t_eval must be strictly increasing and not empty, received {times.size} times; sort them.")
    if times[0] < start or times[-1] > stop:
        raise ValueError(
            f"t_eval must lie in t_span = [{start:g}, {stop:g}], received [{times[0]:g}, {times[-1]:g}]; widen t_span."
        )
    return times


def _wrapped(event: Event, velocity: Velocity) -> Any:
    def call(t: float, y: Array) -> float:
        x = velocity.retract(y.reshape(velocity.measure.points.shape))
        return float(event(velocity.start + t, x))

    for name, default in (("terminal", False), ("direction", 0.0)):
        setattr(call, name, getattr(event, name, default))
    return call


def _blow_up_event(guard: _Guard, scale: float) -> Any:
    def call(t: float, y: Array) -> float:
        return guard.growth(t, y, scale) * t - BLOW_UP_GROWTH

    call.terminal = True  # type: ignore[attr-defined]
    call.direction = 1.0  # type: ignore[attr-defined]
    return call


def _outcome(
    solution: Any, guard: _Guard, watch: bool, scale: float, start: float, duration: float, y0: Array
) -> tuple[FlowStatus, float, str]:
    """Status, blow-up time and message of a finished integration."""
    if solution.status == 0:
        return "success", math.inf, "the end of the time span was reached"
    steps = solution.sol.ts
    last = float(steps[-1])
    if watch and len(steps) == 1:
        # not even a first step: the velocities near the start are beyond the squares that the solver takes
        rate = guard.growth(0.0, y0, scale)
        if rate * duration >= BLOW_UP_GROWTH:
            return "blow_up", start + 1.0 / rate, "the tokens leave every ball at once"
    elif watch:
        rate = guard.growth(last, solution.sol(last), scale)
        if solution.status == -1 or rate * last >= 0.5 * BLOW_UP_GROWTH:
            if not rate * last >= COLLAPSE_GROWTH:
                return _failure(solution, guard)
            left = 1.0 / rate
            if len(steps) > 2:
                before = float(steps[-2])
                slope = (left - 1.0 / guard.growth(before, solution.sol(before), scale)) / (last - before)
                left = min(left, -left / slope) if slope < 0 else left
            return "blow_up", start + last + left, "the tokens leave every ball in finite time"
    if solution.status == 1:
        return "event", math.inf, "a terminal event ended the flow"
    return _failure(solution, guard)


def _failure(solution: Any, guard: _Guard) -> tuple[FlowStatus, float, str]:
    return "overflow" if guard.overflow else "failed", math.inf, f"{solution.message} {guard.reason}".strip()
