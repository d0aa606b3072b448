r"""A feed-forward part of several experts near given tokens, while the router's choice and the clamped values stay the same.

``f(x) = sum_e p_e(x) o_e(x)`` over the chosen experts, p the softmax of the router's logits ``<r_e, x> + b_e`` among these, and
``o = D ((u + 1) phi(g)) + c``, ``phi(g) = g sigma(alpha g)``, g and u affine in x, or constant where they are clamped.

**Where it is smooth.** A logit of a chosen expert is above one of an expert that is not by their gap, which a move of the token by
rho lowers by at most ``|r_e - r_e'| rho``; a value is away from its clamp by a distance, of which ``|w| rho`` is used up. Below the
least of these quotients, :attr:`Routed.reach`, nothing switches. Nothing is proved beyond: the map jumps there.

**The second derivative** along delta, ``|delta| = 1``, with ``t_e = <r_e, delta>``: ``kappa_3(o, t, t) + 2 Cov(o', t) + E[o'']``
under p. With ``tau`` half the largest ``|r_e - r_e'|`` the standard deviation of t is at most tau, and the values are at most ``O_0 =
max |o_e - o_e'|`` from their mean, so it is at most ``O_0 tau^2 + 2 O_1 tau + O_2``. As ``|phi'| <= 1.1`` and ``|phi''| <= 0.50001
alpha`` (those of SiLU), within rho of the token

``O_1 = ||D|| (1.1 max_j (|u_j + 1| + |w^u_j| rho) ||W_g|| + max_j (|phi(g_j)| + 1.1 |w^g_j| rho) ||W_u||)``,
``O_2 = ||D|| (0.50001 alpha max_j (|u_j + 1| + |w^u_j| rho) |w^g_j| ||W_g|| + 2.2 max_j |w^g_j| ||W_u||)``,

at the largest of the chosen experts, and ``O_0`` grows by ``2 O_1 rho``. With B this bound on the ball the Jacobian changes by at
most ``B rho``, and the remainder is ``B rho^2 / 2``; tokens move on their own, so B is that of the worst.

Rounding of the map and of its Jacobian is that of their sums and products, with margins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from otattn._linalg import norm_upper, row_norms, spectral_norm_upper
from otattn.lipschitz.constants._dual_quadratic import EPS

__all__ = ["Experts", "Routed", "experts"]

Array = NDArray[np.float64]
FIRST, SECOND = 1.1, 0.50001
"""Bounds of the first and second derivative of SiLU."""


@dataclass(frozen=True, eq=False)
class Routed:
    """The expansion: token by token how far nothing switches, and what the second derivative is made of."""

    reach: Array
    tau: Array
    apart: Array
    first: tuple[Array, Array]
    """``O_1`` at the token and how much it grows with rho."""
    second: tuple[Array, Array]
    outer: float
    inner: float

    def growth(self, r: float, off: float = 0.0) -> float:
        return self._bend(r + off) * r

    def remainder(self, r: float, off: float = 0.0) -> float:
        return 0.5 * self._bend(r + off) * r * r

    def _bend(self, r: float) -> float:
        """B for tokens that move by at most r, in the coordinates of the expansion."""
        rho = self.inner * r
        if not rho < float(self.reach.min()):
            return float("inf")
        first, second = (at + rho * grown for at, grown in (self.first, self.second))
        values = (self.apart + 2.0 * rho * first) * self.tau**2 + 2.0 * first * self.tau + second
        return float(values.max()) * self.outer * self.inner**2 * (1.0 + 1e-10)


class _Chosen(NamedTuple):
    """An expert at a token: its weight, values, slopes in g and u, ``u + 1``, and bounds of the errors of the three."""

    expert: int
    p: float
    phi: Array
    slope: Array
    lever: Array
    dphi: Array
    dslope: Array
    dlever: Array
    output: Array
    lost: float


class Experts(NamedTuple):
    """The matrices: rows of the router ``(E, d)``, of gates and ups ``(E, h, d)``, outputs ``(E, e, h)``, and the biases."""

    router: Array
    router_bias: Array
    gate: Array
    gate_bias: Array
    up: Array
    up_bias: Array
    down: Array
    down_bias: Array
    top: int
    alpha: float
    limit: float

    def expansion(self, x: Array, left: Array | None, right: Array | None) -> Routed:
        """That of ``left f(right z)`` at float tokens ``x = right z``."""
        outer, inner = (1.0 if M is None else float(spectral_norm_upper(M)) for M in (left, right))
        norms = [
            [float(spectral_norm_upper(M[e])) for M in (self.gate, self.up, self.down)] for e in range(len(self.gate))
        ]
        rows = [self._token(token, norms) for token in x]
        reach, tau, apart, at_1, more_1, at_2, more_2 = (np.array(column) for column in zip(*rows, strict=True))
        return Routed(reach, tau, apart, (at_1, more_1), (at_2, more_2), outer, inner)

    def _token(self, x: Array, norms: list[list[float]]) -> tuple[float, ...]:
        chosen, gap = self._routed(x)
        rows = self.router[[c.expert for c in chosen]]
        tau = 0.5 * max(float(np.linalg.norm(a - b)) for a in rows for b in rows)
        apart = max(float(np.linalg.norm(a.output - b.output)) + a.lost + b.lost for a in chosen for b in chosen)
        bounds = []
        for c in chosen:
            G, U, D = norms[c.expert]
            g, u = (row_norms(M[c.expert]) for M in (self.gate, self.up))
            gap = min(gap, self._clamped(x, c.expert, g, u))
            lever = np.abs(c.lever) + c.dlever
            at_1 = D * (FIRST * lever.max() * G + (np.abs(c.phi) + c.dphi).max() * U)
            more_1 = FIRST * D * (u.max() * G + g.max() * U)
            at_2 = D * (SECOND * self.alpha * (lever * g).max() * G + 2.0 * FIRST * g.max() * U)
            bounds.append((at_1, more_1, at_2, D * SECOND * self.alpha * (u * g).max() * G))
        return gap, tau, apart, *(float(max(column)) for column in zip(*bounds, strict=True))

    def _routed(self, x: Array) -> tuple[list[_Chosen], float]:
        """The chosen experts, and how far the token may move before the router takes another."""
        logits = self.router @ x + self.router_bias
        lost = self._lost(np.abs(self.router) @ np.abs(x) + np.abs(self.router_bias), len(x))
        order = np.argsort(-logits, kind="stable")
        inside, outside = order[: self.top], order[self.top :]
        gap = float("inf")
        for a in inside:
            for b in outside:
                room = logits[a] - logits[b] - lost[a] - lost[b]
                wide = float(np.linalg.norm(self.router[a] - self.router[b])) * (1.0 + 1e-12)
                gap = min(gap, max(float(room), 0.0) / wide if wide > 0.0 else (float("inf") if room > 0.0 else 0.0))
        p = np.exp(logits[inside] - logits[inside].max())
        p /= p.sum()
        return [self._chosen(x, int(e), float(q)) for e, q in zip(inside, p, strict=True)], gap * (1.0 - 1e-12)

    def _lost(self, size: Array, d: int) -> Array:
        """The error of sums of products whose absolute values sum to ``size``."""
        return 2.0 * (d + 4) * EPS * size

    def _pre(self, x: Array, e: int) -> tuple[Array, Array, Array, Array]:
        """What enters gate and up of an expert, and the errors."""
        out: list[Array] = []
        for M, b in ((self.gate, self.gate_bias), (self.up, self.up_bias)):
            out += [M[e] @ x + b[e], self._lost(np.abs(M[e]) @ np.abs(x) + np.abs(b[e]), len(x))]
        return out[0], out[1], out[2], out[3]

    def _clamped(self, x: Array, e: int, g: Array, u: Array) -> float:
        """How far the token may move before a value is clamped, or no longer."""
        z, dz, t, dt = self._pre(x, e)
        room = [np.abs(z - self.limit) - dz, np.abs(np.abs(t) - self.limit) - dt]
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = [np.where(w > 0.0, np.maximum(s, 0.0) / w, np.inf) for s, w in zip(room, (g, u), strict=True)]
        return float(min(part.min() for part in parts)) * (1.0 - 1e-12)

    def _chosen(self, x: Array, e: int, p: float) -> _Chosen:
        z, dz, t, dt = self._pre(x, e)
        g, u = np.minimum(z, self.limit), np.clip(t, -self.limit, self.limit)
        s = expit(self.alpha * g)
        phi, slope, lever = g * s, s + self.alpha * g * s * (1.0 - s), u + 1.0
        dphi = FIRST * dz + 32.0 * EPS * (1.0 + np.abs(g))
        dslope = SECOND * self.alpha * dz + 64.0 * EPS * (1.0 + np.abs(self.alpha * g))
        dlever = dt + 4.0 * EPS * (1.0 + np.abs(u))
        hidden, D = lever * phi, np.abs(self.down[e])
        lost = D @ (np.abs(lever) * dphi + (np.abs(phi) + dphi) * dlever + 4.0 * EPS * np.abs(hidden))
        output = self.down[e] @ hidden + self.down_bias[e]
        lost += self._lost(D @ np.abs(hidden) + np.abs(self.down_bias[e]), len(hidden))
        return _Chosen(e, p, phi, slope, lever, dphi, dslope, dlever, output, float(np.linalg.norm(lost)))

    def errors(self, x: Array) -> tuple[float, float]:
        """What rounding adds to the map at float tokens (Frobenius norm), and to its Jacobian (operator norm)."""
        values, slopes = zip(*(self._errors(token) for token in x), strict=True)
        return float(np.linalg.norm(values)) * (1.0 + 1e-12), max(slopes)

    def _errors(self, x: Array) -> tuple[float, float]:
        chosen, _ = self._routed(x)
        logits = self._lost(np.abs(self.router) @ np.abs(x) + np.abs(self.router_bias), len(x))
        relative = 4.0 * float(logits.max()) + 64.0 * EPS  # of a weight
        wide = 2.0 * float(row_norms(self.router).max())
        many = 8.0 * (self.gate.shape[1] + len(x) + len(self.router) + 16) * EPS
        value = slope = 0.0
        for c in chosen:
            size = float(np.linalg.norm(c.output)) + c.lost
            G, U, D = (float(norm_upper(M[c.expert])) for M in (self.gate, self.up, self.down))
            lever, phi, one = (
                float((np.abs(z) + dz).max()) for z, dz in ((c.lever, c.dlever), (c.phi, c.dphi), (c.slope, c.dslope))
            )
            of_g = float(c.dslope.max()) * lever + one * float(c.dlever.max())
            norm = D * (G * lever * one + U * phi)
            moved = D * (G * of_g + U * float(c.dphi.max())) + many * norm
            value += c.p * (c.lost + (relative + many) * size)
            slope += c.p * (moved + relative * norm + wide * (c.lost + (3.0 * relative + many) * size))
        return value, slope


def experts(map: Any) -> Experts | None:
    """The matrices of a part of several experts; None for another map. A class outside this package has them in ``as_experts()``."""
    return Experts(*map.as_experts()) if hasattr(map, "as_experts") else None
