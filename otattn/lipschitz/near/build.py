"""The chain of an attention map at given tokens: heads, token-wise maps, residuals, sums and compositions of these.

The numbers of a sum ``sum_b f_b`` are at most the sums of those of its branches: its Jacobian is the sum of theirs, and what it
is off from its linearisation, and its change, are at most the sums of what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.attention import AttentionMap, Compose, LayerNorm, MultiHeadAttention, Residual, Sum, TokenwiseMap
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.bends import forms_of, has_bend
from otattn.lipschitz.near.coordinates import PLAIN, Frame, frames_of, norm_table
from otattn.lipschitz.near.expansion import AFFINE, Expansion
from otattn.lipschitz.near.experts import Experts, experts
from otattn.lipschitz.near.gram_jacobian import fits, jacobian_norm
from otattn.lipschitz.near.heads import Heads, heads_at, heads_expansion, softmax_heads, turned
from otattn.lipschitz.near.normed import BlockNorms
from otattn.lipschitz.near.rotary import Lift, lifted, rotary_heads
from otattn.lipschitz.near.scores import bare, score_heads, why_no_scores
from otattn.lipschitz.near.segment import Run
from otattn.lipschitz.near.stack import DENSE, Chain, Linear, Stage, chain_of, dense_norms, product
from otattn.lipschitz.near.tokenwise import perceptron, tokenwise_errors, tokenwise_expansion

__all__ = ["chain_at", "why_not"]

Array = NDArray[np.float64]
Side = Array | None
"""A matrix (d, d) on one side of a map, None for the identity."""


def why_not(map: AttentionMap) -> str | None:
    """Why a map has no chain; None when it has one."""
    if isinstance(map, Compose | Sum):
        return next((why for m in map.maps if (why := why_not(m)) is not None), None)
    if isinstance(map, Residual):
        return why_not(map.map)
    if softmax_heads(map) or rotary_heads(map):
        return None
    if scores := score_heads(map):
        return why_no_scores(scores)
    if isinstance(map, LayerNorm) or experts(map) is not None:
        return None
    if isinstance(map, TokenwiseMap) and perceptron(map) is not None:
        return None
    part = next((h for h in getattr(map, "heads", ()) if not (softmax_heads(h) or rotary_heads(h))), None)
    if part is not None:
        return f"its heads are softmax heads, or all rotary ones, received {part.kind} among them"
    if isinstance(map, MultiHeadAttention):
        return "softmax heads with output matrices at two levels, and next to rotary ones, must be written as one sum"
    return (
        "it is made of softmax and rotary heads, LayerNorm, RMSNorm, perceptrons, experts, Residual, Sum and Compose, received "
        f"{map.kind}"
    )


def chain_at(map: AttentionMap, tokens: Array) -> Chain:
    """The chain at tokens ``(n, d)``.

    Up to :data:`~otattn.lipschitz.near.stack.DENSE` coordinates Jacobians are matrices and the norms of their products
    proved; above, they are bounded with a stated probability, in coordinates chosen for the stack, but for that of
    one attention map whose Gram matrix fits.
    """
    path = _path(map, tokens)
    whole = _segments(path)
    # in a stack the rows of a segment would be charged for all that may enter it: six layers get a ninth of the radius
    if len(whole) == 1 and np.isfinite((chain := _chain(whole, None, None)).norm):
        return chain
    return _chain(path, None, None, composed=True)


def _path(map: AttentionMap, x: Array) -> list[_Point]:
    """The stages at the float tokens that enter them."""
    out: list[_Point] = []
    for m in _flat(map, len(x)):
        out.append(_Point.of(m, out[-1].image if out else x))
    return out


def _flat(map: AttentionMap, n: int) -> list[Any]:
    if isinstance(map, Compose):
        return [part for m in map.maps for part in _flat(m, n)]
    return lifted(map, n) if rotary_heads(map) or not bare(score_heads(map)) else [map]


@dataclass(frozen=True, eq=False)
class _Point:
    """A stage at float tokens, before coordinates are chosen: its float image and Jacobian with their errors."""

    map: AttentionMap | Lift
    x: Array
    image: Array
    jacobian: Linear
    jacobian_error: float
    image_error: float
    branches: tuple[tuple[_Point, ...], ...] = ()
    heads: Heads | None = None

    @classmethod
    def of(cls, map: AttentionMap | Lift, x: Array) -> _Point:
        n, d = x.shape
        if isinstance(map, Lift):
            image, lost = map.images(x)
            m = len(map.L)
            dense = map.matrix(n) if n * max(d, m) <= DENSE else None
            return cls(map, x, image, Linear(dense, map.jvp, map.vjp, (n, d, m)), map.jacobian_error, lost)
        if isinstance(map, Residual):
            inner = tuple(_path(map.map, x))
            image = np.asarray(x + map.scale * inner[-1].image)
            return cls(map, x, image, *_residual(map.scale, x, image, inner), (inner,))
        if isinstance(map, Sum):
            branches = tuple(tuple(_path(m, x)) for m in map.maps)
            image = np.sum([b[-1].image for b in branches], axis=0)
            return cls(map, x, image, *_sum(branches), branches)
        e = map.out_dim or d
        small = n * max(d, e) <= DENSE
        if isinstance(map, TokenwiseMap):
            own = _own(map)
            value, slope = tokenwise_errors(map, x) if own is None else own.errors(x)
            return cls(map, x, map._map(x), _linear(map, x, small), slope, value)
        found = heads_at(map, x)
        image, lost = found.images()
        if not small:
            return cls(map, x, image, _linear(map, x, False), found.jacobian_error(), lost, (), found)
        J, error = found.jacobian()
        return cls(map, x, image, Linear(J, _product(J, n), _product(J.T, n), (n, d, e)), error, lost, (), found)

    def expansion(self, left: Side, right: Side) -> Expansion:
        """Of ``left f(right z)``."""
        if isinstance(self.map, Lift):
            return AFFINE
        if self.branches:
            chains = tuple(_chain(list(b), left, right) for b in self.branches)
            return _Branches(chains, getattr(self.map, "scale", 1.0))
        if isinstance(self.map, TokenwiseMap):
            if (own := _own(self.map)) is not None:
                return own.expansion(self.x, left, right)
            return tokenwise_expansion(self.map, self.x, left, right)
        assert self.heads is not None
        return heads_expansion(turned(self.heads.heads, left, right))[0]

    def stage(self, left: Side, right: Side) -> Stage:
        """The stage ``left f(right z)``."""
        a, b = _size(left), _size(right)
        return Stage(self.jacobian, self.expansion(left, right), a * self.jacobian_error * b, a * self.image_error)


def _segments(path: list[_Point]) -> list[_Point | Run]:
    """Attention and the token-wise maps that follow it as one stage."""
    out: list[list[_Point]] = []
    for p in path:
        follows = isinstance(_alone(p).map, TokenwiseMap) and _own(_alone(p).map) is None
        if out and _alone(out[-1][0]).heads is not None and follows:
            out[-1].append(p)
        else:
            out.append([p])
    return [part[0] if len(part) == 1 else Run.of(part, [_alone(p) for p in part]) for part in out]


def _alone(p: _Point) -> _Point:
    """The one stage of a residual map, or the stage itself."""
    single = isinstance(p.map, Residual) and len(p.branches[0]) == 1
    return p.branches[0][0] if single else p


def _own(map: Any) -> BlockNorms | Experts | None:
    """What has an expansion of its own."""
    return map if isinstance(map, BlockNorms) else experts(map)


def _size(M: Side) -> float:
    return 1.0 if M is None else float(spectral_norm_upper(M))


@dataclass(frozen=True, eq=False)
class _Branches:
    """The expansion of ``x + s g(x)`` from that of g, and of ``sum_b f_b(x)`` from those of all f_b."""

    parts: tuple[Chain, ...]
    scale: float

    def remainder(self, r: float, off: float = 0.0) -> float:
        return abs(self.scale) * sum(f.remainder(r, off) for f in self.parts) * (1.0 + 4.0 * len(self.parts) * EPS)

    def growth(self, r: float, off: float = 0.0) -> float:
        return abs(self.scale) * sum(f.growth(r, off) for f in self.parts) * (1.0 + 4.0 * len(self.parts) * EPS)

    def curvature(self, off: float = 0.0) -> float:
        return abs(self.scale) * sum(f.curvature(off) for f in self.parts) * (1.0 + 4.0 * len(self.parts) * EPS)

    def third_remainder(self, r: float, off: float = 0.0) -> float:
        return (
            abs(self.scale) * sum(f.third_remainder(r, off) for f in self.parts) * (1.0 + 4.0 * len(self.parts) * EPS)
        )

    def third_growth(self, r: float, off: float = 0.0) -> float:
        return abs(self.scale) * sum(f.third_growth(r, off) for f in self.parts) * (1.0 + 4.0 * len(self.parts) * EPS)


def _chain(path: Sequence[Any], left: Side, right: Side, *, composed: bool = False) -> Chain:
    """The chain of ``left f(right z)``; ``composed`` with bounds of its second derivative, where its norms are not proved either."""
    S = len(path)
    parts = [p.jacobian for p in path]
    if all(p.matrix is not None for p in parts) and left is None and right is None:
        stages = [p.stage(None, None) for p in path]
        return chain_of(stages, dense_norms(stages), how="margins" if _tokenwise(path) else "proved")
    frames = frames_of(parts) if S > 1 else [PLAIN, PLAIN]
    # the sides are the coordinates at the two ends, whose own turn is none
    frames = [Frame(P_inverse=right, Q_inverse=right), *frames[1:-1], Frame(P=left, Q=left)]
    stages = [p.stage(frames[a + 1].Q, frames[a].P_inverse) for a, p in enumerate(path)]
    known: list[float | None] = [None] * S
    plain = left is None and right is None
    heads = path[0].heads
    if plain and S == 1 and heads is not None and fits(heads.heads):
        known[0] = jacobian_norm(heads.heads)[1]
    norms = norm_table(parts, frames, known)
    norms[0, 0] = norms[S, S] = 1.0
    bends = forms_of(path, frames) if composed and S > 1 and all(map(has_bend, path)) else None
    return chain_of(stages, norms, how="probabilistic" if known[0] is None else "proved", bends=bends)


def _tokenwise(path: Sequence[_Point | Run]) -> bool:
    """Whether token-wise maps are among the stages: suprema of their derivatives are rounded up, not enclosed."""
    return any(isinstance(p.map, TokenwiseMap) or any(map(_tokenwise, p.branches)) for p in path)


def _residual(s: float, x: Array, image: Array, inner: tuple[_Point, ...]) -> tuple[Linear, float, float]:
    """The Jacobian, its error and that of the image."""
    J, slope, value = _product_of(inner)
    matrix: Array | None = None
    lost = abs(s) * slope
    if J.matrix is not None:
        matrix = np.eye(len(J.matrix)) + s * J.matrix
        lost += 4.0 * EPS * float(norm_upper(matrix))
    error = abs(s) * value + 8.0 * EPS * (float(norm_upper(image)) + float(norm_upper(x)))
    return Linear(matrix, lambda v: v + s * J.jvp(v), lambda g: g + s * J.vjp(g), J.shape), lost, error


def _sum(branches: tuple[tuple[_Point, ...], ...]) -> tuple[Linear, float, float]:
    """The Jacobian of the sum, its error and that of the image."""
    parts = [_product_of(b) for b in branches]
    rounded = 4.0 * len(parts) * EPS
    lost = float(sum(slope for _, slope, _ in parts))
    matrix: Array | None = None
    dense = [J.matrix for J, _, _ in parts if J.matrix is not None]
    if len(dense) == len(parts):
        matrix = np.sum(dense, axis=0)
        lost += rounded * sum(float(norm_upper(M)) for M in dense)
    error = sum(value for _, _, value in parts) + rounded * sum(float(norm_upper(b[-1].image)) for b in branches)

    def jvp(v: Array) -> Array:
        return np.sum([J.jvp(v) for J, _, _ in parts], axis=0)

    def vjp(g: Array) -> Array:
        return np.sum([J.vjp(g) for J, _, _ in parts], axis=0)

    return Linear(matrix, jvp, vjp, parts[0][0].shape), lost, float(error)


def _product_of(inner: tuple[_Point, ...]) -> tuple[Linear, float, float]:
    """The Jacobian of a composition, its error and that of the image."""
    jacobian, lost = product([p.jacobian for p in inner])
    slope, value = inner[0].jacobian_error, inner[0].image_error
    S = len(inner)
    if S > 1:  # the factors' own errors, telescoped with the norms of what is around them
        chain = _chain(list(inner), None, None)
        slopes = [t.jacobian_error + t.expansion.growth(e) for t, e in zip(chain.stages, chain.offs, strict=True)]
        slope = float(sum(chain.norms[t + 1, S] * slopes[t] * chain.norms[0, t] for t in range(S)))
        value = chain.image_error
    return jacobian, lost + slope, value


def _linear(map: AttentionMap, x: Array, dense: bool) -> Linear:
    J = map.jacobian(x)
    n, d = x.shape
    if dense:
        M = J.to_dense()
        return Linear(M, _product(M, n), _product(M.T, n), (n, d, J.e))
    return Linear(None, J.jvp, J.vjp, (n, d, J.e))


def _product(M: Array, n: int) -> Callable[[Array], Array]:
    return lambda v: np.asarray(M @ v.ravel()).reshape(n, -1)
