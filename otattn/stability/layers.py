"""Every layer and head of a real model on windows of real tokens: how much each stretches, and what was proved about it.

Text becomes windows (:func:`otattn.models.text_windows`), windows become the tokens that each layer's attention sees
(:meth:`otattn.models.Transformer.walk`), and each head is measured on them. Finished heads are kept on disk, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm.auto import tqdm

from otattn import _validate as check
from otattn.attention import AttentionMap, MaskedAttention, SoftmaxAttention
from otattn.attention.rotary import RotaryAttention
from otattn.data.archive import read_npz
from otattn.errors import StoreError
from otattn.lipschitz import bounds
from otattn.lipschitz.growth import Exponent, fit_exponent, local_growth
from otattn.lipschitz.rotary_bounds import rotary_row_bound
from otattn.models import Transformer
from otattn.models.layer import ModelLayer
from otattn.stability.fingerprint import fingerprint
from otattn.stability.samplers import window_pairs
from otattn.stability.study import stability_study

__all__ = ["LayerMeasurements", "head_gamma", "in_span", "measure_layers"]

Array = NDArray[np.float64]
FORMAT = 1
_FIELDS = ("particle", "splitting", "radii", "domain_radius", "norms", "gamma", "published", "own", "ratios")
REAL = 1e-10


@dataclass(frozen=True, eq=False)
class LayerMeasurements:
    """What was measured; axes are (layer, head, window, n) where they apply.

    Attributes
    ----------
    layers, heads : tuple of int
        Which layers and heads, in the order of the axes.
    n_values : ndarray (m,)
        The local constants are at the first n tokens of each window.
    particle, splitting : ndarray (L, H, w, m)
        Parts of the W_2 local constant, see :func:`otattn.local_lipschitz`. Values are those of a head before its output
        matrix.
    radii : ndarray (L, w, m)
        Largest norm of the first n tokens that the attention sees.
    domain_radius : ndarray (L,)
        Largest norm that the normalisation in front of the layer allows.
    norms : ndarray (L, H, 2)
        Spectral norms of A and V. For rotary heads A is the form at offset 0.
    gamma : ndarray (L, H)
        ``max(-gamma_min, gamma_max / 8)`` over the real eigenvalues of A, the rate of the published lower bounds.
    published, own : ndarray (L, H, m)
        The published upper bound for n tokens in the ball of radius ``radii.max`` over windows, and the least of our
        closed-form ones. ``published`` is nan for rotary heads: no published theorem covers them.
    ratios : ndarray (L, H, pairs)
        Stability ratios of pairs of different runs of tokens; 0 pairs when none were asked for.
    p : float
        Order of the Wasserstein distance of ``ratios``.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    n_values: Array
    particle: Array
    splitting: Array
    radii: Array
    domain_radius: Array
    norms: Array
    gamma: Array
    published: Array
    own: Array
    ratios: Array
    p: float

    @property
    def values(self) -> Array:
        """The W_2 local constants, ``max(particle, splitting)``."""
        return np.maximum(self.particle, self.splitting)

    @property
    def stability(self) -> Array:
        """The largest ratio of each head, ``(L, H)``: its empirical stability constant."""
        if self.ratios.shape[2] == 0:
            raise ValueError("stability needs pairs, received a measurement without; measure with n_pairs >= 1.")
        return np.asarray(self.ratios.max(axis=2))

    def exponent(self, layer: int | None = None, head: int | None = None) -> Exponent:
        """Growth ``particle ~ n^exponent``, averaged over all layers and heads that are not named.

        The exponent of a geometric mean is the mean of the exponents; its standard error is over windows.
        """
        logs = np.log(self._pick(self.particle, layer, head))
        return fit_exponent(self.n_values, np.exp(logs.mean(axis=(0, 1))))

    def _pick(self, array: Array, layer: int | None, head: int | None) -> Array:
        for axis, (name, wanted, known) in enumerate((("layer", layer, self.layers), ("head", head, self.heads))):
            if wanted is not None:
                if wanted not in known:
                    raise ValueError(f"{name} must be one of {list(known)}, received {wanted!r}; measure it first.")
                array = array.take([known.index(wanted)], axis=axis)
        return array

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, ready for JSON (nan becomes None)."""
        out: dict[str, Any] = {"layers": list(self.layers), "heads": list(self.heads), "p": self.p}
        out["n"] = [int(n) for n in self.n_values]
        for name in _FIELDS:
            value = getattr(self, name)
            out[name] = np.where(np.isnan(value), None, value.astype(object)).tolist()
        return out

    def __repr__(self) -> str:
        L, H, w, _ = self.particle.shape
        return f"LayerMeasurements(layers={L}, heads={H}, windows={w}, n={[int(n) for n in self.n_values]})"


def measure_layers(
    model: Transformer,
    token_ids: ArrayLike,
    *,
    n_values: Sequence[int] = (16, 32, 64, 128),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    n_pairs: int = 16,
    p: float = 2,
    tol: float = 1e-6,
    rng: int = 0,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> LayerMeasurements:
    """Local constants, radii, gamma, bounds and stability ratios of the heads of a model on its own tokens.

    Parameters
    ----------
    model : Transformer
        From :func:`otattn.models.bert`, ``gpt2`` or ``llama``.
    token_ids : array_like of int (windows, length)
        See :func:`otattn.models.text_windows`.
    n_values : sequence of int
        Increasing numbers of tokens, at most ``length``.
    layers, heads : sequence of int, optional
        Which ones; all by default.
    n_pairs : int
        Pairs of runs of ``length // 2`` tokens for the stability ratios; 0 leaves them out.
    p : float
        Order of the Wasserstein distance of these ratios (conditional for causal heads).
    tol : float
        Residual of the singular value solver.
    rng : int
        Seed of the pairs.
    cache : path, optional
        Folder for finished heads. It may hold several measurements: each has a subfolder named by a hash of weights, tokens
        and options.
    progress : bool
        A bar on stderr.

    Raises
    ------
    ValueError
        Sizes or indices that do not fit.
    StoreError
        A file of the cache is damaged.
    """
    ids = model.ids(token_ids)
    sizes = [check.count(n, "n_values") for n in n_values]
    if not sizes or sizes != sorted(set(sizes)) or sizes[-1] > ids.shape[1]:
        raise ValueError(f"n_values must increase up to at most the window length {ids.shape[1]}, received {sizes}.")
    which = _chosen(layers, model.num_layers, "layers")
    count = _chosen(heads, model.config.num_heads, "heads")
    check.count(n_pairs, "n_pairs", least=0)
    order = check.check_order(p)
    check.positive(tol, "tol")
    if isinstance(rng, bool) or not isinstance(rng, (int, np.integer)) or rng < 0:
        raise TypeError(f"rng must be a non-negative integer seed here (results are kept on disk), received {rng!r}.")
    store = _Store(cache, model, ids, (tuple(sizes), n_pairs, order, float(tol), int(rng)))
    found = {(i, h): kept for i in which for h in count if (kept := store.get(i, h)) is not None}
    missing = [i for i in which if any((i, h) not in found for h in count)]
    total = len(which) * len(count)
    with tqdm(total=total, initial=len(found), desc="heads", unit="head", disable=not progress, leave=False) as bar:
        for layer, _, seen in model.walk(ids, stop=missing[-1] + 1) if missing else ():
            if layer.index not in missing:
                continue
            for h in count:
                key = layer.index, h
                if key not in found:
                    found[key] = _measure(layer, h, seen, sizes, n_pairs, order, tol, int(rng))
                    store.put(*key, found[key])
                    bar.update()
    per_head = {name: np.stack([np.stack([found[i, h][name] for h in count]) for i in which]) for name in _FIELDS}
    for name in ("radii", "domain_radius"):
        per_head[name] = per_head[name][:, 0]
    fields = {name: check.frozen(value) for name, value in per_head.items()}
    return LayerMeasurements(which, count, check.frozen(np.asarray(sizes, dtype=np.float64)), p=order, **fields)


def _chosen(given: Sequence[int] | None, total: int, name: str) -> tuple[int, ...]:
    if given is None:
        return tuple(range(total))
    out = sorted({check.count(i, name, least=0) for i in given})
    if not out or out[-1] >= total:
        raise ValueError(f"{name} must be indices from 0 to {total - 1}, received {list(given)}; choose among them.")
    return tuple(out)


def _measure(
    layer: ModelLayer, h: int, X: Array, sizes: list[int], n_pairs: int, p: float, tol: float, seed: int
) -> dict[str, Array]:
    """All that is kept of one head."""
    head = layer.heads[h]
    reduced, Z = in_span(head, X)
    growth = local_growth([reduced], Z, n_values=sizes, tol=tol)
    lengths = np.linalg.norm(X, axis=2)
    radii = np.stack([lengths[:, :n].max(axis=1) for n in sizes], axis=1)
    upper = [_bounds(reduced, float(R), n) for R, n in zip(radii.max(axis=0), sizes, strict=True)]
    ratios = np.zeros(0)
    if n_pairs:
        sampler = window_pairs(X, max(1, X.shape[1] // 2), causal=head.causal)
        child = np.random.SeedSequence(seed, spawn_key=(layer.index, h))
        ratios = stability_study(head, sampler, n_pairs=n_pairs, p=p, rng=child, progress=False).ratios
    inner = reduced.attention if isinstance(reduced, MaskedAttention) else reduced
    assert isinstance(inner, (SoftmaxAttention, RotaryAttention))
    A = inner.A if isinstance(inner, SoftmaxAttention) else inner.form(0)
    return {
        "particle": growth.particle[0],
        "splitting": growth.splitting[0],
        "radii": radii,
        "domain_radius": np.asarray(layer.domain.max_norm),
        "norms": np.array([np.linalg.norm(A, 2), np.linalg.norm(inner.V, 2)]),
        "gamma": np.asarray(head_gamma(head)),
        "published": np.array([published for published, _ in upper]),
        "own": np.array([own for _, own in upper]),
        "ratios": np.asarray(ratios),
    }


def _bounds(head: AttentionMap, radius: float, n: int) -> tuple[float, float]:
    """The published upper bound for n tokens (nan where there is none) and the least of our own."""
    if isinstance(head, RotaryAttention):
        return float("nan"), rotary_row_bound(head, radius=radius, n=n).value
    theorem = bounds.castin2024_masked if isinstance(head, MaskedAttention) else bounds.castin2024_discrete
    table = [b for b in bounds.table(head, radius=radius, n=n) if b.kind == "upper" and b.source.startswith("otattn")]
    return theorem(head, radius=radius, n=n).value, min(b.value for b in table)


def head_gamma(head: AttentionMap) -> float:
    """``max(-gamma_min, gamma_max / 8, 0)`` over the real eigenvalues of A (at offset 0 for rotary heads).

    The eigenvalues of ``A = s K^T Q`` other than 0 are those of the k x k matrix ``s Q K^T``.

    Raises
    ------
    TypeError
        The head is no softmax or rotary attention, masked or not.

    Examples
    --------
    >>> head_gamma(SoftmaxAttention([[-2.0, 0.0], [0.0, 3.0]], [[1.0, 0.0]]))
    2.0
    """
    inner = head.attention if isinstance(head, MaskedAttention) else head
    if isinstance(inner, RotaryAttention):
        M = inner.scale * inner.Q @ inner.K.T
    elif isinstance(inner, SoftmaxAttention):
        M = inner.A if inner.factors is None else inner.factors[0] @ inner.factors[1].T
    else:
        raise TypeError(f"head must be softmax or rotary attention, masked or not, received {type(head).__name__}.")
    values = np.linalg.eigvals(M)
    real = values.real[np.abs(values.imag) <= REAL * float(np.abs(values).max(initial=0.0))]
    if real.size == 0:
        return 0.0
    return float(max(-real.min(), real.max() / 8.0, 0.0))


def in_span(head: AttentionMap, X: ArrayLike) -> tuple[AttentionMap, Array]:
    """The head and the tokens ``X (..., d)`` in an orthonormal basis of what the head sees.

    Queries, keys and values see a token through its projection on the ``2k + e`` rows of Q, K and V. In coordinates of their
    span nothing about the head's Jacobian changes but its dimension: ``J = J_reduced (I x B^T)`` with ``B^T B = I``, so
    singular values are the same. Distances between tokens do change.

    Examples
    --------
    >>> head = SoftmaxAttention.from_qkv(np.eye(1, 9), np.eye(1, 9), np.eye(1, 9, 4))
    >>> reduced, Z = in_span(head, np.ones((5, 9)))
    >>> reduced.in_dim, Z.shape
    (2, (5, 2))
    """
    tokens = check.as_float_array(X, "X")
    inner = head.attention if isinstance(head, MaskedAttention) else head
    if isinstance(inner, RotaryAttention):
        q, k = inner.Q, inner.K
    elif isinstance(inner, SoftmaxAttention) and inner.factors is not None:
        q, k = inner.factors[0], inner.factors[1]
    else:
        return head, tokens
    rows = np.concatenate([q, k, inner.V])
    if len(rows) >= rows.shape[1]:
        return head, tokens
    _, s, Vt = np.linalg.svd(rows, full_matrices=False)
    keep = s > s.max() * len(rows) * np.finfo(np.float64).eps
    B = Vt[keep if keep.any() else slice(0, 1)].T
    out: AttentionMap
    if isinstance(inner, RotaryAttention):
        out = inner.with_factors(q @ B, k @ B, inner.V @ B)
    else:
        assert inner.factors is not None
        out = SoftmaxAttention.from_qkv(
            q @ B, k @ B, inner.V @ B, scale=1.0, query_bias=inner.factors[2], value_bias=inner.value_bias
        )
        out = MaskedAttention(out) if isinstance(head, MaskedAttention) else out
    return out, np.asarray(tokens @ B)


class _Store:
    """A folder with one file a finished head; without a folder nothing is kept."""

    def __init__(
        self, path: str | os.PathLike[str] | None, model: Transformer, ids: NDArray[Any], options: Any
    ) -> None:
        self.folder: Path | None = None
        if path is None:
            return
        key = fingerprint(FORMAT, model.checkpoint.fingerprint, repr(model.config), ids, options)
        self.folder = Path(path) / key[:32]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StoreError(f"cache must be a folder that can be written, received {path} ({exc}).") from exc

    def _file(self, layer: int, head: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer{layer:03d}-head{head:03d}.npz"

    def get(self, layer: int, head: int) -> dict[str, Array] | None:
        """The arrays of a finished head, None when it is not finished."""
        if self.folder is None or not (file := self._file(layer, head)).exists():
            return None
        try:
            arrays = read_npz(file, _FIELDS)
            return {name: np.asarray(arrays[name], dtype=np.float64) for name in _FIELDS}
        except (ValueError, KeyError) as exc:
            raise StoreError(
                f"{file} must be a finished head, but is damaged ({exc}); delete it to measure anew."
            ) from exc

    def put(self, layer: int, head: int, arrays: dict[str, Array]) -> None:
        """Keep a finished head: the whole file appears at once."""
        if self.folder is None:
            return
        file = self._file(layer, head)
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(draft, "wb") as stream:
                np.savez(stream, allow_pickle=False, **arrays)  # type: ignore[arg-type]
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(draft, file)
        except OSError as exc:
            raise StoreError(
                f"{file} must be writable, but writing it failed ({exc}); free space or take another folder."
            ) from exc
