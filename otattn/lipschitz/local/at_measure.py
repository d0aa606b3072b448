r"""Upper bounds of the local constant at one measure, in one pass over the attention matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.attention import AttentionMap, L2Attention, SoftmaxAttention
from otattn.attention.base import Measure, as_attention
from otattn.attention.head import Head
from otattn.attention.kernels import NormalisedKernel
from otattn.attention.pointwise import LinearAttention, PointwiseAttention, ReLUAttention, SigmoidAttention
from otattn.lipschitz.arithmetic.rounding import LEAST, log, safe_exp, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.sum_of_heads import combine_heads, parts_of
from otattn.lipschitz.hypotheses import every, order_two, sum_of_heads
from otattn.lipschitz.theorem import prove, theorem
from otattn.measures.like import MeasureLike

__all__ = ["at_measure_bound"]

Array = NDArray[np.float64]
BLOCK_BYTES = 64 * 2**20
IDENTITY_LIMIT = 32
"""Heads are combined through bounds with identity values up to this dimension (d^2 numbers an atom)."""
_EPS = float(np.finfo(np.float64).eps)
_WIDEST = 100.0
"""Logits that rounded by more than this leave nothing to bound."""


def at_measure_bound(attention: AttentionMap, mu: MeasureLike) -> Bound:
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
    sum of their bounds and (for d up to 32) the combination of ``multi_head``.

    Rounding: values, keys, queries and logits differ from the floats by what each is made of, however much of it
    cancels. Weights ``P'`` within a factor t of P have ``sum_j P'_ij B B^T <= t sum_j P_ij B B^T`` and covariances within
    ``t^2``; what changes in B is added by the triangle inequality in ``|[ sqrt(P_ij) V B_ij ]_j|``. A cross covariance
    changes by at most ``t^2 - 1`` times both deviations.

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
    >>> at_measure_bound(SoftmaxAttention([[1.0]], [[1.0]]), [[0.0], [0.0]]).value
    1.000...

    References
    ----------
    otattn, local bound; costs ``n^2 e^2`` operations a head.
    """
    measure = as_attention(attention).as_measure(mu)
    return prove("at_measure_bound", attention, measure, measure.n, 2.0)


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
    "at_measure_bound",
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
    heads = parts_of(attention)
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
        theorem="at_measure_bound",
        quantity="local",
        details={"head_bounds": [float(c) for c in parts]},
    )


def _value(heads: tuple[Head, ...], live: Measure, times: Array | None) -> tuple[float, list[float]]:
    """The bound, and those of the heads with their outputs."""
    compact = [head.compact() for head in heads]
    parts = [_head(head.map, M, error, live, times) for head, (M, error) in zip(heads, compact, strict=True)]
    value = float(sum(parts))
    if len(heads) > 1 and value > 0:
        singles = [_head(head.map, head.V, 0.0, live, times) for head in heads]
        lost = sum(c * head.output_error for c, head in zip(singles, heads, strict=True))
        joint = combine_heads([head.outer for head in heads], [log(c) for c in singles])[0]
        value = min(value, safe_exp(joint) + lost + LEAST)
    if len(heads) > 1 and value > 0 and live.dim <= IDENTITY_LIMIT:
        singles = [_head(head.map, np.eye(live.dim), 0.0, live, times) for head in heads]
        lost = sum(c * error for c, (_, error) in zip(singles, compact, strict=True))
        joint = combine_heads([head.total for head in heads], [log(c) for c in singles])[0]
        value = min(value, safe_exp(joint) + lost + LEAST)
    return value, parts


def _head(head: Any, U: Array, error: float, mu: Measure, times: Array | None) -> float:
    """The bound of a head with any values within ``error`` (operator norm) of U, which is scaled to a size near 1."""
    size = max(float(np.abs(U).max(initial=0.0)), error)
    if size == 0.0:
        return 0.0
    scale = _power(size)
    if isinstance(head, PointwiseAttention):
        return _times(_pointwise(head, U / scale, error / scale, mu, times), scale)
    assert isinstance(head, SoftmaxAttention | L2Attention)
    return _times(_normalised(head, U / scale, error / scale, mu, times), scale)


def _normalised(
    head: SoftmaxAttention | L2Attention, U: Array, error: float, mu: Measure, times: Array | None
) -> float:
    kernel: NormalisedKernel = head._kernel(mu, times, None)
    maps = kernel.head
    w, n = mu.weights, mu.n
    z = mu.points - w @ mu.points
    values, keys = z @ U.T, kernel.K
    e, k = values.shape[1], keys.shape[1]
    queries = kernel.queries(mu.points)
    field = np.asarray(np.linalg.qr(maps.Wq.T, mode="r")).T  # ||M W_q|| = ||M R^T||
    identity = U @ U.T
    outer = (values[:, :, None] * values[:, None, :]).reshape(n, e * e)
    cross = (values[:, :, None] * keys[:, None, :]).reshape(n, e * k)
    turn = maps.Wk @ U.T  # (k, e)
    columns, field_norms = np.zeros(n), np.zeros(n)
    seen_keys = keys @ field
    squares, key_squares = np.sum(values**2, axis=1), np.sum(keys**2, axis=1)
    seen_squares = np.sum(seen_keys**2, axis=1)
    unit, small = 4.0 * (n + e + k + 16) * _EPS, 4.0 * (mu.dim + k + 8) * _EPS
    # what rounded in values, keys, queries and logits: the size of what each is made of, however much of it cancelled
    wq, wk, norm = (float(norm_upper(W)) for W in (maps.Wq, maps.Wk, U))
    dv = (small * norm + error) * float(np.linalg.norm(z, axis=1).max())
    dk = small * wk * float(np.linalg.norm(mu.points - kernel.centre, axis=1).max())
    far, q = float(np.linalg.norm(keys, axis=1).max()), np.linalg.norm(queries, axis=1)
    bias = 0.0 if maps.bq is None else float(np.linalg.norm(maps.bq))
    from_x = np.linalg.norm(mu.points, axis=1) + 2.0 * float(np.linalg.norm(kernel.centre))
    dq = small * ((wq + 2.0 * wk * maps.quadratic) * from_x + bias)
    logit = q * (dk + small * far) + dq * (far + dk) + 4.0 * _EPS * float(np.abs(np.log(w)).max())
    steep, dg = np.linalg.norm(queries @ maps.Wk, axis=1), wk * (dq + small * q)
    if maps.quadratic:
        logit = logit + 2.0 * far * dk + dk**2 + 9.0 * small * far**2
        steep, dg = steep + 2.0 * far * wk, dg + 2.0 * wk * (dk + small * far)
    if not logit.max() < _WIDEST:
        return math.nan if np.isnan(logit).any() else math.inf
    factor = np.exp(2.0 * logit)  # at most that far are the weights from the exact ones
    step = max(1, BLOCK_BYTES // (8 * (2 * n + 3 * e * e + 2 * e * k)))
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        P, t = kernel.weights_of(queries, times, rows), factor[rows]
        mean = P @ values
        C = (P @ outer).reshape(-1, e, e) - mean[:, :, None] * mean[:, None, :]
        M = (P @ cross).reshape(-1, e, k) - mean[:, :, None] * (P @ keys)[:, None, :]
        if maps.quadratic:
            # K x_j in the shifted frame: g_ij = W_k^T (q_i - 2 K_j), and |g_ij|^2 expands in K_j
            form = identity + _quadratic_rows(P, queries[rows], keys, values, mean, maps.Wk)
            bend = 2.0 * np.einsum("rek,kf->ref", M, turn)
            form = form - bend - np.swapaxes(bend, 1, 2)
        else:
            form = identity + (steep[rows] ** 2)[:, None, None] * C
        lam = np.maximum(np.linalg.eigvalsh(form)[:, -1], 0.0)
        # covariances were formed by a difference of second moments: what rounded is their size before it
        second, second_key, second_seen = P @ squares, P @ key_squares, P @ seen_squares
        lam += unit * (norm + steep[rows] * np.sqrt(second)) ** 2
        sd = _deviation(second, mean, unit)
        sd_seen = _deviation(second_seen, P @ seen_keys, unit)
        # |sqrt(P') B'| is at most sqrt(t) (|sqrt(P) B| + |sqrt(P) (B' - B)|), with the mean of other weights
        shift = 3.0 * dv + ((t - 1.0) * sd if maps.quadratic else 0.0)
        root = np.sqrt(lam) + error + shift * (steep[rows] + dg[rows]) + sd * dg[rows]
        columns += (w[rows] * t**3 * root**2) @ P
        # Cov_P'(v, f) - Cov_P(v, f) = sum_jl (P'_j P'_l - P_j P_l) (v_j - v_l)(f_j - f_l)^T / 2 for f_j = W_q^T k_j
        lost = (t**2 - 1.0) * sd * sd_seen + t**2 * (sd * dk * wq + dv * sd_seen + dv * dk * wq)
        lost += (unit * t**2 * wq) * np.sqrt(second * second_key)
        field_norms[rows] = np.linalg.norm(M @ field, ord=2, axis=(1, 2)) + lost
    columns += 8.0 * LEAST * (n + columns.sum())  # products of small weights underflow
    return (math.sqrt(float((columns / w).max())) + float(field_norms.max())) * (1.0 + 1e-12)


def _deviation(second: Array, mean: Array, unit: float) -> Array:
    """Root of a trace of covariances, from above: a difference of second moments that rounded by ``unit``."""
    return np.asarray(np.sqrt(np.maximum(second - np.sum(mean**2, axis=1), 0.0) + unit * second))


def _quadratic_rows(P: Array, q: Array, keys: Array, values: Array, mean: Array, Wk: Array) -> Array:
    """``sum_j P_ij |g_ij|^2 (v_j - mean_i)(v_j - mean_i)^T`` for L2 attention."""
    out = np.empty((len(P), values.shape[1], values.shape[1]))
    for i, row in enumerate(P):
        g2 = np.sum(((q[i] - 2.0 * keys) @ Wk) ** 2, axis=1)
        u = values - mean[i]
        out[i] = (u * (row * g2)[:, None]).T @ u
    return out


def _pointwise(head: PointwiseAttention, U: Array, error: float, mu: Measure, times: Array | None) -> float:
    w, x, n, A = mu.weights, mu.points, mu.n, head.A
    kinked, plain = isinstance(head, ReLUAttention), isinstance(head, ReLUAttention | LinearAttention)
    length = form_size = 1.0
    if plain:  # homogeneous in A and, twice, in the tokens: their squares should not underflow
        length, form_size = _power(float(np.abs(x).max())), _power(float(np.abs(A).max()))
        x, A = x / length, A / form_size
    values, e = x @ U.T, len(U)
    g = x @ A.T
    turned = x @ A  # rows A^T x_j
    identity = U @ U.T
    rows, fields = np.zeros(n), np.zeros(n)
    sizes = np.linalg.norm(x, axis=1)
    norm, rounded = float(spectral_norm_upper(U)), 4.0 * (n + e + x.shape[1] + 16) * _EPS
    across = norm * float(spectral_norm_upper(A))
    # what rounded in values, A^T x_j and A x_i: the size of what each is made of, however much of it cancelled
    small, form_norm = 4.0 * (x.shape[1] + 8) * _EPS, float(norm_upper(A))
    v, dv = np.linalg.norm(values, axis=1), (small * float(norm_upper(U)) + error) * sizes
    turn, dt = np.linalg.norm(turned, axis=1), small * form_norm * sizes
    for i in range(n):
        seen = w if times is None else np.where(times <= times[i], w, 0.0)
        s = np.where(seen > 0.0, x @ g[i], 0.0)
        steep, dg = float(np.linalg.norm(g[i])), float(dt[i])
        ds = sizes * (dg + small * steep) + 8.0 * _EPS
        weight, slope, loose = head.h.value(s), head.h.derivative(s), 0.0
        if plain:
            ds, dh, bend = ds - 8.0 * _EPS, ds, np.zeros(n)
        else:
            # |(log h)'| and |(log h')'| are at most 1; a float near 0 is known up to the least one
            wide = ~(ds < _WIDEST)
            growth = np.where(wide, np.inf, np.expm1(np.minimum(ds, _WIDEST)))
            dh, bend = (growth * (f + 4.0 * LEAST) + 4.0 * LEAST for f in (weight, slope))
            if isinstance(head, SigmoidAttention):
                dh, bend = np.minimum(dh, 1.0), np.minimum(bend, 0.25)
            elif (wide & (seen > 0.0)).any():
                return math.nan if np.isnan(ds).any() else math.inf
            dh, bend = (np.where(seen > 0.0, f, 0.0) for f in (dh, bend))
        if kinked:
            # at the kink of h either slope occurs nearby: the larger one in the form, both in the field
            kink = np.abs(s) <= ds + 1e-12 * sizes * steep
            loose = float((seen * (v + dv) * (turn + dt))[kink].sum())
            slope = np.where(kink, 1.0, slope)
        # with the roots of the weights, and scaled: an exponential may fit where its square does not
        root = np.sqrt(seen)
        weight, slope, dh, bend = root * weight, root * slope, root * dh, root * bend
        unit = _power(float(max(part.max() for part in (np.abs(weight), slope, dh, bend))))
        weight, slope, dh, bend = weight / unit, slope / unit, dh / unit, bend / unit
        # sum_j w_j (h U + h' v_j g^T)(h U^T + h' g v_j^T)
        mixed = np.outer((weight * slope) @ values, U @ g[i])
        form = float(weight @ weight) * identity + mixed + mixed.T
        form += steep**2 * (values * (slope**2)[:, None]).T @ values
        # the sum may cancel: what rounded is the size of its terms
        terms = norm * np.abs(weight) + slope * norm * sizes * steep
        lam = float(np.linalg.eigvalsh(form)[-1]) + rounded * float(terms @ terms)
        # and that of (h' - h) U + h' (V' - V) + ... in the matrices themselves
        lost = dh * norm + (np.abs(weight) + dh) * error + bend * v * steep
        lost += (slope + bend) * (dv * (steep + dg) + v * dg)
        rows[i] = math.sqrt(float(w[i])) * (np.sqrt(np.maximum(lam, 0.0)) + float(np.linalg.norm(lost))) * unit
        field = (values * (root * slope)[:, None]).T @ turned
        inside = rounded * slope * sizes**2 * across + bend * v * turn + (slope + bend) * (dv * (turn + dt) + v * dt)
        fields[i] = (spectral_norm_upper(field) + float(root @ inside)) * unit + loose
    size = float(rows.max(initial=0.0))  # nan, which is refused, if any of them is
    total = size * float(np.linalg.norm(rows / size)) if size > 0.0 else size
    value = (total + float(fields.max(initial=0.0))) * (1.0 + 1e-12)
    return _times(_times(_times(value, form_size), length), length)


def _power(size: float) -> float:
    """A power of two near a positive number (1 for zero): to divide by it is exact."""
    return math.ldexp(1.0, min(math.frexp(size)[1], 1023)) if 0.0 < size < math.inf else 1.0


def _times(value: float, scale: float) -> float:
    """The product with a power of two, rounded upward where it is subnormal."""
    out = value * scale
    return out + LEAST if value > 0.0 and out < 1e-300 else out
