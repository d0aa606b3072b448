"""What is measured of one head of a real model: its local constants, its numbers, and what was proved about it."""

from __future__ import annotations

import io
import math
import os
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn._files.npz import read_npz
from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.attention.kernels import Projections
from otattn.attention.single_head import SingleHead
from otattn.lipschitz import bounds
from otattn.lipschitz.local.splitting import splitting_part
from otattn.lipschitz.theorem import THEOREMS
from otattn.measures.domains import Ball
from otattn.models import Transformer
from otattn.models.layer import ModelLayer
from otattn.operators.threads import single_blas_thread
from otattn.operators.windows import top_singular_windows
from otattn.stability.fingerprint import fingerprint
from otattn.stability.folder import StoreFolder, is_file
from otattn.stability.samplers import window_pairs
from otattn.stability.study import stability_study

__all__ = ["FIELDS", "HeadStore", "head_gamma", "head_shapes", "in_span", "measure_head"]

FIELDS = ("particle", "splitting", "radii", "domain_radius", "norms", "gamma", "published", "own", "ratios")
"""Names of what :func:`measure_head` gives."""
REAL = 1e-10
"""Eigenvalues count as real up to this fraction of the largest one."""


def measure_head(
    layer: ModelLayer,
    h: int,
    seen: list[Array],
    whole: Array,
    n_pairs: int,
    p: float,
    tol: float,
    seed: int,
    far: float,
) -> dict[str, Array]:
    """All that is kept of one head; ``seen`` holds the tokens ``(w, n, d)`` for each n, ``whole`` the longest windows.

    ``far`` is the largest norm in the layer's domain, which takes longer to find than what the heads share otherwise.
    """
    head = layer.heads[h]
    B = _span(head)
    reduced, spans = (head, seen) if B is None else (_reduced(head, B), [X @ B for X in seen])
    with single_blas_thread():  # once for all the small products
        particle = _particles(reduced, spans, tol)
        splitting = np.array([[splitting_part(reduced, reduced.as_measure(z)) for z in Z] for Z in spans]).T
    radii = np.stack([np.linalg.norm(X, axis=2).max(axis=1) for X in seen], axis=1)
    largest = radii.max(axis=0).tolist()
    balls = {R: Ball(R) for R in largest}  # what a head sees of one and the same ball is found once
    upper = [_bounds(reduced, balls[R], X.shape[1]) for R, X in zip(largest, seen, strict=True)]
    ratios = np.zeros(0)
    if n_pairs:
        sampler = window_pairs(whole, max(1, whole.shape[1] // 2), causal=head.causal)
        child = np.random.SeedSequence(seed, spawn_key=(layer.index, h))
        drawn = stability_study(head, sampler, n_pairs=n_pairs, p=p, rng=child, progress=False).ratios
        ratios = np.full(n_pairs, np.nan)
        ratios[: len(drawn)] = drawn
    maps = affine_maps(reduced)
    assert maps is not None
    return {
        "particle": particle,
        "splitting": splitting,
        "radii": radii,
        "domain_radius": np.asarray(far),
        "norms": np.array([np.linalg.norm(maps.Wk.T @ maps.Wq, 2), np.linalg.norm(maps.V, 2)]),
        "gamma": np.asarray(head_gamma(head)),
        "published": np.array([published for published, _ in upper]),
        "own": np.array([own for _, own in upper]),
        "ratios": ratios,
    }


def head_shapes(windows: int, sizes: int, n_pairs: int) -> dict[str, tuple[int, ...]]:
    """The shape of each array that :func:`measure_head` gives."""
    table, bound = (windows, sizes), (sizes,)
    return dict(zip(FIELDS, (table, table, table, (), (2,), (), bound, bound, (n_pairs,)), strict=True))


def _particles(head: AttentionMap, spans: list[Array], tol: float) -> Array:
    """The norms of the Jacobian at windows ``(w, n, d)`` of tokens of equal weight for each n, ``(w, m)``.

    Each search starts from the vectors of the (mostly fewer) tokens before.
    """
    found, starts = [], None
    for windows in spans:
        if starts is not None:
            padded = np.zeros(windows.shape)
            known = min(starts.shape[1], windows.shape[1])
            padded[:, :known] = starts[:, :known]
            starts = padded
        values, starts = top_singular_windows(head, windows, tol=tol, starts=starts)
        found.append(values)
    return np.array(found).T


def _bounds(head: AttentionMap, ball: Ball, n: int) -> tuple[float, float]:
    """The published upper bound for n tokens (nan where there is none) and the least of our own."""
    found = [b for b in bounds.table(head, domain=ball, n=n) if b.kind == "upper"]
    published = [b.value for b in found if THEOREMS[b.theorem].published and b.n == n]
    return min(published, default=math.nan), min(b.value for b in found if not THEOREMS[b.theorem].published)


def affine_maps(head: AttentionMap) -> Projections | None:
    """The matrices of a head, masked or not; None for a map that is no single head."""
    inner = head.unmasked
    return inner.projections() if isinstance(inner, SingleHead) else None


def head_gamma(head: AttentionMap) -> float:
    """``max(-gamma_min, gamma_max / 8, 0)`` over the real eigenvalues of A (at offset 0 for rotary heads).

    The eigenvalues of ``A = s K^T Q`` other than 0 are those of the k x k matrix ``s Q K^T``.

    Raises
    ------
    TypeError
        The head is no softmax or rotary attention, masked or not.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> head_gamma(SoftmaxAttention([[-2.0, 0.0], [0.0, 3.0]], [[1.0, 0.0]]))
    2.0
    """
    maps = affine_maps(head)
    if maps is None or maps.quadratic or maps.centred or any(term.mass != "one" for term in head.values() or ()):
        raise TypeError(f"head must be softmax or rotary attention, masked or not, received {head.kind}.")
    M = maps.Wq @ maps.Wk.T
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
    >>> from otattn.attention import SoftmaxAttention
    >>> head = SoftmaxAttention.from_qkv(np.eye(1, 9), np.eye(1, 9), np.eye(1, 9, 4))
    >>> reduced, Z = in_span(head, np.ones((5, 9)))
    >>> reduced.in_dim, Z.shape
    (2, (5, 2))
    """
    tokens, B = check.as_float_array(X, "X"), _span(head)
    return (head, tokens) if B is None else (_reduced(head, B), np.asarray(tokens @ B))


def _span(head: AttentionMap) -> Array | None:
    """An orthonormal basis ``(d, r)`` of what the head sees; None where that is all of R^d, or not known."""
    maps = affine_maps(head)
    rows = np.zeros((0, 0)) if maps is None else np.concatenate([maps.Wq, maps.Wk, maps.V])
    if maps is None or len(rows) >= rows.shape[1]:
        return None
    _, s, Vt = np.linalg.svd(rows, full_matrices=False)
    keep = s > s.max() * len(rows) * np.finfo(np.float64).eps
    return np.asarray(Vt[keep if keep.any() else slice(0, 1)].T)


def _reduced(head: AttentionMap, B: Array) -> AttentionMap:
    """The head in the coordinates of a basis."""
    maps = affine_maps(head)
    assert maps is not None
    return head.in_coordinates(B, np.eye(len(maps.V)))


FORMAT = 3
MAY_BE_NAN = ("published", "ratios")
"""Heads that no published theorem covers, and pairs that were twice the same run."""
MAY_BE_INF = ("published", "own")
"""Upper bounds beyond float64."""


class HeadStore(StoreFolder):
    """A folder with one file a finished head, in a subfolder that a hash of the measurement names.

    Files appear whole, so no lock is needed: processes may share the folder.

    Parameters
    ----------
    path : path
    model : Transformer
    ids : list of ndarray (windows, n)
    sizes : list of int
    n_pairs : int
    options : Any
        What else the numbers depend on.
    key : str or None
        A name for the model, instead of its class, configuration and weights.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Transformer,
        ids: list[NDArray[np.int64]],
        sizes: list[int],
        n_pairs: int,
        options: Any,
        key: str | None,
    ) -> None:
        what = (type(model), model.config, model.checkpoint.fingerprint) if key is None else key
        whole = fingerprint({"format": FORMAT, "model": what, "ids": ids, "options": (sizes, n_pairs, options)})
        super().__init__(path, whole, name="cache")
        self.path /= whole[:32]
        self.shapes = head_shapes(len(ids[0]), len(sizes), n_pairs)

    def _checksum(self, name: str, arrays: dict[str, Array]) -> str:
        return self.checksum(b"".join((name.encode(), *(np.asarray(arrays[field]).tobytes() for field in FIELDS))))

    def get(self, layer: int, head: int) -> dict[str, Array] | None:
        """The arrays of a finished head, None when it is not finished or its file is not what was written."""
        name = _file(layer, head)
        with self._refusals(self.path / name, "be a file that can be read"):
            if not is_file(self.path / name):
                return None
            try:
                found = read_npz(self.path / name, (*FIELDS, "checksum"))
                arrays = {field: found[field] for field in FIELDS}
                fault = self._fault(arrays)
                if not fault and str(found["checksum"]) != self._checksum(name, arrays):
                    fault = "its checksum is another one"
            except KeyError as exc:
                fault = f"{exc.args[0]} is missing"
            except ValueError as exc:
                fault = str(exc)
        if fault:
            self.set_aside(f"{name}: damaged, edited or of another head ({fault})", "this head is measured")
            return None
        return arrays

    def _fault(self, arrays: dict[str, Array]) -> str:
        """What is wrong with the arrays of a file, empty if nothing."""
        for name, value in arrays.items():
            if value.dtype != np.float64 or value.shape != self.shapes[name]:
                return f"{name} is {value.dtype} {value.shape}, not float64 {self.shapes[name]}"
            bad = (np.isnan(value) & (name not in MAY_BE_NAN)) | (np.isinf(value) & (name not in MAY_BE_INF))
            if bad.any() or (value < 0.0).any():
                return f"{name} has entries that are negative or not finite"
        return ""

    def put(self, layer: int, head: int, arrays: dict[str, Array]) -> None:
        """Keep a finished head: the whole file appears at once."""
        name, stream = _file(layer, head), io.BytesIO()
        checksum = np.array(self._checksum(name, arrays))
        np.savez(stream, allow_pickle=False, checksum=checksum, **arrays)  # type: ignore[arg-type,unused-ignore]
        self.write(name, stream.getvalue(), shared=True)


def _file(layer: int, head: int) -> str:
    return f"layer{layer:03d}-head{head:03d}.npz"
