"""Attacks on the three estimates: size of the field, slope in the token, slope in the measure with the token kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mpmath as mp
import numpy as np
from ascent import largest
from definitions import STEP, field_jacobian, gamma, logits, sinkhorn
from exact import NUDGE, exact, field_stretch, masses, minus, norm
from exact import gamma as exact_gamma
from exact import mean_norm as exact_mean_norm
from outcomes import Outcome, asked, attempt, settled
from problems import ALL, ORDERS, Problem, problem

import otattn as oa


def _apart(Z, w):
    """The query, the atoms, and their weights: the last point is no atom."""
    rest = w[:, :-1]
    return Z[:, -1:], Z[:, :-1], rest / rest.sum(1, keepdims=True)


def _rows(q: Problem, x, n: int):
    """The query at the times of all tokens, or once where times do not matter."""
    at = np.arange(n) if q.map.ordered else np.arange(1)
    return np.repeat(x, len(at), axis=1), at


def _potentials(q: Problem, X, w):
    every = np.arange(X.shape[1])
    return [sinkhorn(logits(h, X, every, X), w)[1] if h.kind == "sinkhorn" else None for h in q.map.heads]


def size(q: Problem):
    """``|Gamma_mu(x)|``."""

    def number(Z, w):
        x, X, v = _apart(Z, w)
        y, at = _rows(q, x, X.shape[1])
        return np.linalg.norm(gamma(q.map, y, at, X, v, _potentials(q, X, v)).real, axis=2).max(1)

    def sure(Z, w):
        *X, x = Z
        v = [a / mp.fsum(w[:-1]) for a in w[:-1]]
        at = range(len(X) if q.map.ordered else 1)
        return max(norm(exact_gamma(q.map, [x], [i], X, v)[0]) for i in at)

    return number, sure


def field(q: Problem):
    """``||D_x Gamma_mu(x)||`` at the atoms; what overflows counts for nothing."""

    def blocks(X, w):
        J = field_jacobian(q.map, X, np.arange(X.shape[1]), X, w)
        return np.where(np.isfinite(J), J, 0.0)

    def number(X, w):
        return np.linalg.norm(blocks(X, w), 2, axis=(2, 3)).max(1)

    def sure(X, w):
        y, v = np.array([[[float(c) for c in x] for x in X]]), np.array([[float(a) for a in w]])
        _, s, right = np.linalg.svd(blocks(y, v)[0])
        i = int(s[:, 0].argmax())
        return field_stretch(q.map, i, X, w, right[i, 0])

    return number, sure


def kept(q: Problem, x, X, w):
    """The derivative of ``Gamma_mu(x)`` in the atoms, the query kept: ``(B, m, e, n, d)``."""
    B, n, d = X.shape
    Y = (X[:, None] + 1j * STEP * np.eye(n * d).reshape(1, n * d, n, d)).reshape(-1, n, d)
    y, at = _rows(q, x, n)
    y, v = np.repeat(y, n * d, axis=0), np.repeat(w, n * d, axis=0)
    out = gamma(q.map, y, at, Y, v, _potentials(q, Y, v)).imag / STEP
    return np.moveaxis(out.reshape(B, n * d, len(at), -1), 1, -1).reshape(B, len(at), -1, n, d)


def steepest_direction(J, w, p: float):
    """``max |J eps| / |eps|_p`` of ``J (e, n, d)`` from below, and the direction: alternating between eps and the image."""
    blocks = np.moveaxis(J, 1, 0)
    scaled = blocks / np.sqrt(w)[:, None, None]
    u = np.linalg.svd(np.concatenate(scaled, axis=1))[0][:, 0]
    if p == 1.0:
        j = int((np.linalg.norm(blocks, 2, axis=(1, 2)) / w).argmax())
        u = np.linalg.svd(blocks[j])[0][:, 0]
    best, direction = 0.0, np.ones(J.shape[1:])
    for _ in range(1 if p <= 2.0 else 25):
        r = np.einsum("nek,e->nk", blocks, u)
        length = np.linalg.norm(r, axis=1)
        if not length.max() > 0:
            break
        unit = r / np.maximum(length, 1e-300)[:, None]
        if p == 1.0:
            eps = np.where((length / w >= (length / w).max())[:, None], unit, 0.0)
        elif np.isinf(p):
            eps = unit
        else:
            share = length / w
            eps = (share / share.max())[:, None] ** (1 / (p - 1)) * unit
        image = np.einsum("nek,nk->e", blocks, eps)
        whole = np.linalg.norm(eps, axis=1)
        below = whole.max() if np.isinf(p) else (w @ whole**p) ** (1 / p)
        value = np.linalg.norm(image) / below
        if value > best:
            best, direction = float(value), eps
        u = image / max(np.linalg.norm(image), 1e-300)
    return best, direction


def slope(q: Problem):
    """The largest ``|D Gamma_mu(x) eps| / |eps|_p``, x kept."""

    def found(Z, w):
        x, X, v = _apart(Z, w)
        J = kept(q, x, X, v)
        J = np.where(np.isfinite(J), J, 0.0)
        rows = [[(*steepest_direction(J[b, i], v[b], q.p), i) for i in range(J.shape[1])] for b in range(len(J))]
        return [max(one, key=lambda row: row[0]) for one in rows]

    def number(Z, w):
        return np.array([row[0] for row in found(Z, w)])

    def sure(Z, w):
        floats = np.array([[[float(c) for c in x] for x in Z]]), np.array([[float(a) for a in w]])
        _, eps, i = found(*floats)[0]
        *X, x = Z
        v = [a / mp.fsum(w[:-1]) for a in w[:-1]]
        eps = exact(eps / np.abs(eps).max())
        ends = [
            exact_gamma(q.map, [x], [i], [[a + s * NUDGE * b for a, b in zip(y, e, strict=True)] for y, e in
                                          zip(X, eps, strict=True)], v)[0]
            for s in (1, -1)
        ]  # fmt: skip
        return norm(minus(*ends)) / (2 * NUDGE) / exact_mean_norm(eps, v, q.p)

    return number, sure


QUANTITY: dict[str, Callable[[Problem], Any]] = {"value": size, "field": field, "measure": slope}


def attack(name: str, call: Callable[[Problem], Any], wanted: tuple[str, ...], **draw: Any):
    """``call`` gives one number for each of the quantities wanted."""

    def run(rng: np.random.Generator) -> Outcome:
        more, masked = ((), None) if rng.random() < 0.6 else (("sinkhorn", "sinkhorn"), False)
        drawn: dict[str, Any] = {
            "kinds": (*ALL, *more),
            "masked": masked,
            "heads": rng.random() < 0.3,
            "orders": ORDERS,
        }
        q = problem(rng, **{**drawn, **draw})

        def body() -> Outcome:
            out = None
            for what, bound in zip(wanted, asked(lambda: call(q)), strict=True):
                if bound is None:
                    continue
                number, sure = QUANTITY[what](q)
                # one point more, which is the query and no atom; the field is looked at from the atoms
                wide = q if what == "field" else replace(q, atoms=q.atoms + 1)
                z, w, value, tried = largest(wide, number, rng, iterations=15)
                about = (q, what, z.tolist(), w.tolist())
                new = settled(name, q.kind, float(bound), value, tried, _sure(sure, q, z, w), about)
                if out is None or new.state == "violated" or (out.state == "held" and new.share > out.share):
                    out = new
            assert out is not None
            return out

        return attempt(name, body, q.kind, q)

    return run


def _sure(sure, q: Problem, z, w):
    return lambda: sure(q.region.exact(z), masses(w))


def all_three(q: Problem) -> tuple[Any, ...]:
    """The proven values of ``estimates``."""
    found = oa.estimates(q.ours, q.region.domain, n=q.n, p=q.p, ascent=False)
    return tuple(None if b is None else b.value for b in (found.value, found.field, found.measure))


B = oa.bounds
ESTIMATES: dict[str, Callable[[np.random.Generator], Outcome]] = {
    "bounds.value_bound": attack(
        "bounds.value_bound", lambda q: [B.value_bound(q.ours, domain=q.region.domain, n=q.n, p=q.p)], ("value",)
    ),
    "bounds.heads_field_bound": attack(
        "bounds.heads_field_bound",
        lambda q: [B.heads_field_bound(q.ours, domain=q.region.domain, n=q.n, p=q.p)],
        ("field",),
    ),
    "bounds.fixed_query_bound": attack(
        "bounds.fixed_query_bound",
        lambda q: [B.fixed_query_bound(q.ours, domain=q.region.domain, n=q.n, p=q.p)],
        ("measure",),
    ),
    "estimates": attack("estimates", all_three, ("value", "field", "measure")),
}
