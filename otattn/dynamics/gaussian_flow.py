r"""Gaussian flows: mean and covariance of a Gaussian that attention moves, through to blow-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array, symmetrize
from otattn.attention import AttentionMap
from otattn.dynamics.flow import check_span, check_times
from otattn.dynamics.gaussian_closed_form import covariance_closed_form
from otattn.dynamics.gaussian_fields import gaussian_field
from otattn.dynamics.gaussian_integrator import GaussianRun, integrate, split_states
from otattn.dynamics.gaussian_limit import scaled_factor
from otattn.dynamics.gaussian_trajectory import GaussianFlowBatch, GaussianTrajectory
from otattn.dynamics.velocity import Field, check_values, layer_at
from otattn.measures import GaussianMeasure
from otattn.measures.gaussian import check_covariance

__all__ = ["gaussian_flow", "gaussian_flow_batch"]

MAX_STEPS = 20_000


def gaussian_flow(
    attention: Field,
    gaussian: GaussianMeasure,
    *,
    t_span: tuple[float, float],
    t_eval: ArrayLike | None = None,
    rtol: float = 1e-11,
    atol: float = 1e-13,
    max_steps: int = MAX_STEPS,
) -> GaussianTrajectory:
    r"""The flow of a Gaussian: ``Gamma(x) = b + G x`` keeps it Gaussian.

    .. math:: \dot\alpha = b + G \alpha, \qquad \dot\Sigma = G \Sigma + \Sigma G^\top

    Integrated for a factor ``Sigma = L L^T``, ``L' = G L``, so that Sigma stays positive semi-definite and of its rank,
    and in a time in which a blow-up lies at infinity, so that its time is found to about the tolerance.

    Parameters
    ----------
    attention : AttentionMap or callable t -> AttentionMap
        Softmax, L2, Sinkhorn, linear, several such heads, residual layers of them.
    gaussian : GaussianMeasure
        Of any rank.
    t_span : (float, float)
    t_eval : array_like (T,), optional
        Strictly increasing times to report; the solver's steps by default.
    rtol, atol : float
        Tolerances of a step, for the factor scaled to norm one, its logarithmic size, the mean and the time.
    max_steps : int
        Steps after which the flow is left, with status "failed".

    Returns
    -------
    GaussianTrajectory

    Raises
    ------
    NotGaussianPreservingError
        The map does not keep Gaussians Gaussian.
    ValueError
        A reversed time span, times outside it, values in another space.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> trajectory = gaussian_flow(SoftmaxAttention([[1.0]], [[1.0]]), GaussianMeasure([0.0], [[2.0]]), t_span=(0.0, 1.0))
    >>> trajectory                                     # Sigma' = 2 Sigma^2
    GaussianTrajectory(dim=1, t=[0, 0.25], ... times, blow-up at 0.25)

    References
    ----------
    Castin, Ablin, Carrillo, Peyre, "A Unified Perspective on the Dynamics of Deep Transformers", 2025.
    """
    if not isinstance(gaussian, GaussianMeasure):
        raise TypeError(
            f"gaussian must be a GaussianMeasure, received {type(gaussian).__name__}; use GaussianMeasure(mean, cov), or "
            "gaussian_flow_batch for a stack of covariances."
        )
    return _flows(attention, [gaussian], t_span, t_eval, (rtol, atol), max_steps)[0]


def gaussian_flow_batch(
    attention: Field,
    covs: ArrayLike | Sequence[GaussianMeasure],
    *,
    t_span: tuple[float, float],
    means: ArrayLike | None = None,
    t_eval: ArrayLike | None = None,
    rtol: float = 1e-11,
    atol: float = 1e-13,
    max_steps: int = MAX_STEPS,
) -> GaussianFlowBatch:
    """Flows of many Gaussians in one vectorised integration.

    Parameters
    ----------
    attention, t_span, t_eval, rtol, atol, max_steps
        As for :func:`gaussian_flow`.
    covs : array_like (B, d, d), or sequence of GaussianMeasure
    means : array_like (B, d), optional
        With a stack of covariances; 0 by default.

    Returns
    -------
    GaussianFlowBatch

    Raises
    ------
    ValueError
        As for :func:`gaussian_flow`; a matrix that is not a covariance is named.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> gaussian_flow_batch(SoftmaxAttention([[1.0]], [[1.0]]), [[[1.0]], [[2.0]]], t_span=(0.0, 1.0)).blow_up_times.round(9)
    array([0.5 , 0.25])
    """
    if isinstance(covs, Sequence) and len(covs) and all(isinstance(g, GaussianMeasure) for g in covs):
        gaussians = list(covs)
        if means is not None:
            raise ValueError("means must be left out with Gaussian measures, received both; they have their own.")
        if len({g.dim for g in gaussians}) > 1:
            raise ValueError(f"covs must live in one space, received dimensions {sorted({g.dim for g in gaussians})}.")
    else:
        stack = check.as_float_array(covs, "covs", ndim=3)
        if not len(stack):
            raise ValueError("covs must hold at least one covariance, received none.")
        d = stack.shape[-1]
        centres = np.zeros((len(stack), d)) if means is None else check.as_float_array(means, "means", ndim=2)
        if centres.shape != (len(stack), d):
            raise ValueError(f"means must have shape {(len(stack), d)}, received {centres.shape}.")
        eps = check.resolution(covs)
        gaussians = [
            GaussianMeasure(m, check_covariance(S, f"covs[{b}]", resolution=eps))
            for b, (m, S) in enumerate(zip(centres, stack, strict=True))
        ]
    return GaussianFlowBatch(tuple(_flows(attention, gaussians, t_span, t_eval, (rtol, atol), max_steps)))


def _flows(
    attention: Field,
    gaussians: list[GaussianMeasure],
    t_span: tuple[float, float],
    t_eval: ArrayLike | None,
    tolerance: tuple[float, float],
    max_steps: int,
) -> list[GaussianTrajectory]:
    span = check_span(t_span)
    wanted = None if t_eval is None else check_times(t_eval, *span)
    rtol, atol = check.positive(tolerance[0], "rtol"), check.positive(tolerance[1], "atol")
    layer = layer_at(attention, span[0])
    layer._check_dim(gaussians[0].dim)
    check_values(layer, gaussians[0].dim)
    layer.gaussian_affine(gaussians[0])  # raises where Gaussians do not stay Gaussian
    M, s = scaled_factor(np.stack([g.cov for g in gaussians]))
    alpha = np.stack([g.mean for g in gaussians])
    local = None if wanted is None else np.clip(wanted - span[0], 0.0, span[1] - span[0])

    run = integrate(
        gaussian_field(attention),
        M,
        s,
        alpha,
        start=span[0],
        duration=span[1] - span[0],
        t_eval=local,
        rtol=rtol,
        atol=atol,
        max_steps=check.count(max_steps, "max_steps"),
    )
    members = enumerate(gaussians)
    return [_trajectory(run, b, attention, g, span, wanted, (rtol, atol)) for b, g in members]


def _trajectory(
    run: GaussianRun,
    b: int,
    attention: Callable[[float], AttentionMap] | AttentionMap,
    gaussian: GaussianMeasure,
    span: tuple[float, float],
    wanted: Array | None,
    tolerance: tuple[float, float],
) -> GaussianTrajectory:
    d = gaussian.dim
    count = len(run.rows[b])
    F, s, means, local = split_states(np.reshape(run.rows[b], (count, -1)) if count else run.last[:0], d)
    size = (F**2).sum(axis=(1, 2))
    live = size > 0
    with np.errstate(divide="ignore"):
        traces = np.where(live, 2.0 * s + np.log(np.where(live, size, 1.0)), -np.inf)
    shapes = symmetrize(F @ np.swapaxes(F, 1, 2) / np.where(live, size, 1.0)[:, None, None])
    status: Any = run.status[b]
    form = covariance_closed_form(attention, gaussian)
    blow_up = span[0] + float(run.blow_up_times[b])
    if form is not None:
        exact = span[0] + form.blow_up_time
        blow_up = exact if status == "blow_up" else blow_up
    end = span[1] if status == "success" else span[0] + float(run.last[b, -1])
    times = span[0] + local if wanted is None else wanted[:count]
    return GaussianTrajectory(
        times=check.frozen(np.minimum(times, span[1])),
        means=check.frozen(means),
        shapes=check.frozen(shapes),
        log_traces=check.frozen(traces),
        blow_up_time=blow_up,
        closed_form=form,
        status=status,
        end=end,
        missed=check.frozen(np.empty(0) if wanted is None else wanted[count:]),
        t_span=span,
        attention=attention,
        gaussian=gaussian,
        tolerance=tolerance,
    )
