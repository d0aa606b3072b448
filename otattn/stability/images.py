r"""Images of measures with a proven error, one function a map.

Each function evaluates the definition of its map at the atoms, in enclosed arithmetic, independently of the
map's own code: the result holds ``Gamma_mu(x_i)`` for the floats of the map and of the measure taken as exact
numbers (weights divided by their exact sum). Where a map keeps products that it has rounded (``from_qkv``: the
scaled factors, or ``A`` when they are not smaller), those floats are the map.

A map takes part by an entry of ``IMAGES`` under its exact type: a subclass may evaluate something else, so it is
not covered by its base, and :func:`image` answers None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.attention import (
    MLP,
    Compose,
    ExponentialAttention,
    GatedAttention,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    PointwiseAttention,
    PositionBias,
    ReLUAttention,
    Residual,
    RMSNorm,
    RotaryAttention,
    ScoreAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    Sum,
    TransformerBlock,
)
from otattn.attention.base import AttentionMap, Measure, block_rows
from otattn.attention.feed_forward import TANH_GELU, FeedForward
from otattn.attention.kernels import Projections
from otattn.stability import functions
from otattn.stability.enclosed import UNIT, Enclosed, append_columns
from otattn.stability.potentials import column_potential

__all__ = ["IMAGES", "Atoms", "image"]


@dataclass(frozen=True, eq=False)
class Atoms:
    """Atoms of positive weight, their points enclosed; ``times`` is None where the measure has none."""

    points: Enclosed
    weights: Array
    times: Array | None
    masked: bool = False

    @classmethod
    def of(cls, mu: Measure, *, fine: bool) -> Atoms:
        live = mu.weights > 0
        times = getattr(mu, "times", None)
        return cls(Enclosed.exact(mu.points[live], fine=fine), mu.weights[live], None if times is None else times[live])

    @property
    def uniform(self) -> bool:
        return bool((self.weights == self.weights[0]).all())

    def hidden(self, rows: slice) -> NDArray[np.bool_] | None:
        """The atoms that are later than each row, under a mask."""
        if not self.masked or self.times is None:
            return None
        return np.asarray(self.times[None, :] > self.times[rows, None])


Rule = Callable[[Any, Atoms], Enclosed | None]


def image(attention: AttentionMap, mu: Measure, *, fine: bool = False) -> Enclosed | None:
    """``Gamma_mu`` at the atoms of positive weight, ``(m, e)``; None when no bound of the error is known.

    ``fine`` evaluates in double-double: about a hundred times the work.
    """
    with np.errstate(all="ignore"):  # what leaves float64 is not bounded, and refused
        out = _image(attention, Atoms.of(mu, fine=fine))
    return out if out is not None and out.bounded else None


def _image(attention: AttentionMap, atoms: Atoms) -> Enclosed | None:
    rule = IMAGES.get(type(attention))
    return None if rule is None else rule(attention, atoms)


def _rows(m: int, width: int) -> Iterator[slice]:
    step = block_rows(m, m, width)
    for start in range(0, m, step):
        yield slice(start, min(m, start + step))


def _stack(parts: list[Enclosed]) -> Enclosed:
    low = None if parts[0].low is None else np.concatenate([part.low for part in parts])
    return Enclosed(np.concatenate([part.high for part in parts]), low, np.concatenate([part.radius for part in parts]))


def _linear(x: Enclosed, W: Array) -> Enclosed:
    """``x W^T``; nothing to do for the identity."""
    square = W.shape[0] == W.shape[1]
    return x if square and np.array_equal(W, np.eye(len(W))) else x @ W.T


def _column(c: Array, like: Enclosed) -> Enclosed:
    return Enclosed.exact(c[None, :], fine=like.fine)


def _shifted(x: Enclosed, c: Array | None) -> Enclosed:
    return x if c is None else x + c


def _weighted(E: Enclosed, atoms: Atoms, rows: slice) -> Enclosed:
    """``w_j E_ij``, 0 where the mask hides the atom."""
    hidden = atoms.hidden(rows)
    out = E if atoms.uniform else E * atoms.weights
    return out if hidden is None else out.where(~hidden)


def _softmax_rows(logits: Callable[[slice], Enclosed], values: Enclosed, atoms: Atoms) -> Enclosed:
    """``sum_j w_j e^{l_ij} v_j / sum_j w_j e^{l_ij}``; any number may be taken from a row of logits."""
    m, e = values.shape
    with_mass = append_columns(values, np.ones((m, 1)))
    parts = []
    for rows in _rows(m, 12):
        S, hidden = logits(rows), atoms.hidden(rows)
        seen = S.high if hidden is None else np.where(hidden, -np.inf, S.high)
        E = functions.exp(S - seen.max(axis=1, keepdims=True))
        sums = _weighted(E, atoms, rows) @ with_mass
        parts.append(sums[:, :e] / sums[:, e:])
    return _stack(parts)


def _centre(atoms: Atoms) -> Array:
    """A point near the middle of the cloud; any would do."""
    w = atoms.weights / atoms.weights.max()
    return np.asarray((w / w.sum()) @ atoms.points.high)


def _head(head: Projections, atoms: Atoms) -> Enclosed:
    """Softmax of ``<Wq x + bq, Wk y>``, less ``|Wk y|^2`` when quadratic, from a centre c of the cloud.

    With ``y = c + z`` the logits are, up to what does not depend on y, ``<q, Wk z>`` and, when quadratic, ``<q - 2
    Wk c, Wk z> - |Wk z|^2``.
    """
    c = _centre(atoms)
    Z = atoms.points - c
    K = _linear(Z, head.Wk)
    centre = _column(c, Z)
    Q = _linear(Z, head.Wq) + _linear(centre, head.Wq)
    if head.quadratic:
        Q = Q - 2.0 * _linear(centre, head.Wk)
        squares = ((K * K) @ np.ones((K.shape[1], 1))).T
    Q = _shifted(Q, head.bq)

    def logits(rows: slice) -> Enclosed:
        S = Q[rows] @ K.T
        return S - squares if head.quadratic else S

    return _shifted(_softmax_rows(logits, Z @ head.V.T, atoms) + centre @ head.V.T, head.bv)


def _sinkhorn(attention: SinkhornAttention, atoms: Atoms) -> Enclosed | None:
    c = _centre(atoms)
    Z = atoms.points - c
    offset = column_potential(attention, Z, atoms.weights)
    if offset is None:
        return None
    Q = Z @ attention.A.T
    values = _softmax_rows(lambda rows: Q[rows] @ Z.T + offset, Z @ attention.V.T, atoms)
    return values + _column(c, Z) @ attention.V.T


_POINTWISE: dict[type[PointwiseAttention], Callable[[Enclosed], Enclosed]] = {
    SigmoidAttention: functions.expit,
    ReLUAttention: lambda s: s.clipped(),
    LinearAttention: lambda s: s,
    ExponentialAttention: functions.exp,
}


def _pointwise(attention: PointwiseAttention, atoms: Atoms) -> Enclosed:
    """``sum_j w_j h(<A x_i, y_j>) V y_j / sum_j w_j``, the last sum over all atoms, whatever the mask."""
    h, X = _POINTWISE[type(attention)], atoms.points
    Q, values = X @ attention.A.T, X @ attention.V.T
    parts = [_weighted(h(Q[rows] @ X.T), atoms, rows) @ values for rows in _rows(len(atoms.weights), 12)]
    return _stack(parts) / _total(atoms)


def _total(atoms: Atoms) -> Enclosed:
    """The sum of the weights, of ones where they are equal."""
    w, fine = np.ones(len(atoms.weights)) if atoms.uniform else atoms.weights, atoms.points.fine
    high = math.fsum(w)
    low = math.fsum([*w, -high])
    # both sums are rounded correctly
    return Enclosed(np.array(high), np.array(low) if fine else None, np.array(abs(low) * (UNIT if fine else 1.0)))


def _rotary(attention: RotaryAttention, atoms: Atoms) -> Enclosed:
    """Queries and keys turned by ``angle = (length * time) * frequency``, its products counted."""
    a, X, times = attention, atoms.points, atoms.times
    assert times is not None
    length = float(len(np.unique(times))) if a.length is None else a.length
    angles = (Enclosed.exact(times, fine=X.fine) * length)[:, None] * a.frequencies
    cos, sin = functions.cos_sin(angles)
    Q = _turn(_shifted(X @ a.Q.T, a.query_bias) * a.scale, cos, sin, a.layout)
    K = _turn(_shifted(X @ a.K.T, a.key_bias), cos, sin, a.layout)
    values = _shifted(X @ a.V.T, a.value_bias)
    return _softmax_rows(lambda rows: Q[rows] @ K.T, values, replace(atoms, masked=a.masked))


def _turn(z: Enclosed, cos: Enclosed, sin: Enclosed, layout: str) -> Enclosed:
    half, k = cos.shape[1], z.shape[1]
    pairs = np.arange(2 * half).reshape((half, 2) if layout == "adjacent" else (2, half))
    first, second = pairs.T if layout == "adjacent" else pairs
    a, b = z[:, first], z[:, second]
    turned = _columns([a * cos - b * sin, a * sin + b * cos, z[:, 2 * half :]])
    where = np.concatenate([first, second, np.arange(2 * half, k)])
    return turned[:, np.argsort(where)]


def _scores(attention: ScoreAttention, atoms: Atoms) -> Enclosed | None:
    """Composed logits: features that are normalised and turned, a cap, a bias; the sink is one more term of each sum."""
    a, X = attention, atoms.points
    features = [
        _feature(X, *part, atoms)
        for part in (
            (a.Q, a.query_bias, a.query_norm),
            (a.K, a.key_bias, a.key_norm),
            (a.V, a.value_bias, a.value_norm),
        )
    ]
    if any(feature is None for feature in features):
        return None
    Q, K, values = features
    assert Q is not None
    assert K is not None
    assert values is not None
    m, near = len(atoms.weights), np.zeros(len(atoms.weights))
    places = Enclosed.exact(near, fine=X.fine)
    count = a.length if a.length is not None or atoms.times is None else float(len(np.unique(atoms.times)))
    if a.causal:
        assert count is not None
        assert atoms.times is not None
        near, places = count * atoms.times, Enclosed.exact(atoms.times, fine=X.fine) * count
    if a.rotation is not None:
        cos, sin = functions.cos_sin(places[:, None] * a.rotation.frequencies)
        Q, K = (_turn(z, cos, sin, a.rotation.layout) for z in (Q, K))
    Q, parts, with_mass = Q * a.scale, [], append_columns(values, np.ones((m, 1)))
    for rows in _rows(m, 16):
        S = Q[rows] @ K.T
        S = S if a.cap is None else functions.tanh(S / a.cap) * a.cap
        S = S if a.bias is None else S + _position_bias(a.bias, places, near, rows)
        hidden = None if a.mask is None else a.mask.hidden(near[rows], near)
        top = (S.high if hidden is None else np.where(hidden, -np.inf, S.high)).max(axis=1, keepdims=True)
        top = top if a.sink is None else np.maximum(top, a.sink)
        E = functions.exp(S - top)
        E = E if atoms.uniform else E * atoms.weights
        sums = (E if hidden is None else E.where(~hidden)) @ with_mass
        mass = sums[:, -1:]
        if a.sink is not None:
            assert count is not None
            mass = mass + functions.exp(Enclosed.exact(np.full_like(top, a.sink), fine=X.fine) - top) / count * _total(
                atoms
            )
        parts.append(sums[:, :-1] / mass)
    return _stack(parts)


def _feature(X: Enclosed, W: Array, b: Array | None, norm: AttentionMap | None, atoms: Atoms) -> Enclosed | None:
    z = _shifted(X @ W.T, b)
    return z if norm is None else _image(norm, replace(atoms, points=z))


def _position_bias(bias: PositionBias, places: Enclosed, near: Array, rows: slice) -> Enclosed:
    apart = places[None, :] - places[rows][:, None]
    # where the sign is not known, the offset is within its error
    slope = (apart * (-bias.slope * np.sign(apart.high))).widened(2.0 * abs(bias.slope) * apart.radius)
    return slope if bias.table is None else slope + PositionBias(table=bias.table).at(near[None, :] - near[rows, None])


def _gated(attention: GatedAttention, atoms: Atoms) -> Enclosed | None:
    values = _image(attention.map, atoms)
    gate = functions.expit(_shifted(atoms.points @ attention.gate.T, attention.gate_bias))
    return None if values is None else values * gate


def _columns(parts: list[Enclosed]) -> Enclosed:
    return _stack([part.T for part in parts]).T


def _multi_head(attention: MultiHeadAttention, atoms: Atoms) -> Enclosed | None:
    total: Enclosed | None = None
    for i, head in enumerate(attention.heads):
        values = _image(head, atoms)
        if values is None:
            return None
        term = values if attention.outputs is None else values @ attention.outputs[i].T
        total = term if total is None else total + term
    assert total is not None
    return _shifted(total, attention.output_bias)


def _norm(attention: LayerNorm, atoms: Atoms) -> Enclosed:
    """``gain (x - mean) / sqrt(var + eps) + bias``, each token scaled by a power of two near its size."""
    d = atoms.points.shape[1]
    mean_of = np.full((d, 1), 1.0)
    x = atoms.points
    power = -np.frexp(np.maximum(np.abs(x.high).max(axis=1, keepdims=True), math.sqrt(attention.eps)))[1]
    x = x.scaled(power)
    y = x - (x @ mean_of) / float(d) if attention.center else x
    # sizes once more: what is left may be far smaller than the token
    again = -np.frexp(np.maximum(np.abs(y.high).max(axis=1, keepdims=True), np.ldexp(math.sqrt(attention.eps), power)))[
        1
    ]
    y, power = y.scaled(again), power + again
    eps = Enclosed.exact(np.full(power.shape, attention.eps), fine=x.fine).scaled(power).scaled(power)
    z = y / functions.sqrt(((y * y) @ mean_of) / float(d) + eps) * attention.gain
    return _shifted(z, attention.bias)


def _tanh_gelu(s: Enclosed) -> Enclosed:
    cubic = s + s * s * s * TANH_GELU[1]
    return s * functions.expit(cubic * (2.0 * TANH_GELU[0]))


_ACTIVATIONS: dict[str, Callable[[Enclosed], Enclosed]] = {
    "relu": lambda s: s.clipped(),
    "gelu": functions.gelu,
    "gelu_tanh": _tanh_gelu,
    "silu": functions.silu,
    "tanh": functions.tanh,
    "identity": lambda s: s,
}


def _mlp(attention: MLP, atoms: Atoms) -> Enclosed | None:
    activation = _ACTIVATIONS.get(attention.activation)
    if activation is None:
        return None
    hidden = activation(_shifted(atoms.points @ attention.U.T, attention.b))
    return _shifted(hidden @ attention.W.T, attention.output_bias)


def _feed_forward(attention: FeedForward, atoms: Atoms) -> Enclosed | None:
    activation = _ACTIVATIONS.get(attention.activation)
    if activation is None:
        return None
    hidden = _shifted(atoms.points @ attention.up.T, attention.up_bias)
    if attention.gate is None:
        hidden = activation(hidden)
    else:
        hidden = activation(_shifted(atoms.points @ attention.gate.T, attention.gate_bias)) * hidden
    return _shifted(hidden @ attention.down.T, attention.down_bias)


def _residual(attention: Residual, atoms: Atoms) -> Enclosed | None:
    moved = _image(attention.map, atoms)
    return None if moved is None else atoms.points + moved * attention.scale


def _compose(attention: Compose, atoms: Atoms) -> Enclosed | None:
    for part in attention.maps:
        points = _image(part, atoms)
        if points is None:
            return None
        atoms = replace(atoms, points=points)
    return atoms.points


def _sum(attention: Sum, atoms: Atoms) -> Enclosed | None:
    total: Enclosed | None = None
    for part in attention.maps:
        points = _image(part, atoms)
        if points is None:
            return None
        total = points if total is None else total + points
    return total


IMAGES: dict[type[AttentionMap], Rule] = {
    SoftmaxAttention: lambda a, atoms: _head(a.projections(), atoms),
    L2Attention: lambda a, atoms: _head(a.projections(), atoms),
    SinkhornAttention: _sinkhorn,
    **dict.fromkeys(_POINTWISE, _pointwise),
    MaskedAttention: lambda a, atoms: _image(a.attention, replace(atoms, masked=True)),
    MultiHeadAttention: _multi_head,
    RotaryAttention: _rotary,
    ScoreAttention: _scores,
    GatedAttention: _gated,
    LayerNorm: _norm,
    RMSNorm: _norm,
    MLP: _mlp,
    FeedForward: _feed_forward,
    Residual: _residual,
    Sum: _sum,
    Compose: _compose,
    TransformerBlock: _compose,
}
