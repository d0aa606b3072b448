r"""One softmax head whose tokens move by at most rho each: intervals of its rows, and of its Jacobian.

Tokens ``x_i + delta_i``, ``|delta_i| <= rho``; ``a = ||A||``, ``v = ||V||``; values ``v_j = V x_j``, keys
``k_j = A^T x_j``, queries ``g_i = A x_i + c``, so ``|g'_i| <= G_i := |g_i| + a rho``. Primes mark the moved
tokens.

- Logits: ``(l'_ik - l'_ij) - (l_ik - l_ij) = <delta_i, k_k - k_j> + <g'_i, delta_k - delta_j>``, at most
  ``E_ijk = rho |k_k - k_j| + 2 rho G_i`` in absolute value (0 for k = j), so
  ``P'_ij = 1 / sum_k e^{l'_ik - l'_ij}`` lies in ``[low_ij, high_ij]``. A masked row sums over what it sees.
- Means: ``sum_j (P'_ij - P_ij) = 0``, and the mass that moves up (or down) is at most
  ``h_i = min(sum high - P, sum P - low)``. So ``|sum_j (P' - P)_ij f_j|`` is at most the largest sum of
  ``|f_j|`` over moved mass up plus that over moved mass down, capped token by token: ``moved(|f|)``. It
  bounds the shift of the mean of f (f centred at its mean under P), to which moving the tokens adds at most
  ``||f's matrix|| rho``.
- Second moments: ``sum_j (P' - P)_j f_j f_j^T`` is a difference of PSD matrices, so
  ``lambda_max(Cov_{P'}(f)) <= lambda_max(Cov_P(f)) + up(|f|^2)``; also the interval simplex bounds. Moving
  the tokens changes a standard deviation by at most ``||f's matrix|| rho``.
- ``Cov(f, h)`` of two features: ``sum (P' - P) f h^T - dm_f dm_h^T``, at most
  ``moved(|f| |h|) + moved(|f|) moved(|h|)``; or, for ``V Cov(x) A``, v a times
  ``max(up(|x|^2), down(|x|^2) + moved(|x|)^2)``. Moving the tokens adds
  ``sd(f) |dh| + sd(h) |df| + |df| |dh|``.

Blocks of the Jacobian: ``D_ij = P_ij (V + (v_j - o_i) g_i^T) + [i = j] F_i``, ``o_i = sum_j P_ij v_j``,
``F_i = Cov_i(v, k)``.

Rounding: float values, keys and queries differ from the exact ones by ``lost_v``, ``lost_k`` and ``lost_g`` at most, in
proportion to what they are made of, however much of it cancels. In the bounds of the blocks that is as if the values had
moved by ``dv = v rho + lost_v``, and so on; the logits by what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from otattn._linalg import EPS, Array, norm_upper, spectral_norm_upper
from otattn.lipschitz.constants.simplex import threshold_bounds

Mask = NDArray[np.bool_]
TINY = float(np.finfo(np.float64).tiny)
_CANDIDATES = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])


@dataclass(frozen=True, eq=False)
class Made:
    """What the numbers of a head are made of, before projections and products of matrices.

    ``sizes (n,)``, ``width``: norms of the tokens, and the largest from their mean; ``small``: relative rounding of products
    with them; ``a``, ``v``, ``c``: what rounding left out of A, V (operator norms) and c; ``added``: the size of the parts of
    what is added to the logits.
    """

    sizes: Array
    width: float
    small: float
    a: float = 0.0
    v: float = 0.0
    c: float = 0.0
    added: float = 0.0


@dataclass(frozen=True, eq=False)
class MovedRows:
    """Rows of P with intervals, tokens, queries, values, keys (each ``(n, .)``), the norms of A and V.

    ``query (n,)`` bounds ``|g'_i|``, and ``dg (n,)``, ``dv``, ``dk`` how far queries, values and keys are from these,
    rounding included; ``lost`` what rounding left out of V.
    """

    P: Array
    low: Array
    high: Array
    tokens: Array
    g: Array
    values: Array
    keys: Array
    V: Array
    a: float
    v: float
    query: Array
    dg: Array
    dv: float
    dk: float
    lost: float

    def centred(self, feature: Array) -> Array:
        """``f_j - sum_k P_ik f_k``, shape ``(n, n, k)``."""
        return np.asarray(feature[None] - (self.P @ feature)[:, None])

    def _moved_mass(self, caps: Array, weights: Array) -> Array:
        """Row by row the largest ``sum_j q_j w_j``, ``0 <= q <= caps``, ``sum q`` at most the mass that moves."""
        half = np.minimum((self.high - self.P).sum(axis=1), (self.P - self.low).sum(axis=1))
        order = np.argsort(-weights, axis=1)
        filled = np.minimum(np.cumsum(np.take_along_axis(caps, order, axis=1), axis=1), half[:, None])
        return np.asarray(
            (np.diff(filled, axis=1, prepend=0.0) * np.take_along_axis(weights, order, axis=1)).sum(axis=1)
        )

    def up(self, weights: Array) -> Array:
        """Largest gain of ``sum_j P_ij w_j``, non-negative weights, from moving mass up."""
        return self._moved_mass(self.high - self.P, weights)

    def down(self, weights: Array) -> Array:
        """Largest loss of it from moving mass down."""
        return self._moved_mass(self.P - self.low, weights)

    def moved(self, weights: Array) -> Array:
        """Bound of ``sum_j |P' - P|_ij w_j``."""
        return self.up(weights) + self.down(weights)

    def field_parts(self) -> Array:
        """``F_i = Cov_i(v, k)``, shape ``(n, e, d)``."""
        y, k = self.centred(self.values), self.centred(self.keys)
        return np.asarray(np.swapaxes(self.P[:, :, None] * y, 1, 2) @ k)

    def jacobian(self) -> Array:
        """The matrix ``(n e, n d)`` at the unmoved tokens."""
        n, e, d = len(self.P), self.values.shape[1], self.g.shape[1]
        out = np.einsum("ij,ije,id->iejd", self.P, self.centred(self.values), self.g)
        out += np.einsum("ij,ed->iejd", self.P, self.V)
        out[np.arange(n), :, np.arange(n)] += self.field_parts()
        return np.asarray(out.reshape(n * e, n * d))

    def spreads(self, thresholds: dict[str, Array]) -> tuple[Array, Array]:
        """Bounds of the standard deviations of values and keys under P', tokens unmoved: ``(n,)`` each."""
        out = []
        for name, feature in (("values", self.values), ("keys", self.keys)):
            y = self.centred(feature)
            size = np.sum(y**2, axis=2)
            root = np.sqrt(self.P)[:, :, None] * y
            narrow = root.shape[2] <= root.shape[1]
            gram = np.swapaxes(root, 1, 2) @ root if narrow else root @ np.swapaxes(root, 1, 2)
            plain = np.maximum(np.linalg.eigvalsh(gram)[:, -1], 0.0) + self.up(size)
            out.append(np.sqrt(np.minimum(plain, threshold_bounds(y, self.low, self.high, thresholds[name]))))
        return out[0], out[1]

    def direct(self, spread_values: Array, spread_keys: Array, field_change: Array) -> float:
        """Bound of the norm of the Jacobian at all moved tokens, from the intervals alone."""
        G = self.query
        # field part: Cauchy-Schwarz between values and keys, or its value here plus its change
        sd_v, sd_k = spread_values + self.dv, spread_keys + self.dk
        here = np.linalg.norm(self.field_parts(), ord=2, axis=(1, 2))
        field_part = float(np.minimum(sd_v * sd_k, here + field_change).max())
        # kernel part: block norms, or Cauchy-Schwarz row by row and then column sums
        y = np.linalg.norm(self.centred(self.values), axis=2)
        y_moved = y + (self.moved(y) + 2.0 * self.dv)[:, None]
        blocks = spectral_norm_upper(self.high * (self.v + y_moved * G[:, None]))
        columns = float((self.high * (self.v**2 + (G * sd_v) ** 2)[:, None]).sum(axis=0).max()) ** 0.5
        return min(blocks, columns) + field_part

    def field_change(self, spread_values: Array, spread_keys: Array) -> Array:
        """Bound of ``||F'_i - F_i||``, row by row."""
        y = np.linalg.norm(self.centred(self.values), axis=2)
        k = np.linalg.norm(self.centred(self.keys), axis=2)
        dv, dk = self.dv, self.dk
        weights = self.moved(y * k) + self.moved(y) * self.moved(k)
        # for the tokens' covariance, times ||V|| ||A||, up and down do not add: both parts are PSD
        x = np.linalg.norm(self.centred(self.tokens), axis=2)
        plain = np.maximum(self.up(x**2), self.down(x**2) + self.moved(x) ** 2)
        weights = np.minimum(weights, self.v * self.a * plain)
        return np.asarray(weights + spread_values * dk + spread_keys * dv + dv * dk)

    def change(self, field_change: Array) -> Array:
        """Norms of the blocks of ``D' - D``, shape ``(n, n)``: all moved tokens at once."""
        G, dG = self.query, self.dg
        dP = np.maximum(self.high - self.P, self.P - self.low)
        y = np.linalg.norm(self.centred(self.values), axis=2)
        dy = self.moved(y) + 2.0 * self.dv
        out = dP * (self.v + y * G[:, None])
        out += self.high * ((dy * G)[:, None] + y * dG[:, None] + self.lost)
        out[np.diag_indices(len(out))] += field_change
        return np.asarray(out)


def moved_rows(
    X: Array,
    y: Array,
    A: Array,
    V: Array,
    c: Array,
    rho: float,
    mask: Mask | None,
    made: Made,
    added: Array | None = None,
) -> MovedRows:
    """The head at tokens X, y measured from their mean, with its intervals; ``mask[i, j]``: row i sees token j.

    ``added[i, j]`` is added to the logits. One more row of y, one more column of both, is a sink: a key and value that do not
    move.
    """
    n, m = (
        len(X),
        len(y),
    )  # logits change by a constant a row, values and keys by constants, when tokens are measured from a point
    g = X @ A.T + c
    values, keys = y @ V.T, y @ A
    a, v = spectral_norm_upper(A) + made.a, spectral_norm_upper(V) + made.v
    logits = g @ y.T if added is None else g @ y.T + added
    size_a, size_v = float(norm_upper(A)), float(norm_upper(V))
    lost_g = (made.small * size_a + made.a) * made.sizes + made.small * float(np.linalg.norm(c)) + made.c
    lost_v, lost_k = (made.small * size_v + made.v) * made.width, (made.small * size_a + made.a) * made.width
    g_norm = np.linalg.norm(g, axis=1) * (1 + 4 * n * EPS)
    # rounding of a logit's difference
    noise = 2.0 * made.width * (lost_g + 2.0 * made.small * g_norm)
    if added is not None:
        noise += 8.0 * EPS * (made.added + made.width * g_norm)
    gap = cdist(keys, keys) * (1 + 8 * m * EPS) + 2.0 * lost_k
    G = g_norm + a * rho + lost_g
    P, low, high = (np.empty((n, m)) for _ in range(3))
    seen = np.ones((n, m), dtype=bool) if mask is None else mask
    off = ~np.eye(m, dtype=bool)
    # an overflow gives weight 0; columns that the row does not see are set to 0 below
    with np.errstate(over="ignore", divide="ignore"):
        for i in range(n):
            difference = np.where(seen[i][None], logits[i][None] - logits[i][:, None], -np.inf)
            reach_i = np.where(off, (rho * gap + 2.0 * rho * G[i]) * (1 + 8 * EPS) + noise[i], 0.0)
            P[i] = 1.0 / np.exp(difference).sum(axis=1)
            low[i] = 1.0 / np.exp(difference + reach_i).sum(axis=1)
            high[i] = 1.0 / np.exp(difference - reach_i).sum(axis=1)
    P = np.where(seen, P, 0.0)
    low = np.where(seen, low * (1 - 4 * m * EPS), 0.0)
    high = np.where(seen, np.minimum(high * (1 + 4 * m * EPS) + TINY, 1.0), 0.0)
    low, high = np.minimum(low, P), np.maximum(high, P)
    dg, dv, dk = a * rho + lost_g, v * rho + lost_v, a * rho + lost_k
    return MovedRows(P, low, high, y, g, values, keys, V, a, v, G, dg, dv, dk, made.small * size_v + made.v)


def best_thresholds(head: MovedRows) -> dict[str, Array]:
    """For each row the best of a few thresholds of the interval simplex bound (any threshold is valid)."""
    out = {}
    for name, feature in (("values", head.values), ("keys", head.keys)):
        y = head.centred(feature)
        top = np.sum(y**2, axis=2).max(axis=1)
        trials = [threshold_bounds(y, head.low, head.high, share * top) for share in _CANDIDATES]
        out[name] = _CANDIDATES[np.argmin(trials, axis=0)] * top
    return out
