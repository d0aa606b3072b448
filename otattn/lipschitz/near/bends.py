r"""Second derivatives at given tokens as bilinear maps, ``(D, E) -> D^2 f[D, E]``, for many pairs of directions at once.

- Heads: ``kappa_3(v, t(D), t(E)) + Cov(V delta, t(E)) + Cov(V eps, t(D)) + Cov(v, m)``, the formula of
  :mod:`~otattn.lipschitz.near.gram_hessian`; with a cap ``t = phi' tau``, and ``phi'' tau(D) tau(E) + phi' m`` in place of m
  (:mod:`~otattn.lipschitz.near.capped`).
- Normalisations, ``n = Y / |Y|``: ``|Y|^2 n''[D, E] = 3 <n, D> <n, E> n - <D, E> n - <n, D> E - <n, E> D``.
- Perceptrons: ``W (phi''(s) (U D) (U E))``, gated ``W (phi''(s) t (G D) (G E) + phi'(s) ((G D) (U E) + (U D) (G E)))``. A ReLU without
  a gate has none.

Directions are arrays ``(k, n, d)``, images ``(k, n, e)``. Points are those of :mod:`~otattn.lipschitz.near.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import LayerNorm, Residual, TokenwiseMap
from otattn.lipschitz.near.activations import ACTIVATIONS
from otattn.lipschitz.near.composed import Bends, sketched
from otattn.lipschitz.near.coordinates import Frame
from otattn.lipschitz.near.head import HeadAtTokens
from otattn.lipschitz.near.normed import BlockNorms
from otattn.lipschitz.near.rotary import Lift
from otattn.lipschitz.near.tokenwise import Perceptron, perceptron

__all__ = ["bent_along", "forms_of", "has_bend"]

Array = NDArray[np.float64]


def has_bend(p: Any) -> bool:
    """Whether the second derivative of a point is known as a bilinear map, everywhere that its expansion reaches."""
    if p.branches:
        return all(map(has_bend, (q for b in p.branches for q in b)))
    if p.heads is not None or isinstance(p.map, Lift | LayerNorm | BlockNorms):
        return True
    found = perceptron(p.map)
    return found is not None and (found.G is None or found.activation != "relu")


def forms_of(path: Sequence[Any], frames: Sequence[Frame]) -> Bends:
    """The forms of the stack whose stages are the points (:mod:`~otattn.lipschitz.near.composed`)."""
    turns = [f.P for f in frames]

    def whole(rng: np.random.Generator, k: int) -> list[Array]:
        D, E = rng.standard_normal((2, k, *path[0].x.shape))
        return bent_along(path, D, E)

    found = sketched(whole, turns, 0)
    weights = np.maximum(found[:-1], 1e-3 * float(found.max()) + 1e-300)

    def mixed(rng: np.random.Generator, k: int) -> list[Array]:
        D = rng.standard_normal((k, *path[0].x.shape))
        drawn = [w * rng.standard_normal((k, *p.x.shape)) for w, p in zip(weights, path, strict=True)]
        drawn[0][:] = 0.0  # e_0 = 0
        turned = [z if f.P_inverse is None else z @ f.P_inverse.T for z, f in zip(drawn, frames, strict=False)]
        return bent_along(path, D, turned)

    return Bends(found, sketched(mixed, turns, 1), weights)


def bent_along(path: Sequence[Any], D: Array, E: Array | list[Array]) -> list[Array]:
    """``D^2 (f_a .. f_1)[D, E]``, a = 1, .., S; with a list of E_t the ``M_a[D, E]`` of :mod:`~otattn.lipschitz.near.composed`."""
    found: list[Array] = []
    for a, p in enumerate(path):
        image = _bent(p, D, E[a] if isinstance(E, list) else E)
        found.append(image + _moved(p, found[-1]) if found else image)
        if a < len(path) - 1:
            D = _moved(p, D)
            E = E if isinstance(E, list) else _moved(p, E)
    return found


def _bent(p: Any, D: Array, E: Array) -> Array:
    """``D^2 f[D, E]`` of a point."""
    if isinstance(p.map, Lift):
        return np.zeros((*D.shape[:2], p.jacobian.shape[2]))
    if p.branches:
        scale = getattr(p.map, "scale", 1.0)
        return np.asarray(scale * np.sum([bent_along(b, D, E)[-1] for b in p.branches], axis=0))
    if isinstance(p.map, TokenwiseMap):
        return _tokenwise_bent(p.map, p.x, D, E)
    return _sum_of_heads(p.heads.heads, lambda h: _head_bent(h, D, E))


def _moved(p: Any, D: Array) -> Array:
    """``J D`` of a point."""
    if isinstance(p.map, Lift):
        return np.stack([p.map.jvp(v) for v in D])
    if p.branches:
        through = [_through(b, D) for b in p.branches]
        return D + p.map.scale * through[0] if isinstance(p.map, Residual) else np.sum(through, axis=0)
    if isinstance(p.map, TokenwiseMap):
        k, n, d = D.shape
        return np.asarray(p.map._jvp(np.tile(p.x, (k, 1)), D.reshape(k * n, d))).reshape(k, n, -1)
    return _sum_of_heads(p.heads.heads, lambda h: _head_moved(h, D))


def _through(path: Sequence[Any], D: Array) -> Array:
    for p in path:
        D = _moved(p, D)
    return D


def _tokenwise_bent(map: TokenwiseMap, x: Array, D: Array, E: Array) -> Array:
    if isinstance(map, BlockNorms):
        out = np.zeros(D.shape)
        for block, norm in map.norms:
            out[..., block] = _norm_bent(norm, x[:, block], D[..., block], E[..., block])
        return out
    if isinstance(map, LayerNorm):
        return _norm_bent(map, x, D, E)
    p = perceptron(map)
    assert p is not None
    return _perceptron_bent(p, x, D, E)


def _norm_bent(map: LayerNorm, x: Array, D: Array, E: Array) -> Array:
    d = x.shape[1]
    y = map._centred(x)
    D, E = (map._centred(M.reshape(-1, d)).reshape(M.shape) for M in (D, E))
    square = ((y**2).sum(axis=1) + d * map.eps)[:, None]
    n = y / np.sqrt(square)
    a, b = ((n * M).sum(axis=2, keepdims=True) for M in (D, E))
    out = (3.0 * a * b - (D * E).sum(axis=2, keepdims=True)) * n - a * E - b * D
    return np.asarray(np.sqrt(d) * map.gain * out / square)


def _perceptron_bent(p: Perceptron, x: Array, D: Array, E: Array) -> Array:
    phi = ACTIVATIONS[p.activation]
    u, w = D @ p.U.T, E @ p.U.T
    if p.G is None or p.g is None:
        return np.asarray((phi.second(x @ p.U.T + p.b) * u * w) @ p.W.T)
    s, t = x @ p.G.T + p.g, x @ p.U.T + p.b
    a, b = D @ p.G.T, E @ p.G.T
    return np.asarray((phi.second(s) * t * a * b + phi.first(s) * (a * w + b * u)) @ p.W.T)


def _sum_of_heads(heads: list[HeadAtTokens], part: Callable[[HeadAtTokens], Array]) -> Array:
    return np.asarray(sum(part(h) if h.W is None else part(h) @ h.W.T for h in heads))


def _head_moved(h: HeadAtTokens, D: Array) -> Array:
    """``sum_j P_ij (V + s_ij y_ij g_i^T) delta_j + F_i delta_i``."""
    h = h.levered
    weight = h.P * _raw(h, D)
    out = h.P @ (D @ h.V.T) + np.matmul(weight.transpose(1, 0, 2), h.y).transpose(1, 0, 2)
    return np.asarray(out + np.einsum("ied,kid->kie", h.field, D))


def _head_bent(h: HeadAtTokens, D: Array, E: Array) -> Array:
    assert h.A is not None
    n, P, curve = h.n, h.P, h.curve
    raw_D, raw_E = (_raw(h, M) for M in (D, E))
    t, s = (_tilted(h, M, raw) for M, raw in ((D, raw_D), (E, raw_E)))
    m = (D @ h.A.T) @ np.swapaxes(E, 1, 2) + (E @ h.A.T) @ np.swapaxes(D, 1, 2)
    if curve is not None:
        tau_D, tau_E = (M @ curve.raw[:n].T + raw for M, raw in ((D, raw_D), (E, raw_E)))
        m = curve.slope[:, :n] * m + curve.bend[:, :n] * tau_D * tau_E
    weight = P * t * s  # (k, n, m)
    weight[:, :, :n] += P[:, :n] * m
    out = np.matmul(weight.transpose(1, 0, 2), h.y).transpose(1, 0, 2)
    for M, other in ((D, s), (E, t)):
        out = out + (P * other)[:, :, :n] @ (M @ h.V.T)
    return np.asarray(out)


def _raw(h: HeadAtTokens, D: Array) -> Array:
    """``<g_i, delta_j>`` ``(k, n, n)``."""
    return np.asarray(h.g @ np.swapaxes(D, 1, 2))


def _tilted(h: HeadAtTokens, D: Array, raw: Array) -> Array:
    """The centred first derivatives of the logits ``(k, n, m)``."""
    t = np.matmul(D.transpose(1, 0, 2), np.swapaxes(h.k, 1, 2)).transpose(1, 0, 2).copy()
    b = raw if h.curve is None else h.curve.slope[:, : h.n] * raw
    t[:, :, : h.n] += b
    return np.asarray(t - (h.P[:, : h.n] * b).sum(axis=2, keepdims=True))
