"""GGUF files of each architecture: the reference models in the names of llama.cpp, and the states that transformers found.

The files are written as the converter of llama.cpp does it: Llama's rows of queries and keys in adjacent pairs, and its scaled
frequencies as a tensor of divisors; Gemma's gains with their 1; GPT-2's matrices as ``y = W x + b``.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import NAMES, gguf, to_adjacent

from otattn.models import GGUFCheckpoint, load_model, random

REFERENCES = Path(__file__).parent / "references"
KINDS = ("llama", "qwen2", "qwen3", "gemma2", "gpt2")
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm"}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GPT2 = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

Arrays = dict[str, np.ndarray]


def reference(kind: str) -> tuple[dict[str, Any], Arrays, np.ndarray, np.ndarray]:
    """Configuration, weights, inputs and states."""
    with np.load(REFERENCES / f"{kind}.npz") as file:
        about, flat = json.loads(file["about"].tobytes()), file["weights"].astype(np.float64)
        inputs, states = file["inputs"], file["states"]
    ends = np.cumsum([int(np.prod(shape)) for shape in about["shapes"].values()])
    parts = np.split(flat, ends[:-1])
    weights = {name: part.reshape(shape) for (name, shape), part in zip(about["shapes"].items(), parts, strict=True)}
    return about["config"], weights, inputs, states


def renamed(name: str, kind: str) -> str:
    stem, _, last = name.rpartition(".")
    layer, _, inner = stem.removeprefix("layers.").removeprefix("h.").partition(".")
    own = GPT2 if kind == "gpt2" else NAMES | HEAD_NORMS | OUTER | (GEMMA if kind == "gemma2" else {})
    return f"blk.{layer}.{own[inner]}.{last}" if inner else f"{own[layer]}.{last}"


def converted(kind: str, config: dict[str, Any], weights: Arrays) -> Arrays:
    """The tensors of the file."""
    out = {}
    for name, w in weights.items():
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            w = to_adjacent(w, heads)
        if kind == "gemma2" and name.endswith("norm.weight"):
            w = w + 1.0
        if kind == "gemma2" and ".q_proj." in name:  # files have no key for this number: the width is taken
            w = w * (config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5
        if kind == "gpt2" and name.endswith(".weight") and name.startswith("h.") and w.ndim == 2:
            w = w.T
        out[renamed(name, kind)] = w
    if config.get("rope_parameters", {}).get("rope_type") == "llama3":
        out["rope_freqs.weight"] = divisors(config)
    return out


def divisors(config: dict[str, Any]) -> np.ndarray:
    """Llama 3: wavelengths above ``length / low`` are stretched by the factor, those below ``length / high`` stay."""
    rope = config["rope_parameters"]
    out = []
    for t in range(config["head_dim"] // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * t / config["head_dim"])
        turns = rope["original_max_position_embeddings"] / wave
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        out.append(1.0 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out)


def keys(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that the converter writes."""
    if kind == "gpt2":
        names = {"n_positions": "context_length", "n_embd": "embedding_length", "n_inner": "feed_forward_length"}
        names |= {"n_head": "attention.head_count", "n_layer": "block_count"}
        names |= {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
        return {new: config[old] for old, new in names.items()}
    out = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    if "head_dim" in config:
        out |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if kind == "gemma2":
        out["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        out["final_logit_softcapping"] = config["final_logit_softcapping"]
        out["attention.sliding_window"] = config["sliding_window"]
    return out


def write(path: Path, kind: str, told: dict[str, Any], tensors: Arrays, stored: str = "F32") -> Arrays:
    """A file of these tensors, matrices of fitting sides as ``stored``; what they are after dequantisation."""
    writer = gguf.GGUFWriter(path, kind)
    for key, value in told.items():
        full = f"{kind}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(full, value)
    out = {}
    for name, value in tensors.items():
        array = np.ascontiguousarray(value, dtype=np.float32)
        quantised = gguf.GGMLQuantizationType[stored if array.ndim == 2 else "F32"]
        if array.shape[-1] % gguf.GGML_QUANT_SIZES[quantised][0] or quantised.name == "F32":
            writer.add_tensor(name, array)
            out[name] = array
            continue
        data = gguf.quants.quantize(array, quantised)
        writer.add_tensor(name, data, raw_dtype=quantised)
        out[name] = gguf.quants.dequantize(data, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    config, weights, inputs, states = reference(kind)
    write(tmp_path / "x.gguf", kind, keys(kind, config), converted(kind, config, weights))
    model = load_model(tmp_path / "x.gguf")
    assert model.config.family == kind
    mine = model.hidden_states(inputs)
    # weights are exact in half precision; what the converter computes from them is rounded to float32
    np.testing.assert_allclose(mine, states, rtol=0, atol=1e-5)
    assert np.abs(states[-1] - states[0]).max() > 1.0
    X = model.hidden_states(inputs[0])
    np.testing.assert_allclose(model.map().on_tokens(X[0]), X[-1], atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["F16", "Q8_0", "Q4_1"])
def test_quantised_numbers_are_those_that_are_measured(kind: str, stored: str, tmp_path: Path) -> None:
    family = "mistral" if kind == "llama" else kind  # whose files are of the llama type
    made = random(family, dim=32, heads=4, hidden=64, vocab=11, length=12, spread=0.3, rng=1)
    weights = {name: made.checkpoint.tensor(name) for name in made.checkpoint.shapes}
    config = {
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "query_pre_attn_scalar": 8},
        **{"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 12, "intermediate_size": 64},
        **{"rms_norm_eps": made.config.eps, "rope_parameters": {"rope_theta": 10_000.0}},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        **{"n_positions": 12, "n_embd": 32, "n_inner": 64, "n_head": 4, "n_layer": 2, "layer_norm_epsilon": 1e-5},
    }
    told, tensors = keys(kind, config), converted(kind, config, weights)
    read = write(tmp_path / "x.gguf", kind, told, tensors, stored)
    checkpoint = GGUFCheckpoint(tmp_path / "x.gguf")
    assert {checkpoint.quantisation(name) for name, w in read.items() if w.ndim == 2} == {stored}
    write(tmp_path / "y.gguf", kind, told, read)
    write(tmp_path / "z.gguf", kind, told, tensors)
    ids = [3, 5, 2, 9, 4, 7]
    states, plain, exact = (load_model(tmp_path / f"{name}.gguf").hidden_states(ids) for name in "xyz")
    np.testing.assert_array_equal(states, plain)
    assert np.abs(states - exact).max() > 1e-5  # the file does hold other numbers
    if family == "mistral":
        config = {
            "model_type": family,
            "sliding_window": None,
            "num_attention_heads": 4,
            "rms_norm_eps": made.config.eps,
        }
        np.testing.assert_allclose(exact, load_model(weights, config=config).hidden_states(ids), atol=1e-5)


REFUSED = [
    ("qwen2", "attention.sliding_window", 4),
    ("qwen3", "rope.scaling.type", "yarn"),
    ("qwen3", "expert_count", 4),
    ("qwen2", "attention.causal", False),
    ("gemma2", "attention.sliding_window_pattern", 6),
    ("gemma2", "rope.freq_base_swa", 10.0),
    ("gemma2", "attention.key_length", 8),
    ("gemma2", "attention.scale", 0.25),
    ("gpt2", "context_length", 11),
    ("gpt2", "attention.head_count_kv", 1),
    ("gpt2", "use_parallel_residual", True),
    ("gpt2", "rope.freq_base", 10.0),
]


@pytest.mark.parametrize(("kind", "key", "value"), REFUSED)
def test_keys_that_change_the_map_are_refused(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    config, weights, _, _ = reference(kind)
    write(tmp_path / "x.gguf", kind, keys(kind, config) | {key: value}, converted(kind, config, weights))
    with pytest.raises(ValueError, match=rf"{kind}\.{key}") as caught:
        load_model(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value)


def test_gemma_of_46_layers_has_another_scale(tmp_path: Path) -> None:
    """The size of 27B: ``sqrt(H / d)`` in place of ``1 / sqrt(k)``."""
    config, weights, _, _ = reference("gemma2")
    inside = {name.removeprefix("layers.0."): w for name, w in weights.items() if name.startswith("layers.0.")}
    for layers in (2, 46):
        many = {name: w for name, w in weights.items() if not name.startswith("layers.")}
        many |= {f"layers.{i}.{name}": w for i in range(layers) for name, w in inside.items()}
        told = keys("gemma2", config | {"num_hidden_layers": layers})
        write(tmp_path / "x.gguf", "gemma2", told, converted("gemma2", config, many))
        wanted = {2: 6**-0.5, 46: (16 / 2) ** -0.5}[layers]
        assert load_model(tmp_path / "x.gguf").layers[0].projections.scale == pytest.approx(wanted, rel=1e-12)


def test_divisors_of_frequencies_fit_and_are_positive(tmp_path: Path) -> None:
    config, weights, _, _ = reference("llama")
    tensors = converted("llama", config, weights)
    for wrong, message in ((np.ones(3), "must have shape"), (np.array([1.0, 0.0, 1.0, 1.0]), "must be positive")):
        write(tmp_path / "x.gguf", "llama", keys("llama", config), tensors | {"rope_freqs.weight": wrong})
        with pytest.raises(ValueError, match=rf"rope_freqs\.weight .* {message}"):
            load_model(tmp_path / "x.gguf")
    config, weights, _, _ = reference("qwen2")  # whose programs do not read them
    tensors = converted("qwen2", config, weights) | {"rope_freqs.weight": np.full(4, 2.0)}
    write(tmp_path / "y.gguf", "qwen2", keys("qwen2", config), tensors)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight .* must hold ones"):
        load_model(tmp_path / "y.gguf")


def test_a_foreign_tensor_is_named(tmp_path: Path) -> None:
    config, weights, _, _ = reference("qwen3")
    tensors = converted("qwen3", config, weights) | {"blk.1.ffn_gate_inp.weight": np.ones((2, 16))}
    write(tmp_path / "x.gguf", "qwen3", keys("qwen3", config), tensors)
    with pytest.raises(ValueError, match=r"'blk\.1\.ffn_gate_inp\.weight'"):
        load_model(tmp_path / "x.gguf")
