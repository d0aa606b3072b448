r"""Gronwall's inequality for flows of attention: how far supports spread, and how far two flows drift apart.

If ``|| Gamma_mu(X) - Gamma_nu(Y) ||_{L^p} <= L(R, t) || X - Y ||_{L^p}`` for every coupling of measures in the ball of radius R
(all bounds of :func:`otattn.bounds.table` are of this kind; for n equal atoms, for every matching), then along two flows with
supports in balls of radius R(t)

    ``W_p(mu_t, nu_t) <= W_p(mu_0, nu_0) exp( int_0^t L(R(s), s) ds )``.

Proof: carry an optimal coupling of the initial measures along both flows; ``d/dt || X - Y ||_{L^p} <= L || X - Y ||_{L^p}``, and
the carried coupling bounds ``W_p`` from above. Under a mask the coupling keeps times, and the distance is the conditional one.

Weights of mass at most one give ``|Gamma(x)| <= v R + b`` (``v = ||V||``, b the norm of the biases), so ``R(t) <= R_0 e^{vt} + b
(e^{vt} - 1) / v``; with parameters that depend on time, part by part.

The integral is bounded by an upper sum: L grows with R, and R is bounded by its value at the right end of each part. Parameters
that depend on time are asked at the ends of the parts, and the larger of both ends stands for the part: a bound where v, b and L
are monotone on each part or constant inside it, and no proof where they oscillate between the ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array, spectral_norm_upper
from otattn.attention import AttentionMap
from otattn.dynamics.velocity import Field, layer_at
from otattn.lipschitz.table import table
from otattn.lipschitz.theorem import THEOREMS

__all__ = ["flow_radius_bound", "gronwall"]

SUBSTEPS = 8
"""Parts of each interval of time in the upper sums."""
LARGEST_RADIUS = 1e120


def flow_radius_bound(attention: Field, radius: float, t: ArrayLike, *, start: float = 0.0) -> Array:
    """Support radius that a flow of a normalised kernel cannot exceed, ``R_0 e^{vt} + b (e^{vt} - 1) / v``.

    Parameters
    ----------
    attention : AttentionMap or callable t -> AttentionMap
        Built of heads whose weights sum to at most one: softmax, L2, Sinkhorn, sigmoid or rotary attention, several such
        heads, masked or not, residual layers of them. A callable is asked at 8 times between two of ``t`` that follow each other,
        and the larger of two neighbouring v and b is taken: a bound where they are monotone in between.
    radius : float
        Initial support radius ``R_0``.
    t : array_like
        Times from the start, non-negative.
    start : float
        The time at which the flow starts, for callables.

    Raises
    ------
    ValueError
        The kernel is not normalised: nothing bounds the radius beforehand; or a time is negative or not finite.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> flow_radius_bound(SoftmaxAttention([[5.0]], [[-2.0]]), 1.0, [0.0, 0.5]).round(4)
    array([1.    , 2.7183])
    >>> flow_radius_bound(lambda t: SoftmaxAttention([[5.0]], [[1.0 + t]]), 1.0, [1.0]).round(4)   # e^{3/2} = 4.4817
    array([4.7707])
    """
    at = check.as_float_array(t, "t")
    if at.size and at.min() < 0:
        raise ValueError(f"t must be non-negative, received {at.min():g}; count it from the start.")
    R = check.positive(radius, "radius", zero=True)
    start = float(check.as_float_array(start, "start", ndim=0))
    rate = _rate(layer_at(attention, start))
    if rate is None:
        raise _unbounded(layer_at(attention, start))
    if isinstance(attention, AttentionMap):
        return np.asarray(_grown(R, rate, at) * (1.0 + 1e-14))
    times = np.union1d([0.0], at.ravel())
    path = _Path(attention, times + start)
    if any(r is None for r in path.rates):
        raise _unbounded(next(f for f, r in zip(path.layers, path.rates, strict=True) if r is None))
    ends = np.concatenate([[R], path.radii(R)[:, -1]]) if len(times) > 1 else np.array([R])
    return np.asarray(ends[np.searchsorted(times, at)])


def _unbounded(attention: AttentionMap) -> ValueError:
    return ValueError(
        f"attention must have a normalised kernel for flow_radius_bound, received {type(attention).__name__}; unnormalised "
        "ones may blow up (flow reports the time)."
    )


def _grown(R: float | Array, rate: tuple[float, float], t: float | Array) -> Array:
    """``R e^{vt} + b (e^{vt} - 1) / v``."""
    v, b = rate
    with np.errstate(over="ignore"):
        drift = b * (np.expm1(v * t) / v if v > 0 else t) if b > 0 else np.zeros_like(t)
        return np.asarray(R * np.exp(v * t) + drift)


def _rate(attention: AttentionMap) -> tuple[float, float] | None:
    """``v`` and ``b`` with ``|Gamma(x)| <= v R + b``, or None."""
    drift = attention.drift
    terms = drift.map.values()
    if terms is None or drift.skip or any(term.mass == "any" for term in terms):
        return None
    scale = abs(drift.scale)
    v = sum(spectral_norm_upper(term.V) for term in terms)
    return scale * v, scale * sum(float(np.linalg.norm(term.bias)) for term in terms if term.bias is not None)


@dataclass(frozen=True)
class _Path:
    """A map along times ``(T,)``: every interval in parts, each with the maps at its two ends."""

    attention: Field
    times: Array

    @cached_property
    def layers(self) -> tuple[AttentionMap, ...]:
        """The maps at the ends of all parts; one where they do not depend on time."""
        if isinstance(self.attention, AttentionMap):
            return (self.attention,)
        shares = np.arange(SUBSTEPS) / SUBSTEPS
        nodes = (self.times[:-1, None] + np.diff(self.times)[:, None] * shares).ravel()
        return tuple(layer_at(self.attention, float(t)) for t in np.append(nodes, self.times[-1]))

    @cached_property
    def rates(self) -> tuple[tuple[float, float] | None, ...]:
        """``v`` and ``b`` of each, None where the kernel is not normalised."""
        return tuple(_rate(layer) for layer in self.layers)

    @property
    def width(self) -> Array:
        """Lengths of the parts ``(T - 1, parts)``."""
        return np.repeat(np.diff(self.times)[:, None] / SUBSTEPS, SUBSTEPS, axis=1)

    @property
    def bounded(self) -> bool:
        """Something bounds the radius beforehand."""
        return all(r is not None for r in self.rates)

    def ends(self, part: int) -> tuple[AttentionMap, ...]:
        """The maps at the ends of a part."""
        return self.layers if len(self.layers) == 1 else self.layers[part : part + 2]

    def radii(self, first: float, anew: Array | None = None) -> Array:
        """Radii at the right ends of the parts ``(T - 1, parts)``, from ``first``; ``anew (T,)`` caps those where intervals start."""
        out, R = np.empty(self.width.shape), first
        for k, row in enumerate(self.width):
            R = R if anew is None else min(R, float(anew[k]))
            for j, length in enumerate(row):
                part = k * SUBSTEPS + j
                ends = self.rates if len(self.rates) == 1 else self.rates[part : part + 2]
                pairs = [r for r in ends if r is not None]
                rate = max(v for v, _ in pairs), max(b for _, b in pairs)
                R = out[k, j] = float(_grown(R, rate, float(length))) * (1.0 + 1e-14)
        return out


def gronwall(
    attention: Field, times: Array, radii: Array, n: int | None, p: float
) -> tuple[dict[str, Array], Array | None]:
    """``int L(R(s), s) ds`` up to every time, by name, and the radii that are allowed beforehand."""
    path = _Path(attention, times)
    out: dict[str, Array] = {}
    caps = prior = None
    if path.bounded:
        prior = path.radii(float(radii[0]))
        caps = np.concatenate([radii[:1], prior[:, -1]])
        # from each measured radius on, with the same growth
        posterior = np.minimum(path.radii(math.inf, radii * (1.0 + 1e-6)), prior)
    else:
        posterior = np.broadcast_to(np.maximum(radii[:-1], radii[1:])[:, None], path.width.shape)
    jobs: list[tuple[Array, tuple[str, ...]]] = [(posterior, ("ours, radius along the flow",))]
    if prior is not None:
        jobs.append((prior, ("ours", "published")))
    for R, names in jobs:
        both = [_log_constants(path.ends(m), float(r), n, p) for m, r in enumerate(R.ravel())]
        for k, name in enumerate(names):
            logs = [pair[k] for pair in both]
            if any(v is None for v in logs):
                continue
            with np.errstate(over="ignore"):
                steps = np.exp(np.reshape(np.array(logs, dtype=np.float64), R.shape)) * path.width
                out[name] = check.frozen(np.concatenate([[0.0], np.cumsum(steps.sum(axis=1))]) * (1.0 + 1e-12))
    return out, caps


def _log_constants(
    ends: tuple[AttentionMap, ...], R: float, n: int | None, p: float
) -> tuple[float | None, float | None]:
    """Logarithms of the least upper bound of all theorems and of the published ones; the larger of two ends."""
    pairs = [_log_constant(attention, R, n, p) for attention in ends]
    best, published = zip(*pairs, strict=True)
    return (None if None in best else max(best)), (None if None in published else max(published))


def _log_constant(attention: AttentionMap, R: float, n: int | None, p: float) -> tuple[float | None, float | None]:
    """Logarithms of the least upper bound of the constant on the ball, and of the published ones; None where there is none."""
    if R > LARGEST_RADIUS:
        return math.inf, math.inf
    inner, scale, _ = attention.drift
    bounds = [b for b in table(inner, radius=max(R, 1e-150), n=n, p=p) if b.kind == "upper"]
    factor = math.log(abs(scale)) if scale else -math.inf
    published = [b.log_value for b in bounds if THEOREMS[b.theorem].published]
    best = min((b.log_value for b in bounds), default=None)
    return None if best is None else best + factor, min(published) + factor if published else None
