"""Several heads as a sum: each with its output, and the best shares of their bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from otattn._linalg import lambda_max_upper, mid, norm_upper, product_error
from otattn.attention import AttentionMap, L2Attention, MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.attention.pointwise import PointwiseAttention
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import log, up
from otattn.lipschitz.constants.setting import check_sizes

__all__ = ["HeadPart", "combine_heads", "heads_of"]

Array = NDArray[np.float64]
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class HeadPart:
    """One head of a sum, ``W Gamma``: ``compact`` is a value matrix with ``|compact x| = |W V x|``.

    ``output_error`` and ``error`` bound what rounding left out of ``output``, and of ``compact`` and ``values``, in the
    operator norm (``compact`` up to an isometry); 0 where they are exact, or balls.
    """

    head: SoftmaxAttention | L2Attention | PointwiseAttention
    output: Any
    compact: Any
    causal: bool
    output_error: float = 0.0
    error: float = 0.0

    @property
    def values(self) -> Any:
        """The total value matrix ``W V``."""
        return self.output @ self.head.V


def heads_of(attention: AttentionMap, *, exact: bool = False) -> list[HeadPart]:
    """The heads of an attention map; nested sums are opened, a mask is handed down. ``exact``: products in balls."""
    check_sizes(attention)
    return _parts(attention, None, 0.0, False, exact)


def _parts(attention: AttentionMap, W: Any, lost: float, causal: bool, exact: bool) -> list[HeadPart]:
    """``lost`` bounds what rounding left out of W."""
    if isinstance(attention, MaskedAttention):
        return _parts(attention.attention, W, lost, True, exact)
    if isinstance(attention, MultiHeadAttention):
        out: list[HeadPart] = []
        for i, head in enumerate(attention.heads):
            own: Any = None if attention.outputs is None else attention.outputs[i]
            if own is not None and exact:
                own = BallMatrix.exact(own)
            total, rest = (own, 0.0) if W is None else (W, lost)
            if W is not None and own is not None:
                total = W @ own
                rest = 0.0 if exact else product_error(W, own) + lost * float(norm_upper(own))
            out += _parts(head, total, rest, causal, exact)
        return out
    if not isinstance(attention, SoftmaxAttention | L2Attention | PointwiseAttention):
        raise ValueError(
            "attention must be built of softmax, L2 or unnormalised heads for this theorem, received "
            f"{type(attention).__name__}; otattn.theorems(attention, ...) lists what applies."
        )
    compact = np.asarray(attention.V)
    if exact:
        W = BallMatrix.exact(np.eye(len(compact))) if W is None else W
        return [HeadPart(attention, W, W @ compact, causal)]
    size, error = float(norm_upper(compact)), 0.0
    if W is None:
        W = np.eye(len(compact))
    else:
        error = lost * size
        size *= float(norm_upper(W))
        compact = (np.linalg.qr(W, mode="r") if W.shape[0] > W.shape[1] else W) @ compact
    if compact.shape[0] > compact.shape[1]:
        compact = np.asarray(np.linalg.qr(compact, mode="r"))
    if compact is not attention.V:
        error += 8.0 * (sum(W.shape) + sum(attention.V.shape)) * _EPS * size
    return [HeadPart(attention, W, np.asarray(compact), causal, lost, error)]


def combine_heads(U: list[Any], logs: list[float]) -> tuple[Any, Array]:
    """Logarithm of ``lambda_max( sum_h c_h^2 U_h U_h^T / s_h )^{1/2}`` at the best s found, and that s.

    ``logs`` are the ``log c_h``. The search alternates: for a density matrix X (a running mean of the top
    eigenvectors' projectors) the best shares are proportional to ``c_h <U_h U_h^T, X>^{1/2}``.
    """
    largest = max(logs)
    if math.isinf(largest):
        return largest, np.full(len(U), 1.0 / len(U))
    if isinstance(U[0], BallMatrix):
        return _proved_combination(U, logs, combine_heads([mid(M) for M in U], logs)[1])
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
    shares = _shares(grams)
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
    for tau in (0.05, 0.003, 0.0002) if size <= 64 else (0.05, 0.005):
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
