"""The Schroedinger potentials of a kernel between a measure and itself, with their derivative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.sparse.linalg import LinearOperator, cg

from otattn.attention import base
from otattn.attention.kernels import blocks
from otattn.attention.normalised_jacobian import NormalisedJacobian
from otattn.errors import ConvergenceError

__all__ = ["DENSE_LIMIT", "MarginalSolver", "Potentials"]

Array = NDArray[np.float64]
DENSE_LIMIT = 1024
"""Up to this many atoms derivatives come from a factorisation. Beyond, they come from conjugate gradients, and from
a factorisation only where these stall and it fits the memory budget. Newton steps change over at a quarter of it."""
_GROWTH, _WARM_SPAN, _WARM_ERROR = 4.0, 10.0, 0.1
_LONGEST_STEP = 20.0
_EPS = float(np.finfo(np.float64).eps)


def _fits(n: int) -> bool:
    return 32 * n * n <= base.MEMORY_BUDGET


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
        self.keep = block_size is None and 8 * n * n <= base.MEMORY_BUDGET // 4
        reach = float(np.abs(G).max(initial=0.0)) * float(np.abs(Y).max(initial=0.0)) * Y.shape[1]
        if not reach < 1e300:
            raise OverflowError("logits must fit in float64; scale the tokens or A down.")
        self.stored = G @ Y.T if self.keep else None
        self.span = max(float(np.abs(self._logits(rows)).max()) for rows in self.blocks)
        self.evaluations = 0
        self.factorise = n <= DENSE_LIMIT // 4 and _fits(n)

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
            S = t * (self.Y[columns[part]] @ self.G.T) + (f + self.logw)
            top = S.max(axis=1)
            out[part] = top + np.log(np.exp(S - top[:, None]).sum(axis=1))
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
        solve = self._newton_dense(state) if self.factorise else self._newton_cg(state)
        noise = 64.0 * _EPS * (1.0 + self.span * state.t)
        size_of_gradient = min(1.0, float(np.abs(gradient).sum()))
        # less damping when the step was too timid (parts of the kernel that are nearly separate)
        for damping, sizes in ((0.03, (1.0, 0.5, 0.125, 0.03)), (3e-4, (1.0, 0.1)), (0.0, (1.0, 0.1))):
            step = solve(gradient, damping * size_of_gradient + 10.0 * _EPS)
            if step is None:
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

    def _newton_dense(self, state: _State) -> Callable[[Array, float], Array | None]:
        root = np.sqrt(self.w)
        M = _scaled_laplacian(np.concatenate([P for _, P in self._plan_rows(state)]), root)
        M += np.outer(root, root)

        def solve(gradient: Array, damping: float) -> Array | None:
            try:
                factor = cho_factor(M + damping * np.eye(len(M)), overwrite_a=True, check_finite=False)
            except LinAlgError:
                return None
            step = cho_solve(factor, gradient / root, check_finite=False) / root
            return step if np.isfinite(step).all() else None

        return solve

    def _newton_cg(self, state: _State) -> Callable[[Array, float], Array | None]:
        root = np.sqrt(self.w)
        exchange = _Exchange(lambda: self._plan_rows(state), self.w)

        def solve(gradient: Array, damping: float) -> Array | None:
            scale = 1.0 / np.sqrt(exchange.diagonal / self.w + damping)
            null = root / scale
            null /= np.linalg.norm(null)

            def product(z: Array) -> Array:
                u = scale * z / root
                return np.asarray(scale * (exchange.product(u) / root + damping * root * u) + null * (null @ z))

            operator = LinearOperator((len(root), len(root)), matvec=product, dtype=np.float64)
            tolerance = min(0.1, max(state.error, 1e-4))
            rhs = scale * (gradient / root)
            z, info = cg(operator, rhs, rtol=tolerance, atol=0.0, maxiter=200)
            if info != 0 and _fits(len(root)):  # parts of the kernel are nearly separate
                self.factorise = True
                return self._newton_dense(state)(gradient, damping)
            step = scale * z / root
            return step if np.isfinite(step).all() else None

        return solve


def _scaled_laplacian(P: Array, root: Array) -> Array:
    """``W^{-1/2} (diag(P^T w) - P^T W P) W^{-1/2}``, without cancellation; its kernel is ``root``."""
    B = root[:, None] * P / root
    M = B.T @ B
    M *= -1.0
    M[np.diag_indices_from(M)] = 0.0
    M[np.diag_indices_from(M)] = -(M @ root) / root
    return np.asarray(M)


class _Exchange:
    """The graph Laplacian ``diag(P^T w) - P^T W P``, matrix-free.

    Where a row is close to one-hot it is referred to its largest entry, so that the rounding of a product is
    relative to what the row exchanges with other columns: for a kernel close to a permutation far less than one.
    """

    def __init__(self, rows: Callable[[], Iterator[tuple[slice, Array]]], w: Array) -> None:
        self.rows, self.w = rows, w
        n = len(w)
        self.top: list[NDArray[np.intp] | None] = []
        self.rest = np.empty(n)
        self.column, self.diagonal = np.zeros(n), np.zeros(n)
        for block, P in rows():
            top = P.argmax(axis=1) if P.max() > 0.9 else None
            self.top.append(top)
            others = self._others(P, top)
            self.column += w[block] @ others
            self.diagonal += w[block] @ (others * (1.0 - others))
            if top is not None:
                rest = self.rest[block] = others.sum(axis=1)
                self.diagonal += np.bincount(top, weights=w[block] * (1.0 - rest) * rest, minlength=n)

    @staticmethod
    def _others(P: Array, top: NDArray[np.intp] | None) -> Array:
        if top is None:
            return P
        out = P.copy()
        out[np.arange(len(P)), top] = 0.0
        return out

    def product(self, u: Array) -> Array:
        out = self.column * u
        for (block, P), top in zip(self.rows(), self.top, strict=True):
            w, others = self.w[block], self._others(P, top)
            mean = others @ u
            if top is not None:  # the mean of u over the row, from its value at the largest entry
                rest = self.rest[block]
                mean -= rest * u[top]
                out -= np.bincount(top, weights=w * (1.0 - rest) * mean, minlength=len(u))
                mean += u[top]
            out -= (w * mean) @ others
        return np.asarray(out)


class MarginalSolver:
    """Solves ``(diag(P^T w) - P^T W P) dh = r``, the implicit function theorem, on atoms of positive weight.

    The matrix is that of a weighted graph: symmetric PSD, with the constants in its kernel, so the right side
    sums to zero and any gauge gives the same derivative of the map. It is scaled to a unit diagonal; directions
    that rounding cannot see (nearly separate parts of the kernel) do not move the map either.
    """

    def __init__(self, parts: NormalisedJacobian, weights: Array) -> None:
        self.parts, self.w = parts, weights
        self.live = weights > 0
        self.root = np.sqrt(weights[self.live])
        self.matrix: Array | None = None
        n = len(self.root)
        if n <= DENSE_LIMIT and _fits(n):
            self._factorise()
        else:
            self.exchange = _Exchange(parts.rows, weights)
            self._scale(self.exchange.diagonal[self.live] / weights[self.live])

    def _scale(self, diagonal: Array) -> None:
        # an atom that exchanges no mass at all (its links underflow) has no equation: its dh is 0
        self.alone = diagonal < 1e-290
        self.scale = 1.0 / np.sqrt(np.where(self.alone, 1.0, diagonal))
        null = np.where(self.alone, 0.0, self.root / self.scale)
        self.null = null / max(float(np.linalg.norm(null)), 1e-300)

    def _factorise(self) -> None:
        P = np.concatenate([block for _, block in self.parts.rows()])
        M = _scaled_laplacian(P if self.live.all() else P[np.ix_(self.live, self.live)], self.root)
        self._scale(np.diag(M).copy())
        M *= self.scale[:, None] * self.scale
        M += np.outer(self.null, self.null)
        M[np.diag_indices_from(M)] += np.where(self.alone, 1.0, 0.0)
        self.matrix = M
        self.factor = cho_factor(M + 1e-15 * np.eye(len(M)), overwrite_a=True)

    def _product(self, z: Array) -> Array:
        full = np.zeros(len(self.w))
        full[self.live] = self.scale * z / self.root
        image = self.scale * self.exchange.product(full)[self.live] / self.root + self.null * (self.null @ z)
        return np.asarray(np.where(self.alone, z, image))

    def solve(self, r: Array) -> Array:
        """``dh (n,)`` for ``r (n,)`` of sum zero; zero at atoms of zero weight."""
        rhs = np.where(self.alone, 0.0, self.scale * (r[self.live] / self.root))
        rhs = rhs - self.null * (self.null @ rhs)
        if self.matrix is None:
            operator = LinearOperator((len(rhs), len(rhs)), matvec=self._product, dtype=np.float64)
            z, info = cg(operator, rhs, rtol=1e-13, atol=0.0, maxiter=500)
            if info != 0 and _fits(len(rhs)):
                self._factorise()
                return self.solve(r)
            reached = float(np.linalg.norm(self._product(z) - rhs))
            if info != 0 and reached > 1e-10 * float(np.linalg.norm(rhs)):
                raise ConvergenceError(
                    f"the derivative of the Sinkhorn potentials needs residual 1e-10, reached {reached:.3g} in "
                    "500 conjugate-gradient steps; scale A down (the kernel is close to a permutation)."
                )
        else:
            z = cho_solve(self.factor, rhs)
            z += cho_solve(self.factor, rhs - self.matrix @ z)
        out = np.zeros(len(self.w))
        out[self.live] = self.scale * z / self.root
        return out
