"""Attacks on the proven numbers that are not Lipschitz constants: fields, column sums, rows, exponents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
from ascent import largest
from definitions import Head, field_jacobian, logits, weights
from exact import exact, field_stretch, inner, masses, minus, plus, times
from exact import weights as exact_weights
from outcomes import Outcome, asked, attempt, settled
from problems import SOFTMAX, Problem, problem

import otattn as oa

B, R = oa.bounds, oa.relaxations
Quantity = Callable[[Problem], tuple[Callable[..., Any], Callable[..., Any]]]


def attack(name: str, call, quantity: Quantity, **draw: Any) -> Callable[[np.random.Generator], Outcome]:
    """``quantity(problem)`` gives the number in batches of floats and at one configuration in exact numbers."""

    def run(rng: np.random.Generator) -> Outcome:
        q = problem(rng, kinds=SOFTMAX, **draw)

        def body() -> Outcome:
            bound = float(asked(lambda: call(q)))
            number, sure = quantity(q)
            z, w, value, tried = largest(q, number, rng)
            about = (q, z.tolist(), w.tolist())
            return settled(name, q.kind, bound, value, tried, lambda: sure(q.region.exact(z), masses(w)), about)

        return attempt(name, body, q.kind, q)

    return run


def gradient(head: Head, x):
    """``g(x)``, the derivative of the logits in the key."""
    p = head.par
    if head.kind == "softmax":
        return x @ p["A"].T + p["c"]
    return p["scale"] * (x @ p["Q"].T + p["bq"]) @ p["K"]


def exact_gradient(head: Head, x):
    p = head.par
    if head.kind == "softmax":
        return plus(times(exact(p["A"]), x), exact(p["c"]))
    q = plus(times(exact(p["Q"]), x), exact(p["bq"]))
    return [mp.mpf(float(p["scale"])) * a for a in times(exact(p["K"].T), q)]


def _rows(q: Problem, X, w):
    """Weights, deviations from the mean of each row ``(B, i, j, d)``, and gradients."""
    P = weights(q.map, q.map.heads[0], X, np.arange(X.shape[1]), X, w)
    return P, X[:, None] - np.einsum("bij,bjd->bid", P, X)[:, :, None], gradient(q.map.heads[0], X)


def _exact_row(q: Problem, X, w, i):
    P = exact_weights(q.map, q.map.heads[0], [X[i]], [i], X, w)[0]
    mean = [mp.fsum(a * x[c] for a, x in zip(P, X, strict=True)) for c in range(len(X[0]))]
    return P, [minus(x, mean) for x in X], exact_gradient(q.map.heads[0], X[i])


def field(q: Problem):
    """``max_i ||D_x Gamma_mu(x_i)||``."""

    def number(X, w):
        return np.linalg.norm(field_jacobian(q.map, X, np.arange(X.shape[1]), X, w), 2, axis=(2, 3)).max(1)

    def sure(X, w):
        y, v = np.array([[[float(c) for c in x] for x in X]]), np.array([[float(a) for a in w]])
        _, s, right = np.linalg.svd(field_jacobian(q.map, y, np.arange(len(X)), y, v)[0])
        i = int(s[:, 0].argmax())
        return field_stretch(q.map, i, X, w, right[i, 0])

    return number, sure


def column(q: Problem):
    """``max_j sum_i w_i P_ij / w_j``."""

    def number(X, w):
        P = weights(q.map, q.map.heads[0], X, np.arange(X.shape[1]), X, w)
        return (np.einsum("bi,bij->bj", w, P) / w).max(1)

    def sure(X, w):
        P = exact_weights(q.map, q.map.heads[0], X, range(len(X)), X, w)
        return max(mp.fsum(w[i] * P[i][j] for i in range(len(X))) / w[j] for j in range(len(X)))

    return number, sure


def exponent(q: Problem):
    """``max <g(x), y - x>`` over two points."""
    h = q.map.heads[0]

    def number(X, w):
        L = logits(h, X, np.arange(X.shape[1]), X)
        return (L - np.einsum("bii->bi", L)[:, :, None]).max((1, 2))

    def sure(X, w):
        return max(inner(exact_gradient(h, x), minus(y, x)) for x in X for y in X)

    return number, sure


def spread(q: Problem):
    """``max_i |g_i|^2 lambda_max(C_i)``."""

    def number(X, w):
        P, y, g = _rows(q, X, w)
        C = np.einsum("bij,bijd,bije->bide", P, y, y)
        return (np.linalg.eigvalsh(C)[..., -1] * (g**2).sum(-1)).max(1)

    def sure(X, w):
        def one(i):
            P, y, g = _exact_row(q, X, w, i)
            d = range(len(g))
            C = mp.matrix([[mp.fsum(a * v[r] * v[c] for a, v in zip(P, y, strict=True)) for c in d] for r in d])
            return inner(g, g) * max(mp.eigsy(C, eigvals_only=True))

        return max(one(i) for i in range(len(X)))

    return number, sure


def row(q: Problem):
    """``max_i ||[P_ij (I + (x_j - m_i) g_i^T)]_j||``."""

    def blocks(X, w):
        P, y, g = _rows(q, X, w)
        E = np.eye(X.shape[2]) + y[..., :, None] * g[:, :, None, None, :]
        E = np.moveaxis(P[..., None, None] * E, 2, 3)
        return E.reshape(*E.shape[:3], -1)

    def number(X, w):
        return np.linalg.norm(blocks(X, w), 2, axis=(2, 3)).max(1)

    def sure(X, w):
        def one(i):
            P, y, g = _exact_row(q, X, w, i)
            d = range(len(g))
            M = [[a * ((c == r) + v[r] * g[c]) for a, v in zip(P, y, strict=True) for c in d] for r in d]
            gram = mp.matrix([[inner(a, b) for b in M] for a in M])
            return mp.sqrt(max(mp.eigsy(gram, eigvals_only=True)))

        return max(one(i) for i in range(len(X)))

    return number, sure


ANY = {"any_measure": None}
QUANTITIES: dict[str, Callable[[np.random.Generator], Outcome]] = {
    name: attack(name, call, quantity, **draw)
    for name, call, quantity, draw in [
        ("bounds.field_bound", lambda q: B.field_bound(q.ours, domain=q.region.domain), field, {**ANY, "masked": None}),
        (
            "relaxations.field_certificate",
            lambda q: R.field_certificate(q.ours, domain=q.region.domain),
            field,
            {**ANY, "masked": None},
        ),
        ("bounds.column_sum", lambda q: B.column_sum(q.ours, domain=q.region.domain, n=q.n), column, ANY),
        (
            "relaxations.column_exponent",
            lambda q: R.column_exponent(q.ours, domain=q.region.domain),
            exponent,
            {"any_measure": False, "sizes": (2,)},
        ),
        (
            "relaxations.self_entropy",
            lambda q: R.self_entropy(q.ours, domain=q.region.domain, n=q.n),
            spread,
            {"any_measure": False, "masked": None},
        ),
        (
            "relaxations.row_certificate",
            lambda q: R.row_certificate(q.ours, domain=q.region.domain, n=q.n),
            row,
            {"any_measure": False, "masked": None},
        ),
    ]
}
