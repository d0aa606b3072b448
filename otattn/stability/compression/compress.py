"""Measures of few atoms that stand for larger ones."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import AttentionMap
from otattn.attention.kernels import NormalisedKernel
from otattn.attention.memory import blocks
from otattn.measures import DiscreteMeasure, MeasureLike, as_discrete
from otattn.stability.compression.features import head_features
from otattn.stability.compression.heads import softmax_parts

__all__ = ["compress"]

Method = Literal["merge", "prune"]
STARTS, ROUNDS = 8, 100
"""Of Lloyd's iteration."""
FLOOR = 1e-3
"""Part of its own weight that an atom has in the squares even when no query looks at it."""


def compress(
    mu: MeasureLike,
    k: int,
    *,
    attention: AttentionMap | None = None,
    method: Method = "merge",
    rng: np.random.Generator | int | None = None,
) -> DiscreteMeasure:
    r"""A measure of at most k weighted atoms in place of ``mu``.

    Merging makes clusters of least weighted squares (k-means) and puts the mass of each at its centroid, in R^d. With
    ``attention`` the squares are those that its heads see (of logits, averaged over the tokens as queries, and of values),
    weighed by the attention that each atom gets. Clusters of tokens that lie together in R^d are poor ones there: most of
    what tells tokens apart does not reach a head.

    Pruning keeps the k atoms to which attention gives most weight (without one: the heaviest), with their weights scaled up.

    Parameters
    ----------
    mu : DiscreteMeasure or array_like (n, d)
    k : int
        From 1 to the number n of atoms of positive weight.
    attention : AttentionMap, optional
        Softmax attention, or a multi-head sum of softmax heads.
    method : {"merge", "prune"}
    rng : Generator or int, optional
        For the starts of the clusters; 0 by default. Pruning takes none.

    Returns
    -------
    DiscreteMeasure
        With fewer atoms where fewer clusters are distinct. :func:`compression_bound` says what is lost.

    Examples
    --------
    >>> nu = compress([[0.0], [0.2], [2.0]], 2)
    >>> nu.points.ravel().round(12), nu.weights.round(3)
    (array([0.1, 2. ]), array([0.667, 0.333]))

    References
    ----------
    Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory, 1982.
    """
    full = as_discrete(mu).support()
    size = check.count(k, "k")
    if size > full.n:
        raise ValueError(f"k must be at most the number of atoms of positive weight, {full.n}, received {size}.")
    if attention is not None and attention.in_dim != full.dim:
        raise ValueError(f"mu must live in R^{attention.in_dim}, where attention acts, received R^{full.dim}.")
    if method == "prune":
        kept = np.sort(np.argsort(-_received(full, attention), kind="stable")[:size])
        return DiscreteMeasure.normalized(full.points[kept], full.weights[kept])
    if method != "merge":
        raise ValueError(f'method must be "merge" or "prune", received {method!r}.')
    seen = full.points if attention is None else head_features(attention, full.points, full, full)
    pull = _received(full, attention) + FLOOR * full.weights
    labels = _clusters(seen, pull / pull.sum(), size, check.rng_from(0 if rng is None else rng))
    belongs = np.equal.outer(np.arange(labels.max() + 1), labels) * full.weights
    masses = belongs.sum(axis=1)
    centre = full.mean()
    return DiscreteMeasure.normalized(centre + (belongs / masses[:, None]) @ (full.points - centre), masses)


def _received(mu: DiscreteMeasure, attention: AttentionMap | None) -> Array:
    """What each atom gets: its own weight, or the attention of all of them."""
    if attention is None:
        return mu.weights
    out = np.zeros(mu.n)
    for head, _ in softmax_parts(attention):
        kernel = NormalisedKernel(head.projections(), mu.points, mu.weights)
        Q = kernel.queries(kernel.y)
        for rows in blocks(mu.n, mu.n, None):
            out += mu.weights[rows] @ kernel.weights_of(Q, None, rows)
    return out


def _clusters(F: Array, w: Array, k: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Labels 0, 1, ... of the best of several runs of Lloyd's iteration, all of them used."""
    F = F - w @ F
    F = F / (np.abs(F).max() or 1.0)
    best, labels = np.inf, np.zeros(len(F), dtype=np.intp)
    for _ in range(STARTS):
        centres = _spread_out(F, w, k, rng)
        found = np.zeros(len(F), dtype=np.intp)
        for step in range(ROUNDS):
            squares = cdist(F, centres, "sqeuclidean")
            new = squares.argmin(axis=1)
            if step and (new == found).all():
                break
            found = new
            belongs = np.equal.outer(np.arange(len(centres)), found) * w
            mass = belongs.sum(axis=1, keepdims=True)
            centres = np.where(mass > 0.0, belongs @ F / np.where(mass > 0.0, mass, 1.0), centres)
        cost = float(w @ squares[np.arange(len(F)), found])
        if cost < best:
            best, labels = cost, found
    return np.unique(labels, return_inverse=True)[1].ravel()


def _spread_out(F: Array, w: Array, k: int, rng: np.random.Generator) -> Array:
    """k atoms, each drawn with the weighted square of its distance from those before; fewer when no others are left."""
    chosen = [int(rng.choice(len(F), p=w / w.sum()))]
    left = cdist(F, F[chosen], "sqeuclidean")[:, 0]
    while len(chosen) < k and (w * left).sum() > 0.0:
        chosen.append(int(rng.choice(len(F), p=w * left / (w * left).sum())))
        left = np.minimum(left, cdist(F, F[chosen[-1:]], "sqeuclidean")[:, 0])
    return F[chosen]
