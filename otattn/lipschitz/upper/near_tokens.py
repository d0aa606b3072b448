r"""The Jacobian of softmax attention over all configurations near a given one.

For tokens X and every X' with ``|x'_i - x_i| <= rho``, ``||D_{X'} f||`` is at most the least of

- perturbation: ``||D_X f|| + || [b_ij] ||``, ``b_ij`` bounds of the norms of the blocks of
  ``D_{X'} f - D_X f``;
- second order: Taylor's formula, ``||D_X f|| + C r + ..`` with ``r = sqrt(n) rho``, since the moved tokens are within r of X in
  Frobenius norm (:mod:`otattn.lipschitz.near`): by far the sharpest near the tokens, useless far from them;
- direct: Cauchy-Schwarz over the intervals in which the rows of P' lie (T2b with intervals);
- global: a bound of the same map on a domain that contains the ball, when the caller has one. It must say of what it is a
  bound, and is verified with the certificate.

The intervals, and the proofs of the block bounds, are in
:mod:`otattn.lipschitz.constants.moved_rows`. By the mean value inequality the result bounds
``|f(X') - f(X'')| / |X' - X''|`` on this convex set of configurations. For several heads the block bounds,
and the direct bounds, add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse.linalg import svds

from otattn import _validate as check
from otattn._linalg import Array, norm_upper, product_error, spectral_norm_upper
from otattn.attention import AttentionMap, SoftmaxAttention
from otattn.attention.head import Head, heads_of
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import (
    Certificate,
    Statement,
    certify,
    dual_function,
    multiplier,
    problem_function,
)
from otattn.lipschitz.constants._dual_quadratic import EPS, row_span, top_eigenvalue, triangular
from otattn.lipschitz.constants.moved_rows import Made, MovedRows, best_thresholds, moved_rows
from otattn.lipschitz.containment import NearTokens
from otattn.lipschitz.hypotheses import every, order_two
from otattn.lipschitz.near.gram_jacobian import fits, jacobian_norm
from otattn.lipschitz.near.head import HeadAtTokens, head_at_tokens
from otattn.lipschitz.near.heads import form_error, heads_expansion
from otattn.lipschitz.theorem import theorem
from otattn.measures import as_discrete

__all__ = ["near_tokens"]

_BRANCHES = ("perturbation", "second_order", "direct", "global")
_DENSE_LIMIT = 2048  # rows or columns of the Jacobian up to which its norm is computed, and not only bounded


def near_tokens(attention: AttentionMap, X: ArrayLike, rho: float, *, global_bound: Bound | None = None) -> Certificate:
    r"""Certified bound of ``||D_{X'} f||`` over all tokens X' with ``|x'_i - x_i| <= rho``.

    Parameters
    ----------
    attention : SoftmaxAttention, MultiHeadAttention of such, or MaskedAttention of either
        A masked attention takes X as a sequence.
    X : array_like (n, d)
        Tokens, equal weights.
    rho : float
        How far each token may move; 0 gives the local constant.
    global_bound : Bound, optional
        An upper bound of the same map, for this n or any measure and p = 2, on a Ball or Box that contains the moved tokens,
        such as ``lipschitz_upper_bound``. Then the result is never worse.

    Returns
    -------
    Certificate
        Multipliers: the thresholds of the interval simplex bounds, ``values`` and ``keys`` ``(heads, n)``.
        ``details`` hold ``perturbation``, ``second_order``, ``direct``, ``global``, ``branch`` (the least of them),
        ``local_value`` (attained at X) and ``local_upper``, what the first two start from: the same norm rounded
        outward, where a Gram matrix of at most 8192 rows (tokens times values on the span of the heads) proves
        it; the direct bound at X beyond. Costs n^3 operations, arrays of n^2 (d + e) numbers and the Gram matrices.

    Raises
    ------
    ValueError
        Tokens of unequal weights, a negative rho, or a global bound that does not cover the moved tokens.

    Examples
    --------
    >>> import numpy as np
    >>> bound = near_tokens(SoftmaxAttention(np.eye(2), np.eye(2)), [[1.0, 0.0], [0.0, 1.0]], 1e-3)
    >>> 1.0 < bound.value / bound.details["local_value"] < 1.02
    True

    References
    ----------
    Our own theorem (local ball); the proofs are in the docstrings of this module and of ``moved_rows``.
    """
    heads = _heads(attention)
    dim = len(heads[0].A)
    mu = as_discrete(X)
    check.moderate(mu.points, "X")
    if not mu.is_uniform:
        raise ValueError(
            f"X must be tokens of equal weights, received weights from {mu.weights.min():g} to "
            f"{mu.weights.max():g}; give the tokens as an (n, d) array, repeated as often as they occur."
        )
    tokens = check.points(mu.points, "X", dim=dim)
    radius = check.positive(rho, "rho", zero=True, limit=check.LARGEST)
    near = NearTokens(check.frozen(np.array(tokens)), radius)
    options = {} if global_bound is None else {"global": global_bound}
    statement = Statement(attention, near, len(tokens), 2.0, options)
    problem = _data(statement)
    found = [best_thresholds(head) for head in _rows_of(problem)]
    multipliers = {name: np.stack([thresholds[name] for thresholds in found]) for name in ("values", "keys")}
    parts = _parts(problem, multipliers)
    if np.isnan(parts["local_value"]):
        parts["local_value"] = _attained(attention, tokens)
    branch = min(_BRANCHES, key=lambda name: parts[name])
    return certify(
        "near_tokens",
        statement=statement,
        problem=problem,
        multipliers=multipliers,
        solver="thresholds",
        solver_status="optimal",
        solver_value=parts[branch],
        witness=global_bound if branch == "global" else mu,
        details={"branch": branch, **parts},
        proved=parts[branch],
    )


@problem_function("near_tokens")
def _problem(statement: Statement) -> dict[str, Any]:
    """The data, with a global bound that is verified itself."""
    if "global" in statement.options and not statement.options["global"].verify():
        raise ValueError("the global bound is not proved.")
    return _data(statement)


def _data(statement: Statement) -> dict[str, Any]:
    """The heads and tokens on the span that the heads see, and the global value."""
    if (
        statement.p != 2.0
        or not isinstance(statement.domain, NearTokens)
        or statement.n != len(statement.domain.points)
    ):
        raise ValueError("near_tokens is about p = 2 and the tokens near given ones; the statement was altered.")
    heads = _heads(statement.attention)
    found = _on_span(heads, statement.domain.points)
    glob = np.inf
    bound = statement.options.get("global")
    if bound is not None:
        if not isinstance(bound, Bound):
            raise ValueError(
                f"global_bound must be a Bound, which says of what it is a bound, received {bound!r}; "
                "lipschitz_upper_bound makes one."
            )
        reason = bound.covers(statement.attention, domain=statement.domain, n=statement.n, p=2.0)
        if reason is not None:
            raise ValueError(
                f"global_bound must bound this map on a domain that contains the moved tokens, but {reason}; "
                f"received {bound!r}. The largest norm of a moved token is at most {_reach(statement.domain):.17g}."
            )
        glob = float(bound.value)
    return {**found, "rho": statement.domain.radius, "causal": heads[0].causal, "global": glob}


def _reach(near: NearTokens) -> float:
    return (float(np.linalg.norm(near.points, axis=1).max()) + near.radius) * (1.0 + 1e-15 * near.dim + 1e-15)


@dual_function("near_tokens")
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    parts = _parts(problem, multipliers)
    return min(parts[name] for name in _BRANCHES)


def _parts(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> dict[str, float]:
    heads = _rows_of(problem)
    n, H = len(problem["X"]), len(heads)
    thresholds = {name: multiplier(multipliers, name, (H, n), sign=True) for name in ("values", "keys")}
    here = _rows_of({**problem, "rho": 0.0})
    change, rounded, direct, at_center = np.zeros((n, n)), np.zeros((n, n)), 0.0, 0.0
    for h, (head, still) in enumerate(zip(heads, here, strict=True)):
        spread = head.spreads({name: value[h] for name, value in thresholds.items()})
        field_change = head.field_change(*spread)
        change += head.change(field_change)
        direct += head.direct(*spread, field_change)
        here_spread = still.spreads({name: np.zeros(n) for name in thresholds})
        rounded += still.change(still.field_change(*here_spread))  # what the unmoved rows are known to
        at_center += still.direct(*here_spread, np.zeros(n))
    # the rounding of the logits is part of the intervals; what is left is that of a few norms and sums
    allowance = 1.0 + 64.0 * (n + problem["X"].shape[1]) * EPS
    heads_here = [
        head_at_tokens(still, None, A, made.a + made.small * float(np.linalg.norm(A)))
        for still, A, made in zip(here, problem["A"], problem["made"], strict=True)
    ]
    norm = _jacobian_norm(here)
    if norm is None and fits(heads_here):
        norm = jacobian_norm(heads_here)
    local = at_center if norm is None else norm[1]
    scale = float(problem["scale"])
    return {
        "perturbation": (local + spectral_norm_upper(change)) * allowance * scale,
        "second_order": _second_order(heads_here, local + spectral_norm_upper(rounded), n, problem["rho"])
        * allowance
        * scale,
        "direct": direct * allowance * scale,
        "global": float(problem["global"]),
        "local_upper": local * scale,
        "local_value": float("nan") if norm is None else norm[0] * scale,
    }


def _second_order(heads: list[HeadAtTokens], local: float, n: int, rho: float) -> float:
    if rho == 0.0 or not fits(heads):
        return local if rho == 0.0 else float("inf")
    expansion, _ = heads_expansion(heads)
    return local + expansion.growth(rho * math.sqrt(n) * (1.0 + 4.0 * EPS))


def _rows_of(problem: Mapping[str, Any]) -> list[MovedRows]:
    n = len(problem["X"])
    mask = np.tril(np.ones((n, n), dtype=bool)) if problem["causal"] else None
    return [
        moved_rows(problem["X"], problem["Y"], A, V, c, problem["rho"], mask, made)
        for A, V, c, made in zip(problem["A"], problem["V"], problem["c"], problem["made"], strict=True)
    ]


def _jacobian_norm(heads: list[MovedRows]) -> tuple[float, float] | None:
    """``||D_X f||`` and the same rounded outward; None when the matrix is too large."""
    n, e, d = len(heads[0].P), heads[0].values.shape[1], heads[0].g.shape[1]
    if n * min(e, d) > _DENSE_LIMIT:
        return None
    J = heads[0].jacobian()
    for head in heads[1:]:
        J += head.jacobian()
    gram = J @ J.T if e <= d else J.T @ J
    low, high = top_eigenvalue(gram)
    # entries of the Gram matrix are sums of this many products
    return low, float(np.sqrt(high**2 + n * max(e, d) * EPS * float(np.trace(gram))))


def _attained(attention: Any, tokens: Array) -> float:
    """A value that the Jacobian at the tokens attains (Lanczos from a fixed start)."""
    J = attention.jacobian(tokens)
    start = np.random.default_rng(0).standard_normal(min(J.shape))
    _, _, right = svds(J, k=1, v0=start, tol=1e-6)
    return float(np.linalg.norm(J.matvec(right[0])) / np.linalg.norm(right[0]))


def _heads(attention: Any) -> tuple[Head, ...]:
    """The softmax heads, one or several."""
    heads = heads_of(attention) if isinstance(attention, AttentionMap) else ()
    odd = next((h.map for h in heads if not isinstance(h.map, SoftmaxAttention)), None if heads else attention)
    if odd is not None:
        raise TypeError(
            f"attention must be made of softmax heads, received {type(odd).__name__}; "
            "for other variants see local_lipschitz and lipschitz_upper_bound."
        )
    return heads


def _values(head: Head) -> tuple[Array, float]:
    """``W V``, and a bound of its error."""
    if head.output is None:
        return head.V, 0.0
    size = max(float(np.abs(head.V).max()), 1e-300)  # products of tiny values underflow
    V = head.V / size
    lost = product_error(head.output, V) + head.output_error * float(norm_upper(V))
    return (head.output @ V) * size, lost * size


def _on_span(heads: tuple[Head, ...], tokens: Array) -> dict[str, Any]:
    """Heads and tokens on the span that the heads see, values up to an isometry and scaled: norms do not change."""
    A, c = (np.stack([getattr(head, name) for head in heads]) for name in "Ac")
    values = [_values(head) for head in heads]
    V = np.stack([M for M, _ in values])
    size = float(np.abs(V).max(initial=0.0))
    scale = math.ldexp(1.0, min(math.frexp(size)[1], 1023)) if size > 0.0 else 1.0
    V = V / scale
    y = tokens - tokens.mean(axis=0)
    sizes, width = np.linalg.norm(tokens, axis=1), float(np.linalg.norm(y, axis=1).max())
    small = 8.0 * (sum(V.shape) + 8) * EPS
    scaled = [M / max(float(np.linalg.norm(M)), 1e-300) for M in (*A, *np.swapaxes(A, 1, 2), *V, *c[:, None])]
    basis, missed = row_span(*scaled)
    if basis is not None:  # what it misses counts as rounding of A, V and c
        A, V, c, tokens, y = basis.T @ A @ basis, V @ basis, c @ basis, tokens @ basis, y @ basis
        small += 2.0 * missed
    stack = np.concatenate(list(np.swapaxes(V, 1, 2)))  # a common isometry of the outputs: rotate onto their span
    V = np.swapaxes(triangular(stack.T).T.reshape(len(V), V.shape[2], -1), 1, 2)
    made = [
        Made(sizes, width, small, form_error(head), lost / scale, head.shift)
        for head, (_, lost) in zip(heads, values, strict=True)
    ]
    return {"A": A, "V": V, "c": c, "X": tokens, "Y": y, "made": made, "scale": scale}


def _near_tokens(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    odd = next((h.map for h in heads_of(attention) or () if not isinstance(h.map, SoftmaxAttention)), None)
    if odd is not None or not heads_of(attention):
        return f"every head must be SoftmaxAttention, received {type(odd or attention).__name__}"
    if not isinstance(domain, NearTokens):
        return f"domain must be the tokens near given ones (relaxations.near_tokens), received {domain!r}"
    return None if n == len(domain.points) else f"n must be {len(domain.points)}, the number of tokens, received {n}"


@theorem(
    "near_tokens",
    statement="intervals of the attention weights when every token moves by at most rho",
    hypotheses="softmax heads, one or several, masked or not; the balls around given tokens; p = 2",
    applies=every(order_two, _near_tokens),
    closed=False,
    rigorous=False,
)
def _best(attention: Any, near: NearTokens, n: int, p: float) -> Certificate:
    return near_tokens(attention, near.points, near.radius)
