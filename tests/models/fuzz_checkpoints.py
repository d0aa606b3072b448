"""Formats of mutated files: checkpoints (safetensors, shards, GGUF) and their configurations."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import synthetic as syn
from file_fuzz import FORMATS, Format
from gguf_writer import BASE, EPS, HEADS, KV, write

from otattn.models import load_model

MODERATE = 1e3
"""Weights up to here are compared through the whole forward pass; larger ones tensor by tensor."""
IDS = np.array([1, 5, 2, 9, 0, 7])

CONFIG: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "num_attention_heads": 3, "layer_norm_eps": EPS, "hidden_act": "gelu"},
    "gpt2": {"model_type": "gpt2", "n_head": 3, "layer_norm_epsilon": EPS, "activation_function": "gelu_new"},
    "llama": {
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "rms_norm_eps": EPS,
        "rope_theta": BASE,
        "hidden_act": "silu",
        "rope_scaling": {"rope_type": "default"},
        "vocab_size": 17,
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLM"],
    },
}
LOAD = {"bert": syn.bert, "gpt2": syn.gpt2, "llama": load_model}


def weights(kind: str, rng: random.Random) -> syn.Weights:
    make = {"bert": syn.bert_weights, "gpt2": syn.gpt2_weights, "llama": syn.llama_weights}[kind]
    return make(np.random.default_rng(rng.randrange(5)), layers=1)


def make_folder(kind: str, dtype: str) -> Callable[[Path, random.Random], None]:
    def make(folder: Path, rng: random.Random) -> None:
        w = weights(kind, rng)
        (folder / "config.json").write_text(json.dumps(CONFIG[kind]))
        if dtype != "shards":
            syn.write_safetensors(folder / "model.safetensors", w, dtype=dtype)
            return
        names, where = sorted(w), {}
        for i in range(2):
            file = f"model-0000{i + 1}-of-00002.safetensors"
            syn.write_safetensors(folder / file, {name: w[name] for name in names[i::2]}, dtype="F64")
            where |= dict.fromkeys(names[i::2], file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    return make


def read_model(kind: str, name: str = "") -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        model = LOAD[kind](folder / name)
        return model, model.hidden_states(IDS), {n: model.checkpoint.tensor(n) for n in names_of(model)}

    return read


def names_of(model: Any) -> list[str]:
    """Weights that the layers use; buffers are left out."""
    return [n for n in model.checkpoint.shapes if not n.endswith(("position_ids", "rope_freqs.weight"))]


def parsed(folder: Path) -> syn.Weights:
    """All safetensors files of a folder, by the definition of the format."""
    out = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + o for o in entry["data_offsets"])
            raw = data[begin:end]
            if entry["dtype"] == "BF16":
                flat = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                flat = np.frombuffer(raw, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[entry["dtype"]])
            out[name] = flat.astype(np.float64).reshape(entry["shape"])
    return out


def forward(kind: str, w: syn.Weights, config: dict[str, Any]) -> np.ndarray:
    """The independent forward pass with the numbers of a configuration."""
    if kind == "bert":
        return np.array(
            syn.bert_forward(w, IDS, heads=config["num_attention_heads"], eps=config.get("layer_norm_eps", 1e-12))
        )
    if kind == "gpt2":
        eps = config.get("layer_norm_epsilon", 1e-5)
        return np.array(
            syn.gpt2_forward(w, IDS, heads=config.get("n_head", config.get("num_attention_heads")), eps=eps)
        )
    heads = config["num_attention_heads"]
    inner = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    options = {
        "kv": config.get("num_key_value_heads") or heads,
        "eps": config.get("rms_norm_eps", 1e-6),
        "base": config.get("rope_theta") or inner.get("rope_theta") or 1e4,
    }
    return np.array(syn.llama_forward(w, IDS, heads=heads, **options))


def same(model: Any, states: np.ndarray, read: syn.Weights, w: syn.Weights, expected: Callable[[], np.ndarray]) -> None:
    """Every tensor is bit for bit what the file says, and moderate ones give the states of the independent pass."""
    assert set(read) <= set(w)
    for name, value in read.items():
        np.testing.assert_array_equal(value, w[name])
    assert np.isfinite(states).all()
    if max(np.abs(value).max() for value in read.values()) <= MODERATE and model.config.eps > 1e-12:
        with np.errstate(all="ignore"):
            other = expected()
        # large weights amplify roundings of the logits
        np.testing.assert_allclose(states, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def judge_folder(kind: str) -> Callable[[Path, Any], None]:
    def judge(folder: Path, value: Any) -> None:
        model, states, read = value
        w, config = parsed(folder), json.loads((folder / "config.json").read_text())
        plain = {"bert": "gelu", "gpt2": "gelu_tanh", "llama": "silu"}[kind]
        if model.config.activation != plain:
            return
        prefix = model.layout.prefix
        standard = {"llama": "model."}.get(kind, "")
        renamed = {standard + name.removeprefix(prefix): array for name, array in w.items()}
        same(model, states, read, w, lambda: forward(kind, renamed, config))

    return judge


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SMALL_TOKENS = ["<|end|>", "a", "b", "c", "Ġ", "ab", "Ġab", "1", "2", "t", "h", "e", "th", "the", "p", "r", "i"]
SMALL_MERGES = ["a b", "Ġ ab", "t h", "th e"]


def make_gguf(folder: Path, rng: random.Random) -> None:
    def vocabulary(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(SMALL_TOKENS)
        writer.add_token_types([3, *[1] * 16])
        writer.add_token_merges(SMALL_MERGES)

    write(folder / "x.gguf", weights("llama", rng), rng.choice(("F32", "F16", "Q8_0")), change=vocabulary)


def parsed_gguf(file: Path, *, tensors: bool = True) -> tuple[dict[str, Any], syn.Weights]:
    data, at = file.read_bytes(), 24

    def take(code: str) -> Any:
        nonlocal at
        out = struct.unpack_from("<" + code, data, at)[0]
        at += struct.calcsize("<" + code)
        return out

    def text() -> str:
        nonlocal at
        size = take("Q")
        at += size
        return data[at - size : at].decode(errors="replace")

    def value(kind: int) -> Any:
        if kind == 9:
            inner, count = take("I"), take("Q")
            return [value(inner) for _ in range(count)]
        return text() if kind == 8 else take(SCALARS[kind])

    count_of_tensors, keys = struct.unpack_from("<QQ", data, 8)
    meta = {}
    for _ in range(keys):
        key = text()
        meta[key] = value(take("I"))
    infos = []
    for _ in range(count_of_tensors if tensors else 0):
        name = text()
        shape = [take("Q") for _ in range(take("I"))][::-1]
        infos.append((name, shape, take("I"), take("Q")))
    align = meta.get("general.alignment", 32)
    base = -(-at // align) * align
    out = {}
    for name, shape, code, offset in infos:
        count, start = int(np.prod(shape)), base + offset
        if code in (0, 1):
            flat = np.frombuffer(data, ("<f4", "<f2")[code], count, start).astype(np.float64)
        elif code == 8:  # Q8_0: a scale in half precision and 32 integers
            blocks = np.frombuffer(data, np.dtype([("d", "<f2"), ("q", "i1", 32)]), count // 32, start)
            flat = (blocks["d"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)).astype(np.float64).ravel()
        else:
            raise NotImplementedError(code)
        out[name] = flat.reshape(shape)
    return meta, out


def judge_gguf(folder: Path, value: Any) -> None:
    model, states, read = value
    try:
        meta, w = parsed_gguf(folder / "x.gguf")
    except NotImplementedError:  # another type of quantisation, which the gguf package reads
        return
    heads = meta["llama.attention.head_count"]
    kv = meta.get("llama.attention.head_count_kv", heads)
    heads, kv = (n[0] if isinstance(n, list) else n for n in (heads, kv))
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    translated = {"model.embed_tokens.weight": w["token_embd.weight"], "model.norm.weight": w["output_norm.weight"]}
    for name, array in w.items():
        parts = name.split(".")
        if parts[0] != "blk":
            continue
        if parts[2] in ("attn_q", "attn_k"):  # from adjacent pairs to halves
            count = heads if parts[2] == "attn_q" else kv
            array = array.reshape(count, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        translated[f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"] = array
    eps, base = meta["llama.attention.layer_norm_rms_epsilon"], meta.get("llama.rope.freq_base", 1e4)
    if 2 * len(model.config.rotary.frequencies) * heads != len(w["blk.0.attn_q.weight"]):
        return
    same(
        model,
        states,
        read,
        w,
        lambda: np.array(syn.llama_forward(translated, IDS, heads=heads, kv=kv, eps=eps, base=base)),
    )


FORMATS |= {
    **{
        f"{kind} {dtype}": Format(
            ("model.safetensors",), make_folder(kind, dtype), read_model(kind), judge_folder(kind)
        )
        for kind, dtype in (("llama", "F32"), ("llama", "BF16"), ("bert", "F64"), ("gpt2", "F16"))
    },
    **{
        f"{kind} config": Format(("config.json",), make_folder(kind, "F64"), read_model(kind), judge_folder(kind))
        for kind in ("bert", "gpt2", "llama")
    },
    "shards": Format(
        ("model.safetensors.index.json", "model-00002-of-00002.safetensors"),
        make_folder("llama", "shards"),
        read_model("llama"),
        judge_folder("llama"),
    ),
    "gguf": Format(("x.gguf",), make_gguf, read_model("llama", "x.gguf"), judge_gguf),
}
