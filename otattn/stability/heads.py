"""What is measured of one head of a real model: its local constants, its numbers, and what was proved about it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention import AttentionMap, MaskedAttention, SoftmaxAttention
from otattn.attention.rotary import RotaryAttention
from otattn.lipschitz import bounds
from otattn.lipschitz.local.value import splitting_part
from otattn.lipschitz.theorem import THEOREMS
from otattn.lipschitz.upper.rotary import rotary_row_bound
from otattn.models.layer import ModelLayer
from otattn.operators import measure_jacobian, top_singular
from otattn.stability.samplers import window_pairs
from otattn.stability.study import stability_study

__all__ = ["FIELDS", "head_gamma", "head_shapes", "in_span", "measure_head"]

Array = NDArray[np.float64]
FIELDS = ("particle", "splitting", "radii", "domain_radius", "norms", "gamma", "published", "own", "ratios")
"""Names of what :func:`measure_head` gives."""
REAL = 1e-10
"""Eigenvalues count as real up to this fraction of the largest one."""


def measure_head(
    layer: ModelLayer, h: int, seen: list[Array], whole: Array, n_pairs: int, p: float, tol: float, seed: int
) -> dict[str, Array]:
    """All that is kept of one head; ``seen`` holds the tokens ``(w, n, d)`` for each n, ``whole`` the longest windows."""
    head = layer.heads[h]
    reduced = in_span(head, seen[0])[0]
    spans = [in_span(head, X)[1] for X in seen]
    particle = np.array([[_particle(reduced, z, tol) for z in Z] for Z in spans]).T
    splitting = np.array([[splitting_part(reduced, reduced.as_measure(z)) for z in Z] for Z in spans]).T
    radii = np.stack([np.linalg.norm(X, axis=2).max(axis=1) for X in seen], axis=1)
    upper = [_bounds(reduced, float(R), X.shape[1]) for R, X in zip(radii.max(axis=0), seen, strict=True)]
    ratios = np.zeros(0)
    if n_pairs:
        sampler = window_pairs(whole, max(1, whole.shape[1] // 2), causal=head.causal)
        child = np.random.SeedSequence(seed, spawn_key=(layer.index, h))
        drawn = stability_study(head, sampler, n_pairs=n_pairs, p=p, rng=child, progress=False).ratios
        ratios = np.full(n_pairs, np.nan)
        ratios[: len(drawn)] = drawn
    inner = reduced.attention if isinstance(reduced, MaskedAttention) else reduced
    assert isinstance(inner, (SoftmaxAttention, RotaryAttention))
    A = inner.A if isinstance(inner, SoftmaxAttention) else inner.form(0)
    return {
        "particle": particle,
        "splitting": splitting,
        "radii": radii,
        "domain_radius": np.asarray(layer.domain.max_norm),
        "norms": np.array([np.linalg.norm(A, 2), np.linalg.norm(inner.V, 2)]),
        "gamma": np.asarray(head_gamma(head)),
        "published": np.array([published for published, _ in upper]),
        "own": np.array([own for _, own in upper]),
        "ratios": ratios,
    }


def head_shapes(windows: int, sizes: int, n_pairs: int) -> dict[str, tuple[int, ...]]:
    """The shape of each array that :func:`measure_head` gives."""
    table, bound = (windows, sizes), (sizes,)
    return dict(zip(FIELDS, (table, table, table, (), (2,), (), bound, bound, (n_pairs,)), strict=True))


def _particle(head: AttentionMap, tokens: Array, tol: float) -> float:
    """The norm of the Jacobian at tokens of equal weight."""
    return float(top_singular(measure_jacobian(head, tokens), precision="precise", tol=tol, rng=0).value)


def _bounds(head: AttentionMap, radius: float, n: int) -> tuple[float, float]:
    """The published upper bound for n tokens (nan where there is none) and the least of our own."""
    if isinstance(head, RotaryAttention):
        return float("nan"), rotary_row_bound(head, radius=radius, n=n).value
    theorem = bounds.castin2024_masked if isinstance(head, MaskedAttention) else bounds.castin2024_discrete
    table = [
        b for b in bounds.table(head, radius=radius, n=n) if b.kind == "upper" and not THEOREMS[b.theorem].published
    ]
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
