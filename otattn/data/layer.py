"""One attention layer of a trained model with the tokens that enter it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._files.npz import names_npz, outline_npy, outline_npz, read_npy, read_npz
from otattn.attention import AttentionMap, MaskedAttention, MultiHeadAttention, SoftmaxAttention

__all__ = ["SampleLayer", "load_layer"]

Array = NDArray[np.float64]

PROJECTIONS = ("query_weight", "key_weight", "value_weight")
BIASES = ("query_bias", "key_bias", "value_bias")
OUTPUT = ("output_weight", "output_bias")
MATRICES = ("A", "V")
OTHERS = ("num_heads", "hidden_states", "token_ids", "bias")
KEYS = frozenset((*PROJECTIONS, *BIASES, *OUTPUT, *MATRICES, *OTHERS))
_PARTS = "q k v query key value output bias weight norm scale mask heads rotary lora"
"""Words in the names of arrays that would change a layer."""
MAX_HEADS = 4096


@dataclass(frozen=True, eq=False)
class SampleLayer:
    """A multi-head attention layer and windows of tokens that enter it.

    Attributes
    ----------
    hidden_states : (windows, length, d)
        Tokens as they enter the layer, float64; no windows (``(0, 0, d)``) when the file had none.
    heads : tuple of AttentionMap
        Each maps R^d to its own values R^e, biases included: SoftmaxAttention, but for layers of a model of another kind.
    outputs : tuple of (D, e)
        The output matrix of each head.
    attention : AttentionMap
        ``sum_h W_h Gamma^(h)`` plus the output bias, masked where the heads are.
    token_ids : (windows, length) int64, or None
        Indices of the tokens in the model's vocabulary.
    origin : str
        Where the layer and the tokens come from.
    first_head : int
        Number of the first of ``heads`` in the layer that they are of.
    """

    hidden_states: Array
    heads: tuple[AttentionMap, ...]
    outputs: tuple[Array, ...]
    attention: AttentionMap
    token_ids: NDArray[np.int64] | None
    origin: str
    first_head: int = 0

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

    def softmax_heads(self, what: str) -> tuple[SoftmaxAttention, ...]:
        """The heads, which must be plain softmax attention for ``what`` is asked for.

        Raises
        ------
        ValueError
            Heads are masked, rotary or of composed logits.
        """
        plain = tuple(head for head in self.heads if isinstance(head, SoftmaxAttention))
        if len(plain) < len(self.heads):
            kind = next(head for head in self.heads if not isinstance(head, SoftmaxAttention)).kind
            raise ValueError(
                f"{what} must be asked of heads of plain softmax attention, received {kind} in {self.origin}; measure such heads "
                "with local_lipschitz and stability_study, and bound them with enclose_lipschitz."
            )
        return plain

    def of_head(self, head: int) -> SampleLayer:
        """The same layer with one head only: its values through its output matrix, without output bias."""
        if isinstance(head, bool) or not 0 <= head < len(self.heads):
            raise ValueError(f"head must be from 0 to {len(self.heads) - 1}, received {head}.")
        own = self.heads[head]
        inner, outputs = own.unmasked, (self.outputs[head],)
        whole: AttentionMap = MultiHeadAttention([inner], outputs)
        if inner is not own:
            whole = MaskedAttention(whole)
        return replace(self, heads=(own,), outputs=outputs, attention=whole, first_head=head)

    def __repr__(self) -> str:
        windows, length, d = self.hidden_states.shape
        return f"SampleLayer(heads={len(self.heads)}, dim={d}, windows={windows} of {length} tokens)"


def load_layer(
    weights_npz: str | PathLike[str], tokens_npy: str | PathLike[str] | None = None, *, with_tokens: bool = True
) -> SampleLayer:
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
    with_tokens : bool
        False leaves out the tokens that the weights file may hold.

    Notes
    -----
    All shapes are checked in the headers of the files before any array is read, arrays that are not needed are not
    read, and arrays that would become more than 4 GiB as float64 (or far more than the file) are refused.

    Raises
    ------
    FileNotFoundError
        A file does not exist.
    ValueError
        Missing or contradictory keys, shapes that do not fit, pickled or non-finite data, a damaged or
        oversized file.
    """
    own = with_tokens and tokens_npy is None
    wanted = KEYS if own else KEYS - {"hidden_states", "token_ids"}
    name = "hidden_states" if tokens_npy is None else "tokens_npy"
    strange = [name for name in names_npz(weights_npz) if _doubtful(name)]
    if strange:
        raise ValueError(
            f"arrays of a layer in {weights_npz} must be among {', '.join(sorted(KEYS))}, received {', '.join(strange[:4])}: is "
            "a name misspelt? Rename it, or leave it out."
        )
    shapes = outline_npz(weights_npz, wanted)
    if "num_heads" in shapes and shapes["num_heads"].size == 1:
        shapes |= read_npz(weights_npz, ["num_heads"])
    outline = shapes.get("hidden_states") if tokens_npy is None else outline_npy(tokens_npy)
    _check_shapes(shapes, outline, shapes.get("token_ids"), name)
    arrays = read_npz(weights_npz, wanted)
    tokens = arrays.get("hidden_states") if tokens_npy is None else read_npy(tokens_npy)
    return build_layer(arrays, tokens, arrays.get("token_ids"), origin=f"read from {weights_npz}", tokens_name=name)


def _doubtful(name: str) -> bool:
    """Not a name that is read, but like one, or of a part of attention: to ignore it would be another map."""
    said = set(re.split(r"[^a-z]+", name.lower()))
    return name not in KEYS and bool(
        said & set(_PARTS.split()) or get_close_matches(name.lower(), [key.lower() for key in KEYS], n=1, cutoff=0.75)
    )


def build_layer(
    arrays: Mapping[str, NDArray[Any]],
    tokens: NDArray[Any] | None,
    token_ids: NDArray[Any] | None,
    *,
    origin: str,
    tokens_name: str = "hidden_states",
) -> SampleLayer:
    """The layer of named arrays, all shapes checked."""
    _check_shapes(arrays, tokens, token_ids, tokens_name)
    heads = _from_matrices(arrays) if "A" in arrays else _from_weights(arrays)
    outputs = _outputs(arrays, heads, summed="A" in arrays)
    bias = check.vector(arrays["output_bias"], "output_bias") if "output_bias" in arrays else None
    attention = MultiHeadAttention(heads, outputs, output_bias=bias)
    states = _windows(tokens, tokens_name, heads[0].in_dim)
    ids = None
    if token_ids is not None:
        ids = token_ids.astype(np.int64).reshape(states.shape[:2])
        ids.flags.writeable = False
    assert attention.outputs is not None
    return SampleLayer(states, heads, attention.outputs, attention, ids, origin)


def _check_shapes(
    arrays: Mapping[str, NDArray[Any]], tokens: NDArray[Any] | None, token_ids: NDArray[Any] | None, tokens_name: str
) -> None:
    """Names, shapes and types of arrays, or of their outlines (the number of heads is read)."""
    weights = [key for key in PROJECTIONS if key in arrays]
    matrices = [key for key in MATRICES if key in arrays]
    if weights and matrices:
        raise ValueError(
            f"the file must hold either layer weights or the matrices A and V, received {weights} and {matrices}; "
            "drop one of the two."
        )
    wanted = MATRICES if matrices else (*PROJECTIONS, "num_heads")
    missing = [key for key in wanted if key not in arrays]
    if missing:
        raise ValueError(
            f"the file must hold {', '.join(wanted)} (or the matrices A and V), received {sorted(arrays)}; "
            f"missing: {', '.join(missing)}."
        )
    for key, array in arrays.items():
        if key not in ("num_heads", "token_ids"):
            check.real_dtype(array.dtype, key)
    h, e, d = _check_matrices(arrays) if matrices else _check_weights(arrays)
    outputs = e if matrices else h * e
    if "output_weight" in arrays:
        W = arrays["output_weight"]
        if W.ndim != 2 or W.shape[1] != h * e or not W.size:
            raise ValueError(
                f"output_weight must have shape (any, {h * e}), received {W.shape}; check it or transpose it."
            )
        outputs = len(W)
    if "output_bias" in arrays and arrays["output_bias"].shape != (outputs,):
        raise ValueError(f"output_bias must have {outputs} entries, received shape {arrays['output_bias'].shape}.")
    if tokens is None:
        return
    check.real_dtype(tokens.dtype, tokens_name)
    if tokens.ndim not in (2, 3) or tokens.size == 0 or tokens.shape[-1] != d:
        raise ValueError(
            f"{tokens_name} must have shape (n, {d}) or (windows, n, {d}), received {tokens.shape}; check it or transpose it."
        )
    if token_ids is not None and (token_ids.dtype.kind not in "iu" or token_ids.size != tokens.size // d):
        raise ValueError(
            f"token_ids must hold one integer a token, {tokens.shape[:-1]}, received {token_ids.dtype} of shape "
            f"{token_ids.shape}; drop it or write it again."
        )


def _windows(tokens: NDArray[Any] | None, name: str, d: int) -> Array:
    """Tokens as windows; their shape has been checked."""
    if tokens is None:
        return check.frozen(np.zeros((0, 0, d)))
    out = check.as_float_array(tokens, name)
    return check.frozen(out[None] if out.ndim == 2 else out)


def _head_count(value: NDArray[Any]) -> int:
    if value.size != 1 or value.dtype.kind not in "iu" or not 1 <= value.item() <= MAX_HEADS:
        raise ValueError(
            f"num_heads must be one integer from 1 to {MAX_HEADS}, received {np.array2string(value, threshold=4)} "
            f"of dtype {value.dtype}; write it again."
        )
    return int(value.item())


def _check_weights(arrays: Mapping[str, NDArray[Any]]) -> tuple[int, int, int]:
    """Number of heads, dimension of a head's values and of the tokens."""
    h = _head_count(arrays["num_heads"])
    Q, K, V = (arrays[key] for key in PROJECTIONS)
    for key in PROJECTIONS:
        if arrays[key].ndim != 2 or not arrays[key].size:
            raise ValueError(f"{key} must have 2 dimensions, none of them 0, received shape {arrays[key].shape}.")
    if K.shape != Q.shape:
        raise ValueError(
            f"key_weight must have the shape {Q.shape} of query_weight, received {K.shape}; repeat the keys and values "
            "of grouped-query attention once a query head."
        )
    if V.shape[1] != Q.shape[1]:
        raise ValueError(f"value_weight must have {Q.shape[1]} columns, as query_weight has, received {V.shape}.")
    for key, W in (("query_weight", Q), ("value_weight", V)):
        if len(W) % h:
            raise ValueError(
                f"{key} must have a multiple of num_heads = {h} rows, received shape {W.shape}; correct num_heads."
            )
    for key, W in zip(BIASES, (Q, K, V), strict=True):
        if key in arrays and arrays[key].shape != (len(W),):
            raise ValueError(f"{key} must have {len(W)} entries, received shape {arrays[key].shape}.")
    return h, len(V) // h, Q.shape[1]


def _from_weights(arrays: Mapping[str, NDArray[Any]]) -> tuple[SoftmaxAttention, ...]:
    h = _head_count(arrays["num_heads"])
    Q, K, V = (check.matrix(arrays[key], key) for key in PROJECTIONS)
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


def _check_matrices(arrays: Mapping[str, NDArray[Any]]) -> tuple[int, int, int]:
    """As `_check_weights`, for the matrices A and V."""
    shapes = [(1, *arrays[key].shape) if arrays[key].ndim == 2 else arrays[key].shape for key in MATRICES]
    A, V = shapes
    stacked = len(A) == len(V) == 3 and arrays["A"].ndim == arrays["V"].ndim and A[0] == V[0]
    if not stacked or 0 in (*A, *V) or A[0] > MAX_HEADS or not A[1] == A[2] == V[2]:
        raise ValueError(
            "A and V must be one matrix each, (d, d) and (e, d), or stacked, (h, d, d) and (h, e, d), received "
            f"{arrays['A'].shape} and {arrays['V'].shape}; stack them with numpy.stack."
        )
    h, e, d = V
    if "num_heads" in arrays and _head_count(arrays["num_heads"]) != h:
        raise ValueError(f"num_heads must be {h}, the length of A, received {arrays['num_heads'].item()}; drop it.")
    for key, size in (("bias", d), ("value_bias", e)):
        if key in arrays and arrays[key].size != h * size:
            raise ValueError(f"{key} must have shape ({h}, {size}), received {arrays[key].shape}; give one row a head.")
    return h, e, d


def _from_matrices(arrays: Mapping[str, NDArray[Any]]) -> tuple[SoftmaxAttention, ...]:
    A, V = (check.as_float_array(arrays[key], key) for key in MATRICES)
    if A.ndim == 2:
        A, V = A[None], V[None]
    h = len(A)
    rows: dict[str, list[Array | None]] = {"bias": [None] * h, "value_bias": [None] * h}
    for key in rows:
        if key in arrays:
            rows[key] = list(check.as_float_array(arrays[key], key).reshape(h, -1))
    each = zip(A, V, *rows.values(), strict=True)
    return tuple(SoftmaxAttention(a, v, bias=c, value_bias=b) for a, v, c, b in each)


def _outputs(arrays: Mapping[str, NDArray[Any]], heads: tuple[SoftmaxAttention, ...], *, summed: bool) -> list[Array]:
    """The output matrix of each head: columns of the output weight, else of an identity."""
    h, e = len(heads), heads[0].out_dim
    if "output_weight" in arrays:
        W = check.matrix(arrays["output_weight"], "output_weight", shape=(None, h * e))
    else:
        W = np.tile(np.eye(e), h) if summed else np.eye(h * e)
    return [W[:, i * e : (i + 1) * e] for i in range(h)]
