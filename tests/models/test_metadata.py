"""Every key of the metadata of a GGUF file is used, compared with the tensors, neutral, harmless, or refused by its name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic as syn
from gguf_writer import BASE, EPS, HEADS, KV, gguf, write

from otattn.models import load_model

IDS = np.array([3, 1, 16, 0, 7, 7, 2])
WEIGHTS = syn.llama_weights(np.random.default_rng(7))


def metadata(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


GGUF_REFUSED = [
    ("llama.rope.scaling.factor", 4.0),
    ("llama.rope.scale_linear", 4.0),
    ("llama.rope.scaling.type", "linear"),
    ("llama.rope.scaling.type", "yarn"),
    ("llama.rope.scaling.attn_factor", 1.5),
    ("llama.rope.scaling.yarn_ext_factor", 1.0),
    ("llama.rope.freq_base_swa", 10.0),
    ("llama.rope.dimension_sections", [2, 2]),
    ("llama.attention.sliding_window", 4),
    ("llama.attention.scale", 0.25),
    ("llama.attention.causal", False),
    ("llama.attention.clamp_kqv", 8.0),
    ("llama.attention.max_alibi_bias", 8.0),
    ("llama.attn_logit_softcapping", 50.0),
    ("llama.expert_count", 8),
    ("llama.embedding_scale", 12.0),
    ("llama.residual_scale", 0.5),
    ("llama.use_parallel_residual", True),
    ("llama.block_count", 3),
    ("llama.embedding_length", 33),
    ("llama.feed_forward_length", 65),
    ("llama.feed_forward_length", [64, 65]),
    ("llama.vocab_size", 18),
    ("llama.attention.key_length", 16),
    ("llama.attention.value_length", 16),
    ("llama.rope.dimension_count", 10),
    ("llama.rope.dimension_count", 0),
    ("llama.unheard_of", 1),
    ("rope.scaling.factor", 4.0),
    ("adapter.type", "lora"),
    ("mamba.x", 1),
    ("general.type", "adapter"),
]
GGUF_NEUTRAL = [
    ("llama.rope.scaling.type", "none"),
    ("llama.rope.scaling.factor", 1.0),
    ("llama.rope.scale_linear", 1.0),
    ("llama.rope.scaling.original_context_length", 20),
    ("llama.attention.causal", True),
    ("llama.attention.key_length", 8),
    ("llama.attention.scale", 8.0**-0.5),
    ("llama.feed_forward_length", [64, 64]),
    ("llama.block_count", 2),
    ("llama.expert_count", 0),
    ("llama.rope.dimension_count", 8),
    ("general.author", "a"),
    ("quantize.imatrix.entries_count", 100),
    ("some.switch", False),
]


@pytest.mark.parametrize(("key", "value"), GGUF_REFUSED)
def test_metadata_that_changes_the_map_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", WEIGHTS, change=lambda writer: metadata(writer, key, value))
    with pytest.raises(ValueError) as caught:
        load_model(tmp_path / "x.gguf")
    assert key in str(caught.value)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(("key", "value"), GGUF_NEUTRAL)
def test_neutral_metadata_passes(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", WEIGHTS, change=lambda writer: metadata(writer, key, value))
    expected = syn.llama_forward(WEIGHTS, IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    # weights are rounded to float32
    np.testing.assert_allclose(load_model(tmp_path / "x.gguf").hidden_states(IDS), expected, atol=1e-5)


@pytest.mark.parametrize("value", [[KV, KV], [HEADS, KV], [KV], "2", 2.0, True])
def test_list_valued_numbers(value: Any, tmp_path: Path) -> None:
    """One equal entry a layer is that entry; anything else names the key."""
    file, key = tmp_path / "x.gguf", "llama.attention.head_count_kv"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_head_count(HEADS)
    metadata(writer, key, value)
    writer.add_layer_norm_rms_eps(EPS)
    rows = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "ffn_gate": 64, "ffn_up": 64}
    writer.add_tensor("token_embd.weight", np.ones((17, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for i in range(2):
        for name, count in rows.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones((count, 32), np.float32))
        writer.add_tensor(f"blk.{i}.attn_output.weight", np.ones((32, 32), np.float32))
        writer.add_tensor(f"blk.{i}.ffn_down.weight", np.ones((32, 64), np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if value == [KV, KV]:
        assert load_model(file).config.num_kv_heads == KV
        return
    with pytest.raises(ValueError) as caught:
        load_model(file)
    assert key in str(caught.value)


def test_a_gguf_file_carries_its_own_configuration(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", WEIGHTS)
    with pytest.raises(ValueError, match="carries its own"):
        load_model(tmp_path / "x.gguf", config={"num_attention_heads": HEADS})
    with pytest.raises(ValueError, match="num_heads must be left out"):
        load_model(tmp_path / "x.gguf", num_heads=3)


def test_an_odd_number_of_turned_coordinates_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", WEIGHTS, change=lambda writer: writer.add_rope_dimension_count(7))
    with pytest.raises(ValueError, match=r"x\.gguf must be even, received 7 of 8"):
        load_model(tmp_path / "x.gguf")


def test_part_of_the_coordinates_is_turned(tmp_path: Path) -> None:
    """rope.dimension_count is honoured: the other coordinates of queries and keys stay as they are."""
    write(tmp_path / "x.gguf", WEIGHTS, change=lambda writer: writer.add_rope_dimension_count(4))
    model = load_model(tmp_path / "x.gguf")
    assert model.config.rotary is not None
    assert len(model.config.rotary.frequencies) == 2
    states, seen = model.hidden_states(IDS), model.attention_inputs(IDS)
    layer = model.layers[0]
    by_heads = sum(h.on_tokens(seen[0]) @ W.T for h, W in zip(layer.heads, layer.outputs, strict=True))
    np.testing.assert_allclose(layer.projections(seen[0][None])[0], by_heads, atol=1e-10)
    whole = syn.llama_forward(WEIGHTS, IDS, heads=HEADS, kv=KV, eps=EPS, base=BASE)
    assert np.abs(states - whole).max() > 0.1
