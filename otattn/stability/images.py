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
from collections.abc import Callable
from dataclasses import replace

import numpy as np

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
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.feed_forward import TANH_GELU, FeedForward, Perceptron
from otattn.attention.kernels import Projections
from otattn.attention.memory import blocks
from otattn.stability import functions, score_images
from otattn.stability.atoms import (
    IMAGES,
    Atoms,
    Rule,
    column,
    image_of,
    linear,
    shifted,
    softmax_rows,
    stack,
    total,
    weighted,
)
from otattn.stability.enclosed import Enclosed
from otattn.stability.potentials import column_potential

__all__ = ["IMAGES", "Atoms", "image"]


def image(attention: AttentionMap, mu: Measure, *, fine: bool = False) -> Enclosed | None:
    """``Gamma_mu`` at the atoms of positive weight, ``(m, e)``; None when no bound of the error is known.

    ``fine`` evaluates in double-double: about a hundred times the work.
    """
    with np.errstate(all="ignore"):  # what leaves float64 is not bounded, and refused
        out = image_of(attention, Atoms.of(mu, fine=fine))
    return out if out is not None and out.bounded else None


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
    K = linear(Z, head.Wk)
    centre = column(c, Z)
    Q = linear(Z, head.Wq) + linear(centre, head.Wq)
    if head.quadratic:
        Q = Q - 2.0 * linear(centre, head.Wk)
        squares = ((K * K) @ np.ones((K.shape[1], 1))).T
    Q = shifted(Q, head.bq)

    def logits(rows: slice) -> Enclosed:
        S = Q[rows] @ K.T
        return S - squares if head.quadratic else S

    return shifted(softmax_rows(logits, Z @ head.V.T, atoms) + centre @ head.V.T, head.bv)


def _sinkhorn(attention: SinkhornAttention, atoms: Atoms) -> Enclosed | None:
    if attention.n_iter is not None:
        return _stopped(attention, atoms, attention.n_iter // 2)
    c = _centre(atoms)
    Z = atoms.points - c
    offset = column_potential(attention, Z, atoms.weights)
    if offset is None:
        return None
    Q = Z @ attention.A.T
    values = softmax_rows(lambda rows: Q[rows] @ Z.T + offset, Z @ attention.V.T, atoms)
    return values + column(c, Z) @ attention.V.T


def _stopped(attention: SinkhornAttention, atoms: Atoms, sweeps: int) -> Enclosed:
    """Rows, then columns and rows ``sweeps`` times: ``E_ij`` is ``w_j`` times the kernel, up to a factor of each row."""
    c = _centre(atoms)
    Z = atoms.points - c
    S = (linear(Z, attention.A) + linear(column(c, Z), attention.A)) @ Z.T
    E = weighted(functions.exp(S - S.high.max(axis=1, keepdims=True)), atoms, slice(None))
    w = np.ones(len(atoms.weights)) if atoms.uniform else atoms.weights
    ones = np.ones((len(w), 1))
    for _ in range(sweeps):
        masses = Enclosed.exact(w[None, :], fine=Z.fine) @ (E / (E @ ones))
        E = E * w / masses
    return (E @ (Z @ attention.V.T)) / (E @ ones) + column(c, Z) @ attention.V.T


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
    parts = [
        weighted(h(Q[rows] @ X.T), atoms, rows) @ values
        for rows in blocks(len(atoms.weights), len(atoms.weights), None, 12)
    ]
    return stack(parts) / total(atoms)


def _multi_head(attention: MultiHeadAttention, atoms: Atoms) -> Enclosed | None:
    total: Enclosed | None = None
    for i, head in enumerate(attention.heads):
        values = image_of(head, atoms)
        if values is None:
            return None
        term = values if attention.outputs is None else values @ attention.outputs[i].T
        total = term if total is None else total + term
    assert total is not None
    return shifted(total, attention.output_bias)


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
    return shifted(z, attention.bias)


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


def _perceptron(attention: Perceptron, atoms: Atoms) -> Enclosed | None:
    activation = _ACTIVATIONS.get(attention.activation)
    if activation is None:
        return None
    U, b, W, c, G, g = attention.parts
    hidden = shifted(atoms.points @ U.T, b)
    hidden = activation(hidden) if G is None else activation(shifted(atoms.points @ G.T, g)) * hidden
    return shifted(hidden @ W.T, c)


def _residual(attention: Residual, atoms: Atoms) -> Enclosed | None:
    moved = image_of(attention.map, atoms)
    return None if moved is None else atoms.points + moved * attention.scale


def _compose(attention: Compose, atoms: Atoms) -> Enclosed | None:
    for part in attention.maps:
        points = image_of(part, atoms)
        if points is None:
            return None
        atoms = replace(atoms, points=points)
    return atoms.points


def _sum(attention: Sum, atoms: Atoms) -> Enclosed | None:
    total: Enclosed | None = None
    for part in attention.maps:
        points = image_of(part, atoms)
        if points is None:
            return None
        total = points if total is None else total + points
    return total


_RULES: dict[type[AttentionMap], Rule] = {
    SoftmaxAttention: lambda a, atoms: _head(a.projections(), atoms),
    L2Attention: lambda a, atoms: _head(a.projections(), atoms),
    SinkhornAttention: _sinkhorn,
    **dict.fromkeys(_POINTWISE, _pointwise),
    MaskedAttention: lambda a, atoms: image_of(a.attention, replace(atoms, masked=True)),
    MultiHeadAttention: _multi_head,
    RotaryAttention: score_images.rotary,
    ScoreAttention: score_images.scores,
    GatedAttention: score_images.gated,
    LayerNorm: _norm,
    RMSNorm: _norm,
    MLP: _perceptron,
    FeedForward: _perceptron,
    Residual: _residual,
    Sum: _sum,
    Compose: _compose,
    TransformerBlock: _compose,
}

IMAGES.update(_RULES)
