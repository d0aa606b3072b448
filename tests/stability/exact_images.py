"""Images of measures from the definitions of the maps, in 60 digits, and exact transport over all permutations."""

import itertools
from typing import Any

import mpmath as mp
import numpy as np

from otattn.attention import (
    MLP,
    AttentionMap,
    Compose,
    ExponentialAttention,
    GatedAttention,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    PointwiseAttention,
    ReLUAttention,
    Residual,
    RotaryAttention,
    ScoreAttention,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    Sum,
)
from otattn.attention.feed_forward import TANH_GELU, FeedForward

DIGITS = 60
Vector = list[Any]


def vectors(X: np.ndarray) -> list[Vector]:
    return [[mp.mpf(float(c)) for c in row] for row in X]


def dot(a: Vector, b: Vector) -> Any:
    return mp.fsum(s * t for s, t in zip(a, b, strict=True))


def times_matrix(W: Any, x: Vector) -> Vector:
    return [dot([mp.mpf(float(c)) for c in row], x) for row in W]


def plus(*terms: Any) -> Vector:
    return [mp.fsum(parts) for parts in zip(*(list(map(mp.mpf, map(_number, t))) for t in terms), strict=True)]


def _number(v: Any) -> Any:
    return float(v) if isinstance(v, np.floating) else v


def shifted(x: Vector, c: np.ndarray | None) -> Vector:
    return x if c is None else plus(x, list(map(float, c)))


def mean(masses: Vector, points: list[Vector]) -> Vector:
    return [dot(masses, [v[k] for v in points]) for k in range(len(points[0]))]


def softmax_rows(logits: Any, values: list[Vector], w: Vector, seen: Any) -> list[Vector]:
    out = []
    for i in range(len(w)):
        atoms = [j for j in range(len(w)) if seen(i, j)]
        l = {j: logits(i, j) for j in atoms}
        top = max(l.values())
        E = [w[j] * mp.e ** (l[j] - top) for j in atoms]
        total = mp.fsum(E)
        out.append(mean([e / total for e in E], [values[j] for j in atoms]))
    return out


def _feed_forward(a: FeedForward, x: list) -> list:
    """Plain or gated; GPT-2's constants are the floats of the map."""
    c, b = mp.mpf(TANH_GELU[0]), mp.mpf(TANH_GELU[1])
    f = {
        "gelu": lambda s: s * mp.ncdf(s),
        "gelu_tanh": lambda s: s / (1 + mp.e ** (-2 * c * (s + b * s**3))),
        "silu": lambda s: s / (1 + mp.e ** (-s)),
        "relu": lambda s: max(s, mp.mpf(0)),
        "tanh": mp.tanh,
    }[a.activation]
    out = []
    for v in x:
        up = shifted(times_matrix(a.up, v), a.up_bias)
        if a.gate is None:
            hidden = [f(s) for s in up]
        else:
            gate = shifted(times_matrix(a.gate, v), a.gate_bias)
            hidden = [f(s) * t for s, t in zip(gate, up, strict=True)]
        out.append(shifted(times_matrix(a.down, hidden), a.down_bias))
    return out


def exact_image(
    a: AttentionMap, x: list[Vector], w: np.ndarray, times: np.ndarray | None = None, masked: bool = False
) -> list[Vector]:
    """``Gamma_mu`` at the atoms; weights are divided by their exact sum."""
    mass = [mp.mpf(float(v)) for v in w]
    total = mp.fsum(mass)
    mass = [v / total for v in mass]
    n = len(x)

    def seen(i: int, j: int) -> bool:
        return not masked or bool(times[j] <= times[i])  # type: ignore[index]

    if isinstance(a, SoftmaxAttention):
        head = a.projections()
        q = [shifted(times_matrix(head.Wq, v), head.bq) for v in x]
        k = [times_matrix(head.Wk, v) for v in x]
        rows = softmax_rows(lambda i, j: dot(q[i], k[j]), [times_matrix(a.V, v) for v in x], mass, seen)
        return [shifted(v, a.value_bias) for v in rows]
    if isinstance(a, L2Attention):
        q, k = [times_matrix(a.Q, v) for v in x], [times_matrix(a.K, v) for v in x]

        def minus_square(i: int, j: int) -> Any:
            return -mp.fsum((s - t) ** 2 for s, t in zip(q[i], k[j], strict=True))

        return softmax_rows(minus_square, [times_matrix(a.V, v) for v in x], mass, seen)
    if isinstance(a, SinkhornAttention):
        return _sinkhorn(a, x, mass)
    if isinstance(a, PointwiseAttention):
        h = {
            SigmoidAttention: lambda s: 1 / (1 + mp.e ** (-s)),
            ReLUAttention: lambda s: max(s, mp.mpf(0)),
            LinearAttention: lambda s: s,
            ExponentialAttention: lambda s: mp.e**s,
        }[type(a)]
        q, v = [times_matrix(a.A, y) for y in x], [times_matrix(a.V, y) for y in x]
        H = [[mass[j] * h(dot(q[i], x[j])) if seen(i, j) else mp.mpf(0) for j in range(n)] for i in range(n)]
        return [mean(row, v) for row in H]
    if isinstance(a, MaskedAttention):
        return exact_image(a.attention, x, w, times, True)
    if isinstance(a, RotaryAttention):
        return _rotary(a, x, mass, times)
    if isinstance(a, ScoreAttention):
        return _scores(a, x, mass, times)
    if isinstance(a, GatedAttention):
        inner = exact_image(a.map, x, w, times, masked)
        gates = [[1 / (1 + mp.e ** (-s)) for s in shifted(times_matrix(a.gate, v), a.gate_bias)] for v in x]
        return [
            [s * g for s, g in zip(v, row * (len(v) // len(row)), strict=True)]
            for v, row in zip(inner, gates, strict=True)
        ]
    if isinstance(a, MultiHeadAttention):
        parts = [exact_image(h, x, w, times, masked) for h in a.heads]
        if a.outputs is not None:
            parts = [[times_matrix(W, v) for v in part] for W, part in zip(a.outputs, parts, strict=True)]
        return [shifted(plus(*(part[i] for part in parts)), a.output_bias) for i in range(n)]
    if isinstance(a, LayerNorm):
        return [_norm(a, v) for v in x]
    if isinstance(a, FeedForward):
        return _feed_forward(a, x)
    if isinstance(a, MLP):
        f = {
            "relu": lambda s: max(s, mp.mpf(0)),
            "gelu": lambda s: s * mp.ncdf(s),
            "silu": lambda s: s / (1 + mp.e ** (-s)),
            "tanh": mp.tanh,
            "identity": lambda s: s,
        }[a.activation]
        hidden = [[f(s) for s in shifted(times_matrix(a.U, v), a.b)] for v in x]
        return [shifted(times_matrix(a.W, v), a.output_bias) for v in hidden]
    if isinstance(a, Residual):
        moved = exact_image(a.map, x, w, times, masked)
        return [plus(v, [mp.mpf(a.scale) * s for s in m]) for v, m in zip(x, moved, strict=True)]
    if isinstance(a, Sum):
        parts = [exact_image(part, x, w, times, masked) for part in a.maps]
        return [[mp.fsum(entries) for entries in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
    assert isinstance(a, Compose)
    for part in a.maps:
        x = exact_image(part, x, w, times, masked)
    return x


def _sinkhorn(a: SinkhornAttention, x: list[Vector], mass: Vector) -> list[Vector]:
    n = len(x)
    q = [times_matrix(a.A, v) for v in x]
    K = [[mp.e ** dot(q[i], x[j]) for j in range(n)] for i in range(n)]
    h = [mp.mpf(1)] * n
    for _ in range(5000 if a.n_iter is None else a.n_iter // 2):
        f = [1 / mp.fsum(mass[j] * K[i][j] * h[j] for j in range(n)) for i in range(n)]
        new = [1 / mp.fsum(mass[i] * K[i][j] * f[i] for i in range(n)) for j in range(n)]
        moved = max(abs(s / t - 1) for s, t in zip(new, h, strict=True))
        h = new
        if moved < mp.mpf(10) ** (5 - DIGITS):
            break
    else:
        if a.n_iter is None:
            raise ArithmeticError("the sweeps are too slow for a reference: smaller logits")
    v = [times_matrix(a.V, y) for y in x]
    rows = [[mass[j] * K[i][j] * h[j] for j in range(n)] for i in range(n)]
    return [mean([s / mp.fsum(row) for s in row], v) for row in rows]


def _scores(a: ScoreAttention, x: list[Vector], mass: Vector, times: np.ndarray | None) -> list[Vector]:
    n = len(x)
    count = a.length if a.length is not None or times is None else len(np.unique(times))
    place = [mp.mpf(count) * mp.mpf(float(t)) for t in times] if a.causal else [mp.mpf(0)] * n  # type: ignore[union-attr]

    def feature(W: np.ndarray, b: np.ndarray | None, norm: Any, v: Vector) -> Vector:
        z = shifted(times_matrix(W, v), b)
        return z if norm is None else _norm(norm, z)

    def turned(z: Vector, at: Any) -> Vector:
        out = list(z)
        r = 0 if a.rotation is None else len(a.rotation.frequencies)
        for m in range(r):
            angle = at * mp.mpf(float(a.rotation.frequencies[m]))  # type: ignore[union-attr]
            i, j = (2 * m, 2 * m + 1) if a.rotation.layout == "adjacent" else (m, m + r)  # type: ignore[union-attr]
            out[i] = z[i] * mp.cos(angle) - z[j] * mp.sin(angle)
            out[j] = z[i] * mp.sin(angle) + z[j] * mp.cos(angle)
        return out

    q = [turned(feature(a.Q, a.query_bias, a.query_norm, v), t) for v, t in zip(x, place, strict=True)]
    k = [turned(feature(a.K, a.key_bias, a.key_norm, v), t) for v, t in zip(x, place, strict=True)]
    values = [feature(a.V, a.value_bias, a.value_norm, v) for v in x]

    def logit(i: int, j: int) -> Any:
        s = mp.mpf(a.scale) * dot(q[i], k[j])
        s = s if a.cap is None else mp.mpf(a.cap) * mp.tanh(s / mp.mpf(a.cap))
        if a.bias is not None:
            s -= mp.mpf(a.bias.slope) * abs(place[j] - place[i])
            if a.bias.table is not None:
                half = len(a.bias.table) // 2
                s += mp.mpf(float(a.bias.table[max(-half, min(half, round(float(place[j] - place[i])))) + half]))
        return s

    def seen(i: int, j: int) -> bool:
        if a.mask is None:
            return True
        apart, m = float(place[j] - place[i]), a.mask
        late = times[j] > times[i] if m.causal else m.after is not None and apart > m.after + 1e-9  # type: ignore[index]
        early = m.before is not None and apart < -m.before - 1e-9
        index = [max(int(np.ceil(float(place[t]) - 1e-9)), 1) - 1 for t in (i, j)]
        return not late and not early and (m.allowed is None or bool(m.allowed[index[0], index[1]]))

    if a.sink is None:
        return softmax_rows(logit, values, mass, seen)
    # one more token of value zero that every token sees
    weights = [*mass, 1 / mp.mpf(count)]
    rows = softmax_rows(
        lambda i, j: mp.mpf(a.sink) if j == n else logit(i, j) if i < n else mp.mpf(0),
        [*values, [mp.mpf(0)] * len(values[0])],
        weights,
        lambda i, j: j == n or i == n or seen(i, j),
    )
    return rows[:n]


def _rotary(a: RotaryAttention, x: list[Vector], mass: Vector, times: np.ndarray) -> list[Vector]:
    length = len(np.unique(times)) if a.length is None else a.length
    r, k = 2 * len(a.frequencies), len(a.Q)

    def turn(z: Vector, t: float) -> Vector:
        out = list(z)
        for m, frequency in enumerate(a.frequencies):
            angle = mp.mpf(length) * mp.mpf(float(t)) * mp.mpf(float(frequency))
            i, j = (2 * m, 2 * m + 1) if a.layout == "adjacent" else (m, m + r // 2)
            out[i] = z[i] * mp.cos(angle) - z[j] * mp.sin(angle)
            out[j] = z[i] * mp.sin(angle) + z[j] * mp.cos(angle)
        assert len(out) == k
        return out

    q = [
        turn([mp.mpf(a.scale) * s for s in shifted(times_matrix(a.Q, v), a.query_bias)], t)
        for v, t in zip(x, times, strict=True)
    ]
    keys = [turn(shifted(times_matrix(a.K, v), a.key_bias), t) for v, t in zip(x, times, strict=True)]
    values = [shifted(times_matrix(a.V, v), a.value_bias) for v in x]
    return softmax_rows(
        lambda i, j: dot(q[i], keys[j]), values, mass, lambda i, j: not a.masked or times[j] <= times[i]
    )


def _norm(a: LayerNorm, x: Vector) -> Vector:
    d = len(x)
    centre = mp.fsum(x) / d if a.center else mp.mpf(0)
    y = [v - centre for v in x]
    scale = mp.sqrt(mp.fsum(v**2 for v in y) / d + mp.mpf(a.eps))
    return shifted([v / scale * mp.mpf(float(g)) for v, g in zip(y, a.gain, strict=True)], a.bias)


def distance(x: Vector, y: Vector) -> Any:
    return mp.sqrt(mp.fsum((s - t) ** 2 for s, t in zip(x, y, strict=True)))


def exact_distance(x: list[Vector], y: list[Vector], p: float, *, ordered: bool = False) -> Any:
    """``W_p`` of uniform measures of equally many atoms, over all permutations (none when ``ordered``)."""
    n = len(x)
    choices = [tuple(range(n))] if ordered else itertools.permutations(range(n))
    D = [[distance(u, v) for v in y] for u in x]
    if np.isinf(p):
        return min(max(D[i][s[i]] for i in range(n)) for s in choices)
    return min((mp.fsum(D[i][s[i]] ** p for i in range(n)) / n) ** (1 / mp.mpf(p)) for s in choices)


def exact_ratio(a: AttentionMap, X: np.ndarray, Y: np.ndarray, p: float = 2) -> Any:
    """The stability ratio of two sets of tokens (sequences for causal maps)."""
    n = len(X)
    with mp.workdps(DIGITS):
        w, times = np.full(n, 1.0 / n), np.arange(1, n + 1) / n
        x, y = vectors(X), vectors(Y)
        images = [exact_image(a, z, w, times) for z in (x, y)]
        ordered = a.causal
        return exact_distance(*images, p, ordered=ordered) / exact_distance(x, y, p, ordered=ordered)
