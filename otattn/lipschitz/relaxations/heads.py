r"""Multi-head attention: one constant from one bound a head.

With ``Gamma = sum_h W_h Gamma^(h)`` and value matrices ``V_h`` let ``U_h = W_h V_h``, and let ``c_h`` bound
the derivative ``J_h`` of head h with its value matrix replaced by the identity. For every s > 0 of sum at
most 1,

.. math:: \Bigl\| \sum_h U_h J_h \Bigr\|^2 \le \Bigl\| \sum_h \frac{U_h J_h J_h^T U_h^T}{s_h} \Bigr\|
          \le \lambda_{\max}\Bigl( \sum_h \frac{c_h^2\, U_h U_h^T}{s_h} \Bigr)

(``(sum_h a_h)(sum_h a_h)^T <= sum_h a_h a_h^T / s_h`` is Cauchy-Schwarz; the U_h act on tokens one by one).
The best s is a convex problem in H variables, with dual ``max_Y sum_h c_h sqrt(tr(U_h U_h^T Y))`` over
``Y >= 0``, ``tr Y = 1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from otattn._linalg import lambda_max_upper, spectral_norm
from otattn.attention import MaskedAttention, MultiHeadAttention
from otattn.errors import CertificateError
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.relaxations._quadratic import EPS, triangular
from otattn.lipschitz.relaxations._solve import Proposal, cvxpy_solve
from otattn.lipschitz.relaxations.certificate import Certificate, certify, dual_function, multiplier

__all__ = ["multihead"]

Array = NDArray[np.float64]
_ROUNDS = 12


def multihead(
    attention: Any,
    head_bounds: Sequence[Bound | float],
    *,
    solver: str = "CLARABEL",
    max_iter: int | None = None,
) -> Certificate:
    r"""Certified bound of a multi-head attention from bounds of its heads with identity value matrices.

    Parameters
    ----------
    attention : MultiHeadAttention or MaskedAttention of one
    head_bounds : sequence of Bound or float (H,)
        Upper bounds, p = 2, of each head with V = I, all on the same domain and for the same n.
    solver : {"CLARABEL", "SCS"}
        Solver of the small semidefinite programs (on the span of the eigenvectors met so far).
    max_iter : int, optional
        Iteration limit of the solver.

    Returns
    -------
    Certificate
        Multiplier ``s`` (H,), on the simplex. ``details["sum"]`` is the plain sum ``sum_h c_h ||U_h||``.

    Raises
    ------
    ValueError
        Head bounds that are too few, not upper bounds, of different n, or not of order 2.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import SoftmaxAttention
    >>> heads = [SoftmaxAttention(np.eye(2), np.diag(v)) for v in ([1.0, 0.0], [0.0, 1.0])]
    >>> round(multihead(MultiHeadAttention(heads), [3.0, 4.0]).value, 6)  # orthogonal values: not 3 + 4
    5.0

    References
    ----------
    Our own theorem (multi-head); the proof is in the docstring of this module.
    """
    whole = attention.attention if isinstance(attention, MaskedAttention) else attention
    if not isinstance(whole, MultiHeadAttention):
        raise TypeError(
            f"attention must be a MultiHeadAttention (masked or not), received {type(attention).__name__}; "
            "the bound of a single head needs no combination."
        )
    c, n, domain = _checked(head_bounds, len(whole.heads))
    U = [_values(whole, h) for h in range(len(whole.heads))]
    D = len(U[0])
    norms = np.array([_norm(whole, h) for h in range(len(U))])
    sizes = c * norms
    plain = float(sizes.sum())
    scale = float(sizes.max())
    G = np.zeros((len(U), D, D))
    s, proposal = np.full(len(U), 1.0 / len(U)), Proposal("none", "zero map", 0.0)
    if scale > 0:
        for h, (M, k) in enumerate(zip(U, c / scale, strict=True)):
            G[h] = (k * M) @ (k * M).T
        s, proposal = _proposed(G, sizes / plain, solver, max_iter)
    return certify(
        "multihead",
        problem={"G": G, "scale": scale},
        multipliers={"s": s},
        source="multi-head (own theorem): min over s of lambda_max(sum_h c_h^2 U_h U_h'/s_h)^(1/2)",
        solver=proposal.solver,
        solver_status=proposal.status,
        solver_value=proposal.value * scale,
        domain=domain,
        n=n,
        details={"sum": plain},
    )


@dual_function("multihead")
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    G = problem["G"]
    s = multiplier(multipliers, "s", (len(G),), sign=True)
    if abs(float(s.sum()) - 1.0) > 1e-9:
        raise CertificateError(f"multiplier 's' must lie on the simplex, received a sum of {s.sum():g}.")
    live = np.trace(G, axis1=1, axis2=2) > 0
    total = float(s[live].sum()) * (1.0 + len(G) * EPS)
    if not live.any():
        return 0.0
    # heads of zero weight give their share to the others
    top = _value(G[live], s[live] / total) * (1.0 + 32.0 * G.shape[1] * EPS)
    return float(problem["scale"]) * math.sqrt(top)


def _value(G: Array, s: Array) -> float:
    return lambda_max_upper(np.einsum("h,hab->ab", 1.0 / s, G))


def _proposed(G: Array, start: Array, solver: str, max_iter: int | None) -> tuple[Array, Proposal]:
    """Constraint generation: only the directions of a growing span of top eigenvectors count."""
    live = np.flatnonzero(np.trace(G, axis1=1, axis2=2) > 0)
    H, s = G[live], start[live] / start[live].sum()
    best, best_value = s, _value(H, s)
    span = np.zeros((G.shape[1], 0))
    proposal = Proposal(solver, "not run", float("nan"))
    for _ in range(_ROUNDS):
        D = len(span)
        _, vectors = eigh(np.einsum("h,hab->ab", 1.0 / s, H), subset_by_index=[max(0, D - 3), D - 1])
        span = np.linalg.qr(np.column_stack([span, vectors]))[0]
        s, proposal = _restricted(H, span, solver, max_iter)
        value = _value(H, s)
        if value < best_value:
            best, best_value = s, value
        if value <= proposal.value**2 * (1.0 + 1e-7):
            break
    full = np.zeros(len(G))
    full[live] = best
    return full, proposal


def _restricted(G: Array, span: Array, solver: str, max_iter: int | None) -> tuple[Array, Proposal]:
    """The best s when only directions in ``span`` count, and the square root of its value there."""
    import cvxpy as cp

    small = np.einsum("ar,hab,bs->hrs", span, G, span, optimize=True)
    s, q = cp.Variable(len(G)), cp.Variable(len(G))
    total = sum(q[h] * (small[h] + small[h].T) / 2 for h in range(len(G)))
    problem = cp.Problem(cp.Minimize(cp.lambda_max(total)), [cp.sum(s) <= 1, q >= cp.inv_pos(s)])
    proposal = cvxpy_solve(problem, solver, max_iter)
    mass = np.asarray(s.value, dtype=np.float64)
    mass = np.maximum(mass, 1e-9 * max(float(mass.max()), 1e-9))
    root = Proposal(proposal.solver, proposal.status, float(np.sqrt(max(0.0, proposal.value))))
    return mass / mass.sum(), root


def _checked(head_bounds: Sequence[Bound | float], count: int) -> tuple[Array, int | None, Any]:
    bounds = list(head_bounds)
    if len(bounds) != count:
        raise ValueError(f"head_bounds must give one bound a head, received {len(bounds)} for {count} heads.")
    for h, bound in enumerate(bounds):
        if isinstance(bound, Bound) and (bound.kind != "upper" or bound.p != 2.0):
            raise ValueError(f"head_bounds[{h}] must be an upper bound of order 2, received {bound!r}.")
    values = np.array([float(bound) for bound in bounds])
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"head_bounds must be finite and non-negative, received {values}.")
    known = [bound for bound in bounds if isinstance(bound, Bound)]
    numbers = {bound.n for bound in known}
    if len(numbers) > 1:
        raise ValueError(
            f"head_bounds must belong to one number of tokens, received {numbers}; compute them for one n."
        )
    domains = [bound.domain for bound in known]
    same = bool(domains) and all(domain is domains[0] for domain in domains)
    return values, numbers.pop() if numbers else None, domains[0] if same else None


def _value_matrix(attention: MultiHeadAttention, h: int) -> Array:
    head: Any = attention.heads[h]
    head = head.attention if isinstance(head, MaskedAttention) else head
    V = getattr(head, "V", None)
    if V is None:
        raise TypeError(f"head {h} must have a value matrix V, received {type(head).__name__}.")
    return np.asarray(V)


def _values(attention: MultiHeadAttention, h: int) -> Array:
    V = _value_matrix(attention, h)
    return V if attention.outputs is None else attention.outputs[h] @ V


def _norm(attention: MultiHeadAttention, h: int) -> float:
    """``||W_h V_h||`` from matrices of the head's size."""
    V = _value_matrix(attention, h)
    return spectral_norm(V if attention.outputs is None else triangular(attention.outputs[h]) @ V)
