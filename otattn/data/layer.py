"""One attention layer of a trained model with the tokens that enter it."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.data.archive import read_npy, read_npz

__all__ = ["SampleLayer", "load_layer"]

Array = NDArray[np.float64]

PROJECTIONS = ("query_weight", "key_weight", "value_weight")
BIASES = ("query_bias", "key_bias", "value_bias")
OUTPUT = ("output_weight", "output_bias")
MATRICES = ("A", "V")
OTHERS = ("num_heads", "hidden_states", "token_ids", "bias")
KEYS = frozenset((*PROJECTIONS, *BIASES, *OUTPUT, *MATRICES, *OTHERS))
MAX_HEADS = 4096


@dataclass(frozen=True, eq=False)
class SampleLayer:
    """A multi-head attention layer and windows of tokens that enter it.

    Attributes
    ----------
    hidden_states : (windows, length, d)
        Tokens as they enter the layer, float64; no windows (``(0, 0, d)``) when the file had none.
    heads : tuple of SoftmaxAttention
        Each maps R^d to its own values R^e, biases included.
    outputs : tuple of (D, e)
        The output matrix of each head.
    attention : MultiHeadAttention
        ``sum_h W_h Gamma^(h)`` plus the output bias.
    token_ids : (windows, length) int64, or None
        Indices of the tokens in the model's vocabulary.
    origin : str
        Where the layer and the tokens come from.
    """

    hidden_states: Array
    heads: tuple[SoftmaxAttention, ...]
    outputs: tuple[Array, ...]
    attention: MultiHeadAttention
    token_ids: NDArray[np.int64] | None
    origin: str

    @property
    def dim(self) -> int:
        """Dimension d of the tokens."""
        return int(self.hidden_states.shape[2])

    def tokens(self, window: int = 0, n: int | None = None) -> Array:
        """The first ``n`` tokens of a window (all of them by default), shape ``(n, d)``."""
        count, length, _ = self.hidden_states.shape
        if count == 0:
            raise ValueError("tokens needs a layer with tokens, received one without; load it with tokens_npy.")
        w = check.count(window, "window", least=0)
        size = length if n is None else check.count(n, "n")
        if w >= count or size > length:
            raise ValueError(
                f"window and n must be at most {count - 1} and {length}, received {window} and {n}; "
                "choose smaller ones."
            )
        return self.hidden_states[w, :size]

    def __repr__(self) -> str:
        windows, length, d = self.hidden_states.shape
        return f"SampleLayer(heads={len(self.heads)}, dim={d}, windows={windows} of {length} tokens)"


def load_layer(weights_npz: str | PathLike[str], tokens_npy: str | PathLike[str] | None = None) -> SampleLayer:
    r"""A layer from a user's own ``.npz`` file.

    Parameters
    ----------
    weights_npz : path
        Either the weights of a layer in torch convention ``y = x W^T + b``: ``query_weight``, ``key_weight``
        ``(h k, d)``, ``value_weight (h e, d)`` and ``num_heads``, optionally ``query_bias``, ``key_bias``,
        ``value_bias``, ``output_weight (D, h e)`` and ``output_bias`` (without an output weight the heads
        are concatenated). Or the matrices themselves: ``A (d, d)`` and ``V (e, d)`` for one head,
        ``(h, d, d)`` and ``(h, e, d)`` for several, optionally ``bias`` (of the logits) and ``value_bias``,
        one row a head (without an output weight the heads are summed). Also, optionally, ``hidden_states``
        and ``token_ids``.
    tokens_npy : path, optional
        Tokens ``(n, d)`` or ``(windows, n, d)`` in an ``.npy`` file; they replace ``hidden_states``.

    Raises
    ------
    FileNotFoundError
        A file does not exist.
    ValueError
        Missing or contradictory keys, shapes that do not fit, pickled or non-finite data, a damaged or
        oversized file.
    """
    arrays = read_npz(weights_npz, KEYS)
    tokens = arrays.get("hidden_states") if tokens_npy is None else read_npy(tokens_npy)
    name = "hidden_states" if tokens_npy is None else "tokens_npy"
    ids = arrays.get("token_ids") if tokens_npy is None else None
    return build_layer(arrays, tokens, ids, origin=f"read from {weights_npz}", tokens_name=name)


def build_layer(
    arrays: dict[str, NDArray[Any]],
    tokens: NDArray[Any] | None,
    token_ids: NDArray[Any] | None,
    *,
    origin: str,
    tokens_name: str = "hidden_states",
) -> SampleLayer:
    """The layer of named arrays, all shapes checked."""
    weights = [key for key in PROJECTIONS if key in arrays]
    matrices = [key for key in MATRICES if key in arrays]
    if weights and matrices:
        raise ValueError(
            f"the file must hold either layer weights or the matrices A and V, received {weights} "
            f"and {matrices}; "
            "drop one of the two."
        )
    wanted = MATRICES if matrices else (*PROJECTIONS, "num_heads")
    missing = [key for key in wanted if key not in arrays]
    if missing:
        raise ValueError(
            f"the file must hold {', '.join(wanted)} (or the matrices A and V), received {sorted(arrays)}; "
            f"missing: {', '.join(missing)}."
        )
    heads = _from_matrices(arrays) if matrices else _from_weights(arrays)
    outputs = _outputs(arrays, heads, summed=bool(matrices))
    bias = None
    if "output_bias" in arrays:
        bias = check.vector(arrays["output_bias"], "output_bias", size=len(outputs[0]))
    attention = MultiHeadAttention(heads, outputs, output_bias=bias)
    states = _windows(tokens, tokens_name, heads[0].in_dim)
    ids = None
    if token_ids is not None:
        if token_ids.dtype.kind not in "iu" or token_ids.size != states.shape[0] * states.shape[1]:
            raise ValueError(
                f"token_ids must hold one integer a token, {states.shape[:2]}, received "
                f"{token_ids.dtype} of shape "
                f"{token_ids.shape}; drop it or write it again."
            )
        ids = token_ids.astype(np.int64).reshape(states.shape[:2])
        ids.flags.writeable = False
    assert attention.outputs is not None
    return SampleLayer(states, heads, attention.outputs, attention, ids, origin)


def _windows(tokens: NDArray[Any] | None, name: str, d: int) -> Array:
    if tokens is None:
        return check.frozen(np.zeros((0, 0, d)))
    out = check.as_float_array(tokens, name)
    if out.ndim == 2:
        out = out[None]
    if out.ndim != 3 or out.size == 0 or out.shape[2] != d:
        raise ValueError(
            f"{name} must have shape (n, {d}) or (windows, n, {d}), received {tokens.shape}; check it or transpose it."
        )
    return check.frozen(out)


def _head_count(value: NDArray[Any]) -> int:
    if value.size != 1 or value.dtype.kind not in "iu" or not 1 <= value.item() <= MAX_HEADS:
        raise ValueError(
            f"num_heads must be one integer from 1 to {MAX_HEADS}, received "
            f"{np.array2string(value, threshold=4)} "
            f"of dtype {value.dtype}; write it again."
        )
    return int(value.item())


def _from_weights(arrays: dict[str, NDArray[Any]]) -> tuple[SoftmaxAttention, ...]:
    h = _head_count(arrays["num_heads"])
    Q, K, V = (check.matrix(arrays[key], key) for key in PROJECTIONS)
    if K.shape != Q.shape:
        raise ValueError(
            f"key_weight must have the shape {Q.shape} of query_weight, received {K.shape}; repeat "
            "the keys and values "
            "of grouped-query attention once a query head."
        )
    if V.shape[1] != Q.shape[1]:
        raise ValueError(f"value_weight must have {Q.shape[1]} columns, as query_weight has, received {V.shape}.")
    for key, W in (("query_weight", Q), ("value_weight", V)):
        if len(W) % h:
            raise ValueError(
                f"{key} must have a multiple of num_heads = {h} rows, received shape {W.shape}; correct num_heads."
            )
    biases: list[list[Array | None]] = []
    for key, W in zip(BIASES, (Q, K, V), strict=True):
        b = check.vector(arrays[key], key, size=len(W)).reshape(h, -1) if key in arrays else None
        biases.append([None] * h if b is None else list(b))
    q, k, v = (W.reshape(h, -1, W.shape[1]) for W in (Q, K, V))
    return tuple(
        SoftmaxAttention.from_qkv(
            q[i], k[i], v[i], query_bias=biases[0][i], key_bias=biases[1][i], value_bias=biases[2][i]
        )
        for i in range(h)
    )


def _from_matrices(arrays: dict[str, NDArray[Any]]) -> tuple[SoftmaxAttention, ...]:
    A, V = (check.as_float_array(arrays[key], key) for key in MATRICES)
    if A.ndim == 2 and V.ndim == 2:
        A, V = A[None], V[None]
    if A.ndim != 3 or V.ndim != 3 or len(A) != len(V) or not 1 <= len(A) <= MAX_HEADS:
        raise ValueError(
            "A and V must be one matrix each, (d, d) and (e, d), or stacked, (h, d, d) and (h, e, "
            "d), received "
            f"{arrays['A'].shape} and {arrays['V'].shape}; stack them with numpy.stack."
        )
    h = len(A)
    if "num_heads" in arrays and _head_count(arrays["num_heads"]) != h:
        raise ValueError(f"num_heads must be {h}, the length of A, received {arrays['num_heads'].item()}; drop it.")
    rows: dict[str, list[Array | None]] = {}
    for key, size in (("bias", A.shape[1]), ("value_bias", V.shape[1])):
        if key not in arrays:
            rows[key] = [None] * h
            continue
        b = check.as_float_array(arrays[key], key)
        if b.size != h * size:
            raise ValueError(f"{key} must have shape ({h}, {size}), received {b.shape}; give one row a head.")
        rows[key] = list(b.reshape(h, size))
    each = zip(A, V, *rows.values(), strict=True)
    return tuple(SoftmaxAttention(a, v, bias=c, value_bias=b) for a, v, c, b in each)


def _outputs(arrays: dict[str, NDArray[Any]], heads: tuple[SoftmaxAttention, ...], *, summed: bool) -> list[Array]:
    """The output matrix of each head: columns of the output weight, else of an identity."""
    h, e = len(heads), heads[0].out_dim
    if "output_weight" in arrays:
        W = check.matrix(arrays["output_weight"], "output_weight", shape=(None, h * e))
    else:
        W = np.tile(np.eye(e), h) if summed else np.eye(h * e)
    return [W[:, i * e : (i + 1) * e] for i in range(h)]
