r"""Sequences with a large local constant of a rotary head: two anchors, and later tokens that are each free to use them best.

With weights (1/2, 1/2) on two anchors ``y_1, y_2`` at the first two places row i of the derivative is ``V (eps_1 + eps_2) / 2 +
V (y_1 - y_2) <x_i, b_i> / 4``, ``b_i = A_{i-1}^T eps_1 - A_{i-2}^T eps_2``, where ``A_m`` is the form at offset m. So ``y_1 - y_2``
goes along the direction that V stretches most on the domain; token ``x_i = E z_i`` is free, and best along ``z_i ~ E^T b_i`` without
the part that would unbalance the two weights, ``E^T (A_{i-1}^T y_1 - A_{i-2}^T y_2)``; the displacement of the anchors is the top
eigenvector of the sum of the squares over i. Then the anchors are tilted towards the keys of the later tokens, and those into the
kernel of Q, until the anchors outweigh the others. An ascent over all tokens and the displacement together does the rest: the
gradient of ``log |J(z) v|`` takes three products with the head.

**More tokens are never worse.** Under a causal mask the first tokens do not see what is appended, so the Jacobian of a sequence is
the leading block of that of a longer one. Sequences are sought at powers of two, each search starting from the one before too; for
n between two of them the longer is cut or the shorter continued with copies of its last token, whichever is better: both grow with n.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.attention import RotaryAttention
from otattn.attention.rotary import rotate
from otattn.lipschitz.lower.ascent import lbfgs
from otattn.lipschitz.lower.charts import Chart, tangent
from otattn.lipschitz.lower.problem import Problem

RUNGS = tuple(2**j for j in range(1, 9))
"""Lengths at which causal sequences are sought."""
_SIZE = {"fast": (1, 150), "deep": (4, 1200)}
"""Starts that are ascended, steps each."""
_FEW = 16
"""Up to this many tokens one more start is ascended: there the anchors are not always best, and an ascent is cheap."""
_TILTS = (0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8)
_RANK = 1e-12


def nested(head: RotaryAttention) -> bool:
    """Whether the first tokens of a sequence are a sequence of their own: nothing appended moves or is seen."""
    return head.masked and head.length is None


def reduced(problem: Problem) -> Problem:
    """The problem in the coordinates that the head sees; on spheres and boxes as it is."""
    chart, attention = problem.chart, _rotary(problem)
    if chart.kind != "ball":
        return problem
    rows = np.concatenate([attention.Q, attention.K, attention.V])
    basis, shape = chart.basis @ _span(rows @ chart.basis), chart.shape @ _span(rows @ chart.shape)
    return replace(problem, chart=Chart("ball", shape, chart.offset, basis))


def _rotary(problem: Problem) -> RotaryAttention:
    assert isinstance(problem.attention, RotaryAttention)
    return problem.attention


def _span(rows: Array) -> Array:
    """Orthonormal columns that span the rows."""
    sizes = np.linalg.norm(rows, axis=1, keepdims=True)
    _, s, right = np.linalg.svd(rows / np.maximum(sizes, 1e-300), full_matrices=False)
    return np.asarray(right[: max(1, int((s > _RANK * s[0]).sum()))].T)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of n tokens, by their latents ``(n, m)``, and the products of the head's Jacobian there.

    Displacements ``(n, r)`` are in the basis of the chart.
    """

    problem: Problem

    @property
    def chart(self) -> Chart:
        return self.problem.chart

    @property
    def head(self) -> RotaryAttention:
        return _rotary(self.problem)

    @property
    def n(self) -> int:
        return self.problem.tokens

    @cached_property
    def on_latents(self) -> tuple[Array, Array, Array]:
        """Q, K and V of latents."""
        a = self.head
        return a.scale * (a.Q @ self.chart.shape), a.K @ self.chart.shape, a.V @ self.chart.shape

    @cached_property
    def on_moves(self) -> tuple[Array, Array, Array]:
        """Q, K and V of displacements."""
        a = self.head
        return a.scale * (a.Q @ self.chart.basis), a.K @ self.chart.basis, a.V @ self.chart.basis

    @cached_property
    def shifts(self) -> tuple[Array, Array]:
        """What is added to queries and keys."""
        a, b = self.head, self.chart.offset
        q, k = (0.0 if x is None else x for x in (a.query_bias, a.key_bias))
        return a.scale * (a.Q @ b + q), a.K @ b + k

    @cached_property
    def angles(self) -> Array:
        places = np.arange(1.0, self.n + 1.0)
        if self.head.length is not None:
            places = self.head.length * places / self.n
        return np.asarray(places[:, None] * self.head.frequencies)

    @cached_property
    def hidden(self) -> Any:
        return np.triu(np.ones((self.n, self.n), dtype=bool), 1) if self.head.masked else np.zeros((1, 1), dtype=bool)

    def turn(self, x: Array, sign: float = 1.0) -> Array:
        """Each token's vector turned by its place."""
        return rotate(x, sign * self.angles, self.head.layout)

    def state(self, z: Array) -> tuple[Array, Array, Array, Array]:
        """Turned queries and keys, values, weights."""
        Q, K, V = self.on_latents
        q, k = self.turn(z @ Q.T + self.shifts[0]), self.turn(z @ K.T + self.shifts[1])
        S = np.where(self.hidden, -np.inf, q @ k.T)
        P = np.exp(S - S.max(axis=1, keepdims=True))
        return q, k, z @ V.T, P / P.sum(axis=1, keepdims=True)

    def _moved(self, v: Array) -> tuple[Array, Array, Array]:
        Q, K, V = self.on_moves
        return self.turn(v @ Q.T), self.turn(v @ K.T), v @ V.T

    def jvp(self, state: Any, v: Array) -> Array:
        """``J v``."""
        q, k, w, P = state
        dq, dk, dw = self._moved(v)
        T = dq @ k.T + q @ dk.T
        return np.asarray(_centred(P, T) @ w + P @ dw)

    def vjp(self, state: Any, u: Array) -> Array:
        """``J^T u``."""
        q, k, w, P = state
        G = _centred(P, u @ w.T)
        Q, K, V = self.on_moves
        return np.asarray(self.turn(G @ k, -1.0) @ Q + self.turn(G.T @ q, -1.0) @ K + (P.T @ u) @ V)

    def slope(self, state: Any, u: Array, v: Array) -> Array:
        """The gradient of ``<u, J(z) v>`` in the latents."""
        q, k, w, P = state
        dq, dk, dw = self._moved(v)
        T, Y = dq @ k.T + q @ dk.T, u @ w.T
        tau, mean = ((P * x).sum(axis=1, keepdims=True) for x in (T, Y))
        GT, GY = P * (Y - mean), P * (T - tau)
        GS = _centred(P, T * (Y - mean) - tau * Y + u @ dw.T)
        Q, K, V = self.on_latents
        left, right = GT @ dk + GS @ k, GT.T @ dq + GS.T @ q
        return np.asarray(self.turn(left, -1.0) @ Q + self.turn(right, -1.0) @ K + (GY.T @ u) @ V)

    def value(self, z: Array, v: Array) -> float:
        """``|J v| / |v|``, the displacement made admissible."""
        v = tangent(v, self.chart.normals(z))
        return float(np.linalg.norm(self.jvp(self.state(z), v)) / max(float(np.linalg.norm(v)), 1e-300))

    def ascend(self, z: Array, v: Array, steps: int) -> tuple[float, Array, Array]:
        """Latents and displacement of larger ``|J v| / |v|``, and that value."""
        chart, (n, m), size = self.chart, z.shape, z.size

        def placed(x: Array) -> tuple[Array, Array, Array | None, Array]:
            omega = x[:size].reshape(n, m)
            at = chart.latents(omega)
            normals = chart.normals(at)
            return omega, at, normals, tangent(x[size:].reshape(n, -1), normals)

        def one(x: Array) -> tuple[float, Array]:
            omega, at, normals, move = placed(x)
            state = self.state(at)
            image = self.jvp(state, move)
            length, most = float(np.linalg.norm(image)), float(np.linalg.norm(move))
            if not (length > 0.0 and most > 0.0):
                return 700.0, np.zeros_like(x)
            u = image / length
            pulled = self.vjp(state, u)
            gz = self.slope(state, u, move)
            if normals is not None:
                gz = gz + chart.normal_gradient(at, pulled, move)
            gv = tangent(pulled, normals) / length - move / most**2
            out = np.concatenate([chart.pull(omega, gz).ravel() / length, gv.ravel()])
            return float(np.log(most) - np.log(length)), -out

        def objective(X: Array) -> tuple[Array, Array]:
            values, slopes = zip(*(one(x) for x in X), strict=True)
            return np.array(values), np.array(slopes)

        # a short displacement turns faster than the tokens move: it is nearly the best at each of them
        v = v / max(float(np.linalg.norm(v)), 1e-300)
        x0 = np.concatenate([chart.parameters(z).ravel(), v.ravel()])
        best = lbfgs(objective, x0[None], steps=steps)[0][0]
        _, at, _, move = placed(best)
        return self.value(at, move), at, move


def _centred(P: Array, T: Array) -> Array:
    """The derivative of the softmax: ``P (T - mean T)``."""
    G = P * T
    G -= P * G.sum(axis=1, keepdims=True)
    return np.asarray(G)


@dataclass(frozen=True, eq=False)
class _Anchored:
    """Two anchors at the first two places, ``+-u`` in latents, u the direction that the values stretch most but ``which``."""

    at: Sequences
    which: int

    @cached_property
    def direction(self) -> Array:
        return np.asarray(np.linalg.svd(self.at.on_latents[2])[2][self.which])

    def _turned(self, x: Array, anchor: int, sign: float) -> Array:
        """Vectors ``(..., rows, k)`` turned by the offsets of the later tokens from an anchor."""
        angles = self.at.angles
        return rotate(x, sign * (angles[2:] - angles[anchor]), self.at.head.layout)

    def keyed(self, y: Array, anchor: int) -> Array:
        """What the logit of an anchor is of each later token's latents: ``(rows, m)``."""
        key = np.broadcast_to(self.at.on_latents[1] @ y, (self.at.n - 2, len(self.at.head.K)))
        return np.asarray(self._turned(key, anchor, -1.0) @ self.at.on_latents[0])

    @cached_property
    def moves(self) -> tuple[Array, Array]:
        """A basis of displacements that move keys, and what they do to the difference of the two logits: ``(2 r, rows, m)``."""
        Q, K = self.at.on_latents[0], self.at.on_moves[1]
        basis = _span(K)
        keys = np.broadcast_to((K @ basis).T[:, None], (basis.shape[1], self.at.n - 2, len(K)))
        each = [s * self._turned(keys, j, -1.0) @ Q for j, s in ((0, 1.0), (1, -1.0))]
        return basis, np.concatenate(each)

    @cached_property
    def queried(self) -> Array:
        """Orthonormal columns that span what queries see of latents."""
        return _span(self.at.on_latents[0])

    def starts(self) -> list[tuple[Array, Array]]:
        """Latents and displacements over a grid of tilts."""
        u, (basis, pulls) = self.direction, self.moves
        y = [u, -u]
        for _ in range(3):
            c = _units(self.keyed(y[0], 0) - self.keyed(y[1], 1))
            free = pulls - (pulls * c).sum(axis=2, keepdims=True) * c
            flat = free.reshape(len(free), -1)
            e = np.linalg.eigh(flat @ flat.T)[1][:, -1]
            x = _units(np.tensordot(e, free, axes=1))
            pulled = [self._turned(x @ self.at.on_latents[0].T, j, 1.0) @ self.at.on_latents[1] for j in (0, 1)]
            # the two logits of all later tokens on the same side
            side = (pulled[0] + pulled[1]) @ np.linalg.svd(pulled[0] + pulled[1], full_matrices=False)[2][0]
            sign = np.where(side < 0.0, -1.0, 1.0)[:, None]
            x, tilt = x * sign, [(g * sign).sum(axis=0) for g in pulled]
            tilt = [_units(w - u * (u @ w)) for w in tilt]
            y = [np.cos(0.2) * s * u + np.sin(0.2) * w for s, w in zip((1.0, -1.0), tilt, strict=True)]
        v = np.zeros((self.at.n, basis.shape[0]))
        v[0], v[1] = basis @ e[: basis.shape[1]], basis @ e[basis.shape[1] :]
        return [(self._tilted(x, tilt, *angles), v) for angles in itertools.product(_TILTS, (0.0, *_TILTS[1:]))]

    def _tilted(self, x: Array, tilt: list[Array], theta: float, phi: float) -> Array:
        """Anchors tilted by theta towards the keys of the later tokens, those by phi into the kernel of Q."""
        u, chart = self.direction, self.at.chart
        y = [np.cos(theta) * s * u + np.sin(theta) * w for s, w in zip((1.0, -1.0), tilt, strict=True)]
        c = _units(self.keyed(y[0], 0) - self.keyed(y[1], 1))
        idle = -(tilt[0] + tilt[1])
        idle = _units(idle - self.queried @ (self.queried.T @ idle))
        later = np.cos(phi) * _units(x - (x * c).sum(axis=1, keepdims=True) * c) + np.sin(phi) * idle
        z = np.concatenate([np.stack(y), later])
        if chart.kind == "cube":
            z = z / np.maximum(np.abs(z).max(axis=1, keepdims=True), 1e-300)
        return chart.clip(z)


def _units(x: Array) -> Array:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300))


_Found = tuple[float, Array, Array]
"""Value, latents and displacement."""


def _best(at: Sequences, rng: np.random.Generator, before: _Found | None) -> _Found:
    """The best sequence found, never worse than ``before`` continued with copies of its last token."""
    count, steps = _SIZE[at.problem.effort]
    count += at.n <= _FEW
    chart, n, r = at.chart, at.n, at.chart.basis.shape[1]
    ends = chart.latents(chart.parameters(_units(rng.standard_normal((2 * count, n, chart.latent_dim)))))
    groups = [[(z, rng.standard_normal((n, r))) for z in ends]]
    if n > 2:
        groups += [_Anchored(at, which).starts() for which in range(min(2, len(at.head.V), chart.latent_dim))]
    chosen: list[_Found] = []
    for group in groups:
        scored = sorted(((at.value(z, v), z, v) for z, v in group), key=lambda one: -one[0])
        chosen += scored[: 2 if group is groups[0] else 1]
    if before is not None:
        _, z, v = before
        z, v = continued(z, n), np.concatenate([v, np.zeros((n - len(v), r))])
        chosen.append((at.value(z, v), z, v))
    chosen.sort(key=lambda one: -one[0])
    return max([*chosen, *(at.ascend(z, v, steps) for _, z, v in chosen[:count])], key=lambda one: one[0])


def continued(z: Array, n: int) -> Array:
    """A sequence cut to n tokens, or continued with copies of its last one."""
    return np.concatenate([z[:n], np.repeat(z[-1:], max(0, n - len(z)), axis=0)])


def search_rotary(problem: Problem, rng: np.random.Generator) -> list[Array]:
    """Latents of sequences of at most n tokens of a :func:`reduced` problem: continued to n, one of them is the best found."""
    n, head = problem.tokens, _rotary(problem)
    seed = int(rng.integers(2**32))
    if not nested(head):
        return [_best(Sequences(replace(problem, n=min(n, RUNGS[-1]))), np.random.default_rng(seed), None)[1]]
    found: list[_Found] = []
    for rung in RUNGS:
        at = Sequences(replace(problem, n=rung))
        found.append(_best(at, np.random.default_rng([seed, rung]), found[-1] if found else None))
        if rung >= n:
            break
    return [z for _, z, _ in found[-2:]]
