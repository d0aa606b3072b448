"""Small random checkpoints with the names of real ones, files of them, and forward passes written from the definitions."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from otattn.models import Transformer, load_model

Rng = np.random.Generator
Weights = dict[str, np.ndarray]


def linear(rng: Rng, name: str, rows: int, columns: int) -> Weights:
    return {
        f"{name}.weight": rng.normal(size=(rows, columns)) / math.sqrt(columns),
        f"{name}.bias": 0.3 * rng.normal(size=rows),
    }


def norm(rng: Rng, name: str, d: int) -> Weights:
    return {f"{name}.weight": rng.uniform(0.5, 1.5, d), f"{name}.bias": 0.3 * rng.normal(size=d)}


def bert_weights(
    rng: Rng, *, layers: int = 2, d: int = 12, hidden: int = 20, vocab: int = 17, length: int = 10
) -> Weights:
    out = {
        f"embeddings.{name}_embeddings.weight": rng.normal(size=(size, d))
        for name, size in (("word", vocab), ("position", length), ("token_type", 2))
    }
    out |= norm(rng, "embeddings.LayerNorm", d)
    for i in range(layers):
        stem = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            out |= linear(rng, f"{stem}attention.{part}", d, d)
        out |= norm(rng, f"{stem}attention.output.LayerNorm", d) | norm(rng, f"{stem}output.LayerNorm", d)
        out |= linear(rng, f"{stem}intermediate.dense", hidden, d) | linear(rng, f"{stem}output.dense", d, hidden)
    return out


def gpt2_weights(rng: Rng, *, layers: int = 2, d: int = 12, vocab: int = 17, length: int = 10) -> Weights:
    out = {"wte.weight": rng.normal(size=(vocab, d)), "wpe.weight": rng.normal(size=(length, d))}
    out |= norm(rng, "ln_f", d)
    for i in range(layers):
        stem = f"h.{i}."
        out |= norm(rng, f"{stem}ln_1", d) | norm(rng, f"{stem}ln_2", d)
        shapes = (("attn.c_attn", d, 3 * d), ("attn.c_proj", d, d), ("mlp.c_fc", d, 4 * d), ("mlp.c_proj", 4 * d, d))
        for part, rows, columns in shapes:
            weight = linear(rng, "x", columns, rows)
            out |= {f"{stem}{part}.weight": weight["x.weight"].T, f"{stem}{part}.bias": weight["x.bias"]}
    return out


def llama_weights(
    rng: Rng,
    *,
    layers: int = 2,
    d: int = 32,
    heads: int = 4,
    kv: int = 2,
    hidden: int = 64,
    vocab: int = 17,
    width: int | None = None,
) -> Weights:
    """Names of Hugging Face, rotary layout of halves."""
    width = d // heads if width is None else width
    out = {"model.embed_tokens.weight": rng.normal(size=(vocab, d)), "model.norm.weight": rng.uniform(0.5, 1.5, d)}
    for i in range(layers):
        stem = f"model.layers.{i}."
        shapes = {
            "self_attn.q_proj": (heads * width, d),
            "self_attn.k_proj": (kv * width, d),
            "self_attn.v_proj": (kv * width, d),
            "self_attn.o_proj": (d, heads * width),
            "mlp.gate_proj": (hidden, d),
            "mlp.up_proj": (hidden, d),
            "mlp.down_proj": (d, hidden),
        }
        out |= {f"{stem}{name}.weight": 1.5 * rng.normal(size=s) / math.sqrt(s[1]) for name, s in shapes.items()}
        out |= {f"{stem}{n}.weight": rng.uniform(0.5, 1.5, d) for n in ("input_layernorm", "post_attention_layernorm")}
    return out


def bert(source: Any, *, eps: float | None = None, config: dict | None = None, **options: Any) -> Transformer:
    """A model with this eps."""
    given = config if eps is None else {**(config or {}), "layer_norm_eps": eps}
    return load_model(source, config=given, **options)


def gpt2(source: Any, *, eps: float | None = None, config: dict | None = None, **options: Any) -> Transformer:
    """A model with this eps."""
    given = config if eps is None else {**(config or {}), "layer_norm_epsilon": eps}
    return load_model(source, config=given, **options)


def write_safetensors(path: Path, weights: Weights, *, dtype: str = "F32") -> Path:
    """The format by hand: length of the header, header, data."""
    header, data = {}, b""
    for name, array in weights.items():
        if dtype == "BF16":
            raw = (np.asarray(array, dtype="<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            raw = np.asarray(array, dtype={"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def prefixed(weights: Weights, prefix: str) -> Weights:
    return {prefix + name: value for name, value in weights.items()}


# forward passes, token by token and head by head


def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean()
    return gain * centred / math.sqrt((centred**2).mean() + eps) + bias


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return gain * x / math.sqrt((x**2).mean() + eps)


def gelu(s: float) -> float:
    return 0.5 * s * (1.0 + math.erf(s / math.sqrt(2.0)))


def gelu_tanh(s: float) -> float:
    return 0.5 * s * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (s + 0.044715 * s**3)))


def silu(s: float) -> float:
    return s / (1.0 + math.exp(-s)) if s > -700.0 else 0.0


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """Softmax attention of one head for queries, keys and values ``(n, .)``."""
    out = []
    for i in range(len(q)):
        logits = np.array([q[i] @ k[j] for j in range(i + 1 if causal else len(k))]) / math.sqrt(q.shape[1])
        p = np.exp(logits - logits.max())
        out.append(p @ v[: len(p)] / p.sum())
    return np.array(out)


def turned(z: np.ndarray, base: float) -> np.ndarray:
    """Rows ``(n, k)`` in the layout of halves, row i turned by i."""
    half = z.shape[1] // 2
    out = np.empty_like(z)
    for i, row in enumerate(z):
        for t in range(half):
            angle = i * base ** (-t / half)
            a, b = row[t], row[half + t]
            out[i, t] = a * math.cos(angle) - b * math.sin(angle)
            out[i, half + t] = a * math.sin(angle) + b * math.cos(angle)
    return out


def bert_forward(w: Weights, ids: np.ndarray, *, heads: int, eps: float) -> list[np.ndarray]:
    X = np.array(
        [
            layer_norm(
                w["embeddings.word_embeddings.weight"][t]
                + w["embeddings.position_embeddings.weight"][i]
                + w["embeddings.token_type_embeddings.weight"][0],
                w["embeddings.LayerNorm.weight"],
                w["embeddings.LayerNorm.bias"],
                eps,
            )
            for i, t in enumerate(ids)
        ]
    )
    states = [X]
    for number in range(sum(".self.query.weight" in name for name in w)):
        stem = f"encoder.layer.{number}."

        def at(name: str, x: np.ndarray, stem: str = stem) -> np.ndarray:
            return x @ w[f"{stem}{name}.weight"].T + w[f"{stem}{name}.bias"]

        def normed(name: str, x: np.ndarray, stem: str = stem) -> np.ndarray:
            gain, bias = w[f"{stem}{name}.weight"], w[f"{stem}{name}.bias"]
            return np.array([layer_norm(row, gain, bias, eps) for row in x])

        q, k, v = (np.split(at(f"attention.self.{s}", X), heads, axis=1) for s in ("query", "key", "value"))
        joined = np.hstack([attend(*parts, causal=False) for parts in zip(q, k, v, strict=True)])
        Y = normed("attention.output.LayerNorm", X + at("attention.output.dense", joined))
        X = normed("output.LayerNorm", Y + at("output.dense", np.vectorize(gelu)(at("intermediate.dense", Y))))
        states.append(X)
    return states


def gpt2_forward(w: Weights, ids: np.ndarray, *, heads: int, eps: float) -> list[np.ndarray]:
    X = np.array([w["wte.weight"][t] + w["wpe.weight"][i] for i, t in enumerate(ids)])
    states = [X]
    for number in range(sum(".attn.c_attn.weight" in name for name in w)):
        stem = f"h.{number}."

        def at(name: str, x: np.ndarray, stem: str = stem) -> np.ndarray:
            return x @ w[f"{stem}{name}.weight"] + w[f"{stem}{name}.bias"]

        def normed(name: str, x: np.ndarray) -> np.ndarray:
            return np.array([layer_norm(row, w[f"{name}.weight"], w[f"{name}.bias"], eps) for row in x])

        q, k, v = (
            np.split(part, heads, axis=1) for part in np.split(at("attn.c_attn", normed(f"{stem}ln_1", X)), 3, axis=1)
        )
        joined = np.hstack([attend(*parts, causal=True) for parts in zip(q, k, v, strict=True)])
        X = X + at("attn.c_proj", joined)
        X = X + at("mlp.c_proj", np.vectorize(gelu_tanh)(at("mlp.c_fc", normed(f"{stem}ln_2", X))))
        states.append(X)
    states[-1] = np.array([layer_norm(row, w["ln_f.weight"], w["ln_f.bias"], eps) for row in X])
    return states


def llama_forward(w: Weights, ids: np.ndarray, *, heads: int, kv: int, eps: float, base: float) -> list[np.ndarray]:
    X = w["model.embed_tokens.weight"][ids]
    states = [X]
    for number in range(sum(".q_proj.weight" in name for name in w)):
        stem = f"model.layers.{number}."

        def at(name: str, x: np.ndarray, stem: str = stem) -> np.ndarray:
            return x @ w[f"{stem}{name}.weight"].T + w.get(f"{stem}{name}.bias", 0.0)

        def normed(name: str, x: np.ndarray, stem: str = stem) -> np.ndarray:
            return np.array([rms_norm(row, w[f"{stem}{name}.weight"], eps) for row in x])

        Z = normed("input_layernorm", X)
        q = np.split(at("self_attn.q_proj", Z), heads, axis=1)
        k, v = (np.split(at(f"self_attn.{s}_proj", Z), kv, axis=1) for s in "kv")
        group = heads // kv
        outs = [attend(turned(q[h], base), turned(k[h // group], base), v[h // group], True) for h in range(heads)]
        X = X + at("self_attn.o_proj", np.hstack(outs))
        Y = normed("post_attention_layernorm", X)
        X = X + at("mlp.down_proj", np.vectorize(silu)(at("mlp.gate_proj", Y)) * at("mlp.up_proj", Y))
        states.append(X)
    states[-1] = np.array([rms_norm(row, w["model.norm.weight"], eps) for row in X])
    return states
