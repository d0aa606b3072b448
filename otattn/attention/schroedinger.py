"""The Schroedinger potentials of a kernel between a measure and itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from otattn._linalg import Array
from otattn.attention import laplacian, memory
from otattn.attention.laplacian import Laplacian
from otattn.attention.memory import blocks
from otattn.errors import ConvergenceError

__all__ = ["Potentials"]

_GROWTH, _WARM_SPAN, _WARM_ERROR = 4.0, 10.0, 0.1
_LONGEST_STEP = 20.0
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class _State:
    """A column potential h of the kernel ``exp(t L)`` and what follows (f makes the row marginals one)."""

    t: float
    h: Array
    f: Array
    defect: Array  # log of the column marginals
    error: float  # largest relative error of a column marginal
    dual: float
    P: list[Array] | None


class Potentials:
    r"""Potentials f, h with ``sum_j w_j k_ij = 1 = sum_i w_i k_ij``, ``k_ij = exp(<g_i, y_j> + f_i + h_j)``.

    ``h`` maximises the concave function ``<w, h> - sum_i w_i log sum_j w_j exp(<g_i, y_j> + h_j)``. The
    logits are scaled up in steps to their full size, each solution starting the next. A step is a Newton
    step, damped by its residual and by a line search, when sweeps are slow and it raises the dual or lowers
    the error; otherwise a Sinkhorn sweep.

    Parameters
    ----------
    G, Y : (n, k) arrays
    weights : (n,) array
        Positive.
    tol : float
        Largest relative error of a column marginal; rows are exact.
    max_iter : int
        Evaluations of the marginals (each costs one pass over the kernel).
    """

    def __init__(
        self, G: Array, Y: Array, weights: Array, *, tol: float, max_iter: int, block_size: int | None
    ) -> None:
        self.G, self.Y, self.w, self.logw = G, Y, weights, np.log(weights)
        self.tol, self.max_iter = tol, max_iter
        n = len(weights)
        self.blocks = list(blocks(n, n, block_size))
        self.keep = block_size is None and 8 * n * n <= memory.MEMORY_BUDGET // 4
        reach = float(np.abs(G).max(initial=0.0)) * float(np.abs(Y).max(initial=0.0)) * Y.shape[1]
        if not reach < 1e300:
            raise OverflowError("logits must fit in float64; scale the tokens or A down.")
        self.stored = G @ Y.T if self.keep else None
        self.span = max(float(np.abs(self._logits(rows)).max()) for rows in self.blocks)
        self.evaluations = 0
        self.factorise = n <= laplacian.DENSE_LIMIT // 4 and laplacian.fits(n)

    def solve(self) -> tuple[Array, Array]:
        """``f`` and ``h``.

        Raises
        ------
        ConvergenceError
            A column marginal is further than ``tol`` from one after ``max_iter`` evaluations, or rounding
            keeps it there.
        """
        levels = max(0, int(np.ceil(np.log(max(self.span, 1e-300) / _WARM_SPAN) / np.log(_GROWTH))))
        state = self._evaluate(_GROWTH**-levels, np.zeros(len(self.w)))
        for level in range(levels, 0, -1):
            state = self._iterate(state, _WARM_ERROR, last=False)
            state = self._evaluate(_GROWTH ** (1 - level), _GROWTH * state.h)
        state = self._iterate(state, self.tol, last=True)
        return state.f, state.h

    def sweeps(self, count: int) -> Array:
        """The column potential after each of so many normalisations of the columns, ``(count, n)``, from zero."""
        out, h = np.empty((count, len(self.w))), np.zeros(len(self.w))
        for k in range(count):
            h = out[k] = h - self._evaluate(1.0, h).defect
        return out

    def _iterate(self, state: _State, target: float, *, last: bool) -> _State:
        best, since, start = state, 0, self.evaluations
        sweeps, wait, refused = 0, 3, 0
        slow = False
        # what rounding of the logits leaves of a marginal
        floor = 64.0 * _EPS * (1.0 + self.span * state.t)
        while state.error > target:
            if not last and self.evaluations - start >= 50:
                return state  # only a start for the next level
            exhausted, stuck = self.evaluations >= self.max_iter, best.error <= floor and since > 30
            if exhausted or stuck:
                if not last:
                    return state
                raise ConvergenceError(
                    f"Sinkhorn attention needs marginals to {target:g}, reached {best.error:.3g} after "
                    f"{self.evaluations} passes over the kernel "
                    f"({'rounding of the logits allows no less' if stuck else 'max_iter is reached'}); "
                    "raise max_iter or tol, or scale A down."
                )
            new = self._newton(state) if slow and sweeps >= wait else None
            if new is not None:
                refused = 0
            else:
                if slow and sweeps >= wait:  # a refused step is tried again later, less and less often
                    refused, sweeps = min(refused + 1, 6), 0
                    wait = 2**refused
                sweeps += 1
                new = self._evaluate(state.t, state.h - state.defect)
                slow = self._is_slow(new.error / state.error, target / new.error if new.error else 1.0)
            state = new
            best, since = (state, 0) if state.error < best.error else (best, since + 1)
        return state

    def _is_slow(self, rate: float, goal: float) -> bool:
        """True when sweeps that shrink the error by ``rate`` cost more than a Newton step before ``goal``."""
        if goal >= 1.0 or not rate > 0.0:
            return False
        n = len(self.w)
        cost = 3.0 + n / 50.0 if self.factorise else (10.0 if self.keep else 40.0)
        return rate >= 1.0 or np.log(goal) / np.log(rate) > cost

    def _logits(self, rows: slice) -> Array:
        return self.stored[rows] if self.stored is not None else self.G[rows] @ self.Y.T

    def _evaluate(self, t: float, h: Array) -> _State:
        self.evaluations += 1
        column = h + self.logw
        f, mass = np.empty(len(h)), np.zeros(len(h))
        kept: list[Array] | None = [] if self.keep else None
        for rows in self.blocks:
            S = t * self._logits(rows)
            S += column
            top = S.max(axis=1, keepdims=True)
            S -= top
            np.exp(S, out=S)
            total = S.sum(axis=1, keepdims=True)
            S /= total
            f[rows] = -(top + np.log(total))[:, 0]
            mass += self.w[rows] @ S
            if kept is not None:
                kept.append(S)
        with np.errstate(over="ignore"):
            ratio = mass / self.w
        extreme = (ratio < 1e-250) | (ratio > 1e250)
        defect = np.log(np.where(extreme, 1.0, ratio))
        if extreme.any():  # columns that (next to) no row reaches, or of a vanishing weight
            defect[extreme] = self._log_columns(t, f, np.flatnonzero(extreme)) + h[extreme]
        error = float(np.abs(ratio - 1.0).max())
        return _State(t, h, f, defect, error, float(self.w @ h + self.w @ f), kept)

    def _log_columns(self, t: float, f: Array, columns: NDArray[np.intp]) -> Array:
        out = np.empty(len(columns))
        for part in blocks(len(columns), len(f), None):
            out[part] = logsumexp(t * (self.Y[columns[part]] @ self.G.T) + (f + self.logw), axis=1)
        return out

    def _plan_rows(self, state: _State) -> Iterator[tuple[slice, Array]]:
        for i, rows in enumerate(self.blocks):
            if state.P is not None:
                yield rows, state.P[i]
            else:
                S = state.t * self._logits(rows)
                S += (state.h + self.logw)[None, :] + state.f[rows, None]
                yield rows, np.exp(S, out=S)

    def _newton(self, state: _State) -> _State | None:
        """A damped Newton step of the dual, None unless it raises the dual or lowers the error."""
        gradient = self.w * -np.expm1(np.minimum(state.defect, 700.0))
        exchange = Laplacian(lambda: self._plan_rows(state), self.w, dense=self.factorise)
        tolerance = min(0.1, max(state.error, 1e-4))
        noise = 64.0 * _EPS * (1.0 + self.span * state.t)
        size_of_gradient = min(1.0, float(np.abs(gradient).sum()))
        # less damping when the step was too timid (parts of the kernel that are nearly separate)
        for damping, sizes in ((0.03, (1.0, 0.5, 0.125, 0.03)), (3e-4, (1.0, 0.1)), (0.0, (1.0, 0.1))):
            damping = damping * size_of_gradient + 10.0 * _EPS
            step = exchange.solve(gradient, damping=damping, tol=tolerance, max_iter=200, required=np.inf)
            self.factorise = self.factorise or exchange.matrix is not None
            if not np.isfinite(step).all():
                continue
            # components of nearly separate parts overshoot: the exchange is exponential in h
            step = np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
            if float(gradient @ step) <= 0.0:
                continue
            for size in sizes:
                new = self._evaluate(state.t, state.h + size * step)
                gain = 1e-4 * size * float(gradient @ step)
                # near the end the dual no longer tells steps apart, the error does
                raised = new.dual - state.dual > max(gain, noise) and new.error <= 10.0 * state.error
                if raised or new.error < 0.7 * state.error:
                    return new
                if new.error < state.error:
                    break
        return None
