r"""The largest singular value of an operator, by Lanczos on :math:`J^T J` with full reorthogonalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.errors import ConvergenceError
from otattn.operators.device import check_device
from otattn.operators.fused import FusedJacobian
from otattn.operators.krylov import NonFiniteError, RitzPair, top_eigenpair
from otattn.operators.scaled import ScaledOperator

__all__ = ["SingularValueError", "TopSingular", "top_singular"]

Precision = Literal["fast", "precise"]

TOLERANCES = {"fast": 2e-5, "precise": 1e-9}
FLOAT32_RESIDUAL = 4e-6
"""Relative residual of J^T J down to which float32 iterations are worth their time."""
RANDOM_STEPS = 8
"""Steps from a random start before a small residual is believed."""
WARM_STEPS = 5
"""The same from a given start, which is mostly right: enough to bring out what its random part holds."""
RANDOM_SHARE = 0.1
"""Size of the random vector that is added to a given unit vector."""
VANISHED = 1e-24
"""A float32 eigenvalue (in units of the scale squared) below it may be an underflow: float64 decides."""


@dataclass(frozen=True, eq=False)
class TopSingular(Result):
    r"""The largest singular value of an operator J with its vectors and what is known of its error.

    Attributes
    ----------
    value : float
        ``sigma = |J right|``, evaluated in float64: a Rayleigh quotient, so never above the largest singular
        value (up to rounding).
    left, right : ndarray
        Unit vectors, ``J right = value * left``; of shape ``(n, e)`` and ``(n, d)`` for operators on tokens,
        flat otherwise. ``left`` is zero when the operator is.
    residual : float
        ``|J^T J right - sigma^2 right| / sigma^2``, evaluated in float64.
    error_bar : float
        Proved from the residual: some singular value lies within it of ``value`` (absolute). That this is the
        largest one is the usual assumption on a random start.
    gap_estimate : float
        Kato-Temple estimate of the error, ``residual^2`` over the gap to the second Ritz value (absolute).
        Sharper, but an estimate only: two close values that the iteration has not told apart escape it.
    iterations : int
        Products with ``J^T J``, in whatever precision.
    converged : bool
        ``error_bar <= tol * value``.
    precision : {"fast", "precise"}
    tol : float
        Relative error asked for.
    """

    value: float
    left: Array
    right: Array
    residual: float
    error_bar: float
    gap_estimate: float
    iterations: int
    converged: bool
    precision: Precision
    tol: float

    @property
    def lower(self) -> float:
        """A lower value of the operator's norm, whether or not the iteration has converged."""
        return self.value

    def verify(self, operator: Any, *, tol: float = 1e-10) -> bool:
        """Recompute ``|J right|`` and the residual; True when they are as stated (relative ``tol``)."""
        wrapped, right = ScaledOperator(operator), self.right.reshape(-1)
        theta, _, image = wrapped.evaluate(right)
        value, residual = wrapped.scale * np.sqrt(theta), _residual(theta, right, image)
        if value == 0.0 or self.value == 0.0:
            return value == self.value
        return abs(value - self.value) <= tol * self.value and residual <= self.residual + tol

    def __repr__(self) -> str:
        state = "converged" if self.converged else "NOT converged, a lower value"
        return (
            f"TopSingular({self.value:.10g} +- {self.error_bar:.2g}, {state}, residual={self.residual:.2g}, "
            f"iterations={self.iterations})"
        )


class SingularValueError(ConvergenceError):
    """The iteration stopped before its tolerance; ``lower`` is what it reached, ``result`` all of it."""

    def __init__(self, message: str, result: TopSingular) -> None:
        super().__init__(message)
        self.result = result
        self.lower = result.value
        self.residual = result.residual


def top_singular(
    operator: Any,
    *,
    precision: Precision = "fast",
    tol: float | None = None,
    max_iter: int = 1000,
    rng: np.random.Generator | int = 0,
    start: ArrayLike | None = None,
    allow_unconverged: bool = False,
    device: Any = None,
) -> TopSingular:
    r"""The largest singular value of ``operator`` with its singular vectors.

    Lanczos on :math:`J^T J` from a random start, fully reorthogonalised, restarted with its best vectors when
    the basis would outgrow the memory budget, until the residual proves the tolerance. A
    :class:`FusedJacobian` is iterated in float32 as far as that carries; value and residual always come from
    products in float64.

    Parameters
    ----------
    operator : FusedJacobian, LinearOperator or matrix
        Real; anything ``scipy.sparse.linalg.aslinearoperator`` takes.
    precision : {"fast", "precise"}
        Relative error of at most 2e-5 or 1e-9.
    tol : float, optional
        Relative error, in place of that of ``precision``; from 1e-13 to 0.1.
    max_iter : int
        Largest number of products with ``J^T J``.
    rng : Generator or int
        Of the start.
    start : array_like, optional
        A guess of the right singular vector, such as that of an operator nearby. A random vector of a tenth of its size is
        added, so that no direction is missing from it.
    allow_unconverged : bool
        Return what was reached (``converged`` is False, ``value`` a lower value) where this would raise.
    device : str or torch.device, optional
        Where torch takes the iterations of a :class:`FusedJacobian`, in float32 and then (where the device has it) in float64.
        Value and residual come from numpy's products in float64 all the same. Torch obeys
        ``torch.set_float32_matmul_precision``: what TF32 rounds costs products in float64, not accuracy.

    Raises
    ------
    SingularValueError
        The tolerance was not reached (a :class:`ConvergenceError` that carries the result).
    ValueError
        A product is not finite, or an argument is out of range.

    Notes
    -----
    From ``|J^T J v - theta v| = rho theta`` follows an eigenvalue within ``rho theta`` of theta, hence a
    singular value within ``sigma rho / (1 + sqrt(1 - rho))`` of ``sigma = sqrt(theta)``. No test in a Krylov
    space can exclude a larger one that the start has missed; for a random start that has probability zero in
    exact arithmetic, and is improbable unless two values agree to about the residual.

    Examples
    --------
    >>> top = top_singular(np.diag([3.0, 1.0, 0.5]), precision="precise")
    >>> round(top.value, 9), top.converged
    (3.0, True)

    References
    ----------
    Parlett, "The Symmetric Eigenvalue Problem", SIAM 1998, sections 4.5 (residual) and 11.7 (Kato-Temple).
    Wu, Simon, "Thick-restart Lanczos method", SIAM J. Matrix Anal. Appl. 22 (2000).
    """
    if precision not in TOLERANCES:
        raise ValueError(f'precision must be "fast" or "precise", received {precision!r}.')
    wanted = TOLERANCES[precision] if tol is None else check.positive(tol, "tol")
    if not 1e-13 <= wanted <= 0.1:
        raise ValueError(f"tol must lie in [1e-13, 0.1], received {wanted:g}.")
    budget = check.count(max_iter, "max_iter")
    generator = check.rng_from(rng)
    if device is not None:
        if not isinstance(operator, FusedJacobian):
            raise TypeError(f"device needs a FusedJacobian, received {type(operator).__name__}; leave device out.")
        device = check_device(device)
    exact = ScaledOperator(operator, device)
    v, steps = exact.start(generator), RANDOM_STEPS
    if start is not None and (guess := exact.guess(start)) is not None:
        v, steps = guess + RANDOM_SHARE / np.linalg.norm(v) * v, WARM_STEPS
    target = 2.0 * wanted  # of the residual of J^T J: an error in sigma^2 is twice that in sigma
    used, second, settled = 0, 0.0, False
    rough = exact.single()
    pair = None if rough is None else _float32_stage(rough, v, max(0.9 * target, FLOAT32_RESIDUAL), budget - 1, steps)
    del rough
    if pair is not None:
        v, used, second, settled = pair.vector.astype(np.float64), pair.products, pair.second, pair.settled
    while True:
        v /= np.linalg.norm(v)
        theta, left, image = exact.evaluate(v)
        used += 1
        residual = _residual(theta, v, image)
        if theta == 0.0 or (residual <= target and settled) or used >= budget - 1:
            break
        pair = top_eigenpair(
            exact.gram,
            v,
            tol=0.5 * target,
            max_products=budget - used - 1,  # the last one evaluates the result
            first=image,
            min_steps=1 if settled else steps,
        )
        # a Ritz value never exceeds its eigenvalue: the larger of the two seconds tells more of the gap
        v, second, settled = pair.vector, max(second, pair.second), pair.settled
        used += pair.products
    result = _result(exact, (theta, left, image), v, second, used, settled, precision, wanted)
    if not result.converged and not allow_unconverged:
        raise SingularValueError(
            f"the largest singular value needs a relative error of {wanted:g} (residual {target:g}), reached "
            f"residual {result.residual:.3g} after {used} products; {result.value!r} is a lower value. Raise "
            "max_iter or tol, or pass allow_unconverged=True.",
            result,
        )
    return result


def _float32_stage(operator: ScaledOperator, start: Array, tol: float, budget: int, steps: int) -> RitzPair | None:
    """The top Ritz pair in float32, or None where that precision does not carry."""
    if budget < 1:
        return None
    try:
        single = start.astype(np.float32)
        pair = top_eigenpair(operator.gram, single, tol=tol, max_products=budget, min_steps=steps)
    except NonFiniteError:
        return None
    return pair if pair.value > VANISHED else None


def _result(
    operator: ScaledOperator,
    evaluated: tuple[float, Array, Array],
    right: Array,
    second: float,
    used: int,
    settled: bool,
    precision: Precision,
    tol: float,
) -> TopSingular:
    theta, left, image = evaluated
    value, residual, relative, estimate, rounding = operator.scale * float(np.sqrt(theta)), 0.0, 0.0, 0.0, 0.0
    if theta > 0.0:  # else J^T J annihilates a random vector: with probability one J = 0
        residual, rounding = _residual(theta, right, image), 32.0 * float(np.finfo(np.float64).eps)
        relative = residual / (1.0 + np.sqrt(1.0 - residual)) if residual < 1.0 else 1.0
        gap = max(1.0 - second / theta, 0.0)
        estimate = min(relative, 0.5 * residual**2 / gap) if gap > 0.0 else relative
        left = left / np.sqrt(theta)
    return TopSingular(
        value=value,
        left=operator.output(left),
        right=operator.input(right),
        residual=residual,
        error_bar=value * (relative + rounding),
        gap_estimate=value * (estimate + rounding),
        iterations=used,
        converged=theta == 0.0 or (settled and residual <= 2.0 * tol),
        precision=precision,
        tol=tol,
    )


def _residual(theta: float, vector: Array, image: Array) -> float:
    return float(np.linalg.norm(image - theta * vector)) / theta if theta > 0.0 else 0.0
