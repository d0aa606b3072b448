"""A flow of tokens: their positions in time, and how the computation ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._files.ode_solution import packed, unpacked
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.attention.base import Measure
from otattn.dynamics.velocity import Normalization, Velocity

__all__ = ["FlowStatus", "Trajectory"]

FlowStatus = Literal["success", "blow_up", "event", "overflow", "failed"]


@dataclass(frozen=True, eq=False)
class Trajectory(Result):
    """Tokens along a flow.

    Attributes
    ----------
    times : ndarray (T,)
        Those of ``t_eval`` that were reached, or the solver's own steps.
    points : ndarray (T, n, d)
    weights : ndarray (n,)
        Constant in time.
    token_times : ndarray (n,) or None
        Times of the tokens of a space-time measure (causal flows).
    status : str
        "success"; "blow_up" (the tokens leave every ball before the end); "event" (a terminal event of the caller);
        "overflow" (finite-depth networks and rescaled tokens: float64 ends); "failed" (``message`` says why). All that
        was computed is kept.
    blow_up_time : float
        inf when there is no blow-up in the time span.
    end : float
        Last time that was computed.
    missed : ndarray
        Times of ``t_eval`` that were not reached.
    normalization : None, "sphere" or "rescaled"
    t_span : (float, float)
    event_times : tuple of ndarray
        Zeros of each of the caller's events.
    event_points : tuple of ndarray (k, n, d)
    solver : str
    tolerance : (float, float)
        Relative and absolute, as asked for.
    evaluations : int
        Evaluations of the velocity.
    message : str
    """

    times: Array
    points: Array
    weights: Array
    token_times: Array | None
    status: FlowStatus
    blow_up_time: float
    end: float
    missed: Array
    normalization: Normalization
    t_span: tuple[float, float]
    solver: str
    tolerance: tuple[float, float]
    evaluations: int
    message: str
    velocity: Velocity = field(repr=False)
    event_times: tuple[Array, ...] = ()
    event_points: tuple[Array, ...] = ()
    steps: Array | None = field(default=None, repr=False)
    dense: Callable[[float], Array] | None = field(default=None, repr=False)

    @classmethod
    def along(cls, velocity: Velocity, times: Array, points: Array, missed: Array, **outcome: Any) -> Trajectory:
        """The trajectory of a velocity's measure, with what is said of its computation."""
        measure = velocity.measure
        return cls(
            times=check.frozen(times),
            points=check.frozen(points),
            weights=measure.weights,
            token_times=getattr(measure, "times", None),
            missed=check.frozen(missed),
            normalization=velocity.normalization,
            velocity=velocity,
            **outcome,
        )

    def _to_fields(self) -> dict[str, Any]:
        return {**super()._to_fields(), "dense": None if self.dense is None else packed(self.dense)}

    @classmethod
    def _from_fields(cls, state: dict[str, Any]) -> Any:
        dense = state.get("dense")
        return super()._from_fields({**state, "dense": dense if dense is None else unpacked(dense)})

    def rows(self) -> list[dict[str, Any]]:
        """One record a time: the radius of the support."""
        return [{"time": float(t), "radius": float(r)} for t, r in zip(self.times, self.radii(), strict=True)]

    @property
    def n(self) -> int:
        """Number of tokens."""
        return int(self.points.shape[1])

    @property
    def dim(self) -> int:
        """Dimension d of the space."""
        return int(self.points.shape[2])

    def __len__(self) -> int:
        return len(self.times)

    def measure(self, k: int) -> Measure:
        """The measure at ``times[k]``, of the kind of the initial one."""
        return self.velocity.measure._with_points(self.points[k])

    def attention_at(self, k: int) -> AttentionMap:
        """The map that moves the state at ``times[k]`` (of rescaled parameters for rescaled tokens)."""
        return self.velocity.attention_at(float(self.times[k]))

    def __call__(self, t: ArrayLike) -> Array:
        """Tokens at any times up to ``end``, ``(n, d)`` or ``(len(t), n, d)``, by the solver's interpolation.

        Raises
        ------
        ValueError
            A time outside ``[t_span[0], end]``, or a flow without dense output.
        """
        at = check.as_float_array(t, "t")
        if self.dense is None:
            raise ValueError("tokens between steps need dense output, received a flow without it; pass dense=True.")
        first = self.t_span[0]
        if at.size and (at.min() < first or at.max() > self.end):
            raise ValueError(
                f"t must lie in [{first:g}, {self.end:g}], where the flow was computed, received "
                f"[{at.min():g}, {at.max():g}]."
            )
        states = [self._state(float(v)) for v in at.ravel()]
        return np.reshape(states, (*at.shape, self.n, self.dim))

    def _state(self, t: float) -> Array:
        assert self.dense is not None
        return self.velocity.retract(self.dense(t - self.t_span[0]).reshape(self.n, self.dim))

    def radii(self) -> Array:
        """Support radius at each time: the largest norm of a token of positive weight, ``(T,)``."""
        return np.asarray(np.linalg.norm(self.points[:, self.weights > 0], axis=2).max(axis=1))

    def diameters(self) -> Array:
        """Largest distance of two tokens of positive weight at each time, ``(T,)``."""
        from scipy.spatial.distance import pdist

        live = self.points[:, self.weights > 0]
        if live.shape[1] < 2:
            return np.zeros(len(live))
        return np.array([pdist(x).max() for x in live])

    def defect(self) -> float:
        """How far the trajectory is from solving its equation, relative to the largest token.

        The largest of ``|x(b) - x(a) - int_a^b v(s, x(s)) ds|`` over the solver's steps, by four Gauss points on
        the interpolated solution; of ``|x_{k+1} - x_k - h v(x_k)|`` for a finite-depth network.

        Raises
        ------
        ValueError
            The flow has no dense output.
        """
        first = self.t_span[0]
        if self.solver == "residual":
            moved = [
                self.velocity(t, x) * (s - t) for t, s, x in zip(self.times, self.times[1:], self.points, strict=False)
            ]
            gaps = [
                np.abs(self.velocity.retract(x + v) - y).max() / max(np.abs(y).max(), 1e-300)
                for x, v, y in zip(self.points, moved, self.points[1:], strict=False)
            ]
            return float(max(gaps, default=0.0))
        if self.dense is None or self.steps is None:
            raise ValueError("the defect needs dense output, received a flow without it; pass dense=True.")
        nodes, masses = np.polynomial.legendre.leggauss(4)
        worst = 0.0
        for a, b in zip(self.steps, self.steps[1:], strict=False):
            total = np.zeros((self.n, self.dim))
            for node, mass in zip(nodes, masses, strict=True):
                s = first + 0.5 * (a + b) + 0.5 * (b - a) * float(node)
                total += 0.5 * (b - a) * float(mass) * self.velocity(s, self._state(s))
            x, y = self._state(first + a), self._state(first + b)
            worst = max(worst, float(np.abs(y - x - total).max()) / max(float(np.abs(y).max()), 1e-300))
        return worst

    def verify(self, *, factor: float = 1e3) -> bool:
        """True when :meth:`defect` is within ``factor`` times the tolerance (the solver controls local errors)."""
        rtol, atol = self.tolerance
        scale = max(float(np.abs(self.points).max()), 1e-300)
        return bool(self.defect() <= factor * (rtol + atol / scale + 1e-15))

    def __repr__(self) -> str:
        state = f"blow-up at {self.blow_up_time:.6g}" if self.status == "blow_up" else self.status
        return (
            f"Trajectory(n={self.n}, dim={self.dim}, t=[{self.t_span[0]:g}, {self.end:g}], "
            f"{len(self.times)} times, {state})"
        )
