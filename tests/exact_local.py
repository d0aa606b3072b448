"""The derivative of attention at a measure in exact numbers (mpmath), written from the definition."""

import mpmath as mp
import numpy as np

from otattn.attention import (
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SoftmaxAttention,
)

DIGITS = 160


def big(x):
    """An array of floats as exact numbers; exact numbers as they are."""
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x
    return np.vectorize(mp.mpf, otypes=[object])(np.asarray(x, dtype=np.float64))


def flat(attention, output=None, causal=False):
    """``(head, product of output matrices or None, masked)`` for each head, in exact numbers."""
    if isinstance(attention, MaskedAttention):
        return flat(attention.attention, output, True)
    if isinstance(attention, MultiHeadAttention):
        out = []
        for i, head in enumerate(attention.heads):
            own = None if attention.outputs is None else big(attention.outputs[i])
            out += flat(head, own if output is None else (output if own is None else output.dot(own)), causal)
        return out
    return [(attention, output, causal)]


def one_head(head, V, x, w, causal, slope_at_kink, factors):
    """The derivative ``(n, e, n, d)`` and the fields ``(n, e, d)`` of one head, from the definition."""
    n, d = x.shape
    v = x.dot(V.T)
    blocks = np.full((n, len(V), n, d), mp.mpf(0), dtype=object)
    fields = np.full((n, len(V), d), mp.mpf(0), dtype=object)
    if isinstance(head, SoftmaxAttention):
        # a map built from factors is evaluated by them; near_tokens states its bound for A
        if factors and head.factors is not None and len(head.factors[0]) < d:
            q, k, b = head.factors
            A, c = big(k).T.dot(big(q)), None if b is None else big(k).T.dot(big(b))
        else:
            A, c = big(head.A), None if head.bias is None else big(head.bias)
        g = x.dot(A.T) if c is None else x.dot(A.T) + c
    elif isinstance(head, L2Attention):
        Q, K = big(head.Q), big(head.K)
    else:
        g = x.dot(big(head.A).T)
    for i in range(n):
        seen = range(i + 1) if causal else range(n)
        if isinstance(head, SoftmaxAttention):
            logit = [g[i].dot(x[j]) for j in seen]
            by_y, by_x = [g[i] for _ in seen], [A.T.dot(x[j]) for j in seen]
        elif isinstance(head, L2Attention):
            gap = [Q.dot(x[i]) - K.dot(x[j]) for j in seen]
            logit = [-r.dot(r) for r in gap]
            by_y, by_x = [2 * K.T.dot(r) for r in gap], [-2 * Q.T.dot(r) for r in gap]
        else:
            logit = [g[i].dot(x[j]) for j in seen]
            by_y, by_x = [g[i] for _ in seen], [big(head.A).T.dot(x[j]) for j in seen]
        if isinstance(head, (SoftmaxAttention, L2Attention)):
            top = max(logit)
            P = [w[j] * mp.exp(s - top) for j, s in zip(seen, logit, strict=True)]
            total = mp.fsum(P)
            P = [p / total for p in P]
            mean = sum(p * v[j] for j, p in zip(seen, P, strict=True))
            value, slope, centred = P, P, [v[j] - mean for j in seen]
        else:
            if isinstance(head, LinearAttention):
                h, dh = logit, [mp.mpf(1)] * len(logit)
            elif isinstance(head, ReLUAttention):
                h = [max(s, mp.mpf(0)) for s in logit]
                dh = [mp.mpf(1) if s > 0 else (slope_at_kink if s == 0 else mp.mpf(0)) for s in logit]
            elif isinstance(head, SigmoidAttention):
                h = [1 / (1 + mp.exp(-s)) for s in logit]
                dh = [1 / ((1 + mp.exp(-s)) * (1 + mp.exp(s))) for s in logit]
            else:
                h = dh = [mp.exp(s) for s in logit]
            value = [w[j] * a for j, a in zip(seen, h, strict=True)]
            slope = [w[j] * a for j, a in zip(seen, dh, strict=True)]
            centred = [v[j] for j in seen]
        for at, j in enumerate(seen):
            blocks[i, :, j] += value[at] * V + slope[at] * np.outer(centred[at], by_y[at])
            fields[i] += slope[at] * np.outer(centred[at], by_x[at])
        blocks[i, :, i] += fields[i]
    return blocks, fields


def norm_below(M):
    """A value that the matrix attains, with a vector from float64 and the product in mpmath."""
    size = max((abs(a) for a in M.ravel()), default=mp.mpf(0))
    if size == 0:
        return mp.mpf(0)
    right = big(np.linalg.svd(np.array(M / size, dtype=np.float64))[2][0])
    image = M.dot(right)
    return mp.sqrt(mp.fsum(a * a for a in image) / mp.fsum(a * a for a in right))


def truth(attention, points, weights=None, *, splitting=True, factors=True):
    """The local constant at a measure: the larger of the particle and the splitting part (both sides of a kink)."""
    with mp.workdps(DIGITS):
        n, d = np.shape(points)
        x = big(points)
        w = big(np.full(n, 1.0 / n) if weights is None else weights)
        w = w / mp.fsum(w)
        best = mp.mpf(0)
        for kink in (mp.mpf(0), mp.mpf(1)):
            parts = []
            for head, output, causal in flat(attention):
                V = big(head.V) if output is None else output.dot(big(head.V))
                parts.append(one_head(head, V, x, w, causal, kink, factors))
            J, F = sum(p[0] for p in parts), sum(p[1] for p in parts)
            root = [mp.sqrt(a) for a in w]
            for i in range(n):
                for j in range(n):
                    J[i, :, j] *= root[i] / root[j]
            best = max(best, norm_below(J.reshape(n * J.shape[1], n * d)))
            if splitting:
                best = max([best, *(norm_below(f) for f in F)])
            if not any(isinstance(head, ReLUAttention) for head, _, _ in flat(attention)):
                break
        return best
