"""Attacks on certified ratios, local constants of Gaussians and flows: exact arithmetic and an integrator of our own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
from definitions import UNNORMALISED, Head, Map, image
from definitions import distance as float_distance
from exact import digits, distance, exact, gamma, masses, minus, norm
from exact import image as exact_image
from lower import at_witness
from outcomes import NOISE, Outcome, asked, attempt, outcome
from problems import SOFTMAX, Problem, measure, problem
from regions import ball
from transports import ORDERS
from upper import SEVERAL

import otattn as oa
from otattn.lipschitz import gaussian_local_constant

STEPS = 400
"""Steps of the classical Runge-Kutta method for a flow."""


def exact_ratio(q, X, Y, p):
    """``W_p(f(X), f(Y)) / W_p(X, Y)`` of tokens that are floats."""
    X, Y, w = exact(X), exact(Y), masses(np.ones(len(X)))
    ends = [exact_image(q.map, Z, w) for Z in (X, Y)]
    return distance(*ends, p, q.map.ordered) / distance(X, Y, p, q.map.ordered)


def ratio(rng: np.random.Generator) -> Outcome:
    """``certified_lower`` of stability_ratio, every map, displacements that float64 resolves."""
    draw = {**SEVERAL} if rng.random() < 0.3 else {"kinds": (*SOFTMAX, "l2", *UNNORMALISED, "rotary")}
    q = problem(rng, masked=None, any_measure=False, sizes=(1, 2, 3), orders=ORDERS, **draw)
    X = q.region.points(rng.standard_normal((q.n, q.region.size)))
    size = float(np.abs(X).max()) or 1.0
    return certified(q, X, X + size * 10.0 ** rng.uniform(-3, 0.5) * rng.standard_normal(X.shape))


def nearly_equal(rng: np.random.Generator) -> Outcome:
    """The same at displacements of 1e-16 to 1e-8, often with values that do not see the tokens: images that are rounding."""
    if rng.random() < 0.3:
        draw = {**SEVERAL} if rng.random() < 0.5 else {"kinds": (*SOFTMAX, "l2", *UNNORMALISED, "rotary")}
        q = problem(rng, masked=None, any_measure=False, sizes=(1, 2, 3), orders=ORDERS, **draw)
        X = q.region.points(rng.standard_normal((q.n, q.region.size)))
    else:
        n, d, e = (int(k) for k in rng.integers(1, 4, 3))
        V = rng.integers(-3, 4, (e, d)).astype(float) if rng.random() < 0.5 else rng.standard_normal((e, d))
        X = np.round(rng.standard_normal((n, d)), 1)
        A = rng.standard_normal((d, d)) * 10 ** rng.uniform(-1, 1) * (rng.random() < 0.3)
        if d > 1 and rng.random() < 0.8:  # tokens in the kernel of one row of values
            V = V[:1]
            kernel = np.eye(d) - np.outer(V[0], V[0]) / max(V[0] @ V[0], 1e-9)
            X = np.outer(rng.integers(1, 20, n) / 2.0, kernel[rng.integers(d)])
        head = Head("softmax", {"A": A, "V": V, "c": np.zeros(d)})
        q = Problem(
            Map((head,)), oa.SoftmaxAttention(A, V), ball(20.0, d), n, n, float(rng.choice([2.0, 2.0, 1.0, np.inf]))
        )
    return certified(q, X, X + rng.standard_normal(X.shape) * 10.0 ** rng.uniform(-16, rng.choice([-14, -8])))


def certified(q: Problem, X: Any, Y: Any) -> Outcome:
    """Whether the certified value of the pair is at most its ratio."""
    name, about = "stability_ratio", (q, X.tolist(), [[float(c).hex() for c in y] for y in Y])

    def body() -> Outcome:
        found = asked(lambda: oa.stability_ratio(q.ours, X, Y, p=q.p))
        with digits():
            true = exact_ratio(q, X, Y, q.p)
            low = found.certified_lower > true * (1 + NOISE)
            faults = [f"certified {found.certified_lower!r}, exact {mp.nstr(true, 15)}"] if low else []
        return outcome(name, q.kind, faults, about)

    return attempt(name, body, q.kind, about)


def compressed(rng: np.random.Generator) -> Outcome:
    """``compression_bound`` of tokens against their clusters' means, moved copies of them, or other tokens."""
    name = "compression_bound"
    draw = {"heads": True, "kinds": SOFTMAX} if rng.random() < 0.3 else {"kinds": SOFTMAX}
    q = problem(rng, masked=False, any_measure=False, sizes=(1, 2, 3, 4), orders=ORDERS, **draw)
    X = q.region.points(rng.standard_normal((q.n, q.region.size)))
    labels = rng.integers(0, q.n, q.n)
    Y = np.array([X[labels == k].mean(axis=0) for k in labels])
    if rng.random() < 0.5:
        Y = Y + 10.0 ** rng.uniform(-12, 0) * (float(np.abs(X).max()) or 1.0) * rng.standard_normal(X.shape)

    def body() -> Outcome:
        found = asked(lambda: oa.compression_bound(q.ours, X, Y, p=q.p))
        with digits():
            w = masses(np.ones(q.n))
            true = distance(*(exact_image(q.map, exact(Z), w) for Z in (X, Y)), q.p)
            faults = [
                f"{part} {getattr(found, part)!r}, exact {mp.nstr(true, 15)}"
                for part, above in (("value", True), ("upper", True), ("lower", False))
                if (getattr(found, part) - true) * (1 if above else -1) < -NOISE
            ]
            x = q.region.points(rng.standard_normal((1, q.region.size)))
            sent = [gamma(q.map, exact(x), [0], exact(Z), w)[0] for Z in (X, Y)]
            field = asked(lambda: found.at(x))[0]
            faults += [f"at {x.tolist()}: {field!r}"] if field < norm(minus(*sent)) - NOISE else []
        return outcome(name, q.kind, faults, (q, X.tolist(), Y.tolist()))

    return attempt(name, body, q.kind, (q, X.tolist(), Y.tolist()))


def study(rng: np.random.Generator) -> Outcome:
    """The best pair of ``stability_study`` and of ``sweep``, and their lower bound."""
    name = "stability_study"
    q = problem(rng, kinds=(*SOFTMAX, "l2", "sigmoid"), any_measure=False, sizes=(2, 3), regions=("ball",))
    R = q.region.par["radius"]

    def body() -> Outcome:
        pairs = oa.samplers.uniform_ball_pairs(q.n, q.map.dim, R)
        seed = int(rng.integers(2**31))
        found = asked(lambda: oa.stability_study(q.ours, pairs, n_pairs=5, rng=seed, progress=False))
        swept = asked(lambda: oa.sweep(q.ours, n=q.n, radius=R, n_pairs=5, rng=seed % 1000, progress=False))
        claims = [(found.lower_bound().value, found.best), *((row["certified_lower"], None) for row in swept.rows())]
        faults = []
        with digits():
            true = exact_ratio(q, found.best.mu.points, found.best.nu.points, 2.0)
        if claims[0][0] > true:
            faults.append(f"{claims[0][0]!r} above the ratio {mp.nstr(true, 15)} of its pair")
        uppers = [b.value for b in oa.bounds.table(q.ours, domain=q.region.domain, n=q.n) if b.kind == "upper"]
        faults += [f"certified {value!r} above the bound {min(uppers)!r}" for value, _ in claims if value > min(uppers)]
        return outcome(name, q.kind, faults, (q, seed), len(claims))

    return attempt(name, body, q.kind, q)


def runge_kutta(q, X, w, times):
    """Tokens along ``x' = Gamma(x)`` at the times, ``(T, n, d)``."""
    out, h = [X], times[-1] / STEPS

    def velocity(Z):
        return image(q.map, Z[None], w[None])[0]

    for k in range(STEPS):
        a = velocity(X)
        b = velocity(X + h / 2 * a)
        c = velocity(X + h / 2 * b)
        X = X + h / 6 * (a + 2 * b + 2 * c + velocity(X + h * c))
        if (k + 1) % (STEPS // (len(times) - 1)) == 0:
            out.append(X)
    return np.array(out)


def flows(rng: np.random.Generator) -> Outcome:
    """Gronwall's bounds and the radius bound along flows of our own integrator."""
    name, heads = "flow_stability", bool(rng.random() < 0.3)
    kinds = (*SOFTMAX, "l2", "sigmoid") if heads else (*SOFTMAX, "l2", "sigmoid", "rotary")
    q = problem(rng, kinds=kinds, heads=heads, masked=None, any_measure=False, sizes=(1, 2, 3), square=True)
    X = q.region.points(rng.standard_normal((q.n, q.region.size)))
    X = X / max(float(np.abs(X).max()), 1e-9)
    Y = X + 0.3 * rng.standard_normal(X.shape)
    speed = max(np.linalg.norm(image(q.map, Z[None], np.full((1, q.n), 1.0 / q.n))[0]) for Z in (X, Y))
    times = np.linspace(0, min(1.0, 1.0 / max(speed, 1e-9)), 5)

    def body() -> Outcome:
        found = asked(lambda: oa.flow_stability(q.ours, X, Y, t_span=(0.0, times[-1]), t_eval=times, p=2))
        w = np.full(q.n, 1.0 / q.n)
        tracks = [runge_kutta(q, Z, w, times) for Z in (X, Y)]
        faults = []
        radii = np.linalg.norm(np.array(tracks), axis=-1).max((0, 2))
        far = np.array([float_distance(a, b, 2.0, q.map.ordered) for a, b in zip(*tracks, strict=True)])
        for key, bound in found.log_bounds.items():
            worst = float((np.log(far / far[0]) - bound).max())
            if worst > 1e-6:
                faults.append(f"{key} is exceeded by {worst:.3g} in the logarithm")
        if found.radius_bounds is not None:
            caps = asked(lambda: oa.flow_radius_bound(q.ours, float(radii[0]), times))
            if not (radii <= caps * (1 + 1e-9)).all() or not (found.radius_bounds >= radii * (1 - 1e-9)).all():
                faults.append(f"radii {radii.tolist()} against {caps.tolist()}")
        return outcome(name, q.kind, faults, (q, X.tolist(), Y.tolist(), times.tolist()), 2)

    return attempt(name, body, q.kind, (q, X.tolist(), Y.tolist()))


def gaussian(rng: np.random.Generator) -> Outcome:
    """``gaussian_local_constant``: no small change of a Gaussian is stretched more (softmax, Bures-Wasserstein, exact)."""
    name, d = "gaussian_local_constant", int(rng.integers(1, 3))
    A, V = rng.standard_normal((d, d)) * 10 ** rng.uniform(-1, 0.5), rng.standard_normal((int(rng.integers(1, 3)), d))
    c, m, F = rng.standard_normal(d), rng.standard_normal(d), rng.standard_normal((d, d)) + 1.5 * np.eye(d)
    about = (A.tolist(), V.tolist(), c.tolist(), m.tolist(), F.tolist())

    def push(mean, S):
        G = mp.matrix(V) * S * mp.matrix(A)
        return mp.matrix(V) * (mean + S * (mp.matrix(A) * mean + mp.matrix(c))), G * S * G.T

    def bures(one, two):
        (a, S), (b, T) = one, two
        E, U = mp.eigsy(S)
        root = U * mp.diag([mp.sqrt(max(e, 0)) for e in E]) * U.T
        cross = mp.fsum(mp.sqrt(max(e, mp.mpf(0))) for e in mp.eigsy(root * T * root, eigvals_only=True))
        trace = mp.fsum(S[i, i] + T[i, i] for i in range(S.rows)) - 2 * cross
        return mp.sqrt(mp.fsum(x * x for x in a - b) + max(trace, 0))

    def body() -> Outcome:
        with digits():
            L, mean = mp.matrix(F), mp.matrix(m)
            g = oa.GaussianMeasure(m, np.array((L * L.T).tolist(), dtype=float))
            found = asked(lambda: gaussian_local_constant(oa.SoftmaxAttention(A, V, bias=c), g))
            S, best = mp.matrix(g.cov.tolist()), mp.mpf(0)
            L, h = mp.cholesky(S), mp.mpf(10) ** -12
            for k in range(8):
                D, u = (
                    mp.matrix((rng.standard_normal((d, w)) * s).tolist())
                    for w, s in ((d, 1.0), (1, float(rng.integers(2))))
                )
                if k == 0:  # the direction that it names
                    u, D = (
                        mp.matrix(found.witness[0].tolist()),
                        mp.matrix(found.witness[1].tolist()) * mp.matrix(_root(g.cov)) ** -1 * L,
                    )
                M = L + h * D
                other = (mean + h * u, M * M.T)
                best = max(best, bures(push(*other), push(mean, S)) / bures(other, (mean, S)))
            faults = (
                [] if best <= found.value * (1 + mp.mpf(10) ** -6) else [f"{found.value!r} below {mp.nstr(best, 12)}"]
            )
        return outcome(name, "softmax", faults, about, 8)

    return attempt(name, body, "softmax", about)


def _root(S):
    """The factor ``E diag(sqrt(s))`` that the library's tangents refer to."""
    s, E = np.linalg.eigh(S)
    return (E * np.sqrt(np.maximum(s, 0))).tolist()


def growth(rng: np.random.Generator) -> Outcome:
    """``local_growth`` and ``real_against_adversarial`` report local constants of windows."""

    name = "local_growth"
    q = problem(rng, kinds=("softmax",), any_measure=False, sizes=(4,), regions=("ball",))
    X = q.region.points(rng.standard_normal((2, 4, q.region.size)))

    def body() -> Outcome:
        found = asked(lambda: oa.local_growth([q.ours], X, n_values=(2, 4)))
        faults = []
        for i, (n, window) in enumerate(itertools.product((2, 4), (0, 1))):
            one = Problem(q.map, q.ours, q.region, None, n, 2.0)
            own = at_witness(one, measure(one, X[window, :n], np.full(n, 1.0 / n)), None, 2.0)
            value = found.values[0, window, (2, 4).index(n)]
            if abs(value - own) > 1e-7 * own + 1e-300:
                faults.append(f"{i}: {value!r}, not {own!r}")
        return outcome(name, q.kind, faults, (q, X.tolist()), 4)

    return attempt(name, body, q.kind, q)


MEASURED: dict[str, Callable[[np.random.Generator], Outcome]] = {
    "compression_bound": compressed,
    "stability_ratio": ratio,
    "stability_study": study,
    "sweep": study,
    "flow_stability": flows,
    "flow_radius_bound": flows,
    "gaussian_local_constant": gaussian,
    "local_growth": growth,
}
