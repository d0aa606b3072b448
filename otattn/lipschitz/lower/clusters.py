"""Measures with few atoms: the local constant of a million tokens from one ``(c d) x (c d)`` matrix.

Equal tokens are one atom. On the displacements that move the tokens of an atom together, ``D_X f`` acts as

.. math:: M_{kl} = \\sqrt{w_k / w_l}\\, P_{kl}\\, V (I + (x_l - m_k) g_{kl}^T) + \\delta_{kl} V C_k A,

and on those that leave the mean of every atom in place it acts as ``V C_k A`` on each atom. All weights are kept as
logarithms, since the weights of mean-field witnesses go down to ``e^{-3 a}``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.attention.head import Head
from otattn.lipschitz.lower.charts import forms_of, tangent
from otattn.lipschitz.lower.singular import leading_direction, leading_pairs, unit
from otattn.measures import as_discrete

DENSE_LIMIT = 128
"""Matrices of at most this many rows or columns are decomposed densely, larger ones by Lanczos iteration."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """Attention of every atom to every atom for one form, all ``(B, c, c)`` but ``G``, ``m`` ``(B, c, d)``."""

    P: Array
    S: Array
    G: Array
    m: Array


@dataclass(frozen=True, eq=False)
class Configuration:
    """A batch of measures with c atoms and their derivative in ``L^2(mu)``, the matrix M above.

    Parameters
    ----------
    forms : tuple of Head
        Heads, summed.
    points : ndarray (B, c, d)
    log_weights : ndarray (B, c)
        Up to an additive constant each.
    causal : bool
        An atom sees those before it and itself.
    """

    forms: tuple[Head, ...]
    points: Array
    log_weights: Array
    causal: bool = False
    rows: tuple[_Rows, ...] = field(init=False)

    def __post_init__(self) -> None:
        X = self.points
        lw = self.log_weights - _logsumexp(self.log_weights)
        rows = []
        for f in self.forms:
            G = X @ f.A.T + f.c
            L = G @ np.swapaxes(X, 1, 2) + lw[:, None, :]
            if f.H is not None:
                L -= np.sum((X @ f.H) * X, axis=2)[:, None, :]
            if self.causal:
                L = np.where(np.tri(L.shape[1], dtype=bool), L, -np.inf)
            L -= _logsumexp(L)
            P = np.exp(L)
            S = np.exp(L + 0.5 * (lw[:, :, None] - lw[:, None, :]))
            rows.append(_Rows(P, S, G, P @ X))
        object.__setattr__(self, "rows", tuple(rows))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, c, e, d)``."""
        B, c, d = self.points.shape
        return B, c, self.forms[0].V.shape[0], d

    def fields(self) -> Array:
        """``D_x Gamma`` at every atom, ``sum_h V C_k A``: shape ``(B, c, e, d)``."""
        total = np.zeros(self.shape)
        for f, r in zip(self.forms, self.rows, strict=True):
            Y = self.points[:, None, :, :] - r.m[:, :, None, :]
            total += np.swapaxes((Y @ f.V.T) * r.P[..., None], 2, 3) @ (Y @ f.A)
        return total

    def dense(self) -> Array:
        """The matrices M, ``(B, c e, c d)``."""
        B, c, e, d = self.shape
        M = np.zeros((B, c, e, c, d))
        for f, r in zip(self.forms, self.rows, strict=True):
            VY = (self.points @ f.V.T)[:, None, :, :] - (r.m @ f.V.T)[:, :, None, :]
            g = r.G[:, :, None, :]
            if f.H is not None:
                g = g - 2.0 * (self.points @ f.H)[:, None, :, :]
            block = VY[..., :, None] * g[..., None, :] + f.V
            M += np.swapaxes(block * r.S[..., None, None], 2, 3)
        k = np.arange(c)
        M[:, k, :, k, :] += np.swapaxes(self.fields(), 0, 1)
        return M.reshape(B, c * e, c * d)

    def _slope(self, f: Head, r: _Rows, v: Array) -> Array:
        """``<g_kl, v_l>``."""
        beta = r.G @ np.swapaxes(v, 1, 2)
        if f.H is not None:
            beta = beta - 2.0 * np.sum((self.points @ f.H) * v, axis=2)[:, None, :]
        return np.asarray(beta)

    def matvec(self, v: Array) -> Array:
        """``M v`` for ``v (B, c, d)``, without the matrix."""
        out = np.zeros(self.shape[:3])
        for f, r in zip(self.forms, self.rows, strict=True):
            h = v @ f.A.T
            T = r.S * self._slope(f, r, v) + r.P * _centred(h, self.points, r.m)
            out += (r.S @ v + T @ self.points - T.sum(axis=2, keepdims=True) * r.m) @ f.V.T
        return out

    def rmatvec(self, u: Array) -> Array:
        """``M^T u`` for ``u (B, c, e)``."""
        out = np.zeros_like(self.points)
        for f, r in zip(self.forms, self.rows, strict=True):
            alpha = u @ f.V
            Y = _centred(alpha, self.points, r.m)
            T = r.S * Y
            out += np.swapaxes(r.S, 1, 2) @ alpha + np.swapaxes(T, 1, 2) @ r.G + ((r.P * Y) @ self.points) @ f.A
            if f.H is not None:
                out -= 2.0 * T.sum(axis=1)[..., None] * (self.points @ f.H)
        return out

    def top(self, normals: Array | None = None, *, exact: bool = True) -> tuple[Array, Array, Array]:
        """Largest singular values ``(B,)`` of M with left ``(B, c, e)`` and right ``(B, c, d)`` vectors.

        ``normals (B, c, d)`` of unit length restrict the displacement of each atom to their complements. Values are
        ``|M v|``; without ``exact`` the vectors of nearly equal singular values may be mixed (the value is then a
        little too low).
        """
        B, c, e, d = self.shape
        if c * min(e, d) > DENSE_LIMIT:
            ones = [
                replace(self, points=X[None], log_weights=w[None])
                for X, w in zip(self.points, self.log_weights, strict=True)
            ]
            each = [None] * B if normals is None else list(normals[:, None])
            values, left, right = zip(*(one._lanczos(n) for one, n in zip(ones, each, strict=True)), strict=True)
            return np.concatenate(values), np.concatenate(left), np.concatenate(right)
        M = self.dense()
        if normals is not None:
            blocks = M.reshape(B, c * e, c, d)
            blocks -= np.einsum("bmki,bki->bmk", blocks, normals)[..., None] * normals[:, None]
        value, u, v = leading_pairs(M, exact=exact)
        return value, u.reshape(B, c, e), v.reshape(B, c, d)

    def _lanczos(self, normals: Array | None) -> tuple[Array, Array, Array]:
        """:meth:`top` of a batch of one, without the matrix."""
        _, c, e, d = self.shape

        def forward(x: Array) -> Array:
            return self.matvec(tangent(x.reshape(1, c, d), normals)).ravel()

        def backward(y: Array) -> Array:
            return tangent(self.rmatvec(y.reshape(1, c, e)), normals).ravel()

        v = tangent(leading_direction(forward, backward, c * e, c * d, tol=1e-9).reshape(1, c, d), normals)
        v = v / np.linalg.norm(v)
        u, value = unit(self.matvec(v).reshape(1, -1))
        return value, u.reshape(1, c, e), v

    def gradient(
        self, left: Array, right: Array, field_left: Array | None = None, field_right: Array | None = None
    ) -> tuple[Array, Array]:
        """Gradient in points ``(B, c, d)`` and log-weights ``(B, c)`` of ``<left, K right> + <field_left, D field_right>``.

        ``M = K + D`` with D the diagonal of fields ``V C_k A``; without field vectors they are ``left, right``, and at
        singular vectors this is the gradient of the singular value (the vectors' own motion is of second order).
        """
        fl, fr = left if field_left is None else field_left, right if field_right is None else field_right
        X = self.points
        gX, gw = np.zeros_like(X), np.zeros_like(self.log_weights)
        for f, r in zip(self.forms, self.rows, strict=True):
            alpha, alpha_d, h = left @ f.V, fl @ f.V, fr @ f.A.T
            beta = self._slope(f, r, right)
            Y, Yd, Hd = _centred(alpha, X, r.m), _centred(alpha_d, X, r.m), _centred(h, X, r.m)
            Sb, PH, PY = r.S * beta, r.P * Hd, r.P * Yd
            dm = -alpha * Sb.sum(axis=2, keepdims=True)
            gX += _t(Sb) @ alpha + _t(PH) @ alpha_d + _t(PY) @ h + _t(r.P) @ dm
            # derivatives in log S and log P, then through the normaliser of each row
            T = r.S * (alpha @ _t(right)) + Sb * Y
            R = PH * Yd + r.P * _centred(dm, X, r.m)
            dL = T + R
            dL -= r.P * dL.sum(axis=2, keepdims=True)
            gw += dL.sum(axis=1) + 0.5 * (T.sum(axis=2) - T.sum(axis=1))
            SY = r.S * Y
            gX += _t(dL) @ r.G + (SY @ right + dL @ X) @ f.A
            if f.H is not None:
                gX -= 2.0 * ((right * SY.sum(axis=1)[..., None] + X * dL.sum(axis=1)[..., None]) @ f.H)
        return gX, gw


def _t(M: Array) -> Array:
    return np.swapaxes(M, 1, 2)


def _centred(a: Array, X: Array, m: Array) -> Array:
    """``<a_k, x_l - m_k>``, shape ``(B, c, c)``."""
    return np.asarray(a @ np.swapaxes(X, 1, 2) - np.sum(a * m, axis=2, keepdims=True))


def _logsumexp(L: Array) -> Array:
    top = L.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(L - top).sum(axis=-1, keepdims=True)))


def cluster_constant(attention: AttentionMap, mu: Any, *, n: int | None = None) -> float:
    """Local W_2 constant of softmax, L2 or multi-head attention at a measure with few atoms, at a cost free of n.

    Parameters
    ----------
    attention : SoftmaxAttention, L2Attention or MultiHeadAttention of these
    mu : DiscreteMeasure or array_like (c, d)
        Atoms of positive weight; they should be distinct (see ``merge_duplicates``).
    n : int, optional
        Number of tokens: the weights are then multiples of ``1/n`` and only atoms of two tokens or more can split,
        so ``value`` is the norm of ``D_X f`` at the n tokens. Without it every atom can split (mean-field).

    Returns
    -------
    float
        The larger of the norm of ``W^{1/2} J W^{-1/2}`` and of ``||V C_k A||`` at the atoms that can split.

    References
    ----------
    Own result; the proof is the split into a symmetric and an antisymmetric sector at the head of this module.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.measures import DiscreteMeasure
    >>> mu = DiscreteMeasure([[1.0], [-1.0], [0.0]], [0.25, 0.25, 0.5])
    >>> round(cluster_constant(SoftmaxAttention([[1.0]], [[1.0]]), mu, n=10**6 * 4), 9)
    1.46752656
    """
    forms = forms_of(attention)
    if forms is None:
        raise TypeError(
            "attention must be softmax, L2 or multi-head attention of these, received "
            f"{type(attention).__name__}; use local_lipschitz for other maps."
        )
    measure = attention.as_measure(mu).support()
    points, weights = measure.points, measure.weights
    can_split = np.ones(len(weights), dtype=bool) if n is None else as_discrete(mu).support().multiplicities(n) >= 2
    one = Configuration(forms, points[None], np.log(weights)[None])
    norms = np.linalg.norm(one.fields()[0], 2, axis=(1, 2))
    return max(float(one.top()[0][0]), float(np.where(can_split, norms, 0.0).max()))


def split_gradient(batch: Configuration, atoms: NDArray[np.int64]) -> tuple[Array, Array]:
    """Gradient of ``||V C_k A||`` at the atom ``k = atoms[b]`` of each configuration of a batch."""
    B, c, e, d = batch.shape
    b = np.arange(B)
    U, _, Wt = np.linalg.svd(batch.fields()[b, atoms])
    fl, fr = np.zeros((B, c, e)), np.zeros((B, c, d))
    fl[b, atoms], fr[b, atoms] = U[:, :, 0], Wt[:, 0, :]
    return batch.gradient(np.zeros((B, c, e)), np.zeros((B, c, d)), fl, fr)
