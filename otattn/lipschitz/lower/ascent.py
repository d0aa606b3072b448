"""Ascent of local constants over measures with few atoms: batches of starts, analytic gradients, L-BFGS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.lipschitz.lower.charts import tangent
from otattn.lipschitz.lower.clusters import Configuration, split_gradient
from otattn.lipschitz.lower.problem import Problem

Weighting = Literal["fixed", "free", "tokens"]
Batch = Callable[[Array], tuple[Array, Array]]

LOG_WEIGHT_FLOOR = -650.0
"""Log-weights relative to the heaviest atom: ``e^-650`` is the smallest weight that is used (floats end at e^-708)."""

_STEEPEST = 1e8
"""Logarithmic slopes are cut off here; those of a good witness are about ``||A|| R^2``."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """A batch of measures with equally many atoms: latents ``(B, c, k)`` of a chart and log-weights ``(B, c)``.

    With n tokens the weights are ``counts / n`` and ``log_weights = log(counts)``.
    """

    latents: Array
    log_weights: Array

    @property
    def size(self) -> int:
        """Number B of measures."""
        return int(self.latents.shape[0])

    @property
    def atoms(self) -> int:
        """Number c of atoms."""
        return int(self.latents.shape[1])

    def take(self, index: NDArray[np.int64]) -> Candidates:
        """The chosen measures."""
        return Candidates(self.latents[index], self.log_weights[index])

    @staticmethod
    def join(batches: Iterable[Candidates]) -> Candidates:
        """All batches in one."""
        latents, log_weights = zip(*((b.latents, b.log_weights) for b in batches), strict=True)
        return Candidates(np.concatenate(latents), np.concatenate(log_weights))

    def best(self, values: Array, count: int) -> Candidates:
        """Those of the largest values, the largest first."""
        return self.take(np.argsort(-values, kind="stable")[:count])


@dataclass(frozen=True, eq=False)
class Objective:
    """``-log`` of the symmetric part (or of the field at one atom) in free parameters, with its gradient.

    ``groups (n,)`` names the atom of each token of a sequence, whose tokens then count one each.
    """

    problem: Problem
    weighting: Weighting
    fixed: Array
    split_atom: int | None = None
    groups: NDArray[np.int64] | None = None

    def pack(self, c: Candidates) -> Array:
        omega = self.problem.chart.parameters(c.latents).reshape(c.size, -1)
        if self.weighting == "fixed":
            return omega
        if self.weighting == "free":
            lw = c.log_weights - c.log_weights.max(axis=1, keepdims=True)
            return np.concatenate([omega, np.maximum(lw, LOG_WEIGHT_FLOOR)], axis=1)
        # counts = 1 + (n - c) softmax(eta); a count of one sits at eta = log 0.1 instead of -inf
        return np.concatenate([omega, np.log(np.maximum(np.exp(c.log_weights) - 1.0, 0.1))], axis=1)

    def unpack(self, x: Array) -> tuple[Array, Array, Array]:
        """``omega``, log-weights, and for tokens the shares ``softmax(eta)``."""
        B, c = len(x), self.fixed.shape[1]
        k = self.problem.chart.latent_dim
        omega = x[:, : c * k].reshape(B, c, k)
        if self.weighting == "fixed":
            return omega, self.fixed, self.fixed
        eta = x[:, c * k :]
        if self.weighting == "free":
            return omega, eta, eta
        share = np.exp(eta - eta.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        return omega, np.log(1.0 + (self.problem.tokens - c) * share), share

    def candidates(self, x: Array) -> Candidates:
        omega, lw, _ = self.unpack(x)
        return Candidates(self.problem.chart.latents(omega), lw)

    def take(self, index: NDArray[np.int64]) -> Objective:
        return replace(self, fixed=self.fixed[index])

    def __call__(self, x: Array) -> tuple[Array, Array]:
        omega, lw, share = self.unpack(x)
        chart, groups = self.problem.chart, self.groups
        z = each = chart.latents(omega)
        if groups is not None:
            each = z[:, groups]
        batch, normals = _configuration(self.problem, z, lw, groups)
        if self.split_atom is None:
            value, u, v = batch.top(normals, exact=False)
            gX, gw = batch.gradient(u, v)
        else:
            value = np.linalg.norm(batch.fields()[:, self.split_atom], 2, axis=(1, 2))
            gX, gw = split_gradient(batch, np.full(len(x), self.split_atom))
        gz = gX @ chart.E
        if normals is not None and self.split_atom is None:
            gz += chart.normal_gradient(each, batch.rmatvec(u), v)
        if groups is not None:
            summed = np.zeros_like(z)
            np.add.at(summed.swapaxes(0, 1), groups, gz.swapaxes(0, 1))
            gz = summed
        parts = [chart.pull(omega, gz).reshape(len(x), -1)]
        if self.weighting == "free":
            parts.append(gw)
        elif self.weighting == "tokens":
            # d log counts_k = (n - c) d share_k / counts_k
            back = gw * (self.problem.tokens - lw.shape[1]) / np.exp(lw)
            parts.append(share * (back - np.sum(share * back, axis=1, keepdims=True)))
        return _negative_log(value, np.concatenate(parts, axis=1))


def _negative_log(value: Array, gradient: Array) -> tuple[Array, Array]:
    """``-log value`` with its gradient; a plateau where the value is 0 or its gradient is no number."""
    slope = gradient * (-1.0 / np.maximum(value, 1e-300))[:, None]
    slope[~np.isfinite(slope).all(axis=1) | ~(value > 0.0)] = 0.0
    # a start of tiny value beside a huge entry of the matrix: keep the direction
    size = np.abs(slope).max(axis=1, keepdims=True)
    slope *= np.minimum(1.0, _STEEPEST / np.maximum(size, 1e-300))
    return np.where(value > 0.0, -np.log(np.maximum(value, 1e-300)), 700.0), slope


def _configuration(
    problem: Problem, z: Array, log_weights: Array, groups: NDArray[np.int64] | None = None
) -> tuple[Configuration, Array | None]:
    """The measures of latents ``(B, c, k)``, and the normals that their atoms may not move along."""
    X, normals = z @ problem.chart.E.T, problem.chart.normals(z)
    if groups is not None:
        X, log_weights = X[:, groups], np.zeros((len(z), len(groups)))
        normals = None if normals is None else normals[:, groups]
    return Configuration(problem.forms, X, log_weights, problem.causal), normals


def symmetric_part(problem: Problem, candidates: Candidates, groups: NDArray[np.int64] | None = None) -> Array:
    """Norms ``(B,)`` of ``W^{1/2} J W^{-1/2}``; of sequences where ``groups`` names the atom of each token."""
    batch, normals = _configuration(problem, candidates.latents, candidates.log_weights, groups)
    return batch.top(normals, exact=False)[0]


def evaluate(problem: Problem, candidates: Candidates) -> Array:
    """Local constants ``(B,)``: the symmetric part, or the field at an atom that can split (of two tokens at least)."""
    batch, normals = _configuration(problem, candidates.latents, candidates.log_weights)
    fields = batch.fields()
    norms = np.linalg.norm(fields if normals is None else tangent(fields, normals[:, :, None]), 2, axis=(2, 3))
    if problem.n is not None:
        norms = np.where(candidates.log_weights > np.log(1.5), norms, 0.0)
    return np.asarray(np.maximum(batch.top(normals, exact=False)[0], norms.max(axis=1)))


def ascend(
    problem: Problem,
    starts: Candidates,
    *,
    weighting: Weighting = "fixed",
    steps: int,
    split_atom: int | None = None,
    groups: NDArray[np.int64] | None = None,
) -> tuple[Array, Candidates]:
    """Ascend every start of a batch by L-BFGS in smooth parameters of the domain.

    Parameters
    ----------
    weighting : {"fixed", "free", "tokens"}
        Keep the weights, move them freely, or move them as ``(1 + (n - c) softmax) / n``.
    split_atom : int, optional
        Ascend ``||V C_k A||`` at that atom instead of the symmetric part.
    groups : ndarray (n,) of int, optional
        The atom of each token of a sequence.

    Returns
    -------
    values, candidates : ndarray (B,), Candidates
        The symmetric parts (or field norms) reached, never below those of the starts up to the boundary margin.
    """
    objective = Objective(problem, weighting, starts.log_weights, split_atom, groups)
    x, f = lbfgs(objective, objective.pack(starts), steps=steps, floor=LOG_WEIGHT_FLOOR)
    return np.exp(-f), objective.candidates(x)


def _rows(objective: Batch, index: NDArray[np.int64]) -> Batch:
    return objective.take(index) if hasattr(objective, "take") else objective


def lbfgs(objective: Batch, x0: Array, *, steps: int, memory: int = 8, floor: float = -np.inf) -> tuple[Array, Array]:
    """Minimise a batch of functions at once; rows are independent problems ``(B, p)``.

    Limited-memory BFGS with backtracking on every row separately, all rows evaluated together. An objective may have
    a method ``take`` to evaluate a subset of its rows. Rows that no step improves are dropped.

    Returns the best points ``(B, p)`` and their values ``(B,)``.
    """
    x = np.maximum(x0, floor)
    f, g = objective(x)
    best_x, best_f = x.copy(), f.copy()
    live = np.arange(len(x))
    active = objective
    S: list[Array] = []
    Y: list[Array] = []
    length = np.full(len(x), 0.1)
    for _ in range(steps):
        direction = -_two_loop(g, S, Y)
        slope = np.sum(direction * g, axis=1)
        uphill = ~(slope < 0.0)
        direction[uphill], slope[uphill] = -g[uphill], -np.sum(g[uphill] ** 2, axis=1)
        size = np.linalg.norm(direction, axis=1)
        t = np.minimum(1.0 if S else np.inf, length / np.maximum(size, 1e-300))
        new_x, new_f, new_g = x.copy(), f.copy(), g.copy()
        todo = np.arange(len(x))
        for _ in range(6):
            if not len(todo):
                break
            trial = np.maximum(x[todo] + t[todo, None] * direction[todo], floor)
            ft, gt = _rows(active, todo)(trial)
            good = ft <= f[todo] + 1e-4 * t[todo] * slope[todo]
            hit, todo = todo[good], todo[~good]
            new_x[hit], new_f[hit], new_g[hit] = trial[good], ft[good], gt[good]
            t[todo] *= 0.25
        done = np.ones(len(x), dtype=bool)
        done[todo] = False
        s, y = new_x - x, new_g - g
        # differences of flat stretches are rounding: their curvature would blow the next direction up
        steep = np.linalg.norm(y, axis=1)
        curved = (np.sum(s * y, axis=1) > 1e-12 * np.linalg.norm(s, axis=1) * steep) & (steep > 1e-13)
        s[~curved], y[~curved] = 0.0, 0.0
        S, Y = [*S[-(memory - 1) :], s], [*Y[-(memory - 1) :], y]
        moved = np.linalg.norm(new_x - x, axis=1)
        length = np.where(done, np.clip(2.0 * moved, 0.05, 1.0), np.maximum(0.1 * length, 1e-12))
        # a failed row forgets its curvature once; when the plain gradient fails as well it is finished
        for h in (*S, *Y):
            h[~done] = 0.0
        finished = (~done & (length < 1e-7)) | (done & (f - new_f <= 1e-13 * np.maximum(1.0, np.abs(f))))
        x, f, g = new_x, new_f, new_g
        better = f < best_f[live]
        best_x[live[better]], best_f[live[better]] = x[better], f[better]
        if finished.any():
            keep = np.flatnonzero(~finished)
            if not len(keep):
                break
            live, x, f, g, length = live[keep], x[keep], f[keep], g[keep], length[keep]
            S, Y = [h[keep] for h in S], [h[keep] for h in Y]
            active = _rows(active, keep)
    return best_x, best_f


def _two_loop(g: Array, S: list[Array], Y: list[Array]) -> Array:
    """The L-BFGS inverse Hessian times ``g``, row by row; pairs set to zero are skipped."""
    q = g.copy()
    sy = [np.sum(s * y, axis=1) for s, y in zip(S, Y, strict=True)]
    coefficients = []
    for s, y, c in zip(reversed(S), reversed(Y), reversed(sy), strict=True):
        a = np.where(c > 0.0, np.sum(s * q, axis=1) / np.where(c > 0.0, c, 1.0), 0.0)
        q -= a[:, None] * y
        coefficients.append(a)
    gamma = np.ones(len(g))
    for y, c in zip(Y, sy, strict=True):
        yy = np.sum(y * y, axis=1)
        gamma = np.where((c > 0.0) & (yy > 0.0), c / np.where(yy > 0.0, yy, 1.0), gamma)
    q *= gamma[:, None]
    for s, y, c, a in zip(S, Y, sy, reversed(coefficients), strict=True):
        b = np.where(c > 0.0, np.sum(y * q, axis=1) / np.where(c > 0.0, c, 1.0), 0.0)
        q += (a - b)[:, None] * s
    return q


def round_multiplicities(log_counts: Array, n: int) -> Array:
    """Log-counts ``(B, c)`` of positive integers of sum n nearest to the given ones (largest remainders)."""
    shares = np.exp(log_counts - log_counts.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    c = shares.shape[1]
    if c > n:
        raise ValueError(f"atoms must be at most n = {n}, received {c}; use fewer atoms.")
    out = np.empty_like(shares)
    for b, share in enumerate(shares):
        exact = share * n
        counts = np.maximum(np.floor(exact), 1.0)
        missing = int(n - counts.sum())
        if missing >= 0:
            counts[np.argsort(-(exact - counts), kind="stable")[:missing]] += 1.0
        else:
            for _ in range(-missing):
                counts[int(np.argmax(np.where(counts > 1.0, counts - exact, -np.inf)))] -= 1.0
        out[b] = counts
    return np.log(out)
