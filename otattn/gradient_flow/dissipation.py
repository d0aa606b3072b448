"""The energy along a flow against the work of its velocity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.dynamics.flow import check_span
from otattn.errors import ConvergenceError
from otattn.gradient_flow.energy import Energy
from otattn.gradient_flow.known import KnownStructure, known_structure, unwrapped
from otattn.gradient_flow.twisted import TwistedField, log_kernel
from otattn.measures import DiscreteMeasure, MeasureLike, as_discrete

__all__ = ["EnergyDissipation", "energy_dissipation"]

TURN = 0.25
"""The flow is followed until tokens have moved by about this share of their size, and logits by this much."""


@dataclass(frozen=True, eq=False)
class EnergyDissipation(Result):
    r"""``E(mu_t) - E(mu_0)`` against ``(1/c) int_0^t int M_s^{-1} |Gamma|^2 dmu_s ds`` along ``x' = Gamma_mu(x)``.

    Attributes
    ----------
    times : ndarray (k,)
        From the start on.
    energies : ndarray (k,)
        ``E(mu_t) exp(-log_scale)``.
    work : ndarray (k,)
        The integral on the right, in the same unit; of the sign of c.
    log_scale : float
        Exponent taken out of both, 0 unless the energy is exponential.
    defect : float
        Largest ``|E(mu_t) - E(mu_0) - work| / |work|`` over the times after 0; 0 where nothing moves.
    energy : Energy
    coefficient : float
        c: the flow climbs the energy when it is positive, descends it when negative.
    mobility : bool
        True when ``M = 1/Z``, False when it is 1.
    attention : AttentionMap
    mu : DiscreteMeasure
        The initial measure.
    """

    times: Array
    energies: Array
    work: Array
    log_scale: float
    defect: float
    energy: Energy
    coefficient: float
    mobility: bool
    attention: AttentionMap
    mu: DiscreteMeasure

    _columns = ("times", "energies", "work")

    def verify(self) -> bool:
        """Integrate again and compare; False as soon as energies, work or defect disagree."""
        span = float(self.times[0]), float(self.times[-1])
        new = energy_dissipation(self.attention, self.mu, t_span=span, n_times=len(self.times))
        size = float(np.abs(new.energies).max())
        return bool(
            new.energies.shape == self.energies.shape == self.work.shape
            and abs(new.log_scale - self.log_scale) <= 1e-9 * (1.0 + abs(self.log_scale))
            and np.allclose(new.energies, self.energies, rtol=0.0, atol=1e-9 * size)
            and np.allclose(new.work, self.work, rtol=0.0, atol=1e-9 * size)
            and abs(new.defect - self.defect) <= 1e-6 * (1.0 + self.defect)
        )

    def __repr__(self) -> str:
        way = "ascent" if self.coefficient > 0 else "descent"
        return f"EnergyDissipation({way} of {type(self.energy).__name__}, defect={self.defect:.2e})"


def energy_dissipation(
    attention: AttentionMap,
    mu: MeasureLike,
    *,
    t_span: tuple[float, float] | None = None,
    n_times: int = 6,
    rtol: float = 1e-11,
) -> EnergyDissipation:
    r"""Follow the flow ``x_i' = Gamma_mu(x_i)`` and compare the change of its energy with the work done.

    If ``Gamma_mu = c M_mu grad phi_mu`` then

    .. math:: \frac{dE}{dt} = \int \langle \nabla\varphi_\mu, \Gamma_\mu\rangle\, d\mu
              = \frac1c \int \frac{|\Gamma_\mu|^2}{M_\mu}\, d\mu,

    ``M = 1`` for Wasserstein gradients, ``1/M = Z`` for softmax attention. Energies are evaluated at the measures
    of the flow, the work is integrated with it: the two sides share no formula.

    Parameters
    ----------
    attention : AttentionMap
        With a known energy (:func:`known_structure`).
    mu : DiscreteMeasure or array_like (n, d)
    t_span : (float, float), optional
        Start and end; by default from 0 on for the time in which logits and tokens change by about a quarter.
    n_times : int
        Number of times, at least 2.
    rtol : float
        Relative tolerance of the integrator (scipy's DOP853).

    Raises
    ------
    ValueError
        No energy is known for these parameters.
    ConvergenceError
        The integrator fails before the end: the flow blows up.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> A = [[1.0, 0.5], [0.5, -1.0]]
    >>> result = energy_dissipation(SoftmaxAttention(A, A), [[1.0, 0.0], [0.0, 1.0], [-1.0, 2.0]])
    >>> result.defect < 1e-8, bool(result.energies[-1] > result.energies[0])
    (True, True)

    References
    ----------
    Ambrosio, Gigli, Savaré (2008), Gradient Flows, section 11.1; Castin, Ablin, Carrillo, Peyré, 2025.
    """
    attention = unwrapped(attention)
    structure = known_structure(attention)
    if structure is None:
        raise ValueError(
            f"attention must have a known energy, received {type(attention).__name__} with parameters that admit "
            "none (A symmetric and V = c A does); use check_gradient_flow for its defects."
        )
    start = as_discrete(mu).support()
    check.moderate(start.points, "mu")
    check.count(n_times, "n_times", least=2)
    rate = _rate(attention, start)
    begin, end = (0.0, TURN / rate if rate > 1e-250 else 1.0) if t_span is None else check_span(t_span)
    value, log_scale = structure.energy.scaled(start)
    times = np.linspace(begin, end, n_times)
    points, work = _integrate(attention, structure, start, times - begin, log_scale, rtol)
    energies = np.empty(n_times)
    energies[0] = value
    for k in range(1, n_times):
        v, exponent = structure.energy.scaled(start._with_points(points[k]))
        energies[k] = v * np.exp(exponent - log_scale)
    change = energies[1:] - value
    gap, size = np.abs(change - work[1:]), np.abs(work[1:])
    defect = 0.0 if not gap.any() else (float((gap / size).max()) if size.all() else float("inf"))
    return EnergyDissipation(
        times,
        energies,
        work,
        log_scale,
        defect,
        structure.energy,
        structure.coefficient,
        structure.mobility,
        attention,
        start,
    )


def _integrate(
    attention: AttentionMap, structure: KnownStructure, mu: DiscreteMeasure, times: Array, log_scale: float, rtol: float
) -> tuple[Array, Array]:
    """Points ``(k, n, d)`` at the times, and the work, as one more variable of the flow."""
    shape, w, horizon = mu.points.shape, mu.weights, float(times[-1])

    def velocity(_: float, state: Array) -> Array:
        measure = mu._with_points(state[:-1].reshape(shape))
        speed = attention(measure.points, measure)
        logs = np.log(w) - log_scale
        if structure.mobility:
            kernel = log_kernel(attention, measure.points)
            assert kernel is not None
            logs = logs + TwistedField(kernel, measure.points, w, None).log_normaliser
        top = max(float(np.abs(speed).max()), 1e-300)  # squares of exponentials need not be representable
        logs += 2.0 * np.log(top)
        power = float(np.sum(np.exp(logs) * np.sum((speed / top) ** 2, axis=1))) / structure.coefficient
        return horizon * np.append(speed.ravel(), power)

    initial = np.append(mu.points.ravel(), 0.0)
    first = velocity(0.0, initial)
    # absolute tolerances in the units of what happens over the whole time, which runs from 0 to 1
    atol = np.full(len(initial), rtol * max(float(np.abs(first[:-1]).max()), 1e-300))
    atol[-1] = rtol * max(abs(first[-1]), 1e-300)
    solution = solve_ivp(velocity, (0.0, 1.0), initial, method="DOP853", t_eval=times / horizon, rtol=rtol, atol=atol)
    if solution.status != 0 or solution.y.shape[1] != len(times):
        raise ConvergenceError(
            f"the flow must exist up to t = {horizon:.4g}, but the integrator stopped after "
            f"{len(solution.t)} of {len(times)} times ({solution.message}); end earlier."
        )
    return solution.y[:-1].T.reshape(len(times), *shape), solution.y[-1]


def _rate(attention: AttentionMap, mu: DiscreteMeasure) -> float:
    """The inverse of the time in which tokens move by their size, or logits change by one, at first order."""
    speed = attention(mu.points, mu)
    size = float(np.sqrt(np.sum(mu.weights @ mu.points**2)))
    fastest = float(np.abs(speed).max())
    rate = fastest / size if size > 0.0 else 0.0
    logits = 2.0 * fastest * np.sqrt(mu.dim) * mu.radius()
    return max([rate, *(float(np.linalg.norm(A, 2)) * logits for A in _forms(attention))])


def _forms(attention: AttentionMap) -> list[Array]:
    if hasattr(attention, "A"):
        return [attention.A]
    return [form for head in getattr(attention, "heads", ()) for form in _forms(head)]
