r"""The rank of a limit from the stationary equation, for negative semi-definite logits.

Theorem. Let ``A = -Q^T Q`` with Q of shape (r, d) and rank r, let all eigenvalues of V have positive real part (V = F^T F
invertible, for instance), and let ``Sigma_0`` be invertible. Then the flow ``Sigma' = V Sigma A Sigma + Sigma A Sigma V^T``
exists for ever, stays bounded, ``Q Sigma -> 0``, and every limit point of Sigma has rank exactly ``d - r``, that is
``ceil(d/2)`` for ``r = floor(d/2)``. Changing the signs of both A and V changes nothing.

Proof. *Bounded.* Lyapunov's equation ``P V + V^T P = I`` has a solution P > 0. For ``E = tr(P Sigma)`` and ``X = Sigma Q^T
Q Sigma``, ``E' = 2 tr(P V Sigma A Sigma) = -2 tr(P V X) = -tr((P V + V^T P) X) = -|Q Sigma|^2 <= 0``; so Sigma is
bounded by ``E(0) / lambda_min(P)``, and the integral of ``|Q Sigma|^2`` is finite. ``Sigma'`` is bounded, so ``Q Sigma``
tends to 0. (Of a finite limit only its stationary equation is needed: the trace of P times it says ``|Q Sigma|^2 = 0``.)

*At most d - r*: a limit point has its range in the kernel of Q.

*At least d - r*: for a factor, ``L' = V Sigma A L``, and for k in the kernel of ``Q L_0`` (of dimension d - r) ``Q L k``
solves a linear equation from 0, so it is 0 and ``L k = L_0 k``. So ``Sigma >= L_0 P_k L_0^T`` for ever, with ``P_k`` the
projection on that kernel, which has rank d - r. QED
"""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array
from otattn.dynamics.gaussian_fields import GaussianField, SoftmaxField
from otattn.dynamics.low_rank_flow import signed_factors

__all__ = ["ranks_by_algebra"]

MARGIN = 1e-10
"""Least real part of an eigenvalue of V, relative to ``|V|``, that counts as positive."""


def ranks_by_algebra(gaussians: GaussianField, L: Array) -> list[int | None]:
    """The rank of the limit of each ``L L^T`` where the theorem above gives it, else None.

    Ranks and signs of A, V and L are numerical ones.
    """
    if not isinstance(gaussians, SoftmaxField):
        return [None] * len(L)
    d = L.shape[1]
    A, V = np.broadcast_to(gaussians.A, L.shape), np.broadcast_to(gaussians.V, L.shape)
    out: list[int | None] = []
    for b in range(len(L)):
        logits = signed_factors(A[b : b + 1])
        spread = np.linalg.svd(L[b], compute_uv=False)
        if logits is None or logits.signs is None or not spread[-1] > 1e-12 * spread[0]:
            out.append(None)
            continue
        signs = logits.signs[0][logits.signs[0] != 0.0]
        floor = MARGIN * float(np.linalg.norm(V[b], 2))
        same = signs.size > 0 and bool((signs == signs[0]).all())
        fits = same and float((-signs[0] * np.linalg.eigvals(V[b]).real).min()) > floor
        out.append(d - signs.size if fits else None)
    return out
