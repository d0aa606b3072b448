"""GGUF files of llama-type weights with the names of Hugging Face, written by the gguf package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn

gguf = pytest.importorskip("gguf", reason="the extra `models` (gguf) is not installed")

HEADS, KV, EPS, BASE = 4, 2, 1e-3, 30.0
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_adjacent(W: np.ndarray, heads: int) -> np.ndarray:
    """Rows from the layout of halves to that of adjacent pairs, head by head."""
    width = len(W) // heads
    order = np.arange(width).reshape(2, width // 2).T.ravel()
    return np.ascontiguousarray(W.reshape(heads, width, -1)[:, order].reshape(W.shape))


def write(
    path: Path,
    w: syn.Weights,
    kind: str = "F32",
    *,
    change: Callable[[Any], None] | None = None,
    arch: str = "llama",
    extra: syn.Weights | None = None,
) -> dict[str, np.ndarray]:
    """A file of the weights, matrices stored as ``kind``; returns them as they are after dequantisation.

    ``change`` adds metadata, ``extra`` tensors by their names in the file.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(BASE)
    writer.add_context_length(50)
    writer.add_bool("general.flag", True)
    writer.add_array("general.list", [1.5, 2.5])
    if change is not None:
        change(writer)
    stored = {}
    quantised = gguf.GGMLQuantizationType[kind]
    for name, value in w.items():
        stem, _, kind_of = name.removeprefix("model.").rpartition(".")
        parts = stem.split(".", 2)
        if parts[0] == "layers":
            new = f"blk.{parts[1]}.{NAMES[parts[2]]}.{kind_of}"
        else:
            new = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[0]]
        array = np.ascontiguousarray(value, dtype=np.float32)
        if "q_proj" in name or "k_proj" in name:
            array = to_adjacent(array, HEADS if "q_proj" in name else KV)
        if array.ndim == 2 and kind != "F32":
            data = gguf.quants.quantize(array, quantised)
            writer.add_tensor(new, data, raw_dtype=quantised)
            array = gguf.quants.dequantize(data, quantised)
        else:
            writer.add_tensor(new, array)
        stored[new] = array
    for name, value in (extra or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
