"""The chain of an attention map at given tokens: softmax heads, token-wise maps, residuals and compositions of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

from otattn._linalg import norm_upper
from otattn.attention import AttentionMap, Compose, Residual, TokenwiseMap
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.expansion import Expansion
from otattn.lipschitz.near.gram_jacobian import fits, jacobian_norm
from otattn.lipschitz.near.heads import heads_at, heads_expansion, softmax_heads
from otattn.lipschitz.near.largest_eigenvalue import FAILURE
from otattn.lipschitz.near.stack import DENSE, Chain, Linear, Stage, chain_of
from otattn.lipschitz.near.tokenwise import perceptron, tokenwise_errors, tokenwise_expansion
from otattn.operators import spectral_norm_bounds

__all__ = ["chain_at", "why_not"]

Array = NDArray[np.float64]


def why_not(map: AttentionMap) -> str | None:
    """Why a map has no chain; None when it has one."""
    if isinstance(map, Compose):
        return next((why for m in map.maps if (why := why_not(m)) is not None), None)
    if isinstance(map, Residual):
        return why_not(map.map)
    if softmax_heads(map) or (isinstance(map, TokenwiseMap) and (hasattr(map, "gain") or perceptron(map) is not None)):
        return None
    return f"it is made of softmax heads, LayerNorm, RMSNorm, MLP, Residual and Compose, received {type(map).__name__}"


@dataclass(frozen=True, eq=False)
class _Scaled:
    """The expansion of ``x + s g(x)`` from that of g."""

    inner: Expansion
    scale: float

    def remainder(self, r: float, off: float = 0.0) -> float:
        return abs(self.scale) * self.inner.remainder(r, off)

    def growth(self, r: float, off: float = 0.0) -> float:
        return abs(self.scale) * self.inner.growth(r, off)


def chain_at(map: AttentionMap, tokens: Array, off: float = 0.0) -> Chain:
    """The chain at float tokens ``(n, d)`` that are within ``off`` of the true ones.

    Up to :data:`DENSE` coordinates Jacobians are matrices and the norms of their products proved; above, they are bounded with
    probability ``1 - FAILURE`` each, except that of one attention map whose Gram matrix fits.
    """
    return _chain(map, tokens, off)[0]


def _chain(map: AttentionMap, tokens: Array, off: float) -> tuple[Chain, Array]:
    x, stages, gram = tokens, [], []
    for m in _flat(map):
        stage, x, norm = _stage(m, x)
        stages.append(stage)
        gram.append(norm)
    dense = all(s.jacobian.matrix is not None for s in stages)
    proved = dense or (len(stages) == 1 and gram[0] is not None)
    return chain_of(stages, off, None if dense else _norms(stages, gram), "proved" if proved else "probabilistic"), x


def _norms(stages: list[Stage], gram: list[float | None]) -> Callable[[int, int], float]:
    def norm(a: int, b: int) -> float:
        known = gram[a]
        if b == a + 1 and known is not None:
            return known
        return _operator_norm([s.jacobian for s in stages[a:b]])

    return norm


def _flat(map: AttentionMap) -> list[AttentionMap]:
    return [part for m in map.maps for part in _flat(m)] if isinstance(map, Compose) else [map]


def _stage(map: AttentionMap, x: Array) -> tuple[Stage, Array, float | None]:
    """The stage at float tokens, its float image, and the norm of its Jacobian where a Gram matrix proves it."""
    if isinstance(map, Residual):
        return _residual(map, x)
    n, d = x.shape
    e = map.out_dim or d
    small = n * max(d, e) <= DENSE
    if isinstance(map, TokenwiseMap):
        value, slope = tokenwise_errors(map, x)
        linear = _linear(map, x, small)
        return Stage(linear, tokenwise_expansion(map, x), slope, value), map._map(x), None
    found = heads_at(map, x)
    expansion, _ = heads_expansion(found.heads)
    image, lost = found.images()
    if small:
        J, error = found.jacobian()
        jvp, vjp = (_product(M, n) for M in (J, J.T))
        return Stage(Linear(J, jvp, vjp, (n, d, e)), expansion, error, lost), image, None
    norm = jacobian_norm(found.heads)[1] if fits(found.heads) else None
    return Stage(_linear(map, x, False), expansion, found.jacobian_error(), lost), image, norm


def _residual(map: Residual, x: Array) -> tuple[Stage, Array, float | None]:
    inner, image = _chain(map.map, x, 0.0)
    n, d = x.shape
    s = map.scale
    parts = [t.jacobian for t in inner.stages]
    matrix: Array | None = None
    lost = 0.0
    if all(p.matrix is not None for p in parts):
        matrix = np.eye(n * d)
        for p in parts:
            assert p.matrix is not None
            size = float(norm_upper(p.matrix))
            lost = lost * size + 4.0 * (len(matrix) + 8) * EPS * size * float(norm_upper(matrix))
            matrix = p.matrix @ matrix
        matrix = np.eye(n * d) + s * matrix
        lost = abs(s) * lost + 4.0 * EPS * float(norm_upper(matrix))

    def jvp(v: Array) -> Array:
        w = v
        for p in parts:
            w = p.jvp(w)
        return v + s * w

    def vjp(g: Array) -> Array:
        w = g
        for p in reversed(parts):
            w = p.vjp(w)
        return g + s * w

    # the factors' own errors, telescoped with the norms of what is around them
    S = len(parts)
    slopes = [t.jacobian_error + t.expansion.growth(e) for t, e in zip(inner.stages, inner.offs, strict=True)]
    lost += abs(s) * float(sum(inner.norms[t + 1, S] * slopes[t] * inner.norms[0, t] for t in range(S)))
    out = x + s * image
    error = (
        abs(s) * inner.image_error + 4.0 * EPS * float(norm_upper(out)) + 4.0 * EPS * abs(s) * float(norm_upper(image))
    )
    stage = Stage(Linear(matrix, jvp, vjp, (n, d, d)), _Scaled(inner, s), lost, error)
    return stage, out, None


def _linear(map: AttentionMap, x: Array, dense: bool) -> Linear:
    J = map.jacobian(x)
    n, d = x.shape
    if dense:
        M = J.to_dense()
        return Linear(M, _product(M, n), _product(M.T, n), (n, d, J.e))
    return Linear(None, J.jvp, J.vjp, (n, d, J.e))


def _product(M: Array, n: int) -> Callable[[Array], Array]:
    return lambda v: np.asarray(M @ v.ravel()).reshape(n, -1)


def _operator_norm(parts: list[Linear]) -> float:
    """The norm of a product of operators, first factor first, by Lanczos with a stated probability."""
    n, d, e = parts[0].shape[0], parts[0].shape[1], parts[-1].shape[2]

    def forward(v: Any) -> Array:
        w = np.asarray(v).reshape(n, d)
        for p in parts:
            w = p.jvp(w)
        return w.ravel()

    def backward(g: Any) -> Array:
        w = np.asarray(g).reshape(n, e)
        for p in reversed(parts):
            w = p.vjp(w)
        return w.ravel()

    operator = LinearOperator((n * e, n * d), matvec=forward, rmatvec=backward, dtype=np.float64)
    return float(spectral_norm_bounds(operator, failure=FAILURE, tol=1e-2).upper)
