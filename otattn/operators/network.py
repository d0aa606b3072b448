"""The derivative of a network as a linear operator: residual connections, compositions and blocks, part by part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import AttentionMap, Compose, JacobianOperator, Residual, TokenwiseMap
from otattn.attention import memory as attention_memory
from otattn.attention.base import Measure
from otattn.measures import MeasureLike, SpaceTimeMeasure
from otattn.operators.fused import FusedJacobian
from otattn.operators.layer import supports_fused

__all__ = ["JacobianProduct", "NetworkJacobian", "TwoPrecisions", "measure_jacobian", "network_jacobian"]

Array = NDArray[Any]
Product = Callable[[Array], Array]
Pair = tuple[Product, Product]


class TwoPrecisions(JacobianOperator):
    """A Jacobian with the same in float32, for iterations that need no more digits."""

    @property
    @abstractmethod
    def single(self) -> JacobianOperator:
        """The same operator whose products run in float32 (where its parts carry that)."""


class NetworkJacobian(TwoPrecisions):
    """The Jacobian of a composition or a residual connection.

    Softmax attention inside it is a :class:`FusedJacobian`; token-wise maps keep their slopes as long as all of them fit
    the memory budget.
    """

    def __init__(self, attention: AttentionMap, mu: Measure, dtype: Any = np.float64) -> None:
        self.attention, self.mu, self.work = attention, mu, np.dtype(dtype)
        jvp, vjp = _linearise(attention, mu, self.work, _Shares(attention, mu.n, self.work.itemsize))
        e = mu.dim if attention.out_dim is None else attention.out_dim
        super().__init__(mu.n, mu.dim, e, jvp=jvp, vjp=vjp)

    @cached_property
    def single(self) -> JacobianOperator:
        """See :class:`TwoPrecisions`."""
        return NetworkJacobian(self.attention, self.mu, np.float32)


class JacobianProduct(TwoPrecisions):
    """Jacobians of maps that follow one another, multiplied: the first acts first.

    Examples
    --------
    >>> twice = JacobianOperator(2, 1, 1, jvp=lambda v: 2.0 * v, vjp=lambda g: 2.0 * g)
    >>> JacobianProduct([twice, twice]).matvec([1.0, 3.0])
    array([ 4., 12.])
    """

    def __init__(self, factors: Sequence[Any]) -> None:
        self.factors = tuple(factors)
        last = self.factors[-1]
        super().__init__(
            self.factors[0].n,
            self.factors[0].d,
            last.e,
            jvp=_chain([J.jvp for J in self.factors]),
            vjp=_chain([J.vjp for J in reversed(self.factors)]),
        )

    @cached_property
    def single(self) -> JacobianOperator:
        """See :class:`TwoPrecisions`."""
        parts: list[Any] = []
        for J in self.factors:
            if isinstance(J, TwoPrecisions):
                parts.append(J.single)
            else:
                parts.append(J.astype(np.float32) if isinstance(J, FusedJacobian) else J)
        return JacobianProduct(parts)


class _Shares:
    """What each part of a network may keep of the memory budget."""

    def __init__(self, attention: AttentionMap, n: int, itemsize: int) -> None:
        budget = attention_memory.MEMORY_BUDGET // 2
        fused, width = _census(attention)
        self.memory = budget // max(fused, 1)
        self.keep = itemsize * n * width <= budget


def _census(attention: AttentionMap) -> tuple[int, int]:
    """How many fused parts a network has, and how many numbers a token its token-wise parts keep."""
    if supports_fused(attention):
        return 1, 0
    parts: tuple[AttentionMap, ...] = ()
    if isinstance(attention, Compose):
        parts = attention.maps
    elif isinstance(attention, Residual):
        parts = (attention.map,)
    counts = [_census(part) for part in parts]
    own = 0 if parts else attention._width
    return sum(c for c, _ in counts), own + sum(w for _, w in counts)


def _linearise(attention: AttentionMap, mu: Measure, dtype: np.dtype[Any], shares: _Shares) -> Pair:
    """``D_X f`` at the atoms of ``mu`` and its adjoint on arrays of ``dtype``."""
    if isinstance(attention, Compose):
        pairs = [_linearise(m, nu, dtype, shares) for m, nu in attention.stages(mu)]
        return _chain([p[0] for p in pairs]), _chain([p[1] for p in reversed(pairs)])
    if isinstance(attention, Residual):
        return _residual(_linearise(attention.map, mu, dtype, shares), attention.scale)
    if supports_fused(attention):
        fused = FusedJacobian(attention, mu, dtype=dtype, reweight=False, memory=shares.memory)
        return _cast(fused.jvp, dtype), _cast(fused.vjp, dtype)
    if isinstance(attention, TokenwiseMap) and shares.keep:
        return attention.linearised(mu.points, dtype)
    times = mu.times if attention.causal and isinstance(mu, SpaceTimeMeasure) else None
    rows = None
    if 8 * mu.n * mu.n * attention._kernels > shares.memory or isinstance(attention, TokenwiseMap):
        rows = attention_memory.block_rows(mu.n, mu.n)
    J = attention._jacobian(mu, times, rows)
    wide = np.dtype(np.float64)
    return _cast(J.jvp, dtype, wide), _cast(J.vjp, dtype, wide)


def _chain(products: list[Product]) -> Product:
    def run(v: Array) -> Array:
        for product in products:
            v = product(v)
        return v

    return run


def _residual(pair: Pair, scale: float) -> Pair:
    forward, backward = pair
    return (lambda v: v + scale * forward(v)), (lambda g: g + scale * backward(g))


def _cast(product: Product, dtype: np.dtype[Any], work: np.dtype[Any] | None = None) -> Product:
    """The product on arrays of ``dtype``, computed in ``work`` (its own choice by default)."""

    def run(v: Array) -> Array:
        return np.asarray(product(v if work is None else np.asarray(v, dtype=work)), dtype=dtype)

    return run


def network_jacobian(attention: AttentionMap, mu: Measure) -> JacobianOperator:
    """The Jacobian of any map at atoms of positive weight (weights fixed): :class:`NetworkJacobian` for compositions."""
    if isinstance(attention, (Compose, Residual)) and bool((mu.weights > 0).all()):
        return NetworkJacobian(attention, mu)
    return attention.jacobian(mu)


def measure_jacobian(attention: AttentionMap, mu: MeasureLike, **options: Any) -> FusedJacobian | JacobianOperator:
    """The Jacobian of any attention map in L^2(mu): fused for softmax attention, part by part for compositions.

    Parameters
    ----------
    attention : AttentionMap
    mu : measure or array_like (n, d)
    **options
        Of :class:`FusedJacobian`.

    Returns
    -------
    FusedJacobian or JacobianOperator
        The former on all n atoms, with zero rows at atoms of zero weight; the latter on those of positive
        weight.
    """
    if supports_fused(attention):
        return FusedJacobian(attention, mu, **options)
    measure = attention.as_measure(mu).support()
    J = network_jacobian(attention, measure)
    uniform = bool((measure.weights == measure.weights[0]).all())
    return J if uniform else J.reweighted(measure.weights)
