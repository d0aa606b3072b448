"""The three estimates from below: a short ascent over a query and a few atoms, evaluated through the map's own derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.errors import ConvergenceError, NoJacobianError
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.lower.problem import Problem, problem_of
from otattn.lipschitz.theorem import Quantity
from otattn.measures import DiscreteMeasure, PointSet, SpaceTimeMeasure

ATOMS = 3
"""Atoms of a measure that is moved."""
DIRECTIONS = 4
"""Latent directions in which points move, those that the matrices of the map single out first."""
STARTS, STEPS, EVALUATIONS = 12, 20, 240
"""Configurations looked at, and from the best of them steps of L-BFGS and evaluations at most."""
SMALL, ROUNDS = 8, 12
"""Outputs up to which all rows of a derivative are formed; steps of the alternating iteration otherwise."""
DEEPEST = 60.0
"""Log-weights below the heaviest atom's at most."""


@dataclass(frozen=True, eq=False)
class Witness:
    """A query and a measure, in free parameters: coordinates of the query and of the atoms, then log-weights."""

    problem: Problem
    frame: Array
    atoms: int

    @property
    def free(self) -> bool:
        """The weights move: no number of tokens is given."""
        return self.problem.n is None and self.atoms > 1

    @property
    def size(self) -> int:
        """Number of parameters."""
        return (self.atoms + 1) * len(self.frame) + (self.atoms if self.free else 0)

    def points(self, t: Array) -> tuple[Array, Array, Array]:
        """The query ``(d,)``, the atoms ``(c, d)`` and their weights."""
        k, chart = len(self.frame), self.problem.chart
        omega = t[: (self.atoms + 1) * k].reshape(-1, k) @ self.frame
        x = chart.lift(chart.latents(omega))
        if self.free:
            logs = t[(self.atoms + 1) * k :]
            w = np.exp(np.maximum(logs - logs.max(), -DEEPEST))
        else:
            n = self.problem.n or 1
            w = np.full(self.atoms, 1.0)
            w[-1] += n - self.atoms
        return x[0], x[1:], w / w.sum()

    def measure(self, t: Array) -> tuple[Array, Any, Array | None]:
        """The query, the measure, and for causal maps the time of the query: it sees two tokens of n."""
        x, y, w = self.points(t)
        if not self.problem.attention.causal:
            return x, DiscreteMeasure(y, w), None
        n = self.problem.n
        if n is None:
            return x, SpaceTimeMeasure(np.ones(len(y)), y, w), np.ones(1)
        times = np.minimum((np.arange(len(y)) + 1.0) / n, 1.0)
        times[-1] = 1.0
        return x, SpaceTimeMeasure(times, y, w), np.array([min(2.0 / n, 1.0)])


def size_of(attention: AttentionMap, x: Array, mu: Any, times: Array | None, p: float) -> float:
    """``|Gamma_mu(x)|``."""
    return float(np.linalg.norm(attention(x[None], mu, times=times)[0]))


def slope_of(attention: AttentionMap, x: Array, mu: Any, times: Array | None, p: float) -> float:
    """``||D_x Gamma_mu(x)||``."""
    return float(np.linalg.norm(attention.field_jacobian(x[None], mu, times=times)[0], 2))


def measure_slope_of(attention: AttentionMap, x: Array, mu: Any, times: Array | None, p: float) -> float:
    """``max |D Gamma_mu(x) eps| / |eps|_p`` with x kept, from below: the row of an atom of no weight at x."""
    live = mu.weights > 0
    points, w = np.vstack([mu.points[live], x]), np.append(mu.weights[live], 0.0)
    if times is None:
        J = attention.jacobian(DiscreteMeasure(points, w))
    else:
        J = attention.jacobian(SpaceTimeMeasure(np.append(mu.times[live], times), points, w))
    n, d = points.shape
    e = J.shape[0] // n

    def adjoint(u: Array) -> Array:
        row = np.zeros((n, e))
        row[-1] = u
        return np.asarray(J.rmatvec(row.ravel()).reshape(n, d)[:-1])

    def image(eps: Array) -> Array:
        return np.asarray(J.matvec(np.vstack([eps, np.zeros(d)]).ravel()).reshape(n, e)[-1])

    if e > SMALL:
        return climbed(image, adjoint, image(np.random.default_rng(0).standard_normal((n - 1, d))), w[:-1], p)
    return weighted_norm(np.stack([adjoint(u) for u in np.eye(e)], axis=1), w[:-1], p)


def weighted_norm(blocks: Array, w: Array, p: float) -> float:
    """``max |sum_j J_j eps_j| / (sum_j w_j |eps_j|^p)^{1/p}`` of ``J (n, e, d)``, from below; exact for p = 1 and 2."""
    if p == 1.0:
        return float((np.linalg.norm(blocks, 2, axis=(1, 2)) / w).max())
    u, s, _ = np.linalg.svd(np.concatenate(blocks / np.sqrt(w)[:, None, None], axis=1), full_matrices=False)
    if p == 2.0:
        return float(s[0])
    return climbed(
        lambda eps: np.einsum("ned,nd->e", blocks, eps), lambda v: np.einsum("ned,e->nd", blocks, v), u[:, 0], w, p
    )


def climbed(image: Callable[[Array], Array], adjoint: Callable[[Array], Array], u: Array, w: Array, p: float) -> float:
    """The same from products alone: the best eps for an output direction u, then u along the image of eps, and again."""
    best = 0.0
    for _ in range(ROUNDS):
        r = adjoint(u)
        length = np.linalg.norm(r, axis=1)
        share = length / w
        if not share.max() > 0:
            break
        if p == 1.0:
            size = (share == share.max()).astype(float)
        else:
            size = np.ones_like(w) if math.isinf(p) else (share / share.max()) ** (1.0 / (p - 1.0))
        v = image(size[:, None] * r / np.maximum(length, 1e-300)[:, None])
        below = float(size.max()) if math.isinf(p) else float(w @ size**p) ** (1.0 / p)
        best = max(best, float(np.linalg.norm(v)) / below)
        u = v / max(float(np.linalg.norm(v)), 1e-300)
    return best


OBJECTIVES: dict[Quantity, Callable[..., float]] = {
    "value": size_of,
    "field": slope_of,
    "measure": measure_slope_of,
}


def measured(attention: AttentionMap, domain: Any, n: int | None, p: float, quantity: Quantity) -> Bound | str:
    """What a short ascent finds of an estimate, a lower value with its witness; or why nothing is measured."""
    if isinstance(domain, PointSet):
        return "points of a finite set cannot move"
    if not attention.everywhere:
        return f"{attention.kind} is known at its tokens only"
    problem = problem_of(attention, domain=domain, n=n, p=p)
    witness = Witness(problem, _frame(problem), ATOMS if n is None else min(n, ATOMS))
    rng = np.random.default_rng(0)
    number = OBJECTIVES[quantity]

    def value(t: Array) -> float:
        x, mu, times = witness.measure(t)
        with np.errstate(all="ignore"):
            try:
                found = number(attention, x, mu, times, p)
            except (OverflowError, ConvergenceError):
                return 0.0
        return found if math.isfinite(found) else 0.0

    try:
        best, _, where = max((value(t), -k, t) for k, t in enumerate(_starts(witness, rng)))
    except NoJacobianError as exc:
        return str(exc)
    options = {"maxiter": STEPS, "maxfun": EVALUATIONS}
    end = minimize(lambda t: -math.log(max(value(t), 1e-300)), where, method="L-BFGS-B", options=options).x
    if value(end) > best:
        best, where = value(end), end
    x, mu, _ = witness.measure(where)
    return Bound(
        best, "lower", f"a short ascent from {STARTS} starts", p, domain, n, (x, mu), {}, attention, quantity=quantity
    )


def _frame(problem: Problem) -> Array:
    """Orthonormal latent directions ``(m, k)``: all, or the leading ones of the heads' matrices."""
    k, E = problem.chart.latent_dim, problem.chart.E
    if k <= DIRECTIONS:
        return np.eye(k)
    rows = [np.eye(k)[:DIRECTIONS]]
    for head in problem.forms:
        for M in (head.A @ E, head.A.T @ E, head.V @ E):
            rows.append(np.linalg.svd(M, full_matrices=False)[2][:1])
    Q = np.linalg.qr(np.concatenate(rows[1:] + rows[:1]).T)[0]
    return np.asarray(Q[:, :DIRECTIONS].T)


def _starts(witness: Witness, rng: np.random.Generator) -> list[Array]:
    """Opposite atoms along every direction with the query beside them, or across from it, and random clouds."""
    k, c = len(witness.frame), witness.atoms
    out = []
    for s in range(STARTS):
        z = rng.standard_normal((c + 1, k))
        if s < 2 * k:
            u = np.eye(k)[s // 2] * (math.pi / 2 - 1e-2)
            z[:] = u if s % 2 else -u
            z[1] = u
            z[2:] = -u + 1e-2 * rng.standard_normal((max(c - 1, 0), k))
        elif k > 1 and s >= STARTS - 4:  # two light anchors across the query, the rest behind it
            z[:], z[0] = -np.eye(k)[0], np.eye(k)[0]
            z[1], z[2:3] = np.eye(k)[1], -np.eye(k)[1]
            z *= (math.pi / 2 - 1e-2) * (1.0 if s % 2 else -1.0)
        logs = rng.choice([0.0, 2.0, 6.0]) * rng.standard_normal(c) if witness.free else np.empty(0)
        out.append(np.concatenate([z.ravel(), logs]))
    return out
