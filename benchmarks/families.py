"""Hidden states of every family of models against the package ``transformers``, layer by layer.

    python3 -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers accelerate -e ".[models]"
    VENV/bin/python -m benchmarks.families [--out benchmarks/results] [--references tests/models/references]

Tiny models with random weights (gains and biases too), in float64: each is read from the folder that transformers writes, from
the model object itself and from its ``state_dict``; texts are padded on either side. ``--references`` writes the small models and
their states that the tests compare with: weights are rounded to half precision first, so that files are small and exact.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel

from benchmarks.common import RESULTS, machine, table
from otattn import load_model

TOL = 1e-5
"""Of hidden states of size 1 to 10. Frequencies and buckets are in float32 in transformers: 1e-7 relative."""
IDS = np.array([[3, 5, 2, 9, 4, 7, 7], [6, 11, 9, 8, 2, 2, 4]])
SMALL: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 12,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
}
NORM, RMS = {"layer_norm_eps": 1e-3}, {"rms_norm_eps": 1e-3, "num_key_value_heads": 1}
OPT = {key: value for key, value in SMALL.items() if key != "intermediate_size"} | {
    "ffn_dim": 20,
    "word_embed_proj_dim": 16,
}
IMAGES: dict[str, Any] = {
    **{key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    **{"image_size": 8, "patch_size": 4, **NORM},
}
T5 = {
    **{
        "vocab_size": 13,
        "d_model": 16,
        "d_kv": 6,
        "d_ff": 20,
        "num_layers": 2,
        "num_heads": 2,
        "layer_norm_epsilon": 1e-3,
    },
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "pad_token_id": 0, "eos_token_id": 1},
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SMALL | NORM),
    "roberta": ("roberta", SMALL | NORM | {"type_vocab_size": 1}),
    "xlm_roberta": ("xlm-roberta", SMALL | NORM),
    "distilbert": (
        "distilbert",
        {"vocab_size": 13, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20, "max_position_embeddings": 12},
    ),
    "electra": ("electra", SMALL | NORM | {"embedding_size": 8}),
    "electra_same": ("electra", SMALL | NORM | {"embedding_size": 16}),
    "gpt2": (
        "gpt2",
        {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "n_inner": 20}
        | {"layer_norm_epsilon": 1e-3, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1},
    ),
    "opt": ("opt", OPT),
    "opt_bare": ("opt", OPT | {"enable_bias": False}),
    "gpt_neox": ("gpt_neox", SMALL | NORM | {"rope_parameters": {"rope_theta": 30.0, "partial_rotary_factor": 0.5}}),
    "gpt_neox_serial": ("gpt_neox", SMALL | NORM | {"use_parallel_residual": False, "attention_bias": False}),
    "llama": ("llama", SMALL | RMS | {"rope_parameters": LLAMA3 | {"rope_theta": 30.0}}),
    "llama_yarn": ("llama", SMALL | RMS | {"rope_parameters": YARN | {"rope_theta": 30.0}, "head_dim": 6}),
    "llama_yarn_mscale": (
        "llama",
        SMALL
        | RMS
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 2.0}, "mlp_bias": True},
    ),
    "llama_linear": ("llama", SMALL | RMS | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("mistral", SMALL | RMS | {"sliding_window": 3}),
    "mistral_open": ("mistral", SMALL | RMS | {"sliding_window": None}),
    "qwen2": ("qwen2", SMALL | RMS),
    "qwen2_window": ("qwen2", SMALL | RMS | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("qwen3", SMALL | RMS | {"head_dim": 6}),
    "gemma2": (
        "gemma2",
        SMALL | RMS | {"head_dim": 6, "sliding_window": 3, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
    ),
    "gpt_oss": (
        "gpt_oss",
        SMALL
        | RMS
        | {"head_dim": 6, "sliding_window": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"swiglu_limit": 1.0},
    ),
    "modernbert": (
        "modernbert",
        SMALL | {"norm_eps": 1e-3, "local_attention": 4, "num_hidden_layers": 3, "cls_token_id": 2, "sep_token_id": 2},
    ),
    "vit": ("vit", IMAGES),
    "deit": ("deit", IMAGES | {"qkv_bias": False}),
    "t5": ("t5", T5),
    "t5_gated": ("t5", T5 | {"feed_forward_proj": "gated-gelu"}),
}
REFERENCES = [
    name for name in CASES if name not in ("electra_same", "opt_bare", "llama_linear", "mistral_open", "deit")
]


def make(name: str, seed: int = 0) -> Any:
    """A model whose weights matter everywhere: all biases and gains random, representable in half precision."""
    kind, options = CASES[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **options)
    experts = {"experts_implementation": "eager"} if kind == "gpt_oss" else {}
    if kind == "t5":
        model = transformers.T5EncoderModel(config)
    else:
        model = AutoModel.from_config(config, attn_implementation="eager", **experts)
    model = model.double().eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            scale = 0.3 if weight.ndim < 2 else 1.2 / weight.shape[-1] ** 0.5
            norm = weight.ndim == 1 and "norm" in part.lower() and part.endswith("weight") and kind != "gemma2"
            new = (1.0 if norm or re.search(r"ln_.*weight$", part) else 0.0) + scale * torch.randn_like(weight)
            weight.copy_(new.half().double())
    return model


def inputs(name: str) -> np.ndarray:
    """Token indices, or images."""
    if name in ("vit", "deit"):
        return np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float16).astype(np.float64)
    return IDS


def states(model: Any, given: np.ndarray, **options: Any) -> np.ndarray:
    """Hidden states of transformers, the last after the final normalisation."""
    with torch.no_grad():
        out = model(torch.tensor(given), output_hidden_states=True, **options)
    found = [state.numpy() for state in out.hidden_states]
    return np.stack([*found[:-1], out.last_hidden_state.numpy()])


def padded(name: str, theirs: Any, mine: Any) -> float:
    """The largest difference at the tokens of a text of 4 beside one of 7: padded at its end, at its start, and given ragged."""
    pad = theirs.config.pad_token_id
    texts = [IDS[0, :4], IDS[1]]
    right = np.array([[*texts[0], *[pad] * 3], texts[1]])
    mask = np.array([[1] * 4 + [0] * 3, [1] * 7])
    expected = states(theirs, right, attention_mask=torch.tensor(mask))
    alone = states(theirs, texts[0][None])[:, 0]
    left = np.array([[*[pad] * 3, *texts[0]], texts[1]])
    found = mine.hidden_states(right, mask=mask)
    # with a window padding may see nothing, which is nan in transformers and spreads; the text alone is compared with then
    whole = np.isfinite(expected).all(axis=-1) & (mask == 1)
    gaps = [
        found[whole] - expected[whole],
        found[:, 0, :4] - alone,
        mine.hidden_states([list(text) for text in texts])[:, 0, :4] - alone,
        mine.hidden_states(left, mask=mask[:, ::-1] | (np.arange(2) == 1)[:, None])[:, 0, 3:] - alone,
    ]
    assert np.isnan(found[:, mask == 0]).all()
    return max(float(np.abs(gap).max()) for gap in gaps)


def compare(name: str) -> list[str]:
    """One row: the family, and the largest differences of each way to give it."""
    theirs, given = make(name), inputs(name)
    expected = states(theirs, given)
    config = theirs.config.to_dict()
    gaps = []
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        for source, options in ((folder, {}), (theirs, {}), (theirs.state_dict(), {"config": config})):
            mine = load_model(source, **options).hidden_states(given)
            gaps.append(float(np.abs(mine - expected).max()))
        mine = load_model(folder)
        gaps.append(float("nan") if name in ("vit", "deit") else padded(name, theirs, mine))
    changed = float(np.abs(expected[-1] - expected[0]).max())
    return [name, CASES[name][0], *(f"{gap:.1e}" for gap in gaps), f"{changed:.1f}"]


def reference(name: str, folder: Path) -> None:
    """Weights (one after another), configuration, inputs and states of a model in one small file."""
    model, given = make(name), inputs(name)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        config = json.loads((Path(saved) / "config.json").read_text())
        tensors = load_model(saved).checkpoint
        kept = {n: tensors.tensor(n).astype(np.float16) for n in tensors.shapes if "pooler" not in n}
    about = {"config": config, "shapes": {n: array.shape for n, array in kept.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / f"{name}.npz",
        about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        weights=np.concatenate([array.ravel() for array in kept.values()]),
        inputs=given.astype(np.int16 if given.dtype.kind == "i" else np.float16),
        states=states(model, given).astype(np.float32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--references", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = [compare(name) for name in args.only]
    if args.references is not None:
        for name in args.only:
            if name in REFERENCES:
                reference(name, args.references)
    head = ["model", "family", "folder", "object", "state_dict", "padded", "last less first state"]
    lines = [
        "# Families of models against transformers",
        "",
        f"Largest differences of hidden states, all layers, of {len(rows)} tiny models with random weights in float64; the last",
        "column is how far the layers move the tokens. `python -m benchmarks.families`",
        "",
        *table(head, rows),
        "",
        *machine("torch", "transformers", seeds="0"),
    ]
    print("\n".join(lines))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "families.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    worst = max(float(gap) for row in rows for gap in row[2:6] if gap != "nan")
    if worst > TOL:
        raise SystemExit(f"the largest difference is {worst:.1e}, above {TOL:g}")


if __name__ == "__main__":
    main()
