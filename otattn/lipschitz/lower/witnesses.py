r"""Configurations of n tokens with a large local constant: published ones, two anchors, the field's and the self block's.

All are built in the latents of a chart, for any A, V and bias; ``x = E z`` are the tokens that the heads see. They
are witnesses and starts of an ascent, never certificates: what counts is the local constant evaluated at them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from otattn._linalg import Array
from otattn.attention.head import Head
from otattn.lipschitz.lower.ascent import Candidates, lbfgs
from otattn.lipschitz.lower.charts import Chart, tangent
from otattn.lipschitz.lower.problem import Problem
from otattn.lipschitz.lower.singular import unit


def _boundary(chart: Chart, y: Array) -> Array:
    """Latents on the boundary whose image points along ``y (m, r)``."""
    return _outermost(chart, y @ np.linalg.pinv(chart.E).T)


def _outermost(chart: Chart, z: Array) -> Array:
    """Latents on the boundary, in the directions of ``z``."""
    return np.asarray(z / np.maximum(chart.size(z), 1e-300)[..., None])


def _counts(n: int, *parts: int) -> Array:
    """Log-counts of one configuration: the parts, and the rest of the n tokens."""
    return np.log(np.array([[*parts, n - sum(parts)]], dtype=np.float64))


def _real_eigenvectors(A: Array) -> tuple[Array, Array]:
    """Real eigenvalues (ascending) with unit eigenvectors as rows; those of the symmetric part when A has none."""
    values, vectors = np.linalg.eig(A)
    real = np.abs(values.imag) <= 1e-10 * max(1e-300, float(np.abs(values).max()))
    if not real.any():
        values, vectors = np.linalg.eigh(0.5 * (A + A.T))
        real = np.ones(len(values), dtype=bool)
    order = np.argsort(values[real].real, kind="stable")
    return values[real].real[order], unit(vectors[:, real].real.T[order])[0]


def castin_antipodal(problem: Problem, form: Head) -> Candidates:
    """``(Ru, -Ru, ..., -Ru)`` with u the eigenvector of the least real eigenvalue of A [CAP24]; n >= 2."""
    u = _boundary(problem.chart, _real_eigenvectors(form.A)[1][:1])
    return Candidates(np.stack([u, -u], axis=1), _counts(problem.tokens, 1))


def castin_half(problem: Problem, form: Head) -> Candidates:
    """``(Ru, Ru/2, ..., Ru/2)`` with u the eigenvector of the largest real eigenvalue of A [CAP24]; n >= 2."""
    u = _boundary(problem.chart, _real_eigenvectors(form.A)[1][-1:])
    return Candidates(np.stack([u, problem.chart.clip(0.5 * u)], axis=1), _counts(problem.tokens, 1))


def directions(chart: Chart, forms: tuple[Head, ...], rng: np.random.Generator, count: int) -> Array:
    """Latents on the boundary: singular vectors of A, eigenvectors of its symmetric part, of V, mixtures, random ones.

    The signs of the structured ones are drawn, so that they are not all on one side.
    """
    rows = []
    for f in forms:
        U, _, Wt = np.linalg.svd(chart.E.T @ f.A @ chart.E)
        Q = np.linalg.eigh(chart.E.T @ (f.A + f.A.T) @ chart.E)[1].T
        T = np.linalg.svd(f.V @ chart.E, full_matrices=False)[2]
        lead = slice(0, max(2, count // (6 * len(forms))))
        rows += [Wt[lead], U.T[lead], Q[:1], Q[-1:], T[lead]]
        rows += [Wt[:1] + Q[:1], Wt[:1] - Q[:1], Wt[:1] + U.T[:1]]
    fixed = np.concatenate(rows)[: max(1, 2 * count // 3)]
    fixed = fixed * rng.choice([-1.0, 1.0], size=(len(fixed), 1))
    free = rng.standard_normal((max(0, count - len(fixed)), chart.latent_dim))
    # half of the random ones lean towards a structured one
    lean = np.arange(len(free)) % 2 == 0
    free[lean] = 0.6 * free[lean] / np.sqrt(chart.latent_dim) + fixed[rng.integers(len(fixed), size=int(lean.sum()))]
    z = np.concatenate([fixed, free])
    size = chart.size(z)
    z[size < 1e-12] = np.eye(chart.latent_dim)[0]
    return np.asarray(z / np.where(size < 1e-12, 1.0, size)[:, None])


def maximise_latent(
    value: Callable[[Array], Array], chart: Chart, starts: Array, rng: np.random.Generator, *, keep: int
) -> tuple[Array, Array]:
    """The ``keep`` best local maximisers ``(keep, k)`` of a batched function on the latents, with their values.

    Random steps that shrink, then L-BFGS with central differences where the latents are few.
    """
    z, f = starts, value(starts)
    for step in range(12):
        trial = chart.clip(z + 0.5 * 0.75**step * rng.standard_normal(z.shape) / np.sqrt(z.shape[1]))
        new = value(trial)
        better = new > f
        z, f = np.where(better[:, None], trial, z), np.where(better, new, f)
    order = np.argsort(-f, kind="stable")[:keep]
    z, f = z[order], f[order]
    k = z.shape[1]
    if k > 16:
        return z, f

    def objective(omega: Array) -> tuple[Array, Array]:
        h = 1e-6
        E = np.concatenate([np.zeros((1, k)), h * np.eye(k), -h * np.eye(k)])
        all_values = value(chart.latents((omega[:, None, :] + E).reshape(-1, k))).reshape(len(omega), 2 * k + 1)
        return -all_values[:, 0], -(all_values[:, 1 : k + 1] - all_values[:, k + 1 :]) / (2.0 * h)

    omega, g = lbfgs(objective, chart.parameters(z, margin=1e-6), steps=25)
    polished = chart.latents(omega)
    better = -g > f
    z, f = np.where(better[:, None], polished, z), np.where(better, -g, f)
    order = np.argsort(-f, kind="stable")
    return z[order], f[order]


def _anchor_geometry(problem: Problem, form: Head, z: Array) -> tuple[Array, Array, Array, Array, Array]:
    """``|g|``, the unit latent of the best key, its logit, the logit of z itself, and the best ``u`` across it."""
    chart = problem.chart
    g = problem.queries(form, z)
    h = g @ chart.E
    unit_h, top = unit(h)
    W = form.V @ chart.E
    across = W[None] - (unit_h @ W.T)[:, :, None] * unit_h[:, None, :]
    turned = np.swapaxes(across, 1, 2)
    if W.shape[0] < W.shape[1]:
        left = np.linalg.eigh(across @ turned)[1][:, :, -1]
        u = (turned @ left[:, :, None])[:, :, 0]
    else:
        u = np.linalg.eigh(turned @ across)[1][:, :, -1]
    u, size = unit(tangent(unit(u)[0], unit_h))
    u = np.where(size[:, None] > 1e-9, u, 0.0)
    return np.linalg.norm(g, axis=1), unit_h, top, np.sum(h * z, axis=1), u


def _leading(problem: Problem, form: Head, z: Array) -> Array:
    """The leading constant of two anchors across ``g(z)``, times R^2."""
    norm, _, top, own, u = _anchor_geometry(problem, form, z)
    share = np.clip(own, 0.0, None) / np.maximum(top, 1e-300)
    spread = np.sqrt(np.clip(1.0 - share**2, 0.0, None))
    return np.asarray(norm * spread * np.linalg.norm(u @ (form.V @ problem.chart.E).T, axis=1) / np.sqrt(2.0))


def two_anchor_constant(
    problem: Problem, form: Head, rng: np.random.Generator, *, starts: int = 96, keep: int = 6
) -> tuple[float, Array]:
    r"""The leading constant ``c*(A, V) R^2`` of two anchors and the latents ``(keep, k)`` of its best cluster positions.

    .. math:: c^* = \frac1{\sqrt2} \max_{|z| \le 1} \sqrt{|Az|^2 - \langle Az, z\rangle_+^2 / 1}\;
              \max_{u \perp Az, |u| = 1} |V u|

    up to the scale of the domain. Zero in dimension 1, where nothing is orthogonal to ``A z``.
    """
    chart = problem.chart
    if chart.latent_dim == 1:
        return 0.0, chart.clip(np.ones((1, 1)))
    z = directions(chart, (form,), rng, starts if chart.latent_dim <= 32 else starts // 3)
    z = np.concatenate([z, chart.sample((len(z) // 2,), rng)])
    best, values = maximise_latent(lambda y: _leading(problem, form, y), chart, chart.clip(z), rng, keep=keep)
    return float(values[0]), best


def two_anchor(problem: Problem, form: Head, rng: np.random.Generator, *, keep: int = 6) -> Candidates | None:
    r"""A cluster of ``n - 2`` tokens and two anchors across its gradient, the logit margin scanned.

    The anchors sit at latents ``h g +- sqrt(1 - h^2) u``, with h such that their logit exceeds the cluster's own by
    ``log n`` plus a margin. None when n < 3 or d = 1 or the leading constant is zero.
    """
    n, chart = problem.tokens, problem.chart
    if n < 3 or chart.latent_dim == 1:
        return None
    leading, z = two_anchor_constant(problem, form, rng, keep=keep)
    if not leading > 0.0:
        return None
    scales = np.array([1.0]) if chart.kind == "sphere" else np.array([1.0, 0.85, 0.65, 0.45, 0.25])
    margins = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0])
    zs = (scales[:, None, None] * z[None]).reshape(-1, chart.latent_dim)
    _, along, top, own, u = _anchor_geometry(problem, form, zs)
    logit = own[:, None] + np.log(n / 2.0) + margins
    h = np.clip(logit, 0.0, None) / np.maximum(top, 1e-300)[:, None]
    i, j = np.nonzero(h < 0.999)
    if not len(i):
        return None
    along, across = h[i, j, None] * along[i], np.sqrt(1.0 - h[i, j, None] ** 2) * u[i]
    latents = chart.clip(np.stack([along + across, along - across, zs[i]], axis=1))
    return Candidates(latents, np.repeat(_counts(n, 1, 1), len(i), axis=0))


def field_direction(problem: Problem, form: Head, rng: np.random.Generator) -> tuple[float, Array]:
    """``sigma = max |V E u| |A^T E u|`` over unit u, from below, with its maximiser ``(k,)``."""
    chart = problem.chart
    W, B = form.V @ chart.E, form.A.T @ chart.E
    wv, wb = np.linalg.norm(W, 2), np.linalg.norm(B, 2)
    if wv == 0.0 or wb == 0.0:
        return 0.0, np.eye(chart.latent_dim)[0]
    # squares of small values vanish
    W, B = W / wv, B / wb
    GW, GB = W.T @ W, B.T @ B
    mixtures = np.linspace(0.02, 0.98, 33 if chart.latent_dim <= 64 else 7)
    starts = [np.linalg.eigh(t * GW + (1.0 - t) * GB)[1][:, -1] for t in mixtures]
    u = unit(np.concatenate([np.array(starts), rng.standard_normal((16, chart.latent_dim))]))[0]
    for _ in range(200):
        # the stationarity condition as a fixed point; a minorise-maximise step for log |Wu|^2 + log |Bu|^2
        a, b = np.sum((u @ GW) * u, axis=1), np.sum((u @ GB) * u, axis=1)
        u = unit((u @ GW) / np.maximum(a, 1e-300)[:, None] + (u @ GB) / np.maximum(b, 1e-300)[:, None])[0]
    value = np.linalg.norm(u @ W.T, axis=1) * np.linalg.norm(u @ B.T, axis=1)
    best = int(value.argmax())
    return float(value[best] * wv * wb), u[best]


def field_query(problem: Problem, form: Head, u: Array) -> Array:
    """Latents ``(k,)`` near the centre with ``<g(E z), E u>`` as small as the domain allows, z orthogonal to u first."""
    E = problem.chart.E
    slope = E.T @ form.A.T @ E @ u
    size = float(slope @ slope)
    z = np.zeros(len(slope)) if size == 0.0 else -float(form.c @ E @ u) * slope / size
    rest = 1.0 - float(z @ z)
    if problem.chart.kind != "sphere":
        return z
    # a unit vector: orthogonal to the slope but for z, or the one nearest to a solution of the affine condition
    return np.asarray(z + np.sqrt(rest) * np.linalg.svd(slope[None])[2][-1] if rest > 0.0 else z / np.linalg.norm(z))


def field_atoms(problem: Problem, form: Head, rng: np.random.Generator) -> Candidates | None:
    """Half the tokens at ``E u``, half at ``-E u``, one and two at a query that sees both equally; None for n < 4."""
    n, chart = problem.tokens, problem.chart
    if n < 4:
        return None
    u = field_direction(problem, form, rng)[1]
    u = _boundary(chart, (chart.E @ u)[None])[0]
    atoms = np.stack([u, -u, chart.clip(field_query(problem, form, u))])
    counts = [_counts(n, (n - k) // 2, n - k - (n - k) // 2) for k in (1, 2)]
    return Candidates(np.stack([atoms, atoms]), np.concatenate(counts))


def opposed(chart: Chart, forms: tuple[Head, ...], rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Latents on the boundary, and for each one opposite it or elsewhere."""
    z = directions(chart, forms, rng, count)
    return z, np.where(np.arange(len(z))[:, None] % 3 < 2, -z, directions(chart, forms, rng, count)[: len(z)])


def self_block(problem: Problem, rng: np.random.Generator, *, count: int = 24) -> Candidates:
    """One token (or a few) against a cluster of the others, at scanned norms; n >= 2."""
    n, chart = problem.tokens, problem.chart
    z, other = opposed(chart, problem.forms, rng, count)
    scales = [(1.0, 1.0)]
    if chart.kind != "sphere":
        scales += [(0.7, 1.0), (1.0, 0.5), (0.4, 0.7), (0.0, 1.0), (1.0, 0.0)]
    latents = np.concatenate([np.stack([a * z, b * other], axis=1) for a, b in scales])
    few = sorted({1, min(2, n - 1), max(1, round(n**0.5)), max(1, n // 4), max(1, n // 2)})
    counts = np.concatenate([_counts(n, k) for k in few])
    return Candidates(chart.clip(latents), counts[np.arange(len(latents)) % len(counts)])


def polyhedra(chart: Chart) -> list[Candidates]:
    """Equal atoms on the boundary: regular triangles, tetrahedra, and prisms over triangles of ever smaller height.

    Under repulsion (Sinkhorn attention, ``A = -alpha I``) a token of a prism sees four others, over which its displacement decides.
    """
    angles = 2.0 * np.pi * np.arange(3) / 3.0
    flat = np.stack([np.cos(angles), np.sin(angles), 0.0 * angles], axis=1)
    corners = np.array([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    prisms = [np.concatenate([flat + [0.0, 0.0, h], flat - [0.0, 0.0, h]]) for h in (0.06, 0.1, 0.2, 0.32, 0.45)]
    dim = chart.latent_dim
    shapes = [flat, corners, *prisms] if dim >= 3 else [flat[:, :2]] if dim == 2 else []
    # two frames, always the same
    frames = np.linalg.qr(np.random.default_rng(0).standard_normal((2, dim, min(dim, 3))))[0]
    turned = [x @ np.swapaxes(frames, 1, 2) for x in shapes]
    return [Candidates(_outermost(chart, z), np.zeros(z.shape[:2])) for z in turned]


def random_tokens(chart: Chart, n: int, c: int, count: int, rng: np.random.Generator) -> Candidates:
    """``count`` random configurations of c atoms: few tokens at all atoms but the last, or random shares."""
    latents = chart.sample((count, c), rng)
    logs = np.zeros((count, c))
    logs[:, -1] = np.log(max(1, n - c + 1))
    spread = np.arange(count) % 2 == 1
    logs[spread] += rng.standard_normal((int(spread.sum()), c)) * min(3.0, np.log(n))
    return Candidates(latents, logs)
