"""What the psd bound says of one row, written as its proof writes it, and multipliers of every kind."""

import numpy as np

from otattn.lipschitz.upper.psd_multipliers import Multipliers


def some_multipliers(rng, count, omega, n):
    """``count`` cells of valid multipliers."""
    mu = rng.random(count) ** rng.choice([0.3, 1.0])
    nu, (t, s) = mu * rng.choice([0.0, 1.0, rng.random()]), 0.98 * rng.random((2, count))
    zeta, phi = 10 ** rng.uniform(-2, 1.5, count), omega * 10 ** rng.uniform(-2, 0.3, count)
    return Multipliers(mu, nu, 1.5 * rng.random(count), 10 ** rng.uniform(-3, 1, count) / n, t, zeta, phi, s)


def square(columns, h):
    """``z(h)``."""
    return np.minimum(1.0, columns.stretch * h**2) if np.isfinite(columns.stretch) else np.ones_like(h)


def weight(columns, p, gamma):
    """``c(p, G)`` from its definition."""
    D = (1 + columns.tau) * p + (1 + 1 / columns.tau) * (1 - p) * gamma
    return (1 + columns.eta) / (1 / (p * (1 + gamma)) + columns.eta / D)


def reach(columns, r, h, p, q, flat):
    """``a^2 h^2`` times the bound of lambda, the loss left out; ``r`` are its ends, ``flat`` bounds ``<g_i, m_i>``."""
    a, chi = columns.a, columns.chi
    most = 1 - p * (1 - square(columns, r[1])) + chi * (1 - p + chi * r[1] ** 2 / 4 - p * r[0] ** 2)
    return (a * h) ** 2 * most - np.maximum(flat - chi / 2 * (a * h**2 + np.log(p / q)), 0.0) ** 2


def term(columns, many, r, h, p, q, gap, gamma):
    """The logarithm of a term without the own share."""
    a, omega, (t0, g, t1) = columns.a, columns.omega, columns.split
    mu, nu, sigma, _, t, zeta, phi, s = (getattr(many, key) for key in Multipliers.names())
    left = np.maximum(phi - nu * (s - t), 0.0)
    kappa = mu - nu * t - phi + left
    split = (t0 * (1 - h) ** g + t1) * np.minimum(gamma / (a * h) ** 2, 1.0) ** columns.power
    value = np.log(weight(columns, p, gamma / (1 + omega * a * h**2))) + np.log(1 + split)
    value = value + mu * (np.log1p(-p) - np.log(p)) + (mu - 2 * kappa * sigma) * (a * h**2 + np.log(p) - np.log(q))
    value = value + (left - nu * t) * a * h**2 + kappa * a * sigma**2 * r**2
    short = 1 - square(columns, h) + columns.chi * (1 + h**2 + np.log(p / q) / a)
    value = value + nu * (np.log1p(zeta * gap) - np.log1p(zeta * np.maximum(short, 0.0)))
    value = value - nu / 2 * ((columns.d - 1) * np.log1p(-(t**2)) + np.log1p(-(s**2)))
    return value + np.log(omega / phi) + phi / omega - 1
