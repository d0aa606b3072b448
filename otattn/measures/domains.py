"""Domains in which tokens live: balls, ellipsoids, LayerNorm spheres, boxes, finite sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import norm_upper, product_error, spectral_norm_upper

__all__ = ["Ball", "Box", "Domain", "Ellipsoid", "LayerNormDomain", "PointSet"]

_EPS = float(np.finfo(np.float64).eps)
_FAR = 1e100
"""Points further than this many half axes count as at this distance in projections."""


class Domain(Saved, ABC):
    """A compact set of R^d that holds the tokens."""

    @property
    @abstractmethod
    def dim(self) -> int | None:
        """Dimension d (None when the domain exists in every dimension)."""

    @abstractmethod
    def project(self, x: ArrayLike) -> NDArray[np.float64]:
        """A map of the rows of ``x (m, d)`` into the domain that leaves its points where they are."""

    @abstractmethod
    def max_affine_norm(self, A: ArrayLike, c: ArrayLike | None = None) -> float:
        """An upper bound of ``max |A x + c|`` over the domain, rounded outward."""

    @abstractmethod
    def sample(self, n: int, rng: np.random.Generator | int) -> NDArray[np.float64]:
        """``n`` random points ``(n, d)``."""

    @property
    def max_norm(self) -> float:
        """Largest norm of a point, the radius R of the smallest centred ball around the domain (outward)."""
        if self.dim is None:
            raise ValueError("max_norm needs a dimension; give the domain one.")
        return self.max_affine_norm(np.eye(self.dim))

    def contains(self, x: ArrayLike, *, tol: float = 1e-9) -> bool:
        """True when every row of ``x`` lies within ``tol`` (relative to the domain's size) of the domain."""
        y = check.points(x, "x", dim=self.dim)
        gap = np.linalg.norm(self.project(y) - y, axis=1).max()
        return bool(gap <= tol * max(1e-300, self.max_norm))


@dataclass(frozen=True, init=False)
class Ball(Domain):
    """The Euclidean ball ``{|x| <= radius}`` centred at 0, in any dimension unless ``dim`` is given."""

    radius: float
    dim_: int | None

    def __init__(self, radius: float, dim: int | None = None) -> None:
        object.__setattr__(self, "radius", check.positive(radius, "radius", limit=check.LARGEST))
        object.__setattr__(self, "dim_", None if dim is None else check.count(dim, "dim"))

    @property
    def dim(self) -> int | None:
        return self.dim_

    @property
    def max_norm(self) -> float:
        return self.radius

    def project(self, x: ArrayLike) -> NDArray[np.float64]:
        y = check.points(x, "x", dim=self.dim)
        size = np.maximum(np.abs(y).max(axis=1, keepdims=True), 1e-300)
        norm = size * np.linalg.norm(y / size, axis=1, keepdims=True)
        # rounded inward, so that what is projected satisfies the bounds of the ball
        shrink = (1.0 - 1e-15) * self.radius / np.maximum(norm, 1e-300)
        return np.asarray(np.where(norm > self.radius, y * shrink, y))

    def max_affine_norm(self, A: ArrayLike, c: ArrayLike | None = None) -> float:
        M = check.matrix(A, "A", shape=(None, self.dim))
        return float(spectral_norm_upper(M) * self.radius + _offset_norm(c, M.shape[0])) * (1 + _EPS)

    def sample(self, n: int, rng: np.random.Generator | int) -> NDArray[np.float64]:
        if self.dim is None:
            raise ValueError("sampling a Ball needs its dimension; build it as Ball(radius, dim).")
        return self.radius * _unit_ball(n, self.dim, check.rng_from(rng))


@dataclass(frozen=True, eq=False, init=False)
class Ellipsoid(Domain):
    """The set ``{E z + center : |z| <= 1}``.

    Parameters
    ----------
    shape : array_like (d, k)
        The matrix E; its rank may be below d (a flat ellipsoid).
    center : array_like (d,), optional
        The centre b, 0 by default.
    """

    shape: NDArray[np.float64]
    center: NDArray[np.float64]

    def __init__(self, shape: ArrayLike, center: ArrayLike | None = None) -> None:
        E = check.moderate(check.matrix(shape, "shape"), "shape")
        b = np.zeros(len(E)) if center is None else check.vector(center, "center", size=len(E))
        check.moderate(b, "center")
        object.__setattr__(self, "shape", check.frozen(E))
        object.__setattr__(self, "center", check.frozen(b))

    @property
    def dim(self) -> int:
        return int(self.shape.shape[0])

    def project(self, x: ArrayLike) -> NDArray[np.float64]:
        """Nearest point of the ellipsoid (secular equation in the basis of E's left singular vectors)."""
        y = check.points(x, "x", dim=self.dim) - self.center
        U, s, _ = np.linalg.svd(self.shape, full_matrices=False)
        keep = s > s.max(initial=0.0) * 1e-14
        U, s = U[:, keep], s[keep]
        out = np.zeros_like(y)
        if not s.size:
            return out + self.center
        unit = float(s[0])  # the longest half axis: squares of the others then stay in float64
        s = s / unit
        with np.errstate(over="ignore"):
            heights = np.clip(y @ U / unit, -1e250, 1e250)
        for i, h in enumerate(heights):
            z = h / s
            far = float(np.abs(z).max(initial=0.0))
            if far > _FAR:  # squares would overflow, and the nearest point no longer depends on the distance
                h, z = h * (_FAR / far), z * (_FAR / far)
            if z @ z > 1.0:
                # |z(nu)| = 1 at the multiplier nu >= 0 of |z|^2 <= 1, z(nu) = s h / (s^2 + nu); |z| <= 1 at nu = |s h|
                def excess(nu: float, h: NDArray[np.float64] = h) -> float:
                    return float(np.sum((s * h / (s**2 + nu)) ** 2) - 1.0)

                top = 2.0 * float(np.linalg.norm(s * h))
                # a point within rounding of the boundary may show no excess at 0: then nu = 0
                nu = brentq(excess, 0.0, top, xtol=1e-300) if excess(0.0) > 0.0 else 0.0
                z = s * h / (s**2 + nu)
                z /= max(1.0, float(np.linalg.norm(z)))
            out[i] = U @ (unit * s * z)
        return out + self.center

    def max_affine_norm(self, A: ArrayLike, c: ArrayLike | None = None) -> float:
        M = check.matrix(A, "A", shape=(None, self.dim))
        axes = spectral_norm_upper(M @ self.shape) + _rounding(M, self.shape)
        shift, rounding = _shifted(M, self.center, c)
        return float(axes + (norm_upper(shift) + rounding)) * (1 + 2 * _EPS)

    def sample(self, n: int, rng: np.random.Generator | int) -> NDArray[np.float64]:
        z = _unit_ball(n, self.shape.shape[1], check.rng_from(rng))
        return np.asarray(z @ self.shape.T + self.center)


@dataclass(frozen=True, eq=False, init=False)
class LayerNormDomain(Ellipsoid):
    """Where LayerNorm puts its tokens: ``gain * z + bias`` with ``sum z = 0`` and ``|z|^2 = d``.

    That sphere is the boundary of the flat ellipsoid with ``E = sqrt(d) diag(gain) Q``, Q an orthonormal
    basis of the centred vectors; measures on it are bounded by the ellipsoid.
    """

    gain: NDArray[np.float64]

    def __init__(self, gain: ArrayLike, bias: ArrayLike | None = None) -> None:
        g = check.moderate(check.vector(gain, "gain"), "gain")
        if g.size < 2:
            raise ValueError(f"gain must have at least 2 entries, received {g.size}: a centred vector of R^1 is 0.")
        d = g.size
        basis = np.linalg.qr(np.column_stack([np.ones(d), np.eye(d)[:, : d - 1]]))[0][:, 1:]
        b = None if bias is None else check.moderate(check.vector(bias, "bias", size=d), "bias")
        super().__init__(np.sqrt(d) * g[:, None] * basis, b)
        object.__setattr__(self, "gain", check.frozen(g))

    def _rebuilt(self) -> LayerNormDomain:
        return LayerNormDomain(self.gain, self.center)

    def project(self, x: ArrayLike) -> NDArray[np.float64]:
        """Radial map: undo gain and bias, centre, rescale to norm sqrt(d), redo them.

        Coordinates of gain zero are not seen, so they are free to centre the others: one of them leaves a
        sphere in the others, two or more leave its inside as well.
        """
        y = check.points(x, "x", dim=self.dim) - self.center
        live = self.gain != 0.0
        free = int(self.dim - live.sum())
        out = np.zeros_like(y)
        if free == self.dim:
            return out + self.center
        with np.errstate(over="ignore"):  # beyond 1e100 only the direction counts
            z = np.clip(y[:, live] / self.gain[live], -_FAR, _FAR)
        if free == 0:
            z -= z.mean(axis=1, keepdims=True)
        # the free coordinates that centre z with the least norm add (sum z)^2 / free to its square
        hidden = z.sum(axis=1) ** 2 / free if free else 0.0
        norm = np.sqrt((z**2).sum(axis=1) + hidden)
        flat = norm == 0.0
        if flat.any() and free < 2:  # the centre has no direction: send it to a fixed point
            z[flat, 0] = 1.0
            if free == 0:
                z[flat, 1] = -1.0
            norm[flat] = np.sqrt(2.0)
        factor = np.sqrt(self.dim) / np.where(norm > 0.0, norm, 1.0)
        if free >= 2:
            factor = np.minimum(factor, 1.0)
            factor[flat] = 1.0
        out[:, live] = z * factor[:, None] * self.gain[live]
        return out + self.center

    def sample(self, n: int, rng: np.random.Generator | int) -> NDArray[np.float64]:
        z = check.rng_from(rng).standard_normal((check.count(n, "n"), self.dim))
        return self.project(z * self.gain + self.center)


@dataclass(frozen=True, eq=False, init=False)
class Box(Domain):
    """The box ``{lower <= x <= upper}``, coordinate by coordinate."""

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]

    def __init__(self, lower: ArrayLike, upper: ArrayLike) -> None:
        lo = check.moderate(check.vector(lower, "lower"), "lower")
        hi = check.moderate(check.vector(upper, "upper", size=lo.size), "upper")
        if lo.size == 0:
            raise ValueError("lower must have at least one entry, received none.")
        if (lo > hi).any():
            k = int((lo - hi).argmax())
            raise ValueError(
                f"lower must not exceed upper, received {lo[k]:g} > {hi[k]:g} in coordinate {k}; swap them."
            )
        object.__setattr__(self, "lower", check.frozen(lo))
        object.__setattr__(self, "upper", check.frozen(hi))

    @property
    def dim(self) -> int:
        return int(self.lower.size)

    @property
    def center(self) -> NDArray[np.float64]:
        """Midpoint, shape ``(d,)``."""
        return np.asarray(0.5 * (self.lower + self.upper))

    @property
    def half_widths(self) -> NDArray[np.float64]:
        """Half side lengths, shape ``(d,)``."""
        return np.asarray(0.5 * (self.upper - self.lower))

    def project(self, x: ArrayLike) -> NDArray[np.float64]:
        return np.clip(check.points(x, "x", dim=self.dim), self.lower, self.upper)

    def max_affine_norm(self, A: ArrayLike, c: ArrayLike | None = None) -> float:
        M = check.matrix(A, "A", shape=(None, self.dim))
        shift, rounding = _shifted(M, self.center, c)
        r = self.half_widths
        # two valid bounds: row by row, and the ball around the box
        rowwise = norm_upper(np.abs(shift) + np.abs(M) @ r) + _rounding(M, r[:, None])
        ball = spectral_norm_upper(M * r) * np.sqrt(self.dim) * (1 + self.dim * _EPS) + norm_upper(shift)
        return float(min(rowwise, ball) + rounding) * (1 + 3 * _EPS)

    def sample(self, n: int, rng: np.random.Generator | int) -> NDArray[np.float64]:
        u = check.rng_from(rng).random((check.count(n, "n"), self.dim))
        return np.asarray(self.lower + u * (self.upper - self.lower))


@dataclass(frozen=True, eq=False, init=False)
class PointSet(Domain):
    """A finite set of tokens, such as a vocabulary's embeddings."""

    points: NDArray[np.float64]

    def __init__(self, points: ArrayLike) -> None:
        object.__setattr__(self, "points", check.frozen(check.moderate(check.points(points), "points")))

    @property
    def dim(self) -> int:
        return int(self.points.shape[1])

    def project(self, x: ArrayLike) -> NDArray[np.float64]:
        """Nearest point of the set."""
        from scipy.spatial import cKDTree

        # beyond 1e100 all points of the set are equally near, to rounding
        y = np.clip(check.points(x, "x", dim=self.dim), -_FAR, _FAR)
        return np.asarray(self.points[cKDTree(self.points).query(y)[1]])

    def max_affine_norm(self, A: ArrayLike, c: ArrayLike | None = None) -> float:
        M = check.matrix(A, "A", shape=(None, self.dim))
        shift = np.zeros(M.shape[0]) if c is None else check.vector(c, "c", size=M.shape[0])
        # point by point: the norm, and what rounding may have taken from the image
        sizes = np.linalg.norm(self.points @ M.T + shift, axis=1)
        lost = np.linalg.norm(np.abs(self.points) @ np.abs(M.T), axis=1) * (self.dim + 2) * _EPS
        return float((sizes + lost).max()) * (1 + (M.shape[0] + 16) * _EPS)

    def sample(self, n: int, rng: np.random.Generator | int) -> NDArray[np.float64]:
        return np.asarray(self.points[check.rng_from(rng).integers(len(self.points), size=check.count(n, "n"))])


def _offset_norm(c: ArrayLike | None, size: int) -> float:
    if c is None:
        return 0.0
    return float(norm_upper(check.vector(c, "c", size=size)))


def _rounding(A: NDArray[np.float64], B: NDArray[np.float64]) -> float:
    """What rounding may have taken from ``A @ B`` (Frobenius norm), twice over: it covers that of B's last digits too."""
    return 2.0 * product_error(A, B) if A.any() and B.any() else 0.0


def _shifted(
    A: NDArray[np.float64], center: NDArray[np.float64], c: ArrayLike | None
) -> tuple[NDArray[np.float64], float]:
    """``A b + c``, and how far its norm may lie below that of the exact vector: terms may cancel to what is rounding."""
    shift = A @ center
    rounding = _rounding(A, center[:, None])
    if c is not None:
        shift = shift + check.vector(c, "c", size=len(A))
    return shift, rounding + _EPS * float(norm_upper(shift))


def _unit_ball(n: int, dim: int, rng: np.random.Generator) -> NDArray[np.float64]:
    z = rng.standard_normal((check.count(n, "n"), dim))
    z /= np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-300)
    return np.asarray(z * rng.random((n, 1)) ** (1.0 / dim))
