"""Every key of a configuration is used, compared with the tensors, neutral, harmless, or refused by its name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn
from gguf_writer import BASE, EPS, HEADS, KV

from otattn.models import Transformer, load_model
from otattn.models.keys import neutral

IDS = np.array([3, 1, 16, 0, 7, 7, 2])
WEIGHTS = {
    "bert": syn.bert_weights(np.random.default_rng(7)),
    "gpt2": syn.gpt2_weights(np.random.default_rng(7)),
    "llama": syn.llama_weights(np.random.default_rng(7)),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "num_attention_heads": 3, "layer_norm_eps": EPS},
    "gpt2": {"model_type": "gpt2", "n_head": 3, "layer_norm_epsilon": EPS},
    "llama": {
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "rms_norm_eps": EPS,
        "rope_theta": BASE,
    },
}
OPEN = {"bert": syn.bert, "gpt2": syn.gpt2, "llama": load_model}


def opened(kind: str, **config: Any) -> Transformer:
    return OPEN[kind](WEIGHTS[kind], config=CONFIGS[kind] | config)


SCALED = [
    {"rope_parameters": {"type": "linear", "factor": "4", "rope_theta": BASE}},
    {"rope_parameters": {"rope_type": "linear", "factor": -4.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": -1.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 1.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 1.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_scaling": {"factor": 4.0}},
    {"rope_scaling": {"type": "linear"}},
    {"rope_scaling": {"type": "default", "factor": 4.0}},
    {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 1.0}},
    {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
    {"rope_scaling": {"type": ["linear"], "factor": 1.0}},
    {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 1]}},
    {"rope_scaling": {"rope_type": "default", "attention_factor": 1.2}},
    {"rope_scaling": "linear"},
    {"rope_scaling": 4.0},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.25},
    {"rope_scaling_factor": 4.0},
    {"rope_ratio": 2.0},
    {"rope_interleaved": True},
    {"default_theta": 500.0},
]


@pytest.mark.parametrize("config", SCALED, ids=json.dumps)
def test_other_rotary_positions_are_refused_by_name(config: dict) -> None:
    with pytest.raises(ValueError) as caught:
        opened("llama", **config)
    assert next(iter(config)) in str(caught.value)


def test_bases_that_contradict_one_another_are_refused() -> None:
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match=r"rope_theta .* must be one value"):
            opened("llama", **{key: {"rope_type": "default", "rope_theta": 2 * BASE}})
    inner = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None}
    expected = syn.llama_forward(WEIGHTS["llama"], IDS, heads=HEADS, kv=KV, eps=EPS, base=7.0)
    np.testing.assert_allclose(opened("llama", **inner).hidden_states(IDS), expected, atol=1e-12)


NEUTRAL: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_scaling": {"rope_type": "default", "factor": 1, "original_max_position_embeddings": 4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": 1.0}},
        {"partial_rotary_factor": 1.0},
        {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "head_dim": 8, "sliding_window": None},
        {"layer_types": ["full_attention"] * 2, "is_causal": True, "use_cache": False},
        {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "transformers_version": "4.40.1"},
        {
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
            "pad_token_id": -1,
            "rope_interleaved": False,
            "is_llama_config": True,
        },
        {"some_new_switch": False, "another": None, "list": [], "text": ""},
        {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 17},
    ],
    "bert": [
        {"position_embedding_type": "absolute", "is_decoder": False, "pruned_heads": {}, "type_vocab_size": 2},
        {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.1, "classifier_dropout": None},
        {"directionality": "bidi", "pooler_type": "first_token_transform", "gradient_checkpointing": False},
        {"hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 20, "max_position_embeddings": 10},
        {"architectures": ["BertForMaskedLM"], "hidden_act": "gelu"},
    ],
    "gpt2": [
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": True},
        {"n_embd": 12, "n_layer": 2, "n_positions": 10, "n_ctx": 10, "n_inner": None, "vocab_size": 17},
        {"n_inner": 48, "hidden_size": 12, "num_attention_heads": 3},
        {"summary_type": "cls_index", "task_specific_params": {"text-generation": {"do_sample": True}}},
    ],
}


@pytest.mark.parametrize(("kind", "config"), [(k, c) for k, cs in NEUTRAL.items() for c in cs], ids=str)
def test_neutral_values_pass(kind: str, config: dict) -> None:
    np.testing.assert_array_equal(opened(kind, **config).hidden_states(IDS), opened(kind).hidden_states(IDS))


REFUSED: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"sliding_window": 4},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"attention_multiplier": 0.1},
        {"residual_multiplier": 0.5},
        {"embedding_multiplier": 12.0},
        {"query_pre_attn_scalar": 64},
        {"attn_logit_softcapping": 50.0},
        {"is_causal": False},
        {"is_causal": None},
        {"head_dim": 16},
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"intermediate_size": 65},
        {"vocab_size": 18},
        {"vocab_size": "17"},
        {"num_hidden_layers": 2.0},
        {"hidden_act": "gelu_10"},
        {"hidden_act": ["silu"]},
        {"num_local_experts": 8},
        {"no_rope_layers": [1, 0]},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"auto_map": {"AutoModel": "x.Y"}},
        {"per_layer_config": {"0": {"hidden_act": "relu"}}},
        {"text_config": {"hidden_size": 32}},
        {"architectures": ["GemmaForCausalLM"]},
        {"model_type": "olmo"},
        {"tie_last_hidden_states": False},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": True},
        {"rms_norm_eps": "1e-5"},
        {"rope_theta": 0.0},
        {"rope_theta": True},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 0},
        {"max_position_embeddings": -1},
        {"unheard_of": 1},
    ],
    "bert": [
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"is_causal": True},
        {"add_cross_attention": True},
        {"pruned_heads": {"0": [1]}},
        {"type_vocab_size": 1},
        {"max_position_embeddings": 12},
        {"hidden_size": 24},
        {"intermediate_size": 21},
        {"hidden_act": "quick_gelu"},
        {"embedding_size": 8},
        {"model_type": "albert"},
        {"architectures": ["RobertaModel"]},
        {"architectures": "BertGenerationEncoder"},
        {"alibi": True},
    ],
    "gpt2": [
        {"scale_attn_weights": False},
        {"scale_attn_weights": None},
        {"scale_attn_by_inverse_layer_idx": True},
        {"n_embd": 13},
        {"hidden_size": 13},
        {"n_layer": 1},
        {"n_positions": 11},
        {"n_ctx": 1024},
        {"n_inner": 47},
        {"add_cross_attention": True},
        {"activation_function": "gelu_10"},
        {"multi_query": True},
        {"model_type": "gpt_bigcode"},
        {"num_attention_heads": 4},
    ],
}


@pytest.mark.parametrize(("kind", "config"), [(k, c) for k, cs in REFUSED.items() for c in cs], ids=str)
def test_what_changes_the_map_is_refused_with_key_and_file(kind: str, config: dict, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the extra `models` (safetensors) is not installed")
    syn.write_safetensors(tmp_path / "model.safetensors", WEIGHTS[kind])
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind] | config))
    with pytest.raises(ValueError) as caught:
        OPEN[kind](tmp_path)
    assert next(iter(config)) in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_a_missing_model_type_is_no_licence() -> None:
    nameless = {key: value for key, value in CONFIGS["llama"].items() if key != "model_type"}
    plain = load_model(WEIGHTS["llama"], config=nameless).hidden_states(IDS)
    np.testing.assert_array_equal(plain, opened("llama").hidden_states(IDS))
    stripped = {"transformers_version": "4.47.0"}  # which writes model_type; Helium has the same tensors
    for config in (
        {"hidden_act": "gelu_pytorch_tanh"},
        {"sliding_window": 4096},
        {"architectures": ["OlmoModel"]},
        stripped,
    ):
        with pytest.raises(ValueError):
            load_model(WEIGHTS["llama"], config=nameless | config)
    one_type = WEIGHTS["bert"] | {"embeddings.token_type_embeddings.weight": np.ones((1, 12))}
    for weights, config in ((one_type, {}), (WEIGHTS["bert"], {"pad_token_id": 1})):
        with pytest.raises(ValueError, match="RoBERTa"):
            syn.bert(weights, config=config, num_heads=3)
        assert syn.bert(weights, config=config | {"model_type": "bert"}, num_heads=3).num_layers == 2


def test_values_that_are_given_win_over_the_configuration() -> None:
    model = load_model(WEIGHTS["bert"], config=CONFIGS["bert"] | {"hidden_act": "relu"}, num_heads=2)
    assert (model.config.num_heads, model.config.eps, model.config.activation) == (2, EPS, "relu")


def test_one_is_not_true() -> None:
    assert neutral(1.0)(True, {}) is not None
    assert neutral(True)(1, {}) is not None
    assert neutral(1.0)(1, {}) is None
    assert neutral(0.0)(None, {}) is None
    assert neutral(True)(None, {}) is not None
    assert neutral(0.0)(np.zeros(2), {}) is not None
