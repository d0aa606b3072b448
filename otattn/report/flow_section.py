"""Depth: the layer's own flow of its tokens, stability in time against Gronwall bounds, and Gaussian blow-up."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn.attention import AttentionMap, L2Attention, SoftmaxAttention
from otattn.data import SampleLayer
from otattn.dynamics import FlowStability, flow, flow_stability, gaussian_flow, token_clusters
from otattn.lipschitz.table import table as table_of
from otattn.measures import GaussianMeasure
from otattn.plotting import plot_cluster_counts, plot_flow_stability
from otattn.report.section import Section, number, table

__all__ = ["flow_section", "gaussian_rows", "perturbed_flows", "token_flow_rows"]

TOKENS = 16
"""Tokens of the first window that flow."""
STEPS = 1000
"""Of a Gaussian flow: where L2 attention spreads one direction by 1e16, the thin ones are rounding, and no step is long."""


def perturbed_flows(
    attention: AttentionMap, X: Any, *, t_end: float, size: float, seed: int, progress: bool = False
) -> FlowStability:
    """Two flows of the layer: its tokens, and the same displaced by ``size`` times their largest norm."""
    X = check.points(X, "X")
    rng = np.random.default_rng(seed)
    step = rng.standard_normal(X.shape)
    step *= size * np.linalg.norm(X, axis=1).max() / np.linalg.norm(step, axis=1).max()
    times = np.linspace(0.0, t_end, 11)
    return flow_stability(attention, X, X + step, t_span=(0.0, t_end), t_eval=times, bounds=False, progress=progress)


def token_flow_rows(drift: FlowStability) -> list[dict[str, Any]]:
    """Distance ratio, Gronwall's bound of it as a power of ten, radius and clusters at each time.

    The bound takes the Lipschitz constant over the ball of the largest radius of both flows up to that time.
    """
    history = token_clusters(drift.flows[0])  # type: ignore[arg-type]
    assert drift.radii is not None
    top = float(drift.radii.max())
    table = table_of(drift.attention, radius=top, n=drift.n)  # type: ignore[arg-type]  # no layer depends on time here
    uppers = [b for b in table if b.kind == "upper"]
    constant = min((b.value for b in uppers), default=math.inf)
    rows = []
    for k, t in enumerate(drift.times):
        row: dict[str, Any] = {"t": float(t), "ratio": float(drift.ratios[k])}
        row["log10 of the Gronwall bound"] = 0.0 if k == 0 else constant * float(t) / math.log(10.0)
        rows.append({**row, "radius": float(drift.radii[k]), "clusters": int(history.counts[k])})
    return rows


def gaussian_rows(*, dim: int, seed: int) -> list[dict[str, Any]]:
    """Blow-up times of Gaussian flows from one random covariance: softmax and L2 attention, V = A, -A and I."""
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((dim, dim)) / np.sqrt(dim)
    A, L = (G + G.T) / np.sqrt(2.0), rng.standard_normal((dim, dim))
    start = GaussianMeasure(np.zeros(dim), L @ L.T / dim)
    rows = []
    for values, V in (("A", A), ("-A", -A), ("I", np.eye(dim))):
        for name, attention in (("softmax", SoftmaxAttention(A, V)), ("L2", L2Attention(A, np.eye(dim), V))):
            run = gaussian_flow(attention, start, t_span=(0.0, 50.0), max_steps=STEPS)
            rows.append(
                {
                    "attention": name,
                    "V": values,
                    "followed_until": float(run.times[-1]),
                    "blow_up_time": run.blow_up_time,
                    "trace_at_the_end": float(np.trace(run.covs[-1])),
                    "limit_rank": run.limit_rank,
                    "limit_status": run.limit_result.status,
                }
            )
    return rows


def flow_section(layer: SampleLayer, *, seed: int, advance: Any) -> Section:
    """The layer's flow of its first tokens, on and off the sphere, and Gaussian flows."""
    attention, X = layer.attention, layer.tokens(0)[:TOKENS]
    data: dict[str, Any] = {"tokens": len(X)}
    lines: list[str] = []
    pictures: dict[str, Any] = {}
    if attention.in_dim == attention.out_dim:
        drift = perturbed_flows(attention, X, t_end=1.0, size=1e-3, seed=seed)
        advance()
        rows = token_flow_rows(drift)
        data["stability"] = rows
        sphere = flow(attention, X, t_span=(0.0, 10.0), normalization="sphere", t_eval=np.linspace(0.0, 10.0, 41))
        history = token_clusters(sphere)
        data["sphere"] = {"times": sphere.times.tolist(), "clusters": history.counts.tolist()}
        lines += [
            f"The layer repeated in depth, x' = Gamma_mu(x), on its first {len(X)} tokens: largest token norm, and "
            "W_2 between this flow and that of slightly displaced tokens over its initial value, and Gronwall's bound of it as a "
            "power of ten, from our best bound over the ball of the largest radius reached.",
            "",
            *table(list(rows[0]), [[number(v) for v in row.values()] for row in rows]),
            f"Projected to spheres (each token keeps its norm) for t up to {sphere.times[-1]:g}: from "
            f"{history.counts[0]} clusters to {history.counts[-1]}.",
            "",
        ]
        pictures = {
            "flow.png": partial(plot_flow_stability, drift),
            "sphere.png": partial(plot_cluster_counts, history),
        }
    else:
        lines += ["The layer maps to another dimension than its own: it has no flow.", ""]
        advance()
    runs = gaussian_rows(dim=3, seed=seed)
    data["gaussian"] = runs
    lines += [
        "Gaussian measures stay Gaussian under softmax and L2 attention (random symmetric A, d = 3, t up to 50):",
        "",
        *table(list(runs[0]), [[v if isinstance(v, str) else number(v) for v in row.values()] for row in runs]),
    ]
    advance()
    return Section("Flows in depth", lines, data, pictures)
