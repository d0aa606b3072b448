"""What holds the certificates near real tokens back: the twelve heads of the bundled layer, n = 128, term by term.

Run: ``python -m benchmarks.shares`` (five minutes on a busy core); writes ``benchmarks/results/shares.md``.

First the certificates of second order in the W_2 ball of radius 1e-3 R: what the second derivative and the third add to the norm at
the tokens, and the third if it were everywhere what it is at the tokens. Then balls of 1e-2 R around each token: the parts of
:func:`otattn.lipschitz.relaxations.near_tokens`, the terms of its perturbation branch, what an ascent finds, and what is found when
each row of the Jacobian may move the tokens in a way of its own: no bound that treats rows one by one can be below that.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

import otattn as oa
from benchmarks.near_tokens import ascend
from otattn.lipschitz.comparison import reduced_head
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.constants.moved_rows import Made, moved_rows
from otattn.lipschitz.near.build import chain_at

RESULTS = pathlib.Path(__file__).parent / "results"
BALL, EACH = 1e-3, 1e-2
Array = np.ndarray[Any, Any]


def of_second_order(head: oa.AttentionMap, X: Array, r: float) -> dict[str, float]:
    """The terms of ``||J|| + C r / 2 + third``, and the last with the third derivative at the tokens."""
    chain = chain_at(head, X)
    expansion: Any = chain.stages[-1].expansion
    return {
        "norm": chain.norm,
        "second": 0.5 * expansion.curvature() * r,
        "third": expansion.third_remainder(r) / r,
        "at the tokens": expansion.third(0.0) * r * r / 6.0,
    }


def of_perturbation(A: Array, V: Array, c: Array, X: Array, rho: float) -> dict[str, float]:
    """Norms of the terms of the change of the Jacobian, blocks by their norms."""
    y, sizes = X - X.mean(axis=0), np.linalg.norm(X, axis=1)
    rows = moved_rows(X, y, A, V, c, rho, None, Made(sizes, float(sizes.max()), 1e-12))
    far = np.linalg.norm(rows.centred(rows.values), axis=2)
    change = np.maximum(rows.high - rows.P, rows.P - rows.low)
    mean = rows.moved(far) + 2.0 * rows.dv
    spreads = rows.spreads({name: np.zeros(len(X)) for name in ("values", "keys")})
    G = rows.query[:, None]
    return {
        "weights, V": float(np.linalg.norm(change * rows.v, 2)),
        "weights, logits": float(np.linalg.norm(change * far * G, 2)),
        "means": float(np.linalg.norm(rows.high * mean[:, None] * G, 2)),
        "fields": float(rows.field_change(*spreads).max()),
    }


class Rows:
    """The rows of the Jacobian of a head, each at tokens of its own ``(n, n, d)``."""

    def __init__(self, A: Array, V: Array, c: Array) -> None:
        self.A, self.V, self.c = A, V, c

    def parts(self, Y: Array) -> tuple[Array, Array, Array]:
        own = Y[np.arange(len(Y)), np.arange(len(Y))]
        g = own @ self.A.T + self.c
        logits = np.einsum("ijd,id->ij", Y, g)
        P = np.exp(logits - logits.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        values = Y @ self.V.T
        return g, P, values - np.einsum("ij,ije->ie", P, values)[:, None]

    def jvp(self, Y: Array, w: Array) -> Array:
        g, P, y = self.parts(Y)
        t = np.einsum("ijd,id->ij", Y, w @ self.A.T) + g @ w.T
        return np.asarray(P @ (w @ self.V.T) + np.einsum("ij,ije->ie", P * t, y))

    def vjp(self, Y: Array, u: Array) -> Array:
        """Row by row: ``(n, n, d)``; their sum is the adjoint."""
        g, P, y = self.parts(Y)
        s = P * np.einsum("ije,ie->ij", y, u)
        out = P[:, :, None] * (u @ self.V)[:, None] + s[:, :, None] * g[:, None]
        n = np.arange(len(Y))
        out[n, n] += np.einsum("ij,ijd->id", s, Y) @ self.A
        return np.asarray(out)


def independent(A: Array, V: Array, c: Array, X: Array, rho: float, steps: int = 4) -> float:
    """The largest norm found for rows that each move the tokens by at most rho in a way of their own."""
    rows, w = Rows(A, V, c), np.random.default_rng(0).standard_normal(X.shape)
    Y, best = np.broadcast_to(X, (len(X), *X.shape)), 0.0
    for _ in range(steps):
        for _ in range(15):
            w = rows.vjp(Y, rows.jvp(Y, w)).sum(axis=0)
            w /= np.linalg.norm(w)
        image = rows.jvp(Y, w)
        best = max(best, float(np.linalg.norm(image)))
        h = 1e-4 / np.linalg.norm(w, axis=1).max()
        # the derivative of <u, J w> in the tokens is that of J^T u along w
        D = rows.vjp(Y + h * w, image) - rows.vjp(Y - h * w, image)
        Y = X + rho * D / np.maximum(np.linalg.norm(D, axis=2, keepdims=True), 1e-300)
    return best


def main() -> None:
    layer = oa.load_sample()
    X = layer.tokens(0)
    n, R = len(X), float(np.linalg.norm(X, axis=1).max())
    ball, each = [], []
    for k, head in enumerate(layer.heads):
        found = of_second_order(head, X, BALL * R * np.sqrt(n))
        total = found["norm"] + found["second"] + found["third"]
        ball.append(
            f"| {k} | {total:.2f} | {found['norm']:.2f} | {found['second']:.2f} | {found['third']:.2f} | "
            f"{found['at the tokens']:.2f} |"
        )
        print(ball[-1], flush=True)
        attention, _ = reduced_head(head)
        basis = softmax_head(head, masked=False).on_span().basis
        Z, rho = X if basis is None else X @ basis, EACH * R
        matrices = attention.A, attention.V, np.zeros(Z.shape[1]) if attention.bias is None else attention.bias
        climbed, lower = ascend(attention, Z, rho, np.random.default_rng(k)), independent(*matrices, Z, rho)
        bound = oa.relaxations.near_tokens(attention, Z, rho)
        assert climbed <= bound.value
        assert lower <= bound.details["direct"]
        parts = of_perturbation(*matrices, Z, rho)
        details = bound.details
        each.append(
            f"| {k} | {details['local_value']:.2f} | {climbed:.2f} | {lower:.2f} | {bound.value:.1f} ({details['branch']}) | "
            f"{details['perturbation']:.1f} | " + " | ".join(f"{x:.1f}" for x in parts.values()) + " |"
        )
        print(each[-1], flush=True)
        write(n, R, ball, each)


def write(n: int, R: float, ball: list[str], each: list[str]) -> None:
    lines = [
        "# What holds the certificates near real tokens back: the twelve heads of the bundled layer",
        "",
        f"n = {n}, R = {R:.4g}.",
        "",
        f"## Pairs in the W_2 ball of radius {BALL:g} R",
        "",
        "`certified` is the sum of the next three. `third, at the tokens` is what the third derivative would add if its bound on the "
        "ball were that at the tokens.",
        "",
        "| head | certified | norm at the tokens | second derivative | third derivative | third, at the tokens |",
        "|---|---|---|---|---|---|",
        *ball,
        "",
        f"## Every token within {EACH:g} R of its place",
        "",
        "`ascent` moves the tokens; `rows apart` is the largest norm found when each row of the Jacobian moves them in its own way, "
        "below which no bound can be that treats rows one by one. The last columns are norms of the terms of the perturbation "
        "branch: changes of weights times V, times logits' gradients and values, of the rows' means, of the fields.",
        "",
        "| head | at the tokens | ascent | rows apart | certified | perturbation | weights, V | weights, logits | means | fields |",
        "|---" * 10 + "|",
        *each,
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "shares.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
