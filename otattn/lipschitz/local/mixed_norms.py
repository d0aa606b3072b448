r"""Local constants in W_1 and W_inf: mixed norms of the Jacobian's blocks.

Write the Jacobian's blocks as ``J_ij = K_ij + delta_ij D_i`` with ``D_i = D_x Gamma_mu(x_i)``. If a share of atom j moves
by u, its own image moves by ``D_j u`` and every atom i by the share times ``K_ij u``; so

* W_1 (extreme points move a share of one atom): ``max_j max_{|u|=1} sum_i (w_i / w_j) |K_ij u| + |D_j u|``. For a share t
  of the atom the last terms are ``|D_j u + t K_jj u| + (1 - t) |K_jj u|``, convex in t and largest at t = 0, where they
  are ``|D_j u| + |K_jj u|``: a small share is at least as bad as the whole atom (t = 1, the particle part).
* W_inf (each output decides): ``max_i max_{|u|=1} sum_j |K_ij^T u| + |D_i^T u|``, by duality.

Both maximise ``h(u) = sum_k |B_k u|`` on a sphere, a convex function. From below: the fixed point
``u <- unit(sum_k B_k^T B_k u / |B_k u|)``, which never decreases h. From above: ``|B_k u| <= (|B_k u|^2 / s_k + s_k) / 2``
for any ``s_k > 0``, so ``h <= lambda_max(sum_k B_k^T B_k / s_k) / 2 + sum_k s_k / 2``; every s is a certificate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from otattn.attention import AttentionMap, L2Attention, PointwiseAttention, SoftmaxAttention
from otattn.attention.base import Measure
from otattn.errors import MemoryBudgetError
from otattn.lipschitz.arithmetic.sum_of_norms import ascend_sum_of_norms, cheap_upper, dual_upper, max_sum_of_norms

__all__ = ["max_sum_of_norms", "mixed_local"]

Array = NDArray[np.float64]
DENSE_BYTES = 2**30


def _row_basis(attention: AttentionMap, d: int) -> Array | None:
    """Orthonormal basis of the tokens' directions that the map reads, when it is smaller than the space."""
    if isinstance(attention, (SoftmaxAttention, L2Attention, PointwiseAttention)):
        head = attention.projections()
        rows = np.concatenate([head.Wq, head.Wk, head.V])
        if len(rows) < d:
            return np.asarray(np.linalg.qr(rows.T)[0])
    return None


def mixed_local(
    attention: AttentionMap, mu: Measure, p: float, rng: np.random.Generator
) -> tuple[float, float, float, Array, Array]:
    """Lower and upper value of the W_1 or W_inf local constant, the particle part from below, and the witness.

    ``mu`` has positive weights. The witness is ``(left (n, e), right (n, d))``: the displacement ``right`` and its image.
    """
    n, d = mu.n, mu.dim
    basis = _row_basis(attention, d)
    width = d if basis is None else basis.shape[1]
    e = d if attention.out_dim is None else attention.out_dim
    size = 8 * n * n * e * width
    if size > DENSE_BYTES:
        raise MemoryBudgetError(
            f"a local constant with p = {p:g} would need {size:,} bytes for the Jacobian's blocks, "
            f"allowed are {DENSE_BYTES:,}; give fewer tokens or use p = 2."
        )
    J = attention.jacobian(mu)
    if basis is None:
        blocks = J.to_dense().reshape(n, J.e, n, d)
    else:
        columns = np.empty((n, J.e, n, width))
        for j in range(n):
            for k in range(width):
                step = np.zeros((n, d))
                step[j] = basis[:, k]
                columns[:, :, j, k] = J.jvp(step)
        blocks = columns
    times = getattr(mu, "times", None) if attention.causal else None
    if attention.splits:
        D = attention.field_jacobian(mu.points, mu, times=times)
    else:  # only whole atoms move
        D = np.zeros((n, J.e, d))
    if basis is not None:
        D = D @ basis
    lower = upper = particle = 0.0
    best_j, best_u = 0, np.zeros(width if p == 1.0 else J.e)
    pending: list[tuple[Array, float, Array]] = []
    for j in range(n):
        if p == 1.0:
            whole = blocks[:, :, j] * (mu.weights / mu.weights[j])[:, None, None]
            own = D[j]
        else:
            whole = np.swapaxes(blocks[j], 0, 1).transpose(0, 2, 1)
            own = D[j].T
        parts = np.concatenate([whole, own[None]])
        parts[j] -= own
        if cheap_upper(whole) > particle:
            part_lo, part_u = ascend_sum_of_norms(whole, rng)
            if part_lo > particle:
                particle, best_j, best_u = part_lo, j, part_u
        if cheap_upper(parts) > lower:
            lo, u = ascend_sum_of_norms(parts, rng)
            lower = max(lower, lo)
            pending.append((parts, lo, u))
    lower = max(lower, particle)
    for parts, lo, u in sorted(pending, key=lambda item: -item[1]):
        if cheap_upper(parts) > max(lower, upper):
            upper = max(upper, dual_upper(parts, u, lo))
    upper = max(lower, upper)
    right = np.zeros((n, width))
    if p == 1.0:
        right[best_j] = best_u
    else:
        rows = np.einsum("e,ejd->jd", best_u, blocks[best_j])
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        right = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    moved = right if basis is None else right @ basis.T
    return lower, upper, particle, J.jvp(moved), moved
