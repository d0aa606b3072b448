r"""The largest singular value of an operator, by Lanczos on :math:`J^T J` with full reorthogonalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from otattn import _validate as check
from otattn.attention import JacobianOperator
from otattn.errors import ConvergenceError
from otattn.operators.fused import FusedJacobian
from otattn.operators.krylov import NonFiniteError, RitzPair, top_eigenpair
from otattn.operators.network import TwoPrecisions

__all__ = ["SingularValueError", "TopSingular", "top_singular"]

Array = NDArray[np.float64]
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
FUSED_SCALES = (1e-60, 1e60)
"""Where the scale of a fused product is that far from the operator's size, its two halves are taken apart."""
VANISHED = 1e-24
"""A float32 eigenvalue (in units of the scale squared) below it may be an underflow: float64 decides."""


@dataclass(frozen=True, eq=False)
class TopSingular:
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
        wrapped = _Operator(operator)
        theta, _, image = wrapped.evaluate(self.right.reshape(-1))
        value = wrapped.scale * np.sqrt(theta)
        if value == 0.0 or self.value == 0.0:
            return value == self.value
        residual = float(np.linalg.norm(image - theta * self.right.reshape(-1))) / theta
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
    exact = _Operator(operator)
    v = exact.start(generator)
    steps = RANDOM_STEPS
    if start is not None and (guess := exact.guess(start)) is not None:
        v, steps = guess + RANDOM_SHARE / np.linalg.norm(v) * v, WARM_STEPS
    target = 2.0 * wanted  # of the residual of J^T J: an error in sigma^2 is twice that in sigma
    used, second, settled = 0, 0.0, False

    rough = exact.single()
    if rough is not None:
        pair = _float32_stage(rough, v, max(0.9 * target, FLOAT32_RESIDUAL), budget - 1, generator, steps)
        del rough
        if pair is not None:
            v = pair.vector.astype(np.float64)
            used, second, settled = pair.products, pair.second, pair.settled

    v /= np.linalg.norm(v)
    theta, left, image = exact.evaluate(v)
    used += 1
    while True:
        if theta == 0.0:
            return _zero(exact, v, used, precision, wanted)
        residual = float(np.linalg.norm(image - theta * v)) / theta
        if (residual <= target and settled) or used >= budget - 1:
            break
        pair = top_eigenpair(
            exact.gram,
            v,
            tol=0.5 * target,
            max_products=budget - used - 1,  # the last one evaluates the result
            rng=generator,
            first=image,
            min_steps=1 if settled else steps,
        )
        # a Ritz value never exceeds its eigenvalue: the larger of the two seconds tells more of the gap
        v, second, settled = pair.vector, max(second, pair.second), pair.settled
        theta, left, image = exact.evaluate(v)
        used += pair.products + 1
    result = _result(exact, theta, left, v, residual, second, used, settled, precision, wanted)
    if not result.converged and not allow_unconverged:
        raise SingularValueError(
            f"the largest singular value needs a relative error of {wanted:g} (residual {target:g}), reached "
            f"residual {residual:.3g} after {used} products; {result.value!r} is a lower value. Raise "
            "max_iter or tol, or pass allow_unconverged=True.",
            result,
        )
    return result


def _float32_stage(
    operator: _Operator, start: Array, tol: float, budget: int, rng: np.random.Generator, steps: int
) -> RitzPair | None:
    """The top Ritz pair in float32, or None where that precision does not carry."""
    if budget < 1:
        return None
    try:
        pair = top_eigenpair(
            operator.gram,
            start.astype(np.float32),
            tol=tol,
            max_products=budget,
            rng=rng,
            min_steps=steps,
        )
    except NonFiniteError:
        return None
    return pair if pair.value > VANISHED else None


def _result(
    operator: _Operator,
    theta: float,
    left: Array,
    right: Array,
    residual: float,
    second: float,
    used: int,
    settled: bool,
    precision: Precision,
    tol: float,
) -> TopSingular:
    value = operator.scale * float(np.sqrt(theta))
    relative = residual / (1.0 + np.sqrt(1.0 - residual)) if residual < 1.0 else 1.0
    rounding = 32.0 * float(np.finfo(np.float64).eps)
    gap = max(1.0 - second / theta, 0.0)
    estimate = min(relative, 0.5 * residual**2 / gap) if gap > 0.0 else relative
    return TopSingular(
        value=value,
        left=operator.output(left / np.sqrt(theta)),
        right=operator.input(right),
        residual=residual,
        error_bar=value * (relative + rounding),
        gap_estimate=value * (estimate + rounding),
        iterations=used,
        converged=settled and residual <= 2.0 * tol,
        precision=precision,
        tol=tol,
    )


def _zero(operator: _Operator, start: Array, used: int, precision: Precision, tol: float) -> TopSingular:
    # J^T J annihilates a random vector: with probability one J = 0
    return TopSingular(
        value=0.0,
        left=operator.output(np.zeros(operator.outputs)),
        right=operator.input(start),
        residual=0.0,
        error_bar=0.0,
        gap_estimate=0.0,
        iterations=used,
        converged=True,
        precision=precision,
        tol=tol,
    )


class _Source(Protocol):
    n: int
    d: int
    e: int


class _Operator:
    """J on flat vectors in units of ``scale``, so that ``J^T J`` is in range wherever J is."""

    def __init__(self, operator: Any) -> None:
        self._fused: FusedJacobian | None = None
        self._tokens: _Source | None = None
        self.scale, self._scaled = 1.0, False  # until the first product shows the size
        if isinstance(operator, FusedJacobian):
            self._fused = operator if operator.dtype == np.float64 else operator.astype(np.float64)
            self._tokens = self._fused
            self._linear: LinearOperator = self._fused
        else:
            if isinstance(operator, (list, tuple)):
                operator = check.matrix(operator, "operator")
            self._linear = operator if isinstance(operator, LinearOperator) else aslinearoperator(operator)
            if self._linear.dtype is not None and np.dtype(self._linear.dtype).kind == "c":
                raise ValueError("operator must be real, received a complex one; stack its real and imaginary parts.")
            if isinstance(operator, JacobianOperator):
                self._tokens = operator
        self.outputs, self.size = self._linear.shape

    def single(self) -> _Operator | None:
        """The same in float32, where there is such a form and its range holds the operator."""
        if isinstance(self._linear, TwoPrecisions):
            out = object.__new__(_Operator)
            out.__dict__.update(self.__dict__)
            out._linear = self._linear.single
            return out
        if self._fused is None:
            return None
        rough = self._fused.astype(np.float32)
        if rough.dtype != np.float32:
            return None
        out = object.__new__(_Operator)
        out.__dict__.update(self.__dict__)
        out._fused = out._linear = rough
        out.scale = rough.scale
        return out

    def start(self, rng: np.random.Generator) -> Array:
        """A random vector; zero at atoms of zero weight, which no product reaches."""
        x = rng.standard_normal(self.size)
        if self._fused is None:
            return x
        layer = self._fused.layer
        return np.asarray(layer.scatter(layer.gather(x.reshape(self._fused.n, self._fused.d)))).reshape(-1)

    def guess(self, given: ArrayLike) -> Array | None:
        """A given start as a unit vector; None where it is zero."""
        x = check.as_float_array(given, "start").reshape(-1)
        if x.size != self.size:
            raise ValueError(f"start must have {self.size} entries like the operator's input, received {x.size}.")
        norm = float(np.linalg.norm(x))
        return x / norm if norm > 0.0 else None

    def input(self, x: Array) -> Array:
        shaped = x if self._tokens is None else x.reshape(self._tokens.n, self._tokens.d)
        return check.frozen(shaped)

    def output(self, y: Array) -> Array:
        shaped = y if self._tokens is None else y.reshape(self._tokens.n, self._tokens.e)
        return check.frozen(shaped)

    def gram(self, x: NDArray[Any]) -> NDArray[Any]:
        """``J^T J x / scale^2``."""
        if self._fused is not None:
            factor = self._fused.scale / self.scale
            if FUSED_SCALES[0] < factor < FUSED_SCALES[1]:
                product = self._fused.scaled_gram(x).reshape(-1)
                return product if factor == 1.0 else product * self._fused.dtype.type(factor**2)
        return self._backward(self._forward(x))

    def evaluate(self, x: Array) -> tuple[float, Array, Array]:
        """``|J x|^2``, ``J x`` and ``J^T J x`` for a unit vector, in units of the scale."""
        y = self._forward(x)
        return float(y @ y), y, self._backward(y)

    def _forward(self, x: Array) -> Array:
        y = np.asarray(self._linear.matvec(x), dtype=np.float64).reshape(-1)
        if not np.isfinite(y).all():
            raise ValueError("operator must give finite products, received NaN or infinite entries; scale its data.")
        if not self._scaled and (size := float(np.abs(y).max(initial=0.0))) > 0.0:
            self.scale, self._scaled = float(2.0 ** np.round(np.log2(size))), True
        return y / self.scale

    def _backward(self, y: Array) -> Array:
        x = np.asarray(self._linear.rmatvec(y), dtype=np.float64).reshape(-1) / self.scale
        if not np.isfinite(x).all():
            raise ValueError("operator must give finite products, received NaN or infinite entries; scale its data.")
        return x
