"""Random problems: an attention map of the library beside its definition, a domain, a number of tokens and an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from definitions import SCORES, UNNORMALISED, Head, Map
from regions import Region, region

import otattn as oa

SOFTMAX = ("softmax", "qkv")
ALL = ("softmax", "softmax", "qkv", "l2", *UNNORMALISED)
CLASSES = {
    "linear": oa.LinearAttention,
    "relu": oa.ReLUAttention,
    "exponential": oa.ExponentialAttention,
    "sigmoid": oa.SigmoidAttention,
}
ORDERS = (2.0, 2.0, 2.0, 1.0, 1.5, 3.0, 8.0, np.inf)


@dataclass(frozen=True)
class Problem:
    """What a bound is about. ``n`` is None for any measure; the attack then moves ``atoms`` of free weights."""

    map: Map
    ours: Any
    region: Region
    n: int | None
    atoms: int
    p: float

    @property
    def kind(self) -> str:
        """In words, for the counts."""
        heads = "+".join(sorted({h.kind for h in self.map.heads}))
        several = f"{len(self.map.heads)} heads " if len(self.map.heads) > 1 else ""
        return f"{'masked ' if self.map.causal else ''}{several}{heads}"

    def __repr__(self) -> str:
        arrays = [
            {k: np.asarray(v).tolist() for k, v in h.par.items()} | {"outputs": h.outputs} for h in self.map.heads
        ]
        region = {k: np.asarray(v).tolist() for k, v in self.region.par.items()}
        return f"{self.kind}, n={self.n}, p={self.p:g}\n  heads {arrays}\n  {self.region.kind} {region}"


POSITIVE = (0, 4, 7)
"""Of the forms below, those that are positive semidefinite."""
NEGATIVE = (1,)
"""Negative multiples of the identity."""
SYMMETRIC = (0, 1, 10, 11)
"""Symmetric, with eigenvalues of about one size."""


def form(rng, d, reach, forms=None):
    """A with logits of every size on tokens of norm ``reach``; structured as often as generic."""
    B = rng.standard_normal((d, d))
    A = (
        np.eye(d),
        -np.eye(d),
        B - B.T,
        np.outer(B[0], B[-1]),
        B @ B.T,
        B + B.T,
        B[:, :1] @ B[:1] - B[:, -1:] @ B[:, -1:].T,
        0 * B,
        B,
        B,
        np.eye(d) - 2.0 * np.outer(B[0], B[0]) / (B[0] @ B[0]),
        np.eye(d) - 2.0 * np.outer(B[0], B[0]) / (B[0] @ B[0]) + 0.2 * (B + B.T) / np.linalg.norm(B + B.T),
    )[int(rng.integers(10) if forms is None else rng.choice(forms))]
    size = np.linalg.norm(A, 2)
    logits = 10 ** (rng.uniform(1.5, 3) if rng.random() < 0.1 else rng.uniform(-1.5, 1.6))
    return A if size == 0 else A * (logits / size / max(reach, 1e-12) ** 2)


def values(rng, e, d):
    """V of sizes 1e-6 to 1e6, rank one or zero now and then."""
    V = np.eye(d) if e == d and rng.random() < 0.3 else rng.standard_normal((e, d))
    V = np.outer(V[:, 0], V[0]) if rng.random() < 0.1 else V
    return V * (rng.random() > 0.03) * (10 ** rng.uniform(-6, 6) if rng.random() < 0.5 else 1.0)


def head(rng, kind, d, e, reach, forms=None, plain=False):
    """One head of that kind: ``(ours, definition)``; ``plain`` without a query bias."""
    V = values(rng, e, d)
    bias = {"value_bias": rng.standard_normal(e)} if rng.random() < 0.2 else {}
    if kind == "softmax":
        A, c = (
            form(rng, d, reach, forms),
            (rng.random() < 0.35 and not plain) * 3 * rng.standard_normal(d) / max(reach, 1e-12),
        )
        ours = oa.SoftmaxAttention(A, V, bias=c if c.any() else None, **bias)
        return ours, Head(kind, {"A": A, "V": V, "c": c, "b": bias.get("value_bias", np.zeros(e))})
    if kind in SCORES:
        return _composed(rng, kind, V, d, reach, bias)
    if kind in ("qkv", "rotary"):
        return _factors(rng, kind, V, d, reach, bias)
    if kind == "l2":
        Q, K = (rng.standard_normal((int(rng.integers(1, 4)), d)) * 10 ** rng.uniform(-1, 0.4) / reach for _ in "qk")
        K = K if K.shape == Q.shape and rng.random() < 0.6 else Q
        V = V @ Q.T @ Q * reach**2 if rng.random() < 0.3 else V  # values that factor through the queries
        return oa.L2Attention(Q, K, V), Head(kind, {"Q": Q, "K": K, "V": V})
    A = form(rng, d, reach, forms)
    if kind == "sinkhorn":
        A = A * min(1.0, 4.0 / max(np.linalg.norm(A, 2) * reach**2, 1e-12))  # the reference is slow beyond
        return oa.SinkhornAttention(A, V, tol=1e-13), Head(kind, {"A": A, "V": V})
    return CLASSES[kind](A, V), Head(kind, {"A": A, "V": V})


def _factors(rng, kind, V, d, reach, bias):
    k = 2 * int(rng.integers(1, 3)) if kind == "rotary" else int(rng.integers(1, 4))
    Q, K = rng.standard_normal((2, k, d)) / reach
    if rng.random() < 0.3:
        K = rng.choice([-1.0, 1.0]) * Q
    bq, bk = (rng.standard_normal(k) * (rng.random() < 0.4) for _ in "qk")
    scale = float(rng.choice([-1.0, 1.0]) * 10 ** rng.uniform(-1.5, 1.3))
    par = {"Q": Q, "K": K, "V": V, "bq": bq, "bk": bk, "scale": scale, "b": bias.get("value_bias", np.zeros(len(V)))}
    given = {"scale": scale, "query_bias": bq if bq.any() else None, "key_bias": bk if bk.any() else None, **bias}
    if kind == "qkv":
        return oa.SoftmaxAttention.from_qkv(Q, K, V, **given), Head(kind, par)
    base, layout = float(rng.choice([1.5, 1e4])), str(rng.choice(["adjacent", "half"]))
    length, turned = (None, 0.1, 7.0, 1000.0)[int(rng.integers(4))], 2 * int(rng.integers(1, k // 2 + 1))
    par |= {"base": base, "layout": layout, "length": length, "rotary_dim": turned}
    ours = oa.RotaryAttention(
        Q, K, V, base=base, layout=layout, length=length, rotary_dim=turned, masked=bool(rng.random() < 0.5), **given
    )
    return ours, Head(kind, par)


def _norm(rng, k):
    """LayerNorm or RMSNorm, or none: ``(ours, definition)``."""
    if rng.random() < 0.5:
        return None, None
    gain, shift, eps = (
        10 ** rng.uniform(-1, 1) * rng.standard_normal(k),
        rng.standard_normal(k),
        10 ** rng.uniform(-3, 1),
    )
    if rng.random() < 0.5:
        return oa.RMSNorm(gain, eps=eps), (gain, 0 * shift, eps, False)
    return oa.LayerNorm(gain, shift, eps=eps), (gain, shift, eps, True)


def _composed(rng, kind, V, d, reach, bias):
    """Composed logits: norms, a cap, a sink; with positions also turns, a bias, windows."""
    k = int(rng.integers(1, 4))
    Q, K = rng.standard_normal((2, k, d)) / reach * 10 ** rng.uniform(-0.5, 0.5)
    bq, bk = (rng.standard_normal(k) * (rng.random() < 0.4) for _ in "qk")
    scale = float(rng.choice([-1.0, 1.0]) * 10 ** rng.uniform(-1.0, 1.3))
    norms = {name: _norm(rng, size) for name, size in (("query_norm", k), ("key_norm", k), ("value_norm", len(V)))}
    b = bias.get("value_bias", np.zeros(len(V)))
    cap, sink = ((float(10 ** rng.uniform(-1, 1)) if rng.random() < 0.5 else None) for _ in "cs")
    sink = None if sink is None else float(3.0 * rng.standard_normal())
    placed, windows = (
        kind == "score",
        ((np.inf, np.inf, True), (1.0, np.inf, True), (0.0, 1.0, False), (1.0, 2.0, False)),
    )
    window = windows[int(rng.integers(4))] if placed else (np.inf, np.inf, False)
    omega = list(rng.uniform(0.0, 2.0, k // 2)) if placed else []
    slope, table = (float(rng.choice([0.0, 0.3])), list(rng.standard_normal(3))) if placed else (0.0, None)
    length = 5.0 if not placed and sink is not None else None
    par = {
        "Q": Q,
        "K": K,
        "V": V,
        "bq": bq,
        "bk": bk,
        "b": b,
        "scale": scale,
        "cap": cap,
        "sink": sink,
        "length": length,
    }
    par |= {name: theirs for name, (_, theirs) in norms.items()}
    par |= {"omega": omega, "slope": slope, "table": table, "window": window}
    before, after, causal = (None if x == np.inf else x for x in window)
    given = {name: ours for name, (ours, _) in norms.items()}
    if placed:
        given |= {"bias": oa.PositionBias(slope, table=table), "rotation": oa.Rotation(omega) if omega else None}
        given["mask"] = oa.Mask(bool(causal), before=before, after=after)
    ours = oa.ScoreAttention(
        Q, K, V, query_bias=bq, key_bias=bk, value_bias=b, scale=scale, cap=cap, sink=sink, length=length, **given
    )
    return ours, Head(kind, par)


def several(rng, kinds, d, e, reach, causal, square):
    """A sum of heads: with outputs or without, masked head by head, or nested in another sum."""
    names = [str(rng.choice(kinds)) for _ in range(int(rng.integers(1, 4)))]
    pairs = [head(rng, kind, d, e, reach) for kind in names]
    ours, heads = [h for h, _ in pairs], [h for _, h in pairs]
    inside = causal and rng.random() < 0.3
    nested = not inside and rng.random() < 0.25
    ours = [oa.MaskedAttention(h) for h in ours] if inside else ours
    out, bias = e, None
    if rng.random() < 0.6:
        out = d if square else int(rng.integers(1, 4))
        W = [rng.standard_normal((out, e)) * 10 ** rng.uniform(-1, 1) for _ in ours]
        bias = None if nested or rng.random() < 0.5 else rng.standard_normal(out)
        whole = oa.MultiHeadAttention(ours, W, output_bias=bias)
        heads = [Head(h.kind, h.par, (M,)) for h, M in zip(heads, W, strict=True)]
    else:
        whole = oa.MultiHeadAttention(ours)
    if nested:
        more, definition = head(rng, str(rng.choice(kinds)), d, out, reach)
        M = [rng.standard_normal((d if square else 2, out)) for _ in "ab"]
        whole = oa.MultiHeadAttention([whole, more], M)
        heads = [Head(h.kind, h.par, (*h.outputs, M[0])) for h in heads]
        heads.append(Head(definition.kind, definition.par, (M[1],)))
    whole = oa.MaskedAttention(whole) if causal and not inside else whole
    return whole, Map(tuple(heads), causal, bias=None if bias is None else tuple(bias))


def problem(
    rng: np.random.Generator,
    *,
    kinds: Sequence[str] = ALL,
    heads: bool = False,
    masked: bool | None = False,
    regions: Sequence[str] | None = None,
    any_measure: bool | None = None,
    orders: Sequence[float] = (2.0,),
    sizes: Sequence[int] = (1, 2, 2, 3, 3, 4, 6),
    dims: Sequence[int] = (1, 1, 2, 2, 3, 4),
    forms: Sequence[int] | None = None,
    plain: bool = False,
    square: bool = False,
    gated: bool = False,
) -> Problem:
    """``masked``, ``any_measure``: None for either; ``plain``: no query biases; ``square``: values of the tokens' dimension;
    ``gated``: a gate on the output."""
    d = int(rng.choice(dims))
    e = d if square else int(rng.integers(1, 4))
    where = region(rng, d) if regions is None else region(rng, d, regions)
    reach = float(np.linalg.norm(where.points(3 * rng.standard_normal((64, 1, where.size))), axis=-1).max())
    reach = reach if reach > 0 else 1.0
    causal = bool(rng.random() < 0.4) if masked is None else masked
    if heads:
        ours, definition = several(rng, kinds, d, e, reach, causal, square)
    else:
        ours, one = head(rng, str(rng.choice(kinds)), d, e, reach, forms, plain)
        causal = ours.masked if one.kind == "rotary" else causal and one.kind not in ("sinkhorn", *SCORES)
        ours = oa.MaskedAttention(ours) if causal and one.kind != "rotary" else ours
        definition = Map((one,), causal)
    if gated:
        G = rng.standard_normal((1 if rng.random() < 0.3 else ours.out_dim, d)) * 10 ** rng.uniform(-1, 1) / reach
        ours, definition = oa.GatedAttention(ours, G, G[:, 0]), replace(definition, gate=(G, G[:, 0]))
    atoms = int(rng.choice(sizes))
    free = bool(rng.random() < 0.35) if any_measure is None else any_measure
    if free and causal and rng.random() < 0.5:  # several atoms at one time
        definition = replace(definition, times=tuple(np.sort(rng.integers(1, 3, atoms)) / 4.0))
    return Problem(definition, ours, where, None if free else atoms, atoms, float(rng.choice(orders)))


def measure(problem: Problem, X, w):
    """The measure of the library: a sequence for maps that see times."""
    if problem.ours.causal:
        return oa.SpaceTimeMeasure(problem.map.clock(len(X)), X, w)
    return oa.DiscreteMeasure(X, w)
