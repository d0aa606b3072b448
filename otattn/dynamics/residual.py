r"""The residual network of finite depth, ``x_{k+1} = x_k + h Gamma(x_k)``, and its limit: the flow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.dynamics.flow import check_span, flow
from otattn.dynamics.trajectory import FlowStatus, Trajectory
from otattn.dynamics.velocity import Field, Normalization, Velocity, layer_at
from otattn.lipschitz.local.growth import Exponent, fit_exponent
from otattn.measures import MeasureLike

__all__ = ["DepthConvergence", "depth_convergence", "residual_steps"]


def residual_steps(
    attention: Field,
    mu: MeasureLike,
    *,
    depth: int,
    t_span: tuple[float, float] = (0.0, 1.0),
    normalization: Normalization = None,
) -> Trajectory:
    r"""Tokens after each layer of a residual network of depth L.

    .. math:: x_{k+1} = x_k + h\, \Gamma_{\mu_k}(x_k), \qquad h = (t_1 - t_0) / L

    The default span gives layers ``x + (1/L) Gamma``; ``t_span=(0, L)`` gives ``x + Gamma``. Layer k of a callable
    ``t -> attention`` is the map at ``t_0 + k h``. With ``normalization="sphere"`` each layer is followed by the
    projection of the tokens to their spheres.

    Parameters
    ----------
    attention, mu, normalization
        As for :func:`flow`.
    depth : int
        Number of layers L.
    t_span : (float, float)

    Returns
    -------
    Trajectory
        ``L + 1`` times; status "overflow" when a layer's output is not representable (the layers before are kept).

    Raises
    ------
    ValueError
        As for :func:`flow`.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> residual_steps(SoftmaxAttention([[0.0]], [[1.0]]), [[1.0]], depth=2).points.ravel()
    array([1.  , 1.5 , 2.25])
    """
    start, stop = check_span(t_span)
    layers = check.count(depth, "depth")
    measure = layer_at(attention, start).as_measure(mu)
    velocity = Velocity(attention, measure, normalization, start)
    times = np.linspace(start, stop, layers + 1)
    points = [velocity.retract(measure.points)]
    status: FlowStatus = "success"
    message = "all layers were applied"
    with np.errstate(over="ignore", invalid="ignore"):
        for t, s in pairwise(times):
            try:
                x = velocity.retract(points[-1] + (s - t) * velocity(float(t), points[-1]))
            except OverflowError as exc:
                status, message = "overflow", f"layer {len(points)}: {exc}"
                break
            if not np.isfinite(x).all():
                status, message = "overflow", f"layer {len(points)}: its output is not representable in float64"
                break
            points.append(x)
    done = len(points)
    return Trajectory.along(
        velocity,
        times[:done],
        np.array(points),
        times[done:],
        status=status,
        blow_up_time=math.inf,
        end=float(times[done - 1]),
        t_span=(start, stop),
        solver="residual",
        tolerance=(0.0, 0.0),
        evaluations=done,
        message=message,
    )


@dataclass(frozen=True, eq=False)
class DepthConvergence(Result):
    """Distance of finite-depth networks from the flow.

    Attributes
    ----------
    depths : ndarray (m,)
    errors : ndarray (m,)
        ``(sum_i w_i |x_i^L - x_i(t_1)|^2)^{1/2}`` at the end.
    reference : Trajectory
        The flow.
    """

    depths: Array
    errors: Array
    reference: Trajectory

    _columns = ("depths", "errors")

    @property
    def order(self) -> float:
        """Fitted order: the errors fall like ``L^{-order}``."""
        return -self.fit().exponent

    def fit(self) -> Exponent:
        """Power law of the errors in L."""
        return fit_exponent(self.depths, self.errors)


def depth_convergence(
    attention: Field,
    mu: MeasureLike,
    *,
    depths: Sequence[int],
    t_span: tuple[float, float] = (0.0, 1.0),
    normalization: Normalization = None,
) -> DepthConvergence:
    """How fast networks of growing depth approach the flow: order one in ``1/L`` for smooth maps.

    Parameters
    ----------
    attention, mu, t_span, normalization
        As for :func:`flow`; the flow must exist on the whole span.
    depths : sequence of int
        At least two.

    Raises
    ------
    ValueError
        The flow or a network does not reach the end of the span.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> study = depth_convergence(SoftmaxAttention([[0.0]], [[1.0]]), [[1.0]], depths=[100, 200, 400])
    >>> round(study.order, 2)
    1.0
    """
    sizes = [check.count(L, "depths") for L in depths]
    reference = flow(attention, mu, t_span=t_span, normalization=normalization, rtol=1e-11, atol=1e-12)
    if reference.status != "success":
        raise ValueError(f"the flow must exist on t_span, received {reference!r}; shorten t_span.")
    errors = []
    for L in sizes:
        network = residual_steps(attention, mu, depth=L, t_span=t_span, normalization=normalization)
        if network.status != "success":
            raise ValueError(f"depths must be large enough, received {L}: {network.message}.")
        gap = network.points[-1] - reference.points[-1]
        errors.append(math.sqrt(float(reference.weights @ (gap**2).sum(axis=1))))
    return DepthConvergence(check.frozen(np.array(sizes, dtype=np.float64)), check.frozen(np.array(errors)), reference)
