"""Several heads as a sum: each with its output, and the best shares of their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import EPS, Array, lambda_max_upper, mid
from otattn.attention import AttentionMap
from otattn.attention.head import Head, check_sizes, heads_of
from otattn.lipschitz.arithmetic.balls import BallMatrix, arithmetic_of
from otattn.lipschitz.arithmetic.intervals import is_interval, lift
from otattn.lipschitz.arithmetic.rounding import log, log_sum, top, up


def parts_of(attention: AttentionMap, *, exact: bool = False) -> tuple[Head, ...]:
    """The heads whose sum an attention map is, its sizes checked."""
    check_sizes(attention)
    heads = heads_of(attention, arithmetic=arithmetic_of(exact))
    if not heads:
        raise ValueError(
            "attention must be built of softmax, L2 or unnormalised heads for this theorem, received "
            f"{type(attention).__name__}; otattn.theorems(attention, ...) lists what applies."
        )
    return heads


@singledispatch
def head_bounds(
    map: AttentionMap, head: Head, region: Any, counts: Sequence[int | None], p: float, seen: Any = None
) -> list[Any]:
    """The closed forms that bound one head of a sum without its output, for the counts given; none for an unknown kind of map.

    A kind of attention registers its own. ``seen`` are the numbers of the head on the region, where they are known already.
    """
    return []


class Combination(NamedTuple):
    """A bound of a sum of heads: its logarithm, how it was found, the shares, and the logarithms of the heads' bounds."""

    value: float
    name: str
    shares: Array | None
    logs: list[float]


def combination(
    parts: Sequence[Head], best: Callable[[Sequence[Any]], list[float]], *, joint: bool = True
) -> Combination:
    """The least of the sum of the heads' bounds and, with ``joint``, of two joint bounds: from identity or own values.

    ``best`` gives logarithms of bounds of every head with the values listed (None: the identity) and without its output.
    """
    exact = parts[0].exact
    compact = [part.compact() for part in parts]
    # what rounding left out of the products W V moves the image by at most its norm times a head's bound with the identity
    identity = best([None] * len(parts))
    rounded = [log(error) + c for (_, error), c in zip(compact, identity, strict=True)]
    logs = best([M for M, _ in compact])
    found = Combination(top(total([lift(x) for x in logs] if exact else logs, rounded)), "sum", None, logs)
    if not joint or len(parts) == 1 or not math.isfinite(found.value):
        return found
    own = best([part.V for part in parts])
    outer = [log(part.output_error) + c for part, c in zip(parts, own, strict=True)]
    for name, factors, singles, lost in (
        ("identity", [part.total for part in parts], identity, rounded),
        ("outputs", [part.outer for part in parts], own, outer),
    ):
        value, s = combine_heads(factors, singles)
        bound = top(total([value], lost))
        if bound < found.value:
            found = Combination(bound, name, s, singles)
    return found


def total(logs: Sequence[Any], lost: Sequence[float]) -> Any:
    """Logarithm of the sum of the exponentials; an interval where one is among them."""
    terms = [x for x in (*logs, *lost) if top(x) > -math.inf]
    if not terms:
        return -math.inf
    return log_sum(*(lift(x) for x in terms)) if any(map(is_interval, terms)) else log_sum(*terms)


def combine_heads(U: list[Any], logs: list[float], *, shares: Array | None = None) -> tuple[Any, Array]:
    """Logarithm of ``lambda_max( sum_h c_h^2 U_h U_h^T / s_h )^{1/2}`` at the best s found, or at the given one, and that s.

    ``logs`` are the ``log c_h``. The search alternates: for a density matrix X (a running mean of the top
    eigenvectors' projectors) the best shares are proportional to ``c_h <U_h U_h^T, X>^{1/2}``.
    """
    largest = max(logs)
    if math.isinf(largest):
        return largest, np.full(len(U), 1.0 / len(U))
    if shares is not None:
        shares = np.maximum(shares, 1e-12)
        shares = shares / (float(shares.sum()) * (1.0 + 4.0 * len(U) * EPS))
    if isinstance(U[0], BallMatrix):
        return _proved_combination(U, logs, combine_heads([mid(M) for M in U], logs)[1] if shares is None else shares)
    # a large bound may belong to a small matrix: what counts is their product
    sizes = [float(np.abs(M).max(initial=0.0)) or 1.0 for M in U]
    largest = max(c + math.log(size) if M.any() else -math.inf for M, c, size in zip(U, logs, sizes, strict=True))
    if largest == -math.inf:
        return -math.inf, np.full(len(U), 1.0 / len(U))
    factors = [math.exp(min(c + math.log(size) - largest, 0.0)) / size for c, size in zip(logs, sizes, strict=True)]
    W = np.hstack([M * factor for M, factor in zip(U, factors, strict=True)])
    scale = float(np.abs(W).max(initial=0.0))
    if scale == 0.0:
        return -math.inf, np.full(len(U), 1.0 / len(U))
    W = W / scale
    if W.shape[0] > W.shape[1]:
        W = np.asarray(np.linalg.qr(W, mode="r"))  # lambda_max sees the column space only
    blocks = np.split(W, np.cumsum([M.shape[1] for M in U])[:-1], axis=1)
    grams = np.stack([B @ B.T for B in blocks])
    shares = _shares(grams) if shares is None else shares
    value = lambda_max_upper(np.einsum("hij,h->ij", grams, 1.0 / shares))
    return largest + math.log(scale) + 0.5 * log(up(value)), shares


def _proved_combination(U: list[BallMatrix], logs: list[float], shares: Array) -> tuple[Any, Array]:
    """The same at given shares, which are normalised in exact arithmetic."""
    largest = max(logs)
    total = lift(shares).sum()
    size = np.exp(lift(np.array(logs)) - largest) ** 2 * total / lift(shares)
    terms = [(M @ M.T) * size[h] for h, M in enumerate(U)]
    whole = sum(terms[1:], terms[0])
    return lift(largest) + 0.5 * log(np.maximum(lambda_max_upper(whole), 0.0)), shares


def _shares(grams: Array) -> Array:
    """Shares s of the simplex that make ``lambda_max( sum_h grams_h / s_h )`` small.

    The largest eigenvalue is smoothed, ``tau log tr exp(M / tau)`` with tau falling, and minimised in ``log
    s``.
    """
    size = len(grams[0])
    z = 0.5 * np.log(np.maximum(np.trace(grams, axis1=1, axis2=2), 1e-24))
    unit = float(np.linalg.eigvalsh(np.einsum("hij,h->ij", grams, 1.0 / _simplex(z)))[-1])

    def smoothed(z: Array, tau: float) -> tuple[float, Array]:
        s = _simplex(z)
        q, W = np.linalg.eigh(np.einsum("hij,h->ij", grams, 1.0 / (s * unit)))
        weight = np.exp((q - q[-1]) / tau)
        value = float(q[-1] + tau * np.log(weight.sum()))
        X = (W * (weight / weight.sum())) @ W.T
        slope = -np.einsum("hij,ij->h", grams, X) / (s * s * unit)
        return value, s * (slope - float(s @ slope))

    best, lowest = z, unit
    for tau in (0.05, 0.003, 2e-4, 1e-5, 1e-6) if size <= 64 else (0.05, 0.005):
        options = {"maxiter": 60 if size <= 64 else 6}
        z = minimize(smoothed, z, args=(tau,), jac=True, method="L-BFGS-B", options=options).x
        top = float(np.linalg.eigvalsh(np.einsum("hij,h->ij", grams, 1.0 / _simplex(z)))[-1])
        if top < lowest:
            best, lowest = z, top
    return _simplex(best)


def _simplex(z: Array) -> Array:
    """Shares proportional to ``exp z``, none below 1e-12."""
    s = np.maximum(np.exp(z - z.max()), 1e-12)
    return np.asarray(s / s.sum())
