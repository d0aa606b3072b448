r"""The covariance flow of softmax and L2 attention in the few columns of the factor that move.

Let ``A = K^T Q`` with Q, K of shape (r, d), r the rank of A, and ``Sigma = L L^T``. Softmax has ``L' = V Sigma K^T Q L``,
L2 has ``L' = 2 V Sigma K^T (I + 2 K Sigma K^T)^{-1} Q L``. If ``Q L_0 k = 0`` then ``Q L k`` solves a linear equation
with initial value 0: it stays 0, and so ``L k = L_0 k`` for ever. After a rotation of the columns of ``L_0``
(``Sigma_0`` does not feel it) therefore ``L = [C, N]`` with a constant C of ``d - r`` columns, ``Q C = 0``, and

    ``N' = V P E Y``,  ``Y = Q N``,  ``P = Sigma K^T = C (K C)^T + N W^T``,  ``W = K N``,

``E = I`` (softmax) or ``2 (I + 2 K Sigma K^T)^{-1}`` (L2). Y is carried as a second part of the state, ``Y' = Q N'``:
where a limit has ``Q Sigma = 0``, Y dies like a power of time, and as a difference ``Q N`` it would be rounding long
before the trend of Y can be seen; Y follows its own equation with all digits. For symmetric A, ``K = D Q`` with signs D,
``K C = 0`` and ``W = D Y``, so P and the velocity keep all digits too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.dynamics.gaussian_fields import GaussianField, L2Field, SoftmaxField, SumField

__all__ = ["Logits", "LowRankFlow", "low_rank_flow", "ranks_by_algebra", "signed_factors"]

Index = NDArray[np.intp]

RANK_TOL = 1e-13
"""Relative size of singular values of A that are rounding."""


@dataclass(frozen=True, eq=False)
class Logits:
    """``A = K^T Q`` for a stack, ``K = signs Q`` where signs are given: ``Q, K`` (B, r, d), ``signs`` (B, r) or None."""

    Q: Array
    K: Array
    signs: Array | None


class LowRankFlow:
    """A stack of flows: constant columns ``C (B, d, d - r)``, start ``N (B, d, r)`` and ``Y (B, r, r)``."""

    def __init__(self, logits: Logits, V: Array, L: Array, *, normalised: bool) -> None:
        self.Q, self.K, self.signs, self.V, self.normalised = logits.Q, logits.K, logits.signs, V, normalised
        r = logits.Q.shape[1]
        U, w, Wt = np.linalg.svd(logits.Q @ L)
        columns = L @ np.swapaxes(Wt, 1, 2)
        self.N, self.C, self.Y = columns[:, :, :r], columns[:, :, r:], U * w[:, None, :r]
        kept = logits.K @ self.C if self.signs is None else np.zeros((len(L), r, self.C.shape[2]))
        self.base = self.C @ np.swapaxes(kept, 1, 2)
        self.gram = kept @ np.swapaxes(kept, 1, 2)

    def take(self, index: Index) -> LowRankFlow:
        """Some members of the stack."""
        out = object.__new__(LowRankFlow)
        for name, value in vars(self).items():
            setattr(out, name, value[index] if isinstance(value, np.ndarray) else value)
        return out

    def factor(self, N: Array) -> Array:
        """``[C, N]``."""
        return np.concatenate([self.C, N], axis=2)

    def _parts(self, N: Array, Y: Array) -> tuple[Array, Array, Array | None, Array]:
        """``W``, ``P``, ``E`` (None: the identity) and ``E Y``."""
        W = self.K @ N if self.signs is None else self.signs[:, :, None] * Y
        P = self.base + N @ np.swapaxes(W, 1, 2)
        if not self.normalised:
            return W, P, None, Y
        E = 2.0 * np.linalg.inv(np.eye(Y.shape[1]) + 2.0 * (self.gram + W @ np.swapaxes(W, 1, 2)))
        return W, P, E, E @ Y

    def rate(self, N: Array, Y: Array) -> Array:
        """``N'``."""
        _, P, _, X = self._parts(N, Y)
        return np.asarray(self.V @ (P @ X))

    def jacobian(self, N: Array, Y: Array) -> Array:
        """Derivative of ``N'`` in ``(N, Y)``, of shape ``(B, d r, d r + r r)``.

        With ``X = E Y``: ``dN' = V (dN W^T X + N dW^T X + P E dY) - V P E (dW W^T + W dW^T) X`` (the last for L2, from
        ``dE = -E (dW W^T + W dW^T) E``), ``dW = K dN`` or ``signs dY``.
        """
        B, d, r = N.shape
        W, P, E, X = self._parts(N, Y)
        WX, VN, VP = np.swapaxes(W, 1, 2) @ X, self.V @ N, self.V @ P
        VPE = VP if E is None else VP @ E
        by_n = np.einsum("bij,bac->bicja", self.V, WX)
        by_y = np.einsum("bik,ac->bicka", VPE, np.eye(r))
        by_w = np.einsum("bia,bkc->bicka", VN, X)
        if E is not None:
            by_w = by_w - np.einsum("bik,bac->bicka", VPE, WX) - np.einsum("bia,bkc->bicka", VPE @ W, X)
        if self.signs is None:
            by_n = by_n + np.einsum("bicka,bkj->bicja", by_w, self.K)
        else:
            by_y = by_y + by_w * self.signs[:, None, None, :, None]
        return np.concatenate([by_n.reshape(B, d * r, d * r), by_y.reshape(B, d * r, r * r)], axis=2)


def signed_factors(A: Array) -> Logits | None:
    """``A = Q^T diag(signs) Q`` for a stack of symmetric A, rows of Q by size; None where one is not symmetric."""
    scale = np.abs(A).max(axis=(1, 2))
    At = np.swapaxes(A, 1, 2)
    if (np.abs(A - At).max(axis=(1, 2)) > RANK_TOL * scale).any():
        return None
    w, E = np.linalg.eigh(0.5 * (A + At))
    order = np.argsort(-np.abs(w), axis=1)
    w, E = np.take_along_axis(w, order, 1), np.take_along_axis(E, order[:, None, :], 2)
    w = np.where(np.abs(w) > RANK_TOL * np.abs(w[:, :1]), w, 0.0)
    r = max(1, int((w != 0.0).sum(axis=1).max()))
    Q = np.sqrt(np.abs(w[:, :r]))[:, :, None] * np.swapaxes(E[:, :, :r], 1, 2)
    signs = np.sign(w[:, :r])
    return Logits(Q, signs[:, :, None] * Q, signs)


def low_rank_flow(gaussians: GaussianField, L: Array) -> LowRankFlow | None:
    """The flow of a stack of covariances ``L L^T``, or None where the field is of another kind."""
    B, d = L.shape[:2]
    if isinstance(gaussians, SoftmaxField):
        A = np.array(np.broadcast_to(gaussians.A, (B, d, d)))
        logits = signed_factors(A)
        if logits is None:
            U, w, Wt = np.linalg.svd(A)
            w = np.where(w > RANK_TOL * w[:, :1], w, 0.0)
            r = max(1, int((w > 0.0).sum(axis=1).max()))
            root = np.sqrt(w[:, :r])[:, :, None]
            logits = Logits(root * Wt[:, :r], root * np.swapaxes(U[:, :, :r], 1, 2), None)
    elif isinstance(gaussians, L2Field):
        shape = (B, *gaussians.Q.shape[-2:])
        Q, K = np.array(np.broadcast_to(gaussians.Q, shape)), np.array(np.broadcast_to(gaussians.K, shape))
        if shape[1] > d:
            return None
        # K = signs Q row by row, or not at all
        signs = np.where((K == Q).all(axis=2), 1.0, np.where((K == -Q).all(axis=2), -1.0, 0.0))
        logits = Logits(Q, K, signs if signs.all() else None)
    else:
        return None
    V = np.array(np.broadcast_to(gaussians.V, (B, d, d)))
    return LowRankFlow(logits, V, L, normalised=isinstance(gaussians, L2Field))


MARGIN = 1e-10
"""Least real part of an eigenvalue of V (of V + V^T beside other heads), relative to ``|V|``, that counts as positive."""


def ranks_by_algebra(gaussians: GaussianField, L: Array) -> list[int | None]:
    r"""The rank of the limit of each ``L L^T`` where a theorem gives it for negative semi-definite logits, else None.

    Theorem. Let ``A = -Q^T Q`` with Q of shape (r, d) and rank r, let all eigenvalues of V have positive real part (V = F^T F
    invertible, for instance), and let ``Sigma_0`` be invertible. Then the flow ``Sigma' = V Sigma A Sigma + Sigma A Sigma V^T``
    exists for ever, stays bounded, ``Q Sigma -> 0``, and every limit point of Sigma has rank exactly ``d - r``, that is
    ``ceil(d/2)`` for ``r = floor(d/2)``. Changing the signs of both A and V changes nothing. L2 attention with K = -Q has
    limits of the same rank; and several such heads, with ``V_h + V_h^T > 0``, have rank ``d - r`` for r the rank of all
    their Q on top of each other.

    Proof. *Bounded.* Lyapunov's equation ``P V + V^T P = I`` has a solution P > 0. For ``E = tr(P Sigma)`` and ``X = Sigma Q^T
    Q Sigma``, ``E' = 2 tr(P V Sigma A Sigma) = -2 tr(P V X) = -tr((P V + V^T P) X) = -|Q Sigma|^2 <= 0``; so Sigma is
    bounded by ``E(0) / lambda_min(P)``, and the integral of ``|Q Sigma|^2`` is finite. ``Sigma'`` is bounded, so ``Q Sigma``
    tends to 0. (Of a finite limit only its stationary equation is needed: the trace of P times it says ``|Q Sigma|^2 = 0``.)

    *L2.* ``G Sigma = -2 V X`` with ``X = Sigma Q^T (I + 2 Q Sigma Q^T)^{-1} Q Sigma``, again symmetric and positive
    semi-definite, and at least ``Sigma Q^T Q Sigma`` times a constant as long as Sigma is bounded. *Several heads*: with
    P = I, ``E' = -sum_h tr((V_h + V_h^T) X_h)``, so each ``Q_h Sigma`` tends to 0.

    *At most d - r*: a limit point has its range in the kernel of Q (of all of them).

    *At least d - r*: for a factor, ``L' = (...) Q L``, and for k in the kernel of ``Q L_0`` (of dimension d - r) ``Q L k``
    solves a linear equation from 0, so it is 0 and ``L k = L_0 k``. So ``Sigma >= L_0 P_k L_0^T`` for ever, with ``P_k`` the
    projection on that kernel, which has rank d - r. QED

    Ranks and signs of A, V and L are numerical ones.
    """
    heads = _heads(gaussians)
    out: list[int | None] = []
    for b in range(len(L)):
        spread = np.linalg.svd(L[b], compute_uv=False)
        rows = [_descending(head, b, len(heads) == 1) for head in heads]
        known = [Q for Q in rows if Q is not None]
        if not rows or len(known) < len(rows) or not spread[-1] > 1e-12 * spread[0]:
            out.append(None)
        else:
            stacked = np.concatenate([Q / np.linalg.norm(Q) for Q in known])
            out.append(L.shape[1] - int(np.linalg.matrix_rank(stacked)))
    return out


def _heads(gaussians: GaussianField) -> list[SoftmaxField | L2Field]:
    """The heads of softmax and L2 attention that a field is the sum of, none where there are others."""
    if isinstance(gaussians, (SoftmaxField, L2Field)):
        return [gaussians]
    if not isinstance(gaussians, SumField):
        return []
    heads = [part for part in gaussians.parts if isinstance(part, (SoftmaxField, L2Field))]
    if len(heads) < len(gaussians.parts):
        return []
    outputs = gaussians.outputs
    return heads if outputs is None else [replace(h, V=W @ h.V) for h, W in zip(heads, outputs, strict=True)]


def _descending(head: SoftmaxField | L2Field, b: int, alone: bool) -> Array | None:
    """Q of member b where the theorem's hypotheses hold for the head, by itself or beside others."""

    def member(part: Array) -> Array:
        return part if part.ndim == 2 else part[b]

    if isinstance(head, L2Field):
        Q, K = member(head.Q), member(head.K)
        sign = 1.0 if (K == -Q).all() else -1.0 if (K == Q).all() else 0.0
    else:
        logits = signed_factors(member(head.A)[None])
        if logits is None or logits.signs is None:
            return None
        signs = logits.signs[0][logits.signs[0] != 0.0]
        Q = logits.Q[0][: len(signs)]
        sign = -signs[0] if signs.size and (signs == signs[0]).all() else 0.0
    V = sign * member(head.V)
    least = float(np.linalg.eigvals(V).real.min() if alone else np.linalg.eigvalsh(V + V.T)[0])
    return Q if Q.any() and least > MARGIN * float(np.linalg.norm(V, 2)) else None
