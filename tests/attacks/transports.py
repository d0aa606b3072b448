"""Attacks on certified distances: all permutations, in exact arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mpmath as mp
import numpy as np
from exact import digits, distance, exact
from outcomes import NOISE, Outcome, asked, attempt, outcome

import otattn as oa

ORDERS = (1.0, 1.5, 2.0, 3.0, 8.0, np.inf)
DISTANCE = 1e-9
"""Documented relative accuracy of plain distances."""


def clouds(rng, most: int = 5):
    """Two clouds of n equal atoms: far apart, close, with common atoms, on a line, far from the origin."""
    n, d = int(rng.integers(1, most + 1)), int(rng.integers(1, 4))
    X = rng.standard_normal((n, d)) * 10 ** rng.uniform(-3, 3)
    Y = (
        X + rng.standard_normal((n, d)) * 10 ** rng.uniform(-9, 1)
        if rng.random() < 0.5
        else rng.standard_normal((n, d))
    )
    if rng.random() < 0.3:
        Y[0] = X[0]
    if rng.random() < 0.3:
        shift = rng.standard_normal(d) * 10 ** rng.uniform(0, 6)
        X, Y = X + shift, Y + shift
    return X, Y


def merged(rng, X):
    """The same measure with equal atoms as one: weights that are multiples of ``1/n``."""
    n = len(X)
    counts = np.bincount(rng.integers(0, n, n), minlength=n)
    keep = counts > 0
    return X[keep], counts[keep] / n, np.repeat(X[keep], counts[keep], axis=0)


def transport(rng: np.random.Generator) -> Outcome:
    """``lower <= W_p <= upper`` of transport, and the plain distance, against all permutations in 100 digits."""
    (X, Y), p = clouds(rng), float(rng.choice(ORDERS))
    wx, full = None, X
    if rng.random() < 0.4:
        X, wx, full = merged(rng, X)
    about, name = (X.tolist(), wx, Y.tolist(), p), "transport"

    def body() -> Outcome:
        mu = oa.DiscreteMeasure(X, wx)
        found, plain = asked(lambda: oa.transport(mu, Y, p=p)), asked(lambda: oa.wasserstein(mu, Y, p=p))
        with digits():
            true = distance(exact(full), exact(Y), p)
            # weights k/n are rounded when they are stored: the measure differs by that much
            slack = mp.mpf(4e-16) if wx is not None else 0
            faults = []
            if not found.lower <= true * (1 + slack) + NOISE:
                faults.append(f"lower {found.lower!r} above {mp.nstr(true, 20)}")
            if not found.upper >= true * (1 - slack) - NOISE:
                faults.append(f"upper {found.upper!r} below {mp.nstr(true, 20)}")
            if abs(plain - true) > DISTANCE * true + NOISE:
                faults.append(f"wasserstein {plain!r}, not {mp.nstr(true, 20)}")
        return outcome(name, f"p={p:g}", faults, about)

    return attempt(name, body, f"p={p:g}", about)


def conditional(rng: np.random.Generator) -> Outcome:
    """The same slice by slice for space-time measures."""
    name, p, slices = "conditional_transport", float(rng.choice(ORDERS)), int(rng.integers(1, 4))
    m, d = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    times = np.repeat(np.arange(1, slices + 1) / slices, m)
    X = rng.standard_normal((slices * m, d)) * 10 ** rng.uniform(-2, 2)
    Y = X + rng.standard_normal(X.shape) * 10 ** rng.uniform(-8, 1)
    about = (times.tolist(), X.tolist(), Y.tolist(), p)

    def body() -> Outcome:
        mu, nu = oa.SpaceTimeMeasure(times, X), oa.SpaceTimeMeasure(times, Y)
        found = asked(lambda: oa.conditional_transport(mu, nu, p=p))
        plain = asked(lambda: oa.conditional_wasserstein(mu, nu, p=p))
        with digits():
            parts = [distance(exact(X[i : i + m]), exact(Y[i : i + m]), p) for i in range(0, slices * m, m)]
            true = max(parts) if np.isinf(p) else (mp.fsum(a ** mp.mpf(p) for a in parts) / slices) ** (1 / mp.mpf(p))
            faults = (
                []
                if found.lower <= true * (1 + mp.mpf(4e-16)) + NOISE
                else [f"lower {found.lower!r} above {mp.nstr(true, 20)}"]
            )
            if not found.upper >= true * (1 - mp.mpf(4e-16)) - NOISE:
                faults.append(f"upper {found.upper!r} below {mp.nstr(true, 20)}")
            if abs(plain - true) > DISTANCE * true + NOISE:
                faults.append(f"conditional_wasserstein {plain!r}, not {mp.nstr(true, 20)}")
        return outcome(name, f"p={p:g}", faults, about)

    return attempt(name, body, f"p={p:g}", about)


def from_cost(rng: np.random.Generator) -> Outcome:
    """``transport_from_cost`` for costs of any sign and spread."""
    name, n = "transport_from_cost", int(rng.integers(1, 6))
    C = rng.standard_normal((n, n)) * 10 ** (rng.uniform(-8, 8) if rng.random() < 0.5 else rng.uniform(-8, 8, (n, n)))

    def body() -> Outcome:
        found = asked(lambda: oa.transport_from_cost(np.full(n, 1.0 / n), np.full(n, 1.0 / n), C))
        with digits():
            true = min(mp.fsum(mp.mpf(C[i, s[i]]) for i in range(n)) for s in itertools.permutations(range(n))) / n
            slack = mp.mpf(4e-16) * mp.mpf(np.abs(C).max())  # of the weights 1/n
            faults = [] if found.lower <= true + slack else [f"lower {found.lower!r} above {mp.nstr(true, 20)}"]
            if not found.upper >= true - slack:
                faults.append(f"upper {found.upper!r} below {mp.nstr(true, 20)}")
        return outcome(name, "costs", faults, C.tolist())

    return attempt(name, body, "costs", C.tolist())


TRANSPORTS: dict[str, Callable[[np.random.Generator], Outcome]] = {
    "transport": transport,
    "wasserstein": transport,
    "conditional_transport": conditional,
    "conditional_wasserstein": conditional,
    "transport_from_cost": from_cost,
}
