"""Clusters along a flow: how many, since when, who leads them, and under a mask which tokens will."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from otattn import _validate as check
from otattn._linalg import Array, row_norms
from otattn._tabular import Result
from otattn.dynamics.trajectory import Trajectory

__all__ = ["ClusterHistory", "Leaders", "Plateau", "renyi_centres", "token_clusters", "token_leaders"]


@dataclass(frozen=True)
class Plateau(Result):
    """A time during which the number of clusters did not change."""

    count: int
    start: float
    stop: float

    @property
    def duration(self) -> float:
        """``stop - start``."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class ClusterHistory(Result):
    """Clusters of the tokens at each time of a trajectory.

    Attributes
    ----------
    times : ndarray (T,)
    labels : ndarray (T, n) of int
        Cluster of each token, 0, 1, ... in order of the clusters' first tokens; -1 for tokens of zero weight.
    counts : ndarray (T,) of int
    masses : tuple of T arrays
        Mass of each cluster.
    tol : float
        Tokens closer than this are in one cluster (and so on through chains: single linkage).
    """

    times: Array
    labels: NDArray[np.intp]
    counts: NDArray[np.intp]
    masses: tuple[Array, ...]
    tol: float

    _columns = ("times", "counts")

    def time_to(self, count: int = 1) -> float:
        """First of ``times`` from which on there are at most ``count`` clusters; inf when that is not reached."""
        above = np.flatnonzero(self.counts > count)
        if not above.size:
            return float(self.times[0])
        return float(self.times[above[-1] + 1]) if above[-1] + 1 < len(self.times) else math.inf

    def plateaus(self) -> list[Plateau]:
        """Maximal runs of a constant number of clusters, in time: long ones are metastable states."""
        edges = [0, *(np.flatnonzero(np.diff(self.counts)) + 1).tolist(), len(self.times) - 1]
        return [
            Plateau(int(self.counts[a]), float(self.times[a]), float(self.times[b]))
            for a, b in pairwise(edges)
            if b > a or len(self.times) == 1
        ]

    def __repr__(self) -> str:
        return f"ClusterHistory({self.counts[0]} -> {self.counts[-1]} clusters, {len(self.times)} times, tol={self.tol:.3g})"


def token_clusters(trajectory: Trajectory, *, tol: float | None = None) -> ClusterHistory:
    """Clusters of the tokens by single linkage, at each time of a trajectory.

    Parameters
    ----------
    trajectory : Trajectory
        Choose its ``t_eval`` for the resolution in time; memory is that of the ``n (n-1) / 2`` distances.
    tol : float, optional
        Distance below which two tokens are linked; 1 percent of the first diameter by default.

    Returns
    -------
    ClusterHistory

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.dynamics import flow
    >>> contraction = SoftmaxAttention([[0.0]], [[-1.0]])                 # x' = -mean: nothing merges
    >>> token_clusters(flow(contraction, [[0.0], [1.0], [1.001]], t_span=(0.0, 1.0))).counts[-1]
    np.int64(2)

    References
    ----------
    Geshkovski, Letrouit, Polyanskiy, Rigollet, "The emergence of clusters in self-attention dynamics", 2023, and "A
    mathematical perspective on Transformers", 2023 (metastability).
    """
    live = trajectory.weights > 0
    w = trajectory.weights[live]
    if not len(trajectory):
        raise ValueError("trajectory must hold at least one time, received none; choose t_eval before the blow-up.")
    cut = 0.01 * float(trajectory.diameters()[0]) if tol is None else check.positive(tol, "tol", zero=True)
    labels = np.full((len(trajectory), trajectory.n), -1, dtype=np.intp)
    counts = np.empty(len(trajectory), dtype=np.intp)
    masses = []
    for k, x in enumerate(trajectory.points[:, live]):
        _, first, inverse = np.unique(linked(x, cut), return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))
        own = order[inverse.ravel()]
        labels[k, live] = own
        counts[k] = len(first)
        masses.append(check.frozen(np.asarray(np.bincount(own, weights=w), dtype=np.float64)))
    return ClusterHistory(trajectory.times, labels, counts, tuple(masses), cut)


def linked(x: Array, cut: float) -> NDArray[np.intp]:
    """The single-linkage cluster of each point, numbers in no order."""
    return fcluster(linkage(pdist(x), "single"), cut, "distance") if len(x) > 1 else np.ones(1, dtype=np.intp)


@dataclass(frozen=True, eq=False)
class Leaders(Result):
    """Whom each token follows, at each time of a trajectory.

    Attributes
    ----------
    times : ndarray (T,)
    follows : ndarray (T, n) of int
        The token of positive weight with the largest logit for each token (the first of equal ones).
    leader : ndarray (T, n) of bool
        Tokens that follow themselves.
    followers : ndarray (T, n) of int
        How many tokens follow each.
    received : ndarray (T, n)
        Attention that each token receives, ``sum_i w_i P_ij`` (sum 1 over j).
    """

    times: Array
    follows: NDArray[np.intp]
    leader: NDArray[np.bool_]
    followers: NDArray[np.intp]
    received: Array

    _columns = ("times", "counts")

    @property
    def counts(self) -> NDArray[np.intp]:
        """Number of leaders at each time."""
        return np.asarray(self.leader.sum(axis=1), dtype=np.intp)

    def __repr__(self) -> str:
        return f"Leaders({self.counts[0]} -> {self.counts[-1]} leaders, {len(self.times)} times)"


def token_leaders(trajectory: Trajectory, *, head: int = 0) -> Leaders:
    """Leader statistics of a softmax or L2 head along a trajectory.

    A token that attends most to itself is a leader; in the limit of sharp attention the others move towards theirs.

    Parameters
    ----------
    trajectory : Trajectory
    head : int
        Which head of a multi-head attention.

    Raises
    ------
    ValueError
        The attention has no such head with normalised logits.

    References
    ----------
    Geshkovski, Letrouit, Polyanskiy, Rigollet (2023); Alcalde, Fantuzzi, Zuazua, "Clustering in pure-attention hardmax
    transformers and its role in sentiment analysis", 2024.
    """
    T, n = len(trajectory), trajectory.n
    follows = np.empty((T, n), dtype=np.intp)
    received = np.empty((T, n))
    w, times = trajectory.weights, trajectory.token_times
    with np.errstate(divide="ignore"):
        log_w = np.log(w)
    for k, x in enumerate(trajectory.points):
        attention = trajectory.attention_at(k)
        logits = attention.logits(x, head)
        logits = np.where(w > 0, logits, -np.inf)
        if attention.causal:
            assert times is not None
            logits = np.where(times[None, :] > times[:, None], -np.inf, logits)
        follows[k] = logits.argmax(axis=1)
        weighted = logits + log_w
        seen = np.isfinite(weighted).any(axis=1)
        top = np.where(seen, weighted.max(axis=1), 0.0)[:, None]
        P = np.exp(weighted - top)
        received[k] = w @ (P / np.where(seen, P.sum(axis=1), 1.0)[:, None])
    own = follows == np.arange(n)
    followers = np.stack([np.bincount(f, minlength=n) for f in follows])
    return Leaders(trajectory.times, follows, own & (w > 0), followers, check.frozen(received))


def renyi_centres(points: ArrayLike, radius: float, *, strong: bool = False) -> NDArray[np.intp]:
    r"""Tokens of a sequence that are far from the centres before them: where masked attention gathers its clusters.

    .. math:: s_1 = 1, \qquad s_{k+1} = \min \{ i > s_k : |x_i - x_{s_j}| > r \text{ for all } j \le k \}

    A Renyi parking: each token that finds room takes it. With ``A = beta I``, ``V = I`` and a causal mask on the unit sphere a token
    feels others at distances of the order ``beta^{-1/2}``, so the centres for ``r = delta beta^{-1/2}`` stay where they are for a long
    time, and the tokens between them move to one of them. In the end all follow the first token.

    Parameters
    ----------
    points : array_like (n, d)
        Tokens in the order of the mask.
    radius : float
        r, a Euclidean distance.
    strong : bool
        Strong centres are farther than r from all earlier tokens, not from the earlier centres only: nothing pulls them.

    Returns
    -------
    ndarray (k,) of int
        Indices of the centres, increasing, the first 0. Strong centres are centres.

    Examples
    --------
    >>> renyi_centres([[0.0], [0.6], [1.2], [3.0]], 1.0), renyi_centres([[0.0], [0.6], [1.2], [3.0]], 1.0, strong=True)
    (array([0, 2, 3]), array([0, 3]))

    References
    ----------
    Karagodin, Polyanskiy, Rigollet, "Clustering in causal attention masking", NeurIPS 2024.
    """
    x, r = check.points(points, "points"), check.positive(radius, "radius", zero=True)
    kept: list[int] = []
    for i in range(len(x)):
        before = x[:i] if strong else x[kept]
        if not (row_norms(before - x[i]) <= r).any():
            kept.append(i)
    return np.array(kept, dtype=np.intp)
