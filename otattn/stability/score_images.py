"""Images under maps with positions: rotary attention, composed logits, and a gate on top."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from otattn._linalg import Array
from otattn.attention import GatedAttention, PositionBias, RotaryAttention, ScoreAttention
from otattn.attention.base import AttentionMap
from otattn.attention.memory import blocks
from otattn.stability import functions
from otattn.stability.atoms import Atoms, columns, image_of, shifted, softmax_rows, stack, total
from otattn.stability.enclosed import Enclosed, append_columns

__all__ = ["gated", "rotary", "scores"]


def rotary(attention: RotaryAttention, atoms: Atoms) -> Enclosed:
    """Queries and keys turned by ``angle = (length * time) * frequency``, its products counted."""
    a, X, times = attention, atoms.points, atoms.times
    assert times is not None
    length = float(len(np.unique(times))) if a.length is None else a.length
    angles = (Enclosed.exact(times, fine=X.fine) * length)[:, None] * a.frequencies
    cos, sin = functions.cos_sin(angles)
    Q = _turn(shifted(X @ a.Q.T, a.query_bias) * a.scale, cos, sin, a.layout)
    K = _turn(shifted(X @ a.K.T, a.key_bias), cos, sin, a.layout)
    values = shifted(X @ a.V.T, a.value_bias)
    return softmax_rows(lambda rows: Q[rows] @ K.T, values, replace(atoms, masked=a.masked))


def _turn(z: Enclosed, cos: Enclosed, sin: Enclosed, layout: str) -> Enclosed:
    half, k = cos.shape[1], z.shape[1]
    pairs = np.arange(2 * half).reshape((half, 2) if layout == "adjacent" else (2, half))
    first, second = pairs.T if layout == "adjacent" else pairs
    a, b = z[:, first], z[:, second]
    turned = columns([a * cos - b * sin, a * sin + b * cos, z[:, 2 * half :]])
    where = np.concatenate([first, second, np.arange(2 * half, k)])
    return turned[:, np.argsort(where)]


def scores(attention: ScoreAttention, atoms: Atoms) -> Enclosed | None:
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
    for rows in blocks(m, m, None, 16):
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
            mass = mass + functions.exp(Enclosed.exact(np.full_like(top, a.sink), fine=X.fine) - top) / count * total(
                atoms
            )
        parts.append(sums[:, :-1] / mass)
    return stack(parts)


def _feature(X: Enclosed, W: Array, b: Array | None, norm: AttentionMap | None, atoms: Atoms) -> Enclosed | None:
    z = shifted(X @ W.T, b)
    return z if norm is None else image_of(norm, replace(atoms, points=z))


def _position_bias(bias: PositionBias, places: Enclosed, near: Array, rows: slice) -> Enclosed:
    apart = places[None, :] - places[rows][:, None]
    # where the sign is not known, the offset is within its error
    slope = (apart * (-bias.slope * np.sign(apart.high))).widened(2.0 * abs(bias.slope) * apart.radius)
    return slope if bias.table is None else slope + PositionBias(table=bias.table).at(near[None, :] - near[rows, None])


def gated(attention: GatedAttention, atoms: Atoms) -> Enclosed | None:
    values = image_of(attention.map, atoms)
    gate = functions.expit(shifted(atoms.points @ attention.gate.T, attention.gate_bias))
    return None if values is None else values * gate
