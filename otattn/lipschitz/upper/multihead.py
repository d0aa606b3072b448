r"""Multi-head attention: one constant from one bound a head.

With ``Gamma = sum_h W_h Gamma^(h)`` and value matrices ``V_h`` let ``U_h = W_h V_h``, and let ``c_h`` bound
the derivative ``J_h`` of head h with its value matrix replaced by the identity. For every s > 0 of sum at
most 1,

.. math:: \Bigl\| \sum_h U_h J_h \Bigr\|^2 \le \Bigl\| \sum_h \frac{U_h J_h J_h^T U_h^T}{s_h} \Bigr\|
          \le \lambda_{\max}\Bigl( \sum_h \frac{c_h^2\, U_h U_h^T}{s_h} \Bigr)

(``(sum_h a_h)(sum_h a_h)^T <= sum_h a_h a_h^T / s_h`` is Cauchy-Schwarz; the U_h act on tokens one by one).
The best s is a convex problem in H variables, with dual ``max_Y sum_h c_h sqrt(tr(U_h U_h^T Y))`` over
``Y >= 0``, ``tr Y = 1``. The same holds with ``U_h = W_h`` and ``c_h`` a bound of head h with its own values. Which of the
two a bound is about stands in it: the bounds are checked against the heads, never taken by convention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from otattn._linalg import lambda_max_upper, product_error, spectral_norm
from otattn.attention import AttentionMap, MaskedAttention, MultiHeadAttention
from otattn.attention.head import with_values
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import (
    Certificate,
    Statement,
    certify,
    dual_function,
    multiplier,
    problem_function,
)
from otattn.lipschitz.constants._dual_quadratic import EPS, triangular
from otattn.lipschitz.constants._solve import Proposal, cvxpy_solve

__all__ = ["head_with_values", "multihead"]

Array = NDArray[np.float64]
_ROUNDS = 12


def multihead(
    attention: Any,
    head_bounds: Sequence[Bound],
    *,
    solver: str = "CLARABEL",
    max_iter: int | None = None,
) -> Certificate:
    r"""Certified bound of a multi-head attention from bounds of its heads.

    Parameters
    ----------
    attention : MultiHeadAttention or MaskedAttention of one
    head_bounds : sequence of Bound (H,)
        Upper bounds, p = 2, all on one domain and for one n (or for any measure): of every head with the identity for its
        values, or of every head as it is. A mask of the whole map is one of each head (:func:`head_with_values` makes the
        maps).
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
        Head bounds that are too few, or that do not bound the heads on one domain.

    Examples
    --------
    >>> import numpy as np
    >>> import otattn as oa
    >>> heads = [oa.SoftmaxAttention(np.zeros((2, 2)), np.diag(v)) for v in ([3.0, 0.0], [0.0, 4.0])]
    >>> attention = oa.MultiHeadAttention(heads)
    >>> plain = [oa.bounds.column_bound(head_with_values(attention, h, None), radius=1.0, n=2) for h in (0, 1)]
    >>> round(multihead(attention, plain).value, 6)  # orthogonal values: not 3 + 4
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
    bounds = list(head_bounds)
    if len(bounds) != len(whole.heads):
        raise ValueError(
            f"head_bounds must give one bound a head, received {len(bounds)} for {len(whole.heads)} heads."
        )
    odd = next((b for b in bounds if not isinstance(b, Bound)), None)
    if odd is not None:
        raise ValueError(
            f"head_bounds must be Bounds, which say of what they are bounds, received {odd!r}; a number cannot be checked."
        )
    # a bound for any measure is one for n tokens
    n, domain = next((b.n for b in bounds if b.n is not None), None), bounds[0].domain
    statement = Statement(attention, domain, n, 2.0, {"heads": tuple(bounds)})
    values = _values_of(statement)
    c = np.array([float(b) for b in bounds])
    if not np.isfinite(c).all():
        raise ValueError(f"head_bounds must be finite, received {c}.")
    problem = _combination(statement)
    G, scale = problem["G"], problem["scale"]
    sizes = c * np.array([_norm(whole, h, values) for h in range(len(c))])
    plain = float(sizes.sum())
    s, proposal = np.full(len(c), 1.0 / len(c)), Proposal("none", "zero map", 0.0)
    if scale > 0 and plain > 0:
        s, proposal = _proposed(G, sizes / plain, solver, max_iter)
    return certify(
        "multihead",
        statement=statement,
        problem=problem,
        multipliers={"s": s},
        solver=proposal.solver,
        solver_status=proposal.status,
        solver_value=proposal.value * scale,
        details={"sum": plain, "values": values},
    )


def head_with_values(attention: Any, h: int, V: Array | None) -> AttentionMap:
    """Head h of a multi-head attention with other values ``V (e, d)``, None for the identity; masked if the whole is."""
    masked = isinstance(attention, MaskedAttention)
    head = _sum_of(attention).heads[h]
    inner = with_values(head.attention if isinstance(head, MaskedAttention) else head, V)
    return MaskedAttention(inner) if masked or isinstance(head, MaskedAttention) else inner


def _sum_of(attention: Any) -> MultiHeadAttention:
    whole = attention.attention if isinstance(attention, MaskedAttention) else attention
    if not isinstance(whole, MultiHeadAttention):
        raise TypeError(f"attention must be a MultiHeadAttention (masked or not), received {type(attention).__name__}.")
    return whole


def _as_is(attention: Any, h: int) -> AttentionMap:
    masked = isinstance(attention, MaskedAttention)
    head = _sum_of(attention).heads[h]
    return MaskedAttention(head) if masked and not isinstance(head, MaskedAttention) else head


def _values_of(statement: Statement) -> str:
    """Whether the bounds are those of the heads with "identity" values or with their "own"; refused when neither."""
    reasons = {}
    for name in ("identity", "own"):
        for h, bound in enumerate(statement.options["heads"]):
            head = (
                head_with_values(statement.attention, h, None) if name == "identity" else _as_is(statement.attention, h)
            )
            reason = bound.covers(head, domain=statement.domain, n=statement.n, p=2.0)
            if reason is not None:
                reasons[name] = f"head_bounds[{h}]: {reason}"
                break
        else:
            return name
    raise ValueError(
        "head_bounds must bound every head with identity values, or every head as it is, for one domain and one n; "
        f"received bounds that fit neither ({reasons['identity']}; {reasons['own']})."
    )


@problem_function("multihead")
def _problem(statement: Statement) -> dict[str, Any]:
    """The combination, of head bounds that are verified themselves."""
    for h, bound in enumerate(statement.options["heads"]):
        if not bound.verify(rigorous=statement.exact):
            raise CertificateError(f"the bound of head {h} is not proved.")
    return _combination(statement)


def _combination(statement: Statement) -> dict[str, Any]:
    """``c_h^2 U_h U_h^T`` in units of the largest ``c_h``."""
    if statement.p != 2.0:
        raise ValueError(f"p must be 2 for multihead, received {statement.p:g}.")
    attention, bounds = statement.attention, statement.options["heads"]
    whole = _sum_of(attention)
    if len(bounds) != len(whole.heads):
        raise ValueError(f"heads must be {len(whole.heads)} bounds, received {len(bounds)}; they were altered.")
    values = _values_of(statement)
    c = np.array([float(b) for b in bounds])
    # the unit is a float near the largest bound of a single term
    scale = float((c * [_norm(whole, h, values) for h in range(len(c))]).max())
    U = [_outputs(whole, h, values) for h in range(len(c))]
    if scale == 0.0:
        if all(k == 0.0 or not W.any() or not (V is None or V.any()) for (W, V), k in zip(U, c, strict=True)):
            return {"G": np.zeros((len(c), 1, 1)), "scale": 0.0, "slack": 0.0}
        scale = 1e-290  # the product was too small for a float
    if statement.exact:
        parts = [BallMatrix.exact(W) @ V if V is not None else BallMatrix.exact(W) for W, V in U]
        return {"G": [(M @ M.T) * np.square(lift(k) / scale) for M, k in zip(parts, c, strict=True)], "scale": scale}
    products = [(W if V is None else W @ V) * (k / scale) for (W, V), k in zip(U, c, strict=True)]
    rounded = sum(0.0 if V is None else product_error(W, V) * (k / scale) for (W, V), k in zip(U, c, strict=True))
    size = max(spectral_norm(M) for M in products)  # about one
    slack = 4.0 * len(c) * rounded / size if size > 0 else 0.0
    return {"G": np.stack([M @ M.T for M in products]), "scale": scale, "slack": slack}


@dual_function("multihead", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    G = problem["G"]
    s = multiplier(multipliers, "s", (len(G),), sign=True)
    if abs(float(s.sum()) - 1.0) > 1e-9:
        raise CertificateError(f"multiplier 's' must lie on the simplex, received a sum of {s.sum():g}.")
    if problem["scale"] == 0.0:
        return 0.0
    if isinstance(G, list):
        live = [h for h, M in enumerate(G) if M.any()]
        if not live:
            return 0.0
        # heads of zero weight give their share to the others
        total = lift(s[live]).sum()
        whole = sum((G[h] * (total / s[h]) for h in live[1:]), G[live[0]] * (total / s[live[0]]))
        return np.sqrt(np.maximum(lambda_max_upper(whole), 0.0)) * problem["scale"]
    live = np.trace(G, axis1=1, axis2=2) > 0
    if not live.any():
        return 0.0
    share = float(s[live].sum()) * (1.0 + len(G) * EPS)
    top = _value(G[live], s[live] / share) * (1.0 + 32.0 * G.shape[1] * EPS + problem["slack"])
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


def _outputs(attention: MultiHeadAttention, h: int, values: str) -> tuple[Array, Array | None]:
    """``U_h`` as ``(W_h, V_h)``, or ``(W_h, None)`` when the bounds are of the heads with their own values."""
    head: Any = attention.heads[h]
    head = head.attention if isinstance(head, MaskedAttention) else head
    V = np.asarray(head.V)
    W = np.eye(len(V)) if attention.outputs is None else np.asarray(attention.outputs[h])
    if values == "own":
        return W, None
    return (V, None) if attention.outputs is None else (W, V)


def _norm(attention: MultiHeadAttention, h: int, values: str) -> float:
    """``||U_h||`` from matrices of the head's size."""
    W, V = _outputs(attention, h, values)
    return spectral_norm(W if V is None else triangular(W) @ V)
