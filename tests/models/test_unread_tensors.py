"""No tensor of a checkpoint is ignored: each is used, holds what is used in its place, or is named in an error."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn
from gguf_writer import BASE, EPS, HEADS, KV, write

from otattn.data import load_layer
from otattn.models import Transformer, load_model

IDS = np.array([3, 1, 16, 0, 7, 7, 2])
LLAMA = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": EPS,
    "rope_theta": BASE,
    "model_type": "llama",
}
BIASED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def tiny(kind: str, rng: np.random.Generator | None = None) -> syn.Weights:
    rng = np.random.default_rng(7) if rng is None else rng
    return {"bert": syn.bert_weights, "gpt2": syn.gpt2_weights, "llama": syn.llama_weights}[kind](rng)


def opened(kind: str, w: Any, **config: Any) -> Transformer:
    if kind == "llama":
        return load_model(w, config=LLAMA | config)
    return getattr(syn, kind)(w, config={"model_type": kind} | config, num_heads=3, eps=EPS)


def with_biases(parts: tuple[str, ...], layers: tuple[int, ...] = (0, 1)) -> syn.Weights:
    rng, w = np.random.default_rng(3), tiny("llama")
    names = [f"model.layers.{i}.{part}" for i in layers for part in parts]
    return w | {f"{name}.bias": rng.normal(size=len(w[f"{name}.weight"])) for name in names}


ATTENTION = tuple(f"self_attn.{p}_proj" for p in "qkvo")


@pytest.mark.parametrize(
    "parts", [BIASED, BIASED[:1], BIASED[1:2], BIASED[2:], ATTENTION, ATTENTION[:3], ATTENTION + BIASED]
)
def test_biases_of_llama_are_used(parts: tuple[str, ...]) -> None:
    w = with_biases(parts)
    flags = {"mlp_bias": True} if set(BIASED) <= set(parts) else {}
    flags |= {"attention_bias": True} if set(ATTENTION) <= set(parts) else {}
    expected = syn.llama_forward(w, IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    model = opened("llama", w, **flags)
    np.testing.assert_allclose(model.hidden_states(IDS), expected, atol=1e-12)
    plain = syn.llama_forward(tiny("llama"), IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    assert np.abs(np.array(expected) - plain).max() > 0.1
    # the biased layer as a token map, with its Jacobian
    layer, X = model.layers[0], np.array(expected)[0]
    rng = np.random.default_rng(0)
    v, h = rng.normal(size=X.shape), 1e-6
    slope = (layer.forward((X + h * v)[None]) - layer.forward((X - h * v)[None]))[0] / (2 * h)
    np.testing.assert_allclose(layer.block.jacobian(X).jvp(v), slope, atol=1e-6 * np.abs(slope).max())


@pytest.mark.parametrize(("parts", "key"), [(BIASED, "mlp_bias"), (ATTENTION, "attention_bias")])
def test_bias_flags_are_compared_with_the_tensors(parts: tuple[str, ...], key: str) -> None:
    for weights, flag in ((with_biases(parts), False), (tiny("llama"), True), (with_biases(parts[:2]), True)):
        with pytest.raises(ValueError, match=f"{key} .* must be"):
            opened("llama", weights, **{key: flag})
    with pytest.raises(ValueError, match=f"{key} .* must be"):  # in one layer of two
        opened("llama", with_biases(parts, layers=(1,)), **{key: True})


STRANGE = {
    "llama": (
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "self_attn.q_proj.lora_A.weight",
        "self_attn.q_proj.lora_B.default.weight",
        "self_attn.sinks",
        "self_attn.q_proj.weight_scale",
        "self_attn.q_proj.qweight",
        "self_attn.k_proj.weight.absmax",
        "mlp.experts.0.gate_proj.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "input_layernorm.bias",
        "self_attn.rotary_emb.attention_scaling",
    ),
    "bert": (
        "attention.self.distance_embedding.weight",
        "attention.self.query.lora_A.default.weight",
        "attention.output.adapters.task.adapter_up.weight",
        "crossattention.self.query.weight",
        "intermediate.dense.weight_scale",
        "attention.self.query.weight_zero_point",
        "output.LayerNorm.running_mean",
    ),
    "gpt2": (
        "attn.c_attn.lora_A",
        "crossattention.c_attn.weight",
        "attn.q_norm.weight",
        "mlp.c_fc.SCB",
        "ln_cross_attn.weight",
        "attn.rotary_emb.inv_freq",
    ),
}
LAYER = {"llama": "model.layers.1.", "bert": "encoder.layer.1.", "gpt2": "h.1."}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in STRANGE.items() for name in names])
def test_strange_tensors_in_a_layer_are_named(kind: str, name: str) -> None:
    full = LAYER[kind] + name
    with pytest.raises(ValueError) as caught:
        opened(kind, tiny(kind) | {full: np.ones(4)})
    assert repr(full) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "model.embed_positions.weight"),
        ("llama", "model.embed_tokens.lora_embedding_A"),
        ("llama", "model.vision_tower.weight"),
        ("bert", "embeddings.position_embeddings.bias"),
        ("bert", "embeddings_project.weight"),
        ("bert", "encoder.rel_pos_bias.weight"),
        ("gpt2", "wte.bias"),
        ("gpt2", "drop.p"),
        ("gpt2", "ln_0.weight"),
    ],
)
def test_strange_tensors_outside_of_the_layers_are_named(kind: str, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        opened(kind, tiny(kind) | {name: np.ones(4)})
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ["lm_head.weight", "score.weight"]),
        (
            "bert",
            ["pooler.dense.weight", "pooler.dense.bias", "cls.predictions.transform.dense.weight", "classifier.bias"],
        ),
        ("gpt2", ["lm_head.weight", "score.weight", "multiple_choice_head.summary.weight"]),
    ],
)
def test_heads_after_the_last_layer_change_nothing(kind: str, names: list[str]) -> None:
    plain = opened(kind, tiny(kind)).hidden_states(IDS)
    more = opened(kind, tiny(kind) | {name: np.ones((2, 2)) for name in names}).hidden_states(IDS)
    np.testing.assert_array_equal(plain, more)


def frequencies(width: int, base: float) -> np.ndarray:
    return np.array([base ** (-2 * t / width) for t in range(width // 2)])


BUFFERS = [
    ("bert", "embeddings.position_ids", np.arange(10)[None], np.arange(10)[::-1]),
    ("bert", "embeddings.token_type_ids", np.zeros((1, 10), int), np.ones((1, 10), int)),
    ("gpt2", "h.1.attn.bias", np.tri(10, dtype=bool)[None, None], np.tri(10, k=3, dtype=bool)[None, None]),
    ("gpt2", "h.0.attn.bias", np.tri(10)[None, None].astype(np.float32), np.ones((1, 1, 10, 10))),
    ("gpt2", "h.0.attn.masked_bias", np.array(-1e4), np.array(-1.0)),
    ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq", frequencies(8, BASE), frequencies(8, BASE) / 4),
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", frequencies(8, BASE), frequencies(8, 10_000.0)),
    ("llama", "model.rotary_emb.inv_freq", frequencies(8, BASE).astype(np.float16), frequencies(4, BASE)),
]


@pytest.mark.parametrize(("kind", "name", "right", "wrong"), BUFFERS)
def test_buffers_hold_what_is_used_in_their_place(kind: str, name: str, right: np.ndarray, wrong: np.ndarray) -> None:
    plain = opened(kind, tiny(kind)).hidden_states(IDS)
    np.testing.assert_array_equal(opened(kind, tiny(kind) | {name: right}).hidden_states(IDS), plain)
    with pytest.raises(ValueError, match=f"{name} .* must hold"):
        opened(kind, tiny(kind) | {name: wrong}).hidden_states(IDS)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, bool])
def test_integers_are_no_weights(kind: str, dtype: type) -> None:
    w = tiny(kind)
    name = next(n for n in w if n.startswith(LAYER[kind].replace("1", "0")) and w[n].ndim == 2)
    with pytest.raises(ValueError, match=f"{name} .* must hold floating-point numbers"):
        opened(kind, w | {name: np.ones(w[name].shape, dtype)}).hidden_states(IDS)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_missing_layers_and_tensors(kind: str) -> None:
    make = {"bert": syn.bert_weights, "gpt2": syn.gpt2_weights, "llama": syn.llama_weights}[kind]
    w = make(np.random.default_rng(0), layers=4)
    stem = LAYER[kind]
    with pytest.raises(ValueError, match="no layer 1 of 4"):
        opened(kind, {n: v for n, v in w.items() if not n.startswith(stem)})
    last = {n: v for n, v in w.items() if not n.startswith(stem.replace("1", "3"))}
    key = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    assert opened(kind, last).num_layers == 3
    with pytest.raises(ValueError, match=f"{key} .* must be 3"):
        opened(kind, last, **{key: 4})
    for name in [n for n in w if n.startswith(stem)]:
        # every tensor of a llama layer is a weight; its biases may be absent
        with pytest.raises(ValueError) as caught:
            opened(kind, {n: v for n, v in w.items() if n != name})
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_shapes_that_do_not_fit_are_named(kind: str) -> None:
    w = tiny(kind)
    for name in [n for n in w if n.startswith(LAYER[kind])]:
        with pytest.raises(ValueError) as caught:
            opened(kind, w | {name: np.ones(tuple(s + 1 for s in w[name].shape))})
        assert name in str(caught.value)


def test_two_spellings_of_a_norm_are_refused() -> None:
    w = tiny("bert")
    with pytest.raises(ValueError, match="received both"):
        opened("bert", w | {"encoder.layer.0.output.LayerNorm.gamma": np.ones(12)})


@pytest.mark.parametrize("prefix", ["roberta.", "electra.", "model.xlm_roberta.", "vision_model."])
def test_prefixes_of_other_architectures(prefix: str) -> None:
    with pytest.raises(ValueError, match="another architecture"):
        opened("bert", syn.prefixed(tiny("bert"), prefix))


EXTRA = {
    "blk.0.attn_sinks": np.ones(4),
    "blk.1.attn_sinks.weight": np.ones(4),
    "blk.0.post_attention_norm.weight": np.ones(32),
    "blk.0.post_ffw_norm.weight": np.ones(32),
    "blk.0.attn_q_norm.weight": np.ones(8),
    "blk.1.ffn_gate_inp.weight": np.ones((2, 32)),
    "blk.0.attn_q.scale": np.ones(1),
    "blk.0.attn_norm.bias": np.ones(32),
    "position_embd.weight": np.ones((5, 32)),
    "blk.0.attn_q.weight.lora_a": np.ones((2, 32)),
}


@pytest.mark.parametrize("name", EXTRA)
def test_strange_tensors_of_gguf_are_named(name: str, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", tiny("llama"), extra={name: EXTRA[name]})
    with pytest.raises(ValueError) as caught:
        load_model(tmp_path / "x.gguf")
    assert repr(name) in str(caught.value)
    assert "x.gguf" in str(caught.value)


def test_biases_and_frequencies_of_gguf(tmp_path: Path) -> None:
    w = with_biases((*ATTENTION, *BIASED))
    write(tmp_path / "x.gguf", w, extra={"rope_freqs.weight": np.ones(4), "output.weight": np.ones((17, 32))})
    expected = syn.llama_forward(w, IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    # weights are rounded to float32
    np.testing.assert_allclose(load_model(tmp_path / "x.gguf").hidden_states(IDS), expected, atol=1e-4)
    divisors = np.array([1.0, 1.0, 4.0, 8.0])
    write(tmp_path / "y.gguf", w, extra={"rope_freqs.weight": divisors})
    model = load_model(tmp_path / "y.gguf")
    np.testing.assert_allclose(model.config.rotary.frequencies, BASE ** (-np.arange(4) / 4) / divisors, rtol=1e-14)
    assert np.abs(model.hidden_states(IDS) - expected).max() > 1e-3


def test_adapters_in_a_folder_are_refused(tmp_path: Path) -> None:
    syn.write_safetensors(tmp_path / "model.safetensors", tiny("llama"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path).num_layers == 2
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter \(adapter_config\.json\)"):
        load_model(tmp_path)
    assert load_model(tmp_path / "model.safetensors").num_layers == 2


@pytest.mark.parametrize(
    "name", ["key_biass", "query_scale", "q_norm", "Bias", "mlp_weight", "num_head", "hiden_states", "a"]
)
def test_misspelt_arrays_of_a_layer_are_named(name: str, tmp_path: Path) -> None:
    weights = {f"{part}_weight": np.eye(4) for part in ("query", "key", "value")}
    np.savez(tmp_path / "right.npz", num_heads=2, key_bias=np.ones(4), **weights)
    assert len(load_layer(tmp_path / "right.npz").heads) == 2
    np.savez(tmp_path / "right.npz", num_heads=2, notes=np.ones(4), labels=np.ones(3), **weights)
    assert len(load_layer(tmp_path / "right.npz").heads) == 2
    np.savez(tmp_path / "wrong.npz", num_heads=2, **weights, **{name: np.ones(4)})
    with pytest.raises(ValueError, match=rf"arrays of a layer in .*wrong\.npz must be among .* received {name}"):
        load_layer(tmp_path / "wrong.npz")
