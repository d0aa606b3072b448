r"""Upper bounds of the local constant at one measure, in one pass over the attention matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._linalg import spectral_norm_upper
from otattn.attention import AttentionMap, L2Attention, SoftmaxAttention
from otattn.attention.base import Measure
from otattn.attention.kernels import NormalisedKernel
from otattn.attention.pointwise import LinearAttention, PointwiseAttention, ReLUAttention
from otattn.lipschitz.arithmetic.rounding import log, safe_exp, up
from otattn.lipschitz.bound import Bound, prove
from otattn.lipschitz.catalogue import every, order_two, sum_of_heads, theorem
from otattn.lipschitz.constants.sum_of_heads import HeadPart, combine_heads, heads_of

__all__ = ["local_upper_bound"]

Array = NDArray[np.float64]
BLOCK_BYTES = 64 * 2**20
IDENTITY_LIMIT = 32
"""Heads are combined through bounds with identity values up to this dimension (d^2 numbers an atom)."""
_EPS = float(np.finfo(np.float64).eps)


def local_upper_bound(attention: AttentionMap, mu: Any) -> Bound:
    r"""An upper bound of the ``W_2`` local constant at ``mu``, without forming the Jacobian.

    Softmax: ``( max_j sum_i w_i P_ij lambda_i / w_j )^{1/2} + max_i ||V C_i A||``,
    ``lambda_i = lambda_max( V (I + |g_i|^2 C_i) V^T )``. It bounds the particle and the splitting part,
    with or without a mask, for tokens (weights ``1/n``) and weighted atoms.

    Proof. Cauchy-Schwarz with the weights P_ij: ``|sum_j P_ij V B_ij eps_j|^2 <= lambda_max( sum_j P_ij V
    B_ij B_ij^T V^T ) sum_j P_ij |eps_j|^2`` with ``B_ij = I + (x_j - m_i) g_i^T``; the sum of the ``B B^T``
    is ``I + |g_i|^2 C_i`` since the ``x_j - m_i`` are centred. Multiply by w_i, sum over i and collect
    ``|eps_j|^2``. The other term acts row by row.

    L2: ``lambda_i = lambda_max( V [I - 2 (C_i H + H C_i) + sum_j P_ij |g_ij|^2 (x_j - m_i)(x_j - m_i)^T]
    V^T )``, ``H = K^T K``, ``g_ij = 2 K^T (Q x_i - K x_j)``, and ``||V C_i 2 K^T Q||``. Unnormalised: ``(
    sum_i w_i lambda_i )^{1/2} + max_i ||V sum_j w_j h'_ij x_j x_j^T A||`` with ``lambda_i = lambda_max(
    sum_j w_j V B_ij B_ij^T V^T )``, ``B_ij = h_ij I + h'_ij x_j g_i^T``. Several heads: the smaller of the
    sum of their bounds and (for d up to 32) the combination of ``multi_head_bound``.

    Parameters
    ----------
    attention : softmax, L2, unnormalised or multi-head attention, masked or not
    mu : measure or array_like (n, d)

    Returns
    -------
    Bound
        kind "upper" with ``domain = mu``: it belongs to this measure only.

    Raises
    ------
    ValueError
        Another kind of attention.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> local_upper_bound(SoftmaxAttention([[1.0]], [[1.0]]), [[0.0], [0.0]]).value
    1.000...

    References
    ----------
    otattn, local bound; costs ``n^2 e^2`` operations a head.
    """
    measure = attention.as_measure(mu)
    return prove("local_upper_bound", attention, measure, measure.n, 2.0)


def _at_measure(attention: AttentionMap, measure: Any, n: int | None, p: float) -> str | None:
    """A measure of the map's kind, and its number of atoms."""
    if not hasattr(measure, "points") or not hasattr(measure, "weights"):
        return f"domain must be the measure at which the constant is bounded, received {measure!r}"
    if n != measure.n:
        return f"n must be {measure.n}, the number of atoms, received {n}"
    if attention.causal and getattr(measure, "times", None) is None:
        return f"a masked map needs a measure whose atoms have times, received {type(measure).__name__}"
    return None


@theorem(
    "local_upper_bound",
    statement="(max_j sum_i w_i P_ij lambda_i / w_j)^{1/2} + max_i ||V C_i A||",
    hypotheses="softmax, L2, unnormalised, several heads, masked or not; one measure; p = 2",
    applies=every(sum_of_heads, _at_measure, order_two),
    quantity="local",
    rigorous=False,
)
def _local_upper(attention: AttentionMap, measure: Measure, n: int | None, p: float, exact: bool) -> Bound:
    live = measure if (measure.weights > 0).all() else measure.support()
    times = getattr(live, "times", None) if attention.causal else None
    check.moderate(live.points, "mu")
    heads = heads_of(attention)
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            value, parts = _value(heads, live, times)
    except np.linalg.LinAlgError as exc:
        raise OverflowError("the derivative must fit in float64; scale the tokens, A or V down.") from exc
    if math.isnan(value):
        raise OverflowError("the derivative must fit in float64; scale the tokens, A or V down.")
    return Bound(
        up(float(value)),
        "upper",
        domain=measure,
        n=measure.n,
        theorem="local_upper_bound",
        quantity="local",
        details={"head_bounds": [float(c) for c in parts]},
    )


def _value(heads: list[HeadPart], live: Measure, times: Array | None) -> tuple[float, list[float]]:
    """The bound, and those of the heads with their outputs."""
    parts = [_head(part.head, part.compact, live, times) for part in heads]
    value = float(sum(parts))
    if len(heads) > 1 and value > 0:
        singles = [log(_head(part.head, part.head.V, live, times)) for part in heads]
        value = min(value, safe_exp(combine_heads([part.output for part in heads], singles)[0]))
    if len(heads) > 1 and value > 0 and live.dim <= IDENTITY_LIMIT:
        singles = [log(_head(part.head, np.eye(live.dim), live, times)) for part in heads]
        value = min(value, safe_exp(combine_heads([part.values for part in heads], singles)[0]))
    return value, parts


def _head(head: AttentionMap, U: Array, mu: Measure, times: Array | None) -> float:
    if isinstance(head, PointwiseAttention):
        return _pointwise(head, U, mu, times)
    assert isinstance(head, SoftmaxAttention | L2Attention)
    return _normalised(head, U, mu, times)


def _normalised(head: SoftmaxAttention | L2Attention, U: Array, mu: Measure, times: Array | None) -> float:
    kernel: NormalisedKernel = head._kernel(mu, times, None)
    maps = kernel.head
    w, n = mu.weights, mu.n
    centre = w @ mu.points
    z = mu.points - centre
    values, keys = z @ U.T, kernel.K
    e, k = values.shape[1], keys.shape[1]
    queries = kernel.queries(mu.points)
    field = np.asarray(np.linalg.qr(maps.Wq.T, mode="r")).T  # ||M W_q|| = ||M R^T||
    identity = U @ U.T
    outer = (values[:, :, None] * values[:, None, :]).reshape(n, e * e)
    cross = (values[:, :, None] * keys[:, None, :]).reshape(n, e * k)
    turn = maps.Wk @ U.T  # (k, e)
    columns, field_norms = np.zeros(n), np.zeros(n)
    squares, far = np.sum(values**2, axis=1), float(np.linalg.norm(keys, axis=1).max())
    unit = 4.0 * (n + e + k + 16) * _EPS
    step = max(1, BLOCK_BYTES // (8 * (2 * n + 3 * e * e + 2 * e * k)))
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        P = kernel.weights_of(queries, times, rows)
        mean = P @ values
        C = (P @ outer).reshape(-1, e, e) - mean[:, :, None] * mean[:, None, :]
        M = (P @ cross).reshape(-1, e, k) - mean[:, :, None] * (P @ keys)[:, None, :]
        if maps.quadratic:
            # K x_j in the shifted frame: g_ij = W_k^T (q_i - 2 K_j), and |g_ij|^2 expands in K_j
            form = identity + _quadratic_rows(P, queries[rows], keys, values, mean, maps.Wk)
            bend = 2.0 * np.einsum("rek,kf->ref", M, turn)
            form = form - bend - np.swapaxes(bend, 1, 2)
        else:
            g2 = np.sum((queries[rows] @ maps.Wk) ** 2, axis=1)
            form = identity + g2[:, None, None] * C
        lam = np.maximum(np.linalg.eigvalsh(form)[:, -1], 0.0)
        # covariances were formed by a difference of second moments: what rounded is their size before it
        second, steep = P @ squares, np.linalg.norm(queries[rows] @ maps.Wk, axis=1)
        if maps.quadratic:
            steep = steep + 2.0 * far * float(spectral_norm_upper(maps.Wk))
        lam += unit * (math.sqrt(float(np.trace(identity))) + steep * np.sqrt(second)) ** 2
        columns += (w[rows] * lam) @ P
        field_norms[rows] = np.linalg.norm(M @ field, ord=2, axis=(1, 2))
    # what a query and a key were made of, however much of it cancelled; a logit rounds by the one times the other
    size = float(np.linalg.norm(mu.points, axis=1).max() + np.linalg.norm(centre))
    q, made_q = _sides(queries, size * float(spectral_norm_upper(maps.Wq)))
    y, made_y = _sides(keys, size * float(spectral_norm_upper(maps.Wk)))
    reach = made_q * y + q * made_y + 64.0 * _EPS * made_q * made_y
    if maps.quadratic:
        reach += 2.0 * (made_y * y + 64.0 * _EPS * made_y**2)
    slack = _rounding(reach, mu.dim + k)
    spread = float(np.abs(values).max(initial=0.0) * np.abs(keys).max(initial=0.0))
    rows_norm = float(field_norms.max()) + unit * math.sqrt(e * k) * spread * spectral_norm_upper(field)
    return math.sqrt(float((columns / w).max())) * slack + rows_norm * slack


def _quadratic_rows(P: Array, q: Array, keys: Array, values: Array, mean: Array, Wk: Array) -> Array:
    """``sum_j P_ij |g_ij|^2 (v_j - mean_i)(v_j - mean_i)^T`` for L2 attention."""
    out = np.empty((len(P), values.shape[1], values.shape[1]))
    for i, row in enumerate(P):
        g2 = np.sum(((q[i] - 2.0 * keys) @ Wk) ** 2, axis=1)
        u = values - mean[i]
        out[i] = (u * (row * g2)[:, None]).T @ u
    return out


def _pointwise(head: PointwiseAttention, U: Array, mu: Measure, times: Array | None) -> float:
    w, x, n = mu.weights, mu.points, mu.n
    values, e = x @ U.T, len(U)
    g = x @ head.A.T
    turned = x @ head.A  # rows A^T x_j
    identity = U @ U.T
    rows, fields = np.zeros(n), np.zeros(n)
    sizes = np.linalg.norm(x, axis=1)
    norm, rounded = float(spectral_norm_upper(U)), 4.0 * (n + e + x.shape[1] + 16) * _EPS
    across = norm * float(spectral_norm_upper(head.A))
    kinked = isinstance(head, ReLUAttention)
    terms = np.linalg.norm(values, axis=1) * np.linalg.norm(turned, axis=1)
    for i in range(n):
        s = x @ g[i]
        seen = w if times is None else np.where(times <= times[i], w, 0.0)
        slope = head.h.derivative(s)
        loose = 0.0
        if kinked:
            # at the kink of h either slope occurs nearby: the larger one in the form, both in the field
            kink = np.abs(s) <= 1e-12 * sizes * np.linalg.norm(g[i])
            loose = float((seen * terms)[kink].sum())
            slope = np.where(kink, 1.0, slope)
        weight = head.h.value(s)
        # an exponential may fit where its square does not
        unit = float(np.ldexp(1.0, int(np.frexp(max(np.abs(weight).max(), np.abs(slope).max()))[1])))
        weight, slope = weight / unit, slope / unit
        # sum_j w_j (h U + h' v_j g^T)(h U^T + h' g v_j^T)
        mixed = np.outer((seen * weight * slope) @ values, U @ g[i])
        form = float(seen @ weight**2) * identity + mixed + mixed.T
        form += float(g[i] @ g[i]) * (values * (seen * slope**2)[:, None]).T @ values
        # the sum may cancel: what rounded is the size of its terms
        steep = norm * sizes * float(np.linalg.norm(g[i]))
        lam = float(np.linalg.eigvalsh(form)[-1]) + rounded * float(seen @ (norm * np.abs(weight) + slope * steep) ** 2)
        rows[i] = math.sqrt(float(w[i])) * np.sqrt(np.maximum(lam, 0.0)) * unit
        field = (values * (seen * slope)[:, None]).T @ turned
        fields[i] = (spectral_norm_upper(field) + rounded * float((seen * slope) @ sizes**2) * across) * unit + loose
    size = float(rows.max(initial=0.0))  # nan, which is refused, if any of them is
    total = size * float(np.linalg.norm(rows / size)) if size > 0.0 else size
    reach = float(sizes.max()) * float(np.linalg.norm(g, axis=1).max())
    if isinstance(head, ReLUAttention | LinearAttention):
        # |h'| <= 1: the error of a logit is that of its weight
        total, reach = total + rounded * reach * norm, 0.0
    return (total + float(fields.max(initial=0.0))) * _rounding(reach, x.shape[1])


def _sides(y: Array, size: float) -> tuple[float, float]:
    """The largest norm of a row, and what rounded in it."""
    norm = float(np.linalg.norm(y, axis=1).max(initial=0.0))
    return norm, norm + size


def _rounding(size: float, terms: int) -> float:
    """How much rounding may change weights whose logits add up ``terms`` numbers of this size: a factor, at least 1."""
    return safe_exp(1e-12 + 8.0 * (terms + 8) * _EPS * size)
