"""Measures with few atoms: the local constant of a million tokens from one ``(c d) x (c d)`` matrix.

Equal tokens are one atom. On the displacements that move the tokens of an atom together, ``D_X f`` acts as

.. math:: M_{kl} = \\sqrt{w_k / w_l}\\, P_{kl}\\, V (I + (x_l - m_k) g_{kl}^T) + \\delta_{kl} V C_k A,

and on those that leave the mean of every atom in place it acts as ``V C_k A`` on each atom. All weights are kept as
logarithms, since the weights of mean-field witnesses go down to ``e^{-3 a}``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds

from otattn.attention import AttentionMap
from otattn.lipschitz.lower.forms import Form, forms_of
from otattn.measures import as_discrete

__all__ = ["ClusterConstant", "Configuration", "cluster_constant"]

Array = NDArray[np.float64]

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
    """A batch of measures with c atoms and their derivative in ``L^p(mu)``.

    Parameters
    ----------
    forms : tuple of Form
        Heads, summed.
    points : ndarray (B, c, d)
    log_weights : ndarray (B, c)
        Up to an additive constant each.
    theta : float
        ``1 / p``: the matrix is ``W^theta J W^-theta``.
    hidden : ndarray (c, c) of bool, optional
        Pairs (row, atom) that a causal mask hides.
    """

    forms: tuple[Form, ...]
    points: Array
    log_weights: Array
    theta: float = 0.5
    hidden: NDArray[np.bool_] | None = None
    rows: tuple[_Rows, ...] = field(init=False)

    def __post_init__(self) -> None:
        X = self.points
        lw = self.log_weights - _logsumexp(self.log_weights)
        rows = []
        for f in self.forms:
            G = X @ f.A.T + f.bias
            L = G @ np.swapaxes(X, 1, 2) + lw[:, None, :]
            if f.H is not None:
                L -= np.sum((X @ f.H) * X, axis=2)[:, None, :]
            if self.hidden is not None:
                L = np.where(self.hidden, -np.inf, L)
            L -= _logsumexp(L)
            P = np.exp(L)
            S = np.exp(L + self.theta * (lw[:, :, None] - lw[:, None, :]))
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

    def _slope(self, f: Form, r: _Rows, v: Array) -> Array:
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
            return self._top_lanczos(normals)
        M = self.dense()
        if normals is not None:
            blocks = M.reshape(B, c * e, c, d)
            blocks -= np.einsum("bmki,bki->bmk", blocks, normals)[..., None] * normals[:, None]
        wide = M.shape[1] <= M.shape[2]
        # scaled first: the square of an entry e^{400} would overflow
        scale = np.maximum(np.abs(M).max(axis=(1, 2)), 1e-300)[:, None, None]
        N = M / scale
        gram = N @ _t(N) if wide else _t(N) @ N
        squaring = not exact and gram.shape[1] > 12
        vec = _dominant(gram) if squaring else np.linalg.eigh(gram)[1][:, :, -1]
        if wide:
            u = vec
            v, value = _unit(np.einsum("bm,bmn->bn", u, N))
        else:
            v = vec
            u, value = _unit(np.einsum("bmn,bn->bm", N, v))
        return value * scale[:, 0, 0], u.reshape(B, c, e), v.reshape(B, c, d)

    def _top_lanczos(self, normals: Array | None) -> tuple[Array, Array, Array]:
        B, c, e, d = self.shape
        value, left, right = np.zeros(B), np.zeros((B, c, e)), np.zeros((B, c, d))
        for b in range(B):
            one = Configuration(
                self.forms, self.points[b : b + 1], self.log_weights[b : b + 1], self.theta, self.hidden
            )
            n = None if normals is None else normals[b]
            value[b], left[b], right[b] = _lanczos(one, n, np.cos(np.arange(c * d) ** 2.0))
        return value, left, right

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
            gw += dL.sum(axis=1) + self.theta * (T.sum(axis=2) - T.sum(axis=1))
            SY = r.S * Y
            gX += _t(dL) @ r.G + (SY @ right + dL @ X) @ f.A
            if f.H is not None:
                gX -= 2.0 * ((right * SY.sum(axis=1)[..., None] + X * dL.sum(axis=1)[..., None]) @ f.H)
        return gX, gw


def _t(M: Array) -> Array:
    return np.swapaxes(M, 1, 2)


def _dominant(G: Array) -> Array:
    """Unit vectors of the largest eigenvalues of PSD matrices ``(B, N, N)``, by repeated squaring.

    Several times faster than a full decomposition; eigenvalues closer than 1e-3 may be mixed.
    """
    H = G / np.maximum(np.trace(G, axis1=1, axis2=2), 1e-300)[:, None, None]
    for _ in range(13):
        H = H @ H
        H /= np.maximum(np.trace(H, axis1=1, axis2=2), 1e-300)[:, None, None]
        # of trace one and Frobenius norm one: rank one
        if (np.sum(H * H, axis=(1, 2)) > 1.0 - 1e-13).all():
            break
    column = np.argmax(np.sum(H * H, axis=1), axis=1)
    return _unit(np.take_along_axis(H, column[:, None, None], axis=2)[:, :, 0])[0]


def _centred(a: Array, X: Array, m: Array) -> Array:
    """``<a_k, x_l - m_k>``, shape ``(B, c, c)``."""
    return np.asarray(a @ np.swapaxes(X, 1, 2) - np.sum(a * m, axis=2, keepdims=True))


def _unit(x: Array) -> tuple[Array, Array]:
    """Rows divided by their norms (zero rows stay), and the norms."""
    size = np.linalg.norm(x, axis=-1)
    return x / np.maximum(size, 1e-300)[..., None], size


def _logsumexp(L: Array) -> Array:
    top = L.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(L - top).sum(axis=-1, keepdims=True)))


def _lanczos(one: Configuration, normals: Array | None, v0: Array) -> tuple[float, Array, Array]:
    _, c, e, d = one.shape

    def tangent(v: Array) -> Array:
        return v if normals is None else v - np.sum(v * normals, axis=-1, keepdims=True) * normals

    def forward(x: Array) -> Array:
        return one.matvec(tangent(x.reshape(1, c, d))).ravel()

    def backward(y: Array) -> Array:
        return tangent(one.rmatvec(y.reshape(1, c, e))).ravel()

    if not np.any(forward(v0)) and not np.any(backward(np.ones(c * e))):
        return 0.0, np.zeros((c, e)), np.zeros((c, d))
    operator = LinearOperator((c * e, c * d), matvec=forward, rmatvec=backward, dtype=np.float64)
    start = v0 if d <= e else forward(v0)
    _, _, vt = svds(operator, k=1, v0=start, tol=1e-9, maxiter=10_000, return_singular_vectors="vh")
    v = tangent(vt[0].reshape(1, c, d))
    v = v / np.linalg.norm(v)
    u, value = _unit(one.matvec(v).reshape(1, -1))
    return float(value[0]), u.reshape(c, e), v[0]


@dataclass(frozen=True, eq=False)
class ClusterConstant:
    """The local constant of a measure with few atoms, with its parts and derivatives.

    Attributes
    ----------
    value : float
        ``max(symmetric, splitting)``.
    symmetric, splitting : float
        Norm of ``W^{1/2} J W^{-1/2}``; largest ``||V C_k A||`` over the atoms that can split (0 if none can).
    atom : int
        The atom with the largest field Jacobian among those that can split (-1 if none can).
    left, right : ndarray (c, e), (c, d)
        Singular vectors of the symmetric part.
    points_gradient, log_weights_gradient : ndarray (c, d), (c,)
        Derivatives of the part that attains ``value`` in the atoms and in the logarithms of their weights.
    """

    symmetric: float
    splitting: float
    atom: int
    left: Array
    right: Array
    points_gradient: Array
    log_weights_gradient: Array

    @cached_property
    def value(self) -> float:
        return max(self.symmetric, self.splitting)


def cluster_constant(attention: AttentionMap, mu: Any, *, n: int | None = None) -> ClusterConstant:
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
    ClusterConstant

    References
    ----------
    Own result; the proof is the split into a symmetric and an antisymmetric sector at the head of this module.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.measures import DiscreteMeasure
    >>> mu = DiscreteMeasure([[1.0], [-1.0], [0.0]], [0.25, 0.25, 0.5])
    >>> round(cluster_constant(SoftmaxAttention([[1.0]], [[1.0]]), mu, n=10**6 * 4).splitting, 12)
    0.5
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
    value, u, v = one.top()
    norms = np.where(can_split, np.linalg.norm(one.fields()[0], 2, axis=(1, 2)), -1.0)
    atom = int(norms.argmax()) if can_split.any() else -1
    splitting = max(0.0, float(norms.max()))
    if splitting > value[0]:
        gX, gw = split_gradient(one, np.array([atom]))
    else:
        gX, gw = one.gradient(u, v)
    return ClusterConstant(float(value[0]), splitting, atom, u[0], v[0], gX[0], gw[0])


def split_gradient(batch: Configuration, atoms: NDArray[np.int64]) -> tuple[Array, Array]:
    """Gradient of ``||V C_k A||`` at the atom ``k = atoms[b]`` of each configuration of a batch."""
    B, c, e, d = batch.shape
    b = np.arange(B)
    U, _, Wt = np.linalg.svd(batch.fields()[b, atoms])
    fl, fr = np.zeros((B, c, e)), np.zeros((B, c, d))
    fl[b, atoms], fr[b, atoms] = U[:, :, 0], Wt[:, 0, :]
    return batch.gradient(np.zeros((B, c, e)), np.zeros((B, c, d)), fl, fr)
