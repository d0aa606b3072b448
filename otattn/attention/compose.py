"""Residual connections, compositions and transformer blocks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Drift, Measure, as_attention
from otattn.attention.jacobian import JacobianOperator
from otattn.measures import GaussianMeasure, MeasureLike, SpaceTimeMeasure

__all__ = ["Compose", "Composite", "Residual", "Sum", "TransformerBlock"]


class Composite(AttentionMap):
    """A map made of others: what holds of it from what holds of its parts."""

    @property
    @abstractmethod
    def _parts(self) -> tuple[AttentionMap, ...]:
        """The parts, the first acts on the tokens and the last gives the values."""

    @property
    def in_dim(self) -> int | None:
        return self._parts[0].in_dim

    @property
    def out_dim(self) -> int | None:
        return self._parts[-1].out_dim

    @property
    def causal(self) -> bool:
        return any(m.causal for m in self._parts)

    @property
    def splits(self) -> bool:
        return all(m.splits for m in self._parts)

    @property
    def everywhere(self) -> bool:
        return all(m.everywhere for m in self._parts)

    @property
    def _kernels(self) -> int:
        return sum(m._kernels for m in self._parts)

    @property
    def _tol(self) -> float:
        return max(m._tol for m in self._parts)

    @property
    def _width(self) -> int:
        return sum(m._width for m in self._parts)


@dataclass(frozen=True, eq=False, init=False)
class Residual(Composite):
    """``x -> x + scale * Gamma_mu(x)``.

    Parameters
    ----------
    map : AttentionMap
        With values in the space of the tokens.
    scale : float
        The step, for instance ``1 / L`` in a network of depth L.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> Residual(SoftmaxAttention([[0.0]], [[1.0]])).on_tokens([[2.0]])
    array([[4.]])
    """

    map: AttentionMap
    scale: float

    def __init__(self, map: AttentionMap, *, scale: float = 1.0) -> None:
        as_attention(map, "map")
        if map.out_dim is not None and map.out_dim != map.in_dim:
            raise ValueError(
                f"a residual needs values in the space of the tokens, received {map.in_dim} -> "
                f"{map.out_dim}; add an output matrix with MultiHeadAttention([head], [W])."
            )
        object.__setattr__(self, "map", map)
        object.__setattr__(self, "scale", check.as_float_array(scale, "scale", ndim=0).item())

    @property
    def _parts(self) -> tuple[AttentionMap, ...]:
        return (self.map,)

    @property
    def drift(self) -> Drift:
        return Drift(self.map, self.scale)

    def in_coordinates(self, E: Array, left: Array) -> AttentionMap:
        """For ``left`` the inverse of E, which leaves ``x`` in ``x + scale Gamma(x)`` alone."""
        return Residual(self.map.in_coordinates(E, left), scale=self.scale)

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return x + self.scale * self.map._apply(x, mu, times, block_size)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return np.asarray(np.eye(x.shape[1]) + self.scale * self.map._field(x, mu, times, block_size))

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        J, s = self.map._jacobian(mu, times, block_size), self.scale

        def dense() -> Array:
            return (np.eye(mu.n * mu.dim) + s * J.to_dense()).reshape(mu.n, mu.dim, mu.n, mu.dim)

        return JacobianOperator(
            mu.n,
            mu.dim,
            mu.dim,
            jvp=lambda v: v + s * J.jvp(v),
            vjp=lambda g: g + s * J.vjp(g),
            dense=dense,
            method=J.method,
            error=J.error,
        )

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """``(I + scale G) x + scale b``."""
        self._check_dim(gaussian.dim)
        G, b = self.map.gaussian_affine(gaussian)
        return np.eye(gaussian.dim) + self.scale * G, self.scale * b


class _Several(Composite):
    """Maps that are listed one by one."""

    maps: tuple[AttentionMap, ...]

    def _keep(self, maps: tuple[AttentionMap, ...]) -> None:
        if not maps or not all(isinstance(m, AttentionMap) for m in maps):
            raise TypeError(f"maps must be one or more attention maps, received {maps!r}.")
        object.__setattr__(self, "maps", tuple(maps))

    @property
    def _parts(self) -> tuple[AttentionMap, ...]:
        return self.maps


@dataclass(frozen=True, eq=False, init=False)
class Sum(_Several):
    """``x -> sum_i Gamma^i_mu(x)``: maps side by side, masked or not.

    Examples
    --------
    >>> from otattn.attention import MLP, SoftmaxAttention
    >>> Sum(SoftmaxAttention([[0.0]], [[1.0]]), MLP([[1.0]], [0.0], [[1.0]], activation="identity")).on_tokens([[2.0]])
    array([[4.]])
    """

    maps: tuple[AttentionMap, ...]

    def __init__(self, *maps: AttentionMap) -> None:
        self._keep(maps)
        for name, sizes in (("in_dim", {m.in_dim for m in maps}), ("out_dim", {m.out_dim for m in maps})):
            if len(sizes) > 1:
                raise ValueError(f"maps must act on one space and have values in one, received {name} {sizes}.")

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return np.sum([m._apply(x, mu, times if m.causal else None, block_size) for m in self.maps], axis=0)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return np.sum([m._field(x, mu, times if m.causal else None, block_size) for m in self.maps], axis=0)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        parts = [m._jacobian(mu, times if m.causal else None, block_size) for m in self.maps]
        e = parts[0].e
        return JacobianOperator(
            mu.n,
            mu.dim,
            e,
            jvp=lambda v: np.sum([J.jvp(v) for J in parts], axis=0),
            vjp=lambda g: np.sum([J.vjp(g) for J in parts], axis=0),
            dense=lambda: np.sum([J.to_dense() for J in parts], axis=0).reshape(mu.n, e, mu.n, mu.dim),
        )

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """The sum of the affine maps."""
        self._check_dim(gaussian.dim)
        maps = [m.gaussian_affine(gaussian) for m in self.maps]
        return np.sum([G for G, _ in maps], axis=0), np.sum([b for _, b in maps], axis=0)


@dataclass(frozen=True, eq=False, init=False)
class Compose(_Several):
    """Maps one after the other, the first acts first: ``Compose(F_1, F_2)`` is ``F_2 o F_1``.

    Each map sees the measure that the maps before it have produced.

    Examples
    --------
    >>> from otattn.attention import LayerNorm, SoftmaxAttention
    >>> averaging = SoftmaxAttention([[0.0] * 2] * 2, [[1.0, 0.0]])
    >>> Compose(LayerNorm([1.0, 1.0]), averaging).on_tokens([[0.0, 2.0]])
    array([[-1.]])
    """

    maps: tuple[AttentionMap, ...]

    def __init__(self, *maps: AttentionMap) -> None:
        self._keep(maps)
        for first, second in pairwise(maps):
            if None not in (first.out_dim, second.in_dim) and first.out_dim != second.in_dim:
                raise ValueError(
                    f"maps must fit: {type(first).__name__} gives dimension {first.out_dim}, "
                    f"{type(second).__name__} takes {second.in_dim}."
                )

    def stages(self, mu: MeasureLike) -> list[tuple[AttentionMap, Measure]]:
        """Each map with the measure that reaches it.

        Examples
        --------
        >>> from otattn.attention import LayerNorm
        >>> [(type(m).__name__, nu.points.ravel()) for m, nu in Compose(LayerNorm([1.0, 1.0])).stages([[0.0, 2.0]])]
        [('LayerNorm', array([0., 2.]))]
        """
        return list(zip(self.maps, self._stages(self.as_measure(mu), None), strict=True))

    def _stages(self, mu: Measure, block_size: int | None) -> list[Measure]:
        """The measure before each map."""
        stages = [mu]
        for m in self.maps[:-1]:
            nu = stages[-1]
            stages.append(nu._with_points(m._apply(nu.points, nu, _own_times(m, nu), block_size)))
        return stages

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        # points and times of a measure never change, so the same array means the atoms themselves: then their
        # images are known up to the last map. Equal copies take the general way, to the same values.
        own = x is mu.points and (times is None or times is getattr(mu, "times", None))
        stages = self._stages(mu, block_size)
        if own:
            m, nu = self.maps[-1], stages[-1]
            return m._apply(nu.points, nu, times if m.causal else None, block_size)
        for m, nu in zip(self.maps, stages, strict=True):
            x = m._apply(x, nu, times if m.causal else None, block_size)
        return x

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        total: Array | None = None
        for m, nu in zip(self.maps, self._stages(mu, block_size), strict=True):
            t = times if m.causal else None
            D = m._field(x, nu, t, block_size)
            total = D if total is None else D @ total
            x = m._apply(x, nu, t, block_size)
        assert total is not None
        return total

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        parts = [
            m._jacobian(nu, _own_times(m, nu), block_size)
            for m, nu in zip(self.maps, self._stages(mu, block_size), strict=True)
        ]

        def jvp(v: Array) -> Array:
            for J in parts:
                v = J.jvp(v)
            return v

        def vjp(g: Array) -> Array:
            for J in reversed(parts):
                g = J.vjp(g)
            return g

        def dense() -> Array:
            total = parts[0].to_dense()
            for J in parts[1:]:
                total = J.to_dense() @ total
            return total.reshape(mu.n, parts[-1].e, mu.n, mu.dim)

        worst = max(parts, key=lambda J: J.error)
        return JacobianOperator(
            mu.n, mu.dim, parts[-1].e, jvp=jvp, vjp=vjp, dense=dense, method=worst.method, error=worst.error
        )

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """The composition of the affine maps along the pushed Gaussians."""
        self._check_dim(gaussian.dim)
        matrix, offset = np.eye(gaussian.dim), np.zeros(gaussian.dim)
        for m in self.maps:
            G, b = m.gaussian_affine(gaussian)
            matrix, offset = G @ matrix, G @ offset + b
            gaussian = gaussian.pushforward_affine(G, b)
        return matrix, offset


def _own_times(m: AttentionMap, mu: Measure) -> Array | None:
    """The times of the atoms, for a map that needs them."""
    return mu.times if m.causal and isinstance(mu, SpaceTimeMeasure) else None


class TransformerBlock(Compose):
    """One transformer layer: attention and MLP with residual connections and normalisations.

    ``pre_norm`` (GPT, Llama): ``x + attention(norm(x))``, then ``x + mlp(norm(x))``. Otherwise (BERT):
    ``norm(x + attention(x))``, then ``norm(x + mlp(x))``.

    Parameters
    ----------
    attention, mlp : AttentionMap
        With values in the space of the tokens.
    attention_norm, mlp_norm : AttentionMap, optional
        LayerNorm or RMSNorm; left out when None.
    pre_norm : bool
    """

    def __init__(
        self,
        attention: AttentionMap,
        mlp: AttentionMap,
        *,
        attention_norm: AttentionMap | None = None,
        mlp_norm: AttentionMap | None = None,
        pre_norm: bool = True,
    ) -> None:
        maps: list[AttentionMap] = []
        for part, norm in ((attention, attention_norm), (mlp, mlp_norm)):
            if norm is None:
                maps.append(Residual(part))
            elif pre_norm:
                maps.append(Residual(Compose(norm, part)))
            else:
                maps += [Residual(part), norm]
        super().__init__(*maps)

    def _rebuilt(self) -> Compose:
        return Compose(*self.maps)

    @property
    def drift(self) -> Drift:
        return Drift(self, skip=1.0)
