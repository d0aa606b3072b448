"""Token domains as smooth images of unit balls, spheres and cubes, in the coordinates that an attention map sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from otattn._linalg import Array
from otattn.attention import AttentionMap, L2Attention, SoftmaxAttention
from otattn.attention.head import Head, heads_of
from otattn.measures import Ball, Box, Domain, Ellipsoid, LayerNormDomain

_INSIDE = 1.0 - 4.0 * np.finfo(np.float64).eps
_RANK_TOL = 1e-12


@dataclass(frozen=True, eq=False)
class Chart:
    r"""The domain ``{shape z + offset}``, z in the unit ball, sphere or cube of R^k.

    Reduced coordinates are ``y = basis^T (x - offset) = E z`` with ``E = basis^T shape``. The basis spans the affine
    hull of the domain, or what the heads see of it: neither the values nor the metric of tokens is lost, because
    what is left out can stay still.

    Attributes
    ----------
    kind : {"ball", "sphere", "cube"}
    shape : ndarray (d, k)
    offset : ndarray (d,)
    basis : ndarray (d, r)
    """

    kind: Literal["ball", "sphere", "cube"]
    shape: Array
    offset: Array
    basis: Array

    @cached_property
    def E(self) -> Array:
        """``basis^T shape``, shape ``(r, k)``."""
        return np.asarray(self.basis.T @ self.shape)

    @cached_property
    def _inverse(self) -> Array:
        return np.asarray(np.linalg.inv(self.E))

    @property
    def latent_dim(self) -> int:
        """Dimension k of the latents."""
        return int(self.shape.shape[1])

    def latents(self, omega: Array) -> Array:
        """Latents z from free parameters: ``omega sin|omega| / |omega|``, ``omega / |omega|`` or ``sin omega``.

        The parameters cover the closed domain smoothly, with critical points on its boundary, so an unconstrained
        ascent converges to boundary maxima.
        """
        if self.kind == "cube":
            return np.asarray(np.sin(omega))
        size = np.linalg.norm(omega, axis=-1, keepdims=True)
        if self.kind == "sphere":
            return np.asarray(omega / np.maximum(size, 1e-300))
        return np.asarray(omega * np.sinc(size / np.pi))

    def pull(self, omega: Array, gz: Array) -> Array:
        """Gradient in ``omega`` of a function with gradient ``gz`` in the latents."""
        if self.kind == "cube":
            return np.asarray(np.cos(omega) * gz)
        size = np.maximum(np.linalg.norm(omega, axis=-1, keepdims=True), 1e-300)
        unit = omega / size
        radial = np.sum(unit * gz, axis=-1, keepdims=True)
        if self.kind == "sphere":
            return np.asarray((gz - radial * unit) / size)
        ratio = np.sinc(size / np.pi)
        return np.asarray(ratio * gz + (np.cos(size) - ratio) * radial * unit)

    def parameters(self, z: Array, *, margin: float = 1e-4) -> Array:
        """Parameters of (nearly) ``z``; boundary points move inside by ``margin`` so that the ascent can leave them."""
        if self.kind == "cube":
            return np.asarray(np.arcsin(np.clip(z, -1.0 + margin, 1.0 - margin)))
        size = np.linalg.norm(z, axis=-1, keepdims=True)
        unit = z / np.maximum(size, 1e-300)
        if self.kind == "sphere":
            flat = size[..., 0] < 1e-9
            unit[flat] = np.eye(z.shape[-1])[0]
            return np.asarray(unit)
        return np.asarray(unit * np.arcsin(np.minimum(size, 1.0 - margin)))

    def size(self, z: Array) -> Array:
        """The norm of latents, or the largest coordinate in a cube: 1 on the boundary."""
        return np.asarray(np.abs(z).max(axis=-1) if self.kind == "cube" else np.linalg.norm(z, axis=-1))

    def clip(self, z: Array) -> Array:
        """Latents moved onto the unit ball, sphere or cube."""
        if self.kind == "cube":
            return np.clip(z, -1.0, 1.0)
        size = np.linalg.norm(z, axis=-1, keepdims=True)
        if self.kind == "sphere":
            return np.asarray(z / np.maximum(size, 1e-300))
        return np.asarray(z / np.maximum(size, 1.0))

    def support(self, g: Array) -> tuple[Array, Array]:
        """``max <g, E z>`` over the domain, and the latents that attain it, for rows ``g (m, r)``."""
        h = g @ self.E
        if self.kind == "cube":
            return np.abs(h).sum(axis=-1), np.where(h >= 0.0, 1.0, -1.0)
        size = np.linalg.norm(h, axis=-1)
        unit = h / np.maximum(size, 1e-300)[..., None]
        unit[size == 0.0] = np.eye(self.latent_dim)[0]
        return size, unit

    def normals(self, z: Array) -> Array | None:
        """Unit normals ``(..., r)`` of a sphere at ``E z``: tokens may not leave it. None for solid domains."""
        if self.kind != "sphere":
            return None
        n = z @ self._inverse
        return np.asarray(n / np.linalg.norm(n, axis=-1, keepdims=True))

    def normal_gradient(self, z: Array, pulled: Array, right: Array) -> Array:
        """Latent gradient of ``max <u, M v>`` over tangent v through the tangent spaces (``pulled = M^T u``)."""
        n = z @ self._inverse
        along = np.sum(pulled * n, axis=-1, keepdims=True) / np.sum(n * n, axis=-1, keepdims=True)
        return np.asarray(-(along * right) @ self._inverse.T)

    def lift(self, z: Array) -> Array:
        """Points of the domain ``(..., d)`` from latents, strictly inside up to rounding."""
        inner = self.clip(z) if self.kind == "sphere" else self.clip(z) * _INSIDE
        return np.asarray(inner @ self.shape.T + self.offset)

    def restrict(self, forms: tuple[Head, ...]) -> tuple[Head, ...]:
        """The heads in reduced coordinates."""
        return tuple(f.restricted(self.basis, self.offset) for f in forms)

    def sample(self, size: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Random latents ``(*size, k)``, spread in norm."""
        k = self.latent_dim
        if self.kind == "cube":
            z = rng.uniform(-1.0, 1.0, size=(*size, k))
            return np.where(rng.random(size)[..., None] < 0.5, np.sign(z), z)
        z = rng.standard_normal((*size, k))
        z /= np.maximum(np.linalg.norm(z, axis=-1, keepdims=True), 1e-300)
        return z if self.kind == "sphere" else np.asarray(z * rng.random(size)[..., None] ** 0.4)


def tangent(v: Array, normals: Array | None) -> Array:
    """Rows of ``v (..., r)`` without their components along unit normals; as they are on solid domains."""
    return v if normals is None else v - np.sum(v * normals, axis=-1, keepdims=True) * normals


def chart_of(domain: Domain, dim: int, forms: tuple[Head, ...] | None = None) -> Chart:
    """The chart of a ball, ellipsoid, LayerNorm domain or box of R^dim, reduced to what ``forms`` see of it.

    Raises
    ------
    ValueError
        Another domain (a finite set has no displacements), or a wrong dimension.
    """
    if domain.dim is not None and domain.dim != dim:
        raise ValueError(
            f"domain must lie in dimension {dim}, received {domain.dim}; check the domain or the attention."
        )
    if isinstance(domain, Ball):
        basis = _seen(np.eye(dim), np.zeros(dim), forms)
        return Chart("ball", domain.radius * basis, np.zeros(dim), basis)
    if isinstance(domain, Ellipsoid):
        E = domain.shape
        U, s, _ = np.linalg.svd(E, full_matrices=False)
        hull = U[:, s > _RANK_TOL * s.max(initial=0.0)]
        # a sphere that the shape flattens along some latents fills its ellipsoid: then all displacements are allowed
        if isinstance(domain, LayerNormDomain) and hull.shape[1] == E.shape[1]:
            return Chart("sphere", E, domain.center, hull)
        return Chart("ball", E, domain.center, _seen(hull, domain.center, forms))
    if isinstance(domain, Box):
        free = domain.half_widths > 0
        return Chart("cube", np.diag(domain.half_widths)[:, free], domain.center, np.eye(dim)[:, free])
    raise ValueError(
        "domain must be a Ball, Ellipsoid, LayerNormDomain or Box for witnesses (tokens must be able to move), received "
        f"{type(domain).__name__}; enclose it in one of these."
    )


def _seen(hull: Array, offset: Array, forms: tuple[Head, ...] | None) -> Array:
    """Orthonormal basis of the part of the hull that the heads see; the hull itself when that is not smaller."""
    if forms is None:
        return hull
    parts = []
    for f in (f.restricted(hull, offset) for f in forms):
        parts += [f.A, f.A.T, f.V.T, f.c[:, None]] + ([] if f.H is None else [f.H])
    scaled = [p / max(float(np.linalg.norm(p)), 1e-300) for p in parts]
    U, s, _ = np.linalg.svd(np.concatenate(scaled, axis=1), full_matrices=False)
    # one direction at least, so that the coordinates of blind maps (A = V = 0) exist
    rank = max(1, int((s > _RANK_TOL).sum()))
    return hull if rank >= hull.shape[1] else np.asarray(hull @ U[:, :rank])


def forms_of(attention: AttentionMap) -> tuple[Head, ...] | None:
    """The heads of a softmax, L2 or multi-head attention map, outputs multiplied into the values; None for any other map."""
    heads = heads_of(attention)
    if not heads or any(h.causal or not isinstance(h.map, SoftmaxAttention | L2Attention) for h in heads):
        return None
    return tuple(h if h.output is None else h.with_values(h.total) for h in heads)
