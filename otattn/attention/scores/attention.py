"""Softmax attention whose logits are made of parts: the variants behind today's model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.jacobian import JacobianOperator, finite
from otattn.attention.kernels import Values
from otattn.attention.scores.kernel import ScoreJacobian, ScoreKernel
from otattn.attention.scores.positions import Mask, PositionBias, Rotation
from otattn.attention.tokenwise import TokenwiseMap
from otattn.measures import SpaceTimeMeasure

__all__ = ["ScoreAttention"]


@dataclass(frozen=True, eq=False, init=False)
class ScoreAttention(AttentionMap):
    r"""Softmax attention with normalised queries and keys, positions, a soft cap, windows and a sink, each where given.

    A token x at position i gives the atom y at position j the logit

    .. math:: l_{ij} = c \tanh\Bigl(\frac{s}{c} \langle R_i N_q(Q x + b_q), R_j N_k(K y + b_k)\rangle\Bigr) + \beta(j - i),

    and is mapped to the average of the values :math:`N_v(V y + b_v)` of the atoms that it sees, with weights proportional to
    :math:`e^{l_{ij}}`. A sink is one more term :math:`e^{sink}` of the denominator: one more token that every token sees, whose
    value is zero. Each part is left out by default: then this is softmax attention.

    Parameters
    ----------
    Q, K : array_like (k, d)
    V : array_like (e, d)
    scale : float, optional
        The number s, ``1 / sqrt(k)`` by default (T5, GPT-Neo: 1).
    query_bias, key_bias : array_like (k,), optional
    value_bias : array_like (e,), optional
    query_norm, key_norm, value_norm : TokenwiseMap, optional
        Applied to each query, key or value, before it is turned: ``RMSNorm(gain, eps=eps)`` is the QK-norm of Qwen3,
        ``RMSNorm(numpy.full(k, k ** -0.5), eps=eps)`` for both is cosine attention.
    rotation : Rotation, optional
        The turns :math:`R_i`, by any frequencies.
    bias : PositionBias, optional
        The function :math:`\beta` (ALiBi, T5).
    cap : float, optional
        Soft cap c > 0 of the logits.
    mask : Mask, optional
        Causal, windows, blocks or any pattern.
    sink : float, optional
        Its weight is ``e^sink / length``, beside atoms of total weight one: in a sequence of n tokens ``e^sink`` beside the n
        terms ``e^l``.
    length : float, optional
        Position of time 1; by default the number of distinct times of positive mass, which is n for a sequence.

    Raises
    ------
    ValueError
        Shapes that do not fit, a cap that is not positive, a norm of another dimension.

    Notes
    -----
    With a rotation, a bias, a mask, or a sink without a ``length``, the map needs positions: it acts on space-time measures and
    sequences, position being ``length * time``. Otherwise it acts on any measure. Unlike in softmax attention the key bias
    counts as soon as there is a rotation, a norm, a cap or a sink.

    Products with the Jacobian are analytic: with ``T = s R Nq (R Nk)^T`` the logits move by ``sech^2(T / c) dT``, and the sink is
    a column of zeros of ``dT``.

    Examples
    --------
    >>> averages = ScoreAttention([[0.0]], [[0.0]], [[1.0]], mask=Mask(before=1), sink=0.0)
    >>> averages.on_tokens([[3.0], [6.0], [9.0]]).ravel()   # of two tokens and the sink's zero
    array([1.5, 3. , 5. ])

    References
    ----------
    Henry, Dachapally, Pawar, Chen, "Query-key normalization for transformers", 2020. Gemma team, "Gemma 2", 2024 (soft caps).
    Xiao, Tian, Chen, Han, Lewis, "Efficient streaming language models with attention sinks", 2024.
    """

    Q: Array
    K: Array
    V: Array
    scale: float
    query_bias: Array | None
    key_bias: Array | None
    value_bias: Array | None
    query_norm: TokenwiseMap | None
    key_norm: TokenwiseMap | None
    value_norm: TokenwiseMap | None
    rotation: Rotation | None
    bias: PositionBias | None
    cap: float | None
    mask: Mask | None
    sink: float | None
    length: float | None

    def __init__(
        self,
        Q: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
        *,
        scale: float | None = None,
        query_bias: ArrayLike | None = None,
        key_bias: ArrayLike | None = None,
        value_bias: ArrayLike | None = None,
        query_norm: TokenwiseMap | None = None,
        key_norm: TokenwiseMap | None = None,
        value_norm: TokenwiseMap | None = None,
        rotation: Rotation | None = None,
        bias: PositionBias | None = None,
        cap: float | None = None,
        mask: Mask | None = None,
        sink: float | None = None,
        length: float | None = None,
    ) -> None:
        q = check.matrix(Q, "Q")
        k, d = q.shape
        values = check.matrix(V, "V", shape=(None, d))
        e = len(values)
        parts: dict[str, Any] = {
            "Q": q,
            "K": check.matrix(K, "K", shape=(k, d)),
            "V": values,
            "scale": 1.0 / np.sqrt(k) if scale is None else _number(scale, "scale"),
            "query_bias": None if query_bias is None else check.vector(query_bias, "query_bias", size=k),
            "key_bias": None if key_bias is None else check.vector(key_bias, "key_bias", size=k),
            "value_bias": None if value_bias is None else check.vector(value_bias, "value_bias", size=e),
            "query_norm": _norm(query_norm, "query_norm", k),
            "key_norm": _norm(key_norm, "key_norm", k),
            "value_norm": _norm(value_norm, "value_norm", e),
            "rotation": _of_kind(rotation, "rotation", Rotation),
            "bias": _of_kind(bias, "bias", PositionBias),
            "cap": None if cap is None else check.positive(cap, "cap"),
            "mask": _of_kind(mask, "mask", Mask),
            "sink": None if sink is None else _number(sink, "sink"),
            "length": None if length is None else check.positive(length, "length"),
        }
        if rotation is not None and 2 * len(rotation.frequencies) > k:
            raise ValueError(
                f"rotation must turn at most k = {k} coordinates, received {len(rotation.frequencies)} pairs; give fewer."
            )
        for name, value in parts.items():
            object.__setattr__(self, name, check.frozen(value) if isinstance(value, np.ndarray) else value)

    @property
    def in_dim(self) -> int:
        return int(self.V.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.V.shape[0])

    @property
    def causal(self) -> bool:
        """True when the map needs positions, with or without a mask."""
        placed = any(part is not None for part in (self.rotation, self.bias, self.mask))
        return placed or (self.sink is not None and self.length is None)

    @property
    def _kernels(self) -> int:
        return 1 if self.cap is None else 2

    def values(self) -> tuple[Values, ...] | None:
        if self.value_norm is not None:
            return None
        return (Values(self.V, self.value_bias, "one" if self.sink is None else "at most one"),)

    def in_coordinates(self, E: Array, left: Array) -> ScoreAttention:
        if self.value_norm is not None:
            raise ValueError(
                "values must not be normalised to change coordinates, received a value_norm; leave it out."
            )
        value_bias = None if self.value_bias is None else finite(left @ self.value_bias)
        return self.with_factors(finite(self.Q @ E), finite(self.K @ E), finite(left @ self.V @ E), value_bias)

    def with_factors(
        self, Q: ArrayLike, K: ArrayLike, V: ArrayLike, value_bias: ArrayLike | None = None
    ) -> ScoreAttention:
        """All other parts with other matrices, ``(k, d')``, ``(k, d')``, ``(e', d')``, and another value bias."""
        names = set(self.__dataclass_fields__) - {"Q", "K", "V", "value_bias"}
        return ScoreAttention(Q, K, V, value_bias=value_bias, **{name: getattr(self, name) for name in names})

    def positions(self, times: Array | None, mu: Measure) -> Array | None:
        """Positions of ``times`` in the measure ``mu``; None for a map without positions."""
        if times is None:
            return None
        if self.length is not None:
            return self.length * times
        assert isinstance(mu, SpaceTimeMeasure)
        return len(np.unique(mu.times[mu.weights > 0])) * times

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return ScoreKernel(self, mu, block_size).apply(x, self.positions(times, mu))

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return ScoreKernel(self, mu, block_size).field(x, self.positions(times, mu))

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        return ScoreJacobian(ScoreKernel(self, mu, block_size)).operator()


def _number(value: Any, name: str) -> float:
    return float(check.as_float_array(value, name, ndim=0))


def _of_kind(part: Any, name: str, kind: type) -> Any:
    if part is not None and not isinstance(part, kind):
        raise TypeError(
            f"{name} must be a {kind.__name__}, received {type(part).__name__}; see otattn.attention.scores."
        )
    return part


def _norm(norm: Any, name: str, size: int) -> TokenwiseMap | None:
    if norm is None:
        return None
    if not isinstance(norm, TokenwiseMap) or (norm.in_dim, norm.out_dim) != (size, size):
        received = norm.kind if isinstance(norm, AttentionMap) else type(norm).__name__
        raise ValueError(
            f"{name} must be a token-wise map of dimension {size}, such as RMSNorm(numpy.ones({size}), eps=1e-6), received "
            f"{received}{f' of dimension {norm.in_dim}' if isinstance(norm, AttentionMap) else ''}."
        )
    return norm
