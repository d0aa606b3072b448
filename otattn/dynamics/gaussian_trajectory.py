"""A Gaussian along its flow, alone or with others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.dynamics.gaussian_closed_form import CovarianceClosedForm
from otattn.dynamics.gaussian_limit import GaussianLimit, gaussian_limit
from otattn.dynamics.velocity import Field
from otattn.measures import GaussianMeasure

__all__ = ["GaussianFlowBatch", "GaussianStatus", "GaussianTrajectory"]

GaussianStatus = Literal["success", "blow_up", "overflow", "failed"]

LOG_LARGEST = 700.0


@dataclass(frozen=True, eq=False)
class GaussianTrajectory(Result):
    """A Gaussian along its flow.

    Attributes
    ----------
    times : ndarray (T,)
        Those of ``t_eval`` that were reached, or the solver's steps (dense near a blow-up).
    means : ndarray (T, d)
    shapes : ndarray (T, d, d)
        ``Sigma / tr Sigma`` (zero for a Dirac mass); never overflows.
    log_traces : ndarray (T,)
        ``log tr Sigma`` (-inf for a Dirac mass).
    blow_up_time : float
        Time at which the covariance leaves every bounded set; inf when there is none in ``t_span``.
    closed_form : CovarianceClosedForm or None
        The exact covariance, as a function of the time from the start, where it exists. The blow-up time is then exact.
    status : str
        "success"; "blow_up"; "overflow" (the mean left float64); "failed". What was computed is kept.
    end : float
        Last time that was computed.
    missed : ndarray
        Times of ``t_eval`` that were not reached.
    t_span : (float, float)
    attention, gaussian
        The problem.
    tolerance : (float, float)
    """

    times: Array
    means: Array
    shapes: Array
    log_traces: Array
    blow_up_time: float
    closed_form: CovarianceClosedForm | None
    status: GaussianStatus
    end: float
    missed: Array
    t_span: tuple[float, float]
    attention: Field
    gaussian: GaussianMeasure
    tolerance: tuple[float, float]

    _columns = ("times", "log_traces")

    @property
    def dim(self) -> int:
        """Dimension d of the space."""
        return int(self.means.shape[1])

    def __len__(self) -> int:
        return len(self.times)

    @cached_property
    def covs(self) -> Array:
        """Covariances, ``(T, d, d)``, positive semi-definite.

        Raises
        ------
        OverflowError
            A covariance is not representable in float64; ``shapes`` and ``log_traces`` always are.
        """
        if len(self.times) and float(self.log_traces.max()) > LOG_LARGEST:
            k = int((self.log_traces > LOG_LARGEST).argmax())
            raise OverflowError(
                f"covariances must fit in float64, received log tr Sigma = {self.log_traces[k]:.4g} at t = "
                f"{self.times[k]:g}; use shapes and log_traces."
            )
        return check.frozen(np.exp(self.log_traces)[:, None, None] * self.shapes)

    def measure(self, k: int) -> GaussianMeasure:
        """The Gaussian at ``times[k]``."""
        return GaussianMeasure(self.means[k], self.covs[k])

    @cached_property
    def limit_result(self) -> GaussianLimit:
        """What the covariance tends to beyond the time span (:func:`gaussian_limit`), computed when first asked for."""
        return gaussian_limit(self.attention, self.gaussian)  # type: ignore[arg-type]  # a callable is refused there

    @property
    def limit(self) -> Array:
        """Limit of the covariance, or of ``Sigma / tr Sigma`` when it diverges or blows up."""
        return self.limit_result.covariance

    @property
    def limit_rank(self) -> int:
        """Numerical rank of :attr:`limit`; a guess where ``limit_result.settled`` is False."""
        return self.limit_result.rank

    def closed_form_error(self) -> float:
        """Largest relative difference of ``covs`` from the closed form (spectral norm).

        Raises
        ------
        ValueError
            There is no closed form.
        """
        if self.closed_form is None:
            raise ValueError(
                "closed_form_error needs a closed form, received a flow without one (closed_form is None)."
            )
        worst = 0.0
        for t, S in zip(self.times, self.covs, strict=True):
            if t - self.t_span[0] < self.closed_form.blow_up_time:
                exact = self.closed_form(float(t) - self.t_span[0])
                gap = float(np.linalg.norm(S - exact, 2))
                worst = max(worst, gap / max(float(np.linalg.norm(exact, 2)), 1e-300))
        return worst

    def close_to(self, other: GaussianTrajectory, *, tol: float = 1e-6) -> bool:
        """True when two integrations of one flow agree at their common times: shapes, traces and blow-up time.

        What blows up at ``t*`` is compared relative to ``1 / (t* - t)``, the sensitivity to the error of a time.
        """
        if len(other) != len(self) or not np.array_equal(self.times, other.times):
            return False
        near = np.ones(len(self))
        if math.isinf(self.blow_up_time) or math.isinf(other.blow_up_time):
            same = self.blow_up_time == other.blow_up_time
        else:
            elapsed = self.blow_up_time - self.t_span[0]
            same = abs(self.blow_up_time - other.blow_up_time) <= tol * elapsed
            near = np.clip((self.blow_up_time - self.times) / elapsed, 0.0, 1.0)
        traces = np.zeros(len(self))
        live = np.isfinite(self.log_traces)
        traces[live] = self.log_traces[live] - other.log_traces[live]
        gaps = np.maximum(np.abs(traces), np.abs(self.shapes - other.shapes).max(axis=(1, 2)))
        return bool(same and (gaps * near <= tol).all())

    def __repr__(self) -> str:
        state = f"blow-up at {self.blow_up_time:.8g}" if self.blow_up_time < math.inf else self.status
        return f"GaussianTrajectory(dim={self.dim}, t=[{self.t_span[0]:g}, {self.end:g}], {len(self.times)} times, {state})"


@dataclass(frozen=True, eq=False)
class GaussianFlowBatch(Result, Sequence[GaussianTrajectory]):
    """Flows of several Gaussians under one attention map: a sequence of :class:`GaussianTrajectory`."""

    trajectories: tuple[GaussianTrajectory, ...]

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: Any) -> Any:
        return self.trajectories[index]

    def __iter__(self) -> Iterator[GaussianTrajectory]:
        return iter(self.trajectories)

    @property
    def blow_up_times(self) -> Array:
        """Blow-up time of each member, inf where there is none; ``(B,)``."""
        return np.array([g.blow_up_time for g in self.trajectories])

    def rows(self) -> list[dict[str, Any]]:
        """One record a flow: how and when it ended, and its blow-up time."""
        return [{"status": g.status, "end": g.end, "blow_up_time": g.blow_up_time} for g in self.trajectories]

    def __repr__(self) -> str:
        grown = int(np.isfinite(self.blow_up_times).sum())
        return f"GaussianFlowBatch({len(self)} Gaussians, {grown} blow up)"
