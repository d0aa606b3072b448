r"""A composition of maps near given tokens: only norms of partial products of the Jacobians at the tokens enter.

Stages ``f_1, .., f_S`` with Jacobians ``J_a`` at the tokens ``X_{a-1}`` that reach them, ``J_{a:b} = J_b .. J_a``, remainders
``R_a(r)`` and growths ``g_a(r)`` (:mod:`~otattn.lipschitz.near.expansion`). For ``|D_0| <= r_0``:

**Images.** ``D_a = J_a D_{a-1} + rho_a``, ``|rho_a| <= R_a(|D_{a-1}|)``; unrolled, ``D_a = J_{1:a} D_0 + sum_t J_{t+1:a} rho_t``, so

``r_a = ||J_{1:a}|| r_0 + sum_{t <= a} ||J_{t+1:a}|| R_t(r_{t-1})``

bounds ``|D_a|``, and ``|F(X + D) - F(X)| <= r_S``; what exceeds ``||J_{1:S}|| r_0`` bounds the remainder of F.

**Jacobians.** With ``E_a = J_a(X_{a-1} + D_{a-1}) - J_a``, ``J'_a .. J'_1 = J_{1:a} + sum_t J_{t+1:a} E_t (J'_{t-1} .. J'_1)``, so
``b_a = ||J_{1:a}|| + sum_t ||J_{t+1:a}|| g_t(r_{t-1}) b_{t-1}`` bounds the norm of the Jacobian of F at ``X + D``, and the sum
bounds its change. Where a bound of the second derivative of the whole is known, ``bends``, both are sharpened by it
(:mod:`~otattn.lipschitz.near.composed`).

Coordinates. Between two stages tokens may be measured otherwise: D in the coordinates ``P_a D`` when it enters stage a, and in
``Q_a D`` when stage a - 1 makes an error. The formulas stay, with ``||P_b J_{a+1:b} Q_a^{-1}||`` for ``||J_{a+1:b}||`` (also for a =
b), and stages ``Q_a f_a P_{a-1}^{-1}``; P_0, P_S and Q_S are identities. Any invertible P and Q will do: good ones make the
stages before (after) them stretch evenly, so that a derivative is not charged for directions in which nothing happens.

Rounding. Each stage is expanded at float tokens that are within ``e_a`` of the true ones; by the same unrolling
``e_b = ||J_{1:b}|| e_0 + sum_t ||J_{t+1:b}|| (R_t(e_{t-1}) + epsilon_t)``, epsilon the rounding of one stage. Its Jacobian
there is off by ``g_a(e)`` and what rounding adds to the matrix. By telescoping, errors ``h_a`` of the factors move the norm
of a product by at most ``sum_t ||J_{t+1:b}|| h_t ||J_{a:t-1}||``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.composed import Bends, bends_term_by_term, budget, grown, walk, with_errors
from otattn.lipschitz.near.expansion import Expansion

__all__ = ["DENSE", "Chain", "Linear", "Stage", "chain_of", "dense_norms"]

Array = NDArray[np.float64]
DENSE = 2048
"""Tokens times dimension up to which Jacobians are matrices and norms are proved."""
_UP = 1.0 + 1e-13
Product = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Linear:
    """A Jacobian: its matrix where it is small, else its products ``(jvp, vjp)`` on arrays of tokens."""

    matrix: Array | None
    jvp: Product
    vjp: Product
    shape: tuple[int, int, int]
    """n, dimension of the inputs, dimension of the outputs."""


def product(parts: Sequence[Linear]) -> tuple[Linear, float]:
    """The Jacobian of a composition, and what the rounding of the products of float matrices does to it."""
    matrix, lost = parts[0].matrix, 0.0
    if any(p.matrix is None for p in parts):
        matrix = None
    for p in parts[1:]:
        if matrix is None or p.matrix is None:
            break
        matrix, lost = _times(p.matrix, matrix, lost)

    def jvp(v: Array) -> Array:
        for p in parts:
            v = p.jvp(v)
        return v

    def vjp(g: Array) -> Array:
        for p in reversed(parts):
            g = p.vjp(g)
        return g

    n, d, _ = parts[0].shape
    return Linear(matrix, jvp, vjp, (n, d, parts[-1].shape[2])), lost


def _times(left: Array, right: Array, lost: float) -> tuple[Array, float]:
    """``left right``, and its rounding where ``right`` had lost so much already."""
    size = float(norm_upper(left))
    return left @ right, lost * size + 4.0 * (len(right) + 8) * EPS * size * float(norm_upper(right))


@dataclass(frozen=True, eq=False)
class Stage:
    """A map at float tokens: its Jacobian and expansion there, and the errors of the Jacobian and of the image."""

    jacobian: Linear
    expansion: Expansion
    jacobian_error: float
    image_error: float


@dataclass(frozen=True, eq=False)
class Chain:
    """Stages with the norms of their partial products.

    ``norms[a, b]`` bounds ``||J_{a+1:b}||`` (stages a, .., b - 1 counted from 0); ``offs[a]`` how far the float tokens before
    stage a are from the true ones; ``bends`` are bounds of their second derivatives together.
    """

    stages: tuple[Stage, ...]
    norms: Array
    offs: tuple[float, ...]
    image_error: float
    how: str = "proved"
    bends: Bends | None = None
    _seen: dict[tuple[str, float, float], float] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        """Upper bound of the norm of the Jacobian of the whole."""
        return float(self.norms[0, -1])

    def radii(self, r: float, off: float = 0.0) -> list[float]:
        """``[r_0, .., r_S]``: how far the images of tokens within r of Y are from those of Y, Y within ``off`` of X."""
        offs = self._offs(off)
        if self.bends is not None and off == 0.0:
            return walk(self._expansions, self.norms, offs, self.bends, r)[0]
        radii, lost = [r], []
        for a, stage in enumerate(self.stages):
            lost.append(stage.expansion.remainder(radii[a], offs[a]))
            total = self._norms(offs)[0, a + 1] * r
            total += sum(self._norms(offs)[t + 1, a + 1] * lost[t] for t in range(a + 1))
            radii.append(float(total) * _UP)
        return radii

    def remainder(self, r: float, off: float = 0.0) -> float:
        """That of the whole, as an expansion."""
        return self._remembered("remainder", r, off, self._remainder)

    def growth(self, r: float, off: float = 0.0) -> float:
        """That of the whole, as an expansion."""
        return self._remembered("growth", r, off, self._growth)

    def stretch(self, r: float) -> float:
        """Upper bound of ``|F(X + D) - F(X)| / |D|`` for ``0 < |D| <= r``."""
        return (self.norm + (self.remainder(r) / r if r > 0.0 else 0.0)) * _UP

    def constant(self, r: float) -> float:
        """Upper bound of the Lipschitz constant of F on the ball."""
        return (self.norm + self.growth(r)) * _UP

    def curvature(self, off: float = 0.0) -> float:
        """That of the whole term by term, as an expansion."""
        offs = self._offs(off)
        return float(bends_term_by_term(self._expansions, self._norms(offs), offs)[-1])

    def third_remainder(self, r: float, off: float = 0.0) -> float:
        offs = self._offs(off)
        return walk(self._expansions, self._norms(offs), offs, None, r)[2]

    def third_growth(self, r: float, off: float = 0.0) -> float:
        offs = self._offs(off)
        return grown(self._expansions, self._norms(offs), offs, None, r)[1]

    @property
    def _expansions(self) -> list[Any]:
        return [s.expansion for s in self.stages]

    def budget(self, r: float) -> dict[str, Any]:
        """What the remainder at r is made of (:func:`~otattn.lipschitz.near.composed.budget`); stages without it give ``stages``."""
        if self.bends is not None:
            return budget(self._expansions, self.norms, self.offs, self.bends, r)
        radii, S = self.radii(r), len(self.stages)
        lost = [self.norms[t + 1, S] * s.expansion.remainder(radii[t], self.offs[t]) for t, s in enumerate(self.stages)]
        return {"remainder": float(sum(lost)), "stages": [float(x) for x in lost]}

    def _remembered(self, name: str, r: float, off: float, make: Callable[[float, float], float]) -> float:
        key = (name, r, off)
        if key not in self._seen:
            with np.errstate(over="ignore", invalid="ignore"):
                value = make(r, off)
            self._seen[key] = value if value == value else float("inf")
        return self._seen[key]

    def _remainder(self, r: float, off: float) -> float:
        offs, radii = self._offs(off), self.radii(r, off)
        if self.bends is not None and off == 0.0:
            return walk(self._expansions, self.norms, offs, self.bends, r)[1][-1]
        norms, S = self._norms(offs), len(self.stages)
        lost = (norms[t + 1, S] * self.stages[t].expansion.remainder(radii[t], offs[t]) for t in range(S))
        return float(sum(lost)) * _UP

    def _growth(self, r: float, off: float) -> float:
        offs, radii = self._offs(off), self.radii(r, off)
        if self.bends is not None and off == 0.0:
            return grown(self._expansions, self.norms, offs, self.bends, r)[0][-1]
        norms, S = self._norms(offs), len(self.stages)
        changes = [s.expansion.growth(radii[t], offs[t]) for t, s in enumerate(self.stages)]
        sizes = [float(norms[0, 0])]  # of J'_t .. J'_1
        for a in range(S - 1):
            lost = sum(norms[t + 1, a + 1] * changes[t] * sizes[t] for t in range(a + 1))
            sizes.append(float(norms[0, a + 1] + lost) * _UP)
        return float(sum(norms[t + 1, S] * changes[t] * sizes[t] for t in range(S))) * _UP

    def _offs(self, off: float) -> tuple[float, ...]:
        """How far the tokens of each stage are from the float ones when the first are within ``off``."""
        if off == 0.0:
            return self.offs
        return _errors(self.stages, self.norms, self.offs[0] + off)[:-1]

    def _norms(self, offs: tuple[float, ...]) -> Array:
        return self.norms if offs is self.offs else _moved(self.stages, self.norms, offs)


def chain_of(
    stages: list[Stage], norms: Array, off: float = 0.0, how: str = "proved", bends: Bends | None = None
) -> Chain:
    """The chain of stages whose first tokens are known up to ``off``, from the norms of the products of float Jacobians.

    ``norms[a, a]`` is that of the change of coordinates between the stages a - 1 and a, 1 where there is none. ``bends`` are bounds
    of the second derivatives that the floats have.
    """
    offs = _errors(tuple(stages), norms, off)
    moved = _moved(tuple(stages), norms, offs[:-1])
    if bends is not None:
        bends = with_errors(bends, [s.expansion for s in stages], norms, moved, offs[:-1])  # type: ignore[misc]
    return Chain(tuple(stages), moved, offs[:-1], offs[-1], how, bends)


def dense_norms(stages: list[Stage]) -> Array:
    """The norms of all partial products of matrices, rounding of the products counted."""
    S = len(stages)
    norms = np.ones((S + 1, S + 1))
    for a in range(S):
        whole: Array | None = None
        lost = 0.0
        for b in range(a + 1, S + 1):
            matrix = stages[b - 1].jacobian.matrix
            assert matrix is not None
            whole, lost = (matrix, 0.0) if whole is None else _times(matrix, whole, lost)
            norms[a, b] = float(spectral_norm_upper(whole)) + lost
    return norms


def _errors(stages: tuple[Stage, ...], norms: Array, off: float) -> tuple[float, ...]:
    """``e_0, .., e_S``."""
    errors = [off]
    lost: list[float] = []
    for b in range(1, len(stages) + 1):
        last = stages[b - 1]
        lost.append(last.image_error + (last.expansion.remainder(errors[-1]) if errors[-1] > 0.0 else 0.0))
        errors.append(float(norms[0, b] * off + sum(norms[t + 1, b] * lost[t] for t in range(b))) * _UP)
    return tuple(errors)


def _moved(stages: tuple[Stage, ...], norms: Array, offs: tuple[float, ...]) -> Array:
    """Norms of products whose factors are off by their errors."""
    lost = [s.jacobian_error + s.expansion.growth(e) for s, e in zip(stages, offs, strict=True)]
    out, S = norms.copy(), len(stages)
    for a in range(S):
        for b in range(a + 1, S + 1):
            out[a, b] += sum(norms[t + 1, b] * lost[t] * out[a, t] for t in range(a, b)) * _UP
    return out
